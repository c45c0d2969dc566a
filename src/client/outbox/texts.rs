//! The statements, with the name of the table and the database's clock filled in.

use sqlx::{AssertSqlSafe, SqlSafeStr, SqlStr};

/// What differs from database to database.
#[derive(Debug, Clone, Copy)]
pub struct Dialect {
    /// The time of the statement, not of the transaction, in microseconds.
    pub(super) now: &'static str,
    /// Deletes what `{due}` selects, at most `$2` rows.
    pub(super) purge: &'static str,
    /// Gives what `{waiting}` selects its turn.
    pub(super) take_turns: &'static str,
    /// A reference, of the bytes `$2` that are stored of it, whether they are text or not.
    pub(super) stored: &'static str,
    pub(super) schema: &'static str,
}

#[derive(Debug)]
pub(super) struct Texts {
    pub(super) begin: SqlStr,
    pub(super) find: SqlStr,
    pub(super) list: SqlStr,
    pub(super) list_after: SqlStr,
    pub(super) list_after_damaged: SqlStr,
    pub(super) pending: SqlStr,
    pub(super) overdue: SqlStr,
    pub(super) held: SqlStr,
    pub(super) now: SqlStr,
    pub(super) take_turns: SqlStr,
    pub(super) count_attempt: SqlStr,
    pub(super) defer: SqlStr,
    pub(super) hold: SqlStr,
    pub(super) settle: SqlStr,
    pub(super) reopen: SqlStr,
    pub(super) purge: SqlStr,
    pub(super) counts: SqlStr,
    #[cfg_attr(
        not(feature = "sealing"),
        expect(dead_code, reason = "without sealing there are no keys to count by")
    )]
    pub(super) sealed_with: SqlStr,
    pub(super) check: SqlStr,
    pub(super) schema: SqlStr,
}

/// In the order in which a row is read, the large ones last.
const COLUMNS: &str = "reference, key, method, uri, state, begun, attempts, attempted, not_before, held, settled, \
                       status, token, request, result, {now}";

/// The conflicting row is written as it is, only so that it is returned: also where it was committed after this
/// statement began, which no SELECT would see. The token tells the new row from one that was there.
const BEGIN: &str =
    "INSERT INTO {table} (reference, key, method, uri, request, state, begun, turn, attempts, token)
VALUES ($1, $2, $3, $4, $5, 1, {now}, {now}, 0, $6)
ON CONFLICT (reference) DO UPDATE SET reference = excluded.reference
RETURNING {columns}";

const FIND: &str = "SELECT {columns} FROM {table} WHERE reference = $1";

const LIST: &str = "SELECT {columns} FROM {table} WHERE state = $1 ORDER BY reference LIMIT $2";

const LIST_AFTER: &str = "SELECT {columns} FROM {table} WHERE state = $1 AND reference > {stored}
ORDER BY reference LIMIT $3";

const PENDING: &str = "SELECT {columns} FROM {table}
WHERE state = 1 AND held IS NULL AND begun > {now} - $1 ORDER BY begun, reference LIMIT $2";

const OVERDUE: &str = "SELECT {columns} FROM {table} WHERE state = 1 AND begun <= {now} - $1
ORDER BY begun, reference LIMIT $2";

const HELD: &str = "SELECT {columns} FROM {table}
WHERE state = 1 AND held IS NOT NULL AND begun > {now} - $1 ORDER BY begun, reference LIMIT $2";

const NOW: &str = "SELECT {now}";

/// Whoever has not had a turn since `$2`, the longest wait first, so that what fails again and again holds up nobody
/// else. A turn in the future is that of a clock that was ahead.
const WAITING: &str = "SELECT reference FROM {table}
WHERE state = 1 AND begun > {now} - $1 AND (turn <= $2 OR turn > {now})
AND (not_before IS NULL OR not_before <= {now}) AND held IS NULL
ORDER BY turn, reference LIMIT $3";

/// A damaged count must not keep its row from being sent. What the server asked for stays: this may never be sent.
const COUNT_ATTEMPT: &str = "UPDATE {table}
SET attempts = CASE WHEN attempts < 9223372036854775807 THEN attempts + 1 ELSE attempts END,
attempted = {now}, turn = {now}
WHERE reference = $1 AND key = $2 AND state = 1 AND held IS NULL AND begun > {now} - $3
RETURNING attempts";

/// A longer wait, which another attempt was told, stays.
const DEFER: &str = "UPDATE {table} SET not_before = {now} + $3
WHERE reference = $1 AND token = $2 AND state = 1
AND (not_before IS NULL OR not_before < {now} + $3)";

/// By the key, whatever was reopened since this was sent: the server has run it. What was said to have failed has not,
/// as far as anybody knows.
const HOLD: &str = "UPDATE {table}
SET held = {now}, state = 1, settled = NULL, status = NULL, result = NULL
WHERE reference = $1 AND key = $2 AND (state = 3 OR state = 1 AND held IS NULL)
RETURNING {columns}";

/// Forwards only: what is done stays done, and what failed may turn out to be done. That it failed says nothing of the
/// run that it is held for, unless somebody says so (`$7`) who has looked it up.
const SETTLE: &str = "UPDATE {table}
SET state = $3, settled = {now}, status = $4, result = $5, not_before = NULL, held = NULL
WHERE reference = $1 AND token = $2 AND (state = 1 OR state = 3 AND $3 = 2) AND attempts <= $6
AND (held IS NULL OR $3 = 2 OR $7 = 1)
RETURNING {columns}";

/// What was sent before is over, so that the attempts are counted anew.
const REOPEN: &str = "UPDATE {table}
SET state = 1, token = $3, attempts = 0, settled = NULL, status = NULL, result = NULL, not_before = NULL, held = NULL
WHERE reference = $1 AND (state = 3 OR state = 1 AND held IS NOT NULL) AND begun > {now} - $2
RETURNING {columns}";

const DUE: &str = "SELECT reference FROM {table}
WHERE state IN (2, 3) AND settled <= {now} - $1 AND begun <= {now} - $1 ORDER BY settled LIMIT $2";

const COUNTS: &str =
    "SELECT count(*) FILTER (WHERE state = 1 AND held IS NULL AND begun > {now} - $1),
count(*) FILTER (WHERE state = 1 AND begun <= {now} - $1),
count(*) FILTER (WHERE state = 2), count(*) FILTER (WHERE state = 3),
count(*) FILTER (WHERE state = 1 AND held IS NOT NULL AND begun > {now} - $1) FROM {table}";

/// A sealed value begins with the id of its key.
const SEALED_WITH: &str = "SELECT count(*) FROM {table}
WHERE substr(request, 1, CAST($2 AS integer)) = $1 OR substr(result, 1, CAST($2 AS integer)) = $1";

const CHECK: &str = "SELECT {columns}, turn FROM {table} LIMIT 0";

impl Texts {
    pub(super) fn new(dialect: Dialect, table: &str) -> Self {
        let quoted = format!("\"{table}\"");
        let fill = |text: &str| {
            let text = text.replace("{due}", DUE).replace("{waiting}", WAITING);
            let text = text.replace("{stored}", dialect.stored);
            let text = text.replace("{columns}", COLUMNS);
            let text = text.replace("{now}", dialect.now);
            AssertSqlSafe(text.replace("{table}", &quoted)).into_sql_str()
        };
        Self {
            begin: fill(BEGIN),
            find: fill(FIND),
            list: fill(LIST),
            list_after: fill(&LIST_AFTER.replace("{stored}", "$2")),
            list_after_damaged: fill(LIST_AFTER),
            pending: fill(PENDING),
            overdue: fill(OVERDUE),
            held: fill(HELD),
            now: fill(NOW),
            take_turns: fill(dialect.take_turns),
            count_attempt: fill(COUNT_ATTEMPT),
            defer: fill(DEFER),
            hold: fill(HOLD),
            settle: fill(SETTLE),
            reopen: fill(REOPEN),
            purge: fill(dialect.purge),
            counts: fill(COUNTS),
            sealed_with: fill(SEALED_WITH),
            check: fill(CHECK),
            // The names of the indexes are made of the table's, within the quotes.
            schema: AssertSqlSafe(dialect.schema.replace("{table}", table)).into_sql_str(),
        }
    }
}

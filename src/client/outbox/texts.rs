//! The statements, with the name of the table and the database's clock filled in.

use sqlx::{AssertSqlSafe, SqlSafeStr, SqlStr};

/// What differs from database to database.
#[derive(Debug, Clone, Copy)]
pub struct Dialect {
    /// The time of the statement, not of the transaction, in microseconds.
    pub(super) now: &'static str,
    /// Deletes what `{due}` selects, at most `$2` rows.
    pub(super) purge: &'static str,
    pub(super) schema: &'static str,
}

#[derive(Debug)]
pub(super) struct Texts {
    pub(super) begin: SqlStr,
    pub(super) find: SqlStr,
    pub(super) pending: SqlStr,
    pub(super) overdue: SqlStr,
    pub(super) turns: SqlStr,
    pub(super) count_attempt: SqlStr,
    pub(super) settle: SqlStr,
    pub(super) reopen: SqlStr,
    pub(super) purge: SqlStr,
    pub(super) counts: SqlStr,
    pub(super) check: SqlStr,
    pub(super) schema: SqlStr,
}

/// In the order in which a row is read.
const COLUMNS: &str = "reference, key, method, uri, request, state, begun, attempts, attempted, settled, status, \
                       result, token, {now}";

/// The conflicting row is written as it is, only so that it is returned: also where it was committed after this
/// statement began, which no SELECT would see. The token tells the new row from one that was there.
const BEGIN: &str =
    "INSERT INTO {table} (reference, key, method, uri, request, state, begun, attempts, token)
VALUES ($1, $2, $3, $4, $5, 1, {now}, 0, $6)
ON CONFLICT (reference) DO UPDATE SET reference = excluded.reference
RETURNING {columns}";

const FIND: &str = "SELECT {columns} FROM {table} WHERE reference = $1";

const PENDING: &str = "SELECT {columns} FROM {table} WHERE state = 1 AND begun > {now} - $1
ORDER BY begun, reference LIMIT $2";

const OVERDUE: &str = "SELECT {columns} FROM {table} WHERE state = 1 AND begun <= {now} - $1
ORDER BY begun, reference LIMIT $2";

/// In the order in which they were last tried, so that what fails again and again holds up nobody else.
const TURNS: &str = "SELECT reference, coalesce(attempted, begun) FROM {table}
WHERE state = 1 AND begun > {now} - $1 AND (coalesce(attempted, begun), reference) > ($2, $3)
ORDER BY coalesce(attempted, begun), reference LIMIT $4";

const COUNT_ATTEMPT: &str = "UPDATE {table} SET attempts = attempts + 1, attempted = {now}
WHERE reference = $1 AND token = $2 AND state = 1 AND begun > {now} - $3
RETURNING attempts";

/// Forwards only: what is done stays done, and what failed may turn out to be done.
const SETTLE: &str = "UPDATE {table} SET state = $3, settled = {now}, status = $4, result = $5
WHERE reference = $1 AND token = $2 AND (state = 1 OR state = 3 AND $3 = 2)
RETURNING {columns}";

const REOPEN: &str = "UPDATE {table} SET state = 1, settled = NULL, status = NULL, result = NULL
WHERE reference = $1 AND state = 3 AND begun > {now} - $2
RETURNING {columns}";

const DUE: &str = "SELECT reference FROM {table}
WHERE state <> 1 AND settled <= {now} - $1 AND begun <= {now} - $1 ORDER BY settled LIMIT $2";

const COUNTS: &str = "SELECT count(*) FILTER (WHERE state = 1 AND begun > {now} - $1),
count(*) FILTER (WHERE state = 1 AND begun <= {now} - $1),
count(*) FILTER (WHERE state = 2), count(*) FILTER (WHERE state = 3) FROM {table}";

const CHECK: &str = "SELECT {columns} FROM {table} LIMIT 0";

impl Texts {
    pub(super) fn new(dialect: Dialect, table: &str) -> Self {
        let quoted = format!("\"{table}\"");
        let fill = |text: &str| {
            let text = text.replace("{due}", DUE).replace("{columns}", COLUMNS);
            let text = text.replace("{now}", dialect.now);
            AssertSqlSafe(text.replace("{table}", &quoted)).into_sql_str()
        };
        Self {
            begin: fill(BEGIN),
            find: fill(FIND),
            pending: fill(PENDING),
            overdue: fill(OVERDUE),
            turns: fill(TURNS),
            count_attempt: fill(COUNT_ATTEMPT),
            settle: fill(SETTLE),
            reopen: fill(REOPEN),
            purge: fill(dialect.purge),
            counts: fill(COUNTS),
            check: fill(CHECK),
            // The names of the indexes are made of the table's, within the quotes.
            schema: AssertSqlSafe(dialect.schema.replace("{table}", table)).into_sql_str(),
        }
    }
}

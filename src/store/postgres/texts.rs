//! Every statement, with the names of the tables filled in.

use std::{
    fmt,
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{AtomicU64, Ordering},
    },
};

use sqlx::{AssertSqlSafe, SqlSafeStr, SqlStr};

const SCHEMA: &str = include_str!("../postgres.sql");

const CLAIM: &str = include_str!("claim.sql");

const TAKE: &str = include_str!("take.sql");

const SETTLE: &str = include_str!("settle.sql");

const RELEASE: &str = include_str!("release.sql");

/// Of these claims, the ones that still stand: what `SETTLE` did not answer was either lost or locked.
const STANDING: &str = "SELECT w.ord
FROM unnest($1::bytea[], $2::bytea[], $3::bytea[]) WITH ORDINALITY AS w (scope, key, token, ord)
JOIN idempotency_records r ON r.scope = w.scope AND r.key = w.key
WHERE r.token = w.token";

/// A plain read of the records: a lock would make a transaction that completes one of them fail
/// under repeatable read.
const RENEW: &str = "WITH alive AS (
    INSERT INTO idempotency_owners AS o (owner, alive_until) VALUES ($1, clock_timestamp() + $2)
    ON CONFLICT (owner) DO UPDATE SET alive_until = greatest(o.alive_until, excluded.alive_until)
)
SELECT w.ord
FROM unnest($3::bytea[], $4::bytea[], $5::bytea[]) WITH ORDINALITY AS w (scope, key, token, ord)
JOIN idempotency_records r ON r.scope = w.scope AND r.key = w.key
WHERE r.token = w.token AND r.state = 1 AND r.run_until > clock_timestamp()";

const GIVE_UP_LEASE: &str = "WITH gone AS (DELETE FROM idempotency_owners WHERE owner = $1)
UPDATE idempotency_records SET lease_until = clock_timestamp()
WHERE owner = $1 AND state = 1 AND state <> 2 AND lease_until > clock_timestamp()";

/// The columns that `Row::record` reads, in its order.
macro_rules! columns {
    () => {
        "r.scheme, r.fingerprint, r.token, r.owner, r.attempt, r.mode, r.state, r.created, r.run_until, r.completed, r.expires, r.response_expires, r.request_id, r.status, r.response"
    };
}

const GET: &str = concat!(
    "SELECT ",
    columns!(),
    ", coalesce(r.response_expires <= clock_timestamp(), false)
FROM idempotency_records r
WHERE r.scope = $1 AND r.key = $2 AND (r.expires IS NULL OR r.expires > clock_timestamp())"
);

/// Whether there is a record, whether it was free to be removed, and whether it was live.
const FORGET: &str = "WITH held AS MATERIALIZED (
    SELECT scope, key, expires FROM idempotency_records
    WHERE scope = $1 AND key = $2 FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM idempotency_records r USING held h WHERE r.scope = h.scope AND r.key = h.key
), cleared AS (
    DELETE FROM idempotency_checkpoints c USING held h WHERE c.scope = h.scope AND c.key = h.key
)
SELECT h.key IS NOT NULL AS held, h.expires IS NULL OR h.expires > clock_timestamp() AS live
FROM idempotency_records r LEFT JOIN held h ON true
WHERE r.scope = $1 AND r.key = $2";

/// `$6` is whether name and value are within the limits. Share-locked, so that nobody takes the record
/// over meanwhile, and the row stays as it is for whoever completes it.
const SAVE: &str = "WITH held AS MATERIALIZED (
    SELECT created FROM idempotency_records
    WHERE scope = $1 AND key = $2 AND token = $3 AND state = 1 FOR SHARE
), others AS MATERIALIZED (
    SELECT count(*) AS number FROM idempotency_checkpoints c JOIN held h ON c.created = h.created
    WHERE c.scope = $1 AND c.key = $2 AND c.name <> $4
), saved AS (
    INSERT INTO idempotency_checkpoints AS c (scope, key, created, name, value)
    SELECT $1, $2, created, $4, $5 FROM held CROSS JOIN others WHERE $6 AND number < $7
    ON CONFLICT (scope, key, created, name) DO UPDATE SET value = excluded.value
)
SELECT number FROM held CROSS JOIN others";

/// One row without a name stands for a record without checkpoints.
const LOAD: &str = "SELECT c.name, c.value
FROM idempotency_records r
LEFT JOIN idempotency_checkpoints c
    ON c.scope = r.scope AND c.key = r.key AND c.created = r.created
WHERE r.scope = $1 AND r.key = $2 AND r.token = $3 ORDER BY c.ord";

/// By `ctid`, because the number of rows is not known when the statement is planned, and a plan for very
/// many would read the whole table. The rows are asked again whether they are over, since in a
/// partitioned table one `ctid` names several. The time is read in a subquery: with a volatile function
/// in its place no index could be used.
const PURGE_RECORDS: &str = "WITH gone AS (
    DELETE FROM idempotency_records
    WHERE ctid = ANY (ARRAY (
        SELECT ctid FROM idempotency_records
        WHERE expires <= (SELECT clock_timestamp()) ORDER BY expires LIMIT $1 FOR UPDATE SKIP LOCKED
    )) AND expires <= clock_timestamp()
    RETURNING scope, key
), cleared AS (
    DELETE FROM idempotency_checkpoints c USING gone g WHERE c.scope = g.scope AND c.key = g.key
)
SELECT count(*) FROM gone";

const PURGE_RESPONSES: &str = "WITH emptied AS (
    UPDATE idempotency_records SET response = NULL
    WHERE ctid = ANY (ARRAY (
        SELECT ctid FROM idempotency_records
        WHERE response_expires <= (SELECT clock_timestamp()) AND response IS NOT NULL
        ORDER BY response_expires LIMIT $1 FOR UPDATE SKIP LOCKED
    )) AND response_expires <= clock_timestamp()
    RETURNING 1
)
SELECT count(*) FROM emptied";

const PURGE_OWNERS: &str = "DELETE FROM idempotency_owners o USING (
    SELECT owner FROM idempotency_owners
    WHERE alive_until <= clock_timestamp() AND owner <> $1 FOR UPDATE SKIP LOCKED
) lapsed WHERE o.owner = lapsed.owner";

/// Running and alive, completed, abandoned, released. Completed records are counted as what is left
/// over, from the smallest index there is.
const COUNT: &str = "SELECT
    count(*) FILTER (WHERE state = 1 AND NOT lapsed), count(*) FILTER (WHERE state = 2),
    count(*) FILTER (WHERE state = 3 OR state = 1 AND lapsed), count(*) FILTER (WHERE state = 4)
FROM (SELECT clock_timestamp() AS now) clock CROSS JOIN LATERAL (
    SELECT r.state, r.run_until <= clock.now
        OR r.lease_until <= clock.now AND coalesce(o.alive_until, clock.now) <= clock.now AS lapsed
    FROM idempotency_records r LEFT JOIN idempotency_owners o ON o.owner = r.owner
    WHERE r.expires IS NULL OR r.expires > clock.now
) live";

/// `$1` to `$3` are the place in the order after which to start, `$4` the limit.
const ABANDONED: &str = concat!(
    "SELECT ",
    columns!(),
    ", r.scope, r.key
FROM idempotency_records r
CROSS JOIN (SELECT clock_timestamp() AS now) clock
LEFT JOIN idempotency_owners o ON o.owner = r.owner
WHERE r.state <> 2
    AND (r.state = 3 OR r.state = 1 AND (
        r.run_until <= clock.now
        OR r.lease_until <= clock.now AND coalesce(o.alive_until, clock.now) <= clock.now
    ))
    AND (r.expires IS NULL OR r.expires > clock.now)
    AND (r.created, r.scope, r.key) > ($1, $2, $3)
ORDER BY r.created, r.scope, r.key LIMIT $4"
);

/// What must be so for all of the above to work. Naming every column, it fails on tables of another
/// make; it answers one row.
const CHECK: &str = "SELECT
    (SELECT m.value FROM idempotency_meta m WHERE m.name = 'schema') AS version,
    pg_is_in_recovery() AS standby,
    current_setting('transaction_read_only') = 'on' AS read_only,
    current_setting('default_transaction_isolation') AS isolation,
    current_setting('synchronous_commit') AS synchronous_commit,
    has_table_privilege('idempotency_records', 'SELECT')
        AND has_table_privilege('idempotency_records', 'INSERT')
        AND has_table_privilege('idempotency_records', 'UPDATE')
        AND has_table_privilege('idempotency_records', 'DELETE')
        AND has_table_privilege('idempotency_owners', 'SELECT')
        AND has_table_privilege('idempotency_owners', 'INSERT')
        AND has_table_privilege('idempotency_owners', 'UPDATE')
        AND has_table_privilege('idempotency_owners', 'DELETE')
        AND has_table_privilege('idempotency_checkpoints', 'SELECT')
        AND has_table_privilege('idempotency_checkpoints', 'INSERT')
        AND has_table_privilege('idempotency_checkpoints', 'UPDATE')
        AND has_table_privilege('idempotency_checkpoints', 'DELETE') AS privileged
FROM (SELECT) one
LEFT JOIN (
    SELECT scope, key, scheme, fingerprint, token, owner, attempt, mode, state, created, lease_until,
        run_until, completed, expires, response_expires, request_id, status, response
    FROM idempotency_records WHERE false
) records ON true
LEFT JOIN (SELECT owner, alive_until FROM idempotency_owners WHERE false) owners ON true
LEFT JOIN (
    SELECT scope, key, created, name, value, ord FROM idempotency_checkpoints WHERE false
) checkpoints ON true";

/// The oldest transaction that has not ended, and, when asked for, one that has just begun. (The end of
/// a snapshot would not do: transactions that have begun may lie beyond it.)
const SNAPSHOT: &str = "SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint,
    CASE WHEN $1 THEN pg_current_xact_id()::text::bigint END";

const FIND_META: &str = "SELECT to_regclass('idempotency_meta') IS NOT NULL";

/// Where the tables are, and what they are called.
#[derive(Clone)]
pub(super) struct Names {
    pub(super) schema: Option<String>,
    pub(super) prefix: String,
}

impl Names {
    /// Puts them into a statement. The schema is always named: a handler that changes the search path
    /// of a pooled connection must not send the records elsewhere.
    pub(super) fn fill(&self, text: &str) -> String {
        let mut parts = text.split("idempotency_");
        let mut filled = parts.next().unwrap_or_default().to_owned();
        for part in parts {
            let end = part.find(|c: char| !c.is_ascii_lowercase());
            let (table, rest) = part.split_at(end.unwrap_or(part.len()));
            filled.push_str(&self.table(table));
            filled.push_str(rest);
        }
        filled
    }

    fn table(&self, table: &str) -> String {
        let prefix = &self.prefix;
        match &self.schema {
            Some(schema) => format!("\"{schema}\".\"{prefix}_{table}\""),
            None => format!("\"{prefix}_{table}\""),
        }
    }

    /// The statements that create the tables.
    pub(super) fn tables(&self) -> String {
        self.fill(SCHEMA)
    }

    pub(super) fn find_meta(&self) -> SqlStr {
        safe(self.fill(FIND_META))
    }
}

/// The only dynamic parts are names that were checked or quoted.
pub(super) fn safe(text: impl Into<Arc<str>>) -> SqlStr {
    AssertSqlSafe(text.into()).into_sql_str()
}

/// A statement on arrays of records, in tables that grow.
///
/// Postgres plans a prepared statement a few times and then keeps the plan. One that was made while
/// the tables were small may read all of them, for ever. So the text changes, by a comment, whenever
/// there may be twice as many records, and is planned again.
pub(super) struct Grown {
    one: SqlStr,
    many: String,
    planned: RwLock<SqlStr>,
    used: AtomicU64,
    next: AtomicU64,
}

const FIRST_GROWTH: u64 = 512;

impl Grown {
    fn new(many: String) -> Self {
        Self {
            one: safe(only_one(&many).unwrap_or_else(|| many.clone())),
            planned: RwLock::new(safe(many.clone())),
            many,
            used: AtomicU64::new(0),
            next: AtomicU64::new(FIRST_GROWTH),
        }
    }

    /// The text, to be used for this many records.
    pub(super) fn text(&self, records: usize) -> SqlStr {
        if records == 1 {
            return self.one.clone();
        }
        let records = u64::try_from(records).unwrap_or(u64::MAX);
        let used = self.used.fetch_add(records, Ordering::Relaxed);
        if used >= self.next.load(Ordering::Relaxed) {
            self.next.store(used.saturating_mul(2), Ordering::Relaxed);
            let again = safe(format!("{}\n-- planned at {used}", self.many));
            *self.planned.write().unwrap_or_else(PoisonError::into_inner) = again;
        }
        let planned = self.planned.read();
        planned.unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// The same statement for arrays of one, which whoever comes alone waits for: it takes the elements out
/// of their arrays instead of joining with them, which takes half the time.
fn only_one(many: &str) -> Option<String> {
    let (before, rest) = many.split_once("unnest(")?;
    let (arrays, rest) = rest.split_once(") WITH ORDINALITY AS w (")?;
    let (columns, after) = rest.split_once(')')?;
    let mut row: Vec<String> = (arrays.split(',').zip(columns.split(',')))
        .map(|(array, column)| format!("({})[1] AS {}", array.trim(), column.trim()))
        .collect();
    row.push("1::bigint AS ord".to_owned());
    let one = format!("{before}(SELECT {}) AS w{after}", row.join(", "));
    Some(one.replacen("wanted AS MATERIALIZED", "wanted AS NOT MATERIALIZED", 1))
}

pub(super) struct Texts {
    pub(super) claim: Grown,
    pub(super) take: Grown,
    pub(super) settle: Grown,
    pub(super) release: Grown,
    pub(super) standing: Grown,
    pub(super) renew: Grown,
    pub(super) give_up_lease: SqlStr,
    pub(super) get: SqlStr,
    pub(super) forget: SqlStr,
    pub(super) save: SqlStr,
    pub(super) load: SqlStr,
    pub(super) purge_records: SqlStr,
    pub(super) purge_responses: SqlStr,
    pub(super) purge_owners: SqlStr,
    pub(super) count: SqlStr,
    pub(super) abandoned: SqlStr,
    pub(super) check: SqlStr,
    pub(super) snapshot: SqlStr,
}

impl Texts {
    pub(super) fn of(names: &Names) -> Self {
        let grown = |text| Grown::new(names.fill(text));
        let fixed = |text| safe(names.fill(text));
        Self {
            claim: grown(CLAIM),
            take: grown(TAKE),
            settle: grown(SETTLE),
            release: grown(RELEASE),
            standing: grown(STANDING),
            renew: grown(RENEW),
            give_up_lease: fixed(GIVE_UP_LEASE),
            get: fixed(GET),
            forget: fixed(FORGET),
            save: fixed(SAVE),
            load: fixed(LOAD),
            purge_records: fixed(PURGE_RECORDS),
            purge_responses: fixed(PURGE_RESPONSES),
            purge_owners: fixed(PURGE_OWNERS),
            count: fixed(COUNT),
            abandoned: fixed(ABANDONED),
            check: fixed(CHECK),
            snapshot: fixed(SNAPSHOT),
        }
    }
}

impl fmt::Debug for Names {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}.{}_…", self.schema, self.prefix)
    }
}

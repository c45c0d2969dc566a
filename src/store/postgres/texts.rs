//! Every statement, with the names of the tables filled in.

use std::sync::{
    Arc, PoisonError, RwLock,
    atomic::{AtomicU64, Ordering},
};

use sqlx::{AssertSqlSafe, SqlSafeStr, SqlStr};

use crate::record::Owner;

const SCHEMA: &str = include_str!("../postgres.sql");

const CLAIM: &str = include_str!("claim.sql");

const TAKE: &str = include_str!("take.sql");

const TAKE_OVER: &str = include_str!("take_over.sql");

const SETTLE: &str = include_str!("settle.sql");

const RELEASE: &str = include_str!("release.sql");

const COMPLETE: &str = include_str!("complete.sql");

/// What `COMPLETE` ends with to find the row without an index.
const AT: &str = "    AND r.ctid = $9::text::tid";

const FIND: &str =
    "SELECT r.ctid::text FROM idempotency_records r WHERE r.scope = $1 AND r.key = $2";

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

/// For a ticket by itself, which is how a run asks before it does what cannot be undone: then nobody may
/// take the record over on the ground of a lease that had lapsed before, so the lease is written to the
/// record too. Not to one whose handler's transaction will complete it: that is fenced by itself, and
/// must find the row as it was.
const RENEW_ONE: &str = "WITH alive AS (
    INSERT INTO idempotency_owners AS o (owner, alive_until) VALUES ($1, clock_timestamp() + $2)
    ON CONFLICT (owner) DO UPDATE SET alive_until = greatest(o.alive_until, excluded.alive_until)
), held AS MATERIALIZED (
    SELECT r.scope, r.key, r.mode, r.owner FROM idempotency_records r
    WHERE r.scope = ($3::bytea[])[1] AND r.key = ($4::bytea[])[1] AND r.token = ($5::bytea[])[1]
        AND r.state = 1 AND r.run_until > clock_timestamp()
    FOR NO KEY UPDATE SKIP LOCKED
), kept AS (
    UPDATE idempotency_records r SET lease_until = greatest(r.lease_until, clock_timestamp() + $2)
    FROM held h
    WHERE h.mode = 1 AND h.owner = $1 AND r.scope = h.scope AND r.key = h.key
)
SELECT 1::bigint FROM held";

/// Whether a run goes on.
const RUNNING: &str = "SELECT FROM idempotency_records r
WHERE r.scope = $1 AND r.key = $2 AND r.token = $3 AND r.state = 1
    AND r.run_until > clock_timestamp()";

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

/// The same in a transaction of a handler's. That may last, and other statements of its run meet the lock:
/// this one keeps off only those who would take the record over or remove it.
fn join() -> String {
    SAVE.replace("FOR SHARE", "FOR KEY SHARE")
}

/// One row without a name stands for a record without checkpoints.
const LOAD: &str = "SELECT c.name, c.value
FROM idempotency_records r
LEFT JOIN idempotency_checkpoints c
    ON c.scope = r.scope AND c.key = r.key AND c.created = r.created
WHERE r.scope = $1 AND r.key = $2 AND r.token = $3 ORDER BY c.ord";

/// The inner limit is a number, so that the plan is one for few rows, whatever `$1` will be. The time is
/// read in a subquery: with a volatile function in its place no index could be used.
const PURGE_RECORDS: &str = "WITH due AS MATERIALIZED (
    SELECT scope, key FROM (
        SELECT scope, key FROM idempotency_records
        WHERE expires <= (SELECT clock_timestamp()) ORDER BY expires LIMIT 1000 FOR UPDATE SKIP LOCKED
    ) locked LIMIT $1
), gone AS (
    DELETE FROM idempotency_records r USING due d WHERE r.scope = d.scope AND r.key = d.key
), cleared AS (
    DELETE FROM idempotency_checkpoints c USING due d WHERE c.scope = d.scope AND c.key = d.key
)
SELECT count(*) FROM due";

const PURGE_RESPONSES: &str = "WITH due AS MATERIALIZED (
    SELECT scope, key FROM (
        SELECT scope, key FROM idempotency_records
        WHERE response_expires <= (SELECT clock_timestamp()) AND response IS NOT NULL
        ORDER BY response_expires LIMIT 1000 FOR NO KEY UPDATE SKIP LOCKED
    ) locked LIMIT $1
), emptied AS (
    UPDATE idempotency_records r SET response = NULL
    FROM due d WHERE r.scope = d.scope AND r.key = d.key
)
SELECT count(*) FROM due";

const PURGE_OWNERS: &str = "DELETE FROM idempotency_owners o USING (
    SELECT owner FROM idempotency_owners
    WHERE alive_until <= clock_timestamp() AND owner <> $1 FOR UPDATE SKIP LOCKED
) lapsed WHERE o.owner = lapsed.owner";

/// Running and alive, completed, abandoned, released: a read of the whole table.
const COUNT: &str = "SELECT
    count(*) FILTER (WHERE state = 1 AND NOT lapsed), count(*) FILTER (WHERE state = 2),
    count(*) FILTER (WHERE state = 3 OR state = 1 AND lapsed), count(*) FILTER (WHERE state = 4)
FROM (SELECT clock_timestamp() AS now) clock CROSS JOIN LATERAL (
    SELECT r.state, r.run_until <= clock.now
        OR r.lease_until <= clock.now AND coalesce(o.alive_until, clock.now) <= clock.now AS lapsed
    FROM idempotency_records r LEFT JOIN idempotency_owners o ON o.owner = r.owner
    WHERE r.expires IS NULL OR r.expires > clock.now
) live";

/// `$1` is the scope, `$2` the limit. In the order of the primary key, and the time read in a subquery, so
/// that it is read along that key, and no further than it has to.
const COUNT_IN: &str = "SELECT count(*) FROM (
    SELECT FROM idempotency_records r
    WHERE r.scope = $1 AND (r.expires IS NULL OR r.expires > (SELECT clock_timestamp()))
    ORDER BY r.key LIMIT $2
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

/// Statements of this instance that are under way beside this one. `$1` is what they begin with.
const GIVEN_UP: &str = "SELECT pid FROM pg_stat_activity
WHERE starts_with(query, $1) AND state <> 'idle' AND pid <> pg_backend_pid()";

/// Ends those that wait for a lock: their connections are cut, which they do not notice while they wait,
/// and so would be more and more. Not those that wait for a standby, whose work is done.
const CANCEL: &str = "SELECT pg_cancel_backend(pid) FROM pg_stat_activity
WHERE starts_with(query, $1) AND wait_event_type = 'Lock' AND pid <> pg_backend_pid()
    AND query_start < clock_timestamp() - $2::interval";

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
    fn new(one: String, many: String) -> Self {
        Self {
            one: safe(one),
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
    pub(super) take_over: SqlStr,
    pub(super) settle: Grown,
    pub(super) release: Grown,
    pub(super) complete: SqlStr,
    pub(super) complete_at: SqlStr,
    pub(super) find: SqlStr,
    pub(super) standing: Grown,
    pub(super) renew: Grown,
    pub(super) renew_one: SqlStr,
    pub(super) running: SqlStr,
    pub(super) give_up_lease: SqlStr,
    pub(super) get: SqlStr,
    pub(super) forget: SqlStr,
    pub(super) save: SqlStr,
    /// Without the tag: that it is the last statement of a session says nothing about that session.
    pub(super) join: SqlStr,
    pub(super) load: SqlStr,
    pub(super) purge_records: SqlStr,
    pub(super) purge_responses: SqlStr,
    pub(super) purge_owners: SqlStr,
    pub(super) count: SqlStr,
    pub(super) count_in: SqlStr,
    pub(super) abandoned: SqlStr,
    pub(super) check: SqlStr,
    pub(super) given_up: SqlStr,
    pub(super) cancel: SqlStr,
    /// What every statement of this instance begins with, apart from those about statements.
    pub(super) tag: Arc<str>,
}

impl Texts {
    pub(super) fn of(names: &Names, owner: Owner) -> Self {
        let owner = u128::from_be_bytes(*owner.as_bytes());
        let tag = format!("/* idempotency {owner:032x} */ ");
        let tagged = |text: &str| format!("{tag}{}", names.fill(text));
        let grown = |text: &str| {
            let one = only_one(text).unwrap_or_else(|| text.to_owned());
            Grown::new(tagged(&one), tagged(text))
        };
        let fixed = |text: &str| safe(tagged(text));
        Self {
            claim: grown(CLAIM),
            take: grown(TAKE),
            take_over: fixed(TAKE_OVER),
            settle: grown(SETTLE),
            release: grown(RELEASE),
            complete: fixed(COMPLETE),
            complete_at: fixed(&format!("{COMPLETE}{AT}")),
            find: fixed(FIND),
            standing: grown(STANDING),
            renew: grown(RENEW),
            renew_one: fixed(RENEW_ONE),
            running: fixed(RUNNING),
            give_up_lease: fixed(GIVE_UP_LEASE),
            get: fixed(GET),
            forget: fixed(FORGET),
            save: fixed(SAVE),
            join: safe(names.fill(&join())),
            load: fixed(LOAD),
            purge_records: fixed(PURGE_RECORDS),
            purge_responses: fixed(PURGE_RESPONSES),
            purge_owners: fixed(PURGE_OWNERS),
            count: fixed(COUNT),
            count_in: fixed(COUNT_IN),
            abandoned: fixed(ABANDONED),
            check: fixed(CHECK),
            given_up: safe(GIVEN_UP),
            cancel: safe(CANCEL),
            tag: tag.clone().into(),
        }
    }
}

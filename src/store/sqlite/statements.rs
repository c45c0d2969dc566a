//! Every statement on records, and the two directions between a row and a [`Record`].

use bytes::Bytes;
use http::StatusCode;
use sqlx::{
    Row, Sqlite,
    query::Query,
    sqlite::{SqliteArguments, SqliteRow},
};

use crate::{
    IdempotencyKey, Scope,
    record::{Fingerprint, Owner, Record, RecordId, Timestamp, Token},
    store::stored::{Damage, mode_code, mode_of, state_code, state_of},
};

/// A statement written once, 8 times and 64 times: SQLite runs the copies one after the other. Each
/// text costs a round trip to the thread that owns the connection, which is more than the statement.
pub(super) struct Repeated {
    once: &'static str,
    eight: &'static str,
    many: &'static str,
}

macro_rules! repeated {
    ($first:expr, $it:expr) => {
        Repeated {
            once: concat!($first, $it),
            eight: concat!($first, $it, $it, $it, $it, $it, $it, $it, $it),
            many: concat!(
                $first, $it, $it, $it, $it, $it, $it, $it, $it, $it, $it, $it, $it, $it, $it, $it,
                $it, $it, $it, $it, $it, $it, $it, $it, $it, $it, $it, $it, $it, $it, $it, $it,
                $it, $it, $it, $it, $it, $it, $it, $it, $it, $it, $it, $it, $it, $it, $it, $it,
                $it, $it, $it, $it, $it, $it, $it, $it, $it, $it, $it, $it, $it, $it, $it, $it,
                $it
            ),
        }
    };
}

impl Repeated {
    /// Cuts the items into parts for which there is a text.
    pub(super) fn over<'a, T>(
        &self,
        mut items: &'a [T],
    ) -> impl Iterator<Item = (&'static str, &'a [T])> + use<'a, T> {
        let texts = [(64, self.many), (8, self.eight), (1, self.once)];
        std::iter::from_fn(move || {
            let (count, text) = *texts.iter().find(|(count, _)| *count <= items.len())?;
            let (part, rest) = items.split_at(count);
            items = rest;
            Some((text, part))
        })
    }
}

/// A statement that writes: many times in a transaction, or as its only one together with its end.
pub(super) struct Written {
    pub(super) repeated: Repeated,
    pub(super) and_commit: &'static str,
}

macro_rules! written {
    ($it:expr) => {
        Written {
            repeated: repeated!("", $it),
            and_commit: concat!($it, commit!()),
        }
    };
}

/// Takes the write lock at once, so that what is read next cannot change before it is written.
/// Answers this instance's lease and the number of records.
macro_rules! begin {
    () => {
        "BEGIN IMMEDIATE; SELECT (SELECT alive_until FROM idempotency_owners WHERE owner = ?), (SELECT value FROM idempotency_meta WHERE name = 'records');"
    };
}

/// The columns that [`decode`] reads, then the lease of the record's owner and whether there are
/// checkpoints.
macro_rules! load {
    () => {
        "SELECT id, scope, key, scheme, fingerprint, token, owner, attempt, mode, state, created, run_until, completed, expires, response_expires, request_id, status, response, (SELECT alive_until FROM idempotency_owners o WHERE o.owner = r.owner), EXISTS (SELECT 1 FROM idempotency_checkpoints c WHERE c.record = r.id) FROM idempotency_records r WHERE scope = ? AND key = ?;"
    };
}

/// Extends this instance's lease, when it is to be, and commits. The table of leases comes last:
/// its parameters stand behind all others.
macro_rules! commit {
    () => {
        "INSERT INTO idempotency_owners (owner, alive_until) SELECT owner, until FROM (SELECT ? AS owner, ? AS until) WHERE until IS NOT NULL ON CONFLICT (owner) DO UPDATE SET alive_until = max(alive_until, excluded.alive_until); COMMIT;"
    };
}

pub(super) const BEGIN: &str = begin!();
pub(super) const BEGIN_AND_LOAD: Repeated = repeated!(begin!(), load!());
pub(super) const LOAD: Repeated = repeated!("", load!());
pub(super) const COMMIT: &str = commit!();

pub(super) const INSERT: Written = written!(
    "INSERT INTO idempotency_records (scope, key, scheme, fingerprint, token, owner, attempt, mode, state, created, run_until, completed, expires, response_expires, request_id, status, response) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);"
);

/// Writes the next state of a claim.
pub(super) const SETTLE: Written = written!(
    "UPDATE idempotency_records SET attempt = ?, state = ?, completed = ?, expires = ?, response_expires = ?, status = ?, response = ? WHERE id = ?;"
);

/// Writes another claim over a row.
pub(super) const REPLACE: Written = written!(
    "UPDATE idempotency_records SET scheme = ?, fingerprint = ?, token = ?, owner = ?, attempt = ?, mode = ?, state = ?, created = ?, run_until = ?, completed = ?, expires = ?, response_expires = ?, request_id = ?, status = ?, response = ? WHERE id = ?;"
);

pub(super) const DELETE: Written = written!("DELETE FROM idempotency_records WHERE id = ?;");

pub(super) const CLEAR_CHECKPOINTS: Written =
    written!("DELETE FROM idempotency_checkpoints WHERE record = ?;");

pub(super) const GIVE_UP_LEASE: &str = "DELETE FROM idempotency_owners WHERE owner = ?";

pub(super) const PURGE_RECORDS: &str = "DELETE FROM idempotency_records WHERE id IN (
    SELECT id FROM idempotency_records WHERE expires <= ? LIMIT ?)";

pub(super) const PURGE_RESPONSES: &str =
    "UPDATE idempotency_records SET response = NULL WHERE id IN (
    SELECT id FROM idempotency_records
    WHERE response_expires <= ? AND response IS NOT NULL LIMIT ?)";

pub(super) const PURGE_OWNERS: &str =
    "DELETE FROM idempotency_owners WHERE alive_until <= ? AND owner <> ?";

pub(super) const FIND_RUNNING: &str =
    "SELECT id FROM idempotency_records WHERE scope = ? AND key = ? AND token = ? AND state = 1";

/// Unless as many others were saved under the record as there may be.
pub(super) const SAVE_CHECKPOINT: &str = "INSERT INTO idempotency_checkpoints (record, name, value)
SELECT id, ?, ? FROM idempotency_records r WHERE scope = ? AND key = ? AND token = ? AND state = 1
    AND (SELECT count(*) FROM idempotency_checkpoints c WHERE c.record = r.id AND c.name <> ?) < ?
ON CONFLICT (record, name) DO UPDATE SET value = excluded.value";

/// One row without a name stands for a record without checkpoints.
pub(super) const LOAD_CHECKPOINTS: &str = "SELECT c.name, c.value
FROM idempotency_records r LEFT JOIN idempotency_checkpoints c ON c.record = r.id
WHERE r.scope = ? AND r.key = ? AND r.token = ? ORDER BY c.ord";

/// `?1` is now.
pub(super) const COUNT: &str = "SELECT
    count(*) FILTER (WHERE state = 1 AND NOT lapsed), count(*) FILTER (WHERE state = 2),
    count(*) FILTER (WHERE state = 3 OR state = 1 AND lapsed), count(*) FILTER (WHERE state = 4)
FROM (
    SELECT state, run_until <= ?1 OR coalesce(o.alive_until, ?1) <= ?1 AS lapsed
    FROM idempotency_records r LEFT JOIN idempotency_owners o ON o.owner = r.owner
    WHERE expires IS NULL OR expires > ?1
)";

/// `?1` is the scope, `?2` now, `?3` the limit. By the index on scope and key: no further than it has to.
///
/// As long as no more than `?4` records wait for a purge, by indexes alone: the rows lie as far apart as
/// their responses are long, and to read them takes twenty times as long. A longer list of the expired would
/// take longer than the rows of a scope that has few.
pub(super) const COUNT_IN: &str = "SELECT CASE
WHEN (SELECT count(*) FROM (SELECT 1 FROM idempotency_records WHERE expires <= ?2 LIMIT ?4 + 1)) <= ?4
THEN (SELECT count(*) FROM (
    SELECT 1 FROM idempotency_records
    WHERE scope = ?1 AND id NOT IN (SELECT id FROM idempotency_records WHERE expires <= ?2) LIMIT ?3
))
ELSE (SELECT count(*) FROM (
    SELECT 1 FROM idempotency_records
    WHERE scope = ?1 AND (expires IS NULL OR expires > ?2) LIMIT ?3
)) END";

/// The `?4` of [`COUNT_IN`]: a list of them is made in less than 0.1 s.
pub(super) const MAX_EXPIRED: i64 = 100_000;

/// `?1` is now, `?2` to `?4` the place in the order after which to start, `?5` the limit.
pub(super) const ABANDONED: &str =
    "SELECT id, scope, key, scheme, fingerprint, token, r.owner, attempt, mode, state,
    created, run_until, completed, expires, response_expires, request_id, status, response
FROM idempotency_records r LEFT JOIN idempotency_owners o ON o.owner = r.owner
WHERE state <> 2
    AND (state = 3 OR state = 1 AND (run_until <= ?1 OR coalesce(o.alive_until, ?1) <= ?1))
    AND (expires IS NULL OR expires > ?1)
    AND created >= ?2 AND (created, scope, key) > (?2, ?3, ?4)
ORDER BY created, scope, key LIMIT ?5";

pub(super) type Statement<'q> = Query<'q, Sqlite, SqliteArguments>;

pub(super) fn bind_id<'q>(query: Statement<'q>, id: &RecordId) -> Statement<'q> {
    query
        .bind(id.scope.as_bytes().to_vec())
        .bind(id.key.as_bytes().to_vec())
}

/// For `INSERT` after the name, and for `REPLACE` before the row.
pub(super) fn bind_record<'q>(query: Statement<'q>, record: &Record) -> Statement<'q> {
    query
        .bind(record.scheme.to_string())
        .bind(record.fingerprint.as_bytes().to_vec())
        .bind(record.token.as_bytes().to_vec())
        .bind(record.owner.as_bytes().to_vec())
        .bind(i64::from(record.attempt))
        .bind(mode_code(record.mode))
        .bind(state_code(record.state))
        .bind(record.created.as_micros())
        .bind(record.run_until.as_micros())
        .bind(record.completed.map(Timestamp::as_micros))
        .bind(record.expires.map(Timestamp::as_micros))
        .bind(record.response_expires.map(Timestamp::as_micros))
        .bind(record.request_id.clone())
        .bind(record.status.map(|status| i64::from(status.as_u16())))
        .bind(record.response.as_deref().map(<[u8]>::to_vec))
}

/// For `SETTLE`, before the row.
pub(super) fn bind_outcome<'q>(query: Statement<'q>, record: &Record) -> Statement<'q> {
    query
        .bind(i64::from(record.attempt))
        .bind(state_code(record.state))
        .bind(record.completed.map(Timestamp::as_micros))
        .bind(record.expires.map(Timestamp::as_micros))
        .bind(record.response_expires.map(Timestamp::as_micros))
        .bind(record.status.map(|status| i64::from(status.as_u16())))
        .bind(record.response.as_deref().map(<[u8]>::to_vec))
}

/// The name of a row's record, which can be read even when the rest is damaged.
pub(super) fn decode_id(row: &SqliteRow) -> Result<RecordId, sqlx::Error> {
    let scope = Scope::new(row.try_get::<&[u8], _>(1)?);
    let key = IdempotencyKey::new(row.try_get::<&[u8], _>(2)?);
    Ok(RecordId::new(scope, key))
}

/// Reads a row, whatever it holds: what cannot be understood is an error, never a panic.
pub(super) fn decode(row: &SqliteRow, id: RecordId) -> Result<Record, Damage> {
    let micros = |column| -> Result<Option<Timestamp>, Damage> {
        Ok(row
            .try_get::<Option<i64>, _>(column)?
            .map(Timestamp::from_micros))
    };
    let status = row.try_get::<Option<i64>, _>(16)?;
    let status =
        status.map(|code| -> Result<_, Damage> { Ok(StatusCode::from_u16(u16::try_from(code)?)?) });
    Ok(Record {
        id,
        scheme: row.try_get::<String, _>(3)?.into(),
        fingerprint: Fingerprint::from_bytes(row.try_get::<&[u8], _>(4)?.try_into()?),
        token: Token::from_bytes(row.try_get::<&[u8], _>(5)?.try_into()?),
        owner: Owner::from_bytes(row.try_get::<&[u8], _>(6)?.try_into()?),
        attempt: row.try_get::<i64, _>(7)?.try_into()?,
        mode: mode_of(row.try_get(8)?).ok_or("unknown mode")?,
        state: state_of(row.try_get(9)?).ok_or("unknown state")?,
        created: Timestamp::from_micros(row.try_get(10)?),
        run_until: Timestamp::from_micros(row.try_get(11)?),
        completed: micros(12)?,
        expires: micros(13)?,
        response_expires: micros(14)?,
        request_id: row.try_get::<Option<&str>, _>(15)?.map(Into::into),
        status: status.transpose()?,
        response: row.try_get::<Option<Vec<u8>>, _>(17)?.map(Bytes::from),
    })
}

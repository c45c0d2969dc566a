//! The two directions between a row and a [`Record`].

use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;
use sqlx::{
    Decode, Encode, Postgres, Row, Type,
    encode::IsNull,
    error::BoxDynError,
    postgres::{
        PgArgumentBuffer, PgRow, PgTypeInfo, PgValueFormat, PgValueRef,
        types::{Oid, PgInterval},
    },
};

use crate::{
    IdempotencyKey, Scope,
    record::{Fingerprint, Owner, Record, RecordId, Timestamp, Token},
    store::stored::{Damage, mode_of, state_of},
};

/// Postgres counts from 2000-01-01.
const EPOCH: i64 = 946_684_800_000_000;

const TIMESTAMPTZ: Oid = Oid(1184);

/// Durations are cut here: what Postgres can add to today's date, and more than anybody waits.
const LONGEST: i64 = 200_000 * 365 * 24 * 3_600 * 1_000_000;

/// A `timestamptz`, which is microseconds in both worlds.
pub(super) struct Time(pub(super) Timestamp);

impl Type<Postgres> for Time {
    fn type_info() -> PgTypeInfo {
        PgTypeInfo::with_oid(TIMESTAMPTZ)
    }
}

impl Decode<'_, Postgres> for Time {
    fn decode(value: PgValueRef<'_>) -> Result<Self, BoxDynError> {
        if value.format() == PgValueFormat::Text {
            return Err("a time in text form".into());
        }
        let micros = i64::from_be_bytes(value.as_bytes()?.try_into()?);
        Ok(Self(Timestamp::from_micros(micros.saturating_add(EPOCH))))
    }
}

impl Encode<'_, Postgres> for Time {
    fn encode_by_ref(&self, buffer: &mut PgArgumentBuffer) -> Result<IsNull, BoxDynError> {
        let micros = self.0.as_micros().saturating_sub(EPOCH);
        buffer.extend_from_slice(&micros.to_be_bytes());
        Ok(IsNull::No)
    }
}

pub(super) fn interval(duration: Duration) -> PgInterval {
    let micros = i64::try_from(duration.as_micros()).unwrap_or(LONGEST);
    PgInterval {
        months: 0,
        days: 0,
        microseconds: micros.min(LONGEST),
    }
}

/// How many columns [`record`] reads, so where others begin.
pub(super) const COLUMNS: usize = 15;

/// Reads the first columns of a row, whatever they hold: what cannot be understood is an error, never a
/// panic.
pub(super) fn record(row: &PgRow, id: RecordId) -> Result<Record, Damage> {
    let time = |column| -> Result<Option<Timestamp>, Damage> {
        Ok(row.try_get::<Option<Time>, _>(column)?.map(|time| time.0))
    };
    let status = row.try_get::<Option<i16>, _>(13)?;
    let status =
        status.map(|code| -> Result<_, Damage> { Ok(StatusCode::from_u16(u16::try_from(code)?)?) });
    Ok(Record {
        id,
        scheme: row.try_get::<String, _>(0)?.into(),
        fingerprint: Fingerprint::from_bytes(row.try_get::<&[u8], _>(1)?.try_into()?),
        token: Token::from_bytes(row.try_get::<&[u8], _>(2)?.try_into()?),
        owner: Owner::from_bytes(row.try_get::<&[u8], _>(3)?.try_into()?),
        attempt: row.try_get::<i32, _>(4)?.try_into()?,
        mode: mode_of(row.try_get(5)?).ok_or("unknown mode")?,
        state: state_of(row.try_get(6)?).ok_or("unknown state")?,
        created: row.try_get::<Time, _>(7)?.0,
        run_until: row.try_get::<Time, _>(8)?.0,
        completed: time(9)?,
        expires: time(10)?,
        response_expires: time(11)?,
        request_id: row.try_get::<Option<&str>, _>(12)?.map(Into::into),
        status: status.transpose()?,
        response: row.try_get::<Option<Vec<u8>>, _>(14)?.map(Bytes::from),
    })
}

/// Scope and key, in this column and the next.
pub(super) fn id(row: &PgRow, column: usize) -> Result<RecordId, sqlx::Error> {
    let scope = Scope::new(row.try_get::<&[u8], _>(column)?);
    let key = IdempotencyKey::new(row.try_get::<&[u8], _>(column + 1)?);
    Ok(RecordId::new(scope, key))
}

//! The steps of a relay: whose turn it is, an attempt that is counted, an end that is recorded.

use std::time::Duration;

use bytes::Bytes;
use http::{Response, StatusCode};

use super::{
    Entry, EntryState, Outbox, OutboxDatabase, OutboxError, check_reference,
    database::{Text, Value},
    micros, number,
};
use crate::{IdempotencyKey, Timestamp};

/// Whose turn it is.
pub(in crate::client) struct Turn {
    pub(in crate::client) reference: String,
    /// Whether the row can be asked for by its reference, which a damaged one may not have any more.
    pub(in crate::client) is_sound: bool,
}

impl Turn {
    fn of(reference: Text) -> Self {
        Self {
            is_sound: reference.is_sound() && check_reference(&reference.shown).is_ok(),
            reference: reference.shown,
        }
    }
}

/// How an operation ended.
#[derive(Clone, Copy)]
pub(in crate::client) struct End<'a> {
    pub(in crate::client) state: EntryState,
    pub(in crate::client) status: Option<StatusCode>,
    pub(in crate::client) answer: Option<&'a Response<Bytes>>,
    /// It is only true if no other attempt was ever counted.
    pub(in crate::client) only_attempt: bool,
    /// Somebody has looked it up.
    pub(in crate::client) by_hand: bool,
}

impl<DB: OutboxDatabase> Outbox<DB> {
    /// Writes the end of an operation, unless something is there that must stay; answers what is there then.
    pub(in crate::client) async fn record(
        &self,
        entry: &Entry,
        end: &End<'_>,
    ) -> Result<Entry, OutboxError> {
        let attempts = match end.only_attempt {
            true => 1,
            false => i64::MAX,
        };
        let values = vec![
            Value::Text(entry.reference().to_owned()),
            Value::Bytes(Some(entry.token().to_vec())),
            Value::Number(Some(end.state.code())),
            Value::Number(end.status.map(|status| i64::from(status.as_u16()))),
            Value::Bytes(self.kept(entry, end)),
            Value::Number(Some(attempts)),
            Value::Number(Some(i64::from(end.by_hand))),
        ];
        let rows = DB::pool_rows(&self.pool, &self.texts.settle, values).await?;
        if let Some(written) = self.first(rows)? {
            return Ok(written);
        }
        let found = self.find(entry.reference()).await?;
        let found = found.filter(|found| found.key() == entry.key());
        let found = found.ok_or_else(OutboxError::missing)?;
        match found.token() == entry.token() {
            true => Ok(found),
            false => Err(OutboxError::reopened()),
        }
    }

    /// What of its answer is kept.
    pub(super) fn kept(&self, entry: &Entry, end: &End<'_>) -> Option<Vec<u8>> {
        self.form.write_result(entry.place(), end.answer?)
    }

    /// Counts an attempt that is about to be made, durably. Answers how many there are with this one, or `None` when
    /// it may not be made.
    pub(in crate::client) async fn count_attempt(
        &self,
        reference: &str,
        key: &IdempotencyKey,
    ) -> Result<Option<i64>, OutboxError> {
        let values = vec![
            Value::Text(reference.to_owned()),
            Value::Bytes(Some(key.as_bytes().to_vec())),
            micros(self.window()),
        ];
        let counted = DB::numbers(&self.pool, &self.texts.count_attempt, values).await?;
        Ok(counted.and_then(|counted| counted.first().copied()))
    }

    /// Marks it as one that the server has run without a record, so that nobody sends it; answers what is there then.
    pub(in crate::client) async fn hold(&self, entry: &Entry) -> Result<Entry, OutboxError> {
        let key = entry.key();
        let values = vec![
            Value::Text(entry.reference().to_owned()),
            Value::Bytes(Some(key.as_bytes().to_vec())),
        ];
        let rows = DB::pool_rows(&self.pool, &self.texts.hold, values).await?;
        if let Some(held) = self.first(rows)? {
            return Ok(held);
        }
        let found = self.find(entry.reference()).await?;
        let found = found.filter(|found| found.key() == key);
        found.ok_or_else(OutboxError::missing)
    }

    /// Keeps [`resume`](crate::client::Relay::resume) from sending it for so long, or longer if
    /// that was asked for before.
    pub(in crate::client) async fn defer(
        &self,
        entry: &Entry,
        by: Duration,
    ) -> Result<(), OutboxError> {
        let values = vec![
            Value::Text(entry.reference().to_owned()),
            Value::Bytes(Some(entry.token().to_vec())),
            // Later than that it is overdue anyway.
            micros(by.min(self.key_lifetime)),
        ];
        DB::changed(&self.pool, &self.texts.defer, values).await?;
        Ok(())
    }

    /// The database's clock.
    pub(in crate::client) async fn now(&self) -> Result<Timestamp, OutboxError> {
        let now = DB::numbers(&self.pool, &self.texts.now, Vec::new()).await?;
        let now = now.and_then(|now| now.first().copied());
        Ok(Timestamp::from_micros(now.unwrap_or(i64::MAX)))
    }

    /// Gives at most so many that may be sent, and had no turn since then, their turn: they are last of all now.
    pub(in crate::client) async fn take_turns(
        &self,
        since: Timestamp,
        limit: usize,
    ) -> Result<Vec<Turn>, OutboxError> {
        let values = vec![
            micros(self.window()),
            Value::Number(Some(since.as_micros())),
            number(limit),
        ];
        let turns = DB::references(&self.pool, &self.texts.take_turns, values).await?;
        Ok(turns.into_iter().map(Turn::of).collect())
    }
}

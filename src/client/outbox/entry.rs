//! What an outbox holds of one operation.

use std::{fmt, time::Duration};

use bytes::Bytes;
use http::{Method, Response, StatusCode, Uri};

use super::{
    Operation, OutboxError,
    database::Row,
    form::{Form, Place},
    operation::is_sendable,
};
use crate::{IdempotencyKey, Timestamp};

/// An operation as it stood in the outbox when it was read.
///
/// `Debug` shows neither reference, key nor URI, and nothing of request and result.
#[derive(Clone)]
pub struct Entry {
    row: Row,
    state: EntryState,
    form: Form,
    window: Duration,
}

/// Where an operation stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum EntryState {
    /// Nobody can say yet whether it has had its effect: it is to be sent, or sent again, unless it is
    /// [overdue](Entry::is_overdue) or [held](Entry::is_held).
    Pending,
    /// It has had its effect: the server has said so, by a 2xx, a 303 or the replay of any 3xx.
    Done,
    /// It has had no effect: the server has refused it with a 4xx, and that either was the replay of its record or
    /// came to the only attempt that was ever counted since it was begun or reopened. 408, 409, 425, 429 and 499 do not say that much. A refusal after
    /// an attempt whose answer was lost says nothing of that attempt.
    Failed,
}

impl EntryState {
    pub(in crate::client) fn code(self) -> i64 {
        match self {
            Self::Pending => 1,
            Self::Done => 2,
            Self::Failed => 3,
        }
    }

    fn of(code: i64) -> Option<Self> {
        let all = [Self::Pending, Self::Done, Self::Failed];
        all.into_iter().find(|state| state.code() == code)
    }
}

impl Entry {
    /// `window`: how long after its beginning it may be sent.
    pub(super) fn new(row: Row, form: &Form, window: Duration) -> Result<Self, OutboxError> {
        Ok(Self {
            state: EntryState::of(row.state).ok_or_else(OutboxError::damaged)?,
            form: form.clone(),
            row,
            window,
        })
    }

    /// The caller's own name for it. In a row that was damaged it may be no text any more; then this is what can be
    /// shown of it, and no reference that can be asked for.
    pub fn reference(&self) -> &str {
        &self.row.reference.shown
    }

    /// The key that every attempt has.
    pub fn key(&self) -> IdempotencyKey {
        IdempotencyKey::new(&self.row.key)
    }

    /// Where it stood.
    pub fn state(&self) -> EntryState {
        self.state
    }

    /// Whether it is pending and may not be sent any more, by the database's clock when it was read: the server may
    /// have forgotten the key by the time it arrives.
    pub fn is_overdue(&self) -> bool {
        self.state == EntryState::Pending && self.is_too_old()
    }

    /// The same for one that might become pending again.
    pub(super) fn is_too_old(&self) -> bool {
        self.left().is_zero()
    }

    /// For how long it might be sent when it was read. A clock that was ahead at the beginning adds nothing.
    pub(in crate::client) fn left(&self) -> Duration {
        let age = self.row.now.saturating_sub(self.row.begun).max(0);
        let age = Duration::from_micros(u64::try_from(age).unwrap_or_default());
        self.window.saturating_sub(age)
    }

    /// When it was begun.
    pub fn begun(&self) -> Timestamp {
        Timestamp::from_micros(self.row.begun)
    }

    /// How many attempts were counted since it was begun, or last [reopened](super::Outbox::reopen). Each is counted
    /// before it is made. So this includes one that was never sent: because the process died, because the
    /// [hook](crate::client::RetryLayer::before_attempt) failed, or because the count took too long and was given up,
    /// and took place later. A refusal that comes after such a one is
    /// [inconclusive](crate::client::Undelivered::Inconclusive), for nobody can tell it from one that was sent.
    pub fn attempts(&self) -> u64 {
        u64::try_from(self.row.attempts).unwrap_or_default()
    }

    /// When the last attempt was counted.
    pub fn last_attempt(&self) -> Option<Timestamp> {
        self.row.attempted.map(Timestamp::from_micros)
    }

    /// Until when [`resume`](crate::client::Relay::resume) leaves it, because the server wants it no sooner: the latest
    /// that an answer has named, which may be past. `None` where none has, and after it was settled or reopened. An explicit
    /// [`send`](crate::client::Relay::send) does not wait for it. Where it lies beyond the time that the operation may
    /// be sent, that turns overdue without another attempt.
    pub fn not_before(&self) -> Option<Timestamp> {
        self.row.not_before.map(Timestamp::from_micros)
    }

    /// Whether it is pending and nobody sends it, because the server has run it without a record
    /// (`Idempotency-Status: unprotected`) and its end is not recorded here: sent again, it would run again. Look up
    /// what became of it, and [`settle`](super::Outbox::settle) it; or, if it has had no effect,
    /// [`reopen`](super::Outbox::reopen) it. It may be overdue as well.
    pub fn is_held(&self) -> bool {
        self.state == EntryState::Pending && self.row.held.is_some()
    }

    /// Since when it is done or failed.
    pub fn settled(&self) -> Option<Timestamp> {
        self.row.settled.map(Timestamp::from_micros)
    }

    /// The status of its answer, also where nothing else of that was kept. `None` while it is pending, and where it
    /// was settled by hand without an answer.
    pub fn status(&self) -> Option<StatusCode> {
        let status = u16::try_from(self.row.status?).ok()?;
        StatusCode::from_u16(status).ok()
    }

    /// What is sent, with its key.
    ///
    /// # Errors
    ///
    /// [`Keys`](super::OutboxErrorKind::Keys) when it is sealed and does not open;
    /// [`Damaged`](super::OutboxErrorKind::Damaged) when it is not what was written.
    pub fn operation(&self) -> Result<Operation, OutboxError> {
        let texts = [&self.row.reference, &self.row.method, &self.row.uri];
        if texts.into_iter().any(|text| !text.is_sound()) {
            return Err(OutboxError::damaged());
        }
        let request = self
            .form
            .read_request(Place::of(&self.row), &self.row.request)?;
        let method = Method::from_bytes(self.row.method.shown.as_bytes());
        let uri = self.row.uri.shown.parse::<Uri>();
        Ok(Operation {
            method: method.map_err(|_| OutboxError::damaged())?,
            uri: uri.map_err(|_| OutboxError::damaged())?,
            headers: request.headers,
            body: request.body,
            key: Some(self.sendable_key()?),
        })
    }

    /// The recorded answer; `None` where there is none, or none was kept: of a body larger than 1 MiB or a stream
    /// there is only the [`status`](Self::status).
    ///
    /// # Errors
    ///
    /// As [`operation`](Self::operation).
    pub fn result(&self) -> Result<Option<Response<Bytes>>, OutboxError> {
        let Some(stored) = &self.row.result else {
            return Ok(None);
        };
        let kept = self.form.read_result(Place::of(&self.row), stored)?;
        let mut response = Response::new(kept.body);
        *response.status_mut() = kept.status;
        *response.headers_mut() = kept.headers;
        Ok(Some(response))
    }

    /// The key, if a header can carry it, as every key could that was begun.
    fn sendable_key(&self) -> Result<IdempotencyKey, OutboxError> {
        let key = self.key();
        match is_sendable(&key) {
            true => Ok(key),
            false => Err(OutboxError::damaged()),
        }
    }

    /// Whether the attempt of this number is among those counted, and not one from before a reopening.
    pub(in crate::client) fn has_counted(&self, number: i64) -> bool {
        self.row.attempts >= number
    }

    /// As it would be read when its time is over.
    pub(in crate::client) fn at_its_end(mut self) -> Self {
        // Rounded up, since a window may have parts of a microsecond.
        let window = self.window.as_micros().saturating_add(1);
        let window = i64::try_from(window).unwrap_or(i64::MAX);
        self.row.now = self.row.now.max(self.row.begun.saturating_add(window));
        self
    }

    /// What is stored of its reference.
    pub(super) fn stored_reference(&self) -> &[u8] {
        self.row.reference.stored()
    }

    pub(super) fn token(&self) -> &[u8] {
        &self.row.token
    }

    pub(super) fn place(&self) -> Place<'_> {
        Place::of(&self.row)
    }
}

impl fmt::Debug for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Entry")
            .field("state", &self.state)
            .field("is_overdue", &self.is_overdue())
            .field("is_held", &self.is_held())
            .field("attempts", &self.attempts())
            .field("status", &self.status())
            .finish_non_exhaustive()
    }
}

/// What [`begin`](super::Outbox::begin) found or made.
#[derive(Debug, Clone)]
pub struct Begun {
    pub(super) entry: Entry,
    pub(super) is_new: bool,
    pub(super) differs: bool,
}

impl Begun {
    /// The operation of this reference, with the key and the body that the *first* one brought.
    pub fn entry(&self) -> &Entry {
        &self.entry
    }

    /// The same, to keep.
    pub fn into_entry(self) -> Entry {
        self.entry
    }

    /// Whether there was none of this reference before.
    pub fn is_new(&self) -> bool {
        self.is_new
    }

    /// Whether the one that was there asks for something else: method, URI, headers or body differ from those
    /// brought this time, which are not kept. Either a mistake of the caller's, or a new intent, which needs a
    /// reference of its own.
    pub fn differs(&self) -> bool {
        self.differs
    }
}

/// How many operations an outbox holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct OutboxCounts {
    /// To be sent.
    pub pending: u64,
    /// Pending for longer than they may be sent: somebody has to look up what became of them.
    pub overdue: u64,
    /// [Held](Entry::is_held), and not overdue yet: the same.
    pub held: u64,
    /// Done, and not purged yet.
    pub done: u64,
    /// Failed, and not purged yet.
    pub failed: u64,
}

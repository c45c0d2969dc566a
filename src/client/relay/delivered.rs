//! What became of operations that were sent.

use std::{
    error::Error,
    fmt,
    sync::{Mutex, PoisonError},
};

use axum::body::Body;
use http::{HeaderMap, Response, StatusCode, response::Parts};

use crate::client::{Entry, EntryState, OutboxError, Unanswered};

/// How an operation ended: the answer, and the row that says so.
///
/// `Debug` shows the row as [`Entry`] does, and of the answer its status.
pub struct Delivered {
    entry: Entry,
    state: EntryState,
    status: Option<StatusCode>,
    response: Option<Response<Body>>,
    unrecorded: Option<OutboxError>,
    unheld: Option<OutboxError>,
}

impl Delivered {
    /// What the outbox had already.
    pub(super) fn recorded(entry: Entry) -> Result<Self, Undelivered> {
        let response = entry.result()?.map(|response| response.map(Body::from));
        Ok(Self {
            state: entry.state(),
            status: entry.status(),
            response,
            unrecorded: None,
            unheld: None,
            entry,
        })
    }

    /// What the server says.
    pub(super) fn fresh(
        entry: Entry,
        (state, status): (EntryState, StatusCode),
        response: Option<Response<Body>>,
        recorded: Result<Entry, OutboxError>,
    ) -> Self {
        let (entry, unrecorded) = match recorded {
            Ok(recorded) => (recorded, None),
            Err(error) => (entry, Some(error)),
        };
        Self {
            entry,
            state,
            status: Some(status),
            response,
            unrecorded,
            unheld: None,
        }
    }

    /// Whether it could be held, after its end could not be recorded.
    pub(super) fn held(mut self, held: Result<Entry, OutboxError>) -> Self {
        match held {
            Ok(entry) => self.entry = entry,
            Err(error) => self.unheld = Some(error),
        }
        self
    }

    /// [`Done`](EntryState::Done) or [`Failed`](EntryState::Failed), as the answer says.
    pub fn state(&self) -> EntryState {
        self.state
    }

    /// The row as it is now: the same state, unless it could not be recorded, or somebody else was first with
    /// another one.
    pub fn entry(&self) -> &Entry {
        &self.entry
    }

    /// The status of the answer, also where there is nothing more of it.
    pub fn status(&self) -> Option<StatusCode> {
        self.status
    }

    /// The answer. One that the client just got has an [`Answered`](crate::client::Answered) among its extensions.
    /// `None` where nothing but the status was kept, by the server or by the outbox.
    pub fn response(&self) -> Option<&Response<Body>> {
        self.response.as_ref()
    }

    /// The same, to be read.
    pub fn into_response(self) -> Option<Response<Body>> {
        self.response
    }

    /// Why the end could not be recorded, if so. The operation is still pending then, and sent again for the server's
    /// replay; but for one that the server ran without a record, which is [held](Entry::is_held), unless
    /// [`unheld`](Self::unheld) says otherwise: [`settle`](crate::client::Outbox::settle) it.
    pub fn unrecorded(&self) -> Option<&OutboxError> {
        self.unrecorded.as_ref()
    }

    /// Why an operation could not even be [held](Entry::is_held) that the server ran without a record, and whose end
    /// could not be recorded. It would be sent again, and run again:
    /// [`settle`](crate::client::Outbox::settle) it before that.
    pub fn unheld(&self) -> Option<&OutboxError> {
        self.unheld.as_ref()
    }

    pub(super) fn into_recorded(self) -> Result<Entry, Undelivered> {
        let Some(unrecorded) = self.unrecorded else {
            return Ok(self.entry);
        };
        let Some(response) = self.response else {
            return Err(Undelivered::Outbox(unrecorded));
        };
        let mut told = Inconclusive::new(self.entry, response);
        told.unheld = self.unheld;
        told.unrecorded = Some(unrecorded);
        Err(Undelivered::Inconclusive(told))
    }
}

impl fmt::Debug for Delivered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Delivered")
            .field("state", &self.state)
            .field("status", &self.status())
            .field("entry", &self.entry)
            .field("unrecorded", &self.unrecorded)
            .field("unheld", &self.unheld)
            .finish_non_exhaustive()
    }
}

/// An answer that does not tell whether the operation has had its effect; or, in what
/// [`resume`](super::Relay::resume) reports, one that does and could not be
/// [recorded](Self::unrecorded).
///
/// `Debug` shows the row as [`Entry`] does, and of the answer its status.
pub struct Inconclusive {
    entry: Entry,
    head: Parts,
    // Errors can be shared between threads, and bodies cannot.
    body: Mutex<Body>,
    unheld: Option<OutboxError>,
    unrecorded: Option<OutboxError>,
}

impl Inconclusive {
    pub(super) fn new(entry: Entry, response: Response<Body>) -> Box<Self> {
        let (head, body) = response.into_parts();
        Box::new(Self {
            entry,
            head,
            body: Mutex::new(body),
            unheld: None,
            unrecorded: None,
        })
    }

    /// One that the server ran without a record.
    pub(super) fn held(
        entry: Entry,
        response: Response<Body>,
        held: Result<Entry, OutboxError>,
    ) -> Box<Self> {
        let (entry, unheld) = match held {
            Ok(held) => (held, None),
            Err(error) => (entry, Some(error)),
        };
        let mut told = Self::new(entry, response);
        told.unheld = unheld;
        told
    }

    /// The row as it was when the last attempt was made; or, where the server ran that without a record, as it was
    /// afterwards: [held](Entry::is_held).
    pub fn entry(&self) -> &Entry {
        &self.entry
    }

    /// Why the operation could not be [held](Entry::is_held), though the server ran it without a record. It would be
    /// sent again, and run again: [`settle`](crate::client::Outbox::settle) it before that.
    pub fn unheld(&self) -> Option<&OutboxError> {
        self.unheld.as_ref()
    }

    /// Why the end that this answer tells could not be recorded, if that is so.
    pub fn unrecorded(&self) -> Option<&OutboxError> {
        self.unrecorded.as_ref()
    }

    /// The status of the answer.
    pub fn status(&self) -> StatusCode {
        self.head.status
    }

    /// The answer's headers.
    pub fn headers(&self) -> &HeaderMap {
        &self.head.headers
    }

    /// The whole answer, with an [`Answered`](crate::client::Answered) among its extensions.
    pub fn into_response(self) -> Response<Body> {
        let body = self.body.into_inner();
        Response::from_parts(self.head, body.unwrap_or_else(PoisonError::into_inner))
    }
}

impl fmt::Debug for Inconclusive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inconclusive")
            .field("status", &self.status())
            .field("entry", &self.entry)
            .field("unheld", &self.unheld)
            .field("unrecorded", &self.unrecorded)
            .finish_non_exhaustive()
    }
}

/// Why an operation has no end yet.
///
/// Never a reason to begin the same intent under another reference, which would give it another key.
#[derive(Debug)]
#[non_exhaustive]
pub enum Undelivered {
    /// There is no answer. It is still pending, unless [`Reused`](Unanswered::Reused) came to the only attempt that
    /// was counted since it was begun or reopened: then it is recorded as failed.
    Unanswered(Unanswered),
    /// There is an answer, and it does not tell whether the operation has had its effect: a redirect, a status that
    /// no record stands behind, or a refusal that says nothing of earlier attempts. It is still pending: send it again
    /// once what it was refused for is mended, or look up the true state and
    /// [`settle`](crate::client::Outbox::settle) it. One that the server ran without a record is
    /// [held](Self::Held) from now on.
    Inconclusive(Box<Inconclusive>),
    /// The server has run it without a record, in an attempt that was made before or by another relay: it is not sent,
    /// since it would run again. Look up what became of it, and [`settle`](crate::client::Outbox::settle) it, or
    /// [`reopen`](crate::client::Outbox::reopen) it if it has had no effect.
    Held(Box<Entry>),
    /// It is older than the server keeps its key, and is not sent any more. Look up what became of it, and
    /// [`settle`](crate::client::Outbox::settle) it.
    #[non_exhaustive]
    Overdue {
        /// The row.
        entry: Box<Entry>,
        /// How the last attempt ended, if attempts were made in this very call. `None`: nothing was sent now.
        after: Option<Unanswered>,
    },
    /// There is an operation of this reference that asks for something else: nothing was sent. This is what is
    /// there. Only [`deliver`](super::Relay::deliver) says so.
    Differs(Box<Entry>),
    /// The outbox could not be read or written, or has no such operation, or the row cannot be read. Attempts that
    /// were made before stay counted.
    Outbox(OutboxError),
}

impl From<OutboxError> for Undelivered {
    fn from(error: OutboxError) -> Self {
        Self::Outbox(error)
    }
}

impl fmt::Display for Undelivered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unanswered(unanswered) => unanswered.fmt(f),
            Self::Inconclusive(inconclusive) if inconclusive.unrecorded.is_some() => write!(
                f,
                "the answer ({}) could not be recorded: settle the operation by it, or have it sent again if it is not held",
                inconclusive.status().as_u16()
            ),
            Self::Inconclusive(inconclusive) => write!(
                f,
                "the answer ({}) does not tell whether the operation has had its effect: look up the true state and settle it, or send it again",
                inconclusive.status().as_u16()
            ),
            Self::Held(_) => f.write_str(
                "the server has run the operation without a record, and it is not sent again: look up the true state, and settle or reopen it",
            ),
            Self::Overdue { after: None, .. } => f.write_str(
                "the operation is older than the server keeps its key, and is not sent: look up the true state, and settle it",
            ),
            Self::Overdue { after: Some(_), .. } => f.write_str(
                "the operation was sent without an answer, is now older than the server keeps its key, and is not sent again: look up the true state, and settle it",
            ),
            Self::Differs(_) => f.write_str(
                "the outbox has another operation of this reference: a new intent needs a new reference",
            ),
            Self::Outbox(error) => error.fmt(f),
        }
    }
}

impl Error for Undelivered {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Unanswered(unanswered) => unanswered.source(),
            Self::Outbox(error) => error.source(),
            Self::Overdue { after, .. } => after.as_ref().and_then(Error::source),
            Self::Inconclusive(_) | Self::Held(_) | Self::Differs(_) => None,
        }
    }
}

/// What [`resume`](super::Relay::resume) did, in no particular order.
///
/// Each entry holds its request, and its recorded answer, in memory.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct Resumed {
    /// Done.
    pub done: Vec<Entry>,
    /// Refused by the server, without any effect.
    pub failed: Vec<Entry>,
    /// Tried, and still pending, or recorded by nobody; and those whose rows cannot be read.
    pub pending: Vec<Unfinished>,
    /// Not sent, because the server has run them without a record: look up what became of each, and
    /// [`settle`](crate::client::Outbox::settle) it, or [`reopen`](crate::client::Outbox::reopen) it if it has had no
    /// effect. One that this run has found out about stands among [`pending`](Self::pending), with its answer.
    pub held: Vec<Entry>,
    /// Not sent any more, because the server may have forgotten their keys: look up what became of each, and
    /// [`settle`](crate::client::Outbox::settle) it. So are those that this run has tried, and that are too old now.
    pub overdue: Vec<Entry>,
}

/// An operation that is still pending, and why.
///
/// `Debug` does not show the reference.
#[non_exhaustive]
pub struct Unfinished {
    /// The operation's reference. Of a damaged row, what can be shown of it.
    pub reference: String,
    /// Why it has no end yet.
    pub why: Undelivered,
}

impl fmt::Debug for Unfinished {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Unfinished")
            .field("why", &self.why)
            .finish_non_exhaustive()
    }
}

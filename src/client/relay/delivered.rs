//! What became of operations that were sent.

use std::{error::Error, fmt};

use axum::body::Body;
use http::{Response, StatusCode};

use crate::client::{Entry, EntryState, OutboxError, Unanswered};

/// How an operation ended: the answer, and the row that says so.
///
/// `Debug` shows the row as [`Entry`] does.
#[derive(Debug)]
pub struct Delivered {
    entry: Entry,
    state: EntryState,
    response: Option<Response<Body>>,
    unrecorded: Option<OutboxError>,
}

impl Delivered {
    /// What the outbox had already.
    pub(super) fn recorded(entry: Entry) -> Result<Self, Undelivered> {
        let response = entry.result()?.map(|response| response.map(Body::from));
        Ok(Self {
            state: entry.state(),
            response,
            unrecorded: None,
            entry,
        })
    }

    /// What the server says.
    pub(super) fn fresh(
        entry: Entry,
        state: EntryState,
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
            response,
            unrecorded,
        }
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
        let answered = self.response.as_ref().map(Response::status);
        answered.or_else(|| self.entry.status())
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

    /// Why the end could not be recorded, if so. The operation is still pending then.
    pub fn unrecorded(&self) -> Option<&OutboxError> {
        self.unrecorded.as_ref()
    }

    pub(super) fn into_recorded(self) -> Result<Entry, OutboxError> {
        match self.unrecorded {
            None => Ok(self.entry),
            Some(error) => Err(error),
        }
    }
}

/// Why an operation has no end yet.
///
/// Never a reason to begin the same intent under another reference, which would give it another key.
#[derive(Debug)]
#[non_exhaustive]
pub enum Undelivered {
    /// There is no answer. After [`Reused`](Unanswered::Reused) the operation is recorded as failed; otherwise it
    /// is still pending.
    Unanswered(Unanswered),
    /// It is older than the server keeps its key: nothing was sent now. Look up what became of it, and
    /// [`settle`](crate::client::Outbox::settle) it.
    Overdue(Box<Entry>),
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
            Self::Overdue(_) => f.write_str(
                "the operation is older than the server keeps its key, and is not sent: look up the true state, and settle it",
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
            Self::Overdue(_) | Self::Differs(_) => None,
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
    /// Refused by the server.
    pub failed: Vec<Entry>,
    /// Tried, and still pending, or recorded by nobody.
    pub pending: Vec<Unfinished>,
    /// Not sent, because the server may have forgotten their keys: look up what became of each, and
    /// [`settle`](crate::client::Outbox::settle) it.
    pub overdue: Vec<Entry>,
}

/// An operation that is still pending, and why.
///
/// `Debug` does not show the reference.
#[non_exhaustive]
pub struct Unfinished {
    /// The operation's reference.
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

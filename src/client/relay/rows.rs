//! The requests of one operation, each read back from the outbox.

use bytes::Bytes;
use http::{HeaderName, Request};

use crate::{
    IdempotencyKey,
    client::{Entry, EntryState, NotSent, Outbox, OutboxDatabase, OutboxError, attempts::Source},
};

/// Where the attempts of an operation come from.
pub(super) struct Rows<'a, DB: OutboxDatabase> {
    outbox: &'a Outbox<DB>,
    reference: &'a str,
    key: IdempotencyKey,
    header_name: &'a HeaderName,
    stopped: Option<Stop>,
}

/// Why no further attempt is made.
pub(super) enum Stop {
    /// Somebody else has settled it.
    Settled(Box<Entry>),
    Overdue(Box<Entry>),
    Failed(OutboxError),
}

impl<'a, DB: OutboxDatabase> Rows<'a, DB> {
    pub(super) fn new(
        outbox: &'a Outbox<DB>,
        entry: &'a Entry,
        header_name: &'a HeaderName,
    ) -> Self {
        Self {
            outbox,
            reference: entry.reference(),
            key: entry.key(),
            header_name,
            stopped: None,
        }
    }

    pub(super) fn stopped(self) -> Option<Stop> {
        self.stopped
    }

    /// The request of the next attempt, counted.
    async fn next(&self) -> Result<Request<Bytes>, Stop> {
        let entry = self.read().await?;
        // First, so that a row that does not open stays as it is.
        let operation = entry.operation().map_err(Stop::Failed)?;
        let counted = self.outbox.count_attempt(&entry).await;
        if !counted.map_err(Stop::Failed)? {
            // Something has changed in between, and reading it once more says what.
            self.read().await?;
            return Err(Stop::Failed(OutboxError::missing()));
        }
        let mut request = operation.into_request();
        // That of the row is written instead.
        request.headers_mut().remove(self.header_name);
        Ok(request)
    }

    /// The row, if it may be sent.
    async fn read(&self) -> Result<Entry, Stop> {
        let found = self.outbox.find(self.reference).await;
        let found = found.map_err(Stop::Failed)?;
        // One that was purged and begun anew is another operation.
        let entry = found.filter(|found| found.key() == self.key);
        let entry = entry.ok_or_else(|| Stop::Failed(OutboxError::missing()))?;
        match entry.state() {
            EntryState::Pending if entry.is_overdue() => Err(Stop::Overdue(Box::new(entry))),
            EntryState::Pending => Ok(entry),
            EntryState::Done | EntryState::Failed => Err(Stop::Settled(Box::new(entry))),
        }
    }
}

impl<DB: OutboxDatabase> Source for &mut Rows<'_, DB> {
    fn key(&self) -> &IdempotencyKey {
        &self.key
    }

    async fn request(&mut self, _: u32) -> Result<Request<Bytes>, NotSent> {
        let stopped = match self.next().await {
            Ok(request) => return Ok(request),
            Err(stopped) => stopped,
        };
        let why = NotSent::new(match stopped {
            Stop::Settled(_) => "somebody else has settled the operation",
            Stop::Overdue(_) => "the operation is older than the server keeps its key",
            Stop::Failed(_) => "the operation cannot be read from the outbox",
        });
        self.stopped = Some(stopped);
        Err(why)
    }
}

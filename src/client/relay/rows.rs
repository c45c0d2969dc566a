//! The requests of one operation, each read back from the outbox.

use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use http::{HeaderName, Request};

use super::in_time;
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
    statement_timeout: Duration,
    counted: Option<Counted>,
    stopped: Option<Stop>,
}

/// An attempt that may be made.
pub(super) struct Counted {
    /// The row as it was read after it was counted.
    pub(super) entry: Entry,
    /// How many there are with this one.
    pub(super) attempts: i64,
    limit: Limit,
}

/// Why no further attempt is made.
pub(super) enum Stop {
    /// Somebody else has settled it.
    Settled(Box<Entry>),
    /// Another attempt ran without a record.
    Held(Box<Entry>),
    Overdue(Box<Entry>),
    Failed(OutboxError),
}

/// Until when it may be sent, by this process's own clocks.
struct Limit {
    left: Duration,
    from: Instant,
    /// An [`Instant`] may stand still while the machine sleeps.
    by_wall: SystemTime,
}

impl Limit {
    /// What the database is about to say it has left is counted from now on: from before it was asked, so that it
    /// ends too early rather than too late.
    fn from_now() -> Self {
        Self {
            left: Duration::ZERO,
            from: Instant::now(),
            by_wall: SystemTime::now(),
        }
    }

    fn is_over(&self) -> bool {
        let by_wall = self.by_wall.elapsed().unwrap_or_default();
        self.from.elapsed().max(by_wall) >= self.left
    }
}

impl<'a, DB: OutboxDatabase> Rows<'a, DB> {
    pub(super) fn new(
        outbox: &'a Outbox<DB>,
        entry: &'a Entry,
        header_name: &'a HeaderName,
        statement_timeout: Duration,
    ) -> Self {
        Self {
            outbox,
            reference: entry.reference(),
            key: entry.key(),
            header_name,
            statement_timeout,
            counted: None,
            stopped: None,
        }
    }

    /// The last attempt that was counted, and why there was no other one.
    pub(super) fn ended(self) -> (Option<Counted>, Option<Stop>) {
        (self.counted, self.stopped)
    }

    /// The request of the next attempt. It is counted first, and read afterwards: however long the count had to wait
    /// for a lock or a commit, what is left of its time is judged by what is read then.
    async fn next(&mut self) -> Result<Request<Bytes>, Stop> {
        let counted = self.outbox.count_attempt(self.reference, &self.key);
        let counted = in_time(self.statement_timeout, counted).await;
        let counted = counted.map_err(Stop::Failed)?;
        let mut limit = Limit::from_now();
        let entry = self.read().await?;
        // One that was settled and reopened in between.
        let attempts = counted.filter(|counted| entry.has_counted(*counted));
        let attempts = attempts.ok_or_else(|| Stop::Failed(OutboxError::reopened()))?;
        let operation = entry.operation().map_err(Stop::Failed)?;
        limit.left = entry.left();
        self.counted = Some(Counted {
            entry,
            attempts,
            limit,
        });
        let mut request = operation.into_request();
        // That of the row is written instead.
        request.headers_mut().remove(self.header_name);
        Ok(request)
    }

    /// The row, if it may be sent.
    async fn read(&self) -> Result<Entry, Stop> {
        let found = in_time(self.statement_timeout, self.outbox.find(self.reference)).await;
        let found = found.map_err(Stop::Failed)?;
        // One that was purged and begun anew is another operation.
        let entry = found.filter(|found| found.key() == self.key);
        let entry = entry.ok_or_else(|| Stop::Failed(OutboxError::missing()))?;
        match entry.state() {
            EntryState::Pending if entry.is_held() => Err(Stop::Held(Box::new(entry))),
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
            Stop::Held(_) => "the server has run the operation without a record",
            Stop::Overdue(_) => "the operation is older than the server keeps its key",
            Stop::Failed(_) => "the operation cannot be read from the outbox",
        });
        self.stopped = Some(stopped);
        Err(why)
    }

    fn may_still_be_sent(&mut self) -> bool {
        let Some(counted) = &self.counted else {
            return false;
        };
        let is_over = counted.limit.is_over();
        if is_over {
            let entry = counted.entry.clone().at_its_end();
            self.stopped = Some(Stop::Overdue(Box::new(entry)));
        }
        !is_over
    }
}

//! Sends what the outbox holds.

mod delivered;
mod line;
mod recording;
mod resume;
mod rows;
mod verdict;

use std::{fmt, future::Future, time::Duration};

use axum::BoxError;
use bytes::Bytes;
use http::{Request, Response};
use http_body::Body as HttpBody;
use tower_service::Service;

pub use self::delivered::{Delivered, Inconclusive, Resumed, Undelivered, Unfinished};
use self::rows::{Rows, Stop};
use super::{
    Entry, EntryState, Operation, Outbox, OutboxDatabase, OutboxError, Retry, Unanswered,
    attempts::attempts,
};
use crate::bounded::within;

/// Sends operations from an [`Outbox`], each with its first key and its first body, and records what became of
/// them.
///
/// Every attempt is counted durably first; then the row is read back, so that what somebody else has settled meanwhile
/// is not sent, nor what is [overdue](Outbox#when-it-is-too-late). What is left of its time is looked at once more
/// directly before it is sent, after the client was ready and the hook has run. Otherwise attempts are those of the
/// [`Retry`], with its waits and limits and its [`before_attempt`](super::RetryLayer::before_attempt). Its
/// [`methods`](super::RetryLayer::methods) do not matter here: whatever was begun is sent with its key.
///
/// | end | recorded | given back |
/// | --- | --- | --- |
/// | an answer of 2xx or 303, or the replay of any 3xx | done, with the answer | [`Delivered`] |
/// | an answer of 4xx other than 408, 409, 425, 429 and 499, which is a replay, or came to the only attempt that was counted since this operation was begun or reopened (see [`Entry::attempts`]), and no other attempt ran without a record | failed, with the answer: it has had no effect | [`Delivered`] |
/// | every other answer: a redirect, a 5xx replayed or not, a refusal after attempts whose outcome nobody knows | nothing: it stays pending | [`Undelivered::Inconclusive`] |
/// | [`NotRetained`](Unanswered::NotRetained) with a status of 2xx or 3xx, or of such a 4xx | done or failed by that status, without an answer | [`Delivered`] |
/// | [`Reused`](Unanswered::Reused) at the only attempt that was so counted | failed: the server has seen this key with another request, which is a mistake to be looked at | [`Undelivered::Unanswered`] |
/// | every other [`Unanswered`] | nothing: it stays pending | [`Undelivered::Unanswered`] |
/// | an answer of whatever status that the server gave without a record (`Idempotency-Status: unprotected`), where it does not tell the end or that cannot be recorded | [held](Entry::is_held): it stays pending, and is sent by nobody | [`Undelivered::Inconclusive`], or [`Delivered`] with [`unrecorded`](Delivered::unrecorded) |
/// | held before | nothing: it stays pending, and is sent by nobody | [`Undelivered::Held`] |
/// | overdue | nothing: it stays pending, and is sent by nobody | [`Undelivered::Overdue`] |
///
/// An answer is a replay if [`Answered::replayed`](super::Answered::replayed) says so. What stays pending is sent again
/// by [`resume`](Self::resume), not before the [time](Entry::not_before) that the server has named.
///
/// What the server ran without a record would run again if it were sent again. So it is *held*: neither `resume` nor
/// [`send`](Self::send) nor [`deliver`](Self::deliver) sends it, by any relay, until somebody has looked up what became
/// of it, and has [settled](Outbox::settle) or [reopened](Outbox::reopen) it.
///
/// An answer of more than 1 MiB, and a stream, are recorded with their status only; the caller gets all of it.
///
/// **Any number of relays may send the same operation at once.** They send the same key, so the server runs it
/// once and gives all of them its answer, and what the first records stays.
///
/// ```
/// # #[cfg(feature = "sqlite")] {
/// use axum::{Router, http::StatusCode, routing::post};
/// use sqlx::{Sqlite, SqlitePool};
/// use tower_idempotency::{IdempotencyLayer, MemoryStore};
/// use tower_idempotency::client::{EntryState, Operation, Outbox, Relay, Retry};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = tempfile::tempdir()?;
/// # let file = sqlx::sqlite::SqliteConnectOptions::new().filename(folder.path().join("shop.db"));
/// # let pool = SqlitePool::connect_with(file.create_if_missing(true)).await?;
/// # // In place of a client for the network.
/// # let server: Router = Router::new()
/// #     .route("/charges", post(async || (StatusCode::CREATED, "ch_1")))
/// #     .route_layer(IdempotencyLayer::new(MemoryStore::new()).single_tenant());
/// # let client = server;
/// let outbox: Outbox<Sqlite> = Outbox::new(pool);
/// outbox.migrate().await?;
/// let relay = Relay::new(outbox.clone(), Retry::new(client));
///
/// // At the start, and from a timer: whatever a crash or an outage has left.
/// let resumed = relay.resume::<axum::body::Body, _>(100).await?;
/// assert!(resumed.overdue.is_empty());
///
/// let charge = Operation::post("http://pay.example/charges".parse()?).body("250 baht");
/// let delivered = relay.deliver::<axum::body::Body, _>("charge A-17", charge).await?;
/// assert_eq!(delivered.state(), EntryState::Done);
/// assert_eq!(outbox.find("charge A-17").await?.unwrap().status(), Some(StatusCode::CREATED));
/// # Ok(())
/// # }
/// # }
/// ```
///
/// (The types need to be named only for a client that takes more than one kind of body.)
pub struct Relay<DB: OutboxDatabase, S> {
    outbox: Outbox<DB>,
    retry: Retry<S>,
    concurrency: usize,
    statement_timeout: Duration,
}

impl<DB: OutboxDatabase, S: Clone> Clone for Relay<DB, S> {
    fn clone(&self) -> Self {
        Self {
            outbox: self.outbox.clone(),
            retry: self.retry.clone(),
            concurrency: self.concurrency,
            statement_timeout: self.statement_timeout,
        }
    }
}

/// The output of a statement, if the database answers in time.
async fn in_time<T>(
    limit: Duration,
    statement: impl Future<Output = Result<T, OutboxError>>,
) -> Result<T, OutboxError> {
    let answered = within(limit, statement).await;
    answered.unwrap_or_else(|| Err(OutboxError::slow()))
}

impl<DB: OutboxDatabase, S> Relay<DB, S> {
    /// Sends the operations of this outbox with this client.
    ///
    /// # Panics
    ///
    /// When the client's [`attempt_timeout`](super::RetryLayer::attempt_timeout) is longer than the outbox's
    /// [`margin`](Outbox::margin): an attempt could arrive after the server has forgotten the key.
    #[must_use]
    pub fn new(outbox: Outbox<DB>, retry: Retry<S>) -> Self {
        let (timeout, margin) = (retry.options.attempt_timeout, outbox.margin_or_default());
        assert!(
            timeout <= margin,
            "attempt_timeout ({timeout:?}) must not be longer than the outbox's margin ({margin:?})"
        );
        Self {
            outbox,
            retry,
            concurrency: 8,
            statement_timeout: Duration::from_secs(5),
        }
    }

    /// How long each statement of the relay is waited for, its connection included. Default 5 s. One that takes longer
    /// fails as [`Database`](super::OutboxErrorKind::Database), and may take place later all the same: an operation is
    /// begun then, an attempt counted that is not made, an end recorded that is true.
    ///
    /// One that waits for a locked row keeps its connection until the lock ends, though nobody waits for it any more.
    /// So whoever holds rows of the outbox for long, by a transaction with [`begin_in`](Outbox::begin_in), can use up
    /// the pool: keep such transactions short, or give the relay a pool of its own.
    ///
    /// # Panics
    ///
    /// When zero.
    #[must_use]
    pub fn statement_timeout(mut self, timeout: Duration) -> Self {
        assert!(
            !timeout.is_zero(),
            "statement_timeout must be longer than zero"
        );
        self.statement_timeout = timeout;
        self
    }

    /// How many operations [`resume`](Self::resume) sends at once. Default 8. That many servers that hang hold up all
    /// others for the length of their time-outs: where operations go to several servers, one outbox (a
    /// [`table`](Outbox::table) of its own) with a relay for each is better.
    ///
    /// # Panics
    ///
    /// When zero.
    #[must_use]
    pub fn concurrency(mut self, operations: usize) -> Self {
        assert!(operations > 0, "concurrency must be at least 1");
        self.concurrency = operations;
        self
    }

    /// The outbox.
    pub fn outbox(&self) -> &Outbox<DB> {
        &self.outbox
    }

    /// Begins the operation, if there is none of this reference yet, and sends the one that is there.
    ///
    /// # Errors
    ///
    /// [`Undelivered::Differs`] when there is one of this reference that asks for something else: nothing is sent.
    /// Otherwise as [`Outbox::begin`] and [`send`](Self::send).
    ///
    /// # Cancel safety
    ///
    /// Dropped, the operation may have been begun or not, and sent or not. Call it again with the same reference,
    /// or let [`resume`](Self::resume) find it. The same goes for an error of kind
    /// [`Database`](super::OutboxErrorKind::Database): it may be begun a moment later, and will be sent then.
    pub async fn deliver<B, RB>(
        &self,
        reference: &str,
        operation: Operation,
    ) -> Result<Delivered, Undelivered>
    where
        S: Service<Request<B>, Response = Response<RB>> + Clone + Send,
        S::Future: Send,
        S::Error: Into<BoxError>,
        B: From<Bytes> + Send,
        RB: HttpBody<Data = Bytes> + Send + 'static,
        RB::Error: Into<BoxError>,
    {
        let begun = self.outbox.begin(reference, operation);
        let begun = in_time(self.statement_timeout, begun).await?;
        if begun.differs() {
            return Err(Undelivered::Differs(Box::new(begun.into_entry())));
        }
        self.send(reference).await
    }

    /// Sends the operation of this reference. One that is settled already is not sent: what was recorded is given
    /// back.
    ///
    /// If the end cannot be recorded, though it is tried for some seconds (three times the
    /// [`statement_timeout`](Self::statement_timeout) at most), the caller gets the true answer all the
    /// same ([`Delivered::unrecorded`]). The operation stays pending then, and a later
    /// [`resume`](Self::resume) gets the server's replay. There is none of what the server ran without a record: that
    /// is [held](Entry::is_held), which is tried for as long again.
    ///
    /// # Errors
    ///
    /// [`Undelivered`].
    ///
    /// # Cancel safety
    ///
    /// Dropped, it may have been sent or not, and stays pending unless its end was recorded. Send it again. (Where the server
    /// runs requests without a record while its store is away, look the true state up before: what was dropped while it
    /// was to be recorded is not held either.)
    pub async fn send<B, RB>(&self, reference: &str) -> Result<Delivered, Undelivered>
    where
        S: Service<Request<B>, Response = Response<RB>> + Clone + Send,
        S::Future: Send,
        S::Error: Into<BoxError>,
        B: From<Bytes> + Send,
        RB: HttpBody<Data = Bytes> + Send + 'static,
        RB::Error: Into<BoxError>,
    {
        let found = in_time(self.statement_timeout, self.outbox.find(reference)).await?;
        let entry = found.ok_or_else(OutboxError::missing)?;
        if entry.state() != EntryState::Pending {
            return Delivered::recorded(entry);
        }
        if entry.is_held() {
            return Err(Undelivered::Held(Box::new(entry)));
        }
        if entry.is_overdue() {
            return Err(overdue(entry, None));
        }
        // First, so that a row that does not open stays as it is.
        let _ = entry.operation()?;
        let options = &self.retry.options;
        let header_name = &options.keys.header_name;
        let mut rows = Rows::new(&self.outbox, &entry, header_name, self.statement_timeout);
        let answered = attempts(options, self.retry.inner.clone(), &mut rows).await;
        let (counted, stopped) = rows.ended();
        let (last, number) = match counted {
            Some(counted) => (counted.entry, counted.attempts),
            None => (entry, 0),
        };
        match (stopped, answered) {
            (Some(Stop::Settled(entry)), _) => Delivered::recorded(*entry),
            (Some(Stop::Held(entry)), _) => Err(Undelivered::Held(entry)),
            (Some(Stop::Overdue(entry)), answered) => Err(overdue(*entry, answered.err())),
            (Some(Stop::Failed(error)), answered) => {
                // What the attempt before was told.
                let hint = answered
                    .err()
                    .and_then(|unanswered| unanswered.retry_after());
                self.defer(&last, hint).await;
                Err(Undelivered::Outbox(error))
            }
            (None, Ok(response)) => self.answered(last, number, response).await,
            (None, Err(unanswered)) => self.unanswered(last, number, unanswered).await,
        }
    }
}

/// Attempts that were made in the same call are told.
fn overdue(entry: Entry, after: Option<Unanswered>) -> Undelivered {
    Undelivered::Overdue {
        entry: Box::new(entry),
        after: after.filter(|unanswered| unanswered.ended().is_some()),
    }
}

impl<DB: OutboxDatabase, S> fmt::Debug for Relay<DB, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Relay")
            .field("outbox", &self.outbox)
            .field("retry", &self.retry.options)
            .field("concurrency", &self.concurrency)
            .field("statement_timeout", &self.statement_timeout)
            .finish_non_exhaustive()
    }
}

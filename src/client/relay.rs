//! Sends what the outbox holds.

mod delivered;
mod rows;

use std::{collections::HashSet, fmt, time::Duration};

use axum::{BoxError, body::Body};
use bytes::Bytes;
use futures_util::{StreamExt, stream::FuturesUnordered};
use http::{Request, Response, StatusCode};
use http_body::Body as HttpBody;
use tokio::time::sleep;
use tower_service::Service;

pub use self::delivered::{Delivered, Resumed, Undelivered, Unfinished};
use self::rows::{Rows, Stop};
use super::{
    Entry, EntryState, Operation, Outbox, OutboxDatabase, OutboxError, OutboxErrorKind, Retry,
    Unanswered, attempts::attempts, outbox::MAX_RESULT_LEN,
};
use crate::{
    body::{Captured, capture_response},
    execution::is_stream,
    maintenance::jittered,
};

/// Sends operations from an [`Outbox`], each with its first key and its first body, and records what became of
/// them.
///
/// Before every attempt the row is read back: what somebody else has settled meanwhile is not sent, nor what is
/// [overdue](Outbox#when-it-is-too-late), and the attempt is counted durably before it is made. Otherwise attempts
/// are those of the [`Retry`], with its waits and limits and its
/// [`before_attempt`](super::RetryLayer::before_attempt). Its [`methods`](super::RetryLayer::methods) do not
/// matter here: whatever was begun is sent with its key.
///
/// | end | recorded | given back |
/// | --- | --- | --- |
/// | an answer of 2xx or 3xx | done, with the answer | [`Delivered`] |
/// | any other answer | failed, with the answer | [`Delivered`] |
/// | [`NotRetained`](Unanswered::NotRetained) with a status | done or failed by that status, without an answer | [`Delivered`] |
/// | [`Reused`](Unanswered::Reused) | failed: the server has seen this key with another request, which is a mistake to be looked at | [`Undelivered::Unanswered`] |
/// | every other [`Unanswered`] | nothing: it stays pending, and is sent again by [`resume`](Self::resume) | [`Undelivered::Unanswered`] |
/// | overdue | nothing: it stays pending, and is sent by nobody | [`Undelivered::Overdue`] |
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
#[derive(Clone)]
pub struct Relay<DB: OutboxDatabase, S> {
    outbox: Outbox<DB>,
    retry: Retry<S>,
    concurrency: usize,
}

/// How often the record of an end is tried, and what is waited after the first time; doubled each time.
const RECORD_TRIES: u32 = 6;
const RECORD_PAUSE: Duration = Duration::from_millis(100);

/// An answer that the client has not read yet is a stream, or too large; it is not waited for long.
const REST_PATIENCE: Duration = Duration::from_secs(1);

/// How many references are read at a time.
const PAGE: usize = 64;

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
        }
    }

    /// How many operations [`resume`](Self::resume) sends at once. Default 8.
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
    /// or let [`resume`](Self::resume) find it.
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
        let begun = self.outbox.begin(reference, operation).await?;
        if begun.differs() {
            return Err(Undelivered::Differs(Box::new(begun.into_entry())));
        }
        self.send(reference).await
    }

    /// Sends the operation of this reference. One that is settled already is not sent: what was recorded is given
    /// back.
    ///
    /// If the end cannot be recorded, though it is tried for some seconds, the caller gets the true answer all the
    /// same ([`Delivered::unrecorded`]). The operation stays pending then, and a later
    /// [`resume`](Self::resume) gets the server's replay.
    ///
    /// # Errors
    ///
    /// [`Undelivered`].
    ///
    /// # Cancel safety
    ///
    /// Dropped, it may have been sent or not, and stays pending unless its end was recorded. Send it again.
    pub async fn send<B, RB>(&self, reference: &str) -> Result<Delivered, Undelivered>
    where
        S: Service<Request<B>, Response = Response<RB>> + Clone + Send,
        S::Future: Send,
        S::Error: Into<BoxError>,
        B: From<Bytes> + Send,
        RB: HttpBody<Data = Bytes> + Send + 'static,
        RB::Error: Into<BoxError>,
    {
        let entry = self.outbox.find(reference).await?;
        let entry = entry.ok_or_else(OutboxError::missing)?;
        if entry.state() != EntryState::Pending {
            return Delivered::recorded(entry);
        }
        let options = &self.retry.options;
        let mut rows = Rows::new(&self.outbox, &entry, &options.keys.header_name);
        let answered = attempts(options, self.retry.inner.clone(), &mut rows).await;
        match (rows.stopped(), answered) {
            (Some(Stop::Settled(entry)), _) => Delivered::recorded(*entry),
            (Some(Stop::Overdue(entry)), _) => Err(Undelivered::Overdue(entry)),
            (Some(Stop::Failed(error)), _) => Err(Undelivered::Outbox(error)),
            (None, Ok(response)) => Ok(self.answered(entry, response).await),
            (None, Err(unanswered)) => self.unanswered(entry, unanswered).await,
        }
    }

    /// Sends what is pending, at most so many operations: after a restart, and from a timer. Begins with those that
    /// were not tried for the longest time.
    ///
    /// One that cannot be read, because its sealing key is missing or its row damaged, stops nobody else, is not
    /// counted, and stands among [`pending`](Resumed::pending) with the reason. What is overdue already is not
    /// sent, and stands in [`overdue`](Resumed::overdue), at most so many again.
    ///
    /// # Errors
    ///
    /// [`OutboxErrorKind::Database`] when the outbox cannot be read to begin with.
    ///
    /// # Cancel safety
    ///
    /// Dropped, operations that were under way may have been sent, and stay pending unless their end was recorded.
    pub async fn resume<B, RB>(&self, limit: usize) -> Result<Resumed, OutboxError>
    where
        S: Service<Request<B>, Response = Response<RB>> + Clone + Send,
        S::Future: Send,
        S::Error: Into<BoxError>,
        B: From<Bytes> + Send,
        RB: HttpBody<Data = Bytes> + Send + 'static,
        RB::Error: Into<BoxError>,
    {
        let mut resumed = Resumed {
            overdue: self.outbox.overdue(limit).await?,
            ..Resumed::default()
        };
        let mut last = (String::new(), i64::MIN);
        let mut seen = HashSet::new();
        let mut tried = 0;
        while tried < limit {
            let page = self.outbox.turns(&last, PAGE.min(limit - tried)).await;
            let page = match page {
                Ok(page) => page,
                Err(error) if seen.is_empty() => return Err(error),
                // What was sent is worth telling, and the rest is for the next time.
                Err(_) => break,
            };
            let Some(end) = page.last() else { break };
            last = end.clone();
            // One that was tried comes again at the end.
            let new = page.into_iter().map(|(reference, _)| reference);
            let new: Vec<String> = new.filter(|turn| seen.insert(turn.clone())).collect();
            let mut ends = self.send_all(new).await;
            tried += ends.iter().filter(|end| end.is_tried()).count();
            while let Some(end) = ends.pop() {
                self.report(&mut resumed, end).await;
            }
        }
        Ok(resumed)
    }

    /// Sends these, several at once.
    async fn send_all<B, RB>(&self, references: Vec<String>) -> Vec<Sent>
    where
        S: Service<Request<B>, Response = Response<RB>> + Clone + Send,
        S::Future: Send,
        S::Error: Into<BoxError>,
        B: From<Bytes> + Send,
        RB: HttpBody<Data = Bytes> + Send + 'static,
        RB::Error: Into<BoxError>,
    {
        let mut ends = Vec::with_capacity(references.len());
        let mut waiting = references.into_iter();
        let mut under_way = FuturesUnordered::new();
        loop {
            while under_way.len() < self.concurrency
                && let Some(reference) = waiting.next()
            {
                under_way.push(async move {
                    let end = self.send(&reference).await;
                    Sent { reference, end }
                });
            }
            match under_way.next().await {
                Some(end) => ends.push(end),
                None => return ends,
            }
        }
    }

    async fn report(&self, resumed: &mut Resumed, sent: Sent) {
        let Sent { reference, end } = sent;
        let why = match end {
            Ok(delivered) => match delivered.into_recorded() {
                Ok(entry) if entry.state() == EntryState::Done => return resumed.done.push(entry),
                Ok(entry) => return resumed.failed.push(entry),
                Err(unrecorded) => Undelivered::Outbox(unrecorded),
            },
            Err(why) => why,
        };
        if let Undelivered::Unanswered(Unanswered::Reused(_)) = &why
            && let Ok(Some(entry)) = self.outbox.find(&reference).await
            && entry.state() == EntryState::Failed
        {
            return resumed.failed.push(entry);
        }
        resumed.pending.push(Unfinished { reference, why });
    }

    async fn answered(&self, entry: Entry, response: Response<Body>) -> Delivered {
        let (head, body) = response.into_parts();
        let (data, body) = match is_stream(&head) {
            true => (None, body),
            false => match capture_response(body, MAX_RESULT_LEN, REST_PATIENCE).await {
                Captured::Whole(data, body) => (Some(data), body),
                Captured::Not(body) | Captured::Broken(body) => (None, body),
            },
        };
        let answer = data.map(|data| Response::from_parts(head.clone(), data));
        let state = EntryState::after(head.status);
        let recorded = self
            .record(&entry, state, Some(head.status), answer.as_ref())
            .await;
        let response = Response::from_parts(head, body);
        Delivered::fresh(entry, state, Some(response), recorded)
    }

    async fn unanswered(
        &self,
        entry: Entry,
        unanswered: Unanswered,
    ) -> Result<Delivered, Undelivered> {
        match &unanswered {
            Unanswered::NotRetained {
                original_status: Some(status),
                ..
            } => {
                let state = EntryState::after(*status);
                let recorded = self.record(&entry, state, Some(*status), None).await;
                return Ok(Delivered::fresh(entry, state, None, recorded));
            }
            Unanswered::Reused(ended) => {
                let status = ended.response().map(Response::status);
                // If it cannot be recorded, the next attempt is told the same.
                let _ = self
                    .record(&entry, EntryState::Failed, status, ended.response())
                    .await;
            }
            // The server does not say how it ended, so it is not for us to say either.
            _ => {}
        }
        Err(Undelivered::Unanswered(unanswered))
    }

    /// Records an end, again and again while the database is out of reach, for about three seconds besides what the
    /// tries take.
    async fn record(
        &self,
        entry: &Entry,
        state: EntryState,
        status: Option<StatusCode>,
        answer: Option<&Response<Bytes>>,
    ) -> Result<Entry, OutboxError> {
        let mut tries = 0;
        loop {
            let recorded = self.outbox.record(entry, state, status, answer).await;
            tries += 1;
            match recorded {
                Err(error) if error.kind() == OutboxErrorKind::Database && tries < RECORD_TRIES => {
                    sleep(jittered(RECORD_PAUSE * 2_u32.pow(tries - 1))).await;
                }
                ended => return ended,
            }
        }
    }
}

/// What became of one operation of many.
struct Sent {
    reference: String,
    end: Result<Delivered, Undelivered>,
}

impl Sent {
    /// Whether it was read at all.
    fn is_tried(&self) -> bool {
        let Err(Undelivered::Outbox(error)) = &self.end else {
            return true;
        };
        !matches!(
            error.kind(),
            OutboxErrorKind::Keys | OutboxErrorKind::Damaged
        )
    }
}

impl<DB: OutboxDatabase, S> fmt::Debug for Relay<DB, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Relay")
            .field("outbox", &self.outbox)
            .field("retry", &self.retry.options)
            .field("concurrency", &self.concurrency)
            .finish_non_exhaustive()
    }
}

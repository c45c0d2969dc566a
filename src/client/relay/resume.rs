//! Sending all that is pending.

use axum::BoxError;
use bytes::Bytes;
use futures_util::{StreamExt, future::Either, stream::FuturesUnordered};
use http::{Request, Response};
use http_body::Body as HttpBody;
use tower_service::Service;

use super::{Delivered, Relay, Resumed, Undelivered, Unfinished, in_time, line::Line};
#[cfg(doc)]
use crate::client::Outbox;
use crate::client::{
    Entry, EntryState, OutboxDatabase, OutboxError, OutboxErrorKind, Unanswered, outbox::Turn,
};

impl<DB: OutboxDatabase, S> Relay<DB, S> {
    /// Sends what is pending, at most so many operations: after a restart, and from a timer. Begins with those that
    /// have waited longest for their turn; where several resume at once, each takes turns that the others did not.
    /// What the server wants [no sooner](Entry::not_before) is left for then.
    ///
    /// One that cannot be read, because its sealing key is missing or its row damaged, stops nobody else, is not
    /// counted, and stands among [`pending`](Resumed::pending) with the reason; not more than twice `limit` are looked
    /// at in all. What is overdue already is not sent, and stands in [`overdue`](Resumed::overdue), at most so many
    /// again.
    ///
    /// # Errors
    ///
    /// [`OutboxErrorKind::Database`] when the outbox cannot be read to begin with.
    ///
    /// # Cancel safety
    ///
    /// Dropped, operations that were under way may have been sent, and stay pending unless their end was recorded.
    /// What ended before is in the outbox: see [`list`](Outbox::list).
    pub async fn resume<B, RB>(&self, limit: usize) -> Result<Resumed, OutboxError>
    where
        S: Service<Request<B>, Response = Response<RB>> + Clone + Send,
        S::Future: Send,
        S::Error: Into<BoxError>,
        B: From<Bytes> + Send,
        RB: HttpBody<Data = Bytes> + Send + 'static,
        RB::Error: Into<BoxError>,
    {
        let overdue = in_time(self.statement_timeout, self.outbox.overdue(limit)).await?;
        let since = in_time(self.statement_timeout, self.outbox.now()).await?;
        let mut resumed = Resumed {
            overdue,
            ..Resumed::default()
        };
        let mut line = Line::new(limit);
        // Everything is waited for together: what was left alone in the middle of a statement could hold the only
        // connection that the others need.
        let mut under_way = FuturesUnordered::new();
        loop {
            while let Some(reference) = line.next(self.concurrency) {
                under_way.push(Either::Left(async move {
                    let sent = self.send(&reference).await;
                    Step::Sent(self.became(reference, sent).await)
                }));
            }
            if let Some(places) = line.asks() {
                under_way.push(Either::Right(async move {
                    let turns = self.outbox.take_turns(since, places);
                    Step::Turns(in_time(self.statement_timeout, turns).await)
                }));
            }
            match under_way.next().await {
                None => return Ok(resumed),
                Some(Step::Sent(became)) => {
                    line.sent(became.is_tried());
                    became.goes_into(&mut resumed);
                }
                Some(Step::Turns(Ok(turns))) => {
                    for reference in line.arrive(turns) {
                        let why = Undelivered::Outbox(OutboxError::damaged());
                        resumed.pending.push(Unfinished { reference, why });
                    }
                }
                // What was sent is worth telling, and the rest is for the next time.
                Some(Step::Turns(Err(error))) => {
                    if !line.ends() {
                        return Err(error);
                    }
                }
            }
        }
    }

    /// What is reported of one of many.
    async fn became(&self, reference: String, sent: Result<Delivered, Undelivered>) -> Became {
        let why = match sent {
            Ok(delivered) => match delivered.into_recorded() {
                Ok(entry) => return Became::Settled(Box::new(entry)),
                Err(unrecorded) => Undelivered::Outbox(unrecorded),
            },
            Err(why) => why,
        };
        if let Undelivered::Unanswered(Unanswered::Reused(_)) = &why
            && let Ok(Some(entry)) =
                in_time(self.statement_timeout, self.outbox.find(&reference)).await
            && entry.state() == EntryState::Failed
        {
            return Became::Settled(Box::new(entry));
        }
        Became::Unfinished(Unfinished { reference, why })
    }
}

/// What a run over the outbox waits for.
enum Step {
    Sent(Became),
    Turns(Result<Vec<Turn>, OutboxError>),
}

/// What became of one operation of many.
enum Became {
    Settled(Box<Entry>),
    Unfinished(Unfinished),
}

impl Became {
    /// Whether it was read at all.
    fn is_tried(&self) -> bool {
        let Self::Unfinished(unfinished) = self else {
            return true;
        };
        let Undelivered::Outbox(error) = &unfinished.why else {
            return true;
        };
        !matches!(
            error.kind(),
            OutboxErrorKind::Keys | OutboxErrorKind::Damaged
        )
    }

    fn goes_into(self, resumed: &mut Resumed) {
        match self {
            Self::Settled(entry) if entry.state() == EntryState::Done => resumed.done.push(*entry),
            Self::Settled(entry) => resumed.failed.push(*entry),
            Self::Unfinished(unfinished) => resumed.pending.push(unfinished),
        }
    }
}

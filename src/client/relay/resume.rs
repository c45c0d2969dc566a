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
    Entry, EntryState, OutboxDatabase, OutboxError, OutboxErrorKind, outbox::Turn,
};

impl<DB: OutboxDatabase, S> Relay<DB, S> {
    /// Sends what is pending, at most so many operations: after a restart, and from a timer. Begins with those that
    /// have waited longest for their turn; where several resume at once, each takes turns that the others did not.
    /// What the server wants [no sooner](Entry::not_before) is left for then.
    ///
    /// One that cannot be read, because its sealing key is missing or its row damaged, stops nobody else, is not
    /// counted, and stands among [`pending`](Resumed::pending) with the reason; not more than twice `limit` are looked
    /// at in all. What is overdue already is not sent, and stands in [`overdue`](Resumed::overdue), at most so many
    /// again; and what is held in [`held`](Resumed::held), at most so many; what is found out on the way comes on top. Always
    /// the oldest: settle them, or the others are seen in [`counts`](Outbox::counts) only.
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
        let held = in_time(self.statement_timeout, self.outbox.held(limit)).await?;
        let since = in_time(self.statement_timeout, self.outbox.now()).await?;
        let mut resumed = Resumed {
            held,
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
        let told = sent.as_ref().ok().map(Delivered::state);
        let why = match sent.and_then(Delivered::into_recorded) {
            Ok(entry) => return Became::Settled(Box::new(entry)),
            Err(Undelivered::Held(entry)) => return Became::Held(entry),
            Err(why) => why,
        };
        let unfinished = Unfinished { reference, why };
        if !unfinished.is_read() {
            return Became::Unfinished(unfinished);
        }
        // Somebody else may have settled it meanwhile; or it has failed, by a key that was used before.
        let found = self.outbox.find(&unfinished.reference);
        match in_time(self.statement_timeout, found).await {
            // But what this one was told to be done has not failed.
            Ok(Some(entry)) if entry.state() == EntryState::Done => {
                Became::Settled(Box::new(entry))
            }
            Ok(Some(entry))
                if entry.state() == EntryState::Failed && told != Some(EntryState::Done) =>
            {
                Became::Settled(Box::new(entry))
            }
            _ => match unfinished.why {
                Undelivered::Overdue { entry, .. } => Became::Overdue(entry),
                _ => Became::Unfinished(unfinished),
            },
        }
    }
}

/// What a run over the outbox waits for.
enum Step {
    Sent(Became),
    Turns(Result<Vec<Turn>, OutboxError>),
}

impl Unfinished {
    /// Whether its row could be read.
    fn is_read(&self) -> bool {
        let Undelivered::Outbox(error) = &self.why else {
            return true;
        };
        !matches!(
            error.kind(),
            OutboxErrorKind::Keys | OutboxErrorKind::Damaged
        )
    }
}

/// What became of one operation of many.
enum Became {
    Settled(Box<Entry>),
    Held(Box<Entry>),
    Overdue(Box<Entry>),
    Unfinished(Unfinished),
}

impl Became {
    /// Whether it was read at all.
    fn is_tried(&self) -> bool {
        match self {
            Self::Unfinished(unfinished) => unfinished.is_read(),
            Self::Settled(_) | Self::Held(_) | Self::Overdue(_) => true,
        }
    }

    fn goes_into(self, resumed: &mut Resumed) {
        // One that was held before, and reopened during the run.
        let reference = match &self {
            Self::Settled(entry) | Self::Held(entry) | Self::Overdue(entry) => entry.reference(),
            Self::Unfinished(unfinished) => &unfinished.reference,
        };
        resumed.held.retain(|held| held.reference() != reference);
        match self {
            Self::Settled(entry) if entry.state() == EntryState::Done => resumed.done.push(*entry),
            Self::Settled(entry) => resumed.failed.push(*entry),
            Self::Held(entry) => resumed.held.push(*entry),
            Self::Overdue(entry) => resumed.overdue.push(*entry),
            Self::Unfinished(unfinished) => resumed.pending.push(unfinished),
        }
    }
}

//! Finding out what a run did that was cut off: take its record over, ask, settle.

use std::{future::Future, pin::pin, sync::Arc, time::Duration};

use axum::body::Body;
use http::Response;

use crate::{
    Retain, Verdict,
    bounded::within,
    engine::{self, Engine},
    execution::{self, Outcome, Watched, keep, watched},
    live,
    observe::{self, By, Concluded, Operation},
    options::Options,
    record::{Record, Token},
    recovery::{Abandoned, Resolves},
    store::{Checkpoints, Completion, Inspect, Settled, Store, StoreError, StoreErrorKind, Ticket},
};

/// What became of an abandoned record that somebody tried to settle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
#[non_exhaustive]
pub enum Resolved {
    /// It is completed: every retry gets the answer, or, where that could not be kept, is told that it is
    /// done.
    Answered,
    /// The key is free again.
    Freed,
    /// It is still abandoned.
    Left,
    /// Nothing was changed, because the record is not as it was: its own run has ended after all, or somebody
    /// else has taken it over, settled or forgotten it.
    Lost,
}

/// Where the verdict comes from.
pub(crate) enum Question {
    /// It is to be found out.
    Resolver(Arc<dyn Resolves>),
    /// What was not committed did not happen.
    Uncommitted,
    /// Somebody knows it already.
    Known(Verdict),
}

/// What was found out.
enum Found {
    Done(Completion),
    DidNotHappen,
    Unknown(Concluded),
}

/// Takes the record over as it was found, then asks, then settles: so neither its late owner nor anybody
/// else acts meanwhile.
///
/// Dropped in between, it leaves the record to the background, which gives it up at once. An answer that was
/// found and cannot be recorded within `store_timeout` is recorded from there, too; the error says so.
pub(crate) async fn resolve<S: Inspect + Checkpoints>(
    engine: &Arc<Engine<S>>,
    record: Record,
    by: By,
    question: Question,
) -> Result<Resolved, StoreError> {
    let attempt = record.attempt;
    let resolved = match Taken::take(engine, &record).await {
        Ok(Some(taken)) => match taken.ask(record, question).await {
            Ok(found) => taken.settle(found).await,
            Err(error) => {
                // It is known to be unknown; what the store says of that changes nothing.
                let _ = taken.settle(Found::Unknown(Concluded::Failed)).await;
                Err(error)
            }
        },
        Ok(None) => Ok((Resolved::Lost, Concluded::Lost)),
        Err(error) => Err(error),
    };
    let concluded = resolved
        .as_ref()
        .map_or(Concluded::Failed, |(_, said)| *said);
    observe::resolved(by, concluded, attempt);
    resolved.map(|(resolved, _)| resolved)
}

/// A record that is held in order to find out what its run did.
struct Taken<S: Store> {
    engine: Arc<Engine<S>>,
    ticket: Ticket,
    /// What the record is to become, as far as that is known.
    outcome: Outcome,
    /// The hold may stand in the store. Dropped like that, also because its runtime ends, it is left to the
    /// background.
    stands: bool,
    _counted: live::Resolves,
}

impl<S: Store> Drop for Taken<S> {
    fn drop(&mut self) {
        if self.stands {
            let outcome = std::mem::replace(&mut self.outcome, Outcome::Abandoned);
            self.engine.leave_behind(self.ticket.clone(), outcome);
        }
    }
}

impl<S: Inspect + Checkpoints> Taken<S> {
    /// `None`: the record is not as it was found.
    async fn take(engine: &Arc<Engine<S>>, record: &Record) -> Result<Option<Self>, StoreError> {
        let token = Token::random();
        let mut taken = Self {
            engine: engine.clone(),
            ticket: Ticket {
                id: record.id.clone(),
                token,
                attempt: record.attempt,
            },
            outcome: Outcome::Abandoned,
            stands: true,
            _counted: engine.live.resolves(),
        };
        let hold = engine.options.hold();
        let mut tries = 0;
        let answer = persistently(&engine.options, Operation::TakeOver, || {
            tries += 1;
            engine
                .store
                .take_over(&record.id, record.token, token, hold)
        })
        .await;
        // An earlier try whose answer was lost may stand, or come to stand, whatever a later one says.
        let lost = |kind| kind == StoreErrorKind::Unavailable;
        taken.stands = tries > 1
            || answer
                .as_ref()
                .map_or_else(|error| lost(error.kind()), Option::is_some);
        let Some(ticket) = answer? else {
            return Ok(None);
        };
        taken.ticket = ticket;
        Ok(Some(taken))
    }

    async fn ask(&self, record: Record, question: Question) -> Result<Found, StoreError> {
        let resolver = match question {
            Question::Uncommitted => return Ok(Found::DidNotHappen),
            Question::Known(verdict) => return Ok(self.find_out(async { verdict }).await),
            Question::Resolver(resolver) => resolver,
        };
        let (store, options) = (&self.engine.store, &self.engine.options);
        let load = || store.load(&self.ticket);
        let Some(checkpoints) = persistently(options, Operation::Load, load).await? else {
            return Ok(Found::Unknown(Concluded::Lost));
        };
        let stored = store.stored_id(&record.id);
        let abandoned = Abandoned::new(record, stored, checkpoints, options.downstream.clone());
        Ok(self
            .find_out(async move { resolver.ask(abandoned).await })
            .await)
    }

    /// Waits for the verdict as long as that may take, and takes its answer apart.
    async fn find_out(&self, verdict: impl Future<Output = Verdict>) -> Found {
        let (options, live) = (&self.engine.options, &self.engine.live);
        let finding = async {
            match within(options.resolver_timeout, verdict).await {
                Some(verdict) => options.found(verdict).await,
                None => Found::Unknown(Concluded::TimedOut),
            }
        };
        let finding = pin!(Some(finding));
        match watched(finding, live.aborted()).await {
            Watched::Done(found) => found,
            Watched::Panicked(_) => Found::Unknown(Concluded::Panicked),
            Watched::Stopped(()) => Found::Unknown(Concluded::Aborted),
        }
    }

    /// Records what was found out, and wakes whoever waits for this key.
    async fn settle(mut self, found: Found) -> Result<(Resolved, Concluded), StoreError> {
        let resolved;
        (self.outcome, resolved) = match found {
            Found::Done(done) => (
                Outcome::Completed(done),
                (Resolved::Answered, Concluded::Answered),
            ),
            Found::DidNotHappen => (
                Outcome::Released,
                (Resolved::Freed, Concluded::DidNotHappen),
            ),
            Found::Unknown(why) => (Outcome::Abandoned, (Resolved::Left, why)),
        };
        let engine = self.engine.clone();
        let operation = self.outcome.operation();
        let recorded = execution::keep_recording(&engine, &self.ticket, self.outcome.clone());
        match within(engine.options.store_timeout, recorded).await {
            Some(Some(settled)) => {
                self.stands = false;
                engine.live.waiting.settled(&self.ticket.id);
                match settled {
                    Settled::Done => Ok(resolved),
                    Settled::Lost => Ok((Resolved::Lost, Concluded::Lost)),
                }
            }
            Some(None) => {
                // Hopeless: it counts as abandoned again once the hold is over.
                self.stands = false;
                Err(unavailable(
                    "the store does not take what was found out about a run",
                ))
            }
            None => {
                observe::recording_late(operation);
                Err(unavailable(
                    "what was found out about a run is not recorded yet; this goes on in the background",
                ))
            }
        }
    }
}

impl Options {
    /// How long a record is held to find out about it: as long as that may take with a store that takes its
    /// time. Where it takes longer still, the outcome counts if nobody else has taken the record over by then.
    fn hold(&self) -> Duration {
        let store = self.store_timeout.saturating_mul(2);
        self.resolver_timeout
            .saturating_add(self.buffer_timeout)
            .saturating_add(store)
    }

    async fn found(&self, verdict: Verdict) -> Found {
        match verdict {
            Verdict::Answer(answer) => self.captured(answer).await,
            Verdict::DidNotHappen => Found::DidNotHappen,
            Verdict::Leave => Found::Unknown(Concluded::Left),
        }
    }

    /// The answer as it would be kept if its handler had given it. Rules by status do not apply: it is no run.
    async fn captured(&self, answer: Response<Body>) -> Found {
        let (parts, body) = answer.into_parts();
        match parts.extensions.get::<Retain>() {
            Some(Retain::Release) => Found::DidNotHappen,
            Some(Retain::Abandon) => Found::Unknown(Concluded::Left),
            Some(Retain::Tombstone) => Found::Done(Completion::tombstone(parts.status)),
            Some(Retain::Keep) | None => match keep(self, &parts, body).await {
                (_, Some(done)) => Found::Done(done),
                (_, None) => Found::Unknown(Concluded::Broken),
            },
        }
    }
}

/// Asks the store within `store_timeout`, again where the answer may have got lost.
pub(crate) async fn persistently<T, F>(
    options: &Options,
    operation: Operation,
    ask: impl FnMut() -> F,
) -> Result<T, StoreError>
where
    F: Future<Output = Result<T, StoreError>>,
{
    let asked = engine::persistently(operation, ask);
    let answer = within(options.store_timeout, asked).await;
    answer.unwrap_or_else(|| {
        observe::store_failed(operation, None);
        Err(unavailable("the store did not answer within store_timeout"))
    })
}

fn unavailable(message: &'static str) -> StoreError {
    StoreError::new(StoreErrorKind::Unavailable, message)
}

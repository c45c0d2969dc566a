//! Finding out what a run did that was cut off: take its record over, ask, settle.

use std::{
    future::{Future, pending},
    pin::pin,
    sync::Arc,
    time::Duration,
};

use axum::body::Body;
use http::Response;

use crate::{
    Retain, Verdict,
    bounded::within,
    engine::{self, Engine},
    execution::{self, Outcome, Watched, keep, watched},
    live,
    observe::{self, By, Concluded, Observed, Operation},
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
/// else acts meanwhile, and what is not known then is abandoned under `token`, a fresh one. `None`: it could
/// not be taken over.
///
/// Dropped in between, it leaves the record to the background, which gives it up at once. An answer that was
/// found and cannot be recorded within `store_timeout` is recorded from there, too; the error says so.
pub(crate) async fn resolve<S: Inspect + Checkpoints>(
    engine: &Arc<Engine<S>>,
    record: Record,
    token: Token,
    by: By,
    question: Question,
) -> Result<Option<Resolved>, StoreError> {
    let attempt = record.attempt;
    let observed = Observed::of_record(&engine.options, &record);
    let resolved = match Taken::take(engine, &record, token).await {
        Ok(Some(taken)) => match taken.ask(record, question).await {
            Ok(found) => taken.settle(found, &observed).await.map(Some),
            Err(error) => {
                // It is known to be unknown; what the store says of that changes nothing.
                let _ = taken
                    .settle(Found::Unknown(Concluded::Failed), &observed)
                    .await;
                Err(error)
            }
        },
        Ok(None) => Ok(None),
        Err(error) => Err(error),
    };
    let concluded = match &resolved {
        Ok(Some((_, said))) => *said,
        Ok(None) => Concluded::Lost,
        Err(_) => Concluded::Failed,
    };
    observe::resolved(by, concluded, attempt, &observed);
    Ok(resolved?.map(|(resolved, _)| resolved))
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
    async fn take(
        engine: &Arc<Engine<S>>,
        record: &Record,
        token: Token,
    ) -> Result<Option<Self>, StoreError> {
        let mut taken = Self {
            engine: engine.clone(),
            ticket: Ticket {
                token,
                ..record.ticket()
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
            // A drain cuts nothing off that need only be written down.
            Question::Known(verdict) => {
                return Ok(self.find_out(async { verdict }, pending()).await);
            }
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
            .find_out(
                async move { resolver.ask(abandoned).await },
                self.engine.live.aborted(),
            )
            .await)
    }

    /// Waits for the verdict as long as that may take, or until it is told to stop, and takes its answer apart.
    async fn find_out(
        &self,
        verdict: impl Future<Output = Verdict>,
        stop: impl Future<Output = ()>,
    ) -> Found {
        let options = &self.engine.options;
        let finding = async {
            match within(options.resolver_timeout, verdict).await {
                Some(verdict) => options.found(verdict).await,
                None => Found::Unknown(Concluded::TimedOut),
            }
        };
        let finding = pin!(Some(finding));
        match watched(finding, stop).await {
            Watched::Done(found) => found,
            Watched::Panicked(_) => Found::Unknown(Concluded::Panicked),
            Watched::Stopped(()) => Found::Unknown(Concluded::Aborted),
        }
    }

    /// Records what was found out, and wakes whoever waits for this key.
    async fn settle(
        mut self,
        found: Found,
        observed: &Observed,
    ) -> Result<(Resolved, Concluded), StoreError> {
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
        let outcome = self.outcome.clone();
        let recorded = execution::keep_recording(&engine, &self.ticket, outcome, observed);
        match within(engine.options.store_timeout, recorded).await {
            Some(Some(settled)) => {
                self.stands = false;
                let stands = match (settled, &self.outcome) {
                    (Settled::Done, _) => true,
                    (Settled::Lost, Outcome::Released) => self.is_free().await,
                    (Settled::Lost, _) => false,
                };
                engine.live.waiting.settled(&self.ticket.id);
                match stands {
                    true => Ok(resolved),
                    false => Ok((Resolved::Lost, Concluded::Lost)),
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
                observe::recording_late(operation, observed);
                Err(unavailable(
                    "what was found out about a run is not recorded yet; this goes on in the background",
                ))
            }
        }
    }
}

impl<S: Inspect> Taken<S> {
    /// Whether the record is gone, although its release says that it was lost: so it is when that was sent again
    /// because the answer to the first try got lost.
    async fn is_free(&self) -> bool {
        let look = || self.engine.store.get(&self.ticket.id);
        let found = persistently(&self.engine.options, Operation::Get, look).await;
        matches!(found, Ok(None))
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
        Err(StoreError::timed_out())
    })
}

fn unavailable(message: &'static str) -> StoreError {
    StoreError::new(StoreErrorKind::Unavailable, message)
}

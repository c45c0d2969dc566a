//! The claimed run in transactional mode: effect and record are committed together, or the effect is
//! rolled back and the key is free again.

use std::{future::Future, panic::resume_unwind, pin::pin, sync::Arc, time::Duration};

use axum::{body::Body, response::IntoResponse};
use bytes::Bytes;
use http::{
    Extensions, HeaderValue, Request, Response, StatusCode, header, request, response::Parts,
};
use tower_service::Service;

use crate::{
    Idempotency, Rejection, Retain,
    attempt::Attempt,
    body::Buffered,
    bounded::{Boxed, First, first, within},
    engine::Engine,
    execution::{Hold, Inner, Outcome, Undo, Watched, answered, keep, recorded, settle, watched},
    maintenance::Pause,
    observe::{self, Decision, Operation, Timed, Timer},
    options::Options,
    record::{Record, State},
    store::{Completion, Inspect, Lifetimes, Settled, Ticket},
};

/// How often a run is begun anew after a conflict with another transaction.
const MAX_RERUNS: u32 = 3;

/// Begins the transactions of a layer, on its store's database.
pub(crate) trait Transactor: Send + Sync {
    /// A place for one run's transaction, which completes the claim where there is one.
    fn work(&self, ticket: Option<&Ticket>) -> Arc<dyn Work>;

    /// The same as the store would write it: a store that seals does not see what is written here.
    fn stored(&self, recording: Recording) -> Recording;
}

/// What the handler has left of its transaction.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Left {
    /// It was never begun.
    Unused,
    /// It could not be begun when the handler wanted to.
    Failed,
    /// It is back, to be committed or rolled back.
    Back,
    /// The handler has answered, and somebody still holds it.
    Out,
}

/// What a transaction is in the way of while it is open.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Open {
    /// It is not.
    Not,
    /// Of what would change the same rows.
    Beside,
    /// Of every other write.
    Alone,
}

/// What is to be written to a record together with the effect.
pub(crate) struct Recording {
    pub(crate) ticket: Ticket,
    pub(crate) done: Completion,
    pub(crate) lifetimes: Lifetimes,
}

/// How a commit ended.
pub(crate) enum Committed {
    Done,
    /// Rolled back: the claim is another's by now.
    Lost,
    /// Rolled back, for the sake of another transaction.
    Conflict,
    /// Rolled back, because what the handler did cannot be committed.
    Refused(&'static str),
    /// The handler has committed it, or rolled it back, before its time.
    Ended,
    /// Not committed: the database was out of reach before it was told to.
    Unreachable,
    /// The database was told to, and has not said whether it did.
    Unknown,
}

/// Marks a response that stands for a conflict with another transaction.
#[derive(Clone, Copy)]
pub(crate) struct Conflicted;

/// Says that there is a transaction to be had, whatever its database, and how it is withdrawn.
#[derive(Clone, Copy)]
pub(crate) struct Offered(pub(crate) fn(&mut Extensions));

/// Takes away what an outer layer has offered: its transaction and the record of this layer would not be
/// committed together.
pub(crate) fn withdraw(extensions: &mut Extensions) {
    if let Some(Offered(withdraw)) = extensions.remove() {
        withdraw(extensions);
    }
}

/// One run's transaction, whatever its database. Not held across an answer: a run that is begun anew has
/// another.
pub(crate) trait Work: Send + Sync {
    /// Lets the handler find it.
    fn offer(self: Arc<Self>, extensions: &mut Extensions);

    fn left(&self) -> Left;

    /// Whether a statement failed for the sake of another transaction.
    fn conflicted(&self) -> bool;

    /// What is in the way of other connections.
    fn open(&self) -> Open;

    /// Ends when the transaction has lasted as long as it may.
    fn overdue(&self) -> Boxed<'_, ()>;

    /// Commits it with the record, where there is one. From here on no handler can use it.
    fn commit<'a>(
        &'a self,
        recording: Option<&'a Recording>,
        limit: Duration,
    ) -> Boxed<'a, Committed>;

    /// Rolls it back, if it was begun. From here on no handler can use it. Answers false when the handler has
    /// ended it by itself, and may have committed it.
    fn rollback(&self) -> Boxed<'_, bool>;

    /// The request is over, whatever has become of it. What is still open is cut.
    fn close(&self);
}

/// Whoever goes away, because its client or its runtime does, leaves no transaction open: a task of the
/// handler's may have it.
struct Closing(Arc<dyn Work>);

impl Drop for Closing {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// A claimed run, as often as it is begun.
pub(crate) struct Run<S> {
    pub(crate) engine: Arc<Engine<S>>,
    pub(crate) transactor: Arc<dyn Transactor>,
    pub(crate) attempt: Arc<Attempt>,
    pub(crate) ticket: Ticket,
    /// What the record becomes when this run has no effect.
    pub(crate) undo: Undo,
    pub(crate) head: Box<request::Parts>,
    pub(crate) body: Buffered,
}

/// What is to become of effect and record.
enum Plan {
    /// Both are committed.
    Commit(Completion),
    /// The effect is rolled back, and the record becomes this.
    RollBack(Outcome),
    /// The effect is rolled back for the sake of another transaction.
    Again,
    /// The effect is rolled back, and the client gets this instead of the answer.
    Instead(Rejection),
}

/// How one try ended, its transaction with it.
enum Ended {
    /// To be answered once the record is this.
    Settle(Parts, Body, Outcome),
    /// Effect and record are committed.
    Committed(Parts, Body),
    /// Rolled back for the sake of another transaction.
    Conflict,
    /// Rolled back, and to be refused.
    Refuse(Rejection),
    /// The handler may have committed its effect by itself, so it must not be run again.
    Spoilt,
    /// Rolled back: the claim is another's.
    Lost,
    /// Whether it was committed is for the record to tell.
    Unknown(Parts, Body),
}

impl<S: Inspect> Run<S> {
    /// Runs, again after a conflict with another transaction, and answers.
    pub(crate) async fn carry_out<I, RB>(
        self,
        mut inner: Inner<I>,
        mut hold: Hold<S>,
    ) -> Result<Response<Body>, I::Error>
    where
        I: Service<Request<Body>, Response = Response<RB>> + Clone,
        RB: http_body::Body<Data = Bytes> + Send + 'static,
        RB::Error: Into<axum::BoxError>,
    {
        // Cut off at any instant: either the record says that it is done, or there was no effect.
        hold.outcome = self.undo.into();
        let mut pause = Pause::default();
        let mut reruns = 0;
        let ended = loop {
            let another = inner.another();
            hold.counts(true);
            let (handled, undone) = self.once(inner).await;
            let ended = match handled {
                Watched::Done(Ok(ended)) => {
                    hold.counts(false);
                    ended
                }
                Watched::Done(Err(error)) => {
                    observe::decided(self.attempt.observed(), Decision::ran(&self.ticket));
                    settle(hold, undone).await;
                    return Err(error);
                }
                Watched::Panicked(panic) => {
                    observe::decided(self.attempt.observed(), Decision::ran(&self.ticket));
                    settle(hold, undone).await;
                    resume_unwind(panic)
                }
                Watched::Stopped(_) if matches!(undone, Outcome::Completed(_)) => Ended::Spoilt,
                Watched::Stopped(rejection) => Ended::Refuse(rejection),
            };
            if !matches!(ended, Ended::Conflict) || reruns == MAX_RERUNS {
                break ended;
            }
            // Under repeatable read a takeover looks like any other conflict.
            if let Ok(Settled::Lost) = self.engine.renew(&self.ticket).await {
                let observed = self.attempt.observed();
                observe::ownership_lost(Operation::Complete, &self.ticket, observed);
                break Ended::Lost;
            }
            pause.wait().await;
            reruns += 1;
            observe::begun_again(reruns);
            inner = another;
        };
        Ok(self.answer(ended, hold).await)
    }

    /// One try, with a transaction of its own, which is over at the end. Answers as well what the record
    /// becomes where the handler has not answered.
    async fn once<I, RB>(
        &self,
        mut inner: Inner<I>,
    ) -> (Watched<Result<Ended, I::Error>, Rejection>, Outcome)
    where
        I: Service<Request<Body>, Response = Response<RB>> + Clone,
        RB: http_body::Body<Data = Bytes> + Send + 'static,
        RB::Error: Into<axum::BoxError>,
    {
        let work = self.transactor.work(Some(&self.ticket));
        let _closing = Closing(work.clone());
        let (mut head, body) = (self.head.clone(), self.body.clone());
        work.clone().offer(&mut head.extensions);
        if let Some(idempotency) = head.extensions.get::<Idempotency>() {
            idempotency.is_offered(&work);
        }
        let handled = pin!(Some(async {
            inner.make_ready().await?;
            let (parts, body) = inner.call(head, body).await?.into_parts();
            Ok(plan(&self.engine.options, &*work, self.undo, parts, body).await)
        }));
        let stop = first(self.engine.live.aborted(), work.overdue());
        let handled = match watched(handled, stop).await {
            Watched::Done(Ok((parts, body, Plan::Commit(done)))) => {
                let ended = self.commit(&*work, parts, body, done).await;
                return (Watched::Done(Ok(ended)), self.undo.into());
            }
            handled => handled,
        };
        let whole = work.rollback().await;
        let handled = match handled {
            Watched::Done(Ok(_)) if !whole => Watched::Done(Ok(Ended::Spoilt)),
            Watched::Done(Ok((parts, body, plan))) => Watched::Done(Ok(match plan {
                Plan::RollBack(outcome) => Ended::Settle(parts, body, outcome),
                Plan::Instead(rejection) => Ended::Refuse(rejection),
                Plan::Again | Plan::Commit(_) => Ended::Conflict,
            })),
            Watched::Done(Err(error)) => Watched::Done(Err(error)),
            Watched::Panicked(panic) => Watched::Panicked(panic),
            Watched::Stopped(First::Left(())) => Watched::Stopped(Rejection::Overloaded),
            Watched::Stopped(First::Right(())) => {
                observe::held_too_long();
                Watched::Stopped(Rejection::TransactionFailed)
            }
        };
        let undone = match whole {
            true => self.undo.into(),
            false => spoilt(),
        };
        (handled, undone)
    }

    async fn commit(&self, work: &dyn Work, parts: Parts, body: Body, done: Completion) -> Ended {
        if work.left() == Left::Unused {
            return Ended::Settle(parts, body, Outcome::Completed(done));
        }
        let options = &self.engine.options;
        let recording = self.transactor.stored(Recording {
            ticket: self.ticket.clone(),
            done,
            lifetimes: options.lifetimes(),
        });
        let timer = Timer::start();
        let committed = work.commit(Some(&recording), options.store_timeout).await;
        timer.stop(Timed::Complete);
        match committed {
            Committed::Done => Ended::Committed(parts, body),
            Committed::Lost => {
                let observed = self.attempt.observed();
                observe::ownership_lost(Operation::Complete, &self.ticket, observed);
                Ended::Lost
            }
            Committed::Conflict => Ended::Conflict,
            // The statement the handler went on after may have failed for another's sake.
            Committed::Refused(_) if work.conflicted() => Ended::Conflict,
            Committed::Refused(why) => Ended::Refuse(Rejection::TransactionMisused(why)),
            Committed::Ended => Ended::Spoilt,
            Committed::Unreachable => Ended::Refuse(Rejection::TransactionFailed),
            Committed::Unknown => Ended::Unknown(parts, body),
        }
    }

    /// Tells the record, and then the client.
    async fn answer(self, ended: Ended, hold: Hold<S>) -> Response<Body> {
        let options = &self.engine.options;
        let observed = self.attempt.observed();
        let refuse = |rejection| options.refuse(Some(&self.head), &rejection, observed);
        let answered = |parts, body| answered(options, &self.attempt, &self.ticket, parts, body);
        match ended {
            Ended::Committed(parts, body) => {
                recorded(hold);
                answered(parts, body)
            }
            Ended::Settle(parts, body, outcome) => {
                let keeps = matches!(outcome, Outcome::Completed(_));
                match settle(hold, outcome).await {
                    Some(Settled::Lost) => self.winner().await,
                    // There was no effect that the client would have to hear of before it is recorded.
                    None if keeps => refuse(Rejection::TransactionFailed),
                    _ => answered(parts, body),
                }
            }
            Ended::Refuse(rejection) => {
                settle(hold, self.undo.into()).await;
                refuse(rejection)
            }
            Ended::Conflict => {
                settle(hold, self.undo.into()).await;
                refuse(Rejection::TransactionFailed)
            }
            Ended::Spoilt => {
                settle(hold, spoilt()).await;
                refuse(Rejection::TransactionMisused(ENDED))
            }
            Ended::Lost => {
                recorded(hold);
                self.winner().await
            }
            // Undoing the claim is a write that names its token. If it takes place, the transaction was not
            // committed and cannot be any more; if not, the record tells whose it is.
            Ended::Unknown(parts, body) => match settle(hold, self.undo.into()).await {
                Some(Settled::Lost) if self.is_completed().await => answered(parts, body),
                Some(Settled::Lost) => self.winner().await,
                _ => refuse(Rejection::TransactionFailed),
            },
        }
    }

    /// The record, after a write has told that it is another's.
    async fn record(&self) -> Option<Record> {
        let found = self.engine.store.get(&self.ticket.id);
        match within(self.engine.options.store_timeout, found).await {
            Some(Ok(found)) => found,
            failed => {
                let error = failed.and_then(Result::err);
                observe::store_failed(Operation::Get, error.as_ref());
                None
            }
        }
    }

    /// Whether the record was completed by this run.
    async fn is_completed(&self) -> bool {
        self.record().await.is_some_and(|record| {
            record.token == self.ticket.token && record.state == State::Completed
        })
    }

    /// What a duplicate would get now.
    async fn winner(&self) -> Response<Body> {
        let engine = &self.engine;
        let record = self.record().await;
        let replay = record.filter(|record| record.state == State::Completed);
        if let Some(record) = replay {
            let options = &engine.options;
            let (head, body) = (&self.head, &self.body.data);
            if options.asks_for(&record.scheme, &record.fingerprint, head, body) {
                return options.replay(head, Box::new(record), self.attempt.observed());
            }
        }
        let rejection = Rejection::InFlight {
            original_request_id: None,
        };
        let observed = self.attempt.observed();
        let options = &engine.options;
        options.refuse(Some(&self.head), &rejection, observed)
    }
}

/// What becomes of the record when the handler may have committed its effect without it: it is done, as far
/// as anybody knows, and must not be done again.
fn spoilt() -> Outcome {
    Outcome::Completed(Completion::tombstone(StatusCode::INTERNAL_SERVER_ERROR))
}

/// What the handler's answer means for effect and record. `undo` is what becomes of the record when this
/// run has no effect.
async fn plan(
    options: &Options,
    work: &dyn Work,
    undo: Undo,
    mut parts: Parts,
    body: Body,
) -> (Parts, Body, Plan) {
    parts.headers.remove(&options.replay_header);
    if work.left() == Left::Out {
        let plan = Plan::Instead(Rejection::TransactionMisused(NOT_GIVEN_BACK));
        return (parts, body, plan);
    }
    if work.left() == Left::Failed && is_done(&parts) {
        let plan = Plan::Instead(Rejection::TransactionMisused(NEVER_BEGUN));
        return (parts, body, plan);
    }
    let said = parts.extensions.get::<Retain>().copied();
    let tombstone = Completion::tombstone(parts.status);
    if !is_done(&parts) {
        if work.conflicted() || parts.extensions.get::<Conflicted>().is_some() {
            return (parts, body, Plan::Again);
        }
        let (body, outcome) = match said {
            Some(Retain::Keep) => {
                let (body, kept) = keep(options, &parts, body).await;
                (body, kept.map_or(undo.into(), Outcome::Completed))
            }
            Some(Retain::Tombstone) => (body, Outcome::Completed(tombstone)),
            Some(Retain::Release) => (body, Outcome::Released),
            // What was not committed did not happen, whatever the handler knows.
            Some(Retain::Abandon) | None => (body, undo.into()),
        };
        return (parts, body, Plan::RollBack(outcome));
    }
    match said.unwrap_or_else(|| options.retention.decide(parts.status)) {
        Retain::Release | Retain::Abandon => {
            let plan = Plan::Instead(Rejection::TransactionMisused(CONTRADICTION));
            (parts, body, plan)
        }
        Retain::Tombstone => (parts, body, Plan::Commit(tombstone)),
        Retain::Keep => {
            let (body, kept) = keep(options, &parts, body).await;
            let plan = match kept {
                Some(done) => Plan::Commit(done),
                None if options.audience.minds_broken_answers() => {
                    let (parts, body) = options.instead_of_broken(&Rejection::TransactionFailed);
                    return (parts, body, Plan::RollBack(undo.into()));
                }
                None => Plan::RollBack(undo.into()),
            };
            (parts, body, plan)
        }
    }
}

pub(crate) const NOT_GIVEN_BACK: &str = "the handler answered before its Tx was given back, because it was moved into the response body or another task; nothing was done";

const NEVER_BEGUN: &str = "its transaction could not be begun, and the handler went on as if it had been; nothing was done";

const CONTRADICTION: &str = "the handler answered that it is done, and the key was to be released or abandoned, as if it were not; nothing was done";

const ENDED: &str = "the handler ended its transaction by itself, with a COMMIT or ROLLBACK of its own; look up what was done";

/// Whether an answer says that the effect is to stay.
fn is_done(parts: &Parts) -> bool {
    parts.status.is_success() || parts.status.is_redirection()
}

/// A request to which no key applies: an ordinary transaction, if its handler wants one.
pub(crate) async fn pass<F, RB, E>(
    options: Arc<Options>,
    work: Arc<dyn Work>,
    running: F,
) -> Result<Response<Body>, E>
where
    F: Future<Output = Result<Response<RB>, E>>,
    RB: http_body::Body<Data = Bytes> + Send + 'static,
    RB::Error: Into<axum::BoxError>,
{
    let _closing = Closing(work.clone());
    let running = pin!(Some(running));
    let ended = match watched(running, work.overdue()).await {
        Watched::Done(Ok(response)) => Ok(response.map(Body::new)),
        Watched::Stopped(()) => {
            observe::held_too_long();
            Err(Committed::Unreachable)
        }
        Watched::Done(Err(error)) => {
            work.rollback().await;
            return Err(error);
        }
        Watched::Panicked(panic) => {
            work.rollback().await;
            resume_unwind(panic)
        }
    };
    let ended = match ended {
        Ok(_) if work.left() == Left::Out => Err(Committed::Refused(NOT_GIVEN_BACK)),
        Ok(response) => {
            let (parts, body) = response.into_parts();
            let committed = match work.left() {
                Left::Back if is_done(&parts) => work.commit(None, options.store_timeout).await,
                Left::Failed if is_done(&parts) => Committed::Refused(NEVER_BEGUN),
                _ => Committed::Done,
            };
            match committed {
                Committed::Done => Ok(Response::from_parts(parts, body)),
                failed => Err(failed),
            }
        }
        stopped => stopped,
    };
    let ended = match work.rollback().await {
        true => ended,
        false => Err(Committed::Ended),
    };
    Ok(ended.unwrap_or_else(|failed| failed.into_response()))
}

/// What a request without a key gets when its transaction was not committed.
impl IntoResponse for Committed {
    fn into_response(self) -> Response<Body> {
        let status = match self {
            Self::Done => StatusCode::OK,
            Self::Conflict | Self::Unreachable => StatusCode::SERVICE_UNAVAILABLE,
            Self::Lost | Self::Refused(_) | Self::Ended | Self::Unknown => {
                StatusCode::INTERNAL_SERVER_ERROR
            }
        };
        let text = match self {
            Self::Refused(why) => why,
            Self::Ended => ENDED,
            Self::Unknown => "the database has not said whether the transaction was committed",
            _ => "the database gave the transaction up, and nothing was done",
        };
        let mut response = (status, text).into_response();
        if status == StatusCode::SERVICE_UNAVAILABLE {
            let seconds = HeaderValue::from_static("1");
            response.headers_mut().insert(header::RETRY_AFTER, seconds);
        }
        response
    }
}

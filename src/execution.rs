//! The claimed run: call the inner service once, settle the record, answer. It goes on to its end
//! whether or not anybody waits for the answer.

use std::{
    future::{Future, poll_fn},
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    pin::{Pin, pin},
    sync::Arc,
    task::Poll,
};

use axum::body::Body;
use bytes::Bytes;
use http::{Request, Response, StatusCode, header, request, response::Parts};
use tower_service::Service;
use tracing::{Instrument, Span};

use crate::{
    Rejection, Retain, Streamed,
    attempt::Attempt,
    body::{Buffered, Captured, capture_response},
    bounded::{First, Panic, first, poll_caught, within},
    engine::Engine,
    extract::Idempotency,
    live::{Permit, Registered},
    maintenance::Pause,
    observe::{self, CutOff, Decision, Observed, Operation, Timed, Timer},
    options::Options,
    retained,
    store::{Completion, Inspect, Settled, Store, StoreErrorKind, Ticket},
    transacted,
};

/// The inner service, and whether it has been polled ready.
pub(crate) struct Inner<I> {
    service: I,
    ready: bool,
}

impl<I: Clone> Inner<I> {
    pub(crate) fn readied(service: I) -> Self {
        Self {
            service,
            ready: true,
        }
    }

    /// Gives back what being ready holds, such as a permit of a concurrency limit.
    pub(crate) fn give_back(&mut self) {
        if self.ready {
            self.service = self.service.clone();
            self.ready = false;
        }
    }

    /// Waits until the service is ready, where it is not.
    pub(crate) async fn make_ready(&mut self) -> Result<(), I::Error>
    where
        I: Service<Request<Body>>,
    {
        if !self.ready {
            poll_fn(|cx| self.service.poll_ready(cx)).await?;
            self.ready = true;
        }
        Ok(())
    }

    /// Calls the readied service with a request put together again.
    pub(crate) async fn call<RB>(
        mut self,
        head: Box<request::Parts>,
        body: Buffered,
    ) -> Result<Response<Body>, I::Error>
    where
        I: Service<Request<Body>, Response = Response<RB>>,
        RB: http_body::Body<Data = Bytes> + Send + 'static,
        RB::Error: Into<axum::BoxError>,
    {
        debug_assert!(self.ready, "a service is called only once it is ready");
        // Stopped when it is dropped, since a handler that panics or is aborted took its time as well.
        let timing = Timer::until_dropped(Timed::Handler);
        let running = {
            let request = Request::from_parts(*head, body.into_body());
            self.service.call(request)
        };
        let answer = running.await;
        drop(timing);
        Ok(answer?.map(Body::new))
    }

    /// Another like it, not ready yet.
    pub(crate) fn another(&self) -> Self {
        Self {
            service: self.service.clone(),
            ready: false,
        }
    }
}

/// How a future of the inner service ended.
pub(crate) enum Watched<T, S> {
    Done(T),
    Panicked(Panic),
    Stopped(S),
}

/// Polls the future until it ends, panics, or is told to stop. By then it is dropped: it has ended
/// before anything is said about it. (Pinned by the caller, since these are too large to be moved
/// about.)
pub(crate) async fn watched<F: Future, S>(
    mut future: Pin<&mut Option<F>>,
    stop: impl Future<Output = S>,
) -> Watched<F::Output, S> {
    let mut stop = pin!(stop);
    let ended = poll_fn(|cx| {
        let Some(running) = future.as_mut().as_pin_mut() else {
            return Poll::Pending;
        };
        match poll_caught(running, cx) {
            Poll::Ready(Ok(output)) => Poll::Ready(Watched::Done(output)),
            Poll::Ready(Err(panic)) => Poll::Ready(Watched::Panicked(panic)),
            Poll::Pending => stop.as_mut().poll(cx).map(Watched::Stopped),
        }
    })
    .await;
    // What the handler still holds may panic while it is dropped.
    match catch_unwind(AssertUnwindSafe(|| future.set(None))) {
        Ok(()) => ended,
        Err(panic) => Watched::Panicked(panic),
    }
}

/// What a record is to become.
#[derive(Clone)]
pub(crate) enum Outcome {
    Completed(Completion),
    Released,
    Abandoned,
}

impl Outcome {
    pub(crate) fn operation(&self) -> Operation {
        match self {
            Self::Completed(_) => Operation::Complete,
            Self::Released => Operation::Release,
            Self::Abandoned => Operation::Abandon,
        }
    }
}

/// What becomes of a record when nothing is begun under its claim after all.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Undo {
    /// The key is free again.
    Release,
    /// An earlier run was cut off, so it is as unknown as before.
    Abandon,
}

impl From<Undo> for Outcome {
    fn from(undo: Undo) -> Self {
        match undo {
            Undo::Release => Self::Released,
            Undo::Abandon => Self::Abandoned,
        }
    }
}

/// What a run holds until its outcome is recorded: its place, and its claim under the heartbeat.
/// Dropped before that, because its runtime ends, it leaves the claim to the background.
pub(crate) struct Hold<S: Store> {
    engine: Arc<Engine<S>>,
    attempt: Arc<Attempt>,
    ticket: Ticket,
    /// Which run this is. Its ticket says less where it does not count.
    number: u32,
    /// What the record is to become, as far as that is known.
    pub(crate) outcome: Outcome,
    settled: bool,
    _permit: Permit,
    _registered: Registered,
}

impl<S: Store> Hold<S> {
    /// Whether the run uses up one of the attempts of its key, should it leave no answer. It does from its
    /// beginning until its handler has answered: what cuts one off may do so every time. The run that
    /// goes on from checkpoints is never less than the second.
    pub(crate) fn counts(&mut self, counts: bool) {
        self.ticket.attempt = match counts {
            true => self.number,
            false => self.number.saturating_sub(1).max(1),
        };
    }
}

impl<S: Store> Drop for Hold<S> {
    fn drop(&mut self) {
        if !self.settled {
            let outcome = std::mem::replace(&mut self.outcome, Outcome::Abandoned);
            self.engine.leave_behind(self.ticket.clone(), outcome);
        }
    }
}

/// A won claim, and what it takes to run under it.
pub(crate) struct Claimed {
    pub(crate) ticket: Ticket,
    pub(crate) permit: Permit,
    /// What the record becomes when nothing is begun after all.
    pub(crate) undo: Undo,
}

/// Runs under a won claim.
pub(crate) async fn run<I, RB, S>(
    engine: Arc<Engine<S>>,
    mut inner: Inner<I>,
    mut head: Box<request::Parts>,
    body: Buffered,
    attempt: Arc<Attempt>,
    claimed: Claimed,
) -> Result<Response<Body>, I::Error>
where
    I: Service<Request<Body>, Response = Response<RB>> + Clone,
    RB: http_body::Body<Data = Bytes> + Send + 'static,
    RB::Error: Into<axum::BoxError>,
    S: Inspect,
{
    let Claimed {
        ticket,
        mut permit,
        undo,
    } = claimed;
    attempt.won(ticket.clone());
    permit.runs();
    let mut hold = Hold {
        engine: engine.clone(),
        attempt: attempt.clone(),
        ticket: ticket.clone(),
        number: ticket.attempt,
        outcome: undo.into(),
        settled: false,
        _permit: permit,
        _registered: engine.live.register(&attempt, ticket.token),
    };
    // Given back before it has begun, it does not count.
    hold.counts(false);
    if attempt.is_gone() {
        // The caller left before its claim was won, so nothing is begun for it.
        settle(hold, undo.into()).await;
        return Ok(Response::new(Body::empty()));
    }
    if engine.live.is_aborted() {
        // Told to stop before it began.
        settle(hold, undo.into()).await;
        let (options, observed) = (&engine.options, attempt.observed());
        return Ok(options.refuse(None, &Rejection::Overloaded, observed));
    }
    if !inner.ready {
        // One who has waited. Getting ready may fail, panic, or take longer than the process lives;
        // nothing has begun by then.
        let getting_ready = pin!(Some(inner.make_ready()));
        let unready = match watched(getting_ready, engine.live.aborted()).await {
            Watched::Done(Ok(())) => None,
            Watched::Done(Err(error)) => Some(Watched::Done(error)),
            Watched::Panicked(panic) => Some(Watched::Panicked(panic)),
            Watched::Stopped(()) => Some(Watched::Stopped(())),
        };
        if let Some(unready) = unready {
            settle(hold, undo.into()).await;
            return match unready {
                Watched::Done(error) => Err(error),
                Watched::Panicked(panic) => resume_unwind(panic),
                Watched::Stopped(()) => {
                    let (options, observed) = (&engine.options, attempt.observed());
                    Ok(options.refuse(None, &Rejection::Overloaded, observed))
                }
            };
        }
        // That may have taken long: whoever has the claim by now may have done the work.
        let rejection = match engine.renew(&ticket).await {
            Ok(Settled::Done) => None,
            Ok(Settled::Lost) => {
                observe::ownership_lost(Operation::Renew, &ticket, attempt.observed());
                Some(Rejection::InFlight {
                    original_request_id: None,
                })
            }
            Err(_) => Some(Rejection::StoreUnavailable),
        };
        if let Some(rejection) = rejection {
            settle(hold, undo.into()).await;
            return Ok(engine.options.refuse(None, &rejection, attempt.observed()));
        }
    }
    hold.counts(true);
    transacted::withdraw(&mut head.extensions);
    head.extensions
        .insert(Idempotency::new(attempt.clone(), ticket.clone()));
    if let Some(transactor) = engine.options.transactor.clone() {
        let run = transacted::Run {
            engine,
            transactor,
            attempt,
            ticket,
            undo,
            head,
            body,
        };
        // In a box, so that runs without a transaction do not carry its weight.
        return Box::pin(run.carry_out(inner, hold)).await;
    }

    hold.outcome = Outcome::Abandoned;
    let answer = pin!(Some(answer(
        &engine,
        inner,
        head,
        body,
        undo,
        attempt.observed()
    )));
    let ended = watched(answer, engine.live.aborted()).await;
    match ended {
        Watched::Done(Ok((parts, body, ended))) => {
            hold.counts(matches!(ended, Ended::CutOff));
            settle(hold, ended.into()).await;
            Ok(answered(&engine.options, &attempt, &ticket, parts, body))
        }
        Watched::Done(Err(error)) => {
            observe::decided(attempt.observed(), Decision::ran(&ticket));
            observe::abandoned(CutOff::Failed, attempt.observed());
            settle(hold, Outcome::Abandoned).await;
            Err(error)
        }
        Watched::Panicked(panic) => {
            observe::decided(attempt.observed(), Decision::ran(&ticket));
            observe::abandoned(CutOff::Panicked, attempt.observed());
            settle(hold, Outcome::Abandoned).await;
            resume_unwind(panic)
        }
        Watched::Stopped(()) => {
            observe::abandoned(CutOff::Drained, attempt.observed());
            settle(hold, Outcome::Abandoned).await;
            let rejection = Rejection::OutcomeUnknown {
                original_request_id: None,
            };
            let (options, observed) = (&engine.options, attempt.observed());
            Ok(options.refuse(None, &rejection, observed))
        }
    }
}

/// The answer of a run, marked with what the layer did.
pub(crate) fn answered(
    options: &Options,
    attempt: &Attempt,
    ticket: &Ticket,
    parts: Parts,
    body: Body,
) -> Response<Body> {
    let decision = Decision::ran(ticket);
    observe::decided(attempt.observed(), decision);
    options.marked(Response::from_parts(parts, body), decision.status())
}

/// How a run ended that has answered.
enum Ended {
    /// Its record becomes this.
    Settle(Outcome),
    /// It answered that it is done, and did not come to its end.
    CutOff,
}

impl From<Ended> for Outcome {
    fn from(ended: Ended) -> Self {
        match ended {
            Ended::Settle(outcome) => outcome,
            Ended::CutOff => Self::Abandoned,
        }
    }
}

/// Calls the inner service and decides what becomes of the record, holding the response's body in
/// memory where it is to be kept. `undo` is what becomes of it when this run did nothing.
async fn answer<I, RB, S>(
    engine: &Engine<S>,
    inner: Inner<I>,
    head: Box<request::Parts>,
    body: Buffered,
    undo: Undo,
    observed: &Observed,
) -> Result<(Parts, Body, Ended), I::Error>
where
    I: Service<Request<Body>, Response = Response<RB>> + Clone,
    RB: http_body::Body<Data = Bytes> + Send + 'static,
    RB::Error: Into<axum::BoxError>,
{
    let options = &engine.options;
    let (mut parts, body) = inner.call(head, body).await?.into_parts();
    parts.headers.remove(&options.replay_header);

    let said = parts.extensions.get::<Retain>().copied();
    let retain = said.unwrap_or_else(|| options.retention.decide(parts.status));
    let tombstone = Outcome::Completed(Completion::tombstone(parts.status));
    let (body, outcome) = match retain {
        // A rule by status knows nothing of an earlier run that was cut off; a handler may.
        Retain::Release if said.is_none() => (body, undo.into()),
        Retain::Release => (body, Outcome::Released),
        Retain::Keep => match keep(options, &parts, body).await {
            (body, Some(done)) => (body, Outcome::Completed(done)),
            (_, None) if options.audience.minds_broken_answers() => {
                observe::abandoned(CutOff::BrokeOff, observed);
                // Nothing has gone out yet, and its head is not true.
                let (parts, body) = options.instead_of_broken(&Rejection::OutcomeUnknown {
                    original_request_id: None,
                });
                return Ok((parts, body, Ended::CutOff));
            }
            (body, None) => (body, tombstone),
        },
        Retain::Tombstone => (body, tombstone),
        Retain::Abandon => {
            observe::abandoned(CutOff::GaveUp, observed);
            (body, Outcome::Abandoned)
        }
    };
    Ok((parts, body, Ended::Settle(outcome)))
}

/// Holds the response in memory, in the form in which it is kept. Without one its body is broken; one
/// that cannot be kept whole is a tombstone.
pub(crate) async fn keep(
    options: &Options,
    parts: &Parts,
    body: Body,
) -> (Body, Option<Completion>) {
    let tombstone = Completion::tombstone(parts.status);
    if is_stream(parts) {
        return (body, Some(tombstone));
    }
    let (limit, patience) = (options.response_body_limit, options.buffer_timeout);
    match capture_response(body, limit, patience).await {
        Captured::Whole(data, body) if parts.headers.len() <= retained::MAX_FIELDS => {
            let keep = options.skip_headers.keeps(&parts.headers);
            let stored = retained::encode(parts.status, &parts.headers, &data, keep);
            (body, Some(Completion::retained(parts.status, stored)))
        }
        Captured::Whole(_, body) | Captured::Not(body) => (body, Some(tombstone)),
        Captured::Broken(body) => (body, None),
    }
}

/// What must go out as it comes, and can never be kept whole.
pub(crate) fn is_stream(parts: &Parts) -> bool {
    let content_type = parts.headers.get(header::CONTENT_TYPE);
    let content_type = content_type.map_or(&b""[..], |value| value.as_bytes());
    let starts = |kind: &str| {
        content_type
            .get(..kind.len())
            .is_some_and(|start| start.eq_ignore_ascii_case(kind.as_bytes()))
    };
    parts.status == StatusCode::SWITCHING_PROTOCOLS
        || parts.extensions.get::<Streamed>().is_some()
        || starts("text/event-stream")
        || starts("application/grpc")
        || starts("multipart/x-mixed-replace")
}

/// Records the outcome, within `store_timeout`; when that is not enough, goes on in the background
/// so that the caller gets its true answer. Then wakes whoever waits for this key. Answers what the
/// store said, if it has said anything by then.
pub(crate) async fn settle<S: Store>(mut hold: Hold<S>, outcome: Outcome) -> Option<Settled> {
    match &outcome {
        Outcome::Completed(_) => {
            hold.counts(true);
            hold.attempt.set_answered(true);
        }
        Outcome::Released => hold.attempt.set_answered(true),
        Outcome::Abandoned => {}
    }
    hold.outcome = outcome;
    let limit = hold.engine.options.store_timeout;
    let timer = Timer::start();
    let settled = within(limit, record(&hold)).await;
    timer.stop(Timed::Complete);
    if let Some(settled) = settled {
        recorded(hold);
        return settled;
    }
    observe::recording_late(hold.outcome.operation(), hold.attempt.observed());
    let late = async move {
        let engine = hold.engine.clone();
        let late = within(engine.options.max_run, record_at_last(&hold));
        if !matches!(
            first(late, engine.live.aborted()).await,
            First::Left(Some(()))
        ) {
            // One last try: an answer that is known is worth more than a claim given up.
            if within(limit, record(&hold)).await.is_none() {
                observe::recording_failed(hold.outcome.operation(), hold.attempt.observed());
                hold.outcome = Outcome::Abandoned;
                hold.attempt.set_answered(false);
                within(limit, record(&hold)).await;
            }
        }
        recorded(hold);
    };
    tokio::spawn(late.instrument(Span::current()));
    None
}

/// Nothing is left to do for this run.
pub(crate) fn recorded<S: Store>(mut hold: Hold<S>) {
    hold.settled = true;
    let (engine, id) = (hold.engine.clone(), hold.ticket.id.clone());
    drop(hold);
    engine.live.waiting.settled(&id);
}

/// Records in the background, where nobody's patience ends a try that hangs: it is made anew every
/// `store_timeout`.
async fn record_at_last<S: Store>(hold: &Hold<S>) {
    let limit = hold.engine.options.store_timeout;
    while within(limit, record(hold)).await.is_none() {}
}

async fn record<S: Store>(hold: &Hold<S>) -> Option<Settled> {
    let observed = hold.attempt.observed();
    keep_recording(&hold.engine, &hold.ticket, hold.outcome.clone(), observed).await
}

/// Sends the outcome to the store until it is settled, or hopeless.
pub(crate) async fn keep_recording<S: Store>(
    engine: &Engine<S>,
    ticket: &Ticket,
    mut outcome: Outcome,
    observed: &Observed,
) -> Option<Settled> {
    let mut pause = Pause::default();
    loop {
        let (store, options) = (&engine.store, &engine.options);
        match try_to_record(store, options, ticket, &mut outcome, observed).await {
            Tried::Settled(settled) => return Some(settled),
            Tried::Hopeless => {
                observe::recording_failed(outcome.operation(), observed);
                return None;
            }
            Tried::Failed => pause.wait().await,
        }
    }
}

/// How one try to record an outcome went.
pub(crate) enum Tried {
    /// It is recorded, or the claim is somebody else's by now.
    Settled(Settled),
    /// It may go better next time.
    Failed,
    /// It will never go better.
    Hopeless,
}

/// What the store was asked for and has not answered. Dropped like that, the waiting was given up.
struct Unanswered(Option<Operation>);

impl Drop for Unanswered {
    fn drop(&mut self) {
        if let Some(operation) = self.0 {
            observe::store_failed(operation, None);
        }
    }
}

/// Sends the outcome to the store once. The token makes sending again harmless.
pub(crate) async fn try_to_record<S: Store>(
    store: &S,
    options: &Options,
    ticket: &Ticket,
    outcome: &mut Outcome,
    observed: &Observed,
) -> Tried {
    let lifetimes = options.lifetimes();
    let mut unanswered = Unanswered(Some(outcome.operation()));
    let settled = match outcome.clone() {
        Outcome::Completed(done) => store.complete(ticket, done, lifetimes).await,
        Outcome::Released => store.release(ticket, lifetimes.ttl).await,
        Outcome::Abandoned => store.abandon(ticket).await,
    };
    unanswered.0 = None;
    let error = match settled {
        Ok(settled) => {
            if settled == Settled::Lost && matches!(outcome, Outcome::Completed(_)) {
                observe::ownership_lost(outcome.operation(), ticket, observed);
            }
            if settled == Settled::Done
                && matches!(outcome, Outcome::Released)
                && let Some(limit) = &options.scope_limit
            {
                limit.freed(&ticket.id.scope);
            }
            return Tried::Settled(settled);
        }
        Err(error) => error,
    };
    observe::store_failed(outcome.operation(), Some(&error));
    match (error.kind(), outcome) {
        // A response the store cannot take must not cost the knowledge that it is done.
        (StoreErrorKind::Full | StoreErrorKind::Invalid, Outcome::Completed(done))
            if done.response.is_some() =>
        {
            done.response = None;
            Tried::Failed
        }
        (StoreErrorKind::Closed | StoreErrorKind::Corrupt | StoreErrorKind::Invalid, _) => {
            Tried::Hopeless
        }
        _ => Tried::Failed,
    }
}

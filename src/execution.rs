//! The claimed run: call the inner service once, settle the record, answer. It goes on to its end
//! whether or not anybody waits for the answer.

use std::{
    future::{Future, poll_fn},
    panic::resume_unwind,
    pin::pin,
    sync::Arc,
    task::Poll,
};

use axum::body::Body;
use bytes::Bytes;
use http::{Request, Response, StatusCode, header, response::Parts};
use tower_service::Service;

use crate::{
    IdempotencyStatus, Rejection, Retain, Streamed,
    attempt::Attempt,
    body::{Captured, capture_response},
    bounded::{First, Panic, first, poll_caught, within},
    engine::{Engine, Pause, Permit, Registered},
    extract::Idempotency,
    observe::{self, Operation},
    retained,
    store::{Completion, Lifetimes, Settled, Store, StoreErrorKind, Ticket},
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

    /// Calls the readied service.
    pub(crate) async fn call<RB>(
        mut self,
        request: Request<Body>,
    ) -> Result<Response<Body>, I::Error>
    where
        I: Service<Request<Body>, Response = Response<RB>>,
        RB: http_body::Body<Data = Bytes> + Send + 'static,
        RB::Error: Into<axum::BoxError>,
    {
        debug_assert!(self.ready, "a service is called only once it is ready");
        Ok(self.service.call(request).await?.map(Body::new))
    }
}

/// How a future of the inner service ended.
enum Watched<T> {
    Done(T),
    Panicked(Panic),
    Aborted,
}

/// Polls the future until it ends, panics, or the run is told to stop. By then it is dropped: it
/// has ended before anything is said about it.
async fn watched<S, F: Future>(engine: &Engine<S>, future: F) -> Watched<F::Output> {
    let mut future = pin!(future);
    let mut aborted = pin!(engine.live.aborted());
    poll_fn(|cx| match poll_caught(future.as_mut(), cx) {
        Poll::Ready(Ok(output)) => Poll::Ready(Watched::Done(output)),
        Poll::Ready(Err(panic)) => Poll::Ready(Watched::Panicked(panic)),
        Poll::Pending => aborted.as_mut().poll(cx).map(|()| Watched::Aborted),
    })
    .await
}

/// What a record is to become.
#[derive(Clone)]
pub(crate) enum Outcome {
    Completed(Completion),
    Released,
    Abandoned,
}

impl Outcome {
    fn operation(&self) -> Operation {
        match self {
            Self::Completed(_) => Operation::Complete,
            Self::Released => Operation::Release,
            Self::Abandoned => Operation::Abandon,
        }
    }
}

/// What a run holds until its outcome is recorded: its place, and its claim under the heartbeat.
struct Hold {
    _permit: Permit,
    _registered: Registered,
}

/// A won claim, and what it takes to run under it.
pub(crate) struct Claimed {
    pub(crate) ticket: Ticket,
    pub(crate) permit: Permit,
    /// What the record becomes when nothing is begun after all.
    pub(crate) undo: Outcome,
}

/// Runs under a won claim.
pub(crate) async fn run<I, RB, S>(
    engine: Arc<Engine<S>>,
    mut inner: Inner<I>,
    mut request: Request<Body>,
    attempt: Arc<Attempt>,
    claimed: Claimed,
) -> Result<Response<Body>, I::Error>
where
    I: Service<Request<Body>, Response = Response<RB>> + Clone,
    RB: http_body::Body<Data = Bytes> + Send + 'static,
    RB::Error: Into<axum::BoxError>,
    S: Store,
{
    let Claimed {
        ticket,
        permit,
        undo,
    } = claimed;
    attempt.won(ticket.clone());
    let hold = Hold {
        _permit: permit,
        _registered: engine.live.register(&attempt, ticket.token),
    };
    if attempt.is_gone() {
        // The caller left before its claim was won, so nothing is begun for it.
        settle(&engine, &ticket, undo, hold).await;
        return Ok(Response::new(Body::empty()));
    }
    if !inner.ready {
        // One who has waited. Getting ready may fail, panic, or take longer than the process lives;
        // nothing has begun by then.
        let unready = match watched(&engine, inner.make_ready()).await {
            Watched::Done(Ok(())) => None,
            Watched::Done(Err(error)) => Some(Watched::Done(error)),
            Watched::Panicked(panic) => Some(Watched::Panicked(panic)),
            Watched::Aborted => Some(Watched::Aborted),
        };
        if let Some(unready) = unready {
            settle(&engine, &ticket, undo, hold).await;
            return match unready {
                Watched::Done(error) => Err(error),
                Watched::Panicked(panic) => resume_unwind(panic),
                Watched::Aborted => Ok(engine.options.refuse(None, &Rejection::Overloaded)),
            };
        }
    }
    request
        .extensions_mut()
        .insert(Idempotency::new(attempt.clone(), ticket.clone()));

    let ended = watched(&engine, answer(&engine, inner, request)).await;
    match ended {
        Watched::Done(Ok((parts, body, outcome))) => {
            settle(&engine, &ticket, outcome, hold).await;
            let status = if ticket.attempt == 1 {
                IdempotencyStatus::Executed
            } else {
                IdempotencyStatus::TookOver
            };
            observe::decided(status, None);
            let mut response = Response::from_parts(parts, body);
            response.extensions_mut().insert(status);
            Ok(response)
        }
        Watched::Done(Err(error)) => {
            observe::abandoned("the inner service failed");
            settle(&engine, &ticket, Outcome::Abandoned, hold).await;
            Err(error)
        }
        Watched::Panicked(panic) => {
            observe::abandoned("the handler panicked");
            settle(&engine, &ticket, Outcome::Abandoned, hold).await;
            resume_unwind(panic)
        }
        Watched::Aborted => {
            observe::abandoned("the run was aborted by drain");
            settle(&engine, &ticket, Outcome::Abandoned, hold).await;
            let rejection = Rejection::OutcomeUnknown {
                original_request_id: None,
            };
            Ok(engine.options.refuse(None, &rejection))
        }
    }
}

/// Calls the inner service and decides what becomes of the record, holding the response's body in
/// memory where it is to be kept.
async fn answer<I, RB, S>(
    engine: &Engine<S>,
    inner: Inner<I>,
    request: Request<Body>,
) -> Result<(Parts, Body, Outcome), I::Error>
where
    I: Service<Request<Body>, Response = Response<RB>> + Clone,
    RB: http_body::Body<Data = Bytes> + Send + 'static,
    RB::Error: Into<axum::BoxError>,
{
    let options = &engine.options;
    let (mut parts, body) = inner.call(request).await?.into_parts();
    parts.headers.remove(&options.replay_header);

    let said = parts.extensions.get::<Retain>().copied();
    let retain = said.unwrap_or_else(|| options.retention.decide(parts.status));
    let tombstone = Outcome::Completed(Completion::tombstone(parts.status));
    match retain {
        Retain::Release => Ok((parts, body, Outcome::Released)),
        Retain::Keep if !is_stream(&parts) => {
            let (limit, patience) = (options.response_body_limit, options.buffer_timeout);
            match capture_response(body, limit, patience).await {
                Captured::Whole(data, body) if parts.headers.len() <= retained::MAX_FIELDS => {
                    let keep = options.skip_headers.keeps(&parts.headers);
                    let stored = retained::encode(parts.status, &parts.headers, &data, keep);
                    let kept = Outcome::Completed(Completion::retained(parts.status, stored));
                    Ok((parts, body, kept))
                }
                Captured::Whole(_, body) | Captured::Not(body) => Ok((parts, body, tombstone)),
            }
        }
        Retain::Keep | Retain::Tombstone => Ok((parts, body, tombstone)),
    }
}

/// What must go out as it comes, and can never be kept whole.
fn is_stream(parts: &Parts) -> bool {
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
/// so that the caller gets its true answer. Then wakes whoever waits for this key.
async fn settle<S: Store>(engine: &Arc<Engine<S>>, ticket: &Ticket, outcome: Outcome, hold: Hold) {
    let recorded = within(
        engine.options.store_timeout,
        record(engine, ticket, outcome.clone()),
    )
    .await;
    if recorded.is_some() {
        drop(hold);
        engine.live.waiting.settled(&ticket.id);
        return;
    }
    observe::recording_late(outcome.operation());
    let (engine, ticket) = (engine.clone(), ticket.clone());
    tokio::spawn(async move {
        let recorded = within(
            engine.options.max_run,
            record_at_last(&engine, &ticket, outcome.clone()),
        );
        if !matches!(
            first(recorded, engine.live.aborted()).await,
            First::Left(Some(()))
        ) {
            // One last try: an answer that is known is worth more than a claim given up.
            let (operation, limit) = (outcome.operation(), engine.options.store_timeout);
            let last = record(&engine, &ticket, outcome);
            if within(limit, last).await.is_none() {
                observe::recording_failed(operation);
                within(limit, record(&engine, &ticket, Outcome::Abandoned)).await;
            }
        }
        drop(hold);
        engine.live.waiting.settled(&ticket.id);
    });
}

/// Records in the background, where nobody's patience ends a try that hangs: it is made anew every
/// `store_timeout`.
pub(crate) async fn record_at_last<S: Store>(
    engine: &Engine<S>,
    ticket: &Ticket,
    outcome: Outcome,
) {
    let limit = engine.options.store_timeout;
    while within(limit, record(engine, ticket, outcome.clone()))
        .await
        .is_none()
    {}
}

/// Sends the outcome to the store until it answers. The token makes sending again harmless.
async fn record<S: Store>(engine: &Engine<S>, ticket: &Ticket, mut outcome: Outcome) {
    let lifetimes = Lifetimes {
        ttl: engine.options.ttl,
        response_ttl: engine.options.response_ttl,
    };
    let mut pause = Pause::default();
    loop {
        let operation = outcome.operation();
        let settled = match outcome.clone() {
            Outcome::Completed(done) => engine.store.complete(ticket, done, lifetimes).await,
            Outcome::Released => engine.store.release(ticket, lifetimes.ttl).await,
            Outcome::Abandoned => engine.store.abandon(ticket).await,
        };
        let error = match settled {
            Ok(Settled::Done) => return,
            Ok(Settled::Lost) => {
                if matches!(outcome, Outcome::Completed(_)) {
                    observe::ownership_lost(operation, ticket);
                }
                return;
            }
            Err(error) => error,
        };
        observe::store_failed(operation, Some(&error));
        match (error.kind(), &mut outcome) {
            (StoreErrorKind::Closed, _) => return observe::recording_failed(operation),
            // A response the store cannot take must not cost the knowledge that it is done.
            (StoreErrorKind::Full | StoreErrorKind::Invalid, Outcome::Completed(done))
                if done.response.is_some() =>
            {
                done.response = None;
            }
            _ => pause.wait().await,
        }
    }
}

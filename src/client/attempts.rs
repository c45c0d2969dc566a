//! One operation, attempt by attempt.

use std::{
    future::{Future, poll_fn},
    time::Duration,
};

use axum::{BoxError, body::Body};
use bytes::Bytes;
use http::{Request, Response};
use http_body::Body as HttpBody;
use tokio::time::{Instant, sleep};
use tower_service::Service;

use super::{
    Answered, Attempt, NotSent, Unanswered,
    exchange::{Met, exchange},
    failure::{Failure, TimedOut, Why, not_made, settled},
    observe, pause,
    retry_options::RetryOptions,
};
use crate::{IdempotencyKey, bounded::within};

/// Where the request of each attempt comes from.
pub(super) trait Source: Send {
    /// The key of the operation.
    fn key(&self) -> &IdempotencyKey;

    /// The request of this attempt; the first is 1. A key header that it has is sent as it is, and written from
    /// [`key`](Self::key) where it has none. An error ends the operation.
    fn request(
        &mut self,
        attempt: u32,
    ) -> impl Future<Output = Result<Request<Bytes>, NotSent>> + Send;

    /// Asked directly before the request is sent, however long the hook took: a no ends the operation.
    fn may_still_be_sent(&mut self) -> bool {
        true
    }
}

/// Makes attempts until there is an answer, or no hope of one.
#[cfg(any(feature = "sqlite", feature = "postgres"))]
pub(super) async fn attempts<S, B, RB>(
    options: &RetryOptions,
    service: S,
    source: impl Source,
) -> Result<Response<Body>, Unanswered>
where
    S: Service<Request<B>, Response = Response<RB>> + Clone + Send,
    S::Future: Send,
    S::Error: Into<BoxError>,
    B: From<Bytes> + Send,
    RB: HttpBody<Data = Bytes> + Send + 'static,
    RB::Error: Into<BoxError>,
{
    let answered = attempts_until(options.deadline(), options, service, source).await;
    answered.inspect_err(observe::unanswered)
}

/// The same for an operation that has begun before, and whose end the caller tells.
pub(super) async fn attempts_until<S, B, RB>(
    deadline: Instant,
    options: &RetryOptions,
    mut service: S,
    mut source: impl Source,
) -> Result<Response<Body>, Unanswered>
where
    S: Service<Request<B>, Response = Response<RB>> + Clone + Send,
    S::Future: Send,
    S::Error: Into<BoxError>,
    B: From<Bytes> + Send,
    RB: HttpBody<Data = Bytes> + Send + 'static,
    RB::Error: Into<BoxError>,
{
    let mut attempt = Attempt {
        number: 1,
        key: source.key().clone(),
    };
    // Of the last attempt that was made: one that could not be made changes nothing about it.
    let mut last = None;
    let mut tries = 0;
    loop {
        tries += 1;
        let met = meet(deadline, options, &mut service, &mut source, &attempt).await;
        let failure = match met {
            Met::Answered(mut response, replayed) => {
                response.extensions_mut().insert(Answered {
                    key: attempt.key,
                    attempts: attempt.number,
                    replayed,
                });
                return Ok(response);
            }
            Met::Settled(judgement, response, hint) => {
                return Err(settled(judgement, response, hint, attempt));
            }
            Met::Over(unanswered) => return Err(unanswered),
            Met::NotMade(why) => return Err(not_made(why, last, attempt)),
            Met::Failed(failure) => failure,
        };
        let wait = match failure.hint {
            Some(hint) => pause::hinted(hint),
            None => options.back_off.after(tries),
        };
        // A wait that would end too late is not begun: whoever waits here learns the end at once.
        let is_over = tries > options.retries || wait >= left(deadline);
        if !is_over {
            observe::attempt_failed(&attempt, &failure, wait);
        }
        match failure.why {
            Why::NotReady if is_over => return Err(not_made(failure.not_ready(), last, attempt)),
            Why::NotReady => {}
            _ if is_over => return Err(failure.ends(attempt)),
            _ => {
                last = Some(failure);
                attempt.number += 1;
            }
        }
        // Whatever place this one has in a queue is given up for the time of the pause.
        service = service.clone();
        sleep(wait).await;
    }
}

const TOO_LATE: &str = "the time for the whole operation is over";

pub(super) fn left(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now())
}

/// One attempt. The request is made once the client is ready, so that its dates and signatures are fresh when it
/// is sent.
async fn meet<S, B, RB>(
    deadline: Instant,
    options: &RetryOptions,
    service: &mut S,
    source: &mut impl Source,
    attempt: &Attempt,
) -> Met
where
    S: Service<Request<B>, Response = Response<RB>>,
    S::Error: Into<BoxError>,
    B: From<Bytes>,
    RB: HttpBody<Data = Bytes> + Send + 'static,
    RB::Error: Into<BoxError>,
{
    let begun = Instant::now();
    let limit = options.attempt_timeout.min(left(deadline));
    // One that is ready already says so again.
    match within(limit, poll_fn(|cx| service.poll_ready(cx))).await {
        Some(Ok(())) => {}
        Some(Err(error)) => return Met::Failed(Failure::of(Why::NotReady, error)),
        None => return Met::Failed(Failure::of(Why::NotReady, TimedOut::Ready)),
    }
    let limit = limit.saturating_sub(begun.elapsed());
    let request = within(left(deadline), prepare(options, source, attempt)).await;
    let request = match request {
        Some(Ok(request)) => request.map(B::from),
        Some(Err(why)) => return Met::NotMade(why),
        None => return Met::NotMade(NotSent::new(TOO_LATE)),
    };
    if !source.may_still_be_sent() {
        return Met::NotMade(NotSent::new(TOO_LATE));
    }
    let end = Instant::now() + limit.min(left(deadline));
    exchange(options, end, service.call(request)).await
}

/// A fresh copy of the head, with whatever is new in each attempt, and the key, which never is.
async fn prepare(
    options: &RetryOptions,
    source: &mut impl Source,
    attempt: &Attempt,
) -> Result<Request<Bytes>, NotSent> {
    let (mut head, body) = source.request(attempt.number).await?.into_parts();
    let name = &options.keys.header_name;
    let mut key = match head.headers.get(name) {
        Some(key) => key.clone(),
        None => options.keys.write(&attempt.key)?,
    };
    // It is as good as the answer it unlocks.
    key.set_sensitive(true);
    head.headers.insert(name, key.clone());
    if let Some(hook) = &options.before_attempt {
        let failed = NotSent::new("the hook before the attempt has failed");
        hook(&mut head, &body, attempt).map_err(|error| failed.with_source(error))?;
        head.headers.insert(name, key);
    }
    head.extensions.insert(attempt.clone());
    Ok(Request::from_parts(head, body))
}

//! One operation, attempt by attempt.

use std::{
    future::{Future, poll_fn},
    time::Duration,
};

use axum::{BoxError, body::Body};
use bytes::Bytes;
use http::{Request, Response};
use http_body::Body as HttpBody;
use http_body_util::BodyExt;
use tokio::time::{Instant, sleep};
use tower_service::Service;

use super::{
    Answered, Attempt, NotSent, Unanswered,
    failure::{Failure, TimedOut, Why, not_made, settled},
    hint::hint,
    judgement::Judgement,
    observe, pause,
    refusal::Refusal,
    retry_options::RetryOptions,
};
use crate::{
    IdempotencyKey,
    body::{Captured, capture_response},
    bounded::{FOREVER, within},
    execution::is_stream,
};

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
}

/// Makes attempts until there is an answer, or no hope of one.
#[cfg(any(feature = "sqlite", feature = "postgres"))]
pub(super) async fn attempts<S, B, RB>(
    options: &RetryOptions,
    service: S,
    source: impl Source,
) -> Result<Response<Body>, Unanswered>
where
    S: Service<Request<B>, Response = Response<RB>> + Send,
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
    S: Service<Request<B>, Response = Response<RB>> + Send,
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
    let mut is_sent = false;
    loop {
        let request = within(left(deadline), prepare(options, &mut source, &attempt)).await;
        let request = match request.unwrap_or(Err(NotSent::new(TOO_LATE))) {
            Ok(request) => request.map(B::from),
            Err(why) => return Err(not_made(why, &attempt, is_sent)),
        };
        let limit = options.attempt_timeout.min(left(deadline));
        let sent = send(options, &mut service, request, &mut is_sent);
        let failure = match within(limit, sent).await {
            Some(Sent::Answered(mut response, replayed)) => {
                response.extensions_mut().insert(Answered {
                    key: attempt.key,
                    attempts: attempt.number,
                    replayed,
                });
                return Ok(response);
            }
            Some(Sent::Settled(judgement, response)) => {
                return Err(settled(judgement, response, attempt));
            }
            Some(Sent::Failed(failure)) => failure,
            None => Failure::of(Why::TimedOut, TimedOut),
        };
        let wait = match failure.hint {
            Some(hint) => pause::hinted(hint),
            None => options.back_off.after(attempt.number),
        };
        // A wait that would end too late is not begun: whoever waits here learns the end at once.
        if attempt.number > options.retries || wait >= left(deadline) {
            return Err(failure.ends(attempt, is_sent));
        }
        observe::attempt_failed(&attempt, &failure, wait);
        sleep(wait).await;
        attempt.number += 1;
    }
}

const TOO_LATE: &str = "the time for the whole operation is over";

pub(super) fn left(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now())
}

/// A fresh copy of the head, with whatever is new in each attempt, and the key, which never is.
async fn prepare(
    options: &RetryOptions,
    source: &mut impl Source,
    attempt: &Attempt,
) -> Result<Request<Bytes>, NotSent> {
    let (mut head, body) = source.request(attempt.number).await?.into_parts();
    let name = &options.keys.header_name;
    let key = match head.headers.get(name) {
        Some(key) => key.clone(),
        None => options.keys.write(&attempt.key)?,
    };
    head.headers.insert(name, key.clone());
    if let Some(hook) = &options.before_attempt {
        let failed = NotSent::new("the hook before the attempt has failed");
        hook(&mut head, &body, attempt).map_err(|error| failed.with_source(error))?;
        head.headers.insert(name, key);
    }
    Ok(Request::from_parts(head, body))
}

/// What became of one attempt.
enum Sent {
    Answered(Response<Body>, bool),
    Settled(Judgement, Response<Bytes>),
    Failed(Failure),
}

async fn send<S, B, RB>(
    options: &RetryOptions,
    service: &mut S,
    request: Request<B>,
    is_sent: &mut bool,
) -> Sent
where
    S: Service<Request<B>, Response = Response<RB>>,
    S::Error: Into<BoxError>,
    RB: HttpBody<Data = Bytes> + Send + 'static,
    RB::Error: Into<BoxError>,
{
    // One that is ready already says so again.
    if let Err(error) = poll_fn(|cx| service.poll_ready(cx)).await {
        return Sent::Failed(Failure::of(Why::NotReady, error));
    }
    *is_sent = true;
    let response = match service.call(request).await {
        Ok(response) => response.map(Body::new),
        Err(error) => return Sent::Failed(Failure::of(Why::Failed, error)),
    };
    match read(response, options.response_body_limit).await {
        Ok(read) => judge(options, read),
        Err(error) => Sent::Failed(Failure::of(Why::BrokeOff, error)),
    }
}

/// How much of an error's body is read whatever the limit is: it tells what is to be done.
const REFUSAL_LIMIT: usize = 64 * 1024;

/// An answer, and what of it is in memory: nothing, if it is a stream or too large.
struct Read {
    response: Response<Body>,
    data: Bytes,
}

/// An error is that of a body that broke off.
async fn read(response: Response<Body>, limit: usize) -> Result<Read, BoxError> {
    let (head, body) = response.into_parts();
    let is_error = head.status.is_client_error() || head.status.is_server_error();
    let limit = match is_error {
        true => limit.max(REFUSAL_LIMIT),
        false => limit,
    };
    let (data, body) = match is_stream(&head) {
        true => (Bytes::new(), body),
        // The attempt has a limit of its own.
        false => match capture_response(body, limit, FOREVER).await {
            Captured::Whole(data, body) => (data, body),
            Captured::Not(body) => (Bytes::new(), body),
            Captured::Broken(body) => match body.collect().await {
                Err(error) => return Err(innermost(error)),
                Ok(whole) => {
                    let data = whole.to_bytes();
                    (data.clone(), Body::from(data))
                }
            },
        },
    };
    let response = Response::from_parts(head, body);
    Ok(Read { response, data })
}

/// The body's own error, which every layer of bodies has put into one of axum's.
fn innermost(error: axum::Error) -> BoxError {
    let mut error = error.into_inner();
    loop {
        match error.downcast::<axum::Error>() {
            Ok(outer) => error = outer.into_inner(),
            Err(own) => return own,
        }
    }
}

fn judge(options: &RetryOptions, read: Read) -> Sent {
    let Read { response, data } = read;
    let (head, body) = response.into_parts();
    let refusal = Refusal::read(&head.headers, &data);
    let judgement = options.judge.judges(&head, &refusal);
    match judgement {
        Judgement::Answer { replayed } => {
            Sent::Answered(Response::from_parts(head, body), replayed)
        }
        Judgement::Retry { in_flight } => Sent::Failed(Failure {
            why: match in_flight {
                true => Why::InFlight,
                false => Why::Refused,
            },
            hint: hint(&head.headers, &refusal),
            response: Some(Box::new(Response::from_parts(head, data))),
            source: None,
        }),
        settled => Sent::Settled(settled, Response::from_parts(head, data)),
    }
}

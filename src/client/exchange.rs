//! What comes back in one attempt.

use std::{future::Future, time::Duration};

use axum::{BoxError, body::Body};
use bytes::Bytes;
use http::{
    Response, StatusCode,
    header::{CONTENT_ENCODING, CONTENT_LENGTH, TRANSFER_ENCODING},
    response::Parts,
};
use http_body::Body as HttpBody;
use http_body_util::BodyExt;
use tokio::time::Instant;

use super::{
    NotSent, Unanswered,
    attempts::left,
    failure::{Failure, TimedOut, Why},
    hint::hint,
    judgement::{Judgement, is_unprotected},
    refusal::Refusal,
    retry_options::RetryOptions,
};
use crate::{
    body::{Captured, capture_response},
    bounded::{FOREVER, within},
    execution::is_stream,
};

/// What became of one attempt.
pub(super) enum Met {
    Answered(Response<Body>, bool),
    Settled(Judgement, Response<Bytes>, Option<Duration>),
    /// Another one may be made.
    Failed(Failure),
    /// It could not be made, and no further one can.
    NotMade(NotSent),
    /// Another layer of this sort, inside of this one, has ended the operation.
    Over(Unanswered),
}

/// Waits for the answer, and for as much of its body as is read, until `end`.
pub(super) async fn exchange<RB, E>(
    options: &RetryOptions,
    end: Instant,
    sent: impl Future<Output = Result<Response<RB>, E>>,
) -> Met
where
    E: Into<BoxError>,
    RB: HttpBody<Data = Bytes> + Send + 'static,
    RB::Error: Into<BoxError>,
{
    let (head, body) = match within(left(end), sent).await {
        Some(Ok(response)) => response.map(Body::new).into_parts(),
        Some(Err(error)) => return failed(error.into()),
        None => return Met::Failed(Failure::of(Why::TimedOut, TimedOut::Answer)),
    };
    let Some(limit) = limit(options, &head) else {
        return judge(options, head, &Bytes::new(), body);
    };
    match within(left(end), read(body, limit)).await {
        Some(Ok((data, body))) => judge(options, head, &data, body),
        Some(Err(error)) => Met::Failed(cut(head, Why::BrokeOff, error)),
        None => Met::Failed(cut(head, Why::TimedOut, TimedOut::Answer)),
    }
}

/// The client's own error. What a layer of this sort inside of it has settled stays so, but it has made its attempts
/// only for what it covers.
fn failed(error: BoxError) -> Met {
    match error.downcast::<Unanswered>().map(|inner| *inner) {
        Ok(Unanswered::NotSent(why)) => Met::NotMade(why),
        Ok(Unanswered::Uncovered(uncovered)) => {
            Met::Failed(Failure::of(Why::Failed, uncovered.into_inner()))
        }
        Ok(inner) => Met::Over(inner),
        Err(error) => Met::Failed(Failure::of(Why::Failed, error)),
    }
}

/// How much of an error's body is read whatever the limit is: it tells what is to be done.
const REFUSAL_LIMIT: usize = 64 * 1024;

/// How much of the body is read within the attempt; `None` where it is handed on as it comes.
fn limit(options: &RetryOptions, head: &Parts) -> Option<usize> {
    // What must not be sent again in any case need not be known to be whole.
    if is_stream(head) || is_unprotected(head) {
        return None;
    }
    match is_error(head.status) {
        true => Some(options.response_body_limit.max(REFUSAL_LIMIT)),
        false => Some(options.response_body_limit).filter(|limit| *limit > 0),
    }
}

pub(super) fn is_error(status: StatusCode) -> bool {
    status.is_client_error() || status.is_server_error()
}

/// What of the body is in memory, which is nothing if it is too large, and all of it. An error is that of a body
/// that broke off.
async fn read(body: Body, limit: usize) -> Result<(Bytes, Body), BoxError> {
    // The attempt has a limit of its own.
    match capture_response(body, limit, FOREVER).await {
        Captured::Whole(data, body) => Ok((data, body)),
        Captured::Not(body) => Ok((Bytes::new(), body)),
        Captured::Broken(body) => match body.collect().await {
            Err(error) => Err(innermost(error)),
            Ok(whole) => {
                let data = whole.to_bytes();
                Ok((data.clone(), Body::from(data)))
            }
        },
    }
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

/// The body did not come to its end. What the head of an error says counts all the same, but for what the status
/// alone would settle: the code is in the body, and only the whole of it says what this is.
fn cut(head: Parts, why: Why, error: impl Into<BoxError>) -> Failure {
    let mut failure = Failure::of(why, error);
    if is_error(head.status) {
        failure.hint = hint(&head.headers, &Refusal::default());
        failure.response = Some(Box::new(in_memory(head, Bytes::new())));
    }
    failure
}

/// What is to be seen of an answer. Where its body is not kept, the head does not speak of one.
fn in_memory(mut head: Parts, data: Bytes) -> Response<Bytes> {
    if data.is_empty() {
        for of_body in [CONTENT_LENGTH, CONTENT_ENCODING, TRANSFER_ENCODING] {
            head.headers.remove(of_body);
        }
    }
    Response::from_parts(head, data)
}

fn judge(options: &RetryOptions, head: Parts, data: &Bytes, body: Body) -> Met {
    let refusal = match is_error(head.status) {
        true => Refusal::read(&head.headers, data),
        false => Refusal::default(),
    };
    match options.judge.judges(&head, &refusal) {
        Judgement::Answer { replayed } => Met::Answered(Response::from_parts(head, body), replayed),
        Judgement::Retry { in_flight } => Met::Failed(Failure {
            why: match in_flight {
                true => Why::InFlight,
                false => Why::Refused,
            },
            hint: hint(&head.headers, &refusal),
            response: Some(Box::new(in_memory(head, data.clone()))),
            source: None,
        }),
        settled => {
            let hint = hint(&head.headers, &refusal);
            Met::Settled(settled, in_memory(head, data.clone()), hint)
        }
    }
}

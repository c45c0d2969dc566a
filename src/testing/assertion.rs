//! One assertion for users' own tests.

use std::{fmt::Debug, future::poll_fn, pin::pin, task::Poll, time::Duration};

use axum::body::Body;
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode, request::Parts};
use http_body_util::BodyExt;
use tower::{Service, ServiceExt};

use crate::{IdempotencyStatus, IdempotentResponse, Token};

const KEY: HeaderName = HeaderName::from_static("idempotency-key");

/// Asserts that a service, usually a router behind an
/// [`IdempotencyLayer`](crate::IdempotencyLayer), treats this request idempotently.
///
/// The request is sent, under fresh keys,
/// 1. twice: the second answer must be the first one again, marked as a replay;
/// 2. eight times at once: exactly one may run, the others are told to wait or get its answer;
/// 3. and dropped halfway, then again until it is answered: the key must end up with one answer;
/// 4. with another body under a used key, the same with something appended: it must be refused, as a reused key
///    or as a body that cannot be read.
///
/// The request must be one the service accepts (2xx), with an `Idempotency-Key`. The fresh keys are
/// UUIDs, quoted when the given key is. For another header, or keys of another form, there is
/// [`assert_idempotent_with_keys`]; for a service to which what is appended makes no other body, such as one
/// that compares forms by their parts, [`assert_idempotent_with_other_body`]. The effect happens about three
/// times, under three keys. Needs a tokio runtime with time enabled. Services that let the key alone decide
/// ([`KeyOnly`](crate::KeyOnly), [`Endpoint`](crate::Endpoint)) do not pass: they accept another body.
///
/// ```
/// use axum::{Router, body::Body, http::Request, routing::post};
/// use tower_idempotency::{IdempotencyLayer, MemoryStore, testing::assert_idempotent};
///
/// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
/// let app: Router = Router::new()
///     .route("/payments", post(|| async { "paid" }))
///     .route_layer(IdempotencyLayer::new(MemoryStore::new()).single_tenant());
/// let request = Request::post("/payments")
///     .header("idempotency-key", "any")
///     .body(Body::from("{\"amount\":1}"))
///     .unwrap();
/// assert_idempotent(app, request).await;
/// # });
/// ```
///
/// # Panics
///
/// When the service does otherwise, saying what it did; and when the request has no key, or is not
/// answered with 2xx the first time.
pub async fn assert_idempotent<S, B>(app: S, request: Request<Body>)
where
    S: Service<Request<Body>, Response = Response<B>> + Clone,
    S::Error: Debug,
    B: http_body::Body<Data = Bytes>,
    B::Error: Debug,
{
    let keys = keys_like(&request);
    assert_idempotent_with_keys(app, request, KEY, keys).await;
}

/// The same as [`assert_idempotent`], with this as the other body.
///
/// # Panics
///
/// Like [`assert_idempotent`].
pub async fn assert_idempotent_with_other_body<S, B>(
    app: S,
    request: Request<Body>,
    other: impl Into<Bytes>,
) where
    S: Service<Request<Body>, Response = Response<B>> + Clone,
    S::Error: Debug,
    B: http_body::Body<Data = Bytes>,
    B::Error: Debug,
{
    let keys = keys_like(&request);
    let probe = Probe::new(app, request, KEY).await;
    probe.assert_idempotent(keys, other.into()).await;
}

/// Fresh keys in the spelling of the request's own.
fn keys_like(request: &Request<Body>) -> impl FnMut() -> String + use<> {
    let given = request.headers().get(KEY);
    let given = given.expect("assert_idempotent: the request needs an Idempotency-Key header");
    let quoted = given.as_bytes().starts_with(b"\"");
    move || {
        let key = fresh_uuid();
        if quoted { format!("\"{key}\"") } else { key }
    }
}

/// The same as [`assert_idempotent`], with the key in the given header, and with keys from `keys`,
/// which must give a fresh one each time: three are used.
///
/// # Panics
///
/// Like [`assert_idempotent`], and when a key is no header value.
pub async fn assert_idempotent_with_keys<S, B>(
    app: S,
    request: Request<Body>,
    header: HeaderName,
    keys: impl FnMut() -> String,
) where
    S: Service<Request<Body>, Response = Response<B>> + Clone,
    S::Error: Debug,
    B: http_body::Body<Data = Bytes>,
    B::Error: Debug,
{
    let probe = Probe::new(app, request, header).await;
    let mut other = probe.body.to_vec();
    other.extend(b" (another body)");
    probe.assert_idempotent(keys, other.into()).await;
}

/// A random UUID (RFC 9562 §5.4).
fn fresh_uuid() -> String {
    let bits = u128::from_be_bytes(*Token::random().as_bytes());
    let hex = format!("{bits:032x}");
    format!(
        "{}-{}-4{}-8{}-{}",
        &hex[..8],
        &hex[8..12],
        &hex[13..16],
        &hex[17..20],
        &hex[20..]
    )
}

/// A service and the request it is probed with.
struct Probe<S> {
    app: S,
    head: Parts,
    header: HeaderName,
    body: Bytes,
}

impl<S, B> Probe<S>
where
    S: Service<Request<Body>, Response = Response<B>> + Clone,
    S::Error: Debug,
    B: http_body::Body<Data = Bytes>,
    B::Error: Debug,
{
    async fn new(app: S, request: Request<Body>, header: HeaderName) -> Self {
        let (head, body) = request.into_parts();
        let body = body.collect().await.expect("a readable body").to_bytes();
        Self {
            app,
            head,
            header,
            body,
        }
    }

    async fn assert_idempotent(&self, mut keys: impl FnMut() -> String, other: Bytes) {
        let mut key = || HeaderValue::try_from(keys()).expect("a key that is a header value");

        let used = key();
        let first = self.send(&used, &self.body).await;
        assert!(
            first.status.is_success() && !first.replay,
            "sent once, the request must be accepted and run, but it was answered {first:?}"
        );
        let second = self.send(&used, &self.body).await;
        second.assert_repeats(&first, "sent twice");

        let refused = self.send(&used, &other).await;
        assert!(
            matches!(
                refused.did,
                Some(IdempotencyStatus::Reused | IdempotencyStatus::Invalid)
            ),
            "with another body under the same key the request must be refused, but it was answered {refused:?}"
        );
        let third = self.send(&used, &self.body).await;
        third.assert_repeats(&first, "sent again after another body was refused");

        self.at_once(&key()).await;
        self.dropped_halfway(&key()).await;
    }

    fn request(&self, key: &HeaderValue, body: &Bytes) -> Request<Body> {
        let mut head = self.head.clone();
        head.headers.insert(self.header.clone(), key.clone());
        // The length given was that of the given body.
        head.headers.remove(http::header::CONTENT_LENGTH);
        Request::from_parts(head, Body::from(body.clone()))
    }

    async fn send(&self, key: &HeaderValue, body: &Bytes) -> Answer {
        let response = self.app.clone().oneshot(self.request(key, body));
        Answer::of(response.await.expect("an answer")).await
    }

    async fn at_once(&self, key: &HeaderValue) {
        let mut running: Vec<_> = (0..8)
            .map(|_| Box::pin(self.send(key, &self.body)))
            .collect();
        let mut answers = Vec::new();
        poll_fn(|cx| {
            running.retain_mut(|request| match request.as_mut().poll(cx) {
                Poll::Ready(answer) => {
                    answers.push(answer);
                    false
                }
                Poll::Pending => true,
            });
            if running.is_empty() {
                Poll::Ready(())
            } else {
                Poll::Pending
            }
        })
        .await;
        let (ran, told): (Vec<_>, Vec<_>) = answers
            .into_iter()
            .partition(|answer| answer.status.is_success() && !answer.replay);
        assert_eq!(
            ran.len(),
            1,
            "sent eight times at once, the request must run once; it ran as {ran:?}, the others were told {told:?}"
        );
        for answer in told {
            if answer.did != Some(IdempotencyStatus::InFlight) {
                answer.assert_repeats(&ran[0], "sent eight times at once");
            }
        }
    }

    async fn dropped_halfway(&self, key: &HeaderValue) {
        {
            let mut request = pin!(self.app.clone().oneshot(self.request(key, &self.body)));
            // Once polled it has begun; whether it is also done is all the same here.
            poll_fn(|cx| {
                let _ = request.as_mut().poll(cx);
                Poll::Ready(())
            })
            .await;
        }
        let mut answer = self.send(key, &self.body).await;
        for _ in 0..200 {
            if answer.did != Some(IdempotencyStatus::InFlight) {
                break;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
            answer = self.send(key, &self.body).await;
        }
        assert!(
            answer.status.is_success(),
            "dropped halfway and sent again for ten seconds, the request must be answered, but it was answered {answer:?}"
        );
        let again = self.send(key, &self.body).await;
        again.assert_repeats(&answer, "dropped halfway, then sent again");
    }
}

/// What is compared of an answer.
struct Answer {
    status: StatusCode,
    headers: HeaderMap,
    body: Bytes,
    replay: bool,
    did: Option<IdempotencyStatus>,
}

impl Answer {
    async fn of<B>(response: Response<B>) -> Self
    where
        B: http_body::Body<Data = Bytes>,
        B::Error: Debug,
    {
        let (replay, did) = (response.is_replay(), response.idempotency_status());
        let (head, body) = response.into_parts();
        Self {
            status: head.status,
            headers: head.headers,
            body: body.collect().await.expect("a readable body").to_bytes(),
            replay,
            did,
        }
    }

    #[track_caller]
    fn assert_repeats(&self, first: &Answer, when: &str) {
        let same = self.status == first.status && self.body == first.body;
        let kept = ["content-type", "location", "etag"].iter().all(|name| {
            let values = |headers: &HeaderMap| -> Vec<_> {
                headers.get_all(*name).iter().cloned().collect()
            };
            values(&self.headers) == values(&first.headers)
        });
        assert!(
            self.replay && same && kept,
            "{when}, the request must be answered with a replay of {first:?}, but it was answered {self:?}"
        );
    }
}

impl Debug for Answer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({} bytes", self.status, self.body.len())?;
        if self.replay {
            f.write_str(", a replay")?;
        }
        if let Some(did) = self.did {
            write!(f, ", {did}")?;
        }
        let problem: serde_json::Value = serde_json::from_slice(&self.body).unwrap_or_default();
        if let Some(detail) = problem["detail"].as_str() {
            write!(f, ": {detail}")?;
        }
        f.write_str(")")
    }
}

//! The caller's half: the same key on every attempt, and after a restart.
//!
//! A server that remembers is half of it. A caller that makes a new key for each attempt, sends again what cannot
//! succeed, or loses its key, does the action twice all the same. [`RetryLayer`] wraps any tower client of `http`
//! requests: it gives an operation one key, keeps key and body over all attempts, sends again what may have failed
//! on the way, and says by type how it ended.
//!
//! ```
//! use std::sync::atomic::{AtomicU32, Ordering};
//! use axum::{Router, body::Body, http::{Request, StatusCode}, routing::post};
//! use axum::response::{IntoResponse, Response};
//! use tower::{Layer, ServiceExt, util::MapResponseLayer};
//! use tower_idempotency::{IdempotencyLayer, MemoryStore, client::{Answered, RetryLayer}};
//!
//! static CHARGES: AtomicU32 = AtomicU32::new(0);
//! static ANSWERS: AtomicU32 = AtomicU32::new(0);
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() {
//! let server: Router = Router::new()
//!     .route("/charges", post(|| async {
//!         let number = CHARGES.fetch_add(1, Ordering::SeqCst) + 1;
//!         (StatusCode::CREATED, format!("ch_{number}"))
//!     }))
//!     .route_layer(IdempotencyLayer::new(MemoryStore::new()).single_tenant());
//! // Something in between loses the first answer.
//! let server = server.layer(MapResponseLayer::new(|answer: Response| {
//!     match ANSWERS.fetch_add(1, Ordering::SeqCst) {
//!         0 => StatusCode::BAD_GATEWAY.into_response(),
//!         _ => answer,
//!     }
//! }));
//!
//! let client = RetryLayer::new().layer(server);
//! let charge = Request::post("/charges").body(Body::from("250 baht")).unwrap();
//! let answer = client.oneshot(charge).await.unwrap();
//! assert_eq!(answer.status(), StatusCode::CREATED);
//! let answered = answer.extensions().get::<Answered>().unwrap();
//! assert_eq!((answered.attempts, answered.replayed), (2, true));
//! assert_eq!(CHARGES.load(Ordering::SeqCst), 1);
//! # }
//! ```
//!
//! What must survive a restart of the caller belongs into an outbox, where key and body are durable before anything
//! is sent: `Outbox` and `Relay` (with the feature `sqlite` or `postgres`). [`derived_key`] makes keys of what is to
//! be done.
//!
//! # The key
//!
//! It is chosen once per operation, and all attempts have it. The first of these that there is:
//!
//! 1. the header `Idempotency-Key` of the request, which is sent byte for byte. It must be one that a server of this
//!    crate takes (1 to 255 visible ASCII characters without `"'`, `,`, `;` and backslash, or a string of RFC 9651),
//!    or nothing is sent: [`Unanswered::NotSent`];
//! 2. an [`IdempotencyKey`](crate::IdempotencyKey) in the request's extensions;
//! 3. what the function of [`keys`](RetryLayer::keys) makes of the request;
//! 4. a fresh UUID (version 4).
//!
//! It stands in [`Answered`], or in [`Ended`]: whoever gives up for now sends the same request with the same key
//! later, and never with another one. Headers with the key in them are marked as sensitive, wherever it comes from.
//!
//! # What is sent again
//!
//! | what came | what becomes of it |
//! | --- | --- |
//! | an [`Unanswered`] of a layer like this one inside | the end, as it is; [`Uncovered`](Unanswered::Uncovered) is sent again |
//! | any other error of the client, such as a connection that is refused or reset | sent again |
//! | marked `Idempotency-Status: unprotected`, of any status | the answer: it was run without a record, and another attempt would be another run |
//! | no whole answer within [`attempt_timeout`](RetryLayer::attempt_timeout) | sent again |
//! | an answer whose body breaks off, of any status | sent again |
//! | a replay (`Idempotent-Replay` or `Idempotent-Replayed: true`), of any status | the answer: it is what was recorded |
//! | a 409 that is compressed, with `Retry-After` | taken as in flight, and sent again |
//! | a 409 that is compressed, without | [`Unanswered::GaveUp`], with that answer |
//! | `idempotency_key_reused` | [`Unanswered::Reused`] |
//! | `idempotency_outcome_unknown` | [`Unanswered::OutcomeUnknown`] |
//! | `idempotency_response_not_retained` | [`Unanswered::NotRetained`] |
//! | `idempotency_in_flight`, or one of [`also_in_flight`](RetryLayer::also_in_flight) | sent again; [`Unanswered::StillInFlight`] if that was the last |
//! | any other code of a [`Rejection`](crate::Rejection), or beginning like these | as its `retryable` says; as the code says where that is left out |
//! | 425, 429, 500, 502, 503, 504 | sent again |
//! | a 409 without a code | the answer; sent again with [`retry_bare_conflict`](RetryLayer::retry_bare_conflict) |
//! | anything else | the answer |
//!
//! The first row that fits counts. Codes are read in answers of 4xx and 5xx, from the member `code` of the object
//! `error`, or else of a problem (RFC 9457), in any JSON. A `code` that is no string is a code as well. So
//! a 500 that says `idempotency_transaction_misused` is the answer: that is a mistake in the service, and does not pass
//! by itself. What others mean by `retryable` is not heeded.
//!
//! An answer of 4xx or 5xx is an answer all the same, and comes as `Ok`. What was sent again to the end and failed
//! is [`Unanswered::GaveUp`], with the last answer in it if there was one.
//!
//! Errors of the client are not told apart: one that never passes, such as that of a URI without a host, is sent again
//! as often as one that does, and ends as [`Unanswered::GaveUp`] with the client's own error as its source.
//!
//! An error (4xx, 5xx) whose body breaks off, or does not end in time, is not settled by its status, since the code
//! that may settle it is in the body. So a 402 like that is sent again too: a server that keeps records answers the
//! next attempt with the whole of it. Its `Retry-After` counts, and if it was the last, the end is
//! [`Unanswered::GaveUp`] with its head in [`Ended::response`]. Of an answer marked `unprotected` the body is not waited for, but handed on as it comes.
//!
//! Bodies that are compressed (`Content-Encoding`) are not read, so codes in them are not known: all but a 409 are
//! judged by their status. Decompression belongs inside of this layer, where it meets every attempt:
//!
//! ```
//! # use tower::{ServiceBuilder, layer::util::Identity};
//! # use tower_idempotency::client::RetryLayer;
//! # struct DecompressionLayer;
//! # impl DecompressionLayer { fn new() -> Identity { Identity::new() } }
//! # let client = ();
//! let client = ServiceBuilder::new()
//!     .layer(RetryLayer::new())
//!     .layer(DecompressionLayer::new()) // tower-http's
//!     .service(client);
//! # let _ = client;
//! ```
//!
//! # How long it waits
//!
//! Five times at most ([`retries`](RetryLayer::retries)), between nothing and 0.5, 1, 2, 4, 8 s
//! ([`back_off`](RetryLayer::back_off)): 15.5 s in all, and half of that on average. Where the server says when to
//! come back, that is waited instead, and up to 250 ms more, so that those who were told the same do not come
//! together. The longest of these counts: `Retry-After` in seconds, or as a date, by the server's own `Date` where it
//! sends one; and `retry_after_seconds`, from where codes are read, which may have fractions. Numbers that are
//! negative or beyond all sense are no hint.
//!
//! All of it ends within [`total_timeout`](RetryLayer::total_timeout), but for bodies that are handed on as they come
//! ([`response_body_limit`](RetryLayer::response_body_limit)). A wait that would end later is not begun: the
//! operation ends at once, and [`Ended::retry_after`] has the server's hint.
//!
//! # Clients
//!
//! hyper-util's is such a service already:
//!
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
//! use axum::{body::Body, http::Request};
//! use hyper_util::{client::legacy::Client, rt::TokioExecutor};
//! use tower::{Layer, ServiceExt};
//! use tower_idempotency::client::RetryLayer;
//!
//! let client = Client::builder(TokioExecutor::new()).build_http::<Body>();
//! let client = RetryLayer::new().layer(client);
//! let charge = Request::post("http://pay.example/charges").body(Body::from("250 baht"))?;
//! let answer = client.oneshot(charge).await?;
//! # Ok(())
//! # }
//! ```
//!
//! reqwest's has requests and responses of its own, which can be made of these and into them:
//!
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
//! use axum::http::{Request, Response};
//! use tower::{Layer, ServiceExt, service_fn};
//! use tower_idempotency::client::RetryLayer;
//!
//! let none = reqwest::redirect::Policy::none();
//! let client = reqwest::Client::builder().redirect(none).build()?;
//! let client = service_fn(move |request: Request<reqwest::Body>| {
//!     let client = client.clone();
//!     async move {
//!         let request = reqwest::Request::try_from(request)?;
//!         client.execute(request).await.map(Response::<reqwest::Body>::from)
//!     }
//! });
//! let client = RetryLayer::new().layer(client);
//! let charge = Request::post("http://pay.example/charges").body("250 baht".into())?;
//! let answer = client.oneshot(charge).await?;
//! # Ok(())
//! # }
//! ```
//!
//! Have the client follow no redirects: most make a GET of a POST on the way, and then its answer is that of the GET.
//! One that sends again by itself does so with the same key. Time-outs and limits inside
//! of the layer are those of an attempt; outside of it, of the whole operation. A place in a limit or a queue inside
//! of the layer is not held between two attempts, nor while the request's body is awaited.
//!
//! # Cancel safety
//!
//! Dropping the future ends the retrying. An attempt that was sent may have taken effect, and the same request may be
//! sent again with the same key; see [`RetryFuture`].

mod answered;
mod attempts;
mod derive;
mod exchange;
mod failure;
mod hint;
mod judgement;
mod kept;
mod key_source;
mod observe;
#[cfg(any(feature = "sqlite", feature = "postgres"))]
mod outbox;
mod pause;
mod refusal;
#[cfg(any(feature = "sqlite", feature = "postgres"))]
mod relay;
mod retry;
mod retry_layer;
mod retry_options;
mod unanswered;

pub use self::{
    answered::{Answered, Attempt},
    derive::{InvalidKeyParts, derived_key, joined_key, joined_key_with},
    retry::{Retry, RetryFuture},
    retry_layer::RetryLayer,
    unanswered::{Ended, NotSent, Unanswered, Uncovered},
};
#[cfg(any(feature = "sqlite", feature = "postgres"))]
pub use self::{
    outbox::{
        Begun, Entry, EntryState, Operation, Outbox, OutboxCounts, OutboxDatabase, OutboxError,
        OutboxErrorKind, Outcome,
    },
    relay::{Delivered, Inconclusive, Relay, Resumed, Undelivered, Unfinished},
};

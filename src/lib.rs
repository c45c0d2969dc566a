//! Makes unsafe HTTP requests safe to retry.
//!
//! A client that times out cannot tell "never arrived", "stopped halfway" and "done, answer lost"
//! apart. With an `Idempotency-Key` (draft-ietf-httpapi-idempotency-key-header-07) it sends the same
//! key on every attempt of one action. [`IdempotencyLayer`] then runs the handler once, keeps the
//! answer, and gives it to every retry, in any [tower](https://github.com/tower-rs/tower) or
//! [axum](https://github.com/tokio-rs/axum) service.
//!
//! ```
//! use axum::{Router, body::Body, http::{Request, StatusCode}, routing::post};
//! use tower::ServiceExt;
//! use tower_idempotency::{IdempotencyLayer, IdempotentResponse, MemoryStore};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() {
//! let app: Router = Router::new()
//!     .route("/payments", post(|| async { (StatusCode::CREATED, "ch_1") }))
//!     .route_layer(IdempotencyLayer::new(MemoryStore::new()).single_tenant());
//! let pay = |key: Option<&str>, body: &'static str| {
//!     let mut request = Request::post("/payments");
//!     if let Some(key) = key {
//!         request = request.header("idempotency-key", key);
//!     }
//!     app.clone().oneshot(request.body(Body::from(body)).unwrap())
//! };
//!
//! // The first attempt runs; the retry gets its answer, marked.
//! let first = pay(Some("order-17"), "250 baht").await.unwrap();
//! assert_eq!((first.status(), first.is_replay()), (StatusCode::CREATED, false));
//! let retry = pay(Some("order-17"), "250 baht").await.unwrap();
//! assert_eq!((retry.status(), retry.is_replay()), (StatusCode::CREATED, true));
//! assert_eq!(retry.headers()["idempotent-replay"], "true");
//!
//! // A key belongs to one action, and a POST needs one.
//! let reused = pay(Some("order-17"), "999 baht").await.unwrap();
//! assert_eq!(reused.status(), StatusCode::CONFLICT);
//! let missing = pay(None, "250 baht").await.unwrap();
//! assert_eq!(missing.status(), StatusCode::BAD_REQUEST);
//! # }
//! ```
//!
//! # How a request is handled
//!
//! 1. Its method decides whether a key applies. GET, HEAD, OPTIONS, TRACE and CONNECT pass through
//!    untouched; so does a request that needs no key and has none.
//! 2. The key is read. What is malformed is refused, before anything else is looked at.
//! 3. The [`Scope`] says whose key it is; scope and key together name the record. Where a
//!    [limit](IdempotencyLayer::scope_limit) is set, a scope that has its fill gets no new record.
//! 4. The body is read, up to a limit, and a [`FingerprintScheme`] makes a digest of what is asked.
//! 5. One atomic operation of the [`store`] claims the record, or answers what is there: an answer
//!    to replay, a run in flight, a run that was cut off. A different fingerprint is refused
//!    whatever is there.
//! 6. Who won the claim runs the handler. [`Retention`] (or the handler, by [`Retain`]) decides
//!    whether the answer is kept, the key freed, or only remembered as done.
//! 7. That is recorded, and then the answer goes out.
//!
//! Every refusal is a [`Rejection`] with a stable code, rendered as a problem (RFC 9457), or as [`Profile`] or
//! [`RenderRejection`] say. What was
//! done with a request stands in its response's extensions, as an [`IdempotencyStatus`].
//!
//! # Guarantees
//!
//! - Of any number of attempts with one scope and key, one runs, as long as its record lives: the key
//!   was not freed by a refusal, the record has not expired, and no run was cut off.
//! - No byte of a kept answer goes out before its record is durable, as far as the store promises
//!   durability. If the outcome cannot be recorded within
//!   [`store_timeout`](IdempotencyLayer::store_timeout), the client gets its true answer and the
//!   layer goes on trying; retries are refused meanwhile.
//! - Who lost its claim changes nothing any more: every operation names a [`Token`].
//! - If the store cannot be asked, nothing runs, unless [`StoreFailure`] says otherwise.
//! - In [transactional mode](transactions) effect and record are committed together: a crash at any
//!   instant leaves both or neither, and a retry runs without asking.
//!
//! What no record by itself can promise: a process that dies after the effect and before the record
//! leaves an outcome nobody knows. [`Recovery`] says what a retry then gets; by default a refusal. Pass
//! [`Idempotency::key`] on to a second barrier, such as a UNIQUE constraint or the provider's own
//! idempotency key. After [`ttl`](IdempotencyLayer::ttl) a key runs as new.
//!
//! # Cancel safety
//!
//! | dropped | what happens |
//! | --- | --- |
//! | [`ResponseFuture`], before a claim is sent | nothing is left behind |
//! | [`ResponseFuture`], later | the run goes on as a task of the runtime the request came in on, to its end, and is recorded; a claim that is won only after the drop is given back without a run |
//! | a response's body | nothing: its record is written |
//! | [`IdempotencyLayer::drain`] | the waiting ends, the draining does not |
//! | [`Idempotency::ensure_owned`] | nothing |
//! | a [`Store`](store::Store) operation | it may or may not happen; its token settles which, when it is sent again |
//!
//! A runtime that ends takes its runs with it; they count as abandoned once their lease is over.
//! Task-locals set outside the layer do not follow a run that goes on without its caller.
//!
//! # Stability
//!
//! Semantic versioning covers this API; the codes, members and default statuses of refusals; the
//! default header names; the stored form of a [`RetainedResponse`]; the names and digests of the
//! fingerprint schemes; and the tables of the SQLite and Postgres stores. Every version reads what earlier ones
//! have stored, or its entry in the changelog says what to do. The texts of problems and events may
//! change at any time.
//!
//! Enums and option structs are `#[non_exhaustive]`. The minimum supported Rust version is 1.95; it
//! is raised in minor versions only.
//!
//! # Events
//!
//! All have the target `tower_idempotency::observe`; none shows a key, scope, header value or body.
//!
//! | message | level | fields |
//! | --- | --- | --- |
//! | idempotency decision | debug; warn for `store_unavailable`, `overloaded`, `outcome_unknown`, `unprotected`; error for `idempotency_transaction_misused` | `status` (an [`IdempotencyStatus`]), `code` of a refusal |
//! | idempotency store failed | warn | `operation`, `kind`, `error`, `source` |
//! | idempotency store did not answer in time | warn | `operation` |
//! | idempotency claim lost | warn | `operation`, `attempt` |
//! | idempotent run abandoned | error | `why` |
//! | idempotency record not written | error | `operation` |
//! | retained response cannot be read | error | `error` |
//! | idempotent transaction not committed (in time) | warn | `code`, a SQLSTATE |
//! | idempotent run begun again after a conflict | debug | `rerun` |
//! | statement of a handler failed | error; warn for what passes, debug for a conflict | `code`, a SQLSTATE |
//! | handler stopped: it held its transaction longer than max_hold | warn | – |
//! | IdempotencyLayer has no scope | warn, once | – |
//!
//! # Features
//!
//! - `sqlite` (default): `SqliteStore`, records in an SQLite file.
//! - `postgres`: `PostgresStore`, records in Postgres, for services on many machines.
//! - `multipart`: `MultipartParts`, a fingerprint of forms that does not mind a fresh boundary.
//! - `sealing`: `SealedStore`, which encrypts what a store keeps.
//! - `testing`: `assert_idempotent`, a clock that stands still, a store that fails as told, and the
//!   conformance suite for those who write a store.
//!
//! # Layer order
//!
//! Outside: authentication, request ids, tracing, catch-panic, CORS, rate limits, time-outs,
//! compression. Inside: whatever sets task-locals. Prefer `Router::route_layer` to `Router::layer`,
//! which also covers unknown paths. The README has a table with the reasons.
#![cfg_attr(docsrs, feature(doc_cfg))]
#![forbid(unsafe_code)]
#![deny(missing_docs, unreachable_pub, missing_debug_implementations)]

mod attempt;
mod body;
mod bounded;
mod engine;
mod execution;
mod extract;
mod fingerprint;
mod key;
mod layer;
mod limits;
mod live;
mod maintenance;
mod observe;
mod options;
mod profile;
#[doc = include_str!("profiles.md")]
pub mod profiles {}
mod record;
mod recovery;
mod rejection;
mod rendering;
mod replayed;
mod response_future;
mod retained;
mod retention;
mod scope;
mod service;
mod status;
#[cfg(feature = "sealing")]
#[doc = include_str!("sealing.md")]
pub mod sealing {}
pub mod store;
#[cfg(feature = "testing")]
pub mod testing;
#[cfg_attr(
    not(any(feature = "sqlite", feature = "postgres")),
    expect(dead_code, reason = "only the SQL stores have transactions")
)]
mod transacted;
#[cfg(any(feature = "sqlite", feature = "postgres"))]
mod transaction;
#[cfg(any(feature = "sqlite", feature = "postgres"))]
#[doc = include_str!("transactions.md")]
pub mod transactions {}
mod waiting;

pub use extract::{Idempotency, NoIdempotency, NotOwned};
#[cfg(feature = "multipart")]
pub use fingerprint::MultipartParts;
pub use fingerprint::{
    CanonicalJson, ExactRequest, FingerprintFn, FingerprintScheme, KeyOnly, UndecodableBody,
    fingerprint_fn,
};
pub use key::{IdempotencyKey, InvalidKey, KeyFormat, MAX_KEY_LEN};
pub use layer::{Drained, IdempotencyLayer};
pub use profile::Profile;
pub use record::{Fingerprint, Mode, Owner, Record, RecordId, Scheme, State, Timestamp, Token};
pub use recovery::{InFlight, Recovery, StoreFailure};
pub use rejection::Rejection;
pub use rendering::{ErrorEnvelope, ProblemJson, RejectionContext, RenderRejection};
pub use response_future::ResponseFuture;
pub use retained::{DecodeError, RetainedResponse};
pub use retention::{Retain, Retention, Streamed};
pub use scope::{MAX_SCOPE_LEN, Scope};
pub use service::IdempotencyService;
pub use status::{IdempotencyStatus, IdempotentResponse};
#[cfg(feature = "sqlite")]
pub use store::SqliteStore;
pub use store::{AnyStore, MemoryStore};
#[cfg(feature = "postgres")]
pub use store::{PostgresStore, PostgresStoreOptions};
#[cfg(feature = "sealing")]
pub use store::{SealedStore, SealingKey, SealingKeys};
#[cfg(any(feature = "sqlite", feature = "postgres"))]
pub use transaction::{Isolation, NoTx, Tx, TxConnection, TxDatabase, TxError, TxOptions};

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
//! 2. The key is read. What is malformed is refused, before anything else is looked at. (Where it is
//!    [in the body](IdempotencyLayer::key_pointer), the body is read first.)
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
//! [`RenderRejection`] say. What was done with a request stands in its response's extensions, as an
//! [`IdempotencyStatus`].
//!
//! # The other half
//!
//! Who calls such a service keeps one key over all attempts and restarts: the module `client`, with the feature of
//! that name. Consumers of [jobs and messages](jobs) run them under the same engine, with [`Once`]; receivers of
//! [webhooks] have a [profile](Profile::Webhook).
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
//! | [`Once::run`] and its kin | as with a [`ResponseFuture`] |
//! | a response's body | nothing: its record is written |
//! | [`IdempotencyLayer::drain`] | the waiting ends, the draining does not |
//! | [`Reconciler::run`], [`Reconciler::sweep`], [`Reconciler::resolve`] | a record that is being asked about is given up in the background, and is abandoned as before; a verdict that is known by then is recorded |
//! | [`Idempotency::ensure_owned`], [`Idempotency::checkpointed`] | nothing |
//! | [`Idempotency::checkpoint`] | it may be saved or not |
//! | a [`Store`](store::Store) operation | it may or may not happen; its token settles which, when it is sent again |
//!
//! A runtime that ends takes its runs with it; they count as abandoned once their lease is over.
//! Task-locals set outside the layer do not follow a run that goes on without its caller.
//!
//! # Stability
//!
//! Semantic versioning covers this API; the codes, members and default statuses of refusals; the
//! default header names; the stored form of a [`RetainedResponse`] and of a checkpoint; the names and
//! digests of the fingerprint schemes; the keys that [`Idempotency::downstream_key`] and `client::derived_key`
//! make; and the tables of the SQLite and Postgres stores and of the outbox. Every version reads what earlier ones have stored, or its
//! entry in the changelog says what to do. The texts of problems and events may change at any time.
//!
//! Enums and option structs are `#[non_exhaustive]`. The minimum supported Rust version is 1.95; it
//! is raised in minor versions only.
//!
//! # Events
//!
//! None shows a key, scope, header value (the request's id aside) or body. The target is
//! `tower_idempotency::observe`, but for the last six, which the stores say of their databases and the client of its
//! requests, with the targets in the table.
//!
//! | message | level | fields |
//! | --- | --- | --- |
//! | idempotency decision | debug; warn for `store_unavailable`, `overloaded`, `outcome_unknown`, `unprotected`; error for `idempotency_transaction_misused` | `status` (an [`IdempotencyStatus`]), `code` of a refusal, `request_id`, `original_request_id` of the first request with the same key, `attempt` of a run |
//! | request without an idempotency key passed | info | `problem` (`missing` or `invalid`), the `code` it would have got, `request_id`, `method`, `route` (axum's `MatchedPath`); see [`MissingKey::Observe`] |
//! | idempotency store failed | warn | `operation`, `kind` (a [`StoreErrorKind`](store::StoreErrorKind) as `Debug` has it, `Unavailable`; the metric's label is `unavailable`), `error`, `source` |
//! | idempotency store did not answer in time | warn | `operation` |
//! | idempotency claim lost | warn | `operation`, `request_id`, `attempt` |
//! | idempotent run abandoned | error | `why`, `request_id` |
//! | idempotent run (not) resolved | info; warn or debug where it was not | `by`, `verdict`, `attempt`, `request_id` of the first request with the key |
//! | idempotency record not written | error | `operation`, `request_id`, except where a claim was left behind |
//! | an abandoned record cannot be read | warn | `operation`, `error` |
//! | retained response cannot be read | error | `error` |
//! | the result of an operation cannot be written as JSON | error | – |
//! | idempotent transaction not committed (in time) | warn | `code`, a SQLSTATE |
//! | idempotent run begun again after a conflict | debug | `rerun` |
//! | statement of a handler failed | error; warn for what passes, debug for a conflict | `code`, a SQLSTATE |
//! | handler stopped: it held its transaction longer than max_hold | warn | – |
//! | IdempotencyLayer has no scope | warn, once | – |
//! | Postgres is given up for now | warn; target `tower_idempotency::store::postgres::session` | `kind` |
//! | Postgres is back | info; the same target | – |
//! | synchronous_commit is off | warn, when the store is opened; target `tower_idempotency::store::postgres::schema` | – |
//! | the SQLite connection was given up | warn; target `tower_idempotency::store::sqlite::writer` | `kind` |
//! | attempt failed; the same request is sent again | debug; target `tower_idempotency::client` | `attempt`, `why` (`failed`, `timed_out`, `broke_off`, `in_flight`, `refused` or `not_ready`), `status` of the answer, `network` (an `std::io::ErrorKind`), `wait_ms` |
//! | idempotent operation has no answer | warn; error for `reused`; target `tower_idempotency::client` | `ended` (`not_sent`, `reused`, `still_in_flight`, `outcome_unknown`, `not_retained` or `gave_up`), `attempts`, `status` of the last answer |
//!
//! A request that is decided has one such event. A run that panics, or whose service fails, is decided too: it
//! was `executed`, or `took_over`. Without a decision are only requests whose inner service fails before it is
//! called: in `poll_ready`, which is asked again for a request that has waited for another's run.
//!
//! A request id is what [`request_id_header`](IdempotencyLayer::request_id_header) says. It is left out where it
//! is the key, decoded or as it was sent, or shows a key of eight bytes or more, and always where both come from
//! one header, or where the key should be in a body that holds none that can be used.
//!
//! # Spans
//!
//! A request with a usable key is handled, its handler included, in a span `idempotency` of level info with the
//! target `tower_idempotency`, also where it goes on without its client. Its fields are `request_id` and, once
//! that is decided, `idempotency.status`, `idempotency.original_request_id` and `idempotency.attempt`: the span
//! of a replay names the first request with its key, also where a later one ran after that was cut off.
//!
//! Where that span is filtered out, and for requests without a usable key, these three are recorded on the
//! span around the layer, if it has them:
//!
//! ```
//! # use axum::{Router, body::Body, http::Request};
//! # use tower_http::trace::TraceLayer;
//! use tracing::field::Empty;
//!
//! let trace = TraceLayer::new_for_http().make_span_with(|request: &Request<Body>| {
//!     tracing::info_span!(
//!         "request",
//!         method = %request.method(),
//!         idempotency.status = Empty,
//!         idempotency.original_request_id = Empty,
//!         idempotency.attempt = Empty,
//!     )
//! });
//! # let app: Router = Router::new().layer(trace);
//! ```
//!
//! Without a subscriber nothing of this is put together.
//!
//! # Metrics
//!
//! With the feature `metrics`, for whatever recorder of the crate [metrics](https://docs.rs/metrics) is
//! installed. No label shows what a client sent. Times are in seconds.
//!
//! | name | kind | labels | what |
//! | --- | --- | --- | --- |
//! | `idempotency_requests_total` | counter | `status`, an [`IdempotencyStatus`] | decisions. `executed`, `took_over` and `unprotected` together are the calls of handlers, but for two sorts of run: one that [`drain`](IdempotencyLayer::drain) stopped is `outcome_unknown`, and one whose transaction was given up counts as what its client got |
//! | `idempotency_unkeyed_total` | counter | `problem`: `missing`, `invalid` | requests that passed by [`MissingKey::Observe`] |
//! | `idempotency_store_errors_total` | counter | `operation`; `kind`: a [`StoreErrorKind`](store::StoreErrorKind) or `timeout` | operations of the store that failed or were given up, each once, tries that are made again included |
//! | `idempotency_resolved_total` | counter | `verdict`, `by` | records that were to be resolved |
//! | `idempotency_abandoned_total` | counter | `why`: `panicked`, `failed`, `drained`, `gave_up`, `broke_off` | runs of this process that were cut off, or that gave their outcome up: their claim was lost, or they answered with [`Retain::Abandon`]; under [`Audience::Senders`] also those whose answer broke off |
//! | `idempotency_records_late_total` | counter | – | outcomes not recorded within `store_timeout`; recording goes on |
//! | `idempotency_records_failed_total` | counter | – | outcomes given up without a record |
//! | `idempotency_claim_seconds` | histogram | – | a claim, tries that are made again included |
//! | `idempotency_complete_seconds` | histogram | – | completing, releasing or abandoning, `store_timeout` at most; a commit in transactional mode |
//! | `idempotency_handler_seconds` | histogram | – | the inner service, to the head of its answer, or until it panicked or was aborted. One that hangs is not there yet |
//! | `idempotency_batch_size` | histogram | `store`: `sqlite`, `postgres` | operations that shared a transaction or a statement |
//! | `idempotency_running` | gauge | – | runs, until their outcome is recorded |
//! | `idempotency_waiting` | gauge | – | requests that wait for another one's run |
//! | `idempotency_heartbeat_age_seconds` | gauge | – | how long ago the claims were last known to be renewed, or there were none; or the longest time between two such moments of the last lease or two, if that is longer: threads that were blocked show once they go on. Normally a third of the lease at most |
//! | `idempotency_records` | gauge | `state`: `running`, `completed`, `abandoned`, `released` | records of the store; those that live are their sum |
//!
//! Gauges begin with the first keyed request, or a running [`Reconciler`]. The first three are looked at every
//! second, and are the sum over all layers of the process (of the ages, the greatest). Records are counted as
//! `IdempotencyLayer::count_records_every` says; layers on one store show the same, and where a service has
//! several stores, all layers but those of one should have `Duration::MAX` there.
//!
//! # Features
//!
//! - `sqlite` (default): `SqliteStore`, records in an SQLite file.
//! - `postgres`: `PostgresStore`, records in Postgres, for services on many machines.
//! - `multipart`: `MultipartParts`, a fingerprint of forms that does not mind a fresh boundary.
//! - `metrics`: the metrics above.
//! - `client`: the other half, for those who call such a service: one key for all attempts, retries, an outbox.
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
mod audience;
mod back_off;
mod body;
mod bounded;
mod checkpoint;
#[cfg(feature = "client")]
pub mod client;
mod downstream;
mod engine;
mod execution;
mod extract;
mod fingerprint;
mod hearts;
#[doc = include_str!("jobs.md")]
pub mod jobs {}
mod key;
mod key_source;
mod layer;
mod limits;
mod live;
mod maintenance;
mod observe;
mod once;
#[doc = include_str!("operations.md")]
pub mod operations {}
mod options;
mod pace;
mod profile;
#[doc = include_str!("profiles.md")]
pub mod profiles {}
mod reconciler;
mod record;
mod recovery;
mod rejection;
mod rendering;
mod replayed;
mod resolving;
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
#[doc = include_str!("webhooks.md")]
pub mod webhooks {}

pub use audience::Audience;
pub use checkpoint::CheckpointError;
pub use downstream::{DownstreamKey, InvalidDownstreamKey, NoDownstreamSecret};
pub use extract::{Idempotency, NoIdempotency, NotOwned};
#[cfg(feature = "multipart")]
pub use fingerprint::MultipartParts;
pub use fingerprint::{
    CanonicalJson, Endpoint, ExactRequest, FingerprintFn, FingerprintScheme, KeyOnly,
    UndecodableBody, fingerprint_fn,
};
pub use key::{IdempotencyKey, InvalidKey, KeyFormat, MAX_KEY_LEN};
pub use layer::{Drained, IdempotencyLayer};
pub use once::{Done, Failure, Once, OnceError, UnreadableResult};
pub use profile::Profile;
pub use reconciler::{Reconciler, Swept};
pub use record::{Fingerprint, Mode, Owner, Record, RecordId, Scheme, State, Timestamp, Token};
pub use recovery::{Abandoned, InFlight, MissingKey, Recovery, Resolver, StoreFailure, Verdict};
pub use rejection::Rejection;
pub use rendering::{ErrorEnvelope, ProblemJson, RejectionContext, RenderRejection};
pub use resolving::Resolved;
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

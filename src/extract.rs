//! What a handler may ask of its claim.

use std::{convert::Infallible, fmt, sync::Arc};

use axum::{
    body::Body,
    extract::{FromRequestParts, OptionalFromRequestParts},
    response::IntoResponse,
};
use http::{HeaderValue, Response, StatusCode, header, request::Parts};
use serde::{Serialize, de::DeserializeOwned};

#[cfg(any(feature = "sqlite", feature = "postgres"))]
use crate::store::{JoinsTransaction, Settled};
use crate::{
    IdempotencyKey, Retain, Scope,
    attempt::Attempt,
    checkpoint::{self, CheckpointError},
    downstream::{DownstreamKey, NoDownstreamSecret},
    store::{StoreError, Ticket},
    transacted::Work,
};

/// The claim a handler runs under, as an axum extractor.
///
/// `Option<Idempotency>` is `None` where no key applied to the request (a method that is not
/// covered, an optional key left out, an unprotected run). Without the `Option` such a request is
/// answered with 500, because handler and layer disagree about what is required.
///
/// ```
/// use axum::{Router, routing::post};
/// use tower_idempotency::{Idempotency, IdempotencyLayer, MemoryStore};
///
/// async fn pay(idempotency: Idempotency) -> String {
///     // Pass the key on as a second barrier, for instance as a UNIQUE column.
///     format!("run {}", idempotency.attempt())
/// }
///
/// let app: Router = Router::new()
///     .route("/payments", post(pay))
///     .route_layer(IdempotencyLayer::new(MemoryStore::new()).single_tenant());
/// ```
#[derive(Debug, Clone)]
pub struct Idempotency {
    attempt: Arc<Attempt>,
    ticket: Ticket,
}

impl Idempotency {
    pub(crate) fn new(attempt: Arc<Attempt>, ticket: Ticket) -> Self {
        Self { attempt, ticket }
    }

    /// The key the client sent.
    pub fn key(&self) -> &IdempotencyKey {
        &self.ticket.id.key
    }

    /// Whose key it is.
    pub fn scope(&self) -> &Scope {
        &self.ticket.id.scope
    }

    /// Which run this is: 1 for the first, which has no checkpoints; more where an earlier one was cut off, or
    /// released with checkpoints.
    ///
    /// Runs that were cut off are counted. One that has answered and is followed by another all the same, or
    /// that never began, leaves its number to the next: runs that fail and are released are 1, 2, 2, 2. See
    /// [`Recovery::Rerun`](crate::Recovery::Rerun).
    pub fn attempt(&self) -> u32 {
        self.ticket.attempt
    }

    /// Asks the store whether this run still holds its claim, and extends its lease. Worth the
    /// round trip before an effect that cannot be undone, in a run that has lasted a while.
    ///
    /// Dropping the future has no effect.
    ///
    /// ```
    /// use tower_idempotency::{Idempotency, NotOwned};
    ///
    /// async fn handler(idempotency: Idempotency) -> Result<&'static str, NotOwned> {
    ///     // … a slow computation …
    ///     idempotency.ensure_owned().await?;
    ///     // … the effect …
    ///     Ok("paid")
    /// }
    /// ```
    ///
    /// # Errors
    ///
    /// [`NotOwned`] when the claim was taken over, forgotten, or has lasted longer than `max_run`,
    /// or when the store could not say. As a response it leaves the key to the recovery policy.
    pub async fn ensure_owned(&self) -> Result<(), NotOwned> {
        match self.attempt.still_holds().await {
            Ok(true) => Ok(()),
            Ok(false) => Err(NotOwned { unknown: None }),
            Err(error) => Err(NotOwned {
                unknown: Some(Arc::new(error)),
            }),
        }
    }

    /// Saves a small value under this claim, as JSON and by this name; the same name again replaces it. It is
    /// durable when this returns, as far as the store promises durability, and a later run of the same key
    /// finds it with [`checkpointed`](Self::checkpointed): so an operation of several steps goes on after
    /// the last one it has finished, where an earlier run was cut off
    /// ([`Recovery::rerun`](crate::Recovery::rerun)) or failed and was
    /// released ([`Retention::successes_only`](crate::Retention::successes_only)). A
    /// [`Resolver`](crate::Resolver) finds it too.
    ///
    /// Save *after* the step, with what the next one needs of it. Between a step and its checkpoint a process
    /// can still die, so a step must be one that can be repeated: with a
    /// [`downstream_key`](Self::downstream_key) where somebody else does it, with
    #[cfg_attr(
        any(feature = "sqlite", feature = "postgres"),
        doc = "[`checkpoint_in`](Self::checkpoint_in)"
    )]
    #[cfg_attr(
        not(any(feature = "sqlite", feature = "postgres")),
        doc = "`checkpoint_in`"
    )]
    /// where it is done in the store's own database.
    ///
    /// Names have at most 64 bytes and are no secret; values have at most 64 KiB less one byte; a record has at
    /// most 32 names. They live as long as their record: gone once it has expired or was forgotten, or
    /// released without any; in a completed one nobody reads them any more. A record that was released with
    /// checkpoints keeps them for a [`ttl`](crate::IdempotencyLayer::ttl), refuses another body as ever, and
    /// its next run is [`attempt`](Self::attempt) 2 or more.
    ///
    /// Floats come back to the last bit. `NaN` and the infinities are written as `null`: they are not read as a
    /// number, and `Some(NaN)` comes back as `None`. Nor is what is nested deeper than 127 levels read back.
    ///
    /// ```
    /// use axum::{Router, body::Body, http::{Request, StatusCode}, routing::post};
    /// use tower::ServiceExt;
    /// use tower_idempotency::{CheckpointError, Idempotency, IdempotencyLayer, MemoryStore, Retention};
    ///
    /// async fn pay(idempotency: Idempotency) -> Result<StatusCode, CheckpointError> {
    ///     let reserved: Option<u64> = idempotency.checkpointed("reserved").await?;
    ///     if reserved.is_none() {
    ///         // … reserve 500, in a way that may be repeated …
    ///         idempotency.checkpoint("reserved", &500).await?;
    ///         // … and the provider is down.
    ///         return Ok(StatusCode::SERVICE_UNAVAILABLE);
    ///     }
    ///     Ok(StatusCode::CREATED)
    /// }
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// let layer = IdempotencyLayer::new(MemoryStore::new())
    ///     .single_tenant()
    ///     .retention(Retention::successes_only());
    /// let app: Router = Router::new().route("/payments", post(pay)).route_layer(layer);
    /// let request = || Request::post("/payments").header("idempotency-key", "k").body(Body::empty()).unwrap();
    /// assert_eq!(app.clone().oneshot(request()).await.unwrap().status(), 503);
    /// // The same key goes on where it was.
    /// assert_eq!(app.clone().oneshot(request()).await.unwrap().status(), 201);
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`CheckpointError`], which is an answer: when the claim is lost; when the store did not save it within
    /// [`store_timeout`](crate::IdempotencyLayer::store_timeout), though it was asked again; when a limit is
    /// exceeded; when the value cannot be written as JSON; and where this would wait for the handler's own open
    /// `Tx`: in SQLite always, in Postgres under a name that was saved in it.
    ///
    /// # Cancel safety
    ///
    /// Dropped, it may be saved or not; [`checkpointed`](Self::checkpointed) asks the store then.
    pub async fn checkpoint(
        &self,
        name: &str,
        value: &(impl Serialize + ?Sized),
    ) -> Result<(), CheckpointError> {
        let value = checkpoint::encode(value)?;
        self.attempt.save(name, value).await
    }

    /// What this run, or an earlier one of the same key, has saved under this name.
    ///
    /// The store is asked at most once in a run, and not at all by a first attempt; what the run saves itself
    /// is known. (After
    #[cfg_attr(
        any(feature = "sqlite", feature = "postgres"),
        doc = "[`checkpoint_in`](Self::checkpoint_in)"
    )]
    #[cfg_attr(
        not(any(feature = "sqlite", feature = "postgres")),
        doc = "`checkpoint_in`"
    )]
    /// it is asked each time, and answers what is committed; after a save that failed or was dropped it is
    /// asked again.) What is known without asking does not tell whether the claim is still held:
    /// [`ensure_owned`](Self::ensure_owned) does.
    ///
    /// # Errors
    ///
    /// [`CheckpointError`]: when the store was asked and the claim is lost, or did not answer within
    /// [`store_timeout`](crate::IdempotencyLayer::store_timeout); when what is saved is no JSON of a `T`; when
    /// it is sealed, and the layer has no `SealedStore` with its key.
    ///
    /// # Cancel safety
    ///
    /// Dropping it changes nothing.
    pub async fn checkpointed<T: DeserializeOwned>(
        &self,
        name: &str,
    ) -> Result<Option<T>, CheckpointError> {
        let saved = self.attempt.saved(name).await?;
        saved.map(|stored| checkpoint::decode(&stored)).transpose()
    }

    /// Saves a [`checkpoint`](Self::checkpoint) in a transaction of the handler's own on the store's database:
    /// committed together with what else is done in it, or not at all. So there is no instant between step
    /// and checkpoint.
    ///
    /// The connection is an `sqlx::PgConnection` or an `sqlx::SqliteConnection` that is in a transaction:
    /// `&mut *transaction` of an sqlx one, `&mut *tx.connection().await?` of a [`Tx`](crate::Tx). Without a
    /// transaction it is committed by itself.
    ///
    /// For a handler that calls a provider: reserve and checkpoint in one short transaction, call the provider
    /// outside of any, settle in another.
    ///
    /// ```
    /// # #[cfg(feature = "sqlite")] {
    /// use axum::{Router, extract::State, http::StatusCode, routing::post};
    /// use sqlx::SqlitePool;
    /// use tower_idempotency::{
    ///     Idempotency, IdempotencyLayer, Recovery, Retention, SqliteStore, TxError,
    /// };
    ///
    /// async fn pay(
    ///     State(pool): State<SqlitePool>,
    ///     idempotency: Idempotency,
    /// ) -> axum::response::Result<StatusCode> {
    ///     let reserved: Option<i64> = idempotency.checkpointed("reserved").await?;
    ///     let charge = match reserved {
    ///         Some(charge) => charge,
    ///         None => {
    ///             let short = pool.begin_with("BEGIN IMMEDIATE").await;
    ///             let mut short = short.map_err(TxError::from)?;
    ///             let charge = sqlx::query("INSERT INTO charges (state) VALUES ('reserved')")
    ///                 .execute(&mut *short)
    ///                 .await
    ///                 .map_err(TxError::from)?
    ///                 .last_insert_rowid();
    ///             idempotency.checkpoint_in(&mut *short, "reserved", &charge).await?;
    ///             short.commit().await.map_err(TxError::from)?;
    ///             charge
    ///         }
    ///     };
    ///     // No transaction is open here. However often this is sent, the provider charges once.
    ///     call_the_provider(charge, idempotency.downstream_key("charge")?.as_str()).await?;
    ///     // Nor does it matter how often this is done.
    ///     sqlx::query("UPDATE charges SET state = 'charged' WHERE id = ?1")
    ///         .bind(charge)
    ///         .execute(&pool)
    ///         .await
    ///         .map_err(TxError::from)?;
    ///     Ok(StatusCode::CREATED)
    /// }
    ///
    /// async fn call_the_provider(charge: i64, key: &str) -> Result<(), StatusCode> {
    ///     // … 502 when it cannot be reached …
    ///     Ok(())
    /// }
    ///
    /// fn app(store: SqliteStore, pool: SqlitePool, secret: [u8; 32]) -> Router {
    ///     // What fails is released, and a retry goes on; so it does after a crash.
    ///     let layer = IdempotencyLayer::new(store)
    ///         .retention(Retention::successes_only())
    ///         .recovery(Recovery::rerun())
    ///         .downstream_secret(secret);
    ///     Router::new().route("/payments", post(pay)).route_layer(layer).with_state(pool)
    /// }
    /// # }
    /// ```
    ///
    /// Under one name save either in transactions or by [`checkpoint`](Self::checkpoint): the other one would
    /// wait for the transaction that is open.
    ///
    /// # Errors
    ///
    /// [`CheckpointError`], as [`checkpoint`](Self::checkpoint), and: when the statement fails, and with it, in
    /// Postgres, the transaction; when the store cannot do this (a memory store) or has its records in a
    /// database of another kind. Roll the transaction back then. After a serialization failure or a deadlock
    /// a layer with `.transactional()` runs the handler again, when it answers with the error.
    ///
    /// # Cancel safety
    ///
    /// That of a statement on this connection: it may be saved or not when the transaction is committed.
    #[cfg(any(feature = "sqlite", feature = "postgres"))]
    pub async fn checkpoint_in<C: JoinsTransaction>(
        &self,
        connection: &mut C,
        name: &str,
        value: &(impl Serialize + ?Sized),
    ) -> Result<(), CheckpointError> {
        let value = checkpoint::encode(value)?;
        let joining = self.attempt.joining(name, value)?;
        match connection.save(joining).await? {
            Settled::Done => Ok(()),
            Settled::Lost => Err(CheckpointError::lost()),
        }
    }

    /// An idempotency key for a call that this handler makes in its turn, such as to a payment provider: 32
    /// hexadecimal digits, made of scope, key and the name of the step with
    /// [`downstream_secret`](crate::IdempotencyLayer::downstream_secret).
    ///
    /// It is the same in every run of this key, in every process and version, and for a
    /// [`Resolver`](crate::Resolver) ([`Abandoned::downstream_key`](crate::Abandoned::downstream_key)); another
    /// one for each step, key, scope and secret. Nobody can tell the client's key from it.
    ///
    /// - **When the secret changes** so do all keys: a rerun would ask the provider under a new one, and charge
    ///   again. Change it only while no key is abandoned, running or released with checkpoints; or save the key
    ///   itself in a [`checkpoint`](Self::checkpoint) before the call, and use what is saved. The same holds for
    ///   the hash key of a `SealedStore`, under whose names the keys are made.
    /// - **It knows nothing of time.** When the record has expired, or was
    ///   [forgotten](crate::store::Inspect::forget), the client's key runs as new, and this key is the same
    ///   again. A provider that still knows it answers as it did then, and charges nothing: right for a late
    ///   retry, wrong for a client that uses keys twice. A provider that keeps its keys for a shorter time than
    ///   [`ttl`](crate::IdempotencyLayer::ttl) has forgotten it by the time of a late rerun, and charges again:
    ///   look the charge up then, before it is asked for.
    /// - **It knows nothing of the body.** A key that was freed may come again with another order in its body (a
    ///   corrected amount after a 422, say), which then asks under the same downstream key: a provider that has
    ///   taken the first order after all answers with that one's charge, or refuses. Where a request may have
    ///   reached the provider before its key is freed, keep the order in a row of your own or in a
    ///   [`checkpoint`](Self::checkpoint) before the call, and refuse another one; or put a digest of the order
    ///   into the name of the step, where a second charge for another order is right.
    ///
    /// ```
    /// use axum::http::Request;
    /// use tower_idempotency::{DownstreamKey, Idempotency, NoDownstreamSecret};
    ///
    /// fn charge(idempotency: &Idempotency) -> Result<Request<String>, NoDownstreamSecret> {
    ///     let mut request = Request::post("https://provider.example/charges").body(String::new()).unwrap();
    ///     idempotency.downstream_key("charge")?.set_on(&mut request);
    ///     assert!(request.headers().contains_key("idempotency-key"));
    ///     Ok(request)
    /// }
    /// ```
    ///
    /// # Errors
    ///
    /// [`NoDownstreamSecret`] without a [`downstream_secret`](crate::IdempotencyLayer::downstream_secret).
    pub fn downstream_key(&self, step: &str) -> Result<DownstreamKey, NoDownstreamSecret> {
        self.attempt.downstream_key(&self.ticket.id, step)
    }

    /// Notes the transaction that this try of the handler is offered.
    pub(crate) fn is_offered(&self, work: &Arc<dyn Work>) {
        self.attempt.offered(work);
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Idempotency {
    type Rejection = NoIdempotency;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, NoIdempotency> {
        parts.extensions.get().cloned().ok_or(NoIdempotency(()))
    }
}

impl<S: Send + Sync> OptionalFromRequestParts<S> for Idempotency {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Option<Self>, Infallible> {
        Ok(parts.extensions.get().cloned())
    }
}

/// A handler asked for [`Idempotency`] where no key applied. As a response: 500.
#[derive(Debug, Clone, Copy)]
pub struct NoIdempotency(());

impl fmt::Display for NoIdempotency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            "no idempotency claim stands behind this request; wrap the route in IdempotencyLayer and \
             require a key for its method, or, where keys are optional or runs may be unprotected, \
             take Option<Idempotency>",
        )
    }
}

impl std::error::Error for NoIdempotency {}

impl IntoResponse for NoIdempotency {
    fn into_response(self) -> Response<Body> {
        (StatusCode::INTERNAL_SERVER_ERROR, self.to_string()).into_response()
    }
}

/// A run holds its claim no longer, or cannot know whether it does.
///
/// As a response: 503 with `Retry-After: 1`. Nothing is kept, and the key is left to
/// [`Recovery`](crate::Recovery), since what the run did so far is not known. A handler that knows
/// that it did nothing may answer with [`Retain::Release`](crate::Retain) instead.
#[derive(Debug, Clone)]
pub struct NotOwned {
    unknown: Option<Arc<StoreError>>,
}

impl NotOwned {
    /// Whether the store could not say; else the claim is certainly lost.
    pub fn is_unknown(&self) -> bool {
        self.unknown.is_some()
    }
}

impl fmt::Display for NotOwned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.unknown {
            Some(_) => "the store could not say whether this run still holds its claim",
            None => "this run holds its idempotency claim no longer",
        })
    }
}

impl std::error::Error for NotOwned {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.unknown.as_ref().map(|error| &**error as _)
    }
}

impl IntoResponse for NotOwned {
    fn into_response(self) -> Response<Body> {
        let retry_after = (header::RETRY_AFTER, HeaderValue::from_static("1"));
        let status = StatusCode::SERVICE_UNAVAILABLE;
        let mut response = (status, [retry_after], self.to_string()).into_response();
        response.extensions_mut().insert(Retain::Abandon);
        response
    }
}

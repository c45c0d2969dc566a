//! The gateway without its process: routes, layers and tables.
//!
//! What a request goes through, from the outside in:
//!
//! | step | refuses with | where |
//! | --- | --- | --- |
//! | gets an id | – | [`request_id`] |
//! | is there such a path, and has it this method | 404, 405 | [`app`] |
//! | who is it; not too fast; body read; signature; nonce | 400, 401, 413, 429 | [`authentication`] |
//! | upload token of a slip | 403, 404 | [`slips::check_token`] |
//! | an amount that asks for a refusal | 409 | [`sandbox`] |
//! | the layer: key, scope, fingerprint, record | 400, 409, 503 | [`layer`] |
//! | the handler, in a transaction | 400, 409, 413, 415, 422 | [`deposits`], [`slips`] |
//!
//! All that is a matter of credentials comes before the layer, so that one who was shut out gets 401 and not a
//! replay, which would carry an upload token. And a 429 never comes as far as the key. What paths and methods there
//! are is no secret, so that is told to everybody.
//!
//! # Why transactional
//!
//! The whole effect of a request is a row in the file that holds the records. So effect and record are
//! committed together, and after a crash there is no outcome that nobody knows: the row is there and the
//! retry is answered with it, or it is not and the retry makes it. The price is SQLite's: handlers that write
//! run one after the other. A gateway that calls a bank before it answers cannot do this; see
//! `examples/two_step_charge`.

use std::{path::Path, time::Duration};

use axum::{
    Router,
    extract::DefaultBodyLimit,
    http::{HeaderName, header, request},
    middleware::{from_fn, from_fn_with_state},
    routing::{get, post},
};
use refused::Refused;
use sqlx::{
    Sqlite, SqlitePool,
    sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous},
};
use tower_http::{sensitive_headers::SetSensitiveRequestHeadersLayer, trace::TraceLayer};
use tower_idempotency::{
    ErrorEnvelope, IdempotencyLayer, Profile, Scope, SealedStore, SealingKeys, SqliteStore,
    store::StoreError,
};

pub mod authentication;
pub mod deposits;
pub mod ledger;
pub mod merchants;
pub mod nonces;
pub mod rate;
mod refused;
mod request_id;
mod sandbox;
pub mod signature;
pub mod slip;
pub mod slips;
mod thai;
mod token;

/// A handler's transaction.
pub type Tx = tower_idempotency::Tx<Sqlite>;

/// The layer's records, their answers sealed.
pub type Records = SealedStore<SqliteStore>;

/// How many bytes an order may have.
pub const DEPOSIT_BODY: usize = 64 * 1024;

/// How many bytes a slip may have on its way: an image of 4 MiB in base64, broken into lines, is below this.
pub const SLIP_BODY: usize = 6 * 1024 * 1024;

/// What handlers and authentication work with.
#[derive(Clone)]
pub struct Service {
    pub authentication: authentication::Authentication,
    /// For reading. What is written goes through [`Tx`].
    pub ledger: SqlitePool,
    /// How long a key is remembered.
    pub ttl: Duration,
}

/// The gateway, as it is to be served.
pub fn app(service: Service, layer: IdempotencyLayer<Records>) -> Router {
    let authenticated = |body| service.authentication.clone().reading_at_most(body);
    let deposits = Router::new()
        .route(
            "/v1/pay/deposits",
            post(deposits::create).get(deposits::list),
        )
        .route("/v1/pay/deposits/{id}", get(deposits::show))
        .route_layer(from_fn(refused::render))
        .route_layer(layer.clone())
        .route_layer(from_fn_with_state(layer.clone(), sandbox::reused_on_demand))
        .route_layer(from_fn_with_state(
            authenticated(DEPOSIT_BODY),
            authentication::authenticate,
        ));
    let slips = Router::new()
        .route("/v1/pay/deposits/{id}/slip", post(slips::upload))
        .route_layer(DefaultBodyLimit::max(SLIP_BODY))
        .route_layer(from_fn(refused::render))
        .route_layer(for_slips(layer))
        .route_layer(from_fn_with_state(service.clone(), slips::check_token))
        .route_layer(from_fn_with_state(
            authenticated(SLIP_BODY),
            authentication::authenticate,
        ));
    let secret = [
        header::AUTHORIZATION,
        HeaderName::from_static(slips::TOKEN_HEADER),
    ];
    deposits
        .merge(slips)
        // After the layers above, so that none of them has to do with a request that is nobody's.
        .method_not_allowed_fallback(async || Refused::method())
        .fallback(async || Refused::path())
        .layer(from_fn(refused::render))
        .layer(TraceLayer::new_for_http())
        .layer(SetSensitiveRequestHeadersLayer::new(secret))
        .layer(from_fn(request_id::assign))
        .with_state(service)
}

/// The layer of the orders.
pub fn layer(store: Records, ttl: Duration, lease: Duration) -> IdempotencyLayer<Records> {
    let envelope = ErrorEnvelope::new().member("message_th", |rejection| {
        Some(thai::message(rejection.code()).to_owned())
    });
    IdempotencyLayer::new(store)
        .profile(Profile::Gateway)
        .ttl(ttl)
        .max_run(lease.max(Duration::from_secs(600)))
        .lease(lease)
        // By merchant: of its credentials there are several, and they are replaced.
        .scope(|head: &request::Parts| {
            let merchant = head.extensions.get::<merchants::Merchant>()?;
            Some(Scope::new(merchant.id))
        })
        .rejections(envelope)
        .request_body_limit(DEPOSIT_BODY)
        .transactional()
}

/// The same layer for evidence: same store, same places for runs, same `drain`, but other limits, and it is the
/// evidence that counts and not its packing.
fn for_slips(layer: IdempotencyLayer<Records>) -> IdempotencyLayer<Records> {
    layer
        .fingerprint(slip::fingerprint())
        .request_body_limit(SLIP_BODY)
}

/// The records. Their answers hold upload tokens, and so do the file's backups: they are sealed.
pub async fn open_records(file: &Path, keys: SealingKeys) -> Result<Records, StoreError> {
    SealedStore::open(SqliteStore::open(file).await?, keys).await
}

/// The service's own tables, in the file of the records.
pub async fn open_ledger(file: &Path) -> Result<SqlitePool, sqlx::Error> {
    let ledger = open(file).await?;
    let tables = sqlx::raw_sql(include_str!("tables.sql"));
    tables.execute(&ledger).await?;
    Ok(ledger)
}

async fn open(file: &Path) -> Result<SqlitePool, sqlx::Error> {
    let options = SqliteConnectOptions::new()
        .filename(file)
        .create_if_missing(true)
        .journal_mode(SqliteJournalMode::Wal)
        .synchronous(SqliteSynchronous::Full);
    let pool = SqlitePoolOptions::new().max_connections(4);
    pool.connect_with(options).await
}

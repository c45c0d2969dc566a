//! The service without its process: routes, layer, tables, and the steps of a charge.
//!
//! A charge calls a payment provider. No transaction of ours takes that call back, and one that is open
//! during the call holds its locks for as long as the provider likes. So it goes in steps, each of which
//! may be repeated:
//!
//! | step | how | done again |
//! | --- | --- | --- |
//! | reserve | one short transaction: the row of the charge, and its amount off the budget | finds the row of this client and key |
//! | ask the provider | nothing open, nothing locked | the same downstream key, which the provider charges once |
//! | settle | one short transaction: `charged` and spent, or `declined` and given back | changes only what is still reserved |
//!
//! Therefore the layer may run a charge again whose run was cut off, wherever that was
//! ([`Recovery::rerun`]). It is an ordinary layer: what the steps leave behind is committed long before
//! the record of the key is complete.
//!
//! A client that never comes back leaves its charge `reserved`. [`charges::finish`] needs no more than the
//! row, so a sweep over old rows can call it as well.

use std::{path::Path, pin::Pin, sync::Arc, time::Duration};

use axum::{
    Router,
    http::{HeaderMap, request},
    routing::{get, post},
};
use sqlx::{
    SqlitePool,
    sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous},
};
use tower_idempotency::{IdempotencyLayer, Recovery, Scope, SqliteStore};

mod charges;
pub mod downstream;
pub mod gateway;
pub mod ledger;
mod refused;

/// What the handlers work with.
#[derive(Clone)]
pub struct Service {
    pub ledger: SqlitePool,
    pub gateway: gateway::Gateway,
    pub pause: Pause,
}

/// A step that has just been done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    Reserved,
    Answered,
    Settled,
}

/// For drills only: awaited after each step. There the plug may be pulled.
pub type Pause = Arc<dyn Fn(Step) -> Pin<Box<dyn Future<Output = ()> + Send>> + Send + Sync>;

/// The service, as it is to be served.
pub fn app(service: Service, layer: IdempotencyLayer<SqliteStore>) -> Router {
    // `route_layer`, so that an unknown path is a 404 and not a question of keys.
    Router::new()
        .route("/charges", post(charges::create))
        .route("/charges/{id}", get(charges::show))
        .route("/budgets/{currency}", get(charges::budget))
        .route_layer(layer)
        .with_state(service)
}

pub fn layer(store: SqliteStore, lease: Duration) -> IdempotencyLayer<SqliteStore> {
    IdempotencyLayer::new(store)
        .max_run(lease.max(Duration::from_secs(600)))
        .lease(lease)
        .scope(|head: &request::Parts| client(&head.headers))
        // Every step may be repeated; see above. A handler of which that is not true leaves the default.
        .recovery(Recovery::rerun())
}

/// Stands for authentication, which a real service has outside the layer: a header that callers make up
/// lets each of them into everybody's scope.
fn client(headers: &HeaderMap) -> Option<Scope> {
    let id = headers.get("x-client-id")?;
    (!id.is_empty()).then(|| Scope::new(id))
}

/// The service's own tables. The layer's records may be in the same file.
pub async fn open_ledger(file: &Path, connections: u32) -> Result<SqlitePool, sqlx::Error> {
    let options = SqliteConnectOptions::new()
        .filename(file)
        .create_if_missing(true)
        .journal_mode(SqliteJournalMode::Wal)
        // A reservation has to outlive a power cut, since the provider is asked right after it.
        .synchronous(SqliteSynchronous::Full);
    let pool = SqlitePoolOptions::new().max_connections(connections);
    let ledger = pool.connect_with(options).await?;
    let tables = sqlx::raw_sql(include_str!("tables.sql"));
    tables.execute(&ledger).await?;
    Ok(ledger)
}

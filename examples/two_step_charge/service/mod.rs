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
//! | note what it said | a checkpoint under the claim | the same name, so the same value |
//! | settle | one short transaction: `charged` and spent, or `declined` and given back | changes only what is still reserved |
//!
//! A run that is cut off leaves an outcome that the layer does not know. It is neither run again blindly nor
//! refused for ever: [`recovery`] asks the provider by the downstream key, which is the same in every process.
//!
//! | the run was cut off | what is found | what a retry gets |
//! | --- | --- | --- |
//! | before the provider was asked | no charge under this key | it runs: the row is there, and the provider charges |
//! | after the provider was asked | a charge, at the provider or in the checkpoint | the answer that the run would have given, replayed |
//! | after it was settled | the row | the same |
//!
//! It is an ordinary layer: what the steps leave behind is committed long before the record of the key is
//! complete.
//!
//! A client that is told 503, since the provider gave no verdict, and never comes back leaves its charge
//! `reserved`: its key is free, so there is no record to sweep over. Whoever wants such charges swept as well
//! answers with `Retain::Abandon` in `refused` instead of `Retain::Release`. Then a retry is told that the
//! outcome is unknown, as long as the provider is silent, where now it asks the provider again.

use std::{path::Path, pin::Pin, sync::Arc, time::Duration};

use axum::{
    Router,
    extract::{Request, State},
    http::{HeaderMap, request},
    middleware::{Next, from_fn_with_state},
    response::Response,
    routing::{get, post},
};
use sqlx::{
    SqlitePool,
    sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous},
};
use tower_idempotency::{Abandoned, Idempotency, IdempotencyLayer, Scope, SqliteStore};

mod charges;
pub mod gateway;
pub mod ledger;
mod recovery;
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
    /// The row is there.
    Reserved,
    /// The provider has answered.
    Answered,
    /// What it said is in a checkpoint.
    Noted,
    /// The row says `charged` or `declined`.
    Settled,
    /// The handler has answered, and the layer has not recorded it.
    Done,
    /// The resolver knows what the provider knows.
    LookedUp,
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
        // Added before the layer, so inside of it.
        .route_layer(from_fn_with_state(service.clone(), pause_when_done))
        .route_layer(layer)
        .with_state(service)
}

async fn pause_when_done(
    State(service): State<Service>,
    keyed: Option<Idempotency>,
    request: Request,
    next: Next,
) -> Response {
    let response = next.run(request).await;
    if keyed.is_some() {
        (service.pause)(Step::Done).await;
    }
    response
}

/// What differs between a drill and the real thing.
pub struct Settings<'a> {
    pub lease: Duration,
    /// What the keys for the provider are made with. With another one a retry would be another charge there, so
    /// it stays what it is as long as keys live.
    pub secret: &'a [u8],
    /// How long the provider may take to answer.
    pub patience: Duration,
}

pub fn layer(
    store: SqliteStore,
    service: &Service,
    settings: &Settings<'_>,
) -> IdempotencyLayer<SqliteStore> {
    let service = service.clone();
    IdempotencyLayer::new(store)
        .max_run(settings.lease.max(Duration::from_secs(600)))
        .lease(settings.lease)
        .scope(|head: &request::Parts| client(&head.headers))
        .downstream_secret(settings.secret)
        // The recovery policy stays at refusing: what the resolver cannot tell is left as it is.
        .resolver(move |abandoned: Abandoned| recovery::resolve(service.clone(), abandoned))
        // For the look-up, and as long again for the ledger.
        .resolver_timeout(settings.patience * 2)
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

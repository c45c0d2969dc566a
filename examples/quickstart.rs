//! A payment service whose POST is safe to retry, on one SQLite file: `cargo run --example quickstart`.
//!
//! Environment: `LISTEN` (127.0.0.1:3000; port 0 takes a free one), `DATABASE` (quickstart.db),
//! `LEASE_MS` (30000), `TTL_SECONDS` (86400), `RECOVERY` (`refuse`, or `rerun`), `GRACE_MS` (20000: how long
//! runs may take to end at shutdown; what is then aborted counts as outcome unknown), `RUST_LOG` (warn).

use std::{
    env,
    error::Error,
    future::IntoFuture,
    io::{self, IsTerminal, Write},
    net::SocketAddr,
    num::NonZeroU32,
    process::ExitCode,
    str::FromStr,
    sync::Arc,
    time::Duration,
};

use axum::{
    Json, Router,
    extract::{Path, State, rejection::JsonRejection},
    http::{HeaderMap, StatusCode, header::LOCATION},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use serde::Deserialize;
use serde_json::{Value, json};
use sqlx::{SqlitePool, sqlite::SqliteConnectOptions, sqlite::SqliteJournalMode};
use tokio::{net::TcpListener, signal, sync::Notify, time::timeout};
use tower_idempotency::{
    Idempotency, IdempotencyLayer, Recovery, Retain, SqliteStore, store::Store,
};
use tracing_subscriber::EnvFilter;

/// How long connections may stay open once the runs have ended; a silent client must not hold us up.
const CONNECTION_GRACE: Duration = Duration::from_secs(2);

#[tokio::main]
async fn main() -> ExitCode {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("warn"));
    let log = tracing_subscriber::fmt().with_env_filter(filter);
    let log = log.with_ansi(io::stderr().is_terminal());
    log.with_writer(io::stderr).init();
    let Err(Failure(code, message)) = serve().await else {
        return ExitCode::SUCCESS;
    };
    eprintln!("quickstart: {message}");
    ExitCode::from(code)
}

async fn serve() -> Result<(), Failure> {
    let listen: SocketAddr = variable("LISTEN", "127.0.0.1:3000", "an address with a port")?;
    let database: String = variable("DATABASE", "quickstart.db", "the path of a file")?;
    let lease: NonZeroU32 = variable("LEASE_MS", "30000", "a whole number from 1")?;
    let ttl: NonZeroU32 = variable("TTL_SECONDS", "86400", "a whole number from 1")?;
    let grace: u32 = variable("GRACE_MS", "20000", "a whole number from 0")?;
    let recovery = match &*variable::<String>("RECOVERY", "refuse", "refuse or rerun")? {
        "refuse" => Recovery::Refuse,
        "rerun" => Recovery::rerun(),
        _ => return Err(Failure(2, "RECOVERY must be refuse or rerun".into())),
    };

    // The layer's records and the service's own table may share a file.
    let not_open = |error: &dyn Error| Failure(1, format!("DATABASE {database}: {error}"));
    let store = SqliteStore::open(&database).await;
    let store = store.map_err(|error| not_open(&error))?;
    let charges = open_charges(&database).await;
    let charges = charges.map_err(|error| not_open(&error))?;

    let lease = Duration::from_millis(lease.get().into());
    let layer = IdempotencyLayer::new(store.clone())
        .max_run(lease.max(Duration::from_secs(600)))
        .lease(lease)
        .ttl(Duration::from_secs(ttl.get().into()))
        .recovery(recovery)
        // There is one caller. With several: `.scope(..)`, by account, never by token.
        .single_tenant();
    let app = Router::new()
        .route("/payments", post(pay).get(list))
        .route("/payments/{id}", get(show))
        .route_layer(layer.clone())
        .with_state(charges.clone());

    let listener = TcpListener::bind(listen).await;
    let listener = listener.map_err(|error| Failure(1, format!("LISTEN {listen}: {error}")))?;
    let told_to_stop = told_to_stop()?;
    print_tour(listener.local_addr()?);
    let stop = Arc::new(Notify::new());
    let stopped = stop.clone();
    let server = axum::serve(listener, app);
    let server = server.with_graceful_shutdown(async move { stopped.notified().await });
    let mut server = tokio::spawn(server.into_future());
    tokio::select! {
        ended = &mut server => return Ok(ended??),
        () = told_to_stop => stop.notify_one(),
    }

    // No new connections by now. Next, no new runs and an end of the old ones; then the rest of
    // the connections; last the store, which gives up this process's lease.
    let drained = layer.drain(Duration::from_millis(grace.into())).await;
    tracing::info!(?drained, "stopping");
    let _ = timeout(CONNECTION_GRACE, server).await;
    store.close().await?;
    let _ = timeout(CONNECTION_GRACE, charges.close()).await;
    Ok(())
}

/// Ends at Ctrl-C or SIGTERM. Listens from the moment it is called, not only once it is awaited.
#[cfg(unix)]
fn told_to_stop() -> io::Result<impl Future<Output = ()>> {
    let mut interrupt = signal::unix::signal(signal::unix::SignalKind::interrupt())?;
    let mut terminate = signal::unix::signal(signal::unix::SignalKind::terminate())?;
    Ok(async move { tokio::select!(_ = interrupt.recv() => {}, _ = terminate.recv() => {}) })
}

#[cfg(not(unix))]
fn told_to_stop() -> io::Result<impl Future<Output = ()>> {
    Ok(async { drop(signal::ctrl_c().await) })
}

#[derive(Deserialize)]
struct NewPayment {
    order_id: String,
    amount_satang: i64,
}

/// Charges. The layer sees to it that a retry does not come here again; where it must (after a
/// crash with `Recovery::Rerun`, or once the record has expired) the UNIQUE constraint decides.
async fn pay(
    State(charges): State<SqlitePool>,
    idempotency: Idempotency,
    headers: HeaderMap,
    payment: Result<Json<NewPayment>, JsonRejection>,
) -> Result<Response, Refused> {
    let payment = payment.map_err(|error| Refused::new(error.status(), &error.body_text()))?;
    if payment.order_id.trim().is_empty() {
        return Err(Refused::field("order_id must not be blank"));
    }
    if payment.amount_satang <= 0 {
        return Err(Refused::field("amount_satang must be greater than 0"));
    }
    let delay = delay(&headers).ok_or(Refused::field("X-Simulate-Delay-Ms must be 0 to 60000"))?;

    let (scope, key) = (idempotency.scope().as_bytes(), idempotency.key().as_bytes());
    let charge = charge(&charges, scope, key, &payment).await?;
    // Time to send a duplicate, to hang up, or to pull the plug: the charge is made.
    tokio::time::sleep(delay).await;
    let location = [(LOCATION, format!("/payments/ch_{}", charge.0))];
    Ok((StatusCode::CREATED, location, Json(view(charge))).into_response())
}

fn delay(headers: &HeaderMap) -> Option<Duration> {
    let Some(value) = headers.get("x-simulate-delay-ms") else {
        return Some(Duration::ZERO);
    };
    let millis = value.to_str().ok()?.parse().ok()?;
    (millis <= 60_000).then(|| Duration::from_millis(millis))
}

/// Number, order and amount.
type Charge = (i64, String, i64);

/// Makes the charge, or finds the one that was made under this key.
async fn charge(
    charges: &SqlitePool,
    scope: &[u8],
    key: &[u8],
    payment: &NewPayment,
) -> Result<Charge, Refused> {
    let made = sqlx::query(
        "INSERT INTO charges (scope, idempotency_key, order_id, amount_satang)
         VALUES (?, ?, ?, ?) ON CONFLICT (scope, idempotency_key) DO NOTHING",
    );
    let made = made.bind(scope).bind(key).bind(&payment.order_id);
    made.bind(payment.amount_satang).execute(charges).await?;
    let found = sqlx::query_as(
        "SELECT id, order_id, amount_satang FROM charges WHERE scope = ? AND idempotency_key = ?",
    );
    let found: Charge = found.bind(scope).bind(key).fetch_one(charges).await?;
    if (&found.1, found.2) == (&payment.order_id, payment.amount_satang) {
        return Ok(found);
    }
    // The layer says this itself for as long as it has a record of the key.
    let message = "this key was used before for another payment";
    Err(Refused::new(StatusCode::CONFLICT, message))
}

async fn list(State(charges): State<SqlitePool>) -> Result<Json<Value>, Refused> {
    let found = sqlx::query_as("SELECT id, order_id, amount_satang FROM charges");
    let found: Vec<Charge> = found.fetch_all(&charges).await?;
    let payments: Vec<_> = found.into_iter().map(view).collect();
    let count = payments.len();
    Ok(Json(json!({ "count": count, "payments": payments })))
}

async fn show(charges: State<SqlitePool>, id: Path<String>) -> Result<Json<Value>, Refused> {
    let number: Option<i64> = id.strip_prefix("ch_").and_then(|id| id.parse().ok());
    let found = sqlx::query_as("SELECT id, order_id, amount_satang FROM charges WHERE id = ?");
    let found: Option<Charge> = found.bind(number).fetch_optional(&*charges).await?;
    let missing = Refused::new(StatusCode::NOT_FOUND, "there is no such payment");
    found.map(|charge| Json(view(charge))).ok_or(missing)
}

fn view((number, order_id, amount): Charge) -> Value {
    let id = format!("ch_{number}");
    json!({ "charge_id": id, "order_id": order_id, "amount_satang": amount, "status": "paid" })
}

/// An answer that is no payment: `{"error": "…"}`.
struct Refused(StatusCode, Value);

impl Refused {
    fn new(status: StatusCode, message: &str) -> Self {
        Self(status, json!({ "error": message }))
    }

    fn field(message: &str) -> Self {
        Self::new(StatusCode::UNPROCESSABLE_ENTITY, message)
    }
}

impl From<sqlx::Error> for Refused {
    fn from(error: sqlx::Error) -> Self {
        tracing::error!(%error, "the charges are out of reach");
        let message = "send the same request with the same key again";
        Self::new(StatusCode::SERVICE_UNAVAILABLE, message)
    }
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        // 400, 409, 415 and 422 free the key anyway. A 503 would be kept, because it may hide an
        // effect; here a retry may run again even then, since the second barrier stands.
        (self.0, Retain::Release, Json(self.1)).into_response()
    }
}

async fn open_charges(database: &str) -> Result<SqlitePool, sqlx::Error> {
    let options = SqliteConnectOptions::new().filename(database);
    let options = options.journal_mode(SqliteJournalMode::Wal);
    let charges = SqlitePool::connect_with(options).await?;
    let table = "CREATE TABLE IF NOT EXISTS charges (
        id INTEGER PRIMARY KEY,
        scope BLOB NOT NULL,
        idempotency_key BLOB NOT NULL,
        order_id TEXT NOT NULL,
        amount_satang INTEGER NOT NULL,
        UNIQUE (scope, idempotency_key)
    ) STRICT";
    sqlx::query(table).execute(&charges).await?;
    Ok(charges)
}

/// Exit code and message.
struct Failure(u8, String);

impl<E: Error> From<E> for Failure {
    fn from(error: E) -> Self {
        Self(1, error.to_string())
    }
}

/// An environment variable, or its default.
fn variable<T: FromStr>(name: &str, default: &str, expected: &str) -> Result<T, Failure> {
    let value = env::var_os(name).unwrap_or_else(|| default.into());
    let value = value.to_str().map(str::trim);
    let value = value.filter(|value| !value.is_empty());
    let value = value.and_then(|value| value.parse().ok());
    value.ok_or_else(|| Failure(2, format!("{name} must be {expected}")))
}

/// The commands of the README's tour, with this process's address and id.
fn print_tour(address: SocketAddr) {
    let url = format!("http://{address}/payments");
    let tour = TOUR.replace("POST", "curl -i URL -H 'Content-Type: application/json'");
    let tour = tour.replace("URL", &url);
    let tour = tour.replace("PID", &std::process::id().to_string());
    // Nobody has to listen.
    let _ = writeln!(io::stdout(), "listening on http://{address}\n{tour}");
}

const TOUR: &str = r#"
# A payment, and its retry: one charge, one answer.
POST -H 'Idempotency-Key: pay-1' -d '{"order_id":"A-1","amount_satang":25000}'
POST -H 'Idempotency-Key: pay-1' -d '{"order_id":"A-1","amount_satang":25000}'
# The same key for another amount; no key at all.
POST -H 'Idempotency-Key: pay-1' -d '{"order_id":"A-1","amount_satang":99}'
POST -d '{"order_id":"A-1","amount_satang":25000}'
# A retry while the first attempt is still running.
POST -H 'Idempotency-Key: pay-2' -H 'X-Simulate-Delay-Ms: 3000' -d '{"order_id":"A-2","amount_satang":500}' &
sleep 1; POST -H 'Idempotency-Key: pay-2' -d '{"order_id":"A-2","amount_satang":500}'; wait
# Pull the plug after the charge, before the answer. Start it again, and send the retry.
POST -H 'Idempotency-Key: pay-3' -H 'X-Simulate-Delay-Ms: 60000' -d '{"order_id":"A-3","amount_satang":700}' &
sleep 1; kill -9 PID; wait
POST -H 'Idempotency-Key: pay-3' -d '{"order_id":"A-3","amount_satang":700}'
curl URL
"#;

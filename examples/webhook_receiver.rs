//! A receiver of webhooks in which every event takes effect once, however often it is delivered and wherever it
//! is cut off: `cargo run --example webhook_receiver`.
//!
//! Environment: `LISTEN` (127.0.0.1:3000; port 0 takes a free one), `DATABASE` (webhooks.db), `LEASE_MS` (30000),
//! `WEBHOOK_SECRET` (`whsec_` and the secret in base64, which is not empty; the default is known to everybody, so it
//! warns of that), `RUST_LOG` (warn).
//!
//! The tour, which it prints as well, with its address. Deliveries are signed as the Standard Webhooks
//! specification has it:
//!
//! ```sh
//! # A route, an id, a body, and further options of curl.
//! deliver() {
//!     at=$(date +%s); route=$1; id=$2; body=$3; shift 3
//!     signature=$(printf %s "$id.$at.$body" | openssl dgst -sha256 -hmac no-secret-at-all -binary | base64)
//!     curl -i "http://127.0.0.1:3000$route" -H "webhook-id: $id" -H "webhook-timestamp: $at" \
//!         -H "webhook-signature: v1,$signature" -H 'Content-Type: application/json' -d "$body" "$@"
//! }
//! # An event, and its redelivery with another time stamp and signature: one payment, 200 both times.
//! deliver /webhooks evt_1 '{"id":"evt_1","payment":"pay_1","amount_satang":25000}'
//! deliver /webhooks evt_1 '{"id":"evt_1","payment":"pay_1","amount_satang":25000}'
//! # A handler that fails after its effect, and one that panics: rolled back, and the next delivery runs.
//! deliver /webhooks evt_2 '{"id":"evt_2","payment":"pay_2","amount_satang":100}' -H 'X-Simulate: fail'
//! deliver /webhooks evt_2 '{"id":"evt_2","payment":"pay_2","amount_satang":100}' -H 'X-Simulate: panic'
//! deliver /webhooks evt_2 '{"id":"evt_2","payment":"pay_2","amount_satang":100}'
//! # A redelivery while the first run is going on: 503, come back.
//! deliver /webhooks evt_3 '{"id":"evt_3","payment":"pay_3","amount_satang":300}' -H 'X-Simulate: slow' &
//! sleep 1; deliver /webhooks evt_3 '{"id":"evt_3","payment":"pay_3","amount_satang":300}'; wait
//! # A forged delivery uses up nothing: 401.
//! curl -i http://127.0.0.1:3000/webhooks -H 'webhook-id: evt_4' -d '{}'
//! # A sender that names its event only in the body.
//! deliver /webhooks/by-body '' '{"id":"evt_5","payment":"pay_5","amount_satang":500}'
//! # Pull the plug in the middle of an event.
//! deliver /webhooks evt_6 '{"id":"evt_6","payment":"pay_6","amount_satang":600}' -H 'X-Simulate: slow' &
//! sleep 1; kill -9 PID; wait
//! # Start it again, and redeliver: 503 until the lease of the killed one is over, then 200.
//! LISTEN=127.0.0.1:3000 cargo run --quiet --example webhook_receiver > /dev/null & receiver=$!
//! until deliver /webhooks evt_6 '{"id":"evt_6","payment":"pay_6","amount_satang":600}' -fsS; do sleep 3; done
//! # What took effect, each once. Then the end.
//! curl http://127.0.0.1:3000/payments
//! kill $receiver
//! ```

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
    time::{Duration, SystemTime},
};

use axum::{
    Json, Router,
    body::{Body, to_bytes},
    extract::{Request, State, rejection::JsonRejection},
    http::{HeaderMap, StatusCode, request::Parts},
    middleware::{Next, from_fn_with_state},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use base64::{Engine, prelude::BASE64_STANDARD};
use hmac::{Hmac, KeyInit, Mac};
use serde::Deserialize;
use serde_json::{Value, json};
use sha2::Sha256;
use sqlx::{Sqlite, SqlitePool, sqlite::SqliteConnectOptions, sqlite::SqliteJournalMode};
use tokio::{net::TcpListener, signal, sync::Notify, time::timeout};
use tower_http::catch_panic::CatchPanicLayer;
use tower_idempotency::{
    Idempotency, IdempotencyLayer, Profile, Scope, SqliteStore, Tx, TxError, store::Store,
};
use tracing_subscriber::EnvFilter;

/// The secret of the tour.
const NO_SECRET: &str = "whsec_bm8tc2VjcmV0LWF0LWFsbA==";
/// How much of a delivery is read.
const BODY_LIMIT: usize = 256 * 1024;
/// How old a delivery may be, and how far in the future. Each redelivery is signed anew.
const TOLERANCE: Duration = Duration::from_secs(300);
/// How long an event takes that was told to be slow. SQLite transactions may last 5 s.
const SLOW: Duration = Duration::from_secs(3);
/// How long runs may take to end at shutdown, and connections after that.
const RUN_GRACE: Duration = Duration::from_secs(20);
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
    eprintln!("webhook_receiver: {message}");
    ExitCode::from(code)
}

async fn serve() -> Result<(), Failure> {
    let listen: SocketAddr = variable("LISTEN", "127.0.0.1:3000", "an address with a port")?;
    let database: String = variable("DATABASE", "webhooks.db", "the path of a file")?;
    let lease: NonZeroU32 = variable("LEASE_MS", "30000", "a whole number from 1")?;
    let secret: Secret = variable(
        "WEBHOOK_SECRET",
        NO_SECRET,
        "whsec_ and the secret in base64",
    )?;
    if secret.is_known() {
        tracing::warn!(
            "anybody can sign deliveries: set WEBHOOK_SECRET to the secret of your sender"
        );
    }

    // Payments and the records of events stand in one file, so that they are committed together.
    let not_open = |error: &dyn Error| Failure(1, format!("DATABASE {database}: {error}"));
    let store = SqliteStore::open(&database).await;
    let store = store.map_err(|error| not_open(&error))?;
    let payments = open_payments(&database).await;
    let payments = payments.map_err(|error| not_open(&error))?;

    let lease = Duration::from_millis(lease.get().into());
    let layer = IdempotencyLayer::new(store.clone())
        .profile(Profile::Webhook)
        .max_run(lease.max(Duration::from_secs(600)))
        .lease(lease)
        .request_body_limit(BODY_LIMIT)
        // A handler may run again after it failed; this way its earlier runs have left nothing.
        .transactional();
    let app = app(payments.clone(), layer.clone(), secret);

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
    let drained = layer.drain(RUN_GRACE).await;
    tracing::info!(?drained, "stopping");
    let _ = timeout(CONNECTION_GRACE, server).await;
    store.close().await?;
    let _ = timeout(CONNECTION_GRACE, payments.close()).await;
    Ok(())
}

/// From the outside in: panics become a 500, signatures are checked, and only then an id counts.
fn app(payments: SqlitePool, layer: IdempotencyLayer<SqliteStore>, secret: Secret) -> Router {
    // Each route is for another sender, so the ids of one say nothing about those of the other. Where several
    // deliver to one route, the scope says as well whose signature it was. Clones share places for runs,
    // heartbeat and drain.
    let of_sender = |scope: &'static str| layer.clone().scope(move |_| Some(Scope::new(scope)));
    let by_header = Router::new()
        .route("/webhooks", post(receive))
        .route_layer(of_sender("by header"));
    let by_body = Router::new()
        .route("/webhooks/by-body", post(receive))
        .route_layer(of_sender("by body").key_pointer("/id"));
    by_header
        .merge(by_body)
        .route_layer(from_fn_with_state(secret, signed))
        .route("/payments", get(list))
        .layer(CatchPanicLayer::new())
        .with_state(payments)
}

#[derive(Deserialize)]
struct Event {
    payment: String,
    amount_satang: i64,
}

/// Books a payment. What goes wrong after the booking takes it back, and the next delivery books it anew.
async fn receive(
    idempotency: Idempotency,
    headers: HeaderMap,
    mut tx: Tx<Sqlite>,
    event: Result<Json<Event>, JsonRejection>,
) -> Result<Response, TxError> {
    let Ok(Json(event)) = event else {
        // No redelivery makes it better, and the sender may take this as final.
        let refused = (StatusCode::UNPROCESSABLE_ENTITY, "this is no event of ours");
        return Ok(refused.into_response());
    };
    // No UNIQUE stands in the way of a second booking here, so that one would show.
    let booked = "INSERT INTO payments (event, payment, amount_satang) VALUES (?, ?, ?)";
    sqlx::query(booked)
        .bind(idempotency.key().as_bytes())
        .bind(event.payment)
        .bind(event.amount_satang)
        .execute(&mut tx)
        .await?;
    match headers.get("x-simulate").map(|told| told.as_bytes()) {
        Some(b"fail") => Ok(StatusCode::INTERNAL_SERVER_ERROR.into_response()),
        Some(b"panic") => panic!("told to"),
        Some(b"slow") => {
            tokio::time::sleep(SLOW).await;
            Ok(StatusCode::OK.into_response())
        }
        _ => Ok(StatusCode::OK.into_response()),
    }
}

async fn list(State(payments): State<SqlitePool>) -> Result<Json<Value>, StatusCode> {
    let query = sqlx::query_as("SELECT event, payment, amount_satang FROM payments ORDER BY id");
    let found: Result<Vec<(Vec<u8>, String, i64)>, _> = query.fetch_all(&payments).await;
    let found = found.map_err(|_| StatusCode::SERVICE_UNAVAILABLE)?;
    let view = |(event, payment, amount): (Vec<u8>, String, i64)| {
        let event = String::from_utf8_lossy(&event);
        json!({ "event": event, "payment": payment, "amount_satang": amount })
    };
    Ok(Json(found.into_iter().map(view).collect()))
}

#[derive(Clone)]
struct Secret(Arc<[u8]>);

impl FromStr for Secret {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let encoded = text.strip_prefix("whsec_").ok_or(())?;
        let secret = BASE64_STANDARD.decode(encoded).map_err(|_| ())?;
        // With none, anybody could sign.
        (!secret.is_empty()).then(|| Self(secret.into())).ok_or(())
    }
}

/// Lets pass what is signed, its body read and put back: a signature is over the raw bytes.
async fn signed(State(secret): State<Secret>, request: Request, next: Next) -> Response {
    let (head, body) = request.into_parts();
    let Ok(body) = to_bytes(body, BODY_LIMIT).await else {
        return StatusCode::PAYLOAD_TOO_LARGE.into_response();
    };
    if !secret.signed(&head, &body) {
        return (StatusCode::UNAUTHORIZED, "the signature is not right").into_response();
    }
    next.run(Request::from_parts(head, Body::from(body))).await
}

impl Secret {
    /// Whether it is the one of the tour.
    fn is_known(&self) -> bool {
        NO_SECRET.parse().is_ok_and(|known: Self| known.0 == self.0)
    }

    /// Whether one of the signatures is HMAC-SHA256 over `id.timestamp.body`, made lately. A sender that has no
    /// id beside the body signs an empty one.
    fn signed(&self, head: &Parts, body: &[u8]) -> bool {
        let of = |name| {
            let mut lines = head.headers.get_all(name).iter();
            let line = lines.next().and_then(|line| line.to_str().ok());
            line.filter(|_| lines.next().is_none())
        };
        let (Some(at), Some(signatures)) = (of("webhook-timestamp"), of("webhook-signature"))
        else {
            return false;
        };
        let Ok(mut mac) = Hmac::<Sha256>::new_from_slice(&self.0) else {
            return false;
        };
        // Two lines are as good as none here, and refused by the layer.
        for part in [of("webhook-id").unwrap_or_default(), ".", at, "."] {
            mac.update(part.as_bytes());
        }
        mac.update(body);
        let is_right = |signature: &str| {
            let encoded = signature.strip_prefix("v1,").unwrap_or_default();
            let decoded = BASE64_STANDARD.decode(encoded).unwrap_or_default();
            // Takes as long for a signature that is nearly right.
            mac.clone().verify_slice(&decoded).is_ok()
        };
        is_recent(at) && signatures.split(' ').any(is_right)
    }
}

fn is_recent(seconds: &str) -> bool {
    let now = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
    let at = seconds.parse().map(Duration::from_secs);
    at.is_ok_and(|at| at.abs_diff(now) <= TOLERANCE)
}

async fn open_payments(database: &str) -> Result<SqlitePool, sqlx::Error> {
    let options = SqliteConnectOptions::new().filename(database);
    let options = options.journal_mode(SqliteJournalMode::Wal);
    let payments = SqlitePool::connect_with(options).await?;
    let table = "CREATE TABLE IF NOT EXISTS payments (
        id INTEGER PRIMARY KEY,
        event BLOB NOT NULL,
        payment TEXT NOT NULL,
        amount_satang INTEGER NOT NULL
    ) STRICT";
    sqlx::query(table).execute(&payments).await?;
    Ok(payments)
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

/// The tour at the head of this file, with this process's address and id.
fn print_tour(address: SocketAddr) {
    let lines = include_str!("webhook_receiver.rs").lines();
    let tour = lines.skip_while(|line| *line != "//! ```sh").skip(1);
    let tour = tour.take_while(|line| *line != "//! ```");
    let tour = tour.map(|line| line.trim_start_matches("//! "));
    let tour = tour.collect::<Vec<_>>().join("\n");
    let tour = tour.replace("127.0.0.1:3000", &address.to_string());
    let tour = tour.replace("PID", &std::process::id().to_string());
    // Nobody has to listen.
    let _ = writeln!(io::stdout(), "listening on http://{address}\n{tour}");
}

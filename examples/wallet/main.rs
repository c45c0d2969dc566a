//! A wallet service on Postgres whose effects and records of keys are committed together, and in which
//! every race has its cure: `cargo run --features postgres --example wallet`.
//!
//! Environment: `DATABASE_URL` (needed), `LISTEN` (127.0.0.1:3000; port 0 takes a free one), `LEASE_MS`
//! (30000), `RUST_LOG` (warn).
//!
//! `service` holds what such a service is made of, from the cheapest cure to the dearest.

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

use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use tokio::{net::TcpListener, signal, sync::Notify, time::timeout};
use tower_idempotency::{PostgresStore, store::Store};
use tracing_subscriber::EnvFilter;

mod service;

/// For the store, which takes up to four at a time, and the handlers' transactions, each of which has one.
const CONNECTIONS: u32 = 32;
/// Who waits longer for a connection is told to come again.
const CONNECTION_WAIT: Duration = Duration::from_secs(4);
/// How long runs may take to end at shutdown. What is then aborted is rolled back.
const RUN_GRACE: Duration = Duration::from_secs(20);
/// How long connections may stay open after that; a silent client must not hold us up.
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
    eprintln!("wallet: {message}");
    ExitCode::from(code)
}

async fn serve() -> Result<(), Failure> {
    let url = "set to a database's URL, such as postgres://user:password@localhost/wallet";
    let database: PgConnectOptions = variable("DATABASE_URL", "", url)?;
    let listen: SocketAddr = variable("LISTEN", "127.0.0.1:3000", "an address with a port")?;
    let lease: NonZeroU32 = variable("LEASE_MS", "30000", "a whole number from 1")?;
    let lease = Duration::from_millis(lease.get().into());

    // One pool for both: effect and record are to be committed by one transaction.
    let pool = PgPoolOptions::new()
        .max_connections(CONNECTIONS)
        .acquire_timeout(CONNECTION_WAIT)
        .connect_lazy_with(database);
    let not_open = |error: &dyn Error| Failure(1, format!("DATABASE_URL: {error}"));
    let tables = service::create_tables(&pool).await;
    tables.map_err(|error| not_open(&error))?;
    let store = PostgresStore::options().migrate().open(pool.clone()).await;
    let store = store.map_err(|error| not_open(&error))?;
    let layer = service::layer(store.clone())
        .max_run(lease.max(Duration::from_secs(600)))
        .lease(lease);
    let app = service::app(pool.clone(), layer.clone());

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
    let _ = timeout(CONNECTION_GRACE, pool.close()).await;
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

/// Commands to try, with this process's address.
fn print_tour(address: SocketAddr) {
    let send = "curl -i -H 'Content-Type: application/json' -H 'X-Client-Id: shop' -H";
    let tour = TOUR.replace("SEND", send);
    let tour = tour.replace("URL", &format!("http://{address}"));
    let tour = tour.replace("KEY", "Idempotency-Key");
    // Nobody has to listen.
    let _ = writeln!(io::stdout(), "listening on http://{address}\n{tour}");
}

const TOUR: &str = r#"
# A withdrawal, and its retry: one effect, one answer.
SEND 'KEY: w-1' -d '{"amount_satang":25000}' URL/wallets/1/withdrawals
SEND 'KEY: w-1' -d '{"amount_satang":25000}' URL/wallets/1/withdrawals
# A decline writes nothing: after a deposit the same request under the same key succeeds.
SEND 'KEY: w-2' -d '{"amount_satang":10000000}' URL/wallets/1/withdrawals
SEND 'KEY: d-1' -d '{"amount_satang":5000000}' URL/wallets/1/deposits
SEND 'KEY: w-2' -d '{"amount_satang":10000000}' URL/wallets/1/withdrawals
# Two withdrawals under two keys, one balance.
SEND 'KEY: w-3' -H 'X-Simulate-Delay-Ms: 1000' -d '{"amount_satang":8000000}' URL/wallets/2/withdrawals &
SEND 'KEY: w-4' -d '{"amount_satang":8000000}' URL/wallets/2/withdrawals; wait
# A transfer, with its fee; at most one pending payout; a rule over two accounts.
SEND 'KEY: t-1' -d '{"from":3,"to":4,"amount_satang":100000}' URL/transfers
SEND 'KEY: p-1' -d '{"amount_satang":100000}' URL/wallets/3/payouts
SEND 'KEY: p-2' -d '{"amount_satang":100000}' URL/wallets/3/payouts
SEND 'KEY: c-1' -d '{"from":"savings","amount_satang":8000000}' URL/customers/3/withdrawals/serializable
# Settings, as long as nobody else has changed them.
SEND 'KEY: s-1' -X PUT -d '{"version":1,"label":"rent"}' URL/wallets/3/settings
curl URL/wallets/1
"#;

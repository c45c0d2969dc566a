//! A charge that calls a payment provider, in steps and never inside an open transaction:
//! `cargo run --example two_step_charge`.
//!
//! Environment: `LISTEN` (127.0.0.1:3000; port 0 takes a free one), `DATABASE` (two_step_charge.db; the
//! provider has a file of its own beside it), `LEASE_MS` (30000), `STEP_MS` (0: how long to stop after each
//! step, which is time to pull the plug), `RUST_LOG` (warn).
//!
//! `service` holds the steps and says why they are so; `provider` stands for the other party.

use std::{
    env,
    error::Error,
    future::IntoFuture,
    io::{self, IsTerminal, Write},
    net::{Ipv4Addr, SocketAddr},
    num::NonZeroU32,
    path::Path,
    process::ExitCode,
    str::FromStr,
    sync::Arc,
    time::Duration,
};

use service::{Pause, Service, gateway::Gateway};
use tokio::{
    net::TcpListener,
    signal,
    sync::Notify,
    time::{sleep, timeout},
};
use tower_idempotency::{SqliteStore, store::Store};
use tracing_subscriber::EnvFilter;

mod provider;
mod service;

/// For the two short transactions. Few: SQLite lets one writer in at a time.
const CONNECTIONS: u32 = 4;
/// How long the provider may take to answer.
const PROVIDER_PATIENCE: Duration = Duration::from_secs(10);
/// How long runs may take to end at shutdown. What is then aborted goes on with its retry.
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
    eprintln!("two_step_charge: {message}");
    ExitCode::from(code)
}

async fn serve() -> Result<(), Failure> {
    let listen: SocketAddr = variable("LISTEN", "127.0.0.1:3000", "an address with a port")?;
    let database: String = variable("DATABASE", "two_step_charge.db", "the path of a file")?;
    let lease: NonZeroU32 = variable("LEASE_MS", "30000", "a whole number from 1")?;
    let step: u32 = variable("STEP_MS", "0", "a whole number from 0")?;

    // The layer's records and the service's own tables may share a file.
    let not_open = |error: &dyn Error| Failure(1, format!("DATABASE {database}: {error}"));
    let store = SqliteStore::open(&database).await;
    let store = store.map_err(|error| not_open(&error))?;
    let ledger = service::open_ledger(Path::new(&database), CONNECTIONS).await;
    let ledger = ledger.map_err(|error| not_open(&error))?;
    let provider = serve_provider(&format!("{database}.provider")).await?;

    let service = Service {
        ledger: ledger.clone(),
        gateway: Gateway::new(format!("http://{provider}"), PROVIDER_PATIENCE),
        pause: pause(Duration::from_millis(step.into())),
    };
    let layer = service::layer(store.clone(), Duration::from_millis(lease.get().into()));
    let app = service::app(service, layer.clone());

    let listener = TcpListener::bind(listen).await;
    let listener = listener.map_err(|error| Failure(1, format!("LISTEN {listen}: {error}")))?;
    let told_to_stop = told_to_stop()?;
    print_tour(listener.local_addr()?, provider);
    let stop = Arc::new(Notify::new());
    let stopped = stop.clone();
    let server = axum::serve(listener, app);
    let server = server.with_graceful_shutdown(async move { stopped.notified().await });
    let mut server = tokio::spawn(server.into_future());
    tokio::select! {
        ended = &mut server => return Ok(ended??),
        () = told_to_stop => stop.notify_one(),
    }

    // No new connections by now. Next, no new runs and an end of the old ones, for which the provider is
    // still there; then the rest of the connections; last the store, which gives up this process's lease.
    let drained = layer.drain(RUN_GRACE).await;
    tracing::info!(?drained, "stopping");
    let _ = timeout(CONNECTION_GRACE, server).await;
    store.close().await?;
    let _ = timeout(CONNECTION_GRACE, ledger.close()).await;
    Ok(())
}

/// The other party, in this process for convenience only: it is reached over HTTP, and ends with us.
async fn serve_provider(file: &str) -> Result<SocketAddr, Failure> {
    let charges = provider::open(Path::new(file)).await;
    let charges = charges.map_err(|error| Failure(1, format!("DATABASE {file}: {error}")))?;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
    let address = listener.local_addr()?;
    tokio::spawn(axum::serve(listener, provider::app(charges)).into_future());
    Ok(address)
}

fn pause(length: Duration) -> Pause {
    Arc::new(move |step| {
        tracing::info!(?step, "step done");
        Box::pin(async move {
            if !length.is_zero() {
                sleep(length).await;
            }
        })
    })
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

/// Commands to try, with this process's addresses and id.
fn print_tour(address: SocketAddr, provider: SocketAddr) {
    let send = "curl -i -H 'Content-Type: application/json' -H 'X-Client-Id:";
    let tour = TOUR.replace("SEND", send);
    let tour = tour.replace("PROVIDER", &format!("http://{provider}/charges"));
    let tour = tour.replace("URL", &format!("http://{address}"));
    let tour = tour.replace("KEY", "Idempotency-Key");
    let tour = tour.replace("PID", &std::process::id().to_string());
    // Nobody has to listen.
    let _ = writeln!(io::stdout(), "listening on http://{address}\n{tour}");
}

const TOUR: &str = r#"
# A charge, and its retry: the provider is asked once.
SEND shop' -H 'KEY: c-1' -d '{"amount_minor":25000,"currency":"THB"}' URL/charges
SEND shop' -H 'KEY: c-1' -d '{"amount_minor":25000,"currency":"THB"}' URL/charges
# More than the provider lets pass: declined, and the budget has it back.
SEND shop' -H 'KEY: c-2' -d '{"amount_minor":500001,"currency":"THB"}' URL/charges
curl -H 'X-Client-Id: shop' URL/budgets/THB
# The same key of another client is another charge.
SEND stall' -H 'KEY: c-1' -d '{"amount_minor":25000,"currency":"THB"}' URL/charges
curl PROVIDER
# Pull the plug between the steps: start this again with STEP_MS=2000 LEASE_MS=3000. The provider has
# charged after three seconds, and nothing is settled. Start once more, and send the retry: in flight until
# the dead process's lease is over, which takes three seconds, and then one charge.
SEND shop' -H 'KEY: c-3' -d '{"amount_minor":700,"currency":"THB"}' URL/charges &
sleep 3; kill -9 PID; wait
SEND shop' -H 'KEY: c-3' -d '{"amount_minor":700,"currency":"THB"}' URL/charges
"#;

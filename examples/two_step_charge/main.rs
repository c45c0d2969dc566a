//! A charge that calls a payment provider, in steps and never inside an open transaction:
//! `cargo run --example two_step_charge`.
//!
//! Environment: `LISTEN` (127.0.0.1:3000; port 0 takes a free one), `DATABASE` (two_step_charge.db; the
//! provider has a file of its own beside it), `LEASE_MS` (30000), `SWEEP_MS` (1000: how often charges that were
//! cut off are looked after), `PROVIDER_MS` (10000, at most 600000: how long the provider may take to
//! answer), `GRACE_MS` (20000: how long runs may take to end at shutdown), `DOWNSTREAM_SECRET` (one that is good
//! for a demonstration only), `RUST_LOG` (warn).
//!
//! For drills: `STEP_MS` (0: how long to stop after each step) and `KILL_AT` (never), which ends the process the
//! first time it gets there: `before-provider`, `after-provider`, `before-settle`, `before-record`, or
//! `while-resolving`.
//!
//! `service` holds the steps and says why they are so; `provider` stands for the other party.

use std::{
    env,
    error::Error,
    future::IntoFuture,
    io::{self, IsTerminal},
    net::{Ipv4Addr, SocketAddr},
    num::NonZeroU32,
    path::Path,
    process::ExitCode,
    str::FromStr,
    sync::Arc,
    time::Duration,
};

use service::{Pause, Service, Settings, Step, gateway::Gateway};
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
mod tour;

/// For the two short transactions. Few: SQLite lets one writer in at a time.
const CONNECTIONS: u32 = 4;
/// How long connections may stay open once the runs have ended; a silent client must not hold us up.
const CONNECTION_GRACE: Duration = Duration::from_secs(2);

/// Whoever has the source has it as well.
const DEMONSTRATION: &str = "no secret, for a demonstration";
const FROM_0: &str = "a whole number from 0";
const FROM_1: &str = "a whole number from 1";
/// A resolver makes two calls, and may take an hour at most.
const MOST_PATIENCE: u32 = 600_000;
const PATIENCE: &str = "a whole number from 1 to 600000";

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
    let lease = variable("LEASE_MS", "30000", FROM_1)?;
    let sweep = variable("SWEEP_MS", "1000", FROM_1)?;
    let patience: NonZeroU32 = variable("PROVIDER_MS", "10000", PATIENCE)?;
    if patience.get() > MOST_PATIENCE {
        return Err(Failure(2, format!("PROVIDER_MS must be {PATIENCE}")));
    }
    let grace: u32 = variable("GRACE_MS", "20000", FROM_0)?;
    let secret: String = variable("DOWNSTREAM_SECRET", DEMONSTRATION, "a text")?;
    if secret.len() < 16 {
        let message = "DOWNSTREAM_SECRET must have at least 16 bytes";
        return Err(Failure(2, message.into()));
    }
    let step: u32 = variable("STEP_MS", "0", FROM_0)?;
    let kill: KillAt = variable("KILL_AT", "never", KILL_POINTS)?;

    // The layer's records and the service's own tables may share a file.
    let not_open = |error: &dyn Error| Failure(1, format!("DATABASE {database}: {error}"));
    let store = SqliteStore::open(&database).await;
    let store = store.map_err(|error| not_open(&error))?;
    let ledger = service::open_ledger(Path::new(&database), CONNECTIONS).await;
    let ledger = ledger.map_err(|error| not_open(&error))?;
    let provider = serve_provider(&format!("{database}.provider")).await?;

    let service = Service {
        ledger: ledger.clone(),
        gateway: Gateway::new(format!("http://{provider}"), millis(patience)),
        pause: pause(Duration::from_millis(step.into()), kill),
    };
    let settings = Settings {
        lease: millis(lease),
        secret: secret.as_bytes(),
        patience: millis(patience),
    };
    let layer = service::layer(store.clone(), &service, &settings);
    let app = service::app(service, layer.clone());

    let listener = TcpListener::bind(listen).await;
    let listener = listener.map_err(|error| Failure(1, format!("LISTEN {listen}: {error}")))?;
    let told_to_stop = told_to_stop()?;
    tour::print(listener.local_addr()?, provider);
    // Charges whose client does not come back are looked after as well. Ends when the layer is drained.
    let sweeps = tokio::spawn(layer.reconciler().every(millis(sweep)).run());
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
    let drained = layer.drain(Duration::from_millis(grace.into())).await;
    tracing::info!(?drained, "stopping");
    let _ = timeout(CONNECTION_GRACE, sweeps).await;
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

/// Where the process is to die, for drills.
#[derive(Clone, Copy)]
struct KillAt(Option<Step>);

const KILL_POINTS: &str = "never, before-provider, after-provider, before-settle, before-record \
                           or while-resolving";

impl FromStr for KillAt {
    type Err = ();

    fn from_str(name: &str) -> Result<Self, ()> {
        Ok(Self(Some(match name {
            "never" => return Ok(Self(None)),
            "before-provider" => Step::Reserved,
            "after-provider" => Step::Answered,
            "before-settle" => Step::Noted,
            "before-record" => Step::Done,
            "while-resolving" => Step::LookedUp,
            _ => return Err(()),
        })))
    }
}

fn pause(length: Duration, KillAt(kill): KillAt) -> Pause {
    Arc::new(move |step| {
        tracing::info!(?step, "step done");
        Box::pin(async move {
            if !length.is_zero() {
                sleep(length).await;
            }
            if kill == Some(step) {
                // As sudden as a power cut: nothing is dropped, flushed or given back.
                std::process::abort();
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

fn millis(number: NonZeroU32) -> Duration {
    Duration::from_millis(number.get().into())
}

//! The merchant API of a payment gateway: `cargo run --features sealing --example gateway`.
//!
//! Environment: `LISTEN` (127.0.0.1:3000; port 0 takes a free one), `DATABASE` (gateway.db; the nonces have a
//! file of their own beside it), `LEASE_MS` (30000), `TTL_MS` (604800000, which is seven days; a key lives as long
//! as this said when it was used), `SEALING_KEY` (64 hexadecimal digits; by default one that everybody knows),
//! `RUST_LOG` (warn).
//!
//! `service` holds what a request goes through, and says why in that order.

use std::{
    env,
    error::Error,
    future::IntoFuture,
    io::{self, IsTerminal, Write},
    net::SocketAddr,
    num::{NonZeroU32, NonZeroU64},
    path::Path,
    process::ExitCode,
    str::FromStr,
    sync::Arc,
    time::Duration,
};

use service::{
    Service, authentication::Authentication, merchants::Credentials, nonces::Nonces,
    rate::RateLimit,
};
use tokio::{net::TcpListener, signal, sync::Notify, time::timeout};
use tower_idempotency::{SealingKey, SealingKeys, store::Store};
use tracing_subscriber::EnvFilter;

mod service;

/// Of one merchant: at once, and in a second.
const RATE: (u32, u32) = (50, 25);
/// How long runs may take to end at shutdown. What is then aborted is rolled back.
const RUN_GRACE: Duration = Duration::from_secs(20);
/// How long connections may stay open after that; a silent client must not hold us up.
const CONNECTION_GRACE: Duration = Duration::from_secs(2);
/// A real one comes out of a secret manager, and out of `openssl rand -hex 32`.
const DEMO_KEY: &str = "64656d6f64656d6f64656d6f64656d6f64656d6f64656d6f64656d6f64656d6f";

#[tokio::main]
async fn main() -> ExitCode {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("warn"));
    let log = tracing_subscriber::fmt().with_env_filter(filter);
    let log = log.with_ansi(io::stderr().is_terminal());
    log.with_writer(io::stderr).init();
    let Err(Failure(code, message)) = serve().await else {
        return ExitCode::SUCCESS;
    };
    eprintln!("gateway: {message}");
    ExitCode::from(code)
}

async fn serve() -> Result<(), Failure> {
    let listen: SocketAddr = variable("LISTEN", "127.0.0.1:3000", "an address with a port")?;
    let database: String = variable("DATABASE", "gateway.db", "the path of a file")?;
    let lease: NonZeroU32 = variable("LEASE_MS", "30000", "a whole number from 1")?;
    let ttl: NonZeroU64 = variable("TTL_MS", "604800000", "a whole number from 1")?;
    let key = sealing_key()?;
    let lease = Duration::from_millis(lease.get().into());
    let ttl = Duration::from_millis(ttl.get());

    let not_open = |error: &dyn Error| Failure(1, format!("DATABASE {database}: {error}"));
    let keys = SealingKeys::new("demo", key);
    let store = service::open_records(Path::new(&database), keys).await;
    let store = store.map_err(|error| not_open(&error))?;
    let ledger = service::open_ledger(Path::new(&database)).await;
    let ledger = ledger.map_err(|error| not_open(&error))?;
    let nonces = Nonces::open(Path::new(&format!("{database}.nonces"))).await;
    let nonces = nonces.map_err(|error| not_open(&error))?;

    let credentials = Credentials::for_demonstration();
    let rate = RateLimit::new(RATE.0, RATE.1);
    let layer = service::layer(store.clone(), ttl, lease);
    let service = Service {
        authentication: Authentication::new(credentials, nonces.clone(), rate),
        ledger: ledger.clone(),
        ttl,
    };
    let app = service::app(service, layer.clone());

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
    let _ = timeout(CONNECTION_GRACE, nonces.close()).await;
    let _ = timeout(CONNECTION_GRACE, ledger.close()).await;
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

/// What is wrong with a key its own error says best, and shows nothing of it.
fn sealing_key() -> Result<SealingKey, Failure> {
    let digits: String = variable("SEALING_KEY", DEMO_KEY, "64 hexadecimal digits")?;
    let key = digits.parse::<SealingKey>();
    key.map_err(|error| Failure(2, format!("SEALING_KEY: {error}")))
}

/// Commands to try, with this process's address and id.
fn print_tour(address: SocketAddr) {
    let tour = TOUR.replace("URL", &format!("http://{address}/v1/pay/deposits"));
    let tour = tour.replace("PID", &std::process::id().to_string());
    // Nobody has to listen.
    let _ = writeln!(io::stdout(), "listening on http://{address}\n{tour}");
}

const TOUR: &str = r#"
call() { curl -i -H 'Authorization: Bearer merchant-a' "$@"; }
# order KEY AMOUNT, and whatever else curl is to be told.
order() {
  key=$1 body='{"merchant_reference":"A-1","amount_minor":'$2',"currency":"THB","client":{"ip":"203.0.113.7"}}'
  shift 2; call URL -H "Idempotency-Key: $key" -H 'Content-Type: application/json' -d "$body" "$@"
}
# 1. An order, and its retry: the same answer, marked.
order dep-1 25000
order dep-1 25000
# 2. The same key for another amount. The amount 11500 shows this at any time.
order dep-1 99
# 3. A retry while the first attempt is still running.
order dep-2 500 -H 'X-Simulate-Delay-Ms: 3000' & sleep 1; order dep-2 500; wait
# 4. A key whose lifetime is over: an order of its own, and no mark. Stop this, remove its files (gateway.db*), and
#    start it with TTL_MS=1000.
order dep-3 500; sleep 2; order dep-3 500

# No key; no credential.
call URL -d '{}'
curl -i URL -H 'Idempotency-Key: dep-1' -d '{}'
# Too fast: the key is free afterwards.
order dep-4 700 -H 'X-Simulate-Rate-Limit: 1'; order dep-4 700
# A large order is accepted first. Its replay is a picture of the past; a look shows what is so now.
order dep-5 12000000; sleep 2; order dep-5 12000000; call 'URL?merchant_reference=A-1'

# A slip is the same one as an image, as a form and in base64. What it takes is in the answer to the order,
# and so in that to its retry.
answer=$(order dep-1 25000 -s)
id=$(expr "$answer" : '.*"id":"\([^"]*\)"'); token=$(expr "$answer" : '.*"token":"\([^"]*\)"')
slip() { call URL/$id/slip -H 'Idempotency-Key: slip-1' -H "PG-Upload-Token: $token" "$@"; }
printf '\211PNG\r\n\032\n' > slip.png
slip -H 'Content-Type: image/png' --data-binary @slip.png
slip -F image=@slip.png
slip -H 'Content-Type: application/json' -d '{"image_base64":"iVBORw0KGgo"}'
rm slip.png

# Pull the plug after the row and before the answer: there is no row. Start this again, and send the retry: in
# flight until the lease of the dead process is over (its LEASE_MS; by default 30 s), and then one order.
order dep-6 900 -H 'X-Simulate-Delay-Ms: 4000' & sleep 1; kill -9 PID; wait
order dep-6 900
"#;

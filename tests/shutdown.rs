//! Real processes that are told to stop with SIGTERM: what runs is ended and answered, what does not end is
//! aborted and then given up, and the next process need not wait for a lease.
#![cfg(unix)]

mod support;

use std::{
    fs::OpenOptions,
    future::IntoFuture,
    io::Write,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use axum::{Router, routing::post};
use sqlx::{ConnectOptions, Connection, SqliteConnection, sqlite::SqliteConnectOptions};
use support::{
    eventually,
    process::{PATIENCE, Process, assert_replays, example, exchange},
    wire::{Reply, Wire},
};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::oneshot,
    time::{sleep, timeout},
};
use tower_idempotency::{IdempotencyLayer, SqliteStore, store::Store};

const UNKNOWN: &str = "idempotency_outcome_unknown";
/// Longer than any test waits: whoever waits for it fails.
const LEASE_MS: &str = "60000";

/// The example, on this database.
fn quickstart(database: &Path, grace_ms: u32) -> Process {
    Process::start(
        Command::new(example("quickstart"))
            .env("LISTEN", "127.0.0.1:0")
            .env("DATABASE", database)
            .env("LEASE_MS", LEASE_MS)
            .env("GRACE_MS", grace_ms.to_string()),
    )
}

fn payment(key: &str, delay_ms: u32) -> Vec<u8> {
    let body = format!("{{\"order_id\":\"order of {key}\",\"amount_satang\":100}}");
    let delay = format!("x-simulate-delay-ms: {delay_ms}\r\n");
    keyed("/payments", key, &delay, &body)
}

fn keyed(path: &str, key: &str, more: &str, body: &str) -> Vec<u8> {
    format!(
        "POST {path} HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n\
         idempotency-key: {key}\r\n{more}content-length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

/// How many charges were made.
async fn charges(process: &Process) -> u64 {
    let list = b"GET /payments HTTP/1.1\r\nhost: test\r\n\r\n";
    let list = process.exchange(list).await;
    let list: serde_json::Value = serde_json::from_slice(&list.body).unwrap();
    list["count"].as_u64().unwrap()
}

async fn charged(process: &Process, count: u64) {
    let begun = Instant::now();
    while charges(process).await < count {
        assert!(begun.elapsed() < PATIENCE, "it is not charged");
        sleep(Duration::from_millis(5)).await;
    }
}

// D1 (drain): runs whose client is gone are counted as well.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn at_sigterm_what_runs_is_ended_and_answered_and_nothing_new_begins() {
    let folder = tempfile::tempdir().unwrap();
    let database = folder.path().join("quickstart.db");
    let mut process = quickstart(&database, 20_000);
    let running: Vec<_> = (0..4)
        .map(|n| process.spawn(payment(&format!("running-{n}"), 1_500 + 100 * n)))
        .collect();
    let mut left = Wire::to(process.address).await.unwrap();
    left.write(&payment("left", 1_500)).await;
    charged(&process, 5).await;
    left.reset();
    // A request that has begun to arrive before the signal, and is whole only after it.
    let slow = payment("slow", 0);
    let (beginning, rest) = slow.split_at(20);
    let mut halfway = Wire::to(process.address).await.unwrap();
    halfway.write(beginning).await;
    // By the next answer the server has read it.
    charges(&process).await;

    process.terminate();
    let begun = Instant::now();
    while Wire::to(process.address).await.is_ok() {
        assert!(begun.elapsed() < PATIENCE, "connections are still accepted");
    }
    assert!(!process.is_over(), "it did not wait for its runs");
    halfway.write(rest).await;
    let refused = halfway.read_reply().await;
    let expected = (503, "idempotency_overloaded".to_owned());
    assert_eq!(refused.said(), expected);
    assert_eq!(refused.header("retry-after"), Some(&b"1"[..]));
    let mut answers = Vec::new();
    for running in running {
        answers.push(running.await.unwrap());
    }
    let statuses: Vec<_> = answers.iter().map(|answer| answer.status).collect();
    assert_eq!(statuses, [201; 4]);
    assert!(process.ended().await.success());

    let process = quickstart(&database, 20_000);
    for (n, answer) in answers.iter().enumerate() {
        let retry = payment(&format!("running-{n}"), 0);
        assert_replays(&process.exchange(&retry).await, answer);
    }
    let left = process.exchange(&payment("left", 0)).await;
    assert_eq!((left.status, left.is_replay()), (201, true), "{left:?}");
    assert_eq!(charges(&process).await, 5);
    // What was refused used no key up.
    let slow = process.exchange(&slow).await;
    assert_eq!((slow.status, slow.is_replay()), (201, false), "{slow:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_does_not_end_within_the_grace_is_given_up_at_once_and_not_after_a_lease() {
    let folder = tempfile::tempdir().unwrap();
    let database = folder.path().join("quickstart.db");
    let mut process = quickstart(&database, 300);
    let done = process.exchange(&payment("done", 0)).await;
    assert_eq!(done.status, 201);
    let endless = process.spawn(payment("endless", 60_000));
    charged(&process, 2).await;
    let told = Instant::now();
    process.terminate();
    // Its client is not left without a word.
    let answer = endless.await.unwrap();
    assert_eq!(answer.said(), (409, UNKNOWN.to_owned()));
    assert!(told.elapsed() >= Duration::from_millis(300));
    assert!(process.ended().await.success());

    let process = quickstart(&database, 300);
    let retry = process.exchange(&payment("endless", 0)).await;
    assert_eq!(retry.said(), (409, UNKNOWN.to_owned()), "at the first try");
    assert_replays(&process.exchange(&payment("done", 0)).await, &done);
    assert_eq!(charges(&process).await, 2);
}

/// The example with a provider, which stops for `step_ms` after each of its steps.
fn two_step_charge(database: &Path, step_ms: u32) -> (Process, std::net::SocketAddr) {
    let mut process = Process::start(
        Command::new(example("two_step_charge"))
            .env("LISTEN", "127.0.0.1:0")
            .env("DATABASE", database)
            .env("LEASE_MS", LEASE_MS)
            .env("GRACE_MS", "300")
            .env("STEP_MS", step_ms.to_string()),
    );
    let provider = process.says("provider on http://");
    (process, provider)
}

async fn get(address: std::net::SocketAddr, path: &str) -> serde_json::Value {
    let get = format!("GET {path} HTTP/1.1\r\nhost: test\r\nx-client-id: shop\r\n\r\n");
    let reply: Reply = exchange(address, get.as_bytes()).await;
    serde_json::from_slice(&reply.body).unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_aborted_has_no_later_effect_and_is_done_by_the_next_process() {
    let folder = tempfile::tempdir().unwrap();
    let database = folder.path().join("charge.db");
    let order = r#"{"amount_minor":700,"currency":"THB"}"#;
    let order = keyed("/charges", "c-1", "x-client-id: shop\r\n", order);
    // Reserved, it stops; then it would ask the provider.
    let (mut process, _) = two_step_charge(&database, 3_000);
    let running = process.spawn(order.clone());
    let begun = Instant::now();
    while get(process.address, "/budgets/THB").await["reserved_minor"] != 700 {
        assert!(begun.elapsed() < PATIENCE, "nothing is reserved");
        sleep(Duration::from_millis(5)).await;
    }
    process.terminate();
    assert_eq!(running.await.unwrap().said(), (409, UNKNOWN.to_owned()));
    assert!(process.ended().await.success());

    let (process, provider) = two_step_charge(&database, 0);
    assert_eq!(get(provider, "/charges").await["count"], 0);
    // Its resolver hears from the provider that nothing was charged, so the retry charges.
    let begun = Instant::now();
    let retry = loop {
        let retry = process.exchange(&order).await;
        // While the first sweep asks.
        if retry.code() != "idempotency_in_flight" {
            break retry;
        }
        assert!(begun.elapsed() < PATIENCE, "it waits for the lease");
        sleep(Duration::from_millis(20)).await;
    };
    assert_eq!((retry.status, retry.is_replay()), (201, false), "{retry:?}");
    assert_replays(&process.exchange(&order).await, &retry);
    assert_eq!(get(provider, "/charges").await["count"], 1);
    let budget = get(process.address, "/budgets/THB").await;
    let sums = (&budget["reserved_minor"], &budget["spent_minor"]);
    assert_eq!(sums, (&0.into(), &700.into()));
}

const DATABASE: &str = "TEST_STUBBORN_DATABASE";

/// How long the handler below holds its thread: much longer than the grace, which is 200 ms.
const STUBBORN: Duration = Duration::from_millis(1_500);

fn effects_file(database: &Path) -> PathBuf {
    database.with_extension("effects")
}

fn effects(database: &Path) -> String {
    std::fs::read_to_string(effects_file(database)).unwrap_or_default()
}

/// A server with the shutdown of the documentation, and a handler that cannot be aborted for a while, because
/// it holds its thread.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn this_binary_also_plays_a_server_that_is_hard_to_stop() {
    let Ok(database) = std::env::var(DATABASE) else {
        return; // Nobody asked for it.
    };
    let effects = effects_file(Path::new(&database));
    let store = SqliteStore::open(&database).await.unwrap();
    let layer = IdempotencyLayer::new(store.clone())
        .single_tenant()
        .lease(Duration::from_secs(60));
    let handler = async move || {
        let mut file = OpenOptions::new();
        let mut file = file.create(true).append(true).open(&effects).unwrap();
        file.write_all(b"begun ").unwrap();
        std::thread::sleep(STUBBORN);
        file.write_all(b"effect ").unwrap();
        // Here it can be stopped.
        tokio::time::sleep(Duration::from_millis(10)).await;
        file.write_all(b"later ").unwrap();
        "done"
    };
    let app = Router::new()
        .route("/", post(handler))
        .route_layer(layer.clone());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut terminated = signal(SignalKind::terminate()).unwrap();
    println!("listening on http://{}", listener.local_addr().unwrap());

    let (stop, stopped) = oneshot::channel::<()>();
    let server = axum::serve(listener, app);
    let server = server.with_graceful_shutdown(async move { drop(stopped.await) });
    let server = tokio::spawn(server.into_future());
    // Bounded, should the test that started it be killed and not end it.
    let _ = timeout(Duration::from_secs(60), terminated.recv()).await;
    drop(stop);
    let drained = layer.drain(Duration::from_millis(200)).await;
    assert_eq!((drained.aborted, drained.left), (1, 0));
    let _ = timeout(Duration::from_secs(2), server).await;
    store.close().await.unwrap();
}

/// Whether the record of the only key says that its run is given up: marked so, or its owner is gone.
async fn is_given_up(database: &mut SqliteConnection) -> bool {
    let given_up = "SELECT count(*) FROM idempotency_records r
        LEFT JOIN idempotency_owners o ON o.owner = r.owner
        WHERE state = 3 OR state = 1 AND o.owner IS NULL";
    let count: i64 = sqlx::query_scalar(given_up)
        .fetch_one(database)
        .await
        .unwrap();
    count == 1
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_that_will_not_stop_is_given_up_only_once_it_has_ended() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("records.db");
    let mut process = Process::start(
        Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "this_binary_also_plays_a_server_that_is_hard_to_stop",
                "--nocapture",
            ])
            .env(DATABASE, &path),
    );
    let running = process.spawn(keyed("/", "k", "", ""));
    eventually("the run has begun", || effects(&path) == "begun ").await;
    let mut database = SqliteConnectOptions::new()
        .filename(&path)
        .connect()
        .await
        .unwrap();
    process.terminate();
    let told = Instant::now();
    // The record first: what it says then has to be true afterwards. (That the grace was over long before, the
    // server itself asserts: it has aborted one run.)
    while !is_given_up(&mut database).await {
        assert!(told.elapsed() < PATIENCE, "it is never given up");
        sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(effects(&path), "begun effect ");
    assert_eq!(running.await.unwrap().said(), (409, UNKNOWN.to_owned()));
    assert!(process.ended().await.success());
    assert_eq!(effects(&path), "begun effect ");
    database.close().await.unwrap();
}

//! Real processes that are killed in the middle of their work.
#![cfg(unix)]

mod support;

use std::{
    collections::HashMap,
    fs::OpenOptions,
    io::{BufRead, BufReader, Write},
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Child, ChildStdout, Command, ExitStatus, Stdio},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use axum::{
    Router,
    http::{HeaderMap, StatusCode},
    routing::post,
};
use support::wire::{Reply, Wire};
use tokio::{
    task::{JoinHandle, JoinSet},
    time::{sleep, timeout},
};
use tower_idempotency::{IdempotencyLayer, Recovery, SqliteStore};

const IN_FLIGHT: &str = "idempotency_in_flight";
const UNKNOWN: &str = "idempotency_outcome_unknown";
const LEASE: Duration = Duration::from_millis(2_000);

/// A server in a process of its own, killed when it is dropped.
struct Process {
    child: Child,
    address: SocketAddr,
    /// Kept open, so that the process can go on writing to it.
    _output: BufReader<ChildStdout>,
}

impl Process {
    fn start(command: &mut Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let mut said = String::new();
        let address = loop {
            said.clear();
            let read = output.read_line(&mut said).unwrap();
            assert!(read > 0, "the process ended: {:?}", child.wait());
            if let Some((_, address)) = said.trim().split_once("listening on http://") {
                break address.parse().unwrap();
            }
        };
        Self {
            child,
            address,
            _output: output,
        }
    }

    /// `kill -9`, and nothing the process could do about it.
    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    fn terminate(&self) {
        let pid = self.child.id().to_string();
        assert!(
            Command::new("kill")
                .args(["-TERM", &pid])
                .status()
                .unwrap()
                .success()
        );
    }

    async fn ended(&mut self) -> ExitStatus {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(begun.elapsed() < Duration::from_secs(10), "it does not end");
            sleep(Duration::from_millis(5)).await;
        }
    }

    async fn exchange(&self, request: &[u8]) -> Reply {
        exchange(self.address, request).await
    }

    fn spawn(&self, request: Vec<u8>) -> JoinHandle<Reply> {
        let address = self.address;
        tokio::spawn(async move { exchange(address, &request).await })
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Status 0 when the process is gone, before or during the answer.
async fn exchange(address: SocketAddr, request: &[u8]) -> Reply {
    let Ok(mut wire) = Wire::to(address).await else {
        return Reply::default();
    };
    if !wire.try_write(request).await {
        return Reply::default();
    }
    let reply = timeout(Duration::from_secs(20), wire.read_reply()).await;
    reply.expect("no answer, and no end of the connection")
}

/// The example, on this database.
fn quickstart(database: &Path, recovery: &str) -> Process {
    Process::start(
        Command::new(quickstart_binary())
            .env("LISTEN", "127.0.0.1:0")
            .env("DATABASE", database)
            .env("LEASE_MS", LEASE.as_millis().to_string())
            .env("RECOVERY", recovery),
    )
}

/// Beside this test's own binary; `cargo test` builds it unless it is told to build this test only.
fn quickstart_binary() -> PathBuf {
    let this = std::env::current_exe().unwrap();
    let profile = this.parent().and_then(Path::parent).unwrap();
    let binary = profile.join("examples/quickstart");
    if !binary.exists() {
        let mut cargo = Command::new(std::env::var("CARGO").unwrap_or_else(|_| "cargo".into()));
        cargo.args([
            "build",
            "--quiet",
            "--all-features",
            "--example",
            "quickstart",
        ]);
        if profile.ends_with("release") {
            cargo.arg("--release");
        }
        cargo.current_dir(env!("CARGO_MANIFEST_DIR"));
        assert!(cargo.status().unwrap().success());
    }
    binary
}

fn payment(key: &str, amount: u32, delay_ms: u32) -> Vec<u8> {
    let body = format!("{{\"order_id\":\"order of {key}\",\"amount_satang\":{amount}}}");
    format!(
        "POST /payments HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n\
         idempotency-key: {key}\r\nx-simulate-delay-ms: {delay_ms}\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

/// How many charges were made.
async fn charges(process: &Process) -> u64 {
    let list = b"GET /payments HTTP/1.1\r\nhost: test\r\n\r\n";
    let reply = process.exchange(list).await;
    let list: serde_json::Value = serde_json::from_slice(&reply.body).unwrap();
    list["count"].as_u64().unwrap()
}

async fn charged(process: &Process, count: u64) {
    let begun = Instant::now();
    while charges(process).await < count {
        assert!(
            begun.elapsed() < Duration::from_secs(10),
            "it is not charged"
        );
        sleep(Duration::from_millis(5)).await;
    }
}

/// Retries while the key is in flight; what comes then, and after how long.
async fn after_the_lease(process: &Process, request: &[u8]) -> (Reply, Duration) {
    let begun = Instant::now();
    loop {
        let reply = process.exchange(request).await;
        if reply.code() != IN_FLIGHT {
            return (reply, begun.elapsed());
        }
        assert_eq!(
            (reply.status, reply.header("retry-after")),
            (409, Some(&b"1"[..]))
        );
        assert!(begun.elapsed() < 3 * LEASE, "in flight beyond its lease");
        sleep(Duration::from_millis(20)).await;
    }
}

#[track_caller]
fn assert_replays(retry: &Reply, first: &Reply) {
    let but = |reply: &Reply| -> Vec<_> {
        let aside = ["connection", "date", "idempotent-replay"];
        let mut headers = reply.headers.clone();
        headers.retain(|(name, _)| !aside.contains(&name.as_str()));
        headers.sort();
        headers
    };
    assert!(retry.is_replay() && !first.is_replay(), "{retry:?}");
    assert_eq!(
        (retry.status, &retry.body, but(retry)),
        (first.status, &first.body, but(first))
    );
}

// L11 with `Refuse`, L1 with a real kill.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_killed_after_the_charge_leaves_an_unknown_outcome_and_one_charge() {
    let folder = tempfile::tempdir().unwrap();
    let database = folder.path().join("quickstart.db");
    let mut process = quickstart(&database, "refuse");
    let first = process.exchange(&payment("pay-1", 100, 0)).await;
    assert_eq!((first.status, charges(&process).await), (201, 1));
    let cut_off = process.spawn(payment("pay-2", 200, 60_000));
    charged(&process, 2).await;
    let duplicate = process.exchange(&payment("pay-2", 200, 0)).await;
    assert_eq!(duplicate.said(), (409, IN_FLIGHT.to_owned()));
    process.kill();
    let killed = Instant::now();
    assert_eq!(cut_off.await.unwrap().status, 0);

    let process = quickstart(&database, "refuse");
    let early = process.exchange(&payment("pay-2", 200, 0)).await;
    if killed.elapsed() < LEASE / 2 {
        assert_eq!(
            early.said(),
            (409, IN_FLIGHT.to_owned()),
            "{:?} after the kill",
            killed.elapsed()
        );
    }
    // What was answered before is answered for good, byte for byte.
    assert_replays(&process.exchange(&payment("pay-1", 100, 0)).await, &first);
    let (unknown, _) = after_the_lease(&process, &payment("pay-2", 200, 0)).await;
    let lapsed = killed.elapsed();
    assert!(
        lapsed >= LEASE / 2 && lapsed <= LEASE + Duration::from_millis(1_500),
        "{lapsed:?}"
    );
    assert_eq!(unknown.said(), (409, UNKNOWN.to_owned()));
    assert_eq!(unknown.header("retry-after"), None);
    for _ in 0..3 {
        assert_eq!(
            process.exchange(&payment("pay-2", 200, 0)).await.code(),
            UNKNOWN
        );
    }
    let other = process.exchange(&payment("pay-2", 201, 0)).await;
    assert_eq!(other.code(), "idempotency_key_reused");
    assert_eq!(charges(&process).await, 2);

    // And over the next restart.
    drop(process);
    let process = quickstart(&database, "refuse");
    assert_eq!(
        process.exchange(&payment("pay-2", 200, 0)).await.code(),
        UNKNOWN
    );
    assert_replays(&process.exchange(&payment("pay-1", 100, 0)).await, &first);
    assert_eq!(charges(&process).await, 2);
}

// L11 with `Rerun`: the handler runs again, and here its second barrier finds the first charge.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn under_rerun_the_retry_after_a_kill_runs_and_finds_the_charge() {
    let folder = tempfile::tempdir().unwrap();
    let database = folder.path().join("quickstart.db");
    let mut process = quickstart(&database, "rerun");
    let cut_off = process.spawn(payment("pay-1", 100, 60_000));
    charged(&process, 1).await;
    process.kill();
    assert_eq!(cut_off.await.unwrap().status, 0);

    let process = quickstart(&database, "rerun");
    let (again, _) = after_the_lease(&process, &payment("pay-1", 100, 0)).await;
    assert_eq!((again.status, again.is_replay()), (201, false));
    assert_replays(&process.exchange(&payment("pay-1", 100, 0)).await, &again);
    assert_eq!(charges(&process).await, 1);
}

// Drain, at SIGTERM.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn at_sigterm_the_runs_end_first_and_nobody_waits_for_the_lease() {
    let folder = tempfile::tempdir().unwrap();
    let database = folder.path().join("quickstart.db");
    let mut process = quickstart(&database, "refuse");
    let running = process.spawn(payment("pay-1", 100, 700));
    charged(&process, 1).await;
    process.terminate();
    let answer = running.await.unwrap();
    assert_eq!(answer.status, 201, "the run was cut off");
    assert!(process.ended().await.success());
    assert_eq!(
        exchange(process.address, &payment("pay-2", 1, 0))
            .await
            .status,
        0
    );

    let process = quickstart(&database, "refuse");
    assert_replays(&process.exchange(&payment("pay-1", 100, 0)).await, &answer);
    assert_eq!(charges(&process).await, 1);
}

const DATABASE: &str = "TEST_SERVE_DATABASE";
const RECOVERY: &str = "TEST_SERVE_RECOVERY";

/// This test binary once more, as a server whose effects nothing but the layer protects: each run
/// writes its key into a file.
fn unguarded(database: &Path, recovery: &str) -> Process {
    Process::start(
        Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "this_binary_also_plays_the_server",
                "--nocapture",
            ])
            .env(DATABASE, database)
            .env(RECOVERY, recovery),
    )
}

fn effects_file(database: &Path) -> PathBuf {
    database.with_extension("effects")
}

/// How often each key had its effect.
fn effects(database: &Path) -> HashMap<String, usize> {
    let written = std::fs::read_to_string(effects_file(database)).unwrap_or_default();
    let mut effects = HashMap::new();
    for key in written.lines() {
        *effects.entry(key.to_owned()).or_default() += 1;
    }
    effects
}

async fn effect_of(database: &Path, key: &str, count: usize) {
    let begun = Instant::now();
    while effects(database).get(key).is_none_or(|seen| *seen < count) {
        assert!(
            begun.elapsed() < Duration::from_secs(10),
            "{key} has no effect"
        );
        sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn this_binary_also_plays_the_server() {
    let (Ok(database), Ok(recovery)) = (std::env::var(DATABASE), std::env::var(RECOVERY)) else {
        return; // Nobody asked for it.
    };
    let effects = effects_file(Path::new(&database));
    let store = SqliteStore::open(&database).await.unwrap();
    let layer = IdempotencyLayer::new(store)
        .single_tenant()
        .lease(LEASE)
        .recovery(match &*recovery {
            "rerun" => Recovery::Rerun { max_attempts: 3 },
            _ => Recovery::Refuse,
        });
    let handler = async move |headers: HeaderMap| {
        let text = |name: &str| headers[name].to_str().unwrap().to_owned();
        let key = text("idempotency-key");
        let mut file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&effects)
            .unwrap();
        file.write_all(format!("{key}\n").as_bytes()).unwrap();
        sleep(Duration::from_millis(
            text("x-simulate-delay-ms").parse().unwrap(),
        ))
        .await;
        (
            StatusCode::CREATED,
            format!("{key}, {}", rand::random::<u64>()),
        )
    };
    let app = Router::new()
        .route("/payments", post(handler))
        .route_layer(layer);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    println!("listening on http://{}", listener.local_addr().unwrap());
    // Bounded, should the test that started it be killed and not end it.
    let _ = timeout(
        Duration::from_secs(60),
        axum::serve(listener, app).into_future(),
    )
    .await;
}

// L11 with `Rerun`: the effect happens twice, as its documentation says. Y3: and no more often than
// three times, for a request that kills its process each time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn under_rerun_a_request_that_kills_its_process_runs_three_times_and_no_more() {
    let folder = tempfile::tempdir().unwrap();
    let database = folder.path().join("records.db");
    let mut process = unguarded(&database, "rerun");
    for attempt in 1..=3 {
        let lapse = async { effect_of(&database, "deadly", attempt).await };
        let address = process.address;
        // Sent until it runs: the last owner's lease has to end first.
        let sender = tokio::spawn(async move {
            while exchange(address, &payment("deadly", 1, 60_000))
                .await
                .status
                == 409
            {
                sleep(Duration::from_millis(20)).await;
            }
        });
        lapse.await;
        if attempt == 2 {
            let harmless = payment("harmless", 1, 0);
            assert_eq!(process.exchange(&harmless).await.status, 201);
        }
        process.kill();
        sender.await.unwrap();
        process = unguarded(&database, "rerun");
    }
    let (refused, _) = after_the_lease(&process, &payment("deadly", 1, 0)).await;
    assert_eq!(refused.said(), (409, UNKNOWN.to_owned()));
    assert_eq!(effects(&database)["deadly"], 3);
    assert_eq!(effects(&database)["harmless"], 1);
}

// L11: at any moment, not only at a chosen one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_at_any_moment_nothing_acknowledged_is_lost_and_nothing_runs_twice() {
    const CLIENTS: usize = 6;
    let folder = tempfile::tempdir().unwrap();
    let database = folder.path().join("records.db");
    let mut acknowledged = HashMap::new();
    let mut cut_off = Vec::new();
    for round in 0..4 {
        let mut process = unguarded(&database, "refuse");
        let answered = Arc::new(AtomicUsize::new(0));
        let mut clients = JoinSet::new();
        for client in 0..CLIENTS {
            let (address, answered) = (process.address, answered.clone());
            clients.spawn(async move {
                let mut replies = Vec::new();
                for number in 0.. {
                    let key = format!("k-{round}-{client}-{number}");
                    let reply = exchange(address, &payment(&key, 1, 0)).await;
                    let over = reply.status == 0;
                    answered.fetch_add(1, Ordering::SeqCst);
                    replies.push((key, reply));
                    if over {
                        break;
                    }
                }
                replies
            });
        }
        support::eventually("some answers", || answered.load(Ordering::SeqCst) >= 20).await;
        sleep(Duration::from_millis(rand::random::<u64>() % 50)).await;
        process.kill();
        for (key, reply) in clients.join_all().await.into_iter().flatten() {
            match reply.status {
                201 => drop(acknowledged.insert(key, reply)),
                0 => cut_off.push(key),
                _ => panic!("{key}: {reply:?}"),
            }
        }
    }
    assert!(
        acknowledged.len() > 50,
        "only {} were answered",
        acknowledged.len()
    );
    assert_eq!(cut_off.len(), 4 * CLIENTS);

    let process = unguarded(&database, "refuse");
    for (key, first) in &acknowledged {
        assert_replays(&process.exchange(&payment(key, 1, 0)).await, first);
    }
    let (mut replayed, mut ran, mut unknown) = (0, 0, 0);
    for key in &cut_off {
        let before = effects(&database).get(key).copied().unwrap_or_default();
        let (reply, _) = after_the_lease(&process, &payment(key, 1, 0)).await;
        match (reply.status, reply.is_replay(), &*reply.code()) {
            // Recorded, and only the answer was lost.
            (201, true, _) => replayed += 1,
            // Never claimed, and so never run.
            (201, false, _) => {
                assert_eq!(before, 0, "{key} has run before");
                ran += 1;
            }
            (409, false, UNKNOWN) => unknown += 1,
            _ => panic!("{key}: {reply:?}"),
        }
    }
    println!(
        "killed four times: {} answered, of {} cut off {replayed} replay, {ran} ran, {unknown} unknown",
        acknowledged.len(),
        cut_off.len()
    );
    let effects = effects(&database);
    assert!(
        effects.values().all(|count| *count == 1),
        "an effect happened twice"
    );
    for key in acknowledged.keys() {
        assert_eq!(effects[key], 1);
    }
}

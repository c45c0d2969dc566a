//! The example as a process of its own, which is killed and told to stop.

use std::{
    io::{BufRead, BufReader},
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Child, ChildStdout, Command, Stdio},
    time::{Duration, Instant},
};

use sqlx::{ConnectOptions, Connection, sqlite::SqliteConnectOptions};
use tokio::{
    task::JoinHandle,
    time::{sleep, timeout},
};

use crate::{
    shop::*,
    support::wire::{Reply, Wire},
};

const LEASE: Duration = Duration::from_millis(2_000);
const PATIENCE: Duration = Duration::from_secs(20);

struct Process {
    child: Child,
    address: SocketAddr,
    /// Kept open, so that the process can go on writing to it.
    _output: BufReader<ChildStdout>,
}

impl Process {
    fn start(files: &Files) -> Self {
        let mut command = Command::new(binary());
        command
            .env("LISTEN", "127.0.0.1:0")
            .env("DATABASE", files.database())
            .env("LEASE_MS", LEASE.as_millis().to_string());
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let mut said = String::new();
        output.read_line(&mut said).unwrap();
        let address = said.trim().strip_prefix("listening on http://");
        Self {
            child,
            address: address.expect("it does not listen").parse().unwrap(),
            _output: output,
        }
    }

    /// `kill -9`, and nothing the process could do about it.
    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    async fn terminated(mut self) {
        let pid = self.child.id().to_string();
        let told = Command::new("kill").args(["-TERM", &pid]).status().unwrap();
        assert!(told.success());
        let begun = Instant::now();
        while self.child.try_wait().unwrap().is_none() {
            assert!(begun.elapsed() < PATIENCE, "it does not end");
            sleep(Duration::from_millis(5)).await;
        }
        assert!(self.child.wait().unwrap().success());
    }

    async fn send(&self, call: &Call) -> Reply {
        send(self.address, call).await
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Status 0 when the process is gone, before or during the answer.
async fn send(address: SocketAddr, call: &Call) -> Reply {
    let Ok(mut wire) = Wire::to(address).await else {
        return Reply::default();
    };
    if !wire.try_write(&call.bytes()).await {
        return Reply::default();
    }
    let reply = timeout(PATIENCE, wire.read_reply()).await;
    reply.expect("no answer, and no end of the connection")
}

/// Beside this test's own binary; `cargo test` builds it unless it is told to build this test only.
fn binary() -> PathBuf {
    let this = std::env::current_exe().unwrap();
    let profile = this.parent().and_then(Path::parent).unwrap();
    let binary = profile.join("examples/gateway");
    if !binary.exists() {
        let mut cargo = Command::new(std::env::var("CARGO").unwrap_or_else(|_| "cargo".into()));
        cargo.args(["build", "--quiet", "--all-features", "--example", "gateway"]);
        if profile.ends_with("release") {
            cargo.arg("--release");
        }
        cargo.current_dir(env!("CARGO_MANIFEST_DIR"));
        assert!(cargo.status().unwrap().success());
    }
    binary
}

/// Sends an order that takes its time, and waits until the process is in the middle of its transaction.
async fn begin(process: &Process, files: &Files) -> JoinHandle<Reply> {
    let address = process.address;
    let slow = order("slow", 25_000).header("x-simulate-delay-ms", "4000");
    let running = tokio::spawn(async move { send(address, &slow).await });

    let file = SqliteConnectOptions::new().filename(files.database());
    let file = file.busy_timeout(Duration::ZERO);
    let mut connection = file.connect().await.unwrap();
    let begun = Instant::now();
    // First the claim, which is committed; then the one place to write is taken.
    let claimed = "SELECT count(*) FROM idempotency_records WHERE key = CAST('slow' AS BLOB)";
    while sqlx::query_scalar::<_, i64>(claimed)
        .fetch_one(&mut connection)
        .await
        .unwrap()
        == 0
    {
        assert!(begun.elapsed() < PATIENCE, "nothing is claimed");
        sleep(Duration::from_millis(5)).await;
    }
    while connection.begin_with("BEGIN IMMEDIATE").await.is_ok() {
        assert!(begun.elapsed() < PATIENCE, "no transaction is begun");
        sleep(Duration::from_millis(5)).await;
    }
    connection.close().await.unwrap();
    running
}

async fn deposits(process: &Process) -> usize {
    let by_reference = format!("{DEPOSITS}?merchant_reference=INV-2026-0042");
    let found = body(&process.send(&get(&by_reference)).await);
    found["data"].as_array().map_or(0, Vec::len)
}

/// What a retry comes to once the dead process's lease is over.
async fn retried(process: &Process) -> Reply {
    let begun = Instant::now();
    loop {
        let reply = process.send(&order("slow", 25_000)).await;
        if reply.status != 409 {
            return reply;
        }
        assert_eq!(refused(&reply).1, "idempotency_in_flight");
        assert!(begun.elapsed() < 3 * LEASE, "in flight beyond its lease");
        sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_before_it_answered_the_gateway_has_done_nothing_and_the_retry_does_it() {
    let files = Files::new();
    let process = Process::start(&files);
    let done = process.send(&order("done", 25_000)).await;
    assert_runs(&done, 201);
    let cut_off = begin(&process, &files).await;
    process.kill();
    assert_eq!(cut_off.await.unwrap().status, 0);

    let process = Process::start(&files);
    // What was answered was done.
    assert_replays(&process.send(&order("done", 25_000)).await, &done);
    assert_eq!(deposits(&process).await, 1);
    let retry = retried(&process).await;
    assert_runs(&retry, 201);
    assert_replays(&process.send(&order("slow", 25_000)).await, &retry);
    assert_eq!(deposits(&process).await, 2);
}

#[test]
fn a_sealing_key_that_is_none_is_refused_with_the_reason_and_not_shown() {
    let zeros = "0".repeat(64);
    let no_hex = format!("{}0g", "9d".repeat(31));
    let wrong = [
        (&*zeros, "zero"),
        ("9d9d9d", "64 hexadecimal digits, not 6"),
        (&no_hex, "0-9 and a-f"),
        ("", "64 hexadecimal digits"),
    ];
    for (key, reason) in wrong {
        let files = Files::new();
        let mut command = Command::new(binary());
        command
            // Nobody's address (RFC 5737 §3), so that it ends even if it takes the key.
            .env("LISTEN", "192.0.2.1:0")
            .env("DATABASE", files.database())
            .env("SEALING_KEY", key);
        let output = command.output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.starts_with("gateway: SEALING_KEY"), "{said}");
        assert!(said.contains(reason), "{said}");
        assert!(key.is_empty() || !said.contains(key), "{said}");
        assert!(!files.database().exists());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn told_to_stop_the_gateway_ends_what_it_has_begun() {
    let files = Files::new();
    let process = Process::start(&files);
    let running = begin(&process, &files).await;
    process.terminated().await;
    let first = running.await.unwrap();
    assert_runs(&first, 201);

    let process = Process::start(&files);
    assert_replays(&process.send(&order("slow", 25_000)).await, &first);
    assert_eq!(deposits(&process).await, 1);
}

//! The example `two_step_charge` as a process that dies at a named point of its work, and is started again. One
//! sweep later every key has the true answer, and the provider has charged as often as there are actions.
#![cfg(unix)]

mod support;

use std::{
    net::SocketAddr,
    os::unix::process::ExitStatusExt,
    path::PathBuf,
    process::Command,
    time::{Duration, Instant},
};

use serde_json::Value;
use sqlx::{ConnectOptions, Connection, sqlite::SqliteConnectOptions};
use support::{
    process::{PATIENCE, Process, assert_replays, example, exchange},
    wire::Reply,
};
use tokio::time::{sleep, timeout};

/// The points on the way of a charge; a process may also die `while-resolving`.
const POINTS: [&str; 4] = [
    "before-provider",
    "after-provider",
    "before-settle",
    "before-record",
];
const AMOUNT: i64 = 700;

/// The files, which outlive the processes.
struct Shop {
    folder: tempfile::TempDir,
}

/// One life of the service, with the provider in the same process.
struct Life {
    process: Process,
    provider: SocketAddr,
}

impl Shop {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        Self { folder }
    }

    fn database(&self) -> PathBuf {
        self.folder.path().join("charges.db")
    }

    fn command(&self) -> Command {
        let mut command = Command::new(example("two_step_charge"));
        command
            .env("LISTEN", "127.0.0.1:0")
            .env("DATABASE", self.database())
            .env("LEASE_MS", "400")
            .env("SWEEP_MS", "100")
            .env("PROVIDER_MS", "1000");
        command
    }

    fn life(&self, kill_at: &str, step_ms: u32) -> Life {
        let mut command = self.command();
        command.env("KILL_AT", kill_at);
        command.env("STEP_MS", step_ms.to_string());
        let mut process = Process::start(&mut command);
        let provider = process.says("provider on http://");
        Life { process, provider }
    }

    async fn number(&self, file: PathBuf, query: &'static str) -> i64 {
        let options = SqliteConnectOptions::new().filename(file).read_only(true);
        let mut connection = options.connect().await.unwrap();
        let number = sqlx::query_scalar(query).fetch_one(&mut connection).await;
        connection.close().await.unwrap();
        number.unwrap()
    }

    /// How many records are neither completed nor gone.
    async fn open_records(&self) -> i64 {
        let open = "SELECT count(*) FROM idempotency_records WHERE state <> 2";
        self.number(self.database(), open).await
    }

    /// How often the provider has charged, also while no process runs.
    async fn charges(&self) -> i64 {
        let file = self.folder.path().join("charges.db.provider");
        let charged = "SELECT count(*) FROM charges WHERE status = 'charged'";
        self.number(file, charged).await
    }

    /// Waits for the sweep that has closed every record. Nobody has sent a retry by then.
    async fn swept(&self) {
        let begun = Instant::now();
        while self.open_records().await > 0 {
            assert!(begun.elapsed() < PATIENCE, "records are left open");
            sleep(Duration::from_millis(20)).await;
        }
    }
}

impl Life {
    /// Until it has died by itself, at its point.
    async fn died(mut self) {
        let status = self.process.ended().await;
        assert!(
            status.signal().is_some(),
            "it has ended by itself: {status}"
        );
    }

    async fn charge(&self, key: &str) -> Reply {
        self.process.exchange(&order(key)).await
    }

    async fn get(&self, path: &str) -> Value {
        get(self.process.address, path).await
    }

    /// Every one of these actions was done once: says the provider, and so says the ledger.
    async fn assert_done(&self, keys: &[String]) {
        let count = i64::try_from(keys.len()).unwrap();
        let charged = get(self.provider, "/charges").await;
        let sums = (&charged["count"], &charged["amount_minor"]);
        assert_eq!(sums, (&count.into(), &(count * AMOUNT).into()));
        let budget = self.get("/budgets/THB").await;
        assert_eq!(budget["reserved_minor"], 0);
        assert_eq!(budget["spent_minor"], count * AMOUNT);
        for key in keys {
            let answer = self.charge(key).await;
            assert!((answer.status, answer.is_replay()) == (201, true), "{key}");
            let said: Value = serde_json::from_slice(&answer.body).unwrap();
            assert_eq!(said["status"], "charged");
            let place = answer.header("location").unwrap();
            let now = self.get(std::str::from_utf8(place).unwrap()).await;
            assert_eq!(now, said, "{key}");
        }
    }
}

async fn get(address: SocketAddr, path: &str) -> Value {
    let get = format!("GET {path} HTTP/1.1\r\nhost: test\r\nx-client-id: shop\r\n\r\n");
    let reply = exchange(address, get.as_bytes()).await;
    serde_json::from_slice(&reply.body).unwrap_or_default()
}

fn order(key: &str) -> Vec<u8> {
    let body = format!(r#"{{"amount_minor":{AMOUNT},"currency":"THB"}}"#);
    format!(
        "POST /charges HTTP/1.1\r\nhost: test\r\nx-client-id: shop\r\nidempotency-key: {key}\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

fn keys(names: std::ops::Range<usize>) -> Vec<String> {
    names.map(|n| format!("c-{n}")).collect()
}

// L11 with a resolver.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_at_any_point_and_swept_once_a_key_has_the_true_answer() {
    for point in POINTS {
        let shop = Shop::new();
        let life = shop.life(point, 0);
        assert_eq!(life.charge("c-0").await.status, 0, "{point}: it lives");
        life.died().await;
        let was_charged = point != "before-provider";
        assert_eq!(shop.charges().await, i64::from(was_charged), "{point}");
        assert_eq!(shop.open_records().await, 1, "{point}");

        let life = shop.life("never", 0);
        shop.swept().await;
        // The sweep asks and charges nothing.
        assert_eq!(shop.charges().await, i64::from(was_charged), "{point}");
        let retry = life.charge("c-0").await;
        let said = (retry.status, retry.is_replay());
        assert_eq!(said, (201, was_charged), "{point}: {retry:?}");
        life.assert_done(&keys(0..1)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_resolver_answers_as_the_run_would_have() {
    let shop = Shop::new();
    let life = shop.life("before-record", 0);
    assert_eq!(life.charge("c-0").await.status, 0);
    life.died().await;
    let life = shop.life("never", 0);
    let undisturbed = life.charge("c-1").await;
    assert_eq!(undisturbed.status, 201);
    shop.swept().await;
    let resolved = life.charge("c-0").await;
    let names = |reply: &Reply| -> Vec<String> {
        let names = reply.headers.iter().map(|(name, _)| name.clone());
        let mut names: Vec<_> = names.filter(|name| name != "idempotent-replay").collect();
        names.sort();
        names
    };
    assert_eq!(names(&resolved), names(&undisturbed));
    let members = |reply: &Reply| -> Vec<String> {
        let said: Value = serde_json::from_slice(&reply.body).unwrap();
        said.as_object().unwrap().keys().cloned().collect()
    };
    assert_eq!(members(&resolved), members(&undisturbed));
    assert_replays(&life.charge("c-1").await, &undisturbed);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_several_keys_in_flight_each_gets_its_own_truth() {
    for point in POINTS {
        let shop = Shop::new();
        // Long enough for all to come along before the first gets to the point.
        let life = shop.life(point, 150);
        let keys = keys(0..8);
        let sent: Vec<_> = keys
            .iter()
            .map(|key| life.process.spawn(order(key)))
            .collect();
        for sent in sent {
            assert_eq!(sent.await.unwrap().status, 0, "{point}");
        }
        life.died().await;
        let charged = shop.charges().await;

        let life = shop.life("never", 0);
        shop.swept().await;
        let mut replayed = 0;
        for key in &keys {
            let retry = life.charge(key).await;
            assert_eq!(retry.status, 201, "{point}, {key}: {retry:?}");
            replayed += i64::from(retry.is_replay());
        }
        assert_eq!(replayed, charged, "{point}");
        life.assert_done(&keys).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_while_it_asks_the_next_process_asks_again() {
    let shop = Shop::new();
    let life = shop.life("after-provider", 0);
    assert_eq!(life.charge("c-0").await.status, 0);
    life.died().await;
    // Nobody sends anything: it dies in its sweep.
    shop.life("while-resolving", 0).died().await;
    let charges = shop.charges().await;
    assert_eq!((charges, shop.open_records().await), (1, 1));
    let life = shop.life("never", 0);
    // Who asked may still be alive, as far as anybody knows.
    assert_eq!(life.charge("c-0").await.code(), "idempotency_in_flight");
    shop.swept().await;
    let retry = life.charge("c-0").await;
    assert_eq!((retry.status, retry.is_replay()), (201, true), "{retry:?}");
    life.assert_done(&keys(0..1)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_at_one_point_after_the_other_every_action_is_done_once() {
    let shop = Shop::new();
    let mut sent = 0;
    // At the end points that have nothing to do with how far a charge got: in the sweep, and anywhere.
    let lives = POINTS.iter().chain(&["while-resolving", "anywhere"]);
    for point in lives {
        let kill_at = if *point == "anywhere" { "never" } else { point };
        let mut life = shop.life(kill_at, 20);
        let all = keys(0..sent + 3);
        sent = all.len();
        // The new ones, and retries of the old ones, as clients send them. Whether any is answered depends on
        // when the process dies.
        let attempts = all.iter().rev().map(|key| life.process.spawn(order(key)));
        let attempts: Vec<_> = attempts.collect();
        if *point == "anywhere" {
            sleep(Duration::from_millis(rand::random::<u64>() % 100)).await;
            life.process.kill();
        }
        for attempt in attempts {
            let reply = timeout(PATIENCE, attempt).await.unwrap().unwrap();
            let may_be = [0, 201, 409].contains(&reply.status);
            assert!(may_be, "{point}: {reply:?}");
        }
        life.died().await;
        assert!(shop.charges().await <= i64::try_from(sent).unwrap());
    }

    let life = shop.life("never", 0);
    shop.swept().await;
    let keys = keys(0..sent);
    for key in &keys {
        let retry = life.charge(key).await;
        assert_eq!(retry.status, 201, "{key}: {retry:?}");
    }
    life.assert_done(&keys).await;
}

#[test]
fn a_point_that_does_not_exist_is_refused_with_the_list() {
    let shop = Shop::new();
    let output = shop.command().env("KILL_AT", "somewhere").output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(
        said.starts_with("two_step_charge: KILL_AT must be"),
        "{said}"
    );
    for point in POINTS.iter().chain(&["never", "while-resolving"]) {
        assert!(said.contains(point), "{said}");
    }
    assert!(!shop.database().exists());
}

#[test]
fn a_secret_that_could_be_guessed_is_refused_and_not_shown() {
    let shop = Shop::new();
    let short = "fifteen bytes!!";
    let output = shop.command().env("DOWNSTREAM_SECRET", short).output();
    let output = output.unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("16 bytes") && !said.contains(short), "{said}");
    assert!(!shop.database().exists());
}

#[test]
fn more_patience_than_a_resolver_may_have_is_refused() {
    for wrong in ["0", "600001", "4294967295"] {
        let shop = Shop::new();
        let output = shop.command().env("PROVIDER_MS", wrong).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{said}");
        let sentence = "two_step_charge: PROVIDER_MS must be a whole number from 1 to 600000\n";
        assert_eq!(said, sentence);
        assert!(!shop.database().exists());
    }
}

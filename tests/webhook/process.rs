//! The receiver of `examples/webhook_receiver.rs` as a process of its own, along its tour.

use std::{
    process::{Command, Stdio},
    time::{Duration, Instant, SystemTime},
};

use base64::{Engine, prelude::BASE64_STANDARD};
use hmac::{Hmac, KeyInit, Mac};
use serde_json::Value;
use sha2::Sha256;
use sqlx::{ConnectOptions, sqlite::SqliteConnectOptions};
use tempfile::TempDir;
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    time::{sleep, timeout},
};

use crate::support::{
    process::{PATIENCE, Process, assert_replays, example},
    wire::Reply,
};

const LEASE: Duration = Duration::from_millis(1_000);

fn start(folder: &TempDir) -> Process {
    let mut command = Command::new(example("webhook_receiver"));
    command
        .env("LISTEN", "127.0.0.1:0")
        .env("DATABASE", folder.path().join("webhooks.db"))
        .env("LEASE_MS", LEASE.as_millis().to_string())
        .env("RUST_BACKTRACE", "0");
    Process::start(&mut command)
}

/// What is to be delivered.
#[derive(Clone, Copy)]
struct Event {
    path: &'static str,
    id: &'static str,
    /// In the body.
    named: &'static str,
    simulate: &'static str,
}

fn event(id: &'static str) -> Event {
    Event {
        path: "/webhooks",
        id,
        named: id,
        simulate: "",
    }
}

impl Event {
    fn simulating(mut self, simulate: &'static str) -> Self {
        self.simulate = simulate;
        self
    }

    fn body(&self) -> String {
        let id = self.named;
        format!(r#"{{"id":"{id}","payment":"pay_{id}","amount_satang":25000}}"#)
    }

    /// A delivery, signed so many seconds ago with this secret.
    fn signed(&self, age: u64, secret: &[u8]) -> Vec<u8> {
        let now = SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs();
        let (id, at, body) = (self.id, now - age, self.body());
        let mut mac = Hmac::<Sha256>::new_from_slice(secret).unwrap();
        mac.update(format!("{id}.{at}.{body}").as_bytes());
        let signature = BASE64_STANDARD.encode(mac.finalize().into_bytes());
        let named = match id {
            "" => String::new(),
            id => format!("webhook-id: {id}\r\n"),
        };
        let (path, simulate, length) = (self.path, self.simulate, body.len());
        format!(
            "POST {path} HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n{named}\
             webhook-timestamp: {at}\r\nwebhook-signature: v1,bm9uc2Vuc2U= v1,{signature}\r\n\
             x-simulate: {simulate}\r\ncontent-length: {length}\r\n\r\n{body}"
        )
        .into_bytes()
    }

    fn bytes(&self) -> Vec<u8> {
        self.signed(0, b"no-secret-at-all")
    }
}

async fn deliver(process: &Process, event: Event) -> Reply {
    process.exchange(&event.bytes()).await
}

/// Which events took effect, in their order.
async fn booked(process: &Process) -> Vec<String> {
    let list = b"GET /payments HTTP/1.1\r\nhost: test\r\n\r\n";
    let reply = process.exchange(list).await;
    assert_eq!(reply.status, 200);
    let payments: Vec<Value> = serde_json::from_slice(&reply.body).unwrap();
    let event = |payment: &Value| payment["event"].as_str().unwrap().to_owned();
    payments.iter().map(event).collect()
}

/// Redelivers until the answer is another one than "come back".
async fn redeliver(process: &Process, event: Event) -> Reply {
    let begun = Instant::now();
    loop {
        let reply = deliver(process, event).await;
        if reply.code() != "idempotency_in_flight" {
            return reply;
        }
        assert_eq!(reply.status, 503);
        assert!(begun.elapsed() < PATIENCE, "it is in flight for ever");
        sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_event_of_the_tour_takes_effect_once() {
    let folder = tempfile::tempdir().unwrap();
    let process = start(&folder);

    let first = deliver(&process, event("evt_1")).await;
    assert_eq!(first.status, 200);
    assert_replays(&deliver(&process, event("evt_1")).await, &first);

    for simulate in ["fail", "panic"] {
        let failed = deliver(&process, event("evt_2").simulating(simulate)).await;
        assert_eq!(failed.status, 500, "{simulate}");
        assert_eq!(booked(&process).await, ["evt_1"]);
    }
    assert_eq!(deliver(&process, event("evt_2")).await.status, 200);

    let slow = process.spawn(event("evt_3").simulating("slow").bytes());
    in_transaction(&folder, event("evt_3")).await;
    for _ in 0..3 {
        let reply = deliver(&process, event("evt_3")).await;
        assert_eq!(reply.said(), (503, "idempotency_in_flight".into()));
        assert_eq!(reply.header("retry-after"), Some(&b"1"[..]));
    }
    assert!(!slow.is_finished(), "they were answered before it was done");
    let first = slow.await.unwrap();
    assert_eq!((first.status, first.is_replay()), (200, false));
    assert_replays(&deliver(&process, event("evt_3")).await, &first);

    // Forged, too old, or signed for another id: it uses up nothing.
    let mut replaced = event("evt_9").bytes();
    let at = replaced
        .windows(17)
        .position(|window| window == b"webhook-id: evt_9")
        .unwrap();
    replaced[at + 16] = b'4';
    for forged in [
        event("evt_4").signed(0, b"another secret"),
        event("evt_4").signed(3_600, b"no-secret-at-all"),
        replaced,
    ] {
        assert_eq!(process.exchange(&forged).await.status, 401);
    }
    assert_eq!(deliver(&process, event("evt_4")).await.status, 200);

    // The same id of another sender is another event.
    for id in ["evt_1", "evt_5"] {
        let by_body = Event {
            path: "/webhooks/by-body",
            id: "",
            ..event(id)
        };
        assert!(!deliver(&process, by_body).await.is_replay());
    }
    let by_body = Event {
        path: "/webhooks/by-body",
        id: "",
        ..event("evt_6")
    };
    let first = deliver(&process, by_body).await;
    assert_eq!(first.status, 200);
    assert_replays(&deliver(&process, by_body).await, &first);
    let nameless = Event {
        path: "/webhooks",
        ..by_body
    };
    assert_eq!(
        deliver(&process, nameless).await.said(),
        (400, "idempotency_key_required".into())
    );

    assert_eq!(
        booked(&process).await,
        [
            "evt_1", "evt_2", "evt_3", "evt_4", "evt_1", "evt_5", "evt_6"
        ]
    );
    process.terminate();
    let mut process = process;
    assert!(process.ended().await.success());
}

/// How it ends that is started with this secret, and what it says.
async fn started_with(secret: Option<&str>) -> (Option<i32>, String) {
    let folder = tempfile::tempdir().unwrap();
    let mut command = tokio::process::Command::new(example("webhook_receiver"));
    command
        .env("LISTEN", "127.0.0.1:0")
        .env("DATABASE", folder.path().join("webhooks.db"))
        .env_remove("WEBHOOK_SECRET")
        .env_remove("RUST_LOG")
        .envs(secret.map(|secret| ("WEBHOOK_SECRET", secret)))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    let mut process = command.spawn().unwrap();
    // What it prints on one side ends when it does, or once it listens and is told to end.
    let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
    let listening = timeout(PATIENCE, lines.next_line()).await.unwrap().unwrap();
    if listening.is_some() {
        let pid = process.id().unwrap().to_string();
        let told = Command::new("kill").args(["-TERM", &pid]).status();
        assert!(told.unwrap().success());
    }
    let output = timeout(PATIENCE, process.wait_with_output());
    let output = output.await.unwrap().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    (output.status.code(), said)
}

/// With an empty secret, or with one that everybody knows, anybody can sign.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_secret_that_is_none_is_refused_and_the_one_of_the_tour_is_warned_of() {
    for wrong in ["whsec_", "", "whsec_#", "c2VjcmV0"] {
        let (code, said) = started_with(Some(wrong)).await;
        assert_eq!(code, Some(2), "{wrong}");
        assert!(said.contains("WEBHOOK_SECRET must be"), "{said}");
    }
    let (code, said) = started_with(Some("whsec_c2VjcmV0LW9mLW91cnM=")).await;
    assert_eq!((code, said.as_str()), (Some(0), ""));
    for known in [None, Some("whsec_bm8tc2VjcmV0LWF0LWFsbA==")] {
        let (code, said) = started_with(known).await;
        assert_eq!(code, Some(0));
        assert!(
            said.contains("WARN") && said.contains("anybody can sign"),
            "{said}"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_in_the_middle_of_an_event_it_takes_effect_once_after_the_restart() {
    let folder = tempfile::tempdir().unwrap();
    let mut process = start(&folder);
    for (by_body, id) in [(false, "evt_1"), (true, "evt_2")] {
        let event = match by_body {
            false => event(id),
            true => Event {
                path: "/webhooks/by-body",
                id: "",
                ..event(id)
            },
        };
        let running = process.spawn(event.simulating("slow").bytes());
        in_transaction(&folder, event).await;
        process.kill();
        assert_eq!(running.await.unwrap().status, 0, "the sender hears nothing");

        process = start(&folder);
        let before = booked(&process).await;
        assert!(
            !before.contains(&id.to_owned()),
            "it has taken effect already"
        );
        let first = redeliver(&process, event).await;
        assert_eq!((first.status, first.is_replay()), (200, false));
        assert_replays(&deliver(&process, event).await, &first);
        assert_eq!(booked(&process).await.len(), before.len() + 1);
    }
    assert_eq!(booked(&process).await, ["evt_1", "evt_2"]);
}

/// Waits until this event's run is in the middle of its transaction: first the claim is committed, then the one
/// place to write is taken.
async fn in_transaction(folder: &TempDir, event: Event) {
    let begun = Instant::now();
    let file = SqliteConnectOptions::new().filename(folder.path().join("webhooks.db"));
    let file = file.busy_timeout(Duration::ZERO);
    let mut connection = file.connect().await.unwrap();
    let claimed = "SELECT count(*) FROM idempotency_records WHERE key = ?";
    loop {
        let count = sqlx::query_scalar(claimed).bind(event.named.as_bytes());
        let count: i64 = count.fetch_one(&mut connection).await.unwrap();
        if count > 0 {
            break;
        }
        assert!(begun.elapsed() < PATIENCE, "nothing is claimed");
        sleep(Duration::from_millis(5)).await;
    }
    let write = "BEGIN IMMEDIATE; ROLLBACK";
    while sqlx::raw_sql(write).execute(&mut connection).await.is_ok() {
        assert!(begun.elapsed() < PATIENCE, "no transaction is begun");
        sleep(Duration::from_millis(5)).await;
    }
}

//! A gateway on files that outlive it, and a merchant who calls it over TCP.

use std::{path::PathBuf, sync::Arc, time::Duration};

use hmac::{Hmac, KeyInit, Mac};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use sqlx::{AssertSqlSafe, SqlitePool};
use tempfile::TempDir;
use tower_idempotency::{
    SealingKeys,
    store::{Inspect, Store},
};

use crate::{
    service::{
        self, Records, Service,
        authentication::Authentication,
        merchants::{self, Credentials},
        nonces::Nonces,
        rate::RateLimit,
    },
    support::wire::{Reply, Server},
};

pub const DEPOSITS: &str = "/v1/pay/deposits";
const WEEK: Duration = Duration::from_secs(7 * 24 * 3600);

/// The files.
#[derive(Clone)]
pub struct Files(Arc<TempDir>);

impl Files {
    pub fn new() -> Self {
        Self(Arc::new(tempfile::tempdir().unwrap()))
    }

    pub fn database(&self) -> PathBuf {
        self.0.path().join("gateway.db")
    }

    /// Every byte in them.
    pub fn bytes(&self) -> Vec<u8> {
        let files = std::fs::read_dir(self.0.path()).unwrap();
        let files = files.map(|file| std::fs::read(file.unwrap().path()).unwrap());
        files.flatten().collect()
    }
}

/// A gateway that is served.
pub struct Gateway {
    pub files: Files,
    pub ledger: SqlitePool,
    pub store: Records,
    pub nonces: Nonces,
    server: Server,
}

/// What may be different about it.
pub struct Terms {
    pub files: Files,
    pub ttl: Duration,
    pub credentials: Credentials,
    pub rate: RateLimit,
}

impl Default for Terms {
    fn default() -> Self {
        Self {
            files: Files::new(),
            ttl: WEEK,
            credentials: Credentials::for_demonstration(),
            rate: RateLimit::new(100_000, 100_000),
        }
    }
}

impl Gateway {
    pub async fn open() -> Self {
        Self::on(Terms::default()).await
    }

    pub async fn on(terms: Terms) -> Self {
        let database = terms.files.database();
        let keys = SealingKeys::new("test", [7; 32]);
        let store = service::open_records(&database, keys).await.unwrap();
        let ledger = service::open_ledger(&database).await.unwrap();
        let nonces = database.with_extension("nonces");
        let nonces = Nonces::open(&nonces).await.unwrap();
        let layer = service::layer(store.clone(), terms.ttl, Duration::from_secs(30));
        let service = Service {
            authentication: Authentication::new(terms.credentials, nonces.clone(), terms.rate),
            ledger: ledger.clone(),
            ttl: terms.ttl,
        };
        Self {
            files: terms.files,
            ledger,
            store,
            nonces,
            server: Server::start(service::app(service, layer)).await,
        }
    }

    /// One attempt, on a connection of its own.
    pub async fn send(&self, call: &Call) -> Reply {
        self.server.exchange(&call.bytes()).await
    }

    /// Orders, and hands the answer out with the order's id and upload token.
    pub async fn order(&self, key: &str) -> Ordered {
        let reply = self.send(&order(key, 25_000)).await;
        assert_eq!(reply.status, 201, "{reply:?}");
        Ordered::of(&reply)
    }

    pub async fn count(&self, table: &str) -> i64 {
        let count = format!("SELECT count(*) FROM {table}");
        let count = sqlx::query_scalar(AssertSqlSafe(count));
        count.fetch_one(&self.ledger).await.unwrap()
    }

    /// Records of keys, whatever their state.
    pub async fn records(&self) -> u64 {
        let counts = self.store.counts().await.unwrap();
        counts.running + counts.completed + counts.abandoned + counts.released
    }

    pub async fn running(&self, count: u64) {
        for _ in 0..5_000 {
            if self.store.counts().await.unwrap().running == count {
                return;
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        panic!("waited in vain for {count} runs");
    }

    pub async fn close(self) -> Files {
        self.store.close().await.unwrap();
        self.nonces.close().await;
        self.ledger.close().await;
        self.files
    }
}

pub struct Ordered {
    pub id: String,
    pub token: String,
}

impl Ordered {
    pub fn of(reply: &Reply) -> Self {
        let order = body(reply);
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        Self {
            id: text(&order["id"]),
            token: text(&order["slip_upload"]["token"]),
        }
    }

    pub fn slip(&self, key: &str, content_type: &str, body: impl Into<Vec<u8>>) -> Call {
        Call::new("POST", &format!("{DEPOSITS}/{}/slip", self.id))
            .key(key)
            .header("pg-upload-token", &self.token)
            .header("content-type", content_type)
            .body(body)
    }
}

/// A request, of merchant a unless it says otherwise.
#[derive(Clone)]
pub struct Call {
    pub method: &'static str,
    pub path: String,
    pub headers: Vec<(&'static str, String)>,
    pub body: Vec<u8>,
}

impl Call {
    pub fn new(method: &'static str, path: &str) -> Self {
        Self {
            method,
            path: path.to_owned(),
            headers: vec![("authorization", "Bearer merchant-a".to_owned())],
            body: Vec::new(),
        }
    }

    /// Sets a header in place of what it was.
    pub fn header(self, name: &'static str, value: &str) -> Self {
        let mut call = self.without(name);
        call.headers.push((name, value.to_owned()));
        call
    }

    pub fn without(mut self, name: &str) -> Self {
        self.headers.retain(|(is, _)| *is != name);
        self
    }

    pub fn key(self, key: &str) -> Self {
        self.header("idempotency-key", key)
    }

    pub fn by(self, credential: &str) -> Self {
        self.header("authorization", &format!("Bearer {credential}"))
    }

    pub fn body(mut self, body: impl Into<Vec<u8>>) -> Self {
        self.body = body.into();
        self
    }

    /// Signs it as merchant a does, as it is by now.
    pub fn signed(self) -> Self {
        self.signed_with(merchants::A.secret)
    }

    pub fn signed_with(self, secret: &[u8]) -> Self {
        let text = format!(
            "{}\n{}\n{}\n{}\n{}",
            self.method,
            self.path,
            self.value("idempotency-key"),
            self.value("pg-nonce"),
            hex(&Sha256::digest(&self.body)),
        );
        let mut mac = Hmac::<Sha256>::new_from_slice(secret).unwrap();
        mac.update(text.as_bytes());
        let signature = hex(&mac.finalize().into_bytes());
        self.header("pg-signature", &signature)
    }

    pub fn value(&self, name: &str) -> &str {
        let found = self.headers.iter().find(|(is, _)| *is == name);
        found.map_or("", |(_, value)| value)
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut head = format!("{} {} HTTP/1.1\r\nhost: test\r\n", self.method, self.path);
        for (name, value) in &self.headers {
            head += &format!("{name}: {value}\r\n");
        }
        head += &format!("content-length: {}\r\n\r\n", self.body.len());
        [head.into_bytes(), self.body.clone()].concat()
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub fn order(key: &str, amount: i64) -> Call {
    let order = json!({
        "merchant_reference": "INV-2026-0042",
        "amount_minor": amount,
        "currency": "THB",
        "client": { "ip": "203.0.113.7" },
    });
    Call::new("POST", DEPOSITS)
        .key(key)
        .header("content-type", "application/json")
        .body(order.to_string())
}

pub fn get(path: &str) -> Call {
    Call::new("GET", path)
}

pub fn body(reply: &Reply) -> Value {
    serde_json::from_slice(&reply.body).unwrap_or_default()
}

/// Status and code of a refusal, whose envelope has all that every one has.
#[track_caller]
pub fn refused(reply: &Reply) -> (u16, String) {
    let envelope = body(reply);
    let error = &envelope["error"];
    assert_eq!(text(reply, "content-type"), "application/json");
    for member in ["code", "type", "message", "message_th"] {
        let said = error[member].as_str().unwrap_or_default();
        assert!(!said.is_empty(), "{member}: {envelope}");
    }
    let retry_after = error["retry_after_seconds"].as_u64();
    assert_eq!(error["retryable"], retry_after.is_some(), "{envelope}");
    let header = retry_after.map_or(String::new(), |seconds| seconds.to_string());
    assert_eq!(text(reply, "retry-after"), header);
    if !reply.is_replay() {
        assert_eq!(error["request_id"], text(reply, "x-request-id"));
    }
    (reply.status, error["code"].as_str().unwrap().to_owned())
}

/// A header; empty where there is none.
pub fn text<'a>(reply: &'a Reply, name: &str) -> &'a str {
    std::str::from_utf8(reply.header(name).unwrap_or_default()).unwrap()
}

#[track_caller]
pub fn assert_runs(reply: &Reply, status: u16) {
    let done = (reply.status, reply.is_replay());
    assert_eq!(done, (status, false), "{reply:?}");
    assert_eq!(text(reply, "idempotent-replay"), "");
}

/// Status, headers and body are those of the first answer, but for what belongs to the attempt.
#[track_caller]
pub fn assert_replays(retry: &Reply, first: &Reply) {
    let kept = |reply: &Reply| -> Vec<_> {
        let aside = ["connection", "date", "idempotent-replay", "x-request-id"];
        let mut headers = reply.headers.clone();
        headers.retain(|(name, _)| !aside.contains(&name.as_str()));
        headers.sort();
        headers
    };
    assert!(retry.is_replay() && !first.is_replay(), "{retry:?}");
    assert_eq!(retry.status, first.status);
    assert_eq!(retry.body, first.body);
    assert_eq!(kept(retry), kept(first));
    assert_ne!(text(retry, "x-request-id"), text(first, "x-request-id"));
}

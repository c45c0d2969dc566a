//! What the tests share: a world with a store and a clock, a handler with an effect, requests,
//! a server on TCP and a client that can misbehave on the wire.
#![allow(dead_code)] // Each test file uses its own part of this.

pub mod bodies;
pub mod clock;
pub mod database;
pub mod faults;
pub mod http2;
pub mod logs;
#[cfg(feature = "metrics")]
pub mod metrics;
#[cfg(unix)]
pub mod process;
pub mod provider;
pub mod proxy;
pub mod puppet;
#[cfg(unix)]
pub mod server;
pub mod wire;

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    extract::State,
    http::{HeaderMap, Request, Response, StatusCode},
    routing::any,
};
use bytes::Bytes;
use http_body_util::BodyExt;
use sqlx::{AssertSqlSafe, ConnectOptions, Connection};
use tokio::sync::Semaphore;
use tower::ServiceExt;
use tower_idempotency::{
    AnyStore, IdempotencyKey, IdempotencyLayer, IdempotentResponse, MemoryStore, Record, RecordId,
    Scope, State as RecordState,
    store::Inspect,
    testing::{Fault, FaultyStore, Operation, Times},
};

use self::{clock::TestClock, database::Database};

pub type TestStore = FaultyStore<AnyStore>;

/// Data that any number of store instances can be opened on, all judged by one clock.
pub struct World {
    pub clock: TestClock,
    data: Data,
}

enum Data {
    Memory(MemoryStore),
    Sqlite(tempfile::TempDir),
    Postgres(Arc<Database>),
}

impl World {
    pub fn memory() -> Self {
        let clock = TestClock::new();
        let store = MemoryStore::options().clock(clock.clone()).build();
        let data = Data::Memory(store);
        Self { clock, data }
    }

    pub fn sqlite() -> Self {
        let clock = TestClock::new();
        let data = Data::Sqlite(tempfile::tempdir().unwrap());
        Self { clock, data }
    }

    /// In a schema of its own on the server that `DATABASE_URL` names.
    #[cfg(feature = "postgres")]
    pub fn postgres() -> Self {
        let database = Arc::new(Database::new());
        let clock = TestClock::of(database.clone());
        let data = Data::Postgres(database);
        Self { clock, data }
    }

    /// One of each, for tests that `every_store!` is not for.
    pub fn each() -> Vec<Self> {
        let mut worlds = vec![Self::memory()];
        worlds.extend(Self::durable());
        worlds
    }

    /// One of each whose data can be reached behind the store's back.
    pub fn durable() -> Vec<Self> {
        vec![
            Self::sqlite(),
            #[cfg(feature = "postgres")]
            Self::postgres(),
        ]
    }

    /// Another instance on the same data, as another process would have.
    pub async fn open(&self) -> TestStore {
        FaultyStore::new(match &self.data {
            Data::Memory(store) => AnyStore::new(store.instance()),
            Data::Sqlite(folder) => AnyStore::new(
                tower_idempotency::SqliteStore::options(folder.path().join("idempotency.db"))
                    .clock(self.clock.clone())
                    .open()
                    .await
                    .unwrap(),
            ),
            Data::Postgres(database) => open_postgres(database).await,
        })
    }

    /// The same of a process that falls silent once it has claimed: its heart does not beat, or it might do so
    /// once more after a test has moved the time.
    pub async fn open_silent(&self) -> TestStore {
        let store = self.open().await;
        store.fail(Operation::Renew, Fault::Before, Times::Always);
        store
    }

    /// Whether its data can be reached behind the store's back.
    pub fn is_durable(&self) -> bool {
        !matches!(self.data, Data::Memory(_))
    }

    /// Everything that is stored, byte for byte, where it can be read behind the store's back.
    pub async fn raw(&self) -> Option<Vec<u8>> {
        match &self.data {
            Data::Memory(_) => None,
            Data::Sqlite(_) => {
                let file = self.file().unwrap().into_os_string();
                let mut stored = Vec::new();
                for end in ["", "-wal", "-shm", "-journal"] {
                    let mut name = file.clone();
                    name.push(end);
                    stored.extend(std::fs::read(name).unwrap_or_default());
                }
                Some(stored)
            }
            Data::Postgres(database) => Some(database.rows().await),
        }
    }

    /// Runs a statement behind the store's back. Bytes are written as SQLite does: `x'0102'`.
    pub async fn tamper(&self, statement: &str) {
        match &self.data {
            Data::Memory(_) => panic!("nobody gets behind this store's back"),
            Data::Sqlite(_) => {
                let file = sqlx::sqlite::SqliteConnectOptions::new().filename(self.file().unwrap());
                let mut connection = file.connect().await.unwrap();
                let statement = AssertSqlSafe(statement.to_owned());
                sqlx::raw_sql(statement)
                    .execute(&mut connection)
                    .await
                    .unwrap();
                connection.close().await.unwrap();
            }
            Data::Postgres(database) => database.run(&statement.replace("x'", "'\\x")).await,
        }
    }

    /// The SQLite file, where there is one.
    pub fn file(&self) -> Option<std::path::PathBuf> {
        match &self.data {
            Data::Sqlite(folder) => Some(folder.path().join("idempotency.db")),
            _ => None,
        }
    }

    /// The Postgres schema, where there is one.
    pub fn database(&self) -> Option<&Arc<Database>> {
        match &self.data {
            Data::Postgres(database) => Some(database),
            _ => None,
        }
    }
}

#[cfg(feature = "postgres")]
async fn open_postgres(database: &Database) -> AnyStore {
    let options = tower_idempotency::PostgresStore::options().migrate();
    AnyStore::new(options.open(database.pool()).await.unwrap())
}

#[cfg(not(feature = "postgres"))]
async fn open_postgres(_: &Database) -> AnyStore {
    unreachable!("there are no Postgres worlds without the feature")
}

/// A store of each kind on a clock that goes by itself, for what must hold in real time.
pub struct RealTime {
    pub stores: Vec<(&'static str, TestStore)>,
    /// What the stores keep their data in.
    _folder: tempfile::TempDir,
    _database: Option<Database>,
}

impl RealTime {
    pub async fn stores() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("idempotency.db");
        let sqlite = tower_idempotency::SqliteStore::open(file).await.unwrap();
        let database = cfg!(feature = "postgres").then(Database::in_real_time);
        let mut stores = vec![
            ("memory", AnyStore::new(MemoryStore::new())),
            ("sqlite", AnyStore::new(sqlite)),
        ];
        if let Some(database) = &database {
            stores.push(("postgres", open_postgres(database).await));
        }
        let faulty = |(name, store)| (name, FaultyStore::new(store));
        Self {
            stores: stores.into_iter().map(faulty).collect(),
            _folder: folder,
            _database: database,
        }
    }
}

/// Writes one test per store: `every_store! { async fn name(world: World) { … } }` becomes
/// `name::memory`, `name::sqlite` and `name::postgres`.
#[macro_export]
macro_rules! every_store {
    ($($(#[$meta:meta])* async fn $name:ident($world:ident: World) $body:block)*) => { $(
        mod $name {
            #[allow(unused_imports)]
            use super::*;

            async fn check($world: $crate::support::World) $body

            $(#[$meta])*
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn memory() {
                check($crate::support::World::memory()).await;
            }

            $(#[$meta])*
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn sqlite() {
                check($crate::support::World::sqlite()).await;
            }

            $(#[$meta])*
            #[cfg(feature = "postgres")]
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn postgres() {
                check($crate::support::World::postgres()).await;
            }
        }
    )* };
}

/// A handler with an effect that is counted, and a gate that holds it after the effect.
#[derive(Clone)]
pub struct Handler {
    effects: Arc<AtomicUsize>,
    gate: Arc<Semaphore>,
    answer: Arc<dyn Fn(Seen) -> Response<Body> + Send + Sync>,
}

/// What the handler is asked.
pub struct Seen {
    /// Which run this is over all keys, from 1.
    pub run: usize,
    pub method: axum::http::Method,
    pub uri: axum::http::Uri,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Handler {
    /// Answers 201 with a body that names the run, so that no two runs answer alike.
    pub fn new() -> Self {
        Self::answering(|seen| {
            Response::builder()
                .status(StatusCode::CREATED)
                .header("location", format!("/charges/{}", seen.run))
                .header("content-type", "application/json")
                .body(Body::from(format!("{{\"charge\":{}}}", seen.run)))
                .unwrap()
        })
    }

    pub fn answering(answer: impl Fn(Seen) -> Response<Body> + Send + Sync + 'static) -> Self {
        Self {
            effects: Arc::default(),
            gate: Arc::new(Semaphore::new(Semaphore::MAX_PERMITS)),
            answer: Arc::new(answer),
        }
    }

    /// `h`: how often the effect happened.
    pub fn effects(&self) -> usize {
        self.effects.load(Ordering::SeqCst)
    }

    /// From now on every run stops right after its effect, until [`open_gate`](Self::open_gate).
    pub fn close_gate(&self) {
        self.gate.forget_permits(Semaphore::MAX_PERMITS);
    }

    pub fn open_gate(&self) {
        self.gate.add_permits(Semaphore::MAX_PERMITS);
    }

    /// Waits until the effect has happened so often.
    pub async fn reached(&self, effects: usize) {
        eventually("the handler to be reached", || self.effects() >= effects).await;
    }

    /// A router that answers every path and method with this handler, behind nothing.
    pub fn router(&self) -> Router {
        Router::new()
            .route("/", any(handle))
            .route("/{*path}", any(handle))
            .with_state(self.clone())
    }

    /// The same behind a layer.
    pub fn behind<S>(&self, layer: IdempotencyLayer<S>) -> Router
    where
        S: tower_idempotency::store::Inspect + tower_idempotency::store::Checkpoints,
    {
        self.router().route_layer(layer)
    }
}

async fn handle(State(handler): State<Handler>, request: Request<Body>) -> Response<Body> {
    let (head, body) = request.into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    let run = handler.effects.fetch_add(1, Ordering::SeqCst) + 1;
    handler.gate.acquire().await.unwrap().forget();
    handler.gate.add_permits(1);
    (handler.answer)(Seen {
        run,
        method: head.method,
        uri: head.uri,
        headers: head.headers,
        body,
    })
}

/// A keyed JSON POST to `/charges`.
pub fn post(key: &str, body: impl Into<Body>) -> Request<Body> {
    request("POST", "/charges", Some(key), body)
}

pub fn request(method: &str, uri: &str, key: Option<&str>, body: impl Into<Body>) -> Request<Body> {
    let mut request = Request::builder()
        .method(method)
        .uri(uri)
        .header("content-type", "application/json");
    if let Some(key) = key {
        request = request.header("idempotency-key", key);
    }
    request.body(body.into()).unwrap()
}

/// Sends it as a task of its own.
pub fn spawn(app: &Router, request: Request<Body>) -> tokio::task::JoinHandle<Answer> {
    let app = app.clone();
    tokio::spawn(async move { send(&app, request).await })
}

/// The state that is stored for this key.
pub async fn state(store: &TestStore, key: &str) -> Option<RecordState> {
    Some(record(store, key).await?.state)
}

/// Waits until it is this.
pub async fn comes_to(store: &TestStore, key: &str, expected: Option<RecordState>) {
    for _ in 0..2_000 {
        if state(store, key).await == expected {
            return;
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let found = state(store, key).await;
    panic!("{key} is {found:?} and never {expected:?}");
}

/// A response, read to its end.
#[derive(Debug, Clone)]
pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Bytes,
    pub replay: bool,
}

impl Answer {
    pub async fn of(response: Response<Body>) -> Self {
        let replay = response.is_replay();
        let (head, body) = response.into_parts();
        Self {
            status: head.status,
            headers: head.headers,
            body: body.collect().await.unwrap().to_bytes(),
            replay,
        }
    }

    /// The problem's `code`; empty where the body is no problem document.
    pub fn code(&self) -> String {
        self.json()["code"].as_str().unwrap_or_default().to_owned()
    }

    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }

    /// Status and code in one, for short assertions: `(409, "idempotency_in_flight")`.
    pub fn said(&self) -> (u16, String) {
        (self.status.as_u16(), self.code())
    }

    /// Asserts that this is the replay of `first`: status, headers (what is never kept aside),
    /// body bytes, and the marker that the first answer must not have.
    #[track_caller]
    pub fn assert_replays(&self, first: &Answer) {
        assert!(
            !first.headers.contains_key("idempotent-replay"),
            "the first answer is marked"
        );
        assert_eq!(
            self.header("idempotent-replay"),
            Some("true"),
            "the replay is not marked: {self:?}"
        );
        assert!(self.replay);
        assert_eq!(self.status, first.status);
        assert_eq!(self.body, first.body);
        for name in first.headers.keys() {
            if ["date", "content-length", "transfer-encoding", "connection"]
                .contains(&name.as_str())
            {
                continue;
            }
            let values =
                |headers: &HeaderMap| -> Vec<_> { headers.get_all(name).iter().cloned().collect() };
            assert_eq!(
                values(&self.headers),
                values(&first.headers),
                "header {name}"
            );
        }
    }
}

/// Sends one request straight into a router. Whatever waits in vain fails, instead of hanging.
pub async fn send(app: &Router, request: Request<Body>) -> Answer {
    let answer = async { Answer::of(app.clone().oneshot(request).await.unwrap()).await };
    let answer = tokio::time::timeout(Duration::from_secs(30), answer).await;
    answer.expect("no answer in half a minute")
}

/// The record of an unscoped key.
pub async fn record(store: &TestStore, key: &str) -> Option<Record> {
    let id = RecordId::new(Scope::shared(), IdempotencyKey::new(key));
    store.inner().get(&id).await.unwrap()
}

/// How many records there are, whatever their state.
pub async fn records(store: &TestStore) -> u64 {
    let counts = store.inner().counts().await.unwrap();
    counts.running + counts.completed + counts.abandoned + counts.released
}

/// Looks every few milliseconds, for at most ten seconds.
pub async fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    for _ in 0..5_000 {
        if is_so() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    panic!("waited in vain for {what}");
}

/// Waits until the store was asked this so often, for at most half a minute.
pub async fn called(store: &TestStore, operation: Operation, calls: usize) {
    let called = store.called(operation, calls);
    let called = tokio::time::timeout(Duration::from_secs(30), called).await;
    called.unwrap_or_else(|_| panic!("{operation:?} was called {} times", store.calls(operation)));
}

//! The service and its provider, on files that outlive both.

use std::{
    future::{IntoFuture, pending, ready},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    extract::Request,
    http::StatusCode,
    middleware::{Next, from_fn},
    response::{IntoResponse, Response},
};
use sqlx::{Sqlite, SqlitePool, Transaction};
use tokio::{
    net::{TcpListener, TcpSocket},
    sync::Barrier,
    time::timeout,
};
use tower_http::catch_panic::CatchPanicLayer;
use tower_idempotency::SqliteStore;

use crate::{
    provider,
    service::{self, Pause, Service, Settings, Step, gateway::Gateway},
    support::{Answer, bodies::Pieces, request, send},
};

/// What a crashed process leaves behind blocks its key for so long.
pub const LEASE: Duration = Duration::from_millis(500);
/// How long the service waits for the provider, which answers at once.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// The files, and a provider that behaves as it is told to.
pub struct Shop {
    folder: tempfile::TempDir,
    pub mood: Arc<Mutex<Mood>>,
    /// How many calls the provider has got.
    pub calls: Arc<AtomicUsize>,
    charges: SqlitePool,
    url: String,
    closed: Option<TcpSocket>,
}

#[derive(Clone, Default)]
pub enum Mood {
    #[default]
    Normal,
    /// Charges and then says that it could not.
    FailsAfterwards,
    /// Charges, and the connection breaks before it has said so.
    BreaksOffAfterwards,
    /// Charges and never says so.
    FallsSilentAfterwards,
    /// Somebody on the way says that there is no such page.
    IsMisplaced,
    /// Takes a connection of this pool and writes with it before it answers.
    WritesWith(SqlitePool),
}

impl Shop {
    pub async fn open() -> Self {
        let mut shop = Self::with_provider_down().await;
        shop.provider_comes_up();
        shop
    }

    /// Connections to the provider are refused, and nobody else gets its port.
    pub async fn with_provider_down() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let charges = provider::open(&folder.path().join("provider.db")).await;
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        Self {
            folder,
            mood: Arc::default(),
            calls: Arc::default(),
            charges: charges.unwrap(),
            url: format!("http://{}", socket.local_addr().unwrap()),
            closed: Some(socket),
        }
    }

    pub fn provider_comes_up(&mut self) {
        let listener: TcpListener = self.closed.take().unwrap().listen(1_024).unwrap();
        let (mood, calls) = (self.mood.clone(), self.calls.clone());
        let behave = from_fn(move |request: Request, next: Next| {
            calls.fetch_add(1, Ordering::SeqCst);
            let mood = mood.lock().unwrap().clone();
            behave(mood, request, next)
        });
        let app = provider::app(self.charges.clone()).layer(behave);
        tokio::spawn(axum::serve(listener, app).into_future());
    }

    pub fn set_mood(&self, mood: Mood) {
        *self.mood.lock().unwrap() = mood;
    }

    /// The file of the service's tables and of the layer's records.
    pub fn file(&self) -> PathBuf {
        self.folder.path().join("service.db")
    }

    pub async fn ledger(&self, connections: u32) -> SqlitePool {
        service::open_ledger(&self.file(), connections)
            .await
            .unwrap()
    }

    /// A service that is yet to be started, with so many connections to its tables.
    pub async fn parts(&self, connections: u32) -> Service {
        Service {
            ledger: self.ledger(connections).await,
            gateway: Gateway::new(self.url(), PATIENCE),
            pause: no_pause(),
        }
    }

    pub async fn service(&self, pause: Pause) -> Router {
        let service = Service {
            pause,
            ..self.parts(4).await
        };
        serve_with(service, &self.file()).await
    }

    /// Where the provider is, or will be.
    pub fn url(&self) -> String {
        self.url.clone()
    }

    /// Count and sum of what the provider has charged.
    pub async fn charged(&self) -> (u64, u64) {
        let app = provider::app(self.charges.clone());
        let charged = send(&app, request("GET", "/charges", None, ""))
            .await
            .json();
        let number = |member: &str| charged[member].as_u64().unwrap();
        (number("count"), number("amount_minor"))
    }
}

/// `file` is for the layer's records.
pub async fn serve_with(service: Service, file: &Path) -> Router {
    let store = SqliteStore::open(file).await.unwrap();
    let settings = Settings {
        lease: LEASE,
        secret: b"what the tests have as a secret",
        patience: PATIENCE,
    };
    let layer = service::layer(store, &service, &settings);
    service::app(service, layer).layer(CatchPanicLayer::new())
}

async fn behave(mood: Mood, request: Request, next: Next) -> Response {
    if let Mood::WritesWith(ledger) = &mood
        && let Err(why) = write_with(ledger).await
    {
        return (StatusCode::INTERNAL_SERVER_ERROR, why).into_response();
    }
    if matches!(mood, Mood::IsMisplaced) {
        return (StatusCode::NOT_FOUND, "<h1>Not found</h1>").into_response();
    }
    let response = next.run(request).await;
    match mood {
        Mood::Normal | Mood::WritesWith(_) | Mood::IsMisplaced => response,
        Mood::FailsAfterwards => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
        Mood::BreaksOffAfterwards => {
            let broken = Pieces::new(["{\"id\":"]).then_error().body();
            (response.status(), broken).into_response()
        }
        Mood::FallsSilentAfterwards => pending().await,
    }
}

/// A transaction of the service's, read or write, would have the pool's one connection, and one that writes
/// would have the lock as well. Either would last until this has answered.
async fn write_with(ledger: &SqlitePool) -> Result<(), String> {
    let write = async {
        let mut ours: Transaction<'_, Sqlite> = ledger.begin_with("BEGIN IMMEDIATE").await?;
        let all = sqlx::query("UPDATE budgets SET available_minor = available_minor");
        all.execute(&mut *ours).await?;
        ours.rollback().await
    };
    let write = timeout(Duration::from_secs(5), write).await;
    let write = write.map_err(|_| "the ledger is not free".to_owned())?;
    write.map_err(|error: sqlx::Error| error.to_string())
}

/// Goes on at once after every step.
pub fn no_pause() -> Pause {
    Arc::new(|_| Box::pin(ready(())))
}

/// Panics the first time this step is done.
pub fn panics_once_after(step: Step) -> Pause {
    let armed = Arc::new(Mutex::new(Some(step)));
    Arc::new(move |done| {
        let crash = armed.lock().unwrap().take_if(|step| *step == done);
        Box::pin(async move { assert!(crash.is_none(), "as the test wants") })
    })
}

/// Goes on after a step once so many runs have done it.
pub fn all_at_each_step(runs: usize) -> Pause {
    let done = Arc::new(Barrier::new(runs));
    Arc::new(move |_| {
        let done = done.clone();
        Box::pin(async move {
            done.wait().await;
        })
    })
}

pub fn order(client: &str, key: &str, amount_minor: u64) -> axum::http::Request<Body> {
    let body = format!(r#"{{"amount_minor":{amount_minor},"currency":"THB"}}"#);
    let mut order = request("POST", "/charges", Some(key), body);
    let client = client.parse().unwrap();
    order.headers_mut().insert("x-client-id", client);
    order
}

pub async fn get(app: &Router, client: &str, path: &str) -> Answer {
    let mut get = request("GET", path, None, "");
    let client = client.parse().unwrap();
    get.headers_mut().insert("x-client-id", client);
    send(app, get).await
}

/// Available, reserved and spent.
pub async fn budget(app: &Router, client: &str) -> [i64; 3] {
    let budget = get(app, client, "/budgets/THB").await.json();
    ["available_minor", "reserved_minor", "spent_minor"]
        .map(|member| budget[member].as_i64().unwrap())
}

//! The service: one charge per request, and nothing but the layer to keep it at one.

use std::{
    fs::{File, OpenOptions},
    io::Write,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::Stdio,
    sync::Arc,
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    extract::State,
    http::{HeaderMap, HeaderValue, Response, StatusCode},
    routing::post,
};
use sqlx::{Executor, PgPool, postgres::PgPoolOptions};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, BufReader, Lines},
    net::TcpListener,
    process::{Child, ChildStdout, Command},
    time::sleep,
};
use tower_idempotency::{
    IdempotencyLayer, PostgresStore, Recovery,
    store::{StoreError, StoreErrorKind},
};

use crate::{LEASE, support::server::Server};

const DATABASE: &str = "TEST_DRILL_DATABASE";
const JOURNAL: &str = "TEST_DRILL_JOURNAL";
const NUMBER: &str = "TEST_DRILL_PROCESS";

/// Longer than any outage: no answer leaves before it is recorded.
const STORE_TIMEOUT: Duration = Duration::from_secs(60);

/// The action whose charge never answers.
pub const HOLD: &str = "action-that-hangs";

/// Names the run in every answer of the handler.
pub const RUN: &str = "x-run";

/// A process of the service, killed when it is dropped.
pub struct Process {
    child: Child,
    said: Lines<BufReader<ChildStdout>>,
}

impl Process {
    /// This test binary once more.
    pub fn spawn(number: u32, database: &str, journal: &Path) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args([
                "--exact",
                "this_binary_also_plays_the_service",
                "--nocapture",
            ])
            .env(DATABASE, database)
            .env(JOURNAL, journal)
            .env(NUMBER, number.to_string())
            // It ends when nobody holds the other end any more.
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true);
        let mut child = command.spawn().unwrap();
        let said = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, said }
    }

    /// Where it listens, as soon as it does. May be dropped and called again until it has answered.
    pub async fn address(&mut self) -> SocketAddr {
        while let Some(line) = self.said.next_line().await.unwrap() {
            if let Some((_, address)) = line.trim().split_once("listening on http://") {
                return address.parse().unwrap();
            }
        }
        panic!("the process ended: {:?}", self.child.wait().await);
    }

    /// It does nothing until this is dropped.
    pub fn stall(&self) -> Stalled {
        let process = self.child.id().expect("it was waited for");
        signal("STOP", process);
        Stalled(process)
    }

    /// `kill -9`, and nothing the process could do about it.
    pub async fn kill(mut self) {
        self.child.kill().await.unwrap();
    }
}

/// A process that stands still.
pub struct Stalled(u32);

impl Drop for Stalled {
    fn drop(&mut self) {
        signal("CONT", self.0);
    }
}

/// A process that nobody has waited for yet, so that no other can have its number.
fn signal(name: &str, process: u32) {
    // The shell's own `kill`, since a program of that name need not be installed.
    let mut shell = std::process::Command::new("sh");
    shell.args(["-c", "kill -s \"$@\"", "sh", name, &process.to_string()]);
    let sent = shell.status();
    assert!(sent.unwrap().success());
}

/// Where the effects land. No constraint helps the layer to keep them single.
pub async fn create_effects(server: &Server) {
    let table = "CREATE TABLE drill_effects (action text NOT NULL, run text NOT NULL)";
    server.connect().await.execute(table).await.unwrap();
}

/// What a process is told.
pub struct Part {
    database: String,
    journal: PathBuf,
    number: u32,
}

#[derive(Clone)]
struct Service {
    journal: Arc<File>,
    pool: PgPool,
}

impl Part {
    pub fn asked_for() -> Option<Self> {
        Some(Self {
            database: std::env::var(DATABASE).ok()?,
            journal: std::env::var_os(JOURNAL)?.into(),
            number: std::env::var(NUMBER).ok()?.parse().unwrap(),
        })
    }

    /// Serves until it is killed, or nobody is there who could.
    pub async fn play(self) {
        let mut journal = OpenOptions::new();
        let journal = journal.create(true).append(true).open(&self.journal);
        let pool = PgPoolOptions::new()
            .max_connections(8)
            // Short, so that during an outage some handlers have to give up.
            .acquire_timeout(Duration::from_millis(300))
            .connect_lazy(&self.database)
            .unwrap();
        let store = self.open_store(&pool).await;
        let layer = IdempotencyLayer::new(store)
            .single_tenant()
            .lease(LEASE)
            .recovery(Recovery::Refuse)
            .store_timeout(STORE_TIMEOUT);
        let service = Service {
            journal: Arc::new(journal.unwrap()),
            pool,
        };
        let app = Router::new()
            .route("/charges", post(charge))
            .route_layer(layer)
            .with_state(service);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        println!("listening on http://{}", listener.local_addr().unwrap());
        let served = axum::serve(listener, app).into_future();
        let mut nothing = Vec::new();
        let mut stdin = tokio::io::stdin();
        tokio::select! {
            served = served => served.unwrap(),
            _ = stdin.read_to_end(&mut nothing) => {}
        }
    }

    /// Waits for Postgres, which may be down. That the tables are not as they should be is no reason
    /// to wait: then this process ends, and the drill with it.
    async fn open_store(&self, pool: &PgPool) -> PostgresStore {
        loop {
            match self.try_to_open_store(pool).await {
                Ok(store) => return store,
                Err(error) if error.kind() == StoreErrorKind::Unavailable => {
                    sleep(Duration::from_millis(20)).await;
                }
                Err(error) => panic!("{error:?}"),
            }
        }
    }

    /// Every other process shares its pool with the handler. The others are quick to give up.
    async fn try_to_open_store(&self, pool: &PgPool) -> Result<PostgresStore, StoreError> {
        let options = PostgresStore::options().migrate();
        if self.number.is_multiple_of(2) {
            return options.open(pool.clone()).await;
        }
        let options = options.operation_timeout(Duration::from_millis(500));
        options.connect(&self.database).await
    }
}

/// Charges, and is slow about it, so that it can be killed before, meanwhile and after.
async fn charge(State(service): State<Service>, headers: HeaderMap) -> Response<Body> {
    let action = headers["idempotency-key"].to_str().unwrap();
    let run = format!("{:032x}", rand::random::<u128>());
    // A second effect, and one that no outage keeps from happening.
    let line = format!("{action} {run}\n");
    (&*service.journal).write_all(line.as_bytes()).unwrap();

    dawdle(30).await;
    let effect = service.record_effect(action, &run).await;
    if action == HOLD {
        std::future::pending::<()>().await;
    }
    dawdle(40).await;
    // An error says little: the commit may have taken place.
    let status = match effect {
        Ok(()) => StatusCode::CREATED,
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR,
    };
    answer(status, action, &run)
}

impl Service {
    async fn record_effect(&self, action: &str, run: &str) -> sqlx::Result<()> {
        let mut transaction = self.pool.begin().await?;
        sqlx::query("INSERT INTO drill_effects (action, run) VALUES ($1, $2)")
            .bind(action)
            .bind(run)
            .execute(&mut *transaction)
            .await?;
        dawdle(10).await;
        transaction.commit().await
    }
}

async fn dawdle(milliseconds: u64) {
    let milliseconds = rand::random_range(0..=milliseconds);
    sleep(Duration::from_millis(milliseconds)).await;
}

/// No two runs answer alike.
fn answer(status: StatusCode, action: &str, run: &str) -> Response<Body> {
    let mut answer = Response::builder()
        .status(status)
        .header("content-type", "application/json")
        .header("location", format!("/charges/{run}"))
        .header(RUN, run);
    for _ in 0..rand::random_range(0..3) {
        // What else a header may hold: spaces, and bytes beyond ASCII.
        let mut value = *b"<  >; rel=";
        value[1..3].fill_with(|| rand::random_range(0x80..=0xff));
        answer = answer.header("link", HeaderValue::from_bytes(&value).unwrap());
    }
    let large = rand::random_ratio(1, 8);
    let filler = if large {
        rand::random_range(0..200_000)
    } else {
        0
    };
    let filler = run.repeat(filler / run.len());
    let body = format!("{{\"action\":\"{action}\",\"run\":\"{run}\",\"filler\":\"{filler}\"}}");
    answer.body(Body::from(body)).unwrap()
}

//! The service: one charge per request, and nothing but the layer to keep it at one.

use std::{
    fs::{File, OpenOptions},
    io::Write,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    extract::State,
    http::{HeaderMap, Response, StatusCode},
    routing::post,
};
use sqlx::{Executor, PgPool, postgres::PgPoolOptions};
use tokio::{io::AsyncReadExt, net::TcpListener, time::sleep};
use tower_idempotency::{
    IdempotencyLayer, PostgresStore, Recovery,
    store::{StoreError, StoreErrorKind},
};

use crate::{
    LEASE,
    answer::{answer, dawdle},
    process::Process,
    support::server::Server,
};

const DATABASE: &str = "TEST_DRILL_DATABASE";
const JOURNAL: &str = "TEST_DRILL_JOURNAL";
const NUMBER: &str = "TEST_DRILL_PROCESS";

/// Longer than any outage: no answer leaves before it is recorded.
const STORE_TIMEOUT: Duration = Duration::from_secs(60);

/// The action whose charge never answers.
pub const HOLD: &str = "action-that-hangs";

/// Where the effects land. No constraint helps the layer to keep them single.
pub async fn create_effects(server: &Server) {
    let table = "CREATE TABLE drill_effects (action text NOT NULL, run text NOT NULL)";
    server.connect().await.execute(table).await.unwrap();
}

/// A process that serves.
pub fn spawn(number: u32, database: &str, journal: &Path) -> Process {
    Process::spawn(&[
        (DATABASE, database.as_ref()),
        (JOURNAL, journal.as_ref()),
        (NUMBER, number.to_string().as_ref()),
    ])
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

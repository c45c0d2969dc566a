//! An outbox in a database of its own, a server that charges, and ways to look at both behind their backs.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    extract::State,
    http::{HeaderMap, Request, Response, StatusCode},
    response::IntoResponse,
    routing::post,
};
use bytes::Bytes;
use http::{HeaderName, HeaderValue};
use tokio::sync::Semaphore;
use tower_idempotency::{
    IdempotencyLayer, MemoryStore,
    client::{Operation, Retry, RetryLayer},
};
use tower_layer::Layer;

/// The same names for both databases, so that a test is written once.
macro_rules! ground {
    ($module:ident, $database:ty, $place:ty, $new:expr, $pool:expr) => {
        pub mod $module {
            use super::*;
            #[allow(unused_imports)]
            use sqlx::AssertSqlSafe;
            use tower_idempotency::client::{Outbox, Relay};

            pub type Db = $database;
            pub const IS_POSTGRES: bool = stringify!($module).len() > 6;

            pub struct Ground {
                _place: $place,
                pub pool: sqlx::Pool<Db>,
                pub outbox: Outbox<Db>,
                pub shop: Shop,
            }

            impl Ground {
                pub async fn new() -> Self {
                    let place: $place = $new;
                    let pool: sqlx::Pool<Db> = $pool(&place).await;
                    let outbox = Outbox::new(pool.clone());
                    outbox.migrate().await.unwrap();
                    Self {
                        _place: place,
                        pool,
                        outbox,
                        shop: Shop::new(),
                    }
                }

                /// Another pool on the same database, as another process would have.
                pub async fn another_pool(&self) -> sqlx::Pool<Db> {
                    $pool(&self._place).await
                }

                pub fn relay(&self) -> Relay<Db, Router> {
                    Relay::new(self.outbox.clone(), self.shop.client())
                }

                pub async fn run(&self, statement: &str) {
                    let statement = sqlx::raw_sql(AssertSqlSafe(statement.to_owned()));
                    statement.execute(&self.pool).await.unwrap();
                }

                /// Moves the beginning of an operation back, and its settling.
                pub async fn age(&self, reference: &str, by: Duration) {
                    self.run(&format!(
                        "UPDATE idempotency_outbox SET begun = begun - {by}, settled = settled - {by}
                         WHERE reference = '{reference}'",
                        by = by.as_micros()
                    ))
                    .await;
                }

                pub async fn bytes(&self, column: &str, reference: &str) -> Vec<u8> {
                    let read = format!(
                        "SELECT {column} FROM idempotency_outbox WHERE reference = '{reference}'"
                    );
                    sqlx::query_scalar(AssertSqlSafe(read))
                        .fetch_one(&self.pool)
                        .await
                        .unwrap()
                }

                pub async fn count(&self, table: &str) -> i64 {
                    let count = format!("SELECT count(*) FROM {table}");
                    sqlx::query_scalar(AssertSqlSafe(count))
                        .fetch_one(&self.pool)
                        .await
                        .unwrap()
                }

                /// Every write of an end fails from now on.
                pub async fn refuse_to_settle(&self) {
                    self.run(match IS_POSTGRES {
                        true => {
                            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
                             $$ BEGIN RAISE EXCEPTION 'refused'; END $$;
                             CREATE TRIGGER refuse BEFORE UPDATE ON idempotency_outbox FOR EACH ROW
                             WHEN (NEW.state <> OLD.state) EXECUTE FUNCTION refuse()"
                        }
                        false => {
                            "CREATE TRIGGER refuse BEFORE UPDATE ON idempotency_outbox
                             WHEN NEW.state <> OLD.state
                             BEGIN SELECT RAISE(ABORT, 'refused'); END"
                        }
                    })
                    .await;
                }

                pub async fn settle_again(&self) {
                    self.run(match IS_POSTGRES {
                        true => "DROP TRIGGER refuse ON idempotency_outbox",
                        false => "DROP TRIGGER refuse",
                    })
                    .await;
                }
            }
        }
    };
}

async fn sqlite_pool(folder: &tempfile::TempDir) -> sqlx::SqlitePool {
    let file = sqlx::sqlite::SqliteConnectOptions::new()
        .filename(folder.path().join("shop.db"))
        .journal_mode(sqlx::sqlite::SqliteJournalMode::Wal)
        .busy_timeout(Duration::from_secs(10))
        .create_if_missing(true);
    sqlx::SqlitePool::connect_with(file).await.unwrap()
}

ground!(
    sqlite,
    sqlx::Sqlite,
    tempfile::TempDir,
    tempfile::tempdir().unwrap(),
    sqlite_pool
);

#[cfg(feature = "postgres")]
async fn postgres_pool(database: &crate::support::database::Database) -> sqlx::PgPool {
    database.pool()
}

#[cfg(feature = "postgres")]
ground!(
    postgres,
    sqlx::Postgres,
    crate::support::database::Database,
    crate::support::database::Database::in_real_time(),
    postgres_pool
);

/// Writes one test per database: `name::sqlite` and `name::postgres`.
macro_rules! both {
    ($($(#[$meta:meta])* async fn $name:ident($ground:ident: Ground) $body:block)*) => { $(
        mod $name {
            mod on_sqlite {
                #[allow(unused_imports)]
                use super::super::*;
                #[allow(unused_imports)]
                use crate::ground::sqlite::{Db, Ground, IS_POSTGRES};

                $(#[$meta])*
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn sqlite() {
                    let $ground = Ground::new().await;
                    $body
                }
            }

            #[cfg(feature = "postgres")]
            mod on_postgres {
                #[allow(unused_imports)]
                use super::super::*;
                #[allow(unused_imports)]
                use crate::ground::postgres::{Db, Ground, IS_POSTGRES};

                $(#[$meta])*
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn postgres() {
                    let $ground = Ground::new().await;
                    $body
                }
            }
        }
    )* };
}
pub(crate) use both;

/// What the shop's handler was asked.
#[derive(Debug, Clone)]
pub struct Asked {
    pub headers: HeaderMap,
    pub body: Bytes,
}

/// A server behind this crate's layer. It charges once per run, and can be told to answer otherwise.
#[derive(Clone)]
pub struct Shop {
    state: Arc<ShopState>,
    app: Router,
}

struct ShopState {
    /// Runs of the handler.
    charges: Mutex<Vec<Asked>>,
    /// All that came in, also what was replayed or refused.
    requests: Mutex<Vec<Asked>>,
    /// Answers given before the layer, one per request.
    refusals: Mutex<Vec<Response<Body>>>,
    gate: Semaphore,
    is_down: AtomicBool,
    size: AtomicUsize,
}

impl Shop {
    pub fn new() -> Self {
        let state = Arc::new(ShopState {
            charges: Mutex::default(),
            requests: Mutex::default(),
            refusals: Mutex::default(),
            gate: Semaphore::new(Semaphore::MAX_PERMITS),
            is_down: AtomicBool::new(false),
            size: AtomicUsize::new(0),
        });
        let layer = IdempotencyLayer::new(MemoryStore::new()).single_tenant();
        let app = Router::new()
            .route("/charges", post(charge))
            .route("/payments", post(charge))
            .route_layer(layer)
            .layer(axum::middleware::from_fn_with_state(state.clone(), gate))
            .with_state(state.clone());
        Self { state, app }
    }

    /// A client with short waits and one attempt, whose server is down for nobody else.
    pub fn client(&self) -> Retry<Router> {
        self.retry().layer(self.app.clone())
    }

    pub fn retry(&self) -> RetryLayer {
        RetryLayer::new().retries(0)
    }

    pub fn app(&self) -> Router {
        self.app.clone()
    }

    pub fn charges(&self) -> Vec<Asked> {
        self.state.charges.lock().unwrap().clone()
    }

    pub fn requests(&self) -> Vec<Asked> {
        self.state.requests.lock().unwrap().clone()
    }

    /// The keys of all requests, each once.
    pub fn keys(&self) -> Vec<HeaderValue> {
        let mut keys: Vec<HeaderValue> = Vec::new();
        for asked in self.requests() {
            let key = asked.headers["idempotency-key"].clone();
            if !keys.contains(&key) {
                keys.push(key);
            }
        }
        keys
    }

    /// The next request gets this answer.
    pub fn refuse_next(&self, answer: impl IntoResponse) {
        let mut refusals = self.state.refusals.lock().unwrap();
        refusals.push(answer.into_response());
    }

    /// Every request gets 503 while it is down.
    pub fn is_down(&self, down: bool) {
        self.state.is_down.store(down, Ordering::SeqCst);
    }

    /// Runs stop after the charge.
    pub fn close_gate(&self) {
        self.state.gate.forget_permits(Semaphore::MAX_PERMITS);
    }

    pub fn open_gate(&self) {
        self.state.gate.add_permits(Semaphore::MAX_PERMITS);
    }

    /// How large its answers are from now on.
    pub fn answers_with(&self, bytes: usize) {
        self.state.size.store(bytes, Ordering::SeqCst);
    }
}

async fn gate(
    State(state): State<Arc<ShopState>>,
    request: axum::extract::Request,
    next: axum::middleware::Next,
) -> Response<Body> {
    let (head, body) = request.into_parts();
    let body = axum::body::to_bytes(body, usize::MAX).await.unwrap();
    state.requests.lock().unwrap().push(Asked {
        headers: head.headers.clone(),
        body: body.clone(),
    });
    let refusal = state.refusals.lock().unwrap().pop();
    if let Some(refusal) = refusal {
        return refusal;
    }
    if state.is_down.load(Ordering::SeqCst) {
        return StatusCode::SERVICE_UNAVAILABLE.into_response();
    }
    next.run(Request::from_parts(head, Body::from(body))).await
}

async fn charge(State(state): State<Arc<ShopState>>, request: Request<Body>) -> Response<Body> {
    let (head, body) = request.into_parts();
    let body = axum::body::to_bytes(body, usize::MAX).await.unwrap();
    let number = {
        let mut charges = state.charges.lock().unwrap();
        charges.push(Asked {
            headers: head.headers,
            body,
        });
        charges.len()
    };
    state.gate.acquire().await.unwrap().forget();
    state.gate.add_permits(1);
    let mut answer = format!("ch_{number}").into_bytes();
    answer.resize(answer.len().max(state.size.load(Ordering::SeqCst)), b'.');
    (StatusCode::CREATED, [("x-charge", "yes")], answer).into_response()
}

/// A charge of so much.
pub fn charge_of(amount: u32) -> Operation {
    Operation::post("http://pay.example/charges".parse().unwrap())
        .header(
            HeaderName::from_static("content-type"),
            HeaderValue::from_static("text/plain"),
        )
        .body(format!("{amount} baht"))
}

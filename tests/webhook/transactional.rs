//! With effect and record in one transaction, an event takes effect once however often its handler fails.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use axum::{
    Router,
    body::Body,
    extract::State,
    http::{Request, Response, StatusCode},
    response::IntoResponse,
    routing::post,
};
use bytes::Bytes;
use sqlx::{Sqlite, SqlitePool, sqlite::SqliteConnectOptions};
use tower_http::catch_panic::CatchPanicLayer;
use tower_idempotency::{
    Idempotency, IdempotencyLayer, Profile, Retain, SqliteStore, Tx, TxError,
    store::TransactionalStore,
};

use crate::support::*;

const TABLE: &str = "CREATE TABLE payments (event TEXT NOT NULL)";

fn delivery(event: &str) -> Request<Body> {
    let body = Body::from(format!("{{\"id\":\"{event}\"}}"));
    let request = Request::post("/webhooks").header("webhook-id", event);
    request.body(body).unwrap()
}

fn layers<
    S: TransactionalStore + tower_idempotency::store::Inspect + tower_idempotency::store::Checkpoints,
>(
    store: &S,
) -> [IdempotencyLayer<S>; 2] {
    let layer = IdempotencyLayer::new(store.clone())
        .single_tenant()
        .profile(Profile::Webhook)
        .transactional();
    [layer.clone(), layer.key_pointer("/id")]
}

/// How the run of this number ends, once it has had its effect.
fn ends(run: usize) -> StatusCode {
    match run {
        1 => StatusCode::INTERNAL_SERVER_ERROR,
        2 => panic!("as the test wants"),
        _ => StatusCode::OK,
    }
}

/// Delivers until it is done, and once more.
async fn deliver(app: Router, event: &str) {
    let mut statuses = Vec::new();
    for nth in 1..=5 {
        let answer = send(&app, delivery(event)).await;
        statuses.push(answer.status.as_u16());
        assert_eq!(answer.replay, nth > 3);
    }
    assert_eq!(statuses, [500, 500, 200, 200, 200]);
}

type Runs = Arc<AtomicUsize>;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_sqlite_a_handler_that_fails_twice_first_has_its_effect_once() {
    async fn book(
        State(runs): State<Runs>,
        idempotency: Idempotency,
        mut tx: Tx<Sqlite>,
    ) -> Result<StatusCode, TxError> {
        let event = idempotency.key().as_str().unwrap();
        let booked = sqlx::query("INSERT INTO payments (event) VALUES (?)").bind(event);
        booked.execute(&mut tx).await?;
        Ok(ends(runs.fetch_add(1, Ordering::SeqCst) + 1))
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("webhooks.db");
    let store = SqliteStore::open(&file).await.unwrap();
    let pool = SqlitePool::connect_with(SqliteConnectOptions::new().filename(&file))
        .await
        .unwrap();
    sqlx::query(TABLE).execute(&pool).await.unwrap();
    for (layer, event) in layers(&store).into_iter().zip(["evt_1", "evt_2"]) {
        let runs = Runs::default();
        let app = Router::new()
            .route("/webhooks", post(book))
            .route_layer(layer)
            .layer(CatchPanicLayer::new())
            .with_state(runs.clone());
        deliver(app, event).await;
        assert_eq!(runs.load(Ordering::SeqCst), 3);
        let count = sqlx::query_scalar("SELECT count(*) FROM payments WHERE event = ?");
        let booked: i64 = count.bind(event).fetch_one(&pool).await.unwrap();
        assert_eq!(booked, 1);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_member_a_transaction_is_an_ordinary_one() {
    async fn book(
        idempotency: Option<Idempotency>,
        mut tx: Tx<Sqlite>,
        body: String,
    ) -> Result<StatusCode, TxError> {
        assert!(idempotency.is_none());
        sqlx::query("INSERT INTO payments (event) VALUES (?)")
            .bind(&body)
            .execute(&mut tx)
            .await?;
        match body.contains("fail") {
            true => Ok(StatusCode::INTERNAL_SERVER_ERROR),
            false => Ok(StatusCode::OK),
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("webhooks.db");
    let store = SqliteStore::open(&file).await.unwrap();
    let pool = SqlitePool::connect_with(SqliteConnectOptions::new().filename(&file))
        .await
        .unwrap();
    sqlx::query(TABLE).execute(&pool).await.unwrap();
    let [_, by_member] = layers(&store);
    let app = Router::new()
        .route("/webhooks", post(book))
        .route_layer(by_member.optional());
    for (body, status) in [("{\"a\":\"fail\"}", 500), ("{\"a\":\"fine\"}", 200)] {
        let request = Request::post("/webhooks").body(Body::from(body)).unwrap();
        assert_eq!(send(&app, request).await.status, status);
    }
    let booked: Vec<String> = sqlx::query_scalar("SELECT event FROM payments")
        .fetch_all(&pool)
        .await
        .unwrap();
    assert_eq!(booked, ["{\"a\":\"fine\"}"]);
}

#[cfg(feature = "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_postgres_a_handler_that_fails_twice_first_has_its_effect_once() {
    use sqlx::Postgres;
    use tower_idempotency::PostgresStore;

    async fn book(
        State(runs): State<Runs>,
        idempotency: Idempotency,
        mut tx: Tx<Postgres>,
    ) -> Result<StatusCode, TxError> {
        let event = idempotency.key().as_str().unwrap();
        let booked = sqlx::query("INSERT INTO payments (event) VALUES ($1)").bind(event);
        booked.execute(&mut tx).await?;
        Ok(ends(runs.fetch_add(1, Ordering::SeqCst) + 1))
    }
    let database = database::Database::in_real_time();
    let pool = database.pool();
    sqlx::query(TABLE).execute(&pool).await.unwrap();
    let store = PostgresStore::options()
        .migrate()
        .open(pool.clone())
        .await
        .unwrap();
    for (layer, event) in layers(&store).into_iter().zip(["evt_1", "evt_2"]) {
        let runs = Runs::default();
        let app = Router::new()
            .route("/webhooks", post(book))
            .route_layer(layer)
            .layer(CatchPanicLayer::new())
            .with_state(runs.clone());
        deliver(app, event).await;
        assert_eq!(runs.load(Ordering::SeqCst), 3);
        let count = sqlx::query_scalar("SELECT count(*) FROM payments WHERE event = $1");
        let booked: i64 = count.bind(event).fetch_one(&pool).await.unwrap();
        assert_eq!(booked, 1);
    }
}

/// A file with the records and a table of payments, and all that is behind.
struct Ground {
    store: SqliteStore,
    pool: SqlitePool,
    _folder: tempfile::TempDir,
}

impl Ground {
    async fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("webhooks.db");
        let store = SqliteStore::open(&file).await.unwrap();
        let options = SqliteConnectOptions::new().filename(&file);
        let pool = SqlitePool::connect_with(options).await.unwrap();
        sqlx::query(TABLE).execute(&pool).await.unwrap();
        Self {
            store,
            pool,
            _folder: folder,
        }
    }

    async fn booked(&self) -> i64 {
        let count = sqlx::query_scalar("SELECT count(*) FROM payments");
        count.fetch_one(&self.pool).await.unwrap()
    }
}

/// Books, and answers as the run of this number does.
async fn answers_after_booking(
    ground: &Ground,
    layer: IdempotencyLayer<SqliteStore>,
    deliveries: usize,
    answer: fn(usize) -> Response<Body>,
) -> Vec<(u16, bool)> {
    let runs = Runs::default();
    let counted = runs.clone();
    let book = move |mut tx: Tx<Sqlite>| {
        let counted = counted.clone();
        async move {
            sqlx::query("INSERT INTO payments (event) VALUES ('e')")
                .execute(&mut tx)
                .await?;
            Ok::<_, TxError>(answer(counted.fetch_add(1, Ordering::SeqCst) + 1))
        }
    };
    let app = Router::new()
        .route("/webhooks", post(book))
        .route_layer(layer);
    let mut said = Vec::new();
    for _ in 0..deliveries {
        let answer = tower::ServiceExt::oneshot(app.clone(), delivery("evt_1"));
        let answer = answer.await.unwrap();
        let replay = tower_idempotency::IdempotentResponse::is_replay(&answer);
        said.push((answer.status().as_u16(), replay));
    }
    assert!(ground.booked().await <= 1);
    said
}

// L12
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_that_broke_off_is_rolled_back_and_the_event_runs_again() {
    let ground = Ground::new().await;
    let [layer, _] = layers(&ground.store);
    let said = answers_after_booking(&ground, layer, 3, |run| match run {
        1 => {
            let frames = [
                Ok(Bytes::from_static(b"a")),
                Err(std::io::Error::other("b")),
            ];
            Response::new(Body::from_stream(futures_util::stream::iter(frames)))
        }
        _ => Response::new(Body::from("done")),
    })
    .await;
    assert_eq!(said, [(503, false), (200, false), (200, true)]);
    assert_eq!(ground.booked().await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_2xx_that_says_it_is_not_done_is_a_contradiction_and_the_event_runs_again() {
    let ground = Ground::new().await;
    let [layer, _] = layers(&ground.store);
    let said = answers_after_booking(&ground, layer, 4, |run| match run {
        1 => (Retain::Release, "taken").into_response(),
        2 => (Retain::Abandon, "taken").into_response(),
        _ => "done".into_response(),
    })
    .await;
    assert_eq!(
        said,
        [(500, false), (500, false), (200, false), (200, true)]
    );
    assert_eq!(ground.booked().await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_inner_layer_by_member_has_a_transaction_of_its_own() {
    let ground = Ground::new().await;
    let [_, inner] = layers(&ground.store);
    let runs = Runs::default();
    async fn book(State(runs): State<Runs>, mut tx: Tx<Sqlite>) -> Result<StatusCode, TxError> {
        sqlx::query("INSERT INTO payments (event) VALUES ('e')")
            .execute(&mut tx)
            .await?;
        Ok(match runs.fetch_add(1, Ordering::SeqCst) {
            0 => StatusCode::INTERNAL_SERVER_ERROR,
            _ => StatusCode::OK,
        })
    }
    let outer = IdempotencyLayer::new(ground.store.clone());
    let app = Router::new()
        .route("/webhooks", post(book))
        .route_layer(inner)
        .route_layer(outer.single_tenant().optional().transactional())
        .with_state(runs);
    for (status, replay) in [(500, false), (200, false), (200, true)] {
        let answer = send(&app, delivery("evt_1")).await;
        assert_eq!((answer.status.as_u16(), answer.replay), (status, replay));
    }
    assert_eq!(ground.booked().await, 1);
}

/// Its effect may be there, so it is not run again; and it is no 2xx, since nobody knows.
#[cfg(feature = "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handler_that_ends_its_transaction_by_itself_is_not_run_again() {
    use sqlx::Postgres;
    use tower_idempotency::PostgresStore;

    async fn book(State(runs): State<Runs>, mut tx: Tx<Postgres>) -> Result<StatusCode, TxError> {
        runs.fetch_add(1, Ordering::SeqCst);
        sqlx::query("COMMIT")
            .execute(&mut *tx.connection().await?)
            .await?;
        Ok(StatusCode::OK)
    }
    let database = database::Database::in_real_time();
    let options = PostgresStore::options().migrate();
    let store = options.open(database.pool()).await.unwrap();
    let [layer, _] = layers(&store);
    let runs = Runs::default();
    let app = Router::new()
        .route("/webhooks", post(book))
        .route_layer(layer)
        .with_state(runs.clone());
    let misused = send(&app, delivery("evt_1")).await;
    assert_eq!(
        misused.said(),
        (500, "idempotency_transaction_misused".into())
    );
    for _ in 0..2 {
        let again = send(&app, delivery("evt_1")).await;
        assert_eq!(
            again.said(),
            (409, "idempotency_response_not_retained".into())
        );
        assert_eq!(again.header("retry-after"), None);
    }
    assert_eq!(runs.load(Ordering::SeqCst), 1);
}

/// Another process has the claim by the time this one wants to commit: what this one did is rolled back.
#[cfg(feature = "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn overtaken_it_is_told_to_come_back() {
    use sqlx::Postgres;
    use tokio::sync::Semaphore;
    use tower_idempotency::PostgresStore;

    let database = database::Database::in_real_time();
    let pool = database.pool();
    sqlx::query(TABLE).execute(&pool).await.unwrap();
    let options = PostgresStore::options().migrate();
    let [layer, _] = layers(&options.open(pool.clone()).await.unwrap());
    let (begun, gate) = (Arc::new(Semaphore::new(0)), Arc::new(Semaphore::new(0)));
    let gates = (begun.clone(), gate.clone());
    let book = move |mut tx: Tx<Postgres>| {
        let (begun, gate) = gates.clone();
        async move {
            let booked = sqlx::query("INSERT INTO payments (event) VALUES ('e')");
            booked.execute(&mut tx).await?;
            begun.add_permits(1);
            gate.acquire().await.unwrap().forget();
            Ok::<_, TxError>(StatusCode::OK)
        }
    };
    let app = Router::new()
        .route("/webhooks", post(book))
        .route_layer(layer);
    let held = spawn(&app, delivery("evt_1"));
    begun.acquire().await.unwrap().forget();
    let taken = sqlx::query("UPDATE idempotency_records SET token = $1").bind(&[7_u8; 16][..]);
    assert_eq!(taken.execute(&pool).await.unwrap().rows_affected(), 1);
    gate.add_permits(1);
    let answer = held.await.unwrap();
    assert_eq!(answer.said(), (503, "idempotency_in_flight".into()));
    let count = sqlx::query_scalar("SELECT count(*) FROM payments");
    let booked: i64 = count.fetch_one(&pool).await.unwrap();
    assert_eq!(booked, 0);
}

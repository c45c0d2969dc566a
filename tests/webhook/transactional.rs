//! With effect and record in one transaction, an event takes effect once however often its handler fails.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use axum::{
    Router,
    body::Body,
    extract::State,
    http::{Request, StatusCode},
    routing::post,
};
use sqlx::{Sqlite, SqlitePool, sqlite::SqliteConnectOptions};
use tower_http::catch_panic::CatchPanicLayer;
use tower_idempotency::{
    Idempotency, IdempotencyLayer, Profile, SqliteStore, Tx, TxError, store::TransactionalStore,
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

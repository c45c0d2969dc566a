//! What it costs to have effect and record committed together, beside the handler's own transaction
//! without a layer.
//!
//! ```sh
//! scripts/postgres cargo bench --features postgres --bench transactions
//! ```
//!
//! The handler changes one row of 10 000 and inserts another. Both sides take turns in short rounds; what
//! is printed is the median over the rounds. `BENCH_SECONDS` (1) is how long a round lasts, `BENCH_ROUNDS`
//! (5) how many there are. Let nothing else be at work in the database: its commits are counted.

use std::{
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use axum::{
    Router,
    body::Body,
    extract::State,
    http::{Request, StatusCode},
    routing::post,
};
use rand::RngExt;
use sqlx::{
    AssertSqlSafe, ConnectOptions, Connection, Executor, PgConnection, PgPool, Postgres, Sqlite,
    SqlitePool,
    postgres::{PgConnectOptions, PgPoolOptions},
    sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
};
use tower::ServiceExt;
use tower_idempotency::{IdempotencyLayer, PostgresStore, SqliteStore, Token, Tx, TxError};

const ACCOUNTS: i64 = 10_000;
const CONCURRENCY: [usize; 3] = [1, 16, 64];

const TABLES: &str = "CREATE TABLE accounts (id BIGINT PRIMARY KEY, balance BIGINT NOT NULL);
    CREATE TABLE entries (account BIGINT NOT NULL, amount BIGINT NOT NULL)";

fn account() -> i64 {
    rand::rng().random_range(1..=ACCOUNTS)
}

async fn deposit_in_postgres(connection: &mut PgConnection) -> Result<(), sqlx::Error> {
    let account = account();
    sqlx::query("UPDATE accounts SET balance = balance + 1 WHERE id = $1")
        .bind(account)
        .execute(&mut *connection)
        .await?;
    sqlx::query("INSERT INTO entries (account, amount) VALUES ($1, 1)")
        .bind(account)
        .execute(connection)
        .await?;
    Ok(())
}

async fn postgres_by_itself(State(pool): State<PgPool>) -> Result<StatusCode, TxError> {
    let mut transaction = pool.begin().await?;
    deposit_in_postgres(&mut transaction).await?;
    transaction.commit().await?;
    Ok(StatusCode::CREATED)
}

async fn postgres_with_record(mut tx: Tx<Postgres>) -> Result<StatusCode, TxError> {
    deposit_in_postgres(&mut *tx.connection().await?).await?;
    Ok(StatusCode::CREATED)
}

async fn deposit_in_sqlite(connection: &mut sqlx::SqliteConnection) -> Result<(), sqlx::Error> {
    let account = account();
    sqlx::query("UPDATE accounts SET balance = balance + 1 WHERE id = $1")
        .bind(account)
        .execute(&mut *connection)
        .await?;
    sqlx::query("INSERT INTO entries (account, amount) VALUES ($1, 1)")
        .bind(account)
        .execute(connection)
        .await?;
    Ok(())
}

async fn sqlite_by_itself(State(pool): State<SqlitePool>) -> Result<StatusCode, TxError> {
    let mut transaction = pool.begin_with("BEGIN IMMEDIATE").await?;
    deposit_in_sqlite(&mut transaction).await?;
    transaction.commit().await?;
    Ok(StatusCode::CREATED)
}

async fn sqlite_with_record(mut tx: Tx<Sqlite>) -> Result<StatusCode, TxError> {
    deposit_in_sqlite(&mut *tx.connection().await?).await?;
    Ok(StatusCode::CREATED)
}

/// Sends requests from this many tasks; answers how many were carried out per second.
async fn load(app: &Router, tasks: usize, time: Duration) -> f64 {
    let stop = Arc::new(AtomicBool::new(false));
    let done = Arc::new(AtomicU64::new(0));
    let begun = Instant::now();
    let tasks: Vec<_> = (0..tasks)
        .map(|_| {
            let (app, stop, done) = (app.clone(), stop.clone(), done.clone());
            tokio::spawn(async move {
                while !stop.load(Ordering::Relaxed) {
                    request(&app).await;
                    done.fetch_add(1, Ordering::Relaxed);
                }
            })
        })
        .collect();
    tokio::time::sleep(time).await;
    stop.store(true, Ordering::Relaxed);
    for task in tasks {
        task.await.expect("a request failed");
    }
    rate(done.load(Ordering::Relaxed), begun.elapsed())
}

#[expect(clippy::cast_precision_loss, reason = "these are small")]
fn rate(number: u64, time: Duration) -> f64 {
    number as f64 / time.as_secs_f64()
}

async fn request(app: &Router) {
    let key = u128::from_be_bytes(*Token::random().as_bytes());
    let request = Request::post("/deposits")
        .header("idempotency-key", format!("{key:032x}"))
        .body(Body::from("one satang"))
        .expect("a request");
    let Ok(response) = app.clone().oneshot(request).await;
    assert_eq!(response.status(), StatusCode::CREATED);
}

fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers[numbers.len() / 2]
}

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| value.parse().expect(name))
}

/// Both sides in turns, at each concurrency.
async fn compare(name: &str, by_itself: &Router, with_record: &Router) {
    let time = Duration::from_secs(setting("BENCH_SECONDS", 1));
    let rounds = setting("BENCH_ROUNDS", 5);
    for tasks in CONCURRENCY {
        let (mut alone, mut together, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..rounds {
            let (one, other) = (
                load(by_itself, tasks, time).await,
                load(with_record, tasks, time).await,
            );
            ratios.push(other / one);
            alone.push(one);
            together.push(other);
        }
        println!(
            "| {name} | {tasks} | {:.0} | {:.0} | {:.2} × |",
            median(alone),
            median(together),
            median(ratios)
        );
    }
}

/// Statements a client has sent: what its messages are is in
/// <https://www.postgresql.org/docs/current/protocol-message-formats.html>.
#[derive(Default)]
struct Counted {
    statements: AtomicU64,
}

/// Passes on what a client sends, until either side ends.
async fn count_messages(
    client: &mut OwnedReadHalf,
    server: &mut OwnedWriteHalf,
    counts: &Counted,
) -> std::io::Result<()> {
    // The first message has no kind before its length.
    let mut head = vec![0; 4];
    loop {
        client.read_exact(&mut head).await?;
        let (kind, length) = head.split_at(head.len() - 4);
        // A simple query, or the execution of a prepared one.
        if matches!(kind, b"Q" | b"E") {
            counts.statements.fetch_add(1, Ordering::Relaxed);
        }
        let length = length
            .iter()
            .fold(0, |length, byte| length << 8 | usize::from(*byte));
        let mut message = head.clone();
        message.resize(kind.len() + length, 0);
        client.read_exact(&mut message[head.len()..]).await?;
        server.write_all(&message).await?;
        head = vec![0; 5];
    }
}

/// Hands connections on to the server and counts what is asked of it.
async fn counting(server: String) -> (u16, Arc<Counted>) {
    let counted = Arc::new(Counted::default());
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("an address").port();
    let counts = counted.clone();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let server = TcpStream::connect(&server).await.expect("the server");
            server.set_nodelay(true).expect("a socket");
            client.set_nodelay(true).expect("a socket");
            let (mut from_server, mut to_server) = server.into_split();
            let (mut from_client, mut to_client) = client.into_split();
            let counts = counts.clone();
            tokio::spawn(async move { tokio::io::copy(&mut from_server, &mut to_client).await });
            tokio::spawn(
                async move { count_messages(&mut from_client, &mut to_server, &counts).await },
            );
        }
    });
    (port, counted)
}

async fn commits(connection: &mut PgConnection) -> i64 {
    sqlx::query_scalar(
        "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()",
    )
    .fetch_one(connection)
    .await
    .expect("a number")
}

/// A session tells its numbers after a transaction, if it has not done so for a second.
async fn tell_numbers(app: &Router, requests: u32) {
    tokio::time::sleep(Duration::from_millis(1_200)).await;
    for _ in 0..requests {
        request(app).await;
    }
    tokio::time::sleep(Duration::from_millis(200)).await;
}

/// Statements and commits of one request, over many sent one after the other.
async fn count(app: &Router, counted: &Counted, connection: &mut PgConnection) -> (f64, f64) {
    const REQUESTS: u32 = 1_000;
    const TELLING: u32 = 8;
    for _ in 0..100 {
        request(app).await;
    }
    tell_numbers(app, TELLING).await;
    let before = commits(connection).await;
    let statements = counted.statements.load(Ordering::Relaxed);
    for _ in 0..REQUESTS {
        request(app).await;
    }
    tell_numbers(app, TELLING).await;
    let statements = counted.statements.load(Ordering::Relaxed) - statements;
    let commits = commits(connection).await - before;
    let requests = Duration::from_secs((REQUESTS + TELLING).into());
    let commits = u64::try_from(commits).unwrap_or(0);
    (rate(statements, requests), rate(commits, requests))
}

async fn postgres() {
    let url = std::env::var("DATABASE_URL").expect("DATABASE_URL: run this with scripts/postgres");
    let options: PgConnectOptions = url.parse().expect("DATABASE_URL");
    let options = options.disable_statement_logging();
    let mut connection = options.connect().await.expect("the server");
    let schema = format!(
        "bench_{:032x}",
        u128::from_be_bytes(*Token::random().as_bytes())
    );
    let tables = format!(
        "CREATE SCHEMA {schema}; SET search_path = {schema}; {TABLES};
         INSERT INTO accounts SELECT i, 0 FROM generate_series(1, {ACCOUNTS}) i; ANALYZE accounts"
    );
    connection
        .execute(sqlx::raw_sql(AssertSqlSafe(tables)))
        .await
        .expect("tables");

    let options = options.options([("search_path", &schema)]);
    let server = format!("{}:{}", options.get_host(), options.get_port());
    let (port, counted) = counting(server).await;
    let pool = |options: PgConnectOptions| {
        PgPoolOptions::new()
            .max_connections(32)
            .test_before_acquire(false)
            .connect_lazy_with(options)
    };
    let (direct, through) = (
        pool(options.clone()),
        pool(options.host("127.0.0.1").port(port)),
    );
    let sides = |pool: PgPool| async move {
        let store = PostgresStore::options()
            .migrate()
            .open(pool.clone())
            .await
            .expect("a store");
        let layer = IdempotencyLayer::new(store).single_tenant().transactional();
        let by_itself = Router::new()
            .route("/deposits", post(postgres_by_itself))
            .with_state(pool);
        let with_record = Router::new()
            .route("/deposits", post(postgres_with_record))
            .route_layer(layer);
        (by_itself, with_record)
    };
    let (by_itself, with_record) = sides(direct).await;
    compare("Postgres", &by_itself, &with_record).await;
    let (by_itself, with_record) = sides(through).await;
    let alone = count(&by_itself, &counted, &mut connection).await;
    let together = count(&with_record, &counted, &mut connection).await;
    println!(
        "Postgres, one after the other: {:.2} statements and {:.2} commits by itself, {:.2} and {:.2} with the record",
        alone.0, alone.1, together.0, together.1
    );
    let drop = AssertSqlSafe(format!("DROP SCHEMA {schema} CASCADE"));
    connection
        .execute(sqlx::raw_sql(drop))
        .await
        .expect("dropped");
}

async fn sqlite() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder");
    let file = folder.path().join("bench.db");
    let options = SqliteConnectOptions::new()
        .filename(&file)
        .create_if_missing(true)
        .journal_mode(SqliteJournalMode::Wal)
        .synchronous(SqliteSynchronous::Full)
        .busy_timeout(Duration::from_secs(30));
    let mut connection = options.connect().await.expect("a file");
    let tables = format!(
        "{TABLES}; INSERT INTO accounts WITH RECURSIVE n (i) AS (
             SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {ACCOUNTS}) SELECT i, 0 FROM n"
    );
    connection
        .execute(sqlx::raw_sql(AssertSqlSafe(tables)))
        .await
        .expect("tables");
    connection.close().await.expect("closed");
    // One connection: SQLite has one writer, and who waits for it in a pool is served in turn.
    let pool = SqlitePoolOptions::new()
        .max_connections(1)
        .connect_lazy_with(options);
    let store = SqliteStore::open(&file).await.expect("a store");
    let layer = IdempotencyLayer::new(store.clone())
        .single_tenant()
        .transactional();
    let by_itself = Router::new()
        .route("/deposits", post(sqlite_by_itself))
        .with_state(pool);
    let with_record = Router::new()
        .route("/deposits", post(sqlite_with_record))
        .route_layer(layer);
    compare("SQLite", &by_itself, &with_record).await;
    let before = store.grouping().batches;
    for _ in 0..1_000 {
        request(&with_record).await;
    }
    let per = rate(
        store.grouping().batches - before,
        Duration::from_secs(1_000),
    );
    println!("SQLite, one after the other: {per:.2} commits beside that of the transaction");
}

/// In spawned tasks, as a server would run it.
async fn spawned(what: impl Future<Output = ()> + Send + 'static) {
    tokio::spawn(what).await.expect("a bench");
}

fn main() {
    // `cargo test` runs benches too, to see whether they can be built.
    if !std::env::args().any(|argument| argument == "--bench") {
        return;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    runtime.block_on(async {
        println!("| database | at once | requests/s by itself | with the record | ratio |");
        println!("| --- | --- | --- | --- | --- |");
        spawned(postgres()).await;
        spawned(sqlite()).await;
    });
}

//! Consumers in processes of their own, killed in the middle of a message, and the redelivery.

use std::{
    path::{Path, PathBuf},
    process::Stdio,
    time::{Duration, Instant},
};

use sqlx::{Sqlite, SqlitePool};
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::Command,
    time::sleep,
};
use tower_idempotency::{
    CheckpointError, Done, Failure, Fingerprint, Idempotency, IdempotencyKey, IdempotencyLayer,
    Once, OnceError, Recovery, Rejection, Scope, SqliteStore, Tx,
};

const FILE: &str = "TEST_ONCE_FILE";
const PART: &str = "TEST_ONCE_PART";

const LEASE: Duration = Duration::from_millis(400);

/// Where the service has its tables, the store its records, and, for want of a real one, the provider its books.
async fn ground() -> (tempfile::TempDir, PathBuf, SqlitePool) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("service.db");
    SqliteStore::open(&file).await.unwrap();
    let pool = SqlitePool::connect(file.to_str().unwrap()).await.unwrap();
    let tables = "CREATE TABLE bookings (message TEXT);
        CREATE TABLE asked (key TEXT);
        CREATE TABLE charges (key TEXT PRIMARY KEY);";
    sqlx::raw_sql(tables).execute(&pool).await.unwrap();
    (folder, file, pool)
}

async fn count(pool: &SqlitePool, table: &str) -> i64 {
    let count = sqlx::AssertSqlSafe(format!("SELECT count(*) FROM {table}"));
    sqlx::query_scalar(count).fetch_one(pool).await.unwrap()
}

/// A consumer, as each process has one.
#[derive(Clone)]
struct Consumer {
    once: Once<SqliteStore>,
    pool: SqlitePool,
    /// It says so in the middle of its work, and goes no further.
    holds: bool,
}

impl Consumer {
    async fn open(file: &Path, holds: bool) -> Self {
        let layer = IdempotencyLayer::new(SqliteStore::open(file).await.unwrap())
            .lease(LEASE)
            .recovery(Recovery::rerun())
            .downstream_secret([7; 32])
            .transactional();
        let pool = SqlitePool::connect(file.to_str().unwrap()).await.unwrap();
        let once = Once::new(layer);
        Self { once, pool, holds }
    }

    async fn middle(&self) {
        if self.holds {
            println!("in the middle");
            std::future::pending().await
        }
    }

    /// Booked in a transaction.
    async fn book(&self) -> Result<Done<String>, OnceError<sqlx::Error>> {
        let this = self.clone();
        let operation = move |mut tx: Tx<Sqlite>| {
            let this = this.clone();
            async move {
                let booking = sqlx::query("INSERT INTO bookings VALUES ('message-1')");
                booking.execute(&mut tx).await?;
                this.middle().await;
                Ok("booked".to_owned())
            }
        };
        let (scope, key, fingerprint) = message();
        self.once.run_in(scope, key, fingerprint, operation).await
    }

    /// Charged by a provider, which knows a key that comes again.
    async fn charge(&self) -> Result<Done<String>, OnceError<CheckpointError>> {
        let this = self.clone();
        let operation = |run: Idempotency| async move {
            let order: String = match run.checkpointed("order").await? {
                Some(order) => order,
                None => {
                    let order = format!("order of run {}", run.attempt());
                    run.checkpoint("order", &order).await?;
                    order
                }
            };
            let key = run.downstream_key("charge").unwrap();
            for asks in [
                "INSERT INTO asked VALUES (?1)",
                "INSERT OR IGNORE INTO charges VALUES (?1)",
            ] {
                sqlx::query(asks)
                    .bind(key.as_str())
                    .execute(&this.pool)
                    .await
                    .unwrap();
            }
            this.middle().await;
            Ok::<_, Failure<CheckpointError>>(order)
        };
        let (scope, key, fingerprint) = message();
        self.once.run_with(scope, key, fingerprint, operation).await
    }

    /// Dies of it.
    async fn die(&self) -> Result<Done<String>, OnceError<CheckpointError>> {
        let operation = || async {
            println!("in the middle");
            std::process::abort()
        };
        let (scope, key, fingerprint) = message();
        self.once.run(scope, key, fingerprint, operation).await
    }
}

fn message() -> (Scope, IdempotencyKey, Fingerprint) {
    let key = IdempotencyKey::new("message-1");
    (Scope::new("payouts"), key, Fingerprint::of(["A"]))
}

/// Delivers until it is not refused as in flight.
async fn redelivered<E: std::fmt::Debug>(
    mut deliver: impl AsyncFnMut() -> Result<Done<String>, OnceError<E>>,
) -> Result<Done<String>, OnceError<E>> {
    let begun = Instant::now();
    loop {
        match deliver().await {
            Err(OnceError::Refused(Rejection::InFlight { .. })) => {
                assert!(
                    begun.elapsed() < Duration::from_secs(10),
                    "in flight for good"
                );
                sleep(Duration::from_millis(20)).await;
            }
            ended => return ended,
        }
    }
}

/// This test binary once more; answers once it is in the middle, or false when it has ended before.
async fn consumes(part: &str, file: &Path) -> (tokio::process::Child, bool) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args([
            "--exact",
            "killed::this_binary_also_plays_the_consumer",
            "--nocapture",
        ])
        .env(PART, part)
        .env(FILE, file)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true);
    let mut child = command.spawn().unwrap();
    let mut said = BufReader::new(child.stdout.take().unwrap()).lines();
    while let Some(line) = said.next_line().await.unwrap() {
        if line.contains("in the middle") {
            return (child, true);
        }
    }
    (child, false)
}

async fn killed_in_the_middle(part: &str, file: &Path) {
    let (mut child, begun) = consumes(part, file).await;
    assert!(begun, "it has not come to its work");
    child.kill().await.unwrap();
}

// L11
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transactional_operation_whose_process_is_killed_has_its_effect_once() {
    let (_folder, file, pool) = ground().await;
    killed_in_the_middle("book", &file).await;
    assert_eq!(count(&pool, "bookings").await, 0);
    let consumer = Consumer::open(&file, false).await;
    let done = redelivered(async || consumer.book().await).await.unwrap();
    assert_eq!((done.value.as_str(), done.replayed), ("booked", false));
    assert!(consumer.book().await.unwrap().replayed);
    assert_eq!(count(&pool, "bookings").await, 1);
}

// L11
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_operation_in_steps_whose_process_is_killed_goes_on_and_is_charged_once() {
    let (_folder, file, pool) = ground().await;
    killed_in_the_middle("charge", &file).await;
    let consumer = Consumer::open(&file, false).await;
    let done = redelivered(async || consumer.charge().await).await.unwrap();
    assert_eq!(
        (done.value.as_str(), done.replayed),
        ("order of run 1", false)
    );
    assert!(consumer.charge().await.unwrap().replayed);
    assert_eq!(
        (count(&pool, "asked").await, count(&pool, "charges").await),
        (2, 1)
    );
}

// Y3
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_that_kills_its_consumer_each_time_kills_three_and_is_refused() {
    let (_folder, file, _) = ground().await;
    for _ in 0..3 {
        let (mut child, begun) = consumes("die", &file).await;
        assert!(begun, "it was refused too early");
        assert!(!child.wait().await.unwrap().success());
    }
    let consumer = Consumer::open(&file, false).await;
    let refused = redelivered(async || consumer.die().await)
        .await
        .unwrap_err();
    assert!(
        matches!(
            refused,
            OnceError::Refused(Rejection::OutcomeUnknown { .. })
        ),
        "{refused:?}"
    );
}

/// Not a test: a consumer, when one of the tests above starts it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn this_binary_also_plays_the_consumer() {
    let (Ok(part), Some(file)) = (std::env::var(PART), std::env::var_os(FILE)) else {
        return;
    };
    let consumer = Consumer::open(Path::new(&file), true).await;
    match part.as_str() {
        "book" => drop(redelivered(async || consumer.book().await).await),
        "charge" => drop(redelivered(async || consumer.charge().await).await),
        "die" => drop(redelivered(async || consumer.die().await).await),
        other => panic!("{other} is no part"),
    }
}

//! The file, the writer and what goes wrong with them. That the store keeps the contract is for the
//! conformance suite; that it agrees with the protocol, for `tests/agreement.rs`.

use std::{
    fs,
    io::{Seek, SeekFrom, Write},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicI64, Ordering},
    },
    time::Duration,
};

use http::StatusCode;
use sqlx::{Connection, SqliteConnection, sqlite::SqliteConnectOptions};
use tempfile::TempDir;
use tokio::task::JoinSet;

use super::*;
use crate::{IdempotencyKey, Scope, record::Fingerprint, testing::FakeClock};

#[cfg(feature = "testing")]
mod conformance;
mod holding;
mod joining;
mod turns;

/// A clock that stands until it is set.
#[derive(Debug, Clone, Default)]
struct Hand(Arc<AtomicI64>);

impl Hand {
    fn advance(&self, by: Duration) {
        let micros = i64::try_from(by.as_micros()).unwrap();
        self.0.fetch_add(micros, Ordering::SeqCst);
    }
}

impl Clock for Hand {
    fn now(&self) -> Timestamp {
        Timestamp::from_micros(self.0.load(Ordering::SeqCst))
    }
}

fn place() -> (TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("idempotency.db");
    (directory, path)
}

/// A file that a store has made and closed.
async fn closed_store() -> (TempDir, PathBuf) {
    let (directory, path) = place();
    SqliteStore::open(&path)
        .await
        .unwrap()
        .close()
        .await
        .unwrap();
    (directory, path)
}

fn request(key: impl AsRef<[u8]>) -> ClaimRequest {
    let id = RecordId::new(Scope::shared(), IdempotencyKey::new(key));
    ClaimRequest::new(id, "test", Fingerprint::from_bytes([7; 32]))
}

async fn win(store: &SqliteStore, key: impl AsRef<[u8]>) -> Ticket {
    match store.claim(request(key)).await.unwrap() {
        Claim::Won(ticket) => ticket,
        other => panic!("not won: {other:?}"),
    }
}

async fn complete(store: &SqliteStore, ticket: &Ticket) -> Result<Settled, StoreError> {
    let done = Completion::retained(StatusCode::CREATED, Bytes::from_static(b"made"));
    let lifetimes = Lifetimes::new(Duration::from_secs(3600));
    store.complete(ticket, done, lifetimes).await
}

/// Works on the file as somebody else would.
async fn other(path: &Path) -> SqliteConnection {
    let options = SqliteConnectOptions::new()
        .filename(path)
        .create_if_missing(true);
    SqliteConnection::connect_with(&options).await.unwrap()
}

async fn execute(path: &Path, statements: &'static str) {
    let mut connection = other(path).await;
    sqlx::raw_sql(statements)
        .execute(&mut connection)
        .await
        .unwrap();
    connection.close().await.unwrap();
}

async fn scalar(path: &Path, query: &'static str) -> i64 {
    let mut connection = other(path).await;
    sqlx::query_scalar(query)
        .fetch_one(&mut connection)
        .await
        .unwrap()
}

async fn refusal(path: &Path) -> StoreError {
    let options = SqliteStore::options(path).busy_timeout(Duration::from_millis(200));
    options.open().await.unwrap_err()
}

#[tokio::test(flavor = "multi_thread")]
async fn eight_openers_of_a_new_file_at_once_all_succeed() {
    for journal in [Journal::Wal, Journal::Delete] {
        let (_directory, path) = place();
        let mut openers = JoinSet::new();
        for _ in 0..8 {
            openers.spawn(SqliteStore::options(&path).journal(journal).open());
        }
        let stores: Vec<_> = openers
            .join_all()
            .await
            .into_iter()
            .map(Result::unwrap)
            .collect();
        for (n, store) in stores.iter().enumerate() {
            let _ = win(store, [n as u8]).await;
        }
        assert_eq!(stores[0].counts().await.unwrap().running, 8);
    }
}

#[tokio::test]
async fn a_foreign_table_is_refused_and_left_alone() {
    let (_directory, path) = place();
    execute(
        &path,
        "CREATE TABLE idempotency_records (id TEXT); INSERT INTO idempotency_records VALUES ('a')",
    )
    .await;
    let error = refusal(&path).await;
    assert_eq!(error.kind(), StoreErrorKind::Schema);
    assert!(error.to_string().contains("not this crate's"), "{error}");
    assert_eq!(
        scalar(&path, "SELECT count(*) FROM idempotency_records").await,
        1
    );
    assert_eq!(scalar(&path, "SELECT count(*) FROM sqlite_schema").await, 1);
}

#[tokio::test]
async fn changed_tables_are_refused() {
    for change in [
        "ALTER TABLE idempotency_records ADD COLUMN more TEXT",
        "DROP TRIGGER idempotency_record_removed",
        "DROP INDEX idempotency_records_due",
        "DELETE FROM idempotency_meta WHERE name = 'schema'",
        "DROP TABLE idempotency_meta",
    ] {
        let (_directory, path) = place();
        SqliteStore::open(&path)
            .await
            .unwrap()
            .close()
            .await
            .unwrap();
        execute(&path, change).await;
        assert_eq!(
            refusal(&path).await.kind(),
            StoreErrorKind::Schema,
            "{change}"
        );
    }
}

#[tokio::test]
async fn a_newer_schema_is_refused() {
    let (_directory, path) = closed_store().await;
    execute(&path, "UPDATE idempotency_meta SET value = 2 WHERE name = 'schema'; CREATE TABLE idempotency_news (a)").await;
    let error = refusal(&path).await;
    assert_eq!(error.kind(), StoreErrorKind::Schema);
    assert!(error.to_string().contains("newer version"), "{error}");
}

#[tokio::test]
async fn tables_beside_ours_do_not_matter() {
    let (_directory, path) = place();
    execute(&path, "CREATE TABLE payments (id INTEGER PRIMARY KEY)").await;
    SqliteStore::open(&path)
        .await
        .unwrap()
        .close()
        .await
        .unwrap();
    execute(
        &path,
        "CREATE INDEX mine ON idempotency_records (completed)",
    )
    .await;
    let _ = win(&SqliteStore::open(&path).await.unwrap(), "k").await;
}

#[tokio::test]
async fn a_file_that_may_not_be_written_is_refused() {
    let (_directory, path) = place();
    let store = SqliteStore::options(&path)
        .journal(Journal::Delete)
        .open()
        .await
        .unwrap();
    store.close().await.unwrap();
    // A write version SQLite does not know makes it open the file to read only, and unlike file
    // permissions it does so for root too (https://www.sqlite.org/fileformat2.html#file_format_version_numbers).
    let mut file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.seek(SeekFrom::Start(18)).unwrap();
    file.write_all(&[9]).unwrap();
    let error = refusal(&path).await;
    assert_eq!(error.kind(), StoreErrorKind::Schema);
    assert!(error.to_string().contains("may not be written"), "{error}");
}

#[tokio::test]
async fn a_file_that_is_no_database_is_refused_and_left_alone() {
    let (_directory, path) = place();
    let text = "not a database, but long enough to be looked at. ".repeat(200);
    fs::write(&path, &text).unwrap();
    let error = refusal(&path).await;
    assert_eq!(error.kind(), StoreErrorKind::Schema);
    assert!(
        error.to_string().contains("not an SQLite database"),
        "{error}"
    );
    assert_eq!(fs::read_to_string(&path).unwrap(), text);
}

#[tokio::test]
async fn paths_that_cannot_be_opened_are_refused() {
    let (directory, path) = place();
    for path in [
        directory.path(),
        &path.join("no/such/directory"),
        Path::new(""),
    ] {
        assert_eq!(refusal(path).await.kind(), StoreErrorKind::Unavailable);
    }
    let error = refusal(Path::new(":memory:")).await;
    assert!(error.to_string().contains("MemoryStore"), "{error}");
}

#[test]
fn without_a_runtime_opening_fails_instead_of_panicking() {
    let (_directory, path) = place();
    let opened = std::pin::pin!(SqliteStore::open(&path))
        .poll(&mut std::task::Context::from_waker(std::task::Waker::noop()));
    assert!(matches!(opened, std::task::Poll::Ready(Err(_))));
}

#[tokio::test]
async fn records_survive_closing_and_opening_again() {
    for journal in [Journal::Wal, Journal::Delete] {
        let (_directory, path) = place();
        let options = SqliteStore::options(&path).journal(journal);
        let store = options.clone().open().await.unwrap();
        let ticket = win(&store, b"\0\xff").await;
        assert_eq!(complete(&store, &ticket).await.unwrap(), Settled::Done);
        let before = store.get(&ticket.id).await.unwrap().unwrap();
        store.close().await.unwrap();
        let store = options.open().await.unwrap();
        assert_eq!(store.get(&ticket.id).await.unwrap(), Some(before));
        assert!(matches!(
            store.claim(request(b"\0\xff")).await,
            Ok(Claim::Completed(_))
        ));
    }
}

#[tokio::test]
async fn dropping_the_last_handle_ends_the_writer_and_its_connection() {
    let (_directory, path) = place();
    let store = SqliteStore::open(&path).await.unwrap();
    let ticket = win(&store, "k").await;
    let wal = path.with_file_name("idempotency.db-wal");
    assert!(wal.exists());
    drop(store);
    // The log goes with the last connection.
    while wal.exists() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    // The lease was not given up: its owner is believed alive until it lapses.
    let store = SqliteStore::open(&path).await.unwrap();
    let mut again = request("k");
    again.replaces = Some(ticket.token);
    assert!(matches!(store.claim(again).await, Ok(Claim::InFlight(_))));
}

/// Set in the process that is to crash.
const CRASH: &str = "TOWER_IDEMPOTENCY_TEST_CRASH";

#[tokio::test]
async fn a_process_that_crashes_leaves_its_records_and_a_lease_that_lapses() {
    if let Some(path) = std::env::var_os(CRASH) {
        let store = SqliteStore::open(path).await.unwrap();
        let ticket = win(&store, "completed").await;
        assert_eq!(complete(&store, &ticket).await.unwrap(), Settled::Done);
        let _ = win(&store, "running").await;
        std::process::abort();
    }
    let (_directory, path) = place();
    let name =
        "store::sqlite::tests::a_process_that_crashes_leaves_its_records_and_a_lease_that_lapses";
    let crashed = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name])
        .env(CRASH, &path)
        .output()
        .unwrap();
    assert_eq!(crashed.status.code(), None, "it was to end by a signal");
    let store = SqliteStore::open(&path).await.unwrap();
    let completed = store.claim(request("completed")).await.unwrap();
    assert!(matches!(completed, Claim::Completed(_)), "{completed:?}");
    let held = store.claim(request("running")).await.unwrap();
    assert!(matches!(held, Claim::InFlight(_)), "{held:?}");
    execute(
        &path,
        "UPDATE idempotency_owners SET alive_until = alive_until - 30000000",
    )
    .await;
    let abandoned = store.claim(request("running")).await.unwrap();
    assert!(matches!(abandoned, Claim::Abandoned(_)), "{abandoned:?}");
}

/// Writes in a loop with hardly a moment between two transactions, the first of which is open when this
/// returns.
async fn busy_neighbour(path: PathBuf, stop: Arc<AtomicBool>) -> std::thread::JoinHandle<usize> {
    let (open, is_open) = tokio::sync::oneshot::channel();
    let neighbour = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap();
        runtime.block_on(async {
            let mut connection = other(&path).await;
            let mut open = Some(open);
            let mut rounds = 0;
            while !stop.load(Ordering::SeqCst) {
                let begin = "BEGIN IMMEDIATE; INSERT INTO neighbour VALUES (1)";
                sqlx::raw_sql(begin).execute(&mut connection).await.unwrap();
                if let Some(open) = open.take() {
                    open.send(()).unwrap();
                }
                std::thread::sleep(Duration::from_millis(5));
                sqlx::raw_sql("COMMIT")
                    .execute(&mut connection)
                    .await
                    .unwrap();
                rounds += 1;
            }
            rounds
        })
    });
    is_open.await.unwrap();
    neighbour
}

#[tokio::test(flavor = "multi_thread")]
async fn a_neighbour_that_writes_in_a_loop_makes_no_claim_fail() {
    for journal in [Journal::Wal, Journal::Delete] {
        let (_directory, path) = place();
        let options = SqliteStore::options(&path).journal(journal);
        let store = options
            .busy_timeout(Duration::from_secs(30))
            .open()
            .await
            .unwrap();
        execute(&path, "CREATE TABLE neighbour (n INTEGER)").await;
        let stop = Arc::new(AtomicBool::new(false));
        let neighbour = busy_neighbour(path, stop.clone()).await;
        let mut claims = JoinSet::new();
        for n in 0..250_u8 {
            let store = store.clone();
            let key = if n < 200 { vec![n] } else { b"one".to_vec() };
            claims.spawn(async move { store.claim(request(key)).await });
        }
        let claims = claims.join_all().await;
        stop.store(true, Ordering::SeqCst);
        assert!(neighbour.join().unwrap() > 0);
        let won = claims
            .iter()
            .filter(|claim| matches!(claim, Ok(Claim::Won(_))));
        assert_eq!(won.count(), 201, "{journal:?}");
        assert!(claims.iter().all(Result::is_ok), "{journal:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn two_instances_over_the_same_keys_in_different_orders_agree_on_the_winners() {
    for journal in [Journal::Wal, Journal::Delete] {
        let (_directory, path) = place();
        let options = SqliteStore::options(&path).journal(journal);
        let options = options.busy_timeout(Duration::from_secs(30));
        let (one, two) = (options.clone().open().await, options.open().await);
        let stores = [one.unwrap(), two.unwrap()];
        let mut runs = JoinSet::new();
        for n in 0..400_u32 {
            let store = stores[n as usize % 2].clone();
            let key = if n % 2 == 0 { n / 2 } else { 199 - n / 2 };
            runs.spawn(async move {
                match store.claim(request(key.to_be_bytes())).await.unwrap() {
                    Claim::Won(ticket) => {
                        let settled = complete(&store, &ticket).await.unwrap();
                        assert_eq!(settled, Settled::Done);
                        1
                    }
                    Claim::InFlight(_) | Claim::Completed(_) => 0,
                    Claim::Abandoned(held) => panic!("both are alive: {held:?}"),
                }
            });
        }
        assert_eq!(runs.join_all().await.iter().sum::<u32>(), 200);
        assert_eq!(stores[0].counts().await.unwrap().completed, 200);
    }
}

#[tokio::test]
async fn a_lock_that_is_never_given_back_is_an_error_in_time_and_no_more_afterwards() {
    let (_directory, path) = place();
    let options = SqliteStore::options(&path).busy_timeout(Duration::from_millis(100));
    let store = options.open().await.unwrap();
    let mut neighbour = other(&path).await;
    sqlx::raw_sql("BEGIN IMMEDIATE")
        .execute(&mut neighbour)
        .await
        .unwrap();
    let error = store.claim(request("k")).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable);
    assert!(error.to_string().contains("locked"), "{error}");
    sqlx::raw_sql("ROLLBACK")
        .execute(&mut neighbour)
        .await
        .unwrap();
    let _ = win(&store, "k").await;
}

#[tokio::test]
async fn a_damaged_row_is_corrupt_and_affects_nothing_else() {
    for damage in [
        "UPDATE idempotency_records SET state = 99 WHERE key = x'62'",
        "UPDATE idempotency_records SET mode = 0 WHERE key = x'62'",
        "UPDATE idempotency_records SET attempt = -1 WHERE key = x'62'",
        "UPDATE idempotency_records SET token = x'00' WHERE key = x'62'",
        "UPDATE idempotency_records SET owner = x'' WHERE key = x'62'",
        "UPDATE idempotency_records SET fingerprint = zeroblob(33) WHERE key = x'62'",
        "UPDATE idempotency_records SET status = 99999 WHERE key = x'62'",
        "UPDATE idempotency_records SET scheme = CAST(x'ff' AS TEXT) WHERE key = x'62'",
    ] {
        let (_directory, path) = place();
        let store = SqliteStore::open(&path).await.unwrap();
        let good = win(&store, "a").await;
        let bad = win(&store, "b").await;
        execute(&path, damage).await;
        let (claimed, completed, neighbour) = tokio::join!(
            store.claim(request("b")),
            complete(&store, &bad),
            complete(&store, &good)
        );
        assert_eq!(
            claimed.unwrap_err().kind(),
            StoreErrorKind::Corrupt,
            "{damage}"
        );
        assert_eq!(
            completed.unwrap_err().kind(),
            StoreErrorKind::Corrupt,
            "{damage}"
        );
        assert_eq!(neighbour.unwrap(), Settled::Done);
        assert_eq!(
            store.get(&bad.id).await.unwrap_err().kind(),
            StoreErrorKind::Corrupt
        );
        assert_eq!(store.counts().await.unwrap().completed, 1);
        assert!(store.abandoned(None, 9).await.unwrap().is_empty());
        assert!(store.forget(&bad.id).await.unwrap());
        let _ = win(&store, "b").await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_claims_on_one_key_at_once_have_one_winner_and_few_commits() {
    let (_directory, path) = place();
    let store = SqliteStore::open(&path).await.unwrap();
    let mut claims = JoinSet::new();
    for _ in 0..1000 {
        let store = store.clone();
        claims.spawn(async move { store.claim(request("one")).await.unwrap() });
    }
    let claims = claims.join_all().await;
    let won = claims
        .iter()
        .filter(|claim| matches!(claim, Claim::Won(_)))
        .count();
    let held = claims
        .iter()
        .filter(|claim| matches!(claim, Claim::InFlight(_)))
        .count();
    assert_eq!((won, held), (1, 999));
}

#[tokio::test]
async fn a_refused_value_fails_alone_in_its_batch() {
    let (_directory, path) = place();
    let store = SqliteStore::open(&path).await.unwrap();
    execute(
        &path,
        "CREATE TRIGGER refuse BEFORE INSERT ON idempotency_records WHEN NEW.key = x'07'
        BEGIN SELECT RAISE(ABORT, 'refused'); END",
    )
    .await;
    let held = win(&store, "held").await;
    let mut claims = JoinSet::new();
    for n in 0..100_u8 {
        let (store, held) = (store.clone(), held.clone());
        claims.spawn(async move {
            if n == 50 {
                let settled = complete(&store, &held).await.unwrap();
                assert_eq!(settled, Settled::Done);
            }
            (n, store.claim(request([n])).await)
        });
    }
    for (n, claim) in claims.join_all().await {
        match claim {
            Ok(Claim::Won(_)) => assert_ne!(n, 7),
            Err(error) => assert_eq!((n, error.kind()), (7, StoreErrorKind::Invalid)),
            Ok(other) => panic!("{n}: {other:?}"),
        }
    }
    assert_eq!(store.counts().await.unwrap().running, 99);
    assert_eq!(
        scalar(
            &path,
            "SELECT value FROM idempotency_meta WHERE name = 'records'"
        )
        .await,
        100
    );
}

#[tokio::test]
async fn dropped_claims_leave_the_store_healthy() {
    let (_directory, path) = place();
    let store = SqliteStore::open(&path).await.unwrap();
    for n in 0..200_u32 {
        let claim = store.claim(request(n.to_be_bytes()));
        // Polled a few times, and then no more.
        let wait = tokio::time::timeout(Duration::from_micros(u64::from(n) * 20), claim);
        let _ = wait.await;
    }
    let ticket = win(&store, "after").await;
    assert_eq!(complete(&store, &ticket).await.unwrap(), Settled::Done);
}

#[tokio::test]
async fn what_settles_a_run_is_carried_out_for_callers_that_went_away_and_a_claim_is_not() {
    let (_directory, path) = place();
    let store = SqliteStore::open(&path).await.unwrap();
    let ticket = win(&store, "k").await;
    // On this runtime of one thread the writer runs only when this task pauses: both operations are
    // queued, and both callers gone, before it sees them.
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    let nobody = request("nobody");
    let id = nobody.id.clone();
    let mut claim = Box::pin(store.claim(nobody));
    let mut completion = Box::pin(complete(&store, &ticket));
    assert!(claim.as_mut().poll(&mut context).is_pending());
    assert!(completion.as_mut().poll(&mut context).is_pending());
    drop((claim, completion));
    let record = store.get(&ticket.id).await.unwrap().unwrap();
    assert_eq!(record.status, Some(StatusCode::CREATED));
    assert_eq!(store.get(&id).await.unwrap(), None);
}

#[tokio::test]
async fn a_deleted_or_replaced_file_is_an_error_until_it_is_back() {
    for journal in [Journal::Wal, Journal::Delete] {
        let (directory, path) = place();
        let store = SqliteStore::options(&path)
            .journal(journal)
            .open()
            .await
            .unwrap();
        let ticket = win(&store, "k").await;
        let aside = directory.path().join("aside");
        fs::create_dir(&aside).unwrap();
        let moved = |from: &Path, to: &Path| {
            for name in ["idempotency.db", "idempotency.db-wal", "idempotency.db-shm"] {
                let _ = fs::rename(from.join(name), to.join(name));
            }
        };
        moved(directory.path(), &aside);
        for _ in 0..3 {
            let error = store.claim(request("other")).await.unwrap_err();
            assert_ne!(error.kind(), StoreErrorKind::Full, "{journal:?}");
            tokio::time::sleep(MIN_PAUSE).await;
        }
        assert!(
            !path.exists(),
            "an empty file would mean that every key is forgotten"
        );
        moved(&aside, directory.path());
        let settled = loop {
            match complete(&store, &ticket).await {
                Ok(settled) => break settled,
                Err(_) => tokio::time::sleep(MIN_PAUSE).await,
            }
        };
        assert_eq!(settled, Settled::Done);
    }
}

const MIN_PAUSE: Duration = Duration::from_millis(25);

#[tokio::test]
async fn tables_dropped_under_the_store_are_an_error_and_not_created_anew() {
    let (_directory, path) = place();
    let store = SqliteStore::open(&path).await.unwrap();
    execute(&path, "DROP TABLE idempotency_records; DROP TABLE idempotency_meta; DROP TABLE idempotency_owners; DROP TABLE idempotency_checkpoints").await;
    for _ in 0..3 {
        let error = store.claim(request("k")).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Schema);
        tokio::time::sleep(MIN_PAUSE).await;
    }
}

#[tokio::test]
async fn a_full_store_refuses_new_claims_and_completes_granted_ones() {
    let (_directory, path) = place();
    let hand = Hand::default();
    let options = SqliteStore::options(&path)
        .clock(hand.clone())
        .max_records(3);
    let store = options.open().await.unwrap();
    let tickets = [
        win(&store, "a").await,
        win(&store, "b").await,
        win(&store, "c").await,
    ];
    for _ in 0..2 {
        let error = store.claim(request("d")).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Full);
    }
    for ticket in &tickets {
        assert_eq!(complete(&store, ticket).await.unwrap(), Settled::Done);
    }
    assert!(matches!(
        store.claim(request("a")).await,
        Ok(Claim::Completed(_))
    ));
    // Removed by hand, and by expiry.
    execute(&path, "DELETE FROM idempotency_records WHERE key = x'61'").await;
    let _ = win(&store, "d").await;
    assert!(store.claim(request("e")).await.is_err());
    hand.advance(Duration::from_secs(3600));
    let _ = win(&store, "e").await;
    assert_eq!(
        scalar(
            &path,
            "SELECT value FROM idempotency_meta WHERE name = 'records'"
        )
        .await,
        2
    );
}

#[tokio::test]
async fn a_batch_of_claims_fills_the_store_exactly() {
    let (_directory, path) = place();
    let store = SqliteStore::options(&path)
        .max_records(10)
        .open()
        .await
        .unwrap();
    let mut claims = JoinSet::new();
    for n in 0..40_u8 {
        let store = store.clone();
        claims.spawn(async move { store.claim(request([n])).await });
    }
    let claims = claims.join_all().await;
    assert_eq!(claims.iter().filter(|claim| claim.is_ok()).count(), 10);
}

#[tokio::test]
async fn after_close_everything_is_refused_and_the_lease_is_given_up() {
    let (_directory, path) = place();
    let store = SqliteStore::open(&path).await.unwrap();
    let other = SqliteStore::open(&path).await.unwrap();
    let ticket = win(&store, "k").await;
    let (queued, closed) = tokio::join!(complete(&store, &ticket), store.close());
    assert_eq!(
        queued.unwrap(),
        Settled::Done,
        "what was queued before is still done"
    );
    closed.unwrap();
    store.clone().close().await.unwrap();
    assert_eq!(
        complete(&store, &ticket).await.unwrap_err().kind(),
        StoreErrorKind::Closed
    );
    assert_eq!(
        store.counts().await.unwrap_err().kind(),
        StoreErrorKind::Closed
    );
    assert_eq!(
        store
            .renew(&[], Duration::from_secs(1))
            .await
            .unwrap_err()
            .kind(),
        StoreErrorKind::Closed
    );
    let _ = win(&other, "mine").await;
    assert_eq!(
        scalar(&path, "SELECT count(*) FROM idempotency_owners").await,
        1
    );
}

#[tokio::test]
async fn a_purge_is_bounded_and_removes_lapsed_owners_but_its_own() {
    let (_directory, path) = place();
    let hand = Hand::default();
    let options = SqliteStore::options(&path).clock(hand.clone());
    let (store, silent) = (
        options.clone().open().await.unwrap(),
        options.open().await.unwrap(),
    );
    let _ = win(&silent, "silent").await;
    for n in 0..10_u8 {
        let ticket = win(&store, [n]).await;
        let done = Completion::retained(StatusCode::OK, Bytes::from_static(b"r"));
        let hour = Lifetimes::new(Duration::from_secs(3600));
        let lifetimes = if n < 5 {
            hour
        } else {
            hour.response_ttl(Duration::from_secs(60))
        };
        assert_eq!(
            store.complete(&ticket, done, lifetimes).await.unwrap(),
            Settled::Done
        );
    }
    assert_eq!(store.purge(100).await.unwrap(), 0);
    hand.advance(Duration::from_secs(60));
    assert_eq!(store.purge(2).await.unwrap(), 2);
    assert_eq!(store.purge(100).await.unwrap(), 3);
    assert_eq!(
        scalar(
            &path,
            "SELECT count(*) FROM idempotency_records WHERE response IS NULL"
        )
        .await,
        6
    );
    assert_eq!(
        scalar(&path, "SELECT count(*) FROM idempotency_owners").await,
        1
    );
    hand.advance(Duration::from_secs(3540));
    assert_eq!(store.purge(7).await.unwrap(), 7);
    assert_eq!(store.purge(usize::MAX).await.unwrap(), 3);
    // What is abandoned stays.
    assert_eq!(store.counts().await.unwrap().abandoned, 1);
}

#[tokio::test]
async fn a_store_whose_runtime_ended_says_so() {
    let (_directory, path) = place();
    let store = std::thread::spawn(move || {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        runtime.block_on(SqliteStore::open(&path)).unwrap()
    });
    let store = store.join().unwrap();
    let error = store.claim(request("k")).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable);
    assert!(error.to_string().contains("runtime"), "{error}");
}

#[tokio::test]
async fn large_responses_and_long_lists_of_tickets_go_through() {
    let (_directory, path) = place();
    let store = SqliteStore::open(&path).await.unwrap();
    let mut tickets = Vec::new();
    for n in 0..300_u32 {
        tickets.push(win(&store, n.to_be_bytes()).await);
    }
    let mut completions = JoinSet::new();
    for ticket in tickets.iter().take(8).cloned() {
        let store = store.clone();
        completions.spawn(async move {
            let body = Bytes::from(vec![42; 3 << 20]);
            let done = Completion::retained(StatusCode::OK, body.clone());
            let lifetimes = Lifetimes::new(Duration::MAX);
            assert_eq!(
                store.complete(&ticket, done, lifetimes).await.unwrap(),
                Settled::Done
            );
            let record = store.get(&ticket.id).await.unwrap().unwrap();
            assert_eq!(record.response, Some(body));
        });
    }
    completions.join_all().await;
    let held = store
        .renew(&tickets, Duration::from_secs(60))
        .await
        .unwrap();
    let expected = [vec![Settled::Lost; 8], vec![Settled::Done; 292]].concat();
    assert_eq!(held, expected);
}

#[tokio::test]
async fn a_scope_is_counted_alike_by_its_rows_and_by_indexes_alone() {
    let (_directory, path) = place();
    let clock = FakeClock::new();
    let options = SqliteStore::options(&path).clock(clock.clone());
    let store = options.open().await.unwrap();
    for (key, seconds) in [("a", 10), ("b", 20), ("c", 30), ("d", 40)] {
        let ticket = win(&store, key).await;
        let done = Completion::tombstone(StatusCode::OK);
        let lifetimes = Lifetimes::new(Duration::from_secs(seconds));
        let done = store.complete(&ticket, done, lifetimes).await;
        assert_eq!(done.unwrap(), Settled::Done);
    }
    let _running = win(&store, "e").await;
    let mut connection = other(&path).await;
    for live in (1..=5).rev() {
        for (at_most, max_expired) in [(9, 0), (9, 1), (9, 4), (2, 0), (2, 4), (0, 0), (0, 4)] {
            let counted: i64 = sqlx::query_scalar(statements::COUNT_IN)
                .bind(Scope::shared().as_bytes())
                .bind(clock.now().as_micros())
                .bind(at_most)
                .bind(max_expired)
                .fetch_one(&mut connection)
                .await
                .unwrap();
            assert_eq!(counted, at_most.min(live), "{live} {at_most} {max_expired}");
        }
        clock.advance(Duration::from_secs(10));
    }
}

/// SQLite itself would go on with it without a word.
#[tokio::test]
async fn a_scope_is_not_counted_in_a_file_that_is_gone() {
    let (_directory, path) = place();
    let store = SqliteStore::open(&path).await.unwrap();
    let _ = win(&store, "k").await;
    for _ in 0..2 {
        assert_eq!(store.count_in(&Scope::shared(), 10).await.unwrap(), 1);
    }
    fs::remove_file(&path).unwrap();
    let error = store.count_in(&Scope::shared(), 10).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable);
}

/// Not the rows that a subquery has found, nor the one row of a statement without a table.
fn scans_a_table(step: &str) -> bool {
    step.starts_with("SCAN") && !step.starts_with("SCAN (") && step != "SCAN CONSTANT ROW"
}

#[tokio::test]
async fn housekeeping_finds_its_rows_by_index() {
    let (_directory, path) = closed_store().await;
    let mut connection = other(&path).await;
    for (statement, index) in [
        (statements::PURGE_RECORDS, "idempotency_records_due"),
        (statements::PURGE_RESPONSES, "idempotency_responses_due"),
        (statements::ABANDONED, "idempotency_records_open"),
        (
            statements::COUNT_IN,
            "COVERING INDEX sqlite_autoindex_idempotency_records_1 (scope=?)",
        ),
        (
            statements::COUNT_IN,
            "USING INDEX sqlite_autoindex_idempotency_records_1 (scope=?)",
        ),
    ] {
        let explain = sqlx::AssertSqlSafe(format!("EXPLAIN QUERY PLAN {statement}"));
        let plan = sqlx::query(explain)
            .fetch_all(&mut connection)
            .await
            .unwrap();
        let plan: Vec<String> = plan.iter().map(|row| row.get(3)).collect();
        assert!(plan.iter().any(|step| step.contains(index)), "{plan:?}");
        assert!(!(plan.iter()).any(|step| scans_a_table(step)), "{plan:?}");
    }
}

#[test]
#[should_panic(expected = "busy_timeout")]
fn a_busy_timeout_of_nothing_panics() {
    let _ = SqliteStore::options("x").busy_timeout(Duration::ZERO);
}

#[test]
#[should_panic(expected = "max_records")]
fn a_limit_of_no_records_panics() {
    let _ = SqliteStore::options("x").max_records(0);
}

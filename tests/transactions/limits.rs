//! How long a transaction may wait, idle, and last.

use std::time::{Duration, Instant};

use sqlx::{Postgres, Sqlite};
use tokio::time::sleep;
use tower_idempotency::{SqliteStore, State, Tx, TxError, TxOptions};

use super::{ground::*, handlers::*};
use crate::support::{post, send};

const DONE: Option<State> = Some(State::Completed);

const TAKE: &str = "UPDATE accounts SET balance = balance - 80 WHERE name = 'a'";

/// Nothing failed for another's sake, so nothing is run again; but the same later may well succeed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_postgres_a_lock_that_is_not_free_in_time_is_answered_503_and_released() {
    let ground = Ground::<Postgres>::in_real_time().await;
    let mut other = Postgres::connect(&ground.place).await;
    Postgres::run(&mut other, &format!("BEGIN; {TAKE}"))
        .await
        .unwrap();
    let brief = TxOptions::default().lock_timeout(Duration::from_millis(100));
    let runs = Runs::default();
    let counted = runs.clone();
    let layer = ground.layer().transactional_with(brief);
    let app = app(
        layer,
        move |Key(key): Key, mut tx: Tx<Postgres>| async move {
            counted.begin();
            charge(&mut tx, &key).await?;
            Postgres::run_in(&mut tx, TAKE).await?;
            Ok::<_, TxError>(created())
        },
    );
    let asked = Instant::now();
    let answer = send(&app, post("k", "A")).await;
    assert!(
        asked.elapsed() < Duration::from_secs(1),
        "{:?}",
        asked.elapsed()
    );
    assert_eq!(
        (answer.status.as_u16(), answer.header("retry-after")),
        (503, Some("1"))
    );
    assert_eq!((ground.left("k").await, runs.count()), ((0, None), 1));
    Postgres::run(&mut other, "ROLLBACK").await.unwrap();
    assert_eq!(send(&app, post("k", "A")).await.status, 201);
    assert_eq!((ground.left("k").await, runs.count()), ((1, DONE), 2));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_postgres_a_transaction_that_idles_too_long_has_no_effect() {
    for goes_on in [true, false] {
        let ground = Ground::<Postgres>::in_real_time().await;
        let brief = TxOptions::default().idle_timeout(Duration::from_millis(100));
        let runs = Runs::default();
        let counted = runs.clone();
        let layer = ground.layer().transactional_with(brief);
        let app = app(
            layer,
            move |Key(key): Key, mut tx: Tx<Postgres>| async move {
                let run = counted.begin();
                charge(&mut tx, &key).await?;
                if run == 1 {
                    sleep(Duration::from_millis(500)).await;
                }
                if goes_on {
                    charge(&mut tx, &key).await?;
                }
                Ok::<_, TxError>(created())
            },
        );
        let answer = send(&app, post("k", "A")).await;
        assert_eq!(
            (answer.status.as_u16(), answer.header("retry-after")),
            (503, Some("1"))
        );
        assert_eq!(ground.left("k").await, (0, None), "{goes_on}");
        assert_eq!(send(&app, post("k", "A")).await.status, 201);
        assert_eq!(ground.left("k").await, (1 + i64::from(goes_on), DONE));
    }
}

/// It must not take the only place to write away from all others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_sqlite_a_handler_that_holds_its_transaction_too_long_is_stopped() {
    let ground = Ground::<Sqlite>::in_real_time().await;
    let brief = TxOptions::default().max_hold(Duration::from_millis(500));
    let (held, gate) = gated::<Sqlite>(ground.layer().transactional_with(brief));
    let (free, _) = charging::<Sqlite>(ground.layer(), |_| created());
    let stopped = spawn(&held, post("k", "A"));
    gate.reached().await;
    let asked = Instant::now();
    assert_eq!(send(&free, post("other", "A")).await.status, 201);
    assert!(
        asked.elapsed() < Duration::from_secs(2),
        "{:?}",
        asked.elapsed()
    );
    let stopped = stopped.await.unwrap();
    assert_eq!(stopped.said(), said(503, FAILED));
    assert!(stopped.header("retry-after").is_some());
    assert_eq!(ground.left("k").await, (0, None));
    assert_eq!(send(&free, post("k", "A")).await.status, 201);
}

/// Somebody else's transaction, in another process, is in the way of effect and record alike.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_sqlite_a_file_that_stays_locked_is_answered_503_and_released_when_it_is_free() {
    let ground = Ground::<Sqlite>::in_real_time().await;
    let store = SqliteStore::options(ground.place.file()).busy_timeout(Duration::from_millis(200));
    let layer = transactional(&store.open().await.unwrap());
    let layer = layer.store_timeout(Duration::from_millis(500));
    let (app, gate) = gated_before::<Sqlite>(layer, 201);
    let first = spawn(&app, post("k", "A"));
    gate.reached().await;
    let mut other = Sqlite::connect(&ground.place).await;
    Sqlite::run(&mut other, "BEGIN IMMEDIATE").await.unwrap();
    gate.open();
    let answer = first.await.unwrap();
    assert_eq!(
        (answer.status.as_u16(), answer.header("retry-after")),
        (503, Some("1"))
    );
    assert_eq!(send(&app, post("k", "A")).await.json()["retryable"], true);
    Sqlite::run(&mut other, "ROLLBACK").await.unwrap();
    ground.comes_to("k", (0, None)).await;
    let retry = spawn(&app, post("k", "A"));
    gate.reached().await;
    gate.open();
    assert_eq!(retry.await.unwrap().status, 201);
    assert_eq!(ground.left("k").await, (1, DONE));
}

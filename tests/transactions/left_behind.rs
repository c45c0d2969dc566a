//! Tasks that a handler leaves behind with its transaction, or that ask for one when it is too late; and
//! handlers that go on without one.

use std::{sync::Arc, time::Duration};

use axum::{
    extract::FromRequestParts,
    http::{HeaderName, request::Parts},
};
use sqlx::{
    ConnectOptions, Postgres, Sqlite, postgres::PgPoolOptions, sqlite::SqliteConnectOptions,
};
use tokio::{
    sync::Mutex,
    time::{sleep, timeout},
};
use tower_idempotency::{NoTx, SqliteStore, State, Tx, TxError, TxOptions};

use super::{ground::*, handlers::*};
use crate::{
    on_both,
    support::{post, request, send},
};

const DONE: Option<State> = Some(State::Completed);

const SOON: Duration = Duration::from_secs(4);

/// Whether somebody else's requests are carried out.
async fn others_go_on<D: Db>(ground: &Ground<D>) {
    let (app, _) = charging::<D>(ground.layer(), |_| created());
    let key = format!(
        "other-{}",
        ground.value("SELECT count(*) FROM effects").await
    );
    let other = timeout(SOON, send(&app, post(&key, "A"))).await;
    assert_eq!(other.expect("others wait").status, 201);
}

/// A handler that keeps what is needed to take a `Tx` after it has answered.
async fn takes_one_late<D: Db>(key: Option<&str>)
where
    Tx<D>: FromRequestParts<(), Rejection = NoTx>,
{
    let ground = Ground::<D>::new().await;
    let gate = Gate::default();
    let (passed, heard) = (gate.clone(), Arc::new(Mutex::new(None)));
    let said = heard.clone();
    let late = app(
        ground.layer().optional(),
        move |mut parts: Parts| async move {
            let said = said.lock_owned().await;
            tokio::spawn(async move {
                let mut said = said;
                passed.pass().await;
                let taken = Tx::<D>::from_request_parts(&mut parts, &()).await;
                *said = taken.err().map(|refused| refused.to_string());
            });
            created()
        },
    );
    let answer = send(&late, request("POST", "/charges", key, "A")).await;
    assert_eq!(answer.status, 201);
    gate.reached().await;
    gate.open();
    let said = heard.lock().await.clone();
    assert!(said.is_some_and(|said| said.contains("was answered")));
    others_go_on(&ground).await;
}

on_both! {
    async fn a_transaction_asked_for_after_the_answer_is_not_given<D: Db>() {
        takes_one_late::<D>(Some("k")).await;
        takes_one_late::<D>(None).await;
    }

    /// Whoever sends a statement in a task of its own, so that it survives the client, may be left by it.
    async fn a_client_that_leaves_an_ordinary_transaction_leaves_none_open<D: Db>() {
        let ground = Ground::<D>::new().await;
        let gate = Gate::default();
        let passed = gate.clone();
        let leaving = app(ground.layer().optional(), move |mut tx: Tx<D>| async move {
            let work = tokio::spawn(async move {
                charge(&mut tx, "k").await?;
                passed.pass().await;
                charge(&mut tx, "k").await
            });
            work.await.unwrap()?;
            Ok::<_, TxError>(created())
        });
        let client = spawn(&leaving, request("POST", "/charges", None, "A"));
        gate.reached().await;
        client.abort();
        assert!(client.await.is_err());
        others_go_on(&ground).await;
        gate.open();
        others_go_on(&ground).await;
        assert_eq!(ground.effects("k").await, 0);
    }

    /// The inner layer would record an answer whose effect is not committed yet.
    async fn an_inner_layer_that_claims_takes_the_transaction_of_the_outer_one_away<D: Db>() {
        let ground = Ground::<D>::new().await;
        let runs = Runs::default();
        let counted = runs.clone();
        let inner = app(plain(&ground.store), move |mut tx: Tx<D>| async move {
            counted.begin();
            charge(&mut tx, "k").await?;
            Ok::<_, TxError>(created())
        });
        let header = HeaderName::from_static("x-outer-key");
        let both = inner.layer(ground.layer().optional().header_name(header));
        let refused = send(&both, post("k", "A")).await;
        assert_eq!((refused.status.as_u16(), runs.count()), (500, 0));
        assert_eq!(ground.effects("k").await, 0);
    }
}

/// The task cannot be ended, but its statement can.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_sqlite_a_long_statement_in_a_task_of_its_own_ends_with_max_hold() {
    let ground = Ground::<Sqlite>::in_real_time().await;
    let options = TxOptions::default().max_hold(Duration::from_millis(300));
    let layer = plain(&ground.store).transactional_with(options);
    let endless = app(layer, |mut tx: Tx<Sqlite>| async move {
        let work = tokio::spawn(async move {
            charge(&mut tx, "k").await?;
            let count = "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)
                SELECT count(*) FROM n";
            Sqlite::value_in(&mut tx, count).await
        });
        work.await.unwrap()?;
        Ok::<_, TxError>(created())
    });
    let refused = timeout(SOON, send(&endless, post("k", "A"))).await;
    assert_eq!(refused.expect("it holds on").said(), said(503, FAILED));
    others_go_on(&ground).await;
    assert_eq!(ground.left("k").await, (0, None));
}

/// The first statement was never sent, so 2xx is not what has happened.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_postgres_a_handler_that_swallows_a_failed_begin_is_refused() {
    for then in ["", "again"] {
        let ground = Ground::<Postgres>::in_real_time().await;
        let pool = PgPoolOptions::new()
            .max_connections(2)
            .acquire_timeout(Duration::from_millis(200))
            .connect_lazy_with(ground.place.database().options());
        let store = open_postgres(pool.clone()).await;
        let gate = Gate::default();
        let passed = gate.clone();
        let swallowing = app(
            transactional(&store),
            move |Key(key): Key, mut tx: Tx<Postgres>| async move {
                passed.pass().await;
                assert!(charge(&mut tx, &key).await.is_err());
                passed.pass().await;
                if !then.is_empty() {
                    charge(&mut tx, &key).await?;
                }
                Ok::<_, TxError>(created())
            },
        );
        let answer = spawn(&swallowing, post("k", "A"));
        gate.reached().await;
        let mut taken = Vec::new();
        while taken.len() < 2 {
            taken.extend(pool.acquire().await);
        }
        gate.open();
        gate.reached().await;
        drop(taken);
        gate.open();
        assert_eq!(answer.await.unwrap().said(), said(500, MISUSED));
        assert_eq!(ground.left("k").await, (0, None));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_sqlite_a_handler_that_swallows_a_failed_begin_is_refused() {
    let ground = Ground::<Sqlite>::in_real_time().await;
    let options = SqliteStore::options(ground.place.file());
    let store = options.busy_timeout(Duration::from_millis(200)).open();
    let layer = transactional(&store.await.unwrap());
    let gate = Gate::default();
    let passed = gate.clone();
    let swallowing = app(layer, move |Key(key): Key, mut tx: Tx<Sqlite>| async move {
        passed.pass().await;
        assert!(charge(&mut tx, &key).await.is_err());
        passed.pass().await;
        Ok::<_, TxError>(created())
    });
    let answer = spawn(&swallowing, post("k", "A"));
    gate.reached().await;
    let file = SqliteConnectOptions::new().filename(ground.place.file());
    let mut neighbour = file.connect().await.unwrap();
    Sqlite::run(&mut neighbour, "BEGIN IMMEDIATE")
        .await
        .unwrap();
    gate.open();
    gate.reached().await;
    Sqlite::run(&mut neighbour, "ROLLBACK").await.unwrap();
    gate.open();
    assert_eq!(answer.await.unwrap().said(), said(500, MISUSED));
    assert_eq!(ground.left("k").await, (0, None));
}

/// What it has committed by itself must not be forgotten for what failed afterwards.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_postgres_a_handler_that_commits_by_itself_and_fails_then_is_not_run_again() {
    for ends in ["COMMIT AND CHAIN; SELECT 1/0", "COMMIT; BEGIN; SELECT 1/0"] {
        for status in [201, 402, 503] {
            let ground = Ground::<Postgres>::new().await;
            let app = app(
                ground.layer(),
                move |Key(key): Key, mut tx: Tx<Postgres>| async move {
                    charge(&mut tx, &key).await?;
                    for statement in ends.split("; ") {
                        let _ = Postgres::run(&mut *tx.connection().await?, statement).await;
                    }
                    Ok::<_, TxError>(answer(status))
                },
            );
            let first = send(&app, post("k", "A")).await;
            assert_eq!(first.said(), said(500, MISUSED), "{ends} {status}");
            let retry = send(&app, post("k", "A")).await;
            assert_eq!(retry.said(), said(409, NOT_RETAINED), "{ends} {status}");
            assert_eq!(ground.left("k").await, (1, DONE), "{ends} {status}");
        }
    }
}

/// A body that takes a transaction while it is held in memory, and lasts longer than that.
async fn outlasts_the_buffer<D: Db>()
where
    Tx<D>: FromRequestParts<(), Rejection = NoTx>,
{
    use axum::body::{Body, Bytes};
    use futures_util::stream;

    let ground = Ground::<D>::in_real_time().await;
    let layer = ground.layer().buffer_timeout(Duration::from_millis(100));
    let app = app(layer, |mut parts: Parts| async move {
        let pieces = stream::once(async move {
            let mut tx = Tx::<D>::from_request_parts(&mut parts, &()).await.ok();
            if let Some(tx) = &mut tx {
                let _ = charge(tx, "k").await;
            }
            sleep(Duration::from_millis(400)).await;
            drop(tx);
            Ok::<_, std::io::Error>(Bytes::from_static(b"done"))
        });
        Body::from_stream(pieces)
    });
    let refused = send(&app, post("k", "A")).await;
    assert_eq!(refused.said(), said(500, MISUSED));
    assert_eq!(ground.left("k").await, (0, None));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_that_takes_a_transaction_and_keeps_it_is_refused_on_postgres() {
    outlasts_the_buffer::<Postgres>().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_that_takes_a_transaction_and_keeps_it_is_refused_on_sqlite() {
    outlasts_the_buffer::<Sqlite>().await;
}

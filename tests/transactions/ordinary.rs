//! Requests to which no key applies: an ordinary transaction.

use std::time::Duration;

use axum::{
    Router,
    body::Body,
    http::{HeaderName, Request},
};
use sqlx::{Column, Executor, Postgres, Sqlite};
use tower_idempotency::{SqliteStore, State, StoreFailure, Tx, TxError};

use super::{ground::*, handlers::*};
use crate::{
    on_both,
    support::{post, request, send},
};

fn none() -> Request<Body> {
    request("POST", "/charges", None, "A")
}

/// A table whose rule is looked at when a transaction is committed.
const AT_COMMIT: &str = "CREATE TABLE parents (id bigint PRIMARY KEY);
    CREATE TABLE children (parent bigint REFERENCES parents (id) DEFERRABLE INITIALLY DEFERRED)";

/// A handler whose transaction cannot be committed in its first run.
fn refused_at_commit<D: Db>(ground: &Ground<D>) -> (Router, Runs) {
    let runs = Runs::default();
    let counted = runs.clone();
    let handler = move |Key(key): Key, mut tx: Tx<D>| async move {
        let run = counted.begin();
        charge(&mut tx, &key).await?;
        if run == 1 {
            D::run_in(&mut tx, "INSERT INTO children VALUES (7)").await?;
        }
        Ok::<_, TxError>(created())
    };
    (app(ground.layer().optional(), handler), runs)
}

on_both! {
    // N7
    async fn without_a_key_2xx_and_3xx_are_committed_and_all_else_is_rolled_back<D: Db>() {
        let ground = Ground::<D>::new().await;
        for (status, stays) in [(201, true), (303, true), (402, false), (422, false), (500, false)] {
            let layer = ground.layer().optional();
            let (app, _) = charging::<D>(layer, move |_| answer(status));
            let before = ground.effects("none").await;
            assert_eq!(send(&app, none()).await.status.as_u16(), status);
            let effects = ground.effects("none").await - before;
            assert_eq!(effects, i64::from(stays), "{status}");
        }
    }

    // N7
    async fn a_get_has_an_ordinary_transaction_key_or_not<D: Db>() {
        let ground = Ground::<D>::new().await;
        let (app, _) = charging::<D>(ground.layer(), |run| answer(if run < 3 { 200 } else { 404 }));
        let get = |key| request("GET", "/charges", key, Body::empty());
        for (effects, key) in [(1, None), (2, Some("k")), (2, Some("k")), (2, None)] {
            send(&app, get(key)).await;
            assert_eq!(ground.effects("none").await, effects);
        }
        assert_eq!(ground.left("k").await, (0, None));
    }

    async fn under_two_layers_the_outer_one_commits<D: Db>() {
        let ground = Ground::<D>::new().await;
        for inner in [ground.layer(), plain(&ground.store)] {
            let (app, runs) = charging::<D>(inner, |_| created());
            let app = app.route_layer(ground.layer());
            let key = format!("k-{}", ground.value("SELECT count(*) FROM effects").await);
            let first = send(&app, post(&key, "A")).await;
            assert_eq!(first.status, 201);
            assert_eq!(ground.left(&key).await, (1, Some(State::Completed)));
            send(&app, post(&key, "A")).await.assert_replays(&first);
            let before = ground.effects("none").await;
            let get = request("GET", "/charges", None, Body::empty());
            assert_eq!(send(&app, get).await.status, 201);
            assert_eq!((ground.effects("none").await - before, runs.count()), (1, 2));
        }
    }

    async fn where_the_outer_layer_has_no_key_the_inner_one_commits<D: Db>() {
        let ground = Ground::<D>::new().await;
        let (app, runs) = charging::<D>(ground.layer(), |_| created());
        let other = HeaderName::from_static("other-key");
        let app = app.route_layer(ground.layer().header_name(other).optional());
        let first = send(&app, post("k", "A")).await;
        assert_eq!(first.status, 201);
        assert_eq!(ground.left("k").await, (1, Some(State::Completed)));
        send(&app, post("k", "A")).await.assert_replays(&first);
        assert_eq!(runs.count(), 1);
    }

    async fn a_panic_without_a_key_rolls_back<D: Db>() {
        let ground = Ground::<D>::new().await;
        let layer = ground.layer().optional();
        let (app, _) = charging::<D>(layer, |_| panic!("the handler panics"));
        let app = app.layer(tower_http::catch_panic::CatchPanicLayer::new());
        assert_eq!(send(&app, none()).await.status, 500);
        assert_eq!(ground.effects("none").await, 0);
        let (app, _) = charging::<D>(ground.layer().optional(), |_| created());
        assert_eq!(send(&app, none()).await.status, 201);
        assert_eq!(ground.effects("none").await, 1);
    }

    async fn what_cannot_be_committed_without_a_key_is_not_answered_as_done<D: Db>() {
        let ground = Ground::<D>::new().await;
        ground.run(AT_COMMIT).await;
        let (app, runs) = refused_at_commit(&ground);
        assert_eq!(send(&app, none()).await.status, 500);
        assert_eq!(ground.effects("none").await, 0);
        assert_eq!(send(&app, none()).await.status, 201);
        assert_eq!((ground.effects("none").await, runs.count()), (1, 2));
    }

    async fn what_cannot_be_committed_with_a_key_leaves_neither_effect_nor_record<D: Db>() {
        let ground = Ground::<D>::new().await;
        ground.run(AT_COMMIT).await;
        let (app, runs) = refused_at_commit(&ground);
        assert_eq!(send(&app, post("k", "A")).await.said(), said(500, MISUSED));
        assert_eq!(ground.left("k").await, (0, None));
        assert_eq!(send(&app, post("k", "A")).await.status, 201);
        assert_eq!((ground.effects("k").await, runs.count()), (1, 2));
    }
}

/// There is no room for another record, and so none is written; the transaction is as good as any.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_sqlite_an_unprotected_run_has_an_ordinary_transaction() {
    let ground = Ground::<Sqlite>::new().await;
    let full = SqliteStore::options(ground.place.file()).max_records(1);
    let full = full.open().await.unwrap();
    let (app, _) = charging::<Sqlite>(transactional(&full), |_| created());
    assert_eq!(send(&app, post("first", "A")).await.status, 201);
    for (status, effects) in [(201, 1), (402, 1), (200, 2)] {
        let layer = transactional(&full).store_failure(StoreFailure::RunUnprotected);
        let (app, _) = charging::<Sqlite>(layer, move |_| answer(status));
        let answer = send(&app, post("k", "A")).await;
        assert_eq!(answer.status.as_u16(), status);
        assert_eq!(answer.header("idempotency-status"), Some("unprotected"));
        assert_eq!(ground.effects("none").await, effects);
    }
}

/// Nobody gets at the records, and so none is written; the transaction is as good as any.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_postgres_an_unprotected_run_has_an_ordinary_transaction() {
    let ground = Ground::<Postgres>::new().await;
    let mut other = Postgres::connect(&ground.place).await;
    let lock = "BEGIN; LOCK TABLE idempotency_records IN ACCESS EXCLUSIVE MODE";
    Postgres::run(&mut other, lock).await.unwrap();
    for (status, effects) in [(201, 1), (402, 1), (200, 2)] {
        let layer = ground.layer().store_failure(StoreFailure::RunUnprotected);
        let layer = layer.store_timeout(Duration::from_millis(200));
        let (app, _) = charging::<Postgres>(layer, move |_| answer(status));
        let answer = send(&app, post("k", "A")).await;
        assert_eq!(answer.status.as_u16(), status);
        assert_eq!(answer.header("idempotency-status"), Some("unprotected"));
        assert_eq!(ground.effects("none").await, effects);
    }
}

/// What sqlx's macros ask of an executor, in a crate that uses them.
macro_rules! a_statement_can_be_described {
    ($name:ident, $database:ty) => {
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $name() {
            let ground = Ground::<$database>::new().await;
            let handler = |mut tx: Tx<$database>| async move {
                let sql = sqlx::SqlStr::from_static("SELECT 1 AS one, 2 AS two");
                let described = (&mut tx).describe(sql).await?;
                let names = described.columns().iter().map(Column::name);
                Ok::<_, TxError>(names.collect::<Vec<_>>().join(" "))
            };
            let app = app(ground.layer(), handler);
            assert_eq!(send(&app, post("k", "A")).await.body, "one two");
        }
    };
}

a_statement_can_be_described!(a_statement_can_be_described_on_postgres, Postgres);
a_statement_can_be_described!(a_statement_can_be_described_on_sqlite, Sqlite);

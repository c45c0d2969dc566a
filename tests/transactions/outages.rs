//! Postgres: servers that go away in the middle of a handler.

use std::time::Duration;

use sqlx::Postgres;
use tokio::time::sleep;
use tower_idempotency::{
    IdempotencyKey, RecordId, Scope, State, Tx, TxError,
    store::{Inspect, Store},
};

use super::{far::*, ground::*, handlers::*};
use crate::support::{
    logs::Logs,
    post,
    proxy::{Cut, Way},
    send,
    server::Server,
};

const DONE: Option<State> = Some(State::Completed);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transaction_that_cannot_be_begun_is_answered_503_and_its_key_is_free() {
    let far = Far::new().await;
    let runs = Runs::default();
    let (proxy, counted) = (far.proxy.clone(), runs.clone());
    let app = app(
        far.layer.clone(),
        move |Key(key): Key, mut tx: Tx<Postgres>| async move {
            if counted.begin() == 1 {
                proxy.refuse(true);
                proxy.cut_all().await;
            }
            let charged = charge(&mut tx, &key).await;
            proxy.refuse(false);
            charged?;
            Ok::<_, TxError>(created())
        },
    );
    let first = send(&app, post("k", "A")).await;
    assert_eq!(
        (first.status.as_u16(), first.header("retry-after")),
        (503, Some("1"))
    );
    far.ground.comes_to("k", (0, None)).await;
    assert!(!at_last(&app, "k").await.replay);
    assert_eq!((far.ground.left("k").await, runs.count()), ((1, DONE), 2));
}

// N4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_restarts_during_the_transaction_takes_the_effect_and_not_the_key() {
    let mut server = Server::start().await;
    let pool = pool(server.url().parse().unwrap());
    let store = open_postgres(pool.clone()).await;
    let tables = "CREATE TABLE effects (key text NOT NULL, amount bigint NOT NULL)";
    sqlx::query(tables).execute(&pool).await.unwrap();
    let gate = Gate::default();
    let passed = gate.clone();
    let app = app(
        transactional(&store),
        move |Key(key): Key, mut tx: Tx<Postgres>| async move {
            charge(&mut tx, &key).await?;
            passed.pass().await;
            if key.starts_with("more") {
                charge(&mut tx, &key).await?;
            }
            Ok::<_, TxError>(created())
        },
    );
    for (key, effects) in [("more", 2), ("no-more", 1)] {
        let first = spawn(&app, post(key, "A"));
        gate.reached().await;
        server.stop_immediately().await;
        server.start_again().await;
        gate.open();
        let first = first.await.unwrap();
        assert_eq!(
            (first.status.as_u16(), first.header("retry-after")),
            (503, Some("1")),
            "{key}"
        );
        let id = RecordId::new(Scope::shared(), IdempotencyKey::new(key));
        assert!(store.get(&id).await.unwrap().is_none(), "{key}");
        let retry = spawn(&app, post(key, "A"));
        gate.reached().await;
        gate.open();
        let retry = retry.await.unwrap();
        assert_eq!((retry.status.as_u16(), retry.replay), (201, false), "{key}");
        let count = sqlx::query_scalar("SELECT count(*) FROM effects WHERE key = $1").bind(key);
        let count: i64 = count.fetch_one(&pool).await.unwrap();
        assert_eq!(count, effects, "{key}");
    }
    store.close().await.unwrap();
}

// V3: the transaction was lost to somebody else, and what that one answered cannot be read in time.
#[tokio::test]
async fn a_record_that_cannot_be_read_after_a_lost_transaction_is_said() {
    let (logs, _guard) = Logs::of_this_thread();
    let far = Far::new().await;
    let (store, proxy) = (far.ground.store.clone(), far.proxy.clone());
    let app = app(
        far.layer.clone(),
        move |Key(key): Key, mut tx: Tx<Postgres>| {
            let (store, proxy) = (store.clone(), proxy.clone());
            async move {
                charge(&mut tx, &key).await?;
                assert!(store.forget(&id(&key)).await.unwrap());
                // Time enough to be there between the transaction's end and the next question.
                proxy.delay(Way::ToClient, Duration::from_millis(100));
                proxy.cut(Cut::answered(b'Q').containing("ROLLBACK"));
                tokio::spawn(async move {
                    while proxy.cuts() == 0 {
                        sleep(Duration::from_millis(5)).await;
                    }
                    proxy.hang(true);
                });
                Ok::<_, TxError>(created())
            }
        },
    );
    let answer = send(&app, post("k", "A")).await;
    assert_eq!(answer.said(), (409, "idempotency_in_flight".to_owned()));
    let said = logs.loud("idempotency store did not answer in time");
    assert_eq!(said.len(), 1, "{said:?}");
    assert!(said[0].text.contains("operation=\"get\""), "{said:?}");
}

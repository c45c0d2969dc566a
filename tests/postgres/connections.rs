//! Networks that hang, and connections that die while nobody uses them.

use std::time::Duration;

use sqlx::PgPool;
use tokio::{task::JoinSet, time::sleep};
use tower_idempotency::store::{Inspect, Store, StoreErrorKind};

use super::{common::*, single::*};
use crate::support::{database::Database, eventually, proxy::Way};

/// Waits until all connections are back in their pool and have nothing on their way.
async fn is_idle(pool: &PgPool) {
    let is_idle = || pool.num_idle() == pool.size() as usize;
    eventually("the connections to be idle", is_idle).await;
}

// O1
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_network_that_hangs_is_waited_for_no_longer_than_operation_timeout() {
    for connections in [1, 4] {
        let database = Database::in_real_time();
        let direct = open(database.pool()).await;
        let (proxy, through) = proxied(&database).await;
        let pool = pool(through, connections);
        let store = open_on(pool.clone()).await;
        let ticket = win(&store, &request("k")).await;
        drop(pool.acquire().await.unwrap());
        is_idle(&pool).await;
        proxy.hang(true);
        let asking = async {
            tokio::join!(
                store.claim(request("new")),
                store.complete(&ticket, created(), lifetimes()),
                store.get(&ticket.id),
            )
        };
        let ((claim, settled, got), took) = timed(asking).await;
        failed(claim, StoreErrorKind::Unavailable);
        failed(settled, StoreErrorKind::Unavailable);
        failed(got, StoreErrorKind::Unavailable);
        assert!(
            took < OPERATION_TIMEOUT + Duration::from_millis(700),
            "it took {took:?}"
        );
        // From now on nobody waits.
        for _ in 0..20 {
            let (claim, took) = timed(store.claim(request("new"))).await;
            failed(claim, StoreErrorKind::Unavailable);
            assert!(took < Duration::from_millis(100), "it took {took:?}");
        }
        // The server itself never noticed.
        in_flight(direct.claim(request("k")).await);
        proxy.hang(false);
        // A look for the server that hangs itself has to end before there is another one.
        let _ = won(Ok(claim_when_back(&store, &request("new")).await));
        done(store.complete(&ticket, created(), lifetimes()).await);
    }
}

/// A pool asks a connection that is given back whether it is well, and waits for the answer as long as
/// the network takes. That must not cost the only place in the pool.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_network_that_hangs_while_a_connection_is_given_back_costs_the_pool_no_place() {
    let database = Database::in_real_time();
    let single = Single::on(&database).await;
    single.warm_up().await;
    // The answer to the pool's question is still on its way when the network begins to hang.
    single
        .proxy
        .delay(Way::ToClient, Duration::from_millis(200));
    let _ = win(&single.store, &request("k")).await;
    single.proxy.hang(true);
    let claim = single.store.claim(request("new")).await;
    failed(claim, StoreErrorKind::Unavailable);
    single.proxy.delay(Way::ToClient, Duration::ZERO);
    single.proxy.hang(false);
    let _ = won(Ok(claim_when_back(&single.store, &request("new")).await));
}

/// All connections of a pool break at one time, and nobody who asks notices.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_that_were_cut_while_idle_are_replaced_unnoticed() {
    let database = Database::in_real_time();
    let (proxy, through) = proxied(&database).await;
    let only = pool(through, 32);
    let store = open(only.clone()).await;
    for round in 0..5 {
        // All of them are open and idle.
        let mut connections = Vec::new();
        for _ in 0..32 {
            connections.push(only.acquire().await.unwrap());
        }
        drop(connections);
        is_idle(&only).await;
        proxy.cut_all().await;
        for n in 0..10 {
            let key = format!("k-{round}-{n}");
            let ticket = win(&store, &request(&key)).await;
            assert_eq!(ticket.attempt, 1);
            done(store.complete(&ticket, created(), lifetimes()).await);
        }
    }
}

/// As an administrator or a fail-over does.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn backends_that_are_terminated_under_load_are_replaced_unnoticed() {
    let database = Database::in_real_time();
    let store = open(database.pool()).await;
    let mut working = JoinSet::new();
    for n in 0..16 {
        let store = store.clone();
        working.spawn(async move {
            for step in 0..50 {
                let ticket = win(&store, &request(&format!("k-{n}-{step}"))).await;
                assert_eq!(ticket.attempt, 1);
                done(store.complete(&ticket, created(), lifetimes()).await);
            }
        });
    }
    let mut administrator = database.connect().await;
    let terminate = format!(
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
         WHERE application_name = '{}' AND pid <> pg_backend_pid()",
        database.schema()
    );
    let mut terminated = 0;
    while !working.is_empty() {
        terminated += value::<i64>(&mut administrator, &terminate).await;
        sleep(Duration::from_millis(20)).await;
        while let Some(worked) = working.try_join_next() {
            worked.unwrap();
        }
    }
    assert!(terminated > 3, "only {terminated} backends were terminated");
}

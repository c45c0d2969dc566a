//! Callers that leave before they are answered.

use std::time::Duration;

use tokio::{
    task::JoinSet,
    time::{sleep, timeout},
};
use tower_idempotency::store::{Settled, Store};

use super::common::*;
use crate::support::{database::Database, proxy::Way};

/// Connections of this test that are in a transaction while nobody uses them.
fn stuck(database: &Database) -> String {
    format!(
        "SELECT count(*) FROM pg_stat_activity
         WHERE application_name = '{}' AND state LIKE 'idle in transaction%'",
        database.schema()
    )
}

async fn leaving_early_breaks_nothing(level: &str) {
    let database = Database::in_real_time();
    let direct = open(database.pool()).await;
    let (proxy, through) = proxied(&database).await;
    let through = through.options([("default_transaction_isolation", level)]);
    let store = open(pool(through, 1)).await;
    proxy.delay(Way::ToServer, Duration::from_millis(100));
    proxy.delay(Way::ToClient, Duration::from_millis(100));
    let mut leaving = JoinSet::new();
    for n in 0..80 {
        let (store, asked) = (store.clone(), request(&format!("left-{n}")));
        leaving.spawn(async move {
            sleep(Duration::from_millis(rand::random_range(0..2_000))).await;
            let patience = Duration::from_millis(rand::random_range(0..700));
            let claim = timeout(patience, store.claim(asked.clone())).await;
            (asked, claim.is_ok_and(|claim| claim.is_ok()))
        });
    }
    let all = leaving.join_all().await;
    assert!(all.iter().any(|(_, stayed)| !stayed), "nobody left");

    proxy.delay(Way::ToServer, Duration::ZERO);
    proxy.delay(Way::ToClient, Duration::ZERO);
    for n in 0..20 {
        let clean = request(&format!("clean-{n}"));
        let claim = timeout(Duration::from_secs(5), store.claim(clean)).await;
        let _ = won(claim.expect("the store is stuck"));
    }
    let mut connection = database.connect().await;
    assert_eq!(value::<i64>(&mut connection, &stuck(&database)).await, 0);

    // A dropped claim is undone by a release that comes after it.
    for (asked, stayed) in all {
        let key = String::from_utf8_lossy(asked.id.key.as_bytes()).into_owned();
        let record = get(&direct, &key).await;
        assert!(record.is_some() || !stayed);
        let released = store.release(&asked.ticket(1), DAY).await.unwrap();
        assert_eq!(released == Settled::Done, record.is_some());
        assert_eq!(win(&direct, &request(&key)).await.attempt, 1);
    }
    assert_eq!(value::<i64>(&mut connection, &stuck(&database)).await, 0);
}

// D1
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn claims_dropped_at_any_moment_leave_a_pool_of_one_usable() {
    leaving_early_breaks_nothing("read committed").await;
}

// D1: here each statement is three, and a drop might leave a transaction open.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn claims_dropped_at_any_moment_leave_no_transaction_open() {
    leaving_early_breaks_nothing("serializable").await;
}

// D1: what ends a run is carried out whoever waits for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_completion_dropped_at_any_moment_is_recorded() {
    let database = Database::in_real_time();
    let direct = open(database.pool()).await;
    let (proxy, through) = proxied(&database).await;
    let store = open(pool(through, 1)).await;
    let tickets = win_all(&store, &keys("k", 40)).await;
    proxy.delay(Way::ToServer, Duration::from_millis(100));
    proxy.delay(Way::ToClient, Duration::from_millis(100));
    let mut leaving = JoinSet::new();
    for (n, ticket) in tickets.into_iter().enumerate() {
        let store = store.clone();
        leaving.spawn(async move {
            let patience = Duration::from_millis(10 * n as u64);
            let completion = store.complete(&ticket, created(), lifetimes());
            timeout(patience, completion).await.is_ok()
        });
    }
    let answered = leaving.join_all().await;
    assert!(answered.iter().any(|answered| !answered), "nobody left");
    let mut connection = database.connect().await;
    let recorded = "SELECT count(*) = 40 FROM idempotency_records WHERE state = 2";
    becomes_true(&mut connection, recorded).await;
    completed(direct.claim(request("k-0")).await);
}

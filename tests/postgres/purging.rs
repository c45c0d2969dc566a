//! Cleaning up beside everything else.

use std::time::Duration;

use sqlx::PgConnection;
use tokio::{task::JoinHandle, time::timeout};
use tower_idempotency::{
    PostgresStore,
    store::{Checkpoints, Inspect, Lifetimes, Store},
};

use super::common::*;
use crate::support::database::Database;

/// Records whose keys are a name and a number, which were completed and are over.
async fn insert_expired(connection: &mut PgConnection, name: &str, number: usize) {
    let insert = format!(
        "INSERT INTO idempotency_records (scope, key, scheme, fingerprint, token, owner, attempt, mode,
             state, created, lease_until, run_until, completed, expires, status, response)
         SELECT '', convert_to('{name}-' || n, 'UTF8'), 'test', decode(repeat('07', 32), 'hex'),
             decode(repeat('01', 16), 'hex'), decode(repeat('02', 16), 'hex'), 1, 1, 2, long_ago, long_ago,
             long_ago, long_ago, long_ago + interval '1 hour', 201, 'the answer'
         FROM generate_series(1, {number}) n,
             (SELECT clock_timestamp() - interval '1 day' AS long_ago) clock;
         INSERT INTO idempotency_checkpoints (scope, key, created, name, value)
         SELECT scope, key, created, 'step', 'value' FROM idempotency_records
         WHERE convert_from(key, 'UTF8') LIKE '{name}-%'"
    );
    sql(connection, &insert).await;
}

async fn count(connection: &mut PgConnection, table: &str) -> i64 {
    value(
        connection,
        &format!("SELECT count(*) FROM idempotency_{table}"),
    )
    .await
}

/// Notes how many records each statement removes.
async fn note_steps(connection: &mut PgConnection) {
    let note = "CREATE TABLE steps (removed bigint);
        CREATE FUNCTION note_step() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            INSERT INTO steps SELECT count(*) FROM gone;
            RETURN NULL;
        END $$;
        CREATE TRIGGER note_step AFTER DELETE ON idempotency_records
            REFERENCING OLD TABLE AS gone FOR EACH STATEMENT EXECUTE FUNCTION note_step()";
    sql(connection, note).await;
}

/// The slowest of claims and completions, one after the other, while something else goes on.
async fn slowest_meanwhile(
    store: &PostgresStore,
    meanwhile: &JoinHandle<usize>,
) -> (Duration, usize) {
    let (mut slowest, mut lives) = (Duration::ZERO, 0);
    loop {
        let key = format!("meanwhile-{lives}");
        let (ticket, claiming) = timed(win(store, &request(&key))).await;
        let (settled, completing) = timed(store.complete(&ticket, created(), lifetimes())).await;
        done(settled);
        slowest = slowest.max(claiming).max(completing);
        lives += 1;
        if meanwhile.is_finished() {
            return (slowest, lives);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_large_purge_goes_in_steps_and_delays_no_claim() {
    let database = Database::in_real_time();
    let (store, cleaner) = (open(database.pool()).await, open(database.pool()).await);
    let mut connection = database.connect().await;
    insert_expired(&mut connection, "old", 5_000).await;
    note_steps(&mut connection).await;
    // These are not over, and theirs is not to be touched.
    let kept = win(&store, &request("kept")).await;
    done(store.save(&kept, "step", "value".into()).await);

    let purging = tokio::spawn(async move { cleaner.purge(10_000).await.unwrap() });
    let (slowest, lives) = slowest_meanwhile(&store, &purging).await;
    assert_eq!(purging.await.unwrap(), 5_000);
    assert!(
        slowest < Duration::from_millis(250),
        "a claim waited {slowest:?}"
    );
    let largest: i64 = value(&mut connection, "SELECT max(removed) FROM steps").await;
    assert!(largest <= 1_000, "one statement removed {largest}");
    assert_eq!(count(&mut connection, "records").await, lives as i64 + 1);
    assert_eq!(count(&mut connection, "checkpoints").await, 1);
    assert_eq!(store.load(&kept).await.unwrap().unwrap().len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_purge_removes_no_more_than_it_may() {
    let database = Database::in_real_time();
    let store = open(database.pool()).await;
    let mut connection = database.connect().await;
    insert_expired(&mut connection, "old", 2_500).await;
    for (limit, removed, left) in [
        (0, 0, 2_500),
        (7, 7, 2_493),
        (1_500, 1_500, 993),
        (1_500, 993, 0),
        (1_500, 0, 0),
    ] {
        assert_eq!(store.purge(limit).await.unwrap(), removed);
        assert_eq!(count(&mut connection, "records").await, left);
        assert_eq!(count(&mut connection, "checkpoints").await, left);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_instances_that_purge_at_once_share_the_work() {
    let database = Database::in_real_time();
    let mut connection = database.connect().await;
    let mut stores = Vec::new();
    for _ in 0..4 {
        stores.push(open(database.pool()).await);
    }
    insert_expired(&mut connection, "old", 4_000).await;
    let mut purged = 0;
    let purges = together(stores.iter().map(|store| store.purge(10_000))).await;
    for removed in purges {
        purged += removed.unwrap();
    }
    // Whoever found the rest locked left it to the others.
    purged += stores[0].purge(10_000).await.unwrap();
    assert_eq!(purged, 4_000);
    assert_eq!(count(&mut connection, "records").await, 0);
    assert_eq!(count(&mut connection, "checkpoints").await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_purge_leaves_what_another_session_has_locked() {
    let database = Database::in_real_time();
    let store = open(database.pool()).await;
    let mut connection = database.connect().await;
    insert_expired(&mut connection, "old", 50).await;
    insert_expired(&mut connection, "locked", 3).await;
    let mut other = database.connect().await;
    let lock = "BEGIN; SELECT FROM idempotency_records
        WHERE convert_from(key, 'UTF8') LIKE 'locked-%' FOR UPDATE";
    sql(&mut other, lock).await;
    let (purged, took) = timed(store.purge(1_000)).await;
    assert_eq!(purged.unwrap(), 50);
    assert!(took < Duration::from_millis(500), "it waited {took:?}");
    assert_eq!(count(&mut connection, "records").await, 3);
    assert_eq!(count(&mut connection, "checkpoints").await, 3);
    sql(&mut other, "ROLLBACK").await;
    assert_eq!(store.purge(1_000).await.unwrap(), 3);
    assert_eq!(count(&mut connection, "checkpoints").await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_purge_empties_responses_in_steps_too() {
    let database = Database::in_real_time();
    let store = open(database.pool()).await;
    let mut connection = database.connect().await;
    insert_expired(&mut connection, "old", 2_500).await;
    // The records live on, and only their responses are over.
    let renew = "UPDATE idempotency_records SET response_expires = expires, expires = NULL";
    sql(&mut connection, renew).await;
    assert_eq!(store.purge(2_000).await.unwrap(), 2_000);
    let emptied = "SELECT count(*) FROM idempotency_records WHERE response IS NULL";
    assert_eq!(value::<i64>(&mut connection, emptied).await, 2_000);
    assert_eq!(store.purge(2_000).await.unwrap(), 500);
    assert_eq!(store.purge(2_000).await.unwrap(), 0);
    assert_eq!(count(&mut connection, "records").await, 2_500);
    assert_eq!(count(&mut connection, "checkpoints").await, 2_500);
    assert_eq!(get(&store, "old-1").await.unwrap().response, None);
}

/// Leases of instances that are gone are removed, and nobody else's.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_purge_removes_the_leases_of_instances_that_are_gone() {
    let database = Database::in_real_time();
    let mut connection = database.connect().await;
    let (store, other) = (open(database.pool()).await, open(database.pool()).await);
    store.renew(&[], LONG).await.unwrap();
    for _ in 0..10 {
        let gone = open(database.pool()).await;
        gone.renew(&[], Duration::from_millis(1)).await.unwrap();
    }
    let ticket = win(&other, &request("k")).await;
    other.renew(&[ticket], LONG).await.unwrap();
    becomes_true(
        &mut connection,
        "SELECT count(*) = 10 FROM idempotency_owners WHERE alive_until < clock_timestamp()",
    )
    .await;
    assert_eq!(store.purge(100).await.unwrap(), 0);
    assert_eq!(count(&mut connection, "owners").await, 2);
    in_flight(store.claim(request("k")).await);
}

/// An expired record is taken over in place while others are purged around it.
// T1
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn purging_and_claiming_expired_keys_at_once_loses_no_claim() {
    let database = Database::in_real_time();
    let (store, cleaner) = (open(database.pool()).await, open(database.pool()).await);
    let cleaning = tokio::spawn(async move {
        loop {
            cleaner.purge(3).await.unwrap();
        }
    });
    for _ in 0..60 {
        let keys = keys("k", 20);
        let tickets = win_all(&store, &keys).await;
        assert!(tickets.iter().all(|ticket| ticket.attempt == 1));
        let saves = tickets
            .iter()
            .map(|ticket| store.save(ticket, "step", "value".into()));
        together(saves).await.into_iter().for_each(done);
        for saved in together(tickets.iter().map(|ticket| store.load(ticket))).await {
            assert_eq!(saved.unwrap().expect("a claim was purged").len(), 1);
        }
        let short = Lifetimes::new(Duration::from_millis(1));
        let completions = tickets
            .iter()
            .map(|ticket| store.complete(ticket, created(), short));
        together(completions).await.into_iter().for_each(done);
        let over = async { while store.counts().await.unwrap().completed > 0 {} };
        timeout(Duration::from_secs(5), over)
            .await
            .expect("they are never over");
    }
    assert!(!cleaning.is_finished());
    cleaning.abort();
}

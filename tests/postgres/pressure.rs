//! Much at one time, and others in the way: what that may delay, and what it must not.

use std::{
    error::Error,
    time::{Duration, Instant},
};

use bytes::Bytes;
use http::StatusCode;
use sqlx::PgConnection;
use tokio::time::{sleep, timeout};
use tower_idempotency::{
    PostgresStore, Token,
    store::{Claim, Completion, Lifetimes, Settled, Store, StoreErrorKind},
};

use super::common::*;
use crate::support::database::Database;

/// Bytes that no compression makes fewer.
fn incompressible(length: usize) -> Bytes {
    let parts = std::iter::repeat_with(|| *Token::random().as_bytes());
    parts.flatten().take(length).collect()
}

/// A session that is not counted among those of the store.
async fn outsider(database: &Database) -> PgConnection {
    let mut connection = database.connect().await;
    sql(&mut connection, "SET application_name = 'outsider'").await;
    connection
}

/// Completes these keys so that they are over at once.
async fn expire(store: &PostgresStore, keys: &[String], connection: &mut PgConnection) {
    let tickets = win_all(store, keys).await;
    let short = Lifetimes::new(Duration::from_millis(1));
    let completions = tickets
        .iter()
        .map(|ticket| store.complete(ticket, created(), short));
    together(completions).await.into_iter().for_each(done);
    let over = format!(
        "SELECT count(*) = {} FROM idempotency_records WHERE expires < clock_timestamp()",
        keys.len()
    );
    becomes_true(connection, &over).await;
}

/// Sends the same claim again and again, for at most ten seconds, until the store answers.
async fn answered_in_the_end(store: &PostgresStore, key: &str) -> Claim {
    let request = request(key);
    let answered = async {
        loop {
            match store.claim(request.clone()).await {
                Ok(claim) => return claim,
                Err(error) => assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error:?}"),
            }
            sleep(Duration::from_millis(20)).await;
        }
    };
    let answered = timeout(Duration::from_secs(10), answered).await;
    answered.expect("the store does not come back")
}

// L10: heartbeats have a queue of their own, so that none fails for being late.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renewal_never_waits_behind_large_completions() {
    let database = Database::in_real_time();
    let store = open(database.pool()).await;
    let tickets = win_all(&store, &keys("large", 200)).await;
    let running = win(&store, &request("running")).await;
    let body = incompressible(512 << 10);
    let completions = tickets.iter().map(|ticket| {
        let large = Completion::retained(StatusCode::CREATED, body.clone());
        store.complete(ticket, large, lifetimes())
    });
    // The first is polled first, so that all completions are queued when the renewal comes.
    let ((completions, all), (renewal, took)) = tokio::join!(
        biased;
        timed(together(completions)),
        timed(store.renew(std::slice::from_ref(&running), LONG)),
    );
    assert_eq!(renewal.unwrap(), [Settled::Done]);
    assert!(took < Duration::from_secs(1), "it waited {took:?}");
    assert!(
        took < all / 2,
        "it came after {took:?}, and they took {all:?}"
    );
    completions.into_iter().for_each(done);
}

// L3: what a renewal has promised no takeover breaks, and the other way round.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renewal_and_a_takeover_never_both_succeed() {
    let database = Database::in_real_time();
    let (owner, other) = (open(database.pool()).await, open(database.pool()).await);
    let mut connection = database.connect().await;
    let (mut renewed, mut taken) = (0, 0);
    for round in 0..200 {
        // An owner that was renewed is alive, and with it all of its claims.
        sql(&mut connection, "DELETE FROM idempotency_owners").await;
        let key = format!("k-{round}");
        let mut lapsed = request(&key);
        lapsed.lease = Duration::ZERO;
        let ticket = win(&owner, &lapsed).await;
        let renewing = {
            let (owner, ticket) = (owner.clone(), ticket.clone());
            async move { owner.renew(&[ticket], Duration::from_secs(10)).await }
        };
        let taking = {
            let (other, claim) = (other.clone(), replacing(&key, ticket.token));
            async move { other.claim(claim).await }
        };
        let (renewal, claim) = match round % 10 {
            // Either comes first now and then, so that both are seen to succeed.
            0 => (renewing.await, taking.await),
            5 => {
                let claim = taking.await;
                (renewing.await, claim)
            }
            // A takeover is two statements; the renewal is to meet one or the other of them.
            meets => {
                let renewing = tokio::spawn(async move {
                    let begun = Instant::now();
                    while begun.elapsed() < Duration::from_micros(200 * meets) {
                        tokio::task::yield_now().await;
                    }
                    renewing.await
                });
                let claim = taking.await;
                (renewing.await.unwrap(), claim)
            }
        };
        let is_renewed = renewal.unwrap() == [Settled::Done];
        let is_taken = matches!(claim.unwrap(), Claim::Won(_));
        assert!(!(is_renewed && is_taken), "both, in round {round}");
        renewed += usize::from(is_renewed);
        taken += usize::from(is_taken);
    }
    assert!(
        renewed >= 20 && taken >= 20,
        "{renewed} renewals and {taken} takeovers succeeded"
    );
}

// O1: statements whose connections were cut are not left waiting on the server, more and more of them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_on_the_whole_table_leaves_few_backends_behind() {
    const HELD: Duration = Duration::from_secs(8);
    let database = Database::in_real_time();
    let options = PostgresStore::options().operation_timeout(Duration::from_millis(500));
    let store = options.migrate().open(database.pool()).await.unwrap();
    let (mut locker, mut watcher) = (outsider(&database).await, outsider(&database).await);
    let backends = format!(
        "SELECT count(*) FROM pg_stat_activity WHERE application_name = '{}'",
        database.schema()
    );
    let lock = "BEGIN; LOCK TABLE idempotency_records IN ACCESS EXCLUSIVE MODE";
    sql(&mut locker, lock).await;
    let begun = Instant::now();
    let (mut most, mut tried) = (0, 0);
    while begun.elapsed() < HELD {
        let claim = store.claim(request(&format!("locked-{tried}"))).await;
        failed(claim, StoreErrorKind::Unavailable);
        most = most.max(value::<i64>(&mut watcher, &backends).await);
        tried += 1;
        sleep(Duration::from_millis(20)).await;
    }
    sql(&mut locker, "ROLLBACK").await;
    // Those of the pool, and one whose connection was just cut.
    assert!((1..=5).contains(&most), "{most} backends");
    let _ = won(Ok(answered_in_the_end(&store, "afterwards").await));
}

// G4
#[tokio::test]
async fn hundreds_of_claims_on_locked_rows_do_not_delay_a_new_key() {
    let database = Database::in_real_time();
    let store = open(database.pool()).await;
    let mut other = database.connect().await;
    let locked = keys("locked", 600);
    expire(&store, &locked, &mut other).await;
    sql(&mut other, "BEGIN; DELETE FROM idempotency_records").await;
    let waiting = together(locked.iter().map(|key| store.claim(request(key))));
    let meanwhile = async {
        let mut slowest = Duration::ZERO;
        for key in keys("new", 20) {
            let (_, took) = timed(win(&store, &request(&key))).await;
            slowest = slowest.max(took);
        }
        sql(&mut other, "ROLLBACK").await;
        slowest
    };
    // The locked ones are queued before the first new one.
    let (waited, slowest) = tokio::join!(biased; timed(waiting), timed(meanwhile));
    let ((claims, until_all), (slowest, until_rollback)) = (waited, slowest);
    assert!(slowest < Duration::from_secs(1), "it waited {slowest:?}");
    assert!(
        until_rollback <= until_all,
        "they were answered while they were locked"
    );
    claims.into_iter().map(won).for_each(drop);
}

// G1, and nobody is shown the message.
#[tokio::test]
async fn an_error_of_a_trigger_with_its_own_code_fails_alone_and_shows_nothing() {
    const BAD: &str = "key-0815";
    let database = Database::in_real_time();
    let store = open(database.pool()).await;
    let trigger = format!(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
         BEGIN
             IF NEW.key = '{BAD}' THEN
                 RAISE EXCEPTION 'refused: %', convert_from(NEW.key, 'UTF8') USING ERRCODE = 'ZZ001';
             END IF;
             RETURN NEW;
         END $$;
         CREATE TRIGGER refuse BEFORE INSERT ON idempotency_records
             FOR EACH ROW EXECUTE FUNCTION refuse()"
    );
    sql(&mut database.connect().await, &trigger).await;
    let mut all = keys("neighbour", 49);
    all.insert(25, BAD.to_owned());
    let claims = together(all.iter().map(|key| store.claim(request(key)))).await;
    assert_eq!(store.grouping().largest, 50, "they were no batch");
    let (mut winners, mut errors) = (0, Vec::new());
    for (key, claim) in all.iter().zip(claims) {
        match claim {
            Err(error) if key == BAD => errors.push(error),
            claim => {
                let _ = won(claim);
                winners += 1;
            }
        }
    }
    assert_eq!((winners, errors.len()), (49, 1));
    let mut error: Option<&(dyn Error + 'static)> = Some(&errors[0]);
    let mut told = String::new();
    while let Some(shown) = error {
        told += &format!("{shown} {shown:?} {shown:#?}\n");
        error = shown.source();
    }
    assert!(told.contains("ZZ001"), "the code is not told: {told}");
    let hex: String = BAD.bytes().map(|byte| format!("{byte:02x}")).collect();
    for secret in [BAD, &hex, "refused:"] {
        assert!(!told.contains(secret), "{secret}: {told}");
    }
}

/// Rows of different partitions may have the same place in them, which must not be taken for one row.
#[tokio::test]
async fn a_partitioned_table_is_purged_no_further_than_asked() {
    let database = Database::in_real_time();
    let mut connection = database.connect().await;
    let tables = PostgresStore::options().schema_sql();
    let plain =
        ") WITH (autovacuum_vacuum_scale_factor = 0.05, autovacuum_analyze_scale_factor = 0.05);";
    assert_eq!(tables.matches(plain).count(), 1, "{tables}");
    let mut partitioned = ") PARTITION BY HASH (scope, key);".to_owned();
    for n in 0..4 {
        partitioned += &format!(
            "CREATE TABLE part_{n} PARTITION OF idempotency_records
                 FOR VALUES WITH (MODULUS 4, REMAINDER {n});"
        );
    }
    sql(&mut connection, &tables.replace(plain, &partitioned)).await;
    let store = PostgresStore::open(database.pool()).await.unwrap();

    expire(&store, &keys("old", 300), &mut connection).await;
    let used = "SELECT count(DISTINCT tableoid) FROM idempotency_records";
    assert_eq!(value::<i64>(&mut connection, used).await, 4);
    let count = "SELECT count(*) FROM idempotency_records";
    for (limit, purged, left) in [(100, 100, 200), (1_000, 200, 0)] {
        assert_eq!(store.purge(limit).await.unwrap(), purged);
        assert_eq!(value::<i64>(&mut connection, count).await, left);
    }

    let new = keys("new", 40);
    let tickets = win_all(&store, &new).await;
    for held in together(new.iter().map(|key| store.claim(request(key)))).await {
        in_flight(held);
    }
    let completions = tickets
        .iter()
        .map(|ticket| store.complete(ticket, created(), lifetimes()));
    together(completions).await.into_iter().for_each(done);
    for replay in together(new.iter().map(|key| store.claim(request(key)))).await {
        assert_eq!(completed(replay).response, created().response);
    }
}

// C3: a claim in doubt is not released before its other copy is over, but what others do is nobody's doubt.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_of_a_won_claim_does_not_wait_for_unrelated_transactions() {
    let database = Database::in_real_time();
    let options = PostgresStore::options().operation_timeout(Duration::from_millis(500));
    let store = options.migrate().open(database.pool()).await.unwrap();
    let (mut unrelated, mut locker) = (outsider(&database).await, outsider(&database).await);
    let begin = "CREATE TABLE elsewhere (n integer); BEGIN; INSERT INTO elsewhere VALUES (1)";
    sql(&mut unrelated, begin).await;
    let lock = "BEGIN; LOCK TABLE idempotency_records IN ACCESS EXCLUSIVE MODE";
    sql(&mut locker, lock).await;
    let claim = request("k");
    failed(
        store.claim(claim.clone()).await,
        StoreErrorKind::Unavailable,
    );
    sql(&mut locker, "ROLLBACK").await;

    // The store is back as soon as it answers anything.
    answered_in_the_end(&store, "another").await;
    let ticket = win(&store, &claim).await;
    let (released, took) = timed(store.release(&ticket, DAY)).await;
    done(released);
    assert!(took < Duration::from_secs(3), "it waited {took:?}");
    assert_eq!(get(&store, "k").await, None);
    let open = "SELECT txid_current_if_assigned() IS NOT NULL";
    assert!(value::<bool>(&mut unrelated, open).await, "it had ended");
}

//! Connections that break in the middle of a statement, before or after the server did as it was told.

use std::{sync::Arc, time::Duration};

use http::StatusCode;
use sqlx::PgConnection;
use tower_idempotency::{
    State,
    store::{
        Checkpoints, ClaimRequest, Completion, Inspect, Lifetimes, Settled, Store, StoreErrorKind,
    },
};

use super::{common::*, single::*};
use crate::support::{clock::TestClock, database::Database, proxy::Cut};

/// Where a claim's way ends, and whether it has arrived by then.
fn cuts(key: &str) -> [(Cut, bool); 4] {
    [
        (Cut::before(b'B').containing(key), false),
        (Cut::before(b'E'), false),
        // Without it the server takes nothing for asked.
        (Cut::before(b'S'), false),
        (Cut::answered(b'S'), true),
    ]
}

/// A claim whose connection is cut somewhere, and then nothing goes any more.
async fn cut_off(single: &Single, cut: &Cut, request: &ClaimRequest) {
    single.warm_up().await;
    let happened = single.proxy.cuts();
    single.proxy.cut(cut.clone());
    single.proxy.refuse(true);
    let claim = single.store.claim(request.clone()).await;
    failed(claim, StoreErrorKind::Unavailable);
    assert_eq!(
        single.proxy.cuts(),
        happened + 1,
        "{cut:?} did not come to pass"
    );
}

// L7, C3
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_that_is_cut_off_is_there_whole_or_not_at_all_and_won_when_sent_again() {
    let database = Database::new();
    let direct = open(database.pool()).await;
    let single = Single::on(&database).await;
    for (n, (cut, arrives)) in cuts("cut").into_iter().enumerate() {
        let key = format!("cut-{n}");
        let cut_claim = request(&key);
        cut_off(&single, &cut, &cut_claim).await;
        match get(&direct, &key).await {
            Some(record) => {
                assert!(arrives, "{cut:?}");
                assert_eq!((record.token, record.attempt), (cut_claim.token, 1));
                let other = direct.claim(request(&key)).await;
                assert_eq!(in_flight(other).token, cut_claim.token);
            }
            None => assert!(!arrives, "{cut:?}"),
        }
        single.proxy.refuse(false);
        let ticket = won(Ok(claim_when_back(&single.store, &cut_claim).await));
        assert_eq!(ticket.attempt, 1, "{cut:?}");
        done(direct.complete(&ticket, created(), lifetimes()).await);
    }
}

// L7
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_that_is_cut_off_for_ever_lapses_with_its_lease() {
    const LEASE: Duration = Duration::from_secs(30);
    let database = Arc::new(Database::new());
    let clock = TestClock::of(database.clone());
    let direct = open(database.pool()).await;
    let single = Single::on(&database).await;
    for (n, (cut, arrives)) in cuts("cut").into_iter().enumerate() {
        let key = format!("cut-{n}");
        let mut brief = request(&key);
        brief.lease = LEASE;
        cut_off(&single, &cut, &brief).await;
        if arrives {
            clock.advance(LEASE - Duration::from_secs(1));
            let held = in_flight(direct.claim(replacing(&key, brief.token)).await);
            assert_eq!(held.token, brief.token);
            clock.advance(Duration::from_secs(2));
            assert_eq!(win(&direct, &replacing(&key, brief.token)).await.attempt, 2);
        } else {
            assert_eq!(win(&direct, &request(&key)).await.attempt, 1);
        }
        single.proxy.refuse(false);
        claim_when_back(&single.store, &request(&format!("back-{n}"))).await;
    }
}

/// Notes every change of a record.
async fn count_changes(database: &Database) -> PgConnection {
    let mut connection = database.connect().await;
    let count = "CREATE TABLE changes (operation text, key bytea);
        CREATE FUNCTION count_change() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            INSERT INTO changes VALUES (TG_OP, coalesce(NEW.key, OLD.key));
            RETURN NULL;
        END $$;
        CREATE TRIGGER count_change AFTER INSERT OR UPDATE OR DELETE ON idempotency_records
            FOR EACH ROW EXECUTE FUNCTION count_change()";
    sql(&mut connection, count).await;
    connection
}

async fn changes(connection: &mut PgConnection, operation: &str, keys: &str) -> i64 {
    let count = format!(
        "SELECT count(*) FROM changes
         WHERE operation = '{operation}' AND convert_from(key, 'UTF8') LIKE '{keys}'"
    );
    value(connection, &count).await
}

// C3, O2
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_server_did_before_its_answer_was_lost_is_not_done_twice() {
    let database = Database::in_real_time();
    let single = Single::on(&database).await;
    let store = &single.store;
    let mut counted = count_changes(&database).await;

    let losing = single.lose_next_answer().await;
    let ticket = win(store, &request("k")).await;
    losing.assert_lost();
    assert_eq!(ticket.attempt, 1);
    assert_eq!(changes(&mut counted, "INSERT", "k").await, 1);
    assert_eq!(changes(&mut counted, "UPDATE", "k").await, 0);

    let losing = single.lose_next_answer().await;
    done(store.complete(&ticket, created(), lifetimes()).await);
    losing.assert_lost();
    assert_eq!(changes(&mut counted, "UPDATE", "k").await, 1);
    let record = get(store, "k").await.unwrap();
    assert_eq!((record.state, record.attempt), (State::Completed, 1));
    assert_eq!(record.response, created().response);

    let given = win(store, &request("given")).await;
    let losing = single.lose_next_answer().await;
    done(store.release(&given, DAY).await);
    losing.assert_lost();
    assert_eq!(changes(&mut counted, "DELETE", "given").await, 1);

    let saved = win(store, &request("saved")).await;
    done(store.save(&saved, "step", "value".into()).await);
    let losing = single.lose_next_answer().await;
    done(store.release(&saved, DAY).await);
    losing.assert_lost();
    assert_eq!(get(store, "saved").await.unwrap().state, State::Released);
    assert!(abandoned(store.claim(request("saved")).await).released);

    let left = win(store, &request("left")).await;
    let losing = single.lose_next_answer().await;
    done(store.abandon(&left).await);
    losing.assert_lost();
    assert_eq!(get(store, "left").await.unwrap().state, State::Abandoned);

    let forgotten = win(store, &request("forgotten")).await;
    let losing = single.lose_next_answer().await;
    assert!(store.forget(&forgotten.id).await.unwrap());
    losing.assert_lost();
    assert_eq!(changes(&mut counted, "DELETE", "forgotten").await, 1);

    let renewed = win(store, &request("renewed")).await;
    let renew = || store.renew(std::slice::from_ref(&renewed), LONG);
    assert_eq!(renew().await.unwrap(), [Settled::Done]);
    let losing = single.lose_next_answer().await;
    assert_eq!(renew().await.unwrap(), [Settled::Done]);
    losing.assert_lost();
}

/// One statement finds the abandoned record, and another one takes it over; whichever of the answers is
/// lost, or that of what the pool says in between.
// C3
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_take_over_whose_answer_was_lost_is_one_attempt_more() {
    let database = Database::in_real_time();
    let single = Single::on(&database).await;
    let store = &single.store;
    let mut counted = count_changes(&database).await;
    for nth in 1..=3 {
        let key = format!("taken-{nth}");
        let old = win(store, &request(&key)).await;
        done(store.abandon(&old).await);
        single.warm_up().await;
        let before = changes(&mut counted, "UPDATE", &key).await;
        let happened = single.proxy.cuts();
        single.proxy.cut(Cut::answered(b'S').nth(nth));
        assert_eq!(win(store, &replacing(&key, old.token)).await.attempt, 2);
        assert_eq!(
            single.proxy.cuts(),
            happened + 1,
            "answer {nth} was not lost"
        );
        assert_eq!(
            changes(&mut counted, "UPDATE", &key).await,
            before + 1,
            "answer {nth}"
        );
    }
    // The same for a record that is over.
    let short = Lifetimes::new(Duration::from_millis(1));
    for nth in 1..=3 {
        let key = format!("over-{nth}");
        let old = win(store, &request(&key)).await;
        done(store.complete(&old, created(), short).await);
        single.warm_up().await;
        let before = changes(&mut counted, "UPDATE", &key).await;
        let happened = single.proxy.cuts();
        single.proxy.cut(Cut::answered(b'S').nth(nth));
        assert_eq!(win(store, &request(&key)).await.attempt, 1);
        assert_eq!(
            single.proxy.cuts(),
            happened + 1,
            "answer {nth} was not lost"
        );
        assert_eq!(
            changes(&mut counted, "UPDATE", &key).await,
            before + 1,
            "answer {nth}"
        );
    }
}

/// A statement for many is another one, and the answers of many are lost together.
// C3, O2
#[tokio::test]
async fn a_batch_whose_answer_was_lost_is_not_done_twice() {
    let database = Database::in_real_time();
    let single = Single::on(&database).await;
    let store = &single.store;
    let mut counted = count_changes(&database).await;
    for loses in [false, true] {
        let prefix = if loses { "k" } else { "warm-batch" };
        let losing = async || match loses {
            true => Some(single.lose_next_answer().await),
            false => None,
        };
        let lost = losing().await;
        let tickets = win_all(store, &keys(prefix, 40)).await;
        lost.into_iter().for_each(Losing::assert_lost);
        assert!(tickets.iter().all(|ticket| ticket.attempt == 1));
        let (complete, rest) = tickets.split_at(20);
        let (release, abandon) = rest.split_at(10);

        let lost = losing().await;
        let completions = complete
            .iter()
            .map(|ticket| store.complete(ticket, created(), lifetimes()));
        together(completions).await.into_iter().for_each(done);
        lost.into_iter().for_each(Losing::assert_lost);

        let lost = losing().await;
        let releases = release.iter().map(|ticket| store.release(ticket, DAY));
        together(releases).await.into_iter().for_each(done);
        lost.into_iter().for_each(Losing::assert_lost);

        let lost = losing().await;
        let abandons = abandon.iter().map(|ticket| store.abandon(ticket));
        together(abandons).await.into_iter().for_each(done);
        lost.into_iter().for_each(Losing::assert_lost);
    }
    assert_eq!(store.grouping().largest, 40);
    assert_eq!(changes(&mut counted, "INSERT", "k-%").await, 40);
    assert_eq!(changes(&mut counted, "DELETE", "k-%").await, 10);
    let completed = "SELECT count(*) FROM idempotency_records
        WHERE state = 2 AND attempt = 1 AND convert_from(key, 'UTF8') LIKE 'k-%'";
    assert_eq!(value::<i64>(&mut counted, completed).await, 20);
}

/// What has to be sent again meets what happened in between.
// C3
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_whose_answer_was_lost_leaves_the_next_claim_alone() {
    let database = Database::in_real_time();
    let direct = open(database.pool()).await;
    let single = Single::on(&database).await;
    let ticket = win(&single.store, &request("k")).await;
    let losing = single.lose_next_answer().await;
    single.proxy.refuse(true);
    let released = single.store.release(&ticket, DAY).await;
    failed(released, StoreErrorKind::Unavailable);
    losing.assert_lost();
    let next = win(&direct, &request("k")).await;
    single.proxy.refuse(false);
    claim_when_back(&single.store, &request("back")).await;
    lost(single.store.release(&ticket, DAY).await);
    let late = Completion::tombstone(StatusCode::ACCEPTED);
    lost(single.store.complete(&ticket, late, lifetimes()).await);
    done(direct.complete(&next, created(), lifetimes()).await);
}

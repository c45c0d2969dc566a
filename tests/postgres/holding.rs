//! Abandoned records that are taken over to find out what their runs did: races, locks, lost answers.

use std::{sync::Arc, time::Duration};

use sqlx::PgConnection;
use tokio::{
    sync::Barrier,
    task::JoinSet,
    time::{sleep, timeout},
};
use tower_idempotency::{
    PostgresStore, State, Token,
    store::{Claim, Inspect, Settled, Store, StoreError, StoreErrorKind, Ticket},
};

use super::{common::*, single::*};
use crate::support::{database::Database, proxy::Way};

/// What "at once" means while a row is held.
const AT_ONCE: Duration = Duration::from_millis(500);

/// Claims that were given up.
async fn given_up(store: &PostgresStore, keys: &[String]) -> Vec<Ticket> {
    let tickets = win_all(store, keys).await;
    let abandons = tickets.iter().map(|ticket| store.abandon(ticket));
    together(abandons).await.into_iter().for_each(done);
    tickets
}

async fn gone(store: &PostgresStore, key: &str) -> Ticket {
    given_up(store, &[key.to_owned()]).await.remove(0)
}

/// Takes it over under a fresh token.
async fn hold(store: &PostgresStore, late: &Ticket) -> Result<Option<Ticket>, StoreError> {
    hold_as(store, late, Token::random()).await
}

async fn hold_as(
    store: &PostgresStore,
    late: &Ticket,
    token: Token,
) -> Result<Option<Ticket>, StoreError> {
    store.take_over(&late.id, late.token, token, LONG).await
}

fn held(taken: Result<Option<Ticket>, StoreError>) -> Ticket {
    taken.unwrap().expect("it was not taken over")
}

/// Half of the tasks take over, the other half means to run again; each asks for every key, and begins
/// somewhere else. Answers who has got each of the keys, and whether as another run.
async fn race(stores: [PostgresStore; 2], late: &[Ticket]) -> Vec<Vec<(Token, bool)>> {
    const TASKS: usize = 8;
    let barrier = Arc::new(Barrier::new(TASKS));
    let mut tasks = JoinSet::new();
    for n in 0..TASKS {
        let (store, barrier) = (stores[n % 2].clone(), barrier.clone());
        let late = late.to_vec();
        tasks.spawn(async move {
            barrier.wait().await;
            let mut got = Vec::new();
            for at in 0..late.len() {
                let at = (at + n * late.len() / TASKS) % late.len();
                let late = &late[at];
                if n % 4 < 2 {
                    let taken = hold(&store, late).await.unwrap();
                    got.extend(taken.map(|ticket| (at, ticket.token, false)));
                } else {
                    let key = String::from_utf8_lossy(late.id.key.as_bytes()).into_owned();
                    let claim = store.claim(replacing(&key, late.token)).await.unwrap();
                    if let Claim::Won(ticket) = claim {
                        got.push((at, ticket.token, true));
                    }
                }
            }
            got
        });
    }
    let mut winners = vec![Vec::new(); late.len()];
    for (at, token, runs) in tasks.join_all().await.into_iter().flatten() {
        winners[at].push((token, runs));
    }
    winners
}

async fn one_winner_each(level: &str) {
    let database = Database::in_real_time();
    let options = || {
        let level = [("default_transaction_isolation", level)];
        database.options().options(level)
    };
    let stores = [
        open(pool(options(), 4)).await,
        open(pool(options(), 4)).await,
    ];
    let late = given_up(&stores[0], &keys("k", 60)).await;
    let mut held = 0;
    for (late, winners) in late.iter().zip(race(stores.clone(), &late).await) {
        let [(token, runs)] = winners[..] else {
            panic!("{} winners", winners.len());
        };
        let record = stores[0].get(&late.id).await.unwrap().unwrap();
        assert_eq!((record.token, record.state), (token, State::Running));
        assert_eq!(record.attempt, if runs { 2 } else { 1 });
        lost(stores[1].complete(late, created(), lifetimes()).await);
        held += usize::from(!runs);
    }
    assert!((1..60).contains(&held), "{held} of 60 were held, not run");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_instances_that_find_out_and_run_again_at_once_have_one_winner_for_each_record() {
    one_winner_each("read committed").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn at_repeatable_read_there_is_one_winner_too() {
    one_winner_each("repeatable read").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn at_serializable_there_is_one_winner_too() {
    one_winner_each("serializable").await;
}

// L3: what a renewal has promised no hold breaks, and the other way round.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renewal_and_a_hold_never_both_succeed() {
    let database = Database::in_real_time();
    let (owner, other) = (open(database.pool()).await, open(database.pool()).await);
    let mut connection = database.connect().await;
    let (mut renewed, mut taken) = (0, 0);
    for round in 0..200 {
        sql(&mut connection, "DELETE FROM idempotency_owners").await;
        let mut lapsed = request(&format!("k-{round}"));
        lapsed.lease = Duration::ZERO;
        let ticket = win(&owner, &lapsed).await;
        let renewing = owner.renew(std::slice::from_ref(&ticket), LONG);
        let (renewal, hold) = match round % 4 {
            // Either comes first now and then, so that both are seen to succeed.
            0 => (renewing.await, hold(&other, &ticket).await),
            1 => {
                let hold = hold(&other, &ticket).await;
                (renewing.await, hold)
            }
            _ => tokio::join!(renewing, hold(&other, &ticket)),
        };
        let is_renewed = renewal.unwrap() == [Settled::Done];
        let is_taken = hold.unwrap().is_some();
        assert!(!(is_renewed && is_taken), "both, in round {round}");
        renewed += usize::from(is_renewed);
        taken += usize::from(is_taken);
    }
    assert!(
        renewed >= 50 && taken >= 50,
        "{renewed} renewals and {taken} holds succeeded"
    );
}

// G4: whoever has the row locked may be completing it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_record_that_another_session_has_locked_is_not_taken_over_now() {
    let database = Database::in_real_time();
    let store = open(database.pool()).await;
    for (n, locks) in [
        "UPDATE idempotency_records SET state = 2",
        "SELECT FROM idempotency_records FOR UPDATE",
        "SELECT FROM idempotency_records FOR SHARE",
        "DELETE FROM idempotency_records",
    ]
    .into_iter()
    .enumerate()
    {
        let late = gone(&store, &format!("k-{n}")).await;
        let before = store.get(&late.id).await.unwrap();
        let mut other = database.connect().await;
        sql(&mut other, &format!("BEGIN; {locks}")).await;
        let taken = timeout(AT_ONCE, hold(&store, &late)).await;
        let taken = taken.unwrap_or_else(|_| panic!("it waits for {locks}"));
        assert_eq!(taken.unwrap(), None, "{locks}");
        assert_eq!(store.get(&late.id).await.unwrap(), before, "{locks}");
        sql(&mut other, "ROLLBACK").await;
        let ticket = held(hold(&store, &late).await);
        assert_eq!(ticket.attempt, 1);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hold_whose_answer_was_lost_is_had_by_sending_it_again() {
    let database = Database::in_real_time();
    let single = Single::on(&database).await;
    let late = gone(&single.store, "k").await;
    // The statement is prepared once, which is another exchange.
    let other = gone(&single.store, "other").await;
    let _ = held(hold(&single.store, &other).await);
    let losing = single.lose_next_answer().await;
    let ticket = held(hold(&single.store, &late).await);
    losing.assert_lost();
    let record = get(&single.store, "k").await.unwrap();
    assert_eq!(
        (record.token, record.attempt, record.state),
        (ticket.token, 1, State::Running)
    );

    // And by a caller who was told that it failed.
    let late = gone(&single.store, "cut off").await;
    let losing = single.lose_next_answer().await;
    single.proxy.refuse(true);
    let token = Token::random();
    let taken = hold_as(&single.store, &late, token).await;
    failed(taken, StoreErrorKind::Unavailable);
    losing.assert_lost();
    single.proxy.refuse(false);
    let ticket = timeout(OPERATION_TIMEOUT + BACK_WITHIN, async {
        loop {
            match hold_as(&single.store, &late, token).await {
                Ok(taken) => return taken,
                Err(_) => sleep(Duration::from_millis(5)).await,
            }
        }
    });
    let ticket = ticket.await.expect("the store does not come back");
    let ticket = ticket.expect("it is not known by its token");
    assert_eq!((ticket.token, ticket.attempt), (token, 1));
    done(single.store.complete(&ticket, created(), lifetimes()).await);
}

/// A trigger that keeps every change of a record waiting for a lock of the test's.
async fn slow_changes(database: &Database) -> PgConnection {
    let mut gate = database.connect().await;
    let lock = format!("hashtextextended('{}', 0)", database.schema());
    let slow = format!(
        "CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS $$
         BEGIN
             PERFORM pg_advisory_xact_lock_shared({lock});
             RETURN NULL;
         END $$;
         CREATE TRIGGER wait AFTER UPDATE ON idempotency_records
             FOR EACH ROW EXECUTE FUNCTION wait();
         SELECT pg_advisory_lock({lock})"
    );
    sql(&mut gate, &slow).await;
    gate
}

/// The connection breaks while the server is at it. Sent again it finds the row locked, by nobody else but
/// itself: `None` would leave the record held for nobody.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hold_that_is_still_under_way_when_it_is_sent_again_is_waited_for() {
    let database = Database::in_real_time();
    let direct = open(database.pool()).await;
    let late = gone(&direct, "k").await;
    let (proxy, through) = proxied(&database).await;
    let store = open(pool(through, 2)).await;
    let mut gate = slow_changes(&database).await;
    let mut watch = database.connect().await;
    let taking = {
        let (store, late) = (store.clone(), late.clone());
        tokio::spawn(async move { hold(&store, &late).await })
    };
    let waits = "SELECT EXISTS (SELECT FROM pg_stat_activity a JOIN pg_locks l USING (pid)
        WHERE l.locktype = 'advisory' AND NOT l.granted
            AND a.application_name = current_setting('application_name'))";
    becomes_true(&mut watch, waits).await;
    proxy.cut_all().await;
    // It has been sent again by then, and more than once.
    sleep(Duration::from_millis(200)).await;
    assert!(
        !taking.is_finished(),
        "it was answered while it is under way"
    );
    sql(&mut gate, "SELECT pg_advisory_unlock_all()").await;
    let ticket = timeout(Duration::from_secs(5), taking).await;
    let ticket = held(ticket.expect("it does not go on").unwrap());
    let record = get(&direct, "k").await.unwrap();
    assert_eq!((record.token, record.attempt), (ticket.token, 1));
}

/// The ticket that taking it over would give.
fn proposed(late: &Ticket) -> Ticket {
    let mut ticket = late.clone();
    ticket.token = Token::random();
    ticket
}

/// At whatever moment its caller goes away: what comes after it is decided after it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hold_that_was_dropped_is_given_up_by_the_abandon_that_follows() {
    let database = Database::in_real_time();
    let direct = open(database.pool()).await;
    let late = given_up(&direct, &keys("k", 60)).await;
    let before = given_up(&direct, &keys("before", 60)).await;
    let (proxy, through) = proxied(&database).await;
    let store = open(pool(through, 2)).await;
    proxy.delay(Way::ToServer, Duration::from_millis(10));
    proxy.delay(Way::ToClient, Duration::from_millis(10));
    let (mut taken, mut not) = (0, 0);
    for (late, before) in late.into_iter().zip(before) {
        // So that it is under way when it is dropped, or has not begun.
        let busy = {
            let store = store.clone();
            tokio::spawn(async move { store.abandon(&before).await })
        };
        tokio::task::yield_now().await;
        let mine = proposed(&late);
        let patience = Duration::from_millis(rand::random_range(0..30));
        let hold = timeout(patience, hold_as(&store, &late, mine.token)).await;
        let settled = store.abandon(&mine).await.unwrap();
        let record = direct.get(&late.id).await.unwrap().unwrap();
        assert_eq!(record.state, State::Abandoned, "after {patience:?}");
        match settled {
            Settled::Done => assert_eq!(record.token, mine.token),
            Settled::Lost => {
                assert!(hold.is_err(), "it was lost after it was held");
                assert_eq!(record.token, late.token);
            }
        }
        done(busy.await.unwrap());
        taken += usize::from(settled == Settled::Done);
        not += usize::from(settled == Settled::Lost);
    }
    assert!(taken > 0 && not > 0, "{taken} taken over, {not} not");
}

/// The other ways to end it are in another queue: at worst nothing comes of it for as long as it holds.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_overtakes_a_dropped_hold_leaves_nothing_that_does_not_end() {
    let database = Database::in_real_time();
    let direct = open(database.pool()).await;
    let late = given_up(&direct, &keys("k", 40)).await;
    let (proxy, through) = proxied(&database).await;
    let store = open(pool(through, 4)).await;
    proxy.delay(Way::ToServer, Duration::from_millis(5));
    let brief = Duration::from_millis(300);
    for (n, late) in late.iter().enumerate() {
        let mine = proposed(late);
        let patience = Duration::from_millis(rand::random_range(0..12));
        let hold = store.take_over(&late.id, late.token, mine.token, brief);
        let hold = timeout(patience, hold).await;
        match n % 2 {
            0 => {
                let settled = store.release(&mine, DAY).await.unwrap();
                assert!(settled == Settled::Done || hold.is_err());
            }
            _ => assert!(store.forget(&late.id).await.unwrap()),
        }
    }
    sleep(brief * 2).await;
    for (n, late) in late.iter().enumerate() {
        let record = direct.get(&late.id).await.unwrap();
        let key = format!("k-{n}");
        match (record, n % 2) {
            (None, _) => assert_eq!(win(&direct, &request(&key)).await.attempt, 1),
            (Some(_), 0) => {
                let found = abandoned(direct.claim(request(&key)).await);
                let again = win(&direct, &replacing(&key, found.token)).await;
                assert_eq!(again.attempt, 2);
            }
            (Some(record), _) => panic!("forgotten, and there again: {record:?}"),
        }
    }
}

//! What happens between the snapshot of a statement and its locks: forced, by a clock that stops the
//! statement in between.

use std::time::Duration;

use http::StatusCode;
use sqlx::PgConnection;
use tokio::{task::JoinHandle, time::timeout};
use tower_idempotency::{
    PostgresStore, State, Token,
    store::{
        Checkpoints, Claim, ClaimRequest, Completion, Inspect, Lifetimes, Settled, Store,
        StoreError, Ticket,
    },
};

use super::common::*;
use crate::support::database::Database;

/// A database in whose middle a statement can be stopped.
///
/// Its `clock_timestamp()`, which every statement asks after its snapshot was taken, waits for a lock
/// when a connection of [`stopped`](Self::stopped) asks in a statement with a certain text.
struct Between {
    database: Database,
    /// Holds the lock.
    gate: PgConnection,
    /// Looks at who waits for it.
    watch: PgConnection,
}

/// A lock of the database that no other test knows.
fn lock(database: &Database) -> String {
    format!("hashtextextended('{}', 0)", database.schema())
}

impl Between {
    /// Statements of the stopped instance that contain this text will stop.
    async fn statements_with(text: &str) -> Self {
        let database = Database::in_real_time();
        let mut gate = database.connect().await;
        let lock = lock(&database);
        let clock = format!(
            "CREATE FUNCTION clock_timestamp() RETURNS timestamptz LANGUAGE plpgsql VOLATILE AS $$
             BEGIN
                 IF current_setting('application_name') = 'stopped'
                     AND position('{text}' IN current_query()) > 0
                 THEN
                     PERFORM pg_advisory_lock_shared({lock});
                     PERFORM pg_advisory_unlock_shared({lock});
                 END IF;
                 RETURN pg_catalog.clock_timestamp();
             END $$"
        );
        sql(&mut gate, &clock).await;
        let watch = database.connect().await;
        Self {
            database,
            gate,
            watch,
        }
    }

    async fn free(&self) -> PostgresStore {
        open(self.database.pool()).await
    }

    /// An instance whose statements stop while the gate is closed.
    async fn stopped(&self) -> PostgresStore {
        open(pool(self.database.options().application_name("stopped"), 2)).await
    }

    async fn close_gate(&mut self) {
        let close = format!("SELECT pg_advisory_lock({})", lock(&self.database));
        sql(&mut self.gate, &close).await;
    }

    async fn open_gate(&mut self) {
        let open = format!("SELECT pg_advisory_unlock({})", lock(&self.database));
        sql(&mut self.gate, &open).await;
    }

    /// Waits until a statement has its snapshot and stands before the gate.
    async fn is_stopped(&mut self) {
        let waits = format!(
            "SELECT EXISTS (
                 SELECT FROM pg_locks
                 WHERE locktype = 'advisory' AND NOT granted
                     AND (classid::bigint << 32 | objid::bigint) = {}
             )",
            lock(&self.database)
        );
        becomes_true(&mut self.watch, &waits).await;
    }
}

fn claiming(store: &PostgresStore, request: ClaimRequest) -> JoinHandle<Result<Claim, StoreError>> {
    let store = store.clone();
    tokio::spawn(async move { store.claim(request).await })
}

async fn answered<T>(task: JoinHandle<T>) -> T {
    let answer = timeout(Duration::from_secs(10), task).await;
    answer.expect("it does not go on").unwrap()
}

/// What only the statement that takes records over contains.
const TAKING: &str = "took AS";
const CLAIMING: &str = "made AS";
const SETTLING: &str = "done AS";
const HOLDING: &str = "taken AS";
const PURGING: &str = "gone AS (\n    DELETE FROM";

/// A claim whose lease is over at once, so that its record may be taken over while its owner lives on.
fn brief(key: &str) -> ClaimRequest {
    let mut brief = request(key);
    brief.lease = Duration::from_millis(1);
    brief
}

/// An owner that is late, and a claim that means to take its record over, stopped after it saw it
/// abandoned.
async fn late_owner(
    between: &mut Between,
) -> (PostgresStore, Ticket, JoinHandle<Result<Claim, StoreError>>) {
    let (owner, taker) = (between.free().await, between.stopped().await);
    let ticket = win(&owner, &brief("k")).await;
    let held = loop {
        if let Claim::Abandoned(held) = owner.claim(request("k")).await.unwrap() {
            break held;
        }
    };
    assert_eq!(held.token, ticket.token);
    between.close_gate().await;
    let taking = claiming(&taker, replacing("k", ticket.token));
    between.is_stopped().await;
    (owner, ticket, taking)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_record_completed_since_the_snapshot_is_not_taken_over() {
    let mut between = Between::statements_with(TAKING).await;
    let (owner, ticket, taking) = late_owner(&mut between).await;
    done(owner.complete(&ticket, created(), lifetimes()).await);
    between.open_gate().await;
    let record = completed(answered(taking).await);
    assert_eq!((record.token, record.attempt), (ticket.token, 1));
    let record = get(&owner, "k").await.unwrap();
    assert_eq!(
        (record.state, record.response),
        (State::Completed, created().response)
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_record_taken_over_since_the_snapshot_is_not_taken_over_again() {
    let mut between = Between::statements_with(TAKING).await;
    let (other, old, taking) = late_owner(&mut between).await;
    let winner = win(&other, &replacing("k", old.token)).await;
    assert_eq!(winner.attempt, 2);
    between.open_gate().await;
    assert_eq!(in_flight(answered(taking).await).token, winner.token);
    lost(other.complete(&old, created(), lifetimes()).await);
    done(other.complete(&winner, created(), lifetimes()).await);
}

/// It was abandoned in the snapshot and is abandoned now, but it is another claim's.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_record_taken_over_and_abandoned_since_the_snapshot_is_not_taken_by_its_old_token() {
    let mut between = Between::statements_with(TAKING).await;
    let (other, old, taking) = late_owner(&mut between).await;
    let second = win(&other, &replacing("k", old.token)).await;
    done(other.abandon(&second).await);
    between.open_gate().await;
    let held = abandoned(answered(taking).await);
    assert_eq!((held.token, held.attempt), (second.token, 2));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_record_released_since_the_snapshot_is_won_as_new() {
    let mut between = Between::statements_with(TAKING).await;
    let (owner, ticket, taking) = late_owner(&mut between).await;
    done(owner.release(&ticket, DAY).await);
    between.open_gate().await;
    assert_eq!(won(answered(taking).await).attempt, 1);
}

/// An expired record, and two who ask for its key: one of them is stopped after it saw it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_expired_record_claimed_since_the_snapshot_is_not_claimed_again() {
    let mut between = Between::statements_with(TAKING).await;
    let (first, second) = (between.free().await, between.stopped().await);
    let over = win(&first, &request("k")).await;
    let short = Lifetimes::new(Duration::from_millis(1));
    done(first.complete(&over, created(), short).await);
    between.close_gate().await;
    let claiming = claiming(&second, request("k"));
    between.is_stopped().await;
    let ticket = win(&first, &request("k")).await;
    done(first.save(&ticket, "step", "kept".into()).await);
    between.open_gate().await;
    assert_eq!(in_flight(answered(claiming).await).token, ticket.token);
    let saved = first
        .load(&ticket)
        .await
        .unwrap()
        .expect("the claim is lost");
    assert_eq!(saved.len(), 1, "its checkpoint is lost");
    done(first.complete(&ticket, created(), lifetimes()).await);
}

/// Both saw no record. The second one inserts its own after the first has.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_claimed_since_the_snapshot_is_in_flight_or_replayed() {
    let mut between = Between::statements_with(CLAIMING).await;
    let (first, second) = (between.free().await, between.stopped().await);
    for completes in [false, true] {
        let key = format!("k-{completes}");
        between.close_gate().await;
        let claiming = claiming(&second, request(&key));
        between.is_stopped().await;
        let ticket = win(&first, &request(&key)).await;
        if completes {
            done(first.complete(&ticket, created(), lifetimes()).await);
        }
        between.open_gate().await;
        let claim = answered(claiming).await;
        match completes {
            true => assert_eq!(completed(claim).token, ticket.token),
            false => assert_eq!(in_flight(claim).token, ticket.token),
        }
    }
}

// L3: the owner's completion has seen its own claim, and is too late all the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_completion_whose_record_was_taken_over_since_the_snapshot_is_lost() {
    for finishes in [false, true] {
        let mut between = Between::statements_with(SETTLING).await;
        let (taker, owner) = (between.free().await, between.stopped().await);
        let late = win(&owner, &request("k")).await;
        done(owner.abandon(&late).await);
        between.close_gate().await;
        let completing = {
            let (owner, late) = (owner.clone(), late.clone());
            let accepted = Completion::tombstone(StatusCode::ACCEPTED);
            tokio::spawn(async move { owner.complete(&late, accepted, lifetimes()).await })
        };
        between.is_stopped().await;
        let winner = win(&taker, &replacing("k", late.token)).await;
        if finishes {
            done(taker.complete(&winner, created(), lifetimes()).await);
        }
        between.open_gate().await;
        lost(answered(completing).await);
        let record = get(&taker, "k").await.unwrap();
        assert_eq!(record.token, winner.token);
        assert_eq!(record.status, finishes.then_some(StatusCode::CREATED));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_record_claimed_since_the_snapshot_is_not_purged() {
    let mut between = Between::statements_with(PURGING).await;
    let (store, cleaner) = (between.free().await, between.stopped().await);
    let short = Lifetimes::new(Duration::from_millis(1));
    for key in ["k", "other"] {
        let over = win(&store, &request(key)).await;
        done(store.complete(&over, created(), short).await);
    }
    between.close_gate().await;
    let purging = {
        let cleaner = cleaner.clone();
        tokio::spawn(async move { cleaner.purge(100).await })
    };
    between.is_stopped().await;
    let ticket = win(&store, &request("k")).await;
    done(store.save(&ticket, "step", "kept".into()).await);
    between.open_gate().await;
    assert_eq!(answered(purging).await.unwrap(), 1);
    let saved = store
        .load(&ticket)
        .await
        .unwrap()
        .expect("the claim was purged");
    assert_eq!(saved.len(), 1, "its checkpoint was purged");
    done(store.complete(&ticket, created(), lifetimes()).await);
}

/// The response that is over was another run's.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_response_written_since_the_snapshot_is_not_purged() {
    let mut between = Between::statements_with("emptied AS").await;
    let (store, cleaner) = (between.free().await, between.stopped().await);
    let over = win(&store, &request("k")).await;
    let short = lifetimes().response_ttl(Duration::from_millis(1));
    done(store.complete(&over, created(), short).await);
    between.close_gate().await;
    let purging = {
        let cleaner = cleaner.clone();
        tokio::spawn(async move { cleaner.purge(100).await })
    };
    between.is_stopped().await;
    let mut other = between.database.connect().await;
    let renew = "UPDATE idempotency_records SET response = 'new', response_expires = NULL";
    sql(&mut other, renew).await;
    between.open_gate().await;
    assert_eq!(answered(purging).await.unwrap(), 0);
    assert_eq!(get(&store, "k").await.unwrap().response.unwrap(), "new");
}

/// A takeover by which somebody means to find out what a run did, stopped after it saw the record abandoned.
async fn stopped_hold(
    between: &mut Between,
) -> (
    PostgresStore,
    Ticket,
    JoinHandle<Result<Option<Ticket>, StoreError>>,
) {
    let (owner, taker) = (between.free().await, between.stopped().await);
    let ticket = win(&owner, &brief("k")).await;
    while !matches!(owner.claim(request("k")).await, Ok(Claim::Abandoned(_))) {}
    between.close_gate().await;
    let late = ticket.clone();
    let holding = tokio::spawn(async move {
        let taken = taker.take_over(&late.id, late.token, Token::random(), LONG);
        taken.await
    });
    between.is_stopped().await;
    (owner, ticket, holding)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_record_completed_since_the_snapshot_is_not_held() {
    let mut between = Between::statements_with(HOLDING).await;
    let (owner, ticket, holding) = stopped_hold(&mut between).await;
    done(owner.complete(&ticket, created(), lifetimes()).await);
    let before = get(&owner, "k").await;
    between.open_gate().await;
    assert_eq!(answered(holding).await.unwrap(), None);
    assert_eq!(get(&owner, "k").await, before);
    assert_eq!(before.unwrap().response, created().response);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_record_held_or_run_again_since_the_snapshot_is_not_held_too() {
    for runs in [false, true] {
        let mut between = Between::statements_with(HOLDING).await;
        let (other, late, holding) = stopped_hold(&mut between).await;
        let winner = match runs {
            true => win(&other, &replacing("k", late.token)).await,
            false => {
                let taken = other.take_over(&late.id, late.token, Token::random(), LONG);
                taken.await.unwrap().expect("it is abandoned")
            }
        };
        between.open_gate().await;
        assert_eq!(answered(holding).await.unwrap(), None);
        lost(other.complete(&late, created(), lifetimes()).await);
        done(other.complete(&winner, created(), lifetimes()).await);
    }
}

/// It was abandoned in the snapshot and is abandoned now, but it is another token's.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_record_held_and_given_up_since_the_snapshot_is_not_held_by_its_old_token() {
    let mut between = Between::statements_with(HOLDING).await;
    let (other, late, holding) = stopped_hold(&mut between).await;
    let taken = other.take_over(&late.id, late.token, Token::random(), LONG);
    let second = taken.await.unwrap().expect("it is abandoned");
    done(other.abandon(&second).await);
    between.open_gate().await;
    assert_eq!(answered(holding).await.unwrap(), None);
    let found = abandoned(other.claim(request("k")).await);
    assert_eq!((found.token, found.attempt), (second.token, 1));
}

/// An owner that asked whether it still holds its claim was told that it does.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_record_renewed_since_the_snapshot_is_not_held() {
    let mut between = Between::statements_with(HOLDING).await;
    let (owner, ticket, holding) = stopped_hold(&mut between).await;
    let renewed = owner.renew(std::slice::from_ref(&ticket), LONG).await;
    assert_eq!(renewed.unwrap(), [Settled::Done]);
    between.open_gate().await;
    assert_eq!(answered(holding).await.unwrap(), None);
    done(owner.complete(&ticket, created(), lifetimes()).await);
}

/// Released and claimed anew, it is another record by the same name.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_record_released_and_claimed_since_the_snapshot_is_not_held() {
    let mut between = Between::statements_with(HOLDING).await;
    let (owner, ticket, holding) = stopped_hold(&mut between).await;
    done(owner.release(&ticket, DAY).await);
    let next = win(&owner, &request("k")).await;
    between.open_gate().await;
    assert_eq!(answered(holding).await.unwrap(), None);
    done(owner.complete(&next, created(), lifetimes()).await);
}

/// Nothing here stops anything: without a text to look for the clock just goes on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_gate_stops_only_the_statement_it_is_meant_for() {
    let mut between = Between::statements_with(TAKING).await;
    let (free, stopped) = (between.free().await, between.stopped().await);
    between.close_gate().await;
    for store in [&free, &stopped] {
        let key = format!("{:?}", Token::random());
        let ticket = win(store, &request(&key)).await;
        done(store.complete(&ticket, created(), lifetimes()).await);
    }
    between.open_gate().await;
}

//! Records taken over to find out what their runs did, beside handlers and other processes.

use std::task::{Context, Waker};

use sqlx::Sqlite;
use tokio::time::timeout;

use super::*;
use crate::{
    TxOptions,
    record::State,
    transacted::Recording,
    transaction::{OpenTransaction, Ready},
};

const LONG: Duration = Duration::from_secs(600);

async fn gone(store: &SqliteStore, key: &str) -> Ticket {
    let ticket = win(store, key).await;
    assert_eq!(store.abandon(&ticket).await.unwrap(), Settled::Done);
    ticket
}

async fn hold(store: &SqliteStore, late: &Ticket) -> Result<Option<Ticket>, StoreError> {
    let taken = store.take_over(&late.id, late.token, Token::random(), LONG);
    taken.await
}

async fn begin(store: &SqliteStore) -> Box<dyn OpenTransaction<Sqlite>> {
    let options = TxOptions::default();
    store.source().begin(&options, None, None).await.unwrap()
}

fn recording(ticket: &Ticket) -> Recording {
    Recording {
        ticket: ticket.clone(),
        done: Completion::tombstone(StatusCode::CREATED),
        lifetimes: Lifetimes::new(Duration::from_secs(3600)),
    }
}

/// While a handler has its transaction open nothing is taken over: its commit may be what completes the
/// record.
#[tokio::test]
async fn what_a_handler_completes_meanwhile_is_not_taken_over() {
    for commits in [true, false] {
        let (_directory, path) = place();
        let store = SqliteStore::open(&path).await.unwrap();
        let late = gone(&store, "k").await;
        let mut open = begin(&store).await;
        let completed = open.complete(Some(&recording(&late))).await.unwrap();
        assert!(matches!(completed, Ready::Yes), "{completed:?}");
        let mut holding = Box::pin(hold(&store, &late));
        let waited = timeout(Duration::from_millis(100), &mut holding).await;
        assert!(waited.is_err(), "it did not wait: {waited:?}");
        // Whoever asks hears what is so until then.
        let claim = store.claim(request("k")).await.unwrap();
        assert!(matches!(claim, Claim::Abandoned(_)), "{claim:?}");
        match commits {
            true => open.commit().await.unwrap(),
            false => assert!(open.rollback().await),
        }
        let taken = timeout(Duration::from_secs(1), holding).await;
        let taken = taken.expect("it does not go on").unwrap();
        assert_eq!(taken.is_some(), !commits);
        let record = store.get(&late.id).await.unwrap().unwrap();
        let state = match commits {
            true => State::Completed,
            false => State::Running,
        };
        assert_eq!((record.state, record.attempt), (state, 1));
    }
}

/// What was asked before it and after it is answered in that order, also where they share a transaction.
#[tokio::test]
async fn operations_on_one_record_in_one_transaction_keep_their_order() {
    let (_directory, path) = place();
    let store = SqliteStore::open(&path).await.unwrap();
    let late = gone(&store, "k").await;
    let token = Token::random();
    let mine = Ticket {
        token,
        ..late.clone()
    };
    let before = store.grouping().batches;
    let (early, taken, again, rival, settled, after) = tokio::join!(
        store.abandon(&mine),
        store.take_over(&late.id, late.token, token, LONG),
        store.take_over(&late.id, late.token, token, LONG),
        hold(&store, &late),
        store.abandon(&mine),
        store.claim(request("k")),
    );
    assert_eq!(store.grouping().batches, before + 1, "they share none");
    assert_eq!(early.unwrap(), Settled::Lost);
    assert_eq!(taken.unwrap(), Some(mine.clone()));
    assert_eq!(again.unwrap(), Some(mine));
    assert_eq!(rival.unwrap(), None);
    assert_eq!(settled.unwrap(), Settled::Done);
    let after = after.unwrap();
    assert!(
        matches!(&after, Claim::Abandoned(held) if held.token == token),
        "{after:?}"
    );
}

#[tokio::test]
async fn a_takeover_for_a_caller_that_went_away_before_it_began_does_not_take_place() {
    let (_directory, path) = place();
    let store = SqliteStore::open(&path).await.unwrap();
    let late = gone(&store, "k").await;
    // On this runtime of one thread the writer runs only when this task pauses.
    let mut holding = Box::pin(hold(&store, &late));
    let mut context = Context::from_waker(Waker::noop());
    assert!(holding.as_mut().poll(&mut context).is_pending());
    drop(holding);
    let record = store.get(&late.id).await.unwrap().unwrap();
    assert_eq!((record.token, record.state), (late.token, State::Abandoned));
}

/// All of it is in the file, for whoever opens it next.
#[tokio::test]
async fn a_hold_outlives_the_process_that_took_it_and_lapses() {
    let (_directory, path) = place();
    let clock = Hand::default();
    let options = || SqliteStore::options(&path).clock(clock.clone());
    let (owner, taker) = (
        options().open().await.unwrap(),
        options().open().await.unwrap(),
    );
    let late = gone(&owner, "k").await;
    let ticket = hold(&taker, &late).await.unwrap().unwrap();
    drop(taker);
    let next = options().open().await.unwrap();
    clock.advance(LONG - Duration::from_micros(1));
    let claim = next.claim(request("k")).await.unwrap();
    assert!(
        matches!(&claim, Claim::InFlight(held) if held.token == ticket.token),
        "{claim:?}"
    );
    clock.advance(Duration::from_micros(1));
    let claim = next.claim(request("k")).await.unwrap();
    assert!(
        matches!(&claim, Claim::Abandoned(held) if held.token == ticket.token),
        "{claim:?}"
    );
}

#[tokio::test]
async fn a_damaged_row_is_not_taken_over() {
    let (_directory, path) = place();
    let store = SqliteStore::open(&path).await.unwrap();
    let late = gone(&store, "k").await;
    execute(&path, "UPDATE idempotency_records SET mode = 9").await;
    let error = hold(&store, &late).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Corrupt);
}

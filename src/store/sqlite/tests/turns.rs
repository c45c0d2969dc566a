//! Transactions of handlers, and what the others get meanwhile.

use std::{future::poll_fn, sync::atomic::AtomicUsize, task::Poll, time::Instant};

use sqlx::{Sqlite, Transaction};
use tokio::time::timeout;

use super::{super::turns::Place, *};
use crate::{
    TxOptions,
    record::State,
    transacted::Recording,
    transaction::{OpenTransaction, Ready},
};

type Open = Box<dyn OpenTransaction<Sqlite>>;

const JOURNALS: [Journal; 2] = [Journal::Wal, Journal::Delete];
const LEASE: Duration = Duration::from_secs(30);

/// As long as nobody has to wait for a transaction.
async fn soon<F: Future>(future: F) -> F::Output {
    let limit = Duration::from_millis(100);
    timeout(limit, future).await.expect("not within 100 ms")
}

/// Long before anything would give up waiting, on a machine with other things to do.
async fn in_time<F: Future>(future: F) -> F::Output {
    let limit = Duration::from_secs(1);
    timeout(limit, future).await.expect("not within a second")
}

/// Some time later it has not come.
async fn not_yet<F: Future + Unpin>(future: &mut F) {
    let limit = Duration::from_millis(100);
    assert!(timeout(limit, future).await.is_err(), "it did not wait");
}

async fn try_begin(store: &SqliteStore) -> Result<Open, sqlx::Error> {
    store
        .source()
        .begin(&TxOptions::default(), None, None)
        .await
}

async fn begin(store: &SqliteStore) -> Open {
    try_begin(store).await.unwrap()
}

/// A store on a file where handlers have a table of their own.
async fn handling(options: SqliteStoreOptions) -> SqliteStore {
    execute(&options.path, "CREATE TABLE effects (n INTEGER UNIQUE)").await;
    options.open().await.unwrap()
}

async fn act(open: &mut Open, statements: &'static str) -> Result<(), sqlx::Error> {
    let acted = sqlx::raw_sql(statements)
        .execute(open.connection_mut())
        .await;
    acted.map(|_| ())
}

async fn effects(path: &Path) -> i64 {
    scalar(path, "SELECT count(*) FROM effects").await
}

fn recording(ticket: &Ticket) -> Recording {
    Recording {
        ticket: ticket.clone(),
        done: Completion::retained(StatusCode::CREATED, Bytes::from_static(b"made")),
        lifetimes: Lifetimes::new(Duration::from_secs(3600)),
    }
}

fn code(error: &sqlx::Error) -> Option<std::borrow::Cow<'_, str>> {
    error.as_database_error()?.code()
}

async fn status(store: &SqliteStore, ticket: &Ticket) -> Option<StatusCode> {
    store.get(&ticket.id).await.unwrap().unwrap().status
}

#[tokio::test(flavor = "multi_thread")]
async fn duplicates_are_answered_while_a_handler_holds_its_transaction() {
    for journal in JOURNALS {
        let (_directory, path) = place();
        let hand = Hand::default();
        let options = SqliteStore::options(&path)
            .journal(journal)
            .clock(hand.clone());
        let store = handling(options.clone()).await;
        let silent = options.open().await.unwrap();
        let done = win(&store, "done").await;
        assert_eq!(complete(&store, &done).await.unwrap(), Settled::Done);
        let _ = win(&silent, "silent").await;
        let running = win(&store, "running").await;
        hand.advance(LEASE * 2);
        let mut open = begin(&store).await;
        act(&mut open, "INSERT INTO effects VALUES (1)")
            .await
            .unwrap();
        for _ in 0..3 {
            let completed = soon(store.claim(request("done"))).await.unwrap();
            assert!(matches!(completed, Claim::Completed(_)), "{completed:?}");
            let abandoned = soon(store.claim(request("silent"))).await.unwrap();
            assert!(matches!(abandoned, Claim::Abandoned(_)), "{abandoned:?}");
            let held = soon(store.claim(request("running"))).await.unwrap();
            assert!(
                matches!(held, Claim::InFlight(_)),
                "of this process: {held:?}"
            );
            let record = soon(store.get(&done.id)).await.unwrap().unwrap();
            assert_eq!(record.state, State::Completed);
            assert_eq!(soon(store.load(&running)).await.unwrap(), Some(Vec::new()));
        }
        hand.advance(Duration::from_secs(600));
        let over = soon(store.claim(request("running"))).await.unwrap();
        assert!(
            matches!(over, Claim::Abandoned(_)),
            "max_run is over: {over:?}"
        );
        open.commit().await.unwrap();
        assert_eq!(effects(&path).await, 1);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_claim_waits_for_the_transaction_and_is_won_right_after_it() {
    for journal in JOURNALS {
        let (_directory, path) = place();
        let store = handling(SqliteStore::options(&path).journal(journal)).await;
        let open = begin(&store).await;
        let mut claim = Box::pin(store.claim(request("new")));
        not_yet(&mut claim).await;
        open.commit().await.unwrap();
        assert!(matches!(in_time(claim).await, Ok(Claim::Won(_))));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn more_new_claims_than_fit_a_transaction_delay_no_duplicate_and_are_all_won_in_one_turn() {
    let (_directory, path) = place();
    let store = handling(SqliteStore::options(&path)).await;
    let known = win(&store, "known").await;
    let ends = win(&store, "ends").await;
    let first = begin(&store).await;
    let mut claims = JoinSet::new();
    for n in 0..600_u32 {
        let store = store.clone();
        claims.spawn(async move { win(&store, n.to_be_bytes()).await });
    }
    let mut completion = Box::pin(complete(&store, &ends));
    not_yet(&mut completion).await;
    let held = soon(store.claim(request("known"))).await.unwrap();
    assert!(matches!(held, Claim::InFlight(_)));
    let mut second = Box::pin(begin(&store));
    not_yet(&mut second).await;
    first.commit().await.unwrap();
    let second = second.await;
    assert_eq!(completion.await.unwrap(), Settled::Done);
    claims.join_all().await;
    second.rollback().await;
    assert_eq!(store.renew(&[known], LEASE).await.unwrap(), [Settled::Done]);
}

#[tokio::test(flavor = "multi_thread")]
async fn between_the_transactions_of_two_handlers_the_writer_has_its_turn() {
    let (_directory, path) = place();
    let store = handling(SqliteStore::options(&path)).await;
    let begun = Arc::new(AtomicUsize::new(0));
    let mut handlers = JoinSet::new();
    for _ in 0..4 {
        let (store, begun) = (store.clone(), begun.clone());
        handlers.spawn(async move {
            for _ in 0..10 {
                let mut open = begin(&store).await;
                let n = begun.fetch_add(1, Ordering::SeqCst);
                let insert = sqlx::query("INSERT INTO effects VALUES (?)").bind(n as i64);
                insert.execute(open.connection_mut()).await.unwrap();
                tokio::time::sleep(Duration::from_millis(10)).await;
                assert_eq!(open.complete(None).await.unwrap(), Ready::Yes);
                open.commit().await.unwrap();
            }
        });
    }
    for n in 0..10_u8 {
        let before = begun.load(Ordering::SeqCst);
        let _ = win(&store, [n]).await;
        let waited = begun.load(Ordering::SeqCst) - before;
        // One is open, and another may begin before the claim stands in line, or after it is won.
        assert!(waited <= 3, "waited for {waited} transactions");
    }
    handlers.join_all().await;
    assert_eq!(effects(&path).await, 40);
}

#[tokio::test]
async fn a_place_in_the_line_is_kept_without_being_polled() {
    let turns = Turns::new();
    let turn = turns.of_handler().await.unwrap();
    let (mut first, mut second) = (Place::default(), Place::default());
    for place in [&mut first, &mut second] {
        let polled = poll_fn(|cx| Poll::Ready(place.poll_turn(&turns, cx))).await;
        assert!(polled.is_pending() && place.is_in_line());
    }
    drop(turn);
    let overtaking = poll_fn(|cx| Poll::Ready(second.poll_turn(&turns, cx))).await;
    assert!(overtaking.is_pending());
    in_time(poll_fn(|cx| first.poll_turn(&turns, cx))).await;
    drop(first);
    in_time(poll_fn(|cx| second.poll_turn(&turns, cx))).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_writer_that_has_answered_everybody_leaves_the_line() {
    let (_directory, path) = place();
    let store = handling(SqliteStore::options(&path)).await;
    let _ = win(&store, "known").await;
    for _ in 0..3 {
        let open = begin(&store).await;
        let held = soon(store.claim(request("known"))).await.unwrap();
        assert!(matches!(held, Claim::InFlight(_)));
        // Nobody waits for this one any more.
        let new = store.claim(request("new"));
        assert!(timeout(Duration::from_millis(5), new).await.is_err());
        open.rollback().await;
        in_time(begin(&store)).await.rollback().await;
    }
    assert_eq!(store.get(&request("new").id).await.unwrap(), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_renewal_of_one_ticket_is_answered_and_the_lease_is_written_later() {
    let (_directory, path) = place();
    let hand = Hand::default();
    let options = SqliteStore::options(&path).clock(hand.clone());
    let store = handling(options.clone()).await;
    let ticket = win(&store, "k").await;
    let forgotten = win(&store, "forgotten").await;
    assert!(store.forget(&forgotten.id).await.unwrap());
    let open = begin(&store).await;
    hand.advance(Duration::from_secs(20));
    for _ in 0..3 {
        let renewed = soon(store.renew(std::slice::from_ref(&ticket), LEASE)).await;
        assert_eq!(renewed.unwrap(), [Settled::Done]);
    }
    let lost = soon(store.renew(&[forgotten], LEASE)).await.unwrap();
    assert_eq!(lost, [Settled::Lost]);
    open.rollback().await;
    let extended = async {
        while scalar(&path, "SELECT alive_until FROM idempotency_owners").await < 50_000_000 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    timeout(Duration::from_secs(5), extended).await.unwrap();
    hand.advance(Duration::from_secs(20));
    let other = options.open().await.unwrap();
    assert!(matches!(
        other.claim(request("k")).await,
        Ok(Claim::InFlight(_))
    ));
    // A lease that has lapsed is no promise: others may have the record before it is written anew.
    hand.advance(LEASE);
    let open = begin(&store).await;
    let tickets = [ticket];
    let mut renewal = Box::pin(store.renew(&tickets, LEASE));
    not_yet(&mut renewal).await;
    open.rollback().await;
    assert_eq!(in_time(renewal).await.unwrap(), [Settled::Done]);
}

#[tokio::test(flavor = "multi_thread")]
async fn while_another_process_writes_duplicates_are_answered_and_new_claims_wait() {
    for journal in JOURNALS {
        let (_directory, path) = place();
        let options = SqliteStore::options(&path).journal(journal);
        let (store, other) = (
            handling(options.clone()).await,
            options.open().await.unwrap(),
        );
        let ticket = win(&store, "known").await;
        let mut open = begin(&other).await;
        act(&mut open, "INSERT INTO effects VALUES (1)")
            .await
            .unwrap();
        let mut claim = Box::pin(store.claim(request("new")));
        for _ in 0..3 {
            not_yet(&mut claim).await;
            let held = soon(store.claim(request("known"))).await.unwrap();
            assert!(matches!(held, Claim::InFlight(_)), "{held:?}");
            let renewed = soon(store.renew(std::slice::from_ref(&ticket), LEASE)).await;
            assert_eq!(renewed.unwrap(), [Settled::Done]);
        }
        open.commit().await.unwrap();
        assert!(matches!(in_time(claim).await, Ok(Claim::Won(_))));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operation_is_refused_once_it_has_itself_waited_for_all_of_busy_timeout() {
    let (_directory, path) = place();
    let options = SqliteStore::options(&path).busy_timeout(Duration::from_millis(300));
    let (store, other) = (
        handling(options.clone()).await,
        options.open().await.unwrap(),
    );
    let open = begin(&other).await;
    let refused = async |key: &'static str| {
        let started = Instant::now();
        let error = store.claim(request(key)).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Unavailable);
        assert!(error.to_string().contains("locked"), "{error}");
        let waited = started.elapsed();
        assert!(waited >= Duration::from_millis(290), "{key}: {waited:?}");
        assert!(waited < Duration::from_millis(1_000), "{key}: {waited:?}");
    };
    let later = async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        refused("later").await;
    };
    tokio::join!(refused("first"), later);
    let busy = try_begin(&store).await.err().unwrap();
    assert_eq!(code(&busy).as_deref(), Some("5"));
    open.rollback().await;
    let _ = win(&store, "first").await;
    begin(&store).await.commit().await.unwrap();
}

/// Runs until it is interrupted.
const ENDLESS: &str =
    "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n";
const ENDLESS_WRITE: &str = "INSERT INTO effects WITH RECURSIVE n(x) AS \
    (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x FROM n";

#[tokio::test(flavor = "multi_thread")]
async fn a_rollback_interrupts_the_statement_under_way() {
    for (journal, statement) in [
        (Journal::Wal, ENDLESS),
        (Journal::Wal, ENDLESS_WRITE),
        (Journal::Delete, ENDLESS),
        (Journal::Delete, ENDLESS_WRITE),
    ] {
        let (_directory, path) = place();
        let store = handling(SqliteStore::options(&path).journal(journal)).await;
        for is_cut in [false, true] {
            let mut open = begin(&store).await;
            act(&mut open, "INSERT INTO effects VALUES (-1)")
                .await
                .unwrap();
            let endless = act(&mut open, statement);
            assert!(timeout(Duration::from_millis(50), endless).await.is_err());
            match is_cut {
                false => assert!(in_time(open.rollback()).await),
                true => open.cut(),
            }
            let _ = in_time(win(&store, [u8::from(is_cut)])).await;
        }
        let mut open = in_time(begin(&store)).await;
        act(&mut open, "INSERT INTO effects VALUES (0)")
            .await
            .unwrap();
        assert_eq!(open.complete(None).await.unwrap(), Ready::Yes);
        open.commit().await.unwrap();
        assert_eq!(effects(&path).await, 1, "{journal:?} {statement}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_ends_its_transaction_by_itself_is_found_out() {
    let (_directory, path) = place();
    let store = handling(SqliteStore::options(&path)).await;
    let trigger = "CREATE TRIGGER refused BEFORE INSERT ON effects WHEN NEW.n < 0 \
        BEGIN SELECT RAISE(ROLLBACK, 'refused'); END";
    execute(&path, trigger).await;
    for ends in [
        "COMMIT",
        "ROLLBACK",
        "COMMIT; BEGIN IMMEDIATE",
        "ROLLBACK; BEGIN",
        "INSERT INTO effects VALUES (1); INSERT OR ROLLBACK INTO effects VALUES (1)",
        "INSERT INTO effects VALUES (-1)",
        "RELEASE tower_idempotency_run",
    ] {
        let mut open = begin(&store).await;
        // What the handler makes of it does not matter.
        let _ = act(&mut open, ends).await;
        assert_eq!(open.complete(None).await.unwrap(), Ready::Void, "{ends}");
        open.rollback().await;
        let _ = in_time(win(&store, ends)).await;
    }
    let mut open = begin(&store).await;
    std::mem::forget(open.connection_mut().begin().await.unwrap());
    assert_eq!(open.complete(None).await.unwrap(), Ready::Void);
    open.rollback().await;
    assert_eq!(effects(&path).await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn savepoints_of_a_handler_are_its_own() {
    let (_directory, path) = place();
    let store = handling(SqliteStore::options(&path)).await;
    let mut open = begin(&store).await;
    let mut kept: Transaction<'_, Sqlite> = open.connection_mut().begin().await.unwrap();
    sqlx::raw_sql("INSERT INTO effects VALUES (1)")
        .execute(&mut *kept)
        .await
        .unwrap();
    kept.commit().await.unwrap();
    let mut dropped = open.connection_mut().begin().await.unwrap();
    sqlx::raw_sql("INSERT INTO effects VALUES (2)")
        .execute(&mut *dropped)
        .await
        .unwrap();
    drop(dropped);
    let named = "SAVEPOINT mine; INSERT INTO effects VALUES (3); ROLLBACK TO mine; RELEASE mine";
    act(&mut open, named).await.unwrap();
    act(&mut open, "SAVEPOINT left; INSERT INTO effects VALUES (4)")
        .await
        .unwrap();
    assert_eq!(open.complete(None).await.unwrap(), Ready::Yes);
    open.commit().await.unwrap();
    assert_eq!(scalar(&path, "SELECT sum(n) FROM effects").await, 5);
}

#[tokio::test(flavor = "multi_thread")]
async fn effect_and_record_are_committed_together_or_not_at_all() {
    for journal in JOURNALS {
        let (_directory, path) = place();
        let store = handling(SqliteStore::options(&path).journal(journal)).await;
        let ticket = win(&store, "k").await;
        for commits in [false, true] {
            let mut open = begin(&store).await;
            act(&mut open, "INSERT INTO effects VALUES (1)")
                .await
                .unwrap();
            let ready = open.complete(Some(&recording(&ticket))).await.unwrap();
            assert_eq!(ready, Ready::Yes);
            assert_eq!(
                (effects(&path).await, status(&store, &ticket).await),
                (0, None)
            );
            match commits {
                true => open.commit().await.unwrap(),
                false => assert!(open.rollback().await),
            }
        }
        let status = status(&store, &ticket).await;
        assert_eq!(
            (effects(&path).await, status),
            (1, Some(StatusCode::CREATED))
        );
        // Sent again, because the acknowledgement was lost.
        let mut open = begin(&store).await;
        let again = open.complete(Some(&recording(&ticket))).await.unwrap();
        assert_eq!(again, Ready::Yes);
        open.rollback().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn who_has_lost_its_claim_completes_nothing() {
    let (_directory, path) = place();
    let store = handling(SqliteStore::options(&path)).await;
    let forgotten = win(&store, "forgotten").await;
    assert!(store.forget(&forgotten.id).await.unwrap());
    let replaced = win(&store, "replaced").await;
    assert_eq!(store.abandon(&replaced).await.unwrap(), Settled::Done);
    let mut winner = request("replaced");
    winner.replaces = Some(replaced.token);
    assert!(matches!(store.claim(winner).await, Ok(Claim::Won(_))));
    for lost in [&forgotten, &replaced] {
        let mut open = begin(&store).await;
        let ready = open.complete(Some(&recording(lost))).await.unwrap();
        assert_eq!(ready, Ready::Lost);
        open.rollback().await;
    }
    assert_eq!(store.get(&forgotten.id).await.unwrap(), None);
    assert_eq!(status(&store, &replaced).await, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_that_is_dropped_is_rolled_back_and_frees_the_turn() {
    for journal in JOURNALS {
        let (_directory, path) = place();
        let store = handling(SqliteStore::options(&path).journal(journal)).await;
        let mut open = begin(&store).await;
        act(&mut open, "INSERT INTO effects VALUES (1)")
            .await
            .unwrap();
        drop(open);
        let _ = in_time(win(&store, "k")).await;
        in_time(begin(&store)).await.commit().await.unwrap();
        assert_eq!(effects(&path).await, 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_beginning_that_is_dropped_leaves_nothing_open() {
    let (_directory, path) = place();
    let store = handling(SqliteStore::options(&path)).await;
    for micros in 0..60 {
        let begun = timeout(Duration::from_micros(micros * 10), begin(&store));
        drop(begun.await);
    }
    let _ = in_time(win(&store, "k")).await;
    in_time(begin(&store)).await.rollback().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_waits_for_readers() {
    let (_directory, path) = place();
    let options = SqliteStore::options(&path).journal(Journal::Delete);
    let store = handling(options.busy_timeout(Duration::from_millis(300))).await;
    let mut reader = other(&path).await;
    for is_in_time in [false, true] {
        let read = "BEGIN; SELECT count(*) FROM effects";
        sqlx::raw_sql(read).execute(&mut reader).await.unwrap();
        let mut open = begin(&store).await;
        act(&mut open, "INSERT INTO effects VALUES (1)")
            .await
            .unwrap();
        let mut commit = open.commit();
        not_yet(&mut commit).await;
        if is_in_time {
            sqlx::raw_sql("ROLLBACK")
                .execute(&mut reader)
                .await
                .unwrap();
            commit.await.unwrap();
        } else {
            let error = commit.await.unwrap_err();
            assert_eq!(code(&error).as_deref(), Some("5"));
            sqlx::raw_sql("ROLLBACK")
                .execute(&mut reader)
                .await
                .unwrap();
        }
        let _ = win(&store, [u8::from(is_in_time)]).await;
        assert_eq!(effects(&path).await, i64::from(is_in_time));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_that_is_given_up_has_ended_when_the_claim_is_undone() {
    for journal in JOURNALS {
        let (_directory, path) = place();
        let store = handling(SqliteStore::options(&path).journal(journal)).await;
        let mut committed = 0;
        for micros in 0..100_u64 {
            let ticket = win(&store, micros.to_be_bytes()).await;
            let mut open = begin(&store).await;
            let insert = sqlx::query("INSERT INTO effects VALUES (?)").bind(micros as i64);
            insert.execute(open.connection_mut()).await.unwrap();
            open.complete(Some(&recording(&ticket))).await.unwrap();
            let _ = timeout(Duration::from_micros(micros * 20), open.commit()).await;
            let undone = store.release(&ticket, LEASE).await.unwrap();
            committed += i64::from(undone == Settled::Lost);
            assert_eq!(effects(&path).await, committed, "{journal:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_that_is_refused_is_rolled_back() {
    let (_directory, path) = place();
    let store = handling(SqliteStore::options(&path)).await;
    let child = "CREATE TABLE parents (id INTEGER PRIMARY KEY); CREATE TABLE children \
        (parent INTEGER REFERENCES parents DEFERRABLE INITIALLY DEFERRED)";
    execute(&path, child).await;
    let mut open = begin(&store).await;
    act(&mut open, "INSERT INTO children VALUES (1)")
        .await
        .unwrap();
    assert_eq!(open.complete(None).await.unwrap(), Ready::Yes);
    assert!(
        open.commit()
            .await
            .unwrap_err()
            .as_database_error()
            .is_some()
    );
    let _ = in_time(win(&store, "k")).await;
    assert_eq!(scalar(&path, "SELECT count(*) FROM children").await, 0);
    in_time(begin(&store)).await.commit().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn closing_waits_for_the_transaction_and_no_other_is_begun() {
    let (_directory, path) = place();
    let store = handling(SqliteStore::options(&path)).await;
    let mut open = begin(&store).await;
    act(&mut open, "INSERT INTO effects VALUES (1)")
        .await
        .unwrap();
    let mut waiting = Box::pin(try_begin(&store));
    not_yet(&mut waiting).await;
    let mut closing = Box::pin(store.close());
    not_yet(&mut closing).await;
    let late = soon(try_begin(&store)).await;
    assert!(matches!(late, Err(sqlx::Error::PoolClosed)));
    open.commit().await.unwrap();
    closing.await.unwrap();
    assert!(matches!(waiting.await, Err(sqlx::Error::PoolClosed)));
    // The log goes with the last connection.
    assert!(!path.with_file_name("idempotency.db-wal").exists());
    assert_eq!(effects(&path).await, 1);
}

#[tokio::test]
async fn a_transaction_that_is_never_given_back_keeps_nobody_waiting_for_ever() {
    let (_directory, path) = place();
    let options = SqliteStore::options(&path).busy_timeout(Duration::from_millis(100));
    let store = handling(options).await;
    let open = begin(&store).await;
    // From here on the clock jumps to the next thing that is waited for.
    tokio::time::pause();
    let next = try_begin(&store).await;
    assert!(matches!(next, Err(sqlx::Error::PoolTimedOut)));
    let error = store.close().await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable);
    open.rollback().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_committed_to_a_file_that_was_moved_is_an_error() {
    for moved_first in [true, false] {
        let (directory, path) = place();
        let store = handling(SqliteStore::options(&path)).await;
        let ticket = win(&store, "k").await;
        let mut open = begin(&store).await;
        if !moved_first {
            open.complete(Some(&recording(&ticket))).await.unwrap();
        }
        fs::rename(&path, directory.path().join("aside")).unwrap();
        let failed = match moved_first {
            true => {
                let ready = open.complete(Some(&recording(&ticket))).await;
                open.rollback().await;
                ready.map(|_| ())
            }
            false => open.commit().await,
        };
        assert!(matches!(failed, Err(sqlx::Error::Io(_))), "{failed:?}");
        let begun = try_begin(&store).await;
        assert!(begun.is_err(), "the file is gone");
    }
}

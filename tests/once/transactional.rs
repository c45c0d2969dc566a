//! Operations whose effect and record are committed together.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use sqlx::Postgres;
use tokio::{sync::Semaphore, task::JoinHandle};
use tower_idempotency::{
    Done, Failure, Fingerprint, IdempotencyKey, Isolation, Mode, Once, OnceError, Recovery,
    Rejection, Scope, State, Tx, TxError, TxOptions,
};

use super::stage::{Broken, PAST_LEASE, joined};
use crate::{
    ground::{Db, Ground, plain},
    on_both,
};

const DONE: Option<State> = Some(State::Completed);

type Ended<E> = Result<Done<u64>, OnceError<E>>;

fn booking(key: &str) -> String {
    format!("INSERT INTO effects VALUES ('{key}', 1)")
}

fn once<D: Db>(ground: &Ground<D>) -> Once<D::Store> {
    Once::new(ground.layer())
}

/// Books, and returns this; answers what its caller gets.
async fn books<D: Db>(
    once: &Once<D::Store>,
    key: &'static str,
    returned: Result<u64, Broken>,
) -> Ended<Broken> {
    let operation = move |mut tx: Tx<D>| async move {
        D::run_in(&mut tx, &booking(key)).await.unwrap();
        returned
    };
    let key = IdempotencyKey::new(key);
    once.run_in(Scope::shared(), key, Fingerprint::of(["A"]), operation)
        .await
}

#[track_caller]
fn value<E: std::fmt::Debug>(ended: Ended<E>) -> (u64, bool) {
    let done = ended.unwrap();
    (done.value, done.replayed)
}

/// Holds every run where it is called for, and counts them.
#[derive(Clone)]
struct Gate {
    reached: Arc<Semaphore>,
    open: Arc<Semaphore>,
}

impl Gate {
    fn new() -> Self {
        let closed = || Arc::new(Semaphore::new(0));
        Self {
            reached: closed(),
            open: closed(),
        }
    }

    async fn pass(&self) {
        self.reached.add_permits(1);
        self.open.acquire().await.unwrap().forget();
    }

    async fn reached(&self) {
        let reached = self.reached.acquire();
        let reached = tokio::time::timeout(Duration::from_secs(10), reached).await;
        reached.expect("no run has come").unwrap().forget();
    }

    fn open(&self) {
        self.open.add_permits(1);
    }
}

/// Books once the gate is open.
fn books_behind<D: Db>(
    once: &Once<D::Store>,
    key: &'static str,
    gate: &Gate,
    value: u64,
) -> JoinHandle<Ended<Broken>> {
    let (once, gate) = (once.clone(), gate.clone());
    let operation = move |mut tx: Tx<D>| {
        let gate = gate.clone();
        async move {
            gate.pass().await;
            D::run_in(&mut tx, &booking(key)).await.unwrap();
            Ok(value)
        }
    };
    let key = IdempotencyKey::new(key);
    tokio::spawn(async move {
        once.run_in(Scope::shared(), key, Fingerprint::of(["A"]), operation)
            .await
    })
}

on_both! {
    // N1
    async fn effect_and_record_are_committed_together<D: Db>() {
        let ground = Ground::<D>::new().await;
        let once = once::<D>(&ground);
        assert_eq!(value(books::<D>(&once, "k", Ok(1)).await), (1, false));
        assert_eq!(ground.left("k").await, (1, DONE));
        assert_eq!(ground.record("k").await.unwrap().mode, Mode::Transactional);
        assert_eq!(value(books::<D>(&once, "k", Ok(2)).await), (1, true));
        assert_eq!(ground.left("k").await, (1, DONE));
    }

    // N1
    async fn a_failure_is_rolled_back_and_frees_the_key<D: Db>() {
        let ground = Ground::<D>::new().await;
        let once = once::<D>(&ground);
        let failed = books::<D>(&once, "k", Err(Broken("refused"))).await.unwrap_err();
        assert_eq!(failed, OnceError::Failed(Failure::NothingHappened(Broken("refused"))));
        assert_eq!(ground.left("k").await, (0, None));
        assert_eq!(value(books::<D>(&once, "k", Ok(1)).await), (1, false));
    }

    // N1
    async fn a_panic_is_rolled_back_and_frees_the_key<D: Db>() {
        let ground = Ground::<D>::new().await;
        let once = once::<D>(&ground);
        let panicking = once.clone();
        let panic = tokio::spawn(async move {
            let operation = move |mut tx: Tx<D>| async move {
                D::run_in(&mut tx, &booking("k")).await.unwrap();
                panic!("as the test wants");
            };
            let key = IdempotencyKey::new("k");
            panicking.run_in::<u64, Broken, _, _>(Scope::shared(), key, Fingerprint::of(["A"]), operation).await
        });
        assert!(panic.await.unwrap_err().is_panic());
        assert_eq!(ground.left("k").await, (0, None));
        assert_eq!(value(books::<D>(&once, "k", Ok(1)).await), (1, false));
    }

    // L11
    async fn a_run_whose_runtime_ends_leaves_neither_and_is_run_again_however_often<D: Db>() {
        let ground = Ground::<D>::new().await;
        let (once, gate) = (once::<D>(&ground), Gate::new());
        // No attempts are counted: there was no effect.
        for _ in 0..5 {
            let elsewhere = D::open(&ground.place).await;
            let dying = std::thread::spawn({
                let gate = gate.clone();
                move || {
                    let runtime = tokio::runtime::Runtime::new().unwrap();
                    runtime.block_on(async {
                        let once = Once::new(crate::ground::transactional(&elsewhere));
                        let _running = books_behind::<D>(&once, "k", &gate, 1);
                        gate.reached().await;
                    });
                }
            });
            dying.join().unwrap();
            assert_eq!(ground.effects("k").await, 0);
            ground.advance(PAST_LEASE);
        }
        assert_eq!(value(books::<D>(&once, "k", Ok(2)).await), (2, false));
        assert_eq!(ground.left("k").await, (1, DONE));
    }

    // L3
    async fn a_run_that_lost_its_claim_is_rolled_back_and_gets_the_winners_result<D: Db>() {
        let ground = Ground::<D>::new().await;
        let (late, gate) = (once::<D>(&ground), Gate::new());
        let called = books_behind::<D>(&late, "k", &gate, 1);
        gate.reached().await;
        ground.advance(PAST_LEASE);
        let winner = Once::new(ground.elsewhere().await);
        assert_eq!(value(books::<D>(&winner, "k", Ok(2)).await), (2, false));
        gate.open();
        assert_eq!(value(joined(called).await), (2, true));
        assert_eq!(ground.left("k").await, (1, DONE));
    }

    // L3
    async fn a_run_that_lost_its_claim_and_fails_changes_nothing<D: Db>() {
        let ground = Ground::<D>::new().await;
        let (late, gate) = (once::<D>(&ground), Gate::new());
        let held = gate.clone();
        let called = tokio::spawn(async move {
            let operation = move |tx: Tx<D>| {
                let held = held.clone();
                async move {
                    held.pass().await;
                    drop(tx);
                    Err::<u64, _>(Broken("late"))
                }
            };
            let key = IdempotencyKey::new("k");
            late.run_in(Scope::shared(), key, Fingerprint::of(["A"]), operation).await
        });
        gate.reached().await;
        ground.advance(PAST_LEASE);
        let winner = Once::new(ground.elsewhere().await);
        assert_eq!(value(books::<D>(&winner, "k", Ok(2)).await), (2, false));
        gate.open();
        // Its own end, or what the record says by then.
        match joined(called).await {
            Ok(done) => assert_eq!((done.value, done.replayed), (2, true)),
            failed => assert_eq!(failed, Err(OnceError::Failed(Failure::NothingHappened(Broken("late"))))),
        }
        assert_eq!(ground.left("k").await, (1, DONE));
        assert_eq!(value(books::<D>(&winner, "k", Ok(3)).await), (2, true));
    }

    /// A plain run that took over may have had its effect.
    async fn a_plain_run_after_one_in_a_transaction_is_not_run_again_without_asking<D: Db>() {
        let ground = Ground::<D>::new().await;
        let (late, gate) = (once::<D>(&ground), Gate::new());
        let hung = books_behind::<D>(&late, "k", &gate, 1);
        gate.reached().await;
        ground.advance(PAST_LEASE);
        let elsewhere = Once::new(ground.elsewhere().await);
        let cut_off = tokio::spawn({
            let elsewhere = elsewhere.clone();
            async move {
                let operation = || async { panic!("as the test wants") };
                let key = IdempotencyKey::new("k");
                elsewhere
                    .run::<u64, Broken, _, _>(Scope::shared(), key, Fingerprint::of(["A"]), operation)
                    .await
            }
        });
        assert!(cut_off.await.unwrap_err().is_panic());
        let record = ground.record("k").await.unwrap();
        assert_eq!((record.state, record.mode), (State::Abandoned, Mode::Plain));
        let refused = books::<D>(&elsewhere, "k", Ok(2)).await.unwrap_err();
        assert!(matches!(refused, OnceError::Refused(Rejection::OutcomeUnknown { .. })), "{refused:?}");
        hung.abort();
    }

    /// Nor does one in a transaction that fails make it a question of nothing but the transaction.
    async fn a_run_in_a_transaction_after_a_plain_one_that_was_cut_off_leaves_it_so<D: Db>() {
        let ground = Ground::<D>::new().await;
        let bold = Once::new(ground.layer().recovery(Recovery::rerun()));
        let unknown = || async { Err::<u64, _>(Failure::Unknown(Broken("timed out"))) };
        let key = IdempotencyKey::new("k");
        bold.run(Scope::shared(), key, Fingerprint::of(["A"]), unknown).await.unwrap_err();
        let failed = books::<D>(&bold, "k", Err(Broken("refused"))).await;
        assert!(matches!(failed, Err(OnceError::Failed(Failure::NothingHappened(_)))), "{failed:?}");
        let record = ground.record("k").await.unwrap();
        assert_eq!((record.state, record.mode), (State::Abandoned, Mode::Plain));
        let refused = books::<D>(&once::<D>(&ground), "k", Ok(1)).await.unwrap_err();
        assert!(matches!(refused, OnceError::Refused(Rejection::OutcomeUnknown { .. })), "{refused:?}");
        assert_eq!(value(books::<D>(&bold, "k", Ok(2)).await), (2, false));
        assert_eq!(ground.left("k").await, (1, DONE));
    }

    async fn the_result_of_a_plain_run_is_that_of_one_in_a_transaction<D: Db>() {
        let ground = Ground::<D>::new().await;
        let outside = Once::new(plain(&ground.store));
        let operation = || async { Ok::<u64, Failure<Broken>>(1) };
        let key = IdempotencyKey::new("k");
        outside.run(Scope::shared(), key, Fingerprint::of(["A"]), operation).await.unwrap();
        assert_eq!(value(books::<D>(&once::<D>(&ground), "k", Ok(2)).await), (1, true));
        assert_eq!(ground.effects("k").await, 0);
    }

    /// What it does is in no transaction.
    async fn a_plain_run_of_a_transactional_layer_is_not_run_again_without_asking<D: Db>() {
        let ground = Ground::<D>::new().await;
        let once = once::<D>(&ground);
        let call = async |key| {
            let (once, key) = (once.clone(), IdempotencyKey::new(key));
            let operation = || async { Err::<u64, _>(Failure::Unknown(Broken("timed out"))) };
            once.run(Scope::shared(), key, Fingerprint::of(["A"]), operation).await
        };
        assert!(matches!(call("k").await, Err(OnceError::Failed(_))));
        let record = ground.record("k").await.unwrap();
        assert_eq!((record.state, record.mode), (State::Abandoned, Mode::Plain));
        let refused = call("k").await.unwrap_err();
        assert!(matches!(refused, OnceError::Refused(Rejection::OutcomeUnknown { .. })), "{refused:?}");
        // Nor is it in one of its own.
        let refused = books::<D>(&once, "k", Ok(1)).await.unwrap_err();
        assert!(matches!(refused, OnceError::Refused(Rejection::OutcomeUnknown { .. })), "{refused:?}");
    }

    async fn a_layer_that_is_not_transactional_is_named<D: Db>() {
        let ground = Ground::<D>::new().await;
        let once = Once::new(plain(&ground.store));
        let refused = books::<D>(&once, "k", Ok(1)).await.unwrap_err();
        assert!(refused.to_string().contains(".transactional()"), "{refused}");
        assert!(matches!(refused, OnceError::Refused(Rejection::TransactionMisused(_))));
        assert_eq!(ground.left("k").await, (0, None));
    }

    // N7
    async fn a_transaction_that_is_not_given_back_is_rolled_back<D: Db>() {
        let ground = Ground::<D>::new().await;
        let once = once::<D>(&ground);
        let left: Arc<Mutex<Option<Tx<D>>>> = Arc::default();
        let keeps = left.clone();
        let operation = move |mut tx: Tx<D>| {
            let keeps = keeps.clone();
            async move {
                D::run_in(&mut tx, &booking("k")).await.unwrap();
                *keeps.lock().unwrap() = Some(tx);
                Ok::<u64, Broken>(1)
            }
        };
        let ended = once.run_in(Scope::shared(), IdempotencyKey::new("k"), Fingerprint::of(["A"]), operation).await;
        let refused = ended.unwrap_err();
        assert!(matches!(refused, OnceError::Refused(Rejection::TransactionMisused(_))), "{refused:?}");
        assert_eq!(ground.left("k").await, (0, None));
        drop(left);
    }

    // B3
    async fn a_result_over_the_limit_is_committed_and_remembered_as_done<D: Db>() {
        let ground = Ground::<D>::new().await;
        let once = Once::new(ground.layer().response_body_limit(3));
        assert_eq!(value(books::<D>(&once, "k", Ok(1234)).await), (1234, false));
        assert_eq!(ground.left("k").await, (1, DONE));
        let refused = books::<D>(&once, "k", Ok(5)).await.unwrap_err();
        assert!(refused.is_done(), "{refused:?}");
    }

    async fn a_result_that_cannot_be_written_is_committed_and_remembered_as_done<D: Db>() {
        let ground = Ground::<D>::new().await;
        let once = once::<D>(&ground);
        let call = || {
            let operation = |mut tx: Tx<D>| async move {
                D::run_in(&mut tx, &booking("k")).await.unwrap();
                // No JSON has such names.
                Ok::<_, Broken>(std::collections::BTreeMap::from([(vec![1_u8], 2_u8)]))
            };
            let key = IdempotencyKey::new("k");
            once.run_in(Scope::shared(), key, Fingerprint::of(["A"]), operation)
        };
        assert_eq!(call().await.unwrap().value[&vec![1]], 2);
        assert_eq!(ground.left("k").await, (1, DONE));
        assert!(call().await.unwrap_err().is_done());
        assert_eq!(ground.effects("k").await, 1);
    }

    // N5
    async fn a_duplicate_does_not_wait_for_the_open_transaction<D: Db>() {
        let ground = Ground::<D>::new().await;
        let (once, gate) = (once::<D>(&ground), Gate::new());
        let (holding, held) = (once.clone(), gate.clone());
        let operation = move |mut tx: Tx<D>| {
            let held = held.clone();
            async move {
                D::run_in(&mut tx, &booking("k")).await.unwrap();
                held.pass().await;
                Ok::<u64, Broken>(1)
            }
        };
        let called = tokio::spawn(async move {
            let key = IdempotencyKey::new("k");
            holding.run_in(Scope::shared(), key, Fingerprint::of(["A"]), operation).await
        });
        gate.reached().await;
        let refused = books::<D>(&once, "k", Ok(2)).await.unwrap_err();
        assert!(matches!(refused, OnceError::Refused(Rejection::InFlight { .. })), "{refused:?}");
        gate.open();
        assert_eq!(value(joined(called).await), (1, false));
        assert_eq!(ground.left("k").await, (1, DONE));
    }
}

/// Reads, lets another transaction have its way in the first runs, and then writes what that one wrote.
async fn conflicting<E>(
    conflicts: usize,
    failed: impl Fn(sqlx::Error) -> E + Copy + Send + Sync + 'static,
    lends: bool,
) -> (Ground<Postgres>, usize, Ended<E>)
where
    E: Send + 'static,
{
    let ground = Arc::new(Ground::<Postgres>::new().await);
    let options = TxOptions::default().isolation(Isolation::RepeatableRead);
    let once = Once::new(plain(&ground.store).transactional_with(options));
    let runs = Arc::new(AtomicUsize::new(0));
    let (counted, rival) = (runs.clone(), ground.clone());
    let operation = move |mut tx: Tx<Postgres>| {
        let (counted, rival) = (counted.clone(), rival.clone());
        async move {
            let run = counted.fetch_add(1, Ordering::SeqCst) + 1;
            let balance = "SELECT balance FROM accounts WHERE name = 'a'";
            Postgres::value_in(&mut tx, balance).await.map_err(failed)?;
            if run <= conflicts {
                rival
                    .run("UPDATE accounts SET balance = balance - 1 WHERE name = 'a'")
                    .await;
            }
            Postgres::run_in(&mut tx, &booking("k"))
                .await
                .map_err(failed)?;
            let take = "UPDATE accounts SET balance = balance - 80 WHERE name = 'a'";
            let taken = match lends {
                // The layer does not see what is sent on it.
                true => Postgres::run(&mut *tx.connection().await.map_err(failed)?, take).await,
                false => Postgres::run_in(&mut tx, take).await,
            };
            taken.map_err(failed)?;
            Ok(run as u64)
        }
    };
    let key = IdempotencyKey::new("k");
    let ended = once
        .run_in(Scope::shared(), key, Fingerprint::of(["A"]), operation)
        .await;
    drop(once);
    let ground = Arc::into_inner(ground);
    (
        ground.expect("the operation is gone"),
        runs.load(Ordering::SeqCst),
        ended,
    )
}

// N6
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_conflict_is_run_again_whatever_the_error_is_made_of() {
    let (ground, runs, ended) = conflicting(2, |_| Broken("refused"), false).await;
    assert_eq!((value(ended), runs), ((3, false), 3));
    assert_eq!(ground.left("k").await, (1, DONE));
    let balance = "SELECT balance FROM accounts WHERE name = 'a'";
    assert_eq!(ground.value(balance).await, 100 - 2 - 80);
}

// N6
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_conflict_on_a_lent_connection_is_run_again_where_the_error_tells_of_it() {
    let (_, runs, ended) = conflicting(1, |error| error, true).await;
    assert_eq!((value(ended), runs), ((2, false), 2));
    let (_, runs, ended) = conflicting(1, TxError::from, true).await;
    assert_eq!((value(ended), runs), ((2, false), 2));
}

// N6
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_conflict_is_run_again_three_times_at_most() {
    let (ground, runs, ended) = conflicting(usize::MAX, |error| error, false).await;
    let refused = ended.unwrap_err();
    assert_eq!(refused.retry_after(), Some(Duration::from_secs(1)));
    assert!(
        matches!(refused, OnceError::Refused(Rejection::TransactionFailed)),
        "{refused:?}"
    );
    assert_eq!((runs, ground.left("k").await), (4, (0, None)));
}

//! A call in a transaction goes on whether it is polled or not, and is cancelled like one that is.

use std::{
    pin::pin,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use sqlx::Sqlite;
use tokio::{
    sync::oneshot,
    time::{sleep, timeout},
};
use tower_idempotency::{
    Done, Failure, Fingerprint, Idempotency, IdempotencyKey, InFlight, Once, OnceError, Rejection,
    Scope, State, Tx, TxOptions,
};

use super::stage::{Broken, joined};
use crate::{
    ground::{Db, Ground, plain},
    on_both,
    support::logs::Written,
};

const DONE: Option<State> = Some(State::Completed);

fn booking(key: &str) -> String {
    format!("INSERT INTO effects VALUES ('{key}', 1)")
}

/// Tells that it is in the middle, once; a rerun tells nobody.
#[derive(Clone)]
struct Middle(Arc<Mutex<Option<oneshot::Sender<()>>>>);

impl Middle {
    fn new() -> (Self, oneshot::Receiver<()>) {
        let (tells, told) = oneshot::channel();
        (Self(Arc::new(Mutex::new(Some(tells)))), told)
    }

    fn reached(&self) {
        if let Some(tells) = self.0.lock().unwrap().take() {
            tells.send(()).unwrap();
        }
    }
}

/// Books, tells so, and goes on after that for this long.
async fn books_slowly<D: Db>(
    once: &Once<D::Store>,
    middle: Middle,
    rest: Duration,
) -> Result<Done<u64>, OnceError<Broken>> {
    let operation = move |mut tx: Tx<D>| {
        let middle = middle.clone();
        async move {
            D::run_in(&mut tx, &booking("k")).await.unwrap();
            middle.reached();
            sleep(rest).await;
            Ok(1)
        }
    };
    let key = IdempotencyKey::new("k");
    once.run_in(Scope::shared(), key, Fingerprint::of(["A"]), operation)
        .await
}

const FOR_EVER: Duration = Duration::from_secs(3600);

/// As in a `select!`, or in the `for_each` after a `buffer_unordered`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_is_not_polled_does_not_keep_others_from_the_database() {
    let ground = Ground::<Sqlite>::in_real_time().await;
    let once = Once::new(ground.layer());
    let (middle, reached) = Middle::new();
    let mut call = pin!(books_slowly::<Sqlite>(
        &once,
        middle,
        Duration::from_millis(50)
    ));
    tokio::select! {
        ended = &mut call => panic!("too early: {ended:?}"),
        reached = reached => reached.unwrap(),
    }
    let operation = || async { Ok::<u64, Failure<Broken>>(2) };
    let key = IdempotencyKey::new("other");
    let other = once.run(Scope::shared(), key, Fingerprint::of(["A"]), operation);
    assert_eq!(other.await.unwrap().value, 2);
    assert_eq!(ground.left("k").await, (1, DONE));
    let done = call.await.unwrap();
    assert_eq!((done.value, done.replayed), (1, false));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_is_not_polled_holds_its_transaction_no_longer_than_max_hold() {
    let ground = Ground::<Sqlite>::in_real_time().await;
    let options = TxOptions::default().max_hold(Duration::from_millis(300));
    let once = Once::new(plain(&ground.store).transactional_with(options));
    let (middle, reached) = Middle::new();
    let mut call = pin!(books_slowly::<Sqlite>(&once, middle, FOR_EVER));
    tokio::select! {
        ended = &mut call => panic!("too early: {ended:?}"),
        reached = reached => reached.unwrap(),
    }
    let begun = Instant::now();
    let operation = || async { Ok::<u64, Failure<Broken>>(2) };
    let key = IdempotencyKey::new("other");
    let other = once.run(Scope::shared(), key, Fingerprint::of(["A"]), operation);
    assert_eq!(other.await.unwrap().value, 2);
    // Half the time after which the store is given up.
    let took = begun.elapsed();
    assert!(took < Duration::from_millis(2_500), "{took:?}");
    let stopped = call.await.unwrap_err();
    assert!(
        matches!(stopped, OnceError::Refused(Rejection::TransactionFailed)),
        "{stopped:?}"
    );
    assert_eq!(ground.left("k").await, (0, None));
}

on_both! {
    // D1
    async fn an_effect_is_committed_when_the_caller_has_left<D: Db>() {
        let ground = Ground::<D>::new().await;
        let once = Once::new(ground.layer());
        let (middle, reached) = Middle::new();
        {
            let mut call = pin!(books_slowly::<D>(&once, middle, Duration::from_millis(100)));
            tokio::select! {
                ended = &mut call => panic!("too early: {ended:?}"),
                reached = reached => reached.unwrap(),
            }
        }
        drop(once);
        ground.comes_to("k", (1, DONE)).await;
    }

    async fn a_call_in_a_transaction_that_is_never_polled_leaves_nothing<D: Db>() {
        let ground = Ground::<D>::new().await;
        let once = Once::new(ground.layer());
        let (middle, mut reached) = Middle::new();
        drop(books_slowly::<D>(&once, middle, FOR_EVER));
        assert_eq!(ground.left("k").await, (0, None));
        assert_eq!(reached.try_recv(), Err(oneshot::error::TryRecvError::Closed));
    }

    async fn an_aborted_call_is_rolled_back_at_shutdown<D: Db>() {
        let ground = Ground::<D>::new().await;
        let once = Once::new(ground.layer());
        let (middle, reached) = Middle::new();
        let called = {
            let once = once.clone();
            tokio::spawn(async move { books_slowly::<D>(&once, middle, FOR_EVER).await })
        };
        reached.await.unwrap();
        let drained = once.layer().drain(Duration::from_millis(50)).await;
        assert_eq!((drained.aborted, drained.left), (1, 0), "{drained:?}");
        let refused = joined(called).await.unwrap_err();
        assert!(matches!(refused, OnceError::Refused(Rejection::Overloaded)), "{refused:?}");
        assert_eq!(ground.left("k").await, (0, None));
    }

    /// Its caller lives on another runtime, and is told to come back.
    async fn a_runtime_that_ends_meanwhile_ends_the_call<D: Db>() {
        let ground = Ground::<D>::new().await;
        let once = Once::new(ground.layer());
        let (middle, reached) = Middle::new();
        let mut call = Box::pin({
            let once = once.clone();
            async move { books_slowly::<D>(&once, middle, FOR_EVER).await }
        });
        // Threads of this runtime may not block on another one.
        let (ended, call) = std::thread::spawn(move || {
            let runtime = tokio::runtime::Runtime::new().unwrap();
            runtime.block_on(async {
                tokio::select! {
                    ended = &mut call => panic!("too early: {ended:?}"),
                    reached = reached => reached.unwrap(),
                }
            });
            runtime.shutdown_timeout(Duration::from_secs(10));
            let other = tokio::runtime::Runtime::new().unwrap();
            let ended = other.block_on(async { timeout(Duration::from_secs(10), &mut call).await });
            (ended.expect("it hangs"), call)
        })
        .join()
        .unwrap();
        let refused = ended.unwrap_err();
        assert!(matches!(refused, OnceError::Refused(Rejection::TransactionFailed)), "{refused:?}");
        drop(call);
        assert_eq!(ground.effects("k").await, 0);
    }

    /// Dropped where there is no runtime, after its own is gone.
    async fn a_call_can_be_dropped_anywhere<D: Db>() {
        let ground = Ground::<D>::new().await;
        let once = Once::new(ground.layer());
        let (middle, reached) = Middle::new();
        let mut call = Box::pin(async move { books_slowly::<D>(&once, middle, FOR_EVER).await });
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Runtime::new().unwrap();
            runtime.block_on(async {
                tokio::select! {
                    ended = &mut call => panic!("too early: {ended:?}"),
                    reached = reached => reached.unwrap(),
                }
            });
            runtime.shutdown_timeout(Duration::from_secs(10));
            drop(call);
        })
        .join()
        .unwrap();
        assert_eq!(ground.effects("k").await, 0);
    }

    async fn an_operation_in_a_transaction_can_be_told_of_its_run<D: Db>() {
        let ground = Ground::<D>::new().await;
        let once = Once::new(ground.layer().downstream_secret([7; 32]));
        let call = async || {
            let operation = |mut tx: Tx<D>, run: Idempotency| async move {
                D::run_in(&mut tx, &booking("k")).await.unwrap();
                let downstream = run.downstream_key("charge").unwrap();
                let told = (run.attempt(), run.key().as_bytes().to_vec(), downstream.as_str().to_owned());
                Ok::<_, Broken>(told)
            };
            let key = IdempotencyKey::new("k");
            once.run_in_with(Scope::shared(), key, Fingerprint::of(["A"]), operation).await.unwrap()
        };
        let done = call().await;
        assert_eq!((done.value.0, &done.value.1[..], done.replayed), (1, &b"k"[..], false));
        let again = call().await;
        assert_eq!((again.value, again.replayed), (done.value, true));
        assert_eq!(ground.left("k").await, (1, DONE));
    }

    /// What waits for the writer that its own caller holds waits until that is over.
    async fn a_call_inside_of_an_open_transaction_does_not_hang<D: Db>() {
        let ground = Ground::<D>::in_real_time().await;
        let options = TxOptions::default().max_hold(Duration::from_millis(300));
        let once = Once::new(plain(&ground.store).transactional_with(options));
        let inner = once.clone();
        let operation = move |mut tx: Tx<D>| {
            let inner = inner.clone();
            async move {
                D::run_in(&mut tx, &booking("k")).await.unwrap();
                let nested = |mut tx: Tx<D>| async move {
                    D::run_in(&mut tx, &booking("nested")).await.unwrap();
                    Ok::<u64, Broken>(2)
                };
                let key = IdempotencyKey::new("nested");
                let nested = inner.run_in(Scope::shared(), key, Fingerprint::of(["A"]), nested).await;
                Ok::<u64, Broken>(nested.unwrap().value)
            }
        };
        let key = IdempotencyKey::new("k");
        let call = once.run_in(Scope::shared(), key, Fingerprint::of(["A"]), operation);
        let ended = timeout(Duration::from_secs(20), call).await.expect("it hangs");
        match D::IS_POSTGRES {
            true => {
                assert_eq!(ended.unwrap().value, 2);
                assert_eq!(ground.effects("nested").await, 1);
                assert_eq!(ground.left("k").await, (1, DONE));
            }
            false => {
                let stopped = ended.unwrap_err();
                assert!(matches!(stopped, OnceError::Refused(Rejection::TransactionFailed)), "{stopped:?}");
                assert_eq!(ground.left("k").await, (0, None));
            }
        }
    }

    /// Each is delivered four times, and half of the callers leave.
    async fn of_a_storm_of_deliveries_each_is_booked_once<D: Db>() {
        const KEYS: usize = 30;
        let ground = Ground::<D>::in_real_time().await;
        let wait = InFlight::Wait(Duration::from_secs(25));
        let once = Once::new(ground.layer().in_flight(wait));
        let mut calls = tokio::task::JoinSet::new();
        for delivery in 0..4 {
            for number in 0..KEYS {
                let once = once.clone();
                calls.spawn(async move {
                    let operation = move |mut tx: Tx<D>| async move {
                        D::run_in(&mut tx, &booking(&format!("k{number}"))).await?;
                        Ok::<_, sqlx::Error>(number)
                    };
                    let key = IdempotencyKey::new(format!("k{number}"));
                    let call = once.run_in(Scope::shared(), key, Fingerprint::of(["A"]), operation);
                    let patience = match delivery % 2 {
                        0 => Duration::from_secs(30),
                        _ => Duration::from_millis(number as u64),
                    };
                    if let Ok(ended) = timeout(patience, call).await {
                        assert_eq!(ended.unwrap().value, number);
                    }
                });
            }
        }
        calls.join_all().await;
        for number in 0..KEYS {
            assert_eq!(ground.effects(&format!("k{number}")).await, 1, "{number}");
        }
    }
}

/// On one thread, so that all of it is seen.
#[tokio::test]
async fn an_operation_in_a_transaction_is_in_the_span_and_under_the_subscriber_of_its_caller() {
    use tracing::{Instrument, instrument::WithSubscriber};

    // Of this call only.
    let written = Written::default();
    let ground = Ground::<Sqlite>::in_real_time().await;
    let once = Once::new(ground.layer());
    let operation = |tx: Tx<Sqlite>| async move {
        tracing::info!("in the middle");
        drop(tx);
        Ok::<u64, Broken>(1)
    };
    let key = IdempotencyKey::new("k");
    let call = once.run_in(Scope::shared(), key, Fingerprint::of(["A"]), operation);
    let call = async move {
        let span = tracing::info_span!("delivery", number = 17);
        call.instrument(span).await
    };
    call.with_subscriber(written.subscriber()).await.unwrap();
    let text = written.text();
    let line = text.lines().find(|line| line.contains("in the middle"));
    let line = line.unwrap_or_else(|| panic!("{text}"));
    assert!(line.contains("delivery") && line.contains("17"), "{line}");
}

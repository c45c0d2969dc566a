//! What operations share with the requests of their layer, and a store that is out of reach.

use std::time::Duration;

use tower_idempotency::{
    IdempotencyLayer, MemoryStore, Once, Recovery, State, StoreFailure,
    testing::{Fault, Operation, Times},
};

use super::stage::*;
use crate::{
    every_store,
    support::{Handler, post, send, spawn},
};

/// As where a service is wrapped.
#[test]
fn options_that_contradict_each_other_are_named() {
    let contradiction = || {
        let layer = IdempotencyLayer::new(MemoryStore::new()).lease(Duration::from_secs(60));
        Once::new(layer.max_run(Duration::from_secs(1)))
    };
    let panic = std::panic::catch_unwind(contradiction).unwrap_err();
    let said = panic.downcast_ref::<&str>().unwrap();
    assert!(said.contains("lease") && said.contains("max_run"), "{said}");
}

every_store! {
    async fn one_drain_ends_requests_and_operations(world: World) {
        let store = world.open().await;
        let layer = layer(&store).single_tenant();
        let handler = Handler::new();
        handler.close_gate();
        let (app, once) = (handler.behind(layer.clone()), Once::new(layer.clone()));
        let mut stage = Stage::new();
        let request = spawn(&app, post("request", "A"));
        handler.reached(1).await;
        let called = stage.called(&once, "k");
        let run = stage.next().await;

        let drained = layer.drain(Duration::from_millis(50)).await;
        assert_eq!((drained.aborted, drained.left), (2, 0));
        assert_eq!(request.await.unwrap().code(), UNKNOWN);
        assert_eq!(refusal(joined(called).await), UNKNOWN);
        drop(run);
        assert_eq!(state(&store, "k").await, Some(State::Abandoned));
        assert_eq!(refusal(stage.asked(&once, "new").await), OVERLOADED);
        assert_eq!(send(&app, post("new", "A")).await.code(), OVERLOADED);
    }

    /// A deploy sends no message to the dead letters.
    async fn what_a_drain_cut_off_may_be_asked_for_again(world: World) {
        let store = world.open().await;
        let once = Once::new(layer(&store).recovery(Recovery::rerun()));
        let mut stage = Stage::new();
        let called = stage.called(&once, "k");
        let _run = stage.next().await;
        once.layer().drain(Duration::from_millis(20)).await;
        let cut_off = joined(called).await.unwrap_err();
        assert_eq!(cut_off.retry_after(), Some(Duration::from_secs(60)), "{cut_off:?}");
        assert!(!cut_off.is_done());
        let elsewhere = Once::new(layer(&world.open().await).recovery(Recovery::rerun()));
        assert_eq!(value(stage.runs(&elsewhere, "k", Ok("one".to_owned())).await), first("one"));
    }

    /// An operation that ends in time is recorded, and its caller gets its result.
    async fn a_drain_waits_for_operations(world: World) {
        let store = world.open().await;
        let once = once(&store);
        let mut stage = Stage::new();
        let called = stage.called(&once, "k");
        let run = stage.next().await;
        let layer = once.layer().clone();
        let draining = tokio::spawn(async move { layer.drain(Duration::from_secs(20)).await });
        run.answers("one");
        assert_eq!(value(joined(called).await), first("one"));
        assert_eq!(joined(draining).await.aborted, 0);
        assert_eq!(state(&store, "k").await, Some(State::Completed));
    }

    async fn requests_and_operations_share_their_places(world: World) {
        let store = world.open().await;
        let layer = layer(&store)
            .single_tenant()
            .max_running(1)
            .store_timeout(Duration::from_secs(1));
        let handler = Handler::new();
        let (app, once) = (handler.behind(layer.clone()), Once::new(layer));
        let mut stage = Stage::new();
        let called = stage.called(&once, "k");
        let run = stage.next().await;
        assert_eq!(send(&app, post("request", "A")).await.code(), OVERLOADED);
        assert_eq!(refusal(stage.asked(&once, "other").await), OVERLOADED);
        run.answers("one");
        joined(called).await.unwrap();
        assert_eq!(send(&app, post("request", "A")).await.status, 201);
    }

    // O1
    async fn nothing_runs_while_the_store_is_out_of_reach_whatever_requests_may(world: World) {
        let store = world.open().await;
        let once = Once::new(layer(&store).store_failure(StoreFailure::RunUnprotected));
        let mut stage = Stage::new();
        store.fail(Operation::Claim, Fault::Before, Times::Always);
        let refused = stage.asked(&once, "k").await.unwrap_err();
        assert_eq!(refused.retry_after(), Some(Duration::from_secs(1)));
        assert_eq!(refusal::<String>(Err(refused)), UNAVAILABLE);
        store.clear();
        assert_eq!(value(stage.runs(&once, "k", Ok("one".to_owned())).await), first("one"));
    }

    // O2
    async fn a_result_that_cannot_be_recorded_in_time_reaches_its_caller_and_is_recorded_later(world: World) {
        let store = world.open().await;
        let once = Once::new(layer(&store).store_timeout(Duration::from_secs(1)));
        let mut stage = Stage::new();
        let called = stage.called(&once, "k");
        let run = stage.next().await;
        store.fail(Operation::Complete, Fault::Before, Times::Always);
        run.answers("one");
        assert_eq!(value(joined(called).await), first("one"));
        assert_eq!(refusal(stage.asked(&once, "k").await), IN_FLIGHT);
        store.clear();
        comes_to(&store, "k", Some(State::Completed)).await;
        assert_eq!(value(stage.asked(&once, "k").await), replay("one"));
    }
}

/// Blocking workers, each with a runtime that stands still between two jobs, and one handle among them.
#[cfg(feature = "sqlite")]
#[test]
fn workers_with_runtimes_of_their_own_all_get_their_results() {
    use tokio::runtime;
    use tower_idempotency::{Failure, Fingerprint, IdempotencyKey, SqliteStore};

    let folder = tempfile::tempdir().unwrap();
    // The store's writer lives here.
    let home = runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let store = SqliteStore::open(folder.path().join("jobs.db"));
    let once = Once::new(IdempotencyLayer::new(home.block_on(store).unwrap()));
    let workers: Vec<_> = (0..4)
        .map(|worker| {
            let once = once.clone();
            std::thread::spawn(move || {
                let runtime = runtime::Builder::new_current_thread()
                    .enable_all()
                    .build()
                    .unwrap();
                for job in 0..40_u8 {
                    let operation = move || async move { Ok::<_, Failure<Broken>>(job) };
                    let key = IdempotencyKey::new(format!("{worker}-{job}"));
                    let done = once.run(scope(), key, Fingerprint::of(["A"]), operation);
                    assert_eq!(runtime.block_on(done).unwrap().value, job);
                    std::thread::sleep(Duration::from_millis(2));
                }
            })
        })
        .collect();
    for worker in workers {
        worker.join().unwrap();
    }
}

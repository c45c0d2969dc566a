//! A store that fails, hangs or is no longer listened to in the middle of it.

use std::time::{Duration, Instant};

use tokio::time::timeout;
use tower_idempotency::{
    Recovery, State,
    testing::{Fault, Operation, Times},
};

use crate::{
    common::*,
    every_store,
    support::{World, called, logs::Logs, post},
};

/// One try and two more.
const TRIES: usize = 3;

/// How long the store may take where it hangs.
const PATIENCE: Duration = Duration::from_millis(200);

async fn hasty(world: &World) -> Stage {
    Stage::with(world, |store| layer(store).store_timeout(PATIENCE)).await
}

every_store! {
    async fn a_save_that_failed_once_is_sent_again(world: World) {
        let mut stage = Stage::on(&world).await;
        let (run, answer) = stage.begin(post("k", "A")).await;
        for (fault, times) in [(Fault::Before, 1), (Fault::After, 1), (Fault::Before, 2), (Fault::After, 2)] {
            let before = stage.store.calls(Operation::Save);
            stage.store.fail(Operation::Save, fault, Times::Next(times));
            run.owner().checkpoint("step", &times).await.unwrap();
            assert_eq!(stage.store.calls(Operation::Save) - before, times + 1);
            assert_eq!(read(run.owner(), "step").await, Some(times as u64));
        }
        assert_eq!(stage.store.calls(Operation::Load), 0);
        run.answers(503, "down");
        answer.await.unwrap();
        let (run, _answer) = stage.begin(post("k", "A")).await;
        assert_eq!(read(run.owner(), "step").await, Some(2));
    }

    async fn a_save_of_unknown_fate_is_not_taken_for_saved(world: World) {
        let mut stage = Stage::on(&world).await;
        let (run, _answer) = stage.begin(post("k", "A")).await;
        let owner = run.owner();
        owner.checkpoint("first", &1).await.unwrap();
        for (fault, value, found) in [(Fault::Before, 2, Some(1)), (Fault::After, 3, Some(3))] {
            stage.store.fail(Operation::Save, fault, Times::Next(TRIES));
            let error = owner.checkpoint("first", &value).await.unwrap_err();
            assert!(error.is_unknown() && !error.is_lost(), "{error:?}");
            // The store is asked, and says how it is.
            let loads = stage.store.calls(Operation::Load);
            assert_eq!(read(owner, "first").await, found, "{fault:?}");
            assert_eq!(read(owner, "first").await, found, "{fault:?}");
            assert_eq!(stage.store.calls(Operation::Load) - loads, 1);
        }
        owner.checkpoint("first", &4).await.unwrap();
        assert_eq!(read(owner, "first").await, Some(4));
    }

    // O1: bounded by the layer's time, not the client's patience.
    async fn a_store_that_hangs_is_given_up_in_time(world: World) {
        let mut stage = hasty(&world).await;
        let (run, _answer) = stage.begin(post("k", "A")).await;
        for (fault, found) in [(Fault::HangBefore, None), (Fault::HangAfter, Some(7))] {
            stage.store.fail(Operation::Save, fault, Times::Once);
            let began = Instant::now();
            let error = run.owner().checkpoint("step", &7).await.unwrap_err();
            assert!(began.elapsed() < PATIENCE * 10, "{:?}", began.elapsed());
            assert!(error.is_unknown(), "{error:?}");
            assert_eq!(read(run.owner(), "step").await, found);
        }
        stage.store.fail(Operation::Save, Fault::HangAfter, Times::Once);
        assert!(run.owner().checkpoint("step", &8).await.unwrap_err().is_unknown());
        stage.store.fail(Operation::Load, Fault::HangBefore, Times::Once);
        assert!(run.owner().checkpointed::<u64>("step").await.unwrap_err().is_unknown());
        assert_eq!(read(run.owner(), "step").await, Some(8));
    }

    // Those that come meanwhile are no longer kept than by one.
    async fn saves_that_wait_for_one_that_hangs_are_given_up_in_time_too(world: World) {
        let mut stage = hasty(&world).await;
        let (run, _answer) = stage.begin(post("k", "A")).await;
        stage.store.fail(Operation::Save, Fault::HangBefore, Times::Always);
        let began = Instant::now();
        let saving: Vec<_> = (0..16).map(|at| {
            let owner = run.owner().clone();
            tokio::spawn(async move { owner.checkpoint("step", &at).await })
        }).collect();
        for saved in saving {
            assert!(saved.await.unwrap().unwrap_err().is_unknown());
        }
        assert!(began.elapsed() < PATIENCE * 10, "{:?}", began.elapsed());
    }

    async fn a_save_that_is_dropped_in_the_middle_is_not_taken_for_saved(world: World) {
        let mut stage = Stage::on(&world).await;
        let (run, _answer) = stage.begin(post("k", "A")).await;
        for (fault, value, found) in [(Fault::HangBefore, 1, None), (Fault::HangAfter, 2, Some(2))] {
            let saves = stage.store.calls(Operation::Save);
            stage.store.fail(Operation::Save, fault, Times::Once);
            let owner = run.owner().clone();
            let saving = tokio::spawn(async move { owner.checkpoint("step", &value).await });
            called(&stage.store, Operation::Save, saves + 1).await;
            if found.is_some() {
                // Until it is there, whoever looks at it.
                stored(&world, value).await;
            }
            saving.abort();
            assert!(saving.await.unwrap_err().is_cancelled());
            assert_eq!(read(run.owner(), "step").await, found);
        }
        // One that was never begun has no effect on what is known.
        drop(run.owner().checkpoint("step", &3));
        assert_eq!((read(run.owner(), "step").await, stage.store.calls(Operation::Load)), (Some(2), 2));
    }

    async fn a_load_that_fails_is_sent_again_and_then_said(world: World) {
        let mut stage = Stage::on(&world).await;
        let (run, answer) = stage.begin(post("k", "A")).await;
        run.owner().checkpoint("step", &1).await.unwrap();
        run.answers(503, "down");
        answer.await.unwrap();
        let (run, answer) = stage.begin(post("k", "A")).await;
        stage.store.fail(Operation::Load, Fault::Before, Times::Next(TRIES));
        let error = run.owner().checkpointed::<u64>("step").await.unwrap_err();
        assert!(error.is_unknown(), "{error:?}");
        stage.store.fail(Operation::Load, Fault::After, Times::Next(TRIES - 1));
        assert_eq!(read(run.owner(), "step").await, Some(1));
        run.answers(201, "done");
        answer.await.unwrap();
    }

    // L12
    async fn a_run_that_could_not_save_is_left_to_recovery(world: World) {
        let refusing = |store: &_| layer(store).recovery(Recovery::Refuse);
        let mut stage = Stage::with(&world, refusing).await;
        let (run, answer) = stage.begin(post("k", "A")).await;
        stage.store.fail(Operation::Save, Fault::Before, Times::Next(TRIES));
        let error = run.owner().checkpoint("step", &1).await.unwrap_err();
        run.answers_with(answer_of(error));
        let answer = answer.await.unwrap();
        assert_eq!((answer.status.as_u16(), answer.header("retry-after")), (503, Some("1")));
        assert_eq!(state(&stage.store, "k").await, Some(State::Abandoned));
        let mut other = Stage::with(&world, refusing).await;
        let app = &other.app;
        assert_eq!(crate::support::send(app, post("k", "A")).await.said(), (409, UNKNOWN.to_owned()));

        other = Stage::on(&world).await;
        let (rerun, answer) = other.begin(post("k", "A")).await;
        assert_eq!((rerun.owner().attempt(), read(rerun.owner(), "step").await), (2, None));
        rerun.answers(201, "done");
        assert_eq!(answer.await.unwrap().status, 201);
    }
}

/// Waits until this value of the only run is stored.
async fn stored(world: &World, value: u64) {
    use tower_idempotency::store::{Checkpoints, Inspect};
    let looked = async {
        let store = world.open().await;
        let record = store.get(&id("k")).await.unwrap().unwrap();
        let mut ticket = tower_idempotency::store::ClaimRequest::new(
            record.id,
            record.scheme,
            record.fingerprint,
        )
        .ticket(1);
        ticket.token = record.token;
        let expected = format!("\x01{value}");
        loop {
            let saved = store.load(&ticket).await.unwrap().unwrap();
            if saved.iter().any(|saved| saved.value == expected.as_bytes()) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    let looked = timeout(Duration::from_secs(20), looked).await;
    looked.expect("it is never stored");
}

#[tokio::test]
async fn a_store_that_fails_is_said_in_an_event_and_a_limit_is_not() {
    let (logs, _guard) = Logs::of_this_thread();
    let mut stage = Stage::on(&World::memory()).await;
    let (run, _answer) = stage.begin(post("k", "A")).await;
    stage
        .store
        .fail(Operation::Save, Fault::Before, Times::Next(TRIES));
    run.owner().checkpoint("step", &1).await.unwrap_err();
    let said = logs.loud("operation=\"save\"");
    assert_eq!(said.len(), TRIES, "{said:?}");
    let long = "n".repeat(65);
    run.owner().checkpoint(&long, &1).await.unwrap_err();
    assert_eq!(logs.loud("operation=\"save\"").len(), TRIES);
}

//! What an operation that fails leaves behind.

use tower_idempotency::{Failure, Once, OnceError, Recovery, State};

use super::stage::*;
use crate::every_store;

fn nothing_happened() -> Returned {
    Err(Failure::NothingHappened(Broken("refused")))
}

fn unknown() -> Returned {
    // As `?` does.
    Err(Broken("timed out").into())
}

every_store! {
    // E2
    async fn where_nothing_happened_the_key_is_free(world: World) {
        let store = world.open().await;
        let once = once(&store);
        let mut stage = Stage::new();
        for _ in 0..5 {
            let failed = stage.runs(&once, "k", nothing_happened()).await.unwrap_err();
            assert_eq!(failed, OnceError::Failed(Failure::NothingHappened(Broken("refused"))));
            assert_eq!(state(&store, "k").await, None);
        }
        assert_eq!(value(stage.runs(&once, "k", Ok("one".to_owned())).await), first("one"));
    }

    // E2
    async fn where_the_outcome_is_unknown_the_key_is_refused(world: World) {
        let store = world.open().await;
        let once = once(&store);
        let mut stage = Stage::new();
        let failed = stage.runs(&once, "k", unknown()).await.unwrap_err();
        assert_eq!(failed, OnceError::Failed(Failure::Unknown(Broken("timed out"))));
        assert_eq!(state(&store, "k").await, Some(State::Abandoned));
        let refused = stage.asked(&once, "k").await;
        assert_eq!(refusal(refused), UNKNOWN);
    }

    /// What has an outcome, if a bad one, cannot be what kills the process each time.
    async fn an_unknown_outcome_is_rerun_as_often_as_it_is_delivered(world: World) {
        let once = Once::new(layer(&world.open().await).recovery(Recovery::rerun()));
        let mut stage = Stage::new();
        for _ in 0..5 {
            let failed = stage.runs(&once, "k", unknown()).await.unwrap_err();
            assert_eq!(failed, OnceError::Failed(Failure::Unknown(Broken("timed out"))));
        }
        assert_eq!(value(stage.runs(&once, "k", Ok("one".to_owned())).await), first("one"));
    }

    /// A run knows what it did itself, and nothing of the one before.
    async fn a_rerun_without_effect_does_not_say_that_the_first_run_had_none(world: World) {
        let store = world.open().await;
        let bold = Once::new(layer(&store).recovery(Recovery::rerun()));
        let mut stage = Stage::new();
        let called = stage.called(&bold, "k");
        stage.next().await.panics("as the test wants");
        assert!(called.await.unwrap_err().is_panic());
        for _ in 0..4 {
            let failed = stage.runs(&bold, "k", nothing_happened()).await.unwrap_err();
            assert!(matches!(failed, OnceError::Failed(Failure::NothingHappened(_))));
            assert_eq!(state(&store, "k").await, Some(State::Abandoned));
        }
        assert_eq!(refusal(stage.asked(&once(&world.open().await), "k").await), UNKNOWN);
    }

    // E2, L12
    async fn a_panic_reaches_its_caller_and_leaves_the_key_abandoned(world: World) {
        let store = world.open().await;
        let once = once(&store);
        let mut stage = Stage::new();
        let called = stage.called(&once, "k");
        stage.next().await.panics("as the test wants");
        let panic = called.await.unwrap_err().into_panic();
        assert_eq!(panic.downcast_ref::<String>().unwrap(), "as the test wants");
        assert_eq!(state(&store, "k").await, Some(State::Abandoned));
        assert_eq!(refusal(stage.asked(&once, "k").await), UNKNOWN);
    }

    // Y3
    async fn what_is_cut_off_each_time_is_run_three_times_at_most(world: World) {
        let once = Once::new(layer(&world.open().await).recovery(Recovery::rerun()));
        let mut stage = Stage::new();
        for attempt in 1..=3 {
            let called = stage.called(&once, "k");
            let run = stage.next().await;
            assert_eq!(run.handle.attempt(), attempt);
            run.panics("as the test wants");
            assert!(called.await.unwrap_err().is_panic());
        }
        assert_eq!(refusal(stage.asked(&once, "k").await), UNKNOWN);
    }

    /// As the docs of `NothingHappened` say.
    async fn where_nothing_happened_after_a_checkpoint_the_key_stays_with_its_fingerprint(world: World) {
        let store = world.open().await;
        let once = once(&store);
        let mut stage = Stage::new();
        for (attempt, known) in [(1, None), (2, Some(1)), (2, Some(1))] {
            let called = stage.called(&once, "k");
            let run = stage.next().await;
            assert_eq!(run.handle.attempt(), attempt);
            assert_eq!(run.handle.checkpointed::<u8>("step").await.unwrap(), known);
            run.handle.checkpoint("step", &1).await.unwrap();
            run.returns(nothing_happened());
            joined(called).await.unwrap_err();
        }
        let begun = stage.begun();
        assert_eq!(refusal(joined(stage.called_for(&once, "k", "B")).await), REUSED);
        assert_eq!(stage.begun(), begun);
        world.clock.advance(std::time::Duration::from_secs(24 * 3600 + 1));
        let called = stage.called_for(&once, "k", "B");
        let run = stage.next().await;
        assert_eq!((run.handle.attempt(), run.handle.checkpointed::<u8>("step").await.unwrap()), (1, None));
        run.answers("of B");
        assert_eq!(value(joined(called).await), first("of B"));
    }

    // L3
    async fn a_late_failure_frees_and_abandons_nothing(world: World) {
        for (key, late) in [("free", nothing_happened()), ("abandoned", unknown())] {
            let late_once = once(&world.open_silent().await);
            let mut stage = Stage::new();
            let called = stage.called(&late_once, key);
            let old = stage.next().await;
            world.clock.advance(PAST_LEASE);
            let store = world.open().await;
            let bold = Once::new(layer(&store).recovery(Recovery::rerun()));
            let took_over = stage.called(&bold, key);
            let new = stage.next().await;
            old.returns(late);
            assert!(matches!(joined(called).await, Err(OnceError::Failed(_))));
            assert_eq!(state(&store, key).await, Some(State::Running));
            assert_eq!(refusal(stage.asked(&bold, key).await), IN_FLIGHT);
            new.answers("new");
            assert_eq!(value(joined(took_over).await), first("new"));
            assert_eq!(value(stage.asked(&late_once, key).await), replay("new"));
        }
    }
}

#[test]
fn a_failure_is_an_error_and_can_be_told_in_another_one() {
    let failure = Failure::NothingHappened(Broken("refused"));
    assert_eq!(
        failure.to_string(),
        "the operation failed without having had an effect"
    );
    let source = std::error::Error::source(&failure).unwrap();
    assert_eq!(source.to_string(), "refused");
    assert_eq!(
        failure.map(|broken| broken.0),
        Failure::NothingHappened("refused")
    );
    let failure = Failure::from(Broken("timed out"));
    assert_eq!(OnceError::Failed(failure).to_string(), failure.to_string());
    assert_eq!(
        failure.map(|broken| broken.0),
        Failure::Unknown("timed out")
    );
}

/// `?` makes `Unknown` of an error, and leaves a failure what it is.
#[tokio::test]
async fn a_failure_that_is_handed_on_stays_what_it_is() {
    async fn inner() -> Result<String, Failure<Broken>> {
        Err(Failure::NothingHappened(Broken("refused")))
    }
    async fn outer() -> Result<String, Failure<Broken>> {
        let value = inner().await?;
        Ok(value + ", and more")
    }
    let failed = outer().await.unwrap_err();
    assert_eq!(failed, Failure::NothingHappened(Broken("refused")));
}

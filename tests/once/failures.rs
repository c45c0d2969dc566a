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
}

//! Owners that fall silent, and what comes after them.

use axum::Json;
use tower_idempotency::{Abandoned, InFlight, Once, Recovery, State, Verdict};

use super::stage::*;
use crate::{every_store, support::eventually};
use tower_idempotency::testing::{Fault, Operation, Times};

every_store! {
    // L1, L2
    async fn a_run_that_is_slow_keeps_its_claim_until_somebody_takes_over(world: World) {
        let store = world.open().await;
        store.fail(Operation::Renew, Fault::Before, Times::Always);
        let silent = once(&store);
        let elsewhere = once(&world.open().await);
        let mut stage = Stage::new();
        let called = stage.called(&silent, "k");
        let run = stage.next().await;
        assert_eq!(refusal(stage.asked(&elsewhere, "k").await), IN_FLIGHT);
        world.clock.advance(PAST_LEASE);
        assert_eq!(refusal(stage.asked(&elsewhere, "k").await), UNKNOWN);
        run.answers("late");
        assert_eq!(value(joined(called).await), first("late"));
        assert_eq!(value(stage.asked(&elsewhere, "k").await), replay("late"));
    }

    // L3
    async fn a_late_owner_gets_its_result_and_does_not_record_it(world: World) {
        let store = world.open().await;
        store.fail(Operation::Renew, Fault::Before, Times::Always);
        let late = once(&store);
        let elsewhere = world.open().await;
        let next = Once::new(layer(&elsewhere).recovery(Recovery::rerun()));
        let mut stage = Stage::new();
        let called = stage.called(&late, "k");
        let old = stage.next().await;
        world.clock.advance(PAST_LEASE);
        let took_over = stage.called(&next, "k");
        let new = stage.next().await;
        assert_eq!(new.handle.attempt(), 2);

        store.clear();
        assert!(old.handle.ensure_owned().await.is_err());
        assert!(old.handle.checkpoint("step", &1).await.unwrap_err().is_lost());
        old.answers("of the late one");
        assert_eq!(value(joined(called).await), first("of the late one"));
        assert_eq!(state(&elsewhere, "k").await, Some(State::Running));
        new.answers("of the new one");
        assert_eq!(value(joined(took_over).await), first("of the new one"));
        for once in [&late, &next] {
            assert_eq!(value(stage.asked(once, "k").await), replay("of the new one"));
        }
    }

    /// It is taken for the operation's own result.
    async fn what_a_resolver_finds_out_is_the_result(world: World) {
        let store = world.open().await;
        let mut stage = Stage::new();
        abandon(&once(&store), &mut stage, "k").await;
        let resolving = Once::new(layer(&store).resolver(|abandoned: Abandoned| async move {
            assert_eq!(abandoned.key().unwrap().as_bytes(), b"k");
            assert_eq!(abandoned.record().scheme, "once/1");
            Verdict::answer(Json("found out"))
        }));
        assert_eq!(value(stage.asked(&resolving, "k").await), replay("found out"));
        assert_eq!(value(stage.asked(&once(&store), "k").await), replay("found out"));
    }

    async fn what_a_resolver_does_not_know_yet_may_be_asked_for_again(world: World) {
        let store = world.open().await;
        let mut stage = Stage::new();
        abandon(&once(&store), &mut stage, "k").await;
        let resolver = |_: Abandoned| async { Verdict::Leave };
        let resolving = Once::new(layer(&store).resolver(resolver));
        let refused = stage.asked(&resolving, "k").await.unwrap_err();
        assert_eq!(refused.retry_after(), Some(std::time::Duration::from_secs(60)));
        assert_eq!(refusal::<String>(Err(refused)), UNKNOWN);
    }

    async fn what_did_not_happen_is_run(world: World) {
        let store = world.open().await;
        let mut stage = Stage::new();
        abandon(&once(&store), &mut stage, "k").await;
        let resolver = |_: Abandoned| async { Verdict::DidNotHappen };
        let resolving = Once::new(layer(&store).resolver(resolver));
        assert_eq!(value(stage.runs(&resolving, "k", Ok("one".to_owned())).await), first("one"));
    }

    /// The layer's reconciler settles operations as well.
    async fn a_sweep_settles_what_was_cut_off(world: World) {
        let store = world.open().await;
        let mut stage = Stage::new();
        let resolver = |_: Abandoned| async { Verdict::answer(Json("found out")) };
        let resolving = Once::new(layer(&store).resolver(resolver));
        abandon(&resolving, &mut stage, "k").await;
        let swept = resolving.layer().reconciler().sweep().await;
        assert_eq!((swept.seen, swept.answered), (1, 1), "{swept:?}");
        assert_eq!(value(stage.asked(&resolving, "k").await), replay("found out"));
    }

    async fn a_rerun_goes_on_after_the_last_checkpoint(world: World) {
        let store = world.open().await;
        let layer = layer(&store).recovery(Recovery::rerun()).downstream_secret([7; 32]);
        let once = Once::new(layer);
        let mut stage = Stage::new();
        let called = stage.called(&once, "k");
        let run = stage.next().await;
        assert_eq!(run.handle.checkpointed::<u64>("reserved").await.unwrap(), None);
        run.handle.checkpoint("reserved", &500).await.unwrap();
        let downstream = run.handle.downstream_key("charge").unwrap();
        run.panics("as the test wants");
        assert!(called.await.unwrap_err().is_panic());

        let called = stage.called(&once, "k");
        let run = stage.next().await;
        assert_eq!(run.handle.attempt(), 2);
        assert_eq!(run.handle.checkpointed::<u64>("reserved").await.unwrap(), Some(500));
        assert_eq!(run.handle.downstream_key("charge").unwrap(), downstream);
        run.handle.ensure_owned().await.unwrap();
        run.answers("one");
        assert_eq!(value(joined(called).await), first("one"));
    }

    /// One that waits runs in the stead of one that was released.
    async fn a_waiter_runs_when_the_first_run_had_no_effect(world: World) {
        let store = world.open().await;
        let wait = InFlight::Wait(std::time::Duration::from_secs(20));
        let once = Once::new(layer(&store).in_flight(wait));
        let mut stage = Stage::new();
        let called = stage.called(&once, "k");
        let run = stage.next().await;
        let second = stage.called(&once, "k");
        eventually("the second call", || store.calls(Operation::Claim) >= 2).await;
        run.returns(Err(tower_idempotency::Failure::NothingHappened(Broken("refused"))));
        assert!(joined(called).await.is_err());
        stage.next().await.answers("two");
        assert_eq!(value(joined(second).await), first("two"));
    }
}

/// A run that is cut off.
async fn abandon(once: &Once<crate::support::TestStore>, stage: &mut Stage, key: &str) {
    let called = stage.called(once, key);
    stage.next().await.panics("as the test wants");
    assert!(called.await.unwrap_err().is_panic());
}

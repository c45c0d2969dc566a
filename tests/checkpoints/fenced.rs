//! Who has lost the claim saves nothing, and is told so.

use std::time::Duration;

use tower_idempotency::{
    State,
    store::{Checkpoints, Inspect, Store},
};

use crate::{common::*, every_store, support::post};

every_store! {
    // L3
    async fn a_run_that_was_taken_over_saves_nothing(world: World) {
        let mut first = Stage::silent(&world).await;
        let (late, answer) = first.begin(post("k", "A")).await;
        late.owner().checkpoint("step", &1).await.unwrap();
        world.clock.advance(LEASE + Duration::from_secs(1));
        let mut second = Stage::on(&world).await;
        let (winner, _) = second.begin(post("k", "A")).await;

        let lost = late.owner().checkpoint("step", &99).await.unwrap_err();
        assert!(lost.is_lost() && !lost.is_unknown(), "{lost}");
        let lost_too = late.owner().checkpointed::<u64>("step").await.unwrap_err();
        assert!(lost_too.is_lost(), "{lost_too}");
        let response = answer_of(lost);
        assert_eq!((response.status().as_u16(), &response.headers()["retry-after"]), (503, &"1".parse().unwrap()));
        late.answers_with(response);
        let answer = answer.await.unwrap();
        assert_eq!((answer.status.as_u16(), answer.replay), (503, false));
        // Giving up changes nothing either.
        assert_eq!(state(&second.store, "k").await, Some(State::Running));
        assert_eq!(read(winner.owner(), "step").await, Some(1));
        winner.answers(201, "done");
    }

    async fn a_run_whose_record_was_forgotten_saves_nothing(world: World) {
        let mut stage = Stage::on(&world).await;
        let (run, answer) = stage.begin(post("k", "A")).await;
        assert!(stage.store.forget(&id("k")).await.unwrap());
        assert!(run.owner().checkpoint("step", &1).await.unwrap_err().is_lost());
        run.answers(503, "lost");
        answer.await.unwrap();
        let (again, answer) = stage.begin(post("k", "B")).await;
        assert_eq!((again.owner().attempt(), read(again.owner(), "step").await), (1, None));
        again.answers(201, "done");
        answer.await.unwrap();
    }

    // A task that a handler has left behind.
    async fn a_run_that_has_ended_saves_nothing(world: World) {
        let mut stage = Stage::on(&world).await;
        for (key, status) in [("done", 201), ("released", 503)] {
            let (run, answer) = stage.begin(post(key, "A")).await;
            let owner = run.owner().clone();
            owner.checkpoint("step", &1).await.unwrap();
            run.answers(status, "ended");
            answer.await.unwrap();
            assert!(owner.checkpoint("step", &2).await.unwrap_err().is_lost(), "{key}");
            assert!(owner.checkpoint("later", &2).await.unwrap_err().is_lost(), "{key}");
        }
        let (run, _answer) = stage.begin(post("released", "A")).await;
        assert_eq!((read(run.owner(), "step").await, read(run.owner(), "later").await), (Some(1), None));
    }

    async fn a_run_past_its_time_saves_nothing_once_it_was_taken_over(world: World) {
        let store = world.open().await;
        let mut stage = Stage::with(&world, |store| layer(store).max_run(Duration::from_secs(60))).await;
        let (late, _answer) = stage.begin(post("k", "A")).await;
        world.clock.advance(Duration::from_secs(61));
        // Nobody has, so it may.
        late.owner().checkpoint("step", &1).await.unwrap();
        let abandoned = store.abandoned(None, 9).await.unwrap();
        assert_eq!(abandoned.len(), 1);
        let token = tower_idempotency::Token::random();
        let taken = store.take_over(&id("k"), abandoned[0].token, token, LEASE).await.unwrap().unwrap();
        assert!(late.owner().checkpoint("step", &2).await.unwrap_err().is_lost());
        // Whoever finds out what it did reads what it saved.
        let saved = store.load(&taken).await.unwrap().unwrap();
        assert_eq!((&*saved[0].name, &saved[0].value[..]), ("step", &b"\x011"[..]));
        assert_eq!(store.abandon(&taken).await.unwrap(), tower_idempotency::store::Settled::Done);
    }
}

//! What does not fit is refused, changes nothing, and is the service's mistake.

use std::collections::HashMap;

use axum::response::IntoResponse;
use tower_idempotency::{
    State,
    store::{Checkpoints, Inspect, MAX_CHECKPOINT_LEN, MAX_CHECKPOINT_NAME_LEN, MAX_CHECKPOINTS},
    testing::Operation,
};

use crate::{common::*, every_store, support::post};

every_store! {
    async fn names_values_and_numbers_have_their_limits(world: World) {
        let mut stage = Stage::on(&world).await;
        let (run, _answer) = stage.begin(post("k", "A")).await;
        let owner = run.owner();
        // The version and two quotes belong to what is stored.
        let longest = "v".repeat(MAX_CHECKPOINT_LEN - 3);
        let name = "n".repeat(MAX_CHECKPOINT_NAME_LEN);
        owner.checkpoint(&name, &longest).await.unwrap();
        for (name, value) in [(&*format!("{name}n"), "v"), ("larger", &*format!("{longest}v"))] {
            let error = owner.checkpoint(name, value).await.unwrap_err();
            assert!(error.is_over_limit() && !error.is_unknown() && !error.is_lost(), "{error:?}");
            assert_eq!(owner.checkpointed::<String>(name).await.unwrap(), None);
        }
        for at in 1..MAX_CHECKPOINTS {
            owner.checkpoint(&format!("step-{at}"), &at).await.unwrap();
        }
        let error = owner.checkpoint("one more", &1).await.unwrap_err();
        assert!(error.is_over_limit() && error.to_string().contains("32"), "{error}");
        // One that is there may still change.
        owner.checkpoint("step-1", &99).await.unwrap();
        assert_eq!(read(owner, "step-1").await, Some(99));
        assert_eq!(owner.checkpointed::<String>(&name).await.unwrap(), Some(longest));
        // What was refused has made nothing unknown.
        assert_eq!(stage.store.calls(Operation::Load), 0);
    }

    async fn a_value_of_another_type_is_said_and_stays_readable(world: World) {
        let mut stage = Stage::on(&world).await;
        let (run, answer) = stage.begin(post("k", "A")).await;
        let owner = run.owner();
        owner.checkpoint("step", "seven").await.unwrap();
        let error = owner.checkpointed::<u64>("step").await.unwrap_err();
        assert!(error.is_value() && !error.is_lost() && !error.is_unknown(), "{error:?}");
        assert_eq!(owner.checkpointed("step").await.unwrap(), Some("seven".to_owned()));
        // A map with such keys is no JSON.
        let unwritable = HashMap::from([((1, 2), 3)]);
        let unwritten = owner.checkpoint("step", &unwritable).await.unwrap_err();
        assert!(unwritten.is_value(), "{unwritten:?}");
        assert_eq!(owner.checkpointed("step").await.unwrap(), Some("seven".to_owned()));

        let response = error.into_response();
        assert_eq!((response.status().as_u16(), response.headers().get("retry-after")), (500, None));
        run.answers_with(response);
        assert_eq!(answer.await.unwrap().status, 500);
        // What the run did so far is not known.
        assert_eq!(state(&stage.store, "k").await, Some(State::Abandoned));
    }

    async fn whatever_json_can_say_comes_back(world: World) {
        let mut stage = Stage::on(&world).await;
        let (run, answer) = stage.begin(post("k", "A")).await;
        let value = serde_json::json!({
            "": [null, true, -1, u64::MAX, 0.1, "\u{0}\"\\'\u{1F4B3}", {}],
            "Größe 'x'": {"a": [[], [{}]]},
        });
        run.owner().checkpoint("", &value).await.unwrap();
        run.owner().checkpoint("Größe 'x'", &()).await.unwrap();
        run.owner().checkpoint("none", &None::<u64>).await.unwrap();
        run.answers(503, "down");
        answer.await.unwrap();
        let (run, _answer) = stage.begin(post("k", "A")).await;
        let read: Option<serde_json::Value> = run.owner().checkpointed("").await.unwrap();
        assert_eq!(read, Some(value));
        assert_eq!(run.owner().checkpointed::<()>("Größe 'x'").await.unwrap(), Some(()));
        // Saved, and as nothing.
        assert_eq!(run.owner().checkpointed::<Option<u64>>("none").await.unwrap(), Some(None));
        assert_eq!(run.owner().checkpointed::<Option<u64>>("never").await.unwrap(), None);
    }

    async fn what_no_handler_has_saved_is_not_read_as_if_one_had(world: World) {
        let mut stage = Stage::on(&world).await;
        let (run, answer) = stage.begin(post("k", "A")).await;
        let record = stage.store.get(&id("k")).await.unwrap().unwrap();
        let mut ticket = tower_idempotency::store::ClaimRequest::new(record.id, "test", record.fingerprint).ticket(1);
        ticket.token = record.token;
        for (name, value) in [("raw", "17"), ("empty", ""), ("newer", "\x0317"), ("cut", "\x01")] {
            let settled = stage.store.save(&ticket, name, value.into()).await.unwrap();
            assert_eq!(settled, tower_idempotency::store::Settled::Done);
        }
        run.answers(503, "down");
        answer.await.unwrap();
        let (run, _answer) = stage.begin(post("k", "A")).await;
        for name in ["raw", "empty", "newer", "cut"] {
            let error = run.owner().checkpointed::<u64>(name).await.unwrap_err();
            assert_eq!(error.into_response().status(), 500, "{name}");
        }
        run.owner().checkpoint("raw", &18).await.unwrap();
        assert_eq!(read(run.owner(), "raw").await, Some(18));
    }
}

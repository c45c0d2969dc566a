//! What the operator sees of a record and does to it, while others are at it too.

use tower_idempotency::{DownstreamKey, Resolved, store::Inspect};

use super::*;

every_store! {
    async fn an_operator_sees_what_the_run_saved_and_settles_the_record_once(world: World) {
        let store = world.open().await;
        let layer = layer(&store).downstream_secret([7; 32]);
        let (app, mut puppet) = puppet_app(&layer);
        let sent = spawn(&app, post("k", "A"));
        let run = puppet.next().await;
        let key = run.owner().downstream_key("charge").unwrap();
        run.owner().checkpoint("asked-under", &key).await.unwrap();
        let reconciler = layer.reconciler();
        run.answers_with(abandons());
        assert_eq!(sent.await.unwrap().status, 502);
        let found = record(&store, "k").await.unwrap();
        let seen = reconciler.examine(&found).await.unwrap().unwrap();
        assert_eq!(seen.checkpoint::<DownstreamKey>("asked-under").unwrap(), Some(key.clone()));
        assert_eq!(seen.downstream_key("charge").unwrap(), key);
        let debug = format!("{seen:?}");
        assert!(!debug.contains(key.as_str()), "{debug}");

        // An answer that says of itself that nobody knows leaves the record, under the operator's own token.
        let unknown = Verdict::answer((StatusCode::CREATED, Retain::Abandon, "x"));
        assert_eq!(reconciler.resolve(&found, unknown).await.unwrap(), Resolved::Left);
        let left = record(&store, "k").await.unwrap();
        assert_eq!((left.state, left.attempt), (State::Abandoned, found.attempt));
        assert_ne!(left.token, found.token);
        assert!(reconciler.examine(&found).await.unwrap().is_none());
        assert_eq!(reconciler.resolve(&found, paid()).await.unwrap(), Resolved::Lost);
        assert!(reconciler.examine(&left).await.unwrap().is_some());
        assert_eq!(reconciler.resolve(&left, paid()).await.unwrap(), Resolved::Answered);
        let again = reconciler.resolve(&left, Verdict::DidNotHappen).await.unwrap();
        assert_eq!(again, Resolved::Lost);
        let replay = send(&app, post("k", "A")).await;
        assert_eq!((&replay.body[..], replay.replay), (&b"paid"[..], true));
        assert!(reconciler.examine(&left).await.unwrap().is_none());
    }

    async fn a_record_that_its_own_run_has_settled_since_is_not_shown_as_abandoned(world: World) {
        let store = world.open().await;
        let layer = layer(&store).max_run(MAX_RUN);
        let (app, mut puppet) = puppet_app(&layer);
        let first = spawn(&app, post("k", "A"));
        let run = puppet.next().await;
        run.owner().checkpoint("step", &1).await.unwrap();
        world.clock.advance(MAX_RUN + MOMENT);
        let listed = store.inner().abandoned(None, 10).await.unwrap().remove(0);
        assert!(layer.reconciler().examine(&listed).await.unwrap().is_some());
        run.answers(201, "slow");
        assert_eq!(first.await.unwrap().status, 201);
        assert!(layer.reconciler().examine(&listed).await.unwrap().is_none());
    }
}

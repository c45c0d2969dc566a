//! An operator's own verdict.

use tower_idempotency::{
    Resolved, Retain,
    store::{Checkpoints, Completion, Lifetimes},
    testing::{Fault, Operation, Times},
};

use super::*;

every_store! {
    async fn a_record_is_settled_by_an_operators_verdict(world: World) {
        let store = world.open().await;
        let layer = layer(&store);
        abandoned(&store, &["answered", "freed", "left", "tombstone"]).await;
        let verdicts = [
            ("answered", paid(), Resolved::Answered),
            ("freed", Verdict::DidNotHappen, Resolved::Freed),
            ("left", Verdict::Leave, Resolved::Left),
            ("tombstone", Verdict::answer((Retain::Tombstone, "secret")), Resolved::Answered),
        ];
        let left = record(&store, "left").await;
        for (key, verdict, expected) in verdicts {
            let record = record(&store, key).await.unwrap();
            let resolved = layer.reconciler().resolve(&record, verdict).await.unwrap();
            assert_eq!(resolved, expected, "{key}");
        }
        assert_eq!(record(&store, "left").await, left);
        let handler = Handler::new();
        let app = handler.behind(layer);
        let replay = send(&app, post("answered", "A")).await;
        assert_eq!((replay.status.as_u16(), &replay.body[..], replay.replay), (201, &b"paid"[..], true));
        assert_eq!(send(&app, post("tombstone", "A")).await.code(), "idempotency_response_not_retained");
        assert_eq!(send(&app, post("left", "A")).await.code(), UNKNOWN);
        assert_eq!(handler.effects(), 0);
        assert_eq!(send(&app, post("freed", "A")).await.status, 201);
        assert_eq!(handler.effects(), 1);
    }

    // L3: it is fenced off before the verdict is recorded.
    async fn the_late_owner_changes_nothing_after_an_operators_verdict(world: World) {
        let store = world.open().await;
        let ticket = abandon(&store, claim("k")).await;
        let reconciler = layer(&store).reconciler();
        let found = record(&store, "k").await.unwrap();
        assert_eq!(reconciler.resolve(&found, paid()).await.unwrap(), Resolved::Answered);
        let resolved = record(&store, "k").await;
        let late = Completion::tombstone(StatusCode::OK);
        assert_eq!(store.complete(&ticket, late, Lifetimes::new(HOLD)).await.unwrap(), Settled::Lost);
        assert_eq!(store.save(&ticket, "late", Bytes::new()).await.unwrap(), Settled::Lost);
        assert_eq!(record(&store, "k").await, resolved);
    }

    async fn a_verdict_about_a_record_that_is_not_as_it_was_changes_nothing(world: World) {
        let store = world.open().await;
        let reconciler = layer(&store).reconciler();
        abandoned(&store, &["again", "done", "running", "gone"]).await;
        for key in ["again", "done", "running", "gone"] {
            let found = record(&store, key).await.unwrap();
            match key {
                "again" => {
                    let mut again = claim(key);
                    again.replaces = Some(found.token);
                    let _cut_off_again = abandon(&store, again).await;
                }
                "running" => {
                    let mut again = claim(key);
                    again.replaces = Some(found.token);
                    assert!(matches!(store.claim(again).await.unwrap(), Claim::Won(_)));
                }
                "done" => assert_eq!(reconciler.resolve(&found, paid()).await.unwrap(), Resolved::Answered),
                _ => assert!(store.forget(&found.id).await.unwrap()),
            }
            let before = record(&store, key).await;
            assert_eq!(reconciler.resolve(&found, Verdict::DidNotHappen).await.unwrap(), Resolved::Lost, "{key}");
            assert_eq!(record(&store, key).await, before);
        }
    }

    async fn what_an_operator_said_is_recorded_though_the_store_fails_meanwhile(world: World) {
        let store = world.open().await;
        let layer = layer(&store).store_timeout(Duration::from_millis(100));
        abandoned(&store, &["k"]).await;
        let found = record(&store, "k").await.unwrap();
        store.fail(Operation::TakeOver, Fault::Before, Times::Always);
        layer.reconciler().resolve(&found, paid()).await.unwrap_err();
        store.clear();
        comes_to(&store, "k", Some(State::Abandoned)).await;
        store.fail(Operation::Complete, Fault::HangBefore, Times::Always);
        let found = record(&store, "k").await.unwrap();
        layer.reconciler().resolve(&found, paid()).await.unwrap_err();
        store.clear();
        comes_to(&store, "k", Some(State::Completed)).await;
        let replay = send(&Handler::new().behind(layer), post("k", "A")).await;
        assert_eq!((&replay.body[..], replay.replay), (&b"paid"[..], true));
    }
}

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

    // An answer that got lost on its way is not somebody else's doing.
    async fn a_key_that_was_freed_is_told_as_freed_though_the_answer_of_the_store_got_lost(world: World) {
        let store = world.open().await;
        abandoned(&store, &["k"]).await;
        let found = record(&store, "k").await.unwrap();
        store.fail(Operation::Release, Fault::After, Times::Once);
        let resolved = layer(&store).reconciler().resolve(&found, Verdict::DidNotHappen).await.unwrap();
        assert_eq!((resolved, record(&store, "k").await), (Resolved::Freed, None));
    }

    async fn an_operators_verdict_is_recorded_after_a_drain_as_well(world: World) {
        let store = world.open().await;
        let layer = layer(&store);
        abandoned(&store, &["k"]).await;
        let _nothing_goes_on = layer.drain(Duration::ZERO).await;
        let pieces = futures_util::stream::unfold(0, |piece| async move {
            tokio::time::sleep(Duration::from_millis(20)).await;
            (piece < 2).then_some((Ok::<_, std::io::Error>("x"), piece + 1))
        });
        let verdict = Verdict::answer((StatusCode::CREATED, axum::body::Body::from_stream(pieces)));
        let found = record(&store, "k").await.unwrap();
        let resolved = layer.reconciler().resolve(&found, verdict).await.unwrap();
        assert_eq!((resolved, state(&store, "k").await), (Resolved::Answered, Some(State::Completed)));
    }

    // What a resolver would see, without anything being taken over or changed.
    async fn an_operator_sees_what_a_resolver_would_and_changes_nothing(world: World) {
        let store = world.open().await;
        let layer = layer(&store).downstream_secret([7; 32]);
        let Claim::Won(ticket) = store.claim(claim("k")).await.unwrap() else {
            panic!("not won");
        };
        assert_eq!(store.save(&ticket, "charge", Bytes::from("\x01\"ch_1\"")).await.unwrap(), Settled::Done);
        assert_eq!(store.abandon(&ticket).await.unwrap(), Settled::Done);
        let found = record(&store, "k").await.unwrap();
        let reconciler = layer.reconciler();
        let seen = reconciler.examine(&found).await.unwrap().unwrap();
        assert_eq!(seen.checkpoint::<String>("charge").unwrap(), Some("ch_1".to_owned()));
        assert_eq!(seen.checkpoint::<String>("refund").unwrap(), None);
        assert_eq!((seen.key(), seen.record()), (Some(&found.id.key), &found));
        let under = seen.downstream_key("charge").unwrap();
        assert_eq!(record(&store, "k").await.unwrap(), found);
        assert_eq!(store.calls(Operation::TakeOver), 0);

        // A resolver sees the same.
        let asked = Arc::new(Mutex::new(None));
        let keep = asked.clone();
        let layer = layer.resolver(move |abandoned: Abandoned| {
            let charge = abandoned.checkpoint::<String>("charge").unwrap();
            *keep.lock().unwrap() = Some((charge, abandoned.downstream_key("charge").unwrap()));
            async { paid() }
        });
        assert_swept(layer.reconciler().sweep().await, 1, 1, 0, 0);
        assert_eq!(asked.lock().unwrap().take(), Some((Some("ch_1".to_owned()), under)));
        // It is another's by now.
        assert!(reconciler.examine(&found).await.unwrap().is_none());
        store.fail(Operation::Load, Fault::Before, Times::Always);
        reconciler.examine(&found).await.unwrap_err();
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

//! Reconcilers over a store that seals.

use axum::{Router, routing::any};
use support::provider::Provider;
use tower_http::catch_panic::CatchPanicLayer;
use tower_idempotency::{
    Idempotency, MemoryStore, Recovery, Resolved,
    store::{Checkpoints, SealedStore, SealingKeys},
    testing::Operation,
};

use super::*;

fn cut_off() {
    panic!("as the test wants");
}

/// A reconciler that lists hashes has what a request that knows the key has: checkpoints, downstream keys, and
/// the record itself.
#[tokio::test]
async fn a_sweep_over_hashed_names_knows_neither_scope_nor_key_and_everything_else() {
    let keys = SealingKeys::new("k", [1; 32]).hash_ids([2; 32]);
    let store = SealedStore::open(MemoryStore::new(), keys).await.unwrap();
    let (resolver, mut provider) = Provider::new();
    let layer = layer(&store).resolver(resolver).downstream_secret([7; 32]);
    let known = Arc::new(Mutex::new(None));
    let downstream = known.clone();
    let handler = move |idempotency: Idempotency| {
        let known = known.clone();
        async move {
            idempotency.checkpoint("charge", "ch_1").await.unwrap();
            *known.lock().unwrap() = Some(idempotency.downstream_key("charge").unwrap());
            cut_off();
        }
    };
    let app = Router::new()
        .route("/charges", any(handler))
        .route_layer(layer.clone())
        .layer(CatchPanicLayer::new());
    assert_eq!(send(&app, post("secret", "A")).await.status, 500);
    let downstream = downstream.lock().unwrap().take().unwrap();

    let reconciler = layer.reconciler();
    let sweeping = tokio::spawn(async move { reconciler.sweep().await });
    let question = provider.next().await;
    let abandoned = &question.abandoned;
    assert!(abandoned.scope().is_none() && abandoned.key().is_none());
    assert_eq!(
        abandoned.checkpoint("charge").unwrap(),
        Some("ch_1".to_owned())
    );
    assert_eq!(abandoned.downstream_key("charge").unwrap(), downstream);
    question.answer(Verdict::Leave);
    assert_swept(sweeping.await.unwrap(), 1, 0, 0, 1);

    // What a sweep has just left no request asks about, though it knows it by another name.
    assert_eq!(send(&app, post("secret", "A")).await.code(), UNKNOWN);
    assert_eq!(provider.asked(), 1);
    let listed = store.abandoned(None, 10).await.unwrap();
    let resolved = layer
        .reconciler()
        .resolve(&listed[0], paid())
        .await
        .unwrap();
    assert_eq!(resolved, Resolved::Answered);
    let replay = send(&app, post("secret", "A")).await;
    assert_eq!((&replay.body[..], replay.replay), (&b"paid"[..], true));
}

// Of a record that cannot be read nothing follows for those behind it.
#[tokio::test]
async fn a_record_that_cannot_be_read_does_not_hold_up_those_behind_it() {
    let below = MemoryStore::new();
    let keys = |byte| SealingKeys::new("k", [byte; 32]);
    let old = SealedStore::open(below.clone(), keys(1)).await.unwrap();
    let Claim::Won(ticket) = old.claim(claim("a-1")).await.unwrap() else {
        panic!("not won")
    };
    assert_eq!(
        old.save(&ticket, "step", Bytes::from("1")).await.unwrap(),
        Settled::Done
    );
    assert_eq!(old.abandon(&ticket).await.unwrap(), Settled::Done);
    abandoned(&old, &["a-2", "a-3"]).await;

    let known = Known::default();
    // The same id for another key: an accident with the configuration.
    let misread = SealedStore::open(below, keys(2)).await.unwrap();
    let layer = layer(&misread).resolver(known.resolver());
    let reconciler = layer.reconciler().concurrency(1);
    let swept = reconciler.sweep().await;
    assert_eq!(
        (swept.seen, swept.failed, swept.answered, swept.more),
        (3, 1, 2, false)
    );
    let swept = reconciler.sweep().await;
    assert_eq!((swept.seen, swept.postponed), (1, 1));
}

// The same for requests: refused as before, without another try to take the record over each time.
#[tokio::test]
async fn a_request_whose_checkpoints_cannot_be_read_is_refused_and_not_run() {
    let below: TestStore = World::memory().open().await;
    let keys = |byte| SealingKeys::new("k", [byte; 32]);
    let old = SealedStore::open(below.clone(), keys(1)).await.unwrap();
    let Claim::Won(ticket) = old.claim(claim("a-1")).await.unwrap() else {
        panic!("not won")
    };
    let saved = old.save(&ticket, "step", Bytes::from("1")).await.unwrap();
    assert_eq!(saved, Settled::Done);
    assert_eq!(old.abandon(&ticket).await.unwrap(), Settled::Done);

    let known = Known::default();
    let misread = SealedStore::open(below.clone(), keys(2)).await.unwrap();
    let layer = layer(&misread)
        .resolver(known.resolver())
        .recovery(Recovery::rerun());
    let handler = Handler::new();
    let app = handler.behind(layer.clone());
    for _ in 0..5 {
        let told = send(&app, post("a-1", "A")).await;
        assert_eq!(
            told.said(),
            (503, "idempotency_store_unavailable".to_owned())
        );
    }
    // Taken over once, and abandoned again.
    assert_eq!(below.calls(Operation::TakeOver), 1);
    assert_eq!((known.asked().len(), handler.effects()), (0, 0));
    // Once its key is back it is asked about.
    let layer = IdempotencyLayer::new(old)
        .single_tenant()
        .resolver(known.resolver());
    let replay = send(&handler.behind(layer), post("a-1", "A")).await;
    assert_eq!((&replay.body[..], replay.replay), (&b"paid a-1"[..], true));
}

//! Keys come and go while records live.

use axum::Router;
use tower_idempotency::{
    DecodeError, IdempotencyLayer, Recovery, SealedStore, SealingKeys, StoreFailure,
    store::{Checkpoints, Inspect},
    testing::Operation,
};

use crate::{
    common::*,
    every_store,
    support::{Handler, TestStore, World, logs::Logs, post, send},
};

fn old() -> SealingKeys {
    SealingKeys::new("2026-06", OLD)
}

/// A service that runs again whenever it is allowed to.
async fn app(world: &World, keys: SealingKeys, handler: &Handler) -> Router {
    handler.behind(eager(layer(&open(world, keys).await)))
}

fn eager<S: Inspect + Checkpoints>(layer: IdempotencyLayer<S>) -> IdempotencyLayer<S> {
    let layer = layer.store_failure(StoreFailure::RunUnprotected);
    layer.recovery(Recovery::rerun())
}

fn unavailable() -> (u16, String) {
    (503, UNAVAILABLE.to_owned())
}

every_store! {
    async fn keys_are_rotated_while_records_live(world: World) {
        let handler = secretive();
        let before = app(&world, old(), &handler).await;
        let first = send(&before, post("k-1", "A")).await;

        // Everybody can open the new key before anybody writes with it.
        let ready = app(&world, old().also_opens("2026-12", NEW), &handler).await;
        let both = app(&world, keys().also_opens("2026-06", OLD), &handler).await;
        let second = send(&both, post("k-2", "A")).await;
        for app in [&ready, &both] {
            send(app, post("k-1", "A")).await.assert_replays(&first);
            send(app, post("k-2", "A")).await.assert_replays(&second);
        }
        let new = stored(&world.open().await, &id("k-2")).await;
        assert!(new.response.unwrap().starts_with(b"\x02\x072026-12"));

        // Taken away too early, the old key is missed and nothing runs.
        let after = app(&world, keys(), &handler).await;
        for _ in 0..3 {
            assert_eq!(send(&after, post("k-1", "A")).await.said(), unavailable());
        }
        assert_eq!(send(&after, post("k-1", "B")).await.said(), (409, REUSED.to_owned()));
        send(&after, post("k-2", "A")).await.assert_replays(&second);

        // And is back.
        let again = app(&world, keys().also_opens("2026-06", OLD), &handler).await;
        send(&again, post("k-1", "A")).await.assert_replays(&first);
        assert_eq!(handler.effects(), 2);
    }

    async fn another_key_under_the_same_id_opens_nothing_and_runs_nothing(world: World) {
        let handler = secretive();
        let right = app(&world, keys(), &handler).await;
        let first = send(&right, post("k-1", "A")).await;
        let wrong = app(&world, SealingKeys::new("2026-12", OTHER), &handler).await;
        assert_eq!(send(&wrong, post("k-1", "A")).await.said(), unavailable());
        assert_eq!(send(&wrong, post("k-1", "B")).await.said(), (409, REUSED.to_owned()));
        send(&right, post("k-1", "A")).await.assert_replays(&first);
        assert_eq!(handler.effects(), 1);
    }

    async fn a_layer_without_keys_over_sealed_records_runs_nothing(world: World) {
        let handler = secretive();
        let first = send(&app(&world, keys(), &handler).await, post("k-1", "A")).await;
        assert_eq!(first.status, 201);
        let bare: TestStore = world.open().await;
        let app = handler.behind(eager(layer(&bare)));
        assert_eq!(send(&app, post("k-1", "A")).await.said(), unavailable());
        assert_eq!(send(&app, post("k-1", "B")).await.said(), (409, REUSED.to_owned()));
        assert_eq!(handler.effects(), 1);
        assert_eq!(why(&bare, &id("k-1")).await, DecodeError::Sealed { key_id: "2026-12".into() });
    }

    async fn what_was_done_and_not_kept_needs_no_key(world: World) {
        let store = open(&world, old()).await;
        let handler = secretive();
        let tombstones = layer(&store).response_body_limit(1);
        send(&handler.behind(tombstones), post("k-1", "A")).await;
        let after = app(&world, keys(), &handler).await;
        let code = send(&after, post("k-1", "A")).await.said();
        assert_eq!(code, (409, "idempotency_response_not_retained".to_owned()));
    }

    // An operator sees what became of a key without being able to read the answer.
    async fn a_record_that_cannot_be_opened_still_tells_its_state(world: World) {
        let handler = secretive();
        send(&app(&world, old(), &handler).await, post("k-1", "A")).await;
        let store = open(&world, keys()).await;
        let record = stored(&store, &id("k-1")).await;
        assert_eq!(record.status.unwrap(), 201);
        assert!(record.completed.is_some());
        let found = why(&store, &id("k-1")).await;
        assert_eq!(found, DecodeError::NoSuchKey { key_id: "2026-06".into() });
        assert!(store.forget(&id("k-1")).await.unwrap());
        assert_eq!(store.get(&id("k-1")).await.unwrap(), None);
    }
}

/// What one request logs about a response it cannot read.
async fn said(app: &Router) -> String {
    let (logs, _guard) = Logs::of_this_thread();
    assert_eq!(send(app, post("k-1", "A")).await.said(), unavailable());
    let errors: Vec<_> = logs.loud("retained response cannot be read");
    assert_eq!(errors.len(), 1, "{errors:?}");
    assert_eq!(errors[0].level, tracing::Level::ERROR);
    errors[0].text.clone()
}

#[tokio::test]
async fn the_event_names_the_key_and_what_to_do() {
    let world = World::memory();
    let handler = secretive();
    send(&app(&world, old(), &handler).await, post("k-1", "A")).await;

    let text = said(&app(&world, keys(), &handler).await).await;
    assert!(
        text.contains("2026-06") && text.contains("also_opens"),
        "{text}"
    );
    let wrong = SealingKeys::new("2026-06", OTHER);
    let text = said(&app(&world, wrong, &handler).await).await;
    assert!(
        text.contains("2026-06") && text.contains("does not open"),
        "{text}"
    );
    let text = said(&handler.behind(layer(&world.open().await))).await;
    assert!(
        text.contains("2026-06") && text.contains("SealedStore"),
        "{text}"
    );
}

#[tokio::test]
async fn sealing_costs_no_round_trip() {
    for keys in [keys(), hashing()] {
        let world = World::memory();
        let inner = world.open().await;
        let store = SealedStore::open(inner.clone(), keys).await;
        let app = secretive().behind(layer(&store.unwrap()));
        let before = inner.calls(Operation::Claim) + inner.calls(Operation::Complete);
        send(&app, post("k-1", "A")).await;
        send(&app, post("k-1", "A")).await;
        let after = inner.calls(Operation::Claim) + inner.calls(Operation::Complete);
        assert_eq!(after - before, 3);
    }
}

every_store! {
    async fn once_its_record_has_expired_a_key_runs_as_new_without_the_old_secret(world: World) {
        let handler = secretive();
        let short = layer(&open(&world, old()).await).ttl(DAY);
        send(&handler.behind(short), post("k-1", "A")).await;
        world.clock.advance(DAY + DAY);
        let after = app(&world, keys(), &handler).await;
        let second = send(&after, post("k-1", "A")).await;
        assert_eq!((second.status.as_u16(), second.replay), (201, false));
        assert_eq!(handler.effects(), 2);
    }
}

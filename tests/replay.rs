//! A retry gets the first answer.

mod support;

use support::*;
use tower_idempotency::{IdempotencyLayer, IdempotencyStatus, IdempotentResponse};
use tower::ServiceExt;

every_store! {
    async fn a_retry_is_answered_with_the_first_answer_and_the_marker(world: World) {
        let handler = Handler::new();
        let app = handler.behind(IdempotencyLayer::new(world.open().await).single_tenant());
        let first = send(&app, post("k-1", "{\"amount\":1}")).await;
        assert_eq!(first.status, 201);
        let retry = send(&app, post("k-1", "{\"amount\":1}")).await;
        retry.assert_replays(&first);
        assert_eq!(handler.effects(), 1);
    }

    async fn the_status_extension_says_what_happened(world: World) {
        let handler = Handler::new();
        let app = handler.behind(IdempotencyLayer::new(world.open().await).single_tenant());
        let response = app.clone().oneshot(post("k-1", "a")).await.unwrap();
        assert_eq!(response.idempotency_status(), Some(IdempotencyStatus::Executed));
        let response = app.clone().oneshot(post("k-1", "a")).await.unwrap();
        assert_eq!(response.idempotency_status(), Some(IdempotencyStatus::Replayed));
        let response = app.clone().oneshot(post("k-1", "b")).await.unwrap();
        assert_eq!(response.idempotency_status(), Some(IdempotencyStatus::Reused));
        let response = app.oneshot(request("GET", "/", None, "")).await.unwrap();
        assert_eq!(response.idempotency_status(), None);
    }
}

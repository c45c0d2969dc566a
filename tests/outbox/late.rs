//! Nothing is sent when the server may have forgotten the key, however long it took on the way.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{body::Body, response::IntoResponse};
use http::{Request, StatusCode};
use tower::service_fn;
use tower_idempotency::client::{Relay, RetryLayer, Undelivered};
use tower_layer::Layer;

use crate::ground::{both, charge_of};

both! {
    // A remote signer, say.
    async fn a_hook_that_outlasts_the_key_ends_the_attempt(ground: Ground) {
        let lifetime = Duration::from_millis(400);
        let outbox = ground.outbox.clone().key_lifetime(lifetime);
        let sent = Arc::new(AtomicUsize::new(0));
        let count = sent.clone();
        let client = service_fn(move |_: Request<Body>| {
            count.fetch_add(1, Ordering::SeqCst);
            async { Ok::<_, std::io::Error>(StatusCode::CREATED.into_response()) }
        });
        let retry = RetryLayer::new().attempt_timeout(Duration::from_millis(40));
        let slow = retry.clone().before_attempt(move |_, _, _| {
            std::thread::sleep(lifetime);
            Ok(())
        });
        let relay = Relay::new(outbox.clone(), slow.layer(client.clone()));
        let end = relay.deliver::<Body, Body>("r", charge_of(1)).await.unwrap_err();
        assert!(matches!(end, Undelivered::Overdue { after: None, .. }), "{end:?}");
        assert_eq!(sent.load(Ordering::SeqCst), 0);
        assert_eq!(outbox.overdue(10).await.unwrap().len(), 1);
        // With a quick one such a short life is enough.
        let quick = Relay::new(outbox.key_lifetime(lifetime * 100), retry.layer(client));
        quick.deliver::<Body, Body>("quick", charge_of(1)).await.unwrap();
        assert_eq!(sent.load(Ordering::SeqCst), 1);
    }

    // In Postgres by another session that begins it again in its own transaction, and holds the row until it gives up.
    async fn a_row_that_is_locked_until_the_key_has_ended_is_not_sent(ground: Ground) {
        let lifetime = Duration::from_millis(900);
        let outbox = ground.outbox.clone().key_lifetime(lifetime);
        outbox.begin("r", charge_of(1)).await.unwrap();
        let begun = tokio::time::Instant::now();
        let retry = ground.shop.retry().attempt_timeout(Duration::from_millis(90));
        let relay = Relay::new(outbox.clone(), retry.layer(ground.shop.app()));
        let mut other = ground.pool.begin().await.unwrap();
        outbox.begin_in(&mut *other, "r", charge_of(1)).await.unwrap();
        let sends = tokio::spawn(async move { relay.send::<Body, _>("r").await });
        tokio::time::sleep_until(begun + lifetime).await;
        other.rollback().await.unwrap();
        let end = sends.await.unwrap().unwrap_err();
        assert!(matches!(end, Undelivered::Overdue { after: None, .. }), "{end:?}");
        assert_eq!(ground.shop.requests().len(), 0);
    }
}

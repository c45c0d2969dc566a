//! What a run did that was cut off is found out by the request that meets its record.

mod support;

#[path = "resolving/answered.rs"]
mod answered;
#[path = "resolving/failing.rs"]
mod failing;
#[path = "resolving/leaving.rs"]
mod leaving;
#[path = "resolving/left.rs"]
mod left;
#[path = "resolving/places.rs"]
mod places;
#[path = "resolving/rivals.rs"]
mod rivals;
#[path = "resolving/verdicts.rs"]
mod verdicts;

use std::time::Duration;

use axum::{Router, body::Body, http::StatusCode};
use support::{provider::Provider, puppet::Puppet, *};
use tokio::task::JoinHandle;
use tower_http::catch_panic::CatchPanicLayer;
use tower_idempotency::{IdempotencyLayer, Resolver, State, Verdict};

const IN_FLIGHT: &str = "idempotency_in_flight";
const UNKNOWN: &str = "idempotency_outcome_unknown";
const REUSED: &str = "idempotency_key_reused";
const OVERLOADED: &str = "idempotency_overloaded";
const UNAVAILABLE: &str = "idempotency_store_unavailable";
const NOT_RETAINED: &str = "idempotency_response_not_retained";
const LEASE: Duration = Duration::from_secs(30);
/// Longer than any record is held to find out about it.
const HOLD: Duration = Duration::from_secs(120);

fn layer(store: &TestStore) -> IdempotencyLayer<TestStore> {
    IdempotencyLayer::new(store.clone())
        .single_tenant()
        .lease(LEASE)
        .store_timeout(Duration::from_secs(5))
}

fn paid() -> Verdict {
    Verdict::answer((StatusCode::CREATED, "paid"))
}

/// A service with a puppet for a handler, and what it asks.
struct Shop {
    app: Router,
    layer: IdempotencyLayer<TestStore>,
    puppet: Puppet,
}

impl Shop {
    fn new(layer: IdempotencyLayer<TestStore>) -> Self {
        let (router, puppet) = Puppet::new();
        let app = router
            .route_layer(layer.clone())
            .layer(CatchPanicLayer::new());
        Self { app, layer, puppet }
    }

    fn asking(store: &TestStore, resolver: impl Resolver) -> Self {
        Self::new(layer(store).resolver(resolver))
    }

    /// A run that is cut off: nobody knows what it did.
    async fn cut_off(&mut self, key: &str) {
        let request = spawn(&self.app, post(key, "A"));
        self.puppet.next().await.panics("as the test wants");
        assert_eq!(request.await.unwrap().status, 500);
    }

    async fn retry(&self, key: &str) -> Answer {
        send(&self.app, post(key, "A")).await
    }

    fn retries(&self, key: &str) -> JoinHandle<Answer> {
        spawn(&self.app, post(key, "A"))
    }
}

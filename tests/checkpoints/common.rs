//! Layers, and runs whose handler the test plays.

use std::time::Duration;

use axum::{
    Router,
    body::Body,
    http::{Request, Response},
    response::IntoResponse,
};
use tokio::task::JoinHandle;
use tower_http::catch_panic::CatchPanicLayer;
use tower_idempotency::{
    CheckpointError, Idempotency, IdempotencyKey, IdempotencyLayer, RecordId, Recovery, Retention,
    Scope, State,
};

use crate::support::{
    Answer, TestStore, World,
    puppet::{Puppet, Run},
    record, send,
};

pub const LEASE: Duration = Duration::from_secs(30);
pub const TTL: Duration = Duration::from_secs(3600);
pub const REUSED: &str = "idempotency_key_reused";
pub const UNKNOWN: &str = "idempotency_outcome_unknown";

/// Failures are released, and runs that were cut off are run again: everything is driven to its end.
pub fn layer(store: &TestStore) -> IdempotencyLayer<TestStore> {
    IdempotencyLayer::new(store.clone())
        .single_tenant()
        .lease(LEASE)
        .ttl(TTL)
        .retention(Retention::successes_only())
        .recovery(Recovery::rerun())
}

pub fn id(key: &str) -> RecordId {
    RecordId::new(Scope::shared(), IdempotencyKey::new(key))
}

pub async fn state(store: &TestStore, key: &str) -> Option<State> {
    record(store, key).await.map(|record| record.state)
}

/// A service on a store of its own, and its handler's strings.
pub struct Stage {
    pub store: TestStore,
    pub app: Router,
    pub puppet: Puppet,
}

impl Stage {
    pub async fn on(world: &World) -> Self {
        Self::with(world, layer).await
    }

    /// In a process that falls silent.
    pub async fn silent(world: &World) -> Self {
        Self::over(world.open_silent().await, layer)
    }

    pub async fn with(
        world: &World,
        layer: impl FnOnce(&TestStore) -> IdempotencyLayer<TestStore>,
    ) -> Self {
        Self::over(world.open().await, layer)
    }

    fn over(
        store: TestStore,
        layer: impl FnOnce(&TestStore) -> IdempotencyLayer<TestStore>,
    ) -> Self {
        let (router, puppet) = Puppet::new();
        let app = router.route_layer(layer(&store));
        let app = app.layer(CatchPanicLayer::new());
        Self { store, app, puppet }
    }

    /// Sends it from a task of its own, and waits for its run.
    pub async fn begin(&mut self, request: Request<Body>) -> (Run, JoinHandle<Answer>) {
        let app = self.app.clone();
        let answer = tokio::spawn(async move { send(&app, request).await });
        (self.puppet.next().await, answer)
    }
}

pub async fn read(idempotency: &Idempotency, name: &str) -> Option<u64> {
    idempotency.checkpointed(name).await.unwrap()
}

/// How a handler answers that passes the error on.
pub fn answer_of(error: CheckpointError) -> Response<Body> {
    error.into_response()
}

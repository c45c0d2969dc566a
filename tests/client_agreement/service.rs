//! A service over TCP that remembers what its layer has decided.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicUsize, Ordering},
};

use axum::{
    Router,
    body::Body,
    extract::{Path, Request, State},
    http::{Response, StatusCode},
    middleware::{self, Next},
    response::{IntoResponse, Response as AxumResponse},
    routing::post,
};
use tower_idempotency::{IdempotencyLayer, IdempotencyStatus, IdempotentResponse, Profile, Retain};

use crate::support::{
    TestStore, World, eventually,
    wire::{Reply, Server, Wire},
};

pub type Layer = IdempotencyLayer<TestStore>;
type Decided = Arc<Mutex<Vec<Option<IdempotencyStatus>>>>;

pub struct Service {
    pub server: Server,
    pub store: TestStore,
    decided: Decided,
    begun: Arc<AtomicUsize>,
    /// Connections of requests that are still running.
    held: Mutex<Vec<Wire>>,
}

impl Service {
    /// Under this profile, or none, and these options.
    pub async fn with(profile: Option<Profile>, options: impl FnOnce(Layer) -> Layer) -> Self {
        let store = World::memory().open().await;
        let layer = IdempotencyLayer::new(store.clone()).single_tenant();
        let layer = match profile {
            Some(profile) => layer.profile(profile),
            None => layer,
        };
        let (decided, begun) = (Decided::default(), Arc::default());
        let app = Router::new()
            .route("/{answer}", post(answer))
            .with_state(Arc::clone(&begun))
            .route_layer(options(layer))
            .layer(middleware::from_fn_with_state(decided.clone(), remember));
        Self {
            server: Server::start(app).await,
            store,
            decided,
            begun,
            held: Mutex::default(),
        }
    }

    /// What the layer made of each request since this was asked last.
    pub fn decided(&self) -> Vec<Option<IdempotencyStatus>> {
        std::mem::take(&mut self.decided.lock().unwrap())
    }

    /// How many runs have begun.
    pub fn begun(&self) -> usize {
        self.begun.load(Ordering::SeqCst)
    }

    /// A request of somebody else's, before those that are compared.
    pub async fn before(&self, path: &str, key: &str, body: &str) -> Reply {
        let reply = self.server.exchange(&raw(path, key, body)).await;
        self.decided();
        reply
    }

    /// One whose run goes on for as long as this does.
    pub async fn hold(&self, key: &str, body: &str) {
        let before = self.begun();
        let mut wire = self.server.connect().await;
        wire.write(&raw("/held", key, body)).await;
        self.held.lock().unwrap().push(wire);
        eventually("the run to begin", || self.begun() > before).await;
    }
}

fn raw(path: &str, key: &str, body: &str) -> Vec<u8> {
    format!(
        "POST {path} HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n\
         idempotency-key: {key}\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

async fn remember(State(decided): State<Decided>, request: Request, next: Next) -> AxumResponse {
    let response = next.run(request).await;
    decided.lock().unwrap().push(response.idempotency_status());
    response
}

/// Answers as its path says, and always the same, so that two first answers can be compared.
async fn answer(State(begun): State<Arc<AtomicUsize>>, Path(told): Path<String>) -> AxumResponse {
    begun.fetch_add(1, Ordering::SeqCst);
    let answer = |status: u16| {
        let body = format!("{{\"answer\":\"{told}\"}}");
        let answer = Response::builder().status(status);
        let answer = answer.header("content-type", "application/json");
        let answer = answer.header("location", "/charges/1");
        answer.body(Body::from(body)).unwrap()
    };
    match &*told {
        "held" => std::future::pending().await,
        "not-kept" => (Retain::Tombstone, answer(201)).into_response(),
        "cut-off" => (Retain::Abandon, StatusCode::INTERNAL_SERVER_ERROR).into_response(),
        status => answer(status.parse().unwrap()),
    }
}

//! Handlers with an effect, and what tests have to do with them.

use std::{
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    extract::FromRequestParts,
    handler::Handler,
    http::{Request, Response, request::Parts},
    routing::any,
};
use tokio::{sync::Semaphore, task::JoinHandle, time::timeout};
use tower_idempotency::{
    Idempotency, IdempotencyLayer, Tx, TxError,
    store::{Checkpoints, Inspect},
};

use super::ground::Db;
use crate::support::{Answer, send};

pub const IN_FLIGHT: &str = "idempotency_in_flight";
pub const FAILED: &str = "idempotency_transaction_failed";
pub const MISUSED: &str = "idempotency_transaction_misused";
pub const NOT_RETAINED: &str = "idempotency_response_not_retained";
pub const UNKNOWN: &str = "idempotency_outcome_unknown";

/// A handler for every method on `/charges`.
pub fn app<S, H, T>(layer: IdempotencyLayer<S>, handler: H) -> Router
where
    S: Inspect + Checkpoints,
    H: Handler<T, ()>,
    T: 'static,
{
    let routes = Router::new().route("/charges", any(handler));
    routes.route_layer(layer)
}

/// One more effect of this key, not committed yet.
pub async fn charge<D: Db>(tx: &mut Tx<D>, key: &str) -> sqlx::Result<()> {
    D::run_in(tx, &format!("INSERT INTO effects VALUES ('{key}', 80)"))
        .await
        .map(drop)
}

/// A service whose handler has one effect and then answers as the test says, and how often it ran.
pub fn charging<D: Db>(
    layer: IdempotencyLayer<D::Store>,
    answer: impl Fn(usize) -> Response<Body> + Clone + Send + Sync + 'static,
) -> (Router, Runs) {
    let runs = Runs::default();
    let counted = runs.clone();
    let handler = move |Key(key): Key, mut tx: Tx<D>| async move {
        let run = counted.begin();
        charge(&mut tx, &key).await?;
        Ok::<_, TxError>(answer(run))
    };
    (app(layer, handler), runs)
}

/// A handler that stops at a gate after its effect, and then answers 201.
pub fn gated<D: Db>(layer: IdempotencyLayer<D::Store>) -> (Router, Gate) {
    let gate = Gate::default();
    let passed = gate.clone();
    let handler = move |Key(key): Key, mut tx: Tx<D>| async move {
        charge(&mut tx, &key).await?;
        passed.pass().await;
        Ok::<_, TxError>(created())
    };
    (app(layer, handler), gate)
}

/// The same with the gate before the effect, where the transaction has not begun.
pub fn gated_before<D: Db>(layer: IdempotencyLayer<D::Store>, status: u16) -> (Router, Gate) {
    let gate = Gate::default();
    let passed = gate.clone();
    let handler = move |Key(key): Key, mut tx: Tx<D>| async move {
        passed.pass().await;
        charge(&mut tx, &key).await?;
        Ok::<_, TxError>(answer(status))
    };
    (app(layer, handler), gate)
}

/// The key of a request, or the word "none".
pub struct Key(pub String);

impl<S: Send + Sync> FromRequestParts<S> for Key {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Self::Rejection> {
        let key = parts.extensions.get::<Idempotency>();
        let key = key.map(|idempotency| idempotency.key().as_bytes().to_vec());
        let key = key.map(|key| String::from_utf8(key).unwrap());
        Ok(Self(key.unwrap_or_else(|| "none".to_owned())))
    }
}

/// How often a handler was begun.
#[derive(Clone, Default)]
pub struct Runs(Arc<AtomicUsize>);

impl Runs {
    /// Which run this is, from 1.
    pub fn begin(&self) -> usize {
        self.0.fetch_add(1, Ordering::SeqCst) + 1
    }

    pub fn count(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }
}

/// Where handlers stop until the test lets them go on, one by one.
#[derive(Clone)]
pub struct Gate {
    arrived: Arc<Semaphore>,
    open: Arc<Semaphore>,
}

impl Default for Gate {
    fn default() -> Self {
        Self {
            arrived: Arc::new(Semaphore::new(0)),
            open: Arc::new(Semaphore::new(0)),
        }
    }
}

impl Gate {
    pub async fn pass(&self) {
        self.arrived.add_permits(1);
        self.open.acquire().await.unwrap().forget();
    }

    /// Waits until one more has come to the gate.
    pub async fn reached(&self) {
        let reached = timeout(Duration::from_secs(20), self.arrived.acquire()).await;
        reached.expect("nobody came to the gate").unwrap().forget();
    }

    /// Lets one through.
    pub fn open(&self) {
        self.open.add_permits(1);
    }
}

pub fn answer(status: u16) -> Response<Body> {
    let response = Response::builder().status(status);
    response.body(Body::from("done")).unwrap()
}

pub fn created() -> Response<Body> {
    answer(201)
}

/// Sends it from a task of its own.
pub fn spawn(app: &Router, request: Request<Body>) -> JoinHandle<Answer> {
    let app = app.clone();
    tokio::spawn(async move { send(&app, request).await })
}

/// A refusal with this status and code.
pub fn said(status: u16, code: &str) -> (u16, String) {
    (status, code.to_owned())
}

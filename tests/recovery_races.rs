//! Runs, questions and lost answers of the store that cross each other: nothing runs beside a run of its own
//! process, nothing runs of which nobody has asked who should be, every effect happens once at most, and what
//! is cut off comes to an end all the same.

mod support;

#[path = "recovery_races/by_hand.rs"]
mod by_hand;
#[path = "recovery_races/lost_answers.rs"]
mod lost_answers;
#[path = "recovery_races/own_runs.rs"]
mod own_runs;
#[path = "recovery_races/places.rs"]
mod places;
#[path = "recovery_races/reruns.rs"]
mod reruns;
#[path = "recovery_races/storms.rs"]
mod storms;
#[path = "recovery_races/unprotected.rs"]
mod unprotected;
#[path = "recovery_races/waiters.rs"]
mod waiters;

use std::time::Duration;

use axum::{
    Router,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use support::{
    provider::Provider,
    puppet::{Puppet, Run},
    *,
};
use tokio::{task::JoinHandle, time::timeout};
use tower_http::catch_panic::CatchPanicLayer;
use tower_idempotency::{
    Abandoned, IdempotencyLayer, InFlight, Recovery, Retain, State, StoreFailure, Verdict,
    testing::{Fault, Operation, Times},
};

const IN_FLIGHT: &str = "idempotency_in_flight";
const UNKNOWN: &str = "idempotency_outcome_unknown";
const UNAVAILABLE: &str = "idempotency_store_unavailable";
const LEASE: Duration = Duration::from_secs(30);
const MAX_RUN: Duration = Duration::from_secs(60);
const MOMENT: Duration = Duration::from_secs(1);

fn layer(store: &TestStore) -> IdempotencyLayer<TestStore> {
    IdempotencyLayer::new(store.clone())
        .single_tenant()
        .lease(LEASE)
        .store_timeout(Duration::from_secs(5))
}

fn puppet_app(layer: &IdempotencyLayer<TestStore>) -> (Router, Puppet) {
    let (router, puppet) = Puppet::new();
    let app = router
        .route_layer(layer.clone())
        .layer(CatchPanicLayer::new());
    (app, puppet)
}

/// The answer of a run whose outcome nobody knows.
fn abandons() -> Response {
    (StatusCode::BAD_GATEWAY, Retain::Abandon, "nobody knows").into_response()
}

fn paid() -> Verdict {
    Verdict::answer((StatusCode::CREATED, "paid"))
}

/// A run that is cut off, over the given store.
async fn cut_off(store: &TestStore, key: &str) {
    let (app, mut puppet) = puppet_app(&layer(store));
    let sent = spawn(&app, post(key, "A"));
    puppet.next().await.panics("as the test wants");
    assert_eq!(sent.await.unwrap().status, 500);
}

/// A run that goes on in a process that does not renew its claim, and the request that waits for it.
async fn silent(home: &TestStore, key: &str) -> (JoinHandle<Answer>, Run) {
    home.fail(Operation::Renew, Fault::Before, Times::Always);
    let (app, mut puppet) = puppet_app(&layer(home));
    let first = spawn(&app, post(key, "A"));
    (first, puppet.next().await)
}

/// What the retry is told, which neither waits for a run nor for a resolver.
async fn told_at_once(app: &Router) -> (u16, String) {
    let told = timeout(Duration::from_secs(8), send(app, post("k", "A"))).await;
    told.expect("the retry waits for something").said()
}

/// Waits until the store has been asked for the record this often.
async fn looked(store: &TestStore, times: usize) {
    let looks = || store.calls(Operation::Claim) + store.calls(Operation::Get);
    eventually("another look at the record", || looks() >= times).await;
}

/// Another process asks about everything that looks abandoned, and hears that nobody knows.
async fn another_process_leaves(world: &World) {
    let other = layer(&world.open().await).resolver(|_: Abandoned| async { Verdict::Leave });
    let swept = other.reconciler().sweep().await;
    assert_eq!((swept.seen, swept.left), (1, 1), "{swept:?}");
}

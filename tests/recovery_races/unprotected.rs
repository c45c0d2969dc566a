//! Runs without protection, where the store fails: never beside a run that it has told of.

use tower_idempotency::{CanonicalJson, ExactRequest};

use super::*;

/// Not a canonical form, so that only the older scheme tells what was asked.
const ODD: &str = r#"{"a":1,"a":2}"#;

/// A record of the older scheme; then the store fails as soon as it has told of it.
async fn nothing_runs(world: &World, completed: bool) {
    let (app, mut puppet) = puppet_app(&layer(&world.open().await).fingerprint(ExactRequest));
    let first = spawn(&app, post("k", ODD));
    let mut run = Some(puppet.next().await);
    if let Some(run) = run.take_if(|_| completed) {
        run.answers(201, "first");
        assert_eq!(first.await.unwrap().status, 201);
    }
    let store = world.open().await;
    store.fail(Operation::Claim, Fault::Before, Times::Always);
    let new = layer(&store)
        .fingerprint(CanonicalJson::new())
        .also_accept(ExactRequest)
        .store_failure(StoreFailure::RunUnprotected);
    let (app, mut puppet) = puppet_app(&new);
    let told = tokio::select! {
        told = send(&app, post("k", ODD)) => told,
        _ = puppet.next() => panic!("it runs though the store has told of its run"),
    };
    assert_eq!(told.said(), (503, UNAVAILABLE.to_owned()));
    assert!(store.calls(Operation::Claim) > 0);
    drop(run);
}

every_store! {
    async fn nothing_runs_unprotected_beside_a_run_that_was_found_under_an_older_scheme(world: World) {
        nothing_runs(&world, false).await;
    }

    async fn nothing_runs_unprotected_that_was_found_completed_under_an_older_scheme(world: World) {
        nothing_runs(&world, true).await;
    }
}

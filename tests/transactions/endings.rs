//! Runs that end without an answer.

use std::{
    panic::AssertUnwindSafe,
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{body::Body, extract::FromRequestParts, extract::Request, response::Response};
use futures_util::FutureExt;
use tower::{BoxError, Layer, ServiceExt, service_fn};
use tower_http::catch_panic::CatchPanicLayer;
use tower_idempotency::{State, Tx, TxError};

use super::{ground::*, handlers::*};
use crate::{
    on_both,
    support::{post, send},
};

const DONE: Option<State> = Some(State::Completed);

on_both! {
    // L12
    async fn a_panic_rolls_back_and_releases_at_once_and_reaches_the_caller<D: Db>() {
        let ground = Ground::<D>::new().await;
        let (app, runs) = charging::<D>(ground.layer(), |run| match run {
            1 | 2 => panic!("the handler panics"),
            _ => created(),
        });
        let panicked = AssertUnwindSafe(app.clone().oneshot(post("k", "A"))).catch_unwind().await;
        let said = *panicked.expect_err("no panic").downcast::<&str>().unwrap();
        assert_eq!(said, "the handler panics");
        assert_eq!(ground.left("k").await, (0, None));

        let caught = app.clone().layer(CatchPanicLayer::new());
        assert_eq!(send(&caught, post("k", "A")).await.status, 500);
        assert_eq!(ground.left("k").await, (0, None));

        assert_eq!(send(&app, post("k", "A")).await.status, 201);
        assert_eq!((ground.left("k").await, runs.count()), ((1, DONE), 3));
    }

    // L12
    async fn an_error_of_the_inner_service_rolls_back_and_releases_and_reaches_the_caller<D: Db>() {
        let ground = Ground::<D>::new().await;
        let runs = Runs::default();
        let counted = runs.clone();
        let service = ground.layer().layer(service_fn(move |request: Request| {
            let run = counted.begin();
            async move {
                let (mut head, _) = request.into_parts();
                let mut tx = Tx::<D>::from_request_parts(&mut head, &()).await.unwrap();
                charge(&mut tx, "k").await?;
                match run {
                    1 => Err(BoxError::from("the service fails")),
                    _ => Ok::<Response<Body>, BoxError>(created()),
                }
            }
        }));
        let failed = service.clone().oneshot(post("k", "A")).await;
        assert_eq!(failed.unwrap_err().to_string(), "the service fails");
        assert_eq!(ground.left("k").await, (0, None));
        let retry = service.oneshot(post("k", "A")).await.unwrap();
        assert_eq!((retry.status().as_u16(), runs.count()), (201, 2));
        assert_eq!(ground.left("k").await, (1, DONE));
    }

    async fn a_run_that_drain_aborts_is_rolled_back_and_released<D: Db>() {
        let ground = Ground::<D>::new().await;
        let layer = ground.layer();
        let (app, gate) = gated::<D>(layer.clone());
        let aborted = spawn(&app, post("k", "A"));
        gate.reached().await;
        let drained = layer.drain(Duration::ZERO).await;
        assert_eq!((drained.aborted, drained.left), (1, 0));
        let answer = aborted.await.unwrap();
        assert_eq!(answer.status, 503);
        assert!(answer.header("retry-after").is_some());
        assert_eq!(ground.left("k").await, (0, None));
        let (app, runs) = charging::<D>(ground.elsewhere().await, |_| created());
        assert_eq!(send(&app, post("k", "A")).await.status, 201);
        assert_eq!((ground.left("k").await, runs.count()), ((1, DONE), 1));
    }

    /// What a run that was aborted still holds may be in somebody else's hands.
    async fn a_run_that_is_aborted_with_its_transaction_elsewhere_has_no_effect<D: Db>() {
        let ground = Ground::<D>::new().await;
        let layer = ground.layer();
        let held = Arc::new(Mutex::new(None));
        let (gate, keep) = (Gate::default(), held.clone());
        let passed = gate.clone();
        let app = app(layer.clone(), move |Key(key): Key, mut tx: Tx<D>| async move {
            charge(&mut tx, &key).await?;
            *keep.lock().unwrap() = Some(tx);
            passed.pass().await;
            Ok::<_, TxError>(created())
        });
        let aborted = spawn(&app, post("k", "A"));
        gate.reached().await;
        layer.drain(Duration::ZERO).await;
        assert_eq!(aborted.await.unwrap().status, 503);
        drop(held.lock().unwrap().take());
        ground.comes_to("k", (0, None)).await;
    }
}

//! What an answer that is no success means for the key.

mod support;

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{
    Json, Router,
    body::Body,
    http::{Request, Response, StatusCode},
    response::IntoResponse,
    routing::post as route_post,
};
use support::{
    wire::{Server, raw_post},
    *,
};
use tower::{BoxError, Layer, ServiceExt};
use tower_http::{catch_panic::CatchPanicLayer, timeout::TimeoutLayer};
use tower_idempotency::{IdempotencyLayer, MemoryStore, Recovery, Retain, Retention, State};

const IN_FLIGHT: &str = "idempotency_in_flight";
const NOT_RETAINED: &str = "idempotency_response_not_retained";
const UNKNOWN: &str = "idempotency_outcome_unknown";

fn layer(store: &TestStore) -> IdempotencyLayer<TestStore> {
    IdempotencyLayer::new(store.clone()).single_tenant()
}

async fn state(store: &TestStore, key: &str) -> Option<State> {
    record(store, key).await.map(|record| record.state)
}

/// A handler that answers these one after the other, and the last one from then on.
fn answering(script: Vec<Response<()>>) -> Handler {
    Handler::answering(move |seen| {
        let next = &script[(seen.run - 1).min(script.len() - 1)];
        let mut response = Response::new(Body::from(format!("run {}", seen.run)));
        *response.status_mut() = next.status();
        *response.extensions_mut() = next.extensions().clone();
        response
    })
}

fn plain(status: u16) -> Response<()> {
    Response::builder().status(status).body(()).unwrap()
}

fn marked(status: u16, retain: Retain) -> Response<()> {
    let mut response = plain(status);
    response.extensions_mut().insert(retain);
    response
}

/// What a retry of an answered request gets.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Retry {
    /// h=1
    Replays,
    /// h=2, no marker
    Runs,
    /// h=1, refused
    IsToldItIsDone,
}

impl Retry {
    /// Sends twice and asserts.
    async fn check(
        self,
        store: &TestStore,
        layer: IdempotencyLayer<TestStore>,
        first: Response<()>,
    ) {
        let status = first.status().as_u16();
        let key = format!("k-{status}-{self:?}-{}", store.total_calls());
        let handler = answering(vec![first, plain(201)]);
        let app = handler.behind(layer);
        let first = send(&app, post(&key, "A")).await;
        assert_eq!((first.status.as_u16(), first.replay), (status, false));
        let expected = match self {
            Self::Runs => None,
            _ => Some(State::Completed),
        };
        // Never left in flight.
        assert_eq!(state(store, &key).await, expected, "status {status}");
        let retry = send(&app, post(&key, "A")).await;
        match self {
            Self::Replays => retry.assert_replays(&first),
            Self::Runs => {
                assert_eq!(
                    (retry.status.as_u16(), retry.replay),
                    (201, false),
                    "status {status}"
                );
                assert!(retry.header("idempotent-replay").is_none());
            }
            Self::IsToldItIsDone => {
                assert_eq!(
                    retry.said(),
                    (409, NOT_RETAINED.to_owned()),
                    "status {status}"
                );
                assert_eq!(retry.json()["original_status"], status);
                assert_eq!(retry.header("retry-after"), None);
            }
        }
        let runs = if self == Self::Runs { 2 } else { 1 };
        assert_eq!(handler.effects(), runs, "status {status}");
    }
}

every_store! {
    // E1
    async fn under_successes_only_a_503_may_be_followed_by_a_success(world: World) {
        let store = world.open().await;
        let app_layer = layer(&store).retention(Retention::successes_only());
        for status in [500, 502, 503, 504] {
            Retry::Runs.check(&store, app_layer.clone(), plain(status)).await;
        }
        // The success ends it.
        let handler = answering(vec![plain(503), plain(503), plain(201)]);
        let app = handler.behind(app_layer);
        for status in [503, 503] {
            assert_eq!(send(&app, post("k", "A")).await.status, status);
        }
        let success = send(&app, post("k", "A")).await;
        assert_eq!((success.status.as_u16(), success.replay), (201, false));
        send(&app, post("k", "A")).await.assert_replays(&success);
        assert_eq!(handler.effects(), 3);
    }

    // E1, the opposite policy: what Stripe's first API does.
    async fn under_the_other_policies_a_500_replays(world: World) {
        let store = world.open().await;
        for retention in [Retention::standard(), Retention::strict()] {
            for status in [500, 502, 503, 504, 599] {
                let layer = layer(&store).retention(retention.clone());
                Retry::Replays.check(&store, layer, plain(status)).await;
            }
        }
    }

    // E2: the handler has charged, whatever it answers.
    async fn an_effect_behind_a_500_happens_once_unless_told_otherwise(world: World) {
        let store = world.open().await;
        Retry::Replays.check(&store, layer(&store), plain(500)).await;
        let again = layer(&store).retention(Retention::successes_only());
        Retry::Runs.check(&store, again, plain(500)).await;
    }

    // E2
    async fn the_handlers_word_counts_whatever_the_status_and_policy(world: World) {
        let store = world.open().await;
        let policies = [Retention::standard(), Retention::strict(), Retention::successes_only()];
        for retention in policies {
            for status in [200, 201, 303, 400, 402, 404, 408, 409, 422, 429, 500, 503] {
                let layer = || layer(&store).retention(retention.clone());
                Retry::Replays.check(&store, layer(), marked(status, Retain::Keep)).await;
                Retry::Runs.check(&store, layer(), marked(status, Retain::Release)).await;
                Retry::IsToldItIsDone.check(&store, layer(), marked(status, Retain::Tombstone)).await;
            }
        }
    }

    // E2
    async fn a_handlers_word_may_stand_among_its_response_parts(world: World) {
        let store = world.open().await;
        let runs = Arc::new(AtomicUsize::new(0));
        let handler = {
            let runs = runs.clone();
            async move || {
                runs.fetch_add(1, Ordering::SeqCst);
                (StatusCode::BAD_GATEWAY, Retain::Release, "down for maintenance").into_response()
            }
        };
        let app = Router::new().route("/charges", route_post(handler)).route_layer(layer(&store));
        let server = Server::start(app).await;
        for run in 1..=2 {
            let reply = server.exchange(&raw_post("k", "A")).await;
            assert_eq!((reply.status, runs.load(Ordering::SeqCst)), (502, run));
        }
        assert_eq!(state(&store, "k").await, None);
    }

    // E2: nobody knows how far the handler got.
    async fn a_408_of_an_inner_timeout_is_kept(world: World) {
        let handler = Handler::new();
        handler.close_gate();
        let store = world.open().await;
        let limit = Duration::from_millis(20);
        let limit = TimeoutLayer::with_status_code(StatusCode::REQUEST_TIMEOUT, limit);
        let app = handler.router().layer(limit).layer(layer(&store));
        let first = send(&app, post("k", "A")).await;
        assert_eq!((first.status.as_u16(), handler.effects()), (408, 1));
        handler.open_gate();
        send(&app, post("k", "A")).await.assert_replays(&first);
        assert_eq!(handler.effects(), 1);
    }

    // E2
    async fn a_panic_is_abandoned_at_once_and_then_for_the_recovery_policy(world: World) {
        for (recovery, runs) in [(Recovery::Refuse, 1), (Recovery::rerun(), 2)] {
            let key = format!("k-{runs}");
            let store = world.open().await;
            let handler = Handler::answering(|seen| match seen.run {
                1 => panic!("after the effect"),
                _ => Response::builder().status(201).body(Body::from("again")).unwrap(),
            });
            let app = handler.behind(layer(&store).recovery(recovery)).layer(CatchPanicLayer::new());
            assert_eq!(send(&app, post(&key, "A")).await.status, 500);
            assert_eq!(state(&store, &key).await, Some(State::Abandoned));
            let retry = send(&app, post(&key, "A")).await;
            match recovery {
                Recovery::Refuse => assert_eq!(retry.said(), (409, UNKNOWN.to_owned())),
                _ => assert_eq!((retry.status.as_u16(), retry.replay), (201, false)),
            }
            assert_eq!(handler.effects(), runs);
        }
    }

    // E2
    async fn an_inner_error_is_abandoned_at_once_and_then_for_the_recovery_policy(world: World) {
        for (recovery, runs) in [(Recovery::Refuse, 1), (Recovery::rerun(), 2)] {
            let key = format!("k-{runs}");
            let store = world.open().await;
            let effects = Arc::new(AtomicUsize::new(0));
            let failing = {
                let effects = effects.clone();
                tower::service_fn(move |_: Request<Body>| {
                    let run = effects.fetch_add(1, Ordering::SeqCst) + 1;
                    async move {
                        match run {
                            1 => Err::<Response<Body>, BoxError>("after the effect".into()),
                            _ => Ok(Response::new(Body::from("again"))),
                        }
                    }
                })
            };
            let service = layer(&store).recovery(recovery).layer(failing);
            let error = service.clone().oneshot(post(&key, "A")).await.unwrap_err();
            assert_eq!(error.to_string(), "after the effect");
            assert_eq!(state(&store, &key).await, Some(State::Abandoned));
            let retry = Answer::of(service.oneshot(post(&key, "A")).await.unwrap()).await;
            match recovery {
                Recovery::Refuse => assert_eq!(retry.said(), (409, UNKNOWN.to_owned())),
                _ => assert_eq!((retry.status.as_u16(), retry.replay), (200, false)),
            }
            assert_eq!(effects.load(Ordering::SeqCst), runs);
        }
    }

    // E3: every status, under every policy.
    async fn each_policy_keeps_and_frees_what_it_says(world: World) {
        let standard = [
            400, 401, 403, 404, 405, 406, 409, 411, 412, 413, 414, 415, 416, 417, 421, 422, 423,
            425, 426, 428, 429, 431,
        ];
        let strict = [401, 403, 405, 411, 413, 414, 415, 417, 421, 425, 426, 428, 429, 431];
        let store = world.open().await;
        for status in 200..600 {
            // All of the 4xx, and some of those whose whole class is treated alike.
            if !(400..500).contains(&status) && status % 25 > 4 && status != 599 {
                continue;
            }
            let retry = |runs: bool| if runs { Retry::Runs } else { Retry::Replays };
            for (retention, runs) in [
                (Retention::standard(), standard.contains(&status)),
                (Retention::strict(), strict.contains(&status)),
                (Retention::successes_only(), status >= 400),
            ] {
                retry(runs).check(&store, layer(&store).retention(retention), plain(status)).await;
            }
        }
    }

    // E3
    async fn a_corrected_body_may_use_the_key_of_a_refused_one(world: World) {
        let server_of = |layer: IdempotencyLayer<TestStore>| {
            let handler = async |Json(amount): Json<u32>| match amount {
                0 => (StatusCode::UNPROCESSABLE_ENTITY, "more than nothing".to_owned()),
                amount => (StatusCode::CREATED, amount.to_string()),
            };
            Server::start(Router::new().route("/charges", route_post(handler)).route_layer(layer))
        };
        // By default a validation failure frees the key, also for another body …
        let store = world.open().await;
        let server = server_of(layer(&store)).await;
        for (body, status) in [("}", 400), ("\"x\"", 422), ("0", 422), ("5", 201)] {
            let reply = server.exchange(&raw_post("k", body)).await;
            assert_eq!((reply.status, reply.is_replay()), (status, false), "{body}");
        }
        assert!(server.exchange(&raw_post("k", "5")).await.is_replay());

        // … and under `strict` it is an answer like any other: kept, and bound to its body.
        let server = server_of(layer(&store).retention(Retention::strict())).await;
        assert_eq!(server.exchange(&raw_post("k-2", "0")).await.status, 422);
        let retry = server.exchange(&raw_post("k-2", "0")).await;
        assert_eq!((retry.status, retry.is_replay()), (422, true));
        let corrected = server.exchange(&raw_post("k-2", "5")).await;
        assert_eq!(corrected.said(), (409, "idempotency_key_reused".to_owned()));
        assert_eq!(state(&store, "k-2").await, Some(State::Completed));
    }

    // E3
    async fn your_own_policy_decides_by_status(world: World) {
        let store = world.open().await;
        let own = Retention::new(|status| match status.as_u16() {
            404 => Retain::Keep,
            200 => Retain::Tombstone,
            _ => Retain::Release,
        });
        let layer = || layer(&store).retention(own.clone());
        Retry::Replays.check(&store, layer(), plain(404)).await;
        Retry::IsToldItIsDone.check(&store, layer(), plain(200)).await;
        Retry::Runs.check(&store, layer(), plain(201)).await;
        Retry::Runs.check(&store, layer(), plain(500)).await;
    }

    // E3: a duplicate during the run whose answer frees the key is told to come again.
    async fn while_a_run_that_will_free_its_key_is_going_on_it_is_in_flight(world: World) {
        let handler = answering(vec![plain(422), plain(201)]);
        handler.close_gate();
        let store = world.open().await;
        let app = handler.behind(layer(&store));
        let running = tokio::spawn({
            let app = app.clone();
            async move { send(&app, post("k", "A")).await }
        });
        handler.reached(1).await;
        assert_eq!(send(&app, post("k", "A")).await.said(), (409, IN_FLIGHT.to_owned()));
        handler.open_gate();
        assert_eq!(running.await.unwrap().status, 422);
        assert_eq!(send(&app, post("k", "corrected")).await.status, 201);
        assert_eq!(handler.effects(), 2);
    }
}

// E3: what the documentation of `Retention` says is what `Debug` shows.
#[test]
fn a_policy_shows_what_it_frees() {
    let shown = format!("{:?}", Retention::strict());
    assert_eq!(
        shown,
        "Retention { release: [401, 403, 405, 411, 413, 414, 415, 417, 421, 425, 426, 428, 429, 431] }"
    );
    let _: IdempotencyLayer<MemoryStore> =
        IdempotencyLayer::new(MemoryStore::new()).retention(Retention::strict());
}

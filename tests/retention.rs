//! The status decides which answers are kept, and the handler has the last word.

mod support;

use std::time::Duration;

use axum::{
    Router,
    body::Body,
    extract::Path,
    http::{HeaderName, Response, StatusCode},
    response::IntoResponse,
    routing::post as route_post,
};
use support::*;
use tower_idempotency::{IdempotencyLayer, Retain, Retention, State, Streamed};

/// The table of the promise, written down a second time: who releases this status?
fn released(status: u16) -> (bool, bool, bool) {
    let strict = [
        401, 403, 405, 411, 413, 414, 415, 417, 421, 425, 426, 428, 429, 431,
    ]
    .contains(&status);
    let standard = strict || [400, 404, 406, 409, 412, 416, 422, 423].contains(&status);
    let successes_only = status >= 400;
    (standard, strict, successes_only)
}

/// Answers the status the path says, naming the run.
fn by_path() -> Handler {
    Handler::answering(|seen| {
        let status: u16 = seen.uri.path()[1..].parse().unwrap();
        let body = match status {
            204 | 205 | 304 => Body::empty(),
            _ => Body::from(seen.run.to_string()),
        };
        Response::builder().status(status).body(body).unwrap()
    })
}

fn layer(store: TestStore) -> IdempotencyLayer<TestStore> {
    IdempotencyLayer::new(store).single_tenant()
}

/// Sends it twice and asserts what the second attempt finds.
async fn assert_released(app: &Router, handler: &Handler, uri: &str, is_released: bool) {
    let before = handler.effects();
    let first = send(app, request("POST", uri, Some(uri), "A")).await;
    let second = send(app, request("POST", uri, Some(uri), "A")).await;
    if is_released {
        assert!(!first.replay && !second.replay, "{uri} was kept");
        assert_eq!(handler.effects() - before, 2, "{uri}");
    } else {
        second.assert_replays(&first);
        assert_eq!(handler.effects() - before, 1, "{uri}");
    }
}

/// One keyed request for each status, all at once.
async fn all_statuses(app: &Router) -> Vec<Answer> {
    let sent = (200..600).map(|status| {
        let (app, uri) = (app.clone(), format!("/{status}"));
        tokio::spawn(async move { send(&app, request("POST", &uri, Some(&uri), "A")).await })
    });
    let mut answers = Vec::new();
    for (answer, status) in sent.collect::<Vec<_>>().into_iter().zip(200..600) {
        answers.push(answer.await.unwrap());
        assert_eq!(answers.last().unwrap().status, status);
    }
    answers
}

every_store! {
    async fn each_status_is_kept_or_released_as_the_table_says(world: World) {
        for column in 0..3 {
            let handler = by_path();
            let retention = [Retention::standard(), Retention::strict(), Retention::successes_only()];
            let mut layer = layer(World::open(&world).await)
                .scope(move |_| Some(tower_idempotency::Scope::new([column])));
            // The default is the standard one; it is not set, so that the default is what is tested.
            if column > 0 {
                layer = layer.retention(retention[usize::from(column)].clone());
            }
            let app = handler.behind(layer);
            let first = all_statuses(&app).await;
            assert_eq!(handler.effects(), 400);
            let second = all_statuses(&app).await;
            let mut ran_again = 0;
            for (first, second) in first.iter().zip(&second) {
                let (standard, strict, successes_only) = released(first.status.as_u16());
                if [standard, strict, successes_only][usize::from(column)] {
                    assert!(!second.replay, "{} was kept", first.status);
                    ran_again += 1;
                } else {
                    second.assert_replays(first);
                }
            }
            assert_eq!(handler.effects(), 400 + ran_again);
        }
    }

    async fn ones_own_rule_decides_as_it_likes(world: World) {
        let handler = by_path();
        let store = world.open().await;
        let app = handler.behind(layer(store.clone()).retention(Retention::new(|status| match status.as_u16() {
            200 => Retain::Release,
            201 => Retain::Tombstone,
            _ => Retain::Keep,
        })));
        assert_released(&app, &handler, "/200", true).await;
        assert_released(&app, &handler, "/404", false).await;
        send(&app, request("POST", "/201", Some("t"), "A")).await;
        let retry = send(&app, request("POST", "/201", Some("t"), "A")).await;
        assert_eq!(retry.said(), (409, "idempotency_response_not_retained".into()));
        assert_eq!(retry.json()["original_status"], 201);
        assert_eq!(handler.effects(), 4);
    }

    async fn what_the_handler_says_wins_over_the_status(world: World) {
        let handler = Handler::answering(|seen| {
            let (status, said) = seen.uri.path()[1..].split_once('/').unwrap();
            let status = StatusCode::from_u16(status.parse().unwrap()).unwrap();
            let said = match said {
                "keep" => Retain::Keep,
                "release" => Retain::Release,
                _ => Retain::Tombstone,
            };
            (status, said, seen.run.to_string()).into_response()
        });
        let store = world.open().await;
        for (n, retention) in [Retention::standard(), Retention::successes_only()].into_iter().enumerate() {
            let app = handler.behind(
                layer(store.clone())
                    .retention(retention)
                    .scope(move |_| Some(tower_idempotency::Scope::new(n.to_string()))),
            );
            for status in [200, 201, 302, 400, 404, 408, 409, 422, 429, 499, 500, 503, 599] {
                let uri = |said: &str| format!("/{status}/{said}");
                assert_released(&app, &handler, &uri("keep"), false).await;
                assert_released(&app, &handler, &uri("release"), true).await;
                let before = handler.effects();
                let tombstone = uri("tombstone");
                let first = send(&app, request("POST", &tombstone, Some(&tombstone), "A")).await;
                assert_eq!(first.body, handler.effects().to_string(), "the first caller gets it all");
                for _ in 0..2 {
                    let retry = send(&app, request("POST", &tombstone, Some(&tombstone), "A")).await;
                    assert_eq!(retry.said(), (409, "idempotency_response_not_retained".into()));
                    assert_eq!(retry.json()["original_status"], status);
                    assert!(!retry.replay);
                }
                assert_eq!(handler.effects() - before, 1);
            }
        }
    }

    // R3, S7: the key is remembered and the answer is not, not even in the store.
    async fn a_tombstone_holds_the_status_and_nothing_of_the_answer(world: World) {
        let handler = Handler::answering(|_| (Retain::Tombstone, "secret").into_response());
        let store = world.open().await;
        let app = handler.behind(layer(store.clone()));
        send(&app, post("K", "A")).await;
        let kept = record(&store, "K").await.unwrap();
        assert_eq!((kept.state, kept.status, kept.response), (State::Completed, Some(StatusCode::OK), None));
    }

    async fn a_response_marked_streamed_leaves_a_tombstone(world: World) {
        let handler = Handler::answering(|_| (StatusCode::CREATED, Streamed, "short").into_response());
        let store = world.open().await;
        let app = handler.behind(layer(store.clone()));
        assert_eq!(send(&app, post("K", "A")).await.body, "short");
        let retry = send(&app, post("K", "A")).await;
        assert_eq!(retry.said(), (409, "idempotency_response_not_retained".into()));
        assert_eq!(retry.json()["original_status"], 201);
        assert_eq!(handler.effects(), 1);
    }

    async fn what_would_be_released_is_released_though_it_is_a_stream(world: World) {
        let handler = Handler::answering(|_| (StatusCode::BAD_REQUEST, Streamed, "no").into_response());
        let store = world.open().await;
        let app = handler.behind(layer(store.clone()));
        send(&app, post("K", "A")).await;
        assert_eq!(records(&store).await, 0);
        assert!(!send(&app, post("K", "B")).await.replay);
        assert_eq!(handler.effects(), 2);
    }

    // E3
    async fn a_released_key_runs_again_with_a_corrected_body(world: World) {
        let handler = Handler::answering(|seen| {
            let status = if seen.body == "good" { 201 } else { 422 };
            Response::builder().status(status).body(Body::from(seen.body)).unwrap()
        });
        let store = world.open().await;
        let app = handler.behind(layer(store.clone()));
        for _ in 0..2 {
            let refused = send(&app, post("K", "bad")).await;
            assert_eq!((refused.status.as_u16(), refused.replay), (422, false));
            assert_eq!(records(&store).await, 0, "a release leaves nothing");
        }
        let corrected = send(&app, post("K", "good")).await;
        assert_eq!((corrected.status.as_u16(), corrected.replay), (201, false));
        assert_eq!(handler.effects(), 3);
        send(&app, post("K", "good")).await.assert_replays(&corrected);
        assert_eq!(send(&app, post("K", "bad")).await.code(), "idempotency_key_reused");
        assert_eq!(handler.effects(), 3);
    }

    // E3
    async fn an_extractor_that_refuses_frees_the_key(world: World) {
        async fn create(Path(id): Path<u32>, axum::Json(body): axum::Json<serde_json::Value>) -> String {
            format!("{id} {body}")
        }
        let store = world.open().await;
        let app = Router::new().route("/{id}", route_post(create)).route_layer(layer(store.clone()));
        assert_eq!(send(&app, request("POST", "/x", Some("K"), "1")).await.status, 400);
        assert_eq!(send(&app, request("POST", "/1", Some("K"), "{")).await.status, 400);
        assert_eq!(records(&store).await, 0);
        let first = send(&app, request("POST", "/1", Some("K"), "2")).await;
        assert_eq!(first.body, "1 2");
        send(&app, request("POST", "/1", Some("K"), "2")).await.assert_replays(&first);
    }

    async fn after_response_ttl_the_answer_is_gone_but_the_key_is_not(world: World) {
        let handler = by_path();
        let store = world.open().await;
        let app = handler.behind(
            layer(store.clone())
                .ttl(Duration::from_secs(100))
                .response_ttl(Duration::from_secs(10)),
        );
        let first = send(&app, request("POST", "/202", Some("K"), "A")).await;
        world.clock.advance(Duration::from_millis(9_999));
        send(&app, request("POST", "/202", Some("K"), "A")).await.assert_replays(&first);

        world.clock.advance(Duration::from_millis(1));
        for _ in 0..2 {
            let retry = send(&app, request("POST", "/202", Some("K"), "A")).await;
            assert_eq!(retry.said(), (409, "idempotency_response_not_retained".into()));
            assert_eq!(retry.json()["original_status"], 202);
            assert!(retry.json()["detail"].as_str().unwrap().contains("202"));
        }
        let other = send(&app, request("POST", "/202", Some("K"), "B")).await;
        assert_eq!(other.code(), "idempotency_key_reused");
        // A purge takes the answer's bytes away and leaves the rest.
        tower_idempotency::store::Store::purge(store.inner(), 100).await.unwrap();
        assert_eq!(record(&store, "K").await.unwrap().response, None);
        let retry = send(&app, request("POST", "/202", Some("K"), "A")).await;
        assert_eq!(retry.json()["original_status"], 202);
        assert_eq!(handler.effects(), 1);

        world.clock.advance(Duration::from_secs(90));
        assert_eq!(send(&app, request("POST", "/202", Some("K"), "B")).await.status, 202);
        assert_eq!(handler.effects(), 2);
    }

    async fn skip_headers_replaces_the_list(world: World) {
        let handler = Handler::answering(|_| {
            Response::builder()
                .header("server", "s")
                .header("x-quota-left", "3")
                .header("x-quota-left", "4")
                .header("www-authenticate", "Basic")
                .header("set-cookie", "a=b")
                .header("access-control-allow-origin", "*")
                .body(Body::empty())
                .unwrap()
        });
        let app = handler.behind(layer(world.open().await).skip_headers([
            HeaderName::from_static("x-quota-left"),
            HeaderName::from_static("set-cookie"),
        ]));
        let first = send(&app, post("K", "A")).await;
        assert_eq!(first.headers.get_all("x-quota-left").iter().count(), 2);
        let retry = send(&app, post("K", "A")).await;
        assert!(retry.replay);
        for (name, is_kept) in [
            ("server", true), ("www-authenticate", true), ("access-control-allow-origin", true),
            ("x-quota-left", false), ("set-cookie", false),
        ] {
            assert_eq!(retry.headers.contains_key(name), is_kept, "{name}");
        }
    }
}

#[test]
fn the_rules_decide_alike_outside_of_a_layer() {
    let retain = |released: bool| {
        if released {
            Retain::Release
        } else {
            Retain::Keep
        }
    };
    for status in 100..600 {
        let (standard, strict, successes_only) = released(status);
        let at = StatusCode::from_u16(status).unwrap();
        assert_eq!(
            Retention::standard().decide(at),
            retain(standard),
            "{status}"
        );
        assert_eq!(
            Retention::default().decide(at),
            retain(standard),
            "{status}"
        );
        assert_eq!(Retention::strict().decide(at), retain(strict), "{status}");
        // What is below 200 never reaches the rule in practice.
        if status >= 200 {
            assert_eq!(
                Retention::successes_only().decide(at),
                retain(successes_only),
                "{status}"
            );
        }
    }
}

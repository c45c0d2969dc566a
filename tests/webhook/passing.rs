//! What happens to a request while its body is searched for the key, and when there is none in it.

use std::time::Duration;

use axum::{
    Router,
    body::Body,
    http::{HeaderMap, HeaderValue, Request},
    routing::post,
};
use bytes::Bytes;
use http_body_util::{BodyExt, StreamBody};
use tower::{Service, ServiceBuilder, ServiceExt, limit::ConcurrencyLimitLayer};
use tower_idempotency::{
    IdempotencyLayer, IdempotentResponse, KeyOnly, MissingKey, State, testing::Operation,
};

use crate::{
    every_store,
    support::{logs::Logs, puppet::Puppet, *},
};

fn layer(store: &TestStore) -> IdempotencyLayer<TestStore> {
    IdempotencyLayer::new(store.clone())
        .single_tenant()
        .fingerprint(KeyOnly)
        .key_pointer("/id")
}

fn delivery(body: impl Into<Body>) -> Request<Body> {
    request("POST", "/webhooks", None, body)
}

/// A body in frames, with a field after it.
fn with_trailers(frames: &[&'static str]) -> Body {
    let mut trailers = HeaderMap::new();
    trailers.insert("x-checksum", HeaderValue::from_static("abc"));
    let frames = frames
        .iter()
        .map(|frame| http_body::Frame::data(Bytes::from(*frame)));
    let frames = frames.chain([http_body::Frame::trailers(trailers)]);
    let frames: Vec<Result<_, std::io::Error>> = frames.map(Ok).collect();
    Body::new(StreamBody::new(futures_util::stream::iter(frames)))
}

/// Answers with what it was sent.
async fn echo(body: Body) -> String {
    let collected = body.collect().await.unwrap();
    let checksum = collected
        .trailers()
        .and_then(|fields| fields.get("x-checksum"));
    let checksum = checksum
        .map_or("none", |value| value.to_str().unwrap())
        .to_owned();
    format!(
        "{} {checksum}",
        String::from_utf8_lossy(&collected.to_bytes())
    )
}

every_store! {
    async fn without_a_key_a_request_passes_whole_where_none_is_needed(world: World) {
        let store = world.open().await;
        let echo = || Router::new().route("/webhooks", post(echo).patch(echo));
        let pass = || with_trailers(&["{\"no\":", "1}"]);
        for layer in [layer(&store).optional(), layer(&store).missing_key(MissingKey::Observe)] {
            let app = echo().route_layer(layer);
            for method in ["POST", "PATCH"] {
                let answer = app.clone().oneshot(request(method, "/webhooks", None, pass())).await.unwrap();
                assert_eq!(answer.idempotency_status(), None);
                assert_eq!(Answer::of(answer).await.body, "{\"no\":1} abc");
            }
            // What may hold a key and cannot be read never runs without one.
            for body in ["", "no", "{\"id\":1,\"id\":2}"] {
                let refused = send(&app, request("PATCH", "/webhooks", None, body)).await;
                assert_eq!(refused.said(), (400, "idempotency_body_invalid".into()), "{body}");
            }
        }
        // A malformed key is no missing one.
        let app = echo().route_layer(layer(&store).optional());
        let malformed = send(&app, delivery("{\"id\":null}")).await;
        assert_eq!(malformed.said(), (400, "idempotency_key_invalid".into()));
        assert_eq!((store.calls(Operation::Claim), records(&store).await), (0, 0));
        // With one, the same body reaches the handler whole as well.
        let keyed = send(&app, delivery(with_trailers(&["{\"id\"", ":\"evt_1\"}"]))).await;
        assert_eq!(keyed.body, "{\"id\":\"evt_1\"} abc");
        // And what is not covered is not even read.
        let mut get = request("GET", "/webhooks", None, "{\"id\":null}");
        *get.method_mut() = "PUT".parse().unwrap();
        assert_eq!(send(&app, get).await.status, 405);
    }

    async fn the_limit_of_the_body_is_exact(world: World) {
        let store = world.open().await;
        let handler = Handler::new();
        let body = |length: usize| format!("{{\"id\":\"evt\"{}}}", " ".repeat(length - 12));
        let app = handler.behind(layer(&store).optional().request_body_limit(64));
        for pieces in [false, true] {
            let sent = |length: usize| {
                let body = Bytes::from(body(length));
                match pieces {
                    false => Body::from(body),
                    true => Body::from_stream(futures_util::stream::iter(
                        body.chunks(5).map(|piece| Ok::<_, std::io::Error>(Bytes::copy_from_slice(piece))).collect::<Vec<_>>(),
                    )),
                }
            };
            let refused = send(&app, delivery(sent(65))).await;
            assert_eq!(refused.said(), (413, "idempotency_body_too_large".into()));
            assert_eq!(send(&app, delivery(sent(64))).await.status, 201);
        }
        assert_eq!(handler.effects(), 1);
        let broken = futures_util::stream::iter([Ok(Bytes::from("{\"id\":\"evt_2\"")), Err(std::io::Error::other("gone"))]);
        let refused = send(&app, delivery(Body::from_stream(broken))).await;
        assert_eq!(refused.said(), (400, "idempotency_body_incomplete".into()));
        assert_eq!(records(&store).await, 1);
    }

    async fn left_while_its_body_comes_it_leaves_nothing_and_later_it_goes_on(world: World) {
        let store = world.open().await;
        let (router, mut puppet) = Puppet::new();
        let app = router.route_layer(layer(&store));
        let (mut sender, body) = http_body_util::channel::Channel::<Bytes, std::io::Error>::new(4);
        sender.send_data("{\"id\":\"evt_1\"".into()).await.unwrap();
        let coming = tokio::time::timeout(Duration::from_millis(50), app.clone().oneshot(delivery(Body::new(body))));
        assert!(coming.await.is_err());
        assert!(sender.send_data("}".into()).await.is_err(), "the body is still being read");
        assert_eq!((store.calls(Operation::Claim), records(&store).await), (0, 0));

        let caller = spawn(&app, delivery("{\"id\":\"evt_1\"}"));
        let run = puppet.next().await;
        caller.abort();
        assert!(caller.await.unwrap_err().is_cancelled());
        run.answers(200, "done");
        comes_to(&store, "evt_1", Some(State::Completed)).await;
        let replay = send(&app, delivery("{\"id\":\"evt_1\"}")).await;
        assert!(replay.replay && puppet.begun() == 1, "{replay:?}");
    }

    async fn of_two_layers_the_outer_one_acts(world: World) {
        let store = world.open().await;
        let handler = Handler::new();
        let inner = IdempotencyLayer::new(store.clone()).single_tenant().fingerprint(KeyOnly);
        for (outside, inside, key) in [(layer(&store), inner.clone(), "evt_1"), (inner, layer(&store), "head_1")] {
            let before = handler.effects();
            let app = handler.behind(inside).route_layer(outside);
            let both = || request("POST", "/webhooks", Some("head_1"), "{\"id\":\"evt_1\"}");
            let first = send(&app, both()).await;
            send(&app, both()).await.assert_replays(&first);
            assert_eq!(handler.effects(), before + 1);
            assert!(record(&store, key).await.is_some());
        }
        assert_eq!(records(&store).await, 2);
    }

    async fn a_clone_by_member_shares_places_and_drain(world: World) {
        let store = world.open().await;
        let (router, mut puppet) = Puppet::new();
        let by_header = IdempotencyLayer::new(store.clone()).single_tenant().fingerprint(KeyOnly).max_running(1);
        let by_header = by_header.store_timeout(Duration::from_millis(300));
        let app = router.clone().route_layer(by_header.clone());
        let by_member = router.route_layer(by_header.clone().key_pointer("/id"));
        let held = spawn(&app, request("POST", "/webhooks", Some("evt_1"), "{}"));
        let run = puppet.next().await;
        let overloaded = (503, "idempotency_overloaded".to_owned());
        assert_eq!(send(&by_member, delivery("{\"id\":\"evt_2\"}")).await.said(), overloaded);
        run.answers(200, "done");
        held.await.unwrap();
        by_header.drain(Duration::from_millis(100)).await;
        assert_eq!(send(&by_member, delivery("{\"id\":\"evt_2\"}")).await.said(), overloaded);
        assert_eq!(puppet.begun(), 1);
    }

    async fn the_readied_instance_is_called_or_given_back(world: World) {
        let store = world.open().await;
        let handler = Handler::new();
        let app = ServiceBuilder::new().layer(ConcurrencyLimitLayer::new(1)).service(handler.router());
        let mut service = tower::Layer::layer(&layer(&store).optional(), app);
        for (at, body) in ["{\"id\":\"evt_1\"}", "{\"id\":\"evt_1\"}", "{\"id\":null}", "nonsense", "{}", "{\"id\":\"evt_2\"}"].into_iter().enumerate() {
            let ready = ServiceExt::<Request<Body>>::ready(&mut service);
            let ready = tokio::time::timeout(Duration::from_secs(10), ready).await;
            let ready = ready.unwrap_or_else(|_| panic!("the permit is lost before {at}")).unwrap();
            ready.call(delivery(body)).await.unwrap();
        }
        assert_eq!(handler.effects(), 3);
    }
}

#[tokio::test]
async fn requests_that_pass_without_a_member_are_said() {
    for world in World::each() {
        let (logs, _guard) = Logs::of_this_thread();
        let store = world.open().await;
        let handler = Handler::new();
        let app = handler.behind(layer(&store).missing_key(MissingKey::Observe));
        for (at, (problem, body)) in [("missing", "{}"), ("invalid", "{\"id\":\"\"}")]
            .into_iter()
            .enumerate()
        {
            assert_eq!(send(&app, delivery(body)).await.status, 201);
            assert_eq!(handler.effects(), at + 1);
            let said = logs
                .all()
                .into_iter()
                .filter(|event| event.text.contains("without an idempotency key passed"));
            let said: Vec<_> = said.collect();
            assert_eq!(said.len(), at + 1);
            assert!(said[at].text.contains(problem), "{}", said[at].text);
        }
        assert_eq!(records(&store).await, 0);
    }
}

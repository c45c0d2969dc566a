//! One event, one route: what an id gets that comes to another one, or as something else.

use axum::{
    Router,
    body::Body,
    http::{HeaderName, Request, StatusCode},
};
use bytes::Bytes;
use tower_http::catch_panic::CatchPanicLayer;
use tower_idempotency::{
    Audience, CanonicalJson, Endpoint, ExactRequest, FingerprintScheme, IdempotencyLayer, KeyOnly,
    Profile, Recovery, Scope, State,
};

use crate::{
    every_store,
    support::{puppet::Puppet, *},
};

fn layer(store: &TestStore) -> IdempotencyLayer<TestStore> {
    IdempotencyLayer::new(store.clone())
        .single_tenant()
        .profile(Profile::Webhook)
}

fn delivery(uri: &str, event: &str) -> Request<Body> {
    deliver_as(uri, event, "{}")
}

fn deliver_as(uri: &str, event: &str, body: &'static str) -> Request<Body> {
    let request = Request::post(uri).header("webhook-id", event);
    request.body(Body::from(body)).unwrap()
}

fn reused(answer: &Answer) {
    assert_eq!(answer.said(), (409, "idempotency_key_reused".into()));
    assert_eq!(answer.header("retry-after"), None);
}

fn come_back(answer: &Answer) {
    assert_eq!(answer.said(), (503, "idempotency_in_flight".into()));
    assert_eq!(answer.header("retry-after"), Some("1"));
}

every_store! {
    // F2
    async fn an_event_of_one_route_is_not_taken_for_done_by_another(world: World) {
        let store = world.open().await;
        let handler = Handler::new();
        let app = handler.behind(layer(&store));
        let first = send(&app, delivery("/billing", "evt_1")).await;
        let other = send(&app, delivery("/mail", "evt_1")).await;
        reused(&other);
        assert!(other.json()["detail"].as_str().unwrap().contains("POST /mail"));
        // Neither the query counts, where tokens stand that rotate, nor the body.
        let again = deliver_as("/billing?token=2", "evt_1", "{\"sent\":2}");
        send(&app, again).await.assert_replays(&first);
        assert_eq!(handler.effects(), 1);

        // Nor are two methods one.
        let app = handler.behind(layer(&store).methods(["POST".parse().unwrap(), "PUT".parse().unwrap()]));
        let mut put = delivery("/billing", "evt_1");
        *put.method_mut() = "PUT".parse().unwrap();
        reused(&send(&app, put).await);

        // The same by member, and where routers are nested.
        let nested = |name: &str| Router::new().nest(name, handler.behind(layer(&store).key_pointer("/id")));
        let app = nested("/a").merge(nested("/b"));
        let event = |uri: &str| deliver_as(uri, "-", "{\"id\":\"evt_2\"}");
        let first = send(&app, event("/a/webhooks")).await;
        reused(&send(&app, event("/b/webhooks")).await);
        send(&app, event("/a/webhooks")).await.assert_replays(&first);
        assert_eq!(handler.effects(), 2);
    }

    async fn with_a_scope_for_each_route_both_run(world: World) {
        let store = world.open().await;
        let handler = Handler::new();
        let layer = layer(&store);
        let of_route = |route: &'static str| {
            let scoped = layer.clone().scope(move |_| Some(Scope::new(format!("{route} bank"))));
            Router::new().nest(route, handler.behind(scoped))
        };
        let app = of_route("/billing").merge(of_route("/mail"));
        for (runs, route) in [(1, "/billing/in"), (2, "/mail/in")] {
            let first = send(&app, delivery(route, "evt_1")).await;
            assert_eq!((first.status.as_u16(), handler.effects()), (201, runs));
            send(&app, delivery(route, "evt_1")).await.assert_replays(&first);
        }
        assert_eq!(handler.effects(), 2);
    }

    // X4
    async fn while_the_other_one_has_not_completed_the_sender_is_told_to_come_back(world: World) {
        let store = world.open().await;
        let (router, mut puppet) = Puppet::new();
        // Here bodies count as well.
        let app = router
            .route_layer(layer(&store).fingerprint(ExactRequest).reuse_status(StatusCode::GONE))
            .layer(CatchPanicLayer::new());
        let event = |body: &'static str| deliver_as("/webhooks", "evt_1", body);
        let held = spawn(&app, event("1"));
        let run = puppet.next().await;
        come_back(&send(&app, event("2")).await);
        // It fails, so the id is free for the other.
        run.answers(500, "not now");
        held.await.unwrap();
        let held = spawn(&app, event("2"));
        puppet.next().await.panics("as the test wants");
        held.await.unwrap();
        assert_eq!(state(&store, "evt_1").await, Some(State::Abandoned));
        // Nobody runs it, so it may take until somebody settles it.
        let unknown = send(&app, event("1")).await;
        assert_eq!(unknown.said(), (503, "idempotency_outcome_unknown".into()));
        assert_eq!(unknown.header("retry-after"), Some("60"));
        let held = spawn(&app, event("2"));
        puppet.next().await.answers(200, "done");
        held.await.unwrap();
        let refused = send(&app, event("1")).await;
        assert_eq!(refused.said(), (410, "idempotency_key_reused".into()));
        assert_eq!(puppet.begun(), 3);
    }

    async fn clients_are_told_at_once_that_a_key_is_another_requests(world: World) {
        let store = world.open().await;
        let (router, mut puppet) = Puppet::new();
        let clients = layer(&store).audience(Audience::Clients).recovery(Recovery::Refuse);
        let app = router.route_layer(clients).layer(CatchPanicLayer::new());
        let held = spawn(&app, delivery("/a", "evt_1"));
        let run = puppet.next().await;
        reused(&send(&app, delivery("/b", "evt_1")).await);
        run.panics("as the test wants");
        held.await.unwrap();
        reused(&send(&app, delivery("/b", "evt_1")).await);
    }

    async fn moved_from_another_scheme_an_unfinished_event_is_told_to_come_back(world: World) {
        let store = world.open().await;
        let (router, mut puppet) = Puppet::new();
        let before = IdempotencyLayer::new(store.clone())
            .single_tenant()
            .header_name(HeaderName::from_static("webhook-id"));
        let old = router.clone().route_layer(before);
        let new = router.route_layer(layer(&store).also_accept(ExactRequest));
        let event = |body: &'static str| deliver_as("/webhooks", "evt_1", body);
        let held = spawn(&old, event("{\"sent\":1}"));
        let run = puppet.next().await;
        // The deploy happens here; the redelivery has another time stamp.
        come_back(&send(&new, event("{\"sent\":2}")).await);
        run.answers(400, "failed");
        assert_eq!(held.await.unwrap().status, 400);
        let held = spawn(&new, event("{\"sent\":3}"));
        puppet.next().await.answers(200, "done");
        assert_eq!(held.await.unwrap().status, 200);
        assert_eq!(puppet.begun(), 2);
    }
}

/// What is stored of it stays readable for ever.
#[test]
fn the_digest_is_over_method_and_path_and_nothing_else() {
    let digest = |method: &str, uri: &str, body: &'static str| {
        let request = Request::builder().method(method).uri(uri);
        let request = request.header("content-type", body).body(()).unwrap();
        Endpoint.fingerprint(&request.into_parts().0, &Bytes::from(body))
    };
    let first = digest("POST", "/webhooks", "a").unwrap();
    assert_eq!(Ok(first), digest("POST", "/webhooks?at=1", "b"));
    assert_eq!(
        Ok(first),
        digest("POST", "https://example.com/webhooks", "c")
    );
    for (method, uri) in [
        ("PUT", "/webhooks"),
        ("POST", "/webhooks/"),
        ("POST", "/Webhooks"),
        ("POSTX", "/webhooks"),
    ] {
        assert_ne!(Ok(first), digest(method, uri, "a"), "{method} {uri}");
    }
    let hex: String = first
        .as_bytes()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    assert_eq!(
        hex,
        "6c7d8c2e2f3816b8f87eafb22d443e055b89e01b73bc22d2220b736466e02787"
    );
    let names = [
        Endpoint.name(),
        ExactRequest.name(),
        KeyOnly.name(),
        CanonicalJson::new().name(),
    ];
    assert_eq!(names[0], "endpoint-v1");
    assert!(!names[1..].contains(&names[0]));
}

//! The scheme behind the real layer.

use axum::{body::Body, http::Request};
use tower_idempotency::{CanonicalJson, ExactRequest, IdempotencyLayer};

use crate::{
    every_store,
    support::{wire::Server, *},
};

const A: &str = r#"{"a":1,"b":[1,2]}"#;

#[track_caller]
fn assert_reused(answer: &Answer) {
    assert_eq!(answer.said(), (409, "idempotency_key_reused".into()));
    assert!(!answer.replay);
}

async fn behind(world: &World, scheme: CanonicalJson) -> (Handler, TestStore, axum::Router) {
    let handler = Handler::new();
    let store = world.open().await;
    let layer = IdempotencyLayer::new(store.clone()).single_tenant();
    let app = handler.behind(layer.fingerprint(scheme));
    (handler, store, app)
}

every_store! {
    // F4
    async fn a_document_written_in_another_way_is_replayed_and_another_document_is_refused(world: World) {
        let (handler, store, app) = behind(&world, CanonicalJson::new()).await;
        let first = send(&app, post("K", A)).await;
        assert_eq!(first.status, 201);
        for same in [A, r#"{"b":[1,2],"a":1}"#, "{ \"b\" : [1, 2],\n\t\"a\": 1 }\n", r#"{"\u0062":[1,2],"a":1}"#] {
            send(&app, post("K", same)).await.assert_replays(&first);
        }
        for other in [r#"{"a":1,"b":[2,1]}"#, r#"{"a":1.0,"b":[1,2]}"#, r#"{"a":"1","b":[1,2]}"#, r#"{"a":1}"#] {
            assert_reused(&send(&app, post("K", other)).await);
        }
        assert_eq!(handler.effects(), 1);
        assert_eq!(record(&store, "K").await.unwrap().scheme, "json-v1");
        // The handler gets what was sent, not what was compared.
        let odd = "{ \"b\" : 1.50 , \"a\" : \"\\u0041\" }";
        let echo = Handler::answering(|seen| axum::response::Response::new(Body::from(seen.body)));
        let layer = IdempotencyLayer::new(store).single_tenant().fingerprint(CanonicalJson::new());
        assert_eq!(send(&echo.behind(layer), post("echo", odd)).await.body, odd);
    }

    // F4
    async fn under_the_default_scheme_the_same_retry_is_refused(world: World) {
        let handler = Handler::new();
        let app = handler.behind(IdempotencyLayer::new(world.open().await).single_tenant());
        send(&app, post("K", A)).await;
        assert_reused(&send(&app, post("K", r#"{"b":[1,2],"a":1}"#)).await);
        assert_eq!(handler.effects(), 1);
    }

    // F6
    async fn headers_that_change_with_every_attempt_do_not_count(world: World) {
        let (handler, _, app) = behind(&world, CanonicalJson::new()).await;
        let server = Server::start(app).await;
        let attempt = |n: usize, body: &str| {
            format!(
                "POST /charges HTTP/1.1\r\nhost: test{n}\r\nidempotency-key: K\r\n\
                 date: Mon, 0{n} Jan 2026 00:00:00 GMT\r\nx-request-id: r-{n}\r\n\
                 traceparent: 00-4bf92f3577b34da6a3ce929d0e0e473{n}-00f067aa0ba902b7-01\r\n\
                 user-agent: client/{n}\r\nauthorization: Bearer {n}\r\n\
                 content-type: application/json; n={n}\r\ncontent-length: {}\r\n\r\n{body}",
                body.len()
            )
        };
        let first = server.exchange(attempt(1, A).as_bytes()).await;
        assert_eq!(first.status, 201);
        for (n, body) in [(2, A), (3, r#"{"b":[1,2],"a":1}"#), (4, r#"{ "b": [1,2], "a": 1 }"#)] {
            let retry = server.exchange(attempt(n, body).as_bytes()).await;
            assert!(retry.is_replay());
            assert_eq!(retry.body, first.body);
        }
        assert_eq!(handler.effects(), 1);
    }

    async fn path_method_query_and_media_type_count(world: World) {
        let (handler, _, app) = behind(&world, CanonicalJson::new()).await;
        send(&app, post("K", A)).await;
        for (method, uri) in [("POST", "/refunds"), ("POST", "/charges?a"), ("PATCH", "/charges")] {
            assert_reused(&send(&app, request(method, uri, Some("K"), A)).await);
        }
        let as_problem = Request::post("/charges")
            .header("idempotency-key", "K")
            .header("content-type", "application/problem+json");
        assert_reused(&send(&app, as_problem.body(Body::from(A)).unwrap()).await);
        assert_eq!(handler.effects(), 1);
    }

    async fn two_members_of_one_name_are_refused_before_anything_is_claimed_or_run(world: World) {
        let (handler, store, app) = behind(&world, CanonicalJson::new()).await;
        for body in [
            r#"{"amount":987654,"amount":1}"#.to_owned(),
            r#"{"x":{"amount":987654,"\u0061mount":1}}"#.to_owned(),
            format!("{}987654", "[".repeat(129)),
        ] {
            let answer = send(&app, post("K", body)).await;
            assert_eq!(answer.said(), (400, "idempotency_body_invalid".into()));
            let text = String::from_utf8_lossy(&answer.body).into_owned();
            assert!(text.contains("one name") || text.contains("more than 128 deep"), "{text}");
            assert!(!text.contains("987654") && !text.contains("amount"), "{text}");
        }
        assert_eq!((handler.effects(), store.total_calls(), records(&store).await), (0, 0, 0));
        // The key is as good as new.
        assert_eq!(send(&app, post("K", r#"{"amount":1}"#)).await.status, 201);
    }

    async fn broken_documents_are_kept_apart_byte_by_byte(world: World) {
        let (handler, _, app) = behind(&world, CanonicalJson::new()).await;
        let first = send(&app, post("K", r#"{"a":1"#)).await;
        assert_eq!(first.status, 201);
        send(&app, post("K", r#"{"a":1"#)).await.assert_replays(&first);
        for other in [r#"{"a":2"#, r#"{"a":1 "#, r#"{"a":1}"#, ""] {
            assert_reused(&send(&app, post("K", other)).await);
        }
        let empty = send(&app, post("empty", "")).await;
        send(&app, post("empty", "")).await.assert_replays(&empty);
        for other in [" ", "{}", "null", "\"\""] {
            assert_reused(&send(&app, post("empty", other)).await);
        }
        assert_eq!(handler.effects(), 2);
    }

    async fn members_left_out_may_differ_between_attempts_and_no_others(world: World) {
        let scheme = CanonicalJson::new().ignoring(["/requested_at", "/client/ip"]);
        let (handler, store, app) = behind(&world, scheme.clone()).await;
        let body = |amount: u32, at: &str, ip: &str| {
            format!(r#"{{"amount":{amount},"requested_at":"{at}","client":{{"ip":"{ip}","id":7}}}}"#)
        };
        let first = send(&app, post("K", body(1, "12:00", "::1"))).await;
        send(&app, post("K", body(1, "12:09", "::2"))).await.assert_replays(&first);
        send(&app, post("K", r#"{"client":{"id":7},"amount":1}"#)).await.assert_replays(&first);
        assert_reused(&send(&app, post("K", body(2, "12:00", "::1"))).await);
        let written = record(&store, "K").await.unwrap();
        let name = tower_idempotency::FingerprintScheme::name(&scheme);
        assert_eq!(written.scheme, name);
        assert_eq!(handler.effects(), 1);
    }

    async fn a_deploy_with_another_list_or_another_scheme_refuses_no_honest_retry(world: World) {
        let handler = Handler::new();
        let store = world.open().await;
        let layer = || IdempotencyLayer::new(store.clone()).single_tenant();
        let exact = handler.behind(layer());
        let one = handler.behind(layer().fingerprint(CanonicalJson::new().ignoring(["/at"])));
        let two = handler.behind(
            layer()
                .fingerprint(CanonicalJson::new().ignoring(["/at", "/by"]))
                .also_accept(CanonicalJson::new().ignoring(["/at"]))
                .also_accept(ExactRequest),
        );
        let oldest = send(&exact, post("oldest", A)).await;
        let older = send(&one, post("older", r#"{"a":1,"at":1,"by":1}"#)).await;
        send(&two, post("oldest", A)).await.assert_replays(&oldest);
        send(&two, post("older", r#"{"by":1,"at":2,"a":1}"#)).await.assert_replays(&older);
        // Under the list it was recorded with.
        assert_reused(&send(&two, post("older", r#"{"a":1,"at":1,"by":2}"#)).await);
        assert_eq!(handler.effects(), 2);
    }

    async fn the_limit_of_a_mebibyte_holds_and_below_it_every_byte_counts(world: World) {
        let (handler, store, app) = behind(&world, CanonicalJson::new()).await;
        let of = |length: usize| format!("[\"{}\"]", "x".repeat(length - 4));
        let first = send(&app, post("K", of(1 << 20))).await;
        assert_eq!(first.status, 201);
        send(&app, post("K", of(1 << 20))).await.assert_replays(&first);
        assert_reused(&send(&app, post("K", of((1 << 20) - 1))).await);
        // Also where white space makes it too large.
        for large in [of((1 << 20) + 1), format!("{} ", of(1 << 20))] {
            let refused = send(&app, post("large", large)).await;
            assert_eq!(refused.said(), (413, "idempotency_body_too_large".into()));
        }
        assert_eq!((handler.effects(), records(&store).await), (1, 1));
    }
}

//! A key belongs to one request: another method, path, query, media type, coding or body under the
//! same key is refused, and nothing else about the request counts.

mod support;

use axum::{
    Json, Router,
    body::Body,
    http::{Request, StatusCode},
    routing::post as route_post,
};
use bytes::Bytes;
use http::request::Parts;
use sha2::{Digest, Sha256};
use support::{wire::Server, *};
use tower_http::decompression::RequestDecompressionLayer;
use tower_idempotency::{
    ExactRequest, Fingerprint, FingerprintScheme, IdempotencyLayer, KeyOnly, Scheme, Scope,
    UndecodableBody,
};

const A: &str = "{\"amount\":1}";
/// `A` as gzip.
const GZIP_A: &[u8] = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x02\x03\xabVJ\xcc\xcd/\xcd+Q\xb22\xac\x05\x00@\xb4\xed!\x0c\x00\x00\x00";

#[track_caller]
fn assert_reused(answer: &Answer) {
    assert_eq!(answer.said(), (409, "idempotency_key_reused".into()));
    assert!(!answer.replay);
    assert!(answer.header("location").is_none());
}

/// A keyed POST with these headers.
fn with(headers: &[(&str, &str)], body: impl Into<Body>) -> Request<Body> {
    let mut request = Request::post("/charges").header("idempotency-key", "K");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request.body(body.into()).unwrap()
}

async fn exact(world: &World) -> (Handler, TestStore, Router) {
    let handler = Handler::new();
    let store = world.open().await;
    let app = handler.behind(IdempotencyLayer::new(store.clone()).single_tenant());
    (handler, store, app)
}

every_store! {
    // F1
    async fn the_query_counts_and_so_does_the_order_of_its_parameters(world: World) {
        let (handler, _, app) = exact(&world).await;
        let to = |uri: &str, key| request("POST", uri, Some(key), A);
        send(&app, to("/transfer?to=a", "K")).await;
        assert_reused(&send(&app, to("/transfer?to=b", "K")).await);
        assert_reused(&send(&app, to("/transfer", "K")).await);
        assert_eq!(handler.effects(), 1);
        assert!(send(&app, to("/transfer?to=a", "K")).await.replay);

        send(&app, to("/transfer?a=1&b=2", "order")).await;
        assert_reused(&send(&app, to("/transfer?b=2&a=1", "order")).await);
        // An empty query is one, and spelling counts: nothing is decoded.
        send(&app, to("/transfer", "empty")).await;
        assert_reused(&send(&app, to("/transfer?", "empty")).await);
        assert_reused(&send(&app, to("/%74ransfer", "empty")).await);
        assert_eq!(handler.effects(), 3);
    }

    // F2
    async fn another_path_or_method_under_the_key_is_refused(world: World) {
        let (handler, _, app) = exact(&world).await;
        let first = send(&app, request("POST", "/orders", Some("K"), A)).await;
        assert_eq!(first.status, 201);
        assert_reused(&send(&app, request("POST", "/refunds", Some("K"), A)).await);
        assert_reused(&send(&app, request("PATCH", "/orders", Some("K"), A)).await);
        assert_eq!(handler.effects(), 1);
        send(&app, request("POST", "/orders", Some("K"), A)).await.assert_replays(&first);
    }

    // F2
    async fn a_scope_that_includes_the_route_makes_each_route_run_on_its_own(world: World) {
        let handler = Handler::new();
        let layer = IdempotencyLayer::new(world.open().await)
            .scope(|head| Some(Scope::new(head.uri.path())));
        let app = handler.behind(layer);
        let order = send(&app, request("POST", "/orders", Some("K"), A)).await;
        let refund = send(&app, request("POST", "/refunds", Some("K"), A)).await;
        assert_eq!((refund.status.as_u16(), refund.replay), (201, false));
        assert_ne!(order.body, refund.body);
        assert_eq!(handler.effects(), 2);
        send(&app, request("POST", "/refunds", Some("K"), A)).await.assert_replays(&refund);
    }

    // F3
    async fn another_media_type_is_refused_but_its_parameters_and_case_do_not_count(world: World) {
        let (handler, _, app) = exact(&world).await;
        let first = send(&app, with(&[("content-type", "application/json")], A)).await;
        assert_eq!(first.status, 201);
        for other in ["text/plain", "application/json5", "application"] {
            assert_reused(&send(&app, with(&[("content-type", other)], A)).await);
        }
        assert_reused(&send(&app, with(&[], A)).await);
        assert_reused(&send(&app, with(&[("content-type", "")], A)).await);
        let two = [("content-type", "application/json"), ("content-type", "application/json")];
        assert_reused(&send(&app, with(&two, A)).await);
        for same in ["application/json; charset=utf-8", "Application/JSON", "application/json ;a=b"] {
            send(&app, with(&[("content-type", same)], A)).await.assert_replays(&first);
        }
        assert_eq!(handler.effects(), 1);
    }

    // F3
    async fn a_media_type_the_endpoint_refuses_never_gets_the_answer_of_another(world: World) {
        let layer = IdempotencyLayer::new(world.open().await).single_tenant();
        let create = |Json(order): Json<serde_json::Value>| async move {
            (StatusCode::CREATED, order.to_string())
        };
        let app = Router::new().route("/charges", route_post(create)).route_layer(layer);
        let refused = send(&app, with(&[("content-type", "text/plain")], A)).await;
        assert_eq!(refused.status, 415);
        // The refusal freed the key, so the corrected request runs.
        let first = send(&app, with(&[("content-type", "application/json")], A)).await;
        assert_eq!((first.status.as_u16(), first.replay), (201, false));
        assert_reused(&send(&app, with(&[("content-type", "text/plain")], A)).await);
    }

    // F3
    async fn another_content_coding_is_refused_where_nothing_decodes_outside(world: World) {
        let (handler, _, app) = exact(&world).await;
        let plain = send(&app, with(&[], A)).await;
        assert_eq!(plain.status, 201);
        assert_reused(&send(&app, with(&[("content-encoding", "gzip")], A)).await);
        assert_reused(&send(&app, with(&[("content-encoding", "gzip")], GZIP_A)).await);
        assert_eq!(handler.effects(), 1);
    }

    // F3
    async fn decoded_outside_the_layer_a_compressed_retry_is_the_same_request(world: World) {
        let handler = Handler::answering(|seen| axum::response::Response::new(Body::from(seen.body)));
        let layer = IdempotencyLayer::new(world.open().await).single_tenant();
        let app = handler.behind(layer).layer(RequestDecompressionLayer::new());
        let first = send(&app, with(&[("content-encoding", "gzip")], GZIP_A)).await;
        assert_eq!(first.body, A);
        send(&app, with(&[("content-encoding", "gzip")], GZIP_A)).await.assert_replays(&first);
        send(&app, with(&[], A)).await.assert_replays(&first);
        assert_reused(&send(&app, with(&[], "{\"amount\":2}")).await);
        assert_eq!(handler.effects(), 1);
    }

    // F3
    async fn decoded_inside_the_layer_a_compressed_retry_is_another_request(world: World) {
        let handler = Handler::answering(|seen| axum::response::Response::new(Body::from(seen.body)));
        let layer = IdempotencyLayer::new(world.open().await).single_tenant();
        let app = handler.router().layer(RequestDecompressionLayer::new()).layer(layer);
        let first = send(&app, with(&[("content-encoding", "gzip")], GZIP_A)).await;
        assert_eq!(first.body, A);
        send(&app, with(&[("content-encoding", "gzip")], GZIP_A)).await.assert_replays(&first);
        assert_reused(&send(&app, with(&[], A)).await);
        assert_eq!(handler.effects(), 1);
    }

    // F6
    async fn headers_that_change_with_every_attempt_do_not_count(world: World) {
        let (handler, _, app) = exact(&world).await;
        let server = Server::start(app).await;
        let attempt = |n: usize| {
            format!(
                "POST /charges HTTP/1.1\r\nhost: test{n}\r\nidempotency-key: K\r\n\
                 date: Mon, 0{n} Jan 2026 00:00:00 GMT\r\nx-request-id: r-{n}\r\n\
                 traceparent: 00-4bf92f3577b34da6a3ce929d0e0e473{n}-00f067aa0ba902b7-01\r\n\
                 user-agent: client/{n}\r\nauthorization: Bearer {n}\r\ncookie: s={n}\r\n\
                 accept: text/{n}\r\nx-attempt: {n}\r\ncontent-type: application/json\r\n\
                 content-length: {}\r\n\r\n{A}",
                A.len()
            )
        };
        let first = server.exchange(attempt(1).as_bytes()).await;
        assert_eq!(first.status, 201);
        for n in 2..5 {
            let retry = server.exchange(attempt(n).as_bytes()).await;
            assert!(retry.is_replay());
            assert_eq!(retry.body, first.body);
        }
        // Chunked or whole, with or without a length: how it was sent is not what was sent.
        let chunked = format!(
            "POST /charges HTTP/1.1\r\nhost: test\r\nidempotency-key: K\r\n\
             content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n\
             5\r\n{}\r\n{:x}\r\n{}\r\n0\r\n\r\n",
            &A[..5], A.len() - 5, &A[5..],
        );
        assert!(server.exchange(chunked.as_bytes()).await.is_replay());
        assert_eq!(handler.effects(), 1);
    }

    // F6
    async fn multipart_with_a_fresh_boundary_is_another_request_under_the_default_scheme(world: World) {
        let (handler, _, app) = exact(&world).await;
        let form = |boundary: &str| {
            let media_type = format!("multipart/form-data; boundary={boundary}");
            let body = format!(
                "--{boundary}\r\ncontent-disposition: form-data; name=\"amount\"\r\n\r\n1\r\n--{boundary}--\r\n"
            );
            with(&[("content-type", &media_type)], body)
        };
        let first = send(&app, form("one")).await;
        assert_eq!(first.status, 201);
        send(&app, form("one")).await.assert_replays(&first);
        assert_reused(&send(&app, form("two")).await);
        assert_eq!(handler.effects(), 1);
    }

    // F9
    async fn while_the_first_runs_another_body_is_refused_as_reuse_and_not_as_in_flight(world: World) {
        let (handler, _, app) = exact(&world).await;
        handler.close_gate();
        let held = tokio::spawn({
            let app = app.clone();
            async move { send(&app, post("K", "A")).await }
        });
        handler.reached(1).await;
        assert_reused(&send(&app, post("K", "B")).await);
        let same = send(&app, post("K", "A")).await;
        assert_eq!(same.said(), (409, "idempotency_in_flight".into()));
        handler.open_gate();
        let first = held.await.unwrap();
        assert_eq!(first.status, 201);
        send(&app, post("K", "A")).await.assert_replays(&first);
        assert_eq!(handler.effects(), 1);
    }

    // F11
    async fn an_edited_amount_under_the_same_key_is_refused_and_never_charged(world: World) {
        let (handler, store, app) = exact(&world).await;
        let first = send(&app, post("K", "{\"amount\":1}")).await;
        let written = record(&store, "K").await;
        for edited in ["{\"amount\":2}", "{\"amount\":1} ", "", "{\"amount\":1}\0"] {
            assert_reused(&send(&app, post("K", edited)).await);
        }
        assert_eq!(handler.effects(), 1);
        assert_eq!(records(&store).await, 1);
        assert_eq!(record(&store, "K").await, written, "a refusal changes nothing");
        send(&app, post("K", "{\"amount\":1}")).await.assert_replays(&first);
    }

    async fn under_key_only_the_key_alone_names_the_action(world: World) {
        let handler = Handler::new();
        let layer = IdempotencyLayer::new(world.open().await).single_tenant().fingerprint(KeyOnly);
        let app = handler.behind(layer);
        let first = send(&app, request("POST", "/a?x=1", Some("K"), "A")).await;
        assert_eq!(first.status, 201);
        send(&app, request("POST", "/b", Some("K"), "B")).await.assert_replays(&first);
        send(&app, request("PATCH", "/c", Some("K"), "")).await.assert_replays(&first);
        assert_eq!(handler.effects(), 1);
    }

    async fn a_scheme_of_ones_own_decides_what_counts(world: World) {
        let handler = Handler::new();
        let store = world.open().await;
        let layer = IdempotencyLayer::new(store.clone()).single_tenant().fingerprint(Amount);
        let app = handler.behind(layer);
        let first = send(&app, post("K", "{\"amount\":1,\"at\":\"noon\"}")).await;
        assert_eq!(first.status, 201);
        send(&app, post("K", "{\"at\":\"one\",\"amount\":1}")).await.assert_replays(&first);
        assert_reused(&send(&app, post("K", "{\"amount\":2,\"at\":\"noon\"}")).await);
        assert_eq!(record(&store, "K").await.unwrap().scheme, "amount-v1");
        assert_eq!(handler.effects(), 1);
    }

    async fn a_body_the_scheme_cannot_read_is_refused_and_leaves_no_record(world: World) {
        let handler = Handler::new();
        let store = world.open().await;
        let layer = IdempotencyLayer::new(store.clone()).single_tenant().fingerprint(Amount);
        let app = handler.behind(layer);
        let answer = send(&app, post("K", "secret nonsense")).await;
        assert_eq!(answer.said(), (400, "idempotency_body_invalid".into()));
        let detail = answer.json()["detail"].as_str().unwrap().to_owned();
        assert!(detail.contains("there is no amount"), "{detail}");
        assert!(!detail.contains("secret"), "{detail}");
        assert_eq!((handler.effects(), store.total_calls(), records(&store).await), (0, 0, 0));
        assert_eq!(send(&app, post("K", "{\"amount\":1}")).await.status, 201);
    }

    async fn records_of_an_older_scheme_that_is_still_registered_are_compared_under_it(world: World) {
        let handler = Handler::new();
        let store = world.open().await;
        let old = handler.behind(IdempotencyLayer::new(store.clone()).single_tenant());
        let new = handler.behind(
            IdempotencyLayer::new(store.clone())
                .single_tenant()
                .fingerprint(Amount)
                .also_accept(KeyOnly)
                .also_accept(ExactRequest),
        );
        let first = send(&old, post("done", A)).await;
        handler.close_gate();
        let held = tokio::spawn(async move { send(&old, post("held", A)).await });
        handler.reached(2).await;

        // The deploy happens here. Completed and running records alike.
        send(&new, post("done", A)).await.assert_replays(&first);
        let in_flight = send(&new, post("held", A)).await;
        assert_eq!(in_flight.said(), (409, "idempotency_in_flight".into()));
        // Equal under the new rule, but the record was made under the old one.
        let spaced = "{\"amount\": 1}";
        assert_reused(&send(&new, post("done", spaced)).await);
        assert_reused(&send(&new, post("held", spaced)).await);

        handler.open_gate();
        held.await.unwrap();
        let fresh = send(&new, post("fresh", A)).await;
        assert_eq!(record(&store, "fresh").await.unwrap().scheme, "amount-v1");
        send(&new, post("fresh", spaced)).await.assert_replays(&fresh);
        assert_eq!(handler.effects(), 3);
    }

    async fn records_of_a_scheme_that_is_not_registered_are_refused_and_never_run_again(world: World) {
        let handler = Handler::new();
        let store = world.open().await;
        let old = handler.behind(IdempotencyLayer::new(store.clone()).single_tenant());
        let new = handler.behind(
            IdempotencyLayer::new(store).single_tenant().fingerprint(Amount).also_accept(KeyOnly),
        );
        let first = send(&old, post("K", A)).await;
        assert_reused(&send(&new, post("K", A)).await);
        assert_eq!(handler.effects(), 1);
        send(&old, post("K", A)).await.assert_replays(&first);
    }
}

/// Only the JSON member `amount` counts.
struct Amount;

impl FingerprintScheme for Amount {
    fn name(&self) -> Scheme {
        Scheme::Borrowed("amount-v1")
    }

    fn fingerprint(&self, _: &Parts, body: &Bytes) -> Result<Fingerprint, UndecodableBody> {
        let json: serde_json::Value = serde_json::from_slice(body).unwrap_or_default();
        let amount = json["amount"].as_u64();
        let amount = amount.ok_or(UndecodableBody("there is no amount"))?;
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&amount.to_be_bytes());
        Ok(Fingerprint::from_bytes(bytes))
    }
}

fn digest(request: Request<&'static str>) -> Fingerprint {
    let (head, body) = request.into_parts();
    let body = Bytes::from(body);
    ExactRequest.fingerprint(&head, &body).unwrap()
}

/// Live records hold these digests: if this fails, the scheme needs a new name.
#[test]
fn the_default_digest_is_what_it_was_when_its_name_was_given() {
    fn framed(parts: &[Option<&str>]) -> Fingerprint {
        let mut digest = Sha256::new();
        for part in parts {
            digest.update(
                part.map_or(u64::MAX, |part| part.len() as u64)
                    .to_be_bytes(),
            );
            digest.update(part.unwrap_or_default());
        }
        Fingerprint::from_bytes(digest.finalize().into())
    }
    assert_eq!(ExactRequest.name(), "exact-v1");
    let request = Request::post("http://host/a/b?x=1&y")
        .header("content-type", "Application/JSON ; charset=utf-8")
        .header("content-encoding", " GZip ")
        .header("content-encoding", "br")
        .body("body")
        .unwrap();
    let parts = ["POST", "/a/b", "x=1&y", "application/json"].map(Some);
    let more = [None, Some("gzip"), Some("br"), None, Some("body")];
    assert_eq!(digest(request), framed(&[&parts[..], &more].concat()));
    let bare = Request::patch("/").body("").unwrap();
    let parts = [Some("PATCH"), Some("/"), None, None, None, Some("")];
    assert_eq!(digest(bare), framed(&parts));
    assert_eq!(
        KeyOnly.fingerprint(&Request::new(()).into_parts().0, &Bytes::new()),
        Ok(Fingerprint::from_bytes([0; 32]))
    );
    assert_eq!(KeyOnly.name(), "key-only-v1");
}

#[test]
fn no_part_of_a_request_runs_into_the_next() {
    let with = |uri: &str, headers: &[(&str, &str)], body| {
        let mut request = Request::post(uri);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        digest(request.body(body).unwrap())
    };
    let requests = [
        with("/ab", &[], "c"),
        with("/a", &[], "bc"),
        with("/a?b", &[], "c"),
        with("/a", &[("content-type", "b")], "c"),
        with("/a", &[("content-encoding", "b")], "c"),
        with(
            "/a",
            &[("content-type", "b"), ("content-encoding", "b")],
            "c",
        ),
        with("/a", &[("content-type", "b"), ("content-type", "b")], "c"),
        with(
            "/a",
            &[("content-encoding", "b"), ("content-encoding", "b")],
            "c",
        ),
        with("/a", &[("content-encoding", "b, b")], "c"),
        with("/a", &[("content-type", "")], "c"),
        with("/a", &[], "c"),
        with("/a?", &[], "c"),
    ];
    let distinct: std::collections::HashSet<_> = requests.iter().collect();
    assert_eq!(distinct.len(), requests.len());
}

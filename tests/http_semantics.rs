//! What HTTP asks of the layer: safe methods, upgrades, and refusals that tell clients and users
//! what to do.

mod support;

use std::{collections::HashMap, time::Duration};

use axum::{
    Router,
    body::Body,
    extract::{Request, ws::WebSocketUpgrade},
    http::{HeaderName, HeaderValue, Method, Response, StatusCode},
    routing::any,
};
use serde_json::{Value, json};
use support::{
    bodies::Pieces,
    http2::Http2,
    wire::{Server, raw_post},
    *,
};
use tower::{ServiceExt, service_fn};
use tower_idempotency::{
    ErrorEnvelope, Fingerprint, FingerprintScheme, IdempotencyLayer, IdempotencyStatus,
    IdempotentResponse, Recovery, Rejection, RejectionContext, Retain, Retention, Scheme, Scope,
    State, StoreFailure, UndecodableBody,
    testing::{Fault, Operation, Times},
};

fn layer(store: TestStore) -> IdempotencyLayer<TestStore> {
    IdempotencyLayer::new(store).single_tenant()
}

const DOCUMENTATION: &str =
    "https://docs.rs/tower-idempotency/latest/tower_idempotency/enum.Rejection.html";

/// What a refusal of this code must be, written down a second time.
struct Refusal {
    code: &'static str,
    status: u16,
    said: IdempotencyStatus,
    retry_after: Option<u64>,
    new_key_safe: bool,
}

fn refusals() -> HashMap<&'static str, Refusal> {
    use IdempotencyStatus as Said;
    let table = [
        ("key_required", 400, Said::Missing, None, true),
        ("key_invalid", 400, Said::Invalid, None, false),
        ("scope_unknown", 403, Said::Invalid, None, false),
        ("key_reused", 409, Said::Reused, None, false),
        ("in_flight", 409, Said::InFlight, Some(1), false),
        ("response_not_retained", 409, Said::NotRetained, None, false),
        ("outcome_unknown", 409, Said::OutcomeUnknown, None, false),
        (
            "store_unavailable",
            503,
            Said::StoreUnavailable,
            Some(1),
            false,
        ),
        ("overloaded", 503, Said::Overloaded, Some(1), false),
        ("limit_reached", 429, Said::LimitReached, Some(60), false),
        ("body_too_large", 413, Said::Invalid, None, false),
        ("body_incomplete", 400, Said::Invalid, None, false),
        ("body_invalid", 400, Said::Invalid, None, false),
    ];
    let refusals = table.map(|(code, status, said, retry_after, new_key_safe)| {
        let refusal = Refusal {
            code,
            status,
            said,
            retry_after,
            new_key_safe,
        };
        (code, refusal)
    });
    refusals.into()
}

/// Provokes every refusal that can be reached, through layers told as `tell` says. Every one comes
/// as `Ok`, since the service cannot fail at all.
async fn provoke(
    world: &World,
    tell: impl Fn(IdempotencyLayer<TestStore>) -> IdempotencyLayer<TestStore>,
) -> Vec<(&'static str, Response<Body>)> {
    let mut refused = Vec::new();
    let store = world.open().await;
    let handler = Handler::answering(|seen| match seen.uri.path() {
        "/panic" => panic!("as the test wants"),
        "/tombstone" => {
            let mut response = Response::new(Body::empty());
            response.extensions_mut().insert(Retain::Tombstone);
            response
        }
        _ => Response::new(Body::empty()),
    });
    let app = handler.behind(tell(layer(store.clone()).request_body_limit(100)));
    let call = |request: Request| {
        let app = app.clone();
        async move { app.oneshot(request).await.unwrap() }
    };
    let with_id = |uri: &str, key: &str, body: &'static str| {
        let mut request = request("POST", uri, Some(key), body);
        let id = HeaderValue::from_static("first-request");
        request.headers_mut().insert("x-request-id", id);
        request
    };

    refused.push((
        "key_required",
        call(request("POST", "/secret/path", None, "A")).await,
    ));
    refused.push(("key_invalid", call(post("\"secret-key", "A")).await));
    refused.push(("body_too_large", call(post("large", vec![b's'; 101])).await));
    let broken = Pieces::new(["secret-body"]).then_error().body();
    refused.push(("body_incomplete", call(post("broken", broken)).await));

    call(with_id("/charges", "secret-key", "secret-body")).await;
    refused.push((
        "key_reused",
        call(request(
            "POST",
            "/refunds?secret-query",
            Some("secret-key"),
            "secret-body",
        ))
        .await,
    ));
    call(with_id("/tombstone", "tombstone", "secret-body")).await;
    refused.push((
        "response_not_retained",
        call(request(
            "POST",
            "/tombstone",
            Some("tombstone"),
            "secret-body",
        ))
        .await,
    ));
    let panics = tokio::spawn(call(with_id("/panic", "panicked", "secret-body"))).await;
    assert!(panics.unwrap_err().is_panic());
    refused.push((
        "outcome_unknown",
        call(request("POST", "/panic", Some("panicked"), "secret-body")).await,
    ));

    let mut runs = handler.effects();
    handler.close_gate();
    let held = tokio::spawn(call(with_id("/charges", "held", "secret-body")));
    handler.reached(runs + 1).await;
    refused.push(("in_flight", call(post("held", "secret-body")).await));
    let small = handler.behind(tell(layer(store.clone()).max_running(1)));
    let also_held = tokio::spawn(small.clone().oneshot(post("also-held", "A")));
    handler.reached(runs + 2).await;
    refused.push((
        "overloaded",
        small.oneshot(post("one-more", "A")).await.unwrap(),
    ));
    handler.open_gate();
    held.await.unwrap();
    also_held.await.unwrap().unwrap();

    let nobody = handler.behind(tell(layer(store.clone())).scope(|_| None));
    refused.push((
        "scope_unknown",
        nobody.oneshot(post("secret-key", "A")).await.unwrap(),
    ));
    let full = tell(layer(store.clone()))
        .scope(|_| Some(Scope::new("full")))
        .scope_limit(1);
    let full = handler.behind(full);
    let limited = async {
        // Until the layer has learnt how many records there are.
        for n in 0.. {
            let request = post(&format!("full-{n}"), "A");
            let response = full.clone().oneshot(request).await.unwrap();
            match response.idempotency_status() {
                Some(IdempotencyStatus::LimitReached) => return response,
                Some(IdempotencyStatus::Executed) => runs += 1,
                // One of an earlier time.
                other => assert_eq!(other, Some(IdempotencyStatus::Replayed)),
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        unreachable!()
    };
    let limited = tokio::time::timeout(Duration::from_secs(30), limited).await;
    refused.push(("limit_reached", limited.expect("no limit in half a minute")));
    let picky = handler.behind(tell(layer(store.clone()).fingerprint(Picky)));
    refused.push((
        "body_invalid",
        picky.oneshot(post("picky", "secret-body")).await.unwrap(),
    ));
    store.fail(Operation::Claim, Fault::Before, Times::Always);
    refused.push(("store_unavailable", call(post("down", "secret-body")).await));
    store.clear();
    assert_eq!(handler.effects(), runs + 2, "a refusal ran the handler");
    refused
}

/// A scheme that can read nothing.
struct Picky;

impl FingerprintScheme for Picky {
    fn name(&self) -> Scheme {
        "picky-v1".into()
    }

    fn fingerprint(
        &self,
        _: &http::request::Parts,
        _: &bytes::Bytes,
    ) -> Result<Fingerprint, UndecodableBody> {
        Err(UndecodableBody("nothing is good enough"))
    }
}

every_store! {
    // H1
    async fn safe_methods_pass_through_whatever_their_key_and_leave_no_record(world: World) {
        let handler = Handler::answering(|_| Response::new(Body::empty()));
        let store = world.open().await;
        let server = Server::start(handler.behind(layer(store.clone()))).await;
        let mut runs = 0;
        for method in ["GET", "HEAD", "OPTIONS", "TRACE"] {
            let keys = [
                "idempotency-key: K\r\n", "idempotency-key: K\r\n", "", "idempotency-key: \"\r\n", "idempotency-key:\r\n",
                "idempotency-key: a\r\nidempotency-key: b\r\n", "idempotency-key: \u{e5}\r\n",
            ];
            for key in keys {
                let raw = format!("{method} /charges HTTP/1.1\r\nhost: test\r\n{key}connection: close\r\n\r\n");
                let mut wire = server.connect().await;
                wire.write(raw.as_bytes()).await;
                let reply = String::from_utf8(wire.read_to_end().await).unwrap();
                assert!(reply.starts_with("HTTP/1.1 200 "), "{method} {key} {reply}");
                assert!(!reply.contains("idempotent-replay"));
                runs += 1;
            }
        }
        let connect = request("CONNECT", "/charges", Some("\""), "");
        let app = handler.behind(layer(store.clone()));
        let response = app.oneshot(connect).await.unwrap();
        assert_eq!((response.status().as_u16(), response.idempotency_status()), (200, None));
        assert_eq!(handler.effects(), runs + 1);
        assert_eq!((store.total_calls(), records(&store).await), (0, 0));
    }

    // H1
    async fn other_methods_are_covered_as_they_are_told(world: World) {
        let store = world.open().await;
        let purge = Method::from_bytes(b"PURGE").unwrap();
        // Per method: without a key, and with one; `None` is "passes through".
        let required = (Some(400), true);
        let optional = (None, true);
        let ignored = (None, false);
        let table = [
            (layer(store.clone()), [required, optional, ignored, ignored, ignored]),
            (layer(store.clone()).optional(), [optional, optional, ignored, ignored, ignored]),
            (layer(store.clone()).required_methods([]), [optional, optional, ignored, ignored, ignored]),
            (layer(store.clone()).methods([Method::PUT]), [required, ignored, optional, ignored, ignored]),
            (layer(store.clone()).methods([]).optional(), [ignored, ignored, ignored, ignored, ignored]),
            (layer(store.clone()).methods([Method::PUT]).optional(), [ignored, ignored, optional, ignored, ignored]),
            (layer(store.clone()).optional().methods([Method::PUT]), [ignored, ignored, optional, ignored, ignored]),
            (
                layer(store.clone()).required_methods([Method::PUT, Method::DELETE, purge.clone()]),
                [optional, optional, required, required, required],
            ),
            (
                layer(store.clone()).required_methods([Method::DELETE]).optional(),
                [optional, optional, ignored, ignored, ignored],
            ),
        ];
        for (n, (layer, expected)) in table.into_iter().enumerate() {
            let handler = Handler::new();
            let app = handler.behind(layer);
            for (method, (missing, covered)) in ["POST", "PATCH", "PUT", "DELETE", "PURGE"].into_iter().zip(expected) {
                let without = send(&app, request(method, "/", None, "A")).await;
                assert_eq!(without.status, missing.unwrap_or(201), "{n} {method}");
                let key = format!("{n}-{method}");
                let first = send(&app, request(method, "/", Some(&key), "A")).await;
                let second = send(&app, request(method, "/", Some(&key), "A")).await;
                assert_eq!((first.status.as_u16(), first.replay), (201, false), "{n} {method}");
                assert_eq!(second.replay, covered, "{n} {method}");
                assert_eq!(record(&store, &key).await.is_some(), covered, "{n} {method}");
                // A bad key passes where no key is looked for, and nowhere else.
                let bad = send(&app, request(method, "/", Some("\""), "A")).await;
                assert_eq!(bad.status, if covered { 400 } else { 201 }, "{n} {method}");
            }
        }
    }

    // H1: without a key there is neither record nor marker.
    async fn an_optional_key_left_out_leaves_no_trace(world: World) {
        let handler = Handler::new();
        let store = world.open().await;
        let app = handler.behind(layer(store.clone()).optional());
        for _ in 0..2 {
            let response = app.clone().oneshot(request("POST", "/", None, "A")).await.unwrap();
            assert_eq!(response.idempotency_status(), None);
            assert!(!response.headers().contains_key("idempotent-replay"));
        }
        assert_eq!((handler.effects(), store.total_calls()), (2, 0));
    }

    // H3
    async fn a_web_socket_opens_under_the_layer_key_or_not(world: World) {
        async fn echo(upgrade: WebSocketUpgrade) -> Response<Body> {
            upgrade.on_upgrade(|mut socket| async move {
                while let Some(Ok(message)) = socket.recv().await {
                    if socket.send(message).await.is_err() {
                        return;
                    }
                }
            })
        }
        let store = world.open().await;
        let app = Router::new().route("/ws", any(echo)).route_layer(layer(store.clone()));
        let server = Server::start(app).await;
        for key in ["idempotency-key: K\r\n", "idempotency-key: K\r\n", ""] {
            let mut wire = server.connect().await;
            let handshake = format!(
                "GET /ws HTTP/1.1\r\nhost: test\r\nconnection: Upgrade\r\nupgrade: websocket\r\n\
                 sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n{key}\r\n"
            );
            wire.write(handshake.as_bytes()).await;
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                let byte = wire.read_some(1).await;
                assert!(!byte.is_empty(), "{}", String::from_utf8_lossy(&head));
                head.extend(byte);
            }
            assert!(head.starts_with(b"HTTP/1.1 101 "), "{}", String::from_utf8_lossy(&head));
            // "hi", masked with zeroes, as RFC 6455 §5.2 has it.
            wire.write(b"\x81\x82\0\0\0\0hi").await;
            assert_eq!(wire.read_some(4).await, b"\x81\x02hi");
        }
        assert_eq!((store.total_calls(), records(&store).await), (0, 0));
    }

    // H3
    async fn a_post_that_offers_h2c_is_an_ordinary_post(world: World) {
        let handler = Handler::new();
        let server = Server::start(handler.behind(layer(world.open().await))).await;
        let raw = "POST /charges HTTP/1.1\r\nhost: test\r\nconnection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\n\
                   http2-settings: AAMAAABkAAQAAP__\r\ncontent-type: application/json\r\n\
                   idempotency-key: K\r\ncontent-length: 1\r\n\r\nA";
        let first = server.exchange(raw.as_bytes()).await;
        assert_eq!((first.status, first.is_replay()), (201, false));
        let retry = server.exchange(raw.as_bytes()).await;
        assert!(retry.is_replay());
        assert_eq!(retry.body, first.body);
        // It is the request it would be without the offer.
        assert!(server.exchange(&raw_post("K", "A")).await.is_replay());
        assert!(Http2::connect(&server).await.send(post("K", "A")).await.replay);
        assert_eq!(handler.effects(), 1);
    }

    // H3
    async fn a_101_from_a_covered_method_is_passed_on_and_never_retained(world: World) {
        let handler = Handler::answering(|_| {
            Response::builder()
                .status(101)
                .header("connection", "upgrade")
                .header("upgrade", "own-protocol")
                .body(Body::empty())
                .unwrap()
        });
        let store = world.open().await;
        let app = handler.behind(layer(store.clone()).retention(Retention::new(|_| Retain::Keep)));
        let first = send(&app, post("K", "A")).await;
        assert_eq!((first.status.as_u16(), first.header("upgrade")), (101, Some("own-protocol")));
        let kept = record(&store, "K").await.unwrap();
        assert_eq!((kept.state, kept.response), (State::Completed, None));
        let retry = send(&app, post("K", "A")).await;
        assert_eq!(retry.said(), (409, "idempotency_response_not_retained".into()));
        assert_eq!(handler.effects(), 1);
    }

    // H6
    async fn every_refusal_says_what_it_is_and_what_to_do(world: World) {
        let mut types = std::collections::HashSet::new();
        let mut table = refusals();
        for (code, response) in provoke(&world, |layer| layer).await {
            let expected = table.remove(code).unwrap();
            assert_eq!(response.idempotency_status(), Some(expected.said), "{code}");
            assert!(!response.is_replay());
            let answer = Answer::of(response).await;
            assert_eq!(answer.status, expected.status, "{code}");
            assert_eq!(answer.header("content-type"), Some("application/problem+json"), "{code}");
            assert_eq!(answer.header("link"), None);
            // X4
            let retry_after = expected.retry_after.map(|seconds| seconds.to_string());
            assert_eq!(answer.header("retry-after"), retry_after.as_deref(), "{code}");

            let problem = answer.json();
            let full = format!("idempotency_{}", expected.code);
            assert_eq!(problem["code"], full);
            assert_eq!(problem["type"], format!("{DOCUMENTATION}#{full}"));
            assert!(types.insert(problem["type"].as_str().unwrap().to_owned()), "{code} shares its type");
            assert_eq!(problem["status"], expected.status);
            assert_eq!(problem["retryable"], expected.retry_after.is_some(), "{code}");
            assert_eq!(problem.get("retry_after_seconds"), Some(&json!(expected.retry_after)), "{code}");
            assert_eq!(problem["new_key_safe"], expected.new_key_safe, "{code}");
            for text in ["title", "detail"] {
                assert!(problem[text].as_str().unwrap().len() > 10, "{code} {text}");
            }
            let original = match code {
                "key_reused" | "in_flight" | "response_not_retained" | "outcome_unknown" => json!("first-request"),
                _ => Value::Null,
            };
            assert_eq!(problem["original_request_id"], original, "{code}");
            let status = if code == "response_not_retained" { json!(200) } else { Value::Null };
            assert_eq!(problem["original_status"], status, "{code}");
            // X2: no key, query or body in it.
            let text = String::from_utf8(answer.body.to_vec()).unwrap();
            for secret in ["secret-key", "secret-body", "secret-query", "sss"] {
                assert!(!text.contains(secret), "{code} shows {secret}: {text}");
            }
        }
        assert!(table.is_empty(), "not provoked: {:?}", table.keys());
    }

    // H6
    async fn where_the_documentation_is_changes_type_and_link_of_every_refusal(world: World) {
        let url = "https://pay.example/docs/idempotency";
        for (code, response) in provoke(&world, |layer| layer.documentation_url(url)).await {
            let answer = Answer::of(response).await;
            assert_eq!(answer.json()["type"], format!("{url}#idempotency_{code}"));
            assert_eq!(answer.header("link"), Some("<https://pay.example/docs/idempotency>; rel=\"describedby\""));
        }
    }

    // H6
    async fn the_status_of_reuse_can_be_set_and_nothing_else_changes(world: World) {
        for status in [400, 409, 422] {
            let store = world.open().await;
            let handler = Handler::new();
            let status = StatusCode::from_u16(status).unwrap();
            let app = handler.behind(
                layer(store).reuse_status(status).scope(move |_| Some(Scope::new(status.as_str()))),
            );
            handler.close_gate();
            let held = tokio::spawn(app.clone().oneshot(post("K", "A")));
            handler.reached(1).await;
            // Neither while it runs nor afterwards, and the other conflicts keep theirs.
            for _ in 0..2 {
                let answer = send(&app, post("K", "B")).await;
                assert_eq!(answer.said(), (status.as_u16(), "idempotency_key_reused".into()));
                assert_eq!(answer.json()["type"], format!("{DOCUMENTATION}#idempotency_key_reused"));
                assert_eq!(answer.json()["status"], status.as_u16());
            }
            let in_flight = send(&app, post("K", "A")).await;
            assert_eq!(in_flight.said(), (409, "idempotency_in_flight".into()));
            handler.open_gate();
            held.await.unwrap().unwrap();
            let answer = send(&app, post("K", "B")).await;
            assert_eq!(answer.said(), (status.as_u16(), "idempotency_key_reused".into()));
        }
    }

    // H6
    async fn refusals_are_rendered_in_the_services_own_shape(world: World) {
        let own = |rejection: &Rejection, context: &RejectionContext<'_>| {
            let error = json!({
                "code": rejection.code(),
                "status": context.status.as_u16(),
                "detail": rejection.detail(context),
                "where": format!("{} {}", context.method, context.path),
                "request_id": context.request_id,
                "documentation": context.documentation_url,
                "header": context.header_name,
            });
            let mut response = Response::new(Body::from(json!({ "error": error }).to_string()));
            *response.status_mut() = context.status;
            response
        };
        let table = refusals();
        let told = provoke(&world, |layer| layer.rejections(own).documentation_url("/docs").reuse_status(StatusCode::IM_A_TEAPOT)).await;
        assert_eq!(told.len(), table.len());
        for (code, response) in told {
            assert_eq!(response.idempotency_status(), Some(table[code].said), "the layer adds it");
            let answer = Answer::of(response).await;
            let status = if code == "key_reused" { 418 } else { table[code].status };
            assert_eq!(answer.status, status);
            let error = &answer.json()["error"];
            assert_eq!(error["code"], format!("idempotency_{code}"));
            assert_eq!(error["status"], status);
            assert_eq!((&error["documentation"], &error["header"]), (&json!("/docs"), &json!("idempotency-key")));
            let place = match code {
                "key_required" => "POST /secret/path",
                "key_reused" => "POST /refunds",
                "response_not_retained" => "POST /tombstone",
                "outcome_unknown" => "POST /panic",
                _ => "POST /charges",
            };
            assert_eq!(error["where"], place, "{code}");
            assert!(!answer.headers.contains_key("retry-after"), "the shape is all its own");
        }
    }

    // H6
    async fn the_envelope_of_a_gateway_says_what_a_problem_says(world: World) {
        let envelope = ErrorEnvelope::new().member("hint", |rejection| match rejection {
            Rejection::KeyReused { .. } => Some("own words".into()),
            _ => None,
        });
        let mut table = refusals();
        for (code, response) in provoke(&world, |layer| layer.rejections(envelope.clone())).await {
            let expected = table.remove(code).unwrap();
            assert_eq!(response.idempotency_status(), Some(expected.said), "{code}");
            let answer = Answer::of(response).await;
            assert_eq!(answer.status, expected.status, "{code}");
            assert_eq!(answer.header("content-type"), Some("application/json"), "{code}");
            let retry_after = expected.retry_after.map(|seconds| seconds.to_string());
            assert_eq!(answer.header("retry-after"), retry_after.as_deref(), "{code}");

            let mut error = answer.json()["error"].take();
            assert!(error["message"].take().as_str().unwrap().len() > 10, "{code}");
            let mut whole = json!({
                "code": format!("idempotency_{code}"),
                "type": "invalid_request_error",
                "message": null,
                "retryable": expected.retry_after.is_some(),
                "retry_after_seconds": expected.retry_after,
                "request_id": null,
            });
            match code {
                "key_reused" => {
                    whole["details"] = json!({ "original_request_id": "first-request" });
                    whole["hint"] = json!("own words");
                }
                "response_not_retained" => whole["details"] = json!({ "original_status": 200 }),
                _ => {}
            }
            assert_eq!(error, whole, "{code}");
            let text = String::from_utf8(answer.body.to_vec()).unwrap();
            for secret in ["secret-key", "secret-body", "secret-query", "sss"] {
                assert!(!text.contains(secret), "{code} shows {secret}: {text}");
            }
        }
        assert!(table.is_empty(), "not provoked: {:?}", table.keys());
    }

    async fn the_envelope_names_this_request_and_details_only_where_there_are_any(world: World) {
        let app = Handler::new().behind(layer(world.open().await).rejections(ErrorEnvelope::new()).documentation_url("/docs"));
        send(&app, post("K", "A")).await;
        let mut again = post("K", "B");
        again.headers_mut().insert("x-request-id", HeaderValue::from_static("req_2"));
        let reused = send(&app, again).await;
        assert_eq!(reused.json()["error"]["request_id"], "req_2");
        // The first request had no id.
        assert_eq!(reused.json()["error"].get("details"), None);
        assert_eq!(reused.header("link"), Some("</docs>; rel=\"describedby\""));
    }

    async fn a_refusal_can_be_shown_without_its_cause(world: World) {
        let store = world.open().await;
        let layer = layer(store.clone()).rejections(ErrorEnvelope::new()).reuse_status(StatusCode::UNPROCESSABLE_ENTITY);
        let mut asking = request("POST", "/sandbox", Some("K"), "A");
        asking.headers_mut().insert("x-request-id", HeaderValue::from_static("req_2"));
        let (head, _) = asking.into_parts();
        let original_request_id = Some("req_1".into());
        let shown = layer.refusal(&head, &Rejection::KeyReused { original_request_id });
        assert_eq!(shown.idempotency_status(), Some(IdempotencyStatus::Reused));
        let shown = Answer::of(shown).await;
        assert_eq!(shown.status, 422);
        let error = &shown.json()["error"];
        assert_eq!(error["details"]["original_request_id"], "req_1");
        assert_eq!(error["request_id"], "req_2");
        assert!(error["message"].as_str().unwrap().contains("POST /sandbox"));
        assert_eq!((records(&store).await, store.total_calls()), (0, 0));
    }

    async fn on_demand_every_answer_tells_what_was_done(world: World) {
        for (code, response) in provoke(&world, IdempotencyLayer::status_header).await {
            let said = response.idempotency_status().unwrap();
            assert_eq!(response.headers()["idempotency-status"], said.as_str(), "{code}");
        }
        for (code, response) in provoke(&world, |layer| layer.scope(|_| Some(Scope::new("others")))).await {
            assert!(!response.headers().contains_key("idempotency-status"), "{code}");
        }

        // Over what a handler says of it, and where a run is not protected also without being asked.
        let store = world.open().await;
        let handler = Handler::answering(|_| {
            let made_up = Response::builder().header("idempotency-status", "made-up");
            made_up.body(Body::from("A")).unwrap()
        });
        let layer = || layer(store.clone()).store_failure(StoreFailure::RunUnprotected);
        let told = handler.behind(layer().status_header());
        let silent = handler.behind(layer());
        let header = async |app: &Router, request| send(app, request).await.header("idempotency-status").map(str::to_owned);
        assert_eq!(header(&told, post("told", "A")).await.as_deref(), Some("executed"));
        assert_eq!(header(&told, post("told", "A")).await.as_deref(), Some("replayed"));
        assert_eq!(header(&silent, post("silent", "A")).await.as_deref(), Some("made-up"));
        assert_eq!(header(&silent, post("silent", "A")).await, None, "on a replay it would be wrong");
        assert_eq!(header(&told, request("GET", "/", Some("told"), "")).await.as_deref(), Some("made-up"));
        store.fail(Operation::Claim, Fault::Before, Times::Always);
        for app in [&told, &silent] {
            assert_eq!(header(app, post("down", "A")).await.as_deref(), Some("unprotected"));
        }
        store.clear();
    }

    async fn an_answer_with_as_many_fields_as_there_can_be_goes_out_all_the_same(world: World) {
        let handler = Handler::answering(|_| {
            let mut response = Response::new(Body::from("paid"));
            // axum would have no room to add it.
            response.headers_mut().insert("content-length", HeaderValue::from_static("4"));
            for n in 0.. {
                let name = HeaderName::try_from(format!("x-{n}")).unwrap();
                let added = response.headers_mut().try_append(name, HeaderValue::from_static("1"));
                if added.is_err() {
                    break;
                }
            }
            response
        });
        let app = handler.behind(layer(world.open().await).status_header());
        let first = send(&app, post("K", "A")).await;
        assert_eq!((first.status.as_u16(), &*first.body), (200, &b"paid"[..]));
        assert!(first.headers.len() > 16_384);
        // Too many to be kept.
        assert_eq!(send(&app, post("K", "A")).await.said(), (409, "idempotency_response_not_retained".into()));
        assert_eq!(handler.effects(), 1);
    }

    // X2
    async fn reuse_names_this_request_and_the_one_that_holds_the_key(world: World) {
        let handler = Handler::new();
        let layer = layer(world.open().await).request_id_header(HeaderName::from_static("x-correlation-id"));
        let app = Router::new().nest("/v1", handler.behind(layer));
        let with_id = |method: &str, uri: &str, body: &'static str, id: &str| {
            let mut request = request(method, uri, Some("the-key"), body);
            request.headers_mut().insert("x-correlation-id", HeaderValue::from_str(id).unwrap());
            request.headers_mut().insert("x-request-id", HeaderValue::from_static("not this one"));
            request
        };
        send(&app, with_id("POST", "/v1/orders", "first-body", "req-1")).await;
        let answer = send(&app, with_id("PATCH", "/v1/refunds?q=secret", "second-body", "req-2")).await;
        assert_eq!(answer.said(), (409, "idempotency_key_reused".into()));
        assert_eq!(answer.json()["original_request_id"], "req-1");
        let detail = answer.json()["detail"].as_str().unwrap().to_owned();
        assert!(detail.contains("PATCH /v1/refunds."), "{detail}");
        let text = String::from_utf8_lossy(&answer.body).into_owned();
        for absent in ["first-body", "second-body", "the-key", "secret", "req-2", "not this one"] {
            assert!(!text.contains(absent), "{absent} in {text}");
        }
        // A replay keeps the id of nobody but is the first answer; a retry does not become the original.
        send(&app, with_id("POST", "/v1/orders", "first-body", "req-3")).await;
        let answer = send(&app, with_id("POST", "/v1/orders", "other", "req-4")).await;
        assert_eq!(answer.json()["original_request_id"], "req-1");
    }

    // X2: an id that is absurd is no id.
    async fn a_request_id_that_is_too_long_or_no_text_is_not_kept(world: World) {
        let handler = Handler::new();
        let app = handler.behind(layer(world.open().await));
        let long = "i".repeat(129);
        let fits = "i".repeat(128);
        for (key, id, kept) in [
            ("a", long.as_bytes(), Value::Null), ("b", b"\xff", Value::Null), ("c", b"", Value::Null),
            ("d", fits.as_bytes(), json!(fits)),
        ] {
            let mut request = post(key, "A");
            request.headers_mut().insert("x-request-id", HeaderValue::from_bytes(id).unwrap());
            send(&app, request).await;
            assert_eq!(send(&app, post(key, "B")).await.json()["original_request_id"], kept, "{key}");
        }
    }

    // X4
    async fn waiting_as_told_is_all_a_client_needs_to_do(world: World) {
        let handler = Handler::new();
        let server = Server::start(handler.behind(layer(world.open().await))).await;
        handler.close_gate();
        let mut first = server.connect().await;
        first.write(&raw_post("K", "A")).await;
        handler.reached(1).await;
        let reply = server.exchange(&raw_post("K", "A")).await;
        assert_eq!(reply.said(), (409, "idempotency_in_flight".into()));
        let seconds = reply.header("retry-after").unwrap();
        let seconds: u64 = std::str::from_utf8(seconds).unwrap().parse().unwrap();
        assert!(seconds >= 1);
        let problem: Value = serde_json::from_slice(&reply.body).unwrap();
        assert_eq!((&problem["retryable"], &problem["retry_after_seconds"]), (&json!(true), &json!(seconds)));
        handler.open_gate();
        let first = first.read_reply().await;
        let retry = server.exchange(&raw_post("K", "A")).await;
        assert!(retry.is_replay());
        assert_eq!(retry.body, first.body);
        assert_eq!(handler.effects(), 1);
    }

    async fn the_extension_tells_a_first_run_from_one_that_took_over(world: World) {
        let handler = Handler::answering(|seen| match seen.run {
            1 => panic!("as the test wants"),
            _ => Response::new(Body::empty()),
        });
        let app = handler.behind(layer(world.open().await).recovery(Recovery::rerun()));
        let panics = tokio::spawn(app.clone().oneshot(post("K", "A"))).await;
        assert!(panics.unwrap_err().is_panic());
        let response = app.clone().oneshot(post("K", "A")).await.unwrap();
        assert_eq!(response.idempotency_status(), Some(IdempotencyStatus::TookOver));
        let response = app.oneshot(post("other", "A")).await.unwrap();
        assert_eq!(response.idempotency_status(), Some(IdempotencyStatus::Executed));
    }
}

#[test]
#[should_panic(expected = "the error envelope has a member details already")]
fn a_member_of_the_envelope_cannot_be_replaced() {
    let _ = ErrorEnvelope::new().member("details", |_| None);
}

#[tokio::test]
async fn errors_of_the_inner_service_stay_what_they_are() {
    #[derive(Debug, PartialEq)]
    struct Own(u32);
    let inner = service_fn(|_: Request| async { Err::<Response<Body>, _>(Own(7)) });
    let store = World::memory().open().await;
    let service = tower::Layer::layer(&layer(store.clone()).lease(Duration::from_secs(1)), inner);
    assert_eq!(
        service.clone().oneshot(post("K", "A")).await.unwrap_err(),
        Own(7)
    );
    assert_eq!(
        service
            .clone()
            .oneshot(request("GET", "/", None, ""))
            .await
            .unwrap_err(),
        Own(7)
    );
    // A refusal is an answer and no error.
    let refused = service
        .clone()
        .oneshot(request("POST", "/", None, ""))
        .await
        .unwrap();
    assert_eq!(refused.status(), 400);
    let refused = service.oneshot(post("K", "A")).await.unwrap();
    assert_eq!(
        Answer::of(refused).await.said(),
        (409, "idempotency_outcome_unknown".into())
    );
}

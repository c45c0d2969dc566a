//! A retry gets the first answer: status, fields and body byte for byte, and the marker.

mod support;

use std::time::Duration;

use axum::{
    Router,
    body::Body,
    http::{HeaderName, HeaderValue, Request, Response, StatusCode, header},
};
use sha2::{Digest, Sha256};
use support::{
    bodies::Pieces,
    http2::Http2,
    wire::{Server, raw_post},
    *,
};
use tower::{Layer, ServiceExt, service_fn};
use tower_http::{
    compression::{CompressionLayer, Predicate},
    decompression::DecompressionLayer,
};
use tower_idempotency::{
    IdempotencyLayer, IdempotencyStatus, IdempotentResponse, Retain, RetainedResponse, Retention,
    Timestamp,
};

fn layer(store: TestStore) -> IdempotencyLayer<TestStore> {
    IdempotencyLayer::new(store).single_tenant()
}

fn lines<'a>(headers: &'a http::HeaderMap, name: &str) -> Vec<&'a [u8]> {
    headers
        .get_all(name)
        .iter()
        .map(HeaderValue::as_bytes)
        .collect()
}

/// What the store keeps of this key.
async fn kept(store: &TestStore, key: &str) -> RetainedResponse {
    let record = record(store, key).await.unwrap();
    RetainedResponse::decode(record.response.unwrap()).unwrap()
}

async fn gunzip(answer: Answer) -> Vec<u8> {
    assert_eq!(answer.header("content-encoding"), Some("gzip"));
    let service = service_fn(move |_: Request<Body>| {
        let response = Response::builder()
            .header("content-encoding", "gzip")
            .body(Body::from(answer.body.clone()));
        async move { Ok::<_, std::convert::Infallible>(response.unwrap()) }
    });
    let response = DecompressionLayer::new()
        .layer(service)
        .oneshot(Request::default())
        .await;
    Answer::of(response.unwrap().map(Body::new))
        .await
        .body
        .to_vec()
}

/// Bodies that a text-minded store would spoil.
fn bodies() -> Vec<(&'static str, Vec<Vec<u8>>)> {
    vec![
        ("empty", vec![]),
        ("odd spacing", vec![b"{\"b\":1,\"a\":2.0 ,\t\"c\" :1e2}\r\n".to_vec()]),
        ("every byte", vec![(0..=255).collect()]),
        ("gzip", vec![b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x02\x03\xabVJ\xcc\xcd/\xcd+Q\xb22\xac\x05\x00@\xb4\xed!\x0c\x00\x00\x00".to_vec()]),
        ("no UTF-8", vec![b"\xC3\x28\xFF\xFE\x80".to_vec()]),
        ("a NUL", vec![b"\0".to_vec()]),
        ("NULs at the ends", vec![b"\0a\0".to_vec()]),
        ("a character in three frames", vec![vec![0xE2], vec![0x82], vec![0xAC]]),
        ("an empty frame between", vec![b"a".to_vec(), vec![], b"b".to_vec()]),
        ("half a megabyte", vec![vec![0xA5; 256 * 1024], vec![0x5A; 256 * 1024]]),
    ]
}

every_store! {
    async fn a_retry_is_answered_with_the_first_answer_and_the_marker(world: World) {
        let handler = Handler::new();
        let app = handler.behind(layer(world.open().await));
        let first = send(&app, post("k-1", "{\"amount\":1}")).await;
        assert_eq!(first.status, 201);
        let retry = send(&app, post("k-1", "{\"amount\":1}")).await;
        retry.assert_replays(&first);
        assert_eq!(handler.effects(), 1);
    }

    async fn the_status_extension_says_what_happened(world: World) {
        let handler = Handler::new();
        let app = handler.behind(layer(world.open().await));
        let response = app.clone().oneshot(post("k-1", "a")).await.unwrap();
        assert_eq!(response.idempotency_status(), Some(IdempotencyStatus::Executed));
        let response = app.clone().oneshot(post("k-1", "a")).await.unwrap();
        assert_eq!(response.idempotency_status(), Some(IdempotencyStatus::Replayed));
        let response = app.clone().oneshot(post("k-1", "b")).await.unwrap();
        assert_eq!(response.idempotency_status(), Some(IdempotencyStatus::Reused));
        let response = app.oneshot(request("GET", "/", None, "")).await.unwrap();
        assert_eq!(response.idempotency_status(), None);
    }

    // R1
    async fn location_etag_and_repeated_fields_come_back_in_their_order(world: World) {
        let handler = Handler::answering(|_| {
            Response::builder()
                .status(201)
                .header("location", "/charges/1")
                .header("etag", "W/\"1\"")
                .header("link", "</a>; rel=\"next\"")
                .header("x-between", "1")
                .header("link", "</b>; rel=\"prev\"")
                .header("x-empty", "")
                .header("link", "</a>; rel=\"next\"")
                .body(Body::from("made"))
                .unwrap()
        });
        let server = Server::start(handler.behind(layer(world.open().await))).await;
        let first = server.exchange(&raw_post("K", "A")).await;
        let retry = server.exchange(&raw_post("K", "A")).await;
        assert_eq!((first.status, first.is_replay()), (201, false));
        assert_eq!((retry.status, retry.is_replay()), (201, true));
        let own = |reply: &wire::Reply| -> Vec<_> {
            let mut lines = reply.headers.clone();
            lines.retain(|(name, _)| name != "date" && name != "idempotent-replay");
            lines
        };
        assert_eq!(own(&retry), own(&first), "each line, in its order");
        let links: Vec<_> = retry.headers.iter().filter(|(name, _)| name == "link").collect();
        assert_eq!(links.len(), 3);
        assert_eq!(links[1].1, b"</b>; rel=\"prev\"");
        assert_eq!(retry.body, b"made");
        assert_eq!(handler.effects(), 1);
    }

    // R2
    async fn every_status_comes_back_exactly(world: World) {
        let handler = Handler::answering(|seen| {
            let status: u16 = seen.uri.path()[1..].parse().unwrap();
            let body = match status { 204 | 304 => "", _ => "body" };
            Response::builder().status(status).body(Body::from(body)).unwrap()
        });
        let store = world.open().await;
        let server = Server::start(handler.behind(layer(store).retention(Retention::new(|_| Retain::Keep)))).await;
        let mut http2 = Http2::connect(&server).await;
        let statuses = [
            200, 201, 202, 203, 204, 205, 206, 299, 300, 301, 302, 303, 304, 307, 308, 400, 402, 404, 406, 409, 418,
            422, 425, 429, 451, 499, 500, 503, 599,
        ];
        for status in statuses {
            let uri = format!("/{status}");
            let first = http2.send(request("POST", &uri, Some(&uri), "A")).await;
            let retry = http2.send(request("POST", &uri, Some(&uri), "A")).await;
            assert_eq!(first.status.as_u16(), status);
            retry.assert_replays(&first);
            let raw = format!(
                "POST {uri} HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n\
                 idempotency-key: {uri}\r\ncontent-length: 1\r\n\r\nA"
            );
            let retry = server.exchange(raw.as_bytes()).await;
            assert_eq!((retry.status, retry.is_replay()), (status, true), "{status}");
            assert_eq!(retry.body, first.body);
        }
        assert_eq!(handler.effects(), statuses.len());
    }

    // R3
    async fn cookies_and_credentials_reach_the_first_caller_only_and_are_not_stored(world: World) {
        let secrets = [
            ("set-cookie", "session=c00kie-secret"),
            ("set-cookie", "other=c00kie-secret-two"),
            ("www-authenticate", "Bearer realm=\"www-secret\""),
            ("proxy-authenticate", "Basic realm=\"proxy-secret\""),
            ("authentication-info", "nextnonce=\"info-secret\""),
            ("proxy-authentication-info", "nextnonce=\"proxyinfo-secret\""),
            ("access-control-allow-origin", "https://origin-secret.example"),
            ("access-control-not-invented-yet", "later-secret"),
            ("date", "Thu, 01 Jan 1970 00:00:00 GMT"),
        ];
        let handler = Handler::answering(move |_| {
            let mut response = Response::builder().status(201).header("x-kept", "kept-value");
            for (name, value) in secrets {
                response = response.header(name, value);
            }
            response.body(Body::from("body-value")).unwrap()
        });
        let store = world.open().await;
        let app = handler.behind(layer(store.clone()));
        let first = send(&app, post("K", "A")).await;
        let retry = send(&app, post("K", "A")).await;
        assert_eq!(lines(&first.headers, "set-cookie").len(), 2);
        for (name, _) in secrets {
            assert!(first.headers.contains_key(name), "{name} did not reach the first caller");
            assert!(!retry.headers.contains_key(name), "{name} was replayed");
        }
        assert!(retry.replay);
        assert_eq!(retry.header("x-kept"), Some("kept-value"));
        assert_eq!((retry.status, &retry.body), (first.status, &first.body));
        assert_eq!(kept(&store, "K").await.headers.len(), 1);

        if let Some(stored) = world.raw().await {
            let contains = |text: &str| stored.windows(text.len()).any(|bytes| bytes == text.as_bytes());
            assert!(contains("kept-value") && contains("body-value"), "looked in the wrong place");
            for text in ["c00kie-secret", "later-secret", "www-secret", "proxy-secret", "info-secret", "origin-secret", "1970"] {
                assert!(!contains(text), "{text} is stored");
            }
        }
    }

    // What a handler marks as not to be shown is marked in the replay as well.
    async fn a_sensitive_value_stays_sensitive(world: World) {
        let handler = Handler::answering(|_| {
            let mut token = HeaderValue::from_static("t0ken-secret");
            token.set_sensitive(true);
            let response = Response::builder().status(201).header("x-token", token);
            response.header("x-open", "seen").body(Body::empty()).unwrap()
        });
        let app = handler.behind(layer(world.open().await));
        let first = send(&app, post("K", "A")).await;
        let retry = send(&app, post("K", "A")).await;
        retry.assert_replays(&first);
        for headers in [&first.headers, &retry.headers] {
            assert!(headers["x-token"].is_sensitive() && !headers["x-open"].is_sensitive());
        }
        assert!(!format!("{:?}", retry.headers).contains("t0ken-secret"));
    }

    // R5
    async fn fields_of_the_connection_are_not_stored(world: World) {
        let handler = Handler::answering(|_| {
            Response::builder()
                .status(201)
                .header("connection", "close, X-Private")
                .header("connection", "x-second")
                .header("keep-alive", "timeout=5")
                .header("proxy-connection", "keep-alive")
                .header("te", "trailers")
                .header("trailer", "x-sum")
                .header("upgrade", "h2c")
                .header("content-length", "4")
                .header("x-private", "1")
                .header("x-second", "2")
                .header("x-kept", "3")
                .body(Body::from("body"))
                .unwrap()
        });
        let store = world.open().await;
        // Even when told that nothing at all is to be skipped.
        let app = handler.behind(layer(store.clone()).skip_headers([]));
        send(&app, post("K", "A")).await;
        let kept = kept(&store, "K").await;
        let names: Vec<_> = kept.headers.keys().map(HeaderName::as_str).collect();
        assert_eq!(names, ["x-kept"]);
        assert!(send(&app, post("K", "A")).await.replay);
    }

    // R5
    async fn framing_is_right_on_http_1_and_2_and_under_a_layer_that_changes_the_body(world: World) {
        let text = "compressible ".repeat(200);
        let handler = Handler::answering({
            let text = text.clone();
            move |seen| {
                let body = match seen.uri.path() {
                    "/length" => Body::from(text.clone()),
                    "/empty" => Body::empty(),
                    _ => Pieces::new(text.as_bytes().chunks(100).map(<[u8]>::to_vec)).body(),
                };
                Response::builder().header("content-type", "text/plain").body(body).unwrap()
            }
        });
        let store = world.open().await;
        let plain = Server::start(handler.behind(layer(store.clone()))).await;
        let compressing = CompressionLayer::new().compress_when(
            tower_http::compression::predicate::SizeAbove::new(0).and(|_: StatusCode, _, _: &http::HeaderMap, _: &http::Extensions| true),
        );
        let compressed = Server::start(handler.behind(layer(store)).layer(compressing)).await;
        let get = |uri: &str, key: &str| {
            let mut request = request("POST", uri, Some(key), "A");
            request.headers_mut().insert("accept-encoding", HeaderValue::from_static("gzip"));
            request
        };
        for uri in ["/length", "/pieces", "/empty"] {
            let expected = if uri == "/empty" { "" } else { &text[..] };
            for server in [&plain, &compressed] {
                // The record made through one server is replayed through both.
                let key = format!("{uri}-{}", server.address.port());
                Http2::connect(server).await.send(get(uri, &key)).await;
                let mut http2 = Http2::connect(&plain).await;
                let retry = http2.send(get(uri, &key)).await;
                assert!(retry.replay);
                assert_eq!(retry.body, expected);
                if let Some(length) = retry.header("content-length") {
                    assert_eq!(length, expected.len().to_string());
                }
                let raw = format!(
                    "POST {uri} HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n\
                     accept-encoding: gzip\r\nidempotency-key: {key}\r\ncontent-length: 1\r\n\r\nA"
                );
                // Two on one connection: bad framing of the first would spoil the second.
                let mut wire = plain.connect().await;
                for _ in 0..2 {
                    wire.write(raw.as_bytes()).await;
                    let retry = wire.read_reply().await;
                    assert!(retry.is_replay());
                    assert_eq!(retry.body, expected.as_bytes());
                }
                if uri == "/empty" {
                    continue;
                }
                let retry = Http2::connect(&compressed).await.send(get(uri, &key)).await;
                assert!(retry.replay);
                assert_eq!(gunzip(retry).await, expected.as_bytes());
                let mut wire = compressed.connect().await;
                for _ in 0..2 {
                    wire.write(raw.as_bytes()).await;
                    let retry = wire.read_reply().await;
                    assert!(retry.is_replay());
                    assert_eq!(retry.header("content-encoding"), Some(&b"gzip"[..]));
                    let headers = [("content-encoding", "gzip")];
                    let retry = Answer {
                        status: StatusCode::OK,
                        headers: headers.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect(),
                        body: retry.body.into(),
                        replay: true,
                    };
                    assert_eq!(gunzip(retry).await, expected.as_bytes());
                }
            }
        }
        assert_eq!(handler.effects(), 6);
    }

    // R6
    async fn bodies_come_back_byte_for_byte(world: World) {
        let handler = Handler::answering(|seen| {
            let all = bodies();
            let (_, pieces) = &all[usize::from(seen.body[0])];
            Response::new(Pieces::new(pieces.clone()).body())
        });
        let store = world.open().await;
        let server = Server::start(handler.behind(layer(store.clone()))).await;
        let all = bodies();
        for (n, (name, pieces)) in all.iter().enumerate() {
            let mut http2 = Http2::connect(&server).await;
            let key = format!("k-{n}");
            let first = http2.send(post(&key, vec![n as u8])).await;
            let retry = http2.send(post(&key, vec![n as u8])).await;
            retry.assert_replays(&first);
            let expected = pieces.concat();
            assert_eq!(Sha256::digest(&retry.body), Sha256::digest(&expected), "{name}");
            assert_eq!(Sha256::digest(&first.body), Sha256::digest(&expected), "{name}");
            assert_eq!(kept(&store, &key).await.body, expected, "{name}");
            let raw = [raw_post(&key, "?").strip_suffix(b"?").unwrap(), &[n as u8]].concat();
            assert_eq!(server.exchange(&raw).await.body, expected, "{name}");
        }
        assert_eq!(handler.effects(), all.len());
    }

    // R6
    async fn field_values_come_back_byte_for_byte(world: World) {
        let values: [&[u8]; _] = [b"\xC3\xA5", b"\xFF", b"a\tb", b"\x80\x81 \xFE", b"", b"a, b; c=\"d\""];
        let handler = Handler::answering(move |_| {
            let mut response = Response::builder();
            for value in values {
                response = response.header("x-odd", HeaderValue::from_bytes(value).unwrap());
            }
            response.body(Body::empty()).unwrap()
        });
        let server = Server::start(handler.behind(layer(world.open().await))).await;
        server.exchange(&raw_post("K", "A")).await;
        let retry = server.exchange(&raw_post("K", "A")).await;
        assert!(retry.is_replay());
        let odd: Vec<_> = retry.headers.iter().filter(|(name, _)| name == "x-odd").map(|(_, value)| &value[..]).collect();
        assert_eq!(odd, values);
        let retry = Http2::connect(&server).await.send(post("K", "A")).await;
        assert!(retry.replay);
        assert_eq!(lines(&retry.headers, "x-odd"), values);
    }

    // R8
    async fn no_content_type_is_invented(world: World) {
        let handler = Handler::answering(|seen| {
            let response = match seen.uri.path() {
                "/none" => Response::builder(),
                "/csv" => Response::builder().header("content-type", "text/csv; header=present"),
                "/problem" => Response::builder().status(402).header("content-type", "application/problem+json"),
                _ => Response::builder().header("content-type", "Text/PLAIN;charset=\"x\""),
            };
            response.body(Body::from("a,b")).unwrap()
        });
        let server = Server::start(handler.behind(layer(world.open().await))).await;
        let mut http2 = Http2::connect(&server).await;
        for (uri, expected) in [
            ("/none", None),
            ("/csv", Some("text/csv; header=present")),
            ("/problem", Some("application/problem+json")),
            ("/odd", Some("Text/PLAIN;charset=\"x\"")),
        ] {
            let first = http2.send(request("POST", uri, Some(uri), "A")).await;
            let retry = http2.send(request("POST", uri, Some(uri), "A")).await;
            retry.assert_replays(&first);
            assert_eq!(first.header("content-type"), expected);
            assert_eq!(retry.header("content-type"), expected);
        }
        // The layer's own 4xx say what they are.
        let own = http2.send(request("POST", "/csv", Some("/csv"), "B")).await;
        assert_eq!(own.status, 409);
        assert_eq!(own.header("content-type"), Some("application/problem+json"));
    }

    // R10
    async fn only_the_layer_marks_replays(world: World) {
        let handler = Handler::answering(|seen| {
            assert_eq!(seen.headers.get("idempotent-replay").unwrap(), "true", "the request is left as it is");
            Response::builder()
                .header("idempotent-replay", "true")
                .header("idempotent-replay", "false")
                .body(Body::from(seen.run.to_string()))
                .unwrap()
        });
        let store = world.open().await;
        let app = handler.behind(layer(store.clone()));
        let marked = || {
            let mut request = post("K", "A");
            request.headers_mut().insert("idempotent-replay", HeaderValue::from_static("true"));
            request
        };
        let first = send(&app, marked()).await;
        assert!(!first.replay && !first.headers.contains_key("idempotent-replay"));
        let retry = send(&app, marked()).await;
        retry.assert_replays(&first);
        assert_eq!(lines(&retry.headers, "idempotent-replay"), [b"true"]);
        assert!(kept(&store, "K").await.headers.is_empty());
        assert_eq!(handler.effects(), 1);
        // A refusal is no replay.
        let refused = send(&app, post("K", "B")).await;
        assert!(!refused.headers.contains_key("idempotent-replay"));
    }

    // R10
    async fn the_marker_can_have_another_name(world: World) {
        let handler = Handler::answering(|_| {
            Response::builder()
                .header("idempotent-replayed", "no")
                .header("idempotent-replay", "the service's own")
                .body(Body::empty())
                .unwrap()
        });
        let store = world.open().await;
        let app = handler.behind(layer(store.clone()).replay_header(HeaderName::from_static("idempotent-replayed")));
        let first = send(&app, post("K", "A")).await;
        assert_eq!(first.header("idempotent-replayed"), None);
        let retry = send(&app, post("K", "A")).await;
        assert_eq!(retry.header("idempotent-replayed"), Some("true"));
        assert_eq!(retry.header("idempotent-replay"), Some("the service's own"));
        assert!(retry.replay, "the extension knows, whatever the name");
        assert_eq!(handler.effects(), 1);
    }

    // R10
    async fn nested_layers_over_one_store_act_once(world: World) {
        let handler = Handler::new();
        let store = world.open().await;
        let app = handler.behind(layer(store.clone())).layer(layer(store.clone()));
        let first = send(&app, post("K", "A")).await;
        assert_eq!((first.status.as_u16(), first.replay), (201, false));
        assert!(!first.headers.contains_key("idempotent-replay"));
        send(&app, post("K", "A")).await.assert_replays(&first);
        assert_eq!(send(&app, post("K", "B")).await.said(), (409, "idempotency_key_reused".into()));
        assert_eq!((handler.effects(), records(&store).await), (1, 1));
        assert!(!kept(&store, "K").await.headers.contains_key("idempotent-replay"));
    }

    // R10
    async fn of_nested_layers_over_two_stores_the_outer_one_acts(world: World) {
        let handler = Handler::new();
        let (outer, inner) = (world.open().await, World::memory().open().await);
        let marker = HeaderName::from_static("x-inner-replay");
        let app = handler.behind(layer(inner.clone()).replay_header(marker.clone())).layer(layer(outer.clone()));
        let first = send(&app, post("K", "A")).await;
        let retry = send(&app, post("K", "A")).await;
        retry.assert_replays(&first);
        assert!(!retry.headers.contains_key(&marker));
        assert_eq!((records(&outer).await, records(&inner).await), (1, 0));
        assert_eq!(inner.total_calls(), 0);
        assert_eq!(handler.effects(), 1);
    }

    // R10
    async fn an_inner_layer_acts_where_the_outer_one_does_not_cover(world: World) {
        let handler = Handler::new();
        let store = world.open().await;
        let outer = layer(world.open().await).header_name(HeaderName::from_static("other-key")).optional();
        let app = handler.behind(layer(store.clone())).layer(outer);
        let first = send(&app, post("K", "A")).await;
        let retry = send(&app, post("K", "A")).await;
        retry.assert_replays(&first);
        assert_eq!((handler.effects(), records(&store).await), (1, 1));
    }

    async fn the_marker_of_an_upstream_service_is_not_passed_off_as_ones_own(world: World) {
        // A proxy behind the layer hands on an answer that the service beyond it had marked.
        let handler = Handler::answering(|_| {
            let mut response = Response::new(Body::from("upstream"));
            response.headers_mut().insert("idempotent-replay", HeaderValue::from_static("true"));
            response.extensions_mut().insert(IdempotencyStatus::Replayed);
            response
        });
        let app = handler.behind(layer(world.open().await));
        let response = app.clone().oneshot(post("K", "A")).await.unwrap();
        assert_eq!(response.idempotency_status(), Some(IdempotencyStatus::Executed));
        assert!(!response.is_replay());
        assert!(send(&app, post("K", "A")).await.replay);
    }

    async fn a_replay_is_the_same_for_as_long_as_the_record_lives(world: World) {
        let handler = Handler::new();
        let app = handler.behind(layer(world.open().await).ttl(Duration::from_secs(3600)));
        let first = send(&app, post("K", "A")).await;
        world.clock.advance(Duration::from_secs(3599));
        for _ in 0..3 {
            send(&app, post("K", "A")).await.assert_replays(&first);
        }
        // A replay does not prolong it.
        world.clock.advance(Duration::from_secs(2));
        let again = send(&app, post("K", "A")).await;
        assert!(!again.replay);
        assert_ne!(again.body, first.body);
        assert_eq!(handler.effects(), 2);
    }

    async fn cache_control_is_replayed_as_it_was(world: World) {
        let handler = Handler::answering(|_| {
            Response::builder()
                .header(header::CACHE_CONTROL, "private, max-age=60")
                .header(header::VARY, "origin")
                .body(Body::empty())
                .unwrap()
        });
        let app: Router = handler.behind(layer(world.open().await));
        let first = send(&app, post("K", "A")).await;
        let retry = send(&app, post("K", "A")).await;
        retry.assert_replays(&first);
        assert_eq!(retry.header("cache-control"), Some("private, max-age=60"));
    }

    // R11
    async fn on_demand_no_cache_keeps_a_replay(world: World) {
        let handler = Handler::answering(|_| {
            Response::builder()
                .header(header::CACHE_CONTROL, "public, max-age=60")
                .header(header::CACHE_CONTROL, "stale-while-revalidate=60")
                .header("cdn-cache-control", "max-age=600")
                .header("own-cache-control", "max-age=600")
                .header("surrogate-control", "max-age=600")
                .header(header::ETAG, "\"1\"")
                .body(Body::from("paid"))
                .unwrap()
        });
        let app: Router = handler.behind(layer(world.open().await).no_store_replays());
        let first = send(&app, post("K", "A")).await;
        assert_eq!(first.header("cache-control"), Some("public, max-age=60"), "the first answer is the handler's");
        assert_eq!(first.header("cdn-cache-control"), Some("max-age=600"));
        let retry = send(&app, post("K", "A")).await;
        assert!(retry.replay);
        assert_eq!(lines(&retry.headers, "cache-control"), [b"no-store"]);
        for other in ["cdn-cache-control", "own-cache-control", "surrogate-control"] {
            assert_eq!(retry.header(other), None, "{other} would win over it");
        }
        assert_eq!((retry.header("etag"), &retry.body), (Some("\"1\""), &first.body));
    }

    async fn on_demand_a_replay_says_where_it_comes_from(world: World) {
        // 2021-01-01T00:00:00Z
        world.clock.set(Timestamp::from_micros(1_609_459_200_000_000));
        let store = world.open().await;
        let names = ["idempotency-original-date", "idempotency-original-request-id", "idempotency-key-expires"];
        let handler = Handler::answering(move |_| {
            let mut response = Response::new(Body::from("paid"));
            for name in names {
                response.headers_mut().insert(name, HeaderValue::from_static("made up"));
            }
            response
        });
        let layer = || layer(store.clone()).ttl(Duration::from_secs(3600));
        let app = handler.behind(layer().replay_provenance());
        let with_id = |id: &'static str| {
            let mut request = post("K", "A");
            request.headers_mut().insert("x-request-id", HeaderValue::from_static(id));
            request
        };
        let told = |answer: &Answer| names.map(|name| answer.header(name).map(str::to_owned));
        let own = Some("made up".to_owned());
        let first = send(&app, with_id("req_1")).await;
        assert_eq!(told(&first), [own.clone(), own.clone(), own.clone()], "a first answer is the handler's");
        world.clock.advance(Duration::from_secs(100));
        let expected = ["Fri, 01 Jan 2021 00:00:00 GMT", "req_1", "Fri, 01 Jan 2021 01:00:00 GMT"];
        for _ in 0..2 {
            let retry = send(&app, with_id("req_2")).await;
            assert!(retry.replay);
            assert_eq!(told(&retry), expected.map(|told| Some(told.to_owned())));
        }
        let silent = send(&handler.behind(layer()), with_id("req_3")).await;
        assert!(silent.replay);
        assert_eq!(told(&silent), [None, None, None], "what the handler says of it is not kept");

        // What is not known, or has no form as a date, is not told.
        let for_ever = handler.behind(layer().ttl(Duration::MAX).replay_provenance());
        send(&for_ever, post("for-ever", "A")).await;
        let retry = send(&for_ever, post("for-ever", "A")).await;
        assert!(retry.replay);
        assert_eq!(told(&retry), [Some("Fri, 01 Jan 2021 00:01:40 GMT".to_owned()), None, None]);
    }
}

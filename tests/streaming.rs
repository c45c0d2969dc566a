//! Bodies of any size and pace: a request is bounded while it is read, and a response that cannot
//! be kept whole reaches its caller whole after its key is remembered.

mod support;

use std::{sync::atomic::Ordering, time::Duration};

use axum::{
    Router,
    body::Body,
    extract::Request,
    http::{HeaderMap, HeaderValue, Response, StatusCode},
    routing::any,
};
use bytes::Bytes;
use http_body_util::BodyExt;
use support::{
    bodies::{Pieces, channel},
    http2::Http2,
    wire::{Server, Wire, raw_post},
    *,
};
use tower::ServiceExt;
use tower_http::compression::CompressionLayer;
use tower_idempotency::{
    AnyStore, IdempotencyLayer, MemoryStore, State,
    testing::{Fault, FaultyStore, Operation, Times},
};

const MIB: usize = 1024 * 1024;
/// Longer than any test lasts: what comes before it is over did not wait for it.
const NEVER: Duration = Duration::from_secs(3600);

fn layer(store: TestStore) -> IdempotencyLayer<TestStore> {
    IdempotencyLayer::new(store).single_tenant()
}

fn head(key: &str, lines: &str) -> String {
    format!("POST /charges HTTP/1.1\r\nhost: test\r\nidempotency-key: {key}\r\n{lines}\r\n\r\n")
}

fn chunk(bytes: &[u8]) -> Vec<u8> {
    [format!("{:x}\r\n", bytes.len()).as_bytes(), bytes, b"\r\n"].concat()
}

fn chunked(key: &str, pieces: &[&[u8]]) -> Vec<u8> {
    let mut request = head(key, "transfer-encoding: chunked").into_bytes();
    for piece in pieces {
        request.extend(chunk(piece));
    }
    request.extend(b"0\r\n\r\n");
    request
}

/// Asserts that it is done, that its answer is not kept, and that it does not run again.
async fn assert_tombstone(app: &Router, store: &TestStore, key: &str, status: u16) {
    let kept = record(store, key).await.unwrap();
    assert_eq!((kept.state, kept.response), (State::Completed, None));
    for _ in 0..2 {
        let retry = send(app, request("POST", "/charges", Some(key), "A")).await;
        assert_eq!(
            retry.said(),
            (409, "idempotency_response_not_retained".into())
        );
        assert_eq!(retry.json()["original_status"], status);
        assert_eq!(retry.json()["retryable"], false);
    }
}

every_store! {
    // B1
    async fn an_endless_body_is_refused_after_the_limit_and_read_no_further(world: World) {
        let handler = Handler::new();
        let store = world.open().await;
        let app = handler.behind(layer(store.clone()).request_body_limit(64 * 1024));
        let body = Pieces::endless(vec![b'x'; 1024]);
        let taken = body.taken();
        let answer = send(&app, post("K", body.body())).await;
        assert_eq!(answer.said(), (413, "idempotency_body_too_large".into()));
        assert_eq!(taken.load(Ordering::SeqCst), 65, "the first piece over the limit is the last one read");
        assert!(answer.json()["detail"].as_str().unwrap().contains("65536 bytes"));

        // The same over the wire: the answer comes while the client still sends, and then the
        // connection ends, since nobody wants the rest.
        let server = Server::start(app.clone()).await;
        let mut wire = server.connect().await;
        wire.write(head("K", "transfer-encoding: chunked").as_bytes()).await;
        let piece = chunk(&[b'x'; 16 * 1024]);
        for _ in 0..5 {
            wire.write(&piece).await;
        }
        assert_eq!(wire.read_reply().await.said(), (413, "idempotency_body_too_large".into()));
        let mut sent = 0;
        while sent < 64 * MIB && wire.try_write(&piece).await {
            sent += piece.len();
        }
        assert!(sent < 64 * MIB, "the server went on reading");

        assert_eq!((handler.effects(), store.total_calls(), records(&store).await), (0, 0, 0));
        assert_eq!(send(&app, post("K", "A")).await.status, 201, "the key is still free");
    }

    // B1
    async fn a_body_of_exactly_the_limit_runs_and_one_byte_more_does_not(world: World) {
        let handler = Handler::answering(|seen| Response::new(Body::from(seen.body.len().to_string())));
        let store = world.open().await;
        let server = Server::start(handler.behind(layer(store.clone()).request_body_limit(1000))).await;
        let (fits, too_long) = ("x".repeat(1000), "x".repeat(1001));
        assert_eq!(server.exchange(&raw_post("whole", &fits)).await.body, b"1000");
        assert_eq!(server.exchange(&chunked("pieces", &[&[b'x'; 999], b"x"])).await.body, b"1000");
        assert_eq!(handler.effects(), 2);
        for request in [
            raw_post("long", &too_long),
            chunked("long", &[&[b'x'; 999], b"x", b"x"]),
            chunked("long", &[too_long.as_bytes()]),
            // What Content-Length says need not be sent to be refused.
            head("long", "content-length: 1000000000000").into_bytes(),
        ] {
            assert_eq!(server.exchange(&request).await.said(), (413, "idempotency_body_too_large".into()));
        }
        assert_eq!(handler.effects(), 2);
        assert!(record(&store, "long").await.is_none());
        // Without a key the layer has no opinion.
        let other = "PATCH / HTTP/1.1\r\nhost: test\r\ncontent-length: 1001\r\n\r\n";
        let reply = server.exchange(format!("{other}{too_long}").as_bytes()).await;
        assert_eq!(reply.body, b"1001");
    }

    // B1
    async fn the_default_limit_is_one_mebibyte(world: World) {
        let handler = Handler::new();
        let app = handler.behind(layer(world.open().await));
        assert_eq!(send(&app, post("fits", vec![0; MIB])).await.status, 201);
        assert_eq!(send(&app, post("not", vec![0; MIB + 1])).await.status, 413);
        assert_eq!(handler.effects(), 1);
    }

    async fn an_upload_that_is_cut_off_runs_nothing_and_leaves_no_record(world: World) {
        let handler = Handler::new();
        let store = world.open().await;
        let server = Server::start(handler.behind(layer(store.clone()))).await;
        let partial = [
            head("K", "content-length: 100") + "only this",
            head("K", "content-length: 1"),
            head("K", "transfer-encoding: chunked") + "9\r\nonly th",
            head("K", "transfer-encoding: chunked") + "9\r\nonly this\r\n",
            head("K", "transfer-encoding: chunked") + "9\r\nonly this\r\n0\r\n",
            head("K", "transfer-encoding: chunked") + "9\r\nonly this\r\nnonsense\r\n\r\n",
        ];
        for request in &partial {
            let mut wire = server.connect().await;
            wire.write(request.as_bytes()).await;
            wire.half_close().await;
            let reply = wire.read_reply().await;
            if reply.status != 0 {
                assert_eq!(reply.said(), (400, "idempotency_body_incomplete".into()), "{request}");
            }
        }
        for request in &partial {
            let mut wire = server.connect().await;
            wire.write(request.as_bytes()).await;
            wire.reset();
        }
        // An HTTP/2 stream that is reset in the middle.
        let mut http2 = Http2::connect(&server).await;
        let broken = Pieces::new(["only", "this"]).then_error().body();
        http2.try_begin(post("K", broken)).await.unwrap_err();

        let whole = server.exchange(&raw_post("K", "A")).await;
        assert_eq!((whole.status, whole.is_replay()), (201, false), "the key is still free");
        assert!(server.exchange(&raw_post("K", "A")).await.is_replay());
        assert_eq!((handler.effects(), records(&store).await), (1, 1));
    }

    async fn a_body_that_fails_is_refused_as_incomplete(world: World) {
        let handler = Handler::new();
        let store = world.open().await;
        let app = handler.behind(layer(store.clone()));
        let broken = Pieces::new(["only", "this"]).then_error().body();
        let answer = send(&app, post("K", broken)).await;
        assert_eq!(answer.said(), (400, "idempotency_body_incomplete".into()));
        assert_eq!((handler.effects(), store.total_calls(), records(&store).await), (0, 0, 0));
    }

    async fn a_limit_set_outside_the_layer_is_told_as_too_large(world: World) {
        let handler = Handler::new();
        let store = world.open().await;
        let app = handler
            .behind(layer(store.clone()))
            .layer(tower_http::limit::RequestBodyLimitLayer::new(10));
        let answer = send(&app, post("K", Pieces::new(["0123456789", "x"]).body())).await;
        assert_eq!(answer.said(), (413, "idempotency_body_too_large".into()));
        assert_eq!((handler.effects(), records(&store).await), (0, 0));
    }

    async fn expect_100_continue_is_answered_only_when_the_body_is_wanted(world: World) {
        let handler = Handler::new();
        let server = Server::start(handler.behind(layer(world.open().await))).await;
        let expecting = |key: &str, length: usize| {
            head(key, &format!("content-type: application/json\r\nexpect: 100-continue\r\ncontent-length: {length}"))
        };
        for (request, status) in [
            (expecting("\"bad", 1), 400),
            (expecting("", 1), 400),
            (expecting("K", 2 * MIB), 413),
            (head("K", "expect: 100-continue\r\ncontent-length: 1").replace("idempotency-key: K\r\n", ""), 400),
        ] {
            let mut wire = server.connect().await;
            wire.write(request.as_bytes()).await;
            // Nothing of the body was sent, so the connection cannot go on, and ends.
            let all = wire.read_to_end().await;
            let all = String::from_utf8(all).unwrap();
            assert!(all.starts_with(&format!("HTTP/1.1 {status} ")), "{all}");
            assert!(!all.contains("100 Continue"), "{all}");
        }
        assert_eq!(handler.effects(), 0);

        for is_replay in [false, true] {
            let mut wire = server.connect().await;
            wire.write(expecting("K", 1).as_bytes()).await;
            assert_eq!(wire.read_some(1024).await, b"HTTP/1.1 100 Continue\r\n\r\n");
            wire.write(b"A").await;
            let reply = wire.read_reply().await;
            assert_eq!((reply.status, reply.is_replay()), (201, is_replay));
        }
        assert_eq!(handler.effects(), 1);
    }

    // B3
    async fn a_response_over_the_limit_reaches_its_caller_whole_and_never_runs_again(world: World) {
        let text: Vec<u8> = (0..=MIB).map(|n| n as u8).collect();
        let handler = Handler::answering({
            let text = text.clone();
            move |seen| {
                let known = seen.headers.contains_key("x-known");
                let body = if known {
                    Body::from(text.clone())
                } else {
                    Pieces::new(text.chunks(1000).map(<[u8]>::to_vec)).body()
                };
                Response::builder().status(201).body(body).unwrap()
            }
        });
        let store = world.open().await;
        let app = handler.behind(layer(store.clone()));
        let server = Server::start(app.clone()).await;
        for (n, known) in ["x-known: 1", "x-unknown: 1"].into_iter().enumerate() {
            let key = format!("k-{n}");
            let request = head(&key, &format!("content-type: application/json\r\n{known}\r\ncontent-length: 1")) + "A";
            let first = server.exchange(request.as_bytes()).await;
            assert_eq!((first.status, first.body.len()), (201, MIB + 1));
            assert_eq!(first.body, text);
            assert_tombstone(&app, &store, &key, 201).await;
        }
        assert_eq!(handler.effects(), 2);
    }

    // B3
    async fn a_response_of_exactly_the_limit_is_kept(world: World) {
        let handler = Handler::answering(|seen| {
            let size: usize = seen.uri.path()[1..].parse().unwrap();
            let body = vec![b'x'; size];
            Response::new(match seen.headers.contains_key("x-pieces") {
                true => Pieces::new(body.chunks(7).map(<[u8]>::to_vec)).body(),
                false => Body::from(body),
            })
        });
        let app = handler.behind(layer(world.open().await).response_body_limit(1000));
        for pieces in [false, true] {
            for (size, is_kept) in [(1000, true), (1001, false), (0, true)] {
                let sized = || {
                    let key = format!("{size}-{pieces}");
                    let mut request = request("POST", &format!("/{size}"), Some(&key), "A");
                    if pieces {
                        request.headers_mut().insert("x-pieces", HeaderValue::from_static("1"));
                    }
                    request
                };
                let first = send(&app, sized()).await;
                assert_eq!(first.body.len(), size);
                assert_eq!(send(&app, sized()).await.replay, is_kept, "{size} {pieces}");
            }
        }
        assert_eq!(handler.effects(), 6);
    }

    // B4
    async fn an_event_stream_starts_at_once_and_its_tombstone_is_there_before_it(world: World) {
        let (sender, receiver) = std::sync::mpsc::channel();
        let handler = Handler::answering(move |_| {
            let (mut events, body) = channel();
            events.try_send(http_body::Frame::data(Bytes::from("data: one\n\n"))).unwrap();
            sender.send(events).unwrap();
            Response::builder().status(200).header("content-type", "text/event-stream").body(body).unwrap()
        });
        let store = world.open().await;
        let app = handler.behind(layer(store.clone()).buffer_timeout(NEVER));
        let server = Server::start(app.clone()).await;
        // Slow enough to be overtaken by a stream that does not wait for it.
        store.fail(Operation::Complete, Fault::DelayBefore(Duration::from_millis(50)), Times::Once);
        let mut wire = server.connect().await;
        wire.write(&raw_post("K", "A")).await;
        let mut seen = wire.read_some(1).await;
        let kept = record(&store, "K").await.unwrap();
        assert_eq!((kept.state, kept.status, kept.response), (State::Completed, Some(StatusCode::OK), None));
        assert_tombstone(&app, &store, "K", 200).await;

        let mut read_until = async |wire: &mut Wire, what: &str| {
            while !String::from_utf8_lossy(&seen).contains(what) {
                let more = wire.read_some(1024).await;
                assert!(!more.is_empty(), "the stream ended before {what}");
                seen.extend(more);
            }
        };
        read_until(&mut wire, "data: one").await;
        let mut events = receiver.recv().unwrap();
        events.send_data("data: two\n\n".into()).await.unwrap();
        read_until(&mut wire, "data: two").await;
        wire.reset();
        assert_tombstone(&app, &store, "K", 200).await;
        assert_eq!(handler.effects(), 1);
    }

    // B4
    async fn every_kind_of_stream_goes_out_without_being_read_ahead(world: World) {
        for (n, kind) in [
            "text/event-stream", "Text/Event-Stream; charset=utf-8", "application/grpc", "application/grpc+proto",
            "multipart/x-mixed-replace; boundary=b",
        ].into_iter().enumerate() {
            let body = Pieces::endless("x");
            let taken = body.taken();
            let body = std::sync::Mutex::new(Some(body));
            let handler = Handler::answering(move |_| {
                let body = body.lock().unwrap().take().unwrap().body();
                Response::builder().header("content-type", kind).body(body).unwrap()
            });
            let store = world.open().await;
            let key = format!("k-{n}");
            let app = handler.behind(layer(store.clone()));
            let response = app.clone().oneshot(post(&key, "A")).await.unwrap();
            assert_eq!(taken.load(Ordering::SeqCst), 0, "{kind}");
            let mut body = response.into_body();
            assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), "x");
            assert_tombstone(&app, &store, &key, 200).await;
            assert_eq!(handler.effects(), 1);
        }
    }

    // B4
    async fn a_body_of_unknown_length_that_ends_is_kept(world: World) {
        let text = "compressible ".repeat(200);
        let handler = Handler::answering({
            let text = text.clone();
            move |_| {
                let body = Pieces::new(text.as_bytes().chunks(100).map(<[u8]>::to_vec)).body();
                Response::builder().header("content-type", "text/plain").body(body).unwrap()
            }
        });
        let layer = layer(world.open().await);
        let app = handler.router().layer(CompressionLayer::new()).layer(layer);
        let request = |key: &str, coding: &'static str| {
            let mut request = post(key, "A");
            request.headers_mut().insert("accept-encoding", HeaderValue::from_static(coding));
            request
        };
        for (key, coding, expected) in [("plain", "identity", None), ("small", "gzip", Some("gzip"))] {
            let first = send(&app, request(key, coding)).await;
            assert_eq!(first.header("content-encoding"), expected);
            assert_eq!(first.body == text, expected.is_none());
            send(&app, request(key, coding)).await.assert_replays(&first);
        }
        assert_eq!(handler.effects(), 2);
    }

    // B4
    async fn a_body_that_fails_after_a_chunk_fails_for_its_caller_and_leaves_a_tombstone(world: World) {
        let handler = Handler::answering(|_| {
            let body = Pieces::new(["half of it"]).then_error().body();
            Response::builder().status(201).body(body).unwrap()
        });
        let store = world.open().await;
        let app = handler.behind(layer(store.clone()));
        let response = app.clone().oneshot(post("here", "A")).await.unwrap();
        assert_eq!(response.status(), 201);
        let mut body = response.into_body();
        assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), "half of it");
        body.frame().await.unwrap().unwrap_err();
        assert_tombstone(&app, &store, "here", 201).await;

        let server = Server::start(app.clone()).await;
        let mut wire = server.connect().await;
        wire.write(&raw_post("wire", "A")).await;
        let all = wire.read_to_end().await;
        let all = String::from_utf8(all).unwrap();
        assert!(!all.contains("\r\n0\r\n\r\n"), "it looks whole: {all}");
        assert!(!all.to_ascii_lowercase().contains("content-length"), "{all}");
        assert_tombstone(&app, &store, "wire", 201).await;

        let mut http2 = Http2::connect(&server).await;
        // The reset may overtake the head.
        if let Ok(response) = http2.try_begin(post("two", "A")).await {
            response.into_body().collect().await.unwrap_err();
        }
        assert_tombstone(&app, &store, "two", 201).await;
        assert_eq!(handler.effects(), 3);
    }

    // B4
    async fn a_body_slower_than_buffer_timeout_is_a_stream(world: World) {
        let (sender, receiver) = std::sync::mpsc::channel();
        let handler = Handler::answering(move |_| {
            let (mut pieces, body) = channel();
            pieces.try_send(http_body::Frame::data(Bytes::from("first "))).unwrap();
            sender.send(pieces).unwrap();
            Response::builder().status(201).body(body).unwrap()
        });
        let store = world.open().await;
        let app = handler.behind(layer(store.clone()).buffer_timeout(Duration::from_millis(20)));
        let response = app.clone().oneshot(post("K", "A")).await.unwrap();
        assert_tombstone(&app, &store, "K", 201).await;
        let mut pieces = receiver.recv().unwrap();
        pieces.send_data("second".into()).await.unwrap();
        drop(pieces);
        assert_eq!(Answer::of(response).await.body, "first second");
        assert_tombstone(&app, &store, "K", 201).await;
        assert_eq!(handler.effects(), 1);
    }

    // B4: frames without content, always ready, for ever.
    async fn a_body_that_never_pauses_and_says_nothing_is_a_stream_too(world: World) {
        let handler = Handler::answering(|_| {
            Response::builder().status(201).body(Pieces::endless("").body()).unwrap()
        });
        let store = world.open().await;
        let app = handler.behind(layer(store.clone()).buffer_timeout(Duration::from_millis(20)));
        let response = app.clone().oneshot(post("K", "A"));
        let response = tokio::time::timeout(Duration::from_secs(10), response).await;
        assert_eq!(response.expect("it is read for ever").unwrap().status(), 201);
        assert_tombstone(&app, &store, "K", 201).await;
    }

    async fn response_trailers_reach_the_first_caller_and_are_not_kept(world: World) {
        let handler = Handler::answering(|_| {
            let trailers = HeaderMap::from_iter([("x-sum".parse().unwrap(), HeaderValue::from_static("42"))]);
            Response::new(Pieces::new(["a", "b"]).then_trailers(trailers).body())
        });
        let server = Server::start(handler.behind(layer(world.open().await))).await;
        let mut http2 = Http2::connect(&server).await;
        let first = http2.begin(post("K", "A")).await.into_body().collect().await.unwrap();
        assert_eq!(first.trailers().unwrap()["x-sum"], "42");
        assert_eq!(first.to_bytes(), "ab");
        let retry = http2.begin(post("K", "A")).await;
        assert_eq!(retry.headers()["idempotent-replay"], "true");
        let retry = retry.into_body().collect().await.unwrap();
        assert!(retry.trailers().is_none());
        assert_eq!(retry.to_bytes(), "ab");
        assert_eq!(handler.effects(), 1);
    }

    async fn request_trailers_reach_the_handler(world: World) {
        async fn sum(request: Request) -> String {
            let body = request.into_body().collect().await.unwrap();
            let sum = body.trailers().map(|trailers| trailers["x-sum"].to_str().unwrap().to_owned());
            format!("{:?} {:?}", body.to_bytes(), sum)
        }
        let app = Router::new().route("/charges", any(sum)).layer(layer(world.open().await));
        let server = Server::start(app).await;
        let trailers = HeaderMap::from_iter([("x-sum".parse().unwrap(), HeaderValue::from_static("42"))]);
        let mut http2 = Http2::connect(&server).await;
        for (key, pieces, expected) in [("two", &["a", "b"][..], "b\"ab\" Some(\"42\")"), ("empty", &[], "b\"\" Some(\"42\")")] {
            let body = Pieces::new(pieces.iter().copied()).then_trailers(trailers.clone()).body();
            assert_eq!(http2.send(post(key, body)).await.body, expected);
        }
        let raw = head("one", "transfer-encoding: chunked\r\ntrailer: x-sum") + "2\r\nab\r\n0\r\nx-sum: 42\r\n\r\n";
        assert_eq!(server.exchange(raw.as_bytes()).await.body, b"b\"ab\" Some(\"42\")");
        assert_eq!(http2.send(post("none", "ab")).await.body, "b\"ab\" None");
    }
}

// B4
#[tokio::test(start_paused = true)]
async fn the_default_patience_for_a_body_is_one_second() {
    for (millis, is_kept) in [(900, true), (1_100, false)] {
        let handler = Handler::answering(move |_| {
            let (mut pieces, body) = channel();
            tokio::spawn(async move {
                pieces.send_data("a".into()).await.unwrap();
                tokio::time::sleep(Duration::from_millis(millis)).await;
                pieces.send_data("b".into()).await.unwrap();
            });
            Response::new(body)
        });
        let store = FaultyStore::new(AnyStore::new(MemoryStore::new()));
        let app = handler.behind(layer(store));
        assert_eq!(send(&app, post("K", "A")).await.body, "ab");
        assert_eq!(send(&app, post("K", "A")).await.replay, is_kept, "{millis}");
        assert_eq!(handler.effects(), 1);
    }
}

//! Under the multipart scheme a form is its parts: the boundary, drawn anew by most clients for every
//! attempt, does not count, and everything that a handler sees does.
#![cfg(feature = "multipart")]

mod support;

use std::collections::HashSet;

use axum::{
    Router,
    body::Body,
    extract::{FromRequest, Multipart},
    http::{Request, StatusCode},
    routing::post as route_post,
};
use bytes::Bytes;
use proptest::{collection::vec, prelude::*};
use sha2::{Digest, Sha256};
use support::{wire::Server, *};
use tower_http::decompression::RequestDecompressionLayer;
use tower_idempotency::{
    Fingerprint, FingerprintScheme, IdempotencyLayer, MultipartParts, UndecodableBody,
};

/// The lines of a part's head, and its bytes.
type Part<'a> = (&'a str, &'a [u8]);

const AMOUNT: Part<'_> = ("Content-Disposition: form-data; name=\"amount\"", b"100");
/// With what could be taken for a boundary in it.
const RECEIPT: Part<'_> = (
    "Content-Disposition: form-data; name=\"receipt\"; filename=\"a.pdf\"\r\nContent-Type: application/pdf",
    b"%PDF\r\n--\r\n\r\n--x--\r\n\0\xff\r",
);
const CHARGE: [Part<'_>; 2] = [AMOUNT, RECEIPT];

/// The form of `AMOUNT` alone, under the boundary `zipped`, as gzip.
const ZIPPED_AMOUNT: &[u8] = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x02\x03\xd3\xd5\xad\xca\x2c\x28\x48\x4d\xe1\xe5\x72\xce\xcf\x2b\x49\xcd\x2b\xd1\x75\xc9\x2c\x2e\xc8\x2f\xce\x2c\xc9\xcc\xcf\xb3\x52\x48\xcb\x2f\xca\xd5\x4d\x49\x2c\x49\xb4\x56\xc8\x4b\xcc\x4d\xb5\x55\x4a\xcc\xcd\x2f\xcd\x2b\x51\xe2\xe5\xe2\xe5\x32\x34\x30\xe0\xe5\xd2\x85\xea\xd7\xd5\xe5\xe5\x02\x00\xc8\xb9\x95\x4c\x4c\x00\x00\x00";

fn form(boundary: &str, parts: &[Part<'_>]) -> Vec<u8> {
    let mut form = Vec::new();
    for (head, content) in parts {
        form.extend(format!("--{boundary}\r\n{head}\r\n\r\n").bytes());
        form.extend(*content);
        form.extend(b"\r\n");
    }
    form.extend(format!("--{boundary}--\r\n").bytes());
    form
}

fn media_type(boundary: &str) -> String {
    format!("multipart/form-data; boundary=\"{boundary}\"")
}

/// A POST under the key `K` with this Content-Type.
fn typed(media_type: &str, body: impl Into<Body>) -> Request<Body> {
    let request = Request::post("/charges").header("idempotency-key", "K");
    let request = request.header("content-type", media_type);
    request.body(body.into()).unwrap()
}

fn sent(boundary: &str, parts: &[Part<'_>]) -> Request<Body> {
    typed(&media_type(boundary), form(boundary, parts))
}

fn with(mut request: Request<Body>, name: &'static str, value: &str) -> Request<Body> {
    request.headers_mut().insert(name, value.parse().unwrap());
    request
}

#[track_caller]
fn assert_reused(answer: &Answer) {
    assert_eq!(answer.said(), (409, "idempotency_key_reused".into()));
    assert!(!answer.replay);
}

fn layer(store: &TestStore) -> IdempotencyLayer<TestStore> {
    let layer = IdempotencyLayer::new(store.clone()).single_tenant();
    layer.fingerprint(MultipartParts::new())
}

async fn by_parts(world: &World) -> (Handler, TestStore, Router) {
    let handler = Handler::new();
    let store = world.open().await;
    let app = handler.behind(layer(&store));
    (handler, store, app)
}

/// Answers with everything the extractor shows of a form.
async fn echo(mut form: Multipart) -> (StatusCode, String) {
    let mut seen = String::new();
    while let Some(part) = form.next_field().await.unwrap() {
        let (name, file) = (
            part.name().map(String::from),
            part.file_name().map(String::from),
        );
        let media_type = part.content_type().map(String::from);
        seen += &format!(
            "{name:?} {file:?} {media_type:?} {:?}\n",
            part.bytes().await.unwrap()
        );
    }
    (StatusCode::CREATED, seen)
}

every_store! {
    // F6
    async fn a_fresh_boundary_around_equal_parts_is_the_same_request(world: World) {
        let (handler, store, app) = by_parts(&world).await;
        let first = send(&app, sent("one", &CHARGE)).await;
        assert_eq!(first.status, 201);
        for boundary in ["one", "two", "----WebKitFormBoundary7MA4YWxkTrZu0gW", "a b'()+_,-./:=?c"] {
            send(&app, sent(boundary, &CHARGE)).await.assert_replays(&first);
        }
        assert_eq!(handler.effects(), 1);
        assert_eq!(record(&store, "K").await.unwrap().scheme, "multipart-v1");
    }

    // F6: without the scheme such a retry is refused, and only one with the same boundary replayed.
    async fn a_fresh_boundary_is_another_request_under_the_default_scheme(world: World) {
        let handler = Handler::new();
        let store = world.open().await;
        let app = handler.behind(IdempotencyLayer::new(store.clone()).single_tenant());
        let first = send(&app, sent("one", &CHARGE)).await;
        assert_reused(&send(&app, sent("two", &CHARGE)).await);
        send(&app, sent("one", &CHARGE)).await.assert_replays(&first);
        assert_eq!(handler.effects(), 1);
        assert_eq!(record(&store, "K").await.unwrap().scheme, "exact-v1");
    }

    async fn whatever_else_differs_is_another_request(world: World) {
        let (handler, _, app) = by_parts(&world).await;
        let first = send(&app, sent("one", &CHARGE)).await;
        assert_eq!(first.status, 201);
        let (receipt, pdf) = RECEIPT;
        let other_name = receipt.replace("\"receipt\"", "\"invoice\"");
        let other_file = receipt.replace("a.pdf", "b.pdf");
        let other_type = receipt.replace("application/pdf", "text/plain");
        let no_file = receipt.replace("; filename=\"a.pdf\"", "");
        let empty_file = receipt.replace("a.pdf", "");
        let no_type = receipt.replace("\r\nContent-Type: application/pdf", "");
        let one_more_header = format!("{receipt}\r\nX-Page: 1");
        let unquoted = receipt.replace("\"receipt\"", "receipt");
        let others: &[&[Part<'_>]] = &[
            &[RECEIPT, AMOUNT],
            &[AMOUNT],
            &[RECEIPT],
            &[],
            &[AMOUNT, RECEIPT, AMOUNT],
            &[AMOUNT, AMOUNT, RECEIPT],
            &[AMOUNT, RECEIPT, ("Content-Disposition: form-data; name=\"\"", b"")],
            &[(AMOUNT.0, b"900"), RECEIPT],
            &[(AMOUNT.0, b""), RECEIPT],
            &[(AMOUNT.0, b"100\r\n"), RECEIPT],
            &[AMOUNT, (receipt, b"%PDF")],
            &[(AMOUNT.0, pdf), (receipt, b"100")],
            &[AMOUNT, (&other_name, pdf)],
            &[AMOUNT, (&other_file, pdf)],
            &[AMOUNT, (&other_type, pdf)],
            &[AMOUNT, (&no_file, pdf)],
            &[AMOUNT, (&empty_file, pdf)],
            &[AMOUNT, (&no_type, pdf)],
            &[AMOUNT, (&one_more_header, pdf)],
            &[AMOUNT, (&unquoted, pdf)],
        ];
        for (n, other) in others.iter().enumerate() {
            let answer = send(&app, sent("one", other)).await;
            assert_eq!(answer.said(), (409, "idempotency_key_reused".into()), "form {n}");
        }
        // And what counts of every request.
        for uri in ["/charges?x=1", "/refunds"] {
            let mut request = sent("one", &CHARGE);
            *request.uri_mut() = uri.parse().unwrap();
            assert_reused(&send(&app, request).await);
        }
        let mut patch = sent("one", &CHARGE);
        *patch.method_mut() = http::Method::PATCH;
        assert_reused(&send(&app, patch).await);
        assert_eq!(handler.effects(), 1);
        send(&app, sent("two", &CHARGE)).await.assert_replays(&first);
    }

    async fn how_a_form_is_written_down_does_not_count(world: World) {
        let (handler, _, app) = by_parts(&world).await;
        let first = send(&app, sent("one", &CHARGE)).await;
        let (receipt, pdf) = RECEIPT;
        let (disposition, kind) = receipt.split_once("\r\n").unwrap();
        let turned = format!("{kind}\r\n{disposition}");
        let lower = AMOUNT.0.replace("Content-Disposition:", "content-disposition:  ");
        let counted = format!("{receipt}\r\nContent-Length: {}", pdf.len());
        for same in [&[(&*lower, AMOUNT.1), (&turned, pdf)], &[AMOUNT, (&counted, pdf)]] {
            send(&app, sent("two", same)).await.assert_replays(&first);
        }
        let mut wrapped = b"a preamble\r\n\r\n".to_vec();
        wrapped.extend(form("two", &CHARGE));
        wrapped.extend(b"an epilogue\r\n--two\r\n");
        for media_type in [
            "multipart/form-data; boundary=two",
            "Multipart/Form-Data;charset=utf-8;BOUNDARY=two",
        ] {
            send(&app, typed(media_type, wrapped.clone())).await.assert_replays(&first);
        }
        // White space before the line's end, and no line's end after the last boundary.
        let padded = form("two", &CHARGE);
        let padded = [b"--two \t\r\n", &padded[b"--two\r\n".len()..padded.len() - 2]].concat();
        send(&app, typed(&media_type("two"), padded)).await.assert_replays(&first);
        assert_eq!(handler.effects(), 1);
    }

    // F6
    async fn headers_that_change_with_every_attempt_do_not_count(world: World) {
        let (handler, _, app) = by_parts(&world).await;
        let server = Server::start(app).await;
        let attempt = |n: usize, parts: &[Part<'_>]| {
            let boundary = format!("boundary-{n}");
            let body = form(&boundary, parts);
            let head = format!(
                "POST /charges HTTP/1.1\r\nhost: test{n}\r\nidempotency-key: K\r\n\
                 date: Mon, 0{n} Jan 2026 00:00:00 GMT\r\nx-request-id: r-{n}\r\n\
                 traceparent: 00-4bf92f3577b34da6a3ce929d0e0e473{n}-00f067aa0ba902b7-01\r\n\
                 user-agent: client/{n}\r\nauthorization: Bearer {n}\r\ncookie: s={n}\r\n\
                 content-type: multipart/form-data; boundary={boundary}\r\n",
            );
            (head, body)
        };
        let whole = |(head, body): (String, Vec<u8>)| {
            let head = format!("{head}content-length: {}\r\n\r\n", body.len());
            [head.as_bytes(), &body].concat()
        };
        // In chunks of seven bytes, which cut every boundary.
        let chunked = |(head, body): (String, Vec<u8>)| {
            let mut request = format!("{head}transfer-encoding: chunked\r\n\r\n").into_bytes();
            for chunk in body.chunks(7) {
                request.extend(format!("{:x}\r\n", chunk.len()).bytes());
                request.extend(chunk);
                request.extend(b"\r\n");
            }
            request.extend(b"0\r\n\r\n");
            request
        };
        let first = server.exchange(&whole(attempt(1, &CHARGE))).await;
        assert_eq!(first.status, 201);
        for retry in [
            whole(attempt(2, &CHARGE)),
            chunked(attempt(3, &CHARGE)),
            chunked(attempt(4, &CHARGE)),
        ] {
            let retry = server.exchange(&retry).await;
            assert!(retry.is_replay(), "{retry:?}");
            assert_eq!(retry.body, first.body);
        }
        let other = server.exchange(&chunked(attempt(5, &[AMOUNT]))).await;
        assert_eq!(other.said(), (409, "idempotency_key_reused".into()));
        assert_eq!(handler.effects(), 1);
    }

    async fn the_handler_still_sees_the_whole_form(world: World) {
        let store = world.open().await;
        let app = Router::new().route("/charges", route_post(echo));
        let expected = send(&app, sent("one", &CHARGE)).await;
        assert!(expected.body.starts_with(b"Some(\"amount\") None None b\"100\"\n"));
        assert!(String::from_utf8_lossy(&expected.body).contains("Some(\"a.pdf\")"));
        let app = app.route_layer(layer(&store));
        let first = send(&app, sent("two", &CHARGE)).await;
        assert_eq!((first.status, &first.body), (expected.status, &expected.body));
        send(&app, sent("three", &CHARGE)).await.assert_replays(&first);
    }

    async fn a_form_that_cannot_be_read_is_refused_and_leaves_the_key_free(world: World) {
        let (handler, store, app) = by_parts(&world).await;
        let good = form("one", &CHARGE);
        let cut = |at: usize| good[..at].to_vec();
        let one = |head: &str| [format!("--one\r\n{head}").into_bytes(), b"\r\n--one--\r\n".to_vec()].concat();
        let crowded: String = (0..33).map(|n| format!("X-{n}: secret\r\n")).collect();
        let (boundary, broken) = ("names no readable boundary", "cut short or malformed");
        let (headers, disposition) = ("malformed or too many", "no Content-Disposition");
        let bodies: Vec<(Vec<u8>, &str)> = vec![
            (Vec::new(), broken),
            (b"secret".to_vec(), broken),
            (b"--one".to_vec(), broken),
            (b"--one-".to_vec(), broken),
            (b"--one\r\n".to_vec(), broken),
            (b"--one--".to_vec()[..6].to_vec(), broken),
            (form("another", &CHARGE), broken),
            // Cut in a part's head, in its bytes, before and in the last boundary.
            (cut(20), broken),
            (cut(good.len() / 2), broken),
            (cut(good.len() - b"\r\n--one--\r\n".len()), broken),
            (cut(good.len() - b"--\r\n".len()), broken),
            (cut(good.len() - b"-\r\n".len()), broken),
            // Ended by the lines of a whole part instead of the last boundary's.
            ([cut(good.len() - 4), b"\r\n".to_vec()].concat(), broken),
            (good.iter().map(|byte| if *byte == b'\r' { b'\n' } else { *byte }).collect(), broken),
            (form("one", &[(AMOUNT.0, b"secret\r\n--oneself")]), broken),
            (one("Content-Disposition form-data; name=secret\r\n\r\n"), headers),
            (one("Content Disposition: secret\r\n\r\n"), headers),
            (one(" Content-Disposition: secret\r\n\r\n"), headers),
            (one("Content-Disposition: secret\r\n folded\r\n\r\n"), headers),
            (one("Content-Disposition: se\x01cret\r\n\r\n"), headers),
            (one(": secret\r\n\r\n"), headers),
            (one(&format!("{crowded}{}\r\n\r\n", AMOUNT.0)), headers),
            (one("Content-Type: text/plain\r\n\r\nsecret"), disposition),
            // Without headers the next part's would be taken for its bytes.
            (form("one", &[("", b"secret"), AMOUNT]), disposition),
        ];
        let whole = media_type("one");
        let good_but = |media_type: &str| (media_type.to_owned(), good.clone(), boundary);
        let mut refused: Vec<_> = bodies.into_iter().map(|(body, why)| (whole.clone(), body, why)).collect();
        refused.extend([
            good_but("multipart/form-data"),
            good_but("multipart/form-data; boundary"),
            good_but("multipart/form-data; boundary="),
            good_but("multipart/form-data; boundary=\"\""),
            good_but("multipart/form-data; bound=one"),
            good_but("multipart/form-data; boundary=\"one"),
            good_but("multipart/form-data; boundary=one; =secret"),
        ]);
        for (media_type, body, why) in refused {
            let shown = format!("{media_type} {:?}", Bytes::from(body.clone()));
            let answer = send(&app, typed(&media_type, body)).await;
            assert_eq!(answer.said(), (400, "idempotency_body_invalid".into()), "{shown}");
            let detail = answer.json()["detail"].as_str().unwrap().to_owned();
            assert!(detail.contains(why), "{shown}: {detail}");
            assert!(!detail.contains("secret"), "{detail}");
        }
        let mut not_text = sent("one", &CHARGE);
        let value = http::HeaderValue::from_bytes(b"multipart/form-data; boundary=one; x=\xff");
        not_text.headers_mut().insert("content-type", value.unwrap());
        assert_eq!(send(&app, not_text).await.code(), "idempotency_body_invalid");
        assert_eq!((handler.effects(), store.total_calls(), records(&store).await), (0, 0, 0));

        let first = send(&app, sent("one", &CHARGE)).await;
        assert_eq!((first.status.as_u16(), first.replay), (201, false));
        // Nor does such a form get the answer of a record that stands, or change it.
        let written = record(&store, "K").await;
        let answer = send(&app, typed(&whole, cut(good.len() - 4))).await;
        assert_eq!(answer.said(), (400, "idempotency_body_invalid".into()));
        assert_eq!(record(&store, "K").await, written);
        send(&app, sent("two", &CHARGE)).await.assert_replays(&first);
    }

    async fn a_form_without_parts_is_one_of_its_own(world: World) {
        let (handler, _, app) = by_parts(&world).await;
        let first = send(&app, sent("one", &[])).await;
        assert_eq!(first.status, 201);
        send(&app, typed(&media_type("two"), "--two--")).await.assert_replays(&first);
        assert_reused(&send(&app, sent("one", &[("Content-Disposition: form-data", b"")])).await);
        assert_reused(&send(&app, typed("text/plain", form("one", &[]))).await);
        assert_eq!(handler.effects(), 1);
    }

    // Whether it needs a name is for the handler to say, as it is without the layer.
    async fn a_part_without_a_name_is_let_through(world: World) {
        let (_, _, app) = by_parts(&world).await;
        let nameless = [("Content-Disposition: form-data; filename=\"\u{e9}\"", &b"1"[..])];
        let first = send(&app, sent("one", &nameless)).await;
        assert_eq!(first.status, 201);
        send(&app, sent("two", &nameless)).await.assert_replays(&first);
        let other = [("Content-Disposition: form-data; filename=\"\u{e8}\"", &b"1"[..])];
        assert_reused(&send(&app, sent("two", &other)).await);
    }

    async fn any_other_body_counts_byte_by_byte(world: World) {
        let (handler, _, app) = by_parts(&world).await;
        let bodies = [
            ("application/json", "{\"a\":1}", "{\"a\": 1}"),
            ("multipart/mixed; boundary=one", "--one\r\n\r\n1\r\n--one--", "--two\r\n\r\n1\r\n--two--"),
            ("multipart/form-data+x; boundary=one", "--one--", "--one--\r\n"),
            ("application/x-www-form-urlencoded", "", "a=1"),
        ];
        for (n, (media_type, body, other)) in bodies.into_iter().enumerate() {
            let keyed = |body: &'static str| with(typed(media_type, body), "idempotency-key", &format!("{n}"));
            let first = send(&app, keyed(body)).await;
            assert_eq!(first.status, 201);
            send(&app, keyed(body)).await.assert_replays(&first);
            assert_reused(&send(&app, keyed(other)).await);
        }
        assert_eq!(handler.effects(), 4);
    }

    // F3
    async fn a_coded_form_counts_byte_by_byte_unless_it_is_decoded_outside(world: World) {
        let (handler, store, app) = by_parts(&world).await;
        let zipped = || {
            let request = typed(&media_type("zipped"), ZIPPED_AMOUNT);
            with(request, "content-encoding", "gzip")
        };
        let first = send(&app, zipped()).await;
        assert_eq!(first.status, 201);
        send(&app, zipped()).await.assert_replays(&first);
        assert_reused(&send(&app, sent("zipped", &[AMOUNT])).await);
        // Nor is it looked into: this is no form at all.
        let nonsense = with(typed(&media_type("one"), "nonsense"), "content-encoding", "gzip");
        assert_eq!(send(&app, with(nonsense, "idempotency-key", "other")).await.status, 201);
        assert_eq!(handler.effects(), 2);

        for identity in ["identity", " Identity "] {
            let named = |boundary| {
                let request = with(sent(boundary, &CHARGE), "content-encoding", identity);
                with(request, "idempotency-key", "identity")
            };
            assert_eq!(send(&app, named("one")).await.status, 201);
            assert!(send(&app, named("two")).await.replay);
        }

        let app = handler.behind(layer(&store)).layer(RequestDecompressionLayer::new());
        let decoded = |request| with(request, "idempotency-key", "decoded");
        let first = send(&app, decoded(zipped())).await;
        assert_eq!((first.status.as_u16(), first.replay), (201, false));
        send(&app, decoded(sent("two", &[AMOUNT]))).await.assert_replays(&first);
    }

    // F9
    async fn while_the_first_runs_a_retry_is_in_flight_and_another_form_is_reuse(world: World) {
        let (handler, _, app) = by_parts(&world).await;
        handler.close_gate();
        let held = tokio::spawn({
            let app = app.clone();
            async move { send(&app, sent("one", &CHARGE)).await }
        });
        handler.reached(1).await;
        assert_eq!(send(&app, sent("two", &CHARGE)).await.code(), "idempotency_in_flight");
        assert_reused(&send(&app, sent("one", &[AMOUNT])).await);
        handler.open_gate();
        let first = held.await.unwrap();
        send(&app, sent("three", &CHARGE)).await.assert_replays(&first);
        assert_eq!(handler.effects(), 1);
    }
}

fn digest(media_type: &str, body: impl Into<Bytes>) -> Result<Fingerprint, UndecodableBody> {
    let request = Request::post("/charges?x=1").header("content-type", media_type);
    let (head, body) = request.body(body.into()).unwrap().into_parts();
    MultipartParts::new().fingerprint(&head, &body)
}

fn digest_of(boundary: &str, parts: &[Part<'_>]) -> Fingerprint {
    digest(&media_type(boundary), form(boundary, parts)).unwrap()
}

/// Live records hold these digests: if this fails, the scheme needs a new name.
#[test]
fn the_digest_is_what_it_was_when_its_name_was_given() {
    let framed = |media_type: &str, rest: &[&[u8]]| {
        let mut digest = Sha256::new();
        let mut part = |bytes: &[u8]| {
            digest.update((bytes.len() as u64).to_be_bytes());
            digest.update(bytes);
        };
        for bytes in ["POST", "/charges", "x=1", media_type] {
            part(bytes.as_bytes());
        }
        digest.update([[0xff; 8], [0xff; 8]].concat());
        digest.update(rest.concat());
        Fingerprint::from_bytes(digest.finalize().into())
    };
    let length = |length: u64| length.to_be_bytes();
    assert_eq!(MultipartParts::new().name(), "multipart-v1");
    let (kind, disposition) = (b"content-type", b"content-disposition");
    let value = b"form-data; name=\"receipt\"; filename=\"a.pdf\"";
    let rest: &[&[u8]] = &[
        &length(18),
        b"multipart-v1 parts",
        &length(1),
        &length(19),
        disposition,
        &length(24),
        b"form-data; name=\"amount\"",
        &length(3),
        b"100",
        &length(2),
        &length(19),
        disposition,
        &length(43),
        value,
        &length(12),
        kind,
        &length(15),
        b"application/pdf",
        &length(RECEIPT.1.len() as u64),
        RECEIPT.1,
        &[0xff; 8],
    ];
    assert_eq!(
        digest_of("one", &CHARGE),
        framed("multipart/form-data", rest)
    );
    let rest: &[&[u8]] = &[&length(18), b"multipart-v1 parts", &[0xff; 8]];
    assert_eq!(digest_of("one", &[]), framed("multipart/form-data", rest));
    let rest: &[&[u8]] = &[&length(16), b"multipart-v1 raw", &length(4), b"body"];
    assert_eq!(
        digest("text/Plain; a=b", "body"),
        Ok(framed("text/plain", rest))
    );
}

#[test]
fn no_part_of_a_form_runs_into_the_next() {
    let named = |name: &str| format!("Content-Disposition: {name}");
    let (a, ab, empty) = (named("a"), named("ab"), named(""));
    let with = |more: &str| format!("{a}\r\n{more}");
    let (x, y, b) = (with("X: y"), with("XY:"), with("X:"));
    let forms: &[&[Part<'_>]] = &[
        &[],
        &[(&a, b"")],
        &[(&empty, b"")],
        &[(&empty, b"a")],
        &[(&a, b""), (&a, b"")],
        &[(&a, b"bc")],
        &[(&ab, b"c")],
        &[(&a, b"b"), (&a, b"c")],
        &[(&a, b"c"), (&a, b"b")],
        &[(&a, b"bc"), (&a, b"")],
        &[(&a, b""), (&a, b"bc")],
        &[(&x, b"")],
        &[(&y, b"")],
        &[(&b, b"")],
        &[(&b, b"y")],
    ];
    let digests: HashSet<_> = forms.iter().map(|form| digest_of("one", form)).collect();
    assert_eq!(digests.len(), forms.len());
}

/// Were the time not in proportion to the size, this would take minutes.
#[test]
fn many_of_the_smallest_parts_and_much_that_is_almost_a_boundary_is_read() {
    const SIZE: usize = 256 << 10;
    let smallest: Part<'_> = ("Content-Disposition:", b"");
    let parts = vec![smallest; SIZE / form("b", &[smallest]).len()];
    assert_eq!(digest_of("b", &parts), digest_of("c", &parts));

    let boundary = "-".repeat(69) + "x";
    for almost in ["\r\n".to_owned() + &"-".repeat(71), "-".into()] {
        let content = almost.repeat(SIZE / almost.len()).into_bytes();
        let parts = [(AMOUNT.0, &content[..])];
        assert_eq!(digest_of(&boundary, &parts), digest_of("another", &parts));
    }
}

/// What the extractor says of a form: its parts, or that it cannot be read.
fn extracted(media_type: &str, body: Bytes) -> Option<Vec<(http::HeaderMap, Bytes)>> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap();
    runtime.block_on(async {
        let request = typed(media_type, body);
        let mut form = Multipart::from_request(request, &()).await.ok()?;
        let mut parts = Vec::new();
        while let Some(part) = form.next_field().await.ok()? {
            let headers = part.headers().clone();
            parts.push((headers, part.bytes().await.ok()?));
        }
        Some(parts)
    })
}

/// Boundaries of all that RFC 2046 §5.1.1 allows but white space at the end.
fn boundaries() -> impl Strategy<Value = String> {
    "[0-9A-Za-z'()+_,./:=?-]{1,70}"
}

/// Names, file names, types and bytes; these so that they come close to a boundary.
fn parts() -> impl Strategy<Value = Vec<(String, Vec<u8>)>> {
    let header = (
        "[a-c]{0,2}",
        proptest::option::of("[a-c.]{0,2}"),
        proptest::option::of("[a-c]{1,2}"),
    );
    let head = header.prop_map(|(name, file, kind)| {
        let mut head = format!("Content-Disposition: form-data; name=\"{name}\"");
        head += &file
            .map(|file| format!("; filename=\"{file}\""))
            .unwrap_or_default();
        head += &kind
            .map(|kind| format!("\r\nContent-Type: text/{kind}"))
            .unwrap_or_default();
        head
    });
    let piece = prop_oneof![
        vec(any::<u8>(), 0..4),
        Just(b"\r\n--".to_vec()),
        Just(b"\r\n\r\n".to_vec()),
        Just(b"-".to_vec()),
    ];
    let content = vec(piece, 0..6).prop_map(|pieces| pieces.concat());
    vec((head, content), 0..5)
}

fn borrowed(parts: &[(String, Vec<u8>)]) -> Vec<Part<'_>> {
    parts
        .iter()
        .map(|(head, content)| (&**head, &**content))
        .collect()
}

/// Whether the boundary stands in none of the parts, as whoever draws one must see to.
fn is_free(boundary: &str, parts: &[(String, Vec<u8>)]) -> bool {
    let line = format!("\r\n--{boundary}").into_bytes();
    parts.iter().all(|(_, content)| {
        let content = [b"\r\n", &content[..], b"\r\n"].concat();
        !content.windows(line.len()).any(|window| window == line)
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..Default::default() })]

    #[test]
    fn two_forms_are_one_request_exactly_when_their_parts_are_equal(
        one in boundaries(),
        two in boundaries(),
        parts in parts(),
        others in parts(),
    ) {
        for boundary in [&one, &two] {
            prop_assume!(is_free(boundary, &parts) && is_free(boundary, &others));
        }
        let of = digest_of(&one, &borrowed(&parts));
        prop_assert_eq!(of, digest_of(&two, &borrowed(&parts)));
        prop_assert_eq!(of == digest_of(&two, &borrowed(&others)), parts == others);
    }

    #[test]
    fn one_changed_byte_of_a_part_makes_another_request(
        parts in parts(),
        part in any::<prop::sample::Index>(),
        byte in any::<prop::sample::Index>(),
        change in 1_u8..,
    ) {
        let with_bytes = |(_, content): &&(String, Vec<u8>)| !content.is_empty();
        prop_assume!(parts.iter().any(|part| with_bytes(&part)));
        let mut changed = parts.clone();
        let mut contents: Vec<_> = changed.iter_mut().map(|(_, content)| content).collect();
        contents.retain(|content| !content.is_empty());
        let part = part.index(contents.len());
        let byte = byte.index(contents[part].len());
        contents[part][byte] ^= change;
        prop_assume!(is_free("boundary", &parts) && is_free("boundary", &changed));
        let before = digest_of("boundary", &borrowed(&parts));
        prop_assert_ne!(before, digest_of("boundary", &borrowed(&changed)));
    }

    /// What is fingerprinted is what the handler will see, and what it cannot read is refused before.
    #[test]
    fn a_damaged_form_is_read_as_the_extractor_reads_it(
        parts in parts(),
        from in any::<prop::sample::Index>(),
        dropped in 0_usize..4,
        inserted in prop_oneof![vec(any::<u8>(), 0..3), Just(b"\n".to_vec()), Just(b"\r\n--b".to_vec())],
    ) {
        let whole = form("b", &borrowed(&parts));
        let from = from.index(whole.len());
        let to = (from + dropped).min(whole.len());
        let damaged = Bytes::from([&whole[..from], &inserted, &whole[to..]].concat());
        let read = digest(&media_type("b"), damaged.clone());
        match (read, extracted(&media_type("b"), damaged)) {
            (Err(_), None) => {}
            (Err(_), Some(parts)) => prop_assert!(
                parts.iter().any(|(headers, _)| !headers.contains_key("content-disposition"))
            ),
            (Ok(_), None) => prop_assert!(false, "the extractor refuses it"),
            (Ok(read), Some(seen)) => {
                // Written anew from what was seen, it is the same request.
                let seen: Vec<_> = seen.iter().map(|(headers, content)| {
                    let line = |(name, value): (&http::HeaderName, &http::HeaderValue)| {
                        [name.as_str().as_bytes(), b": ", value.as_bytes()].concat()
                    };
                    (headers.iter().map(line).collect::<Vec<_>>().join(&b"\r\n"[..]), content)
                }).collect();
                let mut anew = Vec::new();
                for (head, content) in &seen {
                    anew.extend([b"--anew-anew\r\n", &head[..], b"\r\n\r\n", content, b"\r\n"].concat());
                }
                anew.extend(b"--anew-anew--");
                prop_assert_eq!(Ok(read), digest(&media_type("anew-anew"), anew));
            }
        }
    }

    #[test]
    fn random_bytes_are_read_or_refused(body in vec(any::<u8>(), 0..200), tail in vec(any::<u8>(), 0..200)) {
        let _ = digest(&media_type("b"), body.clone());
        let began = [b"--b\r\n", &body[..], b"\r\n\r\n", &tail, b"\r\n--b--"].concat();
        let _ = digest(&media_type("b"), began);
        if let Ok(value) = http::HeaderValue::from_bytes(&[b"multipart/form-data;", &body[..]].concat()) {
            let request = Request::post("/").header("content-type", value);
            let (head, body) = request.body(Bytes::from(tail)).unwrap().into_parts();
            let _ = MultipartParts::new().fingerprint(&head, &body);
        }
    }
}

//! A service's own function may say what makes two requests one.

mod support;

use std::panic::{AssertUnwindSafe, catch_unwind};

use axum::{
    Router,
    body::Body,
    extract::OriginalUri,
    http::{Request, request::Parts},
};
use bytes::Bytes;
use sha2::{Digest, Sha256};
use support::{wire::Server, *};
use tower_http::catch_panic::CatchPanicLayer;
use tower_idempotency::{
    Fingerprint, FingerprintScheme, IdempotencyLayer, MemoryStore, UndecodableBody, fingerprint_fn,
};

#[track_caller]
fn assert_reused(answer: &Answer) {
    assert_eq!(answer.said(), (409, "idempotency_key_reused".into()));
    assert!(!answer.replay);
}

/// The path and the lines, whatever their order; empty ones aside.
fn lines(head: &Parts, body: &Bytes) -> Result<Fingerprint, UndecodableBody> {
    let body = str::from_utf8(body).map_err(|_| UndecodableBody("it is not UTF-8"))?;
    let mut lines: Vec<_> = body.lines().filter(|line| !line.is_empty()).collect();
    lines.sort_unstable();
    Ok(Fingerprint::of([head.uri.path()].into_iter().chain(lines)))
}

fn layer(store: &TestStore) -> IdempotencyLayer<TestStore> {
    let layer = IdempotencyLayer::new(store.clone()).single_tenant();
    layer.fingerprint(fingerprint_fn("lines-v1", lines))
}

async fn by_lines(world: &World) -> (Handler, TestStore, Router) {
    let handler = Handler::new();
    let store = world.open().await;
    let app = handler.behind(layer(&store));
    (handler, store, app)
}

every_store! {
    async fn the_function_says_what_counts(world: World) {
        let (handler, store, app) = by_lines(&world).await;
        let first = send(&app, post("K", "a\nb\n")).await;
        assert_eq!(first.status, 201);
        for same in ["b\na\n", "\n\nb\r\na"] {
            send(&app, post("K", same)).await.assert_replays(&first);
        }
        // It leaves out the method, the query and the media type, which the default counts.
        let other_head = Request::patch("/charges?x=1").header("idempotency-key", "K");
        send(&app, other_head.body(Body::from("a\nb")).unwrap()).await.assert_replays(&first);
        for other in ["a", "ab", "a\nb\nb", ""] {
            assert_reused(&send(&app, post("K", other)).await);
        }
        assert_reused(&send(&app, request("POST", "/refunds", Some("K"), "a\nb")).await);
        assert_eq!(handler.effects(), 1);
        let record = record(&store, "K").await.unwrap();
        assert_eq!(record.scheme, "lines-v1");
        assert_eq!(record.fingerprint, Fingerprint::of(["/charges", "a", "b"]));
    }

    async fn a_body_the_function_refuses_leaves_no_record(world: World) {
        let (handler, store, app) = by_lines(&world).await;
        let answer = send(&app, post("K", &b"secret\xff"[..])).await;
        assert_eq!(answer.said(), (400, "idempotency_body_invalid".into()));
        assert_eq!(answer.json()["retryable"], false);
        let detail = answer.json()["detail"].as_str().unwrap().to_owned();
        assert!(detail.contains("it is not UTF-8"), "{detail}");
        assert!(!detail.contains("secret"), "{detail}");
        assert_eq!((handler.effects(), store.total_calls(), records(&store).await), (0, 0, 0));
        // The key is as free as before.
        let first = send(&app, post("K", "a")).await;
        assert_eq!((first.status.as_u16(), first.replay), (201, false));
        assert_eq!(send(&app, post("K", &b"\xff"[..])).await.code(), "idempotency_body_invalid");
        send(&app, post("K", "a")).await.assert_replays(&first);
    }

    async fn a_panic_of_the_function_claims_nothing(world: World) {
        let handler = Handler::new();
        let store = world.open().await;
        let fragile = fingerprint_fn("fragile-v1", |_, body: &Bytes| {
            assert_ne!(body, "bad", "as the test wants");
            Ok(Fingerprint::of([body]))
        });
        let layer = IdempotencyLayer::new(store.clone()).single_tenant().fingerprint(fragile);
        let app = handler.behind(layer).layer(CatchPanicLayer::new());
        assert_eq!(send(&app, post("K", "bad")).await.status, 500);
        assert_eq!((handler.effects(), store.total_calls(), records(&store).await), (0, 0, 0));
        let first = send(&app, post("K", "good")).await;
        assert_eq!((first.status.as_u16(), first.replay), (201, false));
    }

    async fn the_function_is_given_the_whole_body_and_the_head_as_it_is_at_the_layer(world: World) {
        let handler = Handler::new();
        let store = world.open().await;
        let whole = fingerprint_fn("whole-v1", |head, body: &Bytes| {
            let whole_path = head.extensions.get::<OriginalUri>().unwrap().path();
            let paths = [head.uri.path().as_bytes(), whole_path.as_bytes()];
            let client = head.headers.get("x-client").unwrap().as_bytes();
            Ok(Fingerprint::of(paths.into_iter().chain([client, body])))
        });
        let layer = IdempotencyLayer::new(store.clone()).single_tenant().fingerprint(whole);
        let app = Router::new().nest("/v1", handler.behind(layer));
        let server = Server::start(app).await;
        let chunked = b"POST /v1/charges HTTP/1.1\r\nhost: test\r\nidempotency-key: K\r\nx-client: c\r\n\
            transfer-encoding: chunked\r\n\r\n3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n";
        assert_eq!(server.exchange(chunked).await.status, 201);
        let expected = Fingerprint::of(["/charges", "/v1/charges", "c", "onetwo"]);
        assert_eq!(record(&store, "K").await.unwrap().fingerprint, expected);
        assert!(server.exchange(chunked).await.is_replay());
    }

    async fn a_name_made_at_run_time_is_stored_whole(world: World) {
        let handler = Handler::new();
        let store = world.open().await;
        let name = "é".repeat(32);
        assert_eq!(name.len(), 64);
        let scheme = fingerprint_fn(name.clone(), lines);
        let app = handler.behind(IdempotencyLayer::new(store.clone()).single_tenant().fingerprint(scheme));
        let first = send(&app, post("K", "a\nb")).await;
        send(&app, post("K", "b\na")).await.assert_replays(&first);
        assert_eq!(record(&store, "K").await.unwrap().scheme, name);
    }
}

#[test]
fn a_name_that_a_store_could_not_keep_panics_when_the_layer_is_built() {
    let refusal = |build: fn(IdempotencyLayer<MemoryStore>) -> IdempotencyLayer<MemoryStore>| {
        let layer = IdempotencyLayer::new(MemoryStore::new());
        let panic = catch_unwind(AssertUnwindSafe(|| build(layer))).unwrap_err();
        panic.downcast_ref::<String>().cloned().unwrap()
    };
    let fingerprint = refusal(|layer| layer.fingerprint(fingerprint_fn("x".repeat(65), lines)));
    assert!(fingerprint.starts_with("fingerprint: "), "{fingerprint}");
    assert!(fingerprint.contains("at most 64 bytes"), "{fingerprint}");
    let also_accept = refusal(|layer| layer.also_accept(fingerprint_fn("x".repeat(65), lines)));
    assert!(also_accept.starts_with("also_accept: "), "{also_accept}");
    let control = refusal(|layer| layer.fingerprint(fingerprint_fn("a\0b", lines)));
    assert!(control.contains("no control characters"), "{control}");
}

/// Live records hold these digests.
#[test]
fn a_digest_of_parts_is_what_it_always_was() {
    let framed = |parts: &[&[u8]]| {
        let mut digest = Sha256::new();
        for part in parts {
            digest.update((part.len() as u64).to_be_bytes());
            digest.update(part);
        }
        Fingerprint::from_bytes(digest.finalize().into())
    };
    let nothing: [&[u8]; 0] = [];
    let lists: [&[&[u8]]; 8] = [
        &nothing,
        &[b""],
        &[b"", b""],
        &[b"ab"],
        &[b"a", b"b"],
        &[b"b", b"a"],
        &[b"ab", b""],
        &[b"a\0\0\0\0\0\0\0\x01b"],
    ];
    for parts in lists {
        assert_eq!(Fingerprint::of(parts), framed(parts));
    }
    let digests: std::collections::HashSet<_> = lists.into_iter().map(Fingerprint::of).collect();
    assert_eq!(digests.len(), lists.len());
    // SHA-256 of nothing, from FIPS 180's own examples.
    assert_eq!(
        Fingerprint::of(nothing).as_bytes()[..4],
        [0xe3, 0xb0, 0xc4, 0x42]
    );
}

#[test]
fn debug_shows_the_name_and_nothing_of_the_function() {
    let scheme = fingerprint_fn("lines-v1", lines);
    assert_eq!(
        format!("{scheme:?}"),
        "FingerprintFn { name: \"lines-v1\", .. }"
    );
    assert_eq!(scheme.clone().name(), "lines-v1");
}

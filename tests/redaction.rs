//! What a key unlocks is worth stealing: no key, scope, header value or body is ever logged or
//! shown by `Debug` or `Display`.

mod support;

use std::{
    fmt::{Debug, Display, Write as _},
    io,
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{
    body::Body,
    extract::Request,
    http::{HeaderValue, Response, StatusCode},
};
use bytes::Bytes;
use support::{logs::Written, *};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_idempotency::{
    AnyStore, ExactRequest, FingerprintScheme, Idempotency, IdempotencyKey, IdempotencyLayer,
    InvalidKey, KeyFormat, MemoryStore, MissingKey, RecordId, Recovery, Rejection,
    RetainedResponse, Scope, SqliteStore, StoreFailure, UndecodableBody,
    store::{Checkpoint, Checkpoints, Claim, ClaimRequest, Completion, Inspect, Lifetimes, Store},
    testing::{Fault, FaultyStore, Operation, Times},
};
#[cfg(all(feature = "multipart", feature = "sealing"))]
use tower_idempotency::{
    CanonicalJson, Fingerprint, MultipartParts, Profile, SealedStore, SealingKey, SealingKeys,
    fingerprint_fn,
};

const KEY: &str = "k3y-s3cret";
const SCOPE: &str = "sc0pe-s3cret";
const HEADER: &str = "h3ader-s3cret";
const BODY: &str = "b0dy-s3cret";
const ANSWER: &str = "answ3r-s3cret";
const FIELD: &str = "f1eld-s3cret";
const CHECKPOINT: &str = "ch3ckpoint-s3cret";
const SECRETS: [&str; 7] = [KEY, SCOPE, HEADER, BODY, ANSWER, FIELD, CHECKPOINT];

/// Finds a secret as text, as a list of bytes, and in hexadecimal.
#[track_caller]
fn assert_redacted(what: &str, text: &str) {
    let lower = text.to_lowercase();
    for secret in SECRETS {
        let list = format!("{:?}", secret.as_bytes());
        let list = list.trim_matches(['[', ']']);
        let hex = secret.bytes().fold(String::new(), |mut hex, byte| {
            write!(hex, "{byte:02x}").unwrap();
            hex
        });
        for form in [secret, list, &hex] {
            let Some(at) = lower.find(form) else { continue };
            let context = &text[at.saturating_sub(200)..(at + form.len()).min(text.len())];
            panic!("{what} shows {secret}: …{context}");
        }
    }
}

#[test]
fn the_search_finds_what_is_shown() {
    for shown in [
        format!("{KEY:?}"),
        format!("{:?}", KEY.as_bytes()),
        "x'6B33792D73336372657421'".into(),
        format!("{:?}", Bytes::from(BODY)),
    ] {
        assert!(
            std::panic::catch_unwind(|| assert_redacted("it", &shown)).is_err(),
            "{shown}"
        );
    }
    assert_redacted("it", "nothing of the kind");
}

/// A request of which everything but the path is secret.
fn secret(path: &str, key: &str) -> Request {
    let mut request = request("POST", &format!("{path}?{BODY}"), Some(key), BODY);
    for name in ["authorization", "cookie", "x-own"] {
        request
            .headers_mut()
            .insert(name, HeaderValue::from_static(HEADER));
    }
    request
}

fn keyed(path: &str) -> Request {
    secret(path, &format!("{KEY}{}", path.replace('/', "-")))
}

fn id(path: &str) -> RecordId {
    RecordId::new(
        Scope::new(SCOPE),
        IdempotencyKey::new(format!("{KEY}{}", path.replace('/', "-"))),
    )
}

fn handler() -> Handler {
    Handler::answering(|seen| {
        let response = Response::builder()
            .header("x-field", FIELD)
            .header("set-cookie", FIELD);
        match seen.uri.path() {
            "/panic" if seen.run % 2 == 0 => panic!("as the test wants"),
            "/bad" => response.status(400),
            "/broken" => {
                let body = support::bodies::Pieces::new([ANSWER]).then_error().body();
                return response.body(body).unwrap();
            }
            "/stream" => response.header("content-type", "text/event-stream"),
            _ => response,
        }
        .body(Body::from(ANSWER))
        .unwrap()
    })
}

every_store! {
    async fn no_secret_is_logged_whatever_happens(world: World) {
        let log = Written::everywhere();
        let store = world.open().await;
        let layer = IdempotencyLayer::new(store.clone())
            .scope(|_| Some(Scope::new(SCOPE)))
            .recovery(Recovery::rerun())
            .store_timeout(Duration::from_millis(50));
        let handler = handler();
        let app = handler.behind(layer.clone());
        let call = |mut request: Request| {
            let app = app.clone();
            // Some clients have one id for everything.
            let key = request.headers()["idempotency-key"].clone();
            request.headers_mut().insert("x-request-id", key);
            // In a task, so that a panic or a failing body ends nothing else.
            tokio::spawn(async move {
                let response = app.oneshot(request).await.unwrap();
                let _ = http_body_util::BodyExt::collect(response.into_body()).await;
            })
        };
        for path in ["/charges", "/bad", "/broken", "/stream", "/panic", "/panic-again"] {
            for _ in 0..3 {
                let _ = call(keyed(path)).await;
            }
        }
        let _ = call(secret("/other", &format!("{KEY}-charges"))).await;
        let observing = handler.behind(layer.clone().missing_key(MissingKey::Observe));
        for malformed in [format!("\"{KEY}"), format!("{KEY},{KEY}"), KEY.repeat(99)] {
            let _ = call(secret("/charges", &malformed)).await;
            send(&observing, secret("/charges", &malformed)).await;
        }
        for (operation, path) in [
            (Operation::Claim, "/claim"), (Operation::Complete, "/complete"), (Operation::Release, "/bad"), (Operation::Renew, "/renew"),
            (Operation::Purge, "/purge"),
        ] {
            for fault in [Fault::Before, Fault::After, Fault::HangBefore, Fault::HangAfter] {
                store.fail(operation, fault, Times::Next(2));
                let _ = call(secret(path, &format!("{KEY}-{operation:?}-{fault:?}"))).await;
                store.clear();
            }
        }
        // A claim that was taken away while its handler ran.
        let runs = handler.effects();
        handler.close_gate();
        let lost = call(keyed("/lost"));
        handler.reached(runs + 1).await;
        let _ = call(keyed("/lost")).await;
        assert!(store.inner().forget(&id("/lost")).await.unwrap());
        handler.open_gate();
        lost.await.unwrap();
        // A record that cannot be read back.
        let (head, _) = keyed("/damaged").into_parts();
        let fingerprint = ExactRequest.fingerprint(&head, &Bytes::from(BODY)).unwrap();
        let claim = ClaimRequest::new(id("/damaged"), "exact-v1", fingerprint);
        let Claim::Won(ticket) = store.inner().claim(claim).await.unwrap() else { panic!("not won") };
        assert_eq!(store.inner().save(&ticket, "name", CHECKPOINT.into()).await.unwrap(), tower_idempotency::store::Settled::Done);
        let damaged = Completion::retained(StatusCode::OK, ANSWER.into());
        let _ = store.inner().complete(&ticket, damaged, Lifetimes::new(Duration::from_secs(60))).await.unwrap();
        let _ = call(keyed("/damaged")).await;
        // Without a scope there is a warning, without a store a run without protection.
        let open = handler.behind(
            IdempotencyLayer::new(store.clone()).store_failure(StoreFailure::RunUnprotected),
        );
        send(&open, keyed("/unscoped")).await;
        store.fail(Operation::Claim, Fault::Before, Times::Next(3));
        send(&open, keyed("/unprotected")).await;
        let failing = service_fn(|_: Request| async { Err::<Response<Body>, _>(io::Error::other("down")) });
        layer.layer(failing).oneshot(keyed("/fails")).await.unwrap_err();
        // The real thing breaks underneath.
        if world.is_durable() {
            for table in ["checkpoints", "records", "owners", "meta"] {
                world.tamper(&format!("DROP TABLE idempotency_{table}")).await;
            }
            let _ = call(keyed("/no-tables")).await;
            assert!(store.inner().get(&id("/charges")).await.is_err());
        }
        // A run that drain has to abort.
        let runs = handler.effects();
        handler.close_gate();
        let draining = IdempotencyLayer::new(MemoryStore::new()).scope(|_| Some(Scope::new(SCOPE)));
        let aborted = handler.behind(draining.clone());
        let running = tokio::spawn(async move { aborted.oneshot(keyed("/aborted")).await });
        handler.reached(runs + 1).await;
        let drained = draining.drain(Duration::from_millis(1)).await;
        assert_eq!(drained.aborted, 1);
        running.await.unwrap().unwrap();
        handler.open_gate();

        let text = log.text();
        for heard in [
            "idempotency decision", "idempotency store failed", "did not answer in time", "not written within store_timeout",
            "request without an idempotency key passed", "idempotency.status=",
            "idempotent run abandoned", "claim lost", "retained response cannot be read", "has no scope", "replayed", "unprotected",
        ] {
            assert!(text.contains(heard), "the log is deaf to {heard:?}");
        }
        if world.is_durable() {
            assert!(text.contains("sqlx"), "sqlx says nothing at all");
        }
        assert_redacted("the log", &text);
    }

    async fn no_secret_is_shown_by_debug_or_display(world: World) {
        let mut shown = String::new();
        let mut show = |value: &dyn Debug| writeln!(shown, "{value:?} {value:#?}").unwrap();
        let seen = Arc::new(Mutex::new(None));
        let keep = seen.clone();
        let handler = axum::routing::any(move |idempotency: Idempotency| async move {
            *keep.lock().unwrap() = Some(idempotency);
            (StatusCode::OK, [("x-field", FIELD)], ANSWER)
        });
        let store = world.open().await;
        let layer = IdempotencyLayer::new(store.clone())
            .scope(|_| Some(Scope::new(SCOPE)))
            .key_format(KeyFormat::any().check("short", |key| key.len() < 100));
        let app = axum::Router::new().route("/charges", handler);
        let mut service = layer.layer(app);
        show(&layer);
        show(&service);
        let ready = ServiceExt::<Request>::ready(&mut service).await.unwrap();
        let future = ready.call(keyed("/charges"));
        show(&future);
        future.await.unwrap();
        show(&seen.lock().unwrap().take().unwrap());

        let record = store.inner().get(&id("/charges")).await.unwrap().unwrap();
        let stored = record.response.clone().unwrap();
        show(&record);
        show(&RetainedResponse::decode(stored.clone()));
        let claim = ClaimRequest::new(record.id.clone(), "exact-v1", record.fingerprint);
        show(&claim);
        let completed = store.inner().claim(claim.clone()).await.unwrap();
        assert!(matches!(completed, Claim::Completed(_)));
        show(&completed);
        let other = ClaimRequest::new(id("/other"), "exact-v1", record.fingerprint);
        let Claim::Won(ticket) = store.inner().claim(other.clone()).await.unwrap() else { panic!("not won") };
        show(&ticket);
        show(&store.inner().claim(other).await.unwrap());
        show(&Completion::retained(StatusCode::OK, stored));
        show(&store.inner().save(&ticket, "name", CHECKPOINT.into()).await.unwrap());
        show(&store.inner().load(&ticket).await.unwrap());
        show(&Checkpoint::new("name", CHECKPOINT.into()));
        show(&(IdempotencyKey::new(KEY), Scope::new(SCOPE), id("/charges")));
        show(&store);
        show(&store.inner());
        show(&(MemoryStore::new(), MemoryStore::options(), AnyStore::new(MemoryStore::new())));

        store.fail(Operation::Get, Fault::Before, Times::Once);
        show(&store.get(&id("/charges")).await.unwrap_err());
        for value in [format!("\"{KEY}"), format!("{KEY};{KEY}"), KEY.repeat(99)] {
            let invalid = KeyFormat::any().parse(value.as_bytes()).unwrap_err();
            show(&invalid);
            show(&Rejection::KeyInvalid(invalid));
            let text: &dyn Display = &invalid;
            show(&text.to_string());
        }
        show(&(KeyFormat::uuid(), InvalidKey::Blank, UndecodableBody("why")));
        let too_large = store.inner().save(&ticket, "name", CHECKPOINT.repeat(9_999).into()).await;
        let error = too_large.unwrap_err();
        show(&error);
        show(&error.to_string());

        assert!(shown.contains("IdempotencyKey(") && shown.contains("Scope("), "{shown}");
        assert_redacted("Debug", &shown);
    }
}

every_store! {
    #[cfg(all(feature = "multipart", feature = "sealing"))]
    async fn no_secret_of_schemes_limits_and_sealed_records_is_logged_or_shown(world: World) {
        const FORM: &str = "multipart/form-data; boundary=b0undary";
        let log = Written::everywhere();
        let mut shown = String::new();
        let inner = world.open().await;
        let sealed = async |writes: u8| {
            let keys = SealingKeys::new("2026-12", [writes; 32]).hash_ids(*b"hash-key-s3cret-hash-key-s3cret!");
            let shown = format!("{keys:?}");
            (SealedStore::open(inner.clone(), keys).await.unwrap(), shown)
        };
        let (store, keys) = sealed(0x5e).await;
        let layer = || {
            IdempotencyLayer::new(store.clone())
                .scope(|_| Some(Scope::new(SCOPE)))
                .profile(Profile::Gateway)
                .replay_provenance()
                .status_header()
        };
        let handler = handler();
        let shown_layer = format!("{:?}", layer().fingerprint(CanonicalJson::new().ignoring(["/a"])));
        let json = handler.behind(layer().fingerprint(CanonicalJson::new()).also_accept(ExactRequest));
        let form = handler.behind(layer().fingerprint(MultipartParts::new()));
        let own = handler.behind(layer().fingerprint(fingerprint_fn("own-v1", |_, body| {
            match body.starts_with(b"{") {
                true => Ok(Fingerprint::of([body])),
                false => Err(UndecodableBody("it begins with no brace")),
            }
        })));
        let with = |path: &str, content_type: &'static str, body: String| {
            let mut request = keyed(path);
            request.headers_mut().insert("content-type", HeaderValue::from_static(content_type));
            *request.body_mut() = Body::from(body);
            request
        };
        let part = |name: &str| format!("--b0undary\r\ncontent-disposition: form-data; name=\"{name}\"\r\nx-own: {HEADER}\r\n\r\n{BODY}\r\n");
        for _ in 0..2 {
            send(&json, with("/json", "application/json", format!("{{\"{BODY}\":1}}"))).await;
            send(&json, with("/reuse", "application/json", format!("{{\"{BODY}\":1}}"))).await;
            send(&json, with("/reuse", "application/json", format!("{{\"{BODY}\":2}}"))).await;
            send(&form, with("/form", FORM, part(BODY) + "--b0undary--\r\n")).await;
        }
        let deep = "[".repeat(999);
        for (app, content_type, body) in [
            (&json, "application/json", format!("{{\"{BODY}\":1,\"{BODY}\":2}}")),
            (&json, "application/json", format!("{{\"{BODY}\":{deep}")),
            (&form, FORM, part(BODY)),
            (&form, FORM, format!("--b0undary\r\n{HEADER}: {BODY}")),
            (&form, "multipart/form-data", part(BODY)),
            (&own, "text/plain", BODY.to_owned()),
        ] {
            let refused = send(app, with("/undecodable", content_type, body)).await;
            assert_eq!(refused.json()["error"]["code"], "idempotency_body_invalid");
            assert_redacted("a refusal", &String::from_utf8_lossy(&refused.body));
        }
        // A limit, with a sample that fails.
        let limited = handler.behind(layer().scope_limit(1));
        inner.fail(Operation::CountIn, Fault::Before, Times::Once);
        for n in 0..2000 {
            let answer = send(&limited, keyed(&format!("/limited-{n}"))).await;
            if answer.status == StatusCode::TOO_MANY_REQUESTS {
                shown += &String::from_utf8_lossy(&answer.body);
                break;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert!(shown.contains("idempotency_limit_reached"));
        // Another key under the same id, and no key at all.
        let (wrong, wrong_keys) = sealed(0x5f).await;
        let wrong_layer = IdempotencyLayer::new(wrong.clone()).scope(|_| Some(Scope::new(SCOPE))).fingerprint(CanonicalJson::new());
        let request = with("/json", "application/json", format!("{{\"{BODY}\":1}}"));
        assert_eq!(send(&handler.behind(wrong_layer), request).await.said(), (503, "idempotency_store_unavailable".into()));
        let record = wrong.get(&id("/json")).await.unwrap().unwrap();
        let decoded = RetainedResponse::decode(record.response.clone().unwrap());
        let other_hash = SealingKeys::new("2026-12", [0x5e; 32]).hash_ids([1; 32]);
        let refused = SealedStore::open(inner.clone(), other_hash).await.unwrap_err();
        let bad = "s3cret-key".parse::<SealingKey>().unwrap_err();
        write!(shown, "{keys} {wrong_keys} {store:?} {record:?} {decoded:?} {refused:?} {refused} {bad:?} {bad} {shown_layer}").unwrap();
        for secret in ["hash-key-s3cret", "s3cret-key", "5e5e5e", "[94, 94", "5f5f5f", "[95, 95"] {
            assert!(!shown.contains(secret) && !log.text().contains(secret), "{secret} is shown");
        }
        assert_redacted("Debug", &shown);
        let text = log.text();
        for heard in ["limit_reached", "retained response cannot be read", "2026-12", "idempotency store failed", "reused"] {
            assert!(text.contains(heard), "the log is deaf to {heard:?}");
        }
        assert_redacted("the log", &text);
    }
}

#[tokio::test]
async fn a_store_that_cannot_be_opened_does_not_show_what_is_in_its_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("other.db");
    std::fs::write(&file, BODY.repeat(1000)).unwrap();
    let error = SqliteStore::open(&file).await.unwrap_err();
    assert_redacted(
        "the error",
        &format!("{error:?} {error} {:?}", std::error::Error::source(&error)),
    );
    let store = FaultyStore::new(AnyStore::new(
        SqliteStore::open(folder.path().join("a.db")).await.unwrap(),
    ));
    assert_redacted("the store", &format!("{store:?}"));
}

/// A client that has one value for everything.
fn of_one_value(value: &str) -> Request {
    let mut request = post(value, "A");
    let id = HeaderValue::from_str(value).unwrap();
    request.headers_mut().insert("x-request-id", id);
    request
}

every_store! {
    async fn a_key_that_is_the_requests_id_too_is_not_kept_as_one(world: World) {
        let store = world.open().await;
        let layer = IdempotencyLayer::new(store.clone()).single_tenant();
        let app = Handler::new().behind(layer.clone());
        let quoted = format!("\"{KEY}-quoted\"");
        for (sent, key) in [(KEY, KEY), (&*quoted, &quoted[1..quoted.len() - 1])] {
            assert_eq!(send(&app, of_one_value(sent)).await.status, 201);
            let found = record(&store, key).await.unwrap();
            assert_eq!(found.request_id, None);
            assert_redacted("a record", &format!("{found:?}"));
        }
        // Nor is any where keys and ids come from one header.
        let one = Handler::new().behind(layer.request_id_header("idempotency-key".parse().unwrap()));
        assert_eq!(send(&one, post("another", "A")).await.status, 201);
        assert_eq!(record(&store, "another").await.unwrap().request_id, None);
        // Any other id is kept.
        let mut request = post("third", "A");
        request.headers_mut().insert("x-request-id", HeaderValue::from_static("req-3"));
        send(&app, request).await;
        let found = record(&store, "third").await.unwrap();
        assert_eq!(found.request_id.as_deref(), Some("req-3"));
    }
}

#[cfg(all(feature = "multipart", feature = "sealing"))]
#[tokio::test]
async fn under_hashed_names_a_key_that_is_the_requests_id_too_is_not_in_the_store() {
    for world in World::durable() {
        let keys = SealingKeys::new("k", [7; 32]).hash_ids([9; 32]);
        let store = SealedStore::open(world.open().await, keys).await.unwrap();
        let app = Handler::new().behind(IdempotencyLayer::new(store.clone()).single_tenant());
        for sent in [KEY.to_owned(), format!("\"{KEY}-quoted\"")] {
            assert_eq!(send(&app, of_one_value(&sent)).await.status, 201);
            assert!(send(&app, of_one_value(&sent)).await.replay);
        }
        store.close().await.unwrap();
        let raw = world.raw().await.unwrap();
        assert!(!raw.is_empty());
        let found = raw.windows(KEY.len()).any(|part| part == KEY.as_bytes());
        assert!(!found, "the key is in the store");
    }
}

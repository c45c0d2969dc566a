//! An existing service is moved over: requests without a usable key pass as before, and somebody sees how
//! many there still are.

mod support;

use axum::{
    Router,
    body::Body,
    http::{HeaderValue, Request},
    routing::any,
};
use support::{logs::Logs, *};
use tower::ServiceExt;
use tower_http::catch_panic::CatchPanicLayer;
use tower_idempotency::{
    Idempotency, IdempotencyLayer, IdempotentResponse, KeyFormat, MissingKey, Profile,
};

const PASSED: &str = "request without an idempotency key passed";

fn observing(store: &TestStore) -> IdempotencyLayer<TestStore> {
    IdempotencyLayer::new(store.clone())
        .single_tenant()
        .status_header()
        .missing_key(MissingKey::Observe)
}

/// The fields of those that passed, in the order of their coming.
fn passed(logs: &Logs) -> Vec<String> {
    let all = logs.all().into_iter();
    all.filter(|event| event.text.contains(PASSED))
        .map(|event| {
            assert_eq!(event.level, tracing::Level::INFO);
            event.text
        })
        .collect()
}

/// A request with these lines as its key.
fn lines(method: &str, lines: &[&[u8]]) -> Request<Body> {
    let mut request = request(method, "/charges/s3cret", None, "A");
    for line in lines {
        let value = HeaderValue::from_bytes(line).unwrap();
        request.headers_mut().append("idempotency-key", value);
    }
    request
}

/// What each of these is: nothing wrong, without a key, or with one that is none.
const MALFORMED: [&[&[u8]]; 7] = [
    &[b"\"s3cret"],
    &[b""],
    &[b"  "],
    &[b"\"\""],
    &[b"s3cret", b"s3cret"],
    &[b"s3cret, s3cret"],
    &[b"s3cret\xff"],
];

#[tokio::test]
async fn keyless_and_malformed_requests_pass_untouched_and_are_said() {
    for world in World::each() {
        let (logs, _guard) = Logs::of_this_thread();
        let store = world.open().await;
        let handler = Handler::new();
        let app = handler.behind(observing(&store));
        let mut requests = vec![("missing", "idempotency_key_required", lines("POST", &[]))];
        for malformed in MALFORMED {
            for method in ["POST", "PATCH"] {
                let request = lines(method, malformed);
                requests.push(("invalid", "idempotency_key_invalid", request));
            }
        }
        for (at, (problem, code, request)) in requests.into_iter().enumerate() {
            let method = request.method().clone();
            let response = app.clone().oneshot(request).await.unwrap();
            assert_eq!(response.idempotency_status(), None);
            let answer = Answer::of(response).await;
            assert_eq!((answer.status.as_u16(), handler.effects()), (201, at + 1));
            for header in ["idempotency-status", "idempotent-replay"] {
                assert_eq!(answer.header(header), None);
            }
            let said = passed(&logs);
            assert_eq!(said.len(), at + 1);
            for field in [
                format!("problem=\"{problem}\""),
                format!("code=\"{code}\""),
                format!("method=\"{method}\""),
                // The template, not the path.
                "route=\"/{*path}\"".to_owned(),
            ] {
                assert!(said[at].contains(&field), "{field}: {}", said[at]);
            }
        }
        // No record, and no other event; and nothing of what was sent.
        assert_eq!((store.total_calls(), records(&store).await), (0, 0));
        let all = logs.all();
        assert_eq!(all.len(), passed(&logs).len(), "{all:?}");
        assert!(all.iter().all(|event| !event.text.contains("s3cret")));
    }
}

#[tokio::test]
async fn a_usable_key_is_honoured_as_ever() {
    for world in World::each() {
        let (logs, _guard) = Logs::of_this_thread();
        let store = world.open().await;
        let handler = Handler::new();
        let app = handler.behind(observing(&store));
        for method in ["POST", "PATCH"] {
            let send = |body: &'static str| send(&app, request(method, "/a", Some(method), body));
            let effects = handler.effects();
            let first = send("A").await;
            assert_eq!(first.header("idempotency-status"), Some("executed"));
            let replay = send("A").await;
            assert_eq!(replay.body, first.body);
            assert_eq!(replay.header("idempotency-status"), Some("replayed"));
            assert_eq!(send("B").await.code(), "idempotency_key_reused");
            assert_eq!(handler.effects(), effects + 1);
        }
        assert!(passed(&logs).is_empty());
    }
}

// H1: what needs no key is not counted as missing one.
#[tokio::test]
async fn only_what_would_have_been_refused_is_said() {
    let (logs, _guard) = Logs::of_this_thread();
    let store = World::memory().open().await;
    let handler = Handler::new();
    let required = handler.behind(observing(&store));
    let optional = handler.behind(observing(&store).optional());
    let refusing = handler.behind(observing(&store).missing_key(MissingKey::Refuse));
    let mut said = 0;
    for method in ["GET", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "POST"] {
        for key in [None, Some("\"broken")] {
            let refused = send(&refusing, request(method, "/a", key, "A"))
                .await
                .status
                == 400;
            said += usize::from(refused);
            let answer = send(&required, request(method, "/a", key, "A")).await;
            assert_eq!(answer.status, 201, "{method} {key:?}");
            assert_eq!(passed(&logs).len(), said, "{method} {key:?}");
            // Where none is required, only a broken one is wrong.
            let covered = key.is_some() && ["PATCH"].contains(&method);
            send(&optional, request(method, "/a", key, "A")).await;
            said += usize::from(covered || (key.is_some() && method == "POST"));
            assert_eq!(passed(&logs).len(), said, "{method} {key:?}");
        }
    }
    assert_eq!(
        said,
        3 + 2,
        "POST without, POST and PATCH with a broken one, and these two again"
    );
}

// The same key, longer than it may be, or in another form than the service takes.
#[tokio::test]
async fn what_the_format_refuses_is_malformed_as_well() {
    let (logs, _guard) = Logs::of_this_thread();
    let store = World::memory().open().await;
    let handler = Handler::new();
    let profile = observing(&store)
        .profile(Profile::Ietf)
        .key_format(KeyFormat::uuid());
    let app = handler.behind(profile.missing_key(MissingKey::Observe));
    for key in ["order-17", &"k".repeat(256)] {
        assert_eq!(send(&app, post(key, "A")).await.status, 201);
    }
    let said = passed(&logs);
    assert_eq!(said.len(), 2);
    assert!(said.iter().all(|text| text.contains("problem=\"invalid\"")));
    assert!(
        said.iter()
            .all(|text| !text.contains("order-17") && !text.contains("kkk"))
    );
}

#[tokio::test]
async fn handlers_are_told_that_there_is_no_claim() {
    let store = World::memory().open().await;
    let told = |claim: Option<Idempotency>| async move {
        claim.map_or("none".to_owned(), |claim| claim.attempt().to_string())
    };
    let wanted = |claim: Idempotency| async move { claim.attempt().to_string() };
    let app = Router::new()
        .route("/told", any(told))
        .route("/wanted", any(wanted))
        .route_layer(observing(&store))
        .layer(CatchPanicLayer::new());
    for (path, key, status, body) in [
        ("/told", None, 200, "none"),
        ("/told", Some("\"broken"), 200, "none"),
        ("/told", Some("a"), 200, "1"),
        ("/wanted", Some("b"), 200, "1"),
    ] {
        let answer = send(&app, request("POST", path, key, "A")).await;
        assert_eq!(
            (answer.status.as_u16(), &*answer.body),
            (status, body.as_bytes())
        );
    }
    // Handler and layer disagree.
    let answer = send(&app, request("POST", "/wanted", None, "A")).await;
    assert_eq!(answer.status, 500);
}

// Request ids are told, unless they are the key.
#[tokio::test]
async fn the_request_is_named_by_its_id() {
    let (logs, _guard) = Logs::of_this_thread();
    let store = World::memory().open().await;
    let app = Handler::new().behind(observing(&store));
    let with = |id: &str, line: &'static [u8]| {
        let mut request = lines("POST", &[line]);
        request
            .headers_mut()
            .insert("x-request-id", id.parse().unwrap());
        request
    };
    for (id, line, shown) in [
        ("req-1", &b"\"k3y-s3cret"[..], true),
        ("k3y-s3cret", b"\"k3y-s3cret", false),
        ("\"k3y-s3cret", b"\"k3y-s3cret", false),
        ("for-k3y-s3cret", b"k3y-s3cret,", false),
        ("k3y-s3cret", b"other, k3y-s3cret", false),
        ("my s3cret key", b"my s3cret key", false),
        ("\"s3cret", b"\"s3cret", false),
        ("s3cret", b"s3cret;", false),
        ("req-s3cret", b"s3cret;", true), // too short to mean anything
        ("req-2", b"", true),
    ] {
        let before = passed(&logs).len();
        send(&app, with(id, line)).await;
        let said = passed(&logs).split_off(before).concat();
        assert_eq!(
            said.contains(&format!("request_id=\"{id}\"")),
            shown,
            "{said}"
        );
    }
}

// Routes and routers may each have a layer.
#[tokio::test]
async fn a_request_that_passes_several_layers_is_said_once() {
    let (logs, _guard) = Logs::of_this_thread();
    let store = World::memory().open().await;
    let handler = Handler::new();
    let inner = handler.behind(observing(&store));
    let app = inner.layer(observing(&store)).layer(observing(&store));
    for (at, request) in [lines("POST", &[]), lines("POST", MALFORMED[0])]
        .into_iter()
        .enumerate()
    {
        assert_eq!(send(&app, request).await.status, 201);
        assert_eq!((passed(&logs).len(), handler.effects()), (at + 1, at + 1));
    }
}

#[tokio::test]
async fn keyless_requests_pass_while_the_layer_drains_and_keyed_ones_are_refused() {
    let store = World::memory().open().await;
    let layer = observing(&store);
    let app = Handler::new().behind(layer.clone());
    layer.drain(std::time::Duration::ZERO).await;
    assert_eq!(send(&app, lines("POST", &[])).await.status, 201);
    let refused = send(&app, post("k", "A")).await;
    assert_eq!(refused.code(), "idempotency_overloaded");
}

// Like a request to which no key applies, a transaction of its own included.
#[tokio::test]
async fn in_transactional_mode_the_handler_has_an_ordinary_transaction() {
    use tower_idempotency::{SqliteStore, Tx, TxError};

    let folder = tempfile::tempdir().unwrap();
    let store = SqliteStore::open(folder.path().join("a.db")).await.unwrap();
    let insert = |mut tx: Tx<sqlx::Sqlite>, body: String| async move {
        sqlx::query("CREATE TABLE IF NOT EXISTS effects (name TEXT)")
            .execute(&mut tx)
            .await?;
        sqlx::query("INSERT INTO effects VALUES (?)")
            .bind(&body)
            .execute(&mut tx)
            .await?;
        let count: i64 = sqlx::query_scalar("SELECT count(*) FROM effects")
            .fetch_one(&mut tx)
            .await?;
        Ok::<_, TxError>(match &*body {
            "refused" => (axum::http::StatusCode::CONFLICT, count.to_string()),
            _ => (axum::http::StatusCode::CREATED, count.to_string()),
        })
    };
    let layer = IdempotencyLayer::new(store).single_tenant().transactional();
    let app = Router::new()
        .route("/charges", any(insert))
        .route_layer(layer.missing_key(MissingKey::Observe));
    for (key, body, status, count) in [
        (None, "a", 201, "1"),
        (None, "refused", 409, "2"), // rolled back
        (Some("\"broken"), "a", 201, "2"),
        (Some("k"), "a", 201, "3"),
        (Some("k"), "a", 201, "3"), // a replay
        (None, "a", 201, "4"),
    ] {
        let answer = send(&app, request("POST", "/charges", key, body)).await;
        assert_eq!(
            (answer.status.as_u16(), &*answer.body),
            (status, count.as_bytes()),
            "{key:?}"
        );
    }
}

#[cfg(feature = "metrics")]
#[tokio::test]
async fn each_is_counted_by_what_is_wrong() {
    use support::metrics::Collected;

    const UNKEYED: &str = "idempotency_unkeyed_total";

    for world in World::each() {
        let (collected, _alone) = Collected::of_this_thread();
        let store = world.open().await;
        let handler = Handler::new();
        let app = handler.behind(observing(&store));
        for _ in 0..3 {
            send(&app, lines("POST", &[])).await;
        }
        for malformed in MALFORMED {
            send(&app, lines("POST", malformed)).await;
        }
        send(&app, lines("PATCH", MALFORMED[0])).await;
        for request in [
            lines("PATCH", &[]),
            lines("GET", MALFORMED[0]),
            post("a", "A"),
        ] {
            send(&app, request).await;
        }
        let expected = [("missing".to_owned(), 3), ("invalid".to_owned(), 8)];
        assert_eq!(collected.by_label(UNKEYED), expected.into());
        // Of one that passes several layers, the outermost counts.
        let app = app.layer(observing(&store));
        send(&app, lines("POST", &[])).await;
        let expected = [("missing".to_owned(), 4), ("invalid".to_owned(), 8)];
        assert_eq!(collected.by_label(UNKEYED), expected.into());
        // No decision was made on them.
        let decided = collected.by_label("idempotency_requests_total");
        assert_eq!(decided, [("executed".to_owned(), 1)].into());
        assert_eq!(handler.effects(), 3 + 8 + 3 + 1);
    }
}

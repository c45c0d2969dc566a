//! One caller's key never meets another's, wherever the layer stands, and a full store takes no
//! caller's records away.

mod support;

use std::{sync::atomic::Ordering, time::Duration};

use axum::{
    Router,
    body::Body,
    extract::Request,
    http::{Response, StatusCode},
    middleware::{Next, from_fn},
    response::IntoResponse,
    routing::{any, post as route_post},
};
use bytes::Bytes;
use support::{bodies::Pieces, logs::Logs, *};
use tower::{Layer, ServiceExt, service_fn};
use tower_idempotency::{
    AnyStore, ExactRequest, FingerprintScheme, IdempotencyKey, IdempotencyLayer, MemoryStore,
    RecordId, Scope, SqliteStore,
    store::Inspect,
    testing::{FakeClock, FaultyStore},
};

/// Scopes by the header `x-tenant`.
fn by_tenant(store: TestStore) -> IdempotencyLayer<TestStore> {
    IdempotencyLayer::new(store).scope(|head| {
        let tenant = head.headers.get("x-tenant")?;
        Some(Scope::new(tenant.as_bytes()))
    })
}

fn from(tenant: &str, key: &str, body: &'static str) -> Request {
    let mut request = post(key, body);
    request
        .headers_mut()
        .insert("x-tenant", tenant.parse().unwrap());
    request
}

async fn scoped_record(
    store: &TestStore,
    scope: &[u8],
    key: &str,
) -> Option<tower_idempotency::Record> {
    let id = RecordId::new(Scope::new(scope), IdempotencyKey::new(key));
    store.inner().get(&id).await.unwrap()
}

/// Whoever the bearer token belongs to.
#[derive(Clone)]
struct Merchant(String);

/// Authentication outside: tokens are `merchant.nonce`, and rotate.
async fn authenticate(mut request: Request, next: Next) -> Response<Body> {
    let token = request.headers().get("authorization");
    let token = token.and_then(|token| token.to_str().ok()?.strip_prefix("Bearer "));
    let Some((merchant, _)) = token.and_then(|token| token.split_once('.')) else {
        return StatusCode::UNAUTHORIZED.into_response();
    };
    let merchant = Merchant(merchant.to_owned());
    request.extensions_mut().insert(merchant);
    next.run(request).await
}

every_store! {
    // S1
    async fn two_callers_with_one_key_each_get_their_own_answer(world: World) {
        let handler = Handler::answering(|seen| {
            let tenant = seen.headers["x-tenant"].to_str().unwrap();
            Response::new(Body::from(format!("the iban of {tenant}")))
        });
        let store = world.open().await;
        let app = handler.behind(by_tenant(store.clone()));
        let one = send(&app, from("one", "K", "A")).await;
        let two = send(&app, from("two", "K", "A")).await;
        assert_eq!((&one.body[..], &two.body[..]), (&b"the iban of one"[..], &b"the iban of two"[..]));
        assert!(!two.replay);
        assert_eq!(handler.effects(), 2);
        assert_eq!(records(&store).await, 2);
        send(&app, from("one", "K", "A")).await.assert_replays(&one);
        send(&app, from("two", "K", "A")).await.assert_replays(&two);
        assert_eq!(handler.effects(), 2);
    }

    // S1
    async fn scope_and_key_are_never_joined(world: World) {
        let handler = Handler::new();
        let store = world.open().await;
        let app = handler.behind(by_tenant(store.clone()));
        for (tenant, key) in [("ab", "c"), ("a", "bc"), ("abc", "x"), ("a:b", "c"), ("a", "b:c")] {
            assert!(!send(&app, from(tenant, key, "A")).await.replay, "{tenant} {key}");
        }
        assert_eq!(handler.effects(), 5);
        assert_eq!(records(&store).await, 5);
    }

    // S2
    async fn a_caller_without_a_scope_is_refused_and_leaves_nothing_behind(world: World) {
        let handler = Handler::new();
        let store = world.open().await;
        let app = handler.behind(by_tenant(store.clone()));
        let body = Pieces::endless("x");
        let taken = body.taken();
        let answer = send(&app, post("K", body.body())).await;
        assert_eq!(answer.said(), (403, "idempotency_scope_unknown".into()));
        assert_eq!(taken.load(Ordering::SeqCst), 0, "the body was read");
        assert_eq!((handler.effects(), store.total_calls(), records(&store).await), (0, 0, 0));
        // What needs no key needs no scope.
        assert_eq!(send(&app, request("GET", "/", Some("K"), "")).await.status, 201);
        assert_eq!(send(&app, request("PATCH", "/", None, "")).await.status, 201);
        // A bad key is said before whose it is.
        let answer = send(&app, post("\"", "A")).await;
        assert_eq!(answer.said(), (400, "idempotency_key_invalid".into()));
    }

    // S2
    async fn unknown_callers_share_one_bucket_where_that_is_chosen(world: World) {
        let handler = Handler::new();
        let layer = IdempotencyLayer::new(world.open().await).scope(|head| {
            let tenant = head.headers.get("x-tenant").map(|tenant| Scope::new(tenant.as_bytes()));
            Some(tenant.unwrap_or_else(|| Scope::new("anonymous")))
        });
        let app = handler.behind(layer);
        let first = send(&app, post("K", "A")).await;
        send(&app, post("K", "A")).await.assert_replays(&first);
        assert!(!send(&app, from("one", "K", "A")).await.replay);
        assert_eq!(handler.effects(), 2);
    }

    // S2
    async fn a_scope_may_have_255_bytes_of_any_kind_and_no_more(world: World) {
        let handler = Handler::new();
        let store = world.open().await;
        let layer = IdempotencyLayer::new(store.clone()).scope(|head| {
            head.extensions.get::<Bytes>().map(Scope::new)
        });
        let app = handler.behind(layer);
        let scoped = |scope: &[u8]| {
            let mut request = post("K", "A");
            request.extensions_mut().insert(Bytes::copy_from_slice(scope));
            request
        };
        let answer = send(&app, scoped(&[b'a'; 256])).await;
        assert_eq!(answer.said(), (403, "idempotency_scope_unknown".into()));
        assert_eq!((handler.effects(), store.total_calls()), (0, 0));

        let mut last = [0xff; 255];
        last[254] = 0xfe;
        let scopes: [&[u8]; _] = [&[0xff; 255], &last, &[0; 255], &[0; 254], b"", b"\0", b"a\0b", b"a"];
        for scope in scopes {
            assert!(!send(&app, scoped(scope)).await.replay, "{scope:x?} met another");
        }
        for scope in scopes {
            assert!(send(&app, scoped(scope)).await.replay);
            assert!(scoped_record(&store, scope, "K").await.is_some());
        }
        assert_eq!(handler.effects(), scopes.len());
    }

    // S4
    async fn a_key_another_caller_used_first_is_still_free(world: World) {
        let handler = Handler::new();
        let app = handler.behind(by_tenant(world.open().await));
        let two = send(&app, from("two", "K", "B")).await;
        let one = send(&app, from("one", "K", "A")).await;
        assert_eq!((one.status.as_u16(), one.replay), (201, false));
        assert_ne!(one.body, two.body);
        assert_eq!(handler.effects(), 2);

        // Nor does a run of another caller hold it up.
        handler.close_gate();
        let held = tokio::spawn({
            let app = app.clone();
            async move { send(&app, from("two", "J", "B")).await }
        });
        handler.reached(3).await;
        let started = tokio::spawn(async move { send(&app, from("one", "J", "A")).await });
        handler.reached(4).await;
        handler.open_gate();
        assert_eq!(held.await.unwrap().status, 201);
        assert_eq!(started.await.unwrap().status, 201);
    }

    // S5
    async fn one_key_on_two_nests_is_refused_though_both_see_the_same_path(world: World) {
        let handler = Handler::new();
        let layer = IdempotencyLayer::new(world.open().await).single_tenant();
        let app = Router::new()
            .nest("/v1", handler.behind(layer.clone()))
            .nest("/v2", handler.behind(layer));
        let first = send(&app, request("POST", "/v1/orders", Some("K"), "A")).await;
        assert_eq!(first.status, 201);
        let other = send(&app, request("POST", "/v2/orders", Some("K"), "A")).await;
        assert_eq!(other.said(), (409, "idempotency_key_reused".into()));
        assert!(other.json()["detail"].as_str().unwrap().contains("POST /v2/orders"));
        assert_eq!(handler.effects(), 1);
    }

    // S5
    async fn moving_the_layer_changes_nothing_for_stored_keys(world: World) {
        let handler = Handler::new();
        let store = world.open().await;
        let layer = || IdempotencyLayer::new(store.clone()).single_tenant();
        let inner = || handler.router();
        let orders = || {
            let handler = handler.clone();
            route_post(move |request: Request| async move {
                handler.router().oneshot(request).await.unwrap()
            })
        };
        let service = || {
            let router = handler.router();
            service_fn(move |request: Request| router.clone().oneshot(request))
        };
        let places: Vec<(&str, Router)> = vec![
            ("route_layer of a flat router", Router::new().route("/v1/orders", orders()).route_layer(layer())),
            ("layer of a flat router", Router::new().route("/v1/orders", orders()).layer(layer())),
            ("layer of a method router", Router::new().route("/v1/orders", orders().layer(layer()))),
            ("route_layer of a method router", Router::new().route("/v1/orders", orders().route_layer(layer()))),
            ("layer inside a nest", Router::new().nest("/v1", inner().layer(layer()))),
            ("route_layer inside a nest", Router::new().nest("/v1", inner().route_layer(layer()))),
            ("layer outside a nest", Router::new().nest("/v1", inner()).layer(layer())),
            ("route_layer outside a nest", Router::new().nest("/v1", inner()).route_layer(layer())),
            ("nest with a parameter", Router::new().nest("/{version}", inner().route_layer(layer()))),
            ("two nests deep", Router::new().nest("/v1", Router::new().nest("/orders", inner().route_layer(layer())))),
            ("layer outside nest_service", Router::new().nest_service("/v1", service()).layer(layer())),
            ("layer inside nest_service", Router::new().nest_service("/v1", layer().layer(service()))),
            ("route_service", Router::new().route_service("/v1/orders", layer().layer(service()))),
            ("fallback", Router::new().fallback_service(layer().layer(service()))),
            ("fallback under layer", Router::new().fallback(orders()).layer(layer())),
            ("fallback inside a nest", Router::new().nest("/v1", Router::new().fallback(orders()).layer(layer()))),
            ("merged", Router::new().merge(Router::new().nest("/v1", inner().route_layer(layer())))),
            ("around the whole router", Router::new().fallback_service(layer().layer(Router::new().nest("/v1", inner())))),
        ];
        let uri = "/v1/orders?x=1";
        let (head, _) = request("POST", uri, None, "").into_parts();
        let expected = ExactRequest.fingerprint(&head, &Bytes::from("A")).unwrap();

        let first = send(&places[0].1, request("POST", uri, Some("K"), "A")).await;
        assert_eq!(first.status, 201);
        for (n, (place, app)) in places.iter().enumerate() {
            let retry = send(app, request("POST", uri, Some("K"), "A")).await;
            assert!(retry.replay, "{place}: {retry:?}");
            assert_eq!(retry.body, first.body, "{place}");
            let own = format!("own-{n}");
            let answer = send(app, request("POST", uri, Some(&own), "A")).await;
            assert_eq!(answer.status, 201, "{place}");
            assert_eq!(record(&store, &own).await.unwrap().fingerprint, expected, "{place}");
        }
        assert_eq!(handler.effects(), 1 + places.len());

        // Outside of any router there is no OriginalUri, and the URI is the client's own.
        let bare = layer().layer(Router::new().nest("/v1", inner()));
        let retry = bare.oneshot(request("POST", uri, Some("K"), "A")).await.unwrap();
        assert!(Answer::of(retry).await.replay);
    }

    // S6
    async fn a_scope_by_subject_survives_the_rotation_of_its_token(world: World) {
        let handler = Handler::new();
        let layer = IdempotencyLayer::new(world.open().await)
            .scope(|head| head.extensions.get::<Merchant>().map(|merchant| Scope::new(&merchant.0)));
        let app = handler.behind(layer).layer(from_fn(authenticate));
        let with = |token: &str| {
            let mut request = post("K", "A");
            request.headers_mut().insert("authorization", format!("Bearer {token}").parse().unwrap());
            request
        };
        let first = send(&app, with("m1.monday")).await;
        assert_eq!(first.status, 201);
        send(&app, with("m1.tuesday")).await.assert_replays(&first);
        assert_eq!(handler.effects(), 1);
        assert!(!send(&app, with("m2.monday")).await.replay);
        // A revoked credential gets 401 and no replay, because authentication is outside.
        assert_eq!(send(&app, with("revoked")).await.status, 401);
        assert_eq!(handler.effects(), 2);
    }

    // S6
    async fn a_scope_by_token_runs_again_when_the_token_rotates(world: World) {
        let handler = Handler::new();
        // Whoever scopes by the token itself sees each rotation as another caller: the documented mistake.
        let by_token = IdempotencyLayer::new(world.open().await).scope(|head| {
            head.headers.get("authorization").map(|token| Scope::new(token.as_bytes()))
        });
        let app = handler.behind(by_token);
        let with = |token: &str| {
            let mut request = post("K", "A");
            request.headers_mut().insert("authorization", token.parse().unwrap());
            request
        };
        assert!(!send(&app, with("Bearer m1.monday")).await.replay);
        assert!(!send(&app, with("Bearer m1.tuesday")).await.replay, "the retry ran again");
        assert_eq!(handler.effects(), 2);
    }

    // Narrower than the caller: F2's other right answer.
    async fn a_scope_per_route_lets_one_key_work_once_on_each(world: World) {
        let handler = Handler::new();
        let layer = IdempotencyLayer::new(world.open().await).scope(|head| {
            let tenant: u64 = head.headers.get("x-tenant")?.to_str().ok()?.parse().ok()?;
            Some(Scope::new([&tenant.to_be_bytes(), head.uri.path().as_bytes()].concat()))
        });
        let app = handler.behind(layer);
        let ask = async |tenant: &str, path: &str| {
            let mut request = request("POST", path, Some("K"), "A");
            request.headers_mut().insert("x-tenant", tenant.parse().unwrap());
            send(&app, request).await
        };
        for tenant in ["7", "8"] {
            let order = ask(tenant, "/orders").await;
            let refund = ask(tenant, "/refunds").await;
            assert_eq!((order.status.as_u16(), refund.status.as_u16()), (201, 201));
            ask(tenant, "/orders").await.assert_replays(&order);
            ask(tenant, "/refunds").await.assert_replays(&refund);
        }
        assert_eq!(handler.effects(), 4);
        // Whoever is no number is nobody.
        assert_eq!(ask("seven", "/orders").await.said(), (403, "idempotency_scope_unknown".into()));
    }

    // What the documentation of `Scope` warns of.
    async fn keys_live_under_the_scope_they_were_written_under(world: World) {
        let handler = Handler::new();
        let store = world.open().await;
        let before = handler.behind(IdempotencyLayer::new(store.clone()).single_tenant());
        let after = handler.behind(by_tenant(store.clone()));
        let first = send(&before, from("one", "K", "A")).await;
        assert!(!send(&after, from("one", "K", "A")).await.replay, "it runs again");
        // Rolled back, the old keys are found again.
        send(&before, from("one", "K", "A")).await.assert_replays(&first);
        assert_eq!((handler.effects(), records(&store).await), (2, 2));
        // The empty scope is the one that is shared.
        let empty = IdempotencyLayer::new(store).scope(|_| Some(Scope::new("")));
        send(&handler.behind(empty), from("one", "K", "A")).await.assert_replays(&first);
    }

    // S9
    async fn cheap_rejections_leave_no_record_behind(world: World) {
        let handler = Handler::answering(|seen| {
            let status: u16 = seen.uri.path()[1..].parse().unwrap();
            Response::builder().status(status).body(Body::empty()).unwrap()
        });
        let store = world.open().await;
        let layer = IdempotencyLayer::new(store.clone()).single_tenant().request_body_limit(8);
        let app = Router::new().route("/{status}", any({
            let handler = handler.router();
            move |request: Request| handler.oneshot(request)
        })).route_layer(layer);
        for n in 0..8 {
            let key = format!("k-{n}");
            for (uri, key, body, status) in [
                ("/400", Some(&key[..]), "A", 400), ("/404", Some(&key), "A", 404), ("/401", Some(&key), "A", 401),
                ("/429", Some(&key), "A", 429), ("/201", None, "A", 400), ("/201", Some("\""), "A", 400),
                ("/201", Some(&key), "too long a body", 413), ("/no/such/path", Some(&key), "A", 404),
            ] {
                let answer = send(&app, request("POST", uri, key, body)).await;
                assert_eq!(answer.status, status, "{uri} {key:?}");
            }
        }
        assert_eq!(handler.effects(), 4 * 8);
        assert_eq!(records(&store).await, 0);
    }
}

// S9
#[tokio::test]
async fn a_full_store_refuses_new_keys_and_leaves_all_others_as_they_are() {
    let folder = tempfile::tempdir().unwrap();
    let clock = FakeClock::new();
    let memory = MemoryStore::options()
        .clock(clock.clone())
        .max_records(3)
        .build();
    let sqlite = SqliteStore::options(folder.path().join("small.db"))
        .clock(clock.clone())
        .max_records(3);
    let stores = [
        ("memory", AnyStore::new(memory)),
        ("sqlite", AnyStore::new(sqlite.open().await.unwrap())),
    ];
    for (name, store) in stores {
        let store = FaultyStore::new(store);
        let handler = Handler::new();
        let layer = by_tenant(store.clone()).ttl(Duration::from_secs(60));
        let app = handler.behind(layer);
        let flood_1 = send(&app, from("flood", "1", "A")).await;
        let calm = send(&app, from("calm", "K", "A")).await;
        handler.close_gate();
        let held = tokio::spawn({
            let app = app.clone();
            async move { send(&app, from("flood", "2", "A")).await }
        });
        handler.reached(3).await;

        for tenant in ["flood", "calm"] {
            let refused = send(&app, from(tenant, "new", "A")).await;
            assert_eq!(
                refused.said(),
                (503, "idempotency_store_unavailable".into()),
                "{name}"
            );
            assert_eq!(refused.header("retry-after"), Some("1"));
        }
        assert_eq!(handler.effects(), 3);
        // What is there stays, the run in flight included.
        send(&app, from("calm", "K", "A"))
            .await
            .assert_replays(&calm);
        send(&app, from("flood", "1", "A"))
            .await
            .assert_replays(&flood_1);
        let in_flight = send(&app, from("flood", "2", "A")).await;
        assert_eq!(in_flight.code(), "idempotency_in_flight", "{name}");
        let reused = send(&app, from("calm", "K", "B")).await;
        assert_eq!(reused.code(), "idempotency_key_reused", "{name}");
        handler.open_gate();
        let held = held.await.unwrap();
        assert_eq!(held.status, 201, "a granted claim can always be completed");
        send(&app, from("flood", "2", "A"))
            .await
            .assert_replays(&held);

        // What needs no record is served.
        assert_eq!(
            send(&app, request("PATCH", "/", None, "A")).await.status,
            201
        );

        // Room comes with the end of what is there, and in no other way.
        clock.advance(Duration::from_secs(59));
        assert_eq!(
            send(&app, from("calm", "new", "A")).await.status,
            503,
            "{name}"
        );
        clock.advance(Duration::from_secs(2));
        assert_eq!(
            send(&app, from("calm", "new", "A")).await.status,
            201,
            "{name}"
        );
        assert_eq!(handler.effects(), 5);
    }
}

const WARNING: &str = "IdempotencyLayer has no scope";

fn with_credential(name: &'static str, key: Option<&str>) -> Request {
    let mut request = request("POST", "/charges", key, "A");
    request
        .headers_mut()
        .insert(name, "secret".parse().unwrap());
    request
}

#[tokio::test]
async fn a_layer_without_scope_warns_once_when_requests_carry_credentials() {
    let (logs, _guard) = Logs::of_this_thread();
    for credential in ["authorization", "cookie"] {
        let before = logs.loud(WARNING).len();
        let layer = IdempotencyLayer::new(MemoryStore::new());
        let app = Handler::new().behind(layer.clone());
        let clone = Handler::new().behind(layer);
        send(&app, post("k-1", "A")).await;
        send(&app, with_credential(credential, None)).await;
        send(&app, with_credential(credential, Some("\""))).await;
        assert_eq!(logs.loud(WARNING).len(), before, "nothing to warn of yet");
        for key in ["k-2", "k-3", "k-2"] {
            let answer = send(&app, with_credential(credential, Some(key))).await;
            assert_eq!(answer.status, 201, "it is a warning only");
            send(&clone, with_credential(credential, Some(key))).await;
        }
        let warned = logs.loud(WARNING);
        assert_eq!(warned.len(), before + 1, "once per layer, clones included");
        let said = &warned[before];
        assert!(
            said.text.contains(".scope(") && said.text.contains(".single_tenant()"),
            "{said:?}"
        );
        assert!(!said.text.contains("secret"));
    }
}

#[tokio::test]
async fn of_many_requests_at_once_one_warns() {
    let (logs, _guard) = Logs::of_this_thread();
    let app = Handler::new().behind(IdempotencyLayer::new(MemoryStore::new()));
    let mut tasks = tokio::task::JoinSet::new();
    for at in 0..64 {
        let app = app.clone();
        tasks.spawn(async move {
            let key = format!("k-{at}");
            send(&app, with_credential("cookie", Some(&key)))
                .await
                .status
        });
    }
    let answered = tasks.join_all().await;
    assert!(answered.iter().all(|status| *status == 201));
    assert_eq!(logs.loud(WARNING).len(), 1);
}

#[tokio::test]
async fn saying_single_tenant_or_setting_a_scope_silences_the_warning() {
    let (logs, _guard) = Logs::of_this_thread();
    for layer in [
        IdempotencyLayer::new(MemoryStore::new()).single_tenant(),
        IdempotencyLayer::new(MemoryStore::new()).scope(|_| Some(Scope::shared())),
    ] {
        let app = Handler::new().behind(layer);
        for credential in ["authorization", "cookie"] {
            send(&app, with_credential(credential, Some("K"))).await;
        }
    }
    assert_eq!(logs.loud(WARNING).len(), 0);
    // The same ears would have heard it.
    let app = Handler::new().behind(IdempotencyLayer::new(MemoryStore::new()));
    send(&app, with_credential("cookie", Some("K"))).await;
    assert_eq!(logs.loud(WARNING).len(), 1);
}

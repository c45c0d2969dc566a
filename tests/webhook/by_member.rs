//! The key is a member of the body.

use std::time::{Duration, Instant};

use axum::{
    body::Body,
    http::{HeaderName, HeaderValue, Request},
};
use tower_idempotency::{
    Audience, Endpoint, ExactRequest, IdempotencyLayer, InvalidKey, KeyFormat, KeyOnly,
    MAX_KEY_LEN, MemoryStore, Profile, Rejection, RejectionContext, RenderRejection,
    testing::Operation,
};

use crate::{
    every_store,
    support::{logs::Logs, puppet::Puppet, *},
};

fn layer(store: &TestStore, pointer: &str) -> IdempotencyLayer<TestStore> {
    IdempotencyLayer::new(store.clone())
        .single_tenant()
        .fingerprint(KeyOnly)
        .key_pointer(pointer)
}

/// A delivery without any key in its head.
fn delivery(body: impl Into<Body>) -> Request<Body> {
    request("POST", "/webhooks", None, body)
}

every_store! {
    async fn the_member_is_the_key(world: World) {
        let store = world.open().await;
        let handler = Handler::new();
        for (at, (pointer, key, first, again)) in [
            ("/id", "evt_1", r#"{"id":"evt_1","sent":1}"#, r#"{ "sent" : 2 , "id" : "evt_1" }"#),
            ("/id", "evt_é", r#"{"id":"evt_\u00e9"}"#, r#"{"i\u0064":"evt_é"}"#),
            ("/id", "17", r#"{"id":17}"#, r#"{"id":"17"}"#),
            ("/id", "-0", r#"{"id":-0}"#, r#"{"id":-0,"a":[{"id":9}]}"#),
            ("/id", "98765432109876543210", r#"{"id":98765432109876543210}"#, r#"{"id":98765432109876543210}"#),
            ("/data/0/id", "evt_2", r#"{"data":[{"id":"evt_2"},{"id":"x"}],"id":"y"}"#, r#"{"data":[{"id":"evt_2"}]}"#),
            ("/0/1", "evt_3", r#"[["x","evt_3"]]"#, " [ [ 0 , \"evt_3\" ] ]\n"),
            ("/a~1b/c~0d", "evt_4", r#"{"a/b":{"c~d":"evt_4"},"a~1b":1}"#, r#"{"a/b":{"c~d":"evt_4"}}"#),
            ("/", "evt_5", r#"{"":"evt_5"}"#, r#"{"":"evt_5"}"#),
            // A string is taken as it is: neither quotation marks nor blanks of a header's are looked for.
            ("/id", " \"a,b\" ", r#"{"id":" \"a,b\" "}"#, r#"{"id":"\u0020\"a\u002cb\" "}"#),
            // Members of the same name elsewhere than on the way there say nothing about the key.
            ("/id", "evt_6", r#"{"id":"evt_6","d":{"a":1,"a":2},"d":3}"#, r#"{"id":"evt_6"}"#),
        ].into_iter().enumerate() {
            let app = handler.behind(layer(&store, pointer));
            let answer = send(&app, delivery(first)).await;
            assert_eq!((answer.status.as_u16(), handler.effects()), (201, at + 1), "{first}");
            send(&app, delivery(again)).await.assert_replays(&answer);
            assert!(record(&store, key).await.is_some(), "{key}");
        }
        assert_eq!(records(&store).await, handler.effects() as u64);
    }

    async fn what_names_no_key_is_refused_and_leaves_nothing(world: World) {
        let store = world.open().await;
        let handler = Handler::new();
        let app = handler.behind(layer(&store, "/data/id"));
        let required = (400, "idempotency_key_required".to_owned());
        let invalid = (400, "idempotency_key_invalid".to_owned());
        let unreadable = (400, "idempotency_body_invalid".to_owned());
        let deep = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
        let long = |length: usize| format!(r#"{{"data":{{"id":"{}"}}}}"#, "a".repeat(length));
        for (body, expected) in [
            // Absent: nothing stands there.
            ("{}".to_owned(), &required),
            ("[]".into(), &required),
            ("7".into(), &required),
            (r#""data""#.into(), &required),
            (r#"{"id":"evt"}"#.into(), &required),
            (r#"{"data":"id"}"#.into(), &required),
            (r#"{"data":[{"id":"evt"}]}"#.into(), &required),
            (r#"{"data":{"ID":"evt"}}"#.into(), &required),
            // Present, and no key.
            (r#"{"data":{"id":null}}"#.into(), &invalid),
            (r#"{"data":{"id":true}}"#.into(), &invalid),
            (r#"{"data":{"id":{"id":"evt"}}}"#.into(), &invalid),
            (r#"{"data":{"id":["evt"]}}"#.into(), &invalid),
            (r#"{"data":{"id":1.0}}"#.into(), &invalid),
            (r#"{"data":{"id":1e3}}"#.into(), &invalid),
            (r#"{"data":{"id":""}}"#.into(), &invalid),
            (r#"{"data":{"id":"\u00a0 \t"}}"#.into(), &invalid),
            (r#"{"data":{"id":"\ud800"}}"#.into(), &invalid),
            (long(MAX_KEY_LEN + 1), &invalid),
            // Nothing that could be looked into.
            (String::new(), &unreadable),
            ("id=evt".into(), &unreadable),
            (r#"{"data":{"id":"evt"}"#.into(), &unreadable),
            (r#"{"data":{"id":"evt"}} x"#.into(), &unreadable),
            (r#"{"data":{"id":"evt"},"n":01}"#.into(), &unreadable),
            (r#"{"data":{"id":"evt",}}"#.into(), &unreadable),
            (r#"{"data":{"id":"\x"}}"#.into(), &unreadable),
            (r#"{"data":{"id":01}}"#.into(), &unreadable),
            ("\u{feff}{\"data\":{\"id\":\"evt\"}}".into(), &unreadable),
            // Which of two is meant?
            (r#"{"data":{"id":"evt","id":"evt"}}"#.into(), &unreadable),
            (r#"{"data":{"id":"evt"},"d\u0061ta":{}}"#.into(), &unreadable),
            (format!(r#"{{"data":{{"id":"evt"}},"deep":{}}}"#, deep(128)), &unreadable),
            (deep(100_000), &unreadable),
        ] {
            let answer = send(&app, delivery(body.clone())).await;
            let body = &body[..body.len().min(80)];
            assert_eq!(&answer.said(), expected, "{body}");
            assert!(!answer.json()["detail"].as_str().unwrap().contains("evt"), "{body}");
            if *expected != unreadable {
                assert!(answer.json()["detail"].as_str().unwrap().contains("member /data/id"), "{body}");
            }
        }
        let latin = send(&app, delivery(&b"{\"data\":{\"id\":\"evt\xe9\"}}"[..])).await;
        assert_eq!(latin.said(), unreadable);
        assert_eq!((handler.effects(), records(&store).await), (0, 0));
        assert_eq!(store.calls(Operation::Claim), 0);

        for body in [long(MAX_KEY_LEN), format!(r#"{{"data":{{"id":"evt"}},"deep":{}}}"#, deep(127))] {
            assert_eq!(send(&app, delivery(body)).await.status, 201);
        }
    }

    async fn a_member_does_not_name_the_key_of_a_header(world: World) {
        // A sender that uses both is understood by what was set, and messages speak of that.
        let store = world.open().await;
        let handler = Handler::new();
        let app = handler.behind(layer(&store, "/id"));
        let both = |key: &str, body: &'static str| request("POST", "/webhooks", Some(key), body);
        let answer = send(&app, both("header", r#"{"id":"evt_1"}"#)).await;
        assert_eq!(answer.status, 201);
        send(&app, both("other", r#"{"id":"evt_1"}"#)).await.assert_replays(&answer);
        send(&app, both("\"malformed", r#"{"id":"evt_1"}"#)).await.assert_replays(&answer);
        assert!(record(&store, "header").await.is_none());
        let missing = send(&app, both("header", r#"{"event":"evt_1"}"#)).await;
        assert_eq!(missing.said(), (400, "idempotency_key_required".into()));
        let detail = missing.json()["detail"].as_str().unwrap().to_owned();
        assert!(detail.contains("member /id") && !detail.to_lowercase().contains("header"), "{detail}");
        assert_eq!(missing.json()["new_key_safe"], true);

        // And the other way round, with a header of any name.
        let named = IdempotencyLayer::new(store.clone())
            .single_tenant()
            .fingerprint(KeyOnly)
            .header_name(HeaderName::from_static("x-event-id"));
        let app = handler.behind(named);
        let missing = send(&app, both("header", r#"{"id":"evt_1"}"#)).await;
        assert_eq!(missing.said(), (400, "idempotency_key_required".into()));
        assert!(missing.json()["detail"].as_str().unwrap().contains("header x-event-id"));
        let mut event = delivery("{}");
        event.headers_mut().insert("x-event-id", HeaderValue::from_static("evt_1"));
        send(&app, event).await.assert_replays(&answer);
    }

    async fn of_many_deliveries_in_either_form_one_runs_and_none_is_told_2xx_before(world: World) {
        let (store, other) = (world.open().await, world.open().await);
        let (router, mut puppet) = Puppet::new();
        let by_header = IdempotencyLayer::new(other.clone()).single_tenant().profile(Profile::Webhook);
        let senders = |layer: IdempotencyLayer<TestStore>| layer.audience(Audience::Senders);
        let apps = [
            router.clone().route_layer(senders(layer(&store, "/id")).fingerprint(Endpoint)),
            router.route_layer(by_header),
        ];
        let event = || {
            let request = Request::post("/webhooks").header("webhook-id", "evt_1");
            request.body(Body::from("{\"id\":\"evt_1\"}")).unwrap()
        };
        let mut sent: Vec<_> = (0..50).map(|nth| spawn(&apps[nth % 2], event())).collect();
        let run = puppet.next().await;
        eventually("all others to be answered", || {
            sent.iter().filter(|sent| sent.is_finished()).count() == 49
        })
        .await;
        run.answers(200, "done");
        let mut statuses = Vec::new();
        for sent in sent.drain(..) {
            statuses.push(sent.await.unwrap().status.as_u16());
        }
        statuses.sort_unstable();
        assert_eq!((statuses[0], &statuses[1..]), (200, &[503; 49][..]));
        assert_eq!(puppet.begun(), 1);
    }

    async fn length_and_content_are_those_of_the_key_format(world: World) {
        let store = world.open().await;
        let handler = Handler::new();
        let uuid = "b3b0c1f4-8a0e-4f57-9f4a-0f5a8f9f6a11";
        let app = handler.behind(layer(&store, "/id").key_format(KeyFormat::uuid()));
        let refused = send(&app, delivery(r#"{"id":"evt_1"}"#)).await;
        assert_eq!(refused.said(), (400, "idempotency_key_invalid".into()));
        assert!(refused.json()["detail"].as_str().unwrap().contains("must be a UUID"));
        assert_eq!(send(&app, delivery(format!(r#"{{"id":"{uuid}"}}"#))).await.status, 201);

        let app = handler.behind(layer(&store, "/id").key_format(KeyFormat::structured().max_len(4)));
        assert_eq!(send(&app, delivery(r#"{"id":"12345"}"#)).await.status, 400);
        assert_eq!(send(&app, delivery(r#"{"id":12345}"#)).await.status, 400);
        assert_eq!(send(&app, delivery(r#"{"id":"1234"}"#)).await.status, 201, "a string needs no further quotes");
    }

    async fn another_body_under_the_same_key_is_refused_where_bodies_count(world: World) {
        let store = world.open().await;
        let handler = Handler::new();
        let app = handler.behind(layer(&store, "/id").fingerprint(ExactRequest));
        let first = send(&app, delivery(r#"{"id":"evt_1","amount":1}"#)).await;
        send(&app, delivery(r#"{"id":"evt_1","amount":1}"#)).await.assert_replays(&first);
        let reused = send(&app, delivery(r#"{"id":"evt_1","amount":9}"#)).await;
        assert_eq!(reused.said(), (409, "idempotency_key_reused".into()));
        assert_eq!(handler.effects(), 1);
    }

    async fn odd_texts_and_numbers_are_keys(world: World) {
        let store = world.open().await;
        let handler = Handler::new();
        let app = handler.behind(layer(&store, "/id"));
        for (at, body) in [
            r#"{"id":"a\u0000b"}"#.to_owned(),
            r#"{"id":"\u0001"}"#.to_owned(),
            r#"{"id":"\n evt \r"}"#.to_owned(),
            r#"{"id":"\ud83d\ude00"}"#.to_owned(),
            format!(r#"{{"id":"{}"}}"#, "é".repeat(127)),
            r#"{"id":123456789012345678901234567890}"#.to_owned(),
        ].into_iter().enumerate() {
            let first = send(&app, delivery(body.clone())).await;
            assert_eq!(first.status, 201, "{body}");
            send(&app, delivery(body)).await.assert_replays(&first);
            assert_eq!(handler.effects(), at + 1);
        }
    }

    async fn ids_of_headers_and_members_meet(world: World) {
        let store = world.open().await;
        let handler = Handler::new();
        let named = IdempotencyLayer::new(store.clone()).single_tenant().fingerprint(KeyOnly);
        let in_head = request("POST", "/webhooks", Some("evt_1"), "{}");
        let first = send(&handler.behind(named), in_head).await;
        let by_member = handler.behind(layer(&store, "/id"));
        send(&by_member, delivery(r#"{"id":"evt_1"}"#)).await.assert_replays(&first);
    }

    async fn of_many_at_once_one_runs(world: World) {
        let store = world.open().await;
        let handler = Handler::new();
        let app = handler.behind(layer(&store, "/id"));
        let all: Vec<_> = (0..24).map(|_| spawn(&app, delivery(r#"{"id":"evt_1"}"#))).collect();
        let mut first = 0;
        for answer in all {
            let answer = answer.await.unwrap();
            first += usize::from(answer.status == 201 && !answer.replay);
            assert!(answer.status == 201 || answer.code() == "idempotency_in_flight", "{answer:?}");
        }
        assert_eq!((first, handler.effects()), (1, 1));
    }
}

/// Fields of events, the ids of requests and what is stored of them.
#[tokio::test]
async fn a_request_id_that_is_the_key_is_neither_logged_nor_stored() {
    for world in World::each() {
        let (logs, _guard) = Logs::of_this_thread();
        let store = world.open().await;
        let app = Handler::new().behind(layer(&store, "/id"));
        let with_id = |id: &str, body: &'static str| {
            let mut request = delivery(body);
            let id = HeaderValue::from_bytes(id.as_bytes()).unwrap();
            request.headers_mut().insert("x-request-id", id);
            request
        };
        // The key, decoded and as it stands there; the number; what is no key, or may be one.
        for (id, body, status) in [
            ("s3cret-event", r#"{"id":"s3cret-event"}"#, 201),
            ("req-s3cret-two-1", r#"{"id":"s3cret-two"}"#, 201),
            (r"s3cret\u002dthree", r#"{"id":"s3cret\u002dthree"}"#, 201),
            ("s3cret-three", r#"{"id":"s3cret\u002dthree"}"#, 201),
            ("s3cret-four", r#"{"id":["s3cret-four"]}"#, 400),
            ("s3cret-five", r#"{"id":"s3cret-five""#, 400),
        ] {
            assert_eq!(send(&app, with_id(id, body)).await.status, status, "{id}");
        }
        for key in ["s3cret-event", "s3cret-three"] {
            let record = record(&store, key).await.unwrap();
            assert_eq!(record.request_id, None, "{key}");
        }
        // One that is not is there for whoever looks for it.
        send(&app, with_id("req-17", r#"{"id":"other"}"#)).await;
        send(&app, with_id("req-18", r#"{"no":"id"}"#)).await;
        let stored = record(&store, "other").await.unwrap();
        assert_eq!(stored.request_id.as_deref(), Some("req-17"));
        let text: String = logs
            .all()
            .into_iter()
            .map(|event| event.text + "\n")
            .collect();
        assert!(text.contains("req-17") && text.contains("req-18"), "{text}");
        assert!(!text.contains("s3cret"), "{text}");
    }
}

#[test]
fn messages_and_debug_show_the_pointer_and_no_key() {
    let layer = IdempotencyLayer::new(MemoryStore::new()).key_pointer("/data/id");
    assert!(format!("{layer:?}").contains("/data/id"));
    let seen = |rejection: &Rejection, context: &RejectionContext<'_>| {
        assert_eq!(context.key_pointer, Some("/data/id"));
        axum::http::Response::new(Body::from(rejection.detail(context).into_owned()))
    };
    let rendered = layer.rejections(seen as fn(&Rejection, &RejectionContext<'_>) -> _);
    let (head, _) = delivery("").into_parts();
    for why in [InvalidKey::NotAKey, InvalidKey::NotText, InvalidKey::Blank] {
        assert!(why.to_string().len() > 20);
        rendered.refusal(&head, &Rejection::KeyInvalid(why));
    }
    let _: &dyn RenderRejection = &seen;
}

/// Elements are named by their numbers, and by nothing that looks like one.
#[tokio::test]
async fn odd_numbers_name_no_element() {
    let world = World::memory();
    let store = world.open().await;
    let handler = Handler::new();
    for pointer in [
        "/a/01",
        "/a/+1",
        "/a/-",
        "/a/-1",
        "/a/ 1",
        "/a/1 ",
        "/a/",
        "/a/18446744073709551617",
    ] {
        let app = handler.behind(layer(&store, pointer));
        let answer = send(&app, delivery(r#"{"a":["x","y","z"]}"#)).await;
        let required = (400, "idempotency_key_required".to_owned());
        assert_eq!(answer.said(), required, "{pointer}");
    }
}

/// A bound far above what any of them takes, and far below what a search takes that goes back.
#[tokio::test]
async fn large_bodies_take_linear_time() {
    let world = World::memory();
    let store = world.open().await;
    let handler = Handler::new();
    let escaped = "\\u0061".repeat(1_000_000);
    let members: String = (0..300_000).map(|at| format!("\"i{at}\":{at},")).collect();
    let same = "\"i\\u0064x\":0,".repeat(400_000);
    for (pointer, body) in [
        ("/id", format!("{{{members}\"id\":\"evt_1\"}}")),
        ("/id", format!("{{\"{escaped}\":1,\"id\":\"evt_2\"}}")),
        ("/id", format!("{{{same}\"id\":\"evt_3\"}}")),
        (
            "/a/1999999",
            format!("{{\"a\":[{}\"evt_4\"]}}", "1,".repeat(1_999_999)),
        ),
        ("/id", format!("{{\"id\":{}}}", "1".repeat(5_000_000))),
        ("/id", format!("{{\"id\":\"{escaped}\"}}")),
        ("/id", "[".repeat(5_000_000)),
        (
            "/id",
            format!("{}{{\"id\":\"evt_5\"}}", " ".repeat(5_000_000)),
        ),
    ] {
        let wide = layer(&store, pointer).request_body_limit(8 * 1024 * 1024);
        let app = handler.behind(wide);
        let begun = Instant::now();
        send(&app, delivery(body)).await;
        assert!(begun.elapsed() < Duration::from_secs(20), "{pointer}");
    }
    assert_eq!(handler.effects(), 5);
}

/// Each pointer, and what is wrong with it.
#[test]
fn a_pointer_that_names_no_member_is_refused_when_it_is_set() {
    let deep = "/a".repeat(129);
    for (pointer, why) in [
        ("", "begins with a slash"),
        ("id", "begins with a slash"),
        ("#/id", "begins with a slash"),
        ("/a~", "write ~ as"),
        ("/a~2b", "write ~ as"),
        (&deep, "deeper than 128"),
    ] {
        let set = || IdempotencyLayer::new(MemoryStore::new()).key_pointer(pointer);
        let panic = std::panic::catch_unwind(set).unwrap_err();
        let message = panic.downcast_ref::<String>().unwrap();
        assert!(
            message.starts_with("key_pointer: \"") && message.contains(why),
            "{message}"
        );
    }
}

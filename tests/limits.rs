//! A caller that floods the service with keys is stopped at its limit, softly, and nobody else notices.

mod support;

use std::{panic::catch_unwind, time::Duration};

use axum::{Router, body::Body, extract::Request, http::Response};
use http::StatusCode;
use support::{
    logs::Logs,
    wire::{Reply, Server},
    *,
};
use tokio::task::{JoinSet, yield_now};
use tower::ServiceExt;
use tower_http::catch_panic::CatchPanicLayer;
use tower_idempotency::{
    AnyStore, Fingerprint, IdempotencyKey, IdempotencyLayer, IdempotencyStatus, IdempotentResponse,
    InFlight, MemoryStore, Record, RecordId, Recovery, Scope, SqliteStore, StoreFailure,
    store::{Claim, ClaimRequest, Completion, Inspect, Lifetimes, Settled, Store},
    testing::{FakeClock, Fault, FaultyStore, Operation, Times},
};

const REFUSED: &str = "idempotency_limit_reached";
const UNAVAILABLE: &str = "idempotency_store_unavailable";
const MINUTE: Duration = Duration::from_secs(60);
/// How long a sample is good for.
const FRESH: Duration = Duration::from_secs(10);
const SECOND: Duration = Duration::from_secs(1);
const DAY: Duration = Duration::from_secs(24 * 3600);

/// Scopes by the header `x-tenant`; this many records for each.
fn limited(store: &TestStore, records: u64) -> IdempotencyLayer<TestStore> {
    let layer = IdempotencyLayer::new(store.clone()).scope(|head| {
        let tenant = head.headers.get("x-tenant")?;
        Some(Scope::new(tenant.as_bytes()))
    });
    layer.ttl(MINUTE).scope_limit(records)
}

fn from(tenant: &str, key: &str, body: &'static str) -> Request {
    let mut request = post(key, body);
    let tenant = tenant.parse().unwrap();
    request.headers_mut().insert("x-tenant", tenant);
    request
}

fn raw(tenant: &str, key: &str, body: &str) -> Vec<u8> {
    format!(
        "POST /charges HTTP/1.1\r\nhost: test\r\nx-tenant: {tenant}\r\nidempotency-key: {key}\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

fn id(tenant: &str, key: &str) -> RecordId {
    RecordId::new(Scope::new(tenant), IdempotencyKey::new(key))
}

async fn find(store: &TestStore, tenant: &str, key: &str) -> Option<Record> {
    store.inner().get(&id(tenant, key)).await.unwrap()
}

async fn count(store: &TestStore, tenant: &str) -> u64 {
    let scope = Scope::new(tenant);
    store.inner().count_in(&scope, u64::MAX).await.unwrap()
}

/// Completed records of another instance: `old-0`, `old-1`, …
async fn fill(store: &TestStore, tenant: &str, records: usize) {
    for at in 0..records {
        let id = id(tenant, &format!("old-{at}"));
        let claim = ClaimRequest::new(id, "test", Fingerprint::from_bytes([1; 32]));
        let Claim::Won(ticket) = store.inner().claim(claim).await.unwrap() else {
            panic!("there is such a record");
        };
        let done = Completion::tombstone(StatusCode::CREATED);
        let settled = store
            .inner()
            .complete(&ticket, done, Lifetimes::new(MINUTE));
        assert_eq!(settled.await.unwrap(), Settled::Done);
    }
}

/// Sends new keys one after the other until one is refused, and answers how many were let in.
async fn flood(app: &Router, tenant: &str) -> usize {
    for at in 0..200 {
        let answer = send(app, from(tenant, &format!("flood-{at}"), "A")).await;
        if answer.status != 201 {
            assert_eq!(answer.said(), (429, REFUSED.into()));
            return at;
        }
        // On a runtime of one thread a store that never waits would leave the background no time.
        yield_now().await;
    }
    panic!("200 keys and no limit");
}

/// Repeats a request that changes nothing, until the layer knows that its scope is full: only then does it
/// look for the record before it claims.
async fn known_to_be_full(app: &Router, store: &TestStore, tenant: &str, key: &str) {
    for _ in 0..5_000 {
        let before = store.calls(Operation::Get);
        let answer = send(app, from(tenant, key, "A")).await;
        assert_ne!(answer.status, 429, "there is a record");
        if store.calls(Operation::Get) > before {
            return;
        }
        yield_now().await;
    }
    panic!("nobody ever knew that the scope is full");
}

/// From now on every count takes this long. What it answers was true at its beginning.
fn slow_counts(store: &TestStore, time: Duration) {
    store.fail(Operation::CountIn, Fault::DelayAfter(time), Times::Always);
}

/// Sends a new key until it is let in, which takes no time but that of other tasks.
async fn let_in_again(app: &Router, tenant: &str) {
    for _ in 0..100 {
        if send(app, from(tenant, "again", "A")).await.status == 201 {
            return;
        }
        yield_now().await;
    }
    panic!("it was not let in again");
}

/// The process's own clock goes on, with nothing under way.
async fn pass(time: Duration) {
    tokio::time::pause();
    tokio::time::advance(time).await;
    tokio::time::resume();
}

every_store! {
    // S9
    async fn a_flood_of_one_tenant_gets_429_and_the_others_notice_nothing(world: World) {
        let handler = Handler::new();
        let store = world.open().await;
        let server = Server::start(handler.behind(limited(&store, 5))).await;
        let calm = server.exchange(&raw("calm", "K", "A")).await;
        assert_eq!(calm.status, 201);
        let mut first = Reply::default();
        let mut let_in = 0;
        let refused = loop {
            let reply = server.exchange(&raw("flood", &format!("k-{let_in}"), "A")).await;
            if reply.status != 201 {
                break reply;
            }
            if let_in == 0 {
                first = reply;
            }
            let_in += 1;
            assert!(let_in < 100, "there is no limit");
        };
        // Some may slip in while the store is asked for the first time.
        assert!(let_in >= 5, "only {let_in} were let in");
        assert_eq!(refused.said(), (429, REFUSED.into()));
        assert_eq!(refused.header("retry-after"), Some(&b"60"[..]));
        assert_eq!(refused.header("content-type"), Some(&b"application/problem+json"[..]));
        assert!(!refused.is_replay());
        let problem: serde_json::Value = serde_json::from_slice(&refused.body).unwrap();
        assert!(problem["type"].as_str().unwrap().ends_with("#idempotency_limit_reached"));
        assert_eq!(problem["status"], 429);
        assert_eq!(problem["retryable"], true);
        assert_eq!(problem["retry_after_seconds"], 60);
        assert_eq!(problem["new_key_safe"], false);
        assert!(!problem["detail"].as_str().unwrap().contains("flood"));

        // The flood goes on, and the same key fares no better.
        for at in 0..20 {
            let reply = server.exchange(&raw("flood", &format!("more-{}", at % 4), "A")).await;
            assert_eq!(reply.said(), (429, REFUSED.into()));
        }
        // What has a record is served as ever.
        let replay = server.exchange(&raw("flood", "k-0", "A")).await;
        assert!(replay.is_replay());
        assert_eq!((replay.status, replay.body), (201, first.body));
        let reused = server.exchange(&raw("flood", "k-0", "B")).await;
        assert_eq!(reused.said(), (409, "idempotency_key_reused".into()));
        // The refused have none.
        assert_eq!(count(&store, "flood").await, let_in as u64);
        assert_eq!(find(&store, "flood", "more-0").await, None);
        assert_eq!(handler.effects(), let_in + 1);

        // Another tenant has all its room, and the same keys.
        let reply = server.exchange(&raw("other", "more-0", "A")).await;
        assert_eq!(reply.status, 201);
        assert!(server.exchange(&raw("calm", "K", "A")).await.is_replay());
        assert_eq!(server.exchange(&raw("calm", "J", "A")).await.status, 201);
        assert_eq!(handler.effects(), let_in + 3);
    }

    // S9
    async fn a_key_with_a_record_is_served_as_ever_whatever_its_state(world: World) {
        let handler = Handler::answering(|seen| match &seen.body[..] {
            b"panic" => panic!("as told"),
            _ => Response::builder().status(201).body(Body::from(seen.run.to_string())).unwrap(),
        });
        let store = world.open().await;
        fill(&store, "t", 2).await;
        let layer = || limited(&store, 5).lease(Duration::from_secs(30)).response_ttl(Duration::from_secs(5));
        let behind = |layer| handler.behind(layer).layer(CatchPanicLayer::new());
        let before = behind(layer().scope_limit(100));
        assert_eq!(send(&before, from("t", "tombstone", "A")).await.status, 201);
        assert_eq!(send(&before, from("t", "panic", "panic")).await.status, 500);
        world.clock.advance(Duration::from_secs(6));
        handler.close_gate();
        let held = tokio::spawn(async move { send(&before, from("t", "running", "A")).await });
        handler.reached(3).await;
        let app = behind(layer());
        known_to_be_full(&app, &store, "t", "tombstone").await;
        assert_eq!(send(&app, from("t", "new", "A")).await.said(), (429, REFUSED.into()));

        let code = async |app: &Router, key, body| send(app, from("t", key, body)).await.code();
        assert_eq!(code(&app, "running", "A").await, "idempotency_in_flight");
        assert_eq!(code(&app, "running", "B").await, "idempotency_key_reused");
        assert_eq!(code(&app, "tombstone", "A").await, "idempotency_response_not_retained");
        assert_eq!(code(&app, "panic", "panic").await, "idempotency_outcome_unknown");
        assert_eq!(code(&app, "panic", "B").await, "idempotency_key_reused");
        assert_eq!(code(&app, "old-1", "A").await, "idempotency_key_reused");

        // Whoever waits for a run gets its answer.
        let patient = behind(layer().in_flight(InFlight::Wait(Duration::from_secs(20))));
        known_to_be_full(&patient, &store, "t", "tombstone").await;
        let waiting = tokio::spawn({
            let patient = patient.clone();
            async move { send(&patient, from("t", "running", "A")).await }
        });
        handler.open_gate();
        assert_eq!(held.await.unwrap().status, 201);
        assert!(waiting.await.unwrap().replay);
        assert_eq!(send(&patient, from("t", "new", "A")).await.said(), (429, REFUSED.into()));

        // A takeover is no new record.
        let rerun = behind(layer().recovery(Recovery::Rerun { max_attempts: 3 }));
        known_to_be_full(&rerun, &store, "t", "tombstone").await;
        assert_eq!(send(&rerun, from("t", "panic", "panic")).await.status, 500);
        assert_eq!(find(&store, "t", "panic").await.unwrap().attempt, 2);
        assert_eq!(send(&rerun, from("t", "new", "A")).await.said(), (429, REFUSED.into()));
        assert_eq!((handler.effects(), count(&store, "t").await), (4, 5));
    }

    async fn what_is_released_again_is_not_counted(world: World) {
        let handler = Handler::answering(|seen| {
            let status = match &seen.body[..] { b"valid" => 201, _ => 400 };
            Response::builder().status(status).body(Body::empty()).unwrap()
        });
        let store = world.open().await;
        fill(&store, "t", 2).await;
        let app = handler.behind(limited(&store, 3));
        // One after the other they are never more than three.
        for at in 0..30 {
            let answer = send(&app, from("t", &format!("bad-{at}"), "A")).await;
            assert_eq!(answer.status, 400, "at {at}: {answer:?}");
        }
        assert_eq!((handler.effects(), count(&store, "t").await), (30, 2));
        // Once there is no room, a key that was released is a new one.
        let app = handler.behind(limited(&store, 2));
        known_to_be_full(&app, &store, "t", "old-0").await;
        let again = send(&app, from("t", "bad-0", "A")).await;
        assert_eq!((again.said(), handler.effects()), ((429, REFUSED.into()), 30));
    }

    async fn below_the_limit_there_is_no_further_question(world: World) {
        let handler = Handler::new();
        let store = world.open().await;
        let app = handler.behind(limited(&store, 1_000));
        for at in 0..20 {
            let first = send(&app, from("t", &format!("k-{at}"), "A")).await;
            send(&app, from("t", &format!("k-{at}"), "A")).await.assert_replays(&first);
        }
        called(&store, Operation::CountIn, 1).await;
        assert_eq!(store.calls(Operation::Claim), 40);
        assert_eq!(store.calls(Operation::Complete), 20);
        assert_eq!(store.calls(Operation::Get), 0);
        assert_eq!(store.calls(Operation::CountIn), 1, "one sample for ten seconds");
        // A heartbeat may come by.
        assert_eq!(store.total_calls() - store.calls(Operation::Renew), 61);
        // Nor is there one without the option.
        let without = world.open().await;
        let app = handler.behind(IdempotencyLayer::new(without.clone()).single_tenant());
        for at in 0..5 {
            send(&app, post(&format!("k-{at}"), "A")).await;
        }
        assert_eq!(without.total_calls() - without.calls(Operation::Renew), 10);
    }

    async fn no_request_that_may_run_waits_for_a_sample(world: World) {
        let handler = Handler::new();
        let store = world.open().await;
        let app = handler.behind(limited(&store, 3));
        store.fail(Operation::CountIn, Fault::HangBefore, Times::Always);
        for at in 0..10 {
            assert_eq!(send(&app, from("t", &format!("k-{at}"), "A")).await.status, 201);
        }
        called(&store, Operation::CountIn, 1).await;
        assert_eq!(store.calls(Operation::CountIn), 1, "one question at a time");
        assert_eq!(handler.effects(), 10);
    }

    async fn of_many_scopes_few_are_asked_for_at_once(world: World) {
        let handler = Handler::new();
        let store = world.open().await;
        let app = handler.behind(limited(&store, 3));
        store.fail(Operation::CountIn, Fault::HangBefore, Times::Always);
        for at in 0..50 {
            assert_eq!(send(&app, from(&format!("t-{at}"), "K", "A")).await.status, 201);
        }
        called(&store, Operation::CountIn, 2).await;
        assert_eq!(store.calls(Operation::CountIn), 2);
    }

    // S9
    async fn a_burst_of_64_gets_past_the_limit_by_no_more_than_itself_and_then_it_holds(world: World) {
        let handler = Handler::new();
        let store = world.open().await;
        let app = handler.behind(limited(&store, 100));
        let burst = async |round: usize| {
            let mut tasks = JoinSet::new();
            for at in 0..64 {
                let app = app.clone();
                tasks.spawn(async move { send(&app, from("t", &format!("k-{round}-{at}"), "A")).await });
            }
            let answers = tasks.join_all().await;
            for answer in &answers {
                assert!(answer.status == 201 || answer.said() == (429, REFUSED.into()), "{answer:?}");
            }
            answers.iter().filter(|answer| answer.status == 201).count()
        };
        let mut let_in = 0;
        for round in 0..4 {
            let_in += burst(round).await;
        }
        // Nobody is refused too early. Too late are at most those under way when the store was asked
        // first, and those under way when the limit was reached.
        assert!((100..=100 + 2 * 64).contains(&let_in), "{let_in}");
        known_to_be_full(&app, &store, "t", "k-0-0").await;
        assert_eq!(burst(9).await, 0, "now it is known");
        assert_eq!(handler.effects(), let_in);
        assert_eq!(count(&store, "t").await, let_in as u64);
    }

    // S9
    async fn cheap_rejections_leave_no_record_and_do_not_count(world: World) {
        let handler = Handler::answering(|seen| {
            let status: u16 = seen.uri.path()[1..].parse().unwrap();
            Response::builder().status(status).body(Body::empty()).unwrap()
        });
        let store = world.open().await;
        let app = handler.behind(limited(&store, 2).request_body_limit(8));
        let ask = async |uri: &str, key: Option<&str>, body: &'static str| {
            let mut request = request("POST", uri, key, body);
            request.headers_mut().insert("x-tenant", "t".parse().unwrap());
            send(&app, request).await.status.as_u16()
        };
        for at in 0..10 {
            let key = format!("k-{at}");
            let key = Some(&key[..]);
            assert_eq!(ask("/201", Some("\""), "A").await, 400);
            assert_eq!(ask("/201", None, "A").await, 400);
            assert_eq!(ask("/201", key, "too long a body").await, 413);
            for status in [400, 404, 413, 429] {
                assert_eq!(ask(&format!("/{status}"), key, "A").await, status);
            }
            // No scope: 403.
            assert_eq!(send(&app, post("K", "A")).await.status, 403);
        }
        assert_eq!((handler.effects(), records(&store).await), (40, 0));
        assert_eq!(ask("/201", Some("one"), "A").await, 201);
        assert_eq!(ask("/201", Some("two"), "A").await, 201);
        // At the limit what is malformed is still told so, for it costs nothing.
        assert_eq!(ask("/201", Some("\""), "A").await, 400);
        assert_eq!(records(&store).await, 2);
    }

    async fn a_refusal_does_not_wait_for_the_body(world: World) {
        let handler = Handler::new();
        let store = world.open().await;
        fill(&store, "t", 2).await;
        let app = handler.behind(limited(&store, 2));
        known_to_be_full(&app, &store, "t", "old-0").await;
        let pieces = bodies::Pieces::endless("x");
        let taken = pieces.taken();
        let mut endless = post("new", pieces.body());
        endless.headers_mut().insert("x-tenant", "t".parse().unwrap());
        assert_eq!(send(&app, endless).await.said(), (429, REFUSED.into()));
        assert_eq!(taken.load(std::sync::atomic::Ordering::SeqCst), 0, "the body was read");
        let response = app.clone().oneshot(from("t", "new", "A")).await.unwrap();
        assert_eq!(response.idempotency_status(), Some(IdempotencyStatus::LimitReached));
    }

    async fn without_a_scope_function_the_limit_is_for_all_together(world: World) {
        let handler = Handler::new();
        let store = world.open().await;
        let layer = IdempotencyLayer::new(store.clone()).single_tenant().scope_limit(3);
        let app = handler.behind(layer.clone());
        assert!(flood(&app, "whoever").await >= 3);
        // Clones of the layer know what it knows.
        let clone = handler.behind(layer);
        assert_eq!(send(&clone, post("new", "A")).await.said(), (429, REFUSED.into()));
        assert_eq!(store.calls(Operation::CountIn), 1);
    }

    // S9, O1
    async fn a_limit_is_not_got_around_by_an_outage(world: World) {
        let handler = Handler::new();
        let store = world.open().await;
        fill(&store, "t", 2).await;
        let app = handler.behind(limited(&store, 2).store_failure(StoreFailure::RunUnprotected));
        known_to_be_full(&app, &store, "t", "old-0").await;
        store.fail(Operation::Claim, Fault::Before, Times::Always);
        assert_eq!(send(&app, from("t", "new", "A")).await.said(), (429, REFUSED.into()));
        assert_eq!(handler.effects(), 0);
        // Those below their limit are run as the option says.
        let other = send(&app, from("other", "new", "A")).await;
        assert_eq!((other.status.as_u16(), other.header("idempotency-status")), (201, Some("unprotected")));
        // Where the store cannot tell whether there is a record, nothing runs either.
        for fault in [Fault::Before, Fault::After] {
            store.fail(Operation::Get, fault, Times::Once);
            assert_eq!(send(&app, from("t", "new", "A")).await.said(), (503, UNAVAILABLE.into()));
        }
        assert_eq!(handler.effects(), 1);
    }
}

// S9
#[tokio::test]
async fn abandoned_records_count_until_they_are_forgotten_or_abandoned_ttl_is_over() {
    for world in World::each() {
        let handler = Handler::answering(|seen| match &seen.body[..] {
            b"panic" => panic!("as told"),
            _ => Response::builder().status(201).body(Body::empty()).unwrap(),
        });
        let store = world.open().await;
        let layer = || limited(&store, 2).max_run(MINUTE);
        let behind = |layer| handler.behind(layer).layer(CatchPanicLayer::new());
        let for_good = behind(layer());
        let for_a_year = behind(layer().abandoned_ttl(365 * DAY));
        let send_new = async |app: &Router, tenant: &str| {
            let answer = send(app, from(tenant, "new", "A")).await;
            answer.said()
        };
        let refused = (429, REFUSED.into());
        for (app, tenant) in [(&for_good, "for-good"), (&for_a_year, "for-a-year")] {
            for key in ["one", "two"] {
                let cut_off = send(app, from(tenant, key, "panic")).await;
                assert_eq!(cut_off.status, 500);
            }
            pass(FRESH).await;
            known_to_be_full(app, &store, tenant, "one").await;
        }
        world.clock.advance(364 * DAY);
        pass(FRESH).await;
        assert_eq!(send_new(&for_good, "for-good").await, refused);
        assert_eq!(send_new(&for_a_year, "for-a-year").await, refused);
        // With the option they are over some day.
        world.clock.advance(2 * DAY);
        pass(FRESH).await;
        assert_eq!(send_new(&for_good, "for-good").await, refused);
        assert_eq!(send_new(&for_a_year, "for-a-year").await.0, 201);
        // Without it an operator finds them and settles them.
        let abandoned = store.inner().abandoned(None, 10).await.unwrap();
        assert_eq!(abandoned.len(), 2);
        assert!(store.inner().forget(&abandoned[0].id).await.unwrap());
        pass(FRESH).await;
        assert_eq!(send_new(&for_good, "for-good").await.0, 201);
    }
}

// S9
#[tokio::test]
async fn a_tenant_whose_records_are_over_gets_in_again_within_ten_seconds() {
    for world in World::each() {
        for how in ["expired", "purged", "forgotten"] {
            let (handler, store) = (Handler::new(), world.open().await);
            let app = handler.behind(limited(&store, 3));
            fill(&store, how, 3).await;
            known_to_be_full(&app, &store, how, "old-0").await;
            assert_eq!(send(&app, from(how, "new", "A")).await.status, 429);
            match how {
                "forgotten" => {
                    for at in 0..3 {
                        assert!(store.forget(&id(how, &format!("old-{at}"))).await.unwrap());
                    }
                }
                _ => world.clock.advance(MINUTE),
            }
            if how == "purged" {
                assert!(store.purge(100).await.unwrap() >= 3);
            }
            // What is known may be up to ten seconds old.
            pass(FRESH - Duration::from_secs(1)).await;
            assert_eq!(send(&app, from(how, "new", "A")).await.status, 429, "{how}");
            assert_eq!(store.calls(Operation::CountIn), 1);
            pass(Duration::from_secs(1)).await;
            // The very first request is let in, however long nobody came.
            assert_eq!(send(&app, from(how, "new", "A")).await.status, 201, "{how}");
            assert_eq!(store.calls(Operation::CountIn), 2);
            assert_eq!(handler.effects(), 1);
            // And then there is room for two more.
            assert_eq!(flood(&app, how).await, 2);
        }
    }
}

#[tokio::test]
async fn nobody_is_refused_for_what_was_true_a_while_ago_even_of_64_at_once() {
    for world in World::each() {
        let (handler, store) = (Handler::new(), world.open().await);
        let app = handler.behind(limited(&store, 100));
        fill(&store, "t", 100).await;
        known_to_be_full(&app, &store, "t", "old-0").await;
        world.clock.advance(2 * MINUTE);
        pass(2 * MINUTE).await;
        let mut tasks = JoinSet::new();
        for at in 0..64 {
            let app = app.clone();
            tasks.spawn(async move { send(&app, from("t", &format!("k-{at}"), "A")).await });
        }
        let answers = tasks.join_all().await;
        assert!(answers.iter().all(|answer| answer.status == 201));
        assert_eq!(store.calls(Operation::CountIn), 2, "one asks for all");
    }
}

#[tokio::test]
async fn a_tenant_that_stays_full_is_asked_for_every_ten_seconds_at_most() {
    for world in World::each() {
        let (handler, store) = (Handler::new(), world.open().await);
        let app = handler.behind(limited(&store, 3));
        fill(&store, "t", 3).await;
        known_to_be_full(&app, &store, "t", "old-0").await;
        for second in 0..30 {
            for _ in 0..5 {
                assert_eq!(send(&app, from("t", "new", "A")).await.status, 429);
            }
            let asked = store.calls(Operation::CountIn);
            assert_eq!(asked, 1 + second / 10, "after {second} s");
            pass(Duration::from_secs(1)).await;
        }
        assert_eq!(handler.effects(), 0);
    }
}

#[tokio::test]
async fn an_instance_learns_by_sampling_what_the_others_have_claimed() {
    for world in World::each() {
        let handler = Handler::new();
        let stores = [world.open().await, world.open().await];
        let [one, two] = stores
            .each_ref()
            .map(|store| handler.behind(limited(store, 20)));
        assert_eq!(send(&two, from("t", "early", "A")).await.status, 201);
        called(&stores[1], Operation::CountIn, 1).await;
        let by_one = flood(&one, "t").await;
        assert!(by_one >= 19, "{by_one}");
        // The other one has not heard of it.
        assert_eq!(send(&two, from("t", "late", "A")).await.status, 201);
        pass(FRESH).await;
        // Now it asks, beside this request, which still gets in.
        assert_eq!(send(&two, from("t", "later", "A")).await.status, 201);
        known_to_be_full(&two, &stores[1], "t", "early").await;
        assert_eq!(
            send(&two, from("t", "too-late", "A")).await.said(),
            (429, REFUSED.into())
        );
        // The keys of one are replayed by the other.
        assert!(send(&two, from("t", "flood-0", "A")).await.replay);
        assert_eq!(handler.effects(), by_one + 3);
    }
}

#[tokio::test]
async fn a_sample_that_fails_changes_nothing_and_is_told_once() {
    let failures = |logs: &Logs| {
        let mut failed = logs.loud("idempotency store");
        failed.retain(|event| event.text.contains("count_in"));
        failed
    };
    let (logs, _guard) = Logs::of_this_thread();
    let (handler, world) = (Handler::new(), World::memory());
    let store = world.open().await;
    let app = handler.behind(limited(&store, 3).store_timeout(Duration::from_millis(100)));

    // Nothing is known: there is no limit.
    store.fail(Operation::CountIn, Fault::Before, Times::Always);
    for at in 0..10 {
        let answer = send(&app, from("t", &format!("k-{at}"), "A")).await;
        assert_eq!(answer.status, 201);
        yield_now().await;
    }
    let failed = failures(&logs);
    assert_eq!((failed.len(), store.calls(Operation::CountIn)), (1, 1));
    assert!(failed[0].text.contains("Unavailable"), "{failed:?}");
    // It is tried again a second later, and no earlier.
    pass(Duration::from_millis(999)).await;
    send(&app, from("t", "k-0", "A")).await;
    assert_eq!(store.calls(Operation::CountIn), 1);
    store.clear();
    pass(Duration::from_millis(1)).await;
    send(&app, from("t", "k-0", "A")).await;
    known_to_be_full(&app, &store, "t", "k-0").await;
    assert_eq!(store.calls(Operation::CountIn), 2);

    // What was known goes on to hold, whatever goes wrong.
    world.clock.advance(2 * MINUTE);
    pass(FRESH).await;
    for fault in [Fault::Before, Fault::After] {
        let before = (failures(&logs).len(), store.calls(Operation::CountIn));
        store.fail(Operation::CountIn, fault, Times::Once);
        for _ in 0..3 {
            let refused = send(&app, from("t", "new", "A")).await;
            assert_eq!(refused.said(), (429, REFUSED.into()));
        }
        let after = (failures(&logs).len(), store.calls(Operation::CountIn));
        assert_eq!(after, (before.0 + 1, before.1 + 1), "{fault:?}");
        pass(Duration::from_secs(1)).await;
    }
    assert_eq!(send(&app, from("t", "new", "A")).await.status, 201);
}

#[tokio::test]
async fn a_caller_that_leaves_takes_its_question_not_along() {
    let (handler, world) = (Handler::new(), World::memory());
    let store = world.open().await;
    let app = handler.behind(limited(&store, 3));
    fill(&store, "t", 3).await;
    known_to_be_full(&app, &store, "t", "old-0").await;
    world.clock.advance(MINUTE);
    pass(FRESH).await;
    slow_counts(&store, SECOND * 2);
    let send_new = |key: &'static str| {
        let app = app.clone();
        tokio::spawn(async move { send(&app, from("t", key, "A")).await })
    };
    let leaving = send_new("left");
    called(&store, Operation::CountIn, 2).await;
    leaving.abort();
    assert!(leaving.await.unwrap_err().is_cancelled());
    // This one waits for the answer to the other's question.
    let staying = send_new("stayed");
    called(&store, Operation::Get, store.calls(Operation::Get) + 1).await;
    pass(SECOND * 2).await;
    assert_eq!(staying.await.unwrap().status, 201);
    assert_eq!((handler.effects(), store.calls(Operation::CountIn)), (1, 2));
}

#[tokio::test]
async fn a_count_that_takes_longer_than_store_timeout_ends_and_the_limit_holds() {
    let (handler, world) = (Handler::new(), World::memory());
    let store = world.open().await;
    let app = handler.behind(limited(&store, 3).store_timeout(SECOND / 10));
    slow_counts(&store, SECOND * 5);
    let mut let_in = 0;
    let mut send_new = async || {
        let key = format!("k-{let_in}");
        let answer = send(&app, from("t", &key, "A")).await;
        if answer.status == 201 {
            let_in += 1;
        }
        answer.said()
    };
    for _ in 0..10 {
        assert_eq!(send_new().await.0, 201, "nothing is known yet");
    }
    called(&store, Operation::CountIn, 1).await;
    pass(SECOND * 5).await;
    known_to_be_full(&app, &store, "t", "k-0").await;
    for _ in 0..60 {
        assert_eq!(send_new().await, (429, REFUSED.into()));
    }
    // It took five seconds, so it rests for 45.
    pass(SECOND * 44).await;
    assert_eq!(send_new().await, (429, REFUSED.into()));
    assert_eq!(store.calls(Operation::CountIn), 1);
    // The next one is waited for no longer than for anything else, and goes on.
    world.clock.advance(MINUTE);
    pass(SECOND * 2).await;
    for _ in 0..2 {
        assert_eq!(send_new().await, (429, REFUSED.into()));
        assert_eq!(store.calls(Operation::CountIn), 2);
    }
    // Whoever is waiting when it ends is let in by it.
    let waiting = tokio::spawn({
        let app = handler.behind(limited(&store, 3));
        async move { send(&app, from("other", "K", "A")).await }
    });
    assert_eq!(waiting.await.unwrap().status, 201, "others are not held up");
    pass(SECOND * 5).await;
    let_in_again(&app, "t").await;
    assert_eq!(
        store.calls(Operation::CountIn),
        3,
        "the other scope's is the third"
    );
}

#[tokio::test]
async fn a_count_is_given_up_after_a_minute_and_rests_nine() {
    let (logs, _guard) = Logs::of_this_thread();
    let (handler, world) = (Handler::new(), World::memory());
    let store = world.open().await;
    let app = handler.behind(limited(&store, 3));
    store.fail(Operation::CountIn, Fault::HangBefore, Times::Always);
    let ask = async |at: u32| {
        let answer = send(&app, from("t", &format!("k-{at}"), "A")).await;
        assert_eq!(answer.status, 201);
    };
    let given_up = || logs.loud("idempotency store did not answer").len();
    ask(0).await;
    called(&store, Operation::CountIn, 1).await;
    pass(SECOND * 59).await;
    assert_eq!(given_up(), 0);
    pass(SECOND * 2).await;
    for _ in 0..100 {
        yield_now().await;
    }
    assert_eq!(given_up(), 1);
    // It took a minute, and its scope has nine without.
    pass(SECOND * 539).await;
    for at in 1..5 {
        ask(at).await;
        yield_now().await;
    }
    assert_eq!(store.calls(Operation::CountIn), 1);
    pass(SECOND * 11).await;
    ask(5).await;
    called(&store, Operation::CountIn, 2).await;
}

#[tokio::test]
async fn after_a_minute_of_failing_counts_nothing_is_known_and_the_scope_is_not_limited() {
    let (handler, world) = (Handler::new(), World::memory());
    let store = world.open().await;
    let app = handler.behind(limited(&store, 3));
    fill(&store, "t", 3).await;
    known_to_be_full(&app, &store, "t", "old-0").await;
    store.fail(Operation::CountIn, Fault::Before, Times::Always);
    // All its records expire, and nobody can tell.
    world.clock.advance(2 * MINUTE);
    for second in 0..59 {
        let refused = send(&app, from("t", "new", "A")).await;
        assert_eq!(refused.said(), (429, REFUSED.into()), "after {second} s");
        pass(SECOND).await;
    }
    let tried = store.calls(Operation::CountIn);
    assert!(tried > 40, "it is tried every second: {tried}");
    pass(SECOND).await;
    for at in 0..5 {
        let answer = send(&app, from("t", &format!("unknown-{at}"), "A")).await;
        assert_eq!(answer.status, 201, "nothing is known");
    }
    assert_eq!(handler.effects(), 5);
    // One count that succeeds, and there is a limit again.
    store.clear();
    pass(SECOND).await;
    known_to_be_full(&app, &store, "t", "unknown-0").await;
    assert_eq!(
        send(&app, from("t", "new", "A")).await.said(),
        (429, REFUSED.into())
    );
}

#[tokio::test]
async fn a_scope_that_is_forgotten_among_many_is_only_asked_for_again() {
    let (handler, world) = (Handler::new(), World::memory());
    let store = world.open().await;
    let app = handler.behind(limited(&store, 2));
    assert!(flood(&app, "t").await >= 2);
    let asked = store.calls(Operation::CountIn);
    for at in 0..10_000 {
        let answer = send(&app, from(&format!("other-{at}"), "K", "A")).await;
        assert_eq!(answer.status, 201, "other-{at}");
    }
    let others = store.calls(Operation::CountIn);
    assert!(others > asked);
    // Nothing is known of it: one gets in, and then it is full again.
    assert_eq!(send(&app, from("t", "again", "A")).await.status, 201);
    known_to_be_full(&app, &store, "t", "flood-0").await;
    assert_eq!(
        send(&app, from("t", "more", "A")).await.said(),
        (429, REFUSED.into())
    );
    assert!(store.calls(Operation::CountIn) > others);
}

// S9
#[tokio::test]
async fn one_limit_is_for_each_tenant_and_the_stores_own_for_all_together() {
    let folder = tempfile::tempdir().unwrap();
    let clock = FakeClock::new();
    let memory = MemoryStore::options().clock(clock.clone()).max_records(6);
    let sqlite = SqliteStore::options(folder.path().join("small.db"));
    let sqlite = sqlite.clock(clock.clone()).max_records(6);
    for store in [
        AnyStore::new(memory.build()),
        AnyStore::new(sqlite.open().await.unwrap()),
    ] {
        let (handler, store) = (Handler::new(), FaultyStore::new(store));
        let app = handler.behind(limited(&store, 3));
        fill(&store, "flood", 3).await;
        known_to_be_full(&app, &store, "flood", "old-0").await;
        assert_eq!(
            send(&app, from("flood", "new", "A")).await.said(),
            (429, REFUSED.into())
        );
        for tenant in ["a", "b", "c"] {
            assert_eq!(send(&app, from(tenant, "K", "A")).await.status, 201);
        }
        // Full for everybody; whoever is at its own limit is told that.
        assert_eq!(
            send(&app, from("d", "K", "A")).await.said(),
            (503, UNAVAILABLE.into())
        );
        assert_eq!(
            send(&app, from("flood", "new", "A")).await.said(),
            (429, REFUSED.into())
        );
        for tenant in ["a", "b", "c"] {
            assert!(send(&app, from(tenant, "K", "A")).await.replay);
        }
        assert_eq!(handler.effects(), 3);
    }
}

#[test]
fn a_limit_of_none_at_all_is_refused_by_name() {
    let layer = || IdempotencyLayer::new(MemoryStore::new());
    let panic = catch_unwind(|| layer().scope_limit(0)).unwrap_err();
    let said = panic.downcast_ref::<&str>().unwrap();
    assert!(said.contains("scope_limit"), "{said}");
    assert!(format!("{:?}", layer().scope_limit(7)).contains("scope_limit: Some(7)"));
}

mod transactional {
    use axum::routing::{MethodRouter, post};
    use tower_idempotency::{Tx, TxError, store::TransactionalStore};

    use super::*;

    /// Answers what the key says, after one statement in the transaction.
    macro_rules! charge {
        ($database:ty) => {
            post(|mut tx: Tx<$database>, request: Request| async move {
                sqlx::query("SELECT 1").execute(&mut tx).await?;
                let key = request.headers()["idempotency-key"].to_str().unwrap();
                Ok::<_, TxError>(match key.starts_with("bad") {
                    true => StatusCode::BAD_REQUEST,
                    false => StatusCode::CREATED,
                })
            })
        };
    }

    async fn check<S: TransactionalStore>(store: S, charge: MethodRouter) {
        let layer = IdempotencyLayer::new(store.clone()).scope(|head| {
            let tenant = head.headers.get("x-tenant")?;
            Some(Scope::new(tenant.as_bytes()))
        });
        let app = Router::new().route("/charges", charge);
        let app = app.route_layer(layer.transactional().scope_limit(3));
        // Rolled back and released: not counted.
        for at in 0..10 {
            let answer = send(&app, from("t", &format!("bad-{at}"), "A")).await;
            assert_eq!(answer.status, 400, "{answer:?}");
        }
        let let_in = flood(&app, "t").await;
        assert!(let_in >= 3, "{let_in}");
        assert!(send(&app, from("t", "flood-0", "A")).await.replay);
        assert_eq!(send(&app, from("other", "K", "A")).await.status, 201);
        let count = store.count_in(&Scope::new("t"), 100).await.unwrap();
        assert_eq!(count, let_in as u64);
    }

    #[tokio::test]
    async fn the_limit_holds_beside_transactions_on_sqlite() {
        let folder = tempfile::tempdir().unwrap();
        let store = SqliteStore::open(folder.path().join("t.db")).await.unwrap();
        check(store, charge!(sqlx::Sqlite)).await;
    }

    #[cfg(feature = "postgres")]
    #[tokio::test]
    async fn the_limit_holds_beside_transactions_on_postgres() {
        let database = database::Database::in_real_time();
        let store = tower_idempotency::PostgresStore::options().migrate();
        let store = store.open(database.pool()).await.unwrap();
        check(store, charge!(sqlx::Postgres)).await;
    }
}

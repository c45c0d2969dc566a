//! What happens while the store is down, slow or full.

mod support;

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use axum::{
    body::Body,
    http::{Request, StatusCode},
};
use support::{
    logs::{Logged, Logs},
    puppet::Puppet,
    wire::{Server, raw_post},
    *,
};
use tokio::time::{sleep, timeout};
use tower::{Layer, ServiceExt};
use tower_http::catch_panic::CatchPanicLayer;
use tower_idempotency::{
    Abandoned, AnyStore, IdempotencyLayer, IdempotencyStatus, IdempotentResponse, InFlight,
    MemoryStore, Recovery, SqliteStore, State, StoreFailure, Verdict,
    store::Store,
    testing::{FakeClock, Fault, FaultyStore, Operation, Times},
};
use tracing::{Instrument, Level};

const IN_FLIGHT: &str = "idempotency_in_flight";
const UNAVAILABLE: &str = "idempotency_store_unavailable";
const UNKNOWN: &str = "idempotency_outcome_unknown";
const LEASE: Duration = Duration::from_secs(30);
const STORE_TIMEOUT: Duration = Duration::from_millis(200);

fn layer(store: &TestStore) -> IdempotencyLayer<TestStore> {
    IdempotencyLayer::new(store.clone())
        .single_tenant()
        .lease(LEASE)
        .store_timeout(STORE_TIMEOUT)
}

async fn state(store: &TestStore, key: &str) -> Option<State> {
    record(store, key).await.map(|record| record.state)
}

/// Waits until the record is in this state.
async fn comes_to(store: &TestStore, key: &str, expected: Option<State>) {
    for _ in 0..2_500 {
        if state(store, key).await == expected {
            return;
        }
        sleep(Duration::from_millis(2)).await;
    }
    panic!("{:?}, not {expected:?}", state(store, key).await);
}

/// Waits in this process for a run that goes on in another one.
fn waiting(store: &TestStore, bound: Duration) -> IdempotencyLayer<TestStore> {
    layer(store)
        .in_flight(InFlight::Wait(bound))
        .store_failure(StoreFailure::RunUnprotected)
}

every_store! {
    // O1: unprotected is for those of whose key nothing is known.
    async fn those_who_wait_for_a_run_never_run_unprotected_beside_it(world: World) {
        const WAITERS: usize = 5;
        let (there, store) = (world.open().await, world.open().await);
        let (router, mut puppet) = Puppet::new();
        let other = router.clone().route_layer(layer(&there));
        let here = router.route_layer(waiting(&store, LEASE));
        let first = spawn(&other, post("k", "A"));
        let run = puppet.next().await;
        let waiters: Vec<_> = (0..WAITERS).map(|_| spawn(&here, post("k", "A"))).collect();
        called(&store, Operation::Claim, 2 * WAITERS).await;
        // Until each look of a while has failed for good.
        let calls = store.calls(Operation::Claim);
        store.fail(Operation::Claim, Fault::Before, Times::Always);
        called(&store, Operation::Claim, calls + 9).await;
        store.clear();
        run.answers(201, "done");
        let first = first.await.unwrap();
        for waiter in waiters {
            waiter.await.unwrap().assert_replays(&first);
        }
        assert_eq!(puppet.begun(), 1);
    }

    // The same to the end of the wait.
    async fn a_wait_that_ends_while_the_store_is_away_ends_in_409(world: World) {
        let (there, store) = (world.open().await, world.open().await);
        let (router, mut puppet) = Puppet::new();
        let other = router.clone().route_layer(layer(&there));
        let here = router.route_layer(waiting(&store, Duration::from_millis(300)));
        let _first = spawn(&other, post("k", "A"));
        let _run = puppet.next().await;
        let waiter = spawn(&here, post("k", "A"));
        called(&store, Operation::Claim, 2).await;
        store.fail(Operation::Claim, Fault::Before, Times::Always);
        assert_eq!(waiter.await.unwrap().said(), (409, IN_FLIGHT.to_owned()));
        assert_eq!(puppet.begun(), 1);
    }

    // A run that was cut off may have had its effect: whether nobody knows, or somebody has just found out.
    async fn after_a_run_that_was_cut_off_nothing_runs_unprotected(world: World) {
        for (key, resolves, recovery) in [
            ("left", true, Recovery::Refuse),
            ("answered", true, Recovery::Refuse),
            ("rerun", false, Recovery::rerun()),
        ] {
            let store = world.open().await;
            let (router, mut puppet) = Puppet::new();
            let base = layer(&store).recovery(recovery).store_failure(StoreFailure::RunUnprotected);
            let asked = Arc::new(AtomicUsize::new(0));
            let count = asked.clone();
            let layer = match resolves {
                false => base,
                true => base.resolver(move |_: Abandoned| {
                    count.fetch_add(1, Ordering::SeqCst);
                    async move {
                        match key {
                            "left" => Verdict::Leave,
                            _ => Verdict::answer((StatusCode::CREATED, "paid")),
                        }
                    }
                }),
            };
            let app = router.route_layer(layer).layer(CatchPanicLayer::new());
            let first = spawn(&app, post(key, "A"));
            puppet.next().await.panics("as the test wants");
            assert_eq!(first.await.unwrap().status, 500);
            // The first look works, and none after that.
            store.fail(Operation::Claim, Fault::DelayBefore(Duration::ZERO), Times::Once);
            store.fail(Operation::Claim, Fault::Before, Times::Always);
            let answer = send(&app, post(key, "A")).await;
            match key {
                "answered" => assert_eq!((&answer.body[..], answer.replay), (&b"paid"[..], true)),
                _ => assert_eq!(answer.said(), (503, UNAVAILABLE.to_owned()), "{key}"),
            }
            assert_eq!(asked.load(Ordering::SeqCst), usize::from(resolves));
            assert_eq!(puppet.begun(), 1, "{key}");
            store.clear();
        }
    }
}

every_store! {
    // O1
    async fn while_the_store_is_down_keyed_requests_get_503_and_do_not_run(world: World) {
        for (fault, key) in [(Fault::Before, "before"), (Fault::After, "after")] {
            let handler = Handler::new();
            let store = world.open().await;
            let server = Server::start(handler.behind(layer(&store))).await;
            store.fail(Operation::Claim, fault, Times::Always);
            for _ in 0..3 {
                let refused = server.exchange(&raw_post(key, "A")).await;
                assert_eq!(refused.said(), (503, UNAVAILABLE.to_owned()));
                assert_eq!(refused.header("retry-after"), Some(&b"1"[..]));
                assert!(!refused.is_replay());
            }
            assert_eq!(handler.effects(), 0);
            // What the client got wrong is still its own fault.
            let keyless = b"POST /charges HTTP/1.1\r\nhost: test\r\ncontent-length: 0\r\n\r\n";
            assert_eq!(server.exchange(keyless).await.said(), (400, "idempotency_key_required".to_owned()));
            store.clear();
            let retried = async {
                loop {
                    let reply = server.exchange(&raw_post(key, "A")).await;
                    if ![IN_FLIGHT, UNAVAILABLE].contains(&&*reply.code()) {
                        return reply;
                    }
                }
            };
            let reply = timeout(Duration::from_secs(10), retried).await.expect("it never runs");
            assert_eq!((reply.status, handler.effects()), (201, 1));
        }
    }

    // O1
    async fn a_closed_store_refuses_too(world: World) {
        let handler = Handler::new();
        let store = world.open().await;
        let app = handler.behind(layer(&store));
        store.close().await.unwrap();
        let refused = send(&app, post("k", "A")).await;
        assert_eq!(refused.said(), (503, UNAVAILABLE.to_owned()));
        assert_eq!(handler.effects(), 0);
    }

    // O1
    async fn run_unprotected_runs_and_says_so(world: World) {
        let handler = Handler::new();
        let store = world.open().await;
        let app = handler.behind(layer(&store).store_failure(StoreFailure::RunUnprotected));
        store.fail(Operation::Claim, Fault::Before, Times::Always);
        for run in 1..=2 {
            let response = app.clone().oneshot(post("k", "A")).await.unwrap();
            assert_eq!(response.idempotency_status(), Some(IdempotencyStatus::Unprotected));
            assert_eq!(response.status(), 201);
            assert_eq!(response.headers()["idempotency-status"], "unprotected");
            assert!(!response.is_replay());
            // A retry runs again: that is what the option means.
            assert_eq!(handler.effects(), run);
        }
        assert_eq!(store.calls(Operation::Complete), 0);
        assert!(record(&store, "k").await.is_none());
        let server = Server::start(app.clone()).await;
        let reply = server.exchange(&raw_post("k", "A")).await;
        assert_eq!(reply.header("idempotency-status"), Some(&b"unprotected"[..]));

        // Protected again, and unmarked, as soon as the store is back.
        store.clear();
        let first = send(&app, post("k", "A")).await;
        assert_eq!((first.status.as_u16(), first.header("idempotency-status")), (201, None));
        send(&app, post("k", "A")).await.assert_replays(&first);
        assert_eq!(handler.effects(), 4);
    }

    // R10: a handler cannot mark an unprotected answer as a replay.
    async fn an_unprotected_answer_is_never_marked_as_a_replay(world: World) {
        let handler = Handler::answering(|_| {
            let response = axum::http::Response::builder().header("idempotent-replay", "true");
            response.body(Body::empty()).unwrap()
        });
        let store = world.open().await;
        let app = handler.behind(layer(&store).store_failure(StoreFailure::RunUnprotected));
        store.fail(Operation::Claim, Fault::Before, Times::Always);
        assert_eq!(send(&app, post("k", "A")).await.header("idempotent-replay"), None);
    }

    // O1: bounded by its own time-out and not by the client's patience.
    async fn a_store_that_hangs_is_waited_for_no_longer_than_store_timeout(world: World) {
        for fault in [Fault::HangBefore, Fault::HangAfter] {
            for failure in [StoreFailure::Refuse, StoreFailure::RunUnprotected] {
                let handler = Handler::new();
                let store = world.open().await;
                let app = handler.behind(layer(&store).store_failure(failure));
                store.fail(Operation::Claim, fault, Times::Always);
                let asked = Instant::now();
                let answer = send(&app, post("k", "A")).await;
                let waited = asked.elapsed();
                assert!(waited >= STORE_TIMEOUT, "{waited:?}");
                assert!(waited < STORE_TIMEOUT + Duration::from_millis(600), "{waited:?}");
                let expected = match failure {
                    StoreFailure::Refuse => (503, 0),
                    _ => (201, 1),
                };
                assert_eq!((answer.status.as_u16(), handler.effects()), expected);
                // Whatever was claimed for nobody is given back.
                comes_to(&store, "k", None).await;
            }
        }
    }

    // O1
    async fn a_request_without_a_key_is_unaffected(world: World) {
        let handler = Handler::new();
        let store = world.open().await;
        let app = handler.behind(layer(&store).optional());
        for operation in [Operation::Claim, Operation::Complete, Operation::Renew, Operation::Purge] {
            store.fail(operation, Fault::HangBefore, Times::Always);
        }
        for method in ["GET", "POST", "PATCH", "DELETE"] {
            let answer = timeout(STORE_TIMEOUT / 2, send(&app, request(method, "/charges", None, "A")));
            let answer = answer.await.expect("it waits for the store");
            assert_eq!((answer.status.as_u16(), answer.header("idempotency-status")), (201, None));
        }
        assert_eq!((handler.effects(), store.total_calls()), (4, 0));
    }

    // O2
    async fn a_completion_that_fails_once_is_sent_again_and_stored(world: World) {
        for (fault, key) in [(Fault::Before, "before"), (Fault::After, "after")] {
            let handler = Handler::new();
            let store = world.open().await;
            let app = handler.behind(layer(&store));
            store.fail(Operation::Complete, fault, Times::Once);
            let first = send(&app, post(key, "A")).await;
            assert_eq!((first.status.as_u16(), store.calls(Operation::Complete)), (201, 2));
            assert_eq!(state(&store, key).await, Some(State::Completed));
            send(&app, post(key, "A")).await.assert_replays(&first);
            assert_eq!(handler.effects(), 1);
        }
    }

    // O2
    async fn the_client_gets_its_true_answer_when_recording_keeps_failing(world: World) {
        let faults = [(Fault::Before, "before"), (Fault::HangBefore, "hang")];
        for (number, (fault, key)) in faults.into_iter().enumerate() {
            let handler = Handler::new();
            let store = world.open().await;
            let app = handler.behind(layer(&store));
            store.fail(Operation::Complete, fault, Times::Always);
            let asked = Instant::now();
            let answer = send(&app, post(key, "A")).await;
            let waited = asked.elapsed();
            assert_eq!((answer.status.as_u16(), &answer.body[..]), (201, &b"{\"charge\":1}"[..]));
            assert!(waited >= STORE_TIMEOUT, "{waited:?}");
            assert!(waited < STORE_TIMEOUT + Duration::from_millis(600), "{waited:?}");

            // The claim is kept: nobody runs, and nothing is given back.
            for _ in 0..3 {
                assert_eq!(send(&app, post(key, "A")).await.said(), (409, IN_FLIGHT.to_owned()));
            }
            assert_eq!((store.calls(Operation::Release), store.calls(Operation::Abandon)), (0, 0));
            // After the lease it is, for other processes, for the recovery policy.
            world.clock.advance(LEASE + Duration::from_secs(1));
            let next = world.open().await;
            let refusing = handler.behind(layer(&next));
            assert_eq!(send(&refusing, post(key, "A")).await.said(), (409, UNKNOWN.to_owned()));
            assert_eq!(handler.effects(), 1);
            let next = handler.behind(layer(&next).recovery(Recovery::rerun()));
            assert_eq!(send(&next, post(key, "A")).await.status, 201);
            assert_eq!(handler.effects(), 2, "case {number}");
        }
    }

    // O2: the process that holds the answer knows better than its lapsed lease.
    async fn while_an_answer_is_being_recorded_its_own_process_never_runs_again(world: World) {
        for recovery in [Recovery::Refuse, Recovery::rerun()] {
            let handler = Handler::new();
            let store = world.open().await;
            let app = handler.behind(layer(&store).recovery(recovery));
            store.fail(Operation::Complete, Fault::Before, Times::Always);
            store.fail(Operation::Renew, Fault::Before, Times::Always);
            let key = format!("{recovery:?}");
            let key = key.split(' ').next().unwrap();
            let first = send(&app, post(key, "A")).await;
            world.clock.advance(LEASE + Duration::from_secs(1));
            assert_eq!(send(&app, post(key, "A")).await.said(), (409, IN_FLIGHT.to_owned()));
            store.clear();
            comes_to(&store, key, Some(State::Completed)).await;
            send(&app, post(key, "A")).await.assert_replays(&first);
            assert_eq!(handler.effects(), 1);
        }
    }

    // O2
    async fn recording_goes_on_in_the_background_until_the_store_is_back(world: World) {
        let handler = Handler::new();
        let store = world.open().await;
        let app = handler.behind(layer(&store));
        store.fail(Operation::Complete, Fault::Before, Times::Always);
        let first = send(&app, post("k", "A")).await;
        let tries = store.calls(Operation::Complete);
        // It does not hammer the store meanwhile.
        assert!((3..=12).contains(&tries), "{tries} tries in {STORE_TIMEOUT:?}");
        called(&store, Operation::Complete, tries + 3).await;
        assert_eq!(state(&store, "k").await, Some(State::Running));
        store.clear();
        comes_to(&store, "k", Some(State::Completed)).await;
        send(&app, post("k", "A")).await.assert_replays(&first);
        assert_eq!(handler.effects(), 1);
    }

    // O2: a try that hangs must not be the last one.
    async fn recording_goes_on_when_a_try_in_the_background_hangs(world: World) {
        let handler = Handler::new();
        let store = world.open().await;
        let app = handler.behind(layer(&store));
        store.fail(Operation::Complete, Fault::HangBefore, Times::Next(3));
        let first = send(&app, post("k", "A")).await;
        assert_eq!(first.status, 201);
        comes_to(&store, "k", Some(State::Completed)).await;
        assert_eq!(store.calls(Operation::Complete), 4);
        send(&app, post("k", "A")).await.assert_replays(&first);
        assert_eq!(handler.effects(), 1);
    }

    // O1, C3: the same for a claim that is given back in the background.
    async fn giving_back_goes_on_when_a_try_in_the_background_hangs(world: World) {
        let handler = Handler::new();
        let store = world.open().await;
        let app = handler.behind(layer(&store));
        store.fail(Operation::Claim, Fault::HangAfter, Times::Once);
        store.fail(Operation::Release, Fault::HangBefore, Times::Next(2));
        assert_eq!(send(&app, post("k", "A")).await.said(), (503, UNAVAILABLE.to_owned()));
        comes_to(&store, "k", None).await;
        assert_eq!(store.calls(Operation::Release), 3);
        assert_eq!(send(&app, post("k", "A")).await.status, 201);
        assert_eq!(handler.effects(), 1);
    }

    // O2
    async fn a_completion_that_was_committed_and_never_acknowledged_replays_at_once(world: World) {
        let handler = Handler::new();
        let store = world.open().await;
        let app = handler.behind(layer(&store));
        for (fault, key) in [(Fault::After, "after"), (Fault::HangAfter, "hang")] {
            store.fail(Operation::Complete, fault, Times::Always);
            let first = send(&app, post(key, "A")).await;
            assert_eq!(first.status, 201);
            let before = record(&store, key).await.unwrap();
            world.clock.advance(Duration::from_secs(5));
            send(&app, post(key, "A")).await.assert_replays(&first);
            // Sent again and again, it stays as it was first recorded.
            let tries = store.calls(Operation::Complete);
            called(&store, Operation::Complete, tries + 2).await;
            assert_eq!(record(&store, key).await.unwrap(), before);
            store.clear();
        }
        assert_eq!(handler.effects(), 2);
    }

    // O2: what is released or abandoned is recorded as patiently.
    async fn releasing_and_abandoning_go_on_in_the_background_too(world: World) {
        let store = world.open().await;
        let (router, mut puppet) = Puppet::new();
        let app = router.route_layer(layer(&store)).layer(CatchPanicLayer::new());
        store.fail(Operation::Release, Fault::Before, Times::Always);
        store.fail(Operation::Abandon, Fault::Before, Times::Always);
        let refused = spawn(&app, post("release", "A"));
        puppet.next().await.answers(422, "no");
        assert_eq!(refused.await.unwrap().status, 422);
        let panicked = spawn(&app, post("abandon", "A"));
        puppet.next().await.panics("as asked");
        assert_eq!(panicked.await.unwrap().status, 500);
        for key in ["release", "abandon"] {
            assert_eq!(send(&app, post(key, "A")).await.said(), (409, IN_FLIGHT.to_owned()));
        }
        store.clear();
        comes_to(&store, "release", None).await;
        comes_to(&store, "abandon", Some(State::Abandoned)).await;
    }
}

// O4
#[tokio::test]
async fn a_full_memory_store_refuses_new_keys_and_keeps_what_lives() {
    let clock = FakeClock::new();
    let options = || MemoryStore::options().clock(clock.clone());
    keeps_what_lives(&clock, options().max_records(2).build()).await;
    // About 512 bytes for a record.
    keeps_what_lives(&clock, options().max_bytes(900).build()).await;
}

// O4
#[tokio::test]
async fn a_full_sqlite_store_refuses_new_keys_and_keeps_what_lives() {
    let (clock, folder) = (FakeClock::new(), tempfile::tempdir().unwrap());
    let options = SqliteStore::options(folder.path().join("idempotency.db")).clock(clock.clone());
    keeps_what_lives(&clock, options.max_records(2).open().await.unwrap()).await;
}

async fn keeps_what_lives(
    clock: &FakeClock,
    store: impl tower_idempotency::store::Inspect + tower_idempotency::store::Checkpoints,
) {
    let store = FaultyStore::new(AnyStore::new(store));
    let (router, mut puppet) = Puppet::new();
    let ttl = Duration::from_secs(10);
    // The default patience: a busy disk is not what this is about.
    let patient = layer(&store)
        .ttl(ttl)
        .max_run(Duration::from_secs(3_600))
        .store_timeout(Duration::from_secs(5));
    let app = router.clone().route_layer(patient.clone());
    let first = spawn(&app, post("done", "A"));
    puppet.next().await.answers(201, "done");
    let first = first.await.unwrap();
    let running = spawn(&app, post("running", "A"));
    let run = puppet.next().await;
    assert_eq!(puppet.begun(), 2);

    for number in 0..50 {
        let refused = send(&app, post(&format!("new-{number}"), "A")).await;
        assert_eq!(refused.said(), (503, UNAVAILABLE.to_owned()));
        assert_eq!(refused.header("retry-after"), Some("1"));
    }
    assert_eq!(puppet.begun(), 2, "a request ran without a record");
    send(&app, post("done", "A")).await.assert_replays(&first);
    assert_eq!(
        send(&app, post("running", "A")).await.said(),
        (409, IN_FLIGHT.to_owned())
    );
    assert_eq!(
        send(&app, post("done", "B")).await.code(),
        "idempotency_key_reused"
    );

    // Full or not, by explicit option it runs.
    let unprotected = router.route_layer(patient.store_failure(StoreFailure::RunUnprotected));
    let answer = spawn(&unprotected, post("unprotected", "A"));
    puppet.next().await.answers(201, "done");
    assert_eq!(
        answer.await.unwrap().header("idempotency-status"),
        Some("unprotected")
    );

    // What was granted can be completed, and what has expired makes room for as much.
    run.answers(201, "done late");
    let late = running.await.unwrap();
    send(&app, post("running", "A")).await.assert_replays(&late);
    clock.advance(ttl / 2);
    assert_eq!(
        send(&app, post("new", "A")).await.said(),
        (503, UNAVAILABLE.to_owned())
    );
    clock.advance(ttl / 2);
    for key in ["new", "newer"] {
        let admitted = spawn(&app, post(key, "A"));
        puppet.next().await.answers(201, "admitted");
        assert_eq!(admitted.await.unwrap().status, 201, "{key}");
    }
    assert_eq!(
        send(&app, post("newest", "A")).await.said(),
        (503, UNAVAILABLE.to_owned())
    );
}

const STORE_FAILED: &str = "idempotency store failed";
const NO_ANSWER: &str = "idempotency store did not answer in time";

fn about(logged: Vec<Logged>, operation: &str) -> Vec<Logged> {
    let field = format!("operation=\"{operation}\"");
    logged
        .into_iter()
        .filter(|event| event.text.contains(&field))
        .collect()
}

// V3, O2. On one thread, so that what is done in the background is heard as well.
#[tokio::test]
async fn each_failure_of_the_store_is_logged_once() {
    for world in World::each() {
        let (logs, _guard) = Logs::of_this_thread();
        let store = world.open().await;
        let (router, mut puppet) = Puppet::new();
        let layer = IdempotencyLayer::new(store.clone())
            .single_tenant()
            .lease(Duration::from_millis(300))
            .ttl(Duration::from_secs(1))
            .store_timeout(Duration::from_secs(1));
        let app = router.route_layer(layer).layer(CatchPanicLayer::new());
        let heard = |text: &str, operation: &str| about(logs.loud(text), operation).len();

        // A claim is tried three times, a lost acknowledgement included.
        store.fail(Operation::Claim, Fault::Before, Times::Next(2));
        store.fail(Operation::Claim, Fault::After, Times::Once);
        assert_eq!(send(&app, post("claim", "A")).await.code(), UNAVAILABLE);
        assert_eq!(heard(STORE_FAILED, "claim"), 3);
        store.fail(Operation::Claim, Fault::HangBefore, Times::Once);
        assert_eq!(send(&app, post("claim-2", "A")).await.code(), UNAVAILABLE);
        assert_eq!(
            (heard(STORE_FAILED, "claim"), heard(NO_ANSWER, "claim")),
            (3, 1)
        );

        store.fail(Operation::Complete, Fault::Before, Times::Once);
        store.fail(Operation::Complete, Fault::After, Times::Once);
        let answer = spawn(&app, post("complete", "A"));
        puppet.next().await.answers(201, "done");
        assert_eq!(answer.await.unwrap().status, 201);
        assert_eq!(heard(STORE_FAILED, "complete"), 2);

        let released = heard(STORE_FAILED, "release");
        assert_eq!(released, 0);
        store.fail(Operation::Release, Fault::Before, Times::Once);
        let answer = spawn(&app, post("release", "A"));
        puppet.next().await.answers(422, "no");
        assert_eq!(answer.await.unwrap().status, 422);
        assert_eq!(heard(STORE_FAILED, "release"), 1);

        store.fail(Operation::Abandon, Fault::After, Times::Once);
        let answer = spawn(&app, post("abandon", "A"));
        puppet.next().await.panics("as asked");
        assert_eq!(answer.await.unwrap().status, 500);
        assert_eq!(heard(STORE_FAILED, "abandon"), 1);

        // The heartbeat and the purge, which nobody asks for.
        let answer = spawn(&app, post("renew", "A"));
        let run = puppet.next().await;
        store.fail(Operation::Renew, Fault::Before, Times::Once);
        store.fail(Operation::Renew, Fault::HangBefore, Times::Once);
        let calls = store.calls(Operation::Renew);
        called(&store, Operation::Renew, calls + 3).await;
        assert_eq!(
            (heard(STORE_FAILED, "renew"), heard(NO_ANSWER, "renew")),
            (1, 1)
        );
        while run.owner().ensure_owned().await.is_err() {
            sleep(Duration::from_millis(5)).await;
        }
        // By the heartbeat or by the owner, whoever comes first.
        store.fail(Operation::Renew, Fault::Before, Times::Once);
        let _ = run.owner().ensure_owned().await;
        assert_eq!(
            (heard(STORE_FAILED, "renew"), heard(NO_ANSWER, "renew")),
            (2, 1)
        );
        store.fail(Operation::Purge, Fault::Before, Times::Once);
        let calls = store.calls(Operation::Purge);
        called(&store, Operation::Purge, calls + 1).await;
        eventually("the purge's failure to be logged", || {
            heard(STORE_FAILED, "purge") == 1
        })
        .await;
        run.answers(201, "done");
        assert_eq!(answer.await.unwrap().status, 201);

        // Each names what was wrong, and nothing secret.
        for event in logs.loud(STORE_FAILED) {
            assert!(
                event.text.contains("error=") && event.text.contains("kind=Unavailable"),
                "{event:?}"
            );
        }
    }
}

// O2
#[tokio::test]
async fn an_answer_that_could_not_be_recorded_in_time_is_logged_as_an_error() {
    for world in World::each() {
        let (logs, _guard) = Logs::of_this_thread();
        let handler = Handler::new();
        let store = world.open().await;
        let app = handler.behind(layer(&store));
        store.fail(Operation::Complete, Fault::Before, Times::Always);
        assert_eq!(send(&app, post("k", "A")).await.status, 201);
        let late = logs.loud("not written within store_timeout");
        assert_eq!(late.len(), 1, "{late:?}");
        assert_eq!(late[0].level, Level::ERROR);
        let tries = store.calls(Operation::Complete);
        assert_eq!(about(logs.loud(STORE_FAILED), "complete").len(), tries);
        store.clear();
        comes_to(&store, "k", Some(State::Completed)).await;
        assert_eq!(logs.loud("not written").len(), 1);

        // A lost acknowledgement is no lost ownership.
        store.fail(Operation::Complete, Fault::After, Times::Once);
        assert_eq!(send(&app, post("k-2", "A")).await.status, 201);
        assert_eq!(logs.loud("claim lost").len(), 0);
    }
}

// O1: counted, by the event of its decision.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unprotected_run_is_one_loud_event() {
    let logs = Logs::everywhere();
    let span = tracing::info_span!("unprotected");
    let runs = Arc::new(AtomicUsize::new(0));
    let store = World::memory().open().await;
    let inner = {
        let runs = runs.clone();
        tower::service_fn(move |_: Request<Body>| {
            runs.fetch_add(1, Ordering::SeqCst);
            async { Ok::<_, std::convert::Infallible>(axum::http::Response::new(Body::empty())) }
        })
    };
    let service = layer(&store)
        .store_failure(StoreFailure::RunUnprotected)
        .layer(inner);
    store.fail(Operation::Claim, Fault::Before, Times::Always);
    service
        .oneshot(post("k", "A"))
        .instrument(span.clone())
        .await
        .unwrap();
    let logged = logs.within(&span);
    let decided: Vec<_> = logged
        .iter()
        .filter(|event| event.text.contains("decision"))
        .collect();
    assert_eq!(decided.len(), 1, "{logged:?}");
    assert!(
        decided[0].is_loud() && decided[0].text.contains("unprotected"),
        "{decided:?}"
    );
    assert_eq!(runs.load(Ordering::SeqCst), 1);
}

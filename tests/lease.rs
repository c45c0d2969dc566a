//! What becomes of a claim whose owner falls silent, fails, or takes too long.

mod support;

use std::{
    future::poll_fn,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
    time::{Duration, Instant},
};

use axum::{
    Json, Router,
    body::Body,
    http::{Request, Response, StatusCode},
    routing::post as route_post,
};
use bytes::Bytes;
use http_body_util::{BodyExt, channel::Channel};
use support::{
    puppet::{Puppet, Run},
    *,
};
use tokio::{
    runtime::{self, Runtime},
    task::{JoinHandle, JoinSet},
    time::sleep,
};
use tower::{BoxError, Layer, Service, ServiceExt};
use tower_http::{catch_panic::CatchPanicLayer, timeout::TimeoutLayer};
use tower_idempotency::{
    Fingerprint, IdempotencyKey, IdempotencyLayer, IdempotencyStatus, IdempotentResponse, InFlight,
    MemoryStore, RecordId, Recovery, Retain, Retention, Scope, State,
    store::{ClaimRequest, Inspect, Settled, Store, Ticket},
    testing::{Fault, FaultyStore, Operation, Times},
};

const IN_FLIGHT: &str = "idempotency_in_flight";
const UNKNOWN: &str = "idempotency_outcome_unknown";
const LEASE: Duration = Duration::from_secs(30);
const SECOND: Duration = Duration::from_secs(1);
const DAY: Duration = Duration::from_secs(86_400);

fn layer(store: &TestStore) -> IdempotencyLayer<TestStore> {
    IdempotencyLayer::new(store.clone()).single_tenant()
}

fn id(key: &str) -> RecordId {
    RecordId::new(Scope::shared(), IdempotencyKey::new(key))
}

/// The ticket that holds this key now.
async fn ticket(store: &TestStore, key: &str) -> Ticket {
    let held = record(store, key).await.unwrap();
    let mut claim = ClaimRequest::new(id(key), "", Fingerprint::from_bytes([0; 32]));
    claim.token = held.token;
    claim.ticket(held.attempt)
}

async fn state(store: &TestStore, key: &str) -> Option<State> {
    record(store, key).await.map(|record| record.state)
}

every_store! {
    // L1
    async fn a_dead_owners_key_is_in_flight_until_its_lease_ends_whatever_the_ttl(world: World) {
        let policies = [(Recovery::Refuse, 409), (Recovery::rerun(), 201)];
        for ttl in [SECOND, Duration::from_secs(29), DAY] {
            for (recovery, expected) in policies {
                let key = format!("k-{}-{expected}", ttl.as_secs());
                let (router, mut puppet) = Puppet::new();
                let dead = router.clone().route_layer(layer(&world.open_silent().await).lease(LEASE).ttl(ttl));
                let alive = layer(&world.open().await).lease(LEASE).ttl(ttl).recovery(recovery);
                let alive = router.route_layer(alive);
                let _never_answered = spawn(&dead, post(&key, "A"));
                let _dead = puppet.next().await;

                world.clock.advance(LEASE - SECOND);
                let early = send(&alive, post(&key, "A")).await;
                assert_eq!(early.said(), (409, IN_FLIGHT.to_owned()), "ttl {ttl:?}");
                assert_eq!(early.header("retry-after"), Some("1"));

                world.clock.advance(2 * SECOND);
                let late = spawn(&alive, post(&key, "A"));
                if expected == 201 {
                    let run = puppet.next().await;
                    assert_eq!(run.owner().attempt(), 2);
                    run.answers(201, "again");
                }
                let late = late.await.unwrap();
                assert_eq!(late.status, expected, "{late:?}");
                assert_eq!(late.code(), if expected == 409 { UNKNOWN } else { "" });
                assert_eq!(late.header("retry-after"), None);
            }
        }
    }

    // L3 (a): what a replaced owner gives up is not its own any more.
    async fn a_replaced_owner_that_fails_frees_nothing(world: World) {
        type End = fn(Run);
        let ends: [(&str, End, u16); 3] = [
            ("released", |run| run.answers(422, "no"), 422),
            ("tombstone", |run| {
                let answer = (StatusCode::OK, Retain::Tombstone, "streamed elsewhere");
                run.answers_with(axum::response::IntoResponse::into_response(answer));
            }, 200),
            ("panicked", |run| run.panics("as asked"), 500),
        ];
        for (key, end, answered) in ends {
            let mut lapsed = Lapsed::new(&world, key).await;
            let (second, running) = lapsed.taken_over().await;
            let before = record(&lapsed.store, key).await.unwrap();

            end(lapsed.first);
            assert_eq!(lapsed.answer.await.unwrap().status, answered);
            assert_eq!(record(&lapsed.store, key).await.unwrap(), before);
            for app in [&lapsed.old_app, &lapsed.app] {
                assert_eq!(send(app, post(key, "A")).await.said(), (409, IN_FLIGHT.to_owned()), "{key}");
            }

            second.answers(201, "second");
            let stored = running.await.unwrap();
            for app in [&lapsed.old_app, &lapsed.app] {
                send(app, post(key, "A")).await.assert_replays(&stored);
            }
            assert_eq!(lapsed.puppet.begun(), 2);
        }
    }

    // L3 (b)
    async fn a_replaced_owner_that_succeeds_answers_its_caller_and_stores_nothing(world: World) {
        // Before and after the second run has ended.
        for (key, second_first) in [("k-1", false), ("k-2", true)] {
            let mut lapsed = Lapsed::new(&world, key).await;
            let (second, running) = lapsed.taken_over().await;
            let (old_answer, stored) = if second_first {
                second.answers(201, "second");
                let stored = running.await.unwrap();
                lapsed.first.answers(201, "first");
                (lapsed.answer.await.unwrap(), stored)
            } else {
                lapsed.first.answers(201, "first");
                let old_answer = lapsed.answer.await.unwrap();
                assert_eq!(send(&lapsed.app, post(key, "A")).await.code(), IN_FLIGHT);
                second.answers(201, "second");
                (old_answer, running.await.unwrap())
            };
            assert_eq!((old_answer.status.as_u16(), &old_answer.body[..]), (201, &b"first"[..]));
            assert!(!old_answer.replay && old_answer.header("idempotent-replay").is_none());
            assert_eq!(&stored.body[..], b"second");
            for app in [&lapsed.old_app, &lapsed.app] {
                send(app, post(key, "A")).await.assert_replays(&stored);
            }
            assert_eq!(lapsed.puppet.begun(), 2);
        }
    }

    // L3
    async fn renew_and_abandon_of_a_replaced_owner_change_nothing(world: World) {
        let mut lapsed = Lapsed::new(&world, "k").await;
        let old_ticket = ticket(&lapsed.store, "k").await;
        let (second, running) = lapsed.taken_over().await;
        let before = record(&lapsed.store, "k").await.unwrap();
        let old = lapsed.old_store.inner();
        assert_eq!(old.renew(std::slice::from_ref(&old_ticket), LEASE).await.unwrap(), [Settled::Lost]);
        assert_eq!(old.abandon(&old_ticket).await.unwrap(), Settled::Lost);
        assert_eq!(old.release(&old_ticket, DAY).await.unwrap(), Settled::Lost);
        lapsed.old_store.clear();
        let told = lapsed.first.owner().ensure_owned().await.unwrap_err();
        assert!(!told.is_unknown(), "the store could say: {told}");
        second.owner().ensure_owned().await.unwrap();
        assert_eq!(record(&lapsed.store, "k").await.unwrap(), before);
        assert_eq!(send(&lapsed.app, post("k", "A")).await.code(), IN_FLIGHT);
        second.answers(201, "second");
        assert_eq!(running.await.unwrap().status, 201);
    }

    // L3
    async fn an_owner_whose_lease_lapsed_still_completes_when_nobody_took_over(world: World) {
        let lapsed = Lapsed::new(&world, "k").await;
        // Being asked about and refused is no takeover.
        let refusing = layer(&world.open().await).lease(LEASE);
        let (router, bystander) = Puppet::new();
        let refusing = router.route_layer(refusing);
        assert_eq!(send(&refusing, post("k", "A")).await.said(), (409, UNKNOWN.to_owned()));
        lapsed.first.answers(201, "first");
        let first = lapsed.answer.await.unwrap();
        send(&refusing, post("k", "A")).await.assert_replays(&first);
        send(&lapsed.app, post("k", "A")).await.assert_replays(&first);
        assert_eq!((lapsed.puppet.begun(), bystander.begun()), (1, 0));
    }

    // L6
    async fn lifetimes_from_250_ms_to_for_ever_end_when_they_say(world: World) {
        for ttl in DURATIONS {
            let key = format!("k-{}", ttl.as_millis());
            let handler = Handler::new();
            let app = handler.behind(layer(&world.open().await).ttl(ttl));
            let first = send(&app, post(&key, "A")).await;
            assert_eq!(first.status, 201);
            world.clock.advance(ttl.min(DURATIONS[3]).mul_f64(0.9));
            send(&app, post(&key, "A")).await.assert_replays(&first);
            world.clock.advance(ttl.min(DURATIONS[3]).mul_f64(0.2));
            let again = send(&app, post(&key, "A")).await;
            // A hundred years on, what is kept for ever is still there.
            let runs = if ttl == Duration::MAX { 1 } else { 2 };
            assert_eq!((again.status.as_u16(), handler.effects()), (201, runs), "ttl {ttl:?}");
            assert_eq!(again.replay, runs == 1);
        }
    }

    // L6
    async fn leases_from_250_ms_to_for_ever_end_when_they_say(world: World) {
        for lease in DURATIONS {
            let key = format!("k-{}", lease.as_millis());
            let (router, mut puppet) = Puppet::new();
            let layer = |store: &TestStore| layer(store).max_run(Duration::MAX).lease(lease);
            let dead = router.clone().route_layer(layer(&world.open_silent().await));
            let alive = router.route_layer(layer(&world.open().await));
            let _never_answered = spawn(&dead, post(&key, "A"));
            let _run = puppet.next().await;
            world.clock.advance(lease.min(DURATIONS[3]).mul_f64(0.9));
            assert_eq!(send(&alive, post(&key, "A")).await.code(), IN_FLIGHT, "lease {lease:?}");
            world.clock.advance(lease.min(DURATIONS[3]).mul_f64(0.2));
            let late = send(&alive, post(&key, "A")).await;
            let expected = if lease == Duration::MAX { IN_FLIGHT } else { UNKNOWN };
            assert_eq!(late.code(), expected, "lease {lease:?}");
        }
    }

    // L6: durations that overflow when added to a time.
    async fn no_duration_ends_the_background_work(world: World) {
        let store = world.open().await;
        let for_ever = layer(&store)
            .max_run(Duration::MAX)
            .lease(Duration::MAX)
            .abandoned_ttl(Duration::MAX)
            .ttl(Duration::from_millis(250))
            .store_timeout(Duration::MAX)
            .buffer_timeout(Duration::MAX)
            .in_flight(InFlight::Wait(Duration::MAX));
        let (router, mut puppet) = Puppet::new();
        let app = router.route_layer(for_ever.clone());
        let first = spawn(&app, post("k", "A"));
        let run = puppet.next().await;
        let waiter = spawn(&app, post("k", "A"));
        called(&store, Operation::Claim, 3).await;
        // A layer with another lease makes the heart beat at once, and this time there are runs.
        let beats = store.calls(Operation::Renew);
        let _hurried = for_ever.clone().lease(SECOND).layer(());
        called(&store, Operation::Renew, beats + 2).await;
        let purged = tokio::time::timeout(Duration::from_secs(8), called(&store, Operation::Purge, 1));
        purged.await.expect("the background work has ended");
        run.owner().ensure_owned().await.unwrap();
        run.answers(201, "done");
        let first = first.await.unwrap();
        waiter.await.unwrap().assert_replays(&first);
        let drained = for_ever.drain(Duration::MAX).await;
        assert_eq!((drained.aborted, drained.left), (0, 0));
    }

    // L10
    async fn one_failed_renewal_has_no_effect(world: World) {
        let store = world.open().await;
        let lease = Duration::from_millis(300);
        let (router, mut puppet) = Puppet::new();
        let app = router.route_layer(layer(&store).lease(lease));
        let answer = spawn(&app, post("k", "A"));
        let run = puppet.next().await;
        store.fail(Operation::Renew, Fault::Before, Times::Once);
        let calls = store.calls(Operation::Renew);
        called(&store, Operation::Renew, calls + 2).await;
        run.owner().ensure_owned().await.unwrap();
        // Four times its lease later it is still believed alive, a third of it at a time.
        for beat in 0..12 {
            world.clock.advance(lease / 3);
            let calls = store.calls(Operation::Renew);
            assert_eq!(send(&app, post("k", "A")).await.code(), IN_FLIGHT, "beat {beat}");
            called(&store, Operation::Renew, calls + 1).await;
            eventually_renewed(&store, &run).await;
        }
        run.answers(201, "done");
        let first = answer.await.unwrap();
        send(&app, post("k", "A")).await.assert_replays(&first);
        assert_eq!(puppet.begun(), 1);
    }

    // L10
    async fn when_all_renewals_fail_the_owner_knows_after_the_deadline(world: World) {
        let store = world.open_silent().await;
        let lease = Duration::from_millis(600);
        let (router, mut puppet) = Puppet::new();
        let begun = Instant::now();
        let old_app = router.clone().route_layer(layer(&store).lease(lease));
        let answer = spawn(&old_app, post("k", "A"));
        let run = puppet.next().await;
        let told = run.owner().ensure_owned().await.unwrap_err();
        if begun.elapsed() < lease / 2 {
            assert!(told.is_unknown(), "too eager: {told}");
        }
        let mut known_after = None;
        for _ in 0..2_000 {
            if !run.owner().ensure_owned().await.unwrap_err().is_unknown() {
                known_after = Some(begun.elapsed());
                break;
            }
            sleep(Duration::from_millis(2)).await;
        }
        let known_after = known_after.expect("it never knows");
        assert!(known_after >= lease - Duration::from_millis(50), "too eager: {known_after:?}");
        assert!(known_after <= 2 * lease, "too late: {known_after:?}");

        // Somebody takes over, and only then is the late completion refused: by its token.
        world.clock.advance(lease + SECOND);
        let alive = world.open().await;
        let app = router.route_layer(layer(&alive).lease(lease).recovery(Recovery::rerun()));
        let second = spawn(&app, post("k", "A"));
        let second_run = puppet.next().await;
        run.answers(201, "first");
        assert_eq!(&answer.await.unwrap().body[..], b"first");
        second_run.answers(201, "second");
        let stored = second.await.unwrap();
        send(&app, post("k", "A")).await.assert_replays(&stored);
    }

    // L10
    async fn an_owner_that_believes_its_claim_lost_learns_that_it_was_not(world: World) {
        let store = world.open_silent().await;
        let lease = Duration::from_millis(200);
        let (router, mut puppet) = Puppet::new();
        let app = router.route_layer(layer(&store).lease(lease));
        let answer = spawn(&app, post("k", "A"));
        let run = puppet.next().await;
        let mut known = false;
        for _ in 0..2_000 {
            known = !run.owner().ensure_owned().await.unwrap_err().is_unknown();
            if known {
                break;
            }
            sleep(Duration::from_millis(2)).await;
        }
        assert!(known);
        store.clear();
        eventually_renewed(&store, &run).await;
        run.answers(201, "done");
        let first = answer.await.unwrap();
        send(&app, post("k", "A")).await.assert_replays(&first);
    }

    // L12
    async fn a_panic_reaches_a_catch_panic_layer_outside_and_abandons_at_once(world: World) {
        let store = world.open().await;
        let (router, mut puppet) = Puppet::new();
        let app = router.route_layer(layer(&store)).layer(CatchPanicLayer::new());
        let answer = spawn(&app, post("k", "A"));
        puppet.next().await.panics("as asked");
        assert_eq!(answer.await.unwrap().status, 500);
        assert_eq!(state(&store, "k").await, Some(State::Abandoned));
        for _ in 0..2 {
            assert_eq!(send(&app, post("k", "A")).await.said(), (409, UNKNOWN.to_owned()));
        }
        assert_eq!(puppet.begun(), 1);
    }

    // L12
    async fn a_panic_caught_inside_is_an_answer_and_is_kept(world: World) {
        let store = world.open().await;
        let (router, mut puppet) = Puppet::new();
        let app = router.layer(CatchPanicLayer::new()).layer(layer(&store));
        let answer = spawn(&app, post("k", "A"));
        puppet.next().await.panics("as asked");
        let first = answer.await.unwrap();
        assert_eq!(first.status, 500);
        assert_eq!(state(&store, "k").await, Some(State::Completed));
        send(&app, post("k", "A")).await.assert_replays(&first);
        assert_eq!(puppet.begun(), 1);
    }

    // L12
    async fn a_panic_with_nothing_to_catch_it_is_the_panic_the_caller_gets(world: World) {
        let store = world.open().await;
        let (router, mut puppet) = Puppet::new();
        let app = router.route_layer(layer(&store));
        let answer = spawn(&app, post("k", "A"));
        puppet.next().await.panics("these very words");
        let panic = answer.await.unwrap_err().into_panic();
        assert_eq!(panic.downcast_ref::<String>().unwrap(), "these very words");
        assert_eq!(state(&store, "k").await, Some(State::Abandoned));
        assert_eq!(send(&app, post("k", "A")).await.code(), UNKNOWN);
    }

    // L12: in `call` itself, in the future, and in the layer's own functions.
    async fn a_panic_anywhere_around_the_run_leaves_nothing_in_flight(world: World) {
        let store = world.open().await;
        let in_call = tower::service_fn(|_: Request<Body>| -> std::future::Ready<Result<Response<Body>, BoxError>> {
            panic!("in call")
        });
        let service = layer(&store).layer(in_call);
        let panicked = tokio::spawn(service.oneshot(post("call", "A"))).await;
        assert!(panicked.unwrap_err().is_panic());
        assert_eq!(state(&store, "call").await, Some(State::Abandoned));

        let fine = || tower::service_fn(|_: Request<Body>| async {
            Ok::<_, BoxError>(Response::new(Body::from("done")))
        });
        let retention = Retention::new(|_| panic!("in retention"));
        let service = layer(&store).retention(retention).layer(fine());
        let panicked = tokio::spawn(service.oneshot(post("retention", "A"))).await;
        assert!(panicked.unwrap_err().is_panic());
        assert_eq!(state(&store, "retention").await, Some(State::Abandoned));

        let service = IdempotencyLayer::new(store.clone()).scope(|_| panic!("in scope")).layer(fine());
        let panicked = tokio::spawn(service.oneshot(post("scope", "A"))).await;
        assert!(panicked.unwrap_err().is_panic());
        assert_eq!(state(&store, "scope").await, None);
    }

    // L12: the run that a waiter would begin never begins.
    async fn a_waiter_whose_service_fails_to_get_ready_leaves_the_key_free(world: World) {
        for unready in [Unready::Fails, Unready::Panics] {
            let key = format!("k-{unready:?}");
            let (router, mut puppet) = Puppet::new();
            let store = world.open().await;
            let shared = layer(&store).in_flight(InFlight::Wait(Duration::from_secs(10)));
            let app = router.route_layer(shared.clone());
            let first = spawn(&app, post(&key, "A"));
            let run = puppet.next().await;

            // Ready when the waiter comes, but not any more when its turn has come.
            let broken = Arc::new(AtomicBool::new(false));
            let service = shared.layer(Breaks { broken: broken.clone(), how: unready });
            let calls = store.calls(Operation::Claim);
            let request = post(&key, "A");
            let waiter = tokio::spawn(async move { service.oneshot(request).await });
            called(&store, Operation::Claim, calls + 2).await;
            broken.store(true, Ordering::SeqCst);
            run.answers(422, "no");
            assert_eq!(first.await.unwrap().status, 422);
            match (unready, waiter.await) {
                (Unready::Fails, Ok(Err(error))) => assert_eq!(error.to_string(), "out of order"),
                (Unready::Panics, Err(panic)) => assert!(panic.is_panic()),
                (_, other) => panic!("{other:?}"),
            }
            assert_eq!(state(&store, &key).await, None, "{unready:?}: nothing was begun");
            let again = spawn(&app, post(&key, "A"));
            puppet.next().await.answers(201, "done");
            assert_eq!(again.await.unwrap().status, 201);
        }
    }

    // L12
    async fn an_error_of_the_inner_service_reaches_the_caller_and_abandons_at_once(world: World) {
        let store = world.open().await;
        let failing = tower::service_fn(|_: Request<Body>| async {
            tokio::task::yield_now().await;
            Err::<Response<Body>, BoxError>("these very words".into())
        });
        let service = layer(&store).layer(failing);
        let error = service.clone().oneshot(post("k", "A")).await.unwrap_err();
        assert_eq!(error.to_string(), "these very words");
        assert_eq!(state(&store, "k").await, Some(State::Abandoned));
        let refused = Answer::of(service.oneshot(post("k", "A")).await.unwrap()).await;
        assert_eq!(refused.said(), (409, UNKNOWN.to_owned()));
    }

    // L12
    async fn an_extractor_rejection_frees_the_key_for_the_corrected_request(world: World) {
        let store = world.open().await;
        let handler = async |Json(amount): Json<u32>| (StatusCode::CREATED, amount.to_string());
        let app = Router::new().route("/charges", route_post(handler)).route_layer(layer(&store));
        for wrong in ["{", "\"x\"", ""] {
            let refused = send(&app, post("k", wrong)).await;
            assert!(refused.status.is_client_error(), "{refused:?}");
            assert_eq!(state(&store, "k").await, None);
        }
        let first = send(&app, post("k", "5")).await;
        assert_eq!(first.status, 201);
        send(&app, post("k", "5")).await.assert_replays(&first);
    }

    // L12: dropped by a time-out inside, whose answer says nothing about the effect.
    async fn a_handler_dropped_from_inside_leaves_its_ambiguous_answer(world: World) {
        let store = world.open().await;
        let (router, mut puppet) = Puppet::new();
        let limit = TimeoutLayer::with_status_code(StatusCode::REQUEST_TIMEOUT, Duration::from_millis(30));
        let app = router.layer(limit).layer(layer(&store));
        let answer = spawn(&app, post("k", "A"));
        puppet.next().await.dropped().await;
        let first = answer.await.unwrap();
        assert_eq!(first.status, 408);
        assert_eq!(state(&store, "k").await, Some(State::Completed));
        send(&app, post("k", "A")).await.assert_replays(&first);
        assert_eq!(puppet.begun(), 1);
    }

    // L12
    async fn a_response_body_that_fails_reaches_the_caller_and_leaves_a_tombstone(world: World) {
        for (key, before_failing) in [("at once", 0), ("after a chunk", 1)] {
            let store = world.open().await;
            let (router, mut puppet) = Puppet::new();
            let app = router.route_layer(layer(&store));
            let key = key.replace(' ', "-");
            let answer = tokio::spawn(app.clone().oneshot(post(&key, "A")));
            let (mut sender, body) = Channel::<Bytes, BoxError>::new(2);
            for _ in 0..before_failing {
                sender.send_data(Bytes::from("chunk")).await.unwrap();
            }
            sender.abort("cut off".into());
            puppet.next().await.answers_with(Response::new(Body::new(body)));
            let mut response = answer.await.unwrap().unwrap();
            assert_eq!(response.status(), 200);
            // Already before the caller reads.
            assert_eq!(state(&store, &key).await, Some(State::Completed));
            for _ in 0..before_failing {
                let frame = response.body_mut().frame().await.unwrap().unwrap();
                assert_eq!(frame.into_data().unwrap(), "chunk");
            }
            assert!(response.body_mut().frame().await.unwrap().is_err());
            let retry = send(&app, post(&key, "A")).await;
            assert_eq!(retry.said(), (409, "idempotency_response_not_retained".to_owned()));
            assert_eq!(puppet.begun(), 1);
        }
    }

    // Y2
    async fn a_run_longer_than_max_run_counts_as_abandoned_and_its_late_answer_still_counts(world: World) {
        let store = world.open().await;
        let max_run = Duration::from_secs(60);
        let (router, mut puppet) = Puppet::new();
        let app = router.route_layer(layer(&store).lease(LEASE).max_run(max_run));
        let answer = spawn(&app, post("k", "A"));
        let run = puppet.next().await;
        let hold = ticket(&store, "k").await;
        // The heart beats all the time.
        world.clock.advance(LEASE - SECOND);
        let _ = store.renew(std::slice::from_ref(&hold), LEASE).await.unwrap();
        world.clock.advance(LEASE - SECOND);
        let _ = store.renew(std::slice::from_ref(&hold), LEASE).await.unwrap();
        assert_eq!(send(&app, post("k", "A")).await.code(), IN_FLIGHT);
        world.clock.advance(3 * SECOND);
        assert_eq!(send(&app, post("k", "A")).await.said(), (409, UNKNOWN.to_owned()));
        let told = run.owner().ensure_owned().await.unwrap_err();
        assert!(!told.is_unknown());
        run.answers(201, "late");
        let late = answer.await.unwrap();
        assert_eq!((late.status.as_u16(), late.replay), (201, false));
        send(&app, post("k", "A")).await.assert_replays(&late);
        assert_eq!(puppet.begun(), 1);
    }

    // Y2
    async fn a_run_longer_than_max_run_that_was_taken_over_is_stored_no_more(world: World) {
        let store = world.open().await;
        let (router, mut puppet) = Puppet::new();
        let patient = layer(&store).lease(LEASE).max_run(LEASE).recovery(Recovery::rerun());
        let app = router.route_layer(patient);
        let answer = spawn(&app, post("k", "A"));
        let first = puppet.next().await;
        world.clock.advance(LEASE + SECOND);
        let _ = store.renew(&[], LEASE).await.unwrap();
        let second = spawn(&app, post("k", "A"));
        let second_run = puppet.next().await;
        first.answers(201, "first");
        assert_eq!(&answer.await.unwrap().body[..], b"first");
        second_run.answers(201, "second");
        let stored = second.await.unwrap();
        send(&app, post("k", "A")).await.assert_replays(&stored);
        assert_eq!(&stored.body[..], b"second");
    }

    // Y3
    async fn a_request_that_kills_its_process_each_time_runs_three_times_and_no_more(world: World) {
        let recovery = Recovery::Rerun { max_attempts: 3 };
        let (router, mut puppet) = Puppet::new();
        let mut dead = Vec::new();
        for attempt in 1..=3 {
            let process = layer(&world.open_silent().await).lease(LEASE).recovery(recovery);
            let app = router.clone().route_layer(process);
            let answer = spawn(&app, post("k", "A"));
            let run = puppet.next().await;
            assert_eq!(run.owner().attempt(), attempt);
            world.clock.advance(LEASE + SECOND);
            dead.push((run, answer));
        }
        let app = router.route_layer(layer(&world.open().await).lease(LEASE).recovery(recovery));
        for _ in 0..3 {
            assert_eq!(send(&app, post("k", "A")).await.said(), (409, UNKNOWN.to_owned()));
            world.clock.advance(DAY);
        }
        assert_eq!(puppet.begun(), 3);
    }

    // Y3, spec section 4: the same for panics in one process, and each limit.
    async fn runs_that_are_abandoned_are_repeated_as_often_as_the_policy_says(world: World) {
        let policies = [
            (Recovery::Refuse, 1),
            (Recovery::Rerun { max_attempts: 1 }, 1),
            (Recovery::Rerun { max_attempts: 2 }, 2),
            (Recovery::rerun(), 3),
        ];
        for (number, (recovery, runs)) in policies.into_iter().enumerate() {
            let key = format!("k-{number}");
            let store = world.open().await;
            let (router, mut puppet) = Puppet::new();
            let app = router.route_layer(layer(&store).recovery(recovery)).layer(CatchPanicLayer::new());
            for attempt in 1..=runs {
                let answer = spawn(&app, post(&key, "A"));
                let run = puppet.next().await;
                assert_eq!(run.owner().attempt(), attempt);
                run.panics("as asked");
                assert_eq!(answer.await.unwrap().status, 500);
            }
            for _ in 0..2 {
                assert_eq!(send(&app, post(&key, "A")).await.said(), (409, UNKNOWN.to_owned()), "{recovery:?}");
            }
            assert_eq!(puppet.begun(), runs as usize, "{recovery:?}");
        }
    }

    // Spec section 4
    async fn a_run_that_took_over_says_so_and_keeps_the_first_requests_id(world: World) {
        let store = world.open().await;
        let (router, mut puppet) = Puppet::new();
        let app = router.route_layer(layer(&store).recovery(Recovery::rerun())).layer(CatchPanicLayer::new());
        let mut request = post("k", "A");
        request.headers_mut().insert("x-request-id", "the-first".parse().unwrap());
        let first = spawn(&app, request);
        puppet.next().await.panics("as asked");
        assert_eq!(first.await.unwrap().status, 500);

        // Another request is refused before any recovery.
        let reused = send(&app, post("k", "B")).await;
        assert_eq!(reused.code(), "idempotency_key_reused");
        assert_eq!(reused.json()["original_request_id"], "the-first");

        let second = tokio::spawn(app.clone().oneshot(post("k", "A")));
        puppet.next().await.answers(201, "done");
        let response = second.await.unwrap().unwrap();
        assert_eq!(response.idempotency_status(), Some(IdempotencyStatus::TookOver));
        assert!(!response.is_replay());
        let second = Answer::of(response).await;
        send(&app, post("k", "A")).await.assert_replays(&second);
        assert_eq!(send(&app, post("k", "B")).await.json()["original_request_id"], "the-first");
        assert_eq!(puppet.begun(), 2);
    }

    // Spec section 4: of those who would take over at once, one does.
    async fn of_many_that_meet_an_abandoned_claim_one_takes_over(world: World) {
        let lapsed = Lapsed::new(&world, "k").await;
        let mut puppet = lapsed.puppet;
        let mut crowd = JoinSet::new();
        for _ in 0..16 {
            let app = lapsed.app.clone();
            crowd.spawn(async move { send(&app, post("k", "A")).await });
        }
        let run = puppet.next().await;
        assert_eq!(run.owner().attempt(), 2);
        for _ in 0..15 {
            let answer = crowd.join_next().await.unwrap().unwrap();
            assert_eq!(answer.said(), (409, IN_FLIGHT.to_owned()));
        }
        run.answers(201, "second");
        assert_eq!(crowd.join_next().await.unwrap().unwrap().status, 201);
        assert_eq!(puppet.begun(), 2);
    }

    // ensure_owned
    async fn ensure_owned_extends_the_lease_and_tells_when_the_claim_is_gone(world: World) {
        let store = world.open().await;
        let (router, mut puppet) = Puppet::new();
        let app = router.route_layer(layer(&store).lease(LEASE));
        let answer = spawn(&app, post("k", "A"));
        let run = puppet.next().await;
        for _ in 0..4 {
            run.owner().ensure_owned().await.unwrap();
            world.clock.advance(LEASE - SECOND);
            assert_eq!(send(&app, post("k", "A")).await.code(), IN_FLIGHT);
        }
        run.owner().ensure_owned().await.unwrap();
        // Always, for the heartbeat may come first.
        store.fail(Operation::Renew, Fault::Before, Times::Always);
        let unknown = run.owner().ensure_owned().await.unwrap_err();
        store.clear();
        assert!(unknown.is_unknown());
        assert!(std::error::Error::source(&unknown).is_some());

        assert!(store.forget(&id("k")).await.unwrap());
        let told = run.owner().ensure_owned().await.unwrap_err();
        assert!(!told.is_unknown());
        // As an answer it does nothing to whoever has the key now.
        let second = spawn(&app, post("k", "A"));
        let second_run = puppet.next().await;
        assert_eq!(second_run.owner().attempt(), 1);
        run.answers_with(axum::response::IntoResponse::into_response(told));
        let refused = answer.await.unwrap();
        assert_eq!((refused.status.as_u16(), refused.header("retry-after")), (503, Some("1")));
        assert_eq!(send(&app, post("k", "A")).await.code(), IN_FLIGHT);
        second_run.answers(201, "second");
        let stored = second.await.unwrap();
        send(&app, post("k", "A")).await.assert_replays(&stored);
    }

    // ensure_owned
    async fn not_owned_as_an_answer_leaves_the_key_to_the_recovery_policy(world: World) {
        let store = world.open().await;
        let (router, mut puppet) = Puppet::new();
        let app = router.route_layer(layer(&store));
        let answer = spawn(&app, post("k", "A"));
        let run = puppet.next().await;
        // Always, for the heartbeat may come first.
        store.fail(Operation::Renew, Fault::Before, Times::Always);
        let told = run.owner().ensure_owned().await.unwrap_err();
        store.clear();
        run.answers_with(axum::response::IntoResponse::into_response(told));
        assert_eq!(answer.await.unwrap().status, 503);
        assert_eq!(state(&store, "k").await, Some(State::Abandoned));
        assert_eq!(send(&app, post("k", "A")).await.said(), (409, UNKNOWN.to_owned()));
    }
}

// L2
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handler_that_outlives_its_lease_keeps_its_claim() {
    let real_time = RealTime::stores().await;
    let outlive = async |name: &'static str, store: TestStore| {
        // A machine that stands still for as long as a lease lasts proves nothing; then once more.
        for key in ["k-1", "k-2", "k-3", "k-4"] {
            if outlives_its_lease(&store, key).await {
                return;
            }
            println!("{name}: {key} met a machine that stood still");
        }
        panic!("{name}: this machine is too busy for a lease of 300 ms");
    };
    let stores = real_time.stores.iter().cloned();
    let all = JoinSet::from_iter(stores.map(|(name, store)| outlive(name, store)));
    all.join_all().await;
}

/// Answers whether the machine was fast enough for this to be a test.
async fn outlives_its_lease(store: &TestStore, key: &str) -> bool {
    let (router, mut puppet) = Puppet::new();
    let app = router.route_layer(layer(store).lease(Duration::from_millis(300)));
    let answer = spawn(&app, post(key, "A"));
    let run = puppet.next().await;
    let (begun, mut last) = (Instant::now(), Instant::now());
    let mut duplicates = 0;
    while begun.elapsed() < Duration::from_secs(2) {
        let duplicate = send(&app, post(key, "A")).await;
        if last.elapsed() > Duration::from_millis(150) {
            return false;
        }
        assert_eq!(
            duplicate.said(),
            (409, IN_FLIGHT.to_owned()),
            "duplicate {duplicates}"
        );
        duplicates += 1;
        last = Instant::now();
        sleep(Duration::from_millis(50)).await;
    }
    assert!(duplicates > 12, "{duplicates} duplicates");
    run.answers(201, "done");
    let first = answer.await.unwrap();
    assert_eq!(first.status, 201);
    send(&app, post(key, "A")).await.assert_replays(&first);
    assert_eq!(puppet.begun(), 1);
    true
}

/// From a quarter of a second to for ever.
const DURATIONS: [Duration; 5] = [
    Duration::from_millis(250),
    Duration::from_millis(999),
    Duration::from_secs(1),
    Duration::from_secs(36_500 * 86_400),
    Duration::MAX,
];

/// A run that goes on although its lease has lapsed, and an instance that would take it over.
struct Lapsed {
    key: String,
    puppet: Puppet,
    old_store: TestStore,
    old_app: Router,
    store: TestStore,
    app: Router,
    first: Run,
    answer: JoinHandle<Answer>,
}

impl Lapsed {
    async fn new(world: &World, key: &str) -> Self {
        let (router, mut puppet) = Puppet::new();
        let (old_store, store) = (world.open_silent().await, world.open().await);
        let app = |store| {
            let layer = layer(store).lease(LEASE).recovery(Recovery::rerun());
            router
                .clone()
                .route_layer(layer)
                .layer(CatchPanicLayer::new())
        };
        let (old_app, app) = (app(&old_store), app(&store));
        let answer = spawn(&old_app, post(key, "A"));
        let first = puppet.next().await;
        world.clock.advance(LEASE + SECOND);
        let key = key.to_owned();
        Self {
            key,
            puppet,
            old_store,
            old_app,
            store,
            app,
            first,
            answer,
        }
    }

    /// The second run, held, and its answer.
    async fn taken_over(&mut self) -> (Run, JoinHandle<Answer>) {
        let answer = spawn(&self.app, post(&self.key, "A"));
        let run = self.puppet.next().await;
        assert_eq!(run.owner().attempt(), 2);
        (run, answer)
    }
}

/// Waits until the owner is told that all is well.
async fn eventually_renewed(store: &TestStore, run: &Run) {
    for _ in 0..2_000 {
        if run.owner().ensure_owned().await.is_ok() {
            return;
        }
        let calls = store.calls(Operation::Renew);
        called(store, Operation::Renew, calls + 1).await;
    }
    panic!("it never learns that it owns its claim");
}

/// Ready until it breaks.
#[derive(Clone)]
struct Breaks {
    broken: Arc<AtomicBool>,
    how: Unready,
}

#[derive(Debug, Clone, Copy)]
enum Unready {
    Fails,
    Panics,
}

impl Service<Request<Body>> for Breaks {
    type Response = Response<Body>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, BoxError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        match (self.broken.load(Ordering::SeqCst), self.how) {
            (false, _) => Poll::Ready(Ok(())),
            (true, Unready::Fails) => Poll::Ready(Err("out of order".into())),
            (true, Unready::Panics) => panic!("out of order"),
        }
    }

    fn call(&mut self, _: Request<Body>) -> Self::Future {
        Box::pin(poll_fn(|_| panic!("called without being ready")))
    }
}

// House-keeping that hangs must not cost a claim its lease.
#[tokio::test(start_paused = true)]
async fn a_purge_that_hangs_does_not_keep_the_heartbeat_from_beating() {
    let store = FaultyStore::new(MemoryStore::new());
    store.fail(Operation::Purge, Fault::HangBefore, Times::Always);
    let layer = IdempotencyLayer::new(store.clone())
        .single_tenant()
        .lease(Duration::from_millis(300))
        .ttl(Duration::from_secs(10));
    let handler = Handler::new();
    let app = handler.behind(layer);
    handler.close_gate();
    let first = tokio::spawn({
        let app = app.clone();
        async move { send(&app, post("k", "a")).await }
    });
    for _ in 0..80 {
        tokio::time::sleep(Duration::from_millis(100)).await;
        let said = send(&app, post("k", "a")).await.said();
        assert_eq!(said, (409, "idempotency_in_flight".to_owned()));
    }
    assert!(
        store.calls(Operation::Purge) > 0,
        "the purge was never tried"
    );
    handler.open_gate();
    assert_eq!(first.await.unwrap().status, 201);
    assert_eq!(handler.effects(), 1);
}

fn current_thread() -> Runtime {
    let mut runtime = runtime::Builder::new_current_thread();
    runtime.enable_all().build().unwrap()
}

/// One that goes on by itself.
fn one_worker() -> Runtime {
    let mut runtime = runtime::Builder::new_multi_thread();
    runtime.worker_threads(1).enable_all().build().unwrap()
}

/// A run that goes on in a runtime of its own for several leases, after `first` has served a request of the same
/// layer, while another process asks for it all the time: it runs once.
fn a_run_in_another_runtime_than(first: Runtime, before_it_ends: impl FnOnce(Runtime)) {
    let (store, handler) = (MemoryStore::new(), Handler::new());
    let lease = Duration::from_millis(300);
    let process = || {
        let layer = IdempotencyLayer::new(store.instance()).single_tenant();
        handler.behind(layer.lease(lease).recovery(Recovery::rerun()))
    };
    let (app, other) = (process(), process());
    assert_eq!(first.block_on(send(&app, post("first", "a"))).status, 201);

    handler.close_gate();
    let second = one_worker();
    let running = second.spawn(async move { send(&app, post("k", "a")).await });
    let third = current_thread();
    third.block_on(handler.reached(2));
    before_it_ends(first);
    third.block_on(async {
        let asked = Instant::now();
        while asked.elapsed() < 5 * lease {
            let said = send(&other, post("k", "a")).await.said();
            assert_eq!(said, (409, IN_FLIGHT.to_owned()), "{:?}", asked.elapsed());
            sleep(lease / 10).await;
        }
    });
    handler.open_gate();
    let ran = second.block_on(running).unwrap();
    assert_eq!((ran.status.as_u16(), ran.replay), (201, false));
    third
        .block_on(send(&other, post("k", "a")))
        .assert_replays(&ran);
    assert_eq!(handler.effects(), 2);
}

// L2
#[test]
fn the_heart_beats_for_a_run_in_another_runtime_though_the_first_one_is_not_driven() {
    // Until the end it exists, and nobody blocks on it.
    let mut idle = None;
    a_run_in_another_runtime_than(current_thread(), |first| idle = Some(first));
}

// L2
#[test]
fn the_heart_beats_for_a_run_in_another_runtime_though_the_first_one_has_ended() {
    a_run_in_another_runtime_than(current_thread(), drop);
}

// L10
#[test]
fn a_heart_that_stood_still_does_not_call_a_run_lost_that_another_has_renewed() {
    let store = FaultyStore::new(MemoryStore::new());
    let lease = Duration::from_millis(600);
    let (router, mut puppet) = Puppet::new();
    let app = router.route_layer(
        IdempotencyLayer::new(store.clone())
            .single_tenant()
            .lease(lease),
    );
    let (one, other) = (current_thread(), one_worker());
    one.block_on(async {
        let first = spawn(&app, post("first", "a"));
        puppet.next().await.answers(201, "done");
        first.await.unwrap();
    });
    let running = other.spawn(async move { send(&app, post("k", "a")).await });
    let run = other.block_on(puppet.next());
    // Nobody drives the first runtime meanwhile, and the heart of the other one beats.
    let beats = store.calls(Operation::Renew);
    other.block_on(store.called(Operation::Renew, beats + 4));
    store.fail(Operation::Renew, Fault::Before, Times::Once);
    one.block_on(async { sleep(Duration::from_millis(30)).await });
    other.block_on(run.owner().ensure_owned()).unwrap();
    run.answers(201, "done");
    assert_eq!(other.block_on(running).unwrap().status, 201);
}

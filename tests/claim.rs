//! Of any number of equal requests one runs, and only a write to the store decides which.

mod support;

use std::{
    path::Path,
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use axum::{
    Router,
    body::Body,
    http::{Request, Response, StatusCode},
    routing::post as route_post,
};
use bytes::Bytes;
use sqlx::{ConnectOptions, Executor};
use support::{
    logs::Logs,
    wire::{Server, raw_post},
    *,
};
use tokio::{
    sync::{Barrier, Semaphore},
    task::JoinSet,
    time::{sleep, timeout},
};
use tower::{BoxError, Layer, ServiceExt};
use tower_idempotency::{
    AnyStore, Fingerprint, IdempotencyKey, IdempotencyLayer, InFlight, MemoryStore, RecordId,
    Recovery, RetainedResponse, Scope, SqliteStore,
    store::{Checkpoints, Claim, ClaimRequest, Completion, Inspect, Journal, Lifetimes, Store},
    testing::{Fault, FaultyStore, Operation, Times},
};
use tracing::Instrument;

const IN_FLIGHT: &str = "idempotency_in_flight";
const UNAVAILABLE: &str = "idempotency_store_unavailable";
const OVERLOADED: &str = "idempotency_overloaded";

fn layer(store: &TestStore) -> IdempotencyLayer<TestStore> {
    IdempotencyLayer::new(store.clone()).single_tenant()
}

fn id(key: &str) -> RecordId {
    RecordId::new(Scope::shared(), IdempotencyKey::new(key))
}

/// A claim on an unscoped key, as another process would make it.
fn claim_of(key: &str) -> ClaimRequest {
    ClaimRequest::new(id(key), "test-1", Fingerprint::from_bytes([7; 32]))
}

/// Counts runs and takes a random time, mostly none at all.
fn randomly_slow(runs: &Arc<AtomicUsize>) -> Router {
    let runs = runs.clone();
    let handler = move || {
        let runs = runs.clone();
        async move {
            let run = runs.fetch_add(1, Ordering::SeqCst) + 1;
            match rand::random::<u8>() {
                0..100 => {}
                100..180 => tokio::task::yield_now().await,
                more => sleep(Duration::from_micros(u64::from(more) * 20)).await,
            }
            (StatusCode::CREATED, format!("run {run}"))
        }
    };
    Router::new().route("/charges", route_post(handler))
}

/// What a crowd of equal requests was answered.
#[derive(Debug, Default)]
struct Totals {
    ran: usize,
    replayed: usize,
    in_flight: usize,
    other: Vec<(u16, String)>,
}

impl Totals {
    fn add(&mut self, answer: &Answer) {
        match (answer.status.as_u16(), answer.replay) {
            (201, false) => self.ran += 1,
            (201, true) => self.replayed += 1,
            (409, false) if answer.code() == IN_FLIGHT => self.in_flight += 1,
            _ => self.other.push(answer.said()),
        }
    }
}

every_store! {
    // C1
    async fn of_64_simultaneous_requests_at_two_instances_exactly_one_runs(world: World) {
        const ROUNDS: usize = 200;
        const TASKS: usize = 64;
        let runs = Arc::new(AtomicUsize::new(0));
        let apps = [
            randomly_slow(&runs).route_layer(layer(&world.open().await)),
            randomly_slow(&runs).route_layer(layer(&world.open().await)),
        ];
        let mut totals = Totals::default();
        for round in 1..=ROUNDS {
            let key = format!("round-{round}");
            let barrier = Arc::new(Barrier::new(TASKS));
            let mut tasks = JoinSet::new();
            for task in 0..TASKS {
                let (app, key, barrier) = (apps[task % 2].clone(), key.clone(), barrier.clone());
                tasks.spawn(async move {
                    barrier.wait().await;
                    send(&app, post(&key, "A")).await
                });
            }
            let answers = tasks.join_all().await;
            assert_eq!(runs.load(Ordering::SeqCst), round, "h in round {round}");
            let unmarked: Vec<_> = answers.iter().filter(|a| a.status == 201 && !a.replay).collect();
            assert_eq!(unmarked.len(), 1, "unmarked 2xx in round {round}");
            for answer in &answers {
                totals.add(answer);
                if answer.replay {
                    answer.assert_replays(unmarked[0]);
                }
            }
            for app in &apps {
                send(app, post(&key, "A")).await.assert_replays(unmarked[0]);
            }
        }
        println!("C1, {ROUNDS} rounds of {TASKS}: {totals:?}");
        assert_eq!(totals.other, []);
        assert_eq!(totals.ran, ROUNDS);
        assert_eq!(totals.ran + totals.replayed + totals.in_flight, ROUNDS * TASKS);
    }

    // C2
    async fn losing_the_race_is_no_failure_for_a_breaker_and_no_store_error(world: World) {
        let logs = Logs::everywhere();
        let span = tracing::info_span!("crowd");
        let breaker = Breaker::default();
        let services = [
            breaker.around(layer(&world.open().await)),
            breaker.around(layer(&world.open().await)),
        ];
        for round in 0..30 {
            let barrier = Arc::new(Barrier::new(32));
            let mut tasks = JoinSet::new();
            for task in 0..32 {
                let (service, barrier) = (services[task % 2].clone(), barrier.clone());
                let key = format!("round-{round}");
                let answered = async move {
                    barrier.wait().await;
                    service.oneshot(post(&key, "A")).await.unwrap().status().as_u16()
                };
                tasks.spawn(answered.instrument(span.clone()));
            }
            let statuses = tasks.join_all().await;
            assert!(statuses.iter().all(|status| [201, 409].contains(status)), "{statuses:?}");
            assert!(statuses.contains(&201));
        }
        assert_eq!(breaker.failures.load(Ordering::SeqCst), 0);
        let logged = logs.within(&span);
        assert!(!logged.is_empty(), "the decisions were not seen, so silence proves nothing");
        let loud: Vec<_> = logged.iter().filter(|event| event.is_loud()).collect();
        assert!(loud.is_empty(), "{loud:?}");
    }

    // C3
    async fn a_claim_whose_acknowledgement_is_lost_once_is_recognised_and_runs(world: World) {
        for (fault, key) in [(Fault::After, "after"), (Fault::Before, "before")] {
            let handler = Handler::new();
            let store = world.open().await;
            let app = handler.behind(layer(&store));
            store.fail(Operation::Claim, fault, Times::Once);
            let first = send(&app, post(key, "A")).await;
            assert_eq!(first.status, 201, "{first:?}");
            assert_eq!((handler.effects(), store.calls(Operation::Claim)), (1, 2));
            send(&app, post(key, "A")).await.assert_replays(&first);
            assert_eq!(handler.effects(), 1);
        }
    }

    // C3
    async fn a_claim_of_unknown_fate_is_refused_with_503_and_released_for_the_retry(world: World) {
        let handler = Handler::new();
        let store = world.open().await;
        let app = handler.behind(layer(&store));
        store.fail(Operation::Claim, Fault::After, Times::Always);
        // Undoing it fails at first, too.
        store.fail(Operation::Release, Fault::Before, Times::Next(2));
        let refused = send(&app, post("k", "A")).await;
        assert_eq!(refused.said(), (503, UNAVAILABLE.to_owned()));
        assert_eq!(refused.header("retry-after"), Some("1"));
        assert_eq!(handler.effects(), 0);

        store.clear();
        let ran = retry_until_it_runs(&app, "k").await;
        assert_eq!((ran.status.as_u16(), handler.effects()), (201, 1));
        send(&app, post("k", "A")).await.assert_replays(&ran);
    }

    // C3
    async fn a_claim_that_is_never_acknowledged_is_released_for_the_retry(world: World) {
        let handler = Handler::new();
        let store = world.open().await;
        let app = handler.behind(layer(&store).store_timeout(Duration::from_millis(100)));
        store.fail(Operation::Claim, Fault::HangAfter, Times::Once);
        let refused = send(&app, post("k", "A")).await;
        assert_eq!(refused.said(), (503, UNAVAILABLE.to_owned()));
        let ran = retry_until_it_runs(&app, "k").await;
        assert_eq!((ran.status.as_u16(), handler.effects()), (201, 1));
    }

    // C3: however many there are at once, and whenever they come.
    async fn of_many_claims_of_unknown_fate_none_is_forgotten(world: World) {
        let handler = Handler::new();
        let store = world.open().await;
        let app = handler.behind(layer(&store));
        for round in 0..10 {
            store.fail(Operation::Claim, Fault::After, Times::Always);
            let crowd = JoinSet::from_iter((0..40).map(|number| {
                let (app, key) = (app.clone(), format!("k-{round}-{number}"));
                async move { send(&app, post(&key, "A")).await.said() }
            }));
            for said in crowd.join_all().await {
                assert_eq!(said, (503, UNAVAILABLE.to_owned()));
            }
            store.clear();
            for number in 0..40 {
                let begun = Instant::now();
                while record(&store, &format!("k-{round}-{number}")).await.is_some() {
                    assert!(begun.elapsed() < Duration::from_secs(5), "k-{round}-{number} is left");
                    sleep(Duration::from_millis(1)).await;
                }
            }
        }
        assert_eq!(handler.effects(), 0);
    }

    // C3: undone, a takeover must not look as if the run before it never was.
    async fn a_takeover_of_unknown_fate_leaves_the_key_abandoned_and_not_free(world: World) {
        let abandoned = claim_of("k");
        let handler = Handler::new();
        let (before, store) = (world.open().await, world.open().await);
        let app = |recovery| handler.behind(layer(&store).fingerprint(Seven).recovery(recovery));
        let Claim::Won(ticket) = before.claim(abandoned).await.unwrap() else { panic!() };
        let _ = before.abandon(&ticket).await.unwrap();

        // The first claim finds it abandoned; those that take over are never acknowledged.
        store.fail(Operation::Claim, Fault::DelayBefore(Duration::ZERO), Times::Once);
        store.fail(Operation::Claim, Fault::After, Times::Always);
        let refused = send(&app(Recovery::rerun()), post("k", "A")).await;
        assert_eq!(refused.said(), (503, UNAVAILABLE.to_owned()));
        store.clear();

        called(&store, Operation::Abandon, 1).await;
        let answer = retry_until_it_runs(&app(Recovery::Refuse), "k").await;
        assert_eq!(answer.said(), (409, "idempotency_outcome_unknown".to_owned()));
        assert_eq!(store.calls(Operation::Release), 0);
        assert_eq!(handler.effects(), 0);
    }

    // C4
    async fn of_claims_that_differ_only_in_their_token_one_is_won(world: World) {
        let stores = [world.open().await, world.open().await];
        for round in 0..20 {
            let barrier = Arc::new(Barrier::new(16));
            let mut tasks = JoinSet::new();
            for task in 0..16 {
                let (store, barrier) = (stores[task % 2].clone(), barrier.clone());
                tasks.spawn(async move {
                    barrier.wait().await;
                    store.claim(claim_of(&format!("k-{round}"))).await.unwrap()
                });
            }
            let claims = tasks.join_all().await;
            let won = claims.iter().filter(|claim| matches!(claim, Claim::Won(_))).count();
            let in_flight = claims.iter().filter(|claim| matches!(claim, Claim::InFlight(_))).count();
            assert_eq!((won, in_flight), (1, 15));
        }
    }

    // C4: both are past every look at the store before either writes.
    async fn of_two_equal_requests_held_before_their_claim_one_runs(world: World) {
        let handler = Handler::new();
        handler.close_gate();
        let stores = [world.open().await, world.open().await];
        let mut tasks = JoinSet::new();
        for store in &stores {
            store.fail(Operation::Claim, Fault::DelayBefore(Duration::from_millis(50)), Times::Once);
            let app = handler.behind(layer(store));
            tasks.spawn(async move { send(&app, post("k", "A")).await });
        }
        let first = tasks.join_next().await.unwrap().unwrap();
        assert_eq!(first.said(), (409, IN_FLIGHT.to_owned()));
        handler.open_gate();
        assert_eq!(tasks.join_next().await.unwrap().unwrap().status, 201);
        assert_eq!(handler.effects(), 1);
    }

    // C5
    async fn a_second_claim_leaves_the_first_record_as_it_is(world: World) {
        let handler = Handler::new();
        handler.close_gate();
        let (store, other) = (world.open().await, world.open().await);
        let (app, elsewhere) = (handler.behind(layer(&store)), handler.behind(layer(&other)));
        let running = tokio::spawn({
            let app = app.clone();
            async move { send(&app, post("k", "A")).await }
        });
        handler.reached(1).await;
        let before = record(&store, "k").await.unwrap();
        world.clock.advance(Duration::from_secs(1));
        for app in [&app, &elsewhere, &app] {
            assert_eq!(send(app, post("k", "A")).await.said(), (409, IN_FLIGHT.to_owned()));
            assert_eq!(send(app, post("k", "B")).await.code(), "idempotency_key_reused");
        }
        assert_eq!(record(&store, "k").await.unwrap(), before);
        handler.open_gate();
        let first = running.await.unwrap();
        let done = record(&store, "k").await.unwrap();
        for app in [&app, &elsewhere] {
            send(app, post("k", "A")).await.assert_replays(&first);
            assert_eq!(send(app, post("k", "B")).await.code(), "idempotency_key_reused");
        }
        assert_eq!(record(&store, "k").await.unwrap(), done);
        assert_eq!(handler.effects(), 1);
    }

    // C6
    async fn a_record_in_any_state_is_read_for_what_it_is(world: World) {
        let handler = Handler::new();
        let (other, store) = (world.open().await, world.open().await);
        let app = handler.behind(layer(&store).fingerprint(Seven));
        let won = async |key: &str| match other.claim(claim_of(key)).await.unwrap() {
            Claim::Won(ticket) => ticket,
            claim => panic!("{claim:?}"),
        };
        let day = Lifetimes::new(Duration::from_secs(86_400));

        let _running = won("running").await;
        let retained = won("retained").await;
        let done = Completion::retained(StatusCode::ACCEPTED, stored_response());
        let _ = other.complete(&retained, done, day).await.unwrap();
        let tombstone = won("tombstone").await;
        let done = Completion::tombstone(StatusCode::CREATED);
        let _ = other.complete(&tombstone, done, day).await.unwrap();
        let abandoned = won("abandoned").await;
        let _ = other.abandon(&abandoned).await.unwrap();
        let released = won("released").await;
        let _ = other.save(&released, "step", Bytes::from("1")).await.unwrap();
        let _ = other.release(&released, day.ttl).await.unwrap();

        let said = async |key: &str| send(&app, post(key, "A")).await;
        assert_eq!(said("running").await.said(), (409, IN_FLIGHT.to_owned()));
        let replay = said("retained").await;
        assert_eq!((replay.status.as_u16(), replay.replay, &replay.body[..]), (202, true, &b"kept"[..]));
        let gone = said("tombstone").await;
        assert_eq!(gone.said(), (409, "idempotency_response_not_retained".to_owned()));
        assert_eq!(gone.json()["original_status"], 201);
        assert_eq!(said("abandoned").await.said(), (409, "idempotency_outcome_unknown".to_owned()));
        assert_eq!(handler.effects(), 0);
        // A run released with checkpoints goes on, without a recovery policy.
        assert_eq!(said("released").await.status, 201);
        assert_eq!(handler.effects(), 1);
        world.clock.advance(Duration::from_secs(86_401));
        assert_eq!(said("retained").await.status, 201);
        assert_eq!(handler.effects(), 2);
    }

    // C6
    async fn a_stored_response_that_cannot_be_decoded_gets_503(world: World) {
        let handler = Handler::new();
        let (other, store) = (world.open().await, world.open().await);
        let app = handler.behind(layer(&store).fingerprint(Seven));
        let whole = stored_response();
        let mut damaged: Vec<Bytes> = (0..whole.len()).map(|end| whole.slice(..end)).collect();
        damaged.push([&whole[..], b"x"].concat().into());
        damaged.push([&[2], &whole[1..]].concat().into()); // a later version's form
        damaged.push(vec![0xFF; 64].into());
        for (number, bytes) in damaged.into_iter().enumerate() {
            let key = format!("k-{number}");
            let Claim::Won(ticket) = other.claim(claim_of(&key)).await.unwrap() else { panic!() };
            let done = Completion::retained(StatusCode::OK, bytes);
            let lifetimes = Lifetimes::new(Duration::from_secs(60));
            let _ = other.complete(&ticket, done, lifetimes).await.unwrap();
            let answer = send(&app, post(&key, "A")).await;
            assert_eq!(answer.said(), (503, UNAVAILABLE.to_owned()), "case {number}");
            assert_eq!(answer.header("retry-after"), Some("1"));
            assert!(!answer.replay);
        }
        assert_eq!(handler.effects(), 0);
    }

    // C7
    async fn no_byte_leaves_before_the_record_is_durable_and_no_duplicate_runs(world: World) {
        const SLOW: Duration = Duration::from_millis(500);
        for (fault, key) in [(Fault::DelayBefore(SLOW), "k-1"), (Fault::DelayAfter(SLOW), "k-2")] {
            let handler = Handler::new();
            let store = world.open().await;
            let server = Arc::new(Server::start(handler.behind(layer(&store))).await);
            store.fail(Operation::Complete, fault, Times::Once);

            let mut first = server.connect().await;
            first.write(&raw_post(key, "A")).await;
            called(&store, Operation::Complete, 1).await;
            let asked = Instant::now();
            let answered = Arc::new(AtomicBool::new(false));
            let duplicates = tokio::spawn({
                let (answered, server) = (answered.clone(), server.clone());
                async move {
                    let mut replies = Vec::new();
                    while !answered.load(Ordering::SeqCst) {
                        replies.push(server.exchange(&raw_post(key, "A")).await);
                        sleep(Duration::from_millis(10)).await;
                    }
                    replies
                }
            });
            let byte = first.read_some(1).await;
            let waited = asked.elapsed();
            assert_eq!(byte, b"H");
            assert!(waited >= SLOW - Duration::from_millis(20), "the first byte left after {waited:?}");
            let instant = server.exchange(&raw_post(key, "A")).await;
            answered.store(true, Ordering::SeqCst);
            assert!(instant.is_replay(), "{instant:?}");
            let replies = duplicates.await.unwrap();
            assert!(replies.len() > 5, "only {} duplicates", replies.len());
            for reply in replies {
                let in_flight = reply.said() == (409, IN_FLIGHT.to_owned());
                assert!(in_flight || reply.is_replay(), "{reply:?}");
            }
            assert_eq!(handler.effects(), 1);
        }
    }

    // C11
    async fn a_wait_shorter_than_the_run_ends_in_409_at_its_bound(world: World) {
        for elsewhere in [false, true] {
            let key = format!("k-{elsewhere}");
            let (handler, running, waiting) = held_run(&world, &key, elsewhere, 200).await;
            let asked = Instant::now();
            let refused = send(&waiting, post(&key, "A")).await;
            let waited = asked.elapsed();
            assert_eq!(refused.said(), (409, IN_FLIGHT.to_owned()));
            assert_eq!(refused.header("retry-after"), Some("1"));
            let bounds = Duration::from_millis(200)..Duration::from_millis(500);
            assert!(bounds.contains(&waited), "waited {waited:?}");
            handler.open_gate();
            assert_eq!(running.await.unwrap().status, 201);
            assert_eq!(handler.effects(), 1);
        }
    }

    // C11: wakes for a run of this process, polls for one of another.
    async fn a_wait_longer_than_the_run_ends_in_its_replay(world: World) {
        for (elsewhere, promptly) in [(false, 100), (true, 1_200)] {
            let key = format!("k-{elsewhere}");
            let (handler, running, waiting) = held_run(&world, &key, elsewhere, 5_000).await;
            let waiter = tokio::spawn({
                let key = key.clone();
                async move { send(&waiting, post(&key, "A")).await }
            });
            sleep(Duration::from_millis(400)).await;
            assert!(!waiter.is_finished());
            handler.open_gate();
            let first = running.await.unwrap();
            let done = Instant::now();
            waiter.await.unwrap().assert_replays(&first);
            let late = done.elapsed();
            assert!(late < Duration::from_millis(promptly), "told {late:?} after the end");
            assert_eq!(handler.effects(), 1);
        }
    }

    // C11
    async fn when_the_first_run_is_released_a_waiter_runs_in_its_stead(world: World) {
        for elsewhere in [false, true] {
            let key = format!("k-{elsewhere}");
            let handler = Handler::answering(|seen| match seen.run {
                1 => Response::builder().status(422).body(Body::from("no")).unwrap(),
                run => Response::builder().status(201).body(Body::from(run.to_string())).unwrap(),
            });
            let (running, waiting) = held_run_of(&handler, &world, &key, elsewhere, 5_000).await;
            let mut waiters = JoinSet::new();
            for _ in 0..5 {
                let (app, key) = (waiting.clone(), key.clone());
                waiters.spawn(async move { send(&app, post(&key, "A")).await });
            }
            sleep(Duration::from_millis(50)).await;
            handler.open_gate();
            assert_eq!(running.await.unwrap().status, 422);
            let answers = waiters.join_all().await;
            assert!(answers.iter().all(|answer| answer.status == 201), "{answers:?}");
            assert_eq!(answers.iter().filter(|answer| !answer.replay).count(), 1);
            assert_eq!(handler.effects(), 2);
        }
    }

    // C11
    async fn an_abandoned_run_ends_the_wait_by_the_recovery_policy(world: World) {
        let handler = Handler::new();
        let (other, store) = (world.open().await, world.open().await);
        let app = handler.behind(
            layer(&store).fingerprint(Seven).in_flight(InFlight::Wait(Duration::from_secs(5))),
        );
        let Claim::Won(ticket) = other.claim(claim_of("k")).await.unwrap() else { panic!() };
        let waiter = tokio::spawn(async move { send(&app, post("k", "A")).await });
        called(&store, Operation::Claim, 2).await;
        let _ = other.abandon(&ticket).await.unwrap();
        let answer = waiter.await.unwrap();
        assert_eq!(answer.said(), (409, "idempotency_outcome_unknown".to_owned()));
        assert_eq!(handler.effects(), 0);
    }

    // C11
    async fn another_fingerprint_is_refused_at_once_instead_of_waiting(world: World) {
        for elsewhere in [false, true] {
            let key = format!("k-{elsewhere}");
            let (handler, running, waiting) = held_run(&world, &key, elsewhere, 5_000).await;
            let asked = Instant::now();
            assert_eq!(send(&waiting, post(&key, "B")).await.code(), "idempotency_key_reused");
            assert!(asked.elapsed() < Duration::from_secs(1));
            handler.open_gate();
            assert_eq!(running.await.unwrap().status, 201);
        }
    }

    // C11: at most two looks each to begin with and one at the end, and one poll at a time for all.
    async fn many_waiters_issue_few_store_calls_and_hold_nothing(world: World) {
        const WAITERS: usize = 500;
        let handler = Handler::new();
        let (first, store) = (world.open().await, world.open().await);
        let running = tokio::spawn({
            let app = handler.behind(layer(&first));
            handler.close_gate();
            async move { send(&app, post("k", "A")).await }
        });
        handler.reached(1).await;
        // One permit of the inner service, of which no waiter may keep hold.
        let limited = handler.router().route_layer(
            tower::ServiceBuilder::new()
                .layer(layer(&store).in_flight(InFlight::Wait(Duration::from_secs(20))))
                .layer(tower::limit::GlobalConcurrencyLimitLayer::new(1)),
        );
        let mut waiters = JoinSet::new();
        for _ in 0..WAITERS {
            let app = limited.clone();
            waiters.spawn(async move { send(&app, post("k", "A")).await });
        }
        called(&store, Operation::Claim, 2 * WAITERS).await;
        let settled = store.calls(Operation::Claim);
        sleep(Duration::from_millis(1_000)).await;
        let polls = store.calls(Operation::Claim) - settled;
        assert!((1..=40).contains(&polls), "{polls} polls in a second for {WAITERS} waiters");

        // Store and inner service are as free as if nobody waited, for keyed requests and others.
        handler.open_gate();
        let bystander = timeout(Duration::from_secs(2), send(&limited, post("other", "A"))).await;
        assert_eq!(bystander.expect("the waiters are in the way").status, 201);
        let answer = running.await.unwrap();
        for waited in waiters.join_all().await {
            waited.assert_replays(&answer);
        }
        assert_eq!(handler.effects(), 2);
        let claims = store.calls(Operation::Claim);
        assert!(claims <= 3 * WAITERS + 60, "{claims} claims for {WAITERS} waiters");
        assert_eq!(store.calls(Operation::Get), 0);
    }

    // C11
    async fn beyond_max_waiting_requests_are_refused_at_once(world: World) {
        let handler = Handler::new();
        let store = world.open().await;
        let wait = InFlight::Wait(Duration::from_secs(20));
        let app = handler.behind(layer(&store).in_flight(wait).max_waiting(3));
        handler.close_gate();
        let send_again = || {
            let app = app.clone();
            tokio::spawn(async move { send(&app, post("k", "A")).await })
        };
        let running = send_again();
        handler.reached(1).await;
        let waiters = [send_again(), send_again(), send_again()];
        called(&store, Operation::Claim, 1 + 6).await;
        for _ in 0..3 {
            let refused = timeout(Duration::from_secs(2), send(&app, post("k", "A"))).await;
            assert_eq!(refused.expect("it waits").said(), (409, IN_FLIGHT.to_owned()));
        }
        // A waiter that goes away gives its place to the next.
        let [gone, second, third] = waiters;
        gone.abort();
        assert!(gone.await.unwrap_err().is_cancelled());
        let fourth = send_again();
        sleep(Duration::from_millis(50)).await;
        assert!(!fourth.is_finished());
        handler.open_gate();
        let first = running.await.unwrap();
        for waiter in [second, third, fourth] {
            waiter.await.unwrap().assert_replays(&first);
        }
        assert_eq!(handler.effects(), 1);
    }

    // G5
    async fn scopes_and_keys_of_any_bytes_are_stored_found_and_kept_apart(world: World) {
        let scopes: [&'static [u8]; 8] = [
            b"", b"\0", b"\0\0", b"a", b"a\0", b"\xFF\xFE\x80", &[0xFF; 255], &[0xFF; 254],
        ];
        let handler = Handler::new();
        let stores = [world.open().await, world.open().await];
        let app = |store: &TestStore| {
            handler.behind(IdempotencyLayer::new(store.clone()).scope(move |head| {
                let number: usize = head.headers["x-tenant"].to_str().unwrap().parse().unwrap();
                Some(Scope::new(scopes[number]))
            }))
        };
        let keys = ["k", "\"k k\"", "\"\\\"\\\\\"", &"~".repeat(255)];
        let ask = |tenant: usize, key: &str| {
            let mut request = post(key, "A");
            request.headers_mut().insert("x-tenant", tenant.into());
            request
        };
        let mut firsts = Vec::new();
        for tenant in 0..scopes.len() {
            for key in keys {
                firsts.push((tenant, key, send(&app(&stores[0]), ask(tenant, key)).await));
            }
        }
        assert_eq!(handler.effects(), firsts.len());
        for (tenant, key, first) in &firsts {
            send(&app(&stores[1]), ask(*tenant, key)).await.assert_replays(first);
        }
        assert_eq!(handler.effects(), firsts.len());

        // Bytes no header line can carry reach a store by other ways than the layer.
        let parts: [&[u8]; 7] =
            [b"", b"\0", b"a\0b", b"a", b"a\0", b"\xC3\x28\xFF", &[0xFF; 255]];
        let mut tickets = Vec::new();
        for scope in parts {
            for key in parts {
                let id = RecordId::new(Scope::new([b"+", scope].concat()), IdempotencyKey::new(key));
                let claim = ClaimRequest::new(id, "test-1", Fingerprint::from_bytes([7; 32]));
                match stores[0].claim(claim).await.unwrap() {
                    Claim::Won(ticket) => tickets.push(ticket),
                    claim => panic!("two names, one record: {claim:?}"),
                }
            }
        }
        for ticket in tickets {
            let found = stores[1].get(&ticket.id).await.unwrap().unwrap();
            assert_eq!((found.id, found.token), (ticket.id, ticket.token));
        }
    }

    // max_running
    async fn beyond_max_running_a_request_gets_503_before_any_claim(world: World) {
        let handler = Handler::new();
        let store = world.open().await;
        let app = handler.behind(layer(&store).max_running(2));
        handler.close_gate();
        let running = ["k-1", "k-2"].map(|key| {
            let app = app.clone();
            tokio::spawn(async move { send(&app, post(key, "A")).await })
        });
        handler.reached(2).await;
        for key in ["k-3", "k-1"] {
            let refused = send(&app, post(key, "A")).await;
            assert_eq!(refused.said(), (503, OVERLOADED.to_owned()));
            assert_eq!(refused.header("retry-after"), Some("1"));
        }
        assert_eq!(store.calls(Operation::Claim), 2);
        assert!(record(&store, "k-3").await.is_none());
        // What needs no claim needs no place.
        let keyless = tokio::spawn({
            let app = app.clone();
            async move { send(&app, request("PATCH", "/charges", None, "A")).await }
        });
        handler.reached(3).await;
        handler.open_gate();
        assert_eq!(keyless.await.unwrap().status, 201);
        for run in running {
            assert_eq!(run.await.unwrap().status, 201);
        }
        assert_eq!(send(&app, post("k-3", "A")).await.status, 201);
    }

    // max_running
    async fn every_way_out_gives_the_place_back(world: World) {
        let store = world.open().await;
        let gone = Arc::new(Semaphore::new(0));
        let inner = Router::new()
            .route("/charges", route_post({
                let gone = gone.clone();
                async move |body: Bytes| match &body[..] {
                    b"panic" => panic!("as asked"),
                    b"gone" => {
                        gone.acquire().await.unwrap().forget();
                        (StatusCode::CREATED, "late")
                    }
                    b"reject" => (StatusCode::UNPROCESSABLE_ENTITY, "no"),
                    _ => (StatusCode::CREATED, "done"),
                }
            }))
            .route_layer(layer(&store).max_running(1).store_timeout(Duration::from_millis(100)));
        let app = inner.layer(tower_http::catch_panic::CatchPanicLayer::new());
        let settled = async |what: &str| {
            let free = async { while send(&app, post("free", "A")).await.status == 503 {} };
            timeout(Duration::from_secs(5), free).await.unwrap_or_else(|_| panic!("{what} kept its place"));
        };
        send(&app, post("k-1", "A")).await;
        settled("a run").await;
        send(&app, post("k-1", "A")).await;
        settled("a replay").await;
        send(&app, post("k-1", "B")).await;
        settled("a reuse").await;
        send(&app, post("k-2", "reject")).await;
        settled("a released run").await;
        assert_eq!(send(&app, post("k-3", "panic")).await.status, 500);
        settled("a panic").await;
        assert_eq!(send(&app, post("k-3", "panic")).await.code(), "idempotency_outcome_unknown");
        settled("an outcome unknown").await;
        store.fail(Operation::Claim, Fault::Before, Times::Next(3));
        assert_eq!(send(&app, post("k-4", "A")).await.code(), UNAVAILABLE);
        settled("a store failure").await;
        store.fail(Operation::Claim, Fault::HangBefore, Times::Once);
        assert_eq!(send(&app, post("k-5", "A")).await.code(), UNAVAILABLE);
        settled("a store that hangs").await;
        let asked = tokio::spawn({
            let app = app.clone();
            async move { send(&app, post("k-6", "gone")).await }
        });
        eventually("the run to begin", || store.calls(Operation::Claim) > 0 && gone.available_permits() == 0).await;
        asked.abort();
        gone.add_permits(1);
        settled("a run whose caller left").await;
        store.fail(Operation::Complete, Fault::Before, Times::Next(6));
        assert_eq!(send(&app, post("k-7", "A")).await.status, 201);
        settled("a late recording").await;
    }
}

/// A run that is held, and an app where an equal request waits `limit_ms` at most: the same layer,
/// or that of another instance.
async fn held_run(
    world: &World,
    key: &str,
    elsewhere: bool,
    limit_ms: u64,
) -> (Handler, tokio::task::JoinHandle<Answer>, Router) {
    let handler = Handler::new();
    let (running, waiting) = held_run_of(&handler, world, key, elsewhere, limit_ms).await;
    (handler, running, waiting)
}

async fn held_run_of(
    handler: &Handler,
    world: &World,
    key: &str,
    elsewhere: bool,
    limit_ms: u64,
) -> (tokio::task::JoinHandle<Answer>, Router) {
    let wait = InFlight::Wait(Duration::from_millis(limit_ms));
    let app = handler.behind(layer(&world.open().await).in_flight(wait));
    let waiting = if elsewhere {
        handler.behind(layer(&world.open().await).in_flight(wait))
    } else {
        app.clone()
    };
    handler.close_gate();
    let request = post(key, "A");
    let running = tokio::spawn(async move { send(&app, request).await });
    handler.reached(1).await;
    (running, waiting)
}

/// Sends the same until it runs. Being refused for a while is right, anything final is not.
async fn retry_until_it_runs(app: &Router, key: &str) -> Answer {
    for _ in 0..2_000 {
        let answer = send(app, post(key, "A")).await;
        match answer.code().as_str() {
            IN_FLIGHT | UNAVAILABLE => sleep(Duration::from_millis(5)).await,
            _ => return answer,
        }
    }
    panic!("it never ran again");
}

fn stored_response() -> Bytes {
    let mut headers = axum::http::HeaderMap::new();
    headers.insert("content-type", "text/plain".parse().unwrap());
    RetainedResponse {
        status: StatusCode::ACCEPTED,
        headers,
        body: Bytes::from("kept"),
    }
    .encode()
}

/// A scheme by which every request asks for the same, so that claims made by hand match.
struct Seven;

impl tower_idempotency::FingerprintScheme for Seven {
    fn name(&self) -> tower_idempotency::Scheme {
        "test-1".into()
    }

    fn fingerprint(
        &self,
        _: &axum::http::request::Parts,
        _: &Bytes,
    ) -> Result<Fingerprint, tower_idempotency::UndecodableBody> {
        Ok(Fingerprint::from_bytes([7; 32]))
    }
}

/// Opens for good after the third failure: a 5xx, or an error of the service.
#[derive(Clone, Default)]
struct Breaker {
    failures: Arc<AtomicUsize>,
}

impl Breaker {
    fn around(&self, layer: IdempotencyLayer<TestStore>) -> Guarded {
        let quick = tower::service_fn(|_: Request<Body>| async {
            tokio::task::yield_now().await;
            let answer = Response::builder().status(201).body(Body::from("done"));
            Ok::<_, BoxError>(answer?)
        });
        let inner = Guarded::new(layer.layer(quick));
        let failures = self.failures.clone();
        Guarded::new(tower::service_fn(move |request: Request<Body>| {
            let (inner, failures) = (inner.clone(), failures.clone());
            async move {
                if failures.load(Ordering::SeqCst) >= 3 {
                    return Ok(Response::builder().status(503).body(Body::from("open"))?);
                }
                let answer = inner.oneshot(request).await;
                let failed = answer
                    .as_ref()
                    .map_or(true, |answer| answer.status().is_server_error());
                failures.fetch_add(usize::from(failed), Ordering::SeqCst);
                answer
            }
        }))
    }
}

type Guarded = tower::util::BoxCloneService<Request<Body>, Response<Body>, BoxError>;

// C6
#[tokio::test]
async fn a_row_that_cannot_be_understood_gets_503() {
    let changes = [
        "UPDATE idempotency_records SET state = 9",
        "UPDATE idempotency_records SET state = 0",
        "UPDATE idempotency_records SET state = -1",
        "UPDATE idempotency_records SET mode = 77",
        "UPDATE idempotency_records SET token = x'00'",
        "UPDATE idempotency_records SET fingerprint = x''",
        "UPDATE idempotency_records SET status = 7",
        "UPDATE idempotency_records SET attempt = -5",
        "UPDATE idempotency_records SET owner = x'0102'",
    ];
    for change in changes {
        for world in World::durable() {
            let handler = Handler::new();
            let store = world.open().await;
            let app = handler.behind(layer(&store));
            assert_eq!(send(&app, post("k", "A")).await.status, 201);
            world.tamper(change).await;
            let answer = send(&app, post("k", "A")).await;
            assert_eq!(answer.said(), (503, UNAVAILABLE.to_owned()), "{change}");
            assert_eq!(answer.header("retry-after"), Some("1"));
            assert_eq!(handler.effects(), 1, "{change}");
            // It harms no other key, and can be forgotten.
            assert_eq!(send(&app, post("other", "A")).await.status, 201);
            assert!(store.forget(&id("k")).await.unwrap());
            assert_eq!(send(&app, post("k", "A")).await.status, 201);
        }
    }
}

// C10
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_process_that_writes_all_the_time_locks_nobody_out_with_a_write_ahead_log() {
    beside_a_busy_process(Journal::Wal).await;
}

// C10
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_process_that_writes_all_the_time_locks_nobody_out_with_a_rollback_journal() {
    beside_a_busy_process(Journal::Delete).await;
}

async fn beside_a_busy_process(journal: Journal) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("idempotency.db");
    let open = async || {
        SqliteStore::options(&file)
            .journal(journal)
            .open()
            .await
            .unwrap()
    };
    let stores = [open().await, open().await];
    let rival = BusyProcess::start(&file, journal);
    eventually("the other process to write", || rival.writes() > 20).await;

    let runs = Arc::new(AtomicUsize::new(0));
    let logs = Logs::everywhere();
    let span = tracing::info_span!("busy");
    let faulty = stores.map(|store| FaultyStore::new(AnyStore::new(store)));
    let apps = faulty
        .each_ref()
        .map(|store| randomly_slow(&runs).route_layer(layer(store)));
    let before = rival.writes();
    let one = JoinSet::from_iter((0..50).map(|number| {
        let app = apps[number % 2].clone();
        async move { send(&app, post("one", "A")).await }.instrument(span.clone())
    }));
    // A few at a time, so that their many small transactions meet many of the other process's.
    let mut answers = Vec::new();
    for wave in 0..50 {
        let few = JoinSet::from_iter((0..4).map(|number| {
            let (app, key) = (apps[number % 2].clone(), format!("k-{wave}-{number}"));
            async move { send(&app, post(&key, "A")).await }.instrument(span.clone())
        }));
        answers.extend(few.join_all().await);
    }
    answers.extend(one.join_all().await);
    let mut totals = Totals::default();
    answers.iter().for_each(|answer| totals.add(answer));
    let beside = rival.writes() - before;
    println!("C10, {journal:?}: {totals:?}, {beside} writes beside");
    assert!(beside >= 20, "the other process wrote only {beside} times");
    assert_eq!(totals.other, []);
    assert_eq!((totals.ran, runs.load(Ordering::SeqCst)), (201, 201));
    for store in &faulty {
        // Nothing had to be sent twice, so nothing failed on the way.
        let calls = [Operation::Claim, Operation::Complete].map(|call| store.calls(call));
        assert_eq!((calls[0], calls[1] <= 101), (125, true), "{calls:?}");
    }
    let loud: Vec<_> = logs
        .within(&span)
        .into_iter()
        .filter(|event| event.is_loud())
        .collect();
    assert!(loud.is_empty(), "{loud:?}");
    let written = rival.writes();
    eventually("the other process to go on", || rival.writes() > written).await;
}

/// This test binary once more, writing to the same file in a loop until it is dropped.
struct BusyProcess {
    child: Child,
    counter: std::path::PathBuf,
}

const BUSY_FILE: &str = "TEST_BUSY_FILE";
const BUSY_JOURNAL: &str = "TEST_BUSY_JOURNAL";

impl BusyProcess {
    fn start(file: &Path, journal: Journal) -> Self {
        let child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "this_binary_also_plays_the_second_process",
                "--nocapture",
            ])
            .env(BUSY_FILE, file)
            .env(BUSY_JOURNAL, format!("{journal:?}"))
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        Self {
            child,
            counter: file.with_extension("writes"),
        }
    }

    /// How often it has written so far.
    fn writes(&self) -> usize {
        std::fs::metadata(&self.counter).map_or(0, |file| file.len() as usize)
    }
}

impl Drop for BusyProcess {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn this_binary_also_plays_the_second_process() {
    let (Ok(file), Ok(journal)) = (std::env::var(BUSY_FILE), std::env::var(BUSY_JOURNAL)) else {
        return; // Nobody asked for it.
    };
    let file = Path::new(&file);
    let journal = if journal == "Wal" {
        Journal::Wal
    } else {
        Journal::Delete
    };
    let store = SqliteStore::options(file)
        .journal(journal)
        .open()
        .await
        .unwrap();
    let mut counter = std::fs::File::create(file.with_extension("writes")).unwrap();
    let mut connection = sqlx::sqlite::SqliteConnectOptions::new()
        .filename(file)
        .busy_timeout(Duration::from_millis(1))
        .connect()
        .await
        .unwrap();
    let mut write = async |statements: &'static str| {
        // Tried again at once and not after SQLite's growing pauses: a rival that gives way to
        // everybody proves nothing.
        while connection.execute(statements).await.is_err() {}
        std::io::Write::write_all(&mut counter, b".").unwrap();
    };
    write("CREATE TABLE IF NOT EXISTS ledger (entry INTEGER)").await;
    // Bounded, should the test that started it be killed and not end it.
    let end = Instant::now() + Duration::from_secs(60);
    for number in 0.. {
        if Instant::now() > end {
            return;
        }
        // The service's own writes to the file, then the layer's.
        for _ in 0..5 {
            write("INSERT INTO ledger VALUES (1)").await;
        }
        let claimed = store.claim(claim_of(&format!("rival-{number}"))).await;
        if let Ok(Claim::Won(ticket)) = claimed {
            let done = Completion::tombstone(StatusCode::OK);
            let lifetimes = Lifetimes::new(Duration::from_secs(60));
            let _ = store.complete(&ticket, done, lifetimes).await;
        }
    }
}

// C14
#[tokio::test]
async fn clones_of_one_memory_store_share_their_records() {
    let handler = Handler::new();
    let store = MemoryStore::new();
    let app = || handler.behind(IdempotencyLayer::new(store.clone()).single_tenant());
    let (one, two) = (app(), app());
    let first = send(&one, post("k", "A")).await;
    send(&two, post("k", "A")).await.assert_replays(&first);
    assert_eq!(
        send(&two, post("k", "B")).await.code(),
        "idempotency_key_reused"
    );
    handler.close_gate();
    let running = tokio::spawn(async move { send(&one, post("k-2", "A")).await });
    handler.reached(2).await;
    assert_eq!(
        send(&two, post("k-2", "A")).await.said(),
        (409, IN_FLIGHT.to_owned())
    );
    handler.open_gate();
    assert_eq!(running.await.unwrap().status, 201);
    assert_eq!(handler.effects(), 2);
}

// C14
#[tokio::test]
async fn two_memory_stores_share_nothing() {
    let handler = Handler::new();
    let app = || handler.behind(IdempotencyLayer::new(MemoryStore::new()).single_tenant());
    for app in [app(), app()] {
        let answer = send(&app, post("k", "A")).await;
        assert_eq!((answer.status.as_u16(), answer.replay), (201, false));
    }
    assert_eq!(handler.effects(), 2);
}

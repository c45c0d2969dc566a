//! What was cut off is neither forgotten nor run too often, and what is left behind is settled.

mod support;

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use axum::{
    Router,
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::any,
};
use support::{puppet::Puppet, *};
use tokio::{runtime::Runtime, task::JoinSet, time::timeout};
use tower_http::catch_panic::CatchPanicLayer;
use tower_idempotency::{
    Abandoned, IdempotencyLayer, InFlight, MemoryStore, Recovery, Retain, Retention, State,
    StoreFailure, Verdict,
    testing::{Fault, FaultyStore, Operation, Times},
};

const IN_FLIGHT: &str = "idempotency_in_flight";
const UNKNOWN: &str = "idempotency_outcome_unknown";
const REUSED: &str = "idempotency_key_reused";
const UNAVAILABLE: &str = "idempotency_store_unavailable";
const LEASE: Duration = Duration::from_secs(30);

fn layer(store: &TestStore) -> IdempotencyLayer<TestStore> {
    IdempotencyLayer::new(store.clone())
        .single_tenant()
        .store_timeout(Duration::from_millis(200))
}

/// A handler whose first run panics, and whose later ones answer as told.
fn crashes_then(
    answer: impl Fn() -> Response + Clone + Send + Sync + 'static,
) -> (Router, Arc<AtomicUsize>) {
    let runs = Arc::new(AtomicUsize::new(0));
    let count = runs.clone();
    let handler = move || {
        let (run, answer) = (count.fetch_add(1, Ordering::SeqCst) + 1, answer.clone());
        async move {
            assert!(run > 1, "as the test wants");
            answer()
        }
    };
    (Router::new().route("/charges", any(handler)), runs)
}

/// What may be taken over.
const LEFT: [(&str, State); 2] = [("r", State::Released), ("a", State::Abandoned)];

/// How a claim on it is undone.
fn undo(left: State) -> Operation {
    match left {
        State::Released => Operation::Release,
        _ => Operation::Abandon,
    }
}

/// A record whose first run failed after a step, or was cut off; two of the latter are allowed.
async fn left_as(store: &TestStore, key: &str, left: State) -> (Router, Puppet) {
    let (router, mut puppet) = Puppet::new();
    let layer = layer(store)
        .retention(Retention::successes_only())
        .recovery(Recovery::Rerun { max_attempts: 2 });
    let app = router.route_layer(layer).layer(CatchPanicLayer::new());
    let first = spawn(&app, post(key, "A"));
    let run = puppet.next().await;
    run.owner().checkpoint("step", &1).await.unwrap();
    match left {
        State::Released => run.answers(503, "down"),
        _ => run.panics("as the test wants"),
    }
    assert!(first.await.unwrap().status.is_server_error());
    assert_eq!(state(store, key).await, Some(left));
    (app, puppet)
}

/// Nothing has run since, and nothing has counted.
async fn goes_on_as_the_second(app: &Router, key: &str, puppet: &mut Puppet) {
    assert_eq!(puppet.begun(), 1);
    let sent = spawn(app, post(key, "A"));
    let run = puppet.next().await;
    assert_eq!(run.owner().attempt(), 2);
    run.answers(201, "done");
    assert_eq!(sent.await.unwrap().status, 201);
}

every_store! {
    // A provider that has not answered: the handler says so, and nothing is replayed or run again by itself.
    async fn a_handler_may_leave_its_outcome_to_recovery(world: World) {
        let store = world.open().await;
        let runs = Arc::new(AtomicUsize::new(0));
        let count = runs.clone();
        let handler = move || {
            count.fetch_add(1, Ordering::SeqCst);
            async { (StatusCode::GATEWAY_TIMEOUT, Retain::Abandon, "the provider is silent").into_response() }
        };
        let router = Router::new().route("/charges", any(handler));
        let app = router.layer(layer(&store));
        let first = send(&app, post("k", "A")).await;
        assert_eq!((first.status.as_u16(), &first.body[..]), (504, &b"the provider is silent"[..]));
        assert_eq!(state(&store, "k").await, Some(State::Abandoned));
        assert_eq!(send(&app, post("k", "A")).await.said(), (409, UNKNOWN.to_owned()));
        assert_eq!(send(&app, post("k", "B")).await.said(), (409, REUSED.to_owned()));
        assert_eq!(runs.load(Ordering::SeqCst), 1);

        // A rule by status says the same.
        let rule = |status| match status {
            StatusCode::BAD_GATEWAY => Retain::Abandon,
            _ => Retain::Keep,
        };
        let router = Router::new().route("/charges", any(|| async { StatusCode::BAD_GATEWAY }));
        let app = router.layer(layer(&store).retention(Retention::new(rule)));
        assert_eq!(send(&app, post("l", "A")).await.status, 502);
        assert_eq!(send(&app, post("l", "A")).await.said(), (409, UNKNOWN.to_owned()));
    }

    async fn what_a_handler_left_is_for_the_resolver_to_find_out(world: World) {
        let store = world.open().await;
        let silent = || async { (StatusCode::SERVICE_UNAVAILABLE, Retain::Abandon, ()) };
        let router = Router::new().route("/charges", any(silent));
        let asked = Arc::new(AtomicUsize::new(0));
        let count = asked.clone();
        // The first time it does not know either.
        let resolver = move |_: Abandoned| {
            let before = count.fetch_add(1, Ordering::SeqCst);
            async move {
                match before {
                    0 => Verdict::answer((StatusCode::OK, Retain::Abandon, "?")),
                    _ => Verdict::answer((StatusCode::CREATED, "paid")),
                }
            }
        };
        let layer = layer(&store).resolver(resolver);
        let app = router.layer(layer.clone());
        assert_eq!(send(&app, post("k", "A")).await.status, 503);
        assert_eq!(send(&app, post("k", "A")).await.said(), (409, UNKNOWN.to_owned()));
        assert_eq!(layer.reconciler().sweep().await.answered, 1);
        let retry = send(&app, post("k", "A")).await;
        assert_eq!((retry.status.as_u16(), retry.replay, &retry.body[..]), (201, true, &b"paid"[..]));
        assert_eq!(asked.load(Ordering::SeqCst), 2);
    }

    // F11, Y3: that a rerun was refused says nothing about the run before it.
    async fn a_refused_rerun_leaves_the_first_run_unknown(world: World) {
        let store = world.open().await;
        let (router, runs) = crashes_then(|| StatusCode::TOO_MANY_REQUESTS.into_response());
        let app = router
            .route_layer(layer(&store).recovery(Recovery::rerun()))
            .layer(CatchPanicLayer::new());
        assert_eq!(send(&app, post("k", "A")).await.status, 500);
        // It has ended, so it does not count as one that was cut off.
        for run in 2..=5 {
            assert_eq!(send(&app, post("k", "A")).await.status, 429);
            assert_eq!(state(&store, "k").await, Some(State::Abandoned));
            assert_eq!(send(&app, post("k", "B")).await.said(), (409, REUSED.to_owned()));
            assert_eq!(runs.load(Ordering::SeqCst), run);
        }
        assert_eq!(record(&store, "k").await.unwrap().attempt, 1);
    }

    // Y3: a handler that leaves its outcome open has ended, too.
    async fn what_a_handler_leaves_open_does_not_count(world: World) {
        let store = world.open().await;
        let (router, mut puppet) = Puppet::new();
        let layer = layer(&store).recovery(Recovery::Rerun { max_attempts: 2 });
        let app = router.route_layer(layer).layer(CatchPanicLayer::new());
        for attempt in [1, 2, 2, 2] {
            let sent = spawn(&app, post("k", "A"));
            let run = puppet.next().await;
            assert_eq!(run.owner().attempt(), attempt);
            run.answers_with((StatusCode::GATEWAY_TIMEOUT, Retain::Abandon, "").into_response());
            assert_eq!(sent.await.unwrap().status, 504);
            assert_eq!(state(&store, "k").await, Some(State::Abandoned));
        }
        let sent = spawn(&app, post("k", "A"));
        puppet.next().await.panics("as the test wants");
        assert_eq!(sent.await.unwrap().status, 500);
        assert_eq!(send(&app, post("k", "A")).await.said(), (409, UNKNOWN.to_owned()));
    }

    // E2: a handler that says so knows about the earlier run too.
    async fn a_rerun_whose_handler_says_release_frees_the_key(world: World) {
        let store = world.open().await;
        let (router, _) = crashes_then(|| (StatusCode::CONFLICT, Retain::Release, "").into_response());
        let app = router
            .route_layer(layer(&store).recovery(Recovery::rerun()))
            .layer(CatchPanicLayer::new());
        assert_eq!(send(&app, post("k", "A")).await.status, 500);
        assert_eq!(send(&app, post("k", "A")).await.status, 409);
        assert_eq!(state(&store, "k").await, None);
    }

    // Y3: a takeover for a caller that is gone is given back, and uses no attempt up.
    async fn a_takeover_whose_caller_is_gone_does_not_count(world: World) {
        for (key, left) in LEFT {
            let store = world.open().await;
            let (app, mut puppet) = left_as(&store, key, left).await;
            for gone in 1..=3 {
                let claims = store.calls(Operation::Claim);
                // The first look, then the takeover.
                store.fail(Operation::Claim, Fault::DelayBefore(Duration::ZERO), Times::Once);
                store.fail(Operation::Claim, Fault::DelayAfter(Duration::from_millis(50)), Times::Once);
                let leaves = spawn(&app, post(key, "A"));
                called(&store, Operation::Claim, claims + 2).await;
                leaves.abort();
                called(&store, undo(left), gone + 1).await;
                comes_to(&store, key, Some(left)).await;
            }
            goes_on_as_the_second(&app, key, &mut puppet).await;
        }
    }

    // C3, Y3: so is one of which nobody knows whether it took place.
    async fn a_takeover_of_unknown_fate_does_not_count(world: World) {
        for (at, fault) in [0, 1, 2, 3].into_iter().zip([Fault::After, Fault::HangAfter].repeat(2)) {
            let (left, key) = (LEFT[at / 2].1, &*format!("k-{at}"));
            let store = world.open().await;
            let (app, mut puppet) = left_as(&store, key, left).await;
            for gone in 1..=3 {
                store.fail(Operation::Claim, Fault::DelayBefore(Duration::ZERO), Times::Once);
                store.fail(Operation::Claim, fault, Times::Next(3));
                assert_eq!(send(&app, post(key, "A")).await.said(), (503, UNAVAILABLE.to_owned()));
                called(&store, undo(left), gone + 1).await;
                store.clear();
                comes_to(&store, key, Some(left)).await;
            }
            goes_on_as_the_second(&app, key, &mut puppet).await;
        }
    }

    // Shutdown, Y3: a rerun that was told to stop before it began does not count; one that had begun does.
    async fn a_rerun_that_a_drain_stops_counts_once_it_has_begun(world: World) {
        let store = world.open().await;
        let (_, _puppet) = left_as(&store, "k", State::Abandoned).await;
        for (begins, attempt) in [(false, 1), (true, 2)] {
            let (router, mut puppet) = Puppet::new();
            let layer = layer(&store).recovery(Recovery::rerun()).store_timeout(Duration::from_secs(5));
            let app = router.route_layer(layer.clone());
            if !begins {
                store.fail(Operation::Claim, Fault::DelayBefore(Duration::ZERO), Times::Once);
                store.fail(Operation::Claim, Fault::DelayAfter(Duration::from_millis(200)), Times::Once);
            }
            let claims = store.calls(Operation::Claim);
            let asked = spawn(&app, post("k", "A"));
            called(&store, Operation::Claim, claims + 2).await;
            if begins {
                let _run = puppet.next().await;
            }
            let drained = layer.drain(Duration::from_millis(20)).await;
            assert_eq!((drained.aborted, drained.left, puppet.begun()), (1, 0, usize::from(begins)));
            assert!([409, 503].contains(&asked.await.unwrap().status.as_u16()));
            let record = record(&store, "k").await.unwrap();
            assert_eq!((record.state, record.attempt), (State::Abandoned, attempt));
        }
    }

    // L2, L10: the process that runs it knows better than a lease that lapsed.
    async fn a_run_of_this_process_is_in_flight_though_its_lease_lapsed(world: World) {
        for recovery in [Recovery::Refuse, Recovery::rerun()] {
            let store = world.open().await;
            let (router, mut puppet) = Puppet::new();
            let app = router.route_layer(layer(&store).recovery(recovery));
            let key = format!("{}", recovery == Recovery::Refuse);
            let first = spawn(&app, post(&key, "A"));
            let run = puppet.next().await;
            for fault in [None, Some(Fault::Before)] {
                world.clock.advance(LEASE + Duration::from_secs(1));
                if let Some(fault) = fault {
                    store.fail(Operation::Renew, fault, Times::Always);
                }
                assert_eq!(send(&app, post(&key, "A")).await.said(), (409, IN_FLIGHT.to_owned()));
                assert_eq!(send(&app, post(&key, "B")).await.said(), (409, REUSED.to_owned()));
            }
            run.answers(201, "done");
            let first = first.await.unwrap();
            send(&app, post(&key, "A")).await.assert_replays(&first);
            assert_eq!(puppet.begun(), 1);
        }
    }

    // Y2 stands: past `max_run` a run of this process is abandoned too.
    async fn past_max_run_a_run_of_this_process_is_abandoned_all_the_same(world: World) {
        let store = world.open().await;
        let (router, mut puppet) = Puppet::new();
        let app = router.route_layer(layer(&store).max_run(Duration::from_secs(60)));
        let _first = spawn(&app, post("k", "A"));
        let _run = puppet.next().await;
        world.clock.advance(Duration::from_secs(61));
        assert_eq!(send(&app, post("k", "A")).await.said(), (409, UNKNOWN.to_owned()));
    }

    // C3, drain: a claim of unknown fate is given back before the drain is over.
    async fn drain_waits_until_claims_of_unknown_fate_are_given_back(world: World) {
        let store = world.open().await;
        let handler = Handler::new();
        let layer = layer(&store);
        let app = handler.behind(layer.clone());
        store.fail(Operation::Claim, Fault::After, Times::Next(3));
        store.fail(Operation::Release, Fault::Before, Times::Next(2));
        assert_eq!(send(&app, post("k", "A")).await.said(), (503, UNAVAILABLE.to_owned()));
        let drained = layer.drain(Duration::from_secs(5)).await;
        assert_eq!((drained.aborted, drained.left), (0, 0));
        assert_eq!((state(&store, "k").await, handler.effects()), (None, 0));
    }

    // L12: a run that ends with its runtime is abandoned as soon as another runtime serves.
    async fn a_run_that_ended_with_its_runtime_is_abandoned_while_others_go_on(world: World) {
        let store = world.open().await;
        let (router, mut puppet) = Puppet::new();
        let app = router.route_layer(layer(&store));
        let ended = Runtime::new().unwrap();
        let request = post("k", "A");
        let dies = app.clone();
        ended.spawn(async move { send(&dies, request).await });
        let _run = puppet.next().await;
        tokio::task::spawn_blocking(move || drop(ended)).await.unwrap();

        let other = spawn(&app, post("other", "A"));
        let goes_on = puppet.next().await;
        comes_to(&store, "k", Some(State::Abandoned)).await;
        assert_eq!(send(&app, post("k", "A")).await.said(), (409, UNKNOWN.to_owned()));
        goes_on.answers(201, "done");
        assert_eq!(other.await.unwrap().status, 201);
    }

    // C3: that the last error claimed nothing says nothing about the tries before.
    async fn a_lost_claim_is_given_back_though_a_later_try_fails_otherwise(world: World) {
        let store = world.open().await;
        let handler = Handler::new();
        let app = handler.behind(layer(&store));
        store.fail(Operation::Claim, Fault::After, Times::Once);
        store.fail(Operation::Claim, Fault::HangBefore, Times::Once);
        assert_eq!(send(&app, post("k", "A")).await.said(), (503, UNAVAILABLE.to_owned()));
        comes_to(&store, "k", None).await;
        assert_eq!(send(&app, post("k", "A")).await.status, 201);
    }

    // Shutdown: what had not begun when the runs were told to stop does not begin any more.
    async fn a_claim_that_is_won_after_the_abort_is_given_back(world: World) {
        let store = world.open().await;
        let handler = Handler::new();
        let layer = layer(&store).store_timeout(Duration::from_secs(5));
        let app = handler.behind(layer.clone());
        store.fail(Operation::Claim, Fault::DelayAfter(Duration::from_millis(200)), Times::Once);
        let asked = spawn(&app, post("k", "A"));
        called(&store, Operation::Claim, 1).await;
        let drained = layer.drain(Duration::from_millis(20)).await;
        assert_eq!((drained.aborted, drained.left), (1, 0));
        assert_eq!(asked.await.unwrap().status, 503);
        assert_eq!((state(&store, "k").await, handler.effects()), (None, 0));
    }

    // L12, Y1: a claim that is being made when its runtime ends is undone from another.
    async fn a_claim_that_ends_with_its_runtime_is_undone_from_another(world: World) {
        let store = world.open().await;
        let handler = Handler::new();
        let app = handler.behind(layer(&store).store_timeout(Duration::from_secs(60)));
        let ended = Runtime::new().unwrap();
        store.fail(Operation::Claim, Fault::HangAfter, Times::Once);
        let dies = app.clone();
        ended.spawn(async move { send(&dies, post("k", "A")).await });
        called(&store, Operation::Claim, 1).await;
        comes_to(&store, "k", Some(State::Running)).await;
        tokio::task::spawn_blocking(move || drop(ended)).await.unwrap();
        assert_eq!(send(&app, post("other", "A")).await.status, 201);
        comes_to(&store, "k", None).await;
        assert_eq!(send(&app, post("k", "A")).await.status, 201);
    }

    // L12: settling goes on where the runtime that did it has ended, and drain starts it.
    async fn what_is_left_behind_outlives_the_runtime_that_settled_it(world: World) {
        let store = world.open().await;
        let handler = Handler::new();
        let layer = layer(&store).store_timeout(Duration::from_secs(60));
        let app = handler.behind(layer.clone());
        let ended = Runtime::new().unwrap();
        store.fail(Operation::Claim, Fault::After, Times::Next(3));
        store.fail(Operation::Release, Fault::HangBefore, Times::Once);
        let asks = app.clone();
        let asked = ended.spawn(async move { send(&asks, post("k", "A")).await });
        assert_eq!(asked.await.unwrap().status, 503);
        called(&store, Operation::Release, 1).await;
        tokio::task::spawn_blocking(move || drop(ended)).await.unwrap();
        assert_eq!(state(&store, "k").await, Some(State::Running));
        let drained = timeout(Duration::from_secs(5), layer.drain(Duration::from_secs(30))).await;
        assert_eq!(drained.expect("nobody settles it").left, 0);
        assert_eq!(state(&store, "k").await, None);
    }

    // What a run leaves behind is recorded as its own layer was told, whichever layer does it.
    async fn an_answer_left_behind_keeps_its_own_lifetimes(world: World) {
        let store = world.open().await;
        let handler = Handler::new();
        let long = layer(&store).store_timeout(Duration::from_secs(60)).ttl(Duration::from_secs(3600));
        let short = handler.behind(long.clone().ttl(Duration::from_secs(1)));
        let long = handler.behind(long);
        let ended = Runtime::new().unwrap();
        store.fail(Operation::Complete, Fault::HangBefore, Times::Once);
        let dies = long.clone();
        ended.spawn(async move { send(&dies, post("k", "A")).await });
        called(&store, Operation::Complete, 1).await;
        tokio::task::spawn_blocking(move || drop(ended)).await.unwrap();
        assert_eq!(send(&short, post("other", "A")).await.status, 201);
        comes_to(&store, "k", Some(State::Completed)).await;
        world.clock.advance(Duration::from_secs(60));
        let retry = send(&long, post("k", "A")).await;
        assert_eq!((retry.status.as_u16(), retry.replay, handler.effects()), (201, true, 2));
    }

    // §4: where a claim becomes a run there is nothing left to hope for.
    async fn a_request_that_hopes_for_a_place_hears_at_once_that_there_is_none(world: World) {
        let store = world.open().await;
        let (router, mut puppet) = Puppet::new();
        let app = router.route_layer(
            layer(&store)
                .store_timeout(Duration::from_secs(30))
                .max_running(1),
        );
        store.fail(Operation::Claim, Fault::DelayBefore(Duration::from_millis(100)), Times::Once);
        let _first = spawn(&app, post("k-1", "A"));
        called(&store, Operation::Claim, 1).await;
        let hopes = timeout(Duration::from_secs(5), send(&app, post("k-2", "A"))).await;
        assert_eq!(hopes.expect("it hopes in vain").status, 503);
        drop(puppet.next().await);
    }

    // C11: what has come by the end of a wait counts.
    async fn a_wait_looks_once_more_at_its_end(world: World) {
        let (there, store) = (world.open().await, world.open().await);
        let (router, mut puppet) = Puppet::new();
        let other = router.clone().route_layer(layer(&there));
        let bound = Duration::from_millis(1_500);
        let here = router.route_layer(layer(&store).in_flight(InFlight::Wait(bound)));
        let first = spawn(&other, post("k", "A"));
        let run = puppet.next().await;
        let waits = spawn(&here, post("k", "A"));
        // After the poll at 775 ms, before that at 1 575 ms.
        tokio::time::sleep(Duration::from_millis(1_100)).await;
        run.answers(201, "done");
        let first = first.await.unwrap();
        waits.await.unwrap().assert_replays(&first);
    }

    // D1: nothing is run unprotected for a caller that is gone.
    async fn a_caller_that_is_gone_gets_no_unprotected_run(world: World) {
        let store = world.open().await;
        let handler = Handler::new();
        let app = handler.behind(layer(&store).store_failure(StoreFailure::RunUnprotected));
        store.fail(Operation::Claim, Fault::HangBefore, Times::Always);
        let leaves = spawn(&app, post("k", "A"));
        called(&store, Operation::Claim, 1).await;
        leaves.abort();
        called(&store, Operation::Release, 1).await;
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert_eq!(handler.effects(), 0);
    }

    // C11: the end of a run is news for its waiters, however many other runs there are.
    async fn waiters_get_the_replay_though_every_place_is_taken(world: World) {
        const WAITERS: usize = 100;
        let store = world.open().await;
        let (router, mut puppet) = Puppet::new();
        let app = router.route_layer(
            layer(&store)
                // They look one after the other, which is slow where the store is.
                .store_timeout(Duration::from_secs(10))
                .max_running(2)
                .in_flight(InFlight::Wait(Duration::from_secs(20))),
        );
        let first = spawn(&app, post("k", "A"));
        let run = puppet.next().await;
        let mut waiters = JoinSet::new();
        let begun = Instant::now();
        for _ in 0..WAITERS {
            let app = app.clone();
            waiters.spawn(async move { send(&app, post("k", "A")).await });
        }
        // Each claims when it comes and when it begins to wait. Meanwhile one at a time polls, after
        // 25 ms, then twice as much, and so on up to 1 s.
        eventually("all of them to wait", || {
            let waited = begun.elapsed();
            let doubled = (waited.as_millis() / 25 + 1).ilog2().min(6) as usize;
            let polls = doubled + waited.as_secs().saturating_sub(1) as usize;
            store.calls(Operation::Claim) > 2 * WAITERS + polls
        })
        .await;
        let _other = spawn(&app, post("other", "A"));
        let holds_a_place = puppet.next().await;
        run.answers(201, "done");
        let first = first.await.unwrap();
        for waited in waiters.join_all().await {
            waited.assert_replays(&first);
        }
        drop(holds_a_place);
    }

    // C11: a wait that comes to nothing comes to nothing for all at once.
    async fn waiters_on_another_process_hear_bad_news_together(world: World) {
        const WAITERS: usize = 40;
        let (first, store) = (world.open().await, world.open().await);
        let (router, mut puppet) = Puppet::new();
        let there = router
            .clone()
            .route_layer(layer(&first))
            .layer(CatchPanicLayer::new());
        let here = router.route_layer(layer(&store).in_flight(InFlight::Wait(LEASE)));
        let _running = spawn(&there, post("k", "A"));
        let run = puppet.next().await;
        let mut waiters = JoinSet::new();
        for _ in 0..WAITERS {
            let here = here.clone();
            waiters.spawn(async move { send(&here, post("k", "A")).await });
        }
        called(&store, Operation::Claim, 2 * WAITERS).await;
        run.panics("as the test wants");
        let told = timeout(Duration::from_secs(5), waiters.join_all()).await;
        for told in told.expect("they leave one by one") {
            assert_eq!(told.said(), (409, UNKNOWN.to_owned()));
        }
    }

    // L12: what a handler holds may panic while it is dropped.
    async fn a_handler_that_panics_while_it_is_aborted_is_abandoned(world: World) {
        struct Bomb;
        impl Drop for Bomb {
            fn drop(&mut self) {
                assert!(std::thread::panicking(), "as the test wants");
            }
        }
        let store = world.open().await;
        let begun = Arc::new(tokio::sync::Notify::new());
        let told = begun.clone();
        let handler = move || {
            let told = told.clone();
            async move {
                let _bomb = Bomb;
                told.notify_one();
                std::future::pending::<()>().await;
            }
        };
        let layer = layer(&store);
        let app = Router::new()
            .route("/charges", any(handler))
            .route_layer(layer.clone())
            .layer(CatchPanicLayer::new());
        let running = spawn(&app, post("k", "A"));
        begun.notified().await;
        let drained = layer.drain(Duration::ZERO).await;
        assert_eq!((drained.aborted, drained.left), (1, 0));
        assert_eq!(running.await.unwrap().status, 500);
        assert_eq!(state(&store, "k").await, Some(State::Abandoned));
    }
}

// C6: a record that cannot be read may be that of a finished run.
#[tokio::test]
async fn run_unprotected_does_not_run_where_a_record_cannot_be_read() {
    for world in World::durable() {
        let store = world.open().await;
        let handler = Handler::new();
        let app = handler.behind(layer(&store).store_failure(StoreFailure::RunUnprotected));
        assert_eq!(send(&app, post("k", "A")).await.status, 201);
        world
            .tamper("UPDATE idempotency_records SET state = 9")
            .await;
        assert_eq!(
            send(&app, post("k", "A")).await.said(),
            (503, UNAVAILABLE.to_owned())
        );
        assert_eq!(handler.effects(), 1);
    }
}

// C3: a record that cannot be read holds nothing else up, and no task survives its layer.
#[tokio::test]
async fn a_damaged_record_holds_no_other_key_up_and_keeps_nothing_alive() {
    for world in World::durable() {
        let store = world.open().await;
        let handler = Handler::new();
        let app = handler.behind(layer(&store));
        assert_eq!(send(&app, post("bad", "A")).await.status, 201);
        world
            .tamper("UPDATE idempotency_records SET state = 9")
            .await;
        assert_eq!(send(&app, post("bad", "A")).await.status, 503);

        store.fail(Operation::Claim, Fault::After, Times::Next(3));
        assert_eq!(send(&app, post("k", "A")).await.status, 503);
        comes_to(&store, "k", None).await;
        assert_eq!(send(&app, post("k", "A")).await.status, 201);
        // Nothing is sent for the bad one any more.
        let releases = store.calls(Operation::Release);
        assert_eq!(send(&app, post("bad", "A")).await.status, 503);
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert_eq!(store.calls(Operation::Release), releases);
    }
}

// F5 of the store's contract: even what can never be given back ends with the last handle.
#[tokio::test]
async fn nothing_goes_on_when_the_last_handle_of_a_layer_is_gone() {
    let store = FaultyStore::new(tower_idempotency::AnyStore::new(MemoryStore::new()));
    let handler = Handler::new();
    let app = handler.behind(layer(&store));
    store.fail(Operation::Claim, Fault::After, Times::Next(3));
    store.fail(Operation::Release, Fault::Before, Times::Always);
    assert_eq!(send(&app, post("k", "A")).await.status, 503);
    called(&store, Operation::Release, 2).await;
    drop(app);
    let tasks = tokio::runtime::Handle::current().metrics();
    eventually("the tasks of the layer to end", || {
        tasks.num_alive_tasks() == 0
    })
    .await;
}

// L2: a store that answers slowly is waited for.
#[tokio::test(start_paused = true)]
async fn a_renewal_that_takes_nearly_half_a_lease_keeps_the_claim() {
    let memory = MemoryStore::new();
    let slow = FaultyStore::new(memory.clone());
    slow.fail(
        Operation::Renew,
        Fault::DelayBefore(Duration::from_millis(400)),
        Times::Always,
    );
    let (router, mut puppet) = Puppet::new();
    let here = router.clone().route_layer(
        IdempotencyLayer::new(slow)
            .single_tenant()
            .lease(Duration::from_secs(1)),
    );
    let other = router.route_layer(
        IdempotencyLayer::new(memory.instance())
            .single_tenant()
            .recovery(Recovery::rerun()),
    );
    let first = spawn(&here, post("k", "A"));
    let run = puppet.next().await;
    for _ in 0..60 {
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert_eq!(
            send(&other, post("k", "A")).await.said(),
            (409, IN_FLIGHT.to_owned())
        );
    }
    run.answers(201, "done");
    assert_eq!(
        (first.await.unwrap().status.as_u16(), puppet.begun()),
        (201, 1)
    );
}

// L10: of renewals that never come back, one costs nothing.
#[tokio::test(start_paused = true)]
async fn a_renewal_that_hangs_leaves_time_for_the_next() {
    let memory = MemoryStore::new();
    let hangs = FaultyStore::new(memory.clone());
    let (router, mut puppet) = Puppet::new();
    let here = router.clone().route_layer(
        IdempotencyLayer::new(hangs.clone())
            .single_tenant()
            .lease(Duration::from_secs(3)),
    );
    let other = router.route_layer(IdempotencyLayer::new(memory.instance()).single_tenant());
    let first = spawn(&here, post("k", "A"));
    let run = puppet.next().await;
    for round in 0..100 {
        if round % 40 == 0 {
            hangs.fail(Operation::Renew, Fault::HangBefore, Times::Once);
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert_eq!(
            send(&other, post("k", "A")).await.said(),
            (409, IN_FLIGHT.to_owned())
        );
    }
    run.answers(201, "done");
    assert_eq!(first.await.unwrap().status, 201);
}

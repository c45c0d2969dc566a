//! Counters, histograms and gauges say what was done, to requests and to the store, and nothing secret.

mod support;

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use axum::{
    Router,
    body::Body,
    http::{Request, Response, StatusCode},
};
use http_body_util::BodyExt;
use support::{
    logs::{Logged, Logs},
    metrics::Collected,
    puppet::Puppet,
    *,
};
use tokio::{runtime, time::sleep};
use tower::ServiceExt;
use tower_http::catch_panic::CatchPanicLayer;
use tower_idempotency::{
    Abandoned, AnyStore, Fingerprint, IdempotencyKey, IdempotencyLayer, IdempotentResponse,
    InFlight, MemoryStore, RecordId, Recovery, Retain, Scope, State, StoreFailure, Verdict,
    store::{Claim, ClaimRequest, Settled, Store},
    testing::{Fault, FaultyStore, Operation, Times},
};

const REQUESTS: &str = "idempotency_requests_total";
const STORE_ERRORS: &str = "idempotency_store_errors_total";
const ABANDONED: &str = "idempotency_abandoned_total";
const RESOLVED: &str = "idempotency_resolved_total";
const LATE: &str = "idempotency_records_late_total";
const FAILED: &str = "idempotency_records_failed_total";
const CLAIM_SECONDS: &str = "idempotency_claim_seconds";
const COMPLETE_SECONDS: &str = "idempotency_complete_seconds";
const HANDLER_SECONDS: &str = "idempotency_handler_seconds";
const BATCH_SIZE: &str = "idempotency_batch_size";
const RUNNING: &str = "idempotency_running";
const WAITING: &str = "idempotency_waiting";
const HEARTBEAT_AGE: &str = "idempotency_heartbeat_age_seconds";
const RECORDS: &str = "idempotency_records";

fn layer(store: &TestStore) -> IdempotencyLayer<TestStore> {
    IdempotencyLayer::new(store.clone()).single_tenant()
}

async fn comes_to(store: &TestStore, key: &str, expected: Option<State>) {
    for _ in 0..2_500 {
        if record(store, key).await.map(|record| record.state) == expected {
            return;
        }
        sleep(Duration::from_millis(2)).await;
    }
    panic!("it is not {expected:?}");
}

/// Counts what the answers say was done.
#[derive(Default)]
struct Answered {
    statuses: BTreeMap<String, u64>,
}

impl Answered {
    async fn sends(&mut self, app: &Router, request: Request<Body>) -> StatusCode {
        let response = app.clone().oneshot(request).await.unwrap();
        self.counts(response).await
    }

    async fn counts(&mut self, response: Response<Body>) -> StatusCode {
        if let Some(status) = response.idempotency_status() {
            self.add(status.as_str());
        }
        let status = response.status();
        response.into_body().collect().await.unwrap();
        status
    }

    fn add(&mut self, status: &str) {
        *self.statuses.entry(status.to_owned()).or_default() += 1;
    }
}

const SECRET: &str = "s3cret";

fn key(name: &str) -> String {
    format!("{SECRET}-{name}")
}

/// Answers by path; counts every run.
fn handler() -> Handler {
    Handler::answering(|seen| {
        let response = Response::builder().header("x-field", SECRET);
        match seen.uri.path() {
            "/tombstone" => response.extension(Retain::Tombstone),
            "/bad" => response.status(400),
            "/panic" => panic!("as the test wants"),
            _ => response.status(201),
        }
        .body(Body::from(SECRET))
        .unwrap()
    })
}

// V2
#[tokio::test]
async fn counters_match_what_was_answered_and_how_often_the_handler_ran() {
    for world in World::each() {
        let (collected, _alone) = Collected::of_this_thread();
        let (logs, _guard) = Logs::of_this_thread();
        let store = world.open().await;
        let handler = handler();
        let base = IdempotencyLayer::new(store.clone()).scope(|_| Some(Scope::new(SECRET)));
        let behind = |layer| handler.behind(layer).layer(CatchPanicLayer::new());
        let app = behind(base.clone());
        let to = |path: &str, name: &str| request("POST", path, Some(&key(name)), SECRET);
        let mut answered = Answered::default();

        for _ in 0..3 {
            answered.sends(&app, to("/charges", "a")).await; // executed, replayed twice
        }
        answered
            .sends(&app, request("POST", "/charges", Some(&key("a")), "B"))
            .await; // reused
        answered
            .sends(&app, request("POST", "/charges", None, SECRET))
            .await; // missing
        answered
            .sends(&app, request("POST", "/charges", Some("\"s3cret"), SECRET))
            .await; // invalid
        for _ in 0..2 {
            answered.sends(&app, to("/tombstone", "b")).await; // executed, not_retained
            answered.sends(&app, to("/bad", "c")).await; // executed, twice
        }
        // In flight, and too many at once.
        let narrow = behind(base.clone().max_running(1));
        handler.close_gate();
        let ran = handler.effects();
        let held = tokio::spawn(app.clone().oneshot(to("/charges", "held")));
        handler.reached(ran + 1).await;
        answered.sends(&app, to("/charges", "held")).await; // in_flight
        answered.sends(&narrow, to("/charges", "other")).await; // overloaded
        handler.open_gate();
        answered.counts(held.await.unwrap().unwrap()).await; // executed
        // A run that panics has no answer of the layer's, and yet it ran.
        for _ in 0..2 {
            let before = handler.effects();
            answered.sends(&app, to("/panic", "d")).await; // executed, then outcome_unknown
            if handler.effects() > before {
                answered.add("executed");
            }
        }
        let rerunning = behind(base.clone().recovery(Recovery::rerun()));
        answered.sends(&rerunning, to("/panic", "d")).await; // took_over, and panics again
        answered.add("took_over");
        // The store is down.
        store.fail(Operation::Claim, Fault::Before, Times::Next(6));
        answered.sends(&app, to("/charges", "e")).await; // store_unavailable
        let unprotected = behind(base.clone().store_failure(StoreFailure::RunUnprotected));
        answered.sends(&unprotected, to("/charges", "e")).await; // unprotected
        // A sample is taken in the background.
        let limited = behind(base.clone().scope_limit(1));
        for at in 0..2_000 {
            let path = format!("limited-{at}");
            if answered.sends(&limited, to("/charges", &path)).await == 429 {
                break; // limit_reached
            }
            sleep(Duration::from_millis(2)).await;
        }
        // What needs no key is no decision.
        answered
            .sends(&app, request("GET", "/charges", None, ""))
            .await;
        answered
            .sends(&app, request("PATCH", "/charges", None, SECRET))
            .await;

        let counted = collected.by_label(REQUESTS);
        assert_eq!(counted, answered.statuses);
        assert_eq!(counted.len(), 13, "{counted:?}");
        let runs = counted["executed"] + counted["took_over"] + counted["unprotected"];
        assert_eq!(
            runs + 2,
            u64::try_from(handler.effects()).unwrap(),
            "two needed no key"
        );

        // One event for each.
        let mut told = BTreeMap::new();
        for event in logs
            .all()
            .iter()
            .filter(|event| event.text.contains("decision"))
        {
            let status = event
                .text
                .split("status=\"")
                .nth(1)
                .unwrap()
                .split('"')
                .next();
            *told.entry(status.unwrap().to_owned()).or_default() += 1_u64;
        }
        assert_eq!(told, counted);
        assert_eq!(
            collected.by_label(ABANDONED),
            [("panicked".to_owned(), 2)].into()
        );

        // Nothing that a client sends is a label, and each name is described.
        for (name, labels) in collected.series() {
            assert!(
                labels.iter().all(|label| !label.contains(SECRET)),
                "{name} {labels:?}"
            );
            assert!(collected.is_described(&name), "{name} is not described");
        }
    }
}

/// How often this was said at warn or above.
fn loud(logs: &Logs, operation: &str) -> usize {
    let field = format!("operation=\"{operation}\"");
    let about =
        |event: &Logged| event.text.contains("idempotency store") && event.text.contains(&field);
    logs.loud("").iter().filter(|event| about(event)).count()
}

// V3
#[tokio::test]
async fn each_failure_of_the_store_is_counted_once_and_said_once() {
    for world in World::each() {
        let (collected, _alone) = Collected::of_this_thread();
        let (logs, _guard) = Logs::of_this_thread();
        let store = world.open().await;
        let (router, mut puppet) = Puppet::new();
        let layer = layer(&store)
            .ttl(Duration::from_secs(10))
            .lease(Duration::from_secs(300))
            .resolver_timeout(Duration::from_secs(5))
            .count_records_every(Duration::from_millis(20))
            .resolver(|_: Abandoned| async { Verdict::DidNotHappen });
        let app = router
            .clone()
            .route_layer(layer.clone())
            .layer(CatchPanicLayer::new());
        let fails = |operation| store.fail(operation, Fault::Before, Times::Once);

        // A whole request, where each step fails once.
        let once = [
            Operation::Claim,
            Operation::Save,
            Operation::Load,
            Operation::Renew,
            Operation::Complete,
            Operation::Purge,
            Operation::Counts,
            Operation::CountIn,
        ];
        once.into_iter().for_each(fails);
        let answer = spawn(&app, post("a", "A"));
        let run = puppet.next().await;
        run.owner().checkpoint("step", &1).await.unwrap();
        let _ = run.owner().ensure_owned().await;
        run.answers(201, "done");
        assert_eq!(answer.await.unwrap().status, 201);
        // Refused by the handler, so the key is free again.
        fails(Operation::Release);
        let answer = spawn(&app, post("b", "A"));
        puppet.next().await.answers(400, "no");
        assert_eq!(answer.await.unwrap().status, 400);
        // Cut off, then asked about.
        fails(Operation::Abandon);
        let answer = spawn(&app, post("c", "A"));
        puppet.next().await.panics("as the test wants");
        assert_eq!(answer.await.unwrap().status, 500);
        comes_to(&store, "c", Some(State::Abandoned)).await;
        fails(Operation::Abandoned);
        fails(Operation::TakeOver);
        let reconciler = layer.reconciler();
        while store.calls(Operation::Load) < 2 {
            let _ = reconciler.sweep().await;
        }
        // Looked for before anything is claimed, since the scope has its fill.
        let limited = router.route_layer(layer.clone().scope_limit(1));
        fails(Operation::Get);
        let mut refused = Vec::new();
        for at in 0..2_000 {
            let mut answer = spawn(&limited, post(&format!("d-{at}"), "A"));
            tokio::select! {
                run = puppet.next() => run.answers(201, "let in"),
                answer = &mut answer => {
                    refused.push(answer.unwrap().code());
                    break;
                }
            }
            answer.await.unwrap();
            sleep(Duration::from_millis(2)).await;
        }
        assert_eq!(refused, ["idempotency_store_unavailable"]);

        let operations = [
            (Operation::Claim, "claim"),
            (Operation::Complete, "complete"),
            (Operation::Release, "release"),
            (Operation::Abandon, "abandon"),
            (Operation::Renew, "renew"),
            (Operation::Purge, "purge"),
            (Operation::Get, "get"),
            (Operation::Counts, "counts"),
            (Operation::CountIn, "count_in"),
            (Operation::Abandoned, "abandoned"),
            (Operation::TakeOver, "take_over"),
            (Operation::Save, "save"),
            (Operation::Load, "load"),
        ];
        for (operation, name) in operations {
            called(&store, operation, 1).await;
            let labels = [&*format!("operation={name}"), "kind=unavailable"];
            eventually(name, || collected.counter(STORE_ERRORS, &labels) == 1).await;
            assert_eq!(loud(&logs, name), 1, "{name}");
        }
        assert_eq!(collected.counter(STORE_ERRORS, &[]), 13);
    }
}

// V3, O1, O2: what is not answered is given up, and that is no more silent.
#[tokio::test]
async fn a_store_that_does_not_answer_in_time_is_counted_and_said() {
    for world in World::each() {
        let (collected, _alone) = Collected::of_this_thread();
        let (logs, _guard) = Logs::of_this_thread();
        let store = world.open().await;
        let handler = handler();
        let layer = layer(&store).store_timeout(Duration::from_millis(500));
        let app = handler.behind(layer.clone());
        let hangs = |operation| store.fail(operation, Fault::HangBefore, Times::Once);
        let timeouts = |name: &str| {
            let labels = [&*format!("operation={name}"), "kind=timeout"];
            let counted = collected.counter(STORE_ERRORS, &labels);
            assert_eq!(
                loud(&logs, name),
                usize::try_from(counted).unwrap(),
                "{name}"
            );
            counted
        };
        hangs(Operation::Complete);
        assert_eq!(send(&app, post("a", "A")).await.status, 201);
        comes_to(&store, "a", Some(State::Completed)).await;
        assert_eq!((timeouts("complete"), collected.counter(LATE, &[])), (1, 1));
        // The claim that may stand is given back in the background, where a try may hang as well.
        hangs(Operation::Claim);
        hangs(Operation::Release);
        assert_eq!(send(&app, post("b", "A")).await.status, 503);
        let drained = layer.drain(Duration::from_secs(10)).await;
        assert_eq!((drained.aborted, store.calls(Operation::Release)), (0, 2));
        assert_eq!((timeouts("claim"), timeouts("release")), (1, 1));
        assert_eq!(collected.counter(STORE_ERRORS, &[]), 3);
    }
}

// O2
#[tokio::test]
async fn what_becomes_of_an_answer_that_cannot_be_recorded_is_counted() {
    for world in World::each() {
        let (collected, _alone) = Collected::of_this_thread();
        let (logs, _guard) = Logs::of_this_thread();
        let store = world.open().await;
        let handler = handler();
        let app = handler.behind(layer(&store).store_timeout(Duration::from_millis(500)));
        let late = || (collected.counter(LATE, &[]), collected.counter(FAILED, &[]));

        // Once, or the acknowledgement is lost: sent again, and stored.
        for (fault, key) in [(Fault::Before, "once"), (Fault::After, "ack")] {
            store.fail(Operation::Complete, fault, Times::Once);
            let first = send(&app, post(key, "A")).await;
            send(&app, post(key, "A")).await.assert_replays(&first);
        }
        assert_eq!((late(), logs.loud("claim lost").len()), ((0, 0), 0));
        // Always: the client's answer is true, and the claim is kept.
        store.fail(Operation::Complete, Fault::Before, Times::Always);
        let first = send(&app, post("always", "A")).await;
        assert_eq!(first.status, 201);
        assert_eq!(
            send(&app, post("always", "A")).await.code(),
            "idempotency_in_flight"
        );
        assert_eq!(late(), (1, 0));
        assert_eq!(logs.loud("not written within store_timeout").len(), 1);
        store.clear();
        comes_to(&store, "always", Some(State::Completed)).await;
        send(&app, post("always", "A")).await.assert_replays(&first);
        assert_eq!(late(), (1, 0));
        // Never: the store is closed while the handler runs.
        handler.close_gate();
        let runs = handler.effects();
        let answer = spawn(&app, post("never", "A"));
        handler.reached(runs + 1).await;
        store.close().await.unwrap();
        handler.open_gate();
        assert_eq!(answer.await.unwrap().status, 201);
        assert_eq!(late(), (1, 1));
        assert_eq!(logs.loud("will count as unknown").len(), 1);
        assert_eq!(collected.counter(REQUESTS, &["status=executed"]), 4);
    }
}

#[tokio::test]
async fn claims_handlers_and_completions_are_measured() {
    for world in World::each() {
        let (collected, _alone) = Collected::of_this_thread();
        let store = world.open().await;
        let (router, mut puppet) = Puppet::new();
        let app = router.route_layer(layer(&store));
        let measured = || {
            [CLAIM_SECONDS, HANDLER_SECONDS, COMPLETE_SECONDS]
                .map(|name| collected.histogram(name, &[]).len())
        };
        let begun = Instant::now();
        let answer = spawn(&app, post("a", "A"));
        let run = puppet.next().await;
        sleep(Duration::from_millis(20)).await;
        run.answers(201, "done");
        answer.await.unwrap();
        let took = begun.elapsed().as_secs_f64();
        assert_eq!(measured(), [1, 1, 1]);
        let handler = collected.histogram(HANDLER_SECONDS, &[])[0];
        assert!((0.02..=took).contains(&handler), "{handler} of {took}");
        // A replay is a claim and nothing else.
        send(&app, post("a", "A")).await;
        assert_eq!(measured(), [2, 1, 1]);
        // Whatever slows a store down shows.
        let slow = Fault::DelayBefore(Duration::from_millis(30));
        store.fail(Operation::Claim, slow, Times::Once);
        store.fail(Operation::Release, slow, Times::Once);
        let answer = spawn(&app, post("b", "A"));
        puppet.next().await.answers(400, "no");
        answer.await.unwrap();
        assert_eq!(measured(), [3, 2, 2]);
        assert!(collected.histogram(CLAIM_SECONDS, &[])[2] >= 0.03);
        assert!(collected.histogram(COMPLETE_SECONDS, &[])[1] >= 0.03);
    }
}

// A handler that panics or is aborted took its time as well; one that hangs shows among the runs.
#[tokio::test]
async fn runs_that_are_cut_off_are_measured() {
    for world in World::each() {
        let (collected, _alone) = Collected::of_this_thread();
        let store = world.open().await;
        let (router, mut puppet) = Puppet::new();
        let layer = layer(&store);
        let app = router
            .route_layer(layer.clone())
            .layer(CatchPanicLayer::new());
        let measured = || collected.histogram(HANDLER_SECONDS, &[]);
        let answer = spawn(&app, post("panics", "A"));
        puppet.next().await.panics("as the test wants");
        answer.await.unwrap();
        assert_eq!(measured().len(), 1);
        let answer = spawn(&app, post("hangs", "A"));
        let _run = puppet.next().await;
        eventually("the run", || collected.gauge(RUNNING, &[]) == Some(1.0)).await;
        sleep(Duration::from_millis(20)).await;
        assert_eq!(measured().len(), 1);
        layer.drain(Duration::ZERO).await;
        answer.await.unwrap();
        assert_eq!(measured().len(), 2);
        assert!(measured()[1] >= 0.02, "{:?}", measured());
        let abandoned = collected.by_label(ABANDONED);
        let expected = [("panicked".to_owned(), 1), ("drained".to_owned(), 1)];
        assert_eq!(abandoned, expected.into());
    }
}

#[tokio::test]
async fn batches_are_measured_by_database() {
    let real = RealTime::stores().await;
    for (name, store) in &real.stores {
        let (collected, _alone) = Collected::of_this_thread();
        let app = handler().behind(layer(store));
        let answers: Vec<_> = (0..40)
            .map(|at| spawn(&app, post(&format!("k-{at}"), "A")))
            .collect();
        for answer in answers {
            assert_eq!(answer.await.unwrap().status, 201);
        }
        let sizes = collected.histogram(BATCH_SIZE, &[&format!("store={name}")]);
        assert_eq!(sizes, collected.histogram(BATCH_SIZE, &[]), "{name}");
        if *name == "memory" {
            assert!(sizes.is_empty());
            continue;
        }
        let operations: f64 = sizes.iter().sum();
        // Claims and completions; a heartbeat may have come in between.
        assert!(operations >= 80.0, "{name}: {sizes:?}");
        assert!(sizes.iter().any(|size| *size > 1.0), "{name}: {sizes:?}");
    }
}

#[tokio::test]
async fn what_goes_on_is_shown_as_the_sum_over_the_layers_also_when_idle() {
    for world in World::each() {
        let (collected, _alone) = Collected::of_this_thread();
        let store = world.open().await;
        let (router, mut puppet) = Puppet::new();
        let wait = InFlight::Wait(Duration::from_secs(30));
        // Two layers and a clone.
        let one = layer(&store).in_flight(wait);
        let other = layer(&store);
        let apps = [one.clone(), one, other].map(|layer| router.clone().route_layer(layer));
        let shows = |running: f64, waiting: f64| {
            let (collected, what) = (collected.clone(), format!("{running} and {waiting}"));
            async move {
                eventually(&what, || {
                    collected.gauge(RUNNING, &[]) == Some(running)
                        && collected.gauge(WAITING, &[]) == Some(waiting)
                })
                .await;
            }
        };
        let mut runs = Vec::new();
        let mut answers = Vec::new();
        for (app, key) in apps.iter().zip(["a", "b", "c"]) {
            answers.push(spawn(app, post(key, "A")));
            runs.push(puppet.next().await);
        }
        answers.push(spawn(&apps[0], post("a", "A")));
        shows(3.0, 1.0).await;
        for run in runs {
            run.answers(201, "done");
        }
        for answer in answers {
            assert_eq!(answer.await.unwrap().status, 201);
        }
        // Nothing happens any more, and yet they are right.
        shows(0.0, 0.0).await;
        // A run that goes on when its layer is gone counts on; then nothing is left.
        let answer = spawn(&apps[2], post("d", "A"));
        let run = puppet.next().await;
        shows(1.0, 0.0).await;
        drop(apps);
        run.answers(201, "done");
        answer.await.unwrap();
        shows(0.0, 0.0).await;
    }
}

#[tokio::test]
async fn the_age_of_the_heartbeat_grows_while_renewing_fails() {
    for world in World::each() {
        let (collected, _alone) = Collected::of_this_thread();
        let store = world.open().await;
        let (router, mut puppet) = Puppet::new();
        let lease = Duration::from_millis(600);
        let app = router.route_layer(layer(&store).lease(lease));
        let age = || collected.gauge(HEARTBEAT_AGE, &[]);
        let answer = spawn(&app, post("a", "A"));
        let run = puppet.next().await;
        called(&store, Operation::Renew, 2).await;
        eventually("an age", || age().is_some_and(|age| age < 0.6)).await;
        store.fail(Operation::Renew, Fault::Before, Times::Always);
        eventually("more than a lease", || age().is_some_and(|age| age > 1.2)).await;
        store.clear();
        eventually("less than a lease", || age().is_some_and(|age| age < 0.6)).await;
        run.answers(201, "done");
        answer.await.unwrap();
        // Idle, there is nothing to be renewed.
        let renewed = store.calls(Operation::Renew);
        store.fail(Operation::Renew, Fault::Before, Times::Always);
        for _ in 0..3 {
            sleep(Duration::from_millis(700)).await;
            assert!(age().is_some_and(|age| age < 0.6), "{:?}", age());
        }
        assert!(store.calls(Operation::Renew) <= renewed + 1);
    }
}

// While they are blocked nothing is shown, so what is shown afterwards has to tell.
#[tokio::test]
async fn blocked_threads_show_in_the_age_of_the_heartbeat_once_they_go_on() {
    let (collected, _alone) = Collected::of_this_thread();
    let store = World::memory().open().await;
    let (router, mut puppet) = Puppet::new();
    let app = router.route_layer(layer(&store).lease(Duration::from_millis(600)));
    let age = || collected.gauge(HEARTBEAT_AGE, &[]).unwrap_or_default();
    let answer = spawn(&app, post("a", "A"));
    let run = puppet.next().await;
    called(&store, Operation::Renew, 2).await;
    for _ in 0..2 {
        eventually("a third of the lease", || age() < 0.5).await;
        std::thread::sleep(Duration::from_millis(1_200));
        eventually("the gap", || age() >= 1.2).await;
    }
    eventually("the end of it", || age() < 0.5).await;
    run.answers(201, "done");
    answer.await.unwrap();
}

// A runtime that ends takes its runs with it, whatever it drops first.
#[test]
fn what_goes_on_is_nothing_once_the_runtime_has_ended() {
    let (collected, _alone) = Collected::of_this_thread();
    let store = FaultyStore::new(AnyStore::new(MemoryStore::new()));
    let wait = InFlight::Wait(Duration::from_secs(30));
    let layer = layer(&store).in_flight(wait).lease(Duration::from_secs(5));
    let runtime = runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let shown = || [RUNNING, WAITING].map(|name| collected.gauge(name, &[]));
    runtime.block_on(async {
        let (router, mut puppet) = Puppet::new();
        let app = router.route_layer(layer.clone());
        // Before the background work has begun, and after that.
        for key in ["a", "b"] {
            spawn(&app, post(key, "A"));
            drop(puppet.next().await.body);
            spawn(&app, post(key, "A"));
        }
        eventually("the runs", || shown() == [Some(2.0); 2]).await;
    });
    drop(runtime);
    assert_eq!(shown(), [Some(0.0); 2]);
    assert_eq!(collected.gauge(HEARTBEAT_AGE, &[]), Some(0.0));
    drop(layer);
}

#[tokio::test(start_paused = true)]
async fn a_recorder_that_is_installed_late_is_told_what_the_metrics_are() {
    let store = FaultyStore::new(AnyStore::new(MemoryStore::new()));
    let app = handler().behind(layer(&store));
    send(&app, post("a", "A")).await;
    sleep(Duration::from_secs(10)).await;
    let (collected, _alone) = Collected::of_this_thread();
    send(&app, post("b", "A")).await;
    sleep(Duration::from_secs(2)).await;
    assert_eq!(collected.counter(REQUESTS, &["status=executed"]), 1);
    assert_eq!(collected.gauge(RUNNING, &[]), Some(0.0));
    assert!(collected.is_described(REQUESTS) && collected.is_described(RUNNING));
}

#[tokio::test]
async fn the_records_of_the_store_are_shown_by_state() {
    for world in World::each() {
        let (collected, _alone) = Collected::of_this_thread();
        let store = world.open().await;
        let (router, mut puppet) = Puppet::new();
        let layer = layer(&store).count_records_every(Duration::from_millis(10));
        let app = router.route_layer(layer).layer(CatchPanicLayer::new());
        // Nothing is counted before the first keyed request.
        let keyless = spawn(&app, request("GET", "/charges", Some("a"), ""));
        puppet.next().await.answers(200, "");
        assert_eq!(keyless.await.unwrap().status, 200);
        assert_eq!(store.total_calls(), 0);
        let shows = |state: &'static str, records: f64| {
            let collected = collected.clone();
            async move {
                let label = format!("state={state}");
                eventually(state, || {
                    collected.gauge(RECORDS, &[&label]) == Some(records)
                })
                .await;
            }
        };
        let running = spawn(&app, post("running", "A"));
        let run = puppet.next().await;
        shows("running", 1.0).await;
        for key in ["done", "done too"] {
            let answer = spawn(&app, post(&key.replace(' ', "-"), "A"));
            puppet.next().await.answers(201, "done");
            answer.await.unwrap();
        }
        shows("completed", 2.0).await;
        let answer = spawn(&app, post("cut", "A"));
        puppet.next().await.panics("as the test wants");
        answer.await.unwrap();
        shows("abandoned", 1.0).await;
        // Released with a checkpoint, the record stays.
        let answer = spawn(&app, post("released", "A"));
        let other = puppet.next().await;
        other.owner().checkpoint("step", &1).await.unwrap();
        other.answers(400, "no");
        answer.await.unwrap();
        shows("released", 1.0).await;
        shows("running", 1.0).await;
        run.answers(201, "done");
        running.await.unwrap();
        shows("running", 0.0).await;
        shows("completed", 3.0).await;
    }
}

// A count reads the whole table.
#[tokio::test(start_paused = true)]
async fn counting_takes_a_tenth_of_the_time_at_most() {
    let (_collected, _alone) = Collected::of_this_thread();
    let store = FaultyStore::new(AnyStore::new(MemoryStore::new()));
    let slow = Fault::DelayBefore(Duration::from_secs(1));
    store.fail(Operation::Counts, slow, Times::Always);
    let app = handler().behind(layer(&store).count_records_every(Duration::from_millis(1)));
    send(&app, post("a", "A")).await;
    sleep(Duration::from_secs(100)).await;
    let counts = store.calls(Operation::Counts);
    assert!((9..=11).contains(&counts), "{counts} seconds of 100");
    // Where it takes no time, it is as often as is wanted.
    let store = FaultyStore::new(AnyStore::new(MemoryStore::new()));
    let app = handler().behind(layer(&store));
    send(&app, post("a", "A")).await;
    sleep(Duration::from_secs(600)).await;
    let counts = store.calls(Operation::Counts);
    assert!(
        (10..=21).contains(&counts),
        "{counts} counts in ten minutes"
    );
    // Or never.
    let store = FaultyStore::new(AnyStore::new(MemoryStore::new()));
    let app = handler().behind(layer(&store).count_records_every(Duration::MAX));
    send(&app, post("a", "A")).await;
    sleep(Duration::from_secs(600)).await;
    assert_eq!(store.calls(Operation::Counts), 0);
}

// Clones share the background work, and each of them may have begun it.
#[tokio::test(start_paused = true)]
async fn records_are_counted_as_often_as_any_of_the_clones_wants_it() {
    let (_collected, _alone) = Collected::of_this_thread();
    let store = FaultyStore::new(AnyStore::new(MemoryStore::new()));
    let never = layer(&store).count_records_every(Duration::MAX);
    let often = never.clone().count_records_every(Duration::from_secs(1));
    let never = handler().behind(never);
    send(&never, post("a", "A")).await;
    sleep(Duration::from_secs(60)).await;
    assert_eq!(store.calls(Operation::Counts), 0);
    let often = handler().behind(often);
    send(&often, post("b", "A")).await;
    sleep(Duration::from_secs(60)).await;
    let counts = store.calls(Operation::Counts);
    assert!((55..=125).contains(&counts), "{counts} counts in a minute");
}

// Drained and closed, as the operations chapter has it; the process lives on.
#[tokio::test]
async fn a_store_that_was_closed_is_no_trouble() {
    for world in World::each() {
        let (collected, _alone) = Collected::of_this_thread();
        let (logs, _guard) = Logs::of_this_thread();
        let store = world.open().await;
        let layer = layer(&store)
            .ttl(Duration::from_secs(5))
            .count_records_every(Duration::from_millis(50));
        let app = handler().behind(layer.clone());
        send(&app, post("a", "A")).await;
        called(&store, Operation::Counts, 1).await;
        layer.drain(Duration::from_secs(1)).await;
        store.close().await.unwrap();
        let before = store.calls(Operation::Purge);
        called(&store, Operation::Purge, before + 1).await;
        // Once each of them has heard of it, nobody asks any more.
        let asked = || [Operation::Purge, Operation::Counts].map(|of| store.calls(of));
        let heard = asked();
        sleep(Duration::from_millis(1_500)).await;
        assert_eq!(asked(), heard);
        assert_eq!(collected.counter(STORE_ERRORS, &[]), 0);
        assert!(logs.loud("").is_empty(), "{:?}", logs.loud(""));
    }
}

#[tokio::test]
async fn what_was_resolved_is_counted_by_whoever_asked() {
    for world in World::each() {
        let (collected, _alone) = Collected::of_this_thread();
        let (logs, _guard) = Logs::of_this_thread();
        let store = world.open().await;
        let layer = layer(&store).resolver(|abandoned: Abandoned| async move {
            match abandoned.key().and_then(|key| key.as_str()) {
                Some("answer" | "swept") => Verdict::answer((StatusCode::CREATED, "found")),
                Some("not") => Verdict::DidNotHappen,
                Some("panic") => panic!("as the test wants"),
                _ => Verdict::Leave,
            }
        });
        let keys = ["answer", "not", "panic", "leave", "swept", "by-hand"];
        let app = Handler::answering(|seen| match seen.run {
            ..=6 => panic!("as the test wants"),
            _ => Response::builder().status(201).body(Body::empty()).unwrap(),
        })
        .behind(layer.clone())
        .layer(CatchPanicLayer::new());
        for key in keys {
            send(&app, post(key, "A")).await;
        }
        assert_eq!(
            collected.by_label(ABANDONED),
            [("panicked".to_owned(), 6)].into()
        );
        for (key, status) in [
            ("answer", 201),
            ("not", 201),
            ("panic", 409),
            ("leave", 409),
        ] {
            assert_eq!(send(&app, post(key, "A")).await.status, status, "{key}");
        }
        let reconciler = layer.reconciler();
        let by_hand = record(&store, "by-hand").await.unwrap();
        let _ = reconciler
            .resolve(&by_hand, Verdict::DidNotHappen)
            .await
            .unwrap();
        let late = reconciler.resolve(&by_hand, Verdict::DidNotHappen).await;
        assert_eq!(late.unwrap(), tower_idempotency::Resolved::Lost);
        assert_eq!(reconciler.sweep().await.answered, 1);
        for (by, verdict, times) in [
            ("request", "answered", 1),
            ("request", "did_not_happen", 1),
            ("request", "panicked", 1),
            ("request", "left", 1),
            ("operator", "did_not_happen", 1),
            ("operator", "lost", 1),
            ("sweep", "answered", 1),
        ] {
            let labels = [&*format!("by={by}"), &*format!("verdict={verdict}")];
            let counted = collected.counter(RESOLVED, &labels);
            assert_eq!(counted, times, "{by} {verdict}");
        }
        // One event for each.
        let all = logs.all();
        let said = all.iter().filter(|event| event.text.contains("resolved"));
        let counted = collected.counter(RESOLVED, &[]);
        assert_eq!(u64::try_from(said.count()).unwrap(), counted);
    }
}

#[tokio::test]
async fn a_handler_that_gives_its_outcome_up_is_counted() {
    for world in World::each() {
        let (collected, _alone) = Collected::of_this_thread();
        let store = world.open().await;
        let app = Handler::answering(|_| {
            let response = Response::builder().status(500).extension(Retain::Abandon);
            response.body(Body::empty()).unwrap()
        })
        .behind(layer(&store));
        assert_eq!(send(&app, post("a", "A")).await.status, 500);
        let counted = collected.by_label(ABANDONED);
        assert_eq!(counted, [("gave_up".to_owned(), 1)].into());
        assert_eq!(state(&store, "a").await, Some(State::Abandoned));
    }
}

// O2: the claim of unknown fate is the background's, until there is no more time.
#[tokio::test]
async fn a_claim_left_behind_that_cannot_be_settled_at_the_end_is_said_and_counted() {
    for world in World::each() {
        let (collected, _alone) = Collected::of_this_thread();
        let (logs, _guard) = Logs::of_this_thread();
        let store = world.open().await;
        let layer = layer(&store).store_timeout(Duration::from_millis(300));
        let app = handler().behind(layer.clone());
        store.fail(Operation::Claim, Fault::HangAfter, Times::Once);
        store.fail(Operation::Release, Fault::Before, Times::Always);
        assert_eq!(send(&app, post("a", "A")).await.status, 503);
        called(&store, Operation::Release, 2).await;
        assert_eq!(collected.counter(FAILED, &[]), 0);
        layer.drain(Duration::ZERO).await;
        let said = logs.loud("idempotency record not written; the outcome");
        assert_eq!(said.len(), 1);
        assert!(said[0].text.contains("operation=\"release\""));
        assert_eq!(collected.counter(FAILED, &[]), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn nothing_is_counted_where_nobody_looks() {
    let store = FaultyStore::new(AnyStore::new(MemoryStore::new()));
    let app = handler().behind(layer(&store).count_records_every(Duration::from_millis(1)));
    send(&app, post("a", "A")).await;
    sleep(Duration::from_secs(10)).await;
    assert_eq!(store.calls(Operation::Counts), 0);
    let (_collected, _alone) = Collected::of_this_thread();
    called(&store, Operation::Counts, 1).await;
}

#[test]
#[should_panic(expected = "count_records_every must be longer than zero")]
fn counting_without_a_pause_is_refused() {
    let _ = IdempotencyLayer::new(MemoryStore::new()).count_records_every(Duration::ZERO);
}

// After a crash and a restart there may be no request for a while.
#[tokio::test]
async fn a_running_reconciler_shows_what_is_abandoned_before_any_request() {
    for world in World::each() {
        let (collected, _alone) = Collected::of_this_thread();
        let store = world.open().await;
        let id = RecordId::new(Scope::shared(), IdempotencyKey::new("k"));
        let claim = ClaimRequest::new(id, "exact-v1", Fingerprint::of(["A"]));
        let Claim::Won(ticket) = store.claim(claim).await.unwrap() else {
            panic!("a fresh key was not won");
        };
        assert_eq!(store.abandon(&ticket).await.unwrap(), Settled::Done);

        let layer = layer(&store);
        let sweeping = tokio::spawn(layer.reconciler().run());
        let abandoned = || collected.gauge(RECORDS, &["state=abandoned"]);
        eventually("the record", || abandoned() == Some(1.0)).await;
        layer.drain(Duration::from_secs(1)).await;
        sweeping.await.unwrap();
    }
}

//! A run does not depend on its caller, nor on anybody who polls it.

mod support;

use std::{
    future::Future,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    task::{Context, Poll, Waker},
    thread,
    time::{Duration, Instant},
};

use axum::{
    Router,
    body::Body,
    extract::Request,
    http::{Response, StatusCode},
    middleware::{Next, from_fn},
    routing::any,
};
use bytes::Bytes;
use http_body_util::channel::Channel;
use support::{
    logs::Logs,
    puppet::Puppet,
    wire::{Reply, Server, raw_post},
    *,
};
use tokio::{
    net::TcpStream,
    runtime::Runtime,
    sync::Semaphore,
    task::{JoinHandle, JoinSet},
    time::{sleep, timeout},
};
use tower::{BoxError, Layer, Service, ServiceExt};
use tower_http::{timeout::TimeoutLayer, trace::TraceLayer};
use tower_idempotency::{
    IdempotencyLayer, InFlight, Recovery, State,
    testing::{Fault, Operation, Times},
};

const IN_FLIGHT: &str = "idempotency_in_flight";
const UNKNOWN: &str = "idempotency_outcome_unknown";
const OVERLOADED: &str = "idempotency_overloaded";
const LEASE: Duration = Duration::from_secs(30);

fn layer(store: &TestStore) -> IdempotencyLayer<TestStore> {
    IdempotencyLayer::new(store.clone()).single_tenant()
}

fn spawn(app: &Router, request: Request) -> JoinHandle<Answer> {
    let app = app.clone();
    tokio::spawn(async move { send(&app, request).await })
}

async fn state(store: &TestStore, key: &str) -> Option<State> {
    record(store, key).await.map(|record| record.state)
}

/// Waits for at most a second until the record is in this state.
async fn within_a_second(store: &TestStore, key: &str, expected: Option<State>) {
    let begun = Instant::now();
    while state(store, key).await != expected {
        let now = state(store, key).await;
        assert!(
            begun.elapsed() < Duration::from_secs(1),
            "{key}: {now:?}, not {expected:?}"
        );
        sleep(Duration::from_millis(2)).await;
    }
}

/// Counts the response futures that were dropped before they answered.
#[derive(Clone, Default)]
struct Hangups(Arc<AtomicUsize>);

impl Hangups {
    fn around(&self, app: Router) -> Router {
        let hangups = self.clone();
        app.layer(from_fn(move |request: Request, next: Next| {
            let mut unanswered = Unanswered(Some(hangups.0.clone()));
            async move {
                let response = next.run(request).await;
                unanswered.answered();
                response
            }
        }))
    }

    async fn noticed(&self, count: usize) {
        eventually("the server to notice", || {
            self.0.load(Ordering::SeqCst) >= count
        })
        .await;
    }
}

struct Unanswered(Option<Arc<AtomicUsize>>);

impl Unanswered {
    fn answered(&mut self) {
        self.0 = None;
    }
}

impl Drop for Unanswered {
    fn drop(&mut self) {
        if let Some(count) = self.0.take() {
            count.fetch_add(1, Ordering::SeqCst);
        }
    }
}

every_store! {
    // D1
    async fn a_client_that_resets_after_the_effect_finds_its_answer_recorded(world: World) {
        let (handler, hangups) = (Handler::new(), Hangups::default());
        let store = world.open().await;
        let server = Server::start(hangups.around(handler.behind(layer(&store)))).await;
        handler.close_gate();
        let mut wire = server.connect().await;
        wire.write(&raw_post("k", "A")).await;
        handler.reached(1).await;
        wire.reset();
        hangups.noticed(1).await;
        assert_eq!(state(&store, "k").await, Some(State::Running));
        assert_eq!(server.exchange(&raw_post("k", "A")).await.said(), (409, IN_FLIGHT.to_owned()));
        handler.open_gate();
        within_a_second(&store, "k", Some(State::Completed)).await;
        let retry = server.exchange(&raw_post("k", "A")).await;
        assert!(retry.is_replay(), "{retry:?}");
        assert_eq!((retry.status, &retry.body[..]), (201, &b"{\"charge\":1}"[..]));
        assert_eq!(handler.effects(), 1);
    }

    // D1 (a)
    async fn a_client_that_resets_during_the_claim_leaves_all_or_nothing(world: World) {
        let slow = Duration::from_millis(200);
        let faults = [
            Fault::DelayBefore(slow), Fault::DelayAfter(slow), Fault::HangBefore, Fault::HangAfter,
            Fault::Before, Fault::After,
        ];
        for (number, fault) in faults.into_iter().enumerate() {
            let key = format!("k-{number}");
            let (handler, hangups) = (Handler::new(), Hangups::default());
            let store = world.open().await;
            let layer = layer(&store).store_timeout(Duration::from_millis(500));
            let server = Server::start(hangups.around(handler.behind(layer))).await;
            store.fail(Operation::Claim, fault, Times::Once);
            if matches!(fault, Fault::Before | Fault::After) {
                // The client leaves while it is sent again.
                store.fail(Operation::Claim, Fault::DelayAfter(slow), Times::Once);
            }
            let mut wire = server.connect().await;
            wire.write(&raw_post(&key, "A")).await;
            called(&store, Operation::Claim, 1).await;
            wire.reset();
            hangups.noticed(1).await;

            // Either it never ran and the key is free, or it ran once and is stored.
            let begun = Instant::now();
            loop {
                let calls = store.calls(Operation::Release) + store.calls(Operation::Complete);
                match (state(&store, &key).await, handler.effects()) {
                    (None, 0) if calls > 0 => break,
                    (Some(State::Completed), 1) => break,
                    other => assert!(begun.elapsed() < Duration::from_secs(3), "{fault:?}: {other:?}"),
                }
                sleep(Duration::from_millis(2)).await;
            }
            let retry = server.exchange(&raw_post(&key, "A")).await;
            assert_eq!((retry.status, handler.effects()), (201, 1), "{fault:?}");
            let again = server.exchange(&raw_post(&key, "A")).await;
            assert!(again.is_replay());
            assert_eq!((again.body, handler.effects()), (retry.body, 1), "{fault:?}");
        }
    }

    // D1 (b)
    async fn a_client_that_resets_before_the_handler_is_polled_gets_one_run(world: World) {
        let (handler, hangups) = (Handler::new(), Hangups::default());
        let store = world.open().await;
        let (at_the_door, door) = (Arc::new(AtomicUsize::new(0)), Arc::new(Semaphore::new(0)));
        let hold = {
            let (at_the_door, door) = (at_the_door.clone(), door.clone());
            from_fn(move |request: Request, next: Next| {
                let (at_the_door, door) = (at_the_door.clone(), door.clone());
                async move {
                    at_the_door.fetch_add(1, Ordering::SeqCst);
                    door.acquire().await.unwrap().forget();
                    next.run(request).await
                }
            })
        };
        let app = handler.router().layer(hold).layer(layer(&store));
        let server = Server::start(hangups.around(app)).await;
        let mut wire = server.connect().await;
        wire.write(&raw_post("k", "A")).await;
        eventually("the claim to be won", || at_the_door.load(Ordering::SeqCst) == 1).await;
        wire.reset();
        hangups.noticed(1).await;
        assert_eq!(handler.effects(), 0);
        door.add_permits(9);
        within_a_second(&store, "k", Some(State::Completed)).await;
        assert!(server.exchange(&raw_post("k", "A")).await.is_replay());
        assert_eq!(handler.effects(), 1);
    }

    // D1 (c)
    async fn a_client_that_resets_during_the_recording_finds_it_done(world: World) {
        let slow = Duration::from_millis(200);
        for (fault, key) in [
            (Fault::DelayBefore(slow), "k-1"), (Fault::DelayAfter(slow), "k-2"),
            (Fault::Before, "k-3"), (Fault::After, "k-4"),
        ] {
            let (handler, hangups) = (Handler::new(), Hangups::default());
            let store = world.open().await;
            let server = Server::start(hangups.around(handler.behind(layer(&store)))).await;
            store.fail(Operation::Complete, fault, Times::Once);
            store.fail(Operation::Complete, Fault::DelayBefore(slow), Times::Once);
            let mut wire = server.connect().await;
            wire.write(&raw_post(key, "A")).await;
            called(&store, Operation::Complete, 1).await;
            wire.reset();
            hangups.noticed(1).await;
            within_a_second(&store, key, Some(State::Completed)).await;
            let retry = server.exchange(&raw_post(key, "A")).await;
            assert!(retry.is_replay(), "{fault:?}: {retry:?}");
            assert_eq!(handler.effects(), 1);
        }
    }

    // D1 (d)
    async fn a_client_that_resets_while_it_is_answered_finds_the_whole_answer(world: World) {
        let body = Bytes::from(vec![b'x'; 1024 * 1024]);
        let handler = Handler::answering({
            let body = body.clone();
            move |_| Response::builder().status(201).body(Body::from(body.clone())).unwrap()
        });
        let store = world.open().await;
        let server = Server::start(handler.behind(layer(&store))).await;
        let mut wire = server.connect().await;
        wire.write(&raw_post("k", "A")).await;
        assert!(!wire.read_some(1000).await.is_empty());
        // Not within a second but already now.
        assert_eq!(state(&store, "k").await, Some(State::Completed));
        wire.reset();
        let retry = server.exchange(&raw_post("k", "A")).await;
        assert!(retry.is_replay());
        assert!(retry.body == body, "{} bytes", retry.body.len());
        assert_eq!(handler.effects(), 1);
    }

    // D1 (d), for what is too long to be kept.
    async fn a_client_that_resets_during_a_stream_leaves_a_tombstone(world: World) {
        let (router, mut puppet) = Puppet::new();
        let store = world.open().await;
        let server = Server::start(router.route_layer(layer(&store))).await;
        let mut wire = server.connect().await;
        wire.write(&raw_post("k", "A")).await;
        let (mut sender, body) = Channel::<Bytes, BoxError>::new(1);
        let stream = Response::builder().header("content-type", "text/event-stream");
        puppet.next().await.answers_with(stream.body(Body::new(body)).unwrap());
        sender.send_data(Bytes::from("data: 1\n\n")).await.unwrap();
        assert!(!wire.read_some(1000).await.is_empty());
        assert_eq!(state(&store, "k").await, Some(State::Completed));
        wire.reset();
        let hung_up = async { while sender.send_data(Bytes::from("data: n\n\n")).await.is_ok() {} };
        timeout(Duration::from_secs(5), hung_up).await.expect("the stream is not ended");
        let retry = server.exchange(&raw_post("k", "A")).await;
        assert_eq!(retry.said(), (409, "idempotency_response_not_retained".to_owned()));
        assert_eq!(puppet.begun(), 1);
    }

    // D1 (e)
    async fn an_http_2_stream_that_is_reset_is_a_client_that_left(world: World) {
        let (handler, hangups) = (Handler::new(), Hangups::default());
        let store = world.open().await;
        let server = Server::start(hangups.around(handler.behind(layer(&store)))).await;
        let tcp = TcpStream::connect(server.address).await.unwrap();
        let (mut client, connection) = h2::client::handshake(tcp).await.unwrap();
        tokio::spawn(connection);
        let mut ask = || {
            let request = Request::post("http://test/charges")
                .header("content-type", "application/json")
                .header("idempotency-key", "k");
            let (answer, mut body) = client.send_request(request.body(()).unwrap(), false).unwrap();
            body.send_data(Bytes::from("A"), true).unwrap();
            (answer, body)
        };
        handler.close_gate();
        let (answer, mut stream) = ask();
        handler.reached(1).await;
        stream.send_reset(h2::Reason::CANCEL);
        drop(answer);
        hangups.noticed(1).await;
        assert_eq!(ask().0.await.unwrap().status(), 409);
        handler.open_gate();
        within_a_second(&store, "k", Some(State::Completed)).await;
        let retry = ask().0.await.unwrap();
        assert_eq!(retry.status(), 201);
        assert_eq!(retry.headers()["idempotent-replay"], "true");
        let body = retry.into_body().data().await.unwrap().unwrap();
        assert_eq!(body, "{\"charge\":1}");
        assert_eq!(handler.effects(), 1);
    }

    // D1 (f)
    async fn a_client_that_half_closes_after_its_request_gets_one_run(world: World) {
        let (handler, hangups) = (Handler::new(), Hangups::default());
        let store = world.open().await;
        let server = Server::start(hangups.around(handler.behind(layer(&store)))).await;
        handler.close_gate();
        let mut wire = server.connect().await;
        wire.write(&raw_post("k", "A")).await;
        handler.reached(1).await;
        wire.half_close().await;
        // The server may take this for a client that left, or not.
        sleep(Duration::from_millis(50)).await;
        handler.open_gate();
        let reply = wire.read_reply().await;
        assert!([0, 201].contains(&reply.status), "{reply:?}");
        assert!(!reply.is_replay());
        within_a_second(&store, "k", Some(State::Completed)).await;
        assert!(server.exchange(&raw_post("k", "A")).await.is_replay());
        assert_eq!(handler.effects(), 1);
    }

    // D1: before there is a claim there is nothing to go on with.
    async fn a_client_that_resets_within_its_body_leaves_nothing(world: World) {
        let (handler, hangups) = (Handler::new(), Hangups::default());
        let store = world.open().await;
        let server = Server::start(hangups.around(handler.behind(layer(&store)))).await;
        let mut wire = server.connect().await;
        let request = raw_post("k", "a longer body");
        wire.write(&request[..request.len() - 5]).await;
        sleep(Duration::from_millis(50)).await;
        wire.reset();
        // Refused or dropped, as hyper sees it; what comes next on the key runs.
        let reply = server.exchange(&raw_post("k", "a longer body")).await;
        assert_eq!((reply.status, reply.is_replay()), (201, false));
        assert_eq!((handler.effects(), store.calls(Operation::Claim)), (1, 1));
    }

    // D1, M4
    async fn under_a_timeout_layer_the_retry_gets_the_real_result(world: World) {
        let handler = Handler::new();
        let store = world.open().await;
        let limit = TimeoutLayer::with_status_code(StatusCode::GATEWAY_TIMEOUT, Duration::from_millis(100));
        let server = Server::start(handler.behind(layer(&store)).layer(limit)).await;
        handler.close_gate();
        let late = server.exchange(&raw_post("k", "A")).await;
        assert_eq!((late.status, handler.effects()), (504, 1));
        assert_eq!(server.exchange(&raw_post("k", "A")).await.said(), (409, IN_FLIGHT.to_owned()));
        handler.open_gate();
        within_a_second(&store, "k", Some(State::Completed)).await;
        let retry = server.exchange(&raw_post("k", "A")).await;
        assert!(retry.is_replay());
        assert_eq!((retry.status, handler.effects()), (201, 1));
    }

    // D1
    async fn a_detached_run_keeps_the_span_of_its_request(world: World) {
        let logs = Logs::everywhere();
        let handler = Handler::answering(|_| {
            tracing::info!(target: "test", "after the gate");
            Response::builder().status(201).body(Body::empty()).unwrap()
        });
        let hangups = Hangups::default();
        let store = world.open().await;
        let (test, in_test) = (tracing::info_span!("test"), tracing::info_span!("other"));
        let parent = test.clone();
        let trace = TraceLayer::new_for_http()
            .make_span_with(move |_: &Request| tracing::info_span!(parent: &parent, "the request"));
        let app = hangups.around(handler.behind(layer(&store)).layer(trace));
        let server = Server::start(app).await;
        handler.close_gate();
        let mut wire = server.connect().await;
        wire.write(&raw_post("k", "A")).await;
        handler.reached(1).await;
        wire.reset();
        hangups.noticed(1).await;
        let _elsewhere = in_test.enter();
        handler.open_gate();
        within_a_second(&store, "k", Some(State::Completed)).await;
        // What is decided is said once it is recorded, and nobody waits for this run's answer.
        let mut said = None;
        for _ in 0..100 {
            let logged = logs.within(&test);
            let of = |text: &str| logged.iter().find(|event| event.text.contains(text)).cloned();
            said = of("after the gate").zip(of("executed"));
            if said.is_some() {
                break;
            }
            sleep(Duration::from_millis(10)).await;
        }
        let (after, decided) = said.expect("not in the span of its test");
        assert_eq!(after.spans, ["idempotency", "the request", "test"]);
        assert_eq!(decided.spans, ["idempotency", "the request", "test"]);
    }

    // D1
    async fn a_detached_run_is_counted_by_drain(world: World) {
        let (handler, hangups) = (Handler::new(), Hangups::default());
        let store = world.open().await;
        let layer = layer(&store);
        let server = Server::start(hangups.around(handler.behind(layer.clone()))).await;
        handler.close_gate();
        let mut wire = server.connect().await;
        wire.write(&raw_post("k", "A")).await;
        handler.reached(1).await;
        wire.reset();
        hangups.noticed(1).await;
        let drain = tokio::spawn(async move { layer.drain(Duration::from_secs(10)).await });
        sleep(Duration::from_millis(50)).await;
        assert!(!drain.is_finished());
        handler.open_gate();
        let drained = drain.await.unwrap();
        assert_eq!((drained.aborted, drained.left), (0, 0));
        // Not within a second but by then.
        assert_eq!(state(&store, "k").await, Some(State::Completed));
    }

    // D1
    async fn two_thousand_clients_that_reset_are_bounded_by_max_running(world: World) {
        const LIMIT: usize = 50;
        const CLIENTS: usize = 2_000;
        let (handler, hangups) = (Handler::new(), Hangups::default());
        let store = world.open().await;
        let layer = layer(&store).max_running(LIMIT);
        let app = hangups.around(handler.behind(layer.clone()));
        let server = Arc::new(Server::start(app).await);
        handler.close_gate();
        let mut held = Vec::new();
        for number in 0..LIMIT {
            let mut wire = server.connect().await;
            wire.write(&raw_post(&format!("k-{number}"), "A")).await;
            held.push(wire);
        }
        handler.reached(LIMIT).await;
        held.into_iter().for_each(wire::Wire::reset);
        hangups.noticed(LIMIT).await;

        let mut clients = JoinSet::new();
        for client in 0..20 {
            let server = server.clone();
            clients.spawn(async move {
                for number in (LIMIT..CLIENTS).filter(|number| number % 20 == client) {
                    let mut wire = server.connect().await;
                    wire.write(&raw_post(&format!("k-{number}"), "A")).await;
                    let reply = wire.read_reply().await;
                    assert_eq!(reply.said(), (503, OVERLOADED.to_owned()));
                    assert_eq!(reply.header("retry-after"), Some(&b"1"[..]));
                    wire.reset();
                }
            });
        }
        clients.join_all().await;
        assert_eq!((handler.effects(), store.calls(Operation::Claim)), (LIMIT, LIMIT));

        // The runs end, and their places are free again.
        handler.open_gate();
        let claimed = eventually_admitted(&server).await;
        assert_eq!(claimed.status, 201);
        for number in 0..LIMIT {
            within_a_second(&store, &format!("k-{number}"), Some(State::Completed)).await;
        }
        assert_eq!(handler.effects(), LIMIT + 1);
    }

    // D1: the same without a gate, with clients that leave at any time.
    async fn runs_that_nobody_waits_for_are_never_more_than_max_running(world: World) {
        const LIMIT: usize = 10;
        let running = Arc::new(AtomicUsize::new(0));
        let most = Arc::new(AtomicUsize::new(0));
        let handler = {
            let (running, most) = (running.clone(), most.clone());
            move || {
                let (running, most) = (running.clone(), most.clone());
                async move {
                    most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    sleep(Duration::from_millis(20)).await;
                    running.fetch_sub(1, Ordering::SeqCst);
                    StatusCode::CREATED
                }
            }
        };
        let store = world.open().await;
        let layer = layer(&store).max_running(LIMIT);
        let app = Router::new().route("/charges", any(handler)).route_layer(layer.clone());
        let server = Arc::new(Server::start(app).await);
        let mut clients = JoinSet::new();
        for client in 0..20 {
            let server = server.clone();
            clients.spawn(async move {
                for number in 0..15 {
                    let mut wire = server.connect().await;
                    wire.write(&raw_post(&format!("k-{client}-{number}"), "A")).await;
                    if number % 3 == 0 {
                        // Not all of them leave, or on a slow disk none is there when its turn comes.
                        let status = wire.read_reply().await.status;
                        assert!([201, 503].contains(&status), "{status}");
                        continue;
                    }
                    sleep(Duration::from_millis(rand::random::<u64>() % 10)).await;
                    wire.reset();
                }
            });
        }
        clients.join_all().await;
        let most = most.load(Ordering::SeqCst);
        assert!((1..=LIMIT).contains(&most), "{most} at once");
        let drained = layer.drain(Duration::from_secs(5)).await;
        assert_eq!((drained.aborted, drained.left), (0, 0));
        assert_eq!(running.load(Ordering::SeqCst), 0, "a run was cut off");
    }

    // D3
    async fn a_client_that_retries_over_its_own_run_gets_409s_and_then_the_replay(world: World) {
        let runs = Arc::new(AtomicUsize::new(0));
        let handler = {
            let runs = runs.clone();
            move || {
                let runs = runs.clone();
                async move {
                    let run = runs.fetch_add(1, Ordering::SeqCst) + 1;
                    sleep(Duration::from_secs(1)).await;
                    (StatusCode::CREATED, format!("run {run}"))
                }
            }
        };
        let store = world.open().await;
        // Two places: one for the run, one to claim. Were every attempt counted as running, the
        // third would be refused.
        let layer = layer(&store).max_running(2);
        let app = Router::new().route("/charges", any(handler)).route_layer(layer);
        let server = Server::start(app).await;
        let mut replies: Vec<Option<Reply>> = Vec::new();
        for _ in 0..50 {
            let mut wire = server.connect().await;
            wire.write(&raw_post("k", "A")).await;
            let patience = Duration::from_millis(100);
            let reply = timeout(patience, wire.read_reply()).await.ok();
            wire.reset();
            let done = reply.as_ref().is_some_and(|reply| reply.status == 201);
            if reply.is_some() {
                sleep(patience).await;
            }
            replies.push(reply);
            if done {
                break;
            }
        }
        let last = replies.pop().unwrap().unwrap();
        assert!(last.is_replay());
        assert_eq!((&last.body[..], runs.load(Ordering::SeqCst)), (&b"run 1"[..], 1));
        assert!(replies[0].is_none(), "{:?}", replies[0]);
        assert!(replies.len() >= 5, "{} attempts", replies.len());
        // On a busy machine a duplicate's answer may come too late as well.
        let refused: Vec<_> = replies.into_iter().flatten().collect();
        assert!(refused.len() >= 3, "{} duplicates were answered", refused.len());
        for reply in refused {
            assert_eq!(reply.said(), (409, IN_FLIGHT.to_owned()));
        }
    }

    // Y1
    async fn a_future_dropped_by_a_panic_goes_on_as_a_run_of_its_own(world: World) {
        let store = world.open().await;
        let (router, mut puppet) = Puppet::new();
        let app = router.route_layer(layer(&store));
        for (key, within_runtime) in [("k-1", true), ("k-2", false)] {
            let mut future = Box::pin(app.clone().oneshot(post(key, "A")));
            let run = poll_until_it_runs(&mut future, &mut puppet).await;
            let unwind = move || {
                let panicked = catch_unwind(AssertUnwindSafe(move || {
                    let _dropped_while_unwinding = future;
                    panic!("as asked");
                }));
                assert_eq!(panicked.unwrap_err().downcast_ref::<&str>(), Some(&"as asked"));
            };
            if within_runtime {
                unwind();
            } else {
                thread::spawn(unwind).join().unwrap();
            }
            assert!(!run.is_dropped(), "the run was cut off");
            assert_eq!(send(&app, post(key, "A")).await.code(), IN_FLIGHT);
            run.answers(201, "done");
            within_a_second(&store, key, Some(State::Completed)).await;
            assert!(send(&app, post(key, "A")).await.replay);
        }
        assert_eq!(puppet.begun(), 2);
    }

    // Y1
    async fn a_future_dropped_outside_of_any_runtime_goes_on(world: World) {
        let store = world.open().await;
        let (router, mut puppet) = Puppet::new();
        let app = router.route_layer(layer(&store));
        let mut future = Box::pin(app.clone().oneshot(post("k", "A")));
        let run = poll_until_it_runs(&mut future, &mut puppet).await;
        thread::spawn(move || drop(future)).join().unwrap();
        run.answers(201, "done");
        within_a_second(&store, "k", Some(State::Completed)).await;
        assert!(send(&app, post("k", "A")).await.replay);
        assert_eq!(puppet.begun(), 1);
    }

    // Y1
    async fn a_future_never_polled_leaves_nothing(world: World) {
        let store = world.open().await;
        let handler = Handler::new();
        let mut service = layer(&store).layer(handler.router());
        let ready = std::future::poll_fn(|cx| Service::<Request>::poll_ready(&mut service, cx));
        ready.await.unwrap();
        drop(service.call(post("k", "A")));
        thread::spawn({
            let unpolled = service.call(post("k", "A"));
            move || drop(unpolled)
        }).join().unwrap();
        sleep(Duration::from_millis(20)).await;
        assert_eq!((handler.effects(), store.calls(Operation::Claim)), (0, 0));
    }

    // Y1: what a panic has left half done is not polled again.
    async fn a_future_that_panicked_is_not_gone_on_with(world: World) {
        let store = world.open().await;
        let polls = Arc::new(AtomicUsize::new(0));
        let panicking = {
            let polls = polls.clone();
            tower::service_fn(move |_: Request| {
                let polls = polls.clone();
                std::future::poll_fn(move |_| -> Poll<Result<Response<Body>, BoxError>> {
                    polls.fetch_add(1, Ordering::SeqCst);
                    panic!("as asked")
                })
            })
        };
        let service = layer(&store).layer(panicking);
        let answer = tokio::spawn(service.oneshot(post("k", "A"))).await;
        assert!(answer.unwrap_err().is_panic());
        // And one that panics in the layer's own hands, before any claim and after.
        let scoped = IdempotencyLayer::new(store.clone()).scope(|_| panic!("as asked"));
        let mut future = Box::pin(Handler::new().behind(scoped).oneshot(post("k-2", "A")));
        let polled = catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(&mut noop())));
        assert!(polled.is_err());
        drop(future);
        sleep(Duration::from_millis(20)).await;
        assert_eq!(polls.load(Ordering::SeqCst), 1);
        assert_eq!(state(&store, "k").await, Some(State::Abandoned));
        assert_eq!(state(&store, "k-2").await, None);
    }

    // drain
    async fn drain_stops_admitting_and_waits_for_the_runs(world: World) {
        let store = world.open().await;
        let (router, mut puppet) = Puppet::new();
        let layer = layer(&store);
        let app = router.route_layer(layer.clone());
        let done = spawn(&app, post("done", "A"));
        puppet.next().await.answers(201, "done");
        assert_eq!(done.await.unwrap().status, 201);
        let running = spawn(&app, post("k", "A"));
        let run = puppet.next().await;
        let mut drain = Box::pin(layer.drain(Duration::from_secs(10)));
        assert!(futures_poll(&mut drain).is_pending());
        let claims = store.calls(Operation::Claim);
        for key in ["new", "k", "done"] {
            let refused = send(&app, post(key, "A")).await;
            assert_eq!(refused.said(), (503, OVERLOADED.to_owned()));
            assert_eq!(refused.header("retry-after"), Some("1"));
        }
        assert_eq!(store.calls(Operation::Claim), claims);
        let keyless = spawn(&app, request("PATCH", "/charges", None, "A"));
        puppet.next().await.answers(200, "no key, no matter");
        assert_eq!(keyless.await.unwrap().status, 200);
        assert!(futures_poll(&mut drain).is_pending());
        run.answers(201, "done");
        assert_eq!(running.await.unwrap().status, 201);
        let drained = drain.await;
        assert_eq!((drained.aborted, drained.left), (0, 0));
        assert_eq!(state(&store, "k").await, Some(State::Completed));
    }

    // drain
    async fn drain_drops_a_handler_before_its_record_says_abandoned(world: World) {
        let store = world.open().await;
        let seen = Arc::new(AtomicUsize::new(usize::MAX));
        let begun = Arc::new(AtomicUsize::new(0));
        let handler = {
            let (store, seen, begun) = (store.clone(), seen.clone(), begun.clone());
            move || {
                let guard = Looks { store: store.clone(), seen: seen.clone() };
                let begun = begun.clone();
                async move {
                    let _guard = guard;
                    begun.fetch_add(1, Ordering::SeqCst);
                    std::future::pending::<StatusCode>().await
                }
            }
        };
        let layer = layer(&store).lease(LEASE);
        let app = Router::new().route("/charges", any(handler)).route_layer(layer.clone());
        let running = spawn(&app, post("k", "A"));
        eventually("the run to begin", || begun.load(Ordering::SeqCst) == 1).await;
        assert_eq!(seen.load(Ordering::SeqCst), usize::MAX);
        let drained = layer.drain(Duration::from_millis(20)).await;
        assert_eq!((drained.aborted, drained.left), (1, 0));
        assert_eq!(seen.load(Ordering::SeqCst), 0, "abandoned while the handler was alive");
        assert_eq!((store.calls(Operation::Abandon), state(&store, "k").await), (1, Some(State::Abandoned)));
        assert_eq!(running.await.unwrap().said(), (409, UNKNOWN.to_owned()));

        // The next process need not wait for the lease.
        let next = world.open().await;
        let handler = Handler::new();
        let refusing = handler.behind(self::layer(&next).lease(LEASE));
        assert_eq!(send(&refusing, post("k", "A")).await.said(), (409, UNKNOWN.to_owned()));
        let rerunning = handler.behind(self::layer(&next).lease(LEASE).recovery(Recovery::rerun()));
        assert_eq!(send(&rerunning, post("k", "A")).await.status, 201);
        assert_eq!(handler.effects(), 1);
    }

    // drain
    async fn drain_aborts_detached_runs_too(world: World) {
        let (router, mut puppet) = Puppet::new();
        let hangups = Hangups::default();
        let store = world.open().await;
        let layer = layer(&store);
        let server = Server::start(hangups.around(router.route_layer(layer.clone()))).await;
        let mut wire = server.connect().await;
        wire.write(&raw_post("k", "A")).await;
        let mut run = puppet.next().await;
        wire.reset();
        hangups.noticed(1).await;
        let drained = layer.drain(Duration::from_millis(20)).await;
        assert_eq!((drained.aborted, drained.left), (1, 0));
        run.dropped().await;
        assert_eq!(state(&store, "k").await, Some(State::Abandoned));
    }

    // drain
    async fn drain_reports_a_run_that_nobody_polls(world: World) {
        let store = world.open().await;
        let (router, mut puppet) = Puppet::new();
        let layer = layer(&store).store_timeout(Duration::from_millis(50));
        let app = router.route_layer(layer.clone());
        let mut future = Box::pin(app.clone().oneshot(post("k", "A")));
        let mut run = poll_until_it_runs(&mut future, &mut puppet).await;
        let begun = Instant::now();
        let drained = layer.drain(Duration::from_millis(20)).await;
        assert_eq!((drained.aborted, drained.left), (1, 1));
        assert!(begun.elapsed() < Duration::from_secs(2));
        assert!(!run.is_dropped());
        // Its handler may still be at work for all we know, so its claim stands until the lease ends.
        assert_eq!(state(&store, "k").await, Some(State::Running));
        let next = world.open().await;
        let next = Handler::new().behind(self::layer(&next));
        assert_eq!(send(&next, post("k", "A")).await.code(), IN_FLIGHT);
        world.clock.advance(LEASE + Duration::from_secs(1));
        assert_eq!(send(&next, post("k", "A")).await.code(), UNKNOWN);
        // Should somebody drop it after all, it ends as it was told.
        drop(future);
        run.dropped().await;
        within_a_second(&store, "k", Some(State::Abandoned)).await;
    }

    // drain: "waits for it to end (at most store_timeout longer)", whatever the store does.
    async fn drain_is_bounded_when_the_store_is_down(world: World) {
        for fault in [Fault::Before, Fault::HangBefore] {
            let key = format!("k-{fault:?}");
            let store = world.open().await;
            let (router, mut puppet) = Puppet::new();
            let layer = layer(&store).store_timeout(Duration::from_millis(100));
            let app = router.route_layer(layer.clone());
            let running = spawn(&app, post(&key, "A"));
            let mut run = puppet.next().await;
            store.fail(Operation::Abandon, fault, Times::Always);
            let begun = Instant::now();
            let drained = layer.drain(Duration::from_millis(20)).await;
            assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
            assert_eq!(drained.aborted, 1);
            run.dropped().await;
            assert_eq!(running.await.unwrap().code(), UNKNOWN);
        }
    }

    // drain: an outcome that is still being recorded counts, and is given up in the end.
    async fn drain_waits_for_late_recordings_and_then_gives_them_up(world: World) {
        let store = world.open().await;
        let handler = Handler::new();
        let layer = layer(&store).store_timeout(Duration::from_millis(100));
        let app = handler.behind(layer.clone());
        store.fail(Operation::Complete, Fault::Before, Times::Always);
        assert_eq!(send(&app, post("k-1", "A")).await.status, 201);
        let drain = tokio::spawn({
            let layer = layer.clone();
            async move { layer.drain(Duration::from_secs(10)).await }
        });
        sleep(Duration::from_millis(50)).await;
        assert!(!drain.is_finished());
        store.clear();
        let drained = drain.await.unwrap();
        assert_eq!((drained.aborted, drained.left), (0, 0));
        assert_eq!(state(&store, "k-1").await, Some(State::Completed));

        let store = world.open().await;
        let layer = self::layer(&store).store_timeout(Duration::from_millis(100));
        let app = handler.behind(layer.clone());
        store.fail(Operation::Complete, Fault::Before, Times::Always);
        assert_eq!(send(&app, post("k-2", "A")).await.status, 201);
        let drained = layer.drain(Duration::from_millis(20)).await;
        assert_eq!((drained.aborted, drained.left), (1, 0));
        assert_eq!(state(&store, "k-2").await, Some(State::Abandoned));
    }

    // drain: a known answer is tried once more before its claim is given up.
    async fn drain_records_an_answer_rather_than_giving_its_claim_up(world: World) {
        let store = world.open().await;
        let handler = Handler::new();
        let layer = layer(&store).store_timeout(Duration::from_millis(500));
        let app = handler.behind(layer.clone());
        store.fail(Operation::Complete, Fault::HangBefore, Times::Next(2));
        assert_eq!(send(&app, post("k", "A")).await.status, 201);
        store.called(Operation::Complete, 2).await;
        let drained = layer.drain(Duration::from_millis(20)).await;
        assert_eq!((drained.aborted, drained.left), (1, 0));
        assert_eq!(state(&store, "k").await, Some(State::Completed));
    }

    // drain: those who wait for another's run, and those whose turn has come but whose service is
    // busy, have begun nothing.
    async fn drain_lets_go_of_those_who_wait(world: World) {
        let store = world.open().await;
        let (router, mut puppet) = Puppet::new();
        let layer = layer(&store).in_flight(InFlight::Wait(Duration::from_secs(60)));
        let app = router.clone().route_layer(layer.clone());
        let first = spawn(&app, post("k", "A"));
        let run = puppet.next().await;
        let ready = Arc::new(AtomicBool::new(true));
        let busy = layer.layer(Busy { ready: ready.clone(), inner: router });
        let waiter = tokio::spawn(busy.oneshot(post("k", "A")));
        called(&store, Operation::Claim, 3).await;
        ready.store(false, Ordering::SeqCst);
        run.answers(422, "no");
        assert_eq!(first.await.unwrap().status, 422);
        // The waiter has the claim now, and no service to run it.
        within_a_second(&store, "k", Some(State::Running)).await;
        let drained = layer.drain(Duration::from_millis(50)).await;
        assert_eq!((drained.aborted, drained.left), (1, 0));
        let refused = Answer::of(waiter.await.unwrap().unwrap()).await;
        assert_eq!(refused.said(), (503, OVERLOADED.to_owned()));
        assert_eq!((state(&store, "k").await, puppet.begun()), (None, 1));
    }

    // drain
    async fn a_dropped_drain_goes_on_draining(world: World) {
        let store = world.open().await;
        let (router, mut puppet) = Puppet::new();
        let layer = layer(&store);
        let app = router.route_layer(layer.clone());
        let running = spawn(&app, post("k", "A"));
        let run = puppet.next().await;
        assert!(timeout(Duration::from_millis(20), layer.drain(LEASE)).await.is_err());
        assert_eq!(send(&app, post("other", "A")).await.code(), OVERLOADED);
        run.answers(201, "done");
        assert_eq!(running.await.unwrap().status, 201);
        let drained = layer.drain(Duration::ZERO).await;
        assert_eq!((drained.aborted, drained.left), (0, 0));
    }
}

// Y1
#[test]
fn a_run_whose_runtime_shuts_down_counts_as_abandoned() {
    for world in World::each() {
        let (handler, main) = (Handler::new(), Runtime::new().unwrap());
        let dying = Runtime::new().unwrap();
        handler.close_gate();
        let (held, orphan) = dying.block_on(async {
            let store = world.open().await;
            let app = handler.behind(layer(&store).lease(LEASE));
            let held = spawn(&app, post("k", "A"));
            handler.reached(1).await;
            let mut orphan = Box::pin(app.clone().oneshot(post("k-2", "A")));
            while handler.effects() < 2 {
                assert!(futures_poll(&mut orphan).is_pending());
                sleep(Duration::from_millis(1)).await;
            }
            (held, orphan)
        });
        // One is dropped by the runtime while it shuts down, one when the runtime is long gone.
        dying.shutdown_timeout(Duration::from_secs(5));
        thread::spawn(move || drop(orphan)).join().unwrap();
        assert!(main.block_on(held).unwrap_err().is_cancelled());
        handler.open_gate();
        main.block_on(async {
            let app = handler.behind(layer(&world.open().await).lease(LEASE));
            for key in ["k", "k-2"] {
                assert_eq!(send(&app, post(key, "A")).await.code(), IN_FLIGHT);
            }
            world.clock.advance(LEASE + Duration::from_secs(1));
            for key in ["k", "k-2"] {
                assert_eq!(
                    send(&app, post(key, "A")).await.said(),
                    (409, UNKNOWN.to_owned())
                );
            }
        });
        assert_eq!(handler.effects(), 2);
    }
}

// Y1
#[test]
fn a_request_served_outside_of_any_runtime_is_answered_or_lapses_with_its_lease() {
    let world = World::memory();
    let store = Runtime::new().unwrap().block_on(world.open());
    let answering = tower::service_fn(|_: Request| async {
        Ok::<_, BoxError>(Response::new(Body::from("done")))
    });
    let service = layer(&store).lease(LEASE).layer(answering);
    let mut answered = Box::pin(service.oneshot(post("k", "A")));
    assert!(matches!(futures_poll(&mut answered), Poll::Ready(Ok(_))));

    let holding =
        tower::service_fn(|_: Request| std::future::pending::<Result<Response<Body>, BoxError>>());
    let service = layer(&store).lease(LEASE).layer(holding);
    let mut held = Box::pin(service.clone().oneshot(post("k-2", "A")));
    assert!(futures_poll(&mut held).is_pending());
    drop(held);
    world.clock.advance(LEASE + Duration::from_secs(1));
    let mut retry = Box::pin(service.oneshot(post("k-2", "A")));
    let Poll::Ready(Ok(retry)) = futures_poll(&mut retry) else {
        panic!("not refused at once")
    };
    assert_eq!(retry.status(), 409);
}

// Y1: called outside of any runtime, polled in one, and dropped there.
#[test]
fn a_future_made_outside_of_any_runtime_goes_on_where_it_was_polled() {
    let runtime = Runtime::new().unwrap();
    let store = runtime.block_on(World::memory().open());
    let (router, mut puppet) = Puppet::new();
    let mut service = layer(&store).layer(router);
    let mut made = Box::pin(Service::call(&mut service, post("k", "A")));
    runtime.block_on(async {
        let run = poll_until_it_runs(&mut made, &mut puppet).await;
        drop(made);
        run.answers(201, "done");
        within_a_second(&store, "k", Some(State::Completed)).await;
    });
}

fn noop() -> Context<'static> {
    Context::from_waker(Waker::noop())
}

fn futures_poll<F: Future>(future: &mut Pin<Box<F>>) -> Poll<F::Output> {
    future.as_mut().poll(&mut noop())
}

/// Polls by hand until the handler runs, and then no more.
async fn poll_until_it_runs<F: Future>(
    future: &mut Pin<Box<F>>,
    puppet: &mut Puppet,
) -> puppet::Run {
    let before = puppet.begun();
    while puppet.begun() == before {
        assert!(futures_poll(future).is_pending());
        sleep(Duration::from_millis(1)).await;
    }
    puppet.next().await
}

/// Retries a fresh key until there is a place for it.
async fn eventually_admitted(server: &Server) -> Reply {
    for _ in 0..1_000 {
        let reply = server.exchange(&raw_post("fresh", "A")).await;
        if reply.code() != OVERLOADED {
            return reply;
        }
        sleep(Duration::from_millis(2)).await;
    }
    panic!("no place was given back");
}

/// Looks, when it is dropped, how many claims were abandoned by then.
struct Looks {
    store: TestStore,
    seen: Arc<AtomicUsize>,
}

impl Drop for Looks {
    fn drop(&mut self) {
        self.seen
            .store(self.store.calls(Operation::Abandon), Ordering::SeqCst);
    }
}

/// Ready only when told so.
#[derive(Clone)]
struct Busy {
    ready: Arc<AtomicBool>,
    inner: Router,
}

impl Service<Request> for Busy {
    type Response = Response<Body>;
    type Error = std::convert::Infallible;
    type Future = <Router as Service<Request>>::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        if self.ready.load(Ordering::SeqCst) {
            return Service::<Request>::poll_ready(&mut self.inner, cx);
        }
        Poll::Pending
    }

    fn call(&mut self, request: Request) -> Self::Future {
        self.inner.call(request)
    }
}

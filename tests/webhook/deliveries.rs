//! What a sender is told under `Profile::Webhook`, whatever becomes of the runs of its event.

use std::time::{Duration, Instant};

use axum::{
    Router,
    body::Body,
    http::{HeaderName, HeaderValue, Request, Response},
};
use tower_http::catch_panic::CatchPanicLayer;
use tower_idempotency::{
    Audience, Endpoint, ErrorEnvelope, FingerprintScheme, IdempotencyKey, IdempotencyLayer,
    IdempotencyStatus, IdempotentResponse, InFlight, ProblemJson, Profile, RecordId, Recovery,
    Rejection, RejectionContext, RenderRejection, Retain, Scope, State, Streamed, Token,
    store::{Claim, ClaimRequest, Store},
    testing::{Fault, Operation, Times},
};

use crate::{
    every_store,
    support::{
        puppet::Puppet,
        wire::{Reply, Server},
        *,
    },
};

const LEASE: Duration = Duration::from_secs(30);

fn layer(store: &TestStore) -> IdempotencyLayer<TestStore> {
    IdempotencyLayer::new(store.clone())
        .single_tenant()
        .profile(Profile::Webhook)
        .store_timeout(Duration::from_millis(500))
}

/// A delivery of this event. Each is another in its body and its signature.
fn delivery(event: &str, nth: usize) -> Request<Body> {
    Request::post("/webhooks")
        .header("webhook-id", event)
        .header("webhook-timestamp", 1_700_000_000 + nth)
        .header("webhook-signature", format!("v1,{nth}"))
        .body(Body::from(format!("{{\"sent\":{nth}}}")))
        .unwrap()
}

/// The same as bytes.
fn raw(event: &str, nth: usize) -> Vec<u8> {
    let body = format!("{{\"sent\":{nth}}}");
    let length = body.len();
    format!(
        "POST /webhooks HTTP/1.1\r\nhost: test\r\nwebhook-id: {event}\r\nwebhook-timestamp: {nth}\r\n\
         content-length: {length}\r\n\r\n{body}"
    )
    .into_bytes()
}

/// Told to come back: 503, after so many seconds at the earliest.
#[track_caller]
fn assert_come_back(answer: &Answer, code: &str, seconds: &str) {
    assert_eq!(answer.said(), (503, format!("idempotency_{code}")));
    assert_eq!(answer.header("retry-after"), Some(seconds));
    let problem = answer.json();
    assert_eq!(problem["retryable"], true);
    assert_eq!(problem["retry_after_seconds"].to_string(), seconds);
    assert_eq!(problem["status"], 503);
}

/// A run of another process that has begun and is never heard of again.
async fn begin_elsewhere(store: &TestStore, event: &str, replaces: Option<Token>) -> Token {
    let id = RecordId::new(Scope::shared(), IdempotencyKey::new(event));
    let (head, _) = delivery(event, 0).into_parts();
    let fingerprint = Endpoint.fingerprint(&head, &"".into()).unwrap();
    let mut claim = ClaimRequest::new(id, Endpoint.name(), fingerprint);
    claim.replaces = replaces;
    claim.lease = LEASE;
    let claimed = store.inner().claim(claim).await.unwrap();
    let Claim::Won(ticket) = claimed else {
        panic!("not won: {claimed:?}");
    };
    ticket.token
}

every_store! {
    async fn completed_it_is_answered_again_whatever_else_the_delivery_says(world: World) {
        let store = world.open().await;
        let handler = Handler::new();
        let app = handler.behind(layer(&store));
        let first = send(&app, delivery("evt_1", 1)).await;
        assert_eq!(first.status, 201);
        send(&app, delivery("evt_1", 2)).await.assert_replays(&first);
        // As long as senders go on: days later as well.
        world.clock.advance(Duration::from_secs(6 * 24 * 3600));
        send(&app, delivery("evt_1", 3)).await.assert_replays(&first);
        assert_eq!(handler.effects(), 1);
        send(&app, delivery("evt_2", 1)).await;
        assert_eq!(handler.effects(), 2);
    }

    // X4
    async fn while_it_runs_the_sender_is_told_at_once_to_come_back(world: World) {
        let store = world.open().await;
        let (router, mut puppet) = Puppet::new();
        let app = router.route_layer(layer(&store));
        let first = spawn(&app, delivery("evt_1", 1));
        let run = puppet.next().await;
        for nth in 2..5 {
            let asked = Instant::now();
            let answer = send(&app, delivery("evt_1", nth)).await;
            assert!(asked.elapsed() < Duration::from_secs(5));
            assert_come_back(&answer, "in_flight", "1");
        }
        run.answers(202, "taken");
        let first = first.await.unwrap();
        send(&app, delivery("evt_1", 5)).await.assert_replays(&first);
        assert_eq!((puppet.begun(), first.status.as_u16()), (1, 202));
    }

    async fn failed_it_runs_again_and_what_the_handler_said_is_not_kept(world: World) {
        let store = world.open().await;
        let (router, mut puppet) = Puppet::new();
        let app = router.route_layer(layer(&store));
        for (nth, status) in [500, 503, 400, 404, 409, 422, 429, 303, 402].into_iter().enumerate() {
            let sent = spawn(&app, delivery("evt_1", nth));
            puppet.next().await.answers(status, "not now");
            let answer = sent.await.unwrap();
            assert_eq!((answer.status.as_u16(), answer.replay), (status, false));
            assert!(record(&store, "evt_1").await.is_none(), "{status} frees the id");
        }
        let sent = spawn(&app, delivery("evt_1", 10));
        puppet.next().await.answers(204, "");
        let first = sent.await.unwrap();
        send(&app, delivery("evt_1", 11)).await.assert_replays(&first);
        assert_eq!(puppet.begun(), 10);
    }

    // Y3
    async fn panicked_it_runs_again_three_times_at_most(world: World) {
        let store = world.open().await;
        let (router, mut puppet) = Puppet::new();
        let app = router.route_layer(layer(&store)).layer(CatchPanicLayer::new());
        for nth in 1..=3 {
            let sent = spawn(&app, delivery("evt_1", nth));
            puppet.next().await.panics("as the test wants");
            assert_eq!(sent.await.unwrap().status, 500);
            assert_eq!(state(&store, "evt_1").await, Some(State::Abandoned));
        }
        for nth in 4..7 {
            assert_come_back(&send(&app, delivery("evt_1", nth)).await, "outcome_unknown", "60");
        }
        assert_eq!(puppet.begun(), 3);

        // One that comes through after all is answered for good.
        let sent = spawn(&app, delivery("evt_2", 1));
        puppet.next().await.panics("as the test wants");
        sent.await.unwrap();
        let sent = spawn(&app, delivery("evt_2", 2));
        puppet.next().await.answers(200, "done");
        let first = sent.await.unwrap();
        send(&app, delivery("evt_2", 3)).await.assert_replays(&first);
    }

    async fn killed_it_runs_again_once_the_lease_is_over_three_times_at_most(world: World) {
        let store = world.open().await;
        let handler = Handler::new();
        let app = handler.behind(layer(&store).lease(LEASE));
        let mut replaces = None;
        for run in 1..=3 {
            let other = world.open().await;
            replaces = Some(begin_elsewhere(&other, "evt_1", replaces).await);
            if run == 1 {
                begin_elsewhere(&other, "evt_2", None).await;
            }
            assert_come_back(&send(&app, delivery("evt_1", run)).await, "in_flight", "1");
            world.clock.advance(LEASE + Duration::from_secs(1));
        }
        assert_come_back(&send(&app, delivery("evt_1", 4)).await, "outcome_unknown", "60");
        assert_eq!(handler.effects(), 0);

        // Cut off once only, it runs, and is done.
        let first = send(&app, delivery("evt_2", 1)).await;
        assert_eq!((first.status.as_u16(), handler.effects()), (201, 1));
        send(&app, delivery("evt_2", 2)).await.assert_replays(&first);
    }

    async fn a_rerun_that_fails_uses_up_nothing(world: World) {
        let store = world.open().await;
        let (router, mut puppet) = Puppet::new();
        let app = router.route_layer(layer(&store)).layer(CatchPanicLayer::new());
        let sent = spawn(&app, delivery("evt_1", 1));
        puppet.next().await.panics("as the test wants");
        sent.await.unwrap();
        for nth in 2..8 {
            let sent = spawn(&app, delivery("evt_1", nth));
            puppet.next().await.answers(500, "not now");
            assert_eq!(sent.await.unwrap().status, 500);
        }
        let sent = spawn(&app, delivery("evt_1", 8));
        puppet.next().await.answers(200, "done");
        assert_eq!(sent.await.unwrap().status, 200);
    }

    async fn what_may_pass_is_503_and_what_may_not_is_4xx(world: World) {
        let store = world.open().await;
        let (router, mut puppet) = Puppet::new();
        let limited = layer(&store).max_running(1).scope(|_| Some(Scope::new("sender")));
        let app = router.route_layer(limited);

        store.fail(Operation::Claim, Fault::Before, Times::Always);
        assert_come_back(&send(&app, delivery("evt_1", 1)).await, "store_unavailable", "1");
        store.clear();
        store.fail(Operation::Claim, Fault::After, Times::Always);
        assert_come_back(&send(&app, delivery("evt_1", 2)).await, "store_unavailable", "1");
        store.clear();

        let held = spawn(&app, delivery("evt_2", 1));
        let run = puppet.next().await;
        assert_come_back(&send(&app, delivery("evt_3", 1)).await, "overloaded", "1");
        run.answers(200, "done");
        held.await.unwrap();
        let broken = futures_util::stream::iter([Err::<bytes::Bytes, _>(std::io::Error::other("gone"))]);
        let (head, _) = delivery("evt_3", 2).into_parts();
        let broken = Request::from_parts(head, Body::from_stream(broken));
        assert_come_back(&send(&app, broken).await, "body_incomplete", "1");

        let full = Handler::new().behind(layer(&store).scope(|_| Some(Scope::new("sender"))).scope_limit(1));
        let mut answer = send(&full, delivery("evt_4", 1)).await;
        for nth in 2..200 {
            // The count is made beside the requests.
            if answer.code() == "idempotency_limit_reached" {
                break;
            }
            answer = send(&full, delivery(&format!("evt_4_{nth}"), 1)).await;
        }
        assert_come_back(&answer, "limit_reached", "60");

        let unsigned = Request::post("/webhooks").body(Body::from("{}")).unwrap();
        let answer = send(&app, unsigned).await;
        assert_eq!(answer.said(), (400, "idempotency_key_required".into()));
        assert_eq!(answer.header("retry-after"), None);
        assert!(answer.json()["detail"].as_str().unwrap().contains("header webhook-id"));
        assert_eq!(send(&app, delivery("a,b", 1)).await.said(), (400, "idempotency_key_invalid".into()));
        let strangers = Handler::new().behind(layer(&store).scope(|_| None));
        assert_eq!(send(&strangers, delivery("evt_5", 1)).await.said(), (403, "idempotency_scope_unknown".into()));
    }

    async fn done_without_a_kept_answer_it_is_done_all_the_same(world: World) {
        let store = world.open().await;
        let handler = Handler::answering(|seen| {
            let status: u16 = seen.headers["webhook-id"].to_str().unwrap().parse().unwrap();
            let mut response = Response::new(Body::from("much"));
            *response.status_mut() = status.try_into().unwrap();
            response.headers_mut().insert("x-run", HeaderValue::from_static("1"));
            response.extensions_mut().insert(Retain::Tombstone);
            response
        });
        let app = handler.behind(layer(&store).replay_provenance());
        for status in ["200", "201", "202", "204"] {
            assert_eq!(send(&app, delivery(status, 1)).await.status.as_str(), status);
            let (head, body) = tower::ServiceExt::oneshot(app.clone(), delivery(status, 2)).await.unwrap().into_parts();
            let response = Response::from_parts(head, body);
            assert_eq!(response.idempotency_status(), Some(IdempotencyStatus::Replayed));
            let again = Answer::of(response).await;
            assert_eq!((again.status.as_str(), &again.body[..]), (status, &b""[..]));
            assert_eq!((again.header("idempotent-replay"), again.header("x-run")), (Some("true"), None));
            assert!(again.header("idempotency-original-date").is_some());
        }
        assert_eq!(handler.effects(), 4);
        // What was done and came to nothing good is no success, and no later delivery makes it one.
        for status in ["303", "409", "500"] {
            send(&app, delivery(status, 1)).await;
            let again = send(&app, delivery(status, 2)).await;
            assert_eq!(again.said(), (409, "idempotency_response_not_retained".into()), "{status}");
            assert_eq!(again.json()["original_status"].to_string(), status);
        }
        assert_eq!(handler.effects(), 7);

        // An answer that has lived its time is the same.
        let handler = Handler::new();
        let app = handler.behind(layer(&store).response_ttl(Duration::from_secs(60)));
        send(&app, delivery("evt_1", 1)).await;
        world.clock.advance(Duration::from_secs(61));
        let again = send(&app, delivery("evt_1", 2)).await;
        assert_eq!((again.status.as_u16(), again.replay, again.body.len()), (201, true, 0));
        assert_eq!(handler.effects(), 1);
    }

    async fn a_kept_answer_that_cannot_be_read_is_that_of_a_completed_run(world: World) {
        if !world.is_durable() {
            return;
        }
        let store = world.open().await;
        let handler = Handler::new();
        let app = handler.behind(layer(&store));
        send(&app, delivery("evt_1", 1)).await;
        let kept = handler.behind(layer(&store).retention(tower_idempotency::Retention::standard()));
        let failing = Handler::answering(|_| Response::builder().status(500).body("kept".into()).unwrap());
        let failing = failing.behind(layer(&store).retention(tower_idempotency::Retention::standard()));
        send(&failing, delivery("evt_2", 1)).await;
        world.tamper("UPDATE idempotency_records SET response = x'ff00ff'").await;
        let again = send(&app, delivery("evt_1", 2)).await;
        assert_eq!((again.status.as_u16(), again.replay, again.body.len()), (201, true, 0));
        assert_come_back(&send(&kept, delivery("evt_2", 2)).await, "store_unavailable", "1");
        let clients = handler.behind(layer(&store).audience(Audience::Clients));
        assert_come_back(&send(&clients, delivery("evt_1", 3)).await, "store_unavailable", "1");
        assert_eq!(handler.effects(), 1);
    }

    // L12
    async fn what_was_cut_off_does_not_stay_for_ever(world: World) {
        const WEEK: Duration = Duration::from_secs(7 * 24 * 3600);
        let store = world.open().await;
        let (router, mut puppet) = Puppet::new();
        let app = router.clone().route_layer(layer(&store)).layer(CatchPanicLayer::new());
        // Refused after a panic; and three panics.
        for (event, ends) in [("evt_1", &["panic", "410"][..]), ("evt_2", &["panic"; 3])] {
            for (nth, end) in ends.iter().enumerate() {
                let held = spawn(&app, delivery(event, nth));
                let run = puppet.next().await;
                match *end {
                    "panic" => run.panics("as the test wants"),
                    _ => run.answers(410, "no event of ours"),
                }
                held.await.unwrap();
            }
            assert_eq!(state(&store, event).await, Some(State::Abandoned));
        }
        // No other profile lets that happen.
        let own = layer(&store).header_name(HeaderName::from_static("webhook-id")).profile(Profile::Gateway);
        let gateway = router.route_layer(own).layer(CatchPanicLayer::new());
        let held = spawn(&gateway, delivery("evt_3", 1));
        puppet.next().await.panics("as the test wants");
        held.await.unwrap();

        world.clock.advance(WEEK);
        assert_come_back(&send(&app, delivery("evt_2", 4)).await, "outcome_unknown", "60");
        // A run of theirs might have gone on until then.
        world.clock.advance(Duration::from_secs(601));
        while store.inner().purge(100).await.unwrap() > 0 {}
        assert_eq!((record(&store, "evt_1").await, record(&store, "evt_2").await), (None, None));
        assert_eq!(state(&store, "evt_3").await, Some(State::Abandoned));
        let held = spawn(&app, delivery("evt_2", 5));
        puppet.next().await.answers(200, "done");
        assert_eq!(held.await.unwrap().status, 200);
    }

    async fn one_that_waits_in_vain_is_told_to_come_back_and_after_a_failure_it_runs(world: World) {
        let store = world.open().await;
        let (router, mut puppet) = Puppet::new();
        let waits = InFlight::Wait(Duration::from_millis(100));
        let app = router.clone().route_layer(layer(&store).in_flight(waits));
        let held = spawn(&app, delivery("evt_1", 1));
        let run = puppet.next().await;
        assert_come_back(&send(&app, delivery("evt_1", 2)).await, "in_flight", "1");
        let patient = router.route_layer(layer(&store).in_flight(InFlight::Wait(Duration::from_secs(20))));
        let waiter = spawn(&patient, delivery("evt_1", 3));
        run.answers(500, "not now");
        held.await.unwrap();
        puppet.next().await.answers(200, "done");
        assert_eq!(waiter.await.unwrap().status, 200);
    }

    async fn a_2xx_that_says_it_is_not_done_is_passed_on_and_the_event_runs_again(world: World) {
        let store = world.open().await;
        for (event, retain) in [("evt_1", Retain::Release), ("evt_2", Retain::Abandon)] {
            let handler = Handler::answering(move |_| {
                let mut response = Response::new(Body::from("taken"));
                response.extensions_mut().insert(retain);
                response
            });
            let app = handler.behind(layer(&store));
            for nth in 1..=2 {
                let answer = send(&app, delivery(event, nth)).await;
                assert_eq!((answer.status.as_u16(), answer.replay, handler.effects()), (200, false, nth));
            }
        }
    }

    async fn a_failure_that_cannot_be_kept_runs_again_and_a_success_does_not(world: World) {
        let store = world.open().await;
        let handler = Handler::answering(|seen| {
            let mut response = Response::new(Body::from("x".repeat(2_000_000)));
            match seen.run {
                1 => *response.status_mut() = axum::http::StatusCode::BAD_GATEWAY,
                2 => {
                    *response.status_mut() = axum::http::StatusCode::INTERNAL_SERVER_ERROR;
                    response.extensions_mut().insert(Streamed);
                }
                3 => {
                    *response.status_mut() = axum::http::StatusCode::GONE;
                    let kind = HeaderValue::from_static("text/event-stream");
                    response.headers_mut().insert("content-type", kind);
                }
                _ => {}
            }
            response
        });
        let app = handler.behind(layer(&store));
        let mut statuses = Vec::new();
        for nth in 0..6 {
            statuses.push(send(&app, delivery("evt_1", nth)).await.status.as_u16());
        }
        assert_eq!((&statuses[..], handler.effects()), (&[502, 500, 410, 200, 200, 200][..], 4));
    }

    async fn a_recording_that_fails_does_not_run_it_again(world: World) {
        let store = world.open().await;
        let handler = Handler::new();
        let app = handler.behind(layer(&store).store_timeout(Duration::from_millis(200)));
        store.fail(Operation::Complete, Fault::Before, Times::Always);
        assert_eq!(send(&app, delivery("evt_1", 1)).await.status, 201);
        assert_come_back(&send(&app, delivery("evt_1", 2)).await, "in_flight", "1");
        store.clear();
        comes_to(&store, "evt_1", Some(State::Completed)).await;
        assert!(send(&app, delivery("evt_1", 3)).await.replay);
        assert_eq!(handler.effects(), 1);
    }

    async fn what_is_unknown_is_told_as_what_may_be_sent_again_in_every_shape(world: World) {
        let store = world.open().await;
        let (router, mut puppet) = Puppet::new();
        let senders = || layer(&store).recovery(Recovery::Refuse);
        let problem = router.clone().route_layer(senders()).layer(CatchPanicLayer::new());
        let envelope = router.route_layer(senders().rejections(ErrorEnvelope::new()));
        let held = spawn(&problem, delivery("evt_1", 1));
        puppet.next().await.panics("as the test wants");
        held.await.unwrap();
        let says = |detail: &serde_json::Value| {
            let detail = detail.as_str().unwrap();
            assert!(detail.contains("again after the time given"), "{detail}");
        };
        let answer = send(&problem, delivery("evt_1", 2)).await;
        assert_come_back(&answer, "outcome_unknown", "60");
        says(&answer.json()["detail"]);
        let answer = send(&envelope, delivery("evt_1", 3)).await;
        assert_eq!((answer.status.as_u16(), answer.header("retry-after")), (503, Some("60")));
        let error = &answer.json()["error"];
        assert_eq!((&error["retryable"], &error["retry_after_seconds"]), (&true.into(), &60.into()));
        says(&error["message"]);
    }

    async fn options_that_are_set_afterwards_win_and_the_headers_name_stays(world: World) {
        let store = world.open().await;
        let (router, mut puppet) = Puppet::new();
        let own = IdempotencyLayer::new(store.clone())
            .single_tenant()
            .header_name(HeaderName::from_static("x-event"))
            .profile(Profile::Webhook)
            .recovery(Recovery::Refuse)
            .audience(Audience::Clients);
        let app = router.route_layer(own).layer(CatchPanicLayer::new());
        let named = |nth: usize| {
            let mut request = delivery("other", nth);
            request.headers_mut().insert("x-event", HeaderValue::from_static("evt_1"));
            request
        };
        assert_eq!(send(&app, delivery("other", 1)).await.code(), "idempotency_key_required");
        let sent = spawn(&app, named(1));
        let run = puppet.next().await;
        assert_eq!(send(&app, named(2)).await.said(), (409, "idempotency_in_flight".into()));
        run.panics("as the test wants");
        assert_eq!(sent.await.unwrap().status, 500);
        let refused = send(&app, named(3)).await;
        assert_eq!(refused.said(), (409, "idempotency_outcome_unknown".into()));
        assert_eq!((refused.header("retry-after"), puppet.begun()), (None, 1));
    }

    async fn over_tcp_a_sender_that_hangs_up_finds_it_done(world: World) {
        let store = world.open().await;
        let (router, mut puppet) = Puppet::new();
        let server = Server::start(router.route_layer(layer(&store)).layer(CatchPanicLayer::new())).await;
        let come_back = |reply: &Reply| (reply.said(), reply.header("retry-after").map(<[u8]>::to_vec));

        // It loses patience while the run is going on.
        let mut impatient = server.connect().await;
        impatient.write(&raw("evt_1", 1)).await;
        let run = puppet.next().await;
        impatient.reset();
        let reply = server.exchange(&raw("evt_1", 2)).await;
        assert_eq!(come_back(&reply), ((503, "idempotency_in_flight".into()), Some(b"1".to_vec())));
        run.answers(200, "done");
        comes_to(&store, "evt_1", Some(State::Completed)).await;
        let reply = server.exchange(&raw("evt_1", 3)).await;
        assert_eq!((reply.status, reply.is_replay(), &reply.body[..]), (200, true, &b"done"[..]));

        // A failure, a panic, and then a success.
        for (nth, ending) in ["fails", "panics", "succeeds", "is replayed"].into_iter().enumerate() {
            let sent = tokio::spawn({
                let (bytes, address) = (raw("evt_2", nth), server.address);
                async move {
                    let mut wire = wire::Wire::to(address).await.unwrap();
                    wire.write(&bytes).await;
                    wire.read_reply().await
                }
            });
            match ending {
                "fails" => puppet.next().await.answers(500, "not now"),
                "panics" => puppet.next().await.panics("as the test wants"),
                "succeeds" => puppet.next().await.answers(201, "made"),
                _ => {}
            }
            let reply = sent.await.unwrap();
            let expected = match ending {
                "fails" | "panics" => (500, false),
                "succeeds" => (201, false),
                _ => (201, true),
            };
            assert_eq!((reply.status, reply.is_replay()), expected, "{ending}");
        }

        store.fail(Operation::Claim, Fault::Before, Times::Always);
        let reply = server.exchange(&raw("evt_3", 1)).await;
        assert_eq!(come_back(&reply), ((503, "idempotency_store_unavailable".into()), Some(b"1".to_vec())));
        assert_eq!(puppet.begun(), 4);
    }
}

/// What a renderer of one's own can be tested with.
#[test]
fn a_context_says_what_senders_are_told() {
    let unknown = Rejection::OutcomeUnknown {
        original_request_id: None,
    };
    let context = |status: u16| RejectionContext::new(status.try_into().unwrap(), "POST", "/");
    let (clients, senders) = (context(409), context(503).retry_after(60));
    assert_eq!(clients.retry_after_seconds(&unknown), None);
    assert!(!unknown.detail(&clients).contains("again"));
    assert_eq!(senders.retry_after_seconds(&unknown), Some(60));
    assert!(
        unknown
            .detail(&senders)
            .contains("again after the time given")
    );
    let rendered = ProblemJson.render(&unknown, &senders);
    assert_eq!(rendered.headers()["retry-after"], "60");
    let set = || context(503).retry_after(0);
    let panic = std::panic::catch_unwind(set).unwrap_err();
    let message = panic.downcast_ref::<&str>().unwrap();
    assert_eq!(*message, "retry_after must be longer than zero");
}

/// A router is what most receivers are; but any service may be wrapped.
#[tokio::test]
async fn by_default_the_header_is_that_of_standard_webhooks_and_only_posts_are_events() {
    let world = World::memory();
    let store = world.open().await;
    let handler = Handler::new();
    let app: Router = handler.behind(layer(&store));
    for method in ["GET", "PUT", "DELETE"] {
        let mut request = delivery("evt_1", 1);
        *request.method_mut() = method.parse().unwrap();
        assert_eq!(send(&app, request).await.status, 201);
    }
    assert_eq!((handler.effects(), records(&store).await), (3, 0));
    send(&app, delivery("evt_1", 1)).await;
    assert!(record(&store, "evt_1").await.is_some());

    // Where events come with PUT, that is said.
    let app = handler.behind(layer(&store).required_methods(["PUT".parse().unwrap()]));
    for replay in [false, true] {
        let mut request = delivery("evt_2", 1);
        *request.method_mut() = "PUT".parse().unwrap();
        assert_eq!(send(&app, request).await.replay, replay);
    }
}

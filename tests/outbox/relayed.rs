//! Sending: every attempt comes from the row, and what it came to is written there.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use axum::{Json, body::Body, response::IntoResponse};
use http::{HeaderValue, Request, StatusCode};
use http_body_util::BodyExt;
use serde_json::{Value, json};
use tower::{ServiceExt, service_fn};
use tower_idempotency::{
    IdempotencyKey,
    client::{
        Answered, Delivered, Entry, EntryState, Outbox, OutboxErrorKind, Outcome, Relay,
        RetryLayer, Unanswered, Undelivered,
    },
};
use tower_layer::Layer;

use crate::{
    ground::{both, charge_of},
    support::eventually,
};

fn problem(code: &str, more: Value) -> impl IntoResponse {
    let mut body = json!({ "code": code });
    for (name, value) in more.as_object().unwrap() {
        body[name] = value.clone();
    }
    (StatusCode::CONFLICT, Json(body))
}

async fn body_of(delivered: Delivered) -> Vec<u8> {
    let body = delivered.into_response().unwrap().into_body();
    body.collect().await.unwrap().to_bytes().to_vec()
}

fn kept(entry: &Entry) -> Vec<u8> {
    entry.result().unwrap().unwrap().body().to_vec()
}

both! {
    async fn an_answer_is_recorded_and_given_back_without_another_request(ground: Ground) {
        let relay = ground.relay();
        let first = relay.deliver::<Body, _>("r", charge_of(250)).await.unwrap();
        assert_eq!(
            (first.state(), first.status()),
            (EntryState::Done, Some(StatusCode::CREATED))
        );
        assert!(first.unrecorded().is_none());
        assert!(
            !first
                .response()
                .unwrap()
                .extensions()
                .get::<Answered>()
                .unwrap()
                .replayed
        );
        let entry = first.entry().clone();
        assert_eq!(
            (entry.state(), entry.attempts(), kept(&entry)),
            (EntryState::Done, 1, b"ch_1".to_vec())
        );
        assert!(entry.begun() <= entry.last_attempt().unwrap());
        assert!(entry.last_attempt() <= entry.settled());
        assert_eq!(body_of(first).await, b"ch_1");

        for _ in 0..2 {
            let again = relay.deliver::<Body, _>("r", charge_of(250)).await.unwrap();
            let response = again.response().unwrap();
            assert_eq!(
                (response.status(), &response.headers()["x-charge"]),
                (StatusCode::CREATED, &HeaderValue::from_static("yes"))
            );
            assert_eq!(body_of(again).await, b"ch_1");
        }
        let asked = ground.shop.requests();
        assert_eq!((asked.len(), &asked[0].body[..]), (1, &b"250 baht"[..]));
        assert_eq!(
            asked[0].headers["idempotency-key"].as_bytes(),
            entry.key().as_bytes()
        );
        assert_eq!(asked[0].headers["content-type"], "text/plain");

        // Another intent under the same reference is the caller's mistake.
        let differs = relay
            .deliver::<Body, _>("r", charge_of(999))
            .await
            .unwrap_err();
        assert!(matches!(differs, Undelivered::Differs(_)), "{differs:?}");
        let missing = relay.send::<Body, _>("nobody").await.unwrap_err();
        assert!(
            matches!(&missing, Undelivered::Outbox(error) if error.kind() == OutboxErrorKind::Missing),
            "{missing:?}"
        );
        assert_eq!(ground.shop.requests().len(), 1);
    }

    async fn every_attempt_is_read_from_the_row_and_counted_before_it_is_sent(ground: Ground) {
        let operation = charge_of(1).key(IdempotencyKey::new("first"));
        ground.outbox.begin("r", operation).await.unwrap();
        let attempts = Arc::new(AtomicU64::new(0));
        let (app, outbox, made) = (ground.shop.app(), ground.outbox.clone(), attempts.clone());
        let client = service_fn(move |request: Request<Body>| {
            let (app, outbox, made) = (app.clone(), outbox.clone(), made.clone());
            async move {
                let number = made.fetch_add(1, Ordering::SeqCst) + 1;
                let row = outbox.find("r").await.unwrap().unwrap();
                assert_eq!(row.attempts(), number);
                assert_eq!(
                    request
                        .headers()
                        .get_all("idempotency-key")
                        .iter()
                        .collect::<Vec<_>>(),
                    ["first"]
                );
                match number {
                    3 => app.oneshot(request).await.map_err(|never| match never {}),
                    _ => Err(std::io::Error::from(std::io::ErrorKind::ConnectionReset)),
                }
            }
        });
        let retry = RetryLayer::new().back_off(Duration::from_millis(1), Duration::from_millis(1));
        let relay = Relay::new(ground.outbox.clone(), retry.layer(client));
        let done = relay.send("r").await.unwrap();
        assert_eq!(
            (done.state(), done.entry().attempts()),
            (EntryState::Done, 3)
        );
    }

    async fn what_somebody_else_settles_between_two_attempts_is_not_sent_again(ground: Ground) {
        ground.outbox.begin("r", charge_of(1)).await.unwrap();
        let outbox = ground.outbox.clone();
        let made = Arc::new(AtomicU64::new(0));
        let attempts = made.clone();
        let client = service_fn(move |_: Request<Body>| {
            let (outbox, made) = (outbox.clone(), made.clone());
            async move {
                made.fetch_add(1, Ordering::SeqCst);
                let answer = http::Response::builder()
                    .status(202)
                    .body("by hand".into())
                    .unwrap();
                outbox
                    .settle("r", Outcome::Done, Some(answer))
                    .await
                    .unwrap();
                Ok::<_, std::io::Error>(StatusCode::SERVICE_UNAVAILABLE.into_response())
            }
        });
        let retry = RetryLayer::new().back_off(Duration::from_millis(1), Duration::from_millis(1));
        let done = Relay::new(ground.outbox.clone(), retry.layer(client))
            .send("r")
            .await
            .unwrap();
        assert_eq!(
            (done.state(), done.status()),
            (EntryState::Done, Some(StatusCode::ACCEPTED))
        );
        assert_eq!(body_of(done).await, b"by hand");
        assert_eq!(attempts.load(Ordering::SeqCst), 1);
    }

    async fn a_late_refusal_changes_nothing_of_what_is_done(ground: Ground) {
        ground.outbox.begin("r", charge_of(1)).await.unwrap();
        let outbox = ground.outbox.clone();
        let client = service_fn(move |_: Request<Body>| {
            let outbox = outbox.clone();
            async move {
                outbox.settle("r", Outcome::Done, None).await.unwrap();
                Ok::<_, std::io::Error>(StatusCode::UNAUTHORIZED.into_response())
            }
        });
        let relay = Relay::new(ground.outbox.clone(), RetryLayer::new().layer(client));
        let late = relay.send("r").await.unwrap();
        assert_eq!(
            (late.state(), late.entry().state()),
            (EntryState::Failed, EntryState::Done)
        );
        assert_eq!(late.entry().status(), None);
        let row = ground.outbox.find("r").await.unwrap().unwrap();
        assert_eq!(
            (row.state(), row.settled()),
            (EntryState::Done, late.entry().settled())
        );
    }

    // X1: whatever process sends it.
    async fn two_relays_that_resume_the_same_rows_at_once_charge_each_once(ground: Ground) {
        const OPERATIONS: u32 = 24;
        for number in 0..OPERATIONS {
            ground
                .outbox
                .begin(&format!("order {number}"), charge_of(number))
                .await
                .unwrap();
        }
        let mut relays = tokio::task::JoinSet::new();
        for _ in 0..3 {
            let outbox: Outbox<Db> = Outbox::new(ground.another_pool().await);
            let retry = RetryLayer::new()
                .back_off(Duration::from_millis(5), Duration::from_millis(20))
                .retries(50);
            let relay = Relay::new(outbox, retry.layer(ground.shop.app()));
            relays.spawn(async move { relay.resume::<Body, _>(100).await.unwrap() });
        }
        for resumed in relays.join_all().await {
            assert!(
                resumed.pending.is_empty() && resumed.failed.is_empty(),
                "{resumed:?}"
            );
        }
        let charges = ground.shop.charges();
        let mut bodies: Vec<_> = charges.iter().map(|asked| asked.body.clone()).collect();
        bodies.sort();
        bodies.dedup();
        assert_eq!(
            (charges.len(), bodies.len()),
            (OPERATIONS as usize, OPERATIONS as usize)
        );
        assert_eq!(ground.shop.keys().len(), OPERATIONS as usize);
        assert_eq!(
            ground.outbox.counts().await.unwrap().done,
            u64::from(OPERATIONS)
        );
    }

    async fn what_has_no_answer_stays_pending_and_is_done_later_with_its_first_key(ground: Ground) {
        let relay = ground.relay();
        ground.shop.is_down(true);
        let gave_up = relay
            .deliver::<Body, _>("down", charge_of(1))
            .await
            .unwrap_err();
        assert!(
            matches!(gave_up, Undelivered::Unanswered(Unanswered::GaveUp(_))),
            "{gave_up:?}"
        );
        ground.shop.is_down(false);
        ground
            .shop
            .refuse_next(problem("idempotency_in_flight", json!({})));
        let running = relay
            .deliver::<Body, _>("running", charge_of(2))
            .await
            .unwrap_err();
        assert!(
            matches!(
                running,
                Undelivered::Unanswered(Unanswered::StillInFlight(_))
            ),
            "{running:?}"
        );
        ground
            .shop
            .refuse_next(problem("idempotency_outcome_unknown", json!({})));
        let unknown = relay
            .deliver::<Body, _>("unknown", charge_of(3))
            .await
            .unwrap_err();
        assert!(
            matches!(
                unknown,
                Undelivered::Unanswered(Unanswered::OutcomeUnknown(_))
            ),
            "{unknown:?}"
        );
        // Done, but not how: nobody may take that for a failure.
        ground
            .shop
            .refuse_next(problem("idempotency_response_not_retained", json!({})));
        let untold = relay
            .deliver::<Body, _>("untold", charge_of(4))
            .await
            .unwrap_err();
        assert!(
            matches!(
                untold,
                Undelivered::Unanswered(Unanswered::NotRetained { .. })
            ),
            "{untold:?}"
        );
        assert_eq!(
            (
                ground.outbox.counts().await.unwrap().pending,
                ground.shop.charges().len()
            ),
            (4, 0)
        );

        let resumed = relay.resume::<Body, _>(10).await.unwrap();
        assert_eq!((resumed.done.len(), resumed.pending.len()), (4, 0));
        assert!(resumed.done.iter().all(|entry| entry.attempts() == 2));
        assert_eq!(
            (ground.shop.keys().len(), ground.shop.charges().len()),
            (4, 4)
        );
    }

    async fn refusals_and_lost_answers_are_recorded_by_their_status(ground: Ground) {
        let relay = ground.relay();
        ground.shop.refuse_next(problem(
            "idempotency_response_not_retained",
            json!({ "original_status": 201 }),
        ));
        let done = relay
            .deliver::<Body, _>("done", charge_of(1))
            .await
            .unwrap();
        assert_eq!(
            (done.state(), done.status(), done.response().is_none()),
            (EntryState::Done, Some(StatusCode::CREATED), true)
        );
        ground.shop.refuse_next(problem(
            "idempotency_response_not_retained",
            json!({ "original_status": 402 }),
        ));
        let failed = relay
            .deliver::<Body, _>("failed", charge_of(1))
            .await
            .unwrap();
        assert_eq!(
            (failed.state(), failed.status()),
            (EntryState::Failed, Some(StatusCode::PAYMENT_REQUIRED))
        );
        ground
            .shop
            .refuse_next((StatusCode::UNPROCESSABLE_ENTITY, "no such account"));
        let refused = relay
            .deliver::<Body, _>("refused", charge_of(1))
            .await
            .unwrap();
        assert_eq!(
            (refused.state(), kept(refused.entry())),
            (EntryState::Failed, b"no such account".to_vec())
        );

        ground
            .shop
            .refuse_next(problem("idempotency_key_reused", json!({})));
        let reused = relay
            .deliver::<Body, _>("reused", charge_of(1))
            .await
            .unwrap_err();
        assert!(
            matches!(reused, Undelivered::Unanswered(Unanswered::Reused(_))),
            "{reused:?}"
        );
        let entry = ground.outbox.find("reused").await.unwrap().unwrap();
        assert_eq!(
            (entry.state(), entry.status()),
            (EntryState::Failed, Some(StatusCode::CONFLICT))
        );
        ground
            .shop
            .refuse_next(problem("idempotency_key_reused", json!({})));
        ground.outbox.begin("resumed", charge_of(1)).await.unwrap();
        let resumed = relay.resume::<Body, _>(10).await.unwrap();
        assert_eq!(
            (resumed.failed.len(), resumed.failed[0].reference()),
            (1, "resumed")
        );
        assert_eq!(ground.shop.charges().len(), 0);
    }

    async fn an_answer_that_is_too_large_is_kept_by_its_status_and_given_whole(ground: Ground) {
        const MIB: usize = 1024 * 1024;
        for (reference, size) in [("fits", MIB), ("large", MIB + 1)] {
            ground.shop.answers_with(size);
            let done = ground
                .relay()
                .deliver::<Body, _>(reference, charge_of(1))
                .await
                .unwrap();
            assert_eq!(done.entry().status(), Some(StatusCode::CREATED));
            assert_eq!(done.entry().result().unwrap().is_some(), size == MIB);
            assert_eq!(body_of(done).await.len(), size);
        }
        let again = ground.relay().send::<Body, _>("large").await.unwrap();
        assert_eq!(
            (again.state(), again.status(), again.response().is_none()),
            (EntryState::Done, Some(StatusCode::CREATED), true)
        );
    }

    async fn an_end_that_cannot_be_recorded_is_told_and_recorded_by_a_later_resume(ground: Ground) {
        ground.refuse_to_settle().await;
        let relay = ground.relay();
        let told = relay.deliver::<Body, _>("r", charge_of(1)).await.unwrap();
        assert_eq!(
            (told.state(), told.entry().state()),
            (EntryState::Done, EntryState::Pending)
        );
        assert_eq!(told.unrecorded().unwrap().kind(), OutboxErrorKind::Database);
        assert_eq!(body_of(told).await, b"ch_1");
        assert_eq!(ground.outbox.counts().await.unwrap().pending, 1);

        ground.settle_again().await;
        let resumed = relay.resume::<Body, _>(10).await.unwrap();
        assert_eq!(
            (resumed.done.len(), kept(&resumed.done[0])),
            (1, b"ch_1".to_vec())
        );
        assert_eq!(
            (
                ground.shop.requests().len(),
                ground.shop.keys().len(),
                ground.shop.charges().len()
            ),
            (2, 1, 1)
        );
    }

    async fn a_database_that_comes_back_in_time_gets_the_record(ground: Ground) {
        ground.shop.close_gate();
        let relay = ground.relay();
        let sending =
            tokio::spawn(async move { relay.deliver::<Body, _>("r", charge_of(1)).await.unwrap() });
        eventually("the charge", || ground.shop.charges().len() == 1).await;
        ground.refuse_to_settle().await;
        ground.shop.open_gate();
        // Several tries fail meanwhile; whether they do changes nothing of what must come out.
        tokio::time::sleep(Duration::from_millis(200)).await;
        ground.settle_again().await;
        let done = sending.await.unwrap();
        assert_eq!(
            (done.unrecorded().is_none(), done.entry().state()),
            (true, EntryState::Done)
        );
    }

    async fn what_fails_again_and_again_holds_nobody_else_up(ground: Ground) {
        for number in 1..=6 {
            ground
                .outbox
                .begin(&format!("{number}"), charge_of(number))
                .await
                .unwrap();
            ground
                .age(
                    &format!("{number}"),
                    Duration::from_secs(3_600 - u64::from(number)),
                )
                .await;
        }
        ground.shop.is_down(true);
        let relay = ground.relay().concurrency(2);
        let first = relay.resume::<Body, _>(4).await.unwrap();
        let names = |unfinished: &[tower_idempotency::client::Unfinished]| {
            let mut names: Vec<_> = unfinished.iter().map(|one| one.reference.clone()).collect();
            names.sort();
            names.concat()
        };
        assert_eq!(names(&first.pending), "1234");
        // Next come those that have waited longest, then the first ones again.
        let second = relay.resume::<Body, _>(2).await.unwrap();
        assert_eq!(names(&second.pending), "56");
        let all = relay.resume::<Body, _>(100).await.unwrap();
        assert_eq!(
            (names(&all.pending), ground.shop.requests().len()),
            ("123456".to_owned(), 12)
        );
        assert!(relay.resume::<Body, _>(0).await.unwrap().pending.is_empty());
        assert_eq!(ground.shop.keys().len(), 6);
    }

    async fn a_row_that_is_damaged_stops_only_itself(ground: Ground) {
        for (reference, by) in [("damaged", 9), ("sound", 5)] {
            ground.outbox.begin(reference, charge_of(1)).await.unwrap();
            ground.age(reference, Duration::from_secs(by)).await;
        }
        let bytes = if IS_POSTGRES { r"'\x01ff'" } else { "x'01ff'" };
        ground
            .run(&format!(
                "UPDATE idempotency_outbox SET request = {bytes} WHERE reference = 'damaged'"
            ))
            .await;
        let resumed = ground.relay().resume::<Body, _>(1).await.unwrap();
        assert_eq!(
            (resumed.done.len(), resumed.done[0].reference()),
            (1, "sound")
        );
        let Undelivered::Outbox(error) = &resumed.pending[0].why else {
            panic!("{resumed:?}")
        };
        assert_eq!(
            (error.kind(), &*resumed.pending[0].reference),
            (OutboxErrorKind::Damaged, "damaged")
        );
        let left = ground.outbox.find("damaged").await.unwrap().unwrap();
        assert_eq!((left.state(), left.attempts()), (EntryState::Pending, 0));
    }
}

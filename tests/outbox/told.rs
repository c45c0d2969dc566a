//! What is told of an operation is what is true of it.

use std::{
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{Json, body::Body, response::IntoResponse};
use http::{Request, StatusCode};
use serde_json::json;
use tokio::time::sleep;
use tower::service_fn;
use tower_idempotency::client::{EntryState, Outcome, Relay, RetryLayer, Unanswered, Undelivered};
use tower_layer::Layer;

use crate::ground::{both, charge_of};

both! {
    async fn the_wait_that_any_end_names_is_kept(ground: Ground) {
        let mut sooner = Vec::new();
        for (status, code) in [(409, ""), (408, ""), (307, ""), (507, ""), (409, "idempotency_outcome_unknown")] {
            let number = Arc::new(AtomicUsize::new(0));
            let count = number.clone();
            let client = service_fn(move |_: Request<Body>| {
                count.fetch_add(1, Ordering::SeqCst);
                let status = StatusCode::from_u16(status).unwrap();
                let hint = [("retry-after", "3600")];
                let answer = match code {
                    "" => (status, hint).into_response(),
                    _ => (status, hint, Json(json!({ "code": code }))).into_response(),
                };
                async { Ok::<_, Infallible>(answer) }
            });
            let relay = Relay::new(ground.outbox.clone(), RetryLayer::new().layer(client));
            let reference = format!("{status} {code}");
            ground.outbox.begin(&reference, charge_of(1)).await.unwrap();
            for _ in 0..3 {
                relay.resume::<Body, Body>(10).await.unwrap();
                sleep(Duration::from_millis(3)).await;
            }
            if number.load(Ordering::SeqCst) != 1 {
                sooner.push((reference.clone(), number.load(Ordering::SeqCst)));
            }
            ground.outbox.settle(&reference, Outcome::Done, None).await.unwrap();
        }
        assert!(sooner.is_empty(), "{sooner:?}");
    }

    async fn a_wait_stays_as_long_as_the_longest_that_was_asked_for(ground: Ground) {
        let number = Arc::new(AtomicUsize::new(0));
        let count = number.clone();
        let client = service_fn(move |_: Request<Body>| {
            let wait = match count.fetch_add(1, Ordering::SeqCst) {
                0 => "3600",
                _ => "1800",
            };
            async move { Ok::<_, Infallible>((StatusCode::TOO_MANY_REQUESTS, [("retry-after", wait)]).into_response()) }
        });
        let relay = Relay::new(ground.outbox.clone(), RetryLayer::new().retries(0).layer(client));
        relay.deliver::<Body, Body>("r", charge_of(1)).await.unwrap_err();
        let first = ground.outbox.find("r").await.unwrap().unwrap().not_before();
        assert!(first.is_some());
        relay.send::<Body, Body>("r").await.unwrap_err();
        assert_eq!(ground.outbox.find("r").await.unwrap().unwrap().not_before(), first);
        // Nor does one that was counted, and never sent.
        let failing = RetryLayer::new().before_attempt(|_, _, _| Err("the signer is away".into()));
        let failing = Relay::new(ground.outbox.clone(), failing.layer(ground.shop.app()));
        failing.send::<Body, _>("r").await.unwrap_err();
        assert_eq!(ground.outbox.find("r").await.unwrap().unwrap().not_before(), first);
        assert!(relay.resume::<Body, Body>(10).await.unwrap().pending.is_empty());
        assert_eq!(number.load(Ordering::SeqCst), 2);
    }

    async fn an_overdue_entry_says_that_it_is_overdue(ground: Ground) {
        let lifetime = Duration::from_millis(400);
        let outbox = ground.outbox.clone().key_lifetime(lifetime);
        let retry = RetryLayer::new().attempt_timeout(Duration::from_millis(40)).before_attempt(move |_, _, _| {
            std::thread::sleep(lifetime);
            Ok(())
        });
        let relay = Relay::new(outbox, retry.layer(ground.shop.app()));
        let end = relay.deliver::<Body, _>("r", charge_of(1)).await.unwrap_err();
        let Undelivered::Overdue { entry, .. } = end else { panic!("{end:?}") };
        assert!(entry.is_overdue(), "{entry:?}");
    }

    async fn a_status_that_could_not_be_recorded_is_told(ground: Ground) {
        let client = service_fn(move |_: Request<Body>| {
            let body = json!({ "code": "idempotency_response_not_retained", "original_status": 201 });
            async { Ok::<_, Infallible>((StatusCode::CONFLICT, Json(body)).into_response()) }
        });
        let relay = Relay::new(ground.outbox.clone(), RetryLayer::new().layer(client));
        let known = relay.deliver::<Body, Body>("known", charge_of(1)).await.unwrap();
        assert_eq!(known.status(), Some(StatusCode::CREATED));
        ground.refuse_to_settle().await;
        let told = relay.deliver::<Body, Body>("r", charge_of(1)).await.unwrap();
        assert!(told.unrecorded().is_some());
        assert_eq!((told.state(), told.status()), (EntryState::Done, Some(StatusCode::CREATED)));
    }

    async fn what_somebody_else_has_settled_is_not_told_as_pending(ground: Ground) {
        let mut wrong = Vec::new();
        for status in [302, 503] {
            let outbox = ground.outbox.clone();
            let reference = status.to_string();
            let client = service_fn(move |_: Request<Body>| {
                let (outbox, reference) = (outbox.clone(), status.to_string());
                async move {
                    outbox.settle(&reference, Outcome::Done, None).await.unwrap();
                    Ok::<_, Infallible>(StatusCode::from_u16(status).unwrap().into_response())
                }
            });
            let relay = Relay::new(ground.outbox.clone(), RetryLayer::new().retries(0).layer(client));
            ground.outbox.begin(&reference, charge_of(1)).await.unwrap();
            let resumed = relay.resume::<Body, Body>(10).await.unwrap();
            if !resumed.pending.is_empty() {
                wrong.push(resumed);
            }
        }
        assert!(wrong.is_empty(), "{wrong:?}");
    }

    async fn what_became_overdue_in_a_resume_is_told_as_overdue(ground: Ground) {
        let outbox = ground.outbox.clone().key_lifetime(Duration::from_millis(600));
        let client = service_fn(move |_: Request<Body>| async {
            sleep(Duration::from_millis(50)).await;
            Ok::<_, Infallible>(StatusCode::CREATED.into_response())
        });
        outbox.begin("a", charge_of(1)).await.unwrap();
        outbox.begin("b", charge_of(1)).await.unwrap();
        let retry = RetryLayer::new().attempt_timeout(Duration::from_millis(60)).before_attempt(|_, _, _| {
            std::thread::sleep(Duration::from_millis(700));
            Ok(())
        });
        let relay = Relay::new(outbox, retry.layer(client)).concurrency(1);
        let resumed = relay.resume::<Body, Body>(10).await.unwrap();
        assert_eq!((resumed.overdue.len(), resumed.pending.len()), (2, 0), "{resumed:?}");
    }

    async fn an_attempt_that_the_hook_has_ended_counts(ground: Ground) {
        let sent = Arc::new(AtomicUsize::new(0));
        let (count, signer) = (sent.clone(), Arc::new(AtomicUsize::new(0)));
        let client = service_fn(move |_: Request<Body>| {
            count.fetch_add(1, Ordering::SeqCst);
            async { Ok::<_, Infallible>(StatusCode::UNAUTHORIZED.into_response()) }
        });
        let retry = RetryLayer::new().before_attempt(move |_, _, _| match signer.fetch_add(1, Ordering::SeqCst) {
            0 => Err("the signer is away".into()),
            _ => Ok(()),
        });
        let relay = Relay::new(ground.outbox.clone(), retry.layer(client));
        let end = relay.deliver::<Body, Body>("r", charge_of(1)).await.unwrap_err();
        assert!(matches!(end, Undelivered::Unanswered(Unanswered::NotSent(_))), "{end:?}");
        let end = relay.send::<Body, Body>("r").await;
        assert_eq!(sent.load(Ordering::SeqCst), 1);
        let row = ground.outbox.find("r").await.unwrap().unwrap();
        assert!(matches!(end, Err(Undelivered::Inconclusive(_))), "{end:?}");
        assert_eq!((row.state(), row.attempts()), (EntryState::Pending, 2));
    }

    async fn what_is_refused_again_after_a_reopening_has_failed_again(ground: Ground) {
        let sent = Arc::new(AtomicUsize::new(0));
        let count = sent.clone();
        let client = service_fn(move |_: Request<Body>| {
            count.fetch_add(1, Ordering::SeqCst);
            async { Ok::<_, Infallible>(StatusCode::UNAUTHORIZED.into_response()) }
        });
        let relay = Relay::new(ground.outbox.clone(), RetryLayer::new().layer(client));
        let first = relay.deliver::<Body, Body>("r", charge_of(1)).await.unwrap();
        assert_eq!(first.state(), EntryState::Failed);
        ground.outbox.reopen("r").await.unwrap();
        for _ in 0..4 {
            relay.resume::<Body, Body>(10).await.unwrap();
            sleep(Duration::from_millis(3)).await;
        }
        let row = ground.outbox.find("r").await.unwrap().unwrap();
        assert_eq!((row.state(), sent.load(Ordering::SeqCst)), (EntryState::Failed, 2));
    }

    async fn a_key_that_was_used_before_is_an_error_and_recorded_as_failed(ground: Ground) {
        let client = service_fn(move |_: Request<Body>| async {
            let body = Json(json!({ "code": "idempotency_key_reused" }));
            Ok::<_, Infallible>((StatusCode::CONFLICT, body).into_response())
        });
        let relay = Relay::new(ground.outbox.clone(), RetryLayer::new().layer(client));
        let end = relay.deliver::<Body, Body>("r", charge_of(1)).await;
        let row = ground.outbox.find("r").await.unwrap().unwrap();
        assert!(matches!(end, Err(Undelivered::Unanswered(Unanswered::Reused(_)))), "{end:?}");
        assert_eq!(row.state(), EntryState::Failed);
    }
}

//! What is recorded: only what an answer really tells of the operation.

use std::{
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{Json, body::Body, response::IntoResponse};
use http::{HeaderValue, Request, Response, StatusCode};
use http_body_util::BodyExt;
use serde_json::json;
use tower::{ServiceExt, service_fn};
use tower_idempotency::client::{
    Answered, EntryState, Outcome, Relay, Retry, RetryLayer, Unanswered, Undelivered,
};
use tower_layer::Layer;

use crate::ground::{both, charge_of};

/// A client whose connection breaks so often, and then gets this answer.
fn answers<F>(
    lost: usize,
    answer: F,
) -> Retry<
    impl tower::Service<Request<Body>, Response = Response<Body>, Error = std::io::Error, Future: Send>
    + Clone
    + Send,
>
where
    F: Fn() -> Response<Body> + Clone + Send + 'static,
{
    let number = Arc::new(AtomicUsize::new(0));
    let client = service_fn(move |_: Request<Body>| {
        let answer = match number.fetch_add(1, Ordering::SeqCst) < lost {
            true => Err(std::io::Error::from(std::io::ErrorKind::ConnectionReset)),
            false => Ok(answer()),
        };
        async move { answer }
    });
    let millisecond = Duration::from_millis(1);
    let retry = RetryLayer::new().retries(u32::try_from(lost).unwrap());
    retry.back_off(millisecond, millisecond).layer(client)
}

fn answer(status: u16, is_replay: bool) -> Response<Body> {
    let mut answer = StatusCode::from_u16(status).unwrap().into_response();
    if is_replay {
        let yes = HeaderValue::from_static("true");
        answer.headers_mut().insert("idempotent-replay", yes);
    }
    answer
}

/// Alone, after an attempt that was lost, and as a replay after one.
const TABLE: &[(&[u16], [EntryState; 3])] = {
    use EntryState::{Done, Failed, Pending};
    &[
        (&[200, 201, 202, 204, 303], [Done, Done, Done]),
        (
            &[300, 301, 302, 304, 305, 307, 308],
            [Pending, Pending, Done],
        ),
        (
            &[400, 401, 402, 403, 404, 405, 410, 412, 413, 422, 431, 451],
            [Failed, Pending, Failed],
        ),
        (&[408, 409, 425, 429, 499], [Pending, Pending, Pending]),
        (
            &[500, 501, 502, 503, 504, 505, 507, 520, 524, 598],
            [Pending, Pending, Pending],
        ),
    ]
};

both! {
    async fn an_answer_is_recorded_as_what_it_tells_and_no_more(ground: Ground) {
        let mut wrong = Vec::new();
        for (statuses, expected) in TABLE {
            for status in *statuses {
                for (case, expected) in expected.iter().enumerate() {
                    let (status, lost, is_replay) = (*status, case.min(1), case == 2);
                    let client = answers(lost, move || answer(status, is_replay));
                    let reference = format!("{status} {case}");
                    let relay = Relay::new(ground.outbox.clone(), client);
                    let end = relay.deliver(&reference, charge_of(1)).await;
                    let row = ground.outbox.find(&reference).await.unwrap().unwrap();
                    let told = match end {
                        Ok(delivered) => delivered.state(),
                        Err(Undelivered::Inconclusive(told)) if told.status() == status => EntryState::Pending,
                        // Statuses that pass are sent again by themselves.
                        Err(Undelivered::Unanswered(Unanswered::GaveUp(_))) if !is_replay => EntryState::Pending,
                        Err(other) => panic!("{reference}: {other:?}"),
                    };
                    if (told, row.state()) != (*expected, *expected) {
                        wrong.push((status, lost, is_replay, told, row.state()));
                    }
                }
            }
        }
        assert!(wrong.is_empty(), "{wrong:?}");
    }

    async fn an_inconclusive_answer_is_given_whole_and_settled_by_whoever_looked(ground: Ground) {
        let client = answers(0, || {
            (StatusCode::FOUND, [("location", "http://hush.example/")], "hush-body").into_response()
        });
        let relay = Relay::new(ground.outbox.clone(), client);
        let end = relay.deliver("hush-reference", charge_of(1)).await.unwrap_err();
        assert!(!format!("{end:?} {end}").contains("hush"), "{end:?} {end}");
        assert!(end.to_string().contains("302"));
        // An error that every error type can hold.
        let end: Box<dyn std::error::Error + Send + Sync> = end.into();
        let Undelivered::Inconclusive(told) = *end.downcast::<Undelivered>().unwrap() else { panic!() };
        assert_eq!((told.status(), told.entry().attempts()), (StatusCode::FOUND, 1));
        assert_eq!(told.headers()["location"], "http://hush.example/");
        let response = told.into_response();
        assert_eq!(response.extensions().get::<Answered>().unwrap().attempts, 1);
        let body = response.into_body().collect().await.unwrap().to_bytes();
        assert_eq!(&body[..], b"hush-body");

        let resumed = relay.resume(10).await.unwrap();
        assert!(matches!(resumed.pending[0].why, Undelivered::Inconclusive(_)), "{resumed:?}");
        assert!(!format!("{resumed:?}").contains("hush"), "{resumed:?}");
        ground.outbox.settle("hush-reference", Outcome::Failed, None).await.unwrap();
        assert!(relay.resume(10).await.unwrap().pending.is_empty());
    }

    async fn the_replay_after_a_refusal_tells_what_the_lost_attempt_did(ground: Ground) {
        let (app, number) = (ground.shop.app(), Arc::new(AtomicUsize::new(0)));
        let client = service_fn(move |request: Request<Body>| {
            let (app, number) = (app.clone(), number.clone());
            async move {
                match number.fetch_add(1, Ordering::SeqCst) {
                    // It charges, and the answer is lost; then the credential has expired.
                    0 => app.oneshot(request).await.map(|_| Err("connection reset")).unwrap(),
                    1 => Ok(StatusCode::UNAUTHORIZED.into_response()),
                    _ => Ok(app.oneshot(request).await.unwrap()),
                }
            }
        });
        let retry = RetryLayer::new().back_off(Duration::from_millis(1), Duration::from_millis(1));
        let relay = Relay::new(ground.outbox.clone(), retry.layer(client));
        let end = relay.deliver::<Body, Body>("r", charge_of(1)).await.unwrap_err();
        assert!(matches!(end, Undelivered::Inconclusive(_)), "{end:?}");
        let resumed = relay.resume::<Body, Body>(10).await.unwrap();
        assert_eq!((resumed.done.len(), ground.shop.charges().len()), (1, 1), "{resumed:?}");
    }

    async fn a_key_that_was_used_otherwise_says_nothing_of_a_lost_attempt(ground: Ground) {
        let reused = || (StatusCode::CONFLICT, Json(json!({ "code": "idempotency_key_reused" }))).into_response();
        for (lost, expected) in [(0, EntryState::Failed), (1, EntryState::Pending)] {
            let relay = Relay::new(ground.outbox.clone(), answers(lost, reused));
            let reference = lost.to_string();
            let end = relay.deliver(&reference, charge_of(1)).await.unwrap_err();
            assert!(matches!(end, Undelivered::Unanswered(Unanswered::Reused(_))), "{end:?}");
            assert_eq!(ground.outbox.find(&reference).await.unwrap().unwrap().state(), expected);
        }
        let resumed = Relay::new(ground.outbox.clone(), answers(0, reused)).resume(10).await.unwrap();
        assert_eq!((resumed.failed.len(), resumed.pending.len()), (0, 1));
    }

    // While the only attempt so far is being refused, another relay makes one whose answer is lost.
    async fn a_refusal_tells_nothing_once_there_is_another_attempt(ground: Ground) {
        let other = answers(1, || StatusCode::SERVICE_UNAVAILABLE.into_response());
        let other = Relay::new(ground.outbox.clone(), other);
        let client = service_fn(move |_: Request<Body>| {
            let other = other.clone();
            async move {
                let _ = other.send("r").await;
                Ok::<_, Infallible>(StatusCode::UNAUTHORIZED.into_response())
            }
        });
        let relay = Relay::new(ground.outbox.clone(), RetryLayer::new().layer(client));
        let end = relay.deliver::<Body, Body>("r", charge_of(1)).await.unwrap_err();
        assert!(matches!(end, Undelivered::Inconclusive(_)), "{end:?}");
        let row = ground.outbox.find("r").await.unwrap().unwrap();
        assert_eq!(row.state(), EntryState::Pending);
    }

    async fn what_the_server_ran_without_a_record_is_not_resumed(ground: Ground) {
        let requests = Arc::new(AtomicUsize::new(0));
        let count = requests.clone();
        let client = answers(0, move || {
            count.fetch_add(1, Ordering::SeqCst);
            let mark = [("idempotency-status", "unprotected")];
            (StatusCode::INTERNAL_SERVER_ERROR, mark).into_response()
        });
        let relay = Relay::new(ground.outbox.clone(), client);
        let end = relay.deliver("r", charge_of(1)).await.unwrap_err();
        assert!(matches!(end, Undelivered::Inconclusive(_)), "{end:?}");
        let resumed = relay.resume(10).await.unwrap();
        assert!(resumed.pending.is_empty(), "{resumed:?}");
        assert_eq!(requests.load(Ordering::SeqCst), 1);
    }

    async fn no_header_or_body_of_an_answer_shows_in_debug_output(ground: Ground) {
        let client = answers(0, || {
            (StatusCode::CREATED, [("set-cookie", "hush-cookie")], "hush-body").into_response()
        });
        let relay = Relay::new(ground.outbox.clone(), client);
        let fresh = relay.deliver("hush-reference", charge_of(1)).await.unwrap();
        let again = relay.send("hush-reference").await.unwrap();
        let shown = format!("{fresh:?} {again:?}");
        assert!(shown.contains("201") && !shown.contains("hush"), "{shown}");
    }
}

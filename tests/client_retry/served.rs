//! The client against the layer of this crate, in one process.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{Router, body::Body, extract::Request as AxumRequest, middleware::Next};
use http::{Request, Response};
use tokio::time::Instant;
use tower::{Layer, ServiceExt};
use tower_idempotency::{
    IdempotencyKey, IdempotencyLayer, MemoryStore, Profile,
    client::{Answered, RetryLayer, Unanswered},
};

use crate::{
    script::text,
    support::{Handler, puppet::Puppet},
};

fn layer() -> IdempotencyLayer<MemoryStore> {
    IdempotencyLayer::new(MemoryStore::new()).single_tenant()
}

fn charge(key: &str, body: &'static str) -> Request<Body> {
    let mut request = Request::post("/charges").body(Body::from(body)).unwrap();
    request.extensions_mut().insert(IdempotencyKey::new(key));
    request
}

/// When requests came to the server.
#[derive(Clone, Default)]
struct Came(Arc<Mutex<Vec<Instant>>>);

impl Came {
    fn watch(&self, app: Router) -> Router {
        let came = self.clone();
        app.layer(axum::middleware::from_fn(
            move |request: AxumRequest, next: Next| {
                came.0.lock().unwrap().push(Instant::now());
                next.run(request)
            },
        ))
    }

    fn times(&self) -> Vec<Instant> {
        self.0.lock().unwrap().clone()
    }

    /// Time flies while nothing else happens.
    async fn reaches(&self, times: usize) {
        while self.times().len() < times {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

fn answered(response: &Response<Body>) -> &Answered {
    response.extensions().get().unwrap()
}

// X4
#[tokio::test(start_paused = true)]
async fn a_request_that_is_still_running_is_waited_for_as_the_server_asks_and_then_replayed() {
    for layer in [layer(), layer().profile(Profile::Gateway)] {
        let (router, mut puppet) = Puppet::new();
        let app = router.route_layer(layer);
        let first = RetryLayer::new().layer(app.clone());
        let first = tokio::spawn(first.oneshot(charge("order-17", "250 baht")));
        let run = puppet.next().await;

        let came = Came::default();
        let second = RetryLayer::new().layer(came.watch(app));
        let second = tokio::spawn(second.oneshot(charge("order-17", "250 baht")));
        came.reaches(3).await;
        run.answers(201, "ch_1");

        let first = first.await.unwrap().unwrap();
        let second = second.await.unwrap().unwrap();
        assert_eq!(
            (answered(&first).attempts, answered(&first).replayed),
            (1, false)
        );
        assert_eq!(
            (answered(&second).attempts, answered(&second).replayed),
            (4, true)
        );
        assert_eq!(text(second).await, text(first).await);
        assert_eq!(puppet.begun(), 1);
        for two in came.times().windows(2) {
            let wait = two[1] - two[0];
            assert!(wait >= Duration::from_secs(1), "hammered: {wait:?}");
            assert!(wait <= Duration::from_millis(1_251), "{wait:?}");
        }
    }
}

// X1
#[tokio::test(start_paused = true)]
async fn a_slow_first_run_is_never_run_again_by_the_attempts_after_its_time_out() {
    let handler = Handler::new();
    handler.close_gate();
    let came = Came::default();
    let app = came.watch(handler.behind(layer()));
    let client = RetryLayer::new()
        .attempt_timeout(Duration::from_secs(2))
        .layer(app);
    let charged = tokio::spawn(client.oneshot(charge("order-17", "250 baht")));
    came.reaches(4).await;
    handler.open_gate();
    let answer = charged.await.unwrap().unwrap();
    assert_eq!(
        (answer.status().as_u16(), answered(&answer).replayed),
        (201, true)
    );
    assert_eq!(text(answer).await, r#"{"charge":1}"#);
    assert_eq!(handler.effects(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_slow_run_that_outlasts_all_attempts_is_still_in_flight_and_answers_the_same_key_later() {
    let handler = Handler::new();
    handler.close_gate();
    let app = handler.behind(layer());
    let client = RetryLayer::new()
        .attempt_timeout(Duration::from_secs(2))
        .layer(app);
    let sent = client.clone().oneshot(charge("order-17", "250 baht")).await;
    let Err(Unanswered::StillInFlight(ended)) = sent else {
        panic!("{sent:?}");
    };
    handler.open_gate();
    let mut again = charge("other", "250 baht");
    again.extensions_mut().insert(ended.key().clone());
    let answer = client.oneshot(again).await.unwrap();
    assert_eq!((answer.status().as_u16(), handler.effects()), (201, 1));
}

#[tokio::test(start_paused = true)]
async fn bare_and_quoted_spell_one_key() {
    let handler = Handler::new();
    let app = handler.behind(layer());
    let bare = RetryLayer::new().layer(app.clone());
    let quoted = RetryLayer::new().quoted().layer(app);
    bare.oneshot(charge("order-17", "250 baht")).await.unwrap();
    let answer = quoted
        .oneshot(charge("order-17", "250 baht"))
        .await
        .unwrap();
    assert!(answered(&answer).replayed);
    assert_eq!(handler.effects(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_recorded_failure_is_the_answer_and_a_released_one_is_asked_for_again() {
    // The layer keeps a 500 and a 503, and frees the key of a 429.
    for (status, effects, marked) in [(500, 1, true), (503, 1, true), (429, 2, false)] {
        let handler = Handler::answering(move |seen| {
            let status = if seen.run == 1 { status } else { 201 };
            Response::builder()
                .status(status)
                .body(Body::empty())
                .unwrap()
        });
        let app = handler.behind(layer());
        let client = RetryLayer::new().layer(app);
        let answer = client
            .oneshot(charge("order-17", "250 baht"))
            .await
            .unwrap();
        assert_eq!(
            (handler.effects(), answered(&answer).replayed),
            (effects, marked)
        );
        let expected = if marked { status } else { 201 };
        assert_eq!(answer.status().as_u16(), expected);
        assert_eq!(answered(&answer).attempts, 2);
    }
}

#[tokio::test(start_paused = true)]
async fn a_key_that_belongs_to_another_request_is_told_as_the_callers_mistake() {
    for (profile, status) in [
        (Profile::Gateway, 409),
        (Profile::Ietf, 422),
        (Profile::Stripe, 400),
    ] {
        let handler = Handler::new();
        let client = RetryLayer::new().layer(handler.behind(layer().profile(profile)));
        client
            .clone()
            .oneshot(charge("order-17", "250 baht"))
            .await
            .unwrap();
        let sent = client.oneshot(charge("order-17", "999 baht")).await;
        let Err(Unanswered::Reused(ended)) = sent else {
            panic!("{sent:?}");
        };
        assert_eq!(ended.response().unwrap().status().as_u16(), status);
        assert_eq!((ended.attempts(), handler.effects()), (1, 1));
    }
}

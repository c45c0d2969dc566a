//! The client against the layer of this crate, in one process.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{Router, body::Body, extract::Request as AxumRequest, middleware::Next};
use http::{Request, Response};
use tokio::time::Instant;
use tower::{Layer, ServiceBuilder, ServiceExt, service_fn};
use tower_http::{compression::CompressionLayer, decompression::DecompressionLayer};
use tower_idempotency::{
    IdempotencyKey, IdempotencyLayer, MemoryStore, Profile, StoreFailure,
    client::{Answered, Attempt, RetryLayer, Unanswered},
    testing::{Fault, FaultyStore, Operation, Times},
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

#[tokio::test(start_paused = true)]
async fn refusals_that_are_compressed_are_never_taken_for_answers() {
    let handler = Handler::new();
    let app = handler.behind(layer()).layer(CompressionLayer::new());
    let retry = RetryLayer::new().attempt_timeout(Duration::from_secs(2));
    let outside = ServiceBuilder::new()
        .layer(DecompressionLayer::new())
        .layer(retry.clone())
        .service(app.clone());

    // X4
    handler.close_gate();
    let slow = outside.clone().oneshot(charge("order-17", "250 baht"));
    let slow = tokio::spawn(slow);
    tokio::time::sleep(Duration::from_millis(4_500)).await;
    handler.open_gate();
    assert_eq!(slow.await.unwrap().unwrap().status().as_u16(), 201);
    assert_eq!(handler.effects(), 1);

    let reused = outside.oneshot(charge("order-17", "999 baht")).await;
    let Err(Unanswered::GaveUp(ended)) = reused else {
        panic!("{:?}", reused.map(|answer| answer.status()));
    };
    assert!(ended.source().unwrap().to_string().contains("compressed"));
    let inside = retry.layer(DecompressionLayer::new().layer(app));
    let reused = inside.oneshot(charge("order-17", "999 baht")).await;
    let reused = reused.map(|answer| answer.status());
    assert!(matches!(reused, Err(Unanswered::Reused(_))), "{reused:?}");
    assert_eq!(handler.effects(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_run_without_protection_that_failed_is_not_run_again() {
    let store = FaultyStore::new(MemoryStore::new());
    store.fail(Operation::Claim, Fault::Before, Times::Always);
    let layer = IdempotencyLayer::new(store)
        .single_tenant()
        .store_failure(StoreFailure::RunUnprotected);
    let handler = Handler::answering(|_| {
        let answer = Response::builder().status(502);
        answer.body(Body::from("charged, and then?")).unwrap()
    });
    let client = RetryLayer::new().layer(handler.behind(layer));
    let answer = client.oneshot(charge("order-17", "250 baht")).await;
    assert_eq!(answer.unwrap().status().as_u16(), 502);
    assert_eq!(handler.effects(), 1);
}

// As the hook's documentation says.
#[tokio::test(start_paused = true)]
async fn a_nonce_in_the_query_makes_the_next_attempt_another_request() {
    for (in_query, status) in [(true, None), (false, Some(201))] {
        let handler = Handler::new();
        let app = handler.behind(layer());
        let lossy = service_fn(move |request: Request<Body>| {
            let app = app.clone();
            async move {
                let is_first = request.extensions().get::<Attempt>().unwrap().number == 1;
                let answer = app.oneshot(request).await.unwrap();
                match is_first {
                    true => Err(std::io::Error::other("lost")),
                    false => Ok(answer),
                }
            }
        });
        let layer = RetryLayer::new().before_attempt(move |head, _, attempt| {
            match in_query {
                true => head.uri = format!("/charges?nonce={}", attempt.number).parse()?,
                false => drop(head.headers.insert("nonce", attempt.number.into())),
            }
            Ok(())
        });
        let sent = layer
            .layer(lossy)
            .oneshot(charge("order-17", "250 baht"))
            .await;
        match sent {
            Ok(answer) => assert_eq!(Some(answer.status().as_u16()), status),
            Err(Unanswered::Reused(_)) => assert_eq!(status, None),
            Err(other) => panic!("{other:?}"),
        }
        assert_eq!(handler.effects(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn clients_with_one_key_at_once_have_one_effect_and_one_answer() {
    let handler = Handler::new();
    handler.close_gate();
    let client = RetryLayer::new()
        .attempt_timeout(Duration::from_secs(1))
        .layer(handler.behind(layer()));
    let mut clients = tokio::task::JoinSet::new();
    for _ in 0..20 {
        clients.spawn(client.clone().oneshot(charge("order-17", "250 baht")));
    }
    tokio::time::sleep(Duration::from_millis(2_500)).await;
    handler.open_gate();
    for sent in clients.join_all().await {
        assert_eq!(text(sent.unwrap()).await, r#"{"charge":1}"#);
    }
    assert_eq!(handler.effects(), 1);
}

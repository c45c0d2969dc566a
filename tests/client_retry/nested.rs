//! With other layers around and inside, other layers of this sort among them.

use std::{convert::Infallible, io, time::Duration};

use axum::{Router, body::Body, routing::post};
use bytes::Bytes;
use http::{Method, Request, Response, StatusCode};
use http_body_util::Full;
use tower::{
    BoxError, Layer, Service, ServiceBuilder, ServiceExt,
    util::{BoxCloneService, BoxCloneSyncService},
};
use tower_idempotency::{
    IdempotencyKey,
    client::{Answered, Retry, RetryLayer, Unanswered},
};

use crate::script::{Script, charge, problem, says, unreachable};

#[tokio::test(start_paused = true)]
async fn what_a_layer_inside_has_settled_is_not_sent_again() {
    let reused = || problem(409, r#"{"code":"idempotency_key_reused"}"#);
    let script = Script::new([reused(), reused()]);
    let inner = RetryLayer::new().layer(script.client());
    let sent = RetryLayer::new().layer(inner).oneshot(charge()).await;
    assert!(matches!(sent, Err(Unanswered::Reused(_))), "{sent:?}");
    assert_eq!(script.attempts(), 1);

    // Also in the box that a time-out in between puts it in.
    let script = Script::new(std::iter::repeat_with(unreachable).take(9));
    let client = ServiceBuilder::new()
        .layer(RetryLayer::new())
        .timeout(Duration::from_secs(60))
        .layer(RetryLayer::new().retries(2))
        .service(script.client());
    let sent = client.oneshot(charge()).await;
    let Err(Unanswered::GaveUp(ended)) = sent else {
        panic!("{sent:?}");
    };
    assert_eq!((ended.attempts(), script.attempts()), (3, 3));
    assert!(ended.source().unwrap().is::<io::Error>());
    assert_eq!(ended.key().as_bytes(), script.key());
}

#[tokio::test(start_paused = true)]
async fn what_a_layer_inside_does_not_cover_is_the_outer_ones() {
    let script = Script::new([unreachable()]);
    let inner = RetryLayer::new().layer(script.client());
    let outer = RetryLayer::new().methods([Method::DELETE]);
    let delete = Request::delete("/charges/1").body(Body::empty()).unwrap();
    let answer = outer.layer(inner).oneshot(delete).await.unwrap();
    assert_eq!(answer.extensions().get::<Answered>().unwrap().attempts, 2);
    script.key();
}

#[tokio::test(start_paused = true)]
async fn that_a_layer_inside_sent_nothing_is_said_only_if_nothing_was_sent_before() {
    let script = Script::default();
    let inner = RetryLayer::new().request_body_limit(1);
    let outer = RetryLayer::new().layer(inner.layer(script.client()));
    let sent = outer.oneshot(charge()).await;
    assert!(matches!(sent, Err(Unanswered::NotSent(_))), "{sent:?}");
    assert_eq!(script.attempts(), 0);

    let script = Script::new([says(503, "")]);
    let inner = RetryLayer::new()
        .retries(0)
        .methods([Method::PUT])
        .before_attempt(|_, _, _| Err("no signature".into()));
    // The first attempt goes around the inner layer, and the second one into it.
    let outer = RetryLayer::new().before_attempt(|head, _, attempt| {
        if attempt.number == 2 {
            head.method = Method::PUT;
        }
        Ok(())
    });
    let client = outer.layer(inner.layer(script.client()));
    let sent = client.oneshot(charge()).await;
    let Err(Unanswered::GaveUp(ended)) = sent else {
        panic!("{sent:?}");
    };
    assert_eq!((ended.attempts(), script.attempts()), (1, 1));
    assert_eq!(ended.response().unwrap().status().as_u16(), 503);
}

#[tokio::test(start_paused = true)]
async fn the_outer_layers_key_holds_inside() {
    let script = Script::new([unreachable(), says(503, "")]);
    let keyed =
        |key: &'static str| RetryLayer::new().keys(move |_, _| Some(IdempotencyKey::new(key)));
    let client = keyed("outer").layer(keyed("inner").layer(script.client()));
    let answer = client.oneshot(charge()).await.unwrap();
    assert_eq!(script.key(), b"outer");
    let answered = answer.extensions().get::<Answered>().unwrap();
    assert_eq!(answered.key.as_str(), Some("outer"));
}

#[tokio::test]
async fn boxes_limits_buffers_and_time_outs_fit_around_and_inside() {
    let app = Router::new().route("/charges", post(|| async { StatusCode::CREATED }));
    let hyper = || {
        let app = app.clone();
        tower::service_fn(move |request: Request<Full<Bytes>>| {
            app.clone().oneshot(request.map(Body::new))
        })
    };
    let charge = || {
        let request = Request::post("/charges");
        request.body(Full::new(Bytes::from("250 baht"))).unwrap()
    };
    let boxed: BoxCloneService<Request<Full<Bytes>>, Response<Body>, Unanswered> =
        BoxCloneService::new(RetryLayer::new().layer(hyper()));
    assert_eq!(boxed.oneshot(charge()).await.unwrap().status(), 201);
    let sync: BoxCloneSyncService<Request<Full<Bytes>>, Response<Body>, BoxError> =
        BoxCloneSyncService::new(
            ServiceBuilder::new()
                .timeout(Duration::from_secs(5))
                .layer(RetryLayer::new())
                .buffer(4)
                .concurrency_limit(2)
                .timeout(Duration::from_secs(2))
                .service(hyper()),
        );
    assert_eq!(sync.oneshot(charge()).await.unwrap().status(), 201);
    let inner: BoxCloneService<Request<Body>, Response<Body>, Infallible> =
        BoxCloneService::new(app.clone());
    let mut client = Retry::new(inner);
    let request = charge().map(Body::new);
    let client = client.ready().await.unwrap();
    assert_eq!(client.call(request).await.unwrap().status(), 201);
}

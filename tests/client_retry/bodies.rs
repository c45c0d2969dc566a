//! Bodies of requests and answers.

use std::io;

use axum::body::Body;
use http::{HeaderMap, Request};
use http_body_util::BodyExt;
use tower_idempotency::client::{Answered, RetryLayer, Unanswered};

use crate::{
    script::{Script, answer, charge, says, text, unreachable},
    support::bodies::{Pieces, channel},
};

fn charging(body: Body) -> Request<Body> {
    Request::post("/charges").body(body).unwrap()
}

#[tokio::test(start_paused = true)]
async fn every_attempt_has_the_whole_body() {
    let script = Script::new([unreachable(), says(503, "")]);
    let body = Pieces::new(["250", " ", "baht"]).body();
    script
        .send(RetryLayer::new(), charging(body))
        .await
        .unwrap();
    assert_eq!(script.bodies(), ["250 baht"; 3]);
}

#[tokio::test(start_paused = true)]
async fn a_body_beyond_the_limit_is_not_sent_and_not_read_further() {
    let layer = RetryLayer::new().request_body_limit(8);
    let script = Script::default();
    script.send(layer.clone(), charge()).await.unwrap();
    assert_eq!(script.attempts(), 1);

    let endless = Pieces::endless("250");
    let taken = endless.taken();
    for body in [Body::from("250 bahts"), endless.body()] {
        let unanswered = script
            .send(layer.clone(), charging(body))
            .await
            .unwrap_err();
        assert!(
            matches!(unanswered, Unanswered::NotSent(_)),
            "{unanswered:?}"
        );
        assert!(unanswered.to_string().contains("request_body_limit"));
    }
    assert_eq!(taken.load(std::sync::atomic::Ordering::SeqCst), 3);
    assert_eq!(script.attempts(), 1);
}

#[tokio::test(start_paused = true)]
async fn sixteen_mebibytes_are_kept_by_default() {
    let script = Script::default();
    let sixteen = 16 * 1024 * 1024;
    let body = Body::from(vec![b'x'; sixteen]);
    script
        .send(RetryLayer::new(), charging(body))
        .await
        .unwrap();
    let body = Body::from(vec![b'x'; sixteen + 1]);
    let sent = script.send(RetryLayer::new(), charging(body)).await;
    assert!(matches!(sent, Err(Unanswered::NotSent(_))));
    assert_eq!(script.attempts(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_body_that_cannot_be_read_or_kept_whole_is_not_sent() {
    let script = Script::default();
    let broken = charging(Pieces::new(["250"]).then_error().body());
    let unanswered = script.send(RetryLayer::new(), broken).await.unwrap_err();
    assert!(matches!(unanswered, Unanswered::NotSent(_)));
    assert!(std::error::Error::source(&unanswered).is_some());

    let trailers = HeaderMap::from_iter([("x-sum".parse().unwrap(), "1".parse().unwrap())]);
    let body = Pieces::new(["250"]).then_trailers(trailers).body();
    let sent = script.send(RetryLayer::new(), charging(body)).await;
    assert!(matches!(sent, Err(Unanswered::NotSent(_))));
    assert_eq!(script.attempts(), 0);
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_breaks_off_is_asked_for_again() {
    let half = || Ok(answer(201, &[], Pieces::new(["do"]).then_error().body()));
    let script = Script::new([half()]);
    let answer = script.send(RetryLayer::new(), charge()).await.unwrap();
    assert_eq!(answer.extensions().get::<Answered>().unwrap().attempts, 2);
    assert_eq!(text(answer).await, "done");
    script.key();

    let script = Script::new([half(), half()]);
    let unanswered = script.send(RetryLayer::new().retries(1), charge()).await;
    let Err(Unanswered::GaveUp(ended)) = unanswered else {
        panic!("{unanswered:?}");
    };
    let source = ended.source().unwrap();
    assert!(source.is::<io::Error>(), "{source:?}");
    assert!(ended.response().is_none() && !ended.is_timeout());
}

#[tokio::test(start_paused = true)]
async fn an_answer_is_handed_on_whole_with_what_it_brings() {
    let trailers = HeaderMap::from_iter([("x-sum".parse().unwrap(), "1".parse().unwrap())]);
    let body = Pieces::new(["do", "ne"]).then_trailers(trailers.clone());
    let mut first = answer(201, &[("location", "/charges/1")], body.body());
    first.extensions_mut().insert(17_u8);
    let script = Script::new([Ok(first)]);
    let answer = script.send(RetryLayer::new(), charge()).await.unwrap();
    assert_eq!(answer.headers()["location"], "/charges/1");
    assert_eq!(answer.extensions().get::<u8>(), Some(&17));
    let body = answer.into_body().collect().await.unwrap();
    assert_eq!(body.trailers(), Some(&trailers));
    assert_eq!(body.to_bytes(), "done");
}

#[tokio::test(start_paused = true)]
async fn an_answer_beyond_the_limit_is_handed_on_as_it_comes() {
    let layer = RetryLayer::new().response_body_limit(4);
    let script = Script::new([Ok(answer(201, &[], "12345"))]);
    let whole = script.send(layer.clone(), charge()).await.unwrap();
    assert_eq!(
        (text(whole).await.as_str(), script.attempts()),
        ("12345", 1)
    );

    // What breaks off after that is the caller's.
    let broken = Pieces::new(["123", "45", "6"]).then_error().body();
    let script = Script::new([Ok(answer(201, &[], broken))]);
    let answer = script.send(layer, charge()).await.unwrap();
    assert_eq!(script.attempts(), 1);
    assert!(answer.into_body().collect().await.is_err());
}

#[tokio::test(start_paused = true)]
async fn a_stream_is_handed_on_as_it_comes() {
    let (mut sender, body) = channel();
    let kind = [("content-type", "text/event-stream; charset=utf-8")];
    let script = Script::new([Ok(answer(200, &kind, body))]);
    let answer = script.send(RetryLayer::new(), charge()).await.unwrap();
    sender.send_data("data: 1\n\n".into()).await.unwrap();
    drop(sender);
    assert_eq!(
        (text(answer).await.as_str(), script.attempts()),
        ("data: 1\n\n", 1)
    );
}

#[tokio::test(start_paused = true)]
async fn what_a_refusal_says_is_read_whatever_the_limit() {
    let body = r#"{"code":"idempotency_key_reused","detail":"…"}"#;
    let script = Script::new([crate::script::problem(409, body)]);
    let layer = RetryLayer::new().response_body_limit(0);
    let sent = script.send(layer, charge()).await;
    assert!(matches!(sent, Err(Unanswered::Reused(_))), "{sent:?}");
}

#[tokio::test(start_paused = true)]
async fn a_failure_too_large_to_be_read_is_judged_by_its_status() {
    let large = || answer(503, &[], Pieces::new(vec!["busy"; 300_000]).body());
    let script = Script::new([Ok(large()), Ok(large())]);
    let sent = script.send(RetryLayer::new().retries(1), charge()).await;
    let Err(Unanswered::GaveUp(ended)) = sent else {
        panic!("{sent:?}");
    };
    assert_eq!(ended.attempts(), 2);
    assert!(ended.response().unwrap().body().is_empty());
}

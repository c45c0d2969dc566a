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

/// A body that stops in the middle, and never ends.
fn hanging() -> Body {
    let (mut sender, body) = channel();
    sender
        .try_send(http_body::Frame::data("{}\n".into()))
        .unwrap();
    std::mem::forget(sender);
    body
}

fn breaking() -> Body {
    Pieces::new(["{}"]).then_error().body()
}

#[tokio::test(start_paused = true)]
async fn the_head_of_an_error_counts_where_its_body_does_not_come_to_its_end() {
    for (body, is_timeout) in [(breaking as fn() -> Body, false), (hanging, true)] {
        // One that the status alone would settle is sent again too: only the whole of it says what it is.
        for status in [402, 409, 503] {
            let cut = || Ok(answer(status, &[("retry-after", "7")], body()));
            let script = Script::new([cut()]);
            let answer = script.send(RetryLayer::new(), charge()).await.unwrap();
            assert_eq!((answer.status().as_u16(), script.attempts()), (201, 2));

            let script = Script::new([cut(), cut()]);
            let sent = script.send(RetryLayer::new().retries(1), charge()).await;
            let Err(Unanswered::GaveUp(ended)) = sent else {
                panic!("{sent:?}");
            };
            assert_eq!(ended.attempts(), 2);
            assert_eq!(ended.is_timeout(), is_timeout);
            assert!(ended.source().is_some());
            assert_eq!(ended.retry_after(), Some(std::time::Duration::from_secs(7)));
            let response = ended.into_response().unwrap();
            assert_eq!(response.status().as_u16(), status);
            assert_eq!(response.headers()["retry-after"], "7");
            assert!(response.body().is_empty());
        }
    }
}

#[tokio::test(start_paused = true)]
async fn the_body_of_an_unprotected_answer_is_the_callers_however_it_ends() {
    for (status, body) in [
        (500, breaking as fn() -> Body),
        (201, breaking),
        (503, hanging),
    ] {
        let fields = [("idempotency-status", "unprotected")];
        let script = Script::new([Ok(answer(status, &fields, body()))]);
        let answer = script.send(RetryLayer::new(), charge()).await.unwrap();
        assert_eq!((answer.status().as_u16(), script.attempts()), (status, 1));
    }
}

#[tokio::test(start_paused = true)]
async fn with_a_limit_of_zero_slow_streams_of_any_type_are_handed_on() {
    let kind = [("content-type", "application/x-ndjson")];
    let (mut sender, body) = channel();
    let script = Script::new([Ok(answer(201, &kind, body))]);
    let layer = RetryLayer::new().response_body_limit(0);
    let answered = script.send(layer, charge()).await.unwrap();
    assert_eq!((answered.status().as_u16(), script.attempts()), (201, 1));
    // Not even its beginning is waited for.
    sender.send_data("{}\n".into()).await.unwrap();
    drop(sender);
    assert_eq!(text(answered).await, "{}\n");

    let script = Script::new([Ok(answer(201, &kind, hanging()))]);
    script.send(RetryLayer::new(), charge()).await.unwrap();
    assert_eq!(script.attempts(), 2);
}

#[tokio::test(start_paused = true)]
async fn an_error_beyond_the_limit_is_kept_up_to_sixty_four_kibibytes() {
    let layer = RetryLayer::new().retries(0).response_body_limit(10);
    for (length, kept) in [(64 * 1024, 64 * 1024), (64 * 1024 + 1, 0)] {
        let script = Script::new([Ok(answer(503, &[], "x".repeat(length)))]);
        let sent = script.send(layer.clone(), charge()).await;
        let response = sent.unwrap_err().into_ended().unwrap().into_response();
        assert_eq!(response.unwrap().body().len(), kept);
    }
}

#[tokio::test]
async fn a_request_whose_body_never_ends_does_not_outrun_its_time() {
    let script = Script::default();
    let layer = RetryLayer::new().total_timeout(std::time::Duration::from_millis(50));
    let endless = Pieces::endless("").body();
    let sent = script.send(layer, charging(endless)).await;
    assert!(matches!(sent, Err(Unanswered::NotSent(_))), "{sent:?}");
    assert_eq!(script.attempts(), 0);
}

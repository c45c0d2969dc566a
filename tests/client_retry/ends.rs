//! How an operation ends without an answer, and what is told about it.

use std::error::Error;

use tower_idempotency::{
    IdempotencyKey,
    client::{RetryLayer, Unanswered},
};
use tracing::Level;

use crate::{
    script::{Script, answer, charge, problem, says, unreachable},
    support::logs::{Logs, Written},
};

const SECRET: &str = "order-17-of-Ms-Somchai";

/// Each way to end, of a request whose key, body, query and answer are nobody's business.
async fn each() -> Vec<Unanswered> {
    let in_flight = r#"{"code":"idempotency_in_flight","note":"4111-secret"}"#;
    let not_retained = r#"{"code":"idempotency_response_not_retained","original_status":201}"#;
    let mut ends = Vec::new();
    for first in [
        problem(
            409,
            r#"{"code":"idempotency_key_reused","note":"4111-secret"}"#,
        ),
        problem(409, in_flight),
        problem(409, r#"{"code":"idempotency_outcome_unknown"}"#),
        problem(409, not_retained),
        Ok(answer(503, &[("x-token", "4111-secret")], "4111-secret")),
        Err(std::io::Error::other("4111-secret")),
    ] {
        let script = Script::new([first]);
        let mut request = charge();
        request.extensions_mut().insert(IdempotencyKey::new(SECRET));
        let sent = script.send(RetryLayer::new().retries(0), request).await;
        ends.push(sent.unwrap_err());
    }
    ends
}

#[tokio::test(start_paused = true)]
async fn each_end_says_that_the_key_stays_and_the_state_is_to_be_looked_up() {
    for unanswered in each().await {
        let sentence = unanswered.to_string();
        assert!(sentence.contains("do not replace"), "{sentence}");
        assert!(sentence.contains("look up the true state"), "{sentence}");
        let key = unanswered.key().unwrap();
        assert_eq!(key.as_str(), Some(SECRET));
        assert_eq!(unanswered.ended().unwrap().attempts(), 1);
    }
    let unanswered = &each().await[0];
    assert!(matches!(unanswered, Unanswered::Reused(_)));
    assert!(
        unanswered
            .to_string()
            .contains("do not send this one again")
    );
}

#[tokio::test(start_paused = true)]
async fn what_was_not_sent_is_not_said_to_have_been() {
    let script = Script::default();
    let layer = RetryLayer::new().before_attempt(|_, _, _| Err("no signature".into()));
    let unanswered = script.send(layer, charge()).await.unwrap_err();
    assert!(unanswered.to_string().starts_with("nothing was sent"));
}

#[tokio::test(start_paused = true)]
async fn no_end_shows_a_secret() {
    for unanswered in each().await {
        let shown = format!("{unanswered} {unanswered:?} {unanswered:#?}");
        for secret in [SECRET, "4111", "250 baht", "pay.example"] {
            assert!(!shown.contains(secret), "{shown}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn an_end_goes_through_a_box_and_tells_its_source() {
    fn boxed(unanswered: Unanswered) -> Box<dyn Error + Send + Sync> {
        unanswered.into()
    }
    let script = Script::new([unreachable()]);
    let sent = script.send(RetryLayer::new().retries(0), charge()).await;
    let error = boxed(sent.unwrap_err());
    let source: &std::io::Error = error.source().unwrap().downcast_ref().unwrap();
    assert_eq!(source.kind(), std::io::ErrorKind::ConnectionRefused);
    assert!(error.is::<Unanswered>());
}

#[tokio::test(start_paused = true)]
async fn every_attempt_that_failed_and_every_end_is_an_event_without_secrets() {
    let (logs, _guard) = Logs::of_this_thread();
    let own = Err(std::io::Error::other("http://pay.example/?card=4111"));
    let refused = Ok(answer(503, &[("x-token", "4111")], "4111"));
    let script = Script::new([unreachable(), refused, own]);
    let mut request = charge();
    request.extensions_mut().insert(IdempotencyKey::new(SECRET));
    let layer = RetryLayer::new().retries(2);
    script.send(layer, request).await.unwrap_err();

    let mut logged = logs.all();
    logged.retain(|event| event.target == "tower_idempotency::client");
    let texts: Vec<_> = logged.iter().map(|event| event.text.as_str()).collect();
    assert_eq!(logged.len(), 3, "{texts:?}");
    assert!(texts[0].contains("attempt=1") && texts[0].contains("network=ConnectionRefused"));
    assert!(texts[1].contains("attempt=2") && texts[1].contains("status=503"));
    assert!(texts[2].contains("attempts=3") && texts[2].contains("gave_up"));
    let levels: Vec<_> = logged.iter().map(|event| event.level).collect();
    assert_eq!(levels, [Level::DEBUG, Level::DEBUG, Level::WARN]);
}

#[tokio::test(start_paused = true)]
async fn a_reused_key_is_an_error_and_an_answer_no_event() {
    let (logs, _guard) = Logs::of_this_thread();
    let reused = problem(409, r#"{"code":"idempotency_key_reused"}"#);
    let script = Script::new([reused, says(402, "declined")]);
    script.send(RetryLayer::new(), charge()).await.unwrap_err();
    script.send(RetryLayer::new(), charge()).await.unwrap();
    let mut logged = logs.all();
    logged.retain(|event| event.target == "tower_idempotency::client");
    assert_eq!(logged.len(), 1);
    assert_eq!(logged[0].level, Level::ERROR);
}

#[tokio::test(start_paused = true)]
async fn nothing_that_is_logged_shows_a_secret() {
    let (written, _guard) = Written::of_this_thread();
    each().await;
    let text = written.text();
    assert!(text.contains("idempotent operation has no answer"));
    for secret in [SECRET, "4111", "250 baht", "pay.example"] {
        assert!(!text.contains(secret), "{text}");
    }
}

#[tokio::test(start_paused = true)]
async fn how_many_attempts_there_were_is_said_in_words() {
    for (retries, words) in [(0, "after one attempt"), (5, "after 6 attempts")] {
        for answers in [says(503, ""), problem(409, IN_FLIGHT)] {
            let (head, _) = answers.unwrap().into_parts();
            let busy = || Ok(http::Response::from_parts(head.clone(), IN_FLIGHT.into()));
            let script = Script::new(std::iter::repeat_with(busy).take(6));
            let layer = RetryLayer::new().retries(retries);
            let unanswered = script.send(layer, charge()).await.unwrap_err();
            assert!(unanswered.to_string().contains(words), "{unanswered}");
        }
    }
}

const IN_FLIGHT: &str = r#"{"code":"idempotency_in_flight"}"#;

#[tokio::test(start_paused = true)]
async fn what_is_not_covered_alarms_only_where_it_may_have_done_something() {
    for (method, alarms) in [
        ("GET", false),
        ("HEAD", false),
        ("PUT", true),
        ("DELETE", true),
    ] {
        let script = Script::new([unreachable()]);
        let request = http::Request::builder().method(method).uri("/charges");
        let request = request.body(axum::body::Body::empty()).unwrap();
        let unanswered = script.send(RetryLayer::new(), request).await.unwrap_err();
        let sentence = unanswered.to_string();
        assert_eq!(sentence.contains("must be looked up"), alarms, "{sentence}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_last_answer_can_be_handed_on() {
    let script = Script::new([Ok(answer(503, &[("x-request", "7")], "busy"))]);
    let sent = script.send(RetryLayer::new().retries(0), charge()).await;
    let ended = sent.unwrap_err().into_ended().unwrap();
    let response = ended.into_response().unwrap();
    assert_eq!(response.headers()["x-request"], "7");
    assert_eq!(response.into_body(), "busy");

    let script = Script::new([unreachable()]);
    let sent = script.send(RetryLayer::new().retries(0), charge()).await;
    let ended = sent.unwrap_err().into_ended().unwrap();
    assert!(ended.into_response().is_none());

    let layer = RetryLayer::new().before_attempt(|_, _, _| Err("no signature".into()));
    let sent = Script::default().send(layer, charge()).await;
    assert!(sent.unwrap_err().into_ended().is_none());
}

/// Such as a server tells senders of events.
#[tokio::test(start_paused = true)]
async fn the_servers_hint_is_told_of_an_outcome_that_is_unknown_too() {
    let mut unknown = problem(503, r#"{"code":"idempotency_outcome_unknown"}"#).unwrap();
    let hint = http::HeaderValue::from_static("60");
    unknown.headers_mut().insert("retry-after", hint);
    let script = Script::new([Ok(unknown)]);
    let unanswered = script.send(RetryLayer::new(), charge()).await.unwrap_err();
    assert!(matches!(unanswered, Unanswered::OutcomeUnknown(_)));
    assert_eq!(
        unanswered.retry_after(),
        Some(std::time::Duration::from_secs(60))
    );
}

/// To be handed on, it must not promise a body that is not there.
#[tokio::test(start_paused = true)]
async fn an_answer_whose_body_is_not_kept_does_not_speak_of_one() {
    let large = "x".repeat(100 * 1024);
    let fields = [
        ("content-length", "102400"),
        ("content-encoding", "identity"),
        ("retry-after", "2"),
    ];
    let script = Script::new([Ok(answer(503, &fields, large))]);
    let layer = RetryLayer::new().retries(0).response_body_limit(1024);
    let unanswered = script.send(layer, charge()).await.unwrap_err();
    let answer = unanswered.into_ended().unwrap().into_response().unwrap();
    assert_eq!(
        (answer.status(), answer.body().len()),
        (503.try_into().unwrap(), 0)
    );
    let names: Vec<_> = answer.headers().keys().map(|name| name.as_str()).collect();
    assert_eq!(names, ["retry-after"]);
}

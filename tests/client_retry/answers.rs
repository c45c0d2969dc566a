//! Which answers are the operation's, which are asked for again, and which end it.

use axum::body::Body;
use http::{HeaderName, Response, StatusCode};
use tower_idempotency::client::{Answered, RetryLayer, Unanswered};

use crate::script::{Script, answer, charge, envelope, problem, says, text, unreachable};

/// Sends a charge that is answered like this at first, and with 201 from the second time on.
async fn first_answered(
    layer: &RetryLayer,
    first: Response<Body>,
) -> (usize, Result<Response<Body>, Unanswered>) {
    let script = Script::new([Ok(first)]);
    let sent = script.send(layer.clone(), charge()).await;
    (script.attempts(), sent)
}

#[track_caller]
fn assert_answered((attempts, sent): (usize, Result<Response<Body>, Unanswered>), status: u16) {
    let answer = sent.unwrap();
    assert_eq!((attempts, answer.status().as_u16()), (1, status));
    assert_eq!(answer.extensions().get::<Answered>().unwrap().attempts, 1);
}

#[track_caller]
fn assert_retried((attempts, sent): (usize, Result<Response<Body>, Unanswered>)) {
    let answer = sent.unwrap();
    assert_eq!((attempts, answer.status().as_u16()), (2, 201));
    assert_eq!(answer.extensions().get::<Answered>().unwrap().attempts, 2);
}

#[tokio::test(start_paused = true)]
async fn what_passes_by_itself_is_asked_for_again_and_nothing_else() {
    let layer = RetryLayer::new();
    for status in 200..600 {
        let sent = first_answered(&layer, answer(status, &[], "said")).await;
        match status {
            425 | 429 | 500 | 502 | 503 | 504 => assert_retried(sent),
            _ => assert_answered(sent, status),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_client_that_cannot_connect_is_asked_again() {
    let script = Script::new([unreachable()]);
    let sent = script.send(RetryLayer::new(), charge()).await;
    assert_retried((script.attempts(), sent));
}

// X4
#[tokio::test(start_paused = true)]
async fn a_409_that_says_in_flight_is_asked_for_again() {
    let layer = RetryLayer::new();
    let body = r#"{"code":"idempotency_in_flight","retryable":true,"retry_after_seconds":1}"#;
    assert_retried(first_answered(&layer, problem(409, body).unwrap()).await);
    let body = r#"{"error":{"code":"idempotency_in_flight","details":{}}}"#;
    assert_retried(first_answered(&layer, envelope(409, body).unwrap()).await);
    // The code decides, whatever else a rendering says, and whatever status it has.
    let body = r#"{"code":"idempotency_in_flight","retryable":false}"#;
    assert_retried(first_answered(&layer, problem(423, body).unwrap()).await);
}

#[tokio::test(start_paused = true)]
async fn a_409_without_a_code_is_an_answer_unless_that_is_told_otherwise() {
    let bare = || answer(409, &[], "conflict");
    let problem_without = || problem(409, r#"{"title":"Conflict"}"#).unwrap();
    let with_code = || envelope(409, r#"{"error":{"code":"order_is_paid"}}"#).unwrap();
    // Not what it says it is.
    let garbled = || problem(409, r#"{"code":"idempotency_in_flight""#).unwrap();
    let text = || {
        let fields = [("content-type", "text/plain")];
        answer(409, &fields, r#"{"code":"idempotency_in_flight"}"#)
    };

    let layer = RetryLayer::new();
    for conflict in [bare(), problem_without(), with_code(), garbled(), text()] {
        assert_answered(first_answered(&layer, conflict).await, 409);
    }
    let layer = layer.retry_bare_conflict();
    for conflict in [bare(), problem_without(), garbled(), text()] {
        assert_retried(first_answered(&layer, conflict).await);
    }
    assert_answered(first_answered(&layer, with_code()).await, 409);
}

#[tokio::test(start_paused = true)]
async fn a_replay_is_the_answer_whatever_its_status() {
    let own = HeaderName::from_static("x-again");
    let layer = RetryLayer::new().replay_header(own);
    for marker in ["idempotent-replay", "idempotent-replayed", "x-again"] {
        for status in [201, 402, 409, 425, 429, 500, 502, 503, 504] {
            let body = r#"{"code":"idempotency_in_flight","retry_after_seconds":1}"#;
            let kind = ("content-type", "application/problem+json");
            let replay = answer(status, &[(marker, "true"), kind], body);
            let (attempts, sent) = first_answered(&layer, replay).await;
            let answer = sent.unwrap();
            assert!(answer.extensions().get::<Answered>().unwrap().replayed);
            assert_eq!((attempts, answer.status().as_u16()), (1, status));
            assert_eq!(text(answer).await, body);
        }
        let not = answer(503, &[(marker, "false")], "");
        assert_retried(first_answered(&layer, not).await);
    }
    let unknown = answer(503, &[("x-again", "true")], "");
    assert_retried(first_answered(&RetryLayer::new(), unknown).await);
}

#[tokio::test(start_paused = true)]
async fn what_this_crate_says_of_its_own_refusals_goes_before_the_status() {
    let layer = RetryLayer::new();
    // A mistake in the service's program does not pass by itself.
    let body = r#"{"code":"idempotency_transaction_misused","retryable":false}"#;
    assert_answered(
        first_answered(&layer, problem(500, body).unwrap()).await,
        500,
    );
    // The same without the member, as a rendering of the service's own may have it.
    let body = r#"{"code":"idempotency_transaction_misused"}"#;
    assert_answered(
        first_answered(&layer, problem(500, body).unwrap()).await,
        500,
    );
    let body = r#"{"error":{"code":"idempotency_store_unavailable"}}"#;
    assert_retried(first_answered(&layer, envelope(507, body).unwrap()).await);
    let body = r#"{"error":{"code":"idempotency_limit_reached","retryable":true}}"#;
    assert_retried(first_answered(&layer, envelope(403, body).unwrap()).await);
    // Of a later version.
    let body = r#"{"code":"idempotency_of_tomorrow","retryable":true}"#;
    assert_retried(first_answered(&layer, problem(409, body).unwrap()).await);
    let body = r#"{"code":"idempotency_of_tomorrow"}"#;
    assert_retried(first_answered(&layer, problem(503, body).unwrap()).await);
    assert_answered(
        first_answered(&layer, problem(409, body).unwrap()).await,
        409,
    );
    // What others mean by it is not known.
    let body = r#"{"code":"busy","retryable":false}"#;
    assert_retried(first_answered(&layer, problem(503, body).unwrap()).await);
    let body = r#"{"code":"busy","retryable":true}"#;
    assert_answered(
        first_answered(&layer, problem(422, body).unwrap()).await,
        422,
    );
}

#[tokio::test(start_paused = true)]
async fn three_refusals_end_the_operation_at_once() {
    let layer = RetryLayer::new();
    for status in [400, 409, 422, 500] {
        let body = r#"{"code":"idempotency_key_reused","retryable":false}"#;
        let (attempts, sent) = first_answered(&layer, problem(status, body).unwrap()).await;
        let unanswered = sent.unwrap_err();
        assert!(
            matches!(unanswered, Unanswered::Reused(_)),
            "{unanswered:?}"
        );
        assert_eq!(attempts, 1);
        let response = unanswered.response().unwrap();
        assert_eq!(
            (response.status().as_u16(), &response.body()[..]),
            (status, body.as_bytes())
        );
    }

    let body = r#"{"error":{"code":"idempotency_outcome_unknown"}}"#;
    let (attempts, sent) = first_answered(&layer, envelope(409, body).unwrap()).await;
    let unanswered = sent.unwrap_err();
    assert!(
        matches!(unanswered, Unanswered::OutcomeUnknown(_)),
        "{unanswered:?}"
    );
    assert_eq!(attempts, 1);

    let code = "idempotency_response_not_retained";
    for (kept, status) in [
        (
            problem(
                409,
                r#"{"code":"idempotency_response_not_retained","original_status":201}"#,
            ),
            Some(201),
        ),
        (
            envelope(
                409,
                r#"{"error":{"code":"idempotency_response_not_retained","details":{"original_status":402}}}"#,
            ),
            Some(402),
        ),
        (
            problem(
                409,
                r#"{"code":"idempotency_response_not_retained","original_status":70000}"#,
            ),
            None,
        ),
        (
            problem(409, r#"{"code":"idempotency_response_not_retained"}"#),
            None,
        ),
    ] {
        let (attempts, sent) = first_answered(&layer, kept.unwrap()).await;
        let unanswered = sent.unwrap_err();
        let Unanswered::NotRetained {
            original_status, ..
        } = unanswered
        else {
            panic!("{code}: {unanswered:?}");
        };
        assert_eq!(
            (original_status.map(|status| status.as_u16()), attempts),
            (status, 1)
        );
    }
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_succeeded_may_have_any_code() {
    let body = r#"{"code":"idempotency_key_reused"}"#;
    let sent = first_answered(&RetryLayer::new(), problem(200, body).unwrap()).await;
    assert_answered(sent, 200);
}

// X4
#[tokio::test(start_paused = true)]
async fn in_flight_to_the_end_is_told_apart_from_giving_up() {
    let body = r#"{"code":"idempotency_in_flight","retry_after_seconds":1}"#;
    let busy = || problem(409, body);
    let script = Script::new([busy(), busy(), busy(), busy(), busy(), busy()]);
    let unanswered = script.send(RetryLayer::new(), charge()).await.unwrap_err();
    let Unanswered::StillInFlight(ended) = &unanswered else {
        panic!("{unanswered:?}");
    };
    assert_eq!((ended.attempts(), script.attempts()), (6, 6));
    assert_eq!(ended.key().as_bytes(), script.key());
    assert_eq!(ended.response().unwrap().status(), StatusCode::CONFLICT);
    assert_eq!(ended.retry_after().unwrap().as_secs(), 1);

    let script = Script::new([busy(), unreachable()]);
    let layer = RetryLayer::new().retries(1);
    let unanswered = script.send(layer, charge()).await.unwrap_err();
    assert!(
        matches!(unanswered, Unanswered::GaveUp(_)),
        "{unanswered:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn without_retries_there_is_one_attempt_with_a_key() {
    let script = Script::new([says(503, "busy")]);
    let unanswered = script
        .send(RetryLayer::new().retries(0), charge())
        .await
        .unwrap_err();
    let Unanswered::GaveUp(ended) = unanswered else {
        panic!("{unanswered:?}");
    };
    assert_eq!((ended.attempts(), script.attempts()), (1, 1));
    assert_eq!(ended.response().unwrap().body(), "busy");
    assert_eq!(ended.key().as_bytes(), script.key());
}

#[tokio::test(start_paused = true)]
async fn what_was_run_without_protection_is_never_sent_again() {
    let layer = RetryLayer::new().retry_bare_conflict();
    for status in [201, 402, 409, 429, 500, 502, 503, 504] {
        let fields = [
            ("idempotency-status", "unprotected"),
            ("content-type", "application/json"),
            ("content-encoding", "gzip"),
            ("retry-after", "1"),
        ];
        let body = r#"{"code":"idempotency_in_flight"}"#;
        let sent = first_answered(&layer, answer(status, &fields, body)).await;
        assert_answered(sent, status);
    }
    let executed = answer(503, &[("idempotency-status", "executed")], "");
    assert_retried(first_answered(&layer, executed).await);
}

#[tokio::test(start_paused = true)]
async fn further_codes_may_mean_in_flight() {
    let stripes = || {
        let body = r#"{"error":{"code":"idempotency_key_in_use","type":"idempotency_error"}}"#;
        envelope(409, body).unwrap()
    };
    let numbered = || problem(423, r#"{"code":1042}"#).unwrap();
    let layer = RetryLayer::new();
    assert_answered(first_answered(&layer, stripes()).await, 409);
    let layer = layer.also_in_flight(["idempotency_key_in_use", "1042"]);
    assert_retried(first_answered(&layer, stripes()).await);
    assert_retried(first_answered(&layer, numbered()).await);
    let own = problem(409, r#"{"code":"idempotency_in_flight"}"#).unwrap();
    assert_retried(first_answered(&layer, own).await);

    let script = Script::new([Ok(stripes())]);
    let sent = script.send(layer.retries(0), charge()).await;
    assert!(
        matches!(sent, Err(Unanswered::StillInFlight(_))),
        "{sent:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_code_that_is_no_string_is_a_code_all_the_same() {
    let layer = RetryLayer::new().retry_bare_conflict();
    for body in [
        r#"{"code":1042,"message":"order is paid"}"#,
        r#"{"code":["a"]}"#,
        r#"{"code":""}"#,
        r#"{"error":{"code":7}}"#,
    ] {
        let conflict = envelope(409, body).unwrap();
        assert_answered(first_answered(&layer, conflict).await, 409);
    }
    let none = envelope(409, r#"{"code":null,"error":{"code":null}}"#).unwrap();
    assert_retried(first_answered(&layer, none).await);
}

#[tokio::test(start_paused = true)]
async fn a_code_is_found_beside_whatever_else_there_is() {
    let deep = format!(
        r#"{{"trace":{}{},"code":"idempotency_in_flight"}}"#,
        "[".repeat(1_000),
        "]".repeat(1_000)
    );
    let deep: &'static str = deep.leak();
    for body in [
        r#"{"code":"idempotency_in_flight","error":{"trace":"x"}}"#,
        r#"{"code":"idempotency_in_flight","error":"conflict"}"#,
        r#"{"code":"other","error":{"code":"idempotency_in_flight"}}"#,
        r#"{"code":"other","code":"idempotency_in_flight"}"#,
        r#"{"code":"idempotency_in_flight","retry_after_seconds":1e999}"#,
        r#"{"code":"idempotency_in_flight","limit":-1e400,"retryable":"?"}"#,
        r#"{"code":"idempotency_in_flight","details":[],"original_status":"x"}"#,
        r#"{"c\u006fde":"idempotency\u005fin_flight"}"#,
        deep,
    ] {
        let (attempts, sent) =
            first_answered(&RetryLayer::new(), problem(409, body).unwrap()).await;
        assert_eq!(
            (attempts, sent.unwrap().status().as_u16()),
            (2, 201),
            "{body:.80}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_conflict_that_is_compressed_is_never_taken_as_the_answer() {
    let layer = RetryLayer::new();
    let kind = ("content-type", "application/problem+json");
    for coding in ["gzip", "identity, br"] {
        let coding = ("content-encoding", coding);
        // As the layer of this crate says it, of all its conflicts this one alone.
        let busy = || answer(409, &[kind, coding, ("retry-after", "1")], "\u{1f}");
        assert_retried(first_answered(&layer, busy()).await);
        let script = Script::new([Ok(busy())]);
        let sent = script.send(layer.clone().retries(0), charge()).await;
        assert!(
            matches!(sent, Err(Unanswered::StillInFlight(_))),
            "{sent:?}"
        );

        let other = answer(409, &[kind, coding], "\u{1f}");
        let (attempts, sent) = first_answered(&layer, other).await;
        let Err(Unanswered::GaveUp(ended)) = sent else {
            panic!("{sent:?}");
        };
        assert_eq!((attempts, ended.attempts()), (1, 1));
        let source = ended.source().unwrap().to_string();
        assert!(source.contains("decompression inside"), "{source}");
        let response = ended.into_response().unwrap();
        assert_eq!(
            (response.status().as_u16(), &response.body()[..]),
            (409, &b"\x1f"[..])
        );

        let replay = answer(409, &[("idempotent-replay", "true"), coding], "\u{1f}");
        assert_eq!(first_answered(&layer, replay).await.0, 1);
        // The others by their status.
        assert_answered(
            first_answered(&layer, answer(402, &[coding], "")).await,
            402,
        );
        assert_retried(first_answered(&layer, answer(503, &[coding], "")).await);
    }
    let plain = [kind, ("content-encoding", "identity")];
    let body = r#"{"code":"idempotency_in_flight"}"#;
    assert_retried(first_answered(&layer, answer(409, &plain, body)).await);
}

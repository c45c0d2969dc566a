//! What is new in every attempt, and what stays.

use std::{error::Error, io, time::Duration};

use axum::body::Body;
use http::{HeaderValue, Request};
use tower::{Layer, ServiceExt, service_fn};
use tower_idempotency::client::{Attempt, NotSent, RetryLayer, Unanswered};

use crate::script::{Script, answer, charge, problem, says, unreachable};

#[tokio::test(start_paused = true)]
async fn the_hook_makes_each_attempt_anew_and_sees_key_and_body() {
    let script = Script::new([unreachable(), says(503, "")]);
    let layer = RetryLayer::new().before_attempt(|head, body, attempt| {
        assert!(!head.headers.contains_key("nonce"), "not a fresh copy");
        assert_eq!(
            head.headers["idempotency-key"].as_bytes(),
            attempt.key.as_bytes()
        );
        let signed = format!(
            "{}.{}.{}",
            attempt.number,
            attempt.key.as_str().unwrap(),
            body.len()
        );
        head.headers.insert("nonce", attempt.number.into());
        head.headers.insert("signature", signed.parse()?);
        Ok(())
    });
    script.send(layer, charge()).await.unwrap();
    let key = String::from_utf8(script.key()).unwrap();
    let heads = script.heads();
    for (attempt, head) in (1..).zip(&heads) {
        assert_eq!(head.headers["nonce"], attempt.to_string());
        assert_eq!(head.headers["signature"], format!("{attempt}.{key}.8"));
    }
    assert_eq!(heads.len(), 3);
}

// X1, X2
#[tokio::test(start_paused = true)]
async fn the_hook_cannot_change_the_key() {
    let script = Script::new([unreachable(), unreachable()]);
    let layer = RetryLayer::new().before_attempt(|head, _, attempt| {
        match attempt.number {
            1 => drop(head.headers.remove("idempotency-key")),
            2 => drop(
                head.headers
                    .insert("idempotency-key", HeaderValue::from_static("mine")),
            ),
            _ => {
                let second = HeaderValue::from_static("second");
                head.headers.append("idempotency-key", second);
            }
        }
        Ok(())
    });
    let mut request = charge();
    let key = HeaderValue::from_static("\"order-17\"");
    request.headers_mut().insert("idempotency-key", key);
    script.send(layer, request).await.unwrap();
    assert_eq!(
        (script.key(), script.attempts()),
        (b"\"order-17\"".to_vec(), 3)
    );
}

#[tokio::test(start_paused = true)]
async fn headers_and_extensions_of_the_request_are_those_of_every_attempt() {
    let script = Script::new([unreachable(), unreachable()]);
    let mut request = charge();
    request.extensions_mut().insert("kept");
    request
        .headers_mut()
        .append("accept", HeaderValue::from_static("a"));
    request
        .headers_mut()
        .append("accept", HeaderValue::from_static("b"));
    *request.version_mut() = http::Version::HTTP_2;
    script.send(RetryLayer::new(), request).await.unwrap();
    for head in script.heads() {
        assert_eq!(head.extensions.get::<&str>(), Some(&"kept"));
        assert!(head.headers.get_all("accept").iter().eq(["a", "b"]));
        assert_eq!(head.uri, "http://pay.example/charges?card=4111");
        assert_eq!(head.version, http::Version::HTTP_2);
    }
}

#[tokio::test(start_paused = true)]
async fn a_hook_that_fails_ends_it_and_says_truly_whether_anything_was_sent() {
    let script = Script::default();
    let failing_from = |from: u32| {
        RetryLayer::new().before_attempt(move |_, _, attempt| match attempt.number < from {
            true => Ok(()),
            false => Err(io::Error::other("no signature").into()),
        })
    };
    let unanswered = script.send(failing_from(1), charge()).await.unwrap_err();
    assert!(
        matches!(unanswered, Unanswered::NotSent(_)),
        "{unanswered:?}"
    );
    assert_eq!(unanswered.source().unwrap().to_string(), "no signature");
    assert_eq!(script.attempts(), 0);

    let script = Script::new([unreachable(), unreachable()]);
    let unanswered = script.send(failing_from(2), charge()).await.unwrap_err();
    let Unanswered::GaveUp(ended) = &unanswered else {
        panic!("{unanswered:?}");
    };
    assert_eq!((ended.attempts(), script.attempts()), (1, 1));
    assert_eq!(ended.key().as_bytes(), script.key());
    let why: &NotSent = ended.source().unwrap().downcast_ref().unwrap();
    assert_eq!(why.source().unwrap().to_string(), "no signature");
}

#[tokio::test(start_paused = true)]
async fn a_hook_that_fails_later_keeps_the_last_answer_and_what_it_means() {
    let failing = RetryLayer::new().before_attempt(|_, _, attempt| match attempt.number {
        1 => Ok(()),
        _ => Err("no signature".into()),
    });
    let busy = answer(503, &[("retry-after", "3")], "busy");
    let script = Script::new([Ok(busy)]);
    let unanswered = script.send(failing.clone(), charge()).await.unwrap_err();
    let Unanswered::GaveUp(ended) = &unanswered else {
        panic!("{unanswered:?}");
    };
    assert_eq!((ended.attempts(), script.attempts()), (1, 1));
    assert_eq!(ended.retry_after(), Some(Duration::from_secs(3)));
    assert!(ended.source().unwrap().is::<NotSent>());
    assert_eq!(ended.response().unwrap().body(), "busy");

    let script = Script::new([problem(409, r#"{"code":"idempotency_in_flight"}"#)]);
    let unanswered = script.send(failing, charge()).await.unwrap_err();
    let Unanswered::StillInFlight(ended) = &unanswered else {
        panic!("{unanswered:?}");
    };
    assert_eq!(
        (
            ended.attempts(),
            ended.response().unwrap().status().as_u16()
        ),
        (1, 409)
    );
}

#[tokio::test(start_paused = true)]
async fn a_layer_inside_can_wait_for_a_signature_of_the_attempt() {
    let script = Script::new([unreachable(), says(503, "")]);
    let client = script.client();
    let signing = service_fn(move |mut request: Request<Body>| {
        let client = client.clone();
        async move {
            let attempt = request.extensions().get::<Attempt>().cloned().unwrap();
            tokio::time::sleep(Duration::from_millis(5)).await;
            let signed = format!("{}.{}", attempt.number, attempt.key.as_str().unwrap());
            request
                .headers_mut()
                .insert("signature", signed.parse().unwrap());
            client.oneshot(request).await
        }
    });
    // Whatever a hook does to the extensions.
    let layer = RetryLayer::new().before_attempt(|head, _, _| {
        head.extensions.clear();
        Ok(())
    });
    layer.layer(signing).oneshot(charge()).await.unwrap();
    let key = String::from_utf8(script.key()).unwrap();
    for (number, head) in (1..).zip(script.heads()) {
        assert_eq!(head.headers["signature"], format!("{number}.{key}"));
    }
    assert_eq!(script.attempts(), 3);
}

//! What is new in every attempt, and what stays.

use std::{error::Error, io};

use http::HeaderValue;
use tower_idempotency::client::{NotSent, RetryLayer, Unanswered};

use crate::script::{Script, charge, says, unreachable};

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

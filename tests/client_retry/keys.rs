//! Where the key comes from, and that it stays the same.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use axum::body::Body;
use http::{HeaderName, HeaderValue, Method, Request};
use tower_idempotency::{
    IdempotencyKey, InvalidKey, KeyFormat,
    client::{Answered, NotSent, RetryLayer, Unanswered},
};

use crate::script::{Script, charge, says, unreachable};

fn failing_twice() -> Script {
    Script::new([unreachable(), says(503, "")])
}

fn keyed(value: &'static [u8]) -> Request<Body> {
    let mut request = charge();
    let value = HeaderValue::from_bytes(value).unwrap();
    request.headers_mut().insert("idempotency-key", value);
    request
}

fn with_extension(key: impl AsRef<[u8]>) -> Request<Body> {
    let mut request = charge();
    request.extensions_mut().insert(IdempotencyKey::new(key));
    request
}

fn not_sent(unanswered: Unanswered) -> NotSent {
    match unanswered {
        Unanswered::NotSent(why) => why,
        other => panic!("{other:?}"),
    }
}

fn why(not_sent: &NotSent) -> Option<&InvalidKey> {
    std::error::Error::source(not_sent)?.downcast_ref()
}

// X1
#[tokio::test(start_paused = true)]
async fn all_attempts_of_an_operation_have_one_fresh_uuid() {
    let script = failing_twice();
    let answer = script.send(RetryLayer::new(), charge()).await.unwrap();
    assert_eq!((answer.status().as_u16(), script.attempts()), (201, 3));
    let key = script.key();
    assert!(KeyFormat::uuid().parse(&key).is_ok());
    // Version 4.
    assert_eq!(key[14], b'4');
    let answered = answer.extensions().get::<Answered>().unwrap();
    assert_eq!(answered.key.as_bytes(), key);
    assert_eq!((answered.attempts, answered.replayed), (3, false));
}

// X1
#[tokio::test(start_paused = true)]
async fn another_operation_has_another_key() {
    let (first, second) = (failing_twice(), failing_twice());
    first.send(RetryLayer::new(), charge()).await.unwrap();
    second.send(RetryLayer::new(), charge()).await.unwrap();
    assert_ne!(first.key(), second.key());
}

#[tokio::test(start_paused = true)]
async fn keys_are_quoted_where_that_is_asked_for() {
    let script = failing_twice();
    let request = with_extension(r#"say "a\b", please"#);
    let layer = RetryLayer::new().quoted();
    let answer = script.send(layer, request).await.unwrap();
    assert_eq!(script.key(), br#""say \"a\\b\", please""#);
    let key = &answer.extensions().get::<Answered>().unwrap().key;
    assert_eq!(key.as_bytes(), br#"say "a\b", please"#);
}

#[tokio::test(start_paused = true)]
async fn a_header_that_is_there_is_kept_byte_for_byte() {
    for (value, key) in [
        (&b"order-17"[..], "order-17"),
        (br#""order \"17\"""#, r#"order "17""#),
        (br#""order-17";attempt=1"#, "order-17"),
    ] {
        for layer in [RetryLayer::new(), RetryLayer::new().quoted()] {
            let script = failing_twice();
            // It goes before all others.
            let mut request = keyed(value);
            let other = IdempotencyKey::new("other");
            request.extensions_mut().insert(other.clone());
            let layer = layer.keys(move |_, _| Some(other.clone()));
            let answer = script.send(layer, request).await.unwrap();
            assert_eq!((script.key(), script.attempts()), (value.to_vec(), 3));
            let answered = answer.extensions().get::<Answered>().unwrap();
            assert_eq!(answered.key.as_str(), Some(key));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_header_that_no_server_could_read_is_not_sent() {
    let script = Script::default();
    for (value, expected) in [
        (&b""[..], InvalidKey::Blank),
        (b"a b", InvalidKey::Characters),
        (b"\"open", InvalidKey::NotAString),
        (b"\xC3\xA9", InvalidKey::Characters),
        (&[b'k'; 256], InvalidKey::TooLong(255)),
    ] {
        let sent = script.send(RetryLayer::new(), keyed(value)).await;
        let unanswered = sent.unwrap_err();
        assert!(unanswered.key().is_none() && unanswered.ended().is_none());
        assert_eq!(why(&not_sent(unanswered)), Some(&expected));
    }
    let mut twice = keyed(b"order-17");
    let again = HeaderValue::from_static("order-17");
    twice.headers_mut().append("idempotency-key", again);
    let sent = script.send(RetryLayer::new(), twice).await;
    let unanswered = not_sent(sent.unwrap_err());
    assert_eq!(why(&unanswered), Some(&InvalidKey::Repeated));
    assert_eq!(script.attempts(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_key_in_the_extensions_goes_before_one_that_is_made_of_the_request() {
    let script = failing_twice();
    let layer = RetryLayer::new().keys(|_, _| Some(IdempotencyKey::new("made")));
    script
        .send(layer.clone(), with_extension("given"))
        .await
        .unwrap();
    assert_eq!(script.key(), b"given");

    let script = failing_twice();
    script.send(layer, charge()).await.unwrap();
    assert_eq!(script.key(), b"made");
}

#[tokio::test(start_paused = true)]
async fn a_key_is_made_once_of_head_and_body_and_a_fresh_one_where_there_is_none_to_make() {
    let script = failing_twice();
    let asked = Arc::new(AtomicUsize::new(0));
    let count = asked.clone();
    let layer = RetryLayer::new().keys(move |head, body| {
        let nth = count.fetch_add(1, Ordering::SeqCst);
        assert_eq!((&head.method, &body[..]), (&Method::POST, &b"250 baht"[..]));
        (nth == 0).then(|| IdempotencyKey::new(format!("{}:{}", head.uri.path(), body.len())))
    });
    script.send(layer.clone(), charge()).await.unwrap();
    assert_eq!(script.key(), b"/charges:8");
    assert_eq!(asked.load(Ordering::SeqCst), 1);

    let script = failing_twice();
    script.send(layer, charge()).await.unwrap();
    assert!(KeyFormat::uuid().parse(&script.key()).is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_key_that_cannot_be_written_so_that_a_server_reads_it_is_not_sent() {
    let script = Script::default();
    let long = "k".repeat(256);
    // Some could be written as a string, but that is not what was asked for; others not at all.
    for bare in [
        "", " ", "a b", "a,b", "\"a\"", "it's", "é", "a\nb", "a\0", &long,
    ] {
        let sent = script.send(RetryLayer::new(), with_extension(bare)).await;
        assert!(why(&not_sent(sent.unwrap_err())).is_some(), "{bare:?}");
    }
    let quoted = RetryLayer::new().quoted();
    for text in ["", " ", "é", "a\nb", "a\0", &long] {
        let sent = script.send(quoted.clone(), with_extension(text)).await;
        assert!(why(&not_sent(sent.unwrap_err())).is_some(), "{text:?}");
    }
    let sent = script.send(quoted, with_extension([0xFF, 0xFE])).await;
    let not_sent = not_sent(sent.unwrap_err());
    assert!(not_sent.to_string().contains("cannot be written"));
    assert_eq!(script.attempts(), 0);
}

#[tokio::test(start_paused = true)]
async fn what_is_written_is_not_shown_by_whoever_logs_headers() {
    let script = Script::default();
    script
        .send(RetryLayer::new(), with_extension("order-17"))
        .await
        .unwrap();
    script
        .send(RetryLayer::new(), keyed(b"order-17"))
        .await
        .unwrap();
    for head in script.heads() {
        assert!(!format!("{:?}", head.headers).contains("order-17"));
    }
    assert_eq!(script.key(), b"order-17");
}

#[tokio::test(start_paused = true)]
async fn the_header_may_have_another_name() {
    let script = failing_twice();
    let name = HeaderName::from_static("x-idempotency-key");
    let layer = RetryLayer::new().header_name(name);
    script
        .send(layer, with_extension("order-17"))
        .await
        .unwrap();
    assert_eq!(script.same("x-idempotency-key"), b"order-17");
    assert!(!script.heads()[0].headers.contains_key("idempotency-key"));
}

#[tokio::test(start_paused = true)]
async fn other_methods_pass_untouched_and_are_tried_once() {
    for method in ["GET", "HEAD", "PUT", "DELETE", "OPTIONS"] {
        let request = || {
            let request = Request::builder().method(method).uri("/charges");
            request.body(Body::from("body")).unwrap()
        };
        let script = Script::new([says(503, ""), unreachable()]);
        let answer = script.send(RetryLayer::new(), request()).await.unwrap();
        assert_eq!((answer.status().as_u16(), script.attempts()), (503, 1));
        assert!(answer.extensions().get::<Answered>().is_none());
        assert!(script.heads()[0].headers.is_empty());

        let unanswered = script.send(RetryLayer::new(), request()).await.unwrap_err();
        assert_eq!(script.attempts(), 2);
        assert!(unanswered.key().is_none());
        let Unanswered::Uncovered(uncovered) = unanswered else {
            panic!("{unanswered:?}");
        };
        assert!(uncovered.into_inner().is::<std::io::Error>());
    }
}

#[tokio::test(start_paused = true)]
async fn which_methods_are_covered_can_be_said() {
    let layer = RetryLayer::new().methods([Method::PUT]);
    let script = failing_twice();
    let put = Request::put("/charges/1").body(Body::empty()).unwrap();
    script.send(layer.clone(), put).await.unwrap();
    assert_eq!((script.attempts(), script.key().len()), (3, 36));

    let script = failing_twice();
    assert!(script.send(layer, charge()).await.is_err());
    assert_eq!(script.attempts(), 1);

    let script = failing_twice();
    let patch = Request::patch("/charges/1").body(Body::empty()).unwrap();
    script.send(RetryLayer::new(), patch).await.unwrap();
    assert_eq!((script.attempts(), script.key().len()), (3, 36));
}

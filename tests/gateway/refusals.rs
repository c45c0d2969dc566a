//! What a request can be refused for by the gateway itself, and what becomes of its key then.

use crate::{service::rate::RateLimit, shop::*};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_is_too_fast_keeps_its_key_and_its_nonce() {
    let files = Files::new();
    let gateway = Gateway::on(Terms {
        files: files.clone(),
        // Two, and never one more.
        rate: RateLimit::new(2, 0),
        ..Terms::default()
    })
    .await;
    let simulated = order("k", 25_000).header("x-simulate-rate-limit", "1");
    let simulated = gateway.send(&simulated).await;
    assert_eq!(refused(&simulated), (429, "rate_limited".to_owned()));
    assert_eq!(body(&simulated)["error"]["retry_after_seconds"], 1);
    assert_runs(&gateway.send(&order("k", 25_000)).await, 201);
    assert_runs(&gateway.send(&order("k2", 25_000)).await, 201);

    let late = order("k3", 25_000).header("pg-nonce", "n");
    for _ in 0..3 {
        let reply = gateway.send(&late).await;
        assert_eq!(refused(&reply), (429, "rate_limited".to_owned()));
    }
    // Another merchant has a bucket of its own.
    let other = order("k", 25_000).by("merchant-b");
    assert_runs(&gateway.send(&other).await, 201);
    assert_eq!(gateway.count("deposits").await, 3);
    gateway.close().await;

    let gateway = Gateway::on(Terms {
        files,
        rate: RateLimit::new(1, 50),
        ..Terms::default()
    })
    .await;
    assert_runs(&gateway.send(&late).await, 201);
    for key in ["k4", "k5", "k6"] {
        // A bucket that is empty fills again.
        let mut reply = gateway.send(&order(key, 25_000)).await;
        while reply.status == 429 {
            reply = gateway.send(&order(key, 25_000)).await;
        }
        assert_runs(&reply, 201);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_handler_refuses_is_refused_for_good_under_that_key() {
    let gateway = Gateway::open().await;
    let odd = [
        (400, order("k1", 1).body("{")),
        (422, order("k2", 0)),
        (422, order("k3", -1)),
        (422, order("k4", 100_000_001)),
        (422, order("k5", 1).body(r#"{"amount_minor":1}"#)),
        (422, {
            let order = order("k6", 1);
            let body = String::from_utf8(order.body.clone()).unwrap();
            order.body(body.replace("THB", "XXX"))
        }),
        (422, {
            let order = order("k7", 1);
            let body = String::from_utf8(order.body.clone()).unwrap();
            order.body(body.replace("203.0.113.7", "somewhere"))
        }),
        (422, {
            let order = order("k8", 1);
            let body = String::from_utf8(order.body.clone()).unwrap();
            order.body(body.replace("INV-2026-0042", " "))
        }),
    ];
    for (status, odd) in odd {
        let first = gateway.send(&odd).await;
        assert_eq!(refused(&first), (status, "request_invalid".to_owned()));
        assert_replays(&gateway.send(&odd).await, &first);
        let corrected = order(odd.value("idempotency-key"), 25_000);
        let corrected = gateway.send(&corrected).await;
        assert_eq!(refused(&corrected).1, "idempotency_key_reused");
    }
    assert_eq!(gateway.count("deposits").await, 0);

    // What no handler has judged leaves the key free.
    let untyped = order("k9", 25_000).header("content-type", "text/plain");
    let untyped = gateway.send(&untyped).await;
    assert_eq!(refused(&untyped), (415, "request_invalid".to_owned()));
    // Blanks after a value are JSON, as many as there may be.
    let mut largest = order("k10", 25_000);
    largest.body.resize(64 * 1024, b' ');
    assert_runs(&gateway.send(&largest).await, 201);
    let large = order("k9", 25_000).body([&largest.body[..], b" "].concat());
    let large = gateway.send(&large).await;
    assert_eq!(refused(&large), (413, "body_too_large".to_owned()));
    assert_runs(&gateway.send(&order("k9", 25_000)).await, 201);
}

// It may be a secret in the wrong place, and refusals are logged by clients and kept by the layer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_sent_is_never_quoted_back() {
    let gateway = Gateway::open().await;
    let json = |body: &str| order("k", 1).body(body);
    let order_of = |amount: &str, currency: &str, ip: &str| {
        json(&format!(
            r#"{{"merchant_reference":"A","amount_minor":{amount},"currency":{currency},"client":{{"ip":{ip}}}}}"#
        ))
    };
    let wrong = [
        (400, json(r#"{"SENSITIVE"#)),
        (400, json("SENSITIVE")),
        (
            415,
            json("SENSITIVE").header("content-type", "text/SENSITIVE"),
        ),
        (422, json(r#""SENSITIVE""#)),
        (422, json(r#"["SENSITIVE"]"#)),
        (422, order_of(r#""SENSITIVE""#, r#""THB""#, r#""::1""#)),
        (422, order_of("1", r#""SENSITIVE""#, r#""::1""#)),
        (422, order_of("1", r#"["SENSITIVE"]"#, r#""::1""#)),
        (422, order_of("1", r#""THB""#, r#""SENSITIVE""#)),
        // As little as a number may be one.
        (422, order_of("\"16180339\"", r#""THB""#, r#""::1""#)),
        (422, order_of("16180339.5", r#""THB""#, r#""::1""#)),
        (422, order_of("1", "16180339", r#""::1""#)),
    ];
    for (number, (status, wrong)) in wrong.into_iter().enumerate() {
        let sent = String::from_utf8(wrong.body.clone()).unwrap();
        let reply = gateway.send(&wrong.key(&format!("k-{number}"))).await;
        let expected = (status, "request_invalid".to_owned());
        assert_eq!(refused(&reply), expected, "{sent}");
        let said = String::from_utf8(reply.body.clone()).unwrap();
        for secret in ["SENSITIVE", "16180339"] {
            assert!(!said.contains(secret), "{sent}: {said}");
        }
        let expects = match status {
            415 => "application/json",
            400 => "JSON",
            _ if said.contains("\"member\"") => "currency",
            _ => "merchant_reference",
        };
        let message = body(&reply)["error"]["message"].clone();
        assert!(message.as_str().unwrap().contains(expects), "{message}");
    }
}

// On our side, that is: nothing of it is the last word.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_fails_is_rolled_back_and_leaves_the_key_free() {
    let gateway = Gateway::open().await;
    let lost = sqlx::query("ALTER TABLE deposits RENAME TO lost");
    lost.execute(&gateway.ledger).await.unwrap();
    for _ in 0..2 {
        let failed = gateway.send(&order("k", 25_000)).await;
        assert_eq!(refused(&failed), (500, "internal".to_owned()));
        assert!(!failed.is_replay());
    }
    let found = sqlx::query("ALTER TABLE lost RENAME TO deposits");
    found.execute(&gateway.ledger).await.unwrap();
    assert_runs(&gateway.send(&order("k", 25_000)).await, 201);

    // The nonces are out of reach, and who cannot be told from an earlier attempt is not let in.
    let files = gateway.files.clone();
    gateway.nonces.close().await;
    let nonce = order("k2", 25_000).header("pg-nonce", "n");
    let failed = gateway.send(&nonce).await;
    assert_eq!(refused(&failed), (503, "unavailable".to_owned()));
    gateway.close().await;
    let terms = Terms {
        files,
        ..Terms::default()
    };
    assert_runs(&Gateway::on(terms).await.send(&nonce).await, 201);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_amount_11500_shows_a_reused_key_and_leaves_nothing_behind() {
    let gateway = Gateway::open().await;
    for _ in 0..2 {
        let reused = gateway.send(&order("k", 11_500)).await;
        assert_eq!(refused(&reused), (409, "idempotency_key_reused".to_owned()));
        let details = &body(&reused)["error"]["details"];
        assert_eq!(details["original_request_id"], "req_sandbox");
    }
    assert_eq!(gateway.records().await, 0);
    assert_eq!(gateway.count("deposits").await, 0);
    let keyless = order("k", 11_500).without("idempotency-key");
    let keyless = gateway.send(&keyless).await;
    assert_eq!(refused(&keyless).1, "idempotency_key_required");
    // What is no key belongs to no order, so it cannot have been used for another one.
    let mut twice = order("k", 11_500);
    twice.headers.push(("idempotency-key", "k".to_owned()));
    let long = "k".repeat(256);
    for malformed in ["a,b", "\"open", "", &long].map(|key| order(key, 11_500)) {
        let malformed = gateway.send(&malformed).await;
        let invalid = (400, "idempotency_key_invalid".to_owned());
        assert_eq!(refused(&malformed), invalid);
    }
    let twice = gateway.send(&twice).await;
    assert_eq!(refused(&twice).1, "idempotency_key_invalid");
    let quoted = gateway.send(&order("\"k\"", 11_500)).await;
    assert_eq!(refused(&quoted).1, "idempotency_key_reused");
    let outsider = gateway.send(&order("k", 11_500).by("nobody")).await;
    assert_eq!(refused(&outsider).0, 401);
    // The key is free.
    assert_runs(&gateway.send(&order("k", 11_501)).await, 201);
    // What is no JSON is the handler's to judge.
    let broken = order("k2", 1).body(r#"{"amount_minor":11500"#);
    let broken = gateway.send(&broken).await;
    assert_eq!(refused(&broken), (400, "request_invalid".to_owned()));
}

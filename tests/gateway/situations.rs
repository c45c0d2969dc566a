//! The four situations that the gateway's documentation tells its merchants about.

use std::time::{Duration, Instant};

use serde_json::json;

use crate::shop::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_retry_gets_the_whole_first_answer_and_says_that_it_is_one() {
    let gateway = Gateway::open().await;
    let first = gateway.send(&order("k", 25_000)).await;
    assert_runs(&first, 201);
    let made = body(&first);
    let id = made["id"].as_str().unwrap();
    assert!(id.starts_with("dep_"), "{made}");
    assert_eq!(text(&first, "location"), format!("{DEPOSITS}/{id}"));
    let time = |value: &serde_json::Value| -> jiff::Timestamp {
        let text = value.as_str().unwrap();
        assert!(text.ends_with('Z'), "{text}");
        text.parse().unwrap()
    };
    let created = time(&made["created_at"]);
    let expires = time(&made["expires_at"]);
    let upload_expires = time(&made["slip_upload"]["expires_at"]);
    assert_eq!(expires - created, jiff::SignedDuration::from_mins(20));
    assert_eq!(
        upload_expires - expires,
        jiff::SignedDuration::from_hours(24)
    );
    assert_eq!(
        made,
        json!({
            "id": id,
            "object": "deposit_order",
            "version": 2,
            "status": "awaiting_payment",
            "is_terminal": false,
            "merchant_reference": "INV-2026-0042",
            "amount_minor": 25_000,
            "currency": "THB",
            "created_at": made["created_at"],
            "expires_at": made["expires_at"],
            "checkout_url": format!("https://pay.example/checkout/{id}"),
            "slip_upload": {
                "token": Ordered::of(&first).token,
                "expires_at": made["slip_upload"]["expires_at"],
                "upload_url": format!("{DEPOSITS}/{id}/slip"),
                "max_bytes": 4_194_304,
                "content_types": ["image/jpeg", "image/png", "image/webp", "application/json"],
            },
        })
    );

    for _ in 0..3 {
        assert_replays(&gateway.send(&order("k", 25_000)).await, &first);
    }
    assert_eq!(gateway.count("deposits").await, 1);

    // And over a restart.
    let files = gateway.close().await;
    let terms = Terms {
        files,
        ..Terms::default()
    };
    let gateway = Gateway::on(terms).await;
    assert_replays(&gateway.send(&order("k", 25_000)).await, &first);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_body_under_the_key_is_told_whose_key_it_is() {
    let gateway = Gateway::open().await;
    let first = gateway.send(&order("k", 25_000)).await;
    let other = gateway.send(&order("k", 99)).await;
    assert_eq!(refused(&other), (409, "idempotency_key_reused".to_owned()));
    let envelope = body(&other);
    let message = envelope["error"]["message"].as_str().unwrap();
    assert!(message.contains("POST /v1/pay/deposits"), "{message}");
    assert_eq!(
        envelope,
        json!({ "error": {
            "code": "idempotency_key_reused",
            "type": "invalid_request_error",
            "message": message,
            "message_th": "Idempotency-Key นี้ถูกใช้กับคำขออื่นแล้ว โปรดตรวจสอบผลของคำขอเดิมก่อนใช้ค่าใหม่",
            "retryable": false,
            "retry_after_seconds": null,
            "request_id": text(&other, "x-request-id"),
            "details": { "original_request_id": text(&first, "x-request-id") },
        }})
    );
    assert_eq!(other.header("retry-after"), None);
    assert_eq!(other.header("idempotent-replay"), None);
    assert_eq!(gateway.count("deposits").await, 1);
    assert_replays(&gateway.send(&order("k", 25_000)).await, &first);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_the_first_attempt_runs_a_retry_is_told_so_at_once() {
    let gateway = Gateway::open().await;
    let slow = order("k", 25_000).header("x-simulate-delay-ms", "4000");
    let running = async { gateway.send(&slow).await };
    let retries = async {
        gateway.running(1).await;
        let begun = Instant::now();
        let nonces = ["n-1", "n-2", "n-3"];
        for nonce in nonces {
            // The nonce of each attempt is written as well, and must not wait for the transaction.
            let retry = order("k", 25_000).header("pg-nonce", nonce);
            let retry = gateway.send(&retry).await;
            assert_eq!(refused(&retry), (409, "idempotency_in_flight".to_owned()));
            assert_eq!(body(&retry)["error"]["retry_after_seconds"], 1);
            assert_eq!(retry.header("retry-after"), Some(&b"1"[..]));
            assert_eq!(body(&retry)["error"].get("details"), None);
        }
        let other = gateway.send(&order("k", 99)).await;
        assert_eq!(refused(&other).1, "idempotency_key_reused");
        // Reading does not wait either.
        let read = get("/v1/pay/deposits?merchant_reference=INV-2026-0042");
        assert_eq!(refused(&gateway.send(&read).await).0, 404);
        assert!(
            begun.elapsed() < Duration::from_millis(2_000),
            "it took {:?}",
            begun.elapsed()
        );
    };
    let (first, ()) = tokio::join!(running, retries);
    assert_runs(&first, 201);
    assert_replays(&gateway.send(&order("k", 25_000)).await, &first);
    assert_eq!(gateway.count("deposits").await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_whose_lifetime_is_over_runs_as_new() {
    let gateway = Gateway::on(Terms {
        ttl: Duration::from_millis(700),
        ..Terms::default()
    })
    .await;
    let first = gateway.send(&order("k", 25_000)).await;
    assert_runs(&first, 201);
    let done = Instant::now();
    let anew = loop {
        let retry = gateway.send(&order("k", 25_000)).await;
        if !retry.is_replay() {
            break retry;
        }
        assert_replays(&retry, &first);
        assert!(done.elapsed() < Duration::from_secs(20), "it never expires");
    };
    assert!(done.elapsed() >= Duration::from_millis(600));
    assert_runs(&anew, 201);
    assert_ne!(Ordered::of(&anew).id, Ordered::of(&first).id);
    assert_eq!(gateway.count("deposits").await, 2);
    // From here on it is the new order's.
    assert_replays(&gateway.send(&order("k", 25_000)).await, &anew);
}

// The layer's record and the order's row have to agree on it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_lives_as_long_as_was_said_when_it_was_used() {
    let short = Terms {
        ttl: Duration::from_millis(50),
        ..Terms::default()
    };
    let files = short.files.clone();
    let gateway = Gateway::on(short).await;
    let first = gateway.send(&order("k", 25_000)).await;
    assert_runs(&first, 201);
    let ordered = Ordered::of(&first);
    let slip = ordered.slip("s", "image/png", &b"\x89PNG\r\n\x1a\n"[..]);
    assert_runs(&gateway.send(&slip).await, 201);
    gateway.close().await;

    // A longer life is that of the keys to come.
    let longer = Terms {
        files: files.clone(),
        ..Terms::default()
    };
    let gateway = Gateway::on(longer).await;
    for call in [order("k", 25_000), slip] {
        let begun = Instant::now();
        let mut again = gateway.send(&call).await;
        while again.is_replay() {
            assert!(begun.elapsed() < Duration::from_secs(20), "it never ends");
            again = gateway.send(&call).await;
        }
        assert_runs(&again, 201);
        assert_ne!(body(&again)["id"], ordered.id);
    }
    assert_eq!(gateway.count("deposits").await, 2);
    assert_eq!(gateway.count("slips").await, 2);
    let lose = sqlx::query("DELETE FROM idempotency_records").execute(&gateway.ledger);
    assert!(lose.await.unwrap().rows_affected() > 0);
    gateway.close().await;

    // And so is a shorter one: what was promised for a week stands for a week.
    let shorter = Terms {
        files,
        ttl: Duration::from_millis(1),
        ..Terms::default()
    };
    let gateway = Gateway::on(shorter).await;
    let again = gateway.send(&order("k", 25_000)).await;
    assert_eq!(refused(&again), (409, "already_done".to_owned()));
    assert_eq!(gateway.count("deposits").await, 2);
}

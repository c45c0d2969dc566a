//! Whose key it is, and what it is needed for.

use std::time::Duration;

use serde_json::json;
use tokio::task::JoinSet;

use crate::{
    service::merchants::{self, Credentials},
    shop::*,
    support::wire::Reply,
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_post_needs_a_key_and_does_nothing_without() {
    let gateway = Gateway::open().await;
    let ordered = gateway.order("k").await;
    let records = gateway.records().await;
    let posts = [
        order("", 25_000),
        ordered.slip("", "image/png", &b"\x89PNG\r\n\x1a\n"[..]),
    ];
    for post in posts {
        let missing = post.without("idempotency-key");
        let missing = gateway.send(&missing).await;
        assert_eq!(
            refused(&missing),
            (400, "idempotency_key_required".to_owned())
        );
    }
    for malformed in ["", "\"open", "two words"] {
        let malformed = gateway.send(&order(malformed, 25_000)).await;
        assert_eq!(
            refused(&malformed),
            (400, "idempotency_key_invalid".to_owned())
        );
    }
    assert_eq!(gateway.count("deposits").await, 1);
    assert_eq!(gateway.count("slips").await, 0);
    assert_eq!(gateway.records().await, records);
    // Reading needs none.
    let read = gateway
        .send(&get(&format!("{DEPOSITS}/{}", ordered.id)))
        .await;
    assert_runs(&read, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_same_key_of_another_merchant_is_another_order() {
    let gateway = Gateway::open().await;
    let one = gateway.send(&order("k", 25_000)).await;
    let other = gateway.send(&order("k", 25_000).by("merchant-b")).await;
    assert_runs(&one, 201);
    assert_runs(&other, 201);
    assert_ne!(Ordered::of(&one).token, Ordered::of(&other).token);
    assert_eq!(gateway.count("deposits").await, 2);

    // What is another merchant's is not even there.
    let ordered = Ordered::of(&one);
    let place = format!("{DEPOSITS}/{}", ordered.id);
    assert_eq!(gateway.send(&get(&place)).await.status, 200);
    let foreign = gateway.send(&get(&place).by("merchant-b")).await;
    assert_eq!(refused(&foreign), (404, "not_found".to_owned()));
    let slip = ordered.slip("s", "image/png", &b"\x89PNG\r\n\x1a\n"[..]);
    let foreign = gateway.send(&slip.by("merchant-b")).await;
    assert_eq!(refused(&foreign), (404, "not_found".to_owned()));

    let by_reference = format!("{DEPOSITS}?merchant_reference=INV-2026-0042");
    let found = body(&gateway.send(&get(&by_reference).by("merchant-b")).await);
    assert_eq!(found["data"].as_array().unwrap().len(), 1);
    assert_eq!(found["data"][0]["id"], Ordered::of(&other).id);
    let none = get(&format!("{DEPOSITS}?merchant_reference=other"));
    assert_eq!(refused(&gateway.send(&none).await).0, 404);
    assert_eq!(refused(&gateway.send(&get(DEPOSITS)).await).0, 400);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_merchant_keeps_its_keys_when_its_credential_is_replaced() {
    let gateway = Gateway::open().await;
    let first = gateway.send(&order("k", 25_000).by("merchant-a")).await;
    assert_runs(&first, 201);
    let retry = gateway.send(&order("k", 25_000).by("merchant-a-2")).await;
    assert_replays(&retry, &first);
    assert_eq!(gateway.count("deposits").await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_was_shut_out_gets_no_replay() {
    let gateway = Gateway::open().await;
    let first = gateway.send(&order("k", 25_000).by("merchant-a-2")).await;
    assert_runs(&first, 201);
    let files = gateway.close().await;
    let gateway = Gateway::on(Terms {
        files,
        credentials: Credentials::of([("merchant-a", merchants::A)]),
        ..Terms::default()
    })
    .await;
    let unknown = [
        order("k", 25_000).by("merchant-a-2"),
        order("k", 25_000).by(""),
        order("k", 25_000).header("authorization", "Basic merchant-a"),
        order("k", 25_000).without("authorization"),
        // Also where the layer would have something to say.
        order("k", 99).by("merchant-a-2"),
        order("", 25_000).by("merchant-a-2"),
    ];
    for unknown in unknown {
        let reply = gateway.send(&unknown).await;
        assert_eq!(refused(&reply), (401, "unauthorized".to_owned()));
        assert_eq!(text(&reply, "www-authenticate"), "Bearer");
        assert_eq!(text(&reply, "idempotent-replay"), "");
    }
    let retry = gateway.send(&order("k", 25_000).by("merchant-a")).await;
    assert_replays(&retry, &first);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replay_is_a_picture_of_the_past_and_get_shows_what_is_so() {
    let gateway = Gateway::open().await;
    let first = gateway.send(&order("k", 12_000_000)).await;
    assert_runs(&first, 202);
    let accepted = body(&first);
    assert_eq!(accepted["status"], "awaiting_liquidity");
    assert_eq!(accepted["legs"], json!([]));
    let place = get(&format!("{DEPOSITS}/{}", Ordered::of(&first).id));
    let mut found = body(&gateway.send(&place).await);
    for _ in 0..1_000 {
        if found["status"] != "awaiting_liquidity" {
            break;
        }
        assert_eq!(found["legs"], json!([]));
        tokio::time::sleep(Duration::from_millis(10)).await;
        found = body(&gateway.send(&place).await);
    }
    assert_eq!(found["status"], "awaiting_payment");
    assert_eq!(
        found["legs"],
        json!([
            { "sequence": 1, "amount_minor": 5_000_000 },
            { "sequence": 2, "amount_minor": 5_000_000 },
            { "sequence": 3, "amount_minor": 2_000_000 },
        ])
    );
    assert_eq!(found["slip_upload"].get("token"), None);
    assert_replays(&gateway.send(&order("k", 12_000_000)).await, &first);

    assert_runs(&gateway.send(&order("k2", 9_999_999)).await, 201);
    assert_runs(&gateway.send(&order("k3", 10_000_000)).await, 202);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_attempts_at_once_make_one_order() {
    let gateway = std::sync::Arc::new(Gateway::open().await);
    let mut attempts = JoinSet::new();
    for _ in 0..32 {
        let gateway = gateway.clone();
        attempts.spawn(async move { gateway.send(&order("k", 25_000)).await });
    }
    let replies = attempts.join_all().await;
    let ran = |reply: &&Reply| reply.status == 201 && !reply.is_replay();
    let first: Vec<_> = replies.iter().filter(ran).collect();
    assert_eq!(first.len(), 1, "{replies:?}");
    for reply in &replies {
        match reply.status {
            201 if reply.is_replay() => assert_replays(reply, first[0]),
            201 => {}
            _ => assert_eq!(refused(reply).1, "idempotency_in_flight"),
        }
    }
    assert_eq!(gateway.count("deposits").await, 1);
}

// The layer has lost its record. The row has not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_that_the_layer_has_lost_still_belongs_to_its_order() {
    let gateway = Gateway::open().await;
    let ordered = gateway.order("k").await;
    let lose = "DELETE FROM idempotency_records WHERE key = CAST('k' AS BLOB)";
    let lost = sqlx::query(lose).execute(&gateway.ledger).await.unwrap();
    assert_eq!(lost.rows_affected(), 1);
    for amount in [25_000, 99] {
        let again = gateway.send(&order("k", amount)).await;
        let said = refused(&again);
        if amount == 25_000 {
            assert_eq!(said, (409, "already_done".to_owned()));
            assert_eq!(body(&again)["error"]["details"]["id"], ordered.id);
        } else {
            assert_eq!(said.1, "idempotency_key_reused");
        }
    }
    assert_eq!(gateway.count("deposits").await, 1);
    // Another merchant's key it never was.
    let other = gateway.send(&order("k", 25_000).by("merchant-b")).await;
    assert_runs(&other, 201);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_id_that_the_client_chose_is_not_taken_over() {
    let gateway = Gateway::open().await;
    let own = order("k", 25_000).header("x-request-id", "mine");
    let first = gateway.send(&own).await;
    let id = text(&first, "x-request-id");
    assert!(id.starts_with("req_") && id.len() == 36, "{id}");
    let other = gateway.send(&order("k", 99)).await;
    assert_eq!(body(&other)["error"]["details"]["original_request_id"], id);
}

//! What each route answers, and that a retry gets the same.

use axum::body::Body;
use serde_json::{Value, json};

use super::bank::{Bank, assert_said, by_shop, said, slowly};
use crate::{
    service,
    support::{Answer, eventually, request},
};

/// One request of each kind that changes something, with its answer but for numbers that are given out.
fn changes() -> Vec<(&'static str, &'static str, Value, u16, Value)> {
    let amount = json!({ "amount_satang": 25_000 });
    let withdrawal = json!({ "from": "savings", "amount_satang": 6_000_000 });
    let settings = json!({ "version": 1, "label": " rent ", "daily_limit_satang": 7 });
    vec![
        (
            "POST",
            "/wallets/1/withdrawals",
            amount.clone(),
            201,
            json!({ "withdrawal_id": null, "balance_satang": 9_975_000 }),
        ),
        (
            "POST",
            "/wallets/2/deposits",
            amount.clone(),
            201,
            json!({ "deposit_id": null, "balance_satang": 10_025_000 }),
        ),
        (
            "POST",
            "/wallets/3/payouts",
            amount,
            201,
            json!({ "payout_id": null, "state": "pending", "balance_satang": 9_975_000 }),
        ),
        (
            "POST",
            "/transfers",
            json!({ "from": 5, "to": 4, "amount_satang": 20_001 }),
            201,
            json!({ "transfer_id": null, "fee_satang": 201, "balance_satang": 9_979_798 }),
        ),
        (
            "PUT",
            "/wallets/6/settings",
            settings,
            200,
            json!({ "label": "rent", "daily_limit_satang": 7, "version": 2 }),
        ),
        (
            "POST",
            "/customers/1/withdrawals",
            withdrawal.clone(),
            201,
            json!({ "withdrawal_id": null, "total_satang": 4_000_000 }),
        ),
        (
            "POST",
            "/customers/2/withdrawals/by-lock",
            withdrawal.clone(),
            201,
            json!({ "withdrawal_id": null, "total_satang": 4_000_000 }),
        ),
        (
            "POST",
            "/customers/3/withdrawals/serializable",
            withdrawal,
            201,
            json!({ "withdrawal_id": null, "total_satang": 4_000_000 }),
        ),
    ]
}

/// The answer with the number that was given out left out; it must be one.
fn without_number(answer: &Answer) -> Value {
    let mut body = answer.json();
    for (name, value) in body.as_object_mut().unwrap() {
        if ["withdrawal_id", "deposit_id", "payout_id", "transfer_id"].contains(&name.as_str()) {
            assert!(value.as_i64().unwrap() > 0, "{name} is {value}");
            *value = Value::Null;
        }
    }
    body
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_change_is_made_once_and_its_retry_gets_the_same_answer() {
    let bank = Bank::open().await;
    let all = changes();
    for (runs, (method, path, body, status, expected)) in all.into_iter().enumerate() {
        let ask = || by_shop(method, path, Some(path.replace('/', "-")), body.clone());
        let first = bank.send(ask()).await;
        assert_eq!(first.status, status, "{path}: {}", first.json());
        assert_eq!(without_number(&first), expected, "{path}");
        bank.send(ask()).await.assert_replays(&first);
        assert_eq!(bank.runs(), runs + 1, "{path}");
    }

    // The state is what one of each has made of it.
    let balances = [9_975_000, 10_025_000, 9_975_000, 10_020_001, 9_979_798];
    for (wallet, balance) in (1..).zip(balances) {
        assert_eq!(bank.balance(wallet).await, balance, "wallet {wallet}");
    }
    assert_eq!(bank.balance(0).await, 201, "the house has the fee");
    assert_eq!(bank.wrong_wallets().await, 0);
    let payouts = "SELECT count(*) FROM wallet_payouts WHERE wallet_id = 3";
    assert_eq!(bank.ask(payouts).await, 1);
    let expected = json!({
        "wallet_id": 6,
        "label": "rent",
        "balance_satang": 10_000_000,
        "daily_limit_satang": 7,
        "version": 2,
    });
    assert_eq!(bank.get("/wallets/6").await.json(), expected);
    for (customer, guarded_by) in [(1, "total"), (2, "lock"), (3, "serializable")] {
        let expected = json!({
            "customer_id": customer,
            "guarded_by": guarded_by,
            "savings_satang": -1_000_000,
            "checking_satang": 5_000_000,
            "total_satang": 4_000_000,
        });
        let found = bank.get(&format!("/customers/{customer}")).await;
        assert_eq!(found.json(), expected);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_first_start_opens_ten_wallets_and_the_next_one_changes_nothing() {
    let bank = Bank::open().await;
    bank.post("/wallets/1/withdrawals", "w", json!({ "amount_satang": 1 }))
        .await;
    service::create_tables(&bank.pool).await.unwrap();
    assert_eq!(bank.balance(1).await, 9_999_999);
    for wallet in 2..=10 {
        assert_eq!(bank.balance(wallet).await, 10_000_000);
    }
    assert_eq!(bank.ask("SELECT count(*) FROM wallet_accounts").await, 11);
    assert_eq!(bank.ask("SELECT count(*) FROM wallet_ledger").await, 11);
    assert_eq!(bank.wrong_wallets().await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_does_not_exist_is_not_found() {
    let bank = Bank::open().await;
    let amount = json!({ "amount_satang": 100 });
    let withdrawal = json!({ "from": "checking", "amount_satang": 100 });
    let mut answers = vec![
        bank.get("/wallets/11").await,
        bank.get("/customers/4").await,
    ];
    for (path, body) in [
        ("/wallets/11/withdrawals", &amount),
        ("/wallets/11/deposits", &amount),
        ("/wallets/11/payouts", &amount),
        (
            "/transfers",
            &json!({ "from": 1, "to": 11, "amount_satang": 100 }),
        ),
        (
            "/transfers",
            &json!({ "from": 11, "to": 1, "amount_satang": 100 }),
        ),
        ("/customers/4/withdrawals", &withdrawal),
        ("/customers/4/withdrawals/by-lock", &withdrawal),
        ("/customers/4/withdrawals/serializable", &withdrawal),
        // One rule has one cure: these are guarded by another.
        ("/customers/2/withdrawals", &withdrawal),
        ("/customers/3/withdrawals/by-lock", &withdrawal),
        ("/customers/1/withdrawals/serializable", &withdrawal),
    ] {
        let key = format!("unknown-{}", answers.len());
        answers.push(bank.post(path, key, body.clone()).await);
    }
    let settings = json!({ "version": 1, "label": "rent" });
    answers.push(bank.put("/wallets/11/settings", None, settings).await);
    assert_said(&answers, &vec![(404, "not_found"); answers.len()]);
    assert_eq!(bank.get("/elsewhere").await.status, 404);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn amounts_are_whole_positive_and_sane() {
    let bank = Bank::open().await;
    let absurd = [
        json!(0),
        json!(-1),
        json!(1.5),
        json!(100_000_000_001_i64),
        json!(i64::MAX),
        json!(1e30),
        json!("100"),
        json!(null),
    ];
    for path in [
        "/wallets/1/withdrawals",
        "/wallets/1/deposits",
        "/wallets/1/payouts",
        "/transfers",
        "/customers/1/withdrawals",
        "/customers/2/withdrawals/by-lock",
        "/customers/3/withdrawals/serializable",
    ] {
        for amount in &absurd {
            let from = match path {
                "/transfers" => json!(1),
                _ => json!("savings"),
            };
            let body = json!({ "from": from, "to": 2, "amount_satang": amount });
            let answer = bank.post(path, "absurd", body).await;
            assert_eq!(said(&answer), (422, "invalid_request".into()), "{amount}");
        }
    }
    // The key is free again, even for what was meant in the first place.
    let meant = json!({ "amount_satang": 100_000_000_000_i64 });
    let answer = bank.post("/wallets/1/deposits", "absurd", meant).await;
    assert_eq!(answer.status, 201);
    assert_eq!(bank.balance(1).await, 100_010_000_000);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_understood_is_refused_in_json() {
    let bank = Bank::open().await;
    let settings = |label: &str| json!({ "version": 1, "label": label });
    let transfer =
        |from: i64, to: i64| json!({ "from": from, "to": to, "amount_satang": 1_000_000 });
    let answers = [
        bank.post("/transfers", "a", transfer(1, 1)).await,
        bank.post("/transfers", "b", transfer(0, 1)).await,
        bank.post("/transfers", "c", transfer(1, 0)).await,
        bank.put("/wallets/1/settings", None, settings(" ")).await,
        bank.put("/wallets/1/settings", None, settings("nul \0 nul"))
            .await,
        bank.put("/wallets/1/settings", None, settings(&"x".repeat(201)))
            .await,
    ];
    assert_said(
        &answers,
        &[
            (422, "same_wallet"),
            (422, "house_wallet"),
            (422, "house_wallet"),
            (422, "invalid_label"),
            (422, "invalid_label"),
            (422, "invalid_label"),
        ],
    );

    let mut cut = by_shop("POST", "/transfers", Some("d".into()), json!(null));
    *cut.body_mut() = Body::from("{\"from\":");
    let mut text = by_shop("POST", "/transfers", Some("e".into()), json!(null));
    text.headers_mut()
        .insert("content-type", "text/plain".parse().unwrap());
    let answers = [bank.send(cut).await, bank.send(text).await];
    assert_said(
        &answers,
        &[(400, "invalid_request"), (415, "invalid_request")],
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_post_needs_a_key_and_a_key_needs_a_client() {
    let bank = Bank::open().await;
    let path = "/wallets/1/withdrawals";
    let body = json!({ "amount_satang": 100 });
    let keyless = bank.send(by_shop("POST", path, None, body.clone())).await;
    assert_eq!(keyless.said(), (400, "idempotency_key_required".to_owned()));
    for client in [None, Some("")] {
        let mut nobody = request("POST", path, Some("w"), body.to_string());
        if let Some(client) = client {
            let client = client.parse().unwrap();
            nobody.headers_mut().insert("x-client-id", client);
        }
        let nobody = bank.send(nobody).await;
        assert_eq!(nobody.said(), (403, "idempotency_scope_unknown".to_owned()));
    }
    assert_eq!((bank.runs(), bank.balance(1).await), (0, 10_000_000));

    // Two clients may choose the same key.
    for (client, left) in [("shop", 9_999_900), ("stall", 9_999_800)] {
        let mut request = by_shop("POST", path, Some("w".into()), body.clone());
        let client = client.parse().unwrap();
        request.headers_mut().insert("x-client-id", client);
        let answer = bank.send(request).await;
        assert!(!answer.replay);
        assert_eq!(answer.json()["balance_satang"], left);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_belongs_to_one_action() {
    let bank = Bank::open().await;
    let path = "/wallets/1/withdrawals";
    let first = bank.post(path, "w", json!({ "amount_satang": 100 })).await;
    assert_eq!(first.status, 201);
    let other = bank.post(path, "w", json!({ "amount_satang": 101 })).await;
    assert_eq!(other.said(), (409, "idempotency_key_reused".to_owned()));
    let elsewhere = "/wallets/2/withdrawals";
    let other = bank.post(elsewhere, "w", json!({ "amount_satang": 100 }));
    let other = other.await;
    assert_eq!(other.said(), (409, "idempotency_key_reused".to_owned()));
    assert_eq!(bank.balance(1).await, 9_999_900);
    assert_eq!(bank.balance(2).await, 10_000_000);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_simulated_delay_holds_the_answer_and_a_mad_one_takes_the_effect_back() {
    let bank = Bank::open().await;
    let ask = |key: &str, delay| {
        let body = json!({ "amount_satang": 100 });
        let ask = by_shop("POST", "/wallets/1/withdrawals", Some(key.into()), body);
        slowly(ask, delay)
    };
    for (key, delay) in [("a", "9001"), ("b", "-1"), ("c", "soon")] {
        let answer = bank.send(ask(key, delay)).await;
        let expected = (422, "delay_must_be_0_to_9000_ms".to_owned());
        assert_eq!(said(&answer), expected, "{delay}");
    }
    assert_eq!(bank.balance(1).await, 10_000_000);

    let first = tokio::spawn({
        let (bank, ask) = (bank.clone(), ask("d", "2000"));
        async move { bank.send(ask).await }
    });
    eventually("the handler to run", || bank.runs() == 4).await;
    let duplicate = bank.send(ask("d", "2000")).await;
    assert_eq!(duplicate.said(), (409, "idempotency_in_flight".to_owned()));
    assert!(!first.is_finished());
    // Nobody sees what may still be rolled back.
    assert_eq!(bank.balance(1).await, 10_000_000);
    assert_eq!(first.await.unwrap().status, 201);
    assert_eq!(bank.balance(1).await, 9_999_900);
    assert_eq!(bank.runs(), 4);
}

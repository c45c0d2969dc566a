//! Actions that meet in one row.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use axum::http::StatusCode;
use serde_json::json;
use tokio::task::JoinSet;

use super::bank::{Bank, Setup, assert_said, at_once, by_shop, rounds, said, slowly};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_withdrawals_of_80_from_100_one_is_declined() {
    let bank = Bank::open().await;
    bank.open_wallets(1_000..2_000, 100).await;
    let all = bank.clone();
    rounds(1_000..2_000, move |wallet| {
        let bank = all.clone();
        async move {
            let path = format!("/wallets/{wallet}/withdrawals");
            let withdraw = |key| {
                let key = Some(format!("{wallet}-{key}"));
                by_shop("POST", &path, key, json!({ "amount_satang": 80 }))
            };
            let answers = at_once(&bank, [withdraw("a"), withdraw("b")]).await;
            assert_said(&answers, &[(201, ""), (402, "insufficient_funds")]);
            assert_eq!(answers[0].json()["balance_satang"], 20);
        }
    })
    .await;
    let right = "SELECT count(*) FROM wallet_accounts WHERE id >= 1000 AND balance_satang = 20";
    assert_eq!(bank.ask(right).await, 1_000);
    assert_eq!(bank.wrong_wallets().await, 0);
    assert_eq!(bank.runs(), 2_000, "something had to be run again");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_double_click_is_one_withdrawal() {
    let bank = Bank::open().await;
    bank.open_wallets(1_000..1_200, 100).await;
    let all = bank.clone();
    rounds(1_000..1_200, move |wallet| {
        let bank = all.clone();
        async move {
            let path = format!("/wallets/{wallet}/withdrawals");
            let click = || {
                let key = Some(format!("click-{wallet}"));
                by_shop("POST", &path, key, json!({ "amount_satang": 40 }))
            };
            let answers = at_once(&bank, [click(), click()]).await;
            let first = answers.iter().find(|answer| !answer.replay).unwrap();
            assert_eq!(first.json()["balance_satang"], 60);
            match &answers {
                [one, other] if one.replay => one.assert_replays(other),
                [one, other] if other.replay => other.assert_replays(one),
                [_, other] => {
                    assert_eq!(other.said(), (409, "idempotency_in_flight".to_owned()));
                }
            }
            bank.send(click()).await.assert_replays(first);
        }
    })
    .await;
    let right = "SELECT count(*) FROM wallet_accounts WHERE id >= 1000 AND balance_satang = 60";
    assert_eq!(bank.ask(right).await, 200);
    assert_eq!(bank.wrong_wallets().await, 0);
    assert_eq!(bank.runs(), 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn opposite_transfers_neither_deadlock_nor_lose_money() {
    let bank = Bank::open().await;
    bank.run("UPDATE wallet_accounts SET daily_limit_satang = 100000000000")
        .await;
    let done = Arc::new(AtomicBool::new(false));
    let auditor = tokio::spawn({
        let (bank, done) = (bank.clone(), done.clone());
        async move {
            let mut audits = 0;
            while !done.load(Ordering::SeqCst) {
                let sum = "SELECT sum(balance_satang)::bigint FROM wallet_accounts";
                assert_eq!(bank.ask(sum).await, 100_000_000);
                assert_eq!(bank.wrong_wallets().await, 0);
                audits += 1;
            }
            audits
        }
    });

    let mut clients = JoinSet::new();
    for client in 0..6 {
        let bank = bank.clone();
        // Back and forth between two wallets, and now and then a third one.
        let (from, to) = [(1, 2), (2, 1), (1, 2), (2, 1), (2, 3), (3, 1)][client];
        clients.spawn(async move {
            for number in 0..100 {
                let body = json!({ "from": from, "to": to, "amount_satang": 15_000 });
                let key = format!("{client}-{number}");
                let answer = bank.post("/transfers", key, body).await;
                assert_eq!(said(&answer), (201, String::new()));
            }
        });
    }
    while let Some(client) = clients.join_next().await {
        client.unwrap();
    }
    done.store(true, Ordering::SeqCst);
    assert!(auditor.await.unwrap() > 10);

    let amounts = 100 * 15_000;
    let fees = 100 * 150;
    assert_eq!(bank.balance(0).await, 6 * fees);
    assert_eq!(bank.balance(1).await, 10_000_000 + amounts - 2 * fees);
    assert_eq!(bank.balance(2).await, 10_000_000 - amounts - 3 * fees);
    assert_eq!(bank.balance(3).await, 10_000_000 - fees);
    assert_eq!(bank.wrong_wallets().await, 0);
    // The layer runs again what was a deadlock's victim. In one order of locks there is none.
    assert_eq!(bank.runs(), 600, "there were deadlocks");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn transfers_at_once_do_not_exceed_the_daily_limit() {
    let bank = Bank::open().await;
    bank.open_wallets(1_000..1_020, 1_000_000).await;
    bank.run("UPDATE wallet_accounts SET daily_limit_satang = 100000 WHERE id >= 1000")
        .await;
    // All of it must be on one day.
    let left = "SELECT extract(epoch FROM date_trunc('day', clock_timestamp(), 'Asia/Bangkok')
            + interval '1 day' - clock_timestamp())::bigint";
    if let left @ ..20 = bank.ask(left).await {
        tokio::time::sleep(Duration::from_secs(left.unsigned_abs() + 1)).await;
    }
    for wallet in 1_000..1_020 {
        let mut transfers = JoinSet::new();
        // To as many receivers, so that the sender's row is all they have in common but the house's.
        for to in 1..=8 {
            let bank = bank.clone();
            transfers.spawn(async move {
                let body = json!({ "from": wallet, "to": to, "amount_satang": 30_000 });
                bank.post("/transfers", format!("{wallet}-{to}"), body)
                    .await
            });
        }
        let mut answers = transfers.join_all().await;
        answers.sort_by_key(|answer| answer.status);
        let mut expected = vec![(201, ""); 3];
        expected.extend([(422, "daily_limit_exceeded"); 5]);
        assert_said(&answers, &expected);
        assert_eq!(bank.balance(wallet).await, 1_000_000 - 3 * 30_300);
    }
    assert_eq!(bank.wrong_wallets().await, 0);

    // What was sent yesterday does not count today, and a refusal leaves the key free.
    bank.run("UPDATE wallet_ledger SET entered_at = entered_at - interval '1 day'")
        .await;
    let refused = "SELECT min(id) FROM wallet_accounts AS receiver WHERE id BETWEEN 1 AND 8
         AND NOT EXISTS (SELECT FROM wallet_transfers
                         WHERE from_wallet = 1000 AND to_wallet = receiver.id)";
    let to = bank.ask(refused).await;
    let body = json!({ "from": 1_000, "to": to, "amount_satang": 30_000 });
    let today = bank.post("/transfers", format!("1000-{to}"), body).await;
    assert_eq!((today.status, today.replay), (StatusCode::CREATED, false));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_payouts_one_is_told_that_another_is_pending() {
    let bank = Bank::open().await;
    bank.open_wallets(1_000..1_100, 100).await;
    let all = bank.clone();
    rounds(1_000..1_100, move |wallet| {
        let bank = all.clone();
        async move {
            let path = format!("/wallets/{wallet}/payouts");
            let request = |key| {
                let key = Some(format!("{wallet}-{key}"));
                let payout = by_shop("POST", &path, key, json!({ "amount_satang": 40 }));
                slowly(payout, "2")
            };
            let answers = at_once(&bank, [request("a"), request("b")]).await;
            assert_said(&answers, &[(201, ""), (409, "payout_pending")]);
            assert_eq!(bank.balance(wallet).await, 60);
        }
    })
    .await;
    let pending = "SELECT count(*) FROM wallet_payouts";
    assert_eq!(bank.ask(pending).await, 100);
    assert_eq!(bank.wrong_wallets().await, 0);
    assert_eq!(bank.runs(), 200, "something had to be run again");

    // Once it is paid, the next one may come, even under the key that was refused.
    bank.run("UPDATE wallet_payouts SET state = 'paid'").await;
    let mut answers = Vec::new();
    for key in ["1000-a", "1000-b"] {
        let body = json!({ "amount_satang": 40 });
        answers.push(bank.post("/wallets/1000/payouts", key, body).await);
    }
    answers.sort_by_key(|answer| answer.replay);
    assert_said(&answers, &[(201, ""), (201, "")]);
    assert_eq!((answers[0].replay, answers[1].replay), (false, true));
    assert_eq!(bank.balance(1_000).await, 20);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn settings_that_somebody_else_has_changed_are_left_alone() {
    let bank = Bank::open().await;
    let path = "/wallets/1/settings";
    for version in 1..=50 {
        let change = |label: &str, key: Option<&str>| {
            let body = json!({ "version": version, "label": label });
            let key = key.map(|key| format!("{key}-{version}"));
            by_shop("PUT", path, key, body)
        };
        // One with a key and one without.
        let both = [change("rent", Some("s")), change("food", None)];
        let answers = at_once(&bank, both).await;
        assert_said(&answers, &[(200, ""), (409, "version_conflict")]);
        let wallet = bank.get("/wallets/1").await.json();
        assert_eq!(wallet["version"], version + 1);
        assert_eq!(wallet["label"], answers[0].json()["label"]);
    }
    // Who looks again may change them under the same key, for nothing was kept of the conflict.
    let stale = json!({ "version": 1, "label": "stale" });
    let conflict = bank.put(path, Some("k"), stale).await;
    let fresh = json!({ "version": 51, "label": "fresh" });
    let changed = bank.put(path, Some("k"), fresh.clone()).await;
    let answers = [conflict, changed.clone()];
    assert_said(&answers, &[(409, "version_conflict"), (200, "")]);
    bank.put(path, Some("k"), fresh)
        .await
        .assert_replays(&changed);
    // A movement of money is no change of the settings.
    bank.post("/wallets/1/deposits", "d", json!({ "amount_satang": 1 }))
        .await;
    assert_eq!(bank.get("/wallets/1").await.json()["version"], 52);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_waits_too_long_for_a_row_is_told_to_come_again() {
    let bank = Bank::open().await;
    let path = "/wallets/1/withdrawals";
    let amount = json!({ "amount_satang": 100 });
    let slow = by_shop("POST", path, Some("slow".into()), amount.clone());
    let slow = tokio::spawn({
        let (bank, slow) = (bank.clone(), slowly(slow, "4000"));
        async move { bank.send(slow).await }
    });
    bank.entered().await;
    // Another row is free.
    let elsewhere = bank.post("/wallets/2/withdrawals", "b", amount.clone());
    assert_eq!(elsewhere.await.status, StatusCode::CREATED);
    let late = bank.post(path, "a", amount.clone()).await;
    assert_eq!(late.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(late.header("retry-after"), Some("1"));
    assert!(!slow.is_finished());

    assert_eq!(slow.await.unwrap().status, StatusCode::CREATED);
    let again = bank.post(path, "a", amount).await;
    assert_eq!((again.status, again.replay), (StatusCode::CREATED, false));
    assert_eq!(bank.balance(1).await, 10_000_000 - 2 * 100);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn more_requests_than_connections_wait_for_their_turn() {
    let bank = Bank::open_with(Setup {
        connections: 4,
        ..Setup::default()
    })
    .await;
    let mut withdrawals = JoinSet::new();
    for number in 0..200 {
        let bank = bank.clone();
        withdrawals.spawn(async move {
            let path = format!("/wallets/{}/withdrawals", number % 10 + 1);
            bank.post(&path, number, json!({ "amount_satang": 100 }))
                .await
        });
    }
    let answers = withdrawals.join_all().await;
    assert_said(&answers, &vec![(201, ""); 200]);
    for wallet in 1..=10 {
        assert_eq!(bank.balance(wallet).await, 10_000_000 - 20 * 100);
    }
}

//! A decline is judged anew, unless its handler wants it to be the last word.

use axum::{
    Router,
    extract::Path,
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::post,
};
use serde_json::json;
use sqlx::PgPool;
use tower_idempotency::Retain;

use super::bank::{Bank, Setup, assert_said};
use crate::{
    service::{
        Tx,
        drill::Pause,
        given::Given,
        refused::Refused,
        wallets::{self, Movement},
    },
    support::Answer,
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_decline_is_judged_anew_once_there_is_money() {
    let bank = Bank::open().await;
    let too_much = json!({ "amount_satang": 10_000_001 });
    let withdraw = |key| bank.post("/wallets/1/withdrawals", key, too_much.clone());
    let declined = [withdraw("w").await, withdraw("w").await];
    assert_said(&declined, &[(402, "insufficient_funds"); 2]);
    assert!(!declined[1].replay);
    assert_eq!(bank.balance(1).await, 10_000_000);
    let entries = bank.ask("SELECT count(*) FROM wallet_ledger").await;
    assert_eq!(entries, 10, "a decline leaves no entry");

    let little = json!({ "amount_satang": 1 });
    let deposit = bank.post("/wallets/1/deposits", "d", little).await;
    assert_eq!(deposit.status, 201);
    let first = withdraw("w").await;
    assert_eq!((first.status, first.replay), (StatusCode::CREATED, false));
    withdraw("w").await.assert_replays(&first);
    assert_eq!((bank.balance(1).await, bank.wrong_wallets().await), (0, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_route_declines_what_there_is_no_money_for_and_takes_all_of_it_back() {
    let bank = Bank::open().await;
    bank.run("UPDATE wallet_accounts SET daily_limit_satang = 100000000000")
        .await;
    let too_much = 10_000_001;
    let by_customer = json!({ "from": "savings", "amount_satang": too_much });
    let answers = [
        // The payout is written before the money is asked for.
        bank.post(
            "/wallets/1/payouts",
            1,
            json!({ "amount_satang": too_much }),
        )
        .await,
        // There is enough for the amount, and not for the fee.
        bank.post(
            "/transfers",
            2,
            json!({ "from": 2, "to": 3, "amount_satang": 9_900_991 }),
        )
        .await,
        bank.post("/customers/1/withdrawals", 3, by_customer.clone())
            .await,
        bank.post("/customers/2/withdrawals/by-lock", 4, by_customer.clone())
            .await,
        bank.post("/customers/3/withdrawals/serializable", 5, by_customer)
            .await,
    ];
    assert_said(&answers, &[(402, "insufficient_funds"); 5]);
    for table in [
        "SELECT count(*) FROM wallet_payouts",
        "SELECT count(*) FROM wallet_transfers",
        "SELECT count(*) FROM wallet_customer_withdrawals",
    ] {
        assert_eq!(bank.ask(table).await, 0, "{table}");
    }
    let all = json!({ "from": 2, "to": 3, "amount_satang": 9_900_990 });
    let answer = bank.post("/transfers", 6, all).await;
    assert_eq!(
        (answer.status, bank.balance(2).await),
        (StatusCode::CREATED, 0)
    );
    let total = "SELECT sum(balance_satang)::bigint FROM wallet_customer_accounts";
    assert_eq!(bank.ask(total).await, 30_000_000);
}

/// A service whose declines are final. Nothing but the answer is different.
async fn withdraw_or_never(
    tx: Tx,
    wallet: Path<i64>,
    pause: Pause,
    movement: Given<Movement>,
) -> Response {
    match wallets::withdraw(tx, wallet, pause, movement).await {
        Err(declined @ Refused::Because(StatusCode::PAYMENT_REQUIRED, _)) => {
            (Retain::Keep, declined).into_response()
        }
        otherwise => otherwise.into_response(),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_decline_that_is_kept_is_replayed_whatever_the_balance() {
    let more: Router<PgPool> = Router::new().route("/final/{id}", post(withdraw_or_never));
    let bank = Bank::open_with(Setup {
        more,
        ..Setup::default()
    })
    .await;
    let too_much = json!({ "amount_satang": 10_000_001 });
    let withdraw = |key| bank.post("/final/1", key, too_much.clone());
    let first: Answer = withdraw("w").await;
    assert_said(std::slice::from_ref(&first), &[(402, "insufficient_funds")]);
    let little = json!({ "amount_satang": 1 });
    bank.post("/wallets/1/deposits", "d", little).await;
    withdraw("w").await.assert_replays(&first);
    assert_eq!(bank.balance(1).await, 10_000_001);
    // The decline was that key's, and is no other's.
    assert_eq!(withdraw("another").await.status, StatusCode::CREATED);
    assert_eq!((bank.balance(1).await, bank.wrong_wallets().await), (0, 0));
}

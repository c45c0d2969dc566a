//! Two withdrawals, each from another account of one customer, who may overdraw one account but not both
//! together.

use std::sync::Arc;

use axum::{
    Json, Router,
    extract::{Path, Request},
    http::StatusCode,
    routing::post,
};
use serde_json::json;
use tokio::sync::Barrier;
use tower_idempotency::Isolation;

use super::bank::{Bank, Setup, assert_said, at_once, by_shop, rounds, slowly};
use crate::service::{
    Tx,
    customers::{Withdrawal, take, total},
    refused::Refused,
};

/// 50 on each account of every customer from 1000 on, who are a hundred.
async fn with_customers(bank: &Bank, guarded_by: &'static str) {
    let opened = sqlx::query(
        "WITH opened AS (
             INSERT INTO wallet_customers (id, guarded_by, total_satang)
             SELECT id, $1, CASE $1 WHEN 'total' THEN 100 END
             FROM generate_series(1000, 1099) AS id
             RETURNING id
         )
         INSERT INTO wallet_customer_accounts (customer_id, kind, balance_satang)
         SELECT id, kind, 50 FROM opened, (VALUES ('savings'), ('checking')) AS kinds (kind)",
    );
    let opened = opened.bind(guarded_by).execute(&bank.pool);
    opened.await.unwrap();
}

/// 80 from each account, with time enough for the two to meet.
fn both(customer: i64, path: &str) -> [Request; 2] {
    ["savings", "checking"].map(|account| {
        let key = Some(format!("{customer}-{account}"));
        let body = json!({ "from": account, "amount_satang": 80 });
        slowly(by_shop("POST", path, key, body), "2")
    })
}

/// The mistake: reads, judges, writes, and nothing else.
async fn withdraw_unguarded(
    mut tx: Tx,
    isolation: Isolation,
    customer: i64,
    order: Withdrawal,
    judged: Arc<Barrier>,
) -> Result<StatusCode, Refused> {
    tx.isolation(isolation)?;
    let total = total(&mut tx, customer, "lock").await?;
    // Both have read before one of them writes.
    judged.wait().await;
    if total < Some(80) {
        return Err(Refused::insufficient());
    }
    take(&mut tx, customer, &order).await?;
    Ok(StatusCode::CREATED)
}

/// What two withdrawals at once come to without a cure.
async fn total_without_a_cure(isolation: Isolation) -> i64 {
    let judged = Arc::new(Barrier::new(2));
    let handler = move |tx: Tx, Path(customer), Json(order)| {
        withdraw_unguarded(tx, isolation, customer, order, judged)
    };
    let more = Router::new().route("/unguarded/{id}", post(handler));
    let bank = Bank::open_with(Setup {
        more,
        ..Setup::default()
    })
    .await;
    with_customers(&bank, "lock").await;
    let answers = at_once(&bank, both(1_000, "/unguarded/1000")).await;
    assert_said(&answers, &[(201, ""), (201, "")]);
    let customer = bank.get("/customers/1000").await.json();
    customer["total_satang"].as_i64().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_cure_both_pass_and_the_total_falls_below_zero() {
    assert_eq!(total_without_a_cure(Isolation::ReadCommitted).await, -60);
    assert_eq!(total_without_a_cure(Isolation::RepeatableRead).await, -60);
}

/// A hundred rounds under one cure, in each of which one is declined. Answers how often handlers ran.
async fn runs_under(
    cure: &'static str,
    guarded_by: &'static str,
    isolation: &'static str,
) -> usize {
    let bank = Bank::open_with(Setup {
        isolation,
        ..Setup::default()
    })
    .await;
    with_customers(&bank, guarded_by).await;
    let all = bank.clone();
    rounds(1_000..1_100, move |customer| {
        let bank = all.clone();
        async move {
            let path = format!("/customers/{customer}/withdrawals{cure}");
            let answers = at_once(&bank, both(customer, &path)).await;
            assert_said(&answers, &[(201, ""), (402, "insufficient_funds")]);
            assert_eq!(answers[0].json()["total_satang"], 20);
        }
    })
    .await;
    let wrong = "SELECT count(*) FROM (
             SELECT 1 FROM wallet_customers JOIN wallet_customer_accounts ON customer_id = id
             WHERE id >= 1000 GROUP BY id
             HAVING sum(balance_satang) <> 20 OR sum(balance_satang) <> coalesce(total_satang, 20)
         ) AS wrong";
    assert_eq!(bank.ask(wrong).await, 0);
    let withdrawals = "SELECT count(*) FROM wallet_customer_withdrawals";
    assert_eq!(bank.ask(withdrawals).await, 100);
    bank.runs()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_row_with_the_total_cures_it() {
    assert_eq!(runs_under("", "total", "").await, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_on_the_parent_cures_it_whatever_the_databases_isolation_level() {
    assert_eq!(runs_under("/by-lock", "lock", "").await, 200);
    let stricter = "repeatable read";
    assert_eq!(runs_under("/by-lock", "lock", stricter).await, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn serializable_transactions_cure_it_by_being_run_again() {
    let runs = runs_under("/serializable", "serializable", "").await;
    assert!(runs > 200, "no two transactions have met");
}

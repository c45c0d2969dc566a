//! Money in and out of one wallet.

use axum::{
    Json,
    extract::{Path, State},
    http::StatusCode,
};
use serde::Deserialize;
use serde_json::{Value, json};
use sqlx::PgPool;

use super::{
    Tx,
    drill::Pause,
    given::{Amount, Given},
    ledger,
    refused::Refused,
};

#[derive(Deserialize)]
pub struct Movement {
    amount_satang: Amount,
}

pub async fn withdraw(
    mut tx: Tx,
    Path(wallet): Path<i64>,
    pause: Pause,
    Given(movement): Given<Movement>,
) -> Result<(StatusCode, Json<Value>), Refused> {
    let Amount(amount) = movement.amount_satang;
    let entered = ledger::debit(&mut tx, wallet, amount, "withdrawal").await?;
    pause.take().await?;
    let body = json!({ "withdrawal_id": entered.entry, "balance_satang": entered.balance });
    // With this answer the transaction is committed, and the record of the key with it.
    Ok((StatusCode::CREATED, Json(body)))
}

pub async fn deposit(
    mut tx: Tx,
    Path(wallet): Path<i64>,
    pause: Pause,
    Given(movement): Given<Movement>,
) -> Result<(StatusCode, Json<Value>), Refused> {
    let Amount(amount) = movement.amount_satang;
    let entered = ledger::credit(&mut tx, wallet, amount, "deposit").await?;
    pause.take().await?;
    let body = json!({ "deposit_id": entered.entry, "balance_satang": entered.balance });
    Ok((StatusCode::CREATED, Json(body)))
}

/// The present state. A replay is a picture of the past; whoever wants to know what is so now asks here.
pub async fn show(
    State(pool): State<PgPool>,
    Path(wallet): Path<i64>,
) -> Result<Json<Value>, Refused> {
    let found = sqlx::query_as(
        "SELECT label, balance_satang, daily_limit_satang, version
         FROM wallet_accounts WHERE id = $1",
    );
    let found: Option<(String, i64, i64, i64)> = found.bind(wallet).fetch_optional(&pool).await?;
    let (label, balance, daily_limit, version) = found.ok_or_else(Refused::missing)?;
    Ok(Json(json!({
        "wallet_id": wallet,
        "label": label,
        "balance_satang": balance,
        "daily_limit_satang": daily_limit,
        "version": version,
    })))
}

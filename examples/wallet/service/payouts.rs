//! Money on its way to a bank account.

use axum::{Json, extract::Path, http::StatusCode};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    Tx,
    drill::Pause,
    given::{Amount, Given},
    ledger,
    refused::Refused,
};

#[derive(Deserialize)]
pub struct NewPayout {
    amount_satang: Amount,
}

/// Takes the money out of the wallet and leaves the payout for a worker, which calls the bank outside any
/// transaction, with the payout's id as its own idempotency key, and then marks it paid or failed.
pub async fn request(
    mut tx: Tx,
    Path(wallet): Path<i64>,
    pause: Pause,
    Given(payout): Given<NewPayout>,
) -> Result<(StatusCode, Json<Value>), Refused> {
    let Amount(amount) = payout.amount_satang;
    let id = match open(&mut tx, wallet, amount).await? {
        Some(id) => id,
        None if ledger::exists(&mut tx, wallet).await? => {
            return Err(Refused::conflict("payout_pending"));
        }
        None => return Err(Refused::missing()),
    };
    let entered = ledger::debit(&mut tx, wallet, amount, "payout").await?;
    pause.take().await?;
    Ok((
        StatusCode::CREATED,
        Json(json!({
            "payout_id": id,
            "state": "pending",
            "balance_satang": entered.balance,
        })),
    ))
}

/// Answers nothing where one is pending already, or there is no such wallet.
///
/// A unique index is the right cure for "at most one": it also sees the row that a rival has written and not
/// yet committed, which no SELECT does, and waits to learn what becomes of it. `ON CONFLICT DO NOTHING`
/// tells the loser so by a row that is missing; an error (23505) would abort its transaction, in which it
/// could not even ask why.
async fn open(tx: &mut Tx, wallet: i64, amount: i64) -> Result<Option<i64>, Refused> {
    let opened = sqlx::query_scalar(
        "INSERT INTO wallet_payouts (wallet_id, amount_satang)
         SELECT id, $2 FROM wallet_accounts WHERE id = $1
         ON CONFLICT (wallet_id) WHERE state = 'pending' DO NOTHING
         RETURNING id",
    );
    let opened = opened.bind(wallet).bind(amount);
    Ok(opened.fetch_optional(tx).await?)
}

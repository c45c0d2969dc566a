//! Money from one wallet to another, for a fee, within a daily limit.

use axum::{Json, http::StatusCode};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    Tx,
    drill::Pause,
    given::{Amount, Given},
    refused::Refused,
};

/// The wallet that the fees go to.
const HOUSE: i64 = 0;

#[derive(Deserialize)]
pub struct Transfer {
    from: i64,
    to: i64,
    amount_satang: Amount,
}

/// Locks the rows first, and judges then.
///
/// The right cure where the decision takes more than one row, or more than a condition can say. The locks
/// are held to the end of the transaction, so it must be a short one.
pub async fn transfer(
    mut tx: Tx,
    pause: Pause,
    Given(order): Given<Transfer>,
) -> Result<(StatusCode, Json<Value>), Refused> {
    let Amount(amount) = order.amount_satang;
    if order.from == order.to {
        return Err(Refused::unprocessable("same_wallet"));
    }
    // Its row is always the last one to be locked, and would be the first one here.
    if order.from == HOUSE || order.to == HOUSE {
        return Err(Refused::unprocessable("house_wallet"));
    }
    let fee = fee(amount);
    let sender = lock(&mut tx, order.from, order.to).await?;
    if sender.balance < amount + fee {
        return Err(Refused::insufficient());
    }
    if sent_today(&mut tx, order.from).await? + amount > sender.daily_limit {
        return Err(Refused::unprocessable("daily_limit_exceeded"));
    }
    let id = book(&mut tx, &order, fee).await?;
    pause.take().await?;
    Ok((
        StatusCode::CREATED,
        Json(json!({
            "transfer_id": id,
            "fee_satang": fee,
            "balance_satang": sender.balance - amount - fee,
        })),
    ))
}

/// One per cent, rounded up, and at least one baht.
fn fee(amount: i64) -> i64 {
    ((amount + 99) / 100).max(100)
}

struct Sender {
    balance: i64,
    daily_limit: i64,
}

/// Locks both wallets, in the order of their ids. Two transfers in opposite directions then ask for their
/// first row in turn; in the order they were named in, each would hold what the other one needs.
async fn lock(tx: &mut Tx, from: i64, to: i64) -> Result<Sender, Refused> {
    let rows = sqlx::query_as(
        "SELECT id, balance_satang, daily_limit_satang FROM wallet_accounts
         WHERE id = ANY($1) ORDER BY id FOR UPDATE",
    );
    let rows: Vec<(i64, i64, i64)> = rows.bind([from, to]).fetch_all(tx).await?;
    if rows.len() != 2 {
        return Err(Refused::missing());
    }
    let sender = rows.into_iter().find(|(id, ..)| *id == from);
    let (_, balance, daily_limit) = sender.ok_or_else(Refused::missing)?;
    Ok(Sender {
        balance,
        daily_limit,
    })
}

/// What left the wallet by transfers since midnight in Bangkok, fees aside.
///
/// No other transfer of this wallet can come between, since its row is locked. And this is a statement of
/// its own, begun after the lock was had: the one that waited for the lock would not see what was
/// committed while it waited.
async fn sent_today(tx: &mut Tx, wallet: i64) -> Result<i64, Refused> {
    let sent = sqlx::query_scalar(
        "SELECT coalesce(-sum(amount_satang), 0)::bigint FROM wallet_ledger
         WHERE wallet_id = $1 AND kind = 'transfer_out'
           AND entered_at >= date_trunc('day', clock_timestamp(), 'Asia/Bangkok')",
    );
    Ok(sent.bind(wallet).fetch_one(tx).await?)
}

async fn book(tx: &mut Tx, order: &Transfer, fee: i64) -> Result<i64, Refused> {
    let Amount(amount) = order.amount_satang;
    let id = sqlx::query_scalar(
        "INSERT INTO wallet_transfers (from_wallet, to_wallet, amount_satang, fee_satang)
         VALUES ($1, $2, $3, $4) RETURNING id",
    );
    let id = id.bind(order.from).bind(order.to).bind(amount).bind(fee);
    let id: i64 = id.fetch_one(&mut *tx).await?;

    let entries = sqlx::query(
        "INSERT INTO wallet_ledger (transfer_id, wallet_id, amount_satang, kind)
         VALUES ($1, $2, -$4, 'transfer_out'), ($1, $2, -$5, 'fee'),
                ($1, $3, $4, 'transfer_in'), ($1, 0, $5, 'fee')",
    );
    let entries = entries.bind(id).bind(order.from).bind(order.to);
    entries.bind(amount).bind(fee).execute(&mut *tx).await?;

    change(tx, order.from, -amount - fee).await?;
    change(tx, order.to, amount).await?;
    // Every transfer needs this row, so it is taken last and held only until the commit. Nobody who holds
    // it asks for another one, so the order of the locks is still one order.
    change(tx, HOUSE, fee).await?;
    Ok(id)
}

/// Without a condition: the rows are locked, and were judged.
async fn change(tx: &mut Tx, wallet: i64, by: i64) -> Result<(), Refused> {
    let change = sqlx::query(
        "UPDATE wallet_accounts SET balance_satang = balance_satang + $2 WHERE id = $1",
    );
    change.bind(wallet).bind(by).execute(tx).await?;
    Ok(())
}

//! Changes of one wallet's balance, each with its entry in the ledger.

use super::{Tx, refused::Refused};

/// What became of a wallet.
pub struct Entered {
    /// The entry's number.
    pub entry: i64,
    pub balance: i64,
}

/// Takes an amount out of a wallet, if there is that much in it.
///
/// The right cure where the rule is over one row and can be said in the statement. Two of these at once
/// queue for the row, and the second looks at the condition again, with the balance the first has left.
/// Reading the balance first and writing the difference afterwards is what loses money.
pub async fn debit(
    tx: &mut Tx,
    wallet: i64,
    amount: i64,
    kind: &'static str,
) -> Result<Entered, Refused> {
    let left = sqlx::query_scalar(
        "UPDATE wallet_accounts SET balance_satang = balance_satang - $2
         WHERE id = $1 AND balance_satang >= $2
         RETURNING balance_satang",
    );
    let left = left.bind(wallet).bind(amount).fetch_optional(&mut *tx);
    match left.await? {
        Some(balance) => enter(tx, wallet, -amount, kind, balance).await,
        // Asked only now, and only to tell why.
        None if exists(tx, wallet).await? => Err(Refused::insufficient()),
        None => Err(Refused::missing()),
    }
}

/// Puts an amount into a wallet.
pub async fn credit(
    tx: &mut Tx,
    wallet: i64,
    amount: i64,
    kind: &'static str,
) -> Result<Entered, Refused> {
    let now = sqlx::query_scalar(
        "UPDATE wallet_accounts SET balance_satang = balance_satang + $2
         WHERE id = $1
         RETURNING balance_satang",
    );
    let now = now.bind(wallet).bind(amount).fetch_optional(&mut *tx);
    let balance = now.await?.ok_or_else(Refused::missing)?;
    enter(tx, wallet, amount, kind, balance).await
}

async fn enter(
    tx: &mut Tx,
    wallet: i64,
    amount: i64,
    kind: &'static str,
    balance: i64,
) -> Result<Entered, Refused> {
    let entry = sqlx::query_scalar(
        "INSERT INTO wallet_ledger (wallet_id, amount_satang, kind) VALUES ($1, $2, $3) RETURNING id",
    );
    let entry = entry.bind(wallet).bind(amount).bind(kind);
    let entry = entry.fetch_one(tx).await?;
    Ok(Entered { entry, balance })
}

pub async fn exists(tx: &mut Tx, wallet: i64) -> Result<bool, Refused> {
    let exists = sqlx::query_scalar("SELECT EXISTS (SELECT FROM wallet_accounts WHERE id = $1)");
    Ok(exists.bind(wallet).fetch_one(tx).await?)
}

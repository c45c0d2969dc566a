//! A rule over several rows: a customer's savings and checking account together must not fall below zero,
//! though each of them may.
//!
//! Two withdrawals at once, one from each account, both see enough, write different rows, and do not get in
//! each other's way: this is called write skew. No condition over the row that is written can see it, and
//! neither read committed nor repeatable read does.
//!
//! Three cures follow. Each holds only among those who use it, so one rule has one cure: here the
//! customer's, kept in `guarded_by`, and a withdrawal by another route finds no such customer.

use axum::{
    Json,
    extract::{Path, State},
    http::StatusCode,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sqlx::PgPool;
use tower_idempotency::Isolation;

use super::{
    Tx,
    drill::Pause,
    given::{Amount, Given},
    refused::Refused,
};

#[derive(Deserialize)]
pub struct Withdrawal {
    from: Account,
    amount_satang: Amount,
}

#[derive(Debug, Clone, Copy, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Account {
    Savings,
    Checking,
}

impl Account {
    fn name(self) -> &'static str {
        match self {
            Self::Savings => "savings",
            Self::Checking => "checking",
        }
    }
}

/// Keeps the total in a row of its own, so that the rule over several rows is one over one row, and the
/// conditional `UPDATE` does.
///
/// The first choice where the rule is about a sum or a count: cheap, nothing to retry, and fast to read.
/// The price is that everything which changes an account must change the total as well.
pub async fn withdraw_by_total(
    mut tx: Tx,
    Path(customer): Path<i64>,
    pause: Pause,
    Given(order): Given<Withdrawal>,
) -> Result<(StatusCode, Json<Value>), Refused> {
    let Amount(amount) = order.amount_satang;
    let left = sqlx::query_scalar(
        "UPDATE wallet_customers SET total_satang = total_satang - $2
         WHERE id = $1 AND guarded_by = 'total' AND total_satang >= $2
         RETURNING total_satang",
    );
    let left = left.bind(customer).bind(amount).fetch_optional(&mut tx);
    let Some(left): Option<i64> = left.await? else {
        let exists = total(&mut tx, customer, "total").await?.is_some();
        return Err(if exists {
            Refused::insufficient()
        } else {
            Refused::missing()
        });
    };
    let id = take(&mut tx, customer, &order).await?;
    pause.take().await?;
    Ok(withdrawn(id, left))
}

/// Locks the row that all those it concerns have in common, and then reads as much as it likes.
///
/// The right one where the rule needs more than a sum, or about rows that may not exist yet, which
/// cannot be locked themselves. One customer's withdrawals go one after the other, whichever account they
/// are from. It takes read committed: the lock is not a write, so at repeatable read the second one would
/// go on with what was so before the first.
pub async fn withdraw_by_lock(
    mut tx: Tx,
    Path(customer): Path<i64>,
    pause: Pause,
    Given(order): Given<Withdrawal>,
) -> Result<(StatusCode, Json<Value>), Refused> {
    let locked = sqlx::query(
        "SELECT FROM wallet_customers WHERE id = $1 AND guarded_by = 'lock' FOR UPDATE",
    );
    let locked = locked.bind(customer).fetch_optional(&mut tx).await?;
    locked.ok_or_else(Refused::missing)?;
    withdraw_judged(tx, customer, "lock", pause, order).await
}

/// Lets the database find out: of two transactions that could not have run one after the other, one
/// fails (40001), and the layer runs its handler again.
///
/// The right one where no row stands for the rule, or the rules are many and change often. Everything that
/// touches these rows must be serializable too, conflicts are found between strangers as well, and under
/// load some requests end with 503 after their reruns. A handler must bear being run again: what it does
/// goes through its `Tx`, and nothing else.
pub async fn withdraw_serializable(
    mut tx: Tx,
    Path(customer): Path<i64>,
    pause: Pause,
    Given(order): Given<Withdrawal>,
) -> Result<(StatusCode, Json<Value>), Refused> {
    tx.isolation(Isolation::Serializable)?;
    withdraw_judged(tx, customer, "serializable", pause, order).await
}

/// Reads, judges, writes. By itself this is the mistake; what came before makes it right.
async fn withdraw_judged(
    mut tx: Tx,
    customer: i64,
    guarded_by: &'static str,
    pause: Pause,
    order: Withdrawal,
) -> Result<(StatusCode, Json<Value>), Refused> {
    let Amount(amount) = order.amount_satang;
    let total = total(&mut tx, customer, guarded_by).await?;
    let total = total.ok_or_else(Refused::missing)?;
    if total < amount {
        return Err(Refused::insufficient());
    }
    let id = take(&mut tx, customer, &order).await?;
    pause.take().await?;
    Ok(withdrawn(id, total - amount))
}

/// The sum over the accounts of a customer who is guarded so, if there is one.
pub async fn total(
    tx: &mut Tx,
    customer: i64,
    guarded_by: &'static str,
) -> Result<Option<i64>, Refused> {
    let total = sqlx::query_scalar(
        "SELECT sum(balance_satang)::bigint
         FROM wallet_customers JOIN wallet_customer_accounts ON customer_id = id
         WHERE id = $1 AND guarded_by = $2",
    );
    let total = total.bind(customer).bind(guarded_by);
    Ok(total.fetch_one(tx).await?)
}

/// Takes the amount out of the account, whatever is in it.
pub async fn take(tx: &mut Tx, customer: i64, order: &Withdrawal) -> Result<i64, Refused> {
    let Amount(amount) = order.amount_satang;
    let account = order.from.name();
    let taken = sqlx::query(
        "UPDATE wallet_customer_accounts SET balance_satang = balance_satang - $3
         WHERE customer_id = $1 AND kind = $2",
    );
    let taken = taken.bind(customer).bind(account).bind(amount);
    taken.execute(&mut *tx).await?;
    let id = sqlx::query_scalar(
        "INSERT INTO wallet_customer_withdrawals (customer_id, kind, amount_satang)
         VALUES ($1, $2, $3) RETURNING id",
    );
    let id = id.bind(customer).bind(account).bind(amount);
    Ok(id.fetch_one(tx).await?)
}

fn withdrawn(id: i64, total: i64) -> (StatusCode, Json<Value>) {
    let body = json!({ "withdrawal_id": id, "total_satang": total });
    (StatusCode::CREATED, Json(body))
}

pub async fn show(
    State(pool): State<PgPool>,
    Path(customer): Path<i64>,
) -> Result<Json<Value>, Refused> {
    let found = sqlx::query_as(
        "SELECT guarded_by,
                sum(balance_satang) FILTER (WHERE kind = 'savings')::bigint,
                sum(balance_satang) FILTER (WHERE kind = 'checking')::bigint
         FROM wallet_customers JOIN wallet_customer_accounts ON customer_id = id
         WHERE id = $1 GROUP BY id",
    );
    let found: Option<(String, i64, i64)> = found.bind(customer).fetch_optional(&pool).await?;
    let (guarded_by, savings, checking) = found.ok_or_else(Refused::missing)?;
    Ok(Json(json!({
        "customer_id": customer,
        "guarded_by": guarded_by,
        "savings_satang": savings,
        "checking_satang": checking,
        "total_satang": savings + checking,
    })))
}

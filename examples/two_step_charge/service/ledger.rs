//! The two short transactions, and what can be read.

use serde::Deserialize;
use sqlx::{FromRow, Row, SqliteExecutor, SqlitePool, sqlite::SqliteRow};

use super::{gateway::Verdict, refused::Refused};

/// What each client may spend in each currency.
pub const BUDGET_MINOR: i64 = 1_000_000;
const CURRENCIES: [&str; 3] = ["EUR", "THB", "USD"];

/// What a client asks for. Sums of money are whole numbers of the smallest coin, never fractions.
#[derive(Deserialize)]
pub struct Order {
    amount_minor: i64,
    currency: String,
}

impl Order {
    pub fn checked(self) -> Result<Self, Refused> {
        if !(1..=BUDGET_MINOR).contains(&self.amount_minor) {
            return Err(Refused::Field("amount_minor must be 1 to 1000000"));
        }
        if !CURRENCIES.contains(&&*self.currency) {
            return Err(Refused::Field("currency must be EUR, THB or USD"));
        }
        Ok(self)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    Reserved,
    Charged,
    Declined,
}

impl Status {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Reserved => "reserved",
            Self::Charged => "charged",
            Self::Declined => "declined",
        }
    }
}

/// One row, with what is needed to go on with it.
pub struct Charge {
    pub id: i64,
    pub client: Vec<u8>,
    pub amount_minor: i64,
    pub currency: String,
    pub status: Status,
    pub provider_charge_id: Option<String>,
}

impl FromRow<'_, SqliteRow> for Charge {
    fn from_row(row: &SqliteRow) -> Result<Self, sqlx::Error> {
        let statuses = [Status::Reserved, Status::Charged, Status::Declined];
        let status: &str = row.try_get("status")?;
        let status = statuses.into_iter().find(|known| known.as_str() == status);
        Ok(Self {
            id: row.try_get("id")?,
            client: row.try_get("client")?,
            amount_minor: row.try_get("amount_minor")?,
            currency: row.try_get("currency")?,
            status: status.ok_or_else(|| sqlx::Error::Decode("unknown status".into()))?,
            provider_charge_id: row.try_get("provider_charge_id")?,
        })
    }
}

/// First step: the charge of this client and key, made now or by an earlier run.
pub async fn reserve(
    ledger: &SqlitePool,
    client: &[u8],
    key: &[u8],
    order: &Order,
) -> Result<Charge, Refused> {
    // Whoever comes second waits here for the write lock, and not in the middle.
    let mut transaction = ledger.begin_with("BEGIN IMMEDIATE").await?;
    let made = sqlx::query_as(
        "INSERT INTO charges (client, idempotency_key, amount_minor, currency, status)
         VALUES (?, ?, ?, ?, 'reserved')
         ON CONFLICT (client, idempotency_key) DO NOTHING
         RETURNING *",
    );
    let made = made.bind(client).bind(key).bind(order.amount_minor);
    let made = made.bind(&order.currency);
    let Some(charge) = made.fetch_optional(&mut *transaction).await? else {
        let found = find_by_key(&mut *transaction, client, key).await?;
        let found = found.ok_or(sqlx::Error::RowNotFound)?;
        transaction.rollback().await?;
        let is_the_same =
            (found.amount_minor, &found.currency) == (order.amount_minor, &order.currency);
        // The layer says this itself for as long as it has a record of the key.
        return is_the_same.then_some(found).ok_or(Refused::Reused);
    };

    let budget = sqlx::query(
        "INSERT INTO budgets (client, currency, available_minor) VALUES (?, ?, ?)
         ON CONFLICT (client, currency) DO NOTHING",
    );
    let budget = budget.bind(client).bind(&order.currency).bind(BUDGET_MINOR);
    budget.execute(&mut *transaction).await?;
    // A key does not protect a budget: two charges under two keys may meet here. The condition does.
    let taken = sqlx::query(
        "UPDATE budgets
         SET available_minor = available_minor - ?1, reserved_minor = reserved_minor + ?1
         WHERE client = ?2 AND currency = ?3 AND available_minor >= ?1",
    );
    let taken = taken
        .bind(order.amount_minor)
        .bind(client)
        .bind(&order.currency);
    if taken.execute(&mut *transaction).await?.rows_affected() == 0 {
        transaction.rollback().await?;
        return Err(Refused::Exhausted);
    }
    transaction.commit().await?;
    Ok(charge)
}

/// Last step: turns the reservation into a charge, or gives it back. If another run or the resolver was
/// faster, its result stands; the provider told both the same.
pub async fn settle(
    ledger: &SqlitePool,
    charge: i64,
    verdict: &Verdict,
) -> Result<Charge, sqlx::Error> {
    let (status, provider_charge, budget) = match verdict {
        Verdict::Charged(id) => (
            Status::Charged,
            Some(id),
            "UPDATE budgets
             SET reserved_minor = reserved_minor - ?1, spent_minor = spent_minor + ?1
             WHERE client = ?2 AND currency = ?3",
        ),
        Verdict::Declined => (
            Status::Declined,
            None,
            "UPDATE budgets
             SET reserved_minor = reserved_minor - ?1, available_minor = available_minor + ?1
             WHERE client = ?2 AND currency = ?3",
        ),
    };
    let mut transaction = ledger.begin_with("BEGIN IMMEDIATE").await?;
    let settled = sqlx::query_as(
        "UPDATE charges SET status = ?, provider_charge_id = ?
         WHERE id = ? AND status = 'reserved' RETURNING *",
    );
    let settled = settled.bind(status.as_str()).bind(provider_charge);
    let settled: Option<Charge> = settled
        .bind(charge)
        .fetch_optional(&mut *transaction)
        .await?;
    let Some(settled) = settled else {
        let found = find(&mut *transaction, charge).await?;
        transaction.rollback().await?;
        return found.ok_or(sqlx::Error::RowNotFound);
    };
    let budget = sqlx::query(budget).bind(settled.amount_minor);
    let budget = budget.bind(&settled.client).bind(&settled.currency);
    budget.execute(&mut *transaction).await?;
    transaction.commit().await?;
    Ok(settled)
}

pub async fn find(ledger: impl SqliteExecutor<'_>, id: i64) -> Result<Option<Charge>, sqlx::Error> {
    let found = sqlx::query_as("SELECT * FROM charges WHERE id = ?");
    found.bind(id).fetch_optional(ledger).await
}

pub async fn find_by_key(
    ledger: impl SqliteExecutor<'_>,
    client: &[u8],
    key: &[u8],
) -> Result<Option<Charge>, sqlx::Error> {
    let found = sqlx::query_as("SELECT * FROM charges WHERE client = ? AND idempotency_key = ?");
    found.bind(client).bind(key).fetch_optional(ledger).await
}

/// Available, reserved and spent.
pub async fn budget(
    ledger: &SqlitePool,
    client: &[u8],
    currency: &str,
) -> Result<Option<(i64, i64, i64)>, sqlx::Error> {
    let found = sqlx::query_as(
        "SELECT available_minor, reserved_minor, spent_minor
         FROM budgets WHERE client = ? AND currency = ?",
    );
    found
        .bind(client)
        .bind(currency)
        .fetch_optional(ledger)
        .await
}

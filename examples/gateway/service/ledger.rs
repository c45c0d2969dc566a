//! The rows of orders and slips.

use std::time::Duration;

use jiff::Timestamp;
use sqlx::{FromRow, Row, SqlitePool, sqlite::SqliteRow};

use super::{Tx, merchants::Merchant, refused::Refused};

/// A new row's owner, and the key that stands in it.
#[derive(Clone, Copy)]
pub struct Action<'a> {
    pub merchant: &'a Merchant,
    pub key: &'a [u8],
    pub at: Timestamp,
    /// How long the key is remembered.
    pub ttl: Duration,
}

impl Action<'_> {
    /// The end of the key's life. Kept in the row, as the layer keeps it in its record: so both go by what was said
    /// when the key was used, also where it is said otherwise by now.
    fn key_until(&self) -> i64 {
        let ttl = i64::try_from(self.ttl.as_millis()).unwrap_or(i64::MAX);
        self.at.as_millisecond().saturating_add(ttl)
    }
}

#[derive(Clone)]
pub struct Deposit {
    pub id: String,
    pub merchant_reference: String,
    pub amount_minor: i64,
    pub currency: String,
    pub client_ip: String,
    pub created_at: Timestamp,
    pub upload_token: Vec<u8>,
}

impl FromRow<'_, SqliteRow> for Deposit {
    fn from_row(row: &SqliteRow) -> Result<Self, sqlx::Error> {
        let created_at = Timestamp::from_millisecond(row.try_get("created_at_ms")?);
        Ok(Self {
            id: row.try_get("id")?,
            merchant_reference: row.try_get("merchant_reference")?,
            amount_minor: row.try_get("amount_minor")?,
            currency: row.try_get("currency")?,
            client_ip: row.try_get("client_ip")?,
            created_at: created_at.map_err(|error| sqlx::Error::Decode(error.into()))?,
            upload_token: row.try_get("upload_token_sha256")?,
        })
    }
}

/// Makes an order. The layer sees to it that a retry does not come here again; should its record be lost, the
/// UNIQUE constraint decides.
pub async fn create(tx: &mut Tx, action: Action<'_>, deposit: &Deposit) -> Result<(), Refused> {
    // After its lifetime a key runs as new, and so it must here.
    let free = sqlx::query(
        "UPDATE deposits SET idempotency_key = NULL
         WHERE merchant = ? AND idempotency_key = ? AND key_until_ms <= ?",
    );
    let free = free.bind(action.merchant.id).bind(action.key);
    let free = free.bind(action.at.as_millisecond());
    free.execute(&mut *tx).await?;

    let insert = sqlx::query(
        "INSERT INTO deposits (id, merchant, idempotency_key, key_until_ms, merchant_reference,
                               amount_minor, currency, client_ip, created_at_ms,
                               upload_token_sha256)
         VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
         ON CONFLICT (merchant, idempotency_key) DO NOTHING",
    );
    let insert = insert
        .bind(&deposit.id)
        .bind(action.merchant.id)
        .bind(action.key)
        .bind(action.key_until())
        .bind(&deposit.merchant_reference)
        .bind(deposit.amount_minor)
        .bind(&deposit.currency)
        .bind(&deposit.client_ip)
        .bind(deposit.created_at.as_millisecond())
        .bind(&deposit.upload_token);
    if insert.execute(&mut *tx).await?.rows_affected() == 1 {
        return Ok(());
    }
    let found =
        sqlx::query_scalar("SELECT id FROM deposits WHERE merchant = ? AND idempotency_key = ?");
    let found = found.bind(action.merchant.id).bind(action.key);
    let found: String = found.fetch_one(tx).await?;
    Err(Refused::already_done(&found))
}

pub async fn find(
    ledger: &SqlitePool,
    merchant: &Merchant,
    id: &str,
) -> Result<Option<Deposit>, sqlx::Error> {
    let found = sqlx::query_as("SELECT * FROM deposits WHERE merchant = ? AND id = ?");
    found
        .bind(merchant.id)
        .bind(id)
        .fetch_optional(ledger)
        .await
}

/// The oldest first, at most a hundred.
pub async fn find_by_reference(
    ledger: &SqlitePool,
    merchant: &Merchant,
    reference: &str,
) -> Result<Vec<Deposit>, sqlx::Error> {
    let found = sqlx::query_as(
        "SELECT * FROM deposits WHERE merchant = ? AND merchant_reference = ?
         ORDER BY created_at_ms, id LIMIT 100",
    );
    found
        .bind(merchant.id)
        .bind(reference)
        .fetch_all(ledger)
        .await
}

pub struct Slip<'a> {
    pub id: &'a str,
    pub deposit: &'a str,
    pub note: Option<&'a str>,
    pub content_type: &'a str,
    /// In the file, so that it is part of the transaction. An object store would be told before, under a name
    /// made of the image's hash: putting the same there twice does no harm.
    pub image: &'a [u8],
}

/// Takes a slip in, as [`create`] does with an order.
pub async fn take_in(tx: &mut Tx, action: Action<'_>, slip: &Slip<'_>) -> Result<(), Refused> {
    let free = sqlx::query(
        "UPDATE slips SET idempotency_key = NULL
         WHERE merchant = ? AND idempotency_key = ? AND key_until_ms <= ?",
    );
    let free = free.bind(action.merchant.id).bind(action.key);
    let free = free.bind(action.at.as_millisecond());
    free.execute(&mut *tx).await?;

    let insert = sqlx::query(
        "INSERT INTO slips (id, deposit, merchant, idempotency_key, key_until_ms, note,
                            content_type, image, received_at_ms)
         VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
         ON CONFLICT (merchant, idempotency_key) DO NOTHING",
    );
    let insert = insert
        .bind(slip.id)
        .bind(slip.deposit)
        .bind(action.merchant.id)
        .bind(action.key)
        .bind(action.key_until())
        .bind(slip.note)
        .bind(slip.content_type)
        .bind(slip.image)
        .bind(action.at.as_millisecond());
    if insert.execute(&mut *tx).await?.rows_affected() == 1 {
        return Ok(());
    }
    let found =
        sqlx::query_scalar("SELECT id FROM slips WHERE merchant = ? AND idempotency_key = ?");
    let found = found.bind(action.merchant.id).bind(action.key);
    let found: String = found.fetch_one(tx).await?;
    Err(Refused::already_done(&found))
}

//! Attempts that were seen. A key is the same on every attempt of one action, a nonce on none.

use std::path::Path;

use sqlx::SqlitePool;

/// A longer one is no nonce.
pub const MAX_NONCE: usize = 128;

/// The nonces of every merchant.
///
/// In a file of their own: in that of the records a nonce would have to wait for a handler's transaction, and
/// a retry is to be told at once that its first attempt is still running.
///
/// Kept for ever, since nothing in the signature says when it was made. A gateway that has a time signed too
/// may forget those that are older than it would accept.
#[derive(Clone)]
pub struct Nonces(SqlitePool);

impl Nonces {
    pub async fn open(file: &Path) -> Result<Self, sqlx::Error> {
        let pool = super::open(file).await?;
        let table = "CREATE TABLE IF NOT EXISTS nonces (
            merchant TEXT NOT NULL,
            nonce    BLOB NOT NULL,
            PRIMARY KEY (merchant, nonce)
        ) STRICT, WITHOUT ROWID";
        sqlx::query(table).execute(&pool).await?;
        Ok(Self(pool))
    }

    /// Remembers a nonce; answers whether it is new. The write decides: of two at once one is new.
    pub async fn remember(&self, merchant: &str, nonce: &[u8]) -> Result<bool, sqlx::Error> {
        let insert = "INSERT INTO nonces (merchant, nonce) VALUES (?, ?) ON CONFLICT DO NOTHING";
        let insert = sqlx::query(insert).bind(merchant).bind(nonce);
        Ok(insert.execute(&self.0).await?.rows_affected() == 1)
    }

    pub async fn close(&self) {
        self.0.close().await;
    }
}

//! A checkpoint in a transaction of the caller's.

use bytes::Bytes;
use sqlx::SqliteConnection;

use super::statements::{FIND_RUNNING, SAVE_CHECKPOINT, bind_id};
use crate::store::{
    MAX_CHECKPOINTS, Settled, StoreError, Ticket, check_checkpoint, joining::JoinError,
};

/// What is saved.
#[derive(Clone)]
pub(crate) struct Joining {
    pub(super) ticket: Ticket,
    pub(super) name: String,
    pub(super) value: Bytes,
}

impl Joining {
    pub(crate) async fn save(
        self,
        connection: &mut SqliteConnection,
    ) -> Result<Settled, JoinError> {
        let saved = save(connection, &self.ticket, &self.name, &self.value).await;
        saved.map_err(JoinError::Sql)?.map_err(JoinError::Refused)
    }
}

/// Saves a checkpoint in the transaction that is open.
///
/// The write comes first, so that it takes SQLite's write lock, in whatever kind of transaction this is:
/// what it reads on the way is what is so when it writes.
pub(super) async fn save(
    connection: &mut SqliteConnection,
    ticket: &Ticket,
    name: &str,
    value: &[u8],
) -> Result<Result<Settled, StoreError>, sqlx::Error> {
    if check_checkpoint(name, value, 0).is_ok() {
        let saved = sqlx::query(SAVE_CHECKPOINT).bind(name).bind(value);
        let saved = bind_id(saved, &ticket.id)
            .bind(ticket.token.as_bytes().to_vec())
            .bind(name)
            .bind(i64::try_from(MAX_CHECKPOINTS).unwrap_or(i64::MAX))
            .execute(&mut *connection)
            .await?;
        if saved.rows_affected() > 0 {
            return Ok(Ok(Settled::Done));
        }
    }
    let running = bind_id(sqlx::query(FIND_RUNNING), &ticket.id)
        .bind(ticket.token.as_bytes().to_vec())
        .fetch_optional(connection)
        .await?;
    Ok(match running {
        None => Ok(Settled::Lost),
        // It is held, so it was the value, or there are as many as there may be.
        Some(_) => check_checkpoint(name, value, MAX_CHECKPOINTS).map(|()| Settled::Lost),
    })
}

#[cfg(all(test, feature = "postgres"))]
impl Joining {
    /// One that no store has made.
    pub(crate) fn example(ticket: &Ticket) -> Self {
        Self {
            ticket: ticket.clone(),
            name: "step".to_owned(),
            value: Bytes::new(),
        }
    }
}

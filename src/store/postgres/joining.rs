//! A checkpoint in a transaction of the caller's.

use bytes::Bytes;
use sqlx::{PgConnection, Row, SqlStr};

use super::bind_id;
use crate::store::{MAX_CHECKPOINTS, Settled, Ticket, check_checkpoint, joining::JoinError};

/// What is saved, and the statement that saves it in the store's tables.
#[derive(Clone)]
pub(crate) struct Joining {
    pub(super) text: SqlStr,
    pub(super) ticket: Ticket,
    pub(super) name: String,
    pub(super) value: Bytes,
}

impl Joining {
    pub(crate) async fn save(self, connection: &mut PgConnection) -> Result<Settled, JoinError> {
        let most = i64::try_from(MAX_CHECKPOINTS).unwrap_or(i64::MAX);
        let saved = bind_id(sqlx::query(self.text), &self.ticket.id)
            .bind(*self.ticket.token.as_bytes())
            .bind(&*self.name)
            .bind(&*self.value)
            .bind(true)
            .bind(most)
            .fetch_optional(connection)
            .await
            .map_err(JoinError::Sql)?;
        let Some(row) = saved else {
            return Ok(Settled::Lost);
        };
        let others: i64 = row.try_get(0).map_err(JoinError::Sql)?;
        let others = usize::try_from(others).unwrap_or(usize::MAX);
        check_checkpoint(&self.name, &self.value, others).map_err(JoinError::Refused)?;
        Ok(Settled::Done)
    }
}

#[cfg(all(test, feature = "sqlite"))]
impl Joining {
    /// One that no store has made.
    pub(crate) fn example(ticket: &Ticket) -> Self {
        Self {
            text: super::texts::safe("SELECT"),
            ticket: ticket.clone(),
            name: "step".to_owned(),
            value: Bytes::new(),
        }
    }
}

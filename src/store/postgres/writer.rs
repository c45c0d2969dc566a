//! The two writers of a store instance, each of which has one statement under way at a time.

use std::time::Duration;

use sqlx::Row;

use super::{
    bind_id, claims,
    failure::judged,
    rows::interval,
    session::Session,
    settling::{self, bind_tickets, place},
};
use crate::{
    record::RecordId,
    store::{
        Settled, StoreError, StoreErrorKind, Ticket,
        group::{Failure, Operation, Renew, Writer},
    },
};

/// How long an operation is tried again while another session keeps its row locked.
const PATIENCE: Duration = Duration::from_secs(5);

pub(super) enum PostgresWriter {
    /// Writes claims, and what may undo one: in one queue, so that it never overtakes the claim.
    Claims(Session),
    /// Writes what ends a run, and heartbeats.
    Settling(Session),
}

impl Writer for PostgresWriter {
    const MAX_BATCH: usize = 1_024;

    /// What the first of them is, decides which of them share the statement. The rest comes next.
    async fn commit(&mut self, batch: &mut [Operation]) -> Result<(), Failure> {
        let (Self::Claims(session) | Self::Settling(session)) = self;
        match batch.first_mut() {
            Some(Operation::Claim(_)) => claims::run(session, batch).await?,
            Some(Operation::Renew(asked)) => {
                let held = renew(session, &asked.question).await?;
                asked.answer(Ok(held));
            }
            Some(Operation::Forget(asked)) => {
                if let Some(forgotten) = forget(session, &asked.question).await? {
                    asked.answer(Ok(forgotten));
                }
            }
            Some(_) => settling::run(session, batch).await?,
            None => {}
        }
        batch.iter_mut().for_each(give_up_waiting);
        Ok(())
    }

    /// The queue of claims is closed before the other one: when the lease is given up, no statement that
    /// would extend it is under way any more.
    async fn close(self) -> Result<(), Failure> {
        match self {
            Self::Claims(_) => Ok(()),
            Self::Settling(mut session) => give_up_lease(&mut session).await,
        }
    }

    fn rest(&mut self) {
        let (Self::Claims(session) | Self::Settling(session)) = self;
        session.rest();
    }
}

/// Does not try for ever: whoever cares has sent it anew by then.
fn give_up_waiting(operation: &mut Operation) {
    let locked = || {
        StoreError::new(
            StoreErrorKind::Unavailable,
            "another Postgres session keeps the record locked; end its transaction",
        )
    };
    if operation.waits_for() >= Some(PATIENCE) {
        operation.answer_error(locked());
    }
}

/// Whether there was a live record; `None` while somebody else has it locked.
async fn forget(session: &mut Session, id: &RecordId) -> Result<Option<bool>, Failure> {
    let text = session.instance.texts.forget.clone();
    let answered = session.run(text, |query| bind_id(query, id)).await?;
    let Some(row) = answered.rows.first() else {
        // When it was sent before, and the answer lost, it was this very one that took place.
        return Ok(Some(answered.again));
    };
    let held: bool = row.try_get(0).map_err(judged)?;
    let live: bool = row.try_get(1).map_err(judged)?;
    Ok(held.then_some(live))
}

async fn renew(session: &mut Session, renew: &Renew) -> Result<Vec<Settled>, Failure> {
    let tickets: Vec<&Ticket> = renew.tickets.iter().collect();
    let owner = session.instance.owner;
    let text = session.instance.texts.renew.text(tickets.len());
    let answered = session
        .run(text, |query| {
            let query = query.bind(*owner.as_bytes()).bind(interval(renew.lease));
            bind_tickets(query, &tickets)
        })
        .await?;
    let mut settled = vec![Settled::Lost; tickets.len()];
    for row in &answered.rows {
        if let Some(settled) = settled.get_mut(place(row)?) {
            *settled = Settled::Done;
        }
    }
    Ok(settled)
}

/// From here on the claims of this instance count as abandoned.
async fn give_up_lease(session: &mut Session) -> Result<(), Failure> {
    let owner = session.instance.owner;
    let text = session.instance.texts.give_up_lease.clone();
    session
        .run(text, |query| query.bind(*owner.as_bytes()))
        .await?;
    Ok(())
}

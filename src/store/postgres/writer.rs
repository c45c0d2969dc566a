//! The writers of a store instance, each of which has one statement under way at a time.

use std::{collections::HashSet, sync::Arc, time::Duration};

use sqlx::Row;

use super::{
    bind_id, claims,
    failure::judged,
    rows::interval,
    session::{Instance, Session},
    settling::{self, bind_tickets, place},
    taking_over,
};
use crate::{
    observe::Database,
    record::RecordId,
    store::{
        Settled, StoreError, StoreErrorKind, Ticket,
        group::{Failure, Operation, Reach, Renew, Writer},
    },
};

/// How long an operation is tried again while another session keeps its row locked.
const PATIENCE: Duration = Duration::from_secs(5);

/// There is one for claims and what may undo one, so that it never overtakes the claim; one for what ends
/// a run; and one for heartbeats, which must not be late because others take long.
pub(super) struct PostgresWriter {
    session: Session,
    /// What was sent last.
    last: Option<Class>,
    /// Whether it gives the lease up when it is closed.
    renews: bool,
}

/// What can share a statement.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Class {
    Claims,
    Releases,
    Forgetting,
    TakingOver,
    Settling,
    Renewal,
}

impl Class {
    fn of(operation: &Operation) -> Self {
        match operation {
            Operation::Claim(_) => Self::Claims,
            Operation::Release(_) => Self::Releases,
            Operation::Forget(_) => Self::Forgetting,
            Operation::TakeOver(_) => Self::TakingOver,
            Operation::Renew(_) => Self::Renewal,
            _ => Self::Settling,
        }
    }
}

impl PostgresWriter {
    pub(super) fn new(instance: Arc<Instance>) -> Self {
        Self {
            session: Session::new(instance),
            last: None,
            renews: false,
        }
    }

    /// To be closed last: when the lease is given up, no statement that would extend it is under way any
    /// more.
    pub(super) fn of_heartbeats(instance: Arc<Instance>) -> Self {
        Self {
            renews: true,
            ..Self::new(instance)
        }
    }

    /// What is to be sent next: what has waited longest, but in turns, so that operations which have to
    /// wait for somebody else hold up none of another class.
    fn next(&mut self, batch: &[Operation]) -> Option<Class> {
        let mut classes = batch.iter().map(Class::of);
        let first = classes.next();
        let next = match first == self.last {
            true => classes.find(|class| Some(*class) != self.last).or(first),
            false => first,
        };
        self.last = next;
        next
    }
}

impl Writer for PostgresWriter {
    const DATABASE: Database = Database::Postgres;
    const MAX_BATCH: usize = 1_024;

    /// One class of operations; the others are left for the next time.
    async fn commit(&mut self, batch: &mut [Operation]) -> Result<(), Failure> {
        let Some(class) = self.next(batch) else {
            return Ok(());
        };
        let session = &mut self.session;
        let sent = match class {
            Class::Claims => claims::run(session, batch).await,
            Class::Releases => settling::run(session, batch, true).await,
            Class::Settling => settling::run(session, batch, false).await,
            Class::Forgetting => forget_first(session, batch).await,
            Class::TakingOver => taking_over::run(session, batch).await,
            Class::Renewal => renew_first(session, batch).await,
        };
        match sent {
            Err(failure) if failure.reach == Reach::Value => return Err(failure),
            // The others were not sent.
            Err(failure) => (batch.iter_mut())
                .filter(|operation| {
                    Class::of(operation) == class && operation.waits_for().is_some()
                })
                .for_each(|operation| operation.answer_error(failure.error())),
            Ok(()) => batch.iter_mut().for_each(give_up_waiting),
        }
        Ok(())
    }

    async fn close(mut self) -> Result<(), Failure> {
        match self.renews {
            true => give_up_lease(&mut self.session).await,
            false => Ok(()),
        }
    }

    fn rest(&mut self) {
        self.session.rest();
    }
}

/// Does not try for ever: whoever cares has sent it anew by then.
fn give_up_waiting(operation: &mut Operation) {
    let locked = || {
        StoreError::new(
            StoreErrorKind::Unavailable,
            "the record stays locked by another Postgres session, or by a statement that was given up; look for open transactions on the idempotency tables",
        )
    };
    // One that was never tried has only waited for its turn.
    if !operation.is_fresh() && operation.waits_for() >= Some(PATIENCE) {
        operation.answer_error(locked());
    }
}

/// The first one that nothing asked earlier of the same record stands before.
async fn forget_first(session: &mut Session, batch: &mut [Operation]) -> Result<(), Failure> {
    let mut passed = HashSet::new();
    for operation in batch {
        match operation {
            Operation::Claim(asked) => passed.insert(asked.question.id.clone()),
            Operation::Release(asked) => passed.insert(asked.question.ticket.id.clone()),
            Operation::Forget(asked) if passed.contains(&asked.question) => continue,
            Operation::Forget(asked) => {
                if let Some(forgotten) = forget(session, &asked.question).await? {
                    asked.answer(Ok(forgotten));
                    return Ok(());
                }
                passed.insert(asked.question.clone())
            }
            _ => continue,
        };
    }
    Ok(())
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

async fn renew_first(session: &mut Session, batch: &mut [Operation]) -> Result<(), Failure> {
    for operation in batch {
        if let Operation::Renew(asked) = operation {
            let held = match &*asked.question.tickets {
                [ticket] => renew_one(session, ticket, asked.question.lease).await?,
                _ => Some(renew(session, &asked.question).await?),
            };
            if let Some(held) = held {
                asked.answer(Ok(held));
            }
            break;
        }
    }
    Ok(())
}

/// `None` while somebody else has the record locked, and may be taking it over.
async fn renew_one(
    session: &mut Session,
    ticket: &Ticket,
    lease: Duration,
) -> Result<Option<Vec<Settled>>, Failure> {
    let owner = session.instance.owner;
    let text = session.instance.texts.renew_one.clone();
    let held = session.run(text, |query| {
        let query = query.bind(*owner.as_bytes()).bind(interval(lease));
        bind_tickets(query, &[ticket])
    });
    if !held.await?.rows.is_empty() {
        return Ok(Some(vec![Settled::Done]));
    }
    let text = session.instance.texts.running.clone();
    let running = session.run(text, |query| {
        bind_id(query, &ticket.id).bind(*ticket.token.as_bytes())
    });
    let is_locked = !running.await?.rows.is_empty();
    Ok((!is_locked).then(|| vec![Settled::Lost]))
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

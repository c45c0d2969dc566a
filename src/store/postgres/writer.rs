//! The two writers of a store instance, each of which has one statement under way at a time.

use std::{collections::HashSet, sync::Arc, time::Duration};

use sqlx::Row;

use super::{
    bind_id, claims,
    failure::judged,
    rows::interval,
    session::{Instance, Session},
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
    Claims(Sender),
    /// Writes what ends a run, and heartbeats.
    Settling(Sender),
}

pub(super) struct Sender {
    session: Session,
    /// What was sent last.
    last: Option<Class>,
}

/// What can share a statement.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Class {
    Claims,
    Releases,
    Forgetting,
    Settling,
    Renewal,
}

impl Class {
    fn of(operation: &Operation) -> Self {
        match operation {
            Operation::Claim(_) => Self::Claims,
            Operation::Release(_) => Self::Releases,
            Operation::Forget(_) => Self::Forgetting,
            Operation::Renew(_) => Self::Renewal,
            _ => Self::Settling,
        }
    }
}

impl Sender {
    pub(super) fn new(instance: Arc<Instance>) -> Self {
        Self {
            session: Session::new(instance),
            last: None,
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
    const MAX_BATCH: usize = 1_024;

    /// One class of operations; the others are left for the next time.
    async fn commit(&mut self, batch: &mut [Operation]) -> Result<(), Failure> {
        let (Self::Claims(sender) | Self::Settling(sender)) = self;
        let class = sender.next(batch);
        let session = &mut sender.session;
        match class {
            Some(Class::Claims) => claims::run(session, batch).await?,
            Some(Class::Releases) => settling::run(session, batch, true).await?,
            Some(Class::Settling) => settling::run(session, batch, false).await?,
            Some(Class::Forgetting) => forget_first(session, batch).await?,
            Some(Class::Renewal) => renew_first(session, batch).await?,
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
            Self::Settling(mut sender) => give_up_lease(&mut sender.session).await,
        }
    }

    fn rest(&mut self) {
        let (Self::Claims(sender) | Self::Settling(sender)) = self;
        sender.session.rest();
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
            let held = renew(session, &asked.question).await?;
            asked.answer(Ok(held));
            break;
        }
    }
    Ok(())
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

//! What needs no write is answered while others write.

use std::time::Duration;

use sqlx::SqliteConnection;

use super::{
    Instance,
    schema::{LOCK_POLL, Opened},
    slots::Slots,
    transaction::{ids, load},
};
use crate::{
    record::Timestamp,
    store::{
        Settled,
        group::{Asked, Failure, Operation, Reach, Renew},
        protocol::{self, Leases},
    },
};

/// A connection beside the writer's, opened when it is first needed.
#[derive(Default)]
pub(super) struct Reader {
    opened: Option<Opened>,
    /// Whether the file could not be read the last time.
    failed: bool,
}

impl Reader {
    pub(super) fn has_failed(&self) -> bool {
        self.failed
    }

    pub(super) fn into_connection(self) -> Option<SqliteConnection> {
        Some(self.opened?.connection)
    }

    /// Answers what it can without a write. What it cannot is not looked up again in this round.
    pub(super) async fn answer(
        &mut self,
        instance: &Instance,
        batch: &mut [Operation],
        round: u64,
    ) {
        // The one that is kept stands for all others.
        let told = batch.iter().filter_map(told_lease).max();
        let mut asked: Vec<_> = (batch.iter_mut())
            .filter(|operation| may_need_no_write(operation) && !operation.was_looked_up(round))
            .collect();
        self.failed = false;
        if asked.is_empty() {
            return;
        }
        match self.try_answer(instance, &mut asked, told).await {
            Ok(()) => asked
                .iter_mut()
                .for_each(|operation| operation.is_looked_up(round)),
            Err(failure) => {
                self.failed = true;
                // A file that is only locked can be read in a moment.
                if failure.reach != Reach::Lock {
                    self.opened = None;
                }
            }
        }
    }

    async fn try_answer(
        &mut self,
        instance: &Instance,
        asked: &mut [&mut Operation],
        mut told: Option<Duration>,
    ) -> Result<(), Failure> {
        let connection = self.connection(instance).await?;
        // Before the file is read: a lease that is renewed meanwhile has not lapsed.
        let now = instance.clock.now();
        let mut leases = Leases::default();
        let mut slots = read(connection, asked, &mut leases).await?;
        let stored = leases.clone();
        // The heartbeat may be one of those that wait.
        leases.extend_to(instance.owner, i64::MAX);
        for operation in asked {
            match operation {
                Operation::Claim(asked) => {
                    let record = slots.slot(&asked.question.id).record();
                    let claim = record
                        .ok()
                        .flatten()
                        .and_then(|record| protocol::look(record, &asked.question, &leases, now));
                    if let Some(claim) = claim {
                        asked.answer(Ok(claim));
                    }
                }
                Operation::Get(asked) => {
                    let live = slots.slot(&asked.question).live(now);
                    asked.answer(live);
                }
                Operation::Renew(asked) => renew(asked, &mut slots, &stored, &mut told, now),
                Operation::Load(asked) => {
                    let loaded = load(connection, &asked.question).await?;
                    asked.answer(Ok(loaded));
                }
                _ => {}
            }
        }
        Ok(())
    }

    async fn connection(&mut self, instance: &Instance) -> Result<&mut SqliteConnection, Failure> {
        let database = &instance.database;
        let opened = (self.opened.take()).filter(|opened| database.is_current(opened));
        let opened = match opened {
            Some(opened) => opened,
            None => database.reader(LOCK_POLL).await?,
        };
        Ok(&mut self.opened.insert(opened).connection)
    }
}

fn may_need_no_write(operation: &Operation) -> bool {
    match operation {
        Operation::Claim(_) | Operation::Get(_) | Operation::Load(_) => true,
        Operation::Renew(asked) => asked.question.tickets.len() == 1 && !asked.is_told(),
        _ => false,
    }
}

/// The lease of one that was answered ahead and is still to be written.
fn told_lease(operation: &Operation) -> Option<Duration> {
    match operation {
        Operation::Renew(asked) if asked.is_told() => Some(asked.question.lease),
        _ => None,
    }
}

async fn read(
    connection: &mut SqliteConnection,
    asked: &[&mut Operation],
    leases: &mut Leases,
) -> Result<Slots, Failure> {
    let (mut slots, names) = Slots::of(asked.iter().flat_map(|operation| ids(operation)));
    slots.load(connection, &names, leases).await?;
    Ok(slots)
}

/// The caller may go on while the lease that is written down has not lapsed; the longer one is written
/// with the next transaction.
fn renew(
    asked: &mut Asked<Renew, Vec<Settled>>,
    slots: &mut Slots,
    stored: &Leases,
    told: &mut Option<Duration>,
    now: Timestamp,
) {
    let [ticket] = &*asked.question.tickets else {
        return;
    };
    let Ok(record) = slots.slot(&ticket.id).record() else {
        return;
    };
    let lease = asked.question.lease;
    match protocol::held(record, ticket.token, now) {
        Settled::Lost => asked.answer(Ok(vec![Settled::Lost])),
        Settled::Done if record.is_some_and(|record| record.is_abandoned(stored, now)) => {}
        Settled::Done if told.is_some_and(|told| lease <= told) => {
            asked.answer(Ok(vec![Settled::Done]));
        }
        Settled::Done => {
            asked.tell(vec![Settled::Done]);
            *told = Some(lease);
        }
    }
}

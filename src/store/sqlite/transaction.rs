//! One transaction: the operations in their order, in as few statements as possible.
//!
//! It holds the write lock from its first statement, so nothing it has read can change before it
//! is written.

use std::time::Instant;

use bytes::Bytes;
use sqlx::{Row, SqliteConnection};

use super::{
    Instance,
    schema::pause,
    slots::{Slot, Slots},
    statements::{
        BEGIN, COUNT_OTHER_CHECKPOINTS, EXTEND_LEASE, FIND_RUNNING, LOAD_CHECKPOINTS, PURGE_OWNERS,
        PURGE_RECORDS, PURGE_RESPONSES, SAVE_CHECKPOINT, bind_id,
    },
};
use crate::{
    record::{Record, RecordId, Timestamp},
    store::{
        Checkpoint, Claim, ClaimRequest, Settled, StoreError, StoreErrorKind, Ticket,
        check_checkpoint,
        group::{Failure, Operation, Save},
        protocol::{self, Leases},
    },
};

/// How many expired records a full store looks for before it refuses a claim.
const PURGE_WHEN_FULL: u64 = 1024;

/// Carries out the operations in one transaction, which an error rolls back.
pub(super) async fn run(
    connection: &mut SqliteConnection,
    instance: &Instance,
    batch: &mut [Operation],
    deadline: Instant,
) -> Result<(), Failure> {
    let mut transaction = Transaction::begin(connection, instance).await?;
    let done = match transaction.carry_out(batch).await {
        Ok(()) => transaction.commit(deadline).await,
        failed => failed,
    };
    if done.is_err() {
        // SQLite has rolled back by itself after some errors, and then refuses this. Should a
        // transaction stay open all the same, the next BEGIN fails and the connection is given up.
        let _ = sqlx::query("ROLLBACK").execute(connection).await;
    }
    done
}

struct Transaction<'a> {
    connection: &'a mut SqliteConnection,
    instance: &'a Instance,
    /// The leases of the owners met so far.
    leases: Leases,
    /// What this instance's lease is to be extended to.
    extend: Option<Timestamp>,
    /// How many records there are, expired ones included.
    records: u64,
}

impl<'a> Transaction<'a> {
    async fn begin(
        connection: &'a mut SqliteConnection,
        instance: &'a Instance,
    ) -> Result<Self, Failure> {
        let row = sqlx::query(BEGIN)
            .bind(instance.owner.as_bytes().to_vec())
            .fetch_one(&mut *connection)
            .await?;
        let mut leases = Leases::default();
        if let Some(alive_until) = row.try_get(0)? {
            leases.extend_to(instance.owner, alive_until);
        }
        let records: i64 = row.try_get(1)?;
        Ok(Self {
            connection,
            instance,
            leases,
            extend: None,
            records: u64::try_from(records).unwrap_or(0),
        })
    }

    async fn commit(self, deadline: Instant) -> Result<(), Failure> {
        if let Some(until) = self.extend {
            sqlx::query(EXTEND_LEASE)
                .bind(self.instance.owner.as_bytes().to_vec())
                .bind(until.as_micros())
                .execute(&mut *self.connection)
                .await?;
        }
        // Without WAL it waits for readers, and may be repeated.
        while let Err(error) = sqlx::query("COMMIT").execute(&mut *self.connection).await {
            pause(error.into(), deadline).await?;
        }
        Ok(())
    }

    async fn carry_out(&mut self, batch: &mut [Operation]) -> Result<(), Failure> {
        let mut at = 0;
        while at < batch.len() {
            match &mut batch[at] {
                Operation::Save(asked) => {
                    let saved = self.save(&asked.question).await?;
                    asked.answer(saved);
                }
                Operation::Load(asked) => {
                    let loaded = self.load(&asked.question).await?;
                    asked.answer(Ok(loaded));
                }
                Operation::Purge(asked) => {
                    let purged = self.purge(asked.question).await?;
                    asked.answer(Ok(purged));
                }
                _ => {
                    let together = batch[at..].iter().take_while(|next| is_about_records(next));
                    let end = at + together.count().max(1);
                    self.change_records(&mut batch[at..end]).await?;
                    at = end;
                    continue;
                }
            }
            at += 1;
        }
        Ok(())
    }

    /// Reads the records these operations are about, has the protocol decide one operation after
    /// the other, and writes what has changed.
    async fn change_records(&mut self, operations: &mut [Operation]) -> Result<(), Failure> {
        self.make_room(operations).await?;
        let ids = operations.iter().flat_map(ids);
        let mut slots = Slots::load(self.connection, ids, &mut self.leases).await?;
        let now = self.instance.clock.now();
        for operation in operations {
            self.decide(operation, &mut slots, now);
        }
        slots.store(self.connection).await
    }

    fn decide(&mut self, operation: &mut Operation, slots: &mut Slots, now: Timestamp) {
        match operation {
            Operation::Claim(asked) => {
                let claim = self.claim(&asked.question, slots, now);
                asked.answer(claim);
            }
            Operation::Complete(asked) => {
                let (ticket, of) = (&asked.question.ticket, &asked.question);
                let settled = self.change(slots, &ticket.id, |record, _| {
                    protocol::complete(record, ticket.token, of.done.clone(), of.lifetimes, now)
                });
                asked.answer(settled);
            }
            Operation::Release(asked) => {
                let (ticket, ttl) = (&asked.question.ticket, asked.question.ttl);
                let settled = self.change(slots, &ticket.id, |record, has_checkpoints| {
                    protocol::release(record, ticket.token, has_checkpoints, ttl, now)
                });
                asked.answer(settled);
            }
            Operation::Abandon(asked) => {
                let ticket = &asked.question;
                let settled = self.change(slots, &ticket.id, |record, _| {
                    protocol::abandon(record, ticket.token)
                });
                asked.answer(settled);
            }
            Operation::Renew(asked) => {
                self.extend_lease(now.after(asked.question.lease));
                let tickets = asked.question.tickets.iter();
                let held = tickets.map(|ticket| {
                    let record = slots.of(&ticket.id).record()?;
                    Ok(protocol::held(record, ticket.token, now))
                });
                let held = held.collect();
                asked.answer(held);
            }
            Operation::Get(asked) => {
                let found = slots.of(&asked.question).record().map(|record| {
                    let mut live = record.filter(|record| !record.is_expired(now)).cloned();
                    if let Some(record) = &mut live {
                        record.drop_expired_response(now);
                    }
                    live
                });
                asked.answer(found);
            }
            Operation::Forget(asked) => {
                let forgotten = self.forget(slots.of(&asked.question), now);
                asked.answer(Ok(forgotten));
            }
            Operation::Save(_) | Operation::Load(_) | Operation::Purge(_) | Operation::Close(_) => {
            }
        }
    }

    fn claim(
        &mut self,
        request: &ClaimRequest,
        slots: &mut Slots,
        now: Timestamp,
    ) -> Result<Claim, StoreError> {
        let slot = slots.of(&request.id);
        let record = slot.record()?;
        if record.is_none() && self.is_full() {
            return Err(StoreError::new(
                StoreErrorKind::Full,
                "the SQLite store is full; raise max_records, or shorten the ttl",
            ));
        }
        if record.is_some_and(|record| record.is_expired(now)) {
            slot.clear_checkpoints();
        }
        let (leases, owner) = (&self.leases, self.instance.owner);
        let (claim, added) =
            slot.change(|record, _| protocol::claim(record, request, owner, leases, now))?;
        self.count(added);
        if let Claim::Won(_) = claim {
            slot.claimed();
            self.extend_lease(now.after(request.lease));
        }
        Ok(claim)
    }

    fn change<A>(
        &mut self,
        slots: &mut Slots,
        id: &RecordId,
        operation: impl FnOnce(Option<Record>, bool) -> (Option<Record>, A),
    ) -> Result<A, StoreError> {
        let (answer, added) = slots.of(id).change(operation)?;
        self.count(added);
        Ok(answer)
    }

    /// Also the way out for a record that cannot be read.
    fn forget(&mut self, slot: &mut Slot, now: Timestamp) -> bool {
        let live = match slot.record() {
            Ok(record) => record.is_some_and(|record| !record.is_expired(now)),
            Err(_) => true,
        };
        self.count(slot.forget());
        live
    }

    fn extend_lease(&mut self, until: Timestamp) {
        self.leases
            .extend_to(self.instance.owner, until.as_micros());
        self.extend = self.extend.max(Some(until));
    }

    fn count(&mut self, added: i64) {
        self.records = self.records.saturating_add_signed(added);
    }

    fn is_full(&self) -> bool {
        let max = self.instance.max_records;
        max.is_some_and(|max| self.records >= max)
    }

    /// Before the store refuses claims it looks for expired records to remove.
    async fn make_room(&mut self, operations: &[Operation]) -> Result<(), Failure> {
        let claims = operations
            .iter()
            .filter(|operation| matches!(operation, Operation::Claim(_)));
        let claims = u64::try_from(claims.count()).unwrap_or(u64::MAX);
        let needed = self.records.saturating_add(claims);
        if claims > 0 && self.instance.max_records.is_some_and(|max| needed > max) {
            self.purge_records(PURGE_WHEN_FULL, self.instance.clock.now())
                .await?;
        }
        Ok(())
    }

    async fn purge(&mut self, limit: usize) -> Result<usize, Failure> {
        let now = self.instance.clock.now();
        let limit = u64::try_from(limit).unwrap_or(u64::MAX);
        let removed = self.purge_records(limit, now).await?;
        let emptied = sqlx::query(PURGE_RESPONSES)
            .bind(now.as_micros())
            .bind(i64::try_from(limit.saturating_sub(removed)).unwrap_or(i64::MAX))
            .execute(&mut *self.connection)
            .await?;
        sqlx::query(PURGE_OWNERS)
            .bind(now.as_micros())
            .bind(self.instance.owner.as_bytes().to_vec())
            .execute(&mut *self.connection)
            .await?;
        let changed = removed.saturating_add(emptied.rows_affected());
        Ok(usize::try_from(changed).unwrap_or(usize::MAX))
    }

    async fn purge_records(&mut self, limit: u64, now: Timestamp) -> Result<u64, Failure> {
        let purged = sqlx::query(PURGE_RECORDS)
            .bind(now.as_micros())
            .bind(i64::try_from(limit).unwrap_or(i64::MAX))
            .execute(&mut *self.connection)
            .await?;
        let removed = purged.rows_affected();
        self.records = self.records.saturating_sub(removed);
        Ok(removed)
    }

    async fn save(&mut self, save: &Save) -> Result<Result<Settled, StoreError>, Failure> {
        let running = bind_id(sqlx::query(FIND_RUNNING), &save.ticket.id)
            .bind(save.ticket.token.as_bytes().to_vec())
            .fetch_optional(&mut *self.connection)
            .await?;
        let Some(running) = running else {
            return Ok(Ok(Settled::Lost));
        };
        let record: i64 = running.try_get(0)?;
        let others: i64 = sqlx::query_scalar(COUNT_OTHER_CHECKPOINTS)
            .bind(record)
            .bind(&*save.name)
            .fetch_one(&mut *self.connection)
            .await?;
        let others = usize::try_from(others).unwrap_or(usize::MAX);
        if let Err(refused) = check_checkpoint(&save.name, &save.value, others) {
            return Ok(Err(refused));
        }
        sqlx::query(SAVE_CHECKPOINT)
            .bind(record)
            .bind(&*save.name)
            .bind(&*save.value)
            .execute(&mut *self.connection)
            .await?;
        Ok(Ok(Settled::Done))
    }

    async fn load(&mut self, ticket: &Ticket) -> Result<Option<Vec<Checkpoint>>, Failure> {
        let rows = bind_id(sqlx::query(LOAD_CHECKPOINTS), &ticket.id)
            .bind(ticket.token.as_bytes().to_vec())
            .fetch_all(&mut *self.connection)
            .await?;
        if rows.is_empty() {
            return Ok(None);
        }
        let mut saved = Vec::with_capacity(rows.len());
        for row in &rows {
            if let Some(name) = row.try_get::<Option<String>, _>(0)? {
                saved.push(Checkpoint::new(
                    name,
                    Bytes::from(row.try_get::<Vec<u8>, _>(1)?),
                ));
            }
        }
        Ok(Some(saved))
    }
}

fn is_about_records(operation: &Operation) -> bool {
    !matches!(
        operation,
        Operation::Save(_) | Operation::Load(_) | Operation::Purge(_)
    )
}

/// The records an operation is about.
fn ids(operation: &Operation) -> impl Iterator<Item = &RecordId> {
    let (one, many) = match operation {
        Operation::Claim(asked) => (Some(&asked.question.id), &[][..]),
        Operation::Complete(asked) => (Some(&asked.question.ticket.id), &[][..]),
        Operation::Release(asked) => (Some(&asked.question.ticket.id), &[][..]),
        Operation::Abandon(asked) => (Some(&asked.question.id), &[][..]),
        Operation::Get(asked) => (Some(&asked.question), &[][..]),
        Operation::Forget(asked) => (Some(&asked.question), &[][..]),
        Operation::Renew(asked) => (None, &*asked.question.tickets),
        _ => (None, &[][..]),
    };
    one.into_iter()
        .chain(many.iter().map(|ticket: &Ticket| &ticket.id))
}

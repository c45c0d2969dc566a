//! One transaction: the operations in their order, in as few statements as possible.
//!
//! It holds the write lock from its first statement, so nothing it has read can change before it
//! is written.

use bytes::Bytes;
use sqlx::{Row, SqliteConnection, sqlite::SqliteRow};

use super::{
    Instance, joining,
    slots::{Changes, Commit, Slot, Slots},
    statements::{
        BEGIN, BEGIN_AND_LOAD, LOAD_CHECKPOINTS, PURGE_OWNERS, PURGE_RECORDS, PURGE_RESPONSES,
        bind_id,
    },
};
use crate::{
    record::{Record, RecordId, Timestamp},
    store::{
        Checkpoint, Claim, ClaimRequest, StoreError, StoreErrorKind, Ticket,
        group::{Failure, Operation, Save, TakeOver},
        protocol::{self, Leases, TakingOver},
    },
};

/// How many expired records a full store looks for before it refuses a claim.
const PURGE_WHEN_FULL: u64 = 1024;

/// Carries out the operations in one transaction, which an error rolls back.
pub(super) async fn run(
    connection: &mut SqliteConnection,
    instance: &Instance,
    batch: &mut [Operation],
) -> Result<(), Failure> {
    let mut transaction = Transaction {
        connection,
        instance,
        stage: Stage::Before,
        leases: Leases::default(),
        extend: None,
        records: 0,
    };
    let done = match transaction.carry_out(batch).await {
        Ok(()) => transaction.commit(&Changes::default()).await,
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
    stage: Stage,
    /// The leases of the owners met so far.
    leases: Leases,
    /// What this instance's lease is to be extended to.
    extend: Option<Timestamp>,
    /// How many records there are, expired ones included.
    records: u64,
}

#[derive(PartialEq, Eq)]
enum Stage {
    Before,
    Open,
    Committed,
}

impl Transaction<'_> {
    /// Begins, unless that is done.
    async fn begin(&mut self) -> Result<(), Failure> {
        if self.stage == Stage::Before {
            let row = sqlx::query(BEGIN)
                .bind(self.instance.owner.as_bytes().to_vec())
                .fetch_one(&mut *self.connection)
                .await?;
            self.begun(&row)?;
        }
        Ok(())
    }

    fn begun(&mut self, row: &SqliteRow) -> Result<(), Failure> {
        if let Some(alive_until) = row.try_get(0)? {
            self.leases.extend_to(self.instance.owner, alive_until);
        }
        self.records = u64::try_from(row.try_get::<i64, _>(1)?).unwrap_or(0);
        self.stage = Stage::Open;
        Ok(())
    }

    /// Writes the last changes and commits, unless that is done.
    async fn commit(&mut self, changes: &Changes<'_>) -> Result<(), Failure> {
        if self.stage == Stage::Open {
            let commit = Commit {
                owner: self.instance.owner,
                extend: self.extend,
            };
            changes.write(self.connection, Some(commit)).await?;
            self.stage = Stage::Committed;
        }
        Ok(())
    }

    async fn carry_out(&mut self, batch: &mut [Operation]) -> Result<(), Failure> {
        let mut at = 0;
        while at < batch.len() {
            let together = batch[at..].iter().take_while(|next| is_about_records(next));
            let end = at + together.count();
            if end > at {
                let last = end == batch.len();
                self.change_records(&mut batch[at..end], last).await?;
                at = end;
            } else {
                self.begin().await?;
                self.carry_out_alone(&mut batch[at]).await?;
                at += 1;
            }
        }
        Ok(())
    }

    async fn carry_out_alone(&mut self, operation: &mut Operation) -> Result<(), Failure> {
        match operation {
            Operation::Save(asked) => {
                let Save {
                    ticket,
                    name,
                    value,
                } = &asked.question;
                let saved = joining::save(self.connection, ticket, name, value).await?;
                asked.answer(saved);
            }
            Operation::Load(asked) => {
                let loaded = load(self.connection, &asked.question).await?;
                asked.answer(Ok(loaded));
            }
            Operation::Purge(asked) => {
                let purged = self.purge(asked.question).await?;
                asked.answer(Ok(purged));
            }
            _ => {}
        }
        Ok(())
    }

    /// Reads the records these operations are about, has the protocol decide one operation after
    /// the other, and writes what has changed.
    async fn change_records(
        &mut self,
        operations: &mut [Operation],
        last: bool,
    ) -> Result<(), Failure> {
        let mut slots = self.load_records(operations).await?;
        if self.make_room(operations).await? {
            slots = self.load_records(operations).await?;
        }
        let now = self.instance.clock.now();
        for operation in operations {
            self.decide(operation, &mut slots, now);
        }
        let changes = slots.changes();
        match last {
            true => self.commit(&changes).await,
            false => Ok(changes.write(self.connection, None).await?),
        }
    }

    /// Begins on the way, when that is still to do.
    async fn load_records(&mut self, operations: &[Operation]) -> Result<Slots, Failure> {
        let (mut slots, ids) = Slots::of(operations.iter().flat_map(ids));
        let mut rest = &ids[..];
        if self.stage == Stage::Before
            && let Some((text, part)) = BEGIN_AND_LOAD.over(rest).next()
        {
            let begin = sqlx::query(text).bind(self.instance.owner.as_bytes().to_vec());
            let query = part.iter().fold(begin, |query, id| bind_id(query, id));
            let rows = query.fetch_all(&mut *self.connection).await?;
            let (first, records) = rows.split_first().ok_or(sqlx::Error::RowNotFound)?;
            self.begun(first)?;
            slots.take_in(records, &mut self.leases)?;
            rest = &rest[part.len()..];
        }
        self.begin().await?;
        slots.load(self.connection, rest, &mut self.leases).await?;
        Ok(slots)
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
                    let (token, attempt) = (ticket.token, ticket.attempt);
                    protocol::release(record, token, attempt, has_checkpoints, ttl, now)
                });
                asked.answer(settled);
            }
            Operation::Abandon(asked) => {
                let ticket = &asked.question;
                let settled = self.change(slots, &ticket.id, |record, _| {
                    protocol::abandon(record, ticket.token, ticket.attempt)
                });
                asked.answer(settled);
            }
            Operation::Renew(asked) => {
                self.extend_lease(now.after(asked.question.lease));
                let tickets = asked.question.tickets.iter();
                let held = tickets.map(|ticket| {
                    let record = slots.slot(&ticket.id).record()?;
                    Ok(protocol::held(record, ticket.token, now))
                });
                let held = held.collect();
                asked.answer(held);
            }
            Operation::Get(asked) => {
                let found = slots.slot(&asked.question).live(now);
                asked.answer(found);
            }
            Operation::TakeOver(asked) => {
                let ticket = self.take_over(&asked.question, slots, now);
                asked.answer(ticket);
            }
            Operation::Forget(asked) => {
                let forgotten = self.forget(slots.slot(&asked.question), now);
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
        let slot = slots.slot(&request.id);
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

    fn take_over(
        &mut self,
        asked: &TakeOver,
        slots: &mut Slots,
        now: Timestamp,
    ) -> Result<Option<Ticket>, StoreError> {
        let taking = TakingOver {
            abandoned: asked.abandoned,
            token: asked.token,
            hold: asked.hold,
            owner: self.instance.owner,
        };
        let slot = slots.slot(&asked.id);
        let leases = &self.leases;
        let (ticket, _) =
            slot.change(|record, _| protocol::take_over(record, &taking, leases, now))?;
        if ticket.is_some() {
            slot.claimed();
            self.extend_lease(now.after(asked.hold));
        }
        Ok(ticket)
    }

    fn change<A>(
        &mut self,
        slots: &mut Slots,
        id: &RecordId,
        operation: impl FnOnce(Option<Record>, bool) -> (Option<Record>, A),
    ) -> Result<A, StoreError> {
        let (answer, added) = slots.slot(id).change(operation)?;
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

    /// Before the store refuses claims it looks for expired records to remove. Answers whether it
    /// removed any.
    async fn make_room(&mut self, operations: &[Operation]) -> Result<bool, Failure> {
        let claims = operations
            .iter()
            .filter(|operation| matches!(operation, Operation::Claim(_)));
        let claims = u64::try_from(claims.count()).unwrap_or(u64::MAX);
        let needed = self.records.saturating_add(claims);
        if claims == 0 || self.instance.max_records.is_none_or(|max| needed <= max) {
            return Ok(false);
        }
        let now = self.instance.clock.now();
        Ok(self.purge_records(PURGE_WHEN_FULL, now).await? > 0)
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
}

/// What is saved under this claim; `None` when it is not the record's.
pub(super) async fn load(
    connection: &mut SqliteConnection,
    ticket: &Ticket,
) -> Result<Option<Vec<Checkpoint>>, sqlx::Error> {
    let rows = bind_id(sqlx::query(LOAD_CHECKPOINTS), &ticket.id)
        .bind(ticket.token.as_bytes().to_vec())
        .fetch_all(connection)
        .await?;
    if rows.is_empty() {
        return Ok(None);
    }
    let mut saved = Vec::with_capacity(rows.len());
    for row in &rows {
        if let Some(name) = row.try_get::<Option<String>, _>(0)? {
            let value = Bytes::from(row.try_get::<Vec<u8>, _>(1)?);
            saved.push(Checkpoint::new(name, value));
        }
    }
    Ok(Some(saved))
}

fn is_about_records(operation: &Operation) -> bool {
    !matches!(
        operation,
        Operation::Save(_) | Operation::Load(_) | Operation::Purge(_)
    )
}

/// The records an operation is about.
pub(super) fn ids(operation: &Operation) -> impl Iterator<Item = &RecordId> {
    let (one, many) = match operation {
        Operation::Claim(asked) => (Some(&asked.question.id), &[][..]),
        Operation::Complete(asked) => (Some(&asked.question.ticket.id), &[][..]),
        Operation::Release(asked) => (Some(&asked.question.ticket.id), &[][..]),
        Operation::Abandon(asked) => (Some(&asked.question.id), &[][..]),
        Operation::Get(asked) => (Some(&asked.question), &[][..]),
        Operation::Forget(asked) => (Some(&asked.question), &[][..]),
        Operation::TakeOver(asked) => (Some(&asked.question.id), &[][..]),
        Operation::Renew(asked) => (None, &*asked.question.tickets),
        _ => (None, &[][..]),
    };
    one.into_iter()
        .chain(many.iter().map(|ticket: &Ticket| &ticket.id))
}

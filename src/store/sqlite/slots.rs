//! The records of a transaction: read together, changed in memory, written together.

use std::{
    collections::{HashMap, hash_map::Entry},
    error::Error,
    sync::Arc,
    time::Duration,
};

use sqlx::{Row, SqliteConnection, sqlite::SqliteRow};

use super::statements::{
    CLEAR_CHECKPOINTS, COMMIT, DELETE, INSERT, LOAD, REPLACE, SETTLE, Statement, Written, bind_id,
    bind_outcome, bind_record, decode, decode_id,
};
use crate::{
    record::{Owner, Record, RecordId, Timestamp},
    store::{StoreError, protocol::Leases, stored::damaged},
};

/// A record as it was found, and as the operations have left it so far.
#[derive(Default)]
pub(super) struct Slot {
    row: Option<i64>,
    record: Option<Record>,
    /// Why the row cannot be understood. Whoever asks for it is told; it can only be forgotten.
    damage: Option<Arc<dyn Error + Send + Sync>>,
    has_checkpoints: bool,
    clear_checkpoints: bool,
    changed: bool,
    claimed: bool,
}

impl Slot {
    pub(super) fn record(&self) -> Result<Option<&Record>, StoreError> {
        match &self.damage {
            None => Ok(self.record.as_ref()),
            Some(damage) => Err(damaged(damage.clone())),
        }
    }

    /// A copy of the record as it is to be shown, unless it has expired.
    pub(super) fn live(&self, now: Timestamp) -> Result<Option<Record>, StoreError> {
        let record = self.record()?;
        let mut live = record.filter(|record| !record.is_expired(now)).cloned();
        if let Some(record) = &mut live {
            record.drop_expired_response(now);
        }
        Ok(live)
    }

    /// Has the protocol change the record; answers too by how much the number of records changed.
    pub(super) fn change<A>(
        &mut self,
        operation: impl FnOnce(Option<Record>, bool) -> (Option<Record>, A),
    ) -> Result<(A, i64), StoreError> {
        let before = self.record()?.cloned();
        let (after, answer) = operation(before.clone(), self.has_checkpoints);
        self.changed |= after != before;
        self.record = after;
        let added = i64::from(self.record.is_some()) - i64::from(before.is_some());
        Ok((answer, added))
    }

    /// Removes the record, even one that cannot be understood.
    pub(super) fn forget(&mut self) -> i64 {
        let existed = self.record.is_some() || self.damage.is_some();
        self.clear_checkpoints();
        self.record = None;
        self.damage = None;
        self.changed |= existed;
        -i64::from(existed)
    }

    /// The record is over, and what was saved under it.
    pub(super) fn clear_checkpoints(&mut self) {
        self.clear_checkpoints |= self.has_checkpoints;
        self.has_checkpoints = false;
    }

    /// A claim was won: all of the record may be new, not only its outcome.
    pub(super) fn claimed(&mut self) {
        self.claimed = true;
    }
}

#[derive(Default)]
pub(super) struct Slots(HashMap<RecordId, Slot>);

impl Slots {
    /// Room for these records, and each of their names once.
    pub(super) fn of<'a>(ids: impl Iterator<Item = &'a RecordId>) -> (Self, Vec<&'a RecordId>) {
        let mut slots = HashMap::new();
        let mut distinct = Vec::new();
        for id in ids {
            if let Entry::Vacant(vacant) = slots.entry(id.clone()) {
                vacant.insert(Slot::default());
                distinct.push(id);
            }
        }
        (Self(slots), distinct)
    }

    /// Reads these records, and the leases of their owners.
    pub(super) async fn load(
        &mut self,
        connection: &mut SqliteConnection,
        ids: &[&RecordId],
        leases: &mut Leases,
    ) -> Result<(), sqlx::Error> {
        for (text, part) in LOAD.over(ids) {
            let query = part
                .iter()
                .fold(sqlx::query(text), |query, id| bind_id(query, id));
            let rows = query.fetch_all(&mut *connection).await?;
            self.take_in(&rows, leases)?;
        }
        Ok(())
    }

    /// Takes in records and the leases of their owners.
    pub(super) fn take_in(
        &mut self,
        rows: &[SqliteRow],
        leases: &mut Leases,
    ) -> Result<(), sqlx::Error> {
        for row in rows {
            let id = decode_id(row)?;
            let slot = self.slot(&id);
            slot.row = Some(row.try_get(0)?);
            slot.has_checkpoints = row.try_get(19)?;
            match decode(row, id) {
                Ok(record) => {
                    if let Some(alive_until) = row.try_get(18)? {
                        leases.extend_to(record.owner, alive_until);
                    }
                    slot.record = Some(record);
                }
                Err(damage) => slot.damage = Some(damage.into()),
            }
        }
        Ok(())
    }

    pub(super) fn slot(&mut self, id: &RecordId) -> &mut Slot {
        self.0.entry(id.clone()).or_default()
    }

    /// What is to be written.
    pub(super) fn changes(&self) -> Changes<'_> {
        let mut changes = Changes::default();
        for slot in self.0.values().filter(|slot| slot.changed) {
            changes.add(slot);
        }
        changes
    }
}

/// How a transaction ends: with the owner's lease extended, when it is to be.
#[derive(Clone, Copy)]
pub(super) struct Commit {
    pub(super) owner: Owner,
    pub(super) extend: Option<Timestamp>,
}

impl Commit {
    fn bind<'q>(&self, query: Statement<'q>) -> Statement<'q> {
        query
            .bind(self.owner.as_bytes().to_vec())
            .bind(self.extend.map(Timestamp::as_micros))
    }
}

/// Changes by the statement that writes them.
#[derive(Default)]
pub(super) struct Changes<'a> {
    delete: Vec<i64>,
    clear_checkpoints: Vec<i64>,
    insert: Vec<&'a Record>,
    replace: Vec<(i64, &'a Record)>,
    settle: Vec<(i64, &'a Record)>,
}

impl<'a> Changes<'a> {
    fn add(&mut self, slot: &'a Slot) {
        match (slot.row, &slot.record) {
            (None, None) => {}
            (None, Some(record)) => self.insert.push(record),
            (Some(row), None) => self.delete.push(row),
            (Some(row), Some(record)) => {
                if slot.clear_checkpoints {
                    self.clear_checkpoints.push(row);
                }
                match slot.claimed {
                    true => self.replace.push((row, record)),
                    false => self.settle.push((row, record)),
                }
            }
        }
    }

    fn count(&self) -> usize {
        self.delete.len()
            + self.clear_checkpoints.len()
            + self.insert.len()
            + self.replace.len()
            + self.settle.len()
    }

    /// Writes them, and commits when told how. A single change commits in the same round trip:
    /// whoever comes alone pays for two, this one and the one that begins.
    pub(super) async fn write(
        &self,
        connection: &mut SqliteConnection,
        commit: Option<Commit>,
    ) -> Result<(), sqlx::Error> {
        let along = commit.filter(|_| self.count() == 1);
        execute(connection, &DELETE, &self.delete, along, |query, row| {
            query.bind(*row)
        })
        .await?;
        execute(
            connection,
            &CLEAR_CHECKPOINTS,
            &self.clear_checkpoints,
            along,
            |query, row| query.bind(*row),
        )
        .await?;
        execute(connection, &INSERT, &self.insert, along, |query, record| {
            bind_record(bind_id(query, &record.id), record)
        })
        .await?;
        execute(
            connection,
            &REPLACE,
            &self.replace,
            along,
            |query, (row, record)| bind_record(query, record).bind(*row),
        )
        .await?;
        execute(
            connection,
            &SETTLE,
            &self.settle,
            along,
            |query, (row, record)| bind_outcome(query, record).bind(*row),
        )
        .await?;
        if let Some(commit) = commit.filter(|_| along.is_none()) {
            commit.bind(sqlx::query(COMMIT)).execute(connection).await?;
        }
        Ok(())
    }
}

/// Executes the statement for each of the items; when it is to commit along, for the only one.
async fn execute<T>(
    connection: &mut SqliteConnection,
    statement: &Written,
    items: &[T],
    along: Option<Commit>,
    bind: impl for<'q> Fn(Statement<'q>, &T) -> Statement<'q>,
) -> Result<(), sqlx::Error> {
    if let (Some(commit), [item]) = (along, items) {
        let query = bind(sqlx::query(statement.and_commit), item);
        commit.bind(query).execute(connection).await?;
        return Ok(());
    }
    for (text, part) in statement.repeated.over(items) {
        let query = part.iter().fold(sqlx::query(text), &bind);
        query.execute(&mut *connection).await?;
    }
    Ok(())
}

impl Leases {
    /// Extends a lease to this time, in microseconds since the Unix epoch, as it is stored.
    pub(super) fn extend_to(&mut self, owner: Owner, alive_until: i64) {
        self.extend(owner, Duration::ZERO, Timestamp::from_micros(alive_until));
    }
}

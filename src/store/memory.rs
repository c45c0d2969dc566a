//! The protocol over a bounded map, for tests and single processes.

mod scopes;

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap},
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use tokio::task::yield_now;

use self::scopes::Scopes;
use super::{
    Checkpoint, Checkpoints, Claim, ClaimRequest, Clock, Completion, Counts, Inspect, Lifetimes,
    Settled, Store, StoreError, StoreErrorKind, SystemClock, Ticket, check_checkpoint,
    protocol::{self, Leases, TakingOver},
};
use crate::{
    Scope,
    record::{Owner, Record, RecordId, State, Timestamp, Token},
};

/// What a record costs beside its variable parts, for the limit on bytes.
const RECORD_OVERHEAD: usize = 512;

/// How many records are freed at most before others get their turn.
const PURGE_STEP: usize = 1024;

/// Keeps records in this process's memory: for tests, and for services of one process that may
/// forget everything when it ends.
///
/// Clones share records and lease. Two `MemoryStore::new()` share nothing: give every layer of a
/// service a clone of one. [`instance`](Self::instance) makes a handle with a lease of its own,
/// which behaves like a second process.
///
/// Bounded in records and bytes. A full store refuses new claims ([`StoreErrorKind::Full`], 503 to
/// the client) and never evicts a live record; a granted claim can always be completed, so the
/// bytes may be exceeded by the responses of the runs in progress. Expired records are freed by
/// every claim a little, and by the layer's background task without any claim.
///
/// No operation awaits another, so dropping a future loses nothing.
#[derive(Clone)]
pub struct MemoryStore {
    shared: Arc<Shared>,
    instance: Arc<Instance>,
}

struct Instance {
    owner: Owner,
    closed: AtomicBool,
}

struct Shared {
    options: MemoryStoreOptions,
    data: Mutex<Data>,
}

#[derive(Default)]
struct Data {
    /// Boxed, so that the table stays small and grows without moving the records themselves.
    slots: HashMap<RecordId, Box<Slot>>,
    scopes: Scopes,
    leases: Leases,
    /// When to look at a record again. May name records that are gone or live longer by now.
    due: BinaryHeap<Reverse<(Timestamp, RecordId)>>,
    bytes: usize,
}

#[derive(Default)]
struct Slot {
    record: Option<Record>,
    checkpoints: Vec<Checkpoint>,
}

impl Slot {
    fn bytes(&self) -> usize {
        let Some(record) = &self.record else { return 0 };
        let checkpoints = self.checkpoints.iter();
        RECORD_OVERHEAD
            + record.id.scope.as_bytes().len()
            + record.id.key.as_bytes().len()
            + record.response.as_ref().map_or(0, Bytes::len)
            + checkpoints
                .map(|saved| saved.name.len() + saved.value.len())
                .sum::<usize>()
    }
}

/// Limits and clock of a [`MemoryStore`].
#[derive(Debug, Clone)]
#[must_use]
pub struct MemoryStoreOptions {
    max_records: usize,
    max_bytes: usize,
    clock: Arc<dyn Clock>,
}

impl MemoryStoreOptions {
    /// The most records at once. Default 1 000 000.
    ///
    /// # Panics
    ///
    /// When zero.
    pub fn max_records(mut self, records: usize) -> Self {
        assert!(records > 0, "max_records must be at least 1");
        self.max_records = records;
        self
    }

    /// The most bytes at once, about 512 per record included. Default 1 GiB.
    ///
    /// # Panics
    ///
    /// When zero.
    pub fn max_bytes(mut self, bytes: usize) -> Self {
        assert!(bytes > 0, "max_bytes must be at least 1");
        self.max_bytes = bytes;
        self
    }

    /// The clock that judges leases and lifetimes. Default [`SystemClock`].
    pub fn clock(mut self, clock: impl Clock) -> Self {
        self.clock = Arc::new(clock);
        self
    }

    /// Builds the store.
    pub fn build(self) -> MemoryStore {
        MemoryStore {
            shared: Arc::new(Shared {
                options: self,
                data: Mutex::default(),
            }),
            instance: Arc::new(Instance::new()),
        }
    }
}

impl Instance {
    fn new() -> Self {
        Self {
            owner: Owner::random(),
            closed: AtomicBool::new(false),
        }
    }
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

impl MemoryStore {
    /// An empty store with the default limits and clock.
    pub fn new() -> Self {
        Self::options().build()
    }

    /// The limits and the clock, to be changed.
    pub fn options() -> MemoryStoreOptions {
        MemoryStoreOptions {
            max_records: 1_000_000,
            max_bytes: 1 << 30,
            clock: Arc::new(SystemClock::new()),
        }
    }

    /// Another instance on the same records, with a lease of its own: what a second process would
    /// be to a shared database.
    #[must_use]
    pub fn instance(&self) -> Self {
        Self {
            shared: self.shared.clone(),
            instance: Arc::new(Instance::new()),
        }
    }

    fn owner(&self) -> Owner {
        self.instance.owner
    }

    fn open(&self) -> Result<(MutexGuard<'_, Data>, Timestamp), StoreError> {
        // Asked under the lock: a claim that was let in before `close` and extended the lease after
        // it would be believed alive with nobody left to end it.
        let data = self.data();
        if self.instance.closed.load(Ordering::Acquire) {
            return Err(StoreError::new(
                StoreErrorKind::Closed,
                "the memory store was closed",
            ));
        }
        Ok((data, self.shared.options.clock.now()))
    }

    /// `None` when there was so much to free that others come first.
    fn try_count_in(&self, scope: &Scope) -> Result<Option<usize>, StoreError> {
        let (mut data, now) = self.open()?;
        if data.purge(PURGE_STEP, now) == PURGE_STEP {
            return Ok(None);
        }
        Ok(Some(match scope.as_bytes().is_empty() {
            true => data.slots.len() - data.scopes.records(),
            false => data.scopes.count(scope),
        }))
    }

    fn data(&self) -> MutexGuard<'_, Data> {
        // Every change is complete before the lock is given up, even by a panic.
        self.shared
            .data
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Data {
    /// Runs one operation of the protocol on one record, and keeps the books.
    fn apply<R>(
        &mut self,
        id: &RecordId,
        operation: impl FnOnce(Option<Record>, &mut Vec<Checkpoint>, &mut Leases) -> (Option<Record>, R),
    ) -> R {
        let slot = self.slots.entry(id.clone()).or_default();
        self.bytes -= slot.bytes();
        let was_there = slot.record.is_some();
        let (record, reply) =
            operation(slot.record.take(), &mut slot.checkpoints, &mut self.leases);
        slot.record = record;
        self.bytes += slot.bytes();
        match (was_there, slot.record.is_some()) {
            (false, true) => self.scopes.add(&id.scope),
            (true, false) => self.scopes.remove(&id.scope),
            _ => {}
        }
        if slot.record.is_none() {
            self.slots.remove(id);
        }
        reply
    }

    fn settle(
        &mut self,
        id: &RecordId,
        operation: impl FnOnce(Option<Record>, &mut Vec<Checkpoint>) -> (Option<Record>, Settled),
    ) -> Settled {
        let mut due = [None; 2];
        let settled = self.apply(id, |slot, saved, _| {
            let (record, settled) = operation(slot, saved);
            if let (Some(record), Settled::Done) = (&record, settled) {
                due = [record.response_expires, record.expires];
            }
            (record, settled)
        });
        for at in due.into_iter().flatten() {
            self.note(at, id);
        }
        settled
    }

    /// Notes when to look at a record again. Notes outlive records that go early, so once most are
    /// stale they are made anew.
    fn note(&mut self, at: Timestamp, id: &RecordId) {
        self.due.push(Reverse((at, id.clone())));
        if self.due.len() > 4 * self.slots.len() + 1024 {
            let records = self.slots.values().filter_map(|slot| slot.record.as_ref());
            let noted = records.flat_map(|record| {
                let at = [record.response_expires, record.expires];
                let at = at.into_iter().flatten();
                at.map(|at| Reverse((at, record.id.clone())))
            });
            self.due = noted.collect();
        }
    }

    /// Frees what is over, at most `limit` records.
    fn purge(&mut self, limit: usize, now: Timestamp) -> usize {
        let mut changed = 0;
        while changed < limit
            && let Some(Reverse((at, _))) = self.due.peek()
            && *at <= now
            && let Some(Reverse((_, id))) = self.due.pop()
        {
            changed += usize::from(self.apply(&id, |slot, _, _| protocol::purge(slot, now)));
        }
        changed
    }

    /// Gives room back that a burst of records took and nobody needs any more.
    fn shrink(&mut self) {
        if self.slots.capacity() > 4 * self.slots.len() + 1024 {
            self.slots.shrink_to_fit();
        }
        if self.due.capacity() > 4 * self.due.len() + 1024 {
            self.due.shrink_to_fit();
        }
        self.scopes.shrink();
    }

    fn live(&self, now: Timestamp) -> impl Iterator<Item = &Record> {
        self.slots
            .values()
            .filter_map(|slot| slot.record.as_ref())
            .filter(move |record| !record.is_expired(now))
    }
}

impl Store for MemoryStore {
    async fn claim(&self, request: ClaimRequest) -> Result<Claim, StoreError> {
        let (mut data, now) = self.open()?;
        let known = data.slots.get(&request.id);
        if let Some(record) = known.and_then(|slot| slot.record.as_ref())
            && let Some(claim) = protocol::look(record, &request, &data.leases, now)
        {
            return Ok(claim);
        }
        data.purge(2, now);
        let limits = &self.shared.options;
        let full =
            |data: &Data| data.slots.len() >= limits.max_records || data.bytes >= limits.max_bytes;
        if full(&data) && !data.slots.contains_key(&request.id) {
            data.purge(PURGE_STEP, now);
            if full(&data) {
                return Err(StoreError::new(
                    StoreErrorKind::Full,
                    "the memory store is full; raise max_records or max_bytes, or shorten the ttl",
                ));
            }
        }
        let owner = self.owner();
        let claim = data.apply(&request.id, |slot, checkpoints, leases| {
            if slot.as_ref().is_some_and(|record| record.is_expired(now)) {
                checkpoints.clear();
            }
            let (record, claim) = protocol::claim(slot, &request, owner, leases, now);
            if matches!(claim, Claim::Won(_)) {
                leases.extend(owner, request.lease, now);
            }
            (record, claim)
        });
        if let (Claim::Won(_), Some(ttl)) = (&claim, request.abandoned_ttl) {
            let at = now.after(request.max_run).after(ttl);
            data.note(at, &request.id);
        }
        Ok(claim)
    }

    async fn complete(
        &self,
        ticket: &Ticket,
        done: Completion,
        lifetimes: Lifetimes,
    ) -> Result<Settled, StoreError> {
        let (mut data, now) = self.open()?;
        Ok(data.settle(&ticket.id, |slot, _| {
            protocol::complete(slot, ticket.token, done, lifetimes, now)
        }))
    }

    async fn release(&self, ticket: &Ticket, ttl: Duration) -> Result<Settled, StoreError> {
        let (mut data, now) = self.open()?;
        Ok(data.settle(&ticket.id, |slot, saved| {
            let has_checkpoints = !saved.is_empty();
            protocol::release(
                slot,
                ticket.token,
                ticket.attempt,
                has_checkpoints,
                ttl,
                now,
            )
        }))
    }

    async fn abandon(&self, ticket: &Ticket) -> Result<Settled, StoreError> {
        let (mut data, _) = self.open()?;
        Ok(data.settle(&ticket.id, |slot, _| {
            protocol::abandon(slot, ticket.token, ticket.attempt)
        }))
    }

    async fn renew(&self, tickets: &[Ticket], lease: Duration) -> Result<Vec<Settled>, StoreError> {
        let (mut data, now) = self.open()?;
        data.leases.extend(self.owner(), lease, now);
        let held = tickets.iter().map(|ticket| {
            let slot = data.slots.get(&ticket.id);
            protocol::held(
                slot.and_then(|slot| slot.record.as_ref()),
                ticket.token,
                now,
            )
        });
        Ok(held.collect())
    }

    async fn purge(&self, limit: usize) -> Result<usize, StoreError> {
        let (mut data, now) = self.open()?;
        data.leases.forget_lapsed(now);
        let changed = data.purge(limit, now);
        data.shrink();
        Ok(changed)
    }

    async fn close(&self) -> Result<(), StoreError> {
        let mut data = self.data();
        self.instance.closed.store(true, Ordering::Release);
        data.leases.give_up(self.owner());
        Ok(())
    }
}

impl Inspect for MemoryStore {
    async fn get(&self, id: &RecordId) -> Result<Option<Record>, StoreError> {
        let (data, now) = self.open()?;
        let record = data.slots.get(id).and_then(|slot| slot.record.clone());
        let live = record.filter(|record| !record.is_expired(now));
        Ok(live.map(|mut record| {
            record.drop_expired_response(now);
            record
        }))
    }

    async fn forget(&self, id: &RecordId) -> Result<bool, StoreError> {
        let (mut data, now) = self.open()?;
        Ok(data.apply(id, |slot, _, _| {
            let live = slot.is_some_and(|record| !record.is_expired(now));
            (None, live)
        }))
    }

    async fn counts(&self) -> Result<Counts, StoreError> {
        let (data, now) = self.open()?;
        let mut counts = Counts::default();
        for record in data.live(now) {
            *match record.state {
                State::Completed => &mut counts.completed,
                State::Released => &mut counts.released,
                _ if record.is_abandoned(&data.leases, now) => &mut counts.abandoned,
                _ => &mut counts.running,
            } += 1;
        }
        Ok(counts)
    }

    /// What is expired is freed first; then the number that is kept for each scope is that of the live
    /// ones, and nothing is read through.
    async fn count_in(&self, scope: &Scope, at_most: u64) -> Result<u64, StoreError> {
        loop {
            if let Some(count) = self.try_count_in(scope)? {
                return Ok(at_most.min(count as u64));
            }
            yield_now().await;
        }
    }

    async fn abandoned(
        &self,
        after: Option<&Record>,
        limit: usize,
    ) -> Result<Vec<Record>, StoreError> {
        let (data, now) = self.open()?;
        let place = |record: &Record| (record.created, record.id.clone());
        let mut page: Vec<_> = data
            .live(now)
            .filter(|record| record.is_abandoned(&data.leases, now))
            .filter(|record| after.is_none_or(|after| place(record) > place(after)))
            .cloned()
            .collect();
        page.sort_by_key(place);
        page.truncate(limit);
        Ok(page)
    }

    async fn take_over(
        &self,
        id: &RecordId,
        abandoned: Token,
        token: Token,
        hold: Duration,
    ) -> Result<Option<Ticket>, StoreError> {
        let (mut data, now) = self.open()?;
        let taking = TakingOver {
            abandoned,
            token,
            hold,
            owner: self.owner(),
        };
        Ok(data.apply(id, |slot, _, leases| {
            let (record, ticket) = protocol::take_over(slot, &taking, leases, now);
            if ticket.is_some() {
                leases.extend(taking.owner, hold, now);
            }
            (record, ticket)
        }))
    }
}

impl Checkpoints for MemoryStore {
    async fn save(&self, ticket: &Ticket, name: &str, value: Bytes) -> Result<Settled, StoreError> {
        let (mut data, _) = self.open()?;
        data.apply(&ticket.id, |slot, saved, _| {
            let running = slot.as_ref().is_some_and(|record| {
                record.token == ticket.token && record.state == State::Running
            });
            if !running {
                return (slot, Ok(Settled::Lost));
            }
            let others = saved.iter().filter(|other| other.name != name).count();
            if let Err(error) = check_checkpoint(name, &value, others) {
                return (slot, Err(error));
            }
            match saved.iter_mut().find(|other| other.name == name) {
                Some(checkpoint) => checkpoint.value = value,
                None => saved.push(Checkpoint::new(name, value)),
            }
            (slot, Ok(Settled::Done))
        })
    }

    async fn load(&self, ticket: &Ticket) -> Result<Option<Vec<Checkpoint>>, StoreError> {
        let (data, _) = self.open()?;
        let slot = data.slots.get(&ticket.id).filter(|slot| {
            let record = slot.record.as_ref();
            record.is_some_and(|record| record.token == ticket.token)
        });
        Ok(slot.map(|slot| slot.checkpoints.clone()))
    }
}

impl fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let data = self.data();
        f.debug_struct("MemoryStore")
            .field("records", &data.slots.len())
            .field("bytes", &data.bytes)
            .field("owner", &self.owner())
            .finish_non_exhaustive()
    }
}

#[cfg(all(test, feature = "testing"))]
#[path = "memory_tests.rs"]
mod tests;

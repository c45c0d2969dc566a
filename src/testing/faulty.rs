//! A store that misbehaves on request.

use std::{
    collections::VecDeque,
    fmt,
    future::{Future, pending},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use tokio::{sync::Notify, time::sleep};

use crate::{
    Record, RecordId, Scope, Token,
    store::{
        Checkpoint, Checkpoints, Claim, ClaimRequest, Completion, Counts, Inspect, Joining,
        Lifetimes, Settled, Store, StoreError, StoreErrorKind, Ticket,
    },
};

/// One operation of the store traits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each is the trait method of that name")]
pub enum Operation {
    Claim,
    Complete,
    Release,
    Abandon,
    Renew,
    Purge,
    Close,
    Get,
    Forget,
    Counts,
    CountIn,
    Abandoned,
    TakeOver,
    Save,
    Load,
}

const OPERATIONS: usize = Operation::Load as usize + 1;

/// What goes wrong with a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// Fails as unavailable, and the store underneath never hears of it.
    Before,
    /// The store underneath does it, then the answer is lost: fails as unavailable.
    After,
    /// Waits this long, then does it.
    DelayBefore(Duration),
    /// Does it, then waits this long before answering.
    DelayAfter(Duration),
    /// Never does it and never answers; ends when its future is dropped.
    HangBefore,
    /// Does it and never answers; ends when its future is dropped.
    HangAfter,
}

/// How many calls a fault is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Times {
    /// The next call.
    Once,
    /// The next so many calls.
    Next(usize),
    /// Every call, until [`FaultyStore::clear`].
    Always,
}

/// A store that fails, delays and hangs as told, and counts its calls. Clones share faults and
/// counts, so a test keeps one while a layer holds another.
///
/// Injected errors are [`StoreErrorKind::Unavailable`].
///
/// ```
/// # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
/// use tower_idempotency::{
///     MemoryStore,
///     store::Store,
///     testing::{Fault, FaultyStore, Operation, Times},
/// };
///
/// let store = FaultyStore::new(MemoryStore::new());
/// store.fail(Operation::Purge, Fault::Before, Times::Once);
/// assert!(store.purge(10).await.is_err());
/// assert!(store.purge(10).await.is_ok());
/// assert_eq!(store.calls(Operation::Purge), 2);
/// # });
/// ```
#[derive(Clone)]
pub struct FaultyStore<S> {
    inner: S,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    plans: Mutex<[Plan; OPERATIONS]>,
    called: Notify,
}

#[derive(Debug, Default)]
struct Plan {
    calls: usize,
    faults: VecDeque<(Fault, Times)>,
}

impl Plan {
    /// Counts a call and says what goes wrong with it.
    fn next(&mut self) -> Option<Fault> {
        self.calls += 1;
        loop {
            let (fault, times) = self.faults.front_mut()?;
            let fault = *fault;
            match times {
                Times::Always => return Some(fault),
                Times::Next(0) => {
                    self.faults.pop_front();
                }
                Times::Next(left) if *left > 1 => {
                    *left -= 1;
                    return Some(fault);
                }
                Times::Next(_) | Times::Once => {
                    self.faults.pop_front();
                    return Some(fault);
                }
            }
        }
    }
}

impl<S> FaultyStore<S> {
    /// Wraps a store; nothing goes wrong yet.
    pub fn new(inner: S) -> Self {
        Self {
            inner,
            shared: Arc::default(),
        }
    }

    /// The store underneath, where nothing goes wrong and nothing is counted.
    pub fn inner(&self) -> &S {
        &self.inner
    }

    /// Plans a fault, after those already planned for this operation.
    pub fn fail(&self, operation: Operation, fault: Fault, times: Times) {
        self.plans()[operation as usize]
            .faults
            .push_back((fault, times));
    }

    /// Drops all planned faults. Counts stay, and calls that hang go on hanging.
    pub fn clear(&self) {
        for plan in &mut *self.plans() {
            plan.faults.clear();
        }
    }

    /// How often this operation was called, faults included. A call counts once its future is
    /// first polled.
    pub fn calls(&self, operation: Operation) -> usize {
        self.plans()[operation as usize].calls
    }

    /// How often any operation was called.
    pub fn total_calls(&self) -> usize {
        self.plans().iter().map(|plan| plan.calls).sum()
    }

    /// Waits until this operation was called `calls` times since the store was made.
    pub async fn called(&self, operation: Operation, calls: usize) {
        loop {
            let mut next = std::pin::pin!(self.shared.called.notified());
            // Registered before looking, or a call in between would go unnoticed.
            next.as_mut().enable();
            if self.calls(operation) >= calls {
                return;
            }
            next.await;
        }
    }

    fn plans(&self) -> MutexGuard<'_, [Plan; OPERATIONS]> {
        // A plan is never left half-changed, so a panic elsewhere does not matter.
        self.shared
            .plans
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a closure and not a future, because a store may begin its work before the first poll.
    async fn run<T, F>(
        &self,
        operation: Operation,
        inner: impl FnOnce() -> F + Send,
    ) -> Result<T, StoreError>
    where
        T: Send,
        F: Future<Output = Result<T, StoreError>> + Send,
    {
        let fault = self.plans()[operation as usize].next();
        self.shared.called.notify_waiters();
        match fault {
            None => inner().await,
            Some(Fault::Before) => Err(unavailable("injected: failed before the store was asked")),
            Some(Fault::After) => {
                inner().await?;
                Err(unavailable("injected: the store's answer was lost"))
            }
            Some(Fault::DelayBefore(delay)) => {
                sleep(delay).await;
                inner().await
            }
            Some(Fault::DelayAfter(delay)) => {
                let answer = inner().await;
                sleep(delay).await;
                answer
            }
            Some(Fault::HangBefore) => pending().await,
            Some(Fault::HangAfter) => {
                let _unheard = inner().await;
                pending().await
            }
        }
    }
}

fn unavailable(message: &'static str) -> StoreError {
    StoreError::new(StoreErrorKind::Unavailable, message)
}

impl<S: Store> Store for FaultyStore<S> {
    async fn claim(&self, claim: ClaimRequest) -> Result<Claim, StoreError> {
        self.run(Operation::Claim, || self.inner.claim(claim)).await
    }

    async fn complete(
        &self,
        ticket: &Ticket,
        done: Completion,
        lifetimes: Lifetimes,
    ) -> Result<Settled, StoreError> {
        self.run(Operation::Complete, || {
            self.inner.complete(ticket, done, lifetimes)
        })
        .await
    }

    async fn release(&self, ticket: &Ticket, ttl: Duration) -> Result<Settled, StoreError> {
        self.run(Operation::Release, || self.inner.release(ticket, ttl))
            .await
    }

    async fn abandon(&self, ticket: &Ticket) -> Result<Settled, StoreError> {
        self.run(Operation::Abandon, || self.inner.abandon(ticket))
            .await
    }

    async fn renew(&self, tickets: &[Ticket], lease: Duration) -> Result<Vec<Settled>, StoreError> {
        self.run(Operation::Renew, || self.inner.renew(tickets, lease))
            .await
    }

    async fn purge(&self, limit: usize) -> Result<usize, StoreError> {
        self.run(Operation::Purge, || self.inner.purge(limit)).await
    }

    async fn close(&self) -> Result<(), StoreError> {
        self.run(Operation::Close, || self.inner.close()).await
    }
}

impl<S: Inspect> Inspect for FaultyStore<S> {
    async fn get(&self, id: &RecordId) -> Result<Option<Record>, StoreError> {
        self.run(Operation::Get, || self.inner.get(id)).await
    }

    async fn forget(&self, id: &RecordId) -> Result<bool, StoreError> {
        self.run(Operation::Forget, || self.inner.forget(id)).await
    }

    async fn counts(&self) -> Result<Counts, StoreError> {
        self.run(Operation::Counts, || self.inner.counts()).await
    }

    async fn count_in(&self, scope: &Scope, at_most: u64) -> Result<u64, StoreError> {
        self.run(Operation::CountIn, || self.inner.count_in(scope, at_most))
            .await
    }

    async fn abandoned(
        &self,
        after: Option<&Record>,
        limit: usize,
    ) -> Result<Vec<Record>, StoreError> {
        self.run(Operation::Abandoned, || self.inner.abandoned(after, limit))
            .await
    }

    async fn take_over(
        &self,
        id: &RecordId,
        abandoned: Token,
        token: Token,
        hold: Duration,
    ) -> Result<Option<Ticket>, StoreError> {
        self.run(Operation::TakeOver, || {
            self.inner.take_over(id, abandoned, token, hold)
        })
        .await
    }
}

impl<S: Checkpoints> Checkpoints for FaultyStore<S> {
    async fn save(&self, ticket: &Ticket, name: &str, value: Bytes) -> Result<Settled, StoreError> {
        self.run(Operation::Save, || self.inner.save(ticket, name, value))
            .await
    }

    /// No call of the store: the caller writes.
    fn joining(
        &self,
        ticket: &Ticket,
        name: &str,
        value: Bytes,
    ) -> Option<Result<Joining, StoreError>> {
        self.inner.joining(ticket, name, value)
    }

    fn stored_id(&self, id: &RecordId) -> RecordId {
        self.inner.stored_id(id)
    }

    async fn load(&self, ticket: &Ticket) -> Result<Option<Vec<Checkpoint>>, StoreError> {
        self.run(Operation::Load, || self.inner.load(ticket)).await
    }
}

impl<S: fmt::Debug> fmt::Debug for FaultyStore<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FaultyStore")
            .field("inner", &self.inner)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
#[path = "faulty_tests.rs"]
mod tests;

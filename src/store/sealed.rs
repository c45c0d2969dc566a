//! A wrapper that encrypts what a store keeps.

mod hash_key;
mod keys;
mod names;
mod ring;

use std::{borrow::Cow, fmt, sync::Arc, time::Duration};

use bytes::Bytes;

pub use self::keys::{InvalidSealingKey, SealingKey, SealingKeys};
pub(crate) use self::ring::{Purpose, Ring};
use super::{
    Checkpoint, Checkpoints, Claim, ClaimRequest, Completion, Counts, Inspect, Joining, Lifetimes,
    Settled, Store, StoreError, StoreErrorKind, Ticket, check_checkpoint,
};
use crate::{
    Scope,
    record::{Record, RecordId, Token},
    retained::DecodeError,
};

/// Any store, with responses and checkpoints sealed before it sees them.
///
/// The [`sealing`](crate::sealing) chapter says what this protects, and how to turn it on and rotate keys.
///
/// ```
/// use tower_idempotency::{IdempotencyLayer, MemoryStore, SealedStore, SealingKeys};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let from_secret_manager = "5e".repeat(32);
/// let key: tower_idempotency::SealingKey = from_secret_manager.parse()?;
/// let store = SealedStore::open(MemoryStore::new(), SealingKeys::new("2026-12", key)).await?;
/// let layer = IdempotencyLayer::new(store).single_tenant();
/// # Ok(())
/// # }
/// ```
///
/// A response that cannot be opened, because its key is missing or wrong or it was tampered with, is given
/// back unopened: as it is stored, but for its first byte, which makes
/// [`RetainedResponse::decode`](crate::RetainedResponse::decode) say why. A layer answers 503
/// `idempotency_store_unavailable` then (to [`Audience::Senders`](crate::Audience) the 2xx that it was), never runs the handler, and logs the [`DecodeError`]; an operator
/// still sees the record's state and times.
///
/// Cancel safe as the store it wraps.
#[derive(Clone)]
pub struct SealedStore<S> {
    inner: S,
    ring: Arc<Ring>,
}

impl<S: Inspect + Checkpoints> SealedStore<S> {
    /// Wraps the store. With [`hash_ids`](SealingKeys::hash_ids) the first call writes a record of its own
    /// to the store, which tells the hash key from others and never expires, and waits at most 15 s for
    /// others that are doing the same. Dropped before that, it leaves a claim that the next call waits for,
    /// at most 10 s.
    ///
    /// # Errors
    ///
    /// [`StoreErrorKind::Keys`] when the store's records are named with another hash key, or with one while
    /// none is given, or with none while one is given. Otherwise those of the store.
    pub async fn open(store: S, keys: SealingKeys) -> Result<Self, StoreError> {
        let ring = Ring::new(keys);
        hash_key::check(&store, &ring.names).await?;
        Ok(Self {
            inner: store,
            ring: Arc::new(ring),
        })
    }

    /// Makes the store forget which hash key its records are named with, so that it can be opened with
    /// another, or none. Answers whether there was one.
    ///
    /// Stop every service on this store first: one that goes on would use the old key, and a retry that
    /// reaches it and a service with the new key would run twice.
    ///
    /// # Errors
    ///
    /// [`StoreErrorKind::Keys`] while any live record is there. Otherwise those of the store.
    pub async fn forget_hash_key(store: &S) -> Result<bool, StoreError> {
        hash_key::forget(store).await
    }

    /// The store below, which sees no response and no checkpoint, and no scope and key where they are
    /// hashed. What is written to it directly is not sealed.
    pub fn inner(&self) -> &S {
        &self.inner
    }
}

impl<S> SealedStore<S> {
    fn stored<'a>(&self, id: &'a RecordId) -> Cow<'a, RecordId> {
        self.ring.names.stored(id)
    }

    fn ticket<'a>(&self, ticket: &'a Ticket) -> Cow<'a, Ticket> {
        self.ring.names.stored_ticket(ticket)
    }

    fn sealed(&self, stored: &RecordId, done: Completion) -> Completion {
        let seal = |response: Bytes| self.ring.seal(stored, Purpose::Response, &response);
        Completion {
            status: done.status,
            // What cannot be sealed is not kept.
            response: done.response.and_then(seal),
        }
    }

    /// The value as the store below gets it, for a ticket of that store.
    fn sealed_checkpoint(
        &self,
        ticket: &Ticket,
        name: &str,
        value: &Bytes,
    ) -> Result<Bytes, StoreError> {
        check_checkpoint(name, value, 0)?;
        let sealed = self.ring.seal(&ticket.id, Purpose::Checkpoint(name), value);
        sealed.ok_or(StoreError::new(StoreErrorKind::Invalid, TOO_LARGE))
    }

    fn opened(&self, mut record: Record, seen: RecordId) -> Record {
        let open = |response| self.ring.open_response(&record.id, response);
        record.response = record.response.take().map(open);
        record.id = seen;
        record
    }
}

impl<S: Store> Store for SealedStore<S> {
    async fn claim(&self, mut claim: ClaimRequest) -> Result<Claim, StoreError> {
        let stored = self.stored(&claim.id).into_owned();
        if stored == hash_key::record_id() {
            return Err(StoreError::new(StoreErrorKind::Invalid, RESERVED));
        }
        let seen = std::mem::replace(&mut claim.id, stored);
        Ok(match self.inner.claim(claim).await? {
            Claim::Won(ticket) => Claim::Won(Ticket { id: seen, ..ticket }),
            Claim::Completed(record) => Claim::Completed(Box::new(self.opened(*record, seen))),
            other => other,
        })
    }

    async fn complete(
        &self,
        ticket: &Ticket,
        done: Completion,
        lifetimes: Lifetimes,
    ) -> Result<Settled, StoreError> {
        let ticket = self.ticket(ticket);
        let done = self.sealed(&ticket.id, done);
        self.inner.complete(&ticket, done, lifetimes).await
    }

    async fn release(&self, ticket: &Ticket, ttl: Duration) -> Result<Settled, StoreError> {
        self.inner.release(&self.ticket(ticket), ttl).await
    }

    async fn abandon(&self, ticket: &Ticket) -> Result<Settled, StoreError> {
        self.inner.abandon(&self.ticket(ticket)).await
    }

    async fn renew(&self, tickets: &[Ticket], lease: Duration) -> Result<Vec<Settled>, StoreError> {
        let stored = tickets
            .iter()
            .map(|ticket| self.ticket(ticket).into_owned());
        let stored: Vec<_> = stored.collect();
        self.inner.renew(&stored, lease).await
    }

    async fn purge(&self, limit: usize) -> Result<usize, StoreError> {
        self.inner.purge(limit).await
    }

    async fn close(&self) -> Result<(), StoreError> {
        self.inner.close().await
    }
}

impl<S: Inspect> Inspect for SealedStore<S> {
    async fn get(&self, id: &RecordId) -> Result<Option<Record>, StoreError> {
        let found = self.inner.get(&self.stored(id)).await?;
        Ok(found.map(|record| self.opened(record, id.clone())))
    }

    async fn forget(&self, id: &RecordId) -> Result<bool, StoreError> {
        self.inner.forget(&self.stored(id)).await
    }

    async fn counts(&self) -> Result<Counts, StoreError> {
        let counts = self.inner.counts().await?;
        match self.ring.names.hashes() {
            true => hash_key::without(&self.inner, counts).await,
            false => Ok(counts),
        }
    }

    async fn count_in(&self, scope: &Scope, at_most: u64) -> Result<u64, StoreError> {
        let scope = self.ring.names.stored_scope(scope);
        self.inner.count_in(&scope, at_most).await
    }

    /// With hashed ids these records are named by their hashes, since nothing else is known of them. Their
    /// ids and tickets do for every operation of this store.
    async fn abandoned(
        &self,
        after: Option<&Record>,
        limit: usize,
    ) -> Result<Vec<Record>, StoreError> {
        let after = after.map(|record| Record {
            id: self.stored(&record.id).into_owned(),
            ..record.clone()
        });
        // One more, in case the check of the hash key is among them.
        let more = limit.saturating_add(1);
        let mut listed = self.inner.abandoned(after.as_ref(), more).await?;
        listed.retain(|record| record.id != hash_key::record_id());
        listed.truncate(limit);
        let open = |record: Record| {
            let seen = self.ring.names.seen(record.id.clone());
            self.opened(record, seen)
        };
        Ok(listed.into_iter().map(open).collect())
    }

    async fn take_over(
        &self,
        id: &RecordId,
        abandoned: Token,
        token: Token,
        hold: Duration,
    ) -> Result<Option<Ticket>, StoreError> {
        let stored = self.stored(id);
        let taken = self
            .inner
            .take_over(&stored, abandoned, token, hold)
            .await?;
        let id = id.clone();
        Ok(taken.map(|ticket| Ticket { id, ..ticket }))
    }
}

impl<S: Checkpoints> Checkpoints for SealedStore<S> {
    async fn save(&self, ticket: &Ticket, name: &str, value: Bytes) -> Result<Settled, StoreError> {
        let ticket = self.ticket(ticket);
        let sealed = self.sealed_checkpoint(&ticket, name, &value)?;
        self.inner.save(&ticket, name, sealed).await
    }

    fn joining(
        &self,
        ticket: &Ticket,
        name: &str,
        value: Bytes,
    ) -> Option<Result<Joining, StoreError>> {
        let ticket = self.ticket(ticket);
        match self.sealed_checkpoint(&ticket, name, &value) {
            Ok(sealed) => self.inner.joining(&ticket, name, sealed),
            // A store that cannot do it says so first.
            Err(refused) => {
                let can = self.inner.joining(&ticket, "", Bytes::new());
                can.map(|_| Err(refused))
            }
        }
    }

    fn stored_id(&self, id: &RecordId) -> RecordId {
        self.inner.stored_id(&self.stored(id))
    }

    /// Fails with [`StoreErrorKind::Keys`] when a key is missing, and with [`StoreErrorKind::Corrupt`] when
    /// a value does not open; the [`DecodeError`] is the source.
    async fn load(&self, ticket: &Ticket) -> Result<Option<Vec<Checkpoint>>, StoreError> {
        let ticket = self.ticket(ticket);
        let saved = self.inner.load(&ticket).await?;
        let open = |saved: Checkpoint| {
            let value = self
                .ring
                .open_checkpoint(&ticket.id, &saved.name, saved.value);
            value.map(|value| Checkpoint::new(saved.name, value))
        };
        let opened = saved.map(|saved| saved.into_iter().map(open).collect());
        opened.transpose().map_err(unreadable)
    }
}

fn unreadable(error: DecodeError) -> StoreError {
    let kind = match error {
        DecodeError::NoSuchKey { .. } => StoreErrorKind::Keys,
        _ => StoreErrorKind::Corrupt,
    };
    StoreError::new(kind, "a checkpoint cannot be opened").with_source(error)
}

#[cfg(any(feature = "sqlite", feature = "postgres"))]
impl<S: super::TransactionalStore> super::TransactionalStore for SealedStore<S> {
    type Database = S::Database;
}

#[cfg(any(feature = "sqlite", feature = "postgres"))]
impl<S: super::TransactionalStore> super::transactional::sealed::Sealed for SealedStore<S> {
    fn begins(&self) -> super::transactional::sealed::Begins {
        self.inner.begins()
    }

    fn stored_ticket(&self, ticket: &Ticket) -> Ticket {
        self.inner.stored_ticket(&self.ticket(ticket))
    }

    fn stored_outcome(&self, ticket: &Ticket, done: Completion) -> Completion {
        let ticket = self.ticket(ticket);
        let done = self.sealed(&ticket.id, done);
        self.inner.stored_outcome(&ticket, done)
    }
}

impl<S: fmt::Debug> fmt::Debug for SealedStore<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SealedStore")
            .field("inner", &self.inner)
            .field("keys", &self.ring)
            .finish()
    }
}

const RESERVED: &str = "this scope and key name a record of the SealedStore itself; take others";

const TOO_LARGE: &str = "a checkpoint's value may have at most 64 KiB; keep large things elsewhere and save a reference";

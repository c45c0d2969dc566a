//! A store chosen at run time.

use std::{fmt, future::Future, pin::Pin, sync::Arc, time::Duration};

use bytes::Bytes;

use super::{
    Checkpoint, Checkpoints, Claim, ClaimRequest, Completion, Counts, Inspect, Joining, Lifetimes,
    Settled, Store, StoreError, Ticket,
};
use crate::{
    Scope,
    record::{Record, RecordId, Token},
};

type Answer<'a, T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send + 'a>>;

/// Any store behind one type, for services that choose their store from configuration.
///
/// Costs one allocation and one indirect call per operation.
///
/// ```
/// use tower_idempotency::{AnyStore, IdempotencyLayer, MemoryStore};
///
/// let store = AnyStore::new(MemoryStore::new());
/// let layer = IdempotencyLayer::new(store).single_tenant();
/// ```
#[derive(Clone)]
pub struct AnyStore(Arc<dyn Erased>);

impl AnyStore {
    /// Hides which store it is.
    pub fn new(store: impl Inspect + Checkpoints) -> Self {
        Self(Arc::new(store))
    }
}

impl fmt::Debug for AnyStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AnyStore").finish_non_exhaustive()
    }
}

/// Writes the erased twin of each trait method, its forwarding from every store, and the traits'
/// implementation by [`AnyStore`], so that the three cannot differ. A borrowed argument is written
/// twice: as the trait has it, and as the boxed future keeps it.
macro_rules! erase {
    ($($trait:ident { $(fn $name:ident / $erased:ident ($($arg:ident: $type:ty $(| $kept:ty)?),*) -> $out:ty;)* $(@ $($rest:item)+)? })*) => {
        trait Erased: Send + Sync {
            fn erased_joining(&self, ticket: &Ticket, name: &str, value: Bytes) -> Option<Result<Joining, StoreError>>;

            fn erased_stored_id(&self, id: &RecordId) -> RecordId;

            $($(fn $erased<'a>(&'a self $(, $arg: erase!(@kept $type $(| $kept)?))*) -> Answer<'a, $out>;)*)*
        }

        impl<S: Inspect + Checkpoints> Erased for S {
            fn erased_joining(&self, ticket: &Ticket, name: &str, value: Bytes) -> Option<Result<Joining, StoreError>> {
                self.joining(ticket, name, value)
            }

            fn erased_stored_id(&self, id: &RecordId) -> RecordId {
                self.stored_id(id)
            }

            $($(fn $erased<'a>(&'a self $(, $arg: erase!(@kept $type $(| $kept)?))*) -> Answer<'a, $out> {
                Box::pin($trait::$name(self $(, $arg)*))
            })*)*
        }

        $(impl $trait for AnyStore {
            $(async fn $name(&self $(, $arg: $type)*) -> Result<$out, StoreError> {
                self.0.$erased($($arg),*).await
            })*
            $($($rest)+)?
        })*
    };
    (@kept $type:ty | $kept:ty) => { $kept };
    (@kept $type:ty) => { $type };
}

erase! {
    Store {
        fn claim / erased_claim(claim: ClaimRequest) -> Claim;
        fn complete / erased_complete(ticket: &Ticket | &'a Ticket, done: Completion, lifetimes: Lifetimes) -> Settled;
        fn release / erased_release(ticket: &Ticket | &'a Ticket, ttl: Duration) -> Settled;
        fn abandon / erased_abandon(ticket: &Ticket | &'a Ticket) -> Settled;
        fn renew / erased_renew(tickets: &[Ticket] | &'a [Ticket], lease: Duration) -> Vec<Settled>;
        fn purge / erased_purge(limit: usize) -> usize;
        fn close / erased_close() -> ();
    }
    Inspect {
        fn get / erased_get(id: &RecordId | &'a RecordId) -> Option<Record>;
        fn forget / erased_forget(id: &RecordId | &'a RecordId) -> bool;
        fn counts / erased_counts() -> Counts;
        fn count_in / erased_count_in(scope: &Scope | &'a Scope, at_most: u64) -> u64;
        fn abandoned / erased_abandoned(after: Option<&Record> | Option<&'a Record>, limit: usize) -> Vec<Record>;
        fn take_over / erased_take_over(id: &RecordId | &'a RecordId, abandoned: Token, token: Token, hold: Duration) -> Option<Ticket>;
    }
    Checkpoints {
        fn save / erased_save(ticket: &Ticket | &'a Ticket, name: &str | &'a str, value: Bytes) -> Settled;
        fn load / erased_load(ticket: &Ticket | &'a Ticket) -> Option<Vec<Checkpoint>>;
        @
        fn joining(&self, ticket: &Ticket, name: &str, value: Bytes) -> Option<Result<Joining, StoreError>> {
            self.0.erased_joining(ticket, name, value)
        }

        fn stored_id(&self, id: &RecordId) -> RecordId {
            self.0.erased_stored_id(id)
        }
    }
}

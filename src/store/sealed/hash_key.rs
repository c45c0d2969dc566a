//! One store has one hash key. With another, every retry would have another name, and run again.
//!
//! So the first who opens a store with a key leaves a record that tells it from others, and everybody
//! after it compares.

use std::time::Duration;

use http::StatusCode;
use tokio::time::{Instant, sleep};

use super::names::Names;
use crate::{
    IdempotencyKey, Scope,
    record::{Fingerprint, Record, RecordId, State},
    store::{
        Claim, ClaimRequest, Completion, Counts, Inspect, Lifetimes, Settled, StoreError,
        StoreErrorKind, Ticket,
    },
};

/// How the check is written; the first byte of it.
const VERSION: u8 = 1;
/// How long who writes the check is waited for before another does.
const RUN: Duration = Duration::from_secs(10);
/// How long opening waits in all.
const PATIENCE: Duration = Duration::from_secs(15);
const PAUSE: Duration = Duration::from_millis(20);

/// What the record of the check is called. No header can carry its key, and no hashed scope, which has 32
/// bytes, is its scope.
pub(super) fn record_id() -> RecordId {
    let key = IdempotencyKey::new(b"\0hash key");
    RecordId::new(Scope::new("tower-idempotency sealing"), key)
}

/// Makes sure that the names are those the store's records have.
pub(super) async fn check<S: Inspect>(store: &S, names: &Names) -> Result<(), StoreError> {
    let id = record_id();
    match (store.get(&id).await?, names.check()) {
        (None, None) => return Ok(()),
        (Some(record), Some(check)) if record.state == State::Completed => {
            return compare(&record, &check);
        }
        _ => {}
    }
    let deadline = Instant::now() + PATIENCE;
    loop {
        let ticket = match claim(store, &id, deadline).await? {
            Found::Check(record) => {
                let check = names.check().ok_or_else(|| refused(HASHED))?;
                return compare(&record, &check);
            }
            Found::Nothing(ticket) => ticket,
        };
        let Some(check) = names.check() else {
            // Somebody began to write one and never did.
            let _ = store.release(&ticket, RUN).await?;
            return Ok(());
        };
        if live(store.counts().await?) > 1 {
            // If this fails, the claim lapses.
            let _ = store.release(&ticket, RUN).await;
            return Err(refused(NOT_HASHED));
        }
        let check = [&[VERSION], &check[..]].concat();
        let done = Completion::retained(StatusCode::OK, check.into());
        let forever = Lifetimes::new(Duration::MAX);
        if store.complete(&ticket, done, forever).await? == Settled::Done {
            return Ok(());
        }
    }
}

/// Removes the check, once there is nothing it could be needed for.
pub(super) async fn forget<S: Inspect>(store: &S) -> Result<bool, StoreError> {
    let id = record_id();
    if store.get(&id).await?.is_none() {
        return Ok(false);
    }
    if live(store.counts().await?) > 1 {
        return Err(refused(LIVE));
    }
    store.forget(&id).await
}

/// The same counts without the record of the check.
pub(super) async fn without<S: Inspect>(
    store: &S,
    mut counts: Counts,
) -> Result<Counts, StoreError> {
    if store.get(&record_id()).await?.is_some() {
        // It was completed before the store was opened.
        counts.completed = counts.completed.saturating_sub(1);
    }
    Ok(counts)
}

enum Found {
    Nothing(Ticket),
    Check(Box<Record>),
}

/// Waits for whoever is writing the check, and takes over from who began and fell silent.
async fn claim<S: Inspect>(
    store: &S,
    id: &RecordId,
    deadline: Instant,
) -> Result<Found, StoreError> {
    let mut replaces = None;
    loop {
        let mut request =
            ClaimRequest::new(id.clone(), "hash-key", Fingerprint::from_bytes([0; 32]));
        request.lease = RUN;
        // The lease is renewed with all others of the instance; this is not.
        request.max_run = RUN;
        request.replaces = replaces;
        match store.claim(request).await? {
            Claim::Won(ticket) => return Ok(Found::Nothing(ticket)),
            Claim::Completed(record) => return Ok(Found::Check(record)),
            Claim::Abandoned(held) => replaces = Some(held.token),
            Claim::InFlight(_) => sleep(PAUSE).await,
        }
        if Instant::now() >= deadline {
            return Err(StoreError::new(StoreErrorKind::Unavailable, BUSY));
        }
    }
}

fn compare(record: &Record, check: &[u8; 32]) -> Result<(), StoreError> {
    match record.response.as_deref() {
        Some([VERSION, stored @ ..]) if stored == check => Ok(()),
        Some([VERSION, stored @ ..]) if stored.len() == check.len() => Err(refused(OTHER)),
        _ => Err(StoreError::new(StoreErrorKind::Corrupt, UNREADABLE)),
    }
}

fn live(counts: Counts) -> u64 {
    counts.running + counts.completed + counts.abandoned + counts.released
}

fn refused(why: &'static str) -> StoreError {
    StoreError::new(StoreErrorKind::Keys, why)
}

const HASHED: &str = "this store's scopes and keys are hashed: give SealingKeys the same hash_ids that it was \
    opened with first, or every retry would run again";

const OTHER: &str = "this store's scopes and keys are hashed with another key than that of hash_ids, and every \
    retry would run again: give SealingKeys the key it was opened with first; to change it, let all records \
    expire, stop every service on this store, and call SealedStore::forget_hash_key";

const NOT_HASHED: &str = "this store holds live records whose scopes and keys are not hashed, and their retries \
    would run again: set hash_ids on an empty store, or once these records have expired";

const LIVE: &str = "this store holds live records that are named with the hash key, and their retries would run \
    again: stop the services on this store, and forget the key once these records have expired";

const BUSY: &str = "another service has begun to open this store with hash_ids and has not finished: open it again";

const UNREADABLE: &str = "the record that tells which hash_ids key this store has cannot be read: restore it from a \
    backup, or let a newer version of this crate open the store";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_hashed_scope_is_that_of_the_check_and_no_header_carries_its_key() {
        let id = record_id();
        assert_ne!(id.scope.as_bytes().len(), 32);
        let header = http::HeaderValue::from_bytes(id.key.as_bytes());
        assert!(header.is_err());
    }
}

//! What cannot be seen from outside: that nothing is kept for records that are gone.

use std::time::Duration;

use super::*;
use crate::{Fingerprint, IdempotencyKey, Scope, testing::FakeClock};

fn request(key: usize) -> ClaimRequest {
    let key = IdempotencyKey::new(key.to_be_bytes());
    let id = RecordId::new(Scope::shared(), key);
    let mut request = ClaimRequest::new(id, "test-1", Fingerprint::from_bytes([7; 32]));
    request.abandoned_ttl = Some(Duration::from_secs(90 * 24 * 3600));
    request
}

async fn won(store: &MemoryStore, key: usize) -> Ticket {
    match store.claim(request(key)).await {
        Ok(Claim::Won(ticket)) => ticket,
        other => panic!("not won: {other:?}"),
    }
}

#[tokio::test]
async fn released_and_forgotten_keys_leave_no_notes_behind() {
    let store = MemoryStore::new();
    for key in 0..20_000 {
        let ticket = won(&store, key).await;
        let settled = match key % 2 {
            0 => store.release(&ticket, Duration::from_secs(60)).await,
            _ => {
                let done = Completion::tombstone(http::StatusCode::OK);
                let settled = store.complete(&ticket, done, Lifetimes::new(Duration::MAX));
                let settled = settled.await;
                assert!(matches!(store.forget(&ticket.id).await, Ok(true)));
                settled
            }
        };
        assert!(matches!(settled, Ok(Settled::Done)));
    }
    let data = store.data();
    assert_eq!((data.slots.len(), data.bytes), (0, 0));
    assert!(data.due.len() <= 1_100, "{} notes", data.due.len());
}

#[tokio::test]
async fn notes_made_anew_lose_no_record() {
    let clock = crate::testing::FakeClock::new();
    let store = MemoryStore::options().clock(clock.clone()).build();
    for key in 0..100 {
        let ticket = won(&store, key).await;
        let done = Completion::retained(http::StatusCode::OK, Bytes::from_static(b"kept"));
        let lifetimes = Lifetimes::new(Duration::from_secs(60));
        assert!(matches!(
            store.complete(&ticket, done, lifetimes).await,
            Ok(Settled::Done)
        ));
    }
    for key in 1_000..4_000 {
        let ticket = won(&store, key).await;
        assert!(store.release(&ticket, Duration::ZERO).await.is_ok());
    }
    clock.advance(Duration::from_secs(61));
    assert!(matches!(store.purge(1_000).await, Ok(100)));
    assert_eq!(store.data().slots.len(), 0);
}

/// Whatever happens to records, the number kept for each scope is what counting them would give.
#[tokio::test]
async fn the_number_kept_for_a_scope_is_that_of_its_records() {
    let clock = FakeClock::new();
    let store = MemoryStore::options().clock(clock.clone()).build();
    let mut tickets = Vec::new();
    for step in 0..20_000_usize {
        let chance: u32 = rand::random();
        let mut request = request(chance as usize % 64);
        let scope = [&b""[..], b"a", b"b", b"c"][chance as usize / 64 % 4];
        request.id.scope = Scope::new(scope);
        request.abandoned_ttl = (chance.is_multiple_of(3)).then_some(Duration::from_secs(9));
        let id = request.id.clone();
        match store.claim(request).await {
            Ok(Claim::Won(ticket)) => tickets.push(ticket),
            Ok(_) => {}
            Err(error) => panic!("{error:?}"),
        }
        let ticket = tickets.swap_remove(chance as usize / 256 % tickets.len());
        let ttl = Duration::from_secs(u64::from(chance % 7));
        let done = match chance / 1024 % 5 {
            0 => store.release(&ticket, ttl).await.is_ok(),
            1 => store.save(&ticket, "step", Bytes::new()).await.is_ok(),
            2 => store.forget(&id).await.is_ok(),
            _ => {
                let done = Completion::tombstone(http::StatusCode::OK);
                store
                    .complete(&ticket, done, Lifetimes::new(ttl))
                    .await
                    .is_ok()
            }
        };
        assert!(done);
        tickets.push(ticket);
        if step % 5 == 0 {
            clock.advance(Duration::from_secs(1));
        }
        if step % 16 == 0 {
            let scope = Scope::new(scope);
            let expected = {
                let (data, now) = store.open().unwrap();
                let live = data.live(now).filter(|record| record.id.scope == scope);
                live.count() as u64
            };
            assert_eq!(store.count_in(&scope, u64::MAX).await.unwrap(), expected);
        }
    }
    // Nothing is kept for scopes that have gone.
    clock.advance(Duration::from_secs(1_000_000));
    for ticket in &tickets {
        store.forget(&ticket.id).await.unwrap();
    }
    store.purge(usize::MAX).await.unwrap();
    let data = store.data();
    assert_eq!(
        (data.slots.len(), data.scopes.len(), data.scopes.records()),
        (0, 0, 0)
    );
}

/// However much has expired, nobody waits for all of it to be freed.
#[tokio::test]
async fn a_count_after_a_flood_frees_in_steps() {
    let clock = FakeClock::new();
    let store = MemoryStore::options().clock(clock.clone()).build();
    for key in 0..3 * PURGE_STEP {
        let ticket = won(&store, key).await;
        let done = Completion::tombstone(http::StatusCode::OK);
        let done = store.complete(&ticket, done, Lifetimes::new(Duration::from_secs(1)));
        assert!(matches!(done.await, Ok(Settled::Done)));
    }
    clock.advance(Duration::from_secs(2));
    let left = 2 * PURGE_STEP;
    assert!(matches!(store.try_count_in(&Scope::shared()), Ok(None)));
    assert_eq!(store.data().slots.len(), left);
    assert_eq!(store.count_in(&Scope::shared(), 10).await.unwrap(), 0);
    assert_eq!(store.data().slots.len(), 0);
}

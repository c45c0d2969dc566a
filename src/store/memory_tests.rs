//! What cannot be seen from outside: that nothing is kept for records that are gone.

use std::time::Duration;

use super::*;
use crate::{Fingerprint, IdempotencyKey, Scope};

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

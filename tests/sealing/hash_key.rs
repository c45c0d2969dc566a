//! A store has one hash key for as long as records live in it: with another, every retry would run again.

use std::time::Duration;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use tokio::task::JoinSet;
use tower_idempotency::{
    IdempotencyKey, MemoryStore, RecordId, Scope, SealedStore, SealingKeys, State,
    store::{
        Claim, ClaimRequest, Completion, Counts, Inspect, Lifetimes, Settled, Store, StoreError,
        StoreErrorKind,
    },
    testing::{Fault, Operation, Times},
};

use crate::{
    common::*,
    every_store,
    support::{TestStore, World, post, records, send},
};

/// What the record that tells one hash key from others is called. Stores out there have it.
fn check_id() -> RecordId {
    let key = IdempotencyKey::new(b"\0hash key");
    RecordId::new(Scope::new("tower-idempotency sealing"), key)
}

fn other_hashing() -> SealingKeys {
    keys().hash_ids(OTHER)
}

/// Claims the record of the check as an opener does that then falls silent.
async fn begin<S: Store>(store: &S) -> tower_idempotency::store::Ticket {
    let fingerprint = tower_idempotency::Fingerprint::from_bytes([0; 32]);
    let mut claim = ClaimRequest::new(check_id(), "hash-key", fingerprint);
    (claim.lease, claim.max_run) = (Duration::from_secs(10), Duration::from_secs(10));
    match store.claim(claim).await.unwrap() {
        Claim::Won(ticket) => ticket,
        other => panic!("not won: {other:?}"),
    }
}

/// Opens it up to where the check is claimed and not completed, and goes away.
async fn begins_and_goes_away(world: &World) -> TestStore {
    let store = world.open().await;
    store.fail(Operation::Complete, Fault::HangBefore, Times::Once);
    let opening = tokio::spawn(SealedStore::open(store.clone(), hashing()));
    store.called(Operation::Complete, 1).await;
    opening.abort();
    assert!(opening.await.unwrap_err().is_cancelled());
    store
}

every_store! {
    async fn the_same_hash_key_opens_it_again_and_no_other_does(world: World) {
        let store = open(&world, hashing()).await;
        let handler = secretive();
        let first = send(&handler.behind(layer(&store)), post("k-1", "A")).await;
        for wrong in [other_hashing(), keys()] {
            let error = refused(try_open(&world, wrong).await);
            assert!(error.to_string().contains("hash_ids"), "{error}");
        }
        // The key that seals is another matter.
        let rotated = SealingKeys::new("2027-06", OTHER).also_opens("2026-12", NEW).hash_ids(NAMES);
        let app = handler.behind(layer(&open(&world, rotated).await));
        send(&app, post("k-1", "A")).await.assert_replays(&first);
    }

    // Two servers on one empty store, each with a key of its own: the first has it.
    async fn so_it_is_on_an_empty_store(world: World) {
        open(&world, hashing()).await;
        refused(try_open(&world, other_hashing()).await);
        refused(try_open(&world, keys()).await);
        open(&world, hashing()).await;
    }

    async fn live_records_with_plain_names_are_not_forgotten(world: World) {
        let store = open(&world, keys()).await;
        let handler = secretive();
        let app = handler.behind(layer(&store).ttl(DAY));
        let first = send(&app, post("k-1", "A")).await;
        let error = refused(try_open(&world, hashing()).await);
        assert!(error.to_string().contains("not hashed"), "{error}");
        // Nothing of the attempt is left.
        send(&app, post("k-1", "A")).await.assert_replays(&first);
        assert_eq!(records(&world.open().await).await, 1);
        open(&world, keys()).await;

        world.clock.advance(DAY);
        open(&world, hashing()).await;
    }

    async fn the_hash_key_is_changed_when_no_record_lives(world: World) {
        let handler = secretive();
        let store = open(&world, hashing()).await;
        send(&handler.behind(layer(&store).ttl(DAY)), post("k-1", "A")).await;
        let bare = world.open().await;
        let error = SealedStore::forget_hash_key(&bare).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Keys, "{error}");
        refused(try_open(&world, other_hashing()).await);

        world.clock.advance(DAY);
        assert!(SealedStore::forget_hash_key(&bare).await.unwrap());
        assert!(!SealedStore::forget_hash_key(&bare).await.unwrap());
        open(&world, other_hashing()).await;
        refused(try_open(&world, hashing()).await);
        assert!(SealedStore::forget_hash_key(&bare).await.unwrap());
        open(&world, keys()).await;
        assert_eq!(records(&bare).await, 0);
    }

    async fn racing_openers_with_one_key_all_open_it(world: World) {
        let mut racing = JoinSet::new();
        for _ in 0..8 {
            let store = world.open().await;
            racing.spawn(SealedStore::open(store, hashing()));
        }
        for opened in racing.join_all().await {
            opened.unwrap();
        }
        assert_eq!(records(&world.open().await).await, 1);
    }

    async fn of_racing_openers_with_two_keys_those_with_one_of_them_open_it(world: World) {
        for round in 0..4 {
            let mut racing = JoinSet::new();
            for at in 0..8 {
                let store = world.open().await;
                racing.spawn(async move {
                    let keys = if at % 2 == 0 { hashing() } else { other_hashing() };
                    (at % 2, SealedStore::open(store, keys).await)
                });
            }
            let opened = racing.join_all().await;
            let (won, lost): (Vec<_>, Vec<_>) = opened.into_iter().partition(|(_, opened)| opened.is_ok());
            assert_eq!((won.len(), lost.len()), (4, 4), "round {round}");
            assert!(won.iter().all(|(key, _)| *key == won[0].0));
            for (_, opened) in lost {
                refused(opened);
            }
            assert!(SealedStore::forget_hash_key(&world.open().await).await.unwrap());
        }
    }

    async fn who_began_to_write_the_check_and_died_is_replaced(world: World) {
        let died = begins_and_goes_away(&world).await;
        let ticket = {
            let record = stored(&died, &check_id()).await;
            let mut ticket = ClaimRequest::new(check_id(), "test", record.fingerprint).ticket(1);
            ticket.token = record.token;
            ticket
        };
        world.clock.advance(Duration::from_secs(11));
        let store = open(&world, hashing()).await;
        refused(try_open(&world, other_hashing()).await);
        // Come back to life, it has no say.
        let late = Completion::retained(axum::http::StatusCode::OK, vec![1; 33].into());
        let settled = died.complete(&ticket, late, Lifetimes::new(DAY)).await.unwrap();
        assert_eq!(settled, Settled::Lost);
        assert_eq!(store.counts().await.unwrap(), Counts::default());
        open(&world, hashing()).await;
    }

    // A lease that goes on, because the process lives, does not keep others waiting for ever.
    async fn who_began_and_lives_on_is_replaced_as_well(world: World) {
        let alive = begins_and_goes_away(&world).await;
        let renewed = alive.renew(&[], DAY).await.unwrap();
        assert!(renewed.is_empty());
        world.clock.advance(Duration::from_secs(11));
        open(&world, hashing()).await;
    }

    async fn a_check_that_was_only_begun_does_not_keep_out_who_hashes_nothing(world: World) {
        begins_and_goes_away(&world).await;
        world.clock.advance(Duration::from_secs(11));
        open(&world, keys()).await;
        assert_eq!(records(&world.open().await).await, 0);
    }

    async fn who_is_writing_the_check_is_waited_for(world: World) {
        let writer = world.open().await;
        writer.fail(Operation::Complete, Fault::DelayBefore(Duration::from_millis(300)), Times::Once);
        let writing = tokio::spawn(SealedStore::open(writer.clone(), hashing()));
        writer.called(Operation::Complete, 1).await;
        // Found in flight at first.
        open(&world, hashing()).await;
        refused(try_open(&world, other_hashing()).await);
        writing.await.unwrap().unwrap();
    }

    async fn opening_tells_when_the_store_fails_and_can_be_tried_again(world: World) {
        for operation in [Operation::Get, Operation::Claim, Operation::Counts, Operation::Complete] {
            for fault in [Fault::Before, Fault::After] {
                let store = world.open().await;
                store.fail(operation, fault, Times::Once);
                let error = SealedStore::open(store.clone(), hashing()).await.unwrap_err();
                assert_eq!(error.kind(), StoreErrorKind::Unavailable);
                world.clock.advance(Duration::from_secs(11));
                SealedStore::open(store, hashing()).await.unwrap();
                assert!(SealedStore::forget_hash_key(&world.open().await).await.unwrap());
            }
        }
    }

    async fn the_record_of_the_check_is_out_of_sight_and_out_of_reach(world: World) {
        let store = open(&world, hashing()).await;
        assert_eq!(store.counts().await.unwrap(), Counts::default());
        assert_eq!(store.get(&check_id()).await.unwrap(), None);
        assert!(!store.forget(&check_id()).await.unwrap());
        assert_eq!(store.abandoned(None, 10).await.unwrap(), []);
        assert_eq!(store.count_in(&check_id().scope, 10).await.unwrap(), 0);
        world.clock.advance(DAY * 3650);
        assert_eq!(store.purge(10).await.unwrap(), 0);
        refused(try_open(&world, other_hashing()).await);

        // Where names are not hashed, nobody can put it there.
        assert!(SealedStore::forget_hash_key(&world.open().await).await.unwrap());
        let plain = open(&world, keys()).await;
        let fingerprint = tower_idempotency::Fingerprint::from_bytes([0; 32]);
        let claim = ClaimRequest::new(check_id(), "test", fingerprint);
        assert_eq!(plain.claim(claim).await.unwrap_err().kind(), StoreErrorKind::Invalid);
    }

    // Written otherwise, a new version would shut everybody out of what an older one has opened.
    async fn the_check_is_written_as_it_always_was(world: World) {
        let _store = open(&world, hashing()).await;
        let record = stored(&world.open().await, &check_id()).await;
        let mut hash = Hmac::<Sha256>::new_from_slice(&NAMES).unwrap();
        hash.update(&5_u64.to_be_bytes());
        hash.update(b"check");
        let expected = [&[1][..], &hash.finalize().into_bytes()].concat();
        assert_eq!(record.response.as_deref(), Some(&expected[..]));
    }

    async fn a_check_that_cannot_be_read_opens_nothing(world: World) {
        for damaged in [&b""[..], &[1; 32], &[2; 33], &[1; 34]] {
            let bare = world.open().await;
            open(&world, hashing()).await;
            let record = stored(&bare, &check_id()).await;
            assert_eq!((record.state, record.response.as_ref().unwrap().len()), (State::Completed, 33));
            plant(&bare, &record, bytes::Bytes::copy_from_slice(damaged)).await;
            let error: StoreError = try_open(&world, hashing()).await.unwrap_err();
            assert_eq!(error.kind(), StoreErrorKind::Corrupt, "{error}");
            assert!(bare.forget(&check_id()).await.unwrap());
        }
    }
}

#[tokio::test]
async fn a_page_of_abandoned_records_is_whole_whatever_is_hidden_in_it() {
    // Begun by somebody else, while this one is open already.
    let bare = MemoryStore::new();
    let store = SealedStore::open(bare.clone(), keys()).await.unwrap();
    let ticket = begin(&bare).await;
    assert_eq!(bare.abandon(&ticket).await.unwrap(), Settled::Done);
    let mut names = Vec::new();
    for key in ["k-1", "k-2", "k-3"] {
        let fingerprint = tower_idempotency::Fingerprint::from_bytes([0; 32]);
        let claim = ClaimRequest::new(id(key), "test", fingerprint);
        let Claim::Won(ticket) = store.claim(claim).await.unwrap() else {
            panic!("not won")
        };
        assert_eq!(store.abandon(&ticket).await.unwrap(), Settled::Done);
        names.push(id(key));
    }
    let page = store.abandoned(None, 2).await.unwrap();
    let listed: Vec<_> = page.iter().map(|record| record.id.clone()).collect();
    assert_eq!(listed, names[..2]);
    let rest = store.abandoned(Some(&page[1]), 2).await.unwrap();
    assert_eq!(rest.len(), 1);
    assert_eq!(rest[0].id, names[2]);
}

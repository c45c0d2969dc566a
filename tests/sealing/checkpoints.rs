//! Checkpoints are sealed as responses are.

use std::{error::Error, time::Duration};

use axum::response::IntoResponse;
use bytes::Bytes;
use tower_idempotency::{
    DecodeError, Fingerprint, Idempotency, Recovery, Retention, SealedStore, SealingKeys, State,
    Tx, TxError,
    store::{
        Checkpoint, Checkpoints, Claim, ClaimRequest, Inspect, MAX_CHECKPOINT_LEN, Settled, Store,
        StoreError, StoreErrorKind, Ticket,
    },
};

use crate::{
    common::*,
    every_store,
    ground::{self, Ground, transactional},
    handlers::{app, created},
    on_both,
    support::{
        TestStore, post,
        puppet::{Puppet, Run},
        send,
    },
};

/// Begins a run of this key under a layer on this store, whose handler the test plays.
async fn begin<S: Inspect + Checkpoints>(store: &S, key: &'static str) -> Run {
    let (router, mut puppet) = Puppet::new();
    let layer = layer(store).retention(Retention::successes_only());
    let app = router.route_layer(layer.recovery(Recovery::rerun()));
    tokio::spawn(async move { send(&app, post(key, "A")).await });
    puppet.next().await
}

/// Ends it so that its checkpoints are there for the next.
async fn fail<S: Inspect + Checkpoints>(run: Run, store: &S, key: &str) {
    run.answers(503, "down");
    for _ in 0..2_000 {
        let record = store.get(&id(key)).await.unwrap().unwrap();
        if record.state == State::Released {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("{key} is never released");
}

const STEP: &str = "st3p-s3cret";

pub async fn win<S: Store>(store: &S, key: &str) -> Ticket {
    let claim = ClaimRequest::new(id(key), "test", Fingerprint::from_bytes([5; 32]));
    match store.claim(claim).await.unwrap() {
        Claim::Won(ticket) => ticket,
        other => panic!("not won: {other:?}"),
    }
}

pub async fn save<S: Checkpoints>(store: &S, ticket: &Ticket, name: &str, value: Bytes) {
    let settled = store.save(ticket, name, value).await.unwrap();
    assert_eq!(settled, Settled::Done);
}

pub async fn load<S: Checkpoints>(store: &S, ticket: &Ticket) -> Vec<Checkpoint> {
    store.load(ticket).await.unwrap().unwrap()
}

pub fn because(error: &StoreError) -> &DecodeError {
    error.source().unwrap().downcast_ref().unwrap()
}

fn does_not_open() -> DecodeError {
    DecodeError::DoesNotOpen {
        key_id: "2026-12".into(),
    }
}

every_store! {
    async fn the_largest_value_still_fits_and_one_byte_more_does_not(world: World) {
        // The id of a key may be as long as it likes.
        for id in ["2026-12", &"k".repeat(64)] {
            let store = open(&world, SealingKeys::new(id, NEW)).await;
            let ticket = win(&store, id).await;
            let largest = Bytes::from(vec![7; MAX_CHECKPOINT_LEN]);
            save(&store, &ticket, "largest", largest.clone()).await;
            assert_eq!(load(&store, &ticket).await[0].value, largest);
            for value in [vec![7; MAX_CHECKPOINT_LEN + 1], vec![2; MAX_CHECKPOINT_LEN + 50]] {
                let refused = store.save(&ticket, "larger", value.into()).await;
                assert_eq!(refused.unwrap_err().kind(), StoreErrorKind::Invalid);
            }
            assert_eq!(load(&store, &ticket).await.len(), 1);
        }
    }

    // Nor can the value of a caller pass for a sealed one to get more room.
    async fn what_only_looks_sealed_has_no_more_room(world: World) {
        let store = open(&world, keys()).await;
        let ticket = win(&store, "k-1").await;
        let mut looks = b"\x02\x01k".to_vec();
        looks.resize(MAX_CHECKPOINT_LEN + 43, 7);
        let refused = store.save(&ticket, "larger", looks.into()).await;
        assert_eq!(refused.unwrap_err().kind(), StoreErrorKind::Invalid);
    }

    async fn a_value_opens_only_under_its_own_name_and_record(world: World) {
        let (bare, store) = (world.open().await, open(&world, keys()).await);
        let (one, two) = (win(&store, "k-1").await, win(&store, "k-2").await);
        save(&store, &one, "a", "value".into()).await;
        let sealed = load(&bare, &one).await.remove(0).value;
        assert!(!sealed.windows(5).any(|at| at == b"value"));

        save(&bare, &two, "a", sealed.clone()).await;
        let error = store.load(&two).await.unwrap_err();
        assert_eq!((error.kind(), because(&error)), (StoreErrorKind::Corrupt, &does_not_open()));
        save(&bare, &one, "b", sealed.clone()).await;
        assert_eq!(because(&store.load(&one).await.unwrap_err()), &does_not_open());
        // In its place it opens still.
        save(&bare, &two, "a", "x".into()).await;
        let three = win(&store, "k-3").await;
        save(&store, &three, "a", "value".into()).await;
        assert_eq!(&load(&store, &three).await[0].value[..], b"value");
    }

    async fn a_response_does_not_pass_for_a_checkpoint(world: World) {
        use tower_idempotency::store::{Completion, Inspect, Lifetimes};
        let (bare, store) = (world.open().await, open(&world, keys()).await);
        let ticket = win(&store, "k-1").await;
        let done = Completion::retained(axum::http::StatusCode::OK, "value".into());
        let settled = store.complete(&ticket, done, Lifetimes::new(DAY)).await.unwrap();
        assert_eq!(settled, Settled::Done);
        let sealed = stored(&bare, &id("k-1")).await.response.unwrap();
        assert!(bare.forget(&id("k-1")).await.unwrap());
        let again = win(&store, "k-1").await;
        save(&bare, &again, "a", sealed).await;
        assert_eq!(because(&store.load(&again).await.unwrap_err()), &does_not_open());
    }

    async fn a_missing_key_is_named_and_a_later_owner_continues_when_it_is_back(world: World) {
        let before = open(&world, SealingKeys::new("2026-06", OLD)).await;
        let ticket = win(&before, "k-1").await;
        save(&before, &ticket, "a", "value".into()).await;
        assert_eq!(before.abandon(&ticket).await.unwrap(), Settled::Done);

        let take_over = |store: Sealed, ticket: Ticket| async move {
            let mut claim = ClaimRequest::new(id("k-1"), "test", Fingerprint::from_bytes([5; 32]));
            claim.replaces = Some(ticket.token);
            let Claim::Won(ticket) = store.claim(claim).await.unwrap() else { panic!("not won") };
            ticket
        };
        let after = open(&world, keys()).await;
        let second = take_over(after.clone(), ticket).await;
        let error = after.load(&second).await.unwrap_err();
        let expected = DecodeError::NoSuchKey { key_id: "2026-06".into() };
        assert_eq!((error.kind(), because(&error)), (StoreErrorKind::Keys, &expected));
        let back = open(&world, keys().also_opens("2026-06", OLD)).await;
        assert_eq!(&load(&back, &second).await[0].value[..], b"value");
    }

    async fn under_hashed_names_they_are_kept_too(world: World) {
        let store = open(&world, hashing()).await;
        let ticket = win(&store, "k-1").await;
        save(&store, &ticket, "a", "value".into()).await;
        let elsewhere = open(&world, hashing()).await;
        assert_eq!(&load(&elsewhere, &ticket).await[0].value[..], b"value");
        let bare: TestStore = world.open().await;
        assert_eq!(bare.load(&ticket).await.unwrap(), None);
    }

    async fn what_a_handler_saves_is_sealed_and_read_by_its_next_run(world: World) {
        let store = open(&world, keys()).await;
        let run = begin(&store, "k-1").await;
        run.owner().checkpoint("step", STEP).await.unwrap();
        fail(run, &store, "k-1").await;
        if let Some(raw) = world.raw().await {
            assert!(!raw.windows(STEP.len()).any(|at| at == STEP.as_bytes()));
        }
        let run = begin(&open(&world, keys()).await, "k-1").await;
        assert_eq!(run.owner().checkpointed("step").await.unwrap(), Some(STEP.to_owned()));
        run.answers(201, "done");
    }

    async fn so_it_is_under_hashed_names(world: World) {
        let store = open(&world, hashing()).await;
        let run = begin(&store, "k-1").await;
        run.owner().checkpoint("step", STEP).await.unwrap();
        fail(run, &store, "k-1").await;
        let run = begin(&open(&world, hashing()).await, "k-1").await;
        assert_eq!(run.owner().checkpointed("step").await.unwrap(), Some(STEP.to_owned()));
        run.answers(201, "done");
    }

    // Sealing was turned off, or one process forgot to.
    async fn a_layer_without_the_keys_says_that_a_value_is_sealed(world: World) {
        let run = begin(&open(&world, keys()).await, "k-1").await;
        let bare = world.open().await;
        run.owner().checkpoint("step", STEP).await.unwrap();
        fail(run, &bare, "k-1").await;
        let run = begin(&bare, "k-1").await;
        for _ in 0..2 {
            let error = run.owner().checkpointed::<String>("step").await.unwrap_err();
            assert!(error.to_string().contains("SealedStore"), "{error}");
            assert_eq!(error.into_response().status(), 503);
        }
        fail(run, &bare, "k-1").await;
        // Nor does the other key, or none under that id, read it.
        let other = SealingKeys::new("2027-06", OTHER).also_opens_plain();
        let run = begin(&open(&world, other).await, "k-1").await;
        let error = run.owner().checkpointed::<String>("step").await.unwrap_err();
        assert_eq!(error.into_response().status(), 503);
    }

    async fn plain_values_of_handlers_are_read_while_that_is_wanted(world: World) {
        let bare = world.open().await;
        let run = begin(&bare, "k-1").await;
        run.owner().checkpoint("step", STEP).await.unwrap();
        fail(run, &bare, "k-1").await;
        let run = begin(&open(&world, keys()).await, "k-1").await;
        let error = run.owner().checkpointed::<String>("step").await.unwrap_err();
        assert_eq!(error.into_response().status(), 503);
        fail(run, &bare, "k-1").await;
        let lenient = open(&world, keys().also_opens_plain()).await;
        let run = begin(&lenient, "k-1").await;
        assert_eq!(run.owner().checkpointed("step").await.unwrap(), Some(STEP.to_owned()));
        // Saved again, it is sealed.
        run.owner().checkpoint("step", STEP).await.unwrap();
        fail(run, &bare, "k-1").await;
        let run = begin(&open(&world, keys()).await, "k-1").await;
        assert_eq!(run.owner().checkpointed("step").await.unwrap(), Some(STEP.to_owned()));
    }
}

on_both! {
    async fn what_is_saved_in_a_transaction_is_sealed_too<D: Db>() {
        for keys in [keys(), hashing()] {
            let ground = Ground::<D>::new().await;
            let store = SealedStore::open(ground.store.clone(), keys.clone()).await.unwrap();
            let saving = async |idempotency: Idempotency, mut tx: Tx<D>| {
                let mut connection = tx.connection().await.map_err(TxError::from)?;
                idempotency.checkpoint_in(&mut *connection, "step", STEP).await?;
                Ok::<_, axum::response::ErrorResponse>(created())
            };
            let app = app(transactional(&store), saving);
            assert_eq!(send(&app, post("k-1", "A")).await.status, 201);
            let record = store.get(&ground::id("k-1")).await.unwrap().unwrap();
            let mut ticket = ClaimRequest::new(record.id, "test", record.fingerprint).ticket(1);
            ticket.token = record.token;
            let saved = load(&store, &ticket).await;
            assert_eq!(&saved[0].value[..], format!("\x01\"{STEP}\"").as_bytes());
            let sealed = ground.value(
                "SELECT count(*) FROM idempotency_checkpoints WHERE length(value) > 60",
            );
            assert_eq!(sealed.await, 1);
        }
    }
}

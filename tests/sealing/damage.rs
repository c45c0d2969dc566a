//! Whatever was done to a sealed value in the database: it never panics, is never replayed, and never lets
//! the request run again.

use bytes::Bytes;
use proptest::prelude::*;
use tower_idempotency::{
    DecodeError, MemoryStore, RecordId, Recovery, RetainedResponse, SealedStore, SealingKeys,
    StoreFailure,
    store::{Claim, ClaimRequest, Completion, Inspect, Lifetimes, Settled, Store},
};

use crate::{
    common::*,
    every_store,
    support::{World, post, send},
};

/// Flips, cuts and additions all along the sealed value, and bytes that never were one.
fn damaged(sealed: &[u8]) -> Vec<Bytes> {
    let mut all: Vec<Vec<u8>> = Vec::new();
    for at in [
        0,
        1,
        2,
        8,
        9,
        20,
        32,
        33,
        sealed.len() - 17,
        sealed.len() - 1,
    ] {
        for bit in [0, 7] {
            let mut flipped = sealed.to_vec();
            flipped[at] ^= 1 << bit;
            all.push(flipped);
        }
    }
    for len in [0, 1, 2, 9, 33, 48, sealed.len() - 1] {
        all.push(sealed[..len].to_vec());
    }
    all.push([sealed, b"\0"].concat());
    all.push(vec![0xE1]);
    all.push([&[0xE3], sealed].concat());
    all.push(b"\x02\x00".to_vec());
    all.push(b"\x02\xFF".to_vec());
    all.into_iter().map(Bytes::from).collect()
}

async fn changed_is_refused(world: World, keys: SealingKeys, name: RecordId) {
    let bare = world.open().await;
    let store = SealedStore::open(bare.clone(), keys).await.unwrap();
    let handler = secretive();
    let eager = layer(&store).store_failure(StoreFailure::RunUnprotected);
    let app = handler.behind(eager.recovery(Recovery::rerun()));
    let first = send(&app, post("k-1", "A")).await;
    let record = stored(&bare, &name).await;
    let sealed = record.response.clone().unwrap();
    for changed in damaged(&sealed) {
        plant(&bare, &record, changed.clone()).await;
        let said = send(&app, post("k-1", "A")).await.said();
        assert_eq!(said, (503, UNAVAILABLE.to_owned()), "{changed:?}");
        let said = send(&app, post("k-1", "B")).await.said();
        assert_eq!(said, (409, REUSED.to_owned()), "{changed:?}");
    }
    plant(&bare, &record, sealed).await;
    send(&app, post("k-1", "A")).await.assert_replays(&first);
    assert_eq!(handler.effects(), 1);
}

/// The answer of one request in the place of another's.
async fn moved_does_not_open(world: World, keys: SealingKeys, names: [RecordId; 2]) {
    let bare = world.open().await;
    let store = SealedStore::open(bare.clone(), keys).await.unwrap();
    let handler = secretive();
    let app = handler.behind(layer(&store));
    for key in ["k-1", "k-2"] {
        send(&app, post(key, "A")).await;
    }
    let one = stored(&bare, &names[0]).await;
    let two = stored(&bare, &names[1]).await;
    plant(&bare, &one, two.response.unwrap()).await;
    let said = send(&app, post("k-1", "A")).await.said();
    assert_eq!(said, (503, UNAVAILABLE.to_owned()));
    assert_eq!(handler.effects(), 2);
    let key_id = "2026-12".into();
    assert_eq!(
        why(&store, &id("k-1")).await,
        DecodeError::DoesNotOpen { key_id }
    );
}

every_store! {
    async fn a_sealed_answer_that_was_changed_is_refused_and_nothing_runs(world: World) {
        changed_is_refused(world, keys(), id("k-1")).await;
    }

    async fn so_is_one_under_a_hashed_name(world: World) {
        changed_is_refused(world, hashing(), hashed("k-1")).await;
    }

    async fn a_sealed_answer_that_was_moved_to_another_record_does_not_open(world: World) {
        moved_does_not_open(world, keys(), [id("k-1"), id("k-2")]).await;
    }

    async fn nor_does_one_moved_between_hashed_names(world: World) {
        moved_does_not_open(world, hashing(), [hashed("k-1"), hashed("k-2")]).await;
    }
}

/// A sealed value and the stores to look at it through.
struct Bench {
    bare: MemoryStore,
    store: SealedStore<MemoryStore>,
    runtime: tokio::runtime::Runtime,
    sealed: Bytes,
}

impl Bench {
    fn new(keys: SealingKeys) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build();
        let runtime = runtime.unwrap();
        let bare = MemoryStore::new();
        let (store, sealed) = runtime.block_on(async {
            let store = SealedStore::open(bare.clone(), keys).await.unwrap();
            let app = secretive().behind(layer(&store));
            send(&app, post("k-1", "A")).await;
            let sealed = stored(&bare, &id("k-1")).await.response.unwrap();
            (store, sealed)
        });
        Self {
            bare,
            store,
            runtime,
            sealed,
        }
    }

    /// What is read when these bytes are stored.
    fn read(&self, response: Bytes) -> Result<RetainedResponse, DecodeError> {
        self.runtime.block_on(async {
            let record = stored(&self.bare, &id("k-1")).await;
            plant(&self.bare, &record, response).await;
            let record = stored(&self.store, &id("k-1")).await;
            RetainedResponse::decode(record.response.unwrap())
        })
    }
}

#[test]
fn no_bit_of_a_sealed_answer_can_be_flipped() {
    let bench = Bench::new(keys());
    assert!(bench.read(bench.sealed.clone()).is_ok());
    for bit in 0..bench.sealed.len() * 8 {
        let mut flipped = bench.sealed.to_vec();
        flipped[bit / 8] ^= 1 << (bit % 8);
        assert!(bench.read(flipped.into()).is_err(), "bit {bit}");
    }
    for len in 0..bench.sealed.len() {
        assert!(bench.read(bench.sealed.slice(..len)).is_err(), "{len}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..Default::default() })]

    #[test]
    fn whatever_is_stored_in_its_place_is_refused(
        bytes in prop::collection::vec(any::<u8>(), 0..120),
        begin in 0..5_u8,
        cut in any::<prop::sample::Index>(),
    ) {
        let bench = Bench::new(keys());
        let mut bytes = bytes;
        match begin {
            0 => {}
            1 => bytes.splice(..0, b"\x02\x072026-12".iter().copied()).for_each(drop),
            2 => bytes.splice(..0, b"\x02\x072026-06".iter().copied()).for_each(drop),
            3 => bytes.splice(..0, [1, 0, 200, 0, 0]).for_each(drop),
            _ => bytes.splice(..0, bench.sealed.slice(..cut.index(bench.sealed.len()))).for_each(drop),
        }
        prop_assert!(bench.read(bytes.into()).is_err());
    }
}

/// An answer of yesterday under the same name is one that was sealed for it; whoever can write to the
/// database can bring it back, as the chapter says.
#[test]
fn an_older_answer_of_the_same_record_opens() {
    let bench = Bench::new(keys());
    let older = bench.sealed.clone();
    bench.runtime.block_on(async {
        let record = stored(&bench.bare, &id("k-1")).await;
        assert!(bench.bare.forget(&record.id).await.unwrap());
        let claim = ClaimRequest::new(id("k-1"), "test", record.fingerprint);
        let Claim::Won(ticket) = bench.store.claim(claim).await.unwrap() else {
            panic!("not won")
        };
        let done = Completion::tombstone(record.status.unwrap());
        let settled = bench
            .store
            .complete(&ticket, done, Lifetimes::new(DAY))
            .await;
        assert_eq!(settled.unwrap(), Settled::Done);
    });
    assert!(bench.read(older).is_ok());
}

//! What a checkpoint looks like in a store tells what it is, whatever was done to it there.

use bytes::Bytes;
use proptest::prelude::*;
use tower_idempotency::{
    DecodeError, MemoryStore, SealedStore,
    store::{Checkpoints, StoreError, StoreErrorKind, Ticket},
};

use crate::{
    checkpoints::{because, load, save, win},
    common::keys,
};

/// A value that was saved through a sealed store, and what is read when other bytes stand in its place.
struct Bench {
    bare: MemoryStore,
    ticket: Ticket,
    sealed: Bytes,
    runtime: tokio::runtime::Runtime,
}

impl Bench {
    fn new(value: &[u8]) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = { runtime }.enable_time().build().unwrap();
        let bare = MemoryStore::new();
        let (ticket, sealed) = runtime.block_on(async {
            let store = SealedStore::open(bare.clone(), keys()).await.unwrap();
            let ticket = win(&store, "k-1").await;
            save(&store, &ticket, "step", Bytes::copy_from_slice(value)).await;
            let sealed = load(&bare, &ticket).await.remove(0).value;
            (ticket, sealed)
        });
        Self {
            bare,
            ticket,
            sealed,
            runtime,
        }
    }

    fn read(&self, stored: Bytes, plain_too: bool) -> Result<Bytes, StoreError> {
        self.runtime.block_on(async {
            save(&self.bare, &self.ticket, "step", stored).await;
            let keys = match plain_too {
                true => keys().also_opens_plain(),
                false => keys(),
            };
            let store = SealedStore::open(self.bare.clone(), keys).await.unwrap();
            let loaded = store.load(&self.ticket).await?;
            Ok(loaded.unwrap().remove(0).value)
        })
    }
}

#[test]
fn a_sealed_value_that_was_cut_or_changed_never_passes_for_a_plain_one() {
    let bench = Bench::new(b"\x01[1,2]");
    for plain_too in [false, true] {
        assert_eq!(
            bench.read(bench.sealed.clone(), plain_too).unwrap(),
            &b"\x01[1,2]"[..]
        );
        for bit in 0..bench.sealed.len() * 8 {
            let mut flipped = bench.sealed.to_vec();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(bench.read(flipped.into(), plain_too).is_err(), "bit {bit}");
        }
        for len in 0..bench.sealed.len() {
            assert!(
                bench.read(bench.sealed.slice(..len), plain_too).is_err(),
                "{len}"
            );
        }
        let longer = [&bench.sealed[..], b"\0"].concat();
        assert!(bench.read(longer.into(), plain_too).is_err());
    }
}

#[test]
fn only_what_says_that_it_is_plain_is() {
    let bench = Bench::new(b"");
    for foreign in [
        &b""[..],
        b"one",
        b"{}",
        b"\0{}",
        b"\x02",
        b"\x03{}",
        b"\xE1\x01",
    ] {
        let error = bench.read(Bytes::from_static(foreign), true).unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Corrupt, "{foreign:?}");
        // It is told from what the option is for.
        assert_ne!(because(&error), &DecodeError::NotSealed, "{foreign:?}");
    }
    let plain = Bytes::from_static(b"\x01{}");
    assert_eq!(bench.read(plain.clone(), true).unwrap(), plain);
    assert_eq!(
        because(&bench.read(plain, false).unwrap_err()),
        &DecodeError::NotSealed
    );
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..Default::default() })]

    // Whoever saves by the trait, and not as a handler does, has all bytes to choose from.
    #[test]
    fn any_bytes_come_back_as_they_were_saved(
        bytes in prop::collection::vec(any::<u8>(), 0..120),
        begin in 0..4_u8,
        plain_too in any::<bool>(),
    ) {
        let mut bytes = bytes;
        match begin {
            0 => {}
            1 => bytes.insert(0, 1),
            2 => bytes.insert(0, 2),
            _ => bytes.splice(..0, b"\x02\x072026-12".iter().copied()).for_each(drop),
        }
        let bench = Bench::new(&bytes);
        prop_assert_eq!(bench.read(bench.sealed.clone(), plain_too).unwrap(), bytes);
    }
}

//! A sealed store keeps the whole contract, whatever it wraps.

use std::{sync::Arc, time::Duration};

use tempfile::TempDir;
use tower_idempotency::{
    MemoryStore, PostgresStore, SealedStore, SealingKeys, SqliteStore, store_conformance,
    testing::{FakeClock, conformance::Harness},
};

use crate::{
    common::{hashing, keys},
    support::{clock::TestClock, database::Database},
};

fn keys_of(hashes: bool) -> SealingKeys {
    if hashes { hashing() } else { keys() }
}

struct Memory<const HASHES: bool> {
    clock: FakeClock,
    store: MemoryStore,
}

impl<const HASHES: bool> Harness for Memory<HASHES> {
    type Store = SealedStore<MemoryStore>;

    async fn new() -> Self {
        let clock = FakeClock::new();
        let store = MemoryStore::options().clock(clock.clone()).build();
        let harness = Self { clock, store };
        // The very first opener has a lease already, and the suite begins with none.
        harness.open().await;
        harness
    }

    async fn open(&self) -> Self::Store {
        let store = self.store.instance();
        SealedStore::open(store, keys_of(HASHES)).await.unwrap()
    }

    async fn advance(&self, by: Duration) {
        self.clock.advance(by);
    }

    async fn small(&self) -> Option<Self::Store> {
        let options = MemoryStore::options().clock(self.clock.clone());
        let store = options.max_records(40).build();
        let store = SealedStore::open(store, keys_of(HASHES)).await;
        Some(store.unwrap())
    }
}

struct Sqlite<const HASHES: bool> {
    folder: TempDir,
    clock: FakeClock,
}

impl<const HASHES: bool> Harness for Sqlite<HASHES> {
    type Store = SealedStore<SqliteStore>;

    async fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let clock = FakeClock::new();
        let harness = Self { folder, clock };
        harness.open().await;
        harness
    }

    async fn open(&self) -> Self::Store {
        let options = SqliteStore::options(self.folder.path().join("idempotency.db"));
        let store = options.clock(self.clock.clone()).open().await.unwrap();
        SealedStore::open(store, keys_of(HASHES)).await.unwrap()
    }

    async fn advance(&self, by: Duration) {
        self.clock.advance(by);
    }

    async fn small(&self) -> Option<Self::Store> {
        let options = SqliteStore::options(self.folder.path().join("small.db"));
        let options = options.clock(self.clock.clone()).max_records(40);
        let store = SealedStore::open(options.open().await.unwrap(), keys_of(HASHES)).await;
        Some(store.unwrap())
    }
}

struct Postgres<const HASHES: bool> {
    database: Arc<Database>,
    clock: TestClock,
}

impl<const HASHES: bool> Harness for Postgres<HASHES> {
    type Store = SealedStore<PostgresStore>;

    async fn new() -> Self {
        let database = Arc::new(Database::new());
        let clock = TestClock::of(database.clone());
        let harness = Self { database, clock };
        harness.open().await;
        harness
    }

    async fn open(&self) -> Self::Store {
        let options = PostgresStore::options().migrate();
        let store = options.open(self.database.pool()).await.unwrap();
        SealedStore::open(store, keys_of(HASHES)).await.unwrap()
    }

    async fn advance(&self, by: Duration) {
        self.clock.advance(by);
    }
}

mod memory {
    use super::*;
    store_conformance!(Memory<false>);
}

mod memory_hashed {
    use super::*;
    store_conformance!(Memory<true>);
}

mod sqlite {
    use super::*;
    store_conformance!(Sqlite<false>);
}

mod sqlite_hashed {
    use super::*;
    store_conformance!(Sqlite<true>);
}

mod postgres {
    use super::*;
    store_conformance!(Postgres<false>);
}

mod postgres_hashed {
    use super::*;
    store_conformance!(Postgres<true>);
}

//! Every store keeps the whole contract, and a store that breaks a number fails that number.

use std::time::Duration;

use tower_idempotency::{
    AnyStore, MemoryStore, store_conformance,
    testing::{FakeClock, conformance::Harness},
};

mod broken;
mod support;

/// One set of records in memory, on a clock that stands still.
struct Memory {
    clock: FakeClock,
    store: MemoryStore,
}

impl Memory {
    fn small_store(&self) -> MemoryStore {
        let options = MemoryStore::options().clock(self.clock.clone());
        options.max_records(40).build()
    }
}

impl Harness for Memory {
    type Store = MemoryStore;

    async fn new() -> Self {
        let clock = FakeClock::new();
        let store = MemoryStore::options().clock(clock.clone()).build();
        Self { clock, store }
    }

    async fn open(&self) -> MemoryStore {
        self.store.instance()
    }

    async fn advance(&self, by: Duration) {
        self.clock.advance(by);
    }

    async fn small(&self) -> Option<MemoryStore> {
        Some(self.small_store())
    }
}

mod memory {
    use super::*;

    store_conformance!(Memory);
}

/// The limit on bytes keeps contract 23 as the limit on records does.
mod memory_limited_in_bytes {
    use tower_idempotency::testing::conformance;

    use super::*;

    struct Bytes(Memory);

    impl Harness for Bytes {
        type Store = MemoryStore;

        async fn new() -> Self {
            Self(Memory::new().await)
        }

        async fn open(&self) -> MemoryStore {
            self.0.open().await
        }

        async fn advance(&self, by: Duration) {
            self.0.advance(by).await;
        }

        async fn small(&self) -> Option<MemoryStore> {
            let options = MemoryStore::options().clock(self.0.clock.clone());
            Some(options.max_bytes(16 * 1024).build())
        }
    }

    #[tokio::test]
    async fn c23_a_full_store_refuses_new_claims_only() {
        conformance::c23_a_full_store_refuses_new_claims_only::<Bytes>().await;
    }
}

/// The memory store again, on the real clock: the suite keeps its own promise not to need a fake.
mod memory_on_the_real_clock {
    use super::*;

    struct Real(MemoryStore);

    impl Harness for Real {
        type Store = MemoryStore;

        const TICK: Duration = Duration::from_millis(200);
        const REAL_CLOCK: bool = true;

        async fn new() -> Self {
            Self(MemoryStore::new())
        }

        async fn open(&self) -> MemoryStore {
            self.0.instance()
        }

        async fn advance(&self, by: Duration) {
            tokio::time::sleep(by).await;
        }
    }

    store_conformance!(Real);
}

mod any_store {
    use super::*;

    struct Any(Memory);

    impl Harness for Any {
        type Store = AnyStore;

        async fn new() -> Self {
            Self(Memory::new().await)
        }

        async fn open(&self) -> AnyStore {
            AnyStore::new(self.0.open().await)
        }

        async fn advance(&self, by: Duration) {
            self.0.advance(by).await;
        }

        async fn small(&self) -> Option<AnyStore> {
            Some(AnyStore::new(self.0.small_store()))
        }
    }

    store_conformance!(Any);
}

#[cfg(feature = "sqlite")]
mod sqlite {
    use tempfile::TempDir;
    use tower_idempotency::SqliteStore;

    use super::*;

    /// One database file, on a clock that stands still.
    struct Sqlite {
        folder: TempDir,
        clock: FakeClock,
    }

    impl Harness for Sqlite {
        type Store = SqliteStore;

        async fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            let clock = FakeClock::new();
            Self { folder, clock }
        }

        async fn open(&self) -> SqliteStore {
            let options = SqliteStore::options(self.folder.path().join("idempotency.db"));
            options.clock(self.clock.clone()).open().await.unwrap()
        }

        async fn advance(&self, by: Duration) {
            self.clock.advance(by);
        }

        async fn small(&self) -> Option<SqliteStore> {
            let options = SqliteStore::options(self.folder.path().join("small.db"));
            let options = options.clock(self.clock.clone()).max_records(40);
            Some(options.open().await.unwrap())
        }
    }

    store_conformance!(Sqlite);
}

#[cfg(feature = "postgres")]
mod postgres {
    use std::sync::Arc;

    use tower_idempotency::PostgresStore;

    use super::{
        support::{clock::TestClock, database::Database},
        *,
    };

    /// One schema, on a clock that stands still.
    struct Postgres {
        database: Arc<Database>,
        clock: TestClock,
    }

    impl Harness for Postgres {
        type Store = PostgresStore;

        async fn new() -> Self {
            let database = Arc::new(Database::new());
            let clock = TestClock::of(database.clone());
            Self { database, clock }
        }

        async fn open(&self) -> PostgresStore {
            let options = PostgresStore::options().migrate();
            options.open(self.database.pool()).await.unwrap()
        }

        async fn advance(&self, by: Duration) {
            self.clock.advance(by);
        }
    }

    store_conformance!(Postgres);
}

/// The Postgres store again, on the server's own clock.
#[cfg(feature = "postgres")]
mod postgres_on_the_real_clock {
    use tower_idempotency::PostgresStore;

    use super::{support::database::Database, *};

    struct Real(Database);

    impl Harness for Real {
        type Store = PostgresStore;

        const TICK: Duration = Duration::from_millis(200);
        const REAL_CLOCK: bool = true;

        async fn new() -> Self {
            Self(Database::in_real_time())
        }

        async fn open(&self) -> PostgresStore {
            let options = PostgresStore::options().migrate();
            options.open(self.0.pool()).await.unwrap()
        }

        async fn advance(&self, by: Duration) {
            tokio::time::sleep(by).await;
        }
    }

    store_conformance!(Real);
}

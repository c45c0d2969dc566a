//! The contract, number by number.

use super::*;
use crate::{
    store_conformance,
    testing::{FakeClock, conformance::Harness},
};

struct File {
    _directory: TempDir,
    path: PathBuf,
    clock: FakeClock,
}

impl Harness for File {
    type Store = SqliteStore;

    async fn new() -> Self {
        let (_directory, path) = place();
        let clock = FakeClock::new();
        Self {
            _directory,
            path,
            clock,
        }
    }

    async fn open(&self) -> SqliteStore {
        let options = SqliteStore::options(&self.path).clock(self.clock.clone());
        options.open().await.unwrap()
    }

    async fn advance(&self, by: Duration) {
        self.clock.advance(by);
    }

    async fn small(&self) -> Option<SqliteStore> {
        let options = SqliteStore::options(self.path.with_file_name("small.db"));
        let options = options.clock(self.clock.clone()).max_records(5);
        Some(options.open().await.unwrap())
    }
}

store_conformance!(File);

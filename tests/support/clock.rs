//! The clock a world is judged by.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use tower_idempotency::{Timestamp, store::Clock, testing::FakeClock};

use super::database::Database;

/// A clock that moves only when told to, wherever the store it judges keeps its time. Clones are
/// one clock.
#[derive(Debug, Clone, Default)]
pub struct TestClock {
    time: FakeClock,
    server: Option<Server>,
}

/// The same time once more, where the statements of a Postgres store read it.
#[derive(Debug, Clone)]
struct Server {
    database: Arc<Database>,
    /// Held while the time changes, so that two threads leave both clocks at the same time.
    moving: Arc<Mutex<()>>,
}

impl TestClock {
    /// For stores that are given a clock.
    pub fn new() -> Self {
        Self::default()
    }

    /// For stores that read the clock of a server. The database's shows the same time from here on.
    pub fn of(database: Arc<Database>) -> Self {
        let moving = Arc::default();
        let clock = Self {
            time: FakeClock::new(),
            server: Some(Server { database, moving }),
        };
        clock.advance(Duration::ZERO);
        clock
    }

    /// Moves it forward. On return every statement begun from here on sees the new time.
    pub fn advance(&self, by: Duration) {
        self.change(|time| time.advance(by));
    }

    /// Sets it, backwards too.
    pub fn set(&self, now: Timestamp) {
        self.change(|time| time.set(now));
    }

    fn change(&self, change: impl FnOnce(&FakeClock)) {
        let Some(server) = &self.server else {
            return change(&self.time);
        };
        let _one_at_a_time = server.moving.lock().unwrap();
        change(&self.time);
        server.database.set_time(self.time.now());
    }
}

impl Clock for TestClock {
    fn now(&self) -> Timestamp {
        self.time.now()
    }
}

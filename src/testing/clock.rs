//! A clock that stands still.

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use crate::{Timestamp, store::Clock};

/// 2026-01-01 00:00:00 UTC: far enough from zero that going back stays possible.
const START: i64 = 1_767_225_600_000_000;

/// A clock that moves only when told to. Clones are one clock.
///
/// ```
/// use std::time::Duration;
/// use tower_idempotency::{MemoryStore, testing::FakeClock};
///
/// let clock = FakeClock::new();
/// let store = MemoryStore::options().clock(clock.clone()).build();
/// clock.advance(Duration::from_secs(24 * 3600)); // a day has passed for `store`
/// ```
#[derive(Debug, Clone)]
pub struct FakeClock(Arc<AtomicI64>);

impl FakeClock {
    /// Stands at 2026-01-01 00:00:00 UTC.
    pub fn new() -> Self {
        Self(Arc::new(AtomicI64::new(START)))
    }

    /// Moves it forward; it stops at the end of time instead of overflowing.
    pub fn advance(&self, by: Duration) {
        // A loop and not an addition, so that two threads that advance at once both count.
        let _ = self
            .0
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |now| {
                Some(Timestamp::from_micros(now).after(by).as_micros())
            });
    }

    /// Sets it, backwards too.
    pub fn set(&self, now: Timestamp) {
        self.0.store(now.as_micros(), Ordering::Release);
    }
}

impl Default for FakeClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for FakeClock {
    fn now(&self) -> Timestamp {
        Timestamp::from_micros(self.0.load(Ordering::Acquire))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clones_are_one_clock_and_it_moves_only_when_told() {
        let clock = FakeClock::new();
        let other = clock.clone();
        let before = other.now();
        assert_eq!(other.now(), before);
        clock.advance(Duration::from_millis(250));
        assert_eq!(other.now(), before.after(Duration::from_millis(250)));
        other.set(Timestamp::from_micros(5));
        assert_eq!(clock.now(), Timestamp::from_micros(5));
    }

    #[test]
    fn it_stops_at_the_end_of_time() {
        let clock = FakeClock::new();
        clock.advance(Duration::MAX);
        clock.advance(Duration::MAX);
        assert_eq!(clock.now(), Timestamp::from_micros(i64::MAX));
    }
}

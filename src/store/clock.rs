//! The clock a store judges by.

use std::{
    fmt,
    time::{SystemTime, UNIX_EPOCH},
};

use tokio::time::Instant;

use crate::record::Timestamp;

/// Tells a store the time. Stores that live in a database server use the server's clock instead.
pub trait Clock: fmt::Debug + Send + Sync + 'static {
    /// The time now.
    fn now(&self) -> Timestamp;
}

/// The wall clock, read once and carried on by the monotonic one, so that a correction of the
/// machine's time neither ends leases nor prolongs them.
///
/// For one process only: two processes would drift apart when the wall clock is corrected. In a
/// tokio runtime with paused time it follows the paused time.
#[derive(Debug, Clone, Copy)]
pub struct SystemClock {
    wall: Timestamp,
    monotonic: Instant,
}

impl SystemClock {
    /// Starts at the wall clock's time.
    pub fn new() -> Self {
        Self {
            wall: wall_now(),
            monotonic: Instant::now(),
        }
    }
}

impl Default for SystemClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Timestamp {
        self.wall.after(self.monotonic.elapsed())
    }
}

/// The machine's wall clock, which all processes on it share.
#[cfg(feature = "sqlite")]
#[derive(Debug, Clone, Copy)]
pub(crate) struct WallClock;

#[cfg(feature = "sqlite")]
impl Clock for WallClock {
    fn now(&self) -> Timestamp {
        wall_now()
    }
}

fn wall_now() -> Timestamp {
    // A machine set before 1970 gets 1970: every comparison still holds.
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    Timestamp::from_micros(0).after(since)
}

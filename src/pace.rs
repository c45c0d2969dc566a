//! How fast the background work of a process goes.

use std::time::Duration;

#[cfg(feature = "metrics")]
use tokio::time::Instant;

use crate::{bounded::FOREVER, options::Options};

/// What the layers that share the background work want of it: each is done as often as the most impatient
/// of them wants it done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pace {
    pub(crate) shortest_lease: Duration,
    pub(crate) longest_lease: Duration,
    pub(crate) purge: Duration,
    /// `Duration::MAX`: never.
    #[cfg(feature = "metrics")]
    pub(crate) count: Duration,
}

impl Default for Pace {
    /// Of no layer.
    fn default() -> Self {
        Self {
            shortest_lease: Duration::MAX,
            longest_lease: Duration::ZERO,
            purge: Duration::MAX,
            #[cfg(feature = "metrics")]
            count: Duration::MAX,
        }
    }
}

impl Pace {
    pub(crate) fn keep_up_with(&mut self, options: &Options) {
        let lease = options.lease.min(FOREVER);
        self.shortest_lease = self.shortest_lease.min(lease);
        self.longest_lease = self.longest_lease.max(lease);
        self.purge = self.purge.min(options.purge_interval());
        #[cfg(feature = "metrics")]
        {
            self.count = self.count.min(options.count_records_every);
        }
    }
}

/// When the claims of this process were known to be renewed. A runtime whose threads are blocked shows nothing
/// meanwhile, so what is shown afterwards is the gap.
#[cfg(feature = "metrics")]
#[derive(Default)]
pub(crate) struct Beats {
    last: Option<Instant>,
    /// The longest gaps of this spell and of the one before, and when this one began. By the clock and not by
    /// the looks: several look.
    gaps: [Duration; 2],
    since: Option<Instant>,
}

#[cfg(feature = "metrics")]
impl Beats {
    pub(crate) fn beaten(&mut self, at: Instant) {
        if let Some(last) = self.last.replace(at) {
            self.gaps[0] = self.gaps[0].max(at.saturating_duration_since(last));
        }
    }

    /// The longest gap of late, or the time since the last beat if that is longer. A gap is shown for at least
    /// a `spell` after its end, so that who looks now and then sees it.
    pub(crate) fn age(&mut self, now: Instant, spell: Duration) -> Duration {
        let Some(last) = self.last else {
            return Duration::ZERO;
        };
        let since = *self.since.get_or_insert(now);
        let age = now.saturating_duration_since(last);
        let shown = age.max(self.gaps[0]).max(self.gaps[1]);
        if now.saturating_duration_since(since) >= spell {
            self.gaps = [Duration::ZERO, self.gaps[0]];
            self.since = Some(now);
        }
        shown
    }
}

//! How long to wait between two attempts.

use std::time::Duration;

/// What is added to a wait the server asked for, at most: those who were told the same must not come back
/// together.
const SPREAD: Duration = Duration::from_millis(250);

/// Full jitter: anything from nothing to a bound that doubles with every failure.
#[derive(Debug, Clone, Copy)]
pub(super) struct BackOff {
    pub(super) base: Duration,
    pub(super) cap: Duration,
}

impl BackOff {
    /// The wait after this attempt, the first of which is 1.
    pub(super) fn after(self, attempt: u32) -> Duration {
        up_to(self.bound(attempt))
    }

    fn bound(self, attempt: u32) -> Duration {
        let doubled = 2_u32.saturating_pow(attempt.saturating_sub(1));
        self.base.saturating_mul(doubled).min(self.cap)
    }
}

/// The wait the server asked for, and a little more.
pub(super) fn hinted(hint: Duration) -> Duration {
    hint.saturating_add(up_to(SPREAD))
}

/// Uniform. A wait is never longer than its bound, which rounding could make it.
fn up_to(bound: Duration) -> Duration {
    bound.mul_f64(rand::random::<f64>()).min(bound)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_double_up_to_the_cap() {
        let back_off = BackOff {
            base: Duration::from_millis(500),
            cap: Duration::from_secs(8),
        };
        let bounds = [1, 2, 3, 4, 5, 6, 40, u32::MAX].map(|attempt| back_off.bound(attempt));
        let expected = [500, 1000, 2000, 4000, 8000, 8000, 8000, 8000].map(Duration::from_millis);
        assert_eq!(bounds, expected);
    }

    #[test]
    fn the_longest_of_times_does_not_overflow() {
        let back_off = BackOff {
            base: Duration::MAX,
            cap: Duration::MAX,
        };
        assert!(back_off.after(7) <= Duration::MAX);
        assert_eq!(hinted(Duration::MAX), Duration::MAX);
    }
}

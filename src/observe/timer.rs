//! How long things take, where metrics are collected.

#[cfg(feature = "metrics")]
use std::time::Instant;

/// What is measured.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Timed {
    /// From sending a claim to the store's answer, or to giving it up.
    Claim,
    /// From an outcome to its record, or to giving it up for now.
    Complete,
    /// From calling the inner service to the head of its answer.
    Handler,
}

/// Begun before what is measured.
pub(crate) struct Timer {
    #[cfg(feature = "metrics")]
    begun: Instant,
}

impl Timer {
    pub(crate) fn start() -> Self {
        Self {
            #[cfg(feature = "metrics")]
            begun: Instant::now(),
        }
    }

    /// For what may end in the middle.
    pub(crate) fn until_dropped(timed: Timed) -> impl Drop {
        Dropped {
            timed,
            timer: Some(Self::start()),
        }
    }

    pub(crate) fn stop(self, timed: Timed) {
        #[cfg(feature = "metrics")]
        super::metrics::took(timed, self.begun.elapsed());
        #[cfg(not(feature = "metrics"))]
        let _ = timed;
    }
}

/// Stops its timer when it is dropped.
struct Dropped {
    timed: Timed,
    timer: Option<Timer>,
}

impl Drop for Dropped {
    fn drop(&mut self) {
        if let Some(timer) = self.timer.take() {
            timer.stop(self.timed);
        }
    }
}

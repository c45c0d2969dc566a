//! What came of asking about a run that was cut off.

use super::{Observed, TARGET};

/// It was found out what a run did that was cut off, or it was not.
pub(crate) fn resolved(by: By, concluded: Concluded, attempt: u32, observed: &Observed) {
    let (by, verdict) = (by.as_str(), concluded.as_str());
    #[cfg(feature = "metrics")]
    super::metrics::resolved(verdict, by);
    macro_rules! tell {
        ($level:ident, $what:literal) => {
            tracing::$level!(
                target: TARGET,
                by,
                verdict,
                attempt,
                request_id = observed.request_id(),
                $what
            )
        };
    }
    match concluded {
        Concluded::Answered | Concluded::DidNotHappen => tell!(info, "idempotent run resolved"),
        // Somebody else is at it, or was.
        Concluded::Lost => tell!(debug, "idempotent run not resolved"),
        _ => tell!(warn, "idempotent run not resolved"),
    }
}

/// Who wants to know what a run did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum By {
    Request,
    Sweep,
    Operator,
}

impl By {
    fn as_str(self) -> &'static str {
        match self {
            Self::Request => "request",
            Self::Sweep => "sweep",
            Self::Operator => "operator",
        }
    }
}

/// What came of asking.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Concluded {
    Answered,
    DidNotHappen,
    /// The resolver does not know yet.
    Left,
    TimedOut,
    Panicked,
    /// The body of its answer broke off, or it answered that it could not do its work.
    Broken,
    /// The layer was drained meanwhile.
    Aborted,
    /// Somebody else has the record.
    Lost,
    /// The store failed before it was known, or before it was recorded.
    Failed,
}

impl Concluded {
    fn as_str(self) -> &'static str {
        match self {
            Self::Answered => "answered",
            Self::DidNotHappen => "did_not_happen",
            Self::Left => "left",
            Self::TimedOut => "timed_out",
            Self::Panicked => "panicked",
            Self::Broken => "broken",
            Self::Aborted => "aborted",
            Self::Lost => "lost",
            Self::Failed => "failed",
        }
    }
}

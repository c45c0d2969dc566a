//! What came of asking about a run that was cut off.

use super::TARGET;

/// It was found out what a run did that was cut off, or it was not.
pub(crate) fn resolved(by: By, concluded: Concluded, attempt: u32) {
    let (by, verdict) = (by.as_str(), concluded.as_str());
    #[cfg(feature = "metrics")]
    super::metrics::resolved(verdict, by);
    match concluded {
        Concluded::Answered | Concluded::DidNotHappen => {
            tracing::info!(target: TARGET, by, verdict, attempt, "idempotent run resolved");
        }
        // Somebody else is at it, or was.
        Concluded::Lost => {
            tracing::debug!(target: TARGET, by, verdict, attempt, "idempotent run not resolved")
        }
        _ => tracing::warn!(target: TARGET, by, verdict, attempt, "idempotent run not resolved"),
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

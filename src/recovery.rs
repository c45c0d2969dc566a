//! What to do about a run that was cut off.

/// What a retry gets that meets an abandoned claim: its process died or fell silent, its handler
/// panicked, its service failed, or it lasted longer than `max_run`. Nobody knows what the run did.
///
/// A claim that was made by a [`transactional`](crate::transactions) layer is another matter: what its run
/// did was not committed, so it is always run again, whatever is chosen here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Recovery {
    /// Refuse with 409 `idempotency_outcome_unknown`, until somebody settles the record. The
    /// default: a second charge is worse than a question.
    #[default]
    Refuse,
    /// Run the handler again, as long as fewer than `max_attempts` runs were begun; then refuse.
    ///
    /// For handlers whose effect may safely happen twice. A request that kills its process every
    /// time must not do so forever, hence the limit.
    Rerun {
        /// How many runs there may be, the first one included; at least 1.
        max_attempts: u32,
    },
}

impl Recovery {
    /// Rerun with at most three runs.
    pub const fn rerun() -> Self {
        Self::Rerun { max_attempts: 3 }
    }

    /// Whether a run may follow the given abandoned attempt.
    pub(crate) fn allows_after(self, attempt: u32) -> bool {
        match self {
            Self::Refuse => false,
            Self::Rerun { max_attempts } => attempt < max_attempts,
        }
    }
}

/// What a request gets whose first attempt is still running.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum InFlight {
    /// Refuse at once with 409 `idempotency_in_flight` and `Retry-After: 1`. The default.
    #[default]
    Refuse,
    /// Wait this long at most for the first attempt to end, then refuse.
    ///
    /// A waiter holds no connection to the store and no place of the inner service. When the first
    /// attempt was released, a waiter runs in its stead.
    Wait(std::time::Duration),
}

/// What a keyed request gets when the store cannot be asked before the run, or is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum StoreFailure {
    /// Refuse with 503 `idempotency_store_unavailable` and `Retry-After: 1`. The default.
    #[default]
    Refuse,
    /// Run the handler without any protection: no claim, no record, and a retry runs again. Such
    /// responses carry `Idempotency-Status: unprotected`. Handlers must take
    /// `Option<`[`Idempotency`](crate::Idempotency)`>`, which is `None` then.
    RunUnprotected,
}

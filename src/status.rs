//! What the layer did with a request: response extension, event field and metric label in one.

use std::fmt;

use http::{HeaderName, Response};

/// The default name of the header that marks a replay.
pub(crate) const REPLAY_HEADER: HeaderName = HeaderName::from_static("idempotent-replay");

/// The name Stripe has for it.
pub(crate) const REPLAYED_HEADER: HeaderName = HeaderName::from_static("idempotent-replayed");

/// Tells the client what the layer did.
pub(crate) const STATUS_HEADER: HeaderName = HeaderName::from_static("idempotency-status");

/// What the layer did with a request. Found in the extensions of every response it answered, or
/// let a handler answer under a claim; absent where no key applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum IdempotencyStatus {
    /// The handler ran, for the first time under this key or after the key was freed.
    Executed,
    /// The retained answer was sent again.
    Replayed,
    /// Refused: the first request is still running.
    InFlight,
    /// Refused: the key was used for another request.
    Reused,
    /// Refused: a key is required.
    Missing,
    /// Refused: key, scope or body cannot be worked with.
    Invalid,
    /// Refused: done, but the answer was not kept.
    NotRetained,
    /// Refused: an earlier run was cut off and nobody knows what it did.
    OutcomeUnknown,
    /// The handler ran again, after a run that was abandoned, or released with checkpoints.
    TookOver,
    /// Refused: the store could not be asked, or is full. Also where the handler ran: its transaction was given
    /// up by the database, stopped at `max_hold`, or nobody knows yet whether it was committed. The refusal's
    /// code, `idempotency_transaction_failed`, tells that apart.
    StoreUnavailable,
    /// Refused: too many runs at once, or shutting down.
    Overloaded,
    /// Refused: the tenant has too many records.
    LimitReached,
    /// The handler ran without protection, because the store could not be asked.
    Unprotected,
}

impl IdempotencyStatus {
    /// The name used in events and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Executed => "executed",
            Self::Replayed => "replayed",
            Self::InFlight => "in_flight",
            Self::Reused => "reused",
            Self::Missing => "missing",
            Self::Invalid => "invalid",
            Self::NotRetained => "not_retained",
            Self::OutcomeUnknown => "outcome_unknown",
            Self::TookOver => "took_over",
            Self::StoreUnavailable => "store_unavailable",
            Self::Overloaded => "overloaded",
            Self::LimitReached => "limit_reached",
            Self::Unprotected => "unprotected",
        }
    }
}

impl fmt::Display for IdempotencyStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Asks a response what the layer had to do with it.
pub trait IdempotentResponse {
    /// What the layer did. `None` where no key applied, and for responses that came over a wire.
    fn idempotency_status(&self) -> Option<IdempotencyStatus>;

    /// Whether this is a retained answer sent again: by the extension where there is one, else by the header
    /// `Idempotent-Replay: true` or `Idempotent-Replayed: true`, so that it also works on the client's side.
    ///
    /// ```
    /// use tower_idempotency::IdempotentResponse;
    ///
    /// let response = http::Response::builder()
    ///     .header("idempotent-replay", "true")
    ///     .body(())
    ///     .unwrap();
    /// assert!(response.is_replay());
    /// ```
    fn is_replay(&self) -> bool;
}

impl<B> IdempotentResponse for Response<B> {
    fn idempotency_status(&self) -> Option<IdempotencyStatus> {
        self.extensions().get().copied()
    }

    fn is_replay(&self) -> bool {
        match self.idempotency_status() {
            Some(status) => status == IdempotencyStatus::Replayed,
            None => [REPLAY_HEADER, REPLAYED_HEADER].iter().any(|name| {
                self.headers()
                    .get(name)
                    .is_some_and(|value| value == "true")
            }),
        }
    }
}

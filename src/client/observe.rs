//! The events of the client. None shows a key, a header's value, a URI or a body; nor the text of a client's
//! error, which may have the URI in it.

use std::time::Duration;

use super::{
    Attempt, Ended, Unanswered,
    failure::{Failure, Why},
};

const TARGET: &str = "tower_idempotency::client";

/// The same request is sent again after this wait.
pub(super) fn attempt_failed(attempt: &Attempt, failure: &Failure, wait: Duration) {
    tracing::debug!(
        target: TARGET,
        attempt = attempt.number,
        why = failure.why.as_str(),
        status = failure.response.as_ref().map(|response| response.status().as_u16()),
        network = failure.network().map(tracing::field::debug),
        wait_ms = u64::try_from(wait.as_millis()).unwrap_or(u64::MAX),
        "attempt failed; the same request is sent again"
    );
}

/// The operation is over, and there is no answer.
pub(super) fn unanswered(unanswered: &Unanswered) {
    let ended = unanswered.name();
    let attempts = unanswered.ended().map(Ended::attempts);
    let status = unanswered
        .response()
        .map(|response| response.status().as_u16());
    match unanswered {
        // Somebody has to mend the program.
        Unanswered::Reused(_) => tracing::error!(
            target: TARGET, ended, attempts, status, "idempotent operation has no answer"
        ),
        _ => tracing::warn!(
            target: TARGET, ended, attempts, status, "idempotent operation has no answer"
        ),
    }
}

impl Why {
    fn as_str(self) -> &'static str {
        match self {
            Self::NotReady => "not_ready",
            Self::Failed => "failed",
            Self::TimedOut => "timed_out",
            Self::BrokeOff => "broke_off",
            Self::InFlight => "in_flight",
            Self::Refused => "refused",
        }
    }
}

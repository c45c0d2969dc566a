//! What an answer means for the operation.

use http::{HeaderName, StatusCode, response};

use super::refusal::Refusal;
use crate::status::{REPLAY_HEADER, REPLAYED_HEADER};

/// What becomes of the operation.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Judgement {
    /// It has its answer.
    Answer {
        /// It is the recorded one of an earlier run.
        replayed: bool,
    },
    /// The same request is sent again.
    Retry {
        /// Because another attempt is still running.
        in_flight: bool,
    },
    /// The three that are settled without an answer.
    Reused,
    OutcomeUnknown,
    NotRetained(Option<StatusCode>),
}

/// What is settable about it.
#[derive(Debug, Clone, Default)]
pub(super) struct Judge {
    pub(super) replay_header: Option<HeaderName>,
    pub(super) retry_bare_conflict: bool,
}

impl Judge {
    pub(super) fn judges(&self, head: &response::Parts, refusal: &Refusal) -> Judgement {
        // A replay is what was recorded, and stays so however often it is asked for.
        if self.is_replay(head) {
            return Judgement::Answer { replayed: true };
        }
        let is_error = head.status.is_client_error() || head.status.is_server_error();
        let code = refusal.code.as_deref().filter(|_| is_error);
        match code {
            Some("idempotency_key_reused") => Judgement::Reused,
            Some("idempotency_outcome_unknown") => Judgement::OutcomeUnknown,
            Some("idempotency_response_not_retained") => {
                Judgement::NotRetained(refusal.original_status)
            }
            Some("idempotency_in_flight") => Judgement::Retry { in_flight: true },
            Some(code) if code.starts_with("idempotency_") => {
                let retryable = refusal.retryable.or_else(|| is_retryable(code));
                or_answer(retryable.unwrap_or_else(|| passes(head.status)))
            }
            Some(_) => or_answer(passes(head.status)),
            None if head.status == StatusCode::CONFLICT && self.retry_bare_conflict => {
                Judgement::Retry { in_flight: true }
            }
            None => or_answer(passes(head.status)),
        }
    }

    fn is_replay(&self, head: &response::Parts) -> bool {
        let says = |name: &HeaderName| {
            head.headers
                .get_all(name)
                .iter()
                .any(|value| value.as_bytes().trim_ascii().eq_ignore_ascii_case(b"true"))
        };
        says(&REPLAY_HEADER)
            || says(&REPLAYED_HEADER)
            || self.replay_header.as_ref().is_some_and(says)
    }
}

fn or_answer(retryable: bool) -> Judgement {
    match retryable {
        true => Judgement::Retry { in_flight: false },
        false => Judgement::Answer { replayed: false },
    }
}

/// Statuses of what passes by itself.
fn passes(status: StatusCode) -> bool {
    matches!(status.as_u16(), 425 | 429 | 500 | 502 | 503 | 504)
}

/// Where a rendering of a service's own leaves `retryable` out, the code is enough.
fn is_retryable(code: &str) -> Option<bool> {
    match code {
        "idempotency_store_unavailable"
        | "idempotency_transaction_failed"
        | "idempotency_overloaded"
        | "idempotency_limit_reached" => Some(true),
        "idempotency_key_required"
        | "idempotency_key_invalid"
        | "idempotency_scope_unknown"
        | "idempotency_transaction_misused"
        | "idempotency_body_too_large"
        | "idempotency_body_incomplete"
        | "idempotency_body_invalid" => Some(false),
        _ => None,
    }
}

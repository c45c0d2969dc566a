//! What an answer means for the operation.

use http::{HeaderName, StatusCode, header, response};

use super::{
    exchange::is_error,
    refusal::{Refusal, is_encoded},
};
use crate::status::{IdempotencyStatus, REPLAY_HEADER, REPLAYED_HEADER, STATUS_HEADER};

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
    /// A conflict in a coding that is not read here, and without a word of when to come back.
    Unreadable,
}

const REUSED: &str = "idempotency_key_reused";
const OUTCOME_UNKNOWN: &str = "idempotency_outcome_unknown";
const NOT_RETAINED: &str = "idempotency_response_not_retained";

/// The codes by which an operation ends.
pub(super) const SETTLED: [&str; 3] = [REUSED, OUTCOME_UNKNOWN, NOT_RETAINED];

/// What is settable about it.
#[derive(Debug, Clone, Default)]
pub(super) struct Judge {
    pub(super) replay_header: Option<HeaderName>,
    pub(super) retry_bare_conflict: bool,
    pub(super) also_in_flight: Vec<String>,
}

impl Judge {
    pub(super) fn judges(&self, head: &response::Parts, refusal: &Refusal) -> Judgement {
        // A replay is what was recorded, and stays so however often it is asked for.
        if self.is_replay(head) {
            return Judgement::Answer { replayed: true };
        }
        // It was run without a record, so another attempt would be another run.
        if is_unprotected(head) {
            return Judgement::Answer { replayed: false };
        }
        if !is_error(head.status) {
            return Judgement::Answer { replayed: false };
        }
        let is_conflict = head.status == StatusCode::CONFLICT;
        if is_conflict && is_encoded(&head.headers) {
            return match head.headers.contains_key(header::RETRY_AFTER) {
                true => Judgement::Retry { in_flight: true },
                false => Judgement::Unreadable,
            };
        }
        match refusal.code.as_deref() {
            Some(REUSED) => Judgement::Reused,
            Some(OUTCOME_UNKNOWN) => Judgement::OutcomeUnknown,
            Some(NOT_RETAINED) => Judgement::NotRetained(refusal.original_status),
            Some("idempotency_in_flight") => Judgement::Retry { in_flight: true },
            Some(code) if self.also_in_flight.iter().any(|also| also == code) => {
                Judgement::Retry { in_flight: true }
            }
            Some(code) if code.starts_with("idempotency_") => {
                let retryable = refusal.retryable.or_else(|| is_retryable(code));
                or_answer(retryable.unwrap_or_else(|| passes(head.status)))
            }
            Some(_) => or_answer(passes(head.status)),
            None if is_conflict && self.retry_bare_conflict => Judgement::Retry { in_flight: true },
            None => or_answer(passes(head.status)),
        }
    }

    fn is_replay(&self, head: &response::Parts) -> bool {
        let is_true = |name: &HeaderName| says(head, name, "true");
        is_true(&REPLAY_HEADER)
            || is_true(&REPLAYED_HEADER)
            || self.replay_header.as_ref().is_some_and(is_true)
    }
}

/// Whether the server says that it has run the request without a record of it.
pub(super) fn is_unprotected(head: &response::Parts) -> bool {
    says(
        head,
        &STATUS_HEADER,
        IdempotencyStatus::Unprotected.as_str(),
    )
}

fn says(head: &response::Parts, name: &HeaderName, what: &str) -> bool {
    let mut values = head.headers.get_all(name).iter();
    values.any(|value| {
        let value = value.as_bytes().trim_ascii();
        value.eq_ignore_ascii_case(what.as_bytes())
    })
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

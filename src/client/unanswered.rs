//! How an operation ends without an answer.

use std::{error::Error, fmt, time::Duration};

use axum::BoxError;
use bytes::Bytes;
use http::{Response, StatusCode};

use crate::IdempotencyKey;

/// Why an operation has no answer.
///
/// Whatever was sent may have taken effect. So none of these is a reason to send the action under a new key:
/// look the true state up, or send the same request with the same [`key`](Self::key) again.
///
/// `Debug` and `Display` show no key, header, URI or body. [`source`](Error::source) is the client's own error,
/// and may say more than that.
#[derive(Debug)]
#[non_exhaustive]
pub enum Unanswered {
    /// Nothing was sent in this call. Of an operation from an outbox an earlier one may have sent something:
    /// its row counts the attempts.
    NotSent(NotSent),
    /// A request that is not [covered](super::RetryLayer::methods) failed. It had no key from here and one
    /// attempt, and nothing is promised for it.
    Uncovered(Uncovered),
    /// The server knows the key from another request (`idempotency_key_reused`): a mistake of the caller's, for
    /// somebody to look at. Sending it again is of no use.
    Reused(Ended),
    /// An attempt is still running at the server, or was when the last one asked that was made.
    StillInFlight(Ended),
    /// An attempt was cut off at the server, which does not know what it did (`idempotency_outcome_unknown`).
    OutcomeUnknown(Ended),
    /// It is done, and the server has not kept the answer (`idempotency_response_not_retained`).
    NotRetained {
        /// The status the answer had, where the server says so.
        original_status: Option<StatusCode>,
        /// How it ended.
        ended: Ended,
    },
    /// The last attempt failed, and there was no time or no number left for another one, or it could not be made. Or
    /// there is an answer that cannot be read, since it is compressed. The action may have been done all the same.
    GaveUp(Ended),
}

impl Unanswered {
    /// How the last attempt ended that was made; `None` where there was none, and for a request that is not covered.
    pub fn ended(&self) -> Option<&Ended> {
        match self {
            Self::NotSent(_) | Self::Uncovered(_) => None,
            Self::Reused(ended)
            | Self::StillInFlight(ended)
            | Self::OutcomeUnknown(ended)
            | Self::NotRetained { ended, .. }
            | Self::GaveUp(ended) => Some(ended),
        }
    }

    /// The key that every attempt had; `None` where there was none.
    pub fn key(&self) -> Option<&IdempotencyKey> {
        self.ended().map(Ended::key)
    }

    /// The answer of the last attempt, as [`Ended::response`] has it.
    pub fn response(&self) -> Option<&Response<Bytes>> {
        self.ended().and_then(Ended::response)
    }

    /// When the server wants the request again, as [`Ended::retry_after`] has it.
    pub fn retry_after(&self) -> Option<Duration> {
        self.ended().and_then(Ended::retry_after)
    }

    /// The same as [`ended`](Self::ended), by value.
    pub fn into_ended(self) -> Option<Ended> {
        match self {
            Self::NotSent(_) | Self::Uncovered(_) => None,
            Self::Reused(ended)
            | Self::StillInFlight(ended)
            | Self::OutcomeUnknown(ended)
            | Self::NotRetained { ended, .. }
            | Self::GaveUp(ended) => Some(ended),
        }
    }

    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::NotSent(_) => "not_sent",
            Self::Uncovered(_) => "uncovered",
            Self::Reused(_) => "reused",
            Self::StillInFlight(_) => "still_in_flight",
            Self::OutcomeUnknown(_) => "outcome_unknown",
            Self::NotRetained { .. } => "not_retained",
            Self::GaveUp(_) => "gave_up",
        }
    }
}

impl fmt::Display for Unanswered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotSent(why) => write!(f, "nothing was sent: {why}"),
            Self::Uncovered(uncovered) if uncovered.is_safe => {
                f.write_str("a request that changes nothing failed, and may be sent again")
            }
            Self::Uncovered(_) => f.write_str(
                "a request without protection failed; what it did must be looked up before it is sent again",
            ),
            Self::Reused(_) => f.write_str(
                "the idempotency key belongs to another request, which is a mistake of the caller's: do not send this one again and do not replace the key, but look up the true state of what was done with it",
            ),
            Self::StillInFlight(ended) => write!(
                f,
                "the request was still running at the server after {}: do not replace its idempotency key, but send the same again later or look up the true state",
                Times(ended.attempts)
            ),
            Self::OutcomeUnknown(_) => f.write_str(
                "the server was cut off and does not know what the request did: do not replace its idempotency key, but look up the true state",
            ),
            Self::NotRetained { .. } => f.write_str(
                "the request is done and its answer was not kept: do not replace its idempotency key, but look up the true state",
            ),
            Self::GaveUp(ended) => write!(
                f,
                "there is no answer after {}, and the request may have been carried out: do not replace its idempotency key, but send the same again later or look up the true state",
                Times(ended.attempts)
            ),
        }
    }
}

impl Error for Unanswered {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::NotSent(why) => why.source(),
            Self::Uncovered(uncovered) => Some(&*uncovered.error),
            _ => self.ended().and_then(Ended::source),
        }
    }
}

/// How many attempts, in words.
struct Times(u32);

impl fmt::Display for Times {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            1 => f.write_str("one attempt"),
            more => write!(f, "{more} attempts"),
        }
    }
}

/// How the last attempt ended that was made.
pub struct Ended {
    pub(super) key: IdempotencyKey,
    pub(super) attempts: u32,
    pub(super) response: Option<Box<Response<Bytes>>>,
    pub(super) retry_after: Option<Duration>,
    pub(super) source: Option<BoxError>,
    pub(super) is_timeout: bool,
}

impl Ended {
    /// The key that every attempt had: what the same request is to be sent with again.
    pub fn key(&self) -> &IdempotencyKey {
        &self.key
    }

    /// How many attempts were made: those that were handed to the client. One that it was not ready for, or that a
    /// hook did not let through, is not among them.
    pub fn attempts(&self) -> u32 {
        self.attempts
    }

    /// The last attempt's answer. Its body is empty where it was a stream, where it was larger than
    /// [`response_body_limit`](super::RetryLayer::response_body_limit) (and than 64 KiB), and where it is the body
    /// of an error (4xx, 5xx) that broke off or did not end in time. `None` if there was no answer, or another one
    /// than an error, and not to its end.
    pub fn response(&self) -> Option<&Response<Bytes>> {
        self.response.as_deref()
    }

    /// The same, by value: to hand it on. Where its body is not kept, its head does not speak of one.
    pub fn into_response(self) -> Option<Response<Bytes>> {
        self.response.map(|response| *response)
    }

    /// After how long the server wants the request again, counted from the last attempt's answer, if that says
    /// so.
    pub fn retry_after(&self) -> Option<Duration> {
        self.retry_after
    }

    /// Whether the last attempt was stopped by [`attempt_timeout`](super::RetryLayer::attempt_timeout) or
    /// [`total_timeout`](super::RetryLayer::total_timeout) before its answer was whole. A time-out of the client's
    /// own, or of a layer inside of this one, is an error like others, and is in [`source`](Self::source).
    pub fn is_timeout(&self) -> bool {
        self.is_timeout
    }

    /// What went wrong: the client's own error, that of the answer's body, or that of a time-out. A [`NotSent`],
    /// whatever the last attempt met, where a further one could not be made. Of an answer that could not be read
    /// because it is compressed, that. `None` if there was another answer.
    pub fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.source.as_ref().map(|source| &**source as _)
    }
}

impl fmt::Debug for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Headers, body, and a client's own error, which may name the URI, are not shown.
        f.debug_struct("Ended")
            .field("attempts", &self.attempts)
            .field("status", &self.response().map(Response::status))
            .field("retry_after", &self.retry_after)
            .field("is_timeout", &self.is_timeout)
            .finish_non_exhaustive()
    }
}

/// Why a request could not be sent.
pub struct NotSent {
    message: &'static str,
    source: Option<BoxError>,
}

impl NotSent {
    pub(super) fn new(message: &'static str) -> Self {
        Self {
            message,
            source: None,
        }
    }

    pub(super) fn with_source(mut self, source: impl Into<BoxError>) -> Self {
        self.source = Some(source.into());
        self
    }
}

impl fmt::Debug for NotSent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NotSent")
            .field("message", &self.message)
            .finish_non_exhaustive()
    }
}

impl fmt::Display for NotSent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.message)
    }
}

impl Error for NotSent {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.source.as_ref().map(|source| &**source as _)
    }
}

/// The client's own error for a request that is not covered.
pub struct Uncovered {
    pub(super) error: BoxError,
    /// By its method, so that it cannot have done anything.
    pub(super) is_safe: bool,
}

impl Uncovered {
    /// The client's own error.
    pub fn into_inner(self) -> BoxError {
        self.error
    }
}

impl fmt::Debug for Uncovered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Uncovered").finish_non_exhaustive()
    }
}

//! How an attempt fails, and how an operation ends by that.

use std::{error::Error, fmt, io, time::Duration};

use axum::BoxError;
use bytes::Bytes;
use http::Response;

use super::{Attempt, Ended, NotSent, Unanswered, judgement::Judgement};
use crate::IdempotencyKey;

/// An attempt that failed, and may be followed by another.
pub(super) struct Failure {
    pub(super) why: Why,
    pub(super) hint: Option<Duration>,
    pub(super) response: Option<Box<Response<Bytes>>>,
    pub(super) source: Option<BoxError>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Why {
    /// The client could not even take the request.
    NotReady,
    /// There is no answer.
    Failed,
    /// Not in time.
    TimedOut,
    /// In the middle of the answer.
    BrokeOff,
    /// Another attempt is still running.
    InFlight,
    /// By a status that passes.
    Refused,
}

impl Failure {
    pub(super) fn of(why: Why, source: impl Into<BoxError>) -> Self {
        Self {
            why,
            hint: None,
            response: None,
            source: Some(source.into()),
        }
    }

    /// Of what sort the error of the network is, if it is one.
    pub(super) fn network(&self) -> Option<io::ErrorKind> {
        let mut cause: Option<&(dyn Error + 'static)> = Some(&**self.source.as_ref()?);
        while let Some(error) = cause {
            if let Some(error) = error.downcast_ref::<io::Error>() {
                return Some(error.kind());
            }
            cause = error.source();
        }
        None
    }

    /// The end of the operation, of which this was the last attempt.
    pub(super) fn ends(self, attempt: Attempt) -> Unanswered {
        self.ends_after(attempt.number, attempt.key)
    }

    fn ends_after(self, attempts: u32, key: IdempotencyKey) -> Unanswered {
        let ended = Ended {
            key,
            attempts,
            response: self.response,
            retry_after: self.hint,
            source: self.source,
            is_timeout: self.why == Why::TimedOut,
        };
        match self.why {
            Why::InFlight => Unanswered::StillInFlight(ended),
            _ => Unanswered::GaveUp(ended),
        }
    }

    /// The same, of an attempt that the client could not take.
    pub(super) fn not_ready(self) -> NotSent {
        let why = NotSent::new("the client was not ready to send it");
        match self.source {
            Some(source) => why.with_source(source),
            None => why,
        }
    }
}

/// There is no further request. That nothing was sent is only said where that is true: otherwise the operation ends
/// as the last attempt did that was made.
pub(super) fn not_made(why: NotSent, last: Option<Failure>, attempt: Attempt) -> Unanswered {
    let Some(last) = last else {
        return Unanswered::NotSent(why);
    };
    let last = Failure {
        source: Some(why.into()),
        ..last
    };
    last.ends_after(attempt.number - 1, attempt.key)
}

pub(super) fn settled(
    judgement: Judgement,
    response: Response<Bytes>,
    hint: Option<Duration>,
    attempt: Attempt,
) -> Unanswered {
    let ended = Ended {
        key: attempt.key,
        attempts: attempt.number,
        response: Some(Box::new(response)),
        retry_after: hint,
        source: match judgement {
            Judgement::Unreadable => Some(Compressed.into()),
            _ => None,
        },
        is_timeout: false,
    };
    match judgement {
        Judgement::Unreadable => Unanswered::GaveUp(ended),
        Judgement::Reused => Unanswered::Reused(ended),
        Judgement::NotRetained(original_status) => Unanswered::NotRetained {
            original_status,
            ended,
        },
        _ => Unanswered::OutcomeUnknown(ended),
    }
}

/// The source of an attempt that took too long, and what it has waited for.
#[derive(Debug)]
pub(super) enum TimedOut {
    Ready,
    Answer,
}

impl fmt::Display for TimedOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ready => "the client was not ready in the time an attempt has",
            Self::Answer => "there was no whole answer in the time an attempt has",
        })
    }
}

impl Error for TimedOut {}

/// The source of an end by an answer that cannot be read.
#[derive(Debug)]
struct Compressed;

impl fmt::Display for Compressed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("its body is compressed; put decompression inside of the retry layer")
    }
}

impl Error for Compressed {}

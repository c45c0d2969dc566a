//! Whom the layer's answers are for.

use std::sync::Arc;

use axum::body::Body;
use http::{Response, StatusCode};

use crate::Rejection;

/// Whom the layer's own answers are for: clients that read what is refused, or senders that look at the status
/// and nothing else, as those of webhooks do. Set with [`IdempotencyLayer::audience`](crate::IdempotencyLayer::audience).
///
/// A sender takes 2xx for "this event is dealt with", and many take 4xx for "never send this again". So what
/// may pass, or has been dealt with already, is told to it in those terms. Each code means the same to both.
///
/// | situation | `Clients` | `Senders` |
/// | --- | --- | --- |
/// | in flight | 409, `Retry-After: 1` | 503, `Retry-After: 1` |
/// | the key of another request that has not completed | 409, or [`reuse_status`](crate::IdempotencyLayer::reuse_status) | as in flight |
/// | the key of another request that has | 409, or `reuse_status` | the same |
/// | the outcome of an earlier run is unknown | 409 | 503, `Retry-After: 60` |
/// | the first answer broke off while it was held back to be kept | 409: done, answer not kept; in transactional mode it was rolled back, and runs | as [`recovery`](crate::IdempotencyLayer::recovery) says of a run that was cut off |
/// | done, answer not kept, and it was a 2xx | 409 | that status, without a body, marked as a replay |
/// | done, answer not kept, and it was no 2xx | 409 | 409 |
/// | done, the kept answer cannot be read | 503, `Retry-After: 1` | as one that was not kept, if it was a 2xx; else 503, `Retry-After: 1` |
/// | too many records of one scope | 429, `Retry-After: 60` | 503, `Retry-After: 60` |
/// | the body ended early | 400 | 503, `Retry-After: 1` |
/// | store out of reach, too many runs, transaction given up | 503, `Retry-After: 1` | 503, `Retry-After: 1` |
/// | anything else, such as no key | as [`Rejection`] says | as [`Rejection`] says |
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Audience {
    /// Clients of an API. The default.
    #[default]
    Clients,
    /// Senders of events.
    Senders,
}

impl Audience {
    /// The status of a refusal.
    pub(crate) fn status(self, rejection: &Rejection) -> StatusCode {
        match self {
            Self::Senders if self.retry_after_seconds(rejection).is_some() => {
                StatusCode::SERVICE_UNAVAILABLE
            }
            Self::Clients | Self::Senders => rejection.status(),
        }
    }

    /// After how many seconds the same may be sent again.
    pub(crate) fn retry_after_seconds(self, rejection: &Rejection) -> Option<u64> {
        match (self, rejection) {
            // Somebody settles it, or nobody does; until then a delivery that was given up is lost.
            (Self::Senders, Rejection::OutcomeUnknown { .. }) => Some(60),
            (Self::Senders, Rejection::BodyIncomplete) => Some(1),
            _ => rejection.retry_after_seconds(),
        }
    }

    /// Whether an answer whose body broke off leaves it unknown what its run did, whatever its head said.
    /// Clients have seen it break off, and look the result up; senders have seen the status.
    pub(crate) fn minds_broken_answers(self) -> bool {
        self == Self::Senders
    }

    /// What a request is told that differs from one with the same key which has not completed, and is running or
    /// was cut off.
    pub(crate) fn differs_from_unfinished(
        self,
        is_running: bool,
        original_request_id: Option<Arc<str>>,
    ) -> Rejection {
        match (self, is_running) {
            (Self::Clients, _) => Rejection::KeyReused {
                original_request_id,
            },
            // The key may be freed yet, and what is refused for good is lost then.
            (Self::Senders, true) => Rejection::InFlight {
                original_request_id,
            },
            (Self::Senders, false) => Rejection::OutcomeUnknown {
                original_request_id,
            },
        }
    }

    /// What stands for an answer with this status that was not kept, where that says all there is to say.
    pub(crate) fn in_place_of(self, status: Option<StatusCode>) -> Option<Response<Body>> {
        let done = status.filter(|status| self == Self::Senders && status.is_success())?;
        let mut response = Response::new(Body::empty());
        *response.status_mut() = done;
        Some(response)
    }
}

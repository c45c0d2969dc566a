//! Every refusal, and what is to be said about it.

use std::{borrow::Cow, sync::Arc};

use http::StatusCode;

use crate::{IdempotencyStatus, InvalidKey, RejectionContext, UndecodableBody};

/// Why a request was refused. The handler did not run (again).
///
/// Each has a stable code. The statuses are those for clients; under [`Audience::Senders`](crate::Audience) some are 503. The codes, and what a client should do:
///
/// ## idempotency_key_required
/// Status 400. Send the header, or the [member of the body](crate::IdempotencyLayer::key_pointer) that the detail names,
/// with a fresh unique value per action, the same one on every attempt.
///
/// ## idempotency_key_invalid
/// Status 400. The detail says which rule the key breaks.
///
/// ## idempotency_scope_unknown
/// Status 403. The service cannot tell whose key it is; authenticate.
///
/// ## idempotency_key_reused
/// Status 409 (settable). The key belongs to another request, which stands. Find the mistake; do
/// not send the action again under a new key before you know what the first request did.
///
/// ## idempotency_in_flight
/// Status 409 with `Retry-After`. The first attempt is still running: send the same again, same
/// key.
///
/// ## idempotency_response_not_retained
/// Status 409. It is done, but the answer was not kept; look the result up.
///
/// ## idempotency_outcome_unknown
/// Status 409. An earlier attempt was cut off and nobody knows what it did; look the true state up, or
/// wait until the service has settled it. Never replace the key.
///
/// ## idempotency_store_unavailable
/// Status 503 with `Retry-After`. Nothing ran in this attempt: send the same again, same key.
///
/// ## idempotency_transaction_failed
/// Status 503 with `Retry-After`. The database gave the handler's transaction up, or has not said whether it
/// was committed. Send the same again, same key: if it was committed after all, the retry gets its answer.
///
/// ## idempotency_transaction_misused
/// Status 500. A mistake in the service: its handler used the transaction in a way in which it cannot be
/// committed. The detail says what was wrong. Nothing was done and the key is free, unless the handler ended
/// the transaction by itself: then it must be looked up, and the key does not run again.
///
/// ## idempotency_overloaded
/// Status 503 with `Retry-After`. Too many runs at once, or the service is shutting down.
///
/// ## idempotency_limit_reached
/// Status 429 with `Retry-After`. Too many keys are live for this caller, and this one is not among them:
/// send the same again, same key, once older ones have expired. Keys that were used before are served as
/// ever. Keys whose outcome is unknown are among the live ones, and may never expire by themselves: whoever
/// has many of them asks the service to settle them.
///
/// ## idempotency_body_too_large
/// Status 413. The body is larger than the service reads for a keyed request.
///
/// ## idempotency_body_incomplete
/// Status 400. The body ended early.
///
/// ## idempotency_body_invalid
/// Status 400. The body is not what the service's fingerprint scheme can read, or the key is looked for in it and
/// it is not JSON, or says it twice.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Rejection {
    /// No key where one is required.
    KeyRequired,
    /// A key that breaks a rule.
    KeyInvalid(InvalidKey),
    /// The scope function answered `None`, or a scope longer than 255 bytes.
    ScopeUnknown,
    /// A live record with another fingerprint.
    KeyReused {
        /// The id of the request that used the key first.
        original_request_id: Option<Arc<str>>,
    },
    /// The first request is still running.
    InFlight {
        /// Its id.
        original_request_id: Option<Arc<str>>,
    },
    /// Done, but the response was not kept.
    ResponseNotRetained {
        /// The status it had.
        status: Option<StatusCode>,
        /// The id of the request that did it.
        original_request_id: Option<Arc<str>>,
    },
    /// An earlier run was cut off and its outcome is unknown.
    ///
    /// Clients are told that it is not retryable, with a [`Resolver`](crate::Resolver) too, since nobody knows when
    /// that will know more. Senders of events ([`Audience::Senders`](crate::Audience)) are told to come back after a
    /// minute, since a delivery that is given up is lost. The same request may be sent again later all the same: it gets the answer once there is one, and
    /// never runs a second time unless [`Recovery::Rerun`](crate::Recovery::Rerun) says so.
    OutcomeUnknown {
        /// The id of the first request.
        original_request_id: Option<Arc<str>>,
    },
    /// The store could not be asked, or is full.
    StoreUnavailable,
    /// The handler's transaction was not committed, or nobody knows yet.
    TransactionFailed,
    /// The handler's transaction cannot be committed, for this reason.
    TransactionMisused(&'static str),
    /// Too many runs at once, or shutting down.
    Overloaded,
    /// A new key for a scope with as many records as it may have, abandoned ones included, which only
    /// expire with [`abandoned_ttl`](crate::IdempotencyLayer::abandoned_ttl); see
    /// [`scope_limit`](crate::IdempotencyLayer::scope_limit).
    LimitReached,
    /// More body than is read.
    BodyTooLarge {
        /// The limit in bytes; `None` when it is one set outside of the layer.
        limit: Option<usize>,
    },
    /// The body ended with an error.
    BodyIncomplete,
    /// The fingerprint scheme cannot read the body, or no key can be looked for in it.
    BodyInvalid(UndecodableBody),
}

impl Rejection {
    /// The stable code.
    pub fn code(&self) -> &'static str {
        match self {
            Self::KeyRequired => "idempotency_key_required",
            Self::KeyInvalid(_) => "idempotency_key_invalid",
            Self::ScopeUnknown => "idempotency_scope_unknown",
            Self::KeyReused { .. } => "idempotency_key_reused",
            Self::InFlight { .. } => "idempotency_in_flight",
            Self::ResponseNotRetained { .. } => "idempotency_response_not_retained",
            Self::OutcomeUnknown { .. } => "idempotency_outcome_unknown",
            Self::StoreUnavailable => "idempotency_store_unavailable",
            Self::TransactionFailed => "idempotency_transaction_failed",
            Self::TransactionMisused(_) => "idempotency_transaction_misused",
            Self::Overloaded => "idempotency_overloaded",
            Self::LimitReached => "idempotency_limit_reached",
            Self::BodyTooLarge { .. } => "idempotency_body_too_large",
            Self::BodyIncomplete => "idempotency_body_incomplete",
            Self::BodyInvalid(_) => "idempotency_body_invalid",
        }
    }

    /// The HTTP status, unless the layer is told another one for reuse, or that senders are to hear it
    /// ([`Audience`](crate::Audience)).
    pub fn status(&self) -> StatusCode {
        match self {
            Self::KeyRequired
            | Self::KeyInvalid(_)
            | Self::BodyIncomplete
            | Self::BodyInvalid(_) => StatusCode::BAD_REQUEST,
            Self::ScopeUnknown => StatusCode::FORBIDDEN,
            Self::KeyReused { .. }
            | Self::InFlight { .. }
            | Self::ResponseNotRetained { .. }
            | Self::OutcomeUnknown { .. } => StatusCode::CONFLICT,
            Self::StoreUnavailable | Self::TransactionFailed | Self::Overloaded => {
                StatusCode::SERVICE_UNAVAILABLE
            }
            Self::TransactionMisused(_) => StatusCode::INTERNAL_SERVER_ERROR,
            Self::LimitReached => StatusCode::TOO_MANY_REQUESTS,
            Self::BodyTooLarge { .. } => StatusCode::PAYLOAD_TOO_LARGE,
        }
    }

    /// After how many seconds the same request with the same key may be sent again. `None` means
    /// that sending it again cannot help.
    pub fn retry_after_seconds(&self) -> Option<u64> {
        match self {
            Self::InFlight { .. }
            | Self::StoreUnavailable
            | Self::TransactionFailed
            | Self::Overloaded => Some(1),
            Self::LimitReached => Some(60),
            _ => None,
        }
    }

    /// Whether it is certain that no request with this key ever ran, so that the action may be sent
    /// under a new one: true only where there was no key. Every other refusal may follow an earlier
    /// attempt that ran, even one over the key's form, the scope or the body: they are looked at
    /// before the record is, and a deploy may have changed the rules since.
    pub fn new_key_safe(&self) -> bool {
        matches!(self, Self::KeyRequired)
    }

    /// The id of the request that holds the key, where known.
    pub fn original_request_id(&self) -> Option<&str> {
        match self {
            Self::KeyReused {
                original_request_id,
            }
            | Self::InFlight {
                original_request_id,
            }
            | Self::ResponseNotRetained {
                original_request_id,
                ..
            }
            | Self::OutcomeUnknown {
                original_request_id,
            } => original_request_id.as_deref(),
            _ => None,
        }
    }

    /// What the response's extensions, the event and the metrics say.
    pub fn idempotency_status(&self) -> IdempotencyStatus {
        match self {
            Self::KeyRequired => IdempotencyStatus::Missing,
            Self::KeyInvalid(_)
            | Self::ScopeUnknown
            | Self::BodyTooLarge { .. }
            | Self::BodyIncomplete
            | Self::BodyInvalid(_) => IdempotencyStatus::Invalid,
            Self::KeyReused { .. } => IdempotencyStatus::Reused,
            Self::InFlight { .. } => IdempotencyStatus::InFlight,
            Self::ResponseNotRetained { .. } => IdempotencyStatus::NotRetained,
            Self::OutcomeUnknown { .. } => IdempotencyStatus::OutcomeUnknown,
            Self::StoreUnavailable | Self::TransactionFailed => IdempotencyStatus::StoreUnavailable,
            Self::TransactionMisused(_) => IdempotencyStatus::Executed,
            Self::Overloaded => IdempotencyStatus::Overloaded,
            Self::LimitReached => IdempotencyStatus::LimitReached,
        }
    }

    /// One or two sentences: what was wrong and what to do. Never the key, never the body.
    pub fn detail(&self, context: &RejectionContext<'_>) -> Cow<'static, str> {
        let header = context.header_name;
        match self {
            Self::KeyRequired if let Some(pointer) = context.key_pointer => format!(
                "This request needs the member {pointer} in its JSON body: a string or a whole number that is unique for the action and the same on every attempt."
            ),
            Self::KeyInvalid(why) if let Some(pointer) = context.key_pointer => {
                format!("The member {pointer} of the body cannot be used as the idempotency key: {why}.")
            }
            Self::KeyRequired => format!(
                "This request needs the header {header}: a value that is unique for the action and the same on every attempt, such as a UUID."
            ),
            Self::KeyInvalid(why) => format!("The header {header} cannot be used: {why}."),
            Self::ScopeUnknown => return Cow::Borrowed(
                "The service cannot tell whose idempotency key this is. Authenticate and send the request again.",
            ),
            Self::KeyReused { .. } => format!(
                "The idempotency key was used before for a request that differs from this {} {}. The first request stands. Use one key per action, and find out what the first request did before you send anything under a new key.",
                context.method, context.path
            ),
            Self::InFlight { .. } => return Cow::Borrowed(
                "A request with this idempotency key is still running. Send the same request with the same key again after the time given.",
            ),
            Self::ResponseNotRetained { status, .. } => match status {
                Some(status) => format!(
                    "The request with this idempotency key was done and answered with status {}, but its answer was not kept. Look the result up; it will not run again.",
                    status.as_u16()
                ),
                None => return Cow::Borrowed(
                    "The request with this idempotency key was done, but its answer was not kept. Look the result up; it will not run again.",
                ),
            },
            Self::OutcomeUnknown { .. } if context.retry_after_seconds(self).is_some() => return Cow::Borrowed(
                "Earlier attempts with this idempotency key were cut off and their outcome is unknown. Send the same request with the same key again after the time given: it gets the answer once the service has settled it. Do not send the action under a new key.",
            ),
            Self::OutcomeUnknown { .. } => return Cow::Borrowed(
                "An earlier attempt with this idempotency key was cut off and its outcome is unknown. Look the true state up; do not send the action under a new key.",
            ),
            Self::StoreUnavailable => return Cow::Borrowed(
                "The record of idempotency keys is out of reach or full, so the request was not run. Send the same request with the same key again after the time given.",
            ),
            Self::TransactionFailed => return Cow::Borrowed(
                "The database gave the request's transaction up, or could not say whether it was committed. Send the same request with the same key again after the time given.",
            ),
            Self::TransactionMisused(why) => format!(
                "The service made a mistake with the request's transaction: {why}."
            ),
            Self::Overloaded => return Cow::Borrowed(
                "The service takes no further keyed requests at the moment, so the request was not run. Send the same request with the same key again after the time given.",
            ),
            Self::LimitReached => return Cow::Borrowed(
                "Too many idempotency keys are live for this caller, so the request was not run. Send the same request with the same key again after the time given.",
            ),
            Self::BodyTooLarge { limit: Some(limit) } => format!(
                "The body of a request with an idempotency key may have at most {limit} bytes."
            ),
            Self::BodyTooLarge { limit: None } => {
                return Cow::Borrowed("The body has more bytes than this service takes.");
            }
            Self::BodyIncomplete => return Cow::Borrowed(
                "The request's body ended early, so the request was not run. Send it again with the same key.",
            ),
            Self::BodyInvalid(why) => format!("The request's body cannot be read: {why}."),
        }
        .into()
    }
}

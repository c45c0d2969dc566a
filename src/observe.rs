//! Every event this crate emits and the names of its fields. No key, scope, header value or body
//! is ever among them.

use crate::{
    IdempotencyStatus,
    store::{StoreError, Ticket},
};

/// What the store was asked for.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Operation {
    Claim,
    Complete,
    Release,
    Abandon,
    Renew,
    Purge,
    Get,
    CountIn,
}

impl Operation {
    fn as_str(self) -> &'static str {
        match self {
            Self::Claim => "claim",
            Self::Complete => "complete",
            Self::Release => "release",
            Self::Abandon => "abandon",
            Self::Renew => "renew",
            Self::Purge => "purge",
            Self::Get => "get",
            Self::CountIn => "count_in",
        }
    }
}

/// The one event of a request's decision.
pub(crate) fn decided(status: IdempotencyStatus, code: Option<&'static str>) {
    match status {
        // A mistake of the service.
        IdempotencyStatus::Executed if code.is_some() => {
            tracing::error!(status = status.as_str(), code, "idempotency decision");
        }
        IdempotencyStatus::StoreUnavailable
        | IdempotencyStatus::Overloaded
        | IdempotencyStatus::OutcomeUnknown
        | IdempotencyStatus::Unprotected => {
            tracing::warn!(status = status.as_str(), code, "idempotency decision");
        }
        _ => tracing::debug!(status = status.as_str(), code, "idempotency decision"),
    }
}

/// The store failed to do something; `None` means that it did not answer in time.
pub(crate) fn store_failed(operation: Operation, error: Option<&StoreError>) {
    let operation = operation.as_str();
    match error {
        Some(error) => tracing::warn!(
            operation,
            kind = ?error.kind(),
            error = %error,
            source = std::error::Error::source(error).map(tracing::field::display),
            "idempotency store failed"
        ),
        None => tracing::warn!(operation, "idempotency store did not answer in time"),
    }
}

/// An outcome could not be recorded in time, so the caller is answered before it is durable.
pub(crate) fn recording_late(operation: Operation) {
    tracing::error!(
        operation = operation.as_str(),
        "idempotency record not written within store_timeout; trying on in the background"
    );
}

/// An outcome could not be recorded at all. Its key stays in flight until the lease or `max_run`
/// is over, and counts as abandoned then.
pub(crate) fn recording_failed(operation: Operation) {
    tracing::error!(
        operation = operation.as_str(),
        "idempotency record not written; the outcome of this run will count as unknown"
    );
}

/// Somebody else took the claim over while its handler ran.
pub(crate) fn ownership_lost(operation: Operation, ticket: &Ticket) {
    tracing::warn!(
        operation = operation.as_str(),
        attempt = ticket.attempt,
        "idempotency claim lost; the answer of this run is not recorded"
    );
}

/// A handler's transaction could not be committed; `None` means that the database did not answer in time.
#[cfg(any(feature = "sqlite", feature = "postgres"))]
pub(crate) fn commit_failed(error: Option<&sqlx::Error>) {
    match error {
        // What a database says may show values; its code does not.
        Some(error) => tracing::warn!(
            code = crate::transaction::sqlstate(error).as_deref(),
            "idempotent transaction not committed"
        ),
        None => tracing::warn!("idempotent transaction not committed in time"),
    }
}

/// A handler answered with the error of a statement.
#[cfg(any(feature = "sqlite", feature = "postgres"))]
pub(crate) fn statement_failed(error: &crate::TxError) {
    let code = error.code();
    let code = code.as_deref();
    match error.is_passing() {
        _ if error.is_conflict() => tracing::debug!(code, "statement of a handler failed"),
        true => tracing::warn!(code, "statement of a handler failed"),
        false => tracing::error!(code, "statement of a handler failed"),
    }
}

/// A handler held its SQLite transaction longer than `max_hold`.
pub(crate) fn held_too_long() {
    tracing::warn!("handler stopped: it held its transaction longer than max_hold");
}

/// A handler is run again in the same request, because its transaction failed for another one's sake.
pub(crate) fn begun_again(rerun: u32) {
    tracing::debug!(rerun, "idempotent run begun again after a conflict");
}

/// A retained response could not be read back.
pub(crate) fn damaged_record(error: &crate::DecodeError) {
    tracing::error!(error = %error, "retained response cannot be read");
}

/// A run was cut off without an answer.
pub(crate) fn abandoned(why: &'static str) {
    tracing::error!(why, "idempotent run abandoned; its outcome is unknown");
}

/// Requests of several callers share one namespace of keys, and nobody said that this is meant.
pub(crate) fn scope_missing() {
    tracing::warn!(
        "IdempotencyLayer has no scope, but requests carry credentials: two callers that use one \
         key would get each other's answers. Set .scope(..), or .single_tenant() if that is meant"
    );
}

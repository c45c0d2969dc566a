//! Every event, span and metric of this crate. No key, scope or body is ever among them, and of all headers
//! only the request's id.

mod conclusion;
mod decision;
#[cfg(feature = "metrics")]
pub(crate) mod gauges;
#[cfg(feature = "metrics")]
pub(crate) mod metrics;
mod request;
mod timer;

pub(crate) use self::{
    conclusion::{By, Concluded, resolved},
    decision::{Decision, decided, unkeyed},
    request::Observed,
    timer::{Timed, Timer},
};
#[cfg(feature = "metrics")]
use crate::store::StoreErrorKind;
use crate::store::{StoreError, Ticket};

/// What all events say they come from, whatever file they stand in.
const TARGET: &str = "tower_idempotency::observe";

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
    #[cfg(feature = "metrics")]
    Counts,
    Abandoned,
    TakeOver,
    Save,
    Load,
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
            #[cfg(feature = "metrics")]
            Self::Counts => "counts",
            Self::Abandoned => "abandoned",
            Self::TakeOver => "take_over",
            Self::Save => "save",
            Self::Load => "load",
        }
    }
}

/// The store failed to do something; `None` means that it did not answer in time.
pub(crate) fn store_failed(operation: Operation, error: Option<&StoreError>) {
    #[cfg(feature = "metrics")]
    metrics::store_failed(operation, error);
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
pub(crate) fn recording_late(operation: Operation, observed: &Observed) {
    #[cfg(feature = "metrics")]
    metrics::recording_late();
    tracing::error!(
        operation = operation.as_str(),
        request_id = observed.request_id(),
        "idempotency record not written within store_timeout; trying on in the background"
    );
}

/// An outcome could not be recorded at all. Its key stays in flight until the lease or `max_run`
/// is over, and counts as abandoned then.
pub(crate) fn recording_failed(operation: Operation, observed: &Observed) {
    #[cfg(feature = "metrics")]
    metrics::recording_failed();
    tracing::error!(
        operation = operation.as_str(),
        request_id = observed.request_id(),
        "idempotency record not written; the outcome of this run will count as unknown"
    );
}

/// Somebody else took the claim over while its handler ran.
pub(crate) fn ownership_lost(operation: Operation, ticket: &Ticket, observed: &Observed) {
    tracing::warn!(
        operation = operation.as_str(),
        request_id = observed.request_id(),
        attempt = ticket.attempt,
        "idempotency claim lost; the answer of this run is not recorded"
    );
}

/// A handler's transaction could not be committed; `None` means that the database did not answer in time.
#[cfg(any(feature = "sqlite", feature = "postgres"))]
pub(crate) fn commit_failed(error: Option<&sqlx::Error>) {
    #[cfg(feature = "metrics")]
    metrics::failed(
        "commit",
        error.map_or("timeout", |_| kind_of(StoreErrorKind::Unavailable)),
    );
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

/// The result of an operation cannot be kept. What serde says of that may hold a part of it.
pub(crate) fn result_unwritable() {
    tracing::error!("the result of an operation cannot be written as JSON, so it is not kept");
}

/// A retained response could not be read back.
pub(crate) fn damaged_record(error: &crate::DecodeError) {
    #[cfg(feature = "metrics")]
    metrics::failed("decode", kind_of(StoreErrorKind::Corrupt));
    tracing::error!(error = %error, "retained response cannot be read");
}

/// A record was left out of a list, because it cannot be read.
#[cfg(any(feature = "sqlite", feature = "postgres"))]
pub(crate) fn unreadable_record(error: &(dyn std::error::Error + 'static)) {
    let operation = Operation::Abandoned.as_str();
    #[cfg(feature = "metrics")]
    metrics::failed(operation, kind_of(StoreErrorKind::Corrupt));
    tracing::warn!(operation, error, "an abandoned record cannot be read");
}

/// Why a run has no outcome.
#[derive(Clone, Copy)]
pub(crate) enum CutOff {
    Failed,
    Panicked,
    Drained,
    GaveUp,
    BrokeOff,
}

impl CutOff {
    #[cfg(feature = "metrics")]
    fn as_str(self) -> &'static str {
        match self {
            Self::Failed => "failed",
            Self::Panicked => "panicked",
            Self::Drained => "drained",
            Self::GaveUp => "gave_up",
            Self::BrokeOff => "broke_off",
        }
    }

    fn text(self) -> &'static str {
        match self {
            Self::Failed => "the inner service failed",
            Self::Panicked => "the handler panicked",
            Self::Drained => "the run was aborted by drain",
            Self::GaveUp => {
                "the handler does not know it: its claim may be lost, or it said so by Retain::Abandon"
            }
            Self::BrokeOff => "the body of its answer broke off",
        }
    }
}

/// A run was cut off without an answer.
pub(crate) fn abandoned(why: CutOff, observed: &Observed) {
    #[cfg(feature = "metrics")]
    metrics::abandoned(why);
    let (why, request_id) = (why.text(), observed.request_id());
    tracing::error!(
        why,
        request_id,
        "idempotent run abandoned; its outcome is unknown"
    );
}

/// The databases that carry out many operations at once.
#[cfg(any(feature = "sqlite", feature = "postgres"))]
#[derive(Clone, Copy)]
#[cfg_attr(
    not(all(feature = "sqlite", feature = "postgres")),
    allow(dead_code, reason = "each is one feature's")
)]
pub(crate) enum Database {
    Sqlite,
    Postgres,
}

#[cfg(all(feature = "metrics", any(feature = "sqlite", feature = "postgres")))]
impl Database {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Sqlite => "sqlite",
            Self::Postgres => "postgres",
        }
    }
}

/// So many operations have shared a transaction or a statement.
#[cfg(any(feature = "sqlite", feature = "postgres"))]
pub(crate) fn batch(store: Database, operations: usize) {
    #[cfg(feature = "metrics")]
    metrics::batch(store, operations);
    #[cfg(not(feature = "metrics"))]
    let _ = (store, operations);
}

#[cfg(feature = "metrics")]
fn kind_of(kind: StoreErrorKind) -> &'static str {
    match kind {
        StoreErrorKind::Unavailable => "unavailable",
        StoreErrorKind::Full => "full",
        StoreErrorKind::Corrupt => "corrupt",
        StoreErrorKind::Schema => "schema",
        StoreErrorKind::Invalid => "invalid",
        StoreErrorKind::Keys => "keys",
        StoreErrorKind::Closed => "closed",
    }
}

/// Requests of several callers share one namespace of keys, and nobody said that this is meant.
pub(crate) fn scope_missing() {
    tracing::warn!(
        "IdempotencyLayer has no scope, but requests carry credentials: two callers that use one \
         key would get each other's answers. Set .scope(..), or .single_tenant() if that is meant"
    );
}

//! What was done with a request.

use axum::extract::MatchedPath;
use http::Request;

use super::{Observed, TARGET};
use crate::{IdempotencyStatus, Rejection, options::Options, store::Ticket};

/// What was done with a request.
#[derive(Clone, Copy)]
pub(crate) struct Decision<'a> {
    pub(super) status: IdempotencyStatus,
    /// Of a refusal.
    code: Option<&'static str>,
    /// Of the first request with the same key.
    pub(super) original_request_id: Option<&'a str>,
    /// Which run it was.
    pub(super) attempt: Option<u32>,
}

impl<'a> Decision<'a> {
    /// It was run under this claim.
    pub(crate) fn ran(ticket: &Ticket) -> Self {
        Self {
            attempt: Some(ticket.attempt),
            ..Self::of(match ticket.attempt {
                1 => IdempotencyStatus::Executed,
                _ => IdempotencyStatus::TookOver,
            })
        }
    }

    /// It was run without a claim.
    pub(crate) fn unprotected() -> Self {
        Self::of(IdempotencyStatus::Unprotected)
    }

    /// It got the answer of this request.
    pub(crate) fn replayed(original_request_id: Option<&'a str>) -> Self {
        Self {
            original_request_id,
            ..Self::of(IdempotencyStatus::Replayed)
        }
    }

    pub(crate) fn refused(rejection: &'a Rejection) -> Self {
        Self {
            code: Some(rejection.code()),
            original_request_id: rejection.original_request_id(),
            ..Self::of(rejection.idempotency_status())
        }
    }

    fn of(status: IdempotencyStatus) -> Self {
        Self {
            status,
            code: None,
            original_request_id: None,
            attempt: None,
        }
    }

    pub(crate) fn status(&self) -> IdempotencyStatus {
        self.status
    }
}

/// The one event of a request's decision.
pub(crate) fn decided(observed: &Observed, decision: Decision<'_>) {
    macro_rules! tell {
        ($level:ident) => {
            tracing::$level!(
                target: TARGET,
                status = decision.status.as_str(),
                code = decision.code,
                request_id = observed.request_id(),
                original_request_id = observed.shown(decision.original_request_id),
                attempt = decision.attempt,
                "idempotency decision"
            )
        };
    }
    #[cfg(feature = "metrics")]
    super::metrics::decided(decision.status);
    observed.record(&decision);
    match decision.status {
        // A mistake of the service.
        IdempotencyStatus::Executed if decision.code.is_some() => tell!(error),
        IdempotencyStatus::StoreUnavailable
        | IdempotencyStatus::Overloaded
        | IdempotencyStatus::OutcomeUnknown
        | IdempotencyStatus::Unprotected => tell!(warn),
        _ => tell!(debug),
    }
}

/// What is wrong with the key of a request that passes all the same.
#[derive(Clone, Copy)]
pub(crate) enum Unkeyed {
    Missing,
    Invalid,
}

impl Unkeyed {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Missing => "missing",
            Self::Invalid => "invalid",
        }
    }
}

/// Said of a request by the outermost layer that lets it pass.
#[derive(Clone)]
struct Said;

/// A request without a key, or with a malformed one, passes where it would be refused otherwise. That is said
/// once, however many layers it passes.
pub(crate) fn unkeyed<B>(options: &Options, request: &mut Request<B>, rejection: &Rejection) {
    if request.extensions_mut().insert(Said).is_some() {
        return;
    }
    let problem = match rejection {
        Rejection::KeyRequired => Unkeyed::Missing,
        _ => Unkeyed::Invalid,
    };
    #[cfg(feature = "metrics")]
    super::metrics::unkeyed(problem);
    let observed = Observed::unkeyed(options, request.headers(), rejection);
    let route = request.extensions().get::<MatchedPath>();
    tracing::info!(
        target: TARGET,
        problem = problem.as_str(),
        code = rejection.code(),
        request_id = observed.request_id(),
        method = request.method().as_str(),
        route = route.map(MatchedPath::as_str),
        "request without an idempotency key passed"
    );
}

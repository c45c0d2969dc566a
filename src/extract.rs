//! What a handler may ask of its claim.

use std::{convert::Infallible, fmt, sync::Arc};

use axum::{
    body::Body,
    extract::{FromRequestParts, OptionalFromRequestParts},
    response::IntoResponse,
};
use http::{HeaderValue, Response, StatusCode, header, request::Parts};

use crate::{
    IdempotencyKey, Scope,
    attempt::Attempt,
    store::{StoreError, Ticket},
};

/// The claim a handler runs under, as an axum extractor.
///
/// `Option<Idempotency>` is `None` where no key applied to the request (a method that is not
/// covered, an optional key left out, an unprotected run). Without the `Option` such a request is
/// answered with 500, because handler and layer disagree about what is required.
///
/// ```
/// use axum::{Router, routing::post};
/// use tower_idempotency::{Idempotency, IdempotencyLayer, MemoryStore};
///
/// async fn pay(idempotency: Idempotency) -> String {
///     // Pass the key on as a second barrier, for instance as a UNIQUE column.
///     format!("run {}", idempotency.attempt())
/// }
///
/// let app: Router = Router::new()
///     .route("/payments", post(pay))
///     .route_layer(IdempotencyLayer::new(MemoryStore::new()).single_tenant());
/// ```
#[derive(Debug, Clone)]
pub struct Idempotency {
    attempt: Arc<Attempt>,
    ticket: Ticket,
}

impl Idempotency {
    pub(crate) fn new(attempt: Arc<Attempt>, ticket: Ticket) -> Self {
        Self { attempt, ticket }
    }

    /// The key the client sent.
    pub fn key(&self) -> &IdempotencyKey {
        &self.ticket.id.key
    }

    /// Whose key it is.
    pub fn scope(&self) -> &Scope {
        &self.ticket.id.scope
    }

    /// Which run this is: 1 for the first, more after an abandoned one was taken over.
    pub fn attempt(&self) -> u32 {
        self.ticket.attempt
    }

    /// Asks the store whether this run still holds its claim, and extends its lease. Worth the
    /// round trip before an effect that cannot be undone, in a run that has lasted a while.
    ///
    /// Dropping the future has no effect.
    ///
    /// ```
    /// use tower_idempotency::{Idempotency, NotOwned};
    ///
    /// async fn handler(idempotency: Idempotency) -> Result<&'static str, NotOwned> {
    ///     // … a slow computation …
    ///     idempotency.ensure_owned().await?;
    ///     // … the effect …
    ///     Ok("paid")
    /// }
    /// ```
    ///
    /// # Errors
    ///
    /// [`NotOwned`] when the claim was taken over, forgotten, or has lasted longer than `max_run`,
    /// or when the store could not say. As a response it leaves the key to the recovery policy.
    pub async fn ensure_owned(&self) -> Result<(), NotOwned> {
        match self.attempt.still_holds().await {
            Ok(true) => Ok(()),
            Ok(false) => Err(NotOwned { unknown: None }),
            Err(error) => Err(NotOwned {
                unknown: Some(Arc::new(error)),
            }),
        }
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Idempotency {
    type Rejection = NoIdempotency;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, NoIdempotency> {
        parts.extensions.get().cloned().ok_or(NoIdempotency(()))
    }
}

impl<S: Send + Sync> OptionalFromRequestParts<S> for Idempotency {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Option<Self>, Infallible> {
        Ok(parts.extensions.get().cloned())
    }
}

/// A handler asked for [`Idempotency`] where no key applied. As a response: 500.
#[derive(Debug, Clone, Copy)]
pub struct NoIdempotency(());

impl fmt::Display for NoIdempotency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            "no idempotency claim stands behind this request; wrap the route in IdempotencyLayer and \
             require a key for its method, or, where keys are optional or runs may be unprotected, \
             take Option<Idempotency>",
        )
    }
}

impl std::error::Error for NoIdempotency {}

impl IntoResponse for NoIdempotency {
    fn into_response(self) -> Response<Body> {
        (StatusCode::INTERNAL_SERVER_ERROR, self.to_string()).into_response()
    }
}

/// A run holds its claim no longer, or cannot know whether it does.
///
/// As a response: 503 with `Retry-After: 1`. Nothing is kept, and the key is left to
/// [`Recovery`](crate::Recovery), since what the run did so far is not known. A handler that knows
/// that it did nothing may answer with [`Retain::Release`](crate::Retain) instead.
#[derive(Debug, Clone)]
pub struct NotOwned {
    unknown: Option<Arc<StoreError>>,
}

impl NotOwned {
    /// Whether the store could not say; else the claim is certainly lost.
    pub fn is_unknown(&self) -> bool {
        self.unknown.is_some()
    }
}

impl fmt::Display for NotOwned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.unknown {
            Some(_) => "the store could not say whether this run still holds its claim",
            None => "this run holds its idempotency claim no longer",
        })
    }
}

impl std::error::Error for NotOwned {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.unknown.as_ref().map(|error| &**error as _)
    }
}

/// Marks a response after which the outcome of its run is unknown.
#[derive(Clone, Copy)]
pub(crate) struct GiveUp;

impl IntoResponse for NotOwned {
    fn into_response(self) -> Response<Body> {
        let retry_after = (header::RETRY_AFTER, HeaderValue::from_static("1"));
        let status = StatusCode::SERVICE_UNAVAILABLE;
        let mut response = (status, [retry_after], self.to_string()).into_response();
        response.extensions_mut().insert(GiveUp);
        response
    }
}

//! Which answers are kept for a retry, and which free the key again.

use std::{convert::Infallible, fmt, sync::Arc};

use axum::response::{IntoResponseParts, ResponseParts};
use http::StatusCode;

/// What becomes of a record once its run has answered.
///
/// A handler may decide for one response by returning this as a response part; it then wins over
/// the layer's [`Retention`]:
///
/// ```
/// use axum::{http::StatusCode, response::IntoResponse};
/// use tower_idempotency::Retain;
///
/// async fn handler() -> impl IntoResponse {
///     // Nothing was done, whatever the status may suggest: let the key be tried again.
///     (StatusCode::BAD_GATEWAY, Retain::Release, "the provider is down for maintenance")
/// }
/// # let response = tokio::runtime::Builder::new_current_thread().build().unwrap()
/// #     .block_on(async { handler().await.into_response() });
/// # assert_eq!(response.extensions().get(), Some(&Retain::Release));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Retain {
    /// Keep the response: every retry is answered with it.
    Keep,
    /// Free the key: nothing happened, and the next request with it runs as new.
    Release,
    /// Remember that it is done, but not the response: a retry is told so, and does not run.
    Tombstone,
    /// Say that the outcome is not known, as when a provider has not answered: the key is left to the
    /// [`resolver`](crate::IdempotencyLayer::resolver) and to [`Recovery`](crate::Recovery), as if the run had
    /// been cut off. In transactional mode nothing was committed then, so the key is free.
    Abandon,
}

/// Marks a response that is to be sent as it comes, however long it takes: its record is a
/// tombstone, written before the first byte goes out. Returned as a response part.
///
/// `text/event-stream`, gRPC and `multipart/x-mixed-replace` need no mark.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Streamed;

impl IntoResponseParts for Retain {
    type Error = Infallible;

    fn into_response_parts(self, mut parts: ResponseParts) -> Result<ResponseParts, Infallible> {
        parts.extensions_mut().insert(self);
        Ok(parts)
    }
}

impl IntoResponseParts for Streamed {
    type Error = Infallible;

    fn into_response_parts(self, mut parts: ResponseParts) -> Result<ResponseParts, Infallible> {
        parts.extensions_mut().insert(self);
        Ok(parts)
    }
}

/// Decides by status what becomes of a record.
///
/// | status | [`standard`](Self::standard) | [`strict`](Self::strict) | [`successes_only`](Self::successes_only) |
/// | --- | --- | --- | --- |
/// | 2xx, 3xx | keep | keep | keep |
/// | 400 404 406 409 412 416 422 423 | release | keep | release |
/// | 401 403 405 411 413 414 415 417 421 425 426 428 429 431 | release | release | release |
/// | 402, 408, 499, other 4xx | keep | keep | release |
/// | 5xx | keep | keep | release |
///
/// A 5xx may hide an effect that happened, so by default it is replayed and not run again.
#[derive(Clone)]
pub struct Retention(Arc<dyn Fn(StatusCode) -> Retain + Send + Sync>);

impl Retention {
    /// The default: what says that the request was refused and nothing happened frees the key;
    /// everything else, and all that is ambiguous, is kept.
    pub fn standard() -> Self {
        Self::new(|status| match status.as_u16() {
            400 | 401 | 403..=406 | 409 | 411..=417 | 421..=423 | 425 | 426 | 428 | 429 | 431 => {
                Retain::Release
            }
            _ => Retain::Keep,
        })
    }

    /// A handler's word is final: only what is said before any handler has looked at the request
    /// (authentication, method, media type, size, rate) frees the key.
    pub fn strict() -> Self {
        Self::new(|status| match status.as_u16() {
            401 | 403 | 405 | 411 | 413..=415 | 417 | 421 | 425 | 426 | 428 | 429 | 431 => {
                Retain::Release
            }
            _ => Retain::Keep,
        })
    }

    /// Only 2xx and 3xx are kept; everything else may run again.
    ///
    /// For handlers that are safe to run again after a failure: those that keep checkpoints and
    /// pass keys on to the services they call.
    pub fn successes_only() -> Self {
        Self::new(|status| match status.as_u16() {
            200..=399 => Retain::Keep,
            _ => Retain::Release,
        })
    }

    /// Your own rule.
    pub fn new(decide: impl Fn(StatusCode) -> Retain + Send + Sync + 'static) -> Self {
        Self(Arc::new(decide))
    }

    /// What becomes of a record whose answer has this status.
    pub fn decide(&self, status: StatusCode) -> Retain {
        (self.0)(status)
    }
}

impl Default for Retention {
    fn default() -> Self {
        Self::standard()
    }
}

impl fmt::Debug for Retention {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let released = (100..600)
            .filter_map(|status| StatusCode::from_u16(status).ok())
            .filter(|status| self.decide(*status) == Retain::Release)
            .map(|status| status.as_u16());
        f.write_str("Retention { release: ")?;
        f.debug_list().entries(released).finish()?;
        f.write_str(" }")
    }
}

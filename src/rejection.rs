//! Every refusal, and how it is told to the client.

use std::{borrow::Cow, sync::Arc};

use axum::body::Body;
use http::{HeaderValue, Response, StatusCode, header};
use serde_json::json;

use crate::{IdempotencyStatus, InvalidKey, UndecodableBody};

/// Where the codes are explained unless [`documentation_url`](crate::IdempotencyLayer::documentation_url)
/// says otherwise.
const DOCUMENTATION: &str =
    "https://docs.rs/tower-idempotency/latest/tower_idempotency/enum.Rejection.html";

/// Why a request was refused. The handler did not run (again).
///
/// Each has a stable code. The codes, and what a client should do:
///
/// ## idempotency_key_required
/// Status 400. Send the header with a fresh unique value per action, the same one on every attempt.
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
/// Status 429 with `Retry-After`. Too many keys are live for this caller. Reserved: nothing answers
/// it yet.
///
/// ## idempotency_body_too_large
/// Status 413. The body is larger than the service reads for a keyed request.
///
/// ## idempotency_body_incomplete
/// Status 400. The body ended early.
///
/// ## idempotency_body_invalid
/// Status 400. The body is not what the service's fingerprint scheme can read.
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
    /// Too many records for one tenant. Reserved: the layer does not answer it yet.
    LimitReached,
    /// More body than is read.
    BodyTooLarge {
        /// The limit in bytes; `None` when it is one set outside of the layer.
        limit: Option<usize>,
    },
    /// The body ended with an error.
    BodyIncomplete,
    /// The fingerprint scheme cannot read the body.
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

    /// The HTTP status, unless the layer is told another one for reuse.
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

/// What a [`Rejection`] is rendered with.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct RejectionContext<'a> {
    /// The status to answer with.
    pub status: StatusCode,
    /// The name of the key's header.
    pub header_name: &'a str,
    /// The refused request's method.
    pub method: &'a str,
    /// The refused request's path, as the client sent it.
    pub path: &'a str,
    /// The refused request's id.
    pub request_id: Option<&'a str>,
    /// The documentation of the service's idempotency, when it is set.
    pub documentation_url: Option<&'a str>,
}

impl<'a> RejectionContext<'a> {
    /// A context for testing a renderer: the key in `idempotency-key`, no request id, no
    /// documentation.
    pub fn new(status: StatusCode, method: &'a str, path: &'a str) -> Self {
        Self {
            status,
            header_name: "idempotency-key",
            method,
            path,
            request_id: None,
            documentation_url: None,
        }
    }
}

/// Renders refusals in the service's own shape.
///
/// All of the response is the renderer's: it sets [`RejectionContext::status`], and `Retry-After`
/// where [`Rejection::retry_after_seconds`] gives a number. The layer only adds the
/// [`IdempotencyStatus`] extension.
pub trait RenderRejection: Send + Sync + 'static {
    /// The response for this refusal.
    fn render(&self, rejection: &Rejection, context: &RejectionContext<'_>) -> Response<Body>;
}

impl<F> RenderRejection for F
where
    F: Fn(&Rejection, &RejectionContext<'_>) -> Response<Body> + Send + Sync + 'static,
{
    fn render(&self, rejection: &Rejection, context: &RejectionContext<'_>) -> Response<Body> {
        self(rejection, context)
    }
}

/// `application/problem+json` (RFC 9457), the default rendering.
///
/// Members: `type` (documentation URL and `#code`), `title`, `status`, `detail`, `code`,
/// `retryable`, `retry_after_seconds` (null when not retryable), `new_key_safe`, and
/// `original_request_id` and `original_status` where known. `Retry-After` stands exactly where
/// `retryable` is true. With a documentation URL there is also `Link: <…>; rel="describedby"`.
#[derive(Debug, Clone, Copy, Default)]
pub struct ProblemJson;

impl RenderRejection for ProblemJson {
    fn render(&self, rejection: &Rejection, context: &RejectionContext<'_>) -> Response<Body> {
        let retry_after = rejection.retry_after_seconds();
        let documentation = context.documentation_url.unwrap_or(DOCUMENTATION);
        let mut problem = json!({
            "type": format!("{documentation}#{}", rejection.code()),
            "title": title(rejection),
            "status": context.status.as_u16(),
            "detail": rejection.detail(context),
            "code": rejection.code(),
            "retryable": retry_after.is_some(),
            "retry_after_seconds": retry_after,
            "new_key_safe": rejection.new_key_safe(),
        });
        if let Some(id) = rejection.original_request_id() {
            problem["original_request_id"] = json!(id);
        }
        if let Rejection::ResponseNotRetained {
            status: Some(status),
            ..
        } = rejection
        {
            problem["original_status"] = json!(status.as_u16());
        }

        let mut response = Response::new(Body::from(problem.to_string()));
        *response.status_mut() = context.status;
        let headers = response.headers_mut();
        headers.insert(
            header::CONTENT_TYPE,
            HeaderValue::from_static("application/problem+json"),
        );
        if let Some(seconds) = retry_after {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        let link = context
            .documentation_url
            .and_then(|url| HeaderValue::try_from(format!("<{url}>; rel=\"describedby\"")).ok());
        if let Some(link) = link {
            headers.insert(header::LINK, link);
        }
        response
    }
}

fn title(rejection: &Rejection) -> &'static str {
    match rejection {
        Rejection::KeyRequired => "Idempotency key required",
        Rejection::KeyInvalid(_) => "Idempotency key invalid",
        Rejection::ScopeUnknown => "Idempotency scope unknown",
        Rejection::KeyReused { .. } => "Idempotency key reused",
        Rejection::InFlight { .. } => "Request in flight",
        Rejection::ResponseNotRetained { .. } => "Response not retained",
        Rejection::OutcomeUnknown { .. } => "Outcome unknown",
        Rejection::StoreUnavailable => "Idempotency store unavailable",
        Rejection::TransactionFailed => "Transaction failed",
        Rejection::TransactionMisused(_) => "Transaction misused",
        Rejection::Overloaded => "Too many runs",
        Rejection::LimitReached => "Too many idempotency keys",
        Rejection::BodyTooLarge { .. } => "Body too large",
        Rejection::BodyIncomplete => "Body incomplete",
        Rejection::BodyInvalid(_) => "Body invalid",
    }
}

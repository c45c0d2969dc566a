//! How a refusal is told to the client.

use std::{fmt, sync::Arc};

use axum::body::Body;
use http::{HeaderValue, Response, StatusCode, header};
use serde_json::json;

use crate::Rejection;

/// Where the codes are explained unless [`documentation_url`](crate::IdempotencyLayer::documentation_url)
/// says otherwise.
pub(crate) const DOCUMENTATION: &str =
    "https://docs.rs/tower-idempotency/latest/tower_idempotency/enum.Rejection.html";

/// What a [`Rejection`] is rendered with.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct RejectionContext<'a> {
    /// The status to answer with.
    pub status: StatusCode,
    /// The name of the key's header.
    pub header_name: &'a str,
    /// Where the key is expected in the body instead, as a JSON Pointer; see
    /// [`key_pointer`](crate::IdempotencyLayer::key_pointer).
    pub key_pointer: Option<&'a str>,
    /// The refused request's method.
    pub method: &'a str,
    /// The refused request's path, as the client sent it.
    pub path: &'a str,
    /// The refused request's id.
    pub request_id: Option<&'a str>,
    /// The documentation of the service's idempotency, when it is set.
    pub documentation_url: Option<&'a str>,
    /// When to come back, where the layer has its own mind.
    pub(crate) retry_after: Option<u64>,
}

impl<'a> RejectionContext<'a> {
    /// A context for testing a renderer: the key in `idempotency-key`, no request id, no
    /// documentation, and to be sent again when [`Rejection::retry_after_seconds`] says.
    pub fn new(status: StatusCode, method: &'a str, path: &'a str) -> Self {
        Self {
            status,
            header_name: "idempotency-key",
            key_pointer: None,
            method,
            path,
            request_id: None,
            documentation_url: None,
            retry_after: None,
        }
    }

    /// The same, to be sent again after so many seconds whatever the rejection: as under an
    /// [`Audience`](crate::Audience) that has its own mind about it.
    ///
    /// # Panics
    ///
    /// When zero.
    ///
    /// ```
    /// use axum::http::StatusCode;
    /// use tower_idempotency::{ProblemJson, Rejection, RejectionContext, RenderRejection};
    ///
    /// let unknown = Rejection::OutcomeUnknown { original_request_id: None };
    /// // What a sender of events is told.
    /// let context = RejectionContext::new(StatusCode::SERVICE_UNAVAILABLE, "POST", "/webhooks").retry_after(60);
    /// assert_eq!(context.retry_after_seconds(&unknown), Some(60));
    /// assert_eq!(ProblemJson.render(&unknown, &context).headers()["retry-after"], "60");
    /// ```
    #[must_use]
    pub fn retry_after(mut self, seconds: u64) -> Self {
        assert!(seconds > 0, "retry_after must be longer than zero");
        self.retry_after = Some(seconds);
        self
    }

    /// After how many seconds the refused request may be sent again, `None` where that cannot help: what
    /// [`Rejection::retry_after_seconds`] says, and what the layer's [`Audience`](crate::Audience) adds to it.
    pub fn retry_after_seconds(&self, rejection: &Rejection) -> Option<u64> {
        self.retry_after.or(rejection.retry_after_seconds())
    }
}

/// Renders refusals in the service's own shape.
///
/// All of the response is the renderer's: it sets [`RejectionContext::status`], and `Retry-After`
/// where [`RejectionContext::retry_after_seconds`] gives a number. The layer only adds the
/// [`IdempotencyStatus`](crate::IdempotencyStatus) extension.
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
        let retry_after = context.retry_after_seconds(rejection);
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

        respond("application/problem+json", &problem, rejection, context)
    }
}

/// The envelope of payment gateways, as `application/json`:
///
/// ```json
/// {"error": {
///   "code": "idempotency_key_reused", "type": "invalid_request_error", "message": "…",
///   "retryable": false, "retry_after_seconds": null, "request_id": "req_2",
///   "details": {"original_request_id": "req_1"}
/// }}
/// ```
///
/// `type` is the same for all. `retry_after_seconds` is null where sending again cannot help, `request_id`
/// where the request has none, or where its run was ended by [`drain`](crate::IdempotencyLayer::drain). `details` stands only where there is something to say:
/// `original_request_id` when a key is reused, `original_status` when the first answer was not kept.
/// `Retry-After` and `Link` are as with [`ProblemJson`].
///
/// ```
/// use axum::http::StatusCode;
/// use tower_idempotency::{ErrorEnvelope, Rejection, RejectionContext, RenderRejection};
///
/// let envelope = ErrorEnvelope::new().member("message_th", |rejection| match rejection {
///     Rejection::KeyRequired => Some("ต้องส่ง Idempotency-Key".to_owned()),
///     _ => None,
/// });
/// let context = RejectionContext::new(StatusCode::BAD_REQUEST, "POST", "/deposits");
/// let response = envelope.render(&Rejection::KeyRequired, &context);
/// assert_eq!(response.status(), StatusCode::BAD_REQUEST);
/// assert_eq!(response.headers()["content-type"], "application/json");
/// ```
#[derive(Clone, Default)]
pub struct ErrorEnvelope {
    members: Vec<(&'static str, Arc<Member>)>,
}

type Member = dyn Fn(&Rejection) -> Option<String> + Send + Sync;

impl ErrorEnvelope {
    /// The members above and no others.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a text beside them, such as the message in another language. `None` leaves it out.
    ///
    /// # Panics
    ///
    /// When there is a member of that name already.
    #[must_use]
    pub fn member(
        mut self,
        name: &'static str,
        text: impl Fn(&Rejection) -> Option<String> + Send + Sync + 'static,
    ) -> Self {
        const OWN: [&str; 7] = [
            "code",
            "type",
            "message",
            "retryable",
            "retry_after_seconds",
            "request_id",
            "details",
        ];
        let added = self.members.iter().any(|(added, _)| *added == name);
        assert!(
            !added && !OWN.contains(&name),
            "the error envelope has a member {name} already"
        );
        self.members.push((name, Arc::new(text)));
        self
    }
}

impl RenderRejection for ErrorEnvelope {
    fn render(&self, rejection: &Rejection, context: &RejectionContext<'_>) -> Response<Body> {
        let retry_after = context.retry_after_seconds(rejection);
        let mut error = json!({
            "code": rejection.code(),
            "type": "invalid_request_error",
            "message": rejection.detail(context),
            "retryable": retry_after.is_some(),
            "retry_after_seconds": retry_after,
            "request_id": context.request_id,
        });
        match rejection {
            Rejection::KeyReused {
                original_request_id: Some(id),
            } => error["details"] = json!({ "original_request_id": &**id }),
            Rejection::ResponseNotRetained {
                status: Some(status),
                ..
            } => error["details"] = json!({ "original_status": status.as_u16() }),
            _ => {}
        }
        for (name, text) in &self.members {
            if let Some(text) = text(rejection) {
                error[*name] = text.into();
            }
        }
        let envelope = json!({ "error": error });
        respond("application/json", &envelope, rejection, context)
    }
}

impl fmt::Debug for ErrorEnvelope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let members = self.members.iter().map(|(name, _)| name);
        f.write_str("ErrorEnvelope ")?;
        f.debug_list().entries(members).finish()
    }
}

/// What all renderings have in common: the status, when to come back, and where it is explained.
fn respond(
    content_type: &'static str,
    body: &serde_json::Value,
    rejection: &Rejection,
    context: &RejectionContext<'_>,
) -> Response<Body> {
    let mut response = Response::new(Body::from(body.to_string()));
    *response.status_mut() = context.status;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    if let Some(seconds) = context.retry_after_seconds(rejection) {
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

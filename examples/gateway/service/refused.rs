//! Every answer of the gateway's own that is no success, in the envelope of the layer's refusals.

use axum::{
    body::Body,
    extract::{Request, rejection::JsonRejection},
    http::{HeaderValue, StatusCode, header},
    middleware::Next,
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};
use tower_idempotency::{Retain, Retention, TxError};

use super::{request_id, thai};

pub enum Refused {
    Because(Because),
    /// A statement in the handler's transaction.
    Failed(TxError),
}

/// What [`render`] tells the client.
#[derive(Clone)]
pub struct Because {
    status: StatusCode,
    code: &'static str,
    message: String,
    retry_after_seconds: Option<u64>,
    details: Option<Value>,
}

impl Because {
    fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self {
            status,
            code,
            message: message.into(),
            retry_after_seconds: None,
            details: None,
        }
    }
}

impl Refused {
    fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self::Because(Because::new(status, code, message))
    }

    pub fn unauthorized() -> Self {
        let message = "Send a credential that is in force as Authorization: Bearer.";
        Self::new(StatusCode::UNAUTHORIZED, "unauthorized", message)
    }

    pub fn signature_invalid() -> Self {
        let message = "PG-Signature is not that of this request. It is over method, path with query, Idempotency-Key, PG-Nonce and the SHA-256 of the body, as they are sent.";
        Self::new(StatusCode::UNAUTHORIZED, "signature_invalid", message)
    }

    pub fn nonce_replayed() -> Self {
        let message =
            "This PG-Nonce was seen before. Make a new one for each attempt, and keep the key.";
        Self::new(StatusCode::UNAUTHORIZED, "nonce_replayed", message)
    }

    pub fn nonce_too_long() -> Self {
        let message = "PG-Nonce may have at most 128 bytes.";
        Self::new(StatusCode::BAD_REQUEST, "request_invalid", message)
    }

    /// Nobody has looked at the key.
    pub fn too_fast() -> Self {
        let message = "Too many requests. Send the same request with the same key again later.";
        let because = Because::new(StatusCode::TOO_MANY_REQUESTS, "rate_limited", message);
        Self::Because(Because {
            retry_after_seconds: Some(1),
            ..because
        })
    }

    pub fn body_too_large(limit: usize) -> Self {
        let message = format!("The body may have at most {limit} bytes.");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", message)
    }

    pub fn body_incomplete() -> Self {
        let message = "The body ended early. Send the request again with the same key.";
        Self::new(StatusCode::BAD_REQUEST, "body_incomplete", message)
    }

    pub fn image_too_large(limit: usize) -> Self {
        let message = format!("The image may have at most {limit} bytes.");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "image_too_large", message)
    }

    /// Also for what is another merchant's: that it exists is not for this one to know.
    pub fn missing() -> Self {
        let message = "There is no such deposit order.";
        Self::new(StatusCode::NOT_FOUND, "not_found", message)
    }

    pub fn path() -> Self {
        let message = "There is no such path. All begin with /v1/pay/deposits.";
        Self::new(StatusCode::NOT_FOUND, "not_found", message)
    }

    pub fn method() -> Self {
        let message = "This path does not have this method. Allow names those that it has.";
        let status = StatusCode::METHOD_NOT_ALLOWED;
        Self::new(status, "method_not_allowed", message)
    }

    pub fn upload_token() -> Self {
        let message =
            "Send the upload token of this deposit order as PG-Upload-Token, before it expires.";
        Self::new(StatusCode::FORBIDDEN, "upload_token_invalid", message)
    }

    /// Names the member, but not what was in it.
    pub fn member(name: &'static str, must_be: &str) -> Self {
        let message = format!("{name} must be {must_be}.");
        let because = Because::new(StatusCode::UNPROCESSABLE_ENTITY, "request_invalid", message);
        Self::Because(Because {
            details: Some(json!({ "member": name })),
            ..because
        })
    }

    pub fn reference_needed() -> Self {
        let message = "Name the deposit orders: ?merchant_reference=…";
        Self::new(StatusCode::BAD_REQUEST, "request_invalid", message)
    }

    pub fn slip_unreadable() -> Self {
        let message = "The slip cannot be read.";
        Self::new(StatusCode::BAD_REQUEST, "request_invalid", message)
    }

    /// The layer has lost its record of the key, and the row of the action is there.
    pub fn already_done(id: &str) -> Self {
        let message = "This key has made something already that stands. Look it up.";
        let because = Because::new(StatusCode::CONFLICT, "already_done", message);
        Self::Because(Because {
            details: Some(json!({ "id": id })),
            ..because
        })
    }
}

const NO_JSON_TYPE: &str = "Send the order as JSON, and say so: Content-Type: application/json.";
const NO_JSON: &str = "The body is not JSON. An order is one JSON object.";
const NO_ORDER: &str = "The body is not an order. It must be a JSON object of merchant_reference (a string), amount_minor (a whole number), currency (a string) and client (an object of ip, an IP address as a string), each of them once.";

/// An order that cannot be read. The rejection's own text is not shown: it quotes the body, which may have a secret
/// in the wrong place.
impl From<JsonRejection> for Refused {
    fn from(rejection: JsonRejection) -> Self {
        let status = rejection.status();
        let message = match rejection {
            JsonRejection::MissingJsonContentType(_) => NO_JSON_TYPE,
            JsonRejection::JsonSyntaxError(_) => NO_JSON,
            JsonRejection::JsonDataError(_) => NO_ORDER,
            // The body was read by the authentication, whole and within its limit.
            _ => return Self::body_incomplete(),
        };
        Self::new(status, "request_invalid", message)
    }
}

impl From<TxError> for Refused {
    fn from(error: TxError) -> Self {
        Self::Failed(error)
    }
}

impl From<sqlx::Error> for Refused {
    fn from(error: sqlx::Error) -> Self {
        Self::Failed(error.into())
    }
}

const BUSY: &str = "The gateway is busy, and nothing was done. Send the same request with the same key again after the time given.";
const FAULT: &str = "The gateway is at fault, and nothing was done. Its operator has been told.";

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        let (mut response, because) = match self {
            Self::Because(because) => (because.status.into_response(), because),
            Self::Failed(error) => {
                let because = match error.is_passing() {
                    true => Because {
                        retry_after_seconds: Some(1),
                        ..Because::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable", BUSY)
                    },
                    false => Because::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", FAULT),
                };
                // With what the layer wants to know of it.
                let response = error.into_response();
                (response, because)
            }
        };
        // In a transaction the layer keeps no refusal unless it is told to. The rule of this gateway is that its
        // word is final: what was refused under a key stays refused under it, and a corrected order has a key of
        // its own. Only what failed on our side is not kept; it was rolled back.
        let is_ours = because.status.is_server_error();
        let retain = Retention::strict().decide(because.status);
        response.extensions_mut().insert(match is_ours {
            true => Retain::Release,
            false => retain,
        });
        response.extensions_mut().insert(because);
        response
    }
}

/// Puts refusals into their envelope, with the request's id. Inside the layer for those of the handlers, so that
/// they are recorded as they go out; outside for the others.
pub async fn render(request: Request, next: Next) -> Response {
    let id = request.headers().get(request_id::HEADER).cloned();
    let mut response = next.run(request).await;
    let Some(because) = response.extensions_mut().remove::<Because>() else {
        return response;
    };
    let id = id.as_ref().and_then(|id| id.to_str().ok());
    let mut error = json!({
        "code": because.code,
        "type": kind(because.status),
        "message": because.message,
        "message_th": thai::message(because.code),
        "retryable": because.retry_after_seconds.is_some(),
        "retry_after_seconds": because.retry_after_seconds,
        "request_id": id,
    });
    if let Some(details) = because.details {
        error["details"] = details;
    }
    let headers = response.headers_mut();
    headers.remove(header::CONTENT_LENGTH);
    let json = HeaderValue::from_static("application/json");
    headers.insert(header::CONTENT_TYPE, json);
    if let Some(seconds) = because.retry_after_seconds {
        headers.insert(header::RETRY_AFTER, seconds.into());
    }
    if because.status == StatusCode::UNAUTHORIZED {
        let bearer = HeaderValue::from_static("Bearer");
        headers.insert(header::WWW_AUTHENTICATE, bearer);
    }
    *response.body_mut() = Body::from(json!({ "error": error }).to_string());
    response
}

fn kind(status: StatusCode) -> &'static str {
    match status {
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => "authentication_error",
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        status if status.is_server_error() => "api_error",
        _ => "invalid_request_error",
    }
}

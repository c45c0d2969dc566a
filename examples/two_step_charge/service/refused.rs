//! Every answer that is no charge.

use axum::{
    Json,
    extract::rejection::JsonRejection,
    http::{HeaderValue, StatusCode, header::RETRY_AFTER},
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};
use tower_idempotency::{CheckpointError, NoDownstreamSecret, Retain};

use super::gateway::Unclear;

/// `{"error": "…"}`, and the key is free again, unless it is said otherwise below.
pub enum Refused {
    Malformed(JsonRejection),
    Field(&'static str),
    /// The key has a charge, and it is another one.
    Reused,
    /// Nothing was written, so the same request is judged anew once there is money.
    Exhausted,
    Nobody,
    Missing,
    /// The charge with this number is reserved, and nobody knows whether the provider charged.
    Unclear(i64, Unclear),
    Failed(sqlx::Error),
    /// What the provider said could not be noted.
    Unnoted(CheckpointError),
    NoSecret(NoDownstreamSecret),
}

impl From<sqlx::Error> for Refused {
    fn from(error: sqlx::Error) -> Self {
        Self::Failed(error)
    }
}

impl From<CheckpointError> for Refused {
    fn from(error: CheckpointError) -> Self {
        Self::Unnoted(error)
    }
}

impl From<NoDownstreamSecret> for Refused {
    fn from(error: NoDownstreamSecret) -> Self {
        Self::NoSecret(error)
    }
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        let (status, body) = match self {
            Self::Malformed(rejection) => {
                let body = json!({ "error": "malformed", "message": rejection.body_text() });
                (rejection.status(), body)
            }
            Self::Field(message) => {
                let body = json!({ "error": "invalid", "message": message });
                (StatusCode::UNPROCESSABLE_ENTITY, body)
            }
            Self::Reused => (StatusCode::CONFLICT, json!({ "error": "key_reused" })),
            Self::Exhausted => (StatusCode::CONFLICT, json!({ "error": "budget_exhausted" })),
            Self::Nobody => (StatusCode::FORBIDDEN, json!({ "error": "client_unknown" })),
            Self::Missing => (StatusCode::NOT_FOUND, json!({ "error": "not_found" })),
            Self::Unclear(charge, unclear) => without_verdict(charge, &unclear),
            Self::Failed(error) => {
                tracing::error!(%error, "the ledger is out of reach");
                (
                    StatusCode::SERVICE_UNAVAILABLE,
                    json!({ "error": "send_it_again" }),
                )
            }
            // These say by themselves that the outcome is not known: the key is left to the resolver.
            Self::Unnoted(error) => return error.into_response(),
            Self::NoSecret(error) => return error.into_response(),
        };
        // This frees the key even where money may have moved, and so that the charge goes on: the state of
        // an action is in its row, not in this answer. A retry finds the row, asks the provider under the
        // same downstream key, and settles. Kept, as a 5xx is by default, the answer would be replayed to
        // every retry and nobody would settle.
        //
        // It is said aloud for the other statuses too: after a run that was cut off, the layer takes a
        // handler's word for what is known, but not a rule by status.
        let mut response = (status, Retain::Release, Json(body)).into_response();
        if status.is_server_error() {
            let soon = HeaderValue::from_static("1");
            response.headers_mut().insert(RETRY_AFTER, soon);
        }
        response
    }
}

fn without_verdict(charge: i64, unclear: &Unclear) -> (StatusCode, Value) {
    tracing::warn!(charge, %unclear, "the provider gave no verdict");
    let (status, error) = match unclear {
        Unclear::Silent(_) => (StatusCode::SERVICE_UNAVAILABLE, "provider_silent"),
        Unclear::Incomprehensible(_) => (StatusCode::BAD_GATEWAY, "provider_incomprehensible"),
    };
    let id = format!("ch_{charge}");
    (
        status,
        json!({ "error": error, "charge_id": id, "status": "reserved" }),
    )
}

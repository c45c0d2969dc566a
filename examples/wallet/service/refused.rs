//! Every answer that is no success.

use axum::{
    Json,
    extract::rejection::JsonRejection,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use serde_json::json;
use tower_idempotency::TxError;

/// `{"error": "…"}`, or what the layer makes of a failed statement. Whatever it is, the transaction is
/// rolled back and the key is free again.
pub enum Refused {
    Because(StatusCode, &'static str),
    Malformed(JsonRejection),
    Failed(TxError),
}

impl Refused {
    pub fn missing() -> Self {
        Self::Because(StatusCode::NOT_FOUND, "not_found")
    }

    /// A decline is not the last word. Nothing of it is written, so the same request under the same key
    /// is judged anew, and succeeds once there is money.
    ///
    /// Where a decline must stay one, because somebody was told so, return
    /// [`Retain::Keep`](tower_idempotency::Retain::Keep) beside it: the transaction is rolled back all the
    /// same, and the answer is recorded by a write of its own.
    pub fn insufficient() -> Self {
        Self::Because(StatusCode::PAYMENT_REQUIRED, "insufficient_funds")
    }

    pub fn conflict(error: &'static str) -> Self {
        Self::Because(StatusCode::CONFLICT, error)
    }

    pub fn unprocessable(error: &'static str) -> Self {
        Self::Because(StatusCode::UNPROCESSABLE_ENTITY, error)
    }
}

impl From<sqlx::Error> for Refused {
    fn from(error: sqlx::Error) -> Self {
        Self::Failed(error.into())
    }
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        match self {
            Self::Because(status, error) => {
                (status, Json(json!({ "error": error }))).into_response()
            }
            Self::Malformed(rejection) => {
                let body = json!({ "error": "invalid_request", "message": rejection.body_text() });
                (rejection.status(), Json(body)).into_response()
            }
            Self::Failed(error) => {
                // Not what the database said: that may hold values.
                if !error.is_passing() {
                    tracing::error!(%error, "a statement was refused");
                }
                // After a conflict with another transaction nobody sees this answer: the layer runs the
                // handler again.
                error.into_response()
            }
        }
    }
}

//! What the body of a refusal says.

use http::{HeaderMap, StatusCode, header};
use serde_json::Value;

/// The members this client understands, of a problem (RFC 9457) or of the envelope `{"error": {…}}`.
#[derive(Debug, Default)]
pub(super) struct Refusal {
    pub(super) code: Option<String>,
    pub(super) retryable: Option<bool>,
    pub(super) retry_after_seconds: Option<f64>,
    pub(super) original_status: Option<StatusCode>,
}

impl Refusal {
    /// Whatever cannot be read says nothing.
    pub(super) fn read(headers: &HeaderMap, body: &[u8]) -> Self {
        if !is_json(headers) {
            return Self::default();
        }
        let Ok(said) = serde_json::from_slice::<Value>(body) else {
            return Self::default();
        };
        // The envelope goes first: what else stands beside its `error` is not ours.
        let said = match &said["error"] {
            error @ Value::Object(_) => error,
            _ => &said,
        };
        let original_status = match &said["original_status"] {
            Value::Null => &said["details"]["original_status"],
            status => status,
        };
        let original_status = original_status
            .as_u64()
            .and_then(|status| u16::try_from(status).ok());
        Self {
            code: said["code"].as_str().map(str::to_owned),
            retryable: said["retryable"].as_bool(),
            retry_after_seconds: said["retry_after_seconds"].as_f64(),
            original_status: original_status.and_then(|status| StatusCode::from_u16(status).ok()),
        }
    }
}

/// `application/json`, `application/problem+json`, and whatever else ends in `+json`.
fn is_json(headers: &HeaderMap) -> bool {
    let kind = headers.get(header::CONTENT_TYPE);
    let Some(kind) = kind.and_then(|kind| kind.to_str().ok()) else {
        return false;
    };
    let kind = kind.split(';').next().unwrap_or_default().trim();
    let kind = kind.to_ascii_lowercase();
    kind == "application/json" || kind.ends_with("+json")
}

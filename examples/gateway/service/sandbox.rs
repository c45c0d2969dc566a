//! Ways to see what is otherwise hard to bring about. A real gateway has them in its sandbox only.

use std::{convert::Infallible, time::Duration};

use axum::{
    body::{Body, to_bytes},
    extract::{FromRequestParts, Request, State},
    http::{HeaderMap, Method, request::Parts},
    middleware::Next,
    response::Response,
};
use serde::Deserialize;
use tower_idempotency::{IdempotencyLayer, KeyFormat, Rejection};

use super::{DEPOSIT_BODY, Records};

/// An order of this amount is answered as if its key had been used for another one.
const REUSED: i64 = 11_500;

#[derive(Deserialize)]
struct Amount {
    amount_minor: i64,
}

/// The layer's own refusal, without its cause. Just outside the layer, so that nothing is recorded and the key
/// is free afterwards; a request without a key, or with what is none, is not one that the layer would refuse for this.
pub async fn reused_on_demand(
    State(layer): State<IdempotencyLayer<Records>>,
    request: Request,
    next: Next,
) -> Response {
    if !has_key(request.headers()) || request.method() != Method::POST {
        return next.run(request).await;
    }
    let (head, body) = request.into_parts();
    // It was read by the authentication, so this only takes it out.
    let Ok(body) = to_bytes(body, DEPOSIT_BODY).await else {
        return layer.refusal(&head, &Rejection::BodyIncomplete);
    };
    let order = serde_json::from_slice::<Amount>(&body);
    if order.is_ok_and(|order| order.amount_minor == REUSED) {
        let original_request_id = Some("req_sandbox".into());
        let reused = Rejection::KeyReused {
            original_request_id,
        };
        return layer.refusal(&head, &reused);
    }
    let request = Request::from_parts(head, Body::from(body));
    next.run(request).await
}

/// Whether the layer would take it: one line, in the format of its profile.
fn has_key(headers: &HeaderMap) -> bool {
    let mut lines = headers.get_all("idempotency-key").iter();
    let (Some(line), None) = (lines.next(), lines.next()) else {
        return false;
    };
    KeyFormat::any().parse(line.as_bytes()).is_ok()
}

/// The header `X-Simulate-Delay-Ms`: time to send a duplicate, to hang up, or to pull the plug. Handlers wait
/// for it after the effect and before the answer, with their transaction open.
pub struct Delay(Duration);

/// Less than the 5 s after which the layer takes a transaction away.
const LONGEST_MS: u64 = 4_000;

impl Delay {
    pub async fn take(self) {
        if !self.0.is_zero() {
            tokio::time::sleep(self.0).await;
        }
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Delay {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        let value = parts.headers.get("x-simulate-delay-ms");
        let millis = value.and_then(|value| value.to_str().ok()?.parse().ok());
        let millis: u64 = millis.unwrap_or_default();
        Ok(Self(Duration::from_millis(millis.min(LONGEST_MS))))
    }
}

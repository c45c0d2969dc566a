//! The proof that a customer has paid.

use axum::{
    Extension, Json,
    extract::{FromRequest, Request, State},
    http::StatusCode,
    middleware::Next,
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use serde::Serialize;
use tower_idempotency::Idempotency;

use super::{
    Service, Tx,
    deposits::{DepositId, now, rfc3339},
    ledger::{self, Action},
    merchants::Merchant,
    refused::Refused,
    sandbox::Delay,
    slip::{MAX_IMAGE, Slip},
    token,
};

/// In a header, since paths with their queries stand in the logs of everybody on the way.
pub const TOKEN_HEADER: &str = "pg-upload-token";

const LONGEST_NOTE: usize = 1_000;

/// Lets pass who has the order's upload token. A credential, so it is looked at outside the layer: a replay is for
/// its bearer as well.
pub async fn check_token(
    State(service): State<Service>,
    Extension(merchant): Extension<Merchant>,
    DepositId(id): DepositId,
    request: Request,
    next: Next,
) -> Result<Response, Refused> {
    let deposit = ledger::find(&service.ledger, &merchant, &id).await?;
    let deposit = deposit.ok_or_else(Refused::missing)?;
    let token = request.headers().get(TOKEN_HEADER);
    let token = token.ok_or_else(Refused::upload_token)?;
    let is_right = token::hash(token.as_bytes())[..] == deposit.upload_token;
    if !is_right || now() >= deposit.upload_expires_at() {
        return Err(Refused::upload_token());
    }
    Ok(next.run(request).await)
}

/// Takes a slip in. The layer has read it as well, for its fingerprint, so what cannot be read does not come here.
pub async fn upload(
    State(service): State<Service>,
    Extension(merchant): Extension<Merchant>,
    DepositId(deposit): DepositId,
    idempotency: Idempotency,
    delay: Delay,
    mut tx: Tx,
    slip: Slip,
) -> Result<Response, Refused> {
    let now = now();
    let id = format!("slip_{:016x}", rand::random::<u64>());
    let action = Action {
        merchant: &merchant,
        key: idempotency.key().as_bytes(),
        at: now,
        ttl: service.ttl,
    };
    let row = ledger::Slip {
        id: &id,
        deposit: &deposit,
        note: slip.note.as_deref(),
        content_type: slip.content_type,
        image: &slip.image,
    };
    ledger::take_in(&mut tx, action, &row).await?;
    delay.take().await;

    let view = View {
        id: &id,
        object: "slip",
        deposit_order: &deposit,
        note: slip.note.as_deref(),
        content_type: slip.content_type,
        bytes: slip.image.len(),
        received_at: rfc3339(now),
    };
    Ok((StatusCode::CREATED, Json(view)).into_response())
}

/// A slip as its merchant sees it.
#[derive(Serialize)]
struct View<'a> {
    id: &'a str,
    object: &'static str,
    deposit_order: &'a str,
    note: Option<&'a str>,
    content_type: &'static str,
    bytes: usize,
    received_at: String,
}

impl<S: Send + Sync> FromRequest<S> for Slip {
    type Rejection = Refused;

    async fn from_request(request: Request, state: &S) -> Result<Self, Refused> {
        let headers = request.headers().clone();
        let body = Bytes::from_request(request, state).await;
        let body = body.map_err(|_| Refused::body_too_large(super::SLIP_BODY))?;
        let slip = Self::read(&headers, &body).map_err(|_| Refused::slip_unreadable())?;
        if slip.image.len() > MAX_IMAGE {
            return Err(Refused::image_too_large(MAX_IMAGE));
        }
        if slip
            .note
            .as_ref()
            .is_some_and(|note| note.len() > LONGEST_NOTE)
        {
            return Err(Refused::member("note", "at most 1000 bytes"));
        }
        Ok(slip)
    }
}

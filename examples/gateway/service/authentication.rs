//! What every request has to get past before anybody looks at its key.

use axum::{
    body::{Body, to_bytes},
    extract::{Request, State},
    middleware::Next,
    response::Response,
};
use http_body_util::LengthLimitError;

use super::{
    merchants::{Credentials, Merchant},
    nonces::{MAX_NONCE, Nonces},
    rate::RateLimit,
    refused::Refused,
    signature::{self, NONCE, SIGNATURE},
};

const SIMULATE: &str = "x-simulate-rate-limit";

#[derive(Clone)]
pub struct Authentication {
    pub credentials: Credentials,
    pub nonces: Nonces,
    pub rate: RateLimit,
    /// How many bytes of a body are read.
    body: usize,
}

impl Authentication {
    pub fn new(credentials: Credentials, nonces: Nonces, rate: RateLimit) -> Self {
        let body = super::DEPOSIT_BODY;
        Self {
            credentials,
            nonces,
            rate,
            body,
        }
    }

    pub fn reading_at_most(self, body: usize) -> Self {
        Self { body, ..self }
    }
}

/// Lets a request pass as its merchant's.
///
/// The order matters. The credential costs nothing to look at. The rate comes before everything that costs
/// more, and before the nonce: who was too fast may send the very same bytes again. The nonce is remembered
/// last, once the request is known to be the merchant's own: or anybody could use nonces up for others.
pub async fn authenticate(
    State(authentication): State<Authentication>,
    request: Request,
    next: Next,
) -> Result<Response, Refused> {
    let merchant = authentication.credentials.whose(request.headers());
    let merchant = merchant.ok_or_else(Refused::unauthorized)?;
    let simulated = request.headers().get(SIMULATE);
    let simulated = simulated.is_some_and(|value| value == "1");
    if simulated || !authentication.rate.admits(merchant.id) {
        return Err(Refused::too_fast());
    }
    // The signature is over the whole body, and the layer wants it whole as well.
    let (mut head, body) = request.into_parts();
    let body = to_bytes(body, authentication.body).await;
    let body = body.map_err(|error| unread(&error, authentication.body))?;

    let signature = signature::lines(&head.headers, SIGNATURE);
    let is_signed = head.headers.contains_key(SIGNATURE);
    if is_signed && !signature::is_valid(&signature, merchant.secret, &head, &body) {
        return Err(Refused::signature_invalid());
    }
    let nonce = signature::lines(&head.headers, NONCE);
    if !nonce.is_empty() {
        check_nonce(&authentication.nonces, &merchant, &nonce).await?;
    }
    head.extensions.insert(merchant);
    let request = Request::from_parts(head, Body::from(body));
    Ok(next.run(request).await)
}

async fn check_nonce(nonces: &Nonces, merchant: &Merchant, nonce: &[u8]) -> Result<(), Refused> {
    if nonce.len() > MAX_NONCE {
        return Err(Refused::nonce_too_long());
    }
    match nonces.remember(merchant.id, nonce).await? {
        true => Ok(()),
        false => Err(Refused::nonce_replayed()),
    }
}

fn unread(error: &axum::Error, limit: usize) -> Refused {
    use std::error::Error;
    match error.source() {
        Some(source) if source.is::<LengthLimitError>() => Refused::body_too_large(limit),
        _ => Refused::body_incomplete(),
    }
}

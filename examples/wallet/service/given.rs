//! What callers send.

use axum::{
    Json,
    extract::{FromRequest, Request},
};
use serde::{Deserialize, de::DeserializeOwned};

use super::refused::Refused;

/// A JSON body, refused as everything here is refused.
pub struct Given<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Given<T> {
    type Rejection = Refused;

    async fn from_request(request: Request, state: &S) -> Result<Self, Refused> {
        let body = Json::from_request(request, state).await;
        let Json(body) = body.map_err(Refused::Malformed)?;
        Ok(Self(body))
    }
}

/// Satang, the hundredth of a baht, from 1 to a thousand million baht. Never a fraction: sums of money are
/// whole numbers of the smallest coin.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(try_from = "i64")]
pub struct Amount(pub i64);

const MOST: i64 = 100_000_000_000;

impl TryFrom<i64> for Amount {
    type Error = &'static str;

    fn try_from(satang: i64) -> Result<Self, Self::Error> {
        let is_sane = (1..=MOST).contains(&satang);
        is_sane
            .then_some(Self(satang))
            .ok_or("an amount is a whole number of satang from 1 to 100000000000")
    }
}

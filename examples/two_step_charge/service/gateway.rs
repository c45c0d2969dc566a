//! How the provider is asked.

use std::{error::Error, fmt, time::Duration};

use axum::http::{Request, StatusCode, header::CONTENT_TYPE};
use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use serde::Deserialize;
use serde_json::json;
use tokio::time::timeout;

use super::ledger::Charge;

/// More than a verdict needs, less than harms.
const LONGEST_ANSWER: usize = 64 * 1024;

/// A connection to the provider.
#[derive(Clone)]
pub struct Gateway {
    http: Client<HttpConnector, Full<Bytes>>,
    url: String,
    patience: Duration,
}

/// The provider's last word.
#[derive(Debug)]
pub enum Verdict {
    /// With the provider's number for it.
    Charged(String),
    Declined,
}

/// There is no verdict, and the provider may have charged or not.
///
/// A refused connection says that *this* call was not heard. Even then an earlier run may have been, so it
/// counts no more than any other failure, and the reservation stays.
#[derive(Debug)]
pub enum Unclear {
    Silent(Box<dyn Error + Send + Sync>),
    Incomprehensible(StatusCode),
}

#[derive(Deserialize)]
struct Made {
    id: String,
}

impl Gateway {
    /// `patience` is for one call, from the connection to the last byte of the answer.
    pub fn new(url: String, patience: Duration) -> Self {
        let http = Client::builder(TokioExecutor::new()).build_http();
        Self {
            http,
            url,
            patience,
        }
    }

    /// Charges, or finds out what became of the charge with this key.
    pub async fn charge(&self, key: &str, charge: &Charge) -> Result<Verdict, Unclear> {
        let answer = timeout(self.patience, self.send(key, charge));
        let answer = answer.await.map_err(|late| Unclear::Silent(late.into()))?;
        let (status, body) = answer.map_err(Unclear::Silent)?;
        match status {
            StatusCode::CREATED => match serde_json::from_slice(&body) {
                Ok(Made { id }) => Ok(Verdict::Charged(id)),
                Err(_) => Err(Unclear::Incomprehensible(status)),
            },
            StatusCode::PAYMENT_REQUIRED => Ok(Verdict::Declined),
            // An error of the provider's, or one of ours: neither says anything about the money.
            other => Err(Unclear::Incomprehensible(other)),
        }
    }

    async fn send(
        &self,
        key: &str,
        charge: &Charge,
    ) -> Result<(StatusCode, Bytes), Box<dyn Error + Send + Sync>> {
        let body = json!({ "amount_minor": charge.amount_minor, "currency": charge.currency });
        let request = Request::post(format!("{}/charges", self.url))
            .header(CONTENT_TYPE, "application/json")
            .header("idempotency-key", key)
            .body(Full::from(body.to_string()))?;
        let response = self.http.request(request).await?;
        let status = response.status();
        let body = Limited::new(response.into_body(), LONGEST_ANSWER);
        Ok((status, body.collect().await?.to_bytes()))
    }
}

impl fmt::Display for Unclear {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Silent(error) => write!(f, "no answer: {error}"),
            Self::Incomprehensible(status) => write!(f, "answer without a verdict: {status}"),
        }
    }
}

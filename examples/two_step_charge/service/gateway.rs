//! How the provider is asked.

use std::{error::Error, fmt, time::Duration};

use axum::http::{Request, StatusCode, header::CONTENT_TYPE};
use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::time::timeout;
use tower_idempotency::DownstreamKey;

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

/// The provider's last word, as it is also kept in a checkpoint.
#[derive(Debug, Serialize, Deserialize)]
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
    status: String,
}

type Failed = Box<dyn Error + Send + Sync>;

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
    pub async fn charge(&self, key: &DownstreamKey, charge: &Charge) -> Result<Verdict, Unclear> {
        let body = json!({ "amount_minor": charge.amount_minor, "currency": charge.currency });
        let request = Request::post(format!("{}/charges", self.url))
            .header(CONTENT_TYPE, "application/json")
            .body(Full::from(body.to_string()));
        let mut request = request.map_err(|error| Unclear::Silent(error.into()))?;
        key.set_on(&mut request);
        let (status, body) = self.send(request).await?;
        match status {
            StatusCode::CREATED | StatusCode::PAYMENT_REQUIRED => verdict(status, &body),
            // An error of the provider's, or one of ours: neither says anything about the money.
            other => Err(Unclear::Incomprehensible(other)),
        }
    }

    /// What became of the charge with this key, and changes nothing. `None`: the provider knows of none.
    pub async fn look_up(&self, key: &DownstreamKey) -> Result<Option<Verdict>, Unclear> {
        let url = format!("{}/charges/by-key/{}", self.url, key.as_str());
        let request = Request::get(url).body(Full::default());
        let request = request.map_err(|error| Unclear::Silent(error.into()))?;
        let (status, body) = self.send(request).await?;
        match status {
            StatusCode::OK => verdict(status, &body).map(Some),
            StatusCode::NOT_FOUND if is_no_charge(&body) => Ok(None),
            other => Err(Unclear::Incomprehensible(other)),
        }
    }

    async fn send(&self, request: Request<Full<Bytes>>) -> Result<(StatusCode, Bytes), Unclear> {
        let answer = timeout(self.patience, async {
            let response = self.http.request(request).await?;
            let status = response.status();
            let body = Limited::new(response.into_body(), LONGEST_ANSWER);
            Ok::<_, Failed>((status, body.collect().await?.to_bytes()))
        });
        let answer = answer.await.map_err(|late| Unclear::Silent(late.into()))?;
        answer.map_err(Unclear::Silent)
    }
}

fn verdict(status: StatusCode, body: &[u8]) -> Result<Verdict, Unclear> {
    match serde_json::from_slice(body) {
        Ok(Made { id, status }) if status == "charged" => Ok(Verdict::Charged(id)),
        Ok(Made { status, .. }) if status == "declined" => Ok(Verdict::Declined),
        _ => Err(Unclear::Incomprehensible(status)),
    }
}

/// Whether it is the provider that says so: a proxy's 404 must not free a key.
fn is_no_charge(body: &[u8]) -> bool {
    let said: serde_json::Value = serde_json::from_slice(body).unwrap_or_default();
    said["error"] == "no_such_charge"
}

impl fmt::Display for Unclear {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Silent(error) => write!(f, "no answer: {error}"),
            Self::Incomprehensible(status) => write!(f, "answer without a verdict: {status}"),
        }
    }
}

impl Error for Unclear {}

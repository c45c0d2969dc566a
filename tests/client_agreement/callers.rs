//! The two who ask: curl, and this crate's client.

use std::{net::SocketAddr, process::Stdio};

use axum::{
    body::Body,
    http::{HeaderMap, Request, Response},
};
use http_body_util::BodyExt;
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use tokio::process::Command;
use tower::{Layer, ServiceExt};
use tower_idempotency::{
    IdempotencyKey,
    client::{Answered, Retry, RetryLayer, Unanswered},
};

use crate::support::wire::Reply;

/// What a caller asks for, but for its key.
#[derive(Clone, Copy)]
pub struct Asked {
    pub at: SocketAddr,
    pub path: &'static str,
    pub body: &'static str,
}

impl Asked {
    pub fn url(&self) -> String {
        format!("http://{}{}", self.at, self.path)
    }
}

/// An answer, but for what each has anew.
#[derive(Debug, PartialEq, Eq)]
pub struct Got {
    pub status: u16,
    headers: Vec<(String, Vec<u8>)>,
    pub body: Vec<u8>,
}

impl Got {
    pub fn new(status: u16, headers: &HeaderMap, body: &[u8]) -> Self {
        let lines = headers.iter();
        let lines = lines.map(|(name, value)| (name.to_string(), value.as_bytes().to_vec()));
        Self::of(Reply {
            status,
            headers: lines.collect(),
            body: body.to_vec(),
        })
    }

    fn of(reply: Reply) -> Self {
        let mut headers = reply.headers;
        headers.retain(|(name, _)| !["connection", "date"].contains(&&**name));
        headers.sort();
        Self {
            status: reply.status,
            headers,
            body: reply.body,
        }
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        let mut lines = self.headers.iter().filter(|(is, _)| is == name);
        let value = lines.next().map(|(_, value)| value);
        value.map(|value| std::str::from_utf8(value).unwrap())
    }

    /// A problem, or what stands in an envelope; null where it is neither.
    pub fn refusal(&self) -> serde_json::Value {
        let mut said: serde_json::Value = serde_json::from_slice(&self.body).unwrap_or_default();
        match said.get_mut("error") {
            Some(error) => error.take(),
            None => said,
        }
    }
}

/// The program, as people use it. `key` is the value of the field, as it is sent.
pub async fn curl(asked: Asked, key: Option<&str>) -> Got {
    let mut curl = Command::new("curl");
    // Without anybody's settings, and what comes over the wire as it comes.
    curl.args(["-q", "--noproxy", "*", "--silent", "--show-error"]);
    curl.args(["--include", "--raw", "--max-time", "20"]);
    curl.args(["--header", "Content-Type: application/json"]);
    if let Some(key) = key {
        curl.arg("--header").arg(format!("Idempotency-Key: {key}"));
    }
    curl.arg("--data-binary").arg(asked.body).arg(asked.url());
    curl.stdin(Stdio::null()).kill_on_drop(true);
    let done = curl
        .output()
        .await
        .expect("curl is not installed: run scripts/test");
    let complaint = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "curl failed: {complaint}");
    Got::of(Reply::of(&done.stdout))
}

/// How an operation of this crate's client has ended.
#[derive(Debug, PartialEq, Eq)]
pub enum End {
    Answered { replayed: bool },
    Reused,
    StillInFlight,
    OutcomeUnknown,
    NotRetained(Option<u16>),
    GaveUp,
}

#[derive(Clone)]
pub struct Caller(Retry<Client<HttpConnector, Body>>);

impl Caller {
    /// One that gives up at once, so that it ends with the answer that curl gets.
    pub fn once() -> Self {
        Self::with(RetryLayer::new().retries(0))
    }

    pub fn with(options: RetryLayer) -> Self {
        Self(options.layer(Client::builder(TokioExecutor::new()).build_http()))
    }

    pub async fn ask(&self, asked: Asked, key: Option<&str>) -> Result<Response<Body>, Unanswered> {
        let mut request = Request::post(asked.url())
            .header("content-type", "application/json")
            .body(Body::from(asked.body))
            .unwrap();
        if let Some(key) = key {
            request.extensions_mut().insert(IdempotencyKey::new(key));
        }
        self.0.clone().oneshot(request).await
    }

    /// What it got, and what it makes of that.
    pub async fn gets(&self, asked: Asked, key: Option<&str>) -> (Got, End) {
        match self.ask(asked, key).await {
            Ok(response) => {
                let answered: &Answered = response.extensions().get().unwrap();
                let replayed = answered.replayed;
                let (head, body) = response.into_parts();
                let body = body.collect().await.unwrap().to_bytes();
                let got = Got::new(head.status.as_u16(), &head.headers, &body);
                (got, End::Answered { replayed })
            }
            Err(unanswered) => {
                let response = unanswered.response().expect("the server has answered");
                let (status, headers) = (response.status().as_u16(), response.headers());
                let got = Got::new(status, headers, response.body());
                (got, End::of(&unanswered))
            }
        }
    }
}

impl End {
    fn of(unanswered: &Unanswered) -> Self {
        match unanswered {
            Unanswered::Reused(_) => Self::Reused,
            Unanswered::StillInFlight(_) => Self::StillInFlight,
            Unanswered::OutcomeUnknown(_) => Self::OutcomeUnknown,
            Unanswered::NotRetained {
                original_status, ..
            } => Self::NotRetained(original_status.map(|status| status.as_u16())),
            Unanswered::GaveUp(_) => Self::GaveUp,
            other => panic!("the server was not asked: {other}"),
        }
    }
}

//! A shop that has its orders paid with this crate's client.

use std::{net::SocketAddr, time::Duration};

use axum::{
    body::Body,
    http::{Request, Response},
};
use http_body_util::BodyExt;
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use tower::{Layer, ServiceExt};
use tower_idempotency::client::{Answered, Retry, RetryLayer, derived_key};

use crate::support::wire::Reply;

#[derive(Debug, Clone)]
pub struct Order {
    pub id: String,
    pub amount_satang: i64,
    number: u32,
}

impl Order {
    pub fn number(number: u32) -> Self {
        Self {
            id: format!("A-{number}"),
            amount_satang: 100 + i64::from(number),
            number,
        }
    }

    pub fn body(&self) -> String {
        format!(
            r#"{{"order_id":"{}","amount_satang":{}}}"#,
            self.id, self.amount_satang
        )
    }

    /// Some runs take a while, so that retries meet them.
    fn delay_ms(&self) -> u32 {
        if self.number.is_multiple_of(10) {
            100
        } else {
            0
        }
    }

    fn request(&self, at: SocketAddr) -> Request<Body> {
        let mut request = Request::post(format!("http://{at}/payments"))
            .header("content-type", "application/json")
            .header("x-simulate-delay-ms", self.delay_ms())
            .body(Body::from(self.body()))
            .unwrap();
        // Every second one has a key of the shop's, the others what the client makes up.
        if self.number.is_multiple_of(2) {
            let amount = self.amount_satang.to_string();
            let key = derived_key("order-", [&*self.id, &*amount, "pay"]).unwrap();
            request.extensions_mut().insert(key);
        }
        request
    }

    /// The same as bytes, for whoever has the key.
    pub fn raw(&self, key: &str) -> Vec<u8> {
        let body = self.body();
        format!(
            "POST /payments HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n\
             idempotency-key: {key}\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        )
        .into_bytes()
    }
}

/// How an order was paid.
#[derive(Debug)]
pub struct Receipt {
    pub order: Order,
    pub key: String,
    pub attempts: u32,
    pub replayed: bool,
    pub answer: Reply,
}

#[derive(Clone)]
pub struct Till {
    client: Retry<Client<HttpConnector, Body>>,
    server: SocketAddr,
}

impl Till {
    pub fn new(server: SocketAddr) -> Self {
        let client = Client::builder(TokioExecutor::new()).build_http();
        let retry = RetryLayer::new()
            .attempt_timeout(Duration::from_millis(500))
            .back_off(Duration::from_millis(5), Duration::from_millis(50))
            // Half of all attempts fail; so many in a row will not.
            .retries(60);
        Self {
            client: retry.layer(client),
            server,
        }
    }

    pub async fn pay(&self, order: Order) -> Receipt {
        let request = order.request(self.server);
        let response = self.client.clone().oneshot(request).await;
        let response = response.unwrap_or_else(|end| panic!("{order:?}: {end}"));
        let Answered {
            key,
            attempts,
            replayed,
            ..
        } = response.extensions().get().cloned().unwrap();
        Receipt {
            order,
            key: key.as_str().unwrap().to_owned(),
            attempts,
            replayed,
            answer: reply(response).await,
        }
    }
}

async fn reply(response: Response<Body>) -> Reply {
    let (head, body) = response.into_parts();
    let lines = head.headers.iter();
    let lines = lines.map(|(name, value)| (name.to_string(), value.as_bytes().to_vec()));
    Reply {
        status: head.status.as_u16(),
        headers: lines.collect(),
        body: body.collect().await.unwrap().to_bytes().to_vec(),
    }
}

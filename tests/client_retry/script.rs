//! A client whose answers are known beforehand, and that notes what it is asked to send.

use std::{
    collections::VecDeque,
    future::ready,
    io,
    sync::{Arc, Mutex},
};

use axum::body::Body;
use bytes::Bytes;
use http::{Request, Response, request::Parts};
use http_body_util::BodyExt;
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_idempotency::client::{RetryLayer, Unanswered};

type Says = Result<Response<Body>, io::Error>;

/// Answers in this order, and 201 once there is none left.
#[derive(Clone, Default)]
pub struct Script {
    answers: Arc<Mutex<VecDeque<Says>>>,
    sent: Arc<Mutex<Vec<(Parts, Bytes)>>>,
}

impl Script {
    pub fn new(answers: impl IntoIterator<Item = Says>) -> Self {
        Self {
            answers: Arc::new(Mutex::new(answers.into_iter().collect())),
            sent: Arc::default(),
        }
    }

    pub fn client(
        &self,
    ) -> impl Service<Request<Body>, Response = Response<Body>, Error = io::Error, Future: Send>
    + Clone
    + Send
    + 'static {
        let script = self.clone();
        service_fn(move |request: Request<Body>| {
            let script = script.clone();
            async move {
                let (head, body) = request.into_parts();
                let body = body.collect().await.unwrap().to_bytes();
                script.sent.lock().unwrap().push((head, body));
                let answer = script.answers.lock().unwrap().pop_front();
                ready(answer.unwrap_or_else(|| says(201, "done"))).await
            }
        })
    }

    /// Sends it by this client.
    pub async fn send(
        &self,
        layer: RetryLayer,
        request: Request<Body>,
    ) -> Result<Response<Body>, Unanswered> {
        layer.layer(self.client()).oneshot(request).await
    }

    /// How many attempts were sent.
    pub fn attempts(&self) -> usize {
        self.sent.lock().unwrap().len()
    }

    pub fn heads(&self) -> Vec<Parts> {
        let sent = self.sent.lock().unwrap();
        sent.iter().map(|(head, _)| head.clone()).collect()
    }

    pub fn bodies(&self) -> Vec<Bytes> {
        let sent = self.sent.lock().unwrap();
        sent.iter().map(|(_, body)| body.clone()).collect()
    }

    /// The one field value of this name that all attempts had.
    #[track_caller]
    pub fn same(&self, name: &str) -> Vec<u8> {
        let heads = self.heads();
        let values: Vec<_> = heads
            .iter()
            .map(|head| {
                let mut lines = head.headers.get_all(name).iter();
                let value = lines.next().expect("an attempt without it");
                assert!(lines.next().is_none(), "an attempt has it twice");
                value.as_bytes().to_vec()
            })
            .collect();
        assert!(values.windows(2).all(|two| two[0] == two[1]), "{values:?}");
        values.into_iter().next().expect("nothing was sent")
    }

    /// The key in the header of all attempts.
    #[track_caller]
    pub fn key(&self) -> Vec<u8> {
        self.same("idempotency-key")
    }
}

pub fn says(status: u16, body: &'static str) -> Says {
    Ok(answer(status, &[], body))
}

pub fn problem(status: u16, body: &'static str) -> Says {
    let fields = [("content-type", "application/problem+json")];
    Ok(answer(status, &fields, body))
}

pub fn envelope(status: u16, body: &'static str) -> Says {
    let fields = [("content-type", "application/json; charset=utf-8")];
    Ok(answer(status, &fields, body))
}

pub fn unreachable() -> Says {
    Err(io::Error::from(io::ErrorKind::ConnectionRefused))
}

pub fn answer(status: u16, fields: &[(&str, &str)], body: impl Into<Body>) -> Response<Body> {
    let mut response = Response::builder().status(status);
    for (name, value) in fields {
        response = response.header(*name, *value);
    }
    response.body(body.into()).unwrap()
}

pub fn charge() -> Request<Body> {
    let request = Request::post("http://pay.example/charges?card=4111");
    request.body(Body::from("250 baht")).unwrap()
}

pub async fn text(response: Response<Body>) -> String {
    let body = response.into_body().collect().await.unwrap().to_bytes();
    String::from_utf8(body.to_vec()).unwrap()
}

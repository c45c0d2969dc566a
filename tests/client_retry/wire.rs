//! Servers that end, hang and reset as they please, over real connections of HTTP/1 and HTTP/2.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{Router, body::Body, response::IntoResponse};
use bytes::Bytes;
use http::{Request, Response, StatusCode, header::CONTENT_LENGTH};
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};
use tower::{Layer, ServiceExt, service_fn};
use tower_idempotency::client::{Answered, RetryLayer};

use crate::script::text;

fn retrying() -> RetryLayer {
    RetryLayer::new()
        .retries(20)
        .attempt_timeout(Duration::from_millis(300))
        .back_off(Duration::from_millis(1), Duration::from_millis(2))
}

fn charge(to: SocketAddr) -> Request<Body> {
    let request = Request::post(format!("http://{to}/charges"));
    request.body(Body::from("250 baht")).unwrap()
}

fn answered(response: &Response<Body>) -> &Answered {
    response.extensions().get().unwrap()
}

async fn listening() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

type Seen = Arc<Mutex<Vec<String>>>;

/// Reads a request to the end of its body, answers it with this, and then hangs or closes.
async fn say(mut client: TcpStream, answer: &str, hangs: bool, seen: &Seen) {
    let mut request = Vec::new();
    while !request.ends_with(b"baht") {
        let mut more = [0; 4096];
        let read = client.read(&mut more).await.unwrap();
        assert!(read > 0, "the request ended early");
        request.extend(&more[..read]);
    }
    let request = String::from_utf8(request).unwrap();
    seen.lock().unwrap().push(request);
    client.write_all(answer.as_bytes()).await.unwrap();
    if hangs {
        // Until the client has had enough.
        let _ = client.read(&mut [0]).await;
    }
}

#[tokio::test]
async fn answers_that_hang_lie_or_end_early_are_asked_for_again() {
    const CREATED: &str = "HTTP/1.1 201 Created\r\n";
    let answers = [
        ("HTTP/1.1 201 Cre".to_owned(), true),
        (format!("{CREATED}content-length: 10\r\n\r\n12345"), true),
        (format!("{CREATED}content-length: 10\r\n\r\n12345"), false),
        (
            format!("{CREATED}transfer-encoding: chunked\r\n\r\n5\r\n12345\r\n"),
            false,
        ),
        ("SSH-2.0-OpenSSH\r\n".to_owned(), false),
        (String::new(), false),
        // Announces more than the limit: handed on as it comes.
        (
            format!("{CREATED}content-length: 9999999999999\r\n\r\n12345"),
            true,
        ),
    ];
    let (listener, address) = listening().await;
    let seen = Seen::default();
    let served = seen.clone();
    let server = tokio::spawn(async move {
        let mut connections = tokio::task::JoinSet::new();
        for (answer, hangs) in answers {
            let (client, _) = listener.accept().await.unwrap();
            let served = served.clone();
            connections.spawn(async move { say(client, &answer, hangs, &served).await });
        }
        connections.join_all().await;
    });
    let client = Client::builder(TokioExecutor::new()).build_http::<Body>();
    let answer = retrying()
        .layer(client)
        .oneshot(charge(address))
        .await
        .unwrap();
    assert_eq!(answer.headers()[CONTENT_LENGTH], "9999999999999");
    assert_eq!(answered(&answer).attempts, 7);
    let key = answered(&answer).key.as_str().unwrap().to_owned();
    let seen = seen.lock().unwrap().clone();
    let key = format!("idempotency-key: {key}");
    assert!(
        seen.len() == 7 && seen.iter().all(|request| request.contains(&key)),
        "{seen:?}"
    );
    drop(answer);
    server.await.unwrap();
}

#[tokio::test]
async fn redirects_are_followed_with_the_same_key() {
    let seen = Seen::default();
    let served = seen.clone();
    let app = Router::new().fallback(move |request: Request<Body>| {
        let key = request.headers()["idempotency-key"].to_str().unwrap();
        let mut seen = served.lock().unwrap();
        seen.push(key.to_owned());
        let answer = match (request.uri().path(), seen.len()) {
            ("/charges", _) => {
                let there = [("location", "/moved")];
                (StatusCode::TEMPORARY_REDIRECT, there).into_response()
            }
            (_, ..4) => StatusCode::SERVICE_UNAVAILABLE.into_response(),
            _ => StatusCode::CREATED.into_response(),
        };
        async { answer }
    });
    let (listener, address) = listening().await;
    let server = tokio::spawn(async move { axum::serve(listener, app).await });
    let client = reqwest::Client::new();
    let client = service_fn(move |request: Request<reqwest::Body>| {
        let client = client.clone();
        async move {
            let request = reqwest::Request::try_from(request)?;
            let answer = client.execute(request).await;
            answer.map(Response::<reqwest::Body>::from)
        }
    });
    let request = charge(address).map(|_| reqwest::Body::from("250 baht"));
    let answer = retrying().layer(client).oneshot(request).await.unwrap();
    assert_eq!(
        (answer.status().as_u16(), answered(&answer).attempts),
        (201, 2)
    );
    let seen = seen.lock().unwrap();
    let key = answered(&answer).key.as_str().unwrap();
    assert!(
        seen.len() == 4 && seen.iter().all(|seen| seen == key),
        "{seen:?}"
    );
    server.abort();
}

/// What each request gets, in turn.
async fn next_fate(nth: usize, mut respond: h2::server::SendResponse<Bytes>) {
    let created = || Response::builder().status(201).body(()).unwrap();
    match nth {
        0 => respond.send_reset(h2::Reason::INTERNAL_ERROR),
        1 => respond.send_reset(h2::Reason::REFUSED_STREAM),
        2 => {
            let mut stream = respond.send_response(created(), false).unwrap();
            stream.send_data("do".into(), false).unwrap();
            stream.send_reset(h2::Reason::INTERNAL_ERROR);
        }
        3 => {
            // Until the client has had enough.
            let _ = std::future::poll_fn(|cx| respond.poll_reset(cx)).await;
        }
        _ => {
            let mut stream = respond.send_response(created(), false).unwrap();
            stream.send_data("done".into(), true).unwrap();
        }
    }
}

#[tokio::test]
async fn streams_of_http2_that_are_reset_are_sent_again() {
    let (listener, address) = listening().await;
    let seen = Seen::default();
    let served = seen.clone();
    let server = tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let served = served.clone();
            tokio::spawn(async move {
                let mut connection = h2::server::handshake(client).await.unwrap();
                while let Some(Ok((request, respond))) = connection.accept().await {
                    let key = request.headers()["idempotency-key"].to_str().unwrap();
                    let nth = served.lock().unwrap().len();
                    served.lock().unwrap().push(key.to_owned());
                    tokio::spawn(next_fate(nth, respond));
                }
            });
        }
    });
    let mut client = Client::builder(TokioExecutor::new());
    let client = client.http2_only(true).build_http::<Body>();
    let answer = retrying()
        .layer(client)
        .oneshot(charge(address))
        .await
        .unwrap();
    assert!(answered(&answer).attempts >= 4);
    let key = answered(&answer).key.as_str().unwrap().to_owned();
    assert_eq!(text(answer).await, "done");
    let seen = seen.lock().unwrap();
    assert!(
        seen.len() >= 5 && seen.iter().all(|seen| *seen == key),
        "{seen:?}"
    );
    server.abort();
}

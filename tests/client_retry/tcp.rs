//! The client over real connections that break: with hyper-util's client and with reqwest's.

use std::{net::SocketAddr, sync::Mutex, time::Duration};

use axum::body::Body;
use bytes::Bytes;
use http::{Request, Response};
use http_body_util::BodyExt;
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpSocket, TcpStream},
    task::JoinHandle,
};
use tower::{Layer, ServiceExt, service_fn};
use tower_idempotency::{
    IdempotencyLayer, MemoryStore,
    client::{Answered, RetryLayer, Unanswered},
};

use crate::support::{Handler, wire::Server};

/// What happens to a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// Reset before the request is read.
    Refused,
    /// Reset after the request was answered, before any of that came back.
    AnswerLost,
    /// Reset in the middle of the answer's head.
    HeadCut,
    /// Reset in the middle of the answer's body.
    BodyCut,
    Passed,
}

/// Passes requests on, one per connection, and cuts them off as told.
struct Relay {
    address: SocketAddr,
    task: JoinHandle<()>,
}

impl Relay {
    async fn to(server: SocketAddr, fates: &[Fate]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let fates = fates.to_vec();
        let task = tokio::spawn(async move {
            let mut fates = fates.into_iter();
            loop {
                let (client, _) = listener.accept().await.unwrap();
                relay(client, server, fates.next().unwrap_or(Fate::Passed)).await;
            }
        });
        Self { address, task }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn relay(mut client: TcpStream, server: SocketAddr, fate: Fate) {
    if fate != Fate::Refused {
        let answer = exchange(server, &read_request(&mut client).await).await;
        let head = answer
            .windows(4)
            .position(|end| end == b"\r\n\r\n")
            .unwrap()
            + 4;
        let passed = match fate {
            Fate::Refused | Fate::AnswerLost => 0,
            Fate::HeadCut => head / 2,
            Fate::BodyCut => (head + answer.len()) / 2,
            Fate::Passed => answer.len(),
        };
        client.write_all(&answer[..passed]).await.unwrap();
        if fate == Fate::Passed {
            return;
        }
        // What was written is to arrive before the reset throws it away.
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    #[allow(deprecated)] // The replacement blocks; a linger of zero never does.
    client.set_linger(Some(Duration::ZERO)).unwrap();
}

/// A whole request, with the wish that the connection ends after it.
async fn read_request(client: &mut TcpStream) -> Vec<u8> {
    let mut request = Vec::new();
    loop {
        let mut more = [0; 4096];
        let read = client.read(&mut more).await.unwrap();
        assert!(read > 0, "the request ended early");
        request.extend(&more[..read]);
        let text = String::from_utf8_lossy(&request).into_owned();
        let Some((head, body)) = text.split_once("\r\n\r\n") else {
            continue;
        };
        let length = head
            .lines()
            .find_map(|line| line.strip_prefix("content-length: "));
        if length.is_none_or(|length| body.len() >= length.parse().unwrap()) {
            return text
                .replacen("\r\n", "\r\nconnection: close\r\n", 1)
                .into_bytes();
        }
    }
}

async fn exchange(server: SocketAddr, request: &[u8]) -> Vec<u8> {
    let mut server = TcpStream::connect(server).await.unwrap();
    server.write_all(request).await.unwrap();
    let mut answer = Vec::new();
    server.read_to_end(&mut answer).await.unwrap();
    answer
}

fn retrying() -> RetryLayer {
    RetryLayer::new()
        .back_off(Duration::from_millis(10), Duration::from_millis(50))
        .total_timeout(Duration::from_secs(30))
}

async fn by_hyper(to: SocketAddr, layer: RetryLayer) -> Result<Response<Body>, Unanswered> {
    let client = Client::builder(TokioExecutor::new()).build_http::<Body>();
    let request = Request::post(format!("http://{to}/charges"));
    let request = request.body(Body::from("250 baht")).unwrap();
    layer.layer(client).oneshot(request).await
}

async fn by_reqwest(to: SocketAddr, layer: RetryLayer) -> Result<Response<Body>, Unanswered> {
    let client = reqwest::Client::new();
    let client = service_fn(move |request: Request<reqwest::Body>| {
        let client = client.clone();
        async move {
            let request = reqwest::Request::try_from(request)?;
            client
                .execute(request)
                .await
                .map(Response::<reqwest::Body>::from)
        }
    });
    let request = Request::post(format!("http://{to}/charges"));
    let request = request.body(reqwest::Body::from("250 baht")).unwrap();
    layer.layer(client).oneshot(request).await
}

/// Both clients against these fates: what each got, and how often the server charged.
async fn charged(fates: &[Fate]) -> Vec<(Result<Response<Body>, Unanswered>, usize)> {
    let mut got = Vec::new();
    for is_hyper in [true, false] {
        let handler = Handler::new();
        let layer = IdempotencyLayer::new(MemoryStore::new()).single_tenant();
        let server = Server::start(handler.behind(layer)).await;
        let relay = Relay::to(server.address, fates).await;
        let answer = match is_hyper {
            true => by_hyper(relay.address, retrying()).await,
            false => by_reqwest(relay.address, retrying()).await,
        };
        got.push((answer, handler.effects()));
    }
    got
}

async fn assert_charged_once(fates: &[Fate], replayed: bool) {
    for (answer, effects) in charged(fates).await {
        let answer = answer.unwrap();
        let told = answer.extensions().get::<Answered>().unwrap().clone();
        assert_eq!((effects, told.replayed), (1, replayed), "{fates:?}");
        assert_eq!(usize::try_from(told.attempts).unwrap(), fates.len() + 1);
        assert_eq!(answer.status(), 201);
        assert_eq!(answer.headers()["location"], "/charges/1");
        let body: Bytes = answer.into_body().collect().await.unwrap().to_bytes();
        assert_eq!(body, r#"{"charge":1}"#);
    }
}

#[tokio::test]
async fn a_connection_that_is_reset_before_the_request_leads_to_one_charge() {
    assert_charged_once(&[], false).await;
    assert_charged_once(&[Fate::Refused, Fate::Refused], false).await;
}

// X1
#[tokio::test]
async fn a_connection_that_is_reset_before_or_in_the_answer_leads_to_its_replay() {
    for fate in [Fate::AnswerLost, Fate::HeadCut, Fate::BodyCut] {
        assert_charged_once(&[fate], true).await;
    }
    let all = [
        Fate::Refused,
        Fate::AnswerLost,
        Fate::HeadCut,
        Fate::BodyCut,
    ];
    assert_charged_once(&all, true).await;
}

#[tokio::test]
async fn giving_up_tells_the_clients_own_error_and_the_key_that_finishes_it_later() {
    for (answer, effects) in charged(&[Fate::AnswerLost; 6]).await {
        let Err(Unanswered::GaveUp(ended)) = answer else {
            panic!("{answer:?}");
        };
        assert_eq!((ended.attempts(), effects), (6, 1));
        let source = ended.source().unwrap();
        assert!(
            source.is::<hyper_util::client::legacy::Error>() || source.is::<reqwest::Error>(),
            "{source:?}"
        );
        assert!(ended.key().as_str().is_some());
    }
}

/// An address that is taken, and where nobody listens yet.
fn not_listening() -> (SocketAddr, TcpSocket) {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    (socket.local_addr().unwrap(), socket)
}

#[tokio::test]
async fn a_server_that_is_not_there_is_asked_until_the_last_attempt() {
    let (address, _socket) = not_listening();
    let layer = retrying().retries(3);
    for answer in [
        by_hyper(address, layer.clone()).await,
        by_reqwest(address, layer).await,
    ] {
        let Err(Unanswered::GaveUp(ended)) = answer else {
            panic!("{answer:?}");
        };
        assert_eq!(ended.attempts(), 4);
    }
}

#[tokio::test]
async fn a_server_that_comes_back_between_two_attempts_answers() {
    let handler = Handler::new();
    let layer = IdempotencyLayer::new(MemoryStore::new()).single_tenant();
    let app = handler.behind(layer);
    let (address, socket) = not_listening();
    let socket = Mutex::new(Some(socket));
    let layer = retrying().before_attempt(move |_, _, attempt| {
        if attempt.number == 3 {
            let listener = socket.lock().unwrap().take().unwrap().listen(8)?;
            let app = app.clone();
            tokio::spawn(async move { axum::serve(listener, app).await });
        }
        Ok(())
    });
    let answer = by_hyper(address, layer).await.unwrap();
    let answered = answer.extensions().get::<Answered>().unwrap();
    assert_eq!((answered.attempts, handler.effects()), (3, 1));
}

//! The client is called only when it has said that it is ready.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use axum::body::Body;
use http::{Request, Response};
use tower::{Layer, Service, ServiceExt, buffer::Buffer, limit::ConcurrencyLimitLayer};
use tower_idempotency::client::{NotSent, RetryLayer, Unanswered};

use crate::{
    script::{Script, charge, problem, says, unreachable},
    support::{bodies::channel, logs::Logs},
};

/// Panics when it is called without having been asked, and is away as often as it is told.
struct Strict<S> {
    inner: S,
    is_ready: bool,
    away: u32,
}

impl<S: Clone> Clone for Strict<S> {
    fn clone(&self) -> Self {
        Self {
            inner: self.inner.clone(),
            is_ready: false,
            away: self.away,
        }
    }
}

impl<S> Service<Request<Body>> for Strict<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = io::Error>,
{
    type Response = Response<Body>;
    type Error = io::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.away > 0 {
            self.away -= 1;
            return Poll::Ready(Err(io::Error::other("away")));
        }
        self.is_ready = true;
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> S::Future {
        assert!(self.is_ready, "called without being asked");
        self.is_ready = false;
        self.inner.call(request)
    }
}

#[tokio::test(start_paused = true)]
async fn every_attempt_asks_the_client_first() {
    let script = Script::new([unreachable(), says(503, "")]);
    let strict = Strict {
        inner: script.client(),
        is_ready: false,
        away: 0,
    };
    let mut client = RetryLayer::new().layer(strict);
    for _ in 0..2 {
        client.ready().await.unwrap().call(charge()).await.unwrap();
    }
    let get = Request::get("/charges").body(Body::empty()).unwrap();
    client.ready().await.unwrap().call(get).await.unwrap();
    assert_eq!(script.attempts(), 5);
}

#[tokio::test(start_paused = true)]
async fn clients_that_limit_and_queue_work_and_give_their_place_back_between_attempts() {
    let script = Script::new([unreachable(), says(503, ""), unreachable()]);
    let limited = ConcurrencyLimitLayer::new(1).layer(script.client());
    let client = RetryLayer::new().layer(Buffer::new(limited, 1));
    let one = tokio::spawn(client.clone().oneshot(charge()));
    let other = tokio::spawn(client.oneshot(charge()));
    one.await.unwrap().unwrap();
    other.await.unwrap().unwrap();
    assert_eq!(script.attempts(), 5);
}

#[tokio::test(start_paused = true)]
async fn a_client_that_is_away_before_the_request_says_so_at_once() {
    let script = Script::default();
    let strict = Strict {
        inner: script.client(),
        is_ready: false,
        away: 1,
    };
    let mut client = RetryLayer::new().layer(strict);
    let unanswered = client.ready().await.map(|_| ()).unwrap_err();
    assert!(
        matches!(unanswered, Unanswered::NotSent(_)),
        "{unanswered:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_client_that_is_away_for_a_while_is_asked_again_and_nothing_counts_as_sent() {
    let script = Script::default();
    let strict = |away| Strict {
        inner: script.client(),
        is_ready: false,
        away,
    };
    let begun = tokio::time::Instant::now();
    let mut client = RetryLayer::new().layer(strict(2));
    client.call(charge()).await.unwrap();
    assert_eq!(script.attempts(), 1);
    assert!(begun.elapsed() > Duration::ZERO);

    let mut client = RetryLayer::new().layer(strict(u32::MAX));
    let unanswered = client.call(charge()).await.unwrap_err();
    assert!(
        matches!(unanswered, Unanswered::NotSent(_)),
        "{unanswered:?}"
    );
    assert_eq!(script.attempts(), 1);
}

/// Takes one request, and then is never ready again.
#[derive(Clone)]
struct Once<S> {
    inner: S,
    is_used: Arc<AtomicBool>,
    hangs: bool,
}

impl<S> Service<Request<Body>> for Once<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = io::Error>,
{
    type Response = Response<Body>;
    type Error = io::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match (self.is_used.load(Ordering::SeqCst), self.hangs) {
            (false, _) => self.inner.poll_ready(cx),
            (true, false) => Poll::Ready(Err(io::Error::other("closed"))),
            (true, true) => Poll::Pending,
        }
    }

    fn call(&mut self, request: Request<Body>) -> S::Future {
        self.is_used.store(true, Ordering::SeqCst);
        self.inner.call(request)
    }
}

#[tokio::test(start_paused = true)]
async fn a_client_that_is_not_ready_later_leaves_the_end_to_the_last_attempt_that_was_made() {
    for hangs in [false, true] {
        let send = async |first| {
            let script = Script::new([first]);
            let once = Once {
                inner: script.client(),
                is_used: Arc::default(),
                hangs,
            };
            let sent = RetryLayer::new().layer(once).oneshot(charge()).await;
            assert_eq!(script.attempts(), 1);
            sent.unwrap_err()
        };
        let body = r#"{"code":"idempotency_in_flight","retry_after_seconds":1}"#;
        let unanswered = send(problem(409, body)).await;
        let Unanswered::StillInFlight(ended) = &unanswered else {
            panic!("{unanswered:?}");
        };
        assert_eq!(ended.attempts(), 1);
        assert_eq!(ended.retry_after(), Some(Duration::from_secs(1)));
        assert_eq!(ended.response().unwrap().status().as_u16(), 409);
        assert!(ended.source().unwrap().is::<NotSent>() && !ended.is_timeout());

        let unanswered = send(unreachable()).await;
        let Unanswered::GaveUp(ended) = &unanswered else {
            panic!("{unanswered:?}");
        };
        assert_eq!(ended.attempts(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn an_operation_that_pauses_has_no_place_in_the_queue() {
    // The one place is taken. The operation waits for it, in vain, and pauses.
    let limited = ConcurrencyLimitLayer::new(1).layer(Script::default().client());
    let mut other = limited.clone();
    other.ready().await.unwrap();
    let layer = RetryLayer::new()
        .attempt_timeout(Duration::from_secs(1))
        .back_off(Duration::from_secs(3_600), Duration::from_secs(3_600))
        .total_timeout(Duration::from_secs(7_200));
    let (logs, _guard) = Logs::of_this_thread();
    let waiting = tokio::spawn(layer.layer(limited.clone()).call(charge()));
    while !logs
        .all()
        .iter()
        .any(|event| event.text.contains("not_ready"))
    {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    drop(other);
    // At once, and not after the pause.
    let sent = tokio::time::timeout(Duration::from_millis(1), limited.oneshot(charge()));
    sent.await.unwrap().unwrap();
    waiting.abort();
}

#[tokio::test(start_paused = true)]
async fn a_request_whose_body_is_awaited_has_no_place_either() {
    let script = Script::default();
    let limited = ConcurrencyLimitLayer::new(1).layer(script.client());
    let (mut sender, body) = channel();
    let slow = Request::post("/charges").body(body).unwrap();
    let slow = tokio::spawn(RetryLayer::new().layer(limited.clone()).oneshot(slow));
    sender.send_data("250".into()).await.unwrap();
    tokio::time::sleep(Duration::from_millis(10)).await;
    let sent = tokio::time::timeout(Duration::from_millis(1), limited.oneshot(charge()));
    sent.await.unwrap().unwrap();
    drop(sender);
    slow.await.unwrap().unwrap();
    assert_eq!(script.bodies(), ["250 baht", "250"]);
}

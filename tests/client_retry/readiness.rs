//! The client is called only when it has said that it is ready.

use std::{
    io,
    task::{Context, Poll},
    time::Duration,
};

use axum::body::Body;
use http::{Request, Response};
use tower::{Layer, Service, ServiceExt, buffer::Buffer, limit::ConcurrencyLimitLayer};
use tower_idempotency::client::{RetryLayer, Unanswered};

use crate::script::{Script, charge, says, unreachable};

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

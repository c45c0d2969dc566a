//! The service.

use std::{
    fmt,
    future::{Future, poll_fn},
    mem,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll},
};

use axum::{BoxError, body::Body};
use bytes::Bytes;
use http::{Request, Response};
use http_body::Body as HttpBody;
use tower_layer::Layer;
use tower_service::Service;

use super::{
    NotSent, RetryLayer, Unanswered, Uncovered,
    attempts::{attempts_until, left},
    kept::Kept,
    observe,
    retry_options::RetryOptions,
};
use crate::bounded::within;

/// The service a [`RetryLayer`] wraps around a client.
///
/// The client is any `Service<http::Request<B>>` that can be cloned, with a body `B` that can be made of bytes: the
/// [module](super) shows those of hyper-util and reqwest. Every attempt waits for the client to be ready, and the
/// time for that is the attempt's. An attempt after one that failed is made with a fresh clone.
///
/// It needs Tokio's timer: see [`RetryFuture`].
#[derive(Debug, Clone)]
pub struct Retry<S> {
    pub(super) inner: S,
    pub(super) options: Arc<RetryOptions>,
}

impl<S> Retry<S> {
    /// A client with the default options.
    ///
    /// ```
    /// use axum::{body::Body, http::{Request, StatusCode}};
    /// use tower::{ServiceExt, service_fn};
    /// use tower_idempotency::client::{Answered, Retry};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// let client = service_fn(async |request: Request<Body>| {
    ///     assert!(request.headers().contains_key("idempotency-key"));
    ///     Ok::<_, std::io::Error>(axum::response::IntoResponse::into_response("ch_1"))
    /// });
    /// let charge = Request::post("http://pay.example/charges").body(Body::from("250 baht"));
    /// let answer = Retry::new(client).oneshot(charge.unwrap()).await.unwrap();
    /// assert_eq!(answer.extensions().get::<Answered>().unwrap().attempts, 1);
    /// # }
    /// ```
    pub fn new(inner: S) -> Self {
        RetryLayer::new().layer(inner)
    }
}

impl<S, B, RB> Service<Request<B>> for Retry<S>
where
    S: Service<Request<B>, Response = Response<RB>> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: Into<BoxError>,
    B: HttpBody + From<Bytes> + Send + 'static,
    B::Data: Send,
    B::Error: Into<BoxError>,
    RB: HttpBody<Data = Bytes> + Send + 'static,
    RB::Error: Into<BoxError>,
{
    type Response = Response<Body>;
    type Error = Unanswered;
    type Future = RetryFuture;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Unanswered>> {
        let ready = self.inner.poll_ready(cx);
        ready.map_err(|error| {
            let why = NotSent::new("the client is not ready");
            Unanswered::NotSent(why.with_source(error))
        })
    }

    fn call(&mut self, request: Request<B>) -> RetryFuture {
        if !self.options.methods.contains(request.method()) {
            let is_safe = request.method().is_safe();
            let sent = self.inner.call(request);
            return RetryFuture(Box::pin(async move {
                let answered = sent.await.map(|response| response.map(Body::new));
                answered.map_err(|error| {
                    let error = error.into();
                    Unanswered::Uncovered(Uncovered { error, is_safe })
                })
            }));
        }
        // The one that is ready is the one that is called.
        let next = self.inner.clone();
        let ready = mem::replace(&mut self.inner, next);
        let options = self.options.clone();
        RetryFuture(Box::pin(async move {
            let answered = answer(&options, ready, request).await;
            answered.inspect_err(observe::unanswered)
        }))
    }
}

async fn answer<S, B, RB>(
    options: &RetryOptions,
    mut service: S,
    request: Request<B>,
) -> Result<Response<Body>, Unanswered>
where
    S: Service<Request<B>, Response = Response<RB>> + Clone + Send,
    S::Future: Send,
    S::Error: Into<BoxError>,
    B: HttpBody + From<Bytes> + Send,
    B::Data: Send,
    B::Error: Into<BoxError>,
    RB: HttpBody<Data = Bytes> + Send + 'static,
    RB::Error: Into<BoxError>,
{
    let deadline = options.deadline();
    let kept = Kept::read(request, options.request_body_limit, &options.keys);
    let mut kept = pin!(kept);
    let kept = match poll_fn(|cx| Poll::Ready(kept.as_mut().poll(cx))).await {
        Poll::Ready(kept) => Some(kept),
        Poll::Pending => {
            // A place that others wait for is not kept while nothing can be sent.
            service = service.clone();
            within(left(deadline), kept).await
        }
    };
    let too_slow = || Err(NotSent::new("the request's body did not end in time"));
    let kept = kept.unwrap_or_else(too_slow).map_err(Unanswered::NotSent)?;
    attempts_until(deadline, options, service, kept).await
}

/// The future of [`Retry`].
///
/// # Panics
///
/// When it is polled outside of a Tokio runtime, or in one without time (`Builder::enable_time`), and has to wait.
///
/// # Cancel safety
///
/// Dropping it ends the retrying. An attempt that was sent may have taken effect, or still take effect: the same
/// request may be sent again with the same key. Whoever may have to do that after a drop should choose the key, by
/// the header or as an extension of the request, or note it in the hook
/// [`before_attempt`](RetryLayer::before_attempt).
#[must_use = "futures do nothing unless polled"]
pub struct RetryFuture(Pin<Box<dyn Future<Output = Result<Response<Body>, Unanswered>> + Send>>);

impl Future for RetryFuture {
    type Output = Result<Response<Body>, Unanswered>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.as_mut().poll(cx)
    }
}

impl fmt::Debug for RetryFuture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RetryFuture").finish_non_exhaustive()
    }
}

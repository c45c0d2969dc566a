//! The response future, and the run in it that outlives whoever polls it.

use std::{
    fmt,
    future::Future,
    mem,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use axum::body::Body;
use bytes::Bytes;
use http::Response;
use pin_project_lite::pin_project;
use tokio::runtime::Handle;
use tracing::{Instrument, Span, level_filters::LevelFilter};

use crate::attempt::Attempt;

type Run<E> = Pin<Box<dyn Future<Output = Result<Response<Body>, E>> + Send>>;

pin_project! {
    /// The response future of [`IdempotencyService`](crate::IdempotencyService).
    ///
    /// Dropping it before a claim is sent leaves nothing behind. Dropping it later does not end the
    /// run: it goes on as a task of the runtime the request came in on, to its end, and is recorded.
    pub struct ResponseFuture<F, E> {
        #[pin]
        kind: Kind<F, E>,
    }
}

pin_project! {
    #[project = KindProjection]
    enum Kind<F, E> {
        Pass { #[pin] future: F },
        Refused { response: Option<Response<Body>> },
        Boxed { future: Run<E> },
        Keyed { run: Survivor<E> },
    }
}

impl<F, E> ResponseFuture<F, E> {
    pub(crate) fn pass(future: F) -> Self {
        let kind = Kind::Pass { future };
        Self { kind }
    }

    pub(crate) fn refused(response: Response<Body>) -> Self {
        let response = Some(response);
        let kind = Kind::Refused { response };
        Self { kind }
    }

    /// A future that ends with whoever polls it, like that of the inner service.
    pub(crate) fn boxed(future: Run<E>) -> Self {
        let kind = Kind::Boxed { future };
        Self { kind }
    }

    /// Runs in `span`; where that is disabled, in whatever span it is polled.
    pub(crate) fn keyed(run: Run<E>, attempt: Arc<Attempt>, span: Span) -> Self
    where
        E: Send + 'static,
    {
        let enters = !span.is_disabled();
        let run = Survivor {
            run: Some(run),
            attempt,
            runtime: Handle::try_current().ok(),
            span: match LevelFilter::current() {
                LevelFilter::OFF => span,
                _ if enters => span,
                _ => Span::current(),
            },
            enters,
            go_on: |runtime, run, span| drop(runtime.spawn(run.instrument(span))),
        };
        let kind = Kind::Keyed { run };
        Self { kind }
    }
}

impl<F, E, RB> Future for ResponseFuture<F, E>
where
    F: Future<Output = Result<Response<RB>, E>>,
    RB: http_body::Body<Data = Bytes> + Send + 'static,
    RB::Error: Into<axum::BoxError>,
{
    type Output = Result<Response<Body>, E>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.project().kind.project() {
            KindProjection::Pass { future } => {
                let response = ready!(future.poll(cx))?;
                Poll::Ready(Ok(response.map(Body::new)))
            }
            KindProjection::Refused { response } => {
                let response = response.take();
                Poll::Ready(Ok(response.expect("polled after it was ready")))
            }
            KindProjection::Boxed { future } => future.as_mut().poll(cx),
            KindProjection::Keyed { run } => run.poll(cx),
        }
    }
}

impl<F, E> fmt::Debug for ResponseFuture<F, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").finish_non_exhaustive()
    }
}

/// A run that outlives whoever polls it.
struct Survivor<E> {
    run: Option<Run<E>>,
    attempt: Arc<Attempt>,
    /// Taken before the end: in `drop` there may be no runtime, and the span is another.
    runtime: Option<Handle>,
    span: Span,
    /// Whether the span is the run's own, and not that of the layers around.
    enters: bool,
    go_on: fn(&Handle, Run<E>, Span),
}

impl<E> Survivor<E> {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Response<Body>, E>> {
        // One made outside of any runtime is at home where it is first polled.
        if self.runtime.is_none() {
            self.runtime = Handle::try_current().ok();
        }
        // Out of `self` while it is polled: a poll that unwinds leaves nothing to go on with.
        let mut run = self.run.take().expect("polled after it was ready");
        let _entered = self.enters.then(|| self.span.enter());
        let answer = run.as_mut().poll(cx);
        if answer.is_pending() {
            self.run = Some(run);
        }
        answer
    }
}

impl<E> Drop for Survivor<E> {
    fn drop(&mut self) {
        if let (Some(run), Some(runtime)) = (self.run.take(), &self.runtime)
            && self.attempt.must_finish()
        {
            self.attempt.set_gone();
            (self.go_on)(runtime, run, mem::replace(&mut self.span, Span::none()));
        }
    }
}

//! Waiting with a limit, and polling with a net under it.

use std::{
    any::Any,
    future::{Future, poll_fn},
    panic::{AssertUnwindSafe, catch_unwind},
    pin::{Pin, pin},
    task::{Context, Poll},
    time::Duration,
};

use pin_project_lite::pin_project;
use tokio::time::{Sleep, sleep};

/// A future whose type nobody needs to name.
pub(crate) type Boxed<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// As good as for ever: a longer time would overflow when it is added to an instant.
pub(crate) const FOREVER: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// The output, or `None` once `limit` is over. A future that is ready at once costs no timer.
pub(crate) fn within<F: Future>(limit: Duration, future: F) -> Within<F> {
    Within {
        future,
        limit,
        over: None,
    }
}

pin_project! {
    /// See [`within`]. Written out, and its timer in a box, because an `async fn` would hold the
    /// future twice, and large futures are slow to allocate.
    pub(crate) struct Within<F> {
        #[pin]
        future: F,
        limit: Duration,
        over: Option<Pin<Box<Sleep>>>,
    }
}

impl<F: Future> Future for Within<F> {
    type Output = Option<F::Output>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        if let Poll::Ready(output) = this.future.poll(cx) {
            return Poll::Ready(Some(output));
        }
        let limit = *this.limit;
        let over = this.over.get_or_insert_with(|| Box::pin(sleep(limit)));
        over.as_mut().poll(cx).map(|()| None)
    }
}

/// Which of two futures was ready first.
pub(crate) enum First<A, B> {
    Left(A),
    Right(B),
}

/// Waits for the first of two futures, the left one before the right one; drops the other.
pub(crate) async fn first<A: Future, B: Future>(left: A, right: B) -> First<A::Output, B::Output> {
    let (mut left, mut right) = (pin!(left), pin!(right));
    poll_fn(|cx| match left.as_mut().poll(cx) {
        Poll::Ready(output) => Poll::Ready(First::Left(output)),
        Poll::Pending => right.as_mut().poll(cx).map(First::Right),
    })
    .await
}

/// What a panic was raised with.
pub(crate) type Panic = Box<dyn Any + Send>;

/// Polls, and catches a panic of the poll. The future must not be polled again after one.
pub(crate) fn poll_caught<F: Future + ?Sized>(
    future: Pin<&mut F>,
    cx: &mut Context<'_>,
) -> Poll<Result<F::Output, Panic>> {
    match catch_unwind(AssertUnwindSafe(|| future.poll(cx))) {
        Ok(poll) => poll.map(Ok),
        Err(panic) => Poll::Ready(Err(panic)),
    }
}

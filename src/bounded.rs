//! Waiting with a limit, and polling with a net under it.

use std::{
    any::Any,
    future::{Future, poll_fn},
    panic::{AssertUnwindSafe, catch_unwind},
    pin::{Pin, pin},
    task::{Context, Poll},
    time::Duration,
};

/// As good as for ever: a longer time would overflow when it is added to an instant.
pub(crate) const FOREVER: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// The output, or `None` once `limit` is over. A future that is ready at once costs no timer.
pub(crate) async fn within<F: Future>(limit: Duration, future: F) -> Option<F::Output> {
    let mut future = pin!(future);
    let first = poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx))).await;
    match first {
        Poll::Ready(output) => Some(output),
        Poll::Pending => tokio::time::timeout(limit, future).await.ok(),
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

//! A call that goes on while its caller does something else.

use std::{future::Future, panic::resume_unwind};

use tokio::task::AbortHandle;
use tracing::{Instrument, instrument::WithSubscriber};

/// Runs it as a task of its own, in the caller's span and under its subscriber, so that it is polled whether the caller is or not. A panic
/// reaches the caller. `None` when the runtime it was begun on has ended meanwhile.
///
/// Dropped, this drops the call where it runs: whatever a call does when it is dropped, it does there.
pub(super) async fn apart<T: Send + 'static>(
    call: impl Future<Output = T> + Send + 'static,
) -> Option<T> {
    let task = tokio::spawn(call.in_current_span().with_current_subscriber());
    let _ending = Ending(task.abort_handle());
    match task.await {
        Ok(ended) => Some(ended),
        Err(error) => match error.try_into_panic() {
            Ok(panic) => resume_unwind(panic),
            Err(_) => None,
        },
    }
}

/// Nobody waits for the task any longer.
struct Ending(AbortHandle);

impl Drop for Ending {
    fn drop(&mut self) {
        self.0.abort();
    }
}

//! Who writes next, in this process: whoever asked first.
//!
//! SQLite has one writer at a time, and whoever finds its lock taken tries again and again, in no order.
//! So the writer's task and the transactions of handlers take turns before they ask for the lock.

use std::{
    sync::{self, Arc, PoisonError},
    task::{Context, Poll},
    time::{Duration, Instant},
};

use tokio::sync::{Mutex, OwnedMutexGuard, OwnedSemaphorePermit, Semaphore};

use super::handlers::Kept;
use crate::bounded::Boxed;

/// How long a handler waits for its turn, and whoever closes the store for a handler that does not end.
pub(super) const PATIENCE: Duration = Duration::from_secs(30);

pub(super) struct Turns {
    /// One handler at a time stands in line, so that the writer never waits for more than one handler's
    /// transaction.
    handlers: Arc<Mutex<()>>,
    /// A semaphore because it can be closed.
    write: Arc<Semaphore>,
    /// The connection that one handler leaves to the next: for whoever has the turn.
    kept: sync::Mutex<Option<Kept>>,
}

/// Nobody else in this process writes until it is dropped.
pub(super) struct Turn {
    since: Instant,
    /// Given back before the next handler may stand in line.
    _permit: OwnedSemaphorePermit,
    _handler: Option<OwnedMutexGuard<()>>,
}

impl Turn {
    fn new(permit: OwnedSemaphorePermit, handler: Option<OwnedMutexGuard<()>>) -> Self {
        Self {
            since: Instant::now(),
            _permit: permit,
            _handler: handler,
        }
    }
}

impl Turns {
    pub(super) fn new() -> Self {
        Self {
            handlers: Arc::default(),
            write: Arc::new(Semaphore::new(1)),
            kept: sync::Mutex::default(),
        }
    }

    /// A handler's turn; `None` once the store is closed.
    pub(super) async fn of_handler(&self) -> Option<Turn> {
        let handler = self.handlers.clone().lock_owned().await;
        let permit = self.write.clone().acquire_owned().await.ok()?;
        Some(Turn::new(permit, Some(handler)))
    }

    pub(super) fn kept(&self) -> sync::MutexGuard<'_, Option<Kept>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// No handler gets a turn any more.
    pub(super) fn close(&self) {
        self.write.close();
    }
}

/// The writer's place in the line.
#[derive(Default)]
pub(super) enum Place {
    #[default]
    Elsewhere,
    /// The place is held for as long as this is, polled or not.
    InLine(Boxed<'static, Option<Turn>>),
    First(Turn),
}

impl Place {
    /// Whether it is the writer's turn. When it is not, the writer stands in line from now on, and the
    /// task is woken when the turn comes.
    pub(super) fn poll_turn(&mut self, turns: &Turns, cx: &mut Context<'_>) -> Poll<()> {
        if let Self::Elsewhere = self {
            *self = match turns.write.clone().try_acquire_owned() {
                Ok(permit) => Self::First(Turn::new(permit, None)),
                Err(_) => {
                    let turn = turns.write.clone().acquire_owned();
                    Self::InLine(Box::pin(async { Some(Turn::new(turn.await.ok()?, None)) }))
                }
            };
        }
        if let Self::InLine(turn) = self {
            match turn.as_mut().poll(cx) {
                Poll::Ready(Some(turn)) => *self = Self::First(turn),
                // Closed, which only the writer does, at its end.
                Poll::Ready(None) => *self = Self::Elsewhere,
                Poll::Pending => return Poll::Pending,
            }
        }
        Poll::Ready(())
    }

    pub(super) fn is_in_line(&self) -> bool {
        matches!(self, Self::InLine(_))
    }

    /// Since when it has been the writer's turn.
    pub(super) fn first_since(&self) -> Option<Instant> {
        match self {
            Self::First(turn) => Some(turn.since),
            _ => None,
        }
    }
}

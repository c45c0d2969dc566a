//! One keyed request on its way: what the service, the run, the heartbeat and the extractor share.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
};

use crate::store::{StoreError, Ticket};

/// What an attempt asks of the engine without knowing its store.
pub(crate) trait Keeper: Send + Sync {
    /// Asks the store whether this ticket still holds its record.
    fn still_holds<'a>(
        &'a self,
        ticket: &'a Ticket,
    ) -> Pin<Box<dyn Future<Output = Result<bool, StoreError>> + Send + 'a>>;
}

/// The state of one keyed request.
pub(crate) struct Attempt {
    keeper: Arc<dyn Keeper>,
    ticket: OnceLock<Ticket>,
    /// A claim may stand in the store, so the request must go on to its end whoever is watching.
    must_finish: AtomicBool,
    /// The response future was dropped: nobody waits for an answer.
    gone: AtomicBool,
    /// The heartbeat was told that the claim is another's, or has heard nothing for a whole lease.
    lost: AtomicBool,
}

impl Attempt {
    pub(crate) fn new(keeper: Arc<dyn Keeper>) -> Self {
        Self {
            keeper,
            ticket: OnceLock::new(),
            must_finish: AtomicBool::new(false),
            gone: AtomicBool::new(false),
            lost: AtomicBool::new(false),
        }
    }

    pub(crate) fn must_finish(&self) -> bool {
        self.must_finish.load(Ordering::Relaxed)
    }

    pub(crate) fn set_must_finish(&self, must: bool) {
        self.must_finish.store(must, Ordering::Relaxed);
    }

    pub(crate) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Relaxed)
    }

    pub(crate) fn set_gone(&self) {
        self.gone.store(true, Ordering::Relaxed);
    }

    pub(crate) fn set_lost(&self, lost: bool) {
        self.lost.store(lost, Ordering::Relaxed);
    }

    /// Keeps the won ticket. A request wins at most one.
    pub(crate) fn won(&self, ticket: Ticket) {
        self.ticket.get_or_init(|| ticket);
    }

    pub(crate) fn ticket(&self) -> Option<&Ticket> {
        self.ticket.get()
    }

    pub(crate) async fn still_holds(&self) -> Result<bool, StoreError> {
        match self.ticket() {
            Some(ticket) if !self.lost.load(Ordering::Relaxed) => {
                self.keeper.still_holds(ticket).await
            }
            _ => Ok(false),
        }
    }
}

impl fmt::Debug for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Attempt")
            .field("ticket", &self.ticket)
            .field("lost", &self.lost)
            .finish_non_exhaustive()
    }
}

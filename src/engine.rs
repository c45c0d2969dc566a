//! What a layer's services share: the store, the options, and the runs of this process.

use std::{future::Future, pin::Pin, sync::Arc};

use tokio::runtime::Handle;

use crate::{
    Rejection,
    attempt::Keeper,
    bounded::within,
    execution::Outcome,
    live::{Live, Orphan},
    maintenance::{self, Mark},
    observe::{self, Operation},
    options::Options,
    record::{Record, RecordId},
    store::{Inspect, Settled, Store, StoreError, StoreErrorKind, Ticket},
};

/// One layer's view: its options over the shared rest.
pub(crate) struct Engine<S> {
    pub(crate) store: S,
    pub(crate) options: Arc<Options>,
    pub(crate) live: Arc<Live>,
}

impl<S: Store> Engine<S> {
    pub(crate) fn new(store: S, options: Arc<Options>, live: Arc<Live>) -> Self {
        live.beat_for(options.lease);
        Self {
            store,
            options,
            live,
        }
    }

    /// Starts the background work, if none is running. Layers are built outside of any runtime, so
    /// this happens with the first keyed request, and again should that runtime have ended.
    pub(crate) fn maintain(&self) {
        if let Some(mark) = Mark::set(&self.live.maintained)
            && let Ok(runtime) = Handle::try_current()
        {
            let (store, options) = (self.store.clone(), self.options.clone());
            let live = Arc::downgrade(&self.live);
            let leases = self.live.leases();
            runtime.spawn(maintenance::maintain(store, options, live, leases, mark));
        }
        // What was left behind when another runtime ended.
        self.settle_orphans();
    }

    /// Leaves a claim to the background that no request will settle any more: one of unknown fate,
    /// or one whose run ended with its runtime.
    pub(crate) fn leave_behind(&self, ticket: Ticket, outcome: Outcome) {
        self.live.leave_behind(Orphan {
            ticket,
            outcome,
            options: self.options.clone(),
        });
        self.settle_orphans();
    }

    /// Starts to settle what was left behind, if there is any and nobody is at it.
    pub(crate) fn settle_orphans(&self) {
        if self.live.has_orphans()
            && let Ok(runtime) = Handle::try_current()
            && let Some(mark) = Mark::set(&self.live.settling)
        {
            let (store, live) = (self.store.clone(), self.live.clone());
            runtime.spawn(maintenance::settle_orphans(store, live, mark));
        }
    }

    /// Renews one claim by itself.
    pub(crate) async fn renew(&self, ticket: &Ticket) -> Result<Settled, StoreError> {
        let renewed = self
            .store
            .renew(std::slice::from_ref(ticket), self.options.lease);
        let error = match within(self.options.store_timeout, renewed).await {
            Some(Ok(settled)) if settled == [Settled::Done] => return Ok(Settled::Done),
            Some(Ok(_)) => return Ok(Settled::Lost),
            Some(Err(error)) => {
                observe::store_failed(Operation::Renew, Some(&error));
                error
            }
            None => {
                observe::store_failed(Operation::Renew, None);
                let message = "the store did not answer within store_timeout";
                StoreError::new(StoreErrorKind::Unavailable, message)
            }
        };
        Err(error)
    }
}

impl<S: Inspect> Engine<S> {
    /// Looks a record up, before anything is claimed.
    pub(crate) async fn find(&self, id: &RecordId) -> Result<Option<Record>, Rejection> {
        match within(self.options.store_timeout, self.store.get(id)).await {
            Some(Ok(found)) => Ok(found),
            failed => {
                let error = failed.and_then(Result::err);
                observe::store_failed(Operation::Get, error.as_ref());
                Err(Rejection::StoreUnavailable)
            }
        }
    }
}

impl<S: Store> Keeper for Engine<S> {
    fn still_holds<'a>(
        &'a self,
        ticket: &'a Ticket,
    ) -> Pin<Box<dyn Future<Output = Result<bool, StoreError>> + Send + 'a>> {
        Box::pin(async move { Ok(self.renew(ticket).await? == Settled::Done) })
    }
}

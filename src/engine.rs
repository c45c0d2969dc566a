//! What a layer's services share: the store, the options, and the runs of this process.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use tokio::runtime::Handle;

use crate::{
    DownstreamKey, NoDownstreamSecret, Rejection,
    attempt::Keeper,
    bounded::{Boxed, within},
    execution::Outcome,
    live::{Live, Orphan},
    maintenance::{self, Mark, Pause},
    observe::{self, Operation},
    options::Options,
    record::{Record, RecordId},
    store::{Checkpoint, Checkpoints, Inspect, Settled, Store, StoreError, StoreErrorKind, Ticket},
};

/// One layer's view: its options over the shared rest.
pub(crate) struct Engine<S> {
    pub(crate) store: S,
    pub(crate) options: Arc<Options>,
    pub(crate) live: Arc<Live>,
}

impl<S: Store> Engine<S> {
    pub(crate) fn new(store: S, options: Arc<Options>, live: Arc<Live>) -> Self {
        live.keep_pace_with(&options);
        Self {
            store,
            options,
            live,
        }
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
                StoreError::timed_out()
            }
        };
        Err(error)
    }
}

impl<S: Inspect> Engine<S> {
    /// Starts the background work, if none is running in this runtime. Layers are built outside of any, so
    /// this happens with the first keyed request that comes in on it.
    pub(crate) fn maintain(&self) {
        if let Ok(runtime) = Handle::try_current() {
            self.beat_in(&runtime);
            #[cfg(feature = "metrics")]
            self.show_in(&runtime);
        }
        // What was left behind when another runtime ended.
        self.settle_orphans();
    }

    fn beat_in(&self, runtime: &Handle) {
        if let Some(heart) = self.live.hearts.begin(runtime) {
            let (store, options) = (self.store.clone(), self.options.clone());
            let (live, pace) = (Arc::downgrade(&self.live), self.live.pace());
            runtime.spawn(maintenance::maintain(store, options, live, pace, heart));
        }
    }

    /// Of several runtimes one is enough for that; another takes it up when that one has ended.
    #[cfg(feature = "metrics")]
    fn show_in(&self, runtime: &Handle) {
        if let Some(mark) = Mark::set(&self.live.shown) {
            let (live, pace) = (Arc::downgrade(&self.live), self.live.pace());
            runtime.spawn(maintenance::show(self.store.clone(), live, pace, mark));
        }
    }

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

/// How often the store is asked again where it was out of reach.
const RESENDS: u32 = 2;

/// Asks the store, and again where its answer may have got lost. For what a token makes harmless to send
/// again, and for reads.
pub(crate) async fn persistently<T, F>(
    operation: Operation,
    mut ask: impl FnMut() -> F,
) -> Result<T, StoreError>
where
    F: Future<Output = Result<T, StoreError>>,
{
    let mut pause = Pause::default();
    let mut resends = 0;
    loop {
        let error = match ask().await {
            Ok(answer) => return Ok(answer),
            Err(error) => error,
        };
        // What a handler asks too much of the store is no trouble of the store's.
        let is_too_much =
            matches!(operation, Operation::Save) && error.kind() == StoreErrorKind::Invalid;
        if !is_too_much {
            observe::store_failed(operation, Some(&error));
        }
        if error.kind() != StoreErrorKind::Unavailable || resends == RESENDS {
            return Err(error);
        }
        resends += 1;
        pause.wait().await;
    }
}

impl<S: Checkpoints> Keeper for Engine<S> {
    fn still_holds<'a>(&'a self, ticket: &'a Ticket) -> Boxed<'a, Result<bool, StoreError>> {
        Box::pin(async move { Ok(self.renew(ticket).await? == Settled::Done) })
    }

    fn save<'a>(
        &'a self,
        ticket: &'a Ticket,
        name: &'a str,
        value: Bytes,
    ) -> Boxed<'a, Result<Settled, StoreError>> {
        Box::pin(persistently(Operation::Save, move || {
            self.store.save(ticket, name, value.clone())
        }))
    }

    fn load<'a>(
        &'a self,
        ticket: &'a Ticket,
    ) -> Boxed<'a, Result<Option<Vec<Checkpoint>>, StoreError>> {
        Box::pin(persistently(Operation::Load, move || {
            self.store.load(ticket)
        }))
    }

    #[cfg(any(feature = "sqlite", feature = "postgres"))]
    fn joining(
        &self,
        ticket: &Ticket,
        name: &str,
        value: Bytes,
    ) -> Option<Result<crate::store::Joining, StoreError>> {
        self.store.joining(ticket, name, value)
    }

    fn downstream_key(
        &self,
        id: &RecordId,
        step: &str,
    ) -> Result<DownstreamKey, NoDownstreamSecret> {
        let secret = self.options.downstream.as_ref();
        let secret = secret.ok_or(NoDownstreamSecret::NEW)?;
        Ok(secret.key(&self.store.stored_id(id), step))
    }

    fn patience(&self) -> Duration {
        self.options.store_timeout
    }
}

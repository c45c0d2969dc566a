//! One keyed request on its way: what the service, the run, the heartbeat and the extractor share.

use std::{
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use tokio::time::Instant;

use crate::{
    CheckpointError, DownstreamKey, NoDownstreamSecret,
    bounded::{Boxed, within},
    observe::{self, Observed, Operation},
    record::RecordId,
    store::{Checkpoint, Settled, StoreError, StoreErrorKind, Ticket},
    transacted::{Open, Work},
};

/// What an attempt asks of the engine without knowing its store.
pub(crate) trait Keeper: Send + Sync {
    /// Asks the store whether this ticket still holds its record.
    fn still_holds<'a>(&'a self, ticket: &'a Ticket) -> Boxed<'a, Result<bool, StoreError>>;

    /// Saves a checkpoint, again where its fate is unknown.
    fn save<'a>(
        &'a self,
        ticket: &'a Ticket,
        name: &'a str,
        value: Bytes,
    ) -> Boxed<'a, Result<Settled, StoreError>>;

    /// All checkpoints of the record; `None` when the ticket holds it no longer.
    fn load<'a>(
        &'a self,
        ticket: &'a Ticket,
    ) -> Boxed<'a, Result<Option<Vec<Checkpoint>>, StoreError>>;

    /// How a checkpoint is saved in a transaction of the handler's; `None` where the store cannot.
    #[cfg(any(feature = "sqlite", feature = "postgres"))]
    fn joining(
        &self,
        ticket: &Ticket,
        name: &str,
        value: Bytes,
    ) -> Option<Result<crate::store::Joining, StoreError>>;

    fn downstream_key(
        &self,
        id: &RecordId,
        step: &str,
    ) -> Result<DownstreamKey, NoDownstreamSecret>;

    /// How long the store may take.
    fn patience(&self) -> Duration;
}

/// The state of one keyed request.
pub(crate) struct Attempt {
    keeper: Arc<dyn Keeper>,
    observed: Observed,
    ticket: OnceLock<Ticket>,
    /// When the heartbeat first saw its run. (To look at the clock for every run would cost more than this is
    /// worth.)
    seen: OnceLock<Instant>,
    /// A claim may stand in the store, so the request must go on to its end whoever is watching.
    must_finish: AtomicBool,
    /// The response future was dropped: nobody waits for an answer.
    gone: AtomicBool,
    /// The heartbeat was told that the claim is another's, or has heard nothing for a whole lease.
    lost: AtomicBool,
    /// Its answer is known and is being recorded.
    answered: AtomicBool,
    /// Locked while the store is asked, so that what is known is what was saved last.
    known: tokio::sync::Mutex<Known>,
    joined: Mutex<Joined>,
}

/// What a run has to do with transactions of its handler.
#[derive(Default)]
struct Joined {
    /// The one that this try is offered, in transactional mode.
    work: Option<Weak<dyn Work>>,
    /// What this try has saved in one.
    names: Vec<Box<str>>,
    /// A checkpoint was saved in one, which is committed or rolled back without a word: from then on nothing
    /// is taken as known.
    ever: bool,
}

impl Joined {
    /// Why a checkpoint of this name cannot be saved by itself: it would wait for the handler's own
    /// transaction.
    fn is_in_the_way(&self, name: &str) -> Option<&'static str> {
        let work = self.work.as_ref().and_then(Weak::upgrade)?;
        match work.open() {
            Open::Alone => Some(WRITER_IS_TAKEN),
            Open::Beside if self.names.iter().any(|joined| **joined == *name) => {
                Some(NAME_IS_TAKEN)
            }
            Open::Beside | Open::Not => None,
        }
    }
}

/// What a run knows of its checkpoints without asking.
enum Known {
    /// As they were when it began: a first attempt has none, a later one those of its predecessors.
    Untouched,
    All(Vec<Checkpoint>),
    /// What was saved last may be there or not.
    Unknown,
}

impl Known {
    /// Takes out what is known, and leaves nothing known.
    fn take(&mut self, ticket: &Ticket) -> Self {
        match std::mem::replace(self, Self::Unknown) {
            Self::Untouched if ticket.attempt == 1 => Self::All(Vec::new()),
            Self::Untouched => Self::Unknown,
            known => known,
        }
    }

    /// The same after this was saved.
    fn with(mut self, name: &str, value: Bytes) -> Self {
        if let Self::All(all) = &mut self {
            match all.iter_mut().find(|saved| saved.name == name) {
                Some(saved) => saved.value = value,
                None => all.push(Checkpoint::new(name, value)),
            }
        }
        self
    }
}

impl Attempt {
    pub(crate) fn new(keeper: Arc<dyn Keeper>, observed: Observed) -> Self {
        Self {
            keeper,
            observed,
            ticket: OnceLock::new(),
            seen: OnceLock::new(),
            must_finish: AtomicBool::new(false),
            gone: AtomicBool::new(false),
            lost: AtomicBool::new(false),
            answered: AtomicBool::new(false),
            known: tokio::sync::Mutex::const_new(Known::Untouched),
            joined: Mutex::default(),
        }
    }

    /// What its events tell of it.
    pub(crate) fn observed(&self) -> &Observed {
        &self.observed
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

    pub(crate) fn is_answered(&self) -> bool {
        self.answered.load(Ordering::SeqCst)
    }

    pub(crate) fn set_answered(&self, answered: bool) {
        self.answered.store(answered, Ordering::SeqCst);
    }

    /// Keeps the won ticket. A request wins at most one.
    pub(crate) fn won(&self, ticket: Ticket) {
        self.ticket.get_or_init(|| ticket);
    }

    pub(crate) fn seen(&self, at: Instant) {
        self.seen.get_or_init(|| at);
    }

    /// How long its run has lasted by this process's clock, less what went by before the first heartbeat.
    pub(crate) fn age(&self) -> Duration {
        self.seen.get().map_or(Duration::ZERO, Instant::elapsed)
    }

    pub(crate) fn ticket(&self) -> Option<&Ticket> {
        self.ticket.get()
    }

    /// Notes the transaction that this try of the handler is offered.
    pub(crate) fn offered(&self, work: &Arc<dyn Work>) {
        let mut joined = self.joined();
        joined.work = Some(Arc::downgrade(work));
        joined.names.clear();
    }

    fn joined(&self) -> MutexGuard<'_, Joined> {
        self.joined.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) async fn still_holds(&self) -> Result<bool, StoreError> {
        match self.ticket() {
            Some(ticket) if !self.lost.load(Ordering::Relaxed) => {
                self.keeper.still_holds(ticket).await
            }
            _ => Ok(false),
        }
    }

    /// Saves a checkpoint, durable once this is done.
    pub(crate) async fn save(&self, name: &str, value: Bytes) -> Result<(), CheckpointError> {
        let ticket = self.ticket().ok_or(CheckpointError::lost())?;
        if let Some(why) = self.joined().is_in_the_way(name) {
            return Err(CheckpointError::misused(why));
        }
        let saving = async {
            let mut known = self.known.lock().await;
            // Nothing is known while it is under way, nor after it was dropped then.
            let before = known.take(ticket);
            match self.keeper.save(ticket, name, value.clone()).await {
                Ok(Settled::Done) => *known = before.with(name, value),
                Ok(Settled::Lost) => return Err(CheckpointError::lost()),
                Err(error) => {
                    if error.kind() == StoreErrorKind::Invalid {
                        *known = before;
                    }
                    return Err(CheckpointError::store(error));
                }
            }
            Ok(())
        };
        let saved = within(self.keeper.patience(), saving).await;
        saved.unwrap_or_else(|| Err(unanswered(Operation::Save)))
    }

    /// The value saved under this name, as it is stored.
    pub(crate) async fn saved(&self, name: &str) -> Result<Option<Bytes>, CheckpointError> {
        let ticket = self.ticket().ok_or(CheckpointError::lost())?;
        let loading = async {
            let mut known = self.known.lock().await;
            if self.joined().ever {
                *known = Known::Unknown;
            }
            let all = match known.take(ticket) {
                Known::All(all) => all,
                Known::Untouched | Known::Unknown => {
                    let loaded = self.keeper.load(ticket).await;
                    let loaded = loaded.map_err(CheckpointError::store)?;
                    loaded.ok_or_else(CheckpointError::lost)?
                }
            };
            let found = all.iter().find(|saved| saved.name == name);
            let found = found.map(|saved| saved.value.clone());
            *known = Known::All(all);
            Ok(found)
        };
        let loaded = within(self.keeper.patience(), loading).await;
        loaded.unwrap_or_else(|| Err(unanswered(Operation::Load)))
    }

    /// How a checkpoint is saved in a transaction of the handler's.
    #[cfg(any(feature = "sqlite", feature = "postgres"))]
    pub(crate) fn joining(
        &self,
        name: &str,
        value: Bytes,
    ) -> Result<crate::store::Joining, CheckpointError> {
        let ticket = self.ticket().ok_or(CheckpointError::lost())?;
        let joining = self.keeper.joining(ticket, name, value);
        let joining = joining.ok_or(CheckpointError::misused(CANNOT_JOIN))?;
        let mut joined = self.joined();
        joined.ever = true;
        if !joined.names.iter().any(|joined| **joined == *name) {
            joined.names.push(name.into());
        }
        joining.map_err(CheckpointError::store)
    }

    pub(crate) fn downstream_key(
        &self,
        id: &RecordId,
        step: &str,
    ) -> Result<DownstreamKey, NoDownstreamSecret> {
        self.keeper.downstream_key(id, step)
    }
}

fn unanswered(operation: Operation) -> CheckpointError {
    observe::store_failed(operation, None);
    CheckpointError::unanswered()
}

const NAME_IS_TAKEN: &str = "a checkpoint of this name was saved in the handler's Tx, which is still open, and cannot be saved by itself until that has ended; save it with checkpoint_in";

const WRITER_IS_TAKEN: &str = "a checkpoint cannot be saved by itself while the handler's own Tx<Sqlite> is open, for which it would have to wait; save it with checkpoint_in, or before the first statement of the transaction";

#[cfg(any(feature = "sqlite", feature = "postgres"))]
const CANNOT_JOIN: &str = "the layer's store cannot save a checkpoint in a transaction; PostgresStore and SqliteStore can";

impl fmt::Debug for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Attempt")
            .field("ticket", &self.ticket)
            .field("lost", &self.lost)
            .finish_non_exhaustive()
    }
}

//! The runs of this process: their places, their claims, and those that are left behind.

use std::{
    collections::{HashMap, VecDeque},
    hash::{BuildHasherDefault, Hasher},
    pin::pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, watch};
#[cfg(feature = "metrics")]
use tokio::time::Instant;

#[cfg(feature = "metrics")]
use crate::pace::Beats;
use crate::{
    attempt::Attempt, back_off::BackOff, bounded::within, execution::Outcome, hearts::Hearts,
    options::Options, pace::Pace, record::RecordId, record::Token, store::Ticket, waiting::Waiting,
};

/// The most claims left behind that wait to be settled at once. Those beyond it stay in flight
/// until their `max_run`.
const MAX_ORPHANS: usize = 100_000;

/// How many requests may ask a resolver at once.
const MAX_INQUIRIES: usize = 64;

/// How many requests more than there are places may wait for one.
const MAX_HOPING: usize = 4_096;

/// Shared by all clones of a layer.
pub(crate) struct Live {
    places: Mutex<Places>,
    /// Wakes `drain` when nothing is going on any more.
    idle: Notify,
    /// Wakes those who wait for a place.
    freed: Notify,
    /// Tells sweeps that no further one is to begin.
    drain: Notify,
    /// Tells every run to stop where it is.
    abort: Notify,
    aborted: AtomicBool,
    attempts: Mutex<HashMap<Token, Arc<Attempt>, BuildHasherDefault<AsIs>>>,
    pub(crate) waiting: Waiting,
    /// Records that are held in order to find out what their runs did.
    resolving: AtomicUsize,
    /// The places of requests that ask.
    inquiries: Arc<Semaphore>,
    pub(crate) back_off: BackOff,
    orphans: Mutex<VecDeque<Orphan>>,
    /// Orphans not settled yet, the one at hand included.
    orphaned: AtomicUsize,
    pub(crate) settling: Arc<AtomicBool>,
    pub(crate) hearts: Arc<Hearts>,
    #[cfg(feature = "metrics")]
    pub(crate) shown: Arc<AtomicBool>,
    #[cfg(feature = "metrics")]
    beats: Mutex<Beats>,
    /// What the layers that share this want. The background task watches it, and ends when the last handle is
    /// gone.
    pace: watch::Sender<Pace>,
    pub(crate) warned_of_scope: AtomicBool,
}

/// Tokens are random, and ids of runtimes are few: they need no hashing.
#[derive(Default)]
pub(crate) struct AsIs(u64);

impl Hasher for AsIs {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = number;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// A claim that is left behind, what its record is to become, and the options it was made under.
pub(crate) struct Orphan {
    pub(crate) ticket: Ticket,
    pub(crate) outcome: Outcome,
    pub(crate) options: Arc<Options>,
}

/// How many places are taken: by claims that are being made, and by runs.
#[derive(Default)]
struct Places {
    /// No further place is given.
    draining: bool,
    claiming: usize,
    running: usize,
    /// How many requests wait for a claim to come to nothing.
    hoping: usize,
}

impl Live {
    pub(crate) fn new() -> Self {
        Self {
            places: Mutex::default(),
            idle: Notify::new(),
            freed: Notify::new(),
            drain: Notify::new(),
            abort: Notify::new(),
            aborted: AtomicBool::new(false),
            attempts: Mutex::default(),
            waiting: Waiting::default(),
            resolving: AtomicUsize::new(0),
            inquiries: Arc::new(Semaphore::new(MAX_INQUIRIES)),
            back_off: BackOff::default(),
            orphans: Mutex::default(),
            orphaned: AtomicUsize::new(0),
            settling: Arc::default(),
            hearts: Arc::default(),
            #[cfg(feature = "metrics")]
            shown: Arc::default(),
            #[cfg(feature = "metrics")]
            beats: Mutex::default(),
            pace: watch::channel(Pace::default()).0,
            warned_of_scope: AtomicBool::new(false),
        }
    }

    /// Takes a place for a claim that may become a run. Where all are taken by runs, or the layer is
    /// draining, the answer is `None` at once; where some are only claims being made, most of which
    /// come to nothing, it waits `patience` for one of them.
    pub(crate) async fn admit(
        self: &Arc<Self>,
        limit: usize,
        patience: Duration,
    ) -> Option<Permit> {
        if let Some(permit) = self.try_admit(limit)? {
            return Some(permit);
        }
        // In a box, so that those who need not wait do not carry its weight.
        Box::pin(self.wait_for_place(limit, patience)).await
    }

    async fn wait_for_place(self: &Arc<Self>, limit: usize, patience: Duration) -> Option<Permit> {
        let _hope = Hope::new(self, limit)?;
        let waited = async {
            loop {
                let mut freed = pin!(self.freed.notified());
                freed.as_mut().enable();
                if let Some(permit) = self.try_admit(limit)? {
                    return Some(permit);
                }
                freed.await;
            }
        };
        within(patience, waited).await?
    }

    /// `None`: there will be no place. `Some(None)`: there may soon be one.
    fn try_admit(self: &Arc<Self>, limit: usize) -> Option<Option<Permit>> {
        let mut places = lock(&self.places);
        if places.draining || places.running >= limit {
            return None;
        }
        if places.claiming + places.running >= limit {
            return Some(None);
        }
        places.claiming += 1;
        Some(Some(Permit {
            live: self.clone(),
            runs: false,
        }))
    }

    /// Claims in progress, runs, and outcomes still to be recorded.
    pub(crate) fn running(&self) -> usize {
        let places = lock(&self.places);
        places.claiming + places.running
    }

    /// Ends when every run has ended, no record is held to find out about it, and every claim left behind
    /// is settled.
    pub(crate) async fn idle(&self) {
        loop {
            let mut idle = pin!(self.idle.notified());
            idle.as_mut().enable();
            // In this order: a request that asks is counted before it gives its place back, and what is
            // left behind before that which left it.
            let is_idle = self.running() == 0
                && self.resolving.load(Ordering::SeqCst) == 0
                && !self.has_orphans();
            if is_idle {
                return;
            }
            idle.await;
        }
    }

    pub(crate) fn is_draining(&self) -> bool {
        lock(&self.places).draining
    }

    pub(crate) fn stop_admitting(&self) {
        lock(&self.places).draining = true;
        self.freed.notify_waiters();
        self.drain.notify_waiters();
        self.waiting.wake_all();
    }

    /// Ends when the layer is drained.
    pub(crate) async fn draining(&self) {
        told(&self.drain, || self.is_draining()).await;
    }

    /// Tells every run to stop; each then abandons its claim itself, once it has ended.
    pub(crate) fn abort_all(&self) {
        self.aborted.store(true, Ordering::SeqCst);
        self.abort.notify_waiters();
    }

    pub(crate) fn is_aborted(&self) -> bool {
        self.aborted.load(Ordering::SeqCst)
    }

    /// Ends when the runs are told to stop.
    pub(crate) async fn aborted(&self) {
        told(&self.abort, || self.is_aborted()).await;
    }

    /// Counts a record that is held to find out about it, until the guard is dropped.
    pub(crate) fn resolves(self: &Arc<Self>) -> Resolves {
        self.resolving.fetch_add(1, Ordering::SeqCst);
        Resolves(self.clone())
    }

    /// The same for a request that asks, which holds no place meanwhile. `None`: enough of them do.
    pub(crate) fn inquires(self: &Arc<Self>) -> Option<Inquires> {
        let place = self.inquiries.clone().try_acquire_owned().ok()?;
        Some(Inquires {
            _place: place,
            _counted: self.resolves(),
        })
    }

    /// Puts a won claim under the heartbeat until the guard is dropped.
    pub(crate) fn register(self: &Arc<Self>, attempt: &Arc<Attempt>, token: Token) -> Registered {
        lock(&self.attempts).insert(token, attempt.clone());
        Registered {
            live: self.clone(),
            token,
        }
    }

    /// The claims under the heartbeat.
    pub(crate) fn attempts(&self) -> Vec<(Ticket, Arc<Attempt>)> {
        lock(&self.attempts)
            .values()
            .filter_map(|attempt| Some((attempt.ticket()?.clone(), attempt.clone())))
            .collect()
    }

    /// The run under this token, if it is going on here.
    pub(crate) fn running_here(&self, token: &Token) -> Option<Arc<Attempt>> {
        lock(&self.attempts).get(token).cloned()
    }

    /// A run of such a record, whatever its token, if one is going on here.
    pub(crate) fn running_of(&self, is_it: impl Fn(&RecordId) -> bool) -> Option<Arc<Attempt>> {
        let attempts = lock(&self.attempts);
        let mut found = attempts
            .values()
            .filter(|attempt| attempt.ticket().is_some_and(|ticket| is_it(&ticket.id)));
        found.next().cloned()
    }

    /// Runs, and outcomes still to be recorded.
    #[cfg(feature = "metrics")]
    pub(crate) fn runs(&self) -> usize {
        lock(&self.places).running
    }

    /// The claims are renewed from `at`, or there were none to be renewed.
    #[cfg(feature = "metrics")]
    pub(crate) fn beaten(&self, at: Instant) {
        lock(&self.beats).beaten(at);
    }

    /// Shows what goes on where nobody looks any more, since the runtime has ended that did.
    #[cfg(feature = "metrics")]
    pub(crate) fn show_at_the_end(&self) {
        if !self.shown.load(Ordering::Relaxed) {
            crate::observe::gauges::sample();
        }
    }

    /// The background work has ended.
    #[cfg(feature = "metrics")]
    pub(crate) fn beats_no_more(&self) {
        *lock(&self.beats) = Beats::default();
    }

    /// How long ago that was, or how long it took to come to that if it was longer and not long ago.
    #[cfg(feature = "metrics")]
    pub(crate) fn heartbeat_age(&self) -> Duration {
        let spell = self
            .pace
            .borrow()
            .shortest_lease
            .min(crate::bounded::FOREVER);
        lock(&self.beats).age(Instant::now(), spell)
    }

    pub(crate) fn pace(&self) -> watch::Receiver<Pace> {
        self.pace.subscribe()
    }

    /// Takes what a layer wants into account.
    pub(crate) fn keep_pace_with(&self, options: &Options) {
        self.pace.send_if_modified(|pace| {
            let before = *pace;
            pace.keep_up_with(options);
            before != *pace
        });
    }

    /// Keeps a claim that is left behind.
    pub(crate) fn leave_behind(&self, orphan: Orphan) {
        let mut orphans = lock(&self.orphans);
        if orphans.len() < MAX_ORPHANS {
            orphans.push_back(orphan);
            self.orphaned.fetch_add(1, Ordering::SeqCst);
        }
    }

    pub(crate) fn has_queued(&self) -> bool {
        !lock(&self.orphans).is_empty()
    }

    pub(crate) fn next_orphan(&self) -> Option<Orphan> {
        lock(&self.orphans).pop_front()
    }

    /// Not settled yet: others come first, so that one that cannot be settled blocks none.
    pub(crate) fn put_back(&self, orphan: Orphan) {
        lock(&self.orphans).push_back(orphan);
    }

    pub(crate) fn orphan_settled(&self) {
        if self.orphaned.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.idle.notify_waiters();
        }
    }

    /// Whether there is any that is not settled yet, the one at hand included.
    pub(crate) fn has_orphans(&self) -> bool {
        self.orphaned.load(Ordering::SeqCst) > 0
    }
}

/// A place: of a claim that is being made, then of the run it became.
pub(crate) struct Permit {
    live: Arc<Live>,
    runs: bool,
}

impl Permit {
    /// The claim was won.
    pub(crate) fn runs(&mut self) {
        let mut places = lock(&self.live.places);
        places.claiming -= 1;
        places.running += 1;
        self.runs = true;
        if places.hoping > 0 {
            // Perhaps there is nothing left to hope for.
            self.live.freed.notify_waiters();
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut places = lock(&self.live.places);
        match self.runs {
            true => places.running -= 1,
            false => places.claiming -= 1,
        }
        let (left, hoping) = (places.claiming + places.running, places.hoping);
        drop(places);
        #[cfg(feature = "metrics")]
        self.live.show_at_the_end();
        if hoping > 0 {
            self.live.freed.notify_one();
        }
        if left == 0 {
            self.live.idle.notify_waiters();
        }
    }
}

/// One who waits for a place.
struct Hope<'a>(&'a Live);

impl<'a> Hope<'a> {
    /// `None` when so many wait already that there is no hope.
    fn new(live: &'a Live, limit: usize) -> Option<Self> {
        let mut places = lock(&live.places);
        if places.hoping >= limit.saturating_add(MAX_HOPING) {
            return None;
        }
        places.hoping += 1;
        Some(Self(live))
    }
}

impl Drop for Hope<'_> {
    fn drop(&mut self) {
        lock(&self.0.places).hoping -= 1;
    }
}

/// A record that is held to find out about it.
pub(crate) struct Resolves(Arc<Live>);

impl Drop for Resolves {
    fn drop(&mut self) {
        if self.0.resolving.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.0.idle.notify_waiters();
        }
    }
}

/// A request that asks.
pub(crate) struct Inquires {
    _place: OwnedSemaphorePermit,
    _counted: Resolves,
}

/// A claim under the heartbeat.
pub(crate) struct Registered {
    live: Arc<Live>,
    token: Token,
}

impl Drop for Registered {
    fn drop(&mut self) {
        lock(&self.live.attempts).remove(&self.token);
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No code that can panic runs under these locks, and none leaves half a change behind.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Ends when whoever sets the flag has set it, and notified.
async fn told(notify: &Notify, is_told: impl Fn() -> bool) {
    let mut notified = pin!(notify.notified());
    // Before the flag is looked at, so that no notification is missed in between.
    notified.as_mut().enable();
    if !is_told() {
        notified.await;
    }
}

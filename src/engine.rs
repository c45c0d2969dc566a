//! What all clones of a layer share: the store, the options, the runs of this process, and the
//! background work that keeps their claims alive.

use std::{
    collections::{HashMap, VecDeque},
    future::Future,
    pin::{Pin, pin},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::{
    runtime::Handle,
    sync::{Notify, watch},
    time::Instant,
};

use crate::{
    attempt::{Attempt, Keeper},
    bounded::{FOREVER, First, first, within},
    execution::{self, Outcome},
    observe::{self, Operation},
    options::Options,
    record::Token,
    store::{Settled, Store, StoreError, Ticket},
    waiting::Waiting,
};

/// One layer's view: its options over the shared rest.
pub(crate) struct Engine<S> {
    pub(crate) store: S,
    pub(crate) options: Arc<Options>,
    pub(crate) live: Arc<Live>,
}

/// The runs of this process, shared by all clones of a layer.
pub(crate) struct Live {
    /// Claims in progress, runs, and outcomes still to be recorded.
    running: AtomicUsize,
    draining: AtomicBool,
    /// Wakes `drain` when `running` falls to zero.
    idle: Notify,
    /// Tells every run to stop where it is.
    abort: Notify,
    aborted: AtomicBool,
    attempts: Mutex<HashMap<Token, Arc<Attempt>>>,
    pub(crate) waiting: Waiting,
    orphans: Mutex<VecDeque<(Ticket, Outcome)>>,
    undoing: Arc<AtomicBool>,
    maintained: Arc<AtomicBool>,
    /// The shortest and the longest lease of the layers that share this. The background task
    /// watches it, and ends when the last handle is gone.
    leases: watch::Sender<(Duration, Duration)>,
    pub(crate) warned_of_scope: AtomicBool,
}

/// The most claims of unknown fate that wait to be released at once. Those beyond it stay in
/// flight until their `max_run`.
const MAX_ORPHANS: usize = 100_000;

/// How many records one purge removes at most, so that claims never wait long behind it.
const PURGE_BATCH: usize = 500;

impl Live {
    pub(crate) fn new() -> Self {
        Self {
            running: AtomicUsize::new(0),
            draining: AtomicBool::new(false),
            idle: Notify::new(),
            abort: Notify::new(),
            aborted: AtomicBool::new(false),
            attempts: Mutex::default(),
            waiting: Waiting::default(),
            orphans: Mutex::default(),
            undoing: Arc::default(),
            maintained: Arc::default(),
            leases: watch::channel((Duration::MAX, Duration::ZERO)).0,
            warned_of_scope: AtomicBool::new(false),
        }
    }

    /// Takes a place for one run; `None` when all are taken or the layer is draining.
    pub(crate) fn admit(self: &Arc<Self>, limit: usize) -> Option<Permit> {
        let permit = Permit(self.clone());
        let before = self.running.fetch_add(1, Ordering::SeqCst);
        // The permit is dropped, and the place given back, when the answer is no.
        (before < limit && !self.draining.load(Ordering::SeqCst)).then_some(permit)
    }

    /// Ends when every run has ended.
    pub(crate) async fn idle(&self) {
        loop {
            let mut idle = pin!(self.idle.notified());
            idle.as_mut().enable();
            if self.running.load(Ordering::SeqCst) == 0 {
                return;
            }
            idle.await;
        }
    }

    pub(crate) fn stop_admitting(&self) {
        self.draining.store(true, Ordering::SeqCst);
    }

    pub(crate) fn running(&self) -> usize {
        self.running.load(Ordering::SeqCst)
    }

    /// Tells every run to stop; each then abandons its claim itself, once it has ended.
    pub(crate) fn abort_all(&self) {
        self.aborted.store(true, Ordering::SeqCst);
        self.abort.notify_waiters();
    }

    /// Ends when the runs are told to stop.
    pub(crate) async fn aborted(&self) {
        let mut abort = pin!(self.abort.notified());
        abort.as_mut().enable();
        if !self.aborted.load(Ordering::SeqCst) {
            abort.await;
        }
    }

    /// Puts a won claim under the heartbeat until the guard is dropped.
    pub(crate) fn register(self: &Arc<Self>, attempt: &Arc<Attempt>, token: Token) -> Registered {
        lock(&self.attempts).insert(token, attempt.clone());
        Registered {
            live: self.clone(),
            token,
        }
    }

    fn attempts(&self) -> Vec<(Ticket, Arc<Attempt>)> {
        lock(&self.attempts)
            .values()
            .filter_map(|attempt| Some((attempt.ticket()?.clone(), attempt.clone())))
            .collect()
    }
}

/// A place for one run.
pub(crate) struct Permit(Arc<Live>);

impl Drop for Permit {
    fn drop(&mut self) {
        if self.0.running.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.0.idle.notify_waiters();
        }
    }
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

impl<S: Store> Engine<S> {
    pub(crate) fn new(store: S, options: Arc<Options>, live: Arc<Live>) -> Self {
        let lease = options.lease.min(FOREVER);
        live.leases.send_if_modified(|(shortest, longest)| {
            let before = (*shortest, *longest);
            (*shortest, *longest) = (lease.min(*shortest), lease.max(*longest));
            before != (*shortest, *longest)
        });
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
            let live = Arc::downgrade(&self.live);
            let leases = self.live.leases.subscribe();
            let (store, options) = (self.store.clone(), self.options.clone());
            runtime.spawn(async move {
                let _mark = mark;
                maintenance(store, options, live, leases).await;
            });
        }
    }

    /// Undoes a claim of which nobody knows whether it was won; its request has been answered.
    pub(crate) fn undo_orphan(self: &Arc<Self>, ticket: Ticket, undo: Outcome) {
        let mut orphans = lock(&self.live.orphans);
        if orphans.len() >= MAX_ORPHANS {
            return;
        }
        orphans.push_back((ticket, undo));
        drop(orphans);
        if let Some(mark) = Mark::set(&self.live.undoing)
            && let Ok(runtime) = Handle::try_current()
        {
            runtime.spawn(self.clone().undo_orphans(mark));
        }
    }

    async fn undo_orphans(self: Arc<Self>, mark: Mark) {
        let mut mark = mark;
        loop {
            while let Some((ticket, undo)) = self.next_orphan() {
                let undone = execution::record_at_last(&self, &ticket, undo);
                if let First::Right(()) = first(undone, self.live.aborted()).await {
                    return;
                }
            }
            drop(mark);
            // Whoever came after the last look and before this saw the mark, and relies on it.
            if lock(&self.live.orphans).is_empty() {
                return;
            }
            match Mark::set(&self.live.undoing) {
                Some(again) => mark = again,
                None => return,
            }
        }
    }

    fn next_orphan(&self) -> Option<(Ticket, Outcome)> {
        lock(&self.live.orphans).pop_front()
    }
}

impl<S: Store> Keeper for Engine<S> {
    fn still_holds<'a>(
        &'a self,
        ticket: &'a Ticket,
    ) -> Pin<Box<dyn Future<Output = Result<bool, StoreError>> + Send + 'a>> {
        Box::pin(async move {
            let renewed = self
                .store
                .renew(std::slice::from_ref(ticket), self.options.lease);
            match within(self.options.store_timeout, renewed).await {
                Some(Ok(settled)) => Ok(settled == [Settled::Done]),
                Some(Err(error)) => {
                    observe::store_failed(Operation::Renew, Some(&error));
                    Err(error)
                }
                None => {
                    observe::store_failed(Operation::Renew, None);
                    Err(StoreError::new(
                        crate::store::StoreErrorKind::Unavailable,
                        "the store did not answer within store_timeout",
                    ))
                }
            }
        })
    }
}

/// Says that a background task is at work, and stops saying so when it ends, however it ends.
struct Mark(Arc<AtomicBool>);

impl Mark {
    /// `None` when one is at work already.
    fn set(flag: &Arc<AtomicBool>) -> Option<Self> {
        let set = flag.load(Ordering::Relaxed) || flag.swap(true, Ordering::SeqCst);
        (!set).then(|| Self(flag.clone()))
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

/// Heartbeat and purge, until the last handle of the layer is gone. Side by side, so that a purge
/// that takes its time costs no claim its lease.
async fn maintenance<S: Store>(
    store: S,
    options: Arc<Options>,
    live: Weak<Live>,
    leases: watch::Receiver<(Duration, Duration)>,
) {
    let beats = heartbeats(&store, &options, live, leases);
    first(beats, purges(&store, &options)).await;
}

async fn heartbeats<S: Store>(
    store: &S,
    options: &Options,
    live: Weak<Live>,
    mut leases: watch::Receiver<(Duration, Duration)>,
) {
    let mut heartbeat = Heartbeat::new();
    loop {
        let (shortest, longest) = *leases.borrow_and_update();
        let renewed = {
            let Some(live) = live.upgrade() else { return };
            let patience = options.store_timeout.min(shortest / 3);
            heartbeat.beat(store, patience, &live, longest).await
        };
        // A missed beat is made up for quickly: a lease has room for several.
        let pause = tokio::time::sleep(shortest / if renewed { 3 } else { 10 });
        if let First::Right(Err(_)) = first(pause, leases.changed()).await {
            return;
        }
    }
}

async fn purges<S: Store>(store: &S, options: &Options) {
    let mut wait = options.purge_interval();
    let mut failures = 0_u32;
    loop {
        tokio::time::sleep(jittered(wait)).await;
        wait = match within(options.store_timeout, store.purge(PURGE_BATCH)).await {
            Some(Ok(count)) if count >= PURGE_BATCH => Duration::from_millis(5),
            Some(Ok(_)) => {
                failures = 0;
                options.purge_interval()
            }
            failed => {
                observe::store_failed(Operation::Purge, failed.and_then(Result::err).as_ref());
                failures = (failures + 1).min(5);
                options.purge_interval() * 2_u32.pow(failures)
            }
        };
    }
}

/// Keeps the claims of this process alive, and tells their runs when that fails.
struct Heartbeat {
    /// Until when each claim is known to be believed alive, by this process's clock.
    until: HashMap<Token, Instant>,
    last: Instant,
}

impl Heartbeat {
    fn new() -> Self {
        Self {
            until: HashMap::new(),
            last: Instant::now(),
        }
    }

    /// Renews, when there is anything to renew. Answers whether all is well.
    async fn beat<S: Store>(
        &mut self,
        store: &S,
        patience: Duration,
        live: &Live,
        lease: Duration,
    ) -> bool {
        let attempts = live.attempts();
        let asked = Instant::now();
        // A claim that is new here was made after the last beat, and is believed alive from then.
        let since = std::mem::replace(&mut self.last, asked);
        let before = std::mem::take(&mut self.until);
        self.until.extend(attempts.iter().map(|(ticket, _)| {
            let until = before.get(&ticket.token).copied();
            (ticket.token, until.unwrap_or(since + lease))
        }));
        if attempts.is_empty() {
            return true;
        }
        let tickets: Vec<_> = attempts.iter().map(|(ticket, _)| ticket.clone()).collect();
        match within(patience, store.renew(&tickets, lease)).await {
            Some(Ok(settled)) => {
                for ((ticket, attempt), settled) in attempts.iter().zip(settled) {
                    self.until.insert(ticket.token, asked + lease);
                    attempt.set_lost(settled == Settled::Lost);
                }
                true
            }
            failed => {
                observe::store_failed(Operation::Renew, failed.and_then(Result::err).as_ref());
                let now = Instant::now();
                for (ticket, attempt) in &attempts {
                    let until = self.until.get(&ticket.token);
                    attempt.set_lost(until.is_none_or(|until| *until <= now));
                }
                false
            }
        }
    }
}

/// Growing pauses between tries: 10 ms doubled up to 1 s, each jittered.
pub(crate) struct Pause(Duration);

impl Default for Pause {
    fn default() -> Self {
        Self(Duration::from_millis(10))
    }
}

impl Pause {
    pub(crate) async fn wait(&mut self) {
        tokio::time::sleep(jittered(self.0)).await;
        self.0 = (self.0 * 2).min(Duration::from_secs(1));
    }
}

/// Between half of and the whole duration, so that many processes do not move in step.
fn jittered(duration: Duration) -> Duration {
    duration.mul_f64(0.5 + rand::random::<f64>() / 2.0)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No code that can panic runs under these locks, and none leaves half a change behind.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

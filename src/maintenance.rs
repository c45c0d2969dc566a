//! Background work: the heartbeat that keeps this process's claims alive, the purge, and the
//! settling of claims that were left behind. All of it ends with the last handle of the layer.

use std::{
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::{sync::watch, time::Instant};

use crate::{
    bounded::{FOREVER, First, first, within},
    execution::{Tried, try_to_record},
    hearts::Heart,
    live::{Live, Orphan},
    observe::{self, Observed, Operation},
    options::Options,
    pace::Pace,
    store::{Settled, Store, StoreError, StoreErrorKind},
};

#[cfg(feature = "metrics")]
use crate::store::Inspect;

/// How many records one purge removes at most, so that claims never wait long behind it.
const PURGE_BATCH: usize = 500;

/// No lease is so short that its heartbeat may keep a processor busy.
const SHORTEST_PAUSE: Duration = Duration::from_millis(1);

/// Says that a background task is at work, and stops saying so when it ends, however it ends.
pub(crate) struct Mark(Arc<AtomicBool>);

impl Mark {
    /// `None` when one is at work already.
    pub(crate) fn set(flag: &Arc<AtomicBool>) -> Option<Self> {
        let set = flag.load(Ordering::Relaxed) || flag.swap(true, Ordering::SeqCst);
        (!set).then(|| Self(flag.clone()))
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

/// Heartbeat and purge, in each runtime. Side by side, so that a purge that takes its time costs no claim its
/// lease.
pub(crate) async fn maintain<S: Store>(
    store: S,
    options: Arc<Options>,
    live: Weak<Live>,
    pace: watch::Receiver<Pace>,
    _heart: Heart,
) {
    let beats = heartbeats(&store, &options, live, pace.clone());
    first(beats, purges(&store, &options, pace)).await;
}

/// What is shown of both and of the store, until the last handle of the layer is gone.
#[cfg(feature = "metrics")]
pub(crate) async fn show<S: Inspect>(
    store: S,
    live: Weak<Live>,
    mut pace: watch::Receiver<Pace>,
    mark: Mark,
) {
    let _ending = Ending(live.clone());
    // Dropped before that: what ends later then shows it by itself.
    let _mark = mark;
    let shown = first(
        observe::gauges::show(live),
        count_records(&store, pace.clone()),
    );
    let over = async { while pace.changed().await.is_ok() {} };
    first(shown, over).await;
}

/// Shows what goes on once more when the background work ends, also with its runtime.
#[cfg(feature = "metrics")]
struct Ending(Weak<Live>);

#[cfg(feature = "metrics")]
impl Drop for Ending {
    fn drop(&mut self) {
        if let Some(live) = self.0.upgrade() {
            live.beats_no_more();
        }
        observe::gauges::sample();
    }
}

/// What was asked of a store failed because it is closed: nothing is wrong, and nothing is left to be done.
fn is_closed<T>(answer: &Option<Result<T, StoreError>>) -> bool {
    matches!(answer, Some(Err(error)) if error.kind() == StoreErrorKind::Closed)
}

/// How long a count may take. Not `store_timeout`: what is given up then would be begun again, and never end.
#[cfg(feature = "metrics")]
const COUNTING: Duration = Duration::from_secs(60);

/// How many times as long as a count took there is none, so that counting takes a tenth of the time.
#[cfg(feature = "metrics")]
const RESTS: u32 = 9;

/// Shows what the store holds. It reads the whole table for that, so it does so rarely, and only where
/// somebody looks. Goes on until it is dropped.
#[cfg(feature = "metrics")]
async fn count_records<S: Inspect>(store: &S, mut pace: watch::Receiver<Pace>) {
    loop {
        let every = pace.borrow_and_update().count;
        if every == Duration::MAX {
            changed(&mut pace).await;
            continue;
        }
        let begun = Instant::now();
        if observe::metrics::is_collected() {
            match within(COUNTING, store.counts()).await {
                Some(Ok(counts)) => observe::metrics::records(counts),
                failed if is_closed(&failed) => return std::future::pending().await,
                failed => {
                    let error = failed.and_then(Result::err);
                    observe::store_failed(Operation::Counts, error.as_ref());
                }
            }
        }
        let rest = begun.elapsed().saturating_mul(RESTS);
        let pause = jittered(every.min(FOREVER));
        tokio::time::sleep(rest).await;
        first(
            tokio::time::sleep(pause.saturating_sub(rest)),
            changed(&mut pace),
        )
        .await;
    }
}

/// Ends when another pace is wanted, which never happens once the last handle of the layer is gone.
async fn changed(pace: &mut watch::Receiver<Pace>) {
    if pace.changed().await.is_err() {
        std::future::pending().await
    }
}

async fn heartbeats<S: Store>(
    store: &S,
    options: &Options,
    live: Weak<Live>,
    mut pace: watch::Receiver<Pace>,
) {
    loop {
        let Pace {
            shortest_lease: shortest,
            longest_lease: longest,
            ..
        } = *pace.borrow_and_update();
        let renewed = {
            let Some(live) = live.upgrade() else { return };
            // Half a lease: a slow store is waited for, and one answer that never comes leaves
            // time for another try.
            let patience = options.store_timeout.min(shortest / 2);
            beat(store, patience, &live, longest).await
        };
        let pause = match renewed {
            Beat::Renewed => shortest / 3,
            // A missed beat is made up for quickly: a lease has room for several.
            Beat::Failed => shortest / 10,
            Beat::Unanswered => SHORTEST_PAUSE,
        };
        let pause = tokio::time::sleep(pause.max(SHORTEST_PAUSE));
        if let First::Right(Err(_)) = first(pause, pace.changed()).await {
            return;
        }
    }
}

/// Goes on until it is dropped.
async fn purges<S: Store>(store: &S, options: &Options, mut pace: watch::Receiver<Pace>) {
    let mut more = false;
    let mut failures = 0_u32;
    loop {
        let wait = match more {
            true => Duration::from_millis(5),
            false => pace.borrow_and_update().purge * 2_u32.pow(failures),
        };
        let pause = tokio::time::sleep(jittered(wait));
        if let First::Right(()) = first(pause, changed(&mut pace)).await {
            continue;
        }
        let purged = within(options.store_timeout, store.purge(PURGE_BATCH)).await;
        if is_closed(&purged) {
            return std::future::pending().await;
        }
        (more, failures) = match purged {
            Some(Ok(count)) if count >= PURGE_BATCH => (true, failures),
            Some(Ok(_)) => (false, 0),
            failed => {
                observe::store_failed(Operation::Purge, failed.and_then(Result::err).as_ref());
                (false, (failures + 1).min(5))
            }
        };
    }
}

/// How a heartbeat went.
enum Beat {
    /// Done, or there was nothing to renew.
    Renewed,
    Failed,
    Unanswered,
}

/// Keeps the claims of this process alive, and tells their runs when that fails.
async fn beat<S: Store>(store: &S, patience: Duration, live: &Live, lease: Duration) -> Beat {
    let attempts = live.attempts();
    let asked = Instant::now();
    attempts.iter().for_each(|(_, attempt)| attempt.seen(asked));
    let tickets: Vec<_> = attempts.iter().map(|(ticket, _)| ticket.clone()).collect();
    live.hearts.believed().begins(&tickets, asked, lease);
    if attempts.is_empty() {
        #[cfg(feature = "metrics")]
        live.beaten(asked);
        return Beat::Renewed;
    }
    let renewed = within(patience, store.renew(&tickets, lease)).await;
    let answered = renewed.is_some();
    let mut believed = live.hearts.believed();
    if let Some(Ok(settled)) = renewed {
        for ((ticket, attempt), settled) in attempts.iter().zip(settled) {
            if believed.renewed(ticket.token, asked + lease) {
                attempt.set_lost(settled == Settled::Lost);
            }
        }
        #[cfg(feature = "metrics")]
        live.beaten(asked);
        return Beat::Renewed;
    }
    observe::store_failed(Operation::Renew, renewed.and_then(Result::err).as_ref());
    let now = Instant::now();
    for (ticket, attempt) in &attempts {
        attempt.set_lost(believed.is_over(ticket.token, now));
    }
    match answered {
        true => Beat::Failed,
        false => Beat::Unanswered,
    }
}

/// Settles what was left behind: claims of unknown fate whose requests have been answered, and runs
/// that ended with their runtime. Once the layer is drained, or its last handle gone, what is left
/// is tried for one `store_timeout` more, and that is the end.
pub(crate) async fn settle_orphans<S: Store>(store: S, live: Arc<Live>, mark: Mark) {
    let mut mark = mark;
    let mut ends = None;
    loop {
        settle_queued(&store, &live, &mut ends).await;
        drop(mark);
        // Whoever came after the last look and before this saw the mark, and relies on it.
        if !live.has_queued() {
            return;
        }
        match Mark::set(&live.settling) {
            Some(again) => mark = again,
            None => return,
        }
    }
}

async fn settle_queued<S: Store>(store: &S, live: &Arc<Live>, ends: &mut Option<Instant>) {
    let mut pause = Pause::default();
    while let Some(mut at_hand) = AtHand::take(live) {
        let Some(orphan) = &mut at_hand.orphan else {
            return;
        };
        let limit = orphan.options.store_timeout.min(FOREVER);
        if live.is_aborted() || Arc::strong_count(live) <= AT_HAND {
            ends.get_or_insert_with(|| Instant::now() + limit);
        }
        let over = ends.map(|ends| ends.saturating_duration_since(Instant::now()));
        // Whose request it was is forgotten by now.
        let observed = Observed::default();
        let (ticket, outcome) = (&orphan.ticket, &mut orphan.outcome);
        let tried = try_to_record(store, &orphan.options, ticket, outcome, &observed);
        match within(over.unwrap_or(limit), tried).await {
            Some(Tried::Settled(_)) => {
                at_hand.settled();
                pause = Pause::default();
            }
            Some(Tried::Hopeless) => {
                observe::recording_failed(orphan.outcome.operation(), &observed);
                at_hand.settled();
                pause = Pause::default();
            }
            Some(Tried::Failed) | None if over.is_some_and(|left| left.is_zero()) => {
                observe::recording_failed(orphan.outcome.operation(), &observed);
                at_hand.settled();
            }
            Some(Tried::Failed) | None => {
                drop(at_hand);
                if ends.is_some() {
                    // It goes on quickly now; it must not spin, though.
                    tokio::time::sleep(HURRY).await;
                } else {
                    first(pause.wait(), live.aborted()).await;
                }
            }
        }
    }
}

/// Between the last tries.
const HURRY: Duration = Duration::from_millis(10);

/// Handles of the layer's runs that the settling itself has.
const AT_HAND: usize = 2;

/// The orphan at hand; one that is not settled goes back, even when this task ends in the middle.
struct AtHand {
    live: Arc<Live>,
    orphan: Option<Orphan>,
}

impl AtHand {
    fn take(live: &Arc<Live>) -> Option<Self> {
        let orphan = live.next_orphan()?;
        Some(Self {
            live: live.clone(),
            orphan: Some(orphan),
        })
    }

    fn settled(&mut self) {
        self.orphan = None;
        self.live.orphan_settled();
    }
}

impl Drop for AtHand {
    fn drop(&mut self) {
        if let Some(orphan) = self.orphan.take() {
            self.live.put_back(orphan);
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
        // In a box, since few futures that may pause ever do.
        Box::pin(tokio::time::sleep(jittered(self.0))).await;
        self.0 = (self.0 * 2).min(Duration::from_secs(1));
    }
}

/// Between half of and the whole duration, so that many processes do not move in step.
pub(crate) fn jittered(duration: Duration) -> Duration {
    duration.mul_f64(0.5 + rand::random::<f64>() / 2.0)
}

//! The soft limit on the records of a scope: what is known of each scope, and who is refused for it.
//!
//! Nothing is asked on the way of a request that may run. What is known of a scope is a sample: what the
//! store counted, and the records made and freed here since.

use std::{
    collections::{HashMap, hash_map::Entry},
    fmt, mem,
    pin::pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::{runtime::Handle, sync::Notify, time::Instant};

use crate::{
    Rejection, Scope,
    bounded::within,
    engine::Engine,
    observe::{self, Operation},
    record::RecordId,
    store::Inspect,
};

/// The most scopes of which anything is known. Of one that is dropped nothing is, until the store is asked
/// again.
const MAX_SCOPES: usize = 10_000;

/// How long a sample is good for, at least.
const FRESH: Duration = Duration::from_secs(10);

/// How many times as long as a count took there is none of the same scope, so that counting it takes a
/// tenth of the time, whatever its limit.
const PAUSES: u32 = 9;

/// How long a count may take. Not [`store_timeout`](crate::IdempotencyLayer::store_timeout): what is given
/// up then would be begun again, and never end.
const PATIENCE: Duration = Duration::from_secs(60);

/// How long a count is believed while those after it fail.
const BELIEVED: Duration = Duration::from_secs(60);

/// How many questions there are in the background at once. Whoever finds all places taken asks with its
/// next request.
const MAX_QUESTIONS: usize = 2;

/// How long nothing is asked after a question that failed, of any scope.
const REST: Duration = Duration::from_secs(1);

/// The limit of a layer and its clones, and what they know of their scopes.
pub(crate) struct ScopeLimit {
    records: u64,
    known: Mutex<Known>,
    /// How many answers there have been, over all scopes.
    answers: AtomicU64,
    /// Wakes those who wait for the answer to another's question.
    answered: Notify,
}

/// Two halves of a bounded table: when the recent one is full, what was not used meanwhile is dropped.
#[derive(Default)]
struct Known {
    recent: HashMap<Scope, Sample>,
    older: HashMap<Scope, Sample>,
    /// Those who take a place.
    questions: usize,
    rests_until: Option<Instant>,
}

/// What is known of a scope.
struct Sample {
    /// What the store said last.
    counted: Option<u64>,
    /// Which of all answers that was.
    answer: u64,
    /// Records made since, less those freed.
    since: i64,
    /// Set while the store fails to say more.
    believed_until: Option<Instant>,
    counted_at: Instant,
    stale_from: Instant,
    is_asked: bool,
}

impl Sample {
    /// Nothing yet.
    fn new(now: Instant) -> Self {
        Self {
            counted: None,
            answer: 0,
            since: 0,
            believed_until: None,
            counted_at: now,
            stale_from: now,
            is_asked: false,
        }
    }

    fn is_full(&self, records: u64, now: Instant) -> bool {
        let counted = self.counted;
        (self.believed_until).is_none_or(|until| now < until)
            && counted.is_some_and(|counted| counted.saturating_add_signed(self.since) >= records)
    }
}

/// How a scope stands, as far as is known.
struct Standing {
    is_full: bool,
    news: News,
}

/// Whether more is to be known.
enum News {
    /// Not now: the sample is fresh, or the store is not to be asked.
    None,
    /// Somebody else is asking.
    Awaited,
    ToBeAsked(Question),
}

impl ScopeLimit {
    pub(crate) fn new(records: u64) -> Self {
        Self {
            records,
            known: Mutex::default(),
            answers: AtomicU64::new(0),
            answered: Notify::new(),
        }
    }

    /// To be read before a claim is sent, for [`made`](Self::made).
    pub(crate) fn answers(&self) -> u64 {
        self.answers.load(Ordering::SeqCst)
    }

    /// A record was made by a claim. What the store has counted since that was sent may include it: then it
    /// is not added, since a caller is better let in late than refused by mistake.
    pub(crate) fn made(&self, scope: &Scope, answers_before: u64) {
        if let Some(sample) = self.known().find(scope)
            && sample.answer <= answers_before
        {
            sample.since += 1;
        }
    }

    /// A record was given up again.
    pub(crate) fn freed(&self, scope: &Scope) {
        if let Some(sample) = self.known().find(scope) {
            sample.since -= 1;
        }
    }

    fn look(self: &Arc<Self>, scope: &Scope) -> Standing {
        let now = Instant::now();
        let mut known = self.known();
        // Dropped after the lock is given up: it may be large.
        let _dropped = known.make_room(scope);
        let rests = known.rests_until.is_some_and(|until| now < until);
        let is_busy = known.questions >= MAX_QUESTIONS;
        let sample = known.sample(scope, now);
        let is_full = sample.is_full(self.records, now);
        // Whoever would be refused needs no place, and so is not held up by others.
        let may_ask = !rests && (is_full || !is_busy);
        let news = match sample.is_asked {
            true => News::Awaited,
            false if now < sample.stale_from || !may_ask => News::None,
            false => {
                sample.is_asked = true;
                known.questions += usize::from(!is_full);
                News::ToBeAsked(Question {
                    limit: self.clone(),
                    scope: scope.clone(),
                    has_place: !is_full,
                })
            }
        };
        drop(known);
        Standing { is_full, news }
    }

    fn know(&self, scope: &Scope, count: u64, took: Duration) {
        let now = Instant::now();
        let mut known = self.known();
        let answer = self.answers.fetch_add(1, Ordering::SeqCst) + 1;
        if let Some(sample) = known.find(scope) {
            sample.counted = Some(count);
            sample.answer = answer;
            sample.since = 0;
            sample.believed_until = None;
            sample.counted_at = now;
            sample.stale_from = now + FRESH.max(took * PAUSES);
        }
    }

    fn fail(&self, scope: &Scope, took: Duration) {
        let now = Instant::now();
        let mut known = self.known();
        known.rests_until = Some(now + REST);
        if let Some(sample) = known.find(scope) {
            sample.believed_until = Some(sample.counted_at + BELIEVED);
            sample.stale_from = now + REST.max(took * PAUSES);
        }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        // No code that can panic runs under the lock, and none leaves half a change behind.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Known {
    /// Answers what had to go for the sake of this scope.
    fn make_room(&mut self, scope: &Scope) -> HashMap<Scope, Sample> {
        if self.recent.len() < MAX_SCOPES / 2 || self.recent.contains_key(scope) {
            return HashMap::new();
        }
        mem::replace(&mut self.older, mem::take(&mut self.recent))
    }

    fn sample(&mut self, scope: &Scope, now: Instant) -> &mut Sample {
        match self.recent.entry(scope.clone()) {
            Entry::Occupied(sample) => sample.into_mut(),
            Entry::Vacant(place) => {
                let sample = self.older.remove(scope);
                place.insert(sample.unwrap_or_else(|| Sample::new(now)))
            }
        }
    }

    fn find(&mut self, scope: &Scope) -> Option<&mut Sample> {
        match self.recent.get_mut(scope) {
            None => self.older.get_mut(scope),
            found => found,
        }
    }
}

/// The right to ask the store for a scope, which only one has at a time.
struct Question {
    limit: Arc<ScopeLimit>,
    scope: Scope,
    /// Whether it is one of the few that may be under way at once.
    has_place: bool,
}

impl Question {
    /// Without an answer what was known goes on to hold, for a while.
    async fn ask<S: Inspect>(self, store: &S) {
        let begun = Instant::now();
        let counted = store.count_in(&self.scope, self.limit.records);
        let counted = within(PATIENCE, counted).await;
        // What it took counts whether it was the store's work or a wait in its line: then it is busy.
        let took = begun.elapsed();
        match counted {
            Some(Ok(count)) => self.limit.know(&self.scope, count, took),
            failed => {
                let error = failed.and_then(Result::err);
                observe::store_failed(Operation::CountIn, error.as_ref());
                self.limit.fail(&self.scope, took);
            }
        }
    }
}

impl Drop for Question {
    fn drop(&mut self) {
        let mut known = self.limit.known();
        known.questions -= usize::from(self.has_place);
        if let Some(sample) = known.find(&self.scope) {
            sample.is_asked = false;
        }
        drop(known);
        self.limit.answered.notify_waiters();
    }
}

impl<S: Inspect> Engine<S> {
    /// Refuses what would be one record too many for its scope.
    pub(crate) async fn keep_to_limit(&self, id: &RecordId) -> Result<(), Rejection> {
        let Some(limit) = &self.options.scope_limit else {
            return Ok(());
        };
        let Standing { is_full, news } = limit.look(&id.scope);
        if is_full {
            // Whoever has a record needs no answer, and whoever has none will ask for itself.
            drop(news);
            // In a box, so that those below their limit do not carry its weight.
            return Box::pin(self.keep_to_full(limit, id)).await;
        }
        if let News::ToBeAsked(question) = news {
            self.ask_in_background(question);
        }
        Ok(())
    }

    /// No request takes its question along when it ends, or a count that takes longer would never end.
    fn ask_in_background(&self, question: Question) {
        if let Ok(runtime) = Handle::try_current() {
            let store = self.store.clone();
            runtime.spawn(async move { question.ask(&store).await });
        }
    }

    /// The scope has its fill, so a record must be there already. Where the store cannot tell, the request
    /// is not run, not even unprotected: a limit is not got around by waiting for an outage.
    async fn keep_to_full(&self, limit: &Arc<ScopeLimit>, id: &RecordId) -> Result<(), Rejection> {
        if self.find(id).await?.is_some() {
            return Ok(());
        }
        // Nobody is refused for what was true a while ago. This is the one place where a request waits
        // for a sample, instead of being sent away at once.
        let fresh = within(self.options.store_timeout, async {
            let mut has_asked = false;
            loop {
                let mut answered = pin!(limit.answered.notified());
                answered.as_mut().enable();
                let Standing { is_full, news } = limit.look(&id.scope);
                match news {
                    _ if !is_full => return Ok(()),
                    News::Awaited => {}
                    // Once: a runtime that is shutting down drops every question at once.
                    News::ToBeAsked(question) if !has_asked => {
                        has_asked = true;
                        self.ask_in_background(question);
                    }
                    News::ToBeAsked(_) | News::None => return Err(Rejection::LimitReached),
                }
                answered.await;
            }
        });
        fresh.await.unwrap_or(Err(Rejection::LimitReached))
    }
}

impl fmt::Debug for ScopeLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.records.fmt(f)
    }
}

#[cfg(test)]
#[path = "limits_tests.rs"]
mod tests;

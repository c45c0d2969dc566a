//! Sweeps over the abandoned records of a store.

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::task::{JoinError, JoinSet};
use tracing::Instrument;

use crate::{
    Abandoned, Mode, Record, Resolved, State, Token, Verdict,
    back_off::{Pauses, Topic, Why},
    bounded::{FOREVER, first},
    engine::Engine,
    maintenance::jittered,
    observe::{By, Operation},
    resolving::{self, Question, persistently},
    store::{Checkpoints, Held, Inspect, StoreError, StoreErrorKind},
};

/// However long a store has been failing, it is looked for again after this time, or after `every`.
const LONGEST_FAILURE_PAUSE: Duration = Duration::from_secs(300);

/// How long it is rested at most after a sweep that did not come to the end of the list.
const SHORT_REST: Duration = Duration::from_secs(1);

/// Settles the records of runs that were cut off, by asking the layer's
/// [`resolver`](crate::IdempotencyLayer::resolver). Made by
/// [`IdempotencyLayer::reconciler`](crate::IdempotencyLayer::reconciler).
///
/// A sweep lists the abandoned records of the whole store, oldest first. Each it takes over under a fresh
/// token, and only then asks: so of any number of reconcilers, and requests that ask too, one asks about a
/// record at a time, and the owner that fell silent changes nothing meanwhile. A record that was left is
/// asked about again after a pause that grows, and keeps none behind it waiting.
///
/// Records of [`transactional`](crate::IdempotencyLayer::transactional) runs are freed without asking: what
/// was not committed did not happen. Without a resolver a sweep does nothing else.
///
/// Where layers with different options share one store, a reconciler sees the records of all of them, and
/// settles with the options of its own: its `ttl`, and what it retains of answers. So let one of them have the
/// resolver for all, or let each resolver answer [`Verdict::Leave`] to what it does not know, by
/// [`Abandoned::scope`](crate::Abandoned::scope) or a checkpoint.
///
/// It is a handle of its layer: what the layer does in the background goes on while it lives.
///
/// ```
/// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
/// use std::time::Duration;
///
/// use axum::http::StatusCode;
/// use tower_idempotency::{Abandoned, IdempotencyLayer, MemoryStore, Verdict};
///
/// let layer = IdempotencyLayer::new(MemoryStore::new())
///     .single_tenant()
///     .resolver(|_: Abandoned| async { Verdict::answer((StatusCode::CREATED, "paid")) });
/// // Besides the server; ends when the layer is drained.
/// let reconciler = layer.reconciler().every(Duration::from_secs(10));
/// let sweeping = tokio::spawn(reconciler.run());
/// // Or one sweep, when somebody says so.
/// let swept = layer.reconciler().sweep().await;
/// assert_eq!((swept.seen, swept.answered), (0, 0));
/// layer.drain(Duration::from_secs(20)).await;
/// sweeping.await.unwrap();
/// # });
/// ```
#[must_use = "a reconciler does nothing until it sweeps"]
pub struct Reconciler<S> {
    engine: Arc<Engine<S>>,
    every: Duration,
    batch: usize,
    max_per_sweep: usize,
    concurrency: usize,
    pauses: Pauses,
    /// Where the last sweep stopped before the end of the list.
    cursor: Mutex<Option<Record>>,
}

/// What one sweep did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[must_use]
#[non_exhaustive]
pub struct Swept {
    /// Abandoned records that were listed. Each is in one of the counts below, except `failed`, which counts
    /// a listing that failed, too.
    pub seen: usize,
    /// Completed with an answer that was found out.
    pub answered: usize,
    /// Free again, because it did not happen.
    pub freed: usize,
    /// As they are: the resolver said so, panicked or took too long; or there is none.
    pub left: usize,
    /// Somebody else's by now.
    pub lost: usize,
    /// Not asked about this time: they were left not long ago, or are running in this process after all.
    pub postponed: usize,
    /// Where the store failed. A sweep ends with that, unless only the one record was at fault.
    pub failed: usize,
    /// Whether the sweep stopped before the end of the list: at `max_per_sweep`, because the store failed, or
    /// because the layer is drained. The next one goes on from there, if there is any.
    pub more: bool,
}

impl Swept {
    fn count(&mut self, resolved: &Result<Resolved, StoreError>) {
        *match resolved {
            Ok(Resolved::Answered) => &mut self.answered,
            Ok(Resolved::Freed) => &mut self.freed,
            Ok(Resolved::Left) => &mut self.left,
            Ok(Resolved::Lost) => &mut self.lost,
            Err(_) => &mut self.failed,
        } += 1;
    }
}

impl<S: Inspect + Checkpoints> Reconciler<S> {
    pub(crate) fn new(engine: Arc<Engine<S>>) -> Self {
        Self {
            engine,
            every: Duration::from_secs(30),
            batch: 100,
            max_per_sweep: 1_000,
            concurrency: 8,
            pauses: Pauses {
                first: Duration::from_secs(30),
                longest: Duration::from_secs(3_600),
            },
            cursor: Mutex::default(),
        }
    }

    /// How long [`run`](Self::run) rests between two sweeps; in fact between half of it and all of it, so that
    /// many processes do not move in step. Default 30 s.
    ///
    /// # Panics
    ///
    /// When zero.
    pub fn every(mut self, every: Duration) -> Self {
        assert!(!every.is_zero(), "every must be longer than zero");
        self.every = every.min(FOREVER);
        self
    }

    /// How many records are listed at once. Default 100.
    ///
    /// # Panics
    ///
    /// When zero.
    pub fn batch(mut self, records: usize) -> Self {
        assert!(records > 0, "batch must be at least 1");
        self.batch = records;
        self
    }

    /// How many records one sweep looks at; the next one goes on behind them. Default 1 000.
    ///
    /// # Panics
    ///
    /// When zero.
    pub fn max_per_sweep(mut self, records: usize) -> Self {
        assert!(records > 0, "max_per_sweep must be at least 1");
        self.max_per_sweep = records;
        self
    }

    /// How many records are asked about at a time. Default 8.
    ///
    /// # Panics
    ///
    /// When zero.
    pub fn concurrency(mut self, records: usize) -> Self {
        assert!(records > 0, "concurrency must be at least 1");
        self.concurrency = records;
        self
    }

    /// How long a record that was left is not asked about by sweeps of this process: `first`, doubled each time
    /// up to `longest`, of each between half of it and all of it. Default 30 s to 1 h.
    ///
    /// Kept for 10 000 records, in memory, and shared by all reconcilers with one resolver: records beyond them
    /// are asked about in every sweep. A request that meets such a record asks all the same, at most once a
    /// second.
    ///
    /// # Panics
    ///
    /// When `first` is zero, or longer than `longest`.
    pub fn back_off(mut self, first: Duration, longest: Duration) -> Self {
        assert!(!first.is_zero(), "back_off must be longer than zero");
        assert!(
            first <= longest,
            "back_off must not begin with more than its longest"
        );
        self.pauses = Pauses { first, longest };
        self
    }

    /// Sweeps until the layer is [drained](crate::IdempotencyLayer::drain). What a layer does in the background from
    /// its first keyed request on (purge, gauges) begins with this, too. After a sweep that did not come to
    /// the end of the list it goes on soon; where the store fails, after a pause that grows, up to five minutes
    /// or [`every`](Self::every), whichever is longer.
    ///
    /// # Cancel safety
    ///
    /// May be dropped at any time. What was being asked about is given up in the background then, and is
    /// abandoned as before.
    pub async fn run(self) {
        let live = self.engine.live.clone();
        // After a crash there may be no request for a while, and yet something to be seen.
        self.engine.maintain();
        let mut failures = 0_u32;
        while !live.is_draining() {
            let swept = self.sweep().await;
            let rest = if swept.failed > 0 {
                failures = (failures + 1).min(16);
                let longest = self.every.max(LONGEST_FAILURE_PAUSE);
                self.every.saturating_mul(1 << failures).min(longest)
            } else {
                failures = 0;
                match swept.more {
                    true => (self.every / 10).min(SHORT_REST),
                    false => self.every,
                }
            };
            first(tokio::time::sleep(jittered(rest)), live.draining()).await;
        }
    }

    /// One sweep over the abandoned records, from where the last one stopped. When the layer is drained it
    /// begins nothing more, and ends once what it has begun is settled.
    ///
    /// # Cancel safety
    ///
    /// As for [`run`](Self::run).
    pub async fn sweep(&self) -> Swept {
        let mut sweep = Sweep::default();
        let mut after = self.cursor().clone();
        loop {
            let room = self.max_per_sweep.saturating_sub(sweep.swept.seen);
            if room == 0 || self.must_end(&sweep) {
                sweep.swept.more = true;
                break;
            }
            let (store, limit) = (&self.engine.store, room.min(self.batch));
            let list = || store.abandoned(after.as_ref(), limit);
            match persistently(&self.engine.options, Operation::Abandoned, list).await {
                Ok(page) if page.is_empty() => {
                    after = None;
                    break;
                }
                Ok(page) => after = self.sweep_page(page, &mut sweep).await.or(after),
                Err(_) => {
                    sweep.swept.failed += 1;
                    sweep.ends = true;
                }
            }
        }
        while sweep
            .asking
            .join_next()
            .await
            .map(|ended| self.note(ended, &mut sweep))
            .is_some()
        {}
        *self.cursor() = after;
        sweep.swept
    }

    /// Asks about these, and answers which of them was the last.
    async fn sweep_page(&self, page: Vec<Record>, sweep: &mut Sweep) -> Option<Record> {
        let mut last = None;
        for record in page {
            while sweep.asking.len() >= self.concurrency
                && let Some(ended) = sweep.asking.join_next().await
            {
                self.note(ended, sweep);
            }
            if self.must_end(sweep) {
                break;
            }
            sweep.swept.seen += 1;
            last = Some(record.clone());
            self.sweep_one(record, sweep).await;
        }
        last
    }

    async fn sweep_one(&self, record: Record, sweep: &mut Sweep) {
        let engine = self.engine.clone();
        let question = match (record.mode, &engine.options.resolver) {
            (Mode::Transactional, _) => Question::Uncommitted,
            (_, Some(resolver)) => Question::Resolver(resolver.clone()),
            (_, None) => {
                sweep.swept.left += 1;
                return;
            }
        };
        let topic = self.topic(&record);
        let tokens = [record.token, Token::random()];
        let is_due = engine.live.back_off.is_due(&topic, record.token);
        if !is_due || engine.runs_here(&record.id, &Held::of(&record)).await {
            sweep.swept.postponed += 1;
            return;
        }
        let resolving = async move {
            let asking = resolving::resolve(&engine, record, tokens[1], By::Sweep, question);
            let resolved = asking.await;
            (
                topic,
                tokens,
                resolved.map(|resolved| resolved.unwrap_or(Resolved::Lost)),
            )
        };
        sweep.asking.spawn(resolving.in_current_span());
    }

    fn note(&self, ended: Result<Ended, JoinError>, sweep: &mut Sweep) {
        let back_off = &self.engine.live.back_off;
        // Only a runtime that ends cuts a task off.
        let Ok((topic, tokens, resolved)) = ended else {
            sweep.swept.failed += 1;
            sweep.ends = true;
            return;
        };
        match &resolved {
            Ok(Resolved::Left) => back_off.left_by_sweep(topic, tokens, Why::Unknown, self.pauses),
            Ok(_) => back_off.settled(&topic),
            // That this record cannot be read says nothing about those behind it.
            Err(error) if is_of_one_record(error) => {
                back_off.left_by_sweep(topic, tokens, Why::Unreadable, self.pauses);
            }
            Err(_) => sweep.ends = true,
        }
        sweep.swept.count(&resolved);
    }

    fn must_end(&self, sweep: &Sweep) -> bool {
        sweep.ends || self.engine.live.is_draining()
    }

    fn cursor(&self) -> MutexGuard<'_, Option<Record>> {
        // It is replaced as a whole.
        self.cursor.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Settles one record by a verdict of somebody's own who knows what its run did: an operator. `record` as
    /// [`Inspect::abandoned`] or [`Inspect::get`] has just answered it: if anything has happened to it since,
    /// nothing is changed, and the answer is [`Resolved::Lost`].
    ///
    /// The record is taken over under a fresh token first, so its late owner can change nothing any more. With
    /// [`Verdict::Leave`] nothing is done at all. An answer is kept as a resolver's is; one whose body breaks
    /// off is not, and the record is [`Resolved::Left`].
    ///
    /// # Errors
    ///
    /// When the store fails. Where it did so after the record was taken over, what is to become of it is
    /// recorded in the background, as long as the layer lives; look again before saying anything else.
    ///
    /// # Cancel safety
    ///
    /// Dropped, it leaves the record abandoned as before, or settled by the verdict.
    ///
    /// ```
    /// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
    /// use tower_idempotency::{
    ///     Fingerprint, IdempotencyKey, IdempotencyLayer, MemoryStore, RecordId, Resolved, Scope, Verdict,
    ///     store::{Claim, ClaimRequest, Inspect, Store},
    /// };
    ///
    /// let store = MemoryStore::new();
    /// let layer = IdempotencyLayer::new(store.clone());
    /// # let id = RecordId::new(Scope::shared(), IdempotencyKey::new("k-1"));
    /// # let claim = ClaimRequest::new(id, "exact", Fingerprint::of(["A"]));
    /// # let Claim::Won(ticket) = store.claim(claim).await.unwrap() else { panic!("claimed") };
    /// # store.abandon(&ticket).await.unwrap();
    /// for record in store.abandoned(None, 10).await.unwrap() {
    ///     // … the provider's dashboard knows nothing of it …
    ///     let resolved = layer.reconciler().resolve(&record, Verdict::DidNotHappen).await.unwrap();
    ///     assert_eq!(resolved, Resolved::Freed);
    /// }
    /// assert!(store.abandoned(None, 10).await.unwrap().is_empty());
    /// # });
    /// ```
    pub async fn resolve(&self, record: &Record, verdict: Verdict) -> Result<Resolved, StoreError> {
        if let Verdict::Leave = verdict {
            return Ok(Resolved::Left);
        }
        let question = Question::Known(verdict);
        let (record_found, token) = (record.clone(), Token::random());
        let by_hand = resolving::resolve(&self.engine, record_found, token, By::Operator, question);
        let resolved = by_hand.await?.unwrap_or(Resolved::Lost);
        if resolved != Resolved::Left {
            self.engine.live.back_off.settled(&self.topic(record));
        }
        Ok(resolved)
    }

    /// What a resolver would see of this record: its checkpoints, and the downstream keys of its runs. Reads
    /// only. `None` when the record is not as it was: settled, forgotten, or under another token by now.
    ///
    /// # Errors
    ///
    /// When the store fails, or cannot read what was saved.
    ///
    /// # Cancel safety
    ///
    /// May be dropped at any time.
    ///
    /// ```
    /// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
    /// use tower_idempotency::{
    ///     Fingerprint, IdempotencyKey, IdempotencyLayer, MemoryStore, RecordId, Scope,
    ///     store::{Claim, ClaimRequest, Inspect, Store},
    /// };
    ///
    /// let store = MemoryStore::new();
    /// let layer = IdempotencyLayer::new(store.clone()).downstream_secret([7; 32]);
    /// # let id = RecordId::new(Scope::shared(), IdempotencyKey::new("k-1"));
    /// # let claim = ClaimRequest::new(id, "exact", Fingerprint::of(["A"]));
    /// # let Claim::Won(ticket) = store.claim(claim).await.unwrap() else { panic!("claimed") };
    /// # store.abandon(&ticket).await.unwrap();
    /// for record in store.abandoned(None, 10).await.unwrap() {
    ///     let Some(abandoned) = layer.reconciler().examine(&record).await.unwrap() else { continue };
    ///     let charge = abandoned.checkpoint::<String>("charge").unwrap();
    ///     assert_eq!(charge, None); // It never got that far, or died before it could say so.
    ///     let asked_under = abandoned.downstream_key("charge").unwrap();
    ///     assert_eq!(asked_under.as_str().len(), 32); // To be looked up at the provider.
    /// }
    /// # });
    /// ```
    pub async fn examine(&self, record: &Record) -> Result<Option<Abandoned>, StoreError> {
        let Engine { store, options, .. } = &*self.engine;
        let ticket = record.ticket();
        let load = || store.load(&ticket);
        let checkpoints = persistently(options, Operation::Load, load).await?;
        // They are there, too, of a record that its own run has settled since.
        let get = || store.get(&record.id);
        let found = persistently(options, Operation::Get, get).await?;
        let open = |found: &Record| matches!(found.state, State::Running | State::Abandoned);
        let stands = found.is_some_and(|found| found.token == record.token && open(&found));
        let checkpoints = checkpoints.filter(|_| stands);
        let stored = store.stored_id(&record.id);
        let secret = options.downstream.clone();
        Ok(checkpoints
            .map(|checkpoints| Abandoned::new(record.clone(), stored, checkpoints, secret)))
    }

    /// What this record is known by where it was left.
    fn topic(&self, record: &Record) -> Topic {
        let resolver = match record.mode {
            Mode::Transactional => None,
            _ => self.engine.options.resolver.as_ref(),
        };
        Topic::new(&self.engine.store.stored_id(&record.id), resolver)
    }
}

/// Whether the store could not deal with this record, rather than with any.
pub(crate) fn is_of_one_record(error: &StoreError) -> bool {
    matches!(
        error.kind(),
        StoreErrorKind::Corrupt | StoreErrorKind::Invalid | StoreErrorKind::Keys
    )
}

/// A sweep under way.
#[derive(Default)]
struct Sweep {
    swept: Swept,
    /// Dropped, it stops what is being asked.
    asking: JoinSet<Ended>,
    /// The store has failed.
    ends: bool,
}

type Ended = (Topic, [Token; 2], Result<Resolved, StoreError>);

impl<S> fmt::Debug for Reconciler<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reconciler")
            .field("every", &self.every)
            .field("batch", &self.batch)
            .field("max_per_sweep", &self.max_per_sweep)
            .field("concurrency", &self.concurrency)
            .field("back_off", &self.pauses)
            .finish_non_exhaustive()
    }
}

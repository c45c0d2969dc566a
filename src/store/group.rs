//! Group commit: operations queue up while a transaction commits, and the next transaction takes
//! all of them. No timer: whoever comes alone is served at once.
//!
//! The queue also separates callers from statements. A caller that goes away leaves its operation
//! behind, never a statement cut in the middle.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    error::Error,
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use tokio::sync::{mpsc, oneshot};

use super::{
    Checkpoint, Claim, ClaimRequest, Completion, Lifetimes, Settled, StoreError, StoreErrorKind,
    Ticket,
};
use crate::{
    bounded::{First, first, within},
    observe::{self, Database},
    record::{Record, RecordId, Token},
};

/// The most operations in one transaction, or on one statement.
pub(crate) const MAX_OPERATIONS: usize = 256;
/// About the most bytes in one transaction; a single larger operation is a transaction by itself.
const MAX_BYTES: usize = 8 << 20;
/// The most operations in the queue. Whoever comes later waits for a place, not for an error.
const MAX_QUEUED: usize = 1024;

/// How long operations rest that were left without an answer, before they are tried again.
const FIRST_REST: Duration = Duration::from_millis(2);
const LAST_REST: Duration = Duration::from_millis(50);

/// After how long without an operation the writer rests.
const IDLE: Duration = Duration::from_millis(20);

/// A question, who asked it, and the answer as soon as there is one.
pub(crate) struct Asked<Q, A> {
    pub(crate) question: Q,
    answer: Option<Result<A, StoreError>>,
    since: Instant,
    /// In which of the writer's rounds it was looked up in vain.
    #[cfg(feature = "sqlite")]
    looked_up: u64,
    /// Left without an answer it rests, longer each time, so that others come first.
    #[cfg(feature = "postgres")]
    rest: Option<(Duration, Instant)>,
    /// `None` once it was told the answer ahead.
    caller: Option<oneshot::Sender<Result<A, StoreError>>>,
}

impl<Q, A> Asked<Q, A> {
    /// Keeps the answer back until the transaction is committed. A transaction that is tried again
    /// answers again.
    pub(crate) fn answer(&mut self, answer: Result<A, StoreError>) {
        self.answer = Some(answer);
    }

    pub(crate) fn is_answered(&self) -> bool {
        self.answer.is_some()
    }

    fn is_left_behind(&self) -> bool {
        self.caller.as_ref().is_some_and(oneshot::Sender::is_closed)
    }
}

#[cfg(feature = "sqlite")]
impl<Q, A> Asked<Q, A> {
    /// Tells the caller at once. The operation stays in the queue and is carried out all the same.
    pub(crate) fn tell(&mut self, answer: A) {
        if let Some(caller) = self.caller.take() {
            // Nobody there any more: what is asked again is answered again.
            let _ = caller.send(Ok(answer));
        }
    }

    pub(crate) fn is_told(&self) -> bool {
        self.caller.is_none()
    }
}

#[cfg(feature = "postgres")]
impl<Q, A> Asked<Q, A> {
    /// Whether it was never left without an answer.
    pub(crate) fn is_fresh(&self) -> bool {
        self.rest.is_none()
    }

    /// Whether it was left without an answer a moment ago.
    pub(crate) fn rests(&self) -> bool {
        self.rest.is_some_and(|(_, until)| Instant::now() < until)
    }

    /// It was tried in vain.
    pub(crate) fn has_to_rest(&mut self) {
        let rest = match self.rest {
            Some((rest, _)) => LAST_REST.min(rest * 2),
            None => FIRST_REST,
        };
        self.rest = Some((rest, Instant::now() + rest));
    }
}

pub(crate) struct Complete {
    pub(crate) ticket: Ticket,
    pub(crate) done: Completion,
    pub(crate) lifetimes: Lifetimes,
}

pub(crate) struct Release {
    pub(crate) ticket: Ticket,
    pub(crate) ttl: Duration,
}

pub(crate) struct Renew {
    pub(crate) tickets: Vec<Ticket>,
    pub(crate) lease: Duration,
}

pub(crate) struct TakeOver {
    pub(crate) id: RecordId,
    /// The token it has.
    pub(crate) abandoned: Token,
    /// The token it gets.
    pub(crate) token: Token,
    pub(crate) hold: Duration,
}

#[cfg_attr(
    not(feature = "sqlite"),
    expect(dead_code, reason = "Postgres carries these out apart")
)]
pub(crate) struct Save {
    pub(crate) ticket: Ticket,
    pub(crate) name: String,
    pub(crate) value: Bytes,
}

/// One operation of the store's traits, waiting for its transaction.
#[cfg_attr(
    not(feature = "sqlite"),
    expect(dead_code, reason = "Postgres carries some out apart")
)]
pub(crate) enum Operation {
    Claim(Asked<ClaimRequest, Claim>),
    Complete(Asked<Complete, Settled>),
    Release(Asked<Release, Settled>),
    Abandon(Asked<Ticket, Settled>),
    Renew(Asked<Renew, Vec<Settled>>),
    Get(Asked<RecordId, Option<Record>>),
    Forget(Asked<RecordId, bool>),
    TakeOver(Asked<TakeOver, Option<Ticket>>),
    Save(Asked<Save, Settled>),
    Load(Asked<Ticket, Option<Vec<Checkpoint>>>),
    Purge(Asked<usize, usize>),
    Close(Asked<(), ()>),
}

/// Does the same with whatever was asked.
macro_rules! each {
    ($operation:expr, $asked:ident => $do:expr) => {
        match $operation {
            Operation::Claim($asked) => $do,
            Operation::Complete($asked) => $do,
            Operation::Release($asked) => $do,
            Operation::Abandon($asked) => $do,
            Operation::Renew($asked) => $do,
            Operation::Get($asked) => $do,
            Operation::Forget($asked) => $do,
            Operation::TakeOver($asked) => $do,
            Operation::Save($asked) => $do,
            Operation::Load($asked) => $do,
            Operation::Purge($asked) => $do,
            Operation::Close($asked) => $do,
        }
    };
}

impl Operation {
    /// About the bytes it brings along.
    fn bytes(&self) -> usize {
        match self {
            Self::Complete(asked) => asked.question.done.response.as_ref().map_or(0, Bytes::len),
            Self::Save(asked) => asked.question.value.len(),
            _ => 0,
        }
    }

    /// Whether it is to be carried out. What settles a run counts even when nobody waits for the
    /// answer any more; a claim, a takeover or a read would be for nobody.
    fn is_wanted(&self) -> bool {
        match self {
            Self::Complete(_) | Self::Release(_) | Self::Abandon(_) | Self::Forget(_) => true,
            operation => !each!(operation, asked => asked.is_left_behind()),
        }
    }

    /// Whether it keeps a lease alive or ends a run, which others may be waiting for.
    fn is_urgent(&self) -> bool {
        matches!(
            self,
            Self::Renew(_) | Self::Complete(_) | Self::Release(_) | Self::Abandon(_)
        )
    }

    /// The one record that it may change, or reads the checkpoints of.
    fn record(&self) -> Option<&RecordId> {
        match self {
            Self::Claim(asked) => Some(&asked.question.id),
            Self::Complete(asked) => Some(&asked.question.ticket.id),
            Self::Release(asked) => Some(&asked.question.ticket.id),
            Self::Abandon(asked) => Some(&asked.question.id),
            Self::Load(asked) => Some(&asked.question.id),
            Self::Get(asked) => Some(&asked.question),
            Self::Forget(asked) => Some(&asked.question),
            Self::TakeOver(asked) => Some(&asked.question.id),
            Self::Save(asked) => Some(&asked.question.ticket.id),
            Self::Renew(_) | Self::Purge(_) | Self::Close(_) => None,
        }
    }

    pub(crate) fn is_answered(&self) -> bool {
        each!(self, asked => asked.is_answered())
    }

    /// How long it has been without an answer; `None` with one.
    pub(crate) fn waits_for(&self) -> Option<Duration> {
        each!(self, asked => (!asked.is_answered()).then(|| asked.since.elapsed()))
    }

    pub(crate) fn answer_error(&mut self, error: StoreError) {
        each!(self, asked => asked.answer(Err(error)));
    }

    fn acknowledge(self) {
        each!(self, asked => if let (Some(answer), Some(caller)) = (asked.answer, asked.caller) {
            // Nobody there any more: the token settles later what happened.
            let _ = caller.send(answer);
        });
    }

    fn refuse(self, error: StoreError) {
        each!(self, asked => if let Some(caller) = asked.caller {
            let _ = caller.send(Err(error));
        });
    }
}

#[cfg(feature = "sqlite")]
impl Operation {
    /// What was answered in a transaction that came to nothing was not answered.
    pub(crate) fn take_back_answer(&mut self) {
        each!(self, asked => asked.answer = None);
    }

    pub(crate) fn was_looked_up(&self, round: u64) -> bool {
        each!(self, asked => asked.looked_up == round)
    }

    pub(crate) fn is_looked_up(&mut self, round: u64) {
        each!(self, asked => asked.looked_up = round);
    }
}

/// See [`Asked`].
#[cfg(feature = "postgres")]
impl Operation {
    pub(crate) fn is_fresh(&self) -> bool {
        each!(self, asked => asked.is_fresh())
    }

    pub(crate) fn rests(&self) -> bool {
        each!(self, asked => asked.rests())
    }

    pub(crate) fn has_to_rest(&mut self) {
        each!(self, asked => asked.has_to_rest());
    }
}

/// Why a transaction came to nothing. Unlike a [`StoreError`] it can be told to many callers.
#[derive(Debug, Clone)]
pub(crate) struct Failure {
    pub(crate) kind: StoreErrorKind,
    pub(crate) message: &'static str,
    pub(crate) source: Option<Arc<dyn Error + Send + Sync>>,
    pub(crate) reach: Reach,
}

/// What else is affected by a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reach {
    /// One value was refused; without it the rest may succeed.
    Value,
    /// Somebody else holds the lock; the same again may succeed.
    Lock,
    /// The connection is not to be trusted any more.
    Connection,
}

impl Failure {
    pub(crate) fn new(kind: StoreErrorKind, reach: Reach, message: &'static str) -> Self {
        Self {
            kind,
            message,
            source: None,
            reach,
        }
    }

    pub(crate) fn error(&self) -> StoreError {
        let error = StoreError::new(self.kind, self.message);
        match &self.source {
            Some(source) => error.with_source(source.clone()),
            None => error,
        }
    }
}

/// Carries out operations, many at a time.
pub(crate) trait Writer: Send + 'static {
    /// Where it carries them out.
    const DATABASE: Database;
    /// The most operations it is given at once.
    const MAX_BATCH: usize = MAX_OPERATIONS;
    /// About the most bytes it is given at once.
    const MAX_BATCH_BYTES: usize = MAX_BYTES;
    /// Whether what is urgent comes first when there is more than fits one transaction.
    const URGENT_FIRST: bool = false;

    /// Carries them out in one transaction, giving each its answer. Those it leaves without one are
    /// tried again, before all newer ones. With an error nothing was changed, as far as anybody can
    /// tell.
    fn commit(
        &mut self,
        batch: &mut [Operation],
    ) -> impl Future<Output = Result<(), Failure>> + Send;

    /// Waits until operations that were left without an answer may have one, for `rest` or for what it
    /// knows better. Dropped, it loses nothing.
    fn wait(&mut self, rest: Duration) -> impl Future<Output = ()> + Send {
        tokio::time::sleep(rest)
    }

    /// Nothing has come for a while.
    fn rest(&mut self) {}

    /// Gives up the lease and the connection.
    fn close(self) -> impl Future<Output = Result<(), Failure>> + Send;
}

/// How many operations have shared how many transactions, since the store was opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Grouping {
    /// Operations carried out.
    pub operations: u64,
    /// Transactions they took: for Postgres, statements.
    pub batches: u64,
    /// The most operations in one of them.
    pub largest: u64,
}

impl std::ops::Add for Grouping {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            operations: self.operations + other.operations,
            batches: self.batches + other.batches,
            largest: self.largest.max(other.largest),
        }
    }
}

/// The callers' end of the queue.
#[derive(Debug)]
pub(crate) struct Queue {
    operations: mpsc::Sender<Operation>,
    closed: AtomicBool,
    counted: Arc<Counted>,
}

#[derive(Debug, Default)]
struct Counted {
    operations: AtomicU64,
    batches: AtomicU64,
    largest: AtomicU64,
}

impl Queue {
    /// Starts the writer on the current runtime. It ends with the queue, or when it is closed.
    pub(crate) fn start(writer: impl Writer) -> Self {
        let (operations, queue) = mpsc::channel(MAX_QUEUED);
        let counted = Arc::new(Counted::default());
        tokio::spawn(serve(writer, queue, counted.clone()));
        Self {
            operations,
            closed: AtomicBool::new(false),
            counted,
        }
    }

    pub(crate) fn grouping(&self) -> Grouping {
        let read = |number: &AtomicU64| number.load(Ordering::Relaxed);
        Grouping {
            operations: read(&self.counted.operations),
            batches: read(&self.counted.batches),
            largest: read(&self.counted.largest),
        }
    }

    pub(crate) async fn ask<Q, A>(
        &self,
        operation: fn(Asked<Q, A>) -> Operation,
        question: Q,
    ) -> Result<A, StoreError> {
        self.check_open()?;
        self.send(operation, question).await
    }

    /// Closes after everything queued so far. Closing twice is closing once.
    pub(crate) async fn close(&self) -> Result<(), StoreError> {
        self.closed.store(true, Ordering::Release);
        match self.send(Operation::Close, ()).await {
            Err(error) if error.kind() == StoreErrorKind::Closed => Ok(()),
            closed => closed,
        }
    }

    pub(crate) fn check_open(&self) -> Result<(), StoreError> {
        match self.closed.load(Ordering::Acquire) {
            true => Err(closed()),
            false => Ok(()),
        }
    }

    async fn send<Q, A>(
        &self,
        operation: fn(Asked<Q, A>) -> Operation,
        question: Q,
    ) -> Result<A, StoreError> {
        let (caller, answer) = oneshot::channel();
        let asked = Asked {
            question,
            answer: None,
            since: Instant::now(),
            #[cfg(feature = "sqlite")]
            looked_up: 0,
            #[cfg(feature = "postgres")]
            rest: None,
            caller: Some(caller),
        };
        let sent = self.operations.send(operation(asked)).await;
        sent.map_err(|_| self.gone())?;
        answer.await.unwrap_or_else(|_| Err(self.gone()))
    }

    pub(crate) fn gone(&self) -> StoreError {
        match self.check_open() {
            Err(closed) => closed,
            Ok(()) => StoreError::new(
                StoreErrorKind::Unavailable,
                "the store's writer has ended with the runtime the store was opened in; open the store in the runtime that uses it",
            ),
        }
    }
}

fn closed() -> StoreError {
    StoreError::new(StoreErrorKind::Closed, "the store was closed")
}

/// The writer's task.
async fn serve<W: Writer>(
    mut writer: W,
    mut queue: mpsc::Receiver<Operation>,
    counted: Arc<Counted>,
) {
    let mut waiting = VecDeque::with_capacity(W::MAX_BATCH);
    let mut rest = None;
    while gather(&mut writer, &mut queue, &mut waiting, rest).await {
        if let Some(Operation::Close(_)) = waiting.front() {
            return close(writer, waiting, queue).await;
        }
        if W::URGENT_FIRST && fitting(waiting.iter()) < waiting.len() {
            urgent_first(&mut waiting);
        }
        let batch = next_batch::<W>(&mut waiting);
        let asked = batch.len();
        let left = commit(&mut writer, batch).await;
        let done = asked - left.len();
        counted.add(done);
        if done > 0 {
            observe::batch(W::DATABASE, done);
        }
        // Nothing done means that others are in the way; give them time, and more each time.
        rest = (done == 0 && asked > 0).then(|| match rest {
            Some(rest) => LAST_REST.min(rest * 2),
            None => FIRST_REST,
        });
        for next in left.into_iter().rev() {
            waiting.push_front(next);
        }
    }
    // The last handle is gone. The lease is left to lapse: a run of this instance may have been
    // dropped with it, and what it did is for the recovery policy to judge.
}

/// Takes what has queued up. Waits when there is nothing to do, or when all there is shall rest first.
/// Answers whether to go on.
async fn gather<W: Writer>(
    writer: &mut W,
    queue: &mut mpsc::Receiver<Operation>,
    waiting: &mut VecDeque<Operation>,
    rest: Option<Duration>,
) -> bool {
    let room = W::MAX_BATCH.saturating_sub(waiting.len()).max(1);
    let mut taken = Vec::new();
    let open = match (waiting.is_empty(), rest) {
        (true, _) => {
            let came = within(IDLE, queue.recv_many(&mut taken, room)).await;
            match came {
                Some(came) => came > 0,
                None => {
                    writer.rest();
                    queue.recv_many(&mut taken, room).await > 0
                }
            }
        }
        (false, Some(rest)) => {
            let news = queue.recv_many(&mut taken, room);
            if let First::Left(0) = first(news, writer.wait(rest)).await {
                writer.wait(rest).await;
            }
            true
        }
        (false, None) => {
            // Whatever is there already, without waiting for more.
            let news = queue.recv_many(&mut taken, room);
            first(news, std::future::ready(())).await;
            true
        }
    };
    waiting.extend(taken);
    replace_older_copies(waiting);
    open
}

/// Whoever waits in vain for a completion sends it again. The new one takes the place of the old one,
/// whose caller is gone: so it is sent once, and somebody hears of it.
fn replace_older_copies(waiting: &mut VecDeque<Operation>) {
    let is_left_behind = |operation: &Operation| match operation {
        Operation::Complete(asked) => asked.is_left_behind(),
        _ => false,
    };
    if !waiting.iter().any(is_left_behind) {
        return;
    }
    let mut places: HashMap<Token, usize> = HashMap::new();
    let mut replaced = vec![false; waiting.len()];
    for at in 0..waiting.len() {
        let Operation::Complete(asked) = &waiting[at] else {
            continue;
        };
        let token = asked.question.ticket.token;
        let older = places.insert(token, at);
        if let Some(older) = older.filter(|older| is_left_behind(&waiting[*older])) {
            waiting.swap(older, at);
            replaced[at] = true;
            places.insert(token, older);
        }
    }
    let mut replaced = replaced.into_iter();
    waiting.retain(|_| !replaced.next().unwrap_or(false));
}

impl Counted {
    fn add(&self, operations: usize) {
        let operations = u64::try_from(operations).unwrap_or(u64::MAX);
        if operations > 0 {
            self.operations.fetch_add(operations, Ordering::Relaxed);
            self.batches.fetch_add(1, Ordering::Relaxed);
            self.largest.fetch_max(operations, Ordering::Relaxed);
        }
    }
}

/// How many operations fit one transaction, from the first one on.
pub(crate) fn fitting<'a>(operations: impl Iterator<Item = &'a Operation>) -> usize {
    let mut bytes = 0;
    let fits = operations
        .take(MAX_OPERATIONS)
        .enumerate()
        .take_while(|(at, operation)| {
            bytes += operation.bytes();
            *at == 0 || bytes <= MAX_BYTES
        });
    fits.count()
}

/// Puts what is urgent before the rest, but nothing before an earlier operation on the same record: what
/// undoes a claim never overtakes it.
fn urgent_first(waiting: &mut VecDeque<Operation>) {
    let mut passed = HashSet::new();
    let mut is_first = Vec::with_capacity(waiting.len());
    let mut is_closing = false;
    for operation in waiting.iter() {
        is_closing |= matches!(operation, Operation::Close(_));
        let record = operation.record();
        let may = !is_closing && record.is_none_or(|record| !passed.contains(record));
        let first = may && operation.is_urgent();
        if !first {
            passed.extend(record);
        }
        is_first.push(first);
    }
    drop(passed);
    let (mut first, mut later) = (VecDeque::with_capacity(waiting.len()), VecDeque::new());
    for (operation, is_first) in waiting.drain(..).zip(is_first) {
        match is_first {
            true => first.push_back(operation),
            false => later.push_back(operation),
        }
    }
    first.append(&mut later);
    *waiting = first;
}

/// The next operations that the writer takes at once, up to a `Close`.
fn next_batch<W: Writer>(waiting: &mut VecDeque<Operation>) -> Vec<Operation> {
    let mut batch = Vec::with_capacity(waiting.len());
    let mut bytes = 0;
    while let Some(operation) = waiting.pop_front_if(|next| !matches!(next, Operation::Close(_))) {
        bytes += operation.bytes();
        if bytes > W::MAX_BATCH_BYTES && !batch.is_empty() {
            waiting.push_front(operation);
            break;
        }
        if operation.is_wanted() {
            batch.push(operation);
        }
    }
    batch
}

/// Commits all of them together; when one value is refused, halves the batch until it stands alone.
/// Gives back what the writer has not answered.
async fn commit(writer: &mut impl Writer, batch: Vec<Operation>) -> Vec<Operation> {
    let mut parts = vec![batch];
    let mut left = Vec::new();
    while let Some(mut part) = parts.pop() {
        if part.is_empty() {
            continue;
        }
        match writer.commit(&mut part).await {
            Ok(()) => {
                let (answered, unanswered): (Vec<_>, Vec<_>) =
                    part.into_iter().partition(Operation::is_answered);
                answered.into_iter().for_each(Operation::acknowledge);
                left.extend(unanswered);
            }
            Err(failure) if failure.reach == Reach::Value && part.len() > 1 => {
                let later = part.split_off(part.len() / 2);
                parts.extend([later, part]);
            }
            Err(failure) => part
                .into_iter()
                .for_each(|operation| operation.refuse(failure.error())),
        }
    }
    left
}

async fn close(
    writer: impl Writer,
    mut waiting: VecDeque<Operation>,
    mut queue: mpsc::Receiver<Operation>,
) {
    queue.close();
    let ended = writer.close().await;
    if let Some(Operation::Close(mut asked)) = waiting.pop_front() {
        asked.answer(ended.map_err(|failure| failure.error()));
        Operation::Close(asked).acknowledge();
    }
    for operation in waiting {
        operation.refuse(closed());
    }
    while let Some(operation) = queue.recv().await {
        operation.refuse(closed());
    }
}

#[cfg(test)]
#[path = "group_tests.rs"]
mod tests;

//! Group commit: operations queue up while a transaction commits, and the next transaction takes
//! all of them. No timer: whoever comes alone is served at once.
//!
//! The queue also separates callers from statements. A caller that goes away leaves its operation
//! behind, never a statement cut in the middle.

use std::{
    collections::VecDeque,
    error::Error,
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use tokio::sync::{mpsc, oneshot};

use super::{
    Checkpoint, Claim, ClaimRequest, Completion, Lifetimes, Settled, StoreError, StoreErrorKind,
    Ticket,
};
use crate::record::{Record, RecordId};

/// The most operations in one transaction.
const MAX_OPERATIONS: usize = 256;
/// About the most bytes in one transaction; a single larger operation is a transaction by itself.
const MAX_BYTES: usize = 8 << 20;
/// The most operations in the queue. Whoever comes later waits for a place, not for an error.
const MAX_QUEUED: usize = 1024;

/// A question, who asked it, and the answer as soon as there is one.
pub(crate) struct Asked<Q, A> {
    pub(crate) question: Q,
    answer: Option<Result<A, StoreError>>,
    caller: oneshot::Sender<Result<A, StoreError>>,
}

impl<Q, A> Asked<Q, A> {
    /// Keeps the answer back until the transaction is committed. A transaction that is tried again
    /// answers again.
    pub(crate) fn answer(&mut self, answer: Result<A, StoreError>) {
        self.answer = Some(answer);
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

pub(crate) struct Save {
    pub(crate) ticket: Ticket,
    pub(crate) name: String,
    pub(crate) value: Bytes,
}

/// One operation of the store's traits, waiting for its transaction.
pub(crate) enum Operation {
    Claim(Asked<ClaimRequest, Claim>),
    Complete(Asked<Complete, Settled>),
    Release(Asked<Release, Settled>),
    Abandon(Asked<Ticket, Settled>),
    Renew(Asked<Renew, Vec<Settled>>),
    Get(Asked<RecordId, Option<Record>>),
    Forget(Asked<RecordId, bool>),
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
    /// answer any more; a claim or a read would be for nobody.
    fn is_wanted(&self) -> bool {
        match self {
            Self::Complete(_) | Self::Release(_) | Self::Abandon(_) | Self::Forget(_) => true,
            operation => !each!(operation, asked => asked.caller.is_closed()),
        }
    }

    fn acknowledge(self) {
        each!(self, asked => if let Some(answer) = asked.answer {
            // Nobody there any more: the token settles later what happened.
            let _ = asked.caller.send(answer);
        });
    }

    fn refuse(self, error: StoreError) {
        each!(self, asked => {
            let _ = asked.caller.send(Err(error));
        });
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
    /// Carries all of them out in one transaction, giving each its answer. With an error nothing
    /// was changed, as far as anybody can tell.
    fn commit(
        &mut self,
        batch: &mut [Operation],
    ) -> impl Future<Output = Result<(), Failure>> + Send;

    /// Gives up the lease and the connection.
    fn close(self) -> impl Future<Output = Result<(), Failure>> + Send;
}

/// The callers' end of the queue.
#[derive(Debug)]
pub(crate) struct Queue {
    operations: mpsc::Sender<Operation>,
    closed: AtomicBool,
}

impl Queue {
    /// Starts the writer on the current runtime. It ends with the queue, or when it is closed.
    pub(crate) fn start(writer: impl Writer) -> Self {
        let (operations, queue) = mpsc::channel(MAX_QUEUED);
        tokio::spawn(serve(writer, queue));
        Self {
            operations,
            closed: AtomicBool::new(false),
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
            caller,
        };
        let sent = self.operations.send(operation(asked)).await;
        sent.map_err(|_| self.gone())?;
        answer.await.unwrap_or_else(|_| Err(self.gone()))
    }

    fn gone(&self) -> StoreError {
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
async fn serve(mut writer: impl Writer, mut queue: mpsc::Receiver<Operation>) {
    let mut taken = Vec::with_capacity(MAX_OPERATIONS);
    let mut waiting = VecDeque::with_capacity(MAX_OPERATIONS);
    while queue.recv_many(&mut taken, MAX_OPERATIONS).await > 0 {
        waiting.extend(taken.drain(..));
        while !waiting.is_empty() {
            let batch = next_batch(&mut waiting);
            commit(&mut writer, batch).await;
            if let Some(Operation::Close(_)) = waiting.front() {
                return close(writer, waiting, queue).await;
            }
        }
    }
    // The last handle is gone. The lease is left to lapse: a run of this instance may have been
    // dropped with it, and what it did is for the recovery policy to judge.
}

/// The next operations that fit one transaction, up to a `Close`.
fn next_batch(waiting: &mut VecDeque<Operation>) -> Vec<Operation> {
    let mut batch = Vec::with_capacity(waiting.len());
    let mut bytes = 0;
    while let Some(operation) = waiting.pop_front_if(|next| !matches!(next, Operation::Close(_))) {
        bytes += operation.bytes();
        if bytes > MAX_BYTES && !batch.is_empty() {
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
async fn commit(writer: &mut impl Writer, batch: Vec<Operation>) {
    let mut parts = vec![batch];
    while let Some(mut part) = parts.pop() {
        if part.is_empty() {
            continue;
        }
        match writer.commit(&mut part).await {
            Ok(()) => part.into_iter().for_each(Operation::acknowledge),
            Err(failure) if failure.reach == Reach::Value && part.len() > 1 => {
                let later = part.split_off(part.len() / 2);
                parts.extend([later, part]);
            }
            Err(failure) => part
                .into_iter()
                .for_each(|operation| operation.refuse(failure.error())),
        }
    }
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

//! What to do about a run that was cut off.

use std::{fmt, future::Future, sync::Arc};

use axum::{body::Body, response::IntoResponse};
use http::Response;
use serde::de::DeserializeOwned;

use crate::{
    IdempotencyKey, Scope,
    bounded::Boxed,
    checkpoint::{self, CheckpointError},
    downstream::{DownstreamKey, DownstreamSecret, NoDownstreamSecret},
    record::{Record, RecordId},
    store::Checkpoint,
};

/// What a retry gets that meets an abandoned claim: its process died or fell silent, its handler
/// panicked, its service failed, or it lasted longer than `max_run`. Nobody knows what the run did.
///
/// A claim that was made by a [`transactional`](crate::transactions) layer is another matter: what its run
/// did was not committed, so it is always run again, whatever is chosen here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Recovery {
    /// Refuse with 409 `idempotency_outcome_unknown`, until somebody settles the record. The
    /// default: a second charge is worse than a question.
    #[default]
    Refuse,
    /// Run the handler again, as long as fewer than `max_attempts` runs were cut off; then refuse.
    ///
    /// For handlers whose effect may safely happen twice. A request that kills its process every
    /// time must not do so forever, hence the limit.
    ///
    /// What counts is a run that was cut off: its process died, it panicked, its service failed, a drain
    /// aborted it, or it lasted longer than `max_run`. One whose handler has answered does not, whatever
    /// it answered and whatever becomes of the record; nor does one that never began, because its client had
    /// left. A key whose first run answered and left its record behind (released with checkpoints, or
    /// [`Retain::Abandon`](crate::Retain)) has one fewer left, though: what follows it is never less than the
    /// second.
    Rerun {
        /// How many runs may be cut off, the first one included; at least 1.
        max_attempts: u32,
    },
}

impl Recovery {
    /// Rerun with at most three runs.
    pub const fn rerun() -> Self {
        Self::Rerun { max_attempts: 3 }
    }

    /// Whether a run may follow the given abandoned attempt.
    pub(crate) fn allows_after(self, attempt: u32) -> bool {
        match self {
            Self::Refuse => false,
            Self::Rerun { max_attempts } => attempt < max_attempts,
        }
    }
}

/// What a request gets whose first attempt is still running.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum InFlight {
    /// Refuse at once with 409 `idempotency_in_flight` and `Retry-After: 1`. The default.
    #[default]
    Refuse,
    /// Wait this long at most for the first attempt to end, then refuse.
    ///
    /// A waiter holds no connection to the store and no place of the inner service. When the first
    /// attempt was released, a waiter runs in its stead. One that has a
    /// [`Resolver`] asked waits for the verdict as well, however long that takes: up to
    /// [`resolver_timeout`](crate::IdempotencyLayer::resolver_timeout) and the store's own time on top.
    Wait(std::time::Duration),
}

/// What a keyed request gets when the store cannot be asked before the run, or is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum StoreFailure {
    /// Refuse with 503 `idempotency_store_unavailable` and `Retry-After: 1`. The default.
    #[default]
    Refuse,
    /// Run the handler without any protection: no claim, no record, and a retry runs again. Such
    /// responses carry `Idempotency-Status: unprotected`. Handlers must take
    /// `Option<`[`Idempotency`](crate::Idempotency)`>`, which is `None` then.
    ///
    /// A request that the store has told of another run of its key, in flight or cut off, before it failed is
    /// never run like that: it is refused, and one that [waits](InFlight::Wait) goes on waiting.
    RunUnprotected,
}

/// Finds out what a run did that was cut off: asks the payment provider, or looks into the service's own
/// tables.
///
/// Asked by a request that meets an abandoned record
/// ([`IdempotencyLayer::resolver`](crate::IdempotencyLayer::resolver)) and by a
/// [`Reconciler`](crate::Reconciler). Whoever asks holds the record under a fresh token by then, so neither
/// its late owner nor anybody else acts meanwhile.
///
/// A closure `Fn(Abandoned) -> impl Future<Output = Verdict>` is one.
pub trait Resolver: Send + Sync + 'static {
    /// What became of it. A panic, and more than
    /// [`resolver_timeout`](crate::IdempotencyLayer::resolver_timeout), count as [`Verdict::Leave`].
    ///
    /// Dropped when the time is over, or that of a [`drain`](crate::IdempotencyLayer::drain), so it should
    /// change nothing that may not be left half done. It may be asked about one run several times: again after
    /// [`Verdict::Leave`], and after a process that died or stood still while it asked.
    fn resolve(&self, abandoned: Abandoned) -> impl Future<Output = Verdict> + Send;
}

impl<F, A> Resolver for F
where
    F: Fn(Abandoned) -> A + Send + Sync + 'static,
    A: Future<Output = Verdict> + Send,
{
    fn resolve(&self, abandoned: Abandoned) -> impl Future<Output = Verdict> + Send {
        self(abandoned)
    }
}

/// Any resolver.
pub(crate) trait Resolves: Send + Sync {
    fn ask(&self, abandoned: Abandoned) -> Boxed<'_, Verdict>;
}

impl<R: Resolver> Resolves for R {
    fn ask(&self, abandoned: Abandoned) -> Boxed<'_, Verdict> {
        Box::pin(self.resolve(abandoned))
    }
}

/// What a [`Resolver`] found out. `Debug` shows the status of an answer and nothing else of it.
#[non_exhaustive]
pub enum Verdict {
    /// It is done, and this is the answer every retry gets. Kept like a handler's, whatever its status: a
    /// [`Retain::Tombstone`](crate::Retain) among its parts keeps that it is done and not the answer, and so
    /// does what is too large or a stream. With [`Retain::Release`](crate::Retain) among them it is
    /// [`DidNotHappen`](Self::DidNotHappen); with [`Retain::Abandon`](crate::Retain), and where its body breaks
    /// off, [`Leave`](Self::Leave).
    Answer(Response<Body>),
    /// It did not happen, and never will: the key is free again. Where checkpoints were saved they stay, and
    /// whoever asks for the same thing goes on after them.
    DidNotHappen,
    /// Not known yet. The record stays abandoned, and is asked about again. A run that was slow rather than dead
    /// was fenced off by the question: its client gets its true answer, and the record does not.
    Leave,
}

impl fmt::Debug for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Answer(answer) => f
                .debug_struct("Answer")
                .field("status", &answer.status())
                .finish_non_exhaustive(),
            Self::DidNotHappen => f.write_str("DidNotHappen"),
            Self::Leave => f.write_str("Leave"),
        }
    }
}

impl Verdict {
    /// It is done, with this answer.
    pub fn answer(answer: impl IntoResponse) -> Self {
        Self::Answer(answer.into_response())
    }
}

/// A run that was cut off, as a [`Resolver`] sees it.
#[derive(Clone)]
pub struct Abandoned {
    record: Record,
    /// What the store calls it.
    stored: RecordId,
    checkpoints: Arc<[Checkpoint]>,
    secret: Option<DownstreamSecret>,
}

impl Abandoned {
    pub(crate) fn new(
        record: Record,
        stored: RecordId,
        checkpoints: Vec<Checkpoint>,
        secret: Option<DownstreamSecret>,
    ) -> Self {
        let checkpoints = checkpoints.into();
        Self {
            record,
            stored,
            checkpoints,
            secret,
        }
    }

    /// Whose key it is; `None` where the store knows only hashes (`SealingKeys::hash_ids`) and a
    /// [`Reconciler`](crate::Reconciler) asks. What is needed then belongs into a checkpoint.
    pub fn scope(&self) -> Option<&Scope> {
        (!self.record.id.is_hashed()).then_some(&self.record.id.scope)
    }

    /// The key the client sent; `None` as for [`scope`](Self::scope).
    pub fn key(&self) -> Option<&IdempotencyKey> {
        (!self.record.id.is_hashed()).then_some(&self.record.id.key)
    }

    /// The record as it was when it was found, before it was taken over.
    pub fn record(&self) -> &Record {
        &self.record
    }

    /// What the runs saved under this name with
    /// [`Idempotency::checkpoint`](crate::Idempotency::checkpoint).
    ///
    /// # Errors
    ///
    /// When it is there and is no such `T`.
    pub fn checkpoint<T: DeserializeOwned>(
        &self,
        name: &str,
    ) -> Result<Option<T>, CheckpointError> {
        let saved = self.checkpoints.iter().find(|saved| saved.name == name);
        saved
            .map(|saved| checkpoint::decode(&saved.value))
            .transpose()
    }

    /// The key that [`Idempotency::downstream_key`](crate::Idempotency::downstream_key) gave the runs for
    /// this step.
    ///
    /// # Errors
    ///
    /// Without a [`downstream_secret`](crate::IdempotencyLayer::downstream_secret).
    pub fn downstream_key(&self, step: &str) -> Result<DownstreamKey, NoDownstreamSecret> {
        let secret = self.secret.as_ref().ok_or(NoDownstreamSecret::NEW)?;
        Ok(secret.key(&self.stored, step))
    }
}

impl fmt::Debug for Abandoned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Abandoned")
            .field("record", &self.record)
            .field("checkpoints", &self.checkpoints.len())
            .finish_non_exhaustive()
    }
}

/// What becomes of a request that brings no key though its method requires one, or a malformed one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum MissingKey {
    /// Refuse with 400 `idempotency_key_required` or `idempotency_key_invalid`. The default.
    #[default]
    Refuse,
    /// Let it pass without any protection, count it and log it (not one in whose body no key
    /// [can be looked for](crate::IdempotencyLayer::key_pointer)): for moving an existing API over, until its
    /// clients send keys. Handlers must take `Option<`[`Idempotency`](crate::Idempotency)`>`, which is `None`
    /// then.
    Observe,
}

//! What an attempt is told, and what stands in the extensions of an answer.

use crate::IdempotencyKey;

/// An attempt that is about to be made: what the hook of
/// [`before_attempt`](super::RetryLayer::before_attempt) sees.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Attempt {
    /// The first is 1.
    pub number: u32,
    /// The key, the same in every attempt.
    pub key: IdempotencyKey,
}

/// What it took to get an answer: an extension of every response that [`Retry`](super::Retry) gives to a
/// covered request.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Answered {
    /// The key that every attempt had.
    pub key: IdempotencyKey,
    /// How many attempts were made; the first is 1.
    pub attempts: u32,
    /// Whether the server says that this is the recorded answer of an earlier run (`Idempotent-Replay` or
    /// `Idempotent-Replayed`).
    pub replayed: bool,
}

//! What an answer says of the operation itself.

use http::StatusCode;

use crate::client::EntryState;

/// How much an answer weighs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Weight {
    /// It is what the server has on record for the key.
    Replay,
    /// It came to the only attempt that was ever made.
    OnlyAttempt,
    /// There were other attempts, and nobody knows what became of them.
    OneOfMany,
}

/// The one place that decides what is recorded: `None` where the answer does not tell whether the operation has had
/// its effect. See the table of [`Relay`](super::Relay).
pub(super) fn verdict(status: StatusCode, weight: Weight) -> Option<EntryState> {
    let is_told = weight != Weight::OneOfMany;
    match status.as_u16() {
        200..=299 | 303 => Some(EntryState::Done),
        // Without a record it was something on the way that wants the request elsewhere.
        300..=399 if weight == Weight::Replay => Some(EntryState::Done),
        // What was refused so may be done all the same: by another attempt, or behind a gateway that did not wait.
        408 | 409 | 425 | 429 | 499 => None,
        400..=499 if is_told => Some(EntryState::Failed),
        _ => None,
    }
}

//! Where records live: the traits a store implements, and the contract it keeps.
//!
//! # The contract
//!
//! Each number is a test of the conformance suite (feature `testing`), so a store that passes it
//! keeps the contract. "Its token" is the token of the latest claim on the record.
//!
//! **Claiming**
//!
//! 1. A claim on a key without a record is won, with attempt 1.
//! 2. Of any number of simultaneous claims on one key, exactly one is won, even when their
//!    fingerprints are equal. Whoever only reads first and writes later does not keep this.
//! 3. A claim on a running record changes nothing and answers `InFlight` with what the first
//!    claim brought: token, scheme, fingerprint, attempt, mode, request id.
//! 4. A claim on a completed record changes nothing and answers `Completed` with the record.
//! 5. A claim sent again with its token, while still running, is won again: same attempt, no second
//!    run. This is how a lost acknowledgement is healed.
//! 6. An expired record is as good as absent: of simultaneous claims one is won, with attempt 1
//!    and none of the earlier record's checkpoints.
//! 7. Scope and key are compared byte for byte, apart from each other, whatever the bytes: NUL,
//!    invalid UTF-8, 255 times `0xFF`.
//!
//! **Leases**
//!
//! 8. A won claim is believed alive for its lease, counted from the claim, by the store's clock,
//!    and longer when its store instance renews. Lapsed, it answers `Abandoned`.
//! 9. Renewing with no or any tickets extends the lease of the store instance, and so of all its
//!    claims; a shorter lease never cuts a longer one.
//! 10. `renew` answers `Lost` for a ticket that was replaced, settled, forgotten or whose
//!     `run_until` has passed, and `Done` for the rest, in order.
//! 11. A claim whose `run_until` has passed counts as abandoned even while its lease lives.
//! 12. A claim marked abandoned by its owner answers `Abandoned` at once. The record has the ticket's
//!     attempt from then on where that is smaller, so that a run which ended in order, or never began,
//!     need not count; 0 says nothing, and nothing raises an attempt. Sent again it is the same: the
//!     smallest stays.
//!
//! **Taking over**
//!
//! 13. An abandoned record is only taken over by a claim that names its token in `replaces`; of
//!     simultaneous ones exactly one is won. The attempt is one more than before, `created` and the
//!     first request id stay, checkpoints stay.
//! 14. A claim that names another token in `replaces`, or names the right one while the record is
//!     alive or completed, takes nothing over.
//!
//! **Settling**
//!
//! 15. `complete` with its token writes status, response and lifetimes and answers `Done`, also
//!     when the lease has lapsed or the claim was marked abandoned, as long as nobody took over.
//! 16. `complete` sent again with its token answers `Done` and changes nothing.
//! 17. `complete`, `release`, `abandon` and `Checkpoints::save` with another token, or without a
//!     record, change nothing and answer `Lost`. So do `release`, `abandon` and
//!     `save` with its token once the record is completed.
//! 18. `release` with its token frees the key: the next claim is won with attempt 1. Where
//!     checkpoints were saved, the record becomes `Released` instead: it answers `Abandoned` with
//!     `released` set, its checkpoints stay, it expires after the `ttl` given, and it has the ticket's
//!     attempt as under 12. Sent again, `release` answers `Done` and changes nothing.
//! 19. A completed record expires `ttl` after it was completed, and its response `response_ttl`
//!     after, when given: until then it is a tombstone. Durations work from 1 ms to
//!     `Duration::MAX`.
//! 20. Responses come back byte for byte, and absent ones as absent.
//! 21. An abandoned record never expires, unless the claim gave an `abandoned_ttl`: then that long
//!     after its `run_until`.
//!
//! **Keeping house**
//!
//! 22. `purge` removes expired records, and responses past `response_expires`, at most `limit` in
//!     one call, and answers how many; it never touches anything else.
//! 23. A store that is full refuses new claims with [`StoreErrorKind::Full`]; it never evicts a
//!     live record and never refuses to complete a claim it granted.
//! 24. `get` answers the record, whatever its state, and nothing once it is expired.
//! 25. `forget` removes a record in any state; a running owner is fenced off by it.
//! 26. `counts` counts by state, derived abandonment included, expired ones left out.
//! 27. `abandoned` lists abandoned records, oldest `created` first, in pages.
//!
//! **Checkpoints**
//!
//! 28. `save` with its token, while running, is durable before it answers `Done`; the same name
//!     again replaces the value. `load` with its token answers all of them in the order they were
//!     first saved, and `None` to anybody else.
//!
//! **Everywhere**
//!
//! 29. What `Done` or `Won` acknowledged is visible to every other instance on the same data, and
//!     survives a crash as far as the store promises durability.
//! 30. Dropping the future of an operation never breaks the store or another operation. The
//!     operation itself may or may not have happened; its token settles which.
//!     A `release` or `forget` sent after that is decided after it: a claim it is to undo never
//!     overtakes it.
//! 31. After `close` every operation answers [`StoreErrorKind::Closed`], and this instance's lease
//!     is given up: claims it left running count as abandoned at once.
//!
//! **Limits per scope**
//!
//! 32. `count_in` counts the live records of one scope, in whatever state, and no further than
//!     `at_most`. Expired ones are left out, purged or not, and no other scope counts.
//!
//! **Finding out what a run did**
//!
//! 33. `take_over` gives an abandoned record whose token is named a new token and this owner, for `hold`
//!     from now: it runs, its lease lives that long and its `run_until` is then, so that it is abandoned
//!     again afterwards. Attempt, mode, scheme, fingerprint, `created`, request id, `expires` and
//!     checkpoints stay: it is no run. Of simultaneous ones exactly one succeeds, and none when a claim that
//!     names the same token is won. Sent again with its new token, while that hold lasts, it succeeds again
//!     and changes nothing. Where there is no such record, or it is alive, completed, released, expired or
//!     under another token, nothing changes and the answer is `None`. So it is when the new token is the old
//!     one, which would fence nobody off, and so it may be while somebody else has the record locked, who
//!     may be completing it. An `abandon` sent after a `take_over` whose future was dropped is decided after
//!     it. Since `expires` stays, a record with an `abandoned_ttl` may expire while it is held, and its key
//!     be claimed anew: the ticket is lost then, as by any other takeover.
//!
//! Store clocks decide (8, 11, 19, 21, 33), never the caller's.

mod any;
#[doc = include_str!("choosing.md")]
pub mod choosing {}
mod clock;
#[cfg(any(feature = "sqlite", feature = "postgres"))]
mod group;
pub(crate) mod joining;
mod memory;
#[cfg(feature = "postgres")]
mod postgres;
pub(crate) mod protocol;
#[cfg(feature = "sealing")]
pub(crate) mod sealed;
pub(crate) mod sealed_form;
#[cfg(feature = "sqlite")]
mod sqlite;
#[cfg(any(feature = "sqlite", feature = "postgres"))]
mod stored;
#[cfg(any(feature = "sqlite", feature = "postgres"))]
mod transactional;

use std::{fmt, future::Future, sync::Arc, time::Duration};

use bytes::Bytes;
use http::StatusCode;

#[doc(hidden)]
pub use self::joining::Joining;
#[cfg(any(feature = "sqlite", feature = "postgres"))]
pub use self::joining::JoinsTransaction;
#[cfg(feature = "postgres")]
pub use self::postgres::{PostgresStore, PostgresStoreOptions};
#[cfg(feature = "sealing")]
pub use self::sealed::{InvalidSealingKey, SealedStore, SealingKey, SealingKeys};
#[cfg(feature = "sqlite")]
pub use self::sqlite::{Journal, SqliteStore, SqliteStoreOptions};
#[cfg(any(feature = "sqlite", feature = "postgres"))]
pub(crate) use self::transactional::transactor;
pub use self::{
    any::AnyStore,
    clock::{Clock, SystemClock},
    memory::{MemoryStore, MemoryStoreOptions},
};
#[cfg(any(feature = "sqlite", feature = "postgres"))]
pub use self::{group::Grouping, transactional::TransactionalStore};
use crate::{
    Scope,
    record::{Fingerprint, Length, Mode, Record, RecordId, Scheme, Token},
};

/// The path every request takes. The contract is in the [module documentation](self).
///
/// Handles are cheap clones of one store instance. Two instances opened on the same data behave
/// like two processes: each has a lease of its own.
pub trait Store: Clone + Send + Sync + 'static {
    /// Asks for the exclusive right to run, in one atomic step (contract 1–14).
    ///
    /// # Errors
    ///
    /// After [`StoreErrorKind::Unavailable`] the claim may or may not stand: send it again with the
    /// same token, or release that token. After any other error nothing was claimed.
    fn claim(&self, claim: ClaimRequest) -> impl Future<Output = Result<Claim, StoreError>> + Send;

    /// Records the outcome (15–17, 19, 20).
    fn complete(
        &self,
        ticket: &Ticket,
        done: Completion,
        lifetimes: Lifetimes,
    ) -> impl Future<Output = Result<Settled, StoreError>> + Send;

    /// Gives the key back, because nothing happened (17, 18). `ttl` is how long checkpoints, where
    /// there are any, wait for the retry. A ticket with a smaller attempt gives the run back uncounted.
    fn release(
        &self,
        ticket: &Ticket,
        ttl: Duration,
    ) -> impl Future<Output = Result<Settled, StoreError>> + Send;

    /// Marks the run as given up, its outcome unknown (12, 17). A ticket with a smaller attempt gives the run
    /// back uncounted.
    fn abandon(&self, ticket: &Ticket) -> impl Future<Output = Result<Settled, StoreError>> + Send;

    /// Extends the lease of this store instance to at least `lease` from now, and tells for each
    /// ticket whether it is still held (9, 10).
    fn renew(
        &self,
        tickets: &[Ticket],
        lease: Duration,
    ) -> impl Future<Output = Result<Vec<Settled>, StoreError>> + Send;

    /// Removes what is over, at most `limit` records (22). Answers how many it removed or changed;
    /// fewer than `limit` means there is nothing left to do for now.
    fn purge(&self, limit: usize) -> impl Future<Output = Result<usize, StoreError>> + Send;

    /// Gives up the lease and ends (31). Let every run of this instance end first: what is still
    /// running counts as abandoned from here on.
    fn close(&self) -> impl Future<Output = Result<(), StoreError>> + Send;
}

/// What an operator asks of a store (24–27), recovery (33), and the layer where it must not write (24, 32).
pub trait Inspect: Store {
    /// The record of this scope and key, unless it is expired.
    ///
    /// Its state is the one that was written last: that of a run whose process died still reads
    /// [`Running`](crate::State::Running). [`abandoned`](Self::abandoned) and [`counts`](Self::counts) tell
    /// which are.
    fn get(&self, id: &RecordId)
    -> impl Future<Output = Result<Option<Record>, StoreError>> + Send;

    /// Removes the record, whatever its state. Answers whether there was one.
    ///
    /// The next request with this key runs as new, so be sure of the effect first.
    fn forget(&self, id: &RecordId) -> impl Future<Output = Result<bool, StoreError>> + Send;

    /// How many records there are, by state.
    fn counts(&self) -> impl Future<Output = Result<Counts, StoreError>> + Send;

    /// How many live records this scope has, in whatever state; `at_most` when there are as many or more
    /// (32).
    ///
    /// Asked of busy scopes every few seconds, so it must not read more than it has to, nor hold up claims.
    fn count_in(
        &self,
        scope: &Scope,
        at_most: u64,
    ) -> impl Future<Output = Result<u64, StoreError>> + Send;

    /// Abandoned records, oldest `created` first, at most `limit`; those after `after` in that
    /// order, when given.
    fn abandoned(
        &self,
        after: Option<&Record>,
        limit: usize,
    ) -> impl Future<Output = Result<Vec<Record>, StoreError>> + Send;

    /// Takes an abandoned record over in order to find out what its run did, not to run (33). `abandoned` is
    /// the token it has, `token` a fresh one; the ticket proves the hold, as that of a claim does. `None`
    /// means that there is nothing to take over, or not now.
    ///
    /// Dropped, it may or may not take place: abandon its ticket, or let `hold` pass.
    ///
    /// # Errors
    ///
    /// After [`StoreErrorKind::Unavailable`] it may or may not stand: send it again with the same token,
    /// abandon its ticket, or let `hold` pass.
    fn take_over(
        &self,
        id: &RecordId,
        abandoned: Token,
        token: Token,
        hold: Duration,
    ) -> impl Future<Output = Result<Option<Ticket>, StoreError>> + Send;
}

/// Small named values kept under a claim (28).
pub trait Checkpoints: Store {
    /// Saves a value under `name`.
    ///
    /// # Errors
    ///
    /// [`StoreErrorKind::Invalid`] for a name of more than 64 bytes, a value of more than 64 KiB,
    /// or a 33rd name.
    fn save(
        &self,
        ticket: &Ticket,
        name: &str,
        value: Bytes,
    ) -> impl Future<Output = Result<Settled, StoreError>> + Send;

    /// All values saved under the record; `None` when the ticket holds it no longer.
    fn load(
        &self,
        ticket: &Ticket,
    ) -> impl Future<Output = Result<Option<Vec<Checkpoint>>, StoreError>> + Send;

    /// How a checkpoint is saved in a transaction of the caller's; `None` where the store cannot.
    #[doc(hidden)]
    fn joining(
        &self,
        ticket: &Ticket,
        name: &str,
        value: Bytes,
    ) -> Option<Result<Joining, StoreError>> {
        let _ = (ticket, name, value);
        None
    }

    /// What the store calls this record: another name, where names are hashed.
    #[doc(hidden)]
    fn stored_id(&self, id: &RecordId) -> RecordId {
        id.clone()
    }
}

/// The most checkpoints a record may have.
pub const MAX_CHECKPOINTS: usize = 32;
/// The most bytes a checkpoint's value may have.
pub const MAX_CHECKPOINT_LEN: usize = 64 * 1024;
/// The most bytes a checkpoint's name may have.
pub const MAX_CHECKPOINT_NAME_LEN: usize = 64;

/// One claim, as the layer asks for it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ClaimRequest {
    /// Which record.
    pub id: RecordId,
    /// The rule that made `fingerprint`.
    pub scheme: Scheme,
    /// The digest of what is asked for. Stores keep it and never compare it: the layer does.
    pub fingerprint: Fingerprint,
    /// The id of the request, for those who are refused later.
    pub request_id: Option<Arc<str>>,
    /// How effect and record are kept together.
    pub mode: Mode,
    /// A fresh random value that will prove this claim.
    pub token: Token,
    /// The token of the abandoned claim this one means to take over.
    pub replaces: Option<Token>,
    /// How long a silent owner is believed alive. Default 30 s.
    pub lease: Duration,
    /// How long the run may last before it counts as abandoned. Default 10 min.
    pub max_run: Duration,
    /// How long after `max_run` an abandoned record is kept; forever, when `None` (the default).
    pub abandoned_ttl: Option<Duration>,
}

impl ClaimRequest {
    /// A plain claim with a fresh token and the default durations.
    pub fn new(id: RecordId, scheme: impl Into<Scheme>, fingerprint: Fingerprint) -> Self {
        Self {
            id,
            scheme: scheme.into(),
            fingerprint,
            request_id: None,
            mode: Mode::Plain,
            token: Token::random(),
            replaces: None,
            lease: Duration::from_secs(30),
            max_run: Duration::from_secs(600),
            abandoned_ttl: None,
        }
    }

    /// The ticket this claim is proved by when it is won as this attempt. With it a claim whose
    /// acknowledgement was lost can be released.
    pub fn ticket(&self, attempt: u32) -> Ticket {
        Ticket {
            id: self.id.clone(),
            token: self.token,
            attempt,
        }
    }
}

/// What a claim found.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Claim {
    /// The right to run.
    Won(Ticket),
    /// Somebody else runs.
    InFlight(Held),
    /// It is done.
    Completed(Box<Record>),
    /// Somebody ran and fell silent, or released it with checkpoints.
    Abandoned(Held),
}

/// The claim in the owner's hands.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use = "a claim that is neither completed, released nor abandoned stays in flight"]
#[non_exhaustive]
pub struct Ticket {
    /// Which record.
    pub id: RecordId,
    /// What proves the claim.
    pub token: Token,
    /// Which run this is; the first is 1. It proves nothing. A smaller one in [`Store::abandon`] and
    /// [`Store::release`] says that the run is not to count: the next one has the number that follows. 0 leaves
    /// that as it is.
    pub attempt: u32,
}

/// What is known of a claim somebody else holds or held.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Held {
    /// Its token, to be named in [`ClaimRequest::replaces`].
    pub token: Token,
    /// The rule that made `fingerprint`.
    pub scheme: Scheme,
    /// The digest of what it was asked for.
    pub fingerprint: Fingerprint,
    /// Which run it is or was.
    pub attempt: u32,
    /// How it keeps effect and record together.
    pub mode: Mode,
    /// The first request's id.
    pub request_id: Option<Arc<str>>,
    /// It was released with checkpoints: continuing needs no recovery policy.
    pub released: bool,
}

impl Held {
    /// What a claim on this record is told of it.
    pub fn of(record: &Record) -> Self {
        Self {
            token: record.token,
            scheme: record.scheme.clone(),
            fingerprint: record.fingerprint,
            attempt: record.attempt,
            mode: record.mode,
            request_id: record.request_id.clone(),
            released: record.state == crate::record::State::Released,
        }
    }
}

/// Whether an operation under a token took effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Settled {
    /// It did, now or when it was first sent.
    Done,
    /// The token holds the record no longer; nothing was changed.
    Lost,
}

/// The outcome of a run.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Completion {
    /// The status of the answer.
    pub status: StatusCode,
    /// The retained response in its stored form; `None` leaves a tombstone.
    pub response: Option<Bytes>,
}

impl fmt::Debug for Completion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Completion")
            .field("status", &self.status)
            .field("response", &Length(self.response.as_ref()))
            .finish()
    }
}

impl Completion {
    /// Done, with this response to replay.
    pub fn retained(status: StatusCode, response: Bytes) -> Self {
        Self {
            status,
            response: Some(response),
        }
    }

    /// Done, and nothing to replay.
    pub fn tombstone(status: StatusCode) -> Self {
        Self {
            status,
            response: None,
        }
    }
}

/// How long a completed record is kept, counted from its completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Lifetimes {
    /// The record.
    pub ttl: Duration,
    /// Its response, when that is shorter.
    pub response_ttl: Option<Duration>,
}

impl Lifetimes {
    /// Record and response live this long.
    pub fn new(ttl: Duration) -> Self {
        Self {
            ttl,
            response_ttl: None,
        }
    }

    /// The response lives shorter than the record.
    #[must_use]
    pub fn response_ttl(mut self, ttl: Duration) -> Self {
        self.response_ttl = Some(ttl);
        self
    }
}

/// How many records a store holds, by state; expired ones do not count.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counts {
    /// Running, and believed alive.
    pub running: u64,
    /// Completed, tombstones included.
    pub completed: u64,
    /// Abandoned: marked so, lapsed, or past their `run_until`.
    pub abandoned: u64,
    /// Released with checkpoints.
    pub released: u64,
}

/// One saved checkpoint.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Checkpoint {
    /// The name it was saved under.
    pub name: String,
    /// Its value.
    pub value: Bytes,
}

impl Checkpoint {
    /// A checkpoint read back from storage.
    pub fn new(name: impl Into<String>, value: Bytes) -> Self {
        Self {
            name: name.into(),
            value,
        }
    }
}

impl fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Checkpoint")
            .field("name", &self.name)
            .field("value", &format_args!("{} bytes", self.value.len()))
            .finish()
    }
}

/// Why a store could not answer.
///
/// [`kind`](Self::kind) says what to do about it, [`source`](std::error::Error::source) what went
/// wrong underneath. Neither `Display` nor `Debug` shows a key, a scope or a response.
pub struct StoreError {
    kind: StoreErrorKind,
    message: &'static str,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

/// What kind of trouble a store is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoreErrorKind {
    /// Out of reach, timed out, busy: worth sending again.
    Unavailable,
    /// At its limit: nothing was claimed.
    Full,
    /// What is stored cannot be read: an unknown state, a damaged response.
    Corrupt,
    /// The tables are missing, foreign, newer than this crate, or may not be written.
    Schema,
    /// The value itself cannot be stored.
    Invalid,
    /// The keys of a `SealedStore` are not those that the stored data were written with.
    Keys,
    /// [`Store::close`] was called.
    Closed,
}

impl StoreError {
    /// An error of this kind; `message` says what was wrong and what to do.
    pub fn new(kind: StoreErrorKind, message: &'static str) -> Self {
        Self {
            kind,
            message,
            source: None,
        }
    }

    /// What an operation is that the layer has given up waiting for.
    pub(crate) fn timed_out() -> Self {
        let message = "the store did not answer within store_timeout";
        Self::new(StoreErrorKind::Unavailable, message)
    }

    /// The same, with the error underneath.
    #[must_use]
    pub fn with_source(
        mut self,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        self.source = Some(source.into());
        self
    }

    /// What kind of trouble it is.
    pub fn kind(&self) -> StoreErrorKind {
        self.kind
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.message)
    }
}

impl fmt::Debug for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoreError")
            .field("kind", &self.kind)
            .field("message", &self.message)
            .field("source", &self.source)
            .finish()
    }
}

impl std::error::Error for StoreError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_ref().map(|source| &**source as _)
    }
}

/// Checks a checkpoint against the limits. For those who write a store.
///
/// # Errors
///
/// [`StoreErrorKind::Invalid`], naming the limit. `saved` is how many *other* names there are. A sealed value
/// may be longer by what sealing has added: up to 106 bytes.
pub fn check_checkpoint(name: &str, value: &[u8], saved: usize) -> Result<(), StoreError> {
    let longest = MAX_CHECKPOINT_LEN + sealed_form::overhead(value);
    let message = if name.len() > MAX_CHECKPOINT_NAME_LEN {
        "a checkpoint's name may have at most 64 bytes"
    } else if value.len() > longest {
        "a checkpoint's value may have at most 64 KiB; keep large things elsewhere and save a reference"
    } else if saved >= MAX_CHECKPOINTS {
        "a record may have at most 32 checkpoints"
    } else {
        return Ok(());
    };
    Err(StoreError::new(StoreErrorKind::Invalid, message))
}

//! What a store holds for one scope and key.

use std::{
    borrow::Cow,
    fmt,
    hash::{Hash, Hasher},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use http::StatusCode;
use rand::Rng;
use sha2::{Digest, Sha256};

use crate::{IdempotencyKey, Scope};

/// The name of a record: scope and key, two separate byte strings.
///
/// They are compared one by one and never joined, so `("ab", "c")` and `("a", "bc")` are two
/// records.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RecordId {
    /// Whose key it is.
    pub scope: Scope,
    /// What the client sent.
    pub key: IdempotencyKey,
    /// Scope and key are hashes that a `SealedStore` read from the store below it. Nobody else can say so,
    /// and no client can send it.
    hashed: bool,
}

impl RecordId {
    /// Names the record of this scope and key.
    pub fn new(scope: Scope, key: IdempotencyKey) -> Self {
        let hashed = false;
        Self { scope, key, hashed }
    }

    /// The same bytes, marked as the hashes they are.
    #[cfg(feature = "sealing")]
    pub(crate) fn into_hashed(mut self) -> Self {
        self.hashed = true;
        self
    }

    pub(crate) fn is_hashed(&self) -> bool {
        self.hashed
    }
}

/// A point in time by the store's clock: microseconds since the Unix epoch.
///
/// Only the store's clock writes and judges these, so that a service instance whose clock is wrong
/// neither steals a live claim nor keeps a dead one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp(i64);

impl Timestamp {
    /// From microseconds since the Unix epoch.
    pub const fn from_micros(micros: i64) -> Self {
        Self(micros)
    }

    /// Microseconds since the Unix epoch.
    pub const fn as_micros(self) -> i64 {
        self.0
    }

    /// This much later; stops at the end of time instead of overflowing.
    #[must_use]
    pub fn after(self, duration: Duration) -> Self {
        let micros = i64::try_from(duration.as_micros()).unwrap_or(i64::MAX);
        Self(self.0.saturating_add(micros))
    }
}

macro_rules! random_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
        pub struct $name([u8; 16]);

        impl Hash for $name {
            /// Half of what is random is as random, and quicker to hash.
            fn hash<H: Hasher>(&self, state: &mut H) {
                let [a, b, c, d, e, f, g, h, ..] = self.0;
                state.write_u64(u64::from_ne_bytes([a, b, c, d, e, f, g, h]));
            }
        }

        impl $name {
            /// A fresh one, from the thread's cryptographic generator.
            pub fn random() -> Self {
                let mut bytes = [0; 16];
                rand::rng().fill_bytes(&mut bytes);
                Self(bytes)
            }

            /// From its 16 bytes.
            pub const fn from_bytes(bytes: [u8; 16]) -> Self {
                Self(bytes)
            }

            /// Its 16 bytes.
            pub const fn as_bytes(&self) -> &[u8; 16] {
                &self.0
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({:02x}{:02x}…)"), self.0[0], self.0[1])
            }
        }
    };
}

random_id! {
    /// A fencing token: the random value that proves a claim. Whoever takes a claim over writes a
    /// token of its own, and from then on everything a late owner does changes nothing.
    Token
}

random_id! {
    /// A store instance, as the leases know it: one opened store in one process.
    Owner
}

/// The digest of what a request asks for.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint([u8; 32]);

impl Fingerprint {
    /// From its 32 bytes.
    pub const fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// Its 32 bytes.
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// SHA-256 over these parts, each preceded by its length (eight bytes, big-endian), so that no two
    /// lists of parts run together. For schemes of your own: see [`fingerprint_fn`](crate::fingerprint_fn).
    ///
    /// The digest is the same in every version of this crate. What is absent must be told from what is
    /// empty by another number of parts, or by a part that says so.
    ///
    /// ```
    /// use tower_idempotency::Fingerprint;
    ///
    /// assert_eq!(Fingerprint::of(["POST", "/charges"]), Fingerprint::of([b"POST".as_slice(), b"/charges"]));
    /// assert_ne!(Fingerprint::of(["ab", "c"]), Fingerprint::of(["a", "bc"]));
    /// assert_ne!(Fingerprint::of(["ab"]), Fingerprint::of(["ab", ""]));
    /// ```
    pub fn of<P: AsRef<[u8]>>(parts: impl IntoIterator<Item = P>) -> Self {
        let mut digest = Sha256::new();
        for part in parts {
            let part = part.as_ref();
            digest.update((part.len() as u64).to_be_bytes());
            digest.update(part);
        }
        Self(digest.finalize().into())
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fingerprint({:02x}{:02x}…)", self.0[0], self.0[1])
    }
}

/// The name of the rule that made a fingerprint; at most 64 bytes.
pub type Scheme = Cow<'static, str>;

/// How a claimed run keeps its effect and its record together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Mode {
    /// The record is written after the effect; a crash in between leaves the outcome unknown.
    Plain,
    /// Effect and completed record commit in one transaction, so an abandoned run had no effect.
    Transactional,
}

/// The state a record was written in. Whether a running record counts as abandoned also depends
/// on its owner's lease and on its `run_until`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum State {
    /// Claimed; its handler is believed to run. A record whose process has died still says so: who is
    /// believed alive is not written to it. [`Inspect::abandoned`](crate::store::Inspect::abandoned) tells
    /// which are.
    Running,
    /// Done. The response is kept, or was never kept (a tombstone).
    Completed,
    /// Given up by its owner without an outcome.
    Abandoned,
    /// Released with checkpoints: whoever asks for the same thing continues after them. See
    /// [`Idempotency::checkpoint`](crate::Idempotency::checkpoint).
    Released,
}

/// Everything a store holds for one scope and key, checkpoints aside. `Debug` shows the response's
/// size only.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Record {
    /// Its name.
    pub id: RecordId,
    /// The rule that made `fingerprint`.
    pub scheme: Scheme,
    /// The digest of what was asked for.
    pub fingerprint: Fingerprint,
    /// The token of the latest claim.
    pub token: Token,
    /// The store instance that made the latest claim.
    pub owner: Owner,
    /// Which run the latest claim is for; the first is 1. Less where that run was given back
    /// uncounted (see [`Ticket::attempt`](crate::store::Ticket::attempt)).
    pub attempt: u32,
    /// How effect and record are kept together.
    pub mode: Mode,
    /// As last written.
    pub state: State,
    /// When the key was first claimed.
    pub created: Timestamp,
    /// When the latest run counts as abandoned at the latest.
    pub run_until: Timestamp,
    /// When it was completed.
    pub completed: Option<Timestamp>,
    /// When the whole record is over; never, when `None`.
    pub expires: Option<Timestamp>,
    /// When the response is over and the record becomes a tombstone.
    pub response_expires: Option<Timestamp>,
    /// The request id of the first request, when it had one.
    pub request_id: Option<Arc<str>>,
    /// The status of the answer, once completed.
    pub status: Option<StatusCode>,
    /// The retained response in its stored form (see [`RetainedResponse`](crate::RetainedResponse));
    /// `None` is a tombstone once completed.
    pub response: Option<Bytes>,
}

impl fmt::Debug for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Record")
            .field("id", &self.id)
            .field("scheme", &self.scheme)
            .field("fingerprint", &self.fingerprint)
            .field("token", &self.token)
            .field("owner", &self.owner)
            .field("attempt", &self.attempt)
            .field("mode", &self.mode)
            .field("state", &self.state)
            .field("created", &self.created)
            .field("run_until", &self.run_until)
            .field("completed", &self.completed)
            .field("expires", &self.expires)
            .field("response_expires", &self.response_expires)
            .field("request_id", &self.request_id)
            .field("status", &self.status)
            .field("response", &Length(self.response.as_ref()))
            .finish()
    }
}

/// Shows how long a stored response is, and nothing of it: it is a secret.
pub(crate) struct Length<'a>(pub(crate) Option<&'a Bytes>);

impl fmt::Debug for Length<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(response) => write!(f, "Some({} bytes)", response.len()),
            None => f.write_str("None"),
        }
    }
}

impl Record {
    /// What proves its latest claim. For those who write a store: what a claim that was won answers, or a
    /// [`take_over`](crate::store::Inspect::take_over). Whoever has it may settle the record, so hand it to
    /// nobody else.
    pub fn ticket(&self) -> crate::store::Ticket {
        crate::store::Ticket {
            id: self.id.clone(),
            token: self.token,
            attempt: self.attempt,
        }
    }

    /// The record a won claim starts with: running, first attempt. For those who write a store.
    pub fn claimed(request: &crate::store::ClaimRequest, owner: Owner, now: Timestamp) -> Self {
        let run_until = now.after(request.max_run);
        Self {
            id: request.id.clone(),
            scheme: request.scheme.clone(),
            fingerprint: request.fingerprint,
            token: request.token,
            owner,
            attempt: 1,
            mode: request.mode,
            state: State::Running,
            created: now,
            run_until,
            completed: None,
            expires: request.abandoned_ttl.map(|ttl| run_until.after(ttl)),
            response_expires: None,
            request_id: request.request_id.clone(),
            status: None,
            response: None,
        }
    }

    /// Whether the whole record is over at `now`, and so as good as absent.
    pub fn is_expired(&self, now: Timestamp) -> bool {
        self.expires.is_some_and(|expires| expires <= now)
    }
}

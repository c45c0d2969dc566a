//! Makes unsafe HTTP requests safe to retry.
#![forbid(unsafe_code)]
#![deny(missing_docs, unreachable_pub, missing_debug_implementations)]

mod key;
mod record;
mod scope;
pub mod store;

pub use key::{IdempotencyKey, InvalidKey, KeyFormat, MAX_KEY_LEN};
pub use record::{Fingerprint, Mode, Owner, Record, RecordId, Scheme, State, Timestamp, Token};
pub use scope::{MAX_SCOPE_LEN, Scope};
pub use store::{AnyStore, MemoryStore};

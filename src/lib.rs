//! Makes unsafe HTTP requests safe to retry.
#![forbid(unsafe_code)]
#![deny(missing_docs, unreachable_pub, missing_debug_implementations)]

mod attempt;
mod body;
mod bounded;
mod engine;
mod execution;
mod extract;
mod fingerprint;
mod key;
mod layer;
mod observe;
mod options;
mod record;
mod recovery;
mod rejection;
mod response_future;
mod retained;
mod retention;
mod scope;
mod service;
mod status;
pub mod store;
mod waiting;
#[cfg(feature = "testing")]
pub mod testing;

pub use extract::{Idempotency, NoIdempotency, NotOwned};
pub use fingerprint::{ExactRequest, FingerprintScheme, KeyOnly, UndecodableBody};
pub use key::{IdempotencyKey, InvalidKey, KeyFormat, MAX_KEY_LEN};
pub use layer::{Drained, IdempotencyLayer};
pub use record::{Fingerprint, Mode, Owner, Record, RecordId, Scheme, State, Timestamp, Token};
pub use recovery::{InFlight, Recovery, StoreFailure};
pub use rejection::{ProblemJson, Rejection, RejectionContext, RenderRejection};
pub use response_future::ResponseFuture;
pub use retained::{DecodeError, RetainedResponse};
pub use retention::{Retain, Retention, Streamed};
pub use scope::{MAX_SCOPE_LEN, Scope};
pub use service::IdempotencyService;
pub use status::{IdempotencyStatus, IdempotentResponse};
#[cfg(feature = "sqlite")]
pub use store::SqliteStore;
pub use store::{AnyStore, MemoryStore};

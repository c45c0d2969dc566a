//! Whose key it is.

use std::{fmt, sync::Arc};

/// The most bytes a scope may have; a longer one is refused as unknown.
pub const MAX_SCOPE_LEN: usize = 255;

/// Whose key it is: tenant, merchant, account.
///
/// Two callers that happen to choose one key must never meet in one record, so a record is named
/// by scope *and* key. Scope by the subject (an account id), never by a credential: a bearer token
/// may rotate between the first attempt and its retry, and the retry would then run again.
///
/// Any bytes, at most 255. `Debug` shows the length only.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Scope(Option<Arc<[u8]>>);

impl Scope {
    /// A scope made of exactly these bytes.
    pub fn new(bytes: impl AsRef<[u8]>) -> Self {
        let bytes = bytes.as_ref();
        // One spelling for the empty scope, and the one that costs nothing.
        Self((!bytes.is_empty()).then(|| Arc::from(bytes)))
    }

    /// The one namespace everybody shares where no scope is configured.
    pub fn shared() -> Self {
        Self::default()
    }

    /// The bytes.
    pub fn as_bytes(&self) -> &[u8] {
        self.0.as_deref().unwrap_or_default()
    }
}

impl fmt::Debug for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Scope({} bytes)", self.as_bytes().len())
    }
}

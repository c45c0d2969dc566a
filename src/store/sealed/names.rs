//! The names records have in the store below.

use std::borrow::Cow;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use zeroize::Zeroizing;

use super::keys::SealingKey;
use crate::{IdempotencyKey, Scope, record::RecordId, store::Ticket};

type Hash = Hmac<Sha256>;

/// Keyed hashes of scope and key, where they are wanted; else scope and key themselves.
pub(super) struct Names(Option<Hash>);

impl Names {
    pub(super) fn new(key: Option<&SealingKey>) -> Self {
        Self(key.map(|key| {
            // A shorter key counts as filled up with zeros (RFC 2104 §2).
            let mut block = Zeroizing::new([0; 64]);
            block[..key.as_bytes().len()].copy_from_slice(key.as_bytes());
            Hash::new((&*block).into())
        }))
    }

    pub(super) fn hashes(&self) -> bool {
        self.0.is_some()
    }

    /// What a record is called below. A name that was read from below is not hashed twice.
    pub(super) fn stored<'a>(&self, id: &'a RecordId) -> Cow<'a, RecordId> {
        match &self.0 {
            _ if id.is_hashed() => Cow::Owned(RecordId::new(id.scope.clone(), id.key.clone())),
            None => Cow::Borrowed(id),
            Some(hash) => {
                let (scope, key) = (id.scope.as_bytes(), id.key.as_bytes());
                let key = hex(&digest(hash, &[b"key", scope, key]));
                Cow::Owned(RecordId::new(
                    hashed_scope(hash, &id.scope),
                    IdempotencyKey::new(key),
                ))
            }
        }
    }

    /// Equal scopes stay equal, so that the records of one can be counted.
    pub(super) fn stored_scope<'a>(&self, scope: &'a Scope) -> Cow<'a, Scope> {
        match &self.0 {
            None => Cow::Borrowed(scope),
            Some(hash) => Cow::Owned(hashed_scope(hash, scope)),
        }
    }

    pub(super) fn stored_ticket<'a>(&self, ticket: &'a Ticket) -> Cow<'a, Ticket> {
        match self.stored(&ticket.id) {
            Cow::Borrowed(_) => Cow::Borrowed(ticket),
            Cow::Owned(id) => Cow::Owned(Ticket {
                id,
                token: ticket.token,
                attempt: ticket.attempt,
            }),
        }
    }

    /// A name read from below, as callers see it when they did not bring it.
    pub(super) fn seen(&self, stored: RecordId) -> RecordId {
        match self.0 {
            None => stored,
            Some(_) => stored.into_hashed(),
        }
    }

    /// What tells this key from others, and nothing else of it.
    pub(super) fn check(&self) -> Option<[u8; 32]> {
        self.0.as_ref().map(|hash| digest(hash, &[b"check"]))
    }
}

fn hashed_scope(hash: &Hash, scope: &Scope) -> Scope {
    Scope::new(digest(hash, &[b"scope", scope.as_bytes()]))
}

fn digest(hash: &Hash, parts: &[&[u8]]) -> [u8; 32] {
    let mut hash = hash.clone();
    prefixed(parts, |bytes| hash.update(bytes));
    hash.finalize().into_bytes().into()
}

/// Each part after its length, so that no two lists of parts run together.
pub(super) fn prefixed<'a>(
    parts: impl IntoIterator<Item = &'a &'a [u8]>,
    mut put: impl FnMut(&[u8]),
) {
    for part in parts {
        put(&(part.len() as u64).to_be_bytes());
        put(part);
    }
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::new(), |mut hex, byte| {
        // A string takes whatever is written.
        let _ = write!(hex, "{byte:02x}");
        hex
    })
}

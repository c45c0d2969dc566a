//! What a sealed value looks like in a store. Read by every build: one without the keys, or without the
//! feature, must know what it cannot read, and say so.

use std::sync::Arc;

/// The first byte of a sealed value, where a plain response has its version.
pub(crate) const SEALED: u8 = 2;
/// The longest id a key may have.
pub(crate) const MAX_KEY_ID_LEN: usize = 64;

const NONCE: usize = 24;
const TAG: usize = 16;

/// A sealed value, taken apart: one byte [`SEALED`], one byte length of the key's id, the id, the nonce,
/// ciphertext and tag.
#[cfg_attr(
    not(feature = "sealing"),
    expect(dead_code, reason = "only who has the key opens it")
)]
pub(crate) struct Sealed<'a> {
    pub(crate) key_id: &'a str,
    pub(crate) nonce: &'a [u8; NONCE],
    pub(crate) ciphertext: &'a [u8],
    pub(crate) tag: &'a [u8; TAG],
}

impl<'a> Sealed<'a> {
    /// Total, whatever the bytes.
    pub(crate) fn parse(stored: &'a [u8]) -> Option<Self> {
        match stored.split_first()? {
            (&SEALED, rest) => Self::after_version(rest),
            _ => None,
        }
    }

    fn after_version(rest: &'a [u8]) -> Option<Self> {
        let (&id_len, rest) = rest.split_first()?;
        let (key_id, rest) = rest.split_at_checked(usize::from(id_len))?;
        let key_id = str::from_utf8(key_id).ok().filter(|id| is_key_id(id))?;
        let (nonce, rest) = rest.split_first_chunk()?;
        let (ciphertext, tag) = rest.split_last_chunk()?;
        Some(Self {
            key_id,
            nonce,
            ciphertext,
            tag,
        })
    }
}

/// Whether this may name a key: it is shown in logs and errors.
pub(crate) fn is_key_id(id: &str) -> bool {
    (1..=MAX_KEY_ID_LEN).contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_graphic())
}

/// By how many bytes a value became longer when it was sealed; 0 for one that is not.
pub(crate) fn overhead(value: &[u8]) -> usize {
    Sealed::parse(value).map_or(0, |sealed| value.len() - sealed.ciphertext.len())
}

/// The id of the key a response was sealed with, whatever its first byte says. No secret.
pub(crate) fn key_id(response: &[u8]) -> Option<Arc<str>> {
    let sealed = Sealed::after_version(response.get(1..)?)?;
    Some(sealed.key_id.into())
}

/// Why a `SealedStore` gave a response back unopened. It stands where the stored response has its version,
/// and is never stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unopened {
    NoSuchKey,
    DoesNotOpen,
    NotSealed,
}

impl Unopened {
    /// Far from the versions, which count up from 1.
    pub(crate) fn of(byte: u8) -> Option<Self> {
        match byte {
            0xE1 => Some(Self::NoSuchKey),
            0xE2 => Some(Self::DoesNotOpen),
            0xE3 => Some(Self::NotSealed),
            _ => None,
        }
    }

    /// The stored bytes with the reason in them.
    #[cfg(feature = "sealing")]
    pub(crate) fn mark(self, stored: &[u8]) -> bytes::Bytes {
        let mut marked = stored.to_vec();
        if let Some(version) = marked.first_mut() {
            *version = match self {
                Self::NoSuchKey => 0xE1,
                Self::DoesNotOpen => 0xE2,
                Self::NotSealed => 0xE3,
            };
        }
        marked.into()
    }
}

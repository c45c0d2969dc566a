//! The keys, as a service is given them.

use std::{fmt, str::FromStr};

use zeroize::Zeroizing;

use crate::store::sealed_form::{MAX_KEY_ID_LEN, is_key_id};

const LEN: usize = 32;

/// A secret key: 32 bytes from a cryptographic generator, such as `openssl rand -hex 32` writes.
///
/// Made of its bytes, or of 64 hexadecimal digits in either case, white space around them allowed. It is
/// overwritten in memory when it is dropped, and `Debug` shows nothing of it.
///
/// ```
/// use tower_idempotency::SealingKey;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let from_secret_manager = "5e".repeat(32);
/// let key: SealingKey = from_secret_manager.parse()?;
/// assert!("5e5e".parse::<SealingKey>().is_err());
/// let key = SealingKey::try_from(&[0x5e; 32][..])?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct SealingKey(Zeroizing<[u8; LEN]>);

impl SealingKey {
    pub(super) fn as_bytes(&self) -> &[u8; LEN] {
        &self.0
    }

    fn is_zero(&self) -> bool {
        self.0.iter().all(|byte| *byte == 0)
    }

    fn checked(self) -> Result<Self, InvalidSealingKey> {
        match self.is_zero() {
            true => Err(InvalidSealingKey(Why::Zero)),
            false => Ok(self),
        }
    }
}

impl From<[u8; LEN]> for SealingKey {
    fn from(bytes: [u8; LEN]) -> Self {
        Self(Zeroizing::new(bytes))
    }
}

impl TryFrom<&[u8]> for SealingKey {
    type Error = InvalidSealingKey;

    fn try_from(bytes: &[u8]) -> Result<Self, InvalidSealingKey> {
        let key = <[u8; LEN]>::try_from(bytes);
        let key = key.map_err(|_| InvalidSealingKey(Why::Bytes(bytes.len())))?;
        Self::from(key).checked()
    }
}

impl FromStr for SealingKey {
    type Err = InvalidSealingKey;

    fn from_str(digits: &str) -> Result<Self, InvalidSealingKey> {
        let digits = digits.trim_ascii().as_bytes();
        let value = |digit: u8| char::from(digit).to_digit(16);
        if !digits.iter().all(|digit| value(*digit).is_some()) {
            return Err(InvalidSealingKey(Why::NoDigit));
        }
        if digits.len() != 2 * LEN {
            return Err(InvalidSealingKey(Why::Digits(digits.len())));
        }
        let mut key = Zeroizing::new([0; LEN]);
        for (byte, pair) in key.iter_mut().zip(digits.chunks(2)) {
            for digit in pair {
                // Each is less than 16.
                *byte = *byte << 4 | value(*digit).unwrap_or_default() as u8;
            }
        }
        Self(key).checked()
    }
}

impl fmt::Debug for SealingKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SealingKey(..)")
    }
}

/// What was given is no [`SealingKey`]. Says why, and shows nothing of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InvalidSealingKey(Why);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Why {
    Bytes(usize),
    Digits(usize),
    NoDigit,
    Zero,
}

impl fmt::Display for InvalidSealingKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Why::Bytes(len) => write!(
                f,
                "a sealing key has 32 bytes, not {len}; parse it if it is text in hexadecimal"
            ),
            Why::Digits(len) => write!(
                f,
                "a sealing key has 64 hexadecimal digits, not {len}; `openssl rand -hex 32` makes one"
            ),
            Why::NoDigit => f.write_str(
                "a sealing key has the digits 0-9 and a-f only; `openssl rand -hex 32` makes one",
            ),
            Why::Zero => {
                f.write_str("a sealing key of zeros only is none; `openssl rand -hex 32` makes one")
            }
        }
    }
}

impl std::error::Error for InvalidSealingKey {}

/// The keys of a [`SealedStore`](super::SealedStore): one that writes, any number that only read, and one
/// that hashes names, if wanted.
///
/// ```
/// use tower_idempotency::SealingKeys;
///
/// # let (new, old, names) = ([7; 32], [8; 32], [9; 32]);
/// let keys = SealingKeys::new("2026-12", new)
///     .also_opens("2026-06", old)
///     .hash_ids(names);
/// ```
///
/// The id of a key is stored beside what it has sealed and shown in errors; it is no secret. Never give an
/// id to another key.
#[derive(Clone)]
#[must_use = "without a SealedStore or an Outbox nothing is sealed"]
pub struct SealingKeys {
    pub(super) writes: (Box<str>, SealingKey),
    pub(super) opens: Vec<(Box<str>, SealingKey)>,
    pub(super) opens_plain: bool,
    pub(super) hashes: Option<SealingKey>,
}

impl SealingKeys {
    /// Seals with this key, and opens with it.
    ///
    /// # Panics
    ///
    /// When the id is not 1 to 64 visible ASCII characters, or the key is all zeros.
    pub fn new(id: impl AsRef<str>, key: impl Into<SealingKey>) -> Self {
        Self {
            writes: named(id.as_ref(), key.into()),
            opens: Vec::new(),
            opens_plain: false,
            hashes: None,
        }
    }

    /// Also opens what was sealed with this key: one that wrote before, or will soon.
    ///
    /// # Panics
    ///
    /// When the id is not 1 to 64 visible ASCII characters or is another key's already, or the key is all
    /// zeros.
    pub fn also_opens(mut self, id: impl AsRef<str>, key: impl Into<SealingKey>) -> Self {
        let (id, key) = named(id.as_ref(), key.into());
        let is_taken = self.opens.iter().any(|(other, _)| *other == id) || self.writes.0 == id;
        assert!(
            !is_taken,
            "SealingKeys: there are two keys with the id {id:?}; each needs an id of its own"
        );
        self.opens.push((id, key));
        self.check_hashing_key();
        self
    }

    /// Also takes responses and checkpoints that are not sealed, for the time after sealing was turned on.
    /// Default: they are refused, since whoever can write to the database could have put them there. (Of
    /// checkpoints those that [`Idempotency::checkpoint`](crate::Idempotency::checkpoint) saved, which say that
    /// they are plain.)
    ///
    /// Remove it one [`ttl`](crate::IdempotencyLayer::ttl) later.
    pub fn also_opens_plain(mut self) -> Self {
        self.opens_plain = true;
        self
    }

    /// Stores keyed hashes of scope and key instead of themselves. Default: they are stored as they are.
    ///
    /// This key cannot be rotated while records live; see [`sealing`](crate::sealing).
    ///
    /// # Panics
    ///
    /// When the key is all zeros, or seals as well.
    pub fn hash_ids(mut self, key: impl Into<SealingKey>) -> Self {
        let key = key.into();
        assert!(
            !key.is_zero(),
            "SealingKeys: the key of hash_ids is all zeros"
        );
        self.hashes = Some(key);
        self.check_hashing_key();
        self
    }

    #[cfg(all(feature = "client", any(feature = "sqlite", feature = "postgres")))]
    pub(crate) fn hashes_ids(&self) -> bool {
        self.hashes.is_some()
    }

    /// It lives as long as the records, and the others do not.
    fn check_hashing_key(&self) {
        let mut sealing = self.opens.iter().chain([&self.writes]);
        assert!(
            sealing.all(|(_, key)| Some(key) != self.hashes.as_ref()),
            "SealingKeys: hash_ids needs a key of its own, not one that seals"
        );
    }
}

fn named(id: &str, key: SealingKey) -> (Box<str>, SealingKey) {
    assert!(
        is_key_id(id),
        "SealingKeys: the id of a key has 1 to {MAX_KEY_ID_LEN} visible ASCII characters, such as \"2026-12\""
    );
    assert!(!key.is_zero(), "SealingKeys: the key {id:?} is all zeros");
    (id.into(), key)
}

impl fmt::Debug for SealingKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let opens: Vec<_> = self.opens.iter().map(|(id, _)| id).collect();
        f.debug_struct("SealingKeys")
            .field("writes", &self.writes.0)
            .field("also_opens", &opens)
            .field("also_opens_plain", &self.opens_plain)
            .field("hash_ids", &self.hashes.is_some())
            .finish()
    }
}

//! Keys made of what is to be done.

use std::fmt;

use sha2::{Digest, Sha256};

use crate::{Fingerprint, IdempotencyKey, KeyFormat};

/// The most bytes a prefix may have: the digest needs 64 of the 255 that a key may have.
const MAX_PREFIX_LEN: usize = 190;

/// How much of its digest a joined key has, in bytes.
const JOINED_DIGEST_LEN: usize = 16;

/// What stands between the parts of [`joined_key`].
const SEPARATOR: char = '|';

/// A key made of the content and the intent of an operation, for callers that cannot keep a key they made up:
/// whoever derives it again, in another process, on another machine or after a restart, gets the same one.
///
/// The key is `prefix` and 64 hexadecimal digits in lower case: SHA-256 over the parts, in their order, each
/// preceded by its length in bytes as eight bytes, big-endian (the same as [`Fingerprint::of`]). The prefix is
/// not part of the digest. It tells people what the key is for, or keeps two services apart; up to 190 of the bytes
/// that a bare key may have ([`KeyFormat::bare`]), or none. In JavaScript:
///
/// ```js
/// const hash = require('node:crypto').createHash('sha256');
/// for (const part of parts) {
///   const bytes = Buffer.from(part), length = Buffer.alloc(8);
///   length.writeBigUInt64BE(BigInt(bytes.length));
///   hash.update(length).update(bytes);
/// }
/// const key = prefix + hash.digest('hex');
/// ```
///
/// and in PHP:
///
/// ```php
/// $framed = '';
/// foreach ($parts as $part) { $framed .= pack('J', strlen($part)) . $part; }
/// $key = $prefix . hash('sha256', $framed);
/// ```
///
/// The digest is the same in every version of this crate.
///
/// # What to make a key of
///
/// Of *content*: what exactly is asked for, such as the account and the amount. And of *intent*: what makes
/// this wish another one than the last, such as the number of the order, the invoice, or the day that a
/// standing order is for.
///
/// - A new intent makes a new key. A customer who buys the same again, on purpose, has a new order, and its
///   number belongs into the key: content alone would take the second purchase for a retry of the first.
/// - The same intent never makes another key. Leave out what differs between an attempt and its retry: the time,
///   the number of the attempt, ids of sessions, requests and traces, and whatever is random.
/// - No personal data: few enough people have a telephone number that it can be guessed from its digest. Use the
///   number of the account. A prefix is not hashed at all.
/// - Amounts are text of one form only: minor units, such as `25000`, and never a floating-point number, which is
///   `250`, `250.0` or `2.5e2` by turns. The same goes for dates, and for whether letters are in upper case.
/// - What may change in the request belongs among the parts. Where a change is in none of them the key stays what
///   it was, and the server refuses the request as reused.
///
/// Whoever knows the parts knows the key. It is the server's [`Scope`](crate::Scope) that keeps callers apart.
///
/// ```
/// use tower_idempotency::client::derived_key;
///
/// let key = |order: &str, amount: &str| derived_key("capture-", [order, amount, "THB", "capture"]);
/// assert_eq!(key("A-17", "25000")?, key("A-17", "25000")?);
/// assert_ne!(key("A-17", "25000")?, key("A-18", "25000")?);
///
/// // The lengths keep parts apart that would run together.
/// assert_ne!(derived_key("", ["ab", "c"])?, derived_key("", ["a", "bc"])?);
/// # Ok::<(), tower_idempotency::client::InvalidKeyParts>(())
/// ```
///
/// # Errors
///
/// [`InvalidKeyParts`]: the prefix cannot begin a key, or there are no parts, or nothing in any of them.
pub fn derived_key<P: AsRef<[u8]>>(
    prefix: &str,
    parts: impl IntoIterator<Item = P>,
) -> Result<IdempotencyKey, InvalidKeyParts> {
    let mut is_empty = true;
    let parts = parts.into_iter().inspect(|part| {
        is_empty &= part.as_ref().is_empty();
    });
    let digest = Fingerprint::of(parts);
    if is_empty {
        return Err(InvalidKeyParts::Empty);
    }
    prefixed(prefix, digest.as_bytes())
}

/// A key made of content and intent as integrations in other languages make it, so that both make the same one:
/// `prefix` and the first 32 hexadecimal digits, in lower case, of SHA-256 over the parts with `|` between them.
///
/// The parts are UTF-8 and are taken exactly as they are: nothing is trimmed, and no letter changes its case.
/// What belongs into them, and what does not, is told at [`derived_key`]; that is the one to use where
/// nobody else makes the key, since its parts may have any bytes. In JavaScript:
///
/// ```js
/// const text = [reference, amount, sender, intent].join('|');
/// const key = prefix + require('node:crypto').createHash('sha256').update(text).digest('hex').slice(0, 32);
/// ```
///
/// and in PHP:
///
/// ```php
/// $text = implode('|', [$reference, $amount, $sender, $intent]);
/// $key = $prefix . substr(hash('sha256', $text), 0, 32);
/// ```
///
/// The same here:
///
/// ```
/// use tower_idempotency::client::{InvalidKeyParts, joined_key};
///
/// let key = joined_key("dep-", ["INV-2024-0117", "25000", "acct_42", "deposit"])?;
/// assert_eq!(key.as_str(), Some("dep-5b1e5f8c3307892c6e2cf3a2336b4b95"));
///
/// // Two lists of parts must not make one text.
/// assert_eq!(joined_key("", ["a|b", "c"]), Err(InvalidKeyParts::Separator));
/// # Ok::<(), InvalidKeyParts>(())
/// ```
///
/// # Errors
///
/// [`InvalidKeyParts`]: the prefix cannot begin a key, there are no parts or nothing in any of them, or a part
/// has a `|` in it.
pub fn joined_key<P: AsRef<str>>(
    prefix: &str,
    parts: impl IntoIterator<Item = P>,
) -> Result<IdempotencyKey, InvalidKeyParts> {
    joined_key_with(SEPARATOR, prefix, parts)
}

/// The same with another separator between the parts, which none of them may have.
///
/// ```
/// use tower_idempotency::client::{joined_key, joined_key_with};
///
/// let parts = ["INV-2024-0117", "25000", "acct_42", "deposit"];
/// assert_eq!(joined_key_with('|', "dep-", parts), joined_key("dep-", parts));
/// assert_ne!(joined_key_with(':', "dep-", parts), joined_key("dep-", parts));
/// ```
///
/// # Errors
///
/// As [`joined_key`].
pub fn joined_key_with<P: AsRef<str>>(
    // One character: with `||` between them, `a|` and `b` would be told as `a` and `|b` are.
    separator: char,
    prefix: &str,
    parts: impl IntoIterator<Item = P>,
) -> Result<IdempotencyKey, InvalidKeyParts> {
    let mut digest = Sha256::new();
    let mut is_empty = true;
    for (at, part) in parts.into_iter().enumerate() {
        let part = part.as_ref();
        if part.contains(separator) {
            return Err(InvalidKeyParts::Separator);
        }
        if at > 0 {
            digest.update(separator.encode_utf8(&mut [0; 4]));
        }
        digest.update(part);
        is_empty &= part.is_empty();
    }
    if is_empty {
        return Err(InvalidKeyParts::Empty);
    }
    prefixed(prefix, &digest.finalize()[..JOINED_DIGEST_LEN])
}

fn prefixed(prefix: &str, digest: &[u8]) -> Result<IdempotencyKey, InvalidKeyParts> {
    use fmt::Write;

    let mut text = String::with_capacity(prefix.len() + 2 * digest.len());
    text.push_str(prefix);
    for byte in digest {
        // A string takes whatever is written.
        let _ = write!(text, "{byte:02x}");
    }
    // A reader would forgive blanks around a key; this one goes out as it is.
    match KeyFormat::bare().parse(text.as_bytes()) {
        Ok(key) if prefix.len() <= MAX_PREFIX_LEN && key.as_bytes() == text.as_bytes() => Ok(key),
        _ => Err(InvalidKeyParts::Prefix),
    }
}

/// Why there is no key of a prefix and parts. Shows neither.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum InvalidKeyParts {
    /// The prefix is longer than 190 bytes, or has a byte that a bare key may not have.
    Prefix,
    /// No parts, or nothing but empty ones: every operation would have the same key.
    Empty,
    /// A part has the separator in it, so that other parts would make the same key.
    Separator,
}

impl fmt::Display for InvalidKeyParts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Prefix => {
                "a key's prefix may have at most 190 bytes, and only visible ASCII characters without quotation \
                 marks, apostrophes, commas, semicolons and backslashes"
            }
            Self::Empty => "a key is made of at least one part that is not empty",
            Self::Separator => "a part of a joined key has the separator in it",
        })
    }
}

impl std::error::Error for InvalidKeyParts {}

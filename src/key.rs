//! The idempotency key: what a client sends, and how its header is read.

use std::{fmt, sync::Arc};

use http::{HeaderMap, HeaderName};

use crate::fingerprint::Named;

/// The most bytes a key may have once decoded, unless [`KeyFormat::max_len`] says less.
pub const MAX_KEY_LEN: usize = 255;

/// An idempotency key: the decoded bytes a client chose for one action.
///
/// From a header a key is 1 to 255 bytes of printable ASCII, from a
/// [member of the body](crate::IdempotencyLayer::key_pointer) as many of any text. Stores take any bytes, so
/// that other sources of keys (message ids, file names) need no escaping.
///
/// Keys are cheap to clone. `Debug` shows the length only: a key is as good as the answer it
/// unlocks, so it belongs in no log.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct IdempotencyKey(Arc<[u8]>);

impl IdempotencyKey {
    /// A key made of exactly these bytes, without looking at them.
    pub fn new(bytes: impl AsRef<[u8]>) -> Self {
        Self(Arc::from(bytes.as_ref()))
    }

    /// The decoded bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// The key as text, when it is UTF-8. Every key read from a request is.
    pub fn as_str(&self) -> Option<&str> {
        std::str::from_utf8(&self.0).ok()
    }
}

impl fmt::Debug for IdempotencyKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "IdempotencyKey({} bytes)", self.0.len())
    }
}

type Check = Arc<dyn Fn(&[u8]) -> bool + Send + Sync>;

/// Which keys are taken.
///
/// The default takes RFC 9651 strings (`"abc"`) and bare values (`abc`); both spellings name one
/// key. Every format also refuses what no format can allow: blank keys, control characters,
/// non-ASCII bytes and more than 255 decoded bytes.
///
/// Of a key in the [body](crate::IdempotencyLayer::key_pointer) only the length and the check count, and that
/// it is not blank: a JSON string has its own quotation marks, and may have any characters.
///
/// ```
/// use tower_idempotency::KeyFormat;
///
/// let format = KeyFormat::uuid();
/// assert!(format.parse(b"\"b3b0c1f4-8a0e-4f57-9f4a-0f5a8f9f6a11\"").is_ok());
/// assert!(format.parse(b"order-17").is_err());
/// ```
#[derive(Clone)]
pub struct KeyFormat {
    max_len: usize,
    quoted: bool,
    bare: bool,
    check: Option<(&'static str, Check)>,
}

impl KeyFormat {
    /// Strings and bare values of 1 to 255 bytes: the default.
    pub fn any() -> Self {
        Self {
            max_len: MAX_KEY_LEN,
            quoted: true,
            bare: true,
            check: None,
        }
    }

    /// Only RFC 9651 strings, as draft-ietf-httpapi-idempotency-key-header-07 §2.1 asks.
    pub fn structured() -> Self {
        Self {
            bare: false,
            ..Self::any()
        }
    }

    /// Only bare values.
    pub fn bare() -> Self {
        Self {
            quoted: false,
            ..Self::any()
        }
    }

    /// Only UUIDs in their hyphenated form (RFC 9562 §4), quoted or bare, in either case.
    pub fn uuid() -> Self {
        Self::any().check(
            "a UUID such as b3b0c1f4-8a0e-4f57-9f4a-0f5a8f9f6a11",
            is_uuid,
        )
    }

    /// Lowers the limit on decoded bytes.
    ///
    /// # Panics
    ///
    /// When `bytes` is zero or more than 255.
    #[must_use]
    pub fn max_len(mut self, bytes: usize) -> Self {
        assert!(
            (1..=MAX_KEY_LEN).contains(&bytes),
            "key_format: max_len must be from 1 to {MAX_KEY_LEN} bytes, not {bytes}"
        );
        self.max_len = bytes;
        self
    }

    /// Adds a check of the decoded bytes; `expected` completes the sentence "the key must be …".
    #[must_use]
    pub fn check(
        mut self,
        expected: &'static str,
        check: impl Fn(&[u8]) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.check = Some((expected, Arc::new(check)));
        self
    }

    /// Reads one field value, surrounding blanks allowed.
    ///
    /// # Errors
    ///
    /// [`InvalidKey`] says which rule the value breaks.
    pub fn parse(&self, value: &[u8]) -> Result<IdempotencyKey, InvalidKey> {
        let value = value.trim_ascii();
        if self.quoted && value.first() == Some(&b'"') {
            let item = sfv::Parser::new(value)
                .parse::<sfv::Item>()
                .map_err(|_| InvalidKey::NotAString)?;
            let text = item.bare_item.as_string().ok_or(InvalidKey::NotAString)?;
            return self.accept(text.as_str().as_bytes());
        }
        if !self.bare && !value.is_empty() {
            return Err(InvalidKey::NotQuoted);
        }
        if !value.iter().all(|byte| BARE[usize::from(*byte)]) {
            return Err(InvalidKey::Characters);
        }
        self.accept(value)
    }

    fn accept(&self, decoded: &[u8]) -> Result<IdempotencyKey, InvalidKey> {
        if decoded.trim_ascii().is_empty() {
            return Err(InvalidKey::Blank);
        }
        if decoded.len() > self.max_len {
            return Err(InvalidKey::TooLong(self.max_len));
        }
        match &self.check {
            Some((expected, check)) if !check(decoded) => Err(InvalidKey::Format(expected)),
            _ => Ok(IdempotencyKey::new(decoded)),
        }
    }

    /// Takes what was found in a body as a key.
    pub(crate) fn read_member(&self, named: &Named<'_>) -> Result<IdempotencyKey, InvalidKey> {
        match named {
            Named::Text(_, Some(text)) if text.trim().is_empty() => Err(InvalidKey::Blank),
            Named::Text(_, Some(text)) => self.accept(text.as_bytes()),
            Named::Text(_, None) => Err(InvalidKey::NotText),
            Named::Integer(digits) => self.accept(digits.as_bytes()),
            Named::Nothing | Named::Other => Err(InvalidKey::NotAKey),
        }
    }

    /// Looks the header up. `None` means the request carries no such field line at all.
    pub(crate) fn read(
        &self,
        headers: &HeaderMap,
        name: &HeaderName,
    ) -> Option<Result<IdempotencyKey, InvalidKey>> {
        let mut lines = headers.get_all(name).iter();
        let first = lines.next()?;
        if lines.next().is_some() {
            return Some(Err(InvalidKey::Repeated));
        }
        Some(self.parse(first.as_bytes()))
    }
}

impl Default for KeyFormat {
    fn default() -> Self {
        Self::any()
    }
}

impl fmt::Debug for KeyFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyFormat")
            .field("max_len", &self.max_len)
            .field("quoted", &self.quoted)
            .field("bare", &self.bare)
            .field("check", &self.check.as_ref().map(|(expected, _)| expected))
            .finish()
    }
}

/// Why a key was refused. `Display` is a sentence for the client; it never echoes the key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum InvalidKey {
    /// The header stands on more than one field line.
    Repeated,
    /// Nothing but blanks.
    Blank,
    /// It begins like a string but is none (RFC 9651 §3.3.3).
    NotAString,
    /// A bare value where only strings are taken.
    NotQuoted,
    /// A bare value with a byte outside the visible ASCII characters, or with `"` `'` `,` `;` `\`.
    Characters,
    /// More decoded bytes than this.
    TooLong(usize),
    /// Not what the service's own check expects.
    Format(&'static str),
    /// A member of the body that is neither a string nor a whole number.
    NotAKey,
    /// A string in the body with an escape for half a character (RFC 8259 §8.2).
    NotText,
}

impl fmt::Display for InvalidKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Repeated => f.write_str("the header is sent more than once; send it on exactly one field line"),
            Self::Blank => f.write_str("the key is blank; send a unique value such as a UUID"),
            Self::NotAString => f.write_str(
                "the value starts with a quotation mark but is not an RFC 9651 string; close the quotation mark and escape only \\\" and \\\\",
            ),
            Self::NotQuoted => f.write_str("the key must be an RFC 9651 string, in quotation marks"),
            Self::Characters => f.write_str(
                "a bare key may only have visible ASCII characters without quotation marks, apostrophes, commas, semicolons and backslashes",
            ),
            Self::TooLong(limit) => write!(f, "the key is longer than {limit} bytes"),
            Self::Format(expected) => write!(f, "the key must be {expected}"),
            Self::NotAKey => f.write_str("the key must be a string, or a number without fraction and exponent"),
            Self::NotText => f.write_str("the string has an escape that is half a character; write both halves of it"),
        }
    }
}

impl std::error::Error for InvalidKey {}

/// Which bytes a bare key may have: looked up, because every byte of every key is asked.
const BARE: [bool; 256] = {
    let mut bare = [false; 256];
    let mut byte = 0x21;
    while byte <= 0x7E {
        bare[byte] = !matches!(byte as u8, b'"' | b'\'' | b',' | b';' | b'\\');
        byte += 1;
    }
    bare
};

fn is_uuid(key: &[u8]) -> bool {
    key.len() == 36
        && key.iter().enumerate().all(|(at, byte)| match at {
            8 | 13 | 18 | 23 => *byte == b'-',
            _ => byte.is_ascii_hexdigit(),
        })
}

//! The response kept for retries, and its versioned binary form.

use std::{fmt, ops::Range, sync::Arc};

use axum::body::Body;
use bytes::{BufMut, Bytes, BytesMut};
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode, header};

use crate::store::sealed_form::{self, SEALED, Unopened};

/// The first byte of the stored form; tells later forms apart.
const VERSION: u8 = 1;

/// In the length of a value: it is not to be shown.
const SENSITIVE: u32 = 1 << 31;

/// A response with more fields than this is not kept: neither the stored count nor a map of
/// headers, which panics when it is full, has room for any number of them.
pub(crate) const MAX_FIELDS: usize = 1 << 14;

/// The response kept for retries: status, headers in order, body, byte for byte.
///
/// # Stored form
///
/// Version 1, numbers big-endian: one byte version, two bytes status, two bytes number of fields;
/// per field two bytes length of the name, the name, four bytes length of the value, the value
/// (the length's highest bit says that the value is marked sensitive, as `http` has it);
/// eight bytes length of the body, the body, end.
///
/// Version 2 is sealed by a `SealedStore` (feature `sealing`): one byte version, one byte length of the
/// key's id, the id, 24 bytes nonce, and the version 1 form encrypted with XChaCha20-Poly1305, its
/// 16-byte tag at the end. What is authenticated besides, each part after its length in eight bytes: the
/// text `tower-idempotency sealed response 2`, the key's id, and scope and key as they are stored.
///
/// Records outlive deploys: a released form is never changed, and a new one gets a new version.
///
/// `Debug` shows sizes only.
#[derive(Clone, PartialEq, Eq)]
pub struct RetainedResponse {
    /// The status.
    pub status: StatusCode,
    /// The fields that are kept; repeated ones in their order.
    pub headers: HeaderMap,
    /// The body.
    pub body: Bytes,
}

/// The stored bytes are no retained response this version can read.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum DecodeError {
    /// Written in a form this version does not know.
    Version(u8),
    /// Cut off, too long, or with a status or field that HTTP does not allow.
    Damaged,
    /// Sealed, and read without a `SealedStore`.
    Sealed {
        /// The id of the key it was sealed with.
        key_id: Arc<str>,
    },
    /// Sealed with a key that the `SealedStore` does not have.
    NoSuchKey {
        /// The id of the key it was sealed with.
        key_id: Arc<str>,
    },
    /// Sealed with another key under an id that the `SealedStore` has; or changed in the database, or
    /// moved there from another record.
    DoesNotOpen {
        /// The id of the key it says it was sealed with.
        key_id: Arc<str>,
    },
    /// Not sealed, and the `SealedStore` opens only what is.
    NotSealed,
}

impl fmt::Display for DecodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Version(version) => write!(
                f,
                "what is stored has the unknown form {version}; a newer version wrote it"
            ),
            Self::Damaged => f.write_str("what is stored is damaged"),
            Self::Sealed { key_id } => write!(
                f,
                "it is sealed with the key {key_id:?}: wrap the store in a SealedStore that has this key"
            ),
            Self::NoSuchKey { key_id } => write!(
                f,
                "it is sealed with the key {key_id:?}, which the SealedStore does not have: add it with \
                 SealingKeys::also_opens"
            ),
            Self::DoesNotOpen { key_id } => write!(
                f,
                "it does not open with the key {key_id:?}: give the SealedStore the key that had this id \
                 when it was sealed; if that is the one, it was changed or moved in the database"
            ),
            Self::NotSealed => f.write_str(
                "it is not sealed, and may have been written by anybody: if sealing was turned on less than \
                 a ttl ago, set SealingKeys::also_opens_plain until then",
            ),
        }
    }
}

impl std::error::Error for DecodeError {}

impl RetainedResponse {
    /// The bytes a store keeps.
    ///
    /// # Panics
    ///
    /// With more than 65 535 header values, which no stored form can count. Above 16 384 the layer
    /// leaves a tombstone.
    pub fn encode(&self) -> Bytes {
        assert!(
            u16::try_from(self.headers.len()).is_ok(),
            "a retained response has at most 65535 header values"
        );
        encode(self.status, &self.headers, &self.body, |_| true)
    }

    /// Reads the stored form; total, whatever the bytes. Body and values share the given memory.
    ///
    /// # Errors
    ///
    /// [`DecodeError`], when the bytes are not exactly one response of a known version.
    pub fn decode(stored: Bytes) -> Result<Self, DecodeError> {
        let mut input = Input {
            bytes: &stored,
            at: 0,
        };
        let [version] = input.array()?;
        if version != VERSION {
            return Err(not_plain(version, &stored));
        }
        let status = StatusCode::from_u16(u16::from_be_bytes(input.array()?));
        let status = status.map_err(|_| DecodeError::Damaged)?;
        let fields = usize::from(u16::from_be_bytes(input.array()?));
        // A damaged count must not reserve memory: each field takes at least six bytes, and asking
        // a map for more than it can ever hold panics. One place more than there are fields, for
        // the marker.
        let likely = fields.min(stored.len() / 6).min(MAX_FIELDS);
        let mut headers = HeaderMap::with_capacity(1 + likely);
        for _ in 0..fields {
            let length = usize::from(u16::from_be_bytes(input.array()?));
            let name = HeaderName::from_bytes(&stored[input.take(length)?]);
            let name = name.map_err(|_| DecodeError::Damaged)?;
            let length = u32::from_be_bytes(input.array()?);
            let value = stored.slice(input.take((length & !SENSITIVE) as usize)?);
            let mut value =
                HeaderValue::from_maybe_shared(value).map_err(|_| DecodeError::Damaged)?;
            value.set_sensitive(length & SENSITIVE != 0);
            headers
                .try_append(name, value)
                .map_err(|_| DecodeError::Damaged)?;
        }
        let length = u64::from_be_bytes(input.array()?);
        let length = usize::try_from(length).map_err(|_| DecodeError::Damaged)?;
        let body = stored.slice(input.take(length)?);
        if input.at != stored.len() {
            return Err(DecodeError::Damaged);
        }
        Ok(Self {
            status,
            headers,
            body,
        })
    }

    /// As a response to send.
    pub fn into_response(self) -> Response<Body> {
        let mut response = Response::new(Body::from(self.body));
        *response.status_mut() = self.status;
        *response.headers_mut() = self.headers;
        response
    }
}

/// Why a response that is not in the plain form cannot be read.
fn not_plain(version: u8, stored: &[u8]) -> DecodeError {
    let key_id = sealed_form::key_id(stored);
    match (Unopened::of(version), version) {
        (Some(why), _) => unopened(why, key_id),
        (None, SEALED) => key_id.map_or(DecodeError::Damaged, |key_id| DecodeError::Sealed {
            key_id,
        }),
        (None, _) => DecodeError::Version(version),
    }
}

/// Why a `SealedStore` did not open what was sealed with this key.
pub(crate) fn unopened(why: Unopened, key_id: Option<Arc<str>>) -> DecodeError {
    match (why, key_id) {
        (Unopened::NotSealed, _) => DecodeError::NotSealed,
        (Unopened::NoSuchKey, Some(key_id)) => DecodeError::NoSuchKey { key_id },
        (Unopened::DoesNotOpen, Some(key_id)) => DecodeError::DoesNotOpen { key_id },
        (_, None) => DecodeError::Damaged,
    }
}

impl fmt::Debug for RetainedResponse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RetainedResponse")
            .field("status", &self.status)
            .field("headers", &self.headers.len())
            .field("body", &format_args!("{} bytes", self.body.len()))
            .finish()
    }
}

/// Writes the stored form of the fields that `keep` says.
pub(crate) fn encode(
    status: StatusCode,
    headers: &HeaderMap,
    body: &Bytes,
    keep: impl Fn(&HeaderName) -> bool,
) -> Bytes {
    let kept = || headers.iter().filter(|(name, _)| keep(name));
    let (count, size) = kept().fold((0, 13 + body.len()), |(count, size), (name, value)| {
        (count + 1, size + 6 + name.as_str().len() + value.len())
    });
    let mut out = BytesMut::with_capacity(size);
    out.put_u8(VERSION);
    out.put_u16(status.as_u16());
    // No run keeps more than `MAX_FIELDS`, and http allows names of less than 2^16 bytes.
    out.put_u16(count);
    for (name, value) in kept() {
        out.put_u16(name.as_str().len() as u16);
        out.put_slice(name.as_str().as_bytes());
        let sensitive = if value.is_sensitive() { SENSITIVE } else { 0 };
        out.put_u32(value.len() as u32 | sensitive);
        out.put_slice(value.as_bytes());
    }
    out.put_u64(body.len() as u64);
    out.put_slice(body);
    out.freeze()
}

/// Which fields of a response are not kept for retries.
#[derive(Debug, Clone)]
pub(crate) struct SkippedHeaders {
    names: Vec<HeaderName>,
    /// `Access-Control-*`, those included that nobody has thought of yet.
    access_control: bool,
}

impl SkippedHeaders {
    pub(crate) fn add(&mut self, names: impl IntoIterator<Item = HeaderName>) {
        self.names.extend(names);
    }

    pub(crate) fn only(names: impl IntoIterator<Item = HeaderName>) -> Self {
        Self {
            names: names.into_iter().collect(),
            access_control: false,
        }
    }
}

impl Default for SkippedHeaders {
    /// What is about the moment or the asking origin, and credentials.
    fn default() -> Self {
        Self {
            names: vec![
                header::DATE,
                header::SET_COOKIE,
                header::WWW_AUTHENTICATE,
                header::PROXY_AUTHENTICATE,
                HeaderName::from_static("authentication-info"),
                HeaderName::from_static("proxy-authentication-info"),
            ],
            access_control: true,
        }
    }
}

impl SkippedHeaders {
    /// Which of these headers are kept. Hop-by-hop and framing fields describe this one message on
    /// this one connection (RFC 9110 §7.6.1): kept, they would corrupt the replay. What says what an
    /// idempotency layer did, such as that of an upstream service, would be wrong on it. So both are
    /// skipped whatever is configured.
    pub(crate) fn keeps<'a>(&'a self, headers: &'a HeaderMap) -> impl Fn(&HeaderName) -> bool + 'a {
        let names_some = headers.contains_key(header::CONNECTION);
        move |name| {
            let of_this_message = matches!(
                name.as_str(),
                "connection"
                    | "content-length"
                    | "idempotency-key-expires"
                    | "idempotency-original-date"
                    | "idempotency-original-request-id"
                    | "idempotency-status"
                    | "keep-alive"
                    | "proxy-connection"
                    | "te"
                    | "trailer"
                    | "transfer-encoding"
                    | "upgrade"
            );
            let of_this_message =
                of_this_message || names_some && named_by_connection(headers, name);
            let of_this_origin =
                self.access_control && name.as_str().starts_with("access-control-");
            !of_this_message && !of_this_origin && !self.names.contains(name)
        }
    }
}

fn named_by_connection(headers: &HeaderMap, name: &HeaderName) -> bool {
    headers.get_all(header::CONNECTION).iter().any(|value| {
        value.as_bytes().split(|byte| *byte == b',').any(|token| {
            token
                .trim_ascii()
                .eq_ignore_ascii_case(name.as_str().as_bytes())
        })
    })
}

struct Input<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Input<'_> {
    fn array<const N: usize>(&mut self) -> Result<[u8; N], DecodeError> {
        let range = self.take(N)?;
        self.bytes[range]
            .try_into()
            .map_err(|_| DecodeError::Damaged)
    }

    /// The range of the next so many bytes.
    fn take(&mut self, length: usize) -> Result<Range<usize>, DecodeError> {
        let end = self.at.checked_add(length).ok_or(DecodeError::Damaged)?;
        if end > self.bytes.len() {
            return Err(DecodeError::Damaged);
        }
        Ok(std::mem::replace(&mut self.at, end)..end)
    }
}

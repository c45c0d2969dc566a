//! What is to be sent.

use std::fmt;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Uri, header};

use super::OutboxError;
use crate::{
    IdempotencyKey, KeyFormat,
    client::key_source::{KeySource, fresh},
};

/// The longest reference, in bytes.
pub(super) const MAX_REFERENCE_LEN: usize = 255;
/// The largest body: 16 MiB, as much as a [`Retry`](crate::client::Retry) keeps.
const MAX_BODY_LEN: usize = 16 * 1024 * 1024;
const MAX_HEADERS: usize = 128;
/// Names and values together.
const MAX_HEADERS_LEN: usize = 64 * 1024;
const MAX_METHOD_LEN: usize = 64;
const MAX_URI_LEN: usize = 8 * 1024;

/// One request that is to have its effect once: method, URI, chosen headers, exact body, and a key.
///
/// Only the headers named here are sent, besides the key's own, which a [`Retry`](crate::client::Retry) writes, and
/// what the client adds. What is new in every attempt, and what gives access, such as nonces, dates, signatures and
/// tokens, belongs into [`before_attempt`](crate::client::RetryLayer::before_attempt) and not into a database.
///
/// ```
/// use http::{HeaderValue, Request, header::CONTENT_TYPE};
/// use tower_idempotency::client::Operation;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let charge = Operation::post("https://pay.example/charges".parse()?)
///     .header(CONTENT_TYPE, HeaderValue::from_static("application/json"))
///     .body(r#"{"amount_satang":25000}"#);
///
/// // The same from a request that was made already.
/// let request = Request::post("https://pay.example/charges")
///     .header("content-type", "application/json")
///     .header("date", "never the same")
///     .body(r#"{"amount_satang":25000}"#.into())?;
/// assert_eq!(Operation::from_request(request, [CONTENT_TYPE]), charge);
/// # Ok(())
/// # }
/// ```
///
/// `Debug` shows the method and sizes.
#[derive(Clone, PartialEq, Eq)]
#[must_use = "an operation does nothing until it is begun in an outbox"]
pub struct Operation {
    pub(super) method: Method,
    pub(super) uri: Uri,
    pub(super) headers: HeaderMap,
    pub(super) body: Bytes,
    pub(super) key: Option<IdempotencyKey>,
}

impl Operation {
    /// A request without headers and body. The URI is absolute: `https://pay.example/charges`.
    pub fn new(method: Method, uri: Uri) -> Self {
        Self {
            method,
            uri,
            headers: HeaderMap::new(),
            body: Bytes::new(),
            key: None,
        }
    }

    /// A POST.
    pub fn post(uri: Uri) -> Self {
        Self::new(Method::POST, uri)
    }

    /// This request, with those of its headers that are named. Its key is taken if `Idempotency-Key` is among them;
    /// otherwise give it with [`key`](Self::key).
    pub fn from_request(
        request: Request<Bytes>,
        keep: impl IntoIterator<Item = HeaderName>,
    ) -> Self {
        let (head, body) = request.into_parts();
        let keep: Vec<HeaderName> = keep.into_iter().collect();
        let mut operation = Self::new(head.method, head.uri).body(body);
        for (name, value) in &head.headers {
            if keep.contains(name) {
                operation = operation.header(name.clone(), value.clone());
            }
        }
        operation
    }

    /// One more header line. Values may be any bytes that HTTP allows, and names may be repeated. `Idempotency-Key`
    /// is the [`key`](Self::key), read as a [`Retry`](crate::client::Retry) reads it: the operation cannot be begun
    /// with one that cannot be read, or that is another than the one that `key` was given.
    ///
    /// # Panics
    ///
    /// With more than 24 576 lines, which no map of headers holds.
    pub fn header(mut self, name: HeaderName, value: HeaderValue) -> Self {
        self.headers.append(name, value);
        self
    }

    /// The body, sent byte for byte. Default: empty.
    pub fn body(mut self, body: impl Into<Bytes>) -> Self {
        self.body = body.into();
        self
    }

    /// The key. Default: that of the header `Idempotency-Key`; without one a random UUID, made when the operation is
    /// begun. See
    /// [`derived_key`](crate::client::derived_key) for one that is made of the action itself.
    pub fn key(mut self, key: IdempotencyKey) -> Self {
        self.key = Some(key);
        self
    }

    /// The request, without the key.
    pub fn into_request(self) -> Request<Bytes> {
        let mut request = Request::new(self.body);
        *request.method_mut() = self.method;
        *request.uri_mut() = self.uri;
        *request.headers_mut() = self.headers;
        request
    }

    /// Takes the key out of the header that has it, if one has.
    pub(super) fn with_key_of_header(mut self) -> Result<Self, OutboxError> {
        let name = KeySource::default().header_name;
        let Some(given) = KeyFormat::any().read(&self.headers, &name) else {
            return Ok(self);
        };
        let given = given.map_err(|why| {
            let invalid = "the idempotency key in an operation's header cannot be used";
            OutboxError::invalid(invalid).with_source(why)
        })?;
        if self.key.as_ref().is_some_and(|key| *key != given) {
            return Err(OutboxError::invalid(
                "an operation has one key, and that in its header is another than that of `key`",
            ));
        }
        self.headers.remove(name);
        Ok(self.key(given))
    }

    /// The key that goes with it for ever.
    pub(super) fn choose_key(&self) -> IdempotencyKey {
        self.key.clone().unwrap_or_else(fresh)
    }

    /// Whether both ask for the same thing. The key does not count: that of the first one is kept anyway.
    pub(super) fn asks_for_the_same(&self, other: &Self) -> bool {
        self.method == other.method
            && self.uri == other.uri
            && self.headers == other.headers
            && self.body == other.body
    }

    /// What could not be sent is refused before it is written, since nobody would send it later either.
    pub(super) fn check(&self) -> Result<(), OutboxError> {
        let size = |(name, value): (&HeaderName, &HeaderValue)| name.as_str().len() + value.len();
        let authority = self.uri.authority().map_or("", |of| of.as_str());
        let refused = if self.uri.scheme().is_none() || authority.is_empty() {
            "an operation's URI must be absolute, such as https://pay.example/charges"
        } else if authority.contains('@') {
            "an operation's URI must hold no user name and password: they would be stored; add them in before_attempt"
        } else if self.uri.to_string().len() > MAX_URI_LEN {
            "an operation's URI may have at most 8 KiB"
        } else if self.method.as_str().len() > MAX_METHOD_LEN {
            "an operation's method may have at most 64 bytes"
        } else if self.headers.len() > MAX_HEADERS {
            "an operation may have at most 128 header lines"
        } else if self.headers.iter().map(size).sum::<usize>() > MAX_HEADERS_LEN {
            "an operation's headers may have at most 64 KiB"
        } else if FRAMING.iter().any(|name| self.headers.contains_key(name)) {
            "an operation's headers must not be those of a connection: no Connection, Content-Length, Transfer-Encoding, TE, Trailer or Upgrade"
        } else if self.body.len() > MAX_BODY_LEN {
            "an operation's body may have at most 16 MiB"
        } else if self.key.as_ref().is_some_and(|key| !is_sendable(key)) {
            "an operation's key must be 1 to 255 bytes of printable ASCII and not blank"
        } else {
            return Ok(());
        };
        Err(OutboxError::invalid(refused))
    }
}

/// Of one message on one connection: the client writes them anew.
const FRAMING: [HeaderName; 6] = [
    header::CONNECTION,
    header::CONTENT_LENGTH,
    header::TRANSFER_ENCODING,
    header::TE,
    header::TRAILER,
    header::UPGRADE,
];

/// Whether any header can carry it: a string can whatever a bare value can.
pub(super) fn is_sendable(key: &IdempotencyKey) -> bool {
    let quoted = KeySource {
        is_quoted: true,
        ..KeySource::default()
    };
    quoted.write(key).is_ok()
}

pub(super) fn check_reference(reference: &str) -> Result<(), OutboxError> {
    if (1..=MAX_REFERENCE_LEN).contains(&reference.len()) && !reference.contains('\0') {
        return Ok(());
    }
    Err(OutboxError::invalid(
        "a reference must be 1 to 255 bytes of text without NUL",
    ))
}

impl fmt::Debug for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Operation")
            .field("method", &self.method)
            .field("headers", &self.headers.len())
            .field("body", &format_args!("{} bytes", self.body.len()))
            .field("has_key", &self.key.is_some())
            .finish_non_exhaustive()
    }
}

//! What a request asks for, as a digest.

mod custom;
mod json;
#[cfg(feature = "multipart")]
mod multipart;

use std::fmt;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, Uri, header, request::Parts};
use sha2::{Digest, Sha256};

pub(crate) use self::json::{Named, Pointer};
#[cfg(feature = "multipart")]
pub use self::multipart::MultipartParts;
pub use self::{
    custom::{FingerprintFn, fingerprint_fn},
    json::CanonicalJson,
};
use crate::record::{Fingerprint, Scheme};

/// A rule that turns a request into a [`Fingerprint`].
///
/// Two requests with one key and equal fingerprints are attempts of one action; a different
/// fingerprint is refused as a reused key. The scheme's name is stored beside the digest. Change
/// the rule and you must change the name; keep the old rule registered with
/// [`also_accept`](crate::IdempotencyLayer::also_accept), which says how, for as long as its records live, or
/// the honest retries of a deploy are refused.
pub trait FingerprintScheme: Send + Sync + 'static {
    /// The name stored with each digest, with a version in it; at most 64 bytes, no control characters.
    fn name(&self) -> Scheme;

    /// The digest of this request.
    ///
    /// # Errors
    ///
    /// [`UndecodableBody`] refuses the request with 400 `idempotency_body_invalid`.
    fn fingerprint(&self, head: &Parts, body: &Bytes) -> Result<Fingerprint, UndecodableBody>;
}

/// The body is not what the scheme needs it to be. The reason is shown to the client, so it must
/// not quote the body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UndecodableBody(pub &'static str);

impl fmt::Display for UndecodableBody {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

impl std::error::Error for UndecodableBody {}

/// The default scheme: SHA-256 over method, path and query, Content-Type essence, Content-Encoding
/// and the body's bytes, each preceded by its length so that no two requests run together.
///
/// The path is the one the client sent, also inside nested routers. The order of query parameters
/// counts. No other header does: dates, trace ids and credentials change between attempts.
///
/// Bytes are bytes: JSON that is written anew with its members in another order is another request
/// ([`CanonicalJson`] does not mind), and so is a form with a fresh boundary (`MultipartParts`, with the
/// feature `multipart`, does not).
#[derive(Debug, Clone, Copy, Default)]
pub struct ExactRequest;

impl FingerprintScheme for ExactRequest {
    fn name(&self) -> Scheme {
        Scheme::Borrowed("exact-v1")
    }

    fn fingerprint(&self, head: &Parts, body: &Bytes) -> Result<Fingerprint, UndecodableBody> {
        let mut framed = head_of(head);
        framed.length(body.len());
        let digest = Sha256::new().chain_update(framed.0).chain_update(body);
        Ok(Fingerprint::from_bytes(digest.finalize().into()))
    }
}

/// The key alone names the action: whatever else the request says, it is the same one.
///
/// For those that never reuse a key for something else. Anywhere else it hides the mistake of a key used twice,
/// and also that of one key sent to two routes: the second gets the first one's answer and does not run.
/// [`Endpoint`] refuses that.
#[derive(Debug, Clone, Copy, Default)]
pub struct KeyOnly;

impl FingerprintScheme for KeyOnly {
    fn name(&self) -> Scheme {
        Scheme::Borrowed("key-only-v1")
    }

    fn fingerprint(&self, _: &Parts, _: &Bytes) -> Result<Fingerprint, UndecodableBody> {
        Ok(Fingerprint::from_bytes([0; 32]))
    }
}

/// The key names the action, at one endpoint: SHA-256 over method and path, each preceded by its length. Neither
/// query nor body counts, nor any header.
///
/// For senders of [events](crate::webhooks), who sign each delivery anew and may write its body, or a token in
/// its query, anew. A key that was used at one route and comes to another is refused as
/// [reused](crate::Rejection::KeyReused), and not taken for done. Where both are to run, put the route into the
/// [`scope`](crate::IdempotencyLayer::scope). The path is the one the client sent, also inside nested routers: one that
/// holds something which changes between deliveries needs [`KeyOnly`].
///
/// ```
/// use axum::http::Request;
/// use bytes::Bytes;
/// use tower_idempotency::{Endpoint, FingerprintScheme};
///
/// let digest = |uri: &str, body: &'static [u8]| {
///     let (head, body) = Request::post(uri).body(Bytes::from(body)).unwrap().into_parts();
///     Endpoint.fingerprint(&head, &body).unwrap()
/// };
/// assert_eq!(digest("/webhooks?token=1", b"{\"sent\":1}"), digest("/webhooks?token=2", b"{\"sent\":2}"));
/// assert_ne!(digest("/webhooks", b"{}"), digest("/refunds", b"{}"));
/// ```
#[derive(Debug, Clone, Copy, Default)]
pub struct Endpoint;

impl FingerprintScheme for Endpoint {
    fn name(&self) -> Scheme {
        Scheme::Borrowed("endpoint-v1")
    }

    fn fingerprint(&self, head: &Parts, _: &Bytes) -> Result<Fingerprint, UndecodableBody> {
        let mut framed = Framed(Vec::with_capacity(128));
        framed.part(head.method.as_str().as_bytes());
        framed.part(original_uri(head).path().as_bytes());
        Ok(Fingerprint::from_bytes(Sha256::digest(framed.0).into()))
    }
}

/// What counts of a request's head in the schemes that look at its body: method, path and query,
/// Content-Type essence, Content-Encoding.
fn head_of(head: &Parts) -> Framed {
    let uri = original_uri(head);
    let mut framed = Framed(Vec::with_capacity(256));
    framed.part(head.method.as_str().as_bytes());
    framed.part(uri.path().as_bytes());
    match uri.query() {
        Some(query) => framed.part(query.as_bytes()),
        None => framed.absent(),
    }
    framed.field(&head.headers, &header::CONTENT_TYPE, essence);
    framed.field(&head.headers, &header::CONTENT_ENCODING, <[u8]>::trim_ascii);
    framed
}

/// The URI as the client sent it: nested routers rewrite the request's own.
pub(crate) fn original_uri(head: &Parts) -> &Uri {
    match head.extensions.get::<axum::extract::OriginalUri>() {
        Some(original) => &original.0,
        None => &head.uri,
    }
}

/// Media type without parameters (RFC 9110 §8.3.1).
fn essence(value: &[u8]) -> &[u8] {
    let end = value.iter().position(|byte| *byte == b';');
    value[..end.unwrap_or(value.len())].trim_ascii()
}

/// Parts that each tell their length first. Gathered before they are hashed: many small updates
/// cost more than one.
struct Framed(Vec<u8>);

impl Framed {
    fn length(&mut self, bytes: usize) {
        self.0.extend((bytes as u64).to_be_bytes());
    }

    fn part(&mut self, bytes: &[u8]) {
        self.length(bytes.len());
        self.0.extend_from_slice(bytes);
    }

    /// A length no part can have, so that absent and empty differ.
    fn absent(&mut self) {
        self.0.extend(u64::MAX.to_be_bytes());
    }

    /// Every line of a field, in lower case, since media types and codings ignore case.
    fn field(&mut self, headers: &HeaderMap, name: &HeaderName, cut: fn(&[u8]) -> &[u8]) {
        for value in headers.get_all(name) {
            let from = self.0.len() + size_of::<u64>();
            self.part(cut(value.as_bytes()));
            self.0[from..].make_ascii_lowercase();
        }
        self.absent();
    }
}

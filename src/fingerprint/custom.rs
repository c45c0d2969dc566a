//! A scheme of the service's own, made of a function.

use std::fmt;

use bytes::Bytes;
use http::request::Parts;

use super::{FingerprintScheme, UndecodableBody};
use crate::record::{Fingerprint, Scheme};

/// A scheme made of a function. Made by [`fingerprint_fn`].
#[derive(Clone)]
pub struct FingerprintFn<F> {
    name: Scheme,
    function: F,
}

/// A scheme made of a function, for when the service itself knows what makes two requests one.
///
/// The function is given the request's head and its whole body, before the handler is. It must give
/// one digest for one request, in every process and on every day: no random seed, no clock, no hash of
/// the standard library. [`Fingerprint::of`] makes a digest of parts.
///
/// Nothing counts but what the function takes in: leave out the path, and one key answers for two
/// routes. In a nested router `head.uri` is what is left of it, and the whole is axum's `OriginalUri` in
/// `head.extensions`. The example takes in method, path, media type and lines.
///
/// `name` is stored with each digest. When the function changes, change the name, and keep the old one
/// registered with [`also_accept`](crate::IdempotencyLayer::also_accept) while its records live. Put your
/// service's name in it and a version, as in `"invoices-v1"`: `exact-v1`, `json-v1`, `multipart-v1`,
/// `endpoint-v1` and `key-only-v1` are taken.
///
/// # Errors
///
/// Where the function answers [`UndecodableBody`] the request is refused with 400
/// `idempotency_body_invalid`, and the client is shown the reason.
///
/// # Panics
///
/// Not here: a name of more than 64 bytes panics when the scheme is given to a layer. A panic of the
/// function is one of the request that it was called for, which claims nothing.
///
/// ```
/// use axum::http::{Request, header};
/// use bytes::Bytes;
/// use tower_idempotency::{
///     Fingerprint, FingerprintScheme, IdempotencyLayer, MemoryStore, UndecodableBody, fingerprint_fn,
/// };
///
/// // One line per invoice. Their order does not matter to this service.
/// let invoices = fingerprint_fn("invoices-v1", |head, body: &Bytes| {
///     let body = str::from_utf8(body).map_err(|_| UndecodableBody("it is not UTF-8"))?;
///     let mut invoices: Vec<&str> = body.lines().collect();
///     invoices.sort_unstable();
///     let media_type = head.headers.get(header::CONTENT_TYPE);
///     let head = [
///         head.method.as_str(),
///         head.uri.path(),
///         media_type.and_then(|value| value.to_str().ok()).unwrap_or_default(),
///     ];
///     Ok(Fingerprint::of(head.into_iter().chain(invoices)))
/// });
///
/// let digest = |body: &'static [u8]| {
///     let (head, body) = Request::post("/batches").body(Bytes::from(body)).unwrap().into_parts();
///     invoices.fingerprint(&head, &body)
/// };
/// assert_eq!(digest(b"A 100\nB 200\n"), digest(b"B 200\nA 100\n"));
/// assert_ne!(digest(b"A 100\nB 200\n"), digest(b"A 200\nB 100\n"));
/// assert_eq!(digest(b"\xff"), Err(UndecodableBody("it is not UTF-8")));
///
/// let layer = IdempotencyLayer::new(MemoryStore::new()).fingerprint(invoices);
/// ```
pub fn fingerprint_fn<F>(name: impl Into<Scheme>, function: F) -> FingerprintFn<F>
where
    F: Fn(&Parts, &Bytes) -> Result<Fingerprint, UndecodableBody> + Send + Sync + 'static,
{
    FingerprintFn {
        name: name.into(),
        function,
    }
}

impl<F> FingerprintScheme for FingerprintFn<F>
where
    F: Fn(&Parts, &Bytes) -> Result<Fingerprint, UndecodableBody> + Send + Sync + 'static,
{
    fn name(&self) -> Scheme {
        self.name.clone()
    }

    fn fingerprint(&self, head: &Parts, body: &Bytes) -> Result<Fingerprint, UndecodableBody> {
        (self.function)(head, body)
    }
}

impl<F> fmt::Debug for FingerprintFn<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FingerprintFn")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

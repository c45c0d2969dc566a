//! A form by its parts, whatever stands between them.

use std::convert::Infallible;

use bytes::Bytes;
use futures_util::{FutureExt, stream};
use http::{HeaderMap, header, request::Parts};
use multer::Multipart;
use sha2::{Digest, Sha256};

use super::{FingerprintScheme, Framed, UndecodableBody, essence, head_of};
use crate::record::{Fingerprint, Scheme};

/// Between head and body, so that a form and any other body never meet in one digest.
const FORM: &[u8] = b"multipart-v1 parts";
const RAW: &[u8] = b"multipart-v1 raw";

const NO_BOUNDARY: UndecodableBody =
    UndecodableBody("its Content-Type, multipart/form-data, names no readable boundary");
const BROKEN: UndecodableBody = UndecodableBody(
    "the form is cut short or malformed, or its boundary is not the one its Content-Type names",
);
const BAD_HEADERS: UndecodableBody =
    UndecodableBody("the headers of one of the form's parts are malformed or too many");
const NO_DISPOSITION: UndecodableBody =
    UndecodableBody("one of the form's parts has no Content-Disposition header");

/// A form by its parts: a client that draws a fresh boundary for every attempt still sends the same
/// request. Under [`ExactRequest`](crate::ExactRequest) its retries are refused as reuse of the key.
/// Named `multipart-v1`.
///
/// Of a `multipart/form-data` body (RFC 7578) this counts, beside method, path, query, media type and
/// coding as in [`ExactRequest`](crate::ExactRequest):
///
/// - the parts, their number and their order;
/// - of each part its bytes, and its headers but for `Content-Length`: their values as they are
///   written, in any order and under names in any case. So field name, file name and media type count
///   as the client spelled them, and `name=a` is not `name="a"`.
///
/// The boundary does not count, nor what comes before the first part and after the last. The form is
/// read as axum's `Multipart` extractor reads it, so what counts is what such a handler sees: of a
/// header given twice in one part, the last.
///
/// A form that cannot be read is refused with 400 `idempotency_body_invalid`: one without a boundary,
/// cut short, with malformed headers or more than 32 of them in a part, or with a part that has no
/// `Content-Disposition` (RFC 7578 §4.2). A form without parts is one of its own.
///
/// Every other body counts byte by byte: other media types, other kinds of `multipart` included, and a
/// form under a `Content-Encoding` other than `identity`; put what decodes it outside this layer.
///
/// While it is read a form takes up to twice its size in memory once more. A form of large parts takes
/// about three times as long as under [`ExactRequest`](crate::ExactRequest). One of the smallest parts takes
/// some 25 ms a mebibyte, little more than in the handler's own extractor: see
/// [`request_body_limit`](crate::IdempotencyLayer::request_body_limit).
///
/// ```
/// use axum::http::Request;
/// use tower_idempotency::{FingerprintScheme, MultipartParts};
///
/// let digest = |boundary: &str, amount: u32| {
///     let body = format!(
///         "--{boundary}\r\nContent-Disposition: form-data; name=\"amount\"\r\n\r\n{amount}\r\n--{boundary}--\r\n"
///     );
///     let request = Request::post("/charges")
///         .header("content-type", format!("multipart/form-data; boundary={boundary}"));
///     let (head, body) = request.body(body.into()).unwrap().into_parts();
///     MultipartParts::new().fingerprint(&head, &body).unwrap()
/// };
/// assert_eq!(digest("first-try", 100), digest("second-try", 100));
/// assert_ne!(digest("first-try", 100), digest("first-try", 900));
/// ```
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct MultipartParts;

impl MultipartParts {
    /// The scheme.
    pub fn new() -> Self {
        Self
    }
}

impl FingerprintScheme for MultipartParts {
    fn name(&self) -> Scheme {
        Scheme::Borrowed("multipart-v1")
    }

    fn fingerprint(&self, head: &Parts, body: &Bytes) -> Result<Fingerprint, UndecodableBody> {
        let mut framed = head_of(head);
        if !is_form(&head.headers) {
            framed.part(RAW);
            framed.length(body.len());
            let digest = Sha256::new().chain_update(framed.0).chain_update(body);
            return Ok(Fingerprint::from_bytes(digest.finalize().into()));
        }
        framed.part(FORM);
        let all_of_it = stream::iter([Ok::<_, Infallible>(body.clone())]);
        let form = Multipart::new(all_of_it, boundary(&head.headers)?);
        // All bytes are at hand, so nothing is ever waited for.
        digest_of_parts(framed, form)
            .now_or_never()
            .unwrap_or(Err(BROKEN))
    }
}

/// Whether the body is a form that can be read as it is. Of several Content-Types the first decides, as
/// it does for the extractor.
fn is_form(headers: &HeaderMap) -> bool {
    let media_type = headers.get(header::CONTENT_TYPE);
    let media_type = media_type.map(|value| essence(value.as_bytes()));
    let is_form = |essence: &[u8]| essence.eq_ignore_ascii_case(b"multipart/form-data");
    let is_plain = |coding: &[u8]| coding.is_empty() || coding.eq_ignore_ascii_case(b"identity");
    let mut codings = headers.get_all(header::CONTENT_ENCODING).iter();
    media_type.is_some_and(is_form) && codings.all(|value| is_plain(value.as_bytes().trim_ascii()))
}

/// Never empty (RFC 2046 §5.1.1): every line that begins with two hyphens would be one.
fn boundary(headers: &HeaderMap) -> Result<String, UndecodableBody> {
    headers
        .get(header::CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
        .and_then(|media_type| multer::parse_boundary(media_type).ok())
        .filter(|boundary| !boundary.is_empty())
        .ok_or(NO_BOUNDARY)
}

/// Goes on from `framed` with one part after another. Each is framed as the number of its headers, these,
/// and its bytes; the end is a number that no part can have.
async fn digest_of_parts(
    mut framed: Framed,
    mut form: Multipart<'_>,
) -> Result<Fingerprint, UndecodableBody> {
    let mut digest = Sha256::new();
    while let Some(part) = form.next_field().await.map_err(why)? {
        // Without headers the parser takes the part's bytes for them, and part of the next for its own.
        if !part.headers().contains_key(header::CONTENT_DISPOSITION) {
            return Err(NO_DISPOSITION);
        }
        framed.headers(part.headers());
        let content = part.bytes().await.map_err(why)?;
        framed.length(content.len());
        digest.update(&framed.0);
        digest.update(&content);
        framed.0.clear();
    }
    framed.absent();
    digest.update(&framed.0);
    Ok(Fingerprint::from_bytes(digest.finalize().into()))
}

impl Framed {
    /// A part's headers by name. Its length is left out: it is that of the bytes.
    fn headers(&mut self, headers: &HeaderMap) {
        let counts = |(name, _): &(&header::HeaderName, _)| **name != header::CONTENT_LENGTH;
        let mut headers: Vec<_> = headers.iter().filter(counts).collect();
        headers.sort_unstable_by_key(|(name, _)| name.as_str());
        self.length(headers.len());
        for (name, value) in headers {
            self.part(name.as_str().as_bytes());
            self.part(value.as_bytes());
        }
    }
}

/// What the parser refused, in words of ours: its own may quote the body.
fn why(error: multer::Error) -> UndecodableBody {
    match error {
        multer::Error::ReadHeaderFailed(_)
        | multer::Error::DecodeHeaderName { .. }
        | multer::Error::DecodeHeaderValue { .. }
        | multer::Error::IncompleteHeaders => BAD_HEADERS,
        _ => BROKEN,
    }
}

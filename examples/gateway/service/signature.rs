//! What a merchant's signature is over.
//!
//! Signature and nonce are optional here, so that the demonstration can be tried with curl. That way they protect
//! nobody: who can change a request on its way can take them off as well, and it passes unsigned. Where they are to
//! protect, a request without them must be refused.

use axum::http::{HeaderMap, request::Parts};
use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

pub const SIGNATURE: &str = "pg-signature";
pub const NONCE: &str = "pg-nonce";
const KEY: &str = "idempotency-key";

/// Whether the signature of this request, 64 digits out of `0-9a-f`, is the HMAC-SHA256 of [`text`].
pub fn is_valid(signature: &[u8], secret: &[u8], head: &Parts, body: &[u8]) -> bool {
    let Some(signature) = decode(signature) else {
        return false;
    };
    // Any length of secret will do.
    let Ok(mut mac) = Hmac::<Sha256>::new_from_slice(secret) else {
        return false;
    };
    mac.update(&text(head, body));
    // Takes as long for a signature that is nearly right.
    mac.verify_slice(&signature).is_ok()
}

/// Five lines: method, path with query, idempotency key, nonce, and the SHA-256 of the body in hexadecimal. What
/// is absent is an empty line. The key is in it, so that a signed request whose key was changed on its way is
/// refused, and does not run as another action; the nonce, so that a signed attempt that has one passes only once.
///
/// Content-Type is not among it. Who changes it can have the same bytes read as something else: a slip's JSON as a
/// form, say. That is refused wherever the bytes do not fit, but by their reader and not by the signature.
fn text(head: &Parts, body: &[u8]) -> Vec<u8> {
    let path = head.uri.path_and_query().map_or("/", |path| path.as_str());
    let body: String = Sha256::digest(body)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    [
        head.method.as_str().as_bytes(),
        path.as_bytes(),
        &lines(&head.headers, KEY),
        &lines(&head.headers, NONCE),
        body.as_bytes(),
    ]
    .join(&b"\n"[..])
}

/// All lines of a header as one (RFC 9110 §5.3).
pub fn lines(headers: &HeaderMap, name: &str) -> Vec<u8> {
    let lines = headers.get_all(name).iter();
    let lines: Vec<_> = lines.map(|line| line.as_bytes()).collect();
    lines.join(&b", "[..])
}

/// Only lower case: a signature has one spelling.
fn decode(hex: &[u8]) -> Option<[u8; 32]> {
    let digit = |digit: u8| match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    };
    let mut decoded = [0; 32];
    if hex.len() != 2 * decoded.len() {
        return None;
    }
    for (byte, pair) in decoded.iter_mut().zip(hex.chunks_exact(2)) {
        *byte = digit(pair[0])? << 4 | digit(pair[1])?;
    }
    Some(decoded)
}

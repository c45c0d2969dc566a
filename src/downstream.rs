//! Keys for the calls a handler makes in turn, such as to a payment provider.

use std::{fmt, str::FromStr};

use axum::{body::Body, response::IntoResponse};
use hmac::{Hmac, KeyInit, Mac};
use http::{HeaderName, HeaderValue, Request, Response, StatusCode};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};
use sha2::Sha256;

use crate::{Retain, record::RecordId};

/// A secret shorter than this could be guessed.
const MIN_SECRET_LEN: usize = 16;

/// No key of a service that is known is longer.
const MAX_KEY_LEN: usize = 64;

/// What downstream keys are made with, in a form that shows nothing of it.
#[derive(Clone)]
pub(crate) struct DownstreamSecret(Hmac<Sha256>);

impl DownstreamSecret {
    /// # Panics
    ///
    /// When the secret is too short.
    pub(crate) fn new(secret: &[u8]) -> Self {
        assert!(
            secret.len() >= MIN_SECRET_LEN,
            "downstream_secret must have at least {MIN_SECRET_LEN} bytes"
        );
        let keyed = Hmac::new_from_slice(secret).expect("HMAC takes a key of any length");
        Self(keyed)
    }

    /// The key of this step under this record, by the name the store knows it by: where names are hashed,
    /// nobody but the client's request knows another.
    ///
    /// A change here is a second charge somewhere.
    pub(crate) fn key(&self, stored: &RecordId, step: &str) -> DownstreamKey {
        let mut mac = self.0.clone();
        let parts = [
            b"tower-idempotency downstream key 1",
            stored.scope.as_bytes(),
            stored.key.as_bytes(),
            step.as_bytes(),
        ];
        for part in parts {
            mac.update(&(part.len() as u64).to_be_bytes());
            mac.update(part);
        }
        let digest = mac.finalize().into_bytes();
        // Half of it is as much as a random UUID has.
        let text = digest[..16].iter().fold(String::new(), |mut text, byte| {
            use fmt::Write;
            // A string takes whatever is written.
            let _ = write!(text, "{byte:02x}");
            text
        });
        DownstreamKey(text)
    }
}

impl fmt::Debug for DownstreamSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DownstreamSecret")
    }
}

/// An idempotency key for a call that a handler makes: 32 hexadecimal digits, in lower case, when made by
/// [`Idempotency::downstream_key`](crate::Idempotency::downstream_key) and
/// [`Abandoned::downstream_key`](crate::Abandoned::downstream_key).
///
/// It may be shown to the service it is for, and be saved in a [checkpoint](crate::Idempotency::checkpoint),
/// where it outlives a change of the secret. `Debug` does not show it, `Display` does.
///
/// One that was made elsewhere, or read from where it was saved, is any text of 1 to 64 visible ASCII characters:
///
/// ```
/// # use tower_idempotency::DownstreamKey;
/// let key: DownstreamKey = "5f0c6a1be7d24f4b9a1c3e5d7f901234".parse()?;
/// let saved = serde_json::to_string(&key).unwrap();
/// assert_eq!(serde_json::from_str::<DownstreamKey>(&saved).unwrap(), key);
/// assert!("two words".parse::<DownstreamKey>().is_err());
/// # Ok::<(), tower_idempotency::InvalidDownstreamKey>(())
/// ```
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct DownstreamKey(String);

impl DownstreamKey {
    /// The key as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Sets it as the `Idempotency-Key` of an outgoing request, in the place of any other.
    ///
    /// As it is, without the quotes of an RFC 9651 string, which most services take.
    pub fn set_on<B>(&self, request: &mut Request<B>) {
        self.set_as(HeaderName::from_static("idempotency-key"), request);
    }

    /// The same in a field of another name.
    pub fn set_as<B>(&self, name: HeaderName, request: &mut Request<B>) {
        let value = HeaderValue::from_str(&self.0);
        let mut value = value.expect("visible ASCII is a field value");
        value.set_sensitive(true);
        request.headers_mut().insert(name, value);
    }
}

impl fmt::Debug for DownstreamKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DownstreamKey(…)")
    }
}

impl fmt::Display for DownstreamKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl TryFrom<String> for DownstreamKey {
    type Error = InvalidDownstreamKey;

    fn try_from(text: String) -> Result<Self, InvalidDownstreamKey> {
        let is_visible = text.bytes().all(|byte| byte.is_ascii_graphic());
        match (1..=MAX_KEY_LEN).contains(&text.len()) && is_visible {
            true => Ok(Self(text)),
            false => Err(InvalidDownstreamKey(())),
        }
    }
}

impl FromStr for DownstreamKey {
    type Err = InvalidDownstreamKey;

    fn from_str(text: &str) -> Result<Self, InvalidDownstreamKey> {
        Self::try_from(text.to_owned())
    }
}

impl Serialize for DownstreamKey {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for DownstreamKey {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Self::try_from(text).map_err(D::Error::custom)
    }
}

/// The text is no [`DownstreamKey`]: it is empty, longer than 64 bytes, or not visible ASCII.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InvalidDownstreamKey(());

impl fmt::Display for InvalidDownstreamKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a downstream key is 1 to 64 visible ASCII characters")
    }
}

impl std::error::Error for InvalidDownstreamKey {}

/// There is no [`downstream_secret`](crate::IdempotencyLayer::downstream_secret). As a response: 500. Nothing is
/// kept, and the key is left to [`Recovery`](crate::Recovery).
#[derive(Debug, Clone, Copy)]
pub struct NoDownstreamSecret(());

impl NoDownstreamSecret {
    pub(crate) const NEW: Self = Self(());
}

impl fmt::Display for NoDownstreamSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a downstream key needs a secret; set IdempotencyLayer::downstream_secret")
    }
}

impl std::error::Error for NoDownstreamSecret {}

impl IntoResponse for NoDownstreamSecret {
    fn into_response(self) -> Response<Body> {
        let mut response = (StatusCode::INTERNAL_SERVER_ERROR, self.to_string()).into_response();
        response.extensions_mut().insert(Retain::Abandon);
        response
    }
}

//! Where the key of an operation comes from, and how it is written.

use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderName, HeaderValue, request::Parts};
use uuid::Uuid;

use super::NotSent;
use crate::{IdempotencyKey, InvalidKey, KeyFormat, options::KEY_HEADER};

type Derive = dyn Fn(&Parts, &Bytes) -> Option<IdempotencyKey> + Send + Sync;

/// The key is chosen once per operation; all attempts have the same.
#[derive(Clone)]
pub(super) struct KeySource {
    pub(super) header_name: HeaderName,
    pub(super) is_quoted: bool,
    pub(super) derive: Option<Arc<Derive>>,
}

impl Default for KeySource {
    fn default() -> Self {
        Self {
            header_name: KEY_HEADER,
            is_quoted: false,
            derive: None,
        }
    }
}

impl KeySource {
    /// The key of this request: what it brings itself goes before what is made here.
    pub(super) fn choose(&self, head: &Parts, body: &Bytes) -> Result<IdempotencyKey, NotSent> {
        if let Some(given) = KeyFormat::any().read(&head.headers, &self.header_name) {
            return given.map_err(not_readable);
        }
        if let Some(given) = head.extensions.get::<IdempotencyKey>() {
            return Ok(given.clone());
        }
        let derived = self.derive.as_ref().and_then(|derive| derive(head, body));
        Ok(derived.unwrap_or_else(fresh))
    }

    /// The key's field value. What a server would not read as this very key is not written.
    pub(super) fn write(&self, key: &IdempotencyKey) -> Result<HeaderValue, NotSent> {
        let written = match self.is_quoted {
            true => quote(key.as_bytes()),
            false => Some(key.as_bytes().to_vec()),
        };
        let written = written.ok_or_else(|| not_writable(InvalidKey::Characters))?;
        let value = HeaderValue::from_bytes(&written);
        let value = value.map_err(|_| not_writable(InvalidKey::Characters))?;
        match KeyFormat::any().parse(value.as_bytes()) {
            Ok(read) if read == *key => {}
            // Read as a string, or without its blanks.
            Ok(_) => return Err(not_writable(InvalidKey::Characters)),
            Err(why) => return Err(not_writable(why)),
        }
        Ok(value)
    }
}

fn not_readable(why: InvalidKey) -> NotSent {
    NotSent::new("the idempotency key in the request's header cannot be used").with_source(why)
}

fn not_writable(why: InvalidKey) -> NotSent {
    NotSent::new("the idempotency key cannot be written into a header").with_source(why)
}

/// An RFC 9651 string.
fn quote(key: &[u8]) -> Option<Vec<u8>> {
    let text = sfv::StringRef::from_bytes(key).ok()?;
    Some(
        sfv::ItemSerializer::new()
            .bare_item(text)
            .finish()
            .into_bytes(),
    )
}

pub(super) fn fresh() -> IdempotencyKey {
    let mut buffer = Uuid::encode_buffer();
    IdempotencyKey::new(
        Uuid::new_v4()
            .hyphenated()
            .encode_lower(&mut buffer)
            .as_bytes(),
    )
}

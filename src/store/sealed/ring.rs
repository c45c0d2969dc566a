//! Sealing and opening.

use std::fmt;

use bytes::Bytes;
use chacha20poly1305::{AeadInOut, KeyInit, XChaCha20Poly1305, aead::inout::InOutBuf};
use rand::Rng;

use super::{
    keys::{SealingKey, SealingKeys},
    names::{Names, prefixed},
};
use crate::{
    checkpoint::PLAIN,
    record::RecordId,
    retained::{self, DecodeError},
    store::sealed_form::{SEALED, Sealed, Unopened, key_id},
};

/// What a sealed value is; authenticated with it.
#[derive(Clone, Copy)]
pub(crate) enum Purpose<'a> {
    Response,
    /// The checkpoint of this name.
    Checkpoint(&'a str),
    /// What an outbox keeps of an operation. Where it goes to stands beside it, and is not to be changed there.
    #[cfg(all(feature = "client", any(feature = "sqlite", feature = "postgres")))]
    Outbox {
        domain: &'static str,
        method: &'a str,
        uri: &'a str,
    },
}

/// The keys, ready for use.
pub(crate) struct Ring {
    writes: Key,
    opens: Vec<Key>,
    pub(crate) opens_plain: bool,
    pub(super) names: Names,
}

struct Key {
    id: Box<str>,
    cipher: XChaCha20Poly1305,
}

impl Ring {
    pub(crate) fn new(keys: SealingKeys) -> Self {
        let key = |(id, key): (Box<str>, SealingKey)| {
            let cipher = XChaCha20Poly1305::new(key.as_bytes().into());
            Key { id, cipher }
        };
        Self {
            writes: key(keys.writes),
            opens: keys.opens.into_iter().map(key).collect(),
            opens_plain: keys.opens_plain,
            names: Names::new(keys.hashes.as_ref()),
        }
    }

    /// The sealed form, under the record of this stored name. `None` for more than the cipher can take,
    /// which is 256 GiB.
    pub(crate) fn seal(
        &self,
        stored: &RecordId,
        purpose: Purpose<'_>,
        plain: &[u8],
    ) -> Option<Bytes> {
        let Key { id, cipher } = &self.writes;
        // Random nonces of 24 bytes never meet, however much one key seals.
        let mut nonce = [0; 24];
        rand::rng().fill_bytes(&mut nonce);
        let mut out = Vec::with_capacity(2 + id.len() + nonce.len() + plain.len() + 16);
        // An id has at most 64 bytes.
        out.extend([SEALED, id.len() as u8]);
        out.extend(id.as_bytes());
        out.extend(nonce);
        let head = out.len();
        out.extend(plain);
        let bound = bound_to(id, stored, purpose);
        let text = InOutBuf::from(&mut out[head..]);
        let tag = cipher.encrypt_inout_detached(&nonce.into(), &bound, text);
        out.extend(tag.ok()?);
        Some(out.into())
    }

    pub(crate) fn open(
        &self,
        stored: &RecordId,
        purpose: Purpose<'_>,
        value: &[u8],
    ) -> Result<Bytes, Unopened> {
        let sealed = Sealed::parse(value).ok_or(Unopened::NotSealed)?;
        let mut keys = self.opens.iter().chain([&self.writes]);
        let key = keys.find(|key| *key.id == *sealed.key_id);
        let key = key.ok_or(Unopened::NoSuchKey)?;
        let mut plain = sealed.ciphertext.to_vec();
        let bound = bound_to(&key.id, stored, purpose);
        let (nonce, tag) = (sealed.nonce.into(), sealed.tag.into());
        let text = InOutBuf::from(&mut plain[..]);
        let opened = key.cipher.decrypt_inout_detached(nonce, &bound, text, tag);
        opened.map_err(|_| Unopened::DoesNotOpen)?;
        Ok(plain.into())
    }

    /// The response, or bytes that nobody can take for one.
    pub(super) fn open_response(&self, stored: &RecordId, response: Bytes) -> Bytes {
        match self.open(stored, Purpose::Response, &response) {
            Ok(plain) => plain,
            // What only begins like a sealed one is damaged, and is seen to be.
            Err(Unopened::NotSealed) if self.opens_plain || response.first() == Some(&SEALED) => {
                response
            }
            Err(why) => why.mark(&response),
        }
    }

    /// Whoever saved it through this store gets the same bytes back, whatever they are. What was not sealed
    /// passes only when it says that it is plain: a sealed value that was cut or changed never does.
    pub(super) fn open_checkpoint(
        &self,
        stored: &RecordId,
        name: &str,
        value: Bytes,
    ) -> Result<Bytes, DecodeError> {
        match self.open(stored, Purpose::Checkpoint(name), &value) {
            Ok(plain) => Ok(plain),
            Err(Unopened::NotSealed) => match value.first() {
                // What only begins like a sealed one is damaged.
                Some(&SEALED) => Err(DecodeError::Damaged),
                _ if !self.opens_plain => Err(DecodeError::NotSealed),
                Some(&PLAIN) => Ok(value),
                Some(&unknown) => Err(DecodeError::Version(unknown)),
                None => Err(DecodeError::Damaged),
            },
            Err(why) => Err(retained::unopened(why, key_id(&value))),
        }
    }
}

/// What is authenticated with a value: moved to another record, or another name, it does not open.
fn bound_to(key_id: &str, stored: &RecordId, purpose: Purpose<'_>) -> Vec<u8> {
    let (domain, names) = match purpose {
        Purpose::Response => ("tower-idempotency sealed response 2", [None, None]),
        Purpose::Checkpoint(name) => (
            "tower-idempotency sealed checkpoint 2",
            [Some(name.as_bytes()), None],
        ),
        #[cfg(all(feature = "client", any(feature = "sqlite", feature = "postgres")))]
        Purpose::Outbox {
            domain,
            method,
            uri,
        } => (domain, [Some(method.as_bytes()), Some(uri.as_bytes())]),
    };
    let parts = [
        domain.as_bytes(),
        key_id.as_bytes(),
        stored.scope.as_bytes(),
        stored.key.as_bytes(),
    ];
    let mut bound = Vec::with_capacity(256);
    prefixed(parts.iter().chain(names.iter().flatten()), |bytes| {
        bound.extend(bytes)
    });
    bound
}

impl fmt::Debug for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let opens: Vec<_> = self.opens.iter().map(|key| &key.id).collect();
        f.debug_struct("Keys")
            .field("writes", &self.writes.id)
            .field("also_opens", &opens)
            .field("also_opens_plain", &self.opens_plain)
            .field("hash_ids", &self.names.hashes())
            .finish()
    }
}

//! How request and result lie in a row: plain or sealed, told by the first byte.

use std::fmt;
#[cfg(feature = "sealing")]
use std::sync::Arc;

use bytes::Bytes;
use http::{Response, StatusCode};

use super::{Operation, OutboxError, OutboxErrorKind, database::Row};
#[cfg(feature = "sealing")]
use crate::{
    IdempotencyKey, Scope, SealingKeys,
    record::RecordId,
    store::{
        sealed::{Purpose, Ring},
        sealed_form::Unopened,
    },
};
use crate::{
    RetainedResponse,
    retained::{MAX_FIELDS, SkippedHeaders, encode},
    store::sealed_form,
};

/// The largest body of an answer that is kept, 1 MiB. Of a larger one the status is kept.
pub(in crate::client) const MAX_RESULT_LEN: usize = 1024 * 1024;

/// Writes and reads what an outbox keeps.
#[derive(Clone, Default)]
pub(super) struct Form {
    #[cfg(feature = "sealing")]
    ring: Option<Arc<Ring>>,
}

/// What a value belongs to. Sealed, it opens nowhere else.
#[derive(Clone, Copy)]
#[cfg_attr(
    not(feature = "sealing"),
    expect(dead_code, reason = "nothing is bound that is not sealed")
)]
pub(super) struct Place<'a> {
    pub(super) reference: &'a str,
    pub(super) key: &'a [u8],
    pub(super) method: &'a str,
    pub(super) uri: &'a str,
}

impl<'a> Place<'a> {
    pub(super) fn of(row: &'a Row) -> Self {
        Self {
            reference: &row.reference.shown,
            key: &row.key,
            method: &row.method.shown,
            uri: &row.uri.shown,
        }
    }
}

#[derive(Clone, Copy)]
enum Part {
    Request,
    Result,
}

impl Form {
    #[cfg(feature = "sealing")]
    pub(super) fn sealed(keys: SealingKeys) -> Self {
        Self {
            ring: Some(Arc::new(Ring::new(keys))),
        }
    }

    /// Headers and body, in the form a kept response has; its status says nothing here.
    pub(super) fn write_request(&self, place: Place<'_>, operation: &Operation) -> Vec<u8> {
        let (headers, body) = (&operation.headers, &operation.body);
        let plain = encode(StatusCode::OK, headers, body, |_| true);
        self.write(place, Part::Request, plain)
    }

    pub(super) fn read_request(
        &self,
        place: Place<'_>,
        stored: &Bytes,
    ) -> Result<RetainedResponse, OutboxError> {
        self.read(place, Part::Request, stored)
    }

    /// Everything but what was about the connection it came on. `None` for what is too large to be kept: its body,
    /// or the number of its header lines.
    pub(super) fn write_result(
        &self,
        place: Place<'_>,
        answer: &Response<Bytes>,
    ) -> Option<Vec<u8>> {
        if answer.body().len() > MAX_RESULT_LEN || answer.headers().len() > MAX_FIELDS {
            return None;
        }
        let (headers, skipped) = (answer.headers(), SkippedHeaders::only([]));
        let plain = encode(
            answer.status(),
            headers,
            answer.body(),
            skipped.keeps(headers),
        );
        Some(self.write(place, Part::Result, plain))
    }

    pub(super) fn read_result(
        &self,
        place: Place<'_>,
        stored: &Bytes,
    ) -> Result<RetainedResponse, OutboxError> {
        self.read(place, Part::Result, stored)
    }

    #[cfg_attr(
        not(feature = "sealing"),
        expect(unused_variables, reason = "nothing is sealed")
    )]
    fn write(&self, place: Place<'_>, part: Part, plain: Bytes) -> Vec<u8> {
        #[cfg(feature = "sealing")]
        if let Some(ring) = &self.ring {
            let sealed = ring.seal(&place.id(), place.purpose(part), &plain);
            // What is too large for the cipher, 256 GiB, is refused long before.
            return sealed.unwrap_or_default().into();
        }
        plain.into()
    }

    fn read(
        &self,
        place: Place<'_>,
        part: Part,
        stored: &Bytes,
    ) -> Result<RetainedResponse, OutboxError> {
        let plain = self.open(place, part, stored)?;
        RetainedResponse::decode(plain).map_err(|error| OutboxError::damaged().with_source(error))
    }

    #[cfg(feature = "sealing")]
    fn open(&self, place: Place<'_>, part: Part, stored: &Bytes) -> Result<Bytes, OutboxError> {
        let Some(ring) = &self.ring else {
            return plain(stored);
        };
        match ring.open(&place.id(), place.purpose(part), stored) {
            Ok(opened) => Ok(opened),
            // What only begins like a sealed one is damaged.
            Err(Unopened::NotSealed) if stored.first() == Some(&sealed_form::SEALED) => {
                Err(OutboxError::damaged())
            }
            Err(Unopened::NotSealed) if ring.opens_plain => plain(stored),
            Err(why) => Err(OutboxError::new(
                OutboxErrorKind::Keys,
                match why {
                    Unopened::NotSealed => {
                        "the operation is not sealed, and may have been written by anybody: if sealing was turned on while operations were pending, set SealingKeys::also_opens_plain until they are settled"
                    }
                    Unopened::NoSuchKey => {
                        "the operation is sealed with a key that the outbox does not have: add it with SealingKeys::also_opens"
                    }
                    Unopened::DoesNotOpen => {
                        "the operation does not open with the key of its id: give the outbox the key that had this id when it was sealed; if that is the one, the row was changed in the database"
                    }
                },
            )),
        }
    }

    #[cfg(not(feature = "sealing"))]
    fn open(&self, _: Place<'_>, _: Part, stored: &Bytes) -> Result<Bytes, OutboxError> {
        plain(stored)
    }
}

/// How everything begins that is sealed with the key of this id. `None` where no key can have it.
#[cfg(feature = "sealing")]
pub(super) fn sealed_prefix(key_id: &str) -> Option<Vec<u8>> {
    let len = u8::try_from(key_id.len()).ok()?;
    let mut prefix = vec![sealed_form::SEALED, len];
    prefix.extend_from_slice(key_id.as_bytes());
    Some(prefix)
}

/// What is sealed is not read without keys.
fn plain(stored: &Bytes) -> Result<Bytes, OutboxError> {
    match sealed_form::Sealed::parse(stored) {
        Some(_) => Err(OutboxError::new(
            OutboxErrorKind::Keys,
            "the operation is sealed: give the outbox its keys with `sealed` (feature `sealing`)",
        )),
        None => Ok(stored.clone()),
    }
}

#[cfg(feature = "sealing")]
impl<'a> Place<'a> {
    fn id(self) -> RecordId {
        RecordId::new(Scope::new(self.reference), IdempotencyKey::new(self.key))
    }

    fn purpose(self, part: Part) -> Purpose<'a> {
        Purpose::Outbox {
            domain: match part {
                Part::Request => "tower-idempotency sealed outbox request 1",
                Part::Result => "tower-idempotency sealed outbox result 1",
            },
            method: self.method,
            uri: self.uri,
        }
    }
}

impl fmt::Debug for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        #[cfg(feature = "sealing")]
        if let Some(ring) = &self.ring {
            return ring.fmt(f);
        }
        f.write_str("Plain")
    }
}

//! Keys, sealed stores, and records written behind their back.

use std::time::Duration;

use axum::{
    body::Body,
    http::{HeaderValue, Response},
};
use bytes::Bytes;
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use tower_idempotency::{
    DecodeError, IdempotencyKey, IdempotencyLayer, Record, RecordId, RetainedResponse, Scope,
    SealedStore, SealingKeys,
    store::{
        Checkpoints, Claim, ClaimRequest, Completion, Inspect, Lifetimes, Settled, StoreError,
        StoreErrorKind,
    },
};

use crate::support::{Handler, TestStore, World};

pub const NEW: [u8; 32] = [0x11; 32];
pub const OLD: [u8; 32] = [0x22; 32];
pub const NAMES: [u8; 32] = [0x33; 32];
pub const OTHER: [u8; 32] = [0x44; 32];

pub const SCOPE: &str = "sc0pe-s3cret-of-a-merchant";
pub const FIELD: &str = "f1eld-s3cret";
pub const BODY: &str = "b0dy-s3cret";

pub const UNAVAILABLE: &str = "idempotency_store_unavailable";
pub const REUSED: &str = "idempotency_key_reused";
pub const DAY: Duration = Duration::from_secs(24 * 3600);

pub type Sealed = SealedStore<TestStore>;

pub fn keys() -> SealingKeys {
    SealingKeys::new("2026-12", NEW)
}

pub fn hashing() -> SealingKeys {
    keys().hash_ids(NAMES)
}

/// Another instance on the same data.
pub async fn open(world: &World, keys: SealingKeys) -> Sealed {
    try_open(world, keys).await.unwrap()
}

pub async fn try_open(world: &World, keys: SealingKeys) -> Result<Sealed, StoreError> {
    SealedStore::open(world.open().await, keys).await
}

pub fn refused(opened: Result<Sealed, StoreError>) -> StoreError {
    let error = opened.expect_err("it was opened");
    assert_eq!(error.kind(), StoreErrorKind::Keys, "{error}");
    error
}

pub fn layer<S: Inspect + Checkpoints>(store: &S) -> IdempotencyLayer<S> {
    IdempotencyLayer::new(store.clone())
        .scope(|_| Some(Scope::new(SCOPE)))
        .store_timeout(Duration::from_secs(5))
}

pub fn id(key: &str) -> RecordId {
    RecordId::new(Scope::new(SCOPE), IdempotencyKey::new(key))
}

/// What the record of this key is called in the store below, where names are hashed. Live records depend on
/// it, so it is made here once more, from what the documentation says.
pub fn hashed(key: &str) -> RecordId {
    let digest = |parts: &[&[u8]]| {
        let mut hash = Hmac::<Sha256>::new_from_slice(&NAMES).unwrap();
        for part in parts {
            hash.update(&(part.len() as u64).to_be_bytes());
            hash.update(part);
        }
        hash.finalize().into_bytes()
    };
    let scope = digest(&[b"scope", SCOPE.as_bytes()]);
    let key = digest(&[b"key", SCOPE.as_bytes(), key.as_bytes()]);
    let hex: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
    RecordId::new(Scope::new(scope), IdempotencyKey::new(hex))
}

/// Answers with a body and a field that nobody may read in the database, and names its run.
pub fn secretive() -> Handler {
    Handler::answering(|seen| {
        Response::builder()
            .status(201)
            .header("x-field", HeaderValue::from_static(FIELD))
            .header("x-run", seen.run)
            .body(Body::from(BODY))
            .unwrap()
    })
}

/// The record as it is stored, under the name it has there.
pub async fn stored<S: Inspect + Checkpoints>(store: &S, id: &RecordId) -> Record {
    store.get(id).await.unwrap().expect("there is no record")
}

/// Puts this response where the record is, with all that the layer compares left as it was.
pub async fn plant<S: Inspect + Checkpoints>(store: &S, record: &Record, response: Bytes) {
    store.forget(&record.id).await.unwrap();
    let claim = ClaimRequest::new(record.id.clone(), record.scheme.clone(), record.fingerprint);
    let Claim::Won(ticket) = store.claim(claim).await.unwrap() else {
        panic!("the record is still there");
    };
    let done = Completion::retained(record.status.unwrap(), response);
    let settled = store.complete(&ticket, done, Lifetimes::new(DAY)).await;
    assert_eq!(settled.unwrap(), Settled::Done);
}

/// Why the response of this record cannot be read.
pub async fn why<S: Inspect + Checkpoints>(store: &S, id: &RecordId) -> DecodeError {
    let record = stored(store, id).await;
    RetainedResponse::decode(record.response.unwrap()).expect_err("it can be read")
}

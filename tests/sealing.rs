//! Sealing at rest: what a store keeps cannot be read without the keys, and a key that is missing or wrong
//! never lets a request run again.
#![cfg(all(feature = "sealing", feature = "postgres", feature = "sqlite"))]

#[path = "sealing/checkpoint_forms.rs"]
mod checkpoint_forms;
#[path = "sealing/checkpoints.rs"]
mod checkpoints;
#[path = "sealing/common.rs"]
mod common;
#[path = "sealing/conformance.rs"]
mod conformance;
#[path = "sealing/damage.rs"]
mod damage;
#[allow(dead_code)] // The tests of transactions use the rest of it.
#[path = "transactions/ground.rs"]
mod ground;
#[allow(dead_code)]
#[path = "transactions/handlers.rs"]
mod handlers;
#[path = "sealing/hash_key.rs"]
mod hash_key;
#[path = "sealing/hashed.rs"]
mod hashed;
#[path = "sealing/hidden.rs"]
mod hidden;
#[path = "sealing/keys.rs"]
mod keys;
#[path = "sealing/plain.rs"]
mod plain;
#[path = "sealing/rotation.rs"]
mod rotation;
mod support;
#[path = "sealing/transactional.rs"]
mod transactional;

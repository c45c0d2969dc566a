//! Checkpoints: what a run has saved is there for the next one, and for nobody who has lost the claim.

#[path = "checkpoints/common.rs"]
mod common;
#[path = "checkpoints/faults.rs"]
mod faults;
#[path = "checkpoints/fenced.rs"]
mod fenced;
#[cfg(all(feature = "postgres", feature = "sqlite"))]
#[allow(dead_code)] // The tests of transactions use the rest of it.
#[path = "transactions/ground.rs"]
mod ground;
#[cfg(all(feature = "postgres", feature = "sqlite"))]
#[allow(dead_code)]
#[path = "transactions/handlers.rs"]
mod handlers;
#[cfg(all(feature = "postgres", feature = "sqlite"))]
#[path = "checkpoints/joined.rs"]
mod joined;
#[path = "checkpoints/limits.rs"]
mod limits;
#[path = "checkpoints/redacted.rs"]
mod redacted;
#[path = "checkpoints/steps.rs"]
mod steps;
mod support;
#[cfg(all(feature = "postgres", feature = "sqlite"))]
#[path = "checkpoints/transactional.rs"]
mod transactional;

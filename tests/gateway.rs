//! The gateway of `examples/gateway`, as its own code does it, over TCP.

#[path = "../examples/gateway/service/mod.rs"]
mod service;
mod support;

#[path = "gateway/keys.rs"]
mod keys;
#[path = "gateway/paths.rs"]
mod paths;
#[cfg(unix)]
#[path = "gateway/process.rs"]
mod process;
#[path = "gateway/refusals.rs"]
mod refusals;
#[path = "gateway/secrets.rs"]
mod secrets;
#[path = "gateway/shop.rs"]
mod shop;
#[path = "gateway/signatures.rs"]
mod signatures;
#[path = "gateway/situations.rs"]
mod situations;
#[path = "gateway/slips.rs"]
mod slips;

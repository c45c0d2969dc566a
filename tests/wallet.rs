//! The wallet service of `examples/wallet`, as its own code does it, against a real Postgres server.
#![cfg(feature = "postgres")]

#[path = "../examples/wallet/service/mod.rs"]
mod service;
mod support;

#[path = "wallet/answers.rs"]
mod answers;
#[path = "wallet/bank.rs"]
mod bank;
#[path = "wallet/declines.rs"]
mod declines;
#[path = "wallet/races.rs"]
mod races;
#[path = "wallet/tcp.rs"]
mod tcp;
#[path = "wallet/write_skew.rs"]
mod write_skew;

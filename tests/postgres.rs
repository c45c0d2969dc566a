//! What only a real Postgres server can show: batches, locks, isolation levels, broken connections,
//! restarts, rights. What every store has in common stands elsewhere.
#![cfg(feature = "postgres")]

#[path = "postgres/batches.rs"]
mod batches;
#[path = "postgres/between.rs"]
mod between;
#[path = "postgres/clocks.rs"]
mod clocks;
#[path = "postgres/common.rs"]
mod common;
#[path = "postgres/connections.rs"]
mod connections;
#[path = "postgres/crowds.rs"]
mod crowds;
#[path = "postgres/holding.rs"]
mod holding;
#[path = "postgres/isolation.rs"]
mod isolation;
#[path = "postgres/leaving.rs"]
mod leaving;
#[path = "postgres/locks.rs"]
mod locks;
#[path = "postgres/lost_answers.rs"]
mod lost_answers;
#[path = "postgres/opening.rs"]
mod opening;
#[path = "postgres/orders.rs"]
mod orders;
#[path = "postgres/outage.rs"]
mod outage;
#[path = "postgres/pressure.rs"]
mod pressure;
#[path = "postgres/purging.rs"]
mod purging;
#[path = "postgres/redaction.rs"]
mod redaction;
#[path = "postgres/single.rs"]
mod single;
mod support;
#[path = "postgres/tables.rs"]
mod tables;
#[path = "postgres/wrong_tables.rs"]
mod wrong_tables;

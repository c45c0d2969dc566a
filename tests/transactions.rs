//! Transactional mode: the effect of a handler and the record of its answer are committed together, or
//! neither is.
#![cfg(all(feature = "postgres", feature = "sqlite"))]

#[path = "transactions/answers.rs"]
mod answers;
#[path = "transactions/conflicts.rs"]
mod conflicts;
#[path = "transactions/crashes.rs"]
mod crashes;
#[path = "transactions/dropped.rs"]
mod dropped;
#[path = "transactions/duplicates.rs"]
mod duplicates;
#[path = "transactions/ended.rs"]
mod ended;
#[path = "transactions/endings.rs"]
mod endings;
#[path = "transactions/far.rs"]
mod far;
#[path = "transactions/ground.rs"]
mod ground;
#[path = "transactions/handlers.rs"]
mod handlers;
#[path = "transactions/isolation.rs"]
mod isolation;
#[path = "transactions/left_behind.rs"]
mod left_behind;
#[path = "transactions/limits.rs"]
mod limits;
#[path = "transactions/lost_commits.rs"]
mod lost_commits;
#[path = "transactions/misuse.rs"]
mod misuse;
#[path = "transactions/ordinary.rs"]
mod ordinary;
#[path = "transactions/outages.rs"]
mod outages;
#[path = "transactions/ownership.rs"]
mod ownership;
#[path = "transactions/slow_commits.rs"]
mod slow_commits;
mod support;
#[path = "transactions/swept.rs"]
mod swept;

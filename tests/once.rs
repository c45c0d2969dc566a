//! An operation that is asked for by scope, key and fingerprint runs once, whatever it is: the engine outside
//! HTTP.

#[cfg(all(feature = "postgres", feature = "sqlite"))]
#[path = "once/by_hand.rs"]
mod by_hand;
#[path = "once/cut_off.rs"]
mod cut_off;
#[path = "once/failures.rs"]
mod failures;
#[cfg(all(feature = "postgres", feature = "sqlite"))]
#[allow(dead_code)] // The tests of requests use the rest.
#[path = "transactions/ground.rs"]
mod ground;
#[path = "once/hidden.rs"]
mod hidden;
#[cfg(unix)]
#[path = "once/killed.rs"]
mod killed;
#[path = "once/limits.rs"]
mod limits;
#[cfg(all(feature = "postgres", feature = "sqlite"))]
#[path = "once/own_task.rs"]
mod own_task;
#[path = "once/places.rs"]
mod places;
#[path = "once/results.rs"]
mod results;
#[path = "once/running.rs"]
mod running;
#[path = "once/stage.rs"]
mod stage;
mod support;
#[cfg(all(feature = "postgres", feature = "sqlite"))]
#[path = "once/transactional.rs"]
mod transactional;

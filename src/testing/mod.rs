//! What tests of services and of stores need (feature `testing`).
//!
//! - [`FakeClock`] stands still until it is told to move, so nothing has to sleep.
//! - [`FaultyStore`] wraps any store and fails, delays or hangs its operations as told.
//! - [`conformance`] holds one test for each number of the [contract](crate::store), for those who
//!   write a store; [`conformance::write_your_own`] is the guide.

mod clock;
pub mod conformance;
mod faulty;

pub use self::{
    clock::FakeClock,
    faulty::{Fault, FaultyStore, Operation, Times},
};

//! What tests of services and of stores need (feature `testing`).
//!
//! - [`assert_idempotent`] sends a request in all the ways that go wrong and says what should follow.
//! - [`FakeClock`] stands still until it is told to move, so nothing has to sleep.
//! - [`FaultyStore`] wraps any store and fails, delays or hangs its operations as told.
//! - [`conformance`] holds one test for each number of the [contract](crate::store), for those who
//!   write a store; [`conformance::write_your_own`] is the guide.

mod assertion;
mod clock;
pub mod conformance;
mod faulty;

pub use self::{
    assertion::{
        assert_idempotent, assert_idempotent_with_keys, assert_idempotent_with_other_body,
    },
    clock::FakeClock,
    faulty::{Fault, FaultyStore, Operation, Times},
};

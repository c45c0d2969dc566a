//! The contract of a store as tests, one for each of its [numbers](crate::store#the-contract).
//!
//! Say how your store is opened by implementing [`Harness`], then let
//! [`store_conformance!`](crate::store_conformance) make the tests: one named test per number, so
//! that a failure says which promise is broken. [`write_your_own`] walks through it.
//!
//! The functions are public as well, so that a broken store can be shown to fail one.
//!
//! # Panics
//!
//! Every function of this module panics when the store breaks the number it is named after. The
//! message names the number, the sentence that does not hold and what the store answered.

// The suite leaves most of the claims it wins in flight, on purpose.
#![expect(unused_must_use)]

mod checkpoints;
mod claiming;
mod everywhere;
mod housekeeping;
mod inspecting;
mod leases;
mod lifetimes;
mod recovering;
mod settling;
mod support;
mod takeover;

use std::{future::Future, time::Duration};

pub use self::{
    checkpoints::c28_checkpoints_are_kept_under_their_claim,
    claiming::{
        c01_a_claim_without_a_record_is_won, c02_of_simultaneous_claims_exactly_one_is_won,
        c03_a_claim_on_a_running_record_changes_nothing,
        c04_a_claim_on_a_completed_record_answers_it, c05_a_claim_sent_again_is_won_again,
        c06_an_expired_record_is_as_good_as_absent, c07_scope_and_key_are_compared_byte_for_byte,
    },
    everywhere::{
        c29_what_is_acknowledged_is_visible_everywhere, c30_dropped_futures_break_nothing,
        c31_a_closed_store_gives_its_lease_up,
    },
    housekeeping::{
        c22_purge_removes_what_is_over_and_nothing_else, c23_a_full_store_refuses_new_claims_only,
    },
    inspecting::{
        c24_get_answers_live_records, c25_forget_fences_the_owner_off, c26_counts_count_by_state,
        c27_abandoned_records_are_listed_in_pages, c32_records_are_counted_by_scope,
    },
    leases::{
        c08_a_claim_is_alive_for_its_lease, c09_renewing_extends_the_instances_lease,
        c10_renew_tells_which_tickets_are_lost, c11_a_run_past_its_time_is_abandoned,
        c12_a_claim_marked_abandoned_is_abandoned_at_once,
    },
    lifetimes::{
        c19_records_and_responses_expire_when_asked, c20_responses_come_back_byte_for_byte,
        c21_abandoned_records_stay,
    },
    recovering::c33_an_abandoned_record_is_taken_over_to_find_out,
    settling::{
        c15_complete_records_the_outcome, c16_complete_sent_again_changes_nothing,
        c17_other_tokens_change_nothing, c18_release_frees_the_key,
    },
    takeover::{c13_takeover_names_the_token_it_replaces, c14_nothing_else_takes_over},
};
use crate::store::{Checkpoints, Inspect};

#[doc = include_str!("../../store/write_your_own.md")]
pub mod write_your_own {}

/// How the suite gets at a store.
///
/// A harness stands for one set of data, such as a database file. Every test makes one of its own
/// and opens one or more stores on it.
pub trait Harness: Sized + Send + Sync + 'static {
    /// The store under test.
    type Store: Inspect + Checkpoints;

    /// The unit of time the suite counts in: leases and lifetimes are a few ticks long. Default
    /// 1 s. A store on a real clock takes the shortest time that a loaded test machine still tells
    /// apart, such as 200 ms.
    const TICK: Duration = Duration::from_secs(1);

    /// Whether [`advance`](Self::advance) really sleeps. Then lifetimes of more than 2 s are only
    /// seen to begin, and "not over yet" is only asked while it is certain. Default `false`.
    const REAL_CLOCK: bool = false;

    /// Whether expired records vanish by themselves, so that `purge` may find nothing to count.
    /// Default `false`.
    const EXPIRES_BY_ITSELF: bool = false;

    /// Fresh data, with nothing in it.
    fn new() -> impl Future<Output = Self> + Send;

    /// Opens the store on this data. Opened again it is another instance with a lease of its own,
    /// as another process would be.
    fn open(&self) -> impl Future<Output = Self::Store> + Send;

    /// Moves the clock of the stores on this data; a store on a real clock sleeps.
    fn advance(&self, by: Duration) -> impl Future<Output = ()> + Send;

    /// A store on data of its own, on the clock of this harness, which is full after no less than
    /// 2 and no more than 1 000 records of a few bytes. A store without limits answers `None`, the
    /// default, and contract 23 is not checked.
    fn small(&self) -> impl Future<Output = Option<Self::Store>> + Send {
        async { None }
    }
}

/// Makes one `#[tokio::test]` for each number of the [contract](crate::store#the-contract).
///
/// Takes a type that implements [`testing::conformance::Harness`]. Your crate needs tokio among
/// its dev-dependencies, with the features `macros` and `rt-multi-thread`.
///
/// [`testing::conformance::Harness`]: crate::testing::conformance::Harness
///
/// ```
/// use std::time::Duration;
/// use tower_idempotency::{
///     MemoryStore, store_conformance,
///     testing::{FakeClock, conformance::Harness},
/// };
///
/// struct Memory {
///     clock: FakeClock,
///     store: MemoryStore,
/// }
///
/// impl Harness for Memory {
///     type Store = MemoryStore;
///
///     async fn new() -> Self {
///         let clock = FakeClock::new();
///         let store = MemoryStore::options().clock(clock.clone()).build();
///         Self { clock, store }
///     }
///
///     async fn open(&self) -> MemoryStore {
///         self.store.instance()
///     }
///
///     async fn advance(&self, by: Duration) {
///         self.clock.advance(by);
///     }
/// }
///
/// store_conformance!(Memory);
/// # fn main() {}
/// ```
#[macro_export]
macro_rules! store_conformance {
    ($harness:ty) => {
        $crate::store_conformance! { @tests $harness;
            c01_a_claim_without_a_record_is_won
            c02_of_simultaneous_claims_exactly_one_is_won
            c03_a_claim_on_a_running_record_changes_nothing
            c04_a_claim_on_a_completed_record_answers_it
            c05_a_claim_sent_again_is_won_again
            c06_an_expired_record_is_as_good_as_absent
            c07_scope_and_key_are_compared_byte_for_byte
            c08_a_claim_is_alive_for_its_lease
            c09_renewing_extends_the_instances_lease
            c10_renew_tells_which_tickets_are_lost
            c11_a_run_past_its_time_is_abandoned
            c12_a_claim_marked_abandoned_is_abandoned_at_once
            c13_takeover_names_the_token_it_replaces
            c14_nothing_else_takes_over
            c15_complete_records_the_outcome
            c16_complete_sent_again_changes_nothing
            c17_other_tokens_change_nothing
            c18_release_frees_the_key
            c19_records_and_responses_expire_when_asked
            c20_responses_come_back_byte_for_byte
            c21_abandoned_records_stay
            c22_purge_removes_what_is_over_and_nothing_else
            c23_a_full_store_refuses_new_claims_only
            c24_get_answers_live_records
            c25_forget_fences_the_owner_off
            c26_counts_count_by_state
            c27_abandoned_records_are_listed_in_pages
            c28_checkpoints_are_kept_under_their_claim
            c29_what_is_acknowledged_is_visible_everywhere
            c30_dropped_futures_break_nothing
            c31_a_closed_store_gives_its_lease_up
            c32_records_are_counted_by_scope
            c33_an_abandoned_record_is_taken_over_to_find_out
        }
    };
    (@tests $harness:ty; $($name:ident)*) => {
        $(
            #[tokio::test(flavor = "multi_thread")]
            async fn $name() {
                $crate::testing::conformance::$name::<$harness>().await;
            }
        )*
    };
}

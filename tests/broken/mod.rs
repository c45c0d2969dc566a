//! Stores that break the contract in one way each, and the number that notices. A suite that lets
//! one of them pass is worth nothing for it.

mod store;

use std::{future::Future, marker::PhantomData, time::Duration};

use tower_idempotency::{
    MemoryStore,
    testing::conformance::{self, Harness},
};

use self::store::{Broken, How};
use super::Memory;

trait Defect: Send + Sync + 'static {
    const HOW: How;
}

struct Bent<D> {
    memory: Memory,
    shared: store::Shared,
    defect: PhantomData<D>,
}

impl<D: Defect> Bent<D> {
    fn wrap(&self, inner: MemoryStore) -> Broken {
        Broken::new(inner, D::HOW, self.shared.clone())
    }
}

impl<D: Defect> Harness for Bent<D> {
    type Store = Broken;

    async fn new() -> Self {
        Self {
            memory: Memory::new().await,
            shared: store::Shared::default(),
            defect: PhantomData,
        }
    }

    async fn open(&self) -> Broken {
        let inner = match D::HOW {
            How::KeepsToItself => Memory::new().await.store,
            _ => self.memory.open().await,
        };
        self.wrap(inner)
    }

    async fn advance(&self, by: Duration) {
        self.memory.advance(by).await;
    }

    async fn small(&self) -> Option<Broken> {
        Some(self.wrap(self.memory.small_store()))
    }
}

/// Runs a number and wants it to fail under its own name.
async fn assert_fails(number: u32, test: impl Future<Output = ()> + Send + 'static) {
    let Err(error) = tokio::spawn(test).await else {
        panic!("contract {number} let a broken store pass");
    };
    let panic = error.into_panic();
    let message = match panic.downcast_ref::<String>() {
        Some(message) => message.as_str(),
        None => panic.downcast_ref::<&str>().copied().unwrap_or_default(),
    };
    let expected = format!("contract {number}:");
    assert!(
        message.starts_with(&expected),
        "wanted a failure of {expected} but got: {message}"
    );
}

macro_rules! caught {
    ($($number:literal $function:ident { $($name:ident: $how:ident,)* })*) => {
        $($(
            #[tokio::test(flavor = "multi_thread")]
            async fn $name() {
                struct This;

                impl Defect for This {
                    const HOW: How = How::$how;
                }

                assert_fails($number, conformance::$function::<Bent<This>>()).await;
            }
        )*)*
    };
}

caught! {
    1 c01_a_claim_without_a_record_is_won {
        attempts_that_begin_at_zero_are_caught: CountsFromZero,
    }
    2 c02_of_simultaneous_claims_exactly_one_is_won {
        a_store_that_reads_first_and_writes_later_is_caught: ReadsThenWrites,
    }
    3 c03_a_claim_on_a_running_record_changes_nothing {
        a_store_that_tells_a_rival_its_own_fingerprint_is_caught: EchoesTheRival,
        a_store_that_lets_a_rival_in_is_caught: LetsRivalsIn,
    }
    4 c04_a_claim_on_a_completed_record_answers_it {
        a_completed_record_without_its_response_is_caught: AnswersWithoutResponse,
    }
    5 c05_a_claim_sent_again_is_won_again {
        a_store_that_takes_a_resent_claim_for_a_rival_is_caught: ForgetsItsToken,
    }
    6 c06_an_expired_record_is_as_good_as_absent {
        a_store_that_goes_on_counting_after_expiry_is_caught: RemembersAttempts,
    }
    7 c07_scope_and_key_are_compared_byte_for_byte {
        a_store_that_joins_scope_and_key_is_caught: JoinsScopeAndKey,
        a_store_that_ignores_case_is_caught: IgnoresCase,
        a_store_that_ends_keys_at_nul_is_caught: EndsAtNul,
    }
    8 c08_a_claim_is_alive_for_its_lease {
        a_store_without_leases_is_caught: NeverLapses,
        a_store_that_lapses_at_once_is_caught: LapsesAtOnce,
    }
    9 c09_renewing_extends_the_instances_lease {
        a_store_that_ignores_renewals_is_caught: IgnoresRenewals,
        a_store_that_refuses_to_renew_a_lapsed_lease_is_caught: RenewsTheLivingOnly,
    }
    10 c10_renew_tells_which_tickets_are_lost {
        renewals_answered_out_of_order_are_caught: RenewsOutOfOrder,
        a_store_that_never_reports_a_loss_is_caught: NeverLoses,
    }
    11 c11_a_run_past_its_time_is_abandoned {
        a_store_without_max_run_is_caught: RunsForever,
    }
    12 c12_a_claim_marked_abandoned_is_abandoned_at_once {
        a_store_that_does_not_mark_is_caught: IgnoresAbandon,
        an_abandonment_that_counts_what_is_given_back_is_caught: CountsTheAbandoned,
        an_abandonment_that_takes_an_unknown_attempt_for_the_first_is_caught: CountsTheUnknownAsFirst,
    }
    13 c13_takeover_names_the_token_it_replaces {
        a_takeover_that_names_no_token_is_caught: TakesOverUnnamed,
        a_takeover_that_loses_the_first_request_id_is_caught: TakesOverAfresh,
    }
    14 c14_nothing_else_takes_over {
        a_takeover_from_the_living_is_caught: TakesOverTheLiving,
        a_takeover_that_names_any_token_is_caught: TakesOverByAnyName,
    }
    15 c15_complete_records_the_outcome {
        a_store_that_loses_the_status_is_caught: CompletesAsOk,
        a_store_that_wants_a_living_lease_to_complete_is_caught: CompletesTheLivingOnly,
    }
    16 c16_complete_sent_again_changes_nothing {
        a_completion_that_overwrites_is_caught: CompletesAgain,
        a_completion_that_is_lost_the_second_time_is_caught: CompletesOnce,
    }
    17 c17_other_tokens_change_nothing {
        a_completion_by_any_token_is_caught: CompletesByAnyToken,
        a_release_by_any_token_is_caught: ReleasesByAnyToken,
        an_abandonment_by_any_token_is_caught: AbandonsByAnyToken,
        a_checkpoint_by_any_token_is_caught: SavesByAnyToken,
        a_release_of_a_completed_record_is_caught: ReleasesTheCompleted,
    }
    18 c18_release_frees_the_key {
        a_release_that_frees_nothing_is_caught: AbandonsInstead,
        a_release_that_drops_checkpoints_is_caught: ReleasesWhole,
        a_release_that_counts_what_is_given_back_is_caught: CountsTheReleased,
    }
    19 c19_records_and_responses_expire_when_asked {
        lifetimes_in_whole_seconds_are_caught: CountsSeconds,
        responses_that_outlive_their_time_are_caught: KeepsResponses,
        records_that_never_expire_are_caught: KeepsRecords,
    }
    20 c20_responses_come_back_byte_for_byte {
        responses_kept_as_text_are_caught: KeepsText,
        an_empty_response_kept_as_none_is_caught: DropsEmpty,
    }
    21 c21_abandoned_records_stay {
        abandoned_records_that_expire_are_caught: ForgetsTheAbandoned,
        abandoned_records_that_stay_too_long_are_caught: KeepsTheAbandoned,
    }
    22 c22_purge_removes_what_is_over_and_nothing_else {
        a_purge_of_abandoned_records_is_caught: PurgesTheAbandoned,
        a_purge_that_does_nothing_is_caught: PurgesNothing,
        a_purge_without_a_limit_is_caught: PurgesAll,
    }
    23 c23_a_full_store_refuses_new_claims_only {
        a_store_that_evicts_is_caught: Evicts,
        a_store_too_full_to_complete_is_caught: RefusesToComplete,
    }
    24 c24_get_answers_live_records {
        a_get_of_the_completed_only_is_caught: GetsTheCompleted,
    }
    25 c25_forget_fences_the_owner_off {
        a_forget_of_the_completed_only_is_caught: ForgetsTheCompleted,
    }
    26 c26_counts_count_by_state {
        lapsed_records_counted_as_running_are_caught: CountsTheLapsedAsRunning,
    }
    27 c27_abandoned_records_are_listed_in_pages {
        pages_in_the_wrong_order_are_caught: ListsNewestFirst,
        pages_that_skip_equal_times_are_caught: ListsByTimeOnly,
    }
    28 c28_checkpoints_are_kept_under_their_claim {
        checkpoints_for_any_token_are_caught: LoadsForAnybody,
        checkpoints_in_the_order_of_names_are_caught: LoadsByName,
        checkpoints_without_limits_on_values_are_caught: SavesLargeValues,
    }
    29 c29_what_is_acknowledged_is_visible_everywhere {
        records_of_one_instance_only_are_caught: KeepsToItself,
    }
    30 c30_dropped_futures_break_nothing {
        a_store_that_stays_busy_when_dropped_is_caught: StaysBusy,
    }
    31 c31_a_closed_store_gives_its_lease_up {
        a_close_that_keeps_the_lease_is_caught: KeepsItsLease,
        a_close_that_does_nothing_is_caught: IgnoresClose,
    }
    32 c32_records_are_counted_by_scope {
        a_count_of_all_scopes_is_caught: CountsEveryScope,
        a_count_of_the_completed_only_is_caught: CountsTheCompletedOnly,
        a_count_that_ignores_its_bound_is_caught: CountsPastTheEnd,
        a_count_that_includes_expired_records_is_caught: CountsTheExpired,
    }
    33 c33_an_abandoned_record_is_taken_over_to_find_out {
        a_hold_that_counts_as_a_run_is_caught: HoldsAsARun,
        a_hold_that_forgets_what_there_was_is_caught: HoldsAfresh,
        a_hold_of_the_living_is_caught: HoldsTheLiving,
        a_hold_of_what_was_released_is_caught: HoldsTheReleased,
        a_hold_that_names_any_token_is_caught: HoldsByAnyName,
        a_hold_that_does_not_know_its_own_token_is_caught: HoldsOnce,
        two_who_hold_one_record_are_caught: HoldsTogether,
        a_hold_without_an_end_is_caught: HoldsForever,
        a_hold_that_is_over_at_once_is_caught: HoldsForNoTime,
    }
}

/// The wrapper itself is no defect, or the tests above would prove nothing.
mod honest {
    use super::*;

    struct Nothing;

    impl Defect for Nothing {
        const HOW: How = How::Not;
    }

    tower_idempotency::store_conformance!(Bent<Nothing>);
}

//! Broken protocols, each caught by the same walk.

use super::*;

/// Walks over broken functions, and wants the promise to be seen broken.
fn caught<R: Rules>(setting: Setting, promise: &str) {
    match walk::<R>(setting) {
        Ok(seen) => panic!("nothing noticed that {promise}: {seen:?}"),
        Err(broken) => assert!(broken.starts_with(promise), "{broken}"),
    }
}

macro_rules! broken {
    ($($test:ident: $setting:expr, $promise:literal { $($function:item)+ })*) => {
        $(
            #[test]
            fn $test() {
                struct Broken;

                impl Rules for Broken {
                    $($function)+
                }

                caught::<Broken>($setting, $promise);
            }
        )*
    };
}

broken! {
    a_takeover_that_names_no_token_is_caught: ALL, "a claim took over without naming the token" {
        fn claim(
            slot: Option<Record>,
            request: &ClaimRequest,
            owner: Owner,
            leases: &Leases,
        ) -> (Option<Record>, Claim) {
            let token = slot.as_ref().map(|record| record.token);
            let replaces = token.filter(|token| *token != request.token);
            let request = ClaimRequest { replaces, ..request.clone() };
            claim(slot, &request, owner, leases, NOW)
        }
    }
    a_takeover_from_the_living_is_caught: ALL, "a claim took over from the living" {
        fn claim(
            slot: Option<Record>,
            request: &ClaimRequest,
            owner: Owner,
            leases: &Leases,
        ) -> (Option<Record>, Claim) {
            let none = Leases::default();
            let named = request.replaces.is_some();
            claim(slot, request, owner, if named { &none } else { leases }, NOW)
        }
    }
    a_resent_claim_taken_for_a_rival_is_caught:
        REFUSING, "a claim sent again was taken for a rival's"
    {
        fn claim(
            slot: Option<Record>,
            request: &ClaimRequest,
            owner: Owner,
            leases: &Leases,
        ) -> (Option<Record>, Claim) {
            match slot {
                Some(record) if record.token == request.token => {
                    let held = Held::of(&record);
                    (Some(record), Claim::InFlight(held))
                }
                slot => claim(slot, request, owner, leases, NOW),
            }
        }
    }
    a_claim_that_runs_again_after_a_completion_is_caught:
        REFUSING, "a claim after a completion was not answered by it"
    {
        fn claim(
            slot: Option<Record>,
            request: &ClaimRequest,
            owner: Owner,
            leases: &Leases,
        ) -> (Option<Record>, Claim) {
            let slot = slot.filter(|record| record.state != State::Completed);
            claim(slot, request, owner, leases, NOW)
        }
    }
    a_completion_that_ignores_the_token_is_caught: REFUSING, "a stale token" {
        fn complete(slot: Option<Record>, given: Token, done: Completion) -> (Option<Record>, Settled) {
            let token = slot.as_ref().map_or(given, |record| record.token);
            Real::complete(slot, token, done)
        }
    }
    a_second_completion_that_overwrites_is_caught:
        REFUSING, "a completion was lost or changed before it expired"
    {
        fn complete(mut slot: Option<Record>, token: Token, done: Completion) -> (Option<Record>, Settled) {
            if let Some(record) = &mut slot
                && record.token == token
            {
                record.state = State::Running;
            }
            Real::complete(slot, token, done)
        }
    }
    a_release_that_ignores_the_token_is_caught: REFUSING, "a stale token" {
        fn release(
            slot: Option<Record>,
            given: Token,
            attempt: u32,
            saved: bool,
        ) -> (Option<Record>, Settled) {
            let token = slot.as_ref().map_or(given, |record| record.token);
            Real::release(slot, token, attempt, saved)
        }
    }
    an_abandonment_of_what_is_completed_is_caught:
        Setting { owners: 1, ..REFUSING }, "a completion was lost or changed before it expired"
    {
        fn abandon(mut slot: Option<Record>, token: Token, attempt: u32) -> (Option<Record>, Settled) {
            if let Some(record) = &mut slot
                && record.token == token
            {
                record.state = State::Abandoned;
            }
            Real::abandon(slot, token, attempt)
        }
    }
    an_abandonment_that_ignores_the_token_is_caught: REFUSING, "a stale token" {
        fn abandon(slot: Option<Record>, given: Token, attempt: u32) -> (Option<Record>, Settled) {
            let token = slot.as_ref().map_or(given, |record| record.token);
            Real::abandon(slot, token, attempt)
        }
    }
    an_abandonment_that_counts_what_is_given_back_is_caught:
        ALL, "a claim was given back with another attempt"
    {
        fn abandon(slot: Option<Record>, token: Token, _: u32) -> (Option<Record>, Settled) {
            Real::abandon(slot, token, 0)
        }
    }
    a_release_that_counts_what_is_given_back_is_caught:
        ALL, "a claim was given back with another attempt"
    {
        fn release(
            slot: Option<Record>,
            token: Token,
            _: u32,
            saved: bool,
        ) -> (Option<Record>, Settled) {
            Real::release(slot, token, 0, saved)
        }
    }
    an_abandonment_that_takes_an_unknown_attempt_for_none_is_caught:
        ALL, "a claim was given back with another attempt"
    {
        fn abandon(slot: Option<Record>, token: Token, attempt: u32) -> (Option<Record>, Settled) {
            let (mut slot, settled) = Real::abandon(slot, token, attempt);
            if let Some(record) = &mut slot
                && settled == Settled::Done
            {
                record.attempt = attempt;
            }
            (slot, settled)
        }
    }
    a_purge_of_running_records_is_caught: REFUSING, "a purge changed what is not over" {
        fn purge(slot: Option<Record>) -> (Option<Record>, bool) {
            Real::purge(slot.filter(|record| record.state != State::Running))
        }
    }
    a_hold_of_the_living_is_caught: HOLDING, "a record was taken over from the living" {
        fn take_over(
            slot: Option<Record>,
            taking: &TakingOver,
            _: &Leases,
        ) -> (Option<Record>, Option<Ticket>) {
            take_over(slot, taking, &Leases::default(), NOW)
        }
    }
    a_hold_of_what_is_completed_is_caught: HOLDING, "a completed record was taken over" {
        fn take_over(
            mut slot: Option<Record>,
            taking: &TakingOver,
            leases: &Leases,
        ) -> (Option<Record>, Option<Ticket>) {
            if let Some(record) = &mut slot
                && record.token == taking.abandoned
                && record.state == State::Completed
            {
                record.state = State::Abandoned;
            }
            take_over(slot, taking, leases, NOW)
        }
    }
    a_hold_that_names_any_token_is_caught:
        Setting { owners: 2, duplicates: 0, ..HOLDING },
        "a record was taken over without naming the token"
    {
        fn take_over(
            slot: Option<Record>,
            taking: &TakingOver,
            leases: &Leases,
        ) -> (Option<Record>, Option<Ticket>) {
            let abandoned = slot.as_ref().map_or(taking.abandoned, |record| record.token);
            take_over(slot, &TakingOver { abandoned, ..*taking }, leases, NOW)
        }
    }
    a_hold_that_fences_nobody_off_is_caught:
        HOLDING, "a takeover changed more than who holds the record"
    {
        fn take_over(
            slot: Option<Record>,
            taking: &TakingOver,
            leases: &Leases,
        ) -> (Option<Record>, Option<Ticket>) {
            let (mut slot, ticket) = take_over(slot, taking, leases, NOW);
            if let (Some(record), Some(_)) = (&mut slot, &ticket) {
                record.token = taking.abandoned;
            }
            (slot, ticket)
        }
    }
    a_hold_that_is_refused_to_its_holder_is_caught:
        HOLDING, "an abandoned record was not taken over by its token"
    {
        fn take_over(
            slot: Option<Record>,
            _: &TakingOver,
            _: &Leases,
        ) -> (Option<Record>, Option<Ticket>) {
            (slot, None)
        }
    }
}

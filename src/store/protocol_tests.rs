use bytes::Bytes;
use http::StatusCode;

use super::*;
use crate::record::{Fingerprint, RecordId};
use crate::{IdempotencyKey, Scope};

#[path = "protocol_explored/mod.rs"]
mod explored;

const NOW: Timestamp = Timestamp::from_micros(1_000_000);
const SECOND: Duration = Duration::from_secs(1);

fn token(n: u8) -> Token {
    Token::from_bytes([n; 16])
}

fn owner(n: u8) -> Owner {
    Owner::from_bytes([n; 16])
}

fn at(seconds: u64) -> Timestamp {
    NOW.after(SECOND * u32::try_from(seconds).unwrap())
}

/// A claim under token `n`: lease 10 s, `max_run` 60 s.
fn request(n: u8) -> ClaimRequest {
    let id = RecordId::new(Scope::shared(), IdempotencyKey::new("k"));
    let mut request = ClaimRequest::new(id, "test", Fingerprint::from_bytes([n; 32]));
    request.token = token(n);
    request.lease = SECOND * 10;
    request.max_run = SECOND * 60;
    request.request_id = Some(format!("req-{n}").into());
    request
}

fn replacing(n: u8, replaced: u8) -> ClaimRequest {
    let mut request = request(n);
    request.replaces = Some(token(replaced));
    request
}

fn outcome(n: u8) -> Completion {
    Completion::retained(StatusCode::CREATED, Bytes::from(vec![n]))
}

/// The store around the functions: one slot, its leases, and a clock.
#[derive(Default)]
struct Slot {
    record: Option<Record>,
    leases: Leases,
}

impl Slot {
    fn claim(&mut self, by: u8, request: &ClaimRequest, now: Timestamp) -> Claim {
        let (record, claim) =
            super::claim(self.record.take(), request, owner(by), &self.leases, now);
        self.record = record;
        if matches!(claim, Claim::Won(_)) {
            self.leases.extend(owner(by), request.lease, now);
        }
        claim
    }

    fn complete(&mut self, n: u8, ttl: Duration, now: Timestamp) -> Settled {
        let (record, settled) = super::complete(
            self.record.take(),
            token(n),
            outcome(n),
            Lifetimes::new(ttl),
            now,
        );
        self.record = record;
        settled
    }

    /// With a ticket that knows its attempt, as an owner has one.
    fn release(&mut self, n: u8, has_checkpoints: bool, now: Timestamp) -> Settled {
        let attempt = self.attempt();
        self.release_as(n, attempt, has_checkpoints, now)
    }

    fn release_as(
        &mut self,
        n: u8,
        attempt: u32,
        has_checkpoints: bool,
        now: Timestamp,
    ) -> Settled {
        let slot = self.record.take();
        let (record, settled) =
            super::release(slot, token(n), attempt, has_checkpoints, SECOND, now);
        self.record = record;
        settled
    }

    fn abandon(&mut self, n: u8) -> Settled {
        let attempt = self.attempt();
        self.abandon_as(n, attempt)
    }

    fn abandon_as(&mut self, n: u8, attempt: u32) -> Settled {
        let (record, settled) = super::abandon(self.record.take(), token(n), attempt);
        self.record = record;
        settled
    }

    fn attempt(&self) -> u32 {
        self.record.as_ref().map_or(1, |record| record.attempt)
    }

    fn state(&self) -> Option<State> {
        self.record.as_ref().map(|record| record.state)
    }
}

fn won(claim: &Claim) -> Option<u32> {
    match claim {
        Claim::Won(ticket) => Some(ticket.attempt),
        _ => None,
    }
}

fn held(claim: &Claim) -> Option<(&'static str, Token)> {
    match claim {
        Claim::InFlight(held) => Some(("in flight", held.token)),
        Claim::Abandoned(held) => Some(("abandoned", held.token)),
        _ => None,
    }
}

/// A slot claimed under token 1 by owner 1 at `NOW`.
fn claimed() -> Slot {
    let mut slot = Slot::default();
    assert_eq!(won(&slot.claim(1, &request(1), NOW)), Some(1));
    slot
}

#[test]
fn an_empty_slot_is_won_with_attempt_1_even_by_a_claim_that_names_a_token() {
    assert_eq!(won(&claimed().claim(1, &request(1), NOW)), Some(1));
    let mut slot = Slot::default();
    assert_eq!(won(&slot.claim(1, &replacing(1, 9), NOW)), Some(1));
}

#[test]
fn a_rival_finds_the_first_claim_in_flight_and_changes_nothing() {
    let mut slot = claimed();
    let before = slot.record.clone();
    let answer = slot.claim(2, &request(2), NOW);
    assert_eq!(answer, Claim::InFlight(Held::of(before.as_ref().unwrap())));
    assert_eq!(slot.record, before);
}

#[test]
fn a_claim_sent_again_is_won_again_and_revives_a_lapsed_lease() {
    let mut slot = claimed();
    let before = slot.record.clone();
    assert_eq!(won(&slot.claim(1, &request(1), at(11))), Some(1));
    assert_eq!(slot.record, before);
    let answer = slot.claim(2, &request(2), at(12));
    assert_eq!(held(&answer), Some(("in flight", token(1))));
}

#[test]
fn a_claim_is_abandoned_the_moment_its_lease_or_its_time_is_over() {
    for (now, expected) in [(9, "in flight"), (10, "abandoned")] {
        let answer = claimed().claim(2, &request(2), at(now));
        assert_eq!(held(&answer), Some((expected, token(1))), "after {now} s");
    }
    for (now, expected) in [(59, "in flight"), (60, "abandoned")] {
        let mut slot = claimed();
        slot.leases.extend(owner(1), SECOND * 1000, NOW);
        let answer = slot.claim(2, &request(2), at(now));
        assert_eq!(held(&answer), Some((expected, token(1))), "after {now} s");
    }
}

#[test]
fn a_shorter_lease_never_cuts_a_longer_one_and_lapsed_ones_may_be_dropped() {
    let mut leases = Leases::default();
    leases.extend(owner(1), SECOND * 10, NOW);
    leases.extend(owner(1), SECOND, NOW);
    leases.forget_lapsed(at(9));
    assert!(leases.alive(owner(1), at(9)));
    assert!(!leases.alive(owner(1), at(10)));
    leases.forget_lapsed(at(10));
    assert_eq!(leases, Leases::default());
    leases.extend(owner(1), Duration::MAX, NOW);
    assert!(leases.alive(owner(1), at(1 << 31)));
    leases.give_up(owner(1));
    assert!(!leases.alive(owner(1), NOW));
}

#[test]
fn a_takeover_names_the_token_and_keeps_created_and_request_id() {
    let mut slot = claimed();
    assert_eq!(slot.abandon(1), Settled::Done);
    assert_eq!(
        held(&slot.claim(2, &request(2), at(1))),
        Some(("abandoned", token(1)))
    );
    assert_eq!(
        held(&slot.claim(2, &replacing(2, 9), at(1))),
        Some(("abandoned", token(1)))
    );
    assert_eq!(won(&slot.claim(2, &replacing(2, 1), at(1))), Some(2));
    let record = slot.record.clone().unwrap();
    assert_eq!((record.created, record.run_until), (NOW, at(61)));
    assert_eq!((record.token, record.owner), (token(2), owner(2)));
    assert_eq!(record.request_id.as_deref(), Some("req-1"));
    assert_eq!(record.fingerprint, request(2).fingerprint);
    // The same takeover again finds a living record, and the one it replaced is a rival.
    assert_eq!(
        held(&slot.claim(3, &replacing(3, 1), at(1))),
        Some(("in flight", token(2)))
    );
    assert_eq!(
        held(&slot.claim(1, &request(1), at(1))),
        Some(("in flight", token(2)))
    );
}

#[test]
fn the_living_and_the_completed_are_not_taken_over_by_naming_their_token() {
    let mut slot = claimed();
    assert_eq!(
        held(&slot.claim(2, &replacing(2, 1), NOW)),
        Some(("in flight", token(1)))
    );
    assert_eq!(slot.complete(1, SECOND, NOW), Settled::Done);
    let before = slot.record.clone().unwrap();
    assert_eq!(
        slot.claim(2, &replacing(2, 1), NOW),
        Claim::Completed(Box::new(before.clone()))
    );
    assert_eq!(slot.record, Some(before));
}

#[test]
fn attempts_stop_counting_instead_of_beginning_anew() {
    let mut slot = claimed();
    slot.record.as_mut().unwrap().attempt = u32::MAX;
    assert_eq!(slot.abandon(1), Settled::Done);
    assert_eq!(won(&slot.claim(2, &replacing(2, 1), NOW)), Some(u32::MAX));
}

#[test]
fn an_expired_record_is_as_good_as_absent_to_a_claim() {
    let mut slot = claimed();
    assert_eq!(slot.complete(1, SECOND, NOW), Settled::Done);
    assert!(matches!(
        slot.claim(2, &request(2), NOW),
        Claim::Completed(_)
    ));
    assert_eq!(won(&slot.claim(2, &request(2), at(1))), Some(1));
    let record = slot.record.unwrap();
    assert_eq!(
        (record.created, record.response, record.status),
        (at(1), None, None)
    );
    assert_eq!(record.request_id.as_deref(), Some("req-2"));
}

#[test]
fn the_first_completion_counts_also_when_lapsed_or_marked_abandoned() {
    let mut slot = claimed();
    assert_eq!(slot.abandon(1), Settled::Done);
    assert_eq!(slot.complete(1, SECOND * 5, at(100)), Settled::Done);
    let before = slot.record.clone().unwrap();
    assert_eq!(
        (before.completed, before.expires),
        (Some(at(100)), Some(at(105)))
    );
    assert_eq!(before.response, outcome(1).response);
    assert_eq!(slot.complete(1, SECOND * 9, at(101)), Settled::Done);
    assert_eq!(slot.record, Some(before));
}

#[test]
fn another_token_settles_nothing_in_any_state() {
    let mut slots = vec![Slot::default(), claimed(), claimed(), claimed(), claimed()];
    assert_eq!(slots[2].abandon(1), Settled::Done);
    assert_eq!(slots[3].complete(1, SECOND, NOW), Settled::Done);
    assert_eq!(slots[4].release(1, true, NOW), Settled::Done);
    for mut slot in slots {
        let before = slot.record.clone();
        assert_eq!(slot.complete(2, SECOND, NOW), Settled::Lost);
        assert_eq!(slot.release(2, false, NOW), Settled::Lost);
        assert_eq!(slot.release(2, true, NOW), Settled::Lost);
        assert_eq!(slot.abandon(2), Settled::Lost);
        assert_eq!(slot.record, before);
    }
}

#[test]
fn a_completed_record_is_neither_released_nor_abandoned_by_its_own_token() {
    let mut slot = claimed();
    assert_eq!(slot.complete(1, SECOND, NOW), Settled::Done);
    let before = slot.record.clone();
    assert_eq!(slot.release(1, false, NOW), Settled::Lost);
    assert_eq!(slot.abandon(1), Settled::Lost);
    assert_eq!(slot.record, before);
}

#[test]
fn a_release_frees_the_key_unless_there_are_checkpoints_to_continue_from() {
    let mut slot = claimed();
    assert_eq!(slot.release(1, false, NOW), Settled::Done);
    assert_eq!(slot.record, None);

    let mut slot = claimed();
    assert_eq!(slot.release(1, true, NOW), Settled::Done);
    let before = slot.record.clone();
    assert_eq!(slot.release(1, true, NOW), Settled::Done);
    assert_eq!(slot.record, before);
    assert_eq!(slot.complete(1, SECOND, NOW), Settled::Lost);
    assert_eq!(slot.abandon(1), Settled::Lost);
    let answer = slot.claim(2, &request(2), NOW);
    assert!(
        matches!(&answer, Claim::Abandoned(held) if held.released),
        "{answer:?}"
    );
    assert_eq!(won(&slot.claim(2, &replacing(2, 1), NOW)), Some(2));
    let record = slot.record.unwrap();
    assert_eq!((record.state, record.expires), (State::Running, None));
}

#[test]
fn what_is_given_back_leaves_the_attempt_of_its_ticket_where_that_is_smaller() {
    // Attempt 3 of a record.
    let third = || {
        let mut slot = claimed();
        for (n, attempt) in [(2, 2), (3, 3)] {
            assert_eq!(slot.abandon(n - 1), Settled::Done);
            assert_eq!(
                won(&slot.claim(n, &replacing(n, n - 1), NOW)),
                Some(attempt)
            );
        }
        slot
    };
    for (given, left) in [(0, 3), (1, 1), (2, 2), (3, 3), (4, 3), (u32::MAX, 3)] {
        let mut slot = third();
        assert_eq!(slot.abandon_as(3, given), Settled::Done);
        assert_eq!(
            (slot.state(), slot.attempt()),
            (Some(State::Abandoned), left)
        );
        // Whatever comes again, the smallest counts.
        assert_eq!(slot.abandon_as(3, 2), Settled::Done);
        assert_eq!(slot.attempt(), left.min(2));
        assert_eq!(slot.abandon_as(3, 3), Settled::Done);
        assert_eq!(slot.attempt(), left.min(2));
        assert_eq!(
            won(&slot.claim(4, &replacing(4, 3), NOW)),
            Some(left.min(2) + 1)
        );

        let mut slot = third();
        assert_eq!(slot.release_as(3, given, true, NOW), Settled::Done);
        assert_eq!(
            (slot.state(), slot.attempt()),
            (Some(State::Released), left)
        );
        // It has been released, and changes no more.
        assert_eq!(slot.release_as(3, 1, true, NOW), Settled::Done);
        assert_eq!(slot.attempt(), left);

        // Marked first, released then.
        let mut slot = third();
        assert_eq!(slot.abandon_as(3, 3), Settled::Done);
        assert_eq!(slot.release_as(3, given, true, NOW), Settled::Done);
        assert_eq!(slot.attempt(), left);
    }
    // By another token nothing is given back.
    let mut slot = third();
    assert_eq!(slot.abandon_as(2, 1), Settled::Lost);
    assert_eq!(slot.release_as(2, 1, true, NOW), Settled::Lost);
    assert_eq!((slot.state(), slot.attempt()), (Some(State::Running), 3));
    assert_eq!(slot.complete(3, SECOND, NOW), Settled::Done);
    assert_eq!(slot.abandon_as(3, 1), Settled::Lost);
    assert_eq!((slot.state(), slot.attempt()), (Some(State::Completed), 3));
}

#[test]
fn a_released_record_waits_for_its_ttl() {
    let mut slot = claimed();
    assert_eq!(slot.release(1, true, NOW), Settled::Done);
    assert_eq!(won(&slot.claim(2, &request(2), at(1))), Some(1));
}

#[test]
fn a_token_is_held_while_its_record_runs_within_its_time() {
    let mut slot = claimed();
    let held = |slot: &Slot, n, now| super::held(slot.record.as_ref(), token(n), now);
    assert_eq!(held(&slot, 1, at(59)), Settled::Done);
    assert_eq!(held(&slot, 1, at(60)), Settled::Lost);
    assert_eq!(held(&slot, 2, NOW), Settled::Lost);
    assert_eq!(slot.abandon(1), Settled::Done);
    assert_eq!(held(&slot, 1, NOW), Settled::Lost);
    assert_eq!(held(&Slot::default(), 1, NOW), Settled::Lost);
}

#[test]
fn a_purge_takes_what_is_over_and_the_response_before_the_record() {
    let mut slot = claimed();
    assert_eq!(
        purge(slot.record.clone(), at(1 << 20)),
        (slot.record.clone(), false)
    );
    let lifetimes = Lifetimes::new(SECOND * 2).response_ttl(SECOND);
    let (record, _) = complete(slot.record.take(), token(1), outcome(1), lifetimes, NOW);
    assert_eq!(purge(record.clone(), NOW), (record.clone(), false));
    let (tombstone, changed) = purge(record.clone(), at(1));
    assert!(changed);
    let expected = Record {
        response: None,
        ..record.unwrap()
    };
    assert_eq!(tombstone, Some(expected));
    assert_eq!(purge(tombstone.clone(), at(1)), (tombstone.clone(), false));
    assert_eq!(purge(tombstone, at(2)), (None, true));
    assert_eq!(purge(None, NOW), (None, false));
}

#[test]
fn a_claim_sees_no_response_that_is_over() {
    let mut slot = claimed();
    let lifetimes = Lifetimes::new(SECOND * 2).response_ttl(SECOND);
    let (record, _) = complete(slot.record.take(), token(1), outcome(1), lifetimes, NOW);
    slot.record = record;
    let answer = slot.claim(2, &request(2), at(1));
    assert!(
        matches!(&answer, Claim::Completed(record) if record.response.is_none() && record.status.is_some()),
        "{answer:?}"
    );
    assert_eq!(slot.state(), Some(State::Completed));
}

#[test]
fn an_abandoned_record_expires_only_when_its_claim_said_so() {
    let mut slot = claimed();
    assert_eq!(slot.abandon(1), Settled::Done);
    assert!(
        !slot
            .record
            .unwrap()
            .is_expired(Timestamp::from_micros(i64::MAX))
    );

    let mut slot = Slot::default();
    let bounded = ClaimRequest {
        abandoned_ttl: Some(SECOND * 5),
        ..request(1)
    };
    assert_eq!(won(&slot.claim(1, &bounded, NOW)), Some(1));
    assert_eq!(slot.abandon(1), Settled::Done);
    assert_eq!(
        held(&slot.claim(2, &request(2), at(64))),
        Some(("abandoned", token(1)))
    );
    assert_eq!(won(&slot.claim(2, &request(2), at(65))), Some(1));
}

#[test]
fn the_longest_durations_never_end_and_never_overflow() {
    let mut slot = Slot::default();
    let endless = ClaimRequest {
        lease: Duration::MAX,
        max_run: Duration::MAX,
        abandoned_ttl: Some(Duration::MAX),
        ..request(1)
    };
    assert_eq!(won(&slot.claim(1, &endless, NOW)), Some(1));
    let late = at(1 << 31);
    assert_eq!(
        held(&slot.claim(2, &request(2), late)),
        Some(("in flight", token(1)))
    );
    assert_eq!(slot.complete(1, Duration::MAX, late), Settled::Done);
    assert!(matches!(
        slot.claim(2, &request(2), at(1 << 31)),
        Claim::Completed(_)
    ));
}

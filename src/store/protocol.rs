//! The life of a record as pure functions: (state, operation, now) → (state, reply). No I/O, no
//! locks, no clock of its own.
//!
//! The memory store runs these directly, the SQL stores are checked against them, and `tests`
//! beside this file walks through every interleaving of a few owners.

use std::{collections::HashMap, time::Duration};

use super::{Claim, ClaimRequest, Completion, Held, Lifetimes, Settled, Ticket};
use crate::record::{Owner, Record, State, Timestamp, Token};

/// Until when each store instance is believed alive.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct Leases(HashMap<Owner, Timestamp>);

impl Leases {
    /// Extends the owner's lease; a shorter one never cuts a longer one.
    pub(crate) fn extend(&mut self, owner: Owner, lease: Duration, now: Timestamp) {
        let until = self.0.entry(owner).or_insert(now);
        *until = (*until).max(now.after(lease));
    }

    pub(crate) fn give_up(&mut self, owner: Owner) {
        self.0.remove(&owner);
    }

    /// A lapsed lease and none are the same thing, so lapsed ones need not be kept.
    pub(crate) fn forget_lapsed(&mut self, now: Timestamp) {
        self.0.retain(|_, until| *until > now);
    }

    fn alive(&self, owner: Owner, now: Timestamp) -> bool {
        self.0.get(&owner).is_some_and(|until| *until > now)
    }
}

impl Record {
    /// Nobody is believed to be working on it any more, and it has no outcome.
    pub(crate) fn is_abandoned(&self, leases: &Leases, now: Timestamp) -> bool {
        match self.state {
            State::Running => self.run_until <= now || !leases.alive(self.owner, now),
            State::Abandoned => true,
            State::Completed | State::Released => false,
        }
    }

    /// Takes the response out once its own lifetime is over. Answers whether there was one to take.
    pub(crate) fn drop_expired_response(&mut self, now: Timestamp) -> bool {
        let over = self.response_expires.is_some_and(|expires| expires <= now);
        over && self.response.take().is_some()
    }

    /// A run that ended in order, or never began, is given back with a smaller attempt. None at all says
    /// nothing.
    fn give_back(&mut self, attempt: u32) {
        if attempt != 0 {
            self.attempt = self.attempt.min(attempt);
        }
    }
}

/// Contract 1–6, 8, 11–14. The caller extends the owner's lease when the answer is `Won`.
pub(crate) fn claim(
    slot: Option<Record>,
    request: &ClaimRequest,
    owner: Owner,
    leases: &Leases,
    now: Timestamp,
) -> (Option<Record>, Claim) {
    let Some(record) = slot.filter(|record| !record.is_expired(now)) else {
        let record = Record::claimed(request, owner, now);
        let ticket = record.ticket();
        return (Some(record), Claim::Won(ticket));
    };
    if record.state == State::Running && record.token == request.token {
        let ticket = record.ticket();
        return (Some(record), Claim::Won(ticket));
    }
    if let Some(standing) = stands_in_the_way(&record, request, leases, now) {
        return (Some(record), standing);
    }
    let next = Record {
        attempt: record.attempt.saturating_add(1),
        created: record.created,
        request_id: record.request_id,
        ..Record::claimed(request, owner, now)
    };
    let ticket = next.ticket();
    (Some(next), Claim::Won(ticket))
}

/// The answer to a rival's claim on a live record that it may not take over; nothing changes.
fn stands_in_the_way(
    record: &Record,
    request: &ClaimRequest,
    leases: &Leases,
    now: Timestamp,
) -> Option<Claim> {
    if record.state == State::Completed {
        let mut record = record.clone();
        record.drop_expired_response(now);
        return Some(Claim::Completed(Box::new(record)));
    }
    let claimable = record.state == State::Released || record.is_abandoned(leases, now);
    if !claimable {
        return Some(Claim::InFlight(Held::of(record)));
    }
    let may = request.replaces == Some(record.token);
    (!may).then(|| Claim::Abandoned(Held::of(record)))
}

/// What [`claim`] would answer, where it would change nothing: cheaper, since the record stays
/// where it is.
pub(crate) fn look(
    record: &Record,
    request: &ClaimRequest,
    leases: &Leases,
    now: Timestamp,
) -> Option<Claim> {
    if record.is_expired(now) || record.token == request.token {
        return None;
    }
    stands_in_the_way(record, request, leases, now)
}

/// Contract 15–17, 19.
pub(crate) fn complete(
    slot: Option<Record>,
    token: Token,
    done: Completion,
    lifetimes: Lifetimes,
    now: Timestamp,
) -> (Option<Record>, Settled) {
    let Some(mut record) = slot else {
        return (None, Settled::Lost);
    };
    if record.token != token || record.state == State::Released {
        return (Some(record), Settled::Lost);
    }
    if record.state != State::Completed {
        record.state = State::Completed;
        record.completed = Some(now);
        record.expires = Some(now.after(lifetimes.ttl));
        record.response_expires = lifetimes.response_ttl.map(|ttl| now.after(ttl));
        record.status = Some(done.status);
        record.response = done.response;
    }
    (Some(record), Settled::Done)
}

/// Contract 17 and 18.
pub(crate) fn release(
    slot: Option<Record>,
    token: Token,
    attempt: u32,
    has_checkpoints: bool,
    ttl: Duration,
    now: Timestamp,
) -> (Option<Record>, Settled) {
    match slot {
        Some(record) if record.token == token && record.state == State::Released => {
            (Some(record), Settled::Done)
        }
        Some(mut record) if record.token == token && record.state != State::Completed => {
            if !has_checkpoints {
                return (None, Settled::Done);
            }
            record.state = State::Released;
            record.give_back(attempt);
            record.expires = Some(now.after(ttl));
            (Some(record), Settled::Done)
        }
        slot => (slot, Settled::Lost),
    }
}

/// Contract 12 and 17.
pub(crate) fn abandon(
    slot: Option<Record>,
    token: Token,
    attempt: u32,
) -> (Option<Record>, Settled) {
    match slot {
        Some(mut record)
            if record.token == token
                && matches!(record.state, State::Running | State::Abandoned) =>
        {
            record.state = State::Abandoned;
            record.give_back(attempt);
            (Some(record), Settled::Done)
        }
        slot => (slot, Settled::Lost),
    }
}

/// Contract 10: whether this token still holds the record and may go on.
pub(crate) fn held(slot: Option<&Record>, token: Token, now: Timestamp) -> Settled {
    match slot {
        Some(record)
            if record.token == token
                && record.state == State::Running
                && record.run_until > now =>
        {
            Settled::Done
        }
        _ => Settled::Lost,
    }
}

/// A record to be taken over, and by whom (contract 33).
pub(crate) struct TakingOver {
    /// The token it has.
    pub(crate) abandoned: Token,
    /// The token it gets.
    pub(crate) token: Token,
    /// How long that holds.
    pub(crate) hold: Duration,
    /// Who holds it.
    pub(crate) owner: Owner,
}

/// Contract 33. The caller extends the owner's lease to the end of the hold when the answer is a ticket.
pub(crate) fn take_over(
    slot: Option<Record>,
    taking: &TakingOver,
    leases: &Leases,
    now: Timestamp,
) -> (Option<Record>, Option<Ticket>) {
    match slot {
        Some(record) if record.is_expired(now) => (Some(record), None),
        Some(record) if held(Some(&record), taking.token, now) == Settled::Done => {
            let ticket = record.ticket();
            (Some(record), Some(ticket))
        }
        // Its own token would fence nobody off.
        Some(mut record)
            if record.token == taking.abandoned
                && taking.token != taking.abandoned
                && record.is_abandoned(leases, now) =>
        {
            record.token = taking.token;
            record.owner = taking.owner;
            record.state = State::Running;
            record.run_until = now.after(taking.hold);
            let ticket = record.ticket();
            (Some(record), Some(ticket))
        }
        slot => (slot, None),
    }
}

/// Contract 22: what a purge makes of a record, and whether that changed anything.
pub(crate) fn purge(slot: Option<Record>, now: Timestamp) -> (Option<Record>, bool) {
    match slot {
        Some(record) if record.is_expired(now) => (None, true),
        Some(mut record) => {
            let changed = record.drop_expired_response(now);
            (Some(record), changed)
        }
        None => (None, false),
    }
}

#[cfg(test)]
#[path = "protocol_tests.rs"]
mod tests;

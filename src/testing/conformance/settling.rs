//! Contract 15 to 18: how a run ends.

use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;

use super::{
    Harness,
    support::{
        CROWD, ensure, ensure_eq, id, leased, names, one_winner, open, outcome, replacing, request,
        stranger, ticks, together,
    },
};
use crate::{
    State,
    store::{Checkpoint, ClaimRequest, Completion, Lifetimes, Settled, Ticket},
};

const LONG: Duration = Duration::from_secs(24 * 3600);

/// Contract 15.
///
/// # Panics
///
/// When the store breaks it.
pub async fn c15_complete_records_the_outcome<H: Harness>() {
    let harness = H::new().await;
    let (one, two) = (open(&harness, 15).await, open(&harness, 15).await);
    let short = open(&harness, 15).await;
    let plain = one.win(&request("plain")).await;
    let lapsed = short.win(&leased::<H>("lapsed", 1)).await;
    let over = ClaimRequest {
        max_run: H::TICK,
        ..request("over")
    };
    let over = one.win(&over).await;
    let marked = one.win(&request("marked")).await;
    one.give_up(&marked).await;
    let second = one.win(&request("taken")).await;
    one.give_up(&second).await;
    let taken = two.win_as(2, &replacing("taken", second.token)).await;
    ticks(&harness, 2).await;
    for key in ["lapsed", "over", "marked"] {
        two.find_abandoned(&request(key)).await;
    }

    // Any instance on the data may bring the outcome: the token proves it.
    let cases = [
        (&plain, &one),
        (&lapsed, &short),
        (&over, &two),
        (&marked, &one),
        (&taken, &one),
    ];
    for (ticket, store) in cases {
        let before = one.found(&ticket.id).await;
        let lifetimes = Lifetimes::new(LONG).response_ttl(LONG / 2);
        let settled = store.complete(ticket, outcome(ticket), lifetimes).await;
        store.done("complete", settled);
        let record = two.is(&ticket.id, State::Completed).await;
        let done = outcome(ticket);
        ensure_eq!(
            15,
            (record.status, record.response.clone()),
            (Some(done.status), done.response),
            "status and response must be written"
        );
        let Some(at) = record.completed else {
            panic!("contract 15: the time of completion must be written; the store answered None");
        };
        ensure_eq!(
            15,
            (record.expires, record.response_expires),
            (Some(at.after(LONG)), Some(at.after(LONG / 2))),
            "the lifetimes must be counted from the completion"
        );
        ensure_eq!(
            15,
            (
                record.token,
                record.attempt,
                record.created,
                record.fingerprint
            ),
            (
                before.token,
                before.attempt,
                before.created,
                before.fingerprint
            ),
            "what the claim wrote must stay"
        );
        let found = two.find_completed(&request(ticket.id.key.as_bytes())).await;
        ensure_eq!(15, found, record, "a claim must be answered the outcome");
    }

    let ticket = one.win(&request("tombstone")).await;
    let done = Completion::tombstone(StatusCode::ACCEPTED);
    one.done(
        "complete",
        one.complete(&ticket, done, Lifetimes::new(LONG)).await,
    );
    let record = two.is(&ticket.id, State::Completed).await;
    ensure_eq!(
        15,
        (record.status, record.response, record.response_expires),
        (Some(StatusCode::ACCEPTED), None, None),
        "a tombstone keeps the status and no response"
    );
}

/// Contract 16.
///
/// # Panics
///
/// When the store breaks it.
pub async fn c16_complete_sent_again_changes_nothing<H: Harness>() {
    let harness = H::new().await;
    let (one, two) = (open(&harness, 16).await, open(&harness, 16).await);
    let ticket = one.win(&request("a")).await;
    one.finish(&ticket, LONG).await;
    let before = one.found(&ticket.id).await;
    ticks(&harness, 1).await;
    for store in [&one, &two] {
        let other = Completion::retained(StatusCode::OK, Bytes::from_static(b"another"));
        let settled = store
            .complete(&ticket, other, Lifetimes::new(LONG * 2))
            .await;
        store.done("complete sent again", settled);
        ensure_eq!(
            16,
            store.found(&ticket.id).await,
            before,
            "the first outcome must stay"
        );
    }

    let ticket = one.win(&request("b")).await;
    let settled = together(CROWD, |task| {
        let (ticket, store) = (
            ticket.clone(),
            if task % 2 == 0 { &one } else { &two }.clone(),
        );
        async move {
            let response = Bytes::from(task.to_string());
            let done = Completion::retained(StatusCode::OK, response);
            store.complete(&ticket, done, Lifetimes::new(LONG)).await
        }
    })
    .await;
    let all = settled.iter().all(|settled| *settled == Settled::Done);
    ensure!(
        16,
        all,
        settled,
        "every copy of its completion must be acknowledged"
    );
    let first = one.is(&ticket.id, State::Completed).await;
    one.finish(&ticket, LONG).await;
    ensure_eq!(
        16,
        two.found(&ticket.id).await,
        first,
        "the first outcome must stay"
    );
}

/// Contract 17.
///
/// # Panics
///
/// When the store breaks it.
pub async fn c17_other_tokens_change_nothing<H: Harness>() {
    let harness = H::new().await;
    let (one, two) = (open(&harness, 17).await, open(&harness, 17).await);
    let mut tickets = Vec::new();
    for key in ["running", "abandoned", "completed", "released"] {
        let ticket = one.win(&request(key)).await;
        one.keep(&ticket, "step", b"1").await;
        tickets.push(ticket);
    }
    one.give_up(&tickets[1]).await;
    one.finish(&tickets[2], LONG).await;
    one.done("release", one.release(&tickets[3], LONG).await);
    let running: &Ticket = &tickets[0];
    for ticket in &tickets {
        for store in [&one, &two] {
            store.fenced(&stranger(ticket)).await;
        }
    }
    let step = Some(vec![Checkpoint::new("step", b"1".as_slice().into())]);
    ensure_eq!(
        17,
        names(&one.load(running).await),
        names(&step),
        "checkpoints must not be changed by another token"
    );

    // Its token alone does not help where there is no record.
    one.fenced(&request("absent").ticket(1)).await;
    let gone = one.win(&request("gone")).await;
    one.done("release", one.release(&gone, LONG).await);
    one.fenced(&gone).await;
    ensure_eq!(
        17,
        two.get(&gone.id).await,
        None,
        "a lost operation must not make a record"
    );

    // A replaced owner is a stranger, while its successor runs and after.
    let first = &tickets[1];
    let second = two.win_as(2, &replacing("abandoned", first.token)).await;
    one.fenced(first).await;
    two.finish(&second, LONG).await;
    one.fenced(first).await;

    // What is completed is not given back, not even by its own token.
    let completed = &tickets[2];
    let before = one.found(&completed.id).await;
    one.lost("release", one.release(completed, LONG).await);
    one.lost("abandon", one.abandon(completed).await);
    one.lost("save", one.save(completed, "late", b"late").await);
    ensure_eq!(
        17,
        one.found(&completed.id).await,
        before,
        "a completed record must stay"
    );
}

/// Contract 18.
///
/// # Panics
///
/// When the store breaks it.
pub async fn c18_release_frees_the_key<H: Harness>() {
    let harness = H::new().await;
    let stores = [open(&harness, 18).await, open(&harness, 18).await];
    let one = &stores[0];
    let ticket = one.win(&request("a")).await;
    one.done("release", one.release(&ticket, LONG).await);
    ensure_eq!(18, one.get(&ticket.id).await, None, "nothing must remain");
    let claims = together(CROWD, |task| {
        let (store, request) = (stores[task % 2].clone(), request("a"));
        async move { store.claim(&request).await }
    })
    .await;
    let winner = one_winner(18, claims);
    ensure_eq!(18, winner.attempt, 1, "a freed key begins anew");
    // What it had marked abandoned an owner may still give back: it knows that nothing happened.
    one.give_up(&winner).await;
    one.done("release", one.release(&winner, LONG).await);
    one.win_as(1, &request("a")).await;

    // With checkpoints there is something to continue.
    let first = ClaimRequest {
        request_id: Some("req-1".into()),
        ..request("b")
    };
    let ticket = one.win(&first).await;
    let created = one.found(&first.id).await.created;
    one.keep(&ticket, "step", b"1").await;
    for _ in 0..2 {
        one.done("release", one.release(&ticket, H::TICK * 3).await);
    }
    one.is(&id("b"), State::Released).await;
    for store in &stores {
        let held = store.find_abandoned(&request("b")).await;
        ensure!(
            18,
            held.released,
            held,
            "a claim must be told that it was released"
        );
        ensure_eq!(
            18,
            held.token,
            ticket.token,
            "the token to be named must be told"
        );
    }
    let claims = together(CROWD, |task| {
        let (store, request) = (stores[task % 2].clone(), replacing("b", ticket.token));
        async move { store.claim(&request).await }
    })
    .await;
    let second = one_winner(18, claims);
    let step = Some(vec![Checkpoint::new("step", b"1".as_slice().into())]);
    ensure_eq!(
        18,
        names(&one.load(&second).await),
        names(&step),
        "checkpoints must stay"
    );
    let record = one.is(&id("b"), State::Running).await;
    ensure_eq!(
        18,
        (
            record.attempt,
            record.created,
            record.request_id.as_deref(),
            record.expires
        ),
        (2, created, Some("req-1"), None),
        "whoever continues takes the record over and ends its expiry"
    );
    ticks(&harness, 4).await;
    stores[1].in_flight(&request("b")).await;

    // It waits for its `ttl`, then the key is free.
    one.done("release", one.release(&second, H::TICK * 3).await);
    stores[1].find_abandoned(&request("b")).await;
    ticks(&harness, 4).await;
    ensure_eq!(
        18,
        one.get(&id("b")).await,
        None,
        "it must expire after its ttl"
    );
    let third = one.win_as(1, &request("b")).await;
    ensure_eq!(
        18,
        one.load(&third).await,
        Some(Vec::new()),
        "no checkpoint may remain"
    );

    // A second release whose `ttl` reaches no end of time.
    one.keep(&third, "step", b"1").await;
    one.done("release", one.release(&third, Duration::MAX).await);
    ticks(&harness, 4).await;
    stores[1].find_abandoned(&request("b")).await;
    given_back::<H>().await;
}

/// A run that need not count is given back by a ticket with a smaller attempt.
async fn given_back<H: Harness>() {
    let harness = H::new().await;
    let (one, two) = (open(&harness, 18).await, open(&harness, 18).await);
    let mut ticket = one.win(&request("a")).await;
    one.keep(&ticket, "step", b"1").await;
    // Which run it is, what it gives back, and what is left.
    for (attempt, given, left) in [(1, 1, 1), (2, 0, 2), (3, 9, 3), (4, 2, 2), (3, 1, 1)] {
        ensure_eq!(
            18,
            ticket.attempt,
            attempt,
            "the run must be the one after what was left"
        );
        let given = Ticket {
            attempt: given,
            ..ticket.clone()
        };
        one.done("release", one.release(&given, LONG).await);
        for store in [&one, &two] {
            let held = store.find_abandoned(&request("a")).await;
            ensure_eq!(
                18,
                (held.released, held.attempt),
                (true, left),
                "a smaller attempt of the ticket must be written, and no other"
            );
        }
        ticket = two.win(&replacing("a", ticket.token)).await;
    }
    // Released once, it changes no more.
    one.done("release", one.release(&ticket, LONG).await);
    let again = Ticket {
        attempt: 1,
        ..ticket
    };
    one.done("release", one.release(&again, LONG).await);
    let held = two.find_abandoned(&request("a")).await;
    ensure_eq!(
        18,
        held.attempt,
        2,
        "a release sent again must change nothing"
    );
}

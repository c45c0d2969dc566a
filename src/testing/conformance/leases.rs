//! Contract 8 to 12: who is believed alive.

use super::{
    Harness,
    support::{
        Watch, ensure, ensure_eq, first_held, leased, open, replacing, request, stranger, ticks,
    },
};
use crate::store::{ClaimRequest, Held, Settled, Ticket};
use std::time::Duration;

const LONG: Duration = Duration::from_secs(24 * 3600);

/// Contract 8.
///
/// # Panics
///
/// When the store breaks it.
pub async fn c08_a_claim_is_alive_for_its_lease<H: Harness>() {
    let harness = H::new().await;
    let (one, two) = (open(&harness, 8).await, open(&harness, 8).await);
    let first = leased::<H>("a", 4);
    let watch = Watch::start();
    one.win(&first).await;
    two.in_flight(&request("a")).await;
    ticks(&harness, 3).await;
    if watch.surely_within::<H>(H::TICK * 4) {
        two.in_flight(&request("a")).await;
    }
    ticks(&harness, 2).await;
    for store in [&one, &two] {
        let held = store.find_abandoned(&request("a")).await;
        let before = store.found(&first.id).await;
        ensure_eq!(
            8,
            held,
            Held::of(&before),
            "a claim must be told whose it was"
        );
        ensure_eq!(
            8,
            held.token,
            first.token,
            "the lapsed claim must be the one named"
        );
    }

    // The lease of one instance says nothing about the claims of another.
    let watch = Watch::start();
    let second = leased::<H>("b", 4);
    one.win(&second).await;
    ticks(&harness, 3).await;
    let in_time = watch.surely_within::<H>(H::TICK * 4);
    ensure_eq!(8, two.renew(&[], LONG).await, [], "no tickets, no answers");
    one.renew(&[], H::TICK * 4).await;
    ticks(&harness, 3).await;
    if in_time && watch.surely_within::<H>(H::TICK * 7) {
        two.in_flight(&request("b")).await;
    }
    ticks(&harness, 2).await;
    two.find_abandoned(&request("b")).await;

    // A long lease is not lost on the way to the store.
    let third = ClaimRequest {
        lease: LONG,
        ..request("c")
    };
    one.win(&third).await;
    ticks(&harness, 5).await;
    two.in_flight(&request("c")).await;
}

/// Contract 9.
///
/// # Panics
///
/// When the store breaks it.
pub async fn c09_renewing_extends_the_instances_lease<H: Harness>() {
    let harness = H::new().await;
    let (one, two) = (open(&harness, 9).await, open(&harness, 9).await);
    let ticket = one.win(&leased::<H>("a", 2)).await;
    one.win(&leased::<H>("b", 2)).await;
    let settled = one.renew(std::slice::from_ref(&ticket), LONG).await;
    ensure_eq!(9, settled, [Settled::Done], "a held ticket must be renewed");
    ticks(&harness, 3).await;
    for key in ["a", "b"] {
        two.in_flight(&request(key)).await;
    }
    // Neither a shorter renewal nor a claim with a shorter lease cuts it.
    one.renew(&[ticket], H::TICK).await;
    one.win(&leased::<H>("c", 1)).await;
    one.renew(&[], Duration::ZERO).await;
    ticks(&harness, 3).await;
    for key in ["a", "b", "c"] {
        two.in_flight(&request(key)).await;
    }

    // A lapsed lease may be renewed, too: nobody took over, so nothing is lost.
    let three = open(&harness, 9).await;
    let ticket = three.win(&leased::<H>("d", 1)).await;
    ticks(&harness, 2).await;
    two.find_abandoned(&request("d")).await;
    let settled = three.renew(&[ticket], LONG).await;
    ensure_eq!(
        9,
        settled,
        [Settled::Done],
        "a lapsed ticket nobody replaced must be renewed"
    );
    two.in_flight(&request("d")).await;
}

/// Contract 10.
///
/// # Panics
///
/// When the store breaks it.
pub async fn c10_renew_tells_which_tickets_are_lost<H: Harness>() {
    use Settled::{Done, Lost};

    let harness = H::new().await;
    let (one, two) = (open(&harness, 10).await, open(&harness, 10).await);
    let mut tickets = Vec::new();
    for key in [
        "held",
        "replaced",
        "completed",
        "released",
        "kept",
        "given up",
        "forgotten",
        "too",
    ] {
        tickets.push(one.win(&request(key)).await);
    }
    let over = ClaimRequest {
        max_run: H::TICK,
        ..request("over")
    };
    tickets.push(one.win(&over).await);
    one.give_up(&tickets[1]).await;
    let winner = two
        .win_as(2, &replacing("replaced", tickets[1].token))
        .await;
    one.finish(&tickets[2], LONG).await;
    one.done("release", one.release(&tickets[3], LONG).await);
    one.keep(&tickets[4], "step", b"1").await;
    one.done("release", one.release(&tickets[4], LONG).await);
    one.give_up(&tickets[5]).await;
    ensure!(
        10,
        one.forget(&tickets[6].id).await,
        false,
        "forget must find the record"
    );
    ticks(&harness, 2).await;
    let mut expected = vec![Done, Lost, Lost, Lost, Lost, Lost, Lost, Done, Lost];

    tickets.push(stranger(&tickets[0]));
    expected.push(Lost);
    tickets.push(request("never claimed").ticket(1));
    expected.push(Lost);
    tickets.push(winner);
    expected.push(Done);
    tickets.push(tickets[0].clone());
    expected.push(Done);
    let settled = one.renew(&tickets, LONG).await;
    ensure_eq!(
        10,
        settled,
        expected,
        "every ticket must be answered, in order"
    );
    tickets.reverse();
    expected.reverse();
    let settled = two.renew(&tickets, LONG).await;
    ensure_eq!(
        10,
        settled,
        expected,
        "every ticket must be answered, in order"
    );

    // More than one statement of any database takes.
    let held = tickets.pop();
    let many: Vec<_> = (0..1500)
        .map(|at| match &held {
            Some(held) if at % 499 == 0 => held.clone(),
            _ => request(format!("none-{at}")).ticket(1),
        })
        .collect();
    let settled = one.renew(&many, LONG).await;
    ensure_eq!(
        10,
        settled.len(),
        many.len(),
        "every ticket must be answered"
    );
    for (at, settled) in settled.into_iter().enumerate() {
        let expected = if at % 499 == 0 { Done } else { Lost };
        ensure_eq!(
            10,
            settled,
            expected,
            "ticket {at} of many must be answered in its place"
        );
    }
}

/// Contract 11.
///
/// # Panics
///
/// When the store breaks it.
pub async fn c11_a_run_past_its_time_is_abandoned<H: Harness>() {
    let harness = H::new().await;
    let (one, two) = (open(&harness, 11).await, open(&harness, 11).await);
    let first = ClaimRequest {
        max_run: H::TICK * 4,
        lease: LONG,
        ..request("a")
    };
    let watch = Watch::start();
    let ticket = one.win(&first).await;
    ticks(&harness, 3).await;
    if watch.surely_within::<H>(H::TICK * 4) {
        two.in_flight(&request("a")).await;
    }
    ticks(&harness, 2).await;
    one.renew(&[ticket], LONG).await;
    for store in [&one, &two] {
        let held = store.find_abandoned(&request("a")).await;
        ensure_eq!(
            11,
            held.token,
            first.token,
            "the run whose time is over must be named"
        );
    }
    // Whoever takes over has a time of its own.
    two.win_as(2, &replacing("a", first.token)).await;
    one.in_flight(&request("a")).await;
}

/// Contract 12.
///
/// # Panics
///
/// When the store breaks it.
pub async fn c12_a_claim_marked_abandoned_is_abandoned_at_once<H: Harness>() {
    let harness = H::new().await;
    let (one, two) = (open(&harness, 12).await, open(&harness, 12).await);
    let first = ClaimRequest {
        request_id: Some("req-1".into()),
        lease: LONG,
        ..request("a")
    };
    let ticket = one.win(&first).await;
    one.give_up(&ticket).await;
    let expected = first_held(&first);
    for store in [&one, &two] {
        let held = store.find_abandoned(&request("a")).await;
        ensure_eq!(12, held, expected, "a claim must be told whose it was");
    }
    // Sent again, and whatever the lease, it stays so.
    one.give_up(&ticket).await;
    one.renew(&[ticket], LONG).await;
    two.find_abandoned(&request("a")).await;
    given_back::<H>().await;
}

/// A run that need not count is given back by a ticket with a smaller attempt.
async fn given_back<H: Harness>() {
    let harness = H::new().await;
    let (one, two) = (open(&harness, 12).await, open(&harness, 12).await);
    let mut ticket = one.win(&request("b")).await;
    for attempt in 2..=4 {
        one.give_up(&ticket).await;
        ticket = one.win_as(attempt, &replacing("b", ticket.token)).await;
    }
    // None says nothing, a greater one raises nothing, and of several the smallest stays.
    for (given, left) in [
        (0, 4),
        (9, 4),
        (u32::MAX, 4),
        (3, 3),
        (4, 3),
        (0, 3),
        (3, 3),
    ] {
        let given = Ticket {
            attempt: given,
            ..ticket.clone()
        };
        one.give_up(&given).await;
        for store in [&one, &two] {
            let held = store.find_abandoned(&request("b")).await;
            ensure_eq!(
                12,
                held.attempt,
                left,
                "a smaller attempt of the ticket must be written, and no other"
            );
        }
    }
    let next = two.win_as(4, &replacing("b", ticket.token)).await;
    let uncounted = Ticket {
        attempt: 1,
        ..ticket
    };
    one.lost("abandon", one.abandon(&uncounted).await);
    let record = two.found(&next.id).await;
    ensure_eq!(
        12,
        (record.token, record.attempt),
        (next.token, 4),
        "whoever was replaced gives nothing back"
    );
}

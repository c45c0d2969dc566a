//! Contract 24 to 27, and 32: what an operator asks, and how many records a scope has.

use std::time::Duration;

use super::{
    Harness,
    support::{Tried, ensure, ensure_eq, id, leased, live, open, replacing, request, ticks},
};
use crate::{
    Mode, Record, Scope, State, Token,
    store::{Checkpoints, ClaimRequest, Counts, Inspect},
};

const LONG: Duration = Duration::from_secs(24 * 3600);

/// Contract 24.
///
/// # Panics
///
/// When the store breaks it.
pub async fn c24_get_answers_live_records<H: Harness>() {
    let harness = H::new().await;
    let (one, two) = (open(&harness, 24).await, open(&harness, 24).await);
    let first = ClaimRequest {
        request_id: Some("req-1".into()),
        mode: Mode::Transactional,
        abandoned_ttl: Some(LONG),
        ..request("first")
    };
    for store in [&one, &two] {
        ensure_eq!(
            24,
            store.get(&first.id).await,
            None,
            "there is no such record"
        );
    }
    one.win(&first).await;
    let record = two.is(&first.id, State::Running).await;
    // Owner and times are the store's own; all else is the claim's.
    let mut expected = Record::claimed(&first, record.owner, record.created);
    expected.run_until = record.created.after(first.max_run);
    expected.expires = Some(expected.run_until.after(LONG));
    ensure_eq!(
        24,
        record,
        expected,
        "a record must hold what its claim brought"
    );

    let live = live::<H>(&one, &two).await.split_off(1);
    let states = [
        State::Released,
        State::Abandoned,
        State::Completed,
        State::Completed,
        State::Running,
        State::Running,
    ];
    ticks(&harness, 2).await;
    for (ticket, state) in live.iter().zip(states) {
        let record = two.is(&ticket.id, state).await;
        ensure_eq!(
            24,
            (&record.id, record.token),
            (&ticket.id, ticket.token),
            "the record asked for"
        );
        ensure_eq!(
            24,
            one.get(&ticket.id).await,
            Some(record),
            "instances must agree"
        );
    }
    let ticket = one.win(&request("expired")).await;
    one.finish(&ticket, H::TICK).await;
    ticks(&harness, 2).await;
    ensure_eq!(
        24,
        one.get(&ticket.id).await,
        None,
        "an expired record must not be answered"
    );
    ensure_eq!(
        24,
        two.get(&ticket.id).await,
        None,
        "an expired record must not be answered"
    );
}

/// Contract 25.
///
/// # Panics
///
/// When the store breaks it.
pub async fn c25_forget_fences_the_owner_off<H: Harness>() {
    let harness = H::new().await;
    let (one, two) = (open(&harness, 25).await, open(&harness, 25).await);
    let kept = one.win(&request("kept")).await;
    let before = one.found(&kept.id).await;
    for ticket in live::<H>(&one, &two).await {
        ensure!(
            25,
            two.forget(&ticket.id).await,
            false,
            "there was a record to forget"
        );
        for store in [&one, &two] {
            ensure_eq!(
                25,
                store.get(&ticket.id).await,
                None,
                "a forgotten record is gone"
            );
        }
        ensure!(
            25,
            !one.forget(&ticket.id).await,
            true,
            "nothing is forgotten twice"
        );
        one.fenced(&ticket).await;
        ensure_eq!(
            25,
            one.load(&ticket).await,
            None,
            "its checkpoints are gone"
        );
        let new = two.win_as(1, &request(ticket.id.key.as_bytes())).await;
        one.fenced(&ticket).await;
        let settled = one.renew(std::slice::from_ref(&ticket), LONG).await;
        one.lost("renew", settled[0]);
        ensure_eq!(
            25,
            two.load(&new).await,
            Some(Vec::new()),
            "its checkpoints are gone"
        );
    }
    ensure!(
        25,
        !one.forget(&id("never there")).await,
        true,
        "there is nothing to forget"
    );
    let ticket = one.win(&request("expired")).await;
    one.finish(&ticket, H::TICK).await;
    ticks(&harness, 2).await;
    ensure!(
        25,
        !one.forget(&ticket.id).await,
        true,
        "an expired record counts as absent"
    );
    ensure_eq!(
        25,
        one.found(&kept.id).await,
        before,
        "no other record may be touched"
    );
}

/// Contract 26.
///
/// # Panics
///
/// When the store breaks it.
pub async fn c26_counts_count_by_state<H: Harness>() {
    let harness = H::new().await;
    let (one, two) = (open(&harness, 26).await, open(&harness, 26).await);
    ensure_eq!(
        26,
        one.counts().await,
        Counts::default(),
        "an empty store counts nothing"
    );
    live::<H>(&one, &two).await;
    for at in 0..4 {
        let ticket = one.win(&request(format!("expired-{at}"))).await;
        if at % 2 == 0 {
            one.keep(&ticket, "step", b"1").await;
            one.done("release", one.release(&ticket, H::TICK).await);
        } else {
            one.finish(&ticket, H::TICK).await;
        }
    }
    let over = ClaimRequest {
        max_run: H::TICK / 2,
        abandoned_ttl: Some(H::TICK),
        ..request("expired")
    };
    one.give_up(&one.win(&over).await).await;
    let freed = one.win(&request("freed")).await;
    one.done("release", one.release(&freed, LONG).await);
    one.win(&request("second")).await;
    ticks(&harness, 2).await;
    let expected = Counts {
        running: 2,
        completed: 2,
        abandoned: 3,
        released: 1,
    };
    for store in [&one, &two] {
        ensure_eq!(
            26,
            store.counts().await,
            expected,
            "each record counts once, as it would be answered"
        );
    }
    one.purge(1000).await;
    ensure_eq!(
        26,
        two.counts().await,
        expected,
        "purging must not change the counts"
    );
}

/// Contract 27.
///
/// # Panics
///
/// When the store breaks it.
pub async fn c27_abandoned_records_are_listed_in_pages<H: Harness>() {
    let harness = H::new().await;
    let (one, two) = (open(&harness, 27).await, open(&harness, 27).await);
    let mut expected = Vec::new();
    let mut tickets = Vec::new();
    for key in ["f", "b", "e", "a", "d", "c"] {
        let ticket = one.win(&request(key)).await;
        expected.push(ticket.token);
        tickets.push(ticket);
        harness.advance(H::TICK / 8).await;
    }
    expected.push(two.win(&leased::<H>("lapsed", 1)).await.token);
    harness.advance(H::TICK / 8).await;
    let over = ClaimRequest {
        max_run: H::TICK,
        ..request("over")
    };
    expected.push(one.win(&over).await.token);
    for ticket in tickets.iter().rev() {
        one.give_up(ticket).await;
    }
    // A takeover keeps its place, since it keeps `created`.
    let again = one.win_as(2, &replacing("b", tickets[1].token)).await;
    one.give_up(&again).await;
    expected[1] = again.token;

    one.win(&request("running")).await;
    one.finish(&one.win(&request("completed")).await, LONG)
        .await;
    let released = one.win(&request("released")).await;
    one.keep(&released, "step", b"1").await;
    one.done("release", one.release(&released, LONG).await);
    let expired = ClaimRequest {
        max_run: H::TICK / 2,
        abandoned_ttl: Some(H::TICK),
        ..request("expired")
    };
    one.give_up(&one.win(&expired).await).await;
    ticks(&harness, 2).await;

    let all = one.abandoned(None, 100).await;
    ensure!(
        27,
        tokens(&all) == expected,
        keys(&all),
        "all abandoned records must be listed, oldest first"
    );
    // A store may list a record under another name than it was claimed with, as one that hashes names
    // must; by that name it is found.
    for record in &all {
        ensure_eq!(
            27,
            two.found(&record.id).await,
            *record,
            "the record itself must be listed"
        );
    }
    for limit in [1, 3, 8, 9] {
        let listed = pages(&two, limit).await;
        ensure!(
            27,
            tokens(&listed) == expected,
            keys(&listed),
            "pages of {limit} must join to the whole"
        );
    }
    // The place in the list stays even when its record is gone.
    one.forget(&all[2].id).await;
    let rest = two.abandoned(Some(&all[2]), 100).await;
    ensure!(
        27,
        tokens(&rest) == expected[3..],
        keys(&rest),
        "the rest must follow a place that is gone"
    );

    // Records claimed at one time need some order, or a page would skip or repeat one.
    let harness = H::new().await;
    let store = open(&harness, 27).await;
    for at in 0..9 {
        store
            .give_up(&store.win(&request([at, 0xFF, 0])).await)
            .await;
    }
    let listed = pages(&store, 2).await;
    let mut listed: Vec<_> = listed.into_iter().map(|record| record.id).collect();
    let count = listed.len();
    listed.sort();
    listed.dedup();
    ensure_eq!(
        27,
        (count, listed.len()),
        (9, 9),
        "pages must neither skip nor repeat records"
    );
}

async fn pages<S: Inspect + Checkpoints>(store: &Tried<S>, limit: usize) -> Vec<Record> {
    let mut listed: Vec<Record> = Vec::new();
    loop {
        let page = store.abandoned(listed.last(), limit).await;
        ensure!(
            27,
            page.len() <= limit,
            page.len(),
            "a page must keep to its limit of {limit}"
        );
        ensure!(
            27,
            listed.len() < 100,
            listed.len(),
            "the pages must come to an end"
        );
        if page.is_empty() {
            return listed;
        }
        listed.extend(page);
    }
}

fn tokens(records: &[Record]) -> Vec<Token> {
    records.iter().map(|record| record.token).collect()
}

/// Contract 32.
///
/// # Panics
///
/// When the store breaks it.
pub async fn c32_records_are_counted_by_scope<H: Harness>() {
    let harness = H::new().await;
    let (one, two) = (open(&harness, 32).await, open(&harness, 32).await);
    let tenant = id("any").scope;
    ensure_eq!(
        32,
        one.count_in(&tenant, 100).await,
        0,
        "a scope without records has none"
    );

    let live = live::<H>(&one, &two).await;
    let over = ClaimRequest {
        max_run: H::TICK / 2,
        abandoned_ttl: Some(H::TICK),
        ..request("over, and forgotten")
    };
    one.give_up(&one.win(&over).await).await;
    let released = one.win(&request("released, and expired")).await;
    one.keep(&released, "step", b"1").await;
    one.done("release", one.release(&released, H::TICK).await);
    for at in 0..4 {
        let expired = one.win(&request(format!("expired-{at}"))).await;
        one.finish(&expired, H::TICK).await;
    }
    let freed = one.win(&request("freed")).await;
    one.done("release", one.release(&freed, LONG).await);
    // Neighbours of the scope, byte for byte, and the one that everybody shares.
    let others: [(&[u8], u64); 5] = [
        (b"", 3),
        (b"tenan", 1),
        (b"tenant\0", 2),
        (b"Tenant", 1),
        (&[0xFF; 255], 2),
    ];
    for (scope, records) in others {
        for at in 0..records {
            let mut other = request(at.to_be_bytes());
            other.id.scope = Scope::new(scope);
            one.win(&other).await;
        }
    }
    ticks(&harness, 2).await;

    let there = live.len() as u64;
    for store in [&one, &two] {
        for at_most in [100, u64::MAX, there + 1, there, there - 1, 1, 0] {
            ensure_eq!(
                32,
                store.count_in(&tenant, at_most).await,
                there.min(at_most),
                "live records must be counted, whatever their state, up to {at_most}"
            );
        }
        for (scope, records) in others {
            ensure_eq!(
                32,
                store.count_in(&Scope::new(scope), 100).await,
                records,
                "each scope has its own records"
            );
        }
    }
    one.purge(1000).await;
    ensure_eq!(
        32,
        two.count_in(&tenant, 100).await,
        there,
        "purging must not change the count"
    );

    // A takeover and a completion add nothing, and what goes is gone.
    let again = one.win_as(2, &replacing("abandoned", live[2].token)).await;
    one.finish(&again, LONG).await;
    ensure_eq!(
        32,
        two.count_in(&tenant, 100).await,
        there,
        "a record counts once, however often it is claimed"
    );
    one.win(&request("expired-0")).await;
    ensure_eq!(
        32,
        two.count_in(&tenant, 100).await,
        there + 1,
        "a key that is claimed anew counts again"
    );
    for ticket in &live {
        one.forget(&ticket.id).await;
    }
    ensure_eq!(
        32,
        two.count_in(&tenant, 100).await,
        1,
        "forgotten records must not be counted"
    );
}

/// The suite's own keys are no secrets, and a message without them helps nobody.
fn keys(records: &[Record]) -> Vec<String> {
    let key = |record: &Record| String::from_utf8_lossy(record.id.key.as_bytes()).into_owned();
    records.iter().map(key).collect()
}

//! Contract 1 to 7: who wins.

use std::{sync::Arc, time::Duration};

use super::{
    Harness,
    support::{
        CROWD, ensure, ensure_eq, first_held, id, leased, one_winner, open, outcome, replacing,
        request, ticks, together,
    },
};
use crate::{
    Fingerprint, IdempotencyKey, Mode, RecordId, Scope, State, Token,
    store::{Claim, ClaimRequest, Held, Lifetimes},
};

const LONG: Duration = Duration::from_secs(24 * 3600);

/// A claim that brings other things along than [`request`] does.
fn different(key: &str) -> ClaimRequest {
    ClaimRequest {
        scheme: "conformance-2".into(),
        fingerprint: Fingerprint::from_bytes([2; 32]),
        request_id: Some(Arc::from("req-different")),
        mode: Mode::Transactional,
        ..request(key)
    }
}

/// Contract 1.
///
/// # Panics
///
/// When the store breaks it.
pub async fn c01_a_claim_without_a_record_is_won<H: Harness>() {
    let harness = H::new().await;
    let store = open(&harness, 1).await;
    store.win_as(1, &request("a")).await;
    store.win_as(1, &different("b")).await;
    // Whoever means to take over finds nothing to take over and simply begins.
    store.win_as(1, &replacing("c", Token::random())).await;
    let other = open(&harness, 1).await;
    other.win_as(1, &request("d")).await;
}

/// Contract 2.
///
/// # Panics
///
/// When the store breaks it.
pub async fn c02_of_simultaneous_claims_exactly_one_is_won<H: Harness>() {
    let harness = H::new().await;
    let stores = [open(&harness, 2).await, open(&harness, 2).await];
    for round in 0..8 {
        let key = format!("key-{round}");
        let claims = together(CROWD, |task| {
            let (store, request) = (stores[task % 2].clone(), request(&key));
            async move { store.claim(&request).await }
        })
        .await;
        let winner = one_winner(2, claims);
        let record = stores[1].found(&winner.id).await;
        ensure_eq!(
            2,
            record.token,
            winner.token,
            "the record must carry the winner's token"
        );
    }
}

/// Contract 3.
///
/// # Panics
///
/// When the store breaks it.
pub async fn c03_a_claim_on_a_running_record_changes_nothing<H: Harness>() {
    let harness = H::new().await;
    let (one, two) = (open(&harness, 3).await, open(&harness, 3).await);
    for (first, second) in [
        (request("a"), different("a")),
        (different("b"), request("b")),
    ] {
        one.win(&first).await;
        let before = one.found(&first.id).await;
        let expected = first_held(&first);
        for store in [&one, &two] {
            let held = store.in_flight(&second).await;
            ensure_eq!(3, held, expected, "a claim must be told of the first one");
        }
        ensure_eq!(
            3,
            one.found(&first.id).await,
            before,
            "a claim on a running record must change nothing"
        );
        let settled = one
            .complete(
                &first.ticket(1),
                outcome(&first.ticket(1)),
                Lifetimes::new(LONG),
            )
            .await;
        one.done("complete", settled);
    }
}

/// Contract 4.
///
/// # Panics
///
/// When the store breaks it.
pub async fn c04_a_claim_on_a_completed_record_answers_it<H: Harness>() {
    let harness = H::new().await;
    let (one, two) = (open(&harness, 4).await, open(&harness, 4).await);
    let first = different("a");
    let ticket = one.win(&first).await;
    one.finish(&ticket, LONG).await;
    let record = one.is(&first.id, State::Completed).await;
    let done = outcome(&ticket);
    let kept = (record.status, record.response.clone());
    ensure_eq!(
        4,
        kept,
        (Some(done.status), done.response),
        "the record must hold the outcome"
    );
    ensure_eq!(
        4,
        Held::of(&record),
        first_held(&first),
        "the record must hold what the claim brought"
    );
    for store in [&one, &two] {
        for second in [request("a"), replacing("a", first.token), first.clone()] {
            let answer = store.find_completed(&second).await;
            ensure_eq!(4, answer, record, "a claim must be answered the record");
        }
    }
    let claims = together(CROWD, |_| {
        let (store, request) = (two.clone(), request("a"));
        async move { store.find_completed(&request).await }
    })
    .await;
    let same = claims.iter().all(|answer| *answer == record);
    ensure!(4, same, claims, "every claim must be answered the record");
    ensure_eq!(
        4,
        one.found(&first.id).await,
        record,
        "claims on a completed record must change nothing"
    );
}

/// Contract 5.
///
/// # Panics
///
/// When the store breaks it.
pub async fn c05_a_claim_sent_again_is_won_again<H: Harness>() {
    let harness = H::new().await;
    let (one, two) = (open(&harness, 5).await, open(&harness, 5).await);
    let first = leased::<H>("a", 4);
    let ticket = one.win_as(1, &first).await;
    let before = one.found(&first.id).await;
    let again = together(16, |_| {
        let (store, request) = (one.clone(), first.clone());
        async move { store.claim(&request).await }
    })
    .await;
    let won = again
        .iter()
        .all(|claim| *claim == Claim::Won(ticket.clone()));
    ensure!(5, won, again, "a claim sent again must be won again");
    ensure_eq!(
        5,
        one.found(&first.id).await,
        before,
        "a claim sent again must change nothing"
    );
    two.in_flight(&request("a")).await;

    // Sent again late it is alive again, as long as nobody took over.
    ticks(&harness, 6).await;
    two.find_abandoned(&request("a")).await;
    one.win_as(
        1,
        &ClaimRequest {
            lease: LONG,
            ..first.clone()
        },
    )
    .await;
    two.in_flight(&request("a")).await;

    // A takeover is recognised the same way; the one it replaced is a rival now.
    one.give_up(&ticket).await;
    let second = replacing("a", first.token);
    two.win_as(2, &second).await;
    two.win_as(2, &second).await;
    let held = one.in_flight(&first).await;
    ensure_eq!(
        5,
        held.token,
        second.token,
        "a replaced claim that is sent again is not its record's any more"
    );

    // Once it does not run any more, there is nothing to win again.
    two.give_up(&second.ticket(2)).await;
    two.find_abandoned(&second).await;
    two.finish(&second.ticket(2), LONG).await;
    two.find_completed(&second).await;
}

/// Contract 6.
///
/// # Panics
///
/// When the store breaks it.
pub async fn c06_an_expired_record_is_as_good_as_absent<H: Harness>() {
    let harness = H::new().await;
    let stores = [open(&harness, 6).await, open(&harness, 6).await];
    let lasting = H::TICK * 2;

    let completed = request("completed");
    let ticket = stores[0].win(&completed).await;
    stores[0].keep(&ticket, "step", b"1").await;
    stores[0].finish(&ticket, lasting).await;

    let released = request("released");
    let ticket = stores[0].win(&released).await;
    stores[0].keep(&ticket, "step", b"1").await;
    stores[0].done("release", stores[0].release(&ticket, lasting).await);

    let abandoned = ClaimRequest {
        max_run: H::TICK,
        abandoned_ttl: Some(H::TICK),
        ..request("abandoned")
    };
    let ticket = stores[0].win(&abandoned).await;
    stores[0].keep(&ticket, "step", b"1").await;
    stores[0].give_up(&ticket).await;

    ticks(&harness, 3).await;
    for old in [completed, released, abandoned] {
        let claims = together(CROWD, |task| {
            let request = ClaimRequest {
                id: old.id.clone(),
                request_id: Some(Arc::from("req-new")),
                ..request("")
            };
            let store = stores[task % 2].clone();
            async move { store.claim(&request).await }
        })
        .await;
        let winner = one_winner(6, claims);
        ensure_eq!(6, winner.attempt, 1, "the winner begins anew");
        ensure_eq!(
            6,
            stores[1].load(&winner).await,
            Some(Vec::new()),
            "nothing of the earlier record's checkpoints may remain"
        );
        let record = stores[1].is(&winner.id, State::Running).await;
        let rest = (record.status, record.response.clone(), record.completed);
        ensure_eq!(
            6,
            rest,
            (None, None, None),
            "nothing of the earlier record's outcome may remain"
        );
        ensure_eq!(
            6,
            record.request_id.as_deref(),
            Some("req-new"),
            "the request id is the new request's"
        );
        stores[0].fenced(&old.ticket(1)).await;
    }
}

/// Contract 7.
///
/// # Panics
///
/// When the store breaks it.
pub async fn c07_scope_and_key_are_compared_byte_for_byte<H: Harness>() {
    let harness = H::new().await;
    let store = open(&harness, 7).await;
    let longest = [0xFF; 255];
    let strings: [&[u8]; 17] = [
        b"a",
        b"A",
        b"ab",
        b"abc",
        b"bc",
        b"c",
        b"a ",
        b" a",
        b"a\0",
        b"\0",
        b"\0\0",
        b"%",
        b"_",
        b"\xC3",
        b"\xC3\xA5",
        b"a\xFF",
        &longest,
    ];
    let mut requests = Vec::new();
    for scope in strings.iter().chain([&&b""[..]]) {
        for key in strings {
            let id = RecordId::new(Scope::new(scope), IdempotencyKey::new(key));
            requests.push(ClaimRequest { id, ..request("") });
        }
    }
    for request in &requests {
        store.win_as(1, request).await;
    }
    for first in &requests {
        let second = ClaimRequest {
            token: Token::random(),
            ..first.clone()
        };
        let held = store.in_flight(&second).await;
        ensure_eq!(
            7,
            held.token,
            first.token,
            "a claim must find the record of exactly its scope and key"
        );
    }
    for first in requests.iter().step_by(5) {
        store.finish(&first.ticket(1), LONG).await;
    }
    for (at, first) in requests.iter().enumerate() {
        let record = store.found(&first.id).await;
        ensure_eq!(
            7,
            record.id,
            first.id,
            "scope and key must come back as given"
        );
        let state = if at % 5 == 0 {
            State::Completed
        } else {
            State::Running
        };
        ensure_eq!(
            7,
            (record.token, record.state),
            (first.token, state),
            "completing must touch the record of exactly its scope and key"
        );
    }
    ensure_eq!(
        7,
        store.get(&id("a")).await,
        None,
        "no other record may be found"
    );
}

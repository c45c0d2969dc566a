//! Contract 13 and 14: who takes over.

use std::{sync::Arc, time::Duration};

use super::{
    Harness,
    support::{
        CROWD, ensure_eq, leased, names, one_winner, open, replacing, request, ticks, together,
    },
};
use crate::{
    Fingerprint, State, Token,
    store::{Checkpoint, ClaimRequest},
};

const LONG: Duration = Duration::from_secs(24 * 3600);

/// Contract 13.
///
/// # Panics
///
/// When the store breaks it.
pub async fn c13_takeover_names_the_token_it_replaces<H: Harness>() {
    let harness = H::new().await;
    let owner = open(&harness, 13).await;
    let stores = [open(&harness, 13).await, open(&harness, 13).await];
    let named = |request: ClaimRequest| ClaimRequest {
        request_id: Some(Arc::from("req-first")),
        ..request
    };
    let marked = named(request("marked"));
    let over = named(ClaimRequest {
        max_run: H::TICK,
        ..request("over")
    });
    let lapsed = named(leased::<H>("lapsed", 1));
    for first in [&marked, &over] {
        let ticket = stores[0].win(first).await;
        stores[0].keep(&ticket, "step", b"1").await;
    }
    let ticket = owner.win(&lapsed).await;
    owner.keep(&ticket, "step", b"1").await;
    stores[0].give_up(&marked.ticket(1)).await;
    ticks(&harness, 2).await;

    for first in [marked, over, lapsed] {
        let before = stores[0].found(&first.id).await;
        let key = first.id.key.as_bytes().to_vec();
        let held = stores[1].find_abandoned(&request(&key)).await;
        ensure_eq!(
            13,
            held.token,
            first.token,
            "the token to be named must be told"
        );
        ensure_eq!(
            13,
            stores[0].found(&first.id).await,
            before,
            "a claim that names no token must change nothing"
        );
        let claims = together(CROWD, |task| {
            let request = ClaimRequest {
                request_id: Some(Arc::from("req-second")),
                fingerprint: Fingerprint::from_bytes([2; 32]),
                ..replacing(&key, first.token)
            };
            let store = stores[task % 2].clone();
            async move { store.claim(&request).await }
        })
        .await;
        let winner = one_winner(13, claims);
        ensure_eq!(13, winner.attempt, 2, "the attempt must be one more");
        let record = stores[1].is(&first.id, State::Running).await;
        ensure_eq!(
            13,
            (
                record.token,
                record.attempt,
                record.created,
                record.request_id.as_deref()
            ),
            (winner.token, 2, before.created, Some("req-first")),
            "token and attempt are the winner's, `created` and request id stay"
        );
        let step = Some(vec![Checkpoint::new("step", b"1".as_slice().into())]);
        ensure_eq!(
            13,
            names(&stores[0].load(&winner).await),
            names(&step),
            "checkpoints must stay"
        );
        stores[0].in_flight(&request(&key)).await;

        stores[0].give_up(&winner).await;
        let third = stores[1].win_as(3, &replacing(&key, winner.token)).await;
        stores[1].finish(&third, LONG).await;
        let record = stores[0].is(&first.id, State::Completed).await;
        ensure_eq!(
            13,
            (record.attempt, record.created),
            (3, before.created),
            "a completed record must tell its attempt and when it was first claimed"
        );
    }
}

/// Contract 14.
///
/// # Panics
///
/// When the store breaks it.
pub async fn c14_nothing_else_takes_over<H: Harness>() {
    let harness = H::new().await;
    let (one, two) = (open(&harness, 14).await, open(&harness, 14).await);
    let first = request("a");
    let ticket = one.win(&first).await;

    let alive = one.found(&first.id).await;
    for store in [&one, &two] {
        store.in_flight(&replacing("a", first.token)).await;
        store.in_flight(&replacing("a", Token::random())).await;
    }
    let crowd = together(CROWD, |_| {
        let (store, request) = (two.clone(), replacing("a", first.token));
        async move { store.in_flight(&request).await }
    });
    crowd.await;
    ensure_eq!(
        14,
        one.found(&first.id).await,
        alive,
        "a live record must not be changed"
    );

    one.give_up(&ticket).await;
    let abandoned = one.found(&first.id).await;
    for wrong in [Token::random(), Token::from_bytes([0; 16])] {
        let held = two.find_abandoned(&replacing("a", wrong)).await;
        ensure_eq!(14, held.token, first.token, "the right token must be told");
    }
    ensure_eq!(
        14,
        one.found(&first.id).await,
        abandoned,
        "a wrong token must change nothing"
    );

    // A token of the record's past is a wrong one.
    let second = two.win_as(2, &replacing("a", first.token)).await;
    one.in_flight(&replacing("a", first.token)).await;
    two.give_up(&second).await;
    let held = one.find_abandoned(&replacing("a", first.token)).await;
    ensure_eq!(
        14,
        held.token,
        second.token,
        "the latest token must be told"
    );

    two.finish(&second, LONG).await;
    let completed = one.found(&first.id).await;
    for token in [first.token, second.token] {
        one.find_completed(&replacing("a", token)).await;
    }
    ensure_eq!(
        14,
        one.found(&first.id).await,
        completed,
        "a completed record must not be changed"
    );

    // What only lapsed and came back to life is alive.
    let three = open(&harness, 14).await;
    let lapsed = leased::<H>("b", 1);
    let ticket = three.win(&lapsed).await;
    ticks(&harness, 2).await;
    one.find_abandoned(&request("b")).await;
    three.renew(&[ticket], LONG).await;
    one.in_flight(&replacing("b", lapsed.token)).await;
}

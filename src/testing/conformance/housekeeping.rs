//! Contract 22 and 23: purging and limits.

use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;

use super::{
    Harness,
    support::{Tried, ensure, ensure_eq, live, names, open, outcome, replacing, request, ticks},
};

use crate::{
    Record,
    store::{Checkpoint, Claim, Completion, Lifetimes, Store, StoreErrorKind},
};

const LONG: Duration = Duration::from_secs(24 * 3600);

/// Contract 22.
///
/// # Panics
///
/// When the store breaks it.
pub async fn c22_purge_removes_what_is_over_and_nothing_else<H: Harness>() {
    let harness = H::new().await;
    let (store, other) = (open(&harness, 22).await, open(&harness, 22).await);
    let kept = live::<H>(&store, &other).await;
    for at in 0..10 {
        let ticket = store.win(&request(format!("over-{at}"))).await;
        store.keep(&ticket, "step", b"1").await;
        let lifetimes = Lifetimes::new(H::TICK).response_ttl(H::TICK / 2);
        store.done(
            "complete",
            store.complete(&ticket, outcome(&ticket), lifetimes).await,
        );
    }
    let mut tombstones = Vec::new();
    for at in 0..3 {
        let ticket = store.win(&request(format!("response-{at}"))).await;
        let lifetimes = Lifetimes::new(LONG).response_ttl(H::TICK);
        store.done(
            "complete",
            store.complete(&ticket, outcome(&ticket), lifetimes).await,
        );
        tombstones.push(store.found(&ticket.id).await);
    }
    let mut before = Vec::new();
    for ticket in &kept {
        before.push(store.found(&ticket.id).await);
    }
    ticks(&harness, 2).await;

    ensure_eq!(
        22,
        store.purge(0).await,
        0,
        "a purge of none must remove none"
    );
    let mut total = 0;
    for _ in 0..20 {
        let changed = store.purge(4).await;
        ensure!(22, changed <= 4, changed, "a purge must keep to its limit");
        total += changed;
        if changed < 4 {
            break;
        }
    }
    if H::EXPIRES_BY_ITSELF {
        ensure!(
            22,
            total <= 13,
            total,
            "10 records and 3 responses were over"
        );
    } else {
        ensure_eq!(22, total, 13, "10 records and 3 responses were over");
    }
    ensure_eq!(
        22,
        store.purge(1000).await,
        0,
        "once purged, nothing must be left"
    );

    for (ticket, before) in kept.iter().zip(before) {
        ensure_eq!(
            22,
            store.found(&ticket.id).await,
            before,
            "what is not over must stay"
        );
    }
    let step = Some(vec![Checkpoint::new("step", b"1".as_slice().into())]);
    for ticket in &kept[..2] {
        let saved = store.load(ticket).await;
        ensure_eq!(
            22,
            names(&saved),
            names(&step),
            "checkpoints of live records must stay"
        );
    }
    for key in ["lapsed", "over", "abandoned", "released"] {
        store.find_abandoned(&request(key)).await;
    }
    for before in tombstones {
        let expected = Record {
            response: None,
            ..before
        };
        let record = store.found(&expected.id).await;
        ensure_eq!(
            22,
            record,
            expected,
            "of a response that is over all else must stay"
        );
    }
    let ticket = store.win_as(1, &request("over-0")).await;
    ensure_eq!(
        22,
        store.load(&ticket).await,
        Some(Vec::new()),
        "checkpoints must go with their record"
    );
}

/// Contract 23. Checks nothing when [`Harness::small`] answers `None`.
///
/// # Panics
///
/// When the store breaks it.
pub async fn c23_a_full_store_refuses_new_claims_only<H: Harness>() {
    let harness = H::new().await;
    let Some(small) = harness.small().await else {
        return;
    };
    let store = Tried::new(small, 23);
    // One completed record and one abandoned one: neither may be evicted.
    let completed = store.win(&request("completed")).await;
    store.finish(&completed, LONG).await;
    let abandoned = store.win(&request("abandoned")).await;
    store.give_up(&abandoned).await;
    let mut granted = Vec::new();
    let refused = loop {
        let request = request(format!("key-{}", granted.len()));
        match store.store.claim(request.clone()).await {
            Ok(Claim::Won(ticket)) => granted.push((request, ticket)),
            Err(error) => break error,
            other => {
                panic!("contract 23: a new key is won or refused; the store answered {other:?}")
            }
        }
        ensure!(
            23,
            granted.len() <= 1000,
            granted.len(),
            "the small store must be full some time"
        );
    };
    ensure_eq!(
        23,
        refused.kind(),
        StoreErrorKind::Full,
        "a full store must say so"
    );
    ensure_eq!(
        23,
        store
            .get(&request(format!("key-{}", granted.len())).id)
            .await,
        None,
        "a refused claim must leave nothing"
    );

    store.find_completed(&request("completed")).await;
    store.find_abandoned(&request("abandoned")).await;
    for (first, ticket) in &granted {
        store.in_flight(&request(first.id.key.as_bytes())).await;
        let again = store.win(first).await;
        ensure_eq!(23, again, *ticket, "a claim sent again needs no room");
    }
    store
        .win_as(2, &replacing("abandoned", abandoned.token))
        .await;

    let large = Bytes::from(vec![7; 64 * 1024]);
    for (_, ticket) in &granted {
        let done = Completion::retained(StatusCode::OK, large.clone());
        let settled = store.complete(ticket, done, Lifetimes::new(H::TICK)).await;
        store.done("complete", settled);
        let record = store.found(&ticket.id).await;
        ensure!(
            23,
            record.response.as_ref() == Some(&large),
            record.state,
            "a granted claim must be completed whole"
        );
    }
    let refused = store.store.claim(request("one more")).await;
    let full = matches!(&refused, Err(error) if error.kind() == StoreErrorKind::Full);
    ensure!(
        23,
        full || granted.is_empty(),
        refused,
        "live records must not be evicted"
    );

    ticks(&harness, 2).await;
    if !granted.is_empty() {
        store.purge(2000).await;
        store.win_as(1, &request("one more")).await;
        store.find_completed(&request("completed")).await;
    }
}

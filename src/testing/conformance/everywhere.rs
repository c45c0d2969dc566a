//! Contract 29 to 31: other instances, dropped futures, closing.

use std::time::Duration;

use bytes::Bytes;

use super::{
    Harness,
    support::{
        CROWD, Tried, dropped_after, ensure, ensure_eq, id, names, open, outcome, replacing,
        request, together,
    },
};
use crate::{
    State,
    store::{
        Checkpoint, Checkpoints, Claim, Counts, Inspect, Lifetimes, Settled, Store, StoreError,
        StoreErrorKind,
    },
};

const LONG: Duration = Duration::from_secs(24 * 3600);

/// Contract 29. What a crash leaves is up to the store's own tests: a suite inside the process
/// cannot kill it.
///
/// # Panics
///
/// When the store breaks it.
pub async fn c29_what_is_acknowledged_is_visible_everywhere<H: Harness>() {
    let harness = H::new().await;
    let (one, two) = (open(&harness, 29).await, open(&harness, 29).await);
    for round in 0..16 {
        let key = format!("key-{round}");
        let ticket = one.win(&request(&key)).await;
        ensure_eq!(
            29,
            two.is(&ticket.id, State::Running).await.token,
            ticket.token,
            "a won claim must be visible"
        );
        one.keep(&ticket, "step", b"1").await;
        let step = Some(vec![Checkpoint::new("step", b"1".as_slice().into())]);
        ensure_eq!(
            29,
            names(&two.load(&ticket).await),
            names(&step),
            "a checkpoint must be visible"
        );
        one.give_up(&ticket).await;
        two.is(&ticket.id, State::Abandoned).await;
        let second = two.win_as(2, &replacing(&key, ticket.token)).await;
        ensure_eq!(
            29,
            one.found(&ticket.id).await.token,
            second.token,
            "a takeover must be visible"
        );
        match round % 3 {
            0 => {
                two.finish(&second, LONG).await;
                one.find_completed(&request(&key)).await;
            }
            1 => {
                two.done("release", two.release(&second, LONG).await);
                one.is(&ticket.id, State::Released).await;
            }
            _ => {
                ensure!(
                    29,
                    two.forget(&ticket.id).await,
                    false,
                    "forget must find the record"
                );
                one.win_as(1, &request(&key)).await;
            }
        }
    }
    // An instance opened afterwards finds it, too, even when all others are gone.
    one.close().await;
    two.close().await;
    drop((one, two));
    let three = open(&harness, 29).await;
    let record = three.find_completed(&request("key-0")).await;
    ensure_eq!(
        29,
        three.get(&id("key-0")).await,
        Some(record),
        "a reopened store must find its records"
    );
    three.is(&id("key-1"), State::Released).await;
    three.is(&id("key-2"), State::Running).await;
}

/// Contract 30.
///
/// # Panics
///
/// When the store breaks it.
pub async fn c30_dropped_futures_break_nothing<H: Harness>() {
    let harness = H::new().await;
    let store = open(&harness, 30).await;
    for polls in 0..24 {
        let name = |what: &str| format!("{what}-{polls}");
        let first = request(name("claim"));
        // Neighbours share whatever batch the dropped operation was in.
        let neighbours: Vec<_> = (0..8).map(|at| request(format!("{at}-{polls}"))).collect();
        let task = tokio::spawn({
            let (store, first) = (store.store.clone(), first.clone());
            async move { drop(dropped_after(polls, store.claim(first)).await) }
        });
        let claims = together(neighbours.len(), |task| {
            let (store, request) = (store.clone(), neighbours[task].clone());
            async move { store.claim(&request).await }
        })
        .await;
        let ended = task.await;
        ensure!(30, ended.is_ok(), ended, "dropping a claim must not panic");
        let won = claims.iter().all(|claim| matches!(claim, Claim::Won(_)));
        ensure!(
            30,
            won,
            claims,
            "the neighbours of a dropped claim must be won"
        );
        let ticket = store.win_as(1, &first).await;
        // Its token settles each of the others.
        let done = outcome(&ticket);
        dropped_after(
            polls,
            store.store.save(&ticket, "step", Bytes::from_static(b"1")),
        )
        .await;
        store.keep(&ticket, "step", b"1").await;
        dropped_after(
            polls,
            store.store.renew(std::slice::from_ref(&ticket), LONG),
        )
        .await;
        dropped_after(
            polls,
            store
                .store
                .complete(&ticket, done.clone(), Lifetimes::new(LONG)),
        )
        .await;
        store.finish(&ticket, LONG).await;
        let record = store.find_completed(&request(name("claim"))).await;
        ensure_eq!(
            30,
            record.response,
            done.response,
            "the outcome must be recorded once and whole"
        );

        let second = request(name("release"));
        let ticket = store.win(&second).await;
        dropped_after(polls, store.store.release(&ticket, LONG)).await;
        let _ = store.release(&ticket, LONG).await;
        ensure_eq!(
            30,
            store.get(&second.id).await,
            None,
            "the key must be free"
        );

        let third = request(name("abandon"));
        let ticket = store.win(&third).await;
        dropped_after(polls, store.store.abandon(&ticket)).await;
        store.give_up(&ticket).await;
        store.find_abandoned(&request(name("abandon"))).await;
        dropped_after(
            polls,
            store.store.claim(replacing(name("abandon"), third.token)),
        )
        .await;
        dropped_after(polls, store.store.forget(&third.id)).await;
        store.forget(&third.id).await;
        store.win_as(1, &request(name("abandon"))).await;

        dropped_after(polls, store.store.get(&first.id)).await;
        dropped_after(polls, store.store.load(&ticket)).await;
        dropped_after(polls, store.store.counts()).await;
        dropped_after(polls, store.store.abandoned(None, 10)).await;
        dropped_after(polls, store.store.purge(10)).await;
    }
    let expected = Counts {
        running: 24 * 9,
        completed: 24,
        abandoned: 0,
        released: 0,
    };
    ensure_eq!(
        30,
        store.counts().await,
        expected,
        "nothing may be left behind"
    );
}

/// Contract 31.
///
/// # Panics
///
/// When the store breaks it.
pub async fn c31_a_closed_store_gives_its_lease_up<H: Harness>() {
    let harness = H::new().await;
    let (one, two) = (open(&harness, 31).await, open(&harness, 31).await);
    let clone = one.clone();
    let ticket = one.win(&request("a")).await;
    one.keep(&ticket, "step", b"1").await;
    let other = two.win(&request("b")).await;
    one.renew(&[], LONG).await;
    one.close().await;
    all_closed(&one, &ticket.id, &ticket).await;
    all_closed(&clone, &ticket.id, &ticket).await;

    let held = two.find_abandoned(&request("a")).await;
    ensure_eq!(
        31,
        held.token,
        ticket.token,
        "the claim of a closed store must be named"
    );
    two.win_as(2, &replacing("a", ticket.token)).await;
    let three = open(&harness, 31).await;
    three.in_flight(&request("b")).await;
    let settled = two.renew(&[other], LONG).await;
    ensure_eq!(
        31,
        settled,
        [Settled::Done],
        "another instance must not notice"
    );

    // Whatever a claim meets that is under way while the store closes, it never leaves a lease.
    for round in 0..32 {
        let closing = open(&harness, 31).await;
        let claims = together(CROWD, |task| {
            let (store, request) = (closing.store.clone(), request(format!("{round}-{task}")));
            async move {
                if task == CROWD / 2 {
                    store.close().await.map(|()| None)
                } else {
                    store.claim(request.clone()).await.map(|_| Some(request))
                }
            }
        })
        .await;
        for claim in claims {
            match claim {
                Ok(None) => {}
                Ok(Some(first)) => {
                    let second = request(first.id.key.as_bytes());
                    two.find_abandoned(&second).await;
                }
                Err(error) => {
                    ensure_eq!(
                        31,
                        error.kind(),
                        StoreErrorKind::Closed,
                        "a closed store must say so"
                    );
                }
            }
        }
    }
}

/// Every operation must answer `Closed`; closing again may, too.
async fn all_closed<S: Inspect + Checkpoints>(
    store: &Tried<S>,
    id: &crate::RecordId,
    ticket: &crate::store::Ticket,
) {
    fn closed<T: std::fmt::Debug>(operation: &str, answer: Result<T, StoreError>) {
        let closed = matches!(&answer, Err(error) if error.kind() == StoreErrorKind::Closed);
        ensure!(
            31,
            closed,
            answer,
            "`{operation}` of a closed store must say so"
        );
    }
    let store = &store.store;
    closed("claim", store.claim(request("new")).await);
    let completed = store.complete(ticket, outcome(ticket), Lifetimes::new(LONG));
    closed("complete", completed.await);
    closed("release", store.release(ticket, LONG).await);
    closed("abandon", store.abandon(ticket).await);
    closed("renew", store.renew(&[], LONG).await);
    closed("purge", store.purge(1).await);
    closed("get", store.get(id).await);
    closed("forget", store.forget(id).await);
    closed("counts", store.counts().await);
    closed("abandoned", store.abandoned(None, 1).await);
    closed("save", store.save(ticket, "late", Bytes::new()).await);
    closed("load", store.load(ticket).await);
    if let Err(error) = store.close().await {
        ensure_eq!(
            31,
            error.kind(),
            StoreErrorKind::Closed,
            "closing again must be harmless"
        );
    }
}

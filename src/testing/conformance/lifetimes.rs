//! Contract 19 to 21: how long what is kept.

use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;

use super::{
    Harness,
    support::{Tried, Watch, ensure, ensure_eq, leased, open, request, ticks, together},
};
use crate::{
    State,
    store::{ClaimRequest, Completion, Lifetimes},
};

/// 36 500 days.
const CENTURY: Duration = Duration::from_secs(36_500 * 24 * 3600);
const LONG: Duration = Duration::from_secs(24 * 3600);
const RESPONSE: &[u8] = b"retained";

/// The longest step that a real clock is asked to take.
const PATIENCE: Duration = Duration::from_secs(2);

fn within<H: Harness>(step: Duration) -> bool {
    !H::REAL_CLOCK || step <= PATIENCE
}

async fn completed<H: Harness>(
    store: &Tried<H::Store>,
    key: &str,
    lifetimes: Lifetimes,
) -> ClaimRequest {
    let request = request(key);
    let ticket = store.win(&request).await;
    let done = Completion::retained(StatusCode::OK, Bytes::from_static(RESPONSE));
    store.done("complete", store.complete(&ticket, done, lifetimes).await);
    request
}

/// Contract 19.
///
/// # Panics
///
/// When the store breaks it.
pub async fn c19_records_and_responses_expire_when_asked<H: Harness>() {
    let millis = Duration::from_millis;
    let lifetimes = [millis(1), millis(250), millis(999), millis(1000), CENTURY];
    // All at once, because a real clock takes its time.
    together(lifetimes.len(), |task| record_expires::<H>(lifetimes[task])).await;
    together(lifetimes.len(), |task| {
        response_expires::<H>(lifetimes[task])
    })
    .await;
    counted_from_completion::<H>().await;
    end_of_time::<H>().await;
}

/// A record is there at 90 % of its lifetime and gone at 110 %.
async fn record_expires<H: Harness>(ttl: Duration) {
    let harness = H::new().await;
    let store = open(&harness, 19).await;
    let watch = Watch::start();
    let request = completed::<H>(&store, "a", Lifetimes::new(ttl)).await;
    let stands = |answer: &Option<_>| {
        let surely = watch.surely_within::<H>(ttl);
        ensure!(
            19,
            answer.is_some() || !surely,
            answer,
            "a record must live for {ttl:?}"
        );
    };
    stands(&store.get(&request.id).await);
    if !within::<H>(ttl) {
        return;
    }
    harness.advance(ttl * 9 / 10).await;
    stands(&store.get(&request.id).await);
    harness.advance(ttl / 5).await;
    let answer = store.get(&request.id).await;
    ensure_eq!(19, answer, None, "a record must be over after {ttl:?}");
    store.win_as(1, &super::support::request("a")).await;
}

/// The same for a response whose record lives on.
async fn response_expires<H: Harness>(ttl: Duration) {
    let harness = H::new().await;
    let store = open(&harness, 19).await;
    let watch = Watch::start();
    let lifetimes = Lifetimes::new(Duration::MAX).response_ttl(ttl);
    let request = completed::<H>(&store, "a", lifetimes).await;
    if !within::<H>(ttl) {
        let record = store.found(&request.id).await;
        ensure_eq!(
            19,
            record.response.as_deref(),
            Some(RESPONSE),
            "a response must live for {ttl:?}"
        );
        return;
    }
    harness.advance(ttl * 9 / 10).await;
    let record = store.find_completed(&request).await;
    let stands = record.response.as_deref() == Some(RESPONSE);
    let surely = watch.surely_within::<H>(ttl);
    ensure!(
        19,
        stands || !surely,
        record.response,
        "a response must live for {ttl:?}"
    );
    harness.advance(ttl / 5).await;
    for record in [
        store.find_completed(&request).await,
        store.found(&request.id).await,
    ] {
        ensure_eq!(
            19,
            (record.state, record.status, record.response),
            (State::Completed, Some(StatusCode::OK), None),
            "a response must be over after {ttl:?}, its record a tombstone"
        );
    }
}

/// What the run took does not count.
async fn counted_from_completion<H: Harness>() {
    let harness = H::new().await;
    let store = open(&harness, 19).await;
    let request = leased::<H>("a", 10);
    let ticket = store.win(&request).await;
    ticks(&harness, 5).await;
    let watch = Watch::start();
    store.finish(&ticket, H::TICK * 3).await;
    ticks(&harness, 2).await;
    if watch.surely_within::<H>(H::TICK * 3) {
        store.find_completed(&request).await;
    }
    ticks(&harness, 2).await;
    ensure_eq!(
        19,
        store.get(&request.id).await,
        None,
        "the record must be over"
    );
}

/// The longest durations there are, wherever one is given.
async fn end_of_time<H: Harness>() {
    let harness = H::new().await;
    let store = open(&harness, 19).await;
    let endless = |key: &str| ClaimRequest {
        lease: Duration::MAX,
        max_run: Duration::MAX,
        abandoned_ttl: Some(Duration::MAX),
        ..request(key)
    };
    for (key, lifetimes) in [
        ("plain", Lifetimes::new(Duration::MAX)),
        (
            "both",
            Lifetimes::new(Duration::MAX).response_ttl(Duration::MAX),
        ),
    ] {
        completed::<H>(&store, key, lifetimes).await;
    }
    let running = store.win(&endless("running")).await;
    let released = store.win(&endless("released")).await;
    store.keep(&released, "step", b"1").await;
    store.done("release", store.release(&released, Duration::MAX).await);
    store.renew(&[running], Duration::MAX).await;
    let step = if H::REAL_CLOCK { H::TICK } else { CENTURY };
    for _ in 0..2 {
        for key in ["plain", "both"] {
            let record = store.find_completed(&request(key)).await;
            ensure_eq!(
                19,
                record.response.as_deref(),
                Some(RESPONSE),
                "a response must live forever"
            );
        }
        store.in_flight(&request("running")).await;
        let held = store.find_abandoned(&request("released")).await;
        ensure!(
            19,
            held.released,
            held,
            "a released record must wait forever"
        );
        harness.advance(step).await;
    }
}

/// Contract 20.
///
/// # Panics
///
/// When the store breaks it.
pub async fn c20_responses_come_back_byte_for_byte<H: Harness>() {
    let harness = H::new().await;
    let (one, two) = (open(&harness, 20).await, open(&harness, 20).await);
    let every: Vec<u8> = (0..=u8::MAX).collect();
    let responses = [
        Some(Bytes::new()),
        Some(Bytes::from_static(b"\0")),
        Some(Bytes::from_static(b"\xC3")),
        Some(Bytes::from_static(b"{\"b\":1,  \"a\":2.0}\r\n")),
        Some(Bytes::from(every.repeat(4096))),
        Some(Bytes::from(every)),
        None,
    ];
    let statuses = [200, 204, 299, 303, 404, 599, 999].map(StatusCode::from_u16);
    for (at, (response, status)) in responses.into_iter().zip(statuses).enumerate() {
        let Ok(status) = status else {
            panic!("the suite uses a status the http crate refuses");
        };
        let request = request(format!("key-{at}"));
        let ticket = one.win(&request).await;
        let done = Completion {
            status,
            response: response.clone(),
        };
        one.done(
            "complete",
            one.complete(&ticket, done, Lifetimes::new(LONG)).await,
        );
        for record in [
            two.find_completed(&request).await,
            two.found(&request.id).await,
        ] {
            let len = record.response.as_ref().map(Bytes::len);
            ensure!(
                20,
                record.response == response,
                len,
                "response {at} must come back as given"
            );
            ensure_eq!(
                20,
                record.status,
                Some(status),
                "the status must come back as given"
            );
        }
    }
}

/// Contract 21.
///
/// # Panics
///
/// When the store breaks it.
pub async fn c21_abandoned_records_stay<H: Harness>() {
    let harness = H::new().await;
    let (one, two) = (open(&harness, 21).await, open(&harness, 21).await);
    let bounded = |key: &str| ClaimRequest {
        max_run: H::TICK * 3,
        abandoned_ttl: Some(H::TICK * 3),
        lease: LONG,
        ..request(key)
    };
    let marked = one.win(&request("marked")).await;
    one.give_up(&marked).await;
    one.win(&ClaimRequest {
        max_run: H::TICK,
        ..request("over")
    })
    .await;
    // An instance of its own, because any later claim would bring this one back to life.
    let silent = open(&harness, 21).await;
    silent.win(&leased::<H>("lapsed", 1)).await;
    let watch = Watch::start();
    one.win(&bounded("running")).await;
    one.give_up(&one.win(&bounded("bounded")).await).await;
    let completed = one.win(&bounded("completed")).await;
    one.finish(&completed, Duration::MAX).await;

    // The lifetime of abandoned records begins when the run's time is over, not before.
    ticks(&harness, 2).await;
    if watch.surely_within::<H>(H::TICK * 3) {
        two.in_flight(&request("running")).await;
    }
    ticks(&harness, 2).await;
    if watch.surely_within::<H>(H::TICK * 6) {
        two.find_abandoned(&request("running")).await;
        two.find_abandoned(&request("bounded")).await;
    }
    ticks(&harness, 3).await;
    for key in ["running", "bounded"] {
        ensure_eq!(21, two.get(&request(key).id).await, None, "it must be over");
        two.win_as(1, &request(key)).await;
    }

    let step = if H::REAL_CLOCK { H::TICK } else { CENTURY };
    harness.advance(step).await;
    one.purge(1000).await;
    for key in ["marked", "over", "lapsed"] {
        let held = two.find_abandoned(&request(key)).await;
        ensure_eq!(
            21,
            held.attempt,
            1,
            "an abandoned record must stay as it is"
        );
    }
    two.find_completed(&request("completed")).await;
}

//! What a process leaves behind that dies, and what time does to a record.

use std::time::Duration;

use tower_idempotency::{
    ExactRequest, FingerprintScheme, Mode, Recovery, State, Token,
    store::{Claim, ClaimRequest, Store},
};

use super::{ground::*, handlers::*};
use crate::{
    on_both,
    support::{post, send},
};

const DONE: Option<State> = Some(State::Completed);
const PAST_LEASE: Duration = Duration::from_secs(31);

/// The claim of a process that died in the middle of its run, as its lease has just lapsed.
async fn cut_off<D: Db>(ground: &Ground<D>, key: &str, mode: Mode) -> Token {
    let (head, _) = post(key, "A").into_parts();
    let fingerprint = ExactRequest.fingerprint(&head, &"A".into()).unwrap();
    let mut request = ClaimRequest::new(id(key), ExactRequest.name(), fingerprint);
    request.mode = mode;
    request.lease = LEASE;
    let store = D::open(&ground.place).await;
    let Claim::Won(ticket) = store.claim(request).await.unwrap() else {
        panic!("{key} is taken");
    };
    drop(store);
    ground.advance(PAST_LEASE);
    ticket.token
}

on_both! {
    // L11
    async fn a_transactional_run_that_was_cut_off_is_run_again_without_asking<D: Db>() {
        let ground = Ground::<D>::new().await;
        let old = cut_off(&ground, "k", Mode::Transactional).await;
        let layer = ground.layer().recovery(Recovery::Refuse);
        let (app, runs) = charging::<D>(layer, |_| created());
        let first = send(&app, post("k", "A")).await;
        assert_eq!((first.status.as_u16(), first.replay), (201, false));
        let record = ground.record("k").await.unwrap();
        assert_eq!((record.mode, record.attempt), (Mode::Transactional, 2));
        assert_ne!(record.token, old);
        assert_eq!((ground.left("k").await, runs.count()), ((1, DONE), 1));
        send(&app, post("k", "A")).await.assert_replays(&first);
    }

    /// It had no effect: that is so whoever asks.
    async fn a_transactional_run_that_was_cut_off_is_run_again_by_a_plain_layer<D: Db>() {
        let ground = Ground::<D>::new().await;
        cut_off(&ground, "k", Mode::Transactional).await;
        let app = app(plain(&ground.store).recovery(Recovery::Refuse), async || created());
        let first = send(&app, post("k", "A")).await;
        assert_eq!((first.status.as_u16(), first.replay), (201, false));
        let record = ground.record("k").await.unwrap();
        assert_eq!((record.state, record.mode), (State::Completed, Mode::Plain));
        send(&app, post("k", "A")).await.assert_replays(&first);
    }

    // L11
    async fn a_plain_run_that_was_cut_off_is_refused_by_a_transactional_layer<D: Db>() {
        let ground = Ground::<D>::new().await;
        cut_off(&ground, "k", Mode::Plain).await;
        let (app, runs) = charging::<D>(ground.layer().recovery(Recovery::Refuse), |_| created());
        for _ in 0..2 {
            assert_eq!(send(&app, post("k", "A")).await.said(), said(409, UNKNOWN));
        }
        assert_eq!((ground.effects("k").await, runs.count()), (0, 0));
    }

    /// What the first run did is as unknown as before.
    async fn a_plain_run_that_was_cut_off_stays_plain_when_a_transactional_one_is_too<D: Db>() {
        let ground = Ground::<D>::new().await;
        cut_off(&ground, "k", Mode::Plain).await;
        let rerunning = ground.layer().recovery(Recovery::rerun());
        let (cut, gate) = gated_before::<D>(rerunning.clone(), 201);
        let running = spawn(&cut, post("k", "A"));
        gate.reached().await;
        let record = ground.record("k").await.unwrap();
        assert_eq!((record.mode, record.attempt), (Mode::Plain, 2));
        rerunning.drain(Duration::ZERO).await;
        assert_eq!(running.await.unwrap().status, 503);
        assert_eq!(ground.left("k").await, (0, Some(State::Abandoned)));
        // Y3
        assert_eq!(ground.record("k").await.unwrap().attempt, 2);

        let careful = ground.elsewhere().await.recovery(Recovery::Refuse);
        let (app, runs) = charging::<D>(careful, |_| created());
        assert_eq!(send(&app, post("k", "A")).await.said(), said(409, UNKNOWN));
        assert_eq!(runs.count(), 0);

        let bold = ground.elsewhere().await.recovery(Recovery::rerun());
        let (app, _) = charging::<D>(bold, |_| created());
        assert_eq!(send(&app, post("k", "A")).await.status, 201);
        assert_eq!(ground.left("k").await, (1, DONE));
    }

    /// What it declines says nothing of the run before it, and uses no rerun up.
    async fn a_plain_run_that_was_cut_off_is_not_forgotten_when_its_rerun_declines<D: Db>() {
        let ground = Ground::<D>::new().await;
        cut_off(&ground, "k", Mode::Plain).await;
        let layer = ground.layer().recovery(Recovery::rerun());
        let (app, runs) = charging::<D>(layer, |_| answer(402));
        for run in 1..=4 {
            assert_eq!(send(&app, post("k", "A")).await.status, 402);
            assert_eq!(ground.left("k").await, (0, Some(State::Abandoned)));
            assert_eq!((ground.record("k").await.unwrap().attempt, runs.count()), (1, run));
        }
    }

    // T2
    async fn a_transaction_that_lasts_longer_than_its_record_is_not_expired_when_committed<D: Db>() {
        let ground = Ground::<D>::new().await;
        let (app, gate) = gated::<D>(ground.layer().ttl(Duration::from_secs(1)));
        let first = spawn(&app, post("k", "A"));
        gate.reached().await;
        ground.advance(Duration::from_secs(2));
        gate.open();
        let first = first.await.unwrap();
        assert_eq!(first.status, 201);
        send(&app, post("k", "A")).await.assert_replays(&first);
        ground.advance(Duration::from_millis(990));
        send(&app, post("k", "A")).await.assert_replays(&first);
        ground.advance(Duration::from_millis(20));
        let anew = spawn(&app, post("k", "A"));
        gate.reached().await;
        gate.open();
        assert_eq!((anew.await.unwrap().replay, ground.effects("k").await), (false, 2));
    }
}

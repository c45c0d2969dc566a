//! Sweeps over the records of transactions that go on for too long.

use std::time::Duration;

use tower_idempotency::{
    Abandoned, ExactRequest, FingerprintScheme, State, Verdict,
    store::{Claim, ClaimRequest, Settled, Store},
};

use super::{ground::*, handlers::*};
use crate::{
    on_both,
    support::{post, send},
};

const DONE: (i64, Option<State>) = (1, Some(State::Completed));
const MAX_RUN: Duration = Duration::from_secs(60);

on_both! {
    // Another process runs in the stead of a run past its end, whose effect is never committed.
    async fn one_that_goes_on_after_it_was_freed_and_run_again_has_no_effect<D: Db>() {
        let ground = Ground::<D>::new().await;
        let (late, gate) = gated_before::<D>(ground.layer().max_run(MAX_RUN), 201);
        let elsewhere = ground.elsewhere().await;
        let (other, runs) = charging::<D>(elsewhere.clone(), |_| answer(200));
        let first = spawn(&late, post("k", "A"));
        gate.reached().await;
        ground.advance(MAX_RUN + Duration::from_secs(1));
        let swept = elsewhere.reconciler().sweep().await;
        assert_eq!((swept.seen, swept.freed), (1, 1), "{swept:?}");
        let won = send(&other, post("k", "A")).await;
        assert_eq!((won.status.as_u16(), won.replay), (200, false));
        gate.open();
        // The late one is told what the other has done, or that it may ask again for that.
        let first = first.await.unwrap();
        assert!([200, 409, 503].contains(&first.status.as_u16()), "{first:?}");
        assert_eq!((ground.left("k").await, runs.count()), (DONE, 1));
        send(&late, post("k", "A")).await.assert_replays(&won);
    }

    async fn one_that_goes_on_after_it_was_freed_leaves_nothing_and_its_retry_runs<D: Db>() {
        let ground = Ground::<D>::new().await;
        let (late, gate) = gated_before::<D>(ground.layer().max_run(MAX_RUN), 201);
        let first = spawn(&late, post("k", "A"));
        gate.reached().await;
        ground.advance(MAX_RUN + Duration::from_secs(1));
        let swept = ground.elsewhere().await.reconciler().sweep().await;
        assert_eq!((swept.seen, swept.freed), (1, 1), "{swept:?}");
        gate.open();
        assert_ne!(first.await.unwrap().status, 201);
        assert_eq!(ground.left("k").await, (0, None));
        gate.open();
        let retry = send(&late, post("k", "A")).await;
        assert_eq!((retry.status.as_u16(), retry.replay), (201, false));
        assert_eq!(ground.left("k").await, DONE);
    }

    // The sweep meets a transaction that is open: neither waits for ever, and the record and the effect agree.
    async fn beside_one_that_is_open_a_sweep_ends_and_there_is_one_effect_at_last<D: Db>() {
        let ground = Ground::<D>::new().await;
        // Before the transaction begins, since to open a store in SQLite is to write.
        let elsewhere = ground.elsewhere().await.store_timeout(Duration::from_secs(1));
        let (late, gate) = gated::<D>(ground.layer().max_run(MAX_RUN));
        let first = spawn(&late, post("k", "A"));
        gate.reached().await;
        ground.advance(MAX_RUN + Duration::from_secs(1));
        let reconciler = elsewhere.reconciler();
        let swept = tokio::time::timeout(Duration::from_secs(10), reconciler.sweep());
        let swept = swept.await.expect("it waits for the transaction");
        assert!(swept.freed + swept.lost + swept.failed == 1, "{swept:?}");
        gate.open();
        let first = first.await.unwrap();
        if first.status == 201 {
            ground.comes_to("k", DONE).await;
        } else {
            assert_eq!(ground.effects("k").await, 0);
        }
        // What the sweep has left in flight is given up in the background.
        loop {
            gate.open();
            let retry = send(&late, post("k", "A")).await;
            if retry.status == 201 {
                break;
            }
            assert!([409, 503].contains(&retry.status.as_u16()), "{retry:?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert_eq!(ground.left("k").await, DONE);
    }

    // A record of a plain layer is no less unknown for the layer that finds it.
    async fn a_plain_record_under_a_transactional_layer_is_asked_about<D: Db>() {
        let ground = Ground::<D>::new().await;
        let (head, _) = post("k", "A").into_parts();
        let fingerprint = ExactRequest.fingerprint(&head, &"A".into()).unwrap();
        let claim = ClaimRequest::new(id("k"), ExactRequest.name(), fingerprint);
        let Claim::Won(ticket) = ground.store.claim(claim).await.unwrap() else {
            panic!("not won");
        };
        assert_eq!(ground.store.abandon(&ticket).await.unwrap(), Settled::Done);
        let (refusing, runs) = charging::<D>(ground.layer(), |_| answer(201));
        assert_eq!(send(&refusing, post("k", "A")).await.code(), "idempotency_outcome_unknown");
        let asking = ground.layer().resolver(|_: Abandoned| async { Verdict::DidNotHappen });
        let (app, asked_runs) = charging::<D>(asking, |_| answer(201));
        let first = send(&app, post("k", "A")).await;
        assert_eq!((first.status.as_u16(), first.replay), (201, false));
        assert_eq!((runs.count(), asked_runs.count(), ground.left("k").await), (0, 1, DONE));
    }
}

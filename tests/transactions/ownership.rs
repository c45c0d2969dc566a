//! Runs that lose their claim while they are at it.

use std::time::Duration;

use tower_idempotency::{State, Token, store::Inspect};

use super::{ground::*, handlers::*};
use crate::{
    on_both,
    support::{post, send},
};

const DONE: Option<State> = Some(State::Completed);
const PAST_LEASE: Duration = Duration::from_secs(31);

async fn token<D: Db>(ground: &Ground<D>) -> Option<Token> {
    ground.record("k").await.map(|record| record.token)
}

on_both! {
    // L3 b
    async fn a_late_owner_has_no_effect_and_answers_with_the_winners_replay<D: Db>() {
        let ground = Ground::<D>::new().await;
        let (late, gate) = gated_before::<D>(ground.layer(), 201);
        let (other, runs) = charging::<D>(ground.elsewhere().await, |_| answer(200));
        let first = spawn(&late, post("k", "A"));
        gate.reached().await;
        ground.advance(PAST_LEASE);
        let won = send(&other, post("k", "A")).await;
        assert_eq!((won.status.as_u16(), won.replay), (200, false));
        let winner = token(&ground).await;
        gate.open();
        first.await.unwrap().assert_replays(&won);
        assert_eq!((ground.left("k").await, runs.count()), ((1, DONE), 1));
        assert_eq!(token(&ground).await, winner);
        send(&late, post("k", "A")).await.assert_replays(&won);
    }

    // L3 b
    async fn a_late_owner_is_refused_while_the_winner_runs<D: Db>() {
        let ground = Ground::<D>::new().await;
        let (late, gate) = gated_before::<D>(ground.layer(), 201);
        let (other, winning) = gated_before::<D>(ground.elsewhere().await, 200);
        let first = spawn(&late, post("k", "A"));
        gate.reached().await;
        ground.advance(PAST_LEASE);
        let second = spawn(&other, post("k", "A"));
        winning.reached().await;
        gate.open();
        assert_eq!(first.await.unwrap().said(), said(409, IN_FLIGHT));
        assert_eq!(ground.left("k").await, (0, Some(State::Running)));
        winning.open();
        let won = second.await.unwrap();
        assert_eq!((won.status.as_u16(), ground.left("k").await), (200, (1, DONE)));
        send(&late, post("k", "A")).await.assert_replays(&won);
    }

    // L3 a
    async fn a_late_owner_that_declines_does_not_free_the_winners_claim<D: Db>() {
        let ground = Ground::<D>::new().await;
        let (late, gate) = gated_before::<D>(ground.layer(), 402);
        let (other, winning) = gated_before::<D>(ground.elsewhere().await, 200);
        let first = spawn(&late, post("k", "A"));
        gate.reached().await;
        ground.advance(PAST_LEASE);
        let second = spawn(&other, post("k", "A"));
        winning.reached().await;
        let winner = token(&ground).await;
        gate.open();
        assert_eq!(first.await.unwrap().said(), said(409, IN_FLIGHT));
        assert_eq!(send(&late, post("k", "A")).await.said(), said(409, IN_FLIGHT));
        assert_eq!(token(&ground).await, winner);
        winning.open();
        let won = second.await.unwrap();
        assert_eq!((won.status.as_u16(), ground.left("k").await), (200, (1, DONE)));
    }

    // V4
    async fn a_run_whose_record_an_operator_forgets_has_no_effect<D: Db>() {
        let ground = Ground::<D>::new().await;
        let (app, gate) = gated_before::<D>(ground.layer(), 201);
        let first = spawn(&app, post("k", "A"));
        gate.reached().await;
        assert!(ground.store.forget(&id("k")).await.unwrap());
        gate.open();
        assert_eq!(first.await.unwrap().said(), said(409, IN_FLIGHT));
        assert_eq!(ground.left("k").await, (0, None));
        let retry = spawn(&app, post("k", "A"));
        gate.reached().await;
        gate.open();
        assert_eq!((retry.await.unwrap().status.as_u16(), ground.effects("k").await), (201, 1));
    }

    // V4
    async fn a_run_whose_key_is_used_for_something_else_meanwhile_answers_nothing_of_it<D: Db>() {
        let ground = Ground::<D>::new().await;
        let (app, gate) = gated_before::<D>(ground.layer(), 201);
        let first = spawn(&app, post("k", "A"));
        gate.reached().await;
        assert!(ground.store.forget(&id("k")).await.unwrap());
        let (other, _) = charging::<D>(ground.elsewhere().await, |_| answer(200));
        assert_eq!(send(&other, post("k", "B")).await.status, 200);
        gate.open();
        assert_eq!(first.await.unwrap().said(), said(409, IN_FLIGHT));
        assert_eq!(ground.left("k").await, (1, DONE));
    }

    // L3
    async fn an_owner_that_lapsed_and_was_not_replaced_still_commits<D: Db>() {
        let ground = Ground::<D>::new().await;
        let (app, gate) = gated::<D>(ground.layer());
        let first = spawn(&app, post("k", "A"));
        gate.reached().await;
        ground.advance(PAST_LEASE);
        gate.open();
        let first = first.await.unwrap();
        assert_eq!((first.status.as_u16(), ground.left("k").await), (201, (1, DONE)));
        send(&app, post("k", "A")).await.assert_replays(&first);
    }
}

/// On Postgres also where the late owner has written already: nothing it holds is in the winner's way.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_late_owner_has_written_already_is_rolled_back() {
    let ground = Ground::<sqlx::Postgres>::new().await;
    let (late, gate) = gated::<sqlx::Postgres>(ground.layer());
    let (other, _) = charging::<sqlx::Postgres>(ground.elsewhere().await, |_| answer(200));
    let first = spawn(&late, post("k", "A"));
    gate.reached().await;
    ground.advance(PAST_LEASE);
    let won = send(&other, post("k", "A")).await;
    assert_eq!((won.status.as_u16(), won.replay), (200, false));
    gate.open();
    first.await.unwrap().assert_replays(&won);
    assert_eq!(ground.left("k").await, (1, DONE));
}

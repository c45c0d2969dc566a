//! Postgres: transactions whose COMMIT is cut off, lost, or never answered.

use std::time::Duration;

use sqlx::Postgres;
use tower_idempotency::{State, Tx, TxError};

use super::{far::*, handlers::*};
use crate::support::{
    eventually, post,
    proxy::{Cut, Proxy, Way},
    request, send,
};

const DONE: Option<State> = Some(State::Completed);
const ROUNDS: usize = 20;

/// Where COMMIT is cut off while the rest of the network works.
async fn cut_at_commit(cut: Cut, answered: u16, left: (i64, Option<State>)) {
    let far = Far::new().await;
    let app = far.failing(move |proxy| proxy.cut(cut.clone()));
    for round in 0..ROUNDS {
        let key = format!("k-{round}");
        let (first, found) = far.tells_the_truth(&app, &key).await;
        assert_eq!(far.proxy.cuts(), round + 1, "nothing was cut");
        assert_eq!((first.status.as_u16(), found), (answered, left), "{key}");
        let retry = send(&app, post(&key, "A")).await;
        assert_eq!(
            (retry.status.as_u16(), retry.replay),
            (201, answered == 201)
        );
        assert_eq!(far.ground.left(&key).await, (1, DONE));
    }
}

// N4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_that_never_arrived_is_answered_503_and_its_key_is_free() {
    cut_at_commit(Cut::before(b'Q').containing("COMMIT"), 503, (0, None)).await;
}

// N4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_whose_answer_was_lost_is_answered_as_done() {
    cut_at_commit(Cut::answered(b'Q').containing("COMMIT"), 201, (1, DONE)).await;
}

// N4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_that_is_still_going_on_when_it_is_cut_off_is_answered_as_done() {
    cut_at_commit(Cut::after(b'Q').containing("COMMIT"), 201, (1, DONE)).await;
}

/// Where nothing goes any more after the cut, for a while.
async fn cut_off_at_commit(cut: Cut, left: (i64, Option<State>)) {
    let far = Far::new().await;
    let app = far.failing(move |proxy| {
        proxy.cut(cut.clone());
        proxy.refuse(true);
    });
    for round in 0..ROUNDS {
        let key = format!("k-{round}");
        let cutting = async {
            eventually("the cut", || far.proxy.cuts() > round).await;
            far.proxy.cut_all().await;
        };
        let ((first, _), ()) = tokio::join!(far.tells_the_truth(&app, &key), cutting);
        // Nobody can say anything of it yet.
        assert_eq!(first.said(), said(503, FAILED), "{key}");
        assert_eq!(first.header("retry-after"), Some("1"));
        assert_eq!(far.ground.effects(&key).await, left.0);
        far.proxy.refuse(false);
        far.ground.comes_to(&key, left).await;
        let retry = at_last(&app, &key).await;
        assert_eq!(retry.replay, left.1 == DONE, "{key}");
        assert_eq!(far.ground.left(&key).await, (1, DONE));
    }
}

// N4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_that_never_arrived_is_settled_when_the_network_is_back() {
    cut_off_at_commit(Cut::before(b'Q').containing("COMMIT"), (0, None)).await;
}

// N4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_whose_answer_was_lost_is_settled_when_the_network_is_back() {
    cut_off_at_commit(Cut::answered(b'Q').containing("COMMIT"), (1, DONE)).await;
}

/// Everything that is sent vanishes, or everything that is answered does, from when the handler answers.
async fn silent_before_commit(fall_silent: fn(&Proxy)) {
    let far = Far::new().await;
    let app = far.failing(fall_silent);
    for round in 0..ROUNDS / 4 {
        let key = format!("k-{round}");
        let (first, _) = far.tells_the_truth(&app, &key).await;
        assert_eq!(first.said(), said(503, FAILED), "{key}");
        assert_eq!(far.ground.effects(&key).await, 0);
        far.proxy.hang(false);
        far.proxy.delay(Way::ToClient, Duration::ZERO);
        let retry = at_last(&app, &key).await;
        assert!(!retry.replay, "{key}");
        assert_eq!(far.ground.left(&key).await, (1, DONE));
    }
}

// N4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_whose_database_falls_silent_before_its_commit_has_no_effect() {
    silent_before_commit(|proxy| proxy.hang(true)).await;
}

// N4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_whose_database_answers_nothing_more_before_its_commit_has_no_effect() {
    silent_before_commit(|proxy| proxy.delay(Way::ToClient, Duration::from_secs(3_600))).await;
}

/// There is no record to look it up in.
async fn without_a_key_cut_at_commit(cut: Cut, effects: i64) {
    let far = Far::new().await;
    let layer = far.layer.clone().optional();
    let proxy = far.proxy.clone();
    let app = app(layer, async move |mut tx: Tx<Postgres>| {
        charge(&mut tx, "none").await?;
        proxy.cut(cut.clone());
        Ok::<_, TxError>(created())
    });
    for round in 1..=ROUNDS {
        let answer = send(&app, request("POST", "/charges", None, "A")).await;
        assert_eq!((answer.status.as_u16(), far.proxy.cuts()), (500, round));
    }
    assert_eq!(far.ground.effects("none").await, effects);
}

// N4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_key_a_commit_that_is_not_acknowledged_is_not_answered_as_done() {
    let rounds = i64::try_from(ROUNDS).unwrap();
    without_a_key_cut_at_commit(Cut::before(b'Q').containing("COMMIT"), 0).await;
    without_a_key_cut_at_commit(Cut::answered(b'Q').containing("COMMIT"), rounds).await;
}

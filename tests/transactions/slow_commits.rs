//! Postgres: transactions whose COMMIT takes longer than anybody waits.

use std::time::Duration;

use axum::Router;
use sqlx::{PgConnection, Postgres};
use tokio::{
    task::JoinSet,
    time::{sleep, timeout},
};
use tower_idempotency::State;

use super::{far::*, ground::*, handlers::*};
use crate::support::{Answer, post, send};

const DONE: Option<State> = Some(State::Completed);

/// How many requests there are at once.
const MANY: usize = 20;

/// Has every COMMIT with an effect wait at the server for as long as a table is locked.
const HELD: &str = "CREATE TABLE gate ();
    CREATE FUNCTION hold() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        LOCK TABLE gate IN ACCESS SHARE MODE;
        RETURN NULL;
    END $$;
    CREATE CONSTRAINT TRIGGER hold AFTER INSERT ON effects DEFERRABLE INITIALLY DEFERRED
        FOR EACH ROW EXECUTE FUNCTION hold()";

/// Waits until so many COMMITs do.
async fn commits_wait(gate: &mut PgConnection, number: usize) {
    let waiting = "SELECT count(*) FROM pg_locks
        WHERE relation = 'gate'::regclass AND NOT granted";
    let number = i64::try_from(number).unwrap();
    let all = async {
        while Postgres::value(gate, waiting).await.unwrap() < number {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(Duration::from_secs(20), all)
        .await
        .expect("they do not commit");
}

/// As many requests at once as there are rounds, each with its COMMIT at the server and not answered.
async fn held_at_commit(far: &Far, app: &Router) -> (PgConnection, JoinSet<Answer>) {
    far.ground.run(HELD).await;
    let mut gate = Postgres::connect(&far.ground.place).await;
    let lock = "BEGIN; LOCK TABLE gate IN ACCESS EXCLUSIVE MODE";
    Postgres::run(&mut gate, lock).await.unwrap();
    let mut requests = JoinSet::new();
    for round in 0..MANY {
        let app = app.clone();
        requests.spawn(async move { send(&app, post(&format!("k-{round}"), "A")).await });
    }
    commits_wait(&mut gate, MANY).await;
    (gate, requests)
}

async fn all_are_done(far: &Far, app: &Router) {
    for round in 0..MANY {
        let key = format!("k-{round}");
        far.ground.comes_to(&key, (1, DONE)).await;
        assert!(at_last(app, &key).await.replay);
        assert_eq!(far.ground.left(&key).await, (1, DONE));
    }
}

/// A snapshot shows a claim that runs, and nothing of the COMMIT that is under way: who believed it would
/// free the key.
// N4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_that_takes_too_long_is_waited_for_before_its_key_is_judged() {
    let far = Far::new().await;
    let app = far.failing(|_| {});
    let (mut gate, requests) = held_at_commit(&far, &app).await;
    for answer in requests.join_all().await {
        assert_eq!(answer.said(), said(503, FAILED));
    }
    let (elsewhere, runs) = charging::<Postgres>(far.ground.elsewhere().await, |_| created());
    for round in 0..MANY {
        let key = format!("k-{round}");
        assert_eq!(far.ground.left(&key).await, (0, Some(State::Running)));
        assert_eq!(
            send(&elsewhere, post(&key, "A")).await.said(),
            said(409, IN_FLIGHT)
        );
    }
    // Where the claim is being settled, nobody waits for that either.
    let here = timeout(Duration::from_millis(500), send(&app, post("k-0", "A")));
    assert_eq!(here.await.unwrap().said(), said(409, IN_FLIGHT));
    assert_eq!(runs.count(), 0);
    Postgres::run(&mut gate, "COMMIT").await.unwrap();
    all_are_done(&far, &app).await;
}

// N4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_whose_answer_vanishes_with_everything_else_is_settled_later() {
    let far = Far::new().await;
    let app = far.failing(|_| {});
    let (mut gate, requests) = held_at_commit(&far, &app).await;
    far.proxy.hang(true);
    Postgres::run(&mut gate, "COMMIT").await.unwrap();
    for answer in requests.join_all().await {
        assert_eq!(answer.said(), said(503, FAILED));
    }
    far.proxy.hang(false);
    all_are_done(&far, &app).await;
}

/// Who would take over meets a record that is being completed, and is sent away.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_whose_lease_lapses_while_it_commits_is_not_taken_over() {
    let ground = Ground::<Postgres>::new().await;
    let (app, _) =
        charging::<Postgres>(ground.layer().transactional_with(patient()), |_| created());
    let impatient = ground.elsewhere().await.store_timeout(BRIEF);
    let (other, runs) = charging::<Postgres>(impatient, |_| created());
    ground.run(HELD).await;
    let mut gate = Postgres::connect(&ground.place).await;
    let lock = "BEGIN; LOCK TABLE gate IN ACCESS EXCLUSIVE MODE";
    Postgres::run(&mut gate, lock).await.unwrap();
    let first = spawn(&app, post("k", "A"));
    commits_wait(&mut gate, 1).await;
    ground.advance(Duration::from_secs(31));
    let sent_away = send(&other, post("k", "A")).await;
    assert_eq!(sent_away.json()["retryable"], true, "{sent_away:?}");
    assert_eq!(runs.count(), 0);
    Postgres::run(&mut gate, "COMMIT").await.unwrap();
    let first = first.await.unwrap();
    assert_eq!(
        (first.status.as_u16(), ground.left("k").await),
        (201, (1, DONE))
    );
    send(&other, post("k", "A")).await.assert_replays(&first);
    assert_eq!(runs.count(), 0);
}

/// It is too late to stop it, and soon enough to hear what came of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_without_grace_waits_for_a_commit_that_is_under_way() {
    let ground = Ground::<Postgres>::new().await;
    let layer = ground.layer().transactional_with(patient());
    let (app, _) = charging::<Postgres>(layer.clone(), |_| created());
    ground.run(HELD).await;
    let mut gate = Postgres::connect(&ground.place).await;
    let lock = "BEGIN; LOCK TABLE gate IN ACCESS EXCLUSIVE MODE";
    Postgres::run(&mut gate, lock).await.unwrap();
    let first = spawn(&app, post("k", "A"));
    commits_wait(&mut gate, 1).await;
    let draining = tokio::spawn(async move { layer.drain(Duration::ZERO).await });
    sleep(Duration::from_millis(200)).await;
    assert!(!draining.is_finished() && !first.is_finished());
    Postgres::run(&mut gate, "COMMIT").await.unwrap();
    assert_eq!(first.await.unwrap().status, 201);
    assert_eq!(ground.left("k").await, (1, DONE));
    assert_eq!(draining.await.unwrap().left, 0);
}

//! Postgres: transactions that fail for another one's sake, with real conflicts.

use std::time::Duration;

use axum::{
    Router,
    response::{IntoResponse, Response},
};
use sqlx::{AssertSqlSafe, PgConnection, Postgres};
use tokio::task::JoinHandle;
use tower_idempotency::{Isolation, State, Tx, TxError};

use super::{ground::*, handlers::*};
use crate::support::{Answer, post, send};

const DONE: Option<State> = Some(State::Completed);

/// What a handler makes of a statement that failed.
#[derive(Debug, Clone, Copy)]
enum Manner {
    /// Passes it on, as a `TxError`.
    Passes,
    /// The same, with a statement that went past the `Tx`, on its connection.
    PassesFromConnection,
    /// Answers with a 500 of its own.
    Maps,
    /// Answers 201, as if nothing had failed.
    Swallows,
}

const MANNERS: [Manner; 4] = [
    Manner::Passes,
    Manner::PassesFromConnection,
    Manner::Maps,
    Manner::Swallows,
];

impl Manner {
    async fn takes(self, tx: &mut Tx<Postgres>, statement: &str) -> Result<Response, TxError> {
        let failed = match self {
            Self::PassesFromConnection => {
                let statement = sqlx::query(AssertSqlSafe(statement.to_owned()));
                statement
                    .execute(&mut *tx.connection().await?)
                    .await
                    .map(drop)
            }
            _ => Postgres::run_in(tx, statement).await.map(drop),
        };
        match (failed, self) {
            (Ok(()), _) | (Err(_), Self::Swallows) => Ok(created()),
            (Err(_), Self::Maps) => Ok(answer(500)),
            (Err(error), _) => Err(error.into()),
        }
    }
}

/// One effect, one look at an account, a gate in the first run, and one change of that account, at
/// repeatable read.
fn reading(ground: &Ground<Postgres>, manner: Manner) -> (Router, Gate, Runs) {
    let (gate, runs) = (Gate::default(), Runs::default());
    let (passed, counted) = (gate.clone(), runs.clone());
    let handler = move |Key(key): Key, mut tx: Tx<Postgres>| async move {
        let run = counted.begin();
        tx.isolation(Isolation::RepeatableRead)?;
        charge(&mut tx, &key).await?;
        Postgres::value_in(&mut tx, "SELECT balance FROM accounts WHERE name = 'a'").await?;
        if run == 1 {
            passed.pass().await;
        }
        let take = "UPDATE accounts SET balance = balance - 80 WHERE name = 'a'";
        manner.takes(&mut tx, take).await
    };
    (app(ground.layer(), handler), gate, runs)
}

// N1
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_that_cannot_be_serialized_is_run_again_whatever_its_handler_makes_of_it() {
    for manner in MANNERS {
        let ground = Ground::<Postgres>::new().await;
        let (app, gate, runs) = reading(&ground, manner);
        let answer = spawn(&app, post("k", "A"));
        gate.reached().await;
        ground
            .run("UPDATE accounts SET balance = 200 WHERE name = 'a'")
            .await;
        gate.open();
        let first = answer.await.unwrap();
        assert_eq!(first.status, 201, "{manner:?}");
        assert_eq!(
            (runs.count(), ground.left("k").await),
            (2, (1, DONE)),
            "{manner:?}"
        );
        let balance = ground
            .value("SELECT balance FROM accounts WHERE name = 'a'")
            .await;
        assert_eq!(balance, 120);
        send(&app, post("k", "A")).await.assert_replays(&first);
    }
}

/// Waits for the account that the handler has locked, and has locked the one it will wait for.
async fn stand_in_the_way(ground: &Ground<Postgres>) -> JoinHandle<PgConnection> {
    let mut other = Postgres::connect(&ground.place).await;
    // The one who looks for the deadlock first is the one who fails.
    let begin = "SET deadlock_timeout = '1min'; BEGIN;
        UPDATE accounts SET balance = balance + 1 WHERE name = 'b'";
    Postgres::run(&mut other, begin).await.unwrap();
    let pid = Postgres::value(&mut other, "SELECT pg_backend_pid()::bigint").await;
    let pid = pid.unwrap();
    let waiting = tokio::spawn(async move {
        let wait = "UPDATE accounts SET balance = balance + 1 WHERE name = 'a'; COMMIT";
        Postgres::run(&mut other, wait).await.unwrap();
        other
    });
    let waits = format!("SELECT count(*) FROM pg_locks WHERE pid = {pid} AND NOT granted");
    while ground.value(&waits).await == 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    waiting
}

// N1
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_that_dies_in_a_deadlock_is_run_again_whatever_its_handler_makes_of_it() {
    for manner in MANNERS {
        let ground = Ground::<Postgres>::new().await;
        let (gate, runs) = (Gate::default(), Runs::default());
        let (passed, counted) = (gate.clone(), runs.clone());
        let app = app(
            ground.layer(),
            move |Key(key): Key, mut tx: Tx<Postgres>| async move {
                let run = counted.begin();
                charge(&mut tx, &key).await?;
                let lock = "UPDATE accounts SET balance = balance - 80 WHERE name = 'a'";
                Postgres::run_in(&mut tx, lock).await?;
                if run == 1 {
                    passed.pass().await;
                }
                let wait = "UPDATE accounts SET balance = balance + 80 WHERE name = 'b'";
                manner.takes(&mut tx, wait).await
            },
        );
        let answer = spawn(&app, post("k", "A"));
        gate.reached().await;
        let other = stand_in_the_way(&ground).await;
        gate.open();
        let first = answer.await.unwrap();
        other.await.unwrap();
        assert_eq!(first.status, 201, "{manner:?}");
        assert_eq!(
            (runs.count(), ground.left("k").await),
            (2, (1, DONE)),
            "{manner:?}"
        );
        assert_eq!(
            ground
                .value("SELECT sum(balance)::bigint FROM accounts")
                .await,
            202
        );
        send(&app, post("k", "A")).await.assert_replays(&first);
    }
}

/// Both see what the other is about to change, and the one that is later learns it from its COMMIT.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_conflict_that_shows_only_at_commit_is_run_again() {
    let ground = Ground::<Postgres>::new().await;
    let (gate, runs) = (Gate::default(), Runs::default());
    let (passed, counted) = (gate.clone(), runs.clone());
    let app = app(
        ground.layer(),
        move |Key(key): Key, mut tx: Tx<Postgres>| async move {
            let run = counted.begin();
            tx.isolation(Isolation::Serializable)?;
            let sum = "SELECT sum(balance)::bigint FROM accounts";
            let sum = Postgres::value_in(&mut tx, sum).await?;
            charge(&mut tx, &key).await?;
            let take = format!("UPDATE accounts SET balance = balance - 150 WHERE name = '{key}'");
            Postgres::run_in(&mut tx, &take).await?;
            if run <= 2 {
                passed.pass().await;
            }
            Ok::<_, TxError>(answer(if sum >= 150 { 201 } else { 402 }))
        },
    );
    let (a, b) = (spawn(&app, post("a", "A")), spawn(&app, post("b", "A")));
    gate.reached().await;
    gate.reached().await;
    gate.open();
    gate.open();
    let mut said = [a.await.unwrap(), b.await.unwrap()].map(|answer| answer.status.as_u16());
    said.sort();
    assert_eq!((said, runs.count()), ([201, 402], 3));
    assert_eq!(ground.effects("a").await + ground.effects("b").await, 1);
    assert_eq!(
        ground
            .value("SELECT sum(balance)::bigint FROM accounts")
            .await,
        50
    );
}

fn assert_given_up(answer: &Answer) {
    assert_eq!(answer.said(), said(503, FAILED));
    assert_eq!(answer.header("retry-after"), Some("1"));
    assert_eq!(answer.json()["retryable"], true);
}

// N1
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_that_always_conflicts_is_given_up_after_four_and_may_be_tried_again() {
    for manner in MANNERS {
        let ground = Ground::<Postgres>::new().await;
        let runs = Runs::default();
        let (counted, database) = (runs.clone(), ground.place.database().clone());
        let app = app(
            ground.layer(),
            move |Key(key): Key, mut tx: Tx<Postgres>, body: String| async move {
                let run = counted.begin();
                assert_eq!(body, "A", "run {run}");
                tx.isolation(Isolation::RepeatableRead)?;
                charge(&mut tx, &key).await?;
                if run <= 4 {
                    database
                        .run("UPDATE accounts SET balance = 200 WHERE name = 'a'")
                        .await;
                }
                let take = "UPDATE accounts SET balance = balance - 80 WHERE name = 'a'";
                manner
                    .takes(&mut tx, take)
                    .await
                    .map(IntoResponse::into_response)
            },
        );
        assert_given_up(&send(&app, post("k", "A")).await);
        assert_eq!(
            (runs.count(), ground.left("k").await),
            (4, (0, None)),
            "{manner:?}"
        );
        let retry = send(&app, post("k", "A")).await;
        assert_eq!(
            (retry.status.as_u16(), retry.replay, runs.count()),
            (201, false, 5)
        );
        assert_eq!(ground.left("k").await, (1, DONE));
    }
}

/// Nobody tells the layer of it: the statement went past the `Tx`, and its error never came back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_conflict_that_is_hidden_from_the_layer_is_never_answered_as_done() {
    let ground = Ground::<Postgres>::new().await;
    let database = ground.place.database().clone();
    let app = app(
        ground.layer(),
        move |Key(key): Key, mut tx: Tx<Postgres>| async move {
            tx.isolation(Isolation::RepeatableRead)?;
            charge(&mut tx, &key).await?;
            database
                .run("UPDATE accounts SET balance = 200 WHERE name = 'a'")
                .await;
            let mut connection = tx.connection().await?;
            let failed = Postgres::run(&mut connection, "UPDATE accounts SET balance = 0").await;
            assert!(failed.is_err(), "there was no conflict");
            Ok::<_, TxError>(created())
        },
    );
    assert_eq!(send(&app, post("k", "A")).await.said(), said(500, MISUSED));
    assert_eq!(ground.left("k").await, (0, None));
}

/// It went back to a savepoint, and what it answers then is its own decision.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_conflict_that_the_handler_has_dealt_with_is_not_run_again() {
    const FAILS: &str = "DO $$ BEGIN RAISE EXCEPTION 'conflict' USING ERRCODE = '40P01'; END $$";
    for (status, left) in [(201, (1, DONE)), (402, (0, None))] {
        let ground = Ground::<Postgres>::new().await;
        let runs = Runs::default();
        let counted = runs.clone();
        let app = app(
            ground.layer(),
            move |Key(key): Key, mut tx: Tx<Postgres>| async move {
                counted.begin();
                charge(&mut tx, &key).await?;
                Postgres::run_in(&mut tx, "SAVEPOINT before").await?;
                assert!(Postgres::run_in(&mut tx, FAILS).await.is_err());
                Postgres::run_in(&mut tx, "ROLLBACK TO SAVEPOINT before").await?;
                Ok::<_, TxError>(answer(status))
            },
        );
        assert_eq!(send(&app, post("k", "A")).await.status.as_u16(), status);
        assert_eq!((runs.count(), ground.left("k").await), (1, left));
    }
}

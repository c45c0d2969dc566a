//! Handlers that go on after a failure, end their transaction by themselves, or nest others in it.

use std::mem;

use sqlx::{Connection, Postgres, Sqlite};
use tower_idempotency::{State, Tx, TxError};

use super::{ground::*, handlers::*};
use crate::support::{Answer, post, request, send};

const DONE: Option<State> = Some(State::Completed);

/// A charge, statements that go past the `Tx`, another charge that may fail, and 201.
async fn answer_after<D: Db>(
    ground: &Ground<D>,
    key: Option<&str>,
    statements: &'static str,
) -> Answer {
    let layer = ground.layer().optional();
    let app = app(layer, move |Key(key): Key, mut tx: Tx<D>| async move {
        charge(&mut tx, &key).await?;
        let _ = D::run(&mut *tx.connection().await?, statements).await;
        let _ = charge(&mut tx, &key).await;
        Ok::<_, TxError>(created())
    });
    send(&app, request("POST", "/charges", key, "A")).await
}

/// Whatever a handler does to its transaction: it is not answered as done, and what comes after finds
/// connections that are in order.
async fn is_refused_and_leaves<D: Db>(
    statements: &'static str,
    effects: i64,
    state: Option<State>,
) {
    let ground = Ground::<D>::new().await;
    let refused = answer_after(&ground, Some("k"), statements).await;
    assert_eq!(refused.said(), said(500, MISUSED), "{statements}");
    assert_eq!(ground.left("k").await, (effects, state), "{statements}");
    if state.is_some() {
        let retry = answer_after(&ground, Some("k"), statements).await;
        assert_eq!(retry.said(), said(409, NOT_RETAINED), "{statements}");
        assert_eq!(ground.effects("k").await, effects, "{statements}");
    }
    assert_eq!(
        answer_after(&ground, None, statements).await.status,
        500,
        "{statements}"
    );
    assert_eq!(ground.effects("none").await, effects, "{statements}");
    for key in ["1", "2", "3", "4", "5"] {
        let (app, _) = charging::<D>(ground.layer(), |_| created());
        assert_eq!(send(&app, post(key, "A")).await.status, 201, "{statements}");
        assert_eq!(ground.left(key).await, (1, DONE), "{statements}");
    }
}

// N7
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_postgres_a_handler_that_swallows_a_failed_statement_is_refused_and_rolled_back() {
    is_refused_and_leaves::<Postgres>("INSERT INTO accounts VALUES ('a', 0)", 0, None).await;
}

/// SQLite undoes the statement alone and not the transaction, so a handler may go on after it.
// N7
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_sqlite_a_handler_that_goes_on_after_a_failed_statement_commits_the_others() {
    let ground = Ground::<Sqlite>::new().await;
    let twice = "INSERT INTO accounts VALUES ('a', 0)";
    assert_eq!(answer_after(&ground, Some("k"), twice).await.status, 201);
    assert_eq!(ground.left("k").await, (2, DONE));
    assert_eq!(ground.value("SELECT sum(balance) FROM accounts").await, 200);
}

/// What it has committed by itself stays. Nobody knows how much that was, so the key does not run again.
// N7
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_postgres_a_handler_that_commits_by_itself_is_refused() {
    is_refused_and_leaves::<Postgres>("COMMIT", 2, DONE).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_postgres_a_handler_that_commits_by_itself_and_begins_anew_is_refused() {
    is_refused_and_leaves::<Postgres>("COMMIT; BEGIN", 1, DONE).await;
    is_refused_and_leaves::<Postgres>("COMMIT AND CHAIN", 1, DONE).await;
}

// N7
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_postgres_a_handler_that_rolls_back_by_itself_is_refused() {
    is_refused_and_leaves::<Postgres>("ROLLBACK", 1, DONE).await;
    is_refused_and_leaves::<Postgres>("ROLLBACK; BEGIN", 0, DONE).await;
    is_refused_and_leaves::<Postgres>("ROLLBACK AND CHAIN", 0, DONE).await;
}

/// SQLite is asked before it commits, and made to roll back instead.
// N7
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_sqlite_a_handler_that_commits_by_itself_is_refused_and_rolled_back() {
    is_refused_and_leaves::<Sqlite>("COMMIT", 0, None).await;
    is_refused_and_leaves::<Sqlite>("COMMIT; BEGIN IMMEDIATE", 0, None).await;
}

// N7
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_sqlite_a_handler_that_rolls_back_by_itself_is_refused_and_rolled_back() {
    is_refused_and_leaves::<Sqlite>("ROLLBACK", 0, None).await;
    is_refused_and_leaves::<Sqlite>("ROLLBACK; BEGIN IMMEDIATE", 0, None).await;
}

/// A charge, a COMMIT that is not the handler's to send, and 402, twice. Answers both statuses.
async fn commit_and_decline<D: Db>(ground: &Ground<D>) -> [u16; 2] {
    let app = app(
        ground.layer(),
        move |Key(key): Key, mut tx: Tx<D>| async move {
            charge(&mut tx, &key).await?;
            let _ = D::run(&mut *tx.connection().await?, "COMMIT").await;
            Ok::<_, TxError>(answer(402))
        },
    );
    let first = send(&app, post("k", "A")).await.status.as_u16();
    [first, send(&app, post("k", "A")).await.status.as_u16()]
}

/// The effect is not rolled back, whatever the answer says; so the key must not run again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_postgres_a_handler_that_commits_by_itself_and_declines_is_not_believed() {
    let ground = Ground::<Postgres>::new().await;
    assert_eq!(commit_and_decline(&ground).await, [500, 409]);
    assert_eq!(ground.left("k").await, (1, DONE));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_sqlite_a_handler_that_commits_by_itself_and_declines_has_no_effect() {
    let ground = Ground::<Sqlite>::new().await;
    assert_eq!(commit_and_decline(&ground).await, [402, 402]);
    assert_eq!(ground.left("k").await, (0, None));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_postgres_a_handler_that_commits_by_itself_and_panics_is_not_run_again() {
    let ground = Ground::<Postgres>::new().await;
    let app = app(
        ground.layer(),
        move |Key(key): Key, mut tx: Tx<Postgres>| async move {
            charge(&mut tx, &key).await?;
            Postgres::run(&mut *tx.connection().await?, "COMMIT").await?;
            if key == "k" {
                panic!("after it has committed");
            }
            Ok::<_, TxError>(created())
        },
    );
    let run = tokio::spawn({
        let app = app.clone();
        async move { send(&app, post("k", "A")).await }
    });
    assert!(run.await.is_err());
    let retry = send(&app, post("k", "A")).await;
    assert_eq!(retry.said(), said(409, NOT_RETAINED));
    assert_eq!(ground.left("k").await, (1, DONE));
}

/// `begin` on a connection belongs to each database, so its test does too.
macro_rules! savepoints {
    ($module:ident, $database:ty) => {
        mod $module {
            use super::*;

            type D = $database;

            async fn charge_on(
                connection: &mut <D as sqlx::Database>::Connection,
                key: &str,
            ) -> sqlx::Result<()> {
                let charge = format!("INSERT INTO effects VALUES ('{key}', 1)");
                D::run(connection, &charge).await.map(drop)
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn a_savepoint_that_is_committed_belongs_to_the_transaction() {
                for (status, effects) in [(201, 2), (402, 0)] {
                    let ground = Ground::<D>::new().await;
                    let app = app(ground.layer(), move |mut tx: Tx<D>| async move {
                        charge(&mut tx, "k").await?;
                        let mut connection = tx.connection().await?;
                        let mut nested = connection.begin().await?;
                        charge_on(&mut nested, "k").await?;
                        nested.commit().await?;
                        Ok::<_, TxError>(answer(status))
                    });
                    assert_eq!(send(&app, post("k", "A")).await.status.as_u16(), status);
                    assert_eq!(ground.effects("k").await, effects);
                }
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn a_savepoint_that_is_rolled_back_or_dropped_leaves_the_transaction_whole() {
                for explicitly in [true, false] {
                    let ground = Ground::<D>::new().await;
                    let app = app(ground.layer(), move |mut tx: Tx<D>| async move {
                        charge(&mut tx, "k").await?;
                        let mut connection = tx.connection().await?;
                        let mut nested = connection.begin().await?;
                        charge_on(&mut nested, "k").await?;
                        match explicitly {
                            true => nested.rollback().await?,
                            false => drop(nested),
                        }
                        Ok::<_, TxError>(created())
                    });
                    let first = send(&app, post("k", "A")).await;
                    assert_eq!(
                        (first.status.as_u16(), ground.left("k").await),
                        (201, (1, DONE))
                    );
                    send(&app, post("k", "A")).await.assert_replays(&first);
                }
            }

            /// A COMMIT or ROLLBACK would end the savepoint, and leave the transaction open for whoever has
            /// the connection next.
            async fn leaks_a_savepoint(status: u16, key: Option<&str>) {
                let ground = Ground::<D>::new().await;
                let layer = ground.layer().optional();
                let leaking = app(layer, move |Key(key): Key, mut tx: Tx<D>| async move {
                    charge(&mut tx, &key).await?;
                    let mut connection = tx.connection().await?;
                    let mut nested = connection.begin().await?;
                    charge_on(&mut nested, &key).await?;
                    mem::forget(nested);
                    Ok::<_, TxError>(answer(status))
                });
                let answer = send(&leaking, request("POST", "/charges", key, "A")).await;
                let told = if status == 201 { 500 } else { status };
                assert_eq!(answer.status.as_u16(), told);
                assert_eq!(ground.effects(key.unwrap_or("none")).await, 0);
                for key in ["1", "2", "3", "4", "5"] {
                    let (app, _) = charging::<D>(ground.layer(), |_| created());
                    assert_eq!(send(&app, post(key, "A")).await.status, 201);
                    assert_eq!(ground.left(key).await, (1, DONE));
                }
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn a_savepoint_that_is_never_ended_is_not_committed() {
                leaks_a_savepoint(201, Some("k")).await;
                leaks_a_savepoint(201, None).await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn a_savepoint_that_is_never_ended_is_rolled_back() {
                leaks_a_savepoint(402, Some("k")).await;
                leaks_a_savepoint(402, None).await;
            }
        }
    };
}

savepoints!(postgres, Postgres);
savepoints!(sqlite, Sqlite);

//! Checkpoints beside and inside of the transaction of a transactional layer.

use std::time::{Duration, Instant};

use axum::response::IntoResponse;
use sqlx::{Postgres, Sqlite};
use tower_idempotency::{
    CheckpointError, Idempotency, Isolation, State, Tx, TxError, TxOptions,
    store::{Checkpoints, Inspect},
};

use super::{ground::*, handlers::*};
use crate::{
    on_both,
    support::{post, send},
};

/// Where a wait for the handler's own transaction would show.
const AT_ONCE: Duration = Duration::from_millis(1500);

async fn save_in<D: Db>(
    tx: &mut Tx<D>,
    idempotency: &Idempotency,
    name: &str,
    value: u64,
) -> Result<(), CheckpointError> {
    let mut connection = tx.connection().await.unwrap();
    idempotency
        .checkpoint_in(&mut *connection, name, &value)
        .await
}

on_both! {
    async fn it_is_committed_with_the_effect_and_rolled_back_with_it<D: Db>() {
        let ground = Ground::<D>::new().await;
        let runs = Runs::default();
        let counted = runs.clone();
        let app = app(ground.layer(), move |Key(key): Key, idempotency: Idempotency, mut tx: Tx<D>| {
            let runs = counted.clone();
            async move {
                let run = runs.begin();
                // What was rolled back was never there.
                assert_eq!(idempotency.checkpointed::<u64>("step").await?, None);
                assert_eq!(idempotency.attempt(), 1);
                charge(&mut tx, &key).await.map_err(TxError::from)?;
                save_in(&mut tx, &idempotency, "step", 1).await?;
                Ok::<_, axum::response::ErrorResponse>(answer(if run == 1 { 402 } else { 201 }))
            }
        });
        assert_eq!(send(&app, post("k", "A")).await.status, 402);
        // Without checkpoints the key is as free as it was.
        assert_eq!(ground.left("k").await, (0, None));
        assert_eq!(send(&app, post("k", "B")).await.status, 201);
        assert_eq!(ground.left("k").await, (1, Some(State::Completed)));
        assert_eq!(runs.count(), 2);
        let checkpoints = ground.value("SELECT count(*) FROM idempotency_checkpoints").await;
        assert_eq!(checkpoints, 1);
    }

    // Saved by itself before the transaction, it stays when that is rolled back.
    async fn one_that_was_saved_before_the_transaction_is_there_for_the_retry<D: Db>() {
        let ground = Ground::<D>::new().await;
        let app = app(ground.layer(), |Key(key): Key, idempotency: Idempotency, mut tx: Tx<D>| async move {
            let seen: Option<u64> = idempotency.checkpointed("step").await?;
            idempotency.checkpoint("step", &1).await?;
            charge(&mut tx, &key).await.map_err(TxError::from)?;
            Ok::<_, axum::response::ErrorResponse>(answer(match seen {
                None => 402,
                Some(_) => 201,
            }))
        });
        assert_eq!(send(&app, post("k", "A")).await.status, 402);
        assert_eq!(ground.left("k").await, (0, Some(State::Released)));
        assert_eq!(send(&app, post("k", "A")).await.status, 201);
        assert_eq!(ground.left("k").await, (1, Some(State::Completed)));
    }

    async fn what_is_saved_beside_an_open_transaction_never_waits_for_it<D: Db>() {
        let ground = Ground::<D>::in_real_time().await;
        let app = app(ground.layer(), |Key(key): Key, idempotency: Idempotency, mut tx: Tx<D>| async move {
            idempotency.checkpoint("before", &1).await?;
            charge(&mut tx, &key).await.map_err(TxError::from)?;
            save_in(&mut tx, &idempotency, "inside", 2).await?;
            let began = Instant::now();
            let beside = idempotency.checkpoint("beside", &3).await;
            if D::IS_POSTGRES {
                beside?;
            } else {
                let refused = beside.unwrap_err();
                assert!(refused.to_string().contains("checkpoint_in"), "{refused}");
                assert!(!refused.is_lost() && !refused.is_unknown());
                assert_eq!(refused.into_response().status(), 500);
            }
            // Nor does one under the same name, which could do nothing else.
            let same = idempotency.checkpoint("inside", &3).await.unwrap_err();
            assert!(same.to_string().contains("checkpoint_in"), "{same}");
            let found: Option<u64> = idempotency.checkpointed("before").await?;
            assert_eq!(found, Some(1));
            assert!(began.elapsed() < AT_ONCE, "{:?}", began.elapsed());
            save_in(&mut tx, &idempotency, "beside", 4).await?;
            Ok::<_, axum::response::ErrorResponse>(created())
        });
        assert_eq!(send(&app, post("k", "A")).await.status, 201);
        assert_eq!(ground.left("k").await, (1, Some(State::Completed)));
        let checkpoints = ground.value("SELECT count(*) FROM idempotency_checkpoints").await;
        assert_eq!(checkpoints, 3);
    }

    // Who asks does not wait for it either.
    async fn whether_the_claim_is_held_is_said_beside_an_open_transaction<D: Db>() {
        let ground = Ground::<D>::in_real_time().await;
        let app = app(ground.layer(), |Key(key): Key, idempotency: Idempotency, mut tx: Tx<D>| async move {
            charge(&mut tx, &key).await.map_err(TxError::from)?;
            let began = Instant::now();
            idempotency.ensure_owned().await?;
            assert!(began.elapsed() < AT_ONCE, "{:?}", began.elapsed());
            Ok::<_, axum::response::ErrorResponse>(created())
        });
        assert_eq!(send(&app, post("k", "A")).await.status, 201);
        assert_eq!(ground.left("k").await, (1, Some(State::Completed)));
    }

    async fn so_it_is_when_it_is_lost<D: Db>() {
        let ground = Ground::<D>::in_real_time().await;
        let store = ground.store.clone();
        let app = app(ground.layer(), move |Key(key): Key, idempotency: Idempotency, mut tx: Tx<D>| {
            let store = store.clone();
            async move {
                assert!(store.forget(&id("k")).await.unwrap());
                charge(&mut tx, &key).await.map_err(TxError::from)?;
                let began = Instant::now();
                assert!(!idempotency.ensure_owned().await.unwrap_err().is_unknown());
                assert!(began.elapsed() < AT_ONCE, "{:?}", began.elapsed());
                Ok::<_, axum::response::ErrorResponse>(created())
            }
        });
        assert_eq!(send(&app, post("k", "A")).await.said(), said(409, IN_FLIGHT));
        assert_eq!(ground.left("k").await, (0, None));
    }

    async fn one_answered_from_a_lost_claim_rolls_back<D: Db>() {
        let ground = Ground::<D>::new().await;
        let (gate, passed) = {
            let gate = Gate::default();
            (gate.clone(), gate)
        };
        let app = app(ground.layer(), move |Key(key): Key, idempotency: Idempotency, mut tx: Tx<D>| {
            let passed = passed.clone();
            async move {
                passed.pass().await;
                charge(&mut tx, &key).await.map_err(TxError::from)?;
                let saved = save_in(&mut tx, &idempotency, "step", 1).await;
                assert!(saved.as_ref().is_err_and(CheckpointError::is_lost), "{saved:?}");
                saved?;
                Ok::<_, axum::response::ErrorResponse>(created())
            }
        });
        let answer = spawn(&app, post("k", "A"));
        gate.reached().await;
        assert!(ground.store.forget(&id("k")).await.unwrap());
        gate.open();
        assert_eq!(answer.await.unwrap().said(), said(409, IN_FLIGHT));
        assert_eq!(ground.left("k").await, (0, None));
    }
}

/// The handler of a conflict: its first try meets a record that was written since its transaction began.
async fn a_conflict_is_run_again(wraps: bool) {
    let ground = Ground::<Postgres>::new().await;
    let layer = ground
        .layer()
        .transactional_with(TxOptions::default().isolation(Isolation::RepeatableRead));
    let runs = Runs::default();
    let (counted, database) = (runs.clone(), ground.place.database().clone());
    let handler = move |Key(key): Key, idempotency: Idempotency, mut tx: Tx<Postgres>| {
        let (runs, database) = (counted.clone(), database.clone());
        async move {
            let run = runs.begin();
            charge(&mut tx, &key).await.map_err(TxError::from)?;
            if run == 1 {
                // In one transaction, as whoever takes a record over does.
                let touch = "SELECT FROM idempotency_records FOR UPDATE; UPDATE idempotency_records SET request_id = request_id";
                database.run(touch).await;
            }
            let saved = save_in(&mut tx, &idempotency, "step", 1).await;
            assert_eq!(saved.is_err(), run == 1);
            match saved {
                Err(error) if wraps => {
                    assert!(error.is_conflict());
                    Err(error.into_response().into())
                }
                saved => {
                    saved?;
                    Ok::<_, axum::response::ErrorResponse>(created())
                }
            }
        }
    };
    let app = app(layer, handler);
    assert_eq!(send(&app, post("k", "A")).await.status, 201);
    assert_eq!(runs.count(), 2);
    assert_eq!(ground.left("k").await, (1, Some(State::Completed)));
    let checkpoints = "SELECT count(*) FROM idempotency_checkpoints";
    assert_eq!(ground.value(checkpoints).await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_conflict_that_a_checkpoint_met_is_run_again() {
    a_conflict_is_run_again(false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn so_is_one_in_a_response_of_the_handlers_own() {
    a_conflict_is_run_again(true).await;
}

// Nobody else can write meanwhile, so it would wait for itself until max_hold.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_refusal_of_sqlite_ends_with_the_transaction() {
    let ground = Ground::<Sqlite>::new().await;
    let app = app(
        ground.layer(),
        |idempotency: Idempotency, mut tx: Tx<Sqlite>| async move {
            // Not begun yet.
            idempotency.checkpoint("step", &1).await?;
            if idempotency.attempt() == 1 {
                charge(&mut tx, "k").await.map_err(TxError::from)?;
                idempotency.checkpoint("step", &2).await?;
            }
            Ok::<_, axum::response::ErrorResponse>(created())
        },
    );
    assert_eq!(send(&app, post("k", "A")).await.status, 500);
    assert_eq!(ground.left("k").await, (0, Some(State::Released)));
    assert_eq!(send(&app, post("k", "A")).await.status, 201);
    let record = ground.record("k").await.unwrap();
    let mut ticket =
        tower_idempotency::store::ClaimRequest::new(record.id, "test", record.fingerprint)
            .ticket(2);
    ticket.token = record.token;
    let saved = ground.store.load(&ticket).await.unwrap().unwrap();
    assert_eq!(&saved[0].value[..], b"\x011");
}

//! Handlers that take or keep their transaction in a way that cannot be.

use std::time::Duration;

use axum::{
    body::Body,
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use futures_util::stream;
use sqlx::{Postgres, Sqlite};
use tokio::{sync::mpsc, time::timeout};
use tower_idempotency::{State, Tx, TxError, TxOptions};

use super::{ground::*, handlers::*};
use crate::{
    on_both,
    support::{Answer, post, request, send},
};

const DONE: Option<State> = Some(State::Completed);

fn text(answer: &Answer) -> String {
    String::from_utf8(answer.body.to_vec()).unwrap()
}

/// A body that holds its transaction until it has been read.
fn holding<D: Db>(tx: Tx<D>) -> Body {
    let pieces = stream::unfold(tx, async |tx| {
        Some((Ok::<_, std::io::Error>(Bytes::from_static(b"piece")), tx))
    });
    Body::from_stream(futures_util::StreamExt::take(pieces, 3))
}

on_both! {
    // N7
    async fn a_handler_that_takes_two_is_refused<D: Db>() {
        let ground = Ground::<D>::new().await;
        let two = app(ground.layer(), async |_one: Tx<D>, _other: Tx<D>| created());
        let answer = send(&two, post("k", "A")).await;
        assert_eq!(answer.status, 500);
        assert!(text(&answer).contains("has a Tx already"), "{}", text(&answer));
        assert_eq!(ground.left("k").await, (0, None));
    }

    // N7
    async fn a_transaction_in_the_answers_body_is_refused_and_nothing_leaks<D: Db>() {
        let ground = Ground::<D>::new().await;
        let keeping = app(ground.layer(), async |Key(key): Key, mut tx: Tx<D>| {
            charge(&mut tx, &key).await?;
            Ok::<_, TxError>((axum::http::StatusCode::CREATED, holding(tx)))
        });
        // More than there are connections.
        for _ in 0..12 {
            assert_eq!(send(&keeping, post("k", "A")).await.said(), said(500, MISUSED));
            assert_eq!(ground.left("k").await, (0, None));
        }
        let (app, _) = charging::<D>(ground.layer(), |_| created());
        assert_eq!(send(&app, post("k", "A")).await.status, 201);
        assert_eq!(ground.left("k").await, (1, DONE));
    }

    // N7
    async fn a_transaction_in_a_task_that_goes_on_is_refused_and_has_no_effect<D: Db>() {
        let ground = Ground::<D>::new().await;
        let (gate, passed) = {
            let gate = Gate::default();
            (gate.clone(), gate)
        };
        let (ended, mut ends) = mpsc::channel(1);
        let keeping = app(ground.layer(), move |Key(key): Key, mut tx: Tx<D>| async move {
            charge(&mut tx, &key).await?;
            tokio::spawn(async move {
                passed.pass().await;
                let further = charge(&mut tx, &key).await;
                drop(tx);
                ended.send(further.is_ok()).await.unwrap();
            });
            Ok::<_, TxError>(created())
        });
        assert_eq!(send(&keeping, post("k", "A")).await.said(), said(500, MISUSED));
        gate.reached().await;
        gate.open();
        timeout(Duration::from_secs(10), ends.recv()).await.unwrap().unwrap();
        ground.comes_to("k", (0, None)).await;
        let (app, _) = charging::<D>(ground.layer(), |_| created());
        assert_eq!(send(&app, post("k", "A")).await.status, 201);
        assert_eq!(ground.left("k").await, (1, DONE));
    }

    async fn a_transaction_in_a_task_that_never_ends_does_not_stop_the_service<D: Db>() {
        let ground = Ground::<D>::new().await;
        let brief = TxOptions::default().max_hold(Duration::from_millis(300));
        let layer = ground.layer().transactional_with(brief);
        let (gate, passed) = {
            let gate = Gate::default();
            (gate.clone(), gate)
        };
        let keeping = app(layer, move |Key(key): Key, mut tx: Tx<D>| async move {
            charge(&mut tx, &key).await?;
            tokio::spawn(async move {
                passed.pass().await;
                drop(tx);
            });
            Ok::<_, TxError>(created())
        });
        assert_eq!(send(&keeping, post("k", "A")).await.said(), said(500, MISUSED));
        let (app, _) = charging::<D>(ground.layer(), |_| created());
        assert_eq!(send(&app, post("other", "A")).await.status, 201);
        assert_eq!(send(&app, post("k", "A")).await.status, 201);
        assert_eq!(ground.left("k").await, (1, DONE));
        gate.open();
    }

    // N7
    async fn a_transaction_behind_a_layer_without_the_option_is_refused_by_name<D: Db>() {
        let ground = Ground::<D>::new().await;
        let (app, runs) = charging::<D>(plain(&ground.store), |_| created());
        let answer = send(&app, post("k", "A")).await;
        assert_eq!(answer.status, 500);
        assert!(text(&answer).contains(".transactional()"), "{}", text(&answer));
        assert_eq!((runs.count(), ground.effects("k").await), (0, 0));
    }

    async fn a_transaction_taken_where_no_key_applies_is_judged_alike<D: Db>() {
        let ground = Ground::<D>::new().await;
        let none = || request("POST", "/charges", None, "A");
        let keeping = app(ground.layer().optional(), async |mut tx: Tx<D>| {
            charge(&mut tx, "none").await?;
            Ok::<_, TxError>(holding(tx))
        });
        let two = app(ground.layer().optional(), async |_one: Tx<D>, _other: Tx<D>| created());
        for _ in 0..6 {
            assert_eq!(send(&keeping, none()).await.status, 500);
            assert_eq!(send(&two, none()).await.status, 500);
        }
        assert_eq!(ground.effects("none").await, 0);
    }
}

async fn other_database_is_refused<D: Db, Other: Db>() {
    async fn handler<Other: Db>(_: Tx<Other>) -> Response {
        created().into_response()
    }
    let ground = Ground::<D>::new().await;
    let app = app(ground.layer().optional(), handler::<Other>);
    for request in [post("k", "A"), request("POST", "/charges", None, "A")] {
        let answer = send(&app, request).await;
        assert_eq!(answer.status, 500);
        assert!(
            text(&answer).contains("another database"),
            "{}",
            text(&answer)
        );
        assert_eq!(ground.left("k").await, (0, None));
    }
}

// N7
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transaction_of_sqlite_over_a_postgres_store_is_refused() {
    other_database_is_refused::<Postgres, Sqlite>().await;
}

// N7
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transaction_of_postgres_over_an_sqlite_store_is_refused() {
    other_database_is_refused::<Sqlite, Postgres>().await;
}

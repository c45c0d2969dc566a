//! What becomes of effect and record, by what the handler answers.

use std::time::Duration;

use axum::{
    Router,
    body::Body,
    extract::Request,
    middleware::{Next, from_fn},
    response::{IntoResponse, Response},
    routing::any,
};
use http_body_util::{BodyExt, channel::Channel};
use tower::ServiceExt;
use tower_idempotency::{Mode, Retain, Retention, State, Streamed, Tx, TxError};

use super::{ground::*, handlers::*};
use crate::{
    on_both,
    support::{bodies::Pieces, post, send},
};

const DONE: Option<State> = Some(State::Completed);

fn with(status: u16, retain: Retain) -> Response {
    (retain, answer(status)).into_response()
}

on_both! {
    // N1
    async fn what_is_answered_with_2xx_or_3xx_is_committed_with_its_record<D: Db>() {
        for status in [200, 201, 202, 204, 206, 301, 303] {
            let ground = Ground::<D>::new().await;
            let (app, runs) = charging::<D>(ground.layer(), move |_| answer(status));
            let first = send(&app, post("k", "A")).await;
            assert_eq!(first.status.as_u16(), status);
            assert_eq!(ground.left("k").await, (1, DONE), "{status}");
            let record = ground.record("k").await.unwrap();
            assert_eq!((record.mode, record.attempt), (Mode::Transactional, 1));
            send(&app, post("k", "A")).await.assert_replays(&first);
            assert_eq!((runs.count(), ground.effects("k").await), (1, 1));
        }
    }

    async fn a_tombstone_is_committed_with_the_effect<D: Db>() {
        let ground = Ground::<D>::new().await;
        let (app, runs) = charging::<D>(ground.layer(), |_| with(201, Retain::Tombstone));
        let first = send(&app, post("k", "A")).await;
        assert_eq!((first.status.as_u16(), &first.body[..]), (201, &b"done"[..]));
        assert_eq!(ground.left("k").await, (1, DONE));
        assert_eq!(ground.record("k").await.unwrap().response, None);
        assert_eq!(send(&app, post("k", "A")).await.said(), said(409, NOT_RETAINED));
        assert_eq!(runs.count(), 1);
    }

    // B3
    async fn an_answer_that_is_too_large_is_a_tombstone_before_its_first_byte_goes_out<D: Db>() {
        let ground = Ground::<D>::new().await;
        let layer = ground.layer().response_body_limit(3);
        let (app, runs) = charging::<D>(layer, |_| created());
        let response = app.clone().oneshot(post("k", "A")).await.unwrap();
        assert_eq!(ground.left("k").await, (1, DONE));
        assert_eq!(ground.record("k").await.unwrap().response, None);
        let body = response.into_body().collect().await.unwrap().to_bytes();
        assert_eq!(&body[..], b"done");
        assert_eq!(send(&app, post("k", "A")).await.said(), said(409, NOT_RETAINED));
        assert_eq!(runs.count(), 1);
    }

    // B4
    async fn a_stream_is_a_tombstone_before_its_first_byte_goes_out<D: Db>() {
        let streams: [fn() -> Response; 3] = [
            || ([("content-type", "text/event-stream")], endless()).into_response(),
            || (Streamed, endless()).into_response(),
            // It says nothing of itself, and goes on for longer than one waits.
            || endless().into_response(),
        ];
        for (n, stream) in streams.into_iter().enumerate() {
            let ground = Ground::<D>::new().await;
            let layer = ground.layer().buffer_timeout(Duration::from_millis(100));
            let (app, runs) = charging::<D>(layer, move |_| stream());
            let response = app.clone().oneshot(post("k", "A")).await.unwrap();
            assert_eq!(response.status(), 200);
            assert_eq!(ground.left("k").await, (1, DONE), "{n}");
            let mut body = response.into_body();
            let first = body.frame().await.unwrap().unwrap();
            assert_eq!(&first.into_data().unwrap()[..], b"first");
            assert_eq!(send(&app, post("k", "A")).await.said(), said(409, NOT_RETAINED));
            assert_eq!(runs.count(), 1);
        }
    }

    async fn a_done_that_is_to_be_released_is_rolled_back_and_refused_by_name<D: Db>() {
        let ground = Ground::<D>::new().await;
        let releasing = Retention::new(|_| Retain::Release);
        let (said_so, first) = charging::<D>(ground.layer(), |_| with(201, Retain::Release));
        let (by_rule, second) = charging::<D>(ground.layer().retention(releasing), |_| answer(303));
        let (unknown, third) = charging::<D>(ground.layer(), |_| with(201, Retain::Abandon));
        for (app, runs) in [(said_so, first), (by_rule, second), (unknown, third)] {
            for run in 1..3 {
                let refused = send(&app, post("k", "A")).await;
                assert_eq!(refused.said(), said(500, MISUSED));
                let detail = refused.json()["detail"].to_string();
                assert!(detail.contains("released"), "{detail}");
                assert_eq!(ground.left("k").await, (0, None));
                assert_eq!(runs.count(), run);
            }
        }
    }

    async fn anything_else_is_rolled_back_and_released_and_its_retry_is_evaluated_anew<D: Db>() {
        for status in [402, 422, 400, 408, 500, 503] {
            let ground = Ground::<D>::new().await;
            let (app, runs) = charging::<D>(ground.layer(), move |run| match run {
                1 => answer(status),
                _ => created(),
            });
            let first = send(&app, post("k", "A")).await;
            assert_eq!((first.status.as_u16(), &first.body[..]), (status, &b"done"[..]));
            assert_eq!(ground.left("k").await, (0, None), "{status}");
            let retry = send(&app, post("k", "A")).await;
            assert_eq!((retry.status.as_u16(), retry.replay, runs.count()), (201, false, 2));
            assert_eq!(ground.left("k").await, (1, DONE));
            assert!(send(&app, post("k", "A")).await.replay);
        }
    }

    async fn a_refusal_that_is_to_be_kept_is_rolled_back_and_recorded<D: Db>() {
        let ground = Ground::<D>::new().await;
        let (app, runs) = charging::<D>(ground.layer(), |_| with(402, Retain::Keep));
        let first = send(&app, post("k", "A")).await;
        assert_eq!(first.status, 402);
        assert_eq!(ground.left("k").await, (0, DONE));
        send(&app, post("k", "A")).await.assert_replays(&first);
        assert_eq!(runs.count(), 1);
    }

    async fn a_refusal_that_leaves_a_tombstone_is_rolled_back_and_recorded<D: Db>() {
        let ground = Ground::<D>::new().await;
        let (app, runs) = charging::<D>(ground.layer(), |_| with(402, Retain::Tombstone));
        assert_eq!(send(&app, post("k", "A")).await.status, 402);
        assert_eq!(ground.left("k").await, (0, DONE));
        let retry = send(&app, post("k", "A")).await;
        assert_eq!(retry.said(), said(409, NOT_RETAINED));
        assert_eq!(runs.count(), 1);
    }

    async fn an_outcome_a_handler_does_not_know_was_not_committed<D: Db>() {
        let ground = Ground::<D>::new().await;
        let (app, runs) = charging::<D>(ground.layer(), |run| match run {
            1 => with(504, Retain::Abandon),
            _ => created(),
        });
        assert_eq!(send(&app, post("k", "A")).await.status, 504);
        assert_eq!(ground.left("k").await, (0, None));
        assert_eq!(send(&app, post("k", "A")).await.status, 201);
        assert_eq!((ground.left("k").await, runs.count()), ((1, DONE), 2));
    }

    async fn a_body_that_fails_before_it_is_kept_takes_the_effect_with_it<D: Db>() {
        let ground = Ground::<D>::new().await;
        let (app, runs) = charging::<D>(ground.layer(), |run| match run {
            1 => Response::new(Body::new(Pieces::new(["first"]).then_error())),
            _ => created(),
        });
        let response = app.clone().oneshot(post("k", "A")).await.unwrap();
        assert_eq!(ground.left("k").await, (0, None));
        assert!(response.into_body().collect().await.is_err(), "the caller does not see it");
        assert_eq!(send(&app, post("k", "A")).await.status, 201);
        assert_eq!((ground.left("k").await, runs.count()), ((1, DONE), 2));
    }

    async fn a_transaction_that_is_never_begun_is_completed_by_an_ordinary_write<D: Db>() {
        let ground = Ground::<D>::new().await;
        let runs = Runs::default();
        let counted = runs.clone();
        let untouched = app(ground.layer(), move |_tx: Tx<D>| async move {
            counted.begin();
            created()
        });
        let first = send(&untouched, post("k", "A")).await;
        assert_eq!((first.status.as_u16(), ground.left("k").await), (201, (0, DONE)));
        send(&untouched, post("k", "A")).await.assert_replays(&first);
        let none = app(ground.layer(), async || created());
        let first = send(&none, post("none", "A")).await;
        assert_eq!((first.status.as_u16(), ground.left("none").await), (201, (0, DONE)));
        send(&none, post("none", "A")).await.assert_replays(&first);
        assert_eq!(runs.count(), 1);
    }

    async fn a_transaction_given_back_and_taken_again_in_one_request_is_one<D: Db>() {
        for status in [201, 402] {
            let ground = Ground::<D>::new().await;
            let before = async |Key(key): Key, mut tx: Tx<D>, request: Request, next: Next| {
                charge(&mut tx, &key).await?;
                drop(tx);
                Ok::<_, TxError>(next.run(request).await)
            };
            let handler = move |Key(key): Key, mut tx: Tx<D>| async move {
                // What is not committed yet is seen only in the same transaction.
                let seen = D::value_in(&mut tx, "SELECT count(*) FROM effects").await?;
                charge(&mut tx, &key).await?;
                Ok::<_, TxError>(answer(if seen == 1 { status } else { 500 }))
            };
            let routes = Router::new().route("/charges", any(handler));
            let app = routes.route_layer(from_fn(before)).route_layer(ground.layer());
            assert_eq!(send(&app, post("k", "A")).await.status.as_u16(), status);
            let left = if status == 201 { (2, DONE) } else { (0, None) };
            assert_eq!(ground.left("k").await, left);
        }
    }
}

/// Its first piece is there, and nothing more ever comes.
fn endless() -> Body {
    let (mut sender, body) = Channel::<bytes::Bytes>::new(1);
    tokio::spawn(async move {
        let _ = sender.send_data("first".into()).await;
        std::future::pending::<()>().await;
    });
    Body::new(body)
}

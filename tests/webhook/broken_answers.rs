//! What a delivery is told after an answer that did not come to its end.

use std::{io, time::Duration};

use axum::{
    Router,
    body::Body,
    http::{HeaderMap, HeaderValue, Request, Response},
};
use bytes::Bytes;
use futures_util::stream;
use tower::ServiceExt;
use tower_idempotency::{
    Audience, IdempotencyLayer, Profile, Recovery, Retention, State, Streamed,
};

use crate::{
    every_store,
    support::{logs::Logs, *},
};

fn layer(store: &TestStore) -> IdempotencyLayer<TestStore> {
    IdempotencyLayer::new(store.clone())
        .single_tenant()
        .profile(Profile::Webhook)
}

fn delivery(event: &str) -> Request<Body> {
    let request = Request::post("/webhooks").header("webhook-id", event);
    request.body(Body::from("{}")).unwrap()
}

/// Two steps of work, the second of which fails.
fn broken() -> Body {
    Body::from_stream(stream::iter([
        Ok(Bytes::from_static(b"step 1\n")),
        Err(io::Error::other("step 2 failed")),
    ]))
}

/// Sends it, and its body breaks off. No sender sees the 2xx of its head.
async fn send_and_see_it_break_off(app: &Router, event: &str) {
    let answer = send(app, delivery(event)).await;
    let unknown = "idempotency_outcome_unknown".to_owned();
    assert_eq!((answer.said(), answer.replay), ((503, unknown), false));
    assert_eq!(answer.header("retry-after"), Some("60"));
}

/// What a client sees of it.
async fn send_and_see_half_of_it(app: &Router, event: &str) {
    let answer = app.clone().oneshot(delivery(event)).await.unwrap();
    assert_eq!(answer.status(), 200);
    let body = axum::body::to_bytes(answer.into_body(), 1_000).await;
    assert!(body.is_err());
}

/// Its first runs break off, as many as these.
fn breaking(runs: usize) -> Handler {
    Handler::answering(move |seen| match seen.run <= runs {
        true => Response::new(broken()),
        false => Response::new(Body::from("all steps")),
    })
}

every_store! {
    // B4, L12
    async fn it_is_no_completed_run_and_the_next_delivery_runs(world: World) {
        let store = world.open().await;
        let handler = breaking(1);
        let app = handler.behind(layer(&store));
        send_and_see_it_break_off(&app, "evt_1").await;
        assert_eq!(state(&store, "evt_1").await, Some(State::Abandoned));
        let next = send(&app, delivery("evt_1")).await;
        assert_eq!((next.status.as_u16(), next.replay, &next.body[..]), (200, false, &b"all steps"[..]));
        send(&app, delivery("evt_1")).await.assert_replays(&next);
        assert_eq!(handler.effects(), 2);
    }

    // Y3
    async fn breaking_off_each_time_it_runs_three_times_at_most(world: World) {
        let store = world.open().await;
        let handler = breaking(usize::MAX);
        let app = handler.behind(layer(&store));
        for _ in 0..3 {
            send_and_see_it_break_off(&app, "evt_1").await;
        }
        let refused = send(&app, delivery("evt_1")).await;
        assert_eq!(refused.said(), (503, "idempotency_outcome_unknown".into()));
        assert_eq!(handler.effects(), 3);
    }

    async fn the_recovery_policy_decides_and_for_clients_it_is_done(world: World) {
        let store = world.open().await;
        let handler = breaking(usize::MAX);
        let app = handler.behind(layer(&store).recovery(Recovery::Refuse));
        send_and_see_it_break_off(&app, "evt_1").await;
        let refused = send(&app, delivery("evt_1")).await;
        assert_eq!(refused.said(), (503, "idempotency_outcome_unknown".into()));

        let app = handler.behind(layer(&store).audience(Audience::Clients));
        send_and_see_half_of_it(&app, "evt_2").await;
        assert_eq!(state(&store, "evt_2").await, Some(State::Completed));
        let refused = send(&app, delivery("evt_2")).await;
        assert_eq!(refused.said(), (409, "idempotency_response_not_retained".into()));
        assert_eq!(handler.effects(), 2);
    }

    async fn a_failure_that_breaks_off_frees_the_id_or_is_unknown_where_it_was_to_be_kept(world: World) {
        let store = world.open().await;
        let handler = Handler::answering(|_| Response::builder().status(502).body(broken()).unwrap());
        let app = handler.behind(layer(&store));
        let answer = app.clone().oneshot(delivery("evt_1")).await.unwrap();
        assert_eq!(answer.status(), 502);
        assert_eq!(record(&store, "evt_1").await, None);

        let app = handler.behind(layer(&store).retention(Retention::standard()));
        app.clone().oneshot(delivery("evt_1")).await.unwrap();
        assert_eq!(state(&store, "evt_1").await, Some(State::Abandoned));
    }

    // As the chapter says: the head of a stream counts, and nobody can take that back.
    async fn of_a_stream_the_head_alone_counts(world: World) {
        let store = world.open().await;
        let patience = Duration::from_millis(20);
        for (at, streamed) in ["late", "marked", "events"].into_iter().enumerate() {
            let (sender, body) = http_body_util::channel::Channel::<Bytes, io::Error>::new(1);
            let body = std::sync::Mutex::new(Some(body));
            let handler = Handler::answering(move |_| {
                let body = body.lock().unwrap().take().expect("it runs once");
                let mut response = Response::new(Body::new(body));
                match streamed {
                    "marked" => drop(response.extensions_mut().insert(Streamed)),
                    "events" => {
                        let kind = HeaderValue::from_static("text/event-stream");
                        response.headers_mut().insert("content-type", kind);
                    }
                    _ => {}
                }
                response
            });
            let app = handler.behind(layer(&store).buffer_timeout(patience));
            let first = app.clone().oneshot(delivery(streamed)).await.unwrap();
            assert_eq!(first.status(), 200);
            let done = |answer: Answer| {
                assert_eq!((answer.status.as_u16(), answer.replay, answer.body.len()), (200, true, 0), "{streamed}");
            };
            // While it is coming, and when it has broken off.
            done(send(&app, delivery(streamed)).await);
            sender.abort(io::Error::other("step 2 failed"));
            assert!(axum::body::to_bytes(first.into_body(), 1_000).await.is_err());
            done(send(&app, delivery(streamed)).await);
            assert_eq!((handler.effects(), records(&store).await), (1, at as u64 + 1));
        }
    }
}

#[tokio::test]
async fn it_is_said_as_a_run_that_was_cut_off() {
    for world in World::each() {
        #[cfg(feature = "metrics")]
        let (collected, _alone) = metrics::Collected::of_this_thread();
        let (logs, _guard) = Logs::of_this_thread();
        let store = world.open().await;
        let app = breaking(1).behind(layer(&store));
        send_and_see_it_break_off(&app, "evt_1").await;
        let said = logs.loud("idempotent run abandoned; its outcome is unknown");
        assert_eq!(said.len(), 1);
        assert!(said[0].text.contains("the body of its answer broke off"));
        #[cfg(feature = "metrics")]
        assert_eq!(
            collected.by_label("idempotency_abandoned_total"),
            [("broke_off".to_owned(), 1)].into()
        );
    }
}

/// Fields after the body are no part of what is kept, and no failure.
#[tokio::test]
async fn an_answer_with_trailers_is_a_whole_one() {
    let world = World::memory();
    let store = world.open().await;
    let handler = Handler::answering(|_| {
        let mut trailers = HeaderMap::new();
        trailers.insert("x-checksum", HeaderValue::from_static("abc"));
        let frames = [
            Ok::<_, io::Error>(http_body::Frame::data(Bytes::from_static(b"done"))),
            Ok(http_body::Frame::trailers(trailers)),
        ];
        Response::new(Body::new(http_body_util::StreamBody::new(stream::iter(
            frames,
        ))))
    });
    let app = handler.behind(layer(&store));
    let first = send(&app, delivery("evt_1")).await;
    send(&app, delivery("evt_1")).await.assert_replays(&first);
    assert_eq!(handler.effects(), 1);
}

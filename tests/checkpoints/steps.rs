//! An operation of several steps goes on after the last one that was finished.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{Router, http::StatusCode, routing::any};
use serde::{Deserialize, Serialize};
use tower_http::catch_panic::CatchPanicLayer;
use tower_idempotency::{
    CheckpointError, Idempotency, Recovery, State, store::Inspect, testing::Operation,
};

use crate::{
    common::*,
    every_store,
    support::{post, send},
};

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Reserved {
    number: usize,
    note: Option<String>,
}

/// Two steps, of which the second ends as the test says.
#[derive(Clone)]
struct Shop {
    reserved: Arc<AtomicUsize>,
    charged: Arc<AtomicUsize>,
    attempts: Arc<Mutex<Vec<u32>>>,
    charges: Arc<dyn Fn(usize) -> StatusCode + Send + Sync>,
}

impl Shop {
    /// `charges` is told which run it is for, whatever its attempt.
    fn new(charges: impl Fn(usize) -> StatusCode + Send + Sync + 'static) -> Self {
        Self {
            reserved: Arc::default(),
            charged: Arc::default(),
            attempts: Arc::default(),
            charges: Arc::new(charges),
        }
    }

    async fn pay(self, idempotency: Idempotency) -> Result<(StatusCode, String), CheckpointError> {
        let run = {
            let mut attempts = self.attempts.lock().unwrap();
            attempts.push(idempotency.attempt());
            attempts.len()
        };
        let reserved = match idempotency.checkpointed("reserved").await? {
            Some(reserved) => reserved,
            None => {
                let number = self.reserved.fetch_add(1, Ordering::SeqCst) + 1;
                let note = Some("für 'später'\0".to_owned());
                let reserved = Reserved { number, note };
                idempotency.checkpoint("reserved", &reserved).await?;
                reserved
            }
        };
        assert_eq!(reserved.note.as_deref(), Some("für 'später'\0"));
        let status = (self.charges)(run);
        if status.is_success() {
            self.charged.fetch_add(1, Ordering::SeqCst);
        }
        Ok((status, format!("reservation {}", reserved.number)))
    }

    fn router(&self) -> Router {
        let shop = self.clone();
        let handler = move |idempotency: Idempotency| shop.clone().pay(idempotency);
        Router::new().route("/charges", any(handler))
    }

    /// How often each step was taken, and which attempts there were.
    fn done(&self) -> (usize, usize, Vec<u32>) {
        let count = |step: &AtomicUsize| step.load(Ordering::SeqCst);
        let attempts = self.attempts.lock().unwrap().clone();
        (count(&self.reserved), count(&self.charged), attempts)
    }
}

/// Down twice, and then up.
fn down_twice(run: usize) -> StatusCode {
    match run {
        1 | 2 => StatusCode::SERVICE_UNAVAILABLE,
        _ => StatusCode::CREATED,
    }
}

/// How each run ends: 0 is a panic.
fn scripted(script: &'static [u16]) -> impl Fn(usize) -> StatusCode {
    |run| StatusCode::from_u16(script[run - 1]).expect("as the test wants")
}

/// Sends it once for each of these statuses, and wants it.
async fn gets(app: &Router, statuses: &[u16]) {
    for (at, status) in statuses.iter().enumerate() {
        let answer = send(app, post("k", "A")).await;
        assert_eq!(
            (answer.status.as_u16(), answer.replay),
            (*status, false),
            "{at}"
        );
    }
}

every_store! {
    // E1
    async fn a_retry_of_a_failure_goes_on_after_the_last_step(world: World) {
        let store = world.open().await;
        let shop = Shop::new(down_twice);
        let app = shop.router().route_layer(layer(&store));
        for _ in 0..2 {
            let down = send(&app, post("k", "A")).await;
            assert_eq!((down.status.as_u16(), down.replay), (503, false));
            assert_eq!(state(&store, "k").await, Some(State::Released));
            // What was begun is for this body and no other.
            assert_eq!(send(&app, post("k", "B")).await.said(), (409, REUSED.to_owned()));
        }
        let up = send(&app, post("k", "A")).await;
        assert_eq!((up.status.as_u16(), up.replay), (201, false));
        assert_eq!(up.body, "reservation 1");
        send(&app, post("k", "A")).await.assert_replays(&up);
        assert_eq!(shop.done(), (1, 1, vec![1, 2, 2]));
    }

    async fn another_instance_goes_on_where_the_first_was(world: World) {
        let shop = Shop::new(down_twice);
        for expected in [503, 503, 201] {
            let store = world.open().await;
            let app = shop.router().route_layer(layer(&store));
            assert_eq!(send(&app, post("k", "A")).await.status, expected);
        }
        assert_eq!(shop.done(), (1, 1, vec![1, 2, 2]));
    }

    // L11
    async fn a_crash_after_a_step_is_gone_on_from_when_reruns_are_allowed(world: World) {
        let store = world.open().await;
        let shop = Shop::new(|run| {
            assert!(run == 2, "as the test wants");
            StatusCode::CREATED
        });
        let app = shop.router().route_layer(layer(&store)).layer(CatchPanicLayer::new());
        assert_eq!(send(&app, post("k", "A")).await.status, 500);
        assert_eq!(state(&store, "k").await, Some(State::Abandoned));
        assert_eq!(send(&app, post("k", "B")).await.said(), (409, REUSED.to_owned()));
        let up = send(&app, post("k", "A")).await;
        assert_eq!((up.status.as_u16(), up.replay), (201, false));
        send(&app, post("k", "A")).await.assert_replays(&up);
        assert_eq!(shop.done(), (1, 1, vec![1, 2]));
    }

    // L11
    async fn a_crash_after_a_step_is_refused_when_they_are_not(world: World) {
        let store = world.open().await;
        let shop = Shop::new(|_| panic!("as the test wants"));
        let layer = layer(&store).recovery(Recovery::Refuse);
        let app = shop.router().route_layer(layer).layer(CatchPanicLayer::new());
        assert_eq!(send(&app, post("k", "A")).await.status, 500);
        for _ in 0..2 {
            assert_eq!(send(&app, post("k", "A")).await.said(), (409, UNKNOWN.to_owned()));
        }
        assert_eq!(shop.done(), (1, 0, vec![1]));
    }

    // L11, Y3: runs that ended in order use none of the reruns after a crash up.
    async fn failures_before_a_crash_do_not_count(world: World) {
        let store = world.open().await;
        let shop = Shop::new(scripted(&[503, 503, 503, 0, 201]));
        let app = shop.router().route_layer(layer(&store)).layer(CatchPanicLayer::new());
        gets(&app, &[503, 503, 503, 500]).await;
        assert_eq!(state(&store, "k").await, Some(State::Abandoned));
        gets(&app, &[201]).await;
        assert_eq!(shop.done(), (1, 1, vec![1, 2, 2, 2, 3]));
    }

    // L11, Y3
    async fn failures_after_a_crash_do_not_count(world: World) {
        let store = world.open().await;
        let shop = Shop::new(scripted(&[0, 503, 503, 503, 503, 201]));
        let app = shop.router().route_layer(layer(&store)).layer(CatchPanicLayer::new());
        gets(&app, &[500, 503, 503, 503, 503]).await;
        // What was cut off stays unknown, whatever was refused since.
        assert_eq!(state(&store, "k").await, Some(State::Abandoned));
        gets(&app, &[201]).await;
        assert_eq!(shop.done(), (1, 1, vec![1, 2, 2, 2, 2, 2]));
    }

    // Y3: crashes do, whatever ends in order between them.
    async fn crashes_count_among_failures(world: World) {
        let store = world.open().await;
        let shop = Shop::new(scripted(&[0, 503, 0, 503, 503, 0]));
        let app = shop.router().route_layer(layer(&store)).layer(CatchPanicLayer::new());
        gets(&app, &[500, 503, 500, 503, 503, 500]).await;
        for _ in 0..2 {
            assert_eq!(send(&app, post("k", "A")).await.said(), (409, UNKNOWN.to_owned()));
        }
        assert_eq!(shop.done(), (1, 0, vec![1, 2, 2, 3, 3, 3]));
    }

    async fn a_process_that_fell_silent_is_gone_on_from_after_its_lease(world: World) {
        let mut first = Stage::silent(&world).await;
        let (run, _answer) = first.begin(post("k", "A")).await;
        run.owner().checkpoint("step", &1).await.unwrap();
        world.clock.advance(LEASE + Duration::from_secs(1));

        let mut second = Stage::on(&world).await;
        let (rerun, answer) = second.begin(post("k", "A")).await;
        assert_eq!(rerun.owner().attempt(), 2);
        assert_eq!(read(rerun.owner(), "step").await, Some(1));
        rerun.owner().checkpoint("step", &2).await.unwrap();
        rerun.answers(503, "down");
        assert_eq!(answer.await.unwrap().status, 503);

        let (third, answer) = second.begin(post("k", "A")).await;
        assert_eq!((third.owner().attempt(), read(third.owner(), "step").await), (2, Some(2)));
        third.answers(201, "done");
        assert_eq!(answer.await.unwrap().status, 201);
    }

    async fn what_was_released_waits_a_ttl_for_its_retry(world: World) {
        let mut stage = Stage::on(&world).await;
        for (wait, attempt, step) in [
            (Duration::ZERO, 1, None),
            (TTL - Duration::from_secs(1), 2, Some(1)),
            // Counted from the last release.
            (TTL - Duration::from_secs(1), 2, Some(1)),
            // Over: as new, and nothing is left.
            (TTL + Duration::from_secs(1), 1, None),
        ] {
            world.clock.advance(wait);
            let (run, answer) = stage.begin(post("k", "A")).await;
            assert_eq!((run.owner().attempt(), read(run.owner(), "step").await), (attempt, step));
            run.owner().checkpoint("step", &1).await.unwrap();
            run.answers(503, "down");
            assert_eq!(answer.await.unwrap().status, 503);
        }
        world.clock.advance(TTL + Duration::from_secs(1));
        let (run, answer) = stage.begin(post("k", "B")).await;
        assert_eq!((run.owner().attempt(), read(run.owner(), "step").await), (1, None));
        run.answers(201, "done");
        assert_eq!(answer.await.unwrap().status, 201);
    }

    // E3
    async fn a_failure_without_checkpoints_leaves_nothing(world: World) {
        let mut stage = Stage::on(&world).await;
        for body in ["A", "B"] {
            let (run, answer) = stage.begin(post("k", body)).await;
            assert_eq!(run.owner().attempt(), 1);
            assert_eq!(read(run.owner(), "step").await, None);
            run.answers(503, "down");
            assert_eq!(answer.await.unwrap().status, 503);
            assert_eq!(state(&stage.store, "k").await, None);
        }
    }

    async fn the_store_is_asked_at_most_once_in_a_run(world: World) {
        let mut stage = Stage::on(&world).await;
        let (run, answer) = stage.begin(post("k", "A")).await;
        let clone = run.owner().clone();
        for _ in 0..3 {
            assert_eq!(read(run.owner(), "step").await, None);
        }
        run.owner().checkpoint("step", &1).await.unwrap();
        assert_eq!(read(&clone, "step").await, Some(1));
        clone.checkpoint("step", &2).await.unwrap();
        clone.checkpoint("other", &3).await.unwrap();
        assert_eq!((read(run.owner(), "step").await, read(&clone, "other").await), (Some(2), Some(3)));
        assert_eq!(stage.store.calls(Operation::Load), 0);
        run.answers(503, "down");
        answer.await.unwrap();

        let (run, answer) = stage.begin(post("k", "A")).await;
        assert_eq!((read(run.owner(), "step").await, read(run.owner(), "none").await), (Some(2), None));
        run.owner().checkpoint("step", &4).await.unwrap();
        assert_eq!((read(run.owner(), "step").await, read(run.owner(), "other").await), (Some(4), Some(3)));
        assert_eq!((stage.store.calls(Operation::Load), stage.store.calls(Operation::Save)), (1, 4));
        run.answers(503, "down");
        answer.await.unwrap();
    }

    async fn many_at_once_are_all_saved(world: World) {
        let mut stage = Stage::on(&world).await;
        let (run, answer) = stage.begin(post("k", "A")).await;
        let saving = (0..24_u64).map(|at| {
            let owner = run.owner().clone();
            tokio::spawn(async move { owner.checkpoint(&format!("step-{}", at % 12), &at).await })
        });
        for saved in saving.collect::<Vec<_>>() {
            saved.await.unwrap().unwrap();
        }
        let mut known = Vec::new();
        for at in 0..12 {
            known.push(read(run.owner(), &format!("step-{at}")).await.unwrap());
        }
        run.answers(503, "down");
        answer.await.unwrap();
        // What the run knew is what is stored.
        let (run, _answer) = stage.begin(post("k", "A")).await;
        for (at, known) in known.into_iter().enumerate() {
            assert_eq!(read(run.owner(), &format!("step-{at}")).await, Some(known));
        }
        run.answers(201, "done");
    }

    async fn a_record_that_is_forgotten_takes_its_checkpoints_with_it(world: World) {
        let mut stage = Stage::on(&world).await;
        let (run, answer) = stage.begin(post("k", "A")).await;
        run.owner().checkpoint("step", &1).await.unwrap();
        run.answers(503, "down");
        answer.await.unwrap();
        assert!(stage.store.forget(&id("k")).await.unwrap());
        let (run, answer) = stage.begin(post("k", "B")).await;
        assert_eq!((run.owner().attempt(), read(run.owner(), "step").await), (1, None));
        run.answers(201, "done");
        answer.await.unwrap();
    }

    async fn floats_come_back_to_the_last_bit(world: World) {
        let mut bits = 0x9E37_79B9_7F4A_7C15_u64;
        let next = |_| {
            bits ^= bits << 13;
            bits ^= bits >> 7;
            bits ^= bits << 17;
            (bits >> 11) as f64 / (1_u64 << 53) as f64 * 1_000.0
        };
        let saved: Vec<f64> = (0..2_500).map(next).collect();
        let mut stage = Stage::on(&world).await;
        let (run, answer) = stage.begin(post("k", "A")).await;
        run.owner().checkpoint("amounts", &saved).await.unwrap();
        run.answers(503, "down");
        answer.await.unwrap();
        let (run, _answer) = stage.begin(post("k", "A")).await;
        let found: Option<Vec<f64>> = run.owner().checkpointed("amounts").await.unwrap();
        for (saved, found) in saved.iter().zip(found.unwrap()) {
            assert_eq!(found.to_bits(), saved.to_bits(), "{saved:?} came back as {found:?}");
        }
        run.answers(201, "done");
    }
}

//! Two processes, impatient clients, handlers and resolvers that panic, and a store whose answers get lost.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use axum::routing::post as on_post;
use tower_idempotency::{Idempotency, Retention};

use super::*;

/// How long it storms.
const STORM: Duration = Duration::from_secs(3);
const KEYS: usize = 16;

type Counts = Arc<Mutex<HashMap<String, usize>>>;

fn count(counts: &Counts, key: &str) -> usize {
    let mut counts = counts.lock().unwrap();
    let count = counts.entry(key.to_owned()).or_default();
    *count += 1;
    *count
}

fn counted(counts: &Counts, key: &str) -> usize {
    counts.lock().unwrap().get(key).copied().unwrap_or(0)
}

/// Waits for less than this many milliseconds.
async fn up_to(milliseconds: u64) {
    tokio::time::sleep(Duration::from_millis(rand::random::<u64>() % milliseconds)).await;
}

fn one_of<T>(of: &[T]) -> &T {
    &of[usize::from(rand::random::<u8>()) % of.len()]
}

/// What happens outside of the layer, whoever does it.
#[derive(Clone, Default)]
struct Outside {
    effects: Counts,
    active: Counts,
    calm: Arc<AtomicBool>,
    twice: Arc<AtomicBool>,
}

/// A run that is going on, until it is dropped.
struct Active(Counts, String);

impl Drop for Active {
    fn drop(&mut self) {
        *self.0.lock().unwrap().get_mut(&self.1).unwrap() -= 1;
    }
}

impl Outside {
    fn is_calm(&self) -> bool {
        self.calm.load(Ordering::SeqCst)
    }

    /// A handler that may be cut off before its effect and after.
    async fn charge(self, idempotency: Idempotency) -> Response {
        let key = idempotency.key().as_str().unwrap().to_owned();
        count(&self.active, &key);
        let _active = Active(self.active.clone(), key.clone());
        let dice = if self.is_calm() {
            9
        } else {
            rand::random::<u8>() % 10
        };
        match dice {
            0 => panic!("before the effect"),
            1 => return abandons(),
            _ => up_to(5).await,
        }
        if count(&self.effects, &key) > 1 {
            self.twice.store(true, Ordering::SeqCst);
        }
        match dice {
            2 | 3 => panic!("after the effect"),
            4 | 5 => return abandons(),
            _ => up_to(5).await,
        }
        (StatusCode::CREATED, format!("paid {key}")).into_response()
    }

    /// A resolver that sees the effects, and does not judge runs that are going on.
    async fn inquiry(self, abandoned: Abandoned) -> Verdict {
        up_to(8).await;
        let key = abandoned.key().unwrap().as_str().unwrap().to_owned();
        match rand::random::<u8>() % 4 {
            0 if !self.is_calm() => return Verdict::Leave,
            1 if !self.is_calm() => panic!("as the test wants"),
            _ => {}
        }
        if counted(&self.active, &key) > 0 {
            return Verdict::Leave;
        }
        match counted(&self.effects, &key) {
            0 => Verdict::DidNotHappen,
            _ => Verdict::answer((StatusCode::CREATED, format!("paid {key}"))),
        }
    }

    fn process(&self, store: &TestStore) -> (Router, IdempotencyLayer<TestStore>) {
        let (asked, run) = (self.clone(), self.clone());
        let layer = layer(store)
            .store_timeout(Duration::from_millis(500))
            .resolver(move |abandoned: Abandoned| asked.clone().inquiry(abandoned))
            .in_flight(InFlight::Wait(Duration::from_millis(50)))
            .max_running(8);
        let handler = on_post(move |idempotency: Idempotency| run.clone().charge(idempotency));
        let app = Router::new().route("/charges", handler);
        let app = app.route_layer(layer.clone()).layer(CatchPanicLayer::new());
        (app, layer)
    }
}

/// Sends every key to either process over and over, and seldom waits for the answer; the store fails meanwhile
/// in these calls.
async fn storm(apps: &[Router], stores: &[TestStore], fails: &[Operation], patience: u64) {
    let end = Instant::now() + STORM;
    let client = |number: usize| {
        let apps = apps.to_vec();
        async move {
            let key = format!("k{}", number % KEYS);
            while Instant::now() < end {
                let app = &apps[usize::from(rand::random::<bool>())];
                let patience = Duration::from_millis(1 + rand::random::<u64>() % patience);
                let answer = timeout(patience, send(app, post(&key, "A"))).await;
                if let Ok(answer) = answer
                    && answer.status == 201
                {
                    assert_eq!(&answer.body[..], format!("paid {key}").as_bytes());
                }
                tokio::time::sleep(Duration::from_millis(8)).await;
            }
        }
    };
    let clients: Vec<_> = (0..KEYS * 2)
        .map(|number| tokio::spawn(client(number)))
        .collect();
    while Instant::now() < end {
        let moment = Duration::from_millis(30);
        let faults = [
            Fault::Before,
            Fault::After,
            Fault::After,
            Fault::DelayBefore(moment),
            Fault::DelayAfter(moment),
            Fault::HangAfter,
        ];
        let (operation, fault) = (*one_of(fails), *one_of(&faults));
        one_of(stores).fail(operation, fault, Times::Once);
        tokio::time::sleep(Duration::from_millis(3)).await;
    }
    for client in clients {
        client.await.unwrap();
    }
    for store in stores {
        store.clear();
    }
}

/// Retries until the key has its answer.
async fn comes_to_be_paid(app: &Router, key: &str) {
    let until = Instant::now() + Duration::from_secs(15);
    loop {
        let answer = send(app, post(key, "A")).await;
        if answer.status == 201 {
            assert_eq!(&answer.body[..], format!("paid {key}").as_bytes());
            return;
        }
        assert!(
            Instant::now() < until,
            "{key} is stuck: {:?}",
            answer.said()
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// A process whose runs are cut off now and then, and are run again; none of them ever settles anything.
fn reruns(store: &TestStore, panics: &Counts) -> Router {
    let panics = panics.clone();
    let handler = on_post(move |idempotency: Idempotency| {
        let panics = panics.clone();
        async move {
            let attempt = idempotency.attempt();
            if !(1..=3).contains(&attempt) {
                // More than any run that was cut off, so that the test sees it.
                panics.lock().unwrap().insert("attempts".to_owned(), 100);
            }
            up_to(3).await;
            if rand::random::<u8>().is_multiple_of(8) {
                count(&panics, idempotency.key().as_str().unwrap());
                panic!("as the test wants");
            }
            abandons()
        }
    });
    let layer = layer(store)
        .store_timeout(Duration::from_millis(300))
        .recovery(Recovery::rerun())
        .retention(Retention::successes_only());
    let app = Router::new().route("/charges", handler);
    app.route_layer(layer).layer(CatchPanicLayer::new())
}

every_store! {
    async fn in_a_storm_every_effect_happens_once_and_every_key_gets_its_answer(world: World) {
        let outside = Outside::default();
        let stores = [world.open().await, world.open().await];
        let (apps, layers): (Vec<_>, Vec<_>) = stores.iter().map(|store| outside.process(store)).unzip();
        let fails = [
            Operation::TakeOver,
            Operation::Abandon,
            Operation::Claim,
            Operation::Complete,
            Operation::Release,
            Operation::Load,
            Operation::Get,
        ];
        storm(&apps, &stores, &fails, 120).await;
        outside.calm.store(true, Ordering::SeqCst);
        for key in 0..KEYS {
            comes_to_be_paid(&apps[0], &format!("k{key}")).await;
        }
        assert!(!outside.twice.load(Ordering::SeqCst), "an effect happened twice");
        assert_eq!(outside.effects.lock().unwrap().len(), KEYS);
        for layer in layers {
            let drained = timeout(Duration::from_secs(6), layer.drain(Duration::from_secs(3)));
            drained.await.expect("something goes on for ever");
        }
    }

    async fn in_a_storm_runs_that_are_cut_off_stay_within_their_bounds(world: World) {
        let panics = Counts::default();
        let stores = [world.open().await, world.open().await];
        let apps: Vec<_> = stores.iter().map(|store| reruns(store, &panics)).collect();
        storm(&apps, &stores, &[Operation::Abandon, Operation::Claim], 60).await;
        for key in 0..KEYS {
            let key = format!("k{key}");
            comes_to(&stores[0], &key, Some(State::Abandoned)).await;
            let record = record(&stores[0], &key).await.unwrap();
            assert!((1..=3).contains(&record.attempt), "{key}: {}", record.attempt);
        }
        let panics = panics.lock().unwrap().clone();
        assert!(panics.values().all(|panics| *panics <= 3), "{panics:?}");
    }
}

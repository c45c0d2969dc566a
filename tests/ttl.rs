//! How long things are kept, and by whose clock.

mod support;

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::{
        Arc,
        atomic::{AtomicIsize, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use axum::Router;
use bytes::Bytes;
use support::{puppet::Puppet, *};
use tokio::{sync::Barrier, task::JoinSet, time::sleep};
use tower_http::catch_panic::CatchPanicLayer;
use tower_idempotency::{
    AnyStore, Fingerprint, IdempotencyKey, IdempotencyLayer, MemoryStore, RecordId, Recovery,
    Scope, SqliteStore, State, Timestamp,
    store::{Claim, ClaimRequest, Clock, Completion, Inspect, Lifetimes, Store},
    testing::{FakeClock, FaultyStore, Operation},
};

const IN_FLIGHT: &str = "idempotency_in_flight";
const UNKNOWN: &str = "idempotency_outcome_unknown";
const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3_600);
const LEASE: Duration = Duration::from_secs(30);

/// Counts the bytes that are allocated.
struct Counting;

static ALLOCATED: AtomicIsize = AtomicIsize::new(0);

unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATED.fetch_add(layout.size() as isize, Ordering::Relaxed);
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        ALLOCATED.fetch_sub(layout.size() as isize, Ordering::Relaxed);
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn allocated_mib() -> isize {
    ALLOCATED.load(Ordering::Relaxed) >> 20
}

fn layer(store: &TestStore) -> IdempotencyLayer<TestStore> {
    IdempotencyLayer::new(store.clone())
        .single_tenant()
        .lease(LEASE)
}

every_store! {
    // T1: nothing has purged it.
    async fn an_expired_key_runs_as_new_also_for_another_body(world: World) {
        let handler = Handler::new();
        let store = world.open().await;
        let app = handler.behind(layer(&store).ttl(SECOND));
        let first = send(&app, post("k", "A")).await;
        world.clock.advance(SECOND - Duration::from_millis(1));
        send(&app, post("k", "A")).await.assert_replays(&first);
        assert_eq!(send(&app, post("k", "B")).await.code(), "idempotency_key_reused");
        world.clock.advance(SECOND);
        let second = send(&app, post("k", "B")).await;
        assert_eq!((second.status.as_u16(), second.replay, handler.effects()), (201, false, 2));
        assert!(second.header("idempotent-replay").is_none());
        // From here on the key is the second request's.
        send(&app, post("k", "B")).await.assert_replays(&second);
        assert_eq!(send(&app, post("k", "A")).await.code(), "idempotency_key_reused");
        assert_eq!(store.calls(Operation::Purge), 0);
    }

    // T1
    async fn of_32_that_meet_an_expired_key_at_once_one_runs(world: World) {
        let handler = Handler::new();
        let stores = [world.open().await, world.open().await];
        let apps = stores.each_ref().map(|store| handler.behind(layer(store).ttl(SECOND)));
        for round in 1..=20 {
            let barrier = Arc::new(Barrier::new(32));
            let mut tasks = JoinSet::new();
            for task in 0..32 {
                let (app, barrier) = (apps[task % 2].clone(), barrier.clone());
                let body = format!("body {round}");
                tasks.spawn(async move {
                    barrier.wait().await;
                    send(&app, post("k", body)).await
                });
            }
            let answers = tasks.join_all().await;
            assert_eq!(handler.effects(), round);
            assert_eq!(answers.iter().filter(|a| a.status == 201 && !a.replay).count(), 1);
            for answer in answers {
                let refused = answer.said() == (409, IN_FLIGHT.to_owned());
                assert!(refused || answer.status == 201, "{answer:?}");
            }
            world.clock.advance(2 * SECOND);
        }
    }

    // T1: from the completion and not from the claim.
    async fn the_ttl_counts_from_the_completion(world: World) {
        let handler = Handler::new();
        let store = world.open().await;
        let app = handler.behind(layer(&store).ttl(SECOND));
        handler.close_gate();
        let running = spawn(&app, post("k", "A"));
        handler.reached(1).await;
        world.clock.advance(20 * SECOND);
        assert_eq!(send(&app, post("k", "A")).await.code(), IN_FLIGHT);
        handler.open_gate();
        let first = running.await.unwrap();
        world.clock.advance(SECOND / 2);
        send(&app, post("k", "A")).await.assert_replays(&first);
        world.clock.advance(SECOND / 2);
        assert!(!send(&app, post("k", "A")).await.replay);
        assert_eq!(handler.effects(), 2);
    }

    // T1: a response that lives shorter than its key.
    async fn a_response_may_end_before_its_key(world: World) {
        let handler = Handler::new();
        let store = world.open().await;
        let app = handler.behind(layer(&store).ttl(HOUR).response_ttl(SECOND));
        let first = send(&app, post("k", "A")).await;
        send(&app, post("k", "A")).await.assert_replays(&first);
        world.clock.advance(SECOND);
        let gone = send(&app, post("k", "A")).await;
        assert_eq!(gone.said(), (409, "idempotency_response_not_retained".to_owned()));
        assert_eq!((gone.json()["original_status"].as_u64(), handler.effects()), (Some(201), 1));
        assert_eq!(send(&app, post("k", "B")).await.code(), "idempotency_key_reused");
        world.clock.advance(HOUR);
        assert_eq!(send(&app, post("k", "B")).await.status, 201);
    }

    // T2: both instances are judged by the store's clock; what time their processes have, and how
    // much of it passes, plays no part. (A store whose instances carry clocks of their own is below.)
    async fn a_live_claim_is_not_stolen_however_much_process_time_passes(world: World) {
        let (router, mut puppet) = Puppet::new();
        let stores = [world.open().await, world.open().await];
        let lease = Duration::from_millis(50);
        let apps = stores.each_ref().map(|store| {
            let layer = layer(store).lease(lease).ttl(Duration::from_millis(50));
            router.clone().route_layer(layer.recovery(Recovery::rerun()))
        });
        // Its heart stands still, and so does the store's clock.
        stores[0].fail(
            Operation::Renew,
            tower_idempotency::testing::Fault::Before,
            tower_idempotency::testing::Times::Always,
        );
        let running = spawn(&apps[0], post("k", "A"));
        let run = puppet.next().await;
        sleep(4 * lease).await;
        for app in &apps {
            assert_eq!(send(app, post("k", "A")).await.said(), (409, IN_FLIGHT.to_owned()));
        }
        run.answers(201, "done");
        let first = running.await.unwrap();
        sleep(4 * lease).await;
        for app in &apps {
            send(app, post("k", "A")).await.assert_replays(&first);
        }
        // And the other way round: no process time passes, but the store's.
        world.clock.advance(lease);
        let again = spawn(&apps[1], post("k", "A"));
        puppet.next().await.answers(201, "again");
        assert!(!again.await.unwrap().replay);
        assert_eq!(puppet.begun(), 2);
    }

    // abandoned_ttl
    async fn an_abandoned_record_is_kept_for_ever_unless_told_otherwise(world: World) {
        let max_run = Duration::from_secs(60);
        let store = world.open().await;
        for (key, abandoned_ttl) in [("for ever", None), ("an hour", Some(HOUR))] {
            let key = key.replace(' ', "-");
            let (router, mut puppet) = Puppet::new();
            let mut layer = layer(&store).max_run(max_run).ttl(SECOND);
            if let Some(ttl) = abandoned_ttl {
                layer = layer.abandoned_ttl(ttl);
            }
            let app = router.route_layer(layer).layer(CatchPanicLayer::new());
            let answer = spawn(&app, post(&key, "A"));
            puppet.next().await.panics("as asked");
            assert_eq!(answer.await.unwrap().status, 500);
            // Counted from `max_run`; `ttl` does not enter.
            world.clock.advance(max_run + HOUR - SECOND);
            while store.purge(100).await.unwrap() > 0 {}
            assert_eq!(send(&app, post(&key, "A")).await.said(), (409, UNKNOWN.to_owned()));
            assert_eq!(record(&store, &key).await.unwrap().state, State::Abandoned);
            world.clock.advance(SECOND);
            if abandoned_ttl.is_none() {
                world.clock.advance(100 * 365 * 24 * HOUR);
                while store.purge(100).await.unwrap() > 0 {}
                assert_eq!(send(&app, post(&key, "A")).await.said(), (409, UNKNOWN.to_owned()));
                assert_eq!(puppet.begun(), 1);
            } else {
                assert!(record(&store, &key).await.is_none());
                let again = spawn(&app, post(&key, "B"));
                let run = puppet.next().await;
                assert_eq!(run.owner().attempt(), 1);
                run.answers(201, "as new");
                assert_eq!(again.await.unwrap().status, 201);
            }
        }
    }

    // abandoned_ttl: what only looks abandoned does not end early, and its late answer still counts.
    async fn the_abandoned_ttl_ends_no_run_that_completes(world: World) {
        let max_run = Duration::from_secs(60);
        let store = world.open().await;
        let (router, mut puppet) = Puppet::new();
        let layer = layer(&store).max_run(max_run).ttl(24 * HOUR).abandoned_ttl(HOUR);
        let app = router.route_layer(layer);
        let running = spawn(&app, post("k", "A"));
        let run = puppet.next().await;
        world.clock.advance(max_run + HOUR / 2);
        assert_eq!(send(&app, post("k", "A")).await.said(), (409, UNKNOWN.to_owned()));
        run.answers(201, "late");
        let late = running.await.unwrap();
        world.clock.advance(HOUR);
        while store.purge(100).await.unwrap() > 0 {}
        send(&app, post("k", "A")).await.assert_replays(&late);
        assert_eq!(puppet.begun(), 1);
    }

    // T5, for records: the layer purges by itself.
    async fn the_layer_purges_what_nobody_asks_for_any_more(world: World) {
        let handler = Handler::new();
        let store = world.open().await;
        let app = handler.behind(layer(&store).ttl(SECOND));
        for number in 0..20 {
            assert_eq!(send(&app, post(&format!("k-{number}"), "A")).await.status, 201);
        }
        assert_eq!(store.counts().await.unwrap().completed, 20);
        called(&store, Operation::Purge, 1).await;
        assert_eq!(store.counts().await.unwrap().completed, 20, "live records were purged");
        world.clock.advance(2 * SECOND);
        let purges = store.calls(Operation::Purge);
        called(&store, Operation::Purge, purges + 2).await;
        // Gone from the store itself, not only out of sight.
        world.clock.set(Timestamp::from_micros(0));
        assert_eq!(store.counts().await.unwrap().completed, 0);
    }
}

/// Another process's wall clock, which is wrong by this much.
#[derive(Debug)]
struct Wrong {
    clock: FakeClock,
    by: i64,
}

impl Clock for Wrong {
    fn now(&self) -> Timestamp {
        Timestamp::from_micros(self.clock.now().as_micros() + self.by)
    }
}

// T2: an SQLite file is for the processes of one machine, which share its clock. This pins down
// what the documentation asks for: a process that lies about the time does steal.
#[tokio::test]
async fn instances_of_an_sqlite_file_must_share_one_clock() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("idempotency.db");
    let clock = FakeClock::new();
    let open = async |by: i64| {
        let clock = Wrong {
            clock: clock.clone(),
            by,
        };
        let store = SqliteStore::options(&file)
            .clock(clock)
            .open()
            .await
            .unwrap();
        FaultyStore::new(AnyStore::new(store))
    };
    let (right, fast) = (open(0).await, open(HOUR.as_micros() as i64).await);
    let handler = Handler::new();
    handler.close_gate();
    let running = spawn(&handler.behind(layer(&right)), post("k", "A"));
    handler.reached(1).await;
    let same = handler.behind(layer(&open(0).await));
    assert_eq!(send(&same, post("k", "A")).await.code(), IN_FLIGHT);
    let fast = handler.behind(layer(&fast));
    assert_eq!(send(&fast, post("k", "A")).await.code(), UNKNOWN);
    handler.open_gate();
    assert_eq!(running.await.unwrap().status, 201);
}

// T2: a memory store's clock is its own, whoever holds a handle, and no correction of the machine's
// time reaches it: it is read once and carried on by the monotonic clock.
#[tokio::test]
async fn instances_of_a_memory_store_are_judged_by_the_stores_one_clock() {
    let clock = FakeClock::new();
    let store = MemoryStore::options().clock(clock.clone()).build();
    let handler = Handler::new();
    let ttl = SECOND;
    let app = |store: MemoryStore| {
        let store = FaultyStore::new(AnyStore::new(store));
        handler.behind(layer(&store).ttl(ttl))
    };
    let (one, two) = (app(store.clone()), app(store.instance()));
    let first = send(&one, post("k", "A")).await;
    send(&two, post("k", "A")).await.assert_replays(&first);
    clock.advance(ttl);
    assert!(!send(&two, post("k", "A")).await.replay);
}

// T5
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_memory_store_forgets_without_being_asked_for_what_it_forgets() {
    const KEYS: usize = 200_000;
    let ttl = Duration::from_millis(100);
    let store = MemoryStore::new();
    let handler = Handler::new();
    let layer = IdempotencyLayer::new(store.clone())
        .single_tenant()
        .ttl(ttl);
    let app = handler.behind(layer);
    // Starts the background purge. From here on no key is touched twice, and none after the last.
    assert_eq!(send(&app, post("the only request", "A")).await.status, 400);
    assert_eq!(send(&app, post("the-only-request", "A")).await.status, 201);
    let base = allocated_mib();

    // All claims first and then all completions, or the claims themselves would purge.
    let response = Bytes::from(vec![b'x'; 300]);
    let mut tickets = Vec::with_capacity(KEYS);
    for number in 0..KEYS {
        let id = RecordId::new(
            Scope::shared(),
            IdempotencyKey::new(format!("key-{number}")),
        );
        let claim = ClaimRequest::new(id, "exact-v1", Fingerprint::from_bytes([7; 32]));
        match store.claim(claim).await.unwrap() {
            Claim::Won(ticket) => tickets.push(ticket),
            claim => panic!("{claim:?}"),
        }
    }
    for ticket in &tickets {
        let response = Bytes::copy_from_slice(&response);
        let done = Completion::retained(axum::http::StatusCode::OK, response);
        let _ = store
            .complete(ticket, done, Lifetimes::new(ttl))
            .await
            .unwrap();
    }
    drop(tickets);
    let (peak, done) = (allocated_mib(), Instant::now());
    assert!(
        peak - base >= 60,
        "only {} MiB for {KEYS} keys",
        peak - base
    );

    let near_base = || allocated_mib() - base <= 8 && format!("{store:?}").contains("records: 0");
    eventually("the memory to be given back", near_base).await;
    println!(
        "T5: {} MiB, back to {} MiB above the base in {:?}",
        peak - base,
        allocated_mib() - base,
        done.elapsed()
    );
    assert!(
        done.elapsed() < Duration::from_secs(8),
        "{:?}",
        done.elapsed()
    );
    assert_eq!(handler.effects(), 1);
}

// T5: the same by requests, as many as there is time for.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_records_of_many_requests_are_forgotten_when_the_requests_end() {
    let store = MemoryStore::new();
    let layer = IdempotencyLayer::new(store.clone())
        .single_tenant()
        .ttl(Duration::from_millis(100));
    let runs = Arc::new(AtomicUsize::new(0));
    let handler = {
        let runs = runs.clone();
        async move || {
            runs.fetch_add(1, Ordering::SeqCst);
            "done"
        }
    };
    let app = Router::new()
        .route("/charges", axum::routing::post(handler))
        .route_layer(layer);
    for number in 0..5_000 {
        send(&app, post(&format!("k-{number}"), "A")).await;
    }
    assert_eq!(runs.load(Ordering::SeqCst), 5_000);
    eventually("all records to go", || {
        format!("{store:?}").contains("records: 0")
    })
    .await;
}

// Clones share the background work, and each of them may have begun it.
#[tokio::test(start_paused = true)]
async fn the_store_is_purged_as_often_as_any_of_the_clones_wants_it() {
    let store = FaultyStore::new(AnyStore::new(MemoryStore::new()));
    let rarely = layer(&store).ttl(24 * HOUR);
    let often = rarely.clone().ttl(SECOND);
    let handler = Handler::new();
    let rarely = handler.behind(rarely);
    send(&rarely, post("a", "A")).await;
    sleep(60 * SECOND).await;
    let before = store.calls(Operation::Purge);
    let often = handler.behind(often);
    send(&often, post("b", "A")).await;
    sleep(60 * SECOND).await;
    let purges = store.calls(Operation::Purge) - before;
    assert!((55..=125).contains(&purges), "{purges} purges in a minute");
}

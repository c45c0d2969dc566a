//! What one sweep does.

use tower_idempotency::{
    MemoryStore,
    store::{AnyStore, Checkpoints},
    testing::{FaultyStore, Operation},
};

use super::*;

every_store! {
    async fn a_sweep_settles_each_record_by_its_verdict(world: World) {
        let store = world.open().await;
        let known = Known::default();
        let layer = layer(&store).resolver(known.resolver());
        abandoned(&store, &["a-1", "d-1", "l-1", "a-2"]).await;
        let swept = layer.reconciler().concurrency(1).sweep().await;
        assert_swept(swept, 4, 2, 1, 1);
        assert_eq!((swept.lost, swept.postponed, swept.failed, swept.more), (0, 0, 0, false));
        assert_eq!(known.asked().len(), 4);

        let handler = Handler::new();
        let app = handler.behind(layer.clone());
        for key in ["a-1", "a-2"] {
            let replay = send(&app, post(key, "A")).await;
            assert_eq!((replay.status.as_u16(), replay.replay), (201, true));
            assert_eq!(replay.body, format!("paid {key}"));
        }
        assert_eq!(send(&app, post("d-1", "A")).await.status, 201);
        assert_eq!(handler.effects(), 1);
        assert_eq!(state(&store, "l-1").await, Some(State::Abandoned));
        // A sweep has just left it: a request does not ask again.
        assert_eq!(send(&app, post("l-1", "A")).await.said(), (409, UNKNOWN.to_owned()));
        assert_eq!(known.asked().len(), 0);
        // Nothing is left to do.
        assert_swept(layer.reconciler().sweep().await, 1, 0, 0, 0);
    }

    async fn records_are_asked_about_the_oldest_first(world: World) {
        let store = world.open().await;
        let known = Known::default();
        for key in ["a-3", "a-1", "a-2"] {
            abandoned(&store, &[key]).await;
            world.clock.advance(Duration::from_secs(1));
        }
        let reconciler = layer(&store).resolver(known.resolver()).reconciler();
        assert_swept(reconciler.concurrency(1).batch(2).sweep().await, 3, 3, 0, 0);
        assert_eq!(known.asked(), ["a-3", "a-1", "a-2"]);
    }

    async fn a_sweep_finds_silent_owners_and_runs_past_their_end_and_nothing_else(world: World) {
        let (dead, store) = (world.open().await, world.open().await);
        let known = Known::default();
        let ticket = |claim| async { let Claim::Won(ticket) = claim else { panic!("not won") }; ticket };
        let _silent = ticket(dead.claim(claim("a-silent")).await.unwrap()).await;
        world.clock.advance(LEASE + Duration::from_secs(1));
        let _alive = ticket(store.claim(claim("a-alive")).await.unwrap()).await;
        let done = ticket(store.claim(claim("a-done")).await.unwrap()).await;
        let kept = tower_idempotency::store::Completion::tombstone(StatusCode::OK);
        let lifetimes = tower_idempotency::store::Lifetimes::new(HOLD);
        assert_eq!(store.complete(&done, kept, lifetimes).await.unwrap(), Settled::Done);
        let released = ticket(store.claim(claim("a-released")).await.unwrap()).await;
        assert_eq!(store.save(&released, "step", Bytes::from("1")).await.unwrap(), Settled::Done);
        assert_eq!(store.release(&released, HOLD).await.unwrap(), Settled::Done);
        let reconciler = layer(&store).resolver(known.resolver()).reconciler();
        assert_swept(reconciler.sweep().await, 1, 1, 0, 0);
        assert_eq!(known.asked(), ["a-silent"]);
    }

    // What was left never starves what is behind it, neither within a sweep nor over several.
    async fn records_that_are_left_do_not_hold_up_those_behind_them(world: World) {
        let store = world.open().await;
        let known = Known::default();
        for key in ["l-1", "l-2", "l-3", "l-4", "l-5", "a-1", "a-2", "a-3"] {
            abandoned(&store, &[key]).await;
            world.clock.advance(Duration::from_secs(1));
        }
        let layer = layer(&store).resolver(known.resolver());
        let reconciler = layer.reconciler().batch(2).max_per_sweep(3);
        let sweeps = [(3, 0, 3, true), (3, 1, 2, true), (2, 2, 0, false)];
        for (seen, answered, left, more) in sweeps {
            let swept = reconciler.sweep().await;
            assert_swept(swept, seen, answered, 0, left);
            assert_eq!(swept.more, more);
        }
        // From the beginning again, where all are under back-off.
        let swept = reconciler.sweep().await;
        assert_eq!((swept.seen, swept.postponed, swept.more), (3, 3, true));
        let swept = reconciler.sweep().await;
        assert_eq!((swept.seen, swept.postponed, swept.more), (2, 2, false));
        assert_eq!(known.asked().len(), 8);
    }

    async fn without_a_resolver_only_what_was_not_committed_is_freed(world: World) {
        let store = world.open().await;
        abandoned(&store, &["plain"]).await;
        let _cut_off = abandon(&store, transactional("tx")).await;
        let found = record(&store, "plain").await;
        let layer = layer(&store);
        assert_swept(layer.reconciler().sweep().await, 2, 0, 1, 1);
        assert_eq!(state(&store, "tx").await, None);
        assert_eq!(record(&store, "plain").await, found);
        assert_eq!(store.calls(Operation::TakeOver), 1);
    }

    async fn a_transactional_record_is_freed_without_being_asked_about(world: World) {
        let store = world.open().await;
        let known = Known::default();
        let _cut_off = abandon(&store, transactional("a-tx")).await;
        let reconciler = layer(&store).resolver(known.resolver()).reconciler();
        assert_swept(reconciler.sweep().await, 1, 0, 1, 0);
        assert_eq!((state(&store, "a-tx").await, known.asked().len()), (None, 0));
    }

    // L2: its heartbeat came too late, which its run must not pay for.
    async fn a_run_of_this_process_is_not_asked_about_though_its_lease_lapsed(world: World) {
        let store = world.open().await;
        let known = Known::default();
        let layer = layer(&store).resolver(known.resolver());
        let handler = Handler::new();
        handler.close_gate();
        let app = handler.behind(layer.clone());
        let running = tokio::spawn(async move { send(&app, post("a-1", "A")).await });
        handler.reached(1).await;
        // No heartbeat comes between the moving of the clock and the look.
        store.fail(Operation::Renew, tower_idempotency::testing::Fault::Before, tower_idempotency::testing::Times::Always);
        world.clock.advance(LEASE + Duration::from_secs(1));
        let swept = layer.reconciler().sweep().await;
        assert_eq!((swept.seen, swept.postponed, known.asked().len()), (1, 1, 0));
        handler.open_gate();
        assert!(!running.await.unwrap().replay);
    }

    async fn a_sweep_asks_about_as_many_at_a_time_as_it_was_told(world: World) {
        let store = world.open().await;
        let (now, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (here, highest) = (now.clone(), most.clone());
        let resolver = move |_: Abandoned| {
            let (here, highest) = (here.clone(), highest.clone());
            async move {
                let at_once = here.fetch_add(1, Ordering::SeqCst) + 1;
                highest.fetch_max(at_once, Ordering::SeqCst);
                tokio::time::sleep(Duration::from_millis(30)).await;
                here.fetch_sub(1, Ordering::SeqCst);
                paid()
            }
        };
        let keys: Vec<String> = (0..12).map(|key| format!("a-{key}")).collect();
        for key in &keys {
            abandoned(&store, &[key]).await;
        }
        let reconciler = layer(&store).resolver(resolver).reconciler().batch(5).concurrency(3);
        assert_swept(reconciler.sweep().await, 12, 12, 0, 0);
        assert_eq!((now.load(Ordering::SeqCst), most.load(Ordering::SeqCst)), (0, 3));
    }

    // Who waits in this process is told by the sweep.
    async fn a_request_that_asks_meanwhile_is_in_flight_and_then_a_replay(world: World) {
        let store = world.open().await;
        let (resolver, mut provider) = support::provider::Provider::new();
        let layer = layer(&store).resolver(resolver);
        abandoned(&store, &["k"]).await;
        let reconciler = layer.reconciler();
        let sweeping = tokio::spawn(async move { reconciler.sweep().await });
        let question = provider.next().await;
        let app = Handler::new().behind(layer);
        assert_eq!(send(&app, post("k", "A")).await.code(), "idempotency_in_flight");
        question.answer(paid());
        assert_swept(sweeping.await.unwrap(), 1, 1, 0, 0);
        let replay = send(&app, post("k", "A")).await;
        assert_eq!((&replay.body[..], replay.replay), (&b"paid"[..], true));
        assert_eq!(provider.asked(), 1);
    }
}

fn transactional(key: &str) -> ClaimRequest {
    let mut claim = claim(key);
    claim.mode = Mode::Transactional;
    claim
}

fn memory() -> TestStore {
    FaultyStore::new(AnyStore::new(MemoryStore::new()))
}

#[tokio::test(start_paused = true)]
async fn a_record_that_was_left_is_asked_about_again_after_pauses_that_grow() {
    let store = memory();
    let known = Known::default();
    abandoned(&store, &["l-1"]).await;
    let layer = layer(&store).resolver(known.resolver());
    let (first, longest) = (Duration::from_secs(10), Duration::from_secs(40));
    for pause in [10, 20, 40, 40] {
        // Another reconciler of the same layer knows it, too.
        let reconciler = layer.reconciler().back_off(first, longest);
        assert_swept(reconciler.sweep().await, 1, 0, 0, 1);
        tokio::time::advance(Duration::from_millis(pause * 500 - 100)).await;
        assert_eq!(reconciler.sweep().await.postponed, 1);
        tokio::time::advance(Duration::from_millis(pause * 500 + 100)).await;
    }
    assert_eq!(known.asked().len(), 4);
}

#[test]
fn options_that_make_no_sense_are_refused() {
    type Set = fn(
        tower_idempotency::Reconciler<MemoryStore>,
    ) -> tower_idempotency::Reconciler<MemoryStore>;
    let nonsense: [(&str, Set); 6] = [
        ("every", |reconciler| reconciler.every(Duration::ZERO)),
        ("batch", |reconciler| reconciler.batch(0)),
        ("max_per_sweep", |reconciler| reconciler.max_per_sweep(0)),
        ("concurrency", |reconciler| reconciler.concurrency(0)),
        ("back_off", |reconciler| {
            reconciler.back_off(Duration::ZERO, LEASE)
        }),
        ("back_off", |reconciler| reconciler.back_off(HOLD, LEASE)),
    ];
    for (name, set) in nonsense {
        let reconciler = layer(&MemoryStore::new()).reconciler();
        let told = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| set(reconciler)));
        let told = told.err().unwrap();
        let told = told.downcast_ref::<&str>().unwrap();
        assert!(told.contains(name), "{name}: {told}");
    }
    let fine = layer(&MemoryStore::new()).reconciler();
    let fine = fine
        .every(Duration::MAX)
        .back_off(Duration::MAX, Duration::MAX);
    assert!(format!("{fine:?}").contains("batch"));
}

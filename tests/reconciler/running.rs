//! Reconcilers that run on their own.

use support::provider::Provider;
use tokio::time::timeout;
use tower_idempotency::{
    MemoryStore,
    store::AnyStore,
    testing::{Fault, FaultyStore, Operation, Times},
};

use super::*;

const PATIENCE: Duration = Duration::from_secs(10);

every_store! {
    async fn a_running_reconciler_settles_what_comes_up_until_the_layer_is_drained(world: World) {
        let store = world.open().await;
        let known = Known::default();
        let layer = layer(&store).resolver(known.resolver());
        let reconciler = layer.reconciler().every(Duration::from_millis(40));
        abandoned(&store, &["a-1"]).await;
        let running = tokio::spawn(reconciler.run());
        comes_to(&store, "a-1", Some(State::Completed)).await;
        abandoned(&store, &["a-2", "d-1"]).await;
        comes_to(&store, "a-2", Some(State::Completed)).await;
        comes_to(&store, "d-1", None).await;
        layer.drain(PATIENCE).await;
        timeout(PATIENCE, running).await.expect("it goes on").unwrap();
    }

    async fn drain_waits_for_what_a_sweep_asks_and_nothing_more_is_begun(world: World) {
        let store = world.open().await;
        let (resolver, mut provider) = Provider::new();
        let layer = layer(&store).resolver(resolver);
        abandoned(&store, &["k-1", "k-2"]).await;
        let running = tokio::spawn(layer.reconciler().concurrency(1).every(HOLD).run());
        let question = provider.next().await;
        let drained = layer.clone();
        let draining = tokio::spawn(async move { drained.drain(PATIENCE).await });
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(!draining.is_finished());
        question.answer(paid());
        let drained = draining.await.unwrap();
        assert_eq!((drained.aborted, drained.left), (0, 0));
        timeout(PATIENCE, running).await.expect("it goes on").unwrap();
        let counts = store.counts().await.unwrap();
        assert_eq!((counts.completed, counts.abandoned, counts.running), (1, 1, 0));
        assert_eq!(provider.asked(), 1);
        // Nor does a sweep by hand begin anything.
        assert_eq!(layer.reconciler().sweep().await.seen, 0);
    }

    async fn a_sweep_that_is_still_asking_when_the_time_is_over_gives_its_records_up(world: World) {
        let store = world.open().await;
        let (resolver, mut provider) = Provider::new();
        let layer = layer(&store).resolver(resolver);
        abandoned(&store, &["k-1", "k-2"]).await;
        let running = tokio::spawn(layer.reconciler().run());
        let mut questions = [provider.next().await, provider.next().await];
        let drained = timeout(PATIENCE / 2, layer.drain(Duration::from_millis(20))).await;
        assert_eq!(drained.expect("it waits for the resolver").left, 0);
        let counts = store.counts().await.unwrap();
        assert_eq!((counts.abandoned, counts.running), (2, 0));
        for question in &mut questions {
            question.dropped().await;
        }
        timeout(PATIENCE, running).await.expect("it goes on").unwrap();
    }

    async fn a_reconciler_that_is_dropped_gives_its_records_up(world: World) {
        let store = world.open().await;
        let (resolver, mut provider) = Provider::new();
        let layer = layer(&store).resolver(resolver);
        abandoned(&store, &["k"]).await;
        let running = tokio::spawn(layer.reconciler().run());
        let mut question = provider.next().await;
        assert_eq!(state(&store, "k").await, Some(State::Running));
        running.abort();
        question.dropped().await;
        comes_to(&store, "k", Some(State::Abandoned)).await;
        let drained = layer.drain(PATIENCE).await;
        assert_eq!((drained.aborted, drained.left), (0, 0));
    }

    // A sweeper that was paused finds out that its hold is another's by now.
    async fn a_sweeper_whose_hold_lapsed_loses_to_the_one_that_came_after(world: World) {
        let (there, store) = (world.open().await, world.open().await);
        let (resolver, mut provider) = Provider::new();
        abandoned(&store, &["k"]).await;
        let paused = layer(&there).resolver(resolver.clone()).reconciler();
        let paused = tokio::spawn(async move { paused.sweep().await });
        let question = provider.next().await;
        // Held: the second one has nothing to do.
        let layer = layer(&store).resolver(resolver);
        assert_eq!(layer.reconciler().sweep().await.seen, 0);
        world.clock.advance(HOLD);
        let second = layer.reconciler();
        let second = tokio::spawn(async move { second.sweep().await });
        provider.next().await.answer(paid());
        assert_swept(second.await.unwrap(), 1, 1, 0, 0);
        question.answer(Verdict::DidNotHappen);
        let swept = paused.await.unwrap();
        assert_eq!((swept.seen, swept.lost, swept.freed), (1, 1, 0));
        assert_eq!(state(&store, "k").await, Some(State::Completed));
    }
}

fn memory() -> TestStore {
    FaultyStore::new(AnyStore::new(MemoryStore::new()))
}

/// How often the records were listed within this time.
async fn lists_within(store: &TestStore, time: Duration) -> usize {
    let before = store.calls(Operation::Abandoned);
    tokio::time::sleep(time).await;
    store.calls(Operation::Abandoned) - before
}

#[tokio::test(start_paused = true)]
async fn sweeps_keep_to_their_schedule_and_rest_longer_while_the_store_fails() {
    let store = memory();
    let every = Duration::from_secs(60);
    let running = tokio::spawn(layer(&store).reconciler().every(every).run());
    // Between half a minute and a minute apart.
    let lists = lists_within(&store, 60 * every).await;
    assert!((60..=121).contains(&lists), "{lists}");
    store.fail(Operation::Abandoned, Fault::Before, Times::Always);
    lists_within(&store, 10 * every).await;
    // Three tries each, 150 s to 300 s apart by now.
    let lists = lists_within(&store, 60 * every).await;
    assert!((12 * 3..=25 * 3).contains(&lists), "{lists}");
    store.clear();
    lists_within(&store, Duration::from_secs(300)).await;
    let lists = lists_within(&store, 60 * every).await;
    assert!((59..=121).contains(&lists), "{lists}");
    running.abort();
}

#[tokio::test(start_paused = true)]
async fn a_sweep_that_stopped_before_the_end_is_followed_up_soon() {
    let store = memory();
    let known = Known::default();
    for key in 0..100 {
        abandoned(&store, &[&format!("a-{key}")]).await;
    }
    let layer = layer(&store).resolver(known.resolver());
    let running = tokio::spawn(
        layer
            .reconciler()
            .every(HOLD)
            .batch(10)
            .max_per_sweep(10)
            .run(),
    );
    tokio::time::sleep(Duration::from_secs(11)).await;
    assert_eq!(known.asked().len(), 100);
    running.abort();
}

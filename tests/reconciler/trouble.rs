//! Stores that fail under a sweep, and records that cannot be read.

use tower_idempotency::testing::{Fault, Operation, Times};

use super::*;

every_store! {
    async fn a_list_that_cannot_be_had_ends_the_sweep(world: World) {
        let store = world.open().await;
        let known = Known::default();
        let layer = layer(&store).store_timeout(Duration::from_millis(100)).resolver(known.resolver());
        abandoned(&store, &["a-1"]).await;
        for fault in [Fault::Before, Fault::HangBefore] {
            store.fail(Operation::Abandoned, fault, Times::Always);
            let swept = layer.reconciler().sweep().await;
            assert_eq!((swept.seen, swept.failed, swept.more), (0, 1, true));
            store.clear();
        }
        // Once is not enough.
        store.fail(Operation::Abandoned, Fault::After, Times::Once);
        assert_swept(layer.reconciler().sweep().await, 1, 1, 0, 0);
    }

    async fn a_store_that_fails_in_the_middle_ends_the_sweep_and_the_next_one_goes_on(world: World) {
        let operations = [Operation::TakeOver, Operation::Load, Operation::Complete];
        for (number, operation) in operations.into_iter().enumerate() {
            let store = world.open().await;
            let (asked, times) = counter();
            let resolver = move |_: Abandoned| {
                asked.fetch_add(1, Ordering::SeqCst);
                async { paid() }
            };
            let layer = layer(&store).store_timeout(Duration::from_millis(100)).resolver(resolver);
            let keys: Vec<String> = (0..4).map(|key| format!("a-{number}-{key}")).collect();
            for key in &keys {
                abandoned(&store, &[key]).await;
            }
            let reconciler = layer.reconciler().concurrency(1);
            store.fail(operation, Fault::Before, Times::Always);
            let swept = reconciler.sweep().await;
            assert_eq!((swept.seen, swept.failed, swept.answered, swept.more), (1, 1, 0, true), "{operation:?}");
            store.clear();
            // What was recorded late is settled by the time the others are, or by then it is found again.
            let mut sweeps = 0;
            while store.counts().await.unwrap().completed < 4 * (number as u64 + 1) {
                let _counted_by_the_store = reconciler.sweep().await;
                sweeps += 1;
                assert!(sweeps < 1_000, "{operation:?}");
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            assert_eq!(times(), 4, "{operation:?}");
        }
    }
}

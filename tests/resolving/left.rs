//! Records that were left as they are: for their own runs, for the next question, for the operator.

use tower_idempotency::{
    Abandoned,
    store::Inspect,
    testing::{Fault, Operation, Times},
};

use super::*;

const MAX_RUN: Duration = Duration::from_secs(60);

/// A run of this process that has been going on for too long, and the request that waits for it.
async fn slow_run(world: &World, shop: &mut Shop) -> (support::puppet::Run, JoinHandle<Answer>) {
    let first = shop.retries("k");
    let run = shop.puppet.next().await;
    world.clock.advance(MAX_RUN + Duration::from_secs(1));
    (run, first)
}

every_store! {
    // Y2: its answer is as true after nobody knew it as before.
    async fn a_slow_runs_answer_still_counts_after_the_resolver_left_it(world: World) {
        #[derive(Debug, Clone, Copy)]
        enum How { Leaves, TakesTooLong, Panics, BreaksOff }
        use How::*;
        for how in [Leaves, TakesTooLong, Panics, BreaksOff] {
            let store = world.open().await;
            let resolver = move |_: Abandoned| async move {
                match how {
                    Leaves => Verdict::Leave,
                    TakesTooLong => std::future::pending().await,
                    Panics => panic!("as the test wants"),
                    BreaksOff => Verdict::answer(support::bodies::Pieces::new(["half"]).then_error().body()),
                }
            };
            let layer = layer(&store).max_run(MAX_RUN).resolver(resolver);
            let mut shop = Shop::new(layer.resolver_timeout(Duration::from_millis(50)));
            let (run, first) = slow_run(&world, &mut shop).await;
            let found = record(&store, "k").await.unwrap();
            assert_eq!(shop.layer.reconciler().sweep().await.left, 1, "{how:?}");
            assert_eq!(record(&store, "k").await.unwrap().token, found.token, "{how:?}");
            // It is asked about no less for that.
            assert_eq!(store.abandoned(None, 10).await.unwrap().len(), 1, "{how:?}");
            run.answers(201, "slow");
            let first = first.await.unwrap();
            shop.retry("k").await.assert_replays(&first);
            assert!(store.forget(&found.id).await.unwrap());
        }
    }

    // Nor does one who asked for too long lose what it has found out, where the next one knew nothing.
    async fn a_slow_askers_answer_still_counts_after_another_one_left_it(world: World) {
        let store = world.open().await;
        let (resolver, mut provider) = Provider::new();
        let mut slow = Shop::asking(&world.open().await, resolver.clone());
        let quick = Shop::asking(&store, resolver);
        slow.cut_off("k").await;
        let waits = slow.retries("k");
        let paused = provider.next().await;
        world.clock.advance(HOLD);
        let retry = quick.retries("k");
        provider.next().await.answer(Verdict::Leave);
        assert_eq!(retry.await.unwrap().said(), (409, UNKNOWN.to_owned()));
        paused.answer(paid());
        for replay in [waits.await.unwrap(), quick.retry("k").await] {
            assert_eq!((&replay.body[..], replay.replay), (&b"paid"[..], true));
        }
    }

    async fn a_record_that_was_left_is_as_it_was(world: World) {
        let store = world.open().await;
        let (resolver, mut provider) = Provider::new();
        let mut shop = Shop::asking(&store, resolver);
        shop.cut_off("k").await;
        let found = record(&store, "k").await.unwrap();
        let retry = shop.retries("k");
        let question = provider.next().await;
        assert_ne!(record(&store, "k").await.unwrap().token, found.token);
        question.answer(Verdict::Leave);
        assert_eq!(retry.await.unwrap().said(), (409, UNKNOWN.to_owned()));
        let left = record(&store, "k").await.unwrap();
        assert_eq!((left.state, left.token, left.attempt), (found.state, found.token, found.attempt));
    }

    // Best effort: what is lost with it is only the late answer.
    async fn a_record_that_cannot_be_given_back_is_abandoned_all_the_same(world: World) {
        let store = world.open().await;
        let (resolver, mut provider) = Provider::new();
        let mut shop = Shop::asking(&store, resolver);
        shop.cut_off("k").await;
        let found = record(&store, "k").await.unwrap();
        let retry = shop.retries("k");
        let question = provider.next().await;
        store.fail(Operation::TakeOver, Fault::Before, Times::Always);
        question.answer(Verdict::Leave);
        assert_eq!(retry.await.unwrap().said(), (409, UNKNOWN.to_owned()));
        store.clear();
        let left = record(&store, "k").await.unwrap();
        assert_eq!(left.state, State::Abandoned);
        assert_ne!(left.token, found.token);
        assert_eq!(shop.layer.reconciler().sweep().await.seen, 1);
    }
}

#[cfg(feature = "sealing")]
#[tokio::test]
async fn a_slow_runs_answer_still_counts_under_hashed_names() {
    use tower_idempotency::store::{SealedStore, SealingKeys};

    for world in World::each() {
        let keys = SealingKeys::new("k", [1; 32]).hash_ids([2; 32]);
        let store = SealedStore::open(world.open().await, keys).await.unwrap();
        let layer = IdempotencyLayer::new(store.clone())
            .single_tenant()
            .max_run(MAX_RUN);
        let layer = layer.resolver(|_: Abandoned| async { Verdict::Leave });
        let (router, mut puppet) = Puppet::new();
        let app = router.route_layer(layer.clone());
        let first = spawn(&app, post("k", "A"));
        let run = puppet.next().await;
        world.clock.advance(MAX_RUN + Duration::from_secs(1));
        assert_eq!(layer.reconciler().sweep().await.left, 1);
        run.answers(201, "slow");
        let first = first.await.unwrap();
        send(&app, post("k", "A")).await.assert_replays(&first);
    }
}

//! Resolvers that misbehave, and stores that fail around them.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use support::bodies::Pieces;
use tower_idempotency::{
    Abandoned,
    testing::{Fault, Operation, Times},
};

use super::*;

const STORE_TIMEOUT: Duration = Duration::from_millis(200);

/// What records a verdict, and what becomes of the record.
type EndsWith = (Operation, fn() -> Verdict, Option<State>);

fn impatient(store: &TestStore) -> IdempotencyLayer<TestStore> {
    layer(store).store_timeout(STORE_TIMEOUT)
}

every_store! {
    async fn a_resolver_that_hangs_panics_or_breaks_off_leaves_the_record(world: World) {
        #[derive(Clone, Copy)]
        enum Misbehaves { Hangs, PanicsAtOnce, PanicsLater, BreaksOff, BodyPanics, GivesUp }
        use Misbehaves::*;
        let store = world.open().await;
        for (number, how) in [Hangs, PanicsAtOnce, PanicsLater, BreaksOff, BodyPanics, GivesUp].into_iter().enumerate() {
            let resolver = move |abandoned: Abandoned| {
                assert!(!matches!(how, PanicsAtOnce), "as the test wants");
                async move {
                    match how {
                        Hangs => std::future::pending().await,
                        PanicsAtOnce => unreachable!(),
                        PanicsLater => panic!("as the test wants"),
                        BreaksOff => Verdict::answer(Pieces::new(["half"]).then_error().body()),
                        BodyPanics => Verdict::answer(Body::new(http_body_util::StreamBody::new(
                            futures_util::stream::poll_fn(|_| -> std::task::Poll<Option<std::io::Result<http_body::Frame<bytes::Bytes>>>> {
                                panic!("as the test wants")
                            }),
                        ))),
                        // There is no secret.
                        GivesUp => Verdict::answer(abandoned.downstream_key("charge").unwrap_err()),
                    }
                }
            };
            let asking = layer(&store).resolver(resolver).resolver_timeout(Duration::from_millis(50));
            let mut shop = Shop::new(asking);
            let key = format!("k-{number}");
            shop.cut_off(&key).await;
            assert_eq!(shop.retry(&key).await.said(), (409, UNKNOWN.to_owned()), "{key}");
            assert_eq!(state(&store, &key).await, Some(State::Abandoned), "{key}");
            assert_eq!(shop.puppet.begun(), 1);
        }
    }

    async fn a_store_that_fails_once_around_a_question_is_asked_again(world: World) {
        let store = world.open().await;
        let operations = [Operation::TakeOver, Operation::Load, Operation::Complete];
        for (number, (operation, fault)) in operations
            .into_iter()
            .flat_map(|operation| [(operation, Fault::Before), (operation, Fault::After)])
            .enumerate()
        {
            let (resolver, mut provider) = Provider::new();
            let mut shop = Shop::asking(&store, resolver);
            let key = format!("k-{number}");
            shop.cut_off(&key).await;
            store.fail(operation, fault, Times::Once);
            let retry = shop.retries(&key);
            provider.next().await.answer(paid());
            let replay = retry.await.unwrap();
            assert_eq!((replay.status.as_u16(), replay.replay), (201, true), "{operation:?} {fault:?}");
            assert_eq!((provider.asked(), shop.puppet.begun()), (1, 1));
        }
    }

    // The same for the two other ends.
    async fn a_store_that_fails_once_to_free_or_to_leave_is_asked_again(world: World) {
        let store = world.open().await;
        for fault in [Fault::Before, Fault::After] {
            let (resolver, mut provider) = Provider::new();
            let mut shop = Shop::asking(&store, resolver);
            let key = format!("{fault:?}");
            shop.cut_off(&key).await;
            store.fail(Operation::Abandon, fault, Times::Once);
            let retry = shop.retries(&key);
            provider.next().await.answer(Verdict::Leave);
            assert_eq!(retry.await.unwrap().said(), (409, UNKNOWN.to_owned()));
            assert_eq!(state(&store, &key).await, Some(State::Abandoned));

            let (resolver, mut provider) = Provider::new();
            shop = Shop::asking(&store, resolver);
            store.fail(Operation::Release, fault, Times::Once);
            let retry = shop.retries(&key);
            provider.next().await.answer(Verdict::DidNotHappen);
            shop.puppet.next().await.answers(201, "runs");
            assert_eq!(retry.await.unwrap().status, 201);
        }
    }

    async fn a_record_that_cannot_be_taken_over_is_not_asked_about(world: World) {
        let store = world.open().await;
        for fault in [Fault::Before, Fault::After, Fault::HangBefore, Fault::HangAfter] {
            let (resolver, provider) = Provider::new();
            let mut shop = Shop::new(impatient(&store).resolver(resolver));
            let key = format!("{fault:?}");
            shop.cut_off(&key).await;
            store.fail(Operation::TakeOver, fault, Times::Always);
            assert_eq!(shop.retry(&key).await.said(), (503, UNAVAILABLE.to_owned()));
            store.clear();
            // What may have been taken is given back.
            comes_to(&store, &key, Some(State::Abandoned)).await;
            assert_eq!((provider.asked(), shop.puppet.begun()), (0, 1));
        }
    }

    // A try whose answer was lost may stand, though a later one says that there is nothing to take.
    async fn a_record_that_may_have_been_taken_is_given_back_whatever_a_later_try_says(world: World) {
        let store = world.open().await;
        let (resolver, provider) = Provider::new();
        let mut shop = Shop::asking(&store, resolver);
        shop.cut_off("k").await;
        store.fail(Operation::TakeOver, Fault::After, Times::Once);
        store.fail(Operation::TakeOver, Fault::DelayBefore(Duration::from_millis(300)), Times::Once);
        let retry = shop.retries("k");
        called(&store, Operation::TakeOver, 2).await;
        world.clock.advance(HOLD);
        assert_eq!(retry.await.unwrap().said(), (409, UNKNOWN.to_owned()));
        comes_to(&store, "k", Some(State::Abandoned)).await;
        assert_eq!((provider.asked(), shop.puppet.begun()), (0, 1));
    }

    async fn a_record_that_cannot_be_read_is_not_asked_about(world: World) {
        let store = world.open().await;
        for operation in [Operation::Get, Operation::Load] {
            for fault in [Fault::Before, Fault::HangBefore] {
                let (resolver, provider) = Provider::new();
                let mut shop = Shop::new(impatient(&store).resolver(resolver));
                let key = format!("{operation:?}-{fault:?}");
                shop.cut_off(&key).await;
                store.fail(operation, fault, Times::Always);
                assert_eq!(shop.retry(&key).await.said(), (503, UNAVAILABLE.to_owned()));
                store.clear();
                comes_to(&store, &key, Some(State::Abandoned)).await;
                assert_eq!((provider.asked(), shop.puppet.begun()), (0, 1));
            }
        }
    }

    // O2 for what was found out: nothing goes out before it is durable, and it is not asked twice.
    async fn a_verdict_that_cannot_be_recorded_in_time_is_recorded_in_the_background(world: World) {
        let store = world.open().await;
        let verdicts: [EndsWith; 3] = [
            (Operation::Complete, paid, Some(State::Completed)),
            (Operation::Release, || Verdict::DidNotHappen, None),
            (Operation::Abandon, || Verdict::Leave, Some(State::Abandoned)),
        ];
        for (operation, verdict, becomes) in verdicts {
            for fault in [Fault::Before, Fault::HangBefore] {
                let (resolver, mut provider) = Provider::new();
                let mut shop = Shop::new(impatient(&store).resolver(resolver));
                let key = format!("{operation:?}-{fault:?}");
                shop.cut_off(&key).await;
                store.fail(operation, fault, Times::Always);
                let retry = shop.retries(&key);
                provider.next().await.answer(verdict());
                assert_eq!(retry.await.unwrap().said(), (503, UNAVAILABLE.to_owned()));
                // Held, until the store takes it.
                assert_eq!(shop.retry(&key).await.said(), (409, IN_FLIGHT.to_owned()));
                store.clear();
                comes_to(&store, &key, becomes).await;
                assert_eq!((provider.asked(), shop.puppet.begun()), (1, 1), "{key}");
            }
        }
    }
}

// The future is dropped when its time is over, so that nothing goes on behind the layer's back.
#[tokio::test]
async fn a_resolver_whose_time_is_over_is_dropped() {
    let dropped = Arc::new(AtomicUsize::new(0));
    struct Counts(Arc<AtomicUsize>);
    impl Drop for Counts {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }
    let store = World::memory().open().await;
    let count = dropped.clone();
    let resolver = move |_: Abandoned| {
        let counts = Counts(count.clone());
        async move {
            let _counts = counts;
            std::future::pending().await
        }
    };
    let mut shop = Shop::new(
        impatient(&store)
            .resolver(resolver)
            .resolver_timeout(Duration::from_millis(20)),
    );
    shop.cut_off("k").await;
    assert_eq!(shop.retry("k").await.code(), UNKNOWN);
    assert_eq!(dropped.load(Ordering::SeqCst), 1);
}

//! A process that has the answer of a run in its hands, and cannot get it recorded.

use tower_idempotency::{
    InFlight, Recovery,
    testing::{Fault, Operation, Times},
};

use super::*;

const STORE_TIMEOUT: Duration = Duration::from_millis(200);
const MAX_RUN: Duration = Duration::from_secs(60);

every_store! {
    // O2 past `max_run`: never a second run, and nobody is asked what is known.
    async fn nothing_runs_and_nobody_is_asked_while_the_answer_is_being_recorded(world: World) {
        for by in ["rerun", "resolver"] {
            let store = world.open().await;
            let (resolver, provider) = Provider::new();
            let layer = layer(&store).store_timeout(STORE_TIMEOUT).max_run(MAX_RUN);
            let layer = match by {
                "rerun" => layer.recovery(Recovery::rerun()),
                _ => layer.resolver(resolver),
            };
            let mut shop = Shop::new(layer);
            let first = shop.retries(by);
            let run = shop.puppet.next().await;
            store.fail(Operation::Complete, Fault::Before, Times::Always);
            run.answers(201, "done");
            let first = first.await.unwrap();
            assert_eq!((first.status.as_u16(), &first.body[..]), (201, &b"done"[..]));
            world.clock.advance(MAX_RUN + Duration::from_secs(1));
            assert_eq!(shop.retry(by).await.said(), (409, IN_FLIGHT.to_owned()));
            let swept = shop.layer.reconciler().sweep().await;
            assert_eq!((swept.seen, swept.postponed), if by == "rerun" { (1, 0) } else { (1, 1) });
            store.clear();
            comes_to(&store, by, Some(State::Completed)).await;
            shop.retry(by).await.assert_replays(&first);
            assert_eq!((shop.puppet.begun(), provider.asked()), (1, 0));
        }
    }

    async fn those_who_wait_get_it_once_it_is_recorded(world: World) {
        let store = world.open().await;
        let waits = InFlight::Wait(Duration::from_secs(20));
        let layer = layer(&store).store_timeout(STORE_TIMEOUT).max_run(MAX_RUN).in_flight(waits);
        let mut shop = Shop::new(layer.recovery(Recovery::rerun()));
        let first = shop.retries("k");
        let run = shop.puppet.next().await;
        store.fail(Operation::Complete, Fault::Before, Times::Always);
        run.answers(201, "done");
        let first = first.await.unwrap();
        world.clock.advance(MAX_RUN + Duration::from_secs(1));
        let claims = store.calls(Operation::Claim);
        let waiter = shop.retries("k");
        called(&store, Operation::Claim, claims + 2).await;
        store.clear();
        waiter.await.unwrap().assert_replays(&first);
        assert_eq!(shop.puppet.begun(), 1);
    }
}

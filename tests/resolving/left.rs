//! Records that were left, for nobody knew: abandoned still, until somebody does.

use tower_idempotency::{Abandoned, store::Inspect};

use super::*;

const MAX_RUN: Duration = Duration::from_secs(60);

/// How a question can end without a word about what the run did.
#[derive(Debug, Clone, Copy)]
enum How {
    Leaves,
    TakesTooLong,
    Panics,
    BreaksOff,
}

impl How {
    const ALL: [Self; 4] = [
        Self::Leaves,
        Self::TakesTooLong,
        Self::Panics,
        Self::BreaksOff,
    ];

    fn resolver(self) -> impl Resolver {
        move |_: Abandoned| async move {
            match self {
                Self::Leaves => Verdict::Leave,
                Self::TakesTooLong => std::future::pending().await,
                Self::Panics => panic!("as the test wants"),
                Self::BreaksOff => {
                    Verdict::answer(support::bodies::Pieces::new(["half"]).then_error().body())
                }
            }
        }
    }
}

/// A run of this process that has been going on for too long, and the request that waits for it.
async fn slow_run(world: &World, shop: &mut Shop) -> (support::puppet::Run, JoinHandle<Answer>) {
    let first = shop.retries("k");
    let run = shop.puppet.next().await;
    world.clock.advance(MAX_RUN + Duration::from_secs(1));
    (run, first)
}

/// A run that is slow rather than dead tells its own client the truth, and no longer settles the record: one
/// who knows does.
async fn left_for_one_who_knows(world: &World, how: How) {
    let store = world.open().await;
    let layer = layer(&store).max_run(MAX_RUN).resolver(how.resolver());
    let mut shop = Shop::new(layer.resolver_timeout(Duration::from_millis(50)));
    let (run, first) = slow_run(world, &mut shop).await;
    let found = record(&store, "k").await.unwrap();
    assert_eq!(shop.layer.reconciler().sweep().await.left, 1, "{how:?}");
    let left = record(&store, "k").await.unwrap();
    assert_ne!(left.token, found.token, "{how:?}");
    run.answers(201, "slow");
    let told = first.await.unwrap();
    assert_eq!(
        (told.status, &told.body[..], told.replay),
        (StatusCode::CREATED, &b"slow"[..], false),
        "{how:?}"
    );
    let after = record(&store, "k").await.unwrap();
    assert_eq!(
        (after.state, after.token, after.attempt),
        (State::Abandoned, left.token, found.attempt),
        "{how:?}"
    );
    let listed = store.abandoned(None, 10).await.unwrap();
    assert_eq!(listed.len(), 1, "{how:?}");

    let knows = Shop::asking(&world.open().await, |_: Abandoned| async { paid() });
    let swept = knows.layer.reconciler().sweep().await;
    assert_eq!((swept.seen, swept.answered), (1, 1), "{how:?}");
    let replay = shop.retry("k").await;
    assert_eq!((&replay.body[..], replay.replay), (&b"paid"[..], true));
    assert!(store.forget(&found.id).await.unwrap());
}

every_store! {
    // Y2
    async fn a_record_that_was_left_stays_abandoned_until_a_resolver_knows(world: World) {
        for how in How::ALL {
            left_for_one_who_knows(&world, how).await;
        }
    }

    // Its hold lapsed, so what it found out comes too late: the next one left the record under its own token.
    async fn a_slow_asker_changes_nothing_after_the_next_one_left_the_record(world: World) {
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
        let left = record(&store, "k").await.unwrap();
        paused.answer(Verdict::answer((StatusCode::CREATED, "too late")));
        assert_eq!(waits.await.unwrap().said(), (409, UNKNOWN.to_owned()));
        let after = record(&store, "k").await.unwrap();
        assert_eq!((after.state, after.token), (State::Abandoned, left.token));
        assert_eq!(quick.retry("k").await.said(), (409, UNKNOWN.to_owned()));

        let knows = Shop::asking(&store, |_: Abandoned| async { paid() });
        let replay = knows.retry("k").await;
        assert_eq!((&replay.body[..], replay.replay), (&b"paid"[..], true));
        assert_eq!((slow.puppet.begun(), quick.puppet.begun()), (1, 0));
    }
}

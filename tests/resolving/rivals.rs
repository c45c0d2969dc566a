//! Late owners, duplicates, and others who ask at the same time.

use tower_idempotency::{InFlight, Recovery, testing::Operation};

use super::*;

/// A run whose process falls silent: it holds its claim for good, as far as it knows.
async fn silent_run(world: &World, key: &str) -> (Shop, support::puppet::Run, JoinHandle<Answer>) {
    let store = world.open_silent().await;
    let mut dead = Shop::new(layer(&store));
    let request = spawn(&dead.app, post(key, "A"));
    let run = dead.puppet.next().await;
    world.clock.advance(LEASE + Duration::from_secs(1));
    (dead, run, request)
}

every_store! {
    // L3: the fresh token comes before the question, so the late owner changes nothing from then on.
    async fn a_late_owner_changes_nothing_while_it_is_asked_about(world: World) {
        let (dead, run, request) = silent_run(&world, "k").await;
        let store = world.open().await;
        let (resolver, mut provider) = Provider::new();
        let shop = Shop::asking(&store, resolver);
        let retry = shop.retries("k");
        let question = provider.next().await;
        let held = record(&store, "k").await.unwrap();
        run.answers(201, "the late owner's");
        let late = request.await.unwrap();
        // Its own client gets its own true answer, which is not stored.
        assert_eq!((late.status.as_u16(), &late.body[..], late.replay), (201, &b"the late owner's"[..], false));
        assert_eq!(record(&store, "k").await.unwrap(), held);
        question.answer(paid());
        for replay in [retry.await.unwrap(), dead.retry("k").await] {
            assert_eq!((replay.status.as_u16(), &replay.body[..], replay.replay), (201, &b"paid"[..], true));
        }
    }

    async fn a_late_owner_changes_nothing_after_it_was_found_out(world: World) {
        let (_dead, run, request) = silent_run(&world, "k").await;
        let store = world.open().await;
        let (resolver, mut provider) = Provider::new();
        let shop = Shop::asking(&store, resolver);
        let retry = shop.retries("k");
        provider.next().await.answer(paid());
        retry.await.unwrap();
        let resolved = record(&store, "k").await.unwrap();
        run.answers(201, "late");
        request.await.unwrap();
        assert_eq!(record(&store, "k").await.unwrap(), resolved);
    }

    // Y2 with a resolver: past `max_run` its answer counts until somebody takes the record over.
    async fn a_run_past_max_run_still_counts_where_nobody_resolved_it(world: World) {
        for resolved in [false, true] {
            let store = world.open().await;
            let (resolver, mut provider) = Provider::new();
            let layer = layer(&store).max_run(LEASE).resolver(resolver);
            let mut shop = Shop::new(layer);
            let key = resolved.to_string();
            let request = spawn(&shop.app, post(&key, "A"));
            let run = shop.puppet.next().await;
            world.clock.advance(LEASE + Duration::from_secs(1));
            if resolved {
                let retry = shop.retries(&key);
                provider.next().await.answer(paid());
                assert_eq!(&retry.await.unwrap().body[..], b"paid");
            }
            run.answers(201, "late");
            let late = request.await.unwrap();
            assert_eq!(&late.body[..], b"late");
            let replay = shop.retry(&key).await;
            assert!(replay.replay);
            assert_eq!(&replay.body[..], if resolved { &b"paid"[..] } else { &b"late"[..] });
        }
    }

    // L2: a run of this process is going on, whatever its lease looks like; nobody is asked about it.
    async fn a_run_of_this_process_is_not_asked_about_though_its_lease_lapsed(world: World) {
        let store = world.open().await;
        let (resolver, provider) = Provider::new();
        let mut shop = Shop::asking(&store, resolver);
        let first = spawn(&shop.app, post("k", "A"));
        let run = shop.puppet.next().await;
        world.clock.advance(LEASE + Duration::from_secs(1));
        assert_eq!(shop.retry("k").await.said(), (409, IN_FLIGHT.to_owned()));
        run.answers(201, "done");
        let first = first.await.unwrap();
        shop.retry("k").await.assert_replays(&first);
        assert_eq!(provider.asked(), 0);
    }

    async fn of_duplicates_at_once_one_asks_and_the_others_are_told_it_is_in_flight(world: World) {
        let (_dead, _run, _request) = silent_run(&world, "k").await;
        let (resolver, mut provider) = Provider::new();
        let mut shops = Vec::new();
        for _ in 0..2 {
            shops.push(Shop::asking(&world.open().await, resolver.clone()));
        }
        let retries: Vec<_> = (0..10).map(|retry| shops[retry % 2].retries("k")).collect();
        let question = provider.next().await;
        eventually("the others to be told", || {
            retries.iter().filter(|retry| retry.is_finished()).count() == 9
        })
        .await;
        question.answer(paid());
        let mut answers = Vec::new();
        for retry in retries {
            answers.push(retry.await.unwrap());
        }
        answers.sort_by_key(|answer| answer.status);
        assert_eq!((answers[0].status.as_u16(), answers[0].replay), (201, true));
        for told in &answers[1..] {
            assert_eq!(told.said(), (409, IN_FLIGHT.to_owned()));
        }
        assert_eq!(provider.asked(), 1);
    }

    // C11: those who wait get what was found out, whoever asked.
    async fn duplicates_that_wait_get_the_answer_that_was_found_out(world: World) {
        let (_dead, _run, _request) = silent_run(&world, "k").await;
        let (resolver, mut provider) = Provider::new();
        let mut shops = Vec::new();
        for _ in 0..2 {
            let layer = layer(&world.open().await).resolver(resolver.clone());
            shops.push(Shop::new(layer.in_flight(InFlight::Wait(Duration::from_secs(20)))));
        }
        let retries: Vec<_> = (0..6).map(|retry| shops[retry % 2].retries("k")).collect();
        provider.next().await.answer(paid());
        for retry in retries {
            let replay = retry.await.unwrap();
            assert_eq!((replay.status.as_u16(), &replay.body[..], replay.replay), (201, &b"paid"[..], true));
        }
        assert_eq!(provider.asked(), 1);
    }

    // C10: of those who wait one runs when it turns out that nothing happened.
    async fn of_those_who_wait_one_runs_when_the_key_is_freed(world: World) {
        const WAITERS: usize = 40;
        let (_dead, _run, _request) = silent_run(&world, "k").await;
        let (resolver, mut provider) = Provider::new();
        let handler = Handler::new();
        let (mut stores, mut apps) = (Vec::new(), Vec::new());
        for _ in 0..2 {
            let store = world.open().await;
            let waits = InFlight::Wait(Duration::from_secs(30));
            let layer = layer(&store).store_timeout(Duration::from_secs(10)).in_flight(waits);
            apps.push(handler.behind(layer.resolver(resolver.clone())));
            stores.push(store);
        }
        let sent: Vec<_> = (0..WAITERS).map(|n| spawn(&apps[n % 2], post("k", "A"))).collect();
        let question = provider.next().await;
        for store in &stores {
            called(store, Operation::Claim, WAITERS / 2).await;
        }
        question.answer(Verdict::DidNotHappen);
        let mut fresh = 0;
        for sent in sent {
            let answer = sent.await.unwrap();
            assert_eq!(answer.status, 201, "{answer:?}");
            fresh += usize::from(!answer.replay);
        }
        assert_eq!((handler.effects(), fresh, provider.asked()), (1, 1, 1));
    }

    // Whoever asks for too long is treated as one who fell silent: the next one asks.
    async fn a_hold_that_lapsed_is_taken_over_and_the_first_ones_verdict_is_lost(world: World) {
        let (_dead, _run, _request) = silent_run(&world, "k").await;
        let (resolver, mut provider) = Provider::new();
        let slow = Shop::asking(&world.open().await, resolver.clone());
        let store = world.open().await;
        let quick = Shop::asking(&store, resolver);
        let waits = slow.retries("k");
        let paused = provider.next().await;
        world.clock.advance(HOLD);
        let retry = quick.retries("k");
        provider.next().await.answer(paid());
        let first = retry.await.unwrap();
        assert_eq!((&first.body[..], first.replay), (&b"paid"[..], true));
        paused.answer(Verdict::answer((StatusCode::PAYMENT_REQUIRED, "declined")));
        // It looks again, and finds what the other one has found out.
        let told = waits.await.unwrap();
        assert_eq!((told.status.as_u16(), &told.body[..], told.replay), (201, &b"paid"[..], true));
    }

    // Whoever has asked once has had its say.
    async fn a_request_whose_verdict_was_lost_does_not_ask_again(world: World) {
        let (_dead, _run, _request) = silent_run(&world, "k").await;
        let (resolver, mut provider) = Provider::new();
        let slow = Shop::asking(&world.open().await, resolver.clone());
        let quick = layer(&world.open().await).resolver(resolver);
        let mut quick = Shop::new(quick.recovery(Recovery::rerun()));
        let waits = slow.retries("k");
        let paused = provider.next().await;
        world.clock.advance(HOLD);
        let retry = quick.retries("k");
        provider.next().await.answer(Verdict::Leave);
        quick.puppet.next().await.panics("as the test wants");
        assert_eq!(retry.await.unwrap().status, 500);
        paused.answer(paid());
        assert_eq!(waits.await.unwrap().said(), (409, UNKNOWN.to_owned()));
        assert_eq!(provider.asked(), 2);
    }

    async fn a_process_that_dies_while_it_asks_holds_the_record_up_no_longer_than_its_hold(world: World) {
        let (_dead, _run, _request) = silent_run(&world, "k").await;
        let (resolver, mut provider) = Provider::new();
        let dies = Shop::asking(&world.open().await, resolver.clone());
        let _never_answered = dies.retries("k");
        let _unanswered = provider.next().await;
        let shop = Shop::asking(&world.open().await, resolver);
        assert_eq!(shop.retry("k").await.said(), (409, IN_FLIGHT.to_owned()));
        world.clock.advance(HOLD);
        let retry = shop.retries("k");
        provider.next().await.answer(paid());
        assert_eq!(&retry.await.unwrap().body[..], b"paid");
    }
}

// A record that is just being changed by somebody else is in flight, not unknown: it cannot be taken over, and
// what it is to become cannot be seen yet.
#[cfg(feature = "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_record_that_somebody_else_is_just_taking_over_is_in_flight() {
    let world = World::postgres();
    let (resolver, mut provider) = Provider::new();
    let mut shop = Shop::asking(&world.open().await, resolver);
    shop.cut_off("k").await;
    let mut other = world.database().unwrap().connect().await;
    let lock = "BEGIN; SELECT FROM idempotency_records FOR UPDATE";
    sqlx::raw_sql(lock).execute(&mut other).await.unwrap();
    assert_eq!(shop.retry("k").await.said(), (409, IN_FLIGHT.to_owned()));
    assert_eq!(provider.asked(), 0);
    sqlx::raw_sql("ROLLBACK").execute(&mut other).await.unwrap();
    let retry = shop.retries("k");
    provider.next().await.answer(paid());
    assert_eq!(&retry.await.unwrap().body[..], b"paid");
}

//! Requests that wait for a run, and what they do once it is cut off.

use super::*;

every_store! {
    async fn a_waiter_that_lost_the_race_for_the_question_does_not_wait_on_for_a_record_that_was_left(world: World) {
        cut_off(&world.open().await, "k").await;
        let racer = world.open().await;
        let late = Fault::DelayBefore(Duration::from_millis(300));
        racer.fail(Operation::TakeOver, late, Times::Once);
        let (resolver, mut provider) = Provider::new();
        let patient = InFlight::Wait(Duration::from_secs(60));
        let (app, _puppet) = puppet_app(&layer(&racer).resolver(resolver.clone()).in_flight(patient));
        let waiter = spawn(&app, post("k", "A"));
        called(&racer, Operation::TakeOver, 1).await;
        let looks = racer.calls(Operation::Claim) + racer.calls(Operation::Get);
        let sweeper = layer(&world.open().await).resolver(resolver);
        let sweeping = tokio::spawn(async move { sweeper.reconciler().sweep().await });
        let question = provider.next().await;
        // The waiter has lost, and has seen that somebody is at it.
        looked(&racer, looks + 1).await;
        question.answer(Verdict::Leave);
        assert_eq!(sweeping.await.unwrap().left, 1);
        let told = tokio::select! {
            told = timeout(Duration::from_secs(20), waiter) => told.expect("it waits for nobody").unwrap(),
            question = provider.next() => panic!("asked at once again about {:?}", question.abandoned),
        };
        assert_eq!(told.said(), (409, UNKNOWN.to_owned()));
    }

    async fn a_waiter_whose_question_could_not_be_put_asks_again_and_does_not_run(world: World) {
        let (_first, _run) = silent(&world.open().await, "k").await;
        let store = world.open().await;
        let (resolver, mut provider) = Provider::new();
        let waiting = layer(&store)
            .resolver(resolver)
            .in_flight(InFlight::Wait(Duration::from_secs(10)))
            .recovery(Recovery::rerun())
            .store_failure(StoreFailure::RunUnprotected);
        let (app, mut puppet) = puppet_app(&waiting);
        let waiter = spawn(&app, post("k", "A"));
        looked(&store, 2).await;
        store.fail(Operation::Load, Fault::Before, Times::Next(3));
        world.clock.advance(LEASE + MOMENT);
        let question = tokio::select! {
            question = provider.next() => question,
            _ = puppet.next() => panic!("it runs, and nobody was asked"),
        };
        question.answer(paid());
        let replay = waiter.await.unwrap();
        assert_eq!((&replay.body[..], replay.replay), (&b"paid"[..], true));
        assert_eq!(puppet.begun(), 0);
    }

    async fn a_waiter_runs_what_its_question_freed_though_its_wait_is_over(world: World) {
        let (_first, _run) = silent(&world.open().await, "k").await;
        let store = world.open().await;
        let (resolver, mut provider) = Provider::new();
        let wait = Duration::from_millis(700);
        let waiting = layer(&store).resolver(resolver).max_running(1).in_flight(InFlight::Wait(wait));
        let (app, mut puppet) = puppet_app(&waiting);
        let waiter = spawn(&app, post("k", "A"));
        looked(&store, 1).await;
        world.clock.advance(LEASE + MOMENT);
        let question = provider.next().await;
        tokio::time::sleep(wait).await;
        question.answer(Verdict::DidNotHappen);
        puppet.next().await.answers(201, "ran");
        assert_eq!(waiter.await.unwrap().status, 201);
    }
}

#[cfg(feature = "sealing")]
every_store! {
    async fn a_waiter_does_not_run_a_record_whose_checkpoints_cannot_be_read(world: World) {
        use tower_idempotency::store::{SealedStore, SealingKeys};

        let home = world.open().await;
        home.fail(Operation::Renew, Fault::Before, Times::Always);
        let keys = SealingKeys::new("old", [1; 32]);
        let sealed = SealedStore::open(home.clone(), keys).await.unwrap();
        let (router, mut puppet) = Puppet::new();
        let old = IdempotencyLayer::new(sealed).single_tenant().lease(LEASE);
        let app = router.route_layer(old);
        let _first = spawn(&app, post("k", "A"));
        let run = puppet.next().await;
        run.owner().checkpoint("charge", &7_u32).await.unwrap();

        let store = world.open().await;
        let keys = SealingKeys::new("new", [2; 32]);
        let sealed = SealedStore::open(store.clone(), keys).await.unwrap();
        let (resolver, provider) = Provider::new();
        let (router, mut puppet) = Puppet::new();
        let new = IdempotencyLayer::new(sealed)
            .single_tenant()
            .lease(LEASE)
            .resolver(resolver)
            .in_flight(InFlight::Wait(Duration::from_secs(2)))
            .recovery(Recovery::rerun())
            .store_failure(StoreFailure::RunUnprotected);
        let app = router.route_layer(new);
        let waiter = spawn(&app, post("k", "A"));
        looked(&store, 2).await;
        world.clock.advance(LEASE + MOMENT);
        let told = tokio::select! {
            told = waiter => told.unwrap(),
            _ = puppet.next() => panic!("it runs though its checkpoints cannot be read"),
        };
        // Also in flight: its own question may hold the record still when its wait is over.
        assert!([UNAVAILABLE, IN_FLIGHT].contains(&&told.code()[..]), "{:?}", told.said());
        assert_eq!((puppet.begun(), provider.asked()), (0, 0));
    }
}

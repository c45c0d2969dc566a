//! Runs that go on in the process that is asked: in flight there, whatever others think of them.

use super::*;

/// A run of this process whose claim another process has taken over and left.
async fn left_by_another(
    world: &World,
    store: &TestStore,
    app: &Router,
    puppet: &mut Puppet,
) -> (JoinHandle<Answer>, Run) {
    store.fail(Operation::Renew, Fault::Before, Times::Always);
    let first = spawn(app, post("k", "A"));
    let run = puppet.next().await;
    world.clock.advance(LEASE + MOMENT);
    another_process_leaves(world).await;
    store.clear();
    (first, run)
}

every_store! {
    async fn a_run_that_goes_on_here_is_not_asked_about_after_another_process_left_it(world: World) {
        let store = world.open().await;
        let (resolver, mut provider) = Provider::new();
        let layer = layer(&store).resolver(resolver);
        let (app, mut puppet) = puppet_app(&layer);
        let (first, run) = left_by_another(&world, &store, &app, &mut puppet).await;
        assert_eq!(told_at_once(&app).await, (409, IN_FLIGHT.to_owned()));
        let swept = layer.reconciler().sweep().await;
        assert_eq!((swept.seen, swept.postponed), (1, 1), "{swept:?}");
        assert_eq!((provider.asked(), puppet.begun()), (0, 1));

        // Its claim is gone: its client hears the truth, and the retries ask from now on.
        run.answers(201, "done");
        let first = first.await.unwrap();
        assert_eq!((first.status, first.replay), (StatusCode::CREATED, false));
        assert_eq!(state(&store, "k").await, Some(State::Abandoned));
        let retry = spawn(&app, post("k", "A"));
        provider.next().await.answer(paid());
        let replay = retry.await.unwrap();
        assert_eq!((&replay.body[..], replay.replay), (&b"paid"[..], true));
    }

    async fn a_run_that_goes_on_here_is_not_run_beside_itself_after_another_process_left_it(world: World) {
        let store = world.open().await;
        let (app, mut puppet) = puppet_app(&layer(&store).recovery(Recovery::rerun()));
        let (first, run) = left_by_another(&world, &store, &app, &mut puppet).await;
        assert_eq!(told_at_once(&app).await, (409, IN_FLIGHT.to_owned()));
        assert_eq!(puppet.begun(), 1);
        run.answers(201, "done");
        assert_eq!(first.await.unwrap().status, 201);
        // Now that it is over, and was not recorded, the rule for runs that were cut off holds.
        let retry = spawn(&app, post("k", "A"));
        puppet.next().await.answers(201, "again");
        assert_eq!(retry.await.unwrap().status, 201);
    }

    async fn an_answer_that_is_still_being_recorded_is_not_asked_about_here(world: World) {
        let store = world.open().await;
        let (resolver, provider) = Provider::new();
        let layer = layer(&store)
            .resolver(resolver)
            .max_run(MAX_RUN)
            .store_timeout(Duration::from_millis(200))
            .recovery(Recovery::rerun());
        let (app, mut puppet) = puppet_app(&layer);
        store.fail(Operation::Complete, Fault::Before, Times::Always);
        let sent = spawn(&app, post("k", "A"));
        puppet.next().await.answers(201, "true");
        let first = sent.await.unwrap();
        world.clock.advance(MAX_RUN * 3);
        assert_eq!(told_at_once(&app).await, (409, IN_FLIGHT.to_owned()));
        let swept = layer.reconciler().sweep().await;
        assert_eq!((swept.postponed, swept.left), (1, 0), "{swept:?}");
        store.clear();
        comes_to(&store, "k", Some(State::Completed)).await;
        send(&app, post("k", "A")).await.assert_replays(&first);
        assert_eq!((provider.asked(), puppet.begun()), (0, 1));
    }

    async fn a_release_that_is_still_being_recorded_is_not_asked_about_here(world: World) {
        let store = world.open().await;
        let (resolver, provider) = Provider::new();
        let layer = layer(&store)
            .max_run(MAX_RUN)
            .resolver(resolver)
            .store_timeout(Duration::from_millis(200));
        let (app, mut puppet) = puppet_app(&layer);
        store.fail(Operation::Release, Fault::Before, Times::Always);
        let sent = spawn(&app, post("k", "A"));
        puppet.next().await.answers(429, "later");
        assert_eq!(sent.await.unwrap().status, 429);
        world.clock.advance(MAX_RUN + MOMENT);
        assert_eq!(told_at_once(&app).await, (409, IN_FLIGHT.to_owned()));
        store.clear();
        comes_to(&store, "k", None).await;
        let retry = spawn(&app, post("k", "A"));
        puppet.next().await.answers(201, "now");
        assert_eq!(retry.await.unwrap().status, 201);
        assert_eq!(provider.asked(), 0);
    }
}

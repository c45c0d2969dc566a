//! Clients, servers and runtimes that end while it is being found out.

use support::wire::{Server, raw_post};
use tokio::{runtime::Runtime, time::timeout};
use tower_idempotency::{
    Recovery,
    testing::{Fault, Operation, Times},
};

use super::*;

const PATIENCE: Duration = Duration::from_secs(10);

every_store! {
    // D1 for a resolver: over TCP, with a reset.
    async fn a_client_that_leaves_does_not_cut_the_question_off(world: World) {
        let store = world.open().await;
        let (resolver, mut provider) = Provider::new();
        let mut shop = Shop::asking(&store, resolver);
        shop.cut_off("k").await;
        let server = Server::start(shop.app.clone()).await;
        let mut wire = server.connect().await;
        wire.write(&raw_post("k", "A")).await;
        let mut question = provider.next().await;
        wire.reset();
        let gone = timeout(Duration::from_millis(200), question.dropped()).await;
        assert!(gone.is_err(), "the question was dropped with its client");
        question.answer(paid());
        comes_to(&store, "k", Some(State::Completed)).await;
        let retry = server.exchange(&raw_post("k", "A")).await;
        assert_eq!((retry.status, retry.is_replay(), &retry.body[..]), (201, true, &b"paid"[..]));
        assert_eq!((shop.puppet.begun(), provider.asked()), (1, 1));
    }

    async fn nothing_runs_for_a_client_that_left_when_it_turns_out_that_nothing_happened(world: World) {
        let store = world.open().await;
        let (resolver, mut provider) = Provider::new();
        let mut shop = Shop::asking(&store, resolver);
        shop.cut_off("k").await;
        let leaves = shop.retries("k");
        let question = provider.next().await;
        leaves.abort();
        assert!(leaves.await.unwrap_err().is_cancelled());
        question.answer(Verdict::DidNotHappen);
        comes_to(&store, "k", None).await;
        let drained = shop.layer.drain(PATIENCE).await;
        assert_eq!((drained.aborted, drained.left, shop.puppet.begun()), (0, 0, 1));
    }

    async fn nothing_is_rerun_for_a_client_that_left_while_it_was_asked(world: World) {
        let store = world.open().await;
        let (resolver, mut provider) = Provider::new();
        let mut shop = Shop::new(layer(&store).resolver(resolver).recovery(Recovery::rerun()));
        shop.cut_off("k").await;
        let leaves = shop.retries("k");
        let question = provider.next().await;
        leaves.abort();
        assert!(leaves.await.unwrap_err().is_cancelled());
        question.answer(Verdict::Leave);
        comes_to(&store, "k", Some(State::Abandoned)).await;
        let drained = shop.layer.drain(PATIENCE).await;
        assert_eq!((drained.aborted, drained.left, shop.puppet.begun()), (0, 0, 1));
        assert_eq!(record(&store, "k").await.unwrap().attempt, 1);
    }

    // A client that leaves before anything is held leaves nothing behind.
    async fn a_client_that_leaves_before_the_record_is_held_changes_nothing(world: World) {
        let store = world.open().await;
        let (resolver, provider) = Provider::new();
        let mut shop = Shop::asking(&store, resolver);
        shop.cut_off("k").await;
        let found = record(&store, "k").await;
        store.fail(Operation::Get, Fault::HangBefore, Times::Once);
        let leaves = shop.retries("k");
        called(&store, Operation::Get, 1).await;
        leaves.abort();
        assert!(leaves.await.unwrap_err().is_cancelled());
        let drained = shop.layer.drain(PATIENCE).await;
        assert_eq!((drained.aborted, drained.left), (0, 0));
        assert_eq!((record(&store, "k").await, provider.asked()), (found, 0));
    }

    async fn drain_waits_for_what_is_being_asked(world: World) {
        let store = world.open().await;
        let (resolver, mut provider) = Provider::new();
        let mut shop = Shop::asking(&store, resolver);
        shop.cut_off("k").await;
        let retry = shop.retries("k");
        let question = provider.next().await;
        let layer = shop.layer.clone();
        let draining = tokio::spawn(async move { layer.drain(PATIENCE).await });
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(!draining.is_finished());
        question.answer(paid());
        let drained = draining.await.unwrap();
        assert_eq!((drained.aborted, drained.left), (0, 0));
        assert_eq!(state(&store, "k").await, Some(State::Completed));
        assert_eq!(&retry.await.unwrap().body[..], b"paid");
    }

    async fn drain_aborts_what_is_still_being_asked_when_its_time_is_over(world: World) {
        let store = world.open().await;
        let (resolver, mut provider) = Provider::new();
        let mut shop = Shop::asking(&store, resolver);
        shop.cut_off("k").await;
        let retry = shop.retries("k");
        let mut question = provider.next().await;
        let drained = timeout(PATIENCE / 2, shop.layer.drain(Duration::from_millis(20))).await;
        let drained = drained.expect("it waits for the resolver");
        assert_eq!((drained.aborted, drained.left), (1, 0));
        // The next process need not wait for the hold.
        assert_eq!(state(&store, "k").await, Some(State::Abandoned));
        question.dropped().await;
        assert_eq!(retry.await.unwrap().said(), (409, UNKNOWN.to_owned()));
    }

    // L12 for a resolver: its runtime ends in the middle.
    async fn what_was_being_asked_when_its_runtime_ended_is_given_up_from_another(world: World) {
        let store = world.open().await;
        let (resolver, mut provider) = Provider::new();
        let mut shop = Shop::asking(&store, resolver);
        shop.cut_off("k").await;
        let ended = Runtime::new().unwrap();
        let dies = shop.app.clone();
        ended.spawn(async move { send(&dies, post("k", "A")).await });
        let question = provider.next().await;
        tokio::task::spawn_blocking(move || drop(ended)).await.unwrap();
        question.answer_too_late(paid());
        let other = spawn(&shop.app, post("other", "A"));
        shop.puppet.next().await.answers(201, "done");
        assert_eq!(other.await.unwrap().status, 201);
        comes_to(&store, "k", Some(State::Abandoned)).await;
        let retry = shop.retries("k");
        provider.next().await.answer(paid());
        assert_eq!(&retry.await.unwrap().body[..], b"paid");
    }
}

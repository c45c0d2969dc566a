//! Clients, servers and runtimes that end while it is being found out.

use std::{
    future::{Future, poll_fn},
    task::Poll,
};

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
        // It is no run.
        assert_eq!((drained.aborted, drained.left), (0, 0));
        // The next process need not wait for the hold.
        assert_eq!(state(&store, "k").await, Some(State::Abandoned));
        question.dropped().await;
        assert_eq!(retry.await.unwrap().said(), (503, OVERLOADED.to_owned()));
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

    // Y1: from the beginning of a drain nothing is run, whatever turns out, and no attempt is used up.
    async fn nothing_runs_after_a_drain_has_begun_whatever_was_found_out(world: World) {
        let verdicts = [("freed", None), ("left", Some(State::Abandoned))];
        for (key, becomes) in verdicts {
            let store = world.open().await;
            let (resolver, mut provider) = Provider::new();
            let mut shop = Shop::new(layer(&store).resolver(resolver).recovery(Recovery::rerun()));
            shop.cut_off(key).await;
            let retry = shop.retries(key);
            let question = provider.next().await;
            let mut draining = std::pin::pin!(shop.layer.drain(PATIENCE));
            let begins = poll_fn(|cx| Poll::Ready(draining.as_mut().poll(cx).is_pending()));
            assert!(begins.await);
            question.answer(if key == "freed" { Verdict::DidNotHappen } else { Verdict::Leave });
            assert_eq!(retry.await.unwrap().said(), (503, OVERLOADED.to_owned()), "{key}");
            let drained = draining.await;
            assert_eq!((drained.aborted, drained.left), (0, 0));
            let left = record(&store, key).await;
            assert_eq!(left.as_ref().map(|record| record.state), becomes, "{key}");
            assert!(left.is_none_or(|record| record.attempt == 1), "{key}");
            assert_eq!(shop.puppet.begun(), 1);
        }
    }

    // Nor is anything taken over that was only looked up by then.
    async fn nothing_is_asked_about_after_a_drain_has_begun(world: World) {
        let store = world.open().await;
        let (resolver, provider) = Provider::new();
        let mut shop = Shop::asking(&store, resolver);
        shop.cut_off("k").await;
        let found = record(&store, "k").await;
        store.fail(Operation::Get, Fault::DelayAfter(Duration::from_millis(300)), Times::Once);
        let retry = shop.retries("k");
        called(&store, Operation::Get, 1).await;
        let drained = shop.layer.drain(PATIENCE).await;
        assert_eq!((drained.aborted, drained.left), (0, 0));
        assert_eq!(retry.await.unwrap().said(), (503, OVERLOADED.to_owned()));
        assert_eq!((record(&store, "k").await, provider.asked()), (found, 0));
    }
}

//! What a request holds while it asks: no place of a run, and no more than its share.

use tower::limit::ConcurrencyLimitLayer;

use super::*;

/// How many requests of a process ask at once.
const INQUIRIES: usize = 64;

every_store! {
    async fn those_who_ask_take_no_places_of_runs(world: World) {
        let store = world.open().await;
        let (resolver, mut provider) = Provider::new();
        let mut shop = Shop::new(layer(&store).max_running(2).resolver(resolver));
        let mut asks = Vec::new();
        let mut questions = Vec::new();
        for key in ["a", "b", "c"] {
            shop.cut_off(key).await;
            asks.push(shop.retries(key));
            questions.push(provider.next().await);
        }
        // Three are asked about, and all places are free.
        let mut runs = Vec::new();
        for key in ["fresh-1", "fresh-2"] {
            let request = shop.retries(key);
            runs.push((request, shop.puppet.next().await));
        }
        // Whoever is to run after all needs one, as everybody does.
        let (asked, question) = (asks.remove(0), questions.remove(0));
        question.answer(Verdict::DidNotHappen);
        assert_eq!(asked.await.unwrap().said(), (503, OVERLOADED.to_owned()));
        // Whoever gets an answer needs none.
        let (asked, question) = (asks.remove(0), questions.remove(0));
        question.answer(paid());
        assert_eq!(&asked.await.unwrap().body[..], b"paid");
        for (request, run) in runs {
            run.answers(201, "done");
            assert_eq!(request.await.unwrap().status, 201);
        }
        let (asked, question) = (asks.remove(0), questions.remove(0));
        question.answer(Verdict::DidNotHappen);
        shop.puppet.next().await.answers(201, "now it did");
        assert_eq!(asked.await.unwrap().status, 201);
    }
}

// One that is not polled ready again would keep the others out for as long as it asks.
#[tokio::test]
async fn those_who_ask_hold_nothing_of_the_inner_service() {
    let store = World::memory().open().await;
    let (resolver, mut provider) = Provider::new();
    let (router, mut puppet) = Puppet::new();
    let app = router
        .route_layer(ConcurrencyLimitLayer::new(1))
        .route_layer(layer(&store).resolver(resolver))
        .layer(CatchPanicLayer::new());
    let first = spawn(&app, post("k", "A"));
    puppet.next().await.panics("as the test wants");
    assert_eq!(first.await.unwrap().status, 500);
    let asks = spawn(&app, post("k", "A"));
    let question = provider.next().await;
    let other = spawn(&app, post("other", "A"));
    puppet.next().await.answers(201, "done");
    assert_eq!(other.await.unwrap().status, 201);
    question.answer(Verdict::DidNotHappen);
    puppet.next().await.answers(201, "now it did");
    assert_eq!(&asks.await.unwrap().body[..], b"now it did");
}

#[tokio::test]
async fn those_who_ask_at_once_are_bounded_by_themselves() {
    let store = World::memory().open().await;
    let (resolver, mut provider) = Provider::new();
    let mut shop = Shop::asking(&store, resolver);
    let mut asks = Vec::new();
    let mut questions = Vec::new();
    for key in 0..INQUIRIES {
        let key = format!("k-{key}");
        shop.cut_off(&key).await;
        asks.push(shop.retries(&key));
        questions.push(provider.next().await);
    }
    shop.cut_off("beyond").await;
    let told = shop.retry("beyond").await;
    assert_eq!(told.said(), (503, OVERLOADED.to_owned()));
    assert_eq!(told.header("retry-after"), Some("1"));
    assert_eq!(state(&store, "beyond").await, Some(State::Abandoned));
    for (asked, question) in asks.into_iter().zip(questions) {
        question.answer(paid());
        assert_eq!(&asked.await.unwrap().body[..], b"paid");
    }
    let asks = shop.retries("beyond");
    provider.next().await.answer(paid());
    assert_eq!(&asks.await.unwrap().body[..], b"paid");
}

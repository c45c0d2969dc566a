//! Runs that wait for a place in an inner service that has one.

use axum::{body::Body, extract::Request};
use tower::{Layer, Service, ServiceExt, limit::ConcurrencyLimit, util::BoxCloneSyncService};
use tower_idempotency::Token;

use super::*;

type Narrow = BoxCloneSyncService<Request, Response, std::convert::Infallible>;

/// A service with one place inside the layer, and the runs that take it.
fn narrow(layer: &IdempotencyLayer<TestStore>) -> (Narrow, Puppet) {
    let (router, puppet) = Puppet::new();
    let limited = ConcurrencyLimit::new(router, 1);
    let caught = CatchPanicLayer::new().layer(layer.layer(limited));
    let service = ServiceExt::<Request>::map_response(caught, |response| response.map(Body::new));
    (BoxCloneSyncService::new(service), puppet)
}

fn go(service: &Narrow, key: &'static str) -> JoinHandle<Answer> {
    let mut service = service.clone();
    tokio::spawn(async move {
        let ready = service.ready().await.unwrap();
        Answer::of(ready.call(post(key, "A")).await.unwrap()).await
    })
}

/// Waits until the record, which is being asked about under this token, has a run again.
async fn claimed_anew(store: &TestStore, asking: Token) {
    let claimed = async {
        loop {
            let found = record(store, "k").await;
            if found.is_some_and(|found| found.state == State::Running && found.token != asking) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    let claimed = timeout(Duration::from_secs(10), claimed).await;
    claimed.expect("nobody claims it");
}

every_store! {
    async fn a_run_that_lost_its_claim_while_it_waited_for_a_place_does_not_begin(world: World) {
        let store = world.open().await;
        cut_off(&store, "k").await;
        let (resolver, mut provider) = Provider::new();
        let here = layer(&world.open().await).max_run(MAX_RUN).resolver(resolver.clone());
        let (service, mut puppet) = narrow(&here);
        let waits = go(&service, "k");
        let question = provider.next().await;
        let other = go(&service, "other");
        let busy = puppet.next().await;
        let asking = record(&store, "k").await.unwrap().token;
        question.answer(Verdict::DidNotHappen);
        claimed_anew(&store, asking).await;
        // It waits for longer than a run may take. Another process asks, hears that nothing has happened, and
        // runs it.
        world.clock.advance(MAX_RUN + MOMENT);
        let there = layer(&world.open().await).max_run(MAX_RUN).resolver(resolver);
        let (app, mut elsewhere) = puppet_app(&there);
        let retry = spawn(&app, post("k", "A"));
        provider.next().await.answer(Verdict::DidNotHappen);
        elsewhere.next().await.answers(201, "elsewhere");
        let first = retry.await.unwrap();
        assert_eq!(first.status, 201);
        busy.answers(201, "other");
        assert_eq!(other.await.unwrap().status, 201);
        let told = tokio::select! {
            told = waits => told.unwrap(),
            _ = puppet.next() => panic!("it runs though its claim was lost before it began"),
        };
        assert_eq!(told.said(), (409, IN_FLIGHT.to_owned()));
        send(&app, post("k", "A")).await.assert_replays(&first);
        assert_eq!(puppet.begun(), 1);
    }

    async fn who_asks_holds_no_place_and_leaves_none_taken_behind(world: World) {
        let store = world.open().await;
        let (resolver, mut provider) = Provider::new();
        let layer = layer(&store).resolver(resolver).max_running(1);
        let (service, mut puppet) = narrow(&layer);
        let sent = go(&service, "k");
        puppet.next().await.panics("as the test wants");
        assert_eq!(sent.await.unwrap().status, 500);
        let asks = go(&service, "k");
        let question = provider.next().await;
        let other = go(&service, "other");
        let run = puppet.next().await;
        // Its client leaves while another one has the only place: freed, and nothing runs for it.
        asks.abort();
        question.answer(Verdict::DidNotHappen);
        comes_to(&store, "k", None).await;
        run.answers(201, "other");
        assert_eq!(other.await.unwrap().status, 201);
        let again = go(&service, "k");
        puppet.next().await.answers(201, "again");
        let again = again.await.unwrap();
        assert_eq!((again.status, again.replay), (StatusCode::CREATED, false));
        assert_eq!(puppet.begun(), 3);
        timeout(Duration::from_secs(5), layer.drain(Duration::from_secs(3))).await.unwrap();
    }
}

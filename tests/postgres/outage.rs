//! A server that is stopped, killed and started again.

use std::time::{Duration, Instant};

use axum::Router;
use sqlx::{PgPool, postgres::PgConnectOptions};
use tokio::{
    task::{JoinHandle, JoinSet},
    time::{sleep, timeout},
};
use tower_idempotency::{
    IdempotencyLayer, PostgresStore, State, StoreFailure,
    store::{Claim, ClaimRequest, Settled, Store, StoreErrorKind, Ticket},
};

use super::common::*;
use crate::support::{Answer, Handler, post, send, server::Server};

const OPERATION_TIMEOUT: Duration = Duration::from_secs(2);

/// How long a store may take to find out that its server is back.
const BACK_WITHIN: Duration = Duration::from_secs(3);

const AT_ONCE: Duration = Duration::from_millis(500);

fn pool_of(server: &Server) -> PgPool {
    let options: PgConnectOptions = server.url().parse().unwrap();
    pool(options, 4)
}

async fn open_on(server: &Server) -> PostgresStore {
    let options = PostgresStore::options()
        .migrate()
        .operation_timeout(OPERATION_TIMEOUT);
    options.open(pool_of(server)).await.unwrap()
}

/// How a server goes down.
#[derive(Debug, Clone, Copy)]
enum End {
    Stop,
    Kill,
}

impl End {
    async fn of(self, server: &mut Server) {
        match self {
            Self::Stop => server.stop_immediately().await,
            Self::Kill => server.kill().await,
        }
    }
}

async fn an_outage_ends_by_itself(end: End) {
    let mut server = Server::start().await;
    let store = open_on(&server).await;
    let running = win(&store, &request("running")).await;
    let finished = win(&store, &request("finished")).await;
    done(store.complete(&finished, created(), lifetimes()).await);

    end.of(&mut server).await;
    let (claim, took) = timed(store.claim(request("new"))).await;
    failed(claim, StoreErrorKind::Unavailable);
    assert!(
        took < OPERATION_TIMEOUT + Duration::from_millis(500),
        "{end:?}: it took {took:?}"
    );
    // Nobody waits any more, whatever is asked.
    let (all, took) = timed(async {
        tokio::join!(
            store.claim(request("new")),
            store.complete(&running, created(), lifetimes()),
            store.release(&running, DAY),
            store.abandon(&running),
            store.renew(std::slice::from_ref(&running), LONG),
            store.purge(10),
        )
    })
    .await;
    failed(all.0, StoreErrorKind::Unavailable);
    failed(all.1, StoreErrorKind::Unavailable);
    failed(all.2, StoreErrorKind::Unavailable);
    failed(all.3, StoreErrorKind::Unavailable);
    failed(all.4, StoreErrorKind::Unavailable);
    failed(all.5, StoreErrorKind::Unavailable);
    assert!(took < AT_ONCE, "{end:?}: it took {took:?}");

    server.start_again().await;
    let begun = Instant::now();
    loop {
        match store.claim(request("new")).await {
            Ok(claim) => break drop(won(Ok(claim))),
            Err(error) => assert_eq!(error.kind(), StoreErrorKind::Unavailable),
        }
        assert!(
            begun.elapsed() < BACK_WITHIN,
            "{end:?}: it does not come back"
        );
        sleep(Duration::from_millis(5)).await;
    }
    // What was acknowledged before is still so, and goes on.
    assert_eq!(
        completed(store.claim(request("finished")).await).response,
        created().response
    );
    in_flight(store.claim(request("running")).await);
    assert_eq!(
        store
            .renew(std::slice::from_ref(&running), LONG)
            .await
            .unwrap(),
        [Settled::Done]
    );
    done(store.complete(&running, created(), lifetimes()).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_is_stopped_and_started_again_is_found_again() {
    an_outage_ends_by_itself(End::Stop).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_is_killed_and_started_again_is_found_again() {
    an_outage_ends_by_itself(End::Kill).await;
}

/// Nobody asked while it was down; all of the pool's connections died in the meantime.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_between_two_requests_is_noticed_by_nobody() {
    let mut server = Server::start().await;
    let shared = pool_of(&server);
    let store = PostgresStore::options()
        .migrate()
        .open(shared.clone())
        .await
        .unwrap();
    for end in [End::Stop, End::Kill] {
        let mut connections = Vec::new();
        for _ in 0..4 {
            connections.push(shared.acquire().await.unwrap());
        }
        drop(connections);
        let ticket = win(&store, &request(&format!("before-{end:?}"))).await;
        end.of(&mut server).await;
        server.start_again().await;
        let settled = store.complete(&ticket, created(), lifetimes());
        let claims = together((0..20).map(|n| store.claim(request(&format!("after-{end:?}-{n}")))));
        let (settled, claims) = tokio::join!(settled, claims);
        done(settled);
        claims.into_iter().map(won).for_each(drop);
    }
}

/// What a worker was told before the crash: of the claim, and of its completion.
#[derive(Default)]
struct Told {
    won: Vec<(ClaimRequest, Ticket)>,
    completed: Vec<Ticket>,
    /// Nobody knows what became of these.
    unknown: Vec<ClaimRequest>,
}

/// Claims and completes until the server is gone.
fn work(store: &PostgresStore, worker: usize) -> JoinHandle<Told> {
    let store = store.clone();
    tokio::spawn(async move {
        let mut told = Told::default();
        for n in 0.. {
            let request = request(&format!("k-{worker}-{n}"));
            let ticket = match store.claim(request.clone()).await {
                Ok(Claim::Won(ticket)) => ticket,
                Ok(other) => panic!("{other:?}"),
                Err(_) => {
                    told.unknown.push(request);
                    break;
                }
            };
            if n % 2 == 0 {
                match store.complete(&ticket, created(), lifetimes()).await {
                    Ok(Settled::Done) => told.completed.push(ticket),
                    Ok(Settled::Lost) => panic!("a completion is lost"),
                    Err(_) => {
                        told.won.push((request, ticket));
                        break;
                    }
                }
            } else {
                told.won.push((request, ticket));
            }
        }
        told
    })
}

// L11, C3
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_acknowledged_before_the_server_was_killed_is_there_afterwards() {
    let mut server = Server::start().await;
    let store = open_on(&server).await;
    for crash in 0..2 {
        let workers: Vec<_> = (0..24).map(|n| work(&store, crash * 100 + n)).collect();
        sleep(Duration::from_millis(200)).await;
        server.kill().await;
        let (mut won_before, mut completed_before, mut unknown) = (vec![], vec![], vec![]);
        for worker in workers {
            let told = timeout(Duration::from_secs(10), worker).await;
            let told = told.expect("a worker hangs").unwrap();
            won_before.extend(told.won);
            completed_before.extend(told.completed);
            unknown.extend(told.unknown);
        }
        let numbers = (completed_before.len(), won_before.len());
        assert!(numbers.0 > 10 && numbers.1 > 10, "only {numbers:?}");
        server.start_again().await;
        let ready = async {
            while store.claim(request("ready")).await.is_err() {
                sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(BACK_WITHIN, ready)
            .await
            .expect("it does not come back");

        for tickets in completed_before.chunks(200) {
            let ask = |ticket: &Ticket| {
                let mut ask = request("");
                ask.id = ticket.id.clone();
                ask
            };
            let found = together(tickets.iter().map(|ticket| store.claim(ask(ticket)))).await;
            for (ticket, claim) in tickets.iter().zip(found) {
                let record = completed(claim);
                assert_eq!((record.token, record.attempt), (ticket.token, 1));
            }
        }
        for claims in won_before.chunks(200) {
            let again = claims
                .iter()
                .map(|(request, _)| store.claim(request.clone()));
            for ((_, ticket), claim) in claims.iter().zip(together(again).await) {
                match claim.unwrap() {
                    Claim::Won(again) => assert_eq!(again, *ticket),
                    // Its completion was not acknowledged, and took place.
                    Claim::Completed(record) => assert_eq!(record.token, ticket.token),
                    other => panic!("{other:?}"),
                }
            }
            let completions = claims.iter().map(|(_, ticket)| ticket);
            let completions =
                completions.map(|ticket| store.complete(ticket, created(), lifetimes()));
            together(completions).await.into_iter().for_each(done);
        }
        for request in unknown {
            assert_eq!(won(store.claim(request).await).attempt, 1);
        }
    }
}

fn layer(store: &PostgresStore) -> IdempotencyLayer<PostgresStore> {
    let layer = IdempotencyLayer::new(store.clone()).single_tenant();
    layer.store_timeout(Duration::from_secs(1))
}

const UNAVAILABLE: &str = "idempotency_store_unavailable";

/// Sends it until the answer is another than that the store is down.
async fn send_when_back(app: &Router, key: &str) -> Answer {
    let answer = async {
        loop {
            let answer = send(app, post(key, "A")).await;
            if answer.code() != UNAVAILABLE {
                return answer;
            }
            sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(BACK_WITHIN, answer)
        .await
        .expect("the layer does not recover")
}

// O1
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_the_server_is_down_requests_get_503_and_do_not_run() {
    let mut server = Server::start().await;
    let handler = Handler::new();
    let app = handler.behind(layer(&open_on(&server).await));
    let before = send(&app, post("before", "A")).await;
    assert_eq!((before.status.as_u16(), handler.effects()), (201, 1));
    for end in [End::Stop, End::Kill] {
        let effects = handler.effects();
        end.of(&mut server).await;
        for key in ["before", "during", "during"] {
            let refused = send(&app, post(key, "A")).await;
            assert_eq!(refused.said(), (503, UNAVAILABLE.to_owned()), "{end:?}");
            let retry_after = refused.header("retry-after").expect("no Retry-After");
            assert!(retry_after.parse::<u32>().unwrap() >= 1);
        }
        // Who sends no key is not concerned.
        let keyless = send(&app, crate::support::request("GET", "/charges", None, "")).await;
        assert_eq!(
            (keyless.status.as_u16(), handler.effects()),
            (201, effects + 1)
        );

        server.start_again().await;
        let key = format!("after-{end:?}");
        let after = send_when_back(&app, &key).await;
        assert_eq!(
            (after.status.as_u16(), handler.effects()),
            (201, effects + 2)
        );
        send(&app, post(&key, "A")).await.assert_replays(&after);
        send(&app, post("before", "A"))
            .await
            .assert_replays(&before);
        assert_eq!(handler.effects(), effects + 2);
    }
    // What was refused while it was down was never claimed.
    assert_eq!(send(&app, post("during", "A")).await.status, 201);
}

// O1
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_the_server_is_down_requests_run_unprotected_where_that_is_chosen() {
    let mut server = Server::start().await;
    let handler = Handler::new();
    let layer = layer(&open_on(&server).await).store_failure(StoreFailure::RunUnprotected);
    let app = handler.behind(layer);
    server.stop_immediately().await;
    let answer = send(&app, post("k", "A")).await;
    assert_eq!(answer.header("idempotency-status"), Some("unprotected"));
    assert_eq!((answer.status.as_u16(), handler.effects()), (201, 1));
}

// O2
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_that_ends_while_the_server_is_down_is_recorded_once_it_is_back() {
    for end in [End::Stop, End::Kill] {
        let mut server = Server::start().await;
        let handler = Handler::new();
        let app = handler.behind(layer(&open_on(&server).await));
        handler.close_gate();
        let sent = {
            let app = app.clone();
            tokio::spawn(async move { send(&app, post("k", "A")).await })
        };
        handler.reached(1).await;
        end.of(&mut server).await;
        handler.open_gate();
        // The client hears what is true.
        let first = timeout(Duration::from_secs(5), sent).await;
        let first = first.expect("the client waits for the server").unwrap();
        assert_eq!(
            (first.status.as_u16(), &first.body[..]),
            (201, &b"{\"charge\":1}"[..])
        );
        assert_eq!(send(&app, post("k", "A")).await.status, 503, "{end:?}");

        server.start_again().await;
        let observer = open_on(&server).await;
        let recorded = async {
            while get(&observer, "k")
                .await
                .is_none_or(|record| record.state != State::Completed)
            {
                sleep(Duration::from_millis(10)).await;
            }
        };
        timeout(Duration::from_secs(10), recorded)
            .await
            .expect("it is never recorded");
        send_when_back(&app, "k").await.assert_replays(&first);
        assert_eq!(handler.effects(), 1, "{end:?}");
        // To another process too.
        let other = handler.behind(layer(&observer));
        send(&other, post("k", "A")).await.assert_replays(&first);
        assert_eq!(handler.effects(), 1, "{end:?}");
    }
}

// O3, C2: many requests, many restarts; nothing ever runs twice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn retries_through_restarts_run_each_key_once() {
    let mut server = Server::start().await;
    let handler = Handler::new();
    let app = handler.behind(layer(&open_on(&server).await));
    let mut clients = JoinSet::new();
    for n in 0..60 {
        let app = app.clone();
        clients.spawn(async move {
            sleep(Duration::from_millis(25 * n)).await;
            let key = format!("k-{n}");
            // Two clients that believe to be the only one.
            let (one, other) = tokio::join!(persist(&app, &key), persist(&app, &key));
            assert_eq!((one.status.as_u16(), other.status.as_u16()), (201, 201));
            assert_eq!(one.body, other.body);
        });
    }
    for end in [End::Stop, End::Kill] {
        sleep(Duration::from_millis(400)).await;
        end.of(&mut server).await;
        sleep(Duration::from_millis(200)).await;
        server.start_again().await;
    }
    let all = timeout(Duration::from_secs(30), clients.join_all()).await;
    all.expect("a client never gets its answer");
    assert_eq!(handler.effects(), 60);
}

/// Retries until the answer is final, as a client does.
async fn persist(app: &Router, key: &str) -> Answer {
    loop {
        let answer = send(app, post(key, "A")).await;
        if ![409, 503].contains(&answer.status.as_u16()) {
            return answer;
        }
        sleep(Duration::from_millis(20)).await;
    }
}

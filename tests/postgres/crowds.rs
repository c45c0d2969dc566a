//! More than one statement takes, and many who want the same.

use std::{sync::Arc, time::Duration};

use tokio::{
    task::JoinSet,
    time::{sleep, timeout},
};
use tower_idempotency::{
    State, Token,
    store::{Claim, Inspect, Settled, Store, StoreError, Ticket},
};

use super::common::*;
use crate::support::database::Database;

/// Every claim of a crowd on one key, sorted: who won, and who was told of whom.
pub struct Crowd {
    winners: Vec<Ticket>,
    told: Vec<Token>,
}

impl Crowd {
    pub fn of(claims: impl IntoIterator<Item = Result<Claim, StoreError>>) -> Self {
        let (mut winners, mut told) = (Vec::new(), Vec::new());
        for claim in claims {
            match claim.unwrap() {
                Claim::Won(ticket) => winners.push(ticket),
                Claim::InFlight(held) => told.push(held.token),
                other => panic!("{other:?}"),
            }
        }
        Self { winners, told }
    }

    #[track_caller]
    pub fn assert_one_of(&self, all: usize) -> &Ticket {
        assert_eq!((self.winners.len(), self.told.len()), (1, all - 1));
        assert!(
            self.told
                .iter()
                .all(|token| *token == self.winners[0].token)
        );
        &self.winners[0]
    }
}

// G2
#[tokio::test]
async fn a_thousand_claims_on_one_key_are_answered_from_one() {
    let database = Database::in_real_time();
    let (proxy, through) = proxied(&database).await;
    let store = open(pool(through, 4)).await;
    let (batches, executed) = (store.grouping().batches, proxy.forwarded(b'E'));
    let claims = (0..1_000).map(|_| store.claim(request("k")));
    let crowd = Crowd::of(together(claims).await);
    crowd.assert_one_of(1_000);
    let batches = store.grouping().batches - batches;
    let executed = proxy.forwarded(b'E') - executed;
    assert!(
        batches <= 10 && executed <= 10,
        "{batches} batches, {executed} statements"
    );
    assert_eq!(store.grouping().operations, 1_000);
}

// G2: what they find does not matter.
#[tokio::test]
async fn a_thousand_claims_on_a_completed_or_abandoned_key_share_one_look() {
    let database = Database::in_real_time();
    let (proxy, through) = proxied(&database).await;
    let store = open(pool(through, 4)).await;
    let ticket = win(&store, &request("done")).await;
    done(store.complete(&ticket, created(), lifetimes()).await);
    let gone = win(&store, &request("gone")).await;
    done(store.abandon(&gone).await);
    let executed = proxy.forwarded(b'E');
    for claim in together((0..1_000).map(|_| store.claim(request("done")))).await {
        assert_eq!(completed(claim).response, created().response);
    }
    for claim in together((0..1_000).map(|_| store.claim(request("gone")))).await {
        assert_eq!(abandoned(claim).token, gone.token);
    }
    let takers = together((0..1_000).map(|_| store.claim(replacing("gone", gone.token)))).await;
    assert_eq!(Crowd::of(takers).assert_one_of(1_000).attempt, 2);
    let executed = proxy.forwarded(b'E') - executed;
    assert!(executed <= 20, "{executed} statements");
}

// C1, G2
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_claims_on_one_key_from_four_instances_have_one_winner() {
    let database = Database::in_real_time();
    let mut stores = Vec::new();
    for _ in 0..4 {
        stores.push(open(database.pool()).await);
    }
    for round in 0..20 {
        let mut claims = JoinSet::new();
        for n in 0..1_000 {
            let store = stores[n % 4].clone();
            let key = format!("k-{round}");
            claims.spawn(async move { store.claim(request(&key)).await });
        }
        Crowd::of(claims.join_all().await).assert_one_of(1_000);
    }
    let statements: u64 = stores.iter().map(|store| store.grouping().batches).sum();
    assert!(
        statements < 20 * 1_000 / 4,
        "{statements} statements for {} claims",
        20 * 1_000
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pool_of_one_serves_claims_completions_and_everything_else() {
    let database = Database::in_real_time();
    let only = pool(database.options(), 1);
    let store = open(only).await;
    let mut tasks = JoinSet::new();
    for n in 0..100 {
        let store = store.clone();
        tasks.spawn(async move {
            let key = format!("k-{n}");
            let ticket = win(&store, &request(&key)).await;
            assert_eq!(
                store
                    .renew(std::slice::from_ref(&ticket), LONG)
                    .await
                    .unwrap(),
                [Settled::Done]
            );
            assert_eq!(get(&store, &key).await.unwrap().state, State::Running);
            done(store.complete(&ticket, created(), lifetimes()).await);
            assert_eq!(store.purge(10).await.unwrap(), 0);
        });
    }
    let all = timeout(Duration::from_secs(30), tasks.join_all()).await;
    all.expect("the store waits for itself");
}

/// More than a statement takes, all of whose keys come before `z` in the order of the statement, and
/// that are back in the queue as soon as they are answered.
const CROWD: usize = 700;

/// Answers how long the last of all had to wait while the crowd went on.
async fn beside_a_crowd<F, L>(
    asks: impl Fn(usize) -> F + Clone + Send + 'static,
    last: impl FnOnce() -> L,
) -> Duration
where
    F: Future<Output = ()> + Send,
    L: Future<Output = ()>,
{
    let mut crowd = JoinSet::new();
    for n in 0..CROWD {
        let asks = asks.clone();
        crowd.spawn(async move {
            loop {
                asks(n).await;
            }
        });
    }
    sleep(Duration::from_millis(300)).await;
    let ((), took) = timed(last()).await;
    assert!(crowd.try_join_next().is_none(), "the crowd has gone");
    took
}

// G3: batches are sorted, and that must not mean that the last come never.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crowd_of_claims_keeps_no_later_key_waiting() {
    let database = Database::in_real_time();
    let store = open(database.pool()).await;
    let asking = store.clone();
    let asks = move |n| {
        let store = asking.clone();
        async move { drop(store.claim(request(&format!("a-{n}"))).await.unwrap()) }
    };
    let last = || async { drop(win(&store, &request("z")).await) };
    let took = beside_a_crowd(asks, last).await;
    assert!(took < Duration::from_millis(500), "it waited {took:?}");
}

// G3
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crowd_of_completions_keeps_no_later_key_waiting() {
    let database = Database::in_real_time();
    let store = open(database.pool()).await;
    let tickets = Arc::new(win_all(&store, &keys("a", CROWD)).await);
    let ticket = win(&store, &request("z")).await;
    let asking = store.clone();
    let asks = move |n: usize| {
        let (store, tickets) = (asking.clone(), tickets.clone());
        async move { done(store.complete(&tickets[n], created(), lifetimes()).await) }
    };
    let last = || async { done(store.complete(&ticket, created(), lifetimes()).await) };
    let took = beside_a_crowd(asks, last).await;
    assert!(took < Duration::from_millis(500), "it waited {took:?}");
}

// G3
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crowd_of_releases_keeps_no_later_key_waiting() {
    let database = Database::in_real_time();
    let store = open(database.pool()).await;
    let ticket = win(&store, &request("z")).await;
    let asking = store.clone();
    let asks = move |n| {
        let store = asking.clone();
        async move {
            lost(
                store
                    .release(&request(&format!("a-{n}")).ticket(1), DAY)
                    .await,
            )
        }
    };
    let last = || async { done(store.release(&ticket, DAY).await) };
    let took = beside_a_crowd(asks, last).await;
    assert!(took < Duration::from_millis(500), "it waited {took:?}");
}

// G3: the kinds of operations share queues.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crowd_of_one_kind_keeps_no_other_kind_waiting() {
    let database = Database::in_real_time();
    let store = open(database.pool()).await;
    let given = win(&store, &request("given")).await;
    let forgotten = win(&store, &request("forgotten")).await;
    let renewed = win(&store, &request("renewed")).await;
    let late = win(&store, &request("late")).await;
    done(store.abandon(&late).await);
    let tickets = Arc::new(win_all(&store, &keys("a", CROWD)).await);
    let asking = store.clone();
    let asks = move |n: usize| {
        let (store, tickets) = (asking.clone(), tickets.clone());
        async move {
            let claim = store.claim(request(&format!("b-{n}")));
            let completion = store.complete(&tickets[n], created(), lifetimes());
            let (claim, settled) = tokio::join!(claim, completion);
            drop(claim.unwrap());
            done(settled);
        }
    };
    let last = || async {
        done(store.release(&given, DAY).await);
        assert!(store.forget(&forgotten.id).await.unwrap());
        let taken = store.take_over(&late.id, late.token, Token::random(), LONG);
        assert!(taken.await.unwrap().is_some());
        let renewal = store.renew(std::slice::from_ref(&renewed), LONG);
        assert_eq!(renewal.await.unwrap(), [Settled::Done]);
    };
    let took = beside_a_crowd(asks, last).await;
    assert!(took < Duration::from_secs(1), "they waited {took:?}");
}

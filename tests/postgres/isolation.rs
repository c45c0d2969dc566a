//! Databases that are told to run at another isolation level than read committed.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use sqlx::{ConnectOptions, PgPool, postgres::PgPoolOptions};
use tokio::{
    sync::Barrier,
    task::{JoinHandle, JoinSet},
    time::timeout,
};
use tower_idempotency::{
    PostgresStore, State, Token,
    store::{Claim, Lifetimes, Store, Ticket},
};

use super::common::*;
use crate::support::database::Database;

const TASKS: usize = 16;
const KEYS: usize = 4;
const ROUNDS: usize = 12;

fn pool_at(database: &Database, level: &str) -> PgPool {
    pool(
        database
            .options()
            .options([("default_transaction_isolation", level)]),
        4,
    )
}

/// All at once, from both instances: every task asks for every key. Gives back the winner of each.
async fn race(stores: &[PostgresStore], round: usize, replaces: &[Option<Token>]) -> Vec<Ticket> {
    let barrier = Arc::new(Barrier::new(TASKS));
    let mut tasks = JoinSet::new();
    for n in 0..TASKS {
        let (store, barrier) = (stores[n % stores.len()].clone(), barrier.clone());
        let claims: Vec<_> = (0..KEYS)
            .map(|k| (k + n) % KEYS)
            .map(|key| {
                let mut request = request(&format!("k-{round}-{key}"));
                request.replaces = replaces[key];
                request
            })
            .collect();
        tasks.spawn(async move {
            barrier.wait().await;
            together(claims.into_iter().map(|claim| store.claim(claim))).await
        });
    }
    let mut winners = Vec::new();
    for claim in tasks.join_all().await.into_iter().flatten() {
        match claim.unwrap() {
            Claim::Won(ticket) => winners.push(ticket),
            Claim::InFlight(_) => {}
            other => panic!("{other:?}"),
        }
    }
    winners.sort_by(|a, b| a.id.cmp(&b.id));
    let won: Vec<_> = winners.iter().map(|ticket| ticket.id.clone()).collect();
    let expected: Vec<_> = (0..KEYS)
        .map(|key| id(&format!("k-{round}-{key}")))
        .collect();
    assert_eq!(won, expected, "not one winner per key");
    winners
}

/// Somebody who never stops reading, writing and cleaning in the same tables.
fn disturb(store: &PostgresStore) -> JoinHandle<()> {
    let store = store.clone();
    tokio::spawn(async move {
        for n in 0.. {
            let key = format!("disturbing-{}", n % 7);
            if let Claim::Won(ticket) = store.claim(request(&key)).await.unwrap() {
                assert_eq!(
                    store
                        .renew(std::slice::from_ref(&ticket), LONG)
                        .await
                        .unwrap()
                        .len(),
                    1
                );
                let short = Lifetimes::new(Duration::from_millis(1));
                done(store.complete(&ticket, created(), short).await);
            }
            store.purge(100).await.unwrap();
        }
    })
}

async fn no_conflict_surfaces(stores: Vec<PostgresStore>) {
    let disturbing = disturb(&stores[0]);
    for round in 0..ROUNDS {
        let first = race(&stores, round, &[None; KEYS]).await;
        assert!(first.iter().all(|ticket| ticket.attempt == 1));
        let abandons = first
            .iter()
            .enumerate()
            .map(|(n, old)| stores[n % 2].abandon(old));
        together(abandons).await.into_iter().for_each(done);

        let old: Vec<_> = first.iter().map(|ticket| Some(ticket.token)).collect();
        let second = race(&stores, round, &old).await;
        assert!(second.iter().all(|ticket| ticket.attempt == 2));
        let releases = second
            .iter()
            .enumerate()
            .map(|(n, old)| stores[n % 2].release(old, DAY));
        together(releases).await.into_iter().for_each(done);

        let third = race(&stores, round, &[None; KEYS]).await;
        assert!(third.iter().all(|ticket| ticket.attempt == 1));
        // Whoever lost it completes at the same time, in vain.
        let late = first
            .iter()
            .map(|old| stores[0].complete(old, created(), lifetimes()));
        let completions = third.iter().enumerate();
        let completions =
            completions.map(|(n, ticket)| stores[n % 2].complete(ticket, created(), lifetimes()));
        let (late, completions) = tokio::join!(together(late), together(completions));
        late.into_iter().for_each(lost);
        completions.into_iter().for_each(done);
        for ticket in &third {
            let key = String::from_utf8_lossy(ticket.id.key.as_bytes()).into_owned();
            let record = get(&stores[round % 2], &key).await.unwrap();
            assert_eq!(
                (record.state, record.token),
                (State::Completed, ticket.token)
            );
        }
    }
    assert!(!disturbing.is_finished(), "{:?}", disturbing.await);
    disturbing.abort();
}

async fn no_conflict_surfaces_at(level: &str) {
    let database = Database::in_real_time();
    let pools = [pool_at(&database, level), pool_at(&database, level)];
    for pool in &pools {
        let mut connection = pool.acquire().await.unwrap();
        let default: String = value(&mut connection, "SHOW default_transaction_isolation").await;
        assert_eq!(default, level);
    }
    let [one, other] = pools;
    let stores = vec![open(one).await, open(other).await];
    let all = timeout(Duration::from_secs(60), no_conflict_surfaces(stores)).await;
    all.expect("it hangs");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn at_read_committed_no_conflict_surfaces_and_one_claim_wins() {
    no_conflict_surfaces_at("read committed").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn at_repeatable_read_no_conflict_surfaces_and_one_claim_wins() {
    no_conflict_surfaces_at("repeatable read").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn at_serializable_no_conflict_surfaces_and_one_claim_wins() {
    no_conflict_surfaces_at("serializable").await;
}

/// An operator changes the default of the database while services run: connections that are made from
/// then on have it, and the store, which looked when it was opened, does not know.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_level_that_changes_while_the_store_is_open_surfaces_no_conflict() {
    let database = Database::in_real_time();
    let mut stores = Vec::new();
    let mut connected = Vec::new();
    for _ in 0..2 {
        let connections = Arc::new(AtomicUsize::new(0));
        connected.push(connections.clone());
        let pool = PgPoolOptions::new()
            .max_connections(4)
            .after_connect(move |connection, _| {
                let is_first = connections.fetch_add(1, Ordering::SeqCst) == 0;
                Box::pin(async move {
                    let level = if is_first {
                        "read committed"
                    } else {
                        "serializable"
                    };
                    let set = format!("SET default_transaction_isolation = '{level}'");
                    sql(connection, &set).await;
                    Ok(())
                })
            })
            .connect_lazy_with(database.options().disable_statement_logging());
        stores.push(open(pool.clone()).await);
        // The only one that read committed is gone.
        pool.acquire().await.unwrap().close().await.unwrap();
    }
    let all = timeout(Duration::from_secs(60), no_conflict_surfaces(stores)).await;
    all.expect("it hangs");
    assert!(
        connected
            .iter()
            .all(|connections| connections.load(Ordering::SeqCst) > 1)
    );
}

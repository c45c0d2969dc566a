//! Several instances at the same keys at one time, each in its own order.

use std::{collections::HashMap, sync::Arc, time::Duration};

use rand::seq::SliceRandom;
use tokio::{task::JoinSet, time::timeout};
use tower_idempotency::{
    PostgresStore, State, Token,
    store::{Claim, Inspect, Lifetimes, Settled, Store, StoreError, Ticket},
};

use super::{common::*, crowds::Crowd};
use crate::support::server::Server;

fn shuffled(keys: &[String]) -> Vec<String> {
    let mut keys = keys.to_vec();
    keys.shuffle(&mut rand::rng());
    keys
}

/// Eight sessions, two on each of four instances, all in another order, do the same to every key. Gives
/// back what they got, by key.
async fn by_eight<T, F>(
    stores: &[PostgresStore],
    keys: &[String],
    does: impl Fn(PostgresStore, String) -> F + Clone + Send + Sync + 'static,
) -> HashMap<String, Vec<T>>
where
    T: Send + 'static,
    F: Future<Output = T> + Send,
{
    let mut sessions = JoinSet::new();
    for n in 0..8 {
        let (store, keys) = (stores[n % stores.len()].clone(), shuffled(keys));
        let does = does.clone();
        sessions.spawn(async move {
            let answers = together(keys.iter().map(|key| does(store.clone(), key.clone()))).await;
            keys.into_iter().zip(answers).collect::<Vec<_>>()
        });
    }
    let mut by_key: HashMap<String, Vec<T>> = HashMap::new();
    for (key, answer) in sessions.join_all().await.into_iter().flatten() {
        by_key.entry(key).or_default().push(answer);
    }
    by_key
}

/// Each of these tickets is settled by one of the sessions, in another order by each.
async fn settle_shuffled<F>(
    stores: &[PostgresStore],
    tickets: &[Ticket],
    settle: impl Fn(PostgresStore, Ticket) -> F + Clone + Send + Sync + 'static,
) where
    F: Future<Output = Result<Settled, StoreError>> + Send,
{
    let mut tickets = tickets.to_vec();
    tickets.shuffle(&mut rand::rng());
    let mut sessions = JoinSet::new();
    for (n, part) in tickets.chunks(tickets.len().div_ceil(8)).enumerate() {
        let (store, part, settle) = (
            stores[n % stores.len()].clone(),
            part.to_vec(),
            settle.clone(),
        );
        sessions.spawn(async move {
            together(part.into_iter().map(|ticket| settle(store.clone(), ticket))).await
        });
    }
    sessions
        .join_all()
        .await
        .into_iter()
        .flatten()
        .for_each(done);
}

fn tokens(tickets: &[Ticket]) -> Arc<HashMap<String, Token>> {
    let token = |ticket: &Ticket| {
        let key = String::from_utf8_lossy(ticket.id.key.as_bytes()).into_owned();
        (key, ticket.token)
    };
    Arc::new(tickets.iter().map(token).collect())
}

/// The one who won each key. Everybody else was told that it is in flight.
fn winners(claims: HashMap<String, Vec<Result<Claim, StoreError>>>) -> Vec<Ticket> {
    let winner = |(_, claims)| Crowd::of(claims).assert_one_of(8).clone();
    claims.into_iter().map(winner).collect()
}

/// Every batch finds the same keys in another order, and so do the batches of others: at the same
/// moment they insert, take over, complete and release them.
// G3
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batches_over_the_same_keys_in_different_orders_never_deadlock() {
    let server = Server::start().await;
    let mut stores = Vec::new();
    for _ in 0..4 {
        let store = PostgresStore::options()
            .migrate()
            .connect(&server.url())
            .await;
        stores.push(store.unwrap());
    }
    for round in 0..8 {
        let keys = keys(&format!("r{round}"), 60);
        let claims = by_eight(&stores, &keys, async |store, key| {
            store.claim(request(&key)).await
        });
        let first = winners(claims.await);
        settle_shuffled(&stores, &first, async |store, ticket| {
            store.abandon(&ticket).await
        })
        .await;

        let old = tokens(&first);
        let take = move |store: PostgresStore, key: String| {
            let request = replacing(&key, old[&key]);
            async move { store.claim(request).await }
        };
        let second = winners(by_eight(&stores, &keys, take).await);
        assert_eq!(second.len(), 60);
        assert!(second.iter().all(|ticket| ticket.attempt == 2));

        let (complete, release) = second.split_at(30);
        let completing = settle_shuffled(&stores, complete, async |store, ticket| {
            store.complete(&ticket, created(), lifetimes()).await
        });
        let releasing = settle_shuffled(&stores, release, async |store, ticket| {
            store.release(&ticket, DAY).await
        });
        // Whoever lost before, completes in vain.
        let late = together(
            first
                .iter()
                .map(|ticket| stores[0].complete(ticket, created(), lifetimes())),
        );
        let asking = by_eight(&stores, &keys, async |store, key| {
            store.claim(request(&key)).await
        });
        let ((), (), late, asked) = tokio::join!(completing, releasing, late, asking);
        late.into_iter().for_each(lost);
        let mut again = Vec::new();
        for claim in asked.into_values().flatten() {
            if let Claim::Won(ticket) = claim.unwrap() {
                again.push(ticket);
            }
        }
        // Only released keys can have been won, and each of them once.
        again.sort_by(|a, b| a.id.cmp(&b.id));
        assert!(again.windows(2).all(|two| two[0].id != two[1].id));
        assert!(
            again
                .iter()
                .all(|won| won.attempt == 1 && release.iter().any(|old| old.id == won.id))
        );
        for ticket in complete {
            let record = stores[round % 4].get(&ticket.id).await.unwrap().unwrap();
            assert_eq!(
                (record.state, record.token),
                (State::Completed, ticket.token)
            );
        }
    }
    assert_no_trouble(&server, &stores).await;
}

/// The same without order: at any moment anything is asked of any key.
// G3
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_muddle_of_all_operations_over_the_same_keys_never_deadlocks() {
    let server = Server::start().await;
    let mut stores = Vec::new();
    for _ in 0..4 {
        let store = PostgresStore::options()
            .migrate()
            .connect(&server.url())
            .await;
        stores.push(store.unwrap());
    }
    let mut tasks = JoinSet::new();
    for n in 0..32 {
        let store = stores[n % 4].clone();
        tasks.spawn(async move {
            let mut won = 0;
            for step in 0..100 {
                let key = format!("k-{}", rand::random_range(0..60));
                let claim = store.claim(request(&key)).await.unwrap();
                let ticket = match claim {
                    Claim::Won(ticket) => ticket,
                    Claim::Abandoned(held) if step % 2 == 0 => {
                        let (id, token) = (id(&key), Token::random());
                        match store.take_over(&id, held.token, token, LONG).await.unwrap() {
                            Some(ticket) => ticket,
                            None => continue,
                        }
                    }
                    Claim::Abandoned(held) => {
                        match store.claim(replacing(&key, held.token)).await.unwrap() {
                            Claim::Won(ticket) => ticket,
                            _ => continue,
                        }
                    }
                    // What is done is over at once, and taken over as expired.
                    Claim::InFlight(_) | Claim::Completed(_) => continue,
                    other => panic!("{other:?}"),
                };
                won += 1;
                let settled = match step % 3 {
                    0 => store.abandon(&ticket).await,
                    1 => store.release(&ticket, DAY).await,
                    _ => {
                        let short = Lifetimes::new(Duration::from_millis(1));
                        store.complete(&ticket, created(), short).await
                    }
                };
                done(settled);
                if step % 25 == 0 {
                    store.purge(10).await.unwrap();
                }
            }
            won
        });
    }
    let all = timeout(Duration::from_secs(60), tasks.join_all())
        .await
        .expect("it hangs");
    let won: usize = all.into_iter().sum();
    assert!(won > 32, "only {won} claims were won");
    assert_no_trouble(&server, &stores).await;
}

/// The server has refused nothing, so nothing was tried again either.
async fn assert_no_trouble(server: &Server, stores: &[PostgresStore]) {
    for store in stores {
        store.close().await.unwrap();
    }
    let mut connection = server.connect().await;
    // A backend tells at its end at the latest.
    let others = "SELECT count(*) = 0 FROM pg_stat_activity
        WHERE backend_type = 'client backend' AND pid <> pg_backend_pid() AND state = 'active'";
    becomes_true(&mut connection, others).await;
    let deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()";
    assert_eq!(value::<i64>(&mut connection, deadlocks).await, 0);
    let log = server.log();
    assert!(!log.contains("ERROR") && !log.contains("deadlock"), "{log}");
}

//! What the others get while a handler holds its transaction.

use std::time::{Duration, Instant};

use sqlx::{Postgres, postgres::PgPoolOptions};
use tokio::{
    task::JoinSet,
    time::{sleep, timeout},
};
use tower_idempotency::{InFlight, State, Tx, TxError};

use super::{ground::*, handlers::*};
use crate::{
    on_both,
    support::{Answer, post, send, wire},
};

const DONE: Option<State> = Some(State::Completed);
const HOLD: Duration = Duration::from_secs(2);

on_both! {
    // N5
    async fn duplicates_are_refused_at_once_while_the_transaction_is_held<D: Db>() {
        let ground = Ground::<D>::in_real_time().await;
        let (app, gate) = gated::<D>(ground.layer());
        let first = spawn(&app, post("k", "A"));
        gate.reached().await;
        let begun = Instant::now();
        let mut took = Vec::new();
        while begun.elapsed() < HOLD {
            let asked = Instant::now();
            assert_eq!(send(&app, post("k", "A")).await.said(), said(409, IN_FLIGHT));
            took.push(asked.elapsed());
            sleep(Duration::from_millis(20)).await;
        }
        took.sort();
        let (most, all) = (took[took.len() * 95 / 100], took.len());
        assert!(all > 20 && most < Duration::from_millis(100), "{most:?} of {all}");
        gate.open();
        let first = first.await.unwrap();
        assert_eq!((first.status.as_u16(), ground.left("k").await), (201, (1, DONE)));
        send(&app, post("k", "A")).await.assert_replays(&first);
    }

    // N5
    async fn other_keys_are_delayed_by_the_hold_at_most_and_on_postgres_not_at_all<D: Db>() {
        let ground = Ground::<D>::in_real_time().await;
        let (held, gate) = gated::<D>(ground.layer());
        let (free, _) = charging::<D>(ground.layer(), |_| created());
        let first = spawn(&held, post("k", "A"));
        gate.reached().await;
        let opening = tokio::spawn(async move {
            sleep(HOLD).await;
            gate.open();
        });
        let mut others = JoinSet::new();
        for n in 0..20 {
            let free = free.clone();
            others.spawn(async move {
                let asked = Instant::now();
                assert_eq!(send(&free, post(&format!("other-{n}"), "A")).await.status, 201);
                asked.elapsed()
            });
        }
        let slowest = others.join_all().await.into_iter().max().unwrap();
        let limit = if D::IS_POSTGRES { HOLD / 2 } else { HOLD * 2 };
        assert!(slowest < limit, "{slowest:?}");
        assert_eq!(opening.is_finished(), !D::IS_POSTGRES);
        assert_eq!(first.await.unwrap().status, 201);
    }

    // C1
    async fn of_many_at_once_from_two_instances_one_has_an_effect<D: Db>() {
        let ground = Ground::<D>::in_real_time().await;
        let (here, runs) = charging::<D>(ground.layer(), |_| created());
        let (there, others) = charging::<D>(ground.elsewhere().await, |_| created());
        for round in 0..10 {
            let key = format!("k-{round}");
            let mut all = JoinSet::new();
            for n in 0..16 {
                let (app, key) = ([&here, &there][n % 2].clone(), key.clone());
                all.spawn(async move { send(&app, post(&key, "A")).await });
            }
            let answers = all.join_all().await;
            let ran = |answer: &&Answer| answer.status == 201 && !answer.replay;
            assert_eq!(answers.iter().filter(ran).count(), 1, "{key}");
            for answer in &answers {
                assert!(answer.status == 201 || answer.said() == said(409, IN_FLIGHT));
            }
            assert_eq!(ground.left(&key).await, (1, DONE));
        }
        assert_eq!(runs.count() + others.count(), 10);
    }

    async fn a_duplicate_that_waits_gets_the_replay<D: Db>() {
        let ground = Ground::<D>::new().await;
        let layer = ground.layer().in_flight(InFlight::Wait(Duration::from_secs(20)));
        let (app, gate) = gated::<D>(layer);
        let first = spawn(&app, post("k", "A"));
        gate.reached().await;
        let waiting: Vec<_> = (0..5).map(|_| spawn(&app, post("k", "A"))).collect();
        sleep(Duration::from_millis(300)).await;
        assert!(waiting.iter().all(|waiting| !waiting.is_finished()));
        gate.open();
        let first = first.await.unwrap();
        assert_eq!((first.status.as_u16(), ground.left("k").await), (201, (1, DONE)));
        for waiting in waiting {
            waiting.await.unwrap().assert_replays(&first);
        }
    }

    async fn a_duplicate_that_waits_runs_when_the_first_one_declines<D: Db>() {
        let ground = Ground::<D>::new().await;
        let layer = ground.layer().in_flight(InFlight::Wait(Duration::from_secs(20)));
        let (runs, gate) = (Runs::default(), Gate::default());
        let (counted, passed) = (runs.clone(), gate.clone());
        let app = app(layer, move |Key(key): Key, mut tx: Tx<D>| async move {
            let run = counted.begin();
            charge(&mut tx, &key).await?;
            passed.pass().await;
            Ok::<_, TxError>(answer(if run == 1 { 402 } else { 201 }))
        });
        let first = spawn(&app, post("k", "A"));
        gate.reached().await;
        let second = spawn(&app, post("k", "A"));
        gate.open();
        assert_eq!(first.await.unwrap().status, 402);
        gate.reached().await;
        gate.open();
        let second = second.await.unwrap();
        assert_eq!((second.status.as_u16(), second.replay), (201, false));
        assert_eq!((ground.left("k").await, runs.count()), ((1, DONE), 2));
    }

    // D1
    async fn a_client_that_resets_does_not_stop_the_run<D: Db>() {
        let ground = Ground::<D>::new().await;
        let (app, gate) = gated::<D>(ground.layer());
        let server = wire::Server::start(app).await;
        let mut client = server.connect().await;
        client.write(&wire::raw_post("k", "A")).await;
        gate.reached().await;
        client.reset();
        // The server looks at the connection again only when something comes of the run.
        let other = server.exchange(&wire::raw_post("k", "A")).await;
        assert_eq!(other.said(), said(409, IN_FLIGHT));
        gate.open();
        ground.comes_to("k", (1, DONE)).await;
        let retry = server.exchange(&wire::raw_post("k", "A")).await;
        assert!(retry.is_replay() && retry.status == 201, "{retry:?}");
        assert_eq!(ground.effects("k").await, 1);
    }
}

/// Handlers and store share the pool, and a handler that holds one of its connections needs no other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pool_of_two_serves_ten_at_once() {
    let ground = Ground::<Postgres>::in_real_time().await;
    let pool = PgPoolOptions::new().max_connections(2);
    let pool = pool.connect_lazy_with(ground.place.database().options());
    let layer = transactional(&open_postgres(pool).await);
    let app = app(layer, async |Key(key): Key, mut tx: Tx<Postgres>| {
        charge(&mut tx, &key).await?;
        sleep(Duration::from_millis(50)).await;
        charge(&mut tx, &key).await?;
        Ok::<_, TxError>(created())
    });
    let mut all = JoinSet::new();
    for n in 0..10 {
        let app = app.clone();
        all.spawn(async move {
            send(&app, post(&format!("k-{n}"), "A"))
                .await
                .status
                .as_u16()
        });
    }
    let said = timeout(Duration::from_secs(20), all.join_all()).await;
    assert_eq!(said.expect("they wait for each other"), [201; 10]);
    assert_eq!(ground.value("SELECT count(*) FROM effects").await, 20);
}

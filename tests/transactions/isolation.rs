//! Postgres databases that run at another isolation level than read committed.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::Router;
use sqlx::{Postgres, postgres::PgPoolOptions};
use tokio::{task::JoinSet, time::sleep};
use tower_idempotency::{
    Idempotency, IdempotencyLayer, Isolation, PostgresStore, State, Tx, TxError, TxOptions,
};

use super::{ground::*, handlers::*};
use crate::support::{post, send};

const DONE: Option<State> = Some(State::Completed);
const NEIGHBOURS: usize = 8;

/// A layer whose connections begin every transaction at this level.
async fn layer_at(ground: &Ground<Postgres>, level: &str) -> IdempotencyLayer<PostgresStore> {
    let options = ground.place.database().options();
    let options = options.options([("default_transaction_isolation", level)]);
    let pool = PgPoolOptions::new().max_connections(12);
    let store = open_postgres(pool.connect_lazy_with(options)).await;
    transactional(&store)
}

/// Requests with keys of their own and nothing else in common, one after the other in each of eight
/// tasks, until told to stop.
struct Neighbours {
    stop: Arc<AtomicBool>,
    sent: Arc<AtomicUsize>,
    tasks: JoinSet<()>,
}

impl Neighbours {
    fn around(app: &Router) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let sent = Arc::new(AtomicUsize::new(0));
        let mut tasks = JoinSet::new();
        for n in 0..NEIGHBOURS {
            let (app, stop, sent) = (app.clone(), stop.clone(), sent.clone());
            tasks.spawn(async move {
                let mut next = 0;
                while !stop.load(Ordering::SeqCst) {
                    let answer = send(&app, post(&format!("neighbour-{n}-{next}"), "A")).await;
                    assert_eq!(answer.status, 201, "{answer:?}");
                    sent.fetch_add(1, Ordering::SeqCst);
                    next += 1;
                }
            });
        }
        Self { stop, sent, tasks }
    }

    /// How many requests they have sent in all.
    async fn stop(self) -> usize {
        self.stop.store(true, Ordering::SeqCst);
        self.tasks.join_all().await;
        self.sent.load(Ordering::SeqCst)
    }
}

/// One that touches nobody else's rows, and goes on for several heartbeats.
fn long(layer: IdempotencyLayer<PostgresStore>) -> (Router, Runs) {
    let runs = Runs::default();
    let counted = runs.clone();
    let handler = move |key: Key, idempotency: Idempotency, mut tx: Tx<Postgres>| async move {
        let Key(key) = key;
        counted.begin();
        for _ in 0..10 {
            charge(&mut tx, &key).await?;
            idempotency.ensure_owned().await.expect("it is owned");
            sleep(Duration::from_millis(150)).await;
        }
        Ok::<_, TxError>(created())
    };
    (app(layer, handler), runs)
}

/// So many records of earlier requests that they are found by an index.
const MANY: &str = "DO $$
    DECLARE seed idempotency_records;
    BEGIN
        SELECT * INTO seed FROM idempotency_records;
        FOR n IN 1..20000 LOOP
            seed.key := convert_to('earlier-' || n, 'UTF8');
            INSERT INTO idempotency_records SELECT seed.*;
        END LOOP;
    END $$;
    ANALYZE idempotency_records";

/// How often the neighbours and the long one were run again.
async fn reruns_among_strangers(level: &str, many: bool) -> (usize, usize, usize) {
    let ground = Ground::<Postgres>::in_real_time().await;
    let layer = layer_at(&ground, level)
        .await
        .lease(Duration::from_millis(300));
    if many {
        let app = app(layer.clone(), async || created());
        assert_eq!(send(&app, post("earlier", "A")).await.status, 201);
        ground.run(MANY).await;
    }
    let (short, short_runs) = charging::<Postgres>(layer.clone(), |_| created());
    let (long, long_runs) = long(layer);
    let neighbours = Neighbours::around(&short);
    let answer = send(&long, post("long", "A")).await;
    assert_eq!(answer.status, 201, "{answer:?}");
    let sent = neighbours.stop().await;
    assert_eq!(ground.left("long").await, (10, DONE));
    let all = i64::try_from(sent).unwrap() + 10;
    assert_eq!(ground.value("SELECT count(*) FROM effects").await, all);
    (sent, short_runs.count() - sent, long_runs.count() - 1)
}

async fn nobody_is_run_again_at(level: &str, many: bool) {
    let (sent, neighbours, long) = reruns_among_strangers(level, many).await;
    eprintln!("{level}: {sent} neighbours, {neighbours} of them again; the long one {long} times");
    assert!(sent > 50, "{sent} requests are no disturbance");
    assert_eq!((neighbours, long), (0, 0), "of {sent}");
}

// N6
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn at_repeatable_read_neither_heartbeats_nor_neighbours_disturb_a_long_handler() {
    nobody_is_run_again_at("repeatable read", false).await;
}

// N6
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn at_serializable_neither_heartbeats_nor_neighbours_disturb_a_long_handler() {
    nobody_is_run_again_at("serializable", false).await;
}

// N6
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn at_serializable_nobody_is_disturbed_where_there_are_many_records() {
    nobody_is_run_again_at("serializable", true).await;
}

/// Both take from one account, and the first run of each has seen what it was before either did.
async fn real_conflicts_are_run_again_at(level: &str) {
    let ground = Ground::<Postgres>::new().await;
    let (gate, runs) = (Gate::default(), Runs::default());
    let (passed, counted) = (gate.clone(), runs.clone());
    let layer = layer_at(&ground, level).await;
    let app = app(
        layer,
        move |Key(key): Key, mut tx: Tx<Postgres>| async move {
            let run = counted.begin();
            charge(&mut tx, &key).await?;
            let look = "SELECT balance FROM accounts WHERE name = 'a'";
            let balance = Postgres::value_in(&mut tx, look).await?;
            if run <= 2 {
                passed.pass().await;
            }
            let left = balance - 40;
            let write = format!("UPDATE accounts SET balance = {left} WHERE name = 'a'");
            Postgres::run_in(&mut tx, &write).await?;
            Ok::<_, TxError>(created())
        },
    );
    let both = [spawn(&app, post("1", "A")), spawn(&app, post("2", "A"))];
    for _ in 0..2 {
        gate.reached().await;
    }
    for _ in 0..2 {
        gate.open();
    }
    for answer in both {
        assert_eq!(answer.await.unwrap().status, 201);
    }
    assert_eq!(runs.count(), 3);
    assert_eq!(ground.left("1").await, (1, DONE));
    assert_eq!(ground.left("2").await, (1, DONE));
    assert_eq!(
        ground
            .value("SELECT balance FROM accounts WHERE name = 'a'")
            .await,
        20
    );
}

// N6
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn at_repeatable_read_real_conflicts_are_run_again() {
    real_conflicts_are_run_again_at("repeatable read").await;
}

// N6
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn at_serializable_real_conflicts_are_run_again() {
    real_conflicts_are_run_again_at("serializable").await;
}

/// Of two owners of one key the late one learns that it is late, and not that it should try again.
async fn a_late_owner_is_late_at(level: &str) {
    let ground = Ground::<Postgres>::new().await;
    let (late, gate) = gated::<Postgres>(layer_at(&ground, level).await);
    let (other, runs) = charging::<Postgres>(layer_at(&ground, level).await, |_| answer(200));
    let first = spawn(&late, post("k", "A"));
    gate.reached().await;
    ground.advance(Duration::from_secs(31));
    let won = send(&other, post("k", "A")).await;
    assert_eq!((won.status.as_u16(), won.replay), (200, false));
    gate.open();
    first.await.unwrap().assert_replays(&won);
    assert_eq!((ground.left("k").await, runs.count()), ((1, DONE), 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn at_repeatable_read_a_late_owner_answers_with_the_winners_replay() {
    a_late_owner_is_late_at("repeatable read").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn at_serializable_a_late_owner_answers_with_the_winners_replay() {
    a_late_owner_is_late_at("serializable").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_level_is_the_handlers_or_the_layers_or_the_databases() {
    let ground = Ground::<Postgres>::new().await;
    let by_default = layer_at(&ground, "repeatable read").await;
    let of_layer = TxOptions::default().isolation(Isolation::ReadCommitted);
    let by_layer = by_default.clone().transactional_with(of_layer);
    for (n, (layer, choice, expected)) in [
        (&by_default, None, "repeatable read"),
        (&by_layer, None, "read committed"),
        (&by_default, Some(Isolation::Serializable), "serializable"),
        (&by_layer, Some(Isolation::Serializable), "serializable"),
        (
            &by_layer,
            Some(Isolation::RepeatableRead),
            "repeatable read",
        ),
    ]
    .into_iter()
    .enumerate()
    {
        let app = app(layer.clone(), move |mut tx: Tx<Postgres>| async move {
            if let Some(choice) = choice {
                tx.isolation(choice)?;
            }
            let level = sqlx::query_scalar("SHOW transaction_isolation");
            let level: String = level.fetch_one(&mut tx).await?;
            assert!(
                tx.isolation(Isolation::Serializable).is_err(),
                "it has begun"
            );
            Ok::<_, TxError>(level)
        });
        let answer = send(&app, post(&format!("k-{n}"), "A")).await;
        assert_eq!(
            (answer.status.as_u16(), &answer.body[..]),
            (200, expected.as_bytes())
        );
    }
}

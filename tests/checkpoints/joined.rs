//! Checkpoints that are saved in a transaction of the handler's own, under a layer that knows nothing of it:
//! reserve in one short transaction, call the provider, settle in another.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicUsize, Ordering},
};

use axum::{
    Router,
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::any,
};
use sqlx::{Connection, Postgres, Sqlite};
use tokio::sync::Mutex as AsyncMutex;
use tower_http::catch_panic::CatchPanicLayer;
use tower_idempotency::{
    AnyStore, CheckpointError, Idempotency, IdempotencyLayer, MemoryStore, Recovery, Retention,
    State,
    store::{Checkpoints, Inspect, MAX_CHECKPOINTS},
    testing::FaultyStore,
};

use super::{
    common,
    ground::{Db, Ground, id},
};
use crate::{
    on_both,
    support::{World, post, puppet::Puppet, puppet::Run, send},
};

const EFFECT: &str = "INSERT INTO effects VALUES ('k', 1)";

fn layer<S: Inspect + Checkpoints>(store: &S) -> IdempotencyLayer<S> {
    IdempotencyLayer::new(store.clone())
        .single_tenant()
        .retention(Retention::successes_only())
        .recovery(Recovery::rerun())
}

/// A service on this ground, and the strings of its handler.
fn stage<S: Inspect + Checkpoints>(store: &S) -> (Router, Puppet) {
    let (router, puppet) = Puppet::new();
    (router.route_layer(layer(store)), puppet)
}

async fn begin(app: &Router, puppet: &mut Puppet) -> Run {
    let app = app.clone();
    tokio::spawn(async move { send(&app, post("k", "A")).await });
    puppet.next().await
}

/// An effect and a checkpoint in one transaction, which ends as told.
async fn reserve<D: Db>(
    connection: &mut D::Connection,
    idempotency: &Idempotency,
    value: u64,
    commits: bool,
) -> Result<(), CheckpointError> {
    D::run(connection, "BEGIN").await.unwrap();
    D::run(connection, EFFECT).await.unwrap();
    let saved = idempotency.checkpoint_in(connection, "reserved", &value);
    let saved = saved.await;
    let end = match commits && saved.is_ok() {
        true => "COMMIT",
        false => "ROLLBACK",
    };
    D::run(connection, end).await.unwrap();
    saved
}

async fn read(idempotency: &Idempotency) -> Option<u64> {
    idempotency.checkpointed("reserved").await.unwrap()
}

on_both! {
    async fn it_is_committed_with_the_callers_transaction_or_not_at_all<D: Db>() {
        let ground = Ground::<D>::new().await;
        let (app, mut puppet) = stage(&ground.store);
        let run = begin(&app, &mut puppet).await;
        let mut connection = D::connect(&ground.place).await;
        assert_eq!(read(run.owner()).await, None);
        reserve::<D>(&mut connection, run.owner(), 1, false).await.unwrap();
        assert_eq!((read(run.owner()).await, ground.effects("k").await), (None, 0));
        reserve::<D>(&mut connection, run.owner(), 2, true).await.unwrap();
        assert_eq!((read(run.owner()).await, ground.effects("k").await), (Some(2), 1));
        // Nor is what is known by then taken for ever.
        reserve::<D>(&mut connection, run.owner(), 3, false).await.unwrap();
        assert_eq!((read(run.owner()).await, ground.effects("k").await), (Some(2), 1));
        reserve::<D>(&mut connection, run.owner(), 4, true).await.unwrap();
        assert_eq!((read(run.owner()).await, ground.effects("k").await), (Some(4), 2));
    }

    async fn until_then_nobody_sees_it<D: Db>() {
        let ground = Ground::<D>::new().await;
        let (app, mut puppet) = stage(&ground.store);
        let run = begin(&app, &mut puppet).await;
        run.owner().checkpoint("reserved", &1).await.unwrap();
        let mut connection = D::connect(&ground.place).await;
        D::run(&mut connection, "BEGIN").await.unwrap();
        run.owner().checkpoint_in(&mut connection, "reserved", &2).await.unwrap();
        assert_eq!(read(run.owner()).await, Some(1));
        D::run(&mut connection, "COMMIT").await.unwrap();
        assert_eq!(read(run.owner()).await, Some(2));
        // Without a transaction it is committed by itself.
        run.owner().checkpoint_in(&mut connection, "reserved", &3).await.unwrap();
        assert_eq!(read(run.owner()).await, Some(3));
    }

    // L3
    async fn who_has_lost_the_claim_saves_nothing_and_may_roll_back<D: Db>() {
        let ground = Ground::<D>::new().await;
        let (app, mut puppet) = stage(&ground.store);
        let late = begin(&app, &mut puppet).await;
        let mut connection = D::connect(&ground.place).await;
        reserve::<D>(&mut connection, late.owner(), 1, true).await.unwrap();
        ground.advance(crate::ground::LEASE * 2);
        let (elsewhere, mut other) = stage(&D::open(&ground.place).await);
        let winner = begin(&elsewhere, &mut other).await;
        let lost = reserve::<D>(&mut connection, late.owner(), 2, true).await.unwrap_err();
        assert!(lost.is_lost(), "{lost:?}");
        assert_eq!(lost.into_response().status(), 503);
        assert_eq!((read(winner.owner()).await, ground.effects("k").await), (Some(1), 1));
    }

    async fn what_is_over_a_limit_is_refused_and_the_transaction_goes_on<D: Db>() {
        let ground = Ground::<D>::new().await;
        let (app, mut puppet) = stage(&ground.store);
        let run = begin(&app, &mut puppet).await;
        let mut connection = D::connect(&ground.place).await;
        for at in 0..MAX_CHECKPOINTS {
            run.owner().checkpoint(&format!("step-{at}"), &at).await.unwrap();
        }
        D::run(&mut connection, "BEGIN").await.unwrap();
        let long = "n".repeat(65);
        let large = "v".repeat(64 * 1024);
        for (name, value) in [("one more", "1"), (&*long, "1"), ("step-1", &*large)] {
            let refused = run.owner().checkpoint_in(&mut connection, name, value).await;
            let refused = refused.unwrap_err();
            assert!(refused.is_over_limit(), "{refused:?}");
            assert_eq!(refused.into_response().status(), 500);
        }
        run.owner().checkpoint_in(&mut connection, "step-1", &99).await.unwrap();
        D::run(&mut connection, EFFECT).await.unwrap();
        D::run(&mut connection, "COMMIT").await.unwrap();
        let step: Option<u64> = run.owner().checkpointed("step-1").await.unwrap();
        assert_eq!((step, ground.effects("k").await), (Some(99), 1));
    }

    // L11: killed before and after each step, the reservation is made once and so is the charge.
    async fn reserve_charge_and_settle_go_on_wherever_they_were_cut_off<D: Db>() {
        for cut in 0..5 {
            let ground = Ground::<D>::new().await;
            let shop = Arc::new(Shop::<D>::at(&ground, cut).await);
            let handled = shop.clone();
            let handler = move |idempotency: Idempotency| pay(handled.clone(), idempotency);
            let router = Router::new().route("/charges", any(handler));
            let layer = layer(&ground.store).downstream_secret([7; 32]);
            let app = router.route_layer(layer).layer(CatchPanicLayer::new());
            assert_eq!(send(&app, post("k", "A")).await.status, 500, "{cut}");
            let paid = send(&app, post("k", "A")).await;
            assert_eq!((paid.status.as_u16(), paid.replay), (201, false), "{cut}: {paid:?}");
            send(&app, post("k", "A")).await.assert_replays(&paid);
            let charges = shop.charges.lock().unwrap().clone();
            assert_eq!(ground.effects("k").await, 1, "{cut}");
            // Asked twice at most, and always under the one key.
            assert!(charges.iter().all(|key| *key == charges[0]), "{cut}: {charges:?}");
            assert_eq!(charges.len(), if cut == 3 || cut == 4 { 2 } else { 1 }, "{cut}");
            assert_eq!(ground.value("SELECT balance FROM accounts WHERE name = 'a'").await, 99);
        }
    }
}

struct Shop<D: Db> {
    connection: AsyncMutex<D::Connection>,
    charges: Mutex<Vec<String>>,
    left: AtomicUsize,
}

impl<D: Db> Shop<D> {
    async fn at(ground: &Ground<D>, cut: usize) -> Self {
        Self {
            connection: AsyncMutex::new(D::connect(&ground.place).await),
            charges: Mutex::default(),
            left: AtomicUsize::new(cut),
        }
    }

    /// Dies when this is passed for the so-manieth time, once.
    fn may_die(&self) {
        assert_ne!(
            self.left.fetch_sub(1, Ordering::SeqCst),
            0,
            "as the test wants"
        );
    }
}

async fn pay<D: Db>(shop: Arc<Shop<D>>, idempotency: Idempotency) -> Response {
    let paid = async {
        shop.may_die();
        let reserved: Option<u64> = idempotency.checkpointed("reserved").await?;
        if reserved.is_none() {
            let mut connection = shop.connection.lock().await;
            shop.may_die();
            reserve::<D>(&mut connection, &idempotency, 1, true).await?;
        }
        shop.may_die();
        let key = idempotency.downstream_key("charge").unwrap();
        shop.charges.lock().unwrap().push(key.to_string());
        shop.may_die();
        let settled: Option<bool> = idempotency.checkpointed("settled").await?;
        if settled.is_none() {
            let mut connection = shop.connection.lock().await;
            D::run(&mut connection, "BEGIN").await.unwrap();
            let settle = "UPDATE accounts SET balance = balance - 1 WHERE name = 'a'";
            D::run(&mut connection, settle).await.unwrap();
            let saved = idempotency.checkpoint_in(&mut *connection, "settled", &true);
            saved.await?;
            D::run(&mut connection, "COMMIT").await.unwrap();
        }
        shop.may_die();
        Ok::<_, CheckpointError>(StatusCode::CREATED)
    };
    paid.await.into_response()
}

async fn other_database_is_refused<D: Db, Other: Db>() {
    let ground = Ground::<D>::new().await;
    let other = Ground::<Other>::new().await;
    let (app, mut puppet) = stage(&ground.store);
    let run = begin(&app, &mut puppet).await;
    let mut connection = Other::connect(&other.place).await;
    Other::run(&mut connection, "BEGIN").await.unwrap();
    let refused = run.owner().checkpoint_in(&mut connection, "reserved", &1);
    let refused = refused.await.unwrap_err();
    assert!(refused.to_string().contains("another kind"), "{refused}");
    assert!(!refused.is_lost() && !refused.is_unknown());
    assert_eq!(refused.into_response().status(), 500);
    assert_eq!(read(run.owner()).await, None);
    assert_eq!(
        ground.record("k").await.unwrap().state,
        State::Running,
        "nothing else has changed"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_of_sqlite_over_a_postgres_store_is_refused() {
    other_database_is_refused::<Postgres, Sqlite>().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_of_postgres_over_an_sqlite_store_is_refused() {
    other_database_is_refused::<Sqlite, Postgres>().await;
}

#[tokio::test]
async fn a_store_that_has_no_transactions_says_so() {
    let (app, mut puppet) = stage(&MemoryStore::new());
    let run = begin(&app, &mut puppet).await;
    let mut connection = sqlx::SqliteConnection::connect("sqlite::memory:")
        .await
        .unwrap();
    let refused = run
        .owner()
        .checkpoint_in(&mut connection, "reserved", &1)
        .await
        .unwrap_err();
    assert!(
        refused.to_string().contains("cannot save a checkpoint"),
        "{refused}"
    );
    assert_eq!(refused.into_response().status(), 500);
    assert_eq!(read(run.owner()).await, None);
}

// The wrappers pass it on, and sqlx's own transactions do as well.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_chosen_at_run_time_can_do_it_too() {
    let world = World::sqlite();
    let store: FaultyStore<AnyStore> = world.open().await;
    let (app, mut puppet) = stage(&store);
    let run = begin(&app, &mut puppet).await;
    let file = sqlx::sqlite::SqliteConnectOptions::new().filename(world.file().unwrap());
    let pool = sqlx::SqlitePool::connect_with(file).await.unwrap();
    for (commits, found) in [(false, None), (true, Some(7))] {
        let mut transaction = pool.begin().await.unwrap();
        let saving = run
            .owner()
            .checkpoint_in(&mut *transaction, "reserved", &7_u64);
        saving.await.unwrap();
        match commits {
            true => transaction.commit().await.unwrap(),
            false => transaction.rollback().await.unwrap(),
        }
        assert_eq!(read(run.owner()).await, found);
    }
    run.answers(503, "down");
    assert_eq!(id("k"), common::id("k"));
}

// A transaction that sees one moment must not take that for what is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_that_was_lost_after_the_snapshot_saves_nothing() {
    for level in ["REPEATABLE READ", "SERIALIZABLE"] {
        let ground = Ground::<Postgres>::new().await;
        let (app, mut puppet) = stage(&ground.store);
        let late = begin(&app, &mut puppet).await;
        let mut connection = Postgres::connect(&ground.place).await;
        let begins = format!("BEGIN ISOLATION LEVEL {level}; SELECT count(*) FROM effects");
        Postgres::run(&mut connection, &begins).await.unwrap();
        ground.advance(crate::ground::LEASE * 2);
        let store = Postgres::open(&ground.place).await;
        let (elsewhere, mut other) = stage(&store);
        let winner = begin(&elsewhere, &mut other).await;
        assert_eq!(winner.owner().attempt(), 2);
        let saved = late.owner().checkpoint_in(&mut connection, "reserved", &1);
        let refused = saved.await.expect_err(level);
        assert!(refused.is_lost() || refused.is_conflict(), "{refused:?}");
        Postgres::run(&mut connection, "COMMIT").await.unwrap();
        assert_eq!(read(winner.owner()).await, None, "{level}");
    }
}

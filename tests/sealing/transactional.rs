//! What a handler's transaction completes is sealed as well.

use std::{sync::Arc, time::Duration};

use axum::{body::Body, http::Response};
use sqlx::{
    Postgres,
    postgres::{PgPoolOptions, PgSslMode},
};
use tower_idempotency::{
    Isolation, PostgresStore, RecordId, SealedStore, SealingKeys, State, Tx, TxError,
    store::{Inspect, TransactionalStore},
};

use crate::{
    common::{BODY, FIELD, NEW, OTHER, UNAVAILABLE, hashing, keys},
    ground::{self, Ground, transactional},
    handlers::{Gate, IN_FLIGHT, Key, Runs, app, charge, created, said, spawn},
    on_both,
    support::{
        post,
        proxy::{Cut, Proxy},
        send,
    },
};

fn answer(run: usize) -> Response<Body> {
    let response = Response::builder().status(201).header("x-field", FIELD);
    response.body(Body::from(format!("{BODY}-{run}"))).unwrap()
}

fn is_sealed(record: &tower_idempotency::Record) -> bool {
    let response = record.response.as_deref().unwrap();
    response.starts_with(b"\x02\x072026-12") && !response.windows(4).any(|at| at == b"b0dy")
}

async fn sealed<D: ground::Db>(ground: &Ground<D>, keys: SealingKeys) -> SealedStore<D::Store> {
    SealedStore::open(ground.store.clone(), keys).await.unwrap()
}

/// A service whose handler has one effect and answers with a secret.
fn service<D: ground::Db, S: TransactionalStore<Database = D>>(store: &S) -> (axum::Router, Runs) {
    let runs = Runs::default();
    let counted = runs.clone();
    let handler = move |Key(key): Key, mut tx: Tx<D>| async move {
        let run = counted.begin();
        charge(&mut tx, &key).await?;
        Ok::<_, TxError>(answer(run))
    };
    (app(transactional(store), handler), runs)
}

/// The only record that the ground's own store has, and what it is called there.
async fn below<D: ground::Db>(ground: &Ground<D>, name: &RecordId) -> tower_idempotency::Record {
    ground
        .store
        .get(name)
        .await
        .unwrap()
        .expect("there is no record")
}

on_both! {
    async fn what_is_committed_with_the_effect_is_sealed<D: Db>() {
        let ground = Ground::<D>::new().await;
        let store = sealed(&ground, keys()).await;
        let (app, runs) = service(&store);
        let first = send(&app, post("k-1", "A")).await;
        assert_eq!(first.status, 201);
        assert!(is_sealed(&below(&ground, &ground::id("k-1")).await));
        let elsewhere = SealedStore::open(D::open(&ground.place).await, keys()).await.unwrap();
        send(&service(&elsewhere).0, post("k-1", "A")).await.assert_replays(&first);
        assert_eq!((runs.count(), ground.effects("k-1").await), (1, 1));

        // A wrong key is no reason to have the effect twice.
        let wrong = SealingKeys::new("2026-12", OTHER);
        let (wrong, ran) = service(&sealed(&ground, wrong).await);
        assert_eq!(send(&wrong, post("k-1", "A")).await.said(), said(503, UNAVAILABLE));
        assert_eq!((ran.count(), ground.effects("k-1").await), (0, 1));
    }

    async fn so_it_is_under_a_hashed_name<D: Db>() {
        let ground = Ground::<D>::new().await;
        let store = sealed(&ground, hashing()).await;
        let (app, _) = service(&store);
        let first = send(&app, post("k-1", "A")).await;
        send(&app, post("k-1", "A")).await.assert_replays(&first);
        assert_eq!(ground.effects("k-1").await, 1);
        assert_eq!(ground.record("k-1").await, None);
        let record = store.get(&ground::id("k-1")).await.unwrap().unwrap();
        assert_eq!((record.state, &record.id), (State::Completed, &ground::id("k-1")));
        // Beside the check of the hash key there is only this one.
        let rows = ground.value("SELECT count(*) FROM idempotency_records").await;
        let sealed = ground.value(
            "SELECT count(*) FROM idempotency_records WHERE length(response) > 42 AND length(key) = 64",
        );
        assert_eq!((rows, sealed.await), (2, 1));
    }

    // The claim is lost while the handler runs: the transaction must know it by the name it has below.
    async fn a_claim_that_is_lost_rolls_its_effect_back<D: Db>() {
        for keys in [keys(), hashing()] {
            let ground = Ground::<D>::new().await;
            let store = sealed(&ground, keys).await;
            let gate = Gate::default();
            let passed = gate.clone();
            let handler = move |Key(key): Key, mut tx: Tx<D>| async move {
                passed.pass().await;
                charge(&mut tx, &key).await?;
                Ok::<_, TxError>(created())
            };
            let app = app(transactional(&store), handler);
            let running = spawn(&app, post("k-1", "A"));
            gate.reached().await;
            assert!(store.forget(&ground::id("k-1")).await.unwrap());
            gate.open();
            let lost = running.await.unwrap();
            assert_eq!(lost.said(), said(409, IN_FLIGHT));
            assert_eq!(ground.effects("k-1").await, 0);
        }
    }

    async fn an_answer_recorded_without_a_transaction_is_sealed_too<D: Db>() {
        let ground = Ground::<D>::new().await;
        let store = sealed(&ground, keys()).await;
        let handler = async || (tower_idempotency::Retain::Keep, answer(1));
        let app = app(transactional(&store), handler);
        let first = send(&app, post("k-1", "A")).await;
        assert!(is_sealed(&below(&ground, &ground::id("k-1")).await));
        send(&app, post("k-1", "A")).await.assert_replays(&first);
    }
}

/// Transactions that have nothing in common fail for one another's sake unless each finds its record before
/// it begins, by the name the record has below.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn at_serializable_nobody_is_disturbed_under_hashed_names() {
    const CROWD: usize = 8;
    let ground = Ground::<Postgres>::new().await;
    let pool = PgPoolOptions::new().max_connections(12);
    let pool = pool.connect_lazy_with(ground.place.database().options());
    let store = ground::open_postgres(pool).await;
    let store = SealedStore::open(store, hashing()).await.unwrap();
    let (gate, runs) = (Gate::default(), Runs::default());
    let (passed, counted) = (gate.clone(), runs.clone());
    let handler = move |Key(key): Key, mut tx: Tx<Postgres>| async move {
        tx.isolation(Isolation::Serializable)?;
        let run = counted.begin();
        charge(&mut tx, &key).await?;
        if run <= CROWD {
            passed.pass().await;
        }
        Ok::<_, TxError>(created())
    };
    let app = app(transactional(&store), handler);
    let crowd: Vec<_> = (0..CROWD)
        .map(|at| spawn(&app, post(&format!("k-{at}"), "A")))
        .collect();
    for _ in 0..CROWD {
        gate.reached().await;
    }
    for _ in 0..CROWD {
        gate.open();
    }
    for answer in crowd {
        assert_eq!(answer.await.unwrap().status, 201);
    }
    assert_eq!(runs.count(), CROWD);
}

/// A service whose COMMIT is cut off once for each key.
async fn cut_at_commit(cut: Cut, keys: SealingKeys, answered: u16) {
    let ground = Ground::<Postgres>::in_real_time().await;
    let options = ground.place.database().options();
    let host = (options.get_host().to_owned(), options.get_port());
    let target = tokio::net::lookup_host(host).await.unwrap().next().unwrap();
    let proxy = Arc::new(Proxy::to(target).await);
    let address = proxy.address();
    let options = options.host(&address.ip().to_string()).port(address.port());
    let options = options.ssl_mode(PgSslMode::Disable);
    let pool = PgPoolOptions::new().test_before_acquire(false);
    let far = PostgresStore::options()
        .open(pool.connect_lazy_with(options))
        .await
        .unwrap();
    let store = SealedStore::open(far, keys).await.unwrap();
    let layer = transactional(&store).store_timeout(Duration::from_secs(2));
    let fails = proxy.clone();
    let handler = move |Key(key): Key, mut tx: Tx<Postgres>| {
        let (proxy, cut) = (fails.clone(), cut.clone());
        async move {
            charge(&mut tx, &key).await?;
            if proxy.cuts() == 0 {
                proxy.cut(cut);
            }
            Ok::<_, TxError>(answer(1))
        }
    };
    let app = app(layer, handler);
    let first = send(&app, post("k-1", "A")).await;
    assert_eq!((first.status.as_u16(), proxy.cuts()), (answered, 1));
    assert_eq!(ground.effects("k-1").await, i64::from(answered == 201));
    let retry = send(&app, post("k-1", "A")).await;
    assert_eq!(
        (retry.status.as_u16(), retry.replay),
        (201, answered == 201)
    );
    assert_eq!(ground.effects("k-1").await, 1);
}

// What became of it is asked by the name it has below, and told as it was.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_whose_answer_was_lost_is_found_again() {
    let id = [7; 32];
    for keys in [keys(), hashing(), SealingKeys::new("a", NEW).hash_ids(id)] {
        let lost = Cut::answered(b'Q').containing("COMMIT");
        cut_at_commit(lost, keys.clone(), 201).await;
        let never_arrived = Cut::before(b'Q').containing("COMMIT");
        cut_at_commit(never_arrived, keys, 503).await;
    }
}

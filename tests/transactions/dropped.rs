//! Statements whose futures are dropped before they are done, as a time-out does.

use std::{
    pin::pin,
    time::{Duration, Instant},
};

use futures_util::FutureExt;
use sqlx::{Connection, Postgres};
use tokio::time::{sleep, timeout};
use tower_idempotency::{State, Tx, TxError};

use super::{far::*, ground::*, handlers::*};
use crate::{
    on_both,
    support::{post, proxy::Way, request, send},
};

const DONE: Option<State> = Some(State::Completed);
const ROUNDS: u32 = 40;

/// Far longer than anybody waits.
fn slow<D: Db>() -> &'static str {
    match D::IS_POSTGRES {
        true => "SELECT 1::bigint FROM pg_sleep(0.5)",
        false => {
            "WITH RECURSIVE n (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < 3000000)
             SELECT count(*) FROM n"
        }
    }
}

/// After however long: when the transaction is being begun, when the statement is on its way, or later.
async fn dropped_after<D: Db>(tx: &mut Tx<D>, key: &str, n: u32) {
    let mut charging = pin!(charge(tx, key));
    if n.is_multiple_of(2) {
        for _ in 0..n / 2 {
            if charging.as_mut().now_or_never().is_some() {
                return;
            }
            tokio::task::yield_now().await;
        }
    } else {
        let _ = timeout(Duration::from_micros(u64::from(n) * 100), charging).await;
    }
}

on_both! {
    async fn a_slow_statement_that_is_dropped_leaves_the_transaction_usable<D: Db>() {
        let ground = Ground::<D>::in_real_time().await;
        let app = app(ground.layer(), async |Key(key): Key, mut tx: Tx<D>| {
            charge(&mut tx, &key).await?;
            let waiting = D::value_in(&mut tx, slow::<D>());
            assert!(timeout(Duration::from_millis(30), waiting).await.is_err(), "too fast");
            charge(&mut tx, &key).await?;
            Ok::<_, TxError>(created())
        });
        let first = send(&app, post("k", "A")).await;
        assert_eq!((first.status.as_u16(), ground.left("k").await), (201, (2, DONE)));
        send(&app, post("k", "A")).await.assert_replays(&first);
    }

    async fn a_statement_that_is_dropped_at_any_instant_leaves_the_transaction_usable<D: Db>() {
        let ground = Ground::<D>::in_real_time().await;
        for n in 0..ROUNDS {
            let app = app(ground.layer().optional(), move |Key(key): Key, mut tx: Tx<D>| async move {
                dropped_after(&mut tx, &key, n).await;
                charge(&mut tx, &key).await?;
                Ok::<_, TxError>(created())
            });
            let key = format!("k-{n}");
            assert_eq!(send(&app, post(&key, "A")).await.status, 201, "{n}");
            let (effects, state) = ground.left(&key).await;
            // Whether it was carried out, nobody has waited to hear.
            assert!((1..=2).contains(&effects) && state == DONE, "{n}: {effects} {state:?}");
            let before = ground.effects("none").await;
            let without_key = request("POST", "/charges", None, "A");
            assert_eq!(send(&app, without_key).await.status, 201, "{n}");
            let effects = ground.effects("none").await - before;
            assert!((1..=2).contains(&effects), "{n}: {effects}");
        }
    }

    async fn a_run_that_declines_after_a_statement_was_dropped_is_rolled_back_soon<D: Db>() {
        let ground = Ground::<D>::in_real_time().await;
        for n in 0..ROUNDS {
            let app = app(ground.layer(), move |Key(key): Key, mut tx: Tx<D>| async move {
                dropped_after(&mut tx, &key, n).await;
                if n.is_multiple_of(4) {
                    let slow = D::value_in(&mut tx, slow::<D>());
                    let _ = timeout(Duration::from_millis(1), slow).await;
                }
                answer(402)
            });
            let key = format!("k-{n}");
            let asked = Instant::now();
            assert_eq!(send(&app, post(&key, "A")).await.status, 402);
            assert!(asked.elapsed() < Duration::from_secs(3), "{n}: {:?}", asked.elapsed());
            assert_eq!(ground.left(&key).await, (0, None), "{n}");
        }
        let (app, _) = charging::<D>(ground.layer(), |_| created());
        assert_eq!(send(&app, post("after", "A")).await.status, 201);
        assert_eq!(ground.left("after").await, (1, DONE));
    }
}

/// A BEGIN that nobody waits for any more opens a transaction all the same. The connection must not go to
/// whoever needs one next: what the store claims on it would never be committed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_postgres_a_begin_that_is_dropped_leaves_no_transaction_open() {
    let far = Far::new().await;
    let proxy = far.proxy.clone();
    let app = app(
        far.layer.clone(),
        move |Key(key): Key, mut tx: Tx<Postgres>| {
            let proxy = proxy.clone();
            async move {
                proxy.delay(Way::ToClient, Duration::from_millis(100));
                let begun = timeout(Duration::from_millis(30), charge(&mut tx, &key)).await;
                proxy.delay(Way::ToClient, Duration::ZERO);
                assert!(begun.is_err(), "the network is too fast");
                answer(402)
            }
        },
    );
    let schema = far.ground.place.database().schema();
    let open = format!(
        "SELECT count(*) FROM pg_stat_activity
         WHERE application_name = '{schema}' AND state LIKE 'idle in transaction%'"
    );
    for key in ["1", "2", "3"] {
        assert_eq!(send(&app, post(key, "A")).await.status, 402);
        let asked = Instant::now();
        while far.ground.value(&open).await > 0 {
            assert!(asked.elapsed() < Duration::from_secs(2), "one stays open");
            sleep(Duration::from_millis(10)).await;
        }
        assert_eq!(far.ground.left(key).await, (0, None));
    }
}

/// sqlx then rolls back all of the transaction, and what comes after is in none.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_postgres_a_savepoint_that_is_dropped_while_it_begins_is_never_answered_as_done() {
    let far = Far::new().await;
    let proxy = far.proxy.clone();
    let app = app(
        far.layer.clone(),
        move |Key(key): Key, mut tx: Tx<Postgres>| {
            let proxy = proxy.clone();
            async move {
                charge(&mut tx, &key).await?;
                proxy.delay(Way::ToClient, Duration::from_millis(100));
                let mut connection = tx.connection().await?;
                let nested = connection.begin();
                let is_late = timeout(Duration::from_millis(30), nested).await.is_err();
                proxy.delay(Way::ToClient, Duration::ZERO);
                assert!(is_late, "the network is too fast");
                drop(connection);
                charge(&mut tx, &key).await?;
                Ok::<_, TxError>(created())
            }
        },
    );
    let refused = send(&app, post("k", "A")).await;
    assert_eq!(refused.said(), said(500, MISUSED));
    let retry = send(&app, post("k", "A")).await;
    assert_eq!(retry.said(), said(409, NOT_RETAINED));
}

//! A service whose way to its Postgres server may be cut.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::Router;
use sqlx::{
    ConnectOptions, PgPool, Postgres,
    postgres::{PgConnectOptions, PgPoolOptions, PgSslMode},
};
use tokio::time::{Instant, sleep};
use tower_idempotency::{IdempotencyLayer, PostgresStore, State, Tx, TxError, TxOptions};

use super::{ground::*, handlers::*};
use crate::support::{Answer, post, proxy::Proxy, send};

const DONE: Option<State> = Some(State::Completed);

/// How long the layer waits for the store.
pub const BRIEF: Duration = Duration::from_millis(500);

/// A service whose way to the database may be cut, and the database seen without it.
pub struct Far {
    pub ground: Ground<Postgres>,
    pub proxy: Arc<Proxy>,
    pub layer: IdempotencyLayer<PostgresStore>,
}

impl Far {
    pub async fn new() -> Self {
        let ground = Ground::<Postgres>::in_real_time().await;
        let options = ground.place.database().options();
        let host = (options.get_host().to_owned(), options.get_port());
        let mut targets = tokio::net::lookup_host(host).await.unwrap();
        let proxy = Arc::new(Proxy::to(targets.next().unwrap()).await);
        let address = proxy.address();
        let options = options.host(&address.ip().to_string()).port(address.port());
        let store = PostgresStore::options().operation_timeout(Duration::from_secs(1));
        let store = store.open(pool(options.ssl_mode(PgSslMode::Disable))).await;
        let layer = plain(&store.unwrap()).transactional_with(patient());
        let layer = layer.store_timeout(BRIEF);
        Self {
            ground,
            proxy,
            layer,
        }
    }

    /// A handler with one effect, after which the network fails in its first run for each key.
    pub fn failing(&self, fail: impl Fn(&Proxy) + Clone + Send + Sync + 'static) -> Router {
        let (proxy, seen) = (self.proxy.clone(), Arc::new(Mutex::new(Vec::new())));
        app(
            self.layer.clone(),
            move |Key(key): Key, mut tx: Tx<Postgres>| async move {
                charge(&mut tx, &key).await?;
                let mut seen = seen.lock().unwrap();
                if !seen.contains(&key) {
                    seen.push(key);
                    fail(&proxy);
                }
                Ok::<_, TxError>(created())
            },
        )
    }

    /// One round: what the client hears is what is so, and whatever it was, it gets there in the end.
    pub async fn tells_the_truth(&self, app: &Router, key: &str) -> (Answer, (i64, Option<State>)) {
        let first = send(app, post(key, "A")).await;
        let left = self.ground.left(key).await;
        match first.status.as_u16() {
            201 => assert_eq!(left, (1, DONE), "{key}"),
            503 => assert!(left.0 == i64::from(left.1 == DONE), "{key}: {left:?}"),
            _ => panic!("{key}: {first:?}"),
        }
        (first, left)
    }
}

pub fn patient() -> TxOptions {
    TxOptions::default().lock_timeout(Duration::from_secs(60))
}

pub fn pool(options: PgConnectOptions) -> PgPool {
    PgPoolOptions::new()
        .max_connections(24)
        .test_before_acquire(false)
        .connect_lazy_with(options.disable_statement_logging())
}

/// Sends it until it is done, as a client does that is told to come again.
pub async fn at_last(app: &Router, key: &str) -> Answer {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let answer = send(app, post(key, "A")).await;
        if answer.status == 201 {
            return answer;
        }
        let said = answer.said();
        assert_eq!(answer.json()["retryable"], true, "{key}: {said:?}");
        assert!(Instant::now() < deadline, "{key}: {said:?}");
        sleep(Duration::from_millis(20)).await;
    }
}

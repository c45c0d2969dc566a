//! A store with a single connection through a proxy, where a test knows what comes next.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use sqlx::PgPool;
use tokio::time::{sleep, timeout};
use tower_idempotency::{
    PostgresStore,
    store::{Claim, ClaimRequest, Store, StoreErrorKind},
};

use super::common::*;
use crate::support::{
    database::Database,
    eventually,
    proxy::{Cut, Proxy},
};

pub const OPERATION_TIMEOUT: Duration = Duration::from_secs(2);

/// How long a store may take to find out that its server is back.
pub const BACK_WITHIN: Duration = Duration::from_secs(3);

pub async fn open_on(pool: PgPool) -> PostgresStore {
    let options = PostgresStore::options().operation_timeout(OPERATION_TIMEOUT);
    options.migrate().open(pool).await.unwrap()
}

/// A store whose only connection leads through a proxy, so that a test knows what comes next on it.
pub struct Single {
    pub store: PostgresStore,
    pub proxy: Proxy,
    pool: PgPool,
    warmed: AtomicUsize,
}

impl Single {
    pub async fn on(database: &Database) -> Self {
        let (proxy, through) = proxied(database).await;
        let pool = pool(through, 1);
        let store = open_on(pool.clone()).await;
        let warmed = AtomicUsize::new(0);
        Self {
            store,
            proxy,
            pool,
            warmed,
        }
    }

    /// Every kind of statement has gone through, and nothing is under way: the next one is three
    /// messages, bind, execute and sync.
    pub async fn warm_up(&self) {
        let store = &self.store;
        let key = format!("warm-{}", self.warmed.fetch_add(1, Ordering::SeqCst));
        let first = win(store, &request(&key)).await;
        done(store.abandon(&first).await);
        let second = win(store, &replacing(&key, first.token)).await;
        done(store.release(&second, DAY).await);
        // Asks for a release that is not there any more, as one does that is sent again.
        lost(store.release(&second, DAY).await);
        let third = win(store, &request(&key)).await;
        done(store.complete(&third, created(), lifetimes()).await);
        // A pool sends a sync of its own before it takes a connection back.
        eventually("the connection to be idle", || self.pool.num_idle() == 1).await;
    }

    /// Loses the answer of the next statement.
    pub async fn lose_next_answer(&self) -> Losing<'_> {
        self.warm_up().await;
        let happened = self.proxy.cuts();
        self.proxy.cut(Cut::answered(b'S'));
        Losing {
            proxy: &self.proxy,
            happened,
        }
    }
}

/// Sees to it that an answer was lost.
#[must_use]
pub struct Losing<'a> {
    proxy: &'a Proxy,
    happened: usize,
}

impl Losing<'_> {
    #[track_caller]
    pub fn assert_lost(self) {
        assert_eq!(self.proxy.cuts(), self.happened + 1, "no answer was lost");
    }
}

/// Sends it until the store is back, and no longer than it may take.
pub async fn claim_when_back(store: &PostgresStore, request: &ClaimRequest) -> Claim {
    let claim = async {
        loop {
            match store.claim(request.clone()).await {
                Ok(claim) => return claim,
                Err(error) => assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error:?}"),
            }
            sleep(Duration::from_millis(5)).await;
        }
    };
    let claim = timeout(OPERATION_TIMEOUT + BACK_WITHIN, claim).await;
    claim.expect("the store does not come back")
}

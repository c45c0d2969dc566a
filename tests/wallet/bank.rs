//! The service on tables of a test's own.

use std::{
    fmt::Display,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{Router, body::Body, extract::Request, http::Method, middleware, middleware::Next};
use serde_json::Value;
use sqlx::{PgPool, postgres::PgPoolOptions};
use tokio::time::sleep;
use tower_idempotency::PostgresStore;

use crate::{
    service,
    support::{Answer, database::Database, request, send},
};

#[derive(Clone)]
pub struct Bank {
    pub app: Router,
    pub pool: PgPool,
    runs: Arc<AtomicUsize>,
    database: Arc<Database>,
}

/// What is different in one test.
#[derive(Default)]
pub struct Setup {
    /// Routes beside those of the service.
    pub more: Router<PgPool>,
    /// The database's own isolation level; empty for read committed.
    pub isolation: &'static str,
    /// Of the pool; 0 for 8.
    pub connections: u32,
}

impl Bank {
    pub async fn open() -> Self {
        Self::open_with(Setup::default()).await
    }

    pub async fn open_with(setup: Setup) -> Self {
        let database = Database::in_real_time();
        let mut options = database.options();
        if !setup.isolation.is_empty() {
            options = options.options([("default_transaction_isolation", setup.isolation)]);
        }
        let connections = match setup.connections {
            0 => 8,
            connections => connections,
        };
        let pool = PgPoolOptions::new().max_connections(connections);
        let pool = pool.connect_lazy_with(options);
        service::create_tables(&pool).await.unwrap();
        let store = PostgresStore::options().migrate().open(pool.clone());
        let store = store.await.unwrap();

        let runs = Arc::new(AtomicUsize::new(0));
        let counted = runs.clone();
        let count = middleware::from_fn(move |request: Request, next: Next| {
            let changes = request.method() != Method::GET;
            counted.fetch_add(changes.into(), Ordering::SeqCst);
            next.run(request)
        });
        let routes = service::routes().merge(setup.more).route_layer(count);
        let app = routes.route_layer(service::layer(store));
        Self {
            app: app.with_state(pool.clone()),
            pool,
            runs,
            database: Arc::new(database),
        }
    }

    /// How often handlers that change something were run. A run that the layer begins anew after a conflict counts again.
    pub fn runs(&self) -> usize {
        self.runs.load(Ordering::SeqCst)
    }

    pub async fn post(&self, path: &str, key: impl Display, body: Value) -> Answer {
        self.send(by_shop("POST", path, Some(key.to_string()), body))
            .await
    }

    pub async fn put(&self, path: &str, key: Option<&str>, body: Value) -> Answer {
        self.send(by_shop("PUT", path, key.map(str::to_owned), body))
            .await
    }

    pub async fn send(&self, request: Request) -> Answer {
        send(&self.app, request).await
    }

    pub async fn get(&self, path: &str) -> Answer {
        send(&self.app, request("GET", path, None, Body::empty())).await
    }

    pub async fn balance(&self, wallet: i64) -> i64 {
        let wallet = self.get(&format!("/wallets/{wallet}")).await.json();
        wallet["balance_satang"].as_i64().unwrap()
    }

    /// One value, asked behind the service's back.
    pub async fn ask(&self, query: &'static str) -> i64 {
        let answer = sqlx::query_scalar(query).fetch_one(&self.pool);
        answer.await.unwrap()
    }

    pub async fn run(&self, statements: &'static str) {
        let statements = sqlx::raw_sql(statements).execute(&self.pool);
        statements.await.unwrap();
    }

    /// New wallets, with an opening entry each.
    pub async fn open_wallets(&self, ids: std::ops::Range<i64>, balance: i64) {
        let opened = sqlx::query(
            "WITH opened AS (
                 INSERT INTO wallet_accounts (id, label, balance_satang)
                 SELECT id, 'test', $3 FROM generate_series($1, $2 - 1) AS id
                 RETURNING id, balance_satang
             )
             INSERT INTO wallet_ledger (wallet_id, amount_satang, kind)
             SELECT id, balance_satang, 'opening' FROM opened",
        );
        let opened = opened.bind(ids.start).bind(ids.end).bind(balance);
        opened.execute(&self.pool).await.unwrap();
    }

    /// Waits until a handler has entered something into the ledger and stands still with its transaction
    /// open.
    pub async fn entered(&self) {
        for _ in 0..5_000 {
            let entered = sqlx::query_scalar(
                "SELECT count(*) FROM pg_stat_activity
                 WHERE application_name = $1 AND state = 'idle in transaction'
                   AND query LIKE 'INSERT INTO wallet_ledger%'",
            );
            let entered = entered.bind(self.database.schema()).fetch_one(&self.pool);
            let entered: i64 = entered.await.unwrap();
            if entered > 0 {
                return;
            }
            sleep(Duration::from_millis(2)).await;
        }
        panic!("nothing was entered");
    }

    /// How many wallets hold something else than their entries add up to, judged at one moment.
    pub async fn wrong_wallets(&self) -> i64 {
        self.ask(
            "SELECT count(*) FROM wallet_accounts AS wallet
             WHERE balance_satang <> (
                 SELECT coalesce(sum(amount_satang), 0) FROM wallet_ledger
                 WHERE wallet_id = wallet.id
             )",
        )
        .await
    }
}

pub fn by_shop(method: &str, path: &str, key: Option<String>, body: Value) -> Request {
    let mut request = request(method, path, key.as_deref(), body.to_string());
    let headers = request.headers_mut();
    headers.insert("x-client-id", "shop".parse().unwrap());
    request
}

/// The request with a delay after its effect.
pub fn slowly(mut request: Request, delay_ms: &str) -> Request {
    let headers = request.headers_mut();
    headers.insert("x-simulate-delay-ms", delay_ms.parse().unwrap());
    request
}

/// Sends both at one time, each from a task of its own. The answers are ordered by status.
pub async fn at_once(bank: &Bank, requests: [Request; 2]) -> [Answer; 2] {
    let tasks = requests.map(|request| {
        let bank = bank.clone();
        tokio::spawn(async move { bank.send(request).await })
    });
    let [one, other] = tasks;
    let mut answers = [one.await.unwrap(), other.await.unwrap()];
    answers.sort_by_key(|answer| answer.status);
    answers
}

/// Status, and the service's own `error`; empty where there is none.
pub fn said(answer: &Answer) -> (u16, String) {
    let error = answer.json()["error"].as_str().unwrap_or_default().into();
    (answer.status.as_u16(), error)
}

#[track_caller]
pub fn assert_said(answers: &[Answer], expected: &[(u16, &str)]) {
    let answers: Vec<_> = answers.iter().map(said).collect();
    let expected: Vec<_> = expected
        .iter()
        .map(|(status, error)| (*status, (*error).to_owned()))
        .collect();
    assert_eq!(answers, expected);
}

/// Does one thing for each of these numbers, four at a time.
pub async fn rounds<F: Future<Output = ()> + Send + 'static>(
    numbers: std::ops::Range<i64>,
    round: impl Fn(i64) -> F + Clone + Send + 'static,
) {
    let workers: Vec<_> = (0..4)
        .map(|worker| {
            let (numbers, round) = (numbers.clone(), round.clone());
            tokio::spawn(async move {
                for number in numbers.filter(|number| number % 4 == worker) {
                    round(number).await;
                }
            })
        })
        .collect();
    for worker in workers {
        worker.await.unwrap();
    }
}

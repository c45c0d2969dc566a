//! A corner of the Postgres server that a test has to itself.

use std::{
    sync::{
        atomic::{AtomicUsize, Ordering},
        mpsc::{self, Receiver, RecvTimeoutError, Sender, SyncSender},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use sqlx::{
    AssertSqlSafe, ConnectOptions, PgConnection, PgPool,
    postgres::{PgConnectOptions, PgPoolOptions},
};
use tower_idempotency::{Timestamp, Token};

/// A schema of its own in the database that `DATABASE_URL` names, gone when this is dropped.
///
/// A thread of its own looks after it, with a connection of its own, so that it can be had and moved
/// in time without a runtime and in any runtime.
#[derive(Debug)]
pub struct Database {
    schema: String,
    options: PgConnectOptions,
    orders: Option<Sender<Order>>,
    thread: Option<JoinHandle<()>>,
    pools: AtomicUsize,
}

/// The time it shall be, and whom to tell that it is.
type Order = (Timestamp, SyncSender<()>);

/// How long a server may take for what is done at once. A test that waits longer is stuck.
const PATIENCE: Duration = Duration::from_secs(30);

impl Database {
    /// A schema whose `clock_timestamp()` answers the time last [set](Self::set_time), which is 1970
    /// at first.
    pub fn new() -> Self {
        Self::with(|schema| {
            // A sequence and not a row: what it is set to is seen at once by everybody, whatever
            // the isolation level. The name is found before the one in pg_catalog.
            //
            // Days and what is left of them are added apart, since Postgres multiplies intervals in
            // floating point, which does not tell the microseconds of a distant year apart.
            format!(
                "CREATE SEQUENCE \"{schema}\".test_time
                     MINVALUE -9223372036854775807 START 0;
                 CREATE FUNCTION \"{schema}\".clock_timestamp() RETURNS timestamptz
                 LANGUAGE plpgsql VOLATILE AS $$
                 DECLARE
                     micros bigint := last_value FROM \"{schema}\".test_time;
                 BEGIN
                     RETURN (timestamp 'epoch'
                         + make_interval(days => (micros / 86400000000)::integer)
                         + micros % 86400000000 * interval '1 microsecond') AT TIME ZONE 'UTC';
                 END $$;"
            )
        })
    }

    /// A schema whose time is the server's.
    pub fn in_real_time() -> Self {
        Self::with(|_| String::new())
    }

    fn with(contents: impl FnOnce(&str) -> String) -> Self {
        let url = std::env::var("DATABASE_URL").unwrap_or_default();
        assert!(
            !url.is_empty(),
            "DATABASE_URL is not set, and this test needs Postgres: run scripts/test, or \
             scripts/postgres cargo nextest run --all-features"
        );
        let options: PgConnectOptions = url.parse().expect("DATABASE_URL is no Postgres URL");
        let random = u128::from_be_bytes(*Token::random().as_bytes());
        let schema = format!("idempotency_test_{random:032x}");
        let creation = format!("CREATE SCHEMA \"{schema}\"; {}", contents(&schema));
        let keeper = Keeper {
            schema: schema.clone(),
            // Nobody misses what the keeper wrote when the server crashes.
            options: options.clone().options([("synchronous_commit", "off")]),
        };
        let (ready, is_ready) = mpsc::sync_channel(1);
        let (orders, ordered) = mpsc::channel();
        let thread = thread::spawn(move || keeper.keep(&creation, &ready, &ordered));
        let database = Self {
            options: options
                .options([("search_path", format!("\"{schema}\",pg_catalog"))])
                .application_name(&schema),
            schema,
            orders: Some(orders),
            thread: Some(thread),
            pools: AtomicUsize::new(0),
        };
        wait(&is_ready, "make a schema");
        database
    }

    /// Its name. Connections of its pools have it as their `application_name` too.
    pub fn schema(&self) -> &str {
        &self.schema
    }

    /// How to connect so that the schema is found first, and its clock before the server's.
    pub fn options(&self) -> PgConnectOptions {
        self.options.clone()
    }

    /// A pool such as one process has. Every other one does not look at a connection before it
    /// gives it out.
    pub fn pool(&self) -> PgPool {
        let looks = self.pools.fetch_add(1, Ordering::SeqCst).is_multiple_of(2);
        PgPoolOptions::new()
            .max_connections(4)
            .test_before_acquire(looks)
            .connect_lazy_with(self.options())
    }

    /// One connection.
    pub async fn connect(&self) -> PgConnection {
        self.options.connect().await.unwrap()
    }

    /// Runs statements on a connection of its own.
    pub async fn run(&self, statements: &str) {
        run(&mut self.connect().await, statements).await.unwrap();
    }

    /// Every row of every table as text, with bytes that are readable as what they are.
    pub async fn rows(&self) -> Vec<u8> {
        let mut connection = self.connect().await;
        run(&mut connection, "SET bytea_output = escape")
            .await
            .unwrap();
        let tables = sqlx::query_scalar("SELECT tablename FROM pg_tables WHERE schemaname = $1")
            .bind(&self.schema)
            .fetch_all(&mut connection);
        let tables: Vec<String> = tables.await.unwrap();
        let mut all = Vec::new();
        for table in tables {
            let rows = AssertSqlSafe(format!("SELECT t::text FROM \"{table}\" t"));
            let rows: Vec<String> = sqlx::query_scalar(rows)
                .fetch_all(&mut connection)
                .await
                .unwrap();
            all.extend(rows.concat().into_bytes());
        }
        all
    }

    /// Sets what `clock_timestamp()` answers, for every statement that begins after this returns.
    pub fn set_time(&self, now: Timestamp) {
        let (done, is_done) = mpsc::sync_channel(1);
        let orders = self.orders.as_ref().unwrap();
        orders.send((now, done)).expect("the keeper is gone");
        wait(&is_done, "set the time");
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        // The keeper ends without orders, and is waited for: the process may be about to end.
        self.orders = None;
        let kept = self.thread.take().unwrap().join();
        if kept.is_err() && !thread::panicking() {
            panic!("the schema of this test was not kept; see above");
        }
    }
}

fn wait(done: &Receiver<()>, what: &str) {
    match done.recv_timeout(PATIENCE) {
        Ok(()) => {}
        Err(RecvTimeoutError::Timeout) => panic!("Postgres did not {what} in time"),
        Err(RecvTimeoutError::Disconnected) => panic!("Postgres did not {what}; see above"),
    }
}

/// What runs in the thread.
struct Keeper {
    schema: String,
    options: PgConnectOptions,
}

impl Keeper {
    fn keep(self, creation: &str, ready: &SyncSender<()>, orders: &Receiver<Order>) {
        let runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = { runtime }.enable_all().build().unwrap();
        runtime.block_on(async {
            let mut connection = self.options.connect().await.expect("no Postgres");
            run(&mut connection, creation).await.unwrap();
            ready.send(()).unwrap();
            while let Ok((now, done)) = orders.recv() {
                let set = format!(
                    "SELECT setval('\"{}\".test_time', {})",
                    self.schema,
                    now.as_micros()
                );
                run(&mut connection, &set).await.unwrap();
                // A test that panics does not wait.
                let _ = done.send(());
            }
            self.drop_schema(&mut connection).await;
        });
    }

    /// Stores may still be at work in it, and a statement of theirs in the way.
    async fn drop_schema(&self, connection: &mut PgConnection) {
        let drop = format!(
            "SET lock_timeout = '2s'; DROP SCHEMA \"{}\" CASCADE",
            self.schema
        );
        for _ in 0..5 {
            if run(connection, &drop).await.is_ok() {
                return;
            }
        }
        eprintln!("the schema {} could not be dropped", self.schema);
    }
}

async fn run(connection: &mut PgConnection, statements: &str) -> sqlx::Result<()> {
    let statements = sqlx::raw_sql(AssertSqlSafe(statements.to_owned()));
    statements.execute(connection).await.map(drop)
}

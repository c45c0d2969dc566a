//! A database with a table that handlers have effects in, a store on it, and ways to look at both behind
//! the service's back.

use std::{future::Future, path::PathBuf, sync::Arc, time::Duration};

use sqlx::{
    AssertSqlSafe, ConnectOptions, PgConnection, PgPool, Postgres, Sqlite, SqliteConnection,
    sqlite::SqliteConnectOptions,
};
use tempfile::TempDir;
use tokio::time::sleep;
use tower_idempotency::{
    IdempotencyKey, IdempotencyLayer, PostgresStore, Record, RecordId, Scope, SqliteStore, State,
    Tx, TxDatabase,
    store::{Checkpoints, Inspect, JoinsTransaction, TransactionalStore},
};

use crate::support::{clock::TestClock, database::Database};

pub const LEASE: Duration = Duration::from_secs(30);

const TABLES: &str = "CREATE TABLE effects (key text NOT NULL, amount bigint NOT NULL);
    CREATE TABLE accounts (name text PRIMARY KEY, balance bigint NOT NULL);
    INSERT INTO accounts VALUES ('a', 100), ('b', 100)";

/// A kind of database, with what sqlx cannot do for both alike.
pub trait Db: TxDatabase<Connection: JoinsTransaction> {
    type Store: TransactionalStore<Database = Self>;

    const IS_POSTGRES: bool;

    fn place(in_real_time: bool) -> Place;

    fn open(place: &Place) -> impl Future<Output = Self::Store> + Send;

    fn connect(place: &Place) -> impl Future<Output = Self::Connection> + Send;

    /// How many rows a statement changed.
    fn run(
        connection: &mut Self::Connection,
        statement: &str,
    ) -> impl Future<Output = sqlx::Result<u64>> + Send;

    /// The number a statement answers.
    fn value(
        connection: &mut Self::Connection,
        statement: &str,
    ) -> impl Future<Output = sqlx::Result<i64>> + Send;

    /// The same with the handler's transaction as the executor.
    fn run_in(tx: &mut Tx<Self>, statement: &str)
    -> impl Future<Output = sqlx::Result<u64>> + Send;

    fn value_in(
        tx: &mut Tx<Self>,
        statement: &str,
    ) -> impl Future<Output = sqlx::Result<i64>> + Send;
}

macro_rules! statements {
    () => {
        async fn run(connection: &mut Self::Connection, statement: &str) -> sqlx::Result<u64> {
            let statement = sqlx::raw_sql(AssertSqlSafe(statement.to_owned()));
            Ok(statement.execute(connection).await?.rows_affected())
        }

        async fn value(connection: &mut Self::Connection, statement: &str) -> sqlx::Result<i64> {
            let statement = AssertSqlSafe(statement.to_owned());
            sqlx::query_scalar(statement).fetch_one(connection).await
        }

        async fn run_in(tx: &mut Tx<Self>, statement: &str) -> sqlx::Result<u64> {
            let statement = AssertSqlSafe(statement.to_owned());
            Ok(sqlx::query(statement).execute(tx).await?.rows_affected())
        }

        async fn value_in(tx: &mut Tx<Self>, statement: &str) -> sqlx::Result<i64> {
            let statement = AssertSqlSafe(statement.to_owned());
            sqlx::query_scalar(statement).fetch_one(tx).await
        }
    };
}

impl Db for Postgres {
    type Store = PostgresStore;

    const IS_POSTGRES: bool = true;

    fn place(in_real_time: bool) -> Place {
        if in_real_time {
            return Place::new(Data::Postgres(Arc::new(Database::in_real_time())), None);
        }
        let database = Arc::new(Database::new());
        let clock = TestClock::of(database.clone());
        Place::new(Data::Postgres(database), Some(clock))
    }

    async fn open(place: &Place) -> PostgresStore {
        open_postgres(place.database().pool()).await
    }

    async fn connect(place: &Place) -> PgConnection {
        place.database().connect().await
    }

    statements!();
}

impl Db for Sqlite {
    type Store = SqliteStore;

    const IS_POSTGRES: bool = false;

    fn place(in_real_time: bool) -> Place {
        let folder = tempfile::tempdir().unwrap();
        let clock = (!in_real_time).then(TestClock::new);
        Place::new(Data::Sqlite(folder), clock)
    }

    async fn open(place: &Place) -> SqliteStore {
        let options = SqliteStore::options(place.file());
        let options = match &place.clock {
            Some(clock) => options.clock(clock.clone()),
            None => options,
        };
        options.open().await.unwrap()
    }

    async fn connect(place: &Place) -> SqliteConnection {
        let file = SqliteConnectOptions::new().filename(place.file());
        let file = file.create_if_missing(true);
        file.busy_timeout(Duration::from_secs(10))
            .connect()
            .await
            .unwrap()
    }

    statements!();
}

/// Where the data are, and what time it is there.
pub struct Place {
    data: Data,
    clock: Option<TestClock>,
}

enum Data {
    Sqlite(TempDir),
    Postgres(Arc<Database>),
}

impl Place {
    fn new(data: Data, clock: Option<TestClock>) -> Self {
        Self { data, clock }
    }

    pub fn database(&self) -> &Arc<Database> {
        match &self.data {
            Data::Postgres(database) => database,
            Data::Sqlite(_) => panic!("this is SQLite"),
        }
    }

    pub fn file(&self) -> PathBuf {
        match &self.data {
            Data::Sqlite(folder) => folder.path().join("service.db"),
            Data::Postgres(_) => panic!("this is Postgres"),
        }
    }
}

pub async fn open_postgres(pool: PgPool) -> PostgresStore {
    PostgresStore::options().migrate().open(pool).await.unwrap()
}

/// The tables, and a store beside them.
pub struct Ground<D: Db> {
    pub place: Place,
    pub store: D::Store,
}

impl<D: Db> Ground<D> {
    /// Where time goes by only when a test says so.
    pub async fn new() -> Self {
        Self::at(D::place(false)).await
    }

    pub async fn in_real_time() -> Self {
        Self::at(D::place(true)).await
    }

    async fn at(place: Place) -> Self {
        let store = D::open(&place).await;
        let mut connection = D::connect(&place).await;
        D::run(&mut connection, TABLES).await.unwrap();
        Self { place, store }
    }

    /// A layer as another process would have it.
    pub async fn elsewhere(&self) -> IdempotencyLayer<D::Store> {
        transactional(&D::open(&self.place).await)
    }

    pub fn layer(&self) -> IdempotencyLayer<D::Store> {
        transactional(&self.store)
    }

    pub fn advance(&self, by: Duration) {
        let clock = self.place.clock.as_ref();
        clock.expect("time goes by itself here").advance(by);
    }

    pub async fn run(&self, statement: &str) -> u64 {
        let mut connection = D::connect(&self.place).await;
        D::run(&mut connection, statement).await.unwrap()
    }

    pub async fn value(&self, statement: &str) -> i64 {
        let mut connection = D::connect(&self.place).await;
        D::value(&mut connection, statement).await.unwrap()
    }

    /// How many effects of this key are committed.
    pub async fn effects(&self, key: &str) -> i64 {
        self.value(&format!("SELECT count(*) FROM effects WHERE key = '{key}'"))
            .await
    }

    pub async fn record(&self, key: &str) -> Option<Record> {
        self.store.get(&id(key)).await.unwrap()
    }

    /// What a run has left behind: how many effects, and the state of its record.
    pub async fn left(&self, key: &str) -> (i64, Option<State>) {
        let record = self.record(key).await;
        (self.effects(key).await, record.map(|record| record.state))
    }

    /// Asks for at most ten seconds, until this is left.
    pub async fn comes_to(&self, key: &str, expected: (i64, Option<State>)) {
        for _ in 0..1_000 {
            if self.left(key).await == expected {
                return;
            }
            sleep(Duration::from_millis(10)).await;
        }
        panic!("{key}: {:?}, not {expected:?}", self.left(key).await);
    }
}

pub fn transactional<S: TransactionalStore>(store: &S) -> IdempotencyLayer<S> {
    plain(store).transactional()
}

pub fn plain<S: Inspect + Checkpoints>(store: &S) -> IdempotencyLayer<S> {
    IdempotencyLayer::new(store.clone())
        .single_tenant()
        .lease(LEASE)
}

pub fn id(key: &str) -> RecordId {
    RecordId::new(Scope::shared(), IdempotencyKey::new(key))
}

/// Writes one test per database: `on_both! { async fn name<D: Db>() { … } }` becomes `name::postgres` and
/// `name::sqlite`.
#[macro_export]
macro_rules! on_both {
    ($($(#[$meta:meta])* async fn $name:ident<$db:ident: Db>() $body:block)*) => { $(
        mod $name {
            #[allow(unused_imports)]
            use super::*;

            async fn check<$db: $crate::ground::Db>() $body

            $(#[$meta])*
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn postgres() {
                check::<sqlx::Postgres>().await;
            }

            $(#[$meta])*
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn sqlite() {
                check::<sqlx::Sqlite>().await;
            }
        }
    )* };
}

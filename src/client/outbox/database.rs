//! What an outbox asks of a database: the statements, bound, sent and read back.

use std::future::Future;

use bytes::Bytes;
use sqlx::{Executor, Pool, Row as _, SqlStr};

use super::texts::Dialect;
use crate::{TxDatabase, bounded::Boxed};

/// The databases an outbox can be kept in: `sqlx::Postgres` and `sqlx::Sqlite`. Sealed.
pub trait OutboxDatabase: TxDatabase + sealed::Statements {}

/// A value of a statement.
#[derive(Clone)]
#[expect(missing_debug_implementations, reason = "it holds keys and bodies")]
pub enum Value {
    Text(String),
    Bytes(Option<Vec<u8>>),
    Number(Option<i64>),
}

/// A row as it is stored.
#[derive(Clone)]
#[expect(missing_debug_implementations, reason = "it holds keys and bodies")]
pub struct Row {
    pub(super) reference: String,
    pub(super) key: Vec<u8>,
    pub(super) method: String,
    pub(super) uri: String,
    pub(super) request: Bytes,
    pub(super) state: i64,
    pub(super) begun: i64,
    pub(super) attempts: i64,
    pub(super) attempted: Option<i64>,
    pub(super) settled: Option<i64>,
    pub(super) status: Option<i64>,
    pub(super) result: Option<Bytes>,
    pub(super) token: Vec<u8>,
    /// When it was read.
    pub(super) now: i64,
}

pub(super) mod sealed {
    use super::{Boxed, Dialect, Executor, Future, Pool, Row, SqlStr, Value};

    /// All rows are always read: in SQLite a statement that is left before its end has not committed.
    pub trait Statements: sqlx::Database {
        const DIALECT: Dialect;

        /// Creates what is missing, also where several processes do so at once.
        fn create(
            pool: &Pool<Self>,
            table: &str,
            schema: SqlStr,
        ) -> impl Future<Output = Result<(), sqlx::Error>> + Send;

        /// The rows that a statement answers. Boxed, because a future that holds an executor of the caller's has
        /// no type that could be sent to another thread.
        fn rows<'e, 'c: 'e, E: Executor<'c, Database = Self>>(
            executor: E,
            text: &SqlStr,
            values: Vec<Value>,
        ) -> Boxed<'e, Result<Vec<Row>, sqlx::Error>>;

        /// The same on a connection of the pool.
        fn pool_rows(
            pool: &Pool<Self>,
            text: &SqlStr,
            values: Vec<Value>,
        ) -> impl Future<Output = Result<Vec<Row>, sqlx::Error>> + Send;

        /// References and times.
        fn turns(
            pool: &Pool<Self>,
            text: &SqlStr,
            values: Vec<Value>,
        ) -> impl Future<Output = Result<Vec<(String, i64)>, sqlx::Error>> + Send;

        /// The numbers of the first row, if there is one.
        fn numbers(
            pool: &Pool<Self>,
            text: &SqlStr,
            values: Vec<Value>,
        ) -> impl Future<Output = Result<Option<Vec<i64>>, sqlx::Error>> + Send;

        /// How many rows a statement changed.
        fn changed(
            pool: &Pool<Self>,
            text: &SqlStr,
            values: Vec<Value>,
        ) -> impl Future<Output = Result<u64, sqlx::Error>> + Send;
    }
}

/// Written once for both: sqlx's queries cannot be spoken of in general here.
macro_rules! statements {
    ($database:ty, $dialect:expr, $create:path) => {
        impl OutboxDatabase for $database {}

        impl sealed::Statements for $database {
            const DIALECT: Dialect = $dialect;

            async fn create(
                pool: &Pool<Self>,
                table: &str,
                schema: SqlStr,
            ) -> Result<(), sqlx::Error> {
                $create(pool, table, schema).await
            }

            fn rows<'e, 'c: 'e, E: Executor<'c, Database = Self>>(
                executor: E,
                text: &SqlStr,
                values: Vec<Value>,
            ) -> Boxed<'e, Result<Vec<Row>, sqlx::Error>> {
                let rows = executor.fetch_all(bound!($database, text, values));
                let read = |row: &<Self as sqlx::Database>::Row| {
                    Ok(Row {
                        reference: row.try_get(0)?,
                        key: row.try_get(1)?,
                        method: row.try_get(2)?,
                        uri: row.try_get(3)?,
                        request: row.try_get::<Vec<u8>, _>(4)?.into(),
                        state: row.try_get(5)?,
                        begun: row.try_get(6)?,
                        attempts: row.try_get(7)?,
                        attempted: row.try_get(8)?,
                        settled: row.try_get(9)?,
                        status: row.try_get(10)?,
                        result: row.try_get::<Option<Vec<u8>>, _>(11)?.map(Bytes::from),
                        token: row.try_get(12)?,
                        now: row.try_get(13)?,
                    })
                };
                Box::pin(async move { rows.await?.iter().map(read).collect() })
            }

            async fn pool_rows(
                pool: &Pool<Self>,
                text: &SqlStr,
                values: Vec<Value>,
            ) -> Result<Vec<Row>, sqlx::Error> {
                <Self as sealed::Statements>::rows(pool, text, values).await
            }

            async fn turns(
                pool: &Pool<Self>,
                text: &SqlStr,
                values: Vec<Value>,
            ) -> Result<Vec<(String, i64)>, sqlx::Error> {
                let rows = bound!($database, text, values).fetch_all(pool).await?;
                rows.iter()
                    .map(|row| Ok((row.try_get(0)?, row.try_get(1)?)))
                    .collect()
            }

            async fn numbers(
                pool: &Pool<Self>,
                text: &SqlStr,
                values: Vec<Value>,
            ) -> Result<Option<Vec<i64>>, sqlx::Error> {
                let rows = bound!($database, text, values).fetch_all(pool).await?;
                let numbers = |row: &<Self as sqlx::Database>::Row| {
                    (0..row.len()).map(|at| row.try_get(at)).collect()
                };
                rows.first().map(numbers).transpose()
            }

            async fn changed(
                pool: &Pool<Self>,
                text: &SqlStr,
                values: Vec<Value>,
            ) -> Result<u64, sqlx::Error> {
                let done = bound!($database, text, values).execute(pool).await?;
                Ok(done.rows_affected())
            }
        }
    };
}

macro_rules! bound {
    ($database:ty, $text:expr, $values:expr) => {
        $values.into_iter().fold(
            sqlx::query::<$database>($text.clone()),
            |query, value| match value {
                Value::Text(text) => query.bind(text),
                Value::Bytes(bytes) => query.bind(bytes),
                Value::Number(number) => query.bind(number),
            },
        )
    };
}

#[cfg(feature = "sqlite")]
statements!(
    sqlx::Sqlite,
    Dialect {
        // Milliseconds are all SQLite's clock has.
        now: "(CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000)",
        purge: "DELETE FROM {table} WHERE reference IN ({due})",
        schema: include_str!("sqlite.sql"),
    },
    create_in_sqlite
);

#[cfg(feature = "postgres")]
statements!(
    sqlx::Postgres,
    Dialect {
        now: "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint",
        // An array, since a subselect might be carried out once per row. What others have locked is left to the
        // next purge.
        purge: "DELETE FROM {table} WHERE reference = ANY (ARRAY({due} FOR UPDATE SKIP LOCKED)) AND state <> 1",
        schema: include_str!("postgres.sql"),
    },
    create_in_postgres
);

/// With the write lock from the start, so that of several processes one creates and the others find.
#[cfg(feature = "sqlite")]
async fn create_in_sqlite(
    pool: &Pool<sqlx::Sqlite>,
    _table: &str,
    schema: SqlStr,
) -> Result<(), sqlx::Error> {
    let mut transaction = pool.begin_with("BEGIN IMMEDIATE").await?;
    sqlx::raw_sql(schema).execute(&mut *transaction).await?;
    transaction.commit().await
}

/// Under a lock of the database: `IF NOT EXISTS` alone fails where two do it at once.
#[cfg(feature = "postgres")]
async fn create_in_postgres(
    pool: &Pool<sqlx::Postgres>,
    table: &str,
    schema: SqlStr,
) -> Result<(), sqlx::Error> {
    // Whoever may not create tables need not, if they are there.
    let there: bool = sqlx::query_scalar("SELECT to_regclass(quote_ident($1)) IS NOT NULL")
        .bind(table)
        .fetch_one(pool)
        .await?;
    if there {
        return Ok(());
    }
    let mut transaction = pool
        .begin_with("BEGIN ISOLATION LEVEL READ COMMITTED")
        .await?;
    sqlx::query("SELECT pg_advisory_xact_lock(hashtextextended($1, 0))")
        .bind(format!("tower-idempotency outbox {table}"))
        .execute(&mut *transaction)
        .await?;
    sqlx::raw_sql(schema).execute(&mut *transaction).await?;
    transaction.commit().await
}

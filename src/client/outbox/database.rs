//! What an outbox asks of a database: the statements, bound, sent and read back.

use std::{future::Future, time::Duration};

use bytes::Bytes;
use sqlx::{Executor, Pool, Row as _, SqlStr};
use tokio::time::sleep;

use super::texts::Dialect;
use crate::{TxDatabase, bounded::Boxed, maintenance::jittered, transaction::is_conflict};

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
    pub(super) reference: Text,
    pub(super) key: Vec<u8>,
    pub(super) method: Text,
    pub(super) uri: Text,
    pub(super) state: i64,
    pub(super) begun: i64,
    pub(super) attempts: i64,
    pub(super) attempted: Option<i64>,
    pub(super) not_before: Option<i64>,
    pub(super) held: Option<i64>,
    pub(super) settled: Option<i64>,
    pub(super) status: Option<i64>,
    pub(super) token: Vec<u8>,
    pub(super) request: Bytes,
    pub(super) result: Option<Bytes>,
    /// When it was read.
    pub(super) now: i64,
}

/// Text as it is stored. A damaged one must not keep the other rows of a statement from being read.
#[derive(Clone)]
#[expect(missing_debug_implementations, reason = "it holds references and URIs")]
pub struct Text {
    /// With replacement characters for what is not text.
    pub(super) shown: String,
    /// What is stored, where it is no text.
    damaged: Option<Vec<u8>>,
}

impl Text {
    fn of(stored: Vec<u8>) -> Self {
        match String::from_utf8(stored) {
            Ok(shown) => Self {
                shown,
                damaged: None,
            },
            Err(error) => Self {
                shown: String::from_utf8_lossy(error.as_bytes()).into_owned(),
                damaged: Some(error.into_bytes()),
            },
        }
    }

    pub(super) fn is_sound(&self) -> bool {
        self.damaged.is_none()
    }

    /// What is stored.
    pub(super) fn stored(&self) -> &[u8] {
        self.damaged.as_deref().unwrap_or(self.shown.as_bytes())
    }
}

pub(super) mod sealed {
    use super::{Boxed, Dialect, Executor, Future, Pool, Row, SqlStr, Text, Value};

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

        /// References.
        fn references(
            pool: &Pool<Self>,
            text: &SqlStr,
            values: Vec<Value>,
        ) -> impl Future<Output = Result<Vec<Text>, sqlx::Error>> + Send;

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
                        reference: text!(row, 0),
                        key: row.try_get(1)?,
                        method: text!(row, 2),
                        uri: text!(row, 3),
                        state: row.try_get(4)?,
                        begun: row.try_get(5)?,
                        attempts: row.try_get(6)?,
                        attempted: row.try_get(7)?,
                        not_before: row.try_get(8)?,
                        held: row.try_get(9)?,
                        settled: row.try_get(10)?,
                        status: row.try_get(11)?,
                        token: row.try_get(12)?,
                        request: row.try_get::<Vec<u8>, _>(13)?.into(),
                        result: row.try_get::<Option<Vec<u8>>, _>(14)?.map(Bytes::from),
                        now: row.try_get(15)?,
                    })
                };
                Box::pin(async move { rows.await?.iter().map(read).collect() })
            }

            async fn pool_rows(
                pool: &Pool<Self>,
                text: &SqlStr,
                values: Vec<Value>,
            ) -> Result<Vec<Row>, sqlx::Error> {
                through_conflicts(|| <Self as sealed::Statements>::rows(pool, text, values.clone()))
                    .await
            }

            async fn references(
                pool: &Pool<Self>,
                text: &SqlStr,
                values: Vec<Value>,
            ) -> Result<Vec<Text>, sqlx::Error> {
                let rows =
                    through_conflicts(|| bound!($database, text, values.clone()).fetch_all(pool));
                rows.await?.iter().map(|row| Ok(text!(row, 0))).collect()
            }

            async fn numbers(
                pool: &Pool<Self>,
                text: &SqlStr,
                values: Vec<Value>,
            ) -> Result<Option<Vec<i64>>, sqlx::Error> {
                let rows =
                    through_conflicts(|| bound!($database, text, values.clone()).fetch_all(pool));
                let numbers = |row: &<Self as sqlx::Database>::Row| {
                    (0..row.len()).map(|at| row.try_get(at)).collect()
                };
                rows.await?.first().map(numbers).transpose()
            }

            async fn changed(
                pool: &Pool<Self>,
                text: &SqlStr,
                values: Vec<Value>,
            ) -> Result<u64, sqlx::Error> {
                let done =
                    through_conflicts(|| bound!($database, text, values.clone()).execute(pool));
                Ok(done.await?.rows_affected())
            }
        }
    };
}

/// How often a statement is sent that others are in the way of.
const CONFLICTS: u32 = 10;

/// Sends a statement that is a transaction of its own again when it could not be put in order with those of others
/// (40001, under a stricter isolation) or was chosen to end a deadlock (40P01): nothing of it took place.
async fn through_conflicts<T, F>(statement: impl Fn() -> F) -> Result<T, sqlx::Error>
where
    F: Future<Output = Result<T, sqlx::Error>>,
{
    let mut times = 0;
    loop {
        let error = match statement().await {
            Ok(done) => return Ok(done),
            Err(error) => error,
        };
        times += 1;
        if !is_conflict(&error) || times == CONFLICTS {
            return Err(error);
        }
        sleep(jittered(Duration::from_millis(5) * times)).await;
    }
}

/// Whatever bytes it has.
macro_rules! text {
    ($row:expr, $at:expr) => {
        Text::of($row.try_get_unchecked::<Vec<u8>, _>($at)?)
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
        take_turns: "UPDATE {table} SET turn = {now} WHERE reference IN ({waiting}) RETURNING reference",
        stored: "CAST($2 AS TEXT)",
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
        take_turns: "UPDATE {table} SET turn = {now} WHERE reference = ANY (ARRAY({waiting} FOR UPDATE SKIP LOCKED)) AND state = 1 RETURNING reference",
        stored: "convert_from($2, 'UTF8')",
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
    // Whoever may not create tables need not, if they are there: in the schema in which they would be created, and
    // not in one that comes later in the search path and may be somebody else's.
    let there: bool = sqlx::query_scalar(
        "SELECT to_regclass(quote_ident(current_schema()) || '.' || quote_ident($1)) IS NOT NULL",
    )
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

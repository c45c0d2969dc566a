//! The tables: creating them, and whether they are ours.

use sqlx::{Connection, PgConnection, Row};

use super::{
    failure::{judged, unavailable},
    texts::{Names, Texts, safe},
};
use crate::store::{
    StoreErrorKind,
    group::{Failure, Reach},
};

const VERSION: i64 = 1;

/// Creates the tables where there are none.
///
/// Under a lock of the database, so that of many instances that start at once one creates them and the
/// others find them.
pub(super) async fn migrate(connection: &mut PgConnection, names: &Names) -> Result<(), Failure> {
    let mut transaction = connection
        .begin_with("BEGIN ISOLATION LEVEL READ COMMITTED")
        .await
        .map_err(judged)?;
    let schema = names.schema.as_deref().unwrap_or_default();
    let lock = format!("tower-idempotency {schema}.{}", names.prefix);
    sqlx::query("SELECT pg_advisory_xact_lock(hashtextextended($1, 0))")
        .bind(lock)
        .execute(&mut *transaction)
        .await
        .map_err(judged)?;
    let exists: bool = sqlx::query_scalar("SELECT to_regnamespace(quote_ident($1)) IS NOT NULL")
        .bind(schema)
        .fetch_one(&mut *transaction)
        .await
        .map_err(judged)?;
    if !exists {
        sqlx::raw_sql(safe(format!("CREATE SCHEMA IF NOT EXISTS \"{schema}\"")))
            .execute(&mut *transaction)
            .await
            .map_err(uncreated)?;
    }
    let there: bool = sqlx::query_scalar(names.find_meta())
        .fetch_one(&mut *transaction)
        .await
        .map_err(judged)?;
    if !there {
        sqlx::raw_sql(safe(names.tables()))
            .execute(&mut *transaction)
            .await
            .map_err(uncreated)?;
    }
    transaction.commit().await.map_err(judged)
}

/// The same code means another thing while tables are created.
fn uncreated(error: sqlx::Error) -> Failure {
    let code = error.as_database_error().and_then(|error| error.code());
    let message = match code.as_deref() {
        Some("42501") => {
            "the Postgres role may not create tables here; grant it CREATE on the schema, or create the tables from postgres.sql with another role and open the store without `migrate()`"
        }
        Some("42P07") => {
            "some of the Postgres tables exist already, and are not this crate's; choose another schema or table_prefix"
        }
        _ => return judged(error),
    };
    Failure {
        kind: StoreErrorKind::Schema,
        reach: Reach::Connection,
        message,
        ..judged(error)
    }
}

/// Where tables land that nobody chose a schema for.
pub(super) async fn current(connection: &mut PgConnection) -> Result<String, Failure> {
    let schema: Option<String> = sqlx::query_scalar("SELECT current_schema()::text")
        .fetch_one(connection)
        .await
        .map_err(judged)?;
    schema.ok_or_else(|| {
        Failure::new(StoreErrorKind::Schema,
            Reach::Connection,
            "the search_path of the Postgres role names no schema that exists; set it, or choose a schema with `schema`",
        )
    })
}

/// Refuses tables that are missing, not ours, not of this version or not ours to write. Answers whether
/// the database runs at read committed.
pub(super) async fn check(connection: &mut PgConnection, texts: &Texts) -> Result<bool, Failure> {
    let row = sqlx::query(texts.check.clone())
        .fetch_one(connection)
        .await
        .map_err(judged)?;
    let schema = |message| {
        Err(Failure::new(
            StoreErrorKind::Schema,
            Reach::Connection,
            message,
        ))
    };
    match row.try_get::<Option<i64>, _>("version").map_err(judged)? {
        Some(VERSION) => {}
        Some(newer) if newer > VERSION => {
            return schema(
                "the Postgres tables were made by a newer version of tower-idempotency; upgrade this service",
            );
        }
        _ => {
            return schema(
                "the Postgres tables of these names are not this crate's; choose another schema or table_prefix",
            );
        }
    }
    if row.try_get("standby").map_err(judged)? {
        return Err(unavailable(
            "the Postgres server is a standby and takes no writes; connect to the primary",
        ));
    }
    if row.try_get("read_only").map_err(judged)? {
        return Err(unavailable(
            "Postgres takes no writes from this role: default_transaction_read_only is on; turn it off, or connect to the primary",
        ));
    }
    if !row.try_get::<bool, _>("privileged").map_err(judged)? {
        return schema(
            "the Postgres role lacks a right; grant it SELECT, INSERT, UPDATE and DELETE on the idempotency tables",
        );
    }
    if row
        .try_get::<&str, _>("synchronous_commit")
        .map_err(judged)?
        == "off"
    {
        tracing::warn!(
            "synchronous_commit is off: Postgres acknowledges claims and answers that a crash of the server can lose, and a retry would then run again"
        );
    }
    let isolation: &str = row.try_get("isolation").map_err(judged)?;
    Ok(isolation == "read committed")
}

//! What Postgres' error codes mean for a store
//! (<https://www.postgresql.org/docs/current/errcodes-appendix.html>).

use std::{error::Error, fmt, sync::Arc};

use sqlx::error::DatabaseError;

use crate::store::{
    StoreErrorKind,
    group::{Failure, Reach},
};

/// Out of reach: whatever was under way may or may not have happened.
pub(super) fn unavailable(message: &'static str) -> Failure {
    Failure::new(StoreErrorKind::Unavailable, Reach::Connection, message)
}

pub(super) fn judged(error: sqlx::Error) -> Failure {
    let told = error.as_database_error().and_then(Told::of);
    let judged = match &told {
        Some(told) => judge_code(&told.code),
        None => judge_connection(&error),
    };
    Failure {
        source: Some(match told {
            Some(told) => Arc::new(told),
            None => Arc::new(error),
        }),
        ..judged
    }
}

/// Classes of errors that are about a value: data, constraints, and what a trigger raises.
const DATA: [&str; 3] = ["22", "23", "P0"];

/// Classes of errors whose messages show no value: about connections, rights, names and the server.
const PLAIN: [&str; 11] = [
    "08", "25", "28", "3D", "3F", "40", "42", "53", "55", "57", "58",
];

/// What the server said, without the values it said it of: a detail may show a whole row, with its scope
/// and key.
#[derive(Debug)]
struct Told {
    code: String,
    message: Option<String>,
    constraint: Option<String>,
}

impl Told {
    fn of(error: &(dyn DatabaseError + 'static)) -> Option<Self> {
        let code = error.code()?.into_owned();
        let is_plain = PLAIN.iter().any(|class| code.starts_with(class));
        Some(Self {
            message: is_plain.then(|| error.message().to_owned()),
            constraint: error.constraint().map(str::to_owned),
            code,
        })
    }
}

impl fmt::Display for Told {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SQLSTATE {}", self.code)?;
        if let Some(message) = &self.message {
            write!(f, ": {message}")?;
        }
        if let Some(constraint) = &self.constraint {
            write!(f, " (constraint {constraint})")?;
        }
        Ok(())
    }
}

impl Error for Told {}

/// Whether the connection is gone, and another one may do. The statement may have been carried out.
pub(super) fn broke(error: &sqlx::Error) -> bool {
    match error.as_database_error().and_then(|error| error.code()) {
        // Ended by the server or by its administrator; a connection a pooler has mixed up.
        Some(code) => {
            code.starts_with("08")
                || ["57P01", "57P02", "57P03", "57P05", "26000"].contains(&&*code)
        }
        None => matches!(error, sqlx::Error::Io(_) | sqlx::Error::Protocol(_)),
    }
}

fn judge_code(code: &str) -> Failure {
    use StoreErrorKind::{Corrupt, Invalid, Schema, Unavailable};
    let (kind, reach, message) = match code {
        "40001" | "40P01" => (
            Unavailable,
            Reach::Lock,
            "Postgres refused the transaction again and again for its neighbours' sake; lower default_transaction_isolation, or look for sessions that lock the idempotency tables",
        ),
        "55P03" => (
            Unavailable,
            Reach::Lock,
            "another session held a lock on the idempotency tables for all of lock_timeout",
        ),
        "42P01" | "3F000" => (
            Schema,
            Reach::Connection,
            "the Postgres tables are missing; open the store with `migrate()`, or create them from postgres.sql, and check schema, table_prefix and the database of the URL",
        ),
        "42703" | "42883" | "42804" => (
            Schema,
            Reach::Connection,
            "the Postgres tables have other columns than this crate's; choose another schema or table_prefix, or restore them",
        ),
        "42501" => (
            Schema,
            Reach::Connection,
            "the Postgres role lacks a right; grant it USAGE on the schema and SELECT, INSERT, UPDATE and DELETE on the idempotency tables",
        ),
        "25006" => (
            Unavailable,
            Reach::Connection,
            "the Postgres server takes no writes: it is a standby, or default_transaction_read_only is on; connect to the primary",
        ),
        "26000" | "42P05" => (
            Unavailable,
            Reach::Connection,
            "a prepared statement was lost between sqlx and Postgres; let the connection pooler keep prepared statements, or connect without it",
        ),
        "28000" | "28P01" => (
            Unavailable,
            Reach::Connection,
            "Postgres refused the user name or the password; check the URL",
        ),
        "3D000" => (
            Unavailable,
            Reach::Connection,
            "the Postgres server has no database of this name; check the URL",
        ),
        "53100" => (
            Unavailable,
            Reach::Connection,
            "the disk of the Postgres server is full; make room",
        ),
        "53300" => (
            Unavailable,
            Reach::Connection,
            "the Postgres server has no connection left; raise max_connections, or use smaller pools",
        ),
        "57014" => (
            Unavailable,
            Reach::Connection,
            "Postgres cancelled the statement: statement_timeout is too short for the idempotency tables, or somebody cancelled it",
        ),
        "XX001" | "XX002" => (
            Corrupt,
            Reach::Connection,
            "the Postgres tables or their indexes are damaged; see the server's log",
        ),
        // Only this value is refused; it may be too large for an index.
        _ if code.starts_with("54") || DATA.iter().any(|class| code.starts_with(class)) => (
            Invalid,
            Reach::Value,
            "Postgres refused the value: it holds a NUL character, is too large, or a constraint or trigger was added to the table",
        ),
        _ if ["08", "53", "57", "58", "XX"]
            .iter()
            .any(|class| code.starts_with(class)) =>
        {
            (
                Unavailable,
                Reach::Connection,
                "Postgres could not carry the statement out; see the server's log",
            )
        }
        // Of a trigger, perhaps, and about one value.
        _ => (
            Unavailable,
            Reach::Value,
            "Postgres could not carry the statement out; see the server's log",
        ),
    };
    Failure::new(kind, reach, message)
}

fn judge_connection(error: &sqlx::Error) -> Failure {
    if let sqlx::Error::Encode(_) = error {
        return Failure::new(
            StoreErrorKind::Invalid,
            Reach::Value,
            "the value cannot be sent to Postgres: it is too large",
        );
    }
    unavailable(match error {
        sqlx::Error::Configuration(_) => {
            "the Postgres URL cannot be understood; write postgres://user:password@host:port/database"
        }
        sqlx::Error::Tls(_) => {
            "no encrypted connection to Postgres; enable one of sqlx's tls features, or set sslmode in the URL"
        }
        sqlx::Error::PoolTimedOut => {
            "no connection to Postgres in time: the server cannot be reached, or the pool is too small for all who use it"
        }
        sqlx::Error::PoolClosed => "the pool of Postgres connections was closed",
        _ => "the connection to Postgres failed",
    })
}

//! What SQLite's result codes mean for a store (<https://www.sqlite.org/rescode.html>).

use std::{io, sync::Arc};

use crate::store::{
    StoreErrorKind,
    group::{Failure, Reach},
};

impl From<sqlx::Error> for Failure {
    fn from(error: sqlx::Error) -> Self {
        use StoreErrorKind::{Corrupt, Invalid, Schema, Unavailable};
        let (kind, reach, message) = match primary_code(&error) {
            _ if is_lock(&error) => (
                Unavailable,
                Reach::Lock,
                "another process held the SQLite database locked for all of busy_timeout; shorten its transactions or raise busy_timeout",
            ),
            // Too big, against a constraint, of another type: only this value is refused.
            Some(18..=20) => (
                Invalid,
                Reach::Value,
                "SQLite refused the value: it is too large, or a constraint or trigger was added to the table",
            ),
            Some(1) => (
                Schema,
                Reach::Connection,
                "the SQLite tables were changed or removed; restore them, or open another file",
            ),
            Some(3 | 8 | 23) => (
                Schema,
                Reach::Connection,
                "the SQLite database may not be written; check the permissions of the file and of its directory",
            ),
            Some(26) => (
                Schema,
                Reach::Connection,
                "the file is not an SQLite database; choose another path",
            ),
            Some(11) => (
                Corrupt,
                Reach::Connection,
                "the SQLite database file is damaged; restore it from a backup",
            ),
            Some(13) => (
                Unavailable,
                Reach::Connection,
                "the disk of the SQLite database is full; make room",
            ),
            Some(14) => (
                Unavailable,
                Reach::Connection,
                "the SQLite database cannot be opened; check that its directory exists and may be written",
            ),
            Some(_) => (
                Unavailable,
                Reach::Connection,
                "SQLite could not read or write its file",
            ),
            None => (
                Unavailable,
                Reach::Connection,
                "the SQLite connection failed",
            ),
        };
        Self {
            source: Some(Arc::new(error)),
            ..Failure::new(kind, reach, message)
        }
    }
}

/// Whether somebody else has the file locked: busy, locked, and the same on the way into the write-ahead
/// log.
pub(super) fn is_lock(error: &sqlx::Error) -> bool {
    matches!(primary_code(error), Some(5 | 6 | 15))
}

/// For a handler, whose transactions speak sqlx.
pub(super) fn told(failure: &Failure) -> sqlx::Error {
    let error = failure.error();
    match error.kind() {
        StoreErrorKind::Unavailable => sqlx::Error::Io(io::Error::other(error)),
        _ => sqlx::Error::Configuration(Box::new(error)),
    }
}

/// What went into a file that nobody finds any more is no promise.
pub(super) fn moved() -> Failure {
    Failure::new(
        StoreErrorKind::Unavailable,
        Reach::Connection,
        "the SQLite database file was moved, replaced or deleted; restore it",
    )
}

/// The primary result code: the low byte of the extended one.
pub(super) fn primary_code(error: &sqlx::Error) -> Option<i32> {
    let code = error.as_database_error()?.code()?;
    Some(code.parse::<i32>().ok()? & 0xff)
}

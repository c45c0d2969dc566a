//! Why an outbox could not do what it was asked.

use std::{error::Error, fmt};

use axum::{BoxError, body::Body, response::IntoResponse};
use http::{Response, StatusCode};

use crate::TxError;

/// An outbox could not do what it was asked.
///
/// Neither its text nor its `Debug` output shows what a row holds or what the database said.
/// [`source`](Error::source) is a [`TxError`] where the database failed, and its own source is what sqlx said.
///
/// As a response, for handlers that begin operations in their [`Tx`](crate::Tx): that of the [`TxError`], which
/// lets the layer run the handler again after a conflict; 500 for everything else.
pub struct OutboxError {
    kind: OutboxErrorKind,
    message: &'static str,
    source: Option<Source>,
}

enum Source {
    Database(TxError),
    Other(BoxError),
}

/// Of what sort an [`OutboxError`] is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OutboxErrorKind {
    /// The database could not do it, or is out of reach. Whether a write took place is not known; each may be
    /// sent again.
    Database,
    /// The reference, the operation or the result is against a rule or over a limit. Nothing was written.
    Invalid,
    /// There is no row of this reference.
    Missing,
    /// The row is in another state than this needs. Nothing was changed.
    State,
    /// The operation is older than the server keeps its key. Nothing was changed.
    Overdue,
    /// The row is sealed and the keys given do not open it, or it is not sealed and should be.
    Keys,
    /// The row is damaged, or of a newer version.
    Damaged,
}

impl OutboxError {
    pub(super) fn new(kind: OutboxErrorKind, message: &'static str) -> Self {
        Self {
            kind,
            message,
            source: None,
        }
    }

    pub(super) fn invalid(message: &'static str) -> Self {
        Self::new(OutboxErrorKind::Invalid, message)
    }

    pub(in crate::client) fn missing() -> Self {
        Self::new(
            OutboxErrorKind::Missing,
            "the outbox has no operation of this reference",
        )
    }

    pub(in crate::client) fn damaged() -> Self {
        Self::new(
            OutboxErrorKind::Damaged,
            "what the outbox holds of the operation is damaged",
        )
    }

    /// The statement may take place all the same, later.
    pub(in crate::client) fn slow() -> Self {
        Self::new(
            OutboxErrorKind::Database,
            "the outbox's database has not answered in the time a statement has",
        )
    }

    pub(in crate::client) fn reopened() -> Self {
        Self::new(
            OutboxErrorKind::State,
            "the operation was reopened after this was sent, and what came of it before changes nothing",
        )
    }

    pub(super) fn with_source(mut self, source: impl Into<BoxError>) -> Self {
        self.source = Some(Source::Other(source.into()));
        self
    }

    /// Of what sort it is.
    pub fn kind(&self) -> OutboxErrorKind {
        self.kind
    }

    /// What the database's failure was, if it was one.
    pub fn database(&self) -> Option<&TxError> {
        match &self.source {
            Some(Source::Database(error)) => Some(error),
            _ => None,
        }
    }
}

impl From<sqlx::Error> for OutboxError {
    fn from(error: sqlx::Error) -> Self {
        Self {
            kind: OutboxErrorKind::Database,
            message: "the outbox's database could not carry the statement out",
            source: Some(Source::Database(error.into())),
        }
    }
}

impl fmt::Display for OutboxError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.message)?;
        match self.database().and_then(TxError::code) {
            Some(code) => write!(f, " (code {code})"),
            None => Ok(()),
        }
    }
}

impl fmt::Debug for OutboxError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OutboxError")
            .field("kind", &self.kind)
            .field("message", &self.message)
            .field("database", &self.database())
            .finish_non_exhaustive()
    }
}

impl Error for OutboxError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(match self.source.as_ref()? {
            Source::Database(error) => error,
            Source::Other(error) => &**error,
        })
    }
}

impl IntoResponse for OutboxError {
    fn into_response(self) -> Response<Body> {
        match self.source {
            Some(Source::Database(error)) => error.into_response(),
            _ => (StatusCode::INTERNAL_SERVER_ERROR, self.message).into_response(),
        }
    }
}

//! A checkpoint that is saved in a transaction of the caller's, on the caller's connection.

#[cfg(any(feature = "sqlite", feature = "postgres"))]
pub(crate) use self::sealed::JoinError;

/// What is to be written, and how. Opaque: only this crate's SQL stores make it, after they have checked
/// name and value against the limits.
#[doc(hidden)]
#[derive(Clone)]
#[expect(missing_debug_implementations, reason = "it holds a value and a token")]
pub struct Joining(pub(crate) Kind);

#[derive(Clone)]
pub(crate) enum Kind {
    #[cfg(feature = "postgres")]
    Postgres(super::postgres::Joining),
    #[cfg(feature = "sqlite")]
    Sqlite(super::sqlite::Joining),
}

/// A connection whose transaction a checkpoint can be saved in: `sqlx::PgConnection` and
/// `sqlx::SqliteConnection`. Sealed.
#[cfg(any(feature = "sqlite", feature = "postgres"))]
pub trait JoinsTransaction: sealed::Sealed {}

#[cfg(any(feature = "sqlite", feature = "postgres"))]
pub(crate) mod sealed {
    use std::future::Future;

    use super::{super::Settled, Joining};
    use crate::store::StoreError;

    /// How it is saved.
    pub trait Sealed: Send {
        /// Saves it, in whatever transaction this connection is in. Nothing is written unless the claim
        /// holds its record and there is room for one more name.
        #[doc(hidden)]
        fn save(
            &mut self,
            joining: Joining,
        ) -> impl Future<Output = Result<Settled, JoinError>> + Send;
    }

    /// Why a checkpoint was not saved.
    #[doc(hidden)]
    #[derive(Debug)]
    pub enum JoinError {
        /// The statement failed, and on Postgres the transaction with it.
        Sql(sqlx::Error),
        /// It is against the limits; nothing was written, and the transaction goes on.
        Refused(StoreError),
        /// The store's records are in a database of another kind than this connection.
        OtherDatabase,
    }
}

#[cfg(feature = "postgres")]
impl JoinsTransaction for sqlx::PgConnection {}

#[cfg(feature = "postgres")]
impl sealed::Sealed for sqlx::PgConnection {
    async fn save(&mut self, joining: Joining) -> Result<super::Settled, JoinError> {
        match joining.0 {
            Kind::Postgres(joining) => joining.save(self).await,
            #[cfg(feature = "sqlite")]
            Kind::Sqlite(_) => Err(JoinError::OtherDatabase),
        }
    }
}

#[cfg(feature = "sqlite")]
impl JoinsTransaction for sqlx::SqliteConnection {}

#[cfg(feature = "sqlite")]
impl sealed::Sealed for sqlx::SqliteConnection {
    async fn save(&mut self, joining: Joining) -> Result<super::Settled, JoinError> {
        match joining.0 {
            Kind::Sqlite(joining) => joining.save(self).await,
            #[cfg(feature = "postgres")]
            Kind::Postgres(_) => Err(JoinError::OtherDatabase),
        }
    }
}

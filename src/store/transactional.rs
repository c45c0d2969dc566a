//! Stores whose database can commit a handler's effect together with the record.

use std::sync::Arc;

use super::{Checkpoints, Completion, Inspect, Ticket};
use crate::{
    TxDatabase, TxOptions,
    transacted::{Recording, Transactor, Work},
    transaction::{Slot, Source},
};

/// A store whose records are completed in the transactions of handlers, as
/// [`IdempotencyLayer::transactional`](crate::IdempotencyLayer::transactional) needs it: `PostgresStore`
/// and `SqliteStore`, and a `SealedStore` around either. Nobody else implements it.
pub trait TransactionalStore: Inspect + Checkpoints + sealed::Sealed {
    /// The database of its transactions, as in `Tx<Postgres>`.
    type Database: TxDatabase;
}

pub(crate) mod sealed {
    use std::sync::Arc;

    use super::{Completion, Ticket};
    use crate::transaction::Source;

    /// Where the store's transactions are begun, and what is written in them.
    pub trait Sealed {
        #[doc(hidden)]
        fn begins(&self) -> Begins;

        /// The ticket as the database knows it.
        #[doc(hidden)]
        fn stored_ticket(&self, ticket: &Ticket) -> Ticket {
            ticket.clone()
        }

        /// What is written to the record of this ticket.
        #[doc(hidden)]
        fn stored_outcome(&self, _: &Ticket, done: Completion) -> Completion {
            done
        }
    }

    /// Opaque, and different for each database.
    #[doc(hidden)]
    #[expect(missing_debug_implementations, reason = "never seen outside")]
    pub struct Begins(pub(crate) Kind);

    pub(crate) enum Kind {
        #[cfg(feature = "postgres")]
        Postgres(Arc<dyn Source<sqlx::Postgres>>),
        #[cfg(feature = "sqlite")]
        Sqlite(Arc<dyn Source<sqlx::Sqlite>>),
    }
}

#[cfg(feature = "postgres")]
impl TransactionalStore for super::PostgresStore {
    type Database = sqlx::Postgres;
}

#[cfg(feature = "postgres")]
impl sealed::Sealed for super::PostgresStore {
    fn begins(&self) -> sealed::Begins {
        sealed::Begins(sealed::Kind::Postgres(self.transactions()))
    }
}

#[cfg(feature = "sqlite")]
impl TransactionalStore for super::SqliteStore {
    type Database = sqlx::Sqlite;
}

#[cfg(feature = "sqlite")]
impl sealed::Sealed for super::SqliteStore {
    fn begins(&self) -> sealed::Begins {
        sealed::Begins(sealed::Kind::Sqlite(self.source()))
    }
}

/// What a layer over this store begins its transactions with.
pub(crate) fn transactor<S: TransactionalStore>(
    store: &S,
    options: TxOptions,
) -> Arc<dyn Transactor> {
    let store = store.clone();
    match store.begins().0 {
        #[cfg(feature = "postgres")]
        sealed::Kind::Postgres(source) => transact(store, source, options),
        #[cfg(feature = "sqlite")]
        sealed::Kind::Sqlite(source) => transact(store, source, options),
    }
}

fn transact<S: TransactionalStore, DB: TxDatabase>(
    store: S,
    source: Arc<dyn Source<DB>>,
    options: TxOptions,
) -> Arc<dyn Transactor> {
    Arc::new(Transactions {
        store,
        source,
        options: Arc::new(options),
    })
}

struct Transactions<S, DB: TxDatabase> {
    store: S,
    source: Arc<dyn Source<DB>>,
    options: Arc<TxOptions>,
}

impl<S: TransactionalStore, DB: TxDatabase> Transactor for Transactions<S, DB> {
    fn work(&self, ticket: Option<&Ticket>) -> Arc<dyn Work> {
        let (source, options) = (self.source.clone(), self.options.clone());
        let ticket = ticket.map(|ticket| self.store.stored_ticket(ticket));
        Arc::new(Slot::new(source, options, ticket))
    }

    fn stored(&self, recording: Recording) -> Recording {
        let Recording {
            ticket,
            done,
            lifetimes,
        } = recording;
        let done = self.store.stored_outcome(&ticket, done);
        Recording {
            ticket: self.store.stored_ticket(&ticket),
            done,
            lifetimes,
        }
    }
}

//! The transactions of handlers, one at a time.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use futures_util::{FutureExt, future::BoxFuture};
use sqlx::{Connection, SqlSafeStr, Sqlite, SqliteConnection, sqlite::SqliteTransactionManager};
use sqlx_core::transaction::TransactionManager;

use super::{
    Instance, SqliteStore,
    failure::{is_lock, moved, primary_code, told},
    schema::{Database, Opened},
    slots::Slots,
    turns::{PATIENCE, Turn},
};
use crate::{
    Isolation, TxOptions,
    bounded::within,
    store::{
        Settled, Ticket,
        protocol::{self, Leases},
    },
    transacted::Recording,
    transaction::{Interrupt, OpenTransaction, Ready, Source},
};

type Manager = SqliteTransactionManager;

/// The savepoint is there as long as the transaction is the one that was begun.
const BEGIN: &str = "BEGIN IMMEDIATE; SAVEPOINT tower_idempotency_run";
const RELEASE: &str = "RELEASE tower_idempotency_run";

/// How long a rollback may take before the connection is given up instead.
const ROLLBACK_LIMIT: Duration = Duration::from_secs(2);

/// After how many of its instructions SQLite asks whether to go on: some microseconds.
const INSTRUCTIONS: i32 = 1_000;

/// Begins transactions on the store's file.
pub(super) struct Handlers(pub(super) SqliteStore);

impl Source<Sqlite> for Handlers {
    fn begin<'a>(
        &'a self,
        _: &'a TxOptions,
        _: Option<Isolation>,
        _: Option<&'a Ticket>,
    ) -> BoxFuture<'a, Result<Box<dyn OpenTransaction<Sqlite>>, sqlx::Error>> {
        async { Ok(Box::new(self.begin().await?) as Box<_>) }.boxed()
    }

    fn max_hold(&self, options: &TxOptions) -> Option<Duration> {
        Some(options.max_hold)
    }
}

impl Handlers {
    /// A future that is dropped drops the connection, and with it whatever was begun.
    async fn begin(&self) -> Result<Open, sqlx::Error> {
        let store = &self.0.0;
        if store.queue.check_open().is_err() {
            return Err(sqlx::Error::PoolClosed);
        }
        let turn = within(PATIENCE, store.instance.turns.of_handler()).await;
        let turn = turn.ok_or(sqlx::Error::PoolTimedOut)?;
        let turn = turn.ok_or(sqlx::Error::PoolClosed)?;
        let database = &store.instance.database;
        let kept = store.instance.turns.kept().take();
        let mut kept = match kept.filter(|kept| database.is_current(&kept.opened)) {
            Some(kept) => kept,
            None => Kept::open(database).await?,
        };
        kept.begin(database.busy_timeout()).await?;
        Ok(Open {
            kept,
            turn,
            instance: store.instance.clone(),
        })
    }
}

/// A connection for one transaction after the other. Dropped, it ends in the background, with whatever
/// is under way on it.
pub(super) struct Kept {
    guard: Guard,
    opened: Opened,
}

/// What SQLite asks before it goes on with a statement, and before it commits.
struct Guard(Arc<Told>);

#[derive(Default)]
struct Told {
    /// Whether what is under way is to be interrupted, as it is when the connection is given up.
    interrupted: AtomicBool,
    /// Whether it is we who commit. A COMMIT of the handler's own is turned into a ROLLBACK, as is all that
    /// it writes after it has ended the transaction: the effect would be there without its record.
    commits: AtomicBool,
}

impl Guard {
    async fn of(connection: &mut SqliteConnection) -> Result<Self, sqlx::Error> {
        let told = Arc::new(Told::default());
        let mut handle = connection.lock_handle().await?;
        let asks = told.clone();
        handle.set_progress_handler(INSTRUCTIONS, move || {
            !asks.interrupted.load(Ordering::Acquire)
        });
        let asks = told.clone();
        handle.set_commit_hook(move || asks.commits.load(Ordering::Acquire));
        drop(handle);
        Ok(Self(told))
    }
}

impl Told {
    fn interrupt(&self, interrupted: bool) {
        self.interrupted.store(interrupted, Ordering::Release);
    }

    fn allow_commit(&self, commits: bool) {
        self.commits.store(commits, Ordering::Release);
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.interrupt(true);
    }
}

impl Kept {
    async fn open(database: &Database) -> Result<Self, sqlx::Error> {
        let mut opened = database.reopen().await.map_err(|failure| told(&failure))?;
        let guard = Guard::of(&mut opened.connection).await?;
        Ok(Self { guard, opened })
    }

    pub(super) fn into_connection(self) -> SqliteConnection {
        self.opened.connection
    }

    async fn begin(&mut self, busy_timeout: Duration) -> Result<(), sqlx::Error> {
        let deadline = Instant::now() + busy_timeout;
        let connection = &mut self.opened.connection;
        while let Err(error) = Manager::begin(connection, Some(BEGIN.into_sql_str())).await {
            let_pass(error, deadline).await?;
        }
        Ok(())
    }

    async fn commit(&mut self, busy_timeout: Duration) -> Result<(), sqlx::Error> {
        self.guard.0.allow_commit(true);
        let committed = self.try_to_commit(Instant::now() + busy_timeout).await;
        self.guard.0.allow_commit(false);
        committed
    }

    /// Readers may be in the way, where the journal is a rollback journal.
    async fn try_to_commit(&mut self, deadline: Instant) -> Result<(), sqlx::Error> {
        while let Err(error) = Manager::commit(&mut self.opened.connection).await {
            let_pass(error, deadline).await?;
        }
        Ok(())
    }

    /// Answers whether the connection is as it was before the transaction.
    async fn roll_back(&mut self) -> Result<bool, sqlx::Error> {
        let connection = &mut self.opened.connection;
        self.guard.0.interrupt(true);
        connection.ping().await?;
        self.guard.0.interrupt(false);
        let depth = Manager::get_transaction_depth(connection);
        for _ in 0..depth {
            Manager::rollback(connection).await?;
        }
        Ok(depth > 0)
    }
}

/// Lets the lock of another process pass by, until the deadline.
async fn let_pass(error: sqlx::Error, deadline: Instant) -> Result<(), sqlx::Error> {
    if !is_lock(&error) || Instant::now() >= deadline {
        return Err(error);
    }
    tokio::task::yield_now().await;
    Ok(())
}

/// Dropped, it is rolled back with its connection, and the turn is over.
struct Open {
    kept: Kept,
    turn: Turn,
    instance: Arc<Instance>,
}

impl Open {
    async fn complete(&mut self, recording: Option<&Recording>) -> Result<Ready, sqlx::Error> {
        if !self.is_whole().await? {
            return Ok(Ready::Void);
        }
        self.check_file()?;
        match recording {
            Some(recording) => self.record(recording).await,
            None => Ok(Ready::Yes),
        }
    }

    async fn is_whole(&mut self) -> Result<bool, sqlx::Error> {
        let connection = &mut self.kept.opened.connection;
        match sqlx::raw_sql(RELEASE).execute(&mut *connection).await {
            // A savepoint that was never released would be all that a COMMIT ends.
            Ok(_) => Ok(Manager::get_transaction_depth(connection) == 1),
            // There is no such savepoint any more.
            Err(error) if primary_code(&error) == Some(1) => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn check_file(&self) -> Result<(), sqlx::Error> {
        match self.instance.database.is_current(&self.kept.opened) {
            true => Ok(()),
            false => Err(told(&moved())),
        }
    }

    /// The transaction has the write lock, so what is read here is what is written over.
    async fn record(&mut self, recording: &Recording) -> Result<Ready, sqlx::Error> {
        let connection = &mut self.kept.opened.connection;
        let ticket = &recording.ticket;
        let (mut slots, ids) = Slots::of(std::iter::once(&ticket.id));
        slots.load(connection, &ids, &mut Leases::default()).await?;
        let now = self.instance.clock.now();
        let changed = slots.slot(&ticket.id).change(|record, _| {
            let (done, lifetimes) = (recording.done.clone(), recording.lifetimes);
            protocol::complete(record, ticket.token, done, lifetimes, now)
        });
        let (settled, _) = changed.map_err(|damaged| sqlx::Error::Decode(Box::new(damaged)))?;
        slots.changes().write(connection, None).await?;
        Ok(match settled {
            Settled::Done => Ready::Yes,
            Settled::Lost => Ready::Lost,
        })
    }

    async fn commit(mut self) -> Result<(), sqlx::Error> {
        let busy_timeout = self.instance.database.busy_timeout();
        if let Err(error) = self.kept.commit(busy_timeout).await {
            self.roll_back().await;
            return Err(error);
        }
        self.check_file()?;
        self.keep();
        Ok(())
    }

    async fn roll_back(mut self) {
        let rolled_back = within(ROLLBACK_LIMIT, self.kept.roll_back()).await;
        if let Some(Ok(true)) = rolled_back {
            self.keep();
        }
    }

    /// Leaves the connection to the next handler.
    fn keep(self) {
        let Self {
            kept,
            turn,
            instance,
        } = self;
        *instance.turns.kept() = Some(kept);
        drop(turn);
    }
}

impl OpenTransaction<Sqlite> for Open {
    fn connection(&self) -> &SqliteConnection {
        &self.kept.opened.connection
    }

    fn connection_mut(&mut self) -> &mut SqliteConnection {
        &mut self.kept.opened.connection
    }

    fn complete<'a>(
        &'a mut self,
        recording: Option<&'a Recording>,
    ) -> BoxFuture<'a, Result<Ready, sqlx::Error>> {
        self.complete(recording).boxed()
    }

    fn commit(self: Box<Self>) -> BoxFuture<'static, Result<(), sqlx::Error>> {
        (*self).commit().boxed()
    }

    fn rollback(self: Box<Self>) -> BoxFuture<'static, bool> {
        async {
            self.roll_back().await;
            // Nobody else commits it; see `Guard`.
            true
        }
        .boxed()
    }

    fn cut(self: Box<Self>) {
        drop(self);
    }

    fn interrupt(&self) -> Option<Interrupt> {
        let told = self.kept.guard.0.clone();
        Some(Box::new(move || told.interrupt(true)))
    }
}

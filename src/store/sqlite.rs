//! Records in an SQLite file: durable, without a server, for any number of processes on one machine.

use std::{
    fmt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use sqlx::{Row, SqliteConnection};
use tokio::{runtime::Handle, sync::Mutex};

use self::{
    handlers::Handlers,
    schema::{Database, Opened},
    statements::{ABANDONED, COUNT, COUNT_IN, MAX_EXPIRED, decode, decode_id},
    turns::Turns,
    writer::SqliteWriter,
};
use super::{
    Checkpoint, Checkpoints, Claim, ClaimRequest, Clock, Completion, Counts, Inspect, Lifetimes,
    Settled, Store, StoreError, StoreErrorKind, Ticket, check_checkpoint,
    clock::WallClock,
    group::{Complete, Failure, Grouping, Operation, Queue, Reach, Release, Renew, Save, TakeOver},
};
use crate::{
    Scope, observe,
    record::{Owner, Record, RecordId, Timestamp, Token},
    transaction::Source,
};

mod failure;
mod handlers;
mod joining;
mod reader;
mod schema;
mod slots;
mod statements;
#[cfg(test)]
mod tests;
mod transaction;
mod turns;
mod writer;

pub(super) use self::joining::Joining;

/// The most records one transaction removes, so that claims never wait long for a purge.
const PURGE_STEP: usize = 512;

/// Keeps records in an SQLite file, which survives crashes of the process and of the machine.
///
/// Any number of processes *on one machine* may share the file; they must share the machine's clock
/// and a local disk. Clones share one instance, one lease and one writer. Opening the file twice
/// makes two instances, as two processes would be.
///
/// The tables are created when the file is opened (`sqlite.sql` in the source shows them). All are
/// named `idempotency_…`, so the file may hold the service's own tables too; keep write transactions
/// on it short, for SQLite has one writer at a time.
///
/// # Durability
///
/// What was answered was committed and synced to disk before (`synchronous = FULL`, and `EXTRA`
/// with [`Journal::Delete`]).
///
/// # Speed
///
/// One task writes. While it commits, operations queue up, and the next transaction takes them all,
/// so the disk is synced once for many of them and nobody waits for a timer.
///
/// # Transactions of handlers
///
/// [`Tx<Sqlite>`](crate::Tx) is `BEGIN IMMEDIATE` on a connection of its own, so handlers that use it run
/// one after the other: a handler waits at most 30 s for its turn. While one has its transaction open
/// nothing else can be written to the file. Repeated requests are answered all the same, from a second
/// connection; new claims wait, for one handler's transaction at most (see
/// [`max_hold`](crate::TxOptions::max_hold)), and between the transactions of two handlers everything that
/// waits is written. The same holds while another process writes, where an operation waits for at most
/// [`busy_timeout`](SqliteStoreOptions::busy_timeout).
///
/// With [`Journal::Delete`] the file cannot be read for a moment at each commit, nor while a transaction
/// is open that is too large for SQLite's cache.
///
/// # Cancel safety
///
/// Operations run in the writer's task. Dropping a future drops the answer only: a claim or read
/// that has not begun is left out, what settles a run is carried out regardless.
///
/// # Runtimes
///
/// The writer lives in the tokio runtime in which the store was opened and ends with it. It ends
/// too when the last clone is dropped; the lease then lapses by itself, where
/// [`close`](Store::close) gives it up at once.
///
/// ```
/// # async fn example(directory: &std::path::Path) -> Result<(), tower_idempotency::store::StoreError> {
/// use tower_idempotency::SqliteStore;
///
/// let store = SqliteStore::open(directory.join("idempotency.db")).await?;
/// # Ok(())
/// # }
/// # let directory = tempfile::tempdir().unwrap();
/// # tokio::runtime::Runtime::new().unwrap().block_on(example(directory.path())).unwrap();
/// ```
#[derive(Clone)]
pub struct SqliteStore(Arc<Shared>);

struct Shared {
    queue: Queue,
    instance: Arc<Instance>,
    /// Held by whoever reads through the whole table: one at a time.
    scan: Mutex<()>,
    /// A connection to read through a scope with, for one at a time: scopes are asked for often.
    counting: Mutex<Option<Opened>>,
}

/// What handles and writer both know.
struct Instance {
    database: Database,
    owner: Owner,
    clock: Arc<dyn Clock>,
    max_records: Option<u64>,
    turns: Turns,
}

/// How SQLite keeps a transaction whole (<https://www.sqlite.org/pragma.html#pragma_journal_mode>).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Journal {
    /// A write-ahead log beside the file: readers and writer do not wait for each other. Needs
    /// shared memory, so no network disk.
    #[default]
    Wal,
    /// A rollback journal, deleted at each commit. Slower, and [`counts`](Inspect::counts),
    /// [`count_in`](Inspect::count_in) and [`abandoned`](Inspect::abandoned) hold commits up while they read.
    Delete,
}

/// How an SQLite file is opened.
#[derive(Debug, Clone)]
#[must_use = "options do nothing until `open` is called"]
pub struct SqliteStoreOptions {
    path: PathBuf,
    journal: Journal,
    busy_timeout: Duration,
    max_records: Option<u64>,
    clock: Arc<dyn Clock>,
}

impl SqliteStoreOptions {
    /// The journal. Default [`Journal::Wal`]. All processes that share a file must choose the same:
    /// it cannot be changed while another has the file open.
    pub fn journal(mut self, journal: Journal) -> Self {
        self.journal = journal;
        self
    }

    /// How long to wait for another writer before an operation fails with
    /// [`StoreErrorKind::Unavailable`]. Default 5 s.
    ///
    /// # Panics
    ///
    /// When zero, or more than a day.
    pub fn busy_timeout(mut self, timeout: Duration) -> Self {
        assert!(
            !timeout.is_zero() && timeout <= Duration::from_secs(86_400),
            "busy_timeout must be more than zero and at most a day, not {timeout:?}"
        );
        self.busy_timeout = timeout;
        self
    }

    /// The most records at once, expired ones that no purge has removed yet included. Default: as
    /// many as the disk holds.
    ///
    /// A full store looks for expired records to remove, then refuses new claims with
    /// [`StoreErrorKind::Full`]. Granted claims can always be completed. The number is that of the
    /// whole file, the limit that of this instance.
    ///
    /// # Panics
    ///
    /// When zero.
    pub fn max_records(mut self, records: u64) -> Self {
        assert!(records > 0, "max_records must be at least 1");
        self.max_records = Some(records);
        self
    }

    /// The clock that judges leases and lifetimes; all processes that share a file must share it.
    /// Default: the machine's wall clock.
    pub fn clock(mut self, clock: impl Clock) -> Self {
        self.clock = Arc::new(clock);
        self
    }

    /// Opens the file, creating it and its tables where they are missing.
    ///
    /// Dropping the future leaves at most a file with complete tables behind.
    ///
    /// # Errors
    ///
    /// [`StoreErrorKind::Schema`] when the file is no SQLite database, may not be written, or has
    /// tables of these names that are foreign or of a newer version; [`StoreErrorKind::Unavailable`]
    /// when it cannot be opened, is locked for longer than `busy_timeout`, cannot have this journal,
    /// or when there is no tokio runtime; [`StoreErrorKind::Corrupt`] when it is damaged.
    pub async fn open(self) -> Result<SqliteStore, StoreError> {
        self.open_or_fail().await.map_err(|failure| failure.error())
    }

    async fn open_or_fail(self) -> Result<SqliteStore, Failure> {
        if Handle::try_current().is_err() {
            return Err(Failure::new(
                StoreErrorKind::Unavailable,
                Reach::Connection,
                "an SQLite store must be opened in a tokio runtime",
            ));
        }
        let database = Database::new(&self.path, self.journal, self.busy_timeout)?;
        let opened = database.create().await?;
        let instance = Arc::new(Instance {
            database,
            owner: Owner::random(),
            clock: self.clock,
            max_records: self.max_records,
            turns: Turns::new(),
        });
        Ok(SqliteStore(Arc::new(Shared {
            queue: Queue::start(SqliteWriter::new(instance.clone(), opened)),
            instance,
            scan: Mutex::default(),
            counting: Mutex::default(),
        })))
    }
}

impl SqliteStore {
    /// Opens the file with the default options, creating it and its tables where they are missing.
    ///
    /// # Errors
    ///
    /// See [`SqliteStoreOptions::open`].
    pub async fn open(path: impl AsRef<Path>) -> Result<Self, StoreError> {
        Self::options(path).open().await
    }

    /// The options, to be changed.
    pub fn options(path: impl AsRef<Path>) -> SqliteStoreOptions {
        SqliteStoreOptions {
            path: path.as_ref().to_path_buf(),
            journal: Journal::default(),
            busy_timeout: Duration::from_secs(5),
            max_records: None,
            clock: Arc::new(WallClock),
        }
    }

    /// How many operations have shared how many transactions so far.
    pub fn grouping(&self) -> Grouping {
        self.0.queue.grouping()
    }

    /// Where the transactions of handlers are begun.
    pub(crate) fn source(&self) -> Arc<dyn Source<sqlx::Sqlite>> {
        Arc::new(Handlers(self.clone()))
    }

    /// A connection of its own to read many rows, which would hold the writer up for too long.
    async fn scan(&self) -> Result<SqliteConnection, Failure> {
        let database = &self.0.instance.database;
        Ok(database.reader(database.busy_timeout()).await?.connection)
    }

    async fn count(&self) -> Result<Counts, Failure> {
        let mut connection = self.scan().await?;
        let row = sqlx::query(COUNT)
            .bind(self.0.instance.clock.now().as_micros())
            .fetch_one(&mut connection)
            .await?;
        let count = |column| -> Result<u64, sqlx::Error> {
            Ok(u64::try_from(row.try_get::<i64, _>(column)?).unwrap_or(0))
        };
        Ok(Counts {
            running: count(0)?,
            completed: count(1)?,
            abandoned: count(2)?,
            released: count(3)?,
        })
    }

    async fn count_scope(&self, scope: &Scope, at_most: u64) -> Result<u64, Failure> {
        let database = &self.0.instance.database;
        let mut kept = self.0.counting.lock().await;
        // Taken out meanwhile, so that one in the middle of something is never used again.
        let opened = (kept.take()).filter(|opened| database.is_current(opened));
        let mut opened = match opened {
            Some(opened) => opened,
            None => database.reader(database.busy_timeout()).await?,
        };
        let row = sqlx::query(COUNT_IN)
            .bind(scope.as_bytes())
            .bind(self.0.instance.clock.now().as_micros())
            .bind(i64::try_from(at_most).unwrap_or(i64::MAX))
            .bind(MAX_EXPIRED)
            .fetch_one(&mut opened.connection)
            .await?;
        *kept = Some(opened);
        Ok(u64::try_from(row.try_get::<i64, _>(0)?).unwrap_or(0))
    }

    async fn list_abandoned(
        &self,
        after: Option<&Record>,
        limit: usize,
    ) -> Result<Vec<Record>, Failure> {
        let mut connection = self.scan().await?;
        let now = self.0.instance.clock.now();
        let mut after = after.map(|record| (record.created, record.id.clone()));
        let mut page = Vec::new();
        while page.len() < limit {
            let wanted = limit - page.len();
            let rows = abandoned_rows(&mut connection, now, after.as_ref(), wanted).await?;
            let last = rows.len() < wanted;
            for row in &rows {
                let id = decode_id(row)?;
                after = Some((Timestamp::from_micros(row.try_get(10)?), id.clone()));
                match decode(row, id) {
                    Ok(record) => page.push(record),
                    // One row that cannot be understood must not hide those after it.
                    Err(error) => observe::unreadable_record(&*error),
                }
            }
            if last {
                break;
            }
        }
        Ok(page)
    }
}

async fn abandoned_rows(
    connection: &mut SqliteConnection,
    now: Timestamp,
    after: Option<&(Timestamp, RecordId)>,
    limit: usize,
) -> Result<Vec<sqlx::sqlite::SqliteRow>, Failure> {
    let (created, scope, key) = match after {
        Some((created, id)) => (created.as_micros(), id.scope.as_bytes(), id.key.as_bytes()),
        None => (i64::MIN, &[][..], &[][..]),
    };
    let rows = sqlx::query(ABANDONED)
        .bind(now.as_micros())
        .bind(created)
        .bind(scope)
        .bind(key)
        .bind(i64::try_from(limit).unwrap_or(i64::MAX))
        .fetch_all(connection)
        .await?;
    Ok(rows)
}

impl Store for SqliteStore {
    async fn claim(&self, claim: ClaimRequest) -> Result<Claim, StoreError> {
        self.0.queue.ask(Operation::Claim, claim).await
    }

    async fn complete(
        &self,
        ticket: &Ticket,
        done: Completion,
        lifetimes: Lifetimes,
    ) -> Result<Settled, StoreError> {
        let ticket = ticket.clone();
        let complete = Complete {
            ticket,
            done,
            lifetimes,
        };
        self.0.queue.ask(Operation::Complete, complete).await
    }

    async fn release(&self, ticket: &Ticket, ttl: Duration) -> Result<Settled, StoreError> {
        let ticket = ticket.clone();
        let release = Release { ticket, ttl };
        self.0.queue.ask(Operation::Release, release).await
    }

    async fn abandon(&self, ticket: &Ticket) -> Result<Settled, StoreError> {
        self.0.queue.ask(Operation::Abandon, ticket.clone()).await
    }

    async fn renew(&self, tickets: &[Ticket], lease: Duration) -> Result<Vec<Settled>, StoreError> {
        let tickets = tickets.to_vec();
        let renew = Renew { tickets, lease };
        self.0.queue.ask(Operation::Renew, renew).await
    }

    async fn purge(&self, limit: usize) -> Result<usize, StoreError> {
        let mut changed = 0;
        loop {
            let step = PURGE_STEP.min(limit.saturating_sub(changed));
            let done = self.0.queue.ask(Operation::Purge, step).await?;
            changed += done;
            if done < step || changed >= limit {
                return Ok(changed);
            }
        }
    }

    async fn close(&self) -> Result<(), StoreError> {
        // Before the writer's, so that this is not the one that has to put the log away.
        drop(self.0.counting.lock().await.take());
        self.0.queue.close().await
    }
}

impl Inspect for SqliteStore {
    async fn get(&self, id: &RecordId) -> Result<Option<Record>, StoreError> {
        self.0.queue.ask(Operation::Get, id.clone()).await
    }

    async fn forget(&self, id: &RecordId) -> Result<bool, StoreError> {
        self.0.queue.ask(Operation::Forget, id.clone()).await
    }

    async fn counts(&self) -> Result<Counts, StoreError> {
        self.0.queue.check_open()?;
        let _one_at_a_time = self.0.scan.lock().await;
        self.count().await.map_err(|failure| failure.error())
    }

    async fn count_in(&self, scope: &Scope, at_most: u64) -> Result<u64, StoreError> {
        self.0.queue.check_open()?;
        let counted = self.count_scope(scope, at_most).await;
        counted.map_err(|failure| failure.error())
    }

    async fn abandoned(
        &self,
        after: Option<&Record>,
        limit: usize,
    ) -> Result<Vec<Record>, StoreError> {
        self.0.queue.check_open()?;
        let _one_at_a_time = self.0.scan.lock().await;
        let listed = self.list_abandoned(after, limit).await;
        listed.map_err(|failure| failure.error())
    }

    async fn take_over(
        &self,
        id: &RecordId,
        abandoned: Token,
        token: Token,
        hold: Duration,
    ) -> Result<Option<Ticket>, StoreError> {
        let take_over = TakeOver {
            id: id.clone(),
            abandoned,
            token,
            hold,
        };
        self.0.queue.ask(Operation::TakeOver, take_over).await
    }
}

impl Checkpoints for SqliteStore {
    async fn save(&self, ticket: &Ticket, name: &str, value: Bytes) -> Result<Settled, StoreError> {
        let save = Save {
            ticket: ticket.clone(),
            name: name.into(),
            value,
        };
        self.0.queue.ask(Operation::Save, save).await
    }

    fn joining(
        &self,
        ticket: &Ticket,
        name: &str,
        value: Bytes,
    ) -> Option<Result<super::Joining, StoreError>> {
        let joining = || {
            self.0.queue.check_open()?;
            check_checkpoint(name, &value, 0)?;
            Ok(super::Joining(super::joining::Kind::Sqlite(Joining {
                ticket: ticket.clone(),
                name: name.to_owned(),
                value: value.clone(),
            })))
        };
        Some(joining())
    }

    async fn load(&self, ticket: &Ticket) -> Result<Option<Vec<Checkpoint>>, StoreError> {
        self.0.queue.ask(Operation::Load, ticket.clone()).await
    }
}

impl fmt::Debug for SqliteStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqliteStore")
            .field("owner", &self.0.instance.owner)
            .finish_non_exhaustive()
    }
}

//! Opening the file: its tables, its journal, and whether it is still the file that was opened.

use std::{
    fs, io,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use sqlx::{
    ConnectOptions, Row, SqliteConnection,
    sqlite::{SqliteConnectOptions, SqliteSynchronous},
};

use super::Journal;
use crate::store::{
    StoreErrorKind,
    group::{Failure, Reach},
};

const SCHEMA: &str = include_str!("../sqlite.sql");
const VERSION: i64 = 1;

/// What `LIST` answers when the tables are ours.
const OBJECTS: [(&str, &str); 9] = [
    (
        "idempotency_checkpoints",
        "ord INTEGER, record INTEGER, name TEXT, value BLOB",
    ),
    ("idempotency_meta", "name TEXT, value INTEGER"),
    ("idempotency_owners", "owner BLOB, alive_until INTEGER"),
    ("idempotency_record_added", "trigger"),
    ("idempotency_record_removed", "trigger"),
    (
        "idempotency_records",
        "id INTEGER, scope BLOB, key BLOB, scheme TEXT, fingerprint BLOB, token BLOB, owner BLOB, \
         attempt INTEGER, mode INTEGER, state INTEGER, created INTEGER, run_until INTEGER, \
         completed INTEGER, expires INTEGER, response_expires INTEGER, request_id TEXT, \
         status INTEGER, response BLOB",
    ),
    ("idempotency_records_due", "index"),
    ("idempotency_records_open", "index"),
    ("idempotency_responses_due", "index"),
];

const LIST: &str = "
SELECT o.name, CASE o.type WHEN 'table' THEN (
    SELECT group_concat(c.name || ' ' || c.type, ', ' ORDER BY c.cid) FROM pragma_table_info(o.name) c
) ELSE o.type END
FROM sqlite_schema o
WHERE o.name IN (
    'idempotency_checkpoints', 'idempotency_meta', 'idempotency_owners', 'idempotency_records',
    'idempotency_record_added', 'idempotency_record_removed', 'idempotency_records_due',
    'idempotency_records_open', 'idempotency_responses_due'
)
ORDER BY o.name";

/// How long SQLite itself waits for a lock, before this crate asks again. Short, because SQLite's
/// pauses grow to 100 ms, and a writer that comes by so seldom hardly ever meets the moment in
/// which a busy neighbour has the lock free.
pub(super) const LOCK_POLL: Duration = Duration::from_millis(2);

/// A database file and how it is to be opened.
#[derive(Debug)]
pub(super) struct Database {
    path: PathBuf,
    journal: Journal,
    busy_timeout: Duration,
}

/// A connection, and the file that stood at its path when it was made.
pub(super) struct Opened {
    pub(super) connection: SqliteConnection,
    file: FileId,
}

impl Database {
    pub(super) fn new(
        path: &Path,
        journal: Journal,
        busy_timeout: Duration,
    ) -> Result<Self, Failure> {
        // SQLite takes these for a database in memory or in a temporary file.
        if path.as_os_str().is_empty() || path == Path::new(":memory:") {
            return Err(Failure::new(
                StoreErrorKind::Unavailable,
                Reach::Connection,
                "the path names no file; use MemoryStore to keep records in memory",
            ));
        }
        Ok(Self {
            // Absolute, so that it stays the same file when the process changes its directory, and
            // so that a name like "file:x" is no URI.
            path: std::path::absolute(path).map_err(unreadable)?,
            journal,
            busy_timeout,
        })
    }

    pub(super) fn busy_timeout(&self) -> Duration {
        self.busy_timeout
    }

    /// Opens the file, with its tables created where there are none.
    pub(super) async fn create(&self) -> Result<Opened, Failure> {
        self.open(true).await
    }

    /// Opens a file that must be there with its tables: an empty one in its place would mean that
    /// every key is forgotten.
    pub(super) async fn reopen(&self) -> Result<Opened, Failure> {
        self.open(false).await
    }

    /// Any of the steps may find the file locked; each try starts from the first one.
    async fn open(&self, create: bool) -> Result<Opened, Failure> {
        let deadline = Instant::now() + self.busy_timeout;
        loop {
            match self.try_open(create).await {
                Ok(opened) => return Ok(opened),
                Err(failure) => pause(failure, deadline).await?,
            }
        }
    }

    async fn try_open(&self, create: bool) -> Result<Opened, Failure> {
        let options = self.options().create_if_missing(create);
        let mut connection = options.connect().await?;
        match create {
            true => migrate(&mut connection).await?,
            false => check(&objects(&mut connection).await?, &mut connection).await?,
        }
        self.set_journal(&mut connection).await?;
        let file = FileId::of(&self.path).map_err(unreadable)?;
        Ok(Opened { connection, file })
    }

    /// Opens another connection, only to read, and to wait this long where the file is locked even for
    /// that.
    pub(super) async fn reader(&self, patience: Duration) -> Result<Opened, Failure> {
        let options = self.options().busy_timeout(patience);
        let connection = options.pragma("query_only", "ON").connect().await?;
        let file = FileId::of(&self.path).map_err(unreadable)?;
        Ok(Opened { connection, file })
    }

    /// Whether this connection still reads and writes the file that stands at the path. In WAL mode
    /// SQLite goes on with a deleted file without a word.
    pub(super) fn is_current(&self, opened: &Opened) -> bool {
        FileId::of(&self.path).is_ok_and(|file| file == opened.file)
    }

    fn options(&self) -> SqliteConnectOptions {
        SqliteConnectOptions::new()
            .filename(&self.path)
            .create_if_missing(false)
            .busy_timeout(LOCK_POLL)
            .synchronous(match self.journal {
                Journal::Wal => SqliteSynchronous::Full,
                // The deletion of the journal is what commits; EXTRA makes that durable too.
                Journal::Delete => SqliteSynchronous::Extra,
            })
            // One answer per statement of a batch; a smaller buffer makes both sides wait in turn.
            .row_buffer_size(256)
            .disable_statement_logging()
    }

    async fn set_journal(&self, connection: &mut SqliteConnection) -> Result<(), Failure> {
        let (pragma, expected) = match self.journal {
            Journal::Wal => ("PRAGMA journal_mode = WAL", "wal"),
            Journal::Delete => ("PRAGMA journal_mode = DELETE", "delete"),
        };
        let mode: String = sqlx::query_scalar(pragma).fetch_one(connection).await?;
        if mode != expected {
            return Err(Failure::new(
                StoreErrorKind::Unavailable,
                Reach::Connection,
                "SQLite cannot use this journal here; choose the other Journal, or a local disk",
            ));
        }
        Ok(())
    }
}

/// In one transaction that holds the write lock from its start, so that of several processes that
/// open a new file at once one creates the tables and the others find them. An error drops the
/// connection, and the transaction with it.
async fn migrate(connection: &mut SqliteConnection) -> Result<(), Failure> {
    sqlx::raw_sql("BEGIN IMMEDIATE")
        .execute(&mut *connection)
        .await?;
    if objects(connection).await?.is_empty() {
        sqlx::raw_sql(SCHEMA).execute(&mut *connection).await?;
    }
    check(&objects(connection).await?, connection).await?;
    sqlx::raw_sql("COMMIT").execute(connection).await?;
    Ok(())
}

/// Lets a lock pass by, until the deadline. `LOCK_POLL` has already paused for most locks; those
/// that SQLite does not wait for come back at once.
pub(super) async fn pause(failure: Failure, deadline: Instant) -> Result<(), Failure> {
    if failure.reach != Reach::Lock || Instant::now() >= deadline {
        return Err(failure);
    }
    tokio::task::yield_now().await;
    Ok(())
}

async fn objects(connection: &mut SqliteConnection) -> Result<Vec<(String, String)>, Failure> {
    let rows = sqlx::query(LIST).fetch_all(connection).await?;
    let objects = rows
        .iter()
        .map(|row| Ok((row.try_get(0)?, row.try_get(1)?)));
    Ok(objects.collect::<Result<_, sqlx::Error>>()?)
}

/// Refuses tables that are missing, not ours, or not of this version.
async fn check(
    objects: &[(String, String)],
    connection: &mut SqliteConnection,
) -> Result<(), Failure> {
    if objects.is_empty() {
        return Err(Failure::new(
            StoreErrorKind::Schema,
            Reach::Connection,
            "the SQLite tables are gone; restore the file, or open the store anew to start without records",
        ));
    }
    let foreign = Failure::new(
        StoreErrorKind::Schema,
        Reach::Connection,
        "the SQLite file has tables named idempotency_… that are not this crate's; open another file, or rename them",
    );
    // The table of versions looks the same in every version.
    let (meta, columns) = OBJECTS[1];
    if !objects
        .iter()
        .any(|(name, is)| name == meta && is == columns)
    {
        return Err(foreign);
    }
    let version: Option<i64> =
        sqlx::query_scalar("SELECT value FROM idempotency_meta WHERE name = 'schema'")
            .fetch_optional(connection)
            .await?;
    if version.is_some_and(|version| version > VERSION) {
        return Err(Failure::new(
            StoreErrorKind::Schema,
            Reach::Connection,
            "the SQLite tables were made by a newer version of tower-idempotency; upgrade this service",
        ));
    }
    let same = objects
        .iter()
        .map(|(name, is)| (&**name, &**is))
        .eq(OBJECTS);
    if version != Some(VERSION) || !same {
        return Err(foreign);
    }
    Ok(())
}

fn unreadable(error: io::Error) -> Failure {
    Failure {
        source: Some(std::sync::Arc::new(error)),
        ..Failure::new(
            StoreErrorKind::Unavailable,
            Reach::Connection,
            "the SQLite database file cannot be found; restore it",
        )
    }
}

/// What tells a file from another one at the same path.
#[derive(Debug, PartialEq, Eq)]
struct FileId(Option<(u64, u64)>);

impl FileId {
    #[cfg(unix)]
    fn of(path: &Path) -> io::Result<Self> {
        use std::os::unix::fs::MetadataExt;
        let file = fs::metadata(path)?;
        Ok(Self(Some((file.dev(), file.ino()))))
    }

    /// Elsewhere an open file can be neither deleted nor replaced.
    #[cfg(not(unix))]
    fn of(path: &Path) -> io::Result<Self> {
        fs::metadata(path).map(|_| Self(None))
    }
}

//! Records in Postgres: durable, for any number of processes on any number of machines.

use std::{fmt, future::Future, sync::Arc, time::Duration};

use bytes::Bytes;
use sqlx::{
    ConnectOptions, Decode, PgPool, Postgres, Row, SqlStr, Type,
    postgres::{PgConnectOptions, PgPoolOptions, PgRow},
};
use tokio::{runtime::Handle, sync::Mutex};

use self::{
    failure::{judged, unavailable},
    rows::{COLUMNS, Time},
    session::{Answered, Instance, Session, Statement},
    texts::{Names, Texts},
    transaction::Transactions,
    writer::PostgresWriter,
};
use super::{
    Checkpoint, Checkpoints, Claim, ClaimRequest, Completion, Counts, Inspect, Lifetimes,
    MAX_CHECKPOINTS, Settled, Store, StoreError, StoreErrorKind, Ticket, check_checkpoint,
    group::{Complete, Failure, Grouping, Operation, Queue, Reach, Release, Renew, TakeOver},
};
use crate::{
    Scope, observe,
    record::{Owner, Record, RecordId, Timestamp, Token},
    transaction::Source,
};

mod claims;
mod doubts;
mod failure;
mod joining;
mod rows;
mod schema;
mod session;
mod settling;
mod taking_over;
#[cfg(test)]
mod tests;
mod texts;
mod transaction;
mod writer;

pub(super) use self::joining::Joining;

/// The most records one statement removes, so that none takes long; the statements name it too.
const PURGE_STEP: usize = 1_000;

/// Connections of a pool that the store opens for itself: one for claims, one for what ends a run, one for
/// heartbeats, and one for the rest.
const CONNECTIONS: u32 = 4;

/// Keeps records in Postgres, where any number of service instances meet.
///
/// Clones share one instance and one lease. Opening the store twice makes two instances, as two
/// processes would be. The tables must be there: let [`migrate`](PostgresStoreOptions::migrate) create
/// them, or create them yourself from [`schema_sql`](PostgresStoreOptions::schema_sql).
///
/// Time is the server's ([`clock_timestamp()`]): clocks of the service instances do not matter.
///
/// # Durability
///
/// What was answered was committed before, and is as durable as the server commits: with
/// `synchronous_commit = on`, the default, it survives a crash of the server; a fail-over it survives
/// only when the standby that takes over was synchronous. With `off` the store works, and warns when it
/// is opened.
///
/// # Speed
///
/// One task writes claims, and one what ends a run. While a statement is under way,
/// operations queue up, and the next statement takes them all, so that concurrent requests share round
/// trips and commits, and nobody waits for a timer. A first request costs two round trips, a replay
/// one.
///
/// # Connections
///
/// A connection of the pool is taken for each statement and given back, so a pool of one works. A
/// pool that is shared with handlers must be larger than the connections these can hold at once, or claims
/// wait for them. Nothing of a session is changed, and each operation is a single statement, or a
/// transaction around one where the database does not run at read committed; so the store works through a
/// connection pooler in transaction mode that keeps prepared statements.
///
/// When the server restarts or fails over, statements whose connection broke are sent again; their
/// tokens tell whether the first try took place. While it is out of reach every operation fails at once
/// with [`StoreErrorKind::Unavailable`], and the store looks for it in growing intervals of up to 1 s.
///
/// A statement that the store gave up, because it waited for a lock longer than
/// [`operation_timeout`](PostgresStoreOptions::operation_timeout), is cancelled as soon as the server
/// answers again.
///
/// # Other sessions
///
/// A row that another session has locked or changed delays nobody but those who must change it, and these
/// for at most 5 s, after which they fail with [`StoreErrorKind::Unavailable`];
/// [`take_over`](Inspect::take_over) does not wait, and takes nothing over then. One thing delays all claims
/// of an instance: an uncommitted INSERT of a record that one of them asks for, by something else than this
/// store, such as an import. Whether that claim is the first cannot be known before the INSERT ends.
///
/// # Cancel safety
///
/// Operations run in tasks of the store. Dropping a future drops the answer only, and never leaves a
/// connection in the middle of a statement: a claim that has not begun is left out, what settles a run is
/// carried out regardless.
///
/// # Runtimes
///
/// The tasks live in the tokio runtime in which the store was opened and end with it, or with the last
/// clone; the lease then lapses by itself, where [`close`](Store::close) gives it up at once.
///
/// ```no_run
/// # async fn example() -> Result<(), tower_idempotency::store::StoreError> {
/// use tower_idempotency::PostgresStore;
///
/// let url = "postgres://app:secret@db.example/payments";
/// let store = PostgresStore::options().migrate().connect(url).await?;
/// # Ok(())
/// # }
/// ```
///
/// [`clock_timestamp()`]: https://www.postgresql.org/docs/current/functions-datetime.html#FUNCTIONS-DATETIME-CURRENT
#[derive(Clone)]
pub struct PostgresStore(Arc<Shared>);

struct Shared {
    claims: Queue,
    settling: Queue,
    renewing: Queue,
    instance: Arc<Instance>,
    saving: Arc<[Mutex<()>; 16]>,
}

/// How a Postgres store is opened.
#[derive(Debug, Clone)]
#[must_use = "options do nothing until `open` or `connect` is called"]
pub struct PostgresStoreOptions {
    schema: Option<String>,
    prefix: String,
    operation_timeout: Duration,
    migrate: bool,
}

impl Default for PostgresStoreOptions {
    fn default() -> Self {
        Self {
            schema: None,
            prefix: "idempotency".to_owned(),
            operation_timeout: Duration::from_secs(5),
            migrate: false,
        }
    }
}

impl PostgresStoreOptions {
    /// The schema of the tables. Default: the first one of the search path that exists, as it is when the
    /// store is opened; later changes of the search path do not matter.
    ///
    /// # Panics
    ///
    /// When the name is not 1 to 63 ASCII letters, digits and underscores, or begins with a digit.
    pub fn schema(mut self, schema: &str) -> Self {
        assert!(
            is_name(schema, 63),
            "schema must be 1 to 63 ASCII letters, digits and underscores and not begin with a digit, not {schema:?}"
        );
        self.schema = Some(schema.to_owned());
        self
    }

    /// What the names of the tables begin with. Default `idempotency`, so `idempotency_records` and
    /// three more.
    ///
    /// # Panics
    ///
    /// When it is not 1 to 40 ASCII letters, digits and underscores, or begins with a digit.
    pub fn table_prefix(mut self, prefix: &str) -> Self {
        assert!(
            is_name(prefix, 40),
            "table_prefix must be 1 to 40 ASCII letters, digits and underscores and not begin with a digit, not {prefix:?}"
        );
        self.prefix = prefix.to_owned();
        self
    }

    /// How long an operation may take, from asking the pool for a connection to the server's answer,
    /// before it fails with [`StoreErrorKind::Unavailable`]. Default 5 s. It bounds the store; how long a
    /// request waits is the layer's `store_timeout`. Let the layer's `lease` be several times as long.
    /// Reading or purging many rows may take a minute.
    ///
    /// # Panics
    ///
    /// When zero, or more than an hour.
    pub fn operation_timeout(mut self, timeout: Duration) -> Self {
        assert!(
            !timeout.is_zero() && timeout <= Duration::from_secs(3_600),
            "operation_timeout must be more than zero and at most an hour, not {timeout:?}"
        );
        self.operation_timeout = timeout;
        self
    }

    /// Creates the tables when the store is opened and they are missing, and the schema where one was
    /// chosen. Any number of instances may do so at once. Needs the right to create tables, but only
    /// where they are missing. Default: tables that are missing are an error, since empty ones in the wrong
    /// database would mean that every key is forgotten.
    pub fn migrate(mut self) -> Self {
        self.migrate = true;
        self
    }

    /// The statements that create the tables, for migrations of your own: `postgres.sql` of the source,
    /// with the schema, where one was chosen, and the prefix filled in.
    pub fn schema_sql(&self) -> String {
        let names = Names {
            schema: self.schema.clone(),
            prefix: self.prefix.clone(),
        };
        names.tables()
    }

    /// Opens the store on this pool.
    ///
    /// Dropping the future leaves at most complete tables behind.
    ///
    /// # Errors
    ///
    /// [`StoreErrorKind::Schema`] when the tables are missing, foreign, of a newer version, or the role
    /// lacks a right; [`StoreErrorKind::Unavailable`] when there is no connection in time, the server is a
    /// standby, or there is no tokio runtime.
    pub async fn open(self, pool: PgPool) -> Result<PostgresStore, StoreError> {
        let opened = self.open_or_fail(pool).await;
        opened.map_err(|failure| failure.error())
    }

    /// Opens the store on a pool of its own, of at most 4 connections. The URL is
    /// `postgres://user:password@host:port/database`; encryption needs one of sqlx's `tls-…` features.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open), and [`StoreErrorKind::Unavailable`] when the URL cannot be understood or
    /// the server refuses the connection.
    pub async fn connect(self, url: &str) -> Result<PostgresStore, StoreError> {
        let options: Result<PgConnectOptions, sqlx::Error> = url.parse();
        let options = options.map_err(|error| judged(error).error())?;
        // Where there is none, sqlx panics.
        runtime().map_err(|failure| failure.error())?;
        let pool = PgPoolOptions::new()
            .max_connections(CONNECTIONS)
            .acquire_timeout(self.operation_timeout)
            // A statement that finds its connection broken is sent again anyway.
            .test_before_acquire(false)
            .connect_lazy_with(options.disable_statement_logging());
        self.open(pool).await
    }

    async fn open_or_fail(self, pool: PgPool) -> Result<PostgresStore, Failure> {
        let runtime = runtime()?;
        let opening = self.prepare(&pool, runtime);
        let opened = tokio::time::timeout(self.operation_timeout, opening).await;
        let instance = opened.unwrap_or_else(|_| Err(judged(sqlx::Error::PoolTimedOut)))?;
        let instance = Arc::new(instance);
        Ok(PostgresStore(Arc::new(Shared {
            claims: Queue::start(PostgresWriter::new(instance.clone())),
            settling: Queue::start(PostgresWriter::new(instance.clone())),
            renewing: Queue::start(PostgresWriter::of_heartbeats(instance.clone())),
            instance,
            saving: Arc::default(),
        })))
    }

    async fn prepare(&self, pool: &PgPool, runtime: Handle) -> Result<Instance, Failure> {
        let mut connection = pool.acquire().await.map_err(judged)?;
        let schema = match &self.schema {
            Some(schema) => schema.clone(),
            None => schema::current(&mut connection).await?,
        };
        let is_odd = |c: char| c.is_control() || ['"', '\'', '\\'].contains(&c);
        if schema.contains(is_odd) {
            return Err(Failure::new(
                StoreErrorKind::Schema,
                Reach::Connection,
                "the name of the Postgres schema holds a quote or a control character; choose another one with `schema`",
            ));
        }
        let names = Names {
            schema: Some(schema),
            prefix: self.prefix.clone(),
        };
        if self.migrate {
            schema::migrate(&mut connection, &names).await?;
        }
        let owner = Owner::random();
        let texts = Texts::of(&names, owner);
        let read_committed = schema::check(&mut connection, &texts).await?;
        drop(connection);
        Ok(Instance::new(
            pool.clone(),
            runtime,
            owner,
            texts,
            self.operation_timeout,
            !read_committed,
        ))
    }
}

fn runtime() -> Result<Handle, Failure> {
    let runtime = Handle::try_current();
    runtime.map_err(|_| unavailable("a Postgres store must be opened in a tokio runtime"))
}

/// A name that needs no quotes.
fn is_name(name: &str, longest: usize) -> bool {
    let mut bytes = name.bytes();
    let first = bytes.next();
    name.len() <= longest
        && first.is_some_and(|byte| byte.is_ascii_alphabetic() || byte == b'_')
        && bytes.all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}

impl PostgresStore {
    /// Opens the store on this pool with the default options; the tables must be there.
    ///
    /// # Errors
    ///
    /// See [`PostgresStoreOptions::open`].
    pub async fn open(pool: PgPool) -> Result<Self, StoreError> {
        Self::options().open(pool).await
    }

    /// Opens the store on a pool of its own with the default options; the tables must be there.
    ///
    /// # Errors
    ///
    /// See [`PostgresStoreOptions::connect`].
    pub async fn connect(url: &str) -> Result<Self, StoreError> {
        Self::options().connect(url).await
    }

    /// The options, to be changed.
    pub fn options() -> PostgresStoreOptions {
        PostgresStoreOptions::default()
    }

    /// How many operations have shared how many statements so far.
    pub fn grouping(&self) -> Grouping {
        self.0.claims.grouping() + self.0.settling.grouping()
    }

    /// Where the transactions of handlers are begun.
    pub(super) fn transactions(&self) -> Arc<dyn Source<Postgres>> {
        Arc::new(Transactions(self.0.instance.clone()))
    }

    /// Carries an operation out in a task of its own, where nobody can cut it in the middle.
    async fn alone<T, F>(&self, operation: impl FnOnce(Session) -> F) -> Result<T, StoreError>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, StoreError>> + Send + 'static,
    {
        self.0.settling.check_open()?;
        let instance = &self.0.instance;
        let session = Session::new(instance.clone());
        let task = instance.runtime.spawn(operation(session));
        task.await.unwrap_or_else(|_| Err(self.0.settling.gone()))
    }
}

impl Store for PostgresStore {
    async fn claim(&self, claim: ClaimRequest) -> Result<Claim, StoreError> {
        self.0.claims.ask(Operation::Claim, claim).await
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
        self.0.settling.ask(Operation::Complete, complete).await
    }

    /// In the queue of claims, so that it never overtakes a claim it is to undo.
    async fn release(&self, ticket: &Ticket, ttl: Duration) -> Result<Settled, StoreError> {
        let ticket = ticket.clone();
        let release = Release { ticket, ttl };
        self.0.claims.ask(Operation::Release, release).await
    }

    async fn abandon(&self, ticket: &Ticket) -> Result<Settled, StoreError> {
        self.0
            .settling
            .ask(Operation::Abandon, ticket.clone())
            .await
    }

    async fn renew(&self, tickets: &[Ticket], lease: Duration) -> Result<Vec<Settled>, StoreError> {
        let tickets = tickets.to_vec();
        let renew = Renew { tickets, lease };
        self.0.renewing.ask(Operation::Renew, renew).await
    }

    async fn purge(&self, limit: usize) -> Result<usize, StoreError> {
        self.alone(move |session| async move { purge(&mut session.patient(), limit).await })
            .await
    }

    async fn close(&self) -> Result<(), StoreError> {
        self.0.claims.close().await?;
        self.0.settling.close().await?;
        self.0.renewing.close().await
    }
}

impl Inspect for PostgresStore {
    async fn get(&self, id: &RecordId) -> Result<Option<Record>, StoreError> {
        let id = id.clone();
        self.alone(move |mut session| async move {
            let found = claims::fetch(&mut session, &id).await;
            found.map_err(|failure| failure.error())?.transpose()
        })
        .await
    }

    async fn forget(&self, id: &RecordId) -> Result<bool, StoreError> {
        self.0.claims.ask(Operation::Forget, id.clone()).await
    }

    async fn counts(&self) -> Result<Counts, StoreError> {
        self.alone(|session| async move {
            let text = session.instance.texts.count.clone();
            let counted = run(&mut session.patient(), text, |query| query).await?;
            let count = |at| -> Result<u64, StoreError> {
                let Some(row) = counted.rows.first() else {
                    return Ok(0);
                };
                Ok(u64::try_from(column::<i64>(row, at)?).unwrap_or(0))
            };
            Ok(Counts {
                running: count(0)?,
                completed: count(1)?,
                abandoned: count(2)?,
                released: count(3)?,
            })
        })
        .await
    }

    async fn count_in(&self, scope: &Scope, at_most: u64) -> Result<u64, StoreError> {
        let scope = scope.clone();
        self.alone(move |session| async move {
            let text = session.instance.texts.count_in.clone();
            let at_most = i64::try_from(at_most).unwrap_or(i64::MAX);
            let counted = run(&mut session.patient(), text, |query| {
                // Planned for this scope each time: one plan for all of them would be wrong for some.
                query.bind(scope.as_bytes()).bind(at_most).persistent(false)
            })
            .await?;
            let Some(row) = counted.rows.first() else {
                return Ok(0);
            };
            Ok(u64::try_from(column::<i64>(row, 0)?).unwrap_or(0))
        })
        .await
    }

    async fn abandoned(
        &self,
        after: Option<&Record>,
        limit: usize,
    ) -> Result<Vec<Record>, StoreError> {
        let after = after.map(|record| (record.created, record.id.clone()));
        self.alone(
            move |session| async move { abandoned(&mut session.patient(), after, limit).await },
        )
        .await
    }

    /// In the queue of what ends a run, so that an `abandon` that is to undo it never overtakes it.
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
        self.0.settling.ask(Operation::TakeOver, take_over).await
    }
}

impl Checkpoints for PostgresStore {
    async fn save(&self, ticket: &Ticket, name: &str, value: Bytes) -> Result<Settled, StoreError> {
        let (ticket, name) = (ticket.clone(), name.to_owned());
        let saving = self.0.saving.clone();
        self.alone(move |mut session| async move {
            // One after the other, for each counts what was saved before it. Only those of one record
            // have to, and only its owner saves.
            let place = usize::from(ticket.token.as_bytes()[0]) % saving.len();
            let _turn = saving[place].lock().await;
            let text = session.instance.texts.save.clone();
            let fits = check_checkpoint(&name, &value, 0).is_ok();
            let most = i64::try_from(MAX_CHECKPOINTS).unwrap_or(i64::MAX);
            let saved = run(&mut session, text, |query| {
                let query = bind_id(query, &ticket.id).bind(*ticket.token.as_bytes());
                let query = match fits {
                    true => query.bind(&*name).bind(&*value),
                    false => query.bind("").bind(&b""[..]),
                };
                query.bind(fits).bind(most)
            })
            .await?;
            let Some(row) = saved.rows.first() else {
                return Ok(Settled::Lost);
            };
            let others = usize::try_from(column::<i64>(row, 0)?).unwrap_or(usize::MAX);
            check_checkpoint(&name, &value, others)?;
            Ok(Settled::Done)
        })
        .await
    }

    fn joining(
        &self,
        ticket: &Ticket,
        name: &str,
        value: Bytes,
    ) -> Option<Result<super::Joining, StoreError>> {
        let joining = || {
            self.0.settling.check_open()?;
            check_checkpoint(name, &value, 0)?;
            Ok(super::Joining(super::joining::Kind::Postgres(Joining {
                text: self.0.instance.texts.join.clone(),
                ticket: ticket.clone(),
                name: name.to_owned(),
                value: value.clone(),
            })))
        };
        Some(joining())
    }

    async fn load(&self, ticket: &Ticket) -> Result<Option<Vec<Checkpoint>>, StoreError> {
        let ticket = ticket.clone();
        self.alone(move |mut session| async move {
            let text = session.instance.texts.load.clone();
            let loaded = run(&mut session, text, |query| {
                bind_id(query, &ticket.id).bind(*ticket.token.as_bytes())
            })
            .await?;
            if loaded.rows.is_empty() {
                return Ok(None);
            }
            let mut saved = Vec::with_capacity(loaded.rows.len());
            for row in &loaded.rows {
                if let Some(name) = column::<Option<String>>(row, 0)? {
                    let value = Bytes::from(column::<Vec<u8>>(row, 1)?);
                    saved.push(Checkpoint::new(name, value));
                }
            }
            Ok(Some(saved))
        })
        .await
    }
}

async fn purge(session: &mut Session, limit: usize) -> Result<usize, StoreError> {
    let mut changed = 0;
    let instance = session.instance.clone();
    for text in [
        &instance.texts.purge_records,
        &instance.texts.purge_responses,
    ] {
        loop {
            let step = PURGE_STEP.min(limit - changed);
            if step == 0 {
                return Ok(changed);
            }
            let rows = i64::try_from(step).unwrap_or(i64::MAX);
            let purged = run(session, text.clone(), |query| query.bind(rows)).await?;
            let done = match purged.rows.first() {
                Some(row) => usize::try_from(column::<i64>(row, 0)?).unwrap_or(step),
                None => 0,
            };
            changed += done.min(step);
            if done < step {
                break;
            }
        }
    }
    let owner = instance.owner;
    let text = instance.texts.purge_owners.clone();
    run(session, text, |query| query.bind(*owner.as_bytes())).await?;
    Ok(changed)
}

async fn abandoned(
    session: &mut Session,
    mut after: Option<(Timestamp, RecordId)>,
    limit: usize,
) -> Result<Vec<Record>, StoreError> {
    let mut page = Vec::new();
    while page.len() < limit {
        let wanted = limit - page.len();
        let text = session.instance.texts.abandoned.clone();
        let found = run(session, text, |query| {
            let (created, scope, key) = match &after {
                Some((created, id)) => (*created, id.scope.as_bytes(), id.key.as_bytes()),
                // Stored as minus infinity.
                None => (Timestamp::from_micros(i64::MIN), &[][..], &[][..]),
            };
            let query = query.bind(Time(created)).bind(scope).bind(key);
            query.bind(i64::try_from(wanted).unwrap_or(i64::MAX))
        })
        .await?;
        for row in &found.rows {
            let id = rows::id(row, COLUMNS).map_err(|error| judged(error).error())?;
            after = Some((column::<Time>(row, 7)?.0, id.clone()));
            match rows::record(row, id) {
                Ok(record) => page.push(record),
                // One row that cannot be understood must not hide those after it.
                Err(error) => observe::unreadable_record(&*error),
            }
        }
        if found.rows.len() < wanted {
            break;
        }
    }
    Ok(page)
}

async fn run(
    session: &mut Session,
    text: SqlStr,
    bind: impl for<'q> Fn(Statement<'q>) -> Statement<'q>,
) -> Result<Answered, StoreError> {
    let answered = session.run(text, bind).await;
    answered.map_err(|failure| failure.error())
}

fn bind_id<'q>(query: Statement<'q>, id: &RecordId) -> Statement<'q> {
    query.bind(id.scope.as_bytes()).bind(id.key.as_bytes())
}

fn column<'r, T>(row: &'r PgRow, at: usize) -> Result<T, StoreError>
where
    T: Decode<'r, Postgres> + Type<Postgres>,
{
    row.try_get(at).map_err(|error| judged(error).error())
}

impl fmt::Debug for PostgresStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresStore")
            .field("owner", &self.0.instance.owner)
            .finish_non_exhaustive()
    }
}

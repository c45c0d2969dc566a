//! Statements and what becomes of them: one connection of the pool for each, tried again where that is
//! safe, and refused at once while the server is out of reach.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use sqlx::{
    PgConnection, PgPool, Postgres, SqlStr,
    pool::PoolConnection,
    postgres::{PgArguments, PgRow},
    query::Query,
};

use tokio::runtime::Handle;

use super::{
    doubts::Doubts,
    failure::{broke, judged, unavailable},
    rows::interval,
    schema,
    texts::Texts,
};
use crate::{
    bounded::within,
    record::Owner,
    store::group::{Failure, Reach},
};

const MIN_BACK_OFF: Duration = Duration::from_millis(20);
const MAX_BACK_OFF: Duration = Duration::from_secs(1);

/// How often a statement is sent in all when its connections break. A pool may hold many connections to
/// a server that has restarted since, and each of them is only found out by using it.
pub(super) const MAX_BROKEN: u32 = 64;

/// How long a writer keeps its connection: while it is busy, and not so long that the pool could not
/// end it when it is old.
const KEEP: Duration = Duration::from_secs(1);

/// How long statements over many rows may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// One store instance: what handles and writers share.
pub(super) struct Instance {
    pub(super) pool: PgPool,
    pub(super) runtime: Handle,
    pub(super) owner: Owner,
    pub(super) texts: Texts,
    operation_timeout: Duration,
    /// Whether statements begin a transaction of their own level, because the default of the database
    /// would have them fail for their neighbours' sake.
    begins_itself: AtomicBool,
    opened: Instant,
    /// When the server answered last, in microseconds since the store was opened.
    last_answer: AtomicU64,
    /// Why nothing is sent at the moment.
    outage: Mutex<Option<Failure>>,
    doubts: Mutex<Doubts>,
}

/// Somebody who sends statements, one after the other.
pub(super) struct Session {
    pub(super) instance: Arc<Instance>,
    patience: Duration,
    /// Whether the server is given up when it does not answer in time.
    gives_up: bool,
    /// A connection for the next statement, and when to give it back.
    kept: Option<(PoolConnection<Postgres>, Instant)>,
    /// Whether the last statement, if it failed, may have been carried out all the same, or may yet be.
    pub(super) sent: bool,
}

pub(super) type Statement<'q> = Query<'q, Postgres, PgArguments>;

/// What a statement answered, and whether it may have been carried out before.
pub(super) struct Answered {
    pub(super) rows: Vec<PgRow>,
    pub(super) again: bool,
}

impl Session {
    pub(super) fn new(instance: Arc<Instance>) -> Self {
        Self {
            patience: instance.operation_timeout,
            gives_up: true,
            instance,
            kept: None,
            sent: false,
        }
    }

    /// For statements that read or write many rows. That one of them takes long says nothing about the
    /// server.
    pub(super) fn patient(mut self) -> Self {
        self.patience = self.patience.max(PATIENCE);
        self.gives_up = false;
        self
    }

    /// Gives the connection back.
    pub(super) fn rest(&mut self) {
        if let Some((connection, _)) = self.kept.take() {
            self.give_back(connection);
        }
    }

    /// The pool asks a connection that comes back for a sign of life, and waits for it as long as the
    /// network hangs. Here it is asked no longer than for any other answer, so that its place in the pool
    /// is free again then.
    fn give_back(&self, mut connection: PoolConnection<Postgres>) {
        let patience = self.instance.operation_timeout;
        let back = async move { within(patience, connection.return_to_pool()).await };
        self.instance.runtime.spawn(back);
    }

    /// Carries a statement out. It may be sent more than once, so what it does twice must be as if done
    /// once.
    pub(super) async fn run(
        &mut self,
        text: SqlStr,
        bind: impl for<'q> Fn(Statement<'q>) -> Statement<'q>,
    ) -> Result<Answered, Failure> {
        let begun = Instant::now();
        let deadline = begun + self.patience;
        let mut again = false;
        let mut attempts = 0;
        self.sent = false;
        loop {
            if let Some(failure) = &*self.instance.outage() {
                return Err(failure.clone());
            }
            attempts += 1;
            let (failure, broke) = match self
                .attempt(bind(sqlx::query(text.clone())), deadline)
                .await
            {
                Ok(rows) => {
                    self.instance.answered();
                    return Ok(Answered { rows, again });
                }
                Err(failed) => failed,
            };
            let retry = match failure.reach {
                Reach::Value => return Err(failure),
                Reach::Lock => {
                    self.instance.begins_itself.store(true, Ordering::Relaxed);
                    // Whoever was in the way is not to be met again at once.
                    tokio::time::sleep(Duration::from_millis(1 + rand::random::<u64>() % 8)).await;
                    true
                }
                Reach::Connection => {
                    again = true;
                    broke && attempts < MAX_BROKEN
                }
            };
            if !retry || Instant::now() >= deadline {
                return Err(match failure.reach {
                    Reach::Connection if self.gives_up => self.instance.give_up(failure, begun),
                    _ => failure,
                });
            }
        }
    }

    /// Once, on a connection of the pool. Tells with a failure whether it was the connection that broke.
    async fn attempt(
        &mut self,
        statement: Statement<'_>,
        deadline: Instant,
    ) -> Result<Vec<PgRow>, (Failure, bool)> {
        let (mut connection, until) = match self.kept.take() {
            Some(kept) => kept,
            None => {
                let connection = self.instance.connection(deadline).await;
                let connection = connection.map_err(|failure| (failure, false))?;
                (connection, Instant::now() + KEEP)
            }
        };
        let begin = self.instance.begins_itself.load(Ordering::Relaxed);
        let rows = fetch(&mut connection, statement, begin);
        let rows = within(deadline.saturating_duration_since(Instant::now()), rows).await;
        let (failure, broke) = match rows {
            Some(Ok(rows)) => {
                self.keep(connection, until);
                return Ok(rows);
            }
            Some(Err(error)) => {
                let broke = broke(&error);
                (judged(error), broke)
            }
            None => (
                unavailable(
                    "Postgres did not answer within operation_timeout; look for locks on the idempotency tables, or for a broken network",
                ),
                false,
            ),
        };
        // An answer of the server says that nothing was done.
        self.sent |= broke || failure.source.is_none();
        if begin || failure.reach == Reach::Connection {
            discard(connection);
        }
        Err((failure, broke))
    }

    /// Going through the pool costs another round trip. It is saved as long as nobody waits for the
    /// connection: there is an idle one, or room for a new one.
    fn keep(&mut self, connection: PoolConnection<Postgres>, until: Instant) {
        let pool = &self.instance.pool;
        let spare = pool.num_idle() > 0 || pool.size() < pool.options().get_max_connections();
        match spare && Instant::now() < until {
            true => self.kept = Some((connection, until)),
            false => self.give_back(connection),
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.rest();
    }
}

impl Instance {
    pub(super) fn new(
        pool: PgPool,
        runtime: Handle,
        owner: Owner,
        texts: Texts,
        operation_timeout: Duration,
        begins_itself: bool,
    ) -> Self {
        Self {
            pool,
            runtime,
            owner,
            texts,
            operation_timeout,
            begins_itself: AtomicBool::new(begins_itself),
            opened: Instant::now(),
            last_answer: AtomicU64::new(0),
            outage: Mutex::new(None),
            doubts: Mutex::default(),
        }
    }

    /// Whether the database's default level is another than read committed.
    pub(super) fn begins_itself(&self) -> bool {
        self.begins_itself.load(Ordering::Relaxed)
    }

    pub(super) fn operation_timeout(&self) -> Duration {
        self.operation_timeout
    }

    async fn connection(&self, deadline: Instant) -> Result<PoolConnection<Postgres>, Failure> {
        let patience = deadline.saturating_duration_since(Instant::now());
        match within(patience, self.pool.acquire()).await {
            Some(connection) => connection.map_err(judged),
            None => Err(judged_timeout()),
        }
    }

    pub(super) fn doubts(&self) -> MutexGuard<'_, Doubts> {
        self.doubts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn outage(&self) -> MutexGuard<'_, Option<Failure>> {
        self.outage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The server has answered.
    fn answered(&self) {
        let since = self.opened.elapsed().as_micros();
        let since = u64::try_from(since).unwrap_or(u64::MAX);
        self.last_answer.fetch_max(since, Ordering::Relaxed);
    }

    /// From now on everybody hears at once why nothing goes, until the server answers again. Not so when
    /// it has answered somebody else since this was `begun`: then the trouble is over.
    fn give_up(self: &Arc<Self>, mut failure: Failure, begun: Instant) -> Failure {
        failure.reach = Reach::Connection;
        let last_answer = Duration::from_micros(self.last_answer.load(Ordering::Relaxed));
        if self.opened + last_answer > begun {
            return failure;
        }
        let mut outage = self.outage();
        if outage.is_none() {
            tracing::warn!(kind = ?failure.kind, "Postgres is given up for now: {}", failure.message);
            *outage = Some(failure.clone());
            self.runtime
                .spawn(look_for_the_server(Arc::downgrade(self)));
        }
        failure
    }

    /// Best effort: a server that does not answer has nothing to cancel.
    async fn cancel_what_was_given_up(&self) {
        let deadline = Instant::now() + self.operation_timeout.min(Duration::from_secs(1));
        let Ok(mut connection) = self.connection(deadline).await else {
            return;
        };
        let cancel = sqlx::query(self.texts.cancel.clone())
            .bind(&*self.texts.tag)
            .bind(interval(self.operation_timeout))
            .fetch_all(&mut *connection);
        let patience = deadline.saturating_duration_since(Instant::now());
        match within(patience, cancel).await {
            Some(Ok(_)) => drop(connection),
            _ => discard(connection),
        }
    }

    pub(super) async fn check(&self) -> Result<(), Failure> {
        let deadline = Instant::now() + self.operation_timeout;
        let mut connection = self.connection(deadline).await?;
        let checked = schema::check(&mut connection, &self.texts);
        let patience = deadline.saturating_duration_since(Instant::now());
        let checked = within(patience, checked).await;
        let checked = checked.unwrap_or_else(|| Err(judged_timeout()));
        match checked {
            Ok(_) => drop(connection),
            Err(failure) => {
                discard(connection);
                return Err(failure);
            }
        }
        Ok(())
    }
}

/// A connection in the middle of something must not go back into the pool. It is cut and not closed in
/// good order, which would keep its place in the pool for as long as the network hangs.
pub(super) fn discard(connection: PoolConnection<Postgres>) {
    drop(connection.detach());
}

fn judged_timeout() -> Failure {
    judged(sqlx::Error::PoolTimedOut)
}

/// The time-out is for a process that stands still before it commits: its open change would hold up
/// whoever claims the same key.
const BEGIN: &str =
    "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL idle_in_transaction_session_timeout = '5s'";

/// All rows, to the very end of the answer: a statement outside a transaction is committed only after
/// its last row was sent, and may still fail then.
pub(super) async fn fetch(
    connection: &mut PgConnection,
    statement: Statement<'_>,
    begin: bool,
) -> Result<Vec<PgRow>, sqlx::Error> {
    if !begin {
        return statement.fetch_all(connection).await;
    }
    sqlx::raw_sql(BEGIN).execute(&mut *connection).await?;
    let rows = statement.fetch_all(&mut *connection).await?;
    sqlx::raw_sql("COMMIT").execute(connection).await?;
    Ok(rows)
}

/// Asks in growing intervals, until the server is back with its tables, or nobody cares any more.
async fn look_for_the_server(instance: Weak<Instance>) {
    let mut back_off = MIN_BACK_OFF;
    loop {
        tokio::time::sleep(back_off).await;
        back_off = (back_off * 2).min(MAX_BACK_OFF);
        let Some(instance) = instance.upgrade() else {
            return;
        };
        instance.cancel_what_was_given_up().await;
        match instance.check().await {
            Ok(()) => {
                tracing::info!("Postgres is back");
                instance.answered();
                *instance.outage() = None;
                return;
            }
            Err(failure) => {
                if let Some(outage) = &mut *instance.outage() {
                    *outage = Failure {
                        reach: Reach::Connection,
                        ..failure
                    };
                }
            }
        }
    }
}

//! The transaction a handler works in, and what becomes of it when the handler has answered.

use std::{
    borrow::Cow,
    fmt,
    ops::{Deref, DerefMut},
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use axum::{body::Body, extract::FromRequestParts, response::IntoResponse};
use futures_util::{
    FutureExt, StreamExt, TryFutureExt, TryStreamExt,
    future::BoxFuture,
    stream::{BoxStream, iter},
};
use http::{Extensions, HeaderValue, Response, StatusCode, header, request::Parts};
use sqlx::{Database, Either, Execute, Executor, SqlStr};
use tokio::{
    sync::Notify,
    time::{Instant, sleep_until},
};

use crate::{
    bounded::within,
    observe,
    store::Ticket,
    transacted::{
        self, Committed, Conflicted, Left, NOT_GIVEN_BACK, Offered, Open, Recording, Work,
    },
};

/// How the transactions of a layer are begun. See
/// [`IdempotencyLayer::transactional_with`](crate::IdempotencyLayer::transactional_with).
///
/// ```
/// use std::time::Duration;
///
/// use tower_idempotency::{Isolation, TxOptions};
///
/// let options = TxOptions::default()
///     .isolation(Isolation::RepeatableRead)
///     .lock_timeout(Duration::from_millis(500));
/// ```
#[derive(Debug, Clone)]
#[must_use = "options do nothing until a layer is given them"]
pub struct TxOptions {
    pub(crate) isolation: Option<Isolation>,
    pub(crate) lock_timeout: Duration,
    pub(crate) idle_timeout: Duration,
    pub(crate) max_hold: Duration,
}

impl Default for TxOptions {
    fn default() -> Self {
        Self {
            isolation: None,
            lock_timeout: Duration::from_secs(2),
            idle_timeout: Duration::from_secs(10),
            max_hold: Duration::from_secs(5),
        }
    }
}

impl TxOptions {
    /// Postgres: the isolation level, unless a handler chooses one with
    /// `Tx::isolation`. Default: that of the database (`default_transaction_isolation`).
    pub fn isolation(mut self, isolation: Isolation) -> Self {
        self.isolation = Some(isolation);
        self
    }

    /// Postgres: how long a statement waits for a lock before it fails with SQLSTATE 55P03
    /// (`lock_timeout`). Default 2 s.
    ///
    /// # Panics
    ///
    /// When shorter than 1 ms, or longer than an hour.
    pub fn lock_timeout(mut self, timeout: Duration) -> Self {
        self.lock_timeout = bounded("lock_timeout", timeout);
        self
    }

    /// Postgres: how long the transaction may stand idle between two statements before the server ends
    /// it (`idle_in_transaction_session_timeout`). Default 10 s.
    ///
    /// # Panics
    ///
    /// When shorter than 1 ms, or longer than an hour.
    pub fn idle_timeout(mut self, timeout: Duration) -> Self {
        self.idle_timeout = bounded("idle_timeout", timeout);
        self
    }

    /// SQLite: how long a handler may hold its transaction, and with it the only place to write, from its
    /// first statement to its answer. Then it is dropped, its transaction rolled back, and the client gets
    /// 503. Default 5 s.
    ///
    /// # Panics
    ///
    /// When shorter than 1 ms, or longer than an hour.
    pub fn max_hold(mut self, limit: Duration) -> Self {
        self.max_hold = bounded("max_hold", limit);
        self
    }
}

fn bounded(option: &str, duration: Duration) -> Duration {
    assert!(
        duration >= Duration::from_millis(1) && duration <= Duration::from_secs(3_600),
        "{option} must be at least 1 ms and at most an hour, not {duration:?}"
    );
    duration
}

/// How much a transaction sees of its neighbours
/// (<https://www.postgresql.org/docs/current/transaction-iso.html>).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Isolation {
    /// Each statement sees what was committed before it began. Enough where one conditional statement
    /// decides, or rows are locked before they are judged.
    ReadCommitted,
    /// All statements see one moment; a row that changed since cannot be written (40001).
    RepeatableRead,
    /// As if transactions ran one after the other (40001 where they cannot).
    Serializable,
}

/// The databases whose transactions a layer commits together with its records: `sqlx::Postgres` and
/// `sqlx::Sqlite`. Sealed.
pub trait TxDatabase: Database + sealed::Sealed {}

mod sealed {
    pub trait Sealed {}
    #[cfg(feature = "postgres")]
    impl Sealed for sqlx::Postgres {}
    #[cfg(feature = "sqlite")]
    impl Sealed for sqlx::Sqlite {}
}

#[cfg(feature = "postgres")]
impl TxDatabase for sqlx::Postgres {}
#[cfg(feature = "sqlite")]
impl TxDatabase for sqlx::Sqlite {}

/// Begins transactions on a store's database.
pub(crate) trait Source<DB: Database>: Send + Sync + 'static {
    /// `ticket` is the claim the transaction is to complete, where there is one.
    fn begin<'a>(
        &'a self,
        options: &'a TxOptions,
        isolation: Option<Isolation>,
        ticket: Option<&'a Ticket>,
    ) -> BoxFuture<'a, Result<Box<dyn OpenTransaction<DB>>, sqlx::Error>>;

    /// How long a transaction may last, counted from when it was begun.
    fn max_hold(&self, options: &TxOptions) -> Option<Duration>;
}

/// Whether a transaction may be committed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ready {
    Yes,
    /// The claim holds its record no longer.
    Lost,
    /// The handler has ended it by itself, and may have committed it, or something after it.
    #[cfg(feature = "postgres")]
    Ended,
    /// It cannot be committed as it is, and nothing of it stays.
    Void,
}

/// A transaction that was begun. Dropped, it is rolled back some time later.
pub(crate) trait OpenTransaction<DB: Database>: Send + 'static {
    fn connection(&self) -> &DB::Connection;

    fn connection_mut(&mut self) -> &mut DB::Connection;

    /// Makes sure that it is still the transaction that was begun, and writes the outcome to the record,
    /// where there is one. Fails when the transaction is aborted.
    fn complete<'a>(
        &'a mut self,
        recording: Option<&'a Recording>,
    ) -> BoxFuture<'a, Result<Ready, sqlx::Error>>;

    fn commit(self: Box<Self>) -> BoxFuture<'static, Result<(), sqlx::Error>>;

    /// As soon as possible, whatever is under way. Ends in bounded time. Answers false when the handler has
    /// ended it by itself, and may have committed it.
    fn rollback(self: Box<Self>) -> BoxFuture<'static, bool>;

    /// Cuts the connection: whatever was under way, nothing more is sent on it.
    fn cut(self: Box<Self>);

    /// What interrupts a statement that is under way, where that can be done from outside.
    fn interrupt(&self) -> Option<Interrupt> {
        None
    }
}

pub(crate) type Interrupt = Box<dyn Fn() + Send + Sync>;

/// One request's place for a transaction.
///
/// The transaction stays here, and the handler is lent its connection for one statement after the other: so
/// it can be ended whatever has become of the handler's [`Tx`].
pub(crate) struct Slot<DB: Database> {
    source: Arc<dyn Source<DB>>,
    options: Arc<TxOptions>,
    ticket: Option<Ticket>,
    open: Lent<DB>,
    state: Mutex<State>,
    /// What the handler has chosen.
    isolation: Mutex<Option<Isolation>>,
    /// A statement failed for another transaction's sake, and none has succeeded since.
    conflicted: AtomicBool,
    /// A transaction could not be begun, so a statement was never sent.
    unbegun: AtomicBool,
    /// Interrupts what is under way on the connection, whoever has it.
    interrupt: OnceLock<Interrupt>,
    begun: OnceLock<Instant>,
    begins: Notify,
}

type Lent<DB> = tokio::sync::Mutex<Option<Box<dyn OpenTransaction<DB>>>>;

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Here,
    /// In the hands of the handler.
    Out,
    /// The handler has answered.
    Over,
}

/// The transaction a handler writes through, as an axum extractor: what is done in it is committed
/// together with the record of the answer, or not at all.
///
/// It is begun with the first statement. It is committed when the handler answers with 2xx or 3xx, and
/// rolled back otherwise; there is no `commit` to forget.
///
/// ```
/// # #[cfg(feature = "sqlite")] {
/// use axum::{Json, Router, extract::Path, http::StatusCode, routing::post};
/// use sqlx::Sqlite;
/// use tower_idempotency::{IdempotencyLayer, SqliteStore, Tx, TxError};
///
/// async fn withdraw(
///     mut tx: Tx<Sqlite>,
///     Path(wallet): Path<i64>,
///     Json(satang): Json<i64>,
/// ) -> Result<StatusCode, TxError> {
///     let paid = sqlx::query(
///         "UPDATE wallets SET balance = balance - ?1 WHERE id = ?2 AND balance >= ?1",
///     )
///     .bind(satang)
///     .bind(wallet)
///     .execute(&mut tx)
///     .await?;
///     Ok(match paid.rows_affected() {
///         1 => StatusCode::CREATED,
///         // Rolled back, and the key is free: once there is money, the same request may succeed.
///         _ => StatusCode::PAYMENT_REQUIRED,
///     })
/// }
///
/// fn app(store: SqliteStore) -> Router {
///     Router::new()
///         .route("/wallets/{id}/withdrawals", post(withdraw))
///         .route_layer(IdempotencyLayer::new(store).transactional())
/// }
/// # }
/// ```
///
/// `&mut tx` is an sqlx [`Executor`]; it reads an answer to its end before it gives the first row out. For
/// code that takes a connection, and to read many rows one by one, there is
/// [`connection`](Self::connection).
///
/// One handler has one `Tx` at a time. It must be given back, which happens by itself when it goes out of
/// scope, before the handler answers: one that was moved into a response body or another task cannot be
/// committed, and the request is answered with 500. (A task that is left behind in the possession of the
/// lent connection keeps the transaction open until it gives it back; in SQLite nobody else writes meanwhile.) Statements that end a transaction (`COMMIT`,
/// `ROLLBACK`) are not for handlers; savepoints are, with [`begin`](sqlx::Connection::begin) on its connection.
///
/// Where no key applies (a GET, a key left out where keys are optional, an unprotected run) it is an
/// ordinary transaction, committed on 2xx and 3xx.
///
/// See [`transactions`](crate::transactions) for all that can happen.
///
/// # Errors
///
/// As an extractor: 500 when the layer is not [`transactional`](crate::IdempotencyLayer::transactional),
/// its store has another database, or the handler has a `Tx` already.
///
/// # Cancel safety
///
/// Dropping a statement's future leaves the transaction usable: what is still to come of the answer is
/// skipped by the next statement. Whether the statement was carried out is then unknown.
pub struct Tx<DB: TxDatabase> {
    slot: Arc<Slot<DB>>,
}

impl<DB: TxDatabase> Tx<DB> {
    /// Lends the connection, with the transaction begun, to code that takes one. As long as it is lent,
    /// `&mut tx` cannot be used.
    ///
    /// ```
    /// # #[cfg(feature = "sqlite")] {
    /// use sqlx::{Connection, Sqlite, SqliteConnection};
    /// use tower_idempotency::{Tx, TxError};
    ///
    /// async fn debit(connection: &mut SqliteConnection, satang: i64) -> Result<(), sqlx::Error> {
    ///     let debit = sqlx::query("UPDATE wallets SET balance = balance - ?1");
    ///     debit.bind(satang).execute(connection).await?;
    ///     Ok(())
    /// }
    ///
    /// async fn handler(mut tx: Tx<Sqlite>) -> Result<&'static str, TxError> {
    ///     // For one call. Without the `*` it is no connection yet.
    ///     debit(&mut *tx.connection().await?, 500).await?;
    ///
    ///     // For several.
    ///     let mut connection = tx.connection().await?;
    ///     let mut savepoint = connection.begin().await?;
    ///     debit(&mut savepoint, 20).await?;
    ///     savepoint.rollback().await?;
    ///     sqlx::query("SELECT 1").execute(&mut *connection).await?;
    ///     drop(connection);
    ///
    ///     sqlx::query("SELECT 2").execute(&mut tx).await?;
    ///     Ok("done")
    /// }
    /// # }
    /// ```
    ///
    /// The layer does not see the statements sent on it. Answer their errors with [`TxError`], so that a
    /// conflict with another transaction is run again.
    ///
    /// # Errors
    ///
    /// What sqlx says when the transaction cannot be begun, such as `PoolTimedOut`; an `Io` error once the
    /// request was answered.
    pub async fn connection(&mut self) -> Result<TxConnection<'_, DB>, sqlx::Error> {
        let slot = &*self.slot;
        let mut lent = slot.open.lock().await;
        if lent.is_none() && !slot.is_over() {
            let ticket = slot.ticket.as_ref();
            let begun = slot.source.begin(&slot.options, slot.isolation(), ticket);
            let open = begun.await.inspect_err(|error| {
                slot.unbegun.store(true, Ordering::Relaxed);
                slot.note(error);
            })?;
            if let Some(interrupt) = open.interrupt() {
                slot.interrupt.get_or_init(|| interrupt);
            }
            *lent = Some(open);
            slot.begun.get_or_init(Instant::now);
            slot.begins.notify_waiters();
        }
        // Dropped, it cuts what was begun for a request that was answered meanwhile.
        let connection = TxConnection { slot, lent };
        if slot.is_over() {
            let over = "the request was answered, and its transaction is over";
            return Err(sqlx::Error::Io(std::io::Error::other(over)));
        }
        Ok(connection)
    }
}

/// The connection of a [`Tx`], lent for a while: pass `&mut *connection` on.
pub struct TxConnection<'t, DB: TxDatabase> {
    slot: &'t Slot<DB>,
    /// With a transaction that was begun, unless the request was answered.
    lent: tokio::sync::MutexGuard<'t, Option<Box<dyn OpenTransaction<DB>>>>,
}

const BEGUN: &str = "a connection is lent only once its transaction was begun";

impl<DB: TxDatabase> Deref for TxConnection<'_, DB> {
    type Target = DB::Connection;

    fn deref(&self) -> &DB::Connection {
        self.lent.as_deref().expect(BEGUN).connection()
    }
}

impl<DB: TxDatabase> DerefMut for TxConnection<'_, DB> {
    fn deref_mut(&mut self) -> &mut DB::Connection {
        self.lent.as_deref_mut().expect(BEGUN).connection_mut()
    }
}

impl<DB: TxDatabase> Drop for TxConnection<'_, DB> {
    fn drop(&mut self) {
        // The request was answered meanwhile. Nobody will commit this, so it must not hold locks.
        if self.slot.is_over()
            && let Some(open) = self.lent.take()
        {
            open.cut();
        }
    }
}

impl<DB: TxDatabase> fmt::Debug for TxConnection<'_, DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TxConnection")
            .field("over", &self.slot.is_over())
            .finish_non_exhaustive()
    }
}

#[cfg(feature = "postgres")]
impl Tx<sqlx::Postgres> {
    /// Chooses the isolation level of this transaction, before its first statement.
    ///
    /// # Errors
    ///
    /// `InvalidSavePointStatement` when it was begun already.
    pub fn isolation(&mut self, isolation: Isolation) -> Result<&mut Self, sqlx::Error> {
        if self.slot.begun.get().is_some() {
            return Err(sqlx::Error::InvalidSavePointStatement);
        }
        *self
            .slot
            .isolation
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = Some(isolation);
        Ok(self)
    }
}

impl<DB: TxDatabase> Drop for Tx<DB> {
    fn drop(&mut self) {
        let mut state = self.slot.state();
        if let State::Out = *state {
            *state = State::Here;
        }
    }
}

impl<DB: TxDatabase> fmt::Debug for Tx<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tx")
            .field("begun", &self.slot.begun.get().is_some())
            .finish_non_exhaustive()
    }
}

/// `Executor` for one database: sqlx's connections cannot be spoken of in general here.
macro_rules! executor {
    ($database:ty) => {
        impl<'c> Executor<'c> for &'c mut Tx<$database> {
            type Database = $database;

            fn fetch_many<'e, 'q: 'e, E>(
                self,
                query: E,
            ) -> BoxStream<
                'e,
                Result<
                    Either<<$database as Database>::QueryResult, <$database as Database>::Row>,
                    sqlx::Error,
                >,
            >
            where
                'c: 'e,
                E: 'q + Execute<'q, $database>,
            {
                let slot = self.slot.clone();
                async move {
                    let mut connection = self.connection().await?;
                    let all: Vec<_> = connection.fetch_many(query).try_collect().await?;
                    Ok(all)
                }
                .inspect(move |done| slot.note_of(done))
                .map_ok(|all| iter(all.into_iter().map(Ok)))
                .try_flatten_stream()
                .boxed()
            }

            fn fetch_optional<'e, 'q: 'e, E>(
                self,
                query: E,
            ) -> BoxFuture<'e, Result<Option<<$database as Database>::Row>, sqlx::Error>>
            where
                'c: 'e,
                E: 'q + Execute<'q, $database>,
            {
                let slot = self.slot.clone();
                async move { self.connection().await?.fetch_optional(query).await }
                    .inspect(move |done| slot.note_of(done))
                    .boxed()
            }

            fn prepare_with<'e>(
                self,
                sql: SqlStr,
                parameters: &'e [<$database as Database>::TypeInfo],
            ) -> BoxFuture<'e, Result<<$database as Database>::Statement, sqlx::Error>>
            where
                'c: 'e,
            {
                let slot = self.slot.clone();
                async move { self.connection().await?.prepare_with(sql, parameters).await }
                    .inspect(move |done| slot.note_of(done))
                    .boxed()
            }

            fn describe<'e>(
                self,
                sql: SqlStr,
            ) -> BoxFuture<'e, Result<sqlx_core::describe::Describe<$database>, sqlx::Error>>
            where
                'c: 'e,
            {
                let slot = self.slot.clone();
                async move { self.connection().await?.describe(sql).await }
                    .inspect(move |done| slot.note_of(done))
                    .boxed()
            }
        }
    };
}

#[cfg(feature = "postgres")]
executor!(sqlx::Postgres);
#[cfg(feature = "sqlite")]
executor!(sqlx::Sqlite);

impl<DB: TxDatabase> Slot<DB> {
    pub(crate) fn new(
        source: Arc<dyn Source<DB>>,
        options: Arc<TxOptions>,
        ticket: Option<Ticket>,
    ) -> Self {
        Self {
            source,
            options,
            ticket,
            open: Lent::default(),
            state: Mutex::new(State::Here),
            isolation: Mutex::default(),
            conflicted: AtomicBool::new(false),
            unbegun: AtomicBool::new(false),
            interrupt: OnceLock::new(),
            begun: OnceLock::new(),
            begins: Notify::new(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn isolation(&self) -> Option<Isolation> {
        *self
            .isolation
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn note(&self, error: &sqlx::Error) {
        if is_conflict(error) {
            self.conflicted.store(true, Ordering::Relaxed);
        }
    }

    /// A statement that succeeds after a conflict says that the handler has gone back to a savepoint.
    fn note_of<T>(&self, done: &Result<T, sqlx::Error>) {
        match done {
            Ok(_) => self.conflicted.store(false, Ordering::Relaxed),
            Err(error) => self.note(error),
        }
    }

    fn take_out(self: &Arc<Self>) -> Result<Tx<DB>, NoTx> {
        let mut state = self.state();
        match *state {
            State::Here => {
                *state = State::Out;
                Ok(Tx { slot: self.clone() })
            }
            State::Out => Err(NoTx(Why::Taken)),
            State::Over => Err(NoTx(Why::Over)),
        }
    }

    fn is_over(&self) -> bool {
        *self.state() == State::Over
    }

    /// Ends the handler's part. Answers where the transaction was.
    fn end(&self) -> State {
        std::mem::replace(&mut *self.state(), State::Over)
    }

    /// The transaction, if one was begun, once a statement has ended that is still under way in some other
    /// task; `None` when that takes too long. Whoever has it then cuts it.
    async fn take(&self) -> Option<Option<Box<dyn OpenTransaction<DB>>>> {
        let lent = within(STATEMENT_LIMIT, self.open.lock()).await;
        Some(lent?.take())
    }

    fn interrupt(&self) {
        if let Some(interrupt) = self.interrupt.get() {
            interrupt();
        }
    }
}

impl<DB: TxDatabase> Work for Slot<DB> {
    fn offer(self: Arc<Self>, extensions: &mut Extensions) {
        transacted::withdraw(extensions);
        extensions.insert(self);
        extensions.insert(Offered(|extensions| {
            extensions.remove::<Arc<Self>>();
        }));
    }

    fn left(&self) -> Left {
        match *self.state() {
            State::Here if self.unbegun.load(Ordering::Relaxed) => Left::Failed,
            State::Here if self.begun.get().is_none() => Left::Unused,
            State::Here => Left::Back,
            State::Out | State::Over => Left::Out,
        }
    }

    fn conflicted(&self) -> bool {
        self.conflicted.load(Ordering::Relaxed)
    }

    fn open(&self) -> Open {
        match self.begun.get() {
            Some(_) if self.is_over() => Open::Not,
            // Where there is a limit to how long it is held, it is because nobody else writes meanwhile.
            Some(_) if self.source.max_hold(&self.options).is_some() => Open::Alone,
            Some(_) => Open::Beside,
            None => Open::Not,
        }
    }

    fn overdue(&self) -> BoxFuture<'_, ()> {
        async {
            let Some(limit) = self.source.max_hold(&self.options) else {
                return std::future::pending().await;
            };
            let begins = self.begins.notified();
            let begun = match self.begun.get() {
                Some(begun) => *begun,
                None => {
                    begins.await;
                    *self.begun.get_or_init(Instant::now)
                }
            };
            sleep_until(begun + limit).await;
        }
        .boxed()
    }

    fn commit<'a>(
        &'a self,
        recording: Option<&'a Recording>,
        limit: Duration,
    ) -> BoxFuture<'a, Committed> {
        async move {
            let was = self.end();
            // One that cannot be had was lent for ever.
            let Some(Some(mut open)) = self.take().await else {
                return Committed::Refused(NOT_GIVEN_BACK);
            };
            if was != State::Here {
                return match open.rollback().await {
                    true => Committed::Refused(NOT_GIVEN_BACK),
                    false => Committed::Ended,
                };
            }
            match within(limit, open.complete(recording)).await {
                Some(Ok(Ready::Yes)) => {}
                Some(Ok(Ready::Lost)) => {
                    open.rollback().await;
                    return Committed::Lost;
                }
                #[cfg(feature = "postgres")]
                Some(Ok(Ready::Ended)) => {
                    open.rollback().await;
                    return Committed::Ended;
                }
                Some(Ok(Ready::Void)) => {
                    return match open.rollback().await {
                        true => Committed::Refused(VOID),
                        false => Committed::Ended,
                    };
                }
                Some(Err(error)) => {
                    observe::commit_failed(Some(&error));
                    return match open.rollback().await {
                        true => refused(&error),
                        false => Committed::Ended,
                    };
                }
                None => {
                    observe::commit_failed(None);
                    open.cut();
                    return Committed::Unreachable;
                }
            }
            match within(limit, open.commit()).await {
                Some(Ok(())) => Committed::Done,
                Some(Err(error)) => {
                    observe::commit_failed(Some(&error));
                    match is_verdict(&error) {
                        true => refused(&error),
                        false => Committed::Unknown,
                    }
                }
                None => {
                    observe::commit_failed(None);
                    Committed::Unknown
                }
            }
        }
        .boxed()
    }

    fn rollback(&self) -> BoxFuture<'_, bool> {
        async {
            if self.end() == State::Out {
                self.interrupt();
            }
            match self.take().await {
                Some(Some(open)) => open.rollback().await,
                // Nothing was begun; or a task that was left behind still has it.
                Some(None) | None => true,
            }
        }
        .boxed()
    }

    fn close(&self) {
        self.end();
        match self.open.try_lock() {
            Ok(mut open) => {
                if let Some(open) = open.take() {
                    open.cut();
                }
            }
            // It is cut when the statement ends.
            Err(_) => self.interrupt(),
        }
    }
}

/// How long a statement is waited for that a task of its own is still carrying out.
const STATEMENT_LIMIT: Duration = Duration::from_secs(1);

const VOID: &str =
    "the handler ended its transaction by itself, or left a savepoint in it open; nothing was done";

/// What an error before the end of COMMIT means: nothing was committed.
fn refused(error: &sqlx::Error) -> Committed {
    match error {
        _ if is_conflict(error) => Committed::Conflict,
        _ if is_passing(error) => Committed::Unreachable,
        _ if sqlstate(error).as_deref() == Some("25P02") => Committed::Refused(
            "a statement of the handler failed, and the handler went on as if it had not; nothing was done",
        ),
        _ => Committed::Refused(
            "the database refused the transaction when it was to be committed; nothing was done",
        ),
    }
}

/// Whether an error of COMMIT itself says that nothing was committed. A server that is being shut down, or
/// waits for a standby, may say something else after it has committed.
fn is_verdict(error: &sqlx::Error) -> bool {
    const SILENT: [&str; 6] = ["08", "53", "57", "58", "XX", "40003"];
    let Some(code) = sqlstate(error) else {
        return false;
    };
    match code.len() {
        5 => !SILENT.iter().any(|class| code.starts_with(class)),
        // Of SQLite: a constraint that is checked at the end.
        _ => code.parse::<u32>().is_ok_and(|code| code & 0xff == 19),
    }
}

pub(crate) fn sqlstate(error: &sqlx::Error) -> Option<Cow<'_, str>> {
    error.as_database_error()?.code()
}

/// Serialization failure or deadlock: the transaction failed for another one's sake.
pub(crate) fn is_conflict(error: &sqlx::Error) -> bool {
    matches!(sqlstate(error).as_deref(), Some("40001" | "40P01"))
}

/// The database could not be reached, was busy, or gave the transaction up: the same again may succeed.
fn is_passing(error: &sqlx::Error) -> bool {
    match sqlstate(error) {
        // Connections, resources, operators, time-outs; and, of SQLite, what is locked, interrupted or
        // full.
        Some(code) => {
            is_conflict(error)
                || ["08", "53", "57"]
                    .iter()
                    .any(|class| code.starts_with(class))
                || ["55P03", "25P03", "25006"].contains(&&*code)
                || matches!(code.parse::<u32>().map(|code| code & 0xff), Ok(5 | 6 | 9 | 13) if code.len() < 5)
        }
        None => matches!(
            error,
            sqlx::Error::Io(_)
                | sqlx::Error::Tls(_)
                | sqlx::Error::Protocol(_)
                | sqlx::Error::PoolTimedOut
                | sqlx::Error::PoolClosed
                | sqlx::Error::WorkerCrashed
        ),
    }
}

/// What went wrong with a statement, as a handler's error.
///
/// As a response: 503 with `Retry-After: 1` for what passes (no connection, a lock that was not free in
/// time, a conflict with another transaction), 500 for everything else, and an event with the database's
/// code. After a serialization failure or a deadlock (SQLSTATE 40001, 40P01) the layer does not send that
/// answer, but runs the handler again; it knows it by a mark in the response's extensions, so answer with
/// this response too where an error type of your own wraps it.
///
/// Neither its text, its `Debug` output nor the event shows what the database said, for that may hold
/// values; its [`source`](std::error::Error::source) does.
///
/// ```
/// # #[cfg(feature = "sqlite")] {
/// use sqlx::Sqlite;
/// use tower_idempotency::{Tx, TxError};
///
/// async fn handler(mut tx: Tx<Sqlite>) -> Result<&'static str, TxError> {
///     sqlx::query("INSERT INTO orders DEFAULT VALUES").execute(&mut tx).await?;
///     Ok("ordered")
/// }
/// # }
/// ```
pub struct TxError(sqlx::Error);

impl TxError {
    /// Whether the transaction failed for another one's sake: SQLSTATE 40001 or 40P01.
    pub fn is_conflict(&self) -> bool {
        is_conflict(&self.0)
    }

    /// Whether the same again may succeed.
    pub fn is_passing(&self) -> bool {
        is_passing(&self.0)
    }

    /// The SQLSTATE, of SQLite the extended result code, where the database said one.
    pub fn code(&self) -> Option<Cow<'_, str>> {
        sqlstate(&self.0)
    }

    /// What sqlx said.
    pub fn into_inner(self) -> sqlx::Error {
        self.0
    }
}

impl From<sqlx::Error> for TxError {
    fn from(error: sqlx::Error) -> Self {
        Self(error)
    }
}

impl fmt::Display for TxError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the transaction failed")?;
        match self.code() {
            Some(code) => write!(f, " with code {code}"),
            None => Ok(()),
        }
    }
}

impl fmt::Debug for TxError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TxError")
            .field("code", &self.code())
            .finish_non_exhaustive()
    }
}

impl std::error::Error for TxError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.0)
    }
}

impl IntoResponse for TxError {
    fn into_response(self) -> Response<Body> {
        observe::statement_failed(&self);
        let mut response = if self.is_passing() {
            let retry_after = (header::RETRY_AFTER, HeaderValue::from_static("1"));
            let text = "the database is busy or out of reach, and nothing was done";
            (StatusCode::SERVICE_UNAVAILABLE, [retry_after], text).into_response()
        } else {
            let text = "the database refused a statement, and nothing was done";
            (StatusCode::INTERNAL_SERVER_ERROR, text).into_response()
        };
        if self.is_conflict() {
            response.extensions_mut().insert(Conflicted);
        }
        response
    }
}

/// A handler asked for a [`Tx`] it cannot have. As a response: 500.
#[derive(Debug, Clone, Copy)]
pub struct NoTx(Why);

#[derive(Debug, Clone, Copy)]
enum Why {
    NotTransactional,
    OtherDatabase,
    Taken,
    Over,
}

impl fmt::Display for NoTx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            Why::NotTransactional => {
                "no transaction stands behind this request; wrap the route in an IdempotencyLayer with .transactional(), and where two layers cover it, the one that reads its key"
            }
            Why::OtherDatabase => {
                "the layer's store keeps its records in another database than this Tx is for; take the Tx of the store's database"
            }
            Why::Taken => {
                "the handler has a Tx already; take one, and hand it on by reference"
            }
            Why::Over => "the request was answered, and its transaction is over",
        })
    }
}

impl std::error::Error for NoTx {}

impl IntoResponse for NoTx {
    fn into_response(self) -> Response<Body> {
        (StatusCode::INTERNAL_SERVER_ERROR, self.to_string()).into_response()
    }
}

impl<DB: TxDatabase, S: Send + Sync> FromRequestParts<S> for Tx<DB> {
    type Rejection = NoTx;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, NoTx> {
        match parts.extensions.get::<Arc<Slot<DB>>>() {
            Some(slot) => slot.take_out(),
            None if parts.extensions.get::<Offered>().is_some() => Err(NoTx(Why::OtherDatabase)),
            None => Err(NoTx(Why::NotTransactional)),
        }
    }
}

//! The engine outside HTTP: any async operation, run once.

mod error;
mod job;
mod left;
#[cfg(any(feature = "sqlite", feature = "postgres"))]
mod task;

use std::{
    fmt,
    future::Future,
    sync::{Arc, Mutex},
};

use serde::{Serialize, de::DeserializeOwned};

pub use self::error::{Failure, OnceError, UnreadableResult};
use self::{
    job::{Job, Terms},
    left::Left,
};
#[cfg(any(feature = "sqlite", feature = "postgres"))]
use crate::{
    CheckpointError, Rejection, Tx, TxDatabase, TxError, store::TransactionalStore,
    transacted::Conflicted,
};
use crate::{
    Fingerprint, Idempotency, IdempotencyKey, IdempotencyLayer, Scope,
    engine::Engine,
    live::lock,
    options::Options,
    store::{Checkpoints, Inspect},
};

/// Runs an async operation once, however often it is asked for: what
/// [`IdempotencyLayer`] does for requests, for jobs, messages of a queue, and whatever else comes more than once.
///
/// The operation is named by [`Scope`] and [`IdempotencyKey`]; the [`Fingerprint`] says what it is to do, so that
/// a key that comes back for something else is refused. Its result is kept as JSON, and every later call gets it.
///
/// ```
/// use serde::{Deserialize, Serialize};
/// use tower_idempotency::{
///     Failure, Fingerprint, IdempotencyKey, IdempotencyLayer, MemoryStore, Once, OnceError, Rejection, Scope,
/// };
///
/// #[derive(Debug, PartialEq, Serialize, Deserialize)]
/// struct Receipt {
///     charge: String,
/// }
///
/// async fn charge(satang: u64) -> Result<Receipt, Failure<std::io::Error>> {
///     // … call the provider, with `?` …
///     Ok(Receipt { charge: format!("ch_{satang}") })
/// }
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// let once = Once::new(IdempotencyLayer::new(MemoryStore::new()));
/// let pay = async |satang: u64| {
///     let (scope, key) = (Scope::new("payouts"), IdempotencyKey::new("message-17"));
///     let fingerprint = Fingerprint::of([satang.to_be_bytes()]);
///     once.run(scope, key, fingerprint, move || charge(satang)).await
/// };
///
/// let first = pay(500).await.unwrap();
/// assert_eq!((first.value.charge.as_str(), first.replayed), ("ch_500", false));
/// // Delivered again, it does not run; the result is the first one.
/// let again = pay(500).await.unwrap();
/// assert_eq!((again.value, again.replayed), (first.value, true));
/// // A key belongs to one operation.
/// let other = pay(900).await.unwrap_err();
/// assert!(matches!(other, OnceError::Refused(Rejection::KeyReused { .. })));
/// # }
/// ```
///
/// # What it shares with its layer
///
/// It is made of a layer, and is a handle of that layer's engine: store, places for runs
/// ([`max_running`](IdempotencyLayer::max_running)), heartbeat, waiters, and
/// [`drain`](IdempotencyLayer::drain), which covers requests and operations alike. These options count, and are
/// set on the layer before: `ttl`, `response_ttl`, `abandoned_ttl`, `lease`, `max_run`, `max_running`,
/// `max_waiting`, `in_flight`, `recovery`, `resolver`, `resolver_timeout`, `downstream_secret`, `scope_limit`,
/// `store_timeout`, `response_body_limit`, `buffer_timeout` (of a resolver's answer), `transactional` and
/// `count_records_every`.
///
/// All others are about HTTP and do not count: header names, methods, `key_format`, `scope`, `fingerprint`,
/// `retention`, `rejections`, what a replay says. Nor does `store_failure`: where the store cannot be asked, nothing
/// is run.
///
/// A record of an operation is one like any other, for [`Inspect`], sealing and resolvers: its fingerprint has the
/// scheme `once/1`, its answer the status 200 and the result as `application/json`. A
/// [`Verdict::answer`](crate::Verdict::answer) of `axum::Json(result)` is read as a result too, whatever its
/// status. A request and an operation under one scope and key are two different things: the later one is refused
/// as a key that is reused.
///
/// Events, spans and metrics are those of requests, without a request id.
///
/// # When it is cut off
///
/// As with requests, an operation whose process dies, that panics, or fails with
/// [`Failure::Unknown`] is abandoned, and the next call with its key gets what the
/// [`resolver`](IdempotencyLayer::resolver) and [`recovery`](IdempotencyLayer::recovery) say: by default a refusal.
/// (A run that was cut off or panicked uses up one of the attempts of
/// [`Recovery::Rerun`](crate::Recovery::Rerun); one that failed does not.)
/// With [`run_with`](Self::run_with) it can keep checkpoints, and goes on where it was;
/// `run_in` commits its effect together with the record, so that nobody need be asked.
///
/// # Where it runs
///
/// `run` and `run_with` run in their caller's task, and get on only while they are polled. A consumer that awaits
/// something else meanwhile, in another arm of a `select!` or in the `for_each` after a `buffer_unordered`, puts each
/// call into a task of its own (`tokio::spawn`); else an operation stands still in the middle, with its
/// connections and locks. `run_in` is such a task by itself, since others wait for an open transaction: it is in the
/// caller's span, and the caller's task-locals are not there.
///
/// # Cancel safety
///
/// Dropped before a claim is sent, the future of a call leaves nothing behind. Dropped later, the operation goes on
/// as a task of the runtime it was begun on, and its result is recorded; a claim that is won only after the drop is
/// given back without a run. A runtime that ends takes its operations with it; a call of `run_in` that is polled on
/// another one ends with [`Rejection::TransactionFailed`](crate::Rejection::TransactionFailed) then.
///
/// # Panics
///
/// A panic of the operation reaches its caller, once the key is abandoned (in `run_in`: once all is rolled back).
/// Calls need a tokio runtime whose time driver is enabled, and may panic elsewhere.
pub struct Once<S> {
    layer: IdempotencyLayer<S>,
    /// Without a transaction, whatever the layer says.
    plain: Arc<Engine<S>>,
    /// With one, where the layer says so.
    #[cfg(any(feature = "sqlite", feature = "postgres"))]
    transactional: Option<Arc<Engine<S>>>,
}

/// The result of an operation. `Debug` does not show it.
#[derive(Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Done<T> {
    /// What the operation has answered.
    pub value: T,
    /// Whether an earlier call ran it, or a resolver found it out; else it was run for this one.
    pub replayed: bool,
}

impl<T> Done<T> {
    /// The result alone.
    pub fn into_inner(self) -> T {
        self.value
    }
}

impl<T> fmt::Debug for Done<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Done")
            .field("replayed", &self.replayed)
            .finish_non_exhaustive()
    }
}

impl<S: Inspect + Checkpoints> Once<S> {
    /// Operations under the options of this layer, which it shares its engine with.
    ///
    /// # Panics
    ///
    /// When two of its options contradict each other, as where a service is wrapped.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// use tower_idempotency::{IdempotencyLayer, MemoryStore, Once, Recovery};
    ///
    /// let once = Once::new(
    ///     IdempotencyLayer::new(MemoryStore::new())
    ///         .recovery(Recovery::rerun())
    ///         .ttl(Duration::from_secs(14 * 24 * 3600)),
    /// );
    /// ```
    pub fn new(layer: IdempotencyLayer<S>) -> Self {
        let engine = |options| Arc::new(layer.engine_with(options));
        let options = job::options(layer.checked());
        #[cfg(any(feature = "sqlite", feature = "postgres"))]
        let transactional = options
            .transactor
            .is_some()
            .then(|| engine(options.clone()));
        let plain = engine(Options {
            transactor: None,
            ..options
        });
        Self {
            layer,
            plain,
            #[cfg(any(feature = "sqlite", feature = "postgres"))]
            transactional,
        }
    }

    /// The layer it was made of: for its [`drain`](IdempotencyLayer::drain), its
    /// [`reconciler`](IdempotencyLayer::reconciler), and to wrap services with the same engine.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tower_idempotency::{IdempotencyLayer, MemoryStore, Once};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// let once = Once::new(IdempotencyLayer::new(MemoryStore::new()));
    /// let drained = once.layer().drain(Duration::from_secs(20)).await;
    /// assert_eq!((drained.aborted, drained.left), (0, 0));
    /// # }
    /// ```
    pub fn layer(&self) -> &IdempotencyLayer<S> {
        &self.layer
    }

    /// Runs the operation, or answers what an earlier call with this scope and key has come to.
    ///
    /// A key has 1 to 255 bytes, whatever they are, and a scope at most 255. The operation may be asked to do
    /// something else only under another key; what its [`Fingerprint`] is made of is for the caller to say, and
    /// `Fingerprint::of([""])` for all of them means that the key says everything.
    ///
    /// The result must come back from its JSON as it was, which most types do, floats among them, to the last bit. But
    /// `NaN` and the infinities are written as `null`: where a number is asked for, that is
    /// [`OnceError::Unreadable`] for the calls that come later, and `Some(NaN)` comes back as `None`. Nor is what is
    /// nested deeper than 127 levels read back. A result that cannot be written at all, or has more JSON than
    /// [`response_body_limit`](IdempotencyLayer::response_body_limit), reaches this caller; for later ones it is only
    /// known that it is done ([`Rejection::ResponseNotRetained`]).
    ///
    /// This is never part of a transaction of the layer's: what runs here is never run twice without asking.
    ///
    /// # Errors
    ///
    /// [`OnceError`]: the operation's own [`Failure`], where it was run for this call; a refusal; or a recorded
    /// result that is no `T`.
    ///
    /// # Panics
    ///
    /// As [`Once`] says. Its cancel safety stands there, too.
    pub async fn run<T, E, F, A>(
        &self,
        scope: Scope,
        key: IdempotencyKey,
        fingerprint: Fingerprint,
        operation: F,
    ) -> Result<Done<T>, OnceError<E>>
    where
        T: Serialize + DeserializeOwned + Send + 'static,
        E: Send + 'static,
        F: FnOnce() -> A + Send + 'static,
        A: Future<Output = Result<T, Failure<E>>> + Send + 'static,
    {
        let operation = |_| operation();
        self.run_with(scope, key, fingerprint, operation).await
    }

    /// As [`run`](Self::run), for operations that want to know of their run: which
    /// [`attempt`](Idempotency::attempt) it is, whether it still [holds](Idempotency::ensure_owned) its claim, what
    /// [checkpoints](Idempotency::checkpoint) an earlier one has left, and the
    /// [keys](Idempotency::downstream_key) for the calls it makes in its turn.
    ///
    /// ```
    /// use tower_idempotency::{
    ///     CheckpointError, Failure, Fingerprint, Idempotency, IdempotencyKey, IdempotencyLayer, MemoryStore, Once,
    ///     Recovery, Scope,
    /// };
    ///
    /// async fn ship(run: Idempotency) -> Result<String, Failure<CheckpointError>> {
    ///     let parcel: String = match run.checkpointed("parcel").await? {
    ///         Some(parcel) => parcel,
    ///         None => {
    ///             let parcel = "p-1".to_owned(); // … packed, in a way that may be repeated …
    ///             run.checkpoint("parcel", &parcel).await?;
    ///             parcel
    ///         }
    ///     };
    ///     Ok(format!("{parcel} sent in run {}", run.attempt()))
    /// }
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// let once = Once::new(IdempotencyLayer::new(MemoryStore::new()).recovery(Recovery::rerun()));
    /// let (scope, key) = (Scope::new("shipping"), IdempotencyKey::new("order-17"));
    /// let sent = once.run_with(scope, key, Fingerprint::of(["order-17"]), ship).await.unwrap();
    /// assert_eq!(sent.into_inner(), "p-1 sent in run 1");
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`run`](Self::run).
    ///
    /// # Panics
    ///
    /// As [`Once`] says. Its cancel safety stands there, too.
    pub async fn run_with<T, E, F, A>(
        &self,
        scope: Scope,
        key: IdempotencyKey,
        fingerprint: Fingerprint,
        operation: F,
    ) -> Result<Done<T>, OnceError<E>>
    where
        T: Serialize + DeserializeOwned + Send + 'static,
        E: Send + 'static,
        F: FnOnce(Idempotency) -> A + Send + 'static,
        A: Future<Output = Result<T, Failure<E>>> + Send + 'static,
    {
        let result = Left::default();
        let leaves = result.clone();
        let operation = Mutex::new(Some(operation));
        let job = Job::new(move |mut extensions| {
            let operation = lock(&operation).take();
            // Without a transaction the engine begins a claimed run once, and with its handle.
            let operation = operation.expect("an operation is begun once");
            let run = extensions.remove::<Idempotency>();
            let leaves = leaves.clone();
            let running = operation(run.expect("a claimed run has its handle"));
            Box::pin(async move {
                let ended = running.await;
                leaves.answering(ended)
            })
        });
        let terms = Terms { scope, fingerprint };
        let response = job::carry_out(&self.plain, terms, key, job).await;
        result.told_by(response).await
    }
}

#[cfg(any(feature = "sqlite", feature = "postgres"))]
impl<S: TransactionalStore> Once<S> {
    /// As [`run`](Self::run), in a transaction on the store's database: what the operation does in its
    /// [`Tx`] is committed together with the record of its result, or not at all. After a crash at any instant
    /// the next call runs it without asking anybody.
    ///
    /// `Ok` commits, `Err` rolls back and frees the key. After a serialization failure or a deadlock (SQLSTATE 40001,
    /// 40P01) the operation is called again within this call, up to three times: of statements sent with `&mut tx`
    /// and of the commit that is seen by itself; of others where the `Err` is a [`TxError`] or an `sqlx::Error`
    /// that says so.
    ///
    /// All its effects must go through `Tx`; the chapter [`transactions`](crate::transactions) says what that asks
    /// and costs, and all of it holds here, with [`Rejection::TransactionFailed`] and
    /// [`Rejection::TransactionMisused`] for what is a status there.
    ///
    /// It runs in a task of its own, whether this call is polled or not, so that
    /// [`max_hold`](crate::TxOptions::max_hold) holds wherever the call is awaited. Task-locals of the caller are not
    /// found in it; its span is the parent of the operation's.
    ///
    /// ```
    /// # #[cfg(feature = "sqlite")] {
    /// use sqlx::Sqlite;
    /// use tower_idempotency::{
    ///     Done, Fingerprint, IdempotencyKey, Once, OnceError, Scope, SqliteStore, Tx, TxError,
    /// };
    ///
    /// async fn book(once: &Once<SqliteStore>, message: &str, satang: i64) -> Result<Done<i64>, OnceError<TxError>> {
    ///     let (scope, key) = (Scope::new("bookings"), IdempotencyKey::new(message));
    ///     let fingerprint = Fingerprint::of([satang.to_be_bytes()]);
    ///     let book = move |mut tx: Tx<Sqlite>| async move {
    ///         let booked = sqlx::query("INSERT INTO bookings (satang) VALUES (?1)")
    ///             .bind(satang)
    ///             .execute(&mut tx)
    ///             .await?;
    ///         Ok(booked.last_insert_rowid())
    ///     };
    ///     once.run_in(scope, key, fingerprint, book).await
    /// }
    ///
    /// # use tower_idempotency::IdempotencyLayer;
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let file = folder.path().join("service.db");
    /// let store = SqliteStore::open(&file).await.unwrap();
    /// # let pool = sqlx::SqlitePool::connect(file.to_str().unwrap()).await.unwrap();
    /// # sqlx::query("CREATE TABLE bookings (id INTEGER PRIMARY KEY, satang INTEGER)").execute(&pool).await.unwrap();
    /// let once = Once::new(IdempotencyLayer::new(store).transactional());
    /// assert!(!book(&once, "message-17", 500).await.unwrap().replayed);
    /// assert!(book(&once, "message-17", 500).await.unwrap().replayed);
    /// # let booked: i64 = sqlx::query_scalar("SELECT count(*) FROM bookings").fetch_one(&pool).await.unwrap();
    /// # assert_eq!(booked, 1);
    /// # });
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`OnceError`]; what the operation has failed with is a [`Failure::NothingHappened`], since it was rolled
    /// back. Where the layer is not [`transactional`](IdempotencyLayer::transactional):
    /// [`Rejection::TransactionMisused`], before anything is done.
    ///
    /// # Panics
    ///
    /// As [`Once`] says. Its cancel safety stands there, too.
    pub async fn run_in<T, E, F, A>(
        &self,
        scope: Scope,
        key: IdempotencyKey,
        fingerprint: Fingerprint,
        operation: F,
    ) -> Result<Done<T>, OnceError<E>>
    where
        T: Serialize + DeserializeOwned + Send + 'static,
        E: Send + 'static,
        F: Fn(Tx<S::Database>) -> A + Send + Sync + 'static,
        A: Future<Output = Result<T, E>> + Send + 'static,
    {
        let operation = move |tx, _| operation(tx);
        self.run_in_with(scope, key, fingerprint, operation).await
    }

    /// As [`run_in`](Self::run_in), for operations that want to know of their run: its
    /// [key](Idempotency::key), which [`attempt`](Idempotency::attempt) it is, and the
    /// [keys](Idempotency::downstream_key) for the calls that its rows ask others to make later, say in an outbox.
    ///
    /// ```
    /// # #[cfg(feature = "sqlite")] {
    /// use sqlx::Sqlite;
    /// use tower_idempotency::{
    ///     Fingerprint, Idempotency, IdempotencyKey, IdempotencyLayer, Once, Scope, SqliteStore, Tx, TxError,
    /// };
    ///
    /// async fn order(mut tx: Tx<Sqlite>, run: Idempotency) -> Result<(), TxError> {
    ///     let charge = run.downstream_key("charge").expect("the layer has a secret");
    ///     sqlx::query("INSERT INTO charges_to_make (key) VALUES (?1)")
    ///         .bind(charge.as_str())
    ///         .execute(&mut tx)
    ///         .await?;
    ///     Ok(())
    /// }
    ///
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let file = folder.path().join("service.db");
    /// let store = SqliteStore::open(&file).await.unwrap();
    /// # let pool = sqlx::SqlitePool::connect(file.to_str().unwrap()).await.unwrap();
    /// # sqlx::query("CREATE TABLE charges_to_make (key TEXT)").execute(&pool).await.unwrap();
    /// let once = Once::new(IdempotencyLayer::new(store).transactional().downstream_secret([7; 32]));
    /// for replayed in [false, true] {
    ///     let (scope, key) = (Scope::new("orders"), IdempotencyKey::new("order-17"));
    ///     let done = once.run_in_with(scope, key, Fingerprint::of(["order-17"]), order).await.unwrap();
    ///     assert_eq!(done.replayed, replayed);
    /// }
    /// # let made: i64 = sqlx::query_scalar("SELECT count(*) FROM charges_to_make").fetch_one(&pool).await.unwrap();
    /// # assert_eq!(made, 1);
    /// # });
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`run_in`](Self::run_in); a [`CheckpointError`] that says so is a conflict, too.
    ///
    /// # Panics
    ///
    /// As [`Once`] says. Its cancel safety stands there, too.
    pub async fn run_in_with<T, E, F, A>(
        &self,
        scope: Scope,
        key: IdempotencyKey,
        fingerprint: Fingerprint,
        operation: F,
    ) -> Result<Done<T>, OnceError<E>>
    where
        T: Serialize + DeserializeOwned + Send + 'static,
        E: Send + 'static,
        F: Fn(Tx<S::Database>, Idempotency) -> A + Send + Sync + 'static,
        A: Future<Output = Result<T, E>> + Send + 'static,
    {
        let Some(engine) = self.transactional.clone() else {
            let misused = Rejection::TransactionMisused(NOT_TRANSACTIONAL);
            return Err(OnceError::Refused(misused));
        };
        let terms = Terms { scope, fingerprint };
        let call = async move {
            let result = Left::default();
            let job = in_transaction(Arc::new(operation), result.clone());
            let response = job::carry_out(&engine, terms, key, job).await;
            result.told_by(response).await
        };
        // Whether it was committed before its runtime ended, the record tells the next call.
        let cut_off = || Err(OnceError::Refused(Rejection::TransactionFailed));
        task::apart(call).await.unwrap_or_else(cut_off)
    }
}

/// An operation that is begun with a transaction, as often as the engine says.
#[cfg(any(feature = "sqlite", feature = "postgres"))]
fn in_transaction<DB, T, E, F, A>(operation: Arc<F>, leaves: Left<T, E>) -> Job
where
    DB: TxDatabase,
    T: Serialize + DeserializeOwned + Send + 'static,
    E: Send + 'static,
    F: Fn(Tx<DB>, Idempotency) -> A + Send + Sync + 'static,
    A: Future<Output = Result<T, E>> + Send + 'static,
{
    use axum::extract::FromRequestParts;

    Job::new(move |extensions| {
        let (operation, leaves) = (operation.clone(), leaves.clone());
        let (mut head, ()) = http::Request::new(()).into_parts();
        head.extensions = extensions;
        Box::pin(async move {
            let tx = Tx::from_request_parts(&mut head, &()).await;
            let (Ok(tx), Some(run)) = (tx, head.extensions.remove::<Idempotency>()) else {
                return job::refused(&Rejection::TransactionMisused(NOT_TRANSACTIONAL));
            };
            match operation(tx, run).await {
                Ok(value) => leaves.answering(Ok(value)),
                Err(error) => {
                    let conflicts = is_conflict(&error);
                    let mut response = leaves.answering(Err(Failure::NothingHappened(error)));
                    if conflicts {
                        response.extensions_mut().insert(Conflicted);
                    }
                    response
                }
            }
        })
    })
}

#[cfg(any(feature = "sqlite", feature = "postgres"))]
const NOT_TRANSACTIONAL: &str = "run_in needs a layer with .transactional(), and Once::new was given one without; nothing was done";

/// Whether an operation failed for another transaction's sake, as far as its error is one that can tell.
#[cfg(any(feature = "sqlite", feature = "postgres"))]
fn is_conflict(error: &(impl Send + 'static)) -> bool {
    let error: &dyn std::any::Any = error;
    if let Some(error) = error.downcast_ref::<CheckpointError>() {
        return error.is_conflict();
    }
    let of_sqlx = error.downcast_ref::<sqlx::Error>();
    match error.downcast_ref::<TxError>() {
        Some(error) => error.is_conflict(),
        None => of_sqlx.is_some_and(crate::transaction::is_conflict),
    }
}

impl<S: Clone> Clone for Once<S> {
    fn clone(&self) -> Self {
        Self {
            layer: self.layer.clone(),
            plain: self.plain.clone(),
            #[cfg(any(feature = "sqlite", feature = "postgres"))]
            transactional: self.transactional.clone(),
        }
    }
}

impl<S> fmt::Debug for Once<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Once")
            .field("layer", &self.layer)
            .finish_non_exhaustive()
    }
}

//! Operations that are durable before they are sent.

mod database;
mod entry;
mod error;
mod form;
mod operation;
mod options;
mod steps;
mod texts;

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http::Response;
use sqlx::{Executor, Pool};

pub use self::{
    database::OutboxDatabase,
    entry::{Begun, Entry, EntryState, OutboxCounts},
    error::{OutboxError, OutboxErrorKind},
    operation::Operation,
};
use self::{
    database::{Row, Value},
    form::{Form, Place},
    operation::check_reference,
    texts::Texts,
};
pub(super) use self::{
    form::MAX_RESULT_LEN,
    steps::{End, Turn},
};
use crate::{bounded::Boxed, record::Token};

/// The caller's own table of operations: each durable before it is sent, with the key and the exact body that
/// every attempt then has, also after a restart.
///
/// Without it a caller that dies between its decision and the answer has forgotten its key. It would make a new
/// one, and charge twice; or give up, and not know whether it has charged. With it an operation is *begun* first,
/// under a business reference of the caller's (an order's number, say), best in the transaction that decides it. A
/// [`Relay`](super::Relay) sends it, and whatever is left [pending](EntryState::Pending) is
/// [sent after a restart](super::Relay::resume).
///
/// The table lies in the caller's database. What was begun is as durable as that commits: in SQLite keep
/// `synchronous` at `FULL`, in Postgres `synchronous_commit` at `on`.
///
/// ```
/// # #[cfg(feature = "sqlite")] {
/// use sqlx::{Sqlite, SqlitePool};
/// use tower_idempotency::client::{EntryState, Operation, Outbox};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = tempfile::tempdir()?;
/// # let file = sqlx::sqlite::SqliteConnectOptions::new().filename(folder.path().join("shop.db"));
/// # let pool = SqlitePool::connect_with(file.create_if_missing(true)).await?;
/// let outbox: Outbox<Sqlite> = Outbox::new(pool.clone());
/// outbox.migrate().await?;
/// # sqlx::query("CREATE TABLE orders (number TEXT)").execute(&pool).await?;
///
/// // The order and its charge are there together, or neither is.
/// let charge = || Operation::post("https://pay.example/charges".parse().unwrap());
/// let mut transaction = pool.begin().await?;
/// sqlx::query("INSERT INTO orders VALUES ('A-17')").execute(&mut *transaction).await?;
/// outbox.begin_in(&mut *transaction, "charge A-17", charge().body("250 baht")).await?;
/// transaction.commit().await?;
///
/// // Whoever begins it again finds the first key and the first body.
/// let again = outbox.begin("charge A-17", charge().body("999 baht")).await?;
/// assert!(!again.is_new() && again.differs());
/// assert_eq!(again.entry().state(), EntryState::Pending);
/// assert_eq!(again.entry().operation()?, charge().body("250 baht").key(again.entry().key()));
/// # Ok(())
/// # }
/// # }
/// ```
///
/// # References
///
/// One per intent: the same for every try of the same thing, after whatever crash, and another one for whatever is
/// meant anew. It is 1 to 255 bytes of text. It stays readable in the table, as key, method and URI do.
///
/// # When it is too late
///
/// A server forgets a key some time after it has seen it. What arrives later runs once more. So an operation that
/// is still pending [`key_lifetime`](Self::key_lifetime) after its beginning, less a [`margin`](Self::margin) that
/// covers one attempt, is *overdue*: it is never sent again. Look up what became of it at the server, and
/// [`settle`](Self::settle) it. Time is the database's own.
///
/// If it took effect, it is [`Done`](Outcome::Done). If it is certain that it did not, and never will, it is
/// [`Failed`](Outcome::Failed), and doing it after all is a new intent under a new reference; one whose key the server
/// still knows may be [reopened](Self::reopen) instead, once what stood in its way is mended. While the
/// server itself does not know ([`OutcomeUnknown`](super::Unanswered::OutcomeUnknown)), it stays pending and is asked
/// about at every resume: have the record settled there.
///
/// The same goes for one that is [held](Entry::is_held), since the server has run it without a record: nobody sends it
/// until it was settled, or reopened because it has had no effect.
///
/// # What has to be called
///
/// Beside [`resume`](super::Relay::resume), from the same timer: [`purge`](Self::purge), for nothing deletes a row by
/// itself. The chapter [`operations`](crate::operations) says what to watch.
///
/// Clones share the pool.
pub struct Outbox<DB: OutboxDatabase> {
    pool: Pool<DB>,
    texts: Arc<Texts>,
    table: Arc<str>,
    form: Form,
    key_lifetime: Duration,
    margin: Option<Duration>,
}

/// How an operation ended, for [`Outbox::settle`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Outcome {
    /// It has had its effect.
    Done,
    /// It has had none, and will not have one under this key.
    Failed,
}

impl Outcome {
    fn state(self) -> EntryState {
        match self {
            Self::Done => EntryState::Done,
            Self::Failed => EntryState::Failed,
        }
    }
}

impl<DB: OutboxDatabase> Outbox<DB> {
    /// The statements that create the table, for migrations of your own.
    pub fn schema_sql(&self) -> &str {
        self.texts.schema.as_str()
    }

    /// Creates the table where it is missing. Any number of processes may do so at once. Needs the right to create
    /// tables, but in Postgres only where it is missing.
    ///
    /// Dropping the future leaves at most a complete table behind.
    ///
    /// # Errors
    ///
    /// [`Database`](OutboxErrorKind::Database), also when there is a table of this name that is another one.
    pub async fn migrate(&self) -> Result<(), OutboxError> {
        DB::create(&self.pool, &self.table, self.texts.schema.clone()).await?;
        DB::pool_rows(&self.pool, &self.texts.check, Vec::new()).await?;
        Ok(())
    }

    /// Begins an operation: it is durable when this returns. If there is one of this reference already, that one is
    /// found, with its own key and body, whatever this one brings: see [`Begun::differs`].
    ///
    /// Dropped before it returns, it may have been begun or not, or be begun a moment later. Begin it again.
    ///
    /// # Errors
    ///
    /// [`Invalid`](OutboxErrorKind::Invalid) for a reference that is not 1 to 255 bytes of text without NUL; a URI
    /// that is not absolute, has a password or more than 8 KiB; a method of more than 64 bytes; more than 128 header
    /// lines or 64 KiB of them, or those of a connection; a body of more than 16 MiB; a key that no header can
    /// carry, or two that differ. [`Keys`](OutboxErrorKind::Keys) and [`Damaged`](OutboxErrorKind::Damaged) when the one that is there
    /// cannot be read. [`Database`](OutboxErrorKind::Database).
    pub async fn begin(&self, reference: &str, operation: Operation) -> Result<Begun, OutboxError> {
        let operation = operation.with_key_of_header()?;
        let (token, values) = self.new_row(reference, &operation)?;
        let rows = DB::pool_rows(&self.pool, &self.texts.begin, values).await?;
        self.begun(token, &operation, rows)
    }

    /// The same in a transaction of the caller's: it is begun if, and only if, that is committed. Send it only
    /// then.
    ///
    /// `executor` is whatever sqlx takes: `&mut *transaction`, `&mut connection`, or the `&mut tx` of a
    /// [`Tx`](crate::Tx), so that a handler's effect, its record and the operation that is to follow are committed
    /// together:
    ///
    /// ```
    /// # #[cfg(feature = "sqlite")] {
    /// use http::StatusCode;
    /// use sqlx::Sqlite;
    /// use tower_idempotency::{Tx, client::{Operation, Outbox, OutboxError}};
    ///
    /// async fn order(mut tx: Tx<Sqlite>, outbox: Outbox<Sqlite>) -> Result<StatusCode, OutboxError> {
    ///     sqlx::query("INSERT INTO orders VALUES ('A-17')").execute(&mut tx).await?;
    ///     let charge = Operation::post("https://pay.example/charges".parse().unwrap());
    ///     outbox.begin_in(&mut tx, "charge A-17", charge.body("250 baht")).await?;
    ///     Ok(StatusCode::CREATED)
    /// }
    /// # }
    /// ```
    ///
    /// Nothing is sent to the database before the future is polled.
    ///
    /// In Postgres another session that begins the same reference waits for the end of this transaction; and where
    /// the reference was there already, so does whoever counts an attempt or records its result, with a connection each,
    /// also where the relay has [given the statement up](super::Relay::statement_timeout). Keep such transactions
    /// short, or give the relay a pool of its own. In SQLite every writer waits.
    ///
    /// # Errors
    ///
    /// As [`begin`](Self::begin). After [`Database`](OutboxErrorKind::Database) a transaction in Postgres is
    /// aborted.
    pub fn begin_in<'e, 'c: 'e, E>(
        &'e self,
        executor: E,
        reference: &str,
        operation: Operation,
    ) -> Boxed<'e, Result<Begun, OutboxError>>
    where
        E: Executor<'c, Database = DB>,
    {
        let begins = operation.with_key_of_header().and_then(|operation| {
            let (token, values) = self.new_row(reference, &operation)?;
            let rows = DB::rows(executor, &self.texts.begin, values);
            Ok((token, operation, rows))
        });
        Box::pin(async move {
            let (token, operation, rows) = begins?;
            self.begun(token, &operation, rows.await?)
        })
    }

    fn new_row(
        &self,
        reference: &str,
        operation: &Operation,
    ) -> Result<(Token, Vec<Value>), OutboxError> {
        check_reference(reference)?;
        operation.check()?;
        let (token, key) = (Token::random(), operation.choose_key());
        let (method, uri) = (operation.method.to_string(), operation.uri.to_string());
        let place = Place {
            reference,
            key: key.as_bytes(),
            method: &method,
            uri: &uri,
        };
        let request = self.form.write_request(place, operation);
        let values = vec![
            Value::Text(reference.to_owned()),
            Value::Bytes(Some(key.as_bytes().to_vec())),
            Value::Text(method),
            Value::Text(uri),
            Value::Bytes(Some(request)),
            Value::Bytes(Some(token.as_bytes().to_vec())),
        ];
        Ok((token, values))
    }

    fn begun(
        &self,
        token: Token,
        operation: &Operation,
        rows: Vec<Row>,
    ) -> Result<Begun, OutboxError> {
        let entry = self.first(rows)?.ok_or_else(OutboxError::missing)?;
        let is_new = entry.token() == token.as_bytes();
        let differs = !is_new && !operation.asks_for_the_same(&entry.operation()?);
        Ok(Begun {
            entry,
            is_new,
            differs,
        })
    }

    /// The operation of this reference.
    ///
    /// # Errors
    ///
    /// [`Database`](OutboxErrorKind::Database); [`Damaged`](OutboxErrorKind::Damaged) for a state that this version
    /// does not know.
    pub async fn find(&self, reference: &str) -> Result<Option<Entry>, OutboxError> {
        if check_reference(reference).is_err() {
            return Ok(None);
        }
        let values = vec![Value::Text(reference.to_owned())];
        let rows = DB::pool_rows(&self.pool, &self.texts.find, values).await?;
        self.first(rows)
    }

    /// The operations of this state, in the order of their references, at most so many: those after `after`, which
    /// is the last one of the list before, and `None` to begin with. For whoever has missed what
    /// [`resume`](super::Relay::resume) would have told, since it died in the middle. Each holds its request and its
    /// answer in memory.
    ///
    /// ```
    /// # #[cfg(feature = "sqlite")] {
    /// use sqlx::Sqlite;
    /// use tower_idempotency::client::{EntryState, Outbox, OutboxError};
    ///
    /// async fn all_done(outbox: &Outbox<Sqlite>) -> Result<usize, OutboxError> {
    ///     let (mut count, mut last) = (0, None);
    ///     loop {
    ///         let page = outbox.list(EntryState::Done, last.as_ref(), 100).await?;
    ///         count += page.len();
    ///         last = page.into_iter().last();
    ///         if last.is_none() {
    ///             return Ok(count);
    ///         }
    ///     }
    /// }
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Database`](OutboxErrorKind::Database).
    pub async fn list(
        &self,
        state: EntryState,
        after: Option<&Entry>,
        limit: usize,
    ) -> Result<Vec<Entry>, OutboxError> {
        let state = Value::Number(Some(state.code()));
        let (text, values) = match after {
            None => (&self.texts.list, vec![state, number(limit)]),
            // Not what is shown of it: that of a damaged one may come before it.
            Some(last) => match std::str::from_utf8(last.stored_reference()) {
                Ok(last) => {
                    let last = Value::Text(last.to_owned());
                    (&self.texts.list_after, vec![state, last, number(limit)])
                }
                Err(_) => {
                    let last = Value::Bytes(Some(last.stored_reference().to_vec()));
                    let text = &self.texts.list_after_damaged;
                    (text, vec![state, last, number(limit)])
                }
            },
        };
        let rows = DB::pool_rows(&self.pool, text, values).await?;
        self.all(rows)
    }

    /// What is to be sent, the oldest first, at most so many. Each holds its request in memory. One whose row is
    /// damaged is among them: its [`operation`](Entry::operation) says so. What is [held](Self::held) is not.
    ///
    /// # Errors
    ///
    /// [`Database`](OutboxErrorKind::Database).
    pub async fn pending(&self, limit: usize) -> Result<Vec<Entry>, OutboxError> {
        let values = vec![micros(self.window()), number(limit)];
        let rows = DB::pool_rows(&self.pool, &self.texts.pending, values).await?;
        self.all(rows)
    }

    /// What is pending and may not be sent any more, the oldest first, at most so many: look up what became of each,
    /// and [`settle`](Self::settle) it. One whose row is damaged is among them, as in [`pending`](Self::pending).
    ///
    /// # Errors
    ///
    /// [`Database`](OutboxErrorKind::Database).
    pub async fn overdue(&self, limit: usize) -> Result<Vec<Entry>, OutboxError> {
        let values = vec![micros(self.window()), number(limit)];
        let rows = DB::pool_rows(&self.pool, &self.texts.overdue, values).await?;
        self.all(rows)
    }

    /// What is [held](Entry::is_held) and not overdue yet, the oldest first, at most so many: look up what became of
    /// each, and [`settle`](Self::settle) it, or [`reopen`](Self::reopen) it if it has had no effect.
    ///
    /// # Errors
    ///
    /// [`Database`](OutboxErrorKind::Database).
    pub async fn held(&self, limit: usize) -> Result<Vec<Entry>, OutboxError> {
        let values = vec![micros(self.window()), number(limit)];
        let rows = DB::pool_rows(&self.pool, &self.texts.held, values).await?;
        self.all(rows)
    }

    /// Records how an operation ended, for whoever has looked that up; overdue or not. The answer is kept if one is
    /// given.
    ///
    /// What has failed may still turn out to be done. What is done stays so, with its first answer; and what has
    /// failed keeps its first answer when it is said once more that it failed.
    ///
    /// # Errors
    ///
    /// [`Invalid`](OutboxErrorKind::Invalid) for an answer of more than 1 MiB or 16 384 header lines, which cannot be
    /// kept; [`Missing`](OutboxErrorKind::Missing); [`State`](OutboxErrorKind::State) when it is done and is said to
    /// have failed, or is reopened at the same moment; [`Database`](OutboxErrorKind::Database).
    pub async fn settle(
        &self,
        reference: &str,
        outcome: Outcome,
        answer: Option<Response<Bytes>>,
    ) -> Result<Entry, OutboxError> {
        let found = self.find(reference).await?;
        let found = found.ok_or_else(OutboxError::missing)?;
        let end = End {
            state: outcome.state(),
            status: answer.as_ref().map(Response::status),
            answer: answer.as_ref(),
            only_attempt: false,
            by_hand: true,
        };
        if answer.is_some() && self.kept(&found, &end).is_none() {
            return Err(OutboxError::invalid(
                "an answer may have at most 1 MiB and 16384 header lines to be kept",
            ));
        }
        let entry = self.record(&found, &end).await?;
        if entry.state() == end.state {
            return Ok(entry);
        }
        Err(OutboxError::new(
            OutboxErrorKind::State,
            "the operation is done, and stays so",
        ))
    }

    /// Makes a failed operation pending again, with its first key and body, when what it was refused for was mended:
    /// a credential, or the server's own settings. One that is [held](Entry::is_held) may be sent again from now on:
    /// only for whoever has looked up that it has had no effect. Any other that is pending is left as it is.
    ///
    /// [`attempts`](Entry::attempts) are counted anew, for the verdict on the next answer as well: nothing that was
    /// sent before should be under way. An answer to such an attempt, which comes late, is not recorded any more;
    /// only that the server ran it without a record still holds the operation.
    ///
    /// # Errors
    ///
    /// [`Missing`](OutboxErrorKind::Missing); [`State`](OutboxErrorKind::State) when it is done;
    /// [`Overdue`](OutboxErrorKind::Overdue) when it may not be sent any more;
    /// [`Database`](OutboxErrorKind::Database).
    pub async fn reopen(&self, reference: &str) -> Result<Entry, OutboxError> {
        if check_reference(reference).is_err() {
            return Err(OutboxError::missing());
        }
        let values = vec![
            Value::Text(reference.to_owned()),
            micros(self.window()),
            Value::Bytes(Some(Token::random().as_bytes().to_vec())),
        ];
        let rows = DB::pool_rows(&self.pool, &self.texts.reopen, values).await?;
        if let Some(reopened) = self.first(rows)? {
            return Ok(reopened);
        }
        let found = self.find(reference).await?;
        let found = found.ok_or_else(OutboxError::missing)?;
        let (kind, message) = match found.state() {
            EntryState::Done => (
                OutboxErrorKind::State,
                "the operation is done, and is not sent again",
            ),
            _ if found.is_too_old() => (
                OutboxErrorKind::Overdue,
                "the operation is older than the server keeps its key, and is not sent again",
            ),
            _ => return Ok(found),
        };
        Err(OutboxError::new(kind, message))
    }

    /// Deletes at most so many operations that were begun, and settled, longer than
    /// [`key_lifetime`](Self::key_lifetime) ago; answers how many. What is pending is never deleted. With its row
    /// a reference is forgotten: it could be begun anew.
    ///
    /// # Errors
    ///
    /// [`Database`](OutboxErrorKind::Database).
    pub async fn purge(&self, limit: usize) -> Result<u64, OutboxError> {
        let values = vec![micros(self.key_lifetime), number(limit)];
        Ok(DB::changed(&self.pool, &self.texts.purge, values).await?)
    }

    /// How many operations there are. Reads the whole table.
    ///
    /// # Errors
    ///
    /// [`Database`](OutboxErrorKind::Database).
    pub async fn counts(&self) -> Result<OutboxCounts, OutboxError> {
        let values = vec![micros(self.window())];
        let counted = DB::numbers(&self.pool, &self.texts.counts, values).await?;
        let counted = counted.unwrap_or_default();
        let count = |at: usize| u64::try_from(counted.get(at).copied().unwrap_or(0)).unwrap_or(0);
        Ok(OutboxCounts {
            pending: count(0),
            overdue: count(1),
            done: count(2),
            failed: count(3),
            held: count(4),
        })
    }

    /// How many operations need the sealing key of this id to be read, or their answer. A key may be taken out of
    /// [`sealed`](Self::sealed) once there are none, and no process seals with it any more. Reads the whole table.
    ///
    /// # Errors
    ///
    /// [`Database`](OutboxErrorKind::Database).
    #[cfg(feature = "sealing")]
    pub async fn sealed_with(&self, key_id: &str) -> Result<u64, OutboxError> {
        let Some(prefix) = form::sealed_prefix(key_id) else {
            return Ok(0);
        };
        let len = number(prefix.len());
        let values = vec![Value::Bytes(Some(prefix)), len];
        let counted = DB::numbers(&self.pool, &self.texts.sealed_with, values).await?;
        let count = counted.and_then(|counted| u64::try_from(*counted.first()?).ok());
        Ok(count.unwrap_or_default())
    }

    fn first(&self, rows: Vec<Row>) -> Result<Option<Entry>, OutboxError> {
        let entry = |row| Entry::new(row, &self.form, self.window());
        rows.into_iter().next().map(entry).transpose()
    }

    fn all(&self, rows: Vec<Row>) -> Result<Vec<Entry>, OutboxError> {
        let entry = |row| Entry::new(row, &self.form, self.window());
        rows.into_iter().map(entry).collect()
    }
}

fn micros(duration: Duration) -> Value {
    Value::Number(Some(
        i64::try_from(duration.as_micros()).unwrap_or(i64::MAX),
    ))
}

fn number(limit: usize) -> Value {
    Value::Number(Some(i64::try_from(limit).unwrap_or(i64::MAX)))
}

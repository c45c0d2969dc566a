//! Transactions of handlers, which complete a record together with their effect.

use std::{
    fmt::Write,
    ops::{Deref, DerefMut},
    sync::Arc,
    time::Duration,
};

use futures_util::{FutureExt, future::BoxFuture};
use sqlx::{
    PgConnection, Postgres, Row, SqlStr, pool::PoolConnection, postgres::PgTransactionManager,
};
use sqlx_core::transaction::TransactionManager;

use super::{
    bind_id,
    failure::broke,
    rows::interval,
    session::{Instance, MAX_BROKEN, Statement, discard, fetch},
    texts::safe,
};
use crate::{
    Isolation, TxOptions,
    bounded::within,
    record::Token,
    store::Ticket,
    transacted::Recording,
    transaction::{OpenTransaction, Ready, Source},
};

type Manager = PgTransactionManager;

/// Begins transactions on the store's pool.
pub(super) struct Transactions(pub(super) Arc<Instance>);

impl Source<Postgres> for Transactions {
    fn begin<'a>(
        &'a self,
        options: &'a TxOptions,
        isolation: Option<Isolation>,
        ticket: Option<&'a Ticket>,
    ) -> BoxFuture<'a, Result<Box<dyn OpenTransaction<Postgres>>, sqlx::Error>> {
        let isolation = isolation.or(options.isolation);
        let may_be_serializable = match isolation {
            Some(Isolation::ReadCommitted | Isolation::RepeatableRead) => false,
            None => self.0.begins_itself(),
            Some(Isolation::Serializable) => true,
        };
        let nonce = hex(Token::random().as_bytes());
        let begin = begin(options, isolation, &nonce);
        async move {
            let mut attempts = 0;
            loop {
                // Whoever begins may be dropped in the middle, and sqlx does not see to it then.
                let mut connection = Held(Some(self.0.pool.acquire().await?));
                let record = ticket.filter(|_| may_be_serializable);
                match self.begin_on(&mut connection, begin.clone(), record).await {
                    Ok(place) => {
                        let open = Open {
                            instance: self.0.clone(),
                            nonce,
                            place,
                            connection,
                        };
                        return Ok(Box::new(open) as Box<_>);
                    }
                    // The pool has connections to a server that has restarted since.
                    Err(error) if broke(&error) && attempts < MAX_BROKEN => attempts += 1,
                    Err(error) => return Err(error),
                }
            }
        }
        .boxed()
    }

    fn max_hold(&self, _: &TxOptions) -> Option<Duration> {
        None
    }
}

impl Transactions {
    /// Answers where the record is, when it is asked for.
    async fn begin_on(
        &self,
        connection: &mut PgConnection,
        begin: SqlStr,
        record: Option<&Ticket>,
    ) -> Result<Option<String>, sqlx::Error> {
        let place = match record {
            Some(ticket) => self.find(connection, ticket).await?,
            None => None,
        };
        Manager::begin(connection, Some(begin)).await?;
        Ok(place)
    }

    /// Where the record stands in its table.
    ///
    /// Found by its key in a serializable transaction, it would be read through a page of the index to which
    /// its neighbours write when they are completed: of eight transactions at once that had nothing in
    /// common, nearly all failed for that. Found before the transaction, it is reached without the index.
    async fn find(
        &self,
        connection: &mut PgConnection,
        ticket: &Ticket,
    ) -> Result<Option<String>, sqlx::Error> {
        let find = bind_id(sqlx::query(self.0.texts.find.clone()), &ticket.id);
        let rows = fetch(connection, find, self.0.begins_itself()).await?;
        rows.first().map(|row| row.try_get(0)).transpose()
    }
}

/// In one round trip. `run` is there as long as the transaction is; `committed` is there once it was
/// committed, and gone when it was rolled back.
fn begin(options: &TxOptions, isolation: Option<Isolation>, nonce: &str) -> SqlStr {
    let level = match isolation {
        None => "",
        Some(Isolation::ReadCommitted) => " ISOLATION LEVEL READ COMMITTED",
        Some(Isolation::RepeatableRead) => " ISOLATION LEVEL REPEATABLE READ",
        Some(Isolation::Serializable) => " ISOLATION LEVEL SERIALIZABLE",
    };
    safe(format!(
        "BEGIN{level}; SET LOCAL lock_timeout = {}; SET LOCAL idle_in_transaction_session_timeout = {}; SET LOCAL tower_idempotency.run = '{nonce}'; SET tower_idempotency.committed = '{nonce}'",
        options.lock_timeout.as_millis(),
        options.idle_timeout.as_millis(),
    ))
}

fn hex(bytes: &[u8]) -> String {
    let mut hex = String::with_capacity(2 * bytes.len());
    for byte in bytes {
        // Writing to a string does not fail.
        let _ = write!(hex, "{byte:02x}");
    }
    hex
}

struct Open {
    instance: Arc<Instance>,
    /// What this transaction is known by to the server.
    nonce: String,
    /// Where the record was before the transaction began; see [`Transactions::find`].
    place: Option<String>,
    connection: Held,
}

impl Open {
    async fn complete(&mut self, recording: Option<&Recording>) -> Result<Ready, sqlx::Error> {
        let connection = &mut *self.connection;
        // A savepoint that was never ended would be all that a COMMIT ends.
        if Manager::get_transaction_depth(connection) > 1 {
            return Ok(Ready::Void);
        }
        if let Some(recording) = recording {
            let texts = &self.instance.texts;
            let by_its_key = completion(&texts.complete, recording, &self.nonce);
            let at_its_place = self
                .place
                .as_ref()
                .map(|place| completion(&texts.complete_at, recording, &self.nonce).bind(place));
            for statement in at_its_place.into_iter().chain([by_its_key]) {
                let completed = statement.execute(&mut *connection).await?;
                if completed.rows_affected() > 0 {
                    return Ok(Ready::Yes);
                }
            }
        }
        let whole = setting(connection, RUN).await? == self.nonce;
        Ok(match recording {
            _ if !whole => Ready::Ended,
            Some(_) => Ready::Lost,
            None => Ready::Yes,
        })
    }

    /// Answers false when the handler has ended it by itself, and may have committed it or something after it.
    async fn roll_back(connection: &mut PgConnection, nonce: &str) -> Result<bool, sqlx::Error> {
        // Where the transaction is aborted, this cannot be asked before it has ended.
        let run = setting(connection, RUN).await;
        if Manager::get_transaction_depth(connection) == 0 {
            // sqlx knows of none any more; there may be one that the handler has begun.
            sqlx::raw_sql("ROLLBACK").execute(&mut *connection).await?;
        }
        while Manager::get_transaction_depth(connection) > 0 {
            Manager::rollback(connection).await?;
        }
        match run {
            Ok(run) => Ok(run == nonce),
            Err(_) => Ok(setting(connection, COMMITTED).await? != nonce),
        }
    }
}

fn completion<'q>(text: &SqlStr, recording: &'q Recording, nonce: &'q str) -> Statement<'q> {
    let (done, lifetimes) = (&recording.done, &recording.lifetimes);
    bind_id(sqlx::query(text.clone()), &recording.ticket.id)
        .bind(*recording.ticket.token.as_bytes())
        .bind(interval(lifetimes.ttl))
        .bind(lifetimes.response_ttl.map(interval))
        .bind(i16::try_from(done.status.as_u16()).ok())
        .bind(done.response.as_deref())
        .bind(nonce)
}

const RUN: &str = "SELECT coalesce(current_setting('tower_idempotency.run', true), '')";
const COMMITTED: &str = "SELECT coalesce(current_setting('tower_idempotency.committed', true), '')";

async fn setting(connection: &mut PgConnection, text: &'static str) -> Result<String, sqlx::Error> {
    sqlx::query(text).fetch_one(connection).await?.try_get(0)
}

impl OpenTransaction<Postgres> for Open {
    fn connection(&self) -> &PgConnection {
        &self.connection
    }

    fn connection_mut(&mut self) -> &mut PgConnection {
        &mut self.connection
    }

    fn complete<'a>(
        &'a mut self,
        recording: Option<&'a Recording>,
    ) -> BoxFuture<'a, Result<Ready, sqlx::Error>> {
        self.complete(recording).boxed()
    }

    fn commit(self: Box<Self>) -> BoxFuture<'static, Result<(), sqlx::Error>> {
        let mut connection = self.connection;
        async move {
            Manager::commit(&mut connection).await?;
            connection.give_back();
            Ok(())
        }
        .boxed()
    }

    fn rollback(self: Box<Self>) -> BoxFuture<'static, bool> {
        let Self {
            instance,
            nonce,
            mut connection,
            ..
        } = *self;
        async move {
            let rolled_back = Self::roll_back(&mut connection, &nonce);
            match within(instance.operation_timeout(), rolled_back).await {
                Some(Ok(whole)) => {
                    connection.give_back();
                    whole
                }
                // Cut off, it is rolled back, unless the handler has ended it by itself: which it is not to.
                Some(Err(_)) | None => true,
            }
        }
        .boxed()
    }

    fn cut(self: Box<Self>) {
        drop(self);
    }
}

/// A connection that is cut unless it is given back.
struct Held(Option<PoolConnection<Postgres>>);

const HELD: &str = "it is taken out only when it is given back or dropped";

impl Held {
    fn give_back(mut self) {
        drop(self.0.take());
    }
}

impl Deref for Held {
    type Target = PgConnection;

    fn deref(&self) -> &PgConnection {
        self.0.as_deref().expect(HELD)
    }
}

impl DerefMut for Held {
    fn deref_mut(&mut self) -> &mut PgConnection {
        self.0.as_deref_mut().expect(HELD)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(connection) = self.0.take() {
            discard(connection);
        }
    }
}

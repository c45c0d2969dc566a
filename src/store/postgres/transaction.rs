//! Transactions of handlers, which complete a record together with their effect.

use std::{fmt::Write, sync::Arc, time::Duration};

use futures_util::{FutureExt, future::BoxFuture};
use sqlx::{
    PgConnection, Postgres, Row, SqlStr, pool::PoolConnection, postgres::PgTransactionManager,
};
use sqlx_core::transaction::TransactionManager;

use super::{
    bind_id,
    failure::broke,
    rows::interval,
    session::{Instance, MAX_BROKEN, Statement, discard},
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

/// What a transaction without a claim is known by.
const NO_CLAIM: Token = Token::from_bytes([0; 16]);

/// Begins transactions on the store's pool.
pub(super) struct Transactions(pub(super) Arc<Instance>);

impl Source<Postgres> for Transactions {
    fn begin<'a>(
        &'a self,
        options: &'a TxOptions,
        isolation: Option<Isolation>,
        ticket: Option<&'a Ticket>,
    ) -> BoxFuture<'a, Result<Box<dyn OpenTransaction<Postgres>>, sqlx::Error>> {
        let token = ticket.map_or(NO_CLAIM, |ticket| ticket.token);
        let isolation = isolation.or(options.isolation);
        let begin = begin(options, isolation, token);
        let find = match isolation {
            Some(Isolation::ReadCommitted | Isolation::RepeatableRead) => None,
            None if !self.0.begins_itself() => None,
            _ => ticket.map(|ticket| find(&self.0, ticket)),
        };
        async move {
            let mut attempts = 0;
            loop {
                // Whoever begins may be dropped in the middle, and sqlx does not see to it then.
                let mut cut = Cut(Some(self.0.pool.acquire().await?));
                let Some(connection) = &mut cut.0 else {
                    return Err(sqlx::Error::BeginFailed);
                };
                match begin_on(connection, begin.clone(), find.clone()).await {
                    Ok(place) => {
                        let open = Open {
                            instance: self.0.clone(),
                            token,
                            place,
                            connection: cut.0.take(),
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

/// In one round trip. The settings end with the transaction.
fn begin(options: &TxOptions, isolation: Option<Isolation>, token: Token) -> SqlStr {
    let level = match isolation {
        None => "",
        Some(Isolation::ReadCommitted) => " ISOLATION LEVEL READ COMMITTED",
        Some(Isolation::RepeatableRead) => " ISOLATION LEVEL REPEATABLE READ",
        Some(Isolation::Serializable) => " ISOLATION LEVEL SERIALIZABLE",
    };
    safe(format!(
        "BEGIN{level}; SET LOCAL lock_timeout = {}; SET LOCAL idle_in_transaction_session_timeout = {}; SET LOCAL tower_idempotency.run = '{}'",
        options.lock_timeout.as_millis(),
        options.idle_timeout.as_millis(),
        hex(token.as_bytes()),
    ))
}

/// Where the record stands in its table.
///
/// Found by its key in a serializable transaction, it would be read through a page of the index to which
/// its neighbours write when they are completed: of eight transactions at once that had nothing in common,
/// nearly all failed for that. Found before the transaction, it is reached without the index.
fn find(instance: &Instance, ticket: &Ticket) -> SqlStr {
    let scope = hex(ticket.id.scope.as_bytes());
    let key = hex(ticket.id.key.as_bytes());
    let find = &instance.texts.find;
    safe(format!(
        "BEGIN ISOLATION LEVEL READ COMMITTED; {find} WHERE r.scope = decode('{scope}', 'hex') AND r.key = decode('{key}', 'hex'); COMMIT"
    ))
}

async fn begin_on(
    connection: &mut PgConnection,
    begin: SqlStr,
    find: Option<SqlStr>,
) -> Result<Option<String>, sqlx::Error> {
    let place = match find {
        Some(find) => {
            let found = sqlx::raw_sql(find).fetch_optional(&mut *connection).await?;
            found.map(|row| row.try_get(0)).transpose()?
        }
        None => None,
    };
    Manager::begin(connection, Some(begin)).await?;
    Ok(place)
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
    token: Token,
    /// Where the record was before the transaction began; see [`find`].
    place: Option<String>,
    /// Taken at the end.
    connection: Option<PoolConnection<Postgres>>,
}

impl Open {
    async fn complete(&mut self, recording: &Recording) -> Result<Ready, sqlx::Error> {
        let Some(connection) = &mut self.connection else {
            return Ok(Ready::Ended);
        };
        // A savepoint that was never ended would be all that a COMMIT ends.
        if Manager::get_transaction_depth(connection) > 1 {
            return Ok(Ready::Void);
        }
        let texts = &self.instance.texts;
        let mut completed = 0;
        if let Some(place) = &self.place {
            let at_its_place = completion(&texts.complete_at, recording).bind(place);
            completed = at_its_place
                .execute(&mut **connection)
                .await?
                .rows_affected();
        }
        if completed == 0 {
            let by_its_key = completion(&texts.complete, recording);
            completed = by_its_key.execute(&mut **connection).await?.rows_affected();
        }
        match completed {
            0 if is_whole(connection, self.token).await? => Ok(Ready::Lost),
            0 => Ok(Ready::Ended),
            _ => Ok(Ready::Yes),
        }
    }
}

fn completion<'q>(text: &SqlStr, recording: &'q Recording) -> Statement<'q> {
    let (done, lifetimes) = (&recording.done, &recording.lifetimes);
    bind_id(sqlx::query(text.clone()), &recording.ticket.id)
        .bind(*recording.ticket.token.as_bytes())
        .bind(interval(lifetimes.ttl))
        .bind(lifetimes.response_ttl.map(interval))
        .bind(i16::try_from(done.status.as_u16()).ok())
        .bind(done.response.as_deref())
        .bind(hex(recording.ticket.token.as_bytes()))
}

/// Whether the transaction that was begun is still open. Fails where it is aborted.
async fn is_whole(connection: &mut PgConnection, token: Token) -> Result<bool, sqlx::Error> {
    let setting =
        sqlx::query("SELECT coalesce(current_setting('tower_idempotency.run', true), '')")
            .fetch_one(connection)
            .await?;
    Ok(setting.try_get::<String, _>(0)? == hex(token.as_bytes()))
}

impl OpenTransaction<Postgres> for Open {
    fn connection(&self) -> &PgConnection {
        self.connection.as_ref().expect("taken only at the end")
    }

    fn connection_mut(&mut self) -> &mut PgConnection {
        self.connection.as_mut().expect("taken only at the end")
    }

    fn complete<'a>(
        &'a mut self,
        recording: Option<&'a Recording>,
    ) -> BoxFuture<'a, Result<Ready, sqlx::Error>> {
        async move {
            match (recording, &mut self.connection) {
                (Some(recording), _) => self.complete(recording).await,
                (None, Some(connection)) => Ok(match is_whole(connection, self.token).await? {
                    true if Manager::get_transaction_depth(connection) > 1 => Ready::Void,
                    true => Ready::Yes,
                    false => Ready::Ended,
                }),
                (None, None) => Ok(Ready::Ended),
            }
        }
        .boxed()
    }

    fn commit(mut self: Box<Self>) -> BoxFuture<'static, Result<(), sqlx::Error>> {
        async move {
            let mut cut = Cut(self.connection.take());
            if let Some(connection) = &mut cut.0 {
                Manager::commit(connection).await?;
            }
            drop(cut.0.take());
            Ok(())
        }
        .boxed()
    }

    fn rollback(mut self: Box<Self>) -> BoxFuture<'static, bool> {
        async move {
            let mut cut = Cut(self.connection.take());
            let Some(connection) = &mut cut.0 else {
                return true;
            };
            let limit = self.instance.operation_timeout();
            // One that is aborted, or does not answer, was not committed.
            let whole = within(limit, is_whole(connection, self.token)).await;
            let whole = whole.is_none_or(|whole| whole.unwrap_or(true));
            if let Some(Ok(())) = within(limit, roll_back(connection)).await {
                drop(cut.0.take());
            }
            whole
        }
        .boxed()
    }

    fn cut(mut self: Box<Self>) {
        drop(Cut(self.connection.take()));
    }
}

/// With all savepoints in it.
async fn roll_back(connection: &mut PgConnection) -> Result<(), sqlx::Error> {
    while Manager::get_transaction_depth(connection) > 0 {
        Manager::rollback(connection).await?;
    }
    Ok(())
}

impl Drop for Open {
    fn drop(&mut self) {
        drop(Cut(self.connection.take()));
    }
}

/// A connection that is cut unless it is taken out in time.
struct Cut(Option<PoolConnection<Postgres>>);

impl Drop for Cut {
    fn drop(&mut self) {
        if let Some(connection) = self.0.take() {
            discard(connection);
        }
    }
}

//! Requests, stores, and many things at one time.

use std::{
    error::Error,
    future::{Future, poll_fn},
    net::SocketAddr,
    pin::Pin,
    task::Poll,
    time::{Duration, Instant},
};

use bytes::Bytes;
use http::StatusCode;
use sqlx::{
    AssertSqlSafe, ConnectOptions, PgConnection, PgPool,
    postgres::{PgConnectOptions, PgPoolOptions, PgRow},
};
use tokio::time::sleep;
use tower_idempotency::{
    Fingerprint, IdempotencyKey, PostgresStore, Record, RecordId, Scope, Token,
    store::{
        Claim, ClaimRequest, Completion, Held, Inspect, Lifetimes, Settled, Store, StoreError,
        StoreErrorKind, Ticket,
    },
};

use crate::support::{database::Database, proxy::Proxy};

pub const DAY: Duration = Duration::from_secs(24 * 3600);

/// No lease of a test's own claims lapses by itself while the test runs.
pub const LONG: Duration = Duration::from_secs(600);

/// The record of an unscoped key.
pub fn id(key: &str) -> RecordId {
    RecordId::new(Scope::shared(), IdempotencyKey::new(key))
}

pub fn request(key: &str) -> ClaimRequest {
    let mut request = ClaimRequest::new(id(key), "test", Fingerprint::from_bytes([7; 32]));
    request.lease = LONG;
    request
}

/// A claim that means to take over the one with this token.
pub fn replacing(key: &str, token: Token) -> ClaimRequest {
    let mut request = request(key);
    request.replaces = Some(token);
    request
}

pub fn created() -> Completion {
    Completion::retained(StatusCode::CREATED, Bytes::from_static(b"the answer"))
}

pub fn lifetimes() -> Lifetimes {
    Lifetimes::new(DAY)
}

/// A store instance on this pool, which makes the tables where they are missing.
pub async fn open(pool: PgPool) -> PostgresStore {
    PostgresStore::options().migrate().open(pool).await.unwrap()
}

/// Claims and must win.
pub async fn win(store: &PostgresStore, request: &ClaimRequest) -> Ticket {
    won(store.claim(request.clone()).await)
}

#[track_caller]
pub fn won(claim: Result<Claim, StoreError>) -> Ticket {
    match claim {
        Ok(Claim::Won(ticket)) => ticket,
        other => panic!("not won: {other:?}"),
    }
}

#[track_caller]
pub fn in_flight(claim: Result<Claim, StoreError>) -> Held {
    match claim {
        Ok(Claim::InFlight(held)) => held,
        other => panic!("not in flight: {other:?}"),
    }
}

#[track_caller]
pub fn completed(claim: Result<Claim, StoreError>) -> Record {
    match claim {
        Ok(Claim::Completed(record)) => *record,
        other => panic!("not completed: {other:?}"),
    }
}

#[track_caller]
pub fn abandoned(claim: Result<Claim, StoreError>) -> Held {
    match claim {
        Ok(Claim::Abandoned(held)) => held,
        other => panic!("not abandoned: {other:?}"),
    }
}

#[track_caller]
pub fn done(settled: Result<Settled, StoreError>) {
    assert_eq!(settled.unwrap(), Settled::Done);
}

#[track_caller]
pub fn lost(settled: Result<Settled, StoreError>) {
    assert_eq!(settled.unwrap(), Settled::Lost);
}

/// It failed, as this kind of error.
#[track_caller]
pub fn failed<T: std::fmt::Debug>(
    answer: Result<T, StoreError>,
    kind: StoreErrorKind,
) -> StoreError {
    let error = answer.expect_err("it must fail");
    assert_eq!(error.kind(), kind, "{error:?}");
    error
}

/// It failed as this kind of error, with a message that holds these words.
#[track_caller]
pub fn says<T: std::fmt::Debug>(
    answer: Result<T, StoreError>,
    kind: StoreErrorKind,
    words: &[&str],
) {
    let error = failed(answer, kind);
    let message = error.to_string();
    for word in words {
        assert!(
            message.contains(word),
            "no word of {word:?} in: {message} ({:?})",
            error.source()
        );
    }
}

pub async fn get(store: &PostgresStore, key: &str) -> Option<Record> {
    store.get(&id(key)).await.unwrap()
}

/// Wins these keys, all at one time.
pub async fn win_all(store: &PostgresStore, keys: &[String]) -> Vec<Ticket> {
    let claims = keys.iter().map(|key| store.claim(request(key)));
    together(claims).await.into_iter().map(won).collect()
}

pub fn keys(prefix: &str, number: usize) -> Vec<String> {
    (0..number).map(|n| format!("{prefix}-{n}")).collect()
}

/// Polls all of them before anybody else gets a turn, and then until they are done: on a runtime of one
/// thread what they ask a store for stands in one queue.
pub async fn together<F: Future>(futures: impl IntoIterator<Item = F>) -> Vec<F::Output> {
    let mut running: Vec<Pin<Box<F>>> = futures.into_iter().map(Box::pin).collect();
    let mut outputs: Vec<Option<F::Output>> = running.iter().map(|_| None).collect();
    poll_fn(|cx| {
        let mut is_pending = false;
        for (future, output) in running.iter_mut().zip(&mut outputs) {
            if output.is_none() {
                match future.as_mut().poll(cx) {
                    Poll::Ready(ready) => *output = Some(ready),
                    Poll::Pending => is_pending = true,
                }
            }
        }
        match is_pending {
            true => Poll::Pending,
            false => Poll::Ready(()),
        }
    })
    .await;
    outputs.into_iter().flatten().collect()
}

/// How long it took, too.
pub async fn timed<F: Future>(future: F) -> (F::Output, Duration) {
    let begun = Instant::now();
    let output = future.await;
    (output, begun.elapsed())
}

/// Statements without parameters; `idempotency_…` are the tables of the schema at hand.
pub async fn sql(connection: &mut PgConnection, statements: &str) {
    let ran = sqlx::raw_sql(AssertSqlSafe(statements.to_owned()));
    ran.execute(connection)
        .await
        .unwrap_or_else(|error| panic!("{statements}: {error}"));
}

/// The one value a statement answers.
pub async fn value<T>(connection: &mut PgConnection, statement: &str) -> T
where
    T: for<'r> sqlx::Decode<'r, sqlx::Postgres> + sqlx::Type<sqlx::Postgres> + Send + Unpin,
    (T,): for<'r> sqlx::FromRow<'r, PgRow>,
{
    let value = sqlx::query_scalar(AssertSqlSafe(statement.to_owned()));
    value
        .fetch_one(connection)
        .await
        .unwrap_or_else(|error| panic!("{statement}: {error}"))
}

/// Asks a few times a second, for at most ten seconds, until a statement answers true.
pub async fn becomes_true(connection: &mut PgConnection, statement: &str) {
    for _ in 0..1_000 {
        if value(connection, statement).await {
            return;
        }
        sleep(Duration::from_millis(10)).await;
    }
    panic!("in vain: {statement}");
}

/// A pool of this many connections, whose liveness nobody checks before they are used.
pub fn pool(options: PgConnectOptions, connections: u32) -> PgPool {
    PgPoolOptions::new()
        .max_connections(connections)
        .test_before_acquire(false)
        .connect_lazy_with(options.disable_statement_logging())
}

/// A network in front of the server that `DATABASE_URL` names, and how to connect through it.
pub async fn proxied(database: &Database) -> (Proxy, PgConnectOptions) {
    let options = database.options();
    let host = (options.get_host().to_owned(), options.get_port());
    let mut targets = tokio::net::lookup_host(host).await.unwrap();
    let target = targets.next().expect("the server has no address");
    let proxy = Proxy::to(target).await;
    let through = at(options, proxy.address());
    (proxy, through)
}

/// The same server, reached at another address.
pub fn at(options: PgConnectOptions, address: SocketAddr) -> PgConnectOptions {
    let options = options.host(&address.ip().to_string()).port(address.port());
    options.ssl_mode(sqlx::postgres::PgSslMode::Disable)
}

//! Two processes, of which one stands still at the worst moment, until the other has taken over.

use std::{
    fs,
    net::SocketAddr,
    path::Path,
    time::{Duration, Instant},
};

use sqlx::{ConnectOptions, Connection, sqlite::SqliteConnectOptions};
use tokio::time::sleep;

use crate::{
    accounts::{self, Action, Books},
    answer::RUN,
    service::{self, HOLD_AFTER, HOLD_BEFORE, HOLDS, TOOK_OVER},
    support::{
        server::Server,
        wire::{Reply, Wire, raw_post},
    },
};

async fn exchange(address: SocketAddr, key: &str) -> Reply {
    let mut wire = Wire::to(address).await.unwrap();
    wire.write(&raw_post(key, "{}")).await;
    wire.read_reply().await
}

/// Retries until it is no longer in flight.
async fn retry(address: SocketAddr, key: &str) -> Reply {
    let begun = Instant::now();
    loop {
        let reply = exchange(address, key).await;
        if reply.code() != "idempotency_in_flight" {
            return reply;
        }
        assert!(begun.elapsed() < Duration::from_secs(10), "{reply:?}");
        sleep(Duration::from_millis(20)).await;
    }
}

/// Waits until this is noted.
async fn noted(journal: &Path, what: &str) {
    let begun = Instant::now();
    let is_there = || fs::read_to_string(journal).is_ok_and(|noted| noted.contains(what));
    while !is_there() {
        assert!(begun.elapsed() < Duration::from_secs(10), "never {what}");
        sleep(Duration::from_millis(5)).await;
    }
}

/// What both clients get in the end. The first process stands still until the second has answered, or
/// has begun where what the first one holds is in its way.
async fn stall(database: &str, journal: &Path, key: &str, in_the_way: bool) -> [Reply; 2] {
    // The patient ones: what stands still is not given up.
    let mut owner = service::spawn(0, database, journal);
    let mut other = service::spawn(2, database, journal);
    let (owner_at, other_at) = (owner.address().await, other.address().await);
    let (to_owner, to_other) = (key.to_owned(), key.to_owned());
    let first = tokio::spawn(async move { exchange(owner_at, &to_owner).await });
    noted(journal, HOLDS).await;
    let stalled = owner.stall();
    let second = tokio::spawn(async move { retry(other_at, &to_other).await });
    noted(journal, TOOK_OVER).await;
    if in_the_way {
        drop(stalled);
        // It has lost, and there is nothing to replay yet.
        let said = first.await.unwrap().said();
        assert_eq!(said, (409, "idempotency_in_flight".into()));
        let second = second.await.unwrap();
        return [retry(owner_at, key).await, second];
    }
    let second = second.await.unwrap();
    drop(stalled);
    [first.await.unwrap(), second]
}

/// The one effect is the second run's, and so is the answer, of which the first one's client gets a
/// replay.
fn assert_second_only([first, second]: &[Reply; 2], books: &Books, key: &str) {
    assert_eq!(
        (second.status, second.is_replay()),
        (201, false),
        "{second:?}"
    );
    assert_eq!((first.status, first.is_replay()), (201, true), "{first:?}");
    assert_eq!(first.body, second.body);
    let run = String::from_utf8_lossy(second.header(RUN).unwrap());
    let expected = Action::of(key).entered_by(&run);
    assert_eq!(books.entries[key], expected);
    let moved: i64 = expected.iter().map(|(_, _, amount)| amount).sum();
    let total: i64 = books.balances.values().sum();
    assert_eq!(total, accounts::all_openings() + moved);
}

async fn on_postgres(hold: &str, in_the_way: bool) {
    let server = Server::start().await;
    accounts::open_in_postgres(&mut server.connect().await).await;
    let folder = tempfile::tempdir().unwrap();
    let journal = folder.path().join("journal");
    let replies = stall(&server.url(), &journal, hold, in_the_way).await;
    let books = accounts::read_from_postgres(&mut server.connect().await).await;
    assert_second_only(&replies, &books, hold);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_stood_still_before_it_wrote_loses_to_who_took_over_on_postgres() {
    on_postgres(HOLD_BEFORE, false).await;
}

// The other one waits for the rows that the first one has written and not committed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_stood_still_after_it_wrote_loses_to_who_took_over_on_postgres() {
    on_postgres(HOLD_AFTER, true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_stood_still_before_it_wrote_loses_to_who_took_over_on_sqlite() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("accounts.db");
    let options = SqliteConnectOptions::new()
        .filename(&file)
        .create_if_missing(true);
    let mut connection = options.connect().await.unwrap();
    accounts::open_in_sqlite(&mut connection).await;
    connection.close().await.unwrap();
    let database = format!("{}{}", service::SQLITE, file.display());
    let journal = folder.path().join("journal");
    let replies = stall(&database, &journal, HOLD_BEFORE, false).await;
    let books = accounts::read_from_sqlite(&mut options.connect().await.unwrap()).await;
    assert_second_only(&replies, &books, HOLD_BEFORE);
}

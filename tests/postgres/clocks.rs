//! The server's clock decides, whatever those of the service instances show.

use std::time::Duration;

use tower_idempotency::{
    Timestamp,
    store::{Lifetimes, Store},
};

use super::common::*;
use crate::support::{clock::TestClock, database::Database};

const LEASE: Duration = Duration::from_secs(30);
const SECOND: Duration = Duration::from_secs(1);

/// The day of a server whose clock is as wrong as can be, seen from here: 1970, 2000, 2100.
const DAYS: [i64; 3] = [0, 946_684_800_000_000, 4_102_444_800_000_000];

// T2
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leases_and_lifetimes_are_judged_by_the_servers_clock_alone() {
    for day in DAYS {
        let database = std::sync::Arc::new(Database::new());
        let clock = TestClock::of(database.clone());
        clock.set(Timestamp::from_micros(day));
        let (one, other) = (open(database.pool()).await, open(database.pool()).await);
        let mut first = request("k");
        first.lease = LEASE;
        let ticket = win(&one, &first).await;
        let record = get(&other, "k").await.unwrap();
        assert_eq!(record.created, Timestamp::from_micros(day));

        clock.advance(LEASE - SECOND);
        in_flight(other.claim(replacing("k", ticket.token)).await);
        assert_eq!(other.purge(10).await.unwrap(), 0);
        clock.advance(SECOND * 2);
        assert_eq!(
            abandoned(other.claim(request("k")).await).token,
            ticket.token
        );

        let short = Lifetimes::new(LEASE);
        done(one.complete(&ticket, created(), short).await);
        let record = get(&other, "k").await.unwrap();
        let completed_at = Timestamp::from_micros(day).after(LEASE + SECOND);
        assert_eq!(record.completed, Some(completed_at));
        assert_eq!(record.expires, Some(completed_at.after(LEASE)));
        clock.advance(LEASE - SECOND);
        completed(other.claim(request("k")).await);
        clock.advance(SECOND);
        assert!(get(&other, "k").await.is_none());
        assert_eq!(other.purge(10).await.unwrap(), 1);
        assert_eq!(win(&other, &first).await.attempt, 1);
    }
}

/// The time of the statement, and not of a transaction around it: a transaction would still be at its
/// beginning.
// T2
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_time_of_the_statement_counts() {
    let database = Database::in_real_time();
    // At this level every statement stands in a transaction of its own.
    let options = database.options();
    let serializable = options.options([("default_transaction_isolation", "serializable")]);
    for (key, options) in [
        ("alone", database.options()),
        ("in-a-transaction", serializable),
    ] {
        let store = open(pool(options, 2)).await;
        let mut connection = database.connect().await;
        let before: i64 = value(&mut connection, NOW).await;
        let ticket = win(&store, &request(key)).await;
        let between: i64 = value(&mut connection, NOW).await;
        done(store.complete(&ticket, created(), lifetimes()).await);
        let after: i64 = value(&mut connection, NOW).await;
        let record = get(&store, key).await.unwrap();
        let (created, completed) = (
            record.created.as_micros(),
            record.completed.unwrap().as_micros(),
        );
        assert!(
            (before..=between).contains(&created),
            "{before} {created} {between}"
        );
        assert!(
            (between..=after).contains(&completed),
            "{between} {completed} {after}"
        );
    }
}

const NOW: &str = "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint";

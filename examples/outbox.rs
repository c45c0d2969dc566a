//! A merchant that charges each order once, whatever becomes of its process: `cargo run --example outbox
//! --features client` beside a running `quickstart`.
//!
//! With `REFERENCE` and `AMOUNT` (satang) it begins the charge of that order, if it was not begun yet, and sends it.
//! Without them it sends what earlier runs have left behind. Either way it prints what became of each.
//!
//! Environment: `OUTBOX` (outbox.db), `SERVER` (http://127.0.0.1:3000), `HOLD_AT` (`before-send` or
//! `before-recording`: there it waits for ever, to be killed).

use std::{env, error::Error, io::Write, thread};

use axum::body::Body;
use http::{HeaderValue, Request, header::CONTENT_TYPE};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use serde_json::json;
use sqlx::{
    Sqlite, SqlitePool,
    sqlite::{SqliteConnectOptions, SqliteJournalMode, SqliteSynchronous},
};
use tower::{Layer, service_fn};
use tower_idempotency::client::{
    Entry, EntryState, Operation, Outbox, Relay, RetryLayer, Undelivered,
};

const HOLDS: [&str; 3] = ["", "before-send", "before-recording"];

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let variable = |name: &str, default: &str| env::var(name).unwrap_or_else(|_| default.into());
    let outbox = open(&variable("OUTBOX", "outbox.db")).await?;
    let hold_at = variable("HOLD_AT", "");
    if !HOLDS.contains(&&*hold_at) {
        return Err("HOLD_AT must be before-send or before-recording".into());
    }

    let reference = env::var("REFERENCE").ok();
    if let Some(reference) = &reference {
        let amount: u64 = variable("AMOUNT", "")
            .parse()
            .map_err(|_| "AMOUNT must be a number of satang, beside REFERENCE")?;
        let server = variable("SERVER", "http://127.0.0.1:3000");
        let body = json!({ "order_id": reference, "amount_satang": amount });
        let charge = Operation::post(format!("{server}/payments").parse()?)
            .header(CONTENT_TYPE, HeaderValue::from_static("application/json"))
            .body(body.to_string());
        // The key is made here, once, and lies in the file with the body before anything is sent. In a program
        // with tables of its own this is `begin_in`, in the transaction that creates the order.
        let begun = outbox.begin(reference, charge).await?;
        if begun.differs() {
            return Err(
                format!("{reference} was begun before, for something else: look it up").into(),
            );
        }
        hold("before-send", &hold_at);
    }

    let network: Client<HttpConnector, Body> =
        Client::builder(TokioExecutor::new()).build(HttpConnector::new());
    let client = service_fn(move |request: Request<Body>| {
        let (network, hold_at) = (network.clone(), hold_at.clone());
        async move {
            let answer = network.request(request).await?;
            hold("before-recording", &hold_at);
            Ok::<_, hyper_util::client::legacy::Error>(answer)
        }
    });
    let relay = Relay::new(outbox.clone(), RetryLayer::new().layer(client));
    if let Some(reference) = reference {
        return match relay.send(&reference).await {
            Ok(delivered) => say(delivered.entry()),
            Err(why) => say_pending(&reference, &why),
        };
    }
    // At the start, and in a real program from a timer too.
    let resumed = relay.resume(100).await?;
    for entry in resumed.done.iter().chain(&resumed.failed) {
        say(entry)?;
    }
    for unfinished in &resumed.pending {
        say_pending(&unfinished.reference, &unfinished.why)?;
    }
    for entry in &resumed.overdue {
        let reference = entry.reference();
        println!("{reference}: too old to be sent: look it up and settle it");
    }
    for entry in &resumed.held {
        let reference = entry.reference();
        println!("{reference}: run by the server without a record: look it up and settle it");
    }
    let counts = outbox.counts().await?;
    println!(
        "{} pending, {} done, {} refused",
        counts.pending, counts.done, counts.failed
    );
    // What was settled longer ago than the server keeps its keys; nothing else deletes it.
    outbox.purge(1_000).await?;
    Ok(())
}

fn say(entry: &Entry) -> Result<(), Box<dyn Error>> {
    let what = match entry.state() {
        EntryState::Done => "done",
        _ => "refused",
    };
    let answer = entry.result()?.map(|answer| answer.into_body());
    let answer = String::from_utf8_lossy(&answer.unwrap_or_default()).into_owned();
    let status = entry
        .status()
        .map_or(String::new(), |status| status.to_string());
    println!("{}: {what} {status} {answer}", entry.reference());
    Ok(())
}

fn say_pending(reference: &str, why: &Undelivered) -> Result<(), Box<dyn Error>> {
    println!("{reference}: pending: {why}");
    // Of which the last says what the network did.
    let mut cause = why.source();
    while let Some(error) = cause {
        println!("    {error}");
        cause = error.source();
    }
    Ok(())
}

/// Time to pull the plug: the thread stands still, so that no time-out ends it.
fn hold(point: &str, at: &str) {
    if point == at {
        println!("holding {point}");
        let _ = std::io::stdout().flush();
        loop {
            thread::park();
        }
    }
}

async fn open(file: &str) -> Result<Outbox<Sqlite>, Box<dyn Error>> {
    let file = SqliteConnectOptions::new()
        .filename(file)
        .create_if_missing(true)
        .journal_mode(SqliteJournalMode::Wal)
        // What was begun survives a power cut too.
        .synchronous(SqliteSynchronous::Full);
    let outbox = Outbox::new(SqlitePool::connect_with(file).await?);
    outbox.migrate().await?;
    Ok(outbox)
}

//! The drill: three processes of one service on one Postgres, behind `Recovery::Refuse`. Clients send
//! each action under its own key and retry, while processes are killed at random and Postgres goes
//! down and comes back.
//!
//! `DRILL_SECONDS` makes it longer. It prints what happened.
#![cfg(all(unix, feature = "postgres"))]

#[path = "drill/answer.rs"]
mod answer;
#[path = "drill/chaos.rs"]
mod chaos;
#[path = "drill/clients.rs"]
mod clients;
#[path = "drill/hiccup.rs"]
mod hiccup;
#[path = "drill/ledger.rs"]
mod ledger;
#[path = "drill/one_death.rs"]
mod one_death;
#[path = "drill/owners.rs"]
mod owners;
#[path = "drill/process.rs"]
mod process;
#[path = "drill/service.rs"]
mod service;
mod support;
#[path = "drill/verdict.rs"]
mod verdict;

use std::{sync::Arc, time::Duration};

use chaos::Fleet;
use clients::{Clients, TOO_LONG};
use ledger::{Ledger, Seen, Terms};
use support::server::Server;
use tokio::{sync::watch, time::sleep};
use tower_idempotency::PostgresStore;
use verdict::Verdict;

const INSTANCES: usize = 3;

const CLIENTS: usize = 24;

/// Short, so that what a killed process leaves behind is soon known to be unknown.
const LEASE: Duration = Duration::from_millis(800);

/// A handler may fail, and an outcome be unknown.
const TERMS: Terms = Terms {
    answers: &[201, 500],
    declines: None,
    passing: &["idempotency_store_unavailable"],
    may_be_unknown: true,
};

/// How long the chaos lasts where nobody asks for more.
const SECONDS: u64 = 30;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_is_killed_no_effect_happens_twice_and_every_key_keeps_its_one_answer() {
    let seconds: u64 = match std::env::var("DRILL_SECONDS") {
        Ok(seconds) => seconds.parse().expect("DRILL_SECONDS is no number"),
        Err(_) => SECONDS,
    };
    let server = Server::start().await;
    service::create_effects(&server).await;
    let folder = tempfile::tempdir().unwrap();
    let journal = folder.path().join("journal");
    let fleet = Arc::new(Fleet::new(INSTANCES, {
        let (database, journal) = (server.url(), journal.clone());
        move |number| service::spawn(number, &database, &journal)
    }));
    let (is_over, over) = watch::channel(false);
    let clients = Arc::new(Clients {
        fleet: fleet.clone(),
        ledger: Ledger::new(TERMS),
        over: over.clone(),
    });

    let kept = fleet.keep_all(&over);
    let shaken = tokio::spawn(chaos::shake(server, over.clone()));
    let driven = clients.drive_all();
    sleep(Duration::from_secs(seconds)).await;
    is_over.send_replace(true);
    let (server, outages) = shaken.await.unwrap();
    // They live on to the end, and so does what they run.
    let processes = kept.join_all().await;
    driven.join_all().await;

    let store = PostgresStore::connect(&server.url()).await.unwrap();
    let mut owners = Vec::new();
    for address in fleet.serving() {
        owners.push(owners::owner_at(address, &clients, &store).await);
    }
    assert_eq!(owners.len(), INSTANCES);
    owners::settle(&owners, &store, &clients.ledger).await;
    let last_words = clients.ask_once_more_for_every_key(TOO_LONG).await;
    let unknown = { last_words.into_iter() }
        .filter_map(|(key, seen)| (seen == Seen::Unknown).then_some(key))
        .collect();
    let verdict = Verdict::of(&server, &store, &journal, &clients.ledger, &unknown).await;
    let summary = format!(
        "drill of {seconds} s: killed {} processes, stalled {}, and {outages}; {}; {verdict}",
        fleet.kills(),
        fleet.stalls(),
        clients.ledger.counts(),
    );
    println!("{summary}");
    drop(processes);

    clients.ledger.assert_faultless();
    // Without chaos, and something in its way, nothing is proved.
    let seconds = usize::try_from(seconds).unwrap();
    let counts = clients.ledger.counts();
    assert!(fleet.kills() >= seconds / 2, "{summary}");
    assert!(
        outages.killed + outages.stopped >= seconds / 15,
        "{summary}"
    );
    assert!(verdict.created >= seconds * 5, "{summary}");
    assert!(counts.replays >= verdict.created, "{summary}");
    assert!(counts.in_flight > 0 && counts.unavailable > 0, "{summary}");
    assert!(counts.unanswered > 0 && verdict.unknown > 0, "{summary}");
}

/// Not a test: a process of the service, when the drill starts one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn this_binary_also_plays_the_service() {
    if let Some(part) = service::Part::asked_for() {
        part.play().await;
    }
}

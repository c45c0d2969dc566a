//! The drill in transactional mode: processes of one service that move money between accounts through
//! `Tx`, behind `Recovery::Refuse`. Clients send each action under its own key and retry, while processes
//! are killed and stand still at random, and Postgres goes down and comes back. However a run ends, its
//! action has its one effect or none, and no outcome is ever unknown.
//!
//! `DRILL_SECONDS` makes it longer. It prints what happened.
#![cfg(all(unix, feature = "postgres", feature = "sqlite"))]

#[path = "drill_transactional/accounts.rs"]
mod accounts;
#[path = "drill/answer.rs"]
mod answer;
#[path = "drill/chaos.rs"]
mod chaos;
#[path = "drill/clients.rs"]
mod clients;
#[path = "drill_transactional/held_commits.rs"]
mod held_commits;
#[path = "drill/ledger.rs"]
mod ledger;
#[path = "drill_transactional/one_stall.rs"]
mod one_stall;
#[path = "drill/process.rs"]
mod process;
#[path = "drill_transactional/service.rs"]
mod service;
mod support;
#[path = "drill_transactional/verdict.rs"]
mod verdict;

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use accounts::Books;
use chaos::Fleet;
use clients::Clients;
use ledger::{Ledger, Seen, Terms};
use process::Process;
use sqlx::{
    ConnectOptions, Connection,
    sqlite::{SqliteConnectOptions, SqliteJournalMode},
};
use support::server::Server;
use tokio::{sync::watch, task::JoinSet, time::sleep};
use tower_idempotency::{AnyStore, PostgresStore, SqliteStore};
use verdict::Verdict;

const CLIENTS: usize = 40;

/// Short, so that what a killed process leaves behind is soon taken over.
const LEASE: Duration = Duration::from_millis(800);

/// How long a key may be stuck once nothing is killed any more: the lease, and some conflicts.
const UNSTUCK: Duration = Duration::from_secs(10);

/// Declining is an answer, too: where the handler says so, for good. An outcome is never unknown.
const TERMS: Terms = Terms {
    answers: &[201, 402],
    declines: Some(402),
    passing: &[
        "idempotency_store_unavailable",
        "idempotency_transaction_failed",
        // What a `TxError` says.
        "",
    ],
    may_be_unknown: false,
};

/// How long the chaos lasts where nobody asks for more.
const SECONDS: usize = 30;

fn seconds() -> usize {
    match std::env::var("DRILL_SECONDS") {
        Ok(seconds) => seconds.parse().expect("DRILL_SECONDS is no number"),
        Err(_) => SECONDS,
    }
}

async fn pass(seconds: usize) {
    sleep(Duration::from_secs(seconds.try_into().unwrap())).await;
}

/// Processes on one database, and the clients that send to them.
struct Drill {
    fleet: Arc<Fleet>,
    clients: Arc<Clients>,
    journal: PathBuf,
    is_over: watch::Sender<bool>,
    kept: JoinSet<Process>,
    driven: JoinSet<()>,
}

impl Drill {
    fn begin(instances: usize, database: String, folder: &Path) -> Self {
        let journal = folder.join("journal");
        let fleet = Arc::new(Fleet::new(instances, {
            let journal = journal.clone();
            move |number| service::spawn(number, &database, &journal)
        }));
        let (is_over, over) = watch::channel(false);
        let clients = Arc::new(Clients {
            fleet: fleet.clone(),
            ledger: Ledger::new(TERMS),
            over: over.clone(),
        });
        Self {
            kept: fleet.keep_all(&over),
            driven: clients.drive_all(),
            fleet,
            clients,
            journal,
            is_over,
        }
    }

    /// Nothing is killed from here on, and every action comes to its end.
    async fn end(self) -> Ended {
        self.is_over.send_replace(true);
        let processes = self.kept.join_all().await;
        self.driven.join_all().await;
        let last_words = self.clients.ask_once_more_for_every_key(UNSTUCK).await;
        Ended {
            processes,
            fleet: self.fleet,
            clients: self.clients,
            journal: self.journal,
            last_words,
        }
    }
}

struct Ended {
    /// They live on to the end, and so does what they run.
    processes: Vec<Process>,
    fleet: Arc<Fleet>,
    clients: Arc<Clients>,
    journal: PathBuf,
    last_words: HashMap<String, Seen>,
}

impl Ended {
    async fn verdict(&mut self, store: &AnyStore, books: impl AsyncFn() -> Books) -> Verdict {
        let ledger = &self.clients.ledger;
        verdict::everything_rests(store, ledger).await;
        let books = books().await;
        // What was left by a client that did not wait may have been done after it was declined.
        for (key, last_word) in &mut self.last_words {
            if *last_word == Seen::Declined && books.entries.contains_key(key) {
                *last_word = self.clients.retry(key, UNSTUCK).await;
            }
        }
        Verdict::of(&books, store, &self.journal, ledger, &self.last_words).await
    }

    fn summary(&self) -> String {
        format!(
            "killed {} processes, stalled {}; {}",
            self.fleet.kills(),
            self.fleet.stalls(),
            self.clients.ledger.counts()
        )
    }

    /// Without chaos, and something in its way, nothing is proved.
    fn assert_hard(&self, verdict: &Verdict, summary: &str) {
        let counts = self.clients.ledger.counts();
        assert!(counts.replays >= verdict.done, "{summary}");
        assert!(counts.in_flight > 0 && counts.unavailable > 0, "{summary}");
        assert!(counts.unanswered > 0 && counts.declined > 0, "{summary}");
        assert!(verdict.declined > 0, "{summary}");
        assert!(verdict.runs > verdict.effects, "{summary}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_is_killed_every_action_has_its_one_effect_and_its_one_answer_on_postgres() {
    let seconds = seconds();
    // Deadlocks are looked for soon, so that there can be many.
    let server = Server::start_with(&[("deadlock_timeout", "50ms")]).await;
    accounts::open_in_postgres(&mut server.connect().await).await;
    let folder = tempfile::tempdir().unwrap();
    let drill = Drill::begin(3, server.url(), folder.path());
    let held = held_commits::hold(server.url(), drill.is_over.subscribe());
    let held = tokio::spawn(held);
    let shaken = tokio::spawn(chaos::shake(server, drill.is_over.subscribe()));
    pass(seconds).await;
    // Postgres first: nothing comes to its end without it.
    drill.is_over.send_replace(true);
    let (server, outages) = shaken.await.unwrap();
    let holds = held.await.unwrap();
    let mut ended = drill.end().await;

    let store = PostgresStore::connect(&server.url()).await.unwrap();
    let books = async || accounts::read_from_postgres(&mut server.connect().await).await;
    let verdict = ended.verdict(&AnyStore::new(store), books).await;
    no_transaction_is_left_open(&server, &ended.clients.ledger).await;
    let summary = format!(
        "drill of {seconds} s on Postgres: {outages}, its commits held {holds} times; {}; {verdict}",
        ended.summary()
    );
    println!("{summary}");
    ended.processes.clear();

    ended.clients.ledger.assert_faultless();
    ended.assert_hard(&verdict, &summary);
    assert!(ended.fleet.kills() >= seconds, "{summary}");
    assert!(ended.fleet.stalls() >= seconds / 15, "{summary}");
    let outages = outages.killed + outages.stopped;
    assert!(outages >= seconds / 15, "{summary}");
    assert!(holds >= seconds / 20, "{summary}");
    assert!(verdict.uncertain > 0, "{summary}");
    assert!(verdict.done >= seconds * 5, "{summary}");
    assert!(verdict.conflicts >= seconds, "{summary}");
}

/// Looks while the processes live, which would hold it open.
async fn no_transaction_is_left_open(server: &Server, ledger: &Ledger) {
    let mut connection = server.connect().await;
    let begun = Instant::now();
    loop {
        let open = sqlx::query_scalar(
            "SELECT count(*) FROM pg_stat_activity
             WHERE xact_start IS NOT NULL AND backend_type = 'client backend'
                 AND pid <> pg_backend_pid()",
        );
        let open: i64 = open.fetch_one(&mut connection).await.unwrap();
        if open == 0 {
            return;
        }
        if begun.elapsed() > UNSTUCK {
            return ledger.fault("all actions", format!("{open} transactions are left open"));
        }
        sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_is_killed_every_action_has_its_one_effect_and_its_one_answer_on_sqlite() {
    let seconds = seconds() * 2 / 3;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("accounts.db");
    let options = SqliteConnectOptions::new()
        .filename(&file)
        .create_if_missing(true)
        .journal_mode(SqliteJournalMode::Wal);
    let connect = async || options.connect().await.unwrap();
    // Closed before the processes begin: what those leave behind that are killed is theirs to clean.
    let mut connection = connect().await;
    accounts::open_in_sqlite(&mut connection).await;
    connection.close().await.unwrap();
    let database = format!("{}{}", service::SQLITE, file.display());
    let drill = Drill::begin(2, database, folder.path());
    pass(seconds).await;
    let mut ended = drill.end().await;

    let store = SqliteStore::open(&file).await.unwrap();
    let books = async || accounts::read_from_sqlite(&mut connect().await).await;
    let verdict = ended.verdict(&AnyStore::new(store), books).await;
    let summary = format!(
        "drill of {seconds} s on SQLite: {}; {verdict}",
        ended.summary()
    );
    println!("{summary}");
    ended.processes.clear();

    ended.clients.ledger.assert_faultless();
    ended.assert_hard(&verdict, &summary);
    assert!(ended.fleet.kills() >= seconds / 2, "{summary}");
    assert!(verdict.done >= seconds * 3, "{summary}");
}

/// Not a test: a process of the service, when a drill starts one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn this_binary_also_plays_the_service() {
    if let Some(part) = service::Part::asked_for() {
        part.play().await;
    }
}

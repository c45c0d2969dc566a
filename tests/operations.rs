//! What the operations chapter of the documentation gives to copy, tried on real databases.

mod support;

use std::{
    collections::BTreeMap,
    path::Path,
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{Router, extract::State, http::StatusCode, routing::post};
use bytes::Bytes;
use sqlx::{ConnectOptions, Connection, Row, sqlite::SqliteConnectOptions};
use support::{Answer, eventually, request, send};
use tokio::{
    sync::Semaphore,
    time::{sleep, timeout},
};
use tower_idempotency::{
    Abandoned, Fingerprint, Idempotency, IdempotencyKey, IdempotencyLayer, RecordId, Scope,
    SqliteStore, Verdict,
    store::{Checkpoints, Claim, ClaimRequest, Completion, Inspect, Lifetimes, Settled, Ticket},
};

const PATIENCE: Duration = Duration::from_secs(20);
const CHAPTER: &str = include_str!("../src/operations.md");
/// Neither what names a client and its action, nor what the client was given.
const COLUMNS: [&str; 7] = [
    "request_id",
    "attempt",
    "mode",
    "scheme",
    "first_claimed",
    "why",
    "checkpoints",
];

/// The query that begins with this comment.
fn query(comment: &str) -> &'static str {
    let begin = CHAPTER.find(comment).expect("it is in the chapter");
    let end = CHAPTER[begin..].find("```").expect("it ends");
    &CHAPTER[begin..begin + end]
}

async fn claimed<S: Inspect>(store: &S, name: &str, max_run: Duration) -> Ticket {
    let id = RecordId::new(Scope::new("shop"), IdempotencyKey::new(name));
    let mut request = ClaimRequest::new(id, "exact-v1", Fingerprint::of([name]));
    request.request_id = Some(name.into());
    request.max_run = max_run;
    match store.claim(request).await.unwrap() {
        Claim::Won(ticket) => ticket,
        other => panic!("{other:?}"),
    }
}

/// A record in every state; `silent` belongs to a process that is gone by now.
async fn fill<S: Inspect + Checkpoints>(store: &S, silent: S) {
    let minute = Duration::from_secs(60);
    let marked = claimed(store, "marked", minute).await;
    assert_eq!(store.abandon(&marked).await.unwrap(), Settled::Done);
    let gone = claimed(&silent, "silent", minute).await;
    for name in ["asked", "verdict"] {
        let saved = silent.save(&gone, name, Bytes::from_static(b"\x01true"));
        assert_eq!(saved.await.unwrap(), Settled::Done);
    }
    silent.close().await.unwrap();
    let _ = claimed(store, "overlong", Duration::from_millis(1)).await;
    let _ = claimed(store, "running", minute).await;
    let done = claimed(store, "done", minute).await;
    let completion = Completion::tombstone(StatusCode::CREATED);
    let done = store.complete(&done, completion, Lifetimes::new(minute));
    assert_eq!(done.await.unwrap(), Settled::Done);
    let freed = claimed(store, "freed", minute).await;
    let saved = store.save(&freed, "asked", Bytes::from_static(b"\x01true"));
    assert_eq!(saved.await.unwrap(), Settled::Done);
    let freed = store.release(&freed, minute).await;
    assert_eq!(freed.unwrap(), Settled::Done);
}

type Found = BTreeMap<String, (String, Option<String>)>;

fn expected() -> Found {
    let row = |name: &str, why: &str, checkpoints: Option<&str>| {
        let found = (why.to_owned(), checkpoints.map(str::to_owned));
        (name.to_owned(), found)
    };
    BTreeMap::from([
        row("marked", "given up", None),
        row("silent", "its process fell silent", Some("asked,verdict")),
        row("overlong", "longer than max_run", None),
    ])
}

fn found<R: Row>(rows: &[R]) -> Found
where
    for<'a> &'a str: sqlx::ColumnIndex<R>,
    String: for<'a> sqlx::Decode<'a, R::Database> + sqlx::Type<R::Database>,
{
    let mut found = BTreeMap::new();
    for row in rows {
        let columns: Vec<_> = row.columns().iter().map(sqlx::Column::name).collect();
        assert_eq!(columns, COLUMNS);
        let why = (row.get("why"), row.get("checkpoints"));
        found.insert(row.get("request_id"), why);
    }
    found
}

/// Those that the store itself lists.
async fn listed(store: &impl Inspect) -> Vec<String> {
    let listed = store.abandoned(None, 100).await.unwrap();
    let names = listed.iter().map(|record| record.request_id.as_deref());
    let mut names: Vec<String> = names.map(|name| name.unwrap().to_owned()).collect();
    names.sort();
    names
}

#[tokio::test]
async fn the_query_for_sqlite_lists_what_the_store_lists() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("records.db");
    let store = SqliteStore::open(&path).await.unwrap();
    fill(&store, SqliteStore::open(&path).await.unwrap()).await;
    let options = SqliteConnectOptions::new().filename(&path);
    let mut connection = options.read_only(true).connect().await.unwrap();
    let query = query("-- SQLite: abandoned records");
    // The query knows whole seconds only.
    let agreed = timeout(PATIENCE, async {
        loop {
            let rows = sqlx::query(query).fetch_all(&mut connection).await.unwrap();
            if found(&rows) == expected() {
                return;
            }
            sleep(Duration::from_millis(50)).await;
        }
    });
    agreed.await.expect("the query does not list them");
    let expected = expected().into_keys().collect::<Vec<_>>();
    assert_eq!(listed(&store).await, expected);
    connection.close().await.unwrap();
}

#[cfg(feature = "postgres")]
#[tokio::test]
async fn the_query_for_postgres_lists_what_the_store_lists() {
    let database = support::database::Database::in_real_time();
    let open = async || {
        let store = tower_idempotency::PostgresStore::options()
            .schema(database.schema())
            .migrate();
        store.open(database.pool()).await.unwrap()
    };
    let store = open().await;
    fill(&store, open().await).await;
    let mut connection = database.options().connect().await.unwrap();
    let query = query("-- Postgres: abandoned records");
    let agreed = timeout(PATIENCE, async {
        loop {
            let rows = sqlx::query(query).fetch_all(&mut connection).await.unwrap();
            if found(&rows) == expected() {
                return;
            }
            sleep(Duration::from_millis(50)).await;
        }
    });
    agreed.await.expect("the query does not list them");
    let expected = expected().into_keys().collect::<Vec<_>>();
    assert_eq!(listed(&store).await, expected);
    connection.close().await.unwrap();
}

/// A provider outside of the database, which goes back with no backup.
#[derive(Clone)]
struct Provider {
    /// Which downstream keys it was asked under, and for which of our keys.
    asked: Arc<Mutex<Vec<(String, String)>>>,
    /// Whether `slow` may go on.
    gate: Arc<Semaphore>,
}

impl Provider {
    fn asked_for(&self, key: &str) -> Vec<String> {
        let asked = self.asked.lock().unwrap();
        let asked = asked.iter().filter(|(ours, _)| ours == key);
        asked.map(|(_, downstream)| downstream.clone()).collect()
    }
}

async fn charge(
    State(provider): State<Provider>,
    idempotency: Idempotency,
) -> (StatusCode, String) {
    let key = String::from_utf8_lossy(idempotency.key().as_bytes()).into_owned();
    let downstream = idempotency.downstream_key("charge").unwrap().to_string();
    let run = {
        let mut asked = provider.asked.lock().unwrap();
        asked.push((key.clone(), downstream));
        asked.len()
    };
    if key == "slow" {
        let _ = provider.gate.acquire().await.unwrap();
    }
    (StatusCode::CREATED, format!("{key}, run {run}"))
}

/// The service on this file, with a resolver that asks the provider.
async fn service(file: &Path, provider: &Provider) -> Router {
    let store = SqliteStore::open(file).await.unwrap();
    let knows = provider.clone();
    let layer = IdempotencyLayer::new(store)
        .single_tenant()
        .lease(Duration::from_millis(300))
        .downstream_secret(b"apart from the backups")
        .resolver(move |abandoned: Abandoned| {
            let downstream = abandoned.downstream_key("charge").unwrap().to_string();
            let asked = knows.asked.lock().unwrap();
            let is_known = asked.iter().any(|(_, known)| *known == downstream);
            async move {
                match is_known {
                    true => Verdict::answer((StatusCode::CREATED, "as the provider says")),
                    false => Verdict::DidNotHappen,
                }
            }
        });
    Router::new()
        .route("/", post(charge))
        .route_layer(layer)
        .with_state(provider.clone())
}

async fn pay(app: &Router, key: &str) -> Answer {
    send(app, request("POST", "/", Some(key), "pay")).await
}

// What the chapter says a restored backup does.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restored_backup_has_forgotten_the_newest_keys_and_brought_back_what_was_in_flight() {
    let folder = tempfile::tempdir().unwrap();
    let (file, backup) = (folder.path().join("a.db"), folder.path().join("b.db"));
    let provider = Provider {
        asked: Arc::default(),
        gate: Arc::new(Semaphore::new(0)),
    };
    let app = service(&file, &provider).await;
    let old = pay(&app, "old").await;
    assert_eq!(old.status, 201);
    let slow = tokio::spawn({
        let app = app.clone();
        async move { pay(&app, "slow").await }
    });
    eventually("it runs", || !provider.asked_for("slow").is_empty()).await;
    let options = SqliteConnectOptions::new().filename(&file);
    let mut connection = options.connect().await.unwrap();
    sqlx::query("VACUUM INTO ?")
        .bind(backup.to_str().unwrap())
        .execute(&mut connection)
        .await
        .unwrap();
    connection.close().await.unwrap();
    provider.gate.add_permits(1);
    assert_eq!(slow.await.unwrap().status, 201);
    let newest = pay(&app, "newest").await;
    assert_eq!(newest.status, 201);
    drop(app);

    let app = service(&backup, &provider).await;
    pay(&app, "old").await.assert_replays(&old);
    let slow = timeout(PATIENCE, async {
        loop {
            let slow = pay(&app, "slow").await;
            if slow.code() != "idempotency_in_flight" {
                return slow;
            }
            sleep(Duration::from_millis(20)).await;
        }
    });
    let slow = slow.await.unwrap();
    assert_eq!((slow.status.as_u16(), slow.replay), (201, true), "{slow:?}");
    assert_eq!(&slow.body[..], b"as the provider says");
    assert_eq!(provider.asked_for("slow").len(), 1);
    // Forgotten: it runs again, under the same key as the first time.
    let again = pay(&app, "newest").await;
    assert_eq!((again.status.as_u16(), again.replay), (201, false));
    let asked = provider.asked_for("newest");
    assert_eq!((asked.len(), &asked[0]), (2, &asked[1]));
}

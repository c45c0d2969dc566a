//! What the stores carry per second, beside two plain statements through a pool on the same tables:
//!
//! ```sh
//! scripts/postgres cargo bench --features postgres --bench stores
//! ```
//!
//! Whoever is compared takes turns in short rounds, so that a slow moment of the machine hits all of
//! them, and a ratio is that of neighbours in time; what is printed is the median over the rounds.
//! All of it runs in spawned tasks, as a server would run it.
//!
//! `BENCH_SECONDS` (2) is how long a round lasts, `BENCH_ROUNDS` (5) how many there are,
//! `BENCH_ROWS` (10000000) the size of the big table, and `BENCH_ONLY` (all of
//! `throughput,bigtable,purge`) what is run. The big table takes some two minutes to fill and 6 GB of
//! disk, its log aside; the rest takes about six minutes.
//!
//! `DATABASE_URL` names a Postgres database whose role may create schemas and send CHECKPOINT; the
//! schemas made here are dropped at the end. Let nothing else be at work in that database: its commits
//! are counted.

use std::{
    future::Future,
    io::Write as _,
    path::{Path, PathBuf},
    pin::Pin,
    str::FromStr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use bytes::Bytes;
use http::StatusCode;
use rand::RngExt;
use sqlx::{
    AssertSqlSafe, ConnectOptions, Connection, PgConnection, PgPool, SqliteConnection, SqlitePool,
    postgres::{PgConnectOptions, PgPoolOptions},
    sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous},
};
use tower_idempotency::{
    Fingerprint, IdempotencyKey, MemoryStore, PostgresStore, RecordId, Scope, SqliteStore, Token,
    store::{Claim, ClaimRequest, Completion, Lifetimes, Settled, Store},
};

const CONCURRENCY: [usize; 4] = [1, 16, 64, 256];
/// The memory store is so fast that it would be full, by its default limit, after a longer round.
const MEMORY_ROUND: Duration = Duration::from_millis(250);
const SMALL_TABLE: u64 = 10_000;
/// Claims of a round on the big table, and on the small one beside it: one after the other, then in
/// short bursts of this many tasks with a few each.
const SINGLE_CLAIMS: usize = 500;
const BURSTS: usize = 8;
const CLAIMERS: usize = 64;
const CLAIMS_EACH: usize = 16;
const EXPIRED: u64 = 100_000;
/// As many as the layer's background task removes at a time.
const PURGE_BATCH: usize = 500;
/// Beside a purge: this many tasks, each with a claim now and then, which is load but no overload.
const PACED_CLAIMERS: usize = 16;
const PACE: Duration = Duration::from_millis(10);

const TTL: Duration = Duration::from_secs(7 * 24 * 3600);
const RESPONSE: Bytes = Bytes::from_static(&[b'x'; 200]);
const OWNER: [u8; 16] = [7; 16];
/// Longer than any round: many wait for few connections.
const PATIENCE: Duration = Duration::from_secs(300);

type Work<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// One of a thousand scopes of 16 bytes, and a key of 36 bytes that looks like a UUID.
fn fresh_id() -> RecordId {
    let mut scope = *b"merchant-0000000";
    let mut number: u32 = rand::rng().random_range(0..1000);
    for digit in scope.iter_mut().rev().take(3) {
        *digit += (number % 10) as u8;
        number /= 10;
    }
    let random = Token::random();
    let mut nibbles = random
        .as_bytes()
        .iter()
        .flat_map(|byte| [byte >> 4, byte & 15]);
    let key: [u8; 36] = std::array::from_fn(|at| match at {
        8 | 13 | 18 | 23 => b'-',
        _ => b"0123456789abcdef"[usize::from(nibbles.next().unwrap_or_default())],
    });
    RecordId::new(Scope::new(scope), IdempotencyKey::new(key))
}

fn claim_of(id: RecordId) -> ClaimRequest {
    ClaimRequest::new(id, "exact-v1", Fingerprint::from_bytes([7; 32]))
}

fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).expect("no such long time")
}

fn now_micros() -> i64 {
    micros(
        SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .expect("after 1970"),
    )
}

/// Whatever can make a request the first of its key, and record what came of it.
trait FirstRequests: Clone + Send + Sync + 'static {
    fn first_request(&self, id: RecordId) -> impl Future<Output = ()> + Send;
}

#[derive(Clone)]
struct Stored<S>(S);

impl<S: Store> FirstRequests for Stored<S> {
    async fn first_request(&self, id: RecordId) {
        let ticket = match self.0.claim(claim_of(id)).await {
            Ok(Claim::Won(ticket)) => ticket,
            other => panic!("a fresh key is free, not {other:?}"),
        };
        let done = Completion::retained(StatusCode::CREATED, RESPONSE);
        let settled = self.0.complete(&ticket, done, Lifetimes::new(TTL)).await;
        assert_eq!(settled.expect("the store answers"), Settled::Done);
    }
}

#[derive(Clone)]
struct PlainSqlite(SqlitePool);

impl FirstRequests for PlainSqlite {
    async fn first_request(&self, id: RecordId) {
        let claim = claim_of(id);
        let now = now_micros();
        let claimed = sqlx::query(
            "INSERT INTO idempotency_records (
                scope, key, scheme, fingerprint, token, owner, attempt, mode, state, created, run_until
            ) VALUES (?, ?, ?, ?, ?, ?, 1, 1, 1, ?, ?) ON CONFLICT DO NOTHING RETURNING attempt",
        )
        .bind(claim.id.scope.as_bytes())
        .bind(claim.id.key.as_bytes())
        .bind(&*claim.scheme)
        .bind(&claim.fingerprint.as_bytes()[..])
        .bind(&claim.token.as_bytes()[..])
        .bind(&OWNER[..])
        .bind(now)
        .bind(now + micros(claim.max_run))
        .fetch_optional(&self.0)
        .await
        .expect("SQLite inserts");
        assert!(claimed.is_some(), "a fresh key is free");
        let now = now_micros();
        let completed = sqlx::query(
            "UPDATE idempotency_records
            SET state = 2, completed = ?, expires = ?, status = ?, response = ?
            WHERE scope = ? AND key = ? AND token = ?",
        )
        .bind(now)
        .bind(now + micros(TTL))
        .bind(i64::from(StatusCode::CREATED.as_u16()))
        .bind(&RESPONSE[..])
        .bind(claim.id.scope.as_bytes())
        .bind(claim.id.key.as_bytes())
        .bind(&claim.token.as_bytes()[..])
        .execute(&self.0)
        .await
        .expect("SQLite updates");
        assert_eq!(completed.rows_affected(), 1);
    }
}

#[derive(Clone)]
struct PlainPostgres(PgPool);

impl FirstRequests for PlainPostgres {
    async fn first_request(&self, id: RecordId) {
        let claim = claim_of(id);
        let claimed = sqlx::query(
            "INSERT INTO idempotency_records (
                scope, key, scheme, fingerprint, token, owner, attempt, mode, state, created,
                lease_until, run_until
            ) VALUES (
                $1, $2, $3, $4, $5, $6, 1, 1, 1, clock_timestamp(),
                clock_timestamp() + interval '30 s', clock_timestamp() + interval '10 min'
            ) ON CONFLICT DO NOTHING RETURNING attempt",
        )
        .bind(claim.id.scope.as_bytes())
        .bind(claim.id.key.as_bytes())
        .bind(&*claim.scheme)
        .bind(&claim.fingerprint.as_bytes()[..])
        .bind(&claim.token.as_bytes()[..])
        .bind(&OWNER[..])
        .fetch_optional(&self.0)
        .await
        .expect("Postgres inserts");
        assert!(claimed.is_some(), "a fresh key is free");
        let completed = sqlx::query(
            "UPDATE idempotency_records SET
                state = 2, completed = clock_timestamp(),
                expires = clock_timestamp() + interval '7 days', status = $4, response = $5
            WHERE scope = $1 AND key = $2 AND token = $3",
        )
        .bind(claim.id.scope.as_bytes())
        .bind(claim.id.key.as_bytes())
        .bind(&claim.token.as_bytes()[..])
        .bind(StatusCode::CREATED.as_u16() as i16)
        .bind(&RESPONSE[..])
        .execute(&self.0)
        .await
        .expect("Postgres updates");
        assert_eq!(completed.rows_affected(), 1);
    }
}

/// What the environment asks for.
#[derive(Clone)]
struct Settings {
    round: Duration,
    rounds: usize,
    rows: u64,
    only: Vec<String>,
    url: String,
}

impl Settings {
    fn read() -> Result<Self, String> {
        let only: String = variable("BENCH_ONLY", "throughput,bigtable,purge".to_owned())?;
        let only: Vec<_> = only.split(',').map(|name| name.trim().to_owned()).collect();
        if let Some(unknown) = only
            .iter()
            .find(|name| !["throughput", "bigtable", "purge"].contains(&name.as_str()))
        {
            return Err(format!("BENCH_ONLY: there is no {unknown:?}"));
        }
        let seconds = variable("BENCH_SECONDS", 2.0)?;
        let settings = Self {
            round: Duration::try_from_secs_f64(seconds).map_err(|e| format!("BENCH_SECONDS: {e}"))?,
            rounds: variable("BENCH_ROUNDS", 5)?,
            rows: variable("BENCH_ROWS", 10_000_000)?,
            only,
            url: std::env::var("DATABASE_URL").map_err(|_| {
                "DATABASE_URL is not set; `scripts/postgres cargo bench --features postgres --bench stores` \
                 sets it to a server of its own"
            })?,
        };
        match settings.rounds == 0 || settings.round.is_zero() {
            true => Err("BENCH_SECONDS and BENCH_ROUNDS must be more than zero".to_owned()),
            false => Ok(settings),
        }
    }

    fn asks_for(&self, what: &str) -> bool {
        self.only.iter().any(|name| name == what)
    }
}

fn variable<T: FromStr<Err: std::fmt::Display>>(name: &str, default: T) -> Result<T, String> {
    match std::env::var(name) {
        Ok(value) => value
            .parse()
            .map_err(|error| format!("{name}={value}: {error}")),
        Err(_) => Ok(default),
    }
}

/// A folder that is no memory in disguise: there a sync would cost nothing.
fn folder_on_disk() -> tempfile::TempDir {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("the target folder");
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let kind = mounts
        .lines()
        .filter_map(|line| {
            let mut fields = line.split(' ').skip(1);
            Some((fields.next()?, fields.next()?))
        })
        .filter(|(mount, _)| folder.path().starts_with(mount))
        .max_by_key(|(mount, _)| mount.len());
    assert!(
        !matches!(kind, Some((_, "tmpfs" | "ramfs"))),
        "the target folder is kept in memory; set CARGO_TARGET_DIR to one on a disk"
    );
    folder
}

/// The schemas made here all begin like this.
fn schema_prefix() -> String {
    format!("bench_stores_{}_", std::process::id())
}

/// Postgres as these measurements use it.
#[derive(Clone)]
struct Server {
    url: String,
}

impl Server {
    async fn connect(&self) -> PgConnection {
        let connection = PgConnection::connect(&self.url).await;
        connection.expect("DATABASE_URL names a Postgres database that can be reached")
    }

    /// Waits until all connections made here have ended, but for this one.
    async fn wait_until_alone(&self, connection: &mut PgConnection) {
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            let others: i64 = sqlx::query_scalar(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
                AND application_name IN ($1, 'tower-idempotency')",
            )
            .bind(schema_prefix())
            .fetch_one(&mut *connection)
            .await
            .expect("Postgres counts");
            if others == 0 {
                return;
            }
            assert!(
                Instant::now() < deadline,
                "another store is at work in the database of DATABASE_URL"
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// A new schema with the store's own tables.
    async fn tables(&self, name: &str) -> String {
        let schema = schema_prefix() + name;
        self.store(&schema, true)
            .await
            .close()
            .await
            .expect("the store closes");
        schema
    }

    /// A store as a service would open it.
    async fn store(&self, schema: &str, migrate: bool) -> PostgresStore {
        let mut options = PostgresStore::options().schema(schema);
        if migrate {
            options = options.migrate();
        }
        options.connect(&self.url).await.expect("the store opens")
    }

    async fn pool(&self, schema: &str, test_before_acquire: bool) -> PgPool {
        let options =
            PgConnectOptions::from_str(&self.url).expect("DATABASE_URL is a URL of Postgres");
        let options = options
            .options([("search_path", schema)])
            .application_name(&schema_prefix())
            .disable_statement_logging();
        let pool = PgPoolOptions::new()
            .max_connections(32)
            .acquire_timeout(PATIENCE)
            .test_before_acquire(test_before_acquire);
        pool.connect_with(options)
            .await
            .expect("Postgres can be reached")
    }

    async fn drop_schemas(&self) {
        let mut connection = self.connect().await;
        let made: Vec<String> = sqlx::query_scalar(
            "SELECT nspname::text FROM pg_namespace WHERE starts_with(nspname, $1)",
        )
        .bind(schema_prefix())
        .fetch_all(&mut connection)
        .await
        .expect("Postgres lists schemas");
        for schema in made {
            // One by one: all tables at once may need more locks than the server keeps.
            run(&mut connection, format!("DROP SCHEMA {schema} CASCADE")).await;
        }
    }
}

async fn sqlite_pool(path: &Path, connections: u32) -> SqlitePool {
    let options = SqliteConnectOptions::new()
        .filename(path)
        .journal_mode(SqliteJournalMode::Wal)
        .synchronous(SqliteSynchronous::Full)
        .busy_timeout(Duration::from_secs(30))
        .disable_statement_logging();
    let pool = SqlitePoolOptions::new()
        .max_connections(connections)
        .acquire_timeout(PATIENCE);
    pool.connect_with(options)
        .await
        .expect("SQLite opens the file")
}

/// A new file with the store's own tables.
async fn sqlite_tables(folder: &Path, name: &str) -> PathBuf {
    let path = folder.join(name);
    let store = SqliteStore::open(&path)
        .await
        .expect("SQLite opens a new file");
    store.close().await.expect("SQLite closes it");
    path
}

/// Has a number of tasks make first requests for a while.
type Load = Box<dyn Fn(usize, Duration) -> Work<Made> + Send + Sync>;

/// What was made.
struct Made {
    per_second: f64,
    /// With those before and after the time that counts.
    in_all: u64,
}

fn load_of(who: impl FirstRequests) -> Load {
    Box::new(move |tasks, time| Box::pin(load(who.clone(), tasks, time)))
}

async fn load(who: impl FirstRequests, tasks: usize, time: Duration) -> Made {
    // What is made before that warms up: connections, statements, caches.
    let start = Instant::now() + time / 10;
    let end = start + time;
    let tasks: Vec<_> = (0..tasks)
        .map(|_| {
            let who = who.clone();
            tokio::spawn(async move {
                let (mut counted, mut in_all) = (0, 0);
                loop {
                    who.first_request(fresh_id()).await;
                    in_all += 1;
                    match Instant::now() {
                        now if now < start => {}
                        now if now < end => counted += 1,
                        _ => return (counted, in_all),
                    }
                }
            })
        })
        .collect();
    let (mut counted, mut in_all) = (0_u64, 0);
    for task in tasks {
        let made = task.await.expect("no task panics");
        counted += made.0;
        in_all += made.1;
    }
    Made {
        per_second: counted as f64 / time.as_secs_f64(),
        in_all,
    }
}

/// Rates of each contestant in each round. They take turns, in the other direction every other
/// round, so that nobody always comes after the same one.
async fn take_turns(loads: &[Load], tasks: usize, time: Duration, rounds: usize) -> Vec<Vec<f64>> {
    let mut rates = vec![Vec::with_capacity(rounds); loads.len()];
    for round in 0..rounds {
        for turn in 0..loads.len() {
            let who = if round % 2 == 0 {
                turn
            } else {
                loads.len() - 1 - turn
            };
            rates[who].push(loads[who](tasks, time).await.per_second);
        }
    }
    rates
}

struct Row<'a> {
    store: &'a str,
    tasks: usize,
    /// Of the store, then of whoever it is compared with.
    rates: Vec<Vec<f64>>,
    /// What the others are, and what the ratio to the fastest of them should be.
    plain: &'a [&'a str],
    target: Option<f64>,
    shared: Option<Shared>,
}

/// How operations shared transactions.
struct Shared {
    operations_per_transaction: f64,
    largest: u64,
    commits_per_request: f64,
}

impl Row<'_> {
    fn print(self) {
        let [store, plain @ ..] = &self.rates[..] else {
            return;
        };
        let fastest = plain
            .iter()
            .zip(self.plain)
            .max_by(|(a, _), (b, _)| median(a).total_cmp(&median(b)));
        let against = fastest.map(|(rates, name)| {
            let ratios = store.iter().zip(rates).map(|(store, plain)| store / plain);
            (median(rates), name, ratios.collect::<Vec<_>>())
        });
        let (beside, ratio, target) = match &against {
            Some((rate, name, ratios)) => {
                let (low, high) = range(ratios);
                (
                    format!("{} ({name})", grouped(*rate)),
                    format!("{:.2} × ({low:.2}–{high:.2})", median(ratios)),
                    self.target.map(|target| (target, median(ratios) >= target)),
                )
            }
            None => Default::default(),
        };
        let (target, met) = target.map_or_else(Default::default, |(target, met)| {
            (format!("≥ {target} ×"), if met { "yes" } else { "NO" })
        });
        let (operations, commits) = self.shared.map_or_else(Default::default, |shared| {
            let operations = shared.operations_per_transaction;
            (
                format!("{operations:.1} (at most {})", shared.largest),
                format!("{:.3}", shared.commits_per_request),
            )
        });
        println!(
            "| {} | {} | {} | {beside} | {ratio} | {target} | {met} | {operations} | {commits} |",
            self.store,
            self.tasks,
            grouped(median(store)),
        );
    }
}

async fn throughput(settings: &Settings, server: &Server) {
    println!(
        "\nFirst requests per second: a claim of a fresh key and its completion with 200 bytes.\n"
    );
    println!(
        "| store | at once | first requests/s | two plain statements/s | ratio (lowest–highest round) | target | met | operations per transaction | commits per first request |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- | --- | --- |");
    for tasks in CONCURRENCY {
        let mut rates = Vec::new();
        for _ in 0..settings.rounds {
            // A store of its own for each round: an empty one never is full.
            let load = load_of(Stored(MemoryStore::new()));
            rates.push(
                load(tasks, MEMORY_ROUND.min(settings.round))
                    .await
                    .per_second,
            );
        }
        Row {
            store: "memory",
            tasks,
            rates: vec![rates],
            plain: &[],
            target: None,
            shared: None,
        }
        .print();
    }
    for tasks in CONCURRENCY {
        sqlite_throughput(settings, tasks).await;
    }
    for tasks in CONCURRENCY {
        postgres_throughput(settings, server, tasks).await;
    }
}

async fn sqlite_throughput(settings: &Settings, tasks: usize) {
    let folder = folder_on_disk();
    let store = SqliteStore::open(folder.path().join("store.db"))
        .await
        .expect("SQLite opens");
    let five = sqlite_pool(&sqlite_tables(folder.path(), "five.db").await, 5).await;
    let one = sqlite_pool(&sqlite_tables(folder.path(), "one.db").await, 1).await;
    let loads = [
        load_of(Stored(store.clone())),
        load_of(PlainSqlite(five.clone())),
        load_of(PlainSqlite(one.clone())),
    ];
    let rates = take_turns(&loads, tasks, settings.round, settings.rounds).await;
    let shared = store.grouping();
    Row {
        store: "SQLite",
        tasks,
        rates,
        plain: &["pool of 5", "pool of 1"],
        target: match tasks {
            1 => Some(0.85),
            256 => Some(7.0),
            _ => None,
        },
        shared: Some(Shared {
            operations_per_transaction: shared.operations as f64 / shared.batches as f64,
            largest: shared.largest,
            // Each transaction is a commit, and each first request two operations.
            commits_per_request: 2.0 * shared.batches as f64 / shared.operations as f64,
        }),
    }
    .print();
    store.close().await.expect("the store closes");
    five.close().await;
    one.close().await;
}

async fn postgres_throughput(settings: &Settings, server: &Server, tasks: usize) {
    let schema = server.tables(&format!("store_{tasks}")).await;
    let store = server.store(&schema, false).await;
    let mut pools = Vec::new();
    for (name, test) in [("tested", true), ("untested", false)] {
        let schema = server.tables(&format!("{name}_{tasks}")).await;
        pools.push(server.pool(&schema, test).await);
    }
    let mut loads = vec![load_of(Stored(store.clone()))];
    loads.extend(
        pools
            .iter()
            .map(|pool| load_of(PlainPostgres(pool.clone()))),
    );
    let rates = take_turns(&loads, tasks, settings.round, settings.rounds).await;
    let shared = store.grouping();
    store.close().await.expect("the store closes");
    for pool in pools {
        pool.close().await;
    }
    // The store's own pool ends with its last handle.
    drop((loads, store));
    Row {
        store: "Postgres",
        tasks,
        rates,
        plain: &["pool of 32, connections tested", "pool of 32"],
        target: match tasks {
            1 => Some(0.85),
            256 => Some(5.0),
            _ => None,
        },
        shared: Some(Shared {
            operations_per_transaction: shared.operations as f64 / shared.batches as f64,
            largest: shared.largest,
            commits_per_request: commits_per_request(settings, server, tasks).await,
        }),
    }
    .print();
}

/// As the server counts them, while nobody but one store is at work.
async fn commits_per_request(settings: &Settings, server: &Server, tasks: usize) -> f64 {
    let schema = server.tables(&format!("commits_{tasks}")).await;
    // A connection tells the server what it did at the latest when it ends.
    let mut watching = server.connect().await;
    server.wait_until_alone(&mut watching).await;
    let before = commits(&mut watching).await;
    let pool = server.pool(&schema, false).await;
    let store = PostgresStore::options()
        .schema(&schema)
        .open(pool.clone())
        .await;
    let store = store.expect("the store opens");
    let made = load(Stored(store.clone()), tasks, settings.round).await;
    store.close().await.expect("the store closes");
    pool.close().await;
    server.wait_until_alone(&mut watching).await;
    let commits = commits(&mut watching).await - before;
    watching.close().await.expect("Postgres says goodbye");
    commits as f64 / made.in_all as f64
}

async fn commits(connection: &mut PgConnection) -> i64 {
    let commits = sqlx::query_scalar(
        "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()",
    );
    commits
        .fetch_one(connection)
        .await
        .expect("Postgres counts")
}

/// The scope and key of the record numbered `i`: any number's, without a look at the table.
const NUMBERED_ID: &str = "convert_to('merchant-' || lpad((i % 1000)::text, 7, '0'), 'UTF8'), \
     convert_to(md5(i::text)::uuid::text, 'UTF8')";

/// Completed records, the last of them just now and the first six days ago, kept for seven.
const FILL: &str = "
INSERT INTO idempotency_records (
    scope, key, scheme, fingerprint, token, owner, attempt, mode, state,
    created, lease_until, run_until, completed, expires, status, response
)
SELECT {id}, 'exact-v1', sha256(int8send(i)), decode(md5('token ' || i), 'hex'),
    decode(md5('owner'), 'hex'), 1, 1, 2,
    at, at + interval '30 s', at + interval '10 min', at, at + interval '7 days', 201, convert_to(repeat('x', 200), 'UTF8')
FROM generate_series({first}::bigint, {last}) i
    CROSS JOIN LATERAL (SELECT clock_timestamp() - ({rows} - i) * (interval '6 days' / {rows}) AS at) t";

/// How to drop each index of the records, and how to build it again.
const INDEXES: &str = "
SELECT format('ALTER TABLE idempotency_records DROP CONSTRAINT %I', conname),
    format('ALTER TABLE idempotency_records ADD CONSTRAINT %I %s', conname, pg_get_constraintdef(oid))
FROM pg_constraint WHERE conrelid = 'idempotency_records'::regclass AND contype IN ('p', 'u')
UNION ALL
SELECT format('DROP INDEX %s', indexrelid::regclass), pg_get_indexdef(indexrelid)
FROM pg_index WHERE indrelid = 'idempotency_records'::regclass
    AND NOT EXISTS (SELECT FROM pg_constraint WHERE conindid = indexrelid)";

const SIZES: &str = "
SELECT 'the records', pg_table_size('idempotency_records')
UNION ALL
SELECT pg_get_indexdef(indexrelid), pg_relation_size(indexrelid)
FROM pg_index WHERE indrelid = 'idempotency_records'::regclass
UNION ALL
SELECT 'together', pg_total_relation_size('idempotency_records')";

async fn fill(connection: &mut PgConnection, rows: u64) {
    // Building them at the end is many times faster: each row would go to another page of the index.
    let indexes: Vec<(String, String)> = sqlx::query_as(INDEXES)
        .fetch_all(&mut *connection)
        .await
        .expect("Postgres lists indexes");
    for (drop, _) in &indexes {
        run(connection, drop.clone()).await;
    }
    let mut first = 1;
    while first <= rows {
        let last = rows.min(first + 999_999);
        let fill = FILL
            .replace("{id}", NUMBERED_ID)
            .replace("{first}", &first.to_string())
            .replace("{last}", &last.to_string())
            .replace("{rows}", &rows.to_string());
        run(connection, fill).await;
        if rows > 1_000_000 {
            eprintln!("{} of {} rows", grouped(last as f64), grouped(rows as f64));
        }
        first = last + 1;
    }
    run(connection, "SET maintenance_work_mem = '512MB'".to_owned()).await;
    for (_, build) in indexes {
        run(connection, build).await;
    }
    run(
        connection,
        "VACUUM (ANALYZE) idempotency_records".to_owned(),
    )
    .await;
    // What was dirtied is written now, not under the measurements.
    run(connection, "CHECKPOINT".to_owned()).await;
}

async fn run(connection: &mut PgConnection, sql: String) {
    let done = sqlx::raw_sql(AssertSqlSafe(sql)).execute(connection).await;
    done.expect("Postgres carries it out");
}

/// A table with many completed records or few.
struct Side<S> {
    rows: u64,
    store: S,
    connection: PgConnection,
}

impl<S: Store> Side<S> {
    /// The names of records to claim: fresh ones, or completed ones from all over the table.
    async fn ids(&mut self, count: usize, completed: bool) -> Vec<RecordId> {
        if !completed {
            return (0..count).map(|_| fresh_id()).collect();
        }
        let numbers = |_| rand::rng().random_range(1..=self.rows as i64);
        let numbers: Vec<i64> = (0..count).map(numbers).collect();
        let ids: Vec<(Vec<u8>, Vec<u8>)> = sqlx::query_as(AssertSqlSafe(format!(
            "SELECT {NUMBERED_ID} FROM unnest($1::bigint[]) i"
        )))
        .bind(numbers)
        .fetch_all(&mut self.connection)
        .await
        .expect("Postgres computes keys");
        ids.into_iter()
            .map(|(scope, key)| RecordId::new(Scope::new(scope), IdempotencyKey::new(key)))
            .collect()
    }
}

/// What claims cost in one round, in microseconds, on each side.
type Costs = [[f64; 2]; COSTS.len()];

const COSTS: [&str; 6] = [
    "claim of a fresh key, alone: median",
    "claim of a fresh key, alone: mean",
    "claim of a fresh key, 64 at once: time / claims",
    "claim of a completed key, alone: median",
    "claim of a completed key, alone: mean",
    "claim of a completed key, 64 at once: time / claims",
];
/// The target is for the first of them: a replay reads a row from somewhere in the table.
const TARGETED: usize = 3;

async fn costs(sides: &mut [Side<impl Store>; 2]) -> Costs {
    let mut costs = Vec::with_capacity(COSTS.len());
    for completed in [false, true] {
        let alone = one_by_one(sides, completed).await;
        costs.push([median(&alone[0]), median(&alone[1])]);
        costs.push([mean(&alone[0]), mean(&alone[1])]);
        costs.push(in_bursts(sides, completed).await);
    }
    costs.try_into().expect("three costs, twice")
}

/// Microseconds of each claim; a claim here, a claim there.
async fn one_by_one(sides: &mut [Side<impl Store>; 2], completed: bool) -> [Vec<f64>; 2] {
    let [few, many] = sides;
    let stores = [few.store.clone(), many.store.clone()];
    let ids = few.ids(SINGLE_CLAIMS, completed).await;
    let ids: Vec<_> = ids
        .into_iter()
        .zip(many.ids(SINGLE_CLAIMS, completed).await)
        .map(<[RecordId; 2]>::from)
        .collect();
    let claims = tokio::spawn(async move {
        let mut times = [Vec::new(), Vec::new()];
        for (at, ids) in ids.iter().enumerate() {
            for who in [at % 2, 1 - at % 2] {
                times[who].push(claim(&stores[who], ids[who].clone(), completed).await);
            }
        }
        times
    });
    claims.await.expect("no task panics")
}

/// Microseconds per claim, on the whole; a burst here, a burst there.
async fn in_bursts(sides: &mut [Side<impl Store>; 2], completed: bool) -> [f64; 2] {
    let count = CLAIMERS * CLAIMS_EACH;
    let mut time = [Duration::ZERO; 2];
    for burst in 0..BURSTS {
        for who in [burst % 2, 1 - burst % 2] {
            let ids = sides[who].ids(count, completed).await;
            let store = &sides[who].store;
            let start = Instant::now();
            let claimer = |ids: &[RecordId]| {
                let (store, ids) = (store.clone(), ids.to_vec());
                tokio::spawn(async move {
                    for id in ids {
                        claim(&store, id, completed).await;
                    }
                })
            };
            let tasks: Vec<_> = ids.chunks(CLAIMS_EACH).map(claimer).collect();
            for task in tasks {
                task.await.expect("no task panics");
            }
            time[who] += start.elapsed();
        }
    }
    time.map(|time| time.as_secs_f64() * 1e6 / (BURSTS * count) as f64)
}

/// Microseconds of a claim.
async fn claim(store: &impl Store, id: RecordId, completed: bool) -> f64 {
    let start = Instant::now();
    let claim = store.claim(claim_of(id)).await.expect("the store answers");
    let time = start.elapsed();
    match (completed, &claim) {
        (true, Claim::Completed(_)) | (false, Claim::Won(_)) => time.as_secs_f64() * 1e6,
        _ => panic!("another record than expected: {claim:?}"),
    }
}

async fn side(server: &Server, name: &str, rows: u64) -> Side<impl Store> {
    let start = Instant::now();
    let schema = server.tables(name).await;
    let mut connection = server.connect().await;
    run(&mut connection, format!("SET search_path = {schema}")).await;
    fill(&mut connection, rows).await;
    println!(
        "\n{} rows, written and indexed in {:.0} s:\n\n| what | MiB | bytes per row |\n| --- | --- | --- |",
        grouped(rows as f64),
        start.elapsed().as_secs_f64(),
    );
    let sizes: Vec<(String, i64)> = sqlx::query_as(SIZES)
        .fetch_all(&mut connection)
        .await
        .expect("Postgres tells sizes");
    for (what, size) in sizes {
        let definition = what
            .split_once(" USING ")
            .map_or(&*what, |(_, columns)| columns);
        let (size, rows) = (size as f64, rows as f64);
        println!(
            "| {definition} | {:.1} | {:.0} |",
            size / 1024.0 / 1024.0,
            size / rows
        );
    }
    Side {
        rows,
        store: server.store(&schema, false).await,
        connection,
    }
}

async fn big_table(settings: &Settings, server: &Server) {
    println!(
        "\nA table of millions. Its indexes are built in one go; those that grow row by row become up to half \
         as large again. It is measured after a checkpoint, so each page is logged whole when it is first \
         changed."
    );
    let mut sides = [
        side(server, "few", SMALL_TABLE).await,
        side(server, "many", settings.rows).await,
    ];
    let mut rounds = Vec::new();
    for round in 0..=settings.rounds {
        let costs = costs(&mut sides).await;
        // The first round warms up connections, statements and caches.
        if round > 0 {
            rounds.push(costs);
        }
    }
    println!(
        "\n| what | {} rows | {} rows | ratio (lowest–highest round) | target | met |",
        grouped(SMALL_TABLE as f64),
        grouped(settings.rows as f64)
    );
    println!("| --- | --- | --- | --- | --- | --- |");
    for (at, what) in COSTS.iter().enumerate() {
        let of = |who: usize| {
            rounds
                .iter()
                .map(|costs| costs[at][who])
                .collect::<Vec<_>>()
        };
        let ratios: Vec<_> = of(1)
            .iter()
            .zip(of(0))
            .map(|(many, few)| many / few)
            .collect();
        let ratio = median(&ratios);
        let (low, high) = range(&ratios);
        let (target, met) = match at < TARGETED {
            true => ("≤ 1.3 ×", if ratio <= 1.3 { "yes" } else { "NO" }),
            false => ("", ""),
        };
        println!(
            "| {what} | {:.0} µs | {:.0} µs | {ratio:.2} × ({low:.2}–{high:.2}) | {target} | {met} |",
            median(&of(0)),
            median(&of(1)),
        );
    }
    for side in sides {
        side.store.close().await.expect("the store closes");
        side.connection
            .close()
            .await
            .expect("Postgres says goodbye");
    }
}

const EXPIRED_IN_SQLITE: &str = "
WITH RECURSIVE numbers (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM numbers WHERE i < ?)
INSERT INTO idempotency_records (
    scope, key, scheme, fingerprint, token, owner, attempt, mode, state,
    created, run_until, completed, expires, status, response
)
SELECT CAST(format('merchant-%07d', i % 1000) AS BLOB), CAST(hex(randomblob(18)) AS BLOB), 'exact-v1',
    randomblob(32), randomblob(16), randomblob(16), 1, 1, 2, i, i, i, i, 201, zeroblob(200)
FROM numbers";

const EXPIRED_IN_POSTGRES: &str = "
INSERT INTO idempotency_records (
    scope, key, scheme, fingerprint, token, owner, attempt, mode, state,
    created, lease_until, run_until, completed, expires, status, response
)
SELECT convert_to('merchant-' || lpad((i % 1000)::text, 7, '0'), 'UTF8'),
    convert_to(gen_random_uuid()::text, 'UTF8'), 'exact-v1', sha256(int8send(i)),
    decode(md5('token ' || i), 'hex'), decode(md5('owner'), 'hex'), 1, 1, 2,
    at, at, at, at, at, 201, convert_to(repeat('x', 200), 'UTF8')
FROM generate_series(1, $1) i
    CROSS JOIN LATERAL (SELECT clock_timestamp() - interval '1 h' + i * interval '1 us' AS at) t";

async fn purging(settings: &Settings, server: &Server) {
    println!(
        "\nPurging {} expired records, {PURGE_BATCH} at a time without a pause; beside it {PACED_CLAIMERS} tasks, \
         each with a claim every {} ms.\n",
        grouped(EXPIRED as f64),
        PACE.as_millis()
    );
    println!(
        "| store | rows/s | rows/s beside claims | claims, no purge: p50 | p99 | claims beside a purge: p50 | p99 | p99 ratio |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- | --- |");

    let folder = folder_on_disk();
    let path = folder.path().join("purge.db");
    let store = SqliteStore::open(&path).await.expect("SQLite opens");
    let pool = sqlite_pool(&path, 1).await;
    let expired = || -> Work<()> {
        let pool = pool.clone();
        Box::pin(async move {
            let filled = sqlx::query(EXPIRED_IN_SQLITE)
                .bind(EXPIRED as i64)
                .execute(&pool);
            filled.await.expect("SQLite inserts");
        })
    };
    purge_rounds(settings, "SQLite", &store, expired).await;
    store.close().await.expect("the store closes");
    pool.close().await;

    let schema = server.tables("purge").await;
    let store = server.store(&schema, false).await;
    let pool = server.pool(&schema, false).await;
    let expired = || -> Work<()> {
        let pool = pool.clone();
        Box::pin(async move {
            let filled = sqlx::query(EXPIRED_IN_POSTGRES)
                .bind(EXPIRED as i64)
                .execute(&pool);
            filled.await.expect("Postgres inserts");
        })
    };
    purge_rounds(settings, "Postgres", &store, expired).await;
    store.close().await.expect("the store closes");
    pool.close().await;
}

async fn purge_rounds<S: Store>(
    settings: &Settings,
    name: &str,
    store: &S,
    expired: impl Fn() -> Work<()>,
) {
    let (mut alone, mut beside) = (Vec::new(), Vec::new());
    let (mut without, mut with) = (Vec::new(), Vec::new());
    // Few rounds: each of them has a purge of many steps, and thousands of claims.
    for _ in 0..settings.rounds.min(3) {
        expired().await;
        alone.push(purge(store.clone()).await);
        let (times, ()) = while_claiming(store, tokio::time::sleep(settings.round)).await;
        without.extend(times);
        expired().await;
        let (times, rate) = while_claiming(store, purge(store.clone())).await;
        with.extend(times);
        beside.push(rate);
    }
    let p99 = (quantile(&without, 0.99), quantile(&with, 0.99));
    println!(
        "| {name} | {} | {} | {:.0} µs | {:.0} µs | {:.0} µs | {:.0} µs | {:.2} × |",
        grouped(median(&alone)),
        grouped(median(&beside)),
        median(&without),
        p99.0,
        median(&with),
        p99.1,
        p99.1 / p99.0,
    );
}

/// Rows per second.
async fn purge<S: Store>(store: S) -> f64 {
    let purge = tokio::spawn(async move {
        let start = Instant::now();
        let mut removed = 0;
        loop {
            let now = store.purge(PURGE_BATCH).await.expect("the store purges");
            removed += now;
            if now < PURGE_BATCH {
                break;
            }
        }
        assert_eq!(
            removed as u64, EXPIRED,
            "all that is expired is removed, and nothing else"
        );
        removed as f64 / start.elapsed().as_secs_f64()
    });
    purge.await.expect("no task panics")
}

/// Microseconds of each claim that was made while something else went on.
async fn while_claiming<T>(store: &impl Store, other: impl Future<Output = T>) -> (Vec<f64>, T) {
    let ended = Arc::new(AtomicBool::new(false));
    let tasks: Vec<_> = (0..PACED_CLAIMERS)
        .map(|at| {
            let (store, ended) = (store.clone(), ended.clone());
            tokio::spawn(async move {
                let mut times = Vec::new();
                // One after the other, not all at the same moment.
                tokio::time::sleep(PACE * at as u32 / PACED_CLAIMERS as u32).await;
                while !ended.load(Ordering::Relaxed) {
                    times.push(claim(&store, fresh_id(), false).await);
                    tokio::time::sleep(PACE).await;
                }
                times
            })
        })
        .collect();
    let answer = other.await;
    ended.store(true, Ordering::Relaxed);
    let mut times = Vec::new();
    for task in tasks {
        times.extend(task.await.expect("no task panics"));
    }
    (times, answer)
}

fn sorted(numbers: &[f64]) -> Vec<f64> {
    let mut sorted = numbers.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted
}

/// `share` of the numbers are not larger.
fn quantile(numbers: &[f64], share: f64) -> f64 {
    let sorted = sorted(numbers);
    let at = (sorted.len() as f64 * share) as usize;
    sorted[at.min(sorted.len() - 1)]
}

fn median(numbers: &[f64]) -> f64 {
    quantile(numbers, 0.5)
}

fn mean(numbers: &[f64]) -> f64 {
    numbers.iter().sum::<f64>() / numbers.len() as f64
}

fn range(numbers: &[f64]) -> (f64, f64) {
    let sorted = sorted(numbers);
    (sorted[0], sorted[sorted.len() - 1])
}

/// A whole number, its thousands apart.
fn grouped(number: f64) -> String {
    let digits = format!("{number:.0}");
    let mut grouped = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at) % 3 == 0 {
            grouped.push(' ');
        }
        grouped.push(digit);
    }
    grouped
}

async fn print_machine(server: &Server) {
    let processors = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let fields = |name| {
        let lines = processors
            .lines()
            .filter(move |line| line.starts_with(name));
        lines.filter_map(|line| Some(line.split_once(':')?.1.trim()))
    };
    let mut postgres = server.connect().await;
    let settings: (String, String, String, String) = sqlx::query_as(
        "SELECT current_setting('server_version'), current_setting('shared_buffers'),
            current_setting('fsync'), current_setting('synchronous_commit')",
    )
    .fetch_one(&mut postgres)
    .await
    .expect("Postgres answers");
    let mut sqlite = SqliteConnection::connect("sqlite::memory:")
        .await
        .expect("SQLite opens");
    let sqlite: String = sqlx::query_scalar("SELECT sqlite_version()")
        .fetch_one(&mut sqlite)
        .await
        .expect("SQLite answers");
    println!(
        "\n{} cores ({}); Postgres {} (shared_buffers {}, fsync {}, synchronous_commit {}); \
         SQLite {sqlite}; writing and syncing 4 KiB in the target folder takes {:.0} µs.",
        fields("processor").count(),
        fields("model name").next().unwrap_or("unknown"),
        settings.0,
        settings.1,
        settings.2,
        settings.3,
        sync_micros(),
    );
}

/// The median of appending to a file and syncing it.
fn sync_micros() -> f64 {
    let folder = folder_on_disk();
    let mut file = std::fs::File::create(folder.path().join("synced")).expect("a file");
    let syncs: Vec<_> = (0..500)
        .map(|_| {
            let start = Instant::now();
            file.write_all(&[0; 4096]).expect("the disk has room");
            file.sync_data().expect("the disk syncs");
            start.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    median(&syncs)
}

async fn measure(settings: Settings) {
    let server = Server {
        url: settings.url.clone(),
    };
    server
        .connect()
        .await
        .close()
        .await
        .expect("Postgres says goodbye");
    if settings.asks_for("throughput") {
        throughput(&settings, &server).await;
    }
    if settings.asks_for("bigtable") {
        big_table(&settings, &server).await;
    }
    if settings.asks_for("purge") {
        purging(&settings, &server).await;
    }
    print_machine(&server).await;
}

fn main() {
    // `cargo test --benches` passes this; there is nothing to measure then.
    if std::env::args().any(|arg| arg == "--test") {
        return;
    }
    let settings = Settings::read().unwrap_or_else(|error| {
        eprintln!("{error}");
        std::process::exit(2);
    });
    let server = Server {
        url: settings.url.clone(),
    };
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(async {
        let measured = tokio::spawn(measure(settings)).await;
        server.drop_schemas().await;
        measured.expect("no panic");
    });
    runtime.shutdown_timeout(Duration::from_secs(1));
}

//! The service: money moves between accounts, through `Tx` and nothing else.

use std::{
    fs::{File, OpenOptions},
    io::Write,
    panic::resume_unwind,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    extract::State,
    http::{Response, StatusCode},
    response::IntoResponse,
    routing::{MethodRouter, post},
};
use sqlx::{Postgres, Sqlite, postgres::PgPoolOptions};
use tokio::{io::AsyncReadExt, net::TcpListener, time::sleep};
use tower_idempotency::{
    Idempotency, IdempotencyLayer, Isolation, PostgresStore, Recovery, Retain, SqliteStore, Tx,
    TxError, TxOptions,
    store::{StoreError, StoreErrorKind, TransactionalStore},
};

use crate::{
    LEASE,
    accounts::Action,
    answer::{answer, dawdle},
    process::Process,
};

const DATABASE: &str = "TEST_DRILL_DATABASE";
const JOURNAL: &str = "TEST_DRILL_JOURNAL";
const NUMBER: &str = "TEST_DRILL_PROCESS";

/// Before the path of a file; everything else is the URL of a Postgres server.
pub const SQLITE: &str = "sqlite:";

/// What the journal says of a run.
pub const BEGAN: &str = "run began";
pub const TOOK_OVER: &str = "run after a takeover";
pub const CONFLICTED: &str = "run ended by a conflict";

/// Keys that begin so are held for a lease, before their run writes or after it has.
pub const HOLD_BEFORE: &str = "hold-before";
pub const HOLD_AFTER: &str = "hold-after";
pub const HOLDS: &str = "run holds";

/// A process that serves.
pub fn spawn(number: u32, database: &str, journal: &Path) -> Process {
    Process::spawn(&[
        (DATABASE, database.as_ref()),
        (JOURNAL, journal.as_ref()),
        (NUMBER, number.to_string().as_ref()),
    ])
}

/// What a process is told.
pub struct Part {
    database: String,
    journal: PathBuf,
    number: u32,
}

impl Part {
    pub fn asked_for() -> Option<Self> {
        Some(Self {
            database: std::env::var(DATABASE).ok()?,
            journal: std::env::var_os(JOURNAL)?.into(),
            number: std::env::var(NUMBER).ok()?.parse().unwrap(),
        })
    }

    /// Serves until it is killed, or nobody is there who could.
    pub async fn play(self) {
        let app = match self.database.strip_prefix(SQLITE) {
            None => self.over(open(|| self.postgres()).await, post(move_in_postgres)),
            Some(file) => self.over(open(|| self.sqlite(file)).await, post(move_in_sqlite)),
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        println!("listening on http://{}", listener.local_addr().unwrap());
        let served = axum::serve(listener, app).into_future();
        let mut nothing = Vec::new();
        let mut stdin = tokio::io::stdin();
        tokio::select! {
            served = served => served.unwrap(),
            _ = stdin.read_to_end(&mut nothing) => {}
        }
    }

    fn over<S: TransactionalStore>(&self, store: S, handler: MethodRouter<Service>) -> Router {
        // Every other one is quick to give up, and some of its runs are cut off.
        let (options, patience) = match self.is_hasty() {
            true => {
                let options = TxOptions::default()
                    .lock_timeout(Duration::from_millis(150))
                    .idle_timeout(Duration::from_millis(900))
                    .max_hold(Duration::from_millis(15));
                (options, Duration::from_secs(1))
            }
            false => (TxOptions::default(), Duration::from_secs(5)),
        };
        let layer = IdempotencyLayer::new(store)
            .single_tenant()
            .lease(LEASE)
            // What is known to have had no effect is run again all the same.
            .recovery(Recovery::Refuse)
            .store_timeout(patience)
            .transactional_with(options);
        let service = Service {
            journal: self.open_journal(),
        };
        Router::new()
            .route("/charges", handler)
            .route_layer(layer)
            .with_state(service)
    }

    /// Where runs are noted, and what the layer warns of.
    fn open_journal(&self) -> Arc<File> {
        let journal = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&self.journal);
        let journal = Arc::new(journal.unwrap());
        tracing_subscriber::fmt()
            .with_ansi(false)
            .with_env_filter("tower_idempotency=warn")
            .with_writer(journal.clone())
            .init();
        journal
    }

    fn is_hasty(&self) -> bool {
        !self.number.is_multiple_of(2)
    }

    async fn postgres(&self) -> Result<PostgresStore, StoreError> {
        let options = PostgresStore::options().migrate();
        if self.is_hasty() {
            let options = options.operation_timeout(Duration::from_millis(500));
            return options.connect(&self.database).await;
        }
        let pool = PgPoolOptions::new()
            .max_connections(10)
            .acquire_timeout(Duration::from_millis(300))
            .connect_lazy(&self.database);
        options.open(pool.unwrap()).await
    }

    async fn sqlite(&self, file: &str) -> Result<SqliteStore, StoreError> {
        let patience = if self.is_hasty() { 300 } else { 5_000 };
        let options = SqliteStore::options(file).busy_timeout(Duration::from_millis(patience));
        options.open().await
    }
}

/// Waits for the database, which may be down. That the tables are not as they should be is no reason
/// to wait: then this process ends, and the drill with it.
async fn open<S>(try_to: impl AsyncFn() -> Result<S, StoreError>) -> S {
    loop {
        match try_to().await {
            Ok(store) => return store,
            Err(error) if error.kind() == StoreErrorKind::Unavailable => {
                sleep(Duration::from_millis(20)).await;
            }
            Err(error) => panic!("{error:?}"),
        }
    }
}

#[derive(Clone)]
struct Service {
    journal: Arc<File>,
}

/// One run of a handler, of which an action may have many and one effect.
struct Run {
    service: Service,
    key: String,
    action: Action,
    name: String,
}

impl Run {
    fn begin(service: Service, asked: &Idempotency) -> Self {
        let key = asked.key().as_str().unwrap().to_owned();
        let run = Self {
            service,
            action: Action::of(&key),
            key,
            name: format!("{:032x}", rand::random::<u128>()),
        };
        run.note(BEGAN);
        if asked.attempt() > 1 {
            run.note(TOOK_OVER);
        }
        run
    }

    fn note(&self, what: &str) {
        let line = format!("{what}\n");
        (&*self.service.journal).write_all(line.as_bytes()).unwrap();
    }

    async fn hold(&self, when: &str) {
        if self.key.starts_with(when) {
            self.note(HOLDS);
            sleep(LEASE).await;
        }
    }

    /// `moved` says whether there was money enough.
    fn end(self, moved: Result<bool, sqlx::Error>) -> Result<Response<Body>, TxError> {
        let moved = moved.map_err(TxError::from).inspect_err(|error| {
            if error.is_conflict() {
                self.note(CONFLICTED);
            }
        });
        if self.key.starts_with("action") && rand::random_ratio(1, 200) {
            // A panic, without the noise.
            resume_unwind(Box::new("it panics"));
        }
        Ok(match moved? {
            true => answer(StatusCode::CREATED, &self.key, &self.name),
            false if self.action.declines_for_good => {
                let declined = answer(StatusCode::PAYMENT_REQUIRED, &self.key, &self.name);
                (Retain::Keep, declined).into_response()
            }
            false => StatusCode::PAYMENT_REQUIRED.into_response(),
        })
    }
}

/// For one database: sqlx's executors cannot be spoken of in general here. Slow about it, so that it
/// can be killed before, meanwhile and after.
macro_rules! handler {
    ($name:ident, $database:ty, up to $slow:literal ms, with $tx:ident $prepared:block) => {
        async fn $name(
            State(service): State<Service>,
            asked: Idempotency,
            mut $tx: Tx<$database>,
        ) -> Result<Response<Body>, TxError> {
            let run = Run::begin(service, &asked);
            dawdle(60).await;
            run.hold(HOLD_BEFORE).await;
            let moved = async {
                $prepared
                for (account, amount) in &run.action.entries {
                    let changed = sqlx::query(
                        "UPDATE drill_accounts SET balance = balance + $1
                         WHERE id = $2 AND balance + $1 >= 0",
                    );
                    let changed = changed.bind(amount).bind(account).execute(&mut $tx).await?;
                    if changed.rows_affected() == 0 {
                        return Ok(false);
                    }
                    sqlx::query(
                        "INSERT INTO drill_entries (action, run, account, amount)
                         VALUES ($1, $2, $3, $4)",
                    )
                    .bind(&run.key)
                    .bind(&run.name)
                    .bind(account)
                    .bind(amount)
                    .execute(&mut $tx)
                    .await?;
                    dawdle($slow).await;
                }
                run.hold(HOLD_AFTER).await;
                Ok(true)
            };
            let moved = moved.await;
            run.end(moved)
        }
    };
}

handler!(move_in_postgres, Postgres, up to 40 ms, with tx {
    match rand::random_range(0..4) {
        0 => tx.isolation(Isolation::RepeatableRead)?,
        1 => tx.isolation(Isolation::Serializable)?,
        _ => &mut tx,
    };
});

// All write one after the other here.
handler!(move_in_sqlite, Sqlite, up to 10 ms, with tx {});

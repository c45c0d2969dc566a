//! What is wrong with a server is said when the store is opened, and what to do about it.

use std::time::Duration;

use sqlx::{ConnectOptions, postgres::PgConnectOptions};
use tokio::time::{sleep, timeout};
use tower_idempotency::{
    PostgresStore, PostgresStoreOptions,
    store::{Settled, Store, StoreErrorKind},
};

use super::common::*;
use crate::support::{database::Database, logs::Logs, server::Server};

const OPERATION_TIMEOUT: Duration = Duration::from_secs(1);

/// How long a store may take to find out that all is well again.
const BACK_WITHIN: Duration = Duration::from_secs(3);

fn options() -> PostgresStoreOptions {
    PostgresStore::options().operation_timeout(OPERATION_TIMEOUT)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_url_that_cannot_be_understood_is_named() {
    for url in [
        "",
        "nonsense",
        "postgres://[",
        "postgres://host:port/database",
    ] {
        let (opened, took) = timed(options().migrate().connect(url)).await;
        says(opened, StoreErrorKind::Unavailable, &["URL", "postgres://"]);
        assert!(took < Duration::from_millis(100), "{url}: it took {took:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_is_not_there_is_named_in_time() {
    // Bound and never listened on, so that nobody else is there either.
    let nobody = tokio::net::TcpSocket::new_v4().unwrap();
    nobody.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let url = format!(
        "postgres://postgres@{}/postgres",
        nobody.local_addr().unwrap()
    );
    let (opened, took) = timed(options().connect(&url)).await;
    says(
        opened,
        StoreErrorKind::Unavailable,
        &["no connection", "server"],
    );
    assert!(
        took < OPERATION_TIMEOUT + Duration::from_millis(500),
        "it took {took:?}"
    );
    let missing = options()
        .connect("postgres://postgres@no-such-host.invalid/postgres")
        .await;
    says(missing, StoreErrorKind::Unavailable, &["connection"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pool_that_is_in_use_or_closed_is_named() {
    let database = Database::in_real_time();
    let busy = pool(database.options(), 1);
    let _held = busy.acquire().await.unwrap();
    let (opened, took) = timed(options().migrate().open(busy.clone())).await;
    says(opened, StoreErrorKind::Unavailable, &["pool"]);
    assert!(
        took < OPERATION_TIMEOUT + Duration::from_millis(500),
        "it took {took:?}"
    );
    let closed = database.pool();
    closed.close().await;
    says(
        options().migrate().open(closed).await,
        StoreErrorKind::Unavailable,
        &["pool", "closed"],
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_password_and_a_wrong_user_are_named() {
    let server = Server::start().await;
    let mut administrator = server.connect().await;
    // Passwords count from here on; `app` has one.
    let secure = "SET password_encryption = 'scram-sha-256';
        CREATE ROLE app LOGIN PASSWORD 'right';
        DO $$ BEGIN EXECUTE format(
            'COPY (SELECT %L) TO %L', 'host all all 127.0.0.1/32 scram-sha-256',
            current_setting('hba_file')
        ); END $$";
    sql(&mut administrator, secure).await;
    sql(&mut administrator, "SELECT pg_reload_conf()").await;
    let url = |who: &str| {
        format!(
            "postgres://{who}@{}/postgres?sslmode=disable",
            server.address()
        )
    };
    let right: PgConnectOptions = url("app:right").parse().unwrap();
    let wrong: PgConnectOptions = url("app:wrong").parse().unwrap();
    let refused = async { while wrong.connect().await.is_ok() {} };
    timeout(Duration::from_secs(10), refused)
        .await
        .expect("passwords do not count");
    right.connect().await.unwrap();
    for who in ["app:wrong", "app", "stranger:right"] {
        let opened = options().connect(&url(who)).await;
        let words = ["user name", "password", "URL"];
        says(opened, StoreErrorKind::Unavailable, &words);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unknown_database_is_named() {
    let database = Database::in_real_time();
    let unknown = pool(database.options().database("no_such_database_here"), 1);
    says(
        options().open(unknown).await,
        StoreErrorKind::Unavailable,
        &["database", "URL"],
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_that_takes_no_writes_is_named() {
    let database = Database::in_real_time();
    let writes = open(database.pool()).await;
    let read_only = database
        .options()
        .options([("default_transaction_read_only", "on")]);
    for options in [options(), options().migrate()] {
        let opened = options.open(pool(read_only.clone(), 2)).await;
        says(
            opened,
            StoreErrorKind::Unavailable,
            &["takes no writes", "primary"],
        );
    }
    let _ = win(&writes, &request("k")).await;
}

/// It becomes so while the store is open, as in a fail-over whose old primary lives on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_that_takes_no_writes_any_more_is_named_until_it_does() {
    let server = Server::start().await;
    let store = options().migrate().connect(&server.url()).await.unwrap();
    let ticket = win(&store, &request("k")).await;
    let mut administrator = server.connect().await;
    let default = async |administrator: &mut _, is: &str| {
        let set = format!("ALTER SYSTEM SET default_transaction_read_only = {is}");
        sql(administrator, &set).await;
        sql(administrator, "SELECT pg_reload_conf()").await;
    };
    default(&mut administrator, "on").await;
    becomes_true(
        &mut administrator,
        "SELECT current_setting('default_transaction_read_only') = 'on'",
    )
    .await;
    let refused = async {
        loop {
            let settled = store.complete(&ticket, created(), lifetimes()).await;
            match settled {
                // Its connection has not heard of it yet; completing twice is completing once.
                Ok(settled) => assert_eq!(settled, Settled::Done),
                Err(error) => break error,
            }
        }
    };
    let refused = timeout(Duration::from_secs(5), refused)
        .await
        .expect("it is written to");
    says::<()>(
        Err(refused),
        StoreErrorKind::Unavailable,
        &["takes no writes", "primary"],
    );
    // It stays so: the server answers, and that does not mean it is back.
    for _ in 0..20 {
        let claim = store.claim(request("new")).await;
        says(
            claim,
            StoreErrorKind::Unavailable,
            &["takes no writes", "primary"],
        );
        sleep(Duration::from_millis(20)).await;
    }
    sql(
        &mut administrator,
        "SET default_transaction_read_only = off",
    )
    .await;
    default(&mut administrator, "off").await;
    let back = async {
        while store.claim(request("new")).await.is_err() {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(BACK_WITHIN, back)
        .await
        .expect("the store does not come back");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_standby_is_named() {
    let mut server = Server::start().await;
    let store = options().migrate().connect(&server.url()).await.unwrap();
    let _ = win(&store, &request("k")).await;
    let becomes_standby = "DO $$ BEGIN EXECUTE format(
        'COPY (SELECT) TO %L', current_setting('data_directory') || '/standby.signal'
    ); END $$";
    sql(&mut server.connect().await, becomes_standby).await;
    server.stop_immediately().await;
    server.start_again().await;
    for options in [options(), options().migrate()] {
        let opened = options.connect(&server.url()).await;
        says(opened, StoreErrorKind::Unavailable, &["standby", "primary"]);
    }
    // Neither does the one that was open take it for the server it knew.
    for _ in 0..20 {
        failed(
            store.claim(request("new")).await,
            StoreErrorKind::Unavailable,
        );
        sleep(Duration::from_millis(20)).await;
    }
    sql(&mut server.connect().await, "SELECT pg_promote()").await;
    let back = async {
        while store.claim(request("new")).await.is_err() {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(BACK_WITHIN, back)
        .await
        .expect("the store does not come back");
    in_flight(store.claim(request("k")).await);
}

#[tokio::test]
async fn a_commit_that_is_not_waited_for_is_warned_of() {
    let (logs, _guard) = Logs::of_this_thread();
    let database = Database::in_real_time();
    let careful = open(pool(database.options(), 1)).await;
    assert!(logs.loud("synchronous_commit").is_empty());
    let careless = database.options().options([("synchronous_commit", "off")]);
    let store = PostgresStore::open(pool(careless, 1)).await.unwrap();
    let warned = logs.loud("synchronous_commit");
    assert_eq!(warned.len(), 1, "{warned:?}");
    assert!(warned[0].text.contains("lose"), "{warned:?}");
    // It works all the same, and does not go on about it.
    let ticket = win(&store, &request("k")).await;
    done(careful.complete(&ticket, created(), lifetimes()).await);
    assert_eq!(logs.loud("synchronous_commit").len(), 1);
}

#[test]
fn a_store_opened_outside_a_runtime_says_what_it_needs() {
    // A future polled by hand, where nothing of tokio is at work.
    let mut opening = std::pin::pin!(async {
        let url = "postgres://postgres@127.0.0.1:1/postgres";
        options().connect(url).await
    });
    let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
    match opening.as_mut().poll(&mut cx) {
        std::task::Poll::Ready(opened) => {
            says(opened, StoreErrorKind::Unavailable, &["tokio runtime"])
        }
        std::task::Poll::Pending => panic!("it waits"),
    }
}

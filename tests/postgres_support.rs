//! The servers, networks and clocks that other tests rely on do what they are told.
#![cfg(all(unix, feature = "postgres"))]

mod support;

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use sqlx::{ConnectOptions, Executor, PgConnection, Row, postgres::PgConnectOptions};
use support::{
    clock::TestClock,
    database::Database,
    eventually,
    proxy::{Cut, Proxy, Way},
    server::Server,
};
use tokio::{net::TcpStream, time::timeout};
use tower_idempotency::{Timestamp, store::Clock};

const SOON: Duration = Duration::from_millis(200);
const LATER: Duration = Duration::from_secs(10);

async fn connect(url: &str) -> sqlx::Result<PgConnection> {
    let options: PgConnectOptions = url.parse()?;
    options.connect().await
}

async fn ask(connection: &mut PgConnection, question: &'static str) -> sqlx::Result<String> {
    connection.fetch_one(question).await?.try_get(0)
}

async fn rows(server: &Server) -> String {
    let mut connection = server.connect().await;
    ask(&mut connection, "SELECT count(*)::text FROM numbers")
        .await
        .unwrap()
}

/// With a parameter, so that it is prepared, bound, executed and synced.
async fn insert(connection: &mut PgConnection, number: i32) -> sqlx::Result<()> {
    let insert = sqlx::query("INSERT INTO numbers VALUES ($1)").bind(number);
    insert.execute(connection).await.map(drop)
}

async fn with_table(server: &Server) {
    let mut connection = server.connect().await;
    connection
        .execute("CREATE TABLE numbers (number integer)")
        .await
        .unwrap();
}

#[tokio::test]
async fn a_server_comes_back_with_what_was_committed() {
    let mut server = Server::start_with(&[("max_connections", "7")]).await;
    with_table(&server).await;
    for (times, kills) in [(1, true), (2, false)] {
        let mut connection = server.connect().await;
        let setting = ask(&mut connection, "SHOW max_connections").await.unwrap();
        assert_eq!(setting, "7");
        insert(&mut connection, times).await.unwrap();
        if kills {
            server.kill().await;
        } else {
            server.stop_immediately().await;
        }
        assert!(insert(&mut connection, 0).await.is_err());
        assert!(TcpStream::connect(server.address()).await.is_err());
        server.start_again().await;
        assert!(server.log().contains("not properly shut down"));
        assert_eq!(rows(&server).await, times.to_string());
    }
    let address = server.address();
    drop(server);
    assert!(TcpStream::connect(address).await.is_err());
}

#[tokio::test]
async fn a_network_is_as_slow_as_it_is_told_in_each_direction() {
    let server = Server::start().await;
    let proxy = Proxy::to(server.address()).await;
    let mut connection = connect(&server.url_at(proxy.address())).await.unwrap();
    let delay = Duration::from_millis(150);
    for (to_server, to_client) in [(1, 0), (0, 1), (1, 2)] {
        proxy.delay(Way::ToServer, delay * to_server);
        proxy.delay(Way::ToClient, delay * to_client);
        let begun = Instant::now();
        ask(&mut connection, "SELECT 'x'").await.unwrap();
        let took = begun.elapsed();
        assert!(took >= delay * (to_server + to_client), "{took:?}");
        assert!(took < delay * (to_server + to_client) + LATER, "{took:?}");
    }
    assert_eq!(proxy.accepted(), 1);
}

#[tokio::test]
async fn a_network_cuts_and_refuses() {
    let server = Server::start().await;
    let proxy = Proxy::to(server.address()).await;
    let url = server.url_at(proxy.address());
    let mut connection = connect(&url).await.unwrap();
    proxy.cut_all().await;
    assert!(ask(&mut connection, "SELECT 'x'").await.is_err());

    let mut connection = connect(&url).await.unwrap();
    proxy.refuse(true);
    assert!(connect(&url).await.is_err());
    assert_eq!(ask(&mut connection, "SELECT 'x'").await.unwrap(), "x");
    proxy.refuse(false);
    connect(&url).await.unwrap();
    assert_eq!(proxy.accepted(), 3);
}

#[tokio::test]
async fn what_a_network_swallows_is_gone() {
    let server = Server::start().await;
    with_table(&server).await;
    let proxy = Proxy::to(server.address()).await;
    let url = server.url_at(proxy.address());
    let mut sends = connect(&url).await.unwrap();
    let mut is_silent = connect(&url).await.unwrap();
    proxy.hang(true);
    let inserted = timeout(SOON, insert(&mut sends, 1)).await;
    assert!(inserted.is_err(), "it was answered");
    assert!(timeout(SOON, connect(&url)).await.is_err());
    proxy.hang(false);
    // Whoever lost nothing goes on.
    insert(&mut is_silent, 2).await.unwrap();
    insert(&mut connect(&url).await.unwrap(), 3).await.unwrap();
    let again = timeout(SOON, insert(&mut sends, 4)).await;
    assert!(!matches!(again, Ok(Ok(()))), "it has come back to life");
    assert_eq!(rows(&server).await, "2");
}

#[tokio::test]
async fn a_statement_is_lost_or_only_its_answer() {
    let server = Server::start().await;
    with_table(&server).await;
    let proxy = Proxy::to(server.address()).await;
    let url = server.url_at(proxy.address());
    let cuts = [
        (Cut::before(b'S'), false),
        (Cut::before(b'E'), false),
        (Cut::answered(b'S'), true),
        (Cut::after(b'S'), true),
    ];
    let mut expected = 0;
    for (number, (cut, arrives)) in (0..).zip(cuts) {
        let mut connection = connect(&url).await.unwrap();
        // Twice, so that it is prepared by then.
        insert(&mut connection, number).await.unwrap();
        insert(&mut connection, number).await.unwrap();
        expected += 2 + usize::from(arrives);
        let races = format!("{cut:?}").contains("After");
        proxy.cut(cut);
        assert!(insert(&mut connection, number).await.is_err());
        let begun = Instant::now();
        while races && rows(&server).await != expected.to_string() {
            assert!(begun.elapsed() < LATER, "the server did not do it");
        }
        assert_eq!(rows(&server).await, expected.to_string(), "{number}");
        assert_eq!(proxy.cuts(), 1 + usize::try_from(number).unwrap());
    }
}

#[tokio::test]
async fn a_commit_is_found_by_what_it_says() {
    let server = Server::start().await;
    with_table(&server).await;
    let proxy = Proxy::to(server.address()).await;
    let url = server.url_at(proxy.address());
    for (cut, committed) in [
        (Cut::before(b'Q').containing("COMMIT").nth(2), "1"),
        (Cut::answered(b'Q').containing("COMMIT").nth(2), "3"),
    ] {
        proxy.cut(cut);
        let mut connection = connect(&url).await.unwrap();
        for fails in [false, true] {
            connection.execute("BEGIN").await.unwrap();
            insert(&mut connection, 0).await.unwrap();
            let ended = connection.execute("COMMIT").await;
            assert_eq!(ended.is_err(), fails);
        }
        assert_eq!(rows(&server).await, committed);
    }
    // What was cut off before it went to the server does not count.
    assert_eq!(proxy.forwarded(b'Q'), 7);
}

/// The time a statement sees, in microseconds since 1970.
const TIME: &str = "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint::text";

/// The same, however far away.
const DATE: &str =
    "SELECT to_char(clock_timestamp() AT TIME ZONE 'UTC', 'FMYYYY-MM-DD HH24:MI:SS.US')";

#[test]
fn a_test_clock_moves_the_server_inside_and_outside_of_any_runtime() {
    let database = Arc::new(Database::new());
    let clock = TestClock::of(database.clone());
    let threads = tokio::runtime::Runtime::new().unwrap();
    let single = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let seen = async |how| {
        let mut connection = database.connect().await;
        ask(&mut connection, how).await.unwrap()
    };
    for runtime in [threads, single] {
        clock.advance(Duration::from_micros(1_500_001));
        assert_eq!(
            runtime.block_on(seen(TIME)),
            clock.now().as_micros().to_string()
        );
        runtime.block_on(async {
            clock.clone().advance(Duration::from_secs(3_600));
            assert_eq!(seen(TIME).await, clock.now().as_micros().to_string());
        });
        for (micros, date) in [
            (i64::MAX, "294247-01-10 04:00:54.775807"),
            (253_402_300_799_999_999, "9999-12-31 23:59:59.999999"),
            (-1, "1969-12-31 23:59:59.999999"),
            (0, "1970-01-01 00:00:00.000000"),
        ] {
            clock.set(Timestamp::from_micros(micros));
            assert_eq!(runtime.block_on(seen(DATE)), date);
        }
    }
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| clock.advance(Duration::from_secs(1)));
        }
    });
    let runtime = tokio::runtime::Runtime::new().unwrap();
    assert_eq!(runtime.block_on(seen(TIME)), "8000000");
}

#[tokio::test]
async fn a_transaction_sees_the_time_move_whatever_its_isolation() {
    let database = Arc::new(Database::new());
    let clock = TestClock::of(database.clone());
    let mut connection = database.connect().await;
    for begin in [
        "BEGIN",
        "BEGIN ISOLATION LEVEL REPEATABLE READ",
        "BEGIN ISOLATION LEVEL SERIALIZABLE READ ONLY",
    ] {
        connection.execute(begin).await.unwrap();
        let before = ask(&mut connection, TIME).await.unwrap();
        assert_eq!(before, clock.now().as_micros().to_string());
        clock.advance(Duration::from_secs(1));
        let after = ask(&mut connection, TIME).await.unwrap();
        assert_eq!(after, clock.now().as_micros().to_string());
        connection.execute("ROLLBACK").await.unwrap();
    }
}

#[tokio::test]
async fn a_schema_goes_with_its_test_though_a_store_is_at_work_in_it() {
    let others = Database::in_real_time();
    let mut looks = others.connect().await;
    let database = Database::new();
    let schema = database.schema().to_owned();
    let mut is_there = async || {
        let count = sqlx::query_scalar("SELECT count(*) FROM pg_namespace WHERE nspname = $1");
        let count: i64 = count.bind(&schema).fetch_one(&mut looks).await.unwrap();
        count == 1
    };
    assert!(is_there().await);
    let mut busy = database.connect().await;
    for statement in [
        "CREATE TABLE held (number integer)",
        "BEGIN",
        "LOCK TABLE held",
    ] {
        busy.execute(statement).await.unwrap();
    }
    let dropped = thread::spawn(move || drop(database));
    tokio::time::sleep(SOON).await;
    assert!(is_there().await, "it did not wait");
    busy.execute("ROLLBACK").await.unwrap();
    eventually("the schema to be dropped", || dropped.is_finished()).await;
    assert!(!is_there().await);
}

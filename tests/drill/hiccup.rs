//! Commits that Postgres acknowledges late, as it does while a synchronous standby is away or the disk
//! stands still: after whoever asked has given them up.

use std::time::{Duration, Instant};

use sqlx::Executor;
use tokio::time::{sleep, timeout};
use tower_idempotency::{IdempotencyLayer, PostgresStore, Recovery};

use crate::support::{Handler, post, send, server::Server};

/// No commit is acknowledged from here on, until they may go on.
async fn hold_commits(server: &Server) {
    set(
        server,
        "ALTER SYSTEM SET synchronous_standby_names = 'nobody'",
        "nobody",
    )
    .await;
    // It takes the server another moment to hold them in fact.
    let begun = Instant::now();
    loop {
        let mut connection = server.connect().await;
        let written = connection
            .execute("CREATE TABLE IF NOT EXISTS probe (); INSERT INTO probe DEFAULT VALUES");
        if timeout(Duration::from_millis(100), written).await.is_err() {
            return;
        }
        assert!(begun.elapsed() < Duration::from_secs(10), "commits go on");
    }
}

async fn let_commits_go_on(server: &Server) {
    set(server, "ALTER SYSTEM RESET synchronous_standby_names", "").await;
}

async fn set(server: &Server, statement: &'static str, expected: &str) {
    let mut connection = server.connect().await;
    connection.execute(statement).await.unwrap();
    connection.execute("SELECT pg_reload_conf()").await.unwrap();
    let begun = Instant::now();
    loop {
        let shown = sqlx::query_scalar("SHOW synchronous_standby_names");
        let shown: String = shown.fetch_one(&mut connection).await.unwrap();
        if shown == expected {
            return;
        }
        assert!(begun.elapsed() < Duration::from_secs(10), "{shown:?}");
        sleep(Duration::from_millis(5)).await;
    }
}

// C3
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_that_is_committed_after_it_was_given_up_leaves_its_key_free() {
    let server = Server::start().await;
    let store = PostgresStore::options()
        .migrate()
        .operation_timeout(Duration::from_millis(300))
        .connect(&server.url())
        .await
        .unwrap();
    let handler = Handler::new();
    let app = handler.behind(
        IdempotencyLayer::new(store)
            .single_tenant()
            // Longer than the commit is held back: meanwhile the claim is one that runs.
            .lease(Duration::from_secs(20))
            .recovery(Recovery::Refuse)
            .store_timeout(Duration::from_secs(1)),
    );
    assert_eq!(send(&app, post("before", "A")).await.status, 201);

    hold_commits(&server).await;
    let refused = send(&app, post("late", "A")).await;
    assert_eq!(
        refused.said(),
        (503, "idempotency_store_unavailable".into())
    );
    // The claim is still under way in the server when it is undone, and not to be seen.
    is_undone(&server).await;
    let_commits_go_on(&server).await;

    // Never run, so neither in flight without end nor of unknown outcome.
    let begun = Instant::now();
    loop {
        let answer = send(&app, post("late", "A")).await;
        if answer.status == 201 {
            break;
        }
        // It takes the server a moment to let the commits go on.
        let expected = ["idempotency_in_flight", "idempotency_store_unavailable"];
        assert!(expected.contains(&&*answer.code()), "{answer:?}");
        assert!(
            begun.elapsed() < Duration::from_secs(10),
            "in flight without end"
        );
        sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(handler.effects(), 2);
}

/// Waits until a release was tried, for a while: whether one comes is up to the layer. It has to ask
/// first whether the claim may yet come to be.
async fn is_undone(server: &Server) {
    let mut connection = server.connect().await;
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(5) {
        let released = "SELECT EXISTS (SELECT FROM pg_stat_activity
             WHERE state = 'idle' AND query LIKE '%starts_with(query, $1) AND state%')";
        let released = sqlx::query_scalar(released);
        if released.fetch_one(&mut connection).await.unwrap() {
            return;
        }
        sleep(Duration::from_millis(20)).await;
    }
}

//! Tables that are missing, somebody else's or out of reach are named when the store is opened, and what
//! to do about them.

use std::time::Duration;

use sqlx::{ConnectOptions, postgres::PgConnectOptions};
use tokio::time::{sleep, timeout};
use tower_idempotency::{
    PostgresStore,
    store::{Checkpoints, Claim, Store, StoreErrorKind},
};

use super::common::*;
use crate::support::{database::Database, server::Server};

/// How long a store may take to find out that its tables are back.
const BACK_WITHIN: Duration = Duration::from_secs(3);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn missing_tables_are_named_with_what_creates_them() {
    let database = Database::in_real_time();
    let words = ["tables", "missing", "migrate()", "postgres.sql"];
    says(
        PostgresStore::open(database.pool()).await,
        StoreErrorKind::Schema,
        &words,
    );
    says(
        PostgresStore::options()
            .schema("no_such_schema")
            .open(database.pool())
            .await,
        StoreErrorKind::Schema,
        &words,
    );
    open(database.pool()).await;
    says(
        PostgresStore::options()
            .table_prefix("other")
            .open(database.pool())
            .await,
        StoreErrorKind::Schema,
        &words,
    );
    PostgresStore::open(database.pool()).await.unwrap();
    // One of the four is enough.
    for table in ["checkpoints", "owners", "records", "meta"] {
        let mut connection = database.connect().await;
        sql(&mut connection, &format!("DROP TABLE idempotency_{table}")).await;
        says(
            PostgresStore::open(database.pool()).await,
            StoreErrorKind::Schema,
            &words,
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_search_path_that_leads_nowhere_is_named() {
    let database = Database::in_real_time();
    let nowhere = database
        .options()
        .options([("search_path", "no_such_schema")]);
    for options in [PostgresStore::options(), PostgresStore::options().migrate()] {
        let opened = options.open(pool(nowhere.clone(), 1)).await;
        says(opened, StoreErrorKind::Schema, &["search_path", "schema"]);
    }
}

/// A server with tables in the schema `kept`, and how to be the role `app` there.
async fn with_role() -> (Server, PgConnectOptions) {
    let server = Server::start().await;
    let owner = PostgresStore::options()
        .schema("kept")
        .migrate()
        .connect(&server.url())
        .await
        .unwrap();
    owner.close().await.unwrap();
    sql(&mut server.connect().await, "CREATE ROLE app LOGIN").await;
    let app: PgConnectOptions = server.url().parse().unwrap();
    (server, app.username("app").disable_statement_logging())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_role_without_rights_is_told_which_to_grant() {
    let (server, app) = with_role().await;
    let mut owner = server.connect().await;
    let open = async |migrate: bool| {
        let options = PostgresStore::options().schema("kept");
        let options = if migrate { options.migrate() } else { options };
        options.open(pool(app.clone(), 2)).await
    };
    // Not even the schema.
    for migrate in [false, true] {
        says(
            open(migrate).await,
            StoreErrorKind::Schema,
            &["right", "grant", "USAGE"],
        );
    }
    let rights = ["SELECT", "INSERT", "UPDATE", "DELETE"];
    sql(&mut owner, "GRANT USAGE ON SCHEMA kept TO app").await;
    for migrate in [false, true] {
        says(
            open(migrate).await,
            StoreErrorKind::Schema,
            &[&["right", "grant"], &rights[..]].concat(),
        );
    }
    sql(
        &mut owner,
        "GRANT SELECT ON ALL TABLES IN SCHEMA kept TO app",
    )
    .await;
    for migrate in [false, true] {
        says(
            open(migrate).await,
            StoreErrorKind::Schema,
            &[&["right", "grant"], &rights[..]].concat(),
        );
    }
    // Any one that is missing.
    sql(&mut owner, "GRANT ALL ON ALL TABLES IN SCHEMA kept TO app").await;
    open(false).await.unwrap();
    for table in ["records", "owners", "checkpoints"] {
        for right in rights {
            sql(
                &mut owner,
                &format!("REVOKE {right} ON kept.idempotency_{table} FROM app"),
            )
            .await;
            says(
                open(false).await,
                StoreErrorKind::Schema,
                &["right", "grant", right],
            );
            sql(
                &mut owner,
                &format!("GRANT {right} ON kept.idempotency_{table} TO app"),
            )
            .await;
        }
    }
    // What the documentation says is enough: no more than these, and no right to create anything.
    let exactly = "REVOKE ALL ON ALL TABLES IN SCHEMA kept FROM app;
        GRANT SELECT, INSERT, UPDATE, DELETE ON kept.idempotency_records, kept.idempotency_owners,
            kept.idempotency_checkpoints, kept.idempotency_meta TO app";
    sql(&mut owner, exactly).await;
    for migrate in [false, true] {
        let store = open(migrate).await.unwrap();
        let ticket = win(&store, &request(&format!("k-{migrate}"))).await;
        let saved = Checkpoints::save(&store, &ticket, "step", "value".into());
        done(saved.await);
        done(store.complete(&ticket, created(), lifetimes()).await);
        store.renew(&[], LONG).await.unwrap();
        store.purge(10).await.unwrap();
        store.close().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_role_that_may_not_create_tables_is_told_so() {
    let (server, app) = with_role().await;
    let words = ["may not create", "CREATE", "postgres.sql", "migrate()"];
    // In a schema that is there, and in one that is not.
    sql(
        &mut server.connect().await,
        "CREATE SCHEMA empty; GRANT USAGE ON SCHEMA empty TO app",
    )
    .await;
    for schema in ["empty", "missing"] {
        let opened = PostgresStore::options()
            .schema(schema)
            .migrate()
            .open(pool(app.clone(), 1))
            .await;
        says(opened, StoreErrorKind::Schema, &words);
    }
    // Since Postgres 15 nobody else may create anything in `public`.
    let opened = PostgresStore::options()
        .migrate()
        .open(pool(app.clone(), 1))
        .await;
    says(opened, StoreErrorKind::Schema, &words);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tables_of_a_newer_version_are_not_touched() {
    let database = Database::in_real_time();
    open(database.pool()).await;
    let mut connection = database.connect().await;
    sql(
        &mut connection,
        "UPDATE idempotency_meta SET value = value + 1",
    )
    .await;
    for options in [PostgresStore::options(), PostgresStore::options().migrate()] {
        let opened = options.open(database.pool()).await;
        says(
            opened,
            StoreErrorKind::Schema,
            &["newer version", "upgrade"],
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tables_of_another_make_are_not_touched() {
    let words = ["not this crate's", "schema", "table_prefix"];
    // All of the names, and other columns.
    for table in ["records", "owners", "checkpoints", "meta"] {
        let database = Database::in_real_time();
        open(database.pool()).await;
        let mut connection = database.connect().await;
        let foreign = format!(
            "DROP TABLE idempotency_{table};
             CREATE TABLE idempotency_{table} (id bigint, note text); INSERT INTO idempotency_{table} VALUES (1, 'x')"
        );
        sql(&mut connection, &foreign).await;
        for options in [PostgresStore::options(), PostgresStore::options().migrate()] {
            let opened = options.open(database.pool()).await;
            says(
                opened,
                StoreErrorKind::Schema,
                &["choose another schema", "table_prefix"],
            );
        }
        let kept = format!("SELECT count(*) FROM idempotency_{table}");
        assert_eq!(value::<i64>(&mut connection, &kept).await, 1);
    }
    // The names and columns, and nothing that says whose they are.
    let database = Database::in_real_time();
    open(database.pool()).await;
    sql(
        &mut database.connect().await,
        "DELETE FROM idempotency_meta",
    )
    .await;
    for options in [PostgresStore::options(), PostgresStore::options().migrate()] {
        says(
            options.open(database.pool()).await,
            StoreErrorKind::Schema,
            &words,
        );
    }
    // One of the names is taken, and the table that says whose they are is missing.
    let database = Database::in_real_time();
    sql(
        &mut database.connect().await,
        "CREATE TABLE idempotency_records (id bigint)",
    )
    .await;
    let opened = PostgresStore::options()
        .migrate()
        .open(database.pool())
        .await;
    says(opened, StoreErrorKind::Schema, &words);
    let left = "SELECT count(*) FROM pg_tables WHERE schemaname = current_schema()";
    assert_eq!(value::<i64>(&mut database.connect().await, left).await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tables_that_vanish_while_the_store_is_open_are_named_until_they_are_back() {
    let database = Database::in_real_time();
    let store = open(database.pool()).await;
    let ticket = win(&store, &request("k")).await;
    let mut connection = database.connect().await;
    sql(&mut connection, "DROP TABLE idempotency_records").await;
    let words = ["tables", "missing", "migrate()"];
    for _ in 0..10 {
        says(
            store.claim(request("k")).await,
            StoreErrorKind::Schema,
            &words,
        );
        let completion = store.complete(&ticket, created(), lifetimes()).await;
        says(completion, StoreErrorKind::Schema, &words);
        sleep(Duration::from_millis(20)).await;
    }
    let again = "DROP TABLE idempotency_meta, idempotency_owners, idempotency_checkpoints";
    sql(&mut connection, again).await;
    sql(&mut connection, &PostgresStore::options().schema_sql()).await;
    let back = async {
        loop {
            match store.claim(request("k")).await {
                Ok(claim) => return claim,
                Err(error) => assert_eq!(error.kind(), StoreErrorKind::Schema, "{error:?}"),
            }
            sleep(Duration::from_millis(5)).await;
        }
    };
    let claim = timeout(BACK_WITHIN, back)
        .await
        .expect("the store does not come back");
    assert!(matches!(claim, Claim::Won(_)), "{claim:?}");
}

//! Where the tables are, what they are called, and who creates them.

use std::panic::{AssertUnwindSafe, catch_unwind};

use sqlx::PgConnection;
use tokio::task::JoinSet;
use tower_idempotency::{
    PostgresStore, PostgresStoreOptions,
    store::{Checkpoints, Counts, Inspect, Store},
};

use super::common::*;
use crate::support::{database::Database, server::Server};

const TABLES: [&str; 4] = ["checkpoints", "meta", "owners", "records"];

/// The tables of a schema, in the order of their names.
async fn tables(connection: &mut PgConnection, schema: &str) -> String {
    let tables = format!(
        "SELECT coalesce(string_agg(tablename, ' ' ORDER BY tablename), '') FROM pg_tables
         WHERE schemaname = '{schema}'"
    );
    value(connection, &tables).await
}

fn named(prefix: &str) -> String {
    TABLES.map(|table| format!("{prefix}_{table}")).join(" ")
}

/// Every operation that writes or reads a table, once.
async fn use_all(store: &PostgresStore) {
    let ticket = win(store, &request("all")).await;
    done(store.save(&ticket, "step", "value".into()).await);
    assert_eq!(store.load(&ticket).await.unwrap().unwrap().len(), 1);
    assert_eq!(
        store
            .renew(std::slice::from_ref(&ticket), LONG)
            .await
            .unwrap()
            .len(),
        1
    );
    done(store.abandon(&ticket).await);
    assert_eq!(store.abandoned(None, 10).await.unwrap().len(), 1);
    let ticket = win(store, &replacing("all", ticket.token)).await;
    done(store.release(&ticket, DAY).await);
    let counts = store.counts().await.unwrap();
    assert_eq!(counts.released, 1);
    let all = counts.running + counts.completed + counts.abandoned + counts.released;
    let scope = id("all").scope;
    assert_eq!(store.count_in(&scope, 1000).await.unwrap(), all);
    let ticket = win(store, &replacing("all", ticket.token)).await;
    done(store.complete(&ticket, created(), lifetimes()).await);
    assert_eq!(store.purge(10).await.unwrap(), 0);
    assert!(store.forget(&id("all")).await.unwrap());
    win_all(store, &keys("many", 20)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_instances_that_start_at_once_make_one_set_of_tables() {
    let database = Database::in_real_time();
    let mut opening = JoinSet::new();
    for _ in 0..16 {
        let pool = pool(database.options(), 2);
        opening.spawn(PostgresStore::options().migrate().open(pool));
    }
    let stores: Vec<_> = opening
        .join_all()
        .await
        .into_iter()
        .map(Result::unwrap)
        .collect();
    let mut connection = database.connect().await;
    assert_eq!(
        tables(&mut connection, database.schema()).await,
        named("idempotency")
    );
    assert_eq!(
        value::<i64>(&mut connection, "SELECT count(*) FROM idempotency_meta").await,
        1
    );
    let ticket = win(&stores[0], &request("k")).await;
    for store in &stores {
        assert_eq!(
            in_flight(store.claim(request("k")).await).token,
            ticket.token
        );
    }
}

/// The schema itself is missing too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_instances_that_start_at_once_make_one_schema() {
    let server = Server::start().await;
    let mut opening = JoinSet::new();
    for _ in 0..16 {
        let url = server.url();
        opening.spawn(async move {
            let options = PostgresStore::options().schema("payments").migrate();
            options.connect(&url).await.unwrap().close().await.unwrap();
        });
    }
    opening.join_all().await;
    let mut connection = server.connect().await;
    assert_eq!(
        tables(&mut connection, "payments").await,
        named("idempotency")
    );
    assert_eq!(tables(&mut connection, "public").await, "");
    assert!(!server.log().contains("ERROR"), "{}", server.log());
}

/// Two of one prefix in two schemas, two prefixes in one schema: nothing of one is seen in another.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tables_land_where_they_are_wanted_and_are_apart() {
    let server = Server::start().await;
    let mut connection = server.connect().await;
    let wanted = [
        ("payments", "idempotency"),
        ("payments", "refunds"),
        ("orders", "idempotency"),
        ("MixedCase", "Mixed_Case"),
        // What would be a word of the language without quotes.
        ("order", "table"),
        ("select", "idempotency_"),
        ("_1", "idempotency_records"),
        (&*"s".repeat(63), &*"p".repeat(40)),
    ];
    let mut stores = Vec::new();
    for (schema, prefix) in wanted {
        let options = PostgresStore::options()
            .schema(schema)
            .table_prefix(prefix)
            .migrate();
        let store = options.connect(&server.url()).await.unwrap();
        let tables = tables(&mut connection, schema).await;
        let all = named(prefix);
        assert!(
            all.split(' ')
                .all(|table| tables.split(' ').any(|is| is == table)),
            "{tables}"
        );
        stores.push(store);
    }
    assert_eq!(tables(&mut connection, "public").await, "");
    for store in &stores {
        use_all(store).await;
        assert_eq!(win(store, &request("k")).await.attempt, 1);
        assert_eq!(store.counts().await.unwrap().running, 21);
    }
    // They are found again without creating anything.
    for (schema, prefix) in wanted {
        let options = PostgresStore::options().schema(schema).table_prefix(prefix);
        let store = options.connect(&server.url()).await.unwrap();
        in_flight(store.claim(request("k")).await);
    }
}

/// The schema is found by the search path, where its name may be anything.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_schema_of_the_search_path_may_have_any_name() {
    let server = Server::start().await;
    let mut connection = server.connect().await;
    for name in ["Straße 7", "a.b", "select", "idempotency_records"] {
        sql(&mut connection, &format!("CREATE SCHEMA \"{name}\"")).await;
        let options: sqlx::postgres::PgConnectOptions = server.url().parse().unwrap();
        let options = options.options([("search_path", format!("\"{name}\""))]);
        let store = PostgresStore::options()
            .migrate()
            .open(pool(options, 2))
            .await;
        let store = store.unwrap_or_else(|error| panic!("{name}: {error:?}"));
        assert_eq!(
            tables(&mut connection, name).await,
            named("idempotency"),
            "{name}"
        );
        use_all(&store).await;
    }
}

/// The panic's message.
fn refused(build: impl FnOnce() -> PostgresStoreOptions) -> String {
    let panic = catch_unwind(AssertUnwindSafe(build)).expect_err("it is taken");
    *panic.downcast::<String>().unwrap()
}

#[test]
fn bad_names_are_refused_with_the_option_and_the_name() {
    let long = "s".repeat(64);
    for name in [
        "",
        "1st",
        "with space",
        "a-b",
        "a.b",
        "a\"b",
        "a;b",
        "naïve",
        "nul\0",
        &long,
    ] {
        let message = refused(|| PostgresStore::options().schema(name));
        assert!(
            message.contains("schema") && message.contains(&format!("{name:?}")),
            "{message}"
        );
        let message = refused(|| PostgresStore::options().table_prefix(name));
        assert!(
            message.contains("table_prefix") && message.contains(&format!("{name:?}")),
            "{message}"
        );
    }
    let message = refused(|| PostgresStore::options().table_prefix(&"p".repeat(41)));
    assert!(message.contains("40"), "{message}");
    for timeout in [
        std::time::Duration::ZERO,
        std::time::Duration::from_secs(3_601),
    ] {
        let message = refused(|| PostgresStore::options().operation_timeout(timeout));
        assert!(message.contains("operation_timeout"), "{message}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn schema_sql_makes_the_tables_that_migrate_makes() {
    let database = Database::in_real_time();
    let mut connection = database.connect().await;
    sql(&mut connection, &PostgresStore::options().schema_sql()).await;
    let by_hand = PostgresStore::open(database.pool()).await.unwrap();
    use_all(&by_hand).await;
    // Migrating leaves them alone.
    let migrated = open(database.pool()).await;
    assert_eq!(migrated.counts().await.unwrap().running, 20);

    let elsewhere = PostgresStore::options()
        .schema(database.schema())
        .table_prefix("made");
    sql(&mut connection, &elsewhere.schema_sql()).await;
    let made = elsewhere.open(database.pool()).await.unwrap();
    use_all(&made).await;
    PostgresStore::options()
        .table_prefix("migrated")
        .migrate()
        .open(database.pool())
        .await
        .unwrap();
    // Column by column and index by index.
    let shape = |prefix: &str| {
        format!(
            "SELECT replace(string_agg(line, E'\\n' ORDER BY line), '{prefix}_', '') FROM (
                 SELECT table_name || ' ' || column_name || ' ' || data_type || ' ' || is_nullable
                 FROM information_schema.columns
                 WHERE table_schema = current_schema() AND table_name LIKE '{prefix}\\_%'
                 UNION ALL
                 SELECT indexdef FROM pg_indexes
                 WHERE schemaname = current_schema() AND tablename LIKE '{prefix}\\_%'
             ) AS lines (line)"
        )
    };
    let made: String = value(&mut connection, &shape("made")).await;
    assert!(made.contains("fingerprint bytea NO"), "{made}");
    let migrated: String = value(&mut connection, &shape("migrated")).await;
    assert_eq!(made, migrated);
}

/// The pool is shared with handlers, and one of them points its connection elsewhere and gives it back
/// so. There are tables of the same names there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_search_path_changed_by_a_handler_does_not_move_the_records() {
    let (database, elsewhere) = (Database::in_real_time(), Database::in_real_time());
    let mut connection = database.connect().await;
    let shared = pool(database.options(), 1);
    let store = open(shared.clone()).await;
    let decoy = open(elsewhere.pool()).await;
    let before = win(&store, &request("before")).await;
    for path in [elsewhere.schema(), "no_such_schema", "pg_catalog"] {
        {
            let mut handler = shared.acquire().await.unwrap();
            sql(&mut handler, &format!("SET search_path = {path}")).await;
        }
        let key = format!("after-{path}");
        in_flight(store.claim(request("before")).await);
        let ticket = win(&store, &request(&key)).await;
        done(store.complete(&ticket, created(), lifetimes()).await);
        assert!(get(&store, &key).await.is_some());
        use_all(&store).await;
        let removed =
            "DELETE FROM idempotency_records WHERE convert_from(key, 'UTF8') LIKE 'many-%'";
        sql(&mut connection, removed).await;
    }
    done(store.complete(&before, created(), lifetimes()).await);
    assert_eq!(decoy.counts().await.unwrap(), Counts::default());
    let in_its_own = "SELECT count(*) FROM idempotency_records";
    assert_eq!(value::<i64>(&mut connection, in_its_own).await, 4);
}

/// A chosen schema comes before the search path, for migrating too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn migrating_creates_nothing_where_a_chosen_schema_has_the_tables() {
    let (chosen, found) = (Database::in_real_time(), Database::in_real_time());
    let _ = win(&open(chosen.pool()).await, &request("k")).await;
    let options = PostgresStore::options().schema(chosen.schema()).migrate();
    let store = options.open(found.pool()).await.unwrap();
    in_flight(store.claim(request("k")).await);
    let mut connection = found.connect().await;
    assert_eq!(tables(&mut connection, found.schema()).await, "");
    assert_eq!(
        tables(&mut connection, chosen.schema()).await,
        named("idempotency")
    );
}

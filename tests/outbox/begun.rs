//! Beginning: one key and one body per reference, durable, in the caller's transaction if there is one.

use std::time::Duration;

use axum::{
    Router,
    body::Body,
    http::{HeaderName, HeaderValue, Request, StatusCode},
    routing::post,
};
use bytes::Bytes;
use http::Method;
use tower::ServiceExt;
use tower_idempotency::{
    IdempotencyKey, IdempotencyLayer, Tx,
    client::{EntryState, Operation, Outbox, OutboxError, OutboxErrorKind},
};

use crate::ground::{both, charge_of};

// X1, before the first attempt. X2: what differs is told, and gets neither the key nor a new one.
both! {
    async fn a_second_beginning_finds_the_first_key_and_body(ground: Ground) {
        let first = ground
            .outbox
            .begin("order 17", charge_of(250))
            .await
            .unwrap();
        assert!(first.is_new() && !first.differs());
        assert_eq!(first.entry().state(), EntryState::Pending);
        assert_eq!(first.entry().key().as_str().unwrap().len(), 36);

        let same = ground
            .outbox
            .begin("order 17", charge_of(250))
            .await
            .unwrap();
        assert!(!same.is_new() && !same.differs());
        let own_key = charge_of(999).key(IdempotencyKey::new("another"));
        let other = ground.outbox.begin("order 17", own_key).await.unwrap();
        assert!(!other.is_new() && other.differs());
        for found in [same, other] {
            assert_eq!(found.entry().key(), first.entry().key());
            let expected = charge_of(250).key(first.entry().key());
            assert_eq!(found.entry().operation().unwrap(), expected);
        }
        assert_eq!(ground.count("idempotency_outbox").await, 1);

        // And over a restart: another pool has no memory of its own.
        let restarted: Outbox<Db> = Outbox::new(ground.another_pool().await);
        let found = restarted.find("order 17").await.unwrap().unwrap();
        assert_eq!(found.key(), first.entry().key());
        assert!(restarted.find("order 18").await.unwrap().is_none());
    }

    async fn of_many_who_begin_at_once_one_is_first_and_all_have_its_key(ground: Ground) {
        let mut tasks = tokio::task::JoinSet::new();
        for amount in 0..16 {
            let outbox: Outbox<Db> = Outbox::new(match amount % 2 {
                0 => ground.pool.clone(),
                _ => ground.another_pool().await,
            });
            tasks.spawn(async move { outbox.begin("order 17", charge_of(amount)).await.unwrap() });
        }
        let begun = tasks.join_all().await;
        assert_eq!(begun.iter().filter(|begun| begun.is_new()).count(), 1);
        assert_eq!(begun.iter().filter(|begun| begun.differs()).count(), 15);
        let key = begun[0].entry().key();
        assert!(begun.iter().all(|begun| begun.entry().key() == key));
    }

    async fn each_part_that_differs_is_told(ground: Ground) {
        let header = |value: &'static [u8]| {
            let value = HeaderValue::from_bytes(value).unwrap();
            (HeaderName::from_static("x-note"), value)
        };
        let uri = |uri: &str| -> http::Uri { uri.parse().unwrap() };
        let first = || {
            let (name, value) = header(b"\xff\x80");
            let operation = Operation::new(Method::PUT, uri("http://pay.example/a?b=c"));
            operation
                .header(name.clone(), value)
                .header(name, HeaderValue::from_static("2"))
                .body("x")
        };
        let stored = ground
            .outbox
            .begin("r", first())
            .await
            .unwrap()
            .into_entry();
        assert_eq!(stored.operation().unwrap(), first().key(stored.key()));
        let values: Vec<_> = stored
            .operation()
            .unwrap()
            .into_request()
            .headers()
            .get_all("x-note")
            .iter()
            .map(|value| value.as_bytes().to_vec())
            .collect();
        assert_eq!(values, [b"\xff\x80".to_vec(), b"2".to_vec()]);

        let (name, value) = header(b"3");
        let others = [
            first().body("y"),
            first().header(name.clone(), value),
            Operation::new(Method::PUT, uri("http://pay.example/a?b=d"))
                .header(name.clone(), header(b"\xff\x80").1)
                .header(name.clone(), HeaderValue::from_static("2"))
                .body("x"),
            Operation::new(Method::POST, uri("http://pay.example/a?b=c"))
                .header(name.clone(), header(b"\xff\x80").1)
                .header(name.clone(), HeaderValue::from_static("2"))
                .body("x"),
            // The order of repeated lines counts.
            Operation::new(Method::PUT, uri("http://pay.example/a?b=c"))
                .header(name.clone(), HeaderValue::from_static("2"))
                .header(name.clone(), header(b"\xff\x80").1)
                .body("x"),
        ];
        for other in others {
            assert!(ground.outbox.begin("r", other).await.unwrap().differs());
        }
        assert!(!ground.outbox.begin("r", first()).await.unwrap().differs());
    }

    async fn what_is_rolled_back_was_never_begun_and_what_is_committed_is_there(ground: Ground) {
        ground.run("CREATE TABLE orders (number bigint)").await;
        let mut transaction = ground.pool.begin().await.unwrap();
        sqlx::query("INSERT INTO orders VALUES (1)")
            .execute(&mut *transaction)
            .await
            .unwrap();
        ground
            .outbox
            .begin_in(&mut *transaction, "order 1", charge_of(1))
            .await
            .unwrap();
        transaction.rollback().await.unwrap();
        assert_eq!(
            (
                ground.count("orders").await,
                ground.count("idempotency_outbox").await
            ),
            (0, 0)
        );
        assert!(
            ground
                .relay()
                .resume::<Body, _>(10)
                .await
                .unwrap()
                .done
                .is_empty()
        );
        assert_eq!(ground.shop.requests().len(), 0);

        let mut transaction = ground.pool.begin().await.unwrap();
        sqlx::query("INSERT INTO orders VALUES (2)")
            .execute(&mut *transaction)
            .await
            .unwrap();
        let begun = ground
            .outbox
            .begin_in(&mut *transaction, "order 2", charge_of(2))
            .await
            .unwrap();
        assert!(begun.is_new());
        transaction.commit().await.unwrap();
        assert_eq!(
            (
                ground.count("orders").await,
                ground.count("idempotency_outbox").await
            ),
            (1, 1)
        );

        // And on a plain connection.
        let mut connection = ground.pool.acquire().await.unwrap();
        let found = ground
            .outbox
            .begin_in(&mut *connection, "order 2", charge_of(2))
            .await
            .unwrap();
        assert!(!found.is_new() && !found.differs());
        drop(connection);
        let done = ground.relay().resume::<Body, _>(10).await.unwrap().done;
        assert_eq!(done[0].key(), begun.entry().key());
    }

    async fn what_could_not_be_sent_is_refused_before_it_is_written(ground: Ground) {
        let uri = |text: String| -> http::Uri { text.parse().unwrap() };
        let line = |name: &'static str, len: usize| {
            (
                HeaderName::from_static(name),
                HeaderValue::from_str(&"v".repeat(len)).unwrap(),
            )
        };
        let many = (0..129).fold(charge_of(1), |operation, _| {
            let (name, value) = line("x-many", 1);
            operation.header(name, value)
        });
        let with = |(name, value)| charge_of(1).header(name, value);
        let refused = [
            ("", charge_of(1), "reference"),
            ("nul\0", charge_of(1), "reference"),
            (&"r".repeat(256), charge_of(1), "reference"),
            ("r", Operation::post(uri("/charges".into())), "absolute"),
            (
                "r",
                Operation::post(uri("http://me:secret@pay.example/".into())),
                "password",
            ),
            (
                "r",
                Operation::post(uri(format!("http://pay.example/{}", "p".repeat(8_192)))),
                "8 KiB",
            ),
            ("r", many, "128"),
            ("r", with(line("x-long", 65_536)), "64 KiB"),
            ("r", with(line("content-length", 1)), "connection"),
            (
                "r",
                charge_of(1).body(vec![0; 16 * 1024 * 1024 + 1]),
                "16 MiB",
            ),
            ("r", charge_of(1).key(IdempotencyKey::new("")), "key"),
            (
                "r",
                charge_of(1).key(IdempotencyKey::new("k".repeat(256))),
                "key",
            ),
            ("r", charge_of(1).key(IdempotencyKey::new([0xff])), "key"),
        ];
        for (reference, operation, says) in refused {
            let error = ground.outbox.begin(reference, operation).await.unwrap_err();
            assert_eq!(error.kind(), OutboxErrorKind::Invalid, "{says}");
            assert!(
                error.to_string().contains(says),
                "{error} does not say {says}"
            );
        }
        assert_eq!(ground.count("idempotency_outbox").await, 0);
        // Exactly at the limits.
        let largest = charge_of(1)
            .body(vec![7; 16 * 1024 * 1024])
            .key(IdempotencyKey::new("k".repeat(255)));
        let begun = ground.outbox.begin(&"ร".repeat(85), largest).await.unwrap();
        assert_eq!(
            begun
                .entry()
                .operation()
                .unwrap()
                .into_request()
                .body()
                .len(),
            16 * 1024 * 1024
        );
    }

    async fn a_key_in_the_header_is_the_key(ground: Ground) {
        let with = |operation: Operation, key: &'static str| {
            let name = HeaderName::from_static("idempotency-key");
            operation.header(name, HeaderValue::from_static(key))
        };
        let operation = with(charge_of(1), "\"mine\"").key(IdempotencyKey::new("mine"));
        let begun = ground.outbox.begin("r", operation).await.unwrap();
        assert_eq!(begun.entry().key(), IdempotencyKey::new("mine"));
        let again = ground.outbox.begin("r", charge_of(1)).await.unwrap();
        assert!(!again.differs());
        ground.relay().send::<Body, _>("r").await.unwrap();
        assert_eq!(ground.shop.keys(), ["mine"]);

        let other = with(charge_of(1), "other").key(IdempotencyKey::new("mine"));
        let refused = [other, with(charge_of(1), ""), with(with(charge_of(1), "a"), "b")];
        for operation in refused {
            let error = ground.outbox.begin("refused", operation.clone()).await.unwrap_err();
            assert_eq!(error.kind(), OutboxErrorKind::Invalid);
            let error = ground.outbox.begin_in(&ground.pool, "refused", operation).await.unwrap_err();
            assert_eq!(error.kind(), OutboxErrorKind::Invalid);
        }
        assert_eq!(ground.count("idempotency_outbox").await, 1);
    }

    async fn a_savepoint_that_is_rolled_back_takes_the_beginning_with_it(ground: Ground) {
        use sqlx::Acquire;
        let mut transaction = ground.pool.begin().await.unwrap();
        let mut inner = transaction.begin().await.unwrap();
        let first = ground.outbox.begin_in(&mut *inner, "r", charge_of(1)).await.unwrap();
        inner.rollback().await.unwrap();
        let second = ground.outbox.begin_in(&mut *transaction, "r", charge_of(1)).await.unwrap();
        assert!(second.is_new() && first.entry().key() != second.entry().key());
        let third = ground.outbox.begin_in(&mut *transaction, "r", charge_of(1)).await.unwrap();
        assert!(!third.is_new());
        transaction.commit().await.unwrap();
        let row = ground.outbox.find("r").await.unwrap().unwrap();
        assert_eq!(row.key(), second.entry().key());
    }

    async fn odd_references_and_uris_come_back_as_they_were(ground: Ground) {
        let odd = ["HTTP://A.Example:80/x?%ff", "http://[::1]:8/", "http://a.example?x", "http://a.example/%00"];
        for (number, uri) in odd.into_iter().enumerate() {
            let reference = format!("{number} é 😀 ' \" \\ % _ \n {{table}} $1 {}", "x".repeat(200));
            let operation = Operation::post(uri.parse().unwrap()).key(IdempotencyKey::new("k"));
            let begun = ground.outbox.begin(&reference, operation.clone()).await.unwrap();
            assert_eq!(begun.entry().reference(), reference);
            assert_eq!(begun.entry().operation().unwrap(), operation);
            assert!(!ground.outbox.begin(&reference, operation).await.unwrap().differs());
        }
    }

    async fn no_name_of_a_table_meets_that_of_anothers_index(ground: Ground) {
        let make = |name: &str| -> Outbox<Db> { Outbox::new(ground.pool.clone()).table(name) };
        for name in ["a_pending", "a", "a_settled", "a_turn", "a_pkey", "_", "Select", &"x".repeat(40)] {
            make(name).migrate().await.unwrap();
            make(name).begin("r", charge_of(1)).await.unwrap();
            let indexes = if IS_POSTGRES {
                format!("pg_indexes WHERE tablename = '{name}' AND schemaname = current_schema()")
            } else {
                format!("sqlite_master WHERE type = 'index' AND tbl_name = '{name}'")
            };
            assert_eq!(ground.count(&indexes).await, 4, "{name}");
        }
    }

    async fn the_table_is_created_once_and_no_other_is_taken_for_it(ground: Ground) {
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..6 {
            let outbox: Outbox<Db> = Outbox::new(ground.another_pool().await).table("letters");
            tasks.spawn(async move { outbox.migrate().await });
        }
        for migrated in tasks.join_all().await {
            migrated.unwrap();
        }
        let outbox: Outbox<Db> = Outbox::new(ground.pool.clone()).table("letters");
        outbox.begin("r", charge_of(1)).await.unwrap();
        assert_eq!(ground.count("letters").await, 1);

        ground
            .run("CREATE TABLE foreign_one (reference text)")
            .await;
        let foreign: Outbox<Db> = Outbox::new(ground.pool.clone()).table("foreign_one");
        assert_eq!(
            foreign.migrate().await.unwrap_err().kind(),
            OutboxErrorKind::Database
        );

        // The statements that are shown do the same.
        let shown: Outbox<Db> = Outbox::new(ground.pool.clone()).table("by_hand");
        ground.run(shown.schema_sql()).await;
        shown.begin("r", charge_of(1)).await.unwrap();
        shown.migrate().await.unwrap();
        assert_eq!(ground.count("by_hand").await, 1);
    }

    async fn nothing_secret_shows_in_debug_output_and_errors(ground: Ground) {
        let secret = || {
            let name = HeaderName::from_static("x-token");
            Operation::post("http://pay.example/charges?card=s3cret".parse().unwrap())
                .header(name, HeaderValue::from_static("s3cret"))
                .body("s3cret")
                .key(IdempotencyKey::new("s3cret"))
        };
        let begun = ground.outbox.begin("s3cret", secret()).await.unwrap();
        ground.run("DROP TABLE idempotency_outbox").await;
        let error = ground.outbox.begin("s3cret", secret()).await.unwrap_err();
        let shown = format!(
            "{:?} {begun:?} {error:?} {error} {:?}",
            secret(),
            ground.relay()
        );
        assert!(!shown.contains("s3cret"), "{shown}");
    }
}

#[test]
fn of_a_request_only_the_headers_that_are_named_are_kept() {
    let request = Request::post("http://pay.example/charges")
        .header("content-type", "text/plain")
        .header("date", "today")
        .header("authorization", "Bearer t")
        .body(Bytes::from("7 baht"))
        .unwrap();
    let kept = Operation::from_request(request, [http::header::CONTENT_TYPE]);
    assert_eq!(kept, charge_of(7));
}

#[tokio::test]
async fn nonsense_panics_and_names_the_option() {
    let pool = sqlx::SqlitePool::connect_lazy("sqlite::memory:").unwrap();
    let outbox = move || Outbox::<sqlx::Sqlite>::new(pool.clone());
    let says = |option: &str, set: &dyn Fn()| {
        let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(set)).unwrap_err();
        let message = panic.downcast_ref::<String>().cloned();
        let message = message.unwrap_or_else(|| panic.downcast_ref::<&str>().unwrap().to_string());
        assert!(message.contains(option), "{message}");
    };
    says("table", &|| drop(outbox().table("x\"; DROP")));
    says("key_lifetime", &|| {
        drop(outbox().key_lifetime(Duration::ZERO))
    });
    says("margin", &|| drop(outbox().margin(Duration::ZERO)));
    says("margin", &|| {
        drop(outbox().margin(Duration::from_secs(86_400)))
    });
    says("key_lifetime", &|| {
        let outbox = outbox().margin(Duration::from_secs(60));
        drop(outbox.key_lifetime(Duration::from_secs(60)));
    });
    says("statement_timeout", &|| {
        let relay = tower_idempotency::client::Relay::new(
            outbox(),
            tower_idempotency::client::Retry::new(()),
        );
        drop(relay.clone().statement_timeout(Duration::ZERO));
    });
    // An attempt must not outlive the key.
    says("attempt_timeout", &|| {
        let outbox = outbox().key_lifetime(Duration::from_secs(60));
        let retry = tower_idempotency::client::Retry::new(());
        drop(tower_idempotency::client::Relay::new(outbox, retry));
    });
}

/// A table that another tenant's schema has, further down the search path.
#[cfg(feature = "postgres")]
#[tokio::test]
async fn the_table_is_that_of_its_own_schema() {
    let ground = crate::ground::postgres::Ground::new().await;
    let schema: String = sqlx::query_scalar("SELECT current_schema()::text")
        .fetch_one(&ground.pool)
        .await
        .unwrap();
    ground.run(&format!("CREATE SCHEMA \"{schema}_own\"")).await;
    let path = format!("\"{schema}_own\",\"{schema}\"");
    let options = (*ground.pool.connect_options()).clone();
    let options = options.options([("search_path", path)]);
    let pool = sqlx::PgPool::connect_with(options).await.unwrap();
    let own: Outbox<sqlx::Postgres> = Outbox::new(pool);
    own.migrate().await.unwrap();
    own.begin("r", charge_of(1)).await.unwrap();
    let there = ground.outbox.find("r").await.unwrap().is_some();
    ground
        .run(&format!("DROP SCHEMA \"{schema}_own\" CASCADE"))
        .await;
    assert!(!there);
}

/// A handler whose effect, record and following operation are committed together.
macro_rules! handler_in_tx {
    ($test:ident, $module:ident, $store:expr) => {
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $test() {
            use crate::ground::$module::{Db, Ground};
            let ground = Ground::new().await;
            ground.run("CREATE TABLE orders (number bigint)").await;
            let store = $store(&ground).await;
            let outbox = ground.outbox.clone();
            let handler = async move |mut tx: Tx<Db>, body: String| {
                sqlx::query("INSERT INTO orders VALUES (1)")
                    .execute(&mut tx)
                    .await?;
                let begun = outbox.begin_in(&mut tx, &body, charge_of(5)).await?;
                assert!(begun.is_new());
                // The second one is refused after all, and nothing of it stays.
                Ok::<_, OutboxError>(match &*body {
                    "order 1" => StatusCode::CREATED,
                    _ => StatusCode::UNPROCESSABLE_ENTITY,
                })
            };
            let layer = IdempotencyLayer::new(store).single_tenant().transactional();
            let app: Router = Router::new()
                .route("/orders", post(handler))
                .route_layer(layer);
            let order = |number: &str| {
                let request = Request::post("/orders").header("idempotency-key", number);
                app.clone()
                    .oneshot(request.body(Body::from(format!("order {number}"))).unwrap())
            };
            assert_eq!(order("1").await.unwrap().status(), StatusCode::CREATED);
            assert_eq!(
                order("2").await.unwrap().status(),
                StatusCode::UNPROCESSABLE_ENTITY
            );
            let replay = order("1").await.unwrap();
            assert_eq!(
                (
                    replay.status(),
                    replay.headers().contains_key("idempotent-replay")
                ),
                (StatusCode::CREATED, true)
            );

            assert_eq!(
                (
                    ground.count("orders").await,
                    ground.count("idempotency_outbox").await
                ),
                (1, 1)
            );
            let resumed = ground.relay().resume::<Body, _>(10).await.unwrap();
            assert_eq!(resumed.done[0].reference(), "order 1");
            assert_eq!(ground.shop.charges().len(), 1);
        }
    };
}

async fn sqlite_store(ground: &crate::ground::sqlite::Ground) -> tower_idempotency::SqliteStore {
    let file = sqlx::Row::get::<String, _>(
        &sqlx::query("PRAGMA database_list")
            .fetch_one(&ground.pool)
            .await
            .unwrap(),
        2,
    );
    tower_idempotency::SqliteStore::open(file).await.unwrap()
}

handler_in_tx!(
    a_handlers_effect_its_record_and_the_operation_that_follows_are_committed_together_in_sqlite,
    sqlite,
    sqlite_store
);

#[cfg(feature = "postgres")]
async fn postgres_store(
    ground: &crate::ground::postgres::Ground,
) -> tower_idempotency::PostgresStore {
    let options = tower_idempotency::PostgresStore::options().migrate();
    options.open(ground.pool.clone()).await.unwrap()
}

#[cfg(feature = "postgres")]
handler_in_tx!(
    a_handlers_effect_its_record_and_the_operation_that_follows_are_committed_together_in_postgres,
    postgres,
    postgres_store
);

//! Postgres likes to show the row it complains about. Nobody else may.

use std::error::Error;

use http::StatusCode;
use tower_idempotency::{
    Fingerprint, IdempotencyKey, PostgresStore, RecordId, Scope,
    store::{Checkpoints, ClaimRequest, Completion, Inspect, Store, StoreError, StoreErrorKind},
};

use super::common::*;
use crate::support::{database::Database, logs::Logs};

const SECRETS: [&str; 5] = [
    "tenant-4711",
    "key-0815",
    "card-4242",
    "step-value",
    "request-77",
];

fn secret_request() -> ClaimRequest {
    let id = RecordId::new(Scope::new(SECRETS[0]), IdempotencyKey::new(SECRETS[1]));
    let mut request = ClaimRequest::new(id, "test", Fingerprint::from_bytes([7; 32]));
    request.request_id = Some(SECRETS[4].into());
    request.lease = LONG;
    request
}

fn secret_answer() -> Completion {
    Completion::retained(StatusCode::CREATED, SECRETS[2].into())
}

/// As text, and as Postgres writes bytes.
#[track_caller]
fn assert_no_secret(text: &str) {
    for secret in SECRETS {
        let hex: String = secret.bytes().map(|byte| format!("{byte:02x}")).collect();
        assert!(
            !text.contains(secret) && !text.to_lowercase().contains(&hex),
            "{secret}: {text}"
        );
    }
}

/// Looks at all there is to see of an error, and of what is underneath.
#[track_caller]
fn assert_tells_no_secret(error: &StoreError) {
    assert_no_secret(&format!("{error} {error:?} {error:#?}"));
    let mut source = error.source();
    let mut depth = 0;
    while let Some(error) = source {
        assert_no_secret(&format!("{error} {error:?} {error:#?}"));
        source = error.source();
        depth += 1;
    }
    assert!(depth > 0, "nothing is underneath: {error:?}");
}

/// What an operator has done to the tables so that a row is refused, and with it all of its values shown.
const REFUSALS: [&str; 4] = [
    "ALTER TABLE idempotency_records ADD CHECK (scope = '') NOT VALID",
    "ALTER TABLE idempotency_records ADD COLUMN extra integer NOT NULL DEFAULT 0;
     ALTER TABLE idempotency_records ALTER COLUMN extra DROP DEFAULT",
    "CREATE UNIQUE INDEX ON idempotency_records (mode) WHERE state = 1 OR state = 2;
     INSERT INTO idempotency_records (scope, key, scheme, fingerprint, token, owner, attempt, mode, state,
         created, lease_until, run_until)
     VALUES ('', '', '', '', '', '', 1, 1, 1, now(), now(), now())",
    "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
     BEGIN RAISE EXCEPTION 'refused: % %', NEW.scope, convert_from(NEW.key, 'UTF8'); END $$;
     CREATE TRIGGER refuse BEFORE INSERT OR UPDATE ON idempotency_records
         FOR EACH ROW EXECUTE FUNCTION refuse()",
];

#[tokio::test]
async fn a_row_that_postgres_refuses_and_shows_is_shown_by_nobody_else() {
    let (logs, _guard) = Logs::of_this_thread();
    for refusal in REFUSALS {
        let database = Database::in_real_time();
        let store = open(database.pool()).await;
        let mut connection = database.connect().await;
        sql(&mut connection, refusal).await;
        let error = store.claim(secret_request()).await.expect_err(refusal);
        assert_tells_no_secret(&error);
    }
    // Now with an answer in it.
    for refusal in [
        "ALTER TABLE idempotency_records ADD CHECK (state <> 2)",
        REFUSALS[3],
    ] {
        let database = Database::in_real_time();
        let store = open(database.pool()).await;
        let ticket = win(&store, &secret_request()).await;
        let mut connection = database.connect().await;
        sql(&mut connection, refusal).await;
        let settled = store.complete(&ticket, secret_answer(), lifetimes()).await;
        assert_tells_no_secret(&settled.expect_err(refusal));
    }
    for event in logs.all() {
        assert_no_secret(&event.text);
    }
}

#[tokio::test]
async fn a_checkpoint_that_postgres_refuses_is_shown_by_nobody_else() {
    let database = Database::in_real_time();
    let store = open(database.pool()).await;
    let ticket = win(&store, &secret_request()).await;
    let mut connection = database.connect().await;
    sql(
        &mut connection,
        "ALTER TABLE idempotency_checkpoints ADD CHECK (name = '')",
    )
    .await;
    let saved = store.save(&ticket, "step", SECRETS[3].into()).await;
    assert_tells_no_secret(&failed(saved, StoreErrorKind::Invalid));
    let named = store.save(&ticket, "step-value\0", "".into()).await;
    assert_tells_no_secret(&failed(named, StoreErrorKind::Invalid));
}

/// Rows that were damaged by hand are complained about without their values.
#[tokio::test]
async fn a_damaged_record_is_an_error_that_shows_nothing_of_it() {
    for damage in [
        "state = 77",
        "mode = 9",
        "token = 'card-4242'",
        "fingerprint = 'card-4242'",
        "owner = 'card-4242'",
        "status = -1",
        "attempt = -1",
    ] {
        let database = Database::in_real_time();
        let store = open(database.pool()).await;
        let ticket = win(&store, &secret_request()).await;
        done(store.complete(&ticket, secret_answer(), lifetimes()).await);
        let mut connection = database.connect().await;
        sql(
            &mut connection,
            &format!("UPDATE idempotency_records SET {damage}"),
        )
        .await;
        let claim = store.claim(secret_request()).await;
        assert_tells_no_secret(&failed(claim, StoreErrorKind::Corrupt));
        let got = store.get(&ticket.id).await;
        assert_tells_no_secret(&failed(got, StoreErrorKind::Corrupt));
        // Neighbours of the damaged one are not concerned.
        let neighbours = [secret_request(), request("one"), request("two")];
        let mut claims = together(neighbours.map(|request| store.claim(request)))
            .await
            .into_iter();
        failed(claims.next().unwrap(), StoreErrorKind::Corrupt);
        claims.map(won).for_each(drop);
        // It can be got rid of.
        assert!(store.forget(&ticket.id).await.unwrap());
        assert_eq!(win(&store, &secret_request()).await.attempt, 1);
    }
}

#[tokio::test]
async fn a_password_is_shown_by_no_error_and_no_store() {
    const PASSWORD: &str = "s3cret-passw0rd";
    let (logs, _guard) = Logs::of_this_thread();
    let database = Database::in_real_time();
    let options = database.options().password(PASSWORD);
    let store = open(pool(options, 1)).await;
    assert!(!format!("{store:?} {store:#?}").contains(PASSWORD));
    for url in [
        format!("postgres://app:{PASSWORD}@127.0.0.1:1/payments"),
        format!("postgres://app:{PASSWORD}@127.0.0.1:port/payments"),
        format!("postgres://app:{PASSWORD}@["),
        format!("postgres://app:{PASSWORD}@127.0.0.1:1/payments?sslmode=no-such-mode"),
    ] {
        let options =
            PostgresStore::options().operation_timeout(std::time::Duration::from_millis(200));
        let error = options.connect(&url).await.expect_err("it is open");
        let mut shown = format!("{error} {error:?}");
        let mut source = error.source();
        while let Some(error) = source {
            shown += &format!(" {error} {error:?}");
            source = error.source();
        }
        assert!(!shown.contains(PASSWORD), "{shown}");
    }
    assert!(
        logs.all()
            .iter()
            .all(|event| !event.text.contains(PASSWORD))
    );
}

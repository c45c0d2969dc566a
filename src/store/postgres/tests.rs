//! The texts of the statements. What they do is for `tests/postgres.rs`, the conformance suite and
//! `tests/agreement.rs`.

use super::*;

mod joining;

fn names(schema: Option<&str>, prefix: &str) -> Names {
    Names {
        schema: schema.map(str::to_owned),
        prefix: prefix.to_owned(),
    }
}

#[test]
fn every_name_of_a_table_is_filled_in_once() {
    // A prefix that looks like a table's name must not be filled in again.
    let names = names(Some("pay"), "idempotency_owners");
    assert_eq!(
        names.fill("FROM idempotency_records r, idempotency_owners"),
        "FROM \"pay\".\"idempotency_owners_records\" r, \"pay\".\"idempotency_owners_owners\""
    );
}

#[test]
fn the_tables_can_be_had_as_sql_with_other_names() {
    let sql = PostgresStore::options().table_prefix("keys").schema_sql();
    assert!(sql.contains("CREATE TABLE \"keys_records\" ("), "{sql}");
    assert!(!sql.contains("idempotency_"), "{sql}");
    let sql = PostgresStore::options().schema("pay").schema_sql();
    assert!(sql.contains("CREATE TABLE \"pay\".\"idempotency_records\" ("));
}

#[test]
fn a_statement_for_one_record_takes_it_out_of_the_arrays() {
    let texts = Texts::of(&names(None, "idempotency"), Owner::random());
    for grown in [
        &texts.claim,
        &texts.take,
        &texts.settle,
        &texts.release,
        &texts.standing,
        &texts.renew,
    ] {
        let (one, many) = (grown.text(1), grown.text(2));
        assert!(many.as_str().contains("unnest("));
        assert!(!one.as_str().contains("unnest("), "{}", one.as_str());
        assert!(one.as_str().contains("1::bigint AS ord"));
    }
}

#[test]
fn a_statement_on_tables_that_have_doubled_is_planned_anew() {
    let texts = Texts::of(&names(None, "idempotency"), Owner::random());
    let mut seen = std::collections::HashSet::new();
    for _ in 0..1_000 {
        seen.insert(texts.claim.text(100).as_str().to_owned());
    }
    // At 512, and whenever it is twice as many again, up to 100 000.
    assert!((7..=9).contains(&seen.len()), "{} texts", seen.len());
}

#[test]
#[should_panic(expected = "schema must be 1 to 63 ASCII letters")]
fn a_schema_with_a_quote_panics() {
    let _ = PostgresStore::options().schema("pay\"; DROP SCHEMA public; --");
}

#[test]
#[should_panic(expected = "table_prefix must be 1 to 40 ASCII letters")]
fn a_prefix_that_begins_with_a_digit_panics() {
    let _ = PostgresStore::options().table_prefix("1st");
}

#[test]
#[should_panic(expected = "operation_timeout must be more than zero")]
fn an_operation_timeout_of_nothing_panics() {
    let _ = PostgresStore::options().operation_timeout(Duration::ZERO);
}

#[test]
fn without_a_runtime_opening_fails_instead_of_panicking() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let pool = runtime.block_on(async {
        PgPoolOptions::new()
            .connect_lazy("postgres://nobody@127.0.0.1:1/none")
            .unwrap()
    });
    let mut opening = std::pin::pin!(PostgresStore::open(pool));
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    let std::task::Poll::Ready(opened) = opening.as_mut().poll(&mut context) else {
        panic!("it waits for a runtime");
    };
    assert_eq!(opened.unwrap_err().kind(), StoreErrorKind::Unavailable);
}

#[test]
fn a_checkpoint_in_a_handlers_transaction_keeps_off_only_those_who_take_the_record() {
    let texts = Texts::of(&names(Some("pay"), "keys"), Owner::random());
    assert!(texts.save.as_str().contains(" FOR SHARE\n"));
    assert!(texts.join.as_str().contains(" FOR KEY SHARE\n"));
    assert!(!texts.join.as_str().starts_with(&*texts.tag));
    assert!(texts.join.as_str().contains("\"pay\".\"keys_records\""));
}

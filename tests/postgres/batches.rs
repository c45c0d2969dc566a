//! One operation that the database refuses, in a statement with many others.

use std::collections::HashMap;

use http::StatusCode;
use tower_idempotency::{
    PostgresStore, State,
    store::{Completion, Store, StoreErrorKind},
};

use super::common::*;
use crate::support::database::Database;

/// How many stand in a batch with the one that is refused.
const NEIGHBOURS: usize = 50;

/// The keys of the neighbours, and in their middle the one that is refused.
fn with_one_bad(bad: &str) -> Vec<String> {
    let mut all = keys("neighbour", NEIGHBOURS);
    all.insert(NEIGHBOURS / 2, bad.to_owned());
    all
}

fn assert_one_batch(store: &PostgresStore) {
    let largest = store.grouping().largest;
    assert!(
        largest > NEIGHBOURS as u64,
        "the largest batch had {largest} operations"
    );
}

// G1
#[tokio::test]
async fn a_claim_with_a_value_postgres_refuses_fails_alone() {
    let database = Database::in_real_time();
    let store = open(database.pool()).await;
    let all = with_one_bad("bad");
    let claims = all.iter().map(|key| {
        let mut claim = request(key);
        if key == "bad" {
            claim.scheme = "nul\0".into();
        }
        store.claim(claim)
    });
    for (key, claim) in all.iter().zip(together(claims).await) {
        match &**key {
            "bad" => drop(failed(claim, StoreErrorKind::Invalid)),
            _ => drop(won(claim)),
        }
    }
    assert_one_batch(&store);
    for key in &all {
        assert_eq!(get(&store, key).await.is_some(), key != "bad", "{key}");
    }
    // The key is as free as it was.
    let _ = win(&store, &request("bad")).await;
}

// G1: the id of a request comes from its client.
#[tokio::test]
async fn a_claim_with_a_request_id_postgres_refuses_fails_alone() {
    let database = Database::in_real_time();
    let store = open(database.pool()).await;
    let all = with_one_bad("bad");
    let claims = all.iter().map(|key| {
        let mut claim = request(key);
        claim.request_id = Some(if key == "bad" {
            "\0".into()
        } else {
            "r-1".into()
        });
        store.claim(claim)
    });
    for (key, claim) in all.iter().zip(together(claims).await) {
        match &**key {
            "bad" => drop(failed(claim, StoreErrorKind::Invalid)),
            _ => drop(won(claim)),
        }
    }
    assert_one_batch(&store);
}

/// How an operator may refuse what concerns the key `bad` or the status 418.
#[derive(Clone, Copy, Debug)]
enum Refusal {
    /// A constraint: SQLSTATE of class 23.
    Check,
    /// A trigger that raises with a code of class 23.
    CodedTrigger,
    /// A trigger that raises as most of them do, without a code.
    PlainTrigger,
}

impl Refusal {
    async fn of(self, database: &Database, operation: &str, condition: &str) {
        let mut connection = database.connect().await;
        let using = match self {
            Self::Check => {
                let check =
                    format!("ALTER TABLE idempotency_records ADD CHECK (NOT ({condition}))");
                return sql(&mut connection, &check.replace("row.", "")).await;
            }
            Self::CodedTrigger => "USING ERRCODE = 'check_violation'",
            Self::PlainTrigger => "",
        };
        let row = if operation == "DELETE" { "OLD" } else { "NEW" };
        let condition = condition.replace("row.", &format!("{row}."));
        let trigger = format!(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
             BEGIN
                 IF {condition} THEN RAISE EXCEPTION 'not this one' {using}; END IF;
                 RETURN {row};
             END $$;
             CREATE TRIGGER refuse BEFORE {operation} ON idempotency_records
                 FOR EACH ROW EXECUTE FUNCTION refuse()"
        );
        sql(&mut connection, &trigger).await;
    }
}

async fn a_refused_claim_fails_alone(refusal: Refusal) {
    let database = Database::in_real_time();
    let store = open(database.pool()).await;
    refusal.of(&database, "INSERT", "row.key = 'bad'").await;
    let all = with_one_bad("bad");
    let claims = all.iter().map(|key| store.claim(request(key)));
    for (key, claim) in all.iter().zip(together(claims).await) {
        match &**key {
            "bad" => drop(failed(claim, StoreErrorKind::Invalid)),
            _ => drop(won(claim)),
        }
    }
    assert_one_batch(&store);
}

// G1
#[tokio::test]
async fn a_claim_that_a_constraint_refuses_fails_alone() {
    a_refused_claim_fails_alone(Refusal::Check).await;
}

// G1
#[tokio::test]
async fn a_claim_that_a_trigger_refuses_with_a_code_fails_alone() {
    a_refused_claim_fails_alone(Refusal::CodedTrigger).await;
}

// G1
#[tokio::test]
async fn a_claim_that_a_trigger_refuses_fails_alone() {
    a_refused_claim_fails_alone(Refusal::PlainTrigger).await;
}

// G1: half of the neighbours are new, the other half are taken over as the refused one is.
#[tokio::test]
async fn a_take_over_that_is_refused_fails_alone() {
    let database = Database::in_real_time();
    let store = open(database.pool()).await;
    let all = with_one_bad("bad");
    let (old, new) = all.split_at(NEIGHBOURS / 2 + 1);
    let mut tokens = HashMap::new();
    for ticket in win_all(&store, old).await {
        done(store.abandon(&ticket).await);
        tokens.insert(ticket.id.clone(), ticket.token);
    }
    Refusal::Check
        .of(&database, "UPDATE", "row.key = 'bad' AND row.attempt > 1")
        .await;
    let claims = all.iter().map(|key| {
        let mut claim = request(key);
        claim.replaces = tokens.get(&claim.id).copied();
        store.claim(claim)
    });
    for (key, claim) in all.iter().zip(together(claims).await) {
        match &**key {
            "bad" => drop(failed(claim, StoreErrorKind::Invalid)),
            key => {
                let attempt = if new.iter().any(|new| new == key) {
                    1
                } else {
                    2
                };
                assert_eq!(won(claim).attempt, attempt, "{key}");
            }
        }
    }
    // Those that are new are answered before the others are looked at again.
    let largest = store.grouping().largest;
    assert!(
        largest > NEIGHBOURS as u64 / 2,
        "the largest batch had {largest} operations"
    );
    assert_eq!(get(&store, "bad").await.unwrap().state, State::Abandoned);
}

async fn a_refused_completion_fails_alone(refusal: Refusal) {
    let database = Database::in_real_time();
    let store = open(database.pool()).await;
    let all = with_one_bad("bad");
    let tickets = win_all(&store, &all).await;
    refusal.of(&database, "UPDATE", "row.status = 418").await;
    let completions = tickets.iter().map(|ticket| {
        let done = match ticket.id == id("bad") {
            true => Completion::tombstone(StatusCode::IM_A_TEAPOT),
            false => created(),
        };
        store.complete(ticket, done, lifetimes())
    });
    for (ticket, settled) in tickets.iter().zip(together(completions).await) {
        match ticket.id == id("bad") {
            true => drop(failed(settled, StoreErrorKind::Invalid)),
            false => done(settled),
        }
    }
    assert_one_batch(&store);
    for key in &all {
        let expected = if key == "bad" {
            State::Running
        } else {
            State::Completed
        };
        assert_eq!(get(&store, key).await.unwrap().state, expected, "{key}");
    }
    // The claim still stands, and may be completed in another way.
    let bad = &tickets[NEIGHBOURS / 2];
    done(store.complete(bad, created(), lifetimes()).await);
}

// G1
#[tokio::test]
async fn a_completion_that_a_constraint_refuses_fails_alone() {
    a_refused_completion_fails_alone(Refusal::Check).await;
}

// G1
#[tokio::test]
async fn a_completion_that_a_trigger_refuses_with_a_code_fails_alone() {
    a_refused_completion_fails_alone(Refusal::CodedTrigger).await;
}

// G1
#[tokio::test]
async fn a_completion_that_a_trigger_refuses_fails_alone() {
    a_refused_completion_fails_alone(Refusal::PlainTrigger).await;
}

async fn a_refused_release_fails_alone(refusal: Refusal) {
    let database = Database::in_real_time();
    let store = open(database.pool()).await;
    let all = with_one_bad("bad");
    let tickets = win_all(&store, &all).await;
    match refusal {
        // What a check is for an UPDATE, a row that refers to it is for a DELETE.
        Refusal::Check => {
            let mut connection = database.connect().await;
            let refer = "CREATE TABLE kept (scope bytea, key bytea,
                             FOREIGN KEY (scope, key) REFERENCES idempotency_records);
                         INSERT INTO kept SELECT scope, key FROM idempotency_records WHERE key = 'bad'";
            sql(&mut connection, refer).await;
        }
        _ => refusal.of(&database, "DELETE", "row.key = 'bad'").await,
    }
    let releases = tickets.iter().map(|ticket| store.release(ticket, DAY));
    for (ticket, settled) in tickets.iter().zip(together(releases).await) {
        match ticket.id == id("bad") {
            true => drop(failed(settled, StoreErrorKind::Invalid)),
            false => done(settled),
        }
    }
    assert_one_batch(&store);
    for key in &all {
        assert_eq!(get(&store, key).await.is_some(), key == "bad", "{key}");
    }
}

// G1
#[tokio::test]
async fn a_release_that_a_constraint_refuses_fails_alone() {
    a_refused_release_fails_alone(Refusal::Check).await;
}

// G1
#[tokio::test]
async fn a_release_that_a_trigger_refuses_with_a_code_fails_alone() {
    a_refused_release_fails_alone(Refusal::CodedTrigger).await;
}

// G1
#[tokio::test]
async fn a_release_that_a_trigger_refuses_fails_alone() {
    a_refused_release_fails_alone(Refusal::PlainTrigger).await;
}

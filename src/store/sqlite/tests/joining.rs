//! Checkpoints in transactions of others on the same file.

use sqlx::{Connection, SqliteConnection};

use super::*;
use crate::store::{
    MAX_CHECKPOINT_LEN, MAX_CHECKPOINTS,
    joining::{JoinError, sealed::Sealed},
};

fn joining<S: Checkpoints>(
    store: &S,
    ticket: &Ticket,
    name: &str,
    value: &str,
) -> crate::store::Joining {
    let value = Bytes::copy_from_slice(value.as_bytes());
    let joining = store.joining(ticket, name, value);
    joining.expect("it cannot").expect("it is refused")
}

/// What is saved under this ticket.
async fn saved<S: Checkpoints>(store: &S, ticket: &Ticket) -> Vec<(String, Bytes)> {
    let saved = store.load(ticket).await.unwrap().expect("it is lost");
    let pair = |one: Checkpoint| (one.name, one.value);
    saved.into_iter().map(pair).collect()
}

fn one(name: &str, value: &'static str) -> Vec<(String, Bytes)> {
    vec![(name.to_owned(), Bytes::from_static(value.as_bytes()))]
}

async fn run(connection: &mut SqliteConnection, statements: &'static str) {
    sqlx::raw_sql(statements).execute(connection).await.unwrap();
}

/// A store, a claim in it, and a connection of the service's own to the same file.
async fn three() -> (TempDir, SqliteStore, Ticket, SqliteConnection) {
    let (directory, path) = place();
    execute(&path, "CREATE TABLE effects (n INTEGER)").await;
    let store = SqliteStore::open(&path).await.unwrap();
    let ticket = win(&store, "k").await;
    let connection = other(&path).await;
    (directory, store, ticket, connection)
}

#[tokio::test]
async fn a_checkpoint_is_there_with_the_transaction_it_was_saved_in_and_gone_without() {
    let (_directory, store, ticket, mut connection) = three().await;
    for begin in ["BEGIN", "BEGIN IMMEDIATE"] {
        for commits in [false, true] {
            let before = saved(&store, &ticket).await;
            run(&mut connection, begin).await;
            run(&mut connection, "INSERT INTO effects VALUES (1)").await;
            let step = joining(&store, &ticket, begin, "done");
            assert_eq!(connection.save(step).await.unwrap(), Settled::Done);
            assert_eq!(
                saved(&store, &ticket).await,
                before,
                "seen before the commit"
            );
            run(&mut connection, if commits { "COMMIT" } else { "ROLLBACK" }).await;
            let there = saved(&store, &ticket).await.len() - before.len();
            assert_eq!(there, usize::from(commits), "{begin}");
        }
    }
    let effects: i64 = sqlx::query_scalar("SELECT count(*) FROM effects")
        .fetch_one(&mut connection)
        .await
        .unwrap();
    assert_eq!(effects, 2);
}

#[tokio::test]
async fn without_a_transaction_it_is_saved_at_once_and_the_same_name_is_replaced() {
    let (_directory, store, ticket, mut connection) = three().await;
    for value in ["1", "2"] {
        let step = joining(&store, &ticket, "step", value);
        assert_eq!(connection.save(step).await.unwrap(), Settled::Done);
    }
    assert_eq!(saved(&store, &ticket).await, one("step", "2"));
}

#[tokio::test]
async fn who_has_lost_its_claim_saves_nothing_and_its_transaction_goes_on() {
    let (_directory, store, ticket, mut connection) = three().await;
    assert_eq!(store.abandon(&ticket).await.unwrap(), Settled::Done);
    let abandoned = joining(&store, &ticket, "step", "late");
    assert_eq!(connection.save(abandoned).await.unwrap(), Settled::Lost);
    let hold = Duration::from_secs(600);
    let taken = store.take_over(&ticket.id, ticket.token, Token::random(), hold);
    let taken = taken.await.unwrap().unwrap();
    run(
        &mut connection,
        "BEGIN IMMEDIATE; INSERT INTO effects VALUES (1)",
    )
    .await;
    let late = joining(&store, &ticket, "step", "late");
    assert_eq!(connection.save(late).await.unwrap(), Settled::Lost);
    let step = joining(&store, &taken, "step", "found out");
    assert_eq!(connection.save(step).await.unwrap(), Settled::Done);
    run(&mut connection, "COMMIT").await;
    assert_eq!(saved(&store, &taken).await, one("step", "found out"));
    assert_eq!(complete(&store, &taken).await.unwrap(), Settled::Done);
    let over = joining(&store, &taken, "step", "late");
    assert_eq!(connection.save(over).await.unwrap(), Settled::Lost);
}

#[tokio::test]
async fn what_is_too_large_or_one_too_many_is_refused_and_the_transaction_goes_on() {
    let (_directory, store, ticket, mut connection) = three().await;
    let large = Bytes::from(vec![0; MAX_CHECKPOINT_LEN + 1]);
    for (name, value) in [("large", large), (&*"n".repeat(65), Bytes::new())] {
        let refused = store.joining(&ticket, name, value).expect("it cannot");
        let refused = refused.err().expect("it is not refused");
        assert_eq!(refused.kind(), StoreErrorKind::Invalid);
    }
    run(&mut connection, "BEGIN").await;
    for n in 0..MAX_CHECKPOINTS {
        let step = joining(&store, &ticket, &n.to_string(), "1");
        assert_eq!(connection.save(step).await.unwrap(), Settled::Done);
    }
    let more = joining(&store, &ticket, "more", "1");
    let refused = connection.save(more).await;
    assert!(
        matches!(&refused, Err(JoinError::Refused(error)) if error.kind() == StoreErrorKind::Invalid),
        "{refused:?}"
    );
    let known = joining(&store, &ticket, "7", "2");
    assert_eq!(connection.save(known).await.unwrap(), Settled::Done);
    run(&mut connection, "COMMIT").await;
    assert_eq!(saved(&store, &ticket).await.len(), MAX_CHECKPOINTS);
}

/// SQLite tells a transaction that has read what is no longer so, instead of letting it write.
#[tokio::test]
async fn a_transaction_that_read_an_older_file_is_told_so() {
    let (_directory, store, ticket, mut connection) = three().await;
    run(&mut connection, "BEGIN; SELECT count(*) FROM effects").await;
    assert_eq!(store.abandon(&ticket).await.unwrap(), Settled::Done);
    let step = joining(&store, &ticket, "step", "late");
    let refused = connection.save(step).await;
    // SQLITE_BUSY_SNAPSHOT
    let is_stale = matches!(&refused, Err(JoinError::Sql(error))
        if error.as_database_error().and_then(|error| error.code()).as_deref() == Some("517"));
    assert!(is_stale, "{refused:?}");
}

#[tokio::test]
async fn another_file_and_another_database_get_nothing() {
    let (_directory, store, ticket, mut connection) = three().await;
    let (_elsewhere, elsewhere) = closed_store().await;
    let mut wrong = other(&elsewhere).await;
    let step = joining(&store, &ticket, "step", "1");
    assert_eq!(wrong.save(step).await.unwrap(), Settled::Lost);
    let mut empty = SqliteConnection::connect("sqlite::memory:").await.unwrap();
    let step = joining(&store, &ticket, "step", "1");
    let refused = empty.save(step).await;
    assert!(matches!(refused, Err(JoinError::Sql(_))), "{refused:?}");

    let memory = crate::MemoryStore::new();
    assert!(memory.joining(&ticket, "step", Bytes::new()).is_none());
    store.close().await.unwrap();
    let closed = store.joining(&ticket, "step", Bytes::new());
    let closed = closed.expect("it cannot").err().expect("it is open");
    assert_eq!(closed.kind(), StoreErrorKind::Closed);
    run(&mut connection, "SELECT 1").await;
}

#[cfg(feature = "postgres")]
#[tokio::test]
async fn a_checkpoint_of_a_postgres_store_is_not_written_to_sqlite() {
    use crate::store::{Joining, joining::Kind, postgres};

    let (_directory, store, ticket, mut connection) = three().await;
    let foreign = postgres::Joining::example(&ticket);
    let refused = connection.save(Joining(Kind::Postgres(foreign))).await;
    assert!(
        matches!(refused, Err(JoinError::OtherDatabase)),
        "{refused:?}"
    );
    assert_eq!(saved(&store, &ticket).await, []);
}

#[cfg(feature = "sealing")]
#[tokio::test]
async fn a_sealed_store_seals_what_is_saved_in_a_transaction() {
    use crate::{AnyStore, SealedStore, SealingKeys};

    let (_directory, store, unhashed, mut connection) = three().await;
    assert!(store.forget(&unhashed.id).await.unwrap());
    let keys = SealingKeys::new("2026-12", [7; 32]).hash_ids([8; 32]);
    let sealed = SealedStore::open(store.clone(), keys).await.unwrap();
    // Through everything that wraps a store.
    let sealed = AnyStore::new(sealed);
    let Claim::Won(ticket) = sealed.claim(request("secret")).await.unwrap() else {
        panic!("not won");
    };
    let step = joining(&sealed, &ticket, "step", "s3cret");
    assert_eq!(connection.save(step).await.unwrap(), Settled::Done);
    assert_eq!(saved(&sealed, &ticket).await, one("step", "s3cret"));
    let stored = Ticket {
        id: sealed.stored_id(&ticket.id),
        ..ticket.clone()
    };
    assert_ne!(stored.id, ticket.id);
    let below = saved(&store, &stored).await;
    let shown = String::from_utf8_lossy(&below[0].1).into_owned();
    assert!(!shown.contains("s3cret"), "{shown}");
    let large = Bytes::from(vec![0; MAX_CHECKPOINT_LEN + 1]);
    let refused = sealed.joining(&ticket, "large", large).expect("it cannot");
    assert_eq!(
        refused.err().expect("it is not refused").kind(),
        StoreErrorKind::Invalid
    );
}

//! Checkpoints in transactions of others on the same server.

use std::time::Duration;

use http::StatusCode;
use sqlx::{AssertSqlSafe, Connection, PgConnection};
use tokio::time::timeout;

use super::super::*;
use crate::{
    IdempotencyKey,
    record::Fingerprint,
    store::joining::{JoinError, Kind, sealed::Sealed},
};

const LONG: Duration = Duration::from_secs(600);

/// Long before anything would give up waiting.
async fn soon<F: Future>(future: F) -> F::Output {
    let limit = Duration::from_secs(1);
    timeout(limit, future).await.expect("it waits")
}

fn id(key: &str) -> RecordId {
    RecordId::new(Scope::shared(), IdempotencyKey::new(key))
}

fn request(id: &RecordId) -> ClaimRequest {
    ClaimRequest::new(id.clone(), "test", Fingerprint::from_bytes([7; 32]))
}

/// A store with tables of its own, which a connection of the service does not find by itself.
struct Place {
    store: PostgresStore,
    service: PgConnection,
    schema: String,
}

impl Place {
    async fn new() -> Self {
        let url = std::env::var("DATABASE_URL").expect("DATABASE_URL names no Postgres server");
        let schema = format!("joining_{:032x}", rand::random::<u128>());
        let options = PostgresStore::options().schema(&schema).migrate();
        Self {
            store: options.connect(&url).await.unwrap(),
            service: PgConnection::connect(&url).await.unwrap(),
            schema,
        }
    }

    async fn run(&mut self, statements: &str) {
        let run = sqlx::raw_sql(AssertSqlSafe(statements.to_owned()));
        run.execute(&mut self.service).await.unwrap();
    }

    async fn win(&self, key: &str) -> Ticket {
        self.claim(request(&id(key))).await
    }

    async fn claim(&self, request: ClaimRequest) -> Ticket {
        match self.store.claim(request).await.unwrap() {
            Claim::Won(ticket) => ticket,
            other => panic!("not won: {other:?}"),
        }
    }

    async fn save(&mut self, ticket: &Ticket, name: &str) -> Result<Settled, JoinError> {
        let value = Bytes::from_static(b"done");
        let joining = self.store.joining(ticket, name, value);
        let joining = joining.expect("it cannot").expect("it is refused");
        self.service.save(joining).await
    }

    async fn saved(&self, ticket: &Ticket) -> Vec<String> {
        let saved = self.store.load(ticket).await.unwrap().expect("it is lost");
        saved.into_iter().map(|saved| saved.name).collect()
    }

    async fn take_over(&self, late: &Ticket) -> Option<Ticket> {
        let taken = self
            .store
            .take_over(&late.id, late.token, Token::random(), LONG);
        soon(taken).await.unwrap()
    }

    async fn end(mut self) {
        self.store.close().await.unwrap();
        let drop = format!("DROP SCHEMA {} CASCADE", self.schema);
        self.run(&drop).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_checkpoint_is_there_with_the_transaction_it_was_saved_in_and_gone_without() {
    let mut place = Place::new().await;
    for level in ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"] {
        let ticket = place.win(level).await;
        let begin = format!("BEGIN ISOLATION LEVEL {level}");
        for (name, commits) in [("gone", false), ("there", true)] {
            place.run(&begin).await;
            assert_eq!(place.save(&ticket, name).await.unwrap(), Settled::Done);
            assert!(
                place.saved(&ticket).await.is_empty(),
                "seen before the commit"
            );
            place.run(if commits { "COMMIT" } else { "ROLLBACK" }).await;
        }
        assert_eq!(place.saved(&ticket).await, ["there"], "{level}");
    }
    place.end().await;
}

// L3
#[tokio::test(flavor = "multi_thread")]
async fn who_has_lost_its_claim_saves_nothing_and_its_transaction_goes_on() {
    let mut place = Place::new().await;
    let late = place.win("k").await;
    place.run("BEGIN").await;
    assert_eq!(place.store.abandon(&late).await.unwrap(), Settled::Done);
    assert_eq!(place.save(&late, "late").await.unwrap(), Settled::Lost);
    let taken = place.take_over(&late).await.expect("it is abandoned");
    assert_eq!(place.save(&late, "late").await.unwrap(), Settled::Lost);
    assert_eq!(place.save(&taken, "asked").await.unwrap(), Settled::Done);
    place.run("COMMIT").await;
    assert_eq!(place.saved(&taken).await, ["asked"]);
    place.end().await;
}

/// Until the transaction ends nobody takes the record over, nor forgets it: what it saves is its owner's. The
/// owner itself goes on.
#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_that_has_saved_keeps_others_off_and_its_own_run_goes_on() {
    let mut place = Place::new().await;
    let ticket = place.win("k").await;
    place.run("BEGIN").await;
    assert_eq!(place.save(&ticket, "step").await.unwrap(), Settled::Done);

    let store = place.store.clone();
    let renewed = soon(store.renew(std::slice::from_ref(&ticket), LONG)).await;
    assert_eq!(renewed.unwrap(), [Settled::Done]);
    let other = soon(store.save(&ticket, "other", Bytes::new())).await;
    assert_eq!(other.unwrap(), Settled::Done);
    let abandoned = soon(store.abandon(&ticket)).await;
    assert_eq!(abandoned.unwrap(), Settled::Done);
    assert_eq!(place.take_over(&ticket).await, None);
    let forgotten = timeout(Duration::from_millis(100), store.forget(&ticket.id)).await;
    assert!(forgotten.is_err(), "it was forgotten: {forgotten:?}");
    place.run("COMMIT").await;
    // Whoever dropped it has asked for it all the same.
    let deadline = std::time::Instant::now() + Duration::from_secs(5);
    while store.get(&ticket.id).await.unwrap().is_some() {
        assert!(std::time::Instant::now() < deadline, "it is not forgotten");
        tokio::task::yield_now().await;
    }

    let ticket = place.win("taken").await;
    place.run("BEGIN").await;
    assert_eq!(place.save(&ticket, "step").await.unwrap(), Settled::Done);
    assert_eq!(store.abandon(&ticket).await.unwrap(), Settled::Done);
    assert_eq!(place.take_over(&ticket).await, None);
    place.run("COMMIT").await;
    let taken = place.take_over(&ticket).await.expect("it is abandoned");
    assert_eq!(place.saved(&taken).await, ["step"]);

    let ticket = place.win("completed").await;
    place.run("BEGIN").await;
    assert_eq!(place.save(&ticket, "step").await.unwrap(), Settled::Done);
    let done = Completion::tombstone(StatusCode::OK);
    let completed = soon(store.complete(&ticket, done, Lifetimes::new(LONG))).await;
    assert_eq!(completed.unwrap(), Settled::Done);
    place.run("COMMIT").await;
    place.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_checkpoint_too_many_is_refused_and_the_transaction_goes_on() {
    let mut place = Place::new().await;
    let ticket = place.win("k").await;
    let large = Bytes::from(vec![0; crate::store::MAX_CHECKPOINT_LEN + 1]);
    let refused = place.store.joining(&ticket, "large", large);
    let refused = refused.expect("it cannot").err().expect("it is kept");
    assert_eq!(refused.kind(), StoreErrorKind::Invalid);
    place.run("BEGIN").await;
    for n in 0..MAX_CHECKPOINTS {
        let saved = place.save(&ticket, &n.to_string()).await;
        assert_eq!(saved.unwrap(), Settled::Done);
    }
    let refused = place.save(&ticket, "more").await;
    assert!(
        matches!(&refused, Err(JoinError::Refused(error)) if error.kind() == StoreErrorKind::Invalid),
        "{refused:?}"
    );
    assert_eq!(place.save(&ticket, "7").await.unwrap(), Settled::Done);
    place.run("COMMIT").await;
    assert_eq!(place.saved(&ticket).await.len(), MAX_CHECKPOINTS);
    place.end().await;
}

/// How a record may come into other hands.
#[derive(Debug, Clone, Copy)]
enum Taken {
    Held,
    RunAgain,
    Released,
    Forgotten,
}

impl Place {
    async fn take(&self, late: &Ticket, how: Taken, gives_up: bool) {
        let store = &self.store;
        if gives_up {
            assert_eq!(store.abandon(late).await.unwrap(), Settled::Done);
        }
        match how {
            Taken::Held => assert!(self.take_over(late).await.is_some()),
            Taken::RunAgain => {
                let mut request = request(&late.id);
                request.replaces = Some(late.token);
                let claim = store.claim(request).await.unwrap();
                assert!(matches!(claim, Claim::Won(_)), "{claim:?}");
            }
            Taken::Released => {
                assert_eq!(store.release(late, LONG).await.unwrap(), Settled::Done);
            }
            Taken::Forgotten => assert!(store.forget(&late.id).await.unwrap()),
        }
    }
}

/// A transaction that sees an older state is not let in by what it sees: it fails, with the code of a
/// conflict, by which it is begun again.
// L3, N6
#[tokio::test(flavor = "multi_thread")]
async fn who_has_lost_its_claim_since_its_transaction_began_is_told_so_by_a_conflict() {
    let mut place = Place::new().await;
    let mut n = 0;
    for level in ["REPEATABLE READ", "SERIALIZABLE"] {
        for how in [
            Taken::Held,
            Taken::RunAgain,
            Taken::Released,
            Taken::Forgotten,
        ] {
            for gives_up in [true, false] {
                n += 1;
                let mut lapsed = request(&id(&format!("k-{n}")));
                lapsed.lease = Duration::ZERO;
                let ticket = place.claim(lapsed).await;
                let begin = format!("BEGIN ISOLATION LEVEL {level}; SELECT 1");
                place.run(&begin).await;
                place.take(&ticket, how, gives_up).await;
                let refused = place.save(&ticket, "late").await;
                let is_conflict = matches!(&refused, Err(JoinError::Sql(error))
                    if error.as_database_error().and_then(|error| error.code()).as_deref() == Some("40001"));
                assert!(is_conflict, "{level}, {how:?}, {gives_up}: {refused:?}");
                place.run("ROLLBACK").await;
            }
        }
    }
    place.end().await;
}

/// A release whose claim is in doubt waits for the statements of its store that were given up. A handler
/// that does something else after it has saved is none of them.
#[tokio::test(flavor = "multi_thread")]
async fn an_open_transaction_is_not_taken_for_a_statement_of_the_store() {
    let mut place = Place::new().await;
    let ticket = place.win("k").await;
    place.run("BEGIN").await;
    assert_eq!(place.save(&ticket, "step").await.unwrap(), Settled::Done);
    let instance = &place.store.0.instance;
    let mut session = Session::new(instance.clone());
    let tag = instance.texts.tag.clone();
    let given_up = session
        .run(instance.texts.given_up.clone(), |query| query.bind(&*tag))
        .await;
    assert!(given_up.unwrap().rows.is_empty());
    place.run("ROLLBACK").await;
    place.end().await;
}

#[cfg(feature = "sqlite")]
#[tokio::test(flavor = "multi_thread")]
async fn a_checkpoint_of_an_sqlite_store_is_not_written_to_postgres() {
    let mut place = Place::new().await;
    let ticket = place.win("k").await;
    let foreign = crate::store::sqlite::Joining::example(&ticket);
    let joining = crate::store::Joining(Kind::Sqlite(foreign));
    let refused = place.service.save(joining).await;
    assert!(
        matches!(refused, Err(JoinError::OtherDatabase)),
        "{refused:?}"
    );
    assert!(place.saved(&ticket).await.is_empty());
    place.end().await;
}

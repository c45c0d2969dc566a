//! Rows that another session has locked.

use std::time::Duration;

use sqlx::PgConnection;
use tokio::{
    task::JoinSet,
    time::{sleep, timeout},
};
use tower_idempotency::{
    PostgresStore, State,
    store::{Checkpoints, Claim, Inspect, Settled, Store, StoreError, StoreErrorKind, Ticket},
};

use super::common::*;
use crate::support::database::Database;

/// For how long the other session holds a row.
const HELD: Duration = Duration::from_secs(2);

/// What "at once" means while a row is held.
const AT_ONCE: Duration = Duration::from_millis(500);

/// What another session has done to a row in a transaction that it keeps open.
#[derive(Debug, Clone, Copy)]
enum Hold {
    Update,
    ForUpdate,
    Delete,
}

impl Hold {
    /// Locks the records whose keys begin with `held`, and answers with the open transaction.
    async fn rows(self, database: &Database) -> PgConnection {
        let mut connection = database.connect().await;
        let held = "idempotency_records WHERE convert_from(key, 'UTF8') LIKE 'held%'";
        let locks = match self {
            Self::Update => {
                let (table, condition) = held.split_once(' ').unwrap();
                format!("UPDATE {table} SET attempt = attempt {condition}")
            }
            Self::ForUpdate => format!("SELECT FROM {held} FOR UPDATE"),
            Self::Delete => format!("DELETE FROM {held}"),
        };
        sql(&mut connection, &format!("BEGIN; {locks}")).await;
        connection
    }
}

/// Keys that no other session has locked, claimed to be completed, released and abandoned.
struct Neighbours {
    store: PostgresStore,
    complete: Vec<Ticket>,
    release: Vec<Ticket>,
    abandon: Vec<Ticket>,
}

impl Neighbours {
    async fn of(store: &PostgresStore) -> Self {
        Self {
            store: store.clone(),
            complete: win_all(store, &keys("to-complete", 30)).await,
            release: win_all(store, &keys("to-release", 30)).await,
            abandon: win_all(store, &keys("to-abandon", 30)).await,
        }
    }

    /// Everything is asked of them in one moment, and must be answered at once.
    async fn assert_undelayed(&self) {
        let store = &self.store;
        let new = keys("new", 30);
        let asking = async {
            let claims = together(new.iter().map(|key| store.claim(request(key))));
            let completions = self.complete.iter();
            let completions =
                completions.map(|ticket| store.complete(ticket, created(), lifetimes()));
            let releases = self.release.iter().map(|ticket| store.release(ticket, DAY));
            let abandons = self.abandon.iter().map(|ticket| store.abandon(ticket));
            tokio::join!(
                timed(claims),
                timed(together(completions)),
                timed(together(releases)),
                timed(together(abandons)),
                timed(store.renew(&self.abandon, LONG)),
            )
        };
        let asked = timeout(HELD + Duration::from_secs(8), asking).await;
        let (claims, completions, releases, abandons, renewal) = asked.expect("they hang");
        let took = [claims.1, completions.1, releases.1, abandons.1, renewal.1];
        assert!(
            took.iter().all(|took| *took < AT_ONCE),
            "claims, completions, releases, abandons and a renewal took {took:?}"
        );
        claims.0.into_iter().map(won).for_each(drop);
        completions.0.into_iter().for_each(done);
        releases.0.into_iter().for_each(done);
        abandons.0.into_iter().for_each(done);
        assert_eq!(renewal.0.unwrap().len(), 30);
    }
}

async fn a_held_row_delays_nobody_else(hold: Hold) {
    let database = Database::in_real_time();
    let (store, owner) = (open(database.pool()).await, open(database.pool()).await);
    let mine = win(&store, &request("held-mine")).await;
    let left = win(&store, &request("held-left")).await;
    let running = win(&owner, &request("held-running")).await;
    let finished = win(&owner, &request("held-completed")).await;
    done(owner.complete(&finished, created(), lifetimes()).await);
    let gone = win(&owner, &request("held-abandoned")).await;
    done(owner.abandon(&gone).await);
    let neighbours = Neighbours::of(&store).await;

    let mut other = hold.rows(&database).await;
    let ends = tokio::spawn(async move {
        sleep(HELD).await;
        sql(&mut other, "ROLLBACK").await;
    });
    // What must write to the row waits for the lock.
    let waiting = {
        let store = store.clone();
        tokio::spawn(timed(async move {
            tokio::join!(
                store.complete(&mine, created(), lifetimes()),
                store.abandon(&left)
            )
        }))
    };
    neighbours.assert_undelayed().await;

    // A claim on a held key is answered by what is committed.
    let found = timed(async {
        tokio::join!(
            store.claim(request("held-running")),
            store.claim(request("held-completed")),
            store.claim(request("held-abandoned")),
        )
    });
    let (found, took) = found.await;
    assert!(took < AT_ONCE, "{hold:?}: it took {took:?}");
    assert_eq!(in_flight(found.0).token, running.token);
    assert_eq!(completed(found.1).response, created().response);
    assert_eq!(abandoned(found.2).token, gone.token);

    // Newcomers are not delayed either, nor in the other instance.
    let mut slowest = Duration::ZERO;
    let mut newcomers = 0;
    while !ends.is_finished() {
        for store in [&store, &owner] {
            let key = format!("newcomer-{newcomers}");
            let life = async {
                let ticket = win(store, &request(&key)).await;
                done(store.complete(&ticket, created(), lifetimes()).await);
            };
            slowest = slowest.max(timed(life).await.1);
            newcomers += 1;
        }
    }
    assert!(newcomers > 10, "only {newcomers} claims in {HELD:?}");
    assert!(slowest < AT_ONCE, "{hold:?}: a newcomer waited {slowest:?}");
    ends.await.unwrap();

    let ((settled, left), took) = waiting.await.unwrap();
    done(settled);
    done(left);
    assert!(
        took < HELD + AT_ONCE,
        "{hold:?}: it was noticed after {took:?}"
    );
    assert!(
        took > HELD - AT_ONCE,
        "{hold:?}: nothing was held, it took {took:?}"
    );
    assert_eq!(
        get(&store, "held-mine").await.unwrap().state,
        State::Completed
    );
    assert_eq!(
        get(&store, "held-left").await.unwrap().state,
        State::Abandoned
    );
    done(owner.complete(&running, created(), lifetimes()).await);
}

// G4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_row_that_another_session_updates_delays_nobody_else() {
    a_held_row_delays_nobody_else(Hold::Update).await;
}

// G4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_row_that_another_session_selects_for_update_delays_nobody_else() {
    a_held_row_delays_nobody_else(Hold::ForUpdate).await;
}

// G4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_row_that_another_session_deletes_delays_nobody_else() {
    a_held_row_delays_nobody_else(Hold::Delete).await;
}

/// Something that has to write to a held row, and so to wait, stands first in its queue.
async fn delays_nobody_behind_it<T, F>(wait: impl FnOnce(PostgresStore, Ticket) -> F) -> T
where
    T: Send + 'static,
    F: Future<Output = T> + Send + 'static,
{
    let database = Database::in_real_time();
    let store = open(database.pool()).await;
    let ticket = win(&store, &request("held")).await;
    let neighbours = Neighbours::of(&store).await;
    let mut other = Hold::ForUpdate.rows(&database).await;
    let waiting = tokio::spawn(wait(store.clone(), ticket));
    // It has been tried in vain by then.
    sleep(Duration::from_millis(100)).await;
    assert!(!waiting.is_finished(), "it does not wait");
    neighbours.assert_undelayed().await;
    assert!(!waiting.is_finished(), "it does not wait");
    sql(&mut other, "ROLLBACK").await;
    let waited = timeout(AT_ONCE, waiting).await;
    waited.expect("the end of the lock is not noticed").unwrap()
}

// G4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_completion_that_waits_for_its_row_delays_nobody_behind_it() {
    let settled = delays_nobody_behind_it(|store, ticket| async move {
        store.complete(&ticket, created(), lifetimes()).await
    });
    done(settled.await);
}

// G4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_that_waits_for_its_row_delays_nobody_behind_it() {
    let settled =
        delays_nobody_behind_it(|store, ticket| async move { store.release(&ticket, DAY).await });
    done(settled.await);
}

// G4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_forget_that_waits_for_its_row_delays_nobody_behind_it() {
    let forgotten =
        delays_nobody_behind_it(|store, ticket| async move { store.forget(&ticket.id).await });
    assert!(forgotten.await.unwrap());
}

// G4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_take_over_that_waits_for_its_row_delays_nobody_behind_it() {
    let database = Database::in_real_time();
    let store = open(database.pool()).await;
    let gone = win(&store, &request("held")).await;
    done(store.abandon(&gone).await);
    let neighbours = Neighbours::of(&store).await;
    let mut other = Hold::ForUpdate.rows(&database).await;
    let waiting = {
        let (store, taker) = (store.clone(), replacing("held", gone.token));
        tokio::spawn(async move { store.claim(taker).await })
    };
    sleep(Duration::from_millis(100)).await;
    neighbours.assert_undelayed().await;
    assert!(!waiting.is_finished(), "it does not wait");
    sql(&mut other, "ROLLBACK").await;
    let waited = timeout(AT_ONCE, waiting).await;
    let taken = waited.expect("the end of the lock is not noticed").unwrap();
    assert_eq!(won(taken).attempt, 2);
}

// G4: what the other session did is committed in the end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_waits_for_a_lock_is_decided_by_what_is_committed_then() {
    let database = Database::in_real_time();
    let (store, observer) = (open(database.pool()).await, open(database.pool()).await);
    let [finished, given, left, renewed] = ["held-1", "held-2", "held-3", "held-4"].map(request);
    let finished = win(&store, &finished).await;
    let given = win(&store, &given).await;
    let left = win(&store, &left).await;
    let renewed = win(&store, &renewed).await;
    let mut other = Hold::Delete.rows(&database).await;
    let waiting = {
        let store = store.clone();
        tokio::spawn(async move {
            let settled = tokio::join!(
                store.complete(&finished, created(), lifetimes()),
                store.release(&given, DAY),
                store.abandon(&left),
            );
            (settled, store.renew(&[renewed], LONG).await)
        })
    };
    // Until then it is as it was, for everybody.
    for key in ["held-1", "held-2", "held-3", "held-4"] {
        let claim = timeout(AT_ONCE, observer.claim(request(key))).await;
        in_flight(claim.expect("it waits for the lock"));
    }
    for key in ["held-1", "held-3", "held-4"] {
        let claim = timeout(AT_ONCE, store.claim(request(key))).await;
        in_flight(claim.expect("it waits for the lock"));
    }
    assert!(!waiting.is_finished());
    sql(&mut other, "COMMIT").await;
    let ((finished, given, left), renewed) = waiting.await.unwrap();
    lost(finished);
    lost(given);
    lost(left);
    assert_eq!(renewed.unwrap(), [Settled::Lost]);
    assert_eq!(win(&store, &request("held-1")).await.attempt, 1);
}

// G4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_that_is_never_given_back_ends_in_an_error_that_names_it() {
    let database = Database::in_real_time();
    let store = open(database.pool()).await;
    let ticket = win(&store, &request("held")).await;
    let mut other = Hold::ForUpdate.rows(&database).await;
    let completion = store.complete(&ticket, created(), lifetimes());
    let (settled, took) = timed(timeout(Duration::from_secs(20), completion)).await;
    let error = failed(
        settled.expect("it waits for ever"),
        StoreErrorKind::Unavailable,
    );
    assert!(error.to_string().contains("locked"), "{error}");
    assert!(took > Duration::from_secs(2), "it gave up after {took:?}");
    assert!(took < Duration::from_secs(8), "it gave up after {took:?}");
    // Nothing is wrong with the store, nor with the claim.
    let _ = win(&store, &request("another")).await;
    sql(&mut other, "ROLLBACK").await;
    done(store.complete(&ticket, created(), lifetimes()).await);
}

// G4: neither does a checkpoint keep a completion from others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn saving_checkpoints_and_completing_others_do_not_wait_for_each_other() {
    let database = Database::in_real_time();
    let store = open(database.pool()).await;
    let tickets = win_all(&store, &keys("k", 30)).await;
    let held = win(&store, &request("held")).await;
    let mut other = Hold::ForUpdate.rows(&database).await;
    let saving = {
        let (store, held) = (store.clone(), held.clone());
        tokio::spawn(async move { store.save(&held, "step", "value".into()).await })
    };
    let mut waiters = database.connect().await;
    let waits = format!(
        "SELECT count(*) = 1 FROM pg_stat_activity
         WHERE application_name = '{}' AND wait_event_type = 'Lock'",
        database.schema()
    );
    becomes_true(&mut waiters, &waits).await;
    let completions = tickets
        .iter()
        .map(|ticket| store.complete(ticket, created(), lifetimes()));
    let (completions, took) = timed(together(completions)).await;
    assert!(took < AT_ONCE, "it took {took:?}");
    completions.into_iter().for_each(done);
    sql(&mut other, "ROLLBACK").await;
    done(saving.await.unwrap());
    done(store.complete(&held, created(), lifetimes()).await);
}

/// A row with this key as another instance of the store would write it.
fn insert(key: &str, state: &str) -> String {
    format!(
        "INSERT INTO idempotency_records (scope, key, scheme, fingerprint, token, owner, attempt, mode,
             state, created, lease_until, run_until, completed, expires, status)
         SELECT '', '{key}', 'test', decode(repeat('07', 32), 'hex'), decode(repeat('01', 16), 'hex'),
             decode(repeat('02', 16), 'hex'), 1, 1, {state}, now, now + interval '1 hour',
             now + interval '1 hour', CASE {state} WHEN 2 THEN now END,
             CASE {state} WHEN 2 THEN now + interval '1 day' END, CASE {state} WHEN 2 THEN 201 END
         FROM (SELECT clock_timestamp() AS now) clock"
    )
}

/// An open INSERT must be waited for: nobody knows before its end whether the key is free.
async fn a_key_that_another_session_inserts(
    state: &str,
    end: &str,
) -> Vec<Result<Claim, StoreError>> {
    let database = Database::in_real_time();
    let store = open(database.pool()).await;
    let mut other = database.connect().await;
    sql(&mut other, &format!("BEGIN; {}", insert("k", state))).await;
    let mut claims = JoinSet::new();
    for _ in 0..32 {
        let store = store.clone();
        claims.spawn(async move { store.claim(request("k")).await });
    }
    sleep(Duration::from_millis(300)).await;
    assert!(claims.try_join_next().is_none(), "it did not wait");
    sql(&mut other, end).await;
    let answers = timeout(Duration::from_secs(2), claims.join_all()).await;
    answers.expect("it did not notice the end")
}

// C8
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_that_another_session_inserts_is_in_flight_after_its_commit() {
    for claim in a_key_that_another_session_inserts("1", "COMMIT").await {
        assert_eq!(in_flight(claim).token.as_bytes(), &[1; 16]);
    }
}

// C8
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_that_another_session_inserts_completed_is_replayed_after_its_commit() {
    for claim in a_key_that_another_session_inserts("2", "COMMIT").await {
        assert_eq!(completed(claim).status.unwrap(), 201);
    }
}

// C8
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_that_another_session_inserts_is_won_after_its_rollback() {
    let claims = a_key_that_another_session_inserts("1", "ROLLBACK").await;
    let (winners, others): (Vec<_>, Vec<_>) = claims
        .into_iter()
        .partition(|claim| matches!(claim, Ok(Claim::Won(_))));
    assert_eq!(winners.len(), 1);
    for other in others {
        in_flight(other);
    }
}

// C8: a batch that meets the open INSERT is late, but none of it fails or is forgotten.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_open_insert_of_one_key_fails_no_other_key() {
    let database = Database::in_real_time();
    let store = open(database.pool()).await;
    let mut other = database.connect().await;
    sql(&mut other, &format!("BEGIN; {}", insert("middle-9", "1"))).await;
    let waiting = {
        let store = store.clone();
        tokio::spawn(async move {
            win_all(&store, &[keys("early", 20), keys("late", 20)].concat()).await
        })
    };
    let inserted = {
        let store = store.clone();
        tokio::spawn(async move { store.claim(request("middle-9")).await })
    };
    sleep(Duration::from_millis(300)).await;
    sql(&mut other, "COMMIT").await;
    assert_eq!(waiting.await.unwrap().len(), 40);
    in_flight(inserted.await.unwrap());
}

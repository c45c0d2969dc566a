//! Answers that come when somebody else has settled the operation, or when their end cannot be recorded.

use std::{
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{body::Body, response::IntoResponse};
use http::{Request, Response, StatusCode};
use tokio::{
    sync::Semaphore,
    time::{sleep, timeout},
};
use tower::{service_fn, util::BoxCloneSyncService};
use tower_idempotency::client::{EntryState, Outbox, Outcome, Relay, RetryLayer, Undelivered};
use tower_layer::Layer;

use crate::ground::{both, charge_of};

/// A server that keeps its first request waiting, and answers all others at once.
#[derive(Clone)]
struct Server {
    requests: Arc<AtomicUsize>,
    gate: Arc<Semaphore>,
    first: fn() -> Response<Body>,
    others: fn() -> Response<Body>,
}

impl Server {
    fn new(first: fn() -> Response<Body>, others: fn() -> Response<Body>) -> Self {
        Self {
            requests: Arc::default(),
            gate: Arc::new(Semaphore::new(0)),
            first,
            others,
        }
    }

    fn client(&self) -> BoxCloneSyncService<Request<Body>, Response<Body>, Infallible> {
        let server = self.clone();
        BoxCloneSyncService::new(service_fn(move |_: Request<Body>| {
            let is_first = server.requests.fetch_add(1, Ordering::SeqCst) == 0;
            let server = server.clone();
            async move {
                if !is_first {
                    return Ok((server.others)());
                }
                server.gate.acquire().await.unwrap().forget();
                Ok((server.first)())
            }
        }))
    }

    async fn is_asked(&self) {
        let asked = async {
            while self.requests.load(Ordering::SeqCst) == 0 {
                sleep(Duration::from_millis(2)).await;
            }
        };
        timeout(Duration::from_secs(10), asked).await.unwrap();
    }

    fn answers(&self) {
        self.gate.add_permits(1);
    }
}

fn unprotected(status: StatusCode) -> Response<Body> {
    (status, [("idempotency-status", "unprotected")], "ch_1").into_response()
}

fn ran_and_failed() -> Response<Body> {
    unprotected(StatusCode::INTERNAL_SERVER_ERROR)
}

fn ran() -> Response<Body> {
    unprotected(StatusCode::CREATED)
}

fn refused_on_record() -> Response<Body> {
    let replay = [("idempotent-replay", "true")];
    (StatusCode::PAYMENT_REQUIRED, replay).into_response()
}

fn refused() -> Response<Body> {
    StatusCode::UNAUTHORIZED.into_response()
}

fn created() -> Response<Body> {
    StatusCode::CREATED.into_response()
}

both! {
    async fn a_resume_tells_the_answer_of_what_ran_without_a_record_and_cannot_be_recorded(ground: Ground) {
        let server = Server::new(ran, ran);
        server.answers();
        let relay = Relay::new(ground.outbox.clone(), RetryLayer::new().layer(server.client()));
        ground.outbox.begin("r", charge_of(1)).await.unwrap();
        ground.refuse_to_settle().await;
        let resumed = relay.resume(10).await.unwrap();
        ground.settle_again().await;
        assert!(ground.outbox.find("r").await.unwrap().unwrap().is_held());
        let Undelivered::Inconclusive(told) = &resumed.pending[0].why else {
            panic!("{resumed:?}");
        };
        assert_eq!(told.status(), StatusCode::CREATED);
        assert!(told.unrecorded().is_some() && told.unheld().is_none() && told.entry().is_held());
        assert!(resumed.pending[0].why.to_string().contains("could not be recorded"));
    }

    async fn that_it_could_not_even_be_held_is_told(ground: Ground) {
        let server = Server::new(ran, ran);
        server.gate.add_permits(2);
        let relay = Relay::new(ground.outbox.clone(), RetryLayer::new().layer(server.client()));
        for reference in ["resumed", "sent"] {
            ground.outbox.begin(reference, charge_of(1)).await.unwrap();
        }
        ground.run(match IS_POSTGRES {
            true => "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
                     $$ BEGIN RAISE EXCEPTION 'refused'; END $$;
                     CREATE TRIGGER refuse BEFORE UPDATE ON idempotency_outbox FOR EACH ROW
                     WHEN (NEW.state <> OLD.state OR NEW.held IS NOT NULL) EXECUTE FUNCTION refuse()",
            false => "CREATE TRIGGER refuse BEFORE UPDATE ON idempotency_outbox
                      WHEN NEW.state <> OLD.state OR NEW.held IS NOT NULL BEGIN SELECT RAISE(ABORT, 'refused'); END",
        }).await;
        let (resumed, sent) = tokio::join!(relay.resume(1), relay.send("sent"));
        ground.settle_again().await;
        let resumed = resumed.unwrap();
        let told = &resumed.pending[0].why;
        assert!(matches!(told, Undelivered::Inconclusive(told) if told.unheld().is_some()), "{told:?}");
        let sent = sent.unwrap();
        assert!(sent.unrecorded().is_some() && sent.unheld().is_some() && !sent.entry().is_held());
    }

    // The other order is in `held`.
    async fn what_ran_without_a_record_is_held_though_a_refusal_was_recorded_meanwhile(ground: Ground) {
        let server = Server::new(ran_and_failed, refused_on_record);
        let relay = Relay::new(ground.outbox.clone(), RetryLayer::new().layer(server.client()));
        ground.outbox.begin("r", charge_of(1)).await.unwrap();
        let other = relay.clone();
        let resumes = tokio::spawn(async move { other.resume(10).await.unwrap() });
        server.is_asked().await;
        assert_eq!(relay.send("r").await.unwrap().state(), EntryState::Failed);
        server.answers();
        let resumed = resumes.await.unwrap();
        let row = ground.outbox.find("r").await.unwrap().unwrap();
        assert!(row.is_held() && row.status().is_none() && row.settled().is_none(), "{row:?}");
        assert!(resumed.failed.is_empty(), "{resumed:?}");
    }

    async fn what_ran_without_a_record_is_held_though_somebody_has_settled_it_as_failed(ground: Ground) {
        let server = Server::new(ran_and_failed, ran_and_failed);
        let relay = Relay::new(ground.outbox.clone(), RetryLayer::new().layer(server.client()));
        ground.outbox.begin("r", charge_of(1)).await.unwrap();
        let other = relay.clone();
        let sends = tokio::spawn(async move { other.send("r").await });
        server.is_asked().await;
        ground.outbox.settle("r", Outcome::Failed, None).await.unwrap();
        server.answers();
        let end = sends.await.unwrap().unwrap_err();
        assert!(matches!(&end, Undelivered::Inconclusive(told) if told.entry().is_held()), "{end:?}");
        let again = relay.send("r").await.unwrap_err();
        assert!(matches!(again, Undelivered::Held(_)), "{again:?}");
        assert_eq!(server.requests.load(Ordering::SeqCst), 1);
    }

    async fn a_late_success_is_not_told_as_a_failure(ground: Ground) {
        for (reference, late) in [("recorded", created as fn() -> Response<Body>), ("not", ran)] {
            let server = Server::new(late, refused);
            let relay = Relay::new(ground.outbox.clone(), RetryLayer::new().layer(server.client()));
            ground.outbox.begin(reference, charge_of(1)).await.unwrap();
            let other = relay.clone();
            let resumes = tokio::spawn(async move { other.resume(10).await.unwrap() });
            server.is_asked().await;
            ground.outbox.settle(reference, Outcome::Failed, None).await.unwrap();
            ground.outbox.reopen(reference).await.unwrap();
            assert_eq!(relay.send(reference).await.unwrap().state(), EntryState::Failed);
            server.answers();
            let resumed = resumes.await.unwrap();
            let Undelivered::Inconclusive(told) = &resumed.pending[0].why else {
                panic!("{resumed:?}");
            };
            assert_eq!(told.status(), StatusCode::CREATED);
            assert!(told.unrecorded().is_some() && resumed.failed.is_empty());
            ground.outbox.settle(reference, Outcome::Done, None).await.unwrap();
        }
    }

    async fn what_another_relay_has_done_is_told_as_done(ground: Ground) {
        let server = Server::new(ran_and_failed, created);
        let relay = Relay::new(ground.outbox.clone(), RetryLayer::new().layer(server.client()));
        ground.outbox.begin("r", charge_of(1)).await.unwrap();
        let other = relay.clone();
        let sends = tokio::spawn(async move { other.send("r").await });
        server.is_asked().await;
        relay.send("r").await.unwrap();
        server.answers();
        let delivered = sends.await.unwrap().unwrap();
        assert_eq!((delivered.state(), delivered.status()), (EntryState::Done, Some(StatusCode::CREATED)));
        assert!(!delivered.entry().is_held());
    }

    async fn what_another_relay_has_done_is_not_told_as_overdue(ground: Ground) {
        let outbox = ground.outbox.clone().key_lifetime(Duration::from_secs(2)).margin(Duration::from_secs(1));
        let retry = || RetryLayer::new().retries(0).attempt_timeout(Duration::from_millis(900));
        let server = Server::new(created, created);
        server.answers();
        let hooked = Arc::new(AtomicUsize::new(0));
        let count = hooked.clone();
        let slow = retry().before_attempt(move |_, _, _| {
            count.fetch_add(1, Ordering::SeqCst);
            // Longer than there is left.
            tokio::task::block_in_place(|| std::thread::sleep(Duration::from_millis(1_500)));
            Ok(())
        });
        let slow = Relay::new(outbox.clone(), slow.layer(server.client()));
        let quick = Relay::new(outbox.clone(), retry().layer(server.client()));
        outbox.begin("r", charge_of(1)).await.unwrap();
        let resumes = tokio::spawn(async move { slow.resume(10).await.unwrap() });
        while hooked.load(Ordering::SeqCst) == 0 {
            sleep(Duration::from_millis(2)).await;
        }
        assert_eq!(quick.send("r").await.unwrap().state(), EntryState::Done);
        let resumed = resumes.await.unwrap();
        assert_eq!((resumed.overdue.len(), resumed.done.len()), (0, 1), "{resumed:?}");
    }
}

/// Where the bytes of a text are others than elsewhere.
#[tokio::test]
async fn a_list_ends_in_a_database_of_utf_16() {
    let folder = tempfile::tempdir().unwrap();
    let file = sqlx::sqlite::SqliteConnectOptions::new()
        .filename(folder.path().join("shop.db"))
        .pragma("encoding", "'UTF-16le'")
        .create_if_missing(true);
    let outbox = Outbox::new(sqlx::SqlitePool::connect_with(file).await.unwrap());
    outbox.migrate().await.unwrap();
    for reference in ["a", "b", "c"] {
        outbox.begin(reference, charge_of(1)).await.unwrap();
    }
    let (mut last, mut seen) = (None, Vec::new());
    while seen.len() < 9 {
        let page = outbox.list(EntryState::Pending, last.as_ref(), 1).await;
        last = page.unwrap().pop();
        match &last {
            Some(entry) => seen.push(entry.reference().to_owned()),
            None => break,
        }
    }
    assert_eq!(seen, ["a", "b", "c"]);
}

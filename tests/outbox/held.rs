//! What the server ran without a record is sent by nobody until somebody has looked it up.

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
use tokio::{sync::Semaphore, time::sleep};
use tower::service_fn;
use tower_idempotency::client::{
    Entry, EntryState, Operation, OutboxErrorKind, Outcome, Relay, RetryLayer, Undelivered,
};
use tower_layer::Layer;

use crate::ground::{both, charge_of};

fn unprotected() -> Response<Body> {
    let mark = [("idempotency-status", "unprotected")];
    (StatusCode::INTERNAL_SERVER_ERROR, mark).into_response()
}

async fn until(what: &str, mut is: impl FnMut() -> bool) {
    for _ in 0..2_000 {
        if is() {
            return;
        }
        sleep(Duration::from_millis(5)).await;
    }
    panic!("{what}");
}

both! {
    async fn it_is_held_though_the_database_was_away_for_a_moment(ground: Ground) {
        let effects = Arc::new(AtomicUsize::new(0));
        let count = effects.clone();
        let client = service_fn(move |_: Request<Body>| {
            count.fetch_add(1, Ordering::SeqCst);
            async { Ok::<_, Infallible>(unprotected()) }
        });
        let relay = Relay::new(ground.outbox.clone(), RetryLayer::new().layer(client));
        ground.run(match IS_POSTGRES {
            true => "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
                     $$ BEGIN RAISE EXCEPTION 'refused'; END $$;
                     CREATE TRIGGER refuse BEFORE UPDATE ON idempotency_outbox FOR EACH ROW
                     WHEN (NEW.held IS NOT NULL) EXECUTE FUNCTION refuse()",
            false => "CREATE TRIGGER refuse BEFORE UPDATE ON idempotency_outbox
                      WHEN NEW.held IS NOT NULL BEGIN SELECT RAISE(ABORT, 'refused'); END",
        }).await;
        let other = relay.clone();
        let sends = tokio::spawn(async move { other.deliver::<Body, Body>("r", charge_of(1)).await });
        until("sent", || effects.load(Ordering::SeqCst) == 1).await;
        sleep(Duration::from_millis(300)).await;
        ground.settle_again().await;
        let end = sends.await.unwrap().unwrap_err();
        let Undelivered::Inconclusive(told) = end else { panic!("{end:?}") };
        assert!(told.entry().is_held() && told.unheld().is_none(), "{told:?}");
        let resumed = relay.resume::<Body, Body>(10).await.unwrap();
        assert_eq!((resumed.held.len(), resumed.pending.len()), (1, 0), "{resumed:?}");
        assert_eq!(effects.load(Ordering::SeqCst), 1, "the effect took place twice");
    }

    async fn it_is_not_sent_from_the_line_of_a_resume(ground: Ground) {
        let (arrived, gate) = (Arc::new(AtomicUsize::new(0)), Arc::new(Semaphore::new(0)));
        let effects = Arc::new(AtomicUsize::new(0));
        let (here, wait, count) = (arrived.clone(), gate.clone(), effects.clone());
        let client = service_fn(move |request: Request<Body>| {
            let (here, wait, count) = (here.clone(), wait.clone(), count.clone());
            async move {
                if request.uri().path() == "/slow" {
                    here.fetch_add(1, Ordering::SeqCst);
                    wait.acquire().await.unwrap().forget();
                    return Ok::<_, Infallible>(StatusCode::CREATED.into_response());
                }
                count.fetch_add(1, Ordering::SeqCst);
                Ok(unprotected())
            }
        });
        let relay = Relay::new(ground.outbox.clone(), RetryLayer::new().layer(client)).concurrency(1);
        let slow = Operation::post("http://pay.example/slow".parse().unwrap());
        ground.outbox.begin("a", slow).await.unwrap();
        sleep(Duration::from_millis(5)).await;
        ground.outbox.begin("b", charge_of(1)).await.unwrap();
        let other = relay.clone();
        let resumes = tokio::spawn(async move { other.resume::<Body, Body>(10).await });
        until("the first one", || arrived.load(Ordering::SeqCst) == 1).await;
        let end = relay.send::<Body, Body>("b").await.unwrap_err();
        assert!(matches!(end, Undelivered::Inconclusive(_)), "{end:?}");
        let row = ground.outbox.find("b").await.unwrap().unwrap();
        assert!(row.is_held(), "{row:?}");
        gate.add_permits(1);
        let resumed = resumes.await.unwrap().unwrap();
        assert_eq!((resumed.done.len(), resumed.held.len()), (1, 1), "{resumed:?}");
        assert_eq!(effects.load(Ordering::SeqCst), 1, "the effect took place twice");
    }

    async fn the_hint_of_another_attempt_does_not_give_it_back(ground: Ground) {
        let gate = Arc::new(Semaphore::new(0));
        let number = Arc::new(AtomicUsize::new(0));
        let (wait, count) = (gate.clone(), number.clone());
        let client = service_fn(move |_: Request<Body>| {
            let (wait, count) = (wait.clone(), count.clone());
            async move {
                match count.fetch_add(1, Ordering::SeqCst) {
                    0 => {
                        wait.acquire().await.unwrap().forget();
                        let hint = [("retry-after", "1")];
                        Ok::<_, Infallible>((StatusCode::SERVICE_UNAVAILABLE, hint).into_response())
                    }
                    _ => Ok(unprotected()),
                }
            }
        });
        let relay = Relay::new(ground.outbox.clone(), RetryLayer::new().retries(0).layer(client));
        ground.outbox.begin("r", charge_of(1)).await.unwrap();
        let other = relay.clone();
        let first = tokio::spawn(async move { other.resume::<Body, Body>(10).await });
        until("the first one", || number.load(Ordering::SeqCst) == 1).await;
        let second = relay.resume::<Body, Body>(10).await.unwrap();
        assert!(matches!(second.pending[0].why, Undelivered::Inconclusive(_)), "{second:?}");
        gate.add_permits(1);
        first.await.unwrap().unwrap();
        // The wait that the first one was told is over.
        ground.run("UPDATE idempotency_outbox SET not_before = 1").await;
        relay.resume::<Body, Body>(10).await.unwrap();
        assert_eq!(number.load(Ordering::SeqCst), 2, "sent again after it ran unprotected");
    }

    async fn it_is_seen_between_two_attempts(ground: Ground) {
        let number = Arc::new(AtomicUsize::new(0));
        let count = number.clone();
        let client = service_fn(move |_: Request<Body>| {
            let first = count.fetch_add(1, Ordering::SeqCst) == 0;
            async move {
                Ok::<_, Infallible>(match first {
                    true => (StatusCode::SERVICE_UNAVAILABLE, [("retry-after", "1")]).into_response(),
                    false => unprotected(),
                })
            }
        });
        let relay = Relay::new(ground.outbox.clone(), RetryLayer::new().layer(client));
        ground.outbox.begin("r", charge_of(1)).await.unwrap();
        let other = relay.clone();
        let first = tokio::spawn(async move { other.resume::<Body, Body>(10).await });
        until("the first one", || number.load(Ordering::SeqCst) == 1).await;
        let second = relay.resume::<Body, Body>(10).await.unwrap();
        assert!(matches!(second.pending[0].why, Undelivered::Inconclusive(_)), "{second:?}");
        let resumed = first.await.unwrap().unwrap();
        assert_eq!((resumed.held.len(), resumed.pending.len()), (1, 0), "{resumed:?}");
        assert_eq!(number.load(Ordering::SeqCst), 2, "sent again after it ran unprotected");
    }

    async fn neither_deliver_nor_send_runs_it_again(ground: Ground) {
        let effects = Arc::new(AtomicUsize::new(0));
        let count = effects.clone();
        let client = service_fn(move |_: Request<Body>| {
            count.fetch_add(1, Ordering::SeqCst);
            async { Ok::<_, Infallible>(unprotected()) }
        });
        let relay = Relay::new(ground.outbox.clone(), RetryLayer::new().layer(client));
        let end = relay.deliver::<Body, Body>("r", charge_of(1)).await.unwrap_err();
        assert!(matches!(end, Undelivered::Inconclusive(_)), "{end:?}");
        let end = relay.deliver::<Body, Body>("r", charge_of(1)).await.unwrap_err();
        assert!(matches!(&end, Undelivered::Held(entry) if entry.is_held()), "{end:?}");
        let end = relay.send::<Body, Body>("r").await.unwrap_err();
        assert!(matches!(&end, Undelivered::Held(entry) if entry.reference() == "r"), "{end:?}");
        assert_eq!(effects.load(Ordering::SeqCst), 1);
    }

    // There is no replay to be had.
    async fn it_is_held_where_its_end_cannot_be_recorded(ground: Ground) {
        let effects = Arc::new(AtomicUsize::new(0));
        let count = effects.clone();
        let client = service_fn(move |_: Request<Body>| {
            count.fetch_add(1, Ordering::SeqCst);
            let mark = [("idempotency-status", "unprotected")];
            async move { Ok::<_, Infallible>((StatusCode::CREATED, mark).into_response()) }
        });
        let relay = Relay::new(ground.outbox.clone(), RetryLayer::new().layer(client));
        ground.refuse_to_settle().await;
        let told = relay.deliver::<Body, Body>("r", charge_of(1)).await.unwrap();
        assert!(told.unrecorded().is_some() && told.entry().is_held(), "{told:?}");
        ground.settle_again().await;
        relay.resume::<Body, Body>(10).await.unwrap();
        assert_eq!(effects.load(Ordering::SeqCst), 1, "the effect took place twice");
    }

    async fn it_is_told_that_it_could_not_be_held(ground: Ground) {
        let client = service_fn(|_: Request<Body>| async { Ok::<_, Infallible>(unprotected()) });
        let relay = Relay::new(ground.outbox.clone(), RetryLayer::new().layer(client));
        ground.outbox.begin("r", charge_of(1)).await.unwrap();
        ground.run(match IS_POSTGRES {
            true => "ALTER TABLE idempotency_outbox ADD CHECK (held IS NULL)",
            false => "CREATE TRIGGER refuse BEFORE UPDATE ON idempotency_outbox
                      WHEN NEW.held IS NOT NULL BEGIN SELECT RAISE(ABORT, 'refused'); END",
        }).await;
        let end = relay.send::<Body, Body>("r").await.unwrap_err();
        let Undelivered::Inconclusive(told) = end else { panic!("{end:?}") };
        assert_eq!(told.unheld().unwrap().kind(), OutboxErrorKind::Database);
        assert!(!told.entry().is_held());
        // Whoever has been told settles it.
        ground.outbox.settle("r", Outcome::Done, None).await.unwrap();
        assert!(relay.resume::<Body, Body>(10).await.unwrap().pending.is_empty());
    }

    async fn what_is_held_is_listed_and_counted_and_settled_or_reopened_by_hand(ground: Ground) {
        let runs = Arc::new(AtomicUsize::new(0));
        let count = runs.clone();
        let client = service_fn(move |_: Request<Body>| {
            let first = count.fetch_add(1, Ordering::SeqCst) < 2;
            async move {
                Ok::<_, Infallible>(match first {
                    true => unprotected(),
                    false => StatusCode::UNAUTHORIZED.into_response(),
                })
            }
        });
        let relay = Relay::new(ground.outbox.clone(), RetryLayer::new().layer(client));
        for reference in ["a", "b"] {
            relay.deliver::<Body, Body>(reference, charge_of(1)).await.unwrap_err();
        }
        ground.outbox.begin("c", charge_of(1)).await.unwrap();
        let outbox = &ground.outbox;
        let held = outbox.held(10).await.unwrap();
        assert!(held.iter().map(Entry::reference).eq(["a", "b"]), "{held:?}");
        assert_eq!(outbox.held(1).await.unwrap().len(), 1);
        let counts = outbox.counts().await.unwrap();
        assert_eq!((counts.pending, counts.held, counts.overdue), (1, 2, 0));
        let pending = outbox.pending(10).await.unwrap();
        assert!(pending.iter().map(Entry::reference).eq(["c"]), "{pending:?}");
        outbox.settle("c", Outcome::Failed, None).await.unwrap();

        let settled = outbox.settle("a", Outcome::Failed, None).await.unwrap();
        assert!(!settled.is_held() && settled.state() == EntryState::Failed, "{settled:?}");
        let reopened = outbox.reopen("b").await.unwrap();
        assert_eq!((reopened.is_held(), reopened.attempts()), (false, 0));
        let resumed = relay.resume::<Body, Body>(10).await.unwrap();
        assert_eq!((resumed.failed.len(), resumed.held.len(), runs.load(Ordering::SeqCst)), (1, 0, 3), "{resumed:?}");
        let counts = outbox.counts().await.unwrap();
        assert_eq!((counts.pending, counts.held, counts.failed), (0, 0, 3));
    }

    async fn what_is_held_and_too_old_is_told_once(ground: Ground) {
        let client = service_fn(|_: Request<Body>| async { Ok::<_, Infallible>(unprotected()) });
        let relay = Relay::new(ground.outbox.clone(), RetryLayer::new().layer(client));
        relay.deliver::<Body, Body>("r", charge_of(1)).await.unwrap_err();
        ground.age("r", Duration::from_secs(24 * 3_600)).await;
        let resumed = relay.resume::<Body, Body>(10).await.unwrap();
        assert_eq!((resumed.overdue.len(), resumed.held.len()), (1, 0), "{resumed:?}");
        assert!(resumed.overdue[0].is_held() && resumed.overdue[0].is_overdue());
        let reopened = ground.outbox.reopen("r").await.unwrap_err();
        assert_eq!(reopened.kind(), OutboxErrorKind::Overdue);
    }

    // The server has run it, whoever was told what since then.
    async fn an_attempt_from_before_a_reopening_that_ran_without_a_record_holds_it(ground: Ground) {
        let (arrived, gate) = (Arc::new(AtomicUsize::new(0)), Arc::new(Semaphore::new(0)));
        let (here, wait) = (arrived.clone(), gate.clone());
        let client = service_fn(move |_: Request<Body>| {
            let (here, wait) = (here.clone(), wait.clone());
            async move {
                here.fetch_add(1, Ordering::SeqCst);
                wait.acquire().await.unwrap().forget();
                let mark = [("idempotency-status", "unprotected")];
                Ok::<_, Infallible>((StatusCode::CREATED, mark).into_response())
            }
        });
        let relay = Relay::new(ground.outbox.clone(), RetryLayer::new().layer(client));
        let other = relay.clone();
        let sends = tokio::spawn(async move { other.deliver::<Body, Body>("r", charge_of(1)).await });
        until("sent", || arrived.load(Ordering::SeqCst) == 1).await;
        ground.outbox.settle("r", Outcome::Failed, None).await.unwrap();
        ground.outbox.reopen("r").await.unwrap();
        gate.add_permits(1);
        let told = sends.await.unwrap().unwrap();
        assert!(told.unrecorded().is_some() && told.entry().is_held(), "{told:?}");
        relay.resume::<Body, Body>(10).await.unwrap();
        assert_eq!(arrived.load(Ordering::SeqCst), 1);
    }

    // It says nothing of the run that it is held for.
    async fn a_refusal_on_record_does_not_settle_what_ran_without_one(ground: Ground) {
        let (arrived, gate) = (Arc::new(AtomicUsize::new(0)), Arc::new(Semaphore::new(0)));
        let (here, wait) = (arrived.clone(), gate.clone());
        let client = service_fn(move |_: Request<Body>| {
            let (first, wait) = (here.fetch_add(1, Ordering::SeqCst) == 0, wait.clone());
            async move {
                if !first {
                    return Ok::<_, Infallible>(unprotected());
                }
                wait.acquire().await.unwrap().forget();
                let replay = [("idempotent-replay", "true")];
                Ok((StatusCode::PAYMENT_REQUIRED, replay).into_response())
            }
        });
        let relay = Relay::new(ground.outbox.clone(), RetryLayer::new().layer(client));
        let other = relay.clone();
        let sends = tokio::spawn(async move { other.deliver::<Body, Body>("r", charge_of(1)).await });
        until("sent", || arrived.load(Ordering::SeqCst) == 1).await;
        relay.send::<Body, Body>("r").await.unwrap_err();
        gate.add_permits(1);
        let end = sends.await.unwrap().unwrap_err();
        assert!(matches!(&end, Undelivered::Inconclusive(told) if told.entry().is_held()), "{end:?}");
        assert!(ground.outbox.find("r").await.unwrap().unwrap().is_held());
    }
}

//! Many at once, and a database or a server that takes its time.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{body::Body, response::IntoResponse};
use http::{Request, StatusCode};
use tokio::{sync::Semaphore, time::timeout};
use tower::service_fn;
use tower_idempotency::client::{
    EntryState, Outbox, OutboxErrorKind, Relay, RetryLayer, Unanswered, Undelivered,
};
use tower_layer::Layer;

use crate::{
    ground::{both, charge_of},
    support::eventually,
};

const HALF_A_MINUTE: Duration = Duration::from_secs(30);

both! {
    async fn one_that_waits_for_its_answer_holds_nobody_else_up(ground: Ground) {
        const OPERATIONS: usize = 100;
        for number in 0..OPERATIONS {
            ground.outbox.begin(&format!("{number:03}"), charge_of(1).body(format!("{number}"))).await.unwrap();
        }
        // The first one is answered when all the others were.
        let (others, answered) = (Arc::new(Semaphore::new(0)), Arc::new(AtomicUsize::new(0)));
        let client = service_fn(move |request: Request<Body>| {
            let (others, answered) = (others.clone(), answered.clone());
            async move {
                let body = axum::body::to_bytes(request.into_body(), 1_000).await.unwrap();
                match &body[..] {
                    b"0" => drop(others.acquire().await.unwrap()),
                    _ if answered.fetch_add(1, Ordering::SeqCst) + 2 == OPERATIONS => others.add_permits(1),
                    _ => {}
                }
                Ok::<_, std::io::Error>(StatusCode::CREATED.into_response())
            }
        });
        let retry = RetryLayer::new().attempt_timeout(HALF_A_MINUTE);
        let relay = Relay::new(ground.outbox.clone(), retry.layer(client)).concurrency(2);
        let resumed = timeout(HALF_A_MINUTE, relay.resume::<Body, Body>(1_000)).await;
        assert_eq!(resumed.expect("it was held up").unwrap().done.len(), OPERATIONS);
    }

    async fn a_pool_of_one_connection_is_enough(ground: Ground) {
        let options = sqlx::pool::PoolOptions::<Db>::new().max_connections(1);
        let one = options.connect_with((*ground.pool.connect_options()).clone()).await.unwrap();
        let outbox: Outbox<Db> = Outbox::new(one);
        for number in 0..70 {
            outbox.begin(&format!("{number}"), charge_of(number)).await.unwrap();
        }
        let relay = Relay::new(outbox, ground.shop.client()).concurrency(16);
        let resumed = relay.resume::<Body, _>(1_000).await.unwrap();
        assert_eq!((resumed.done.len(), ground.shop.charges().len()), (70, 70), "{:?}", resumed.pending.first());
    }

    async fn statements_that_are_given_up_leave_nothing_stuck(ground: Ground) {
        for number in 0..20 {
            ground.outbox.begin(&format!("r{number}"), charge_of(number)).await.unwrap();
        }
        for micros in [1_u64, 100, 300, 600, 1_000, 2_000, 3_000, 5_000] {
            let relay = ground.relay().statement_timeout(Duration::from_micros(micros));
            let _ = relay.resume::<Body, _>(20).await;
        }
        // What was given up may still take place: those in its way are told so, or settled by the time they are asked.
        let mut runs = 0;
        while ground.outbox.counts().await.unwrap().done < 20 {
            ground.relay().resume::<Body, _>(50).await.unwrap();
            runs += 1;
            assert!(runs < 100, "{:?}", ground.outbox.counts().await);
        }
        assert_eq!(ground.shop.charges().len(), 20);
    }

    async fn the_server_says_when_to_come_back_and_resume_comes_no_sooner(ground: Ground) {
        let requests = Arc::new(AtomicUsize::new(0));
        let count = requests.clone();
        let client = service_fn(move |_: Request<Body>| {
            count.fetch_add(1, Ordering::SeqCst);
            let hint = [("retry-after", "3600")];
            async move { Ok::<_, std::io::Error>((StatusCode::TOO_MANY_REQUESTS, hint).into_response()) }
        });
        let relay = Relay::new(ground.outbox.clone(), RetryLayer::new().layer(client));
        ground.outbox.begin("r", charge_of(1)).await.unwrap();
        let first = relay.resume::<Body, Body>(10).await.unwrap();
        assert_eq!(first.pending.len(), 1);
        assert!(relay.resume::<Body, Body>(10).await.unwrap().pending.is_empty());
        assert_eq!(requests.load(Ordering::SeqCst), 1);
        let row = ground.outbox.find("r").await.unwrap().unwrap();
        let wait = row.not_before().unwrap().as_micros() - row.last_attempt().unwrap().as_micros();
        assert!((3_599_000_000..3_700_000_000).contains(&wait), "{wait}");
        // Whoever asks for it does not wait.
        let gave_up = relay.send::<Body, Body>("r").await.unwrap_err();
        assert!(matches!(gave_up, Undelivered::Unanswered(Unanswered::GaveUp(_))), "{gave_up:?}");
        assert_eq!(requests.load(Ordering::SeqCst), 2);
        // An hour later.
        ground.run("UPDATE idempotency_outbox SET not_before = not_before - 3600000000").await;
        assert_eq!(ground.relay().resume::<Body, _>(10).await.unwrap().done.len(), 1);
        assert_eq!(ground.outbox.find("r").await.unwrap().unwrap().not_before(), None);
    }

    async fn what_was_sent_before_a_reopening_changes_nothing_after_it(ground: Ground) {
        ground.outbox.begin("r", charge_of(1)).await.unwrap();
        let (arrived, gate) = (Arc::new(AtomicUsize::new(0)), Arc::new(Semaphore::new(0)));
        let (here, wait) = (arrived.clone(), gate.clone());
        let client = service_fn(move |_: Request<Body>| {
            let (here, wait) = (here.clone(), wait.clone());
            async move {
                here.fetch_add(1, Ordering::SeqCst);
                wait.acquire().await.unwrap().forget();
                Ok::<_, std::io::Error>(StatusCode::UNAUTHORIZED.into_response())
            }
        });
        let slow = Relay::new(ground.outbox.clone(), RetryLayer::new().retries(0).layer(client));
        let slow = tokio::spawn(async move { slow.send::<Body, Body>("r").await });
        eventually("the attempt", || arrived.load(Ordering::SeqCst) == 1).await;
        let outcome = tower_idempotency::client::Outcome::Failed;
        ground.outbox.settle("r", outcome, None).await.unwrap();
        ground.outbox.reopen("r").await.unwrap();
        gate.add_permits(1);
        let late = slow.await.unwrap().unwrap();
        assert_eq!(late.unrecorded().unwrap().kind(), OutboxErrorKind::State);
        let row = ground.outbox.find("r").await.unwrap().unwrap();
        assert_eq!(row.state(), EntryState::Pending);
    }

    /// Dropped at any moment, and then begun and sent to the end.
    async fn whenever_it_is_dropped_it_is_charged_once(ground: Ground) {
        for number in 0..20_u32 {
            let (relay, reference) = (ground.relay(), format!("{number}"));
            let limit = Duration::from_micros(u64::from(number) * 450);
            let _ = timeout(limit, relay.deliver::<Body, _>(&reference, charge_of(1))).await;
            // The run of the one that was dropped may still go on.
            let mut end = relay.deliver::<Body, _>(&reference, charge_of(1)).await;
            while let Err(Undelivered::Unanswered(Unanswered::StillInFlight(_))) = end {
                end = relay.send::<Body, _>(&reference).await;
            }
            assert_eq!(end.unwrap().state(), EntryState::Done);
        }
        assert_eq!(ground.shop.charges().len(), 20);
    }
}

#[cfg(feature = "postgres")]
mod in_postgres {
    use super::*;
    use crate::ground::postgres::Ground;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn the_true_answer_comes_though_the_row_is_locked() {
        let ground = Ground::new().await;
        let pool = ground.pool.clone();
        let locked = Arc::new(Mutex::new(None));
        let keep = locked.clone();
        let client = service_fn(move |_: Request<Body>| {
            let (pool, keep) = (pool.clone(), keep.clone());
            async move {
                let mut other = pool.begin().await.unwrap();
                sqlx::query("SELECT 1 FROM idempotency_outbox WHERE reference = 'r' FOR UPDATE")
                    .execute(&mut *other)
                    .await
                    .unwrap();
                *keep.lock().unwrap() = Some(other);
                Ok::<_, std::io::Error>(StatusCode::CREATED.into_response())
            }
        });
        let relay = Relay::new(
            ground.outbox.clone(),
            RetryLayer::new().retries(0).layer(client),
        );
        let relay = relay.statement_timeout(Duration::from_millis(300));
        let told = relay
            .deliver::<Body, Body>("r", charge_of(1))
            .await
            .unwrap();
        assert_eq!(told.status(), Some(StatusCode::CREATED));
        let unrecorded = told.unrecorded().unwrap();
        assert_eq!(unrecorded.kind(), OutboxErrorKind::Database);
        assert!(unrecorded.to_string().contains("in the time"));
        // It does not hold up the others either.
        ground.outbox.begin("other", charge_of(1)).await.unwrap();
        let resumed = ground.relay().resume::<Body, _>(10).await.unwrap();
        assert_eq!(resumed.done[0].reference(), "other");
        drop(locked.lock().unwrap().take());
    }

    /// The database's default isolation is the caller's choice.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn under_a_stricter_isolation_conflicts_are_not_the_callers() {
        for isolation in ["repeatable read", "serializable"] {
            let ground = Ground::new().await;
            let options = (*ground.pool.connect_options()).clone();
            let options = options.options([("default_transaction_isolation", isolation)]);
            let pool = sqlx::PgPool::connect_with(options).await.unwrap();
            let outbox: Outbox<sqlx::Postgres> = Outbox::new(pool);
            for number in 0..30 {
                let mut tasks = tokio::task::JoinSet::new();
                for _ in 0..4 {
                    let (outbox, reference) = (outbox.clone(), format!("{number}"));
                    tasks.spawn(
                        async move { outbox.begin(&reference, charge_of(1)).await.unwrap() },
                    );
                }
                let begun = tasks.join_all().await;
                let key = begun[0].entry().key();
                assert!(begun.iter().all(|begun| begun.entry().key() == key));
            }
            let mut tasks = tokio::task::JoinSet::new();
            for _ in 0..2 {
                let relay = Relay::new(outbox.clone(), ground.shop.client());
                tasks.spawn(async move { relay.resume::<Body, _>(1_000).await.unwrap() });
            }
            for resumed in tasks.join_all().await {
                let unwritten = |why: &Undelivered| matches!(why, Undelivered::Outbox(_));
                let unwritten = resumed.pending.iter().find(|one| unwritten(&one.why));
                assert!(unwritten.is_none(), "{isolation}: {unwritten:?}");
            }
            ground.relay().resume::<Body, _>(1_000).await.unwrap();
            let counts = outbox.counts().await.unwrap();
            assert_eq!(
                (counts.done, ground.shop.charges().len()),
                (30, 30),
                "{isolation}"
            );
        }
    }
}

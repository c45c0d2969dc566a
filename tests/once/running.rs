//! One runs, the others get its result.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::http::StatusCode;
use tokio::task::JoinSet;
use tower_idempotency::{
    Failure, Fingerprint, IdempotencyKey, IdempotencyLayer, InFlight, MemoryStore, Once, OnceError,
    Rejection, RetainedResponse, Scope, State, testing::Operation,
};

use super::stage::*;
use crate::{
    every_store,
    support::{Handler, post, send},
};

every_store! {
    // C1, C14
    async fn of_many_calls_at_once_on_two_instances_one_runs(world: World) {
        let instances = [once(&world.open().await), once(&world.open().await)];
        for round in 0..5 {
            let ran = Arc::new(AtomicUsize::new(0));
            let mut calls = JoinSet::new();
            for call in 0..32 {
                let (once, ran) = (instances[call % 2].clone(), ran.clone());
                let key = IdempotencyKey::new(format!("message {round}"));
                calls.spawn(async move {
                    let operation = move || async move {
                        let run = ran.fetch_add(1, Ordering::SeqCst) + 1;
                        tokio::task::yield_now().await;
                        Ok::<_, Failure<Broken>>(format!("run {run}"))
                    };
                    once.run(scope(), key, Fingerprint::of(["A"]), operation).await
                });
            }
            let mut firsts = 0;
            for ended in calls.join_all().await {
                match ended {
                    Ok(done) => {
                        assert_eq!(done.value, "run 1");
                        firsts += usize::from(!done.replayed);
                    }
                    refused => assert_eq!(refusal(refused), IN_FLIGHT),
                }
            }
            assert_eq!((firsts, ran.load(Ordering::SeqCst)), (1, 1));
        }
    }

    async fn a_redelivery_gets_the_result_until_the_record_expires(world: World) {
        let store = world.open().await;
        let once = once(&store);
        let mut stage = Stage::new();
        assert_eq!(value(stage.runs(&once, "k", Ok("one".to_owned())).await), first("one"));
        assert_eq!(value(stage.asked(&once, "k").await), replay("one"));
        // Another process knows it, too.
        assert_eq!(value(stage.asked(&Once::new(layer(&world.open().await)), "k").await), replay("one"));

        let record = record(&store, "k").await.unwrap();
        assert_eq!((&*record.scheme, record.state), ("once/1", State::Completed));
        let kept = RetainedResponse::decode(record.response.unwrap()).unwrap();
        assert_eq!((kept.status, &kept.body[..]), (StatusCode::OK, &b"\"one\""[..]));
        assert_eq!(kept.headers["content-type"], "application/json");

        world.clock.advance(Duration::from_secs(24 * 3600 + 1));
        assert_eq!(value(stage.runs(&once, "k", Ok("two".to_owned())).await), first("two"));
    }

    // F9, F11
    async fn a_key_that_is_used_for_something_else_is_refused_running_or_done(world: World) {
        let once = once(&world.open().await);
        let mut stage = Stage::new();
        let called = stage.called(&once, "k");
        let run = stage.next().await;
        assert_eq!(refusal(joined(stage.called_for(&once, "k", "B")).await), REUSED);
        assert_eq!(refusal(stage.asked(&once, "k").await), IN_FLIGHT);
        run.answers("one");
        assert_eq!(value(joined(called).await), first("one"));
        assert_eq!(refusal(joined(stage.called_for(&once, "k", "B")).await), REUSED);
        assert_eq!(stage.begun(), 1);
    }

    // S1
    async fn scopes_are_kept_apart(world: World) {
        let once = once(&world.open().await);
        for tenant in ["one", "two"] {
            let key = IdempotencyKey::new("k");
            let operation = move || async move { Ok::<_, Failure<Broken>>(tenant.to_owned()) };
            let done = once.run(Scope::new(tenant), key, Fingerprint::of(["A"]), operation).await;
            assert_eq!(value(done), first(tenant));
        }
    }

    /// Whichever comes first.
    async fn a_request_and_an_operation_under_one_key_are_two_things(world: World) {
        let store = world.open().await;
        let layer = layer(&store).scope(|_| Some(scope()));
        let handler = Handler::new();
        let (app, once) = (handler.behind(layer.clone()), Once::new(layer));
        let mut stage = Stage::new();

        assert_eq!(send(&app, post("request", "A")).await.status, 201);
        assert_eq!(refusal(stage.asked(&once, "request").await), REUSED);
        stage.runs(&once, "job", Ok("done".to_owned())).await.unwrap();
        assert_eq!(send(&app, post("job", "A")).await.said(), (409, REUSED.to_owned()));
        assert_eq!((handler.effects(), stage.begun()), (1, 1));
    }

    // C11
    async fn a_call_may_wait_for_the_run_of_another(world: World) {
        let store = world.open().await;
        let waiting = Once::new(layer(&store).in_flight(InFlight::Wait(Duration::from_secs(20))));
        let mut stage = Stage::new();
        let called = stage.called(&waiting, "k");
        let run = stage.next().await;
        let second = stage.called(&waiting, "k");
        crate::support::called(&store, Operation::Claim, 2).await;
        run.answers("one");
        assert_eq!(value(joined(called).await), first("one"));
        assert_eq!(value(joined(second).await), replay("one"));
        assert_eq!(stage.begun(), 1);
    }

    async fn a_call_that_waits_does_not_run_what_has_an_unknown_outcome(world: World) {
        let store = world.open().await;
        let waiting = Once::new(layer(&store).in_flight(InFlight::Wait(Duration::from_secs(20))));
        let mut stage = Stage::new();
        for (claims, key) in [(2, "failed"), (4, "panicked")] {
            let called = stage.called(&waiting, key);
            let run = stage.next().await;
            let second = stage.called(&waiting, key);
            crate::support::called(&store, Operation::Claim, claims).await;
            match key {
                "failed" => run.returns(Err(Failure::Unknown(Broken("timed out")))),
                _ => run.panics("as the test wants"),
            }
            assert!(called.await.map_or(true, |ended| ended.is_err()));
            assert_eq!(refusal(joined(second).await), UNKNOWN);
        }
        assert_eq!(stage.begun(), 2);
    }

    // D1
    async fn an_operation_goes_on_when_its_caller_is_dropped(world: World) {
        let store = world.open().await;
        let once = once(&store);
        let mut stage = Stage::new();
        let called = stage.called(&once, "k");
        let run = stage.next().await;
        called.abort();
        assert!(called.await.unwrap_err().is_cancelled());
        assert_eq!(refusal(stage.asked(&once, "k").await), IN_FLIGHT);
        run.answers("one");
        comes_to(&store, "k", Some(State::Completed)).await;
        assert_eq!(value(stage.asked(&once, "k").await), replay("one"));
    }

    async fn a_call_that_is_never_polled_leaves_nothing(world: World) {
        let store = world.open().await;
        let once = once(&store);
        let stage = Stage::new();
        let key = IdempotencyKey::new("k");
        drop(once.run_with(scope(), key, Fingerprint::of(["A"]), stage.operation()));
        assert_eq!((store.total_calls(), stage.begun()), (0, 0));
    }
}

/// What a consumer needs to know of an error can be asked of it.
#[test]
fn an_error_says_whether_to_come_back_and_whether_it_is_done() {
    let passing = OnceError::<Broken>::Refused(Rejection::InFlight {
        original_request_id: None,
    });
    assert_eq!(passing.retry_after(), Some(Duration::from_secs(1)));
    let unknown = OnceError::<Broken>::Refused(Rejection::OutcomeUnknown {
        original_request_id: None,
    });
    assert_eq!(unknown.retry_after(), Some(Duration::from_secs(60)));
    assert!(!passing.is_done() && !unknown.is_done());
    let not_retained = |status| {
        OnceError::<Broken>::Refused(Rejection::ResponseNotRetained {
            status,
            original_request_id: None,
        })
    };
    let done = not_retained(Some(StatusCode::OK));
    assert_eq!((done.retry_after(), done.is_done()), (None, true));
    for status in [None, Some(StatusCode::INTERNAL_SERVER_ERROR)] {
        let unclear = not_retained(status);
        assert_eq!((unclear.retry_after(), unclear.is_done()), (None, false));
        assert!(unclear.to_string().contains("look up"), "{unclear}");
    }
    let failed = OnceError::Failed(Failure::from(Broken("the provider is gone")));
    assert_eq!((failed.retry_after(), failed.is_done()), (None, false));
    let source = std::error::Error::source(&failed).unwrap();
    assert_eq!(source.to_string(), "the provider is gone");
}

/// Within one that runs.
#[tokio::test]
async fn an_operation_may_ask_for_another_and_not_for_itself() {
    let once = Once::new(IdempotencyLayer::new(MemoryStore::new()));
    let call = |once: Once<MemoryStore>, key: &'static str| async move {
        let operation = move || async move { Ok::<_, Failure<Broken>>(key.to_owned()) };
        let key = IdempotencyKey::new(key);
        once.run(scope(), key, Fingerprint::of(["A"]), operation)
            .await
    };
    let inner = once.clone();
    let operation = move || async move {
        assert_eq!(refusal(call(inner.clone(), "k").await), IN_FLIGHT);
        Ok::<_, Failure<Broken>>(call(inner, "other").await.unwrap().value)
    };
    let key = IdempotencyKey::new("k");
    let done = once.run(scope(), key, Fingerprint::of(["A"]), operation);
    assert_eq!(value(done.await), first("other"));
}

/// However its call ends.
#[tokio::test]
async fn nothing_of_an_operation_is_held_after_its_call() {
    let once = Once::new(IdempotencyLayer::new(MemoryStore::new()));
    let held = Arc::new(());
    for number in 0..300 {
        let holding = held.clone();
        let operation = move || async move {
            let _holding = holding;
            match number % 3 {
                0 => Ok(1_u8),
                1 => Err(Failure::NothingHappened(Broken("refused"))),
                _ => Err(Failure::Unknown(Broken("timed out"))),
            }
        };
        let key = IdempotencyKey::new(format!("k{}", number % 100));
        let _ = once
            .run(scope(), key, Fingerprint::of(["A"]), operation)
            .await;
    }
    crate::support::eventually("all is dropped", || Arc::strong_count(&held) == 1).await;
}

//! What cannot be kept, read or found.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use tower_idempotency::{
    Failure, Fingerprint, IdempotencyKey, Once, OnceError, Rejection, Scope, State,
};

use super::stage::*;
use crate::{every_store, support::records};

every_store! {
    // B3
    async fn a_result_over_the_limit_reaches_its_caller_and_is_remembered_as_done(world: World) {
        let store = world.open().await;
        let once = Once::new(layer(&store).response_body_limit(100));
        let mut stage = Stage::new();
        // With its quotation marks.
        let (fits, long) = ("x".repeat(98), "x".repeat(99));
        assert_eq!(value(stage.runs(&once, "fits", Ok(fits.clone())).await), first(&fits));
        assert_eq!(value(stage.asked(&once, "fits").await), replay(&fits));
        assert_eq!(value(stage.runs(&once, "long", Ok(long.clone())).await), first(&long));
        let refused = stage.asked(&once, "long").await.unwrap_err();
        assert!(refused.is_done());
        assert_eq!(refusal::<String>(Err(refused)), NOT_RETAINED);
    }

    /// After the effect: it must not happen twice for that.
    async fn a_result_that_cannot_be_written_reaches_its_caller_and_is_remembered_as_done(world: World) {
        let store = world.open().await;
        let once = once(&store);
        let ran = Arc::new(AtomicUsize::new(0));
        let call = || {
            let ran = ran.clone();
            let operation = move || async move {
                ran.fetch_add(1, Ordering::SeqCst);
                // No JSON has such names.
                Ok::<_, Failure<Broken>>(HashMap::from([(vec![1_u8], 2_u8)]))
            };
            once.run(scope(), IdempotencyKey::new("k"), Fingerprint::of(["A"]), operation)
        };
        let done = call().await.unwrap();
        assert_eq!((done.value[&vec![1]], done.replayed), (2, false));
        assert_eq!(refusal(call().await), NOT_RETAINED);
        assert_eq!(ran.load(Ordering::SeqCst), 1);
    }

    async fn a_result_of_another_type_is_not_run_again(world: World) {
        let store = world.open().await;
        let once = once(&store);
        let mut stage = Stage::new();
        stage.runs(&once, "k", Ok("s3cret".to_owned())).await.unwrap();
        let operation = || async { unreachable!("it is done") };
        let key = IdempotencyKey::new("k");
        let other = once.run::<u64, Broken, _, _>(scope(), key, Fingerprint::of(["A"]), operation);
        let error = other.await.unwrap_err();
        assert!(matches!(&error, OnceError::Unreadable(why) if why.is_other_type()), "{error:?}");
        assert!(error.is_done());
        let shown = format!("{error} {error:?}");
        assert!(!shown.contains("s3cret") && shown.contains("column 8"), "{shown}");
        assert_eq!(state(&store, "k").await, Some(State::Completed));
        assert_eq!(value(stage.asked(&once, "k").await), replay("s3cret"));
    }

    // K6, G5
    async fn keys_and_scopes_have_255_bytes_at_most_whatever_they_are(world: World) {
        let store = world.open().await;
        let once = once(&store);
        let call = |scope: usize, key: &[u8]| {
            let (scope, key) = (Scope::new(vec![0xFF; scope]), IdempotencyKey::new(key));
            let operation = || async { Ok::<_, Failure<Broken>>(()) };
            once.run(scope, key, Fingerprint::of(["A"]), operation)
        };
        for (scope, key) in [(1, &b""[..]), (1, &[0xFF; 256]), (256, b"k")] {
            let refused = call(scope, key).await;
            let said = refused.as_ref().unwrap_err().to_string();
            let refused = rejection(refused);
            match scope {
                256 => assert_eq!(refused, Rejection::ScopeUnknown),
                _ => assert!(matches!(refused, Rejection::KeyInvalid(_)), "{refused:?}"),
            }
            assert_eq!(said.contains("scope"), scope == 256, "{said}");
            assert!(said.contains("255") || key.is_empty(), "{said}");
        }
        assert_eq!(store.total_calls(), 0);
        for (scope, key) in [(0, &b" "[..]), (0, b"\0"), (0, b"a,b;'\\\""), (255, &[0xFF; 255]), (255, &[0; 255])] {
            assert!(!call(scope, key).await.unwrap().replayed);
            assert!(call(scope, key).await.unwrap().replayed);
        }
        assert_eq!(records(&store).await, 5);
    }

    // S9
    async fn a_scope_limit_counts_for_operations(world: World) {
        let once = Once::new(layer(&world.open().await).scope_limit(3));
        let call = |number: usize| {
            let key = IdempotencyKey::new(number.to_string());
            let operation = move || async move { Ok::<_, Failure<Broken>>(number) };
            once.run(scope(), key, Fingerprint::of(["A"]), operation)
        };
        // It is counted beside the calls, so that some more get in.
        let mut let_in = 0;
        let refused = loop {
            assert!(let_in < 5_000, "nobody counts");
            match call(let_in).await {
                Ok(_) => let_in += 1,
                refused => break rejection(refused),
            }
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        };
        assert_eq!(refused, Rejection::LimitReached);
        assert!(let_in >= 3);
        assert!(call(0).await.unwrap().replayed);
    }
}

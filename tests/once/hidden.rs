//! What is told of an operation, and what is not.

use std::collections::HashMap;

use tower_idempotency::{Failure, Fingerprint, IdempotencyKey, Scope};

use super::stage::*;
use crate::support::{World, logs::Written};

const SECRETS: [&str; 5] = [
    "k3y-of-it",
    "sc0pe-of-it",
    "res0lt-of-it",
    "err0r-of-it",
    "t0ken-of-it",
];

/// On one thread, so that all of it is seen.
#[tokio::test]
async fn no_event_and_no_span_shows_key_scope_result_or_error() {
    for world in World::each() {
        let (written, _guard) = Written::of_this_thread();
        let store = world.open().await;
        let once = once(&store);
        let [key, scope, result, error, asked] = SECRETS;
        let call = async |returned: Returned| {
            let (scope, key) = (Scope::new(scope), IdempotencyKey::new(key));
            let operation = || async { returned };
            once.run(scope, key, Fingerprint::of([asked]), operation)
                .await
        };
        let broken = || Broken(error);
        let mut shown = String::new();
        shown += &format!(
            "{:?}",
            call(Err(Failure::NothingHappened(broken())))
                .await
                .unwrap_err()
                .to_string()
        );
        let done = call(Ok(result.to_owned())).await;
        shown += &format!("{done:?} {once:?}");
        assert!(call(Ok(String::new())).await.unwrap().replayed);

        // Nor does what serde says of it.
        let unwritable =
            || async { Ok::<_, Failure<Broken>>(HashMap::from([(vec![result.to_owned()], 1)])) };
        let (scope, key) = (Scope::new(scope), IdempotencyKey::new(format!("{key}-2")));
        once.run(scope, key, Fingerprint::of([asked]), unwritable)
            .await
            .unwrap();

        shown += &written.text();
        for secret in SECRETS {
            assert!(!shown.contains(secret), "{secret} in {shown}");
        }
        for told in [
            "status=\"executed\"",
            "status=\"replayed\"",
            "idempotency.status=\"executed\"",
            "the result of an operation cannot be written as JSON",
        ] {
            assert!(shown.contains(told), "{told} not in {shown}");
        }
    }
}

#[cfg(feature = "sealing")]
#[tokio::test]
async fn a_sealed_store_seals_results() {
    use tower_idempotency::{IdempotencyLayer, Once, SealedStore, SealingKeys};

    for world in World::durable() {
        let keys = SealingKeys::new("k1", [7; 32]);
        let store = SealedStore::open(world.open().await, keys).await.unwrap();
        let once = Once::new(IdempotencyLayer::new(store));
        let call = || {
            let operation = || async { Ok::<_, Failure<Broken>>("s3cret result".to_owned()) };
            once.run(
                scope(),
                IdempotencyKey::new("k"),
                Fingerprint::of(["A"]),
                operation,
            )
        };
        assert!(!call().await.unwrap().replayed);
        assert_eq!(value(call().await), replay("s3cret result"));
        let stored = world.raw().await.unwrap();
        assert!(!stored.windows(6).any(|window| window == b"s3cret"));
    }
}

/// Told as a store that is out of reach, since another process may have the key; the event says what is wrong.
#[cfg(all(feature = "sealing", feature = "sqlite"))]
#[tokio::test]
async fn a_result_sealed_with_a_key_that_is_not_there_is_named_in_an_event() {
    use tower_idempotency::{IdempotencyLayer, Once, SealedStore, SealingKeys, SqliteStore};

    let folder = tempfile::tempdir().unwrap();
    let (written, _guard) = Written::of_this_thread();
    let asked = async |name: &str, key: u8| {
        let store = SqliteStore::open(folder.path().join("jobs.db"))
            .await
            .unwrap();
        let keys = SealingKeys::new(name, [key; 32]);
        let store = SealedStore::open(store, keys).await.unwrap();
        let once = Once::new(IdempotencyLayer::new(store));
        let operation = || async { Ok::<_, Failure<Broken>>("result".to_owned()) };
        let key = IdempotencyKey::new("k");
        once.run(scope(), key, Fingerprint::of(["A"]), operation)
            .await
    };
    assert_eq!(value(asked("k1", 7).await), first("result"));
    let event = "retained response cannot be read";
    assert!(!written.text().contains(event));
    assert_eq!(refusal(asked("k2", 8).await), UNAVAILABLE);
    let text = written.text();
    assert!(
        text.contains(event) && text.contains("sealed with the key"),
        "{text}"
    );
    assert_eq!(value(asked("k1", 7).await), replay("result"));
}

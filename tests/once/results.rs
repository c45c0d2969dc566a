//! Results come back as they were, and where they do not, it is said why.

use axum::{Json, http::StatusCode};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tower_idempotency::{
    Abandoned, Done, Failure, Fingerprint, IdempotencyKey, IdempotencyLayer, MemoryStore, Once,
    OnceError, Verdict,
};

use super::stage::*;
use crate::every_store;

fn in_memory() -> Once<MemoryStore> {
    Once::new(IdempotencyLayer::new(MemoryStore::new()))
}

async fn answers<T>(
    once: &Once<MemoryStore>,
    key: &str,
    value: T,
) -> Result<Done<T>, OnceError<Broken>>
where
    T: Serialize + DeserializeOwned + Send + 'static,
{
    let operation = move || async move { Ok(value) };
    let key = IdempotencyKey::new(key);
    once.run(scope(), key, Fingerprint::of(["A"]), operation)
        .await
}

#[tokio::test]
async fn a_float_comes_back_to_the_last_bit() {
    let once = in_memory();
    let sent = floats(4_000);
    let bits = |floats: &[f64]| {
        floats
            .iter()
            .map(|float| float.to_bits())
            .collect::<Vec<_>>()
    };
    for replayed in [false, true] {
        let done = answers(&once, "many", sent.clone()).await.unwrap();
        assert_eq!((bits(&done.value), done.replayed), (bits(&sent), replayed));
    }
    for (number, float) in sent.into_iter().take(200).enumerate() {
        let key = format!("one {number}");
        answers(&once, &key, float).await.unwrap();
        let again = answers(&once, &key, 0.0_f64).await.unwrap();
        assert_eq!(
            (again.value.to_bits(), again.replayed),
            (float.to_bits(), true),
            "{float:?}"
        );
    }
}

/// As the docs warn.
#[tokio::test]
async fn what_is_no_number_is_written_as_null() {
    let once = in_memory();
    for (key, none) in [
        ("nan", f64::NAN),
        ("far", f64::INFINITY),
        ("near", f64::NEG_INFINITY),
    ] {
        answers(&once, key, Some(none)).await.unwrap();
        let again = answers(&once, key, Some(1.0)).await.unwrap();
        assert_eq!((again.value, again.replayed), (None, true));
        let number = answers(&once, key, 1.0).await.unwrap_err();
        assert!(
            matches!(&number, OnceError::Unreadable(why) if why.is_other_type()),
            "{number:?}"
        );
    }
}

#[tokio::test]
async fn wide_integers_units_and_results_come_back() {
    let once = in_memory();
    let wide = || {
        (
            u128::MAX,
            i128::MIN,
            u64::MAX,
            '\0',
            "\u{2028}\0".to_owned(),
        )
    };
    for replayed in [false, true] {
        let done = answers(&once, "wide", wide()).await.unwrap();
        assert_eq!((done.value, done.replayed), (wide(), replayed));
        let done = answers(&once, "unit", ()).await.unwrap();
        assert_eq!((done.value, done.replayed), ((), replayed));
        let declined = || Err::<u8, _>("declined".to_owned());
        let done = answers(&once, "result", declined()).await.unwrap();
        assert_eq!((done.value, done.replayed), (declined(), replayed));
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Nested(Vec<Nested>);

fn nested(levels: usize) -> Nested {
    (1..levels).fold(Nested(Vec::new()), |inner, _| Nested(vec![inner]))
}

#[tokio::test]
async fn what_is_nested_deeper_than_is_read_is_not_said_to_be_no_json() {
    let once = in_memory();
    for replayed in [false, true] {
        let done = answers(&once, "deep", nested(127)).await.unwrap();
        assert_eq!((done.value, done.replayed), (nested(127), replayed));
    }
    assert!(
        !answers(&once, "deeper", nested(128))
            .await
            .unwrap()
            .replayed
    );
    let error = answers(&once, "deeper", nested(128)).await.unwrap_err();
    assert!(
        matches!(&error, OnceError::Unreadable(why) if !why.is_other_type()),
        "{error:?}"
    );
    assert!(error.is_done());
    let said = error.to_string();
    assert!(
        said.contains("nested deeper") && !said.contains("no JSON"),
        "{said}"
    );
}

/// After the effect: nobody knows how far it came.
#[tokio::test]
async fn a_panic_of_a_result_that_is_written_is_one_of_its_operation() {
    struct Panicking;
    impl Serialize for Panicking {
        fn serialize<S: serde::Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
            panic!("as the test wants")
        }
    }
    impl<'de> Deserialize<'de> for Panicking {
        fn deserialize<D: serde::Deserializer<'de>>(_: D) -> Result<Self, D::Error> {
            Ok(Self)
        }
    }
    let once = in_memory();
    let call = || {
        let once = once.clone();
        tokio::spawn(async move { answers(&once, "k", Panicking).await.map(|_| ()) })
    };
    assert!(call().await.unwrap_err().is_panic());
    let refused = call().await.unwrap().unwrap_err();
    assert_eq!(refusal::<()>(Err(refused)), UNKNOWN);
}

/// Nor of their errors.
#[tokio::test]
async fn results_need_not_be_shared_between_threads() {
    #[derive(Serialize, Deserialize)]
    struct Alone(std::cell::Cell<u8>);
    let once = in_memory();
    let called = tokio::spawn(async move {
        let operation =
            || async { Ok::<_, Failure<std::cell::Cell<u8>>>(Alone(std::cell::Cell::new(1))) };
        let key = IdempotencyKey::new("k");
        once.run(scope(), key, Fingerprint::of(["A"]), operation)
            .await
            .is_ok()
    });
    assert!(joined(called).await);
}

every_store! {
    async fn a_resolvers_answer_is_the_result_whatever_its_status(world: World) {
        let store = world.open().await;
        for status in [
            StatusCode::PAYMENT_REQUIRED,
            StatusCode::INTERNAL_SERVER_ERROR,
            StatusCode::NOT_FOUND,
            StatusCode::FOUND,
        ] {
            let answer = move |_: Abandoned| async move { Verdict::answer((status, Json("found"))) };
            let resolving = Once::new(layer(&store).resolver(answer));
            let mut stage = Stage::new();
            let key = status.as_str();
            let unknown = Err(Failure::Unknown(Broken("timed out")));
            stage.runs(&resolving, key, unknown).await.unwrap_err();
            for _ in 0..2 {
                assert_eq!(value(stage.asked(&resolving, key).await), replay("found"), "{status}");
            }
        }
    }

    async fn a_resolvers_answer_that_is_neither_a_success_nor_a_result_is_not_told_as_done(world: World) {
        let store = world.open().await;
        for status in [StatusCode::PAYMENT_REQUIRED, StatusCode::INTERNAL_SERVER_ERROR] {
            let answer = move |_: Abandoned| async move { Verdict::answer((status, Json(17))) };
            let resolving = Once::new(layer(&store).resolver(answer));
            let mut stage = Stage::new();
            let unknown = Err(Failure::Unknown(Broken("timed out")));
            stage.runs(&resolving, status.as_str(), unknown).await.unwrap_err();
            let error = stage.asked(&resolving, status.as_str()).await.unwrap_err();
            assert!(!error.is_done() && error.retry_after().is_none(), "{error:?}");
            let said = error.to_string();
            assert!(said.contains("look up what was done"), "{said}");
        }
    }

    async fn a_resolvers_answer_without_a_body_is_named(world: World) {
        let store = world.open().await;
        let answer = |_: Abandoned| async { Verdict::answer(StatusCode::NO_CONTENT) };
        let resolving = Once::new(layer(&store).resolver(answer));
        let mut stage = Stage::new();
        let unknown = Err(Failure::Unknown(Broken("timed out")));
        stage.runs(&resolving, "k", unknown).await.unwrap_err();
        let error = stage.asked(&resolving, "k").await.unwrap_err();
        assert!(error.is_done(), "{error:?}");
        let said = error.to_string();
        assert!(said.contains("a resolver") && said.contains("without a body"), "{said}");
    }
}

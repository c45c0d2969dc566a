//! How keys are given, and that they are never shown.

use std::panic::catch_unwind;

use tower_idempotency::{MemoryStore, SealedStore, SealingKey, SealingKeys, store::Inspect};

use crate::{
    common::*,
    support::{World, logs::Written, post, send},
};

#[test]
fn a_key_is_read_from_its_bytes_or_from_hexadecimal() {
    let bytes: Vec<u8> = (0..32).map(|at| at * 8 + 7).collect();
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let key = SealingKey::try_from(&bytes[..]).unwrap();
    assert_eq!(hex.parse(), Ok(key.clone()));
    assert_eq!(hex.to_uppercase().parse(), Ok(key.clone()));
    assert_eq!(format!(" {hex}\n").parse(), Ok(key.clone()));
    let array: [u8; 32] = bytes.try_into().unwrap();
    assert_eq!(SealingKey::from(array), key);
    assert_ne!("5e".repeat(32).parse(), Ok(key));
}

#[test]
fn what_is_no_key_is_refused_and_not_quoted() {
    for (text, says) in [
        ("", "64 hexadecimal digits, not 0"),
        ("5e5e", "64 hexadecimal digits, not 4"),
        (&"5e".repeat(33), "64 hexadecimal digits, not 66"),
        (&"5g".repeat(32), "0-9 and a-f"),
        (&"é".repeat(32), "0-9 and a-f"),
        (&"00".repeat(32), "zeros"),
    ] {
        let error = text.parse::<SealingKey>().unwrap_err();
        assert!(error.to_string().contains(says), "{error}");
        assert!(!error.to_string().contains("5e"), "{error}");
    }
    for (bytes, says) in [
        (&[7; 16][..], "32 bytes, not 16"),
        (&[7; 64], "32 bytes, not 64"),
        (&[0; 32], "zeros"),
    ] {
        let error = SealingKey::try_from(bytes).unwrap_err();
        assert!(error.to_string().contains(says), "{error}");
    }
}

/// What a wrong setting panics with.
fn panics(build: impl FnOnce() -> SealingKeys + std::panic::UnwindSafe) -> String {
    let panic = catch_unwind(build).expect_err("it was taken");
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()))
        .unwrap()
}

#[test]
fn ids_and_keys_that_would_be_mistaken_are_refused_at_once() {
    for id in ["", "a b", "é", "a\n", "\u{7f}", &"k".repeat(65)] {
        assert!(panics(|| SealingKeys::new(id, NEW)).contains("1 to 64 visible ASCII"));
        assert!(panics(|| keys().also_opens(id, OLD)).contains("1 to 64 visible ASCII"));
    }
    let twice = panics(|| keys().also_opens("2026-12", OLD));
    assert!(
        twice.contains("two keys with the id \"2026-12\""),
        "{twice}"
    );
    let twice = panics(|| keys().also_opens("a", OLD).also_opens("a", OTHER));
    assert!(twice.contains("two keys with the id \"a\""), "{twice}");
    assert!(panics(|| SealingKeys::new("a", [0; 32])).contains("zeros"));
    assert!(panics(|| keys().hash_ids([0; 32])).contains("zeros"));
    assert!(panics(|| keys().hash_ids(NEW)).contains("of its own"));
    assert!(panics(|| keys().hash_ids(OLD).also_opens("old", OLD)).contains("of its own"));
    let _ = SealingKeys::new("k".repeat(64), NEW).also_opens("!", OLD);
}

#[track_caller]
fn assert_redacted(text: &str) {
    let lower = text.to_lowercase();
    for key in [NEW, OLD, NAMES, OTHER] {
        let hex = format!("{:02x}", key[0]).repeat(3);
        let list = format!("{0}, {0}, {0}", key[0]);
        assert!(!lower.contains(&hex) && !text.contains(&list), "{text}");
    }
    for secret in [SCOPE, FIELD, BODY, "k3y-s3cret"] {
        assert!(!text.contains(secret), "{secret} in {text}");
    }
}

#[tokio::test]
async fn debug_shows_ids_and_no_keys() {
    let keys = hashing().also_opens("2026-06", OLD);
    let store = SealedStore::open(MemoryStore::new(), keys.clone()).await;
    let key = SealingKey::from(NEW);
    let shown = format!(
        "{key:?} {keys:?} {keys:#?} {:?} {store:?} {store:#?}",
        layer(store.as_ref().unwrap())
    );
    assert!(
        shown.contains("2026-12") && shown.contains("2026-06"),
        "{shown}"
    );
    assert_redacted(&shown);
}

#[tokio::test]
async fn no_key_and_nothing_sealed_is_logged_at_any_level() {
    let (log, _guard) = Written::of_this_thread();
    for world in World::each() {
        let handler = secretive();
        let right = handler.behind(layer(&open(&world, hashing()).await));
        let wrong = SealingKeys::new("2026-12", OTHER).hash_ids(NAMES);
        let wrong = handler.behind(layer(&open(&world, wrong).await));
        for app in [&right, &right, &wrong] {
            send(app, post("k3y-s3cret", BODY)).await;
        }
        let error = try_open(&world, keys()).await.unwrap_err();
        assert_redacted(&format!("{error} {error:?}"));
        let record = open(&world, hashing()).await.get(&id("k3y-s3cret")).await;
        assert_redacted(&format!("{record:?}"));
    }
    let text = log.text();
    assert!(
        text.contains("does not open") && text.contains("replayed"),
        "the log is deaf"
    );
    assert_redacted(&text);
}

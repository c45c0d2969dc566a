//! What is said of all this in events.

use support::logs::Logs;
use tower_idempotency::{MemoryStore, store::AnyStore, store::Checkpoints, testing::FaultyStore};
use tracing::Level;

use super::*;

/// Each resolution is said once, at a level that fits, and nothing of the record with it.
#[tokio::test]
async fn each_resolution_is_said_once_and_nothing_secret_with_it() {
    let (logs, _guard) = Logs::of_this_thread();
    let store: TestStore = FaultyStore::new(AnyStore::new(MemoryStore::new()));
    let resolver = |abandoned: Abandoned| async move {
        let shown = format!("{abandoned:?}");
        assert!(
            shown.contains("Abandoned") && !shown.contains("secret"),
            "{shown}"
        );
        match abandoned.key().unwrap().as_str().unwrap().as_bytes()[0] {
            b'a' => Verdict::answer((StatusCode::CREATED, "secret-body")),
            b'd' => Verdict::DidNotHappen,
            b'p' => panic!("as the test wants"),
            b'h' => std::future::pending().await,
            _ => Verdict::Leave,
        }
    };
    let layer = layer(&store)
        .resolver(resolver)
        .resolver_timeout(Duration::from_millis(20));
    let said = [
        ("answered", Level::INFO),
        ("did_not_happen", Level::INFO),
        ("panicked", Level::WARN),
        ("timed_out", Level::WARN),
        ("left", Level::WARN),
    ];
    let app = Handler::new().behind(layer.clone());
    for by in ["sweep", "request"] {
        for (letter, (verdict, level)) in ["a", "d", "p", "h", "l"].into_iter().zip(said) {
            let key = format!("{letter}-secret-key-{by}");
            let Claim::Won(ticket) = store.claim(claim(&key)).await.unwrap() else {
                panic!("not won")
            };
            let saved = store
                .save(&ticket, "step", Bytes::from("secret-value"))
                .await;
            assert_eq!(saved.unwrap(), Settled::Done);
            assert_eq!(store.abandon(&ticket).await.unwrap(), Settled::Done);
            let before = logs.all().len();
            match by {
                "sweep" => assert_eq!(layer.reconciler().sweep().await.failed, 0),
                _ => drop(send(&app, post(&key, "A")).await),
            }
            let mut events = logs.all().split_off(before);
            events.retain(|event| event.text.contains("resolved"));
            let [event] = &events[..] else {
                panic!("{key}: {events:?}")
            };
            assert_eq!(event.level, level, "{event:?}");
            for part in [by, verdict, "attempt"] {
                assert!(event.text.contains(part), "{part}: {event:?}");
            }
        }
    }
    for event in logs.all() {
        // The key is shown by nobody, and as little the body, or a value that was saved.
        assert!(!event.text.contains("secret"), "{event:?}");
    }
}

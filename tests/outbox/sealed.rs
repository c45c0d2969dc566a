//! Sealing: headers, body and answer are unreadable in the database, and open nowhere else.

use axum::body::Body;
use http::{HeaderName, HeaderValue};
use tower_idempotency::{
    SealingKeys,
    client::{EntryState, Operation, Outbox, OutboxErrorKind, Relay, Undelivered},
};

use crate::ground::{both, charge_of};

fn secret() -> Operation {
    let (name, value) = (
        HeaderName::from_static("x-account"),
        HeaderValue::from_static("hush-header"),
    );
    charge_of(1).header(name, value).body("hush-body")
}

fn contains(bytes: &[u8], text: &str) -> bool {
    bytes
        .windows(text.len())
        .any(|window| window == text.as_bytes())
}

both! {
    async fn what_is_sealed_is_unreadable_and_is_sent_as_it_was(ground: Ground) {
        let outbox = ground
            .outbox
            .clone()
            .sealed(SealingKeys::new("k1", [1; 32]));
        outbox.begin("sealed", secret()).await.unwrap();
        ground.outbox.begin("plain", secret()).await.unwrap();
        let (sealed, plain) = (
            ground.bytes("request", "sealed").await,
            ground.bytes("request", "plain").await,
        );
        for text in ["hush-header", "hush-body", "text/plain"] {
            assert!(contains(&plain, text) && !contains(&sealed, text), "{text}");
        }
        let relay = Relay::new(outbox.clone(), ground.shop.client());
        assert_eq!(
            relay.send::<Body, _>("sealed").await.unwrap().state(),
            EntryState::Done
        );
        let asked = &ground.shop.charges()[0];
        assert_eq!(
            (&asked.headers["x-account"], &asked.body[..]),
            (&HeaderValue::from_static("hush-header"), &b"hush-body"[..])
        );
        assert!(!contains(&ground.bytes("result", "sealed").await, "ch_1"));
        let kept = outbox
            .find("sealed")
            .await
            .unwrap()
            .unwrap()
            .result()
            .unwrap()
            .unwrap();
        assert_eq!(&kept.body()[..], b"ch_1");
        // Without the keys the state is known, and nothing else.
        let found = ground.outbox.find("sealed").await.unwrap().unwrap();
        assert_eq!(found.state(), EntryState::Done);
        assert_eq!(found.operation().unwrap_err().kind(), OutboxErrorKind::Keys);
        assert_eq!(found.result().unwrap_err().kind(), OutboxErrorKind::Keys);
    }

    async fn keys_rotate_and_the_wrong_one_sends_nothing_and_changes_nothing(ground: Ground) {
        let with = |keys: SealingKeys| ground.outbox.clone().sealed(keys);
        let old = || SealingKeys::new("old", [1; 32]);
        with(old()).begin("r", secret()).await.unwrap();
        with(SealingKeys::new("new", [2; 32]))
            .begin("readable", secret())
            .await
            .unwrap();
        ground.age("r", std::time::Duration::from_secs(60)).await;
        let before = ground.bytes("request", "r").await;

        let strangers = [
            ("no key at all", ground.outbox.clone()),
            ("another id", with(SealingKeys::new("new", [2; 32]))),
            (
                "another key of the same id",
                with(SealingKeys::new("old", [3; 32]).also_opens("new", [2; 32])),
            ),
        ];
        for (who, outbox) in strangers {
            let relay = Relay::new(outbox.clone(), ground.shop.client());
            let refused = relay.send::<Body, _>("r").await.unwrap_err();
            let Undelivered::Outbox(error) = &refused else {
                panic!("{who}: {refused:?}")
            };
            assert_eq!(error.kind(), OutboxErrorKind::Keys, "{who}");
            let begun = outbox.begin("r", secret()).await.unwrap_err();
            assert_eq!(begun.kind(), OutboxErrorKind::Keys, "{who}");
            let row = outbox.find("r").await.unwrap().unwrap();
            assert_eq!(
                (row.state(), row.attempts(), row.last_attempt()),
                (EntryState::Pending, 0, None),
                "{who}"
            );
        }
        assert_eq!(
            (
                ground.bytes("request", "r").await,
                ground.shop.requests().len()
            ),
            (before, 0)
        );

        // It stops only itself.
        let relay = Relay::new(with(SealingKeys::new("new", [2; 32])), ground.shop.client());
        let resumed = relay.resume::<Body, _>(1).await.unwrap();
        assert_eq!(
            (
                resumed.done.len(),
                resumed.pending.len(),
                &*resumed.pending[0].reference
            ),
            (1, 1, "r")
        );

        let rotated = with(SealingKeys::new("new", [2; 32]).also_opens("old", [1; 32]));
        assert_eq!(rotated.sealed_with("old").await.unwrap(), 1);
        let relay = Relay::new(rotated.clone(), ground.shop.client());
        assert_eq!(relay.resume::<Body, _>(10).await.unwrap().done.len(), 1);
        // The request of the one still needs it.
        for (id, rows) in [("old", 1), ("new", 2), ("ol", 0), ("", 0)] {
            assert_eq!(rotated.sealed_with(id).await.unwrap(), rows, "{id}");
        }
        let two_days = std::time::Duration::from_secs(2 * 86_400);
        ground.age("r", two_days).await;
        assert_eq!(rotated.purge(10).await.unwrap(), 1);
        assert_eq!(rotated.sealed_with("old").await.unwrap(), 0);
        assert_eq!(
            (ground.shop.charges().len(), ground.shop.keys().len()),
            (2, 2)
        );
    }

    async fn a_row_that_was_changed_or_swapped_or_never_sealed_does_not_open(ground: Ground) {
        let keys = || SealingKeys::new("k1", [1; 32]);
        let outbox = ground.outbox.clone().sealed(keys());
        for reference in ["a", "b", "elsewhere"] {
            outbox.begin(reference, secret()).await.unwrap();
        }
        ground.outbox.begin("unsealed", secret()).await.unwrap();
        ground.run("UPDATE idempotency_outbox SET request = (SELECT request FROM idempotency_outbox WHERE reference = 'b') WHERE reference = 'a'").await;
        ground.run("UPDATE idempotency_outbox SET uri = 'http://thief.example/' WHERE reference = 'elsewhere'").await;
        let relay = Relay::new(outbox.clone(), ground.shop.client());
        for reference in ["a", "elsewhere", "unsealed"] {
            let refused = relay.send::<Body, _>(reference).await.unwrap_err();
            let Undelivered::Outbox(error) = &refused else {
                panic!("{reference}: {refused:?}")
            };
            assert_eq!(error.kind(), OutboxErrorKind::Keys, "{reference}");
        }
        assert_eq!(ground.shop.requests().len(), 0);
        // While sealing is being turned on.
        let both: Outbox<Db> = ground.outbox.clone().sealed(keys().also_opens_plain());
        let relay = Relay::new(both, ground.shop.client());
        assert_eq!(
            relay.send::<Body, _>("unsealed").await.unwrap().state(),
            EntryState::Done
        );
    }
}

#[tokio::test]
#[should_panic(expected = "hash_ids")]
async fn keys_that_hash_names_are_refused() {
    let pool = sqlx::SqlitePool::connect_lazy("sqlite::memory:").unwrap();
    let keys = SealingKeys::new("k1", [1; 32]).hash_ids([2; 32]);
    drop(Outbox::<sqlx::Sqlite>::new(pool).sealed(keys));
}

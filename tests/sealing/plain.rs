//! Sealing is turned on, and off again, while records live.

use tower_idempotency::{
    DecodeError,
    store::{Checkpoints, Claim, ClaimRequest, Settled, Store, StoreErrorKind},
};

use crate::{
    common::*,
    every_store,
    support::{World, logs::Logs, post, send},
};

every_store! {
    // Whoever can write to the database could have put it there.
    async fn an_answer_that_is_not_sealed_is_refused_and_nothing_runs(world: World) {
        let handler = secretive();
        send(&handler.behind(layer(&world.open().await)), post("k-1", "A")).await;
        let store = open(&world, keys()).await;
        let app = handler.behind(layer(&store));
        assert_eq!(send(&app, post("k-1", "A")).await.said(), (503, UNAVAILABLE.to_owned()));
        assert_eq!(send(&app, post("k-1", "B")).await.said(), (409, REUSED.to_owned()));
        assert_eq!(why(&store, &id("k-1")).await, DecodeError::NotSealed);
        assert_eq!(handler.effects(), 1);
    }

    async fn plain_answers_are_replayed_while_that_is_wanted(world: World) {
        let handler = secretive();
        let plain = handler.behind(layer(&world.open().await));
        let first = send(&plain, post("k-1", "A")).await;
        let app = handler.behind(layer(&open(&world, keys().also_opens_plain()).await));
        send(&app, post("k-1", "A")).await.assert_replays(&first);
        // New ones are sealed.
        let second = send(&app, post("k-2", "A")).await;
        send(&app, post("k-2", "A")).await.assert_replays(&second);
        assert_eq!(send(&plain, post("k-2", "A")).await.said(), (503, UNAVAILABLE.to_owned()));
        // And what is sealed with a key that is not there is not taken for plain.
        let other = tower_idempotency::SealingKeys::new("2027-06", OTHER).also_opens_plain();
        let other = handler.behind(layer(&open(&world, other).await));
        assert_eq!(send(&other, post("k-2", "A")).await.said(), (503, UNAVAILABLE.to_owned()));
        assert_eq!(handler.effects(), 2);
    }

    async fn plain_checkpoints_are_read_while_that_is_wanted(world: World) {
        let bare = world.open().await;
        let claim = ClaimRequest::new(id("k-1"), "test", fingerprint());
        let Claim::Won(ticket) = bare.claim(claim).await.unwrap() else { panic!("not won") };
        // As a handler saves them: they say that they are plain.
        for (name, value) in [("a", "\x01\"one\""), ("b", "\x01")] {
            assert_eq!(bare.save(&ticket, name, value.into()).await.unwrap(), Settled::Done);
        }
        let lenient = open(&world, keys().also_opens_plain()).await;
        let loaded = lenient.load(&ticket).await.unwrap().unwrap();
        assert_eq!((&loaded[0].value[..], &loaded[1].value[..]), (&b"\x01\"one\""[..], &b"\x01"[..]));
        let strict = open(&world, keys()).await;
        let error = strict.load(&ticket).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Corrupt);
        let source = std::error::Error::source(&error).unwrap().to_string();
        assert!(source.contains("also_opens_plain"), "{source}");
    }
}

fn fingerprint() -> tower_idempotency::Fingerprint {
    tower_idempotency::Fingerprint::from_bytes([5; 32])
}

#[tokio::test]
async fn the_event_names_the_option() {
    let world = World::memory();
    let handler = secretive();
    send(
        &handler.behind(layer(&world.open().await)),
        post("k-1", "A"),
    )
    .await;
    let app = handler.behind(layer(&open(&world, keys()).await));
    let (logs, _guard) = Logs::of_this_thread();
    assert_eq!(send(&app, post("k-1", "A")).await.status, 503);
    let errors = logs.loud("retained response cannot be read");
    assert_eq!(errors.len(), 1, "{errors:?}");
    assert!(errors[0].text.contains("also_opens_plain"), "{errors:?}");
}

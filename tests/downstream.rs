//! Downstream keys: one action is one key for whoever does a part of it, however often it is run.

mod support;

use std::{
    collections::HashSet,
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{
    Router,
    http::{HeaderName, HeaderValue, Request, StatusCode},
    routing::any,
};
use support::{
    puppet::{Puppet, Run},
    *,
};
use tower_http::catch_panic::CatchPanicLayer;
use tower_idempotency::{
    Abandoned, DownstreamKey, Idempotency, IdempotencyLayer, MemoryStore, NoDownstreamSecret,
    Recovery, Retention, Scope, State, Verdict,
    store::{Checkpoints, Inspect},
};

const SECRET: &[u8] = b"a secret of the service";
const LEASE: Duration = Duration::from_secs(30);
const MAX_RUN: Duration = Duration::from_secs(600);

fn layer<S: Inspect + Checkpoints>(store: &S, scope: &'static [u8]) -> IdempotencyLayer<S> {
    IdempotencyLayer::new(store.clone())
        .scope(move |_| Some(Scope::new(scope)))
        .lease(LEASE)
        .max_run(MAX_RUN)
        .retention(Retention::successes_only())
        .recovery(Recovery::rerun())
        .downstream_secret(SECRET)
}

/// Begins a run of this key, whose handler the test plays.
async fn begin<S: Inspect + Checkpoints>(layer: IdempotencyLayer<S>, key: &str) -> Run {
    let (router, mut puppet) = Puppet::new();
    let app = router.route_layer(layer).layer(CatchPanicLayer::new());
    let request = post(key, "A");
    tokio::spawn(async move { send(&app, request).await });
    puppet.next().await
}

fn key_of(run: &Run, step: &str) -> DownstreamKey {
    run.owner().downstream_key(step).unwrap()
}

/// The key of a first run of this key in this scope, with this secret.
async fn made(secret: &[u8], scope: &'static [u8], key: &str, step: &str) -> String {
    let layer = layer(&MemoryStore::new(), scope).downstream_secret(secret);
    key_of(&begin(layer, key).await, step).to_string()
}

// Worked out by another implementation of HMAC-SHA256. A change here is a second charge somewhere.
#[tokio::test]
async fn they_never_change() {
    let cases = [
        (
            made(SECRET, b"merchant-7", "order-17", "charge").await,
            "c5ca55132c2ec811a18610af3dad9f07",
        ),
        (
            made(SECRET, b"", "order-17", "").await,
            "4c6fe39e2f576820a2b7acb2eb0cd251",
        ),
        (
            made(&[b'x'; 100], &[0xff; 255], "k", "Rückzahlung").await,
            "a688c35291d4510808bb0c56f9951b8d",
        ),
    ];
    for (key, expected) in cases {
        assert_eq!(key, expected);
    }
}

#[tokio::test]
async fn each_step_key_scope_and_secret_has_its_own() {
    let mut keys = HashSet::new();
    for key in [
        made(SECRET, b"shop", "k", "charge").await,
        made(SECRET, b"stall", "k", "charge").await,
        made(SECRET, b"shop", "l", "charge").await,
        made(SECRET, b"shop", "k", "refund").await,
        made(b"another secret of it", b"shop", "k", "charge").await,
        // Nor do the parts run together.
        made(SECRET, b"sho", "pk", "charge").await,
        made(SECRET, b"shopk", "charge", "").await,
        made(SECRET, b"shop", "kcharge", "").await,
        made(SECRET, b"shop", "kc", "harge").await,
        made(SECRET, b"", "shop", "kcharge").await,
        made(SECRET, b"shop\0\0\0\0\0\0\0\x01k", "k", "charge").await,
        made(SECRET, b"shop", "k", "charge\0").await,
        made(SECRET, b"shop", "k", "").await,
    ] {
        assert!(key.len() <= 64 && key.bytes().all(|byte| byte.is_ascii_graphic()));
        assert!(keys.insert(key.clone()), "{key} twice");
    }
}

every_store! {
    async fn every_run_of_a_key_on_every_instance_has_the_same(world: World) {
        let first = begin(layer(&world.open_silent().await, b"shop"), "k").await;
        let expected = key_of(&first, "charge");
        assert_eq!(expected, key_of(&first, "charge"));
        // It died, and another process goes on; that one panics.
        world.clock.advance(LEASE + Duration::from_secs(1));
        let (router, mut puppet) = Puppet::new();
        let app = router.route_layer(layer(&world.open().await, b"shop")).layer(CatchPanicLayer::new());
        let sent = app.clone();
        let crashed = tokio::spawn(async move { send(&sent, post("k", "A")).await });
        let second = puppet.next().await;
        assert_eq!((second.owner().attempt(), key_of(&second, "charge")), (2, expected.clone()));
        second.panics("as the test wants");
        assert_eq!(crashed.await.unwrap().status, 500);
        let third = begin(layer(&world.open().await, b"shop"), "k").await;
        assert_eq!((third.owner().attempt(), key_of(&third, "charge")), (3, expected.clone()));
        // What is forgotten is an old acquaintance to the provider all the same.
        let store = world.open().await;
        assert!(store.forget(&record_id()).await.unwrap());
        let anew = begin(layer(&store, b"shop"), "k").await;
        assert_eq!((anew.owner().attempt(), key_of(&anew, "charge")), (1, expected));
    }

    async fn whoever_resolves_has_the_same_as_the_run(world: World) {
        let store = world.open().await;
        both_ways(&world, || store.clone()).await;
    }
}

#[cfg(feature = "sealing")]
mod sealed {
    use tower_idempotency::{SealedStore, SealingKeys};

    use super::*;

    every_store! {
        async fn so_it_is_where_the_store_knows_only_hashes(world: World) {
            let keys = || SealingKeys::new("2026-12", [0x11; 32]).hash_ids([0x33; 32]);
            let store = SealedStore::open(world.open().await, keys()).await.unwrap();
            both_ways(&world, || store.clone()).await;
            // By the names below, as the chapter says; worked out elsewhere too.
            let run = begin(layer(&store, b"merchant-7"), "order-17").await;
            assert_eq!(key_of(&run, "charge").as_str(), "e0ba320c52a78b2be997006762887bf8");
            // With another hash key, or none, they are others.
            let bare = begin(layer(&world.open().await, b"merchant-7"), "order-17").await;
            assert_eq!(key_of(&bare, "charge").as_str(), "c5ca55132c2ec811a18610af3dad9f07");
        }
    }
}

fn record_id() -> tower_idempotency::RecordId {
    tower_idempotency::RecordId::new(
        Scope::new("shop"),
        tower_idempotency::IdempotencyKey::new("k"),
    )
}

/// A reconciler, that knows only what is stored, and a request, that brings its key.
async fn both_ways<S: Inspect + Checkpoints>(world: &World, store: impl Fn() -> S) {
    let asked = Arc::new(Mutex::new(Vec::new()));
    let seen = asked.clone();
    let resolver = move |abandoned: Abandoned| {
        let key = abandoned.downstream_key("charge").unwrap();
        let saved: Option<String> = abandoned.checkpoint("key").unwrap();
        seen.lock().unwrap().push((key, saved));
        std::future::ready(Verdict::answer(StatusCode::CREATED))
    };
    let mut expected = Vec::new();
    for key in ["swept", "asked"] {
        let run = begin(layer(&store(), b"shop"), key).await;
        let made = key_of(&run, "charge");
        run.owner().checkpoint("key", made.as_str()).await.unwrap();
        expected.push((made.clone(), Some(made.to_string())));
        // Past its end, or a heartbeat could still keep it alive.
        world.clock.advance(MAX_RUN + Duration::from_secs(1));
        let layer = layer(&store(), b"shop").resolver(resolver.clone());
        match key {
            "swept" => {
                let swept = layer.reconciler().sweep().await;
                assert_eq!((swept.seen, swept.answered), (1, 1), "{swept:?}");
            }
            _ => {
                let (router, puppet) = Puppet::new();
                let app = router.route_layer(layer);
                assert_eq!(send(&app, post(key, "A")).await.status, 201);
                assert_eq!(puppet.begun(), 0);
            }
        }
    }
    assert_eq!(*asked.lock().unwrap(), expected);
}

#[tokio::test]
async fn without_a_secret_there_are_none() {
    let store = World::memory().open().await;
    let layer = IdempotencyLayer::new(store.clone()).single_tenant();
    let handler = async |idempotency: Idempotency| {
        idempotency.downstream_key("charge")?;
        Ok::<_, NoDownstreamSecret>(StatusCode::CREATED)
    };
    let app = Router::new()
        .route("/charges", any(handler))
        .route_layer(layer);
    let answer = send(&app, post("k", "A")).await;
    assert_eq!(answer.status, 500);
    let text = String::from_utf8_lossy(&answer.body).into_owned();
    assert!(text.contains("downstream_secret"), "{text}");
    // Whatever the handler did before it asked is not known.
    let left = record(&store, "k").await.map(|record| record.state);
    assert_eq!(left, Some(State::Abandoned));
}

#[test]
fn a_secret_that_could_be_guessed_is_refused() {
    let layer = |secret: &'static [u8]| {
        std::panic::catch_unwind(move || {
            IdempotencyLayer::new(MemoryStore::new()).downstream_secret(secret)
        })
    };
    assert!(layer(&[7; 16]).is_ok());
    let panic = layer(&[7; 15]).unwrap_err();
    let message = panic.downcast_ref::<String>().unwrap();
    assert!(message.contains("downstream_secret"), "{message}");
}

#[tokio::test]
async fn they_are_set_on_outgoing_requests_and_are_not_shown() {
    let run = begin(layer(&MemoryStore::new(), b"shop"), "k").await;
    let key = key_of(&run, "charge");
    let mut request = Request::post("/charges")
        .header("idempotency-key", "one")
        .header("idempotency-key", "two")
        .body(())
        .unwrap();
    key.set_on(&mut request);
    key.set_as(HeaderName::from_static("x-request-token"), &mut request);
    let expected = HeaderValue::from_str(key.as_str()).unwrap();
    for name in ["idempotency-key", "x-request-token"] {
        let set: Vec<_> = request.headers().get_all(name).iter().collect();
        assert_eq!(set, [&expected]);
        assert!(set[0].is_sensitive());
    }
    let layer = layer(&MemoryStore::new(), b"shop");
    for shown in [
        format!("{key:?} {:#?}", Some(&key)),
        format!("{request:?}"),
        format!("{layer:?}"),
    ] {
        assert!(!shown.contains(key.as_str()), "{shown}");
        assert!(!shown.contains("secret of the service"), "{shown}");
        assert!(!shown.contains(&format!("{:?}", SECRET)[1..40]), "{shown}");
    }
}

// So that it outlives a change of the secret.
#[tokio::test]
async fn one_that_was_saved_in_a_checkpoint_is_the_one_that_was_made() {
    let store = MemoryStore::new();
    let first = begin(layer(&store, b"shop"), "k").await;
    let made = key_of(&first, "charge");
    first
        .owner()
        .checkpoint("asked-under", &made)
        .await
        .unwrap();
    first.panics("as the test wants");
    let changed = loop {
        let changed = layer(&store, b"shop").downstream_secret("another secret of it");
        match store.counts().await.unwrap().abandoned {
            1 => break changed,
            _ => tokio::task::yield_now().await,
        }
    };
    let second = begin(changed, "k").await;
    assert_ne!(key_of(&second, "charge"), made);
    let saved: Option<DownstreamKey> = second.owner().checkpointed("asked-under").await.unwrap();
    assert_eq!(saved.as_ref(), Some(&made));
    let mut request = Request::new(());
    saved.unwrap().set_on(&mut request);
    assert_eq!(request.headers()["idempotency-key"], made.as_str());
}

#[test]
fn one_that_was_made_elsewhere_is_1_to_64_visible_ascii_characters() {
    for fine in ["a", "5f0c6a1b-e7d2-4f4b", "!~{}\"\\", &"x".repeat(64)] {
        let key: DownstreamKey = fine.parse().unwrap();
        assert_eq!(
            (key.as_str(), DownstreamKey::try_from(fine.to_owned())),
            (fine, Ok(key.clone()))
        );
        let json = serde_json::to_string(&key).unwrap();
        assert_eq!(json, serde_json::to_string(fine).unwrap());
        assert_eq!(serde_json::from_str::<DownstreamKey>(&json).unwrap(), key);
        let mut request = Request::new(());
        key.set_on(&mut request);
        assert_eq!(request.headers()["idempotency-key"], fine);
    }
    for wrong in [
        "",
        " ",
        "two words",
        "k\n",
        "k\r\nx: y",
        "\0",
        "\x7f",
        "é",
        &"x".repeat(65),
    ] {
        let told = wrong.parse::<DownstreamKey>().unwrap_err();
        assert_eq!(
            told.to_string(),
            "a downstream key is 1 to 64 visible ASCII characters"
        );
        let json = serde_json::to_string(wrong).unwrap();
        let told = serde_json::from_str::<DownstreamKey>(&json)
            .unwrap_err()
            .to_string();
        assert!(
            told.contains("1 to 64") && !told.contains("two words"),
            "{told}"
        );
    }
}

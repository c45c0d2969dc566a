//! What is sealed and hashed is nowhere in the data, and comes back byte for byte.

use axum::{body::Body, http::Response};
use tower_idempotency::{
    SealingKeys,
    store::{Checkpoints, Claim, ClaimRequest, Inspect, Settled},
};

use crate::{
    common::*,
    every_store,
    support::{
        Handler, World, post, send,
        wire::{self, raw_post},
    },
};

const KEY: &str = "k3y-s3cret-of-an-order";
const CHECKPOINT: &str = "ch3ckpoint-s3cret";

/// Which of these stand in the data.
fn found<'a>(raw: &[u8], secrets: &[&'a str]) -> Vec<&'a str> {
    let is_there = |secret: &&&str| raw.windows(secret.len()).any(|at| at == secret.as_bytes());
    secrets.iter().filter(is_there).copied().collect()
}

/// Everything of a kept answer, a run that goes on with a checkpoint, and one that was cut off.
async fn use_it<S: Inspect + Checkpoints>(store: &S) {
    let handler = secretive();
    let app = handler.behind(layer(store));
    let first = send(&app, post(KEY, BODY)).await;
    send(&app, post(KEY, BODY)).await.assert_replays(&first);
    let running = ClaimRequest::new(id(&format!("{KEY}-2")), "test", fingerprint());
    let Claim::Won(ticket) = store.claim(running).await.unwrap() else {
        panic!("not won")
    };
    let saved = store.save(&ticket, "step", CHECKPOINT.into()).await;
    assert_eq!(saved.unwrap(), Settled::Done);
    let loaded = store.load(&ticket).await.unwrap().unwrap();
    assert_eq!(&loaded[0].value[..], CHECKPOINT.as_bytes());
}

fn fingerprint() -> tower_idempotency::Fingerprint {
    tower_idempotency::Fingerprint::from_bytes([5; 32])
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_response_and_no_checkpoint_can_be_read_in_the_database() {
    for world in World::durable() {
        let store = open(&world, keys()).await;
        use_it(&store).await;
        let raw = world.raw().await.unwrap();
        assert_eq!(found(&raw, &[FIELD, BODY, CHECKPOINT]), [] as [&str; 0]);
        // Names are stored as they are, and the id of the key.
        let names = [SCOPE, KEY, "2026-12"];
        assert_eq!(found(&raw, &names), names);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_hashed_ids_no_scope_and_no_key_can_be_read_in_the_database() {
    for world in World::durable() {
        let store = open(&world, hashing()).await;
        use_it(&store).await;
        let raw = world.raw().await.unwrap();
        let secrets = [FIELD, BODY, CHECKPOINT, SCOPE, KEY];
        assert_eq!(found(&raw, &secrets), [] as [&str; 0]);
        assert_eq!(found(&raw, &["2026-12"]), ["2026-12"]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_sealing_the_search_finds_all_of_it() {
    for world in World::durable() {
        use_it(&world.open().await).await;
        let raw = world.raw().await.unwrap();
        let secrets = [FIELD, BODY, CHECKPOINT, SCOPE, KEY];
        assert_eq!(found(&raw, &secrets), secrets);
    }
}

/// Repeated fields, values that are no text, and a body of any bytes.
fn odd(size: usize) -> Handler {
    Handler::answering(move |seen| {
        let body: Vec<u8> = (0..size).map(|at| (at * 7 + at / 256) as u8).collect();
        Response::builder()
            .status(402)
            .header("x-odd", &b"\xC3\xA5"[..])
            .header("x-odd", &b"\xFF\x80\tz"[..])
            .header("link", "</a>; rel=\"next\"")
            .header("link", "</b>; rel=\"prev\"")
            .header("link", "</a>; rel=\"next\"")
            .header("x-empty", "")
            .header("x-run", seen.run)
            .body(Body::from(body))
            .unwrap()
    })
}

async fn comes_back(world: &World, keys: SealingKeys, size: usize) {
    let handler = odd(size);
    let app = handler.behind(layer(&open(world, keys.clone()).await));
    let key = format!("k-{size}");
    let first = send(&app, post(&key, "A")).await;
    assert_eq!((first.status.as_u16(), first.body.len()), (402, size));
    send(&app, post(&key, "A")).await.assert_replays(&first);
    // Over the network, and from another process.
    let elsewhere = handler.behind(layer(&open(world, keys).await));
    let server = wire::Server::start(elsewhere).await;
    let retry = server.exchange(&raw_post(&key, "A")).await;
    assert_eq!((retry.status, retry.is_replay()), (402, true));
    assert_eq!(retry.body, first.body);
    for name in ["x-odd", "link", "x-empty", "x-run"] {
        let of_first = first.headers.get_all(name).iter();
        let of_first: Vec<_> = of_first.map(|value| value.as_bytes()).collect();
        let of_retry = retry.headers.iter().filter(|(is, _)| is == name);
        let of_retry: Vec<_> = of_retry.map(|(_, value)| &value[..]).collect();
        assert_eq!(of_retry, of_first, "{name}");
    }
    assert_eq!(handler.effects(), 1);
}

every_store! {
    async fn a_sealed_answer_is_replayed_byte_for_byte(world: World) {
        for size in [0, 1, 200, 70_000, 1024 * 1024] {
            comes_back(&world, keys(), size).await;
        }
    }

    async fn a_sealed_answer_under_a_hashed_name_is_replayed_byte_for_byte(world: World) {
        for size in [0, 200, 70_000] {
            comes_back(&world, hashing(), size).await;
        }
    }
}

//! An operator finds, counts and forgets records, and clears out what is over, without a request.

mod support;

use std::time::Duration;

use axum::{body::Body, http::Request};
use support::{puppet::Puppet, *};
use tower_http::catch_panic::CatchPanicLayer;
use tower_idempotency::{
    IdempotencyKey, IdempotencyLayer, RecordId, Scope, State,
    store::{Counts, Inspect, Store},
};

/// So long that no layer clears anything out while these tests last.
const TTL: Duration = Duration::from_secs(3_600);

fn layer(store: &TestStore) -> IdempotencyLayer<TestStore> {
    IdempotencyLayer::new(store.clone()).ttl(TTL).scope(|head| {
        let tenant = head.headers.get("x-tenant")?;
        Some(Scope::new(tenant.as_bytes()))
    })
}

fn id(tenant: &str, key: &str) -> RecordId {
    RecordId::new(Scope::new(tenant), IdempotencyKey::new(key))
}

fn from(tenant: &str, key: &str, body: &'static str) -> Request<Body> {
    let mut request = post(key, body);
    request
        .headers_mut()
        .insert("x-tenant", tenant.parse().unwrap());
    request
        .headers_mut()
        .insert("x-request-id", format!("{tenant}/{key}").parse().unwrap());
    request
}

async fn states(store: &TestStore) -> [u64; 4] {
    let Counts {
        running,
        completed,
        abandoned,
        released,
        ..
    } = store.counts().await.unwrap();
    [running, completed, abandoned, released]
}

every_store! {
    // V4
    async fn a_record_is_found_by_scope_and_key_whatever_its_state(world: World) {
        let store = world.open().await;
        let (router, mut puppet) = Puppet::new();
        let app = router.route_layer(layer(&store)).layer(CatchPanicLayer::new());
        assert_eq!(store.get(&id("t1", "k")).await.unwrap(), None);
        let mut answers = Vec::new();
        for tenant in ["t1", "t2"] {
            answers.push(spawn(&app, from(tenant, "k", "A")));
            let run = puppet.next().await;
            if tenant == "t2" {
                run.answers(201, "done");
                answers.pop().unwrap().await.unwrap();
            } else {
                answers.push(spawn(&app, from(tenant, "cut", "A")));
                puppet.next().await.panics("as the test wants");
                answers.pop().unwrap().await.unwrap();
                answers.push(spawn(&app, from(tenant, "step", "A")));
                let stepping = puppet.next().await;
                stepping.owner().checkpoint("step", &1).await.unwrap();
                stepping.answers(400, "no");
                answers.pop().unwrap().await.unwrap();
                // Still running; its answer is of no interest.
                std::mem::forget(run);
            }
        }
        // An operator has an instance of its own.
        let desk = world.open().await;
        for (tenant, key, state, status) in [
            ("t1", "k", State::Running, None),
            ("t2", "k", State::Completed, Some(201)),
            ("t1", "cut", State::Abandoned, None),
            ("t1", "step", State::Released, None),
        ] {
            let record = desk.get(&id(tenant, key)).await.unwrap().unwrap();
            assert_eq!(record.id, id(tenant, key));
            assert_eq!((record.state, record.status.map(|status| status.as_u16())), (state, status));
            assert_eq!(record.request_id.as_deref(), Some(&*format!("{tenant}/{key}")));
        }
        assert_eq!(desk.get(&id("t2", "cut")).await.unwrap(), None);
        assert_eq!(states(&desk).await, [1, 1, 1, 1]);
        let abandoned = desk.abandoned(None, 10).await.unwrap();
        assert_eq!(abandoned.iter().map(|record| &record.id).collect::<Vec<_>>(), [&id("t1", "cut")]);
    }

    // V4, L3
    async fn forgetting_a_running_record_fences_its_owner_off(world: World) {
        let store = world.open().await;
        let desk = world.open().await;
        let (router, mut puppet) = Puppet::new();
        let app = router.route_layer(layer(&store)).layer(CatchPanicLayer::new());
        for (at, ending) in ["answers", "fails", "panics"].into_iter().enumerate() {
            let key = &*format!("k-{ending}");
            let first = spawn(&app, from("t", key, "A"));
            let late = puppet.next().await;
            assert!(desk.forget(&id("t", key)).await.unwrap());
            assert!(!desk.forget(&id("t", key)).await.unwrap(), "there is none any more");
            assert!(late.owner().ensure_owned().await.is_err());
            assert!(late.owner().checkpoint("step", &1).await.is_err());
            // The key is free, also for another request.
            let second = spawn(&app, from("t", key, "B"));
            let run = puppet.next().await;
            assert_eq!((run.owner().attempt(), puppet.begun()), (1, 2 * at + 2));
            let before = desk.get(&id("t", key)).await.unwrap();
            let status = match ending {
                "answers" => {
                    late.answers(201, "late");
                    201
                }
                "fails" => {
                    late.answers(400, "late");
                    400
                }
                _ => {
                    late.panics("as the test wants");
                    500
                }
            };
            // Its client gets its true answer, and the record is not touched.
            let first = first.await.unwrap();
            assert_eq!((first.status.as_u16(), first.replay), (status, false));
            assert_eq!(desk.get(&id("t", key)).await.unwrap(), before);
            run.answers(201, "second");
            let second = second.await.unwrap();
            assert_eq!(&second.body[..], b"second");
            send(&app, from("t", key, "B")).await.assert_replays(&second);
        }
    }

    // V4
    async fn forgetting_a_record_frees_its_key_and_no_other(world: World) {
        let handler = Handler::new();
        let store = world.open().await;
        let app = handler.behind(layer(&store));
        let desk = world.open().await;
        for tenant in ["t1", "t2"] {
            for key in ["a", "b"] {
                send(&app, from(tenant, key, "A")).await;
            }
        }
        assert!(desk.forget(&id("t1", "a")).await.unwrap());
        assert_eq!(states(&desk).await, [0, 3, 0, 0]);
        for (tenant, key, replays) in [("t1", "b", true), ("t2", "a", true), ("t1", "a", false)] {
            let answer = send(&app, from(tenant, key, "A")).await;
            assert_eq!((answer.status.as_u16(), answer.replay), (201, replays), "{tenant} {key}");
        }
        assert_eq!(handler.effects(), 5);
    }

    // V4
    async fn what_is_over_is_cleared_out_when_an_operator_says_so(world: World) {
        let handler = Handler::new();
        let store = world.open().await;
        let app = handler.behind(layer(&store));
        let desk = world.open().await;
        for at in 0..5 {
            send(&app, from("t", &format!("old-{at}"), "A")).await;
        }
        world.clock.advance(TTL / 2);
        for at in 0..2 {
            send(&app, from("t", &format!("new-{at}"), "A")).await;
        }
        assert_eq!(desk.purge(100).await.unwrap(), 0);
        world.clock.advance(TTL / 2 + Duration::from_secs(1));
        // What is over counts no longer, cleared out or not.
        assert_eq!(states(&desk).await, [0, 2, 0, 0]);
        assert_eq!(desk.get(&id("t", "old-0")).await.unwrap(), None);
        for purged in [2, 2, 1, 0] {
            assert_eq!(desk.purge(2).await.unwrap(), purged);
        }
        assert_eq!(states(&desk).await, [0, 2, 0, 0]);
        assert!(send(&app, from("t", "new-0", "A")).await.replay);
    }
}

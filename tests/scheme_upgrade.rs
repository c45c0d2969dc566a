//! A deploy changes the fingerprint scheme while records of the old one are alive: no honest retry is
//! refused for it, and none is compared under a rule that its record was not made under.

mod support;

use axum::{
    Router,
    body::Body,
    http::{Request, request::Parts},
};
use bytes::Bytes;
use http::Response;
use support::{
    puppet::Puppet,
    wire::{Reply, Server},
    *,
};
use tokio::task::JoinHandle;
use tower_http::catch_panic::CatchPanicLayer;
#[cfg(feature = "multipart")]
use tower_idempotency::MultipartParts;
use tower_idempotency::{
    CanonicalJson, ExactRequest, Fingerprint, FingerprintScheme, IdempotencyKey, IdempotencyLayer,
    KeyOnly, RecordId, Recovery, Retain, Scope, State, UndecodableBody, fingerprint_fn,
    store::{Checkpoints, Claim, ClaimRequest, Store},
    testing::{Fault, Operation, Times},
};

const REUSED: &str = "idempotency_key_reused";
const INVALID: &str = "idempotency_body_invalid";
const IN_FLIGHT: &str = "idempotency_in_flight";
const NOT_RETAINED: &str = "idempotency_response_not_retained";
const UNKNOWN: &str = "idempotency_outcome_unknown";

type Layer = IdempotencyLayer<TestStore>;

/// Media type and body of a POST to `/charges`.
type Sent = (&'static str, &'static str);

/// From `ExactRequest` to another scheme, and what it makes of some requests.
struct Upgrade {
    scheme: &'static str,
    fingerprint: fn(Layer) -> Layer,
    also_accept: fn(Layer) -> Layer,
    /// Two spellings of what is one request under the new scheme and two under the old.
    body: Sent,
    respelt: Sent,
    /// Another request under both.
    other: Sent,
    /// Two that only the old scheme can read.
    unreadable: Sent,
    unreadable_too: Sent,
}

impl Upgrade {
    fn apply(&self, layer: Layer) -> Layer {
        // One older still, so that the right one has to be found.
        let layer = (self.fingerprint)(layer).also_accept(KeyOnly);
        layer.also_accept(ExactRequest)
    }
}

fn upgrades() -> Vec<Upgrade> {
    vec![
        Upgrade {
            scheme: "json-v1",
            fingerprint: |layer| layer.fingerprint(CanonicalJson::new()),
            also_accept: |layer| layer.also_accept(CanonicalJson::new()),
            body: ("application/json", "{\"a\":1,\"b\":2}"),
            respelt: ("application/json", "{\"b\": 2, \"a\": 1}"),
            other: ("application/json", "{\"a\":9,\"b\":2}"),
            unreadable: ("application/json", "{\"a\":1,\"a\":2}"),
            unreadable_too: ("application/json", "{\"a\":1,\"a\":9}"),
        },
        #[cfg(feature = "multipart")]
        Upgrade {
            scheme: "multipart-v1",
            fingerprint: |layer| layer.fingerprint(MultipartParts::new()),
            also_accept: |layer| layer.also_accept(MultipartParts::new()),
            body: (
                "multipart/form-data; boundary=x",
                "--x\r\ncontent-disposition: form-data; name=\"a\"\r\n\r\n1\r\n--x--\r\n",
            ),
            respelt: (
                "multipart/form-data; boundary=y",
                "--y\r\ncontent-disposition: form-data; name=\"a\"\r\n\r\n1\r\n--y--\r\n",
            ),
            other: (
                "multipart/form-data; boundary=x",
                "--x\r\ncontent-disposition: form-data; name=\"a\"\r\n\r\n9\r\n--x--\r\n",
            ),
            unreadable: (
                "multipart/form-data; boundary=x",
                "--x\r\ncontent-disposition: form-data; name=\"a\"\r\n\r\n1\r\n",
            ),
            unreadable_too: (
                "multipart/form-data; boundary=x",
                "--x\r\ncontent-disposition: form-data; name=\"a\"\r\n\r\n9\r\n",
            ),
        },
        Upgrade {
            scheme: "lines-v1",
            fingerprint: |layer| layer.fingerprint(fingerprint_fn("lines-v1", lines)),
            also_accept: |layer| layer.also_accept(fingerprint_fn("lines-v1", lines)),
            body: ("text/plain", "a=1\nb=2"),
            respelt: ("text/plain", "b=2\na=1"),
            other: ("text/plain", "a=9\nb=2"),
            unreadable: ("text/plain", "a"),
            unreadable_too: ("text/plain", "b"),
        },
    ]
}

/// Lines with an equals sign, in any order.
fn lines(_: &Parts, body: &Bytes) -> Result<Fingerprint, UndecodableBody> {
    let mut lines: Vec<_> = body.split(|byte| *byte == b'\n').collect();
    if lines.iter().any(|line| !line.contains(&b'=')) {
        return Err(UndecodableBody("a line has no equals sign"));
    }
    lines.sort_unstable();
    Ok(Fingerprint::of(lines))
}

/// What a record says: the name of its scheme, its state, and which run it is of.
type Written = (String, State, u32);

fn is(scheme: &str, state: State, run: u32) -> Option<Written> {
    Some((scheme.to_owned(), state, run))
}

/// One version of the service, on a port and a store instance of its own.
struct Deploy {
    server: Server,
    store: TestStore,
}

impl Deploy {
    async fn of(world: &World, app: &Router, set: impl Fn(Layer) -> Layer) -> Self {
        let store = world.open().await;
        let layer = set(IdempotencyLayer::new(store.clone()).single_tenant());
        let app = app.clone().route_layer(layer).layer(CatchPanicLayer::new());
        let server = Server::start(app).await;
        Self { server, store }
    }

    /// Before the upgrade.
    async fn old(world: &World, app: &Router) -> Self {
        Self::of(world, app, |layer| layer).await
    }

    /// After it.
    async fn new(world: &World, app: &Router, upgrade: &Upgrade) -> Self {
        Self::of(world, app, |layer| upgrade.apply(layer)).await
    }

    /// After it, where what was cut off is run again.
    async fn rerunning(world: &World, app: &Router, upgrade: &Upgrade) -> Self {
        let rerun = Recovery::rerun();
        Self::of(world, app, |layer| upgrade.apply(layer).recovery(rerun)).await
    }

    async fn post(&self, key: &str, sent: Sent) -> Reply {
        self.server.exchange(&raw(key, sent)).await
    }

    /// Sends it, and answers when it has come to the handler.
    async fn begin(&self, key: &str, sent: Sent) -> JoinHandle<Reply> {
        let mut wire = self.server.connect().await;
        wire.write(&raw(key, sent)).await;
        tokio::spawn(async move { wire.read_reply().await })
    }

    async fn written(&self, key: &str) -> Option<Written> {
        let record = record(&self.store, key).await?;
        Some((record.scheme.into_owned(), record.state, record.attempt))
    }
}

fn raw(key: &str, (media_type, body): Sent) -> Vec<u8> {
    format!(
        "POST /charges HTTP/1.1\r\nhost: test\r\ncontent-type: {media_type}\r\n\
         idempotency-key: {key}\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

#[track_caller]
fn assert_said(reply: &Reply, status: u16, code: &str) {
    let shown = String::from_utf8_lossy(&reply.body);
    assert_eq!(reply.said(), (status, code.to_owned()), "{shown}");
    assert!(!reply.is_replay());
}

#[track_caller]
fn assert_ran(reply: &Reply) {
    let shown = String::from_utf8_lossy(&reply.body);
    assert_eq!((reply.status, reply.is_replay()), (201, false), "{shown}");
}

#[track_caller]
fn assert_replays(reply: &Reply, first: &Reply) {
    assert!(reply.is_replay(), "{} {}", reply.status, reply.code());
    assert_eq!((reply.status, &reply.body), (first.status, &first.body));
}

/// The digest that the old version would have stored.
fn exact(key: &str, (media_type, body): Sent) -> ClaimRequest {
    let request = Request::post("/charges").header("content-type", media_type);
    let (head, body) = request.body(Bytes::from(body)).unwrap().into_parts();
    let fingerprint = ExactRequest.fingerprint(&head, &body).unwrap();
    let id = RecordId::new(Scope::shared(), IdempotencyKey::new(key));
    ClaimRequest::new(id, ExactRequest.name(), fingerprint)
}

/// A run of the old version that did a step and was then let go.
async fn released_with_a_checkpoint(store: &TestStore, key: &str, sent: Sent) {
    let Claim::Won(ticket) = store.claim(exact(key, sent)).await.unwrap() else {
        panic!("{key} is taken");
    };
    let _ = store.save(&ticket, "step", Bytes::from("1")).await.unwrap();
    let day = std::time::Duration::from_secs(86_400);
    let _ = store.release(&ticket, day).await.unwrap();
}

every_store! {
    async fn a_completed_record_is_compared_under_the_scheme_it_was_made_under(world: World) {
        for upgrade in upgrades() {
            let handler = Handler::new();
            let key = upgrade.scheme;
            let old = Deploy::old(&world, &handler.router()).await;
            let first = old.post(key, upgrade.body).await;
            assert_ran(&first);
            let written = record(&old.store, key).await;

            let new = Deploy::new(&world, &handler.router(), &upgrade).await;
            assert_replays(&new.post(key, upgrade.body).await, &first);
            assert_said(&new.post(key, upgrade.respelt).await, 409, REUSED);
            assert_said(&new.post(key, upgrade.other).await, 409, REUSED);
            assert_eq!(record(&new.store, key).await, written, "none of it changes the record");
            // Both versions serve for a while.
            assert_replays(&old.post(key, upgrade.body).await, &first);
            assert_eq!(handler.effects(), 1);
        }
    }

    async fn a_new_key_is_recorded_under_the_new_scheme(world: World) {
        for upgrade in upgrades() {
            let handler = Handler::new();
            let new = Deploy::new(&world, &handler.router(), &upgrade).await;
            let key = upgrade.scheme;
            let first = new.post(key, upgrade.body).await;
            assert_ran(&first);
            assert_eq!(new.written(key).await, is(upgrade.scheme, State::Completed, 1));
            assert_replays(&new.post(key, upgrade.respelt).await, &first);
            assert_said(&new.post(key, upgrade.other).await, 409, REUSED);
            assert_eq!(handler.effects(), 1);
        }
    }

    async fn a_run_in_flight_is_met_under_the_old_scheme(world: World) {
        for upgrade in upgrades() {
            let (router, mut puppet) = Puppet::new();
            let key = upgrade.scheme;
            let old = Deploy::old(&world, &router).await;
            let held = old.begin(key, upgrade.body).await;
            let run = puppet.next().await;

            let new = Deploy::new(&world, &router, &upgrade).await;
            assert_said(&new.post(key, upgrade.body).await, 409, IN_FLIGHT);
            assert_said(&new.post(key, upgrade.respelt).await, 409, REUSED);
            assert_said(&new.post(key, upgrade.other).await, 409, REUSED);
            run.answers(201, "done");
            let first = held.await.unwrap();
            assert_ran(&first);
            assert_replays(&new.post(key, upgrade.body).await, &first);
            assert_eq!(new.written(key).await, is("exact-v1", State::Completed, 1));
            assert_eq!(puppet.begun(), 1);
        }
    }

    async fn an_abandoned_run_is_compared_before_anything_is_said_or_rerun(world: World) {
        for upgrade in upgrades() {
            let (router, mut puppet) = Puppet::new();
            let key = upgrade.scheme;
            let old = Deploy::old(&world, &router).await;
            let first = old.begin(key, upgrade.body).await;
            puppet.next().await.panics("as the test wants");
            assert_eq!(first.await.unwrap().status, 500);
            assert_eq!(old.written(key).await, is("exact-v1", State::Abandoned, 1));

            let refusing = Deploy::new(&world, &router, &upgrade).await;
            assert_said(&refusing.post(key, upgrade.body).await, 409, UNKNOWN);
            let rerunning = Deploy::rerunning(&world, &router, &upgrade).await;
            for new in [&refusing, &rerunning] {
                assert_said(&new.post(key, upgrade.respelt).await, 409, REUSED);
                assert_said(&new.post(key, upgrade.other).await, 409, REUSED);
            }
            assert_eq!(puppet.begun(), 1);

            // Whoever runs it again writes the record anew, under its own scheme.
            let second = rerunning.begin(key, upgrade.body).await;
            puppet.next().await.panics("as the test wants");
            assert_eq!(second.await.unwrap().status, 500);
            assert_eq!(rerunning.written(key).await, is(upgrade.scheme, State::Abandoned, 2));
            assert_said(&rerunning.post(key, upgrade.other).await, 409, REUSED);
            let third = rerunning.begin(key, upgrade.respelt).await;
            puppet.next().await.answers(201, "done");
            let third = third.await.unwrap();
            assert_ran(&third);
            assert_replays(&rerunning.post(key, upgrade.body).await, &third);
            assert_eq!(puppet.begun(), 3);
        }
    }

    async fn a_released_key_is_free_for_any_request_under_the_new_scheme(world: World) {
        for upgrade in upgrades() {
            let handler = Handler::answering(|seen| {
                let status = if seen.run == 1 { 422 } else { 201 };
                Response::builder().status(status).body(Body::empty()).unwrap()
            });
            let key = upgrade.scheme;
            let old = Deploy::old(&world, &handler.router()).await;
            assert_eq!(old.post(key, upgrade.body).await.status, 422);
            let new = Deploy::new(&world, &handler.router(), &upgrade).await;
            assert_ran(&new.post(key, upgrade.other).await);
            assert_eq!(new.written(key).await, is(upgrade.scheme, State::Completed, 1));
        }
    }

    async fn a_run_released_with_a_checkpoint_goes_on_for_the_same_request_only(world: World) {
        for upgrade in upgrades() {
            let handler = Handler::new();
            let key = upgrade.scheme;
            let old = Deploy::old(&world, &handler.router()).await;
            released_with_a_checkpoint(&old.store, key, upgrade.body).await;
            assert_eq!(old.written(key).await, is("exact-v1", State::Released, 1));

            let new = Deploy::new(&world, &handler.router(), &upgrade).await;
            assert_said(&new.post(key, upgrade.respelt).await, 409, REUSED);
            assert_said(&new.post(key, upgrade.other).await, 409, REUSED);
            assert_eq!(handler.effects(), 0);
            let first = new.post(key, upgrade.body).await;
            assert_ran(&first);
            assert_eq!(new.written(key).await, is(upgrade.scheme, State::Completed, 2));
            assert_replays(&new.post(key, upgrade.respelt).await, &first);
        }
    }

    async fn a_tombstone_is_told_to_the_same_request_only(world: World) {
        for upgrade in upgrades() {
            let handler = tombstones();
            let key = upgrade.scheme;
            let old = Deploy::old(&world, &handler.router()).await;
            assert_ran(&old.post(key, upgrade.body).await);
            let new = Deploy::new(&world, &handler.router(), &upgrade).await;
            assert_said(&new.post(key, upgrade.body).await, 409, NOT_RETAINED);
            assert_said(&new.post(key, upgrade.respelt).await, 409, REUSED);
            assert_said(&new.post(key, upgrade.other).await, 409, REUSED);
            assert_eq!(handler.effects(), 1);
        }
    }

    async fn a_deploy_that_is_rolled_back_knows_the_records_of_the_new_scheme(world: World) {
        for upgrade in upgrades() {
            let (router, mut puppet) = Puppet::new();
            let (done, held) = (upgrade.scheme, &format!("{}-held", upgrade.scheme));
            let new = Deploy::new(&world, &router, &upgrade).await;
            let first = new.begin(done, upgrade.body).await;
            puppet.next().await.answers(201, "done");
            let first = first.await.unwrap();
            let running = new.begin(held, upgrade.body).await;
            let run = puppet.next().await;

            let back = Deploy::of(&world, &router, upgrade.also_accept).await;
            // Compared under the new scheme, since that is theirs.
            assert_replays(&back.post(done, upgrade.body).await, &first);
            assert_replays(&back.post(done, upgrade.respelt).await, &first);
            assert_said(&back.post(done, upgrade.other).await, 409, REUSED);
            assert_said(&back.post(held, upgrade.respelt).await, 409, IN_FLIGHT);
            assert_said(&back.post(held, upgrade.other).await, 409, REUSED);
            run.answers(201, "done");
            assert_ran(&running.await.unwrap());

            let fresh = format!("{done}-fresh");
            let begun = back.begin(&fresh, upgrade.body).await;
            puppet.next().await.answers(201, "done");
            assert_ran(&begun.await.unwrap());
            assert_eq!(back.written(&fresh).await, is("exact-v1", State::Completed, 1));
            assert_said(&back.post(&fresh, upgrade.respelt).await, 409, REUSED);
            assert_eq!(puppet.begun(), 3);
        }
    }

    async fn changed_in_two_steps_no_version_refuses_a_retry_of_the_other(world: World) {
        for upgrade in upgrades() {
            let handler = Handler::new();
            let router = handler.router();
            let old = Deploy::old(&world, &router).await;
            let prepared = Deploy::of(&world, &router, upgrade.also_accept).await;
            let new = Deploy::new(&world, &router, &upgrade).await;
            // Each step has the instances before and after it side by side, and a retry may reach either.
            for (step, before, after) in [(1, &old, &prepared), (2, &prepared, &new)] {
                for (turn, first, second) in [("up", before, after), ("down", after, before)] {
                    let key = format!("{}-{step}-{turn}", upgrade.scheme);
                    let answer = first.post(&key, upgrade.body).await;
                    assert_ran(&answer);
                    assert_replays(&second.post(&key, upgrade.body).await, &answer);
                    assert_said(&second.post(&key, upgrade.other).await, 409, REUSED);
                }
            }
            // In one step the earlier instances do not know what the new ones have written.
            let key = format!("{}-at-once", upgrade.scheme);
            assert_ran(&new.post(&key, upgrade.body).await);
            assert_said(&old.post(&key, upgrade.body).await, 409, REUSED);
            assert_eq!(handler.effects(), 5);
        }
    }

    async fn another_list_of_ignored_members_is_another_scheme(world: World) {
        let narrow = || CanonicalJson::new().ignoring(["/at"]);
        let wide = || CanonicalJson::new().ignoring(["/at", "/client"]);
        let json = |body| ("application/json", body);
        let body = json("{\"a\":1,\"at\":1,\"client\":1}");
        let later = json("{\"a\":1,\"at\":2,\"client\":1}");
        let elsewhere = json("{\"a\":1,\"at\":1,\"client\":2}");
        let handler = Handler::new();
        let old = Deploy::of(&world, &handler.router(), |layer| layer.fingerprint(narrow())).await;
        let set = |layer: Layer| layer.fingerprint(wide()).also_accept(narrow());
        let new = Deploy::of(&world, &handler.router(), set).await;

        let first = old.post("old", body).await;
        assert_ran(&first);
        assert_replays(&new.post("old", later).await, &first);
        assert_said(&new.post("old", elsewhere).await, 409, REUSED);
        let first = new.post("new", body).await;
        assert_ran(&first);
        assert_replays(&new.post("new", elsewhere).await, &first);
        assert_ne!(narrow().name(), wide().name());
        assert_eq!(new.written("old").await, is(&narrow().name(), State::Completed, 1));
        assert_eq!(new.written("new").await, is(&wide().name(), State::Completed, 1));
        assert_eq!(handler.effects(), 2);
    }

    // As `FingerprintScheme` says: such a retry is refused, and never run again.
    async fn without_the_old_scheme_its_honest_retries_are_refused_until_it_is_back(world: World) {
        for upgrade in upgrades() {
            let handler = Handler::new();
            let key = upgrade.scheme;
            let old = Deploy::old(&world, &handler.router()).await;
            let first = old.post(key, upgrade.body).await;
            let set = |layer| (upgrade.fingerprint)(layer).also_accept(KeyOnly);
            let forgetful = Deploy::of(&world, &handler.router(), set).await;
            assert_said(&forgetful.post(key, upgrade.body).await, 409, REUSED);
            let new = Deploy::new(&world, &handler.router(), &upgrade).await;
            assert_replays(&new.post(key, upgrade.body).await, &first);
            assert_eq!(handler.effects(), 1);
        }
    }

    async fn a_retry_that_only_the_old_scheme_can_read_is_still_answered(world: World) {
        for upgrade in upgrades() {
            let handler = Handler::new();
            let key = upgrade.scheme;
            let old = Deploy::old(&world, &handler.router()).await;
            let first = old.post(key, upgrade.unreadable).await;
            assert_ran(&first);
            let written = record(&old.store, key).await;

            let new = Deploy::new(&world, &handler.router(), &upgrade).await;
            assert_replays(&new.post(key, upgrade.unreadable).await, &first);
            assert_said(&new.post(key, upgrade.unreadable_too).await, 400, INVALID);
            assert_said(&new.post(key, upgrade.body).await, 409, REUSED);
            assert_eq!(record(&new.store, key).await, written);
            assert_eq!(handler.effects(), 1);
        }
    }

    async fn a_fresh_key_whose_body_the_new_scheme_cannot_read_leaves_nothing(world: World) {
        for upgrade in upgrades() {
            let handler = Handler::new();
            let key = upgrade.scheme;
            let new = Deploy::new(&world, &handler.router(), &upgrade).await;
            assert_said(&new.post(key, upgrade.unreadable).await, 400, INVALID);
            assert_eq!(new.store.calls(Operation::Claim), 0);
            assert_eq!((handler.effects(), record(&new.store, key).await), (0, None));
            assert_ran(&new.post(key, upgrade.body).await);
            // And where the record is of the new scheme, there is no older one to ask.
            assert_said(&new.post(key, upgrade.unreadable).await, 400, INVALID);
        }
    }

    async fn an_expired_record_is_none_for_a_body_that_cannot_be_read(world: World) {
        for upgrade in upgrades() {
            let handler = Handler::new();
            let key = upgrade.scheme;
            let old = Deploy::old(&world, &handler.router()).await;
            assert_ran(&old.post(key, upgrade.unreadable).await);
            let new = Deploy::new(&world, &handler.router(), &upgrade).await;
            world.clock.advance(std::time::Duration::from_secs(86_401));
            assert_said(&new.post(key, upgrade.unreadable).await, 400, INVALID);
            assert_eq!(handler.effects(), 1);
        }
    }

    async fn a_run_in_flight_or_cut_off_is_known_by_a_body_only_the_old_scheme_can_read(world: World) {
        for upgrade in upgrades() {
            let (router, mut puppet) = Puppet::new();
            let key = upgrade.scheme;
            let old = Deploy::old(&world, &router).await;
            let new = Deploy::rerunning(&world, &router, &upgrade).await;
            let refusing = Deploy::new(&world, &router, &upgrade).await;

            let first = old.begin(key, upgrade.unreadable).await;
            let run = puppet.next().await;
            assert_said(&new.post(key, upgrade.unreadable).await, 409, IN_FLIGHT);
            assert_said(&new.post(key, upgrade.unreadable_too).await, 400, INVALID);
            run.panics("as the test wants");
            assert_eq!(first.await.unwrap().status, 500);

            assert_said(&refusing.post(key, upgrade.unreadable).await, 409, UNKNOWN);
            assert_said(&new.post(key, upgrade.unreadable_too).await, 400, INVALID);
            let rerun = new.begin(key, upgrade.unreadable).await;
            puppet.next().await.answers(201, "done");
            let rerun = rerun.await.unwrap();
            assert_ran(&rerun);
            // There is no digest of the new scheme that it could have been written anew with.
            assert_eq!(new.written(key).await, is("exact-v1", State::Completed, 2));
            assert_replays(&new.post(key, upgrade.unreadable).await, &rerun);
            assert_eq!(puppet.begun(), 2);
        }
    }

    async fn a_tombstone_or_a_checkpoint_is_known_by_a_body_only_the_old_scheme_can_read(world: World) {
        for upgrade in upgrades() {
            let handler = tombstones();
            let (done, step) = (upgrade.scheme, &format!("{}-step", upgrade.scheme));
            let old = Deploy::old(&world, &handler.router()).await;
            assert_ran(&old.post(done, upgrade.unreadable).await);
            released_with_a_checkpoint(&old.store, step, upgrade.unreadable).await;

            let new = Deploy::new(&world, &handler.router(), &upgrade).await;
            assert_said(&new.post(done, upgrade.unreadable).await, 409, NOT_RETAINED);
            for key in [done, step] {
                assert_said(&new.post(key, upgrade.unreadable_too).await, 400, INVALID);
            }
            assert_eq!(handler.effects(), 1);
            assert_ran(&new.post(step, upgrade.unreadable).await);
            assert_eq!(new.written(step).await, is("exact-v1", State::Completed, 2));
        }
    }

    // Whether it is an honest retry cannot be told without the store, so nothing final is said.
    async fn while_the_store_is_down_a_body_that_cannot_be_read_is_to_be_sent_again(world: World) {
        for upgrade in upgrades() {
            let handler = Handler::new();
            let key = upgrade.scheme;
            let old = Deploy::old(&world, &handler.router()).await;
            let first = old.post(key, upgrade.unreadable).await;
            let new = Deploy::new(&world, &handler.router(), &upgrade).await;
            new.store.fail(Operation::Get, Fault::Before, Times::Once);
            let refused = new.post(key, upgrade.unreadable).await;
            assert_said(&refused, 503, "idempotency_store_unavailable");
            assert!(refused.header("retry-after").is_some());
            assert_replays(&new.post(key, upgrade.unreadable).await, &first);
            assert_eq!(handler.effects(), 1);
        }
    }
}

/// A handler whose answers are not kept.
fn tombstones() -> Handler {
    Handler::answering(|_| {
        let response = Response::builder().status(201).extension(Retain::Tombstone);
        response.body(Body::from("secret")).unwrap()
    })
}

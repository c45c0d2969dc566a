//! Whoever is on call sees what was decided about each request, and which first run a replay belongs to.

mod support;

use std::{
    collections::BTreeMap,
    fmt::Debug,
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    http::{HeaderName, Request, Response},
};
use support::{puppet::Puppet, *};
use tower::ServiceExt;
use tower_http::{catch_panic::CatchPanicLayer, trace::TraceLayer};
use tower_idempotency::{
    Abandoned, IdempotencyLayer, IdempotentResponse, InFlight, Recovery, Rejection, Retain, Scope,
    StoreFailure, Verdict,
    store::Inspect,
    testing::{Fault, Operation, Times},
};
use tracing::{
    Event, Level, Metadata, Subscriber,
    field::{Empty, Field, Visit},
    span,
    subscriber::DefaultGuard,
};
use tracing_subscriber::{
    Registry,
    layer::{Context, Layer as _, SubscriberExt},
    registry::LookupSpan,
};

type Fields = BTreeMap<String, String>;

/// A span that was opened, whatever has become of it.
#[derive(Debug, Clone)]
struct Seen {
    name: &'static str,
    target: &'static str,
    level: Level,
    fields: Fields,
}

/// What was told, with every field.
#[derive(Debug, Clone)]
struct Told {
    level: Level,
    target: &'static str,
    fields: Fields,
    /// The spans it happened in, the innermost first.
    spans: Vec<u64>,
}

/// Everything on this thread, as far as `wants` lets it through.
#[derive(Clone)]
struct Everything {
    spans: Arc<Mutex<BTreeMap<u64, Seen>>>,
    events: Arc<Mutex<Vec<Told>>>,
}

impl Everything {
    fn of_this_thread(wants: fn(&Metadata<'_>) -> bool) -> (Self, DefaultGuard) {
        let everything = Self {
            spans: Arc::default(),
            events: Arc::default(),
        };
        let filter = tracing_subscriber::filter::filter_fn(wants);
        let subscriber = Registry::default().with(everything.clone().with_filter(filter));
        (everything, tracing::subscriber::set_default(subscriber))
    }

    /// What was decided, one after the other.
    fn decided(&self) -> Vec<Told> {
        self.events("idempotency decision")
    }

    fn events(&self, message: &str) -> Vec<Told> {
        let events = self.events.lock().unwrap();
        let found = events
            .iter()
            .filter(|told| told.fields["message"] == message);
        found.cloned().collect()
    }

    /// The spans of this name, in the order in which they were opened.
    fn spans(&self, name: &str) -> Vec<Seen> {
        let spans = self.spans.lock().unwrap();
        spans
            .values()
            .filter(|span| span.name == name)
            .cloned()
            .collect()
    }

    fn span(&self, id: u64) -> Seen {
        self.spans.lock().unwrap()[&id].clone()
    }
}

/// Ids of the registry are used again once a span is closed, so each gets a number of its own.
struct Number(u64);

impl<S: Subscriber + for<'a> LookupSpan<'a>> tracing_subscriber::Layer<S> for Everything {
    fn on_new_span(
        &self,
        attributes: &span::Attributes<'_>,
        id: &span::Id,
        context: Context<'_, S>,
    ) {
        let mut fields = Record(Fields::new());
        attributes.record(&mut fields);
        let mut spans = self.spans.lock().unwrap();
        let number = u64::try_from(spans.len()).unwrap();
        let span = context.span(id).unwrap();
        span.extensions_mut().insert(Number(number));
        let seen = Seen {
            name: span.name(),
            target: attributes.metadata().target(),
            level: *attributes.metadata().level(),
            fields: fields.0,
        };
        spans.insert(number, seen);
    }

    fn on_record(&self, id: &span::Id, values: &span::Record<'_>, context: Context<'_, S>) {
        let mut fields = Record(Fields::new());
        values.record(&mut fields);
        let number = context
            .span(id)
            .unwrap()
            .extensions()
            .get::<Number>()
            .unwrap()
            .0;
        let mut spans = self.spans.lock().unwrap();
        for (name, value) in fields.0 {
            let before = spans
                .get_mut(&number)
                .unwrap()
                .fields
                .insert(name.clone(), value);
            assert_eq!(before, None, "{name} is recorded twice");
        }
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let mut fields = Record(Fields::new());
        event.record(&mut fields);
        let scope = context.event_scope(event).into_iter().flatten();
        let told = Told {
            level: *event.metadata().level(),
            target: event.metadata().target(),
            fields: fields.0,
            spans: scope
                .map(|span| span.extensions().get::<Number>().unwrap().0)
                .collect(),
        };
        self.events.lock().unwrap().push(told);
    }
}

struct Record(Fields);

impl Visit for Record {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0.insert(field.name().to_owned(), format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name().to_owned(), value.to_owned());
    }
}

fn everything(metadata: &Metadata<'_>) -> bool {
    let target = metadata.target();
    target.starts_with("tower_idempotency") || target.starts_with("observability")
}

/// What a handler of the test says while it runs.
const WITHIN: &str = "within the handler";

fn speaking() -> Handler {
    Handler::answering(|seen| {
        tracing::info!("{WITHIN}");
        let response = Response::builder().status(201);
        match seen.uri.path() {
            "/bad" => response.status(400),
            "/panic" => panic!("as the test wants"),
            "/tombstone" => response.extension(Retain::Tombstone),
            _ => response,
        }
        .body(Body::from("done"))
        .unwrap()
    })
}

fn layer(store: &TestStore) -> IdempotencyLayer<TestStore> {
    IdempotencyLayer::new(store.clone()).single_tenant()
}

fn named(id: &str, path: &str, key: Option<&str>, body: &'static str) -> Request<Body> {
    let mut request = request("POST", path, key, body);
    request
        .headers_mut()
        .insert("x-request-id", id.parse().unwrap());
    request
}

fn fields(expected: &[(&str, &str)]) -> Fields {
    let owned = expected
        .iter()
        .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    owned.collect()
}

/// The fields of what was decided last.
fn last(everything: &Everything) -> Fields {
    let mut fields = everything.decided().pop().unwrap().fields;
    fields.remove("message");
    fields
}

// V2
#[tokio::test]
async fn each_decision_is_one_event_with_the_ids_of_both_requests() {
    for world in World::each() {
        let (everything, _guard) = Everything::of_this_thread(everything);
        let store = world.open().await;
        let handler = speaking();
        let behind =
            |layer: IdempotencyLayer<_>| handler.behind(layer).layer(CatchPanicLayer::new());
        let app = behind(layer(&store));
        let rerunning = behind(layer(&store).recovery(Recovery::rerun()));
        let unprotected = behind(layer(&store).store_failure(StoreFailure::RunUnprotected));
        let closed = layer(&store);
        closed.drain(Duration::ZERO).await;
        let drained = behind(closed);
        let unscoped = behind(IdempotencyLayer::new(store.clone()).scope(|_| None::<Scope>));
        let ran = |status, id, attempt| {
            vec![("status", status), ("request_id", id), ("attempt", attempt)]
        };
        let refused =
            |status, code, id| vec![("status", status), ("code", code), ("request_id", id)];
        let and = |mut fields: Vec<(&'static str, &'static str)>, original| {
            fields.push(("original_request_id", original));
            fields
        };
        let steps: Vec<(&Router, Request<Body>, _)> = vec![
            (
                &app,
                named("r1", "/", Some("k"), "A"),
                ran("executed", "r1", "1"),
            ),
            (
                &app,
                named("r2", "/", Some("k"), "A"),
                and(vec![("status", "replayed"), ("request_id", "r2")], "r1"),
            ),
            (
                &app,
                named("r3", "/", Some("k"), "B"),
                and(refused("reused", "idempotency_key_reused", "r3"), "r1"),
            ),
            (
                &app,
                named("r4", "/", None, "A"),
                refused("missing", "idempotency_key_required", "r4"),
            ),
            (
                &app,
                named("r5", "/", Some("\"k"), "A"),
                refused("invalid", "idempotency_key_invalid", "r5"),
            ),
            (
                &app,
                named("r6", "/tombstone", Some("t"), "A"),
                ran("executed", "r6", "1"),
            ),
            (
                &app,
                named("r7", "/tombstone", Some("t"), "A"),
                and(
                    refused("not_retained", "idempotency_response_not_retained", "r7"),
                    "r6",
                ),
            ),
            (
                &app,
                named("r8", "/bad", Some("b"), "A"),
                ran("executed", "r8", "1"),
            ),
            (
                &app,
                named("r9", "/bad", Some("b"), "A"),
                ran("executed", "r9", "1"),
            ),
            (
                &app,
                named("p1", "/panic", Some("p"), "A"),
                ran("executed", "p1", "1"),
            ),
            (
                &app,
                named("p2", "/panic", Some("p"), "A"),
                and(
                    refused("outcome_unknown", "idempotency_outcome_unknown", "p2"),
                    "p1",
                ),
            ),
            (
                &rerunning,
                named("p3", "/panic", Some("p"), "A"),
                ran("took_over", "p3", "2"),
            ),
            (
                &unprotected,
                named("u1", "/", Some("u"), "A"),
                vec![("status", "unprotected"), ("request_id", "u1")],
            ),
            (
                &app,
                named("u2", "/", Some("u"), "A"),
                refused("store_unavailable", "idempotency_store_unavailable", "u2"),
            ),
            (
                &drained,
                named("o1", "/", Some("o"), "A"),
                refused("overloaded", "idempotency_overloaded", "o1"),
            ),
            (
                &unscoped,
                named("s1", "/", Some("s"), "A"),
                refused("invalid", "idempotency_scope_unknown", "s1"),
            ),
            // Without an id of its own, a request is still known by the first one's.
            (
                &app,
                post_to("/", "k"),
                and(vec![("status", "replayed")], "r1"),
            ),
        ];
        for (at, (app, request, expected)) in steps.into_iter().enumerate() {
            if expected.iter().any(|(_, value)| value.starts_with('u')) {
                store.clear();
                store.fail(Operation::Claim, Fault::Before, Times::Next(3));
            }
            let response = app.clone().oneshot(request).await.unwrap();
            let expected = fields(&expected);
            if let Some(status) = response.idempotency_status() {
                assert_eq!(status.as_str(), expected["status"]);
            }
            assert_eq!(last(&everything), expected);
            assert_eq!(
                everything.decided().len(),
                at + 1,
                "one event for one request"
            );
            let level = everything.decided()[at].level;
            let is_loud = [
                "outcome_unknown",
                "unprotected",
                "store_unavailable",
                "overloaded",
            ]
            .contains(&&*expected["status"]);
            assert_eq!(level, if is_loud { Level::WARN } else { Level::DEBUG });
        }
    }
}

fn post_to(path: &str, key: &str) -> Request<Body> {
    request("POST", path, Some(key), "A")
}

#[tokio::test]
async fn a_replays_span_names_the_first_request_and_the_handler_runs_in_its_own() {
    for world in World::each() {
        let (everything, _guard) = Everything::of_this_thread(everything);
        let store = world.open().await;
        let app = speaking()
            .behind(layer(&store))
            .layer(CatchPanicLayer::new());
        for (id, path, key, body) in [
            ("first", "/", "k", "A"),
            ("second", "/", "k", "A"),
            ("third", "/", "k", "B"),
            ("fourth", "/panic", "p", "A"),
        ] {
            send(&app, named(id, path, Some(key), body)).await;
        }
        let rerunning = speaking().behind(layer(&store).recovery(Recovery::rerun()));
        let rerun = rerunning.layer(CatchPanicLayer::new());
        send(&rerun, named("fifth", "/panic", Some("p"), "A")).await;
        let spans = everything.spans("idempotency");
        let expected = [
            vec![
                ("request_id", "first"),
                ("idempotency.status", "executed"),
                ("idempotency.attempt", "1"),
            ],
            vec![
                ("request_id", "second"),
                ("idempotency.status", "replayed"),
                ("idempotency.original_request_id", "first"),
            ],
            vec![
                ("request_id", "third"),
                ("idempotency.status", "reused"),
                ("idempotency.original_request_id", "first"),
            ],
            vec![
                ("request_id", "fourth"),
                ("idempotency.status", "executed"),
                ("idempotency.attempt", "1"),
            ],
            vec![
                ("request_id", "fifth"),
                ("idempotency.status", "took_over"),
                ("idempotency.attempt", "2"),
            ],
        ];
        assert_eq!(spans.len(), expected.len());
        for (span, expected) in spans.iter().zip(expected) {
            assert_eq!(span.fields, fields(&expected));
            assert_eq!(
                (span.target, span.level),
                ("tower_idempotency", Level::INFO)
            );
        }
        // What handlers say, and what is decided, is within.
        let within = |told: &Told| everything.span(told.spans[0]).fields["request_id"].clone();
        let said: Vec<_> = everything.events(WITHIN).iter().map(within).collect();
        assert_eq!(said, ["first", "fourth", "fifth"]);
        let decided: Vec<_> = everything.decided().iter().map(within).collect();
        assert_eq!(decided, ["first", "second", "third", "fourth", "fifth"]);
        // What is cut off as well.
        let cut: Vec<_> = everything
            .events("idempotent run abandoned; its outcome is unknown")
            .iter()
            .map(within)
            .collect();
        assert_eq!(cut, ["fourth", "fifth"]);
    }
}

// Requests to which no key applies have none, and neither have those that are refused at the door.
#[tokio::test]
async fn only_keyed_requests_have_a_span() {
    let (everything, _guard) = Everything::of_this_thread(everything);
    let store = World::memory().open().await;
    let app = speaking().behind(layer(&store));
    for (method, key) in [
        ("GET", Some("k")),
        ("PATCH", None),
        ("POST", None),
        ("POST", Some("\"k")),
    ] {
        send(&app, request(method, "/", key, "A")).await;
    }
    assert!(everything.spans("idempotency").is_empty());
}

// Several requests on one thread, in turns.
#[tokio::test]
async fn a_span_is_entered_only_while_its_request_is_polled() {
    for world in World::each() {
        let (everything, _guard) = Everything::of_this_thread(everything);
        let store = world.open().await;
        let (router, mut puppet) = Puppet::new();
        let app =
            router.route_layer(layer(&store).in_flight(InFlight::Wait(Duration::from_secs(30))));
        let first = spawn(&app, named("first", "/", Some("k"), "A"));
        let run = puppet.next().await;
        let waits = spawn(&app, named("waits", "/", Some("k"), "A"));
        let other = spawn(&app, named("other", "/", Some("l"), "A"));
        puppet.next().await.answers(201, "done");
        assert_eq!(other.await.unwrap().status, 201);
        tracing::info!("outside");
        run.answers(201, "done");
        first.await.unwrap();
        waits.await.unwrap();
        assert_eq!(everything.events("outside")[0].spans, [0_u64; 0]);
        for told in everything.decided() {
            assert_eq!(told.spans.len(), 1);
            assert_eq!(
                everything.span(told.spans[0]).fields["request_id"],
                told.fields["request_id"]
            );
        }
        assert_eq!(everything.decided().len(), 3);
    }
}

/// Not even errors of this crate, nor its spans.
fn others(metadata: &Metadata<'_>) -> bool {
    metadata.target().starts_with("observability")
}

#[tokio::test]
async fn without_a_span_of_its_own_that_of_the_layers_around_is_told() {
    for world in World::each() {
        let (everything, _guard) = Everything::of_this_thread(others);
        let store = world.open().await;
        let trace = TraceLayer::new_for_http().make_span_with(|_: &Request<Body>| {
            tracing::info_span!(
                "the request",
                idempotency.status = Empty,
                idempotency.original_request_id = Empty,
                idempotency.attempt = Empty,
            )
        });
        let bare = TraceLayer::new_for_http()
            .make_span_with(|_: &Request<Body>| tracing::info_span!("bare"));
        let app = speaking().behind(layer(&store));
        let (traced, bare) = (app.clone().layer(trace), app.layer(bare));
        for (id, key) in [("first", Some("k")), ("second", Some("k")), ("third", None)] {
            send(&traced, named(id, "/", key, "A")).await;
        }
        let told: Vec<_> = everything
            .spans("the request")
            .into_iter()
            .map(|span| span.fields)
            .collect();
        let expected = [
            fields(&[
                ("idempotency.status", "executed"),
                ("idempotency.attempt", "1"),
            ]),
            fields(&[
                ("idempotency.status", "replayed"),
                ("idempotency.original_request_id", "first"),
            ]),
            fields(&[("idempotency.status", "missing")]),
        ];
        assert_eq!(told, expected);
        // One that does not ask for it is told nothing.
        send(&bare, named("fourth", "/", Some("k"), "A")).await;
        assert_eq!(everything.spans("bare")[0].fields, Fields::new());
        assert!(everything.spans("idempotency").is_empty());
    }
}

// M5: whoever sends one value for both must not find the key in the log.
#[tokio::test]
async fn a_request_id_that_shows_the_key_is_not_told() {
    let (everything, _guard) = Everything::of_this_thread(everything);
    let store = World::memory().open().await;
    let app = speaking().behind(layer(&store));
    for (id, key, shown) in [
        ("k1-s3cret", "k1-s3cret", false),
        ("\"k2-s3cret\"", "k2-s3cret", false),
        ("k3-s3cret", "\"k3-s3cret\"", false),
        ("req-k4-s3cret-1", "k4-s3cret", false),
        ("k5\\\\s3cret", "\"k5\\\\s3cret\"", false),
        ("k6\\s3cret", "\"k6\\\\s3cret\"", false),
        // Too short to be looked for within an id.
        ("\"9s3cret\"", "\"9s3cret\"", false),
        ("\"0s3cret\";v=1", "\"0s3cret\";v=1", false),
        ("req-7", "k7-s3cret", true),
        ("k8", "k8-s3cret", true),
    ] {
        for status in ["executed", "replayed", "reused"] {
            let body = if status == "reused" { "B" } else { "A" };
            send(&app, named(id, "/", Some(key), body)).await;
            let told = last(&everything);
            assert_eq!(told["status"], status);
            assert_eq!(
                told.get("request_id").map(|told| &**told),
                shown.then_some(id)
            );
            let original = (shown && status != "executed").then_some(id);
            assert_eq!(
                told.get("original_request_id").map(|told| &**told),
                original
            );
        }
        // Nor is it told by others, who have an id of their own.
        send(&app, named("another", "/", Some(key), "A")).await;
        assert_eq!(last(&everything).contains_key("original_request_id"), shown);
    }
    let told = format!(
        "{:?}{:?}",
        everything.events.lock().unwrap(),
        everything.spans.lock().unwrap()
    );
    assert!(!told.contains("s3cret"));
}

#[tokio::test]
async fn where_keys_and_request_ids_share_a_header_no_id_is_told() {
    let (everything, _guard) = Everything::of_this_thread(everything);
    let store = World::memory().open().await;
    let name = HeaderName::from_static("x-request-id");
    let app = speaking().behind(layer(&store).header_name(name));
    for status in ["executed", "replayed", "reused"] {
        let body = if status == "reused" { "B" } else { "A" };
        send(&app, named("s3cret", "/", None, body)).await;
        assert_eq!(last(&everything)["status"], status);
    }
    let told = format!(
        "{:?}{:?}",
        everything.events.lock().unwrap(),
        everything.spans.lock().unwrap()
    );
    assert!(!told.contains("s3cret"), "{told}");
}

#[tokio::test]
async fn a_malformed_key_that_is_sent_as_the_request_id_too_is_not_told() {
    let (everything, _guard) = Everything::of_this_thread(everything);
    let store = World::memory().open().await;
    let app = speaking().behind(layer(&store));
    for key in ["my s3cret key", "\"s3cret", "a,s3cret", "\"a\" \"s3cret\""] {
        send(&app, named(key, "/", Some(key), "A")).await;
        let told = last(&everything);
        assert_eq!(told["code"], "idempotency_key_invalid", "{key}");
        assert_eq!(told.get("request_id"), None, "{key}");
    }
    let told = format!("{:?}", everything.events.lock().unwrap());
    assert!(!told.contains("s3cret"), "{told}");
}

// A layer around this one refuses by its own reasons, also requests with a good key.
#[tokio::test]
async fn a_refusal_on_a_services_own_account_does_not_tell_the_key_either() {
    let (everything, _guard) = Everything::of_this_thread(everything);
    let store = World::memory().open().await;
    let layer = layer(&store);
    for (id, key, shown) in [
        ("order 17 of 9", "\"order 17 of 9\"", false),
        ("\"order 17 of 9\"", "\"order 17 of 9\"", false),
        ("req-1", "\"order 17 of 9\"", true),
    ] {
        let (head, _) = named(id, "/", Some(key), "A").into_parts();
        let _ = layer.refusal(&head, &Rejection::Overloaded);
        let told = last(&everything);
        assert_eq!(told["status"], "overloaded");
        assert_eq!(told.get("request_id").map(|id| &**id), shown.then_some(id));
    }
}

/// What every event with this message says of the request it is about.
fn ids_of(everything: &Everything, message: &str) -> Vec<Option<String>> {
    let events = everything.events(message).into_iter();
    let ids = events.map(|told| {
        assert!(told.level <= Level::WARN || message.ends_with("resolved"));
        told.fields.get("request_id").cloned()
    });
    ids.collect()
}

fn some(ids: &[&str]) -> Vec<Option<String>> {
    ids.iter().map(|id| Some((*id).to_owned())).collect()
}

// Where spans are filtered out, a line by itself must lead to the request.
#[tokio::test]
async fn what_goes_wrong_with_a_run_is_said_with_the_id_of_its_request() {
    for world in World::each() {
        let (everything, _guard) = Everything::of_this_thread(everything);
        let store = world.open().await;
        let (router, mut puppet) = Puppet::new();
        let layer = layer(&store).store_timeout(Duration::from_millis(300));
        let app = router
            .route_layer(layer.clone())
            .layer(CatchPanicLayer::new());
        let begun =
            |id: &'static str, key: &'static str| spawn(&app, named(id, "/", Some(key), "A"));
        // Cut off.
        let answer = begun("panics", "a");
        puppet.next().await.panics("as the test wants");
        answer.await.unwrap();
        let answer = begun("gives-up", "b");
        let gives_up = Response::builder().extension(Retain::Abandon);
        puppet
            .next()
            .await
            .answers_with(gives_up.body(Body::empty()).unwrap());
        answer.await.unwrap();
        // Taken away.
        let answer = begun("is-too-late", "c");
        let run = puppet.next().await;
        let taken = record(&store, "c").await.unwrap().id;
        assert!(store.inner().forget(&taken).await.unwrap());
        run.answers(201, "done");
        answer.await.unwrap();
        // Not recorded in time, and then not at all.
        store.fail(Operation::Complete, Fault::Before, Times::Always);
        let answer = begun("is-forgotten", "d");
        puppet.next().await.answers(201, "done");
        answer.await.unwrap();
        // The key is the id, which is nobody's business.
        let answer = begun("e-s3cret-e", "e-s3cret-e");
        puppet.next().await.panics("as the test wants");
        answer.await.unwrap();
        let answer = begun("is-stopped", "f");
        let _run = puppet.next().await;
        layer.drain(Duration::ZERO).await;
        answer.await.unwrap();

        let mut abandoned = some(&["panics", "gives-up"]);
        abandoned.extend([None, Some("is-stopped".to_owned())]);
        let heard = |message| ids_of(&everything, message);
        assert_eq!(
            heard("idempotent run abandoned; its outcome is unknown"),
            abandoned
        );
        assert_eq!(
            heard("idempotency claim lost; the answer of this run is not recorded"),
            some(&["is-too-late"])
        );
        for message in [
            "idempotency record not written within store_timeout; trying on in the background",
            "idempotency record not written; the outcome of this run will count as unknown",
        ] {
            assert_eq!(heard(message), some(&["is-forgotten"]), "{message}");
        }
    }
}

#[tokio::test]
async fn a_sweep_says_whose_runs_it_asked_about() {
    for world in World::each() {
        let (everything, _guard) = Everything::of_this_thread(everything);
        let store = world.open().await;
        let layer = layer(&store).resolver(|abandoned: Abandoned| async move {
            match abandoned.key().and_then(|key| key.as_str()) {
                Some("done") => Verdict::answer("found"),
                _ => Verdict::Leave,
            }
        });
        let app = Handler::answering(|_| panic!("as the test wants"))
            .behind(layer.clone())
            .layer(CatchPanicLayer::new());
        for (id, key) in [("r1", "done"), ("r2", "left"), ("e-s3cret-e", "e-s3cret-e")] {
            send(&app, named(id, "/", Some(key), "A")).await;
        }
        let swept = layer.reconciler().sweep().await;
        assert_eq!((swept.answered, swept.left), (1, 2));
        assert_eq!(
            ids_of(&everything, "idempotent run resolved"),
            some(&["r1"])
        );
        let mut not_resolved = ids_of(&everything, "idempotent run not resolved");
        not_resolved.sort();
        assert_eq!(not_resolved, [None, Some("r2".to_owned())]);
    }
}

// Targets are what operators filter by.
#[tokio::test]
async fn a_record_that_cannot_be_listed_is_said_where_everything_is_said() {
    for world in World::durable() {
        let (everything, _guard) = Everything::of_this_thread(everything);
        let store = world.open().await;
        let app = speaking()
            .behind(layer(&store))
            .layer(CatchPanicLayer::new());
        for key in ["s3cret-1", "s3cret-2"] {
            send(&app, named("id", "/panic", Some(key), "A")).await;
        }
        world
            .tamper("UPDATE idempotency_records SET mode = 9")
            .await;
        assert!(store.inner().abandoned(None, 10).await.unwrap().is_empty());
        let said = everything.events("an abandoned record cannot be read");
        assert_eq!(said.len(), 2);
        for told in said {
            assert_eq!(told.level, Level::WARN);
            assert_eq!(told.fields["operation"], "abandoned");
        }
        let all = everything.events.lock().unwrap().clone();
        let ours = |told: &&Told| told.target.starts_with("tower_idempotency");
        for told in all.iter().filter(ours) {
            assert_eq!(told.target, "tower_idempotency::observe", "{told:?}");
        }
        assert!(!format!("{all:?}").contains("s3cret"));
    }
}

// The client has gone, so the span around the layer is all there is to be told.
#[tokio::test]
async fn a_run_without_its_client_tells_the_span_around_the_layer() {
    let (everything, _guard) = Everything::of_this_thread(others);
    let store = World::memory().open().await;
    let (router, mut puppet) = Puppet::new();
    let trace = TraceLayer::new_for_http().make_span_with(|_: &Request<Body>| {
        tracing::info_span!("around", idempotency.status = Empty)
    });
    let app = router.route_layer(layer(&store)).layer(trace);
    let client = tokio::spawn(app.oneshot(post_to("/", "k")));
    let run = puppet.next().await;
    client.abort();
    assert!(client.await.unwrap_err().is_cancelled());
    run.answers(201, "done");
    eventually("the decision", || {
        let around = &everything.spans("around")[0];
        around.fields.get("idempotency.status").map(String::as_str) == Some("executed")
    })
    .await;
}

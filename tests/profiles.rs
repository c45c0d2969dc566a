//! What each profile answers in which situation: asked of the layer itself, and compared with the table in
//! the documentation. `UPDATE_PROFILES=1` writes the table anew.

mod support;

use std::{
    fmt::Write as _,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    http::{Method, Request, Response, StatusCode, header},
};
use support::*;
use tokio::task::JoinHandle;
use tower::ServiceExt;
use tower_idempotency::{
    Audience, Endpoint, ErrorEnvelope, ExactRequest, FingerprintScheme, IdempotencyKey,
    IdempotencyLayer, KeyFormat, KeyOnly, Profile, RecordId, Recovery, Retain, Retention, Scope,
    store::{ClaimRequest, Settled, Store},
    testing::{Fault, Operation, Times},
};

const PROFILES: [Profile; 4] = [
    Profile::Gateway,
    Profile::Ietf,
    Profile::Stripe,
    Profile::Webhook,
];
const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src/profiles.md");
const BEGIN: &str = "<!-- the table: written by tests/profiles.rs -->\n";
const END: &str = "<!-- end of the table -->\n";
const HOUR: Duration = Duration::from_secs(3600);

/// A service behind a layer with one profile.
struct Service {
    world: World,
    store: TestStore,
    /// Its fingerprints.
    scheme: Box<dyn FingerprintScheme>,
    handler: Handler,
    app: Router,
}

impl Service {
    async fn with(world: World, profile: Profile) -> Self {
        let store = world.open().await;
        let broken = AtomicBool::new(false);
        // Answers as the path says.
        let handler = Handler::answering(move |seen| {
            let path = seen.uri.path().trim_start_matches('/');
            let mut response = Response::new(Body::from(format!("run {}", seen.run)));
            *response.status_mut() = path.parse().unwrap_or(StatusCode::CREATED);
            if path == "broken" && !broken.swap(true, Ordering::Relaxed) {
                let broken = std::io::Error::other("broken");
                let frames = futures_util::stream::iter([Err::<bytes::Bytes, _>(broken)]);
                *response.body_mut() = Body::from_stream(frames);
            }
            if path == "not-kept" {
                response.extensions_mut().insert(Retain::Tombstone);
            }
            response
        });
        let layer = IdempotencyLayer::new(store.clone())
            .single_tenant()
            .header_name(header::HeaderName::from_static("idempotency-key"))
            .profile(profile);
        Self {
            world,
            store,
            scheme: match profile {
                Profile::Webhook => Box::new(Endpoint),
                _ => Box::new(ExactRequest),
            },
            app: handler.behind(layer),
            handler,
        }
    }

    /// A cell of the table.
    async fn answer(&self, request: Request<Body>) -> String {
        let before = self.handler.effects();
        let answer = send(&self.app, request).await;
        let ran = self.handler.effects() > before;
        let mut cell = match ran {
            true => format!("runs, {}", answer.status.as_u16()),
            false => answer.status.as_u16().to_string(),
        };
        let json = answer.json();
        let error = json.get("error").unwrap_or(&json);
        if let Some(code) = error["code"].as_str() {
            write!(cell, " `{}`", code.strip_prefix("idempotency_").unwrap()).unwrap();
            let shape = match answer.header("content-type").unwrap() {
                "application/problem+json" => "problem",
                "application/json" if json.get("error").is_some() => "envelope",
                other => panic!("a refusal in {other}"),
            };
            write!(cell, ", {shape}").unwrap();
        }
        for (name, shown) in [
            ("retry-after", "Retry-After"),
            ("idempotent-replay", "Idempotent-Replay"),
            ("idempotent-replayed", "Idempotent-Replayed"),
        ] {
            if let Some(value) = answer.header(name) {
                assert!(!ran, "the marker of a replay on a first answer");
                write!(cell, ", `{shown}: {value}`").unwrap();
            }
        }
        if let Some(link) = answer.header("link") {
            assert!(link.ends_with("; rel=\"describedby\""), "{link}");
            cell += ", `Link`";
        }
        cell
    }

    /// What a retry gets after this status of the handler's.
    async fn retry_after(&self, status: u16) -> String {
        let key = format!("after-{status}");
        let request = || request("POST", &format!("/{status}"), Some(&key), "A");
        send(&self.app, request()).await;
        self.answer(request()).await
    }

    /// A run that is held after its effect.
    async fn held(&self) -> JoinHandle<Answer> {
        let runs = self.handler.effects();
        self.handler.close_gate();
        let app = self.app.clone();
        let run = tokio::spawn(async move { send(&app, post("held", "A")).await });
        self.handler.reached(runs + 1).await;
        run
    }

    async fn cut_off(&self, request: Request<Body>, runs: u32) {
        cut_off(&self.store, &*self.scheme, request, runs).await;
    }
}

/// As many runs of other processes, one after the other, each of which was cut off.
async fn cut_off(
    store: &TestStore,
    scheme: &dyn FingerprintScheme,
    request: Request<Body>,
    runs: u32,
) {
    let key = request.headers()["idempotency-key"].as_bytes();
    let id = RecordId::new(Scope::shared(), IdempotencyKey::new(key));
    let (head, _) = request.into_parts();
    let fingerprint = scheme.fingerprint(&head, &"A".into()).unwrap();
    let mut replaces = None;
    for run in 1..=runs {
        let mut claim = ClaimRequest::new(id.clone(), scheme.name(), fingerprint);
        claim.replaces = replaces;
        let ticket = claim.ticket(run);
        replaces = Some(ticket.token);
        store.claim(claim).await.unwrap();
        assert_eq!(store.abandon(&ticket).await.unwrap(), Settled::Done);
    }
}

/// One column: every situation, and what it gets.
async fn column(service: Service) -> Vec<(&'static str, String)> {
    let mut column = Vec::new();
    let mut row = |situation, cell| column.push((situation, cell));

    row("key unseen", service.answer(post("K", "A")).await);
    row("the same again", service.answer(post("K", "A")).await);
    row(
        "the key with another body",
        service.answer(post("K", "B")).await,
    );
    row(
        "the key at another path",
        service
            .answer(request("POST", "/elsewhere", Some("K"), "A"))
            .await,
    );
    let held = service.held().await;
    row(
        "the same while it runs",
        service.answer(post("held", "A")).await,
    );
    row(
        "another body while it runs",
        service.answer(post("held", "B")).await,
    );
    row(
        "another path while it runs",
        service
            .answer(request("POST", "/elsewhere", Some("held"), "A"))
            .await,
    );
    service.handler.open_gate();
    held.await.unwrap();
    let not_kept = || request("POST", "/not-kept", Some("not-kept"), "A");
    send(&service.app, not_kept()).await;
    row("done, response not kept", service.answer(not_kept()).await);
    let broken = || request("POST", "/broken", Some("broken"), "A");
    drop(service.app.clone().oneshot(broken()).await.unwrap());
    row("the first answer broke off", service.answer(broken()).await);
    service.cut_off(post("cut-off", "A"), 1).await;
    row(
        "the first run was cut off",
        service.answer(post("cut-off", "A")).await,
    );
    service.cut_off(post("cut-off-thrice", "A"), 3).await;
    row(
        "three runs in a row were cut off",
        service.answer(post("cut-off-thrice", "A")).await,
    );
    service
        .store
        .fail(Operation::Claim, Fault::Before, Times::Always);
    row(
        "store out of reach",
        service.answer(post("down", "A")).await,
    );
    service.store.clear();

    row(
        "POST without a key",
        service.answer(request("POST", "/", None, "A")).await,
    );
    row(
        "PATCH without a key",
        service.answer(request("PATCH", "/", None, "A")).await,
    );
    row("key `a,b`", service.answer(post("a,b", "A")).await);
    row(
        "key `\"abc\"`, in quotation marks",
        service.answer(post("\"abc\"", "A")).await,
    );
    let large = vec![b'A'; 1024 * 1024 + 1];
    row(
        "body of more than 1 MiB",
        service.answer(post("large", large)).await,
    );

    for (situation, status) in [
        ("retry after the handler's 303", 303),
        ("retry after its 400", 400),
        ("retry after its 401", 401),
        ("retry after its 402", 402),
        ("retry after its 409", 409),
        ("retry after its 422", 422),
        ("retry after its 429", 429),
        ("retry after its 500", 500),
    ] {
        row(situation, service.retry_after(status).await);
    }

    service.world.clock.advance(24 * HOUR);
    row("the same after 24 h", service.answer(post("K", "A")).await);
    service.world.clock.advance(7 * 24 * HOUR);
    row(
        "the same after 7 more days",
        service.answer(post("K", "A")).await,
    );
    column
}

fn table(columns: &[Vec<(&'static str, String)>]) -> String {
    let names = PROFILES.map(|profile| format!("`{profile:?}`")).join(" | ");
    let mut table = format!("| situation | {names} |\n| --- | --- | --- | --- | --- |\n");
    for (row, (situation, _)) in columns[0].iter().enumerate() {
        let cells: Vec<_> = columns
            .iter()
            .map(|column| column[row].1.as_str())
            .collect();
        writeln!(table, "| {situation} | {} |", cells.join(" | ")).unwrap();
    }
    table
}

fn in_the_documentation(documentation: &str) -> std::ops::Range<usize> {
    let begin = documentation.find(BEGIN).expect("the table begins") + BEGIN.len();
    let end = documentation.find(END).expect("the table ends");
    begin..end
}

async fn check(world: impl Fn() -> World) {
    let mut columns = Vec::new();
    for profile in PROFILES {
        columns.push(column(Service::with(world(), profile).await).await);
    }
    let table = table(&columns);
    let documentation = std::fs::read_to_string(FILE).unwrap();
    let shown = in_the_documentation(&documentation);
    if std::env::var_os("UPDATE_PROFILES").is_some() {
        let mut updated = documentation.clone();
        updated.replace_range(shown, &table);
        std::fs::write(FILE, updated).unwrap();
        return;
    }
    assert_eq!(
        &documentation[shown], table,
        "UPDATE_PROFILES=1 writes it anew"
    );
}

mod the_table_in_the_documentation_is_what_the_layer_answers {
    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn memory() {
        check(World::memory).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn sqlite() {
        check(World::sqlite).await;
    }

    #[cfg(feature = "postgres")]
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn postgres() {
        check(World::postgres).await;
    }
}

every_store! {
    async fn an_option_that_is_set_afterwards_wins(world: World) {
        let store = world.open().await;
        let handler = Handler::answering(|_| {
            let mut response = Response::new(Body::from("declined"));
            *response.status_mut() = StatusCode::UNPROCESSABLE_ENTITY;
            response
        });
        let told = |layer: IdempotencyLayer<TestStore>, after: bool| {
            let profile = |layer: IdempotencyLayer<TestStore>| layer.profile(Profile::Gateway);
            let layer = if after { layer } else { profile(layer) };
            let layer = layer
                .reuse_status(StatusCode::IM_A_TEAPOT)
                .required_methods([Method::PATCH])
                .retention(Retention::standard())
                .key_format(KeyFormat::structured())
                .fingerprint(KeyOnly)
                .recovery(Recovery::rerun())
                .audience(Audience::Senders)
                .ttl(HOUR)
                .rejections(ErrorEnvelope::new().member("hint", |_| Some("own".into())))
                .replay_header(header::HeaderName::from_static("x-replay"));
            if after { profile(layer) } else { layer }
        };
        let layer = || IdempotencyLayer::new(store.clone()).single_tenant();

        let own = handler.behind(told(layer(), false));
        assert_eq!(send(&own, request("PATCH", "/", None, "A")).await.status, 400);
        assert_eq!(send(&own, request("POST", "/", None, "A")).await.status, 422, "no key needed");
        assert_eq!(send(&own, post("bare", "A")).await.status, 400);
        assert_eq!(send(&own, post("\"K\"", "A")).await.status, 422);
        assert!(record(&store, "K").await.is_none(), "the standard retention frees the key");
        cut_off(&store, &KeyOnly, post("rerun", "A"), 1).await;
        assert_eq!(send(&own, post("\"rerun\"", "A")).await.status, 422, "it runs again");
        cut_off(&store, &KeyOnly, post("thrice", "A"), 3).await;
        assert_eq!(send(&own, post("\"thrice\"", "A")).await.status, 503, "a sender is to come back");

        let gateway = handler.behind(told(layer(), true));
        let missing = send(&gateway, request("POST", "/", None, "A")).await;
        assert_eq!(missing.status, 400);
        assert_eq!(missing.json()["error"].get("hint"), None);
        let first = send(&gateway, post("bare", "A")).await;
        let retry = send(&gateway, post("bare", "A")).await;
        retry.assert_replays(&first);
        assert_eq!(send(&gateway, post("bare", "B")).await.status, 409);
        cut_off(&store, &ExactRequest, post("refused", "A"), 1).await;
        let refused = send(&gateway, post("refused", "A")).await;
        assert_eq!((refused.status.as_u16(), refused.header("retry-after")), (409, None));
        let record = record(&store, "bare").await.unwrap();
        let lives = record.expires.unwrap().as_micros() - record.completed.unwrap().as_micros();
        assert_eq!(lives, 7 * 24 * 3600 * 1_000_000);
    }

    async fn of_two_profiles_the_last_one_counts(world: World) {
        let store = world.open().await;
        for last in PROFILES {
            for first in PROFILES {
                let layer = || {
                    let scope = Scope::new(format!("{first:?}{last:?}"));
                    IdempotencyLayer::new(store.clone())
                        .scope(move |_| Some(scope.clone()))
                        .documentation_url("/docs")
                };
                let handler = Handler::new();
                let both = handler.behind(layer().profile(first).profile(last));
                let one = handler.behind(layer().profile(last));
                send(&both, post("K", "A")).await;
                for refused in [request("POST", "/", None, "A"), post("K", "B"), post("\"", "A")] {
                    let (mut head, _) = refused.into_parts();
                    if last == Profile::Webhook && let Some(key) = head.headers.remove("idempotency-key") {
                        head.headers.insert("webhook-id", key);
                    }
                    let ask = |app| {
                        let request = Request::from_parts(head.clone(), Body::from("B"));
                        async move { send(&app, request).await }
                    };
                    let (both, one) = (ask(both.clone()).await, ask(one.clone()).await);
                    let seen = |answer: Answer| (answer.status, answer.header("link").map(str::to_owned), answer.body);
                    // Where no key is needed, each runs.
                    if one.status != StatusCode::CREATED {
                        assert_eq!(seen(both), seen(one), "{first:?} then {last:?}");
                    }
                }
            }
        }
    }
}

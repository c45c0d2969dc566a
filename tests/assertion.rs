//! `assert_idempotent` passes what is idempotent and finds what is not.

mod support;

use std::{
    collections::HashMap,
    convert::Infallible,
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{
    Router,
    body::{Body, Bytes},
    extract::Request,
    http::{HeaderName, HeaderValue, Response},
    routing::post,
};
use http_body_util::BodyExt;
use support::*;
use tokio::task::LocalSet;
use tower::{Service, service_fn};
use tower_idempotency::{
    Fingerprint, Idempotency, IdempotencyLayer, IdempotencyStatus, InFlight, KeyFormat, KeyOnly,
    MemoryStore, Retain, Retention, UndecodableBody, fingerprint_fn,
    testing::{assert_idempotent, assert_idempotent_with_keys, assert_idempotent_with_other_body},
};

fn keyed() -> axum::http::Request<Body> {
    support::post("any", "{\"amount\":1}")
}

/// The message of the panic it ends with; empty when it passes.
async fn complaint<S>(app: S, request: axum::http::Request<Body>) -> String
where
    S: Service<axum::http::Request<Body>, Response = Response<Body>, Error = Infallible>
        + Clone
        + 'static,
{
    let assertion = async { tokio::task::spawn_local(assert_idempotent(app, request)).await };
    let Err(panic) = LocalSet::new().run_until(assertion).await else {
        return String::new();
    };
    let panic = panic.into_panic();
    match panic.downcast::<String>() {
        Ok(message) => *message,
        Err(panic) => (*panic.downcast::<&str>().unwrap()).to_owned(),
    }
}

every_store! {
    async fn it_passes_a_router_behind_the_layer(world: World) {
        let handler = Handler::new();
        let app = handler.behind(IdempotencyLayer::new(world.open().await).single_tenant());
        assert_idempotent(app, keyed()).await;
        assert_eq!(handler.effects(), 3);
    }

    async fn it_passes_a_scheme_that_cannot_read_what_is_appended(world: World) {
        let store = world.open().await;
        let scheme = fingerprint_fn("json-only-v1", |_, body: &Bytes| {
            let json = serde_json::from_slice::<serde_json::Value>(body);
            let json = json.map_err(|_| UndecodableBody("no JSON"))?;
            Ok(Fingerprint::of([json.to_string()]))
        });
        let layer = IdempotencyLayer::new(store).single_tenant().fingerprint(scheme);
        assert_idempotent(Handler::new().behind(layer), keyed()).await;
    }

    #[cfg(feature = "multipart")]
    async fn with_another_body_of_ones_own_it_passes_a_service_that_compares_forms(world: World) {
        let layer = IdempotencyLayer::new(world.open().await).single_tenant();
        let layer = layer.fingerprint(tower_idempotency::MultipartParts::new());
        let app = Handler::new().behind(layer);
        let form = |amount: u8| {
            format!("--x\r\ncontent-disposition: form-data; name=\"amount\"\r\n\r\n{amount}\r\n--x--\r\n")
        };
        let request = || {
            let request = Request::post("/charges").header("idempotency-key", "any");
            let request = request.header("content-type", "multipart/form-data; boundary=x");
            request.body(Body::from(form(1))).unwrap()
        };
        assert_idempotent_with_other_body(app.clone(), request(), form(2)).await;
        // What is appended makes no other form.
        assert!(complaint(app, request()).await.contains("with another body"));
    }

    async fn it_passes_slow_handlers_and_waiting_layers(world: World) {
        let slow = || async {
            tokio::time::sleep(Duration::from_millis(80)).await;
            "paid"
        };
        let layer = IdempotencyLayer::new(world.open().await).single_tenant();
        for layer in [layer.clone(), layer.in_flight(InFlight::Wait(Duration::from_secs(5)))] {
            let app = Router::new().route("/charges", post(slow)).route_layer(layer);
            assert_idempotent(app, keyed()).await;
        }
    }
}

#[tokio::test]
async fn it_takes_keys_of_any_form_in_any_header() {
    let name = HeaderName::from_static("webhook-id");
    let short = KeyFormat::any()
        .max_len(8)
        .check("like ev-1", |key| key.starts_with(b"ev-"));
    let layer = IdempotencyLayer::new(MemoryStore::new())
        .single_tenant()
        .header_name(name.clone())
        .key_format(short);
    let app = Handler::new().behind(layer);
    let mut number = 0;
    let keys = || {
        number += 1;
        format!("ev-{number}")
    };
    let request = request("POST", "/charges", None, "{\"amount\":1}");
    assert_idempotent_with_keys(app, request, name, keys).await;
    assert_eq!(number, 3);
}

#[tokio::test]
async fn it_says_why_a_request_was_refused() {
    let layer = IdempotencyLayer::new(MemoryStore::new())
        .single_tenant()
        .key_format(KeyFormat::any().max_len(8));
    let found = complaint(Handler::new().behind(layer), keyed()).await;
    assert!(found.contains("longer than 8 bytes"), "{found}");
}

#[tokio::test]
async fn it_finds_a_router_without_the_layer() {
    let found = complaint(Handler::new().router(), keyed()).await;
    assert!(found.contains("sent twice"), "{found}");
}

#[tokio::test]
async fn it_finds_another_body_under_the_same_key() {
    let layer = IdempotencyLayer::new(MemoryStore::new())
        .single_tenant()
        .fingerprint(KeyOnly);
    let found = complaint(Handler::new().behind(layer), keyed()).await;
    assert!(found.contains("another body"), "{found}");
}

#[tokio::test]
async fn it_finds_answers_that_free_the_key() {
    let layer = IdempotencyLayer::new(MemoryStore::new())
        .single_tenant()
        .retention(Retention::new(|_| Retain::Release));
    let found = complaint(Handler::new().behind(layer), keyed()).await;
    assert!(found.contains("sent twice"), "{found}");
}

/// A cache of answers that looks first and writes later, as many do.
#[tokio::test]
async fn it_finds_a_check_before_a_set() {
    type Known = HashMap<HeaderValue, (Bytes, Bytes)>;
    let known: Arc<Mutex<Known>> = Arc::default();
    let inner = Handler::new();
    let app = service_fn(move |request: Request| {
        let (known, router) = (known.clone(), inner.router());
        async move {
            let key = request.headers()["idempotency-key"].clone();
            let asked = request.into_body().collect().await.unwrap().to_bytes();
            let found = known.lock().unwrap().get(&key).cloned();
            let mut response = Response::new(Body::empty());
            match found {
                Some((first, answer)) if first == asked => {
                    *response.body_mut() = Body::from(answer);
                    let marker = HeaderValue::from_static("true");
                    response.headers_mut().insert("idempotent-replay", marker);
                }
                Some(_) => {
                    response.extensions_mut().insert(IdempotencyStatus::Reused);
                }
                None => {
                    tokio::task::yield_now().await;
                    let answer = send(&router, support::post("any", asked.clone()))
                        .await
                        .body;
                    known.lock().unwrap().insert(key, (asked, answer.clone()));
                    *response.body_mut() = Body::from(answer);
                }
            }
            Ok::<_, Infallible>(response)
        }
    });
    let found = complaint(app, keyed()).await;
    assert!(found.contains("eight times at once"), "{found}");
}

#[tokio::test]
async fn it_wants_a_request_that_succeeds_and_has_a_key() {
    let layer = IdempotencyLayer::new(MemoryStore::new()).single_tenant();
    let app = Router::new()
        .route(
            "/charges",
            post(|_: Idempotency| async { axum::http::StatusCode::CONFLICT }),
        )
        .route_layer(layer);
    let found = complaint(app.clone(), keyed()).await;
    assert!(found.contains("must be accepted"), "{found}");
    let keyless = request("POST", "/charges", None, "");
    let found = complaint(app, keyless).await;
    assert!(found.contains("Idempotency-Key"), "{found}");
}

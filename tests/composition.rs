//! The layer among other layers: CORS, time-outs, limits and buffers, extractors, and services
//! that are not axum's.

mod support;

use std::{
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use axum::{
    BoxError, Router,
    body::Body,
    error_handling::HandleErrorLayer,
    extract::Request,
    http::{HeaderName, HeaderValue, Method, Response, StatusCode},
    response::IntoResponse,
    routing::any,
};
use bytes::Bytes;
use http_body_util::{BodyExt, Empty, Full, combinators::UnsyncBoxBody};
use support::{
    wire::{Server, raw_post},
    *,
};
use tower::{
    Layer, Service, ServiceBuilder, ServiceExt, buffer::Buffer, limit::ConcurrencyLimit, service_fn,
};
use tower_http::{
    cors::{AllowOrigin, CorsLayer},
    request_id::{MakeRequestId, PropagateRequestIdLayer, RequestId, SetRequestIdLayer},
    timeout::TimeoutLayer,
};
use tower_idempotency::{
    Idempotency, IdempotencyLayer, InFlight, Recovery, Retention, Scope, State, StoreFailure,
    testing::{Fault, Operation, Times},
};

fn layer(store: TestStore) -> IdempotencyLayer<TestStore> {
    IdempotencyLayer::new(store).single_tenant()
}

/// Fails the test instead of hanging it.
async fn soon<F: Future>(what: F) -> F::Output {
    tokio::time::timeout(Duration::from_secs(10), what)
        .await
        .expect("this never ends")
}

/// The service once it is ready for an axum request.
async fn ready<S: Service<Request, Error: std::fmt::Debug>>(service: &mut S) -> &mut S {
    soon(service.ready()).await.unwrap()
}

fn cors() -> CorsLayer {
    CorsLayer::new()
        .allow_origin(AllowOrigin::mirror_request())
        .allow_methods([Method::POST])
        .allow_headers([HeaderName::from_static("idempotency-key")])
        .expose_headers([HeaderName::from_static("idempotent-replay")])
        .allow_credentials(true)
}

fn preflight() -> Request {
    Request::options("/charges")
        .header("origin", "https://one.example")
        .header("access-control-request-method", "POST")
        .header("access-control-request-headers", "idempotency-key")
        .body(Body::empty())
        .unwrap()
}

fn of(origin: &'static str, key: Option<&str>, body: &'static str) -> Request {
    let mut request = request("POST", "/charges", key, body);
    request
        .headers_mut()
        .insert("origin", HeaderValue::from_static(origin));
    request
}

const ORIGIN: &str = "access-control-allow-origin";

every_store! {
    // M3
    async fn with_cors_outside_refusals_and_replays_carry_its_headers(world: World) {
        let handler = Handler::new();
        let store = world.open().await;
        let app = handler.behind(layer(store.clone())).layer(cors());
        let answer = send(&app, preflight()).await;
        assert_eq!((answer.status.as_u16(), answer.header(ORIGIN)), (200, Some("https://one.example")));
        assert_eq!(answer.header("access-control-allow-headers"), Some("idempotency-key"));
        assert_eq!((handler.effects(), store.total_calls()), (0, 0));

        for (key, body, status, replay) in [
            (None, "A", 400, false), (Some("\""), "A", 400, false), (Some("K"), "A", 201, false), (Some("K"), "A", 201, true),
            (Some("K"), "B", 409, false),
        ] {
            for origin in ["https://one.example", "https://two.example"] {
                let answer = send(&app, of(origin, key, body)).await;
                assert_eq!(answer.status, status);
                assert_eq!(answer.header(ORIGIN), Some(origin), "{key:?} {body}");
                assert_eq!(answer.header("access-control-expose-headers"), Some("idempotent-replay"));
                if replay {
                    assert!(answer.replay);
                }
            }
        }
        assert_eq!(handler.effects(), 1);
    }

    // M3
    async fn with_cors_inside_a_retry_never_sees_the_first_callers_origin(world: World) {
        let handler = Handler::new();
        let store = world.open().await;
        let app = handler.router().layer(cors()).layer(layer(store.clone()));
        let answer = send(&app, preflight()).await;
        assert_eq!((answer.status.as_u16(), answer.header(ORIGIN)), (200, Some("https://one.example")));
        assert_eq!((handler.effects(), store.total_calls()), (0, 0));

        let first = send(&app, of("https://one.example", Some("K"), "A")).await;
        assert_eq!(first.header(ORIGIN), Some("https://one.example"));
        let retry = send(&app, of("https://two.example", Some("K"), "A")).await;
        assert!(retry.replay);
        assert_eq!(retry.body, first.body);
        let names = retry.headers.keys().filter(|name| name.as_str().starts_with("access-control-"));
        assert_eq!(names.count(), 0);
        let stored = record(&store, "K").await.unwrap().response.unwrap();
        assert!(!String::from_utf8_lossy(&stored).contains("one.example"));
        assert_eq!(handler.effects(), 1);
    }

    // M4
    async fn under_a_timeout_outside_the_run_goes_on_and_its_retry_gets_the_true_result(world: World) {
        // Long enough for a busy machine to reach the handler.
        let brief = Duration::from_millis(500);
        let timed_out = |_: BoxError| async { StatusCode::GATEWAY_TIMEOUT };
        let tower = ServiceBuilder::new()
            .layer(HandleErrorLayer::new(timed_out))
            .layer(tower::timeout::TimeoutLayer::new(brief));
        let tower_http = TimeoutLayer::with_status_code(StatusCode::REQUEST_TIMEOUT, brief);
        let handler = Handler::new();
        let store = world.open().await;
        let inner = handler.behind(layer(store.clone()));
        let apps = [("http", 408, inner.clone().layer(tower_http)), ("tower", 504, inner.clone().layer(tower))];
        for (n, (key, status, app)) in apps.into_iter().enumerate() {
            let server = Server::start(app).await;
            handler.close_gate();
            let reply = server.exchange(&raw_post(key, "A")).await;
            assert_eq!(reply.status, status);
            assert_eq!(record(&store, key).await.unwrap().state, State::Running, "it goes on");
            let early = send(&inner, post(key, "A")).await;
            assert_eq!(early.said(), (409, "idempotency_in_flight".into()));
            handler.open_gate();
            let store = store.clone();
            soon(async {
                while record(&store, key).await.unwrap().state != State::Completed {
                    tokio::time::sleep(Duration::from_millis(2)).await;
                }
            }).await;
            let retry = send(&inner, post(key, "A")).await;
            assert!(retry.replay);
            assert_eq!((retry.status.as_u16(), handler.effects()), (201, n + 1));
        }
    }

    // M4
    async fn the_answer_of_a_timeout_inside_is_kept_as_the_ambiguous_result_it_is(world: World) {
        let brief = Duration::from_millis(5);
        for (n, (status, retention, is_kept)) in [
            (408, Retention::standard(), true), (504, Retention::standard(), true), (408, Retention::successes_only(), false),
        ].into_iter().enumerate() {
            let handler = Handler::new();
            let status = StatusCode::from_u16(status).unwrap();
            let layer = layer(world.open().await)
                .retention(retention)
                .scope(move |_| Some(Scope::new(n.to_string())));
            let app = handler.router().layer(TimeoutLayer::with_status_code(status, brief)).layer(layer);
            handler.close_gate();
            let first = send(&app, post("K", "A")).await;
            assert_eq!(first.status, status);
            handler.open_gate();
            let retry = send(&app, post("K", "A")).await;
            if is_kept {
                retry.assert_replays(&first);
                assert_eq!(handler.effects(), 1);
            } else {
                assert_eq!((retry.status.as_u16(), retry.replay, handler.effects()), (201, false, 2));
            }
        }
    }

    // M5
    async fn a_correlation_id_used_as_key_never_gets_another_calls_answer(world: World) {
        let handler = Handler::new();
        let layer = layer(world.open().await).header_name(HeaderName::from_static("x-request-id"));
        let app = handler.behind(layer);
        let with_id = |uri: &str, id: &str| {
            let mut request = request("POST", uri, None, "A");
            request.headers_mut().insert("x-request-id", HeaderValue::from_str(id).unwrap());
            request
        };
        // One id for two calls of one trace: the second is refused and says where.
        let order = send(&app, with_id("/orders", "trace-1")).await;
        assert_eq!(order.status, 201);
        let payment = send(&app, with_id("/payments", "trace-1")).await;
        assert_eq!(payment.said(), (409, "idempotency_key_reused".into()));
        assert!(payment.json()["detail"].as_str().unwrap().contains("POST /payments"));
        // A fresh id per attempt protects nobody, which is why the documentation is against it.
        assert!(!send(&app, with_id("/orders", "trace-2")).await.replay);
        assert_eq!(handler.effects(), 2);
        let documentation = include_str!("../src/layer.rs");
        assert!(documentation.contains("A correlation id such as `X-Request-Id` is no idempotency key"));
    }

    async fn request_ids_made_outside_are_kept_and_each_attempt_has_its_own(world: World) {
        #[derive(Clone, Default)]
        struct Count(Arc<AtomicUsize>);
        impl MakeRequestId for Count {
            fn make_request_id<B>(&mut self, _: &http::Request<B>) -> Option<RequestId> {
                let id = format!("id-{}", self.0.fetch_add(1, Ordering::SeqCst));
                Some(RequestId::new(HeaderValue::try_from(id).unwrap()))
            }
        }
        let handler = Handler::new();
        let ids = ServiceBuilder::new()
            .layer(SetRequestIdLayer::x_request_id(Count::default()))
            .layer(PropagateRequestIdLayer::x_request_id());
        let app = handler.behind(layer(world.open().await)).layer(ids);
        let first = send(&app, post("K", "A")).await;
        let retry = send(&app, post("K", "A")).await;
        assert_eq!((first.header("x-request-id"), retry.header("x-request-id")), (Some("id-0"), Some("id-1")));
        assert!(retry.replay);
        let reused = send(&app, post("K", "B")).await;
        assert_eq!(reused.json()["original_request_id"], "id-0");
    }

    async fn what_being_ready_holds_is_given_back_by_requests_that_never_reach_the_service(world: World) {
        let store = world.open().await;
        let runs = Arc::new(AtomicUsize::new(0));
        let counting = {
            let runs = runs.clone();
            service_fn(move |_: Request| {
                runs.fetch_add(1, Ordering::SeqCst);
                async { Ok::<_, BoxError>(Response::new(Body::empty())) }
            })
        };
        let limited = ConcurrencyLimit::new(counting.clone(), 1);
        let buffered = Buffer::new(ConcurrencyLimit::new(counting.clone(), 1), 1);
        async fn exhaust<I>(scope: &'static str, inner: I, store: &TestStore) -> usize
        where
            I: Service<Request, Response = Response<Body>, Error = BoxError> + Clone + Send + 'static,
            I::Future: Send,
        {
            let layer = layer(store.clone())
                .request_body_limit(10)
                .scope(move |head| (!head.headers.contains_key("x-nobody")).then(|| Scope::new(scope)));
            let service = layer.layer(inner);
            let nobody = || {
                let mut request = post("K", "A");
                request.headers_mut().insert("x-nobody", HeaderValue::from_static("1"));
                request
            };
            let (mut calls, mut called) = (0, Vec::new());
            let mut call = async |request: &dyn Fn() -> Request, status: u16, times: usize| {
                for _ in 0..times {
                    let mut service = service.clone();
                    let response = soon(ready(&mut service).await.call(request())).await.unwrap();
                    assert_eq!(response.status(), status);
                    calls += 1;
                    // The clone that was called stays, and must hold nothing.
                    called.push(service);
                }
            };
            call(&|| post("K", "A"), 200, 4).await; // One run and three replays.
            call(&|| post("K", "B"), 409, 3).await;
            call(&|| post("\"", "A"), 400, 3).await;
            call(&|| request("POST", "/", None, "A"), 400, 3).await;
            call(&|| post("L", "longer than ten"), 413, 3).await;
            call(&nobody, 403, 3).await;
            // Asked for and dropped before its first poll.
            let mut dropped = Vec::new();
            for _ in 0..3 {
                let mut service = service.clone();
                drop(ready(&mut service).await.call(post("dropped", "A")));
                dropped.push(service);
            }
            // Ready, and never called.
            for _ in 0..3 {
                let mut service = service.clone();
                ready(&mut service).await;
            }
            call(&|| request("GET", "/", None, ""), 200, 2).await;
            calls
        }
        assert_eq!(exhaust("limited", limited, &store).await, 21);
        assert_eq!(exhaust("buffered", buffered, &store).await, 21);
        assert_eq!(runs.load(Ordering::SeqCst), 2 * 3);
    }

    async fn one_who_waits_holds_no_place_of_the_inner_service(world: World) {
        let handler = Handler::new();
        let store = world.open().await;
        let layer = layer(store.clone()).in_flight(InFlight::Wait(Duration::from_secs(60)));
        let service = layer.layer(ConcurrencyLimit::new(handler.router(), 2));
        let call = |key: &'static str| {
            let service = service.clone();
            tokio::spawn(async move { Answer::of(service.oneshot(post(key, "A")).await.unwrap()).await })
        };
        handler.close_gate();
        let first = call("K");
        handler.reached(1).await;
        let waiter = call("K");
        // It asks once, and once more after it has joined those who wait.
        store.called(Operation::Claim, 3).await;
        // One place is the first run's, and there are only two: this one needs the waiter's.
        let other = call("J");
        soon(handler.reached(2)).await;
        handler.open_gate();
        let first = first.await.unwrap();
        soon(waiter).await.unwrap().assert_replays(&first);
        assert_eq!(soon(other).await.unwrap().status, 201);
        assert_eq!(handler.effects(), 2);
    }

    async fn only_the_instance_that_was_polled_ready_is_called(world: World) {
        let handler = Handler::new();
        let store = world.open().await;
        let strict = Strict { router: handler.router(), is_ready: false };
        let service = layer(store.clone())
            .store_failure(StoreFailure::RunUnprotected)
            .in_flight(InFlight::Wait(Duration::from_secs(60)))
            .layer(strict);
        // One service called again and again, as a server does on one connection.
        let mut again = service.clone();
        for (request, status) in [
            (post("K", "A"), 201), (post("K", "A"), 201), (post("K", "B"), 409), (post("\"", "A"), 400), (post("L", "A"), 201),
            (request("GET", "/", None, ""), 201), (request("PATCH", "/", None, ""), 201),
        ] {
            let response = ready(&mut again).await.call(request).await.unwrap();
            assert_eq!(response.status(), status);
        }
        store.fail(Operation::Claim, Fault::Before, Times::Next(3));
        let unprotected = ready(&mut again).await.call(post("U", "A")).await.unwrap();
        assert_eq!(unprotected.headers()["idempotency-status"], "unprotected");

        // A waiter gave its readiness back, so it must ask again before it runs in the first's stead.
        let before = handler.effects();
        handler.close_gate();
        let first = tokio::spawn(service.clone().oneshot(post("W", "A")));
        handler.reached(before + 1).await;
        let claims = store.calls(Operation::Claim);
        let waiter = tokio::spawn(service.clone().oneshot(post("W", "A")));
        store.called(Operation::Claim, claims + 2).await;
        let id = tower_idempotency::RecordId::new(Scope::shared(), tower_idempotency::IdempotencyKey::new("W"));
        tower_idempotency::store::Inspect::forget(store.inner(), &id).await.unwrap();
        soon(handler.reached(before + 2)).await;
        handler.open_gate();
        assert_eq!(first.await.unwrap().unwrap().status(), 201);
        assert_eq!(soon(waiter).await.unwrap().unwrap().status(), 201);
    }

    async fn the_extractor_tells_a_handler_about_its_claim(world: World) {
        let panics = Arc::new(AtomicUsize::new(1));
        let handler = move |idempotency: Idempotency| {
            let panics = panics.clone();
            async move {
                idempotency.ensure_owned().await.unwrap();
                if panics.fetch_sub(1, Ordering::SeqCst) == 1 {
                    panic!("as the test wants");
                }
                let scope = String::from_utf8_lossy(idempotency.scope().as_bytes()).into_owned();
                format!("{scope}/{}/{}", idempotency.key().as_str().unwrap(), idempotency.attempt())
            }
        };
        let layer = IdempotencyLayer::new(world.open().await)
            .recovery(Recovery::rerun())
            .scope(|_| Some(Scope::new("tenant")));
        let app = Router::new().route("/charges", any(handler)).layer(layer);
        let panicked = tokio::spawn(app.clone().oneshot(post("\"a \\\"key\\\"\"", "A"))).await;
        assert!(panicked.unwrap_err().is_panic());
        assert_eq!(send(&app, post("\"a \\\"key\\\"\"", "A")).await.body, "tenant/a \"key\"/2");
        assert_eq!(send(&app, post("other", "A")).await.body, "tenant/other/1");
    }

    async fn the_extractor_is_none_where_no_key_applies_and_500_where_it_must_not_be(world: World) {
        let store = world.open().await;
        let optional = |idempotency: Option<Idempotency>| async move { idempotency.is_some().to_string() };
        let app = Router::new()
            .route("/optional", any(optional))
            .route("/required", any(|_: Idempotency| async { "ran" }))
            .layer(layer(store.clone()).optional().store_failure(StoreFailure::RunUnprotected));
        assert_eq!(send(&app, request("POST", "/optional", Some("K"), "")).await.body, "true");
        assert_eq!(send(&app, request("POST", "/required", Some("L"), "")).await.body, "ran");
        for (method, key) in [("GET", Some("K")), ("PUT", Some("K")), ("POST", None)] {
            assert_eq!(send(&app, request(method, "/optional", key, "")).await.body, "false", "{method}");
            let answer = send(&app, request(method, "/required", key, "")).await;
            assert_eq!(answer.status, 500);
            let text = String::from_utf8_lossy(&answer.body).into_owned();
            for part in ["no idempotency claim", "IdempotencyLayer", "Option<Idempotency>"] {
                assert!(text.contains(part), "{text}");
            }
        }
        store.fail(Operation::Claim, Fault::Before, Times::Next(3));
        assert_eq!(send(&app, request("POST", "/optional", Some("U"), "")).await.body, "false");
        // Without any layer at all.
        let bare = Router::new().route("/required", any(|_: Idempotency| async { "ran" }));
        assert_eq!(send(&bare, request("POST", "/required", Some("K"), "")).await.status, 500);
    }

    async fn an_owner_whose_record_was_taken_away_is_told_before_its_effect(world: World) {
        let store = world.open().await;
        let inner = store.clone();
        let handler = move |idempotency: Idempotency| {
            let store = inner.clone();
            async move {
                let id = tower_idempotency::RecordId::new(idempotency.scope().clone(), idempotency.key().clone());
                assert!(tower_idempotency::store::Inspect::forget(store.inner(), &id).await.unwrap());
                match idempotency.ensure_owned().await {
                    Ok(()) => "the effect".into_response(),
                    Err(error) => {
                        assert!(!error.is_unknown());
                        error.into_response()
                    }
                }
            }
        };
        let app = Router::new().route("/charges", any(handler)).layer(layer(store.clone()));
        let answer = send(&app, post("K", "A")).await;
        assert_eq!((answer.status.as_u16(), answer.header("retry-after")), (503, Some("1")));
        assert_eq!(records(&store).await, 0);
    }

    async fn any_request_and_response_body_will_do(world: World) {
        let store = world.open().await;
        let runs = Arc::new(AtomicUsize::new(0));
        let inner = service_fn(move |request: http::Request<Body>| {
            let run = runs.fetch_add(1, Ordering::SeqCst) + 1;
            async move {
                let body = request.into_body().collect().await.unwrap().to_bytes();
                let text = format!("{run} {}", String::from_utf8_lossy(&body));
                Ok::<_, Infallible>(http::Response::new(Full::new(Bytes::from(text))))
            }
        });
        let service = layer(store).layer(inner);
        let with = |key: &str| http::Request::post("/charges").header("idempotency-key", key);
        async fn text(response: Response<Body>) -> Bytes {
            response.into_body().collect().await.unwrap().to_bytes()
        }
        let full = || with("K").body(Full::new(Bytes::from("A"))).unwrap();
        assert_eq!(text(service.clone().oneshot(full()).await.unwrap()).await, "1 A");
        let boxed = UnsyncBoxBody::new(Full::new(Bytes::from("A")));
        let boxed = with("K").body(boxed).unwrap();
        let retry = service.clone().oneshot(boxed).await.unwrap();
        assert_eq!(retry.headers()["idempotent-replay"], "true");
        assert_eq!(text(retry).await, "1 A");
        let plain = with("L").body("B".to_owned()).unwrap();
        assert_eq!(text(service.clone().oneshot(plain).await.unwrap()).await, "2 B");
        let get = http::Request::get("/").body(Empty::<Bytes>::new()).unwrap();
        assert_eq!(text(service.clone().oneshot(get).await.unwrap()).await, "3 ");

        // Served by hyper alone, without axum in between.
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let serving = tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let service = hyper_util::service::TowerToHyperService::new(service.clone());
                let io = hyper_util::rt::TokioIo::new(stream);
                tokio::spawn(hyper::server::conn::http1::Builder::new().serve_connection(io, service));
            }
        });
        for is_replay in [false, true] {
            use tokio::io::{AsyncReadExt, AsyncWriteExt};
            let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
            let raw = "POST /charges HTTP/1.1\r\nhost: test\r\nidempotency-key: H\r\nconnection: close\r\ncontent-length: 1\r\n\r\nC";
            stream.write_all(raw.as_bytes()).await.unwrap();
            let mut reply = String::new();
            stream.read_to_string(&mut reply).await.unwrap();
            assert!(reply.ends_with("4 C"), "{reply}");
            assert_eq!(reply.contains("idempotent-replay: true"), is_replay, "{reply}");
        }
        serving.abort();
    }
}

/// Panics when it is called without having been polled ready, as many services do.
struct Strict {
    router: Router,
    is_ready: bool,
}

impl Clone for Strict {
    fn clone(&self) -> Self {
        Self {
            router: self.router.clone(),
            is_ready: false,
        }
    }
}

impl Service<Request> for Strict {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = <Router as Service<Request>>::Future;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.is_ready = true;
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request) -> Self::Future {
        assert!(self.is_ready, "called without being ready");
        self.is_ready = false;
        self.router.call(request)
    }
}

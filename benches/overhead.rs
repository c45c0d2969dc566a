//! What the layer adds to a request, in process: `cargo bench --bench overhead`.
//!
//! Every variant is measured in every round, one after the other, so that a slow moment of the
//! machine hits all of them; what is printed is the median over the rounds. All of it runs in a
//! spawned task, as a server would run it: the thread of `block_on` is no worker, and each wake-up
//! across threads would add what no server pays.
//!
//! The layer's own cost is measured around the whole router. `route_layer` boxes whatever layer it
//! is given once more per route; the last rows show that beside a layer that does nothing.
//!
//! A few per cent of that drown in what else a machine does. Instructions can be counted: with
//! `-- --count first|replay|uncovered|bare N` this runs N requests of one kind on one thread and ends, so
//! that what one request costs is the difference of two runs, divided by the N between them, whatever it costs
//! to start:
//!
//! ```text
//! cargo bench --no-run --bench overhead            # prints the executable
//! for n in 5000 10000; do
//!     valgrind --tool=callgrind --callgrind-out-file=/dev/null EXECUTABLE --count first $n 2>&1 | grep refs
//! done
//! ```
//!
//! Two versions are compared by building this file in both.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    convert::Infallible,
    hint::black_box,
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use axum::{
    Router,
    body::Body,
    http::{HeaderValue, Method, Request, Response, StatusCode, header},
    routing::post,
};
use bytes::Bytes;
use sha2::{Digest, Sha256};
use tower::{Layer, Service, ServiceExt, util::MapRequestLayer};
use tower_idempotency::{IdempotencyLayer, MemoryStore};

const ROUNDS: usize = 41;
const REQUESTS: usize = 5_000;

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call is handed on unchanged to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        unsafe { System.realloc(memory, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A handler that does nothing but answer, as a real one would: status, two headers, a body.
async fn charge(body: Bytes) -> Response<Body> {
    black_box(&body);
    let mut response = Response::new(Body::from(Bytes::from_static(
        br#"{"charge_id":"ch_0001","status":"paid"}"#,
    )));
    *response.status_mut() = StatusCode::CREATED;
    let headers = response.headers_mut();
    headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/json"),
    );
    headers.insert(
        header::LOCATION,
        HeaderValue::from_static("/payments/ch_0001"),
    );
    response
}

fn bare_router() -> Router {
    Router::new().route("/payments", post(charge).get(charge))
}

fn layer() -> IdempotencyLayer<MemoryStore> {
    IdempotencyLayer::new(MemoryStore::new()).single_tenant()
}

fn request(method: Method, key: Option<HeaderValue>, body: &Bytes) -> Request<Body> {
    let mut request = Request::new(Body::from(body.clone()));
    *request.method_mut() = method;
    *request.uri_mut() = axum::http::Uri::from_static("/payments");
    let headers = request.headers_mut();
    headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/json"),
    );
    headers.insert(header::HOST, HeaderValue::from_static("localhost"));
    if let Some(key) = key {
        headers.insert("idempotency-key", key);
    }
    request
}

/// Nanoseconds and allocations of one request.
type Cost = (f64, f64);

/// Sends requests as a server does: each to a clone of the service, once that is ready.
async fn run<S>(app: &S, requests: impl Iterator<Item = Request<Body>>, replays: bool) -> Cost
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible> + Clone,
{
    let allocations = ALLOCATIONS.load(Ordering::Relaxed);
    let start = Instant::now();
    let mut count = 0.0;
    for request in requests {
        let Ok(response) = app.clone().oneshot(request).await;
        assert_eq!(response.status(), StatusCode::CREATED);
        assert_eq!(
            response.headers().contains_key("idempotent-replay"),
            replays
        );
        black_box(response);
        count += 1.0;
    }
    let elapsed = start.elapsed();
    let allocated = ALLOCATIONS.load(Ordering::Relaxed) - allocations;
    (elapsed.as_nanos() as f64 / count, allocated as f64 / count)
}

fn sha256(body: &Bytes) -> f64 {
    let start = Instant::now();
    for _ in 0..REQUESTS {
        black_box(Sha256::digest(black_box(body)));
    }
    start.elapsed().as_nanos() as f64 / REQUESTS as f64
}

fn median(mut costs: Vec<Cost>) -> Cost {
    costs.sort_by(|a, b| a.0.total_cmp(&b.0));
    let (nanos, _) = costs[costs.len() / 2];
    costs.sort_by(|a, b| a.1.total_cmp(&b.1));
    (nanos, costs[costs.len() / 2].1)
}

async fn measure(body: Bytes) {
    let mut rows: [Vec<Cost>; 9] = Default::default();
    let mut hash = Vec::new();
    let key = HeaderValue::from_static("7d0b5c1e-6f2a-4f57-9f4a-replayed0000");
    let get = || (0..REQUESTS).map(|_| request(Method::GET, None, &body));
    let post = || (0..REQUESTS).map(|_| request(Method::POST, Some(key.clone()), &body));
    let bare = bare_router().with_state(());
    let no_op = bare_router()
        .route_layer(MapRequestLayer::new(|request: Request<Body>| request))
        .with_state(());
    for round in 0..ROUNDS {
        // Stores of their own for each round, so that no round pays for the size of the others.
        let around = layer().layer(bare_router().with_state(()));
        let routed = bare_router().route_layer(layer()).with_state(());
        run(&bare, get(), false).await; // warms up after the stores of the last round were freed
        run(&around, post().take(1), false).await;
        run(&routed, post().take(1), false).await;
        // Made beforehand: what it costs to write a fresh key is not what is asked here.
        let fresh: Vec<_> = (0..REQUESTS)
            .map(|at| format!("7d0b5c1e-6f2a-4f57-{round:04}-{at:012}"))
            .map(|key| HeaderValue::try_from(key).expect("ASCII"))
            .collect();
        let first = || {
            fresh
                .iter()
                .map(|key| request(Method::POST, Some(key.clone()), &body))
        };
        let costs = [
            run(&bare, get(), false).await,
            run(&bare, first(), false).await,
            run(&around, get(), false).await,
            run(&around, first(), false).await,
            run(&around, post(), true).await,
            run(&no_op, first(), false).await,
            run(&routed, get(), false).await,
            run(&routed, first(), false).await,
            run(&routed, post(), true).await,
        ];
        // The first round warms caches and allocator.
        if round > 0 {
            for (row, cost) in rows.iter_mut().zip(costs) {
                row.push(cost);
            }
            hash.push((sha256(&body), 0.0));
        }
    }
    let (hash, _) = median(hash);
    println!(
        "\nbody of {} bytes; SHA-256 of it {:.2} µs",
        body.len(),
        hash / 1e3
    );
    print(rows.map(median), hash);
}

fn print(costs: [Cost; 9], hash: f64) {
    let [
        bare_get,
        bare,
        get,
        first,
        replay,
        no_op,
        routed_get,
        routed_first,
        routed_replay,
    ] = costs;
    println!("| what | time | allocations | against | target | met |");
    println!("| --- | --- | --- | --- | --- | --- |");
    let row = |what: &str, cost: Cost, against: String, target: &str, met: &str| {
        let (time, allocations) = (cost.0 / 1e3, cost.1);
        println!("| {what} | {time:.2} µs | {allocations:.1} | {against} | {target} | {met} |");
    };
    let yes = |met: bool| if met { "yes" } else { "NO" };
    row("bare router, GET", bare_get, String::new(), "", "");
    row("bare router, POST", bare, String::new(), "", "");
    let (ratio, allocations) = (get.0 / bare_get.0, get.1 - bare_get.1);
    row(
        "not covered (GET)",
        get,
        format!("{ratio:.2} ×, {allocations:+.1} allocations"),
        "≤ 1.05 ×, no allocation",
        yes(ratio <= 1.05 && allocations <= 0.0),
    );
    let added = first.0 - bare.0;
    row(
        "first request",
        first,
        format!("+ {:.2} µs", added / 1e3),
        "≤ + 3 µs + SHA-256",
        yes(added <= 3_000.0 + hash),
    );
    let ratio = replay.0 / bare.0;
    row(
        "replay",
        replay,
        format!("{ratio:.2} ×"),
        "≤ 1.25 ×",
        yes(ratio <= 1.25),
    );
    row(
        "bare router with a no-op `route_layer`",
        no_op,
        String::new(),
        "",
        "",
    );
    let against = |cost: Cost| format!("{:+.2} µs", (cost.0 - no_op.0) / 1e3);
    row(
        "`route_layer`: not covered",
        routed_get,
        String::new(),
        "",
        "",
    );
    row(
        "`route_layer`: first request",
        routed_first,
        against(routed_first),
        "",
        "",
    );
    row(
        "`route_layer`: replay",
        routed_replay,
        against(routed_replay),
        "",
        "",
    );
}

/// Runs so many requests of one kind, for a tool that counts instructions.
async fn count(kind: &str, requests: usize) {
    let body = Bytes::from(vec![b'x'; 200]);
    let fresh = |at: usize| {
        let mut key = *b"7d0b5c1e-6f2a-4f57-9f4a-000000000000";
        let mut left = at;
        for digit in key.iter_mut().rev().take(12) {
            *digit += u8::try_from(left % 10).expect("a digit");
            left /= 10;
        }
        HeaderValue::from_bytes(&key).expect("ASCII")
    };
    let key = HeaderValue::from_static("7d0b5c1e-6f2a-4f57-9f4a-replayed0000");
    let around = layer().layer(bare_router().with_state(()));
    let numbers = 0..requests;
    match kind {
        "bare" => {
            let posts = numbers.map(|at| request(Method::POST, Some(fresh(at)), &body));
            run(&bare_router().with_state(()), posts, false).await
        }
        "first" => {
            let posts = numbers.map(|at| request(Method::POST, Some(fresh(at)), &body));
            run(&around, posts, false).await
        }
        "replay" => {
            let mut posts = numbers.map(|_| request(Method::POST, Some(key.clone()), &body));
            run(&around, posts.by_ref().take(1), false).await;
            run(&around, posts, true).await
        }
        "uncovered" => {
            let gets = numbers.map(|_| request(Method::GET, None, &body));
            run(&around, gets, false).await
        }
        _ => panic!("--count first|replay|uncovered|bare N"),
    };
}

fn main() {
    let arguments: Vec<_> = std::env::args().collect();
    // `cargo test --benches` passes this; there is nothing to measure then.
    if arguments.iter().any(|argument| argument == "--test") {
        return;
    }
    if let Some(at) = arguments.iter().position(|argument| argument == "--count") {
        let requests = arguments[at + 2].parse().expect("a number of requests");
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        return runtime.block_on(count(&arguments[at + 1], requests));
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime");
    runtime.block_on(async {
        for size in [200, 4096] {
            let body = Bytes::from(vec![b'x'; size]);
            tokio::spawn(measure(body)).await.expect("no panic");
        }
    });
    runtime.shutdown_timeout(Duration::from_secs(1));
}

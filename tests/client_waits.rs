//! How long the client waits, and when it stops, on a clock that stands still between two events.

use std::{
    future::{pending, ready},
    io,
    sync::{Arc, Mutex},
    task::{Context, Poll},
    time::Duration,
};

use axum::{body::Body, http::header};
use http::{Request, Response};
use tokio::{task::JoinSet, time::Instant};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_idempotency::client::{Ended, RetryLayer, Unanswered};

/// Tokio's timers have whole milliseconds, and round up.
const TICK: Duration = Duration::from_millis(1);

const BOUNDS: [f64; 5] = [0.5, 1.0, 2.0, 4.0, 8.0];

/// When the attempts of one operation were made.
#[derive(Clone, Default)]
struct Attempts(Arc<Mutex<Vec<Instant>>>);

impl Attempts {
    fn note(&self) -> u32 {
        let mut made = self.0.lock().unwrap();
        made.push(Instant::now());
        u32::try_from(made.len()).unwrap()
    }

    fn instants(&self) -> Vec<Instant> {
        self.0.lock().unwrap().clone()
    }

    /// The times between them.
    fn waits(&self) -> Vec<Duration> {
        let instants = self.instants();
        instants.windows(2).map(|two| two[1] - two[0]).collect()
    }
}

fn charge() -> Request<Body> {
    let request = Request::post("http://pay.example/charges");
    request.body(Body::from("250 baht")).unwrap()
}

/// A client that cannot connect.
fn unreachable(
    attempts: &Attempts,
) -> impl Service<Request<Body>, Response = Response<Body>, Error = io::Error, Future: Send>
+ Clone
+ Send
+ 'static {
    let attempts = attempts.clone();
    service_fn(move |_| {
        attempts.note();
        ready(Err(io::Error::from(io::ErrorKind::ConnectionRefused)))
    })
}

/// A server that answers the first attempts with this, and then with 201.
fn answering(
    attempts: &Attempts,
    times: u32,
    answer: impl Fn() -> Response<Body> + Clone + Send + 'static,
) -> impl Service<Request<Body>, Response = Response<Body>, Error = io::Error, Future: Send>
+ Clone
+ Send
+ 'static {
    let attempts = attempts.clone();
    service_fn(move |_| {
        let created = Response::builder().status(201).body(Body::empty());
        ready(Ok(match attempts.note() <= times {
            true => answer(),
            false => created.unwrap(),
        }))
    })
}

/// A server that never answers.
fn silent(
    attempts: &Attempts,
) -> impl Service<Request<Body>, Response = Response<Body>, Error = io::Error, Future: Send>
+ Clone
+ Send
+ 'static {
    let attempts = attempts.clone();
    service_fn(move |_| {
        attempts.note();
        pending()
    })
}

fn gave_up(unanswered: Unanswered) -> Ended {
    match unanswered {
        Unanswered::GaveUp(ended) => ended,
        other => panic!("{other:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn ten_thousand_operations_wait_within_bounds_that_double_and_as_long_as_they_should_on_average()
 {
    const OPERATIONS: u32 = 10_000;
    let mut operations = JoinSet::new();
    for _ in 0..OPERATIONS {
        operations.spawn(async {
            let attempts = Attempts::default();
            let client = RetryLayer::new().layer(unreachable(&attempts));
            let begun = Instant::now();
            let ended = gave_up(client.oneshot(charge()).await.unwrap_err());
            // No wait before the first attempt, and none after the last.
            assert_eq!(attempts.instants()[0], begun);
            assert_eq!(attempts.instants()[5], Instant::now());
            assert_eq!(ended.attempts(), 6);
            attempts.waits()
        });
    }
    let operations = operations.join_all().await;

    let mut total = 0.0;
    for (nth, bound) in BOUNDS.into_iter().enumerate() {
        let waits = || operations.iter().map(|waits| waits[nth]);
        let longest = waits().max().unwrap();
        let shortest = waits().min().unwrap();
        let mean = waits().sum::<Duration>().as_secs_f64() / f64::from(OPERATIONS);
        assert!(longest <= Duration::from_secs_f64(bound) + TICK);
        assert!(longest.as_secs_f64() > bound * 0.99, "{longest:?}");
        assert!(shortest.as_secs_f64() < bound * 0.01, "{shortest:?}");
        // Five times the deviation of such a mean, and more.
        assert!((mean / (bound / 2.0) - 1.0).abs() < 0.035, "{nth}: {mean}");
        total += mean;
    }
    let longest: Duration = operations
        .iter()
        .map(|waits| waits.iter().sum())
        .max()
        .unwrap();
    assert!(longest <= Duration::from_millis(15_500), "{longest:?}");
    assert!((total / 7.75 - 1.0).abs() < 0.02, "{total}");
}

#[tokio::test(start_paused = true)]
async fn a_thousand_clients_that_failed_together_do_not_come_back_together() {
    let begun = Instant::now();
    let mut clients = JoinSet::new();
    for _ in 0..1_000 {
        clients.spawn(async {
            let attempts = Attempts::default();
            let away = || Response::builder().status(503).body(Body::empty()).unwrap();
            let client = RetryLayer::new().layer(answering(&attempts, 1, away));
            client.oneshot(charge()).await.unwrap();
            attempts.instants()[1]
        });
    }
    let retries = clients.join_all().await;
    assert_eq!(retries.len(), 1_000);

    for start in 0..500 {
        let window = Duration::from_millis(start)..Duration::from_millis(start + 10);
        let inside = retries.iter().filter(|at| window.contains(&(**at - begun)));
        let inside = inside.count();
        assert!(inside <= 50, "{inside} came from {start} ms on");
    }
    let late = retries
        .iter()
        .filter(|at| **at - begun > Duration::from_millis(500) + TICK);
    assert_eq!(late.count(), 0);
}

/// The waits after an answer like this, of so many operations that the jitter shows.
async fn waits_after(answer: fn() -> Response<Body>) -> (Duration, Duration) {
    let mut operations = JoinSet::new();
    for _ in 0..300 {
        operations.spawn(async move {
            let attempts = Attempts::default();
            let client = RetryLayer::new().layer(answering(&attempts, 1, answer));
            client.oneshot(charge()).await.unwrap();
            attempts.waits()[0]
        });
    }
    let waits = operations.join_all().await;
    (*waits.iter().min().unwrap(), *waits.iter().max().unwrap())
}

#[track_caller]
fn assert_hinted((shortest, longest): (Duration, Duration), hint: f64) {
    let hint = Duration::from_secs_f64(hint);
    assert!(shortest >= hint, "{shortest:?}");
    assert!(shortest < hint + Duration::from_millis(50), "{shortest:?}");
    assert!(longest > hint + Duration::from_millis(200), "{longest:?}");
    assert!(
        longest <= hint + Duration::from_millis(250) + TICK,
        "{longest:?}"
    );
}

fn told(status: u16, fields: &[(&str, &str)], body: &'static str) -> Response<Body> {
    let mut response = Response::builder().status(status);
    for (name, value) in fields {
        response = response.header(*name, *value);
    }
    response.body(Body::from(body)).unwrap()
}

// X4
#[tokio::test(start_paused = true)]
async fn the_servers_hint_is_waited_and_a_little_more() {
    let seconds = waits_after(|| told(503, &[("retry-after", "3")], "")).await;
    assert_hinted(seconds, 3.0);
    let at_once = waits_after(|| told(429, &[("retry-after", "0")], "")).await;
    assert_hinted(at_once, 0.0);

    let date = waits_after(|| {
        let fields = [
            ("date", "Sun, 06 Nov 1994 08:49:37 GMT"),
            ("retry-after", "Sun, 06 Nov 1994 08:49:42 GMT"),
        ];
        told(503, &fields, "")
    });
    assert_hinted(date.await, 5.0);

    let problem = waits_after(|| {
        let fields = [("content-type", "application/problem+json")];
        let body = r#"{"code":"idempotency_in_flight","retry_after_seconds":1.5}"#;
        told(409, &fields, body)
    });
    assert_hinted(problem.await, 1.5);

    // The larger of the two.
    let envelope = waits_after(|| {
        let fields = [("content-type", "application/json"), ("retry-after", "2")];
        let body = r#"{"error":{"code":"idempotency_in_flight","retry_after_seconds":4}}"#;
        told(409, &fields, body)
    });
    assert_hinted(envelope.await, 4.0);
}

#[tokio::test(start_paused = true)]
async fn a_hint_that_is_nonsense_leaves_the_wait_as_it_is() {
    for answer in [
        || told(503, &[("retry-after", "-20")], ""),
        || told(503, &[("retry-after", "soon")], ""),
        || {
            let fields = [("content-type", "application/json")];
            told(503, &fields, r#"{"retry_after_seconds":-20}"#)
        },
        || {
            let fields = [("content-type", "application/json")];
            told(503, &fields, r#"{"retry_after_seconds":1e300}"#)
        },
    ] {
        let (shortest, longest) = waits_after(answer).await;
        assert!(shortest < Duration::from_millis(50), "{shortest:?}");
        assert!(longest > Duration::from_millis(400), "{longest:?}");
        assert!(longest <= Duration::from_millis(500) + TICK, "{longest:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_attempt_has_ten_seconds() {
    let attempts = Attempts::default();
    let client = RetryLayer::new().retries(1).layer(silent(&attempts));
    let begun = Instant::now();
    let ended = gave_up(client.oneshot(charge()).await.unwrap_err());
    assert!(ended.is_timeout() && ended.response().is_none() && ended.source().is_some());
    assert_eq!(ended.attempts(), 2);
    let wait = attempts.waits()[0] - Duration::from_secs(10);
    assert!(wait <= Duration::from_millis(500) + TICK, "{wait:?}");
    assert_eq!(begun.elapsed() - wait, Duration::from_secs(20));
}

#[tokio::test(start_paused = true)]
async fn an_attempts_time_covers_the_body_of_its_answer_and_the_wait_for_a_ready_client() {
    let attempts = Attempts::default();
    let endless = || {
        let body = http_body_util::StreamBody::new(futures_util::stream::pending::<
            Result<http_body::Frame<bytes::Bytes>, io::Error>,
        >());
        Response::new(Body::new(body))
    };
    let layer = RetryLayer::new().attempt_timeout(Duration::from_secs(2));
    let client = layer.clone().layer(answering(&attempts, 1, endless));
    let answer = client.oneshot(charge()).await.unwrap();
    assert_eq!(answer.status(), 201);
    let wait = attempts.waits()[0];
    assert!(wait >= Duration::from_secs(2) && wait <= Duration::from_millis(2_500) + TICK);

    // One request at a time, and somebody else's is not over yet: nothing is sent, and that is said.
    let attempts = Attempts::default();
    let one = tower::limit::ConcurrencyLimitLayer::new(1).layer(silent(&attempts));
    let other = tokio::spawn(one.clone().oneshot(charge()));
    tokio::task::yield_now().await;
    let mut client = layer.retries(2).layer(one);
    // Called as one must not, so that the wait is the attempts'.
    let begun = Instant::now();
    let unanswered = client.call(charge()).await.unwrap_err();
    assert!(
        matches!(unanswered, Unanswered::NotSent(_)),
        "{unanswered:?}"
    );
    assert!(begun.elapsed() >= Duration::from_secs(6));
    assert_eq!(attempts.instants().len(), 1);
    other.abort();
}

#[tokio::test(start_paused = true)]
async fn the_last_attempt_gets_what_is_left_of_the_whole_time() {
    let mut operations = JoinSet::new();
    for _ in 0..300 {
        operations.spawn(async {
            let attempts = Attempts::default();
            let layer = RetryLayer::new().total_timeout(Duration::from_secs(25));
            let client = layer.layer(silent(&attempts));
            let begun = Instant::now();
            let ended = gave_up(client.oneshot(charge()).await.unwrap_err());
            let made = attempts.instants().len();
            assert_eq!(usize::try_from(ended.attempts()).unwrap(), made);
            assert!(begun.elapsed() <= Duration::from_secs(25) + TICK);
            (made, begun.elapsed())
        });
    }
    let ended = operations.join_all().await;
    // Two attempts take 20 s, and the waits 1.5 s at most: the third is cut short, and ends with the whole.
    for (made, elapsed) in ended {
        assert_eq!(made, 3);
        assert!(elapsed >= Duration::from_secs(25), "{elapsed:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_wait_that_would_end_after_the_whole_time_is_not_begun() {
    // 20 s and a little more, four times; a fifth wait would end after 90 s.
    let attempts = Attempts::default();
    let busy = || told(429, &[("retry-after", "20")], "busy");
    let client = RetryLayer::new().layer(answering(&attempts, 9, busy));
    let begun = Instant::now();
    let ended = gave_up(client.oneshot(charge()).await.unwrap_err());
    assert_eq!(ended.attempts(), 5);
    assert_eq!(begun.elapsed(), attempts.waits().iter().sum::<Duration>());
    assert!(begun.elapsed() < Duration::from_secs(81) + 4 * TICK);
    assert_eq!(ended.retry_after(), Some(Duration::from_secs(20)));
    assert_eq!(ended.response().unwrap().body(), "busy");
}

// X4
#[tokio::test(start_paused = true)]
async fn a_hint_beyond_the_whole_time_ends_the_operation_at_once() {
    let attempts = Attempts::default();
    let later = || told(503, &[(header::RETRY_AFTER.as_str(), "3600")], "");
    let client = RetryLayer::new().layer(answering(&attempts, 9, later));
    let begun = Instant::now();
    let ended = gave_up(client.oneshot(charge()).await.unwrap_err());
    assert_eq!(begun.elapsed(), Duration::ZERO);
    assert_eq!(ended.attempts(), 1);
    assert_eq!(ended.retry_after(), Some(Duration::from_secs(3600)));
}

#[tokio::test(start_paused = true)]
async fn a_request_whose_body_does_not_end_is_never_sent() {
    let attempts = Attempts::default();
    let client = RetryLayer::new().layer(silent(&attempts));
    let body = http_body_util::StreamBody::new(futures_util::stream::pending::<
        Result<http_body::Frame<bytes::Bytes>, io::Error>,
    >());
    let request = Request::post("/charges").body(Body::new(body)).unwrap();
    let begun = Instant::now();
    let unanswered = client.oneshot(request).await.unwrap_err();
    assert!(matches!(unanswered, Unanswered::NotSent(_)));
    assert_eq!(begun.elapsed(), Duration::from_secs(90));
    assert!(attempts.instants().is_empty());
}

#[tokio::test(start_paused = true)]
async fn whoever_drops_the_future_ends_the_retrying() {
    let attempts = Attempts::default();
    let client = RetryLayer::new().layer(silent(&attempts));
    let operation = client.oneshot(charge());
    let waited = tokio::time::timeout(Duration::from_secs(15), operation).await;
    assert!(waited.is_err());
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert_eq!(attempts.instants().len(), 2);
}

/// A body that never ends, after an error's head.
fn hanging(status: u16, fields: &[(&str, &str)]) -> Response<Body> {
    let body = http_body_util::StreamBody::new(futures_util::stream::pending::<
        Result<http_body::Frame<bytes::Bytes>, io::Error>,
    >());
    told(status, fields, "").map(|_| Body::new(body))
}

#[tokio::test(start_paused = true)]
async fn the_hint_of_an_error_counts_though_its_body_does_not_come_to_its_end() {
    // The attempt's time is over first.
    let hangs = waits_after(|| hanging(429, &[("retry-after", "20")])).await;
    let ten = Duration::from_secs(10);
    assert_hinted((hangs.0 - ten, hangs.1 - ten), 20.0);
    let breaks = waits_after(|| {
        let broken = futures_util::stream::iter([Err::<bytes::Bytes, _>(io::Error::other("cut"))]);
        told(503, &[("retry-after", "20")], "").map(|_| Body::from_stream(broken))
    });
    assert_hinted(breaks.await, 20.0);
    // Nor does it matter that a body is not read.
    let stream = [("retry-after", "20"), ("content-type", "text/event-stream")];
    let unread = hanging(503, &stream);
    let attempts = Attempts::default();
    let unread = Mutex::new(Some(unread));
    let unread = Arc::new(unread);
    let client = answering(&attempts, 1, move || unread.lock().unwrap().take().unwrap());
    RetryLayer::new()
        .layer(client)
        .oneshot(charge())
        .await
        .unwrap();
    assert!(attempts.waits()[0] >= Duration::from_secs(20));
}

/// Ready from some instant on.
#[derive(Clone)]
struct Late<S> {
    inner: S,
    from: Instant,
}

impl<S: Service<Request<Body>>> Service<Request<Body>> for Late<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        if Instant::now() >= self.from {
            return self.inner.poll_ready(cx);
        }
        let (waker, from) = (cx.waker().clone(), self.from);
        tokio::spawn(async move {
            tokio::time::sleep_until(from).await;
            waker.wake();
        });
        Poll::Pending
    }

    fn call(&mut self, request: Request<Body>) -> S::Future {
        self.inner.call(request)
    }
}

#[tokio::test(start_paused = true)]
async fn dates_are_made_once_the_client_is_ready_and_the_attempts_time_goes_on() {
    let (signed, attempts) = (Attempts::default(), Attempts::default());
    let hook = signed.clone();
    let layer = RetryLayer::new().retries(0).before_attempt(move |_, _, _| {
        hook.note();
        Ok(())
    });
    let from = Instant::now() + Duration::from_secs(6);
    let late = Late {
        inner: silent(&attempts),
        from,
    };
    let begun = Instant::now();
    // Called as one must not, so that the wait is the attempt's.
    let unanswered = layer.layer(late).call(charge()).await.unwrap_err();
    assert!(gave_up(unanswered).is_timeout());
    assert_eq!(begun.elapsed(), Duration::from_secs(10));
    assert_eq!(signed.instants(), attempts.instants());
    assert!(signed.instants()[0] >= from);
}

#[tokio::test(start_paused = true)]
async fn a_client_that_is_never_ready_has_the_whole_time_and_no_more() {
    let attempts = Attempts::default();
    let never = Late {
        inner: silent(&attempts),
        from: Instant::now() + Duration::from_secs(1_000_000),
    };
    let begun = Instant::now();
    let layer = RetryLayer::new().retries(1_000);
    let unanswered = layer.layer(never).call(charge()).await.unwrap_err();
    assert!(
        matches!(unanswered, Unanswered::NotSent(_)),
        "{unanswered:?}"
    );
    assert!(begun.elapsed() <= Duration::from_secs(90) + TICK);
    assert!(attempts.instants().is_empty());
}

#[tokio::test(start_paused = true)]
async fn the_time_of_a_layer_inside_is_an_error_like_others() {
    let attempts = Attempts::default();
    let client = tower::ServiceBuilder::new()
        .layer(RetryLayer::new().retries(1))
        .timeout(Duration::from_secs(1))
        .service(silent(&attempts));
    let ended = gave_up(client.oneshot(charge()).await.unwrap_err());
    assert!(!ended.is_timeout());
    assert!(
        ended
            .source()
            .unwrap()
            .is::<tower::timeout::error::Elapsed>()
    );
}

//! An operation that does what the test says, run by run.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::{
    sync::{mpsc, oneshot},
    task::JoinHandle,
    time::timeout,
};
use tower_idempotency::{
    Done, Failure, Fingerprint, Idempotency, IdempotencyKey, IdempotencyLayer, Once, OnceError,
    Record, RecordId, Rejection, Scope, State, store::Inspect,
};

use crate::support::TestStore;

pub const LEASE: Duration = Duration::from_secs(30);

pub const PAST_LEASE: Duration = Duration::from_secs(31);

/// What an operation fails with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Broken(pub &'static str);

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

impl std::error::Error for Broken {}

pub type Ended = Result<Done<String>, OnceError<Broken>>;

pub type Returned = Result<String, Failure<Broken>>;

type Running = Pin<Box<dyn Future<Output = Returned> + Send>>;

/// Where the runs arrive.
pub struct Stage {
    sender: mpsc::UnboundedSender<Run>,
    runs: mpsc::UnboundedReceiver<Run>,
    begun: Arc<AtomicUsize>,
}

/// One run, waiting to be told how to end. Dropping it leaves the operation waiting for ever.
pub struct Run {
    pub handle: Idempotency,
    end: oneshot::Sender<Ending>,
}

enum Ending {
    Returns(Returned),
    Panics(&'static str),
}

impl Stage {
    pub fn new() -> Self {
        let (sender, runs) = mpsc::unbounded_channel();
        let begun = Arc::default();
        Self {
            sender,
            runs,
            begun,
        }
    }

    pub fn operation(&self) -> impl FnOnce(Idempotency) -> Running + Send + use<> {
        let (sender, begun) = (self.sender.clone(), self.begun.clone());
        move |handle| {
            begun.fetch_add(1, Ordering::SeqCst);
            let (end, told) = oneshot::channel();
            // The test may be over already.
            let _ = sender.send(Run { handle, end });
            Box::pin(async move {
                match told.await {
                    Ok(Ending::Returns(returned)) => returned,
                    Ok(Ending::Panics(message)) => panic!("{message}"),
                    Err(_) => std::future::pending().await,
                }
            })
        }
    }

    /// The next run that has begun.
    pub async fn next(&mut self) -> Run {
        let next = timeout(Duration::from_secs(10), self.runs.recv()).await;
        next.expect("no run has begun").unwrap()
    }

    /// `h`: how many runs have begun.
    pub fn begun(&self) -> usize {
        self.begun.load(Ordering::SeqCst)
    }

    /// Runs it to this end; answers what its caller gets.
    pub async fn runs(&mut self, once: &Once<TestStore>, key: &str, returned: Returned) -> Ended {
        let called = self.called(once, key);
        self.next().await.returns(returned);
        joined(called).await
    }

    /// Asks for it from a task of its own.
    pub fn called(&self, once: &Once<TestStore>, key: &str) -> JoinHandle<Ended> {
        self.called_for(once, key, "A")
    }

    /// The same, to do this.
    pub fn called_for(&self, once: &Once<TestStore>, key: &str, what: &str) -> JoinHandle<Ended> {
        let (once, operation) = (once.clone(), self.operation());
        let (key, what) = (IdempotencyKey::new(key), Fingerprint::of([what]));
        tokio::spawn(async move { once.run_with(scope(), key, what, operation).await })
    }

    /// Asks for what does not run this time.
    pub async fn asked(&self, once: &Once<TestStore>, key: &str) -> Ended {
        let begun = self.begun();
        let ended = joined(self.called(once, key)).await;
        assert_eq!(self.begun(), begun, "it has run");
        ended
    }
}

impl Run {
    pub fn returns(self, returned: Returned) {
        let told = self.end.send(Ending::Returns(returned));
        assert!(told.is_ok(), "the run has ended already");
    }

    pub fn answers(self, value: &str) {
        self.returns(Ok(value.to_owned()));
    }

    pub fn panics(self, message: &'static str) {
        let told = self.end.send(Ending::Panics(message));
        assert!(told.is_ok(), "the run has ended already");
    }
}

/// What waits in vain fails, instead of hanging.
pub async fn joined<T>(called: JoinHandle<T>) -> T {
    let ended = timeout(Duration::from_secs(30), called).await;
    ended.expect("no end in half a minute").unwrap()
}

pub fn scope() -> Scope {
    Scope::new("jobs")
}

pub fn layer(store: &TestStore) -> IdempotencyLayer<TestStore> {
    IdempotencyLayer::new(store.clone()).lease(LEASE)
}

pub fn once(store: &TestStore) -> Once<TestStore> {
    Once::new(layer(store))
}

pub async fn record(store: &TestStore, key: &str) -> Option<Record> {
    let id = RecordId::new(scope(), IdempotencyKey::new(key));
    store.inner().get(&id).await.unwrap()
}

pub async fn state(store: &TestStore, key: &str) -> Option<State> {
    record(store, key).await.map(|record| record.state)
}

/// Asks for at most ten seconds, until it is this.
pub async fn comes_to(store: &TestStore, key: &str, expected: Option<State>) {
    for _ in 0..5_000 {
        if state(store, key).await == expected {
            return;
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    panic!("{:?}, not {expected:?}", state(store, key).await);
}

/// Prices, rates and any number between them, the same in each run of the test.
pub fn floats(many: usize) -> Vec<f64> {
    let mut bits = 0x9E37_79B9_7F4A_7C15_u64;
    let next = |_| {
        bits ^= bits << 13;
        bits ^= bits >> 7;
        bits ^= bits << 17;
        (bits >> 11) as f64 / (1_u64 << 53) as f64 * 1_000.0
    };
    (0..many).map(next).collect()
}

/// The result, and whether it was there already.
#[track_caller]
pub fn value(ended: Ended) -> (String, bool) {
    let done = ended.unwrap();
    (done.value, done.replayed)
}

pub fn first(value: &str) -> (String, bool) {
    (value.to_owned(), false)
}

pub fn replay(value: &str) -> (String, bool) {
    (value.to_owned(), true)
}

/// The code of a refusal.
#[track_caller]
pub fn refusal<T>(ended: Result<Done<T>, OnceError<Broken>>) -> &'static str {
    rejection(ended).code()
}

#[track_caller]
pub fn rejection<T>(ended: Result<Done<T>, OnceError<Broken>>) -> Rejection {
    match ended {
        Err(OnceError::Refused(rejection)) => rejection,
        other => panic!("not refused: {other:?}"),
    }
}

pub const IN_FLIGHT: &str = "idempotency_in_flight";
pub const REUSED: &str = "idempotency_key_reused";
pub const UNKNOWN: &str = "idempotency_outcome_unknown";
pub const OVERLOADED: &str = "idempotency_overloaded";
pub const UNAVAILABLE: &str = "idempotency_store_unavailable";
pub const NOT_RETAINED: &str = "idempotency_response_not_retained";

//! A handler that does what the test says, run by run.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    http::{Request, Response},
    routing::any,
};
use http_body_util::BodyExt;
use tokio::{
    sync::{mpsc, oneshot},
    time::timeout,
};
use tower_idempotency::Idempotency;

/// Where the runs of a puppet handler arrive.
pub struct Puppet {
    runs: mpsc::UnboundedReceiver<Run>,
    begun: Arc<AtomicUsize>,
}

/// One run, waiting to be told how to end. Dropping it leaves the handler waiting for ever.
pub struct Run {
    pub idempotency: Option<Idempotency>,
    pub body: String,
    end: oneshot::Sender<Ending>,
}

enum Ending {
    Answer(Response<Body>),
    Panic(&'static str),
}

impl Puppet {
    /// The handler on every path and method, behind nothing, and the other end of its strings.
    pub fn new() -> (Router, Self) {
        let (sender, runs) = mpsc::unbounded_channel();
        let begun = Arc::new(AtomicUsize::new(0));
        let count = begun.clone();
        let handler = move |idempotency: Option<Idempotency>, request: Request<Body>| {
            let (sender, count) = (sender.clone(), count.clone());
            async move {
                let body = request.into_body().collect().await.unwrap().to_bytes();
                let body = String::from_utf8(body.to_vec()).unwrap();
                count.fetch_add(1, Ordering::SeqCst);
                let (end, told) = oneshot::channel();
                let run = Run {
                    idempotency,
                    body,
                    end,
                };
                // The test may be over already.
                let _ = sender.send(run);
                match told.await {
                    Ok(Ending::Answer(response)) => response,
                    Ok(Ending::Panic(message)) => panic!("{message}"),
                    Err(_) => std::future::pending().await,
                }
            }
        };
        let router = Router::new()
            .route("/", any(handler.clone()))
            .route("/{*path}", any(handler));
        (router, Self { runs, begun })
    }

    /// The next run that has begun.
    pub async fn next(&mut self) -> Run {
        let next = timeout(Duration::from_secs(10), self.runs.recv()).await;
        next.expect("no run has begun")
            .expect("the handler is gone")
    }

    /// `h`: how many runs have begun.
    pub fn begun(&self) -> usize {
        self.begun.load(Ordering::SeqCst)
    }
}

impl Run {
    pub fn answers(self, status: u16, body: &'static str) {
        let response = Response::builder().status(status).body(Body::from(body));
        self.answers_with(response.unwrap());
    }

    pub fn answers_with(self, response: Response<Body>) {
        assert!(
            self.end.send(Ending::Answer(response)).is_ok(),
            "the run has ended already"
        );
    }

    pub fn panics(self, message: &'static str) {
        assert!(
            self.end.send(Ending::Panic(message)).is_ok(),
            "the run has ended already"
        );
    }

    /// Whether the handler was dropped before it was told to end.
    pub fn is_dropped(&self) -> bool {
        self.end.is_closed()
    }

    /// Waits until the handler is dropped.
    pub async fn dropped(&mut self) {
        let dropped = timeout(Duration::from_secs(10), self.end.closed()).await;
        dropped.expect("the handler goes on");
    }

    #[track_caller]
    pub fn owner(&self) -> &Idempotency {
        self.idempotency.as_ref().expect("the run has no claim")
    }
}

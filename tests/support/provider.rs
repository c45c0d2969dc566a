//! A resolver that finds out what the test says, question by question.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::{
    sync::{mpsc, oneshot},
    time::timeout,
};
use tower_idempotency::{Abandoned, Resolver, Verdict};

/// Where the questions arrive.
pub struct Provider {
    questions: mpsc::UnboundedReceiver<Question>,
    asked: Arc<AtomicUsize>,
}

/// One question, waiting to be answered. Dropping it leaves the resolver waiting for ever.
pub struct Question {
    pub abandoned: Abandoned,
    verdict: oneshot::Sender<Verdict>,
}

impl Provider {
    /// The resolver, and the other end of its line.
    pub fn new() -> (impl Resolver + Clone, Self) {
        let (sender, questions) = mpsc::unbounded_channel();
        let asked = Arc::new(AtomicUsize::new(0));
        let count = asked.clone();
        let resolver = move |abandoned: Abandoned| {
            count.fetch_add(1, Ordering::SeqCst);
            let (verdict, told) = oneshot::channel();
            // The test may be over already.
            let _ = sender.send(Question { abandoned, verdict });
            async move {
                match told.await {
                    Ok(verdict) => verdict,
                    Err(_) => std::future::pending().await,
                }
            }
        };
        (resolver, Self { questions, asked })
    }

    /// The next question.
    pub async fn next(&mut self) -> Question {
        let next = timeout(Duration::from_secs(10), self.questions.recv()).await;
        next.expect("nobody asks").expect("the resolver is gone")
    }

    /// How often it was asked.
    pub fn asked(&self) -> usize {
        self.asked.load(Ordering::SeqCst)
    }
}

impl Question {
    pub fn answer(self, verdict: Verdict) {
        assert!(
            self.verdict.send(verdict).is_ok(),
            "nobody waits for the verdict any more"
        );
    }

    /// The same where it does not matter whether anybody still waits.
    pub fn answer_too_late(self, verdict: Verdict) {
        let _ = self.verdict.send(verdict);
    }

    /// Waits until the resolver is dropped.
    pub async fn dropped(&mut self) {
        let dropped = timeout(Duration::from_secs(10), self.verdict.closed()).await;
        dropped.expect("the resolver goes on");
    }
}

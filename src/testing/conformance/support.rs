//! What the numbers share: a store that answers or panics, requests, and simultaneous tasks.

use std::{
    future::{Future, poll_fn},
    pin::pin,
    sync::Arc,
    task::Poll,
    time::{Duration, Instant},
};

use bytes::Bytes;
use http::StatusCode;
use tokio::{sync::Barrier, task::yield_now};

use super::Harness;
use crate::{
    Fingerprint, IdempotencyKey, Record, RecordId, Scope, State, Token,
    store::{
        Checkpoint, Checkpoints, Claim, ClaimRequest, Completion, Counts, Held, Inspect, Lifetimes,
        Settled, StoreError, Ticket,
    },
};

/// How many tasks "simultaneous" means.
pub(super) const CROWD: usize = 64;

/// Panics unless the condition holds, naming the contract number and what the store answered.
macro_rules! ensure {
    ($number:expr, $holds:expr, $answer:expr, $($sentence:tt)+) => {
        if !$holds {
            panic!(
                "contract {}: {}; the store answered {:?}",
                $number, format_args!($($sentence)+), $answer,
            );
        }
    };
}

/// The same for an equality.
macro_rules! ensure_eq {
    ($number:expr, $answer:expr, $expected:expr, $($sentence:tt)+) => {
        let (answer, expected) = (&$answer, &$expected);
        if answer != expected {
            panic!(
                "contract {}: {}; the store answered {:?} instead of {:?}",
                $number, format_args!($($sentence)+), answer, expected,
            );
        }
    };
}

pub(super) use {ensure, ensure_eq};

/// A store under one number of the contract: what it answers is unwrapped or the number fails.
#[derive(Clone)]
pub(super) struct Tried<S> {
    pub(super) store: S,
    number: u32,
}

/// Opens a store for this number.
pub(super) async fn open<H: Harness>(harness: &H, number: u32) -> Tried<H::Store> {
    Tried::new(harness.open().await, number)
}

impl<S: Inspect + Checkpoints> Tried<S> {
    pub(super) fn new(store: S, number: u32) -> Self {
        Self { store, number }
    }

    #[track_caller]
    fn answered<T>(&self, operation: &str, answer: Result<T, StoreError>) -> T {
        match answer {
            Ok(answer) => answer,
            Err(error) => panic!(
                "contract {}: `{operation}` must succeed here; the store answered {error:?}",
                self.number
            ),
        }
    }

    pub(super) async fn claim(&self, request: &ClaimRequest) -> Claim {
        self.answered("claim", self.store.claim(request.clone()).await)
    }

    /// Claims and must win, with a ticket that fits the request.
    pub(super) async fn win(&self, request: &ClaimRequest) -> Ticket {
        let ticket = match self.claim(request).await {
            Claim::Won(ticket) => ticket,
            other => panic!(
                "contract {}: this claim must be won; the store answered {other:?}",
                self.number
            ),
        };
        let fits = ticket.id == request.id && ticket.token == request.token;
        ensure!(
            self.number,
            fits,
            ticket,
            "the ticket must carry the id and the token of the claim"
        );
        ticket
    }

    /// Claims and must win as this attempt.
    pub(super) async fn win_as(&self, attempt: u32, request: &ClaimRequest) -> Ticket {
        let ticket = self.win(request).await;
        ensure_eq!(
            self.number,
            ticket.attempt,
            attempt,
            "the claim must be won with this attempt"
        );
        ticket
    }

    pub(super) async fn in_flight(&self, request: &ClaimRequest) -> Held {
        match self.claim(request).await {
            Claim::InFlight(held) => held,
            other => panic!(
                "contract {}: this claim must find the record in flight; the store answered {other:?}",
                self.number
            ),
        }
    }

    pub(super) async fn find_abandoned(&self, request: &ClaimRequest) -> Held {
        match self.claim(request).await {
            Claim::Abandoned(held) => held,
            other => panic!(
                "contract {}: this claim must find the record abandoned; the store answered {other:?}",
                self.number
            ),
        }
    }

    pub(super) async fn find_completed(&self, request: &ClaimRequest) -> Record {
        match self.claim(request).await {
            Claim::Completed(record) => *record,
            other => panic!(
                "contract {}: this claim must find the record completed; the store answered {other:?}",
                self.number
            ),
        }
    }

    pub(super) async fn complete(
        &self,
        ticket: &Ticket,
        done: Completion,
        lifetimes: Lifetimes,
    ) -> Settled {
        self.answered(
            "complete",
            self.store.complete(ticket, done, lifetimes).await,
        )
    }

    /// Completes with a response that tells its ticket, and must be `Done`.
    pub(super) async fn finish(&self, ticket: &Ticket, ttl: Duration) {
        let settled = self
            .complete(ticket, outcome(ticket), Lifetimes::new(ttl))
            .await;
        self.done("complete", settled);
    }

    pub(super) async fn release(&self, ticket: &Ticket, ttl: Duration) -> Settled {
        self.answered("release", self.store.release(ticket, ttl).await)
    }

    pub(super) async fn abandon(&self, ticket: &Ticket) -> Settled {
        self.answered("abandon", self.store.abandon(ticket).await)
    }

    /// Marks it abandoned, and must be `Done`.
    pub(super) async fn give_up(&self, ticket: &Ticket) {
        let settled = self.abandon(ticket).await;
        self.done("abandon", settled);
    }

    pub(super) async fn renew(&self, tickets: &[Ticket], lease: Duration) -> Vec<Settled> {
        self.answered("renew", self.store.renew(tickets, lease).await)
    }

    pub(super) async fn purge(&self, limit: usize) -> usize {
        self.answered("purge", self.store.purge(limit).await)
    }

    pub(super) async fn close(&self) {
        self.answered("close", self.store.close().await);
    }

    pub(super) async fn get(&self, id: &RecordId) -> Option<Record> {
        self.answered("get", self.store.get(id).await)
    }

    /// The record, which must be there.
    pub(super) async fn found(&self, id: &RecordId) -> Record {
        match self.get(id).await {
            Some(record) => record,
            None => panic!(
                "contract {}: `get` must find the record; the store answered None",
                self.number
            ),
        }
    }

    pub(super) async fn forget(&self, id: &RecordId) -> bool {
        self.answered("forget", self.store.forget(id).await)
    }

    pub(super) async fn counts(&self) -> Counts {
        self.answered("counts", self.store.counts().await)
    }

    pub(super) async fn count_in(&self, scope: &Scope, at_most: u64) -> u64 {
        self.answered("count_in", self.store.count_in(scope, at_most).await)
    }

    pub(super) async fn abandoned(&self, after: Option<&Record>, limit: usize) -> Vec<Record> {
        self.answered("abandoned", self.store.abandoned(after, limit).await)
    }

    pub(super) async fn take_over(
        &self,
        id: &RecordId,
        abandoned: Token,
        token: Token,
        hold: Duration,
    ) -> Option<Ticket> {
        let taken = self.store.take_over(id, abandoned, token, hold).await;
        self.answered("take_over", taken)
    }

    /// Takes over under a fresh token, and must succeed as this attempt.
    pub(super) async fn hold(
        &self,
        attempt: u32,
        id: &RecordId,
        abandoned: Token,
        hold: Duration,
    ) -> Ticket {
        let token = Token::random();
        let taken = self.take_over(id, abandoned, token, hold).await;
        let expected = Ticket {
            id: id.clone(),
            token,
            attempt,
        };
        ensure_eq!(
            self.number,
            taken,
            Some(expected.clone()),
            "an abandoned record must be taken over by its token, as the attempt it was"
        );
        expected
    }

    pub(super) async fn save(&self, ticket: &Ticket, name: &str, value: &[u8]) -> Settled {
        let value = Bytes::copy_from_slice(value);
        self.answered("save", self.store.save(ticket, name, value).await)
    }

    /// Saves, and must be `Done`.
    pub(super) async fn keep(&self, ticket: &Ticket, name: &str, value: &[u8]) {
        let settled = self.save(ticket, name, value).await;
        self.done("save", settled);
    }

    pub(super) async fn load(&self, ticket: &Ticket) -> Option<Vec<Checkpoint>> {
        self.answered("load", self.store.load(ticket).await)
    }

    #[track_caller]
    pub(super) fn done(&self, operation: &str, settled: Settled) {
        ensure_eq!(
            self.number,
            settled,
            Settled::Done,
            "`{operation}` with its token must be acknowledged"
        );
    }

    #[track_caller]
    pub(super) fn lost(&self, operation: &str, settled: Settled) {
        ensure_eq!(
            self.number,
            settled,
            Settled::Lost,
            "`{operation}` must be lost here"
        );
    }

    /// Everything that settles must be lost to this ticket, and change nothing.
    pub(super) async fn fenced(&self, ticket: &Ticket) {
        let before = self.get(&ticket.id).await;
        let long = Duration::from_secs(3600);
        let completion = Completion::retained(StatusCode::OK, Bytes::from_static(b"late"));
        self.lost(
            "complete",
            self.complete(ticket, completion, Lifetimes::new(long))
                .await,
        );
        self.lost("release", self.release(ticket, long).await);
        self.lost("abandon", self.abandon(ticket).await);
        self.lost("save", self.save(ticket, "late", b"late").await);
        ensure_eq!(
            self.number,
            self.get(&ticket.id).await,
            before,
            "operations of a lost ticket must change nothing"
        );
    }

    /// The record must be in this state.
    pub(super) async fn is(&self, id: &RecordId, state: State) -> Record {
        let record = self.found(id).await;
        ensure_eq!(
            self.number,
            record.state,
            state,
            "the record must be in this state"
        );
        record
    }
}

/// The record named by this key.
pub(super) fn id(key: impl AsRef<[u8]>) -> RecordId {
    RecordId::new(Scope::new("tenant"), IdempotencyKey::new(key))
}

/// What a claim must be told of one that was the first under its key.
pub(super) fn first_held(first: &ClaimRequest) -> Held {
    Held {
        token: first.token,
        scheme: first.scheme.clone(),
        fingerprint: first.fingerprint,
        attempt: 1,
        mode: first.mode,
        request_id: first.request_id.clone(),
        released: false,
    }
}

/// A claim on this key with a long lease; equal fingerprints for all.
pub(super) fn request(key: impl AsRef<[u8]>) -> ClaimRequest {
    ClaimRequest::new(id(key), "conformance", Fingerprint::from_bytes([1; 32]))
}

/// The same with a lease of so many ticks.
pub(super) fn leased<H: Harness>(key: impl AsRef<[u8]>, ticks: u32) -> ClaimRequest {
    ClaimRequest {
        lease: H::TICK * ticks,
        ..request(key)
    }
}

/// A claim that means to take over from this token.
pub(super) fn replacing(key: impl AsRef<[u8]>, token: Token) -> ClaimRequest {
    ClaimRequest {
        replaces: Some(token),
        ..request(key)
    }
}

/// A ticket for the same record with a token nobody ever claimed with.
pub(super) fn stranger(ticket: &Ticket) -> Ticket {
    Ticket {
        token: Token::random(),
        ..ticket.clone()
    }
}

/// An outcome that tells which ticket it belongs to.
pub(super) fn outcome(ticket: &Ticket) -> Completion {
    let response = Bytes::copy_from_slice(ticket.token.as_bytes());
    Completion::retained(StatusCode::CREATED, response)
}

/// Moves the clock by so many ticks.
pub(super) async fn ticks<H: Harness>(harness: &H, ticks: u32) {
    harness.advance(H::TICK * ticks).await;
}

/// Measures what really passed, because on a real clock a loaded machine may be late.
pub(super) struct Watch(Instant);

impl Watch {
    pub(super) fn start() -> Self {
        Self(Instant::now())
    }

    /// Whether so little has passed that nothing due after `limit` can be over.
    pub(super) fn surely_within<H: Harness>(&self, limit: Duration) -> bool {
        !H::REAL_CLOCK || self.0.elapsed() < limit
    }
}

/// Runs this many tasks that begin together, and answers what each one answered.
pub(super) async fn together<T, F, R>(tasks: usize, run: F) -> Vec<T>
where
    T: Send + 'static,
    F: Fn(usize) -> R,
    R: Future<Output = T> + Send + 'static,
{
    let barrier = Arc::new(Barrier::new(tasks));
    let running: Vec<_> = (0..tasks)
        .map(|task| {
            let (barrier, run) = (barrier.clone(), run(task));
            tokio::spawn(async move {
                barrier.wait().await;
                run.await
            })
        })
        .collect();
    let mut answers = Vec::with_capacity(tasks);
    for task in running {
        match task.await {
            Ok(answer) => answers.push(answer),
            Err(error) => match error.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                Err(error) => panic!("a task of the suite ended early: {error}"),
            },
        }
    }
    answers
}

/// Of these claims exactly one must be won; answers its ticket. All others must have found the
/// record in flight under the winner's token.
#[track_caller]
pub(super) fn one_winner(number: u32, claims: Vec<Claim>) -> Ticket {
    let mut won = Vec::new();
    let mut held = Vec::new();
    for claim in claims {
        match claim {
            Claim::Won(ticket) => won.push(ticket),
            Claim::InFlight(other) => held.push(other),
            other => panic!(
                "contract {number}: simultaneous claims are won or in flight; the store answered {other:?}"
            ),
        }
    }
    ensure_eq!(
        number,
        won.len(),
        1,
        "of simultaneous claims exactly one must be won"
    );
    let winner = won.swap_remove(0);
    for other in &held {
        ensure_eq!(
            number,
            other.token,
            winner.token,
            "those who lose must be told the winner's token"
        );
    }
    winner
}

/// Polls a future so many times, then drops it. Answers what it answered, if it did.
pub(super) async fn dropped_after<F: Future>(polls: usize, future: F) -> Option<F::Output> {
    let mut future = pin!(future);
    for _ in 0..polls {
        let ready = poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx))).await;
        if let Poll::Ready(answer) = ready {
            return Some(answer);
        }
        yield_now().await;
    }
    None
}

/// One record in each state that purging must leave alone; checkpoints under the first two.
pub(super) async fn live<H: Harness>(
    store: &Tried<H::Store>,
    other: &Tried<H::Store>,
) -> Vec<Ticket> {
    let long = Duration::from_secs(24 * 3600);
    let mut tickets = Vec::new();
    for key in ["running", "released", "abandoned", "completed", "tombstone"] {
        tickets.push(store.win(&request(key)).await);
    }
    store.keep(&tickets[0], "step", b"1").await;
    store.keep(&tickets[1], "step", b"1").await;
    store.done("release", store.release(&tickets[1], long).await);
    store.give_up(&tickets[2]).await;
    store.finish(&tickets[3], long).await;
    let done = Completion::tombstone(StatusCode::OK);
    let settled = store
        .complete(&tickets[4], done, Lifetimes::new(long))
        .await;
    store.done("complete", settled);
    tickets.push(other.win(&leased::<H>("lapsed", 1)).await);
    let over = ClaimRequest {
        max_run: H::TICK,
        ..request("over")
    };
    tickets.push(store.win(&over).await);
    tickets
}

/// Checkpoints with their values: the suite's are no secrets, and a message without them helps
/// nobody.
pub(super) fn names(saved: &Option<Vec<Checkpoint>>) -> Option<Vec<(String, Bytes)>> {
    let pair = |one: &Checkpoint| (one.name.clone(), one.value.clone());
    saved.as_ref().map(|saved| saved.iter().map(pair).collect())
}

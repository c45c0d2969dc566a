//! Random sequences of operations by two instances: every answer of an SQL store must be the
//! protocol's, which the memory store runs directly.

mod support;

use std::{
    future::Future,
    task::{Context, Poll, Waker},
    time::Duration,
};

use axum::http::StatusCode;
use bytes::Bytes;
use support::{TestStore, World};
use tower_idempotency::{
    Fingerprint, IdempotencyKey, MemoryStore, Mode, Owner, Record, RecordId, Scope, Token,
    store::{
        Checkpoint, Checkpoints, Claim, ClaimRequest, Completion, Counts, Inspect, Lifetimes,
        Settled, Store, StoreErrorKind, Ticket,
    },
};

fn request(key: &str) -> ClaimRequest {
    let id = RecordId::new(Scope::shared(), IdempotencyKey::new(key));
    ClaimRequest::new(id, "random", Fingerprint::from_bytes([0; 32]))
}

/// SplitMix64 (Steele, Lea, Flood 2014): enough to choose steps by, and the same everywhere.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        usize::try_from((z ^ (z >> 31)) % sides as u64).unwrap()
    }

    fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.roll(from.len())]
    }

    /// Few values, so that deadlines meet exactly.
    fn duration(&mut self) -> Duration {
        Duration::from_millis(*self.pick(&[1, 10, 20, 50, 100]))
    }
}

#[derive(Debug, Clone)]
struct TakeOver {
    id: RecordId,
    abandoned: Token,
    token: Token,
    hold: Duration,
}

#[derive(Debug, Clone)]
enum Step {
    Claim(ClaimRequest),
    Complete(Ticket, Completion, Lifetimes),
    Release(Ticket, Duration),
    Abandon(Ticket),
    Renew(Vec<Ticket>, Duration),
    Purge(usize),
    Get(RecordId),
    Forget(RecordId),
    TakeOver(TakeOver),
    Counts,
    Abandoned(Option<Record>, usize),
    Save(Ticket, String, Bytes),
    Load(Ticket),
}

#[derive(Debug, PartialEq)]
enum Answer {
    Claim(Claim),
    Settled(Settled),
    Renewed(Vec<Settled>),
    Purged(usize),
    Record(Option<Record>),
    Forgotten(bool),
    Held(Option<Ticket>),
    Counts(Counts),
    Records(Vec<Record>),
    Loaded(Option<Vec<Checkpoint>>),
    Refused(StoreErrorKind),
}

/// Owners are random, and their effect shows in the answers anyway.
fn unowned(mut record: Record) -> Record {
    record.owner = Owner::from_bytes([0; 16]);
    record
}

async fn carry_out(store: &(impl Inspect + Checkpoints), step: Step) -> Answer {
    let answer = match step {
        Step::Claim(request) => store.claim(request).await.map(|claim| match claim {
            Claim::Completed(record) => Answer::Claim(Claim::Completed(Box::new(unowned(*record)))),
            claim => Answer::Claim(claim),
        }),
        Step::Complete(ticket, done, lifetimes) => {
            let settled = store.complete(&ticket, done, lifetimes).await;
            settled.map(Answer::Settled)
        }
        Step::Release(ticket, ttl) => store.release(&ticket, ttl).await.map(Answer::Settled),
        Step::Abandon(ticket) => store.abandon(&ticket).await.map(Answer::Settled),
        Step::Renew(tickets, lease) => store.renew(&tickets, lease).await.map(Answer::Renewed),
        Step::Purge(limit) => store.purge(limit).await.map(Answer::Purged),
        Step::Get(id) => {
            let found = store.get(&id).await;
            found.map(|record| Answer::Record(record.map(unowned)))
        }
        Step::Forget(id) => store.forget(&id).await.map(Answer::Forgotten),
        Step::TakeOver(asked) => {
            let taken = store.take_over(&asked.id, asked.abandoned, asked.token, asked.hold);
            taken.await.map(Answer::Held)
        }
        Step::Counts => store.counts().await.map(Answer::Counts),
        Step::Abandoned(after, limit) => {
            let page = store.abandoned(after.as_ref(), limit).await;
            page.map(|page| Answer::Records(page.into_iter().map(unowned).collect()))
        }
        Step::Save(ticket, name, value) => {
            store.save(&ticket, &name, value).await.map(Answer::Settled)
        }
        Step::Load(ticket) => store.load(&ticket).await.map(Answer::Loaded),
    };
    answer.unwrap_or_else(|error| Answer::Refused(error.kind()))
}

struct Game {
    dice: Dice,
    /// Whether expired records are purged as soon as they are. The memory store removes some of
    /// them by itself, which late tickets would notice: without purges they are left out.
    tidy: bool,
    ids: Vec<RecordId>,
    tickets: Vec<Ticket>,
    seen: Vec<Record>,
    /// How many takeovers succeeded, that this test has something to agree on.
    held: usize,
    /// How many runs were given back uncounted.
    uncounted: usize,
}

impl Game {
    fn new(seed: u64) -> Self {
        let id =
            |scope: &str, key: &str| RecordId::new(Scope::new(scope), IdempotencyKey::new(key));
        Self {
            dice: Dice(seed),
            tidy: seed.is_multiple_of(2),
            ids: vec![id("a", "bc"), id("ab", "c"), id("", "\0")],
            tickets: vec![request("never claimed").ticket(1)],
            seen: Vec::new(),
            held: 0,
            uncounted: 0,
        }
    }

    fn step(&mut self) -> Step {
        let ticket = self.ticket();
        match self.dice.roll(23) {
            0..=6 => Step::Claim(self.claim()),
            7..=9 => Step::Complete(ticket, self.completion(), self.lifetimes()),
            10 | 11 => {
                let ticket = self.given_back(ticket);
                Step::Release(ticket, self.dice.duration())
            }
            12 => Step::Abandon(self.given_back(ticket)),
            13 => {
                let tickets = (0..self.dice.roll(4)).map(|_| self.ticket()).collect();
                Step::Renew(tickets, self.dice.duration())
            }
            14 => Step::Get(self.dice.pick(&self.ids).clone()),
            15 if self.dice.roll(3) == 0 => Step::Forget(self.dice.pick(&self.ids).clone()),
            15 | 16 => {
                let long = "n".repeat(65);
                let name = *self.dice.pick(&["one", "two", "", &long]);
                Step::Save(ticket, name.into(), vec![self.dice.roll(9) as u8; 3].into())
            }
            17 => Step::Load(ticket),
            18 => Step::Counts,
            19..=21 => Step::TakeOver(self.take_over()),
            _ => {
                let after = (!self.seen.is_empty()).then(|| self.dice.pick(&self.seen).clone());
                Step::Abandoned(
                    after.filter(|_| self.dice.roll(2) == 0),
                    1 + self.dice.roll(3),
                )
            }
        }
    }

    /// Mostly one of the latest.
    fn ticket(&mut self) -> Ticket {
        let latest = self.tickets.len().saturating_sub(4);
        let from = if self.dice.roll(4) == 0 { 0 } else { latest };
        self.dice.pick(&self.tickets[from..]).clone()
    }

    /// As it is, or with an attempt that the run does not count by, or none.
    fn given_back(&mut self, mut ticket: Ticket) -> Ticket {
        ticket.attempt = match self.dice.roll(5) {
            0 => 0,
            1 => 1,
            2 => ticket.attempt.saturating_sub(1),
            3 => u32::MAX,
            _ => ticket.attempt,
        };
        ticket
    }

    fn claim(&mut self) -> ClaimRequest {
        let id = self.dice.pick(&self.ids).clone();
        let number = self.dice.roll(100);
        let fingerprint = Fingerprint::from_bytes([number as u8; 32]);
        let mut claim = ClaimRequest::new(id, "random", fingerprint);
        claim.request_id = (self.dice.roll(2) == 0).then(|| format!("request {number}").into());
        claim.mode = *self.dice.pick(&[Mode::Plain, Mode::Transactional]);
        claim.lease = match self.dice.roll(4) {
            0 => Duration::ZERO,
            _ => self.dice.duration(),
        };
        claim.max_run = self.dice.duration() * 2;
        claim.abandoned_ttl = (self.dice.roll(3) == 0).then(|| self.dice.duration());
        claim.token = match self.dice.roll(6) {
            0 => self.ticket().token,
            _ => Token::random(),
        };
        let same = self
            .tickets
            .iter()
            .rev()
            .find(|ticket| ticket.id == claim.id);
        claim.replaces = match self.dice.roll(4) {
            0 => None,
            1 => Some(self.ticket().token),
            _ => same.map(|ticket| ticket.token),
        };
        claim
    }

    fn take_over(&mut self) -> TakeOver {
        let id = self.dice.pick(&self.ids).clone();
        let mut latest = self.tickets.iter().rev();
        let named = latest.find(|ticket| ticket.id == id).cloned();
        let named = match self.dice.roll(5) {
            0 => None,
            _ => named,
        };
        let abandoned = named.unwrap_or_else(|| self.ticket()).token;
        let token = match self.dice.roll(4) {
            0 => self.ticket().token,
            _ => Token::random(),
        };
        let hold = match self.dice.roll(8) {
            0 => Duration::ZERO,
            _ => self.dice.duration(),
        };
        TakeOver {
            id,
            abandoned,
            token,
            hold,
        }
    }

    fn completion(&mut self) -> Completion {
        match self.dice.roll(3) {
            0 => Completion::tombstone(StatusCode::NO_CONTENT),
            n => Completion::retained(StatusCode::OK, vec![n as u8; 20].into()),
        }
    }

    fn lifetimes(&mut self) -> Lifetimes {
        let lifetimes = Lifetimes::new(self.dice.duration() * 2);
        match self.dice.roll(2) {
            0 => lifetimes,
            _ => lifetimes.response_ttl(self.dice.duration()),
        }
    }

    /// Whether both stores must agree on this step.
    async fn is_fair(&self, step: &Step, memory: &MemoryStore) -> bool {
        let tickets = match step {
            Step::Complete(ticket, ..)
            | Step::Release(ticket, _)
            | Step::Abandon(ticket)
            | Step::Save(ticket, ..)
            | Step::Load(ticket) => std::slice::from_ref(ticket),
            Step::Renew(tickets, _) => tickets,
            _ => &[],
        };
        for ticket in tickets {
            if !self.tidy && memory.get(&ticket.id).await.unwrap().is_none() {
                return false;
            }
        }
        true
    }

    fn learn(&mut self, answer: &Answer) {
        match answer {
            Answer::Claim(Claim::Won(ticket)) => self.tickets.push(ticket.clone()),
            Answer::Held(Some(ticket)) => {
                self.held += 1;
                self.tickets.push(ticket.clone());
            }
            Answer::Records(records) => self.seen.extend(records.iter().cloned()),
            _ => {}
        }
    }

    async fn learn_what_was_given_back(&mut self, step: &Step, memory: &MemoryStore) {
        let (Step::Release(given, _) | Step::Abandon(given)) = step else {
            return;
        };
        if let Some(record) = memory.get(&given.id).await.unwrap() {
            let mut won = self.tickets.iter();
            let lower = won.any(|won| won.token == record.token && won.attempt > record.attempt);
            self.uncounted += usize::from(lower && given.token == record.token);
        }
    }
}

/// Queues all steps before it waits for the first answer, so that they share transactions.
async fn carry_out_together(store: &TestStore, steps: Vec<Step>) -> Vec<Answer> {
    let mut running = Vec::new();
    for step in steps {
        let mut answer = Box::pin(carry_out(store, step));
        let polled = answer
            .as_mut()
            .poll(&mut Context::from_waker(Waker::noop()));
        running.push((polled, answer));
    }
    let mut done = Vec::new();
    for (polled, answer) in running {
        done.push(match polled {
            Poll::Ready(answer) => answer,
            Poll::Pending => answer.await,
        });
    }
    done
}

/// Which steps are sent together, one after the other has to decide them.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Together {
    /// Whatever they are: one writer carries them out in their order.
    All,
    /// Claims on one key. Others share a statement too, but which of them was decided first is
    /// nobody's business.
    ClaimsOnOneKey,
}

impl Together {
    fn may_join(self, steps: &[Step], next: &Step) -> bool {
        let Some(first) = steps.first() else {
            return true;
        };
        match (self, first, next) {
            (_, _, Step::Counts | Step::Abandoned(..)) => false,
            (_, Step::Counts | Step::Abandoned(..), _) => false,
            (Self::All, ..) => true,
            (Self::ClaimsOnOneKey, Step::Claim(first), Step::Claim(next)) => first.id == next.id,
            (Self::ClaimsOnOneKey, ..) => false,
        }
    }
}

/// Steps that were carried out in memory, to be carried out by the other store together.
struct Group<'a> {
    seed: u64,
    store: &'a TestStore,
    together: Together,
    steps: Vec<Step>,
    expected: Vec<Answer>,
}

impl Group<'_> {
    async fn check(&mut self) {
        let seed = self.seed;
        let answers = carry_out_together(self.store, self.steps.clone()).await;
        let steps = self.steps.drain(..).zip(answers);
        let mut leases = Vec::new();
        for ((step, answer), expected) in steps.zip(self.expected.drain(..)) {
            assert_eq!(answer, expected, "seed {seed}: {step:?}");
            match (step, answer) {
                (Step::Claim(claim), Answer::Claim(Claim::Won(_))) => leases.push(claim.lease),
                (Step::TakeOver(asked), Answer::Held(Some(_))) => leases.push(asked.hold),
                _ => {}
            }
        }
        if self.together == Together::ClaimsOnOneKey {
            // A claim is believed alive for its lease. Whether the older claims of its instance are so
            // too, as they are after a renewal, is left to the store.
            for lease in leases {
                self.store.renew(&[], lease).await.unwrap();
            }
        }
    }
}

async fn play(
    seed: u64,
    world: &World,
    memory: &[MemoryStore; 2],
    stores: &[TestStore; 2],
    together: Together,
) -> (usize, usize) {
    let mut game = Game::new(seed);
    for _ in 0..14 {
        let by = game.dice.duration() - Duration::from_millis(1);
        world.clock.advance(by);
        let at = game.dice.roll(2);
        let (memory, store) = (&memory[at], &stores[at]);
        if game.tidy {
            let purge = Step::Purge(usize::MAX);
            let expected = carry_out(memory, purge.clone()).await;
            assert_eq!(carry_out(store, purge).await, expected, "seed {seed}");
        }
        let mut group = Group {
            seed,
            store,
            together,
            steps: Vec::new(),
            expected: Vec::new(),
        };
        for _ in 0..=game.dice.roll(8) {
            let step = game.step();
            if !game.is_fair(&step, memory).await {
                continue;
            }
            if !together.may_join(&group.steps, &step) {
                group.check().await;
            }
            let answer = carry_out(memory, step.clone()).await;
            game.learn(&answer);
            game.learn_what_was_given_back(&step, memory).await;
            group.steps.push(step);
            group.expected.push(answer);
        }
        group.check().await;
    }
    for id in &game.ids {
        memory[0].forget(id).await.unwrap();
        stores[0].forget(id).await.unwrap();
    }
    (game.held, game.uncounted)
}

async fn every_answer_is_the_protocols(world: impl Fn() -> World, together: Together) {
    let (mut held, mut uncounted) = (0, 0);
    for start in 0..8 {
        let world = world();
        let memory = MemoryStore::options().clock(world.clock.clone()).build();
        let memory = [memory.clone(), memory.instance()];
        let stores = [world.open().await, world.open().await];
        for seed in start * 32..(start + 1) * 32 {
            let played = play(seed, &world, &memory, &stores, together).await;
            held += played.0;
            uncounted += played.1;
        }
    }
    assert!(held > 100, "only {held} takeovers succeeded");
    assert!(uncounted > 20, "only {uncounted} runs were uncounted");
}

#[tokio::test]
async fn every_answer_of_sqlite_is_the_protocols() {
    every_answer_is_the_protocols(World::sqlite, Together::All).await;
}

#[cfg(feature = "postgres")]
#[tokio::test(flavor = "multi_thread")]
async fn every_answer_of_postgres_is_the_protocols() {
    every_answer_is_the_protocols(World::postgres, Together::ClaimsOnOneKey).await;
}

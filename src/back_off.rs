//! Which records a resolver was asked about already, so that it is not asked too often.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

use crate::{
    bounded::FOREVER,
    maintenance::jittered,
    record::{Fingerprint, RecordId, Token},
    recovery::Resolves,
};

/// How many records are remembered. Those beyond it are asked about in every sweep.
const MAX_KNOWN: usize = 10_000;

/// How often the requests of one process ask about one record at most.
const REQUESTS_ASK: Duration = Duration::from_secs(1);

/// How often it is looked for what need not be remembered any more, once there is no room.
const TIDY: Duration = Duration::from_secs(1);

/// A growing pause: `first`, doubled with every time, up to `longest`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pauses {
    pub(crate) first: Duration,
    pub(crate) longest: Duration,
}

impl Pauses {
    fn after(self, times: u32) -> Duration {
        let doubled = 2_u32.saturating_pow(times.saturating_sub(1));
        let pause = self.first.saturating_mul(doubled).min(self.longest);
        jittered(pause.min(FOREVER))
    }
}

/// The records of a process that were left as they are.
#[derive(Default)]
pub(crate) struct BackOff(Mutex<Known>);

/// What is asked about, and who is asked: what one resolver leaves, another one may know.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Topic {
    /// A digest of scope and key, which are not to be kept where they are not needed.
    record: Fingerprint,
    /// Where the resolver is in memory; zero, where nobody need be asked.
    resolver: usize,
}

impl Topic {
    /// `stored` is what the store calls the record.
    pub(crate) fn new(stored: &RecordId, resolver: Option<&Arc<dyn Resolves>>) -> Self {
        Self {
            record: Fingerprint::of([stored.scope.as_bytes(), stored.key.as_bytes()]),
            resolver: resolver.map_or(0, |resolver| Arc::as_ptr(resolver).addr()),
        }
    }
}

/// Why a record was left as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Why {
    /// Nobody knows yet.
    Unknown,
    /// Nobody could be asked, since what its runs saved cannot be read.
    Unreadable,
}

#[derive(Default)]
struct Known {
    left: HashMap<Topic, Left>,
    tidied: Option<Instant>,
}

#[derive(Clone, Copy)]
struct Left {
    /// Another run is another question, and has another token. The one it was found with, and that of whoever
    /// held it to ask.
    tokens: [Token; 2],
    why: Why,
    asked: Instant,
    /// How many sweeps have left it.
    times: u32,
    /// When a sweep asks again.
    due: Instant,
    /// When all this may be forgotten.
    over: Instant,
}

impl BackOff {
    /// Why a request may not have the resolver asked about this run just now, if so.
    pub(crate) fn holds_request_off(&self, topic: &Topic, token: Token) -> Option<Why> {
        let left = self.find(topic, token)?;
        (Instant::now() < left.asked + REQUESTS_ASK).then_some(left.why)
    }

    /// Whether a sweep may.
    pub(crate) fn is_due(&self, topic: &Topic, token: Token) -> bool {
        self.find(topic, token)
            .is_none_or(|left| Instant::now() >= left.due)
    }

    /// A request has it left as it is: sweeps need not wait for that.
    pub(crate) fn left_by_request(&self, topic: Topic, tokens: [Token; 2], why: Why) {
        let now = Instant::now();
        let asked = Left {
            tokens,
            why,
            asked: now,
            times: 0,
            due: now,
            over: now + REQUESTS_ASK,
        };
        let asked = match self.find(&topic, tokens[0]) {
            Some(left) => Left {
                tokens,
                asked: now,
                why,
                ..left
            },
            None => asked,
        };
        self.known().keep(topic, asked, now);
    }

    /// A sweep has left it as it is, so the next ones wait, each time longer.
    pub(crate) fn left_by_sweep(&self, topic: Topic, tokens: [Token; 2], why: Why, pauses: Pauses) {
        let now = Instant::now();
        let before = self.find(&topic, tokens[0]).map_or(0, |left| left.times);
        let times = before.saturating_add(1);
        let pause = pauses.after(times);
        let left = Left {
            tokens,
            why,
            asked: now,
            times,
            due: now + pause,
            // Long enough that the next sweep knows how often it was.
            over: now + pause + pauses.longest.min(FOREVER),
        };
        self.known().keep(topic, left, now);
    }

    /// It is settled.
    pub(crate) fn settled(&self, topic: &Topic) {
        self.known().left.remove(topic);
    }

    fn find(&self, topic: &Topic, token: Token) -> Option<Left> {
        let left = self.known().left.get(topic).copied()?;
        left.tokens.contains(&token).then_some(left)
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        // No change is ever left half done.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Known {
    fn keep(&mut self, topic: Topic, left: Left, now: Instant) {
        let is_full = self.left.len() >= MAX_KNOWN;
        if is_full && self.tidied.is_none_or(|tidied| now >= tidied + TIDY) {
            self.left.retain(|_, left| left.over > now);
            self.tidied = Some(now);
        }
        if self.left.len() < MAX_KNOWN || self.left.contains_key(&topic) {
            self.left.insert(topic, left);
        }
    }
}

#[cfg(test)]
#[path = "back_off_tests.rs"]
mod tests;

//! Which records a resolver was asked about already, so that it is not asked too often.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

use crate::{
    bounded::FOREVER,
    maintenance::jittered,
    record::{Fingerprint, RecordId},
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

#[derive(Default)]
struct Known {
    /// By a digest of scope and key, which are not to be kept where they are not needed.
    left: HashMap<Fingerprint, Left>,
    tidied: Option<Instant>,
}

#[derive(Clone, Copy)]
struct Left {
    /// Another run is another question.
    attempt: u32,
    asked: Instant,
    /// How many sweeps have left it.
    times: u32,
    /// When a sweep asks again.
    due: Instant,
    /// When all this may be forgotten.
    over: Instant,
}

impl BackOff {
    /// What a record is known by here; `stored` is what the store calls it.
    pub(crate) fn name(stored: &RecordId) -> Fingerprint {
        Fingerprint::of([stored.scope.as_bytes(), stored.key.as_bytes()])
    }

    /// Whether a request may have the resolver asked about this run.
    pub(crate) fn request_may_ask(&self, name: &Fingerprint, attempt: u32) -> bool {
        self.find(name, attempt)
            .is_none_or(|left| Instant::now() >= left.asked + REQUESTS_ASK)
    }

    /// Whether a sweep may.
    pub(crate) fn is_due(&self, name: &Fingerprint, attempt: u32) -> bool {
        self.find(name, attempt)
            .is_none_or(|left| Instant::now() >= left.due)
    }

    /// A request has it left as it is: sweeps need not wait for that.
    pub(crate) fn left_by_request(&self, name: Fingerprint, attempt: u32) {
        let now = Instant::now();
        let asked = Left {
            attempt,
            asked: now,
            times: 0,
            due: now,
            over: now + REQUESTS_ASK,
        };
        let asked = match self.find(&name, attempt) {
            Some(left) => Left { asked: now, ..left },
            None => asked,
        };
        self.known().keep(name, asked, now);
    }

    /// A sweep has left it as it is, so the next ones wait, each time longer.
    pub(crate) fn left_by_sweep(&self, name: Fingerprint, attempt: u32, pauses: Pauses) {
        let now = Instant::now();
        let before = self.find(&name, attempt).map_or(0, |left| left.times);
        let times = before.saturating_add(1);
        let pause = pauses.after(times);
        let left = Left {
            attempt,
            asked: now,
            times,
            due: now + pause,
            // Long enough that the next sweep knows how often it was.
            over: now + pause + pauses.longest.min(FOREVER),
        };
        self.known().keep(name, left, now);
    }

    /// It is settled.
    pub(crate) fn settled(&self, name: &Fingerprint) {
        self.known().left.remove(name);
    }

    fn find(&self, name: &Fingerprint, attempt: u32) -> Option<Left> {
        let left = self.known().left.get(name).copied()?;
        (left.attempt == attempt).then_some(left)
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        // No change is ever left half done.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Known {
    fn keep(&mut self, name: Fingerprint, left: Left, now: Instant) {
        let is_full = self.left.len() >= MAX_KNOWN;
        if is_full && self.tidied.is_none_or(|tidied| now >= tidied + TIDY) {
            self.left.retain(|_, left| left.over > now);
            self.tidied = Some(now);
        }
        if self.left.len() < MAX_KNOWN || self.left.contains_key(&name) {
            self.left.insert(name, left);
        }
    }
}

#[cfg(test)]
#[path = "back_off_tests.rs"]
mod tests;

//! Whose turn it is in a run over the outbox.

use std::collections::{HashSet, VecDeque};

use crate::client::outbox::Turn;

/// How many turns are taken at a time.
const PAGE: usize = 32;

/// Those that wait for their turn in one run.
pub(super) struct Line {
    /// At most so many are sent.
    limit: usize,
    /// Those that were, or cannot be read.
    tried: usize,
    sending: usize,
    waiting: VecDeque<String>,
    seen: HashSet<String>,
    is_asking: bool,
    is_at_end: bool,
}

impl Line {
    pub(super) fn new(limit: usize) -> Self {
        Self {
            limit,
            tried: 0,
            sending: 0,
            waiting: VecDeque::new(),
            seen: HashSet::new(),
            is_asking: false,
            is_at_end: false,
        }
    }

    /// The next one to be sent, while fewer than so many are.
    pub(super) fn next(&mut self, concurrency: usize) -> Option<String> {
        if self.sending >= concurrency {
            return None;
        }
        let next = self.waiting.pop_front()?;
        self.sending += 1;
        Some(next)
    }

    /// How many are to be asked for now, before they are needed.
    pub(super) fn asks(&mut self) -> Option<usize> {
        let to_send = self.limit.saturating_sub(self.tried + self.sending);
        // Those that cannot be read do not count, but must not be read without end either.
        let to_read = self.limit.saturating_mul(2).saturating_sub(self.seen.len());
        let places = to_send.min(to_read).min(PAGE);
        let is_needed = self.waiting.is_empty() && !self.is_asking && !self.is_at_end;
        self.is_asking |= is_needed && places > 0;
        (is_needed && places > 0).then_some(places)
    }

    /// Those that were asked for. Answers the ones whose references cannot be asked for.
    pub(super) fn arrive(&mut self, turns: Vec<Turn>) -> Vec<String> {
        self.is_asking = false;
        // Where only such come that had their turn, a clock is not going forwards.
        self.is_at_end = true;
        let mut damaged = Vec::new();
        for turn in turns {
            if !self.seen.insert(turn.reference.clone()) {
                continue;
            }
            self.is_at_end = false;
            match turn.is_sound {
                true => self.waiting.push_back(turn.reference),
                false => damaged.push(turn.reference),
            }
        }
        damaged
    }

    /// There are no more to be had. Answers whether there were any.
    pub(super) fn ends(&mut self) -> bool {
        self.is_asking = false;
        self.is_at_end = true;
        !self.seen.is_empty()
    }

    pub(super) fn sent(&mut self, is_tried: bool) {
        self.sending -= 1;
        self.tried += usize::from(is_tried);
    }
}

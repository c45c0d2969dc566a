//! What the clients have sent and seen, and what of it must not be.

use std::{
    collections::HashMap,
    fmt,
    sync::{Mutex, MutexGuard},
    time::{Duration, Instant},
};

use crate::{answer::RUN, support::wire::Reply};

/// What one reply means for its action. What is later here says more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Seen {
    /// Nothing yet: it is to be sent again.
    Nothing,
    /// So far: as long as its process lives, it may still be answered.
    Unknown,
    /// For now: nothing was done, and the same request may be answered otherwise later.
    Declined,
    Answered,
}

/// What a service may answer.
pub struct Terms {
    /// With these the handler answers once and for all. Such an answer names its run.
    pub answers: &'static [u16],
    /// With this the handler declines for now. Such an answer names no run.
    pub declines: Option<u16>,
    /// What a 503 may say.
    pub passing: &'static [&'static str],
    /// Whether an outcome may be unknown.
    pub may_be_unknown: bool,
}

/// What was known when a request was sent.
pub struct Sent {
    answered: bool,
    at: Duration,
}

#[derive(Debug, Clone, Copy, Default)]
pub struct Counts {
    pub actions: usize,
    pub requests: usize,
    pub duplicates: usize,
    pub replays: usize,
    pub in_flight: usize,
    pub unavailable: usize,
    pub unknown: usize,
    pub declined: usize,
    pub unanswered: usize,
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} requests for {} actions, {} of them duplicates: {} replays, {} in flight, {} 503s, \
             {} unknown, {} declined for now, {} without an answer",
            self.requests,
            self.actions,
            self.duplicates,
            self.replays,
            self.in_flight,
            self.unavailable,
            self.unknown,
            self.declined,
            self.unanswered
        )
    }
}

pub struct Ledger {
    terms: Terms,
    begun: Instant,
    pages: Mutex<Pages>,
}

#[derive(Default)]
struct Pages {
    actions: HashMap<String, Action>,
    answered: Vec<String>,
    counts: Counts,
    /// By key.
    faults: Vec<(String, String)>,
}

#[derive(Default)]
struct Action {
    /// The first answer of the handler that anybody got, replayed or not.
    first: Option<Reply>,
    unmarked: usize,
    history: Vec<String>,
}

impl Action {
    /// What is wrong with this answer.
    fn answered(&mut self, reply: &Reply, sent: &Sent) -> impl Iterator<Item = &'static str> {
        let ran = !reply.is_replay();
        self.unmarked += usize::from(ran);
        let first = self.first.as_ref();
        let other = first.is_some_and(|first| !is_same(first, reply));
        let faults = [
            (self.unmarked > 1).then_some("a second answer without the marker"),
            (sent.answered && ran).then_some("ran after it was answered"),
            other.then_some("the answer is another one now"),
        ];
        faults.into_iter().flatten()
    }
}

impl Ledger {
    pub fn new(terms: Terms) -> Self {
        Self {
            terms,
            begun: Instant::now(),
            pages: Mutex::default(),
        }
    }

    fn pages(&self) -> MutexGuard<'_, Pages> {
        self.pages.lock().unwrap()
    }

    pub fn counts(&self) -> Counts {
        self.pages().counts
    }

    pub fn keys(&self) -> Vec<String> {
        self.pages().actions.keys().cloned().collect()
    }

    /// An action that has its answer.
    pub fn any_answered(&self) -> Option<String> {
        let pages = self.pages();
        let chosen = rand::random_range(0..pages.answered.len().max(1));
        pages.answered.get(chosen).cloned()
    }

    /// The first answer to every action that has one.
    pub fn answers(&self) -> HashMap<String, Reply> {
        let pages = self.pages();
        let answers = pages.actions.iter();
        answers
            .filter_map(|(key, action)| Some((key.clone(), action.first.clone()?)))
            .collect()
    }

    pub fn fault(&self, key: &str, what: impl Into<String>) {
        self.pages().faults.push((key.to_owned(), what.into()));
    }

    pub fn sent(&self, key: &str) -> Sent {
        let mut pages = self.pages();
        pages.counts.requests += 1;
        match pages.actions.contains_key(key) {
            true => pages.counts.duplicates += 1,
            false => pages.counts.actions += 1,
        }
        let action = pages.actions.entry(key.to_owned()).or_default();
        Sent {
            answered: action.first.is_some(),
            at: self.begun.elapsed(),
        }
    }

    pub fn received(&self, key: &str, sent: Sent, reply: Reply) -> Seen {
        let mut pages = self.pages();
        let pages = &mut *pages;
        let (counts, action) = (&mut pages.counts, pages.actions.get_mut(key).unwrap());
        let code = reply.code();
        action.history.push(format!(
            "sent {:?}, received {:?}: {} {code}{}{}",
            sent.at,
            self.begun.elapsed(),
            reply.status,
            if reply.is_replay() { "replay of " } else { "" },
            String::from_utf8_lossy(reply.header(RUN).unwrap_or_default()),
        ));
        let terms = &self.terms;
        let mut faults = Vec::new();
        let seen = match (reply.status, &*code) {
            (0, _) => {
                counts.unanswered += 1;
                Seen::Nothing
            }
            (503, code) if terms.passing.contains(&code) => {
                counts.unavailable += 1;
                faults.extend(retry_after_one_second(&reply));
                Seen::Nothing
            }
            (409, "idempotency_in_flight") => {
                counts.in_flight += 1;
                faults.extend(retry_after_one_second(&reply));
                faults.extend(sent.answered.then_some("answered before, now in flight"));
                Seen::Nothing
            }
            (409, "idempotency_outcome_unknown") if terms.may_be_unknown => {
                counts.unknown += 1;
                faults.extend(sent.answered.then_some("answered before, now unknown"));
                Seen::Unknown
            }
            (status, "") if terms.declines == Some(status) && reply.header(RUN).is_none() => {
                counts.declined += 1;
                faults.extend(sent.answered.then_some("answered before, now declined"));
                faults.extend(reply.is_replay().then_some("what was not kept is replayed"));
                Seen::Declined
            }
            (status, "") if terms.answers.contains(&status) && reply.header(RUN).is_some() => {
                counts.replays += usize::from(reply.is_replay());
                faults.extend(action.answered(&reply, &sent));
                if action.first.is_none() {
                    pages.answered.push(key.to_owned());
                    action.first = Some(reply);
                }
                Seen::Answered
            }
            _ => {
                faults.push("no such answer is expected");
                Seen::Nothing
            }
        };
        let faults = faults.into_iter();
        pages
            .faults
            .extend(faults.map(|what| (key.to_owned(), what.to_owned())));
        seen
    }

    /// Tells all there is to know of the first actions that went wrong.
    pub fn assert_faultless(&self) {
        let pages = self.pages();
        for (key, what) in pages.faults.iter().take(20) {
            println!("{key}: {what}");
            let action = pages.actions.get(key);
            for line in action.iter().flat_map(|action| &action.history) {
                println!("    {line}");
            }
        }
        assert!(pages.faults.is_empty(), "{} faults", pages.faults.len());
    }
}

fn retry_after_one_second(reply: &Reply) -> Option<&'static str> {
    (reply.header("retry-after") != Some(b"1")).then_some("retry-after is not 1")
}

/// Whether a replay repeats the answer. The order of fields of one name counts.
fn is_same(first: &Reply, replay: &Reply) -> bool {
    (first.status, &first.body, kept_headers(first))
        == (replay.status, &replay.body, kept_headers(replay))
}

fn kept_headers(reply: &Reply) -> Vec<&(String, Vec<u8>)> {
    let aside = ["connection", "content-length", "date", "idempotent-replay"];
    let mut headers: Vec<_> = reply.headers.iter().collect();
    headers.retain(|(name, _)| !aside.contains(&name.as_str()));
    headers.sort_by_key(|(name, _)| name);
    headers
}

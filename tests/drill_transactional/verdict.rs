//! What has really happened, held against what the clients were told.

use std::{collections::HashMap, fmt, fs, path::Path, time::Duration};

use tokio::time::{Instant, sleep};
use tower_idempotency::{AnyStore, store::Inspect};

use crate::{
    accounts::{Action, Books, Entry, OPENING},
    answer::RUN,
    ledger::{Ledger, Seen},
    service::{BEGAN, CONFLICTED, TOOK_OVER},
    support::wire::Reply,
};

/// What the layer warns of when a run comes too late.
const LOST: &str = "idempotency claim lost";

/// And when a commit was not acknowledged, or had no chance.
const UNCERTAIN: &str = "idempotent transaction not committed";

/// How long it may take until nothing goes on any more.
const PATIENCE: Duration = Duration::from_secs(15);

/// Waits for what those that live have begun.
pub async fn everything_rests(store: &AnyStore, ledger: &Ledger) {
    let begun = Instant::now();
    loop {
        let counts = store.counts().await.unwrap();
        if counts.running == 0 {
            return;
        }
        if begun.elapsed() > PATIENCE {
            return ledger.fault("all actions", format!("not at rest: {counts:?}"));
        }
        sleep(Duration::from_millis(50)).await;
    }
}

/// What every action has come to.
#[derive(Debug, Default)]
pub struct Verdict {
    pub done: usize,
    pub declined: usize,
    pub declined_for_now: usize,
    pub effects: usize,
    pub runs: usize,
    pub takeovers: usize,
    pub conflicts: usize,
    /// Runs that were held up for so long that another has taken over.
    pub lost: usize,
    pub uncertain: usize,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "in the end {} actions done, {} declined for good and {} for now, {} effects of {} runs \
             ({} after a takeover, {} ended by a conflict, {} had lost their claim, {} \
             ended with a commit that failed or was not acknowledged)",
            self.done,
            self.declined,
            self.declined_for_now,
            self.effects,
            self.runs,
            self.takeovers,
            self.conflicts,
            self.lost,
            self.uncertain
        )
    }
}

impl Verdict {
    /// Judges all actions. What is wrong goes into the ledger.
    pub async fn of(
        books: &Books,
        store: &AnyStore,
        journal: &Path,
        ledger: &Ledger,
        last_words: &HashMap<String, Seen>,
    ) -> Self {
        let journal = fs::read_to_string(journal).unwrap();
        let noted = |what: &str| journal.matches(what).count();
        let mut verdict = Self {
            effects: books.entries.len(),
            runs: noted(BEGAN),
            takeovers: noted(TOOK_OVER),
            conflicts: noted(CONFLICTED),
            lost: noted(LOST),
            uncertain: noted(UNCERTAIN),
            ..Self::default()
        };
        for key in books.entries.keys() {
            if !last_words.contains_key(key) {
                ledger.fault(key, "an effect that nobody asked for");
            }
        }
        let answers = ledger.answers();
        let mut moved: HashMap<i64, i64> = HashMap::new();
        for (key, last_word) in last_words {
            let expected = verdict.expect(ledger, key, *last_word, answers.get(key));
            for (_, account, amount) in &expected {
                *moved.entry(*account).or_default() += amount;
            }
            let effect = books.entries.get(key).map_or(&[][..], Vec::as_slice);
            if sorted(effect) != sorted(&expected) {
                ledger.fault(key, format!("its effect is {effect:?}, not {expected:?}"));
            }
        }
        verdict.compare_balances(books, ledger, &moved);
        verdict.compare_counts(store, ledger, answers.len()).await;
        verdict
    }

    /// What the action must have entered after this last word.
    fn expect(
        &mut self,
        ledger: &Ledger,
        key: &str,
        last_word: Seen,
        answer: Option<&Reply>,
    ) -> Vec<Entry> {
        match (last_word, answer) {
            (Seen::Answered, Some(answer)) => {
                let run = run_of(ledger, key, answer);
                if answer.status == 201 {
                    self.done += 1;
                    return Action::of(key).entered_by(&run);
                }
                self.declined += 1;
            }
            (Seen::Declined, None) => self.declined_for_now += 1,
            _ => ledger.fault(key, format!("its last word is {last_word:?}")),
        }
        Vec::new()
    }

    /// `moved` is what the acknowledged actions have moved, by account.
    fn compare_balances(&self, books: &Books, ledger: &Ledger, moved: &HashMap<i64, i64>) {
        let mut entered: HashMap<i64, i64> = HashMap::new();
        for (_, account, amount) in books.entries.values().flatten() {
            *entered.entry(*account).or_default() += amount;
        }
        for (account, balance) in &books.balances {
            let by = |sums: &HashMap<i64, i64>| OPENING + sums.get(account).unwrap_or(&0);
            if *balance < 0 || [by(&entered), by(moved)] != [*balance; 2] {
                let what = format!(
                    "balance {balance}, {} by its entries, {} by what was acknowledged",
                    by(&entered),
                    by(moved)
                );
                ledger.fault(&format!("account {account}"), what);
            }
        }
    }

    async fn compare_counts(&self, store: &AnyStore, ledger: &Ledger, answered: usize) {
        let counts = store.counts().await.unwrap();
        let left = counts.running + counts.abandoned + counts.released;
        if (counts.completed, left) != (answered as u64, 0) {
            let what = format!("{answered} answered for good, but {counts:?}");
            ledger.fault("all actions", what);
        }
    }
}

/// Which run an answer is of.
fn run_of(ledger: &Ledger, key: &str, answer: &Reply) -> String {
    let run = String::from_utf8_lossy(answer.header(RUN).unwrap_or_default());
    let body: serde_json::Value = serde_json::from_slice(&answer.body).unwrap_or_default();
    if (&body["action"], &body["run"]) != (&key.into(), &(*run).into()) {
        ledger.fault(key, "the answer is that of another action");
    }
    run.into_owned()
}

fn sorted(entries: &[Entry]) -> Vec<&Entry> {
    let mut sorted: Vec<_> = entries.iter().collect();
    sorted.sort();
    sorted
}

//! What has really happened, held against what the clients were told.

use std::{
    collections::{HashMap, HashSet},
    fmt, fs,
    path::Path,
};

use tower_idempotency::{PostgresStore, store::Inspect};

use crate::{
    answer::RUN,
    ledger::Ledger,
    support::{server::Server, wire::Reply},
};

/// Every run of the handler, whatever became of it, by action.
fn runs(journal: &Path) -> HashMap<String, Vec<String>> {
    let journal = fs::read_to_string(journal).unwrap();
    let lines = journal.lines();
    grouped(lines.map(|line| line.split_once(' ').expect("an incomplete line")))
}

fn grouped<S: Into<String>>(
    runs: impl IntoIterator<Item = (S, S)>,
) -> HashMap<String, Vec<String>> {
    let mut grouped: HashMap<String, Vec<String>> = HashMap::new();
    for (action, run) in runs {
        grouped.entry(action.into()).or_default().push(run.into());
    }
    grouped
}

/// What every action has come to.
#[derive(Debug, Default)]
pub struct Verdict {
    pub created: usize,
    pub failed: usize,
    pub failed_with_effect: usize,
    pub unknown: usize,
    pub unknown_with_effect: usize,
    pub effects: usize,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "in the end {} actions done, {} failed ({} with an effect), {} unknown ({} with an \
             effect), {} effects",
            self.created,
            self.failed,
            self.failed_with_effect,
            self.unknown,
            self.unknown_with_effect,
            self.effects
        )
    }
}

impl Verdict {
    /// Judges all actions. What is wrong goes into the ledger.
    pub async fn of(
        server: &Server,
        store: &PostgresStore,
        journal: &Path,
        ledger: &Ledger,
        unknown: &HashSet<String>,
    ) -> Self {
        let begun = runs(journal);
        let effects = grouped(effects_of(server).await);
        let mut verdict = Self {
            unknown: unknown.len(),
            effects: effects.values().map(Vec::len).sum(),
            ..Self::default()
        };
        for (action, runs) in &begun {
            if runs.len() > 1 {
                ledger.fault(action, format!("ran more than once: {runs:?}"));
            }
        }
        for (action, runs) in &effects {
            if begun.get(action) != Some(runs) {
                ledger.fault(
                    action,
                    format!("effects of other runs than its own: {runs:?}"),
                );
            }
        }
        let answers = ledger.answers();
        for (action, answer) in &answers {
            verdict.count(ledger, action, answer, effects.get(action));
        }
        for action in unknown {
            verdict.unknown_with_effect += usize::from(effects.contains_key(action));
        }
        for action in ledger.keys() {
            if answers.contains_key(&action) == unknown.contains(&action) {
                ledger.fault(&action, "neither answered nor unknown, or both");
            }
        }
        let counts = store.counts().await.unwrap();
        let (completed, abandoned) = (answers.len() as u64, unknown.len() as u64);
        if (counts.running, counts.released) != (0, 0)
            || (counts.completed, counts.abandoned) != (completed, abandoned)
        {
            let what = format!("{completed} answered and {abandoned} unknown, but {counts:?}");
            ledger.fault("all actions", what);
        }
        verdict
    }

    fn count(&mut self, ledger: &Ledger, action: &str, answer: &Reply, runs: Option<&Vec<String>>) {
        let run = String::from_utf8_lossy(answer.header(RUN).unwrap_or_default());
        let body: serde_json::Value = serde_json::from_slice(&answer.body).unwrap_or_default();
        if (&body["action"], &body["run"]) != (&action.into(), &(*run).into()) {
            ledger.fault(action, "the answer is that of another action");
        }
        match (answer.status, runs) {
            (201, Some(runs)) if **runs == [&*run] => self.created += 1,
            (201, _) => ledger.fault(action, format!("{run} is acknowledged, not {runs:?}")),
            (_, effects) => {
                self.failed += 1;
                self.failed_with_effect += usize::from(effects.is_some());
            }
        }
    }
}

async fn effects_of(server: &Server) -> Vec<(String, String)> {
    let effects = sqlx::query_as("SELECT action, run FROM drill_effects");
    effects
        .fetch_all(&mut server.connect().await)
        .await
        .unwrap()
}

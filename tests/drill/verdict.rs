//! What has really happened, held against what the clients were told.

use std::{collections::HashMap, fmt, fs, time::Duration};

use tokio::time::{Instant, sleep};
use tower_idempotency::{Owner, PostgresStore, store::Inspect};

use crate::{
    chaos::Fleet,
    ledger::Ledger,
    service::RUN,
    support::{server::Server, wire::Reply},
};

/// Every run of the handler, whatever became of it, by action.
fn runs(fleet: &Fleet) -> HashMap<String, Vec<String>> {
    let journal = fs::read_to_string(&fleet.journal).unwrap();
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

/// Waits for what these owners, which live, have begun: nothing of it stays in flight, or unknown.
pub async fn owners_settle(owners: &[Owner], store: &PostgresStore, ledger: &Ledger) {
    let begun = Instant::now();
    loop {
        let counts = store.counts().await.unwrap();
        let abandoned = store.abandoned(None, usize::MAX).await.unwrap();
        let left: Vec<_> = { abandoned.iter() }
            .filter(|record| owners.contains(&record.owner))
            .collect();
        if counts.running == 0 && left.is_empty() {
            return;
        }
        if begun.elapsed() > PATIENCE {
            for record in left {
                let key = String::from_utf8_lossy(record.id.key.as_bytes());
                ledger.fault(&key, "unknown, though its process lives");
            }
            return ledger.fault("all actions", format!("not at rest: {counts:?}"));
        }
        sleep(Duration::from_millis(50)).await;
    }
}

/// How long it may take until nothing goes on any more.
const PATIENCE: Duration = Duration::from_secs(15);

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
        fleet: &Fleet,
        ledger: &Ledger,
        unknown: &[String],
    ) -> Self {
        let begun = runs(fleet);
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

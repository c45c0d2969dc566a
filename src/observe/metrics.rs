//! Every metric and its labels. All labels are from short lists that are known beforehand.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use metrics::{Counter, Key, Label, Level, Metadata, Unit, with_recorder};

use super::{CutOff, Operation, Timed, decision::Unkeyed, kind_of};
use crate::{
    IdempotencyStatus,
    store::{Counts, StoreError},
};

const REQUESTS: &str = "idempotency_requests_total";
const UNKEYED: &str = "idempotency_unkeyed_total";
const STORE_ERRORS: &str = "idempotency_store_errors_total";
const RESOLVED: &str = "idempotency_resolved_total";
const ABANDONED: &str = "idempotency_abandoned_total";
const RECORDS_LATE: &str = "idempotency_records_late_total";
const RECORDS_FAILED: &str = "idempotency_records_failed_total";
const CLAIM_SECONDS: &str = "idempotency_claim_seconds";
const COMPLETE_SECONDS: &str = "idempotency_complete_seconds";
const HANDLER_SECONDS: &str = "idempotency_handler_seconds";
const BATCH_SIZE: &str = "idempotency_batch_size";
const RUNNING: &str = "idempotency_running";
const WAITING: &str = "idempotency_waiting";
const HEARTBEAT_AGE: &str = "idempotency_heartbeat_age_seconds";
const RECORDS: &str = "idempotency_records";

const STATUS: &str = "status";
const PROBLEM: &str = "problem";
const OPERATION: &str = "operation";
const KIND: &str = "kind";
const VERDICT: &str = "verdict";
const BY: &str = "by";
const WHY: &str = "why";
#[cfg(any(feature = "sqlite", feature = "postgres"))]
const STORE: &str = "store";
const STATE: &str = "state";

static METADATA: Metadata<'static> =
    Metadata::new("tower_idempotency", Level::INFO, Some(module_path!()));

/// Keys with one label, made at compile time: what is counted for every request must not allocate.
macro_rules! keys {
    ($name:expr, $label:expr, [$($value:expr),* $(,)?]) => {
        [$({
            static LABELS: [Label; 1] = [Label::from_static_parts($label, $value)];
            Key::from_static_parts($name, &LABELS)
        }),*]
    };
}

/// In the order of the statuses.
static REQUESTS_BY_STATUS: [Key; 13] = keys!(
    REQUESTS,
    STATUS,
    [
        IdempotencyStatus::Executed.as_str(),
        IdempotencyStatus::Replayed.as_str(),
        IdempotencyStatus::InFlight.as_str(),
        IdempotencyStatus::Reused.as_str(),
        IdempotencyStatus::Missing.as_str(),
        IdempotencyStatus::Invalid.as_str(),
        IdempotencyStatus::NotRetained.as_str(),
        IdempotencyStatus::OutcomeUnknown.as_str(),
        IdempotencyStatus::TookOver.as_str(),
        IdempotencyStatus::StoreUnavailable.as_str(),
        IdempotencyStatus::Overloaded.as_str(),
        IdempotencyStatus::LimitReached.as_str(),
        IdempotencyStatus::Unprotected.as_str(),
    ]
);

static CLAIMS: Key = Key::from_static_name(CLAIM_SECONDS);
static COMPLETIONS: Key = Key::from_static_name(COMPLETE_SECONDS);
static HANDLERS: Key = Key::from_static_name(HANDLER_SECONDS);

fn count(key: &Key) -> Counter {
    with_recorder(|recorder| recorder.register_counter(key, &METADATA))
}

fn observe(key: &Key, value: f64) {
    with_recorder(|recorder| recorder.register_histogram(key, &METADATA)).record(value);
}

/// Whether anybody collects metrics. The recorder that stands for none has no size; one of a service that
/// has none either, because it keeps everything in statics, is taken for none where asking costs more than
/// the answer is worth.
pub(crate) fn is_collected() -> bool {
    with_recorder(|recorder| size_of_val(recorder) > 0)
}

pub(super) fn decided(status: IdempotencyStatus) {
    count(&REQUESTS_BY_STATUS[status as usize]).increment(1);
}

pub(super) fn unkeyed(problem: Unkeyed) {
    static DESCRIBED: AtomicBool = AtomicBool::new(false);
    // Such requests start no background work, which describes the rest.
    if is_collected() && !DESCRIBED.swap(true, Ordering::Relaxed) {
        describe();
    }
    metrics::counter!(UNKEYED, PROBLEM => problem.as_str()).increment(1);
}

pub(super) fn store_failed(operation: Operation, error: Option<&StoreError>) {
    let kind = error.map_or("timeout", |error| kind_of(error.kind()));
    failed(operation.as_str(), kind);
}

/// What fails rarely may allocate.
pub(super) fn failed(operation: &'static str, kind: &'static str) {
    metrics::counter!(STORE_ERRORS, OPERATION => operation, KIND => kind).increment(1);
}

pub(super) fn resolved(verdict: &'static str, by: &'static str) {
    metrics::counter!(RESOLVED, VERDICT => verdict, BY => by).increment(1);
}

pub(super) fn abandoned(why: CutOff) {
    metrics::counter!(ABANDONED, WHY => why.as_str()).increment(1);
}

pub(super) fn recording_late() {
    metrics::counter!(RECORDS_LATE).increment(1);
}

pub(super) fn recording_failed() {
    metrics::counter!(RECORDS_FAILED).increment(1);
}

pub(super) fn took(timed: Timed, time: Duration) {
    let key = match timed {
        Timed::Claim => &CLAIMS,
        Timed::Complete => &COMPLETIONS,
        Timed::Handler => &HANDLERS,
    };
    observe(key, time.as_secs_f64());
}

#[cfg(any(feature = "sqlite", feature = "postgres"))]
pub(super) fn batch(store: super::Database, operations: usize) {
    /// In the order of the databases.
    static BATCHES: [Key; 2] = keys!(
        BATCH_SIZE,
        STORE,
        [
            super::Database::Sqlite.as_str(),
            super::Database::Postgres.as_str()
        ]
    );
    observe(
        &BATCHES[store as usize],
        metrics::IntoF64::into_f64(operations as u32),
    );
}

/// What goes on in this process.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Activity {
    pub(super) running: usize,
    pub(super) waiting: usize,
    pub(super) heartbeat_age: Duration,
}

pub(super) fn goes_on(activity: Activity) {
    let Activity {
        running,
        waiting,
        heartbeat_age,
    } = activity;
    metrics::gauge!(RUNNING).set(as_f64(running));
    metrics::gauge!(WAITING).set(as_f64(waiting));
    metrics::gauge!(HEARTBEAT_AGE).set(heartbeat_age.as_secs_f64());
}

/// What the store holds.
pub(crate) fn records(counts: Counts) {
    let states = [
        ("running", counts.running),
        ("completed", counts.completed),
        ("abandoned", counts.abandoned),
        ("released", counts.released),
    ];
    for (state, count) in states {
        let gauge = metrics::gauge!(RECORDS, STATE => state);
        gauge.set(as_f64(usize::try_from(count).unwrap_or(usize::MAX)));
    }
}

/// Exact up to 2⁵³, which no count reaches.
#[expect(clippy::cast_precision_loss, reason = "see above")]
fn as_f64(count: usize) -> f64 {
    count as f64
}

/// Tells whoever collects them what they are. Telling it again does no harm.
pub(crate) fn describe() {
    with_recorder(|recorder| {
        for (name, text) in [
            (REQUESTS, "Decisions on requests, by what was done"),
            (
                UNKEYED,
                "Requests without a usable key that passed all the same",
            ),
            (STORE_ERRORS, "Operations of the store that failed"),
            (RESOLVED, "Records of runs that were cut off and resolved"),
            (
                ABANDONED,
                "Runs that were cut off here; nobody knows what they did",
            ),
            (
                RECORDS_LATE,
                "Outcomes not recorded within store_timeout; recording goes on",
            ),
            (RECORDS_FAILED, "Outcomes given up without a record"),
        ] {
            recorder.describe_counter(name.into(), Some(Unit::Count), text.into());
        }
        for (name, unit, text) in [
            (CLAIM_SECONDS, Unit::Seconds, "Time to claim a record"),
            (COMPLETE_SECONDS, Unit::Seconds, "Time to settle a record"),
            (
                HANDLER_SECONDS,
                Unit::Seconds,
                "Time of the inner service, to the head of its answer",
            ),
            (
                BATCH_SIZE,
                Unit::Count,
                "Operations that shared one transaction or statement",
            ),
        ] {
            recorder.describe_histogram(name.into(), Some(unit), text.into());
        }
        for (name, unit, text) in [
            (
                RUNNING,
                Unit::Count,
                "Runs of this process, until their outcome is recorded",
            ),
            (
                WAITING,
                Unit::Count,
                "Requests of this process that wait for another one's run",
            ),
            (
                HEARTBEAT_AGE,
                Unit::Seconds,
                "Time since the claims of this process were last known to be renewed",
            ),
            (RECORDS, Unit::Count, "Live records of the store, by state"),
        ] {
            recorder.describe_gauge(name.into(), Some(unit), text.into());
        }
    });
}

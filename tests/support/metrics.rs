//! What is counted and measured, as a service's own recorder sees it.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use metrics::{
    Counter, Gauge, Histogram, HistogramFn, Key, KeyName, LocalRecorderGuard, Metadata, Recorder,
    SharedString, Unit,
};

/// Name, and labels as `name=value`.
type Series = (String, BTreeSet<String>);

/// What was collected so far.
#[derive(Clone, Default)]
pub struct Collected(Arc<All>);

#[derive(Default)]
struct All {
    counters: Mutex<BTreeMap<Series, Arc<AtomicU64>>>,
    gauges: Mutex<BTreeMap<Series, Arc<AtomicU64>>>,
    histograms: Mutex<BTreeMap<Series, Arc<Values>>>,
    described: Mutex<BTreeSet<String>>,
}

#[derive(Default)]
struct Values(Mutex<Vec<f64>>);

impl HistogramFn for Values {
    fn record(&self, value: f64) {
        lock(&self.0).push(value);
    }
}

/// Nobody else collects meanwhile: what the gauges show is summed over the layers of the process.
pub struct Alone {
    _recorder: LocalRecorderGuard<'static>,
    _alone: MutexGuard<'static, ()>,
}

impl Collected {
    /// Collects everything of this thread, and so of a test on a runtime of one thread, background work
    /// included, until the guard is dropped.
    pub fn of_this_thread() -> (Self, Alone) {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = lock(&ALONE);
        let collected = Self::default();
        let recorder: &'static Self = Box::leak(Box::new(collected.clone()));
        let alone = Alone {
            _recorder: metrics::set_default_local_recorder(recorder),
            _alone: alone,
        };
        (collected, alone)
    }

    /// A counter's value, summed over all series that have these labels.
    pub fn counter(&self, name: &str, labels: &[&str]) -> u64 {
        let counters = lock(&self.0.counters);
        let found = counters
            .iter()
            .filter(|(series, _)| is(series, name, labels));
        found.map(|(_, value)| value.load(Ordering::SeqCst)).sum()
    }

    /// The counters of this name that are not zero, by their one label's value.
    pub fn by_label(&self, name: &str) -> BTreeMap<String, u64> {
        let counters = lock(&self.0.counters);
        let found = counters.iter().filter(|(series, _)| is(series, name, &[]));
        found
            .map(|((_, labels), value)| {
                assert_eq!(labels.len(), 1, "{labels:?}");
                let label = labels.first().unwrap().split_once('=').unwrap().1;
                (label.to_owned(), value.load(Ordering::SeqCst))
            })
            .filter(|(_, value)| *value > 0)
            .collect()
    }

    /// What a gauge was set to last; `None` where it never was.
    pub fn gauge(&self, name: &str, labels: &[&str]) -> Option<f64> {
        let gauges = lock(&self.0.gauges);
        let mut found = gauges.iter().filter(|(series, _)| is(series, name, labels));
        let (_, value) = found.next()?;
        Some(f64::from_bits(value.load(Ordering::SeqCst)))
    }

    /// Everything that was measured.
    pub fn histogram(&self, name: &str, labels: &[&str]) -> Vec<f64> {
        let histograms = lock(&self.0.histograms);
        let found = histograms
            .iter()
            .filter(|(series, _)| is(series, name, labels));
        found
            .flat_map(|(_, values)| lock(&values.0).clone())
            .collect()
    }

    /// The names and labels of everything.
    pub fn series(&self) -> Vec<Series> {
        let all = [&self.0.counters, &self.0.gauges];
        let mut series: Vec<_> = all
            .iter()
            .flat_map(|some| lock(some).keys().cloned().collect::<Vec<_>>())
            .collect();
        series.extend(lock(&self.0.histograms).keys().cloned());
        series
    }

    pub fn is_described(&self, name: &str) -> bool {
        lock(&self.0.described).contains(name)
    }
}

impl Recorder for Collected {
    fn describe_counter(&self, key: KeyName, _: Option<Unit>, _: SharedString) {
        lock(&self.0.described).insert(key.as_str().to_owned());
    }

    fn describe_gauge(&self, key: KeyName, _: Option<Unit>, _: SharedString) {
        lock(&self.0.described).insert(key.as_str().to_owned());
    }

    fn describe_histogram(&self, key: KeyName, _: Option<Unit>, _: SharedString) {
        lock(&self.0.described).insert(key.as_str().to_owned());
    }

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(
            lock(&self.0.counters)
                .entry(series(key))
                .or_default()
                .clone(),
        )
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(lock(&self.0.gauges).entry(series(key)).or_default().clone())
    }

    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::from_arc(
            lock(&self.0.histograms)
                .entry(series(key))
                .or_default()
                .clone(),
        )
    }
}

fn series(key: &Key) -> Series {
    let labels = key
        .labels()
        .map(|label| format!("{}={}", label.key(), label.value()));
    (key.name().to_owned(), labels.collect())
}

fn is((name, labels): &Series, wanted: &str, with: &[&str]) -> bool {
    name == wanted && with.iter().all(|label| labels.contains(*label))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A test that has failed must not fail the others.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

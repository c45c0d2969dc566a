//! What goes on in this process, summed over its layers: a gauge has one value, whoever sets it.

use std::{
    sync::{Mutex, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use super::metrics::{self, Activity};
use crate::live::Live;

/// How old what the gauges show may be.
const SAMPLED_EVERY: Duration = Duration::from_secs(1);

/// Those whose background work has begun.
static LAYERS: Mutex<Vec<Weak<Live>>> = Mutex::new(Vec::new());

/// Takes a layer and its clones into account from now on.
fn enlist(live: &Weak<Live>) {
    let mut layers = layers();
    layers.retain(|layer| layer.strong_count() > 0 && !layer.ptr_eq(live));
    layers.push(live.clone());
}

/// Shows what goes on, over and over. Each layer shows the sum over all, so that it does not matter which of
/// them is the last.
pub(crate) async fn show(live: Weak<Live>) {
    enlist(&live);
    metrics::describe();
    let mut collected = metrics::is_collected();
    loop {
        // Whoever collects may have come later than the first request.
        let before = std::mem::replace(&mut collected, metrics::is_collected());
        if collected && !before {
            metrics::describe();
        }
        sample();
        tokio::time::sleep(SAMPLED_EVERY).await;
    }
}

/// Shows what goes on now.
pub(crate) fn sample() {
    // Held until it is shown, or an older sample could be the last one.
    let layers = layers();
    let mut sum = Activity::default();
    for live in layers.iter().filter_map(Weak::upgrade) {
        sum.running += live.runs();
        sum.waiting += live.waiting.len();
        sum.heartbeat_age = sum.heartbeat_age.max(live.heartbeat_age());
    }
    metrics::goes_on(sum);
}

fn layers() -> MutexGuard<'static, Vec<Weak<Live>>> {
    // The list is never left half-changed.
    LAYERS.lock().unwrap_or_else(PoisonError::into_inner)
}

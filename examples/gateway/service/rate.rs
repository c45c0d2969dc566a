//! How fast one merchant may be.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Instant,
};

/// A token bucket for each merchant, in this process.
#[derive(Clone)]
pub struct RateLimit {
    burst: f64,
    per_second: f64,
    buckets: Arc<Mutex<HashMap<&'static str, Bucket>>>,
}

struct Bucket {
    left: f64,
    at: Instant,
}

impl RateLimit {
    pub fn new(burst: u32, per_second: u32) -> Self {
        Self {
            burst: burst.into(),
            per_second: per_second.into(),
            buckets: Arc::default(),
        }
    }

    /// Whether this merchant may send one more request now.
    pub fn admits(&self, merchant: &'static str) -> bool {
        // A bucket is never left half changed.
        let mut buckets = self.buckets.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let full = Bucket {
            left: self.burst,
            at: now,
        };
        let bucket = buckets.entry(merchant).or_insert(full);
        let since = now.saturating_duration_since(bucket.at).as_secs_f64();
        bucket.left = (bucket.left + since * self.per_second).min(self.burst);
        bucket.at = now;
        let admits = bucket.left >= 1.0;
        if admits {
            bucket.left -= 1.0;
        }
        admits
    }
}

//! What a client can be told.

use std::{fmt, sync::Arc, time::Duration};

use axum::BoxError;
use bytes::Bytes;
use http::{Method, request::Parts};
use tokio::time::Instant;

use super::{Attempt, judgement::Judge, key_source::KeySource, pause::BackOff};
use crate::bounded::FOREVER;

pub(super) type Hook = dyn Fn(&mut Parts, &Bytes, &Attempt) -> Result<(), BoxError> + Send + Sync;

/// The options of a [`RetryLayer`](super::RetryLayer), explained there.
#[derive(Clone)]
pub(super) struct RetryOptions {
    pub(super) methods: Vec<Method>,
    pub(super) keys: KeySource,
    pub(super) request_body_limit: usize,
    pub(super) response_body_limit: usize,
    pub(super) retries: u32,
    pub(super) back_off: BackOff,
    pub(super) attempt_timeout: Duration,
    pub(super) total_timeout: Duration,
    pub(super) judge: Judge,
    pub(super) before_attempt: Option<Arc<Hook>>,
}

impl Default for RetryOptions {
    fn default() -> Self {
        Self {
            methods: vec![Method::POST, Method::PATCH],
            keys: KeySource::default(),
            request_body_limit: 16 * 1024 * 1024,
            response_body_limit: 1024 * 1024,
            retries: 5,
            back_off: BackOff {
                base: Duration::from_millis(500),
                cap: Duration::from_secs(8),
            },
            attempt_timeout: Duration::from_secs(10),
            total_timeout: Duration::from_secs(90),
            judge: Judge::default(),
            before_attempt: None,
        }
    }
}

impl RetryOptions {
    /// The end of an operation that begins now.
    pub(super) fn deadline(&self) -> Instant {
        Instant::now() + self.total_timeout.min(FOREVER)
    }
}

impl fmt::Debug for RetryOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RetryOptions")
            .field("methods", &self.methods)
            .field("header_name", &self.keys.header_name)
            .field("quoted", &self.keys.is_quoted)
            .field("request_body_limit", &self.request_body_limit)
            .field("response_body_limit", &self.response_body_limit)
            .field("retries", &self.retries)
            .field("back_off", &self.back_off)
            .field("attempt_timeout", &self.attempt_timeout)
            .field("total_timeout", &self.total_timeout)
            .field("judge", &self.judge)
            .finish_non_exhaustive()
    }
}

//! Sets of options under which this crate behaves like systems that are known.

use std::{sync::Arc, time::Duration};

use http::{Method, StatusCode};

use crate::{
    ErrorEnvelope, KeyFormat, ProblemJson, Retention,
    options::Options,
    rendering::DOCUMENTATION,
    status::{REPLAY_HEADER, REPLAYED_HEADER},
};

const DAY: Duration = Duration::from_secs(24 * 3600);

/// A set of options, set with [`IdempotencyLayer::profile`](crate::IdempotencyLayer::profile). A profile
/// does nothing else: an option that is set afterwards wins.
///
/// | option | `Gateway` | `Ietf` | `Stripe` |
/// | --- | --- | --- | --- |
/// | `required_methods` | POST | POST | none |
/// | `key_format` | [`any`](KeyFormat::any) | [`any`](KeyFormat::any) | [`bare`](KeyFormat::bare) |
/// | `reuse_status` | 409 | 422 | 400 |
/// | `rejections` | [`ErrorEnvelope`] | [`ProblemJson`] | [`ProblemJson`] |
/// | `retention` | [`strict`](Retention::strict) | [`standard`](Retention::standard) | [`standard`](Retention::standard) |
/// | `ttl` | 7 days | 24 h | 24 h |
/// | `replay_header` | `Idempotent-Replay` | `Idempotent-Replay` | `Idempotent-Replayed` |
/// | `documentation_url` | as it is | this crate's, unless it is set | as it is |
///
/// What each answers in which situation stands in a [table](crate::profiles).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Profile {
    /// A payment gateway's merchant API: a key on every POST, records that outlive a week of retries, and a
    /// handler's word is final.
    Gateway,
    /// draft-ietf-httpapi-idempotency-key-header-07: 422 for another payload (§2.7), 409 while the first
    /// request is running, and the policy linked from each refusal.
    Ietf,
    /// Stripe's API v1: keys are optional, and another payload is a bad request.
    Stripe,
}

impl Profile {
    /// Every profile sets the same options, so that the last one wins whole.
    pub(crate) fn set(self, options: &mut Options) {
        options.required_methods = vec![Method::POST];
        options.key_format = KeyFormat::any();
        options.reuse_status = StatusCode::CONFLICT;
        options.rejections = Arc::new(ProblemJson);
        options.retention = Retention::standard();
        options.ttl = DAY;
        options.replay_header = REPLAY_HEADER;
        match self {
            Self::Gateway => {
                options.rejections = Arc::new(ErrorEnvelope::new());
                options.retention = Retention::strict();
                options.ttl = 7 * DAY;
            }
            Self::Ietf => {
                options.reuse_status = StatusCode::UNPROCESSABLE_ENTITY;
                let documentation = options.documentation_url.take();
                options.documentation_url =
                    Some(documentation.unwrap_or_else(|| Arc::from(DOCUMENTATION)));
            }
            Self::Stripe => {
                options.required_methods = Vec::new();
                options.key_format = KeyFormat::bare();
                options.reuse_status = StatusCode::BAD_REQUEST;
                options.replay_header = REPLAYED_HEADER;
            }
        }
    }
}

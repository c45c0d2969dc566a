//! Sets of options under which this crate behaves like systems that are known.

use std::{sync::Arc, time::Duration};

use http::{HeaderName, Method, StatusCode};

use crate::{
    Audience, Endpoint, ErrorEnvelope, ExactRequest, KeyFormat, ProblemJson, Recovery, Retain,
    Retention,
    options::{KEY_HEADER, Options},
    rendering::DOCUMENTATION,
    status::{REPLAY_HEADER, REPLAYED_HEADER},
};

const DAY: Duration = Duration::from_secs(24 * 3600);

/// Where the Standard Webhooks specification has the id of an event.
const WEBHOOK_ID: HeaderName = HeaderName::from_static("webhook-id");

/// A set of options, set with [`IdempotencyLayer::profile`](crate::IdempotencyLayer::profile). A profile
/// does nothing else: an option that is set afterwards wins.
///
/// | option | `Gateway` | `Ietf` | `Stripe` | `Webhook` |
/// | --- | --- | --- | --- | --- |
/// | `header_name`, unless it is set | `Idempotency-Key` | `Idempotency-Key` | `Idempotency-Key` | `webhook-id` |
/// | `required_methods` | POST | POST | none | POST |
/// | `key_format` | [`any`](KeyFormat::any) | [`any`](KeyFormat::any) | [`bare`](KeyFormat::bare) | [`any`](KeyFormat::any) |
/// | `fingerprint` | [`ExactRequest`] | [`ExactRequest`] | [`ExactRequest`] | [`Endpoint`]: method and path |
/// | `reuse_status` | 409 | 422 | 400 | 409 |
/// | `rejections` | [`ErrorEnvelope`] | [`ProblemJson`] | [`ProblemJson`] | [`ProblemJson`] |
/// | `audience` | [`Clients`](Audience::Clients) | [`Clients`](Audience::Clients) | [`Clients`](Audience::Clients) | [`Senders`](Audience::Senders) |
/// | `retention` | [`strict`](Retention::strict) | [`standard`](Retention::standard) | [`standard`](Retention::standard) | 2xx is kept, all else frees the key |
/// | `recovery` | [`Refuse`](Recovery::Refuse) | [`Refuse`](Recovery::Refuse) | [`Refuse`](Recovery::Refuse) | [`rerun`](Recovery::rerun), at most three runs |
/// | `ttl` | 7 days | 24 h | 24 h | 7 days |
/// | `abandoned_ttl` | none: for ever | none: for ever | none: for ever | 7 days |
/// | `replay_header` | `Idempotent-Replay` | `Idempotent-Replay` | `Idempotent-Replayed` | `Idempotent-Replay` |
/// | `documentation_url` | as it is | this crate's, unless it is set | as it is | as it is |
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
    /// A receiver of webhooks: a delivery is answered with 2xx only once a run of its event has completed; while
    /// one is running, and when it has failed, the sender is told to come back.
    ///
    /// **One event, one route.** An id that comes to a second route of the same scope is refused with 409. Where
    /// both routes are to run it, put the route into the [`scope`](crate::IdempotencyLayer::scope):
    ///
    /// ```
    /// # use tower_idempotency::{IdempotencyLayer, MemoryStore, Profile, Scope};
    /// # #[derive(Clone)]
    /// # struct Sender { id: &'static str }
    /// let layer = IdempotencyLayer::new(MemoryStore::new()).profile(Profile::Webhook);
    /// let of_route = |route: &'static str| {
    ///     layer.clone().scope(move |head| {
    ///         let sender = head.extensions.get::<Sender>()?;
    ///         Some(Scope::new(format!("{route} {}", sender.id)))
    ///     })
    /// };
    /// let (billing, mail) = (of_route("billing"), of_route("mail"));
    /// # let _ = (billing, mail);
    /// ```
    ///
    /// **Its handlers run again after they have failed**, panicked or been cut off. What makes that safe:
    /// [`transactional`](crate::IdempotencyLayer::transactional) with [`Tx`](crate::transactions), or
    /// [checkpoints](crate::Idempotency::checkpoint) and
    /// [downstream keys](crate::Idempotency::downstream_key). See [`webhooks`](crate::webhooks).
    Webhook,
}

impl Profile {
    /// Every profile sets the same options, so that the last one wins whole.
    pub(crate) fn set(self, options: &mut Options) {
        options.name_header(KEY_HEADER);
        options.required_methods = vec![Method::POST];
        options.key_format = KeyFormat::any();
        options.fingerprint = Arc::new(ExactRequest);
        options.reuse_status = StatusCode::CONFLICT;
        options.rejections = Arc::new(ProblemJson);
        options.audience = Audience::Clients;
        options.retention = Retention::standard();
        options.recovery = Recovery::Refuse;
        options.ttl = DAY;
        options.abandoned_ttl = None;
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
            Self::Webhook => {
                options.name_header(WEBHOOK_ID);
                options.fingerprint = Arc::new(Endpoint);
                options.audience = Audience::Senders;
                options.retention = Retention::new(|status| match status.is_success() {
                    true => Retain::Keep,
                    false => Retain::Release,
                });
                options.recovery = Recovery::rerun();
                options.ttl = 7 * DAY;
                options.abandoned_ttl = Some(7 * DAY);
            }
        }
    }
}

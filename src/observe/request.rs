//! What is told of one keyed request: its span, and the ids that its events show.

use bytes::Bytes;
use http::{HeaderMap, HeaderValue};
use tracing::{Span, field::Empty, level_filters::LevelFilter};

use super::Decision;
use crate::{IdempotencyKey, Rejection, options::Options, record::Record};

/// Where spans are filtered by target, this is theirs.
const TARGET: &str = "tower_idempotency";

/// Fields of the span, and of any other span that declares them.
const STATUS: &str = "idempotency.status";
const ORIGINAL_REQUEST_ID: &str = "idempotency.original_request_id";
const ATTEMPT: &str = "idempotency.attempt";

/// The ids that a request's events and its span may show. Nothing is kept where nobody listens, so that a
/// service without a subscriber pays for one comparison.
#[derive(Default)]
pub(crate) struct Observed(Option<Box<Ids>>);

struct Ids {
    request_id: Option<HeaderValue>,
    /// What no id may show: the key, decoded, as it was sent, and in the parts in which it was sent.
    keys: Vec<Bytes>,
    /// Request ids and keys come from one header.
    is_one_header: bool,
}

impl Observed {
    /// Of a request that cannot be run under a key. What would be one in a body that cannot be read, or is
    /// none there, is not known, so no id is shown beside it.
    pub(crate) fn unkeyed(options: &Options, headers: &HeaderMap, why: &Rejection) -> Self {
        match (&options.key_pointer, why) {
            (None, _) | (_, Rejection::KeyRequired) => Self::new(options, headers, None),
            _ if LevelFilter::current() == LevelFilter::OFF => Self(None),
            _ => Self::told(options, None, Vec::new()),
        }
    }

    /// Of a request with this key in its body, where it is written like this.
    pub(crate) fn by_member(
        options: &Options,
        headers: &HeaderMap,
        key: &IdempotencyKey,
        written: &Bytes,
    ) -> Self {
        let mut observed = Self::new(options, headers, Some(key));
        if let Some(ids) = &mut observed.0 {
            ids.keys.push(written.clone());
        }
        observed
    }

    /// Of a request with this key, or with a malformed one or none.
    pub(crate) fn new(
        options: &Options,
        headers: &HeaderMap,
        key: Option<&IdempotencyKey>,
    ) -> Self {
        if LevelFilter::current() == LevelFilter::OFF {
            return Self(None);
        }
        let sent = headers.get_all(&options.header_name);
        let whole = || sent.iter().map(HeaderValue::as_bytes);
        // Of a key that is none, each part may be meant as one.
        let parts = whole().flat_map(|value| {
            value.split(|byte| match key {
                None => b"\"'\\,; \t".contains(byte),
                Some(_) => *byte == b'"',
            })
        });
        let keys = whole()
            .chain(parts)
            .chain(key.map(IdempotencyKey::as_bytes))
            .map(<[u8]>::trim_ascii)
            .filter(|shown| !shown.is_empty())
            .map(Bytes::copy_from_slice)
            .collect();
        Self::told(options, options.request_id_value(headers).cloned(), keys)
    }

    /// Of the first request with the key of a record.
    pub(crate) fn of_record(options: &Options, record: &Record) -> Self {
        if LevelFilter::current() == LevelFilter::OFF {
            return Self(None);
        }
        let request_id = record.request_id.as_deref();
        let request_id = request_id.and_then(|id| HeaderValue::from_str(id).ok());
        let key = Bytes::copy_from_slice(record.id.key.as_bytes());
        Self::told(options, request_id, vec![key])
    }

    fn told(options: &Options, request_id: Option<HeaderValue>, keys: Vec<Bytes>) -> Self {
        Self(Some(Box::new(Ids {
            request_id,
            keys,
            is_one_header: options.request_id_header == options.header_name,
        })))
    }

    /// The span of the request, disabled where nobody wants it.
    pub(crate) fn span(&self) -> Span {
        match &self.0 {
            None => Span::none(),
            Some(ids) => tracing::info_span!(
                target: TARGET,
                "idempotency",
                request_id = ids.request_id(),
                { STATUS } = Empty,
                { ORIGINAL_REQUEST_ID } = Empty,
                { ATTEMPT } = Empty,
            ),
        }
    }

    /// The id of this request.
    pub(crate) fn request_id(&self) -> Option<&str> {
        self.0.as_ref()?.request_id()
    }

    /// The id of the first request with the same key, if it may be shown. It came from another request's
    /// headers, where it may have been the key as well.
    pub(super) fn shown<'a>(&self, id: Option<&'a str>) -> Option<&'a str> {
        let ids = self.0.as_ref()?;
        id.filter(|id| ids.may_show(id))
    }

    /// Tells the span what was decided: that of the request, or where it is disabled whatever span the
    /// layers around this one are in, if it has such fields.
    pub(super) fn record(&self, decision: &Decision<'_>) {
        if self.0.is_none() {
            return;
        }
        let span = Span::current();
        span.record(STATUS, decision.status.as_str());
        if let Some(id) = self.shown(decision.original_request_id) {
            span.record(ORIGINAL_REQUEST_ID, id);
        }
        if let Some(attempt) = decision.attempt {
            span.record(ATTEMPT, attempt);
        }
    }
}

impl Ids {
    fn request_id(&self) -> Option<&str> {
        let id = self.request_id.as_ref()?.to_str().ok()?;
        self.may_show(id).then_some(id)
    }

    fn may_show(&self, id: &str) -> bool {
        let id = id.as_bytes().trim_ascii();
        !self.is_one_header
            && !self.keys.iter().any(|key| match key.len() {
                ..LONG => *key == id,
                _ => contains(id, key),
            })
    }
}

/// A shorter key is found in many an id by chance.
const LONG: usize = 8;

fn contains(whole: &[u8], part: &[u8]) -> bool {
    whole.windows(part.len()).any(|window| window == part)
}

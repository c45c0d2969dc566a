//! The answer of a completed record: what was retained, and what a replay says beside it.

use std::time::{Duration, SystemTime};

use axum::body::Body;
use http::{HeaderMap, HeaderName, HeaderValue, Response, header, request::Parts};

use crate::{
    IdempotencyStatus, Rejection, RetainedResponse, Timestamp,
    observe::{self, Decision, Observed},
    options::Options,
    record::Record,
};

const ORIGINAL_DATE: HeaderName = HeaderName::from_static("idempotency-original-date");
const ORIGINAL_REQUEST_ID: HeaderName = HeaderName::from_static("idempotency-original-request-id");
const KEY_EXPIRES: HeaderName = HeaderName::from_static("idempotency-key-expires");

impl Options {
    /// The answer of a completed record.
    pub(crate) fn replay(
        &self,
        head: &Parts,
        mut record: Box<Record>,
        observed: &Observed,
    ) -> Response<Body> {
        let decoded = record.response.take().map(RetainedResponse::decode);
        let retained = match decoded {
            Some(Ok(retained)) => Ok(retained.into_response()),
            Some(Err(error)) => {
                observe::damaged_record(&error);
                Err(Rejection::StoreUnavailable)
            }
            None => Err(Rejection::ResponseNotRetained {
                status: record.status,
                original_request_id: record.request_id.clone(),
            }),
        };
        // Whatever has become of its answer, it was done.
        let instead = || self.audience.in_place_of(record.status);
        let mut response = match retained.or_else(|rejection| instead().ok_or(rejection)) {
            Ok(response) => response,
            Err(rejection) => return self.refuse(Some(head), &rejection, observed),
        };
        let decision = Decision::replayed(record.request_id.as_deref());
        observe::decided(observed, decision);
        let headers = response.headers_mut();
        headers.insert(self.replay_header.clone(), HeaderValue::from_static("true"));
        if self.no_store_replays {
            forbid_storing(headers);
        }
        if self.replay_provenance {
            tell_provenance(headers, &record);
        }
        self.marked(response, IdempotencyStatus::Replayed)
    }
}

/// One `Cache-Control: no-store` in place of whatever the first answer said to caches, those fields included
/// that only some caches obey and that would win there (RFC 9213).
fn forbid_storing(headers: &mut HeaderMap) {
    let targeted: Vec<_> = headers
        .keys()
        .filter(|name| name.as_str().ends_with("-cache-control") || *name == "surrogate-control")
        .cloned()
        .collect();
    for name in targeted {
        headers.remove(name);
    }
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
}

/// Where a replay comes from. What is not known is left out, also where the first answer had such a field.
fn tell_provenance(headers: &mut HeaderMap, record: &Record) {
    let request_id = record.request_id.as_deref();
    let told = [
        (ORIGINAL_DATE, record.completed.and_then(http_date)),
        (
            ORIGINAL_REQUEST_ID,
            request_id.and_then(|id| id.parse().ok()),
        ),
        (KEY_EXPIRES, record.expires.and_then(http_date)),
    ];
    for (name, value) in told {
        match value {
            Some(value) => drop(headers.insert(name, value)),
            None => drop(headers.remove(name)),
        }
    }
}

/// In the form of RFC 9110 §5.6.7, which has no years beyond 9999.
fn http_date(at: Timestamp) -> Option<HeaderValue> {
    const YEAR_10000: u64 = 253_402_300_800;
    let since_epoch = Duration::from_micros(u64::try_from(at.as_micros()).ok()?);
    if since_epoch.as_secs() >= YEAR_10000 {
        return None;
    }
    httpdate::fmt_http_date(SystemTime::UNIX_EPOCH + since_epoch)
        .parse()
        .ok()
}

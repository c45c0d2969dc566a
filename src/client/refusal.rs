//! What the body of a refusal says.

use std::{borrow::Cow, fmt};

use http::{HeaderMap, StatusCode, header};
use serde::{
    Deserialize, Deserializer,
    de::{DeserializeOwned, IgnoredAny, MapAccess, Visitor},
};
use serde_json::value::RawValue;

/// What this client understands of a problem (RFC 9457) or of the envelope `{"error": {…}}`.
#[derive(Debug, Default)]
pub(super) struct Refusal {
    /// A number or whatever else stands there is a code as it is written.
    pub(super) code: Option<String>,
    pub(super) retryable: Option<bool>,
    pub(super) retry_after_seconds: Option<f64>,
    pub(super) original_status: Option<StatusCode>,
}

impl Refusal {
    /// Whatever cannot be read says nothing.
    pub(super) fn read(headers: &HeaderMap, body: &[u8]) -> Self {
        if !is_json(headers) || is_encoded(headers) {
            return Self::default();
        }
        let Ok(root) = serde_json::from_slice::<Members<'_>>(body) else {
            return Self::default();
        };
        // The envelope goes first: what else stands beside its `error` is mostly not ours.
        let said = [members(root.error), root];
        let details = [said[0].details, said[1].details].map(members);
        let original_status = find(&said, |said| said.original_status)
            .or_else(|| find(&details, |details| details.original_status));
        let code = find(&said, |said| said.code);
        Self {
            code: code.map(|code| value(code).unwrap_or_else(|| code.to_owned())),
            retryable: find(&said, |said| said.retryable).and_then(value),
            retry_after_seconds: find(&said, |said| said.retry_after_seconds).and_then(value),
            original_status: original_status
                .and_then(value)
                .and_then(|status: u16| StatusCode::from_u16(status).ok()),
        }
    }
}

/// The first of these that has it.
fn find<'a>(
    said: &[Members<'a>],
    member: impl Fn(&Members<'a>) -> Option<&'a RawValue>,
) -> Option<&'a str> {
    said.iter().find_map(member).map(RawValue::get)
}

/// The members that count, as they are written: one that is nonsense must not hide the others.
#[derive(Default)]
struct Members<'a> {
    code: Option<&'a RawValue>,
    retryable: Option<&'a RawValue>,
    retry_after_seconds: Option<&'a RawValue>,
    original_status: Option<&'a RawValue>,
    details: Option<&'a RawValue>,
    error: Option<&'a RawValue>,
}

impl<'de> Deserialize<'de> for Members<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Object)
    }
}

struct Object;

impl<'de> Visitor<'de> for Object {
    type Value = Members<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Members<'de>, A::Error> {
        let mut members = Members::default();
        while let Some(name) = map.next_key::<Cow<'de, str>>()? {
            let member = match &*name {
                "code" => &mut members.code,
                "retryable" => &mut members.retryable,
                "retry_after_seconds" => &mut members.retry_after_seconds,
                "original_status" => &mut members.original_status,
                "details" => &mut members.details,
                "error" => &mut members.error,
                _ => {
                    map.next_value::<IgnoredAny>()?;
                    continue;
                }
            };
            // `null` is as good as nothing.
            *member = map.next_value::<Option<&RawValue>>()?;
        }
        Ok(members)
    }
}

/// Those of an object; none of anything else.
fn members(raw: Option<&RawValue>) -> Members<'_> {
    raw.and_then(|raw| serde_json::from_str(raw.get()).ok())
        .unwrap_or_default()
}

fn value<T: DeserializeOwned>(raw: &str) -> Option<T> {
    serde_json::from_str(raw).ok()
}

/// Whether the body has a coding, such as gzip, that is not undone here.
pub(super) fn is_encoded(headers: &HeaderMap) -> bool {
    let fields = headers.get_all(header::CONTENT_ENCODING).iter();
    let mut codings = fields.flat_map(|field| field.as_bytes().split(|byte| *byte == b','));
    codings.any(|coding| {
        let coding = coding.trim_ascii();
        !coding.is_empty() && !coding.eq_ignore_ascii_case(b"identity")
    })
}

/// `application/json`, `application/problem+json`, and whatever else ends in `+json`.
fn is_json(headers: &HeaderMap) -> bool {
    let kind = headers.get(header::CONTENT_TYPE);
    let Some(kind) = kind.and_then(|kind| kind.to_str().ok()) else {
        return false;
    };
    let kind = kind.split(';').next().unwrap_or_default().trim();
    let kind = kind.to_ascii_lowercase();
    kind == "application/json" || kind.ends_with("+json")
}

//! When the server wants the request again.

use std::time::{Duration, SystemTime};

use http::{HeaderMap, header};

use super::refusal::Refusal;
use crate::bounded::FOREVER;

/// The longest of all waits that the server asks for, in `Retry-After` (RFC 9110 §10.2.3) or in the body.
pub(super) fn hint(headers: &HeaderMap, refusal: &Refusal) -> Option<Duration> {
    let told = headers.get_all(header::RETRY_AFTER).iter();
    let told = told.filter_map(|value| after(value.to_str().ok()?.trim(), headers));
    told.chain(refusal.retry_after_seconds.and_then(seconds))
        .filter(|wait| *wait < FOREVER)
        .max()
}

/// A number of seconds, or a date. A date that is past means at once.
fn after(value: &str, headers: &HeaderMap) -> Option<Duration> {
    if !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit()) {
        return value.parse().ok().map(Duration::from_secs);
    }
    let date = httpdate::parse_http_date(value).ok()?;
    // By the server's own clock, where it tells it: the two may be far apart.
    let now = server_time(headers).unwrap_or_else(SystemTime::now);
    Some(date.duration_since(now).unwrap_or_default())
}

fn server_time(headers: &HeaderMap) -> Option<SystemTime> {
    let date = headers.get(header::DATE)?.to_str().ok()?;
    httpdate::parse_http_date(date.trim()).ok()
}

/// Negative numbers, and those that no duration can hold, are no hint.
fn seconds(number: f64) -> Option<Duration> {
    Duration::try_from_secs_f64(number).ok()
}

#[cfg(test)]
mod tests {
    use http::{HeaderName, HeaderValue};

    use super::*;

    fn of(fields: &[(HeaderName, &'static str)], seconds: Option<f64>) -> Option<Duration> {
        let mut headers = HeaderMap::new();
        for (name, value) in fields {
            headers.append(name, HeaderValue::from_static(value));
        }
        let refusal = Refusal {
            retry_after_seconds: seconds,
            ..Refusal::default()
        };
        hint(&headers, &refusal)
    }

    fn told(value: &'static str) -> Option<Duration> {
        of(&[(header::RETRY_AFTER, value)], None)
    }

    #[test]
    fn seconds_are_read_and_nonsense_is_no_hint() {
        assert_eq!(told("3"), Some(Duration::from_secs(3)));
        assert_eq!(told("0"), Some(Duration::ZERO));
        for nonsense in [
            "",
            "-3",
            "+3",
            "1.5",
            "soon",
            "99999999999",
            "99999999999999999999999",
            "3, 4",
        ] {
            assert_eq!(told(nonsense), None, "{nonsense}");
        }
    }

    #[test]
    fn the_body_may_ask_for_fractions() {
        assert_eq!(of(&[], Some(1.5)), Some(Duration::from_millis(1500)));
        for nonsense in [-1.0, 1e300, f64::NAN, f64::INFINITY] {
            assert_eq!(of(&[], Some(nonsense)), None, "{nonsense}");
        }
    }

    #[test]
    fn the_longest_hint_counts() {
        let header = [(header::RETRY_AFTER, "2"), (header::RETRY_AFTER, "5")];
        assert_eq!(of(&header, Some(3.0)), Some(Duration::from_secs(5)));
        assert_eq!(of(&header, Some(7.0)), Some(Duration::from_secs(7)));
        assert_eq!(of(&header, Some(-7.0)), Some(Duration::from_secs(5)));
    }

    #[test]
    fn a_date_is_judged_by_the_servers_own_clock() {
        let date = (header::DATE, "Sun, 06 Nov 1994 08:49:37 GMT");
        let later = (header::RETRY_AFTER, "Sun, 06 Nov 1994 08:49:42 GMT");
        let earlier = (header::RETRY_AFTER, "Sun, 06 Nov 1994 08:49:07 GMT");
        assert_eq!(
            of(&[date.clone(), later.clone()], None),
            Some(Duration::from_secs(5))
        );
        assert_eq!(of(&[date, earlier], None), Some(Duration::ZERO));
        // By the local clock that date is long past.
        assert_eq!(of(&[later], None), Some(Duration::ZERO));
    }

    #[test]
    fn a_date_without_the_servers_clock_is_judged_by_the_local_one() {
        let in_a_minute = SystemTime::now() + Duration::from_secs(60);
        let mut headers = HeaderMap::new();
        let value = httpdate::fmt_http_date(in_a_minute);
        headers.insert(header::RETRY_AFTER, value.parse().unwrap());
        let hint = hint(&headers, &Refusal::default()).unwrap();
        // The date has whole seconds only.
        assert!(hint > Duration::from_secs(50) && hint <= Duration::from_secs(60));
    }
}

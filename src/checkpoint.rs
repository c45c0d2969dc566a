//! Small named values that a handler saves under its claim: how they are stored, and why they are not.

use std::fmt;

use axum::{body::Body, response::IntoResponse};
use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::error::Category;

use crate::{
    Retain,
    store::{StoreError, StoreErrorKind, sealed_form::SEALED},
};
#[cfg(any(feature = "sqlite", feature = "postgres"))]
use crate::{TxError, observe, store::joining::JoinError, transacted::Conflicted};

/// The first byte of a value as a handler saved it. A sealed one begins otherwise, so that neither is ever
/// taken for the other.
pub(crate) const PLAIN: u8 = 1;

pub(crate) fn encode<T: Serialize + ?Sized>(value: &T) -> Result<Bytes, CheckpointError> {
    let mut stored = vec![PLAIN];
    // What serde_json says may hold a part of the value.
    let written = serde_json::to_writer(&mut stored, value);
    written.map_err(|_| CheckpointError(Kind::Unwritable))?;
    Ok(stored.into())
}

pub(crate) fn decode<T: DeserializeOwned>(stored: &[u8]) -> Result<T, CheckpointError> {
    match stored.split_first() {
        Some((&PLAIN, json)) => {
            serde_json::from_slice(json).map_err(|error| match is_too_deep(&error) {
                true => CheckpointError(Kind::TooDeep),
                false => CheckpointError(Kind::Mismatch(error.classify(), error.column())),
            })
        }
        Some((&SEALED, _)) => Err(CheckpointError(Kind::Sealed)),
        _ => Err(CheckpointError(Kind::Unreadable)),
    }
}

/// Whether what could not be read may well be JSON, nested deeper than serde_json reads. (It writes any depth.)
pub(crate) fn is_too_deep(error: &serde_json::Error) -> bool {
    // Nothing else of it tells; and no text of this category holds a part of the value.
    error.is_syntax() && error.to_string().starts_with("recursion limit exceeded")
}

/// A checkpoint could not be saved, or not be read back.
///
/// As a response: 503 with `Retry-After: 1` when the claim is lost, or the store or the database could not
/// do it; 500 when value, name or number of checkpoints are over a limit, when the value does not fit its
/// type, or when the call itself was a mistake. After either one nothing is kept, and the key is left to
/// [`Recovery`](crate::Recovery): what the run did so far is not known. (In
/// [transactional](crate::IdempotencyLayer::transactional) mode it is known, and rolled back.) A handler that
/// knows that it did nothing may answer with [`Retain::Release`](crate::Retain) instead.
///
/// Neither its text nor its `Debug` output shows a value. Its [`source`](std::error::Error::source) is a
/// [`StoreError`], or what sqlx said of a statement of
#[cfg_attr(
    any(feature = "sqlite", feature = "postgres"),
    doc = "[`checkpoint_in`](crate::Idempotency::checkpoint_in)."
)]
#[cfg_attr(
    not(any(feature = "sqlite", feature = "postgres")),
    doc = "`checkpoint_in`."
)]
pub struct CheckpointError(Kind);

enum Kind {
    Lost,
    Store(StoreError),
    /// The statement in the caller's transaction failed.
    #[cfg(any(feature = "sqlite", feature = "postgres"))]
    Statement(TxError),
    Unwritable,
    /// What serde_json says may hold a part of the value, so only the kind and the place are kept.
    Mismatch(Category, usize),
    TooDeep,
    Sealed,
    Unreadable,
    Misused(&'static str),
}

impl CheckpointError {
    pub(crate) fn lost() -> Self {
        Self(Kind::Lost)
    }

    pub(crate) fn store(error: StoreError) -> Self {
        Self(Kind::Store(error))
    }

    /// The store did not answer in time.
    pub(crate) fn unanswered() -> Self {
        Self::store(StoreError::timed_out())
    }

    /// The call is a mistake of the handler's.
    pub(crate) fn misused(why: &'static str) -> Self {
        Self(Kind::Misused(why))
    }

    /// Whether the claim was taken over, forgotten or settled: nothing was saved, and nothing will be.
    pub fn is_lost(&self) -> bool {
        matches!(self.0, Kind::Lost)
    }

    /// Whether nobody knows, because the store did not say: what was to be saved may be saved or not, and may
    /// still be. Saving it again is harmless.
    pub fn is_unknown(&self) -> bool {
        matches!(&self.0, Kind::Store(error) if error.kind() == StoreErrorKind::Unavailable)
    }

    /// Whether the value, its name, or one checkpoint more is over a limit.
    pub fn is_over_limit(&self) -> bool {
        matches!(&self.0, Kind::Store(error) if error.kind() == StoreErrorKind::Invalid)
    }

    /// Whether the value could not be written as JSON, or what is saved is no JSON of the type asked for, or nested
    /// deeper than 127 levels.
    pub fn is_value(&self) -> bool {
        matches!(
            self.0,
            Kind::Unwritable | Kind::Mismatch(..) | Kind::TooDeep
        )
    }

    /// Whether the transaction that it was to be saved in failed for another one's sake: SQLSTATE 40001 or
    /// 40P01. As the answer of a handler with a [`Tx`](crate::Tx) it makes the layer run the handler again.
    #[cfg(any(feature = "sqlite", feature = "postgres"))]
    pub fn is_conflict(&self) -> bool {
        matches!(&self.0, Kind::Statement(error) if error.is_conflict())
    }

    /// What the client may hope for.
    fn status(&self) -> StatusCode {
        match &self.0 {
            Kind::Store(error) if error.kind() == StoreErrorKind::Invalid => {
                StatusCode::INTERNAL_SERVER_ERROR
            }
            Kind::Lost | Kind::Store(_) | Kind::Sealed => StatusCode::SERVICE_UNAVAILABLE,
            #[cfg(any(feature = "sqlite", feature = "postgres"))]
            Kind::Statement(error) if error.is_passing() => StatusCode::SERVICE_UNAVAILABLE,
            #[cfg(any(feature = "sqlite", feature = "postgres"))]
            Kind::Statement(_) => StatusCode::INTERNAL_SERVER_ERROR,
            Kind::Unwritable
            | Kind::Mismatch(..)
            | Kind::TooDeep
            | Kind::Unreadable
            | Kind::Misused(_) => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }
}

#[cfg(any(feature = "sqlite", feature = "postgres"))]
impl From<JoinError> for CheckpointError {
    fn from(error: JoinError) -> Self {
        match error {
            JoinError::Sql(error) => Self(Kind::Statement(error.into())),
            JoinError::Refused(error) => Self::store(error),
            JoinError::OtherDatabase => Self::misused(OTHER_DATABASE),
        }
    }
}

#[cfg(any(feature = "sqlite", feature = "postgres"))]
const OTHER_DATABASE: &str = "a checkpoint can be saved in a transaction only on the database that holds the layer's records; this connection is to one of another kind";

impl fmt::Display for CheckpointError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match &self.0 {
            Kind::Lost => "this run holds its idempotency claim no longer",
            Kind::Store(error) if error.kind() == StoreErrorKind::Invalid => {
                return fmt::Display::fmt(error, f);
            }
            Kind::Store(_) => "the store could not save or load a checkpoint",
            #[cfg(any(feature = "sqlite", feature = "postgres"))]
            Kind::Statement(error) => {
                f.write_str("a checkpoint was not saved, and ")?;
                return fmt::Display::fmt(error, f);
            }
            Kind::Unwritable => "a checkpoint's value cannot be written as JSON",
            Kind::Mismatch(Category::Data, column) => {
                return write!(f, "a checkpoint is not of the type asked for, as column {column} of its JSON shows");
            }
            Kind::Mismatch(..) => "a checkpoint is no JSON: it was not saved by a handler, or is damaged",
            Kind::TooDeep => "a checkpoint is nested deeper than the 127 levels that are read",
            Kind::Sealed => "a checkpoint is sealed; give the layer the SealedStore that it was saved through, or one with its key",
            Kind::Unreadable => "a checkpoint was not saved by a handler, or is damaged",
            Kind::Misused(why) => why,
        })
    }
}

impl fmt::Debug for CheckpointError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_tuple("CheckpointError");
        match &self.0 {
            Kind::Store(error) => shown.field(error),
            _ => shown.field(&format_args!("{self}")),
        };
        shown.finish()
    }
}

impl std::error::Error for CheckpointError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match &self.0 {
            Kind::Store(error) => Some(error),
            #[cfg(any(feature = "sqlite", feature = "postgres"))]
            Kind::Statement(error) => error.source(),
            _ => None,
        }
    }
}

impl IntoResponse for CheckpointError {
    fn into_response(self) -> Response<Body> {
        #[cfg(any(feature = "sqlite", feature = "postgres"))]
        if let Kind::Statement(error) = &self.0 {
            observe::statement_failed(error);
        }
        let status = self.status();
        let mut response = (status, self.to_string()).into_response();
        if status == StatusCode::SERVICE_UNAVAILABLE {
            let seconds = HeaderValue::from_static("1");
            response.headers_mut().insert(header::RETRY_AFTER, seconds);
        }
        response.extensions_mut().insert(Retain::Abandon);
        #[cfg(any(feature = "sqlite", feature = "postgres"))]
        if self.is_conflict() {
            response.extensions_mut().insert(Conflicted);
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_stored_as_json_behind_its_version() {
        assert_eq!(
            &encode(&("charge", 17)).unwrap()[..],
            b"\x01[\"charge\",17]"
        );
        let read: (String, u8) = decode(b"\x01 [\"charge\", 17]\n").unwrap();
        assert_eq!(read, ("charge".to_owned(), 17));
    }

    #[test]
    fn what_is_no_plain_value_is_never_taken_for_one() {
        let why = |stored: &[u8]| decode::<serde_json::Value>(stored).unwrap_err();
        assert!(matches!(why(b"\x02\x07").0, Kind::Sealed));
        for foreign in [&b""[..], b"17", b"{}", b"\0{}", b"\x03{}", b"\xE3{}"] {
            assert!(matches!(why(foreign).0, Kind::Unreadable), "{foreign:?}");
        }
        for broken in [&b"\x01"[..], b"\x01{", b"\x01{}{", b"\x01\xFF"] {
            assert!(matches!(why(broken).0, Kind::Mismatch(..)), "{broken:?}");
        }
    }

    #[test]
    fn what_is_nested_deeper_than_is_read_is_not_said_to_be_damaged() {
        let nested = |levels| format!("\u{1}{}{}", "[".repeat(levels), "]".repeat(levels));
        decode::<serde_json::Value>(nested(127).as_bytes()).unwrap();
        let deeper = decode::<serde_json::Value>(nested(128).as_bytes()).unwrap_err();
        assert!(matches!(deeper.0, Kind::TooDeep) && deeper.is_value());
        assert!(deeper.to_string().contains("127"), "{deeper}");
    }

    #[test]
    fn no_part_of_a_value_is_shown() {
        let wrong = decode::<u64>(b"\x01\"s3cret\"").unwrap_err();
        let shown = format!("{wrong} {wrong:?} {wrong:#?}");
        assert!(!shown.contains("s3cret"), "{shown}");
        assert!(std::error::Error::source(&wrong).is_none());
        assert!(shown.contains("column 8"), "{shown}");

        struct Refusing;
        impl Serialize for Refusing {
            fn serialize<S: serde::Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
                Err(serde::ser::Error::custom("s3cret"))
            }
        }
        let refused = encode(&Refusing).unwrap_err();
        let shown = format!("{refused} {refused:?}");
        assert!(
            !shown.contains("s3cret") && shown.contains("cannot be written"),
            "{shown}"
        );
        assert!(refused.is_value() && wrong.is_value());
    }
}

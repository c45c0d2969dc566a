//! Why there is no result.

use std::{error, fmt, time::Duration};

use serde_json::error::Category;

use crate::Rejection;

/// How an operation failed, which says what becomes of its key.
///
/// `?` on an `E` makes it [`Unknown`](Self::Unknown), the careful reading: an operation that has failed may have
/// had its effect. Where it is certain that there was none, say so:
///
/// ```
/// use tower_idempotency::Failure;
///
/// #[derive(Debug, PartialEq)]
/// enum ChargeError {
///     Malformed,
///     TimedOut,
/// }
///
/// fn call_the_provider(satang: i64) -> Result<&'static str, ChargeError> {
///     (satang < 1_000).then_some("ch_1").ok_or(ChargeError::TimedOut)
/// }
///
/// fn charge(satang: i64) -> Result<&'static str, Failure<ChargeError>> {
///     if satang <= 0 {
///         return Err(Failure::NothingHappened(ChargeError::Malformed));
///     }
///     Ok(call_the_provider(satang)?)
/// }
///
/// assert_eq!(charge(-1), Err(Failure::NothingHappened(ChargeError::Malformed)));
/// assert_eq!(charge(5_000), Err(Failure::Unknown(ChargeError::TimedOut)));
/// ```
///
/// A refusal that is final, and that every later delivery is to get as well, is no failure but a result: make it a
/// part of `T`, which may be a `Result` itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Failure<E> {
    /// This run had no effect: the key is free, and the next call with it runs.
    ///
    /// Of an earlier run that was cut off it says nothing: where this one came after such a one, the key is left
    /// as that one has left it, to the [`resolver`](crate::IdempotencyLayer::resolver) and to
    /// [`Recovery`](crate::Recovery), and no attempt is used up.
    NothingHappened(E),
    /// Nobody knows what it did: the key is abandoned, as if the run had been cut off. What the next call gets is
    /// for the [`resolver`](crate::IdempotencyLayer::resolver) and for [`Recovery`](crate::Recovery) to say.
    ///
    /// By default that is a refusal. Under [`Recovery::Rerun`](crate::Recovery::Rerun) it runs again, and however
    /// often it fails like this uses no attempt up: only runs that are cut off are counted. What ends that is
    /// the number of deliveries after which a queue gives up.
    Unknown(E),
}

impl<E> Failure<E> {
    /// What the operation failed with.
    pub fn error(&self) -> &E {
        match self {
            Self::NothingHappened(error) | Self::Unknown(error) => error,
        }
    }

    /// The same, for keeps.
    pub fn into_error(self) -> E {
        match self {
            Self::NothingHappened(error) | Self::Unknown(error) => error,
        }
    }
}

impl<E> From<E> for Failure<E> {
    fn from(error: E) -> Self {
        Self::Unknown(error)
    }
}

/// Why [`Once`](crate::Once) has no result for its caller. The chapter [`jobs`](crate::jobs) says what a queue's
/// consumer does in each case.
///
/// Its text names the kind of failure and the code of a refusal, no key and no result; what the operation failed
/// with is its [`source`](error::Error::source).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnceError<E> {
    /// The operation was run for this call, and failed.
    Failed(Failure<E>),
    /// It was not run; or, where the refusal is one of a transaction, nothing of what it did was committed, as far
    /// as the refusal's description says.
    Refused(Rejection),
    /// It was done by an earlier run, and what is recorded is no JSON of a `T`: its type has changed since, or a
    /// resolver has answered with something else. Nothing was run, and the record stays as it is.
    Unreadable(UnreadableResult),
}

impl<E> OnceError<E> {
    /// After how long the same call may succeed, where a refusal says so: the operation is running elsewhere, the
    /// store is out of reach, there is no place. `None` where waiting by itself does not help, and for the
    /// operation's own failures, about which its caller knows more.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Refused(rejection) => rejection.retry_after_seconds().map(Duration::from_secs),
            Self::Failed(_) | Self::Unreadable(_) => None,
        }
    }

    /// Whether the operation is done, although its result cannot be had here: it was not kept, or cannot be read.
    /// A message whose result nobody needs may be acknowledged.
    pub fn is_done(&self) -> bool {
        match self {
            Self::Refused(rejection) => matches!(rejection, Rejection::ResponseNotRetained { .. }),
            Self::Unreadable(_) => true,
            Self::Failed(_) => false,
        }
    }
}

impl<E> fmt::Display for OnceError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed(Failure::NothingHappened(_)) => {
                f.write_str("the operation failed without having had an effect")
            }
            Self::Failed(Failure::Unknown(_)) => {
                f.write_str("the operation failed, and its outcome is unknown")
            }
            Self::Refused(Rejection::KeyInvalid(why)) => {
                write!(f, "the operation's key cannot be used: {why}")
            }
            Self::Refused(Rejection::TransactionMisused(why)) => {
                write!(f, "the operation's transaction was misused: {why}")
            }
            Self::Refused(rejection) => {
                write!(f, "the operation was refused with {}", rejection.code())
            }
            Self::Unreadable(error) => fmt::Display::fmt(error, f),
        }
    }
}

impl<E: error::Error + 'static> error::Error for OnceError<E> {
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        match self {
            Self::Failed(failure) => Some(failure.error()),
            Self::Refused(_) | Self::Unreadable(_) => None,
        }
    }
}

/// The recorded result of an operation is no JSON of the type asked for.
///
/// Neither its text nor its `Debug` output shows any of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UnreadableResult {
    /// What serde_json says may hold a part of the result, so only the kind and the place are kept.
    category: Category,
    line: usize,
    column: usize,
}

impl From<serde_json::Error> for UnreadableResult {
    fn from(error: serde_json::Error) -> Self {
        Self {
            category: error.classify(),
            line: error.line(),
            column: error.column(),
        }
    }
}

impl UnreadableResult {
    /// Whether it is JSON, of another type; else it is no JSON at all.
    pub fn is_other_type(&self) -> bool {
        self.category == Category::Data
    }
}

impl fmt::Display for UnreadableResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { line, column, .. } = self;
        let what = match self.is_other_type() {
            true => "is not of the type asked for",
            false => "is no JSON",
        };
        write!(
            f,
            "the operation is done, but its recorded result {what}, as line {line}, column {column} of it shows"
        )
    }
}

impl error::Error for UnreadableResult {}

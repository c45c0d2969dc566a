//! Why there is no result.

use std::{error, fmt, time::Duration};

use http::StatusCode;
use serde_json::error::Category;

use crate::{Rejection, checkpoint::is_too_deep, scope::MAX_SCOPE_LEN};

/// When an operation whose outcome is unknown may be asked for again.
const UNKNOWN_RETRY_AFTER: Duration = Duration::from_secs(60);

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
    ///
    /// Where it has saved [checkpoints](crate::Idempotency::checkpoint), they are kept for the next run, and the
    /// fingerprint with them, until [`ttl`](crate::IdempotencyLayer::ttl) is over: the next call with the same
    /// fingerprint runs, and one with another is refused as a key that is reused.
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

    /// The same failure with another error, for an operation whose errors are wider than those of its parts.
    ///
    /// ```
    /// use std::io;
    ///
    /// use tower_idempotency::Failure;
    ///
    /// let refused = Failure::NothingHappened(io::Error::from(io::ErrorKind::ConnectionRefused));
    /// let told = refused.map(|error| error.kind());
    /// assert_eq!(told, Failure::NothingHappened(io::ErrorKind::ConnectionRefused));
    /// ```
    pub fn map<F>(self, into: impl FnOnce(E) -> F) -> Failure<F> {
        match self {
            Self::NothingHappened(error) => Failure::NothingHappened(into(error)),
            Self::Unknown(error) => Failure::Unknown(into(error)),
        }
    }
}

/// The kind alone; what the operation failed with is the [`source`](error::Error::source).
impl<E> fmt::Display for Failure<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NothingHappened(_) => "the operation failed without having had an effect",
            Self::Unknown(_) => "the operation failed, and its outcome is unknown",
        })
    }
}

impl<E: error::Error + 'static> error::Error for Failure<E> {
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        Some(self.error())
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
    ///
    /// 60 s for [`Rejection::OutcomeUnknown`]: another instance may run it or find out what became of it, a resolver
    /// may know more by then, and a message that is given up is lost. What ends it where nobody ever knows is
    /// the number of deliveries after which a queue gives up.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Refused(Rejection::OutcomeUnknown { .. }) => Some(UNKNOWN_RETRY_AFTER),
            Self::Refused(rejection) => rejection.retry_after_seconds().map(Duration::from_secs),
            Self::Failed(_) | Self::Unreadable(_) => None,
        }
    }

    /// Whether the operation is done, although its result cannot be had here: it was not kept, or cannot be read.
    /// A message whose result nobody needs may be acknowledged.
    ///
    /// False for a [`Rejection::ResponseNotRetained`] whose status is not that of a success: such an operation does
    /// not run again, and nobody here knows whether it was done. So it is after an operation in a transaction
    /// has ended that by itself, with a `COMMIT` or `ROLLBACK` of its own: look up what was done.
    pub fn is_done(&self) -> bool {
        match self {
            Self::Refused(Rejection::ResponseNotRetained { status, .. }) => is_success(*status),
            Self::Unreadable(_) => true,
            Self::Refused(_) | Self::Failed(_) => false,
        }
    }
}

impl<E> fmt::Display for OnceError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed(failure) => fmt::Display::fmt(failure, f),
            Self::Refused(Rejection::KeyInvalid(why)) => {
                write!(f, "the operation's key cannot be used: {why}")
            }
            // The only reason that there is for an operation, which always comes with one.
            Self::Refused(Rejection::ScopeUnknown) => {
                write!(f, "the operation's scope cannot be used: it has more than {MAX_SCOPE_LEN} bytes")
            }
            Self::Refused(Rejection::ResponseNotRetained { status, .. }) if !is_success(*status) => {
                f.write_str(
                    "the operation ended its transaction by itself, or a resolver has answered for it with a status that is no success; it does not run again, so look up what was done",
                )
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

/// Whether the status that a result had says that its operation is done.
fn is_success(status: Option<StatusCode>) -> bool {
    status.is_some_and(|status| status.is_success())
}

/// The recorded result of an operation is no JSON of the type asked for.
///
/// Neither its text nor its `Debug` output shows any of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UnreadableResult {
    what: What,
    line: usize,
    column: usize,
}

/// What serde_json says may hold a part of the result, so only the kind and the place are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum What {
    Absent,
    OtherType,
    TooDeep,
    NoJson,
}

impl UnreadableResult {
    /// Why this could not be read.
    pub(super) fn of(json: &[u8], error: &serde_json::Error) -> Self {
        let what = match error.classify() {
            _ if json.is_empty() => What::Absent,
            Category::Data => What::OtherType,
            _ if is_too_deep(error) => What::TooDeep,
            _ => What::NoJson,
        };
        Self {
            what,
            line: error.line(),
            column: error.column(),
        }
    }

    /// Whether it is JSON, of another type; else it is nested too deep, or no JSON at all.
    pub fn is_other_type(&self) -> bool {
        self.what == What::OtherType
    }
}

impl fmt::Display for UnreadableResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.what {
            What::Absent => {
                return f.write_str(
                    "the operation is done, but it has no result, since a resolver has answered for it without a body",
                );
            }
            What::OtherType => "is not of the type asked for",
            What::TooDeep => "is nested deeper than the 127 levels that are read",
            What::NoJson => "is no JSON",
        };
        let Self { line, column, .. } = self;
        write!(
            f,
            "the operation is done, but its recorded result {what}, as line {line}, column {column} of it shows"
        )
    }
}

impl error::Error for UnreadableResult {}

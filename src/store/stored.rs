//! What the rows of all SQL stores have in common: the numbers that modes and states are stored as, and
//! what is said of a row that cannot be read.

use super::{StoreError, StoreErrorKind};
use crate::record::{Mode, State};

/// Why a row cannot be understood.
pub(super) type Damage = Box<dyn std::error::Error + Send + Sync>;

pub(super) fn damaged(damage: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> StoreError {
    StoreError::new(
        StoreErrorKind::Corrupt,
        "a stored record cannot be read: it was damaged or changed by hand; forget it once its effect is known",
    )
    .with_source(damage)
}

pub(super) fn mode_code(mode: Mode) -> i16 {
    match mode {
        Mode::Plain => 1,
        Mode::Transactional => 2,
    }
}

pub(super) fn mode_of(code: i16) -> Option<Mode> {
    match code {
        1 => Some(Mode::Plain),
        2 => Some(Mode::Transactional),
        _ => None,
    }
}

#[cfg(feature = "sqlite")]
pub(super) fn state_code(state: State) -> i16 {
    match state {
        State::Running => 1,
        State::Completed => 2,
        State::Abandoned => 3,
        State::Released => 4,
    }
}

pub(super) fn state_of(code: i16) -> Option<State> {
    match code {
        1 => Some(State::Running),
        2 => Some(State::Completed),
        3 => Some(State::Abandoned),
        4 => Some(State::Released),
        _ => None,
    }
}

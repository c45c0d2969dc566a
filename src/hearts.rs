//! In which runtimes a heart beats.

use std::{
    collections::HashSet,
    hash::{Hash, Hasher},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use tokio::runtime::{self, Handle};

use crate::live::AsIs;

/// Each runtime from which runs come has a heartbeat of its own: that of another one may end before they do,
/// or stand still while nobody drives it.
#[derive(Default)]
pub(crate) struct Hearts {
    /// The runtime that was looked up last, which mostly is the only one. 0: none.
    latest: AtomicU64,
    beating: Mutex<HashSet<runtime::Id>>,
}

impl Hearts {
    /// `None` when one beats there already.
    pub(crate) fn begin(self: &Arc<Self>, runtime: &Handle) -> Option<Heart> {
        let id = runtime.id();
        let number = number(id);
        if self.latest.load(Ordering::Relaxed) == number {
            return None;
        }
        let mut beating = self.beating();
        self.latest.store(number, Ordering::Relaxed);
        let hearts = self.clone();
        beating.insert(id).then_some(Heart { hearts, id })
    }

    fn beating(&self) -> MutexGuard<'_, HashSet<runtime::Id>> {
        // No change is ever left half done.
        self.beating.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Says that a heart beats, and stops saying so when its task ends, however it ends.
pub(crate) struct Heart {
    hearts: Arc<Hearts>,
    id: runtime::Id,
}

impl Drop for Heart {
    fn drop(&mut self) {
        let mut beating = self.hearts.beating();
        beating.remove(&self.id);
        self.hearts.latest.store(0, Ordering::Relaxed);
    }
}

/// An id is a number, and says so only to those who hash it.
fn number(id: runtime::Id) -> u64 {
    let mut number = AsIs::default();
    id.hash(&mut number);
    number.finish()
}

//! In which runtimes a heart beats, and what they know of the claims.

use std::{
    collections::{HashMap, HashSet},
    hash::{Hash, Hasher},
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::{
    runtime::{self, Handle},
    time::Instant,
};

use crate::{
    live::{AsIs, lock},
    record::Token,
    store::Ticket,
};

/// Each runtime from which runs come has a heartbeat of its own: that of another one may end before they do,
/// or stand still while nobody drives it.
#[derive(Default)]
pub(crate) struct Hearts {
    /// The runtime that was looked up last, which mostly is the only one. 0: none.
    latest: AtomicU64,
    beating: Mutex<HashSet<runtime::Id>>,
    believed: Mutex<Believed>,
}

impl Hearts {
    /// `None` when one beats there already.
    pub(crate) fn begin(self: &Arc<Self>, runtime: &Handle) -> Option<Heart> {
        let id = runtime.id();
        let number = number(id);
        if self.latest.load(Ordering::Relaxed) == number {
            return None;
        }
        let is_new = {
            let mut beating = self.beating();
            self.latest.store(number, Ordering::Relaxed);
            beating.insert(id)
        };
        // Made only where it is wanted: dropped, it would say that none beats there.
        is_new.then(|| Heart {
            hearts: self.clone(),
            id,
        })
    }

    fn beating(&self) -> MutexGuard<'_, HashSet<runtime::Id>> {
        lock(&self.beating)
    }

    /// Not to be held while a store is waited for.
    pub(crate) fn believed(&self) -> MutexGuard<'_, Believed> {
        lock(&self.believed)
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

/// Until when the claims of this process are known to be believed alive, by its own clock. All its hearts know
/// the same: one that stood still must not call lost what another has renewed.
#[derive(Default)]
pub(crate) struct Believed {
    until: HashMap<Token, Instant>,
    last: Option<Instant>,
}

impl Believed {
    /// A beat begins. A claim that is new here was made after the last one, and is believed alive from then.
    pub(crate) fn begins(&mut self, tickets: &[Ticket], asked: Instant, lease: Duration) {
        let since = self.last.replace(asked).unwrap_or(asked);
        let before = std::mem::take(&mut self.until);
        self.until.extend(tickets.iter().map(|ticket| {
            let until = before.get(&ticket.token).copied();
            (ticket.token, until.unwrap_or(since + lease))
        }));
    }

    /// Answers whether this is the latest that is known of the claim.
    pub(crate) fn renewed(&mut self, token: Token, until: Instant) -> bool {
        let known = self.until.entry(token).or_insert(until);
        let is_latest = *known <= until;
        *known = until.max(*known);
        is_latest
    }

    pub(crate) fn is_over(&self, token: Token, now: Instant) -> bool {
        self.until.get(&token).is_none_or(|until| *until <= now)
    }
}

/// An id is a number, and says so only to those who hash it.
fn number(id: runtime::Id) -> u64 {
    let mut number = AsIs::default();
    id.hash(&mut number);
    number.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_beats_in_each_runtime_until_its_task_ends() {
        let hearts = Arc::new(Hearts::default());
        let runtime = || runtime::Builder::new_current_thread().build().unwrap();
        let (one, other) = (runtime(), runtime());
        let first = hearts.begin(one.handle()).expect("the first one");
        assert!(hearts.begin(one.handle()).is_none());
        let second = hearts.begin(other.handle()).expect("one in each");
        for _ in 0..2 {
            assert!(hearts.begin(one.handle()).is_none());
            assert!(hearts.begin(other.handle()).is_none());
        }
        drop(first);
        assert!(hearts.begin(other.handle()).is_none());
        let again = hearts.begin(one.handle());
        assert!(again.is_some());
        drop((second, again));
        assert!(hearts.begin(other.handle()).is_some());
    }
}

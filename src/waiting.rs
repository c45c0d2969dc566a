//! Requests that wait for another one's run to end.

use std::{
    collections::HashMap,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::{
    sync::{Notify, futures::Notified},
    time::Instant,
};

use crate::{bounded::first, record::RecordId};

const FIRST_POLL_MS: u64 = 25;
const LAST_POLL_MS: u64 = 1_000;

/// Who waits for which key. A run of this process wakes its waiters when it settles; runs of other
/// processes are asked for by one waiter per key, in growing intervals.
#[derive(Default)]
pub(crate) struct Waiting {
    places: Mutex<HashMap<RecordId, Arc<Place>>>,
    count: AtomicUsize,
}

struct Place {
    waiters: AtomicUsize,
    settled: Notify,
    /// Held by the one waiter that asks the store next.
    turn: tokio::sync::Mutex<()>,
    poll_ms: AtomicU64,
}

impl Waiting {
    /// Joins those who wait for this key; `None` when `limit` wait already.
    pub(crate) fn join(&self, id: &RecordId, limit: usize) -> Option<Waiter<'_>> {
        if self.count.fetch_add(1, Ordering::SeqCst) >= limit {
            self.count.fetch_sub(1, Ordering::SeqCst);
            return None;
        }
        let mut places = self.places();
        let place = places.entry(id.clone()).or_insert_with(|| {
            Arc::new(Place {
                waiters: AtomicUsize::new(0),
                settled: Notify::new(),
                turn: tokio::sync::Mutex::new(()),
                poll_ms: AtomicU64::new(FIRST_POLL_MS),
            })
        });
        place.waiters.fetch_add(1, Ordering::SeqCst);
        Some(Waiter {
            waiting: self,
            id: id.clone(),
            place: place.clone(),
        })
    }

    /// How many wait.
    #[cfg(feature = "metrics")]
    pub(crate) fn len(&self) -> usize {
        self.count.load(Ordering::SeqCst)
    }

    /// Tells those who wait for this key that its run has ended.
    pub(crate) fn settled(&self, id: &RecordId) {
        if self.count.load(Ordering::SeqCst) == 0 {
            return;
        }
        let place = self.places().get(id).cloned();
        if let Some(place) = place {
            place.settled.notify_waiters();
        }
    }

    /// Tells all who wait, whatever for.
    pub(crate) fn wake_all(&self) {
        for place in self.places().values() {
            place.settled.notify_waiters();
        }
    }

    fn places(&self) -> MutexGuard<'_, HashMap<RecordId, Arc<Place>>> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One who waits.
pub(crate) struct Waiter<'a> {
    waiting: &'a Waiting,
    id: RecordId,
    place: Arc<Place>,
}

impl Waiter<'_> {
    /// Starts to listen. Listen before you look, or a run that ends in between is missed.
    pub(crate) fn listen(&self) -> Pin<Box<Notified<'_>>> {
        let mut news = Box::pin(self.place.settled.notified());
        news.as_mut().enable();
        news
    }

    /// Waits until it is worth looking again, or the deadline is over.
    pub(crate) async fn worth_looking(&self, news: Pin<Box<Notified<'_>>>, deadline: Instant) {
        let news = first(news, self.my_turn_to_poll());
        // Either way there is nothing to do but to look.
        drop(tokio::time::timeout_at(deadline, news).await);
    }

    /// Tells the others that there is something to see.
    pub(crate) fn tell(&self) {
        self.place.settled.notify_waiters();
    }

    async fn my_turn_to_poll(&self) {
        let _turn = self.place.turn.lock().await;
        let pause = self.place.poll_ms.load(Ordering::Relaxed);
        tokio::time::sleep(Duration::from_millis(pause)).await;
        let next = (pause * 2).min(LAST_POLL_MS);
        self.place.poll_ms.store(next, Ordering::Relaxed);
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        self.waiting.count.fetch_sub(1, Ordering::SeqCst);
        let mut places = self.waiting.places();
        if self.place.waiters.fetch_sub(1, Ordering::SeqCst) == 1 {
            places.remove(&self.id);
        }
    }
}

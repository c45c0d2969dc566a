//! Clients that retry, each action under the one key it has.

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use tokio::{
    sync::watch,
    task::JoinSet,
    time::{sleep, timeout},
};

use crate::{
    CLIENTS,
    chaos::Fleet,
    ledger::{Ledger, Seen},
    support::wire::{Reply, Wire, raw_post},
};

/// After this long without an outcome an action hangs.
pub const TOO_LONG: Duration = Duration::from_secs(45);

pub struct Clients {
    pub fleet: Arc<Fleet>,
    pub ledger: Ledger,
    pub over: watch::Receiver<bool>,
}

impl Clients {
    /// Drives so many clients at once, until it is over.
    pub fn drive_all(self: &Arc<Self>) -> JoinSet<()> {
        let mut driven = JoinSet::new();
        for client in 0..CLIENTS {
            let clients = self.clone();
            driven.spawn(async move { clients.drive_actions(client).await });
        }
        driven
    }

    /// One client: begins actions until it is over, and leaves none without an outcome.
    async fn drive_actions(&self, client: usize) {
        for number in 0.. {
            if self.is_over() {
                return;
            }
            self.drive(&format!("action-{client}-{number}")).await;
            // Long after its answer, and after some kills, an action is answered alike.
            if rand::random_ratio(1, 2)
                && let Some(key) = self.ledger.any_answered()
            {
                self.ask(&key).await;
            }
        }
    }

    /// Retries until there is an outcome, and then some more.
    async fn drive(&self, key: &str) {
        self.retry(key, TOO_LONG).await;
        for _ in 0..rand::random_range(1..=3) {
            pause(0, 200).await;
            self.ask(key).await;
        }
    }

    /// Sends the action, sometimes twice at once, until there is an outcome.
    pub async fn retry(&self, key: &str, limit: Duration) -> Seen {
        let begun = Instant::now();
        loop {
            let seen = if rand::random_ratio(1, 4) {
                let (one, other) = tokio::join!(self.ask(key), self.ask(key));
                one.max(other)
            } else {
                self.ask(key).await
            };
            if seen != Seen::Nothing {
                return seen;
            }
            if begun.elapsed() > limit {
                self.ledger.fault(key, "it comes to no end");
                return Seen::Nothing;
            }
            pause(5, 100).await;
        }
    }

    fn is_over(&self) -> bool {
        *self.over.borrow()
    }

    /// Sends the action once, to any instance.
    async fn ask(&self, key: &str) -> Seen {
        match self.fleet.any() {
            Some(address) => self.ask_at(address, key).await,
            None => Seen::Nothing,
        }
    }

    pub async fn ask_at(&self, address: SocketAddr, key: &str) -> Seen {
        let request = raw_post(key, &format!("{{\"action\":\"{key}\"}}"));
        let patience = self.patience();
        let sent = self.ledger.sent(key);
        let reply = exchange(address, &request, patience).await;
        self.ledger.received(key, sent, reply)
    }

    /// Some do not wait for the answer, and some not as long as a process may stand still, so that they
    /// ask another one meanwhile.
    fn patience(&self) -> Duration {
        let milliseconds = match rand::random_range(0..10) {
            _ if self.is_over() => 3_000,
            0 => rand::random_range(1..60),
            1..6 => rand::random_range(150..700),
            _ => 3_000,
        };
        Duration::from_millis(milliseconds)
    }

    /// Asks every key until it has its last word, for as long as this at most.
    pub async fn ask_once_more_for_every_key(
        self: &Arc<Self>,
        limit: Duration,
    ) -> HashMap<String, Seen> {
        let keys = Arc::new(Mutex::new(self.ledger.keys()));
        let mut asked = JoinSet::new();
        for _ in 0..CLIENTS {
            let (clients, keys) = (self.clone(), keys.clone());
            asked.spawn(async move {
                let next = || keys.lock().unwrap().pop();
                let mut last_words = Vec::new();
                while let Some(key) = next() {
                    let seen = clients.retry(&key, limit).await;
                    last_words.push((key, seen));
                }
                last_words
            });
        }
        asked.join_all().await.into_iter().flatten().collect()
    }
}

pub async fn pause(least: u64, most: u64) {
    sleep(Duration::from_millis(rand::random_range(least..=most))).await;
}

/// Status 0 where there is no answer, or not all of it.
async fn exchange(address: SocketAddr, request: &[u8], patience: Duration) -> Reply {
    let answered = async {
        let mut wire = Wire::to(address).await.ok()?;
        wire.try_write(request).await.then_some(())?;
        Some(wire.read_reply().await)
    };
    let answered = timeout(patience, answered).await;
    answered.ok().flatten().unwrap_or_default()
}

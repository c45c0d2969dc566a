//! Clients that retry, each action under the one key it has.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use tokio::{
    sync::watch,
    task::JoinSet,
    time::{sleep, timeout},
};
use tower_idempotency::{IdempotencyKey, Owner, PostgresStore, RecordId, Scope, store::Inspect};

use crate::{
    CLIENTS,
    chaos::Fleet,
    ledger::{Ledger, Seen},
    support::wire::{Reply, Wire, raw_post},
};

/// After this long without an outcome an action hangs.
const TOO_LONG: Duration = Duration::from_secs(45);

pub struct Clients {
    pub fleet: Arc<Fleet>,
    pub ledger: Ledger,
}

impl Clients {
    /// One client: begins actions until it is over, and leaves none without an outcome.
    pub async fn drive_actions(&self, client: usize, over: watch::Receiver<bool>) {
        for number in 0.. {
            if *over.borrow() {
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

    /// What the process at this address claims as.
    pub async fn owner_at(&self, address: SocketAddr, store: &PostgresStore) -> Owner {
        let key = format!("action-at-{address}");
        let begun = Instant::now();
        while self.ask_at(address, &key).await == Seen::Nothing {
            assert!(begun.elapsed() < TOO_LONG, "a process has no answer");
            pause(5, 100).await;
        }
        let id = RecordId::new(Scope::shared(), IdempotencyKey::new(&*key));
        store.get(&id).await.unwrap().unwrap().owner
    }

    /// Retries until there is an outcome, and then some more.
    async fn drive(&self, key: &str) {
        self.retry(key).await;
        for _ in 0..rand::random_range(1..=3) {
            pause(0, 200).await;
            self.ask(key).await;
        }
    }

    /// Sends the action, sometimes twice at once, until there is an outcome.
    async fn retry(&self, key: &str) -> Seen {
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
            if begun.elapsed() > TOO_LONG {
                self.ledger.fault(key, "it comes to no end");
                return Seen::Nothing;
            }
            pause(5, 100).await;
        }
    }

    /// Sends the action once, to any instance.
    async fn ask(&self, key: &str) -> Seen {
        match self.fleet.any() {
            Some(address) => self.ask_at(address, key).await,
            None => Seen::Nothing,
        }
    }

    async fn ask_at(&self, address: SocketAddr, key: &str) -> Seen {
        let request = raw_post(key, &format!("{{\"action\":\"{key}\"}}"));
        // Some do not wait for the answer.
        let patience = match rand::random_ratio(1, 10) {
            true => rand::random_range(1..60),
            false => 3_000,
        };
        let sent = self.ledger.sent(key);
        let reply = exchange(address, &request, Duration::from_millis(patience)).await;
        self.ledger.received(key, sent, reply)
    }

    /// Asks every key until it has its last word: its answer, or that its outcome is unknown. Answers
    /// which keys are unknown.
    pub async fn ask_once_more_for_every_key(self: &Arc<Self>) -> Vec<String> {
        let keys = Arc::new(Mutex::new(self.ledger.keys()));
        let mut asked = JoinSet::new();
        for _ in 0..CLIENTS {
            let (clients, keys) = (self.clone(), keys.clone());
            asked.spawn(async move {
                let next = || keys.lock().unwrap().pop();
                let mut unknown = Vec::new();
                while let Some(key) = next() {
                    if clients.retry(&key).await == Seen::Unknown {
                        unknown.push(key);
                    }
                }
                unknown
            });
        }
        asked.join_all().await.concat()
    }
}

async fn pause(least: u64, most: u64) {
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

//! Those that still live at the end: what they have begun comes to rest.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use tokio::time::sleep;
use tower_idempotency::{IdempotencyKey, Owner, PostgresStore, RecordId, Scope, store::Inspect};

use crate::{
    clients::{Clients, TOO_LONG, pause},
    ledger::{Ledger, Seen},
};

/// How long it may take until nothing goes on any more.
const PATIENCE: Duration = Duration::from_secs(15);

/// What the process at this address claims as.
pub async fn owner_at(address: SocketAddr, clients: &Clients, store: &PostgresStore) -> Owner {
    let key = format!("action-at-{address}");
    let begun = Instant::now();
    while clients.ask_at(address, &key).await == Seen::Nothing {
        assert!(begun.elapsed() < TOO_LONG, "a process has no answer");
        pause(5, 100).await;
    }
    let id = RecordId::new(Scope::shared(), IdempotencyKey::new(&*key));
    store.get(&id).await.unwrap().unwrap().owner
}

/// Waits for what these owners, which live, have begun: nothing of it stays in flight, or unknown.
pub async fn settle(owners: &[Owner], store: &PostgresStore, ledger: &Ledger) {
    let begun = Instant::now();
    loop {
        let counts = store.counts().await.unwrap();
        let abandoned = store.abandoned(None, usize::MAX).await.unwrap();
        let left: Vec<_> = { abandoned.iter() }
            .filter(|record| owners.contains(&record.owner))
            .collect();
        if counts.running == 0 && left.is_empty() {
            return;
        }
        if begun.elapsed() > PATIENCE {
            for record in left {
                let key = String::from_utf8_lossy(record.id.key.as_bytes());
                ledger.fault(&key, "unknown, though its process lives");
            }
            return ledger.fault("all actions", format!("not at rest: {counts:?}"));
        }
        sleep(Duration::from_millis(50)).await;
    }
}

//! Two processes, of which one is killed at the worst moment: after the effect, before the record.

use std::time::{Duration, Instant};

use sqlx::postgres::PgConnection;
use tokio::time::sleep;

use crate::{
    LEASE,
    service::{self, HOLD},
    support::{
        server::Server,
        wire::{Reply, Wire, raw_post},
    },
};

const BODY: &str = "{\"amount_satang\":25000}";

async fn effects(connection: &mut PgConnection) -> i64 {
    let count = sqlx::query_scalar("SELECT count(*) FROM drill_effects");
    count.fetch_one(connection).await.unwrap()
}

async fn exchange(address: std::net::SocketAddr, request: &[u8]) -> Reply {
    let mut wire = Wire::to(address).await.unwrap();
    wire.write(request).await;
    wire.read_reply().await
}

// L1, L11, over two processes
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_kill_between_effect_and_record_the_other_process_waits_out_the_lease_and_refuses()
{
    let server = Server::start().await;
    service::create_effects(&server).await;
    let folder = tempfile::tempdir().unwrap();
    let journal = folder.path().join("journal");
    let mut owner = service::spawn(0, &server.url(), &journal);
    let mut other = service::spawn(1, &server.url(), &journal);
    let (owner_at, other_at) = (owner.address().await, other.address().await);
    let mut connection = server.connect().await;

    let request = raw_post(HOLD, BODY);
    let mut first = Wire::to(owner_at).await.unwrap();
    first.write(&request).await;
    while effects(&mut connection).await == 0 {
        sleep(Duration::from_millis(5)).await;
    }
    // Longer than a lease: the heartbeat of the owner keeps it alive, for the other process too.
    sleep(LEASE * 2).await;
    let said = exchange(other_at, &request).await.said();
    assert_eq!(said, (409, "idempotency_in_flight".into()));
    owner.kill().await;
    let killed = Instant::now();
    let said = exchange(other_at, &request).await.said();
    assert_eq!(said, (409, "idempotency_in_flight".into()));

    // Nobody can say when the last heartbeat was, but not later than the kill.
    let unknown = (409, "idempotency_outcome_unknown".into());
    while exchange(other_at, &request).await.said() != unknown {
        let waited = killed.elapsed();
        assert!(waited < LEASE + Duration::from_secs(2), "after {waited:?}");
        sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(exchange(other_at, &request).await.said(), unknown);
    assert_eq!(effects(&mut connection).await, 1, "it happened, and once");
    // Another fingerprint is refused as such all the same.
    let said = exchange(other_at, &raw_post(HOLD, "{}")).await.said();
    assert_eq!(said, (409, "idempotency_key_reused".into()));
}

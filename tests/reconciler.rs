//! What runs did that were cut off is found out by sweeps, and by hand.

mod support;

#[path = "reconciler/by_hand.rs"]
mod by_hand;
#[path = "reconciler/crowd.rs"]
mod crowd;
#[path = "reconciler/left.rs"]
mod left;
#[path = "reconciler/running.rs"]
mod running;
#[path = "reconciler/said.rs"]
mod said;
#[cfg(feature = "sealing")]
#[path = "reconciler/sealed.rs"]
mod sealed;
#[path = "reconciler/sweeps.rs"]
mod sweeps;
#[path = "reconciler/trouble.rs"]
mod trouble;

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::http::StatusCode;
use bytes::Bytes;
use support::*;
use tower_idempotency::{
    Abandoned, ExactRequest, FingerprintScheme, IdempotencyKey, IdempotencyLayer, Mode, RecordId,
    Scope, State, Swept, Verdict,
    store::{Claim, ClaimRequest, Inspect, Settled, Store, Ticket},
};

const UNKNOWN: &str = "idempotency_outcome_unknown";
const LEASE: Duration = Duration::from_secs(30);
/// Longer than any record is held to find out about it.
const HOLD: Duration = Duration::from_secs(120);

fn layer<S>(store: &S) -> IdempotencyLayer<S>
where
    S: Inspect + tower_idempotency::store::Checkpoints,
{
    IdempotencyLayer::new(store.clone())
        .single_tenant()
        .lease(LEASE)
}

fn paid() -> Verdict {
    Verdict::answer((StatusCode::CREATED, "paid"))
}

/// The claim that the layer would make for a [`post`] with the body `A`.
fn claim(key: &str) -> ClaimRequest {
    let (head, _) = post(key, "A").into_parts();
    let fingerprint = ExactRequest.fingerprint(&head, &Bytes::from("A")).unwrap();
    let id = RecordId::new(Scope::shared(), IdempotencyKey::new(key));
    ClaimRequest::new(id, ExactRequest.name(), fingerprint)
}

/// A claim whose run was cut off.
async fn abandon(store: &impl Store, claim: ClaimRequest) -> Ticket {
    let Claim::Won(ticket) = store.claim(claim).await.unwrap() else {
        panic!("not won");
    };
    assert_eq!(store.abandon(&ticket).await.unwrap(), Settled::Done);
    ticket
}

async fn abandoned(store: &impl Store, keys: &[&str]) {
    for key in keys {
        let _settled_by_somebody_else = abandon(store, claim(key)).await;
    }
}

/// Answers by the first letter of the key, and keeps the keys it was asked about in order.
#[derive(Clone, Default)]
struct Known {
    asked: Arc<Mutex<Vec<String>>>,
}

impl Known {
    fn resolver(&self) -> impl Fn(Abandoned) -> std::future::Ready<Verdict> + Clone + use<> {
        let asked = self.asked.clone();
        move |abandoned: Abandoned| {
            let key = abandoned.key().unwrap().as_str().unwrap().to_owned();
            let verdict = match key.as_bytes()[0] {
                b'a' => Verdict::answer((StatusCode::CREATED, format!("paid {key}"))),
                b'd' => Verdict::DidNotHappen,
                _ => Verdict::Leave,
            };
            asked.lock().unwrap().push(key);
            std::future::ready(verdict)
        }
    }

    fn asked(&self) -> Vec<String> {
        std::mem::take(&mut self.asked.lock().unwrap())
    }
}

/// The counts of a sweep, in short.
#[track_caller]
fn assert_swept(swept: Swept, seen: usize, answered: usize, freed: usize, left: usize) {
    let counts = (swept.seen, swept.answered, swept.freed, swept.left);
    assert_eq!(counts, (seen, answered, freed, left), "{swept:?}");
}

fn counter() -> (Arc<AtomicUsize>, impl Fn() -> usize) {
    let count = Arc::new(AtomicUsize::new(0));
    let look = count.clone();
    (count, move || look.load(Ordering::SeqCst))
}

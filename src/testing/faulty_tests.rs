use tokio::time::{Instant, timeout};

use super::*;
use crate::{Fingerprint, IdempotencyKey, MemoryStore, Scope};

fn request() -> ClaimRequest {
    let id = RecordId::new(Scope::shared(), IdempotencyKey::new("k"));
    ClaimRequest::new(id, "test", Fingerprint::from_bytes([7; 32]))
}

fn store() -> FaultyStore<MemoryStore> {
    FaultyStore::new(MemoryStore::new())
}

#[tokio::test]
async fn a_fault_before_leaves_the_store_untouched() {
    let store = store();
    store.fail(Operation::Claim, Fault::Before, Times::Once);
    let request = request();
    let error = store.claim(request.clone()).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable);
    assert_eq!(store.get(&request.id).await.unwrap(), None);
}

#[tokio::test]
async fn a_fault_after_loses_the_answer_and_not_the_claim() {
    let store = store();
    store.fail(Operation::Claim, Fault::After, Times::Once);
    let request = request();
    store.claim(request.clone()).await.unwrap_err();
    assert!(store.get(&request.id).await.unwrap().is_some());
    let again = store.claim(request).await.unwrap();
    assert!(matches!(again, Claim::Won(_)), "{again:?}");
}

#[tokio::test]
async fn faults_follow_one_another_and_a_clone_plans_them_too() {
    let store = store();
    let held_by_a_layer = store.clone();
    store.fail(Operation::Purge, Fault::Before, Times::Next(2));
    store.fail(Operation::Purge, Fault::After, Times::Next(0));
    store.fail(
        Operation::Purge,
        Fault::DelayAfter(Duration::ZERO),
        Times::Once,
    );
    store.fail(Operation::Purge, Fault::Before, Times::Always);
    let mut failed = Vec::new();
    for _ in 0..5 {
        failed.push(held_by_a_layer.purge(1).await.is_err());
    }
    assert_eq!(failed, [true, true, false, true, true]);
    store.clear();
    assert!(held_by_a_layer.purge(1).await.is_ok());
    assert_eq!(store.calls(Operation::Purge), 6);
    assert_eq!(store.calls(Operation::Claim), 0);
    assert_eq!(store.total_calls(), 6);
}

#[tokio::test(start_paused = true)]
async fn a_delay_is_as_long_as_asked_before_or_after_the_store() {
    let store = store();
    let request = request();
    let second = Duration::from_secs(1);
    store.fail(Operation::Claim, Fault::DelayBefore(second), Times::Once);
    store.fail(Operation::Claim, Fault::DelayAfter(second), Times::Once);
    let start = Instant::now();
    let soon = timeout(second / 2, store.claim(request.clone())).await;
    assert!(soon.is_err());
    assert_eq!(store.get(&request.id).await.unwrap(), None);
    let soon = timeout(second / 2, store.claim(request.clone())).await;
    assert!(soon.is_err());
    assert!(store.get(&request.id).await.unwrap().is_some());
    assert_eq!(start.elapsed(), second);
}

#[tokio::test(start_paused = true)]
async fn a_hanging_call_is_counted_and_ends_when_dropped() {
    let store = store();
    let request = request();
    store.fail(Operation::Claim, Fault::HangBefore, Times::Once);
    store.fail(Operation::Claim, Fault::HangAfter, Times::Once);
    for stands in [false, true] {
        let task = tokio::spawn({
            let (store, request) = (store.clone(), request.clone());
            async move { store.claim(request).await }
        });
        store
            .called(Operation::Claim, 1 + usize::from(stands))
            .await;
        let hung = timeout(Duration::from_secs(3600), task).await;
        assert!(hung.is_err());
        assert_eq!(store.get(&request.id).await.unwrap().is_some(), stands);
    }
}

#[tokio::test]
async fn a_takeover_fails_as_told_and_is_counted() {
    let store = store();
    let Claim::Won(late) = store.claim(request()).await.unwrap() else {
        panic!("not won");
    };
    let _ = store.abandon(&late).await.unwrap();
    let token = Token::random();
    let hold = Duration::from_secs(60);
    let take_over = || store.take_over(&late.id, late.token, token, hold);
    store.fail(Operation::TakeOver, Fault::Before, Times::Once);
    store.fail(Operation::TakeOver, Fault::After, Times::Once);
    take_over().await.unwrap_err();
    let record = store.get(&late.id).await.unwrap().unwrap();
    assert_eq!(record.token, late.token);
    take_over().await.unwrap_err();
    let record = store.get(&late.id).await.unwrap().unwrap();
    assert_eq!(record.token, token);
    let taken = take_over().await.unwrap().unwrap();
    assert_eq!((taken.token, taken.attempt), (token, 1));
    assert_eq!(store.calls(Operation::TakeOver), 3);
}

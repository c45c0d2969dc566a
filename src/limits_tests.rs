//! What cannot be seen from outside: how much is remembered, and what is counted twice or not at all.

use super::*;

const SECOND: Duration = Duration::from_secs(1);
const AT_ONCE: Duration = Duration::ZERO;

fn scope(at: usize) -> Scope {
    Scope::new(at.to_be_bytes())
}

fn limit() -> Arc<ScopeLimit> {
    Arc::new(ScopeLimit::new(10))
}

fn is_full(limit: &Arc<ScopeLimit>) -> bool {
    limit.look(&scope(0)).is_full
}

#[test]
fn a_flood_of_scopes_does_not_grow_the_table_and_drops_those_not_used() {
    let limit = limit();
    limit.look(&scope(0));
    limit.look(&scope(1));
    limit.know(&scope(0), 10, AT_ONCE);
    limit.know(&scope(1), 10, AT_ONCE);
    for at in 2..100_000 {
        drop(limit.look(&scope(at)));
        if at % 1_000 == 0 {
            assert!(is_full(&limit), "what is in use is kept");
        }
        let known = limit.known();
        assert!(known.recent.len() + known.older.len() <= MAX_SCOPES);
    }
    assert!(!limit.look(&scope(1)).is_full, "nothing is known of it");
    assert_eq!(limit.known().questions, 0);
}

#[test]
fn a_claim_that_was_under_way_while_the_store_counted_is_not_added() {
    let limit = limit();
    drop(limit.look(&scope(0)));
    let before = limit.answers();
    limit.know(&scope(0), 9, AT_ONCE);
    limit.made(&scope(0), before);
    assert!(!is_full(&limit), "the store may have counted it");
    // Another scope's answer says nothing about this one.
    let before = limit.answers();
    drop(limit.look(&scope(1)));
    limit.know(&scope(1), 0, AT_ONCE);
    limit.made(&scope(0), before);
    assert!(is_full(&limit));
    limit.freed(&scope(0));
    assert!(!is_full(&limit));
    // More may be freed than was ever counted.
    for _ in 0..100 {
        limit.freed(&scope(0));
    }
    assert!(!is_full(&limit));
    limit.know(&scope(0), 10, AT_ONCE);
    assert!(is_full(&limit));
}

#[test]
fn a_scope_has_one_question_at_a_time_and_all_together_two() {
    let limit = limit();
    let asked = limit.look(&scope(0));
    assert!(matches!(asked.news, News::ToBeAsked(_)));
    assert!(matches!(limit.look(&scope(0)).news, News::Awaited));
    let other = limit.look(&scope(1));
    assert!(matches!(other.news, News::ToBeAsked(_)));
    assert!(matches!(limit.look(&scope(2)).news, News::None));
    drop(asked);
    assert!(matches!(limit.look(&scope(2)).news, News::ToBeAsked(_)));
    // Given back without an answer, it is the next one's.
    assert!(matches!(limit.look(&scope(0)).news, News::ToBeAsked(_)));
    // At the limit nobody waits for a place.
    limit.know(&scope(3), 10, AT_ONCE);
    drop(other);
    assert_eq!(limit.known().questions, 0);
}

/// Looks every second until a question may be asked, and says after how many.
async fn asked_after(limit: &Arc<ScopeLimit>) -> u64 {
    let begun = Instant::now();
    loop {
        if let News::ToBeAsked(_) = limit.look(&scope(0)).news {
            return begun.elapsed().as_secs();
        }
        tokio::time::advance(SECOND).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_scope_is_counted_for_a_tenth_of_the_time_at_most() {
    let limit = limit();
    drop(limit.look(&scope(0)));
    for (took, pause) in [(0, 10), (1, 10), (2, 18), (60, 540), (1, 10)] {
        limit.know(&scope(0), 10, SECOND * took);
        assert_eq!(asked_after(&limit).await, pause, "after {took} s");
    }
    // Those that fail as well.
    for (took, pause) in [(0, 1), (1, 9), (60, 540), (0, 1)] {
        limit.fail(&scope(0), SECOND * took);
        assert_eq!(asked_after(&limit).await, pause, "after {took} s");
    }
    // Of another scope no longer than it takes a store to recover.
    limit.fail(&scope(0), SECOND * 60);
    assert!(matches!(limit.look(&scope(1)).news, News::None));
    tokio::time::advance(SECOND).await;
    assert!(matches!(limit.look(&scope(1)).news, News::ToBeAsked(_)));
}

#[tokio::test(start_paused = true)]
async fn while_counts_fail_the_last_one_is_believed_for_a_minute() {
    let limit = limit();
    drop(limit.look(&scope(0)));
    limit.know(&scope(0), 10, AT_ONCE);
    tokio::time::advance(SECOND * 50).await;
    // Each failure changes nothing about when that was.
    limit.fail(&scope(0), AT_ONCE);
    tokio::time::advance(SECOND * 9).await;
    limit.fail(&scope(0), AT_ONCE);
    assert!(is_full(&limit));
    tokio::time::advance(SECOND).await;
    assert!(!is_full(&limit), "nothing is known of it");
    limit.know(&scope(0), 10, AT_ONCE);
    assert!(is_full(&limit));
    // Without a failure it is not over by itself: whoever would be refused asks first.
    tokio::time::advance(SECOND * 3_600).await;
    let standing = limit.look(&scope(0));
    assert!(standing.is_full && matches!(standing.news, News::ToBeAsked(_)));
}

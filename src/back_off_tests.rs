use super::*;
use crate::{IdempotencyKey, Scope};

const PAUSES: Pauses = Pauses {
    first: Duration::from_secs(10),
    longest: Duration::from_secs(60),
};

fn name(key: &str) -> Fingerprint {
    BackOff::name(&RecordId::new(Scope::shared(), IdempotencyKey::new(key)))
}

#[tokio::test(start_paused = true)]
async fn sweeps_wait_twice_as_long_each_time_up_to_the_longest() {
    let back_off = BackOff::default();
    let name = name("k");
    for pause in [10, 20, 40, 60, 60] {
        assert!(back_off.is_due(&name, 1));
        back_off.left_by_sweep(name, 1, PAUSES);
        // Jitter takes half of it at most.
        tokio::time::advance(Duration::from_millis(pause * 500 - 1)).await;
        assert!(!back_off.is_due(&name, 1), "{pause}");
        tokio::time::advance(Duration::from_millis(pause * 500 + 1)).await;
    }
    back_off.left_by_sweep(name, 1, PAUSES);
    back_off.settled(&name);
    assert!(back_off.is_due(&name, 1));
}

#[tokio::test(start_paused = true)]
async fn requests_ask_once_a_second_and_hold_no_sweep_up() {
    let back_off = BackOff::default();
    let name = name("k");
    assert!(back_off.request_may_ask(&name, 1));
    for _ in 0..5 {
        back_off.left_by_request(name, 1);
        assert!(!back_off.request_may_ask(&name, 1));
        assert!(back_off.is_due(&name, 1));
        tokio::time::advance(Duration::from_secs(1)).await;
        assert!(back_off.request_may_ask(&name, 1));
    }
    // The first pause of a sweep is the first, however often requests asked; and requests do not wait for it.
    back_off.left_by_sweep(name, 1, PAUSES);
    assert!(!back_off.request_may_ask(&name, 1));
    tokio::time::advance(Duration::from_secs(1)).await;
    assert!(back_off.request_may_ask(&name, 1) && !back_off.is_due(&name, 1));
    back_off.left_by_request(name, 1);
    assert!(!back_off.is_due(&name, 1));
    tokio::time::advance(Duration::from_secs(9)).await;
    assert!(back_off.is_due(&name, 1));
}

#[tokio::test(start_paused = true)]
async fn another_run_of_the_key_is_asked_about_at_once() {
    let back_off = BackOff::default();
    back_off.left_by_sweep(name("k"), 1, PAUSES);
    assert!(back_off.is_due(&name("k"), 2) && back_off.request_may_ask(&name("k"), 2));
    assert!(!back_off.is_due(&name("k"), 1) && back_off.is_due(&name("other"), 1));
}

#[tokio::test(start_paused = true)]
async fn what_is_remembered_is_bounded_and_what_is_over_makes_room() {
    let back_off = BackOff::default();
    for key in 0..MAX_KNOWN + 100 {
        back_off.left_by_sweep(name(&key.to_string()), 1, PAUSES);
    }
    assert_eq!(back_off.known().left.len(), MAX_KNOWN);
    let beyond = name(&MAX_KNOWN.to_string());
    assert!(back_off.is_due(&beyond, 1));
    tokio::time::advance(Duration::from_secs(71)).await;
    back_off.left_by_sweep(beyond, 1, PAUSES);
    assert!(!back_off.is_due(&beyond, 1));
    assert_eq!(back_off.known().left.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn the_longest_pause_there_is_does_not_overflow() {
    let back_off = BackOff::default();
    let pauses = Pauses {
        first: Duration::MAX,
        longest: Duration::MAX,
    };
    for _ in 0..40 {
        back_off.left_by_sweep(name("k"), 1, pauses);
    }
    assert!(!back_off.is_due(&name("k"), 1));
}

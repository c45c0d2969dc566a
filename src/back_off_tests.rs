use super::*;
use crate::{IdempotencyKey, Scope};

const PAUSES: Pauses = Pauses {
    first: Duration::from_secs(10),
    longest: Duration::from_secs(60),
};

const RUN: Token = Token::from_bytes([1; 16]);
/// Of whoever held its record to ask.
const HOLD: Token = Token::from_bytes([9; 16]);

fn topic(key: &str) -> Topic {
    let stored = RecordId::new(Scope::shared(), IdempotencyKey::new(key));
    Topic::new(&stored, None)
}

fn left(back_off: &BackOff, topic: Topic) {
    back_off.left_by_sweep(topic, [RUN, HOLD], Why::Unknown, PAUSES);
}

#[tokio::test(start_paused = true)]
async fn sweeps_wait_twice_as_long_each_time_up_to_the_longest() {
    let back_off = BackOff::default();
    let topic = topic("k");
    for pause in [10, 20, 40, 60, 60] {
        assert!(back_off.is_due(&topic, RUN));
        left(&back_off, topic);
        // Jitter takes half of it at most.
        tokio::time::advance(Duration::from_millis(pause * 500 - 1)).await;
        assert!(!back_off.is_due(&topic, RUN), "{pause}");
        tokio::time::advance(Duration::from_millis(pause * 500 + 1)).await;
    }
    left(&back_off, topic);
    back_off.settled(&topic);
    assert!(back_off.is_due(&topic, RUN));
}

#[tokio::test(start_paused = true)]
async fn requests_ask_once_a_second_and_hold_no_sweep_up() {
    let back_off = BackOff::default();
    let topic = topic("k");
    assert!(back_off.holds_request_off(&topic, RUN).is_none());
    for _ in 0..5 {
        back_off.left_by_request(topic, [RUN, HOLD], Why::Unknown);
        assert!(back_off.holds_request_off(&topic, RUN).is_some());
        assert!(back_off.is_due(&topic, RUN));
        tokio::time::advance(Duration::from_secs(1)).await;
        assert!(back_off.holds_request_off(&topic, RUN).is_none());
    }
    // The first pause of a sweep is the first, however often requests asked; and requests do not wait for it.
    left(&back_off, topic);
    assert!(back_off.holds_request_off(&topic, RUN).is_some());
    tokio::time::advance(Duration::from_secs(1)).await;
    assert!(back_off.holds_request_off(&topic, RUN).is_none() && !back_off.is_due(&topic, RUN));
    back_off.left_by_request(topic, [RUN, HOLD], Why::Unknown);
    assert!(!back_off.is_due(&topic, RUN));
    tokio::time::advance(Duration::from_secs(9)).await;
    assert!(back_off.is_due(&topic, RUN));
}

#[tokio::test(start_paused = true)]
async fn a_record_is_known_by_the_token_of_whoever_asked_about_it_last() {
    let back_off = BackOff::default();
    let topic = topic("k");
    back_off.left_by_sweep(topic, [RUN, HOLD], Why::Unknown, PAUSES);
    assert!(!back_off.is_due(&topic, HOLD));
    tokio::time::advance(Duration::from_secs(10)).await;
    let next = Token::from_bytes([8; 16]);
    back_off.left_by_sweep(topic, [HOLD, next], Why::Unknown, PAUSES);
    // Twice as long as the first time: half of 20 s at the least.
    tokio::time::advance(Duration::from_millis(9_999)).await;
    assert!(!back_off.is_due(&topic, next) && back_off.is_due(&topic, RUN));
}

#[tokio::test(start_paused = true)]
async fn another_run_of_the_key_is_asked_about_at_once() {
    let back_off = BackOff::default();
    let other = Token::from_bytes([2; 16]);
    left(&back_off, topic("k"));
    assert!(back_off.is_due(&topic("k"), other));
    assert_eq!(back_off.holds_request_off(&topic("k"), other), None);
    assert!(!back_off.is_due(&topic("k"), RUN) && back_off.is_due(&topic("other"), RUN));
}

#[tokio::test(start_paused = true)]
async fn what_one_resolver_left_is_asked_of_another_at_once() {
    let back_off = BackOff::default();
    let stored = RecordId::new(Scope::shared(), IdempotencyKey::new("k"));
    let resolvers: [Arc<dyn Resolves>; 2] = [
        Arc::new(|_| async { crate::Verdict::Leave }),
        Arc::new(|_| async { crate::Verdict::Leave }),
    ];
    let [payments, refunds] = resolvers
        .each_ref()
        .map(|resolver| Topic::new(&stored, Some(resolver)));
    left(&back_off, payments);
    assert!(!back_off.is_due(&payments, RUN) && back_off.is_due(&refunds, RUN));
    // One has settled it: that says nothing about the pauses of the other.
    back_off.settled(&refunds);
    assert!(!back_off.is_due(&payments, RUN));
}

#[tokio::test(start_paused = true)]
async fn what_could_not_be_read_is_told_from_what_is_not_known() {
    let back_off = BackOff::default();
    let topic = topic("k");
    for why in [Why::Unreadable, Why::Unknown, Why::Unreadable] {
        back_off.left_by_request(topic, [RUN, HOLD], why);
        assert_eq!(back_off.holds_request_off(&topic, RUN), Some(why));
    }
    tokio::time::advance(Duration::from_secs(1)).await;
    assert_eq!(back_off.holds_request_off(&topic, RUN), None);
}

#[tokio::test(start_paused = true)]
async fn what_is_remembered_is_bounded_and_what_is_over_makes_room() {
    let back_off = BackOff::default();
    for key in 0..MAX_KNOWN + 100 {
        left(&back_off, topic(&key.to_string()));
    }
    assert_eq!(back_off.known().left.len(), MAX_KNOWN);
    let beyond = topic(&MAX_KNOWN.to_string());
    assert!(back_off.is_due(&beyond, RUN));
    tokio::time::advance(Duration::from_secs(71)).await;
    left(&back_off, beyond);
    assert!(!back_off.is_due(&beyond, RUN));
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
        back_off.left_by_sweep(topic("k"), [RUN, HOLD], Why::Unknown, pauses);
    }
    assert!(!back_off.is_due(&topic("k"), RUN));
}

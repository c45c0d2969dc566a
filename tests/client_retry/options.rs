//! Options that make no sense are refused at once.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    time::Duration,
};

use http::Method;
use tower::Layer;
use tower_idempotency::{
    IdempotencyKey,
    client::{Retry, RetryLayer},
};

fn refused(option: &str, set: impl FnOnce() -> RetryLayer) {
    let panic = catch_unwind(AssertUnwindSafe(set)).expect_err(option);
    let message = panic.downcast_ref::<String>().cloned();
    let message = message.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
    let message = message.unwrap();
    assert!(message.contains(option), "{message}");
}

#[test]
fn nonsense_is_refused_by_the_name_of_its_option() {
    let (zero, second) = (Duration::ZERO, Duration::from_secs(1));
    let layer = RetryLayer::new;
    refused("methods", || layer().methods([]));
    refused("methods", || layer().methods([Method::POST, Method::GET]));
    refused("methods", || layer().methods([Method::CONNECT]));
    refused("back_off", || layer().back_off(zero, second));
    refused("back_off", || layer().back_off(second, second / 2));
    refused("attempt_timeout", || layer().attempt_timeout(zero));
    refused("total_timeout", || layer().total_timeout(zero));
    refused("also_in_flight", || layer().also_in_flight(["a", " "]));
    refused("also_in_flight", || {
        layer().also_in_flight(["idempotency_key_reused"])
    });
}

#[tokio::test(start_paused = true)]
async fn the_longest_of_times_do_no_harm() {
    let layer = RetryLayer::new()
        .attempt_timeout(Duration::MAX)
        .total_timeout(Duration::MAX)
        .retries(u32::MAX)
        .back_off(Duration::from_secs(1), Duration::MAX);
    let script = crate::script::Script::new([crate::script::unreachable()]);
    script.send(layer, crate::script::charge()).await.unwrap();
    assert_eq!(script.attempts(), 2);
}

#[test]
fn debug_shows_options_and_no_functions() {
    let layer = RetryLayer::new().keys(|_, _| Some(IdempotencyKey::new("secret")));
    assert!(format!("{layer:?}").contains("total_timeout: 90s"));
    let retry: Retry<()> = layer.layer(());
    assert!(!format!("{retry:?}").contains("secret"));
}

#[test]
fn a_changed_copy_leaves_the_first_layer_as_it_is() {
    let first = RetryLayer::new();
    let second = first.clone().retries(1);
    assert!(format!("{first:?}").contains("retries: 5"));
    assert!(format!("{second:?}").contains("retries: 1"));
}

//! The example, as a program.

use std::{
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use crate::support::process::example;

#[tokio::test]
async fn the_example_charges_once_in_every_scene_and_says_what_happened() {
    let begun = Instant::now();
    let output = tokio::task::spawn_blocking(|| {
        let mut command = Command::new(example("retrying_client"));
        command.stdin(Stdio::null()).output().unwrap()
    });
    let output = tokio::time::timeout(Duration::from_secs(60), output).await;
    let output = output.expect("it does not end").unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}");
    assert!(
        begun.elapsed() < Duration::from_secs(30),
        "{:?}",
        begun.elapsed()
    );

    let scenes: Vec<_> = text.split("\n\n").map(str::trim).collect();
    assert_eq!(scenes.len(), 4, "{text}");
    let lines = |scene: usize| scenes[scene].lines().collect::<Vec<_>>();

    let lost = lines(0);
    assert!(lost[1].ends_with("attempt 1: connection reset"), "{text}");
    assert!(
        lost[2].ends_with("attempt 2: 201 Created, replayed"),
        "{text}"
    );

    let away = lines(1);
    assert!(
        away[1].ends_with("attempt 1: 503 Service Unavailable"),
        "{text}"
    );
    assert!(
        away[2].ends_with("attempt 2: 503 Service Unavailable"),
        "{text}"
    );
    assert!(away[3].ends_with("attempt 3: 201 Created"), "{text}");

    let slow = lines(2);
    assert!(slow[1].ends_with("attempt 1: no answer in time"), "{text}");
    assert!(
        slow[2].contains("attempt 2: 409 Conflict, idempotency_in_flight"),
        "{text}"
    );
    assert!(
        slow.last().unwrap().ends_with("201 Created, replayed"),
        "{text}"
    );

    assert_eq!(
        scenes[3].lines().last(),
        Some("charges made: 3, one per scene"),
        "{text}"
    );
}

//! A row that is damaged stops nobody but itself, and takes nobody's turn.

use std::time::Duration;

use axum::body::Body;
use tower_idempotency::client::{EntryState, OutboxErrorKind, Undelivered};

use crate::ground::{both, charge_of, sqlite};

/// SQLite stores what is no text as text.
#[tokio::test]
async fn whatever_is_damaged_the_others_are_sent_and_listed() {
    let mut stopped = Vec::new();
    let not_text = "CAST(x'ff' AS TEXT)";
    for damage in [
        &format!("method = {not_text}"),
        &format!("uri = {not_text}"),
        &format!("reference = {not_text}"),
        "reference = printf('%300d', 1)",
        "reference = ''",
        "request = x''",
        "key = x''",
        "key = x'0a'",
        "attempts = 9223372036854775807",
        "attempts = -5",
        "attempted = -9223372036854775808",
        "turn = -9223372036854775808",
        "turn = 9223372036854775807",
        "not_before = 9223372036854775807",
        "begun = -9223372036854775808",
        "begun = 9223372036854775807",
        "token = x''",
        &format!("begun = 1, method = {not_text}"),
        &format!("begun = 1, reference = {not_text}"),
        "state = 77, settled = 1",
        "status = 77777777777",
    ] {
        let ground = sqlite::Ground::new().await;
        ground.outbox.begin("bad", charge_of(1)).await.unwrap();
        ground.outbox.begin("good", charge_of(2)).await.unwrap();
        ground.outbox.begin("late", charge_of(3)).await.unwrap();
        ground
            .run(&format!(
                "UPDATE idempotency_outbox SET turn = 2;
                 UPDATE idempotency_outbox SET turn = 1, {damage} WHERE reference = 'bad'"
            ))
            .await;
        // In a small run too it must not take the turn again and again.
        let mut states = Vec::new();
        for _ in 0..3 {
            ground.relay().resume::<Body, _>(1).await.unwrap();
        }
        for reference in ["good", "late"] {
            let row = ground.outbox.find(reference).await.unwrap().unwrap();
            states.push(row.state());
        }
        if states != [EntryState::Done; 2] {
            stopped.push(format!("{damage}: {states:?}"));
        }
        ground.outbox.begin("next", charge_of(4)).await.unwrap();
        let pending = ground.outbox.pending(10).await.unwrap();
        assert!(
            pending.iter().any(|entry| entry.reference() == "next"),
            "{damage}"
        );
        ground.outbox.overdue(10).await.unwrap();
        ground.outbox.counts().await.unwrap();
        let done = ground
            .outbox
            .list(EntryState::Done, None, 10)
            .await
            .unwrap();
        assert!(done.len() >= 2, "{damage}");
        // What another version has written is not this one's to delete.
        assert_eq!(ground.outbox.purge(10).await.unwrap(), 0, "{damage}");
    }
    assert!(stopped.is_empty(), "{stopped:#?}");
}

#[tokio::test]
async fn an_overdue_row_that_is_damaged_is_told() {
    let ground = sqlite::Ground::new().await;
    ground.outbox.begin("r", charge_of(1)).await.unwrap();
    ground
        .run("UPDATE idempotency_outbox SET begun = 1, uri = CAST(x'ff' AS TEXT)")
        .await;
    let resumed = ground.relay().resume::<Body, _>(10).await.unwrap();
    let overdue = &resumed.overdue[0];
    assert_eq!(overdue.reference(), "r");
    let error = overdue.operation().unwrap_err();
    assert_eq!(error.kind(), OutboxErrorKind::Damaged);
}

#[tokio::test]
async fn a_list_comes_to_its_end_though_references_are_damaged() {
    let ground = sqlite::Ground::new().await;
    for reference in ["a", "b", "c", "d", "e"] {
        ground.outbox.begin(reference, charge_of(1)).await.unwrap();
    }
    ground
        .run(
            "UPDATE idempotency_outbox SET reference = CAST(x'ff' AS TEXT) WHERE reference = 'c';
             UPDATE idempotency_outbox SET reference = CAST(x'61fe' AS TEXT) WHERE reference = 'd';
             UPDATE idempotency_outbox SET reference = '' WHERE reference = 'e'",
        )
        .await;
    let (mut last, mut seen) = (None, 0);
    loop {
        let page = ground
            .outbox
            .list(EntryState::Pending, last.as_ref(), 1)
            .await
            .unwrap();
        seen += page.len();
        last = page.into_iter().last();
        if last.is_none() {
            break;
        }
        assert!(seen <= 5, "the same page again and again");
    }
    assert_eq!(seen, 5);
}

both! {
    async fn a_run_reads_only_so_many_that_cannot_be_read_and_the_next_one_goes_on(ground: Ground) {
        for number in 0..25 {
            ground.outbox.begin(&format!("{number:02}"), charge_of(1)).await.unwrap();
        }
        let bytes = if IS_POSTGRES { r"'\x01ff'" } else { "x'01ff'" };
        ground.run(&format!("UPDATE idempotency_outbox SET request = {bytes}, turn = 1")).await;
        ground.outbox.begin("sound", charge_of(1)).await.unwrap();
        let mut runs = 0;
        while ground.shop.requests().is_empty() {
            let resumed = ground.relay().resume::<Body, _>(5).await.unwrap();
            assert!(resumed.pending.len() <= 10, "{}", resumed.pending.len());
            let is_damaged = |why: &Undelivered| matches!(why, Undelivered::Outbox(error) if error.kind() == OutboxErrorKind::Damaged);
            assert!(resumed.pending.iter().all(|unfinished| is_damaged(&unfinished.why)));
            runs += 1;
            assert!(runs <= 3);
        }
        // They have lost their turn, and nothing else.
        let row = ground.outbox.find("07").await.unwrap().unwrap();
        assert_eq!((row.attempts(), row.last_attempt()), (0, None));
    }

    async fn a_turn_of_a_clock_that_was_ahead_is_a_turn_all_the_same(ground: Ground) {
        ground.outbox.begin("r", charge_of(1)).await.unwrap();
        let ahead = Duration::from_secs(3_600).as_micros();
        ground.run(&format!("UPDATE idempotency_outbox SET turn = turn + {ahead}, begun = begun + {ahead}")).await;
        assert_eq!(ground.relay().resume::<Body, _>(10).await.unwrap().done.len(), 1);
    }
}

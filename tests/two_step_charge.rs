//! The example `two_step_charge`: a charge that calls a provider goes in steps, and whatever is cut off
//! between them, the provider charges once and the ledger says so.

#[path = "../examples/two_step_charge/provider.rs"]
mod provider;
#[path = "../examples/two_step_charge/service/mod.rs"]
mod service;
#[path = "two_step_charge/shop.rs"]
mod shop;
mod support;

use std::{
    future::pending,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use service::{
    Service, Step,
    gateway::{Gateway, Verdict},
    ledger::{self, BUDGET_MINOR, Status},
};
use shop::*;
use support::{Answer, send};
use tokio::{runtime, sync::mpsc, task::JoinSet, time::timeout};

const UNTOUCHED: [i64; 3] = [BUDGET_MINOR, 0, 0];

/// Budget and provider agree that this was charged, once.
async fn assert_charged_once(shop: &Shop, app: &axum::Router, amount: u64) {
    assert_eq!(shop.charged().await, (1, amount));
    let spent = i64::try_from(amount).unwrap();
    let expected = [BUDGET_MINOR - spent, 0, spent];
    assert_eq!(budget(app, "shop").await, expected);
}

#[tokio::test]
async fn a_charge_is_made_once_and_its_retry_gets_the_same_answer() {
    let shop = Shop::open().await;
    let app = shop.service(no_pause()).await;
    let first = send(&app, order("shop", "k", 25_000)).await;
    assert_eq!(first.status, 201, "{first:?}");
    assert_eq!(first.json()["status"], "charged");
    assert_eq!(first.json()["amount_minor"], 25_000);
    assert_eq!(first.json()["currency"], "THB");
    send(&app, order("shop", "k", 25_000))
        .await
        .assert_replays(&first);
    assert_eq!(shop.calls.load(Ordering::SeqCst), 1);
    assert_charged_once(&shop, &app, 25_000).await;

    let place = first.header("location").unwrap();
    assert_eq!(get(&app, "shop", place).await.json(), first.json());
}

#[tokio::test]
async fn a_crash_after_any_step_neither_loses_nor_repeats_the_charge() {
    let steps = [
        Step::Reserved,
        Step::Answered,
        Step::Noted,
        Step::Settled,
        Step::Done,
    ];
    for step in steps {
        let shop = Shop::open().await;
        let app = shop.service(panics_once_after(step)).await;
        let crashed = send(&app, order("shop", "k", 25_000)).await;
        assert_eq!(crashed.status, 500, "{step:?}");
        let was_charged = step != Step::Reserved;
        assert_eq!(shop.charged().await.0, u64::from(was_charged), "{step:?}");
        let asked = shop.calls.load(Ordering::SeqCst);

        // What happened is told; what did not is done.
        let retry = send(&app, order("shop", "k", 25_000)).await;
        let said = (retry.status.as_u16(), retry.replay);
        assert_eq!(said, (201, was_charged), "{step:?}");
        let place = retry.header("location").unwrap();
        assert_eq!(get(&app, "shop", place).await.json(), retry.json());
        assert_eq!(retry.json()["status"], "charged");
        assert_charged_once(&shop, &app, 25_000).await;

        // One question where only the provider knows, none where it is noted or settled.
        let questions = match step {
            Step::Reserved => 2,
            Step::Answered => 1,
            _ => 0,
        };
        let calls = shop.calls.load(Ordering::SeqCst);
        assert_eq!(calls - asked, questions, "{step:?}");
    }
}

#[tokio::test]
async fn a_decline_that_was_cut_off_is_given_back_and_told() {
    for step in [Step::Answered, Step::Noted, Step::Settled, Step::Done] {
        let shop = Shop::open().await;
        let app = shop.service(panics_once_after(step)).await;
        let too_much = u64::try_from(provider::MOST_MINOR).unwrap() + 1;
        let crashed = send(&app, order("shop", "k", too_much)).await;
        assert_eq!(crashed.status, 500, "{step:?}");
        let retry = send(&app, order("shop", "k", too_much)).await;
        let said = (retry.status.as_u16(), retry.replay);
        assert_eq!(said, (402, true), "{step:?}");
        assert_eq!(retry.json()["status"], "declined");
        assert_eq!(budget(&app, "shop").await, UNTOUCHED, "{step:?}");
    }
}

#[tokio::test]
async fn as_long_as_the_provider_cannot_be_asked_a_cut_off_charge_is_left_as_it_is() {
    for mood in [Mood::FailsAfterwards, Mood::IsMisplaced] {
        let shop = Shop::open().await;
        let app = shop.service(panics_once_after(Step::Answered)).await;
        assert_eq!(send(&app, order("shop", "k", 25_000)).await.status, 500);
        shop.set_mood(mood);
        for _ in 0..3 {
            let unknown = send(&app, order("shop", "k", 25_000)).await;
            let expected = (409, "idempotency_outcome_unknown".to_owned());
            assert_eq!(unknown.said(), expected);
            let reserved = [BUDGET_MINOR - 25_000, 25_000, 0];
            assert_eq!(budget(&app, "shop").await, reserved);
        }
        shop.set_mood(Mood::Normal);
        // A retry asks again after a second at the earliest.
        let told = timeout(Duration::from_secs(20), async {
            loop {
                let answer = send(&app, order("shop", "k", 25_000)).await;
                if answer.code() != "idempotency_outcome_unknown" {
                    return answer;
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        });
        let told = told.await.unwrap();
        assert_eq!((told.status.as_u16(), told.replay), (201, true), "{told:?}");
        assert_charged_once(&shop, &app, 25_000).await;
    }
}

#[test]
fn a_process_that_dies_before_it_settles_is_followed_by_one_that_does() {
    let here = runtime::Runtime::new().unwrap();
    let shop = Arc::new(here.block_on(Shop::open()));
    let (charged, mut is_charged) = mpsc::unbounded_channel();

    // With this runtime everything of the first process goes: its run, its store, its connections.
    let dies = runtime::Runtime::new().unwrap();
    let first = shop.clone();
    dies.spawn(async move {
        let hangs = Arc::new(move |step| {
            let charged = charged.clone();
            Box::pin(async move {
                if step == Step::Answered {
                    charged.send(()).unwrap();
                    pending().await
                }
            }) as _
        });
        let app = first.service(hangs).await;
        send(&app, order("shop", "k", 25_000)).await
    });
    here.block_on(async {
        let is_charged = timeout(Duration::from_secs(20), is_charged.recv());
        is_charged.await.unwrap().unwrap();
    });
    dies.shutdown_timeout(Duration::from_secs(10));

    here.block_on(async {
        let app = shop.service(no_pause()).await;
        assert_eq!(shop.charged().await, (1, 25_000));
        assert_eq!(
            budget(&app, "shop").await,
            [BUDGET_MINOR - 25_000, 25_000, 0]
        );
        let answer = timeout(Duration::from_secs(20), retried(&app, "k")).await;
        let answer = answer.expect("the dead process has the key for ever");
        // Not run again: the provider was asked.
        assert_eq!(
            (answer.status.as_u16(), answer.replay),
            (201, true),
            "{answer:?}"
        );
        assert_charged_once(&shop, &app, 25_000).await;
    });
}

/// As a client retries, though with less patience between two attempts.
async fn retried(app: &axum::Router, key: &str) -> Answer {
    loop {
        let answer = send(app, order("shop", key, 25_000)).await;
        if answer.code() != "idempotency_in_flight" {
            return answer;
        }
        tokio::time::sleep(LEASE / 10).await;
    }
}

#[tokio::test]
async fn what_the_provider_declines_stays_declined_and_is_given_back() {
    let shop = Shop::open().await;
    let app = shop.service(no_pause()).await;
    let too_much = u64::try_from(provider::MOST_MINOR).unwrap() + 1;
    let first = send(&app, order("shop", "k", too_much)).await;
    assert_eq!(first.status, 402, "{first:?}");
    assert_eq!(first.json()["status"], "declined");
    send(&app, order("shop", "k", too_much))
        .await
        .assert_replays(&first);
    assert_eq!(shop.charged().await, (0, 0));
    assert_eq!(budget(&app, "shop").await, UNTOUCHED);

    let other = send(&app, order("shop", "another", 25_000)).await;
    assert_eq!(other.status, 201);
    assert_charged_once(&shop, &app, 25_000).await;
}

#[tokio::test]
async fn while_the_provider_is_down_a_retry_may_come_as_often_as_it_likes() {
    let mut shop = Shop::with_provider_down().await;
    let app = shop.service(no_pause()).await;
    // More often than an abandoned run would be run again.
    for _ in 0..5 {
        let down = send(&app, order("shop", "k", 25_000)).await;
        assert_eq!(
            (down.status.as_u16(), down.replay),
            (503, false),
            "{down:?}"
        );
        assert_eq!(down.header("retry-after"), Some("1"));
        assert_eq!(down.json()["status"], "reserved");
        assert_eq!(
            budget(&app, "shop").await,
            [BUDGET_MINOR - 25_000, 25_000, 0]
        );
    }
    shop.provider_comes_up();
    let up = send(&app, order("shop", "k", 25_000)).await;
    assert_eq!((up.status.as_u16(), up.replay), (201, false), "{up:?}");
    assert_charged_once(&shop, &app, 25_000).await;
}

#[tokio::test]
async fn a_provider_whose_answer_was_lost_is_asked_again_and_charges_once() {
    let moods = [
        (Mood::FailsAfterwards, 502, PATIENCE),
        (Mood::BreaksOffAfterwards, 503, PATIENCE),
        (Mood::FallsSilentAfterwards, 503, Duration::from_secs(2)),
    ];
    for (mood, expected, patience) in moods {
        let shop = Shop::open().await;
        let service = Service {
            gateway: Gateway::new(shop.url(), patience),
            ..shop.parts(4).await
        };
        let app = serve_with(service, &shop.file()).await;
        shop.set_mood(mood);
        let lost = send(&app, order("shop", "k", 25_000)).await;
        assert_eq!(lost.status, expected, "{lost:?}");
        assert_eq!(shop.charged().await, (1, 25_000));
        let place = format!("/charges/{}", lost.json()["charge_id"].as_str().unwrap());
        assert_eq!(get(&app, "shop", &place).await.json()["status"], "reserved");

        shop.set_mood(Mood::Normal);
        let retry = send(&app, order("shop", "k", 25_000)).await;
        assert_eq!(
            (retry.status.as_u16(), retry.replay),
            (201, false),
            "{retry:?}"
        );
        assert_eq!(shop.calls.load(Ordering::SeqCst), 2);
        assert_charged_once(&shop, &app, 25_000).await;
    }
}

// What happens when a run has lost its claim and does not know yet: two runs of one action at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_steps_hold_where_no_layer_keeps_two_runs_apart() {
    let shop = Shop::open().await;
    let mut runs = JoinSet::new();
    let together = all_at_each_step(8);
    for instance in 0..8 {
        // Their records are apart, so each of them runs.
        let records = shop.file().with_extension(format!("records-{instance}"));
        let service = Service {
            pause: together.clone(),
            ..shop.parts(2).await
        };
        let app = serve_with(service, &records).await;
        runs.spawn(async move { send(&app, order("shop", "k", 25_000)).await });
    }
    let answers = runs.join_all().await;
    for answer in &answers {
        assert_eq!(
            (answer.status.as_u16(), answer.replay),
            (201, false),
            "{answer:?}"
        );
        assert_eq!(answer.json(), answers[0].json());
    }
    assert_eq!(shop.calls.load(Ordering::SeqCst), 8);
    let app = shop.service(no_pause()).await;
    assert_charged_once(&shop, &app, 25_000).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_keys_at_once_never_spend_more_than_the_budget() {
    let shop = Shop::open().await;
    let app = shop.service(no_pause()).await;
    let mut charges = JoinSet::new();
    for key in 0..30 {
        let app = app.clone();
        let order = order("shop", &format!("k{key}"), 150_000);
        charges.spawn(async move { send(&app, order).await });
    }
    let answers = charges.join_all().await;
    let count = |status: u16| answers.iter().filter(|one| one.status == status).count();
    assert_eq!((count(201), count(409)), (6, 24), "{answers:?}");
    assert_eq!(shop.charged().await, (6, 900_000));
    assert_eq!(budget(&app, "shop").await, [100_000, 0, 900_000]);

    // What was refused was not written, so its key is free, and judged anew.
    let refused = answers.iter().find(|one| one.status == 409).unwrap();
    assert_eq!(refused.json()["error"], "budget_exhausted");
    let free = (0..30).map(|key| format!("k{key}"));
    let mut smaller = 0;
    for key in free {
        let answer = send(&app, order("shop", &key, 100_000)).await;
        smaller += usize::from(answer.status == 201);
    }
    assert_eq!(smaller, 1);
    assert_eq!(budget(&app, "shop").await, [0, 0, BUDGET_MINOR]);
}

#[tokio::test]
async fn nothing_is_open_while_the_provider_is_called() {
    let shop = Shop::open().await;
    let service = shop.parts(1).await;
    shop.set_mood(Mood::WritesWith(service.ledger.clone()));
    let app = serve_with(service, &shop.file()).await;
    let charged = send(&app, order("shop", "k", 25_000)).await;
    assert_eq!(charged.status, 201, "{charged:?}");
    assert_charged_once(&shop, &app, 25_000).await;
}

#[tokio::test]
async fn the_same_key_of_another_client_is_another_charge() {
    let shop = Shop::open().await;
    let app = shop.service(no_pause()).await;
    let one = send(&app, order("shop", "k", 25_000)).await;
    let other = send(&app, order("stall", "k", 25_000)).await;
    assert_eq!((one.status.as_u16(), other.status.as_u16()), (201, 201));
    assert_ne!(
        one.json()["provider_charge_id"],
        other.json()["provider_charge_id"]
    );
    assert_eq!(shop.charged().await, (2, 50_000));

    let place = one.header("location").unwrap();
    assert_eq!(get(&app, "shop", place).await.status, 200);
    assert_eq!(get(&app, "stall", place).await.status, 404);
    assert_eq!(get(&app, "", place).await.status, 403);
    let nobody = send(&app, order("", "k", 25_000)).await;
    assert_eq!(nobody.said(), (403, "idempotency_scope_unknown".to_owned()));
}

// The layer has forgotten the key, for one of two reasons. The row has not.
#[tokio::test]
async fn a_free_key_still_belongs_to_its_charge() {
    let mut shop = Shop::with_provider_down().await;
    let app = shop.service(no_pause()).await;
    assert_eq!(send(&app, order("shop", "k", 25_000)).await.status, 503);
    shop.provider_comes_up();
    let other = send(&app, order("shop", "k", 99)).await;
    assert_eq!(
        (other.status.as_u16(), &other.json()["error"]),
        (409, &"key_reused".into())
    );
    let charged = send(&app, order("shop", "k", 25_000)).await;
    assert_eq!(charged.status, 201);

    let ledger = shop.ledger(1).await;
    let expire = sqlx::query("DELETE FROM idempotency_records").execute(&ledger);
    assert!(expire.await.unwrap().rows_affected() > 0);
    let later = send(&app, order("shop", "k", 25_000)).await;
    assert_eq!((later.status.as_u16(), later.replay), (201, false));
    assert_eq!(later.json(), charged.json());
    assert_eq!(shop.calls.load(Ordering::SeqCst), 1);
    assert_charged_once(&shop, &app, 25_000).await;
}

#[tokio::test]
async fn what_cannot_be_charged_reserves_nothing() {
    let shop = Shop::open().await;
    let app = shop.service(no_pause()).await;
    for amount in [0, u64::try_from(BUDGET_MINOR).unwrap() + 1] {
        assert_eq!(send(&app, order("shop", "k", amount)).await.status, 422);
    }
    assert_eq!(get(&app, "shop", "/budgets/THB").await.status, 404);
    // The same key, corrected.
    assert_eq!(send(&app, order("shop", "k", 25_000)).await.status, 201);
    assert_charged_once(&shop, &app, 25_000).await;
}

// Two runs of one action, of which one had lost its claim, both come as far as this.
#[tokio::test]
async fn a_charge_is_settled_once() {
    let shop = Shop::with_provider_down().await;
    let app = shop.service(no_pause()).await;
    assert_eq!(send(&app, order("shop", "k", 25_000)).await.status, 503);
    let ledger = shop.ledger(1).await;
    let verdict = Verdict::Charged("pc_1".to_owned());
    for _ in 0..2 {
        let settled = ledger::settle(&ledger, 1, &verdict).await.unwrap();
        assert_eq!(settled.status, Status::Charged);
        assert_eq!(settled.provider_charge_id.as_deref(), Some("pc_1"));
        assert_eq!(
            budget(&app, "shop").await,
            [BUDGET_MINOR - 25_000, 0, 25_000]
        );
    }
}

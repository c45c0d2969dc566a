//! Two reconcilers, a thousand records.

use std::collections::HashMap;

use tower_idempotency::{
    Resolved,
    testing::{Fault, Operation, Times},
};

use super::*;

/// **Shown**: two reconcilers over two store instances ask about each of a thousand records exactly once, and
/// each is resolved exactly once.
async fn each_of_a_thousand_is_resolved_once(world: World) {
    const RECORDS: usize = 1_000;
    let dead = world.open().await;
    let keys: Vec<String> = (0..RECORDS).map(|key| format!("k-{key}")).collect();
    let mut claims = tokio::task::JoinSet::new();
    for key in keys.clone() {
        let dead = dead.clone();
        claims.spawn(async move { abandoned(&dead, &[&key]).await });
    }
    claims.join_all().await;

    let asked = Arc::new(Mutex::new(HashMap::<String, usize>::new()));
    let mut apps = Vec::new();
    let mut reconcilers = Vec::new();
    for _ in 0..2 {
        let asked = asked.clone();
        let resolver = move |abandoned: Abandoned| {
            let key = abandoned.key().unwrap().as_str().unwrap().to_owned();
            *asked.lock().unwrap().entry(key.clone()).or_default() += 1;
            async move {
                // As a provider would: others get their turn meanwhile.
                tokio::task::yield_now().await;
                Verdict::answer((StatusCode::CREATED, format!("paid {key}")))
            }
        };
        let layer = layer(&world.open().await).resolver(resolver);
        reconcilers.push(layer.reconciler().max_per_sweep(RECORDS));
        apps.push(Handler::new().behind(layer));
    }
    let (first, second) = tokio::join!(reconcilers[0].sweep(), reconcilers[1].sweep());
    assert_eq!(
        (first.failed, second.failed),
        (0, 0),
        "{first:?} {second:?}"
    );
    assert_eq!(
        first.answered + second.answered,
        RECORDS,
        "{first:?} {second:?}"
    );
    // Both were at it.
    assert!(
        first.answered > 0 && second.answered > 0,
        "{first:?} {second:?}"
    );
    {
        let asked = asked.lock().unwrap();
        assert_eq!(asked.len(), RECORDS);
        assert!(asked.values().all(|times| *times == 1), "{asked:?}");
    }
    for (number, key) in keys.iter().enumerate() {
        let replay = send(&apps[number % 2], post(key, "A")).await;
        assert_eq!(
            (replay.status.as_u16(), replay.replay),
            (201, true),
            "{key}"
        );
        assert_eq!(replay.body, format!("paid {key}"));
    }
}

every_store! {
    async fn two_reconcilers_resolve_each_of_a_thousand_records_once(world: World) {
        each_of_a_thousand_is_resolved_once(world).await;
    }

    // Slow and lost answers of the store in between, and requests beside the sweeps.
    async fn two_instances_ask_once_though_answers_of_the_store_are_late_or_lost(world: World) {
        const RECORDS: usize = 40;
        let stores = [world.open().await, world.open().await];
        let (asked, times) = counter();
        let resolver = move |_: Abandoned| {
            asked.fetch_add(1, Ordering::SeqCst);
            async {
                tokio::time::sleep(Duration::from_millis(20)).await;
                paid()
            }
        };
        let keys: Vec<String> = (0..RECORDS).map(|key| format!("k-{key}")).collect();
        for key in &keys {
            abandoned(&stores[0], &[key]).await;
        }
        let late = Duration::from_millis(60);
        for store in &stores {
            store.fail(Operation::TakeOver, Fault::After, Times::Next(2));
            store.fail(Operation::TakeOver, Fault::DelayAfter(late), Times::Next(5));
            store.fail(Operation::Complete, Fault::After, Times::Next(2));
            store.fail(Operation::Complete, Fault::DelayBefore(late), Times::Next(5));
        }
        let handler = Handler::new();
        let (mut sweeps, mut sent) = (Vec::new(), Vec::new());
        for store in &stores {
            let layer = layer(store).store_timeout(Duration::from_secs(10)).resolver(resolver.clone());
            let reconciler = layer.reconciler();
            sweeps.push(tokio::spawn(async move { reconciler.sweep().await }));
            let app = handler.behind(layer);
            for key in &keys {
                sent.push(spawn(&app, post(key, "A")));
            }
        }
        for sent in sent {
            let answer = sent.await.unwrap();
            assert!([201, 409, 503].contains(&answer.status.as_u16()), "{answer:?}");
        }
        for sweep in sweeps {
            assert_eq!(sweep.await.unwrap().failed, 0);
        }
        assert_eq!((times(), handler.effects()), (RECORDS, 0));
        assert_eq!(stores[0].counts().await.unwrap().completed, RECORDS as u64);
    }

    // Everybody at once: an operator, sweeps and requests, in two instances.
    async fn of_everybody_who_wants_to_settle_a_record_one_does(world: World) {
        const RECORDS: usize = 15;
        let stores = [world.open().await, world.open().await];
        let (asked, times) = counter();
        let resolver = move |_: Abandoned| {
            asked.fetch_add(1, Ordering::SeqCst);
            async { paid() }
        };
        let keys: Vec<String> = (0..RECORDS).map(|key| format!("k-{key}")).collect();
        for key in &keys {
            abandoned(&stores[0], &[key]).await;
        }
        let handler = Handler::new();
        let (mut by_hand, mut sweeps, mut sent) = (Vec::new(), Vec::new(), Vec::new());
        for store in &stores {
            let layer = layer(store).store_timeout(Duration::from_secs(10)).resolver(resolver.clone());
            let app = handler.behind(layer.clone());
            let sweeper = layer.reconciler();
            sweeps.push(tokio::spawn(async move { sweeper.sweep().await }));
            for key in &keys {
                let (operator, found) = (layer.reconciler(), record(store, key).await.unwrap());
                by_hand.push(tokio::spawn(async move {
                    let verdict = Verdict::answer((StatusCode::CREATED, "by hand"));
                    operator.resolve(&found, verdict).await.unwrap()
                }));
                sent.push(spawn(&app, post(key, "A")));
            }
        }
        let mut settled = 0;
        for by_hand in by_hand {
            match by_hand.await.unwrap() {
                Resolved::Answered => settled += 1,
                other => assert_eq!(other, Resolved::Lost),
            }
        }
        for sweep in sweeps {
            assert_eq!(sweep.await.unwrap().failed, 0);
        }
        for sent in sent {
            sent.await.unwrap();
        }
        // Whoever asked has settled it, and so has each operator who was told so; nobody did it twice.
        assert_eq!((settled + times(), handler.effects()), (RECORDS, 0));
        assert_eq!(stores[0].counts().await.unwrap().completed, RECORDS as u64);
    }
}

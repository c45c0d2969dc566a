//! Two reconcilers, a thousand records.

use std::collections::HashMap;

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
}

//! Which of the records that were left are asked about again, and when.

use tower_idempotency::Resolved;

use super::*;

every_store! {
    // What one resolver does not know, another one of the same layer may.
    async fn what_one_resolver_left_another_one_is_asked_about_at_once(world: World) {
        let store = world.open().await;
        let base = layer(&store);
        let payments = base.clone().resolver(|_: Abandoned| async { Verdict::Leave });
        let refunds = base.resolver(|_: Abandoned| async { paid() });
        abandoned(&store, &["refund-1"]).await;
        assert_swept(payments.reconciler().sweep().await, 1, 0, 0, 1);
        assert_eq!(payments.reconciler().sweep().await.postponed, 1);
        assert_swept(refunds.reconciler().sweep().await, 1, 1, 0, 0);
    }

    async fn a_new_run_of_a_key_is_asked_about_at_once_however_its_last_one_ended(world: World) {
        let store = world.open().await;
        let (asked, times) = counter();
        let layer = layer(&store).resolver(move |_: Abandoned| {
            asked.fetch_add(1, Ordering::SeqCst);
            async { Verdict::Leave }
        });
        for (number, ends) in ["forgotten", "freed by hand", "run again"].into_iter().enumerate() {
            abandoned(&store, &[ends]).await;
            assert_eq!(layer.reconciler().sweep().await.left, 1, "{ends}");
            let found = record(&store, ends).await.unwrap();
            let mut again = claim(ends);
            match ends {
                "forgotten" => assert!(store.forget(&found.id).await.unwrap()),
                "freed by hand" => {
                    let reconciler = layer.reconciler();
                    let freed = reconciler.resolve(&found, Verdict::DidNotHappen).await.unwrap();
                    assert_eq!(freed, Resolved::Freed);
                }
                _ => again.replaces = Some(found.token),
            }
            let _cut_off_again = abandon(&store, again).await;
            let swept = layer.reconciler().sweep().await;
            assert_eq!((swept.left, swept.postponed), (1, number), "{ends}");
            assert_eq!(times(), 2 * (number + 1), "{ends}");
        }
    }
}

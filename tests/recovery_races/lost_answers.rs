//! Answers of the store that get lost while somebody finds out what a run did.

use super::*;

/// One call of a question that is left fails, before it takes effect or after.
async fn left_through_a_fault(world: &World, operation: Operation, fault: Fault) {
    let key = format!("k-{fault:?}-{operation:?}");
    let home = world.open().await;
    let (first, run) = silent(&home, &key).await;
    world.clock.advance(LEASE + MOMENT);
    let store = world.open().await;
    let (resolver, mut provider) = Provider::new();
    let (app, puppet) = puppet_app(&layer(&store).resolver(resolver));
    store.fail(operation, fault, Times::Once);
    let retry = spawn(&app, post(&key, "A"));
    provider.next().await.answer(Verdict::Leave);
    let told = retry.await.unwrap().said();
    assert_eq!(told, (409, UNKNOWN.to_owned()), "{key}");
    run.answers(201, "slow");
    assert_eq!(first.await.unwrap().status, 201, "{key}");
    comes_to(&store, &key, Some(State::Abandoned)).await;
    assert_eq!((provider.asked(), puppet.begun()), (1, 0), "{key}");

    let knows = layer(&store).resolver(|_: Abandoned| async { paid() });
    assert_eq!(knows.reconciler().sweep().await.answered, 1, "{key}");
}

every_store! {
    async fn a_question_is_left_whatever_answer_of_the_store_was_lost(world: World) {
        for operation in [Operation::TakeOver, Operation::Load, Operation::Abandon] {
            for fault in [Fault::Before, Fault::After] {
                left_through_a_fault(&world, operation, fault).await;
            }
        }
    }

    async fn requests_back_off_also_where_an_answer_of_the_store_was_lost(world: World) {
        let store = world.open().await;
        cut_off(&store, "k").await;
        let (resolver, mut provider) = Provider::new();
        let (app, _puppet) = puppet_app(&layer(&store).resolver(resolver));
        store.fail(Operation::TakeOver, Fault::After, Times::Once);
        let retry = spawn(&app, post("k", "A"));
        provider.next().await.answer(Verdict::Leave);
        assert_eq!(retry.await.unwrap().said(), (409, UNKNOWN.to_owned()));
        assert_eq!(told_at_once(&app).await, (409, UNKNOWN.to_owned()));
        assert_eq!(provider.asked(), 1);
    }

    async fn sweeps_back_off_also_where_an_answer_of_the_store_was_lost(world: World) {
        let store = world.open().await;
        cut_off(&store, "k").await;
        let (resolver, mut provider) = Provider::new();
        let reconciler = layer(&store).resolver(resolver).reconciler();
        store.fail(Operation::TakeOver, Fault::After, Times::Once);
        let (swept, ()) = tokio::join!(reconciler.sweep(), async {
            provider.next().await.answer(Verdict::Leave);
        });
        assert_eq!(swept.left, 1, "{swept:?}");
        let swept = reconciler.sweep().await;
        assert_eq!((swept.postponed, provider.asked()), (1, 1), "{swept:?}");
    }
}

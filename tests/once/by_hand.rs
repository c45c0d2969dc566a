//! Operations that end their transaction by themselves, which nobody can know the outcome of.

use tower_idempotency::{Done, Fingerprint, IdempotencyKey, Once, OnceError, Scope, State, Tx};

use super::stage::Broken;
use crate::{
    ground::{Db, Ground},
    on_both,
};

type Ended = Result<Done<u64>, OnceError<Broken>>;

/// Books, sends this statement by itself, and returns this.
async fn ends_by_hand<D: Db>(
    once: &Once<D::Store>,
    statement: &'static str,
    lent: bool,
    returned: Result<u64, Broken>,
) -> Ended {
    let operation = move |mut tx: Tx<D>| async move {
        let booking = "INSERT INTO effects VALUES ('k', 1)";
        D::run_in(&mut tx, booking).await.unwrap();
        // One sent with `&mut tx` is noticed, and fails.
        let _ = match lent {
            true => D::run(&mut *tx.connection().await.unwrap(), statement).await,
            false => D::run_in(&mut tx, statement).await,
        };
        returned
    };
    let key = IdempotencyKey::new("k");
    once.run_in(Scope::shared(), key, Fingerprint::of(["A"]), operation)
        .await
}

/// Every way to do it.
const WAYS: [(bool, Result<u64, Broken>); 4] = [
    (true, Ok(1)),
    (true, Err(Broken("refused"))),
    (false, Ok(1)),
    (false, Err(Broken("refused"))),
];

on_both! {
    async fn what_was_rolled_back_by_hand_is_never_said_to_be_done<D: Db>() {
        for (lent, returned) in WAYS {
            let ground = Ground::<D>::new().await;
            let once = Once::new(ground.layer());
            for call in 1..=3 {
                let ended = ends_by_hand::<D>(&once, "ROLLBACK", lent, returned).await;
                let error = ended.unwrap_err();
                let what = format!("call {call}, lent {lent}, {returned:?}: {error:?}: {error}");
                assert!(!error.is_done() && error.retry_after().is_none(), "{what}");
                // SQLite lets nobody end it, and so it is known that nothing was done.
                match ground.left("k").await {
                    (0, None) => assert!(!D::IS_POSTGRES, "{what}"),
                    left => {
                        assert_eq!(left, (0, Some(State::Completed)), "{what}");
                        assert!(error.to_string().contains("look up what was done"), "{what}");
                    }
                }
            }
        }
    }

    async fn what_was_committed_by_hand_is_neither_said_to_have_had_no_effect_nor_run_again<D: Db>() {
        for (lent, returned) in WAYS {
            let ground = Ground::<D>::new().await;
            let once = Once::new(ground.layer());
            for call in 1..=3 {
                let ended = ends_by_hand::<D>(&once, "COMMIT", lent, returned).await;
                let error = ended.unwrap_err();
                let what = format!("call {call}, lent {lent}, {returned:?}: {error:?}: {error}");
                assert!(!error.is_done() && error.retry_after().is_none(), "{what}");
                match ground.left("k").await {
                    (0, None) => assert!(!D::IS_POSTGRES, "{what}"),
                    left => {
                        assert_eq!(left, (1, Some(State::Completed)), "{what}");
                        assert!(matches!(error, OnceError::Refused(_)), "{what}");
                        assert!(error.to_string().contains("look up what was done"), "{what}");
                    }
                }
            }
        }
    }
}

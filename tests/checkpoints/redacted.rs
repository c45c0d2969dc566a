//! Nothing that a handler saves is shown anywhere.

use std::fmt::Write;

use tower_idempotency::testing::{Fault, Operation, Times};

use crate::{
    common::*,
    every_store,
    support::{logs::Written, post},
};

const VALUE: &str = "ch3ckpoint-s3cret";
const KEY: &str = "k3y-s3cret";

every_store! {
    async fn no_value_and_no_key_is_logged_or_shown(world: World) {
        let log = Written::everywhere();
        let mut shown = String::new();
        let secret = |at: usize| format!("{VALUE}-{at}");
        let short = std::time::Duration::from_millis(100);
        let mut stage = Stage::with(&world, |store| {
            layer(store).store_timeout(short).downstream_secret(VALUE)
        }).await;
        let (run, answer) = stage.begin(post(KEY, VALUE)).await;
        run.owner().checkpoint("step", &secret(0)).await.unwrap();
        for fault in [Fault::Before, Fault::After, Fault::HangBefore, Fault::HangAfter] {
            stage.store.fail(Operation::Save, fault, Times::Next(3));
            let error = run.owner().checkpoint("step", &secret(1)).await.unwrap_err();
            write!(shown, "{error} {error:?} {error:#?}").unwrap();
            stage.store.clear();
            stage.store.fail(Operation::Load, fault, Times::Next(3));
            let error = run.owner().checkpointed::<u64>("step").await.unwrap_err();
            write!(shown, "{error} {error:?} {error:#?}").unwrap();
            stage.store.clear();
        }
        let wrong = run.owner().checkpointed::<u64>("step").await.unwrap_err();
        let large = run.owner().checkpoint("large", &VALUE.repeat(9_999)).await.unwrap_err();
        let long = run.owner().checkpoint(&"n".repeat(65), VALUE).await.unwrap_err();
        for error in [wrong, large, long] {
            write!(shown, "{error} {error:?} {error:#?}").unwrap();
            let mut source = std::error::Error::source(&error);
            while let Some(error) = source {
                write!(shown, "{error} {error:?}").unwrap();
                source = error.source();
            }
        }
        write!(shown, "{:?} {:#?}", run.owner(), run.owner().downstream_key("charge").unwrap()).unwrap();
        run.answers(503, "down");
        answer.await.unwrap();
        let (run, _answer) = stage.begin(post(KEY, VALUE)).await;
        run.owner().checkpointed::<u64>("step").await.unwrap_err();
        if world.is_durable() {
            world.tamper("DROP TABLE idempotency_checkpoints").await;
            let error = run.owner().checkpoint("step", VALUE).await.unwrap_err();
            write!(shown, "{error} {error:?}").unwrap();
        }

        let text = log.text();
        for heard in ["operation=\"save\"", "operation=\"load\"", "did not answer in time"] {
            assert!(text.contains(heard), "the log is deaf to {heard}");
        }
        let bytes = |secret: &str| {
            let list = format!("{:?}", secret.as_bytes());
            list.trim_matches(['[', ']']).to_owned()
        };
        for secret in [VALUE, KEY] {
            for form in [secret.to_owned(), bytes(secret)] {
                assert!(!shown.contains(&form), "{shown}");
                assert!(!text.contains(&form), "the log shows {form}");
            }
        }
    }
}

//! States go forwards; what is too old is never sent; what is deleted is old and settled.

use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use http::{Response, StatusCode};
use tower_idempotency::client::{
    EntryState, Outbox, OutboxErrorKind, Outcome, Unanswered, Undelivered,
};

use crate::ground::{both, charge_of};

const HOUR: Duration = Duration::from_secs(3_600);
const DAY: Duration = Duration::from_secs(24 * 3_600);

fn answer(status: StatusCode, body: &'static str) -> Option<Response<Bytes>> {
    let response = Response::builder().status(status).header("x-by", "hand");
    Some(response.body(Bytes::from(body)).unwrap())
}

both! {
    async fn what_is_done_stays_done_with_its_first_answer(ground: Ground) {
        let outbox = &ground.outbox;
        outbox.begin("r", charge_of(1)).await.unwrap();
        let failed = outbox
            .settle("r", Outcome::Failed, answer(StatusCode::UNAUTHORIZED, "no"))
            .await
            .unwrap();
        assert_eq!(
            (failed.state(), failed.status()),
            (EntryState::Failed, Some(StatusCode::UNAUTHORIZED))
        );
        // Said again, it changes nothing.
        let again = outbox.settle("r", Outcome::Failed, None).await.unwrap();
        assert_eq!(
            (again.status(), again.settled()),
            (failed.status(), failed.settled())
        );

        // It turns out to be done.
        let done = outbox
            .settle("r", Outcome::Done, answer(StatusCode::CREATED, "ch_1"))
            .await
            .unwrap();
        assert_eq!(done.state(), EntryState::Done);
        let kept = done.result().unwrap().unwrap();
        assert_eq!(
            (kept.status(), &kept.body()[..], &kept.headers()["x-by"]),
            (
                StatusCode::CREATED,
                &b"ch_1"[..],
                &"hand".parse::<http::HeaderValue>().unwrap()
            )
        );
        let again = outbox
            .settle("r", Outcome::Done, answer(StatusCode::OK, "ch_2"))
            .await
            .unwrap();
        assert_eq!(
            (again.status(), again.settled()),
            (done.status(), done.settled())
        );
        let refused = outbox.settle("r", Outcome::Failed, None).await.unwrap_err();
        assert_eq!(refused.kind(), OutboxErrorKind::State);
        assert_eq!(
            outbox.reopen("r").await.unwrap_err().kind(),
            OutboxErrorKind::State
        );
        assert_eq!(
            outbox.find("r").await.unwrap().unwrap().state(),
            EntryState::Done
        );
        for reference in ["nobody", ""] {
            let missing = outbox
                .settle(reference, Outcome::Done, None)
                .await
                .unwrap_err();
            assert_eq!(missing.kind(), OutboxErrorKind::Missing);
        }
    }

    async fn a_refusal_that_was_mended_is_sent_again_with_its_first_key(ground: Ground) {
        let relay = ground.relay();
        ground.shop.refuse_next(StatusCode::UNAUTHORIZED);
        let failed = relay.deliver::<Body, _>("r", charge_of(1)).await.unwrap();
        assert_eq!(
            (failed.state(), failed.status()),
            (EntryState::Failed, Some(StatusCode::UNAUTHORIZED))
        );
        // A settled one is not sent again by itself.
        let again = relay.send::<Body, _>("r").await.unwrap();
        assert_eq!(
            (again.state(), ground.shop.requests().len()),
            (EntryState::Failed, 1)
        );

        let reopened = ground.outbox.reopen("r").await.unwrap();
        assert_eq!(
            (reopened.state(), reopened.status(), reopened.settled()),
            (EntryState::Pending, None, None)
        );
        assert_eq!(
            ground.outbox.reopen("r").await.unwrap().state(),
            EntryState::Pending
        );
        let done = relay.send::<Body, _>("r").await.unwrap();
        assert_eq!(
            (done.state(), done.entry().attempts()),
            (EntryState::Done, 1)
        );
        assert_eq!(
            (ground.shop.keys().len(), ground.shop.charges().len()),
            (1, 1)
        );
        assert_eq!(
            ground.outbox.reopen("nobody").await.unwrap_err().kind(),
            OutboxErrorKind::Missing
        );
    }

    async fn what_is_older_than_the_servers_keys_is_reconciled_and_never_sent(ground: Ground) {
        let (outbox, relay) = (&ground.outbox, ground.relay());
        for reference in ["young", "old", "refused"] {
            outbox.begin(reference, charge_of(1)).await.unwrap();
        }
        outbox
            .settle("refused", Outcome::Failed, None)
            .await
            .unwrap();
        // The margin is a minute: one is well before it, the others just behind.
        ground.age("young", DAY - Duration::from_secs(120)).await;
        ground.age("old", DAY - Duration::from_secs(59)).await;
        ground.age("refused", DAY - Duration::from_secs(59)).await;

        let old = outbox.find("old").await.unwrap().unwrap();
        assert!(old.is_overdue() && old.state() == EntryState::Pending);
        let names = |entries: Vec<tower_idempotency::client::Entry>| -> Vec<String> {
            entries
                .iter()
                .map(|entry| entry.reference().to_owned())
                .collect()
        };
        assert_eq!(names(outbox.pending(10).await.unwrap()), ["young"]);
        assert_eq!(names(outbox.overdue(10).await.unwrap()), ["old"]);
        let counts = outbox.counts().await.unwrap();
        assert_eq!(
            (counts.pending, counts.overdue, counts.done, counts.failed),
            (1, 1, 0, 1)
        );
        assert_eq!(
            outbox.reopen("refused").await.unwrap_err().kind(),
            OutboxErrorKind::Overdue
        );

        let resumed = relay.resume::<Body, _>(10).await.unwrap();
        assert_eq!(
            (names(resumed.done), names(resumed.overdue)),
            (vec!["young".to_owned()], vec!["old".to_owned()])
        );
        assert!(resumed.failed.is_empty() && resumed.pending.is_empty());
        for _ in 0..2 {
            let refused = relay.send::<Body, _>("old").await.unwrap_err();
            assert!(
                matches!(&refused, Undelivered::Overdue { entry, after: None, .. } if entry.reference() == "old"),
                "{refused:?}"
            );
        }
        assert_eq!(ground.shop.requests().len(), 1);
        assert_eq!(outbox.find("old").await.unwrap().unwrap().attempts(), 0);

        // Looked up, and found done.
        let done = outbox.settle("old", Outcome::Done, None).await.unwrap();
        assert_eq!((done.state(), done.status()), (EntryState::Done, None));
        assert!(!done.is_overdue());
        assert!(done.result().unwrap().is_none());
        assert!(outbox.overdue(10).await.unwrap().is_empty());
    }

    async fn a_key_that_ends_between_two_attempts_ends_the_attempts(ground: Ground) {
        ground.outbox.begin("r", charge_of(1)).await.unwrap();
        ground.shop.is_down(true);
        // Told by the first attempt, that the second one shall come later than the key lives.
        let pool = ground.pool.clone();
        let aged = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let (app, attempts) = (ground.shop.app(), aged.clone());
        let client = tower::service_fn(move |request: http::Request<Body>| {
            let (app, pool, attempts) = (app.clone(), pool.clone(), attempts.clone());
            async move {
                attempts.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                let age = "UPDATE idempotency_outbox SET begun = begun - 86400000000";
                sqlx::query(age).execute(&pool).await.unwrap();
                tower::ServiceExt::oneshot(app, request).await
            }
        });
        let retry = tower_idempotency::client::RetryLayer::new()
            .back_off(Duration::from_millis(1), Duration::from_millis(1));
        let relay = tower_idempotency::client::Relay::new(
            ground.outbox.clone(),
            tower_layer::Layer::layer(&retry, client),
        );
        let ended = relay.send("r").await.unwrap_err();
        // It says that something was sent.
        assert!(
            matches!(
                &ended,
                Undelivered::Overdue { after: Some(Unanswered::GaveUp(last)), .. } if last.attempts() == 1
            ),
            "{ended:?}"
        );
        assert!(ended.to_string().contains("was sent without an answer"));
        assert_eq!(aged.load(std::sync::atomic::Ordering::SeqCst), 1);
        assert_eq!(
            ground.outbox.find("r").await.unwrap().unwrap().attempts(),
            1
        );
    }

    async fn a_purge_deletes_what_is_old_and_settled_and_nothing_pending(ground: Ground) {
        let outbox = &ground.outbox;
        for reference in ["pending", "young", "late", "done", "failed"] {
            outbox.begin(reference, charge_of(1)).await.unwrap();
        }
        outbox.settle("done", Outcome::Done, None).await.unwrap();
        outbox
            .settle("failed", Outcome::Failed, None)
            .await
            .unwrap();
        outbox.settle("young", Outcome::Done, None).await.unwrap();
        for reference in ["pending", "done", "failed", "late"] {
            ground.age(reference, DAY + HOUR).await;
        }
        // Begun long ago, and settled just now.
        outbox.settle("late", Outcome::Done, None).await.unwrap();
        ground.age("young", DAY - HOUR).await;

        assert_eq!(outbox.purge(1).await.unwrap(), 1);
        assert_eq!(outbox.purge(10).await.unwrap(), 1);
        assert_eq!(outbox.purge(10).await.unwrap(), 0);
        for (reference, there) in [
            ("pending", true),
            ("young", true),
            ("late", true),
            ("done", false),
            ("failed", false),
        ] {
            assert_eq!(
                outbox.find(reference).await.unwrap().is_some(),
                there,
                "{reference}"
            );
        }
        ground.age("late", DAY).await;
        assert_eq!(outbox.purge(10).await.unwrap(), 1);
    }

    async fn an_answer_that_cannot_be_kept_is_refused(ground: Ground) {
        let outbox = &ground.outbox;
        outbox.begin("r", charge_of(1)).await.unwrap();
        let large = Response::new(Bytes::from(vec![1; 1024 * 1024 + 1]));
        let mut lines = Response::new(Bytes::new());
        for _ in 0..16_385 {
            lines.headers_mut().append("x", http::HeaderValue::from_static("y"));
        }
        for answer in [large, lines] {
            let refused = outbox.settle("r", Outcome::Done, Some(answer)).await.unwrap_err();
            assert_eq!(refused.kind(), OutboxErrorKind::Invalid);
        }
        assert_eq!(outbox.find("r").await.unwrap().unwrap().state(), EntryState::Pending);
        let largest = Response::new(Bytes::from(vec![1; 1024 * 1024]));
        let done = outbox.settle("r", Outcome::Done, Some(largest)).await.unwrap();
        assert_eq!(done.result().unwrap().unwrap().body().len(), 1024 * 1024);
    }

    async fn what_ended_is_listed_page_by_page(ground: Ground) {
        let outbox = &ground.outbox;
        for reference in ["c", "é", "a", "b"] {
            outbox.begin(reference, charge_of(1)).await.unwrap();
        }
        for reference in ["é", "a", "c"] {
            outbox.settle(reference, Outcome::Done, answer(StatusCode::CREATED, reference)).await.unwrap();
        }
        let (mut after, mut seen) = (None, Vec::new());
        loop {
            let page = outbox.list(EntryState::Done, after.as_ref(), 2).await.unwrap();
            seen.extend(page.iter().map(|entry| entry.reference().to_owned()));
            after = page.into_iter().last();
            if after.is_none() {
                break;
            }
        }
        assert_eq!(seen, ["a", "c", "é"]);
        assert_eq!(outbox.list(EntryState::Pending, None, 9).await.unwrap()[0].reference(), "b");
        assert!(outbox.list(EntryState::Failed, None, 9).await.unwrap().is_empty());
    }

    async fn lists_are_bounded_and_begin_with_the_oldest(ground: Ground) {
        for (reference, hours) in [("b", 3), ("a", 2), ("c", 4), ("d", 30), ("e", 31)] {
            ground.outbox.begin(reference, charge_of(1)).await.unwrap();
            ground.age(reference, HOUR * hours).await;
        }
        let names = |entries: Vec<tower_idempotency::client::Entry>| -> String {
            entries.iter().map(|entry| entry.reference()).collect()
        };
        assert_eq!(names(ground.outbox.pending(10).await.unwrap()), "cba");
        assert_eq!(names(ground.outbox.pending(2).await.unwrap()), "cb");
        assert_eq!(names(ground.outbox.overdue(10).await.unwrap()), "ed");
        assert_eq!(names(ground.outbox.overdue(1).await.unwrap()), "e");
        // A server that forgets sooner: more are overdue.
        let short: Outbox<Db> = Outbox::new(ground.pool.clone()).key_lifetime(HOUR * 3);
        assert_eq!(names(short.pending(10).await.unwrap()), "a");
    }
}

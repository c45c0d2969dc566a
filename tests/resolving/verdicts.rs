//! Each verdict, and what a resolver is told.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use axum::{
    http::{HeaderValue, Response, header},
    response::IntoResponse,
};
use bytes::Bytes;
use support::bodies::Pieces;
use tower_idempotency::{
    Abandoned, ExactRequest, FingerprintScheme, IdempotencyKey, MemoryStore, Mode, RecordId,
    Recovery, Retain, Scope, Streamed,
    store::{AnyStore, Claim, ClaimRequest, Settled, Store},
    testing::{FaultyStore, Operation},
};

use super::*;

type Answers = fn() -> Response<Body>;

/// An answer with whatever is hard to keep.
fn odd_answer() -> Response<Body> {
    let body: Vec<u8> = (0..=255).collect();
    let mut answer = Response::builder()
        .status(299)
        .header("link", "<a>; rel=\"x\"")
        .header("link", "<b>; rel=\"y\"")
        .header("location", "/charges/1")
        .header("set-cookie", "session=secret")
        .header("idempotent-replay", "made up")
        .body(Body::from(body))
        .unwrap();
    let odd = HeaderValue::from_bytes(b"caf\xe9").unwrap();
    answer.headers_mut().insert("x-odd", odd);
    answer
}

every_store! {
    // L11 with a resolver: nobody runs again, and everybody gets the true answer.
    async fn an_answer_that_was_found_out_is_replayed_byte_for_byte(world: World) {
        let store = world.open().await;
        let (resolver, mut provider) = Provider::new();
        let mut shop = Shop::asking(&store, resolver);
        shop.cut_off("k").await;
        let retry = shop.retries("k");
        provider.next().await.answer(Verdict::Answer(odd_answer()));
        let mut expected = Answer::of(odd_answer()).await;
        for name in ["set-cookie", "idempotent-replay"] {
            expected.headers.remove(name);
        }
        let first = retry.await.unwrap();
        for replay in [first, shop.retry("k").await] {
            replay.assert_replays(&expected);
            assert!(!replay.headers.contains_key(header::SET_COOKIE));
        }
        assert_eq!((shop.puppet.begun(), provider.asked()), (1, 1));
        assert_eq!(record(&store, "k").await.unwrap().attempt, 1);
    }

    async fn what_did_not_happen_runs_as_new(world: World) {
        let store = world.open().await;
        let (resolver, mut provider) = Provider::new();
        let mut shop = Shop::asking(&store, resolver);
        shop.cut_off("k").await;
        let retry = shop.retries("k");
        provider.next().await.answer(Verdict::DidNotHappen);
        let run = shop.puppet.next().await;
        assert_eq!(run.owner().attempt(), 1);
        run.answers(201, "now it did");
        let first = retry.await.unwrap();
        assert_eq!((first.status.as_u16(), first.replay), (201, false));
        shop.retry("k").await.assert_replays(&first);
        assert_eq!((shop.puppet.begun(), provider.asked()), (2, 1));
    }

    async fn what_is_left_falls_to_the_recovery_policy_and_is_asked_once_a_request(world: World) {
        let store = world.open().await;
        for recovery in [Recovery::Refuse, Recovery::rerun()] {
            let (resolver, mut provider) = Provider::new();
            let mut shop = Shop::new(layer(&store).resolver(resolver).recovery(recovery));
            let key = format!("{}", recovery == Recovery::Refuse);
            shop.cut_off(&key).await;
            let retry = shop.retries(&key);
            provider.next().await.answer(Verdict::Leave);
            match recovery {
                Recovery::Refuse => {
                    assert_eq!(retry.await.unwrap().said(), (409, UNKNOWN.to_owned()));
                    assert_eq!(state(&store, &key).await, Some(State::Abandoned));
                    // Asked about within the last second: not again.
                    assert_eq!(shop.retry(&key).await.said(), (409, UNKNOWN.to_owned()));
                }
                _ => {
                    let run = shop.puppet.next().await;
                    assert_eq!(run.owner().attempt(), 2);
                    run.answers(201, "again");
                    assert_eq!(retry.await.unwrap().status, 201);
                }
            }
            assert_eq!(provider.asked(), 1);
        }
    }

    // F2 before all else: whoever asks for something else learns nothing and has nothing asked.
    async fn another_body_is_refused_before_anything_is_asked(world: World) {
        let store = world.open().await;
        let (resolver, provider) = Provider::new();
        let mut shop = Shop::asking(&store, resolver);
        shop.cut_off("k").await;
        assert_eq!(send(&shop.app, post("k", "B")).await.said(), (409, REUSED.to_owned()));
        assert_eq!((provider.asked(), store.calls(Operation::TakeOver)), (0, 0));
    }

    async fn a_resolver_is_told_everything_there_is(world: World) {
        let store = world.open().await;
        let (resolver, mut provider) = Provider::new();
        let mut shop = Shop::new(layer(&store).resolver(resolver).downstream_secret([7; 32]));
        let request = spawn(&shop.app, post("k", "A"));
        let run = shop.puppet.next().await;
        let owner = run.owner();
        owner.checkpoint("reserved", &500).await.unwrap();
        owner.checkpoint("charge", "ch_1").await.unwrap();
        let downstream = owner.downstream_key("charge").unwrap();
        run.panics("as the test wants");
        assert_eq!(request.await.unwrap().status, 500);
        let found = record(&store, "k").await.unwrap();

        let retry = shop.retries("k");
        let question = provider.next().await;
        let abandoned = &question.abandoned;
        assert_eq!(abandoned.record(), &found);
        assert_eq!(abandoned.key(), Some(&IdempotencyKey::new("k")));
        assert_eq!(abandoned.scope(), Some(&Scope::shared()));
        assert_eq!(abandoned.checkpoint("reserved").unwrap(), Some(500));
        assert_eq!(abandoned.checkpoint("charge").unwrap(), Some("ch_1".to_owned()));
        assert_eq!(abandoned.checkpoint::<String>("other").unwrap(), None);
        assert!(abandoned.checkpoint::<u32>("charge").is_err());
        assert_eq!(abandoned.downstream_key("charge").unwrap(), downstream);
        // Held meanwhile under another token.
        let held = record(&store, "k").await.unwrap();
        assert_ne!(held.token, found.token);
        assert_eq!((held.state, held.attempt), (State::Running, 1));
        question.answer(Verdict::DidNotHappen);

        // What was saved stays for whoever goes on.
        let run = shop.puppet.next().await;
        assert_eq!(run.owner().attempt(), 2);
        assert_eq!(run.owner().checkpointed("reserved").await.unwrap(), Some(500));
        run.answers(201, "went on");
        assert_eq!(retry.await.unwrap().status, 201);
    }

    // E2, B3, B4: the answer is kept as a handler's would be.
    async fn an_answer_that_cannot_be_kept_leaves_what_a_handlers_would(world: World) {
        let store = world.open().await;
        let answers: [(&str, Answers); 6] = [
            ("tombstone", || (StatusCode::OK, Retain::Tombstone, "secret").into_response()),
            ("streamed", || (StatusCode::OK, Streamed, "an event").into_response()),
            ("too-large", || "x".repeat(1_025).into_response()),
            ("endless", || Pieces::endless("x").body().into_response()),
            ("never-ends", || Body::new(http_body_util::StreamBody::new(
                futures_util::stream::pending::<Result<http_body::Frame<Bytes>, std::io::Error>>(),
            )).into_response()),
            ("released", || (StatusCode::OK, Retain::Release, "no").into_response()),
        ];
        for (key, answer) in answers {
            let resolver = move |_: Abandoned| async move { Verdict::Answer(answer()) };
            let layer = layer(&store)
                .resolver(resolver)
                .response_body_limit(1_024)
                .buffer_timeout(Duration::from_millis(50));
            let mut shop = Shop::new(layer);
            shop.cut_off(key).await;
            let retry = shop.retries(key);
            if key == "released" {
                shop.puppet.next().await.answers(201, "runs");
                assert_eq!(retry.await.unwrap().status, 201);
                continue;
            }
            assert_eq!(retry.await.unwrap().said(), (409, NOT_RETAINED.to_owned()), "{key}");
            assert_eq!(state(&store, key).await, Some(State::Completed), "{key}");
            assert_eq!(shop.puppet.begun(), 1);
        }
    }

    // A status that would free the key says nothing here: that it was declined is the answer.
    async fn an_answer_is_kept_whatever_its_status(world: World) {
        let store = world.open().await;
        for status in [200, 400, 402, 422, 429, 503] {
            let resolver = move |_: Abandoned| async move {
                Verdict::answer((StatusCode::from_u16(status).unwrap(), "so it was"))
            };
            let mut shop = Shop::asking(&store, resolver);
            let key = status.to_string();
            shop.cut_off(&key).await;
            for _ in 0..2 {
                let replay = shop.retry(&key).await;
                assert_eq!((replay.status.as_u16(), replay.replay), (status, true));
            }
        }
    }

    // Section 6: a run whose effect is committed with its record is never asked about.
    async fn a_transactional_run_is_run_again_without_being_asked_about(world: World) {
        let store = world.open().await;
        let (resolver, provider) = Provider::new();
        let mut shop = Shop::asking(&store, resolver);
        let (head, _) = post("k", "A").into_parts();
        let fingerprint = ExactRequest.fingerprint(&head, &Bytes::from("A")).unwrap();
        let id = RecordId::new(Scope::shared(), IdempotencyKey::new("k"));
        let mut claim = ClaimRequest::new(id, ExactRequest.name(), fingerprint);
        claim.mode = Mode::Transactional;
        let Claim::Won(ticket) = store.claim(claim).await.unwrap() else { panic!("not won") };
        assert_eq!(store.abandon(&ticket).await.unwrap(), Settled::Done);
        let retry = shop.retries("k");
        shop.puppet.next().await.answers(201, "again");
        assert_eq!(retry.await.unwrap().status, 201);
        assert_eq!((provider.asked(), store.calls(Operation::TakeOver)), (0, 0));
    }

    // What was released with checkpoints is known: it goes on without a question.
    async fn a_released_record_goes_on_without_being_asked_about(world: World) {
        let store = world.open().await;
        let (resolver, provider) = Provider::new();
        let mut shop = Shop::asking(&store, resolver);
        let request = spawn(&shop.app, post("k", "A"));
        let run = shop.puppet.next().await;
        run.owner().checkpoint("step", &1).await.unwrap();
        run.answers(429, "later");
        assert_eq!(request.await.unwrap().status, 429);
        assert_eq!(state(&store, "k").await, Some(State::Released));
        let retry = shop.retries("k");
        shop.puppet.next().await.answers(201, "went on");
        assert_eq!(retry.await.unwrap().status, 201);
        assert_eq!(provider.asked(), 0);
    }
}

// Requests ask about one record once a second, however many there are.
#[tokio::test(start_paused = true)]
async fn requests_that_hammer_have_a_record_asked_about_once_a_second() {
    let store: TestStore = FaultyStore::new(AnyStore::new(MemoryStore::new()));
    let asked = Arc::new(AtomicUsize::new(0));
    let count = asked.clone();
    let resolver = move |_: Abandoned| {
        count.fetch_add(1, Ordering::SeqCst);
        async { Verdict::Leave }
    };
    let mut shop = Shop::asking(&store, resolver);
    for key in ["k", "other"] {
        shop.cut_off(key).await;
    }
    for second in 1..=5 {
        for _ in 0..10 {
            let refused = shop.retry("k").await;
            assert_eq!(refused.said(), (409, UNKNOWN.to_owned()));
        }
        assert_eq!(asked.load(Ordering::SeqCst), second);
        tokio::time::advance(Duration::from_secs(1)).await;
    }
    // Each record for itself.
    assert_eq!(shop.retry("other").await.code(), UNKNOWN);
    assert_eq!(asked.load(Ordering::SeqCst), 6);
}

#[test]
fn a_verdict_shows_the_status_of_its_answer_and_nothing_else() {
    let verdict = Verdict::answer((StatusCode::CREATED, [("x-name", "s3cret")], "b0dy"));
    let shown = format!("{verdict:?} {verdict:#?}");
    assert!(shown.contains("201"), "{shown}");
    for secret in ["s3cret", "x-name", "b0dy"] {
        assert!(!shown.contains(secret), "{shown}");
    }
    assert_eq!(
        format!("{:?} {:?}", Verdict::Leave, Verdict::DidNotHappen),
        "Leave DidNotHappen"
    );
}

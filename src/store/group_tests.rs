//! The queue, with a writer that does as it is told.

use std::sync::Mutex;

use http::StatusCode;

use super::*;
use crate::{Fingerprint, IdempotencyKey, Scope};

/// What the writer was given, batch by batch, and which keys it leaves without an answer how often.
#[derive(Default)]
struct Script {
    batches: Vec<Vec<String>>,
    locked: Vec<(String, usize)>,
    closed: bool,
}

#[derive(Clone, Default)]
struct Scripted(Arc<Mutex<Script>>);

impl Scripted {
    fn lock(self, key: &str, times: usize) -> Self {
        self.0.lock().unwrap().locked.push((key.to_owned(), times));
        self
    }

    fn batches(&self) -> Vec<Vec<String>> {
        self.0.lock().unwrap().batches.clone()
    }
}

impl Writer for Scripted {
    const DATABASE: Database = Database::Sqlite;

    async fn commit(&mut self, batch: &mut [Operation]) -> Result<(), Failure> {
        // So that what is sent meanwhile queues up.
        tokio::time::sleep(Duration::from_millis(10)).await;
        let mut script = self.0.lock().unwrap();
        let mut keys = Vec::new();
        for operation in batch {
            let asked = match operation {
                Operation::Claim(asked) => asked,
                Operation::Complete(asked) => {
                    let Complete { ticket, done, .. } = &asked.question;
                    let key = String::from_utf8(ticket.id.key.as_bytes().to_vec()).unwrap();
                    keys.push(format!("{key} {}", done.status.as_u16()));
                    asked.answer(Ok(Settled::Done));
                    continue;
                }
                _ => continue,
            };
            let key = String::from_utf8(asked.question.id.key.as_bytes().to_vec()).unwrap();
            keys.push(key.clone());
            let locked = script
                .locked
                .iter_mut()
                .find(|(locked, times)| *locked == key && *times > 0);
            match locked {
                Some((_, times)) => *times -= 1,
                None => {
                    let ticket = asked.question.ticket(1);
                    asked.answer(Ok(Claim::Won(ticket)));
                }
            }
        }
        script.batches.push(keys);
        Ok(())
    }

    async fn close(self) -> Result<(), Failure> {
        self.0.lock().unwrap().closed = true;
        Ok(())
    }
}

fn request(key: &str) -> ClaimRequest {
    let id = RecordId::new(Scope::shared(), IdempotencyKey::new(key));
    ClaimRequest::new(id, "test", Fingerprint::from_bytes([0; 32]))
}

async fn claim(queue: &Queue, key: &str) -> Claim {
    queue.ask(Operation::Claim, request(key)).await.unwrap()
}

#[tokio::test(start_paused = true)]
async fn an_operation_without_an_answer_is_tried_again_before_newer_ones_and_delays_nobody() {
    let writer = Scripted::default().lock("locked", 3);
    let queue = Queue::start(writer.clone());
    let all = async {
        tokio::join!(claim(&queue, "locked"), claim(&queue, "free"), async {
            claim(&queue, "first").await;
            claim(&queue, "second").await
        })
    };
    tokio::time::timeout(Duration::from_secs(5), all)
        .await
        .unwrap();
    let batches = writer.batches();
    assert_eq!(batches[0], ["locked", "free", "first"]);
    assert_eq!(batches[1], ["locked"]);
    assert_eq!(
        batches[2],
        ["locked", "second"],
        "the older one comes first"
    );
    assert_eq!(batches[3..], [["locked"]]);
    let grouping = queue.grouping();
    assert_eq!(
        (grouping.operations, grouping.batches, grouping.largest),
        (4, 3, 2)
    );
}

#[tokio::test(start_paused = true)]
async fn an_operation_that_stays_without_an_answer_rests_longer_and_longer() {
    let writer = Scripted::default().lock("locked", 100);
    let queue = Queue::start(writer.clone());
    let patience = Duration::from_secs(1);
    let waited = tokio::time::timeout(patience, claim(&queue, "locked")).await;
    assert!(waited.is_err(), "it was locked for longer");
    // 10 ms each, and rests of up to 50 ms between.
    let tried = writer.batches().len();
    assert!((15..=25).contains(&tried), "{tried} times");
}

#[tokio::test(start_paused = true)]
async fn a_claim_whose_caller_has_gone_is_not_tried_again() {
    let writer = Scripted::default().lock("locked", 100);
    let queue = Queue::start(writer.clone());
    let waited = tokio::time::timeout(Duration::from_millis(15), claim(&queue, "locked")).await;
    assert!(waited.is_err());
    claim(&queue, "another").await;
    let tried = writer.batches().len();
    claim(&queue, "yet another").await;
    assert_eq!(writer.batches()[tried..], [["yet another"]]);
}

/// A completion of this claim, which the writer tells by its key and its status.
async fn complete(queue: &Queue, claimed: &ClaimRequest, status: StatusCode) -> Settled {
    let complete = Complete {
        ticket: claimed.ticket(1),
        done: Completion::tombstone(status),
        lifetimes: Lifetimes::new(Duration::from_secs(60)),
    };
    queue.ask(Operation::Complete, complete).await.unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_completion_that_is_sent_again_takes_the_place_of_the_one_whose_caller_has_gone() {
    let writer = Scripted::default();
    let queue = Queue::start(writer.clone());
    let (again, other) = (request("again"), request("other"));
    let sending = async {
        // The writer has the first claim, and is busy with it for some more milliseconds.
        tokio::time::sleep(Duration::from_millis(1)).await;
        let first = complete(&queue, &again, StatusCode::OK);
        let waited = tokio::time::timeout(Duration::from_millis(2), first).await;
        assert!(waited.is_err(), "the writer was not busy");
        tokio::join!(
            complete(&queue, &other, StatusCode::ACCEPTED),
            complete(&queue, &again, StatusCode::CREATED),
        )
    };
    let all = async { tokio::join!(claim(&queue, "busy"), sending) };
    let (_, settled) = tokio::time::timeout(Duration::from_secs(5), all)
        .await
        .unwrap();
    assert_eq!(settled, (Settled::Done, Settled::Done));
    assert_eq!(writer.batches()[0], ["busy"]);
    assert_eq!(writer.batches()[1..], [["again 201", "other 202"]]);
}

#[tokio::test(start_paused = true)]
async fn closing_waits_for_what_was_asked_before() {
    let writer = Scripted::default().lock("locked", 3);
    let queue = Queue::start(writer.clone());
    let (claimed, closed) = tokio::join!(claim(&queue, "locked"), queue.close());
    assert!(matches!(claimed, Claim::Won(_)));
    closed.unwrap();
    assert!(writer.0.lock().unwrap().closed);
    let refused = queue.ask(Operation::Claim, request("late")).await;
    assert_eq!(refused.unwrap_err().kind(), StoreErrorKind::Closed);
}

/// An operation that nobody waits for.
fn asked<Q, A>(question: Q) -> Asked<Q, A> {
    Asked {
        question,
        answer: None,
        since: Instant::now(),
        #[cfg(feature = "sqlite")]
        looked_up: 0,
        #[cfg(feature = "postgres")]
        rest: None,
        caller: None,
    }
}

fn release(key: &str) -> Operation {
    let ticket = request(key).ticket(1);
    let ttl = Duration::ZERO;
    Operation::Release(asked(Release { ticket, ttl }))
}

#[test]
fn what_is_urgent_comes_first_but_overtakes_nothing_on_the_same_record() {
    let renewal = Renew {
        tickets: vec![request("a").ticket(1)],
        lease: Duration::ZERO,
    };
    let mut waiting = VecDeque::from([
        Operation::Claim(asked(request("a"))),
        release("b"),
        release("a"),
        Operation::Forget(asked(request("c").id)),
        Operation::Abandon(asked(request("c").ticket(1))),
        Operation::Renew(asked(renewal)),
        Operation::Abandon(asked(request("d").ticket(1))),
        Operation::Close(asked(())),
        release("e"),
    ]);
    urgent_first(&mut waiting);
    let order = waiting.iter().map(|operation| {
        let key = operation.record().map(|id| id.key.as_bytes().to_vec());
        let name = match operation {
            Operation::Claim(_) => "claim",
            Operation::Release(_) => "release",
            Operation::Forget(_) => "forget",
            Operation::Abandon(_) => "abandon",
            Operation::Renew(_) => "renew",
            _ => "close",
        };
        format!(
            "{name} {}",
            String::from_utf8(key.unwrap_or_default()).unwrap()
        )
    });
    let expected = [
        "release b",
        "renew ",
        "abandon d",
        "claim a",
        "release a",
        "forget c",
        "abandon c",
        "close ",
        "release e",
    ];
    assert_eq!(order.collect::<Vec<_>>(), expected);
}

#[test]
fn as_many_operations_as_fit_a_transaction_and_at_least_one() {
    let completion = |bytes: usize| {
        let done = Completion::retained(StatusCode::OK, Bytes::from(vec![0; bytes]));
        let (ticket, lifetimes) = (request("k").ticket(1), Lifetimes::new(Duration::MAX));
        let complete = Complete {
            ticket,
            done,
            lifetimes,
        };
        Operation::Complete(asked(complete))
    };
    let small: Vec<_> = (0..300).map(|_| release("k")).collect();
    assert_eq!(fitting(small.iter()), MAX_OPERATIONS);
    let half = || completion(MAX_BYTES / 2);
    assert_eq!(fitting([half(), half(), half()].iter()), 2);
    assert_eq!(fitting([completion(MAX_BYTES + 1), half()].iter()), 1);
    assert_eq!(fitting([].iter()), 0);
}

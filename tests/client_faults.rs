//! The client against the quickstart as a process of its own, with a wire between them that loses requests and
//! answers.
#![cfg(unix)]

mod support;

#[path = "client_faults/shop.rs"]
mod shop;

use std::collections::{HashMap, HashSet};

use shop::{Order, Receipt, Till};
use support::{
    faults::{Fault, FaultyWire, Seen},
    process::{Process, assert_replays, example},
    wire::Reply,
};
use tokio::task::JoinSet;

const OPERATIONS: u32 = 1_000;
/// How many of them are underway at a time.
const TOGETHER: usize = 32;
/// Any would do; with the same one, each operation meets the same faults.
const SEED: u64 = 20_240_117;

fn quickstart(folder: &tempfile::TempDir) -> Process {
    Process::start(
        std::process::Command::new(example("quickstart"))
            .env("LISTEN", "127.0.0.1:0")
            .env("DATABASE", folder.path().join("quickstart.db")),
    )
}

// X1
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_operations_over_a_bad_wire_are_charged_once_each_and_answered_alike() {
    println!("seed {SEED}");
    let folder = tempfile::tempdir().unwrap();
    let server = quickstart(&folder);
    let wire = FaultyWire::to(server.address, SEED).await;
    let receipts = pay_all(Till::new(wire.address())).await;
    let seen = wire.seen().await;

    every_kind_of_fault_has_happened(&wire, &seen);
    only_one_run_under_one_key(&receipts, &seen);
    charged_once_each(&server, &receipts).await;
    for receipt in &receipts {
        answered_alike(&server, receipt).await;
    }
    // Asking again has charged nobody.
    charged_once_each(&server, &receipts).await;
}

async fn pay_all(till: Till) -> Vec<Receipt> {
    let mut orders = (0..OPERATIONS).map(Order::number);
    let mut underway = JoinSet::new();
    let mut receipts = Vec::new();
    loop {
        while underway.len() < TOGETHER
            && let Some(order) = orders.next()
        {
            let till = till.clone();
            underway.spawn(async move { till.pay(order).await });
        }
        match underway.join_next().await {
            Some(receipt) => receipts.push(receipt.unwrap()),
            None => return receipts,
        }
    }
}

fn every_kind_of_fault_has_happened(wire: &FaultyWire, seen: &[Seen]) {
    let mut counts: HashMap<Fault, usize> = HashMap::new();
    for request in seen {
        *counts.entry(request.fault).or_default() += 1;
    }
    println!("{counts:?}, {} connections refused", wire.refused());
    for fault in Fault::ALL {
        assert!(counts.contains_key(&fault), "{fault:?} has not happened");
    }
    assert!(wire.refused() > 0, "no connection was refused");
}

/// Looks at what went over the wire: all attempts of an operation had one key, each operation its own, and the
/// server ran it once, whatever it was asked.
fn only_one_run_under_one_key(receipts: &[Receipt], seen: &[Seen]) {
    let mut sent: HashMap<&[u8], Vec<&Seen>> = HashMap::new();
    for request in seen {
        sent.entry(request.body()).or_default().push(request);
    }
    assert_eq!(sent.len(), receipts.len());
    let (mut keys, mut met_running) = (HashSet::new(), 0);
    for receipt in receipts {
        let attempts = &sent[receipt.order.body().as_bytes()];
        for attempt in attempts {
            assert_eq!(
                attempt.header("idempotency-key").as_ref(),
                Some(&receipt.key)
            );
        }
        assert!(keys.insert(receipt.key.clone()), "two operations, one key");
        // A connection that is refused is an attempt that nobody else has seen.
        assert!(attempts.len() <= receipt.attempts as usize, "{receipt:?}");

        let answers = attempts.iter().filter_map(|seen| seen.answer.as_deref());
        let answers: Vec<Reply> = answers.map(Reply::of).collect();
        let ran = |answer: &&Reply| answer.status == 201 && !answer.is_replay();
        assert_eq!(answers.iter().filter(ran).count(), 1, "{answers:?}");
        for other in answers.iter().filter(|answer| !ran(answer)) {
            let in_flight = other.said() == (409, "idempotency_in_flight".to_owned());
            // Its database is busy, on a slow machine.
            let is_busy = other.status == 503;
            assert!(in_flight || is_busy || other.is_replay(), "{other:?}");
            met_running += usize::from(in_flight);
        }
    }
    // Otherwise the faults would have shown nothing.
    let replayed = receipts.iter().filter(|receipt| receipt.replayed).count();
    let at_once = receipts
        .iter()
        .filter(|receipt| receipt.attempts == 1)
        .count();
    println!(
        "{replayed} answers were replays, {at_once} came at once, {met_running} attempts met another"
    );
    assert!(replayed > 100 && replayed < receipts.len() - 100);
    assert!(met_running > 0);
    assert!(at_once > 100 && at_once < receipts.len() - 100);
}

/// By the account of the service itself.
async fn charged_once_each(server: &Process, receipts: &[Receipt]) {
    let list = b"GET /payments HTTP/1.1\r\nhost: test\r\n\r\n";
    let list = server.exchange(list).await;
    let list: serde_json::Value = serde_json::from_slice(&list.body).unwrap();
    let charged: HashMap<&str, i64> = list["payments"]
        .as_array()
        .unwrap()
        .iter()
        .map(|payment| {
            let order = payment["order_id"].as_str().unwrap();
            (order, payment["amount_satang"].as_i64().unwrap())
        })
        .collect();
    assert_eq!(list["count"].as_u64(), Some(u64::from(OPERATIONS)));
    // None is lost where two charges were for one order.
    assert_eq!(charged.len(), receipts.len());
    for Receipt { order, .. } in receipts {
        assert_eq!(charged[&*order.id], order.amount_satang, "{order:?}");
    }
}

/// What the client got is what the server says to whoever asks, without a bad wire or a client of this crate.
async fn answered_alike(server: &Process, receipt: &Receipt) {
    let answer = server.exchange(&receipt.order.raw(&receipt.key)).await;
    let mut expected = receipt.answer.clone();
    assert_eq!(expected.is_replay(), receipt.replayed);
    expected
        .headers
        .retain(|(name, _)| name != "idempotent-replay");
    assert_replays(&answer, &expected);
}

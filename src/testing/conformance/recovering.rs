//! Contract 33: who holds a record to find out what its run did.

use std::time::Duration;

use bytes::Bytes;

use super::{
    Harness,
    support::{
        CROWD, Tried, Watch, dropped_after, ensure, ensure_eq, leased, names, open, replacing,
        request, ticks, together,
    },
};
use crate::{
    Mode, Record, RecordId, State, Token,
    store::{
        Checkpoint, Checkpoints, Claim, ClaimRequest, Completion, Inspect, Lifetimes, Settled,
        Ticket,
    },
};

const LONG: Duration = Duration::from_secs(24 * 3600);

/// Contract 33.
///
/// # Panics
///
/// When the store breaks it.
pub async fn c33_an_abandoned_record_is_taken_over_to_find_out<H: Harness>() {
    what_stays::<H>().await;
    how_long_it_holds::<H>().await;
    how_it_is_settled::<H>().await;
    one_of_many::<H>().await;
    nothing_else::<H>().await;
    sent_again::<H>().await;
    dropped::<H>().await;
    expired_while_held::<H>().await;
}

/// Claims of all that a record holds, to be abandoned in the three ways there are.
fn whole(key: &str) -> ClaimRequest {
    ClaimRequest {
        request_id: Some("req-first".into()),
        mode: Mode::Transactional,
        abandoned_ttl: Some(LONG),
        ..request(key)
    }
}

/// A record that its owner has given up.
async fn given_up<S: Inspect + Checkpoints>(store: &Tried<S>, key: &str) -> Ticket {
    let ticket = store.win(&request(key)).await;
    store.give_up(&ticket).await;
    ticket
}

fn step() -> Option<Vec<Checkpoint>> {
    Some(vec![Checkpoint::new("step", Bytes::from_static(b"1"))])
}

async fn what_stays<H: Harness>() {
    let harness = H::new().await;
    let (one, two) = (open(&harness, 33).await, open(&harness, 33).await);
    let silent = open(&harness, 33).await;
    let marked = one.win(&whole("marked")).await;
    let over = ClaimRequest {
        max_run: H::TICK,
        ..whole("over")
    };
    let lapsed = ClaimRequest {
        lease: H::TICK,
        ..whole("lapsed")
    };
    let tickets = [marked, one.win(&over).await, silent.win(&lapsed).await];
    for ticket in &tickets {
        one.keep(ticket, "step", b"1").await;
    }
    one.give_up(&tickets[0]).await;
    ticks(&harness, 2).await;
    for late in tickets {
        let before = one.found(&late.id).await;
        // What this instance claims now, for this long, tells what a hold must look like.
        let witness = ClaimRequest {
            max_run: LONG,
            ..request([late.id.key.as_bytes(), b"-witness"].concat())
        };
        let witness = two.found(&two.win(&witness).await.id).await;
        let ticket = two.hold(1, &late.id, late.token, LONG).await;
        let held = one.is(&late.id, State::Running).await;
        let expected = Record {
            token: ticket.token,
            owner: witness.owner,
            state: State::Running,
            run_until: held.run_until,
            ..before
        };
        ensure_eq!(
            33,
            held,
            expected,
            "token, owner, state and `run_until` must be the new holder's, and all else stay"
        );
        let holds_until = match H::REAL_CLOCK {
            true => held.run_until >= witness.run_until,
            false => held.run_until == witness.run_until,
        };
        ensure!(
            33,
            holds_until,
            held.run_until,
            "a hold must be counted from when it was taken"
        );
        ensure_eq!(
            33,
            names(&one.load(&ticket).await),
            names(&step()),
            "checkpoints must stay"
        );
        ensure_eq!(
            33,
            one.load(&late).await,
            None,
            "the late owner's ticket is lost"
        );
        one.fenced(&late).await;
        for store in [&one, &two] {
            let rival = replacing(late.id.key.as_bytes(), late.token);
            let rival = store.in_flight(&rival).await;
            ensure_eq!(
                33,
                (rival.token, rival.attempt, rival.request_id.as_deref()),
                (ticket.token, 1, Some("req-first")),
                "a claim must find it in flight, and no run more"
            );
        }
        let renewed = two.renew(&[late, ticket], LONG).await;
        ensure_eq!(
            33,
            renewed,
            [Settled::Lost, Settled::Done],
            "the new ticket holds the record, and no other"
        );
    }
}

async fn how_long_it_holds<H: Harness>() {
    let harness = H::new().await;
    let (one, two) = (open(&harness, 33).await, open(&harness, 33).await);
    let late = given_up(&one, "a").await;
    // At one instant a store lists them in the order of its names for them, which it may have hashed.
    ticks(&harness, 1).await;
    let late_too = given_up(&one, "b").await;
    let watch = Watch::start();
    // This instance has claimed nothing: the hold is all the lease it has.
    let ticket = two.hold(1, &late.id, late.token, H::TICK * 3).await;
    ticks(&harness, 2).await;
    let claim = one.claim(&replacing("a", ticket.token)).await;
    if watch.surely_within::<H>(H::TICK * 3) {
        let is_held = matches!(&claim, Claim::InFlight(held) if held.token == ticket.token);
        ensure!(33, is_held, claim, "the hold must last as long as asked");
    }
    // However long its holder's lease, the hold ends.
    two.renew(std::slice::from_ref(&ticket), LONG).await;
    ticks(&harness, 2).await;
    let held = one.find_abandoned(&request("a")).await;
    ensure_eq!(
        33,
        (held.token, held.attempt),
        (ticket.token, 1),
        "after the hold it must be abandoned again, under the new token"
    );
    let listed = two.abandoned(None, 10).await;
    ensure_eq!(
        33,
        listed.iter().map(|record| record.token).collect::<Vec<_>>(),
        [ticket.token, late_too.token],
        "it must keep its place among the abandoned"
    );
    let again = one.hold(1, &late.id, ticket.token, LONG).await;
    two.fenced(&ticket).await;
    one.give_up(&again).await;
    let rerun = two.win_as(2, &replacing("a", again.token)).await;
    one.fenced(&again).await;
    two.finish(&rerun, LONG).await;

    // A holder that ends gives its holds up.
    let ending = open(&harness, 33).await;
    let ticket = ending.hold(1, &late_too.id, late_too.token, LONG).await;
    one.in_flight(&request("b")).await;
    ending.close().await;
    let held = one.find_abandoned(&request("b")).await;
    ensure_eq!(
        33,
        held.token,
        ticket.token,
        "what a closed store has held is abandoned"
    );
}

async fn how_it_is_settled<H: Harness>() {
    let harness = H::new().await;
    let (one, two) = (open(&harness, 33).await, open(&harness, 33).await);
    let late = given_up(&one, "answered").await;
    let ticket = two.hold(1, &late.id, late.token, H::TICK).await;
    // Nobody has taken it over meanwhile, so it counts, late as it is.
    ticks(&harness, 2).await;
    two.finish(&ticket, LONG).await;
    one.fenced(&late).await;
    let record = one.find_completed(&request("answered")).await;
    ensure_eq!(
        33,
        (record.token, record.attempt),
        (ticket.token, 1),
        "the answer found must be the record's"
    );

    let late = given_up(&one, "did not happen").await;
    let ticket = two.hold(1, &late.id, late.token, LONG).await;
    two.done("release", two.release(&ticket, LONG).await);
    one.win_as(1, &request("did not happen")).await;

    let late = one.win(&request("half done")).await;
    one.keep(&late, "step", b"1").await;
    one.give_up(&late).await;
    let ticket = two.hold(1, &late.id, late.token, LONG).await;
    two.keep(&ticket, "asked", b"2").await;
    two.done("release", two.release(&ticket, LONG).await);
    let held = one.find_abandoned(&request("half done")).await;
    ensure!(33, held.released, held, "released with checkpoints");
    let next = one.win_as(2, &replacing("half done", ticket.token)).await;
    let saved = one.load(&next).await.map(|saved| saved.len());
    ensure_eq!(33, saved, Some(2), "whoever goes on must find all of them");

    let late = given_up(&one, "not known").await;
    let ticket = two.hold(1, &late.id, late.token, LONG).await;
    two.give_up(&ticket).await;
    let held = one.find_abandoned(&request("not known")).await;
    ensure_eq!(
        33,
        held.token,
        ticket.token,
        "given up, it is abandoned at once"
    );
}

/// Among those who take over and those who run again there is one winner.
async fn one_of_many<H: Harness>() {
    let harness = H::new().await;
    let stores = [open(&harness, 33).await, open(&harness, 33).await];
    for round in 0..8 {
        let key = format!("key-{round}");
        let late = given_up(&stores[0], &key).await;
        let held = together(CROWD, |task| {
            let store = stores[task % 2].clone();
            let (id, key) = (late.id.clone(), key.clone());
            let runs = round > 3 && task % 4 > 1;
            async move {
                if runs {
                    return match store.claim(&replacing(&key, late.token)).await {
                        Claim::Won(ticket) => Some((ticket, 2)),
                        _ => None,
                    };
                }
                let taken = store.take_over(&id, late.token, Token::random(), LONG);
                taken.await.map(|ticket| (ticket, 1))
            }
        })
        .await;
        let held: Vec<_> = held.into_iter().flatten().collect();
        ensure_eq!(
            33,
            held.len(),
            1,
            "of simultaneous takeovers exactly one must succeed"
        );
        let (ticket, attempt) = &held[0];
        let record = stores[1].is(&late.id, State::Running).await;
        ensure_eq!(
            33,
            (record.token, record.attempt, ticket.attempt),
            (ticket.token, *attempt, *attempt),
            "the record must be the winner's"
        );
    }
}

/// Must not be taken over by this token, nor changed by the attempt.
async fn refused<S: Inspect + Checkpoints>(stores: [&Tried<S>; 2], id: &RecordId, named: Token) {
    let before = stores[0].get(id).await;
    for store in stores {
        let taken = store.take_over(id, named, Token::random(), LONG).await;
        ensure_eq!(
            33,
            taken,
            None,
            "only an abandoned record may be taken over, by its own token"
        );
    }
    ensure_eq!(
        33,
        stores[1].get(id).await,
        before,
        "what is not taken over must not be changed"
    );
}

async fn nothing_else<H: Harness>() {
    let harness = H::new().await;
    let (one, two) = (open(&harness, 33).await, open(&harness, 33).await);
    let both = [&one, &two];
    let alive = one.win(&request("alive")).await;
    refused(both, &alive.id, alive.token).await;
    refused(both, &request("never claimed").id, alive.token).await;

    let released = one.win(&request("released")).await;
    one.keep(&released, "step", b"1").await;
    one.done("release", one.release(&released, LONG).await);
    refused(both, &released.id, released.token).await;

    let completed = one.win(&request("completed")).await;
    one.give_up(&completed).await;
    one.finish(&completed, LONG).await;
    refused(both, &completed.id, completed.token).await;

    let abandoned = given_up(&one, "abandoned").await;
    refused(both, &abandoned.id, Token::random()).await;
    refused(both, &abandoned.id, alive.token).await;
    let itself = abandoned.token;
    ensure_eq!(
        33,
        one.take_over(&abandoned.id, itself, itself, LONG).await,
        None,
        "its own token would fence nobody off"
    );
    // A token of the record's past is a wrong one.
    let holder = one.hold(1, &abandoned.id, abandoned.token, LONG).await;
    one.give_up(&holder).await;
    refused(both, &abandoned.id, abandoned.token).await;

    // What only lapsed and came back to life is alive.
    let three = open(&harness, 33).await;
    let lapsed = three.win(&leased::<H>("lapsed", 1)).await;
    let over = ClaimRequest {
        max_run: H::TICK / 2,
        abandoned_ttl: Some(H::TICK),
        ..request("expired")
    };
    let expired = one.win(&over).await;
    one.give_up(&expired).await;
    ticks(&harness, 2).await;
    one.find_abandoned(&request("lapsed")).await;
    three.renew(std::slice::from_ref(&lapsed), LONG).await;
    refused(both, &lapsed.id, lapsed.token).await;
    refused(both, &expired.id, expired.token).await;
}

async fn sent_again<H: Harness>() {
    let harness = H::new().await;
    let (one, two) = (open(&harness, 33).await, open(&harness, 33).await);
    let late = given_up(&one, "a").await;
    let watch = Watch::start();
    let hold = H::TICK * 4;
    let ticket = two.hold(1, &late.id, late.token, hold).await;
    let before = one.found(&late.id).await;
    ticks(&harness, 1).await;
    for store in [&two, &one] {
        let again = store.take_over(&late.id, late.token, ticket.token, hold);
        let again = again.await;
        if watch.surely_within::<H>(hold) {
            ensure_eq!(
                33,
                again,
                Some(ticket.clone()),
                "sent again while it holds it must succeed again"
            );
        }
    }
    ensure_eq!(
        33,
        one.found(&late.id).await,
        before,
        "sent again it must change nothing"
    );
    ticks(&harness, 4).await;
    for store in [&two, &one] {
        let again = store.take_over(&late.id, late.token, ticket.token, hold);
        ensure_eq!(33, again.await, None, "its hold is over");
    }
    let done = Completion::tombstone(http::StatusCode::OK);
    let settled = two.complete(&ticket, done, Lifetimes::new(LONG)).await;
    two.done("complete", settled);
    let again = two.take_over(&late.id, late.token, ticket.token, hold);
    ensure_eq!(33, again.await, None, "what is completed is not held");
}

/// Whoever goes away gives up what it may have taken.
async fn dropped<H: Harness>() {
    let harness = H::new().await;
    let store = open(&harness, 33).await;
    for polls in 0..24 {
        let key = format!("dropped-{polls}");
        let late = given_up(&store, &key).await;
        let ticket = Ticket {
            token: Token::random(),
            ..late.clone()
        };
        let (named, token) = (late.token, ticket.token);
        let taking = store.store.take_over(&late.id, named, token, LONG);
        dropped_after(polls, taking).await;
        let settled = store.abandon(&ticket).await;
        let held = store.find_abandoned(&request(&key)).await;
        let expected = match settled {
            Settled::Done => token,
            Settled::Lost => named,
        };
        ensure_eq!(
            33,
            held.token,
            expected,
            "an `abandon` must be decided after the `take_over` it is to undo"
        );
        store.win_as(2, &replacing(&key, held.token)).await;
    }
}

async fn expired_while_held<H: Harness>() {
    let harness = H::new().await;
    let (one, two) = (open(&harness, 33).await, open(&harness, 33).await);
    let brief = ClaimRequest {
        max_run: H::TICK,
        abandoned_ttl: Some(H::TICK * 3),
        ..request("brief")
    };
    let watch = Watch::start();
    let late = one.win(&brief).await;
    one.keep(&late, "step", b"1").await;
    one.give_up(&late).await;
    let taken = two.take_over(&late.id, late.token, Token::random(), LONG);
    let Some(ticket) = taken.await else {
        let late = !watch.surely_within::<H>(H::TICK * 4);
        ensure!(33, late, None::<Ticket>, "it had not expired yet");
        return;
    };
    ticks(&harness, 5).await;
    ensure_eq!(
        33,
        one.get(&late.id).await,
        None,
        "a hold must not keep what is to expire"
    );
    let next = one.win_as(1, &request("brief")).await;
    ensure_eq!(
        33,
        one.load(&next).await,
        Some(Vec::new()),
        "checkpoints of an expired record are gone"
    );
    two.fenced(&ticket).await;
}

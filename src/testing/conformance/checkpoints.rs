//! Contract 28: checkpoints.

use std::time::Duration;

use bytes::Bytes;

use super::{
    Harness,
    support::{
        ensure, ensure_eq, leased, names, open, replacing, request, stranger, ticks, together,
    },
};
use crate::store::{
    Checkpoint, Checkpoints, MAX_CHECKPOINT_LEN, MAX_CHECKPOINT_NAME_LEN, MAX_CHECKPOINTS,
    StoreErrorKind,
};

const LONG: Duration = Duration::from_secs(24 * 3600);

fn saved(pairs: &[(&str, &[u8])]) -> Option<Vec<Checkpoint>> {
    let checkpoint =
        |(name, value): &(&str, &[u8])| Checkpoint::new(*name, Bytes::copy_from_slice(value));
    Some(pairs.iter().map(checkpoint).collect())
}

/// Contract 28.
///
/// # Panics
///
/// When the store breaks it.
pub async fn c28_checkpoints_are_kept_under_their_claim<H: Harness>() {
    kept_in_order::<H>().await;
    limits::<H>().await;
    only_while_running::<H>().await;
}

async fn kept_in_order<H: Harness>() {
    let harness = H::new().await;
    let (one, two) = (open(&harness, 28).await, open(&harness, 28).await);
    let ticket = one.win(&request("a")).await;
    let neighbour = one.win(&request("b")).await;
    ensure_eq!(
        28,
        one.load(&ticket).await,
        saved(&[]),
        "a new claim has no checkpoints"
    );
    one.keep(&ticket, "zulu", b"\0\xFF").await;
    one.keep(&ticket, "alpha", b"").await;
    one.keep(&ticket, "Größe 'x'", b"3").await;
    one.keep(&ticket, "", b"4").await;
    two.keep(&ticket, "alpha", b"again").await;
    one.keep(&neighbour, "alpha", b"other").await;
    let expected = saved(&[
        ("zulu", b"\0\xFF"),
        ("alpha", b"again"),
        ("Größe 'x'", b"3"),
        ("", b"4"),
    ]);
    for store in [&one, &two] {
        let answer = store.load(&ticket).await;
        ensure_eq!(
            28,
            names(&answer),
            names(&expected),
            "all must come back, in the order first saved"
        );
        ensure_eq!(
            28,
            store.load(&stranger(&ticket)).await,
            None,
            "another token must get none"
        );
    }
    ensure_eq!(
        28,
        one.load(&request("c").ticket(1)).await,
        None,
        "there is no such record"
    );

    one.give_up(&ticket).await;
    let second = two.win_as(2, &replacing("a", ticket.token)).await;
    ensure_eq!(
        28,
        one.load(&ticket).await,
        None,
        "a replaced owner must get none"
    );
    two.keep(&second, "zulu", b"replaced").await;
    two.keep(&second, "last", b"5").await;
    let expected = saved(&[
        ("zulu", b"replaced"),
        ("alpha", b"again"),
        ("Größe 'x'", b"3"),
        ("", b"4"),
        ("last", b"5"),
    ]);
    ensure_eq!(
        28,
        names(&one.load(&second).await),
        names(&expected),
        "whoever takes over goes on with them"
    );
    let other = saved(&[("alpha", b"other")]);
    ensure_eq!(
        28,
        names(&one.load(&neighbour).await),
        names(&other),
        "no other record may be touched"
    );
}

async fn limits<H: Harness>() {
    let harness = H::new().await;
    let store = open(&harness, 28).await;
    let ticket = store.win(&request("a")).await;
    let longest = "n".repeat(MAX_CHECKPOINT_NAME_LEN);
    let largest = vec![7; MAX_CHECKPOINT_LEN];
    store.keep(&ticket, &longest, &largest).await;
    for at in 1..MAX_CHECKPOINTS {
        store.keep(&ticket, &format!("name-{at}"), b"1").await;
    }
    let before = store.load(&ticket).await;
    let count = before.as_ref().map(Vec::len);
    ensure_eq!(
        28,
        count,
        Some(MAX_CHECKPOINTS),
        "as many as allowed must be kept"
    );
    let too_long = "n".repeat(MAX_CHECKPOINT_NAME_LEN + 1);
    let too_large = vec![7; MAX_CHECKPOINT_LEN + 1];
    for (name, value) in [
        ("one too many", &b"1"[..]),
        (&too_long, &b"1"[..]),
        ("name-1", &too_large),
    ] {
        let value = Bytes::copy_from_slice(value);
        let answer = store.store.save(&ticket, name, value).await;
        let invalid = matches!(&answer, Err(error) if error.kind() == StoreErrorKind::Invalid);
        ensure!(
            28,
            invalid,
            answer,
            "what is over a limit must be refused as invalid"
        );
    }
    let same = names(&store.load(&ticket).await) == names(&before);
    ensure!(28, same, count, "what is refused must change nothing");
    store.keep(&ticket, "name-1", b"2").await;

    // Names saved at once must not push each other over the limit or out.
    let ticket = store.win(&request("b")).await;
    let answers = together(64, |task| {
        let (store, ticket) = (store.store.clone(), ticket.clone());
        async move {
            let name = format!("name-{task}");
            store
                .save(&ticket, &name, Bytes::from_static(b"1"))
                .await
                .is_ok()
        }
    })
    .await;
    let accepted = answers.iter().filter(|accepted| **accepted).count();
    let count = store.load(&ticket).await.map(|saved| saved.len());
    ensure_eq!(
        28,
        (accepted, count),
        (MAX_CHECKPOINTS, Some(MAX_CHECKPOINTS)),
        "of 64 names saved at once as many as allowed must be kept"
    );
}

async fn only_while_running<H: Harness>() {
    let harness = H::new().await;
    let (one, two) = (open(&harness, 28).await, open(&harness, 28).await);
    let mut tickets = Vec::new();
    for key in ["abandoned", "completed", "released"] {
        let ticket = one.win(&request(key)).await;
        one.keep(&ticket, "step", b"1").await;
        tickets.push(ticket);
    }
    one.give_up(&tickets[0]).await;
    one.finish(&tickets[1], LONG).await;
    one.done("release", one.release(&tickets[2], LONG).await);
    for ticket in &tickets {
        one.lost("save", one.save(ticket, "step", b"2").await);
        let expected = saved(&[("step", b"1")]);
        ensure_eq!(
            28,
            names(&two.load(ticket).await),
            names(&expected),
            "a lost save must change nothing"
        );
    }
    // A lapsed lease alone loses nothing.
    let ticket = two.win(&leased::<H>("lapsed", 1)).await;
    ticks(&harness, 2).await;
    one.find_abandoned(&request("lapsed")).await;
    two.keep(&ticket, "step", b"1").await;
}

//! Under hashed names everything is found as before, and nobody can pass a hash off as a name.

use std::time::Duration;

use axum::http::StatusCode;
use tower_idempotency::{
    Fingerprint, IdempotencyKey, RecordId, Recovery, Scope, State,
    store::{
        Checkpoints, Claim, ClaimRequest, Completion, Counts, Inspect, Lifetimes, Settled, Store,
        Ticket,
    },
};

use crate::{
    common::*,
    every_store,
    support::{post, send},
};

fn claim(id: RecordId) -> ClaimRequest {
    ClaimRequest::new(id, "test", Fingerprint::from_bytes([5; 32]))
}

async fn win<S: Store>(store: &S, request: ClaimRequest) -> Ticket {
    match store.claim(request).await.unwrap() {
        Claim::Won(ticket) => ticket,
        other => panic!("not won: {other:?}"),
    }
}

fn done() -> Completion {
    Completion::retained(StatusCode::OK, "done".into())
}

async fn abandoned(store: &Sealed, key: &str) -> Ticket {
    let ticket = win(store, claim(id(key))).await;
    assert_eq!(store.abandon(&ticket).await.unwrap(), Settled::Done);
    ticket
}

every_store! {
    async fn the_caller_sees_its_own_names(world: World) {
        let store = open(&world, hashing()).await;
        let ticket = win(&store, claim(id("k-1"))).await;
        assert_eq!(ticket.id, id("k-1"));
        assert_eq!(store.renew(std::slice::from_ref(&ticket), DAY).await.unwrap(), [Settled::Done]);
        assert_eq!(store.complete(&ticket, done(), Lifetimes::new(DAY)).await.unwrap(), Settled::Done);
        let Claim::Completed(record) = store.claim(claim(id("k-1"))).await.unwrap() else { panic!() };
        assert_eq!(record.id, id("k-1"));
        assert_eq!(stored(&store, &id("k-1")).await, *record);
        assert_eq!(record.response.as_deref(), Some(&b"done"[..]));
        // Below it has the name that the documentation says.
        let below = stored(&world.open().await, &hashed("k-1")).await;
        assert_eq!(below.token, ticket.token);
        assert_eq!(store.count_in(&Scope::new(SCOPE), 10).await.unwrap(), 1);
        assert_eq!(store.count_in(&Scope::new("another"), 10).await.unwrap(), 0);
    }

    async fn a_run_that_was_cut_off_is_run_again_where_that_is_wanted(world: World) {
        let store = open(&world, hashing()).await;
        let handler = secretive();
        let app = handler.behind(layer(&store).recovery(Recovery::rerun()));
        let first = send(&app, post("k-1", "A")).await;
        // The same request once more, cut off.
        let record = stored(&store, &id("k-1")).await;
        assert!(store.forget(&id("k-1")).await.unwrap());
        let request = ClaimRequest::new(id("k-1"), record.scheme, record.fingerprint);
        let _ = win(&store, request).await;
        world.clock.advance(Duration::from_secs(31));
        let refusing = handler.behind(layer(&open(&world, hashing()).await));
        let said = send(&refusing, post("k-1", "A")).await.said();
        assert_eq!(said, (409, "idempotency_outcome_unknown".to_owned()));
        let second = send(&app, post("k-1", "A")).await;
        assert_eq!((second.status, second.replay), (first.status, false));
        send(&refusing, post("k-1", "A")).await.assert_replays(&second);
        assert_eq!(handler.effects(), 2);
    }

    // An operator's list has nothing but hashes, and everything can be done with them.
    async fn what_is_listed_as_abandoned_can_be_settled_by_its_listed_name(world: World) {
        let store = open(&world, hashing()).await;
        for key in ["forgotten", "taken", "completed", "released"] {
            let _ = abandoned(&store, key).await;
            world.clock.advance(Duration::from_millis(1));
        }
        let listed = store.abandoned(None, 10).await.unwrap();
        assert_eq!(listed.len(), 4);
        for record in &listed {
            assert_eq!(stored(&store, &record.id).await, *record);
        }
        assert!(store.forget(&listed[0].id).await.unwrap());
        assert_eq!(store.get(&id("forgotten")).await.unwrap(), None);

        let mut request = claim(listed[1].id.clone());
        request.replaces = Some(listed[1].token);
        let ticket = win(&store, request).await;
        assert_eq!((ticket.attempt, &ticket.id), (2, &listed[1].id));
        assert_eq!(store.save(&ticket, "a", "value".into()).await.unwrap(), Settled::Done);
        assert_eq!(&store.load(&ticket).await.unwrap().unwrap()[0].value[..], b"value");
        assert_eq!(store.complete(&ticket, done(), Lifetimes::new(DAY)).await.unwrap(), Settled::Done);
        // Who knows the name can open what was sealed under the hash.
        let record = stored(&store, &id("taken")).await;
        assert_eq!(record.response.as_deref(), Some(&b"done"[..]));

        let ticket = |at: usize| {
            let mut ticket = claim(listed[at].id.clone()).ticket(1);
            ticket.token = listed[at].token;
            ticket
        };
        assert_eq!(store.complete(&ticket(2), done(), Lifetimes::new(DAY)).await.unwrap(), Settled::Done);
        assert_eq!(stored(&store, &id("completed")).await.state, State::Completed);
        assert_eq!(store.release(&ticket(3), DAY).await.unwrap(), Settled::Done);
        assert_eq!(store.get(&id("released")).await.unwrap(), None);
        let left = Counts::default();
        assert_eq!(store.counts().await.unwrap(), { let mut left = left; left.completed = 2; left });
        // From the place of one that is gone the list goes on.
        let ticket = abandoned(&store, "later").await;
        let rest = store.abandoned(Some(&listed[3]), 10).await.unwrap();
        assert_eq!((rest.len(), rest[0].token), (1, ticket.token));
    }

    async fn a_hash_that_a_client_sends_names_nothing(world: World) {
        let store = open(&world, hashing()).await;
        let ticket = abandoned(&store, "k-1").await;
        let listed = store.abandoned(None, 1).await.unwrap().remove(0).id;
        // The same bytes, from outside.
        let sent = RecordId::new(listed.scope.clone(), listed.key.clone());
        assert_eq!(sent, hashed("k-1"));
        assert_ne!(sent, listed);
        assert_ne!(sent.cmp(&listed), std::cmp::Ordering::Equal);
        assert_eq!(store.get(&sent).await.unwrap(), None);
        assert!(!store.forget(&sent).await.unwrap());
        let mut request = claim(sent.clone());
        request.replaces = Some(ticket.token);
        assert_eq!(win(&store, request).await.attempt, 1);
        let mut forged = claim(sent).ticket(1);
        forged.token = ticket.token;
        assert_eq!(store.complete(&forged, done(), Lifetimes::new(DAY)).await.unwrap(), Settled::Lost);
        // Nor does it help in the place of the key alone.
        let half = RecordId::new(Scope::new(SCOPE), IdempotencyKey::new(listed.key.as_bytes()));
        assert_eq!(store.get(&half).await.unwrap(), None);
        assert_eq!(stored(&store, &listed).await.state, State::Abandoned);
    }

    async fn scope_and_key_do_not_run_together(world: World) {
        let store = open(&world, hashing()).await;
        let names = [("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc"), ("", ""), ("\0", "")];
        for (scope, key) in names {
            let id = RecordId::new(Scope::new(scope), IdempotencyKey::new(key));
            let _ = win(&store, claim(id)).await;
        }
        let counts = store.counts().await.unwrap();
        assert_eq!(counts.running, 6);
    }
}

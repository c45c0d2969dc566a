//! Claims that may yet come to be.
//!
//! A statement whose answer did not come may still be under way: its commit may wait for a standby that
//! is gone, for longer than anybody waits for the claim. Sent again it is under way twice, and the second
//! one makes the claim anew when the first one was released. So such claims are remembered, and their
//! releases wait until every transaction has ended that was under way after the claim was given up.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use sqlx::Row;

use super::{failure::judged, session::Session};
use crate::{record::Token, store::group::Failure};

/// The most claims in doubt. They are as many as a few statements hold.
const MOST: usize = 4_096;

/// When they are forgotten: nobody has released them.
const LONGEST: Duration = Duration::from_secs(3_600);

/// How long after it was given up a statement may still arrive at the server.
const ARRIVAL: Duration = Duration::from_secs(1);

#[derive(Default)]
pub(super) struct Doubts(HashMap<Token, Doubt>);

struct Doubt {
    since: Instant,
    /// A transaction that has begun after the claim was given up.
    after: Option<i64>,
    /// The claim has come to be, or never will.
    over: bool,
}

impl Doubts {
    pub(super) fn add(&mut self, tokens: impl Iterator<Item = Token>) {
        let doubt = || Doubt {
            since: Instant::now(),
            after: None,
            over: false,
        };
        self.0.retain(|_, doubt| doubt.since.elapsed() < LONGEST);
        for token in tokens {
            if self.0.len() < MOST {
                self.0.insert(token, doubt());
            }
        }
    }

    /// The claim was found, and is released.
    pub(super) fn remove(&mut self, token: Token) {
        self.0.remove(&token);
    }

    fn is_open(&self, token: Token) -> bool {
        self.0.get(&token).is_some_and(|doubt| !doubt.over)
    }

    /// Whether there is a claim to which no later transaction is known yet.
    fn needs_one(&self) -> bool {
        self.0.values().any(Doubt::needs_one)
    }

    /// Learns that all transactions before `ended` have ended, and that `begun` has just begun.
    fn learn(&mut self, ended: i64, begun: Option<i64>) {
        for doubt in self.0.values_mut() {
            match doubt.after {
                Some(after) => doubt.over |= ended >= after,
                None if doubt.needs_one() => doubt.after = begun,
                None => {}
            }
        }
    }
}

impl Doubt {
    fn needs_one(&self) -> bool {
        self.after.is_none() && self.since.elapsed() >= ARRIVAL
    }
}

/// Which of these claims may yet come to be.
pub(super) async fn open(
    session: &mut Session,
    tokens: impl Iterator<Item = Token>,
) -> Result<Vec<Token>, Failure> {
    let open: Vec<Token> = {
        let doubts = session.instance.doubts();
        tokens.filter(|token| doubts.is_open(*token)).collect()
    };
    if !open.is_empty() {
        let needed = session.instance.doubts().needs_one();
        let text = session.instance.texts.snapshot.clone();
        let answered = session.run(text, |query| query.bind(needed)).await?;
        if let Some(row) = answered.rows.first() {
            let ended = row.try_get(0).map_err(judged)?;
            let begun = row.try_get(1).map_err(judged)?;
            session.instance.doubts().learn(ended, begun);
        }
    }
    Ok(open)
}

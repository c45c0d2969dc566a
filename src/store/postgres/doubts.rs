//! Claims that may yet come to be.
//!
//! A statement whose answer did not come may still be under way: its commit may wait for a standby that
//! is gone, for longer than anybody waits for the claim. Sent again it is under way twice, and the second
//! one makes the claim anew when the first one was released. So such claims are remembered, and their
//! releases wait until the server has no statement of this instance under way that was given up. (Claims
//! and releases are sent by one task, so while it asks it has no claim under way itself.)

use std::{
    collections::HashSet,
    time::{Duration, Instant},
};

use super::session::Session;
use crate::{record::Token, store::group::Failure};

/// The most claims in doubt; beyond them every release waits.
const MOST: usize = 4_096;

/// How long after it was given up a statement may still arrive at the server.
const ARRIVAL: Duration = Duration::from_secs(1);

/// The claims in doubt, since the last one was given up.
#[derive(Default)]
pub(super) struct Doubts {
    tokens: HashSet<Token>,
    since: Option<Instant>,
    all: bool,
}

impl Doubts {
    pub(super) fn add(&mut self, tokens: impl Iterator<Item = Token>) {
        self.since = Some(Instant::now());
        for token in tokens {
            match self.tokens.len() < MOST {
                true => self.tokens.insert(token),
                false => std::mem::replace(&mut self.all, true),
            };
        }
    }

    pub(super) fn contains(&self, token: Token) -> bool {
        self.all || self.tokens.contains(&token)
    }
}

/// Whether one of these claims may yet come to be. Forgets all doubts when none may.
pub(super) async fn are_open(
    session: &mut Session,
    tokens: impl IntoIterator<Item = Token>,
) -> Result<bool, Failure> {
    {
        let doubts = session.instance.doubts();
        if !tokens.into_iter().any(|token| doubts.contains(token)) {
            return Ok(false);
        }
        if doubts.since.is_some_and(|since| since.elapsed() < ARRIVAL) {
            return Ok(true);
        }
    }
    let text = session.instance.texts.given_up.clone();
    let tag = session.instance.texts.tag.clone();
    let given_up = session.run(text, |query| query.bind(&*tag)).await?;
    if !given_up.rows.is_empty() {
        return Ok(true);
    }
    *session.instance.doubts() = Doubts::default();
    Ok(false)
}

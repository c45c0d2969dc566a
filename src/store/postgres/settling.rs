//! A batch of completions, releases and abandons in one statement.

use std::{collections::HashSet, time::Duration};

use sqlx::{Row, postgres::PgRow};

use super::{
    doubts,
    failure::judged,
    rows::interval,
    session::{Answered, Session, Statement},
};
use crate::{
    record::{RecordId, State},
    store::{
        Settled, StoreError, Ticket,
        group::{Failure, MAX_OPERATIONS, Operation},
        stored::{damaged, state_of},
    },
};

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Complete = 1,
    Release = 2,
    Abandon = 3,
}

/// One row of the statement.
struct Line<'a> {
    /// Its place in the batch.
    at: usize,
    is_fresh: bool,
    kind: Kind,
    ticket: &'a Ticket,
    status: Option<i16>,
    response: Option<&'a [u8]>,
    ttl: Option<Duration>,
    response_ttl: Option<Duration>,
}

impl Line<'_> {
    /// The attempt that the record has afterwards at the most, where the ticket says anything about that.
    fn attempt(&self) -> Option<i32> {
        match (self.kind, self.ticket.attempt) {
            (Kind::Complete, _) | (_, 0) => None,
            (_, attempt) => i32::try_from(attempt).ok(),
        }
    }
}

/// Settles what can be settled now, releases or the rest. What stays without an answer is to be tried
/// again: another session has locked the row, the same record stands in the batch twice, or a claim that
/// is to be released may yet come to be.
pub(super) async fn run(
    session: &mut Session,
    batch: &mut [Operation],
    releases: bool,
) -> Result<(), Failure> {
    let mut lines = lines(batch);
    lines.retain(|line| (line.kind == Kind::Release) == releases);
    let tokens = lines.iter().map(|line| line.ticket.token);
    let mut resting = Vec::new();
    if releases && doubts::are_open(session, tokens).await? {
        let doubts = session.instance.doubts();
        lines.retain(|line| {
            let in_doubt = doubts.contains(line.ticket.token);
            resting.extend(in_doubt.then_some(line.at));
            !in_doubt
        });
    }
    if lines.is_empty() {
        resting.into_iter().for_each(|at| batch[at].has_to_rest());
        return Ok(());
    }
    // However many there are that wait for somebody else, a new one does not wait behind them.
    lines.sort_by_key(|line| !line.is_fresh);
    lines.truncate(MAX_OPERATIONS);
    // All instances lock in one order.
    lines.sort_by(|a, b| a.ticket.id.cmp(&b.ticket.id));
    let answered = match releases {
        true => release(session, &lines).await?,
        false => settle(session, &lines).await?,
    };
    let held = held(&answered.rows, lines.len())?;
    let missing: Vec<usize> = (0..lines.len()).filter(|at| held[*at].is_none()).collect();
    let locked = match missing.is_empty() {
        true => HashSet::new(),
        false => standing(session, &lines, &missing).await?,
    };
    let mut answers = Vec::with_capacity(lines.len());
    for (at, line) in lines.iter().enumerate() {
        let settled = match held[at] {
            Some(code) => match state_of(code) {
                Some(state) => Ok(settled(line.kind, state)),
                None => Err(damaged("unknown state")),
            },
            None if locked.contains(&at) => {
                resting.push(line.at);
                continue;
            }
            // When it was sent before, and the answer lost, it was this very release that took place.
            None if answered.again && releases => Ok(Settled::Done),
            None => Ok(Settled::Lost),
        };
        answers.push((line.at, settled));
    }
    for (at, settled) in answers {
        answer(&mut batch[at], settled);
    }
    resting.into_iter().for_each(|at| batch[at].has_to_rest());
    Ok(())
}

/// Contract 15–18, as in the protocol. The statement has changed the rows by the same rules.
fn settled(kind: Kind, state: State) -> Settled {
    match (kind, state) {
        (_, State::Running | State::Abandoned)
        | (Kind::Complete, State::Completed)
        | (Kind::Release, State::Released) => Settled::Done,
        _ => Settled::Lost,
    }
}

fn answer(operation: &mut Operation, settled: Result<Settled, StoreError>) {
    match operation {
        Operation::Complete(asked) => asked.answer(settled),
        Operation::Release(asked) => asked.answer(settled),
        Operation::Abandon(asked) => asked.answer(settled),
        _ => {}
    }
}

/// The operations that nothing asked earlier of the same record stands before.
fn lines(batch: &[Operation]) -> Vec<Line<'_>> {
    let mut passed: HashSet<&RecordId> = HashSet::new();
    let mut lines = Vec::with_capacity(batch.len());
    for (at, operation) in batch.iter().enumerate() {
        let (id, line) = match operation {
            Operation::Claim(asked) => (&asked.question.id, None),
            Operation::Forget(asked) => (&asked.question, None),
            Operation::TakeOver(asked) => (&asked.question.id, None),
            Operation::Complete(asked) => {
                let ticket = &asked.question.ticket;
                let (done, lifetimes) = (&asked.question.done, asked.question.lifetimes);
                let line = Line {
                    status: i16::try_from(done.status.as_u16()).ok(),
                    response: done.response.as_deref(),
                    ttl: Some(lifetimes.ttl),
                    response_ttl: lifetimes.response_ttl,
                    ..Line::new(at, Kind::Complete, ticket)
                };
                (&ticket.id, Some(line))
            }
            Operation::Release(asked) => {
                let ticket = &asked.question.ticket;
                let line = Line {
                    ttl: Some(asked.question.ttl),
                    ..Line::new(at, Kind::Release, ticket)
                };
                (&ticket.id, Some(line))
            }
            Operation::Abandon(asked) => {
                let ticket = &asked.question;
                (&ticket.id, Some(Line::new(at, Kind::Abandon, ticket)))
            }
            _ => continue,
        };
        if passed.insert(id) && !operation.rests() {
            let is_fresh = operation.is_fresh();
            lines.extend(line.map(|line| Line { is_fresh, ..line }));
        }
    }
    lines
}

impl<'a> Line<'a> {
    fn new(at: usize, kind: Kind, ticket: &'a Ticket) -> Self {
        Self {
            at,
            is_fresh: true,
            kind,
            ticket,
            status: None,
            response: None,
            ttl: None,
            response_ttl: None,
        }
    }
}

fn each<'a, T>(lines: &'a [Line<'_>], of: impl Fn(&'a Line<'_>) -> T) -> Vec<T> {
    lines.iter().map(of).collect()
}

/// Sends `settle.sql`.
async fn settle(session: &mut Session, lines: &[Line<'_>]) -> Result<Answered, Failure> {
    let text = session.instance.texts.settle.text(lines.len());
    let answered = session.run(text, |query| {
        bind_tickets(query, &each(lines, |line| line.ticket))
            .bind(each(lines, |line| line.kind as i16))
            .bind(each(lines, |line| line.status))
            .bind(each(lines, |line| line.response))
            .bind(each(lines, |line| line.ttl.map(interval)))
            .bind(each(lines, |line| line.response_ttl.map(interval)))
            .bind(each(lines, |line| line.attempt()))
    });
    answered.await
}

/// Sends `release.sql`.
async fn release(session: &mut Session, lines: &[Line<'_>]) -> Result<Answered, Failure> {
    let text = session.instance.texts.release.text(lines.len());
    let answered = session.run(text, |query| {
        bind_tickets(query, &each(lines, |line| line.ticket))
            .bind(each(lines, |line| line.ttl.map(interval)))
            .bind(each(lines, |line| line.attempt()))
    });
    answered.await
}

/// The state each record was found in under its token, where it was found.
fn held(rows: &[PgRow], lines: usize) -> Result<Vec<Option<i16>>, Failure> {
    let mut held = vec![None; lines];
    for row in rows {
        if let Some(held) = held.get_mut(place(row)?) {
            *held = row.try_get(1).map_err(judged)?;
        }
    }
    Ok(held)
}

/// Which of these lines still stand under their token, and so were only locked.
async fn standing(
    session: &mut Session,
    lines: &[Line<'_>],
    missing: &[usize],
) -> Result<HashSet<usize>, Failure> {
    let tickets: Vec<&Ticket> = missing.iter().map(|at| lines[*at].ticket).collect();
    let text = session.instance.texts.standing.text(missing.len());
    let answered = session
        .run(text, |query| bind_tickets(query, &tickets))
        .await?;
    let mut standing = HashSet::new();
    for row in &answered.rows {
        standing.extend(missing.get(place(row)?));
    }
    Ok(standing)
}

pub(super) fn bind_tickets<'q>(query: Statement<'q>, tickets: &[&Ticket]) -> Statement<'q> {
    let scopes: Vec<&[u8]> = tickets
        .iter()
        .map(|ticket| ticket.id.scope.as_bytes())
        .collect();
    let keys: Vec<&[u8]> = tickets
        .iter()
        .map(|ticket| ticket.id.key.as_bytes())
        .collect();
    let tokens: Vec<[u8; 16]> = tickets
        .iter()
        .map(|ticket| *ticket.token.as_bytes())
        .collect();
    query.bind(scopes).bind(keys).bind(tokens)
}

/// The place of a row in the arrays, from its first column.
pub(super) fn place(row: &PgRow) -> Result<usize, Failure> {
    let ord: i64 = row.try_get(0).map_err(judged)?;
    Ok(usize::try_from(ord - 1).unwrap_or(usize::MAX))
}

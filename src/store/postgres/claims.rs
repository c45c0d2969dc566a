//! A batch of claims: one statement for the distinct keys; those who ask for one key twice are answered
//! from the first.

use std::collections::{HashMap, HashSet};

use sqlx::{Row, postgres::PgRow};

use super::{
    bind_id,
    failure::judged,
    rows::{self, COLUMNS, interval},
    session::Session,
    texts::{Grown, Texts},
};
use crate::{
    record::{Record, RecordId, State, Token},
    store::{
        Claim, ClaimRequest, Held, StoreError, Ticket,
        group::{Asked, Failure, MAX_OPERATIONS, Operation},
        stored::{damaged, mode_code},
    },
};

type Asking = Asked<ClaimRequest, Claim>;

/// The outcome of a claim whose acknowledgement was lost.
const WON_AGAIN: i32 = 5;

/// The outcome of a claim on a record with a response so large that it is fetched by itself: a batch of
/// replays must not bring all of theirs at once.
const LARGE: i32 = 6;

/// About the most bytes of large responses that one batch brings.
const MAX_LARGE: usize = 8 << 20;

/// Answers the claims that can be answered now. Who stays without an answer is to ask again: the record
/// is in somebody else's hands this very moment.
pub(super) async fn run(session: &mut Session, batch: &mut [Operation]) -> Result<(), Failure> {
    let mut asking = first_keys(claims(batch));
    // Sorted, so that all instances insert in one order and never wait for each other in a circle. The
    // sort is stable: of those who ask for one key the first comes first.
    asking.sort_by(|a, b| a.question.id.cmp(&b.question.id));
    let mut tokens = HashSet::new();
    let mut groups: Vec<Group<'_, '_>> = asking
        .chunk_by_mut(|a, b| a.question.id == b.question.id)
        // A token names one claim of the statement.
        .filter(|group| tokens.insert(group[0].question.token))
        .collect();

    if groups.is_empty() {
        return Ok(());
    }
    let rows = ask(session, |texts| &texts.claim, &firsts(&groups)).await?;
    answer(&mut groups, &rows)?;
    let all = groups.len();
    let (mut large, mut undecided) = unanswered(groups, &rows)?;
    let done = all > large.len() + undecided.len();
    let decided = decide_rest(session, &mut large, &mut undecided).await;
    if decided.is_ok() {
        let undecided = undecided.into_iter();
        for group in undecided.filter(|group| !group[0].is_answered()) {
            group.iter_mut().for_each(|asked| asked.has_to_rest());
        }
    }
    match decided {
        // The others have their answers. These try again.
        Err(_) if done => Ok(()),
        decided => decided,
    }
}

type Group<'a, 'b> = &'a mut [&'b mut Asking];

/// Those that wait for a large response, and those that `claim.sql` does not decide.
fn unanswered<'a, 'b>(
    groups: Vec<Group<'a, 'b>>,
    rows: &[PgRow],
) -> Result<(Vec<Group<'a, 'b>>, Vec<Group<'a, 'b>>), Failure> {
    let mut large = HashSet::new();
    for row in rows {
        if row.try_get::<i32, _>(COLUMNS + 1).map_err(judged)? == LARGE {
            large.extend(row.try_get::<Option<i64>, _>(COLUMNS).map_err(judged)?);
        }
    }
    let groups = (1..).zip(groups);
    let unanswered = groups.filter(|(_, group)| !group[0].is_answered());
    let (with, without): (Vec<_>, Vec<_>) = unanswered.partition(|(ord, _)| large.contains(ord));
    let groups = |them: Vec<(i64, _)>| them.into_iter().map(|(_, group)| group).collect();
    Ok((groups(with), groups(without)))
}

async fn decide_rest(
    session: &mut Session,
    large: &mut [Group<'_, '_>],
    undecided: &mut [Group<'_, '_>],
) -> Result<(), Failure> {
    let mut bytes = 0;
    for group in large {
        if bytes >= MAX_LARGE {
            break;
        }
        let Some(record) = fetch(session, &group[0].question.id).await? else {
            continue;
        };
        let record = match record {
            Ok(record) => record,
            Err(damage) => {
                group[0].answer(Err(damage));
                continue;
            }
        };
        // Otherwise it was forgotten meanwhile, and made anew.
        if record.state == State::Completed {
            bytes += record.response.as_ref().map_or(0, bytes::Bytes::len);
            answer_group(group, Ok(Claim::Completed(Box::new(record))), None);
        }
    }
    if undecided.is_empty() {
        return Ok(());
    }
    let rows = ask(session, |texts| &texts.take, &firsts(undecided)).await?;
    answer(undecided, &rows)
}

/// The live record of this name.
pub(super) async fn fetch(
    session: &mut Session,
    id: &RecordId,
) -> Result<Option<Result<Record, StoreError>>, Failure> {
    let text = session.instance.texts.get.clone();
    let found = session.run(text, |query| bind_id(query, id)).await?;
    let Some(row) = found.rows.first() else {
        return Ok(None);
    };
    let response_is_over: bool = row.try_get(COLUMNS).map_err(judged)?;
    let record = rows::record(row, id.clone()).map_err(damaged);
    Ok(Some(record.map(|mut record| {
        record.response = record.response.filter(|_| !response_is_over);
        record
    })))
}

/// Those for the keys that came first, as many as one statement decides.
fn first_keys(mut claims: Vec<&mut Asking>) -> Vec<&mut Asking> {
    // However many there are that wait for somebody else, a new one does not wait behind them.
    claims.sort_by_key(|claim| !claim.is_fresh());
    let mut keys = HashSet::new();
    let is_among_them = |claim: &&mut Asking| {
        let id = &claim.question.id;
        keys.contains(id) || keys.len() < MAX_OPERATIONS && keys.insert(id.clone())
    };
    claims.into_iter().filter(is_among_them).collect()
}

fn firsts<'a>(groups: &'a [Group<'_, '_>]) -> Vec<&'a ClaimRequest> {
    groups.iter().map(|group| &group[0].question).collect()
}

/// The claims that nothing asked earlier stands before. A release that cannot take place yet, because its
/// record is locked or its claim in doubt, stands only before its own claim: whoever else asks is told
/// what is so until then.
fn claims(batch: &mut [Operation]) -> Vec<&mut Asking> {
    let mut passed: HashSet<RecordId> = HashSet::new();
    let mut undone: HashSet<Token> = HashSet::new();
    let mut claims = Vec::with_capacity(batch.len());
    for operation in batch {
        match operation {
            Operation::Claim(asked) if asked.rests() => {}
            Operation::Claim(asked) => {
                let claim = &asked.question;
                if !passed.contains(&claim.id) && !undone.contains(&claim.token) {
                    claims.push(asked);
                }
            }
            Operation::Release(asked) => {
                let ticket = &asked.question.ticket;
                // Sent again, it waits for the same.
                if asked.is_fresh() && !undone.contains(&ticket.token) {
                    passed.insert(ticket.id.clone());
                } else {
                    undone.insert(ticket.token);
                }
            }
            Operation::Forget(asked) => {
                passed.insert(asked.question.clone());
            }
            _ => {}
        }
    }
    claims
}

fn each<'a, T>(requests: &[&'a ClaimRequest], of: impl Fn(&'a ClaimRequest) -> T) -> Vec<T> {
    requests.iter().map(|request| of(request)).collect()
}

async fn ask(
    session: &mut Session,
    text: fn(&Texts) -> &Grown,
    requests: &[&ClaimRequest],
) -> Result<Vec<PgRow>, Failure> {
    let owner = session.instance.owner;
    let text = text(&session.instance.texts).text(requests.len());
    let answered = session
        .run(text, |query| {
            query
                .bind(*owner.as_bytes())
                .bind(each(requests, |claim| claim.id.scope.as_bytes()))
                .bind(each(requests, |claim| claim.id.key.as_bytes()))
                .bind(each(requests, |claim| &*claim.scheme))
                .bind(each(requests, |claim| *claim.fingerprint.as_bytes()))
                .bind(each(requests, |claim| *claim.token.as_bytes()))
                .bind(each(requests, |claim| {
                    claim.replaces.map(|token| *token.as_bytes())
                }))
                .bind(each(requests, |claim| mode_code(claim.mode)))
                .bind(each(requests, |claim| claim.request_id.as_deref()))
                .bind(each(requests, |claim| interval(claim.lease)))
                .bind(each(requests, |claim| interval(claim.max_run)))
                .bind(each(requests, |claim| {
                    let ttl = claim.abandoned_ttl?;
                    Some(interval(claim.max_run.saturating_add(ttl)))
                }))
        })
        .await;
    let answered = match answered {
        Ok(answered) => answered,
        Err(failure) => {
            if session.sent {
                let tokens = requests.iter().map(|claim| claim.token);
                session.instance.doubts().add(tokens);
            }
            return Err(failure);
        }
    };
    Ok(answered.rows)
}

/// Answers all who ask for the keys of these rows. A row names its claim by its place, or, when it was
/// just made, by its token.
fn answer(groups: &mut [Group<'_, '_>], rows: &[PgRow]) -> Result<(), Failure> {
    let mut tokens = HashMap::with_capacity(groups.len());
    for (at, group) in groups.iter().enumerate() {
        tokens.insert(*group[0].question.token.as_bytes(), at);
    }
    for row in rows {
        let ord: Option<i64> = row.try_get(COLUMNS).map_err(judged)?;
        let at = match ord {
            Some(ord) => usize::try_from(ord - 1).ok(),
            None => tokens
                .get(row.try_get::<&[u8], _>(2).map_err(judged)?)
                .copied(),
        };
        let Some(group) = at.and_then(|at| groups.get_mut(at)) else {
            continue;
        };
        let first = &group[0].question;
        let Some(claim) = decided(first, row)? else {
            continue;
        };
        let won = match &claim {
            Ok(Claim::Won(ticket)) => held(first, ticket, row)?,
            _ => None,
        };
        answer_group(group, claim, won.as_ref());
    }
    Ok(())
}

/// Answers all who ask for one key. `won` is what the others are told of a claim that was won.
fn answer_group(group: &mut [&mut Asking], claim: Result<Claim, StoreError>, won: Option<&Held>) {
    let Some((first, others)) = group.split_first_mut() else {
        return;
    };
    if let Ok(claim) = &claim {
        for other in others {
            // Those behind one that the database has to decide come after it.
            let Some(claim) = after(claim, won, &other.question) else {
                break;
            };
            other.answer(Ok(claim));
        }
    }
    first.answer(claim);
}

/// What the others are told of the claim that was just won; `None` when that is for the database to say.
fn held(request: &ClaimRequest, ticket: &Ticket, row: &PgRow) -> Result<Option<Held>, Failure> {
    let outcome: i32 = row.try_get(COLUMNS + 1).map_err(judged)?;
    // What the record holds was brought by an earlier request, or it may be abandoned already.
    if outcome == WON_AGAIN || request.lease.is_zero() || request.max_run.is_zero() {
        return Ok(None);
    }
    // A record taken over keeps its first request's id; a new one has this one's.
    let request_id = match row.try_get::<Option<i64>, _>(COLUMNS).map_err(judged)? {
        Some(_) => {
            let first: Option<&str> = row.try_get(12).map_err(judged)?;
            first.map(Into::into)
        }
        None => request.request_id.clone(),
    };
    Ok(Some(Held {
        token: ticket.token,
        scheme: request.scheme.clone(),
        fingerprint: request.fingerprint,
        attempt: ticket.attempt,
        mode: request.mode,
        request_id,
        released: false,
    }))
}

/// What the row says; `None` when it says to ask again.
fn decided(
    request: &ClaimRequest,
    row: &PgRow,
) -> Result<Option<Result<Claim, StoreError>>, Failure> {
    let outcome: i32 = row.try_get(COLUMNS + 1).map_err(judged)?;
    if outcome == 0 || outcome == LARGE {
        return Ok(None);
    }
    if outcome == 1 || outcome == WON_AGAIN {
        let attempt: i32 = row.try_get(4).map_err(judged)?;
        let ticket = Ticket {
            id: request.id.clone(),
            token: request.token,
            attempt: u32::try_from(attempt).unwrap_or(1),
        };
        return Ok(Some(Ok(Claim::Won(ticket))));
    }
    let record = match rows::record(row, request.id.clone()) {
        Ok(record) => record,
        Err(damage) => return Ok(Some(Err(damaged(damage)))),
    };
    Ok(Some(Ok(match outcome {
        2 => Claim::InFlight(Held::of(&record)),
        3 => Claim::Completed(Box::new(record)),
        _ => Claim::Abandoned(Held::of(&record)),
    })))
}

/// What a claim on the same key is answered after this one; `None` when the database has to decide.
fn after(claim: &Claim, won: Option<&Held>, request: &ClaimRequest) -> Option<Claim> {
    match claim {
        Claim::Won(ticket) if ticket.token == request.token => Some(claim.clone()),
        Claim::Won(_) => won.cloned().map(Claim::InFlight),
        Claim::Completed(_) => Some(claim.clone()),
        Claim::InFlight(held) => (held.token != request.token).then(|| claim.clone()),
        Claim::Abandoned(held) => {
            let decided = held.token != request.token && request.replaces != Some(held.token);
            decided.then(|| claim.clone())
        }
    }
}

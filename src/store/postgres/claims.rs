//! A batch of claims: one statement for the distinct keys; those who ask for one key twice are answered
//! from the first.

use std::collections::{HashMap, HashSet};

use sqlx::{Row, postgres::PgRow};

use super::{
    failure::judged,
    rows::{self, COLUMNS, interval, mode_code},
    session::Session,
    texts::{Grown, Texts},
};
use crate::{
    record::RecordId,
    store::{
        Claim, ClaimRequest, Held, StoreError, StoreErrorKind, Ticket,
        group::{Asked, Failure, MAX_OPERATIONS, Operation},
    },
};

type Asking = Asked<ClaimRequest, Claim>;

/// The outcome of a claim whose acknowledgement was lost.
const WON_AGAIN: i32 = 5;

/// Answers the claims that can be answered now. Who stays without an answer is to ask again: the record
/// is in somebody else's hands this very moment.
pub(super) async fn run(session: &mut Session, batch: &mut [Operation]) -> Result<(), Failure> {
    let mut asking = first_keys(claims(batch));
    // Sorted, so that all instances insert in one order and never wait for each other in a circle. The
    // sort is stable: of those who ask for one key the first comes first.
    asking.sort_by(|a, b| a.question.id.cmp(&b.question.id));
    let mut tokens = HashSet::new();
    let mut groups: Vec<&mut [&mut Asking]> = asking
        .chunk_by_mut(|a, b| a.question.id == b.question.id)
        // A token names one claim of the statement.
        .filter(|group| tokens.insert(group[0].question.token))
        .collect();

    if groups.is_empty() {
        return Ok(());
    }
    let rows = ask(session, |texts| &texts.claim, &firsts(&groups)).await?;
    let all = groups.len();
    answer(&mut groups, &rows)?;

    let mut undecided: Vec<_> = (groups.into_iter())
        .filter(|group| !group[0].is_answered())
        .collect();
    if undecided.is_empty() {
        return Ok(());
    }
    match ask(session, |texts| &texts.take, &firsts(&undecided)).await {
        Ok(rows) => answer(&mut undecided, &rows),
        // The others have their answers. These try again.
        Err(_) if undecided.len() < all => Ok(()),
        Err(failure) => Err(failure),
    }
}

/// Those for the keys that came first, as many as one statement decides.
fn first_keys(claims: Vec<&mut Asking>) -> Vec<&mut Asking> {
    let mut keys = HashSet::new();
    let is_among_them = |claim: &&mut Asking| {
        let id = &claim.question.id;
        keys.contains(id) || keys.len() < MAX_OPERATIONS && keys.insert(id.clone())
    };
    claims.into_iter().filter(is_among_them).collect()
}

fn firsts<'a>(groups: &'a [&mut [&mut Asking]]) -> Vec<&'a ClaimRequest> {
    groups.iter().map(|group| &group[0].question).collect()
}

/// The claims that nothing asked earlier stands before.
fn claims(batch: &mut [Operation]) -> Vec<&mut Asking> {
    let mut passed: HashSet<RecordId> = HashSet::new();
    let mut claims = Vec::with_capacity(batch.len());
    for operation in batch {
        match operation {
            Operation::Claim(asked) if !passed.contains(&asked.question.id) => claims.push(asked),
            Operation::Release(asked) => {
                passed.insert(asked.question.ticket.id.clone());
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
fn answer(groups: &mut [&mut [&mut Asking]], rows: &[PgRow]) -> Result<(), Failure> {
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
        if let Some(group) = at.and_then(|at| groups.get_mut(at)) {
            answer_group(group, row)?;
        }
    }
    Ok(())
}

/// Answers all who ask for one key.
fn answer_group(group: &mut [&mut Asking], row: &PgRow) -> Result<(), Failure> {
    let Some((first, others)) = group.split_first_mut() else {
        return Ok(());
    };
    let Some(claim) = decided(&first.question, row)? else {
        return Ok(());
    };
    if let Ok(claim) = &claim {
        let won = match claim {
            Claim::Won(ticket) => held(&first.question, ticket, row)?,
            _ => None,
        };
        for other in others {
            // Those behind one that the database has to decide come after it.
            let Some(claim) = after(claim, won.as_ref(), &other.question) else {
                break;
            };
            other.answer(Ok(claim));
        }
    }
    first.answer(claim);
    Ok(())
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
    if outcome == 0 {
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

pub(super) fn damaged(damage: rows::Damage) -> StoreError {
    StoreError::new(
        StoreErrorKind::Corrupt,
        "a stored record cannot be read: it was damaged or changed by hand; forget it once its effect is known",
    )
    .with_source(damage)
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

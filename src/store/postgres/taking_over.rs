//! Abandoned records that are taken over in order to find out what their runs did.

use std::collections::HashSet;

use sqlx::Row;

use super::{bind_id, failure::judged, rows::interval, session::Session};
use crate::{
    record::RecordId,
    store::{
        Ticket,
        group::{Asked, Failure, Operation, TakeOver},
    },
};

type Asking = Asked<TakeOver, Option<Ticket>>;

/// The first one that nothing asked earlier of the same record stands before.
pub(super) async fn run(session: &mut Session, batch: &mut [Operation]) -> Result<(), Failure> {
    let mut passed: HashSet<RecordId> = HashSet::new();
    for operation in batch {
        match operation {
            Operation::TakeOver(asked) => {
                let is_next = !passed.contains(&asked.question.id) && !asked.rests();
                if is_next {
                    return take_over(session, asked).await;
                }
                passed.insert(asked.question.id.clone())
            }
            Operation::Complete(asked) => passed.insert(asked.question.ticket.id.clone()),
            Operation::Abandon(asked) => passed.insert(asked.question.id.clone()),
            _ => continue,
        };
    }
    Ok(())
}

/// A record that somebody else has locked is not taken over: it may be completed this very moment. Unless it
/// may be this very takeover that has it locked, sent before and given up; that is for the server to say.
async fn take_over(session: &mut Session, asked: &mut Asking) -> Result<(), Failure> {
    let question = &asked.question;
    let owner = session.instance.owner;
    let text = session.instance.texts.take_over.clone();
    let answered = session
        .run(text, |query| {
            bind_id(query.bind(*owner.as_bytes()), &question.id)
                .bind(*question.abandoned.as_bytes())
                .bind(*question.token.as_bytes())
                .bind(interval(question.hold))
        })
        .await?;
    let Some(row) = answered.rows.first() else {
        asked.answer(Ok(None));
        return Ok(());
    };
    let attempt: i32 = row.try_get(0).map_err(judged)?;
    let held: bool = row.try_get(1).map_err(judged)?;
    let ticket = held.then(|| Ticket {
        id: question.id.clone(),
        token: question.token,
        attempt: u32::try_from(attempt).unwrap_or(1),
    });
    let sent_before = answered.again || !asked.is_fresh();
    match ticket {
        None if sent_before => asked.has_to_rest(),
        ticket => asked.answer(Ok(ticket)),
    }
    Ok(())
}

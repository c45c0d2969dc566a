//! What an end is recorded as.

use std::{future::Future, time::Duration};

use axum::body::Body;
use bytes::Bytes;
use http::{Response, StatusCode, response::Parts};
use tokio::time::{Instant, sleep};

use super::{
    Delivered, Inconclusive, Relay, Undelivered, in_time,
    verdict::{Weight, verdict},
};
use crate::{
    body::{Captured, capture_response},
    client::{
        Answered, Entry, EntryState, OutboxDatabase, OutboxError, OutboxErrorKind, Unanswered,
        hint::hint,
        judgement::is_unprotected,
        outbox::{End, MAX_RESULT_LEN},
        refusal::Refusal,
    },
    execution::is_stream,
    maintenance::jittered,
};

/// How often the record of an end is tried, and what is waited after the first time; doubled each time.
const RECORD_TRIES: u32 = 6;
const RECORD_PAUSE: Duration = Duration::from_millis(100);

/// An answer that the client has not read yet is a stream, or too large; it is not waited for long.
const REST_PATIENCE: Duration = Duration::from_secs(1);

impl<DB: OutboxDatabase, S> Relay<DB, S> {
    /// `number`: how many attempts were ever counted, with the one that got this answer.
    pub(super) async fn answered(
        &self,
        entry: Entry,
        number: i64,
        response: Response<Body>,
    ) -> Result<Delivered, Undelivered> {
        let answered = response.extensions().get::<Answered>();
        let weight = weight(number, answered.is_some_and(|answered| answered.replayed));
        let Some(state) = verdict(response.status(), weight) else {
            return self.inconclusive(entry, response).await;
        };
        let (head, body) = response.into_parts();
        let (data, body) = captured(&head, body).await;
        let answer = data.map(|data| Response::from_parts(head.clone(), data));
        let end = End {
            state,
            status: Some(head.status),
            answer: answer.as_ref(),
            only_attempt: is_only_told_by_number(state, weight),
            by_hand: false,
        };
        let recorded = self.record(&entry, &end).await;
        let (status, is_unprotected) = (head.status, is_unprotected(&head));
        let response = Response::from_parts(head, body);
        match recorded {
            // Another attempt was counted meanwhile, or ran without a record.
            Ok(entry) if entry.state() == EntryState::Pending => {
                self.inconclusive(entry, response).await
            }
            recorded => {
                let is_recorded = recorded.is_ok();
                let ended = (state, status);
                let delivered = Delivered::fresh(entry, ended, Some(response), recorded);
                if is_recorded || !is_unprotected {
                    return Ok(delivered);
                }
                // There is no replay to be had.
                let held = self.hold(delivered.entry()).await;
                Ok(delivered.held(held))
            }
        }
    }

    /// What does not tell how it ended. If it ran without a record, the server would run it once more: nobody sends it
    /// from now on.
    async fn inconclusive(
        &self,
        entry: Entry,
        response: Response<Body>,
    ) -> Result<Delivered, Undelivered> {
        let (head, body) = response.into_parts();
        let is_unprotected = is_unprotected(&head);
        let hint = hint(&head.headers, &Refusal::default());
        let response = Response::from_parts(head, body);
        if !is_unprotected {
            self.defer(&entry, hint).await;
            let told = Inconclusive::new(entry, response);
            return Err(Undelivered::Inconclusive(told));
        }
        match self.hold(&entry).await {
            // Somebody knows better.
            Ok(done) if done.state() == EntryState::Done => Delivered::recorded(done),
            held => {
                let told = Inconclusive::held(entry, response, held);
                Err(Undelivered::Inconclusive(told))
            }
        }
    }

    pub(super) async fn unanswered(
        &self,
        entry: Entry,
        number: i64,
        unanswered: Unanswered,
    ) -> Result<Delivered, Undelivered> {
        match &unanswered {
            Unanswered::NotRetained {
                original_status: Some(status),
                ..
            } => {
                // It is told from the server's record.
                if let Some(delivered) = self.not_retained(&entry, *status).await {
                    return Ok(delivered);
                }
            }
            Unanswered::Reused(ended) if number == 1 => {
                let end = End {
                    state: EntryState::Failed,
                    status: ended.response().map(Response::status),
                    answer: ended.response(),
                    only_attempt: true,
                    by_hand: false,
                };
                // If it cannot be recorded, the next attempt is told the same.
                let _ = self.record(&entry, &end).await;
            }
            // The server does not say how it ended, so it is not for us to say either.
            _ => {}
        }
        self.defer(&entry, unanswered.retry_after()).await;
        Err(Undelivered::Unanswered(unanswered))
    }

    async fn not_retained(&self, entry: &Entry, status: StatusCode) -> Option<Delivered> {
        let state = verdict(status, Weight::Replay)?;
        let end = End {
            state,
            status: Some(status),
            answer: None,
            only_attempt: false,
            by_hand: false,
        };
        let recorded = self.record(entry, &end).await;
        // Another attempt ran without a record, of which this says nothing.
        if let Ok(found) = &recorded
            && found.state() == EntryState::Pending
        {
            return None;
        }
        let (entry, ended) = (entry.clone(), (state, status));
        Some(Delivered::fresh(entry, ended, None, recorded))
    }

    /// Until the server wants it again. If it cannot be written, it is sent sooner than the server likes, and told the
    /// same again.
    pub(super) async fn defer(&self, entry: &Entry, hint: Option<Duration>) {
        if let Some(hint) = hint.filter(|hint| !hint.is_zero()) {
            let _ = in_time(self.statement_timeout, self.outbox.defer(entry, hint)).await;
        }
    }

    /// Records that it ran without a record, as an end is recorded.
    async fn hold(&self, entry: &Entry) -> Result<Entry, OutboxError> {
        self.persistently(|| self.outbox.hold(entry)).await
    }

    /// Records an end.
    async fn record(&self, entry: &Entry, end: &End<'_>) -> Result<Entry, OutboxError> {
        self.persistently(|| self.outbox.record(entry, end)).await
    }

    /// Carries a statement out, again and again while the database is out of reach, for about three seconds besides what the
    /// tries take; where they take long, no further one is begun after twice the time of a statement.
    async fn persistently<F>(&self, statement: impl Fn() -> F) -> Result<Entry, OutboxError>
    where
        F: Future<Output = Result<Entry, OutboxError>>,
    {
        let begun = Instant::now();
        let mut tries = 0;
        loop {
            let recorded = in_time(self.statement_timeout, statement()).await;
            tries += 1;
            let is_over = tries == RECORD_TRIES
                || begun.elapsed() >= self.statement_timeout.saturating_mul(2);
            match recorded {
                Err(error) if error.kind() == OutboxErrorKind::Database && !is_over => {
                    sleep(jittered(RECORD_PAUSE * 2_u32.pow(tries - 1))).await;
                }
                ended => return ended,
            }
        }
    }
}

fn weight(number: i64, is_replay: bool) -> Weight {
    match (is_replay, number) {
        (true, _) => Weight::Replay,
        (false, 1) => Weight::OnlyAttempt,
        (false, _) => Weight::OneOfMany,
    }
}

/// Whether the record may be written only if there is still no other attempt.
fn is_only_told_by_number(state: EntryState, weight: Weight) -> bool {
    state == EntryState::Failed && weight == Weight::OnlyAttempt
}

/// What of an answer is recorded, and all of it for the caller.
async fn captured(head: &Parts, body: Body) -> (Option<Bytes>, Body) {
    if is_stream(head) {
        return (None, body);
    }
    match capture_response(body, MAX_RESULT_LEN, REST_PATIENCE).await {
        Captured::Whole(data, body) => (Some(data), body),
        Captured::Not(body) | Captured::Broken(body) => (None, body),
    }
}

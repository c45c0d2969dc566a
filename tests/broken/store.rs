//! A memory store with one defect.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use http::StatusCode;
use tower_idempotency::{
    Fingerprint, IdempotencyKey, MemoryStore, Record, RecordId, Scope, State, Token,
    store::{
        Checkpoint, Checkpoints, Claim, ClaimRequest, Completion, Counts, Held, Inspect, Lifetimes,
        Settled, Store, StoreError, StoreErrorKind, Ticket,
    },
};

/// The defect, as a predicate of the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum How {
    Not,
    CountsFromZero,
    ReadsThenWrites,
    EchoesTheRival,
    LetsRivalsIn,
    AnswersWithoutResponse,
    ForgetsItsToken,
    RemembersAttempts,
    JoinsScopeAndKey,
    IgnoresCase,
    EndsAtNul,
    NeverLapses,
    LapsesAtOnce,
    IgnoresRenewals,
    RenewsTheLivingOnly,
    RenewsOutOfOrder,
    NeverLoses,
    RunsForever,
    IgnoresAbandon,
    CountsTheAbandoned,
    CountsTheUnknownAsFirst,
    TakesOverUnnamed,
    TakesOverAfresh,
    TakesOverTheLiving,
    TakesOverByAnyName,
    CompletesAsOk,
    CompletesTheLivingOnly,
    CompletesAgain,
    CompletesOnce,
    CompletesByAnyToken,
    ReleasesByAnyToken,
    AbandonsByAnyToken,
    SavesByAnyToken,
    ReleasesTheCompleted,
    AbandonsInstead,
    ReleasesWhole,
    CountsTheReleased,
    CountsSeconds,
    KeepsResponses,
    KeepsRecords,
    KeepsText,
    DropsEmpty,
    ForgetsTheAbandoned,
    KeepsTheAbandoned,
    PurgesTheAbandoned,
    PurgesNothing,
    PurgesAll,
    Evicts,
    RefusesToComplete,
    GetsTheCompleted,
    ForgetsTheCompleted,
    CountsTheLapsedAsRunning,
    CountsEveryScope,
    CountsTheCompletedOnly,
    CountsPastTheEnd,
    CountsTheExpired,
    ListsNewestFirst,
    ListsByTimeOnly,
    LoadsForAnybody,
    LoadsByName,
    SavesLargeValues,
    KeepsToItself,
    StaysBusy,
    KeepsItsLease,
    IgnoresClose,
    HoldsAsARun,
    HoldsAfresh,
    HoldsTheLiving,
    HoldsTheReleased,
    HoldsByAnyName,
    HoldsOnce,
    HoldsTogether,
    HoldsForever,
    HoldsForNoTime,
}

/// What the instances of one broken store have in common.
#[derive(Debug, Clone, Default)]
pub(crate) struct Shared {
    seen: Arc<Mutex<HashMap<RecordId, u32>>>,
    busy: Arc<AtomicBool>,
    full: Arc<AtomicBool>,
}

#[derive(Debug, Clone)]
pub(crate) struct Broken {
    inner: MemoryStore,
    how: How,
    shared: Shared,
    closed: Arc<AtomicBool>,
}

fn unavailable() -> StoreError {
    StoreError::new(StoreErrorKind::Unavailable, "broken on purpose")
}

impl Broken {
    pub(crate) fn new(inner: MemoryStore, how: How, shared: Shared) -> Self {
        Self {
            inner,
            how,
            shared,
            closed: Arc::default(),
        }
    }

    /// A ticket with whatever token the record has.
    async fn own(&self, ticket: &Ticket) -> Result<Ticket, StoreError> {
        let record = self.inner.get(&ticket.id).await?;
        Ok(record.map_or(ticket.clone(), |record| record.ticket()))
    }

    /// What is no hold but another run.
    async fn run_again(
        &self,
        id: &RecordId,
        abandoned: Token,
        token: Token,
        hold: Duration,
    ) -> Result<Option<Ticket>, StoreError> {
        let mut request = claim_of(id.clone(), token);
        request.replaces = Some(abandoned);
        request.max_run = hold;
        Ok(match self.inner.claim(request).await? {
            Claim::Won(ticket) => Some(ticket),
            _ => None,
        })
    }

    async fn abandoned_now(&self, id: &RecordId) -> Result<bool, StoreError> {
        let listed = self.inner.abandoned(None, usize::MAX).await?;
        Ok(listed.iter().any(|record| record.id == *id))
    }

    fn open(&self) -> Result<(), StoreError> {
        if self.closed.load(Ordering::SeqCst) {
            return Err(StoreError::new(StoreErrorKind::Closed, "closed"));
        }
        Ok(())
    }
}

/// The same ticket for another run.
fn uncounting(ticket: &Ticket, attempt: u32) -> Ticket {
    let mut ticket = ticket.clone();
    ticket.attempt = attempt;
    ticket
}

fn claim_of(id: RecordId, token: Token) -> ClaimRequest {
    let mut request = ClaimRequest::new(id, "broken", Fingerprint::from_bytes([0; 32]));
    request.token = token;
    request
}

fn whole_seconds(duration: Duration) -> Duration {
    Duration::from_secs(duration.as_secs())
}

impl Store for Broken {
    async fn claim(&self, mut request: ClaimRequest) -> Result<Claim, StoreError> {
        self.open()?;
        match self.how {
            How::NeverLapses => request.lease = Duration::MAX,
            How::LapsesAtOnce => request.lease = Duration::ZERO,
            How::RunsForever => request.max_run = Duration::MAX,
            How::KeepsTheAbandoned => request.abandoned_ttl = None,
            How::ForgetsTheAbandoned => {
                request
                    .abandoned_ttl
                    .get_or_insert(Duration::from_secs(3600));
            }
            How::JoinsScopeAndKey => {
                let joined = [request.id.scope.as_bytes(), request.id.key.as_bytes()].concat();
                request.id = RecordId::new(Scope::shared(), IdempotencyKey::new(joined));
            }
            How::IgnoresCase => {
                let key = request.id.key.as_bytes().to_ascii_lowercase();
                request.id.key = IdempotencyKey::new(key);
            }
            How::EndsAtNul => {
                let key = request.id.key.as_bytes().split(|byte| *byte == 0).next();
                request.id.key = IdempotencyKey::new(key.unwrap_or_default());
            }
            How::ReadsThenWrites if self.inner.get(&request.id).await?.is_none() => {
                tokio::task::yield_now().await;
                self.inner.forget(&request.id).await?;
            }
            How::StaysBusy => {
                if self.shared.busy.swap(true, Ordering::SeqCst) {
                    return Err(unavailable());
                }
                tokio::task::yield_now().await;
                self.shared.busy.store(false, Ordering::SeqCst);
            }
            How::ForgetsItsToken => {
                if let Some(record) = self.inner.get(&request.id).await?
                    && record.token == request.token
                    && record.state == State::Running
                {
                    return Ok(Claim::InFlight(Held::of(&record)));
                }
            }
            How::TakesOverTheLiving => {
                if let Some(record) = self.inner.get(&request.id).await?
                    && Some(record.token) == request.replaces
                {
                    let _ = self.inner.abandon(&record.ticket()).await?;
                }
            }
            How::TakesOverByAnyName => {
                if let (Some(_), Some(record)) =
                    (request.replaces, self.inner.get(&request.id).await?)
                {
                    request.replaces = Some(record.token);
                }
            }
            How::TakesOverAfresh => {
                if let Some(record) = self.inner.get(&request.id).await?
                    && Some(record.token) == request.replaces
                    && self.abandoned_now(&request.id).await?
                {
                    let claim = self.inner.claim(request.clone()).await?;
                    if let Claim::Won(ticket) = &claim {
                        self.inner.forget(&ticket.id).await?;
                        request.replaces = None;
                        self.inner.claim(request).await?;
                    }
                    return Ok(claim);
                }
            }
            _ => {}
        }
        let claim = match self.inner.claim(request.clone()).await {
            Err(error) if error.kind() == StoreErrorKind::Full => {
                self.shared.full.store(true, Ordering::SeqCst);
                let id = self.shared.seen.lock().unwrap().keys().next().cloned();
                match id {
                    Some(id) if self.how == How::Evicts => {
                        self.shared.seen.lock().unwrap().remove(&id);
                        self.inner.forget(&id).await?;
                        self.inner.claim(request.clone()).await?
                    }
                    _ => return Err(error),
                }
            }
            answer => answer?,
        };
        Ok(match (self.how, claim) {
            (How::CountsFromZero, Claim::Won(ticket)) => {
                Claim::Won(request.ticket(ticket.attempt - 1))
            }
            (How::RemembersAttempts, Claim::Won(ticket)) => {
                let mut seen = self.shared.seen.lock().unwrap();
                let attempts = seen.entry(ticket.id).or_default();
                *attempts += 1;
                Claim::Won(request.ticket(*attempts))
            }
            (How::Evicts | How::CountsTheExpired, Claim::Won(ticket)) => {
                let mut seen = self.shared.seen.lock().unwrap();
                seen.insert(ticket.id.clone(), 1);
                Claim::Won(ticket)
            }
            (How::EchoesTheRival, Claim::InFlight(mut held)) => {
                held.fingerprint = request.fingerprint;
                Claim::InFlight(held)
            }
            (How::LetsRivalsIn, Claim::InFlight(_)) => Claim::Won(request.ticket(1)),
            (How::AnswersWithoutResponse, Claim::Completed(mut record)) => {
                record.response = None;
                Claim::Completed(record)
            }
            (How::TakesOverUnnamed, Claim::Abandoned(held)) => {
                request.replaces = Some(held.token);
                self.inner.claim(request).await?
            }
            (_, claim) => claim,
        })
    }

    async fn complete(
        &self,
        ticket: &Ticket,
        mut done: Completion,
        mut lifetimes: Lifetimes,
    ) -> Result<Settled, StoreError> {
        self.open()?;
        let mut ticket = ticket.clone();
        let before = self.inner.get(&ticket.id).await?;
        let completed = before
            .as_ref()
            .is_some_and(|record| record.state == State::Completed && record.token == ticket.token);
        match self.how {
            How::CompletesAsOk => done.status = StatusCode::OK,
            How::CompletesByAnyToken => ticket = self.own(&ticket).await?,
            How::CompletesOnce if completed => return Ok(Settled::Lost),
            How::CompletesAgain if completed => {
                self.inner.forget(&ticket.id).await?;
                self.inner
                    .claim(claim_of(ticket.id.clone(), ticket.token))
                    .await?;
            }
            How::CompletesTheLivingOnly if self.abandoned_now(&ticket.id).await? => {
                return Ok(Settled::Lost);
            }
            How::RefusesToComplete if self.shared.full.load(Ordering::SeqCst) => {
                return Err(StoreError::new(StoreErrorKind::Full, "no room to complete"));
            }
            How::CountsSeconds => {
                lifetimes.ttl = whole_seconds(lifetimes.ttl);
                lifetimes.response_ttl = lifetimes.response_ttl.map(whole_seconds);
            }
            How::KeepsResponses => lifetimes.response_ttl = None,
            How::KeepsRecords => lifetimes.ttl = Duration::MAX,
            How::KeepsText => {
                done.response = done
                    .response
                    .map(|bytes| String::from_utf8_lossy(&bytes).into_owned().into());
            }
            How::DropsEmpty => done.response = done.response.filter(|bytes| !bytes.is_empty()),
            _ => {}
        }
        self.inner.complete(&ticket, done, lifetimes).await
    }

    async fn release(&self, ticket: &Ticket, ttl: Duration) -> Result<Settled, StoreError> {
        self.open()?;
        let record = self.inner.get(&ticket.id).await?;
        let own = record.is_some_and(|record| record.token == ticket.token);
        match self.how {
            How::ReleasesByAnyToken => self.inner.release(&self.own(ticket).await?, ttl).await,
            How::AbandonsInstead => self.inner.abandon(ticket).await,
            How::CountsTheReleased => self.inner.release(&uncounting(ticket, 0), ttl).await,
            How::ReleasesTheCompleted | How::ReleasesWhole if own => {
                self.inner.forget(&ticket.id).await?;
                Ok(Settled::Done)
            }
            _ => self.inner.release(ticket, ttl).await,
        }
    }

    async fn abandon(&self, ticket: &Ticket) -> Result<Settled, StoreError> {
        self.open()?;
        match self.how {
            How::IgnoresAbandon => Ok(Settled::Done),
            How::CountsTheAbandoned => self.inner.abandon(&uncounting(ticket, 0)).await,
            How::CountsTheUnknownAsFirst if ticket.attempt == 0 => {
                self.inner.abandon(&uncounting(ticket, 1)).await
            }
            How::AbandonsByAnyToken => self.inner.abandon(&self.own(ticket).await?).await,
            _ => self.inner.abandon(ticket).await,
        }
    }

    async fn renew(&self, tickets: &[Ticket], lease: Duration) -> Result<Vec<Settled>, StoreError> {
        self.open()?;
        let lapsed = match tickets.first() {
            Some(ticket) => self.abandoned_now(&ticket.id).await?,
            None => false,
        };
        let lease = match self.how {
            How::IgnoresRenewals => Duration::ZERO,
            How::RenewsTheLivingOnly if lapsed => Duration::ZERO,
            _ => lease,
        };
        let mut settled = self.inner.renew(tickets, lease).await?;
        match self.how {
            How::RenewsOutOfOrder => settled.reverse(),
            How::NeverLoses => settled.fill(Settled::Done),
            _ => {}
        }
        Ok(settled)
    }

    async fn purge(&self, limit: usize) -> Result<usize, StoreError> {
        self.open()?;
        match self.how {
            How::PurgesNothing => return Ok(0),
            How::PurgesAll => return self.inner.purge(usize::MAX).await,
            How::PurgesTheAbandoned => {
                for record in self.inner.abandoned(None, usize::MAX).await? {
                    self.inner.forget(&record.id).await?;
                }
            }
            _ => {}
        }
        self.inner.purge(limit).await
    }

    async fn close(&self) -> Result<(), StoreError> {
        match self.how {
            How::IgnoresClose => Ok(()),
            How::KeepsItsLease => {
                self.closed.store(true, Ordering::SeqCst);
                Ok(())
            }
            _ => self.inner.close().await,
        }
    }
}

impl Inspect for Broken {
    async fn get(&self, id: &RecordId) -> Result<Option<Record>, StoreError> {
        self.open()?;
        let record = self.inner.get(id).await?;
        Ok(record
            .filter(|record| self.how != How::GetsTheCompleted || record.state == State::Completed))
    }

    async fn forget(&self, id: &RecordId) -> Result<bool, StoreError> {
        self.open()?;
        let record = self.inner.get(id).await?;
        let completed = record.is_some_and(|record| record.state == State::Completed);
        if self.how == How::ForgetsTheCompleted && !completed {
            return Ok(false);
        }
        self.inner.forget(id).await
    }

    async fn counts(&self) -> Result<Counts, StoreError> {
        self.open()?;
        let mut counts = self.inner.counts().await?;
        if self.how == How::CountsTheLapsedAsRunning {
            let listed = self.inner.abandoned(None, usize::MAX).await?;
            let lapsed = listed
                .iter()
                .filter(|record| record.state == State::Running);
            let lapsed = lapsed.count() as u64;
            counts.running += lapsed;
            counts.abandoned -= lapsed;
        }
        Ok(counts)
    }

    async fn count_in(&self, scope: &Scope, at_most: u64) -> Result<u64, StoreError> {
        self.open()?;
        let counts = self.inner.counts().await?;
        match self.how {
            How::CountsEveryScope => {
                let all = counts.running + counts.completed + counts.abandoned + counts.released;
                Ok(all.min(at_most))
            }
            How::CountsTheCompletedOnly => Ok(counts.completed.min(at_most)),
            How::CountsPastTheEnd => self.inner.count_in(scope, u64::MAX).await,
            How::CountsTheExpired => {
                let mut claimed = self
                    .shared
                    .seen
                    .lock()
                    .unwrap()
                    .keys()
                    .cloned()
                    .collect::<Vec<_>>();
                claimed.retain(|id| id.scope == *scope);
                Ok(at_most.min(claimed.len() as u64))
            }
            _ => self.inner.count_in(scope, at_most).await,
        }
    }

    async fn abandoned(
        &self,
        after: Option<&Record>,
        limit: usize,
    ) -> Result<Vec<Record>, StoreError> {
        self.open()?;
        match self.how {
            How::ListsNewestFirst => {
                let mut page = self.inner.abandoned(after, limit).await?;
                page.reverse();
                Ok(page)
            }
            How::ListsByTimeOnly => {
                let mut all = self.inner.abandoned(None, usize::MAX).await?;
                all.retain(|record| after.is_none_or(|after| record.created > after.created));
                all.truncate(limit);
                Ok(all)
            }
            _ => self.inner.abandoned(after, limit).await,
        }
    }

    async fn take_over(
        &self,
        id: &RecordId,
        mut abandoned: Token,
        token: Token,
        mut hold: Duration,
    ) -> Result<Option<Ticket>, StoreError> {
        self.open()?;
        let record = self.inner.get(id).await?;
        let named = record.filter(|record| record.token == abandoned);
        let current = self.inner.get(id).await?;
        match self.how {
            How::HoldsAsARun | How::HoldsTheReleased => {
                let is_meant = self.how == How::HoldsAsARun
                    || named.is_some_and(|record| record.state == State::Released);
                if is_meant {
                    return self.run_again(id, abandoned, token, hold).await;
                }
            }
            How::HoldsAfresh if named.is_some() && self.abandoned_now(id).await? => {
                self.inner.forget(id).await?;
                return self.run_again(id, abandoned, token, hold).await;
            }
            How::HoldsTheLiving => {
                if let Some(record) = &named {
                    let _ = self.inner.abandon(&record.ticket()).await?;
                }
            }
            How::HoldsByAnyName => {
                abandoned = current.map_or(abandoned, |record| record.token);
            }
            How::HoldsOnce if current.is_some_and(|record| record.token == token) => {
                return Ok(None);
            }
            How::HoldsTogether if named.is_some() && self.abandoned_now(id).await? => {
                tokio::task::yield_now().await;
                if let Some(record) = self.inner.get(id).await? {
                    let _ = self.inner.abandon(&record.ticket()).await?;
                    abandoned = record.token;
                }
            }
            How::HoldsForever => hold = Duration::MAX,
            How::HoldsForNoTime => hold = Duration::ZERO,
            _ => {}
        }
        self.inner.take_over(id, abandoned, token, hold).await
    }
}

impl Checkpoints for Broken {
    async fn save(&self, ticket: &Ticket, name: &str, value: Bytes) -> Result<Settled, StoreError> {
        self.open()?;
        match self.how {
            How::SavesByAnyToken => {
                let own = self.own(ticket).await?;
                self.inner.save(&own, name, value).await
            }
            How::SavesLargeValues => {
                let kept = value.slice(..value.len().min(64 * 1024));
                self.inner.save(ticket, name, kept).await
            }
            _ => self.inner.save(ticket, name, value).await,
        }
    }

    async fn load(&self, ticket: &Ticket) -> Result<Option<Vec<Checkpoint>>, StoreError> {
        self.open()?;
        match self.how {
            How::LoadsForAnybody => self.inner.load(&self.own(ticket).await?).await,
            How::LoadsByName => {
                let mut saved = self.inner.load(ticket).await?;
                if let Some(saved) = &mut saved {
                    saved.sort_by(|one, other| one.name.cmp(&other.name));
                }
                Ok(saved)
            }
            _ => self.inner.load(ticket).await,
        }
    }
}

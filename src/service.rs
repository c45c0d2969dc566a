//! The one path a request takes.

use std::{
    fmt, mem,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use axum::body::Body;
use bytes::Bytes;
use http::{Request, Response, header, request::Parts};
use tokio::time::Instant;
use tower_service::Service;

#[cfg(feature = "metrics")]
use crate::live::Live;
use crate::{
    IdempotencyKey, IdempotencyStatus, MissingKey, Rejection, UndecodableBody,
    attempt::Attempt,
    back_off::{Topic, Why},
    body::{Buffered, read_request},
    bounded::{FOREVER, within},
    engine::Engine,
    execution::{self, Claimed, Inner, Undo},
    extract::Idempotency,
    fingerprint::Pointer,
    key_source,
    live::Inquires,
    maintenance::Pause,
    observe::{self, By, Observed, Operation, Timed, Timer},
    options::Options,
    reconciler::is_of_one_record,
    record::{Fingerprint, Mode, Record, RecordId, Scheme, State, Token},
    recovery::{InFlight, Resolves, StoreFailure},
    resolving::{self, Question, Resolved},
    response_future::ResponseFuture,
    scope::{MAX_SCOPE_LEN, Scope},
    store::{Checkpoints, Claim, ClaimRequest, Held, Inspect, Settled, Store, StoreErrorKind},
    transacted::{self, Offered},
};

/// How often a claim whose fate is unknown is sent again before the request is refused.
const CLAIM_RESENDS: u32 = 2;
/// How many takeovers of one key one request tries before it gives way to the others.
const MAX_TAKEOVERS: u32 = 4;

/// The service an [`IdempotencyLayer`](crate::IdempotencyLayer) wraps around another.
pub struct IdempotencyService<I, S> {
    inner: I,
    engine: Arc<Engine<S>>,
}

impl<I, S> IdempotencyService<I, S> {
    pub(crate) fn new(inner: I, engine: Arc<Engine<S>>) -> Self {
        Self { inner, engine }
    }
}

impl<I: Clone, S> Clone for IdempotencyService<I, S> {
    fn clone(&self) -> Self {
        Self {
            inner: self.inner.clone(),
            engine: self.engine.clone(),
        }
    }
}

impl<I: fmt::Debug, S> fmt::Debug for IdempotencyService<I, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdempotencyService")
            .field("inner", &self.inner)
            .finish_non_exhaustive()
    }
}

impl<I, RB, B, S> Service<Request<B>> for IdempotencyService<I, S>
where
    I: Service<Request<Body>, Response = Response<RB>> + Clone + Send + 'static,
    I::Future: Send + 'static,
    I::Error: Send + 'static,
    RB: http_body::Body<Data = Bytes> + Send + 'static,
    RB::Error: Into<axum::BoxError>,
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<axum::BoxError>,
    S: Inspect + Checkpoints,
{
    type Response = Response<Body>;
    type Error = I::Error;
    type Future = ResponseFuture<I::Future, I::Error>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), I::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<B>) -> Self::Future {
        let options = &self.engine.options;
        let method = request.method();
        if request.extensions().get::<Idempotency>().is_some() {
            return ResponseFuture::pass(self.inner.call(request.map(Body::new)));
        }
        if !options.covers(method) {
            return self.pass(request.map(Body::new));
        }
        if let Some(pointer) = &options.key_pointer {
            let pointer = pointer.clone();
            return self.by_member(pointer, request);
        }
        let key = match options
            .key_format
            .read(request.headers(), &options.header_name)
        {
            None if !options.requires(method) => return self.pass(request.map(Body::new)),
            None => Err(Rejection::KeyRequired),
            Some(key) => key.map_err(Rejection::KeyInvalid),
        };
        if let (MissingKey::Observe, Err(rejection)) = (options.missing_key, &key) {
            observe::unkeyed(options, &mut request, rejection);
            return self.pass(request.map(Body::new));
        }
        // The instance that was polled ready is the one to be called, or to be dropped: what being
        // ready holds is then given back.
        let clone = self.inner.clone();
        let readied = mem::replace(&mut self.inner, clone);
        let (head, body) = request.into_parts();
        let observed = Observed::new(options, &head.headers, key.as_ref().ok());
        let key = match key {
            Ok(key) => key,
            Err(rejection) => {
                let refused = options.refuse(Some(&head), &rejection, &observed);
                return ResponseFuture::refused(refused);
            }
        };
        let span = observed.span();
        let attempt = Arc::new(Attempt::new(self.engine.clone(), observed));
        let run = keyed(
            self.engine.clone(),
            Inner::readied(readied),
            Box::new(head),
            body,
            key,
            attempt.clone(),
        );
        ResponseFuture::keyed(Box::pin(run), attempt, span)
    }
}

impl<I, S: Inspect + Checkpoints> IdempotencyService<I, S> {
    /// A request whose key is a member of its body. In a function and a box of its own, so that those with a
    /// key in their head do not carry its weight.
    #[cold]
    fn by_member<RB, B>(
        &mut self,
        pointer: Arc<Pointer>,
        request: Request<B>,
    ) -> ResponseFuture<I::Future, I::Error>
    where
        I: Service<Request<Body>, Response = Response<RB>> + Clone + Send + 'static,
        I::Future: Send + 'static,
        I::Error: Send + 'static,
        RB: http_body::Body<Data = Bytes> + Send + 'static,
        RB::Error: Into<axum::BoxError>,
        B: http_body::Body<Data = Bytes> + Send + 'static,
        B::Error: Into<axum::BoxError>,
    {
        let clone = self.inner.clone();
        let readied = mem::replace(&mut self.inner, clone);
        let (head, body) = request.into_parts();
        let (engine, head) = (self.engine.clone(), Box::new(head));
        let answer = key_source::by_member(engine, pointer, readied, head, body);
        ResponseFuture::boxed(Box::pin(answer))
    }
}

impl<I, S> IdempotencyService<I, S> {
    /// A request to which no key applies. In transactional mode its handler may have a transaction all the
    /// same, unless an outer layer has offered one already.
    pub(crate) fn pass<RB>(
        &mut self,
        mut request: Request<Body>,
    ) -> ResponseFuture<I::Future, I::Error>
    where
        I: Service<Request<Body>, Response = Response<RB>>,
        I::Future: Send + 'static,
        I::Error: Send + 'static,
        RB: http_body::Body<Data = Bytes> + Send + 'static,
        RB::Error: Into<axum::BoxError>,
    {
        let options = &self.engine.options;
        match &options.transactor {
            Some(transactor) if request.extensions().get::<Offered>().is_none() => {
                let work = transactor.work(None);
                work.clone().offer(request.extensions_mut());
                let running = self.inner.call(request);
                ResponseFuture::boxed(Box::pin(transacted::pass(options.clone(), work, running)))
            }
            _ => ResponseFuture::pass(self.inner.call(request)),
        }
    }
}

/// A keyed request, from its head to its answer. The head travels in a box: it is large, this future
/// and those in it would each have a place for it, and large futures are slow to allocate.
pub(crate) async fn keyed<I, RB, B, S>(
    engine: Arc<Engine<S>>,
    mut inner: Inner<I>,
    head: Box<Parts>,
    body: B,
    key: IdempotencyKey,
    attempt: Arc<Attempt>,
) -> Result<Response<Body>, I::Error>
where
    I: Service<Request<Body>, Response = Response<RB>> + Clone,
    RB: http_body::Body<Data = Bytes> + Send + 'static,
    RB::Error: Into<axum::BoxError>,
    B: http_body::Body<Data = Bytes> + Send,
    B::Error: Into<axum::BoxError>,
    S: Inspect + Checkpoints,
{
    let options = &engine.options;
    let scope = match engine.scope(&head) {
        Ok(scope) => scope,
        Err(rejection) => return Ok(options.refuse(Some(&head), &rejection, attempt.observed())),
    };
    let id = RecordId::new(scope, key);
    // Before the body is read: a flood costs no more than it has to.
    if let Err(rejection) = engine.keep_to_limit(&id).await {
        return Ok(options.refuse(Some(&head), &rejection, attempt.observed()));
    }
    let body = match read_request(body, options.request_body_limit).await {
        Ok(body) => body,
        Err(rejection) => return Ok(options.refuse(Some(&head), &rejection, attempt.observed())),
    };
    let fingerprinted = match options.fingerprint.fingerprint(&head, &body.data) {
        Ok(fingerprint) => Ok((options.fingerprint.name(), fingerprint)),
        Err(why) => Box::pin(engine.as_of_old(&id, &head, &body.data, why)).await,
    };
    // Where that found a scheme, it found a record.
    let met = fingerprinted
        .as_ref()
        .is_ok_and(|(scheme, _)| *scheme != options.fingerprint.name());
    let (scheme, fingerprint) = match fingerprinted {
        Ok(fingerprinted) => fingerprinted,
        Err(rejection) => return Ok(options.refuse(Some(&head), &rejection, attempt.observed())),
    };
    let asked = Asked {
        id,
        scheme,
        fingerprint,
        head: &head,
        body: &body.data,
        met: AtomicBool::new(met),
        inquired: AtomicBool::new(false),
        out_of_reach: OnceLock::new(),
    };
    let decision = decide(&engine, &mut inner, &asked, &attempt).await;

    let claimed = match decision {
        Ok(Decision::Run(claimed)) => claimed,
        Ok(Decision::Replay(record)) => {
            return Ok(options.replay(&head, record, attempt.observed()));
        }
        Ok(Decision::Unprotected) => {
            return Box::pin(run_unprotected(engine, inner, head, body, &attempt)).await;
        }
        Err(rejection) => return Ok(options.refuse(Some(&head), &rejection, attempt.observed())),
    };
    Box::pin(execution::run(engine, inner, head, body, attempt, claimed)).await
}

/// Runs without a claim, and says so.
async fn run_unprotected<I, RB, S>(
    engine: Arc<Engine<S>>,
    mut inner: Inner<I>,
    mut head: Box<Parts>,
    body: Buffered,
    attempt: &Attempt,
) -> Result<Response<Body>, I::Error>
where
    I: Service<Request<Body>, Response = Response<RB>> + Clone,
    RB: http_body::Body<Data = Bytes> + Send + 'static,
    RB::Error: Into<axum::BoxError>,
{
    inner.make_ready().await?;
    // Said beforehand: it runs, however that ends.
    observe::decided(attempt.observed(), observe::Decision::unprotected());
    let mut response = match &engine.options.transactor {
        None => inner.call(head, body).await?,
        Some(transactor) => {
            let work = transactor.work(None);
            work.clone().offer(&mut head.extensions);
            let running = inner.call(head, body);
            transacted::pass(engine.options.clone(), work, running).await?
        }
    };
    response.headers_mut().remove(&engine.options.replay_header);
    Ok(engine
        .options
        .marked(response, IdempotencyStatus::Unprotected))
}

/// What a keyed request asks for.
struct Asked<'a> {
    id: RecordId,
    /// The name of the scheme that made `fingerprint`.
    scheme: Scheme,
    fingerprint: Fingerprint,
    head: &'a Parts,
    body: &'a Bytes,
    /// The store has told of another run of this key. From then on it is no longer to be run unprotected.
    met: AtomicBool,
    /// The resolver was asked on its behalf; once is enough.
    inquired: AtomicBool,
    /// The token of the record that could not be taken over for that.
    out_of_reach: OnceLock<Token>,
}

/// What is to be done with a keyed request that is not refused.
enum Decision {
    Run(Claimed),
    Replay(Box<Record>),
    Unprotected,
}

/// Claims, and waits where that is wanted.
async fn decide<I: Clone, S: Inspect + Checkpoints>(
    engine: &Arc<Engine<S>>,
    inner: &mut Inner<I>,
    asked: &Asked<'_>,
    attempt: &Attempt,
) -> Result<Decision, Rejection> {
    engine.maintain();

    let held = loop {
        match claim(engine, asked, attempt, engine.options.store_timeout).await? {
            Claiming::Decided(decision) => return Ok(decision),
            Claiming::InFlight(held) => break held,
            Claiming::Inquiry(inquiry) => {
                inner.give_back();
                // In a box, so that the requests that need not ask do not carry its weight.
                let found_out = Box::pin(inquire(engine, inquiry, asked, attempt)).await?;
                if let Some(record) = found_out {
                    return Ok(Decision::Replay(record));
                }
            }
        }
    };
    match engine.options.in_flight {
        InFlight::Wait(bound) if !attempt.is_gone() => {
            inner.give_back();
            // In a box, so that the requests that need not wait do not carry its weight.
            Box::pin(wait(engine, asked, attempt, held, bound)).await
        }
        _ => Err(in_flight(held)),
    }
}

/// Waits for the run that is in flight to end, and looks again.
async fn wait<S: Inspect + Checkpoints>(
    engine: &Arc<Engine<S>>,
    asked: &Asked<'_>,
    attempt: &Attempt,
    held: Held,
    bound: Duration,
) -> Result<Decision, Rejection> {
    let deadline = Instant::now() + bound.min(FOREVER);
    #[cfg(feature = "metrics")]
    let _shown = Shown(&engine.live);
    let Some(waiter) = engine
        .live
        .waiting
        .join(&asked.id, engine.options.max_waiting)
    else {
        return Err(in_flight(held));
    };
    loop {
        let news = waiter.listen();
        // The last look is at the end: what has come by then counts.
        let left = deadline.saturating_duration_since(Instant::now());
        let last = left.is_zero();
        let patience = left.min(engine.options.store_timeout);
        let looked = match claim(engine, asked, attempt, patience).await {
            Ok(Claiming::Inquiry(inquiry)) => {
                match Box::pin(inquire(engine, inquiry, asked, attempt)).await {
                    Ok(None) => continue,
                    Ok(Some(record)) => Ok(Some(Decision::Replay(record))),
                    Err(rejection) => Err(rejection),
                }
            }
            Ok(Claiming::Decided(decision)) => Ok(Some(decision)),
            Ok(Claiming::InFlight(_)) => Ok(None),
            Err(rejection) => Err(rejection),
        };
        match looked {
            Ok(Some(decision)) => {
                waiter.tell();
                return Ok(decision);
            }
            // All places are taken by other runs: that says nothing about this key.
            Err(Rejection::Overloaded) if !engine.live.is_draining() => {}
            // Nothing is refused for that where it would be run, did it not know of another run.
            Err(Rejection::StoreUnavailable)
                if engine.options.store_failure == StoreFailure::RunUnprotected => {}
            // What ends the wait of one ends that of all.
            Err(rejection) => {
                waiter.tell();
                return Err(rejection);
            }
            Ok(None) => {}
        }
        if last || attempt.is_gone() {
            return Err(in_flight(held));
        }
        waiter.worth_looking(news, deadline).await;
    }
}

/// Dropped after one who waits: where its runtime ends, there is nobody else to show it.
#[cfg(feature = "metrics")]
struct Shown<'a>(&'a Live);

#[cfg(feature = "metrics")]
impl Drop for Shown<'_> {
    fn drop(&mut self) {
        self.0.show_at_the_end();
    }
}

/// What one look at the store came to.
enum Claiming {
    Decided(Decision),
    InFlight(Held),
    /// What an abandoned run did is to be found out first. No place is held for that: nothing runs, and it
    /// may take long.
    Inquiry(Inquiry),
}

/// Claims once, where there is a place within `patience`, and takes over what may be taken over.
/// Only the write in the store decides; what it found is compared here, in one place, before
/// anything else is said about it.
async fn claim<S: Inspect + Checkpoints>(
    engine: &Arc<Engine<S>>,
    asked: &Asked<'_>,
    attempt: &Attempt,
    patience: Duration,
) -> Result<Claiming, Rejection> {
    let options = &engine.options;
    let permit = engine
        .live
        .admit(options.max_running, patience)
        .await
        .ok_or(Rejection::Overloaded)?;
    let mut bid = Bid {
        token: Token::random(),
        replaces: None,
        attempt: 1,
        undo: Undo::Release,
        mode: options.mode(),
    };
    let limit = options.scope_limit.as_ref();
    let answers = limit.map_or(0, |limit| limit.answers());

    for _ in 0..MAX_TAKEOVERS {
        let held = match send_claim(engine, asked, &bid, attempt).await? {
            None => return Ok(Claiming::Decided(Decision::Unprotected)),
            Some(Claim::Won(ticket)) => {
                let first = ticket.attempt == 1;
                if let Some(limit) = limit.filter(|_| first) {
                    limit.made(&ticket.id.scope, answers);
                }
                return Ok(Claiming::Decided(Decision::Run(Claimed {
                    ticket,
                    permit,
                    // What was to be taken over may be gone by now: then this is a first run.
                    undo: if first { Undo::Release } else { bid.undo },
                })));
            }
            Some(Claim::Completed(record)) => {
                let same = engine.same(asked, &record.scheme, &record.fingerprint);
                return if same {
                    Ok(Claiming::Decided(Decision::Replay(record)))
                } else {
                    Err(Rejection::KeyReused {
                        original_request_id: record.request_id,
                    })
                };
            }
            Some(Claim::InFlight(held)) => {
                asked.met.store(true, Ordering::Relaxed);
                engine.same_as_held(asked, &held, true)?;
                return Ok(Claiming::InFlight(held));
            }
            Some(Claim::Abandoned(held)) => held,
        };
        asked.met.store(true, Ordering::Relaxed);
        engine.same_as_held(asked, &held, false)?;
        if Box::pin(engine.runs_here(&asked.id, &held)).await {
            return Ok(Claiming::InFlight(held));
        }
        // What such a run did, if it did not complete, was never committed.
        let without_effect = held.released || held.mode == Mode::Transactional;
        // It could not be taken over under this token, so somebody else is just doing that.
        if !without_effect && asked.out_of_reach.get() == Some(&held.token) {
            return Ok(Claiming::InFlight(held));
        }
        if !without_effect && let Some(resolver) = engine.may_ask(asked, &held)? {
            // Before its place is given back, so that a drain sees either.
            let inquires = engine.live.inquires().ok_or(Rejection::Overloaded)?;
            return Ok(Claiming::Inquiry(Inquiry {
                resolver,
                held,
                _inquires: inquires,
            }));
        }
        if !without_effect && !options.recovery.allows_after(held.attempt) {
            return Err(Rejection::OutcomeUnknown {
                original_request_id: held.request_id,
            });
        }
        // Taking over is a claim that names what it replaces: if somebody else was faster, this
        // one meets a live claim. Undone, it must not look as if the earlier run never was; nor cut
        // off, as if that one had had no effect.
        bid.replaces = Some(held.token);
        bid.attempt = held.attempt;
        (bid.undo, bid.mode) = match without_effect {
            true => (Undo::Release, options.mode()),
            false => (Undo::Abandon, Mode::Plain),
        };
    }
    Err(Rejection::InFlight {
        original_request_id: None,
    })
}

/// An abandoned record that is to be asked about.
struct Inquiry {
    resolver: Arc<dyn Resolves>,
    held: Held,
    _inquires: Inquires,
}

/// Has the resolver asked what the abandoned run did, and settles its record. Answers with the record, if
/// that is completed now; else it is for the next look to see what has become of it.
async fn inquire<S: Inspect + Checkpoints>(
    engine: &Arc<Engine<S>>,
    inquiry: Inquiry,
    asked: &Asked<'_>,
    attempt: &Attempt,
) -> Result<Option<Box<Record>>, Rejection> {
    let Inquiry { resolver, held, .. } = &inquiry;
    let record = engine.find(&asked.id).await?;
    let Some(record) = record.filter(|record| record.token == held.token) else {
        return Ok(None);
    };
    if engine.live.is_draining() {
        return Err(Rejection::Overloaded);
    }
    // From here on the record may be held: if the caller leaves now, this goes on without it.
    attempt.set_must_finish(true);
    let question = Question::Resolver(resolver.clone());
    let token = Token::random();
    let resolved = resolving::resolve(engine, record, token, By::Request, question).await;
    attempt.set_must_finish(false);
    // What it could not be asked for, another look may.
    asked.inquired.fetch_or(resolved.is_ok(), Ordering::Relaxed);
    let topic = Topic::new(&engine.store.stored_id(&asked.id), Some(resolver));
    let back_off = &engine.live.back_off;
    match resolved {
        Ok(Some(Resolved::Left)) => {
            back_off.left_by_request(topic, [held.token, token], Why::Unknown);
        }
        Ok(Some(Resolved::Answered | Resolved::Freed)) => back_off.settled(&topic),
        Ok(Some(Resolved::Lost)) => {}
        Ok(None) => {
            asked.out_of_reach.get_or_init(|| held.token);
        }
        Err(error) => {
            if is_of_one_record(&error) {
                back_off.left_by_request(topic, [held.token, token], Why::Unreadable);
            }
            return Err(Rejection::StoreUnavailable);
        }
    }
    if attempt.is_gone() {
        return Err(in_flight(inquiry.held));
    }
    if !matches!(resolved, Ok(Some(Resolved::Answered))) {
        return Ok(None);
    }
    // Its answer needs no place, and there may be none, nor any more to come.
    let found = engine.find(&asked.id).await?;
    let answered = found.filter(|record| {
        record.state == State::Completed && engine.same(asked, &record.scheme, &record.fingerprint)
    });
    Ok(answered.map(Box::new))
}

/// What a request claims with.
struct Bid {
    token: Token,
    replaces: Option<Token>,
    /// Given back without having run, it leaves the record at this attempt.
    attempt: u32,
    /// What the record becomes when nothing is begun after all.
    undo: Undo,
    mode: Mode,
}

impl Bid {
    fn request(&self, options: &Options, asked: &Asked<'_>) -> ClaimRequest {
        ClaimRequest {
            id: asked.id.clone(),
            scheme: asked.scheme.clone(),
            fingerprint: asked.fingerprint,
            request_id: options
                .stored_request_id(asked.head, &asked.id.key)
                .map(Arc::from),
            mode: self.mode,
            token: self.token,
            replaces: self.replaces,
            lease: options.lease,
            max_run: options.max_run,
            abandoned_ttl: options.abandoned_ttl,
        }
    }
}

/// Sends one claim, again where its fate is unknown. `None` means: run unprotected.
async fn send_claim<S: Inspect + Checkpoints>(
    engine: &Arc<Engine<S>>,
    asked: &Asked<'_>,
    bid: &Bid,
    attempt: &Attempt,
) -> Result<Option<Claim>, Rejection> {
    // From here on a claim may stand: if the caller leaves now, this goes on without it.
    attempt.set_must_finish(true);
    let mut pause = Pause::default();
    let mut failed = StoreErrorKind::Unavailable;
    let mut unknown = false;
    let mut sent = Sent {
        engine,
        asked,
        bid,
        may_stand: true,
    };
    let timer = Timer::start();
    let claimed = within(engine.options.store_timeout, async {
        for resend in 0.. {
            let request = bid.request(&engine.options, asked);
            match engine.store.claim(request).await {
                Ok(claim) => return Some(claim),
                Err(error) => {
                    observe::store_failed(Operation::Claim, Some(&error));
                    failed = error.kind();
                    // Whatever else is wrong, this one claimed nothing; an earlier one may have.
                    unknown |= failed == StoreErrorKind::Unavailable;
                    if failed != StoreErrorKind::Unavailable || resend >= CLAIM_RESENDS {
                        break;
                    }
                }
            }
            pause.wait().await;
        }
        None
    })
    .await;
    timer.stop(Timed::Claim);
    match claimed {
        Some(Some(claim)) => {
            sent.may_stand = false;
            attempt.set_must_finish(matches!(claim, Claim::Won(_)));
            return Ok(Some(claim));
        }
        Some(None) => sent.may_stand = unknown,
        None => {
            observe::store_failed(Operation::Claim, None);
            failed = StoreErrorKind::Unavailable;
        }
    }
    drop(sent);
    attempt.set_must_finish(false);
    // A record that is there and cannot be read may be that of a finished run, and one that was met is that
    // of another run; and for a caller that is gone nothing is run unprotected.
    let absent = matches!(failed, StoreErrorKind::Unavailable | StoreErrorKind::Full);
    match engine.options.store_failure {
        StoreFailure::RunUnprotected
            if absent && !attempt.is_gone() && !asked.met.load(Ordering::Relaxed) =>
        {
            Ok(None)
        }
        _ => Err(Rejection::StoreUnavailable),
    }
}

/// A claim that was sent and may stand in the store. Dropped like that, also because its runtime
/// ends, it is left to the background to undo.
struct Sent<'a, S: Store> {
    engine: &'a Arc<Engine<S>>,
    asked: &'a Asked<'a>,
    bid: &'a Bid,
    may_stand: bool,
}

impl<S: Store> Drop for Sent<'_, S> {
    fn drop(&mut self) {
        if self.may_stand {
            let request = self.bid.request(&self.engine.options, self.asked);
            self.engine
                .leave_behind(request.ticket(self.bid.attempt), self.bid.undo.into());
        }
    }
}

impl<S: Inspect> Engine<S> {
    /// Whose key it is.
    fn scope(&self, head: &Parts) -> Result<Scope, Rejection> {
        if let Some(scope) = &self.options.scope {
            return scope(head)
                .filter(|scope| scope.as_bytes().len() <= MAX_SCOPE_LEN)
                .ok_or(Rejection::ScopeUnknown);
        }
        let suspicious = !self.options.single_tenant
            && (head.headers.contains_key(header::AUTHORIZATION)
                || head.headers.contains_key(header::COOKIE));
        if suspicious && !self.live.warned_of_scope.swap(true, Ordering::Relaxed) {
            observe::scope_missing();
        }
        Ok(Scope::shared())
    }

    /// Whether what is asked for is what the record was made for, under the record's own scheme.
    fn same(&self, asked: &Asked<'_>, scheme: &str, recorded: &Fingerprint) -> bool {
        match asked.scheme == scheme {
            true => asked.fingerprint == *recorded,
            false => self
                .options
                .asks_for(scheme, recorded, asked.head, asked.body),
        }
    }

    /// The fingerprint of a body that the scheme cannot read: it may be the retry of one that was taken
    /// while an older scheme was in use, and such a record is compared under that. Reads only, so that a
    /// body that is simply broken leaves nothing behind.
    async fn as_of_old(
        &self,
        id: &RecordId,
        head: &Parts,
        body: &Bytes,
        why: UndecodableBody,
    ) -> Result<(Scheme, Fingerprint), Rejection> {
        let options = &self.options;
        if options.also_accept.is_empty() {
            return Err(Rejection::BodyInvalid(why));
        }
        let record = self.find(id).await?.ok_or(Rejection::BodyInvalid(why))?;
        match options.asks_for(&record.scheme, &record.fingerprint, head, body) {
            true => Ok((record.scheme, record.fingerprint)),
            false => Err(Rejection::BodyInvalid(why)),
        }
    }

    /// As [`same`](Self::same), of a record that is not completed.
    fn same_as_held(
        &self,
        asked: &Asked<'_>,
        held: &Held,
        is_running: bool,
    ) -> Result<(), Rejection> {
        if self.same(asked, &held.scheme, &held.fingerprint) {
            return Ok(());
        }
        let original_request_id = held.request_id.clone();
        let audience = self.options.audience;
        Err(audience.differs_from_unfinished(is_running, original_request_id))
    }
}

impl<S: Inspect + Checkpoints> Engine<S> {
    /// Whether a record that looks abandoned is one whose run is going on in this process: then the heartbeat
    /// came too late, which the run must not pay for, or somebody else has taken its claim, and nothing is to
    /// run beside it all the same. Past `max_run` it is abandoned, unless its answer is known by then: nobody
    /// need find that out, and nothing runs in its stead.
    pub(crate) async fn runs_here(&self, id: &RecordId, held: &Held) -> bool {
        let Some(attempt) = self.live.running_here(&held.token) else {
            let other = match id.is_hashed() {
                false => self.live.running_of(|running| running == id),
                true => self.live.running_of(|running| {
                    self.store.stored_id(running) == self.store.stored_id(id)
                }),
            };
            return other.is_some_and(|other| other.age() < self.options.max_run);
        };
        if attempt.is_answered() {
            return true;
        }
        match attempt.ticket() {
            Some(ticket) => !matches!(self.renew(ticket).await, Ok(Settled::Lost)),
            None => false,
        }
    }

    /// The resolver, where there is one and it is to be asked on behalf of this request.
    fn may_ask(
        &self,
        asked: &Asked<'_>,
        held: &Held,
    ) -> Result<Option<Arc<dyn Resolves>>, Rejection> {
        let Some(resolver) = &self.options.resolver else {
            return Ok(None);
        };
        let topic = Topic::new(&self.store.stored_id(&asked.id), Some(resolver));
        match self.live.back_off.holds_request_off(&topic, held.token) {
            None if asked.inquired.load(Ordering::Relaxed) => Ok(None),
            None => Ok(Some(resolver.clone())),
            Some(Why::Unknown) => Ok(None),
            Some(Why::Unreadable) => Err(Rejection::StoreUnavailable),
        }
    }
}

fn in_flight(held: Held) -> Rejection {
    Rejection::InFlight {
        original_request_id: held.request_id,
    }
}

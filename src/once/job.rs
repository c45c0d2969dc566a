//! An operation as the engine sees it: a request that nobody has sent, and a service that answers it.

use std::{
    convert::Infallible,
    sync::Arc,
    task::{Context, Poll},
};

use axum::body::Body;
use bytes::Bytes;
use http::{Extensions, Request, Response, request::Parts};
use tower_service::Service;

use crate::{
    Fingerprint, FingerprintScheme, IdempotencyKey, InvalidKey, MAX_KEY_LEN, Rejection,
    RejectionContext, Retention, Scope, UndecodableBody,
    attempt::Attempt,
    bounded::Boxed,
    engine::Engine,
    execution::Inner,
    observe::Observed,
    options::Options,
    record::Scheme,
    response_future::ResponseFuture,
    scope::MAX_SCOPE_LEN,
    service::keyed,
    store::{Checkpoints, Inspect},
};

/// What an operation is run under. The head of its request has no place for it but the extensions.
#[derive(Clone)]
pub(super) struct Terms {
    pub(super) scope: Scope,
    pub(super) fingerprint: Fingerprint,
}

/// The fingerprint comes with the operation. Its name is one of its own, so that the record of an operation
/// and that of a request never look the same.
struct Given;

impl FingerprintScheme for Given {
    fn name(&self) -> Scheme {
        Scheme::Borrowed("once/1")
    }

    fn fingerprint(&self, head: &Parts, _: &Bytes) -> Result<Fingerprint, UndecodableBody> {
        let terms = head.extensions.get::<Terms>();
        let terms = terms.ok_or(UndecodableBody("it has no fingerprint"))?;
        Ok(terms.fingerprint)
    }
}

/// What of a layer's options counts for operations. All others are about HTTP.
pub(super) fn options(layer: &Options) -> Options {
    Options {
        scope: Some(Arc::new(|head| {
            let terms = head.extensions.get::<Terms>();
            terms.map(|terms| terms.scope.clone())
        })),
        fingerprint: Arc::new(Given),
        // An operation says itself what a failure means. What says nothing has failed without any effect.
        retention: Retention::successes_only(),
        rejections: Arc::new(|rejection: &Rejection, _: &RejectionContext<'_>| refused(rejection)),
        scope_limit: layer.scope_limit.clone(),
        ttl: layer.ttl,
        response_ttl: layer.response_ttl,
        abandoned_ttl: layer.abandoned_ttl,
        lease: layer.lease,
        max_run: layer.max_run,
        max_running: layer.max_running,
        max_waiting: layer.max_waiting,
        in_flight: layer.in_flight,
        recovery: layer.recovery,
        resolver: layer.resolver.clone(),
        resolver_timeout: layer.resolver_timeout,
        downstream: layer.downstream.clone(),
        store_timeout: layer.store_timeout,
        #[cfg(feature = "metrics")]
        count_records_every: layer.count_records_every,
        response_body_limit: layer.response_body_limit,
        buffer_timeout: layer.buffer_timeout,
        transactor: layer.transactor.clone(),
        ..Options::default()
    }
}

/// A refusal, for nobody but the caller of the operation.
pub(super) fn refused(rejection: &Rejection) -> Response<Body> {
    let mut response = Response::new(Body::empty());
    response.extensions_mut().insert(rejection.clone());
    response
}

/// Runs an operation: given what a handler finds in its request's extensions, it answers what is to be kept.
type Operate = dyn Fn(Extensions) -> Boxed<'static, Response<Body>> + Send + Sync;

/// The inner service of an operation.
#[derive(Clone)]
pub(super) struct Job(Arc<Operate>);

impl Job {
    pub(super) fn new(
        operate: impl Fn(Extensions) -> Boxed<'static, Response<Body>> + Send + Sync + 'static,
    ) -> Self {
        Self(Arc::new(operate))
    }
}

type Running = Boxed<'static, Result<Response<Body>, Infallible>>;

impl Service<Request<Body>> for Job {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Running;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Running {
        let answer = (self.0)(request.into_parts().0.extensions);
        Box::pin(async move { Ok(answer.await) })
    }
}

/// Takes an operation the way a request takes.
pub(super) async fn carry_out<S: Inspect + Checkpoints>(
    engine: &Arc<Engine<S>>,
    terms: Terms,
    key: IdempotencyKey,
    job: Job,
) -> Response<Body> {
    let (mut head, ()) = Request::new(()).into_parts();
    let observed = Observed::new(&engine.options, &head.headers, Some(&key));
    if terms.scope.as_bytes().len() > MAX_SCOPE_LEN {
        return engine
            .options
            .refuse(Some(&head), &Rejection::ScopeUnknown, &observed);
    }
    // Of a header more is asked; a message's id is whatever its queue has made it.
    let invalid = match key.as_bytes().len() {
        0 => Some(InvalidKey::Blank),
        length => (length > MAX_KEY_LEN).then_some(InvalidKey::TooLong(MAX_KEY_LEN)),
    };
    if let Some(invalid) = invalid {
        let rejection = Rejection::KeyInvalid(invalid);
        return engine.options.refuse(Some(&head), &rejection, &observed);
    }
    head.extensions.insert(terms);
    let span = observed.span();
    let attempt = Arc::new(Attempt::new(engine.clone(), observed));
    let run = keyed(
        engine.clone(),
        Inner::readied(job),
        Box::new(head),
        Body::empty(),
        key,
        attempt.clone(),
    );
    let answered = ResponseFuture::<Running, Infallible>::keyed(Box::pin(run), attempt, span);
    match answered.await {
        Ok(response) => response,
        Err(never) => match never {},
    }
}

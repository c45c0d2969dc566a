//! What a layer can be told, with every default in one place.

use std::{fmt, iter, sync::Arc, time::Duration};

use axum::body::Body;
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode, request::Parts};

use crate::{
    Audience, ExactRequest, Fingerprint, FingerprintScheme, IdempotencyKey, IdempotencyStatus,
    InFlight, KeyFormat, MissingKey, Mode, ProblemJson, Recovery, Rejection, RejectionContext,
    RenderRejection, Retention, Scope, StoreFailure,
    downstream::DownstreamSecret,
    fingerprint::{Pointer, original_uri},
    key_source::Written,
    limits::ScopeLimit,
    observe::{self, Decision, Observed},
    recovery::Resolves,
    retained::SkippedHeaders,
    status::{REPLAY_HEADER, STATUS_HEADER},
    store::Lifetimes,
    transacted::Transactor,
};

/// The default name of the key's header.
pub(crate) const KEY_HEADER: HeaderName = HeaderName::from_static("idempotency-key");

/// A request id longer than this is not kept.
const MAX_REQUEST_ID_LEN: usize = 128;

type ScopeOf = Arc<dyn Fn(&Parts) -> Option<Scope> + Send + Sync>;

#[derive(Clone)]
pub(crate) struct Options {
    pub(crate) header_name: HeaderName,
    /// Somebody has chosen it, so no profile changes it.
    pub(crate) header_is_named: bool,
    /// Where the key is in the body, in place of the header.
    pub(crate) key_pointer: Option<Arc<Pointer>>,
    pub(crate) methods: Vec<Method>,
    pub(crate) required_methods: Vec<Method>,
    pub(crate) key_format: KeyFormat,
    pub(crate) scope: Option<ScopeOf>,
    pub(crate) single_tenant: bool,
    pub(crate) scope_limit: Option<Arc<ScopeLimit>>,
    pub(crate) fingerprint: Arc<dyn FingerprintScheme>,
    pub(crate) also_accept: Vec<Arc<dyn FingerprintScheme>>,
    pub(crate) retention: Retention,
    pub(crate) ttl: Duration,
    pub(crate) response_ttl: Option<Duration>,
    pub(crate) abandoned_ttl: Option<Duration>,
    pub(crate) lease: Duration,
    pub(crate) max_run: Duration,
    pub(crate) max_running: usize,
    pub(crate) max_waiting: usize,
    pub(crate) in_flight: InFlight,
    pub(crate) recovery: Recovery,
    pub(crate) resolver: Option<Arc<dyn Resolves>>,
    pub(crate) resolver_timeout: Duration,
    pub(crate) downstream: Option<DownstreamSecret>,
    pub(crate) missing_key: MissingKey,
    pub(crate) store_failure: StoreFailure,
    pub(crate) store_timeout: Duration,
    #[cfg(feature = "metrics")]
    pub(crate) count_records_every: Duration,
    pub(crate) request_body_limit: usize,
    pub(crate) response_body_limit: usize,
    pub(crate) buffer_timeout: Duration,
    pub(crate) skip_headers: SkippedHeaders,
    pub(crate) replay_header: HeaderName,
    pub(crate) replay_provenance: bool,
    pub(crate) no_store_replays: bool,
    pub(crate) status_header: bool,
    pub(crate) reuse_status: StatusCode,
    pub(crate) audience: Audience,
    pub(crate) rejections: Arc<dyn RenderRejection>,
    pub(crate) documentation_url: Option<Arc<str>>,
    pub(crate) request_id_header: HeaderName,
    /// Begins the handlers' transactions, in transactional mode.
    pub(crate) transactor: Option<Arc<dyn Transactor>>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            header_name: KEY_HEADER,
            header_is_named: false,
            key_pointer: None,
            methods: vec![Method::POST, Method::PATCH],
            required_methods: vec![Method::POST],
            key_format: KeyFormat::any(),
            scope: None,
            single_tenant: false,
            scope_limit: None,
            fingerprint: Arc::new(ExactRequest),
            also_accept: Vec::new(),
            retention: Retention::standard(),
            ttl: Duration::from_secs(24 * 3600),
            response_ttl: None,
            abandoned_ttl: None,
            lease: Duration::from_secs(30),
            max_run: Duration::from_secs(600),
            max_running: 1024,
            max_waiting: 1024,
            in_flight: InFlight::Refuse,
            recovery: Recovery::Refuse,
            resolver: None,
            resolver_timeout: Duration::from_secs(10),
            downstream: None,
            missing_key: MissingKey::Refuse,
            store_failure: StoreFailure::Refuse,
            store_timeout: Duration::from_secs(5),
            #[cfg(feature = "metrics")]
            count_records_every: Duration::from_secs(60),
            request_body_limit: 1024 * 1024,
            response_body_limit: 1024 * 1024,
            buffer_timeout: Duration::from_secs(1),
            skip_headers: SkippedHeaders::default(),
            replay_header: REPLAY_HEADER,
            replay_provenance: false,
            no_store_replays: false,
            status_header: false,
            reuse_status: StatusCode::CONFLICT,
            audience: Audience::Clients,
            rejections: Arc::new(ProblemJson),
            documentation_url: None,
            request_id_header: HeaderName::from_static("x-request-id"),
            transactor: None,
        }
    }
}

impl Options {
    /// Panics where two options contradict each other. Checked when a service is wrapped, so that
    /// options may be set in any order.
    pub(crate) fn check(&self) {
        assert!(
            self.lease <= self.max_run,
            "lease must not be longer than max_run"
        );
        assert!(
            self.response_ttl
                .is_none_or(|response| response <= self.ttl),
            "response_ttl must not be longer than ttl"
        );
    }

    /// Names the key's header, unless somebody has chosen a name.
    pub(crate) fn name_header(&mut self, name: HeaderName) {
        if !self.header_is_named {
            self.header_name = name;
        }
    }

    /// Whether a key is honoured for this method.
    pub(crate) fn covers(&self, method: &Method) -> bool {
        self.methods.contains(method) || self.requires(method)
    }

    /// Whether this method needs a key.
    pub(crate) fn requires(&self, method: &Method) -> bool {
        self.required_methods.contains(method)
    }

    pub(crate) fn lifetimes(&self) -> Lifetimes {
        Lifetimes {
            ttl: self.ttl,
            response_ttl: self.response_ttl,
        }
    }

    /// How a claim of this layer keeps effect and record together.
    pub(crate) fn mode(&self) -> Mode {
        match self.transactor {
            Some(_) => Mode::Transactional,
            None => Mode::Plain,
        }
    }

    /// How often to look for records that are over.
    pub(crate) fn purge_interval(&self) -> Duration {
        let shortest = self.ttl.min(self.response_ttl.unwrap_or(self.ttl));
        (shortest / 10).clamp(Duration::from_secs(1), Duration::from_secs(60))
    }

    /// The request's id, when it has one that is worth keeping.
    pub(crate) fn request_id<'a>(&self, head: &'a Parts) -> Option<&'a str> {
        self.request_id_value(&head.headers)?.to_str().ok()
    }

    /// The request's id, where the store may see it: not when it is the key, decoded or as it was sent, which
    /// the store may have been given in another form.
    pub(crate) fn stored_request_id<'a>(
        &self,
        head: &'a Parts,
        key: &IdempotencyKey,
    ) -> Option<&'a str> {
        let id = self.request_id(head)?;
        let shown = id.as_bytes().trim_ascii();
        let is_key = |sent: &HeaderValue| sent.as_bytes().trim_ascii() == shown;
        let hidden = self.request_id_header == self.header_name
            || key.as_bytes() == shown
            || head.headers.get_all(&self.header_name).iter().any(is_key)
            || self.key_pointer.is_some()
                && (head.extensions.get::<Written>()).is_some_and(|sent| sent.0 == shown);
        (!hidden).then_some(id)
    }

    /// As [`request_id`](Self::request_id), to be kept.
    pub(crate) fn request_id_value<'a>(&self, headers: &'a HeaderMap) -> Option<&'a HeaderValue> {
        let value = headers.get(&self.request_id_header)?;
        let id = value.to_str().ok()?;
        (!id.is_empty() && id.len() <= MAX_REQUEST_ID_LEN).then_some(value)
    }

    /// Renders a refusal and says so in the response's extensions and in an event. Without a head
    /// the request has been handed to its handler already.
    pub(crate) fn refuse(
        &self,
        head: Option<&Parts>,
        rejection: &Rejection,
        observed: &Observed,
    ) -> Response<Body> {
        let response = self.render(head, rejection);
        let decision = Decision::refused(rejection);
        observe::decided(observed, decision);
        self.marked(response, decision.status())
    }

    /// What goes out in place of a handler's answer whose body broke off before anything of it did.
    pub(crate) fn instead_of_broken(&self, rejection: &Rejection) -> (http::response::Parts, Body) {
        self.render(None, rejection).into_parts()
    }

    fn render(&self, head: Option<&Parts>, rejection: &Rejection) -> Response<Body> {
        let status = match rejection {
            Rejection::KeyReused { .. } => self.reuse_status,
            other => self.audience.status(other),
        };
        let context = RejectionContext {
            status,
            header_name: self.header_name.as_str(),
            key_pointer: self.key_pointer.as_deref().map(Pointer::as_str),
            method: head.map_or("", |head| head.method.as_str()),
            path: head.map_or("", |head| original_uri(head).path()),
            request_id: head.and_then(|head| self.request_id(head)),
            documentation_url: self.documentation_url.as_deref(),
            retry_after: self.audience.retry_after_seconds(rejection),
        };
        self.rejections.render(rejection, &context)
    }

    /// Says on the answer what was done: to the layers around this one, and to the client where it is to be
    /// told. That a run was not protected is always told.
    pub(crate) fn marked(
        &self,
        mut response: Response<Body>,
        status: IdempotencyStatus,
    ) -> Response<Body> {
        response.extensions_mut().insert(status);
        if self.status_header || status == IdempotencyStatus::Unprotected {
            let said = HeaderValue::from_static(status.as_str());
            // A handler may have filled the map to its brim: its answer is worth more than this.
            let _ = response.headers_mut().try_insert(STATUS_HEADER, said);
        }
        response
    }

    /// Whether a request asks for what was recorded, under the scheme with this name.
    pub(crate) fn asks_for(
        &self,
        scheme: &str,
        recorded: &Fingerprint,
        head: &Parts,
        body: &Bytes,
    ) -> bool {
        iter::once(&self.fingerprint)
            .chain(&self.also_accept)
            .filter(|known| known.name() == scheme)
            .any(|known| known.fingerprint(head, body) == Ok(*recorded))
    }
}

impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Options")
            .field("header_name", &self.header_name)
            .field(
                "key_pointer",
                &self.key_pointer.as_deref().map(Pointer::as_str),
            )
            .field("methods", &self.methods)
            .field("required_methods", &self.required_methods)
            .field("key_format", &self.key_format)
            .field("scoped", &self.scope.is_some())
            .field("scope_limit", &self.scope_limit)
            .field("fingerprint", &self.fingerprint.name())
            .field("audience", &self.audience)
            .field("retention", &self.retention)
            .field("ttl", &self.ttl)
            .field("lease", &self.lease)
            .field("max_run", &self.max_run)
            .field("max_running", &self.max_running)
            .field("in_flight", &self.in_flight)
            .field("recovery", &self.recovery)
            .field("resolver", &self.resolver.is_some())
            .field("missing_key", &self.missing_key)
            .field("store_failure", &self.store_failure)
            .field("store_timeout", &self.store_timeout)
            .field("mode", &self.mode())
            .finish_non_exhaustive()
    }
}

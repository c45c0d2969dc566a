//! The layer and its options.

use std::{fmt, sync::Arc, time::Duration};

use axum::body::Body;
use http::{HeaderName, Method, Response, StatusCode, Uri, request::Parts};
use tower_layer::Layer;

use crate::{
    Audience, FingerprintScheme, InFlight, KeyFormat, MissingKey, Profile, Reconciler, Recovery,
    Rejection, RenderRejection, Resolver, Retention, Scope, StoreFailure,
    bounded::within,
    downstream::DownstreamSecret,
    engine::Engine,
    fingerprint::Pointer,
    limits::ScopeLimit,
    live::Live,
    observe::Observed,
    options::Options,
    retained::SkippedHeaders,
    service::IdempotencyService,
    store::{Checkpoints, Inspect},
};
#[cfg(any(feature = "sqlite", feature = "postgres"))]
use crate::{TxOptions, store::TransactionalStore};

/// Wraps a service so that a keyed request runs once, however often it is sent.
///
/// Put it on routes with `Router::route_layer`; under `Router::layer` it covers unknown paths too,
/// and a keyless POST to one gets 400 instead of 404. Authentication belongs outside of it.
///
/// The inner service takes `Request<axum::body::Body>` and answers with any `http_body::Body`; the
/// layered one takes requests with any body and answers `Response<axum::body::Body>`.
///
/// Options may be set in any order. One that makes no sense by itself panics when it is set, two
/// that contradict each other when a service is wrapped. (axum wraps some handlers only when a
/// router is first served; `.with_state(())` makes it do so at once.)
///
/// Clones share one engine: places for runs, heartbeat, waiters, and [`drain`](Self::drain). A
/// layer may be built outside of a runtime; its background work starts in each runtime with the first keyed
/// request that comes in on it, and ends with that runtime or the last handle.
///
/// ```
/// use std::time::Duration;
///
/// use axum::{Router, http::Method, routing::post};
/// use tower_idempotency::{IdempotencyLayer, MemoryStore, Scope};
///
/// #[derive(Clone)]
/// struct Merchant {
///     id: String,
/// }
///
/// let app: Router = Router::new()
///     .route("/payments", post(|| async { "paid" }))
///     .route_layer(
///         IdempotencyLayer::new(MemoryStore::new())
///             .ttl(Duration::from_secs(7 * 24 * 3600))
///             .required_methods([Method::POST])
///             .scope(|head| head.extensions.get::<Merchant>().map(|m| Scope::new(&m.id))),
///     );
/// ```
#[derive(Clone)]
#[must_use = "a layer does nothing until it wraps a service"]
pub struct IdempotencyLayer<S> {
    store: S,
    options: Arc<Options>,
    live: Arc<Live>,
}

/// How a [`drain`](IdempotencyLayer::drain) ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Drained {
    /// Runs that were told to stop because the time was over. Their claims are abandoned. Also counted are those
    /// that had ended by then and whose outcome was still being recorded: they get one more try.
    pub aborted: usize,
    /// Runs that could not be stopped, because nobody polls them. Their claims lapse with the
    /// lease.
    pub left: usize,
}

impl<S: Inspect + Checkpoints> IdempotencyLayer<S> {
    /// A layer over this store, with the default options.
    ///
    /// Give every layer of a service a clone of one store. Set [`scope`](Self::scope), or say
    /// [`single_tenant`](Self::single_tenant).
    pub fn new(store: S) -> Self {
        Self {
            store,
            options: Arc::default(),
            live: Arc::new(Live::new()),
        }
    }

    fn engine(&self) -> Engine<S> {
        Engine::new(self.store.clone(), self.options.clone(), self.live.clone())
    }

    /// The same store, places and heartbeat under other options.
    pub(crate) fn engine_with(&self, options: Options) -> Engine<S> {
        Engine::new(self.store.clone(), Arc::new(options), self.live.clone())
    }

    /// The options, which do not contradict each other.
    pub(crate) fn checked(&self) -> &Options {
        self.options.check();
        &self.options
    }

    fn options(&mut self) -> &mut Options {
        Arc::make_mut(&mut self.options)
    }

    /// Stops admitting keyed requests (they get 503), waits at most `grace` for the runs to end,
    /// then aborts what is left, waits for it to end (at most four times `store_timeout`), and only
    /// then abandons its claims, so that the next process need not wait for their lease.
    ///
    /// For all clones of this layer. Call it beside the server's own graceful shutdown, then
    /// [`Store::close`](crate::store::Store::close) once no layer uses the store any more. Dropping the future stops the
    /// waiting, not the draining.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tower_idempotency::{IdempotencyLayer, MemoryStore};
    /// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
    /// let layer = IdempotencyLayer::new(MemoryStore::new()).single_tenant();
    /// let drained = layer.drain(Duration::from_secs(20)).await;
    /// assert_eq!((drained.aborted, drained.left), (0, 0));
    /// # });
    /// ```
    pub async fn drain(&self, grace: Duration) -> Drained {
        self.live.stop_admitting();
        self.engine().settle_orphans();
        if within(grace, self.live.idle()).await.is_some() {
            return Drained {
                aborted: 0,
                left: 0,
            };
        }
        let aborted = self.live.running();
        self.live.abort_all();
        // Long enough for an outcome to be tried in time, late, and for the last time.
        let patience = self.options.store_timeout.saturating_mul(4);
        let ended = within(patience, self.live.idle()).await;
        Drained {
            aborted,
            left: ended.map_or_else(|| self.live.running(), |()| 0),
        }
    }

    /// What the layer answers to this refusal of the request with this head: rendered like its own, said in
    /// an event and in the response's extensions. Nothing is recorded.
    ///
    /// For layers around this one and for sandboxes, which want to show a refusal without its cause.
    ///
    /// ```
    /// use axum::http::{Request, StatusCode};
    /// use tower_idempotency::{IdempotencyLayer, MemoryStore, Rejection};
    ///
    /// let layer = IdempotencyLayer::new(MemoryStore::new());
    /// let (head, ()) = Request::post("/payments").body(()).unwrap().into_parts();
    /// let original_request_id = Some("req_1".into());
    /// let response = layer.refusal(&head, &Rejection::KeyReused { original_request_id });
    /// assert_eq!(response.status(), StatusCode::CONFLICT);
    /// ```
    pub fn refusal(&self, head: &Parts, rejection: &Rejection) -> Response<Body> {
        let options = &self.options;
        let key = options.key_format.read(&head.headers, &options.header_name);
        let key = key.and_then(Result::ok);
        let observed = Observed::new(options, &head.headers, key.as_ref());
        options.refuse(Some(head), rejection, &observed)
    }

    /// Sets a whole set of options at once, to behave like a system that is known; see [`Profile`] for what
    /// it sets. Default: none. An option that is set afterwards wins.
    ///
    /// ```
    /// # use axum::http;
    /// # use tower_idempotency::{IdempotencyLayer, MemoryStore, Profile};
    /// let layer = IdempotencyLayer::new(MemoryStore::new())
    ///     .profile(Profile::Gateway)
    ///     .required_methods([http::Method::POST, http::Method::PATCH]);
    /// ```
    pub fn profile(mut self, profile: Profile) -> Self {
        profile.set(self.options());
        self
    }

    /// The name of the key's header. Default `Idempotency-Key`, or what the [`profile`](Self::profile) says. No
    /// profile changes a name that is set, before it or after it.
    ///
    /// A correlation id such as `X-Request-Id` is no idempotency key: many clients make a new one per
    /// attempt.
    ///
    /// ```
    /// # use axum::http;
    /// # use tower_idempotency::{IdempotencyLayer, MemoryStore};
    /// let layer = IdempotencyLayer::new(MemoryStore::new()).header_name(http::HeaderName::from_static("webhook-id"));
    /// ```
    pub fn header_name(mut self, name: HeaderName) -> Self {
        let options = self.options();
        options.header_name = name;
        options.header_is_named = true;
        self
    }

    /// Takes the key from the body in place of a header: from the member that this JSON Pointer (RFC 6901)
    /// names, for senders that say only there which event or order it is. Default: from the header.
    ///
    /// The member is a string of 1 to 255 bytes (after escapes) that is not blank, or a number without fraction
    /// and exponent, whose digits are the key as they are written; so `17` and `"17"` are one key. What
    /// [`key_format`](Self::key_format) says of length and content holds as well. A `/` in a name is written
    /// `~1`, a `~` is written `~0`; an element of an array is named by its number, as in `/refs/0`. A pointer names one member: a batch with
    /// many events is known by its first one then, and a second batch that begins alike would be taken for the
    /// first; so name the id of the batch, or have each event delivered by itself.
    ///
    /// The body is read first, whatever the request's Content-Type, and nothing runs, is claimed or recorded
    /// before its key is known:
    ///
    /// | the body | answer |
    /// | --- | --- |
    /// | has no such member | as without a header: 400 `idempotency_key_required` where a key is [required](Self::required_methods), else it passes through |
    /// | has something else there, `null` too | 400 `idempotency_key_invalid` |
    /// | is not JSON (empty, compressed), has two members of a name that the pointer goes through, or nests deeper than 128 | 400 `idempotency_body_invalid`, also where no key is required, and under [`MissingKey::Observe`] |
    /// | is longer than [`request_body_limit`](Self::request_body_limit), or ends early | as for every keyed request, also where no key is required |
    ///
    /// **A key in the header is ignored then.** Put routes of both kinds behind two layers.
    ///
    /// # Panics
    ///
    /// When it does not begin with a slash, has a `~` that neither `0` nor `1` follows, or leads through more than
    /// 128 names.
    ///
    /// ```
    /// use axum::{Router, body::Body, http::{Request, StatusCode}, routing::post};
    /// use tower::ServiceExt;
    /// use tower_idempotency::{IdempotencyLayer, IdempotentResponse, KeyOnly, MemoryStore};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// let layer = IdempotencyLayer::new(MemoryStore::new())
    ///     .single_tenant()
    ///     .key_pointer("/id")
    ///     .fingerprint(KeyOnly);
    /// let app: Router = Router::new()
    ///     .route("/webhooks", post(|| async { StatusCode::NO_CONTENT }))
    ///     .route_layer(layer);
    /// let deliver = |body: &'static str| {
    ///     app.clone().oneshot(Request::post("/webhooks").body(Body::from(body)).unwrap())
    /// };
    /// let first = deliver(r#"{"id":"evt_1","sent":"12:00:00"}"#).await.unwrap();
    /// assert_eq!((first.status(), first.is_replay()), (StatusCode::NO_CONTENT, false));
    /// let again = deliver(r#"{"sent":"12:05:00","id":"evt_1"}"#).await.unwrap();
    /// assert_eq!((again.status(), again.is_replay()), (StatusCode::NO_CONTENT, true));
    /// assert_eq!(deliver(r#"{"sent":"12:05:00"}"#).await.unwrap().status(), StatusCode::BAD_REQUEST);
    /// # }
    /// ```
    pub fn key_pointer(mut self, pointer: &str) -> Self {
        let parsed = Pointer::parse(pointer);
        let parsed = parsed.unwrap_or_else(|why| panic!("key_pointer: {pointer:?} {why}"));
        self.options().key_pointer = Some(Arc::new(parsed));
        self
    }

    /// The methods on which a key is honoured when there is one; without one such a request passes
    /// through. Default POST and PATCH, and whatever is required.
    ///
    /// # Panics
    ///
    /// When GET, HEAD, OPTIONS, TRACE or CONNECT is among them: these always pass through.
    ///
    /// ```
    /// # use axum::http;
    /// # use tower_idempotency::{IdempotencyLayer, MemoryStore};
    /// let layer = IdempotencyLayer::new(MemoryStore::new()).methods([http::Method::POST, http::Method::PUT, http::Method::DELETE]);
    /// ```
    pub fn methods(mut self, methods: impl IntoIterator<Item = Method>) -> Self {
        self.options().methods = coverable("methods", methods);
        self
    }

    /// The methods on which a key is required. Default POST.
    ///
    /// # Panics
    ///
    /// When GET, HEAD, OPTIONS, TRACE or CONNECT is among them: these always pass through.
    ///
    /// ```
    /// # use axum::http;
    /// # use tower_idempotency::{IdempotencyLayer, MemoryStore};
    /// let layer = IdempotencyLayer::new(MemoryStore::new()).required_methods([http::Method::POST, http::Method::PATCH]);
    /// ```
    pub fn required_methods(mut self, methods: impl IntoIterator<Item = Method>) -> Self {
        self.options().required_methods = coverable("required_methods", methods);
        self
    }

    /// Requires a key on no method; where one is sent, [`methods`](Self::methods) says whether it is
    /// honoured. Short for `required_methods([])`.
    ///
    /// ```
    /// # use tower_idempotency::{IdempotencyLayer, MemoryStore};
    /// let layer = IdempotencyLayer::new(MemoryStore::new()).optional();
    /// ```
    pub fn optional(mut self) -> Self {
        self.options().required_methods.clear();
        self
    }

    /// Which keys are taken. Default [`KeyFormat::any`].
    ///
    /// ```
    /// # use tower_idempotency::{IdempotencyLayer, KeyFormat, MemoryStore};
    /// let layer = IdempotencyLayer::new(MemoryStore::new()).key_format(KeyFormat::uuid());
    /// ```
    pub fn key_format(mut self, format: KeyFormat) -> Self {
        self.options().key_format = format;
        self
    }

    /// How long a completed record is kept, counted from its completion. Default 24 h.
    ///
    /// Longer than the longest time any client may go on retrying, or a late retry runs again.
    ///
    /// # Panics
    ///
    /// When zero; and when a service is wrapped, if it is shorter than `response_ttl`.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tower_idempotency::{IdempotencyLayer, MemoryStore};
    /// let layer = IdempotencyLayer::new(MemoryStore::new()).ttl(Duration::from_secs(7 * 24 * 3600));
    /// ```
    pub fn ttl(mut self, ttl: Duration) -> Self {
        assert!(!ttl.is_zero(), "ttl must be longer than zero");
        self.options().ttl = ttl;
        self
    }

    /// How long the response of a completed record is kept, where that is shorter than the record.
    /// Default: as long as the record. Afterwards a retry gets `idempotency_response_not_retained`.
    ///
    /// # Panics
    ///
    /// When zero; and when a service is wrapped, if it is longer than `ttl`.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tower_idempotency::{IdempotencyLayer, MemoryStore};
    /// let layer = IdempotencyLayer::new(MemoryStore::new()).response_ttl(Duration::from_secs(3600));
    /// ```
    pub fn response_ttl(mut self, ttl: Duration) -> Self {
        assert!(!ttl.is_zero(), "response_ttl must be longer than zero");
        self.options().response_ttl = Some(ttl);
        self
    }

    /// How long after `max_run` an abandoned record is kept. Default: for ever, because what its run
    /// did is unknown, and once the record is gone the key runs as new.
    ///
    /// # Panics
    ///
    /// When zero.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tower_idempotency::{IdempotencyLayer, MemoryStore};
    /// let layer = IdempotencyLayer::new(MemoryStore::new()).abandoned_ttl(Duration::from_secs(90 * 24 * 3600));
    /// ```
    pub fn abandoned_ttl(mut self, ttl: Duration) -> Self {
        assert!(!ttl.is_zero(), "abandoned_ttl must be longer than zero");
        self.options().abandoned_ttl = Some(ttl);
        self
    }

    /// How long a silent process is believed alive. Default 30 s; renewed every third of it, by a
    /// task of the runtime, which handlers that block its threads would keep from running.
    ///
    /// After a crash, retries get `idempotency_in_flight` for this long and then what `recovery` says.
    /// The lease is that of the store instance: of layers that share one, the longest counts for all.
    ///
    /// # Panics
    ///
    /// When zero; and when a service is wrapped, if it is longer than `max_run`.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tower_idempotency::{IdempotencyLayer, MemoryStore};
    /// let layer = IdempotencyLayer::new(MemoryStore::new()).lease(Duration::from_secs(10));
    /// ```
    pub fn lease(mut self, lease: Duration) -> Self {
        assert!(!lease.is_zero(), "lease must be longer than zero");
        self.options().lease = lease;
        self
    }

    /// How long a run may last before it counts as abandoned. Default 10 min. The run itself is not
    /// ended, and its late answer is still recorded if nobody took over.
    ///
    /// # Panics
    ///
    /// When zero; and when a service is wrapped, if it is shorter than `lease`.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tower_idempotency::{IdempotencyLayer, MemoryStore};
    /// let layer = IdempotencyLayer::new(MemoryStore::new()).max_run(Duration::from_secs(60));
    /// ```
    pub fn max_run(mut self, max_run: Duration) -> Self {
        assert!(!max_run.is_zero(), "max_run must be longer than zero");
        self.options().max_run = max_run;
        self
    }

    /// How many claimed runs there may be at once, those included whose caller is gone. Default 1 024.
    /// Beyond it keyed requests get 503 before they claim anything.
    ///
    /// # Panics
    ///
    /// When zero.
    ///
    /// ```
    /// # use tower_idempotency::{IdempotencyLayer, MemoryStore};
    /// let layer = IdempotencyLayer::new(MemoryStore::new()).max_running(256);
    /// ```
    pub fn max_running(mut self, runs: usize) -> Self {
        assert!(runs > 0, "max_running must be at least 1");
        self.options().max_running = runs;
        self
    }

    /// How many requests may wait at once under [`InFlight::Wait`]; the rest is refused at once.
    /// Default 1 024.
    ///
    /// # Panics
    ///
    /// When zero; `InFlight::Refuse` says that nobody waits.
    ///
    /// ```
    /// # use tower_idempotency::{IdempotencyLayer, MemoryStore};
    /// let layer = IdempotencyLayer::new(MemoryStore::new()).max_waiting(64);
    /// ```
    pub fn max_waiting(mut self, requests: usize) -> Self {
        assert!(requests > 0, "max_waiting must be at least 1");
        self.options().max_waiting = requests;
        self
    }

    /// Derives the scope from the request's head; `None` refuses with 403 `idempotency_scope_unknown`.
    /// Default: everything shares one namespace.
    ///
    /// Scope by the subject (account, merchant), never by a token that rotates.
    ///
    /// ```
    /// # use tower_idempotency::{IdempotencyLayer, MemoryStore, Scope};
    /// #[derive(Clone)]
    /// struct AccountId(u64); // put into the request by the authentication outside
    ///
    /// let layer = IdempotencyLayer::new(MemoryStore::new())
    ///     .scope(|head| head.extensions.get::<AccountId>().map(|id| Scope::new(id.0.to_be_bytes())));
    /// ```
    pub fn scope(
        mut self,
        scope: impl Fn(&Parts) -> Option<Scope> + Send + Sync + 'static,
    ) -> Self {
        self.options().scope = Some(Arc::new(scope));
        self
    }

    /// Says that all callers are one: no scope is needed, and no warning either. Beside
    /// [`scope`](Self::scope) it says nothing.
    ///
    /// ```
    /// # use tower_idempotency::{IdempotencyLayer, MemoryStore};
    /// let layer = IdempotencyLayer::new(MemoryStore::new()).single_tenant();
    /// ```
    pub fn single_tenant(mut self) -> Self {
        self.options().single_tenant = true;
        self
    }

    /// How many records one scope may have at once, in whatever state, until they expire. Beyond it a new
    /// key gets 429 `idempotency_limit_reached`, with `Retry-After: 60`; a key that has its record is served
    /// as ever. Other scopes are not affected. Default: no limit.
    ///
    /// Without [`scope`](Self::scope) everybody shares one scope, and this is a limit for all together.
    /// It counts what the store has under a scope, whichever layer wrote it, and it is kept for this layer
    /// and its clones.
    ///
    /// **It is soft.** The store is asked beside the requests: when a scope is first seen, and then at most
    /// every 10 s while it is in use ([`count_in`](Inspect::count_in)). In between, the layer adds what it
    /// claims itself. So a scope may get past its limit by what is claimed while the store counts, and by
    /// what other instances claim in 10 s. A scope that has room again, because records have expired, were
    /// released or forgotten, gets in within 10 s. Of at most 10 000 scopes, the ones used last, anything is
    /// remembered.
    ///
    /// **While counts fail** the last one holds until 60 s after it was made. Then nothing is known of the
    /// scope any more, as before its first count: it is not limited until a count succeeds. A count that
    /// takes longer than 60 s has failed.
    ///
    /// **Abandoned records count and never expire**, unless [`abandoned_ttl`](Self::abandoned_ttl) is set: they do
    /// take room, and what their runs did is unknown. A scope whose fill is made of them is refused for
    /// good. So set `abandoned_ttl`, or settle them: [`Inspect::abandoned`] lists them, and
    /// [`Inspect::forget`] removes one whose effect has been looked up.
    ///
    /// **A count reads record by record**, up to the limit. Limits of some hundred thousand are counted in
    /// well under a second by an optimised build: on two slow cores SQLite took 0.03 s for 100 000 records
    /// and 0.2 s for a million (1.2 s when nothing of the file was in memory), Postgres 0.6 s and 1.8 s;
    /// [`MemoryStore`](crate::MemoryStore) reads nothing. SQLite takes some twenty times as long while more
    /// than 100 000 expired records wait for their purge. After each count, also one that failed, its scope is not
    /// counted again for nine times as long as that took, so no scope is counted for more than a tenth of
    /// the time. A count of more than about a second makes all the times of 10 s above that much longer:
    /// that is the ceiling of a sensible limit. It goes on in the background for as long as it takes;
    /// a request waits for it only at the limit, and for at most [`store_timeout`](Self::store_timeout).
    ///
    /// Below the limit a request costs no further question to the store. At the limit it costs one, before
    /// its body is read: whether the key has a record. Where the store cannot tell, the answer is 503, also
    /// under [`StoreFailure::RunUnprotected`].
    ///
    /// The limit for all scopes together is the store's own (`max_records`).
    ///
    /// # Panics
    ///
    /// When zero.
    ///
    /// ```
    /// # use tower_idempotency::{IdempotencyLayer, MemoryStore, Scope};
    /// # #[derive(Clone)]
    /// # struct Merchant { id: String }
    /// let layer = IdempotencyLayer::new(MemoryStore::new())
    ///     .scope(|head| head.extensions.get::<Merchant>().map(|m| Scope::new(&m.id)))
    ///     .scope_limit(100_000);
    /// ```
    pub fn scope_limit(mut self, records: u64) -> Self {
        assert!(records > 0, "scope_limit must be at least 1");
        self.options().scope_limit = Some(Arc::new(ScopeLimit::new(records)));
        self
    }

    /// The fingerprint scheme. Default [`ExactRequest`](crate::ExactRequest).
    ///
    /// # Panics
    ///
    /// When the scheme's name is longer than 64 bytes or has control characters.
    ///
    /// ```
    /// # use tower_idempotency::{IdempotencyLayer, KeyOnly, MemoryStore};
    /// let layer = IdempotencyLayer::new(MemoryStore::new()).fingerprint(KeyOnly);
    /// ```
    pub fn fingerprint(mut self, scheme: impl FingerprintScheme) -> Self {
        check_scheme("fingerprint", &scheme);
        self.options().fingerprint = Arc::new(scheme);
        self
    }

    /// Registers an older scheme: records written under it are compared under it. Default none.
    ///
    /// Where instances of two versions run side by side for a while, those of the earlier one meet records
    /// of the new scheme as well. So change it in two steps: first deploy `.fingerprint(old).also_accept(new)`
    /// everywhere, then `.fingerprint(new).also_accept(old)`; and remove the old one one
    /// [`ttl`](Self::ttl) later.
    ///
    /// # Panics
    ///
    /// When the scheme's name is longer than 64 bytes or has control characters.
    ///
    /// ```
    /// # use tower_idempotency::{ExactRequest, IdempotencyLayer, KeyOnly, MemoryStore};
    /// let layer = IdempotencyLayer::new(MemoryStore::new()).fingerprint(KeyOnly).also_accept(ExactRequest);
    /// ```
    pub fn also_accept(mut self, scheme: impl FingerprintScheme) -> Self {
        check_scheme("also_accept", &scheme);
        self.options().also_accept.push(Arc::new(scheme));
        self
    }

    /// Which answers are kept. Default [`Retention::standard`].
    ///
    /// ```
    /// # use tower_idempotency::{IdempotencyLayer, MemoryStore, Retention};
    /// let layer = IdempotencyLayer::new(MemoryStore::new()).retention(Retention::strict());
    /// ```
    pub fn retention(mut self, retention: Retention) -> Self {
        self.options().retention = retention;
        self
    }

    /// What a request gets whose first attempt is still running. Default [`InFlight::Refuse`].
    ///
    /// # Panics
    ///
    /// When the wait is zero.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tower_idempotency::{IdempotencyLayer, InFlight, MemoryStore};
    /// let layer = IdempotencyLayer::new(MemoryStore::new()).in_flight(InFlight::Wait(Duration::from_secs(5)));
    /// ```
    pub fn in_flight(mut self, in_flight: InFlight) -> Self {
        assert!(
            in_flight != InFlight::Wait(Duration::ZERO),
            "in_flight: a wait must be longer than zero"
        );
        self.options().in_flight = in_flight;
        self
    }

    /// What a request gets whose first attempt was cut off. Default [`Recovery::Refuse`].
    ///
    /// # Panics
    ///
    /// When `max_attempts` is zero.
    ///
    /// ```
    /// # use tower_idempotency::{IdempotencyLayer, MemoryStore, Recovery};
    /// let layer = IdempotencyLayer::new(MemoryStore::new()).recovery(Recovery::Rerun { max_attempts: 3 });
    /// ```
    pub fn recovery(mut self, recovery: Recovery) -> Self {
        assert!(
            recovery != Recovery::Rerun { max_attempts: 0 },
            "recovery: max_attempts must be at least 1"
        );
        self.options().recovery = recovery;
        self
    }

    /// Asked what became of a run that was cut off, by a request that meets its record, and by the
    /// [`reconciler`](Self::reconciler). What it leaves falls to [`recovery`](Self::recovery). Default: none.
    ///
    /// Each time the record is taken over under a fresh token first, so its late owner changes nothing any
    /// more, and other requests with its key meet a run in flight. The request that asks waits for the
    /// verdict, and goes on asking when its client leaves; then it replays the answer, runs, or is told what
    /// `recovery` says. All requests of a process ask about one record once a second at most; of that, 10 000 records that
    /// were left are remembered.
    ///
    /// A request that asks holds no place of a run ([`max_running`](Self::max_running)) and nothing of the inner
    /// service. 64 of a process may ask at once; those beyond are refused with 503 `idempotency_overloaded`. One
    /// that is to run afterwards takes a place then, and is refused like that where there is none, or where a
    /// [`drain`](Self::drain) has begun: the key is abandoned as before, or free. Under
    /// [`InFlight::Wait`](crate::InFlight::Wait) the time spent asking comes on top of the wait.
    ///
    /// After [`Verdict::Leave`](crate::Verdict::Leave), and when the resolver takes too long, panics or breaks
    /// off, the record is abandoned as before, under another token.
    ///
    /// Records of [`transactional`](Self::transactional) runs are never asked about: what was not committed
    /// did not happen. Nor are those of runs that go on in this process before their `max_run` is over, or whose
    /// answer is being recorded.
    ///
    /// ```
    /// # use axum::http::StatusCode;
    /// # use tower_idempotency::{Abandoned, IdempotencyLayer, MemoryStore, Verdict};
    /// let layer = IdempotencyLayer::new(MemoryStore::new()).resolver(|abandoned: Abandoned| async move {
    ///     // … ask the provider by abandoned.downstream_key("charge") …
    ///     Verdict::answer((StatusCode::CREATED, "paid"))
    /// });
    /// ```
    pub fn resolver(mut self, resolver: impl Resolver) -> Self {
        self.options().resolver = Some(Arc::new(resolver));
        self
    }

    /// How long a [`resolver`](Self::resolver) may take for one record. Default 10 s.
    ///
    /// A process that dies while it asks keeps the record in flight this long, and as long as
    /// [`buffer_timeout`](Self::buffer_timeout) and twice [`store_timeout`](Self::store_timeout) besides.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tower_idempotency::{IdempotencyLayer, MemoryStore};
    /// let layer = IdempotencyLayer::new(MemoryStore::new()).resolver_timeout(Duration::from_secs(3));
    /// ```
    ///
    /// # Panics
    ///
    /// When zero, or longer than an hour.
    pub fn resolver_timeout(mut self, timeout: Duration) -> Self {
        assert!(
            !timeout.is_zero() && timeout <= Duration::from_secs(3_600),
            "resolver_timeout must be more than nothing and at most an hour"
        );
        self.options().resolver_timeout = timeout;
        self
    }

    /// Settles the records of runs that were cut off, with the [`resolver`](Self::resolver) and the other
    /// options of this layer.
    ///
    /// ```
    /// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
    /// # use std::time::Duration;
    /// # use tower_idempotency::{IdempotencyLayer, MemoryStore};
    /// let layer = IdempotencyLayer::new(MemoryStore::new());
    /// tokio::spawn(layer.reconciler().every(Duration::from_secs(10)).run());
    /// # });
    /// ```
    pub fn reconciler(&self) -> Reconciler<S> {
        Reconciler::new(Arc::new(self.engine()))
    }

    /// The secret that [`Idempotency::downstream_key`](crate::Idempotency::downstream_key) makes keys with.
    /// Default: none. Every instance of a service must have the same, and keep it: with another one a retry
    /// asks the provider under another key.
    ///
    /// Set it in every instance before, or with, the first deploy whose handlers use such keys. An instance
    /// without one cannot make any: its handlers get [`NoDownstreamSecret`](crate::NoDownstreamSecret), which as
    /// a response leaves the key abandoned, although nothing happened. What was left like that needs a resolver
    /// or an operator, also once there is a secret. So check at start-up that it is there.
    ///
    /// ```
    /// # use tower_idempotency::{IdempotencyLayer, MemoryStore};
    /// # let from_secret_manager = [7; 32];
    /// let layer = IdempotencyLayer::new(MemoryStore::new()).downstream_secret(from_secret_manager);
    /// ```
    ///
    /// # Panics
    ///
    /// When shorter than 16 bytes.
    pub fn downstream_secret(mut self, secret: impl AsRef<[u8]>) -> Self {
        self.options().downstream = Some(DownstreamSecret::new(secret.as_ref()));
        self
    }

    /// What becomes of a request without a key where one is required, or with a malformed one. Default
    /// [`MissingKey::Refuse`].
    ///
    /// ```
    /// # use tower_idempotency::{IdempotencyLayer, MemoryStore, MissingKey};
    /// let layer = IdempotencyLayer::new(MemoryStore::new()).missing_key(MissingKey::Observe);
    /// ```
    pub fn missing_key(mut self, missing: MissingKey) -> Self {
        self.options().missing_key = missing;
        self
    }

    /// What a keyed request gets when the store cannot be asked. Default [`StoreFailure::Refuse`].
    ///
    /// ```
    /// # use tower_idempotency::{IdempotencyLayer, MemoryStore, StoreFailure};
    /// let layer = IdempotencyLayer::new(MemoryStore::new()).store_failure(StoreFailure::RunUnprotected);
    /// ```
    pub fn store_failure(mut self, failure: StoreFailure) -> Self {
        self.options().store_failure = failure;
        self
    }

    /// How long to wait for the store, before a run and after it. Default 5 s. It ends the waiting, not
    /// the statement; an outcome that is not recorded by then is answered and recorded in the background.
    ///
    /// # Panics
    ///
    /// When zero.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tower_idempotency::{IdempotencyLayer, MemoryStore};
    /// let layer = IdempotencyLayer::new(MemoryStore::new()).store_timeout(Duration::from_secs(2));
    /// ```
    pub fn store_timeout(mut self, timeout: Duration) -> Self {
        assert!(!timeout.is_zero(), "store_timeout must be longer than zero");
        self.options().store_timeout = timeout;
        self
    }

    /// How often the records of the store are counted for the gauge `idempotency_records`. Default 60 s.
    ///
    /// In SQL a count reads the whole table. So after one there is none for nine times as long as it took,
    /// whatever is set here, and none at all before the first keyed request or running reconciler, or without a
    /// recorder (a type without a size is taken for none here). `Duration::MAX`: never. Clones of a layer count once between
    /// them, as often as the shortest of their intervals says; of several layers on one store, and of several
    /// instances of a service, it is enough when one counts.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tower_idempotency::{IdempotencyLayer, MemoryStore};
    /// let layer = IdempotencyLayer::new(MemoryStore::new())
    ///     .count_records_every(Duration::from_secs(600));
    /// ```
    ///
    /// # Panics
    ///
    /// When zero.
    #[cfg(feature = "metrics")]
    pub fn count_records_every(mut self, interval: Duration) -> Self {
        assert!(
            !interval.is_zero(),
            "count_records_every must be longer than zero"
        );
        self.options().count_records_every = interval;
        self
    }

    /// How many bytes a keyed request's body may have. Default 1 MiB; beyond it 413.
    ///
    /// ```
    /// # use tower_idempotency::{IdempotencyLayer, MemoryStore};
    /// let layer = IdempotencyLayer::new(MemoryStore::new()).request_body_limit(64 * 1024);
    /// ```
    pub fn request_body_limit(mut self, bytes: usize) -> Self {
        self.options().request_body_limit = bytes;
        self
    }

    /// How many bytes of a response are kept. Default 1 MiB. A longer one reaches its caller whole, and
    /// its record is a tombstone.
    ///
    /// ```
    /// # use tower_idempotency::{IdempotencyLayer, MemoryStore};
    /// let layer = IdempotencyLayer::new(MemoryStore::new()).response_body_limit(256 * 1024);
    /// ```
    pub fn response_body_limit(mut self, bytes: usize) -> Self {
        self.options().response_body_limit = bytes;
        self
    }

    /// How long a response's body may take after its head and still be kept. Default 1 s; after that it
    /// is a stream, and its record a tombstone.
    ///
    /// # Panics
    ///
    /// When zero.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tower_idempotency::{IdempotencyLayer, MemoryStore};
    /// let layer = IdempotencyLayer::new(MemoryStore::new()).buffer_timeout(Duration::from_secs(5));
    /// ```
    pub fn buffer_timeout(mut self, timeout: Duration) -> Self {
        assert!(
            !timeout.is_zero(),
            "buffer_timeout must be longer than zero"
        );
        self.options().buffer_timeout = timeout;
        self
    }

    /// Which further response headers are not kept, beside those that are not anyway: Date,
    /// Set-Cookie, WWW-Authenticate, Proxy-Authenticate, Authentication-Info,
    /// Proxy-Authentication-Info, Access-Control-*, hop-by-hop and framing headers, the marker,
    /// `Idempotency-Status`, and what [`replay_provenance`](Self::replay_provenance) tells.
    ///
    /// ```
    /// # use axum::http;
    /// # use tower_idempotency::{IdempotencyLayer, MemoryStore};
    /// let layer = IdempotencyLayer::new(MemoryStore::new())
    ///     .also_skip_headers([http::header::SERVER]);
    /// ```
    pub fn also_skip_headers(mut self, names: impl IntoIterator<Item = HeaderName>) -> Self {
        self.options().skip_headers.add(names);
        self
    }

    /// Which response headers are not kept, **in place of** the list above: what is not named is
    /// kept and replayed, cookies, credentials and CORS headers included. Hop-by-hop and framing
    /// headers, the marker and its kin are never kept.
    ///
    /// ```
    /// # use axum::http;
    /// # use tower_idempotency::{IdempotencyLayer, MemoryStore};
    /// // This service sets no cookies and is asked by no browser.
    /// let layer = IdempotencyLayer::new(MemoryStore::new()).skip_headers([http::header::DATE]);
    /// ```
    pub fn skip_headers(mut self, names: impl IntoIterator<Item = HeaderName>) -> Self {
        self.options().skip_headers = SkippedHeaders::only(names);
        self
    }

    /// The name of the header that marks a replay, with the value `true`. Default `Idempotent-Replay`.
    ///
    /// ```
    /// # use axum::http;
    /// # use tower_idempotency::{IdempotencyLayer, MemoryStore};
    /// let layer = IdempotencyLayer::new(MemoryStore::new()).replay_header(http::HeaderName::from_static("idempotent-replayed"));
    /// ```
    pub fn replay_header(mut self, name: HeaderName) -> Self {
        self.options().replay_header = name;
        self
    }

    /// Replays say where they come from, each field where it is known. Default: they do not.
    ///
    /// | field | value |
    /// | --- | --- |
    /// | `Idempotency-Original-Date` | when the first answer was recorded, as an HTTP date |
    /// | `Idempotency-Original-Request-Id` | the id of the request that ran first |
    /// | `Idempotency-Key-Expires` | until when the key is remembered, as an HTTP date |
    ///
    /// ```
    /// # use tower_idempotency::{IdempotencyLayer, MemoryStore};
    /// let layer = IdempotencyLayer::new(MemoryStore::new()).replay_provenance();
    /// ```
    pub fn replay_provenance(mut self) -> Self {
        self.options().replay_provenance = true;
        self
    }

    /// Replays go out with `Cache-Control: no-store` in place of what the first answer said to caches
    /// (`CDN-Cache-Control` and its like, RFC 9213, are left out). Default: they carry what the first
    /// answer said, verbatim.
    ///
    /// Answers to POST are cached only where they allow it themselves (RFC 9111 §3), so this is for services
    /// whose handlers do, or that trust no proxy.
    ///
    /// ```
    /// # use tower_idempotency::{IdempotencyLayer, MemoryStore};
    /// let layer = IdempotencyLayer::new(MemoryStore::new()).no_store_replays();
    /// ```
    pub fn no_store_replays(mut self) -> Self {
        self.options().no_store_replays = true;
        self
    }

    /// Every answer to a keyed or refused request tells in `Idempotency-Status` what was done, as
    /// [`IdempotencyStatus::as_str`](crate::IdempotencyStatus::as_str) has it. Default: only that a run was
    /// not protected is told.
    ///
    /// ```
    /// # use tower_idempotency::{IdempotencyLayer, MemoryStore};
    /// let layer = IdempotencyLayer::new(MemoryStore::new()).status_header();
    /// ```
    pub fn status_header(mut self) -> Self {
        self.options().status_header = true;
        self
    }

    /// The status of `idempotency_key_reused`. Default 409.
    ///
    /// # Panics
    ///
    /// When it is no 4xx.
    ///
    /// ```
    /// # use axum::http;
    /// # use tower_idempotency::{IdempotencyLayer, MemoryStore};
    /// let layer = IdempotencyLayer::new(MemoryStore::new()).reuse_status(http::StatusCode::UNPROCESSABLE_ENTITY);
    /// ```
    pub fn reuse_status(mut self, status: StatusCode) -> Self {
        assert!(
            status.is_client_error(),
            "reuse_status must be a 4xx status"
        );
        self.options().reuse_status = status;
        self
    }

    /// Whom the layer's own answers are for. Default [`Audience::Clients`].
    ///
    /// ```
    /// # use tower_idempotency::{Audience, IdempotencyLayer, MemoryStore};
    /// let layer = IdempotencyLayer::new(MemoryStore::new()).audience(Audience::Senders);
    /// ```
    pub fn audience(mut self, audience: Audience) -> Self {
        self.options().audience = audience;
        self
    }

    /// How refusals are rendered. Default [`ProblemJson`](crate::ProblemJson).
    ///
    /// ```
    /// # use axum::{body::Body, http::Response};
    /// # use tower_idempotency::{IdempotencyLayer, MemoryStore, Rejection, RejectionContext};
    /// let layer = IdempotencyLayer::new(MemoryStore::new()).rejections(
    ///     |rejection: &Rejection, context: &RejectionContext<'_>| {
    ///         let mut response = Response::new(Body::from(rejection.code()));
    ///         *response.status_mut() = context.status;
    ///         response
    ///     },
    /// );
    /// ```
    pub fn rejections(mut self, render: impl RenderRejection) -> Self {
        self.options().rejections = Arc::new(render);
        self
    }

    /// Where the service documents its idempotency: the base of each problem's `type`, and a
    /// `Link: <…>; rel="describedby"` on each refusal. Default: this crate's documentation, and no link.
    ///
    /// # Panics
    ///
    /// When it is neither a URL nor an absolute path, or has a fragment: the codes are its fragments.
    ///
    /// ```
    /// # use tower_idempotency::{IdempotencyLayer, MemoryStore};
    /// let layer = IdempotencyLayer::new(MemoryStore::new()).documentation_url("https://pay.example/docs/idempotency");
    /// ```
    pub fn documentation_url(mut self, url: &str) -> Self {
        let found = url.parse::<Uri>();
        assert!(
            found.is_ok_and(|uri| uri.scheme().is_some() || url.starts_with('/'))
                && !url.contains('#'),
            "documentation_url must be a URL or an absolute path, without a fragment"
        );
        self.options().documentation_url = Some(Arc::from(url));
        self
    }

    /// The header with the request's id, kept with the claim and named to those who reuse its key.
    /// Default `X-Request-Id`; ids of more than 128 bytes are not kept.
    ///
    /// An id that is the key itself, decoded or as it was sent, is not kept either, nor is any where both come
    /// from one header: the store may know the key by a hash only.
    ///
    /// ```
    /// # use axum::http;
    /// # use tower_idempotency::{IdempotencyLayer, MemoryStore};
    /// let layer = IdempotencyLayer::new(MemoryStore::new()).request_id_header(http::HeaderName::from_static("x-correlation-id"));
    /// ```
    pub fn request_id_header(mut self, name: HeaderName) -> Self {
        self.options().request_id_header = name;
        self
    }
}

#[cfg(any(feature = "sqlite", feature = "postgres"))]
impl<S: TransactionalStore> IdempotencyLayer<S> {
    /// Has the effect of a handler and the record of its answer committed together: handlers write through
    /// [`Tx`](crate::Tx), and a crash at any instant leaves both or neither. A retry after a crash is then
    /// run without asking anybody. Default: the record is written by itself, after the handler.
    ///
    /// All effects of all handlers must go through `Tx`; see [`transactions`](crate::transactions).
    ///
    /// ```
    /// # #[cfg(feature = "sqlite")]
    /// # fn example(store: tower_idempotency::SqliteStore) {
    /// # use tower_idempotency::IdempotencyLayer;
    /// let layer = IdempotencyLayer::new(store).transactional();
    /// # }
    /// ```
    pub fn transactional(self) -> Self {
        self.transactional_with(TxOptions::default())
    }

    /// As [`transactional`](Self::transactional), with other limits or another isolation level.
    ///
    /// ```
    /// # #[cfg(feature = "postgres")]
    /// # fn example(store: tower_idempotency::PostgresStore) {
    /// # use tower_idempotency::{IdempotencyLayer, Isolation, TxOptions};
    /// let options = TxOptions::default().isolation(Isolation::ReadCommitted);
    /// let layer = IdempotencyLayer::new(store).transactional_with(options);
    /// # }
    /// ```
    pub fn transactional_with(mut self, options: TxOptions) -> Self {
        let transactor = crate::store::transactor(&self.store, options);
        self.options().transactor = Some(transactor);
        self
    }
}

/// The safe methods, and CONNECT, are never covered.
fn coverable(option: &str, methods: impl IntoIterator<Item = Method>) -> Vec<Method> {
    let methods: Vec<_> = methods.into_iter().collect();
    for method in &methods {
        assert!(
            !method.is_safe() && *method != Method::CONNECT,
            "{option}: {method} requests always pass through and cannot be covered"
        );
    }
    methods
}

fn check_scheme(option: &str, scheme: &impl FingerprintScheme) {
    let name = scheme.name();
    assert!(
        name.len() <= 64,
        "{option}: the scheme's name must have at most 64 bytes"
    );
    // Some databases keep no text with a NUL in it.
    assert!(
        !name.contains(char::is_control),
        "{option}: the scheme's name must have no control characters"
    );
}

impl<I, S: Inspect + Checkpoints> Layer<I> for IdempotencyLayer<S> {
    type Service = IdempotencyService<I, S>;

    fn layer(&self, inner: I) -> Self::Service {
        self.options.check();
        IdempotencyService::new(inner, Arc::new(self.engine()))
    }
}

impl<S> fmt::Debug for IdempotencyLayer<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdempotencyLayer")
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}

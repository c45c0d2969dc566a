//! The layer.

use std::{sync::Arc, time::Duration};

use axum::BoxError;
use bytes::Bytes;
use http::{HeaderName, Method, request::Parts};
use tower_layer::Layer;

use super::{Attempt, Retry, judgement::SETTLED, pause::BackOff, retry_options::RetryOptions};
use crate::IdempotencyKey;

/// Makes a client send its requests with an idempotency key, and send them again with the same key.
///
/// The [module](super) says what is sent again, how long it waits, and how it ends.
///
/// ```
/// use std::time::Duration;
/// use tower_idempotency::client::RetryLayer;
///
/// let layer = RetryLayer::new()
///     .quoted()
///     .retries(8)
///     .attempt_timeout(Duration::from_secs(5))
///     .total_timeout(Duration::from_secs(120));
/// # let _ = layer;
/// ```
#[derive(Debug, Clone, Default)]
#[must_use = "a layer does nothing until a client is wrapped in it"]
pub struct RetryLayer {
    options: Arc<RetryOptions>,
}

impl RetryLayer {
    /// A layer with the default options.
    pub fn new() -> Self {
        Self::default()
    }

    fn options(&mut self) -> &mut RetryOptions {
        Arc::make_mut(&mut self.options)
    }

    /// Which methods get a key and further attempts. Default POST and PATCH. All others pass through untouched:
    /// no key, one attempt, no limit, and [`Unanswered::Uncovered`](super::Unanswered::Uncovered) if it fails. An
    /// [`IdempotencyKey`] in the extensions of such a request is not written into its header: name PUT and DELETE
    /// here, if the server heeds keys there.
    ///
    /// # Panics
    ///
    /// When one of them is safe (GET, HEAD, OPTIONS, TRACE) or CONNECT, since servers do not heed keys there, or
    /// when there is none.
    ///
    /// ```
    /// # use axum::http;
    /// # use tower_idempotency::client::RetryLayer;
    /// let layer = RetryLayer::new().methods([http::Method::POST, http::Method::PATCH, http::Method::DELETE]);
    /// # let _ = layer;
    /// ```
    pub fn methods(mut self, methods: impl IntoIterator<Item = Method>) -> Self {
        let methods: Vec<_> = methods.into_iter().collect();
        assert!(!methods.is_empty(), "methods must name at least one method");
        for method in &methods {
            assert!(
                !method.is_safe() && *method != Method::CONNECT,
                "methods: {method} requests always pass through and cannot be covered"
            );
        }
        self.options().methods = methods;
        self
    }

    /// The header the key stands in. Default `Idempotency-Key`.
    ///
    /// ```
    /// # use axum::http;
    /// # use tower_idempotency::client::RetryLayer;
    /// let layer = RetryLayer::new().header_name(http::HeaderName::from_static("x-idempotency-key"));
    /// # let _ = layer;
    /// ```
    pub fn header_name(mut self, name: HeaderName) -> Self {
        self.options().keys.header_name = name;
        self
    }

    /// Keys are written as RFC 9651 strings (`"order-17"`), as draft-ietf-httpapi-idempotency-key-header-07 §2.1
    /// asks. Default: bare (`order-17`), which most services in use want. A server of this crate takes both, and
    /// knows them as one key. A header that a request has already is sent as it is written.
    ///
    /// ```
    /// # use tower_idempotency::client::RetryLayer;
    /// let layer = RetryLayer::new().quoted();
    /// # let _ = layer;
    /// ```
    pub fn quoted(mut self) -> Self {
        self.options().keys.is_quoted = true;
        self
    }

    /// Makes the key of a request that has none, in its header or as an [`IdempotencyKey`] in its extensions. It is
    /// asked once per request, with the whole body. Default, and where it answers `None`: a fresh UUID (version 4).
    ///
    /// A key made here must come from what the action is, and be another one when the action is meant again:
    /// [`derived_key`](super::derived_key) says how.
    ///
    /// ```
    /// # use tower_idempotency::{IdempotencyKey, client::RetryLayer};
    /// let layer = RetryLayer::new().keys(|head, _body| {
    ///     head.headers.get("order-number").map(|number| IdempotencyKey::new(number.as_bytes()))
    /// });
    /// # let _ = layer;
    /// ```
    pub fn keys(
        mut self,
        derive: impl Fn(&Parts, &Bytes) -> Option<IdempotencyKey> + Send + Sync + 'static,
    ) -> Self {
        self.options().keys.derive = Some(Arc::new(derive));
        self
    }

    /// How many attempts may follow the first one. Default 5. Zero sends each request once, with a key.
    ///
    /// ```
    /// # use tower_idempotency::client::RetryLayer;
    /// let layer = RetryLayer::new().retries(3);
    /// # let _ = layer;
    /// ```
    pub fn retries(mut self, retries: u32) -> Self {
        self.options().retries = retries;
        self
    }

    /// How long is waited after a failure where the server does not say: anything between zero and a bound, each as
    /// likely as another, so that clients that failed together do not come back together. The bound is `base`,
    /// doubled with every failure, up to `cap`. Default 0.5 s and 8 s, which makes 0.5, 1, 2, 4, 8 s.
    ///
    /// # Panics
    ///
    /// When `base` is zero, or longer than `cap`.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tower_idempotency::client::RetryLayer;
    /// let layer = RetryLayer::new().back_off(Duration::from_millis(100), Duration::from_secs(2));
    /// # let _ = layer;
    /// ```
    pub fn back_off(mut self, base: Duration, cap: Duration) -> Self {
        assert!(!base.is_zero(), "back_off: base must be longer than zero");
        assert!(base <= cap, "back_off: base must not be longer than cap");
        self.options().back_off = BackOff { base, cap };
        self
    }

    /// How long one attempt may take: until the client is ready, and from there to the end of the answer's body, as
    /// far as that is [read](Self::response_body_limit). Default 10 s. Give it more than the service's slowest answer, or slow
    /// requests are only ever answered by what was recorded.
    ///
    /// # Panics
    ///
    /// When zero.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tower_idempotency::client::RetryLayer;
    /// let layer = RetryLayer::new().attempt_timeout(Duration::from_secs(30));
    /// # let _ = layer;
    /// ```
    pub fn attempt_timeout(mut self, timeout: Duration) -> Self {
        assert!(
            !timeout.is_zero(),
            "attempt_timeout must be longer than zero"
        );
        self.options().attempt_timeout = timeout;
        self
    }

    /// How long all of it may take, from reading the request's body on, waits included. Default 90 s. A wait that
    /// would end after it is not begun, and the last attempt gets what is left. What is handed on of an answer as it
    /// comes ([`response_body_limit`](Self::response_body_limit)) may take longer. Must be shorter than the server keeps its keys, which is a day or more as
    /// a rule: after that the same key is a new one.
    ///
    /// # Panics
    ///
    /// When zero.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tower_idempotency::client::RetryLayer;
    /// let layer = RetryLayer::new().total_timeout(Duration::from_secs(20));
    /// # let _ = layer;
    /// ```
    pub fn total_timeout(mut self, timeout: Duration) -> Self {
        assert!(!timeout.is_zero(), "total_timeout must be longer than zero");
        self.options().total_timeout = timeout;
        self
    }

    /// How many bytes a covered request's body may have, which is kept for all attempts. Default 16 MiB; beyond it
    /// [`NotSent`](super::NotSent).
    ///
    /// ```
    /// # use tower_idempotency::client::RetryLayer;
    /// let layer = RetryLayer::new().request_body_limit(1024 * 1024);
    /// # let _ = layer;
    /// ```
    pub fn request_body_limit(mut self, bytes: usize) -> Self {
        self.options().request_body_limit = bytes;
        self
    }

    /// How many bytes of an answer's body are read within the attempt, so that one that breaks off is asked for
    /// again. Default 1 MiB. A larger one is handed on as it comes, and so are streams, which are known by their
    /// type: `text/event-stream`, gRPC, `multipart/x-mixed-replace`. If such a body breaks off, it is the caller's to
    /// send the request again, with the same key; and no time-out of this layer bounds it.
    ///
    /// A stream of another type that comes slowly, such as lines of JSON, must be over within the attempt, or it is
    /// sent again. With zero no body is waited for, and all answers are handed on as they come. But of errors 64 KiB
    /// are read in any case, since they tell what is to be done.
    ///
    /// ```
    /// # use tower_idempotency::client::RetryLayer;
    /// let layer = RetryLayer::new().response_body_limit(64 * 1024);
    /// # let _ = layer;
    /// ```
    pub fn response_body_limit(mut self, bytes: usize) -> Self {
        self.options().response_body_limit = bytes;
        self
    }

    /// A further header that marks a replay when it says `true`, beside `Idempotent-Replay` and
    /// `Idempotent-Replayed`.
    ///
    /// ```
    /// # use axum::http;
    /// # use tower_idempotency::client::RetryLayer;
    /// let layer = RetryLayer::new().replay_header(http::HeaderName::from_static("x-replayed"));
    /// # let _ = layer;
    /// ```
    pub fn replay_header(mut self, name: HeaderName) -> Self {
        self.options().judge.replay_header = Some(name);
        self
    }

    /// Takes a 409 without any code to mean that another attempt is still running, as
    /// draft-ietf-httpapi-idempotency-key-header-07 §2.7 has it. Default: that is an answer, since many services say
    /// 409 to what they will never do.
    ///
    /// ```
    /// # use tower_idempotency::client::RetryLayer;
    /// let layer = RetryLayer::new().retry_bare_conflict();
    /// # let _ = layer;
    /// ```
    pub fn retry_bare_conflict(mut self) -> Self {
        self.options().judge.retry_bare_conflict = true;
        self
    }

    /// Further codes that mean that another attempt is still running, besides `idempotency_in_flight`. Read from the
    /// same places, in answers of 4xx and 5xx; a number is written in its digits. Default none. For Stripe:
    ///
    /// ```
    /// # use tower_idempotency::client::RetryLayer;
    /// let layer = RetryLayer::new().also_in_flight(["idempotency_key_in_use"]);
    /// # let _ = layer;
    /// ```
    ///
    /// # Panics
    ///
    /// When one of them is blank, or is a code by which an operation ends (`idempotency_key_reused`,
    /// `idempotency_outcome_unknown`, `idempotency_response_not_retained`).
    pub fn also_in_flight<C: Into<String>>(mut self, codes: impl IntoIterator<Item = C>) -> Self {
        let codes: Vec<String> = codes.into_iter().map(Into::into).collect();
        for code in &codes {
            assert!(
                !code.trim().is_empty(),
                "also_in_flight: a code must not be blank"
            );
            assert!(
                !SETTLED.contains(&code.as_str()),
                "also_in_flight: {code} ends an operation"
            );
        }
        self.options().judge.also_in_flight = codes;
        self
    }

    /// Called before every attempt, once the client is ready, for what must be new in each one: nonces, dates,
    /// signatures. It gets a fresh copy of the head, with the key in it, and the body. Whatever it does, the key's
    /// header is afterwards as it was. An error ends the operation, as the last attempt before it ended if there was
    /// one.
    ///
    /// Write them into headers. The URI belongs to what a server compares, so that with a nonce or a signature in the
    /// query each attempt is another request, and [`Reused`](super::Unanswered::Reused).
    ///
    /// Whoever has to wait for a signature does that in a layer inside of this one: the [`Attempt`] stands in the
    /// extensions of every request that comes there.
    ///
    /// ```
    /// # use tower_idempotency::client::RetryLayer;
    /// let layer = RetryLayer::new().before_attempt(|head, _body, attempt| {
    ///     head.headers.insert("x-attempt", attempt.number.into());
    ///     Ok(())
    /// });
    /// # let _ = layer;
    /// ```
    pub fn before_attempt(
        mut self,
        hook: impl Fn(&mut Parts, &Bytes, &Attempt) -> Result<(), BoxError> + Send + Sync + 'static,
    ) -> Self {
        self.options().before_attempt = Some(Arc::new(hook));
        self
    }
}

impl<S> Layer<S> for RetryLayer {
    type Service = Retry<S>;

    fn layer(&self, inner: S) -> Retry<S> {
        Retry {
            inner,
            options: self.options.clone(),
        }
    }
}

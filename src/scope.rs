//! Whose key it is.

use std::{fmt, sync::Arc};

/// The most bytes a scope may have; a longer one is refused as unknown.
pub const MAX_SCOPE_LEN: usize = 255;

/// Whose key it is: tenant, merchant, account.
///
/// Two callers that happen to choose one key must never meet in one record, so a record is named
/// by scope *and* key, two byte strings that are never joined.
///
/// Any bytes, at most 255; a longer scope is refused as unknown. `Debug` shows the length only.
///
/// # What to scope by
///
/// By the subject that was authenticated: the account, the merchant, the tenant; whatever stays the same
/// when the same caller comes back. Take it from where authentication has put it, which therefore belongs
/// outside of the layer:
///
/// ```
/// use axum::{Router, body::Body, http::Request, routing::post};
/// use tower::ServiceExt;
/// use tower_idempotency::{IdempotencyLayer, IdempotentResponse, MemoryStore, Scope};
///
/// #[derive(Clone)]
/// struct Merchant {
///     id: u64,
/// }
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// let layer = IdempotencyLayer::new(MemoryStore::new())
///     .scope(|head| head.extensions.get::<Merchant>().map(|m| Scope::new(m.id.to_be_bytes())));
/// let app: Router = Router::new().route("/payments", post(|| async { "paid" })).route_layer(layer);
/// let pay = |merchant: Option<u64>, token: &str| {
///     let mut request = Request::post("/payments")
///         .header("idempotency-key", "order-17")
///         .header("authorization", token)
///         .body(Body::empty())
///         .unwrap();
///     // This is what the authentication does.
///     if let Some(id) = merchant {
///         request.extensions_mut().insert(Merchant { id });
///     }
///     app.clone().oneshot(request)
/// };
///
/// assert!(!pay(Some(1), "Bearer monday").await.unwrap().is_replay());
/// // The token has rotated, the merchant is the same.
/// assert!(pay(Some(1), "Bearer tuesday").await.unwrap().is_replay());
/// // Another merchant may use the same key.
/// assert!(!pay(Some(2), "Bearer monday").await.unwrap().is_replay());
/// // Nobody knows who this is.
/// assert_eq!(pay(None, "Bearer nobody").await.unwrap().status(), 403);
/// # }
/// ```
///
/// Not by what changes between an attempt and its retry, because the retry would run again:
///
/// - a bearer token, a session id or an API key that rotates. (An API key that is one caller's for good
///   names a subject all the same; use the id of the key, since what is stored here is no place for secrets.)
/// - the IP address, which changes with the network, and is shared behind a proxy
/// - the user agent, or anything else that a new version of the client changes
///
/// And not by what the caller may choose freely, such as a header nobody has checked: that is how one caller
/// gets the answers of another.
///
/// # Narrower and wider
///
/// The default fingerprint refuses a key that comes back on another path. Where one key is meant to work once
/// *per route*, make the route part of the scope; put something between the parts that neither can contain,
/// or a fixed length in front:
///
/// ```
/// use tower_idempotency::Scope;
///
/// fn per_route(merchant: u64, route: &str) -> Scope {
///     Scope::new([&merchant.to_be_bytes(), route.as_bytes()].concat())
/// }
///
/// assert_ne!(per_route(7, "/payments"), per_route(7, "/refunds"));
/// assert_ne!(per_route(7, "/payments"), per_route(8, "/payments"));
/// assert!(per_route(7, "/payments").as_bytes().len() <= tower_idempotency::MAX_SCOPE_LEN);
/// ```
///
/// Where several services share a store, put the service's name in front in the same way, unless they are
/// to share their keys. Where a subject id may be longer than 255 bytes, use a digest of it.
///
/// Requests without an account (a sign-up, a webhook) may share a scope of their own, if the callers do not
/// mind each other: answer `Some(Scope::new("anonymous"))` instead of `None`. Their keys must then be
/// unguessable, since whoever knows one gets its answer.
///
/// [`scope_limit`](crate::IdempotencyLayer::scope_limit) bounds how many records a scope may have. Abandoned
/// ones count, and never expire unless [`abandoned_ttl`](crate::IdempotencyLayer::abandoned_ttl) is set: without
/// it list them with [`Inspect::abandoned`](crate::store::Inspect::abandoned), look each effect up, and
/// [`forget`](crate::store::Inspect::forget) it.
///
/// # Changing it
///
/// A record is found by the scope it was written under. When scopes are made in another way, from a deploy
/// on, the keys that live then are not found any more: **their retries run again.** So change it only while
/// no client retries, or at a moment from which clients use new keys, and wait for
/// [`ttl`](crate::IdempotencyLayer::ttl) to pass before you rely on the old keys being gone. The same goes for
/// setting a scope where there was none, which had put everything under [`Scope::shared`]. While old and new
/// instances run side by side, a key that meets both runs twice.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Scope(Option<Arc<[u8]>>);

impl Scope {
    /// A scope made of exactly these bytes.
    pub fn new(bytes: impl AsRef<[u8]>) -> Self {
        let bytes = bytes.as_ref();
        // One spelling for the empty scope, and the one that costs nothing.
        Self((!bytes.is_empty()).then(|| Arc::from(bytes)))
    }

    /// The one namespace everybody shares where no scope is configured: the empty scope.
    pub fn shared() -> Self {
        Self::default()
    }

    /// The bytes.
    pub fn as_bytes(&self) -> &[u8] {
        self.0.as_deref().unwrap_or_default()
    }
}

impl fmt::Debug for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Scope({} bytes)", self.as_bytes().len())
    }
}

//! What an attempt is told, and what stands in the extensions of an answer.

use crate::IdempotencyKey;

/// An attempt that is about to be made: what the hook of
/// [`before_attempt`](super::RetryLayer::before_attempt) sees, and an extension of every covered request that
/// is sent. (Others, such as a GET, have none.)
///
/// A layer inside of the retry layer, which every attempt goes through, can so do what takes time: here it fetches a
/// signature.
///
/// ```
/// use axum::{body::Body, http::{HeaderValue, Request, Response}};
/// use tower::{ServiceBuilder, ServiceExt, service_fn};
/// use tower_idempotency::client::{Attempt, RetryLayer};
///
/// async fn signature_of(attempt: &Attempt) -> HeaderValue {
///     // A signing service is asked here.
///     # tokio::task::yield_now().await;
///     HeaderValue::from(attempt.number)
/// }
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// let client = service_fn(async |mut request: Request<Body>| {
///     let attempt = request.extensions().get::<Attempt>().cloned();
///     if let Some(attempt) = attempt {
///         request.headers_mut().insert("signature", signature_of(&attempt).await);
///     }
///     // Then the client that sends it.
///     assert_eq!(request.headers()["signature"], "1");
///     Ok::<_, std::io::Error>(Response::new(Body::from("ch_1")))
/// });
/// let client = ServiceBuilder::new().layer(RetryLayer::new()).service(client);
/// let charge = Request::post("http://pay.example/charges").body(Body::from("250 baht"));
/// client.oneshot(charge.unwrap()).await.unwrap();
/// # }
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Attempt {
    /// The first is 1.
    pub number: u32,
    /// The key, the same in every attempt.
    pub key: IdempotencyKey,
}

/// What it took to get an answer: an extension of every response that [`Retry`](super::Retry) gives to a
/// covered request.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Answered {
    /// The key that every attempt had.
    pub key: IdempotencyKey,
    /// How many attempts were made, this one included.
    pub attempts: u32,
    /// Whether the server says that this is the recorded answer of an earlier run (`Idempotent-Replay` or
    /// `Idempotent-Replayed`).
    pub replayed: bool,
}

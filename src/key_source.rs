//! Requests whose key is a member of their body, which has to be read before anything is known of them.

use std::sync::Arc;

use axum::body::Body;
use bytes::Bytes;
use http::{Request, Response, request::Parts};
use tower_service::Service;

use crate::{
    IdempotencyKey, IdempotencyService, KeyFormat, MissingKey, Rejection,
    attempt::Attempt,
    body::{Buffered, read_request},
    engine::Engine,
    execution::Inner,
    fingerprint::{Named, Pointer},
    observe::{self, Observed},
    response_future::ResponseFuture,
    service::keyed,
    store::{Checkpoints, Inspect},
};

/// The key as it stands in the body, where that is not what it says: no id may show it either.
#[derive(Clone)]
pub(crate) struct Written(pub(crate) Bytes);

/// A key that was found, and its spelling.
struct Found {
    key: IdempotencyKey,
    written: Bytes,
}

/// Looks the key up in a body. `None` means that there is no such member.
fn read(pointer: &Pointer, format: &KeyFormat, body: &Bytes) -> Result<Option<Found>, Rejection> {
    let named = pointer.find(body).map_err(Rejection::BodyInvalid)?;
    let written = match &named {
        Named::Nothing => return Ok(None),
        Named::Text(written, _) | Named::Integer(written) => body.slice_ref(written.as_bytes()),
        Named::Other => Bytes::new(),
    };
    match format.read_member(&named) {
        Ok(key) => Ok(Some(Found { key, written })),
        Err(why) => Err(Rejection::KeyInvalid(why)),
    }
}

/// A request, from its head to its answer. Dropped while its body is read, it leaves nothing behind; later it
/// is the keyed request in it that counts.
pub(crate) async fn by_member<I, RB, B, S>(
    engine: Arc<Engine<S>>,
    pointer: Arc<Pointer>,
    inner: I,
    mut head: Box<Parts>,
    body: B,
) -> Result<Response<Body>, I::Error>
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
    let options = engine.options.clone();
    let body = match read_request(body, options.request_body_limit).await {
        Ok(body) => body,
        Err(rejection) => {
            let observed = Observed::unkeyed(&options, &head.headers, &rejection);
            return Ok(options.refuse(Some(&head), &rejection, &observed));
        }
    };
    let rejection = match read(&pointer, &options.key_format, &body.data) {
        Ok(Some(found)) => {
            let observed = Observed::by_member(&options, &head.headers, &found.key, &found.written);
            if found.written != found.key.as_bytes() {
                head.extensions.insert(Written(found.written));
            }
            let (span, attempt) = (observed.span(), Attempt::new(engine.clone(), observed));
            let attempt = Arc::new(attempt);
            let (inner, body) = (Inner::readied(inner), body.into_body());
            let run = keyed(engine, inner, head, body, found.key, attempt.clone());
            let answer: ResponseFuture<I::Future, I::Error> =
                ResponseFuture::keyed(Box::pin(run), attempt, span);
            return answer.await;
        }
        Ok(None) if !options.requires(&head.method) => {
            return IdempotencyService::new(inner, engine)
                .pass(whole(head, body))
                .await;
        }
        Ok(None) => Rejection::KeyRequired,
        Err(rejection) => rejection,
    };
    let is_of_key = matches!(rejection, Rejection::KeyRequired | Rejection::KeyInvalid(_));
    if is_of_key && options.missing_key == MissingKey::Observe {
        let mut request = whole(head, body);
        observe::unkeyed(&options, &mut request, &rejection);
        return IdempotencyService::new(inner, engine).pass(request).await;
    }
    let observed = Observed::unkeyed(&options, &head.headers, &rejection);
    Ok(options.refuse(Some(&head), &rejection, &observed))
}

/// The request as it came.
fn whole(head: Box<Parts>, body: Buffered) -> Request<Body> {
    Request::from_parts(*head, body.into_body())
}

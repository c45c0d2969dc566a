//! A name for each attempt.

use axum::{
    extract::Request,
    http::{HeaderName, HeaderValue},
    middleware::Next,
    response::Response,
};

pub const HEADER: HeaderName = HeaderName::from_static("x-request-id");

/// Gives the request an id, `req_` and 32 digits out of `0-9a-f`, and names it in the answer. One that the
/// client sends is thrown away: others are shown these ids, and support looks for them in the logs.
///
/// Outside the layer, so that a replay has an id of its own and not that of the first attempt.
pub async fn assign(mut request: Request, next: Next) -> Response {
    let id = format!("req_{:032x}", rand::random::<u128>());
    // Letters and digits are always a header's value.
    let Ok(id) = HeaderValue::try_from(id) else {
        return next.run(request).await;
    };
    request.headers_mut().insert(HEADER, id.clone());
    let mut response = next.run(request).await;
    response.headers_mut().insert(HEADER, id);
    response
}

//! What passes from a run to its caller beside the record.

use std::sync::{Arc, Mutex};

use axum::body::Body;
use http::{HeaderValue, Response, StatusCode, header};
use http_body_util::BodyExt;
use serde::{Serialize, de::DeserializeOwned};

use super::{Done, Failure, OnceError, UnreadableResult};
use crate::{IdempotencyStatus, Rejection, Retain, live::lock, observe};

/// What a run has left for the call that began it. Not all of that is recorded: no failure is, nor a result that
/// cannot be written.
pub(super) struct Left<T, E>(Arc<Mutex<Option<Ended<T, E>>>>);

type Ended<T, E> = Result<T, Failure<E>>;

impl<T, E> Default for Left<T, E> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<T, E> Clone for Left<T, E> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T: Serialize + DeserializeOwned, E> Left<T, E> {
    /// Leaves it, and makes an answer of it for the engine.
    pub(super) fn answering(&self, ended: Ended<T, E>) -> Response<Body> {
        let mut response = Response::new(Body::empty());
        match &ended {
            Ok(value) => match serde_json::to_vec(value) {
                Ok(json) => {
                    let json_type = HeaderValue::from_static("application/json");
                    response
                        .headers_mut()
                        .insert(header::CONTENT_TYPE, json_type);
                    *response.body_mut() = Body::from(json);
                }
                // It is done all the same.
                Err(_) => {
                    observe::result_unwritable();
                    response.extensions_mut().insert(Retain::Tombstone);
                }
            },
            // Like a rule by status, it knows nothing of an earlier run that was cut off.
            Err(Failure::NothingHappened(_)) => {
                *response.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
            }
            Err(Failure::Unknown(_)) => {
                *response.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
                response.extensions_mut().insert(Retain::Abandon);
            }
        }
        *lock(&self.0) = Some(ended);
        response
    }

    /// What the engine's answer means. It comes before what was left: that may have been rolled back, or be
    /// another's by now.
    pub(super) async fn told_by(self, response: Response<Body>) -> Result<Done<T>, OnceError<E>> {
        let (mut head, body) = response.into_parts();
        if let Some(rejection) = head.extensions.remove::<Rejection>() {
            return Err(OnceError::Refused(rejection));
        }
        if head.extensions.get() == Some(&IdempotencyStatus::Replayed) {
            // It is in memory, and ends well.
            let Ok(json) = body.collect().await else {
                return Err(OnceError::Refused(Rejection::StoreUnavailable));
            };
            let json = json.to_bytes();
            let value = serde_json::from_slice(&json);
            // A resolver has answered, and that is no result: whether it was done is for somebody to look up.
            if value.is_err() && !head.status.is_success() {
                return Err(OnceError::Refused(Rejection::ResponseNotRetained {
                    status: Some(head.status),
                    original_request_id: None,
                }));
            }
            let value = value
                .map_err(|error| OnceError::Unreadable(UnreadableResult::of(&json, &error)))?;
            let replayed = true;
            return Ok(Done { value, replayed });
        }
        match lock(&self.0).take() {
            Some(Ok(value)) => Ok(Done {
                value,
                replayed: false,
            }),
            Some(Err(failure)) => Err(OnceError::Failed(failure)),
            // Every run that is answered has left something, and what is not a run is one of the above.
            None => Err(OnceError::Refused(Rejection::OutcomeUnknown {
                original_request_id: None,
            })),
        }
    }
}

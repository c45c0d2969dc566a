//! A request that is kept in memory for all attempts.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use axum::BoxError;
use bytes::Bytes;
use http::{Request, request::Parts};
use http_body::{Body as HttpBody, Frame};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use pin_project_lite::pin_project;

use super::{NotSent, attempts::Source, key_source::KeySource};
use crate::IdempotencyKey;

/// Key, head and body of one operation.
pub(super) struct Kept {
    key: IdempotencyKey,
    head: Parts,
    body: Bytes,
}

impl Kept {
    /// Reads the body to its end, at most `limit` bytes, and chooses the key.
    pub(super) async fn read<B>(
        request: Request<B>,
        limit: usize,
        keys: &KeySource,
    ) -> Result<Self, NotSent>
    where
        B: HttpBody,
        B::Error: Into<BoxError>,
    {
        let (head, body) = request.into_parts();
        // What is known to be too long need not be read.
        if body.size_hint().lower() > limit as u64 {
            return Err(NotSent::new(TOO_LARGE));
        }
        let read = Limited::new(Breathing { body, frames: 0 }, limit);
        let read = read.collect().await;
        let read = read.map_err(|error| match error.is::<LengthLimitError>() {
            true => NotSent::new(TOO_LARGE),
            false => NotSent::new("the request's body could not be read").with_source(error),
        })?;
        // A body made of bytes cannot have them, and to leave them out would change the request.
        if read.trailers().is_some() {
            return Err(NotSent::new(
                "the request's body has trailers, which cannot be kept",
            ));
        }
        let body = read.to_bytes();
        let key = keys.choose(&head, &body)?;
        Ok(Self { key, head, body })
    }
}

const TOO_LARGE: &str = "the request's body is larger than request_body_limit";

impl Source for Kept {
    fn key(&self) -> &IdempotencyKey {
        &self.key
    }

    async fn request(&mut self, _: u32) -> Result<Request<Bytes>, NotSent> {
        Ok(Request::from_parts(self.head.clone(), self.body.clone()))
    }
}

pin_project! {
    /// A body that always has a further frame ready must not keep its thread for itself, nor outrun its time.
    struct Breathing<B> {
        #[pin]
        body: B,
        frames: u8,
    }
}

/// After so many frames the others have their turn.
const BREATH: u8 = 64;

impl<B: HttpBody> HttpBody for Breathing<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        let this = self.project();
        if *this.frames == BREATH {
            *this.frames = 0;
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        *this.frames += 1;
        this.body.poll_frame(cx)
    }
}

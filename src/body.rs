//! Buffering of bodies, and bodies put together again.

use std::{
    error::Error,
    future::poll_fn,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use axum::body::Body;
use bytes::{BufMut, Bytes, BytesMut};
use http::HeaderMap;
use http_body::{Body as HttpBody, Frame, SizeHint};

use crate::{Rejection, bounded::within};

type BoxError = Box<dyn Error + Send + Sync>;

/// A request's body, read to its end.
#[derive(Clone)]
pub(crate) struct Buffered {
    pub(crate) data: Bytes,
    pub(crate) trailers: Option<Box<HeaderMap>>,
}

/// Reads a request's body to its end, at most `limit` bytes, counted as they come.
pub(crate) async fn read_request<B>(body: B, limit: usize) -> Result<Buffered, Rejection>
where
    B: HttpBody<Data = Bytes> + Send,
    B::Error: Into<BoxError>,
{
    // What Content-Length already says need not be read to be refused.
    if body.size_hint().lower() > limit as u64 {
        return Err(Rejection::BodyTooLarge { limit: Some(limit) });
    }
    let mut body = std::pin::pin!(body);
    let mut gathered = Gathered::default();
    loop {
        match next_frame(body.as_mut()).await {
            None => break,
            Some(Err(error)) => return Err(read_error(error.into())),
            Some(Ok(frame)) => gathered.push(frame),
        }
        if gathered.len > limit {
            return Err(Rejection::BodyTooLarge { limit: Some(limit) });
        }
        gathered.breathe().await;
    }
    let (data, trailers) = gathered.finish();
    Ok(Buffered { data, trailers })
}

/// A limit set outside this layer shows as an error of the body; it means the same to the client.
fn read_error(error: BoxError) -> Rejection {
    let mut cause: Option<&(dyn Error + 'static)> = Some(&*error);
    while let Some(error) = cause {
        if error.is::<http_body_util::LengthLimitError>() {
            return Rejection::BodyTooLarge { limit: None };
        }
        cause = error.source();
    }
    Rejection::BodyIncomplete
}

impl Buffered {
    pub(crate) fn into_body(self) -> Body {
        match self.trailers {
            None => Body::from(self.data),
            Some(_) => Body::new(Rebuilt {
                data: Some(self.data).filter(|data| !data.is_empty()),
                rest: None,
                error: None,
                trailers: self.trailers,
            }),
        }
    }
}

/// What became of the attempt to hold a response's body in memory.
pub(crate) enum Captured {
    /// All of it is here; the body answers the first caller, trailers included.
    Whole(Bytes, Body),
    /// It is too large or too slow: the body still gives the first caller all there is.
    Not(Body),
    /// It broke off: the body gives the first caller what there is, and the failure.
    Broken(Body),
}

/// Holds a response's body in memory, if it is within `limit` bytes and ends within `patience`.
pub(crate) async fn capture_response(body: Body, limit: usize, patience: Duration) -> Captured {
    if body.size_hint().lower() > limit as u64 {
        return Captured::Not(body);
    }
    let mut body = body;
    let mut gathered = Gathered::default();
    let mut failure = None;
    let ended = within(patience, async {
        while let Some(frame) = next_frame(Pin::new(&mut body)).await {
            match frame {
                Ok(frame) => gathered.push(frame),
                Err(error) => {
                    failure = Some(error);
                    return false;
                }
            }
            if gathered.len > limit {
                return false;
            }
            gathered.breathe().await;
        }
        true
    })
    .await
    .unwrap_or(false);
    let (data, trailers) = gathered.finish();
    if ended {
        let buffered = Buffered {
            data: data.clone(),
            trailers,
        };
        return Captured::Whole(data, buffered.into_body());
    }
    let broken = failure.is_some();
    let body = Body::new(Rebuilt {
        data: Some(data).filter(|data| !data.is_empty()),
        rest: (!broken).then_some(body),
        error: failure,
        trailers,
    });
    match broken {
        true => Captured::Broken(body),
        false => Captured::Not(body),
    }
}

async fn next_frame<B: HttpBody>(
    mut body: Pin<&mut B>,
) -> Option<Result<Frame<B::Data>, B::Error>> {
    poll_fn(|cx| body.as_mut().poll_frame(cx)).await
}

/// Frames gathered into one piece; a single frame is not copied.
#[derive(Default)]
struct Gathered {
    len: usize,
    frames: usize,
    first: Bytes,
    more: BytesMut,
    trailers: Option<Box<HeaderMap>>,
}

impl Gathered {
    fn push(&mut self, frame: Frame<Bytes>) {
        match frame.into_data() {
            Ok(data) if self.len == 0 => {
                self.len = data.len();
                self.first = data;
            }
            Ok(data) => {
                if self.more.is_empty() {
                    self.more.put_slice(&self.first);
                }
                self.len += data.len();
                self.more.put_slice(&data);
            }
            Err(frame) => {
                if let Ok(trailers) = frame.into_trailers() {
                    self.trailers = Some(Box::new(trailers));
                }
            }
        }
    }

    /// A body that always has a further frame ready must not keep its thread for itself.
    async fn breathe(&mut self) {
        self.frames += 1;
        if self.frames.is_multiple_of(64) {
            tokio::task::yield_now().await;
        }
    }

    fn finish(self) -> (Bytes, Option<Box<HeaderMap>>) {
        let data = if self.more.is_empty() {
            self.first
        } else {
            self.more.freeze()
        };
        (data, self.trailers)
    }
}

/// A body put together again: what was gathered, then what is left of it.
struct Rebuilt {
    data: Option<Bytes>,
    rest: Option<Body>,
    error: Option<axum::Error>,
    trailers: Option<Box<HeaderMap>>,
}

impl HttpBody for Rebuilt {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if let Some(data) = self.data.take() {
            return Poll::Ready(Some(Ok(Frame::data(data))));
        }
        if let Some(rest) = &mut self.rest {
            let frame = ready!(Pin::new(rest).poll_frame(cx));
            if frame.is_some() {
                return Poll::Ready(frame);
            }
            self.rest = None;
        }
        if let Some(error) = self.error.take() {
            return Poll::Ready(Some(Err(error)));
        }
        Poll::Ready(
            self.trailers
                .take()
                .map(|trailers| Ok(Frame::trailers(*trailers))),
        )
    }

    fn is_end_stream(&self) -> bool {
        self.data.is_none()
            && self.error.is_none()
            && self.trailers.is_none()
            && self.rest.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        let gathered = self.data.as_ref().map_or(0, |data| data.len() as u64);
        // A body that ends in an error promised more than it gives: no length is claimed for it.
        let rest = match &self.rest {
            Some(rest) => rest.size_hint(),
            None if self.error.is_some() => SizeHint::default(),
            None => SizeHint::with_exact(0),
        };
        let mut hint = SizeHint::new();
        if let Some(upper) = rest.upper().and_then(|upper| upper.checked_add(gathered)) {
            hint.set_upper(upper);
        }
        hint.set_lower(rest.lower().saturating_add(gathered));
        hint
    }
}

//! Bodies that watch, come in pieces, or fail.

use std::{
    collections::VecDeque,
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
};

use axum::body::Body;
use bytes::Bytes;
use http::HeaderMap;
use http_body::{Body as HttpBody, Frame};
use http_body_util::channel::{Channel, Sender};

/// Frames that are ready at once, under no announced length, counted as they are taken.
pub struct Pieces {
    frames: VecDeque<io::Result<Frame<Bytes>>>,
    endless: Option<Bytes>,
    taken: Arc<AtomicUsize>,
}

impl Pieces {
    pub fn new<T: Into<Bytes>>(pieces: impl IntoIterator<Item = T>) -> Self {
        let frames = pieces
            .into_iter()
            .map(|piece| Ok(Frame::data(piece.into())));
        Self {
            frames: frames.collect(),
            endless: None,
            taken: Arc::default(),
        }
    }

    /// One piece after another, for ever.
    pub fn endless(piece: impl Into<Bytes>) -> Self {
        Self {
            frames: VecDeque::new(),
            endless: Some(piece.into()),
            taken: Arc::default(),
        }
    }

    /// Breaks off after the pieces.
    pub fn then_error(mut self) -> Self {
        let error = io::Error::other("the source of this body broke");
        self.frames.push_back(Err(error));
        self
    }

    pub fn then_trailers(mut self, trailers: HeaderMap) -> Self {
        self.frames.push_back(Ok(Frame::trailers(trailers)));
        self
    }

    /// How often a frame was asked for.
    pub fn taken(&self) -> Arc<AtomicUsize> {
        self.taken.clone()
    }

    pub fn body(self) -> Body {
        Body::new(self)
    }
}

impl HttpBody for Pieces {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        self.taken.fetch_add(1, Ordering::SeqCst);
        let next = self.frames.pop_front();
        let endless = self.endless.clone();
        Poll::Ready(next.or(endless.map(|piece| Ok(Frame::data(piece)))))
    }
}

/// A body that comes as the test sends it.
pub fn channel() -> (Sender<Bytes, io::Error>, Body) {
    let (sender, body) = Channel::new(16);
    (sender, Body::new(body))
}

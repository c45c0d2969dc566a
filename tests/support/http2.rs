//! An HTTP/2 client with prior knowledge.

use axum::body::Body;
use http::{Request, Response, Uri};
use hyper::{body::Incoming, client::conn::http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpStream;

use super::{Answer, wire::Server};

/// One HTTP/2 connection.
pub struct Http2(http2::SendRequest<Body>);

impl Http2 {
    pub async fn connect(server: &Server) -> Self {
        let stream = TcpStream::connect(server.address).await.unwrap();
        stream.set_nodelay(true).unwrap();
        let (sender, connection) = http2::handshake(TokioExecutor::new(), TokioIo::new(stream))
            .await
            .unwrap();
        tokio::spawn(connection);
        Self(sender)
    }

    /// Sends a request whose URI is a path, and answers once the response's head is here.
    pub async fn begin(&mut self, request: Request<Body>) -> Response<Incoming> {
        self.try_begin(request).await.unwrap()
    }

    /// The same, where the request may fail.
    pub async fn try_begin(
        &mut self,
        mut request: Request<Body>,
    ) -> hyper::Result<Response<Incoming>> {
        let path = request.uri().path_and_query().unwrap();
        let uri = Uri::builder().scheme("http").authority("test");
        *request.uri_mut() = uri.path_and_query(path.clone()).build().unwrap();
        self.0.send_request(request).await
    }

    /// The same, with the response read to its end.
    pub async fn send(&mut self, request: Request<Body>) -> Answer {
        Answer::of(self.begin(request).await.map(Body::new)).await
    }
}

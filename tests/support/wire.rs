//! A server on loopback and a client that writes raw bytes.

use std::{net::SocketAddr, time::Duration};

use axum::Router;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    task::JoinHandle,
};

/// A router served over real TCP, HTTP/1.1 and HTTP/2 (prior knowledge), until dropped.
pub struct Server {
    pub address: SocketAddr,
    task: JoinHandle<()>,
}

impl Server {
    pub async fn start(app: Router) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let task = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        Self { address, task }
    }

    pub async fn connect(&self) -> Wire {
        Wire(TcpStream::connect(self.address).await.unwrap())
    }

    /// One request on a connection of its own, answered or cut off.
    pub async fn exchange(&self, request: &[u8]) -> Reply {
        let mut wire = self.connect().await;
        wire.write(request).await;
        wire.read_reply().await
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// One raw connection.
pub struct Wire(TcpStream);

impl Wire {
    /// A connection to a server that may be another process's, or gone.
    pub async fn to(address: SocketAddr) -> std::io::Result<Self> {
        Ok(Self(TcpStream::connect(address).await?))
    }

    pub async fn write(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).await.unwrap();
        self.0.flush().await.unwrap();
    }

    /// The same to a server that may be gone; answers whether it took the bytes.
    pub async fn try_write(&mut self, bytes: &[u8]) -> bool {
        self.0.write_all(bytes).await.is_ok()
    }

    /// Reads until the other side ends the connection.
    pub async fn read_to_end(&mut self) -> Vec<u8> {
        let mut all = Vec::new();
        loop {
            let more = self.read_some(64 * 1024).await;
            if more.is_empty() {
                return all;
            }
            all.extend(more);
        }
    }

    /// Closes the connection with a reset, as a client does that dies.
    pub fn reset(self) {
        #[allow(deprecated)] // The replacement blocks; a linger of zero never does.
        self.0.set_linger(Some(Duration::ZERO)).unwrap();
    }

    /// Says that nothing more will be sent, and goes on listening.
    pub async fn half_close(&mut self) {
        self.0.shutdown().await.unwrap();
    }

    /// Reads whatever comes next, at most `limit` bytes; empty at the end.
    pub async fn read_some(&mut self, limit: usize) -> Vec<u8> {
        let mut buffer = vec![0; limit];
        let read = self.0.read(&mut buffer).await.unwrap_or(0);
        buffer.truncate(read);
        buffer
    }

    /// Reads one response: head, and body by Content-Length or chunks or to the end.
    pub async fn read_reply(&mut self) -> Reply {
        let mut bytes = Vec::new();
        loop {
            if let Some(reply) = Reply::parse(&bytes, false) {
                return reply;
            }
            let more = self.read_some(64 * 1024).await;
            if more.is_empty() {
                return Reply::parse(&bytes, true).unwrap_or_default();
            }
            bytes.extend(more);
        }
    }
}

/// A response as it came over the wire. Status 0: the connection ended without one.
#[derive(Debug, Clone, Default)]
pub struct Reply {
    pub status: u16,
    pub headers: Vec<(String, Vec<u8>)>,
    pub body: Vec<u8>,
}

impl Reply {
    pub fn header(&self, name: &str) -> Option<&[u8]> {
        let mut lines = self.headers.iter().filter(|(is, _)| is == name);
        lines.next().map(|(_, value)| &value[..])
    }

    pub fn is_replay(&self) -> bool {
        self.header("idempotent-replay") == Some(b"true")
    }

    pub fn code(&self) -> String {
        let problem: serde_json::Value = serde_json::from_slice(&self.body).unwrap_or_default();
        problem["code"].as_str().unwrap_or_default().to_owned()
    }

    pub fn said(&self) -> (u16, String) {
        (self.status, self.code())
    }

    /// From all the bytes of a connection that has ended.
    pub fn of(bytes: &[u8]) -> Self {
        Self::parse(bytes, true).unwrap_or_default()
    }

    fn parse(bytes: &[u8], ended: bool) -> Option<Self> {
        let end = find(bytes, b"\r\n\r\n")?;
        let mut lines = bytes[..end].split(|byte| *byte == b'\n');
        let status = std::str::from_utf8(lines.next()?.get(9..12)?).ok()?;
        let status = status.parse().ok()?;
        let rest = &bytes[end + 4..];
        if status == 100 {
            return Self::parse(rest, ended);
        }
        let headers: Vec<_> = lines
            .filter_map(|line| {
                let colon = line.iter().position(|byte| *byte == b':')?;
                let name = String::from_utf8_lossy(&line[..colon]).to_ascii_lowercase();
                Some((name, line[colon + 1..].trim_ascii().to_vec()))
            })
            .collect();
        let mut reply = Self {
            status,
            headers,
            body: Vec::new(),
        };
        if reply.header("transfer-encoding") == Some(b"chunked") {
            reply.body = unchunk(rest)?;
        } else if let Some(length) = reply.header("content-length") {
            let length: usize = std::str::from_utf8(length).ok()?.parse().ok()?;
            reply.body = rest.get(..length)?.to_vec();
        } else if ended || status == 204 || status == 304 {
            reply.body = rest.to_vec();
        } else {
            return None;
        }
        Some(reply)
    }
}

fn unchunk(mut bytes: &[u8]) -> Option<Vec<u8>> {
    let mut body = Vec::new();
    loop {
        let line = find(bytes, b"\r\n")?;
        let size = usize::from_str_radix(std::str::from_utf8(&bytes[..line]).ok()?, 16).ok()?;
        bytes = bytes.get(line + 2..)?;
        if size == 0 {
            return Some(body);
        }
        body.extend(bytes.get(..size)?);
        bytes = bytes.get(size + 2..)?;
    }
}

fn find(bytes: &[u8], what: &[u8]) -> Option<usize> {
    bytes.windows(what.len()).position(|window| window == what)
}

/// The bytes of a keyed POST to `/charges`.
pub fn raw_post(key: &str, body: &str) -> Vec<u8> {
    format!(
        "POST /charges HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n\
         idempotency-key: {key}\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

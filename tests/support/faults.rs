//! A stretch of network between an HTTP client and its server on which requests and answers are lost.
//!
//! What happens to a request depends on the seed, its body and how often that was sent before, and on nothing else:
//! however the requests of a test are mixed, each operation meets the same faults in every run. Connections that are
//! refused, whose requests nobody knows, are chosen by the seed and their number.

use std::{
    collections::HashMap,
    io,
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    task::JoinHandle,
    time::timeout,
};

/// What happens to a request on its way to the server, or to the answer on its way back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fault {
    /// Nothing.
    None,
    /// The request is read, and the connection reset: the server never sees it.
    RequestLost,
    /// The server answers, and the connection is reset before the first byte of that.
    AnswerLost,
    /// The connection is reset in the middle of the answer.
    AnswerTorn,
    /// The connection ends in good order in the middle of the answer.
    AnswerCutShort,
    /// The answer is held until the client hangs up.
    AnswerSlow,
    /// The request is held until the client hangs up, and then passed on all the same: beside its own retry, or after
    /// it.
    RequestLate,
    /// 503, and the server never sees it.
    Unavailable,
    /// The same with `Retry-After: 1`.
    UnavailableForASecond,
    /// The server answers, and the client gets a gateway's 502 instead.
    BadGateway,
}

impl Fault {
    pub const ALL: [Self; 10] = [
        Self::None,
        Self::RequestLost,
        Self::AnswerLost,
        Self::AnswerTorn,
        Self::AnswerCutShort,
        Self::AnswerSlow,
        Self::RequestLate,
        Self::Unavailable,
        Self::UnavailableForASecond,
        Self::BadGateway,
    ];

    /// How many requests of a hundred meet it.
    fn share(self) -> u64 {
        match self {
            Self::None => 50,
            Self::RequestLost | Self::AnswerLost | Self::AnswerTorn | Self::Unavailable => 8,
            Self::AnswerCutShort | Self::BadGateway => 6,
            // Each costs a client's time-out, or its second.
            Self::AnswerSlow | Self::UnavailableForASecond | Self::RequestLate => 2,
        }
    }

    fn by_dice(dice: u64) -> Self {
        let mut left = dice % Self::ALL.iter().map(|fault| fault.share()).sum::<u64>();
        for fault in Self::ALL {
            match left.checked_sub(fault.share()) {
                Some(less) => left = less,
                None => return fault,
            }
        }
        unreachable!("the dice has as many sides as there are shares")
    }
}

/// How many new connections of a hundred are refused: accepted, and reset at once.
const REFUSED_SHARE: u64 = 8;

/// For what takes no time on an idle machine, and for clients that never hang up.
const PATIENCE: Duration = Duration::from_secs(30);

/// One request, and what became of it.
#[derive(Debug, Clone)]
pub struct Seen {
    pub fault: Fault,
    /// As it came, head and body.
    pub request: Vec<u8>,
    /// As it came from the server, where that was asked.
    pub answer: Option<Vec<u8>>,
}

impl Seen {
    /// The request's body.
    pub fn body(&self) -> &[u8] {
        &self.request[head_len(&self.request).unwrap()..]
    }

    /// The one value of this field of the request, if it has any.
    pub fn header(&self, name: &str) -> Option<String> {
        let head = &self.request[..head_len(&self.request).unwrap()];
        let head = String::from_utf8(head.to_vec()).unwrap();
        let mut values = head.split("\r\n").filter_map(|line| {
            let (is, value) = line.split_once(':')?;
            is.eq_ignore_ascii_case(name)
                .then(|| value.trim().to_owned())
        });
        let value = values.next();
        assert_eq!(values.next(), None, "{name} stands there twice");
        value
    }
}

/// Ends with everything that is underway, when it is dropped.
pub struct FaultyWire {
    address: SocketAddr,
    shared: Arc<Shared>,
    accepting: JoinHandle<()>,
}

struct Shared {
    server: SocketAddr,
    seed: u64,
    connections: AtomicU64,
    refused: AtomicUsize,
    underway: AtomicUsize,
    /// How often each body was sent.
    sent: Mutex<HashMap<Vec<u8>, u64>>,
    seen: Mutex<Vec<Seen>>,
}

impl FaultyWire {
    pub async fn to(server: SocketAddr, seed: u64) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared {
            server,
            seed,
            connections: AtomicU64::new(0),
            refused: AtomicUsize::new(0),
            underway: AtomicUsize::new(0),
            sent: Mutex::default(),
            seen: Mutex::default(),
        });
        let accepting = tokio::spawn(shared.clone().accept(listener));
        Self {
            address,
            shared,
            accepting,
        }
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// How many connections were refused.
    pub fn refused(&self) -> usize {
        self.shared.refused.load(Ordering::SeqCst)
    }

    /// Every request so far, in the order in which they were done with. Waits for those that are underway.
    pub async fn seen(&self) -> Vec<Seen> {
        super::eventually("the wire to be idle", || {
            self.shared.underway.load(Ordering::SeqCst) == 0
        })
        .await;
        self.shared.seen.lock().unwrap().clone()
    }
}

impl Drop for FaultyWire {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

impl Shared {
    async fn accept(self: Arc<Self>, listener: TcpListener) {
        let mut connections = tokio::task::JoinSet::new();
        loop {
            let (client, _) = listener.accept().await.unwrap();
            let number = self.connections.fetch_add(1, Ordering::SeqCst);
            if mixed(self.seed ^ mixed(number)) % 100 < REFUSED_SHARE {
                self.refused.fetch_add(1, Ordering::SeqCst);
                reset(client);
                continue;
            }
            let shared = self.clone();
            connections.spawn(async move {
                // Either side may end its connection whenever it likes.
                let _ = shared.carry(client).await;
            });
            while connections.try_join_next().is_some() {}
        }
    }

    /// The requests of one connection, one after the other, until one of them meets a fault that ends it.
    async fn carry(&self, mut client: TcpStream) -> io::Result<()> {
        client.set_nodelay(true)?;
        let mut server = TcpStream::connect(self.server).await?;
        server.set_nodelay(true)?;
        loop {
            let request = read_message(&mut client).await?;
            self.underway.fetch_add(1, Ordering::SeqCst);
            let _underway = Underway(&self.underway);
            let (fault, dice) = self.fault_of(&request);
            let asked = before(fault, &mut client).await;
            let mut answer = None;
            if asked {
                server.write_all(&request).await?;
                answer = Some(read_message(&mut server).await?);
            }
            self.seen.lock().unwrap().push(Seen {
                fault,
                request,
                answer: answer.clone(),
            });
            let answer = answer.unwrap_or_default();
            if !after(fault, dice, &answer, &mut client).await? {
                if fault != Fault::AnswerCutShort {
                    reset(client);
                }
                return Ok(());
            }
        }
    }

    /// And a number that is as random as it, for the details.
    fn fault_of(&self, request: &[u8]) -> (Fault, u64) {
        let body = &request[head_len(request).unwrap()..];
        let mut sent = self.sent.lock().unwrap();
        let sent = sent.entry(body.to_vec()).or_default();
        *sent += 1;
        let of_body = body
            .iter()
            .fold(self.seed, |dice, byte| mixed(dice ^ u64::from(*byte)));
        let dice = mixed(of_body ^ *sent);
        (Fault::by_dice(dice), mixed(dice))
    }
}

/// Answers whether the server is to see the request.
async fn before(fault: Fault, client: &mut TcpStream) -> bool {
    match fault {
        Fault::RequestLost | Fault::Unavailable | Fault::UnavailableForASecond => false,
        Fault::RequestLate => {
            hung_up(client).await;
            true
        }
        _ => true,
    }
}

/// Answers whether the connection can be used again.
async fn after(fault: Fault, dice: u64, answer: &[u8], client: &mut TcpStream) -> io::Result<bool> {
    match fault {
        Fault::None => client.write_all(answer).await?,
        Fault::Unavailable => client.write_all(&refusal("503 Unavailable", "")).await?,
        Fault::UnavailableForASecond => {
            let later = refusal("503 Unavailable", "retry-after: 1\r\n");
            client.write_all(&later).await?;
        }
        Fault::BadGateway => client.write_all(&refusal("502 Bad Gateway", "")).await?,
        Fault::AnswerTorn | Fault::AnswerCutShort => {
            // Somewhere from the first byte to the last but one: in the head as well as in the body.
            let cut = 1 + usize::try_from(dice % (answer.len() as u64 - 1)).unwrap();
            client.write_all(&answer[..cut]).await?;
            client.flush().await?;
            return Ok(false);
        }
        Fault::AnswerSlow => {
            hung_up(client).await;
            return Ok(false);
        }
        Fault::RequestLost | Fault::AnswerLost | Fault::RequestLate => return Ok(false),
    }
    client.flush().await?;
    Ok(true)
}

/// Counts down when the request is done with, or given up.
struct Underway<'a>(&'a AtomicUsize);

impl Drop for Underway<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// SplitMix64's mixing step (Steele, Lea, Flood 2014).
fn mixed(number: u64) -> u64 {
    let mut z = number.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Ends a connection as a machine does that goes down.
fn reset(connection: TcpStream) {
    #[allow(deprecated)] // The replacement blocks; a linger of zero never does.
    let _ = connection.set_linger(Some(Duration::ZERO));
}

/// Until the client has ended its connection. Whatever it sends meanwhile is not heard.
async fn hung_up(client: &mut TcpStream) {
    let ended = async {
        let mut unheard = [0; 1024];
        while client.read(&mut unheard).await.is_ok_and(|read| read > 0) {}
    };
    let ended = timeout(PATIENCE, ended).await;
    ended.expect("the client has no time-out");
}

fn refusal(status: &str, headers: &str) -> Vec<u8> {
    let body = "<html>nobody is at home</html>";
    format!(
        "HTTP/1.1 {status}\r\ncontent-type: text/html\r\n{headers}content-length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

/// One request or answer whose length its head says.
async fn read_message(from: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut message = Vec::new();
    loop {
        if let Some(head) = head_len(&message)
            && message.len() >= head + body_len(&message[..head])
        {
            return Ok(message);
        }
        if from.read_buf(&mut message).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
}

fn head_len(message: &[u8]) -> Option<usize> {
    let end = message.windows(4).position(|bytes| bytes == b"\r\n\r\n")?;
    Some(end + 4)
}

fn body_len(head: &[u8]) -> usize {
    let head = String::from_utf8_lossy(head).to_ascii_lowercase();
    assert!(
        !head.contains("\r\ntransfer-encoding:"),
        "not understood here"
    );
    let length = head.split_once("\r\ncontent-length:");
    length.map_or(0, |(_, rest)| {
        let length = rest.split("\r\n").next().unwrap();
        length.trim().parse().unwrap()
    })
}

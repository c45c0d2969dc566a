//! A network in front of a Postgres server, as bad as the test wants.

use std::{
    collections::HashMap,
    future::pending,
    mem,
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::{Buf, Bytes, BytesMut};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        TcpListener, TcpStream,
        tcp::{ReadHalf, WriteHalf},
    },
    sync::mpsc,
    task::{JoinHandle, JoinSet},
    time::{Instant, sleep_until},
};

/// Passes connections on to a server that speaks Postgres' protocol without encryption, until
/// dropped.
pub struct Proxy {
    address: SocketAddr,
    network: Arc<Network>,
    accepting: JoinHandle<()>,
}

#[derive(Default)]
struct Network {
    rules: Mutex<Rules>,
    connections: Mutex<JoinSet<()>>,
}

#[derive(Default)]
struct Rules {
    delays: HashMap<Way, Duration>,
    refuses: bool,
    hangs: bool,
    cut: Option<Cut>,
    cuts: usize,
    accepted: usize,
    forwarded: HashMap<u8, usize>,
}

/// From which side to which.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Way {
    ToServer,
    ToClient,
}

/// A plan to cut the connection that carries a certain message of a client.
#[derive(Debug, Clone)]
#[must_use = "a plan does nothing until a proxy is told of it"]
pub struct Cut {
    kind: u8,
    containing: Vec<u8>,
    after: usize,
    when: Moment,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Moment {
    Before,
    After,
    Answered,
}

impl Cut {
    /// The server never gets the message. Kinds are those of the protocol: `Q` a simple query (BEGIN
    /// and COMMIT are such), `P` parse, `B` bind, `E` execute, `S` sync, which ends every statement
    /// with parameters.
    pub fn before(kind: u8) -> Self {
        Self {
            kind,
            containing: Vec::new(),
            after: 0,
            when: Moment::Before,
        }
    }

    /// The client is cut off at once, while the server does what it was told. For `Q` and `S` only:
    /// nothing else is done for certain.
    pub fn after(kind: u8) -> Self {
        assert!(b"QS".contains(&kind), "the server waits for more");
        let when = Moment::After;
        Self {
            when,
            ..Self::before(kind)
        }
    }

    /// The server has done what it was told, and its answer is lost: nothing is left to race with.
    /// For `Q` and `S` only.
    pub fn answered(kind: u8) -> Self {
        let when = Moment::Answered;
        Self {
            when,
            ..Self::after(kind)
        }
    }

    /// Only messages that contain this text count.
    pub fn containing(mut self, text: &str) -> Self {
        self.containing = text.into();
        self
    }

    /// The nth of them from now on, over all connections. Default the first.
    pub fn nth(mut self, nth: usize) -> Self {
        self.after = nth.checked_sub(1).expect("the first is 1");
        self
    }

    fn is_about(&self, message: &[u8]) -> bool {
        let text = &self.containing;
        let contained = || message.windows(text.len()).any(|bytes| bytes == text);
        message[0] == self.kind && (text.is_empty() || contained())
    }
}

impl Proxy {
    /// In front of a server that may be down for now.
    pub async fn to(target: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let network = Arc::new(Network::default());
        let accepting = tokio::spawn(network.clone().accept(listener, target));
        Self {
            address,
            network,
            accepting,
        }
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// How long everything takes on this way, from now on. As much as ever fits on it.
    pub fn delay(&self, way: Way, delay: Duration) {
        self.rules(|rules| rules.delays.insert(way, delay));
    }

    /// Resets every connection, and answers once they are gone. New ones are let in.
    pub async fn cut_all(&self) {
        let mut connections = mem::take(&mut *self.network.connections.lock().unwrap());
        connections.shutdown().await;
    }

    /// Whether new connections are reset at once.
    pub fn refuse(&self, refuses: bool) {
        self.rules(|rules| rules.refuses = refuses);
    }

    /// Whether everything that is sent vanishes without a word, connection attempts included. A
    /// connection that has lost something this way stays silent for ever.
    pub fn hang(&self, hangs: bool) {
        self.rules(|rules| rules.hangs = hangs);
    }

    /// Cuts one connection, once. A newer plan replaces one that has not come to pass.
    pub fn cut(&self, cut: Cut) {
        self.rules(|rules| rules.cut = Some(cut));
    }

    /// How many plans to cut have come to pass.
    pub fn cuts(&self) -> usize {
        self.rules(|rules| rules.cuts)
    }

    /// How many connections were let in.
    pub fn accepted(&self) -> usize {
        self.rules(|rules| rules.accepted)
    }

    /// How many messages of this kind have gone to the server.
    pub fn forwarded(&self, kind: u8) -> usize {
        self.rules(|rules| rules.forwarded.get(&kind).copied().unwrap_or(0))
    }

    fn rules<T>(&self, use_them: impl FnOnce(&mut Rules) -> T) -> T {
        use_them(&mut self.network.rules.lock().unwrap())
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.accepting.abort();
        self.network.connections.lock().unwrap().abort_all();
    }
}

impl Network {
    async fn accept(self: Arc<Self>, listener: TcpListener, target: SocketAddr) {
        loop {
            let (client, _) = listener.accept().await.unwrap();
            // Whatever drops it, an abort of its task included, resets it.
            client.set_zero_linger().unwrap();
            client.set_nodelay(true).unwrap();
            let mut rules = self.rules.lock().unwrap();
            if rules.refuses {
                continue;
            }
            rules.accepted += 1;
            drop(rules);
            let mut connections = self.connections.lock().unwrap();
            while connections.try_join_next().is_some() {}
            connections.spawn(self.clone().connect(client, target));
        }
    }

    async fn connect(self: Arc<Self>, client: TcpStream, target: SocketAddr) {
        if self.rules.lock().unwrap().hangs {
            return pending().await;
        }
        let Ok(server) = TcpStream::connect(target).await else {
            return;
        };
        server.set_zero_linger().unwrap();
        server.set_nodelay(true).unwrap();
        let connection = Connection {
            network: self,
            is_lost: AtomicBool::new(false),
            owed: AtomicUsize::new(1),
        };
        connection.carry(client, server).await;
    }
}

/// The first message, which has no kind, and what came along with it. Encryption, which a client may
/// ask for before, is declined.
async fn hello(client: &mut TcpStream) -> Option<(Bytes, BytesMut)> {
    const ENCRYPTION: [u32; 2] = [80_877_103, 80_877_104];
    let mut unread = BytesMut::new();
    loop {
        if let Some(message) = next_message(&mut unread, 0) {
            let code = message.get(4..8).map(|mut code| code.get_u32());
            if !code.is_some_and(|code| ENCRYPTION.contains(&code)) {
                return Some((message, unread));
            }
            client.write_all(b"N").await.ok()?;
        } else if client.read_buf(&mut unread).await.ok()? == 0 {
            return None;
        }
    }
}

/// Takes the first message off, once all of it is here. Its length comes after `prefix` bytes.
fn next_message(bytes: &mut BytesMut, prefix: usize) -> Option<Bytes> {
    let length = bytes.get(prefix..prefix + 4)?.get_u32();
    let length = prefix + length as usize;
    (bytes.len() >= length).then(|| bytes.split_to(length).freeze())
}

struct Connection {
    network: Arc<Network>,
    /// Something it should have carried has vanished.
    is_lost: AtomicBool,
    /// How often the server still has to say that it is ready for more.
    owed: AtomicUsize,
}

impl Connection {
    async fn carry(&self, mut client: TcpStream, mut server: TcpStream) {
        let Some((hello, mut sent)) = hello(&mut client).await else {
            return;
        };
        let mut answered = BytesMut::new();
        let (from_client, to_client) = client.split();
        let (from_server, to_server) = server.split();
        let carried = tokio::try_join!(
            self.pump(
                Way::ToServer,
                Some(hello),
                &mut sent,
                from_client,
                to_server
            ),
            self.pump(Way::ToClient, None, &mut answered, from_server, to_client),
        );
        match carried {
            Ok(_) => {
                // Both sides have ended it in order, so it is not reset.
                for stream in [&client, &server] {
                    #[allow(deprecated)] // This is the default, which never blocks.
                    let _ = stream.set_linger(None);
                }
            }
            Err(Moment::Before) => {}
            Err(Moment::After) => {
                drop(client);
                self.hear_out(&mut server, &mut answered).await;
            }
            Err(Moment::Answered) => self.hear_out(&mut server, &mut answered).await,
        }
    }

    /// Carries everything in one direction, each message as late as the network is slow. Fails when
    /// the connection is to be cut.
    async fn pump(
        &self,
        way: Way,
        hello: Option<Bytes>,
        unread: &mut BytesMut,
        mut from: ReadHalf<'_>,
        mut to: WriteHalf<'_>,
    ) -> Result<(), Moment> {
        let (queue, mut queued) = mpsc::unbounded_channel();
        let queue_up = move |message| {
            let delay = self.network.rules.lock().unwrap().delay(way);
            // The other half has ended only when both have.
            let _ = queue.send((Instant::now() + delay, message));
        };
        let read = async move {
            hello.into_iter().for_each(&queue_up);
            loop {
                while let Some(message) = next_message(unread, 1) {
                    self.note_ready(way, &message);
                    queue_up(message);
                }
                if !matches!(from.read_buf(unread).await, Ok(1..)) {
                    return Ok(());
                }
            }
        };
        let write = async {
            while let Some((due, message)) = queued.recv().await {
                sleep_until(due).await;
                self.forward(way, &message, &mut to).await?;
            }
            if self.is_lost.load(Ordering::SeqCst) {
                // The end of the connection is lost as well.
                return pending().await;
            }
            let _ = to.shutdown().await;
            Ok(())
        };
        tokio::try_join!(read, write).map(drop)
    }

    async fn forward(
        &self,
        way: Way,
        message: &[u8],
        to: &mut WriteHalf<'_>,
    ) -> Result<(), Moment> {
        let cut = {
            let mut rules = self.network.rules.lock().unwrap();
            if rules.hangs {
                self.is_lost.store(true, Ordering::SeqCst);
            }
            if self.is_lost.load(Ordering::SeqCst) {
                return Ok(());
            }
            match way {
                Way::ToServer => rules.judge(message),
                Way::ToClient => None,
            }
        };
        if cut == Some(Moment::Before) {
            return Err(Moment::Before);
        }
        if way == Way::ToServer && b"QS".contains(&message[0]) {
            self.owed.fetch_add(1, Ordering::SeqCst);
        }
        // Where the other side is gone, its reader says so.
        let _ = to.write_all(message).await;
        cut.map_or(Ok(()), Err)
    }

    fn note_ready(&self, way: Way, message: &[u8]) {
        if way == Way::ToClient && message[0] == b'Z' {
            self.owed.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Waits until the server has answered everything, and keeps the answers.
    async fn hear_out(&self, server: &mut TcpStream, unread: &mut BytesMut) {
        loop {
            while let Some(message) = next_message(unread, 1) {
                self.note_ready(Way::ToClient, &message);
            }
            let is_done = self.owed.load(Ordering::SeqCst) == 0;
            if is_done || !matches!(server.read_buf(unread).await, Ok(1..)) {
                return;
            }
        }
    }
}

impl Rules {
    fn delay(&self, way: Way) -> Duration {
        self.delays.get(&way).copied().unwrap_or_default()
    }

    /// Whether the plan is about this message of a client.
    fn judge(&mut self, message: &[u8]) -> Option<Moment> {
        let cut = self.cut.take_if(|cut| {
            let is_about = cut.is_about(message);
            let comes_true = is_about && cut.after == 0;
            cut.after -= usize::from(is_about && !comes_true);
            comes_true
        });
        let when = cut.map(|cut| cut.when);
        self.cuts += usize::from(when.is_some());
        if when != Some(Moment::Before) {
            *self.forwarded.entry(message[0]).or_default() += 1;
        }
        when
    }
}

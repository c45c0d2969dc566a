//! What goes wrong: processes are killed, and Postgres is.

use std::{
    fmt,
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::{
    sync::watch,
    task::JoinSet,
    time::{sleep, timeout},
};

use crate::{process::Process, support::server::Server};

/// How long a process may take to serve once nothing disturbs it.
const PATIENCE: Duration = Duration::from_secs(30);

/// The processes of the service, and where they can be reached.
pub struct Fleet {
    spawn: Box<dyn Fn(u32) -> Process + Send + Sync>,
    addresses: Mutex<Vec<Option<SocketAddr>>>,
    started: AtomicU32,
    kills: AtomicUsize,
    stalls: AtomicUsize,
}

impl Fleet {
    /// So many at a time. Each that is started is told its number.
    pub fn new(instances: usize, spawn: impl Fn(u32) -> Process + Send + Sync + 'static) -> Self {
        Self {
            spawn: Box::new(spawn),
            addresses: Mutex::new(vec![None; instances]),
            started: AtomicU32::new(0),
            kills: AtomicUsize::new(0),
            stalls: AtomicUsize::new(0),
        }
    }

    pub fn kills(&self) -> usize {
        self.kills.load(Ordering::SeqCst)
    }

    /// How often a process stood still and then went on.
    pub fn stalls(&self) -> usize {
        self.stalls.load(Ordering::SeqCst)
    }

    /// Those that serve, as far as anybody knows.
    pub fn serving(&self) -> Vec<SocketAddr> {
        let addresses = self.addresses.lock().unwrap();
        addresses.iter().flatten().copied().collect()
    }

    /// Any of these.
    pub fn any(&self) -> Option<SocketAddr> {
        let serving = self.serving();
        let chosen = rand::random_range(0..serving.len().max(1));
        serving.get(chosen).copied()
    }

    /// Keeps all places filled, until it is over. Ends with the processes that are left to serve.
    pub fn keep_all(self: &Arc<Self>, over: &watch::Receiver<bool>) -> JoinSet<Process> {
        let mut kept = JoinSet::new();
        let places = self.addresses.lock().unwrap().len();
        for place in 0..places {
            let (fleet, over) = (self.clone(), over.clone());
            kept.spawn(async move { fleet.keep(place, over).await });
        }
        kept
    }

    /// Starts one process after the other and kills each, at any moment of its life, until it is
    /// over. The last one is left to serve.
    async fn keep(&self, place: usize, mut over: watch::Receiver<bool>) -> Process {
        loop {
            let number = 1 + self.started.fetch_add(1, Ordering::SeqCst);
            let mut process = (self.spawn)(number);
            let is_over = async {
                tokio::select! {
                    () = self.live(place, &mut process) => false,
                    _ = over.wait_for(|over| *over) => true,
                }
            };
            if is_over.await {
                if self.addresses.lock().unwrap()[place].is_none() {
                    let address = timeout(PATIENCE, process.address()).await;
                    self.publish(place, Some(address.expect("the service does not start")));
                }
                return process;
            }
            process.kill().await;
            self.publish(place, None);
            self.kills.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Ends when it is to be killed, which may be before it serves.
    async fn live(&self, place: usize, process: &mut Process) {
        if rand::random_ratio(1, 3) {
            return self.stand_still(place, process).await;
        }
        let life = Duration::from_millis(rand::random_range(100..2_200));
        let serve = async {
            self.serve(place, process).await;
            std::future::pending::<()>().await
        };
        let _ = timeout(life, serve).await;
    }

    /// For a while, many of them so long that their leases are over when they go on.
    async fn stand_still(&self, place: usize, process: &mut Process) {
        self.serve(place, process).await;
        up_to(400).await;
        let stalled = process.stall();
        sleep(Duration::from_millis(rand::random_range(100..1_800))).await;
        drop(stalled);
        self.stalls.fetch_add(1, Ordering::SeqCst);
        up_to(800).await;
    }

    async fn serve(&self, place: usize, process: &mut Process) {
        let address = process.address().await;
        self.publish(place, Some(address));
    }

    fn publish(&self, place: usize, address: Option<SocketAddr>) {
        self.addresses.lock().unwrap()[place] = address;
    }
}

async fn up_to(milliseconds: u64) {
    let milliseconds = rand::random_range(0..milliseconds);
    sleep(Duration::from_millis(milliseconds)).await;
}

/// How often Postgres went down.
#[derive(Clone, Copy, Default)]
pub struct Outages {
    pub killed: usize,
    pub stopped: usize,
}

impl fmt::Display for Outages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = self.killed + self.stopped;
        write!(f, "Postgres {all} times ({} by SIGKILL)", self.killed)
    }
}

/// Takes Postgres down in both ways in turn, and starts it again, until it is over.
pub async fn shake(mut server: Server, mut over: watch::Receiver<bool>) -> (Server, Outages) {
    let mut outages = Outages::default();
    loop {
        let calm = Duration::from_millis(rand::random_range(1_500..5_000));
        if timeout(calm, over.wait_for(|over| *over)).await.is_ok() {
            return (server, outages);
        }
        if outages.killed <= outages.stopped {
            server.kill().await;
            outages.killed += 1;
        } else {
            server.stop_immediately().await;
            outages.stopped += 1;
        }
        up_to(1_500).await;
        server.start_again().await;
    }
}

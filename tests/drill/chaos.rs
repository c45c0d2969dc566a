//! What goes wrong: processes are killed, and Postgres is.

use std::{
    fmt,
    net::SocketAddr,
    path::PathBuf,
    sync::{
        Mutex,
        atomic::{AtomicU32, AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::{
    sync::watch,
    time::{sleep, timeout},
};

use crate::{service::Process, support::server::Server};

pub const INSTANCES: usize = 3;

/// How long a process may take to serve once nothing disturbs it.
const PATIENCE: Duration = Duration::from_secs(30);

/// The processes of the service, and where they can be reached.
pub struct Fleet {
    database: String,
    pub journal: PathBuf,
    addresses: Mutex<[Option<SocketAddr>; INSTANCES]>,
    started: AtomicU32,
    kills: AtomicUsize,
    stalls: AtomicUsize,
}

impl Fleet {
    pub fn new(database: String, journal: PathBuf) -> Self {
        Self {
            database,
            journal,
            addresses: Mutex::default(),
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
        let addresses = *self.addresses.lock().unwrap();
        addresses.into_iter().flatten().collect()
    }

    /// Any of these.
    pub fn any(&self) -> Option<SocketAddr> {
        let serving = self.serving();
        let chosen = rand::random_range(0..serving.len().max(1));
        serving.get(chosen).copied()
    }

    /// Starts one process after the other and kills each, at any moment of its life, until it is
    /// over. The last one is left to serve.
    pub async fn keep(&self, place: usize, mut over: watch::Receiver<bool>) -> Process {
        loop {
            let number = 1 + self.started.fetch_add(1, Ordering::SeqCst);
            let mut process = Process::spawn(number, &self.database, &self.journal);
            let life = Duration::from_millis(rand::random_range(100..2_200));
            let is_over = async {
                tokio::select! {
                    () = self.serve(place, &mut process) => unreachable!("it serves until it is killed"),
                    () = sleep(life) => false,
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

    /// Some stand still for a while, so long that their leases are over when they go on.
    async fn serve(&self, place: usize, process: &mut Process) {
        let address = process.address().await;
        self.publish(place, Some(address));
        if rand::random_ratio(1, 3) {
            sleep(Duration::from_millis(rand::random_range(0..400))).await;
            let stalled = process.stall();
            sleep(Duration::from_millis(rand::random_range(100..1_500))).await;
            drop(stalled);
            self.stalls.fetch_add(1, Ordering::SeqCst);
        }
        std::future::pending().await
    }

    fn publish(&self, place: usize, address: Option<SocketAddr>) {
        self.addresses.lock().unwrap()[place] = address;
    }
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
        sleep(Duration::from_millis(rand::random_range(0..1_500))).await;
        server.start_again().await;
    }
}

//! A Postgres server of a test's own, which it may stop and kill.

use std::{
    ffi::OsStr,
    fs::{self, File},
    net::{Ipv4Addr, SocketAddr, TcpListener},
    os::unix::{
        fs::{MetadataExt, chown},
        process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use sqlx::{ConnectOptions, PgConnection, postgres::PgConnectOptions};
use tempfile::TempDir;
use tokio::time::sleep;

use super::eventually;

/// A server on loopback with data of its own, stopped and removed when dropped.
pub struct Server {
    folder: TempDir,
    binaries: PathBuf,
    /// User and group it runs as, where the test runs as root: Postgres refuses to.
    runs_as: Option<(u32, u32)>,
    settings: Vec<String>,
    port: u16,
    process: Option<Child>,
}

/// How long it may take to start, recovery after a crash included.
const PATIENCE: Duration = Duration::from_secs(60);

impl Server {
    /// A server with the default settings. Its only role is `postgres`, which needs no password.
    pub async fn start() -> Self {
        Self::start_with(&[]).await
    }

    /// The same with these settings: `[("synchronous_commit", "off")]`.
    pub async fn start_with(settings: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let runs_as = (fs::metadata(&folder).unwrap().uid() == 0).then(postgres_user);
        if let Some((user, group)) = runs_as {
            chown(&folder, Some(user), Some(group)).unwrap();
        }
        let settings = settings.iter();
        let mut server = Self {
            folder,
            binaries: binaries(),
            runs_as,
            settings: settings.map(|(name, is)| format!("{name}={is}")).collect(),
            port: 0,
            process: None,
        };
        server.initialise().await;
        // Another test may take the port between the look and the start.
        for _ in 0..20 {
            server.port = free_port();
            if server.try_start().await {
                return server;
            }
        }
        panic!("the server did not start: {}", server.log());
    }

    /// Starts it once more on the same port and data, after it was stopped or killed.
    pub async fn start_again(&mut self) {
        assert!(self.process.is_none(), "the server is running");
        let started = self.try_start().await;
        assert!(started, "the server did not start again: {}", self.log());
    }

    /// Stops it as a machine does that goes down in order, but at once: connections are cut, and
    /// nothing is written that need not be.
    pub async fn stop_immediately(&mut self) {
        let mut process = self.process.take().expect("the server is not running");
        signal("QUIT", &[process.id()]);
        has_ended(&mut process).await;
    }

    /// Kills all of its processes at once. What they leave behind is for the next start to clean.
    pub async fn kill(&mut self) {
        let mut process = self.process.take().expect("the server is not running");
        let parent = process.id();
        // Held first, so that it starts nobody any more while its children are looked for.
        signal("STOP", &[parent]);
        eventually("the server to stand still", || {
            Stat::of(parent).is_some_and(|stat| stat.state == 'T')
        })
        .await;
        let mut all = children(parent);
        all.push(parent);
        signal("KILL", &all);
        has_ended(&mut process).await;
        eventually("the server's processes to be gone", || {
            // Whoever is to bury them may take its time.
            let lives = |pid| Stat::of(pid).is_some_and(|stat| stat.state != 'Z');
            !all.iter().any(|pid| lives(*pid))
        })
        .await;
    }

    pub fn address(&self) -> SocketAddr {
        SocketAddr::from((Ipv4Addr::LOCALHOST, self.port))
    }

    /// The URL of its database.
    pub fn url(&self) -> String {
        self.url_at(self.address())
    }

    /// The same, reached at another address: that of a proxy.
    pub fn url_at(&self, address: SocketAddr) -> String {
        format!("postgres://postgres@{address}/postgres?sslmode=disable")
    }

    /// A connection to it.
    pub async fn connect(&self) -> PgConnection {
        let options: PgConnectOptions = self.url().parse().unwrap();
        options.connect().await.unwrap()
    }

    /// What it has to say for itself since it was last started.
    pub fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    async fn initialise(&self) {
        let mut initdb = self.command("initdb");
        initdb.args(["-D", "data", "-U", "postgres", "--auth=trust", "--no-sync"]);
        initdb.args(["--encoding=UTF8", "--locale=C"]);
        let done = tokio::process::Command::from(initdb).output().await;
        let done = done.unwrap();
        let said = String::from_utf8_lossy(&done.stderr);
        assert!(done.status.success(), "initdb failed: {said}");
    }

    /// Answers whether it runs; not, where the port is taken.
    async fn try_start(&mut self) -> bool {
        let log = File::create(self.folder.path().join("log")).unwrap();
        let mut postgres = self.command("postgres");
        postgres.args(["-D", "data", "-p", &self.port.to_string()]);
        postgres.args(["-c", "listen_addresses=127.0.0.1"]);
        let sockets = format!("unix_socket_directories={}", self.folder.path().display());
        for setting in self.settings.iter().chain([&sockets]) {
            postgres.args(["-c", setting]);
        }
        postgres.stdout(log.try_clone().unwrap()).stderr(log);
        let process = self.process.insert(postgres.spawn().unwrap());
        // On the socket in its folder nobody else can answer.
        let options = PgConnectOptions::new_without_pgpass()
            .socket(self.folder.path())
            .port(self.port)
            .username("postgres")
            .database("postgres");
        let begun = Instant::now();
        while begun.elapsed() < PATIENCE {
            if options.connect().await.is_ok() {
                return true;
            }
            if process.try_wait().unwrap().is_some() {
                self.process = None;
                return false;
            }
            sleep(Duration::from_millis(10)).await;
        }
        panic!("the server is not ready: {}", self.log());
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(self.binaries.join(program));
        command.current_dir(&self.folder).stdin(Stdio::null());
        if let Some((user, group)) = self.runs_as {
            command.uid(user).gid(group);
        }
        command
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let Some(mut process) = self.process.take() else {
            return;
        };
        signal("QUIT", &[process.id()]);
        let begun = Instant::now();
        while matches!(process.try_wait(), Ok(None)) {
            if begun.elapsed() > Duration::from_secs(10) {
                let _ = process.kill();
                let _ = process.wait();
            }
            thread::sleep(Duration::from_millis(5));
        }
    }
}

async fn has_ended(process: &mut Child) {
    let ended = || process.try_wait().unwrap().is_some();
    eventually("the server to end", ended).await;
}

/// Some of these may be gone already.
fn signal(name: &str, processes: &[u32]) {
    // The shell's own `kill`, since a program of that name need not be installed.
    let mut kill = Command::new("sh");
    kill.args(["-c", "kill -s \"$@\" 2>/dev/null", "sh", name]);
    kill.args(processes.iter().map(u32::to_string));
    kill.status().unwrap();
}

/// What the kernel knows of a process.
struct Stat {
    state: char,
    parent: u32,
}

impl Stat {
    fn of(process: u32) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
        // The name comes before, in brackets, and may hold anything.
        let mut fields = stat.rsplit_once(") ")?.1.split(' ');
        Some(Self {
            state: fields.next()?.chars().next()?,
            parent: fields.next()?.parse().ok()?,
        })
    }
}

fn children(parent: u32) -> Vec<u32> {
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let mut children: Vec<u32> = processes
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .collect();
    children.retain(|child| Stat::of(*child).is_some_and(|stat| stat.parent == parent));
    children
}

/// Below the ports that connections going out are given, so that none of them takes it while the
/// server is down.
fn free_port() -> u16 {
    let is_free = |port: &u16| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok();
    let mut ports = std::iter::repeat_with(|| rand::random_range(15_000..30_000));
    ports.find(is_free).unwrap()
}

/// The folder of `POSTGRES_BIN`, of `initdb` in `PATH`, or where Debian puts the newest.
fn binaries() -> PathBuf {
    let named = std::env::var_os("POSTGRES_BIN").map(PathBuf::from);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let in_path = std::env::split_paths(&path)
        .filter_map(|folder| fs::canonicalize(folder.join("initdb")).ok())
        .filter_map(|initdb| Some(initdb.parent()?.to_owned()));
    let mut debian: Vec<PathBuf> = fs::read_dir("/usr/lib/postgresql")
        .into_iter()
        .flatten()
        .flatten()
        .map(|version| version.path())
        .collect();
    let version = |folder: &PathBuf| -> Option<u32> {
        let name = folder.file_name().and_then(OsStr::to_str);
        name.and_then(|name| name.parse().ok())
    };
    debian.sort_by_key(|folder| std::cmp::Reverse(version(folder)));
    let debian = debian.into_iter().map(|version| version.join("bin"));
    let is_complete =
        |folder: &Path| folder.join("initdb").exists() && folder.join("postgres").exists();
    named
        .into_iter()
        .chain(in_path)
        .chain(debian)
        .find(|folder| is_complete(folder))
        .expect(
            "this test starts a Postgres server of its own, and there are no binaries: run \
             scripts/test, install postgresql, or set POSTGRES_BIN",
        )
}

/// User and group of the user `postgres`.
fn postgres_user() -> (u32, u32) {
    let users = fs::read_to_string("/etc/passwd").unwrap();
    let user = users.lines().find_map(|line| {
        let mut fields = line.strip_prefix("postgres:")?.split(':').skip(1);
        Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
    });
    user.expect("Postgres refuses to run as root, and there is no user 'postgres'")
}

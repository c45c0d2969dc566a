//! A server in a process of its own: killed, told to stop, or dying by itself.

use std::{
    io::{BufRead, BufReader},
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Child, ChildStdout, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use tokio::{
    task::JoinHandle,
    time::{sleep, timeout},
};

use super::wire::{Reply, Wire};

/// For what takes no time on an idle machine.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// Killed when it is dropped.
pub struct Process {
    child: Child,
    pub address: SocketAddr,
    /// Kept open, so that the process can go on writing to it.
    output: BufReader<ChildStdout>,
}

impl Process {
    /// Starts it, and waits until it says where it listens.
    pub fn start(command: &mut Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let address = said(&mut output, "listening on http://");
        Self {
            address: address.unwrap_or_else(|| panic!("the process ended: {:?}", child.wait())),
            child,
            output,
        }
    }

    /// Another address, from a line of its output that begins like this.
    pub fn says(&mut self, beginning: &str) -> SocketAddr {
        said(&mut self.output, beginning).expect("it says no such thing")
    }

    /// `kill -9`, and nothing the process could do about it.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub fn terminate(&self) {
        let pid = self.child.id().to_string();
        let told = Command::new("kill").args(["-TERM", &pid]).status().unwrap();
        assert!(told.success());
    }

    pub fn is_over(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    pub async fn ended(&mut self) -> ExitStatus {
        let begun = Instant::now();
        while !self.is_over() {
            assert!(begun.elapsed() < PATIENCE, "it does not end");
            sleep(Duration::from_millis(5)).await;
        }
        self.child.wait().unwrap()
    }

    pub async fn exchange(&self, request: &[u8]) -> Reply {
        exchange(self.address, request).await
    }

    pub fn spawn(&self, request: Vec<u8>) -> JoinHandle<Reply> {
        let address = self.address;
        tokio::spawn(async move { exchange(address, &request).await })
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Status 0 when the process is gone, before or during the answer.
pub async fn exchange(address: SocketAddr, request: &[u8]) -> Reply {
    let Ok(mut wire) = Wire::to(address).await else {
        return Reply::default();
    };
    if !wire.try_write(request).await {
        return Reply::default();
    }
    let reply = timeout(PATIENCE, wire.read_reply()).await;
    reply.expect("no answer, and no end of the connection")
}

fn said(output: &mut impl BufRead, beginning: &str) -> Option<SocketAddr> {
    let mut line = String::new();
    while output.read_line(&mut line).unwrap() > 0 {
        if let Some((_, address)) = line.trim().split_once(beginning) {
            return Some(address.parse().unwrap());
        }
        line.clear();
    }
    None
}

/// Beside the test's own binary; `cargo test` builds it unless it is told to build one test only.
pub fn example(name: &str) -> PathBuf {
    let this = std::env::current_exe().unwrap();
    let profile = this.parent().and_then(Path::parent).unwrap();
    let binary = profile.join("examples").join(name);
    if !binary.exists() {
        let mut cargo = Command::new(std::env::var("CARGO").unwrap_or_else(|_| "cargo".into()));
        cargo.args(["build", "--quiet", "--all-features", "--example", name]);
        if profile.ends_with("release") {
            cargo.arg("--release");
        }
        cargo.current_dir(env!("CARGO_MANIFEST_DIR"));
        assert!(cargo.status().unwrap().success());
    }
    binary
}

/// The same answer again, marked.
#[track_caller]
pub fn assert_replays(retry: &Reply, first: &Reply) {
    assert!(retry.is_replay() && !first.is_replay(), "{retry:?}");
    assert_same(retry, first);
}

/// The same answer, but for what every answer has anew.
#[track_caller]
pub fn assert_same(one: &Reply, other: &Reply) {
    let but = |reply: &Reply| -> Vec<_> {
        let aside = ["connection", "date", "idempotent-replay"];
        let mut headers = reply.headers.clone();
        headers.retain(|(name, _)| !aside.contains(&name.as_str()));
        headers.sort();
        headers
    };
    assert_eq!(
        (one.status, &one.body, but(one)),
        (other.status, &other.body, but(other))
    );
}

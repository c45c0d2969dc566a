//! Real processes of the service, which the drill may stop and kill.

use std::{ffi::OsStr, net::SocketAddr, process::Stdio};

use tokio::{
    io::{AsyncBufReadExt, BufReader, Lines},
    process::{Child, ChildStdout, Command},
};

/// A process of the service, killed when it is dropped.
pub struct Process {
    child: Child,
    said: Lines<BufReader<ChildStdout>>,
}

impl Process {
    /// This test binary once more, which finds what it is told in its environment.
    pub fn spawn(told: &[(&str, &OsStr)]) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args([
                "--exact",
                "this_binary_also_plays_the_service",
                "--nocapture",
            ])
            .envs(told.iter().copied())
            // It ends when nobody holds the other end any more.
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true);
        let mut child = command.spawn().unwrap();
        let said = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, said }
    }

    /// Where it listens, as soon as it does. May be dropped and called again until it has answered.
    pub async fn address(&mut self) -> SocketAddr {
        while let Some(line) = self.said.next_line().await.unwrap() {
            if let Some((_, address)) = line.trim().split_once("listening on http://") {
                return address.parse().unwrap();
            }
        }
        panic!("the process ended: {:?}", self.child.wait().await);
    }

    /// It does nothing until this is dropped.
    pub fn stall(&self) -> Stalled {
        let process = self.child.id().expect("it was waited for");
        signal("STOP", process);
        Stalled(process)
    }

    /// `kill -9`, and nothing the process could do about it.
    pub async fn kill(mut self) {
        self.child.kill().await.unwrap();
    }
}

/// A process that stands still.
pub struct Stalled(u32);

impl Drop for Stalled {
    fn drop(&mut self) {
        signal("CONT", self.0);
    }
}

/// A process that nobody has waited for yet, so that no other can have its number.
fn signal(name: &str, process: u32) {
    // The shell's own `kill`, since a program of that name need not be installed.
    let mut shell = std::process::Command::new("sh");
    shell.args(["-c", "kill -s \"$@\"", "sh", name, &process.to_string()]);
    let sent = shell.status();
    assert!(sent.unwrap().success());
}

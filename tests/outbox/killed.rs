//! The client killed in the middle, by a real signal to a real process. What it has begun is finished by the next
//! one, with the first key.

use std::{
    io::{BufRead, BufReader},
    path::Path,
    process::{Child, Command, Stdio},
};

use sqlx::{ConnectOptions, Connection, sqlite::SqliteConnectOptions};
use tokio::net::TcpListener;

use crate::{
    ground::Shop,
    support::{eventually, process::example},
};

/// A shop on TCP, and the merchant's file.
struct World {
    shop: Shop,
    server: String,
    folder: tempfile::TempDir,
}

impl World {
    async fn new() -> Self {
        let shop = Shop::new();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let server = format!("http://{}", listener.local_addr().unwrap());
        let app = shop.app();
        tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        let folder = tempfile::tempdir().unwrap();
        Self {
            shop,
            server,
            folder,
        }
    }

    fn merchant(&self) -> Command {
        let mut command = Command::new(example("outbox"));
        command
            .env("OUTBOX", self.folder.path().join("outbox.db"))
            .env("SERVER", &self.server)
            .stdout(Stdio::piped());
        command
    }

    /// A merchant that charges an order, until it is killed.
    fn charges(&self, reference: &str, hold_at: &str) -> Life {
        let mut command = self.merchant();
        command.env("REFERENCE", reference).env("AMOUNT", "25000");
        command.env("HOLD_AT", hold_at);
        Life(command.spawn().unwrap())
    }

    /// The next merchant, which finishes what is there. What it says.
    async fn next(&self) -> String {
        let mut command = self.merchant();
        let output = tokio::task::spawn_blocking(move || command.output().unwrap());
        let output = output.await.unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Key, state, and number of attempts.
    async fn row(&self) -> (Vec<u8>, i64, i64) {
        row(&self.folder.path().join("outbox.db")).await
    }
}

async fn row(file: &Path) -> (Vec<u8>, i64, i64) {
    let file = SqliteConnectOptions::new().filename(file);
    let mut connection = file.connect().await.unwrap();
    let row = sqlx::query_as("SELECT key, state, attempts FROM idempotency_outbox");
    let row = row.fetch_one(&mut connection).await.unwrap();
    connection.close().await.unwrap();
    row
}

/// Killed when it is dropped.
struct Life(Child);

impl Life {
    async fn holds(&mut self) {
        let mut said = BufReader::new(self.0.stdout.take().unwrap());
        let line = tokio::task::spawn_blocking(move || {
            let mut line = String::new();
            said.read_line(&mut line).unwrap();
            line
        });
        let line = line.await.unwrap();
        assert!(line.starts_with("holding "), "it ended: {line:?}");
    }

    /// `kill -9`.
    fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Life {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

const PENDING: i64 = 1;
const DONE: i64 = 2;

/// The second life finishes it with the key of the first, and the server has charged once.
async fn finishes(world: &World, requests: usize, attempts: i64) {
    let (first_key, state, _) = world.row().await;
    assert_eq!(state, PENDING);
    let said = world.next().await;
    assert!(said.contains("A-17: done 201 Created ch_1"), "{said}");
    assert_eq!(world.row().await, (first_key.clone(), DONE, attempts));

    let keys = world.shop.keys();
    assert_eq!(keys.len(), 1);
    assert_eq!(keys[0].as_bytes(), first_key);
    let charges = world.shop.charges();
    assert_eq!((charges.len(), world.shop.requests().len()), (1, requests));
    assert_eq!(
        &charges[0].body[..],
        br#"{"amount_satang":25000,"order_id":"A-17"}"#
    );
    // There is nothing left to do.
    assert_eq!(world.next().await, "0 pending, 1 done, 0 refused\n");
    assert_eq!(world.shop.requests().len(), requests);
}

// X1: over a process restart.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_between_the_outbox_and_the_first_attempt_it_is_sent_by_the_next_process() {
    let world = World::new().await;
    let mut merchant = world.charges("A-17", "before-send");
    merchant.holds().await;
    assert_eq!(world.row().await.2, 0);
    merchant.kill();
    assert_eq!(world.shop.requests().len(), 0);
    finishes(&world, 1, 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_between_the_attempt_and_its_answer_the_next_process_gets_the_replay() {
    let world = World::new().await;
    world.shop.close_gate();
    let mut merchant = world.charges("A-17", "");
    eventually("the charge", || world.shop.charges().len() == 1).await;
    merchant.kill();
    world.shop.open_gate();
    finishes(&world, 2, 2).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_between_the_answer_and_its_record_the_next_process_gets_the_replay() {
    let world = World::new().await;
    let mut merchant = world.charges("A-17", "before-recording");
    merchant.holds().await;
    assert_eq!(world.shop.charges().len(), 1);
    merchant.kill();
    finishes(&world, 2, 2).await;
}

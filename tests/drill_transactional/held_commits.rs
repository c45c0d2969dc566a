//! Commits that Postgres carries out and does not acknowledge, for a while: as when a synchronous standby
//! is away. Whoever waits for them gives up, or the server goes down before they are told.

use std::time::Duration;

use sqlx::{ConnectOptions, Executor, postgres::PgConnectOptions};
use tokio::{
    sync::watch,
    time::{sleep, timeout},
};

const HOLD: &str = "ALTER SYSTEM SET synchronous_standby_names = 'nobody'";
const LET_GO: &str = "ALTER SYSTEM RESET synchronous_standby_names";

/// Holds commits now and then, until it is over. Answers how often.
pub async fn hold(database: String, mut over: watch::Receiver<bool>) -> usize {
    let mut holds = 0;
    loop {
        let calm = Duration::from_millis(rand::random_range(1_000..6_000));
        if timeout(calm, over.wait_for(|over| *over)).await.is_ok() {
            return holds;
        }
        if set(&database, HOLD).await.is_ok() {
            holds += 1;
            sleep(Duration::from_millis(rand::random_range(300..2_500))).await;
        }
        // The server may be down, and would hold them again when it is back.
        while set(&database, LET_GO).await.is_err() {
            sleep(Duration::from_millis(20)).await;
        }
    }
}

async fn set(database: &str, statement: &'static str) -> sqlx::Result<()> {
    let options: PgConnectOptions = database.parse()?;
    let mut connection = options.connect().await?;
    connection.execute(statement).await?;
    connection.execute("SELECT pg_reload_conf()").await?;
    Ok(())
}

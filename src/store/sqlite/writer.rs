//! The writer: one connection, one transaction per batch.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use sqlx::{Connection, SqliteConnection};

use super::{
    Instance,
    schema::{Opened, pause},
    statements::GIVE_UP_LEASE,
    transaction,
};
use crate::{
    record::Owner,
    store::{
        StoreErrorKind,
        group::{Failure, Operation, Reach, Writer},
    },
};

const MIN_BACK_OFF: Duration = Duration::from_millis(20);
const MAX_BACK_OFF: Duration = Duration::from_secs(2);

pub(super) struct SqliteWriter {
    instance: Arc<Instance>,
    state: State,
}

enum State {
    Open(Opened),
    /// The connection was given up; not to be opened again before this time.
    Broken {
        retry: Instant,
        back_off: Duration,
        failure: Failure,
    },
}

impl SqliteWriter {
    pub(super) fn new(instance: Arc<Instance>, opened: Opened) -> Self {
        Self {
            instance,
            state: State::Open(opened),
        }
    }

    /// The connection, opened again when it is time to. Until then everybody hears at once why not.
    async fn opened(&mut self) -> Result<&mut Opened, Failure> {
        if let State::Broken {
            retry,
            back_off,
            failure,
        } = &self.state
        {
            if Instant::now() < *retry {
                return Err(failure.clone());
            }
            let back_off = *back_off;
            match self.instance.database.reopen().await {
                Ok(opened) => self.state = State::Open(opened),
                Err(failure) => return Err(self.give_up(failure, back_off)),
            }
        }
        match &mut self.state {
            State::Open(opened) => Ok(opened),
            State::Broken { failure, .. } => Err(failure.clone()),
        }
    }

    fn give_up(&mut self, mut failure: Failure, back_off: Duration) -> Failure {
        // Whatever it was, the same again does not help before the next connection.
        failure.reach = Reach::Connection;
        tracing::warn!(kind = ?failure.kind, "the SQLite connection was given up: {}", failure.message);
        self.state = State::Broken {
            retry: Instant::now() + back_off,
            back_off: (back_off * 2).min(MAX_BACK_OFF),
            failure: failure.clone(),
        };
        failure
    }

    async fn attempt(&mut self, batch: &mut [Operation]) -> Result<(), Failure> {
        let instance = self.instance.clone();
        let opened = self.opened().await?;
        let mut committed = transaction::run(&mut opened.connection, &instance, batch).await;
        // Asked after the commit: what went into a file that nobody finds any more is no promise.
        if committed.is_ok() && !instance.database.is_current(opened) {
            committed = Err(Failure::new(
                StoreErrorKind::Unavailable,
                Reach::Connection,
                "the SQLite database file was moved, replaced or deleted; restore it",
            ));
        }
        match committed {
            Err(failure) if failure.reach == Reach::Connection => {
                Err(self.give_up(failure, MIN_BACK_OFF))
            }
            committed => committed,
        }
    }
}

impl Writer for SqliteWriter {
    async fn commit(&mut self, batch: &mut [Operation]) -> Result<(), Failure> {
        let deadline = Instant::now() + self.instance.database.busy_timeout();
        while let Err(failure) = self.attempt(batch).await {
            pause(failure, deadline).await?;
        }
        Ok(())
    }

    async fn close(mut self) -> Result<(), Failure> {
        let deadline = Instant::now() + self.instance.database.busy_timeout();
        let owner = self.instance.owner;
        let opened = self.opened().await?;
        while let Err(failure) = give_up_lease(&mut opened.connection, owner).await {
            pause(failure, deadline).await?;
        }
        if let State::Open(opened) = self.state {
            opened.connection.close().await?;
        }
        Ok(())
    }
}

async fn give_up_lease(connection: &mut SqliteConnection, owner: Owner) -> Result<(), Failure> {
    sqlx::query(GIVE_UP_LEASE)
        .bind(owner.as_bytes().to_vec())
        .execute(connection)
        .await?;
    Ok(())
}

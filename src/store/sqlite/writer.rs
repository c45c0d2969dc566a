//! The writer: one connection, one transaction per batch.

use std::{
    future::poll_fn,
    sync::Arc,
    task::Poll,
    time::{Duration, Instant},
};

use sqlx::{Connection, SqliteConnection};

use super::{
    Instance,
    failure::moved,
    reader::Reader,
    schema::{Opened, pause},
    statements::GIVE_UP_LEASE,
    transaction,
    turns::{PATIENCE, Place},
};
use crate::{
    bounded::within,
    observe::Database,
    record::Owner,
    store::{
        StoreError, StoreErrorKind,
        group::{Failure, Operation, Reach, Writer, fitting},
    },
};

/// How long a locked file is tried before newer operations are looked at.
const ROUND: Duration = Duration::from_millis(20);

/// How often it is looked, while the turn is another's, who has waited too long for it.
const LOOK: Duration = Duration::from_secs(1);

const MIN_BACK_OFF: Duration = Duration::from_millis(20);
const MAX_BACK_OFF: Duration = Duration::from_secs(2);

pub(super) struct SqliteWriter {
    instance: Arc<Instance>,
    state: State,
    place: Place,
    reader: Reader,
    /// Goes up with each transaction: only then is there something new to read.
    round: u64,
    /// Since when another process has had the file locked.
    locked: Option<Instant>,
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
            place: Place::default(),
            reader: Reader::default(),
            round: 1,
            locked: None,
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
        // Asked after the commit: the file may have been moved while it was written.
        if committed.is_ok() && !instance.database.is_current(opened) {
            committed = Err(moved());
        }
        match committed {
            Err(failure) if failure.reach == Reach::Connection => {
                Err(self.give_up(failure, MIN_BACK_OFF))
            }
            committed => committed,
        }
    }
}

impl SqliteWriter {
    /// Commits what fits one transaction. While another process has the file locked, answers what needs
    /// no write, and comes back before long: others may have come that need none.
    async fn write(&mut self, batch: &mut [Operation]) -> Result<(), Failure> {
        let started = Instant::now();
        loop {
            let fits = fitting(batch.iter());
            let part = &mut batch[..fits];
            let Err(failure) = self.attempt(part).await else {
                self.locked = None;
                self.round += 1;
                return Ok(());
            };
            part.iter_mut().for_each(Operation::take_back_answer);
            if failure.reach != Reach::Lock {
                self.locked = None;
                return Err(failure);
            }
            self.read(batch).await;
            self.give_up_waiting(batch, &failure);
            if batch.iter().any(Operation::is_answered) || started.elapsed() >= ROUND {
                return Ok(());
            }
            // SQLite has already waited for most locks; those that it does not wait for come back at once.
            tokio::task::yield_now().await;
        }
    }

    async fn read(&mut self, batch: &mut [Operation]) {
        self.reader.answer(&self.instance, batch, self.round).await;
    }

    /// Refuses what has waited for the lock for all of `busy_timeout`.
    fn give_up_waiting(&mut self, batch: &mut [Operation], failure: &Failure) {
        let busy_timeout = self.instance.database.busy_timeout();
        let locked = self.locked.get_or_insert_with(Instant::now).elapsed();
        for operation in batch {
            let waits = operation.waits_for().map(|waits| waits.min(locked));
            if waits >= Some(busy_timeout) {
                operation.answer_error(failure.error());
            }
        }
    }

    /// Gives the turn back, unless something is left that was there when it began: between the
    /// transactions of two handlers all of it is written.
    fn end_turn(&mut self, batch: &[Operation]) {
        let had = self.place.first_since().map(|since| since.elapsed());
        let mut left = batch.iter().filter_map(Operation::waits_for);
        let stays = left.any(|waits| had.is_none_or(|had| waits >= had));
        if !stays {
            self.place = Place::Elsewhere;
        }
    }
}

impl Writer for SqliteWriter {
    const DATABASE: Database = Database::Sqlite;
    /// More than fits one transaction: while the turn is a handler's, all are to be looked at.
    const MAX_BATCH: usize = 1_024;
    const MAX_BATCH_BYTES: usize = usize::MAX;
    const URGENT_FIRST: bool = true;

    async fn commit(&mut self, batch: &mut [Operation]) -> Result<(), Failure> {
        let turns = &self.instance.turns;
        let turn = poll_fn(|cx| Poll::Ready(self.place.poll_turn(turns, cx))).await;
        let done = match turn {
            Poll::Ready(()) => self.write(batch).await,
            Poll::Pending => {
                self.locked = None;
                self.read(batch).await;
                give_up_turn(batch);
                Ok(())
            }
        };
        match &done {
            // A part of the batch follows at once.
            Err(failure) if failure.reach == Reach::Value && batch.len() > 1 => {}
            Err(_) => self.place = Place::Elsewhere,
            Ok(()) => self.end_turn(batch),
        }
        done
    }

    /// Until the turn comes. When it has come, and another process has the file locked, not at all: one
    /// that comes by seldom hardly ever finds it free.
    async fn wait(&mut self, rest: Duration) {
        if !self.place.is_in_line() {
            return;
        }
        let turns = &self.instance.turns;
        let turn = poll_fn(|cx| self.place.poll_turn(turns, cx));
        match self.reader.has_failed() {
            true => {
                within(rest, turn).await;
            }
            // Or until there may be somebody who has waited too long.
            false => {
                within(LOOK, turn).await;
            }
        }
    }

    fn rest(&mut self) {
        self.place = Place::Elsewhere;
    }

    async fn close(mut self) -> Result<(), Failure> {
        let instance = self.instance.clone();
        let turn = poll_fn(|cx| self.place.poll_turn(&instance.turns, cx));
        // Without the turn the lease is given up if the file is not locked, and else left to lapse.
        within(PATIENCE, turn).await;
        let closed = self.give_up_lease().await;
        instance.turns.close();
        let kept = instance.turns.kept().take();
        if let Some(kept) = kept {
            kept.into_connection().close().await?;
        }
        if let Some(reader) = self.reader.into_connection() {
            reader.close().await?;
        }
        if let State::Open(opened) = self.state {
            opened.connection.close().await?;
        }
        closed
    }
}

/// A handler that never ends must not keep a store from being closed.
fn give_up_turn(batch: &mut [Operation]) {
    let held = || {
        StoreError::new(
            StoreErrorKind::Unavailable,
            "a handler has held its SQLite transaction for too long; look for a task that keeps the connection of its Tx",
        )
    };
    for operation in batch {
        if operation.waits_for() >= Some(PATIENCE) {
            operation.answer_error(held());
        }
    }
}

impl SqliteWriter {
    async fn give_up_lease(&mut self) -> Result<(), Failure> {
        let deadline = Instant::now() + self.instance.database.busy_timeout();
        let owner = self.instance.owner;
        let opened = self.opened().await?;
        while let Err(failure) = give_up_lease(&mut opened.connection, owner).await {
            pause(failure, deadline).await?;
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

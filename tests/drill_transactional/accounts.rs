//! The accounts, what each action does to them, and what has really been done.

use std::{
    collections::HashMap,
    hash::{DefaultHasher, Hash, Hasher},
};

use sqlx::{Executor, SqliteConnection, postgres::PgConnection};

const ACCOUNTS: u64 = 24;

/// What each account begins with. Little, so that some actions have to be declined.
pub const OPENING: i64 = 150;

/// What all of them begin with.
pub fn all_openings() -> i64 {
    OPENING * i64::try_from(ACCOUNTS).unwrap()
}

/// No constraint keeps an action from being entered twice, or an account from being overdrawn.
const TABLES: &str = "
    CREATE TABLE drill_accounts (id bigint PRIMARY KEY, balance bigint NOT NULL);
    CREATE TABLE drill_entries (
        action text NOT NULL, run text NOT NULL, account bigint NOT NULL, amount bigint NOT NULL
    );";

/// What an action asks for. It follows from the key, so that every attempt asks for the same.
pub struct Action {
    /// Account and amount, in the order in which they are entered: in any.
    pub entries: Vec<(i64, i64)>,
    /// Whether it is declined once and for all.
    pub declines_for_good: bool,
}

impl Action {
    pub fn of(key: &str) -> Self {
        let mut hasher = DefaultHasher::new();
        key.hash(&mut hasher);
        let mut random = hasher.finish();
        let mut choose = |of: u64| {
            let chosen = random % of;
            random /= of;
            i64::try_from(chosen).unwrap()
        };
        let amount = 20 + choose(100);
        let one = choose(ACCOUNTS);
        let other = (one + 1 + choose(ACCOUNTS - 1)) % i64::try_from(ACCOUNTS).unwrap();
        let entries = match choose(4) {
            0 => vec![(one, amount)],
            // In the long run the accounts are low.
            1 => vec![(one, -amount - amount / 4)],
            // Not in the order of accounts, so that two of them can lock each other out.
            2 => vec![(one, -amount), (other, amount)],
            _ => vec![(other, amount), (one, -amount)],
        };
        Self {
            entries,
            declines_for_good: choose(2) == 0,
        }
    }

    /// What this run of it enters.
    pub fn entered_by(&self, run: &str) -> Vec<Entry> {
        let entries = self.entries.iter();
        entries
            .map(|(account, amount)| (run.to_owned(), *account, *amount))
            .collect()
    }
}

/// What the database holds.
pub struct Books {
    /// By action, in no order.
    pub entries: HashMap<String, Vec<Entry>>,
    pub balances: HashMap<i64, i64>,
}

/// Run, account and amount.
pub type Entry = (String, i64, i64);

impl Books {
    fn of(entries: Vec<(String, String, i64, i64)>, balances: Vec<(i64, i64)>) -> Self {
        let mut by_action: HashMap<_, Vec<_>> = HashMap::new();
        for (action, run, account, amount) in entries {
            let entry: Entry = (run, account, amount);
            by_action.entry(action).or_default().push(entry);
        }
        Self {
            entries: by_action,
            balances: balances.into_iter().collect(),
        }
    }
}

/// For one database: sqlx's connections cannot be spoken of in general here.
macro_rules! accounts {
    ($open:ident, $read:ident, $connection:ty) => {
        pub async fn $open(connection: &mut $connection) {
            connection.execute(TABLES).await.unwrap();
            for account in 0..ACCOUNTS {
                sqlx::query("INSERT INTO drill_accounts (id, balance) VALUES ($1, $2)")
                    .bind(i64::try_from(account).unwrap())
                    .bind(OPENING)
                    .execute(&mut *connection)
                    .await
                    .unwrap();
            }
        }

        pub async fn $read(connection: &mut $connection) -> Books {
            let entries = sqlx::query_as("SELECT action, run, account, amount FROM drill_entries");
            let entries = entries.fetch_all(&mut *connection).await.unwrap();
            let balances = sqlx::query_as("SELECT id, balance FROM drill_accounts");
            Books::of(entries, balances.fetch_all(&mut *connection).await.unwrap())
        }
    };
}

accounts!(open_in_postgres, read_from_postgres, PgConnection);
accounts!(open_in_sqlite, read_from_sqlite, SqliteConnection);

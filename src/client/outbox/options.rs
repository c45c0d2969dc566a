//! What an outbox can be told.

use std::{fmt, sync::Arc, time::Duration};

use sqlx::Pool;

use super::{Form, Outbox, OutboxDatabase, Texts};

const DAY: Duration = Duration::from_secs(24 * 3_600);
const MINUTE: Duration = Duration::from_secs(60);

impl<DB: OutboxDatabase> Outbox<DB> {
    /// An outbox in the database of this pool, with the default options. The table must be there: see
    /// [`migrate`](Self::migrate).
    #[must_use]
    pub fn new(pool: Pool<DB>) -> Self {
        let table = "idempotency_outbox";
        Self {
            pool,
            texts: Arc::new(Texts::new(DB::DIALECT, table)),
            table: table.into(),
            form: Form::default(),
            key_lifetime: DAY,
            margin: None,
        }
    }

    /// The name of the table. Default `idempotency_outbox`.
    ///
    /// # Panics
    ///
    /// When it is not 1 to 40 ASCII letters, digits and underscores, or begins with a digit.
    #[must_use]
    pub fn table(mut self, name: &str) -> Self {
        let mut bytes = name.bytes();
        let first = bytes.next();
        let is_name = name.len() <= 40
            && first.is_some_and(|byte| byte.is_ascii_alphabetic() || byte == b'_')
            && bytes.all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
        assert!(
            is_name,
            "table must be 1 to 40 ASCII letters, digits and underscores and not begin with a digit, not {name:?}"
        );
        self.texts = Arc::new(Texts::new(DB::DIALECT, name));
        self.table = name.into();
        self
    }

    /// How long the server keeps a key, from the first request with it. Default 24 h. It bounds how long an
    /// operation may be sent, and says how long settled ones are kept at least. Where operations of one outbox go
    /// to several servers, take the shortest.
    ///
    /// # Panics
    ///
    /// When shorter than 1 ms, longer than 100 years, or not longer than a [`margin`](Self::margin) that was set
    /// before.
    #[must_use]
    pub fn key_lifetime(mut self, lifetime: Duration) -> Self {
        assert!(
            lifetime >= Duration::from_millis(1) && lifetime <= DAY * 36_500,
            "key_lifetime must be at least 1 ms and at most 100 years, not {lifetime:?}"
        );
        if let Some(margin) = self.margin {
            assert!(
                lifetime > margin,
                "key_lifetime must be longer than margin ({margin:?}), not {lifetime:?}"
            );
        }
        self.key_lifetime = lifetime;
        self
    }

    /// How long before the end of [`key_lifetime`](Self::key_lifetime) nothing is sent any more. Default 1 min, or
    /// a tenth of `key_lifetime` if that is shorter. It covers one attempt, to its arrival at the server, and what
    /// the clocks of server and database are apart: at least the
    /// [`attempt_timeout`](crate::client::RetryLayer::attempt_timeout).
    ///
    /// # Panics
    ///
    /// When shorter than 1 ms, or not shorter than `key_lifetime`. Set a longer `key_lifetime` first.
    #[must_use]
    pub fn margin(mut self, margin: Duration) -> Self {
        assert!(
            margin >= Duration::from_millis(1) && margin < self.key_lifetime,
            "margin must be at least 1 ms and shorter than key_lifetime ({:?}), not {margin:?}",
            self.key_lifetime
        );
        self.margin = Some(margin);
        self
    }

    /// Seals headers and body of each operation, and the recorded answer, with these keys. Default: they are stored
    /// as they are. Reference, key, method, URI, state, status, counts and times stay readable.
    ///
    /// A sealed value belongs to its reference, key, method and URI: where one of these was changed in the database,
    /// or the value moved to another row, it does not open, and is not sent. What is *not* noticed: a changed state,
    /// count, time, token or status; an answer that was taken out, or put back from an older copy of the same row; a
    /// row that was deleted, so that its reference can be begun anew with another key. Whoever can write to the
    /// table can do all that: permissions are against that, not sealing.
    ///
    /// Keys are rotated as those of a `SealedStore`: see [`sealing`](crate::sealing). One may be taken out when
    /// [`sealed_with`](Self::sealed_with) counts no row that needs it. A row that does not open is never sent, and
    /// stays as it is until the key is there.
    ///
    /// # Panics
    ///
    /// With [`hash_ids`](crate::SealingKeys::hash_ids): the key of an operation has to be read back to be sent.
    #[cfg(feature = "sealing")]
    #[must_use]
    pub fn sealed(mut self, keys: crate::SealingKeys) -> Self {
        assert!(
            !keys.hashes_ids(),
            "sealed: an outbox cannot have hash_ids, since it has to read its keys back"
        );
        self.form = Form::sealed(keys);
        self
    }

    pub(in crate::client) fn margin_or_default(&self) -> Duration {
        self.margin
            .unwrap_or_else(|| MINUTE.min(self.key_lifetime / 10))
    }

    /// How long after its beginning an operation may be sent.
    pub(super) fn window(&self) -> Duration {
        self.key_lifetime.saturating_sub(self.margin_or_default())
    }
}

impl<DB: OutboxDatabase> Clone for Outbox<DB> {
    fn clone(&self) -> Self {
        Self {
            pool: self.pool.clone(),
            texts: self.texts.clone(),
            table: self.table.clone(),
            form: self.form.clone(),
            key_lifetime: self.key_lifetime,
            margin: self.margin,
        }
    }
}

impl<DB: OutboxDatabase> fmt::Debug for Outbox<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Outbox")
            .field("table", &self.table)
            .field("key_lifetime", &self.key_lifetime)
            .field("margin", &self.margin_or_default())
            .field("form", &self.form)
            .finish_non_exhaustive()
    }
}

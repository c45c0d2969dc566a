-- The table of Outbox<Sqlite>. Outbox::migrate creates it by itself; this is for those who want to see it, or
-- to create it with a tool of their own.
--
-- Times are microseconds since the Unix epoch, by the database's clock.
--   state    1 pending, 2 done, 3 failed
--   request  headers and body, plain (first byte 1) or sealed (2)
--   result   the answer, plain (1) or sealed (2); status is there also where no answer was kept

CREATE TABLE IF NOT EXISTS "{table}" (
    reference TEXT    NOT NULL UNIQUE,
    key       BLOB    NOT NULL,
    method    TEXT    NOT NULL,
    uri       TEXT    NOT NULL,
    request   BLOB    NOT NULL,
    state     INTEGER NOT NULL,
    begun     INTEGER NOT NULL,
    attempts  INTEGER NOT NULL,
    attempted INTEGER,
    settled   INTEGER,
    status    INTEGER,
    result    BLOB,
    token     BLOB    NOT NULL
) STRICT;

-- What is still to be sent: few rows, whatever the size of the table.
CREATE INDEX IF NOT EXISTS "{table}_pending" ON "{table}" (begun, reference) WHERE state = 1;

-- What a purge looks for.
CREATE INDEX IF NOT EXISTS "{table}_settled" ON "{table}" (settled) WHERE state <> 1;

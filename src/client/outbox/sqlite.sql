-- The table of Outbox<Sqlite>. Outbox::migrate creates it by itself; this is for those who want to see it, or
-- to create it with a tool of their own.
--
-- Times are microseconds since the Unix epoch, by the database's clock.
--   state       1 pending, 2 done, 3 failed
--   turn        when it was last looked at to be sent: whoever has waited longest comes first
--   not_before  the server asked not to be tried again until then
--   held        since when nobody sends it, because the server ran it without a record
--   token       of its beginning, or of its last reopening: an answer to what was sent before changes nothing
--   request     headers and body, plain (first byte 1) or sealed (2)
--   result      the answer, plain (1) or sealed (2); status is there also where no answer was kept
--
-- What is large comes last, so that the rest is read without it.

CREATE TABLE IF NOT EXISTS "{table}" (
    reference  TEXT    NOT NULL UNIQUE,
    key        BLOB    NOT NULL,
    method     TEXT    NOT NULL,
    uri        TEXT    NOT NULL,
    state      INTEGER NOT NULL,
    begun      INTEGER NOT NULL,
    turn       INTEGER NOT NULL,
    attempts   INTEGER NOT NULL,
    attempted  INTEGER,
    not_before INTEGER,
    held       INTEGER,
    settled    INTEGER,
    status     INTEGER,
    token      BLOB    NOT NULL,
    request    BLOB    NOT NULL,
    result     BLOB
) STRICT;

-- What is still to be sent: few rows, whatever the size of the table. The names have a blank, which no outbox has in
-- its name, so that they are never those of another table.
CREATE INDEX IF NOT EXISTS "{table} pending" ON "{table}" (begun, reference) WHERE state = 1;
CREATE INDEX IF NOT EXISTS "{table} turn" ON "{table}" (turn, reference) WHERE state = 1;

-- What a purge looks for.
CREATE INDEX IF NOT EXISTS "{table} settled" ON "{table}" (settled) WHERE settled IS NOT NULL;

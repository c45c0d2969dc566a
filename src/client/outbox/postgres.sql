-- The table of Outbox<Postgres>. Outbox::migrate creates it by itself; this is for those who want to see it, or
-- to create it with a tool of their own.
--
-- Times are microseconds since the Unix epoch, by the server's clock: to_timestamp(begun / 1e6).
--   state       1 pending, 2 done, 3 failed
--   turn        when it was last looked at to be sent: whoever has waited longest comes first
--   not_before  the server asked not to be tried again until then
--   held        since when nobody sends it, because the server ran it without a record
--   token       of its beginning, or of its last reopening: an answer to what was sent before changes nothing
--   request     headers and body, plain (first byte 1) or sealed (2)
--   result      the answer, plain (1) or sealed (2); status is there also where no answer was kept

CREATE TABLE IF NOT EXISTS "{table}" (
    reference  text COLLATE "C" NOT NULL CONSTRAINT "{table} reference" PRIMARY KEY,
    key        bytea  NOT NULL,
    method     text   NOT NULL,
    uri        text   NOT NULL,
    state      bigint NOT NULL,
    begun      bigint NOT NULL,
    turn       bigint NOT NULL,
    attempts   bigint NOT NULL,
    attempted  bigint,
    not_before bigint,
    held       bigint,
    settled    bigint,
    status     bigint,
    token      bytea  NOT NULL,
    request    bytea  NOT NULL,
    result     bytea
);

-- What is still to be sent: few rows, whatever the size of the table. The names have a blank, which no outbox has in
-- its name, so that they are never those of another table.
CREATE INDEX IF NOT EXISTS "{table} pending" ON "{table}" (begun, reference) WHERE state = 1;
CREATE INDEX IF NOT EXISTS "{table} turn" ON "{table}" (turn, reference) WHERE state = 1;

-- What a purge looks for.
CREATE INDEX IF NOT EXISTS "{table} settled" ON "{table}" (settled) WHERE settled IS NOT NULL;

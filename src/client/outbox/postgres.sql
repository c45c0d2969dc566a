-- The table of Outbox<Postgres>. Outbox::migrate creates it by itself; this is for those who want to see it, or
-- to create it with a tool of their own.
--
-- Times are microseconds since the Unix epoch, by the server's clock: to_timestamp(begun / 1e6).
--   state    1 pending, 2 done, 3 failed
--   request  headers and body, plain (first byte 1) or sealed (2)
--   result   the answer, plain (1) or sealed (2); status is there also where no answer was kept

CREATE TABLE IF NOT EXISTS "{table}" (
    reference text COLLATE "C" NOT NULL PRIMARY KEY,
    key       bytea  NOT NULL,
    method    text   NOT NULL,
    uri       text   NOT NULL,
    request   bytea  NOT NULL,
    state     bigint NOT NULL,
    begun     bigint NOT NULL,
    attempts  bigint NOT NULL,
    attempted bigint,
    settled   bigint,
    status    bigint,
    result    bytea,
    token     bytea  NOT NULL
);

-- What is still to be sent: few rows, whatever the size of the table.
CREATE INDEX IF NOT EXISTS "{table}_pending" ON "{table}" (begun, reference) WHERE state = 1;

-- What a purge looks for.
CREATE INDEX IF NOT EXISTS "{table}_settled" ON "{table}" (settled) WHERE state <> 1;

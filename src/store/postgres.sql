-- The tables of PostgresStore, schema version 1. `PostgresStoreOptions::migrate` creates them by itself;
-- this file is for those who create tables with a tool of their own, or want to see them. With another
-- `table_prefix`, "idempotency" in the names below is that prefix.
--
-- In idempotency_records
--   mode   1 plain, 2 transactional
--   state  1 running, 2 completed, 3 abandoned, 4 released with checkpoints

CREATE TABLE idempotency_meta (
    name  text   NOT NULL PRIMARY KEY,
    value bigint NOT NULL
);

-- Until when each store instance is believed alive, besides the lease that each claim starts with
-- (lease_until below): heartbeats write here, and nothing else does, so the row is not rewritten with
-- every claim. A missing row and a lapsed one mean the same.
CREATE TABLE idempotency_owners (
    owner       bytea       NOT NULL PRIMARY KEY,
    alive_until timestamptz NOT NULL
) WITH (fillfactor = 50);

CREATE TABLE idempotency_records (
    scope            bytea       NOT NULL,
    key              bytea       NOT NULL,
    scheme           text        NOT NULL,
    fingerprint      bytea       NOT NULL,
    token            bytea       NOT NULL,
    owner            bytea       NOT NULL,
    attempt          integer     NOT NULL,
    mode             smallint    NOT NULL,
    state            smallint    NOT NULL,
    created          timestamptz NOT NULL,
    lease_until      timestamptz NOT NULL,
    run_until        timestamptz NOT NULL,
    completed        timestamptz,
    expires          timestamptz,
    response_expires timestamptz,
    request_id       text,
    status           smallint,
    response         bytea,
    PRIMARY KEY (scope, key)
) WITH (autovacuum_vacuum_scale_factor = 0.05, autovacuum_analyze_scale_factor = 0.05);

-- What is not completed: few rows, whatever the size of the table.
CREATE INDEX ON idempotency_records (created, scope, key) WHERE state <> 2;

-- What a purge looks for.
CREATE INDEX ON idempotency_records (expires) WHERE expires IS NOT NULL;
CREATE INDEX ON idempotency_records (response_expires)
    WHERE response_expires IS NOT NULL AND response IS NOT NULL;

-- In the order in which they were first saved. A checkpoint belongs to the record that was created
-- when it says, so those of a record that was deleted by hand are not taken for its successor's.
CREATE TABLE idempotency_checkpoints (
    scope   bytea       NOT NULL,
    key     bytea       NOT NULL,
    created timestamptz NOT NULL,
    name    text        NOT NULL,
    value   bytea       NOT NULL,
    ord     bigint      NOT NULL GENERATED ALWAYS AS IDENTITY,
    PRIMARY KEY (scope, key, created, name)
);

INSERT INTO idempotency_meta (name, value) VALUES ('schema', 1);

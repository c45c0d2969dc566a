-- The tables of SqliteStore, schema version 1. SqliteStore::open creates them by itself; this file
-- is for those who want to see them, or to create them beforehand.
--
-- Times are microseconds since the Unix epoch. In idempotency_records
--   mode   1 plain, 2 transactional
--   state  1 running, 2 completed, 3 abandoned, 4 released with checkpoints

CREATE TABLE idempotency_meta (
    name  TEXT    NOT NULL PRIMARY KEY,
    value INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- Until when each store instance is believed alive. A missing row and a lapsed one mean the same.
CREATE TABLE idempotency_owners (
    owner       BLOB    NOT NULL PRIMARY KEY,
    alive_until INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- The response stands last, so that whoever needs only the columns before it never reads it.
CREATE TABLE idempotency_records (
    id               INTEGER PRIMARY KEY,
    scope            BLOB    NOT NULL,
    key              BLOB    NOT NULL,
    scheme           TEXT    NOT NULL,
    fingerprint      BLOB    NOT NULL,
    token            BLOB    NOT NULL,
    owner            BLOB    NOT NULL,
    attempt          INTEGER NOT NULL,
    mode             INTEGER NOT NULL,
    state            INTEGER NOT NULL,
    created          INTEGER NOT NULL,
    run_until        INTEGER NOT NULL,
    completed        INTEGER,
    expires          INTEGER,
    response_expires INTEGER,
    request_id       TEXT,
    status           INTEGER,
    response         BLOB,
    UNIQUE (scope, key)
) STRICT;

-- What is not completed: few rows, whatever the size of the table.
CREATE INDEX idempotency_records_open ON idempotency_records (created) WHERE state <> 2;

-- What a purge looks for.
CREATE INDEX idempotency_records_due ON idempotency_records (expires) WHERE expires IS NOT NULL;
CREATE INDEX idempotency_responses_due ON idempotency_records (response_expires)
    WHERE response_expires IS NOT NULL AND response IS NOT NULL;

-- In the order in which they were first saved.
CREATE TABLE idempotency_checkpoints (
    ord    INTEGER PRIMARY KEY,
    record INTEGER NOT NULL,
    name   TEXT    NOT NULL,
    value  BLOB    NOT NULL,
    UNIQUE (record, name)
) STRICT;

-- Triggers, so that a record deleted by hand takes its checkpoints along (its id may be used
-- again) and the number of records stays true.
CREATE TRIGGER idempotency_record_added AFTER INSERT ON idempotency_records BEGIN
    UPDATE idempotency_meta SET value = value + 1 WHERE name = 'records';
END;
CREATE TRIGGER idempotency_record_removed AFTER DELETE ON idempotency_records BEGIN
    UPDATE idempotency_meta SET value = value - 1 WHERE name = 'records';
    DELETE FROM idempotency_checkpoints WHERE record = OLD.id;
END;

INSERT INTO idempotency_meta (name, value) VALUES ('schema', 1), ('records', 0);

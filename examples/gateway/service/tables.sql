CREATE TABLE IF NOT EXISTS deposits (
    id                  TEXT    PRIMARY KEY,
    merchant            TEXT    NOT NULL,
    -- Empty again once the key's lifetime is over.
    idempotency_key     BLOB,
    key_until_ms        INTEGER NOT NULL,
    merchant_reference  TEXT    NOT NULL,
    amount_minor        INTEGER NOT NULL CHECK (amount_minor > 0),
    currency            TEXT    NOT NULL,
    client_ip           TEXT    NOT NULL,
    created_at_ms       INTEGER NOT NULL,
    upload_token_sha256 BLOB    NOT NULL,
    -- The second barrier, should the layer's record of a key be lost.
    UNIQUE (merchant, idempotency_key)
) STRICT;
-- Not unique: a customer who was too late gets a second order for what he buys.
CREATE INDEX IF NOT EXISTS deposits_by_reference ON deposits (merchant, merchant_reference);

CREATE TABLE IF NOT EXISTS slips (
    id              TEXT    PRIMARY KEY,
    deposit         TEXT    NOT NULL REFERENCES deposits,
    merchant        TEXT    NOT NULL,
    idempotency_key BLOB,
    key_until_ms    INTEGER NOT NULL,
    note            TEXT,
    content_type    TEXT    NOT NULL,
    image           BLOB    NOT NULL,
    received_at_ms  INTEGER NOT NULL,
    UNIQUE (merchant, idempotency_key)
) STRICT;

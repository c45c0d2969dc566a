CREATE TABLE IF NOT EXISTS charges (
    id                 INTEGER PRIMARY KEY,
    client             BLOB    NOT NULL,
    idempotency_key    BLOB    NOT NULL,
    amount_minor       INTEGER NOT NULL,
    currency           TEXT    NOT NULL,
    status             TEXT    NOT NULL CHECK (status IN ('reserved', 'charged', 'declined')),
    provider_charge_id TEXT,
    -- What makes reserving repeatable. It also outlives the layer's record of the key.
    UNIQUE (client, idempotency_key),
    CHECK ((status = 'charged') = (provider_charge_id IS NOT NULL))
) STRICT;

-- Every charge is in exactly one of the three sums, or in none when it was declined. The CHECKs are a net:
-- what decides is the condition in the UPDATE, which can say why it refused.
CREATE TABLE IF NOT EXISTS budgets (
    client          BLOB    NOT NULL,
    currency        TEXT    NOT NULL,
    available_minor INTEGER NOT NULL CHECK (available_minor >= 0),
    reserved_minor  INTEGER NOT NULL DEFAULT 0 CHECK (reserved_minor >= 0),
    spent_minor     INTEGER NOT NULL DEFAULT 0 CHECK (spent_minor >= 0),
    PRIMARY KEY (client, currency)
) STRICT;

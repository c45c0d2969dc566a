-- Two instances may start at once, and CREATE TABLE IF NOT EXISTS alone does not bear that.
SELECT pg_advisory_xact_lock(20251130);

-- The CHECK is a net. What decides is the condition in the UPDATE, which can say why it refused.
CREATE TABLE IF NOT EXISTS wallet_accounts (
    id                 bigint PRIMARY KEY,
    balance_satang     bigint NOT NULL CHECK (balance_satang >= 0),
    label              text   NOT NULL,
    daily_limit_satang bigint NOT NULL DEFAULT 5000000,
    -- Of the settings: label and limit. It does not count movements of money.
    version            bigint NOT NULL DEFAULT 1
);

CREATE TABLE IF NOT EXISTS wallet_transfers (
    id            bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    from_wallet   bigint NOT NULL REFERENCES wallet_accounts,
    to_wallet     bigint NOT NULL REFERENCES wallet_accounts,
    amount_satang bigint NOT NULL,
    fee_satang    bigint NOT NULL
);

-- Every change of a balance, so that a balance is the sum of its entries.
CREATE TABLE IF NOT EXISTS wallet_ledger (
    id            bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    wallet_id     bigint NOT NULL REFERENCES wallet_accounts,
    amount_satang bigint NOT NULL,
    kind          text   NOT NULL,
    transfer_id   bigint REFERENCES wallet_transfers,
    entered_at    timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX IF NOT EXISTS wallet_ledger_by_day ON wallet_ledger (wallet_id, kind, entered_at);

CREATE TABLE IF NOT EXISTS wallet_payouts (
    id            bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    wallet_id     bigint NOT NULL REFERENCES wallet_accounts,
    amount_satang bigint NOT NULL,
    state         text   NOT NULL DEFAULT 'pending' CHECK (state IN ('pending', 'paid', 'failed'))
);
-- At most one payout of a wallet is pending.
CREATE UNIQUE INDEX IF NOT EXISTS wallet_payouts_pending
    ON wallet_payouts (wallet_id) WHERE state = 'pending';

-- The total is kept for those customers only whose rule is guarded by it.
CREATE TABLE IF NOT EXISTS wallet_customers (
    id           bigint PRIMARY KEY,
    guarded_by   text NOT NULL CHECK (guarded_by IN ('total', 'lock', 'serializable')),
    total_satang bigint CHECK (total_satang >= 0),
    CHECK ((guarded_by = 'total') = (total_satang IS NOT NULL))
);
-- One of the two may be overdrawn, as long as the other one makes up for it.
CREATE TABLE IF NOT EXISTS wallet_customer_accounts (
    customer_id    bigint NOT NULL REFERENCES wallet_customers,
    kind           text   NOT NULL CHECK (kind IN ('savings', 'checking')),
    balance_satang bigint NOT NULL,
    PRIMARY KEY (customer_id, kind)
);
CREATE TABLE IF NOT EXISTS wallet_customer_withdrawals (
    id            bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    customer_id   bigint NOT NULL,
    kind          text   NOT NULL,
    amount_satang bigint NOT NULL,
    FOREIGN KEY (customer_id, kind) REFERENCES wallet_customer_accounts
);

-- Wallet 0 is the house's, which the fees go to.
INSERT INTO wallet_accounts (id, label, balance_satang) VALUES (0, 'house', 0)
    ON CONFLICT DO NOTHING;
WITH opened AS (
    INSERT INTO wallet_accounts (id, label, balance_satang)
        SELECT n, 'wallet ' || n, 10000000 FROM generate_series(1, 10) AS n
        ON CONFLICT DO NOTHING
        RETURNING id, balance_satang
)
INSERT INTO wallet_ledger (wallet_id, amount_satang, kind)
    SELECT id, balance_satang, 'opening' FROM opened;

WITH opened AS (
    INSERT INTO wallet_customers (id, guarded_by, total_satang)
        VALUES (1, 'total', 10000000), (2, 'lock', NULL), (3, 'serializable', NULL)
        ON CONFLICT DO NOTHING
        RETURNING id
)
INSERT INTO wallet_customer_accounts (customer_id, kind, balance_satang)
    SELECT id, kind, 5000000 FROM opened, (VALUES ('savings'), ('checking')) AS kinds (kind);

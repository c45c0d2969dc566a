-- Decides most claims: on keys without a record, and on records that stand in the way. What else there
-- is to decide comes back as 0, for take.sql. Small, because it is all a first request waits for: each
-- step of a plan costs, whether it has rows or not.
--
-- It never waits for another session's open change of a row, as an INSERT alone would. The arrays are
-- sorted by scope and key, so that all sessions insert in one order.
WITH wanted AS MATERIALIZED (
    SELECT * FROM unnest(
        $2::bytea[], $3::bytea[], $4::text[], $5::bytea[], $6::bytea[], $7::bytea[], $8::smallint[],
        $9::text[], $10::interval[], $11::interval[], $12::interval[]
    ) WITH ORDINALITY AS w (
        scope, key, scheme, fingerprint, token, replaces, mode,
        request_id, lease, max_run, expires_after, ord
    )
), seen AS MATERIALIZED (
    SELECT w.ord, w.token AS claim, w.replaces, r.*, r.state IN (3, 4) OR r.state = 1 AND (
        r.run_until <= clock_timestamp() OR r.lease_until <= clock_timestamp() AND NOT EXISTS (
            SELECT FROM idempotency_owners o
            WHERE o.owner = r.owner AND o.alive_until > clock_timestamp()
        )
    ) AS claimable
    FROM wanted w JOIN idempotency_records r ON r.scope = w.scope AND r.key = w.key
), made AS (
    INSERT INTO idempotency_records (
        scope, key, scheme, fingerprint, token, owner, attempt, mode, state,
        created, lease_until, run_until, expires, request_id
    )
    SELECT scope, key, scheme, fingerprint, token, $1, 1, mode, 1,
        now, now + lease, now + max_run, now + expires_after, request_id
    FROM (
        SELECT *, clock_timestamp() AS now FROM wanted WHERE ord NOT IN (SELECT ord FROM seen)
    ) new
    ON CONFLICT (scope, key) DO NOTHING
    RETURNING token
)
SELECT
    scheme, fingerprint, token, owner, attempt, mode, state, created, run_until, completed, expires,
    response_expires, request_id, status,
    CASE WHEN state = 2 AND (response_expires IS NULL OR response_expires > clock_timestamp())
        AND octet_length(response) <= 65536 THEN response END AS response,
    ord,
    CASE
        WHEN expires <= clock_timestamp() OR state = 1 AND token = claim THEN 0
        WHEN state = 2 AND octet_length(response) > 65536 THEN 6 -- completed; large
        WHEN state = 2 THEN 3 -- completed
        WHEN NOT claimable THEN 2 -- in flight
        WHEN token = replaces THEN 0
        ELSE 4 -- abandoned
    END AS outcome
FROM seen
UNION ALL
SELECT
    NULL, NULL, token, NULL, 1, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
    NULL, 1 -- won
FROM made

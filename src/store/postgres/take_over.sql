-- Takes an abandoned record over, in order to find out what its run did. It never waits for a locked row:
-- while somebody else has it locked, it may be completed, or taken, this very moment. $4 is the token it
-- has, $5 the one it gets, $6 how long that holds.
WITH clock AS MATERIALIZED (
    SELECT clock_timestamp() AS now
), seen AS MATERIALIZED ( -- What the snapshot shows; takes no lock.
    SELECT r.scope, r.key, r.attempt,
        -- Sent again, since the answer was lost.
        r.token = $5 AND r.state = 1 AND r.run_until > clock.now
            AND (r.expires IS NULL OR r.expires > clock.now) AS again,
        r.token = $4 AND $4 <> $5 AND (r.expires IS NULL OR r.expires > clock.now)
            AND (r.state = 3 OR r.state = 1 AND (r.run_until <= clock.now OR r.lease_until <= clock.now AND NOT EXISTS (
                SELECT FROM idempotency_owners o WHERE o.owner = r.owner AND o.alive_until > clock.now
            ))) AS abandoned
    FROM clock JOIN idempotency_records r ON r.scope = $2 AND r.key = $3
), free AS MATERIALIZED ( -- The row to take, locked, unless somebody else has locked it.
    SELECT r.scope, r.key
    FROM seen s CROSS JOIN clock JOIN idempotency_records r ON r.scope = s.scope AND r.key = s.key
    WHERE s.abandoned
        -- Asked again of the locked row: since the snapshot it may have been completed, or taken.
        AND r.token = $4 AND (r.expires IS NULL OR r.expires > clock.now)
        AND (r.state = 3 OR r.state = 1 AND (r.run_until <= clock.now OR r.lease_until <= clock.now AND NOT EXISTS (
            SELECT FROM idempotency_owners o WHERE o.owner = r.owner AND o.alive_until > clock.now
        )))
    FOR UPDATE OF r SKIP LOCKED
), taken AS (
    UPDATE idempotency_records r SET
        token = $5, owner = $1, state = 1, lease_until = clock.now + $6, run_until = clock.now + $6
    FROM free f CROSS JOIN clock
    WHERE r.scope = f.scope AND r.key = f.key
    RETURNING r.attempt
)
SELECT s.attempt, t.attempt IS NOT NULL OR s.again AS held
FROM seen s LEFT JOIN taken t ON true
WHERE s.again OR s.abandoned

-- Decides claims, those too that take a row over because it is expired, abandoned or released. Never
-- waits for another session's open change of a row. The arrays are sorted by scope and key, so that all
-- sessions insert in one order.
WITH clock AS MATERIALIZED (
    SELECT clock_timestamp() AS now
), wanted AS MATERIALIZED (
    SELECT * FROM unnest(
        $2::bytea[], $3::bytea[], $4::text[], $5::bytea[], $6::bytea[], $7::bytea[], $8::smallint[],
        $9::text[], $10::interval[], $11::interval[], $12::interval[]
    ) WITH ORDINALITY AS w (
        scope, key, scheme, fingerprint, token, replaces, mode,
        request_id, lease, max_run, expires_after, ord
    )
), seen AS MATERIALIZED ( -- What the snapshot shows; takes no lock.
    SELECT w.ord, w.token AS claim, w.replaces, r.*,
        coalesce(r.expires <= clock.now, false) AS expired,
        r.state IN (3, 4) OR r.state = 1 AND (r.run_until <= clock.now OR r.lease_until <= clock.now AND NOT EXISTS (
            SELECT FROM idempotency_owners o WHERE o.owner = r.owner AND o.alive_until > clock.now
        )) AS claimable
    FROM wanted w CROSS JOIN clock JOIN idempotency_records r ON r.scope = w.scope AND r.key = w.key
), free AS MATERIALIZED ( -- Rows to take, locked, without those somebody else has locked.
    SELECT s.ord, r.scope, r.key, coalesce(r.expires <= clock.now, false) AS expired
    FROM seen s CROSS JOIN clock JOIN idempotency_records r ON r.scope = s.scope AND r.key = s.key
    WHERE (s.expired OR s.claimable AND s.token = s.replaces AND NOT (s.state = 1 AND s.token = s.claim))
        -- Asked again of the locked row: since the snapshot it may have been completed, or taken.
        AND (r.expires <= clock.now OR r.token = s.replaces AND (
            r.state IN (3, 4) OR r.state = 1 AND (r.run_until <= clock.now OR r.lease_until <= clock.now AND NOT EXISTS (
                SELECT FROM idempotency_owners o WHERE o.owner = r.owner AND o.alive_until > clock.now
            ))
        ))
    ORDER BY s.ord FOR UPDATE OF r SKIP LOCKED
), took AS (
    UPDATE idempotency_records r SET
        scheme = w.scheme, fingerprint = w.fingerprint, token = w.token, owner = $1,
        attempt = CASE WHEN f.expired THEN 1 ELSE least(r.attempt, 2147483646) + 1 END,
        mode = w.mode, state = 1,
        created = CASE WHEN f.expired THEN clock.now ELSE r.created END,
        lease_until = clock.now + w.lease, run_until = clock.now + w.max_run, completed = NULL, expires = clock.now + w.expires_after,
        response_expires = NULL,
        request_id = CASE WHEN f.expired THEN w.request_id ELSE r.request_id END,
        status = NULL, response = NULL
    FROM free f JOIN wanted w USING (ord) CROSS JOIN clock
    WHERE r.scope = f.scope AND r.key = f.key
    RETURNING f.ord, r.attempt, r.request_id
), cleared AS ( -- An expired record takes its checkpoints along.
    DELETE FROM idempotency_checkpoints c USING free f
    WHERE f.expired AND c.scope = f.scope AND c.key = f.key
), made AS (
    INSERT INTO idempotency_records (
        scope, key, scheme, fingerprint, token, owner, attempt, mode, state,
        created, lease_until, run_until, expires, request_id
    )
    SELECT w.scope, w.key, w.scheme, w.fingerprint, w.token, $1, 1, w.mode, 1,
        clock.now, clock.now + w.lease, clock.now + w.max_run, clock.now + w.expires_after, w.request_id
    FROM wanted w CROSS JOIN clock
    WHERE NOT EXISTS (SELECT FROM seen s WHERE s.ord = w.ord)
    ORDER BY w.ord
    ON CONFLICT (scope, key) DO NOTHING
    RETURNING scope, key, token
), again AS MATERIALIZED ( -- Claims sent again, whose acknowledgement was lost.
    SELECT s.ord, w.lease FROM seen s JOIN wanted w USING (ord)
    WHERE s.state = 1 AND s.token = s.claim AND NOT s.expired
), won AS (
    SELECT w.ord, 1 AS attempt, w.request_id
    FROM made m JOIN wanted w ON w.token = m.token AND w.key = m.key AND w.scope = m.scope
    UNION ALL SELECT ord, attempt, request_id FROM took
), alive AS ( -- Their lease is counted from now, without a lock on the record.
    INSERT INTO idempotency_owners AS o (owner, alive_until)
    SELECT $1, clock_timestamp() + max(lease) FROM again HAVING count(*) > 0
    ON CONFLICT (owner) DO UPDATE SET alive_until = greatest(o.alive_until, excluded.alive_until)
)
SELECT
    s.scheme, s.fingerprint, s.token, s.owner, coalesce(o.attempt, s.attempt) AS attempt, s.mode,
    s.state, s.created, s.run_until, s.completed, s.expires, s.response_expires,
    CASE WHEN o.ord IS NULL THEN s.request_id ELSE o.request_id END AS request_id, s.status,
    CASE WHEN o.ord IS NULL AND s.state = 2 AND (s.response_expires IS NULL OR s.response_expires > clock.now)
        AND octet_length(s.response) <= 65536 THEN s.response END AS response,
    w.ord,
    CASE
        WHEN o.ord IS NOT NULL THEN 1 -- won
        WHEN a.ord IS NOT NULL THEN 5 -- won again
        WHEN s.ord IS NULL OR s.expired THEN 0 -- to be asked again: somebody else is at it
        WHEN s.state = 2 AND octet_length(s.response) > 65536 THEN 6 -- completed; large
        WHEN s.state = 2 THEN 3 -- completed
        WHEN NOT s.claimable THEN 2 -- in flight
        WHEN s.token = s.replaces THEN 0
        ELSE 4 -- abandoned
    END AS outcome
FROM wanted w CROSS JOIN clock LEFT JOIN seen s USING (ord) LEFT JOIN won o USING (ord)
LEFT JOIN again a USING (ord)

-- Completes and abandons a batch of runs, without ever waiting for a locked row: one that is locked is
-- missing in the answer. kind: 1 complete, 3 abandon. The arrays are sorted by scope and key.
-- attempt: what a run that is given back leaves at the most; nothing, where it leaves it as it is.
WITH held AS MATERIALIZED (
    SELECT w.*, r.state, clock_timestamp() AS now
    FROM unnest(
        $1::bytea[], $2::bytea[], $3::bytea[], $4::smallint[], $5::smallint[], $6::bytea[],
        $7::interval[], $8::interval[], $9::integer[]
    ) WITH ORDINALITY AS w (scope, key, token, kind, status, response, ttl, response_ttl, attempt, ord)
    JOIN idempotency_records r ON r.scope = w.scope AND r.key = w.key
    WHERE r.token = w.token
    ORDER BY w.ord FOR NO KEY UPDATE OF r SKIP LOCKED
), done AS (
    UPDATE idempotency_records r SET
        attempt = least(r.attempt, h.attempt),
        state = CASE h.kind WHEN 1 THEN 2 ELSE 3 END,
        completed = CASE h.kind WHEN 1 THEN h.now END,
        expires = CASE h.kind WHEN 1 THEN h.now + h.ttl ELSE r.expires END,
        response_expires = CASE h.kind WHEN 1 THEN h.now + h.response_ttl END,
        status = h.status, response = h.response
    FROM held h WHERE h.state IN (1, 3) AND r.scope = h.scope AND r.key = h.key
)
SELECT ord, state FROM held

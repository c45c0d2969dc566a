-- Releases a batch of claims, without ever waiting for a locked row: one that is locked is missing in the
-- answer. The arrays are sorted by scope and key. attempt: as in settle.sql.
WITH held AS MATERIALIZED (
    SELECT w.*, r.state, EXISTS (
        SELECT FROM idempotency_checkpoints c
        WHERE c.scope = w.scope AND c.key = w.key AND c.created = r.created
    ) AS saved
    FROM unnest(
        $1::bytea[], $2::bytea[], $3::bytea[], $4::interval[], $5::integer[]
    ) WITH ORDINALITY AS w (scope, key, token, ttl, attempt, ord)
    JOIN idempotency_records r ON r.scope = w.scope AND r.key = w.key
    WHERE r.token = w.token
    ORDER BY w.ord FOR UPDATE OF r SKIP LOCKED
), kept AS (
    UPDATE idempotency_records r SET
        state = 4, attempt = least(r.attempt, h.attempt), expires = clock_timestamp() + h.ttl
    FROM held h WHERE h.saved AND h.state IN (1, 3) AND r.scope = h.scope AND r.key = h.key
), gone AS (
    DELETE FROM idempotency_records r USING held h
    WHERE NOT h.saved AND h.state IN (1, 3) AND r.scope = h.scope AND r.key = h.key
)
SELECT ord, state FROM held

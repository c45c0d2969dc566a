-- Completes one record in the transaction of its handler, if the claim still holds it. The setting was made
-- by that transaction, and is gone with it: should the handler have ended it, this changes nothing.
UPDATE idempotency_records r SET
    state = 2, completed = clock.now, expires = clock.now + $4, response_expires = clock.now + $5,
    status = $6, response = $7
FROM (SELECT clock_timestamp() AS now OFFSET 0) clock
WHERE r.scope = $1 AND r.key = $2 AND r.token = $3 AND r.state IN (1, 3)
    AND current_setting('tower_idempotency.run', true) = $8

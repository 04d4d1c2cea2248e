-- Enters a running request that this server does not know: after it lost data, or granted while it was away.
-- Idempotent by request id; takes no notice of limits, since the request runs.
--
-- One that stands in the queue here leaves it; a grant in the post counts as claimed.
--
-- KEYS: epoch, offset, lease, deployment, credit, out
-- ARGV: epoch, request id, lease text, hold ('' without money), replica
--#common
local got = call('MGET', KEYS[1], KEYS[2])
if got[1] ~= ARGV[1] then return {EPOCH_CHANGED} end
local request, lease = ARGV[2], ARGV[3]
if ARGV[4] ~= '' and call('HSETNX', KEYS[6], request, ARGV[4]) == 1 then call('HINCRBY', KEYS[5], 'o', ARGV[4]) end
local member = request .. ' ' .. ARGV[5]
call('ZREM', P .. 'unclaimed', member)
local known = call('HGET', KEYS[3], request)
if known and string.sub(known, 1, 1) == 'G' then return {0} end
local v = parse(lease)
if known then
  leave_queue(v, member)
else
  count(v.concurrencies, 1)
end
call('HSET', KEYS[3], request, lease)
count(v.caps, 1)
call('HINCRBY', KEYS[4], 'inflight', 1)
call('HSET', KEYS[4], 'last_us', server_now(got[2]))
return {1}

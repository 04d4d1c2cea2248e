-- Enters a running request that this server does not know: after it lost data, or granted while it was away.
-- Idempotent by request id; takes no notice of limits, since the request runs.
--
-- KEYS: epoch, offset, lease, deployment, credit, out
-- ARGV: epoch, request id, lease text, hold ('' without money)
--#common
local got = call('MGET', KEYS[1], KEYS[2])
if got[1] ~= ARGV[1] then return {EPOCH_CHANGED} end
if ARGV[4] ~= '' and call('HSETNX', KEYS[6], ARGV[2], ARGV[4]) == 1 then call('HINCRBY', KEYS[5], 'o', ARGV[4]) end
if call('HSETNX', KEYS[3], ARGV[2], ARGV[3]) == 0 then return {0} end
local v = parse(ARGV[3])
count(v.caps .. ' ' .. v.concurrencies, 1)
call('HINCRBY', KEYS[4], 'inflight', 1)
call('HSET', KEYS[4], 'last_us', server_now(got[2]))
return {1}

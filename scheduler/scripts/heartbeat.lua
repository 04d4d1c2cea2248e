-- Says that a replica lives.
--
-- KEYS: epoch, offset, beat
-- ARGV: epoch, replica, time to live ms
-- Answer: {1, replicas alive, 0 when this one was unknown or taken for dead: its leases may be gone}
--#common
local got = call('MGET', KEYS[1], KEYS[2])
if got[1] ~= ARGV[1] then return {EPOCH_CHANGED} end
local now = server_now(got[2])
local known = alive(ARGV[2], now)
local now_ms = math.floor(now / 1000)
call('ZADD', KEYS[3], now_ms + ARGV[3], ARGV[2])
return {1, call('ZCOUNT', KEYS[3], '(' .. string.format('%.0f', now_ms), '+inf'), known and 1 or 0}

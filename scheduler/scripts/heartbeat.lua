-- Says that a replica lives.
--
-- KEYS: epoch, offset, beat
-- ARGV: epoch, replica, time to live ms
-- Answer: {1, replicas alive, 0 when this one was unknown or taken for dead: its leases may be gone}
local function heartbeat(keys, args)
  local got = call('MGET', keys[1], keys[2])
  if got[1] ~= args[1] then return {EPOCH} end
  local now = server_now(got[2])
  local known_alive = alive(args[2], now)
  local now_ms = floor(now / 1000)
  call('ZADD', keys[3], now_ms + args[3], args[2])
  call('HSET', LIBRARIES, args[2], function_name('recount'))
  return {1, call('ZCOUNT', keys[3], '(' .. string.format('%.0f', now_ms), '+inf'), known_alive and 1 or 0}
end

register('heartbeat', heartbeat, 'allow-oom')

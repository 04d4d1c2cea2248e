-- Every replica's duty each second: gives back the slots of dead replicas (the money of what they served stays until it
-- is posted), takes back grants nobody claimed, drops waiters past their deadline, grants what fits.
--
-- KEYS: epoch, offset, beat, unclaimed
-- ARGV: epoch, leases at most per call
-- Answer: {1, leases given back from dead replicas, 1 when there may be more}
--#common
local FORGET_MS = 3600000
local got = call('MGET', KEYS[1], KEYS[2])
if got[1] ~= ARGV[1] then return {EPOCH_CHANGED} end
local now, most, reaped = server_now(got[2]), tonumber(ARGV[2]), 0

local function reap(replica, expiry_ms)
  local lease = P .. 'lease:' .. replica
  local held = call('HRANDFIELD', lease, most - reaped, 'WITHVALUES')
  for i = 1, #held, 2 do
    local unserved = call('ZREM', KEYS[4], held[i] .. ' ' .. replica) == 1
    call('HDEL', lease, held[i])
    local v = parse(held[i + 1])
    give_back(v, held[i], replica, now, 0, unserved)
    if not unserved then note_owed(v, held[i], replica) end
    reaped = reaped + 1
  end
  if call('HLEN', lease) > 0 then return end
  call('DEL', P .. 'grants:' .. replica)
  if tonumber(expiry_ms) < now / 1000 - FORGET_MS then call('ZREM', KEYS[3], replica) end
end

local dead = call('ZRANGEBYSCORE', KEYS[3], '-inf', math.floor(now / 1000), 'WITHSCORES', 'LIMIT', 0, 64)
for i = 1, #dead, 2 do
  if reaped < most then reap(dead[i], dead[i + 1]) end
end

for _, member in ipairs(call('ZRANGEBYSCORE', KEYS[4], '-inf', now, 'LIMIT', 0, most)) do
  call('ZREM', KEYS[4], member)
  local request, replica = string.match(member, '^(%S+) (%S+)$')
  local lease = P .. 'lease:' .. replica
  local text = call('HGET', lease, request)
  if text then
    call('HDEL', lease, request)
    give_back(parse(text), request, replica, now, 0, true)
    call('RPUSH', P .. 'grants:' .. replica, 'X ' .. request)
  end
end

dispatch(now, nil, 100)
return {1, reaped, reaped >= most and 1 or 0}

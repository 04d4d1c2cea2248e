-- Every replica's duty each second: gives back the slots of dead replicas (the money, the tokens and the budgets of what
-- they served stay taken), takes back grants nobody claimed, drops waiters past their deadline, grants what fits, and
-- removes some counters that say nothing any more.
--
-- KEYS: epoch, offset, beat, unclaimed
-- ARGV: epoch, leases at most per call
-- Answer: {1, leases given back from dead replicas, 1 when there may be more, 1 when a recount is due}
local FORGET_MS = 3600000
local SWEEP = 100
local swept = new_record()

local function reap(epoch, replica, expiry_ms, most, now)
  local lease, count = P .. 'lease:' .. replica, 0
  for _, request in ipairs(call('HRANDFIELD', lease, most)) do
    local unserved = call('ZREM', P .. 'unclaimed', request .. ' ' .. replica) == 1
    drop(epoch, lease, request, replica, now, not unserved)
    count = count + 1
  end
  if call('HLEN', lease) == 0 then
    call('DEL', P .. 'grants:' .. replica)
    if tonumber(expiry_ms) < now / 1000 - FORGET_MS then
      call('ZREM', P .. 'beat', replica)
      call('HDEL', LIBRARIES, replica)
      call('ZREM', P .. 'blocks', replica)
    end
  end
  return count
end

-- Does a record or a cap say what a missing one says: nothing in flight, no rate whose window is not over?
local function says_nothing(key, now)
  if sub(key, 1, #P + 2) == P .. 'c:' then return call('GET', key) == '0' end
  open_record(swept, call('GET', key), 0)
  local width = (tonumber(string.match(key, ':w(%d+)$')) or 60) * 1000000 / BUCKETS
  for unit = 0, swept.units - 1 do
    if swept[unit].l + BUCKETS + 1 >= now / width then return false end
  end
  return swept.conc == 0
end

-- A few at a time. A budget stays: a missing one says nothing of what is spent.
local function sweep(now)
  local step = call('SCAN', call('GET', P .. 'swept') or '0', 'MATCH', P .. '[co]:*', 'COUNT', SWEEP)
  for _, key in ipairs(step[2]) do
    if not string.find(key, ':spend:', 1, true) and call('TYPE', key).ok == 'string' and says_nothing(key, now) then
      call('DEL', key)
    end
  end
  call('SET', P .. 'swept', step[1])
end

local function tick(keys, args)
  local epoch = args[1]
  local got = call('MGET', keys[1], keys[2], P .. 'recounted')
  if got[1] ~= epoch then return {EPOCH} end
  local now, most, reaped = server_now(got[2]), tonumber(args[2]), 0

  local dead = call('ZRANGEBYSCORE', keys[3], '-inf', floor(now / 1000), 'WITHSCORES', 'LIMIT', 0, 64)
  for i = 1, #dead, 2 do
    if reaped < most then reaped = reaped + reap(epoch, dead[i], dead[i + 1], most - reaped, now) end
  end

  for _, member in ipairs(call('ZRANGEBYSCORE', keys[4], '-inf', now, 'LIMIT', 0, most)) do
    call('ZREM', keys[4], member)
    local request, replica = string.match(member, '^(%S+) (%S+)$')
    local lease = P .. 'lease:' .. replica
    if call('HEXISTS', lease, request) == 1 then
      drop(epoch, lease, request, replica, now, false)
      call('RPUSH', P .. 'grants:' .. replica, 'X ' .. request)
    end
  end

  dispatch(epoch, now, nil, 100)
  for _, deployment in ipairs(call('ZRANGE', P .. 'queues', 0, 99)) do press(epoch, deployment, now) end
  if reaped < most then sweep(now) end
  return {1, reaped, reaped >= most and 1 or 0, recount_is_due(now, got[3]) and 1 or 0}
end

register('tick', tick, 'allow-oom')

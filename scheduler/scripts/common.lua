-- Shared by the scripts that give back: leases, the queue, grants.
--
-- A lease is text: state (G granted, W waiting) and tier, then, parted by '|': deployment, tenant ('' without money),
-- caps, concurrencies ("name=amount …"), rates ("name=amount=window µs …"); once it has waited also the rates'
-- buckets, the limits of the caps, and the deadline in µs.
local EPOCH_CHANGED = 6
local BUCKETS = 60
local CLAIM_US = 2000000
local call = redis.call
local P = '{tg}:'

local function server_now(offset)
  local time = call('TIME')
  return time[1] * 1000000 + time[2] + (tonumber(offset) or 0)
end

local function parse(text)
  local v = {state = string.sub(text, 1, 1), text = text}
  local fields = {}
  for field in string.gmatch(string.sub(text, 4) .. '|', '([^|]*)|') do fields[#fields + 1] = field end
  v.deployment, v.tenant, v.caps, v.concurrencies, v.rates = fields[1], fields[2], fields[3], fields[4], fields[5]
  v.buckets, v.limits, v.deadline = fields[6], fields[7], tonumber(fields[8])
  return v
end

-- Adds sign × amount to each counter; one that comes to nothing is removed.
local function count(texts, sign)
  local keys, amounts = {}, {}
  for name, amount in string.gmatch(texts, '([^ =]+)=(%d+)') do
    keys[#keys + 1] = P .. 'c:' .. name
    amounts[#amounts + 1] = amount * sign
  end
  if #keys == 0 then return end
  local held, set, gone = call('MGET', unpack(keys)), {}, {}
  for i, key in ipairs(keys) do
    local value = (tonumber(held[i]) or 0) + amounts[i]
    if value > 0 then
      set[#set + 1], set[#set + 2] = key, value
    else
      gone[#gone + 1] = key
    end
  end
  if #set > 0 then call('MSET', unpack(set)) end
  if #gone > 0 then call('DEL', unpack(gone)) end
end

-- A request that was never served does not count in the window either, when its bucket is still there.
local function give_back_rates(v)
  if not v.buckets then return end
  local buckets = string.gmatch(v.buckets, '%d+')
  for name, amount in string.gmatch(v.rates, '([^ =]+)=(%d+)=%d+') do
    local key, bucket = P .. 'c:' .. name, buckets()
    if call('HGET', key, 'l') == bucket then
      call('HINCRBY', key, 'k', -amount)
      call('HINCRBY', key, 'n', -amount)
    else
      local held = call('HGET', key, bucket)
      if held then
        local had, following = string.match(held, '(%d+) (%d+)')
        call('HSET', key, bucket, (had - amount) .. ' ' .. following)
        call('HINCRBY', key, 'n', -amount)
      end
    end
  end
end

-- The money of a request: '' leaves it, '-' removes it (nothing was used, no event will come), else what is charged.
local function settle(tenant, request, charge)
  if tenant == '' or charge == '' then return end
  local out, credit = P .. 'out:' .. tenant, P .. 'credit:' .. tenant
  local old = call('HGET', out, request)
  if not old then return end
  if charge == '-' then
    call('HDEL', out, request)
    if old ~= '0' then call('HINCRBY', credit, 'o', '-' .. old) end
  elseif charge ~= old then
    call('HSET', out, request, charge)
    call('HINCRBY', credit, 'o', string.format('%.0f', charge - old))
  end
end

local function head_changed(deployment)
  local head = call('ZRANGE', P .. 'q:' .. deployment, 0, 0, 'WITHSCORES')
  if head[1] then
    call('ZADD', P .. 'queues', head[2], deployment)
  else
    call('ZREM', P .. 'queues', deployment)
  end
end

local function leave_queue(v, member)
  if call('ZREM', P .. 'q:' .. v.deployment, member) == 1 then
    call('HINCRBY', P .. 'm:' .. v.deployment, 'waiting', -1)
    call('DECR', P .. 'waiters')
    head_changed(v.deployment)
  end
end

-- How long a waiter waits is told by the time between releases while there are waiters (moving average).
local function note_release(key, now, waiters)
  local load = call('HMGET', key, 'inflight', 'gap_us', 'released_us')
  local inflight = math.max(0, (tonumber(load[1]) or 0) - 1)
  if waiters == 0 then
    call('HSET', key, 'inflight', inflight, 'last_us', now)
    return
  end
  local gap = math.min(10000000, math.max(0, now - (tonumber(load[3]) or now)))
  gap = math.floor(0.8 * (tonumber(load[2]) or gap) + 0.2 * gap)
  call('HSET', key, 'inflight', inflight, 'last_us', now, 'gap_us', gap, 'released_us', now)
end

-- Gives back the slots of a lease that has just been removed. `unserved`: nothing was sent to an engine.
local function give_back(v, request, replica, now, waiters, unserved)
  if v.state == 'G' then
    count(v.caps .. ' ' .. v.concurrencies, -1)
    note_release(P .. 'm:' .. v.deployment, now, waiters)
  else
    count(v.concurrencies, -1)
    leave_queue(v, request .. ' ' .. replica)
  end
  if unserved or v.state == 'W' then
    give_back_rates(v)
    settle(v.tenant, request, '-')
  end
end

-- Notes whose money stays held for a served request that nobody will release any more.
local function note_owed(v, request, replica)
  if v.state == 'G' and v.tenant ~= '' then call('HSET', P .. 'owed:' .. replica, request, v.tenant) end
end

-- Returns 'fits', 'full' (this deployment must wait) or 'stop' (nobody can be granted).
local function room(v)
  local limits = string.gmatch(v.limits, '%d+')
  local load = call('HMGET', P .. 'm:' .. v.deployment, 'inflight', 'cap')
  local limit = tonumber(load[2]) or 0
  if limit > 0 and (tonumber(load[1]) or 0) >= limit then return 'full' end
  for name, amount in string.gmatch(v.caps, '([^ =]+)=(%d+)') do
    local held = tonumber(call('GET', P .. 'c:' .. name)) or 0
    if held + amount > tonumber(limits()) then return name == 'global' and 'stop' or 'full' end
  end
  return 'fits'
end

local function alive(replica, now)
  local expiry = call('ZSCORE', P .. 'beat', replica)
  return expiry and tonumber(expiry) * 1000 > now
end

-- Tries the waiter at the head of a deployment's queue: 'next' (granted or dropped), 'full', 'stop' or 'empty'.
local function dispatch_head(deployment, now)
  local queue = P .. 'q:' .. deployment
  local member = call('ZRANGE', queue, 0, 0)[1]
  if not member then
    call('ZREM', P .. 'queues', deployment)
    return 'empty'
  end
  local request, replica = string.match(member, '^(%S+) (%S+)$')
  local lease = P .. 'lease:' .. replica
  local text = call('HGET', lease, request)
  local v = parse(text or ('W0|' .. deployment .. '||||'))
  if not text or v.deadline <= now or not alive(replica, now) then
    call('HDEL', lease, request)
    give_back(v, request, replica, now, 0, true)
    call('RPUSH', P .. 'grants:' .. replica, 'X ' .. request)
    return 'next'
  end
  local fits = room(v)
  if fits ~= 'fits' then return fits end
  leave_queue(v, member)
  count(v.caps, 1)
  call('HINCRBY', P .. 'm:' .. deployment, 'inflight', 1)
  call('HSET', P .. 'm:' .. deployment, 'last_us', now)
  call('HSET', lease, request, 'G' .. string.sub(text, 2))
  call('ZADD', P .. 'unclaimed', now + CLAIM_US, member)
  call('RPUSH', P .. 'grants:' .. replica, 'G ' .. request)
  return 'next'
end

-- Grants what now fits, the oldest waiter first; `own` is the deployment that has just got room. Bounded: what is left
-- over comes with the next release or tick.
local function dispatch(now, own, queues_max)
  local budget = 16
  local deployments = call('ZRANGE', P .. 'queues', 0, queues_max - 1)
  if own and #deployments == queues_max then deployments[#deployments + 1] = own end
  local passed = {}
  while budget > 0 do
    local progress = false
    for _, deployment in ipairs(deployments) do
      if not passed[deployment] and budget > 0 then
        local result = dispatch_head(deployment, now)
        if result == 'stop' then return end
        if result == 'next' then
          budget, progress = budget - 1, true
          break
        end
        passed[deployment] = true
      end
    end
    if not progress then return end
    deployments = call('ZRANGE', P .. 'queues', 0, queues_max - 1)
    if own and #deployments == queues_max then deployments[#deployments + 1] = own end
  end
end

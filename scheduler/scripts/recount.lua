-- Counts anew what the counters say: requests in flight (of all, by deployment, by tenant, project and key, for all models
-- and for one), tokens held, requests and cost waiting. All of it follows from the leases; a difference is a fault of ours
-- or somebody's hand, and is told and set right.
--
-- A round is many short calls, and traffic goes on between them. First all leases are read, some at a time, into sums that
-- leases.lua keeps true from then on: a lease read before and gone since is taken off again, one made meanwhile is in. So at
-- any instant a counter is off if it is not its sum. Then the counters are compared, some at a time; last those for which
-- there is no lease at all, a part of the key space in each round. The sums stand in the memory of this library, so that a
-- call of a replica with another version of it would be missed: then there is no round.
--
-- KEYS: epoch, offset
-- ARGV: epoch, replica, leases read per call, 1 to begin whatever the time
-- Answer: {1, 0 nothing to do | 1 there is more | 2 done, then of each counter that was off: name, value, sum} or {6}
local COMPARED, SCANNED, SCANS_MAX = 100, 200, 100
local VERSION_SEEN_MS = 60000
local RECORD = P .. 'o:'
local rest = '0' -- how far the search for counters without leases has come, over rounds

-- Whether all replicas of late have this version of the library.
local function one_version(now)
  local replicas = call('ZRANGEBYSCORE', P .. 'beat', floor(now / 1000) - VERSION_SEEN_MS, '+inf', 'LIMIT', 0, 1000)
  if #replicas == 0 then return true end
  for _, version in ipairs(call('HMGET', LIBRARIES, unpack(replicas))) do
    if version ~= function_name('recount') then return false end
  end
  return true
end

local function begin_round(epoch, replica, now)
  call('SET', P .. 'recounted', now)
  round = {
    epoch = epoch, owner = replica, at = now, waiters = 0, scans = 0, cursor = '0', replica = 1, deployment = 0,
    seen = {}, sums = {}, listed = {}, loads = {}, deployments = {}, replicas = call('ZRANGE', P .. 'beat', 0, -1),
  }
end

local function read_leases(epoch, most)
  local lease = P .. 'lease:' .. round.replicas[round.replica]
  local step = call('HSCAN', lease, round.cursor, 'COUNT', most)
  round.reading = true
  for i = 1, #step[2], 2 do
    local request, text = step[2][i], step[2][i + 1]
    if round.seen[request] == nil then
      local id = sub(text, LEASE_SIZE + 1, LEASE_SIZE + FORM_ID_SIZE)
      note_made(#id == FORM_ID_SIZE and form_of(epoch, id), request, text)
    end
  end
  round.reading, round.cursor = false, step[1]
  if step[1] == '0' then round.replica = round.replica + 1 end
end

local function note_drift(found, name, value, sum)
  local n = #found
  found[n + 1], found[n + 2], found[n + 3] = name, value, sum
end

local function compare_counters(found, keys)
  if #keys == 0 then return end
  local values = call('MGET', unpack(keys))
  for i, key in ipairs(keys) do
    local text, sum = values[i], round.sums[key] or 0
    if sub(key, 1, #RECORD) == RECORD then -- requests at once are the first number of a record
      local value = text and unpack_struct('<d', text) or 0
      if value ~= sum then
        note_drift(found, sub(key, #P + 1), value, sum)
        call('SET', key, pack('<d', sum) .. sub(text or '', 9))
      end
    elseif (tonumber(text) or 0) ~= sum then
      note_drift(found, sub(key, #P + 1), tonumber(text) or 0, sum)
      call('SET', key, sum)
    end
  end
end

local LOAD_NAMES = {'inflight', 'waiting', 'tokens', 'waiting_batch', 'waiting_standard'}
local LOAD_PLACES = {1, 2, 4, 9, 10}
local NO_LEASES = {0, 0, 0, 0, 0, 0, 0, 0}

local function compare_load(found, deployment)
  local sums = round.loads[deployment] or NO_LEASES
  local key, turns_key = P .. 'm:' .. deployment, P .. 'd:' .. deployment
  local got = call('MGET', key, turns_key)
  local load, off = {read_load(got[1])}, false
  for i, place in ipairs(LOAD_PLACES) do
    if load[place] ~= sums[i] then
      note_drift(found, 'm:' .. deployment .. ':' .. LOAD_NAMES[i], load[place], sums[i])
      load[place], off = sums[i], true
    end
  end
  if off then
    call('SET', key, pack(LOAD, unpack(load, 1, LOAD_SIZE)))
    if load[2] > 0 then call('ZADD', P .. 'queues', 'NX', 0, deployment) end
  end
  if not got[2] and sums[WAITING] == 0 then return end
  local turns = parse_turns(got[2])
  off = false
  for tier = 0, 2 do
    local cost = sums[COST + tier]
    if turns[ASKED + tier] ~= cost then
      note_drift(found, 'd:' .. deployment .. ':cost', turns[ASKED + tier], cost)
      turns[ASKED + tier], off = cost, true
    end
  end
  if off then call('SET', turns_key, turns_text(turns)) end
end

-- Compares the next ones of the leases that were read; false when there is none left.
local function compare_next(found)
  local keys = {}
  while #keys < COMPARED and not round.all_compared do
    round.compared = next(round.listed, round.compared)
    round.all_compared = not round.compared
    keys[#keys + 1] = round.compared
  end
  if #keys > 0 then
    compare_counters(found, keys)
  elseif round.deployment < #round.deployments then
    local last = min(#round.deployments, round.deployment + 20)
    for i = round.deployment + 1, last do compare_load(found, round.deployments[i]) end
    round.deployment = last
  else
    return false
  end
  return true
end

-- Compares the next part of the key space: of what has no lease the sum is 0. A budget does not follow from leases.
local function compare_rest(found)
  local step = call('SCAN', rest, 'MATCH', P .. '[com]:*', 'COUNT', SCANNED)
  local keys = {}
  for _, key in ipairs(step[2]) do
    local name = sub(key, #P + 3)
    if sub(key, #P + 1, #P + 1) == 'm' then
      if not round.loads[name] then compare_load(found, name) end
    elseif not string.find(name, ':spend:', 1, true) then
      keys[#keys + 1] = key
    end
  end
  compare_counters(found, keys)
  rest, round.scans = step[1], round.scans + 1
  return rest ~= '0' and round.scans < SCANS_MAX
end

local function recount(keys, args)
  local epoch, replica, most = args[1], args[2], tonumber(args[3])
  local got = call('MGET', keys[1], keys[2], P .. 'recounted')
  if got[1] ~= epoch then return {EPOCH} end
  local now = server_now(got[2])
  if round and round.epoch ~= epoch then round = nil end
  if not round or (round.owner ~= replica and now - round.at > ROUND_STALE_US) then
    if not round and args[4] ~= '1' and not recount_is_due(now, got[3]) then return {1, 0} end
    if not one_version(now) then return {1, 0} end
    begin_round(epoch, replica, now)
  elseif round.owner ~= replica then
    return {1, 0}
  end
  round.at = now
  if round.replica <= #round.replicas then
    read_leases(epoch, most)
    return {1, 1}
  end
  if not one_version(now) then
    round = nil
    return {1, 0}
  end
  local found = {1, 1}
  if not round.begun then
    round.begun = true
    local waiters = tonumber(call('GET', P .. 'waiters')) or 0
    if waiters ~= round.waiters then
      note_drift(found, 'waiters', waiters, round.waiters)
      call('SET', P .. 'waiters', round.waiters)
    end
  end
  if not compare_next(found) and not compare_rest(found) then
    round, found[2] = nil, 2
  end
  return found
end

register('recount', recount, 'allow-oom')

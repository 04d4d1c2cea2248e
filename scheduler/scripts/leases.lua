-- The writers of leases: nothing else makes, grants or removes one. While a recount goes on (recount.lua) they also keep
-- its sums true, so that it is exact whatever comes and goes meanwhile; else that costs a look at a variable.
local INPUT_COST, CACHED_COST, OUTPUT_COST = 10, 1, 20 -- see queue.lua

-- `cached`: of the input, what an engine had in its prefix cache.
local function cost_of(input, output, cached)
  return INPUT_COST * input - (INPUT_COST - CACHED_COST) * min(cached, input) + OUTPUT_COST * output
end

local function parse(text)
  local state, kind, at, input, output, hold, deadline = unpack_struct(LEASE, text)
  return {
    state = state, kind = kind, tier = kind % KINDS, preempted = floor(kind / KINDS), at = at, input = input, output = output,
    hold = hold, deadline = deadline, cost = cost_of(input, output, 0),
  }
end

-- The recount that goes on; nil almost always. `seen`: request -> its form (false: unknown), of the leases that are in the
-- sums; `sums`: by key of a cap or record, of those that are not 0; `listed`: keys of the leases that were `reading`, which
-- are to be compared; `loads`: by deployment, in the order of `deployments`. So it holds what there are leases, however many
-- callers come and go meanwhile.
local round

-- What a deployment's leases come to: in flight, waiting, tokens in flight, of the waiting those of batch and of standard,
-- cost waiting by tier.
local INFLIGHT, WAITING, TOKENS, BATCH, COST = 1, 2, 3, 4, 6

local function add_to_sum(key, change)
  local sum = (round.sums[key] or 0) + change
  round.sums[key] = sum ~= 0 and sum or nil
  if round.reading then round.listed[key] = true end
end

local function sum_up(f, text, sign)
  local v, load = parse(text), round.loads[f.deployment]
  local granted, times = v.state ~= 'W', v.state == 'B' and v.deadline or 1 -- a block has many places
  if not load then
    load = {0, 0, 0, 0, 0, 0, 0, 0}
    round.loads[f.deployment] = load
    round.deployments[#round.deployments + 1] = f.deployment
  end
  if granted then
    load[INFLIGHT], load[TOKENS] = load[INFLIGHT] + sign * times, load[TOKENS] + sign * (v.input + v.output)
  else
    load[WAITING], round.waiters = load[WAITING] + sign, round.waiters + sign
    if v.tier < 2 then load[BATCH + v.tier] = load[BATCH + v.tier] + sign end
    load[COST + v.tier] = load[COST + v.tier] + sign * v.cost
  end
  local i = -1 -- the owner comes before the names
  for name in string.gmatch(sub(text, LEASE_SIZE + FORM_ID_SIZE + 1), '%S+') do
    i = i + 1
    if i > f.ncap + f.nrecord then break end
    local amount = 0
    if i > f.ncap then amount = f.records[i - f.ncap].conc elseif i > 0 and granted then amount = f.cap_amount[i] end
    if amount ~= 0 then add_to_sum(name, sign * amount * times) end
  end
end

local function note_made(f, request, text)
  round.seen[request] = f or false
  if f then sum_up(f, text, 1) end
end

local function note_gone(request, text)
  if round.seen[request] then sum_up(round.seen[request], text, -1) end
  round.seen[request] = nil
end

-- Makes a lease; false when there is one.
local function make_lease(f, lease, request, text)
  if call('HSETNX', lease, request, text) == 0 then return false end
  if round then note_made(f, request, text) end
  return true
end

-- Puts a lease in another's place (nil: none).
local function replace_lease(f, lease, request, before, text)
  call('HSET', lease, request, text)
  if round then
    if before then note_gone(request, before) end
    note_made(f, request, text)
  end
end

local function remove_lease(lease, request, text)
  call('HDEL', lease, request)
  if round then note_gone(request, text) end
end

-- A lease goes from waiting to running, or back.
local function change_lease(lease, request, before, text)
  call('HSET', lease, request, text)
  local f = round and round.seen[request]
  if f then
    sum_up(f, before, -1)
    sum_up(f, text, 1)
  end
end

-- Calls back what replicas have taken for this deployment ('*': for any) and not used. Who took nothing of late has nothing.
local function recall_blocks(deployment, now)
  for _, replica in ipairs(call('ZRANGEBYSCORE', P .. 'blocks', now - 2 * 1000000, '+inf')) do
    call('RPUSH', P .. 'grants:' .. replica, 'B ' .. deployment)
  end
end

local RECOUNT_EVERY_US, ROUND_STALE_US = 30000000, 5000000
local LIBRARIES = P .. 'libraries'

-- Whether somebody should begin a recount; one whose replica has gone silent is begun anew.
local function recount_is_due(now, recounted)
  if round then return now - round.at > ROUND_STALE_US end
  return now - (tonumber(recounted) or 0) >= RECOUNT_EVERY_US
end

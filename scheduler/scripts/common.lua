-- Shared by all functions of the library: what a request demands (its spec), rates, leases, money, the queue, grants.
-- The library is loaded once by the server, so what stands here is made once and not per call.
--
-- Spec: what every request of one caller on one deployment demands, as text (commands.py: spec_text). A call names it by
-- the hash of the text. The text is the key spec:<id>; what is made of it is kept here, for one life of the data.
--
-- Lease: what a request holds: state (G granted, W waiting), tier, then as doubles when it was admitted (server µs), the
-- input and output tokens taken, the hold (nano), until when it waits (µs); at the end the id of its spec.
local GRANTED, QUEUED, REFUSED, BUSY, UNKNOWN_CREDIT, EPOCH, SETTLING, UNKNOWN_BUDGET, UNKNOWN_SPEC = 1, 2, 3, 4, 5, 6, 7, 8, 9
local P = '{tg}:'
local BUCKETS = 60
local SLOTS = 64
local CLAIM_US = 2000000
local SPECS_MAX, SPEC_TTL_S, SPEC_CHECK_US = 12000, 21600, 3600000000
local KEEP, REMOVE = -2, -1
local LEASE, LEASE_SIZE = '<c1Bddddd', 42
local LOAD = '<dddddd'
local RATE = '<ddddd'

-- What the server lends only while a function runs is fetched by the first one.
local call, floor, ceil, max, min, pack, unpack_struct, sub
local COUNT, NEXT = {}, {} -- the field names of a ring's slots

local function begin()
  call, floor, ceil, max, min = redis.call, math.floor, math.ceil, math.max, math.min
  pack, unpack_struct, sub = struct.pack, struct.unpack, string.sub
  for slot = 0, SLOTS - 1 do
    COUNT[slot], NEXT[slot] = 'c' .. slot, 'n' .. slot
  end
end

local function register(name, callback, ...)
  local function run(keys, args)
    if not call then begin() end
    return callback(keys, args)
  end
  redis.register_function{function_name = function_name(name), callback = run, flags = {...}}
end

local set = {'MSET'} -- the command that a call is putting together

local function write(n)
  if n > 1 then call(unpack(set, 1, n)) end
end

local function server_now(offset)
  local time = call('TIME')
  return time[1] * 1000000 + time[2] + (tonumber(offset) or 0)
end

-- Specs ---------------------------------------------------------------------------------------------------------------

local young, old, known, life = {}, {}, 0, ''

-- `get` is the command that reads all a request is decided by, `back` what is needed to give it back:
-- get: epoch, offset, settle, waiters, load, caps…, concurrencies…, spends…, rates…
-- back: epoch, offset, waiters, load, caps…, concurrencies…, spends…, rates of tokens…
local function compile(text)
  local v = cmsgpack.unpack(text)
  local s = {
    deployment = v[1], tenant = v[2], limit = v[3], waiting_max = v[4], checked = 0,
    ncap = #v[5], nconc = #v[6], nspend = #v[7], nrate = #v[8], ntoken = 0,
    amount = {}, most = {}, hard = {}, rates = {}, tokens = {}, shown = {[0] = false, false, false},
    load = P .. 'm:' .. v[1], credit = P .. 'credit:' .. v[2], out = P .. 'out:' .. v[2],
  }
  local get = {'MGET', P .. 'epoch', P .. 'offset_us', P .. 'settle', P .. 'waiters', s.load}
  local back = {'MGET', P .. 'epoch', P .. 'offset_us', P .. 'waiters', s.load}
  local n = 0
  for part = 5, 7 do -- caps, concurrencies, spends: name, amount, limit, enforced
    for _, counter in ipairs(v[part]) do
      n = n + 1
      get[#get + 1], back[#back + 1] = P .. 'c:' .. counter[1], P .. 'c:' .. counter[1]
      s.amount[n], s.most[n], s.hard[n] = counter[2], counter[3], counter[4] == 1
      if part == 6 and s.hard[n] then s.shows_conc = true end
    end
  end
  s.ncount = n
  for i, rate in ipairs(v[8]) do -- name, amount, limit, window µs, unit, enforced
    get[#get + 1] = P .. 'c:' .. rate[1]
    local r = {
      key = P .. 'c:' .. rate[1], ring = P .. 'b:' .. rate[1], amount = rate[2], most = rate[3], window = rate[4],
      width = rate[4] / BUCKETS, unit = rate[5], hard = rate[6] == 1,
    }
    s.rates[i] = r
    if r.hard then s.shown[r.unit] = true end
    if r.unit > 0 then
      s.ntoken = s.ntoken + 1
      s.tokens[s.ntoken] = r
      back[#back + 1] = r.key
    end
  end
  s.get, s.back = get, back
  return s
end

local function remember(id, s)
  if known >= SPECS_MAX then
    old, young, known = young, {}, 0
  end
  young[id], known = s, known + 1
  return s
end

-- Returns the spec of this id, nil when nobody here knows it; `text` makes it known.
local function spec_of(epoch, id, text)
  if life == epoch then
    local s = young[id]
    if s then return s end
    s = old[id]
    if s then return remember(id, s) end
  elseif call('GET', P .. 'epoch') ~= epoch then
    return nil
  else
    young, old, known, life = {}, {}, 0, epoch
  end
  if text then
    call('SET', P .. 'spec:' .. id, text, 'EX', SPEC_TTL_S)
  else
    text = call('GET', P .. 'spec:' .. id)
    if not text then return nil end
  end
  return remember(id, compile(text))
end

-- Keeps the text of a spec in use from lapsing; false when it is gone.
local function keep_spec(s, id, now)
  if call('EXPIRE', P .. 'spec:' .. id, SPEC_TTL_S) == 0 then
    young[id], old[id] = nil, nil
    return false
  end
  s.checked = now + SPEC_CHECK_US
  return true
end

-- Rates ---------------------------------------------------------------------------------------------------------------

-- A rate counts in 60 buckets a window, linked from the oldest (h) to the newest (l); a bucket leaves 61 buckets after
-- it began, so no window ever holds more than the limit. The counter holds sum, h, l, count of the newest and the width
-- of a bucket in µs; the ring b:<rate> the others, in the slot bucket % 64: c<slot> the count, n<slot> the next bucket.
local function forget_buckets(ring, n, h, l, gone)
  while h <= gone and h ~= l do
    local slot = h % SLOTS
    local v = call('HMGET', ring, COUNT[slot], NEXT[slot])
    n, h = n - (tonumber(v[1]) or n), tonumber(v[2]) or l
  end
  return n, h
end

local function close_bucket(r, h, l, count, bucket)
  local slot = l % SLOTS
  call('HSET', r.ring, COUNT[slot], count, NEXT[slot], bucket)
  if h == l or floor(l / BUCKETS) ~= floor(bucket / BUCKETS) then
    call('PEXPIRE', r.ring, ceil(3 * r.window / 1000))
  end
end

local function seconds_until_gone(bucket, width, now)
  return max(1, ceil(((bucket + BUCKETS + 1) * width - now) / 1000000))
end

local function rate_retry_s(r, h, l, excess, now)
  while h ~= l do
    local slot = h % SLOTS
    local v = call('HMGET', r.ring, COUNT[slot], NEXT[slot])
    excess = excess - (tonumber(v[1]) or 0)
    if excess <= 0 then break end
    h = tonumber(v[2]) or l
  end
  return seconds_until_gone(h, r.width, now)
end

-- Adds d to the bucket of the instant `at`; returns the counter's new text, nil when the bucket has left the window.
local function adjust_rate(r, raw, at, d)
  if not raw then return nil end
  local n, h, l, k, width = unpack_struct(RATE, raw)
  local bucket = floor(at / r.width)
  if bucket == l then
    k = k + d
  elseif bucket >= h and bucket < l then
    call('HINCRBY', r.ring, COUNT[bucket % SLOTS], d)
  else
    return nil
  end
  return pack(RATE, n + d, h, l, k, width)
end

-- Adds `amount` now, whatever the limit.
local function take_rate(r, amount, now)
  local raw, bucket = call('GET', r.key), floor(now / r.width)
  local n, h, l, k = 0, bucket, bucket, 0
  if raw then
    n, h, l, k = unpack_struct(RATE, raw)
    if l <= bucket - BUCKETS - 1 then
      n, h, l, k = 0, bucket, bucket, 0
    else
      n, h = forget_buckets(r.ring, n, h, l, bucket - BUCKETS - 1)
    end
    if l < bucket then
      close_bucket(r, h, l, k, bucket)
      l, k = bucket, 0
    end
  end
  call('SET', r.key, pack(RATE, n + amount, h, l, k + amount, r.width))
end

-- Money ---------------------------------------------------------------------------------------------------------------

-- Brings what is outstanding for the request to `charge`; REMOVE: nothing was used and no event will come.
local function settle(credit, out, request, charge)
  if charge == KEEP then return end
  local held = call('HGET', out, request)
  if not held then return end
  if charge == REMOVE then
    call('HDEL', out, request)
    if held ~= '0' then call('HINCRBY', credit, 'o', '-' .. held) end
  elseif charge ~= tonumber(held) then
    call('HSET', out, request, charge)
    call('HINCRBY', credit, 'o', charge - held)
  end
end

-- The queue -----------------------------------------------------------------------------------------------------------

-- The load of a deployment: requests in flight and waiting, µs of the last grant or release, cap (0: none), µs between
-- releases under load, µs of the last release under load.
local function read_load(raw)
  if raw then return unpack_struct(LOAD, raw) end
  return 0, 0, 0, 0, 0, 0
end

local function head_changed(deployment)
  local head = call('ZRANGE', P .. 'q:' .. deployment, 0, 0, 'WITHSCORES')
  if head[1] then
    call('ZADD', P .. 'queues', head[2], deployment)
  else
    call('ZREM', P .. 'queues', deployment)
  end
end

local function leave_queue(s, member)
  if call('ZREM', P .. 'q:' .. s.deployment, member) == 1 then
    local inflight, waiting, last, cap, gap, released = read_load(call('GET', s.load))
    call('SET', s.load, pack(LOAD, inflight, max(0, waiting - 1), last, cap, gap, released))
    call('DECR', P .. 'waiters')
    head_changed(s.deployment)
  end
end

-- Gives back the slots of a lease that has just been removed, what of its tokens was not used (-1: as estimated), and of
-- its budgets what was not charged. `got` is the answer to `s.back`. `unserved`: nothing was sent to an engine.
local function give_back(s, text, got, now, charge, input, output, unserved)
  local state, _, at, had_input, had_output, hold = unpack_struct(LEASE, text)
  local n, granted = 1, state == 'G'
  if granted then
    local inflight, waiting, _, cap, gap, released = read_load(got[4])
    if (tonumber(got[3]) or 0) > 0 then -- how long a waiter waits is told by the time between releases (moving average)
      local since = released > 0 and min(10000000, max(0, now - released)) or 0
      gap, released = floor(0.8 * (gap > 0 and gap or since) + 0.2 * since), now
    end
    set[2], set[3], n = s.load, pack(LOAD, max(0, inflight - 1), waiting, now, cap, gap, released), 3
  end
  local keys, amounts = s.back, s.amount
  local first_spend = s.ncap + s.nconc + 1
  for i = granted and 1 or s.ncap + 1, first_spend - 1 do
    set[n + 1], set[n + 2] = keys[5 + i], max(0, (tonumber(got[4 + i]) or 0) - amounts[i])
    n = n + 2
  end
  if charge ~= KEEP then
    local difference = (charge == REMOVE and 0 or charge) - hold
    for i = first_spend, s.ncount do
      local spent = tonumber(got[4 + i])
      if spent then
        set[n + 1], set[n + 2] = keys[5 + i], max(0, spent + difference)
        n = n + 2
      end
    end
  end
  for i = 1, s.ntoken do
    local r = s.tokens[i]
    local d = 0
    if r.unit == 1 and input >= 0 then d = input - had_input elseif r.unit == 2 and output >= 0 then d = output - had_output end
    local value = d ~= 0 and adjust_rate(r, got[4 + s.ncount + i], at, d)
    if value then
      set[n + 1], set[n + 2] = r.key, value
      n = n + 2
    end
  end
  if unserved then -- it does not count as a request either
    for _, r in ipairs(s.rates) do
      local value = r.unit == 0 and adjust_rate(r, call('GET', r.key), at, -r.amount)
      if value then
        set[n + 1], set[n + 2] = r.key, value
        n = n + 2
      end
    end
  end
  write(n)
end

local function parse(text)
  local state, tier, at, input, output, hold, deadline = unpack_struct(LEASE, text)
  return {state = state, tier = tier, at = at, input = input, output = output, hold = hold, deadline = deadline}
end

-- Gives back everything of a lease that its replica cannot or need not speak for: `served` keeps what it took of money,
-- tokens and budgets, because nobody knows yet what it used.
local function drop(epoch, lease, request, replica, now, served)
  local text = call('HGET', lease, request)
  if not text then return nil end
  call('HDEL', lease, request)
  local s = #text > LEASE_SIZE and spec_of(epoch, sub(text, LEASE_SIZE + 1))
  if not s then return nil end
  if sub(text, 1, 1) == 'W' then
    leave_queue(s, request .. ' ' .. replica)
    served = false
  end
  local got = call(unpack(s.back))
  got[3] = 0 -- dead for who knows how long, it says nothing of the time between releases
  if served then
    give_back(s, text, got, now, KEEP, -1, -1, false)
    if s.tenant ~= '' then call('HSET', P .. 'owed:' .. replica, request, s.tenant) end
  else
    give_back(s, text, got, now, REMOVE, 0, 0, true)
    if s.tenant ~= '' then settle(s.credit, s.out, request, REMOVE) end
  end
  return s
end

-- Returns 'fits', 'full' (this deployment must wait) or 'stop' (nobody can be granted), and the counters read.
local function room(s)
  local got = call(unpack(s.back))
  local inflight, _, _, cap = read_load(got[4])
  if cap > 0 and inflight >= cap then return 'full' end
  for i = 1, s.ncap do
    if (tonumber(got[4 + i]) or 0) + s.amount[i] > s.most[i] then
      return s.back[5 + i] == P .. 'c:global' and 'stop' or 'full'
    end
  end
  return 'fits', got
end

local function alive(replica, now)
  local expiry = call('ZSCORE', P .. 'beat', replica)
  return expiry and tonumber(expiry) * 1000 > now
end

-- Tries the waiter at the head of a deployment's queue: 'next' (granted or dropped), 'full', 'stop' or 'empty'.
local function dispatch_head(epoch, deployment, now)
  local queue = P .. 'q:' .. deployment
  local member = call('ZRANGE', queue, 0, 0)[1]
  if not member then
    call('ZREM', P .. 'queues', deployment)
    return 'empty'
  end
  local request, replica = string.match(member, '^(%S+) (%S+)$')
  local lease = P .. 'lease:' .. replica
  local text = call('HGET', lease, request)
  local s = text and #text > LEASE_SIZE and spec_of(epoch, sub(text, LEASE_SIZE + 1))
  if not s or parse(text).deadline <= now or not alive(replica, now) then
    leave_queue(s or {deployment = deployment, load = P .. 'm:' .. deployment}, member)
    drop(epoch, lease, request, replica, now, false)
    call('RPUSH', P .. 'grants:' .. replica, 'X ' .. request)
    return 'next'
  end
  local fits, got = room(s)
  if fits ~= 'fits' then return fits end
  leave_queue(s, member)
  local inflight, waiting, _, cap, gap, released = read_load(call('GET', s.load))
  set[2], set[3] = s.load, pack(LOAD, inflight + 1, waiting, now, cap, gap, released)
  for i = 1, s.ncap do
    set[2 + 2 * i], set[3 + 2 * i] = s.back[5 + i], (tonumber(got[4 + i]) or 0) + s.amount[i]
  end
  write(3 + 2 * s.ncap)
  call('HSET', lease, request, 'G' .. sub(text, 2))
  call('ZADD', P .. 'unclaimed', now + CLAIM_US, member)
  call('RPUSH', P .. 'grants:' .. replica, 'G ' .. request)
  return 'next'
end

-- Grants what now fits, the oldest waiter first; `own` is the deployment that has just got room. Bounded: what is left
-- over comes with the next release or tick.
local function dispatch(epoch, now, own, queues_max)
  local budget = 16
  local deployments = call('ZRANGE', P .. 'queues', 0, queues_max - 1)
  if own and #deployments == queues_max then deployments[#deployments + 1] = own end
  local passed = {}
  while budget > 0 do
    local progress = false
    for _, deployment in ipairs(deployments) do
      if not passed[deployment] and budget > 0 then
        local result = dispatch_head(epoch, deployment, now)
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

-- Shared by all functions of the library: what a request demands (its spec), rates, leases, money, the queue, grants.
-- The library is loaded once by the server, so what stands here is made once and not per call.
--
-- Spec: what every request of one caller on one deployment demands, as text (commands.py: spec_text). A call names it by
-- the hash of the text. The text is the key spec:<id>; what is made of it is kept here, for one life of the data: the names
-- of its own, and its form, which all specs share that differ in nothing but names. So what a call looks at is mostly warm,
-- whoever calls: with 10,000 callers that is half of its time.
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
local FULL, TOO_LATE = 1, 2 -- why BUSY: no place to wait, or no hope to be served in time
local LEASE, LEASE_SIZE = '<c1Bddddd', 42
local LOAD, LOAD_SIZE = '<dddddddddd', 10
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

-- Returns the server's time in µs. `offset` is set by tests and the simulator only: µs to add, or '@' and the time itself.
local function server_now(offset)
  if offset and sub(offset, 1, 1) == '@' then return tonumber(sub(offset, 2)) end
  local time = call('TIME')
  return time[1] * 1000000 + time[2] + (tonumber(offset) or 0)
end

-- Specs ---------------------------------------------------------------------------------------------------------------

local young, old, known, life = {}, {}, 0, ''
local forms = {}

-- Returns what specs of this form have in common. Counters are in the order caps, concurrencies, spends. Of `get`, which
-- reads all that a request is decided by, the first `back` parts are what is needed to give it back.
local function form_of(v)
  local facts = {v[1], v[3], v[4], v[10]}
  for part = 5, 8 do
    for _, counter in ipairs(v[part]) do facts[#facts + 1] = {part, unpack(counter, 2)} end
  end
  facts = cmsgpack.pack(facts)
  local f = forms[facts]
  if f then return f end
  f = {
    deployment = v[1], limit = v[3], waiting_max = v[4], weight = v[10], load = P .. 'm:' .. v[1],
    ncap = #v[5], nconc = #v[6], ncount = #v[5] + #v[6] + #v[7], nrate = #v[8],
    amount = {}, most = {}, hard = {}, rates = {}, tokens = {}, shown = {[0] = false, false, false},
  }
  local n = 0
  for part = 5, 7 do -- name, amount, limit, enforced
    for _, counter in ipairs(v[part]) do
      n = n + 1
      f.amount[n], f.most[n], f.hard[n] = counter[2], counter[3], counter[4] == 1
      if part == 6 and f.hard[n] then f.shows_conc = true end
    end
  end
  f.back = 6 + n
  for i, rate in ipairs(v[8]) do -- name, amount, limit, window µs, unit, enforced
    local r = {
      amount = rate[2], most = rate[3], window = rate[4], width = rate[4] / BUCKETS, unit = rate[5], hard = rate[6] == 1,
    }
    f.rates[i] = r
    if r.hard then f.shown[r.unit] = true end
    if r.unit > 0 then
      f.tokens[#f.tokens + 1] = i
      f.back = 6 + n + i
    end
  end
  forms[facts] = f
  return f
end

-- `get`: MGET, epoch, offset, settle, waiters, load, then the counters and the rates of the form.
local function compile(text)
  local v = cmsgpack.unpack(text)
  local f = form_of(v)
  local get = {'MGET', P .. 'epoch', P .. 'offset_us', P .. 'settle', P .. 'waiters', f.load}
  for part = 5, 8 do
    for _, counter in ipairs(v[part]) do get[#get + 1] = P .. 'c:' .. counter[1] end
  end
  return {
    form = f, get = get, checked = 0, tenant = v[2], credit = P .. 'credit:' .. v[2], out = P .. 'out:' .. v[2],
    owner = v[9],
  }
end

local function read_back(s) return call(unpack(s.get, 1, s.form.back)) end

local function key_of(s, counter) return s.get[6 + counter] end

local function key_of_rate(s, i) return s.get[6 + s.form.ncount + i] end

local function remember(id, s)
  if known >= SPECS_MAX then
    old, young, known, forms = young, {}, 0, {}
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
    young, old, known, life, forms = {}, {}, 0, epoch, {}
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
local function ring_of(key) return P .. 'b:' .. sub(key, #P + 3) end

local function forget_buckets(key, n, h, l, gone)
  local ring = ring_of(key)
  while h <= gone and h ~= l do
    local slot = h % SLOTS
    local v = call('HMGET', ring, COUNT[slot], NEXT[slot])
    n, h = n - (tonumber(v[1]) or n), tonumber(v[2]) or l
  end
  return n, h
end

local function close_bucket(key, r, h, l, count, bucket)
  local slot, ring = l % SLOTS, ring_of(key)
  call('HSET', ring, COUNT[slot], count, NEXT[slot], bucket)
  if h == l or floor(l / BUCKETS) ~= floor(bucket / BUCKETS) then
    call('PEXPIRE', ring, ceil(3 * r.window / 1000))
  end
end

local function seconds_until_gone(bucket, width, now)
  return max(1, ceil(((bucket + BUCKETS + 1) * width - now) / 1000000))
end

local function rate_retry_s(key, r, h, l, excess, now)
  while h ~= l do
    local slot = h % SLOTS
    local v = call('HMGET', ring_of(key), COUNT[slot], NEXT[slot])
    excess = excess - (tonumber(v[1]) or 0)
    if excess <= 0 then break end
    h = tonumber(v[2]) or l
  end
  return seconds_until_gone(h, r.width, now)
end

-- Adds d to the bucket of the instant `at`; returns the counter's new text, nil when the bucket has left the window.
local function adjust_rate(key, r, raw, at, d)
  if not raw then return nil end
  local n, h, l, k, width = unpack_struct(RATE, raw)
  local bucket = floor(at / r.width)
  if bucket == l then
    k = k + d
  elseif bucket >= h and bucket < l then
    call('HINCRBY', ring_of(key), COUNT[bucket % SLOTS], d)
  else
    return nil
  end
  return pack(RATE, n + d, h, l, k, width)
end

-- Adds `amount` now, whatever the limit.
local function take_rate(key, r, amount, now)
  local raw, bucket = call('GET', key), floor(now / r.width)
  local n, h, l, k = 0, bucket, bucket, 0
  if raw then
    n, h, l, k = unpack_struct(RATE, raw)
    if l <= bucket - BUCKETS - 1 then
      n, h, l, k = 0, bucket, bucket, 0
    else
      n, h = forget_buckets(key, n, h, l, bucket - BUCKETS - 1)
    end
    if l < bucket then
      close_bucket(key, r, h, l, k, bucket)
      l, k = bucket, 0
    end
  end
  call('SET', key, pack(RATE, n + amount, h, l, k + amount, r.width))
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

-- As `settle`, for a lease that has just been given back, whose hold is what stands there unless it is posted already.
local function settle_hold(s, request, hold, charge)
  if charge < 0 then return settle(s.credit, s.out, request, charge) end
  if call('HSET', s.out, request, charge) == 1 then
    call('HDEL', s.out, request)
  elseif charge ~= hold then
    call('HINCRBY', s.credit, 'o', charge - hold)
  end
end

-- The load of a deployment --------------------------------------------------------------------------------------------

-- Requests in flight, requests waiting, µs of the last grant or release, tokens reserved by what is in flight, the cap of
-- requests as configured, the adaptive cap of requests and of tokens (each 0: none), saturation, of the waiting those of
-- batch and of standard.
local function read_load(raw)
  if raw then return unpack_struct(LOAD, raw) end
  return 0, 0, 0, 0, 0, 0, 0, 0, 0, 0
end

-- What a tier may fill of a cap: all of it is for priority alone, so that there is a place for it when it comes.
local CEILING = {[0] = 0.7, 0.9, 1.0}

local function ceiling(cap, tier)
  return max(1, floor(cap * CEILING[tier] + 0.000001))
end

-- The nearer of two caps of which 0 is none.
local function nearer(a, b)
  if a > 0 and (b <= 0 or a < b) then return a end
  return b
end

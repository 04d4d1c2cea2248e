-- Shared by all functions of the library: what a request demands (its form), records, rates, leases, money, the queue, grants.
-- The library is loaded once by the server, so what stands here is made once and not per call.
--
-- Form: what the requests of one caller on one deployment demand, without names, as text (commands.py: form_text). A call
-- names it by the hash of the text and brings the names as its KEYS. The text is the key form:<id>; what is made of it is
-- kept here, for one life of the data. Callers with equal limits share one form, so it is warm whoever calls, and nothing
-- is kept here of any caller: 100,000 of them cost what one does.
--
-- Caller (`s`): its form, its names (KEYS of its call: lease, caps, records, budgets, then credit and outstanding where
-- money is held), its owner. A lease has all three, so that it can be given back by whoever finds it.
--
-- Lease: what a request holds: state (G granted, W waiting; B: a block of many, see blocks.lua), its kind (tier plus KINDS for each time it was preempted), then
-- as doubles when it was admitted (server µs), the input and output tokens taken, the hold (nano), until when it waits (µs);
-- then the id of its form, its owner, its names.
local GRANTED, QUEUED, REFUSED, BUSY, UNKNOWN_CREDIT, EPOCH, SETTLING, UNKNOWN_BUDGET, UNKNOWN_FORM = 1, 2, 3, 4, 5, 6, 7, 8, 9
local NEWER_LAYOUT = 10
local LAYOUT = 4 -- of the keys below: raised by whoever changes what stands in them, so that no two meet in one life
local P = '{tg}:'
local BUCKETS = 60
local CLAIM_US = 2000000
local UNSERVED, KEEP, REMOVE = -3, -2, -1
local FULL, TOO_LATE = 1, 2 -- why BUSY: no place to wait, or no hope to be served in time
local LEASE, LEASE_SIZE, FORM_ID_SIZE = '<c1Bddddd', 42, 32
local KINDS, PREEMPTED_MAX = 4, 2
local LOAD, LOAD_SIZE = '<dddddddddd', 10

-- What the server lends only while a function runs is fetched by the first one.
local call, floor, ceil, max, min, pack, unpack_struct, sub, byte

local function begin()
  call, floor, ceil, max, min = redis.call, math.floor, math.ceil, math.max, math.min
  pack, unpack_struct, sub, byte = struct.pack, struct.unpack, string.sub, string.byte
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

-- Forms ---------------------------------------------------------------------------------------------------------------

local entitled_of -- in entitlements.lua
local form_of, keep_form
do -- Lua allows 200 local names in one block, so what only this section needs ends with it
local FORMS_MAX, FORM_TTL_S, FORM_CHECK_US = 12000, 21600, 3600000000
local young, old, known, life = {}, {}, 0, ''

-- Reads a form: deployment, limit, waiting_max, weight, caps, count of records, concurrencies, rates, budgets, 1 for money.
local function compile(text)
  local v = cmsgpack.unpack(text)
  local f = {
    deployment = v[1], limit = v[2], waiting_max = v[3], weight = v[4], load = P .. 'm:' .. v[1], checked = 0,
    ncap = #v[5], nrecord = v[6], nconc = #v[7], nrate = #v[8], nspend = #v[9], money = v[10] == 1,
    cap_amount = {}, cap_most = {}, records = {}, concs = {}, rates = {}, spends = {}, shown = {[0] = false, false, false},
    get = {'MGET', P .. 'epoch', P .. 'offset_us', P .. 'settle', P .. 'waiters', P .. 'm:' .. v[1]},
  }
  f.entitled = entitled_of(v[1], v[11])
  f.nread = f.ncap + f.nrecord + f.nspend + (f.money and 1 or 0)
  for i, cap in ipairs(v[5]) do f.cap_amount[i], f.cap_most[i] = cap[1], cap[2] end -- amount, limit
  for i = 1, f.nrecord do f.records[i] = {conc = 0, units = 0, takes = {[0] = 0, 0, 0}} end
  for i, conc in ipairs(v[7]) do -- record, amount, limit, enforced
    f.concs[i] = {record = conc[1], amount = conc[2], most = conc[3], hard = conc[4] == 1}
    f.records[conc[1]].conc = conc[2]
    f.shows_conc = f.shows_conc or conc[4] == 1
  end
  for i, rate in ipairs(v[8]) do -- record, amount, limit, window µs, unit, enforced
    local r = {
      record = rate[1], amount = rate[2], most = rate[3], window = rate[4], width = rate[4] / BUCKETS, unit = rate[5],
      hard = rate[6] == 1,
    }
    local record = f.records[r.record]
    f.rates[i], record.units, record.window, record.width = r, max(record.units, r.unit + 1), r.window, r.width
    record.counts = record.counts or {}
    record.counts[r.unit] = true
    if r.unit == 0 then record.takes[0] = r.amount end
    if r.hard then f.shown[r.unit] = true end
  end
  for i, spend in ipairs(v[9]) do f.spends[i] = {most = spend[1], hard = spend[2] == 1} end -- limit, enforced
  return f
end

local function remember(id, f)
  if known >= FORMS_MAX then
    old, young, known = young, {}, 0
  end
  young[id], known = f, known + 1
  return f
end

-- Returns the form of this id, nil when nobody here knows it; `text` makes it known.
function form_of(epoch, id, text)
  if life == epoch then
    local f = young[id]
    if f then return f end
    f = old[id]
    if f then return remember(id, f) end
  elseif call('GET', P .. 'epoch') ~= epoch then
    return nil
  else
    young, old, known, life = {}, {}, 0, epoch
  end
  if text then
    call('SET', P .. 'form:' .. id, text, 'EX', FORM_TTL_S)
  else
    text = call('GET', P .. 'form:' .. id)
    if not text then return nil end
  end
  return remember(id, compile(text))
end

-- Keeps the text of a form in use from lapsing; false when it is gone.
function keep_form(f, id, now)
  if call('EXPIRE', P .. 'form:' .. id, FORM_TTL_S) == 0 then
    young[id], old[id] = nil, nil
    return false
  end
  f.checked = now + FORM_CHECK_US
  return true
end
end

local function caller(f, keys, owner)
  local s = {form = f, keys = keys, owner = owner}
  if f.money then s.credit, s.out = keys[1 + f.nread], keys[2 + f.nread] end
  return s
end

-- Returns the caller of a lease, nil when its form is not known. `keys`: lease, and the names unless they are to be read.
local function caller_of(epoch, text, keys)
  local f = #text > LEASE_SIZE and form_of(epoch, sub(text, LEASE_SIZE + 1, LEASE_SIZE + FORM_ID_SIZE))
  if not f then return nil end
  local _, last, owner = string.find(text, '^(%S*)', LEASE_SIZE + FORM_ID_SIZE + 1)
  if not keys[2] then
    local n = 1
    for name in string.gmatch(sub(text, last + 1), '%S+') do
      n = n + 1
      keys[n] = name
    end
  end
  return caller(f, keys, owner)
end

-- What follows the fixed part of a lease.
local function tail_of(id, owner, keys) return id .. owner .. ' ' .. table.concat(keys, ' ', 2) end

local function tenant_of(s) return sub(s.credit, #P + 8) end

-- Reads all that a request is decided by: epoch, offset, settle, waiters, load, then caps, records, budgets, credit.
local function read_all(s)
  local f, keys = s.form, s.keys
  local get, n = f.get, f.nread
  for i = 2, n + 1 do get[5 + i] = keys[i] end
  return call(unpack(get, 1, 6 + n))
end

local function key_of_cap(s, i) return s.keys[1 + i] end

local function key_of_record(s, i) return s.keys[1 + s.form.ncap + i] end

local function key_of_spend(s, i) return s.keys[1 + s.form.ncap + s.form.nrecord + i] end

-- Records and rates ---------------------------------------------------------------------------------------------------

-- The record of an owner (a key, a project, a tenant; each with a model) is what it holds of all its limits: the requests
-- in flight (double), then its rates by unit, as far as there are any.
--
-- A rate counts in 60 buckets a window, from the oldest (h) to the newest (l); a bucket leaves 61 buckets after it began,
-- so no window ever holds more than the limit. It is sum, h, l, count of the newest (doubles), how many closed buckets
-- follow (byte), and those, oldest first: number mod 2^32, count. When they are more than NEAR, that byte is FAR and they
-- are the key b:<record>:<unit>, which is touched once a bucket; so a caller who comes now and then has all in one place,
-- and one who comes all the time does not carry them along.
local open_record, new_record, record_text, seconds_until_gone, turn_rate, add_to_rate, adjust_rate, rate_retry_s
do
local RATE, ENTRY, ENTRY_SIZE, NUMBERS = '<ddddB', '<I4d', 12, 4294967296
local NEAR, FAR = 8, 255

local function ring_of(key, unit) return P .. 'b:' .. sub(key, #P + 3) .. ':' .. unit end

-- Reads a record into `v`, with at least so many rates. `closed` of a rate is nil as long as it is far and was not read.
function open_record(v, raw, units)
  local unit, pos, size = 0, 9, raw and #raw or 0
  v.conc = raw and unpack_struct('<d', raw) or 0
  while pos < size do
    local r, near = v[unit], 0
    r.n, r.h, r.l, r.k, near, pos = unpack_struct(RATE, raw, pos)
    r.far = near == FAR
    if r.far then
      r.closed = nil
    elseif near == 0 then
      r.closed = ''
    else
      r.closed, pos = sub(raw, pos, pos + near * ENTRY_SIZE - 1), pos + near * ENTRY_SIZE
    end
    unit = unit + 1
  end
  for missing = unit, units - 1 do
    local r = v[missing]
    r.n, r.h, r.l, r.k, r.closed, r.far = 0, 0, 0, 0, '', false
  end
  v.units = max(unit, units)
end

function new_record() return {[0] = {}, {}, {}} end

-- Returns a record's text. Closed buckets that were read find their place.
function record_text(v, key, window)
  local text = pack('<d', v.conc)
  for unit = 0, v.units - 1 do
    local r = v[unit]
    local closed, near = r.closed, FAR
    if closed and #closed <= NEAR * ENTRY_SIZE then
      if r.far then call('DEL', ring_of(key, unit)) end
      near = #closed / ENTRY_SIZE
    elseif closed then
      call('SET', ring_of(key, unit), closed, 'PX', ceil(3 * window / 1000))
    end
    text = text .. pack(RATE, r.n, r.h, r.l, r.k, near)
    if near ~= FAR then text = text .. closed end
  end
  return text
end

local function closed_of(r, key, unit)
  if not r.closed then
    r.closed = call('GET', ring_of(key, unit))
    if not r.closed then r.closed, r.n, r.h = '', r.k, r.l end
  end
  return r.closed
end

local function number_of(short, newest) return newest - (newest - short) % NUMBERS end

-- Brings a rate to this bucket: what has left the window is counted no more. Returns whether that changed it.
function turn_rate(r, key, unit, bucket)
  local gone = bucket - BUCKETS - 1
  if r.l <= gone then
    r.n, r.h, r.l, r.k, r.closed = 0, bucket, bucket, 0, ''
    return false
  elseif r.h > gone then
    return false
  end
  local closed, at = closed_of(r, key, unit), 1
  local size, oldest = #closed, r.l
  while at < size do
    local short, count = unpack_struct(ENTRY, closed, at)
    local number = number_of(short, r.l)
    if number > gone then
      oldest = number
      break
    end
    r.n, at = r.n - count, at + ENTRY_SIZE
  end
  r.h, r.closed = oldest, sub(closed, at)
  return true
end

-- Adds to this bucket, whatever the limit; the rate has been brought to it.
function add_to_rate(r, key, unit, bucket, amount)
  if r.l < bucket then
    r.closed = closed_of(r, key, unit) .. pack(ENTRY, r.l % NUMBERS, r.k)
    r.l, r.k = bucket, 0
  end
  r.n, r.k = r.n + amount, r.k + amount
end

-- Adds d to the bucket of the instant `at`, unless that has left the window.
function adjust_rate(r, key, unit, width, at, d)
  local bucket = floor(at / width)
  if bucket == r.l then
    r.n, r.k = r.n + d, r.k + d
  elseif bucket >= r.h and bucket < r.l then
    local closed = closed_of(r, key, unit)
    local short = bucket % NUMBERS
    for pos = #closed - ENTRY_SIZE + 1, 1, -ENTRY_SIZE do
      local number, count = unpack_struct(ENTRY, closed, pos)
      if number == short then
        r.n, r.closed = r.n + d, sub(closed, 1, pos - 1) .. pack(ENTRY, short, count + d) .. sub(closed, pos + ENTRY_SIZE)
        return
      end
    end
  end
end

function seconds_until_gone(bucket, width, now)
  return max(1, ceil(((bucket + BUCKETS + 1) * width - now) / 1000000))
end

-- In how many seconds so much of a rate will have come back.
function rate_retry_s(r, key, unit, width, excess, now)
  local closed = closed_of(r, key, unit)
  for pos = 1, #closed, ENTRY_SIZE do
    local short, count = unpack_struct(ENTRY, closed, pos)
    excess = excess - count
    if excess <= 0 then return seconds_until_gone(number_of(short, r.l), width, now) end
  end
  return seconds_until_gone(r.l, width, now)
end
end

-- Money ---------------------------------------------------------------------------------------------------------------

-- A tenant's figure is packed: available before what is outstanding, version of the ledger, sum of what is outstanding. All
-- three are whole and below 2^53. One that is not there is made with the sum of its entries, so nothing is added to it.
local FIGURE = '<ddd'

local function moved_figure(raw, d)
  local available, version, outstanding = unpack_struct(FIGURE, raw)
  return pack(FIGURE, available, version, outstanding + d)
end

-- Brings what is outstanding for the request to `charge`; REMOVE: nothing was used and no event will come. Returns by how
-- much the tenant's figure changes. `hold`: what stands there unless it is posted already, nothing when that is not known.
local function settle(out, request, charge, hold)
  if charge == KEEP then return 0 end
  if charge ~= REMOVE and hold then
    if call('HSET', out, request, charge) == 0 then return charge - hold end
    call('HDEL', out, request)
    return 0
  end
  local held = call('HGET', out, request)
  if not held then return 0 end
  if charge == REMOVE then
    call('HDEL', out, request)
    return -held
  end
  call('HSET', out, request, charge)
  return charge - held
end

-- As `settle`, with the figure, for a request of which no lease is known.
local function settle_alone(tenant, request, charge)
  local d, credit = settle(P .. 'out:' .. tenant, request, charge), P .. 'credit:' .. tenant
  local raw = d ~= 0 and call('MGET', credit)[1]
  if raw then call('SET', credit, moved_figure(raw, d)) end
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

-- Checks every demand of a request and takes all of them, or none. Only a full cap lets it wait: then everything but
-- the caps is taken (and given back when it leaves the queue unserved), so nothing is decided twice.
--
-- KEYS: epoch, offset, settle, waiters, caps…, concurrencies…, lease, deployment, queue, queues, credit, out, rates…
-- ARGV: epoch, numbers (msgpack array, below), replica, lease text, deployment id,
--       request id, tier, hold ('' without money), longest wait µs (0: never wait)
-- Numbers: caps n, concurrencies n, rates n, deployment limit (0: none), waiting max, then limit and amount of each cap
--       and concurrency, then limit, amount and window µs of each rate
-- Answer: {code, …}, see scheduler/commands.py.
local GRANTED, QUEUED, REFUSED, BUSY, UNKNOWN_CREDIT, EPOCH, SETTLING = 1, 2, 3, 4, 5, 6, 7
local MONEY = -1
local BUCKETS = 60
local call = redis.call

local spec = cmsgpack.unpack(ARGV[2])
local ncap, nconc, nrate, limit, waiting_max = spec[1], spec[2], spec[3], spec[4], spec[5]
local ncount = ncap + nconc
local got = call('MGET', unpack(KEYS, 1, 4 + ncount))
if got[1] ~= ARGV[1] then return {EPOCH} end
local time = call('TIME')
local now = time[1] * 1000000 + time[2] + (tonumber(got[2]) or 0)
if got[3] and tonumber(got[3]) > now then return {SETTLING, got[3] - now} end

local at = 4 + ncount
local lease, deployment = KEYS[at + 1], KEYS[at + 2]
local first_rate = at + 6
local request, tier, hold, wait_us = ARGV[6], ARGV[7], ARGV[8], tonumber(ARGV[9])

if call('HSETNX', lease, request, 'G' .. tier .. ARGV[4]) == 0 then
  local held = call('HGET', lease, request)
  return {string.sub(held, 1, 1) == 'G' and GRANTED or QUEUED, 0, -1}
end

local function refuse(...)
  call('HDEL', lease, request)
  return {...}
end

-- A rate counts in 60 buckets a window, linked from the oldest (h) to the newest (l); a bucket leaves 61 buckets after
-- it began, so no window ever holds more than the limit. n: sum, k: count of the newest; field <bucket>: "count next".
local function following(key, bucket)
  local count, after = string.match(call('HGET', key, bucket), '(%d+) (%d+)')
  return tonumber(count), tonumber(after)
end

local function forget_buckets(key, n, h, l, gone)
  if l <= gone then
    call('DEL', key)
    return 0
  end
  while h <= gone do
    local count, after = following(key, h)
    call('HDEL', key, h)
    n, h = n - count, after
  end
  call('HSET', key, 'n', n, 'h', h)
  return n, h, l
end

local function seconds_until_gone(bucket, width)
  return math.max(1, math.ceil(((bucket + BUCKETS + 1) * width - now) / 1000000))
end

local function rate_retry_s(key, h, l, excess, width)
  while h and h ~= l do
    local count, after = following(key, h)
    excess = excess - count
    if excess <= 0 then break end
    h = after
  end
  return seconds_until_gone(h or math.floor(now / width), width)
end

local full = false
for i = 1, ncount do
  local held = tonumber(got[4 + i]) or 0
  got[4 + i] = held
  if held + spec[5 + 2 * i] > spec[4 + 2 * i] then
    if i > ncap then return refuse(REFUSED, i - ncap - 1, 1) end
    full = true
  end
end

local sums, oldest, newest, newest_count, buckets = {0, 0}, {0, 0}, {0, 0}, {0, 0}, {nil, nil}
local first_spec = 5 + 2 * ncount
for i = 1, nrate do
  local key, s = KEYS[first_rate + i], first_spec + 3 * i
  local width = spec[s] / BUCKETS
  local v = call('HMGET', key, 'n', 'h', 'l', 'k')
  local bucket, n, h, l = math.floor(now / width), tonumber(v[1]) or 0, tonumber(v[2]), tonumber(v[3])
  if l then
    if l > bucket then bucket = l end
    if h < bucket - BUCKETS then n, h, l = forget_buckets(key, n, h, l, bucket - BUCKETS - 1) end
  end
  local excess = n + spec[s - 1] - spec[s - 2]
  if excess > 0 then return refuse(REFUSED, nconc + i - 1, rate_retry_s(key, h, l, excess, width)) end
  sums[i], oldest[i], newest[i], newest_count[i], buckets[i] = n, h or bucket, l or -1, v[4], bucket
end

local left = -1
if hold ~= '' then
  local v = call('HMGET', KEYS[at + 5], 'a', 'o')
  if not v[1] then return refuse(UNKNOWN_CREDIT) end
  left = v[1] - (v[2] or 0) - hold
  if left < 0 then return refuse(REFUSED, MONEY, 0) end
end

local load = call('HMGET', deployment, 'inflight', 'waiting', 'gap_us', 'cap')
local inflight, waiting = tonumber(load[1]) or 0, tonumber(load[2]) or 0
local queued = full or waiting > 0 or (limit > 0 and inflight >= limit)
local estimate_s = 0
if queued then
  estimate_s = math.min(60, math.max(1, math.ceil((waiting + 1) * (tonumber(load[3]) or 1000000) / 1000000)))
  if wait_us <= 0 or waiting >= waiting_max then return refuse(BUSY, estimate_s) end
end
if tonumber(load[4]) ~= limit then call('HSET', deployment, 'cap', limit) end

-- Everything fits: take it.
local reply = {queued and QUEUED or GRANTED, estimate_s, left}
local counts, n = {}, 0
for i = queued and ncap + 1 or 1, ncount do
  local held = got[4 + i] + spec[5 + 2 * i]
  counts[n + 1], counts[n + 2] = KEYS[4 + i], held
  n = n + 2
  if i > ncap then reply[3 + i - ncap] = spec[4 + 2 * i] - held end
end
if n > 0 then call('MSET', unpack(counts)) end

local last = 3 + nconc
for i = 1, nrate do
  local key, s, bucket = KEYS[first_rate + i], first_spec + 3 * i, buckets[i]
  local sum = sums[i] + spec[s - 1]
  if newest[i] == bucket then
    call('HSET', key, 'n', sum, 'k', newest_count[i] + spec[s - 1])
  else
    if newest[i] >= 0 then call('HSET', key, newest[i], newest_count[i] .. ' ' .. bucket) end
    call('HSET', key, 'n', sum, 'h', oldest[i], 'l', bucket, 'k', spec[s - 1])
    call('PEXPIRE', key, math.ceil((BUCKETS + 2) * spec[s] / BUCKETS / 1000) + 1000)
  end
  reply[last + 1], reply[last + 2] = spec[s - 2] - sum, seconds_until_gone(oldest[i], spec[s] / BUCKETS)
  last = last + 2
end

if hold ~= '' then
  if call('HSETNX', KEYS[at + 6], request, hold) == 1 then call('HINCRBY', KEYS[at + 5], 'o', hold) end
end

if not queued then
  call('HSET', deployment, 'inflight', inflight + 1, 'last_us', now)
  return reply
end

local limits = {}
for i = 1, ncap do limits[i] = spec[4 + 2 * i] end
local slots, places = table.concat(buckets, ' '), table.concat(limits, ' ')
call('HSET', lease, request, string.format('W%s%s|%s|%s|%.0f', tier, ARGV[4], slots, places, now + wait_us))
call('ZADD', KEYS[at + 3], now, request .. ' ' .. ARGV[3])
if waiting == 0 then call('ZADD', KEYS[at + 4], now, ARGV[5]) end
call('HSET', deployment, 'waiting', waiting + 1)
call('INCR', KEYS[4])
return reply

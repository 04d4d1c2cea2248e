-- Gives back what a request holds, settles its money, and grants the next waiters. Idempotent by request id.
-- The way of nearly every request comes first and makes no functions: granted, and nobody waits.
--
-- KEYS: epoch, offset, waiters, then the counters of the lease (caps, concurrencies; without them the lease itself says
--       what it holds), then lease, deployment, credit, out
-- ARGV: epoch, replica, tenant ('' without money), request id, charge ('' keep, '-' remove, else nano), then the
--       amount of each counter unless all are 1
-- Answer: {1 given back, 0 nothing was held} or {6} when the epoch changed
local redis_call = redis.call
local counters = #KEYS - 7
local got = redis_call('MGET', unpack(KEYS, 1, 3 + counters))
if got[1] ~= ARGV[1] then return {6} end
local lease, deployment, credit, out = unpack(KEYS, 4 + counters)
local request, charge = ARGV[4], ARGV[5]
local text = redis_call('HGET', lease, request)

if ARGV[3] ~= '' and charge ~= '' then
  local old = redis_call('HGET', out, request)
  if old and charge == '-' then
    redis_call('HDEL', out, request)
    if old ~= '0' then redis_call('HINCRBY', credit, 'o', '-' .. old) end
  elseif old and charge ~= old then
    redis_call('HSET', out, request, charge)
    redis_call('HINCRBY', credit, 'o', string.format('%.0f', charge - old))
  end
end
if not text then return {0} end
redis_call('HDEL', lease, request)

if counters > 0 and (tonumber(got[3]) or 0) <= 0 and string.byte(text) == 71 then
  local time, set, gone, n = redis_call('TIME'), {}, nil, 0
  for i = 1, counters do
    local value = (tonumber(got[3 + i]) or 0) - (ARGV[5 + i] or 1)
    if value > 0 then
      set[n + 1], set[n + 2] = KEYS[3 + i], value
      n = n + 2
    else
      gone = gone or {}
      gone[#gone + 1] = KEYS[3 + i]
    end
  end
  if n > 0 then redis_call('MSET', unpack(set)) end
  if gone then redis_call('DEL', unpack(gone)) end
  local inflight = tonumber(redis_call('HGET', deployment, 'inflight')) or 1
  local now = time[1] * 1000000 + time[2] + (tonumber(got[2]) or 0)
  redis_call('HSET', deployment, 'inflight', inflight - 1, 'last_us', now)
  return {1}
end

--#common
local now, waiters = server_now(got[2]), tonumber(got[3]) or 0
local v = parse(text)
give_back(v, request, ARGV[2], now, waiters, false)
if charge == '' then note_owed(v, request, ARGV[2]) end
if waiters > 0 then dispatch(now, v.deployment, 32) end
return {1}

-- Checks every demand of a request and takes all of them, or none. Only a full cap lets it wait: then everything but
-- the caps is taken (and given back when it leaves the queue unserved), so nothing is decided twice. Who cannot be served
-- before the caller loses patience is refused at once.
--
-- KEYS: lease
-- ARGV: epoch, spec id, request id, packed: tier, hold (nano), longest wait µs (0: never wait), input tokens, output
--       tokens; then the spec's text when the caller thinks that it may not be known here
-- Answer: {code, …}, see commands.py. A demand is told by its place among concurrencies, rates, spends.
local held = {} -- of the counters, with what this request takes
local sums, oldest, newest, counts, buckets, wanted, moved = {}, {}, {}, {}, {}, {}, {} -- of the rates

-- Reads a rate's counter into these, without the buckets that have left the window. Returns false when the server's clock
-- stands before the newest bucket: then all is read anew at that bucket's instant, so that no bucket is ever reopened.
local function read_rate(s, r, i, raw, now)
  local bucket = floor(now / r.width)
  buckets[i], moved[i] = bucket, false
  if not raw then
    sums[i], oldest[i], newest[i], counts[i] = 0, bucket, bucket, 0
    return true
  end
  local n, h, l, k = unpack_struct(RATE, raw)
  if l > bucket then return false, ceil(l * r.width) + 1 end
  local gone = bucket - BUCKETS - 1
  if l <= gone then
    n, h, l, k = 0, bucket, bucket, 0
  elseif h <= gone then
    n, h = forget_buckets(key_of_rate(s, i), n, h, l, gone)
    moved[i] = true
  end
  sums[i], oldest[i], newest[i], counts[i] = n, h, l, k
  return true
end

-- A request that takes nothing leaves the work of forgetting behind, so that the next one need not do it again.
local function leave(s, lease, request, answer)
  local text = call('HGET', lease, request)
  if text then -- it is here already: the answer that said so was lost
    local v = parse(text)
    return {v.state == 'G' and GRANTED or QUEUED, 0, -1, v.at, -1}
  end
  for i, r in ipairs(s.form.rates) do
    if moved[i] then call('SET', key_of_rate(s, i), pack(RATE, sums[i], oldest[i], newest[i], counts[i], r.width)) end
  end
  return answer
end

-- Returns the answer of a refusal, or nothing; whether a cap is full; which soft limits are passed.
local function check_counts(s, got, tier)
  local f, full, over = s.form, false, nil
  for i = 1, f.ncap + f.nconc do
    local value = (tonumber(got[5 + i]) or 0) + f.amount[i]
    held[i] = value
    if i == 1 and value > ceiling(f.most[1], tier) then -- of all deployments
      full = true
    elseif value > f.most[i] then
      if i <= f.ncap then
        full = true
      elseif f.hard[i] then
        return {REFUSED, i - f.ncap - 1, 1}
      else
        over = over or {}
        over[#over + 1] = i - f.ncap - 1
      end
    end
  end
  return nil, full, over
end

local function check_rates(s, got, now, input, output, over)
  local f, i = s.form, 1
  while i <= f.nrate do
    local r = f.rates[i]
    local known, later = read_rate(s, r, i, got[5 + f.ncount + i], now)
    if not known then
      now, i = later, 0
    else
      local unit = r.unit
      local amount = unit == 0 and r.amount or unit == 1 and input or output
      local excess = sums[i] + amount - r.most
      wanted[i] = amount
      if excess > 0 and amount > 0 then
        if r.hard then
          local wait_s = ceil(r.window / 1000000)
          if amount <= r.most then wait_s = rate_retry_s(key_of_rate(s, i), r, oldest[i], newest[i], excess, now) end
          return {REFUSED, f.nconc + i - 1, wait_s}, now, over
        end
        over = over or {}
        over[#over + 1] = f.nconc + i - 1
      end
    end
    i = i + 1
  end
  return nil, now, over
end

-- Returns the answer of a refusal, or nothing; the credit left; the budget left in the nearest one.
local function check_money(s, got, hold, over)
  if s.tenant == '' then return nil, -1, -1, over end
  local v = call('HMGET', s.credit, 'a', 'o')
  if not v[1] then return {UNKNOWN_CREDIT} end
  local f, left, budget = s.form, v[1] - (v[2] or 0) - hold, -1
  if left < 0 then return {REFUSED, -1, 0} end
  for i = f.ncap + f.nconc + 1, f.ncount do
    local spent = tonumber(got[5 + i])
    if not spent then return {UNKNOWN_BUDGET} end
    held[i] = spent + hold
    local rest = f.most[i] - held[i]
    local place = i - f.ncap + f.nrate - 1
    if rest >= 0 then
      if f.hard[i] and (budget < 0 or rest < budget) then budget = rest end
    elseif f.hard[i] then
      return {REFUSED, place, 0}
    else
      over = over or {}
      over[#over + 1] = place
    end
  end
  return nil, left, budget, over
end

-- Appends the limits nearest to their end to the answer: of concurrency, then of each unit of rates.
local function show_limits(s, reply, now)
  local f, n = s.form, 5
  if f.shows_conc then
    local least, which
    for i = f.ncap + 1, f.ncap + f.nconc do
      local rest = f.most[i] - held[i]
      if f.hard[i] and (not least or rest < least) then least, which = rest, i end
    end
    reply[6], reply[7], n = least, which - f.ncap - 1, 7
  end
  for unit = 0, 2 do
    if f.shown[unit] then
      local least, which
      for i = 1, f.nrate do
        local r = f.rates[i]
        if r.unit == unit and r.hard then
          local rest = r.most - sums[i]
          if not least or rest < least then least, which = rest, i end
        end
      end
      reply[n + 1], reply[n + 2] = max(0, least), seconds_until_gone(oldest[which], f.rates[which].width, now)
      reply[n + 3] = f.nconc + which - 1
      n = n + 3
    end
  end
  return n
end

local function take_counters(s, load, first)
  local f, keys, n = s.form, s.get, 3
  set[2], set[3] = f.load, load
  for i = first, f.ncount do
    set[n + 1], set[n + 2] = keys[6 + i], held[i]
    n = n + 2
  end
  for i = 1, f.nrate do
    local r, key, bucket, amount = f.rates[i], keys[6 + f.ncount + i], buckets[i], wanted[i]
    local count = counts[i]
    if newest[i] ~= bucket then
      close_bucket(key, r, oldest[i], newest[i], count, bucket)
      count = 0
    end
    sums[i] = sums[i] + amount
    set[n + 1], set[n + 2] = key, pack(RATE, sums[i], oldest[i], bucket, count + amount, r.width)
    n = n + 2
  end
  write(n)
end

local function seconds(us) return min(60, max(1, ceil(us / 1000000))) end

-- Whether a request that has to wait may: returns the answer of a refusal, or nothing and the estimated wait in µs.
local function door(s, epoch, lease, request, tier, wait_us, raw, now)
  local load, turns = {read_load(raw)}, read_turns(s.form.deployment)
  local estimate_us = wait_of(s, tier, turns, {[0] = load[9], load[10], load[2] - load[9] - load[10]})
  if wait_us <= 0 then return {BUSY, seconds(estimate_us), FULL} end
  if call('HEXISTS', lease, request) == 1 then return nil, estimate_us end -- it is in already
  if estimate_us > wait_us then return {BUSY, seconds(estimate_us), TOO_LATE} end
  if load[2] >= s.form.waiting_max and not make_place(epoch, s, tier, load, now) then
    return {BUSY, seconds(estimate_us), FULL}
  end
  return nil, estimate_us
end

local function acquire(keys, args)
  local lease, id, request = keys[1], args[2], args[3]
  local s = spec_of(args[1], id, args[5])
  if not s then return {call('GET', P .. 'epoch') == args[1] and UNKNOWN_SPEC or EPOCH} end
  local got = call(unpack(s.get))
  if got[1] ~= args[1] then return {EPOCH} end
  local now = server_now(got[2])
  if got[3] and tonumber(got[3]) > now then return {SETTLING, got[3] - now} end
  if s.checked < now and not keep_spec(s, id, now) then return {UNKNOWN_SPEC} end

  local f, tier, hold, wait_us, input, output = s.form, unpack_struct('<Bdddd', args[4])
  for i = 1, f.nrate do moved[i] = false end
  local refusal, full, over = check_counts(s, got, tier)
  local left, budget
  if not refusal then refusal, now, over = check_rates(s, got, now, input, output, over) end
  if not refusal then refusal, left, budget, over = check_money(s, got, hold, over) end
  if refusal then return leave(s, lease, request, refusal) end

  local inflight, waiting, last, tokens, _, cap, token_cap, saturation, batch, standard = read_load(got[5])
  local most, need, queued = nearer(f.limit, cap), input + output, full
  if not queued then
    queued = (most > 0 and inflight >= ceiling(most, tier))
      or (token_cap > 0 and inflight > 0 and tokens + need > token_cap * CEILING[tier])
      or (waiting > 0 and waiting > (tier > 0 and batch or 0) + (tier > 1 and standard or 0)) -- of its tier or a higher one
  end
  local estimate_us, deadline = 0, 0
  if queued then
    local answer
    answer, estimate_us = door(s, args[1], lease, request, tier, wait_us, got[5], now)
    if answer then return leave(s, lease, request, answer) end
    inflight, waiting, last, tokens, _, cap, token_cap, saturation, batch, standard = read_load(call('GET', f.load))
    deadline = now + wait_us
  end

  -- Everything fits: take it.
  local text = pack(LEASE, queued and 'W' or 'G', tier, now, input, output, hold, deadline) .. id
  if call('HSETNX', lease, request, text) == 0 then return leave(s, lease, request) end
  if queued then
    local of_batch, of_standard = batch + (tier == 0 and 1 or 0), standard + (tier == 1 and 1 or 0)
    local load = pack(LOAD, inflight, waiting + 1, last, tokens, f.limit, cap, token_cap, saturation, of_batch, of_standard)
    take_counters(s, load, f.ncap + 1)
    join_queue(s, request .. ' ' .. sub(lease, #P + 7), tier, deadline, cost_of(input, output, 0), now, waiting)
  else
    take_counters(s, pack(LOAD, inflight + 1, waiting, now, tokens + need, f.limit, cap, token_cap, saturation, batch, standard), 1)
  end
  if s.tenant ~= '' and call('HSETNX', s.out, request, hold) == 1 then call('HINCRBY', s.credit, 'o', hold) end
  local reply = {queued and QUEUED or GRANTED, queued and seconds(estimate_us) or 0, left, now, budget}
  local n = show_limits(s, reply, now)
  if over then
    for i, which in ipairs(over) do reply[n + i] = which end
  end
  return reply
end

register('acquire', acquire)

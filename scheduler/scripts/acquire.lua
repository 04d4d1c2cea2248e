-- Checks every demand of a request and takes all of them, or none. Only a full cap lets it wait: then everything but
-- the caps is taken (and given back when it leaves the queue unserved), so nothing is decided twice. Who cannot be served
-- before the caller loses patience is refused at once.
--
-- KEYS: lease, caps (of all first), records, budgets, then credit and outstanding where money is held
-- ARGV: epoch, form id, owner, request id, packed: tier, hold (nano), longest wait µs (0: never wait), input tokens, output
--       tokens; then the form's text when the caller thinks that it may not be known here
-- Answer: {code, …}, see commands.py. A demand is told by its place among concurrencies, rates, spends.
local records, caps, spent = {}, {}, {} -- as read: of the caps and budgets with what this request takes
local moved = {} -- records that have changed by time alone
local wanted, buckets = {}, {} -- of the rates
local WAITS_FOR = {platform = 1, capability = 2, caller = 3, places = 4, tokens = 5, turn = 6} -- core/waits.py: Full

local function open_records(f, got)
  for i = 1, f.nrecord do
    local v = records[i]
    if not v then
      v = new_record()
      records[i] = v
    end
    open_record(v, got[5 + f.ncap + i], f.records[i].units)
    moved[i] = false
  end
end

-- A request that takes nothing leaves the work of forgetting behind, so that the next one need not do it again.
local function leave(s, lease, request, answer)
  local text = call('HGET', lease, request)
  if text then -- it is here already: the answer that said so was lost
    local v = parse(text)
    return {v.state == 'G' and GRANTED or QUEUED, v.state == 'G' and 0 or {0, 0, 0, 0, 0, 0, 0}, -1, v.at, -1}
  end
  for i = 1, s.form.nrecord do
    if moved[i] then
      local key = key_of_record(s, i)
      call('SET', key, record_text(records[i], key, s.form.records[i].window))
    end
  end
  return answer
end

-- Returns the answer of a refusal, or nothing; what it waits for when a cap is full; which soft limits are passed; the
-- limit of that cap.
local function check_counts(s, got, tier)
  local f, full, over, limit = s.form, false, nil, 0
  for i = 1, f.ncap do
    local value, most = (tonumber(got[5 + i]) or 0) + f.cap_amount[i], f.cap_most[i]
    if i == 1 then most = ceiling(most, tier) end -- of all deployments
    caps[i] = value
    if value > most and not full then
      local own = i == 2 and f.entitled and f.entitled.place[s.owner]
      full, limit = i == 1 and WAITS_FOR.platform or own and WAITS_FOR.capability or WAITS_FOR.caller, most
    end
  end
  for i = 1, f.nconc do
    local conc = f.concs[i]
    if records[conc.record].conc + conc.amount > conc.most then
      if conc.hard then return {REFUSED, i - 1, 1} end
      over = over or {}
      over[#over + 1] = i - 1
    end
  end
  return nil, full, over, limit
end

-- When the server's clock stands before a rate's newest bucket all is read anew at that bucket's instant, so that no bucket
-- is ever reopened.
local function check_rates(s, now, input, output, over)
  local f, i = s.form, 1
  while i <= f.nrate do
    local r = f.rates[i]
    local unit, bucket = r.unit, floor(now / r.width)
    local rate = records[r.record][unit]
    if rate.l > bucket then
      now, i = ceil(rate.l * r.width) + 1, 0
    else
      if turn_rate(rate, key_of_record(s, r.record), unit, bucket) then moved[r.record] = true end
      local amount = unit == 0 and r.amount or unit == 1 and input or output
      local excess = rate.n + amount - r.most
      wanted[i], buckets[i] = amount, bucket
      if excess > 0 and amount > 0 then
        if r.hard then
          local wait_s = ceil(r.window / 1000000)
          if amount <= r.most then
            wait_s = rate_retry_s(rate, key_of_record(s, r.record), unit, r.width, excess, now)
          end
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
  local f = s.form
  if not f.money then return nil, -1, -1, over end
  local raw = got[5 + f.nread]
  if not raw then return {UNKNOWN_CREDIT} end
  local available, _, outstanding = unpack_struct(FIGURE, raw)
  local left, budget = available - outstanding - hold, -1
  if left < 0 then return {REFUSED, -1, 0} end
  for i = 1, f.nspend do
    local spend, had = f.spends[i], tonumber(got[5 + f.ncap + f.nrecord + i])
    if not had then return {UNKNOWN_BUDGET} end
    spent[i] = had + hold
    local rest, place = spend.most - spent[i], f.nconc + f.nrate + i - 1
    if rest >= 0 then
      if spend.hard and (budget < 0 or rest < budget) then budget = rest end
    elseif spend.hard then
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
    for i = 1, f.nconc do
      local conc = f.concs[i]
      local rest = conc.most - records[conc.record].conc
      if conc.hard and (not least or rest < least) then least, which = rest, i end
    end
    reply[6], reply[7], n = least, which - 1, 7
  end
  for unit = 0, 2 do
    if f.shown[unit] then
      local least, which
      for i = 1, f.nrate do
        local r = f.rates[i]
        if r.unit == unit and r.hard then
          local rest = r.most - records[r.record][unit].n
          if not least or rest < least then least, which = rest, i end
        end
      end
      local r = f.rates[which]
      reply[n + 1], reply[n + 2] = max(0, least), seconds_until_gone(records[r.record][unit].h, r.width, now)
      reply[n + 3] = f.nconc + which - 1
      n = n + 3
    end
  end
  return n
end

-- `granted`: the caps too. `figure`: the credit's text, where money is held that was not.
local function take_all(s, load, figure, granted)
  local f, n = s.form, 3
  for i = 1, f.nconc do
    local conc = f.concs[i]
    records[conc.record].conc = records[conc.record].conc + conc.amount
  end
  for i = 1, f.nrate do
    local r = f.rates[i]
    add_to_rate(records[r.record][r.unit], key_of_record(s, r.record), r.unit, buckets[i], wanted[i])
  end
  set[2], set[3] = f.load, load
  if granted then
    for i = 1, f.ncap do
      set[n + 1], set[n + 2], n = key_of_cap(s, i), caps[i], n + 2
    end
  end
  for i = 1, f.nrecord do
    local key = key_of_record(s, i)
    set[n + 1], set[n + 2], n = key, record_text(records[i], key, f.records[i].window), n + 2
  end
  for i = 1, f.nspend do
    set[n + 1], set[n + 2], n = key_of_spend(s, i), spent[i], n + 2
  end
  if figure then
    set[n + 1], set[n + 2], n = s.credit, figure, n + 2
  end
  write(n)
end

local function seconds(us) return min(60, max(1, ceil(us / 1000000))) end

-- Whether a request that has to wait may: returns the answer of a refusal, or nothing, the estimated wait in µs and whether
-- another one was taken out of the queue for it.
local function door(s, epoch, lease, request, tier, wait_us, raw, has_less, now)
  local load, turns = {read_load(raw)}, read_turns(s.form.deployment)
  local estimate_us = wait_of(s, tier, turns, {[0] = load[9], load[10], load[2] - load[9] - load[10]}, has_less, now)
  if wait_us <= 0 then return {BUSY, seconds(estimate_us), FULL} end
  if call('HEXISTS', lease, request) == 1 then return nil, estimate_us end -- it is in already
  if estimate_us > wait_us then
    if tier == 2 then
      note_missed(turns, now)
      call('SET', P .. 'd:' .. s.form.deployment, turns_text(turns))
    end
    return {BUSY, seconds(estimate_us), TOO_LATE}
  end
  if load[2] < s.form.waiting_max then return nil, estimate_us end
  if not make_place(epoch, s, tier, load, now) then return {BUSY, seconds(estimate_us), FULL} end
  return nil, estimate_us, true
end

-- What the tenant has less of than it is entitled to: 'guaranteed', 'deserved' or nil.
local function has_less_of(s, got, most)
  local entitled = s.form.entitled
  local i = entitled and entitled.place[s.owner]
  if not i then return nil end
  local n = tonumber(got[7]) or 0 -- its counter follows the cap of all
  if n < guaranteed_now(entitled.guarantee[i], most, s.form.limit) then return 'guaranteed' end
  return n < entitled.deserved[i] and 'deserved' or nil
end

-- What of the deployment is full for this request, and how much of it there is? `within`: its tenant has a guarantee left, and it may fill the whole cap. What is
-- kept for others is looked at only where it can be in the way.
local function is_full(f, tier, within, inflight, tokens, need, most, token_cap)
  local top = token_cap * (within and 1 or CEILING[tier])
  if token_cap > 0 and inflight > 0 and tokens + need > top then return WAITS_FOR.tokens, top end
  if most <= 0 then return false end
  local entitled = f.entitled
  if within or not entitled then
    top = within and most or ceiling(most, tier)
  else
    local others = most - entitled.guaranteed
    if others > 0 and inflight < ceiling(others, tier) then return false end
    top = top_beside(stand_of(entitled, most, f.limit), most, tier, false)
  end
  return inflight >= top and WAITS_FOR.places, top
end

local function acquire(keys, args)
  local lease, id, owner, request = keys[1], args[2], args[3], args[4]
  local f = form_of(args[1], id, args[6])
  if not f then return {call('GET', P .. 'epoch') == args[1] and UNKNOWN_FORM or EPOCH} end
  local s = caller(f, keys, owner)
  local got = read_all(s)
  if got[1] ~= args[1] then return {EPOCH} end
  local now = server_now(got[2])
  if got[3] and tonumber(got[3]) > now then return {SETTLING, got[3] - now} end
  if f.checked < now and not keep_form(f, id, now) then return {UNKNOWN_FORM} end

  local tier, hold, wait_us, input, output = unpack_struct('<Bdddd', args[5])
  open_records(f, got)
  local refusal, queued, over, limit = check_counts(s, got, tier) -- `queued`: what it waits for, or false
  local left, budget
  if not refusal then refusal, now, over = check_rates(s, now, input, output, over) end
  if not refusal then refusal, left, budget, over = check_money(s, got, hold, over) end
  if refusal then return leave(s, lease, request, refusal) end

  local inflight, waiting, last, tokens, _, cap, token_cap, saturation, batch, standard = read_load(got[5])
  local most, need, behind = nearer(f.limit, cap), input + output, false
  local has_less = has_less_of(s, got, most)
  local ahead = waiting - (tier > 0 and batch or 0) - (tier > 1 and standard or 0) -- of its tier or a higher one
  if not queued then
    local within = has_less == 'guaranteed'
    queued, limit = is_full(f, tier, within, inflight, tokens, need, most, token_cap)
    if not queued and ahead > 0 and not within then behind, queued, limit = true, WAITS_FOR.turn, 0 end
  end
  local estimate_us, deadline = 0, 0
  if queued then
    local answer, another_left
    answer, estimate_us, another_left = door(s, args[1], lease, request, tier, wait_us, got[5], has_less, now)
    if answer then
      answer[4], answer[5], answer[6] = queued, limit, ahead
      return leave(s, lease, request, answer)
    end
    if another_left then -- and gave back what may be counted in our records: these are read again, and only lower
      got = read_all(s)
      open_records(f, got)
      check_counts(s, got, tier)
      _, now = check_rates(s, now, input, output)
      _, left, budget = check_money(s, got, hold)
    end
    inflight, waiting, last, tokens, _, cap, token_cap, saturation, batch, standard = read_load(call('GET', f.load))
    deadline = now + wait_us
  end

  -- Everything fits: take it.
  local text = pack(LEASE, queued and 'W' or 'G', tier, now, input, output, hold, deadline) .. tail_of(id, owner, keys)
  if not make_lease(f, lease, request, text) then return leave(s, lease, request) end
  local fresh = f.money and call('HSETNX', s.out, request, hold) == 1
  local second = 0
  local figure = fresh and moved_figure(got[5 + f.nread], hold)
  if queued then
    local of_batch, of_standard = batch + (tier == 0 and 1 or 0), standard + (tier == 1 and 1 or 0)
    local load = pack(LOAD, inflight, waiting + 1, last, tokens, f.limit, cap, token_cap, saturation, of_batch, of_standard)
    take_all(s, load, figure, false)
    local member = request .. ' ' .. sub(lease, #P + 7)
    local turns = join_queue(s, member, tier, deadline, cost_of(input, output, 0), now, waiting)
    if queued == WAITS_FOR.platform then recall_blocks('*', now) end
    second = {estimate_us, queued, limit, ahead, turns[GRANTS], turns[GRANTS + 1], turns[GRANTS + 2]}
  else
    if waiting > 0 then -- it passes those of lower tiers, which counts for their floors and for how long they wait
      local turns = read_turns(f.deployment)
      note_given(turns, tier, cost_of(input, output, 0), now)
      call('SET', P .. 'd:' .. f.deployment, turns_text(turns))
    end
    local load = pack(LOAD, inflight + 1, waiting, now, tokens + need, f.limit, cap, token_cap, saturation, batch, standard)
    take_all(s, load, figure, true)
    if tier == 0 then call('ZADD', running_of(f.deployment, 0), now, request .. ' ' .. sub(lease, #P + 7)) end
  end
  local reply = {queued and QUEUED or GRANTED, second, left, now, budget}
  local n = show_limits(s, reply, now)
  if over then
    for i, which in ipairs(over) do reply[n + i] = which end
  end
  if behind then dispatch(args[1], now, f.deployment, 0) end -- who waits may be held up by a cap of its own
  return reply
end

register('acquire', acquire)

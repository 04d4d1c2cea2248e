-- Blocks (ADR 0032): what a replica takes for requests of one caller that it will admit by itself, without a script. This
-- stands in one block of names with `acquire`, whose records and answers it shares.
--
-- A block is a lease of state B under an id of its own, and all that is in it counts as held: `deadline` is its places (in the
-- caps, in the requests at once of the records, in the load), `input` the tokens reserved by them, `hold` the nano it was
-- made with; what it has of them now stands under its id among what is outstanding, and in the budgets. What it took of rates
-- is for this bucket only, so it is counted in the second in which it is used, as all else is.
--
-- Nothing but what is far from its end is taken: of each limit a FAR-th over all replicas and blocks, while half of it is
-- free. Nobody may wait for the deployment: who comes to wait has the spare of all blocks called back (message B).
local FAR, HALF, LEAST = 50, 0.5, 8 -- requests a block is good for at least
local SECOND_US, PENDING_S = 1000000, 900
local ASKED = '<Bdddddddddd'

-- How much of `want` may be taken of a limit.
local function spare(want, most, held, part)
  return max(0, min(want, floor(most * part), floor(most * HALF - held)))
end

-- Places, and the tokens that they reserve.
local function spare_places(s, got, a, gone, gone_tokens, part)
  local f, p, t = s.form, a.places, a.tokens
  local inflight, _, _, reserved, _, cap, token_cap = read_load(got[5])
  local most = nearer(f.limit, cap)
  if most > 0 then p = spare(p, ceiling(most, a.tier), inflight - gone, part) end
  if token_cap > 0 then t = spare(t, token_cap * CEILING[a.tier], reserved - gone_tokens, part) end
  for i = 1, f.ncap do
    local amount, limit = f.cap_amount[i], i == 1 and ceiling(f.cap_most[i], a.tier) or f.cap_most[i]
    p = min(p, floor(spare(p * amount, limit, (tonumber(got[5 + i]) or 0) - gone * amount, part) / amount))
  end
  for i = 1, f.nconc do
    local amount, held = f.concs[i].amount, records[f.concs[i].record].conc
    p = min(p, floor(spare(p * amount, f.concs[i].most, held - gone * amount, part) / amount))
  end
  return p, t
end

-- Requests, input and output tokens of the rates, all of which have been turned to this bucket.
local function spare_rates(s, a, part)
  local f, taken = s.form, {[0] = a.requests, a.input, a.output}
  for i = 1, f.nrate do
    local r = f.rates[i]
    local amount = r.unit == 0 and r.amount or 1
    if amount > 0 then
      local n = spare(taken[r.unit] * amount, r.most, records[r.record][r.unit].n, part)
      taken[r.unit] = min(taken[r.unit], floor(n / amount))
    end
  end
  return taken[0], taken[1], taken[2]
end

-- `gone`: nano that the block gives back.
local function spare_money(s, got, a, gone, part)
  local f, m = s.form, a.nano
  if not f.money then return m end
  if not got[5 + f.nread] then return -1 end
  local available, _, outstanding = unpack_struct(FIGURE, got[5 + f.nread])
  m = spare(m, available - outstanding + gone, 0, part)
  for i = 1, f.nspend do
    local spent = tonumber(got[5 + f.ncap + f.nrecord + i])
    if not spent then return -1 end
    m = min(m, spare(m, f.spends[i].most - spent + gone, 0, part))
  end
  return m
end

-- Returns what may be taken: places, tokens, requests, input, output, nano; nothing when that is not worth a block.
local function spare_of(s, got, a, gone, gone_tokens, gone_nano, turned, now)
  local f, _, waiting = s.form, read_load(got[5])
  if a.places <= 0 or not turned or waiting > 0 or a.tier == 0 or f.entitled then return nil end
  if got[3] and tonumber(got[3]) > now then return nil end -- fenced
  local replicas = call('ZCOUNT', P .. 'beat', string.format('(%.0f', floor(now / 1000)), '+inf')
  local part = 1 / (FAR * max(1, replicas) * max(1, a.blocks))
  local p, t = spare_places(s, got, a, gone, gone_tokens, part)
  local r, i, o = spare_rates(s, a, part)
  local m = spare_money(s, got, a, gone_nano, part)
  local least = min(1, LEAST / a.requests)
  if p < 1 or r < a.requests * least or t < a.tokens * least or i < a.input * least or o < a.output * least
    or m < a.nano * least then return nil end
  return p, t, r, i, o, m
end

-- Gives back what was taken of rates and not used, and turns them to this bucket; false when the clock stands before one.
-- `given`: of each time at which something was taken, packed: that time, requests, input and output tokens not used.
local function turn_rates(s, given, now)
  local f, turned = s.form, true
  for i = 1, f.nrate do
    local r = f.rates[i]
    local rate, key, bucket = records[r.record][r.unit], key_of_record(s, r.record), floor(now / r.width)
    for at = 1, #given, 32 do
      local when, requests, input, output = unpack_struct('<dddd', given, at)
      local d = r.unit == 0 and requests * r.amount or r.unit == 1 and input or r.unit == 2 and output or 0
      if d ~= 0 then adjust_rate(rate, key, r.unit, r.width, when, -d) end
    end
    if rate.l > bucket then turned = false else turn_rate(rate, key, r.unit, bucket) end
  end
  return turned
end

-- Changes what a block holds; the records are open, and written with all that was done to them.
local function move_block(s, got, places, tokens, nano, now)
  local f, n = s.form, 3
  local inflight, waiting, _, reserved, limit, cap, token_cap, saturation, batch, standard = read_load(got[5])
  inflight, reserved = max(0, inflight + places), max(0, reserved + tokens)
  set[2], set[3] = f.load, pack(LOAD, inflight, waiting, now, reserved, limit, cap, token_cap, saturation, batch, standard)
  for i = 1, f.ncap do
    local value = max(0, (tonumber(got[5 + i]) or 0) + places * f.cap_amount[i])
    set[n + 1], set[n + 2], n = key_of_cap(s, i), value, n + 2
  end
  for i = 1, f.nrecord do
    local key = key_of_record(s, i)
    records[i].conc = max(0, records[i].conc + places * f.records[i].conc)
    set[n + 1], set[n + 2], n = key, record_text(records[i], key, f.records[i].window), n + 2
  end
  for i = 1, nano ~= 0 and f.nspend or 0 do
    local spent = tonumber(got[5 + f.ncap + f.nrecord + i])
    if spent then
      set[n + 1], set[n + 2], n = key_of_spend(s, i), max(0, spent + nano), n + 2
    end
  end
  if nano ~= 0 and s.out and got[5 + f.nread] then
    set[n + 1], set[n + 2], n = s.credit, moved_figure(got[5 + f.nread], nano), n + 2
  end
  write(n)
end

local function grant_waiters(epoch, s, got, now)
  if (tonumber(got[4]) or 0) > 0 then
    local of_all = (tonumber(got[6]) or 0) >= ceiling(s.form.cap_most[1], 0)
    dispatch(epoch, now, s.form.deployment, of_all and 8 or 0)
  end
end

-- What the block's requests are told of limits: as `acquire` answers. And for how many µs its rates are good.
local function told(s, got, nano, now)
  local f, left, budget, good = s.form, -1, -1, SECOND_US
  if f.money then
    local available, _, outstanding = unpack_struct(FIGURE, got[5 + f.nread])
    left = available - outstanding - nano
    for i = 1, f.nspend do
      local rest = f.spends[i].most - tonumber(got[5 + f.ncap + f.nrecord + i]) - nano
      if f.spends[i].hard and (budget < 0 or rest < budget) then budget = max(0, rest) end
    end
  end
  for i = 1, f.nrate do
    local width = f.rates[i].width
    good = min(good, (floor(now / width) + 1) * width - now)
  end
  local reply = {GRANTED, 0, left, now, budget}
  show_limits(s, reply, now)
  return reply, floor(good)
end

-- Makes, renews, lessens or ends a block: it holds what is in use, and what is wanted more if that may be taken.
--
-- KEYS: as `acquire`
-- ARGV: epoch, form id, owner, block id; packed: tier, blocks of this replica, places, tokens and nano in use, places, tokens,
--       requests, input and output tokens, nano wanted more; packed: what is given back of rates; the form's text or ''
-- Answer: {1 or 0 (nothing more was taken), places, tokens, nano held now, requests, input, output tokens taken, µs for
--         which they are good, the answer of `acquire` or {}} or {6} or {9}
local function block(keys, args)
  local lease, id, owner, name = keys[1], args[2], args[3], args[4]
  local f = form_of(args[1], id, args[7] ~= '' and args[7] or nil)
  if not f then return {call('GET', P .. 'epoch') == args[1] and UNKNOWN_FORM or EPOCH} end
  local s = caller(f, keys, owner)
  local got = read_all(s)
  if got[1] ~= args[1] then return {EPOCH} end
  local now, a = server_now(got[2]), {}
  if f.checked < now and not keep_form(f, id, now) then return {UNKNOWN_FORM} end
  local places, tokens, nano
  a.tier, a.blocks, places, tokens, nano, a.places, a.tokens, a.requests, a.input, a.output, a.nano = unpack_struct(ASKED, args[5])
  local text = call('HGET', lease, name)
  local had = text and parse(text)
  local had_places, had_tokens = had and had.deadline or 0, had and had.input or 0
  local had_nano = s.out and tonumber(call('HGET', s.out, name)) or 0

  open_records(f, got)
  local turned = turn_rates(s, args[6], now)
  local more, t, r, i, o, m =
    spare_of(s, got, a, had_places - places, had_tokens - tokens, had_nano - nano, turned, now)
  if more then
    places, tokens, nano = places + more, tokens + t, nano + (f.money and m or 0)
    for n = 1, f.nrate do
      local rate = f.rates[n]
      local amount = rate.unit == 0 and r * rate.amount or rate.unit == 1 and i or o
      local bucket = floor(now / rate.width)
      if amount > 0 then
        add_to_rate(records[rate.record][rate.unit], key_of_record(s, rate.record), rate.unit, bucket, amount)
      end
    end
  end
  move_block(s, got, places - had_places, tokens - had_tokens, nano - had_nano, now)
  local replica = sub(lease, #P + 7)
  if s.out and nano > 0 then
    call('HSET', s.out, name, nano)
    call('SET', P .. 'local:' .. tenant_of(s), now, 'EX', PENDING_S)
  elseif s.out then
    call('HDEL', s.out, name)
    if not text then call('HDEL', P .. 'owed:' .. replica, name) end
  end
  if places > 0 then
    local kept = pack(LEASE, 'B', a.tier, now, tokens, 0, nano, places) .. tail_of(id, owner, keys)
    replace_lease(f, lease, name, text, kept)
    if more then call('ZADD', P .. 'blocks', now, replica) end
  elseif text then
    remove_lease(lease, name, text)
  end
  local reply, good = {}, 0
  if more then
    reply, good = told(s, got, nano - had_nano, now)
  elseif places < had_places then
    grant_waiters(args[1], s, got, now)
  end
  return {more and 1 or 0, places, tokens, nano, r or 0, i or 0, o or 0, good, reply}
end

-- Puts what requests of a block were charged under their own ids, so that the poster finds it there.
--
-- KEYS: lease, credit, outstanding
-- ARGV: epoch, block id, nano under its id from now on, then request, nano, …
-- Answer: {1} or {6}
local function charge(keys, args)
  if call('GET', P .. 'epoch') ~= args[1] then return {EPOCH} end
  local out, name, nano = keys[3], args[2], tonumber(args[3])
  local had = tonumber(call('HGET', out, name)) or 0
  if call('HEXISTS', keys[1], name) == 0 then nano = min(nano, had) end -- it was taken for dead's
  local d = nano - had
  for i = 4, #args, 2 do
    if call('HSETNX', out, args[i], args[i + 1]) == 1 then d = d + args[i + 1] end
  end
  if nano > 0 then call('HSET', out, name, nano) else call('HDEL', out, name) end
  local raw = d ~= 0 and call('MGET', keys[2])[1]
  if raw then call('SET', keys[2], moved_figure(raw, d)) end
  return {1}
end

-- Gives back the places of a block that its replica cannot or need not speak for; its money stays, as nobody knows yet what its
-- requests used of it. The replica's next life, back with its spool, gives it back.
function drop_block(epoch, lease, name, text, now)
  local v, replica = parse(text), sub(lease, #P + 7)
  local tenant = string.match(text, ' {tg}:credit:(%x+)', LEASE_SIZE)
  remove_lease(lease, name, text)
  if tenant then call('HSET', P .. 'owed:' .. replica, name, tenant) end
  local s = caller_of(epoch, text, {lease})
  if not s then return nil end
  local got = read_all(s)
  open_records(s.form, got)
  move_block(s, got, -v.deadline, -v.input, 0, now)
  return s, got
end

register('block', block, 'allow-oom')
register('charge', charge, 'allow-oom')

-- How what a lease holds is given back: by its replica (release.lua), or for one that cannot speak for it.
local drop_block -- in blocks.lua

local opened = new_record()
local unused = {[0] = 0, 0, 0} -- of a lease: 1 when its request does not count, tokens by unit

-- Returns a record's new text without the request in flight and what of its rates was not used; nothing when it stays.
local function give_back_record(record, key, raw, at)
  local counts, changed = record.counts, false
  if counts then
    for unit = 0, 2 do changed = changed or (counts[unit] and unused[unit] ~= 0) end
  end
  if not changed then
    if record.conc == 0 then return nil end
    local conc = pack('<d', max(0, unpack_struct('<d', raw) - record.conc))
    return #raw == 8 and conc or conc .. sub(raw, 9)
  end
  open_record(opened, raw, record.units)
  opened.conc = max(0, opened.conc - record.conc)
  for unit = 0, 2 do
    if counts[unit] and unused[unit] ~= 0 then
      local d = unit == 0 and record.takes[0] or unused[unit]
      adjust_rate(opened[unit], key, unit, record.width, at, -d)
    end
  end
  return record_text(opened, key, record.window)
end

-- Gives back the slots of a lease that has just been removed, what of its tokens was not used (-1: as estimated), of its
-- money and its budgets what was not charged. `got` is the answer to `read_all`. `cached`: of the input, for its cost alone.
-- `unserved`: nothing was sent to an engine.
local function give_back(s, request, lease, got, now, charge, input, output, cached, unserved)
  local f, state, kind, at, had_input, had_output, hold, deadline = s.form, unpack_struct(LEASE, lease)
  local n, granted = 1, state == 'G'
  if granted then
    local inflight, waiting, _, tokens, limit, cap, token_cap, saturation, batch, standard = read_load(got[5])
    tokens = max(0, tokens - had_input - had_output)
    set[2] = f.load
    set[3] = pack(LOAD, max(0, inflight - 1), waiting, now, tokens, limit, cap, token_cap, saturation, batch, standard)
    n = 3
    if waiting > 0 then
      local turns = read_turns(f.deployment)
      note_served(turns, cost_of(had_input, had_output, 0), now)
      set[4], set[5], n = P .. 'd:' .. f.deployment, turns_text(turns), 5
    end
  end
  if granted then
    for i = 1, f.ncap do
      set[n + 1], set[n + 2], n = key_of_cap(s, i), max(0, (tonumber(got[5 + i]) or 0) - f.cap_amount[i]), n + 2
    end
  end
  unused[0] = unserved and 1 or 0
  unused[1] = input >= 0 and had_input - input or 0
  unused[2] = output >= 0 and had_output - output or 0
  for i = 1, f.nrecord do
    local raw = got[5 + f.ncap + i]
    local text = raw and give_back_record(f.records[i], key_of_record(s, i), raw, at)
    if text then
      set[n + 1], set[n + 2], n = key_of_record(s, i), text, n + 2
    end
  end
  if charge ~= KEEP then
    local difference = (charge == REMOVE and 0 or charge) - hold
    for i = 1, f.nspend do
      local spent = tonumber(got[5 + f.ncap + f.nrecord + i])
      if spent then
        set[n + 1], set[n + 2], n = key_of_spend(s, i), max(0, spent + difference), n + 2
      end
    end
  end
  local d = s.out and settle(s.out, request, charge, hold) or 0
  local figure = d ~= 0 and got[5 + f.nread]
  if figure then
    set[n + 1], set[n + 2], n = s.credit, moved_figure(figure, d), n + 2
  end
  write(n)
  if granted and deadline > 0 and input >= 0 and output >= 0 then
    charge_turns(s, kind % KINDS, cost_of(input, output, cached) - cost_of(had_input, had_output, 0))
  end
end

-- Gives back everything of a lease that its replica cannot or need not speak for: `served` keeps what it took of money,
-- tokens and budgets, because nobody knows yet what it used.
function drop(epoch, lease, request, replica, now, served)
  local text = call('HGET', lease, request)
  if not text then return nil end
  if sub(text, 1, 1) == 'B' then return drop_block(epoch, lease, request, text, now) end
  remove_lease(lease, request, text)
  local s = caller_of(epoch, text, {lease})
  if not s then -- its form is gone: of its money can still be told
    local tenant = string.match(text, ' {tg}:credit:(%x+)', LEASE_SIZE)
    if tenant and served and sub(text, 1, 1) == 'G' then
      call('HSET', P .. 'owed:' .. replica, request, tenant)
    elseif tenant then
      settle_alone(tenant, request, REMOVE)
    end
    return nil
  end
  local v, member = parse(text), request .. ' ' .. replica
  if v.state == 'W' then
    leave_queue(s, member, v.tier, v.cost)
    served = false
  elseif v.tier == 0 then
    call('ZREM', running_of(s.form.deployment, 0), member)
  end
  local got = read_all(s)
  if served then
    give_back(s, request, text, got, now, KEEP, -1, -1, 0, false)
    if s.out then call('HSET', P .. 'owed:' .. replica, request, tenant_of(s)) end
  else
    give_back(s, request, text, got, now, REMOVE, 0, 0, 0, true)
  end
  return s
end

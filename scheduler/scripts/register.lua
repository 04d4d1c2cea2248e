-- Enters a running request that this server does not know: after it lost data, or granted while it was away. Idempotent
-- by request id; takes no notice of limits, since the request runs.
--
-- One that stands in the queue here leaves it; a grant in the post counts as claimed. What it takes of a rate is taken
-- now unless this life of the data has had it.
--
-- KEYS: lease
-- ARGV: epoch, request id, lease (granted; admitted at 0 when that was not in this life), form's text
-- Answer: {1 entered, 0 known} or {6} when the epoch changed
local entered = new_record()

local function register_lease(keys, args)
  local lease, epoch, request = keys[1], args[1], args[2]
  local v = parse(args[3])
  local known_form = form_of(epoch, sub(args[3], LEASE_SIZE + 1, LEASE_SIZE + FORM_ID_SIZE), args[4])
  local s = known_form and caller_of(epoch, args[3], {lease})
  if not s then return {EPOCH} end
  local f, got = s.form, read_all(s)
  if got[1] ~= epoch then return {EPOCH} end
  local now, n = server_now(got[2]), 3
  local member = request .. ' ' .. sub(lease, #P + 7)
  call('ZREM', P .. 'unclaimed', member)
  local had = call('HGET', lease, request)
  local fresh = s.out and call('HSETNX', s.out, request, v.hold) == 1
  local figure = fresh and got[5 + f.nread]
  if figure then call('SET', s.credit, moved_figure(figure, v.hold)) end
  if had and sub(had, 1, 1) == 'G' then return {0} end
  if had then leave_queue(s, member, v.tier, v.cost) end

  local inflight, waiting, _, tokens, limit, cap, token_cap, saturation, batch, standard = read_load(call('GET', f.load))
  tokens = tokens + v.input + v.output
  set[2] = f.load
  set[3] = pack(LOAD, inflight + 1, waiting, now, tokens, limit, cap, token_cap, saturation, batch, standard)
  for i = 1, f.ncap do
    set[n + 1], set[n + 2], n = key_of_cap(s, i), (tonumber(got[5 + i]) or 0) + f.cap_amount[i], n + 2
  end
  for i = 1, f.nspend do
    local spent = tonumber(got[5 + f.ncap + f.nrecord + i])
    if fresh and spent then -- one that is not there is made with what is outstanding
      set[n + 1], set[n + 2], n = key_of_spend(s, i), spent + v.hold, n + 2
    end
  end
  local at = had and parse(had).at or v.at
  for i, record in ipairs(f.records) do
    local key = key_of_record(s, i)
    open_record(entered, got[5 + f.ncap + i], record.units)
    if not had then entered.conc = entered.conc + record.conc end
    for unit = 0, at == 0 and record.units - 1 or -1 do
      if record.counts[unit] then
        local rate = entered[unit]
        local bucket = max(rate.l, floor(now / record.width))
        turn_rate(rate, key, unit, bucket)
        add_to_rate(rate, key, unit, bucket, unit == 0 and record.takes[0] or unit == 1 and v.input or v.output)
      end
    end
    set[n + 1], set[n + 2], n = key, record_text(entered, key, record.window), n + 2
  end
  write(n)
  if at == 0 then at = now end
  local text = pack(LEASE, 'G', v.kind, at, v.input, v.output, v.hold, 0) .. sub(args[3], LEASE_SIZE + 1)
  replace_lease(f, lease, request, had, text)
  if v.tier == 0 then note_running(f.deployment, v, member, now) end
  return {1}
end

register('register', register_lease, 'allow-oom')

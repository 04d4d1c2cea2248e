-- Enters a running request that this server does not know: after it lost data, or granted while it was away. Idempotent
-- by request id; takes no notice of limits, since the request runs.
--
-- One that stands in the queue here leaves it; a grant in the post counts as claimed. What it takes of a rate is taken
-- now unless this life of the data has had it.
--
-- KEYS: lease
-- ARGV: epoch, request id, lease (granted; admitted at 0 when that was not in this life), spec's text
-- Answer: {1 entered, 0 known} or {6} when the epoch changed
local function register_lease(keys, args)
  local lease, epoch, request = keys[1], args[1], args[2]
  local v = parse(args[3])
  local s = spec_of(epoch, sub(args[3], LEASE_SIZE + 1), args[4])
  if not s then return {EPOCH} end
  local f, got = s.form, read_back(s)
  if got[1] ~= epoch then return {EPOCH} end
  local now, n = server_now(got[2]), 3
  local member = request .. ' ' .. sub(lease, #P + 7)
  call('ZREM', P .. 'unclaimed', member)
  local had = call('HGET', lease, request)
  local fresh = s.tenant ~= '' and call('HSETNX', s.out, request, v.hold) == 1
  if fresh then call('HINCRBY', s.credit, 'o', v.hold) end
  if had and sub(had, 1, 1) == 'G' then return {0} end
  if had then leave_queue(s, member, v.tier, v.cost) end

  local inflight, waiting, _, tokens, limit, cap, token_cap, saturation, batch, standard = read_load(call('GET', f.load))
  tokens = tokens + v.input + v.output
  set[2] = f.load
  set[3] = pack(LOAD, inflight + 1, waiting, now, tokens, limit, cap, token_cap, saturation, batch, standard)
  for i = 1, had and f.ncap or f.ncap + f.nconc do
    set[n + 1], set[n + 2] = key_of(s, i), (tonumber(got[5 + i]) or 0) + f.amount[i]
    n = n + 2
  end
  for i = f.ncap + f.nconc + 1, f.ncount do
    local spent = tonumber(got[5 + i])
    if fresh and spent then -- one that is not there is made with what is outstanding
      set[n + 1], set[n + 2] = key_of(s, i), spent + v.hold
      n = n + 2
    end
  end
  write(n)

  local at = had and parse(had).at or v.at
  if at == 0 then
    at = now
    for i, r in ipairs(f.rates) do
      take_rate(key_of_rate(s, i), r, r.unit == 0 and r.amount or r.unit == 1 and v.input or v.output, now)
    end
  end
  call('HSET', lease, request, pack(LEASE, 'G', v.tier, at, v.input, v.output, v.hold, 0) .. sub(args[3], LEASE_SIZE + 1))
  return {1}
end

register('register', register_lease, 'allow-oom')

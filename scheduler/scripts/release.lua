-- Gives back a block of a former life of this replica.
local function release_block(epoch, lease, block, text)
  local got = call('MGET', P .. 'epoch', P .. 'offset_us')
  if got[1] ~= epoch then return {EPOCH} end
  local now = server_now(got[2])
  local s = drop_block(epoch, lease, block, text, now)
  if s then dispatch(epoch, now, s.form.deployment, 8) end
  return {1}
end

-- Gives back what a request holds, corrects its tokens and budgets to what was used, settles its money, and grants the
-- next waiters. Idempotent by request id.
--
-- KEYS: lease; then the names of the caller's demands as in `acquire`, or none: then those in the lease count
-- ARGV: epoch, tenant ('' without money), request id, packed: charge (-3 as if it had never come, -2 keep, -1 remove, else
--       nano), input tokens used (-1: as estimated), output tokens used, of the input those from a prefix cache
-- Answer: {1 given back, 0 nothing was held} or {6} when the epoch changed
local function release(keys, args)
  local lease, epoch, tenant, request = keys[1], args[1], args[2], args[3]
  local charge, input, output, cached = unpack_struct('<dddd', args[4])
  local unserved = charge == UNSERVED
  if unserved then charge, input, output, cached = REMOVE, 0, 0, 0 end
  local text = call('HGET', lease, request)
  if text and sub(text, 1, 1) == 'B' then return release_block(epoch, lease, request, text) end
  local s = text and caller_of(epoch, text, keys)
  if not s then
    if call('GET', P .. 'epoch') ~= epoch then return {EPOCH} end
    if text then remove_lease(lease, request, text) end
    if tenant ~= '' then settle_alone(tenant, request, charge) end
    return {0}
  end
  local got = read_all(s)
  if got[1] ~= epoch then return {EPOCH} end
  local now, waited = server_now(got[2]), sub(text, 1, 1) == 'W'
  remove_lease(lease, request, text)
  if waited then
    local v = parse(text)
    leave_queue(s, request .. ' ' .. sub(lease, #P + 7), v.tier, v.cost)
    charge, input, output, cached, unserved = REMOVE, 0, 0, 0, true
  elseif byte(text, 2) % KINDS == 0 then
    call('ZREM', running_of(s.form.deployment, 0), request .. ' ' .. sub(lease, #P + 7))
  end
  give_back(s, request, text, got, now, charge, input, output, cached, unserved)
  if s.out and charge == KEEP then call('HSET', P .. 'owed:' .. sub(lease, #P + 7), request, tenant_of(s)) end
  if (tonumber(got[4]) or 0) > 0 then
    -- the waiters of other deployments gain only where the cap of all was in the way
    local of_all = (tonumber(got[6]) or 0) >= ceiling(s.form.cap_most[1], 0)
    dispatch(epoch, now, s.form.deployment, of_all and 8 or 0)
  end
  return {1}
end

register('release', release, 'allow-oom')

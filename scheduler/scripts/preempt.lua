-- Preemption: a request of a higher tier that has waited long gets the place of one of a lower tier. See ADR 0034. And
-- batch of a tenant that has less than it deserves gets that of one that has more than it deserves (reclaim, ADR 0035).
--
-- A replica is asked for the place (message P<tier>) and answers with `yield`: it has ended the engine's call, or it may not,
-- because the caller has had a byte. The place is free with the answer and no earlier, so no cap is ever exceeded. Who is
-- asked leaves r: and is not asked again for this grant; an answer that has not come in 2 s is not waited for. A grant that
-- its replica has not claimed is taken back without asking.
--
-- a:<deployment> hash: who was asked, '<request> <replica>' → when, and when it was granted (both µs)
-- n:<deployment> zset: preemptions of the last second by when they were asked for
-- x:<deployment> since when the engines have been overfull (µs)
local PATIENCE = {0.8, 0.5} -- by tier from standard: how much of it is gone before anybody is preempted
local SECOND_US, ANSWER_US, KEEP_S = 1000000, 2000000, 60
local PER_SECOND = 0.05 -- of what is in flight, at least one
local HEAT, HEAT_US = 1.2, 5000000 -- so full for so long is an emergency
local RECLAIM_US, RECLAIM_PART = 5000000, 0.5 -- batch waits so long, or for this part of its time, before it takes back
-- Grants looked at for a victim. With entitlements more: what is lent is older than what those below their share were granted.
local LOOKED_AT, LOOKED_AT_ENTITLED = 32, 256

local function asked_of(deployment) return P .. 'a:' .. deployment end

local function note_heat(deployment, saturation, now)
  if saturation >= HEAT then
    call('SET', P .. 'x:' .. deployment, now, 'NX')
  else
    call('DEL', P .. 'x:' .. deployment)
  end
end

local function is_emergency(deployment, now)
  local since = call('GET', P .. 'x:' .. deployment)
  return since and tonumber(since) + HEAT_US <= now
end

-- Puts a granted request back in the queue, with its age, until `deadline`. It has used nothing, so it owes no turn; the
-- place goes to a tier above its own before it may take one itself.
local function put_back(epoch, s, text, v, member, granted_at, deadline, now)
  local request, replica = string.match(member, '^(%S+) (%S+)$')
  local f, got, tier = s.form, read_all(s), v.tier
  local load, turns = {read_load(got[5])}, read_turns(f.deployment)
  load[1], load[4] = max(0, load[1] - 1), max(0, load[4] - v.input - v.output)
  if v.deadline > 0 then
    local kept = math.exp(-max(0, turns[GIVEN_AT] - granted_at) / LATELY_US)
    turns[GIVEN + tier] = max(0, turns[GIVEN + tier] - v.cost * kept)
  end
  set[2], set[3], set[4], set[5] = f.load, pack(LOAD, unpack(load, 1, LOAD_SIZE)), P .. 'd:' .. f.deployment, turns_text(turns)
  for i = 1, f.ncap do
    set[4 + 2 * i], set[5 + 2 * i] = key_of_cap(s, i), max(0, (tonumber(got[5 + i]) or 0) - f.cap_amount[i])
  end
  write(5 + 2 * f.ncap)
  if v.deadline > 0 then charge_turns(s, tier, -v.cost) end
  local kind = tier + KINDS * (v.preempted + 1)
  local waits = pack(LEASE, 'W', kind, v.at, v.input, v.output, v.hold, deadline) .. sub(text, LEASE_SIZE + 1)
  change_lease(P .. 'lease:' .. replica, request, text, waits)
  local tries = 0
  repeat
    tries = tries + 1
  until tries > OWNERS_TRIED or dispatch_one(epoch, f.deployment, now, tier) ~= 'next'

  load = {read_load(call('GET', f.load))}
  local before = load[2]
  load[2] = before + 1
  if tier < 2 then load[9 + tier] = load[9 + tier] + 1 end
  call('SET', f.load, pack(LOAD, unpack(load, 1, LOAD_SIZE)))
  join_queue(s, member, tier, deadline, v.cost, now, before)
  dispatch(epoch, now, f.deployment, 0)
end

local function lease_of(epoch, member)
  local request, replica = string.match(member, '^(%S+) (%S+)$')
  local text = call('HGET', P .. 'lease:' .. replica, request)
  local s = text and caller_of(epoch, text, {P .. 'lease:' .. replica})
  if s then return s, text, parse(text), request, replica end
end

-- Counts the places that have been asked for and not yet given out of `load` and of what their tenants have; forgets those
-- whose time is over.
local function count_asked(epoch, deployment, load, entitled, stand, now)
  local asked = call('HGETALL', asked_of(deployment))
  for i = 1, #asked, 2 do
    local at = unpack_struct('<dd', asked[i + 1])
    local s, _, v = lease_of(epoch, asked[i])
    if not s or v.state ~= 'G' or at + ANSWER_US <= now then
      call('HDEL', asked_of(deployment), asked[i])
    else
      load[1], load[4] = load[1] - 1, load[4] - v.input - v.output
      local place = entitled and entitled.place[s.owner]
      if place then stand.n[place] = stand.n[place] - 1 end
    end
  end
end

-- Whose turn it is in the highest tier that waits, among the tenants that may have more: its spec, its lease, what it is
-- decided by. Nothing when it fits, or has not waited long enough to preempt for.
local function pressing(epoch, deployment, load, entitled, stand, now)
  local tier = load[2] - load[9] - load[10] > 0 and 2 or 1
  for _, owner in ipairs(call('ZRANGE', queue_of(deployment, tier), 0, OWNERS_TRIED - 1)) do
    local member = call('ZRANGE', line_of(deployment, tier, owner), 0, 0)[1]
    local s, _, v, _, replica
    if member then s, _, v, _, replica = lease_of(epoch, member) end
    if not s or v.state ~= 'W' or v.deadline <= now or not alive(replica, now) then return nil end
    local got, i = read_all(s), entitled and entitled.place[owner]
    local within = i and stand.within[i]
    local fits = room(s, v, got, load, false, within, stand)
    if fits ~= 'owner' then
      if fits ~= 'full' or now < v.at + (v.deadline - v.at) * PATIENCE[tier] then return nil end
      return s, v, got, within
    end
  end
end

-- Where batch alone waits: the tenant below what it deserves whose turn it is, as `pressing`.
local function reclaiming(epoch, deployment, load, entitled, stand, had, now)
  for n, owner in ipairs(waiting_entitled(queue_of(deployment, 0), entitled, function(i)
    return had[i] < entitled.deserved[i]
  end)) do
    local member = call('ZRANGE', line_of(deployment, 0, owner), 0, 0)[1]
    local s, _, v, _, replica
    if member then s, _, v, _, replica = lease_of(epoch, member) end
    if n > OWNERS_TRIED or not s or v.state ~= 'W' or v.deadline <= now or not alive(replica, now) then return nil end
    local got, within = read_all(s), stand.within[entitled.place[owner]]
    local fits = room(s, v, got, load, false, within, stand)
    if fits ~= 'owner' then
      if fits ~= 'full' or now < v.at + min(RECLAIM_US, (v.deadline - v.at) * RECLAIM_PART) then return nil end
      return s, v, got, within
    end
  end
end

-- Has the tenant of this request more than it deserves? Who is entitled to nothing deserves nothing.
local function is_above(s, entitled, stand)
  local i = entitled.place[s.owner]
  return not i or stand.n[i] > entitled.deserved[i]
end

-- May the tenant of this request do without it? What is guaranteed to it would come back to it at once.
local function may_miss(s, load, entitled, stand)
  local i = entitled and entitled.place[s.owner]
  if not i then return true end
  if stand.n[i] <= guaranteed_now(entitled.guarantee[i], nearer(load[5], load[6]), load[5]) then return false end
  stand.n[i] = stand.n[i] - 1
  return true
end

-- Reads a grant that may be preempted: a victim, or false. `unsent_only`: one that its replica has not claimed.
local function victim_of(epoch, index, member, granted_at, unsent_only, now)
  local s, text, v, request, replica = lease_of(epoch, member)
  if not s or v.state ~= 'G' then
    call('ZREM', index, member)
    return false
  end
  if not alive(replica, now) or (unsent_only and not call('ZSCORE', P .. 'unclaimed', member)) then return false end
  return {s, text, v, member, granted_at, request, replica}
end

-- Appends victims of one tier until the head fits; true when it does. First those of tenants above what they deserve, if any
-- are entitled (`above_only`: no others); the newest grant first.
local function choose(epoch, deployment, tier, head, load, entitled, stand, above_only, most, chosen, now)
  local oldest, unsent_only = '-inf', false
  if tier == 1 then oldest, unsent_only = now - NEW_US, not is_emergency(deployment, now) end
  local index, looked = running_of(deployment, tier), {}
  local looked_at = entitled and LOOKED_AT_ENTITLED or LOOKED_AT
  local found = call('ZREVRANGEBYSCORE', index, '+inf', oldest, 'WITHSCORES', 'LIMIT', 0, looked_at)
  for pass = entitled and 1 or 2, above_only and 1 or 2 do
    for i = 1, #found, 2 do
      if #chosen >= most then return false end
      if looked[i] == nil then
        looked[i] = victim_of(epoch, index, found[i], tonumber(found[i + 1]), unsent_only, now)
      end
      local one = looked[i]
      if one and (pass == 2 or is_above(one[1], entitled, stand)) and may_miss(one[1], load, entitled, stand) then
        chosen[#chosen + 1], looked[i] = one, false
        load[1], load[4] = load[1] - 1, load[4] - one[3].input - one[3].output
        if room(head.s, head.v, head.got, load, false, head.within, stand) == 'fits' then return true end
      end
    end
  end
  return false
end

-- Asks for the places that the head of the line needs, when it has waited long and no fewer than may be asked for are
-- enough. Places asked for and not yet given count as free.
local function press(epoch, deployment, now)
  local found = call('MGET', P .. 'm:' .. deployment, P .. 'h:' .. deployment)
  local load, entitled = {read_load(found[1])}, entitled_of(deployment, found[2])
  local reclaims = load[2] - load[9] <= 0
  if load[2] <= 0 or (reclaims and not entitled) then return end
  local recent = P .. 'n:' .. deployment
  call('ZREMRANGEBYSCORE', recent, '-inf', now - SECOND_US)
  local most = max(1, floor(load[1] * PER_SECOND)) - call('ZCARD', recent)
  if most <= 0 then return end
  local stand, had = entitled and stand_of(entitled, nearer(load[5], load[6]), load[5]), {}
  for i = 1, stand and #stand.n or 0 do had[i] = stand.n[i] end
  count_asked(epoch, deployment, load, entitled, stand, now)
  local head = {}
  if reclaims then -- one place for one: what its tier may not fill is not emptied for it
    head.s, head.v, head.got, head.within = reclaiming(epoch, deployment, load, entitled, stand, had, now)
    most = 1
  else
    head.s, head.v, head.got, head.within = pressing(epoch, deployment, load, entitled, stand, now)
  end
  if not head.s then return end
  local chosen, enough = {}, false
  for tier = 0, max(0, head.v.tier - 1) do
    enough = enough or choose(epoch, deployment, tier, head, load, entitled, stand, reclaims, most, chosen, now)
  end
  if not enough then return end
  for _, one in ipairs(chosen) do
    local s, text, v, member, granted_at, request, replica = unpack(one)
    call('ZREM', running_of(deployment, v.tier), member)
    call('ZADD', recent, now, member .. ' ' .. v.preempted)
    if call('ZREM', P .. 'unclaimed', member) == 1 then
      put_back(epoch, s, text, v, member, granted_at, v.deadline, now)
    else
      call('HSET', asked_of(deployment), member, pack('<dd', now, granted_at))
      call('RPUSH', P .. 'grants:' .. replica, 'P' .. head.v.tier .. ' ' .. request)
    end
  end
  call('EXPIRE', asked_of(deployment), KEEP_S)
  call('EXPIRE', recent, KEEP_S)
end

-- A replica's answer when it was asked for the place of a request.
--
-- KEYS: lease
-- ARGV: epoch, request id, µs that it will wait in the queue (-1: it keeps its place)
-- Answer: {1 it waits, 0 it keeps what it has} or {6} when the epoch changed
local function yield(keys, args)
  local replica = sub(keys[1], #P + 7)
  local member, wait_us = args[2] .. ' ' .. replica, tonumber(args[3])
  local s, text, v = lease_of(args[1], member)
  local got = call('MGET', P .. 'epoch', P .. 'offset_us')
  if got[1] ~= args[1] then return {EPOCH} end
  if not s then return {0} end
  local deployment, now, waits = s.form.deployment, server_now(got[2]), v.state == 'W'
  local asked = call('HGET', asked_of(deployment), member)
  call('HDEL', asked_of(deployment), member)
  if not waits and wait_us < 0 then
    call('ZREM', P .. 'n:' .. deployment, member .. ' ' .. v.preempted)
  elseif not waits then
    call('ZREM', running_of(deployment, v.tier), member)
    local granted_at = now
    if asked then granted_at = select(2, unpack_struct('<dd', asked)) end
    put_back(args[1], s, text, v, member, granted_at, now + wait_us, now)
    waits = true
  end
  press(args[1], deployment, now)
  return {waits and 1 or 0}
end

register('yield', yield, 'allow-oom')

-- Says that the head of a deployment's line may have waited long.
--
-- KEYS: load
-- ARGV: epoch, deployment
-- Answer: {1} or {6} when the epoch changed
local function press_call(keys, args)
  local got = call('MGET', P .. 'epoch', P .. 'offset_us')
  if got[1] ~= args[1] then return {EPOCH} end
  press(args[1], args[2], server_now(got[2]))
  return {1}
end

register('press', press_call, 'allow-oom')

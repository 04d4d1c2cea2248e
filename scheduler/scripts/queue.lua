-- Who waits for a deployment, and whose turn it is: tier, then tenant by virtual time, then deadline.
--
-- Tiers: priority goes first. A lower tier that waits gets its floor of what is granted all the same (FLOOR of the cost
-- granted lately), for which it may fill the whole cap; else it stops at its ceiling (CEILING).
-- Tenants: virtual token counters (VTC, OSDI '24). A tenant's time runs by cost over weight when a request of it is
-- granted out of the queue, and is corrected when it ends. Who comes anew starts at the time of the last one served, so that
-- nobody saves up turns by being idle. Nothing is counted while nobody waits.
-- Within a tenant: the earliest deadline.
-- Entitlements (entitlements.lua) come before that: who has less in flight than is guaranteed to it goes first, whatever its
-- tier and up to the whole cap; within a tier, who has less than it deserves goes before who has more. All others leave free
-- what is guaranteed and not in use.
--
-- q:<deployment>:<tier>          zset: waiting tenants by their virtual time
-- w:<deployment>:<tier>:<tenant> zset: the requests of one, '<request> <replica>', by deadline (µs)
-- v:<deployment>:<tier>          hash: the virtual time of tenants that do not wait now
-- h:<deployment>                 the entitlements of tenants
-- r:<deployment>:<tier>          zset: the grants that may be preempted, as in w:, by when they were granted; see preempt.lua
-- d:<deployment>                 the turns, packed: by tier virtual time of the last served (VT), cost waiting (ASKED), cost
--                                granted lately (GIVEN); when that was; cost served and µs while somebody waited, both of
--                                late (SERVED, BUSY_US), when that was; until when no batch has its turn (PACED); grants ever (GRANTS)
--
-- Cost, in tenths of an input token: an input token costs 10, one from the prefix cache 1, an output token 20. As estimated
-- at the door, with nothing cached; in the end as used.
local FLOOR = {[0] = 0.055, 0.21, 0} -- 5 and 20 % are promised
local LATELY_US, STALL_US, REMEMBER_S = 20000000, 5000000, 120
local TURNS, TURNS_SIZE = '<ddddddddddddddddddd', 19
local VT, ASKED, GIVEN, GIVEN_AT, SERVED, BUSY_US, SERVED_AT, PACED, GRANTS = 1, 4, 7, 10, 11, 12, 13, 16, 17
-- of floors: to which part, when priority misses its time for so long without such a pause; places among the turns
local YIELDS = {to = 0.5, after_us = 30000000, apart_us = 10000000, since = 14, at = 15}
local OWNERS_TRIED, GRANTS_MAX, TIE = 8, 16, 0.001
local NEW_US = 2000000 -- of a grant: its prompt is being read

local drop -- in giveback.lua

local function queue_of(deployment, tier) return P .. 'q:' .. deployment .. ':' .. tier end

local function line_of(deployment, tier, owner) return P .. 'w:' .. deployment .. ':' .. tier .. ':' .. owner end

local function past_of(deployment, tier) return P .. 'v:' .. deployment .. ':' .. tier end

local function running_of(deployment, tier) return P .. 'r:' .. deployment .. ':' .. tier end

local function parse_turns(raw)
  return raw and {unpack_struct(TURNS, raw)} or {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}
end

local function read_turns(deployment) return parse_turns(call('GET', P .. 'd:' .. deployment)) end

local function turns_text(turns) return pack(TURNS, unpack(turns, 1, TURNS_SIZE)) end

-- Counts a request out of, or into, those that wait for a deployment.
local function count_waiting(deployment, tier, change, cost)
  local key, turns = P .. 'm:' .. deployment, read_turns(deployment)
  local inflight, waiting, last, tokens, limit, cap, token_cap, saturation, batch, standard = read_load(call('GET', key))
  waiting = max(0, waiting + change)
  if tier == 0 then batch = max(0, batch + change) elseif tier == 1 then standard = max(0, standard + change) end
  turns[ASKED + tier] = waiting > 0 and max(0, turns[ASKED + tier] + change * cost) or 0
  call('MSET', key, pack(LOAD, inflight, waiting, last, tokens, limit, cap, token_cap, saturation, batch, standard),
    P .. 'd:' .. deployment, turns_text(turns))
  if waiting == 0 then call('ZREM', P .. 'queues', deployment) end
end

-- Enters a request; the load is counted by the caller, who has it in hand. `before`: how many wait for this deployment.
-- Of tenants that come anew the one that came first is served first. Returns the turns.
local function join_queue(s, member, tier, deadline, cost, now, before)
  local deployment, owner = s.form.deployment, s.owner
  local queue, turns = queue_of(deployment, tier), read_turns(deployment)
  if call('ZADD', line_of(deployment, tier, owner), deadline, member) == 1 and not call('ZSCORE', queue, owner) then
    local past = tonumber(call('HGET', past_of(deployment, tier), owner)) or 0
    call('ZADD', queue, max(past, turns[VT + tier] + before * TIE), owner)
  end
  turns[ASKED + tier] = turns[ASKED + tier] + cost
  if before == 0 then
    turns[SERVED_AT] = now
    call('ZADD', P .. 'queues', now, deployment)
    recall_blocks(deployment, now)
  end
  local entitled = s.form.entitled and s.form.entitled.text or ''
  call('MSET', P .. 'd:' .. deployment, turns_text(turns), P .. 'h:' .. deployment, entitled)
  call('INCR', P .. 'waiters')
  return turns
end

-- Takes a member out of its line; the tenant, when it was its last, out of the queue. False when it was not there.
local function leave_line(deployment, tier, owner, member)
  local line = line_of(deployment, tier, owner)
  if call('ZREM', line, member) == 0 then return false end
  call('DECR', P .. 'waiters')
  if call('EXISTS', line) == 0 then
    local queue, past = queue_of(deployment, tier), past_of(deployment, tier)
    call('HSET', past, owner, call('ZSCORE', queue, owner) or 0)
    call('EXPIRE', past, REMEMBER_S)
    call('ZREM', queue, owner)
  end
  return true
end

local function leave_queue(s, member, tier, cost)
  if leave_line(s.form.deployment, tier, s.owner, member) then count_waiting(s.form.deployment, tier, -1, cost) end
end

-- Moves a tenant's virtual time by what it took more (or less) than it was charged.
local function charge_turns(s, tier, cost)
  local queue, past = queue_of(s.form.deployment, tier), past_of(s.form.deployment, tier)
  if call('ZSCORE', queue, s.owner) then
    call('ZINCRBY', queue, cost / s.form.weight, s.owner)
  elseif call('HEXISTS', past, s.owner) == 1 then
    call('HINCRBYFLOAT', past, s.owner, cost / s.form.weight)
  end
end

-- Notes that a request of this cost has ended while somebody waits: that is how fast the deployment serves.
local function note_served(turns, cost, now)
  local since = min(STALL_US, max(0, now - turns[SERVED_AT]))
  local kept = math.exp(-since / LATELY_US)
  turns[SERVED], turns[BUSY_US], turns[SERVED_AT] = turns[SERVED] * kept + cost, turns[BUSY_US] * kept + since, now
end

local function note_given(turns, tier, cost, now)
  local kept = math.exp(-max(0, now - turns[GIVEN_AT]) / (LATELY_US / 2))
  for t = 0, 2 do turns[GIVEN + t] = turns[GIVEN + t] * kept end
  turns[GIVEN + tier], turns[GRANTS + tier], turns[GIVEN_AT] = turns[GIVEN + tier] + cost, turns[GRANTS + tier] + 1, now
end

-- Notes that a priority request is refused because it would be served too late.
local function note_missed(turns, now)
  if now - turns[YIELDS.at] > YIELDS.apart_us then turns[YIELDS.since] = now end
  turns[YIELDS.at] = now
end

-- What part of the cost granted a tier that waits gets: half of its floor while priority alone is more than fits, which is
-- when its requests have been refused as too late for 30 s.
local function floor_of(turns, tier, now)
  local missing = now - turns[YIELDS.at] <= YIELDS.apart_us and turns[YIELDS.at] - turns[YIELDS.since] >= YIELDS.after_us
  return missing and FLOOR[tier] * YIELDS.to or FLOOR[tier]
end

-- How long a request that joins now will wait, in µs: what is before it over how fast the deployment serves. Of its own
-- tier that is what fair turns let pass before it; a higher tier keeps what it had lately, a lower one its floor.
-- `waiting`: requests by tier. `has_less`: than its tenant is entitled to: 'guaranteed', it is next; 'deserved', no other
-- tenant's turn comes before.
local function wait_of(s, tier, turns, waiting, has_less, now)
  if has_less == 'guaranteed' then return 0 end
  if turns[BUSY_US] < 100000 or turns[SERVED] <= 0 then return 0 end -- nothing is known yet
  local higher, given, above, free = 0, 0, 0, 1
  for t = 0, 2 do
    given = given + turns[GIVEN + t]
    if t > tier then
      higher, above = higher + turns[ASKED + t], above + turns[GIVEN + t]
    elseif t < tier and waiting[t] > 0 then
      free = free - floor_of(turns, t, now)
    end
  end
  -- while none above it waits a tier gets half, whatever those had lately
  local least = higher > 0 and max(floor_of(turns, tier, now), floor_of(turns, 0, now)) or 0.5
  local part = given > 0 and max(least, 1 - above / given) or 1
  local own = turns[ASKED + tier]
  if waiting[tier] > 0 then
    local owners = call('ZCARD', queue_of(s.form.deployment, tier))
    local mine = call('ZCARD', line_of(s.form.deployment, tier, s.owner))
    if mine == 0 then owners = owners + 1 end
    local passing = has_less == 'deserved' and 1 or owners / s.form.weight
    own = min(own, mine * passing * own / waiting[tier])
  end
  return (higher + own / part) / free * turns[BUSY_US] / turns[SERVED]
end

-- A grant that may be preempted is noted as such. Standard is so only out of the queue and while it is new, so that it need
-- not be looked at when it ends.
local function note_running(deployment, v, member, now)
  if v.tier > 1 or v.preempted >= PREEMPTED_MAX then return end
  local index = running_of(deployment, v.tier)
  if v.tier == 1 then call('ZREMRANGEBYSCORE', index, '-inf', now - NEW_US) end
  call('ZADD', index, now, member)
end

local function alive(replica, now)
  local expiry = call('ZSCORE', P .. 'beat', replica)
  return expiry and tonumber(expiry) * 1000 > now
end

-- Does the request of this lease fit now? 'fits'; 'owner' (one of its tenant's own caps is full); 'full' (the deployment
-- is); 'stop' (the platform is). `due`: it may fill the caps, whatever its tier. `within`: likewise that of the deployment, as
-- its tenant has a guarantee left. `stand`: of those entitled, if there are any.
local function room(s, v, got, load, due, within, stand)
  local most, whole = nearer(load[5], load[6]), due or within
  if most > 0 then
    local top = whole and most or ceiling(most, v.tier)
    if stand and not within then top = top_beside(stand, most, v.tier, due) end
    if load[1] >= top then return 'full' end
  end
  local need, token_cap = v.input + v.output, load[7] * (whole and 1 or CEILING[v.tier])
  if token_cap > 0 and load[1] > 0 and load[4] + need > token_cap then return 'full' end
  local f = s.form
  for i = 1, f.ncap do -- the first is of all
    local limit = (i == 1 and not due) and ceiling(f.cap_most[i], v.tier) or f.cap_most[i]
    if (tonumber(got[5 + i]) or 0) + f.cap_amount[i] > limit then return i == 1 and 'stop' or 'owner' end
  end
  return 'fits'
end

-- Grants what waits as `member`: its caps, its turn, the message to its replica. `in_turn`: by virtual time; who is granted
-- what it is entitled to does not move the time at which others come anew. What a tier gets for its floor (`due`) is not preempted.
local function grant(s, v, text, member, owner, got, load, turns, in_turn, due, now)
  local request, replica = string.match(member, '^(%S+) (%S+)$')
  local deployment, tier = s.form.deployment, v.tier
  local queue = queue_of(deployment, tier)
  if in_turn then turns[VT + tier] = max(turns[VT + tier], tonumber(call('ZSCORE', queue, owner)) or 0) end
  call('ZINCRBY', queue, v.cost / s.form.weight, owner)
  leave_line(deployment, tier, owner, member)
  note_given(turns, tier, v.cost, now)
  if tier == 0 and not due then turns[PACED] = now + pace_of(v.cost, turns, load[8]) end
  turns[ASKED + tier] = max(0, turns[ASKED + tier] - v.cost)
  load[1], load[2], load[3], load[4] = load[1] + 1, load[2] - 1, now, load[4] + v.input + v.output
  if tier < 2 then load[9 + tier] = load[9 + tier] - 1 end
  set[2], set[3] = s.form.load, pack(LOAD, unpack(load, 1, LOAD_SIZE))
  set[4], set[5] = P .. 'd:' .. deployment, turns_text(turns)
  for i = 1, s.form.ncap do
    set[4 + 2 * i], set[5 + 2 * i] = key_of_cap(s, i), (tonumber(got[5 + i]) or 0) + s.form.cap_amount[i]
  end
  write(5 + 2 * s.form.ncap)
  change_lease(P .. 'lease:' .. replica, request, text, 'G' .. sub(text, 2))
  if not due then note_running(deployment, v, member, now) end
  call('ZADD', P .. 'unclaimed', now + CLAIM_US, member)
  call('RPUSH', P .. 'grants:' .. replica, string.format('G %s %.0f %.0f %.0f', request, unpack(turns, GRANTS, GRANTS + 2)))
  if load[2] > 0 then
    call('ZADD', P .. 'queues', now, deployment)
  else
    call('ZREM', P .. 'queues', deployment)
  end
end

-- Tells the replica that its request waits no more, and gives back what it took.
local function dismiss(epoch, member, now, message)
  local request, replica = string.match(member, '^(%S+) (%S+)$')
  drop(epoch, P .. 'lease:' .. replica, request, replica, now, false)
  call('RPUSH', P .. 'grants:' .. replica, message .. ' ' .. request)
end

-- Is this tier so far below its floor that a request of this cost is due? Most of it may be ahead, so that the mean is not
-- below the floor.
local function is_due(turns, tier, cost, now)
  return turns[GIVEN + tier] + cost / 4 <= floor_of(turns, tier, now) * (turns[GIVEN] + turns[GIVEN + 1] + turns[GIVEN + 2])
end

-- Tries the first request of one tenant: 'next' (granted or dropped), 'full', 'stop', 'owner' (not this tenant now) or
-- 'none' (not this tier now). `due`: only if its tier is below its floor, and then it may fill the whole cap. `within` and
-- `stand` as for `room`.
local function try_owner(epoch, deployment, tier, owner, due, within, in_turn, load, turns, stand, now)
  local member = call('ZRANGE', line_of(deployment, tier, owner), 0, 0)[1]
  if not member then
    call('ZREM', queue_of(deployment, tier), owner)
    return 'next'
  end
  local request, replica = string.match(member, '^(%S+) (%S+)$')
  local text = call('HGET', P .. 'lease:' .. replica, request)
  local s = text and caller_of(epoch, text, {P .. 'lease:' .. replica})
  local v = s and parse(text)
  if not s or v.state ~= 'W' or v.deadline <= now or not alive(replica, now) then
    if leave_line(deployment, tier, owner, member) then count_waiting(deployment, tier, -1, v and v.cost or 0) end
    if not v or v.state == 'W' then dismiss(epoch, member, now, 'X') end
    return 'next'
  end
  if due and not is_due(turns, tier, v.cost, now) then return 'none' end
  local got = read_all(s)
  local fits = room(s, v, got, load, due, within, stand)
  if fits ~= 'fits' then return fits end
  grant(s, v, text, member, owner, got, load, turns, in_turn, due, now)
  return 'next'
end

-- Tries the requests of one tier in their turn: 'next', 'full', 'stop' or 'none'. First of the tenants that have less than
-- they deserve, if any are entitled.
local function dispatch_tier(epoch, deployment, tier, due, load, turns, entitled, stand, now)
  local passed, known = {}, 0
  if entitled then
    for i, owner in ipairs(entitled.owners) do
      if stand.n[i] >= entitled.capability[i] then passed[owner], known = true, known + 1 end
    end
    for _, owner in ipairs(waiting_entitled(queue_of(deployment, tier), entitled, function(i)
      return not passed[entitled.owners[i]] and stand.n[i] < entitled.deserved[i]
    end)) do
      local result = try_owner(epoch, deployment, tier, owner, due, false, false, load, turns, stand, now)
      if result ~= 'owner' then return result end
      passed[owner], known = true, known + 1
    end
  end
  local nth, tried = 0, 0
  while tried < OWNERS_TRIED and nth < OWNERS_TRIED + known do
    local owner = call('ZRANGE', queue_of(deployment, tier), nth, nth)[1]
    if not owner then return 'none' end
    nth = nth + 1
    if not passed[owner] then
      tried = tried + 1
      local result = try_owner(epoch, deployment, tier, owner, due, false, true, load, turns, stand, now)
      if result ~= 'owner' then return result end
    end
  end
  return 'none'
end

-- Grants what waits by a guarantee: 'next', 'stop', 'full' or 'none'. The highest tier first.
local function dispatch_guaranteed(epoch, deployment, waiting, load, turns, entitled, stand, now)
  for tier = 2, 0, -1 do
    if waiting[tier] > 0 then
      local queue = queue_of(deployment, tier)
      for _, owner in ipairs(waiting_entitled(queue, entitled, function(i) return stand.within[i] end)) do
        local result = try_owner(epoch, deployment, tier, owner, false, true, false, load, turns, stand, now)
        if result ~= 'owner' then return result end
      end
    end
  end
  return 'none'
end

-- Grants to one deployment's waiters what fits, the highest tier first but for a tier that is below its floor: 'next'
-- (one was granted or dropped), 'full', 'stop' or 'empty'. `above`: only to tiers above this one.
local function dispatch_one(epoch, deployment, now, above)
  local got = call('MGET', P .. 'm:' .. deployment, P .. 'd:' .. deployment, P .. 'h:' .. deployment)
  local load, turns, entitled = {read_load(got[1])}, parse_turns(got[2]), entitled_of(deployment, got[3])
  if load[2] <= 0 then
    call('ZREM', P .. 'queues', deployment)
    return 'empty'
  end
  local waiting = {[0] = load[9], load[10], load[2] - load[9] - load[10]}
  local stand = entitled and stand_of(entitled, nearer(load[5], load[6]), load[5])
  if stand and not above and stand.guaranteed > 0 then
    local result = dispatch_guaranteed(epoch, deployment, waiting, load, turns, entitled, stand, now)
    if result ~= 'none' then return result end
  end
  for tier = 0, above and -1 or 1 do
    local higher = waiting[2] + (tier == 0 and waiting[1] or 0)
    if waiting[tier] > 0 and higher > 0 and is_due(turns, tier, 0, now) then
      local result = dispatch_tier(epoch, deployment, tier, true, load, turns, entitled, stand, now)
      if result ~= 'none' then return result end
    end
  end
  for tier = 2, above and above + 1 or 0, -1 do
    if waiting[tier] > 0 and (tier > 0 or now >= turns[PACED]) then
      local result = dispatch_tier(epoch, deployment, tier, false, load, turns, entitled, stand, now)
      if result ~= 'none' then return result end
    end
  end
  return 'full'
end

-- Grants what now fits: of deployment `own`, then of those that have waited longest for their turn. Bounded: what is left
-- over comes with the next release or tick.
local function dispatch(epoch, now, own, others_max)
  local left = GRANTS_MAX
  while own and left > 0 do
    local result = dispatch_one(epoch, own, now)
    if result == 'stop' then return end
    if result ~= 'next' then break end
    left = left - 1
  end
  local passed = own and {[own] = true} or {}
  while left > 0 and others_max > 0 do
    local progress = false
    for _, deployment in ipairs(call('ZRANGE', P .. 'queues', 0, others_max - 1)) do
      if not passed[deployment] and left > 0 then
        local result = dispatch_one(epoch, deployment, now)
        if result == 'stop' then return end
        if result == 'next' then
          left, progress = left - 1, true
        else
          passed[deployment] = true
        end
      end
    end
    if not progress then return end
  end
end

-- Makes a place in a full queue for a request of this tier: a waiter of a lower tier goes, the one that would be served
-- last; else one of a tenant that has more waiting than the newcomer. False when there is none.
local function make_place(epoch, s, tier, load, now)
  local waiting = {[0] = load[9], load[10], load[2] - load[9] - load[10]}
  for lower = 0, tier do
    if waiting[lower] > 0 then
      local owner = call('ZREVRANGE', queue_of(s.form.deployment, lower), 0, 0)[1]
      local line = owner and line_of(s.form.deployment, lower, owner)
      local mine = lower == tier and call('ZCARD', line_of(s.form.deployment, tier, s.owner)) + 1 or 0
      if owner and (lower < tier or (owner ~= s.owner and call('ZCARD', line) > mine)) then
        dismiss(epoch, call('ZREVRANGE', line, 0, 0)[1], now, 'E')
        return true
      end
      return false
    end
  end
  return false
end

-- What tenants are entitled to on a deployment, each in requests in flight: guarantee (kept free for the tenant, lent to
-- nobody), deserved (the tenant's when it wants it, lent while it does not), capability (never more; a cap among its demands).
--
-- The entitlements of a deployment come in the forms of all who call it, as text: '<tenant> <guarantee> <deserved>
-- <capability>' of each, parted by ';'. What such a tenant has in flight is the counter c:entitled:<deployment>:<tenant>.
-- h:<deployment> is the text as the last who came to wait had it, '' for none.
local ENTITLED_KNOWN_MAX = 1000
local known_entitled, known_count = {}, 0 -- by deployment, as it was seen last

-- Returns the entitlements of this text, nil for none.
function entitled_of(deployment, text)
  if not text or text == '' then return nil end
  local entitled = known_entitled[deployment]
  if entitled and entitled.text == text then return entitled end
  entitled = {
    text = text, get = {'MGET'}, owners = {}, place = {}, guarantee = {}, deserved = {}, capability = {}, guaranteed = 0,
  }
  for owner, guarantee, deserved, capability in string.gmatch(text, '([^ ;]+) (%d+) (%d+) (%d+)') do
    local i = #entitled.owners + 1
    entitled.get[i + 1] = P .. 'c:entitled:' .. deployment .. ':' .. owner
    entitled.owners[i], entitled.place[owner] = owner, i
    entitled.guarantee[i], entitled.deserved[i] = tonumber(guarantee), tonumber(deserved)
    entitled.capability[i] = tonumber(capability)
    entitled.guaranteed = entitled.guaranteed + entitled.guarantee[i]
  end
  if known_count >= ENTITLED_KNOWN_MAX then known_entitled, known_count = {}, 0 end
  if not known_entitled[deployment] then known_count = known_count + 1 end
  known_entitled[deployment] = entitled
  return entitled
end

-- Returns what is guaranteed while the adaptive cap (`most`) is below the configured one: the same part of it, so that a
-- deployment that holds less for a while still has room for those without a guarantee.
local function guaranteed_now(guarantee, most, configured)
  if configured > 0 and most > 0 and most < configured then return floor(guarantee * most / configured) end
  return guarantee
end

-- How the tenants stand: what each has in flight (n), which are below their guarantee (within), what is guaranteed in all,
-- and how much of that is in use.
local function stand_of(entitled, most, configured)
  local got, within, guaranteed, used = call(unpack(entitled.get)), {}, 0, 0
  for i = 1, #got do
    local n, guarantee = tonumber(got[i]) or 0, guaranteed_now(entitled.guarantee[i], most, configured)
    got[i], within[i] = n, n < guarantee
    guaranteed, used = guaranteed + guarantee, used + min(n, guarantee)
  end
  return {n = got, within = within, guaranteed = guaranteed, used = used}
end

-- How many may be in flight for a request to be let in whose tenant is not within its guarantee: the guaranteed places that
-- are in use, and of the others as many as its tier may fill. `whole`: it may fill them all.
local function top_beside(stand, most, tier, whole)
  local others = most - stand.guaranteed
  if others <= 0 then return 0 end
  return stand.used + (whole and others or ceiling(others, tier))
end

-- Returns the tenants that wait in this queue and of whom `wanted` is true, by their virtual time.
local function waiting_entitled(queue, entitled, wanted)
  local names, scores, found = {}, {}, {}
  for i, owner in ipairs(entitled.owners) do
    if wanted(i) then names[#names + 1] = owner end
  end
  if #names == 0 then return names end
  for i, score in ipairs(call('ZMSCORE', queue, unpack(names))) do
    if score then
      found[#found + 1] = names[i]
      scores[names[i]] = tonumber(score)
    end
  end
  table.sort(found, function(a, b)
    if scores[a] ~= scores[b] then return scores[a] < scores[b] end
    return a < b
  end)
  return found
end

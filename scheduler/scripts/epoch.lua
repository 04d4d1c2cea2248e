-- Names the server's present life. A lost or restarted server gets a new epoch; when other replicas may hold grants it
-- does not know, admission is fenced (`settle`) until they have registered them, or for `settle µs`.
--
-- An epoch is <server run id>:<mode>:<made µs>:<nonce>:L<layout>; mode f: the server was empty and so was its maker, l: it
-- was empty and its maker had an epoch (data lost), s: restarted with its data. Data of another layout is like none: who
-- keeps a newer one takes over from replicas with an older one, which are told so, and again the other way round once
-- none with the newer one lives.
--
-- KEYS: epoch, offset, settle, beat, awaited
-- ARGV: server run id, replica, nonce, settle µs, the epoch this replica had ('' when none), 'join' once all is
--       registered
-- Answer: {1, epoch} or {10} when replicas with a newer layout live
local function layout_of(epoch) return tonumber(string.match(epoch, ':L(%d+)$')) or 1 end

local function epoch(keys, args)
  local current, offset = unpack(call('MGET', keys[1], keys[2]))
  local now = server_now(offset)
  local settle_us, had = tonumber(args[4]), args[5]

  local layout = current and layout_of(current)
  local others = layout and layout ~= LAYOUT and call('ZCOUNT', keys[4], floor(now / 1000), '+inf') > 0
  if others and layout > LAYOUT then return {NEWER_LAYOUT} end
  if layout == LAYOUT and sub(current, 1, #args[1] + 1) == args[1] .. ':' then
    local mode, made = string.match(current, '^[^:]*:(%a):(%d+):')
    if args[6] == 'join' then
      call('SREM', keys[5], args[2])
      if mode == 's' and call('SCARD', keys[5]) == 0 then call('DEL', keys[3]) end
    elseif mode == 'f' and had ~= '' and had ~= current and made + settle_us > now then
      call('SET', keys[3], made + settle_us)
    end
    return {1, current}
  end

  local mode = layout == LAYOUT and 's' or ((had ~= '' or others) and 'l' or 'f')
  local fresh = string.format('%s:%s:%.0f:%s:L%d', args[1], mode, now, args[3], LAYOUT)
  call('SET', keys[1], fresh)
  call('DEL', keys[3], keys[5])
  local fenced = mode == 'l'
  if mode == 's' then
    for _, replica in ipairs(call('ZRANGEBYSCORE', keys[4], floor(now / 1000), '+inf')) do
      if replica ~= args[2] then
        call('SADD', keys[5], replica)
        fenced = true
      end
    end
  end
  if fenced then call('SET', keys[3], now + settle_us) end
  return {1, fresh}
end

register('epoch', epoch, 'allow-oom')

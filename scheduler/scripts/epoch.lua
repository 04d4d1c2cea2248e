-- Names the server's present life. A lost or restarted server gets a new epoch; when other replicas may hold grants it
-- does not know, admission is fenced (`settle`) until they have registered them, or for `settle µs`.
--
-- An epoch is <server run id>:<mode>:<made µs>:<nonce>; mode f: the server was empty and so was its maker, l: it was
-- empty and its maker had an epoch (data lost), s: restarted with its data.
--
-- KEYS: epoch, offset, settle, beat, awaited
-- ARGV: server run id, replica, nonce, settle µs, the epoch this replica had ('' when none), 'join' once all is
--       registered
-- Answer: {1, epoch}
--#common
local current, offset = unpack(call('MGET', KEYS[1], KEYS[2]))
local now = server_now(offset)
local settle_us, had = tonumber(ARGV[4]), ARGV[5]

if current and string.sub(current, 1, #ARGV[1] + 1) == ARGV[1] .. ':' then
  local mode, made = string.match(current, '^[^:]*:(%a):(%d+):')
  if ARGV[6] == 'join' then
    call('SREM', KEYS[5], ARGV[2])
    if mode == 's' and call('SCARD', KEYS[5]) == 0 then call('DEL', KEYS[3]) end
  elseif mode == 'f' and had ~= '' and had ~= current and made + settle_us > now then
    call('SET', KEYS[3], string.format('%.0f', made + settle_us))
  end
  return {1, current}
end

local mode = current and 's' or (had ~= '' and 'l' or 'f')
local fresh = string.format('%s:%s:%.0f:%s', ARGV[1], mode, now, ARGV[3])
call('SET', KEYS[1], fresh)
call('DEL', KEYS[3], KEYS[5])
local fenced = mode == 'l'
if mode == 's' then
  for _, replica in ipairs(call('ZRANGEBYSCORE', KEYS[4], math.floor(now / 1000), '+inf')) do
    if replica ~= ARGV[2] then
      call('SADD', KEYS[5], replica)
      fenced = true
    end
  end
end
if fenced then call('SET', KEYS[3], string.format('%.0f', now + settle_us)) end
return {1, fresh}

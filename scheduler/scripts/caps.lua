-- Sets the adaptive caps of a deployment, and grants what they let in.
--
-- KEYS: load
-- ARGV: epoch, deployment, most requests, most tokens (each 0: none), saturation
-- Answer: {1} or {6} when the epoch changed
local function caps(keys, args)
  local got = call('MGET', P .. 'epoch', P .. 'offset_us', keys[1])
  if got[1] ~= args[1] then return {EPOCH} end
  local load = {read_load(got[3])}
  load[6], load[7], load[8] = tonumber(args[3]), tonumber(args[4]), tonumber(args[5])
  call('SET', keys[1], pack(LOAD, unpack(load, 1, LOAD_SIZE)))
  local now = server_now(got[2])
  note_heat(args[2], load[8], now)
  if load[6] > 0 and load[1] > load[6] / 2 then recall_blocks(args[2], now) end
  if load[2] > 0 then
    dispatch(args[1], now, args[2], 0)
    press(args[1], args[2], now)
  end
  return {1}
end

register('caps', caps, 'allow-oom')

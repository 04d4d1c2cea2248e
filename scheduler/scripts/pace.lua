-- How fast batch is granted beside priority: one after the other, at most PACE.most times as fast as the deployment serves.
-- Granted many at once, as when a long request ends, their prompts fill the engine's steps, and a priority request waits for
-- a step to end before its own prompt is read, whatever the engine's policy (ADR 0037).
--
-- No pace where there is nothing to disturb: priority had less than a tenth of this request's cost lately, or the engine is
-- less than PACE.from full, so that new replicas are filled at once. Nor beyond PACE.gap_us, in which a prompt is read.
local PACE = {most = 1.4, from = 0.15, gap_us = 500000, lately = 0.1, given = 9, served = 11, busy_us = 12}

-- Returns for how many µs after a grant of this cost no batch is granted in its turn. `turns`: see queue.lua.
local function pace_of(cost, turns, saturation)
  local served = turns[PACE.served]
  if served <= 0 or turns[PACE.given] < PACE.lately * cost or saturation < PACE.from then return 0 end
  return min(PACE.gap_us, cost * turns[PACE.busy_us] / (served * PACE.most))
end

"""Callers that are held while their model wakes: how many over all gateways, and whose turn it is once it is ready.

They stand in one sorted set of each deployment, higher tiers first, then who came first. Once an engine is ready they
are let go in steps that double each second, so that a herd does not hit a cold engine at once; who comes meanwhile
stands behind them. A gateway that died holds nobody: whose has no heartbeat, or whose time is over, is put out once a
second.
"""

from typing import Protocol
from uuid import UUID

import msgspec

from core import keyspace
from core.resp import RespClient, RespError, RespUnavailable, pack, script
from core.tiers import Tier
from scheduler.commands import OFFSET

FIRST_STEP = 8  # let go in the first second for each engine that is ready; twice as many by the next, and so on
TIER_APART = 10**13  # of scores, which are milliseconds within a tier

_ENTER = script("""
local held, ramp, beats = KEYS[1], KEYS[2], KEYS[3]
local member, most, opened, first = ARGV[1], tonumber(ARGV[3]), ARGV[4], tonumber(ARGV[5])
local time = redis.call('TIME')
local now_us = time[1] * 1e6 + time[2] + (tonumber(redis.call('GET', KEYS[4])) or 0)
local known = redis.call('HMGET', ramp, 'looked', 'opened', 'at', 'gone')
if now_us - (tonumber(known[1]) or 0) >= 1e6 then
  redis.call('HSET', ramp, 'looked', string.format('%.0f', now_us))
  redis.call('PEXPIRE', ramp, 3600000)
  local alive = {}
  local flat = redis.call('ZRANGE', held, 0, -1, 'WITHSCORES')
  for at = 1, #flat, 2 do
    local replica, patience_ms = flat[at]:match('^(%S+) %S+ (%d+)$')
    if alive[replica] == nil then
      alive[replica] = (tonumber(redis.call('ZSCORE', beats, replica)) or 0) * 1000 > now_us
    end
    local late = (flat[at + 1] % tonumber(ARGV[6]) + patience_ms) * 1000 < now_us
    if late or not alive[replica] then redis.call('ZREM', held, flat[at]) end
  end
end
local rank = redis.call('ZRANK', held, member)
if not rank then
  local count = redis.call('ZCARD', held)
  if count >= most then return {-1, count} end
  redis.call('ZADD', held, ARGV[2] + math.floor(now_us / 1000), member)
  redis.call('PEXPIRE', held, 3600000)
  rank = redis.call('ZRANK', held, member)
end
if opened == '0' then return {0, rank} end
local at, gone = tonumber(known[3]) or 0, tonumber(known[4]) or 0
if known[2] ~= opened then
  at, gone = now_us, 0
  redis.call('HSET', ramp, 'opened', opened, 'at', string.format('%.0f', now_us), 'gone', 0)
end
local step = math.floor((now_us - at) / 1e6)
if gone + rank < first * 2 ^ math.min(step, 30) then
  redis.call('ZREM', held, member)
  redis.call('HINCRBY', ramp, 'gone', 1)
  return {1, 0}
end
return {2, math.ceil(at + (step + 1) * 1e6 - now_us)}
""")


class Place(msgspec.Struct, frozen=True):
    """What a caller is told: refused, let go, or to wait; `again_s` says for how long, 0 for a wake."""

    refused: bool = False
    go: bool = False
    again_s: float = 0.0


REFUSED, GO, WAIT = Place(refused=True), Place(go=True), Place()


class Waiter(msgspec.Struct, frozen=True, gc=False):
    """One caller, who may be put out `patience_ms` after it came."""

    deployment_id: UUID
    request_id: UUID
    tier: Tier
    patience_ms: int


class Held(Protocol):
    """Who is held; see `HeldHere` and `HeldEverywhere`."""

    @property
    def here(self) -> int:
        """How many are held in this process."""
        ...

    async def enter(self, waiter: Waiter, *, most: int, opened: int, engines: int) -> Place:
        """Take a place, or keep it, and say whether it is this caller's turn.

        Args:
            waiter: who.
            most: how many may be held of this deployment.
            opened: since when an engine is ready; 0: none is.
            engines: how many are ready.
        """
        ...

    def leave(self, waiter: Waiter) -> None:
        """Give the place back, if it has one; whoever was let go has none."""
        ...


class HeldHere:
    """Counts this process alone, and lets all go at once: for tests, and while Valkey is away."""

    def __init__(self) -> None:
        self._waiters: dict[UUID, set[UUID]] = {}

    @property
    def here(self) -> int:
        return sum(map(len, self._waiters.values()))

    async def enter(self, waiter: Waiter, *, most: int, opened: int, engines: int) -> Place:  # noqa: ARG002 - the protocol's
        waiters = self._waiters.setdefault(waiter.deployment_id, set())
        if waiter.request_id not in waiters and len(waiters) >= most:
            return REFUSED
        waiters.add(waiter.request_id)
        if opened:
            self.leave(waiter)
            return GO
        return WAIT

    def leave(self, waiter: Waiter) -> None:
        waiters = self._waiters.get(waiter.deployment_id)
        if waiters is not None:
            waiters.discard(waiter.request_id)
            if not waiters:
                del self._waiters[waiter.deployment_id]


class HeldEverywhere:
    """One count over all gateways, in Valkey. While that is away each holds as many as all together may."""

    def __init__(self, client: RespClient, replica: str) -> None:
        self._client = client
        self._replica = replica
        self._here = HeldHere()

    @property
    def here(self) -> int:
        return self._here.here

    async def enter(self, waiter: Waiter, *, most: int, opened: int, engines: int) -> Place:
        alone = await self._here.enter(waiter, most=most, opened=0, engines=engines)
        if alone.refused:
            return alone
        where = (keyspace.held(waiter.deployment_id), keyspace.ramp(waiter.deployment_id), keyspace.BEAT, OFFSET)
        score = (Tier.PRIORITY - waiter.tier) * TIER_APART
        args = (self._member(waiter), score, most, opened, engines * FIRST_STEP, TIER_APART)
        try:
            code, number = await self._client.eval(_ENTER, where, args)
        except (RespError, RespUnavailable):
            return await self._here.enter(waiter, most=most, opened=opened, engines=engines)
        if code == 0:
            return WAIT
        if code == 2:
            return Place(again_s=number / 1e6)
        self._here.leave(waiter)
        return GO if code == 1 else REFUSED

    def leave(self, waiter: Waiter) -> None:
        """Not waited for; should it be lost, the place lapses with the caller's time."""
        self._here.leave(waiter)
        self._client.post(pack("ZREM", keyspace.held(waiter.deployment_id), self._member(waiter)))

    def _member(self, waiter: Waiter) -> str:
        return f"{self._replica} {waiter.request_id.hex} {waiter.patience_ms}"

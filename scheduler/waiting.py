"""The requests of this replica that wait in the queue, and the messages that end their waiting."""

import asyncio
from collections.abc import Callable
from enum import Enum, auto
from typing import NamedTuple

from core import keyspace
from core.resp import RespClient
from core.tiers import Tier
from scheduler import commands

PRESS_AFTER = {Tier.PRIORITY: 0.5, Tier.STANDARD: 0.8}  # of the time it waits; scripts/preempt.lua decides by the same
Press = tuple[float, bytes]
"""The part of a wait after which a call is to be sent, and the call."""


class WaitResult(Enum):
    """How waiting ended."""

    GRANTED = auto()
    DROPPED = auto()  # taken out of the queue by the script: too late, or its grant was not claimed
    EVICTED = auto()  # taken out of a full queue for a request that goes before it
    DEADLINE = auto()  # still in the queue, as far as this replica knows
    LOST = auto()  # the queue lost it with Valkey's data: ask again


class Ended(NamedTuple):
    """How the waiting of one request ended; of a grant, by tier how many were ever granted while somebody waited."""

    result: WaitResult
    grants: tuple[int, ...] = ()


class Waiting:
    """Waiters by request key.

    Messages on the list ``{tg}:grants:<replica>``: ``G key b s p`` (granted; how many of each tier ever were while
    somebody waited), ``X key`` (dropped), ``E key`` (evicted); and of one that runs ``P<tier> key``: a request of that
    tier needs its place (`on_asked`). ``B deployment`` calls back what blocks have for it (`on_recalled`).
    """

    def __init__(
        self,
        client: RespClient,
        replica: str,
        on_asked: Callable[[bytes, int], None],
        on_recalled: Callable[[str], None],
    ) -> None:
        self._client = client
        self._on_asked = on_asked
        self._on_recalled = on_recalled
        self._replica = replica
        self._waiters: dict[bytes, asyncio.Future[Ended]] = {}
        # Messages that overtook the answer which says that the request waits.
        self._early: dict[bytes, bytes] = {}
        self._early_before: dict[bytes, bytes] = {}

    def __len__(self) -> int:
        return len(self._waiters)

    def __contains__(self, key: bytes) -> bool:
        return key in self._waiters

    def keys(self) -> set[bytes]:
        return set(self._waiters)

    async def start(self) -> None:
        await self._client.read_list(keyspace.grants(self._replica), self.take)

    async def wait(self, key: bytes, wait_s: float, press: Press | None = None) -> Ended:
        """Wait for at most `wait_s`; a cancelled caller is forgotten here, not in Valkey.

        `press`: has the place of a lower tier asked for when much of the time is gone; the script decides.
        """
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[Ended] = loop.create_future()
        self._waiters[key] = waiter
        timers = [loop.call_later(max(0.0, wait_s), self._end, key, WaitResult.DEADLINE)]
        if press is not None:
            timers.append(loop.call_later(max(0.0, wait_s) * press[0], self._client.post, press[1]))
        early = self._early.pop(key, None) or self._early_before.pop(key, None)
        if early is not None:
            self.take(early)
        try:
            return await waiter
        finally:
            for timer in timers:
                timer.cancel()
            self._waiters.pop(key, None)

    def take(self, item: bytes) -> None:
        """Handle one message; a grant counts once it is claimed, which the script allows for 2 s."""
        kind, key, *grants = item.split(b" ")
        if kind[:1] == b"P":
            self._on_asked(key, int(kind[1:]))
        elif kind == b"B":
            self._on_recalled(key.decode())
        elif key not in self._waiters:
            self._early[key] = item
        elif kind == b"G":
            claim = self._client.call("ZREM", commands.UNCLAIMED, b"%b %b" % (key, self._replica.encode()))
            claim.add_done_callback(lambda done: self._claimed(key, done, tuple(map(int, grants))))
        else:
            self._end(key, WaitResult.EVICTED if kind == b"E" else WaitResult.DROPPED)

    def _claimed(self, key: bytes, claim: asyncio.Future[int], grants: tuple[int, ...]) -> None:
        """Else the waiter waits on: its grant was withdrawn, or will be after 2 s, and what follows is told."""
        if not claim.cancelled() and claim.exception() is None and claim.result():
            self._end(key, WaitResult.GRANTED, grants)

    def lost(self, keys: set[bytes]) -> None:
        """End the waiting of requests that Valkey does not know any more."""
        for key in keys:
            self._end(key, WaitResult.LOST)

    def _end(self, key: bytes, result: WaitResult, grants: tuple[int, ...] = ()) -> None:
        waiter = self._waiters.get(key)
        if waiter is not None and not waiter.done():
            waiter.set_result(Ended(result, grants))

    def turn(self) -> None:
        """Forget early messages nobody came for; called every 2 s."""
        self._early_before, self._early = self._early, {}

"""Beside a gateway: the engines' figures for its router, and how that sees their replicas for operators.

Figures come from `{tg}:figures`, where the one reader of all engines leaves them. Their age is told by this process's
own clock, from when they were seen to change: clocks of other hosts do not matter.
"""

import asyncio
from collections.abc import Iterable
from contextlib import suppress

import msgspec

from core import keyspace
from core.clock import Clock
from core.resp import RespClient, RespError, RespUnavailable
from scheduler.router.replica import Figures
from scheduler.router.router import Report, Router
from scheduler.scraper import Reading

EVERY_S = 1.0
REPORT_EVERY = 2  # turns
REPORTS_LIVE_MS = 60_000
REPORT_OLD_US = 10_000_000  # a gateway that has said nothing for so long is gone
DEPLOYMENTS_MAX = 1000  # that are read and reported in one turn
_reading = msgspec.json.Decoder(Reading)
_report = msgspec.json.Decoder(Report)


class RoutingFeed:
    """Follows until cancelled; with Valkey away the figures grow old, which the router knows what to do about."""

    def __init__(self, client: RespClient, router: Router, *, gateway: str, clock: Clock) -> None:
        self._client = client
        self._router = router
        self._gateway = gateway
        self._clock = clock
        self._seen: dict[str, int] = {}
        self._turns = 0

    async def run(self) -> None:
        while True:
            with suppress(RespError, RespUnavailable, msgspec.MsgspecError):
                await self.turn()
            await asyncio.sleep(EVERY_S)

    async def turn(self) -> None:
        """Take in what is new, and say what is seen."""
        deployments = self._router.deployments[:DEPLOYMENTS_MAX]
        if not deployments:
            return
        found = await self._client.call("HMGET", keyspace.FIGURES, *deployments)
        for deployment, raw in zip(deployments, found, strict=True):
            if raw is not None:
                self._take(deployment, raw)
        for gone in self._seen.keys() - deployments:
            del self._seen[gone]
        self._turns += 1
        if self._turns % REPORT_EVERY == 0:
            for deployment in deployments:
                await self._say(deployment)

    def _take(self, deployment: str, raw: bytes) -> None:
        reading = _reading.decode(raw)
        before = self._seen.get(deployment)
        self._seen[deployment] = reading.at_us
        if before in {None, reading.at_us}:  # of what is met for the first time nobody knows how old it is
            return
        said = reading.replicas.items()
        figures = {name: Figures(one.running, one.waiting, one.kv_used) for name, one in said}
        self._router.take_figures(deployment, figures, self._clock.monotonic())

    async def _say(self, deployment: str) -> None:
        report = self._router.report(
            deployment, gateway=self._gateway, now=self._clock.monotonic(), now_us=self._clock.now_us()
        )
        if report is None:
            return
        key = keyspace.routing(deployment)
        await self._client.call("HSET", key, self._gateway, msgspec.json.encode(report))
        await self._client.call("PEXPIRE", key, REPORTS_LIVE_MS)


async def read_reports(client: RespClient, deployment: str, now_us: int) -> list[Report]:
    """Return what each gateway says of the replicas of a deployment; of those that have said it of late."""
    flat: Iterable[bytes] = await client.call("HGETALL", keyspace.routing(deployment))
    found = [_report.decode(raw) for raw in list(flat)[1::2]]
    fresh = [one for one in found if abs(now_us - one.at_us) <= REPORT_OLD_US]
    return sorted(fresh, key=lambda one: one.gateway)

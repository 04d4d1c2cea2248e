"""External deployments: servers of others, asked every few seconds whether they are well."""

import asyncio
from uuid import UUID

import msgspec

from catalog.types import Deployment
from core.clock import Clock
from engine import health
from engine.health import Health
from knative.types import ReplicaState

PROBE_EVERY_S = 5.0
WOKEN_EVERY_S = 1.0  # while somebody waits for it
PROBE_TIMEOUT_S = 3.0
PROBES_AT_ONCE = 8
BAD_MAX = 3  # failed probes in a row after which a server that was well is not offered


class Outside(msgspec.Struct, frozen=True):
    """What is known of one external server."""

    state: ReplicaState = ReplicaState.LOADING
    since_us: int = 0
    bad: int = 0
    reason: str = ""


def judge(outside: Outside, seen: Health, now_us: int) -> Outside:
    """Return what is known after a probe. One good answer makes it ready, `BAD_MAX` bad ones make it failed. Pure."""
    if seen.ok:
        since_us = outside.since_us if outside.state is ReplicaState.READY else now_us
        return Outside(ReplicaState.READY, since_us)
    bad = outside.bad + 1
    if outside.state is ReplicaState.READY and bad < BAD_MAX:
        return Outside(ReplicaState.READY, outside.since_us, bad, seen.reason)
    since_us = outside.since_us if outside.state is ReplicaState.FAILED else now_us
    return Outside(ReplicaState.FAILED, since_us, bad, seen.reason)


class ExternalWatch:
    """Probes in the background; `known` holds the last word on each server."""

    def __init__(self, clock: Clock, changed: asyncio.Event) -> None:
        self.known: dict[UUID, Outside] = {}
        self._clock = clock
        self._changed = changed
        self._tasks: dict[UUID, asyncio.Task[None]] = {}
        self._probed_at: dict[UUID, float] = {}
        self._seats = asyncio.Semaphore(PROBES_AT_ONCE)

    def look(self, deployments: dict[UUID, Deployment], credentials: dict[UUID, str], woken: set[UUID]) -> None:
        """Start the probes that are due; forget servers that are no longer deployed."""
        now = self._clock.monotonic()
        for gone in set(self.known) - set(deployments):
            self.known.pop(gone)
            self._probed_at.pop(gone, None)
        for deployment in deployments.values():
            self.known.setdefault(deployment.id, Outside(since_us=self._clock.now_us()))
            every_s = WOKEN_EVERY_S if deployment.id in woken else PROBE_EVERY_S
            due = now - self._probed_at.get(deployment.id, -PROBE_EVERY_S) >= every_s
            if due and deployment.id not in self._tasks:
                self._probed_at[deployment.id] = now
                task = asyncio.create_task(self._probe(deployment, credentials.get(deployment.id, "")))
                self._tasks[deployment.id] = task

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _probe(self, deployment: Deployment, credential: str) -> None:
        try:
            async with self._seats:
                seen = await health.probe(
                    deployment.base_url, deployment.engine, timeout_s=PROBE_TIMEOUT_S, credential=credential
                )
            if (before := self.known.get(deployment.id)) is not None:
                self.known[deployment.id] = judge(before, seen, self._clock.now_us())
                self._changed.set()
        finally:
            self._tasks.pop(deployment.id, None)

"""Requests stuck on a replica that says nothing are moved to another one: before their first byte, and once.

Silence alone is no sign: an engine at work on one long prompt, or on answers that are not streamed, has nothing to say.
So a silent one is asked for its health, once however many wait for it; only one that does not even answer that is hung.
What its callers wait for is then ended there and sent to another replica, as a retry and within the same budget. What
the budget does not allow stays, and is looked at again.
"""

import asyncio

from api.inference.gateway import Gateway
from api.inference.route import counted, most_are_full, replicas
from catalog.types import ServedModel
from engine import health
from engine.client import Target
from scheduler.router.fleet import SILENT_S

PROBE_S = 1.0
CLEARED_S = 5.0  # for so long a replica that answered is not asked again


class Watch:
    """Which replicas are being asked for their health, and which answered lately."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._asked: dict[Target, asyncio.Task[None]] = {}
        self._cleared: dict[Target, float] = {}  # until when, monotonic

    def look(self, now: float) -> None:
        """Ask the silent ones that callers wait for; called with each step of the sweeper."""
        cleared = self._cleared
        if cleared:
            self._cleared = cleared = {target: until for target, until in cleared.items() if now < until}
        for relay in list(self._gateway.relays):
            target = relay.target
            if not relay.movable or not is_silent(target, now) or target in self._asked or target in cleared:
                continue
            model = relay.offer.model
            if len(replicas(self._gateway, model)) > 1:  # else there is nothing to be moved to
                self._asked[target] = asyncio.create_task(self._ask(target, model))

    async def _ask(self, target: Target, model: ServedModel) -> None:
        try:
            if (await health.probe(target.url, model.engine, timeout_s=PROBE_S)).ok:
                self._cleared[target] = self._gateway.now + CLEARED_S
            elif target.silent_since:
                await self._empty(target, model)
        finally:
            self._asked.pop(target, None)

    async def _empty(self, target: Target, model: ServedModel) -> None:
        """Move what waits on a hung replica, as far as another one speaks and the budget goes."""
        gateway = self._gateway
        full = await most_are_full(gateway, model.deployment_id)
        stuck = [relay for relay in gateway.relays if relay.target is target and relay.movable]
        for relay in stuck:
            if not any(not is_silent(other, gateway.now) for other in replicas(gateway, model) if other is not target):
                return
            if not counted(gateway, model.deployment_id, full=full, sent="moved"):
                return
            relay.move()

    async def close(self) -> None:
        for task in list(self._asked.values()):
            task.cancel()
        await asyncio.gather(*self._asked.values(), return_exceptions=True)


def is_silent(target: Target, now: float) -> bool:
    """Whether it has said nothing for a while to those who wait for it."""
    return bool(target.silent_since) and now - target.silent_since >= SILENT_S

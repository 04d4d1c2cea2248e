"""A poster with its services, and spools to feed it."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from uuid import UUID

from prometheus_client import CollectorRegistry
from sqlalchemy import text

from billing.metrics import poster_metrics
from billing.poster import Poster
from billing.price_table import VersionPrices
from billing.spool import SpoolWriter
from billing.types import PriceSchedule, UsageEvent
from core import keyspace
from core.clock import SystemClock
from core.db import Sessions, transaction
from core.resp import RespClient
from tests.factories import billing as make
from tests.factories.credit_figures import figure_of


@dataclass(frozen=True)
class World:
    """A poster with its services and published prices."""

    sessions: Sessions
    client: RespClient
    prices: VersionPrices
    spool_dir: Path

    @cached_property
    def poster(self) -> Poster:
        return self.new_poster()

    def new_poster(self) -> Poster:
        """A poster that remembers nothing."""
        metrics = poster_metrics(CollectorRegistry())
        return Poster(self.sessions, self.client, self.spool_dir, SystemClock(), metrics)

    async def post_all(self) -> None:
        """A poster that remembers nothing posts all that is in the spools, and tells Valkey."""
        poster = self.new_poster()
        while await poster.step():
            pass

    async def tenant(self, credit: str) -> tuple[UUID, PriceSchedule]:
        tenant_id = await make.tenant(self.sessions, credit)
        return tenant_id, make.schedule(self.prices, tenant_id)

    async def rows(self, statement: str) -> list[tuple[object, ...]]:
        async with transaction(self.sessions) as session:
            return [tuple(row) for row in (await session.execute(text(statement))).all()]

    async def available(self, tenant_id: UUID) -> int:
        return await make.available(self.sessions, tenant_id)

    async def figures(self, tenant_id: UUID) -> tuple[int, int, int]:
        """Return a, o and the number of outstanding requests."""
        available, _, outstanding = await figure_of(self.client, tenant_id)
        return available, outstanding, await self.client.call("HLEN", keyspace.outstanding(tenant_id))


async def write(folder: Path, events: Sequence[UsageEvent], *, segment_bytes: int = 64 * 1024) -> None:
    """Write the events as a gateway does, and end."""
    writer = SpoolWriter(folder, clock=SystemClock(), segment_bytes=segment_bytes)
    writer.start(asyncio.get_running_loop())
    done = asyncio.Event()
    for event in events[:-1]:
        writer.append(event, lambda _: None)
    writer.append(events[-1], lambda _: done.set())
    await asyncio.wait_for(done.wait(), 20)
    writer.close()

"""A controller in this process over real Postgres and Valkey, with a clock that tests move, and a gateway's view."""

import asyncio
from pathlib import Path
from uuid import UUID

from prometheus_client import CollectorRegistry
from sqlalchemy.ext.asyncio import AsyncEngine

from catalog import deployments, observed
from catalog.types import Deployment, DeploymentChange, ObservedReplica
from core import db
from core.clock import ManualClock, SystemClock
from core.resp import RespClient
from knative.controller import Controller
from knative.leader import Leadership
from knative.lifecycle import Policy
from knative.local import LocalBackend, Record
from knative.types import DeploymentState, ReplicaState, Seat
from knative.wake import StateFeed
from knative.wakes import Timing
from tests.factories.catalog import NOW, SEALING_KEY
from tests.waiting import until

POLICY = Policy(attempts_max=2)


class CountingBackend(LocalBackend):
    """Counts the starts."""

    starts = 0

    def start(self, seat: Seat, deployment: Deployment) -> Timing:
        self.starts += 1
        return super().start(seat, deployment)


class Stage:
    """One controller in this process, its clock, and a gateway's view of it."""

    def __init__(
        self, sessions: db.Sessions, engine: AsyncEngine, client: RespClient, feed: StateFeed, folder: Path
    ) -> None:
        self.sessions = sessions
        self.client = client
        self.feed = feed
        self.folder = folder
        self.clock = ManualClock()
        self.backend = CountingBackend(folder, folder)
        self.leadership = Leadership(engine, sessions, "test", SystemClock())
        self.registry = CollectorRegistry()
        self.stop = asyncio.Event()
        self.leads = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        controller = Controller(
            self.sessions,
            self.client,
            self.leadership,
            self.backend,
            policy=POLICY,
            clock=self.clock,
            sealing=SEALING_KEY,
            registry=self.registry,
            tick_s=0.03,
        )
        self.task = asyncio.create_task(controller.run(self.stop, self.leads.set))
        await asyncio.wait_for(self.leads.wait(), 10)

    async def end(self) -> None:
        self.stop.set()
        if self.task is not None:
            await self.task

    async def reach(self, deployment_id: UUID, *kinds: ReplicaState, step_s: float = 0.0) -> DeploymentState:
        """Wait until a gateway sees one of these states; the clock moves by `step_s` at each look."""

        def there() -> bool:
            self.clock.advance(step_s)
            seen = self.feed.current(deployment_id)
            return seen is not None and seen.state in kinds

        await until(there)
        found = self.feed.current(deployment_id)
        assert found is not None
        return found

    async def offers(self, deployment_id: UUID, count: int, step_s: float = 0.0) -> DeploymentState:
        """Wait until a gateway sees so many engines that serve; the clock moves by `step_s` at each look."""

        def there() -> bool:
            self.clock.advance(step_s)
            seen = self.feed.current(deployment_id)
            return seen is not None and len(seen.endpoints) == count

        await until(there)
        found = self.feed.current(deployment_id)
        assert found is not None
        return found

    def record(self, deployment_id: UUID, index: int = 0) -> Record:
        record = self.backend.record(Seat(deployment_id, index))
        assert record is not None
        return record

    async def change(self, deployment_id: UUID, change: DeploymentChange) -> None:
        async with db.transaction(self.sessions) as session:
            await deployments.update(session, deployment_id, change, sealing_key=SEALING_KEY, now=NOW)

    async def replicas(self) -> list[ObservedReplica]:
        async with db.transaction(self.sessions) as session:
            return await observed.list_replicas(session)
